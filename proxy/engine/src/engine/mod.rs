//! What drives the queue pairs: one engine for each program that links it, or for each that uses `pushgate proxy`.
//!
//! [`Machine`] does the work in steps and knows no thread. `thread` drives it in a thread of its own; `driven` has the
//! program drive it, with a thread that stands in for the program. [`Engine`] is the program's handle: commands reach the
//! machine over a channel.

mod command;
mod driven;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod leaving;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod machine;
mod thread;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::mover::Mover;
use pushgate_core::session::Status;
use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fork::OwnedHere;
use pushgate_driver_shim::interrupt::{self, Interrupted};
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Lines;
use pushgate_link::RegionSends;
use pushgate_link::region::RegionMemory;

pub use self::command::{Command, EngineError, QpId, Removal, Removed, Waiter};
use self::driven::Driven;
pub use self::driven::StandIn;
pub use self::leaving::Gone;
pub use self::machine::{Clock, Machine};
pub use self::thread::Thread;
use self::thread::{Driver, Freeing, HostClock, Pause, pin};
use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::idle::{Step, Wake};
use crate::recorder::{Recorder, Stall};

/// What drives an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drive {
    /// A thread of the engine's own.
    #[default]
    Thread,
    /// The program, by [`Engine::drive`] and [`Engine::drive_for`]. For a program that polls anyway, and for hosts with
    /// fewer cores than threads that would spin. While the program has not called for some milliseconds, a thread of the
    /// engine's own drives; that thread rests again as soon as the program calls. Calls of the engine that wait for an
    /// answer drive it themselves. That thread does the program's own work too, where it was handed over
    /// ([`Engine::stand_in_with`]).
    Caller,
}

/// How an engine runs.
#[derive(Default)]
pub struct EngineOptions {
    /// What drives it.
    pub drive: Drive,
    /// Core to pin the engine's thread to.
    pub cpu: Option<usize>,
    /// There is a core to spare for spinning.
    pub alone: bool,
    /// Copies into device memory.
    pub mover: Option<Box<dyn Mover>>,
    /// What producers of another process ring.
    pub bell: Option<Bell>,
    /// When a queue pair in which nothing moves is reported to the log.
    pub stall_report: StallReport,
    /// The program that the engine serves, where that is another process: readers of the flight recorder find the engine
    /// by this number too.
    pub program: Option<u32>,
}

/// When an engine reports a queue pair to the log (`warn`) in which nothing has moved while something should, once for
/// each such stall.
#[derive(Clone, Copy, Debug, Default)]
pub struct StallReport {
    /// After this time; zero: never.
    pub after: Duration,
    /// A receive that the device has posted, and that no message fills, is waited for. For programs that post receives
    /// only while they wait for messages.
    pub receives: bool,
}

/// Where an engine's driver is.
enum Runs {
    /// In this thread; `None` once it was joined.
    Thread(Option<JoinHandle<()>>),
    /// Here, for the threads that call.
    Caller(Driven),
}

/// A running engine. Dropping it stops the thread; queue pairs still there end
/// with *aborted*. Handles may be used from any thread. In a child of `fork` calls end
/// with [`EngineError::Forked`], and dropping it does nothing.
pub struct Engine {
    // A child has a channel whose locks another thread may have held, and no thread to join.
    commands: OwnedHere<Sender<Option<Command>>>,
    pending: Arc<AtomicBool>,
    bell: Arc<EventFd>,
    runs: OwnedHere<Runs>,
    /// The drop is to wait for peers no more.
    hurry: Arc<AtomicBool>,
    /// A device's copies for a queue pair did not end. Set by the [`Machine`].
    kept: Arc<AtomicBool>,
    recorder: Option<Recorder>,
    thread: Thread,
}

impl Engine {
    /// Starts an engine. `bell` is its doorbell: producers of this process that find
    /// it asleep ring there. (Peers ring bells of their own, [`Endpoint::bells`].)
    pub fn start(bell: EventFd, options: EngineOptions) -> Result<Self, EngineError> {
        let (commands, inbox) = channel();
        let pending = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(bell);
        let (kept, hurry) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let clock = HostClock::new();
        let recorder = Recorder::start(options.program)
            .inspect_err(|e| limited!(warn, 0u32, "`pushgate inspect` will see nothing of this engine: {e}"))
            .ok();
        if let (Some(recorder), Some(copier)) = (&recorder, options.mover.as_ref().and_then(|m| m.process()))
        {
            recorder.copied_by(copier);
        }
        let StallReport { after, receives } = options.stall_report;
        let stall = Stall { after: after.as_nanos().try_into().unwrap_or(u64::MAX), receives };
        let machine = Machine::new(options.mover, options.alone, kept.clone());
        let thread = Thread::default();
        let mut driver = Driver {
            machine: machine.with_recorder(recorder.clone(), stall),
            clock,
            inbox,
            pending: pending.clone(),
            hurry: hurry.clone(),
            bell: bell.clone(),
            outside: options.bell,
            freeing: Freeing::default(),
            asleep: false,
            next_pass: 0,
            thread: thread.clone(),
        };
        if options.cpu.is_some() {
            // The thread that frees takes its time, and not on the engine's core.
            driver.freeing.stay_here();
        }
        let runs = match options.drive {
            Drive::Caller => Runs::Caller(Driven::start(driver, options.cpu, options.alone)?),
            Drive::Thread => Runs::Thread(Some(spawn(options.cpu, || driver.run())?)),
        };
        let (commands, runs) = (OwnedHere::new(commands), OwnedHere::new(runs));
        Ok(Engine { commands, pending, bell, runs, hurry, kept, recorder, thread })
    }

    /// The thread of an engine that has one.
    pub fn thread(&self) -> &Thread {
        &self.thread
    }

    /// One pass over all queue pairs of an engine that the caller drives ([`Drive::Caller`]). Returns what the caller may
    /// do until the next pass; it need not, and must not block for longer than that says. Any thread may call this: if
    /// another thread is in the call at the moment, this returns at once. Of an engine with a thread of its own nothing
    /// is left to do.
    #[inline]
    pub fn drive(&self) -> Result<Step, EngineError> {
        self.here()?;
        match &*self.runs {
            Runs::Caller(driven) => driven.drive(),
            Runs::Thread(_) => Ok(Step::Yield),
        }
    }

    /// One pass as [`Engine::drive`] makes, and then the wait of an idle engine: at first none, later until a bell rings, a call of
    /// another thread or `limit`. For the one thread of a program that serves an engine which the program drives; while that thread
    /// rests, the engine's own does not stand in. An engine that a thread of its own drives makes the caller sleep for `limit`.
    pub fn rest(&self, limit: Duration) -> Result<(), EngineError> {
        self.here()?;
        match &*self.runs {
            Runs::Caller(driven) => driven.rest(limit),
            Runs::Thread(_) => {
                std::thread::sleep(limit);
                Ok(())
            }
        }
    }

    /// A turn of one queue pair of an engine that the caller drives, whose cost does not grow with the number of queue pairs. Every few
    /// microseconds a call makes a pass over all of them. False if there was no turn, because another thread is in a call at the
    /// moment. Of an engine with a thread of its own nothing is left to do, and the answer is true. Any thread may call this.
    #[inline]
    pub fn drive_for(&self, qp: QpId) -> Result<bool, EngineError> {
        self.here()?;
        match &*self.runs {
            Runs::Caller(driven) => driven.drive_for(qp),
            Runs::Thread(_) => Ok(true),
        }
    }

    /// Makes a pass if the caller drives the engine and the engine sleeps. To be called before a post: a producer would ring
    /// an engine that sleeps, which costs a system call and wakes the engine's thread. Costs a load otherwise.
    #[inline]
    pub fn rouse(&self) -> Result<(), EngineError> {
        match &*self.runs {
            Runs::Caller(driven) if driven.is_asleep() => self.drive().map(drop),
            _ => Ok(()),
        }
    }

    /// How many passes the engine's own thread has made while the program, which drives the engine, did not call. 0 for an
    /// engine with a thread of its own.
    pub fn stood_in(&self) -> u64 {
        match &*self.runs {
            Runs::Caller(driven) => driven.stood_in(),
            Runs::Thread(_) => 0,
        }
    }

    /// Hands over what the program does in its calls, so that the engine's thread does that too while the program, which drives the
    /// engine, does not call; `None`: it does so no more. Returns when no turn of the work before is under way, so this must not be
    /// called in such a turn. An engine that a thread of its own drives does none of the program's work.
    pub fn stand_in_with(&self, program: Option<Arc<dyn StandIn>>) -> Result<(), EngineError> {
        self.here()?;
        if let Runs::Caller(driven) = &*self.runs {
            driven.stand_in_with(program);
        }
        Ok(())
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<T, EngineError> {
        let (reply, answer) = channel();
        self.send(Some(command(reply)))?;
        self.answer(&answer, || Ok(()))
    }

    /// Asks for what may have to wait for a peer or a device. With the answer: whether the program has asked for its thread back
    /// meanwhile. Then the engine was told to wait for peers no more.
    fn ask_patiently<T>(&self, command: impl FnOnce(Waiter<T>) -> Command) -> Result<(T, bool), EngineError> {
        let ((reply, answer), hurry) = (channel(), Arc::new(AtomicBool::new(false)));
        self.send(Some(command(Waiter::new(reply, hurry.clone()))))?;
        let mut asked = interrupt::Now::begin();
        match self.answer(&answer, || Ok(asked.check()?)) {
            Err(EngineError::Interrupted(_)) => {
                // Relaxed: the flag orders nothing. The engine looks at it in each pass while somebody waits.
                hurry.store(true, Ordering::Relaxed);
                Ok((self.answer(&answer, || Ok(()))?, true))
            }
            answer => Ok((answer?, false)),
        }
    }

    /// Waits for an answer, or until `check` fails.
    fn answer<T>(
        &self,
        answer: &Receiver<T>,
        mut check: impl FnMut() -> Result<(), EngineError>,
    ) -> Result<T, EngineError> {
        if let Runs::Thread(_) = &*self.runs {
            loop {
                match answer.recv_timeout(interrupt::LOOK) {
                    Ok(answer) => return Ok(answer),
                    Err(RecvTimeoutError::Disconnected) => return Err(EngineError::Gone),
                    Err(RecvTimeoutError::Timeout) => check()?,
                }
            }
        }
        let mut pause = Pause::default();
        loop {
            let driven = self.drive();
            match answer.try_recv() {
                Ok(answer) => return Ok(answer),
                Err(TryRecvError::Disconnected) => return Err(EngineError::Gone),
                Err(TryRecvError::Empty) => driven?,
            };
            check()?;
            // The answer may wait for a copy by another process, which needs a core.
            pause.wait();
        }
    }

    /// Hands a command to the thread; `None` stops the thread.
    fn send(&self, command: Option<Command>) -> Result<(), EngineError> {
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
    pub fn add_qp(&self, mut endpoint: Endpoint, wake: Wake) -> Result<QpId, EngineError> {
        self.here()?;
        // Here and not on the engine's thread: the slot may need memory.
        endpoint.set_trace(self.recorder.as_ref().and_then(Recorder::trace));
        self.ask(|reply| Command::AddQp(Box::new(endpoint), wake, reply))
    }

    /// Drops a queue pair and its mappings; returns its last counts. Waits until nothing of it can touch
    /// memory any more, over RDMA a second or two at most; the engine goes on meanwhile, and queue pairs
    /// that several threads remove at once wait together. If the program ends the call, the queue pair says its last words to nobody
    /// and goes at once; [`interrupt::left_undone`] says what its peer did not get.
    ///
    /// [`EngineError::Unsettled`] says that the queue pair's memory must stay. Of an engine that has ended
    /// while a device copied for any of its queue pairs, all of them are answered so.
    pub fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        let answer = match self.ask_patiently(|waiter| Command::RemoveQp(qp, waiter)) {
            // Acquire, for the Release in `Machine::keep`: that comes before the channel is closed, whose end
            // this thread has just found. So it is not missed here.
            Err(EngineError::Gone) if self.kept.load(Ordering::Acquire) => {
                return Err(EngineError::Unsettled(Box::default()));
            }
            answer => answer?,
        };
        let (removal, hurried) = answer;
        let Removal { counters, settled, peer, undelivered } = removal.ok_or(EngineError::NoQp(qp.0))?;
        if hurried {
            let what = format!(
                "the queue pair with rank {peer} was closed at once: {undelivered} messages have not arrived there"
            );
            limited!(warn, peer, "interrupted by the program: {what}");
            interrupt::leaves_undone(&what);
        }
        if settled { Ok(counters) } else { Err(EngineError::Unsettled(Box::new(counters))) }
    }

    /// Registers a region with a queue pair; returns its key (lkey and rkey). A region of a call that the program has ended is none.
    ///
    /// # Safety
    /// The memory stays mapped, writable for its length, and free of Rust
    /// references, until it is removed or the queue pair is.
    pub unsafe fn add_region(&self, qp: QpId, memory: RegionMemory, bytes: u64) -> Result<u32, EngineError> {
        self.ask_patiently(|waiter| Command::AddRegion(qp, memory, bytes, waiter))?.0
    }

    /// Removes a region. Waits, for 2 s at most, until no copy to it is under way and no
    /// message out of it; the engine goes on meanwhile. False if the key names none, or
    /// the region is still in use: then it stays registered, and its memory must stay. If the program ends the call, a region
    /// that is in use fails the call, and stays registered too.
    ///
    /// Where the queue pair has failed, a region is in use until nothing of the queue pair touches memory
    /// any more: over RDMA until the RDMA device has stopped. A peer on this host is not waited for: it may
    /// read what lies at the region's addresses for a moment longer, but shows nothing of that.
    pub fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        match self.ask_patiently(|waiter| Command::RemoveRegion(qp, key, waiter))? {
            (false, true) => Err(Interrupted.into()),
            (removed, _) => Ok(removed),
        }
    }

    /// Ends one queue pair, or all of them, with a status.
    pub fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        self.ask(|reply| Command::Fail(qp, status, reply))
    }

    /// The peer of a queue pair has ended: what it had sent before is taken in, also by receives that are posted only then, and then the
    /// queue pair ends with this status.
    pub fn peer_ended(&self, qp: QpId, status: Status) -> Result<(), EngineError> {
        self.ask(|reply| Command::PeerEnded(qp, status, reply))
    }

    /// Wakes the engine if it sleeps, after a peer's ring was taken in its place ([`Bell::beside`]).
    pub fn rung(&self) {
        self.bell.ring();
    }

    /// Tells a queue pair that frames of its peer wait in its [`Mailbox`](pushgate_link::mailbox::Mailbox). Waits for nothing.
    pub fn control(&self, qp: QpId) -> Result<(), EngineError> {
        self.send(Some(Command::Control(qp)))
    }

    /// Breaks the link of a queue pair. True if another one is to take its place; else the queue pair ends. For tests and
    /// fault injection.
    pub fn break_link(&self, qp: QpId) -> Result<bool, EngineError> {
        self.ask(|reply| Command::BreakLink(qp, reply))?.ok_or(EngineError::NoQp(qp.0))
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

    /// Counts of one queue pair.
    pub fn counters_of(&self, qp: QpId) -> Result<Counters, EngineError> {
        self.ask(|reply| Command::CountersOf(qp, reply))?.ok_or(EngineError::NoQp(qp.0))
    }

    /// Counts of all queue pairs of the engine, those already removed included.
    pub fn counters(&self) -> Result<Counters, EngineError> {
        self.ask(Command::Counters)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if matches!(self.send(None), Err(EngineError::Forked(_))) {
            return;
        }
        let flag = self.hurry.clone();
        let hurry = move || {
            // Relaxed: the flag orders nothing.
            flag.store(true, Ordering::Relaxed);
            interrupt::leaves_undone("the engine ended at once: peers may not have been told");
        };
        match &mut *self.runs {
            Runs::Thread(thread) => {
                if let Some(thread) = thread.take() {
                    interrupt::join(thread, hurry);
                }
            }
            Runs::Caller(driven) => driven.stop(hurry),
        }
    }
}

/// Starts an engine's thread, on core `cpu` if there is one.
fn spawn(cpu: Option<usize>, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, EngineError> {
    // It says what it has to say where its starter does, if that has a place of its own.
    let log = tracing::dispatcher::get_default(Clone::clone);
    let own = !log.is::<tracing::subscriber::NoSubscriber>();
    let lines = Lines::current();
    std::thread::Builder::new()
        .name("pushgate-proxy".into())
        .spawn(move || {
            let _log = own.then(|| tracing::dispatcher::set_default(&log));
            lines.enter();
            if let Some(cpu) = cpu {
                pin(cpu);
            }
            // Timed steps are as short as asked for, not 50 us longer.
            let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
            work()
        })
        .map_err(EngineError::Start)
}
