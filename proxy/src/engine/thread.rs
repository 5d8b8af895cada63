//! What stands around a [`Machine`] on a host: a [`Driver`] carries out commands, reads the clock, sleeps, and is woken by
//! bells. The thread of an engine is its loop; a program that drives its engine itself calls it pass by pass. A second
//! thread frees what queue pairs used that are gone.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::eventfd::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::command::Command;
use super::leaving::{Gone, SETTLE};
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
    /// Rung by producers of this process, and behind each command.
    pub(super) bell: Arc<EventFd>,
    /// Rung by producers of another process.
    pub(super) outside: Option<Bell>,
    pub(super) freeing: Freeing,
}

impl Driver {
    /// Drives the machine until the engine is dropped.
    pub(super) fn run(mut self) {
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
        if self.pending.load(Ordering::Relaxed) && !self.commands() {
            return None;
        }
        let step = self.machine.step(&mut self.clock);
        while let Some(gone) = self.machine.next_gone() {
            self.freeing.free(gone);
        }
        Some(step)
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
        if self.machine.prepare_sleep() {
            let pending = &self.pending;
            if self.machine.falls_asleep(|| pending.load(Ordering::Relaxed)) {
                self.sleep(limit);
                self.machine.awake();
            }
        }
        self.machine.woken();
    }

    fn sleep(&mut self, limit: Duration) {
        let bells = self.outside.iter().chain(self.machine.bells());
        let (bells, mut fds): (Vec<_>, Vec<_>) = bells.filter_map(|b| Some((b, b.fd()?))).unzip();
        fds.push(self.bell.as_fd());
        let quiet = self.machine.wakes(&mut fds);
        let limit = if quiet { limit.min(QUIET) } else { limit };
        match wait(&fds, limit) {
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
        while self.machine.is_leaving(self.clock.now()) {
            pause.wait();
        }
        while let Some(gone) = self.machine.next_gone() {
            self.freeing.free(gone);
        }
    }

    /// Ends all queue pairs behind a panic. They wait together.
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

/// However the thread ends, by a panic too, everybody who waits is told.
impl Drop for Driver {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abandon();
        } else {
            self.finish();
        }
    }
}

/// A wait for what wakes nobody: it yields at first, then sleeps.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    fn wait(&mut self) {
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
fn wait(fds: &[BorrowedFd<'_>], limit: Duration) -> rustix::io::Result<Vec<bool>> {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
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
