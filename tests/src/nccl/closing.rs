//! Connections that are closed with messages in flight, and made again at once. The ranks wait for
//! each other only when they connect, so the slower rank posts to a peer that has gone.

use std::time::{Duration, Instant};

use super::pair::{self, Bootstrap, Buffer, Ends};
use super::scenario::{self, Options, begin, die_with_parent};
use super::table::{Plugin, Ptr, is_gpu_memory, warnings};
use crate::{Pause, hang, patience};

/// Bytes of a message.
const BYTES: usize = 1 << 20;

/// The limit for closing a connection: closing promises to succeed within seconds. It waits for
/// limits of 2 s each, and few of them coincide; the rest is room for a slow and busy machine.
const CLOSED: Duration = Duration::from_secs(60);

type Peers = Vec<Box<dyn Bootstrap>>;

/// What a rank does with a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pace {
    /// Posts everything, and closes.
    Fast,
    /// Posts slowly, and sees each request end before it closes.
    Slow,
    /// Posts nothing, and closes.
    Gone,
    /// Sees its peer go first, posts everything, and sees each request fail.
    Late,
}

/// The paces of the ranks, in turn: both alike, one slower, one that goes first; then three rounds
/// with the ranks exchanged.
fn pace(round: usize, rank: u64) -> Pace {
    let first = (round / 3) as u64 % 2 == rank;
    match (round % 3, first) {
        (0, _) | (1, true) => Pace::Fast,
        (1, false) => Pace::Slow,
        (_, true) => Pace::Gone,
        (_, false) => Pace::Late,
    }
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Open(Ptr),
    Done,
    Failed,
}

/// One thread of a rank.
struct Rank<'a> {
    plugin: &'a Plugin,
    ctx: Ptr,
    rank: u64,
    /// Messages each way on a connection.
    messages: usize,
    /// The content of each message.
    out: Buffer,
    /// The content of the peer's messages.
    expected: Buffer,
    into: Buffer,
    pause: Pause,
}

impl Rank<'_> {
    /// Whether a request is a receive; receives come first.
    fn is_receive(&self, number: usize) -> bool {
        number < self.messages
    }

    /// Posts everything. If the plugin has no room, looks at the open requests and asks again, as
    /// NCCL does.
    fn post(&self, ends: Ends, registrations: &[(Ptr, Ptr)], pace: Pace) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut last = Instant::now();
        while requests.len() < 2 * self.messages {
            let i = requests.len();
            let (_, mr) = registrations[i.min(self.messages)];
            // SAFETY: the buffers stay until the connections are closed, and nothing else writes to
            // them.
            let posted = unsafe {
                match self.is_receive(i) {
                    true => self.plugin.irecv(ends.recv, &[self.into.at(i * BYTES)], &[BYTES], &[7], &[mr]),
                    false => self.plugin.isend(ends.send, self.out.at(0), BYTES, 7, mr),
                }
            };
            match posted {
                Ok(Some(request)) => {
                    requests.push(Request::Open(request));
                    last = Instant::now();
                }
                Ok(None) if self.test(&mut requests) => last = Instant::now(),
                Ok(None) => {}
                Err(e) => panic!("post {i}, {pace:?}: {e}; the plugin says: {:#?}", warnings()),
            }
            let some = requests.len();
            assert!(last.elapsed() < hang(), "{pace:?}: {some} of {} requests are taken", 2 * self.messages);
            if pace == Pace::Slow {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        requests
    }

    /// Tests all open requests. True if any has ended.
    fn test(&self, requests: &mut [Request]) -> bool {
        let mut any = false;
        for (i, request) in requests.iter_mut().enumerate() {
            let Request::Open(at) = *request else { continue };
            // SAFETY: the request is not done yet.
            let done = unsafe {
                match self.is_receive(i) {
                    true => self.plugin.test_receive(at, true).map(|sizes| sizes.is_some()),
                    false => self.plugin.test_send(at, true),
                }
            };
            match done {
                Ok(false) => continue,
                Ok(true) => *request = Request::Done,
                Err(_) => *request = Request::Failed,
            }
            any = true;
            if let (true, Request::Done) = (self.is_receive(i), *request) {
                // SAFETY: within both buffers; the plugin is done with this stretch, and nothing
                // writes to `expected`.
                let [found, expected] = [self.into.at(i * BYTES), self.expected.at(0)]
                    .map(|at| unsafe { std::slice::from_raw_parts(at.cast::<u8>(), BYTES) });
                assert!(found == expected, "receive {i} is done, and not all of its message is there");
            }
        }
        self.pause.after(any);
        any
    }

    /// Tests until no request is open; returns how many are done.
    fn finish(&self, requests: &mut [Request]) -> usize {
        let mut last = Instant::now();
        while requests.iter().any(|r| matches!(r, Request::Open(_))) {
            if self.test(requests) {
                last = Instant::now();
            }
            assert!(last.elapsed() < hang(), "requests that never end: {requests:?}");
        }
        requests.iter().filter(|r| matches!(r, Request::Done)).count()
    }

    fn round(&self, round: usize, peer: &mut dyn Bootstrap) {
        let (plugin, pace) = (self.plugin, pace(round, self.rank));
        let (listener, own) = plugin.listen(self.ctx).expect("listen");
        peer.tell(&own);
        let mut theirs = [0; 128];
        peer.hear(&mut theirs);
        let ends = pair::poll_ends(plugin, self.ctx, listener, &mut theirs)
            .unwrap_or_else(|e| panic!("connect: {e:?}; the plugin says: {:#?}", warnings()));
        // One registration for each receive, and one for all sends.
        let receives = (0..self.messages).map(|i| (ends.recv, self.into.at(i * BYTES)));
        let registrations: Vec<(Ptr, Ptr)> = receives
            .chain([(ends.send, self.out.at(0))])
            .map(|(comm, at)| (comm, plugin.reg_mr(comm, at, BYTES).expect("regMr")))
            .collect();
        if pace == Pace::Late {
            // The peer has closed.
            peer.hear(&mut [0]);
        }
        let mut requests =
            if pace == Pace::Gone { Vec::new() } else { self.post(ends, &registrations, pace) };
        match pace {
            Pace::Late => {
                assert_eq!(self.finish(&mut requests), 0, "done, although the peer is gone: {requests:?}")
            }
            Pace::Slow => _ = self.finish(&mut requests),
            Pace::Fast | Pace::Gone => {}
        }
        let begin = Instant::now();
        for (comm, mr) in registrations {
            plugin.dereg_mr(comm, mr).unwrap_or_else(|e| panic!("{e}: {:#?}", warnings()));
        }
        plugin.close_send(ends.send).expect("closeSend");
        plugin.close_recv(ends.recv).expect("closeRecv");
        plugin.close_listen(listener).expect("closeListen");
        assert!(
            begin.elapsed() < patience(CLOSED),
            "{pace:?}, round {round}: closed after {:?}",
            begin.elapsed()
        );
        if pace == Pace::Gone {
            peer.tell(b"!");
        }
    }
}

/// Runs this many rounds of a rank, on as many threads as there are peers. A thread that panics
/// drops its peer, which the other rank's thread notices.
fn rounds(
    (plugin, messages): (&Plugin, usize),
    ctx: Ptr,
    rank: u64,
    rounds: std::ops::Range<usize>,
    peers: Peers,
) -> Peers {
    struct Context(Ptr);
    // SAFETY: NCCL passes its context to several threads too.
    unsafe impl Sync for Context {}
    let ctx = &Context(ctx);
    std::thread::scope(|scope| {
        let one = |mut peer: Box<dyn Bootstrap>| {
            let rounds = rounds.clone();
            scope.spawn(move || {
                let Context(ctx) = *ctx;
                let [out, expected] = [rank, 1 - rank].map(|seed| {
                    let buffer = Buffer::new(BYTES);
                    buffer.fill(0, BYTES, seed);
                    buffer
                });
                let into = Buffer::new(messages * BYTES);
                let rank = Rank { plugin, ctx, rank, messages, out, expected, into, pause: Pause::default() };
                rounds.for_each(|round| rank.round(round, &mut *peer));
                peer
            })
        };
        let threads: Vec<_> = peers.into_iter().map(one).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.map(|peer| peer.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// A rank: first a few rounds, after which everything that is made once exists, then the rounds
/// that must leave nothing.
fn rank(o: &Options, plugin: &Plugin, rank: u64, peers: Peers) {
    let ctx = begin(plugin);
    // One round of each kind.
    let few = 3;
    let mut peers = rounds((plugin, o.in_flight), ctx, rank, 0..few, peers);
    // If the other rank is in this process, both ranks are between their rounds here.
    peers.iter_mut().for_each(|peer| peer.barrier());
    let before = scenario::counts();
    peers.iter_mut().for_each(|peer| peer.barrier());
    let mut peers = rounds((plugin, o.in_flight), ctx, rank, few..few + o.times, peers);
    peers.iter_mut().for_each(|peer| peer.barrier());
    let after = scenario::counts_down_to(before, hang());
    // The allocator may map or unmap arenas of its own, for each thread.
    let some = 8 * (1 + o.threads) * if is_gpu_memory() { 2 } else { 1 };
    let kept = after[0] <= before[0] && after[1] <= before[1] && after[2] <= before[2] + some;
    let what = format!(
        "descriptors, threads, mappings as {before:?} before {} x {} connections",
        o.threads, o.times
    );
    o.promise(&what, kept, &after);
    peers.iter_mut().for_each(|peer| peer.barrier());
    plugin.finalize(ctx).expect("finalize");
    // In the second process, standard output belongs to the bootstrap.
    if rank == 0 {
        println!(
            "{} threads, {} times each; descriptors, threads, mappings {before:?} before and {after:?} after",
            o.threads, o.times
        );
    }
}

/// Connections closed with messages in flight and made again: every post is accepted and every test
/// ends, closing succeeds within seconds, and nothing is left.
pub fn closing(o: &Options) {
    let plugin = o.open();
    if o.processes {
        let (mut child, peers) = o.spawn_threads("closing-rank");
        rank(o, &plugin, 0, peers);
        assert!(child.wait().expect("the second rank").success(), "the second rank failed");
        return;
    }
    let (here, there) =
        (0..o.threads).map(|_| scenario::stream_pair()).map(|[a, b]| (a, b)).unzip::<_, _, Peers, Peers>();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(o, &plugin, 1, there));
        rank(o, &plugin, 0, here);
        other.join().expect("the second rank failed");
    });
}

/// The second process of [`closing`].
pub fn closing_rank(o: &Options) {
    die_with_parent();
    rank(o, &o.open(), 1, o.threads_of_parent());
}
