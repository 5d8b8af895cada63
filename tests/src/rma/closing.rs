//! Groups closed with operations in flight.

use super::group::Group;
use super::rank::{Memory, Rank};
use super::scenario::Options;
use super::table::{Bytes, FORCE_SO, INC, Ptr, Signal, Table, warnings};
use crate::hang;
use crate::nccl::scenario::{counts, counts_down_to};

/// How a round ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Every rank closes after the end of its operations.
    Done,
    /// All ranks close at once.
    AtOnce,
    /// Rank 0 closes; the others wait until each of their operations is done or has failed.
    First,
    /// No rank makes any progress before it closes.
    Untouched,
    /// The operations go to memory that no rank but rank 0 has registered.
    NoPlace,
}

/// Rounds of groups that are closed with operations in flight: nothing hangs, memory that is free again is not written, and
/// nothing is left.
pub fn closing(o: &Options, table: &Table, mut group: Group) {
    let hows = [How::AtOnce, How::First, How::Untouched, How::NoPlace];
    // So that what is made once is there.
    let first = table.init().expect("init");
    for how in [How::Done].into_iter().chain(hows) {
        group = round(o, table, group, how);
    }
    group.barrier(&mut || {});
    let before = counts();
    group.barrier(&mut || {});
    for how in (0..o.rounds).flat_map(|_| hows) {
        group = round(o, table, group, how);
    }
    group.barrier(&mut || {});
    let after = counts_down_to(before, hang());
    group.barrier(&mut || {});
    assert!(
        after[0] <= before[0] && after[1] <= before[1],
        "descriptors, threads {before:?}, then {after:?}"
    );
    table.finalize(first).expect("finalize");
    if group.rank == 0 {
        println!(
            "{}: {} rounds; descriptors, threads, mappings {before:?} before and {after:?} after",
            table.version.name(),
            4 * o.rounds
        );
    }
}

fn round(o: &Options, table: &Table, group: Group, how: How) -> Group {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    let size = o.max.min(300_000);
    let source = rank.memory(0, size, rank.kind, 0);
    let signals = rank.memory(0, 64, rank.kind, FORCE_SO);
    let has_target = how != How::NoPlace || me == 0;
    let target = has_target.then(|| rank.memory(0, size, rank.kind, 0));
    rank.barrier();
    let mut requests = Vec::new();
    if let Some(target) = &target {
        for i in 0..20 {
            let peer = (me + 1 + i % (ranks - 1)) % ranks;
            requests.extend(post(&rank, peer, i, size, (&source, target, &signals)));
        }
    }
    match how {
        How::AtOnce => (0..20).for_each(|_| rank.progress()),
        How::Untouched | How::NoPlace => {}
        How::First if me > 0 => {
            for request in requests.drain(..) {
                // Done, or failed: both are right.
                let _ = rank.ended(0, request);
            }
        }
        How::First => {}
        How::Done => {
            requests.drain(..).for_each(|request| rank.done(0, request));
            rank.barrier();
        }
    }
    let memories = [source, signals].into_iter().chain(target);
    rank.end(memories)
}

fn post(
    rank: &Rank,
    peer: usize,
    i: usize,
    size: usize,
    (source, target, signals): (&Memory, &Memory, &Memory),
) -> Vec<Ptr> {
    let to = rank.to(0, i % rank.all_contexts(0), peer);
    let bytes = Bytes {
        local: 0,
        local_mr: source.mr.device,
        size: size >> (i % 5),
        remote: 0,
        remote_mr: target.mr.device,
    };
    let signal = Signal { at: 0, mr: signals.mr.device, value: 0, op: INC, strong: true };
    // SAFETY: the group is closed before the memory is freed. (A peer that has closed already may make a post fail.)
    unsafe {
        let put = rank.table.iput_signal(to, bytes, signal);
        // Into the source, which nobody looks at.
        let get = rank.table.version.has_get().then(|| {
            rank.table.iget(to, Bytes { local_mr: source.mr.device, remote_mr: target.mr.device, ..bytes })
        });
        put.into_iter().chain(get.into_iter().flatten()).collect()
    }
}

/// A rank that has asked nothing of the others closes in order, after the end of what was asked of it: no other rank counts
/// that as an error. What is asked of it later fails.
pub fn leaving(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 1);
    let (me, ranks) = (rank.me(), rank.ranks());
    let data = rank.memory(0, 4096, rank.kind, FORCE_SO);
    let put = |rank: &Rank| {
        let bytes =
            Bytes { local: 0, local_mr: data.mr.device, size: 64, remote: 64, remote_mr: data.mr.device };
        let signal = Signal { at: 1024, mr: data.mr.device, value: 0, op: INC, strong: true };
        // SAFETY: the memory stays until the end.
        unsafe { table.iput_signal(rank.to(0, 0, ranks - 1), bytes, signal) }
    };
    if me != ranks - 1 {
        let request = put(&rank).expect("iputSignal");
        rank.done(0, request);
        rank.barrier();
        // The last rank closes.
        rank.barrier();
        // Some turns look for losses.
        (0..5000).for_each(|_| rank.progress());
        rank.no_error();
        assert!(warnings().is_empty(), "rank {me}: {:#?}", warnings());
        // The first ones may be done before the end of the other rank is known here.
        let begin = std::time::Instant::now();
        while put(&rank).and_then(|request| rank.ended(0, request)).is_ok() {
            assert!(begin.elapsed() < hang(), "rank {me}: puts to a rank that has closed succeed");
        }
        rank.has_error(0);
        rank.barrier();
        rank.end([data]);
    } else {
        rank.until_value(&data, 1024, ranks as u64 - 1);
        rank.barrier();
        let mut group = rank.end([data]);
        group.barrier(&mut || {});
        group.barrier(&mut || {});
    }
    if me == 0 {
        println!("{}: a rank of {ranks} closed", table.version.name());
    }
}
