//! P8: regions, and what may be done with them.

use pushgate_core::gate::{Gate, Need};
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::region::RegionMemory;
use pushgate_link::{Link, OwnRegions, RegionSends};
use pushgate_link_verbs::VerbsLink;

use crate::common::*;
use crate::device_memory::{DEVICE, with_mover};
use crate::sending::{sending, sending_locally};
use crate::{ANY, REFUSED, bytes, put, take};

#[test]
fn p8_a_region_stays_until_nobody_reads_what_goes_out_of_it() {
    let mut s = sending_locally(true, 200);
    assert!(s.pair.devices[0].post_from(region_send(5, s.lkey, 0), 200));
    s.pair.settle();
    assert!(!s.pair.ends[0].region_in_use(s.lkey), "the peer was told nothing of it yet");
    // There is a credit but no receive of its tag: the peer reads once there is one.
    s.pair.devices[1].post_recv(s.rkey, 0, 200, 4);
    s.pair.settle();
    assert!(s.pair.ends[0].region_in_use(s.lkey) && !s.pair.ends[0].remove_region(s.lkey));
    // No queue pair has this other region.
    let other = Region::new(64);
    let key = s.pair.ends[0].add_region(other.memory(), 64).unwrap();
    assert!(s.pair.ends[0].remove_region(key));
    s.pair.devices[1].post_recv(s.rkey, 0, 200, 5);
    s.pair.settle();
    assert!(s.to.read(0, 200) == s.from.read(0, 200));
    assert!(s.pair.ends[0].remove_region(s.lkey) && !s.pair.ends[0].remove_region(s.lkey));
    s.pair.assert_clean();

    // A queue pair that failed gives its regions back.
    let mut s = sending_locally(true, 200);
    s.pair.devices[1].post_recv(s.rkey, 0, 200, 4);
    assert!(s.pair.devices[0].post_from(region_send(5, s.lkey, 0), 200));
    s.pair.settle();
    assert!(!s.pair.ends[0].remove_region(s.lkey));
    s.pair.ends[0].fail(Status::new(abi::PUSHGATE_ABORTED));
    assert!(s.pair.ends[0].remove_region(s.lkey));
}

#[test]
fn p8_a_region_stays_while_a_copy_to_it_is_under_way() {
    let (mut pair, mover, key) = with_mover();
    let host = Region::new(64);
    let other = pair.ends[1].add_region(host.memory(), 64).unwrap();
    assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(1, 300)));
    (0..4).for_each(|i| _ = pair.poll(i % 2));
    assert_eq!(mover.0.lock().unwrap().copies.len(), 1);
    assert!(!pair.ends[1].remove_region(key));
    assert!(pair.ends[1].remove_region(other), "nothing goes there");
    mover.0.lock().unwrap().allowed = 1;
    pair.settle();
    assert!(pair.ends[1].remove_region(key));
    pair.assert_clean();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-endpoint"]
fn p8_over_rdma_a_region_stays_until_the_device_has_sent_what_goes_out_of_it() {
    rdma::must_be_chosen();
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let config = rdma::config();
    let [(mut a, ..), (mut b, ..)] = rdma::joined([&m[0], &m[1]], [false; 2], &config);
    let [from, to] = [0, 1].map(|_| Region::new(4096));
    a.add_region(17, &from.memory(), 4096);
    b.add_region(18, &to.memory(), 4096);
    let record =
        Record { rkey: 18, place: 17, flags: Record::REGION, length: 4096, ..Record::new(Opcode::Put) };
    let begin = std::time::Instant::now();
    let pass = |a: &mut VerbsLink, b: &mut VerbsLink| {
        assert!(begin.elapsed() < pushgate_tests::hang(), "it never ends");
        for qp in [a, b] {
            qp.poll_send(0).unwrap();
            qp.notify().unwrap();
        }
    };
    while a.takes_region(&record) != RegionSends::Yes {
        pass(&mut a, &mut b);
    }
    let gate = Gate::new(1 << GEOMETRY.rx_log, a.budget());
    let permit = gate.reserve(Need { bytes: 4096, receive: false }).unwrap();
    a.post_send(permit, 0, &record, &record.encode(0)).unwrap();
    // Whatever the peer claims to have, and although nothing else asks for a completion.
    assert!(a.region_in_use(17, 0) && a.region_in_use(17, 1) && !a.region_in_use(18, 0));
    while a.region_in_use(17, 1) {
        pass(&mut a, &mut b);
    }
    a.remove_region(17);
}

#[test]
fn p8_a_turn_ends_when_the_engine_has_copied_enough() {
    const HALF: usize = 1 << 19;
    let mut s = sending_locally(true, 8 * HALF);
    for i in 0..8 {
        s.pair.devices[1].post_recv(s.rkey, (i * HALF) as u64, HALF as u32, ANY);
        assert!(s.pair.devices[0].post_from(region_send(i as u32, s.lkey, (i * HALF) as u64), HALF));
    }
    (0..3).for_each(|_| _ = s.pair.poll(1));
    while s.pair.poll(0) {}
    for turn in 1..=4 {
        assert!(s.pair.poll(1));
        assert_eq!(s.pair.ends[1].counters().delivered, turn * 2);
    }
    s.pair.settle();
    assert!(s.to.read(0, 8 * HALF) == s.from.read(0, 8 * HALF));
    s.pair.assert_clean();
}

#[test]
fn p8_a_sender_that_names_memory_it_does_not_have_is_refused_and_hurts_nobody_else() {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
    let mut bystander = Pair::default();
    let page = abi::PUSHGATE_PAGE as usize;
    // SAFETY: new memory that no other code knows.
    let readable = unsafe {
        let at = mmap_anonymous(
            std::ptr::null_mut(),
            2 * page,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
        .unwrap();
        mprotect(at.cast::<u8>().add(page).cast(), page, MprotectFlags::empty()).unwrap();
        at as u64
    };
    let cases = [
        ("nothing", 0),
        ("nothing at all", 1 << 55),
        ("beyond what there can be", abi::PUSHGATE_DATA_MASK),
        ("the half of it", readable + page as u64 - 50),
    ];
    for (n, (what, address)) in cases.into_iter().enumerate() {
        let mut s = sending_locally(true, 200);
        s.pair.devices[1].post_recv(s.rkey, 0, 100, ANY);
        s.pair.settle();
        let record = Record { length: 100, id: 0, ..region_send(0, 0, address) };
        s.pair.forge(0, 0, &record);
        (0..4).for_each(|_| _ = s.pair.poll(1));
        assert_eq!(
            s.pair.devices[1].status().map(|s| (Some(s.code as u32), s.rank)),
            Some((REFUSED, Some(0))),
            "{what}"
        );
        assert!(s.pair.devices[1].try_recv().is_none(), "{what}");
        s.to.check_guards();
        s.pair.devices[1].own.check_gaps();
        assert!(bystander.devices[0].post(inline_send(n as u32), b"well"));
        bystander.settle();
        take(&mut bystander.devices[1], n as u32, b"well");
        bystander.settle();
    }
    bystander.assert_clean();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-endpoint"]
fn p8_over_rdma_no_message_out_of_a_region_is_longer_than_the_device_can_send() {
    rdma::must_be_chosen();
    let longest = rdma::device().longest_message() as usize;
    // Soft-RoCE sends 8 MiB. Others send as much as a message can have.
    if longest > 64 << 20 {
        return pushgate_tests::skip("no RDMA device here has a longest message of 64 MiB or less");
    }
    for (length, codes) in [(longest, [None; 2]), (longest + 1, [REFUSED; 2])] {
        let mut s = sending(true, length);
        s.pair.devices[1].post_recv(s.rkey, 0, length as u32, 1);
        s.pair.settle();
        assert!(s.pair.devices[0].post_from(region_send(1, s.lkey, 0), length));
        s.pair.settle();
        s.pair.tick(1);
        assert_eq!(s.pair.codes(), codes);
        let expected = if codes[0].is_none() { s.from.read(0, length) } else { vec![0; length] };
        assert!(s.to.read(0, length) == expected);
    }
}

#[test]
fn p8_only_memory_of_this_process_goes_out_of_a_region() {
    let mut s = sending(true, 100);
    s.pair.settle();
    assert_eq!(s.pair.ends[0].region_sends(), RegionSends::Yes);
    let device = RegionMemory::Device { address: DEVICE, exported: None };
    let lkey = s.pair.ends[0].add_region(device, 100).unwrap();
    s.pair.devices[1].post_recv(s.rkey, 0, 100, ANY);
    s.pair.settle();
    assert!(s.pair.devices[0].post_from(region_send(0, lkey, 0), 100));
    s.pair.settle();
    s.pair.tick(1);
    assert_eq!(s.pair.codes(), [REFUSED, REFUSED]);
    assert_eq!(s.pair.devices[1].status().unwrap().rank, Some(0));
}

#[test]
fn p8_a_put_outside_of_a_region_is_refused_and_hurts_nobody_else() {
    let mut bystander = Pair::default();
    // What was requested, derived from the right key: key, offset, length.
    type Wrong = fn(u32) -> (u32, u64, usize);
    let cases: [(&str, Wrong); 6] = [
        ("a byte too far", |key| (key, 1, 200)),
        ("far outside", |key| (key, 1 << 40, 1)),
        ("an offset that would wrap", |key| (key, abi::PUSHGATE_DATA_MASK, 200)),
        ("another tag", |key| (key ^ 1 << 31, 0, 8)),
        ("another index", |key| (key + 1, 0, 8)),
        ("no key at all", |_| (0, 0, 8)),
    ];
    for (n, (what, wrong)) in cases.into_iter().enumerate() {
        for inline in [false, true] {
            let mut pair = Pair::default();
            let region = Region::new(200);
            let key = pair.ends[1].add_region(region.memory(), 200).unwrap();
            assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(9, 200)));
            let (rkey, offset, length) = wrong(key);
            let length = if inline { length.min(16) } else { length };
            let flags = Record::SIGNALED | Record::WITH_SIGNAL | if inline { Record::INLINE } else { 0 };
            // One byte too far is an error only with all 200 of them.
            let offset = if inline && n == 0 { 200 - 15 } else { offset };
            assert!(pair.devices[0].post(Record { flags, ..put(rkey, offset, 1, 1) }, &bytes(1, length)));
            pair.settle();
            pair.tick(1);
            assert_eq!(pair.codes(), [REFUSED, REFUSED], "{what}");
            assert_eq!(pair.ends[1].counters().refused, 1, "{what}");
            assert_eq!((pair.devices[1].signal(0), pair.devices[1].signal(1)), (1, 0), "{what}");
            assert_eq!(region.read(0, 200), bytes(9, 200), "{what}");
            let last = std::iter::from_fn(|| pair.devices[0].poll_cq()).last().unwrap();
            assert_eq!(Some(last.status as u32), REFUSED, "{what}");
            region.check_guards();
            pair.devices[1].own.check_gaps();

            let tag = 2 * n as u32 + inline as u32;
            assert!(bystander.devices[0].post(inline_send(tag), b"well"));
            bystander.settle();
            take(&mut bystander.devices[1], tag, b"well");
            bystander.settle();
        }
    }
    bystander.assert_clean();
}

#[test]
fn p8_a_removed_region_is_refused() {
    let mut pair = Pair::default();
    let region = Region::new(64);
    let key = pair.ends[1].add_region(region.memory(), 64).unwrap();
    assert!(pair.ends[1].remove_region(key) && !pair.ends[1].remove_region(key));
    assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(1, 64)));
    pair.settle();
    pair.tick(1);
    assert_eq!(pair.codes(), [REFUSED, REFUSED]);
    assert_eq!(region.read(0, 64), [0; 64]);
}
