//! P4: credits, overruns, and the receive that a message takes.

use proptest::prelude::*;
use proptest::test_runner::Config;
use pushgate_core::refusal::{Lengths, Refusal};
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::QpOptions;

use crate::common::*;
use crate::sending::{sending, sending_locally};
use crate::{ABORTED, ANY, OVERRUN, REFUSED, bytes, take, with_receives};

#[test]
fn p4_a_receiver_that_takes_nothing_stalls_the_sender_and_loses_nothing() {
    let mut pair = Pair::default();
    let receives = 1 << GEOMETRY.rx_log;
    pair.settle(); // The grants arrive.
    let (mut sent, mut now) = (0u32, 0);
    let post = |pair: &mut Pair, sent: &mut u32| {
        while pair.devices[0].post(inline_send(*sent), &bytes(*sent as u64, 9)) {
            *sent += 1;
        }
    };
    // For long: minutes of virtual time, and more messages than there is room for.
    for _ in 0..1000 {
        post(&mut pair, &mut sent);
        pair.settle();
        now += 1_000_000_000;
        pair.tick(now);
    }
    let c = pair.ends[0].counters();
    assert_eq!(c.released, receives);
    assert_eq!(c.stall_receive, 1, "one message waits: counted once, not at each look");
    assert_eq!(c.credit_stalls(), 1);
    assert_eq!(sent as u64, receives + (1 << GEOMETRY.slots_log), "what waits fills the WQE ring");
    pair.assert_clean();

    for tag in 0..200 {
        take(&mut pair.devices[1], tag, &bytes(tag as u64, 9));
        pair.settle();
        post(&mut pair, &mut sent);
        pair.settle();
    }
    let c = pair.ends[0].counters();
    assert!(c.stall_receive > 100 && c.stall_receive <= sent as u64, "{c:?}");
    pair.assert_clean();
}

#[test]
fn p4_a_message_that_needs_no_receive_waits_after_one_that_does() {
    let mut pair = Pair::default();
    for i in 0..=1 << GEOMETRY.rx_log {
        assert!(pair.devices[0].post(inline_send(i), b"x"));
    }
    let signal = Record { signal: 1, signal_value: 5, ..Record::new(Opcode::Signal) };
    assert!(pair.devices[0].post(signal, b""));
    pair.settle();
    assert_eq!(pair.devices[1].signal(1), 0, "it would have overtaken");
    take(&mut pair.devices[1], 0, b"x");
    pair.settle();
    assert_eq!(pair.devices[1].signal(1), 5);
    pair.assert_clean();
}

#[test]
fn p4_a_full_link_ring_stalls_on_the_send_queue() {
    let mut pair = Pair::new(Geometry { link_log: 1, ..GEOMETRY }, [options(1), options(0)]);
    for i in 0..5 {
        assert!(pair.devices[0].post(inline_send(i), b"x"));
    }
    pair.poll(1); // Grants receives.
    (0..10).for_each(|_| _ = pair.poll(0));
    let c = pair.ends[0].counters();
    assert_eq!((c.released, c.stall_send_queue, c.credit_stalls()), (2, 1, 1));
    pair.settle();
    (0..5).for_each(|i| take(&mut pair.devices[1], i, b"x"));
    pair.assert_clean();
}

#[test]
fn p4_a_sender_without_credit_is_an_overrun_that_both_sides_see() {
    let ungated = QpOptions { ungated: true, ..options(1) };
    let mut pair = Pair::new(GEOMETRY, [ungated, options(0)]);
    let receives = 1 << GEOMETRY.rx_log;
    for i in 0..=receives {
        let record = Record { flags: Record::INLINE | Record::SIGNALED, ..inline_send(i) };
        assert!(pair.devices[0].post(record, b"flood"));
    }
    (0..2).for_each(|i| _ = pair.poll(i));
    assert_eq!(pair.codes(), [None, OVERRUN]);
    let status = pair.devices[1].status().unwrap();
    assert_eq!((status.rank, status.detail), (Some(0), receives + 1), "it names the sender and the message");
    pair.tick(1);
    assert_eq!(pair.codes(), [OVERRUN, OVERRUN]);
    let c = pair.ends[1].counters();
    assert_eq!((c.dropped, c.delivered), (1, receives as u64));
    // Nothing that the receiver holds was overwritten.
    (0..receives).for_each(|i| take(&mut pair.devices[1], i, b"flood"));
    assert!(pair.devices[1].try_recv().is_none());
}

#[test]
fn p4_an_ungated_sender_with_a_quick_reader_is_no_overrun() {
    let ungated = QpOptions { ungated: true, ..options(1) };
    let mut pair = Pair::new(GEOMETRY, [ungated, options(0)]);
    for i in 0..100 {
        assert!(pair.devices[0].post(inline_send(i), b"x"));
        pair.settle();
        take(&mut pair.devices[1], i, b"x");
        pair.settle();
    }
    pair.assert_clean();
}

#[test]
fn p4_a_skipped_sequence_number_is_an_overrun() {
    let mut pair = Pair::default();
    pair.poll(1); // Grants receives.
    for (slot, sequence) in [0, 1, 3].into_iter().enumerate() {
        pair.forge(0, slot as u64, &inline_send(sequence));
    }
    pair.poll(1);
    assert_eq!(pair.devices[1].status().map(|s| s.code as u32), OVERRUN);
    let c = pair.ends[1].counters();
    assert_eq!((c.delivered, c.dropped), (2, 1));
    take(&mut pair.devices[1], 0, b"");
    take(&mut pair.devices[1], 1, b"");
    assert!(pair.devices[1].try_recv().is_none(), "nothing after the gap is shown");
    pair.tick(1);
    assert_eq!(pair.codes(), [OVERRUN, OVERRUN]);
}

#[test]
fn p4_an_overwritten_link_slot_is_an_overrun() {
    let mut pair = Pair::default();
    // The second lap came before the first was read.
    pair.forge(0, 1 << GEOMETRY.link_log, &inline_send(16));
    pair.poll(1);
    pair.tick(1);
    assert_eq!(pair.codes(), [OVERRUN, OVERRUN]);
    assert_eq!(pair.ends[1].counters().dropped, 1);
}

#[test]
fn p4_posted_receives_are_taken_in_order_and_no_more_than_the_ring_holds() {
    let (mut pair, region, key) = with_receives(800);
    (0..8).for_each(|i| pair.devices[1].post_recv(key, i * 100, 100, abi::PUSHGATE_ANY_TAG));
    (0..9).for_each(|i| assert!(pair.devices[0].post(inline_send(i), &bytes(i as u64, 30))));
    pair.settle();
    assert_eq!(pair.ends[1].counters().delivered, 8);
    for i in 0..8 {
        let m = pair.devices[1].try_recv().unwrap();
        assert_eq!((m.tag, region.read(i * 100, 30)), (i as u32, bytes(i as u64, 30)));
    }
    pair.assert_clean();
}

#[test]
fn p4_a_send_takes_the_oldest_receive_of_its_tag_and_says_which() {
    let (mut pair, region, key) = with_receives(1000);
    for (i, tag) in [5, ANY, 6, 5, 7].into_iter().enumerate() {
        pair.devices[1].post_recv(key, i as u64 * 100, 100, tag);
    }
    for (tag, length) in [(6, 17), (5, 90), (6, 90), (5, 17)] {
        let content = bytes(tag as u64, length);
        let record = if length <= 40 { inline_send(tag) } else { window_send(tag) };
        assert!(pair.devices[0].post(record, &content));
        pair.settle();
    }
    for (tag, receive, length) in [(6, 1, 17), (5, 0, 90), (6, 2, 90), (5, 3, 17)] {
        let m = pair.devices[1].try_recv().expect("it landed");
        assert_eq!((m.tag, m.place, m.length, m.flags), (tag, receive, length, Record::BUFFER));
        let at = receive as usize * 100;
        assert_eq!(region.read(at, length as usize), bytes(tag as u64, length as usize));
    }
    assert_eq!(region.read(400, 100), [0; 100], "the one that nobody asked for");
    pair.assert_clean();
}

#[test]
fn p4_p7_a_send_whose_tag_is_not_posted_waits_for_it_or_for_the_end() {
    let waiting = || {
        let (mut pair, region, key) = with_receives(1000);
        pair.devices[1].post_recv(key, 0, 100, 1);
        pair.devices[1].post_recv(key, 100, 100, 2);
        let record = Record { flags: Record::SIGNALED, ..window_send(3) };
        assert!(pair.devices[0].post(record, &bytes(3, 80)));
        // Posted later, with its receive there: it does not overtake.
        assert!(pair.devices[0].post(inline_send(1), b"one"));
        pair.settle();
        pair.tick(1 << 40);
        assert_eq!(pair.codes(), [None, None]);
        assert!(pair.devices[1].try_recv().is_none() && pair.devices[0].poll_cq().is_none());
        assert_eq!(pair.devices[0].delivered(), 0, "the peer does not have it yet");
        (pair, region, key)
    };
    let (mut pair, region, key) = waiting();
    pair.devices[1].post_recv(key, 200, 100, 3);
    pair.settle();
    let numbers: Vec<_> = std::iter::from_fn(|| pair.devices[1].try_recv()).map(|m| m.place).collect();
    assert_eq!(numbers, [2, 0]);
    assert_eq!((region.read(200, 80), region.read(0, 3)), (bytes(3, 80), b"one".to_vec()));
    assert_eq!(pair.devices[0].poll_cq().map(|c| c.status), Some(0));
    pair.assert_clean();

    let (mut pair, _region, _) = waiting();
    pair.ends[1].fail(Status { rank: Some(1), ..Status::new(abi::PUSHGATE_ABORTED) });
    // After the tick above: an end waits for its device by the time.
    pair.tick((1 << 40) + 1);
    assert_eq!(pair.codes(), [ABORTED, ABORTED]);
    assert_eq!(pair.devices[0].poll_cq().map(|c| c.status as u32), ABORTED);
    assert!(pair.devices[1].try_recv().is_none());
}

proptest! {
    #![proptest_config(Config::with_cases(if remote() { 20 } else { 200 }))]

    /// Compared with a simple list as model.
    #[test]
    fn p4_p6_tags_match_as_the_model_says(steps in prop::collection::vec((0u8..6, 0u32..4), 0..150)) {
        let (mut pair, region, key) = with_receives(15_000);
        let (mut posted, mut sent) = (Vec::new(), Vec::new());
        let (mut open, mut landed, mut taken) = (Vec::<usize>::new(), Vec::<(usize, usize)>::new(), 0);
        for (step, tag) in steps {
            match step {
                0..2 if posted.len() < taken + 8 => {
                    let tag = if tag == 3 { ANY } else { tag };
                    pair.devices[1].post_recv(key, posted.len() as u64 * 100, 100, tag);
                    open.push(posted.len());
                    posted.push(tag);
                }
                2..4 => {
                    let content = bytes(sent.len() as u64, 41 + sent.len() % 50);
                    let record = Record { tag: tag % 3, ..window_send(sent.len() as u32) };
                    if pair.devices[0].post(record, &content) {
                        sent.push(tag % 3);
                    }
                }
                4 => pair.settle(),
                _ => {
                    pair.settle();
                    while landed.len() < sent.len() {
                        let tag = sent[landed.len()];
                        let fits = |k: &usize| posted[*k] == ANY || posted[*k] == tag;
                        let Some(at) = open.iter().position(fits) else { break };
                        landed.push((landed.len(), open.remove(at)));
                    }
                    for (message, receive) in &landed[taken..] {
                        let m = pair.devices[1].try_recv().expect("the model has it");
                        prop_assert_eq!((m.place as usize, m.tag), (*receive, sent[*message]));
                        let content = bytes(*message as u64, 41 + message % 50);
                        prop_assert_eq!(region.read(receive * 100, content.len()), content);
                    }
                    prop_assert!(pair.devices[1].try_recv().is_none(), "the model has none");
                    let new = landed.len() - taken;
                    taken = landed.len();
                    pair.devices[1].release(new as u64);
                }
            }
        }
        pair.settle();
        pair.assert_clean();
        region.check_guards();
    }
}

#[test]
fn p4_messages_of_nothing_out_of_a_region_take_one_receive_after_the_other() {
    let mut s = sending(true, 100);
    // More messages than the window has units, because a number is no place.
    for i in 0..100u32 {
        s.pair.devices[1].post_recv(s.rkey, 0, 100, ANY);
        assert!(s.pair.devices[0].post_from(region_send(i, s.lkey, 0), 0));
        s.pair.settle();
        let m = s.pair.devices[1].try_recv().expect("it landed");
        assert_eq!((m.tag, m.length, m.place, m.flags), (i, 0, i, Record::BUFFER));
        s.pair.devices[1].release(1);
        s.pair.settle();
    }
    s.pair.assert_clean();
}

#[test]
fn p4_p8_a_send_longer_than_its_receive_is_refused_and_both_ends_say_both_lengths_where_they_fit() {
    for receive_first in [true, false] {
        for (message, receive) in [(300, 299), (1, 0), (2000, 100)] {
            let case = format!("{message} bytes, receive of {receive} first: {receive_first}");
            let (mut pair, _region, key) = with_receives(2000);
            let post = |pair: &mut Pair| pair.devices[1].post_recv(key, 0, receive, 5);
            if receive_first {
                post(&mut pair);
            }
            assert!(pair.devices[0].post(window_send(5), &bytes(1, message as usize)));
            pair.settle();
            if !receive_first {
                assert_eq!(pair.codes(), [None, None], "{case}");
                post(&mut pair);
            }
            pair.settle();
            pair.tick(1);
            for device in &pair.devices {
                let status = device.status().expect(&case);
                let reason = Refusal::of(status.detail);
                let long = Refusal::Long(Lengths::of(message, receive));
                assert_eq!(
                    (Some(status.code.into()), status.rank, reason),
                    (REFUSED, Some(0), (long, None)),
                    "{case}"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-endpoint"]
fn p4_p8_over_rdma_a_send_longer_than_its_receive_is_refused_at_its_sender() {
    rdma::must_be_chosen();
    let (mut pair, region, key) = with_receives(2000);
    pair.devices[1].post_recv(key, 0, 299, 5);
    pair.devices[1].post_recv(key, 500, 400, 5);
    assert!(pair.devices[0].post(window_send(5), &bytes(1, 300)));
    pair.settle();
    pair.tick(1);
    assert_eq!(pair.codes(), [REFUSED, REFUSED]);
    assert_eq!([0, 1].map(|i| pair.devices[i].status().unwrap().rank), [Some(0); 2]);
    assert_eq!((pair.ends[0].counters().released, region.read(0, 2000)), (0, vec![0; 2000]));
}

#[test]
fn p4_p5_sends_out_of_a_region_wait_for_room_in_the_landing_ring() {
    let mut s = sending_locally(false, 8000);
    // The ring has 2048 bytes: two messages fit, wherever the ring's head is.
    for i in 0..6u32 {
        assert!(s.pair.devices[0].post_from(region_send(i, s.lkey, i as u64 * 1000), 1000 + i as usize % 2));
    }
    s.pair.settle();
    assert_eq!(s.pair.ends[1].counters().delivered, 2);
    for i in 0..6u32 {
        take(&mut s.pair.devices[1], i, &s.from.read(i as usize * 1000, 1000 + i as usize % 2));
        s.pair.settle();
    }
    // Longer than half of the ring, with its head a little past the middle.
    for i in 6..12 {
        assert!(s.pair.devices[0].post_from(region_send(i, s.lkey, 0), 2000));
        s.pair.settle();
        take(&mut s.pair.devices[1], i, &s.from.read(0, 2000));
        s.pair.settle();
    }
    s.pair.assert_clean();
    // A message that never fits is its sender's fault.
    assert!(s.pair.devices[0].post_from(region_send(12, s.lkey, 0), 2049));
    s.pair.settle();
    s.pair.tick(1);
    assert_eq!(s.pair.codes(), [REFUSED, REFUSED]);
    assert_eq!(s.pair.devices[1].status().unwrap().rank, Some(0));
}
