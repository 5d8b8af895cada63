//! Measures how fast a plugin is between two processes of a host, on host memory: one message back
//! and forth, and messages one way with one and with several in flight. Also measures what one
//! thread copies, which is what a plugin with one copy can reach.

use std::time::Instant;

use super::cores;
use super::pair::{self, Bootstrap, Buffer, Ends};
use super::scenario::{Options, begin, close, die_with_parent, parent};
use super::table::{Plugin, Ptr, Result};
use crate::hang;

/// The sizes of messages in bytes.
const SIZES: [usize; 4] = [8, 4 << 10, 64 << 10, 512 << 10];
/// The numbers of messages in flight.
const IN_FLIGHT: [usize; 2] = [1, 8];
/// The best of this many runs counts.
const RUNS: usize = 5;
const SEED: u64 = 77;

/// One rank's end and its memory: a slot for each message in flight.
struct Rank<'a> {
    plugin: &'a Plugin,
    ends: Ends,
    out: Buffer,
    into: Buffer,
    out_mr: Ptr,
    into_mr: Ptr,
}

const STRIDE: usize = SIZES[SIZES.len() - 1];
const SLOTS: usize = IN_FLIGHT[IN_FLIGHT.len() - 1];

impl Rank<'_> {
    fn send(&self, slot: usize, size: usize) -> Result<Option<Ptr>> {
        let at = self.out.at(slot * STRIDE);
        // SAFETY: nothing writes this slot while a message is under way.
        unsafe { self.plugin.isend(self.ends.send, at, size, 1, self.out_mr) }
    }

    fn receive(&self, slot: usize, size: usize) -> Result<Option<Ptr>> {
        let at = self.into.at(slot * STRIDE);
        // SAFETY: nothing else uses this slot until the request is done.
        unsafe { self.plugin.irecv(self.ends.recv, &[at], &[size], &[1], &[self.into_mr]) }
    }

    /// Sends or receives `n` messages with at most `depth` in flight.
    fn pass(&self, sends: bool, size: usize, n: usize, depth: usize) -> Result<()> {
        let mut requests = [None; SLOTS];
        let (mut posted, mut done) = (0, 0);
        let mut last = Instant::now();
        while done < n {
            let before = (posted, done);
            // In order, as NCCL's steps are.
            if posted < n && posted < done + depth {
                let slot = posted % depth;
                requests[slot] = if sends { self.send(slot, size)? } else { self.receive(slot, size)? };
                posted += usize::from(requests[slot].is_some());
            }
            if done < posted {
                let slot = done % depth;
                let request = requests[slot].expect("posted");
                // SAFETY: the request is not done yet.
                let ended = unsafe {
                    match sends {
                        true => self.plugin.test_send(request, true)?,
                        false => self.plugin.test_receive(request, true)?.is_some(),
                    }
                };
                done += usize::from(ended);
            }
            if (posted, done) != before {
                last = Instant::now();
            } else {
                assert!(last.elapsed() < hang(), "no progress within a long time: posted, done {before:?}");
                // What NCCL's proxy does when it has no work.
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Passes `n` messages one way, and one of 8 bytes back when all have arrived; returns the
    /// time. Both ranks call it.
    fn one_way(&self, first: bool, size: usize, n: usize, depth: usize) -> Result<f64> {
        let begin = Instant::now();
        self.pass(first, size, n, depth)?;
        self.pass(!first, 8, 1, 1)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Passes one message back and forth, `n` times. The receive is posted before the peer can have
    /// sent, as NCCL posts it.
    fn back_and_forth(&self, first: bool, size: usize, n: usize) -> Result<f64> {
        let begin = Instant::now();
        let (mut send, mut receive) = (None, None);
        let (mut posted, mut received, mut sent, mut done) = (0, 0, 0, 0);
        let mut last = begin;
        while received < n || done < n {
            if receive.is_none() && posted < n {
                receive = self.receive(0, size)?;
                posted += usize::from(receive.is_some());
            }
            // The first rank waits for the answer before it sends the next; the second waits for
            // what it answers.
            let may_send = if first { received == sent && posted > sent } else { received > sent };
            if send.is_none() && sent < n && may_send {
                send = self.send(0, size)?;
                sent += usize::from(send.is_some());
            }
            let sent_one = match send {
                // SAFETY: the request is not done yet.
                Some(request) => unsafe { self.plugin.test_send(request, true)? },
                None => false,
            };
            if sent_one {
                (send, done) = (None, done + 1);
            }
            let received_one = match receive {
                // SAFETY: the request is not done yet.
                Some(request) => unsafe { self.plugin.test_receive(request, true)?.is_some() },
                None => false,
            };
            if received_one {
                (receive, received, last) = (None, received + 1, Instant::now());
            } else {
                assert!(
                    last.elapsed() < hang(),
                    "no progress within a long time: {received} of {n} are back"
                );
                std::thread::yield_now();
            }
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Sends one message and receives one, `n` times: the next two when both are done, as in NCCL's send/recv of a short message.
    /// A request that is done is not tested again, so nothing calls for its connection meanwhile.
    fn exchange(&self, size: usize, n: usize) -> Result<f64> {
        let begin = Instant::now();
        for _ in 0..n {
            let (mut send, mut receive, mut sent, mut received) = (None, None, false, false);
            let last = Instant::now();
            while !sent || !received {
                if receive.is_none() {
                    receive = self.receive(0, size)?;
                }
                if send.is_none() {
                    send = self.send(0, size)?;
                }
                if let (Some(request), false) = (send, sent) {
                    // SAFETY: the request is not done yet.
                    sent = unsafe { self.plugin.test_send(request, true)? };
                }
                if let (Some(request), false) = (receive, received) {
                    // SAFETY: the request is not done yet.
                    received = unsafe { self.plugin.test_receive(request, true)?.is_some() };
                }
                assert!(
                    last.elapsed() < hang(),
                    "no progress within a long time: sent {sent}, received {received}"
                );
                std::thread::yield_now();
            }
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    /// The best of [`RUNS`] runs, after one that does not count. Only the first rank's figures are
    /// used.
    fn best(&self, peer: &mut dyn Bootstrap, run: impl Fn() -> Result<f64>) -> f64 {
        let all = (0..=RUNS).map(|_| {
            peer.barrier();
            run().unwrap_or_else(|e| panic!("{e}; the plugin says: {:#?}", super::table::warnings()))
        });
        all.skip(1).fold(f64::INFINITY, f64::min)
    }
}

/// The figures of one size.
struct Figures {
    /// Microseconds of one message one way, one message at a time.
    latency: f64,
    /// Microseconds of one message each way at once.
    exchange: f64,
    /// Bytes a second with each number of [`IN_FLIGHT`].
    rates: [f64; IN_FLIGHT.len()],
}

/// The figures of all sizes, and the share of this process's run time that its plugin's threads took.
fn measure(o: &Options, plugin: &Plugin, first: bool, peer: &mut dyn Bootstrap) -> (Vec<Figures>, f64) {
    let ctx = begin(plugin);
    let ends = pair::connect(plugin, ctx, peer).expect("connect");
    let (out, into) = (Buffer::new(STRIDE * SLOTS), Buffer::new(STRIDE * SLOTS));
    out.fill(0, out.bytes(), SEED);
    let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes()).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes()).expect("regMr");
    let rank = Rank { plugin, ends, out, into, out_mr, into_mr };
    let n = o.times;
    let before = cores::run_times();
    let figures = SIZES.map(|size| {
        let both = 2.0 * n as f64;
        let latency = rank.best(peer, || rank.back_and_forth(first, size, n)) / both * 1e6;
        let exchange = rank.best(peer, || rank.exchange(size, n)) / n as f64 * 1e6;
        let rates = IN_FLIGHT
            .map(|depth| (n * size) as f64 / rank.best(peer, || rank.one_way(first, size, n, depth)));
        Figures { latency, exchange, rates }
    });
    let [plugins, others] = [0, 1].map(|i| (cores::run_times()[i] - before[i]) as f64);
    // What the last size's messages left: the receiver's slots, one after another, hold what the
    // sender has.
    let arrived = if first { STRIDE } else { STRIDE * SLOTS.min(n) };
    assert_eq!(rank.into.differs(0, arrived, SEED), None, "what came is not what was sent");
    plugin.dereg_mr(ends.send, rank.out_mr).expect("deregMr");
    plugin.dereg_mr(ends.recv, rank.into_mr).expect("deregMr");
    // Neither rank closes before the other has its last message.
    peer.barrier();
    close(plugin, ends);
    plugin.finalize(ctx).expect("finalize");
    (figures.into(), plugins / (plugins + others))
}

/// Bytes a second that one thread copies between as many slots as are in flight.
fn memcpy(size: usize, depth: usize, n: usize) -> f64 {
    let (from, to) = (Buffer::new(STRIDE * SLOTS), Buffer::new(STRIDE * SLOTS));
    from.fill(0, from.bytes(), SEED);
    let run = |_| {
        let begin = Instant::now();
        for i in 0..n {
            let at = i % depth * STRIDE;
            // SAFETY: within both buffers, which nothing else uses.
            unsafe { std::ptr::copy_nonoverlapping(from.at(at).cast::<u8>(), to.at(at).cast(), size) };
            // Every copy is made, although the next writes the same bytes.
            std::hint::black_box(&to);
        }
        (n * size) as f64 / begin.elapsed().as_secs_f64()
    };
    (0..=RUNS).map(run).skip(1).fold(0.0, f64::max)
}

/// Prints the times of a plugin's messages and the rates that they reach.
pub fn speed(o: &Options) {
    let (mut child, mut peer) = o.spawn("speed-rank");
    cores::bind(0, o.cores);
    let plugin = o.open();
    let (figures, share) = measure(o, &plugin, true, &mut *peer);
    assert!(child.wait().expect("the second rank").success(), "the second rank failed");
    let [few, many] = IN_FLIGHT;
    println!(
        "{} v{}, two processes, cores of each: {}; host memory, {} messages, best of {RUNS}; GB/s of messages one way, \
         and of one thread's memcpy between as many buffers",
        plugin.name(),
        o.version,
        if o.cores == 0 { "all".into() } else { o.cores.to_string() },
        o.times
    );
    println!(
        "{:>7} {:>18} {:>9} {:>12} {:>8} {:>6} {:>12} {:>8} {:>6}",
        "bytes",
        "us, one at a time",
        "both ways",
        format!("{few} in flight"),
        "memcpy",
        "ratio",
        format!("{many} in flight"),
        "memcpy",
        "ratio"
    );
    for (size, f) in SIZES.into_iter().zip(figures) {
        print!("{size:>7} {:>18.2} {:>9.2}", f.latency, f.exchange);
        for (depth, rate) in IN_FLIGHT.into_iter().zip(f.rates) {
            let most = memcpy(size, depth, o.times);
            print!(" {:>12.3} {:>8.3} {:>6.3}", rate / 1e9, most / 1e9, rate / most);
        }
        println!();
    }
    println!("the plugin's threads took {:.1} % of the process's run time", share * 100.0);
}

/// The second process of [`speed`].
pub fn second(o: &Options) {
    die_with_parent();
    cores::bind(1, o.cores);
    measure(o, &o.open(), false, &mut *parent());
}
