//! Ranks that call nothing of the plugin, as a program that sits in a barrier, while others ask for their memory.

use std::time::{Duration, Instant};

use super::group::Group;
use super::rank::{Memory, Rank};
use super::scenario::Options;
use super::table::{ADD, Bytes, FORCE_SO, NEVER_RESET, Ptr, Signal, Table};
use crate::hang;
use crate::nccl::pair::Random;

/// Where the signal of this number lies.
fn word(number: usize) -> u64 {
    8 * number as u64
}

/// What a rank registers.
struct Memories {
    source: Memory,
    target: Memory,
    signals: Memory,
}

impl Memories {
    fn new(o: &Options, rank: &Rank) -> Self {
        let flags = FORCE_SO | NEVER_RESET;
        Memories {
            source: rank.memory(0, o.max, rank.kind, 0),
            target: rank.memory(0, o.max, rank.kind, 0),
            signals: rank.memory(0, word(2 * rank.ranks()) as usize, rank.kind, flags),
        }
    }

    fn bytes(&self, size: usize) -> Bytes {
        Bytes { local: 0, local_mr: self.source.mr.device, size, remote: 0, remote_mr: self.target.mr.device }
    }

    fn signal(&self, number: usize, value: u64) -> Signal {
        Signal { at: word(number), mr: self.signals.mr.device, value, op: ADD, strong: true }
    }

    /// What the rank reads of a peer's signal of this number, into a word of its own that nobody signals.
    fn read(&self, rank: &Rank, peer: usize, number: usize) -> u64 {
        let own = rank.ranks() + peer;
        let mr = self.signals.mr.device;
        let bytes = Bytes { local: word(own), local_mr: mr, size: 8, remote: word(number), remote_mr: mr };
        done(rank, rank.get(rank.to(0, 0, peer), bytes));
        self.signals.value(word(own) as usize)
    }
}

/// Waits until a request is done, without a pause: the time that it takes is told.
fn done(rank: &Rank, request: Ptr) {
    let begin = Instant::now();
    while !rank.test(0, request).expect("test") {
        assert!(begin.elapsed() < hang(), "a request of a rank that calls nothing does not end");
        std::thread::yield_now();
    }
}

/// Waits until every rank is here, without a call of the plugin.
fn sit(rank: &mut Rank) {
    rank.group.barrier(&mut || ());
}

/// Rank 0 puts, signals and gets at ranks that call nothing after connect; at last all ranks come and go.
pub fn passive(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    let m = Memories::new(o, &rank);
    sit(&mut rank);
    if me == 0 {
        let mut times = Vec::new();
        for round in 1..=o.rounds as u64 {
            for peer in 1..ranks {
                m.source.buffer.fill(0, o.max, round);
                let to = rank.to(0, 0, peer);
                let begin = Instant::now();
                done(&rank, rank.put(to, m.bytes(o.max)));
                done(&rank, rank.put_signal(to, Bytes::NONE, m.signal(0, 3)));
                while m.read(&rank, peer, 0) != 3 * round {
                    assert!(begin.elapsed() < hang(), "rank {peer} does not see signal {round}");
                }
                m.source.buffer.set(0, o.max, 0);
                done(&rank, rank.get(to, m.bytes(o.max)));
                assert_eq!(m.source.buffer.differs(0, o.max, round), None, "what rank {peer} has");
                times.push((round, begin.elapsed()));
            }
        }
        tell(o, table, "a put, its signal read, and a get, at a rank that never calls", &times);
        let read = |round| {
            let begin = Instant::now();
            m.read(&rank, 1, 0);
            (round, begin.elapsed())
        };
        let times: Vec<_> = (1..=20 * o.rounds as u64).map(read).collect();
        tell(o, table, "a get of 8 bytes there", &times);
    }
    sit(&mut rank);
    if me > 0 {
        assert_eq!(m.signals.value(0), 3 * o.rounds as u64);
        assert_eq!(m.target.buffer.differs(0, o.max, o.rounds as u64), None, "what was put here");
    }
    sit(&mut rank);
    ceases(o, &mut rank, &m);
    come_and_go(o, &mut rank, &m);
    rank.no_error();
    rank.end([m.source, m.target, m.signals]);
}

/// The last rank calls until a signal comes, and ceases; rank 0 gets something of it at once.
fn ceases(o: &Options, rank: &mut Rank, m: &Memories) {
    let (me, last) = (rank.me(), rank.ranks() - 1);
    let rounds = 5 * o.rounds as u64;
    let before = 3 * o.rounds as u64;
    let mut times = Vec::new();
    for round in 1..=rounds {
        if me == last {
            rank.until_value(&m.signals, 0, before + round);
        } else if me == 0 {
            rank.done(0, rank.put_signal(rank.to(0, 0, last), Bytes::NONE, m.signal(0, 1)));
            let begin = Instant::now();
            while m.read(rank, last, 0) != before + round {
                assert!(begin.elapsed() < hang(), "rank {last} does not see signal {round}");
            }
            m.read(rank, last, 0);
            times.push((round, begin.elapsed()));
        }
        sit(rank);
    }
    if me == 0 {
        tell(o, rank.table, "two gets of 8 bytes at a rank that has just ceased to call", &times);
    }
}

/// Every rank signals the next one, and calls nothing for up to two milliseconds now and then. Each signal is added once.
fn come_and_go(o: &Options, rank: &mut Rank, m: &Memories) {
    let (me, ranks) = (rank.me(), rank.ranks());
    let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
    let mut random = Random(o.seed ^ (me as u64 + 1) << 32);
    let mut last = None;
    for value in 1..=o.times as u64 {
        let request = rank.put_signal(rank.to(0, 0, next), m.bytes(64), m.signal(me, value));
        if let Some(last) = last.replace(request) {
            rank.done(0, last);
        }
        if random.below(8) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(2000) as u64));
        }
    }
    last.into_iter().for_each(|last| rank.done(0, last));
    let sum = (o.times * (o.times + 1) / 2) as u64;
    let expected = if before == 0 && me > 0 { sum + extra(o, me, ranks) } else { sum };
    let begin = Instant::now();
    // Without a call: this rank's and the others' threads bring the rest.
    while m.signals.value(word(before) as usize) != expected {
        assert!(begin.elapsed() < hang(), "{} of {expected}", m.signals.value(word(before) as usize));
        std::thread::yield_now();
    }
    sit(rank);
}

/// What rank 0 has added to its signal at a rank before.
fn extra(o: &Options, me: usize, ranks: usize) -> u64 {
    3 * o.rounds as u64 + if me == ranks - 1 { 5 * o.rounds as u64 } else { 0 }
}

/// Prints the first, the median and the longest time.
fn tell(o: &Options, table: &Table, what: &str, times: &[(u64, Duration)]) {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let mut later: Vec<f64> =
        times.iter().filter(|(round, _)| *round > 1).map(|(_, time)| us(*time)).collect();
    later.sort_by(f64::total_cmp);
    let (Some(first), Some(longest)) = (times.first(), later.last()) else { return };
    println!(
        "{}: {what} ({} bytes): first {:.0} us, median {:.0}, longest {longest:.0}",
        table.version.name(),
        o.max,
        us(first.1),
        later[later.len() / 2],
    );
}
