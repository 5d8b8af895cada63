//! P3: data before signal, with messages in place, in posted buffers, out of regions, and through a mover.

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::QpOptions;
use pushgate_link::region::RegionMemory;

use crate::common::*;
use crate::device_memory::{DEVICE, DeviceMemory, SlowMover, with_mover};
use crate::sending::{sending, sending_locally};
use crate::{ABORTED, ANY, SIGNALED, bytes, put, take, with_receives};

#[test]
fn p3_p8_a_device_that_sees_its_segments_alone_receives_in_its_landing_ring() {
    // A reader that keeps up and would otherwise receive in place.
    let mut pair = Pair::new(GEOMETRY, [options(1), QpOptions { slow_ns: 1_000_000, ..options(0) }]);
    pair.ends = pair.ends.map(|end| end.with_inbound_copied());
    for i in 0..50 {
        let content = bytes(i as u64, 5 * UNIT - i as usize);
        assert!(pair.devices[0].post(window_send(i), &content));
        pair.settle();
        let m = pair.devices[1].try_recv().expect("it is there");
        assert_ne!(m.flags & Record::LANDING, 0, "message {i}");
        let mut found = vec![0; m.length as usize];
        pair.devices[1].read(&m, &mut found);
        assert_eq!(found, content);
        pair.devices[1].release(1);
        pair.settle();
    }
    let c = pair.ends[1].counters();
    assert_eq!((c.copied_out, c.delivered), (50, 50));
    pair.assert_clean();
}

#[test]
fn p3_p4_messages_land_in_the_buffers_that_receives_name() {
    let (mut pair, region, key) = with_receives(1000);
    let post = |pair: &mut Pair, i: u32| match i % 2 {
        0 => assert!(pair.devices[0].post(inline_send(i), &bytes(i as u64, 17))),
        _ => assert!(pair.devices[0].post(window_send(i), &bytes(i as u64, 90))),
    };
    for i in 0..100 {
        post(&mut pair, i);
        pair.settle();
        assert!(pair.devices[1].try_recv().is_none(), "nothing arrives before a receive is posted");
        let tag = if i % 3 == 0 { i } else { abi::PUSHGATE_ANY_TAG };
        pair.devices[1].post_recv(key, 7 * i as u64, 100, tag);
        pair.settle();
        let m = pair.devices[1].try_recv().expect("it landed");
        let length = m.length as usize;
        assert_eq!((m.tag, m.flags & Record::BUFFER), (i, Record::BUFFER));
        assert_eq!(region.read(7 * i as usize, length), bytes(i as u64, length));
        pair.devices[1].release(1);
        pair.settle();
    }
    assert_eq!(pair.ends[0].counters().stall_receive, 100);
    pair.assert_clean();
    region.check_guards();
}

#[test]
fn p3_p5_a_send_out_of_a_region_lands_in_a_posted_buffer_and_then_completes() {
    const MIB: usize = 1 << 20;
    let mut s = sending(true, 4 * MIB);
    for (i, length) in [0, 1, 100, 4000, MIB, 3 * MIB + 77].into_iter().enumerate() {
        let (at, to) = (13 * i, 7 * i);
        s.pair.devices[1].post_recv(s.rkey, to as u64, length as u32, i as u32);
        let record = region_send(i as u32, s.lkey, at as u64);
        assert!(s.pair.devices[0].post_from(Record { flags: record.flags | SIGNALED, ..record }, length));
        // One pass of the receiver reads only a part, so that others get their turn.
        let mut passes = 0;
        while s.pair.ends[1].counters().delivered == i as u64 {
            s.pair.poll(0);
            assert!(s.pair.devices[0].poll_cq().is_none(), "the source is still read");
            passes += s.pair.poll(1) as usize;
        }
        let slices = if remote() { 0 } else { length.div_ceil(MIB) };
        assert!(passes >= slices, "{passes} passes for {length} bytes");
        s.pair.settle();
        let m = s.pair.devices[1].try_recv().expect("it landed");
        assert_eq!((m.tag, m.length as usize, m.flags), (i as u32, length, Record::BUFFER));
        assert!(s.to.read(to, length) == s.from.read(at, length), "message {i}");
        assert_eq!(s.pair.devices[0].poll_cq().map(|c| (c.wr_id, c.status)), Some((i as u32, 0)));
        s.pair.devices[1].release(1);
        s.pair.settle();
    }
    assert_eq!(s.pair.devices[0].units(), 0, "no room in the window was taken");
    let c = s.pair.ends[1].counters();
    // Over RDMA without a copy at either end; for the empty message there is nothing to write.
    let expected = if remote() { (5, 1) } else { (0, 6) };
    assert_eq!((c.placed, c.copies), expected);
    s.pair.assert_clean();
    s.to.check_guards();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-endpoint"]
fn p3_p4_over_rdma_a_long_send_is_written_to_the_receive_that_it_takes() {
    rdma::must_be_chosen();
    let (mut pair, region, key) = with_receives(2000);
    let mut placed = 0;
    for round in 0..10u32 {
        // Out of order by tag, in bursts, around the ring's end.
        for i in 0..5 {
            pair.devices[1].post_recv(key, i * 400, 400, if i == 2 { ANY } else { i as u32 });
        }
        let receives = [1, 2, 0, 4, 3].map(|i| i as usize);
        for (n, tag) in [1, 4, 0, 4, 3].into_iter().enumerate() {
            let length = [300, 400, 40, 129, 128][(n + round as usize) % 5];
            let content = bytes((tag + round) as u64, length);
            assert!(pair.devices[0].post(window_send(tag), &content));
            placed += (length > 128) as u64;
            pair.settle();
            let m = pair.devices[1].try_recv().expect("it landed");
            assert_eq!((m.tag, m.place, m.flags), (tag, round * 5 + receives[n] as u32, Record::BUFFER));
            assert_eq!(region.read(receives[n] * 400, length), content);
        }
        pair.devices[1].release(5);
        pair.settle();
    }
    assert_eq!(pair.ends[1].counters().placed, placed);
    pair.assert_clean();
    region.check_guards();
}

#[test]
fn p3_a_put_out_of_a_region_reaches_host_and_device_before_its_signal() {
    let mut s = sending_locally(false, 8000);
    let mover = SlowMover::default();
    mover.0.lock().unwrap().bytes = vec![0; 8000];
    s.pair.mover = Some(Box::new(mover.clone()));
    let device = RegionMemory::Device { address: DEVICE, exported: None };
    let device = s.pair.ends[1].add_region(device, 8000).unwrap();
    let from = |record: Record| Record {
        flags: record.flags | Record::REGION,
        place: s.lkey,
        place_offset: 100,
        ..record
    };
    assert!(s.pair.devices[0].post_from(from(put(s.rkey, 5, 0, 1)), 7000));
    assert!(s.pair.devices[0].post_from(from(put(device, 9, 1, 1)), 7000));
    assert!(s.pair.devices[0].post(inline_send(3), b"behind"));
    // Through the landing ring, 2048 bytes at a time.
    for step in 0..4 {
        if step > 0 {
            assert!(s.pair.poll(1), "the next piece was read");
            assert!(!s.pair.poll(1), "the device is waited for");
        }
        (0..20).for_each(|i| _ = s.pair.poll(i % 2));
        assert_eq!([0, 1].map(|i| s.pair.devices[1].signal(i)), [1, 0]);
        assert_eq!(mover.0.lock().unwrap().copies.len(), step + 1);
        assert!(s.pair.devices[1].try_recv().is_none());
        mover.0.lock().unwrap().allowed = step + 1;
    }
    s.pair.settle();
    assert_eq!(s.pair.devices[1].signal(1), 1);
    assert!(s.to.read(5, 7000) == s.from.read(100, 7000));
    assert!(mover.0.lock().unwrap().bytes[9..7009] == s.from.read(100, 7000));
    take(&mut s.pair.devices[1], 3, b"behind");
    s.pair.assert_clean();
}

#[test]
fn p3_a_relay_goes_by_the_longest_stretch_of_the_landing_ring() {
    // Units that lie at the ring's end, of 32: given back, or held.
    for (before, held, pieces) in [(31, 0, 4), (0, 31, 110), (30, 1, 4), (3, 20, 13), (20, 3, 6)] {
        let mut s = sending_locally(false, 8000);
        let mover = SlowMover::default();
        *mover.0.lock().unwrap() =
            DeviceMemory { bytes: vec![0; 8000], allowed: usize::MAX, ..Default::default() };
        s.pair.mover = Some(Box::new(mover.clone()));
        let device = RegionMemory::Device { address: DEVICE, exported: None };
        let device = s.pair.ends[1].add_region(device, 8000).unwrap();
        // Both before the first is given back; otherwise the second begins at the ring's start.
        for (tag, units) in [(0, before), (1, held)] {
            if units > 0 {
                assert!(s.pair.devices[0].post_from(region_send(tag, s.lkey, 0), units * UNIT));
            }
        }
        s.pair.settle();
        if before > 0 {
            take(&mut s.pair.devices[1], 0, &s.from.read(0, before * UNIT));
            s.pair.settle();
        }
        let flags = Record::REGION | Record::WITH_SIGNAL;
        let put = Record { flags, place: s.lkey, place_offset: 9, ..put(device, 0, 0, 1) };
        assert!(s.pair.devices[0].post_from(put, 7000));
        s.pair.settle();
        assert_eq!(s.pair.devices[1].signal(0), 1);
        let m = mover.0.lock().unwrap();
        assert_eq!(m.copies.len(), pieces, "{before} units before {held}");
        assert!(m.bytes[..7000] == s.from.read(9, 7000));
        if held > 0 {
            take(&mut s.pair.devices[1], 1, &s.from.read(0, held * UNIT));
        }
        s.pair.assert_clean();
    }
}

#[test]
fn p3_p5_signal_count_and_what_follows_wait_for_the_devices_copy() {
    let (mut pair, mover, key) = with_mover();
    assert!(pair.devices[0].post(put(key, 100, 0, 1), &bytes(1, 300)));
    assert!(
        pair.devices[0].post(
            Record { flags: Record::INLINE | Record::WITH_SIGNAL, ..put(key, 500, 1, 2) },
            &bytes(2, 16)
        )
    );
    assert!(pair.devices[0].post(inline_send(3), b"behind"));
    for _ in 0..50 {
        (0..2).for_each(|i| _ = pair.poll(i));
    }
    assert_eq!(mover.0.lock().unwrap().copies.len(), 2, "both are under way");
    assert_eq!((pair.devices[1].signal(0), pair.devices[0].delivered()), (0, 0));
    assert!(pair.devices[0].poll_cq().is_none());
    assert!(!pair.ends[1].remove_region(key), "not while its bytes are being moved");

    mover.0.lock().unwrap().allowed = 1;
    (0..4).for_each(|i| _ = pair.poll(i % 2));
    assert_eq!((pair.devices[1].signal(0), pair.devices[1].signal(1)), (1, 0));
    assert_eq!(mover.0.lock().unwrap().bytes[100..400], bytes(1, 300));
    assert!(pair.devices[1].try_recv().is_none());
    mover.0.lock().unwrap().allowed = 2;
    pair.settle();
    assert_eq!(mover.0.lock().unwrap().bytes[500..516], bytes(2, 16));
    assert_eq!(pair.devices[1].signal(1), 2);
    take(&mut pair.devices[1], 3, b"behind");
    assert_eq!(pair.devices[0].poll_cq().map(|c| c.status), Some(0));
    pair.assert_clean();
}

#[test]
fn p3_p7_nothing_is_delivered_after_a_copy_that_failed() {
    let (mut pair, mover, key) = with_mover();
    mover.0.lock().unwrap().fail = true;
    assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(1, 300)));
    let signal = Record { signal: 1, signal_value: 1, ..Record::new(Opcode::Signal) };
    assert!(pair.devices[0].post(signal, b""));
    assert!(pair.devices[0].post(inline_send(2), b"behind"));
    pair.settle();
    assert_eq!([0, 1].map(|i| pair.devices[1].signal(i)), [0, 0]);
    assert!(pair.devices[1].try_recv().is_none());
    pair.tick(1);
    assert_eq!(pair.codes(), [ABORTED, ABORTED]);
    assert_eq!(pair.devices[0].poll_cq().map(|c| c.status as u32), ABORTED);
}

#[test]
fn p3_p5_many_device_copies_are_under_way_and_end_in_order() {
    let receiver = QpOptions { posted_receives: true, ..options(0) };
    let geometry = Geometry { rx_log: 5, slots_log: 5, cq_log: 5, link_log: 5, ..GEOMETRY };
    let mut pair = Pair::new(geometry, [options(1), receiver]);
    let mover = SlowMover::default();
    mover.0.lock().unwrap().bytes = vec![0; 4096];
    pair.mover = Some(Box::new(mover.clone()));
    let region = RegionMemory::Device { address: DEVICE, exported: None };
    let key = pair.ends[1].add_region(region, 4096).unwrap();
    let host = Region::new(100);
    let host_key = pair.ends[1].add_region(host.memory(), 100).unwrap();
    // Twenty into the device, short and long, then one into the host's memory.
    for i in 0..20 {
        pair.devices[1].post_recv(key, i as u64 * 100, 100, ANY);
    }
    pair.devices[1].post_recv(host_key, 0, 100, ANY);
    let content = |i: u32| bytes(i as u64, if i.is_multiple_of(3) { 33 } else { 60 });
    for i in 0..21u32 {
        let record = if i.is_multiple_of(3) { inline_send(i) } else { window_send(i) };
        assert!(
            pair.devices[0].post(Record { flags: record.flags | Record::SIGNALED, ..record }, &content(i))
        );
    }
    let turn = |pair: &mut Pair| (0..40).for_each(|i| _ = pair.poll(i % 2));
    turn(&mut pair);
    assert_eq!(mover.0.lock().unwrap().copies.len(), 16, "a bound");
    assert!(pair.devices[1].try_recv().is_none() && pair.devices[0].poll_cq().is_none());
    assert!(!pair.ends[1].remove_region(key), "not while its bytes are being moved");
    for done in 1..=20 {
        mover.0.lock().unwrap().allowed = done;
        turn(&mut pair);
        let i = done as u32 - 1;
        let m = pair.devices[1].try_recv().expect("the oldest is done");
        assert_eq!((m.tag, m.place), (i, i));
        let found = mover.0.lock().unwrap().bytes[i as usize * 100..][..content(i).len()].to_vec();
        assert_eq!(found, content(i), "message {i}");
        assert_eq!(mover.0.lock().unwrap().copies.len(), (16 + done).min(20));
        assert_eq!(pair.devices[1].try_recv().is_some(), done == 20, "the host's memory is no short cut");
        assert_eq!(pair.devices[0].poll_cq().map(|c| c.wr_id), Some(i));
    }
    pair.settle();
    assert_eq!(host.read(0, 60), content(20));
    pair.assert_clean();
}

#[test]
fn p3_p7_after_a_copy_that_failed_those_under_way_are_only_waited_for() {
    let (mut pair, mover, key) = with_mover();
    for i in 0..3 {
        assert!(pair.devices[0].post(put(key, i * 300, i as u32, 1), &bytes(i, 300)));
    }
    (0..8).for_each(|i| _ = pair.poll(i % 2));
    assert_eq!(mover.0.lock().unwrap().copies.len(), 3);
    mover.0.lock().unwrap().fail = true;
    pair.poll(1);
    assert_eq!(pair.ends[1].status().map(|s| s.code as u32), ABORTED);
    mover.0.lock().unwrap().fail = false;
    assert!(!pair.ends[1].settle(&mut pair.mover), "a device writes yet");
    mover.0.lock().unwrap().allowed = 3;
    assert!(pair.ends[1].settle(&mut pair.mover));
    pair.poll(1);
    assert_eq!([0, 1, 2].map(|i| pair.devices[1].signal(i)), [0; 3]);
    pair.tick(1);
    assert_eq!((pair.codes(), pair.devices[0].delivered()), ([ABORTED, ABORTED], 0));
}
