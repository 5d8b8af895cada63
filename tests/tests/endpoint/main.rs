//! Tests two endpoints joined by a queue pair (see `common`), with a device on each side, in one thread and virtual time.
//!
//! Tests' names begin with the promises that they test, and each test stands in the file of the first one.

#[path = "../common/mod.rs"]
mod common;

mod device_memory;
mod p1;
mod p2;
mod p3;
mod p4;
mod p5;
mod p6;
mod p7;
mod p8;
mod p8_hostile;
mod sending;

use common::*;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_engine::endpoint::QpOptions;

const OVERRUN: Option<u32> = Some(abi::PUSHGATE_OVERRUN);
const REFUSED: Option<u32> = Some(abi::PUSHGATE_REFUSED);
const ABORTED: Option<u32> = Some(abi::PUSHGATE_ABORTED);
const STUCK: Option<u32> = Some(abi::PUSHGATE_STUCK);

const ANY: u32 = abi::PUSHGATE_ANY_TAG;
const SIGNALED: u8 = Record::SIGNALED;

/// The content of a message: `length` bytes that tell `seed`.
fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut b = vec![0; length];
    pattern(seed, &mut b);
    b
}

/// Receives one message, checks tag and content, and releases it.
fn take(device: &mut Device, tag: u32, content: &[u8]) {
    let m = device.try_recv().unwrap_or_else(|| panic!("message {tag} is not there"));
    let mut found = vec![0; m.length as usize];
    device.read(&m, &mut found);
    assert_eq!((m.tag, &found[..]), (tag, content));
    device.release(1);
}

/// A PUT to a region, which sets a signal and wants a completion.
fn put(rkey: u32, offset: u64, signal: u32, value: u64) -> Record {
    Record {
        flags: Record::WITH_SIGNAL | Record::SIGNALED,
        rkey,
        remote_offset: offset,
        signal,
        signal_value: value,
        ..Record::new(Opcode::Put)
    }
}

/// A pair whose second end receives in posted buffers; with a region for them at that end, and the region's key.
fn with_receives(bytes: usize) -> (Pair, Region, u32) {
    let receiver = QpOptions { posted_receives: true, ..options(0) };
    let mut pair = Pair::new(GEOMETRY, [options(1), receiver]);
    let region = Region::new(bytes);
    let key = pair.ends[1].add_region(region.memory(), bytes as u64).unwrap();
    (pair, region, key)
}
