//! A rank that dies, and one that can't go on.

use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal as Kill, getpid, getrlimit, kill_process, setrlimit};

use super::group::Group;
use super::rank::{Memory, Rank};
use super::scenario::Options;
use super::table::{Bytes, FORCE_SO, Failed, INC, Signal, Table};

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

/// Puts to a peer until a put fails.
fn until_failure(rank: &Rank, m: &Memories, peer: usize) -> Failed {
    let begin = Instant::now();
    loop {
        if let Err(failed) = put_to(rank, m, peer).and_then(|request| rank.ended(0, request)) {
            return failed;
        }
        assert!(
            begin.elapsed() < crate::hang(),
            "rank {}: puts to a rank that has failed succeed",
            rank.me()
        );
    }
}

/// A rank without a free descriptor can't let another rank connect, which fails that rank's group as a whole: operations of the
/// ranks that were connected fail, and those of the rank that connects.
pub fn exhausted(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    assert!(ranks > 2 && o.processes, "exhausted needs three ranks, as processes");
    let m = Memories {
        data: rank.memory(0, 4096 * (1 + ranks), rank.kind, 0),
        signals: rank.memory(0, 8 * ranks, rank.kind, FORCE_SO),
    };
    if me > 1 {
        let request = put_to(&rank, &m, 0).expect("iputSignal");
        rank.done(0, request);
    }
    if me == 0 {
        (2..ranks).for_each(|peer| rank.until_value(&m.signals, 8 * peer, 1));
    }
    rank.barrier();
    let before = getrlimit(Resource::Nofile);
    if me == 0 {
        let current = Some(crate::nccl::scenario::counts()[0] as u64 + 1);
        setrlimit(Resource::Nofile, Rlimit { current, ..before }).expect("setrlimit");
    }
    rank.barrier();
    if me == 0 {
        let ctx = rank.to(0, 0, 0).ctx;
        rank.until("an error", || table.last_error(ctx) == Ok(true));
    } else {
        let failed = until_failure(&rank, &m, 0);
        println!("rank {me}: {failed}");
        rank.has_error(0);
    }
    // Rank 0 makes progress meanwhile.
    rank.barrier();
    setrlimit(Resource::Nofile, before).expect("setrlimit");
    rank.end([m.data, m.signals]);
}
