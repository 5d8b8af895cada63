//! Links of one device over a fabric that breaks what is rebuilt while it is congested.

use super::*;

const MS: u64 = 1_000_000;
const LIMITS: Limits = Limits { most: 16, first_pause: 10 * MS, longest_pause: 1_000 * MS };

/// An end of a link.
#[derive(Clone, Copy)]
enum End {
    Away,
    /// It is made then.
    Making(Round, u64),
    /// It waits for the other end, or the link is live.
    Made(Round),
}

/// What came of links between two hosts that broke at once.
struct Came {
    /// How many an end began at once.
    at_once: usize,
    /// Most that an end was making.
    most: usize,
    /// How many went live before the fabric worked.
    wasted: usize,
    /// When all carried.
    all: u64,
}

/// Breaks `links` links at 0; what is rebuilt breaks after 20 ms until the fabric works at `works`. The hosts' engines turn to their links
/// in orders of their own.
fn storm(links: usize, works: u64, seed: u64) -> Came {
    let mut hosts = [0, 1].map(|host| Fabric::new(LIMITS, seed * 2 + host));
    let mut all = vec![([End::Away; 2], 0u32, None::<u64>); links];
    all.iter().for_each(|_| hosts.iter_mut().for_each(Fabric::leaves));
    let mut came = Came { at_once: 0, most: 0, wasted: 0, all: 0 };
    for now in (0..).step_by(MS as usize) {
        for (host, fabric) in hosts.iter_mut().enumerate() {
            let mut making = 0;
            for turn in 0..links {
                let number = if host == 0 { turn } else { (turn * 7 + 3) % links };
                let (ends, fails, _) = &mut all[number];
                match ends[host] {
                    End::Away => {
                        // A number that says nothing of the engines' orders.
                        let name = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                        if let Some(round) = fabric.begins((*fails, name), now) {
                            came.at_once += usize::from(now == 0 && host == 0);
                            ends[host] = End::Making(round, now + 5 * MS);
                        }
                    }
                    End::Making(round, at) if now >= at => {
                        fabric.made();
                        ends[host] = End::Made(round);
                    }
                    End::Making(..) | End::Made(_) => {}
                }
                making += usize::from(matches!(ends[host], End::Making(..)));
            }
            came.most = came.most.max(making);
        }
        let mut carry = 0;
        for (ends, fails, live) in &mut all {
            let [End::Made(first), End::Made(second)] = *ends else { continue };
            match *live {
                None => {
                    *live = Some(now + 20 * MS);
                    came.wasted += usize::from(now < works);
                }
                Some(u64::MAX) => carry += 1,
                Some(at) if now < at => {}
                Some(_) if now >= works => {
                    hosts.iter_mut().for_each(|fabric| fabric.returns(true));
                    *live = Some(u64::MAX);
                }
                Some(_) => {
                    hosts[0].failed(first, now);
                    hosts[1].failed(second, now);
                    (*ends, *live) = ([End::Away; 2], None);
                    *fails += 1;
                }
            }
        }
        if carry == links {
            came.all = now;
            return came;
        }
        assert!(now < 600_000 * MS, "links stay away");
    }
    unreachable!("time ends")
}

#[test]
fn p7_of_a_thousand_links_that_break_at_once_a_bounded_number_is_rebuilt_the_first_at_once_and_all_come_back()
{
    for seed in 0..2 {
        let came = storm(1_000, 0, seed);
        assert_eq!((came.at_once, came.most), (16, 16));
        assert!(came.all < 1_000 * MS, "{} ns over a fabric that works", came.all);
    }
}

#[test]
fn p7_links_that_break_again_are_rebuilt_one_at_a_time_after_pauses_that_grow_until_one_carries() {
    let mut ends = Vec::new();
    for seed in 0..2 {
        let came = storm(1_000, 3_000 * MS, seed);
        assert_eq!((came.at_once, came.most), (16, 16));
        // Those of the first 25 ms, then one a pause: 10 ms to 1 s, halved at most.
        let first = 16 * 25 / 5;
        assert!((5..first + 40).contains(&came.wasted), "{} links rebuilt in vain", came.wasted);
        assert!(came.all < 5_000 * MS, "{} ns", came.all);
        ends.push(came.all);
    }
    ends.dedup();
    assert!(ends.len() > 1, "without jitter");
}

#[test]
fn a_link_that_is_away_alone_begins_at_once_however_often_it_fails() {
    let mut fabric = Fabric::new(LIMITS, 7);
    fabric.leaves();
    for now in 0..100 {
        let round = fabric.begins((now as u32, 0), now).expect("at once");
        fabric.made();
        fabric.failed(round, now);
    }
    fabric.leaves();
    assert_eq!(fabric.begins((0, 0), 100), None, "two of them pause");
    fabric.returns(false);
    assert!(fabric.begins((0, 0), 100).is_some());
}
