//! P7: how a queue pair ends, at both ends.

use pushgate_core::refusal::Refusal;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpMemory};
use pushgate_link::RegionSends;
use pushgate_link::region::RegionMemory;

use crate::common::*;
use crate::device_memory::with_mover;
use crate::{ABORTED, REFUSED, bytes, put, with_receives};

#[test]
fn p7_receives_that_do_not_fit_end_both_sides_with_a_status() {
    // What was posted, derived from the right key: key, offset, length, tag.
    type Receive = fn(u32) -> (u32, u64, u32, u32);
    let cases: [(&str, Receive); 3] = [
        ("too small a buffer", |key| (key, 0, 29, 5)),
        ("a buffer that leaves its region", |key| (key, 171, 30, 5)),
        ("no such region", |key| (key ^ 0x8000_0000, 0, 100, 5)),
    ];
    for (what, receive) in cases {
        let (mut pair, region, key) = with_receives(200);
        let (key, offset, length, tag) = receive(key);
        pair.devices[1].post_recv(key, offset, length, tag);
        let record = Record { flags: Record::INLINE | Record::SIGNALED, ..inline_send(5) };
        assert!(pair.devices[0].post(record, &bytes(5, 30)));
        pair.settle();
        pair.tick(1);
        assert_eq!(pair.codes(), [REFUSED, REFUSED], "{what}");
        // The end at fault: it sent more than there was room for, or posted something that is no
        // room.
        let culprit = if what == "too small a buffer" { 0 } else { 1 };
        assert_eq!(pair.devices[1].status().unwrap().rank, Some(culprit), "{what}");
        assert!(pair.devices[1].try_recv().is_none(), "{what}");
        let cqe = pair.devices[0].poll_cq().unwrap();
        assert_eq!((cqe.wr_id, Some(cqe.status as u32)), (5, REFUSED), "{what}");
        assert_eq!(region.read(0, 200), vec![0; 200], "{what}");
        region.check_guards();
    }
}

#[test]
fn p7_p8_where_the_peer_cannot_read_a_region_send_is_refused_with_a_sentence() {
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    // A process that exists and is not this one: its memory is not what the offer names.
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let own = std::process::id();
    let cases = [
        (None, true, "does not know this process"),
        (Some(other.id()), true, "proxy = thread"),
        // A proxy process whose program has the segment at the same address.
        (Some(own), false, "proxy = thread"),
    ];
    for (pid, in_program, sentence) in cases {
        m.iter().for_each(|m| m.reset());
        let reader = QpMemory { peer_pid: pid, ..m[1].joined(&m[0], None) };
        let sender = QpMemory { in_program, ..m[0].joined(&m[1], None) };
        let mut sender = Endpoint::local(sender, options(1)).unwrap();
        assert!(matches!(sender.region_sends(), RegionSends::Unknown));
        let region = Region::new(100);
        let lkey = sender.add_region(region.memory(), 100).unwrap();
        let mut device = Device::new(&m[0], &m[1]);
        assert!(device.post_from(region_send(0, lkey, 0), 100));
        // The sender waits until the peer has reported.
        (0..4).for_each(|_| _ = sender.poll(&mut None));
        assert!(sender.status().is_none() && !sender.has_work());
        let mut reader = Endpoint::local(reader, options(0)).unwrap();
        reader.poll(&mut None);
        assert!(sender.has_work());
        let RegionSends::No(why) = sender.region_sends() else { panic!("{pid:?} was read") };
        assert!(why.contains(sentence) && why.contains("window"), "{why}");
        sender.poll(&mut None);
        let status = sender.status().unwrap();
        assert_eq!((Some(status.code as u32), status.rank), (REFUSED, Some(0)));
        // A sender that ignores this is refused by the reader.
        ring_forge(&m[0], &Record { length: 8, ..region_send(0, 0, region_address(&region)) });
        reader.poll(&mut None);
        let status = reader.status().unwrap();
        assert_eq!((Some(status.code as u32), status.rank), (REFUSED, Some(0)));
    }
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn p7_a_copy_that_cannot_begin_is_laid_to_the_side_whose_device_it_is() {
    let (mut pair, mover, key) = with_mover();
    mover.0.lock().unwrap().refuse = true;
    assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(1, 300)));
    pair.settle();
    pair.tick(1);
    assert_eq!(pair.codes(), [REFUSED, REFUSED]);
    assert_eq!([0, 1].map(|i| pair.devices[i].status().unwrap().rank), [Some(1), Some(1)]);
    assert_eq!(pair.devices[1].signal(0), 0);
}

#[test]
fn p7_an_end_reaches_the_peer_and_every_signaled_wqe_completes_once() {
    for limit in [0, 3, 100] {
        let mut pair = Pair::default();
        let rx = 1 << GEOMETRY.rx_log;
        // Some are retired, some are at the peer, one waits for a receive.
        for i in 0..rx + 3 {
            let record = Record { flags: Record::SIGNALED | Record::INLINE, ..inline_send(i) };
            assert!(pair.devices[0].post(record, b"x"));
            if i < limit {
                pair.settle();
            }
        }
        if limit > 0 {
            assert!(pair.ends[0].counters().retired > 0);
        }
        let done = pair.ends[0].counters().retired as u32;
        let lost = Status { rank: Some(7), detail: 9, ..Status::new(abi::PUSHGATE_PEER_LOST) };
        pair.ends[0].fail(lost);
        assert_eq!(pair.devices[0].status(), Some(lost));
        pair.settle();
        pair.tick(1);
        let told = pair.devices[1].status().expect("the peer is told");
        assert_eq!((told.code, told.detail), (lost.code, 9));
        // A second cause changes nothing.
        pair.ends.iter_mut().for_each(|e| e.fail(Status::new(abi::PUSHGATE_ABORTED)));
        pair.settle();
        pair.tick(2);
        assert_eq!(pair.devices[0].status(), Some(lost));
        let mut seen = Vec::new();
        while let Some(c) = pair.devices[0].poll_cq() {
            let expected = if c.wr_id < done { abi::PUSHGATE_OK } else { abi::PUSHGATE_PEER_LOST };
            assert_eq!(c.status as u32, expected, "{c:?}");
            seen.push(c.wr_id);
        }
        // This includes those that the engine never took.
        assert!(seen.iter().copied().eq(0..rx + 3), "{done} done, {limit}: {seen:?}");
    }
}

#[test]
fn p7_a_refused_wqe_completes_after_those_before_it_and_nothing_after_it_goes_out() {
    let mut pair = Pair::default();
    pair.settle();
    let signaled = |i| Record { flags: Record::SIGNALED | Record::INLINE, ..inline_send(i) };
    for i in 0..2 {
        assert!(pair.devices[0].post(signaled(i), b"x"));
    }
    let wrong = Record { flags: Record::SIGNALED, id: 2, signal: 4, ..Record::new(Opcode::Signal) };
    assert!(pair.devices[0].post(wrong, b""));
    assert!(pair.devices[0].post(signaled(3), b"x"));
    pair.poll(0);
    pair.tick(1);
    pair.settle();
    assert_eq!(pair.codes(), [REFUSED, REFUSED]);
    let status = pair.devices[0].status().unwrap();
    assert_eq!(status, Refusal::Signal.status(0, Some(2)), "rank, slot and reason");
    let cqes: Vec<_> =
        std::iter::from_fn(|| pair.devices[0].poll_cq()).map(|c| (c.wr_id, c.status)).collect();
    let code = abi::PUSHGATE_REFUSED as u8;
    assert_eq!(cqes, [(0, code), (1, code), (2, code), (3, code)]);
    assert_eq!(pair.ends[0].counters().released, 2);
}

#[test]
fn p7_nothing_is_posted_in_the_pass_that_failed() {
    let mut pair = Pair::default();
    pair.settle();
    assert!(
        pair.devices[0].post(Record { flags: Record::INLINE | Record::SIGNALED, ..inline_send(0) }, b"x")
    );
    // The device of side 0 gives back a message that it never had.
    pair.devices[0].release(1);
    pair.poll(0);
    assert_eq!(pair.devices[0].status().map(|s| s.code as u32), REFUSED);
    assert_eq!(pair.ends[0].counters().released, 0);
    pair.tick(1);
    pair.poll(1);
    assert!(pair.devices[1].try_recv().is_none());
}

#[test]
fn p7_closing_tells_the_peer_only_if_it_waits_for_something() {
    let mut pair = Pair::default();
    pair.ends[0].close();
    pair.tick(1);
    assert_eq!(pair.devices.each_ref().map(|d| d.status().map(|s| s.code as u32)), [ABORTED, None]);

    let mut pair = Pair::default();
    assert!(pair.devices[0].post(window_send(0), b"x"));
    pair.settle();
    pair.ends[0].close();
    pair.tick(1);
    assert_eq!(pair.codes(), [ABORTED, ABORTED]);
}

/// Publishes a record in the link segment of an end that has sent nothing yet.
fn ring_forge(from: &Memory, record: &Record) {
    let log = from.geometry.link_log;
    let slots = from.link.words(abi::PUSHGATE_LINK_RING as usize, 8 << log);
    pushgate_link::ring::publish(slots, 0, log, &record.encode(0));
}

fn region_address(region: &Region) -> u64 {
    let RegionMemory::Host { address, .. } = region.memory() else { unreachable!() };
    address as u64
}
