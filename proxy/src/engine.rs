//! The loop that drives the endpoints: one thread, in the program that links it
//! or in `pushgate proxy`. Commands reach it over a channel; nothing else is
//! shared with it.

use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fork::{Forked, OwnedHere};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::idle::{Idle, Step, Wake};
use crate::leaving::{Leaving, Reply, answer};
use crate::link::RegionSends;
use crate::mover::Mover;
use crate::region::RegionMemory;
use crate::ring;
use crate::session::Status;

/// A queue pair of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct QpId(pub u32);

/// How an engine runs.
#[derive(Default)]
pub struct EngineOptions {
    /// Core to pin it to.
    pub cpu: Option<usize>,
    /// There is a core to spare for spinning.
    pub alone: bool,
    /// Copies into device memory.
    pub mover: Option<Box<dyn Mover>>,
    /// What producers of another process ring.
    pub bell: Option<Bell>,
}

/// The engine has ended, or refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Its thread is gone.
    #[error("the proxy's engine has ended")]
    Gone,
    /// The thread could not be started.
    #[error("starting the proxy's engine: {0}")]
    Start(#[source] std::io::Error),
    /// No such queue pair.
    #[error("queue pair {0} is not one of this engine's")]
    NoQp(u32),
    /// It is taken out, but a device still copies for it: what it used must stay.
    #[error("a device's copy for a queue pair that was removed does not end; its memory stays")]
    Unsettled(Box<Counters>),
    /// [`crate::region::MAX_REGIONS`] are registered.
    #[error("a queue pair holds at most {} regions", crate::region::MAX_REGIONS)]
    TooManyRegions,
    /// The engine is another process's, from which this one was forked.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// A proxy of another process said no, or cannot be reached.
    #[error("proxy: {0}")]
    Remote(String),
}

/// A region's queue pair and key, and who waits for it.
type Telling = (QpId, u32, Sender<Result<u32, EngineError>>);

/// A region that goes as soon as nothing uses it.
struct Removing {
    qp: QpId,
    key: u32,
    reply: Sender<bool>,
    since: Instant,
}

enum Command {
    AddQp(Box<Endpoint>, Wake, Sender<QpId>),
    RemoveQp(QpId, Reply),
    AddRegion(QpId, RegionMemory, u64, Sender<Result<u32, EngineError>>),
    RemoveRegion(QpId, u32, Sender<bool>),
    Fail(Option<QpId>, Status, Sender<()>),
    Status(QpId, Sender<Option<Option<Status>>>),
    RegionSends(QpId, Sender<Option<RegionSends>>),
    IsRegistered(QpId, u32, Sender<Option<bool>>),
    Counters(Sender<Counters>),
    Stop,
}

/// A running engine. Dropping it stops the thread; queue pairs still there end
/// with *aborted*. Handles may be used from any thread. In a child of `fork` calls end
/// with [`EngineError::Forked`], and dropping it does nothing.
pub struct Engine {
    // A child has a channel whose locks another thread may have held, and no thread to join.
    commands: OwnedHere<Sender<Command>>,
    pending: Arc<AtomicBool>,
    bell: Arc<EventFd>,
    thread: OwnedHere<Option<JoinHandle<()>>>,
    /// The thread's [`Loop::kept`].
    kept: Arc<AtomicBool>,
}

impl Engine {
    /// Starts an engine. `bell` is its doorbell: producers of this process that find
    /// it asleep ring there. (Peers ring bells of their own, [`Endpoint::bell`].)
    pub fn start(bell: EventFd, options: EngineOptions) -> Result<Self, EngineError> {
        let (commands, inbox) = channel();
        let pending = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(bell);
        let kept = Arc::new(AtomicBool::new(false));
        let mut state = Loop {
            inbox,
            pending: pending.clone(),
            bell: bell.clone(),
            outside: options.bell,
            mover: options.mover,
            alone: options.alone,
            idle: Idle::new(Wake::Doorbell, options.alone),
            endpoints: Vec::new(),
            next: 0,
            gone: Counters::default(),
            sleeps: 0,
            start: Instant::now(),
            telling: Vec::new(),
            removing: Vec::new(),
            turns: 0,
            ticked: 0,
            kept: kept.clone(),
            leaving: Leaving::default(),
        };
        let cpu = options.cpu;
        // It says what it has to say where its starter does, if that has a place of its own.
        let log = tracing::dispatcher::get_default(Clone::clone);
        let thread = std::thread::Builder::new()
            .name("pushgate-proxy".into())
            .spawn(move || {
                let own = !log.is::<tracing::subscriber::NoSubscriber>();
                let _log = own.then(|| tracing::dispatcher::set_default(&log));
                if let Some(cpu) = cpu {
                    // The thread that frees takes its time, and not on the engine's core.
                    state.leaving.free_on(rustix::thread::sched_getaffinity(None).ok());
                    pin(cpu);
                }
                // Timed steps are as short as asked for, not 50 us longer.
                let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
                state.run()
            })
            .map_err(EngineError::Start)?;
        let (commands, thread) = (OwnedHere::new(commands), OwnedHere::new(Some(thread)));
        Ok(Engine { commands, pending, bell, thread, kept })
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<T, EngineError> {
        self.commands.here()?;
        let (reply, answer) = channel();
        self.send(command(reply))?;
        answer.recv().map_err(|_| EngineError::Gone)
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        self.commands.here()?.send(command).map_err(|_| EngineError::Gone)?;
        self.pending.store(true, Ordering::Release);
        self.bell.ring();
        Ok(())
    }

    /// [`EngineError::Forked`] in a child of the process that started it.
    pub(crate) fn here(&self) -> Result<(), EngineError> {
        Ok(self.commands.owner().check()?)
    }

    /// Takes in a queue pair. `wake` says how its producer can wake the engine.
    pub fn add_qp(&self, endpoint: Endpoint, wake: Wake) -> Result<QpId, EngineError> {
        self.ask(|reply| Command::AddQp(Box::new(endpoint), wake, reply))
    }

    /// Drops a queue pair and its mappings; returns its last counts. Waits until nothing of it can touch
    /// memory any more, over RDMA a second or two at most; the engine goes on meanwhile, and queue pairs
    /// that several threads remove at once wait together.
    ///
    /// [`EngineError::Unsettled`] says that the queue pair's memory must stay. Of an engine that has ended
    /// while a device copied for any of its queue pairs, all of them are answered so.
    pub fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        let answer = match self.ask(|reply| Command::RemoveQp(qp, reply)) {
            // Acquire, for the Release in `Loop::keep`: that comes before the channel is closed, whose end
            // this thread has just found. So it is not missed here.
            Err(EngineError::Gone) if self.kept.load(Ordering::Acquire) => {
                return Err(EngineError::Unsettled(Box::default()));
            }
            answer => answer?,
        };
        let (counters, settled) = answer.ok_or(EngineError::NoQp(qp.0))?;
        if settled { Ok(counters) } else { Err(EngineError::Unsettled(Box::new(counters))) }
    }

    /// Registers a region with a queue pair; returns its key (lkey and rkey).
    ///
    /// # Safety
    /// The memory stays mapped, writable for its length, and free of Rust
    /// references, until it is removed or the queue pair is.
    pub unsafe fn add_region(&self, qp: QpId, memory: RegionMemory, bytes: u64) -> Result<u32, EngineError> {
        self.ask(|reply| Command::AddRegion(qp, memory, bytes, reply))?
    }

    /// Removes a region. Waits, for 2 s at most, until no copy to it is under way and no
    /// message out of it; the engine goes on meanwhile. False if the key names none, or
    /// the region is still in use: then it stays registered, and its memory must stay.
    ///
    /// Where the queue pair has failed, a region is in use until nothing of the queue pair touches memory
    /// any more: over RDMA until the RDMA device has stopped. A peer on this host is not waited for: it may
    /// read what lies at the region's addresses for a moment longer, but shows nothing of that.
    pub fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        self.ask(|reply| Command::RemoveRegion(qp, key, reply))
    }

    /// Ends one queue pair, or all of them, with a status.
    pub fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        self.ask(|reply| Command::Fail(qp, status, reply))
    }

    /// How a queue pair ended, if it has.
    pub fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError> {
        self.ask(|reply| Command::Status(qp, reply))?.ok_or(EngineError::NoQp(qp.0))
    }

    /// Whether a queue pair takes SENDs out of regions.
    pub fn region_sends(&self, qp: QpId) -> Result<RegionSends, EngineError> {
        self.ask(|reply| Command::RegionSends(qp, reply))?.ok_or(EngineError::NoQp(qp.0))
    }

    /// Whether our RDMA device has registered a region. The log says why not.
    pub fn is_registered(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        self.ask(|reply| Command::IsRegistered(qp, key, reply))?.ok_or(EngineError::NoQp(qp.0))
    }

    /// Counts of all its queue pairs, those already removed included.
    pub fn counters(&self) -> Result<Counters, EngineError> {
        self.ask(Command::Counters)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if matches!(self.send(Command::Stop), Err(EngineError::Forked(_))) {
            return;
        }
        if let Some(thread) = self.thread.take() {
            // A panic there was printed by its hook; here it would only abort.
            let _ = thread.join();
        }
    }
}

struct Loop {
    inbox: Receiver<Command>,
    pending: Arc<AtomicBool>,
    bell: Arc<EventFd>,
    /// Rung by producers of another process.
    outside: Option<Bell>,
    mover: Option<Box<dyn Mover>>,
    alone: bool,
    idle: Idle,
    endpoints: Vec<(QpId, Box<Endpoint>)>,
    next: u32,
    gone: Counters,
    sleeps: u64,
    start: Instant,
    /// Regions that were added, and who waits until the peer knows.
    telling: Vec<Telling>,
    /// Regions that are still in use, and who waits until they can go.
    removing: Vec<Removing>,
    /// Turns of queue pairs that did work.
    turns: u32,
    /// When the clock was last looked at, by [`ticks`].
    ticked: u64,
    /// A device's copies for a queue pair that is gone did not end. Written by [`Loop::keep`] alone.
    kept: Arc<AtomicBool>,
    /// Queue pairs that were taken out, until nothing of them touches memory any more.
    leaving: Leaving,
}

/// However the thread ends, by a panic too, whoever waits is told.
impl Drop for Loop {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abandon();
        } else {
            self.finish();
        }
        // This thread's own store, or none.
        if self.kept.load(Ordering::Relaxed) {
            // To end the mover would be to wait for its copies.
            std::mem::forget(self.mover.take());
        }
    }
}

/// `None` if it panics: a panic out of a destructor that runs behind another panic would end the process.
fn quietly<T>(act: impl FnOnce() -> T) -> Option<T> {
    // The caller only asks the queue pair for its end, or drops it.
    catch_unwind(AssertUnwindSafe(act)).ok()
}

/// How long a queue pair that goes waits for a copy of its own, and a region for what
/// uses it.
const SETTLE: Duration = Duration::from_secs(2);

/// How long it blocks at most where a peer can wake it only as long as receives
/// that are set aside for that last.
const QUIET: Duration = Duration::from_millis(10);

/// Between two looks at the clock while there is work, by [`ticks`]: from half a millisecond to two
/// on the processors that there are.
const BUSY_TICK: u64 = 1 << 21;

/// Turns of queue pairs with work between two looks at [`ticks`], which cost about 9 ns. A turn takes in
/// at most 64 messages each way and copies at most 1 MiB, some 0.1 ms, so 16 take a few milliseconds at most.
const TURNS: u32 = 16;

/// Passes between two looks at the clock while there is none.
const IDLE_TICK: u32 = 32;

/// What tells, for less than the clock's price, that it is time to look at the clock. It need not be
/// the same on all cores: a jump is one more look.
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

impl Loop {
    fn run(mut self) {
        let mut passes = 0u32;
        loop {
            if self.pending.load(Ordering::Relaxed) && !self.commands() {
                return;
            }
            let mut work = false;
            for i in 0..self.endpoints.len() {
                if self.endpoints[i].1.poll(&mut self.mover) {
                    work = true;
                    // Turns are counted here, and not passes: a pass over all queue pairs may copy a
                    // MiB for each of them, so the time that a pass takes has no small bound.
                    self.look_at_clock();
                }
            }
            let waited_for =
                !self.telling.is_empty() || !self.removing.is_empty() || !self.leaving.is_empty();
            if waited_for {
                self.tell();
                self.remove();
                self.let_go();
                self.look_at_clock();
            }
            if work {
                self.idle.busy();
                std::hint::spin_loop();
                continue;
            }
            if waited_for || self.endpoints.iter().any(|(_, e)| e.is_ending()) {
                // A peer or a device is waited for, which wakes nobody and may need this core: the kernel
                // may simulate the device.
                self.idle.busy();
                self.look_at_clock();
                std::thread::yield_now();
                continue;
            }
            // While it spins, the clock would cost more than the passes. In every
            // other step of idling a pass is worth a look at it.
            passes = passes.wrapping_add(1);
            if self.idle.spins() && !passes.is_multiple_of(IDLE_TICK) {
                std::hint::spin_loop();
                continue;
            }
            let now = self.tick();
            match self.idle.idle(now) {
                Step::Spin => std::hint::spin_loop(),
                Step::Yield => std::thread::yield_now(),
                Step::Sleep(step) => {
                    self.sleeps += 1;
                    std::thread::sleep(step);
                }
                Step::Block(limit) => self.block(limit),
            }
        }
    }

    /// Passes the time on to the queue pairs, if it is time to.
    #[inline(always)]
    fn look_at_clock(&mut self) {
        self.turns = self.turns.wrapping_add(1);
        if !self.turns.is_multiple_of(TURNS) {
            return;
        }
        let ticks = ticks();
        if ticks.wrapping_sub(self.ticked) >= BUSY_TICK {
            self.ticked = ticks;
            self.tick();
        }
    }

    /// Passes the time on to the queue pairs: nanoseconds since the start.
    fn tick(&mut self) -> u64 {
        let now = self.start.elapsed().as_nanos() as u64;
        for (_, endpoint) in &mut self.endpoints {
            endpoint.tick(now);
        }
        now
    }

    fn block(&mut self, limit: Duration) {
        // What arrives after this wakes us.
        if !self.endpoints.iter_mut().fold(false, |any, (_, e)| e.prepare_sleep() | any) {
            self.sleep(limit);
        }
        self.endpoints.iter_mut().for_each(|(_, e)| e.woken());
    }

    fn sleep(&mut self, limit: Duration) {
        let flags: Vec<_> = self.endpoints.iter().flat_map(|(_, e)| e.sleeping()).collect();
        let work =
            || self.pending.load(Ordering::Relaxed) || self.endpoints.iter().any(|(_, e)| e.has_work());
        if ring::may_sleep(&flags, work) {
            let bells = self.outside.iter().chain(self.endpoints.iter().filter_map(|(_, e)| e.bell()));
            let (bells, mut fds): (Vec<_>, Vec<_>) = bells.filter_map(|b| Some((b, b.fd()?))).unzip();
            fds.push(self.bell.as_fd());
            let quiet = self.endpoints.iter().fold(false, |any, (_, e)| e.wakes(&mut fds) | any);
            let limit = if quiet { limit.min(QUIET) } else { limit };
            match wait(&fds, limit) {
                Ok(ready) => bells.iter().zip(ready).filter(|(_, ready)| *ready).for_each(|(bell, _)| {
                    bell.drain();
                }),
                // A failing wait would spin; there is nothing else to do about it.
                Err(_) => std::thread::yield_now(),
            }
            self.bell.drain();
            ring::awake(&flags);
            self.sleeps += 1;
        }
    }

    /// Answers those who wait until the peer knows of their regions.
    #[cold]
    fn tell(&mut self) {
        let endpoints = &self.endpoints;
        self.telling.retain(|(qp, key, reply)| {
            let told = endpoints.iter().find(|(id, _)| id == qp).is_none_or(|(_, e)| e.regions_told());
            if told {
                let _ = reply.send(Ok(*key));
            }
            !told
        });
    }

    /// Removes the regions that nothing uses any more, and answers who waits for that.
    #[cold]
    fn remove(&mut self) {
        let endpoints = &mut self.endpoints;
        self.removing.retain(|r| {
            let Some((_, endpoint)) = endpoints.iter_mut().find(|(id, _)| *id == r.qp) else {
                let _ = r.reply.send(false);
                return false;
            };
            let waits = endpoint.region_in_use(r.key) && r.since.elapsed() < SETTLE;
            if !waits {
                let _ = r.reply.send(endpoint.remove_region(r.key));
            }
            waits
        });
    }

    /// Moves the queue pairs on that were taken out.
    #[cold]
    fn let_go(&mut self) {
        let (counters, settled) = self.leaving.advance(&mut self.mover, SETTLE);
        self.gone += counters;
        if !settled {
            self.keep();
        }
    }

    /// Says that what a device still copies stays for ever, with its mover.
    #[cold]
    fn keep(&self) {
        // Release, before anybody can find the channel closed: `Engine::remove_qp` says why.
        self.kept.store(true, Ordering::Release);
    }

    /// Takes all queue pairs out, and waits until nothing of them touches memory any more. They wait
    /// together, each as long as its transport's and its device's limits allow.
    fn finish(&mut self) {
        for (_, endpoint) in std::mem::take(&mut self.endpoints) {
            self.leaving.add(endpoint, None);
        }
        let mut passes = 0;
        while !self.leaving.is_empty() {
            self.let_go();
            passes += 1;
            match passes {
                0..100 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    /// Ends all queue pairs behind a panic. That may be the mover's, which is asked nothing more: what its
    /// device may still touch stays. They wait together.
    #[cold]
    fn abandon(&mut self) {
        let own = std::mem::take(&mut self.endpoints).into_iter().map(|(_, endpoint)| (endpoint, None));
        let mut all: Vec<_> = own.chain(self.leaving.abandon()).collect();
        for (endpoint, _) in &mut all {
            quietly(|| endpoint.close());
        }
        let begin = Instant::now();
        // Each has a limit of its own, which is shorter. One that panics is asked no more.
        while begin.elapsed() < 2 * SETTLE
            // All are asked in each turn, for asking moves them on.
            && !all.iter_mut().fold(true, |gone, (e, _)| quietly(|| e.is_gone()).unwrap_or(true) & gone)
        {
            std::thread::sleep(Duration::from_micros(100));
        }
        for (mut endpoint, reply) in all {
            let settled = quietly(|| endpoint.is_gone() && !endpoint.device_copies()) == Some(true);
            let counters = quietly(|| endpoint.counters()).unwrap_or_default();
            if settled {
                quietly(|| drop(endpoint));
            } else {
                std::mem::forget(endpoint);
                self.keep();
            }
            answer(reply, counters, settled);
        }
    }

    fn find(&mut self, qp: QpId) -> Option<&mut Endpoint> {
        self.endpoints.iter_mut().find(|(id, _)| *id == qp).map(|(_, e)| &mut **e)
    }

    /// Answers whose asker has gone are dropped. False: stop.
    fn commands(&mut self) -> bool {
        // A swap and not a store: whoever sent before the flag that it takes is seen
        // below, and a flag set after it stays.
        self.pending.swap(false, Ordering::Acquire);
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::AddQp(endpoint, wake, reply) => {
                    let id = QpId(self.next);
                    self.next += 1;
                    self.endpoints.push((id, endpoint));
                    // One that must be polled keeps the whole engine polling.
                    if wake == Wake::Polled || self.endpoints.len() == 1 {
                        self.idle.set_wake(wake, self.alone);
                    }
                    let _ = reply.send(id);
                }
                Command::RemoveQp(qp, reply) => match self.endpoints.iter().position(|(id, _)| *id == qp) {
                    Some(at) => self.leaving.add(self.endpoints.remove(at).1, Some(reply)),
                    None => _ = reply.send(None),
                },
                Command::AddRegion(qp, memory, bytes, reply) => {
                    let answer = match self.find(qp) {
                        Some(e) => e.add_region(memory, bytes).ok_or(EngineError::TooManyRegions),
                        None => Err(EngineError::NoQp(qp.0)),
                    };
                    match answer {
                        // The peer may use the key as soon as our program has it.
                        Ok(key) => self.telling.push((qp, key, reply)),
                        Err(_) => _ = reply.send(answer),
                    }
                }
                Command::RemoveRegion(qp, key, reply) => {
                    self.removing.push(Removing { qp, key, reply, since: Instant::now() });
                }
                Command::Fail(qp, status, reply) => {
                    for (id, endpoint) in &mut self.endpoints {
                        if qp.is_none_or(|qp| qp == *id) {
                            endpoint.fail(status);
                        }
                    }
                    let _ = reply.send(());
                }
                Command::Status(qp, reply) => {
                    let _ = reply.send(self.find(qp).map(|e| e.status()));
                }
                Command::RegionSends(qp, reply) => {
                    let _ = reply.send(self.find(qp).map(|e| e.region_sends()));
                }
                Command::IsRegistered(qp, key, reply) => {
                    let _ = reply.send(self.find(qp).map(|e| e.is_registered(key)));
                }
                Command::Counters(reply) => {
                    let mut sum = self.gone;
                    let here = self.endpoints.iter().map(|(_, e)| e.counters());
                    here.chain(self.leaving.counters()).for_each(|c| sum += c);
                    sum.sleeps = self.sleeps;
                    let _ = reply.send(sum);
                }
                Command::Stop => return false,
            }
        }
        true
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
fn pin(cpu: usize) {
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        tracing::warn!(cpu, "no such core; the proxy's thread stays unpinned");
        return;
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    if let Err(e) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(cpu, "the proxy's thread stays unpinned: {e}");
    }
}
