//! What connections cost that are made at once: time, descriptors, mappings and memory before any of them is used, and the time of a
//! message over one of them and over all in turn.

use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::pair::{self, Bootstrap, Buffer, Ends};
use super::scenario::{Options, begin, close, counts, die_with_parent, parent, send, wait};
use super::table::{Plugin, Ptr};
use crate::{Pause, hang};

/// Bytes of a message.
const BYTES: usize = 8;
/// Messages back and forth over one connection.
const ROUNDS: usize = 2_000;

/// `--times` connections each way between two processes.
pub fn growth(o: &Options) {
    let (mut child, mut peer) = o.spawn("growth-rank");
    let (cost, times) = grow(o, true, &mut *peer);
    assert!(child.wait().expect("wait").success(), "the second rank failed");
    let ends = 2.0 * o.times as f64;
    let [fds, maps, kib] = cost.held.map(|n| n as f64 / ends);
    println!(
        "{} connections each way: set up in {:.0} ms; an end that was not used: {fds:.1} descriptors, {maps:.1} mappings, {kib:.0} KiB; \
         {BYTES} bytes one way: {:.1} us where there is no other connection, {:.1} us over one of them, {:.1} us over all in turn",
        o.times,
        cost.setup.as_secs_f64() * 1e3,
        times[0],
        times[1],
        times[2],
    );
}

/// The second process of [`growth`].
pub fn second(o: &Options) {
    die_with_parent();
    grow(o, false, &mut *parent());
}

struct Cost {
    setup: Duration,
    /// Descriptors, mappings and KiB.
    held: [usize; 3],
}

/// One end of a connection each way, and registered memory at both.
struct Pair {
    ends: Ends,
    mrs: [Ptr; 2],
}

/// The cost, and microseconds of a message: alone, over one of all, over all in turn.
fn grow(o: &Options, first: bool, peer: &mut dyn Bootstrap) -> (Cost, [f64; 3]) {
    let limit = getrlimit(Resource::Nofile);
    // As an administrator does for as many ranks.
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("setrlimit");
    let plugin = o.open();
    let ctx = begin(&plugin);
    let buffer = Buffer::new(2 * 4096);
    let register = |ends: Ends| {
        let mrs = [(ends.send, 0), (ends.recv, 4096)]
            .map(|(comm, at)| plugin.reg_mr(comm, buffer.at(at), BYTES).expect("regMr"));
        Pair { ends, mrs }
    };
    let one = register(pair::connect(&plugin, ctx, peer).expect("connect"));
    let alone = (0..3).map(|_| back_and_forth(&plugin, &[&one], &buffer, first, ROUNDS, peer));
    let alone = alone.fold(f64::INFINITY, f64::min);

    peer.barrier();
    let before = held();
    let began = Instant::now();
    let all = connect_all(&plugin, ctx, o.times, peer);
    peer.barrier();
    let setup = began.elapsed();
    let after = held();
    let cost = Cost { setup, held: [0, 1, 2].map(|i| after[i].saturating_sub(before[i])) };

    let all: Vec<Pair> = all.into_iter().map(register).collect();
    let busy = (0..3).map(|_| back_and_forth(&plugin, &[&all[0]], &buffer, first, ROUNDS, peer));
    let busy = busy.fold(f64::INFINITY, f64::min);
    let in_turn: Vec<&Pair> = all.iter().collect();
    let in_turn = back_and_forth(&plugin, &in_turn, &buffer, first, ROUNDS.max(2 * all.len()), peer);
    // Neither rank closes before the other has its last message.
    peer.barrier();
    for Pair { ends, mrs } in all.into_iter().chain([one]) {
        plugin.dereg_mr(ends.send, mrs[0]).expect("deregMr");
        plugin.dereg_mr(ends.recv, mrs[1]).expect("deregMr");
        close(&plugin, ends);
    }
    plugin.finalize(ctx).expect("finalize");
    (cost, [alone, busy, in_turn])
}

/// Connects `n` times each way, all at once as NCCL does.
pub(super) fn connect_all(plugin: &Plugin, ctx: Ptr, n: usize, peer: &mut dyn Bootstrap) -> Vec<Ends> {
    let listening: Vec<_> = (0..n).map(|_| plugin.listen(ctx).expect("listen")).collect();
    // Both tell before they hear: as much as a socket takes at a time.
    let mut theirs = Vec::new();
    for part in listening.chunks(64) {
        part.iter().for_each(|(_, own)| peer.tell(own));
        for _ in part {
            let mut handle = [0; 128];
            peer.hear(&mut handle);
            theirs.push(handle);
        }
    }
    let mut ends: Vec<[Option<Ptr>; 2]> = vec![[None; 2]; n];
    let (began, pause) = (Instant::now(), Pause::default());
    while ends.iter().flatten().any(Option::is_none) {
        let mut any = false;
        for (at, [send, recv]) in ends.iter_mut().enumerate() {
            if send.is_none() {
                *send = plugin.connect(ctx, &mut theirs[at]).expect("connect");
                any |= send.is_some();
            }
            if recv.is_none() {
                *recv = plugin.accept(listening[at].0).expect("accept");
                any |= recv.is_some();
            }
        }
        assert!(began.elapsed() < hang(), "connections that are not made");
        pause.after(any);
    }
    listening.iter().for_each(|(listener, _)| plugin.close_listen(*listener).expect("closeListen"));
    let made = |[send, recv]: [Option<Ptr>; 2]| Ends { send: send.expect("made"), recv: recv.expect("made") };
    ends.into_iter().map(made).collect()
}

/// Messages back and forth, `rounds` of them over these connections in turn. Microseconds of a message one way.
fn back_and_forth(
    plugin: &Plugin,
    pairs: &[&Pair],
    buffer: &Buffer,
    first: bool,
    rounds: usize,
    peer: &mut dyn Bootstrap,
) -> f64 {
    peer.barrier();
    let began = Instant::now();
    for round in 0..rounds {
        let Pair { ends, mrs } = pairs[round % pairs.len()];
        let to = || {
            let request = send(plugin, *ends, buffer, BYTES, 1, mrs[0]).expect("room");
            wait(plugin, request).expect("send");
        };
        let from = || {
            // SAFETY: the buffer outlives the connection.
            let posted = unsafe { plugin.irecv(ends.recv, &[buffer.at(4096)], &[BYTES], &[1], &[mrs[1]]) };
            wait(plugin, posted.expect("irecv").expect("room")).expect("receive");
        };
        if first {
            to();
        }
        from();
        if !first {
            to();
        }
    }
    began.elapsed().as_secs_f64() / (2 * rounds) as f64 * 1e6
}

/// Descriptors, mappings, and KiB of memory; memory that several processes have mapped counts in parts.
fn held() -> [usize; 3] {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").expect("smaps_rollup");
    let kib = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.trim().parse().ok());
    let [fds, _, maps] = counts();
    [fds, maps, kib.expect("Pss")]
}
