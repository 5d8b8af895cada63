use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

#[test]
fn p6_what_is_to_be_copied_is_known_until_the_peer_has_it() {
    let mut c = Copies::new(4);
    c.posted(3, (7, 100), 50);
    c.posted(5, (7, 400), 1);
    c.posted(6, (8, 0), 10);
    let touched = |c: &Copies| {
        let at = [
            (7, 149, 9),
            (7, 90, 11),
            (7, 0, 1000),
            (7, 150, 250),
            (7, 50, 50),
            (7, 400, 1),
            (8, 9, 1),
            (9, 0, 9),
        ];
        at.map(|(rkey, offset, length)| c.touch((rkey, offset), length, 9))
    };
    assert_eq!(touched(&c), [true, true, true, false, false, true, true, false]);
    c.received(3, 9);
    assert_eq!(touched(&c), [true, true, true, false, false, true, true, false]);
    c.received(4, 9);
    assert_eq!(touched(&c), [false, false, true, false, false, true, true, false]);
    c.received(7, 9);
    assert_eq!(touched(&c), [false; 8]);
    // Offsets that the peer will refuse.
    c.posted(7, (7, u64::MAX - 1), 50);
    assert!(c.touch((7, u64::MAX - 1), 1, 9) && !c.touch((7, 0), 50, 9));
}

#[test]
fn p6_what_is_being_written_is_known_until_its_write_has_completed() {
    let mut c = Copies::new(4);
    c.written(3, 7, (1, 100), 50);
    assert!(c.touch((1, 149), 1, 6) && !c.touch((1, 150), 1, 6));
    assert!(!c.touch((1, 149), 1, 7));
    c.received(4, 6);
    assert!(!c.touch((1, 149), 1, 6));
}

#[test]
fn what_is_there_is_forgotten_and_a_copy_of_the_peers_is_not() {
    let mut c = Copies::new(4);
    c.written(3, 7, (1, 100), 50);
    c.written(4, 9, (1, 200), 50);
    c.posted(5, (1, 300), 50);
    c.written(6, 13, (1, 400), 50);
    c.received(3, 8);
    assert_eq!(c.count, 3);
    c.received(3, 20);
    assert_eq!(c.count, 2, "those after a copy wait for it");
    assert!(c.touch((1, 349), 1, 20) && !c.touch((1, 449), 1, 20));
    c.received(6, 20);
    assert_eq!(c.count, 0);
}

/// Nodes that a message looks at while `under_way` WRITEs are under way: it is looked for, added, and the oldest one is there.
fn steps(under_way: u64, messages: u64, to: impl Fn(u64) -> (u32, u64)) -> f64 {
    let mut c = Copies::new(1 << 14);
    for message in 0..under_way + messages {
        if message == under_way {
            c.tree.steps.set(0);
        }
        assert!(!c.touch(to(message), 4096, message.saturating_sub(under_way)));
        c.written(message, message + 1, to(message), 4096);
        c.received(0, (message + 1).saturating_sub(under_way));
    }
    assert_eq!(c.count as u64, under_way);
    c.tree.steps.get() as f64 / messages as f64
}

#[test]
fn p8_a_message_takes_as_many_steps_with_16383_writes_under_way_as_with_64() {
    let of = |under_way: u64, to: fn(u64) -> (u32, u64)| {
        (0..8).map(|_| steps(under_way, 20_000, to)).sum::<f64>() / 8.0
    };
    let one_after_the_other: [fn(u64) -> (u32, u64); 2] = [
        |n| (1, (n % (1 << 15)) << 12),
        // To each of 16 regions in turn, as to that many peers of a collective.
        |n| ((n as u32 % (1 << 15)) >> 11, (n % (1 << 11)) << 12),
    ];
    for to in one_after_the_other {
        let (few, many) = (of(64, to), of((1 << 14) - 1, to));
        assert!(many <= 1.2 * few, "{many:.1} steps a message, {few:.1} with 64 under way");
    }
    // Places in no order: 256 times as many take a search with log2(16383) / log2(64) times as many levels, 2.3.
    let anywhere: fn(u64) -> (u32, u64) = |n| (1, n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 24 << 12);
    let (few, many) = (of(64, anywhere), of((1 << 14) - 1, anywhere));
    assert!(many <= 2.5 * few, "{many:.1} steps a message, {few:.1} with 64 under way");
}

/// A stretch of the model: a list that is searched from its front.
#[derive(Clone, Copy, Debug)]
struct Listed {
    sequence: u64,
    wr: u64,
    rkey: u32,
    begin: u64,
    end: u64,
}

proptest! {
    /// Nothing under way is missed. What is there may count as under way only while it has touched something that still is,
    /// by itself or by way of others.
    #[test]
    fn p6_bytes_count_as_under_way_as_a_list_of_all_writes_says(
        steps in prop::collection::vec((0u8..10, 0u32..2, 0u64..40, 1u32..6), 0..400),
    ) {
        let mut c = Copies::new(4);
        let mut list: VecDeque<Listed> = VecDeque::new();
        let (mut sequence, mut received, mut written, mut done) = (0, 0, 0, 0);
        let mut united = false;
        for (step, rkey, begin, length) in steps {
            let (end, to) = (begin + u64::from(length), (rkey, begin));
            let touched = |list: &VecDeque<Listed>, done: u64| {
                list.iter().any(|l| l.rkey == rkey && l.begin < end && begin < l.end && l.wr > done)
            };
            united |= step < 6 && list.iter().any(|l| l.rkey == rkey && l.begin < end && begin < l.end);
            match step {
                0..2 => {
                    c.posted(sequence, to, length);
                    list.push_back(Listed { sequence, wr: u64::MAX, rkey, begin, end });
                    sequence += 1;
                }
                2..6 => {
                    // As a link does: what would be written where something is under way is copied.
                    written += 1;
                    let wr = if c.touch(to, length, done) { u64::MAX } else { written };
                    c.written(sequence, wr, to, length);
                    list.push_back(Listed { sequence, wr, rkey, begin, end });
                    sequence += 1;
                }
                6 => received = (received + begin).min(sequence),
                7 => done = (done + begin).min(written),
                8 if begin == 0 => {
                    c.rewind(received);
                    list.retain(|l| l.sequence < received && l.wr == u64::MAX);
                }
                _ => {}
            }
            c.received(received, done);
            while list.front().is_some_and(|l| l.sequence < received || l.wr <= done) {
                list.pop_front();
            }
            prop_assert_eq!(c.count, list.len());
            // What the list has, the tree has.
            prop_assert!(!touched(&list, done) || c.touch(to, length, done));
            // One that stands for several goes as a whole.
            united &= !list.is_empty();
            prop_assert!(united || touched(&list, done) == c.touch(to, length, done));
            let node = |at: Place| (at > 0).then(|| *c.tree.node(at));
            let last = node(c.tree.last_before(u32::MAX, u64::MAX));
            let nodes: Vec<Node> = std::iter::successors(last, |n| node(n.before)).collect();
            prop_assert!(nodes.windows(2).all(|n| n[1].rkey < n[0].rkey || n[1].end <= n[0].begin), "they touch");
        }
        c.received(u64::MAX, 0);
        prop_assert!(c.count == 0 && !c.touch((0, 0), 1000, 0) && !c.touch((1, 0), 1000, 0));
    }
}
