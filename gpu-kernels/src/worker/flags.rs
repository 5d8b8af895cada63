//! The flags between the threads of this process, and the question whether the worker is present.
//! Everything that two threads use at the same time without a lock is stored and loaded here, so that
//! loom can try the interleavings.
//!
//! | flag | written by | what it says |
//! | --- | --- | --- |
//! | `launched` | who starts a generation, with the launcher's lock held | the number of the last generation, whose launch is being made or has been made |
//! | `started` | the same thread | the last generation whose launch has been made |
//! | `wanted` | who finds the worker gone and must not start it; who failed to start it | the keeper is to start the worker |
//! | `stopping` | the drop of the worker | no generation is to be started any more |
//!
//! The state word lies in memory that the worker writes ([`super::control`]), so it is passed in.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use super::policy::Phase;

/// The flags of one worker.
pub(super) struct Flags {
    launched: AtomicU64,
    started: AtomicU64,
    wanted: AtomicBool,
    stopping: AtomicBool,
}

impl Flags {
    /// The flags of a worker whose kernel has never been launched. Generations are numbered from 1.
    pub(super) fn new() -> Self {
        Self {
            launched: AtomicU64::new(0),
            started: AtomicU64::new(0),
            wanted: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
        }
    }

    // ------------------------------------------------------------------ presence

    /// The phase of the last generation.
    ///
    /// A generation's number is stored before its launch, and the launch orders that store before all
    /// that the generation does. So a thread that reads `Left`, which the worker stores behind a fence,
    /// finds at least that generation's number in the load that follows. For `Leaving`, which the
    /// worker stores before its fence, [`Flags::announce`] has a fence of its own. A thread that finds
    /// an older number takes the generation for one about to start, never for one that is gone.
    pub(super) fn phase(&self, state: &AtomicU64) -> Phase {
        // Acquire: a thread that finds the worker gone may use the memory that the worker used.
        let state = state.load(Ordering::Acquire);
        // Relaxed: the load above is an acquire, so this one comes after it.
        Phase::of(state, self.launched.load(Ordering::Relaxed))
    }

    /// Called after storing a command or a lease: true if a generation must be started to see it.
    ///
    /// The fence orders that store before the load of the state; the worker's `fence_total` orders
    /// its store of "leaving" before its last look. All such fences have one order. If ours comes
    /// first, the worker's last look finds what we stored; if the worker's comes first, we find it
    /// leaving, and its number in `launched`. Both can happen at once, which is harmless: one more
    /// generation is started, runs after the one that stayed, finds nothing to do and leaves.
    ///
    /// `launched` may be newer than the state. Then the last look of that generation is still to
    /// come, or came after this fence: if its "leaving" had been stored before our fence, we would
    /// have read it.
    pub(super) fn announce(&self, state: &AtomicU64) -> bool {
        fence(Ordering::SeqCst);
        self.phase(state).may_be_gone()
    }

    // ------------------------------------------------------------------ launches

    /// Announces the next generation; returns its number. To be called with the launcher's lock held,
    /// before the launch, and followed by [`Flags::made`] or [`Flags::failed`].
    pub(super) fn begin(&self) -> u64 {
        // Relaxed: the number publishes nothing but itself. The launch orders it before what the
        // generation does ([`Flags::phase`]).
        self.launched.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The launch of the generation has been made.
    pub(super) fn made(&self, generation: u64) {
        // Release: a thread that reads the number may count on the launch ([`Flags::is_launching`]).
        self.started.store(generation, Ordering::Release);
    }

    /// Takes the number of the last generation back: its launch has failed. To be called with the
    /// launcher's lock still held. A thread that posted in the meantime may have taken the generation for
    /// one about to start, so [`Flags::want`] must follow, unless the worker is lost.
    pub(super) fn failed(&self) {
        // Relaxed: `want` publishes the number to the keeper. Any other thread that still reads the
        // failed generation's number takes that generation for one about to start; the keeper starts
        // one for that thread too.
        self.launched.fetch_sub(1, Ordering::Relaxed);
    }

    /// The number of the last generation.
    pub(super) fn launched(&self) -> u64 {
        // Relaxed: a number by itself.
        self.launched.load(Ordering::Relaxed)
    }

    /// The last generation whose launch has been made.
    pub(super) fn started(&self) -> u64 {
        // Acquire: the launch is ordered before what this thread does from now on.
        self.started.load(Ordering::Acquire)
    }

    /// Whether a launch has been begun and not been made yet. If false, every launch whose number this
    /// thread has read is ordered before what this thread does from now on.
    pub(super) fn is_launching(&self) -> bool {
        // `started` is read first, and being an acquire it stays first. `launched` never shows an
        // older number than this thread has read before. So if the two are equal, the launch that this
        // thread knows of has been made, or has failed.
        self.started() != self.launched.load(Ordering::Relaxed)
    }

    // ---------------------------------------------------------------- the keeper

    /// Asks the keeper to start the worker. Wake the keeper afterwards.
    pub(super) fn want(&self) {
        // Release: the keeper that takes the wish sees what this thread did before: the number that
        // `failed` has put back. A swap and not a store: a store would replace another thread's wish,
        // and the keeper would take the one wish without seeing what the other thread did.
        self.wanted.swap(true, Ordering::Release);
    }

    /// Takes the wish back, if there is one. For the keeper.
    pub(super) fn take_wish(&self) -> bool {
        // Acquire: pairs with `want`. (Nobody needs to see what the keeper did before.)
        self.wanted.swap(false, Ordering::Acquire)
    }

    /// Forbids all further starts.
    pub(super) fn stop(&self) {
        // Relaxed: publishes nothing. A start that is under way and misses the flag is told to leave by
        // the word of the last generation that is to leave.
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Whether the worker is being dropped.
    pub(super) fn is_stopping(&self) -> bool {
        // Relaxed: see `stop`. A thread that is woken after `stop` sees the flag, because waking
        // orders it.
        self.stopping.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Mutex};
    use loom::thread::{self, JoinHandle};

    use super::*;

    /// A search with at most three preemptions.
    fn model(check: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(check);
    }

    fn said(state: &AtomicU64, generation: u64, phase: u64) {
        state.store(generation << 8 | phase, Ordering::Relaxed);
    }

    /// The end of a generation, as kernels/worker.cu has it: says "leaving", looks once more, and says
    /// "left" if there is nothing. Returns whether it saw each command.
    fn leave(state: &AtomicU64, generation: u64, commands: &[AtomicU64]) -> Vec<bool> {
        said(state, generation, Phase::LEAVING);
        fence(Ordering::SeqCst);
        let seen: Vec<bool> = commands.iter().map(|command| command.load(Ordering::Relaxed) != 0).collect();
        said(state, generation, Phase::LEFT);
        seen
    }

    /// Memory, or a launch, as a plain cell and not an atomic: loom reports two accesses that nothing
    /// orders.
    struct Plain(UnsafeCell<bool>);

    // SAFETY: who may touch it when is what the tests are about; loom checks each access.
    unsafe impl Sync for Plain {}
    // SAFETY: as for Sync.
    unsafe impl Send for Plain {}

    impl Plain {
        fn new() -> Arc<Self> {
            Arc::new(Self(UnsafeCell::new(false)))
        }

        fn write(&self) {
            // SAFETY: loom checks that no other access is made at the same time.
            self.0.with_mut(|value| unsafe { *value = true });
        }

        fn read(&self) -> bool {
            // SAFETY: loom checks that no write is made at the same time.
            self.0.with(|value| unsafe { *value })
        }
    }

    /// A worker with flags, a state word, two commands and a stream of launches.
    struct Rig {
        flags: Flags,
        state: AtomicU64,
        commands: [AtomicU64; 2],
        /// The launcher: the last launch, which ends with the commands that its generation and those
        /// before it saw.
        launches: Mutex<Option<JoinHandle<Vec<bool>>>>,
    }

    impl Rig {
        /// A worker whose generation 1 has left.
        fn new() -> Arc<Self> {
            let rig = Rig {
                flags: Flags::new(),
                state: AtomicU64::new(1 << 8 | Phase::LEFT),
                commands: [AtomicU64::new(0), AtomicU64::new(0)],
                launches: Mutex::new(None),
            };
            let first = rig.flags.begin();
            rig.flags.made(first);
            Arc::new(rig)
        }

        /// Starts the next generation in the same stream behind the last, if a start is needed.
        fn ensure(rig: &Arc<Self>) {
            let mut last = rig.launches.lock().unwrap();
            if !rig.flags.phase(&rig.state).may_be_gone() {
                return;
            }
            let generation = rig.flags.begin();
            let (shared, before) = (rig.clone(), last.take());
            *last = Some(thread::spawn(move || {
                let mut seen = before.map_or(vec![false; 2], |before| before.join().unwrap());
                let now = leave(&shared.state, generation, &shared.commands);
                seen.iter_mut().zip(now).for_each(|(seen, now)| *seen |= now);
                seen
            }));
            rig.flags.made(generation);
        }

        fn post(rig: &Arc<Self>, command: usize) {
            rig.commands[command].store(1, Ordering::Release);
            if rig.flags.announce(&rig.state) {
                Self::ensure(rig);
            }
        }
    }

    /// A command meets a worker on its way out: the worker's last look finds the command, or the thread
    /// that posted finds the worker leaving.
    #[test]
    fn no_command_is_overlooked_by_a_worker_that_leaves() {
        model(|| {
            let rig = Rig::new();
            let generation = rig.flags.begin();
            let worker = rig.clone();
            let worker = thread::spawn(move || {
                said(&worker.state, generation, Phase::RUNNING);
                leave(&worker.state, generation, &worker.commands)
            });
            rig.flags.made(generation);
            rig.commands[0].store(1, Ordering::Release);
            let gone = rig.flags.announce(&rig.state);
            let seen = worker.join().unwrap();
            assert!(seen[0] || gone, "nobody serves the command");
        });
    }

    /// A thread that finds the worker gone may use the memory that the worker used.
    #[test]
    fn what_a_worker_did_is_seen_by_a_thread_that_finds_it_gone() {
        model(|| {
            let (rig, memory) = (Rig::new(), Plain::new());
            let generation = rig.flags.begin();
            let worker = {
                let (rig, memory) = (rig.clone(), memory.clone());
                thread::spawn(move || {
                    memory.write();
                    leave(&rig.state, generation, &rig.commands);
                })
            };
            rig.flags.made(generation);
            if rig.flags.phase(&rig.state).is_gone() {
                assert!(memory.read());
            }
            worker.join().unwrap();
        });
    }

    /// Two threads post while the worker is gone: each command is seen by a generation, whichever thread
    /// starts it.
    #[test]
    fn each_of_two_commands_is_seen_by_a_generation() {
        model(|| {
            let rig = Rig::new();
            let other = rig.clone();
            let other = thread::spawn(move || Rig::post(&other, 1));
            Rig::post(&rig, 0);
            other.join().unwrap();
            let last = rig.launches.lock().unwrap().take().expect("the first command starts one");
            assert_eq!(last.join().unwrap(), [true, true]);
        });
    }

    /// A start fails while another thread posts, which may take the failed generation for one about to
    /// start. The keeper takes a wish that lets it see the number that was put back.
    #[test]
    fn a_command_beside_a_start_that_fails_is_left_to_the_keeper() {
        model(|| {
            let rig = Rig::new();
            let keeper = {
                let rig = rig.clone();
                thread::spawn(move || {
                    // The keeper without its timed looks, which would serve the command in the end.
                    while !(rig.flags.take_wish() && rig.flags.phase(&rig.state).may_be_gone()) {
                        thread::park();
                    }
                })
            };
            let wake = keeper.thread().clone();
            let failing = {
                let (rig, wake) = (rig.clone(), wake.clone());
                thread::spawn(move || {
                    rig.flags.begin();
                    rig.flags.failed();
                    rig.flags.want();
                    // The keeper may take the wish before the wake-up, which orders everything.
                    thread::yield_now();
                    wake.unpark();
                })
            };
            rig.commands[0].store(1, Ordering::Release);
            if rig.flags.announce(&rig.state) {
                rig.flags.want();
                wake.unpark();
            }
            failing.join().unwrap();
            keeper.join().unwrap();
        });
    }

    /// A thread that has seen a launch begin, and then no launch under way, stands behind that launch.
    #[test]
    fn what_is_launched_after_a_launch_that_was_seen_stands_behind_it() {
        model(|| {
            let rig = Rig::new();
            let launch = Plain::new();
            let starting = {
                let (rig, launch) = (rig.clone(), launch.clone());
                thread::spawn(move || {
                    let _launcher = rig.launches.lock().unwrap();
                    let generation = rig.flags.begin();
                    launch.write();
                    rig.flags.made(generation);
                })
            };
            // As a lease does it.
            let gone = rig.flags.announce(&rig.state);
            if rig.flags.is_launching() {
                drop(rig.launches.lock().unwrap());
            }
            // Not gone: the thread has seen the other's launch begin, and starts none itself.
            if !gone {
                assert!(launch.read(), "the launch has not been made");
            }
            starting.join().unwrap();
        });
    }

    /// The drop of a worker ends the keeper, whether it sleeps or is about to.
    #[test]
    fn the_keeper_that_is_told_to_stop_stops() {
        model(|| {
            let rig = Rig::new();
            let keeper = {
                let rig = rig.clone();
                thread::spawn(move || {
                    while !rig.flags.is_stopping() {
                        thread::park();
                        rig.flags.take_wish();
                    }
                })
            };
            rig.flags.stop();
            keeper.thread().unpark();
            keeper.join().unwrap();
        });
    }
}
