//! A signal comes after the bytes of its context that were put before the signal; of all contexts, where the plugin says so.

use super::group::Group;
use super::rank::Rank;
use super::scenario::Options;
use super::table::{Bytes, FORCE_SO, INC, MORE, NEVER_RESET, Signal, Table, To};

/// Many puts to each peer, followed by one signal: when the peer sees the signal, all bytes are there. Short puts, and longer
/// ones.
pub fn order(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    let puts = o.times.min(rank.depth - 1);
    let longest = o.max.min(64 << 10);
    let area = 1 << 20;
    let source = rank.memory(0, ranks * area, rank.kind, 0);
    let target = rank.memory(0, ranks * area, rank.kind, 0);
    let signals = rank.memory(0, ranks * 8, rank.kind, FORCE_SO | NEVER_RESET);
    for round in 0..o.rounds {
        let pattern = |from: usize, to: usize| o.seed ^ (round * 65536 + from * 256 + to) as u64;
        // Every other round has few long puts.
        let length = if round % 2 == 0 { (area / puts / 2).min(longest) } else { longest };
        for peer in 0..ranks {
            source.buffer.fill(peer * area, area, pattern(me, peer));
        }
        target.buffer.set(0, target.buffer.bytes(), 0);
        rank.barrier();
        let mut requests = Vec::new();
        let mut put = [0, 0];
        for peer in (0..ranks).map(|i| (me + i) % ranks) {
            let all = rank.all_contexts(0);
            let to = rank.to(0, round % all, peer);
            let (mut at, mut n) = (0, 0);
            while n < puts && at < area {
                let size = (1 + (length - 1) * (n + 1) / puts).min(area - at);
                let bytes = Bytes {
                    local: (peer * area + at) as u64,
                    local_mr: source.mr.device,
                    size,
                    remote: (me * area + at) as u64,
                    remote_mr: target.mr.device,
                };
                // The plugin keeps one order for all contexts (docs/device-api-nccl.md).
                let to = rank.to(0, n % all, peer);
                requests.push(rank.put(To { flags: MORE, ..to }, bytes));
                (at, n) = (at + size, n + 1);
            }
            let signal = Signal { at: 8 * me as u64, mr: signals.mr.device, value: 0, op: INC, strong: true };
            requests.push(rank.put_signal(to, Bytes::NONE, signal));
            put = [n, at];
        }
        for peer in 0..ranks {
            rank.until_value(&signals, 8 * peer, round as u64 + 1);
            let wrong = target.buffer.differs(peer * area, put[1], pattern(peer, me));
            assert_eq!(
                wrong, None,
                "rank {me}, round {round}: the signal of rank {peer} came before the bytes"
            );
        }
        requests.into_iter().for_each(|request| rank.done(0, request));
        rank.barrier();
        if me == 0 {
            println!("{}: {} puts of {} bytes, then a signal", table.version.name(), put[0], put[1]);
        }
    }
    rank.no_error();
    rank.end([source, target, signals]);
}
