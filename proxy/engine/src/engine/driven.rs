//! An engine that its program drives, and the thread that stands in for the program.
//!
//! Calls of the program make the passes over the queue pairs. So a message that the program posts leaves on the program's own
//! thread, and what arrives is found by the program's next call: no other thread has to run in between.
//!
//! While the program does not call, a peer's messages must move on nevertheless. A thread of the engine looks every
//! [`ABSENT`] whether there was a call. If there was none, the thread makes the passes, and blocks until a bell rings if
//! there is no work. With the program's next call the thread goes back to looking.
//!
//! A program may have work of its own with what arrives, which a peer waits for. It hands that work over as a [`StandIn`]: the thread
//! then does it too, and looks for calls more often.

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::interrupt;

use super::command::{EngineError, QpId};
use super::thread::Driver;
use crate::calls::Calls;
use crate::idle::Step;

/// How long the program makes no call until the thread stands in for it. The thread wakes as often, so it takes about a
/// thousandth of a core; and a message whose receiver has just ceased to call is late by twice as much at most.
const ABSENT: Duration = Duration::from_millis(5);
/// How long it makes no call where it has handed over a [`StandIn`] and there is a core to spare: what a peer asks for is then done within a
/// millisecond after the program has ceased to call. The thread takes about a hundredth of a core while the program calls.
const SOON: Duration = Duration::from_micros(300);
/// As [`SOON`], without a core to spare: each look takes the program's own core for a moment.
const SPARING: Duration = Duration::from_millis(2);

/// Where the thread can't block: no descriptor is free.
const NO_DESCRIPTORS: Duration = Duration::from_millis(1);

/// Work of the program with what its queue pairs bring, for the time in which the program does not call.
pub trait StandIn: Send + Sync {
    /// Does what there is to do at the moment. Returns what the thread may do until the next turn; `None` if the program is at it itself.
    fn turn(&self) -> Option<Step>;

    /// Descriptors that become readable when there is work again, beside the engine's bells.
    fn bells(&self) -> Vec<BorrowedFd<'_>>;
}

/// A driver for the program's threads, with a thread that stands in for them. Dropping this stops the thread and ends the
/// queue pairs.
pub(super) struct Driven {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// `None` once a pass has panicked.
    driver: Mutex<Option<Box<Driver>>>,
    calls: Calls,
    /// How many passes the thread has made.
    stood_in: AtomicU64,
    stopping: AtomicBool,
    /// A call of the program makes a pass. A hint: of two calls that follow each other one may overwrite what the other says.
    calling: AtomicBool,
    /// Producers and peers were told that the engine sleeps, and no pass has come since. Written with the driver in hand.
    asleep: AtomicBool,
    /// A thread of the program rests ([`Driven::rest`]): nobody need stand in.
    resting: AtomicBool,
    /// The engine's own bell.
    bell: Arc<EventFd>,
    /// Locked while the thread is in a turn of it or waits for its descriptors.
    program: Mutex<Option<Arc<dyn StandIn>>>,
    /// Another thread waits for that lock: the thread leaves the work alone.
    wanted: AtomicBool,
    /// How often the thread looks for calls where it has such work.
    soon: Duration,
}

/// What came of a pass.
enum Pass {
    Made(Step),
    /// Another thread makes one.
    Busy,
    /// The engine has ended.
    Gone,
}

impl Driven {
    /// Starts the thread, on core `cpu` if there is one; `alone`: there is a core to spare.
    pub(super) fn start(driver: Driver, cpu: Option<usize>, alone: bool) -> Result<Self, EngineError> {
        let bell = driver.bell.clone();
        let shared = Arc::new(Shared {
            driver: Mutex::new(Some(Box::new(driver))),
            calls: Calls::new(),
            stood_in: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            calling: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            resting: AtomicBool::new(false),
            bell,
            program: Mutex::default(),
            wanted: AtomicBool::new(false),
            soon: if alone { SOON } else { SPARING },
        });
        let theirs = shared.clone();
        let thread = super::spawn(cpu, move || theirs.stand_by())?;
        Ok(Driven { shared, thread: Some(thread) })
    }

    /// One pass by the caller, over all queue pairs.
    #[inline]
    pub(super) fn drive(&self) -> Result<Step, EngineError> {
        match self.call(None) {
            // A caller does not block on the bells: the engine must say to nobody that it sleeps.
            Pass::Made(Step::Block(limit)) => Ok(Step::Sleep(limit)),
            Pass::Made(step) => Ok(step),
            Pass::Busy => Ok(Step::Yield),
            Pass::Gone => Err(EngineError::Gone),
        }
    }

    /// A turn of one queue pair by the caller. False: another thread makes a pass at the moment.
    #[inline]
    pub(super) fn drive_for(&self, qp: QpId) -> Result<bool, EngineError> {
        match self.call(Some(qp)) {
            Pass::Made(_) => Ok(true),
            Pass::Busy => Ok(false),
            Pass::Gone => Err(EngineError::Gone),
        }
    }

    /// A call of the program: a pass, tried twice.
    #[inline]
    fn call(&self, qp: Option<QpId>) -> Pass {
        let shared = &*self.shared;
        shared.calls.add();
        match shared.call(qp) {
            Pass::Busy => {
                shared.calls.busy();
                shared.call(qp)
            }
            pass => pass,
        }
    }

    /// One pass by the caller, who then waits as an idle engine does, until a bell rings or for `limit` at most. A call of another
    /// thread ends the wait. For one thread at a time.
    pub(super) fn rest(&self, limit: Duration) -> Result<(), EngineError> {
        let shared = &*self.shared;
        // Before the pass: a thread that looks after it leaves the engine to this one. Relaxed: only a hint.
        shared.resting.store(true, Ordering::Relaxed);
        let (seen, pass) = shared.calls.rests_after(|| self.call(None));
        match pass {
            Pass::Made(Step::Spin) => std::hint::spin_loop(),
            Pass::Made(Step::Yield) | Pass::Busy => std::thread::yield_now(),
            Pass::Made(Step::Sleep(step)) => std::thread::sleep(step.min(limit)),
            Pass::Made(Step::Block(longest)) => shared.block(seen, longest.min(limit)),
            Pass::Gone => {}
        }
        shared.resting.store(false, Ordering::Relaxed);
        if matches!(pass, Pass::Gone) { Err(EngineError::Gone) } else { Ok(()) }
    }

    /// From now on the thread does this work too. Returns when it is in no turn of the work before, which is as soon as a call of the
    /// program would have returned.
    pub(super) fn stand_in_with(&self, program: Option<Arc<dyn StandIn>>) {
        let shared = &*self.shared;
        // Before the ring: a thread that has taken the ring finds this. Relaxed: the bell's system calls order it.
        shared.wanted.store(true, Ordering::Relaxed);
        // The thread's wait ends, if it waits for descriptors of the work before.
        shared.bell.ring();
        let before = std::mem::replace(&mut *shared.program(), program);
        shared.wanted.store(false, Ordering::Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        drop(before);
    }

    /// Whether the engine seems to sleep.
    #[inline]
    pub(super) fn is_asleep(&self) -> bool {
        self.shared.asleep.load(Ordering::Relaxed)
    }

    /// How many passes the thread has made.
    pub(super) fn stood_in(&self) -> u64 {
        // Relaxed: a count that orders nothing.
        self.shared.stood_in.load(Ordering::Relaxed)
    }

    /// Tells the thread to stop, and waits for it. Its bell has been rung.
    pub(super) fn stop(&mut self, hurry: impl FnOnce()) {
        // Relaxed: the channel's end and the join order everything else.
        self.shared.stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            interrupt::join(thread, hurry);
        }
    }
}

impl Shared {
    /// The driver, unless another thread has it. It is taken out of its place when a pass panics, so a poisoned lock
    /// guards nothing that is half done.
    #[inline]
    fn lock(&self) -> Option<MutexGuard<'_, Option<Box<Driver>>>> {
        match self.driver.try_lock() {
            Ok(driver) => Some(driver),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// A pass by the program.
    #[inline]
    fn call(&self, qp: Option<QpId>) -> Pass {
        let Some(driver) = self.lock() else { return Pass::Busy };
        // Relaxed: only a hint for the thread.
        self.calling.store(true, Ordering::Relaxed);
        let pass = self.pass(driver, qp);
        self.calling.store(false, Ordering::Relaxed);
        pass
    }

    #[inline]
    fn pass(&self, mut driver: MutexGuard<'_, Option<Box<Driver>>>, qp: Option<QpId>) -> Pass {
        let Some(own) = driver.as_mut() else { return Pass::Gone };
        // Relaxed, here and below: only a hint. The lock orders what counts.
        if self.asleep.load(Ordering::Relaxed) {
            self.asleep.store(false, Ordering::Relaxed);
            // The engine does not sleep any more, so nobody rings for the thread that waits.
            if self.resting.load(Ordering::Relaxed) {
                self.bell.ring();
            }
        }
        let pass = || match qp {
            Some(qp) => own.turn(qp),
            None => own.pass(),
        };
        // A panic leaves the queue pairs as they are: they are ended, and asked nothing else.
        match catch_unwind(AssertUnwindSafe(pass)) {
            Ok(Some(step)) => Pass::Made(step),
            Ok(None) => Pass::Gone,
            Err(_) => {
                if let Some(own) = driver.as_mut() {
                    own.abandon();
                }
                // What is left waits for nothing.
                *driver = None;
                Pass::Gone
            }
        }
    }

    // ------------------------------------------------------------ the thread

    fn program(&self) -> MutexGuard<'_, Option<Arc<dyn StandIn>>> {
        self.program.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn is_wanted(&self) -> bool {
        // Relaxed: see `Driven::stand_in_with`.
        self.wanted.load(Ordering::Relaxed)
    }

    /// A turn of the program's work, if the program has handed it over: what may follow, or `None` if the program is at it.
    fn turn(&self) -> Option<Step> {
        const NOTHING: Step = Step::Block(Duration::MAX);
        if self.is_wanted() {
            return None;
        }
        let mut program = self.program();
        let Some(own) = &*program else { return Some(NOTHING) };
        // A panic says by itself what went wrong; the work is left as it is.
        catch_unwind(AssertUnwindSafe(|| own.turn())).unwrap_or_else(|_| {
            *program = None;
            Some(NOTHING)
        })
    }

    fn is_stopping(&self) -> bool {
        // Relaxed: see `Driven::stop`.
        self.stopping.load(Ordering::Relaxed)
    }

    /// Looks whether the program calls, and stands in for it while it does not.
    fn stand_by(&self) {
        let (mut seen, mut calling) = (self.calls.count(), false);
        while !self.is_stopping() {
            std::thread::park_timeout(if self.program().is_some() { self.soon } else { ABSENT });
            // A pass over many queue pairs takes milliseconds, and so does what the program does before its next call. The
            // program is away since the end of its last call, not since the beginning.
            // Relaxed: only a hint.
            let is_away = self.calls.count() == seen && !calling && !self.resting.load(Ordering::Relaxed);
            if is_away && !self.stand_in(seen) {
                return;
            }
            seen = self.calls.count();
            calling = self.calling.load(Ordering::Relaxed);
        }
    }

    /// Drives until the program calls: until its calls are not `seen` any more. False: the engine has ended.
    fn stand_in(&self, mut seen: u64) -> bool {
        while self.calls.count() == seen && !self.is_stopping() {
            let Some(rest) = self.turn() else { return true };
            // The turn may have called, so the program's calls are told from these by the next ones.
            seen = self.calls.taken_in();
            let Some(driver) = self.lock() else { return true };
            let step = match self.pass(driver, None) {
                Pass::Made(step) => step,
                Pass::Busy => return true,
                Pass::Gone => return false,
            };
            self.stood_in.fetch_add(1, Ordering::Relaxed);
            match step.min(rest) {
                Step::Spin => std::hint::spin_loop(),
                Step::Yield => std::thread::yield_now(),
                Step::Sleep(step) => std::thread::sleep(step),
                Step::Block(limit) => self.block(seen, limit),
            }
        }
        true
    }

    /// Blocks until a bell rings, at most for `limit`. The driver is free meanwhile: a caller does not wait for this
    /// thread to wake.
    fn block(&self, seen: u64, limit: Duration) {
        let wakers = {
            let Some(mut driver) = self.lock() else { return };
            let Some(own) = driver.as_mut() else { return };
            // Before the engine says that it sleeps: what rang by then is found by the look at the work, and what rings
            // later ends the wait.
            own.drain();
            if !own.falls_asleep() {
                drop(driver);
                return std::thread::yield_now();
            }
            self.asleep.store(true, Ordering::Relaxed);
            own.wakers(limit)
        };
        let program = self.program();
        // The bell was drained before, so a ring that says the work is wanted back was perhaps taken.
        if !self.calls.none_since(seen) || self.is_wanted() {
            return;
        }
        let bells = program.as_ref().map(|own| own.bells()).unwrap_or_default();
        match wakers {
            Ok(wakers) if wakers.wait(&bells).is_ok() => {}
            // A failing wait would spin.
            _ => std::thread::sleep(NO_DESCRIPTORS),
        }
    }
}
