//! P5: a place is given back when its reader is done, and slow readers are copied out.

use pushgate_engine::endpoint::QpOptions;

use crate::common::*;
use crate::{bytes, take};

#[test]
fn p5_a_slow_reader_is_copied_out_so_that_the_sender_goes_on() {
    // A quarter of the window of 32 units may be held in place: 8 units.
    let share = QpOptions { in_place_share: 64, ..options(0) };
    let mut pair = Pair::new(GEOMETRY, [options(1), share]);
    let content = |i: u32| bytes(i as u64, 4 * UNIT - i as usize);
    for i in 0..8 {
        assert!(pair.devices[0].post(window_send(i), &content(i)), "message {i}");
        pair.settle();
    }
    let c = pair.ends[1].counters();
    assert_eq!((c.copied_out, c.copies, c.delivered), (6, 6, 8), "two in place, then copies");
    // The first eight messages fill the window: what is copied out is not given back before the
    // messages held in place in front of it (P5).
    assert_eq!(pair.ends[0].counters().retired, 0);
    assert!(!pair.devices[0].post(window_send(8), &content(8)));
    for i in 0..2 {
        take(&mut pair.devices[1], i, &content(i));
    }
    pair.settle();
    assert_eq!(pair.ends[0].counters().retired, 8, "the reader still has six, in its landing ring");
    for i in 8..10 {
        assert!(pair.devices[0].post(window_send(i), &content(i)));
    }
    pair.settle();
    (2..10).for_each(|i| take(&mut pair.devices[1], i, &content(i)));
    pair.settle();
    assert_eq!(pair.ends[0].counters().retired, 10);
    pair.assert_clean();
}

#[test]
fn p5_nothing_is_copied_out_for_a_reader_that_keeps_up() {
    let hasty = QpOptions { in_place_share: 64, slow_ns: 1000, ..options(0) };
    let mut pair = Pair::new(GEOMETRY, [options(1), hasty]);
    let content = |i: u32| bytes(i as u64, 4 * UNIT);
    let mut posted = 0;
    for i in 0..50u64 {
        // The reader holds far more than its share, but gives messages back all the time.
        while pair.devices[0].post(window_send(posted), &content(posted)) {
            posted += 1;
        }
        pair.settle();
        pair.tick(1_000_000 + i * 900);
        take(&mut pair.devices[1], i as u32, &content(i as u32));
        pair.settle();
    }
    assert_eq!(pair.ends[1].counters().copied_out, 0);
    // Now the reader stops.
    pair.tick(1_000_000 + 50 * 900);
    pair.tick(1_000_000 + 51 * 900);
    pair.tick(1_000_000 + 52 * 900);
    while pair.devices[0].post(window_send(posted), &content(posted)) {
        posted += 1;
    }
    pair.settle();
    assert!(pair.ends[1].counters().copied_out > 0);
    for i in 50..posted {
        take(&mut pair.devices[1], i, &content(i));
        pair.settle();
    }
    pair.assert_clean();
}

#[test]
fn p5_a_place_is_given_back_only_when_its_reader_is_done() {
    let mut pair = Pair::default();
    let whole = UNIT << GEOMETRY.window_log;
    assert!(pair.devices[0].post(window_send(0), &bytes(1, whole)));
    pair.settle();
    assert_eq!(pair.devices[0].delivered(), 1, "the peer has it");
    assert!(!pair.devices[0].post(window_send(1), &bytes(2, 1)), "but reads it yet");
    take(&mut pair.devices[1], 0, &bytes(1, whole));
    assert!(!pair.devices[0].post(window_send(1), &bytes(2, 1)), "not before the engines know");
    pair.settle();
    assert!(pair.devices[0].post(window_send(1), &bytes(2, 1)));
    pair.assert_clean();
}
