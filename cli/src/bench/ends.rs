//! The two ends of a queue pair alone: gate, permits, credit and counts as an endpoint has them, but neither rings nor
//! kernels. Both ends are threads of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use pushgate::abi;
use pushgate_core::gate::{Gate, Need};
use pushgate_core::session::{Session, count_word};
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_engine::idle::{Idle, Step, Wake};
use pushgate_link::{Arrival, Link, PeerCounts};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Messages of one pass in each direction, as in an endpoint.
const BATCH: u64 = 64;
/// Passes without work between two looks at what could end the run.
const LOOK: u32 = 1024;
/// What an idle end that moves bytes sleeps for at most. The other end may need the core.
const NAP: Duration = Duration::from_micros(500);

/// A clock that costs nothing, which perftest uses too: a virtual machine may have no
/// other that is read without leaving it.
#[inline]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// One end: what an endpoint keeps for its queue pair, less the rings.
pub struct End {
    rank: u32,
    gate: Gate,
    qp: Box<dyn Link>,
    session: Session,
    /// Messages that were taken.
    inbound: u64,
    window: Arc<SharedMemory>,
    size: u32,
    units: u32,
    /// Messages that the window holds.
    depth: u64,
    receives: u64,
    sent: u64,
    retired: u64,
    acknowledged: PeerCounts,
    born: Instant,
}

/// What ends a run that does not end by itself.
pub struct Watch<'a> {
    until: Instant,
    failed: &'a AtomicBool,
    turns: u32,
    /// An engine's policy, for ends that need not be quick.
    idle: Option<Idle>,
    /// Whether bytes wake an end that sleeps.
    woken: bool,
}

/// Both ends, how long a run may take, and the core of each.
pub struct Ends {
    pub ends: [End; 2],
    pub limit: Duration,
    pub cores: Option<[usize; 2]>,
    /// Bytes that arrive wake an end that sleeps, as they wake an engine.
    pub woken: bool,
}

/// The first two cores that this program may use. Two threads that poll must not come
/// to share one: then each message waits for the scheduler.
pub fn cores() -> Option<[usize; 2]> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    Some([cores.next()?, cores.next()?])
}

/// Has this thread run on that core alone.
pub fn pin(core: Option<usize>) {
    if let Some(core) = core {
        let mut set = CpuSet::new();
        set.set(core);
        // Figures of threads that move are worse, and no more.
        let _ = sched_setaffinity(None, &set);
    }
}

impl End {
    /// An end of a queue pair whose window holds `depth` messages of `size` bytes.
    pub fn new(
        rank: u32,
        qp: Box<dyn Link>,
        window: Arc<SharedMemory>,
        size: u32,
        depth: u64,
        receives: u64,
    ) -> Self {
        End {
            rank,
            gate: Gate::new(receives as u32, qp.budget()),
            qp,
            session: Session::new(0),
            inbound: 0,
            window,
            size,
            units: (size as u64).div_ceil(abi::PUSHGATE_UNIT as u64) as u32,
            depth,
            receives,
            sent: 0,
            retired: 0,
            acknowledged: PeerCounts::default(),
            born: Instant::now(),
        }
    }

    /// Takes in the peer's counts and what completed.
    #[inline]
    fn progress(&mut self) -> Result<bool> {
        let counts = self.qp.peer_counts();
        let (released, received) = self.session.peer_counts(self.sent, counts.released, counts.received)?;
        self.gate.grant(counts.granted & abi::PUSHGATE_COUNT_MASK)?;
        let done = self.qp.poll_send(received)?;
        self.gate.complete(done);
        let new = released - self.retired;
        self.gate.retire(new * self.size as u64);
        self.retired = released;
        Ok(new != 0 || done != 0)
    }

    /// Posts the next message, if the window and the gate have room for it.
    #[inline]
    fn send(&mut self) -> Result<bool> {
        if self.sent - self.retired >= self.depth {
            return Ok(false);
        }
        let Ok(permit) = self.gate.reserve(Need { bytes: self.size, receive: true }) else {
            return Ok(false);
        };
        let place = (self.sent % self.depth) as u32 * self.units;
        let words = self.window.words((place as usize) << abi::PUSHGATE_UNIT_LOG, self.size as usize / 8);
        for at in [0, words.len() - 1] {
            words[at].store(self.sent + 1, Ordering::Relaxed);
        }
        let record =
            Record { length: self.size, place, place_offset: self.units as u64, ..Record::new(Opcode::Send) };
        self.qp.post_send(permit, self.sent, &record, &record.encode(0))?;
        self.sent += 1;
        Ok(true)
    }

    /// Takes the next message, if there is one, and checks that its payload is there.
    #[inline]
    fn take(&mut self) -> Result<bool> {
        let mut words = [0; 8];
        match self.qp.poll_recv(&mut words) {
            Arrival::Empty => return Ok(false),
            Arrival::Record => {}
            Arrival::Placed => {
                bail!("message {} came as a put, which nobody sends here", self.inbound)
            }
            Arrival::Torn => {
                bail!("message {}: its slot holds what no sender could have written", self.inbound)
            }
        }
        let r = Record::decode(&words)?;
        let message = self.inbound;
        ensure!(r.id == message as u32, "message {message} carries the sequence number {}", r.id);
        self.inbound += 1;
        ensure!(
            (r.length, r.units()) == (self.size, self.units),
            "message {message} has {} bytes of {}",
            r.length,
            self.size
        );
        let payload = self.qp.payload(r.place, r.units()).context("the payload leaves the window")?;
        // Its stamp: the first word and the last.
        for at in [0, self.size as usize / 8 - 1] {
            // SAFETY: `size` bytes of the message lie in the mirror, which is mapped as long as the queue
            // pair lives; it is aligned, and read as an atomic.
            let found = unsafe { (*(payload as *const AtomicU64).add(at)).load(Ordering::Relaxed) };
            ensure!(found == message + 1, "message {message}: word {at} of its payload is {found:#x}");
        }
        Ok(true)
    }

    /// Publishes what was taken, and a new receive for each.
    #[inline]
    fn acknowledge(&mut self) {
        let taken = self.inbound;
        let counts = PeerCounts {
            released: count_word(0, taken),
            received: count_word(0, taken),
            granted: count_word(0, taken + self.receives),
        };
        if counts != self.acknowledged {
            self.acknowledged = counts;
            self.qp.acknowledge(counts);
        }
    }

    /// Sleeps until something arrives or can go on.
    fn block(&mut self) -> Result<()> {
        if self.qp.prepare_sleep() {
            return Ok(());
        }
        let mut fds = Vec::new();
        self.qp.wakes(&mut fds);
        let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: NAP.as_nanos() as i64 })) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// One pass in an endpoint's order: takes at most `most` messages and posts those that
    /// are due. `more` hears how many were taken and says how many become due.
    #[inline]
    fn pass(
        &mut self,
        most: u64,
        due: &mut u64,
        more: impl FnOnce(u64) -> u64,
        watch: &mut Watch,
    ) -> Result<()> {
        let mut taken = 0;
        while taken < most && self.take()? {
            taken += 1;
        }
        *due += more(taken);
        self.acknowledge();
        let mut work = self.progress()? || taken != 0;
        for _ in 0..BATCH {
            if *due == 0 || !self.send()? {
                break;
            }
            *due -= 1;
            work = true;
        }
        self.qp.notify()?;
        if !work {
            watch.idle(self)?;
        } else if let Some(idle) = &mut watch.idle {
            idle.busy();
        }
        Ok(())
    }
}

impl Watch<'_> {
    #[inline]
    fn idle(&mut self, end: &mut End) -> Result<()> {
        self.turns += 1;
        if let Some(idle) = &mut self.idle {
            match idle.idle(end.born.elapsed().as_nanos() as u64) {
                Step::Spin => {}
                Step::Yield => std::thread::yield_now(),
                Step::Sleep(_) | Step::Block(_) if self.woken => end.block()?,
                Step::Sleep(_) | Step::Block(_) => std::thread::sleep(NAP),
            }
        }
        if !self.turns.is_multiple_of(LOOK) {
            std::hint::spin_loop();
            return Ok(());
        }
        end.qp.check(end.born.elapsed().as_nanos() as u64)?;
        ensure!(!self.failed.load(Ordering::Relaxed), "the other end failed");
        if Instant::now() > self.until {
            bail!(
                "the time limit is over: {} messages sent, {} of them acknowledged, {} taken",
                end.sent,
                end.retired,
                end.inbound
            );
        }
        Ok(())
    }
}

impl Ends {
    /// Runs `first` and `second` at once, each with its end, where `naps` says that an idle
    /// one may sleep. The first one's answer.
    fn both<T>(
        &mut self,
        naps: bool,
        first: impl FnOnce(&mut End, &mut Watch) -> Result<T>,
        mut second: impl FnMut(&mut End, &mut Watch) -> Result<()> + Send,
    ) -> Result<T> {
        let until = Instant::now() + self.limit;
        let (over, failed) = (AtomicBool::new(false), AtomicBool::new(false));
        let watch = || Watch {
            until,
            failed: &failed,
            turns: 0,
            idle: naps.then(|| Idle::new(Wake::Doorbell, true)),
            woken: self.woken,
        };
        let [a, b] = &mut self.ends;
        let [left, right] = [0, 1].map(|i| self.cores.map(|cores| cores[i]));
        pin(left);
        std::thread::scope(|s| {
            let other = s.spawn(|| {
                pin(right);
                let mut watch = watch();
                // To the end of the run: its last counts may not be out yet.
                while !over.load(Ordering::Acquire) {
                    if let Err(e) = second(b, &mut watch) {
                        failed.store(true, Ordering::Relaxed);
                        return Err(e.context(format!("rank {}", b.rank)));
                    }
                }
                Ok(())
            });
            let mine = first(a, &mut watch()).with_context(|| format!("rank {}", a.rank));
            failed.store(mine.is_err(), Ordering::Relaxed);
            over.store(true, Ordering::Release);
            let other = other.join().expect("no panic at the other end");
            // Who failed first says more than who waited for it.
            match (mine, other) {
                (Err(mine), Err(other)) if mine.to_string().contains("the other end failed") => Err(other),
                (Err(mine), _) => Err(mine),
                (Ok(_), Err(other)) => Err(other),
                (Ok(mine), Ok(())) => Ok(mine),
            }
        })
    }

    /// Sends `count` messages one way; the time until all were acknowledged.
    pub fn stream(&mut self, count: u64) -> Result<Duration> {
        self.both(
            true,
            |end, watch| {
                let (all, mut due) = (end.sent + count, count);
                let start = Instant::now();
                while end.retired < all {
                    end.pass(1, &mut due, |_| 0, watch)?;
                }
                Ok(start.elapsed())
            },
            |end, watch| end.pass(BATCH, &mut 0, |_| 0, watch),
        )
    }

    /// A message to and fro for each place of `rounds`, which gets its ticks, for no longer
    /// than `most`. How many places it came to, and how many ticks make a microsecond.
    pub fn ping(&mut self, rounds: &mut [u64], most: Duration) -> Result<(usize, f64)> {
        let mut echo = 0;
        self.both(
            false,
            |end, watch| {
                let (mut round, mut due) = (0, 1);
                let begin = Instant::now();
                let first = ticks();
                let mut start = first;
                while round < rounds.len() && (round == 0 || round % 64 != 0 || begin.elapsed() < most) {
                    let back = |taken| {
                        if taken == 0 {
                            return 0;
                        }
                        let now = ticks();
                        rounds[round] = now - start;
                        (start, round) = (now, round + 1);
                        (round < rounds.len()) as u64
                    };
                    end.pass(1, &mut due, back, watch)?;
                }
                let mhz = (start - first) as f64 / begin.elapsed().as_nanos() as f64 * 1e3;
                // Its last message may still be on its way back.
                while end.retired < end.sent || end.inbound < end.sent {
                    end.pass(1, &mut 0, |_| 0, watch)?;
                }
                Ok((round, mhz))
            },
            move |end, watch| end.pass(1, &mut echo, |taken| taken, watch),
        )
    }
}
