//! How fast puts are between two ranks, beside a copy of one thread in the same run.

use std::time::Instant;

use super::group::Group;
use super::rank::{Memory, Rank};
use super::scenario::Options;
use super::table::{Bytes, FORCE_SO, INC, NEVER_RESET, Signal, Table};
use crate::hang;
use crate::nccl::pair::Buffer;

/// How many runs are made; the best one counts.
const RUNS: usize = 5;
/// Lengths and how many are in flight.
const RATES: [(usize, usize); 2] = [(1 << 20, 16), (64 << 20, 2)];

/// Prints the time of a put of 8 bytes with a signal, and the rates of long puts.
pub fn speed(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    assert_eq!(rank.ranks(), 2, "speed has two ranks");
    let room =
        RATES.iter().filter(|(size, _)| *size <= o.max).map(|(size, n)| size * n).max().unwrap_or(4096);
    let source = rank.memory(0, room, rank.kind, 0);
    let target = rank.memory(0, room, rank.kind, 0);
    let signals = rank.memory(0, 64, rank.kind, FORCE_SO | NEVER_RESET);
    source.buffer.fill(0, room, rank.me() as u64);
    let m = (&source, &target, &signals);
    let mut count = 0;
    let mut latency = f64::INFINITY;
    for run in 0..=RUNS {
        rank.barrier();
        let time = back_and_forth(&rank, m, o.times, &mut count);
        if run > 0 {
            latency = latency.min(time);
        }
    }
    if rank.me() == 0 {
        println!(
            "{}: {:.2} us from a put of 8 bytes with a signal to what the peer sees (half of there and back, best of {RUNS} x {})",
            table.version.name(),
            latency * 1e6 / (2 * o.times) as f64,
            o.times
        );
    }
    for (size, n) in RATES.into_iter().filter(|(size, _)| *size <= o.max) {
        let mut best = f64::INFINITY;
        for run in 0..=RUNS.min(3) {
            rank.barrier();
            let time = one_way(&rank, m, size, n, &mut count);
            if run > 0 {
                best = best.min(time);
            }
        }
        if rank.me() == 1 {
            assert_eq!(target.buffer.differs(0, size * n, 0), None, "what came is not what was put");
        }
        rank.barrier();
        if rank.me() == 0 {
            let (rate, most) = ((size * n) as f64 / best, memcpy(size, n));
            println!(
                "{}: puts of {size} bytes, {n} in flight: {:.2} GB/s; memcpy {:.2} GB/s; ratio {:.2}",
                table.version.name(),
                rate / 1e9,
                most / 1e9,
                rate / most
            );
        }
        // The other rank waits meanwhile.
        rank.barrier();
    }
    rank.no_error();
    rank.end([source, target, signals]);
}

type Memories<'a> = (&'a Memory, &'a Memory, &'a Memory);

fn bytes((source, target, _): Memories, at: usize, size: usize) -> Bytes {
    Bytes {
        local: at as u64,
        local_mr: source.mr.device,
        size,
        remote: at as u64,
        remote_mr: target.mr.device,
    }
}

/// Polls as NCCL's progress thread does, until the word is at least `wanted` and the request is done.
fn poll(rank: &Rank, signals: &Memory, wanted: u64, requests: &mut Vec<super::table::Ptr>) {
    let begin = Instant::now();
    let mut turns = 0u32;
    while signals.value(0) < wanted || !requests.is_empty() {
        requests.retain(|request| !rank.test(0, *request).expect("test"));
        rank.progress();
        turns = turns.wrapping_add(1);
        if turns.is_multiple_of(1024) {
            assert!(begin.elapsed() < hang(), "no progress within a long time");
        }
        std::thread::yield_now();
    }
}

fn back_and_forth(rank: &Rank, m: Memories, times: usize, count: &mut u64) -> f64 {
    let first = rank.me() == 0;
    let signal = Signal { at: 0, mr: m.2.mr.device, value: 0, op: INC, strong: true };
    let to = rank.to(0, 0, 1 - rank.me());
    let begin = Instant::now();
    let mut requests = Vec::new();
    for _ in 0..times {
        if !first {
            poll(rank, m.2, *count + 1, &mut requests);
        }
        requests.push(rank.put_signal(to, bytes(m, 0, 8), signal));
        *count += 1;
        if first {
            poll(rank, m.2, *count, &mut requests);
        }
    }
    poll(rank, m.2, *count, &mut requests);
    begin.elapsed().as_secs_f64()
}

/// The first rank puts, then a signal; the second rank answers with a signal.
fn one_way(rank: &Rank, m: Memories, size: usize, n: usize, count: &mut u64) -> f64 {
    let signal = Signal { at: 0, mr: m.2.mr.device, value: 0, op: INC, strong: true };
    let to = rank.to(0, 0, 1 - rank.me());
    let begin = Instant::now();
    let mut requests = Vec::new();
    *count += 1;
    if rank.me() == 0 {
        for i in 0..n - 1 {
            requests.push(rank.put(to, bytes(m, i * size, size)));
        }
        requests.push(rank.put_signal(to, bytes(m, (n - 1) * size, size), signal));
    } else {
        poll(rank, m.2, *count, &mut requests);
        requests.push(rank.put_signal(to, Bytes::NONE, signal));
    }
    poll(rank, m.2, *count, &mut requests);
    begin.elapsed().as_secs_f64()
}

/// Bytes a second of one thread's copies between as many places.
fn memcpy(size: usize, n: usize) -> f64 {
    let (from, to) = (Buffer::new(size * n), Buffer::new(size * n));
    from.fill(0, size * n, 1);
    let run = |_| {
        let begin = Instant::now();
        for i in 0..n {
            // SAFETY: within both buffers, which nothing else uses.
            unsafe {
                std::ptr::copy_nonoverlapping(from.at(i * size).cast::<u8>(), to.at(i * size).cast(), size);
            }
            // Every copy is made, although the next writes the same bytes.
            std::hint::black_box(&to);
        }
        (size * n) as f64 / begin.elapsed().as_secs_f64()
    };
    (0..=RUNS.min(3)).map(run).skip(1).fold(0.0, f64::max)
}
