//! What a process holds and pays by the number of its peers: memory, descriptors, set-up, time of a message.
//!
//! Both ends of all queue pairs are here, under one engine, which the bench itself drives (`drive = caller`): one thread
//! does everything, so that a figure is work and not the scheduler's. What one end holds is half of what the process holds.
//!
//! A message's time has two parts: the engine's passes, and what the program does (it posts a burst to each queue pair, then
//! one pass is made, then it takes what has arrived). Each ring is touched by all queue pairs' turns in between, so with many
//! peers the program's part misses the caches too. The two are told apart in runs of their own, because a look at the clock
//! around each pass is work as well.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use pushgate::proxy::raise_open_files;
use pushgate::settings::DriveChoice;
use pushgate::{Comm, Context, Error, QpConfig, QueuePair, Step};
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_link::producer::Producer;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use super::Bench;
use crate::output::outln;

/// Messages of a queue pair in one turn, as many as the engine takes of one in a pass.
const BURST: u64 = 64;
/// The most peers that the bench may be asked for.
pub const MOST: u32 = 4096;
/// Queue pairs that are made at once: their offers wait at the other end, with their descriptors.
const AT_ONCE: usize = 64;

/// What a process holds at one moment.
#[derive(Clone, Copy)]
struct Held {
    descriptors: u64,
    /// Shared memory that is mapped and was touched, bytes.
    shared: u64,
    /// Memory of the process's own that was touched, bytes.
    own: u64,
    /// Memory that a device or `mlock` keeps in place, bytes.
    pinned: u64,
    threads: u64,
}

impl Held {
    fn now() -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        let kib = |name| number(name) << 10;
        Ok(Held {
            descriptors: std::fs::read_dir("/proc/self/fd").context("/proc/self/fd")?.count() as u64,
            shared: kib("RssShmem"),
            own: kib("RssAnon"),
            pinned: kib("VmPin") + kib("VmLck"),
            threads: number("Threads"),
        })
    }
}

/// One line: the figures of one number of peers.
struct Line {
    peers: u64,
    set_up: Duration,
    /// Of one end of a queue pair.
    descriptors: f64,
    shared: f64,
    own: f64,
    pinned: f64,
    threads: u64,
    /// Nanoseconds.
    all_busy: f64,
    /// The engine's part and the program's, nanoseconds.
    apart: [f64; 2],
    one_busy: f64,
    idle_pass: f64,
}

/// Both ends of one queue pair, as the host drives them.
struct Ends {
    sender: Producer,
    receiver: Producer,
    sent: u64,
    taken: u64,
}

impl Ends {
    /// Publishes up to a burst of messages, which number themselves, and takes what has arrived.
    fn turn(&mut self) -> Result<u64> {
        for _ in 0..BURST {
            let record = Record { flags: Record::INLINE, ..Record::new(Opcode::Send) };
            if !self.sender.post(record, &self.sent.to_le_bytes()) {
                break;
            }
            self.sent += 1;
        }
        self.take()
    }

    fn take(&mut self) -> Result<u64> {
        let mut taken = 0;
        while let Some(received) = self.receiver.try_recv() {
            let number = u64::from_le_bytes(received.inline[..8].try_into().expect("eight bytes"));
            ensure!(number == self.taken, "message {} holds {number}", self.taken);
            self.taken += 1;
            taken += 1;
        }
        if taken > 0 {
            self.receiver.release(taken);
        }
        Ok(taken)
    }
}

pub fn run(b: &Bench, peers: &[u64]) -> Result<()> {
    raise_open_files();
    if !b.json {
        outln!(
            "{:>6} {:>10} {:>7} {:>8} {:>8} {:>8} {:>8} {:>9} {:>6} {:>9} {:>10} {:>9} {:>10}",
            "peers",
            "set-up us",
            "files",
            "shared K",
            "own K",
            "pinned K",
            "threads",
            "busy ns",
            "ratio",
            "engine ns",
            "program ns",
            "one ns",
            "idle ns"
        )?;
    }
    let mut first = None;
    for &n in peers {
        let line = measure(b, n).with_context(|| format!("{n} peers"))?;
        let base = *first.get_or_insert(line.all_busy);
        print(b, &line, line.all_busy / base)?;
    }
    Ok(())
}

fn print(b: &Bench, line: &Line, ratio: f64) -> Result<()> {
    let us = line.set_up.as_secs_f64() * 1e6 / line.peers as f64;
    if b.json {
        let line = json!({
            "bench": "peers", "peers": line.peers, "set_up_us": us, "descriptors": line.descriptors,
            "shared": line.shared, "own": line.own, "pinned": line.pinned, "threads": line.threads,
            "all_busy_ns": line.all_busy, "ratio": ratio, "engine_ns": line.apart[0], "program_ns": line.apart[1],
            "one_busy_ns": line.one_busy,
            "idle_pass_ns": line.idle_pass, "runs": b.runs,
        });
        outln!("{line}")?;
    } else {
        let k = |bytes: f64| bytes / 1024.0;
        outln!(
            "{:>6} {:>10.0} {:>7.1} {:>8.0} {:>8.1} {:>8.0} {:>8} {:>9.1} {:>6.2} {:>9.1} {:>10.1} {:>9.1} {:>10.1}",
            line.peers,
            us,
            line.descriptors,
            k(line.shared),
            k(line.own),
            k(line.pinned),
            line.threads,
            line.all_busy,
            ratio,
            line.apart[0],
            line.apart[1],
            line.one_busy,
            line.idle_pass
        )?;
    }
    Ok(())
}

fn measure(b: &Bench, peers: u64) -> Result<Line> {
    let mut settings = b.settings.clone();
    settings.drive = DriveChoice::Caller;
    let context = Context::builder().settings(settings).share(0, 1).build()?;
    let comms = Comm::local(&context, 2)?;
    let before = Held::now()?;
    let start = Instant::now();
    let qps = join(&comms, peers as usize)?;
    let set_up = start.elapsed();
    let mut ends = Vec::new();
    for [left, right] in &qps {
        ends.push(Ends { sender: left.producer(), receiver: right.producer(), sent: 0, taken: 0 });
    }
    let (mut all_busy, mut one_busy, mut idle) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
    let mut apart = [f64::INFINITY; 2];
    // Each ring goes round once before anything is timed.
    let warm = b.settings.slots.max(b.settings.receives);
    let mut drive = || context.drive();
    stream(b, &mut drive, &qps, &mut ends, Until::Each(warm))?;
    let held = Held::now()?;
    let time = Duration::from_secs_f64(b.seconds);
    for _ in 0..b.runs {
        all_busy = all_busy.min(stream(b, &mut drive, &qps, &mut ends, Until::Time(time))?.0);
        one_busy = one_busy.min(stream(b, &mut drive, &qps, &mut ends[..1], Until::Time(time))?.0);
        let mut engine = Duration::ZERO;
        let mut timed = || {
            let begin = busy();
            let step = context.drive();
            engine += busy() - begin;
            step
        };
        let (all, messages) = stream(b, &mut timed, &qps, &mut ends, Until::Time(time))?;
        let engine = engine.as_nanos() as f64 / messages as f64;
        apart = [apart[0].min(engine), apart[1].min(all - engine)];
        idle = idle.min(passes(&context, time / 4)?);
    }
    let each = |a: u64, b: u64| a.saturating_sub(b) as f64 / (2 * peers) as f64;
    let line = Line {
        peers,
        set_up: set_up / 2,
        descriptors: each(held.descriptors, before.descriptors),
        shared: each(held.shared, before.shared),
        own: each(held.own, before.own),
        pinned: each(held.pinned, before.pinned),
        threads: held.threads,
        all_busy,
        apart,
        one_busy,
        idle_pass: idle,
    };
    drop(ends);
    Ok(line)
}

/// Makes the queue pairs, some at once.
fn join(comms: &[Comm], peers: usize) -> Result<Vec<[QueuePair; 2]>> {
    let [left, right] = comms else { bail!("{} ranks", comms.len()) };
    let mut all = Vec::with_capacity(peers);
    while all.len() < peers {
        let labels = all.len() as u32..peers.min(all.len() + AT_ONCE) as u32;
        let make = |comm: &Comm, peer: u32| {
            let ends: Vec<_> = labels.clone().map(|label| (peer, label)).collect();
            let made = comm.queue_pairs(&ends, QpConfig::default());
            // The other end would wait for one that failed here.
            made.inspect_err(|_| comm.abort())
        };
        let (a, b) = std::thread::scope(|s| {
            let other = s.spawn(|| make(right, 0));
            (make(left, 1), other.join().expect("no panic in set-up"))
        });
        let lost = |e: &Error| matches!(e, Error::Aborted { .. } | Error::TimedOut { .. });
        let (a, b) = match (a, b) {
            // The cause, before what the other end made of it.
            (Err(a), Err(b)) => return Err(if lost(&a) { b } else { a }.into()),
            (a, b) => (a?, b?),
        };
        all.extend(a.into_iter().zip(b).map(|(a, b)| [a, b]));
    }
    Ok(all)
}

/// How long queue pairs are busy.
#[derive(Clone, Copy)]
enum Until {
    Time(Duration),
    /// This number of messages of each.
    Each(u64),
}

/// Keeps these queue pairs busy, with a pass of the engine by each `drive`; nanoseconds for each message,
/// and how many there were.
fn stream(
    b: &Bench,
    drive: &mut impl FnMut() -> pushgate::Result<Step>,
    qps: &[[QueuePair; 2]],
    ends: &mut [Ends],
    until: Until,
) -> Result<(f64, u64)> {
    let (start, begin, mut taken) = (Instant::now(), busy(), 0);
    let (mut heard, least) = (Instant::now(), ends.iter().map(|e| e.taken).min().unwrap_or(0));
    loop {
        let mut some = 0;
        for end in ends.iter_mut() {
            some += end.turn()?;
        }
        drive()?;
        taken += some;
        let over = match until {
            Until::Time(time) => start.elapsed() >= time,
            Until::Each(n) => ends.iter().all(|e| e.taken >= least + n),
        };
        if over {
            break;
        }
        if some > 0 {
            heard = Instant::now();
        } else if heard.elapsed() > b.settings.timeout {
            qps.iter().flatten().try_for_each(QueuePair::check)?;
            bail!("no message arrives");
        }
    }
    let heard = Instant::now();
    while ends.iter().any(|e| e.taken < e.sent) {
        for end in ends.iter_mut() {
            taken += end.take()?;
        }
        drive()?;
        qps.iter().take(1).flatten().try_for_each(QueuePair::check)?;
        ensure!(heard.elapsed() < b.settings.timeout, "the last messages do not arrive");
    }
    let time = busy() - begin;
    Ok((time.as_nanos() as f64 / taken.max(1) as f64, taken))
}

/// Nanoseconds of a pass over queue pairs in which nothing moves.
fn passes(context: &Context, time: Duration) -> Result<f64> {
    let (start, begin) = (Instant::now(), busy());
    let mut passes = 0u64;
    while start.elapsed() < time {
        for _ in 0..16 {
            context.drive()?;
        }
        passes += 16;
    }
    Ok((busy() - begin).as_nanos() as f64 / passes as f64)
}

/// CPU time of this process: the host's other work does not count. This thread does nearly all the work; where it had no core
/// for some milliseconds, the engine's thread has made passes in its place.
fn busy() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
