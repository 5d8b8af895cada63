//! What a peer costs: nothing before its first operation.

use std::collections::BTreeMap;

use super::group::Group;
use super::scenario::Options;
use super::table::{ADD, Bytes, FORCE_SO, HOST, Mr, Ptr, Signal, Table, To};
use crate::nccl::pair::Buffer;
use crate::nccl::scenario::counts;
use crate::{Pause, hang};

struct One {
    init: Ptr,
    comm: Ptr,
    ctx: Ptr,
    memory: Buffer,
    mr: Mr,
}

/// KiB of this process that are in memory.
fn resident() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// This process's descriptors by kind: files by name, sockets and the kernel's own objects without their numbers.
fn kinds() -> BTreeMap<String, i64> {
    let mut kinds = BTreeMap::new();
    let all = std::fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
    for target in all.filter_map(|entry| std::fs::read_link(entry.path()).ok()) {
        let target = target.to_string_lossy().into_owned();
        let kind = target.strip_suffix(']').map(|t| t.trim_end_matches(|c: char| c.is_ascii_digit()));
        *kinds.entry(kind.filter(|kind| kind.ends_with(":[")).unwrap_or(&target).into()).or_default() += 1;
    }
    kinds
}

/// Descriptors of a group that has asked nothing of any rank; where the environment names the transport, at most.
const OWN: usize = 4;
const OWN_OVER_OTHERS: usize = 6;
/// Ranks of a group from which on a peer may cost [`MOST_KIB`].
const MANY: usize = 65;
/// What a peer in use may cost among [`MANY`] ranks, both ends, used both ways: KiB of memory that is mapped, twice where both ends map
/// it, and descriptors: over `local` the watched socket of each end of the two queue pairs. Something else may open one or two meanwhile.
const MOST_KIB: i64 = 4 << 10;
const MOST_DESCRIPTORS: usize = 4;
const MOST_DESCRIPTORS_OVER_OTHERS: usize = 13;
const OTHERS: usize = 2;

/// A group of many ranks, all of them in this thread. What a group opens does not depend on the number of its ranks, and
/// an operation costs what its peer costs.
pub fn growth(o: &Options, table: &Table, group: Group) {
    assert_eq!(group.ranks, 1, "growth has its ranks in one thread: --ranks 1");
    let ranks = o.times.clamp(2, 1023) + 1;
    let inits: Vec<Ptr> = (0..ranks).map(|_| table.init().expect("init")).collect();
    let listened: Vec<_> = inits.iter().map(|init| table.listen(*init, 0).expect("listen")).collect();
    let handles: Vec<[u8; 128]> = listened.iter().map(|(_, handle)| *handle).collect();
    let before = counts();
    let contexts = table.version.contexts(o.contexts);
    let mut all: Vec<One> = (0..ranks)
        .map(|rank| {
            let (init, (listener, _)) = (inits[rank], listened[rank]);
            let mut handles = handles.clone();
            let comm = table.connect(init, &mut handles, rank as i32, contexts, listener).expect("connect");
            table.close_listen(listener).expect("closeListen");
            let ctx = table.create_context(comm, contexts as i32).expect("createContext");
            let memory = Buffer::new(4096);
            let mr = table.reg(comm, memory.at(0), 4096, HOST, FORCE_SO).expect("regMrSym");
            One { init, comm, ctx, memory, mr }
        })
        .collect();
    all.iter().for_each(|one| table.progress(one.ctx).expect("progress"));
    let made = counts();
    // A group has a few of its own, as many for 2 ranks as for 65.
    let own = made[0] as f64 - before[0] as f64;
    let most = if std::env::var_os("PUSHGATE_QP").is_none() { OWN } else { OWN_OVER_OTHERS };
    assert!(
        own <= (most * ranks) as f64,
        "descriptors: {} before {ranks} groups, {} with them",
        before[0],
        made[0]
    );
    let made_kib = resident();
    // The first peer also brings what is made once.
    use_peers(table, &all, 1..2);
    let (first, first_kib, first_kinds) = (counts(), resident(), kinds());
    let used = ranks.min(10) - 2;
    use_peers(table, &all, 2..2 + used);
    let (then, then_kib) = (counts(), resident());
    println!(
        "{}: {ranks} groups of {ranks} ranks: {:.1} descriptors and {:.1} threads each; the first peer in use, both ends: \
         {} descriptors, {} threads, {} KiB; each further peer: {:.1} descriptors, {:.1} threads, {:.0} KiB",
        table.version.name(),
        own / ranks as f64,
        (made[1] as f64 - before[1] as f64) / ranks as f64,
        first[0] - made[0],
        first[1] as i64 - made[1] as i64,
        first_kib - made_kib,
        (then[0] - first[0]) as f64 / used as f64,
        (then[1] as f64 - first[1] as f64) / used as f64,
        (then_kib - first_kib) as f64 / used as f64,
    );
    // The later ones cost no more than the first.
    let (one, others) = (first[0] - made[0], then[0] - first[0]);
    let over_local = std::env::var_os("PUSHGATE_QP").is_none_or(|qp| qp == "local");
    let most = if over_local { MOST_DESCRIPTORS } else { MOST_DESCRIPTORS_OVER_OTHERS };
    let more = kinds().into_iter().map(|(kind, n)| (n - first_kinds.get(&kind).unwrap_or(&0), kind));
    let more: Vec<_> = more.filter(|(n, _)| *n > 0).collect();
    assert!(others <= most * used + OTHERS, "{others} descriptors for {used} peers: {more:?}");
    // Pages over RDMA in software and over TCP are other ones.
    if ranks >= MANY && std::env::var_os("PUSHGATE_QP").is_none() {
        let kib = then_kib - first_kib;
        assert!(kib <= MOST_KIB * used as i64, "{kib} KiB for {used} peers");
    }
    assert!(others <= 2 * one * used, "descriptors: {one} for the first peer, {others} for {used} others");
    for one in &all {
        table.destroy_context(one.ctx).expect("destroyContext");
    }
    for one in all.drain(..) {
        table.dereg(one.comm, one.mr).expect("deregMrSym");
        table.close_coll(one.comm).expect("closeColl");
        table.finalize(one.init).expect("finalize");
    }
}

/// Rank 0 puts with a signal to each of these peers, which answer.
fn use_peers(table: &Table, all: &[One], peers: std::ops::Range<usize>) {
    for peer in peers {
        for (from, to) in [(0, peer), (peer, 0)] {
            let (source, target) = (&all[from], &all[to]);
            source.memory.fill(0, 8, peer as u64);
            let bytes = Bytes {
                local: 0,
                local_mr: source.mr.device,
                size: 8,
                remote: 64,
                remote_mr: source.mr.device,
            };
            let at = 1024 + 8 * from as u64;
            let signal = Signal { at, mr: source.mr.device, value: 3, op: ADD, strong: true };
            let place = To { ctx: source.ctx, context: 0, rank: to as u32, flags: 0 };
            // SAFETY: the memory stays until its group is closed.
            let request = unsafe { table.iput_signal(place, bytes, signal) }.expect("iputSignal");
            let (begin, pause) = (std::time::Instant::now(), Pause::default());
            let mut done = false;
            while !done || target.memory.word(at as usize) != 3 {
                if !done {
                    // SAFETY: the request is not done.
                    done = unsafe { table.test(source.comm, request) }.expect("test");
                }
                [source, target].iter().for_each(|one| table.progress(one.ctx).expect("progress"));
                assert!(begin.elapsed() < hang(), "no signal from {from} at {to}");
                pause.after(false);
            }
            assert_eq!(target.memory.differs(64, 8, peer as u64), None);
        }
    }
}
