//! What each operation does: every byte arrives where it belongs, and nothing around it is touched.

use super::group::Group;
use super::rank::{Memory, Rank};
use super::scenario::Options;
use super::table::{ADD, Bytes, FORCE_SO, HOST, INC, Mr, Signal, Table, To};

/// The lengths.
const SIZES: [usize; 10] = [0, 1, 7, 8, 64, 4096, (64 << 10) + 3, 1 << 20, (5 << 20) + 1, 64 << 20];
/// Bytes around a stretch, which must stay as they are.
const AROUND: usize = 64;
/// What those bytes hold.
const UNTOUCHED: u8 = 0xee;

/// The pattern of what `from` sends to `to`.
fn pattern(o: &Options, size: usize, from: usize, to: usize) -> u64 {
    o.seed ^ (size as u64) << 16 ^ (from as u64) << 8 ^ to as u64
}

/// How a round tells the target.
#[derive(Clone, Copy, Debug)]
enum Told {
    /// A put, and then a signal alone.
    After,
    /// A put with a signal that adds 1.
    Inc,
    /// A put with a signal that adds a value.
    Add(u64),
}

/// Puts, signals, gets and flushes of every size between all ranks and to themselves.
pub fn bytes(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let sizes: Vec<usize> = SIZES.into_iter().chain([o.max]).filter(|size| *size <= o.max).collect();
    let stride = o.max + 2 * AROUND;
    let ranks = rank.ranks();
    let source = rank.memory(0, ranks * stride, rank.kind, 0);
    let target = rank.memory(0, ranks * stride, rank.kind, 0);
    // Words of 64 bytes for each rank: a signal, and what lies around it.
    let signals = rank.memory(0, ranks * 64, rank.kind, FORCE_SO);
    // Where the host lets NCCL's inlined values lie.
    let inlines = rank.memory(0, 64, HOST, 0);
    let mut expected = 0u64;
    let mut last = usize::MAX;
    for (round, size) in sizes.into_iter().enumerate() {
        if size == last {
            continue;
        }
        last = size;
        for told in [Told::After, Told::Inc, Told::Add(0x1_0000_0000_0000 + round as u64)] {
            // The longest are passed once.
            if size > 2 << 20 && matches!(told, Told::Inc) {
                continue;
            }
            let odd = |n: usize| 1 + (n + round) % (AROUND - 1);
            puts(o, &mut rank, (&source, &target, &signals), size, (odd(3), odd(8)), told, stride);
            expected = match told {
                Told::After | Told::Inc => expected + 1,
                Told::Add(value) => expected + value,
            };
            check(o, &mut rank, (&target, &signals), size, odd(8), expected, stride);
        }
        if table.version.has_get() {
            gets(o, &mut rank, (&source, &target), size, round, stride);
        }
    }
    inlined(&mut rank, &inlines, &target);
    rank.no_error();
    rank.barrier();
    if rank.me() == 0 {
        println!("{}: {ranks} ranks, bytes up to {last} arrived where they belong", table.version.name());
    }
    rank.end([source, target, signals, inlines]);
}

/// Both of a registration's names are good for a source, as NCCL uses both.
fn either(mr: Mr, n: usize) -> super::table::Ptr {
    if n.is_multiple_of(2) { mr.host } else { mr.device }
}

fn puts(
    o: &Options,
    rank: &mut Rank,
    (source, target, signals): (&Memory, &Memory, &Memory),
    size: usize,
    (from, to): (usize, usize),
    told: Told,
    stride: usize,
) {
    let me = rank.me();
    target.buffer.set(0, target.buffer.bytes(), UNTOUCHED);
    for peer in 0..rank.ranks() {
        source.buffer.fill(peer * stride + from, size, pattern(o, size, me, peer));
    }
    rank.barrier();
    let signal = |value, op| Signal { at: me as u64 * 64, mr: signals.mr.device, value, op, strong: true };
    let mut requests = Vec::new();
    for i in 0..rank.ranks() {
        // Each rank begins with another peer.
        let peer = (me + i) % rank.ranks();
        let to_peer = rank.to(0, size % rank.all_contexts(0), peer);
        let bytes = Bytes {
            local: (peer * stride + from) as u64,
            local_mr: either(source.mr, i),
            size,
            remote: (me * stride + to) as u64,
            remote_mr: target.mr.device,
        };
        match told {
            Told::After => {
                let more = To { flags: super::table::MORE, ..to_peer };
                requests.push((rank.put(more, bytes), Some(peer)));
                requests.push((rank.put_signal(to_peer, Bytes::NONE, signal(77, INC)), None));
            }
            Told::Inc => requests.push((rank.put_signal(to_peer, bytes, signal(77, INC)), Some(peer))),
            Told::Add(n) => requests.push((rank.put_signal(to_peer, bytes, signal(n, ADD)), Some(peer))),
        }
    }
    for (request, peer) in requests {
        rank.done(0, request);
        // The source may be used again.
        if let Some(peer) = peer {
            source.buffer.set(peer * stride + from, size, 0x11);
        }
    }
}

fn check(
    o: &Options,
    rank: &mut Rank,
    (target, signals): (&Memory, &Memory),
    size: usize,
    to: usize,
    expected: u64,
    stride: usize,
) {
    for peer in 0..rank.ranks() {
        rank.until_value(signals, peer * 64, expected);
        let at = peer * stride + to;
        let wrong = target.buffer.differs(at, size, pattern(o, size, peer, rank.me()));
        assert_eq!(wrong, None, "rank {}: {size} bytes of rank {peer}: the first that is wrong", rank.me());
        untouched(target, peer * stride, to);
        untouched(target, at + size, stride - to - size);
        assert!((1..8).all(|i| signals.value(peer * 64 + 8 * i) == 0), "words beside the signal");
    }
    rank.barrier();
}

/// Checks that these bytes were not written.
#[track_caller]
fn untouched(memory: &Memory, at: usize, length: usize) {
    let wrong = memory.buffer.read(at, length).iter().position(|byte| *byte != UNTOUCHED);
    assert_eq!(wrong, None, "a byte around the {at}th was written");
}

fn gets(
    o: &Options,
    rank: &mut Rank,
    (source, target): (&Memory, &Memory),
    size: usize,
    round: usize,
    stride: usize,
) {
    let me = rank.me();
    let (from, to) = (1 + round, 3 + round);
    for peer in 0..rank.ranks() {
        source.buffer.fill(peer * stride + from, size, pattern(o, size, me, peer));
    }
    target.buffer.set(0, target.buffer.bytes(), UNTOUCHED);
    rank.barrier();
    let requests: Vec<_> = (0..rank.ranks())
        .map(|peer| {
            let bytes = Bytes {
                local: (peer * stride + to) as u64,
                local_mr: either(target.mr, peer),
                size,
                remote: (me * stride + from) as u64,
                remote_mr: source.mr.device,
            };
            (peer, rank.get(rank.to(0, peer % rank.all_contexts(0), peer), bytes))
        })
        .collect();
    for (peer, request) in requests {
        rank.done(0, request);
        let flush = rank.to(0, peer % rank.all_contexts(0), peer);
        // NCCL names the signals' memory there, or nothing where there are no signals.
        let mr = if round.is_multiple_of(2) { target.mr.device } else { std::ptr::null_mut() };
        if let Some(flush) = rank.table.iflush(flush, mr).expect("iflush") {
            rank.done(0, flush);
        }
        let at = peer * stride + to;
        let wrong = target.buffer.differs(at, size, pattern(o, size, peer, me));
        assert_eq!(wrong, None, "rank {me}: {size} bytes got of rank {peer}: the first that is wrong");
        untouched(target, peer * stride, to);
        untouched(target, at + size, stride - to - size);
    }
    rank.barrier();
}

/// Values of 1 to 8 bytes out of host memory, whatever the target's memory is.
fn inlined(rank: &mut Rank, inlines: &Memory, target: &Memory) {
    target.buffer.set(0, target.buffer.bytes(), UNTOUCHED);
    inlines.buffer.fill(0, 64, 5);
    rank.barrier();
    let (me, ranks) = (rank.me(), rank.ranks());
    for size in 1..=8usize {
        let peer = (me + size) % ranks;
        let bytes = Bytes {
            local: 8 * (size as u64 - 1),
            local_mr: inlines.mr.host,
            size,
            remote: 8 * (size as u64 - 1),
            remote_mr: target.mr.device,
        };
        let request = rank.put(rank.to(0, 0, peer), bytes);
        rank.done(0, request);
    }
    for size in 1..=8usize {
        let at = 8 * (size - 1);
        let same = || {
            // Word by word as the plugin writes.
            let read = |memory: &Memory| memory.value(at).to_ne_bytes();
            let (there, here) = (read(target), read(inlines));
            there[..size] == here[..size] && there[size..].iter().all(|byte| *byte == UNTOUCHED)
        };
        rank.until("a short value", same);
    }
}
