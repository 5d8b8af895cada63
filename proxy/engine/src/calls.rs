//! How an engine's own thread learns that the program calls, where the program drives the engine (`engine/driven.rs`).
//!
//! A lock guards the engine; nobody waits for it. A caller that finds the lock taken goes away, and what it has posted is
//! for the lock's holder. The thread lets go of the lock before it blocks, so it must not miss such a caller: nobody would
//! ring for what the caller has posted.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// How often the program has called.
#[cfg_attr(test, derive(Default))]
pub(crate) struct Calls(AtomicU64);

impl Calls {
    pub(crate) fn new() -> Self {
        Calls(AtomicU64::new(0))
    }

    /// The program calls. Comes before the caller's look at the lock.
    #[inline(always)]
    pub(crate) fn add(&self) {
        // Release: what the caller has posted comes before the number, for `Calls::taken_in`. A caller that finds the lock taken
        // orders the number by `Calls::busy`.
        self.0.fetch_add(1, Ordering::Release);
    }

    /// The caller has found the lock taken. After this it looks at the lock once more.
    ///
    /// This fence and the one of [`Calls::none_since`] have one order. If this one comes first, the thread finds the
    /// call counted, and does not block. If the other one comes first, so does the unlock before it, and the caller's
    /// second look finds the lock free, or taken by somebody who came later.
    #[cold]
    pub(crate) fn busy(&self) {
        fence(Ordering::SeqCst);
    }

    /// How often the program has called by now.
    pub(crate) fn count(&self) -> u64 {
        // Relaxed: only the change is looked at. A number that is old by a moment makes the thread look once more.
        self.0.load(Ordering::Relaxed)
    }

    /// How often the program, or the thread itself, has called by now. What those callers have posted is found by the pass that
    /// follows.
    pub(crate) fn taken_in(&self) -> u64 {
        // Acquire: see `Calls::add`. A caller whose number is read here is not found by `Calls::none_since`, so nothing else orders
        // what it has posted before the pass.
        self.0.load(Ordering::Acquire)
    }

    /// Makes a call of a thread of the program that rests after it. The count that the rest compares with ([`Calls::none_since`]) is of
    /// before the call, with the call itself: another thread's call since then may have taken in what the program has to take.
    pub(crate) fn rests_after<T>(&self, call: impl FnOnce() -> T) -> (u64, T) {
        let seen = self.taken_in() + 1;
        (seen, call())
    }

    /// Whether the program has not called since the count was `seen`: then the thread may block. The thread has let go of
    /// the lock. [`Calls::busy`] says what the fence orders.
    pub(crate) fn none_since(&self, seen: u64) -> bool {
        fence(Ordering::SeqCst);
        self.count() == seen
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    use super::*;

    /// A lock that nobody waits for, weaker than the standard library's where that one promises nothing: a caller that
    /// finds it taken has seen an old value of a relaxed load.
    #[derive(Default)]
    struct Lock(AtomicBool);

    impl Lock {
        fn try_lock(&self) -> bool {
            self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        }

        fn unlock(&self) {
            self.0.store(false, Ordering::Release);
        }
    }

    #[derive(Default)]
    struct Both {
        calls: Calls,
        lock: Lock,
        posted: AtomicBool,
        done: AtomicBool,
    }

    impl Both {
        /// A pass of who has the lock.
        fn pass(&self) {
            if self.posted.load(Ordering::Relaxed) {
                self.done.store(true, Ordering::Relaxed);
            }
        }

        /// Whether a pass would find something.
        fn has_work(&self) -> bool {
            self.posted.load(Ordering::Relaxed) && !self.done.load(Ordering::Relaxed)
        }

        /// A call of the program, with this pass. False: the lock was taken twice.
        fn call(&self, pass: impl FnOnce()) -> bool {
            self.calls.add();
            let mut locked = self.lock.try_lock();
            if !locked {
                self.calls.busy();
                locked = self.lock.try_lock();
            }
            if locked {
                pass();
                self.lock.unlock();
            }
            locked
        }
    }

    /// The program posts and calls once while the engine's thread does `first`, which returns the number of calls that it has seen, makes
    /// a pass and lies down.
    fn lies_down(first: fn(&Both) -> u64) {
        loom::model(move || {
            let both = Arc::new(Both::default());
            let theirs = both.clone();
            let caller = thread::spawn(move || {
                theirs.posted.store(true, Ordering::Relaxed);
                theirs.call(|| theirs.pass());
            });
            let seen = first(&both);
            let blocks = both.lock.try_lock() && {
                both.pass();
                both.lock.unlock();
                both.calls.none_since(seen)
            };
            caller.join().unwrap();
            assert!(
                !blocks || both.done.load(Ordering::Relaxed),
                "the message waits for a bell that nobody rings"
            );
        });
    }

    #[test]
    fn p7_a_thread_that_blocks_has_missed_no_caller_that_went_away() {
        lies_down(|_| 0);
    }

    /// The caller may go away because of a pass that the thread makes for the program's work.
    #[test]
    fn p7_a_thread_that_does_the_programs_work_and_blocks_has_missed_no_caller_that_went_away() {
        lies_down(|both| {
            both.call(|| both.pass());
            both.calls.taken_in()
        });
    }

    /// The pass that comes before the rest is a call too.
    #[test]
    fn p7_a_thread_of_the_program_that_rests_has_missed_no_caller_that_went_away() {
        lies_down(|both| both.calls.rests_after(|| both.call(|| both.pass())).0);
    }

    /// Something comes for the program while a thread of it begins to rest, and another thread's call takes that in.
    #[test]
    fn p7_a_thread_of_the_program_does_not_rest_on_what_another_call_takes_in() {
        // Of all runs of the model, so not loom's.
        static RESTED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
        loom::model(|| {
            let both = Arc::new((Both::default(), [(); 3].map(|()| AtomicBool::new(false))));
            let theirs = both.clone();
            let caller = thread::spawn(move || {
                let (both, [begun, asleep, rung]) = &*theirs;
                // What comes before is found by the program's look before the rest.
                if begun.load(Ordering::Acquire) {
                    both.posted.store(true, Ordering::Relaxed);
                    both.call(|| {
                        // The engine slept: the pass wakes the thread.
                        rung.store(asleep.load(Ordering::Relaxed), Ordering::Relaxed);
                        both.pass();
                    });
                }
            });
            let (all, [begun, asleep, rung]) = &*both;
            let (seen, idle) = all.calls.rests_after(|| {
                begun.store(true, Ordering::Release);
                let mut idle = false;
                all.call(|| {
                    idle = !all.has_work();
                    all.pass();
                });
                idle
            });
            let falls_asleep = idle && all.lock.try_lock() && {
                let falls_asleep = !all.has_work();
                asleep.store(falls_asleep, Ordering::Relaxed);
                all.lock.unlock();
                falls_asleep
            };
            let blocks = falls_asleep && all.calls.none_since(seen);
            caller.join().unwrap();
            let (taken_in, rung) = (all.done.load(Ordering::Relaxed), rung.load(Ordering::Relaxed));
            assert!(!blocks || !taken_in || rung, "the program waits beside what has come");
            RESTED.fetch_or(blocks, Ordering::Relaxed);
        });
        assert!(RESTED.load(Ordering::Relaxed), "no thread rests");
    }
}
