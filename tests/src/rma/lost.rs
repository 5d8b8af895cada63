//! A rank that dies.

use std::time::{Duration, Instant};

use rustix::process::{Signal as Kill, getpid, kill_process};

use super::group::Group;
use super::rank::{Memory, Rank};
use super::scenario::Options;
use super::table::{Bytes, FORCE_SO, INC, Signal, Table};

/// The rank that dies.
pub const VICTIM: usize = 1;

struct Memories {
    data: Memory,
    signals: Memory,
}

/// Puts to a peer, of the peer's own place, with a signal.
fn put_to(rank: &Rank, m: &Memories, peer: usize) -> super::table::Result<super::table::Ptr> {
    let bytes = Bytes {
        local: 0,
        local_mr: m.data.mr.device,
        size: 4096,
        remote: 4096 * (1 + rank.me() as u64),
        remote_mr: m.data.mr.device,
    };
    let signal =
        Signal { at: 8 * rank.me() as u64, mr: m.signals.mr.device, value: 0, op: INC, strong: true };
    // SAFETY: the memory stays until the end.
    unsafe { rank.table.iput_signal(rank.to(0, 0, peer), bytes, signal) }
}

/// A peer that is killed ends the operations to that peer with an error, and those that are begun afterwards; the other peers
/// go on.
pub fn lost(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    assert!(ranks > 2, "lost needs three ranks");
    let m = Memories {
        data: rank.memory(0, 4096 * (1 + ranks), rank.kind, 0),
        signals: rank.memory(0, 8 * ranks, rank.kind, FORCE_SO),
    };
    m.data.buffer.fill(0, 4096, me as u64);
    let others = || (0..ranks).filter(|peer| *peer != me);
    rank.barrier();
    let requests: Vec<_> = others().map(|peer| put_to(&rank, &m, peer).expect("iputSignal")).collect();
    requests.into_iter().for_each(|request| rank.done(0, request));
    others().for_each(|peer| rank.until_value(&m.signals, 8 * peer, 1));
    rank.no_error();
    rank.barrier();
    if me == VICTIM {
        // Without progress: the others' operations are on their way.
        std::thread::sleep(Duration::from_millis(200));
        kill_process(getpid(), Kill::KILL).expect("kill");
        unreachable!("killed");
    }
    let begin = Instant::now();
    let mut requests: Vec<_> = (0..10).map(|_| put_to(&rank, &m, VICTIM).expect("iputSignal")).collect();
    if table.version.has_get() {
        let bytes = Bytes {
            local: 0,
            local_mr: m.data.mr.device,
            size: 64,
            remote: 4096,
            remote_mr: m.data.mr.device,
        };
        requests.push(rank.get(rank.to(0, 0, VICTIM), bytes));
    }
    for request in requests {
        // Done, where the peer's RDMA device takes them, or failed: both are right.
        let _ = rank.ended(0, request);
    }
    let failed = loop {
        match put_to(&rank, &m, VICTIM) {
            Err(failed) => break failed,
            Ok(request) => {
                if let Err(failed) = rank.ended(0, request) {
                    break failed;
                }
            }
        }
        assert!(begin.elapsed() < crate::hang(), "operations to a peer that is gone succeed");
    };
    assert!(matches!(failed.code, 2 | 5 | 6), "{failed}");
    rank.has_error(0);
    println!("rank {me}: {failed} after {:.2} s", begin.elapsed().as_secs_f64());
    if me == 0 {
        rank.group.without(VICTIM);
    }
    rank.barrier();
    // With the other ranks all goes on.
    let left = || (0..ranks).filter(|peer| *peer != VICTIM);
    m.data.buffer.fill(0, 4096, 100 + me as u64);
    for _ in 0..5 {
        let requests: Vec<_> = left().map(|peer| put_to(&rank, &m, peer).expect("iputSignal")).collect();
        requests.into_iter().for_each(|request| rank.done(0, request));
    }
    for peer in left() {
        rank.until_value(&m.signals, 8 * peer, if peer == me { 5 } else { 6 });
        assert_eq!(m.data.buffer.differs(4096 * (1 + peer), 4096, 100 + peer as u64), None);
    }
    rank.barrier();
    rank.end([m.data, m.signals]);
}
