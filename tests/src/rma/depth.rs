//! The queue's depth.

use super::group::Group;
use super::rank::Rank;
use super::scenario::Options;
use super::table::{Bytes, FORCE_SO, Failed, INC, Ptr, Signal, Table};

/// As many operations as are promised are outstanding at once and complete; one more is refused, and the rest goes on.
pub fn depth(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks, depth) = (rank.me(), rank.ranks(), rank.depth);
    let size = 200;
    let area = depth * size;
    let source = rank.memory(0, ranks * area, rank.kind, 0);
    let target = rank.memory(0, ranks * area, rank.kind, 0);
    let signals = rank.memory(0, 8 * ranks, rank.kind, FORCE_SO);
    let bytes = |peer: usize, i: usize| Bytes {
        local: (peer * area + i * size) as u64,
        local_mr: source.mr.device,
        size,
        remote: (me * area + i * size) as u64,
        remote_mr: target.mr.device,
    };
    let signal = Signal { at: 8 * me as u64, mr: signals.mr.device, value: 0, op: INC, strong: true };
    for round in 0..o.rounds as u64 {
        for peer in 0..ranks {
            source.buffer.fill(peer * area, area, round << 8 ^ (me << 4 ^ peer) as u64);
        }
        rank.barrier();
        let mut requests: Vec<Ptr> = Vec::new();
        for peer in 0..ranks {
            let to = rank.to(0, 0, peer);
            requests.extend((0..depth - 1).map(|i| rank.put(to, bytes(peer, i))));
            requests.push(rank.put_signal(to, bytes(peer, depth - 1), signal));
            // SAFETY: the memory stays until the end.
            let more = unsafe { table.iput(to, bytes(peer, 0)) };
            assert!(
                matches!(more, Err(Failed { code: 5, .. })),
                "operation {} to {peer}: {more:?}",
                depth + 1
            );
            // SAFETY: the memory stays until the end.
            let more = unsafe { table.iput_signal(to, Bytes::NONE, signal) };
            assert!(
                matches!(more, Err(Failed { code: 5, .. })),
                "operation {} to {peer}: {more:?}",
                depth + 1
            );
            // Another context has room of its own.
            if rank.contexts > 1 {
                requests.push(rank.put(rank.to(0, 1, peer), bytes(peer, 0)));
            }
        }
        requests.into_iter().for_each(|request| rank.done(0, request));
        for peer in 0..ranks {
            rank.until_value(&signals, 8 * peer, round + 1);
            let wrong = target.buffer.differs(peer * area, area, round << 8 ^ (peer << 4 ^ me) as u64);
            assert_eq!(wrong, None, "rank {me}, round {round}: a byte of rank {peer}");
        }
        rank.barrier();
    }
    rank.no_error();
    if me == 0 {
        println!("{}: {depth} operations at once to each of {ranks} ranks", table.version.name());
    }
    rank.end([source, target, signals]);
}
