//! Memory of a device, and a mover that copies to it when the test says so.

use std::sync::{Arc, Mutex};

use pushgate_engine::mover::{MoveError, Mover};
use pushgate_link::region::RegionMemory;

use crate::common::*;

/// Memory of a device, which a [`SlowMover`] alone reaches.
#[derive(Default)]
pub struct DeviceMemory {
    pub bytes: Vec<u8>,
    /// The copies that were started: where to in `bytes`, the source's address, the length.
    pub copies: Vec<(u64, usize, usize)>,
    /// How many of the copies may be done.
    pub allowed: usize,
    /// Copies end with an error.
    pub fail: bool,
    /// Copies cannot be started.
    pub refuse: bool,
}

/// A mover whose copies are done when the test allows them.
#[derive(Clone, Default)]
pub struct SlowMover(pub Arc<Mutex<DeviceMemory>>);

/// The device address of the memory.
pub const DEVICE: u64 = 0x7000_0000_0000;

impl Mover for SlowMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        let mut m = self.0.lock().unwrap();
        if m.refuse {
            return Err(MoveError { length, reason: "no room for another copy".into() });
        }
        m.copies.push((dst - DEVICE, src, length));
        Ok(m.copies.len() as u64 - 1)
    }

    fn done(&mut self, ticket: u64) -> Result<bool, MoveError> {
        let m = &mut *self.0.lock().unwrap();
        let (dst, src, length) = m.copies[ticket as usize];
        if m.fail {
            return Err(MoveError { length, reason: "the device is gone".into() });
        }
        if ticket as usize >= m.allowed {
            return Ok(false);
        }
        // SAFETY: the endpoint keeps the source valid until the copy is reported as done.
        let src = unsafe { std::slice::from_raw_parts(src as *const u8, length) };
        m.bytes[dst as usize..][..length].copy_from_slice(src);
        Ok(true)
    }
}

/// A pair whose second end has 4096 bytes of device memory as a region; with its mover and the region's key.
pub fn with_mover() -> (Pair, SlowMover, u32) {
    let mut pair = Pair::default();
    let mover = SlowMover::default();
    mover.0.lock().unwrap().bytes = vec![0; 4096];
    pair.mover = Some(Box::new(mover.clone()));
    let key =
        pair.ends[1].add_region(RegionMemory::Device { address: DEVICE, exported: None }, 4096).unwrap();
    (pair, mover, key)
}
