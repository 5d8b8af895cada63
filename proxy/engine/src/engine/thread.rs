//! What stands around a [`Machine`] on a host: a [`Driver`] carries out commands, reads the clock, sleeps, and is woken by
//! bells. The thread of an engine is the driver's loop; where the program drives the engine, `driven` calls the driver pass
//! by pass. A second thread frees what queue pairs used that are gone.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::eventfd::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::command::{Command, QpId};
use super::leaving::{Gone, LATER, SETTLE};
use super::machine::{Clock, Machine};
use crate::idle::Step;

/// How long the engine blocks at most where a peer can wake it only as long as receives last that are set aside for
/// that.
const QUIET: Duration = Duration::from_millis(10);

/// Between two looks at the clock while there is work, in steps of [`ticks`]: from half a millisecond to two on the
/// processors that there are.
const BUSY_TICK: u64 = 1 << 21;

/// What tells, for less than the clock's price, that it is time to look at the clock: about 9 ns. It need not be the
/// same on all cores: a jump is one more look.
#[inline(always)]
fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction; a kernel that forbids it is not one that we run on.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        START.elapsed().as_nanos() as u64
    }
}

/// The host's monotonic clock.
pub(super) struct HostClock {
    start: Instant,
    ticked: u64,
}

impl HostClock {
    pub(super) fn new() -> Self {
        HostClock { start: Instant::now(), ticked: 0 }
    }
}

impl Clock for HostClock {
    fn now(&mut self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    #[inline(always)]
    fn is_due(&mut self) -> bool {
        let ticks = ticks();
        let due = ticks.wrapping_sub(self.ticked) >= BUSY_TICK;
        if due {
            self.ticked = ticks;
        }
        due
    }
}

/// A machine with the clock, the commands and the bells of its engine.
pub(super) struct Driver {
    pub(super) machine: Machine,
    pub(super) clock: HostClock,
    /// Commands; `None` stops the thread.
    pub(super) inbox: Receiver<Option<Command>>,
    /// Something was sent.
    pub(super) pending: Arc<AtomicBool>,
    /// The program wants the thread back that drops the engine.
    pub(super) hurry: Arc<AtomicBool>,
    /// Rung by producers of this process, and after each command.
    pub(super) bell: Arc<EventFd>,
    /// Rung by producers of another process.
    pub(super) outside: Option<Bell>,
    pub(super) freeing: Freeing,
    /// Producers and peers were told that the engine sleeps.
    pub(super) asleep: bool,
    /// When turns of single queue pairs are followed by the next pass over all of them, by [`ticks`].
    pub(super) next_pass: u64,
    /// Where the engine's thread says which one it is.
    pub(super) thread: Thread,
}

/// The number of a thread, while that thread is there.
///
/// Who keeps the lock keeps the thread from ending: its number is no other thread's meanwhile.
pub type Thread = Arc<Mutex<Option<Pid>>>;

/// The least time between two passes over all queue pairs while a caller has turns of single ones, in steps of [`ticks`]:
/// some 10 to 30 us on the processors that there are.
const PASS_EVERY: u64 = 1 << 15;
/// The least time between two such passes, as a multiple of what a pass takes: passes take a tenth of the caller's time at
/// most, however many queue pairs there are.
const PASS_SHARE: u64 = 10;

impl Driver {
    /// Drives the machine until the engine is dropped.
    pub(super) fn run(mut self) {
        let thread = rustix::thread::gettid();
        self.machine.driven_by(thread.as_raw_nonzero().get().unsigned_abs());
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        while let Some(step) = self.pass() {
            match step {
                Step::Spin => std::hint::spin_loop(),
                Step::Yield => std::thread::yield_now(),
                Step::Sleep(step) => std::thread::sleep(step),
                Step::Block(limit) => self.block(limit),
            }
        }
    }

    /// Carries out the commands that were sent, and one pass over the queue pairs. `None`: the engine was dropped.
    #[inline]
    pub(super) fn pass(&mut self) -> Option<Step> {
        if self.asleep {
            self.wakes_up();
        }
        if self.pending.load(Ordering::Relaxed) && !self.commands() {
            return None;
        }
        let step = self.machine.step(&mut self.clock);
        while let Some(gone) = self.machine.next_gone() {
            self.freeing.free(gone);
        }
        Some(step)
    }

    /// A turn of one queue pair, for a caller that waits for it. Now and then it is a [`Driver::pass`] over all. `None`:
    /// the engine was dropped.
    #[inline]
    pub(super) fn turn(&mut self, qp: QpId) -> Option<Step> {
        let begin = ticks();
        // A counter that differs from core to core makes a pass early or, until it has caught up, late by a few turns.
        // Relaxed: a command that is missed here is found by the next pass.
        let due = begin.wrapping_sub(self.next_pass) < u64::MAX / 2;
        if !due && !self.asleep && !self.pending.load(Ordering::Relaxed) {
            self.machine.turn(qp, &mut self.clock);
            return Some(Step::Spin);
        }
        let step = self.pass();
        let end = ticks();
        self.next_pass = end.wrapping_add(PASS_EVERY.max(PASS_SHARE * end.wrapping_sub(begin)));
        step
    }

    /// Hands the commands that were sent to the machine. False: the thread is to stop.
    #[cold]
    fn commands(&mut self) -> bool {
        // A swap and not a store: a command that was sent before the flag that this takes is received below, and a flag
        // that is set after this stays.
        self.pending.swap(false, Ordering::Acquire);
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Some(command) => self.machine.apply(command, self.clock.now()),
                None => return false,
            }
        }
        true
    }

    fn block(&mut self, limit: Duration) {
        if self.falls_asleep() {
            self.sleep(limit);
            self.wakes_up();
        }
    }

    /// Says to producers and peers that the engine sleeps, unless there is work. True if it may sleep now; then
    /// [`Driver::wakes_up`] takes the word back, which [`Driver::pass`] does by itself.
    pub(super) fn falls_asleep(&mut self) -> bool {
        let pending = &self.pending;
        self.asleep =
            self.machine.prepare_sleep() && self.machine.falls_asleep(|| pending.load(Ordering::Relaxed));
        if !self.asleep {
            self.machine.woken();
        }
        self.asleep
    }

    fn wakes_up(&mut self) {
        self.machine.awake();
        self.machine.woken();
        self.asleep = false;
    }

    /// What wakes the engine besides its own bell, and for how long of `limit` at most it may sleep.
    fn bells(&self, limit: Duration) -> (Vec<&Bell>, Vec<BorrowedFd<'_>>, Duration) {
        let bells = self.outside.iter().chain(self.machine.bells());
        let (bells, mut fds): (Vec<_>, Vec<_>) = bells.filter_map(|b| Some((b, b.fd()?))).unzip();
        let (more, limit) = self.wakes(limit);
        fds.extend(more);
        (bells, fds, limit)
    }

    /// What wakes the engine, for a thread that does not keep the driver meanwhile, and how long of `limit` that thread may
    /// sleep. To be called after [`Driver::falls_asleep`].
    pub(super) fn wakers(&self, limit: Duration) -> std::io::Result<Wakers> {
        let bells = self.outside.iter().chain(self.machine.bells()).cloned().collect();
        let (fds, limit) = self.wakes(limit);
        let fds = fds.into_iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<_>>()?;
        Ok(Wakers { bell: self.bell.clone(), bells, fds, limit })
    }

    /// The descriptors of links that wake the engine, and for how long of `limit` at most it may sleep. Links over TCP have one
    /// descriptor together, which is there once.
    fn wakes(&self, limit: Duration) -> (Vec<BorrowedFd<'_>>, Duration) {
        let mut fds = Vec::new();
        let quiet = self.machine.wakes(&mut fds);
        fds.sort_unstable_by_key(AsRawFd::as_raw_fd);
        fds.dedup_by_key(|fd| fd.as_raw_fd());
        // Descriptors of a link wake it only for a while.
        (fds, if quiet { limit.min(QUIET) } else { limit })
    }

    /// Takes what has rung. What rings for is found by the pass or the look at the work that follows.
    pub(super) fn drain(&self) {
        self.outside.iter().chain(self.machine.bells()).for_each(|bell| _ = bell.drain());
        self.bell.drain();
    }

    fn sleep(&mut self, limit: Duration) {
        let (bells, mut fds, limit) = self.bells(limit);
        fds.push(self.bell.as_fd());
        match wait(fds, limit) {
            Ok(ready) => bells.iter().zip(ready).filter(|(_, ready)| *ready).for_each(|(bell, _)| {
                bell.drain();
            }),
            // A failing wait would spin; there is nothing else to do about it.
            Err(_) => std::thread::yield_now(),
        }
        self.bell.drain();
    }

    /// Takes all queue pairs out, and waits until nothing of them touches memory any more. They wait together.
    fn finish(&mut self) {
        self.machine.remove_all(self.clock.now());
        let mut pause = Pause::default();
        loop {
            // Relaxed: the flag orders nothing.
            let later = if self.hurry.load(Ordering::Relaxed) { LATER } else { 0 };
            if !self.machine.is_leaving(self.clock.now() + later) {
                break;
            }
            pause.wait();
        }
        while let Some(gone) = self.machine.next_gone() {
            self.freeing.free(gone);
        }
    }

    /// Ends all queue pairs after a panic. They wait together.
    #[cold]
    pub(super) fn abandon(&mut self) {
        let mut all = self.machine.abandon();
        all.iter_mut().for_each(|a| a.close());
        let (begin, mut pause) = (self.clock.now(), Pause::default());
        loop {
            let now = self.clock.now();
            // All are asked in each turn, for asking moves them on. Each has a limit of its own, which is shorter than
            // this one.
            let gone = all.iter_mut().fold(true, |gone, a| a.is_gone(now) & gone);
            if gone || now - begin >= 2 * SETTLE {
                break;
            }
            pause.wait();
        }
        self.machine.free_abandoned(all);
    }
}

/// What wakes an engine that sleeps, kept in place: the queue pairs may go meanwhile.
pub(super) struct Wakers {
    /// The engine's own bell.
    bell: Arc<EventFd>,
    /// Those that peers ring: the bells themselves, for a copy of each descriptor would take as many as there are peers.
    bells: Vec<Bell>,
    /// Copies of the others.
    fds: Vec<OwnedFd>,
    limit: Duration,
}

impl Wakers {
    /// Blocks until the engine is woken or one of `more` is readable, or as long as the engine may sleep.
    pub(super) fn wait(&self, more: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let bells = self.bells.iter().filter_map(Bell::fd);
        let all = self.fds.iter().map(AsFd::as_fd).chain(bells).chain(more.iter().copied());
        let all = all.chain([self.bell.as_fd()]);
        wait(all, self.limit).map(drop)
    }
}

/// However the thread ends, by a panic too, everybody who waits is told.
impl Drop for Driver {
    fn drop(&mut self) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if std::thread::panicking() {
            self.abandon();
        } else {
            self.finish();
        }
    }
}

/// A wait for what wakes nobody: it yields at first, then sleeps.
#[derive(Default)]
pub(super) struct Pause(u32);

impl Pause {
    pub(super) fn wait(&mut self) {
        self.0 += 1;
        match self.0 {
            0..100 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

/// The thread that frees what queue pairs used that are gone, for the kernel takes its time with large registrations.
/// The first that is gone starts it. Dropping this waits until all is freed.
#[derive(Default)]
pub(super) struct Freeing {
    thread: Option<(Sender<Gone>, Option<JoinHandle<()>>)>,
    /// Where it runs, if it is not to inherit the cores of the engine's thread.
    cores: Option<CpuSet>,
}

impl Freeing {
    /// Frees on the cores that the calling thread has now.
    pub(super) fn stay_here(&mut self) {
        self.cores = sched_getaffinity(None).ok();
    }

    #[cold]
    fn free(&mut self, gone: Gone) {
        let cores = self.cores;
        let (to, _) = self.thread.get_or_insert_with(|| {
            let (to, from) = channel::<Gone>();
            let work = move || {
                if let Some(cores) = cores {
                    // Where that is refused it runs where the engine does.
                    let _ = sched_setaffinity(None, &cores);
                }
                from.into_iter().for_each(Gone::free);
            };
            // Without a thread the channel has no other end, and all is freed by the caller.
            (to, std::thread::Builder::new().name("pushgate-free".into()).spawn(work).ok())
        });
        if let Err(e) = to.send(gone) {
            e.0.free();
        }
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        if let Some((to, thread)) = self.thread.take() {
            drop(to);
            // A panic there was printed by its hook.
            let _ = thread.map(JoinHandle::join);
        }
    }
}

/// Until one of the descriptors is readable or `limit` has passed; which of them are.
fn wait<'a>(fds: impl IntoIterator<Item = BorrowedFd<'a>>, limit: Duration) -> rustix::io::Result<Vec<bool>> {
    let mut fds: Vec<_> = fds.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    poll(&mut fds, Some(&limit))?;
    Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
}

/// Pins the calling thread. Not being allowed to is no error: it runs elsewhere.
pub(super) fn pin(cpu: usize) {
    if cpu >= CpuSet::MAX_CPU {
        tracing::warn!(cpu, "no such core; the proxy's thread stays unpinned");
        return;
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(e) = sched_setaffinity(None, &set) {
        tracing::warn!(cpu, "the proxy's thread stays unpinned: {e}");
    }
}
