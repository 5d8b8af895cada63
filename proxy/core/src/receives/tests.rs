use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const ANY: u32 = abi::PUSHGATE_ANY_TAG;

fn posted(number: u64, tag: u32) -> Posted {
    Posted { number, key: 1, offset: 64 * number, length: 64, tag }
}

/// Nodes that `messages` messages look at, for each: a receive of the message's tag is posted, found and taken, among
/// `foreign` receives for which no message comes.
fn steps(foreign: u64, messages: u64, tag_of: impl Fn(u64) -> u32) -> f64 {
    let mut r = Receives::new(1 << 16);
    for number in 0..foreign {
        r.post(posted(number, tag_of(number)));
    }
    r.steps.set(0);
    for number in foreign..foreign + messages {
        // Of many tags, so that what they happen to meet in their buckets is the mean.
        let tag = 7_000_000 + number as u32 % 1009;
        r.post(posted(number, tag));
        assert_eq!(r.find(tag).map(|p| p.number), Some(number));
        assert_eq!(r.take(tag).map(|p| p.number), Some(number));
    }
    assert_eq!(r.len() as u64, foreign);
    r.steps.get() as f64 / messages as f64
}

#[test]
fn p8_a_message_takes_as_many_steps_among_two_to_the_sixteenth_foreign_receives_as_among_64() {
    let of_one: fn(u64) -> u32 = |_| 9;
    let kinds = [
        ("of one tag", of_one),
        ("of a tag each", |n| n as u32),
        ("of tags far apart", |n| n as u32 * 65_521),
    ];
    for (name, tag_of) in kinds {
        // Which tags meet in a bucket differs from table to table.
        let of = |foreign: u64| (0..16).map(|_| steps(foreign, 3000, tag_of)).sum::<f64>() / 16.0;
        let (few, many) = (of(64), of((1 << 16) - 3000));
        println!("{name}: {many:.2} steps a message, {few:.2} among 64");
        assert!(many <= 1.2 * few, "{name}: {many:.1} steps a message, {few:.1} among 64");
    }
}

#[test]
fn p8_receives_beyond_the_most_fill_no_memory() {
    let mut r = Receives::new(4);
    let capacity = r.nodes.capacity();
    (0..100).for_each(|number| r.post(posted(number, 1)));
    r.put_back(vec![posted(101, 2)]);
    assert_eq!((r.len(), r.nodes.capacity(), r.iter().count()), (4, capacity, 4));
}

proptest! {
    /// A list in the order of numbers is searched from its front.
    #[test]
    fn p4_p6_a_send_takes_the_oldest_receive_of_its_tag_or_of_any(
        steps in prop::collection::vec((0u8..10, 0u32..5), 0..400),
    ) {
        const MOST: usize = 8;
        let mut r = Receives::new(MOST);
        let mut list: VecDeque<Posted> = VecDeque::new();
        let mut taken: Vec<Posted> = Vec::new();
        let mut number = u64::from(u32::MAX) - 20;
        for (step, tag) in steps {
            let own = if tag == 4 { ANY } else { tag };
            match step {
                0..5 => {
                    r.post(posted(number, own));
                    if list.len() < MOST {
                        list.push_back(posted(number, own));
                    }
                    number += 1;
                }
                5..8 => {
                    let at = list.iter().position(|p| p.takes(own));
                    let expected = at.and_then(|at| list.remove(at));
                    prop_assert_eq!(r.find(own).copied(), expected);
                    prop_assert_eq!(r.take(own), expected);
                    taken.extend(expected);
                }
                _ => {
                    let mut back = taken.split_off(taken.len().saturating_sub(tag as usize));
                    r.put_back(back.clone());
                    back.sort_by_key(|p| p.number);
                    for p in back.into_iter().rev().take(MOST - list.len()) {
                        let at = list.partition_point(|q| q.number < p.number);
                        list.insert(at, p);
                    }
                }
            }
            prop_assert_eq!(r.iter().collect::<Vec<_>>(), list.iter().collect::<Vec<_>>());
            prop_assert_eq!((r.len(), r.oldest()), (list.len(), list.front()));
            for p in &list {
                prop_assert_eq!(r.numbered(p.number as u32), Some(p));
            }
            prop_assert_eq!(r.numbered(number as u32), None);
        }
    }
}
