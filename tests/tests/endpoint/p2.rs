//! P2: slots that are torn, late, or never published.

use std::sync::atomic::Ordering;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, lap_of, set_inline};

use crate::common::*;
use crate::{REFUSED, STUCK, take};

#[test]
fn p2_a_slot_that_is_never_published_is_stuck_after_the_limit() {
    let mut pair = Pair::default();
    let limit = options(0).stuck_ns;
    // A hole with nothing after it is a kernel at work, however long it takes.
    let (slot, place) = pair.devices[0].take(1, false).unwrap();
    assert_eq!((slot, place), (0, 0));
    pair.settle();
    [0, limit, 10 * limit].into_iter().for_each(|now| pair.tick(now));
    assert_eq!(pair.codes(), [None, None]);

    let record = Record { flags: Record::INLINE | Record::SIGNALED, ..inline_send(1) };
    assert!(pair.devices[0].post(record, b"later"));
    let begin = 20 * limit;
    for now in [begin, begin + limit / 2, begin + limit - 1] {
        pair.settle();
        pair.tick(now);
        assert_eq!(pair.codes(), [None, None], "before the limit");
    }
    pair.tick(begin + limit);
    assert_eq!(pair.codes(), [STUCK, STUCK]);
    let (a, b) = (pair.devices[0].status().unwrap(), pair.devices[1].status().unwrap());
    assert_eq!((a.detail, b.rank), (0, Some(0)), "the slot, and whose it is");
    assert_eq!(pair.ends[0].counters().stuck, 1);
    assert!(pair.devices[1].try_recv().is_none(), "nothing overtook the hole");
}

#[test]
fn p2_a_hole_that_is_filled_in_time_is_nothing() {
    let mut pair = Pair::default();
    let limit = options(0).stuck_ns;
    for i in 0..40u32 {
        // Each time another slot is late, and at every look one is missing.
        let (slot, _) = pair.devices[0].take(0, false).unwrap();
        assert!(pair.devices[0].post(inline_send(2 * i + 1), b"b"));
        pair.settle();
        pair.tick(i as u64 * limit / 2);
        let mut words = Record { length: 1, ..inline_send(2 * i) }.encode(0);
        set_inline(&mut words, Opcode::Send, b"a");
        pair.devices[0].publish(slot, &words);
        pair.settle();
        take(&mut pair.devices[1], 2 * i, b"a");
        take(&mut pair.devices[1], 2 * i + 1, b"b");
        pair.settle();
    }
    pair.assert_clean();
}

#[test]
fn p2_a_half_written_slot_is_not_taken_and_stuck_if_it_stays_so() {
    let mut pair = Pair::default();
    let (slot, _) = pair.devices[0].take(0, false).unwrap();
    let words = Record { length: 0, ..inline_send(0) }.encode(lap_of(slot, GEOMETRY.slots_log));
    for (w, value) in pair.devices[0].wqe_ring()[..7].iter().zip(words) {
        w.store(value, Ordering::Relaxed);
    }
    pair.settle();
    pair.tick(0);
    assert_eq!((pair.codes(), pair.ends[0].counters().released), ([None, None], 0));
    pair.tick(options(0).stuck_ns);
    assert_eq!(pair.codes(), [STUCK, STUCK]);
}

#[test]
fn p2_a_word_of_another_lap_is_refused() {
    for word in 0..8 {
        let mut pair = Pair::default();
        assert!(pair.devices[0].post(inline_send(0), b"x"));
        pair.devices[0].wqe_ring()[word].fetch_add(1 << abi::PUSHGATE_LAP_SHIFT, Ordering::Relaxed);
        pair.settle();
        pair.tick(1);
        assert_eq!(pair.codes(), [REFUSED, REFUSED], "word {word}");
        let c = pair.ends[0].counters();
        assert_eq!((c.refused, c.released), (1, 0));
    }
}
