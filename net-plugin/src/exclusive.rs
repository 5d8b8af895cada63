//! State that one thread at a time may use, without a lock. NCCL promises that; a caller that
//! breaks the promise gets an error instead of a race. Another thread may visit the state briefly,
//! and the first thread waits for the visitor. While it waits no further visitor is admitted, so a visitor that comes again and again
//! does not keep it out.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

const FREE: u8 = 0;
const USED: u8 = 1;
const VISITED: u8 = 2;
/// A thread panicked while it used the value.
const POISONED: u8 = 3;

/// State that one thread at a time may use.
pub struct Exclusive<T> {
    state: AtomicU8,
    /// The first thread waits for a visitor.
    awaited: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `enter` and `visit` admit one thread at a time to the value, and everything that one
// thread did there happens before the next thread enters (acquire and release of `state`).
unsafe impl<T: Send> Sync for Exclusive<T> {}

/// Why a visitor was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Another thread is using the value.
    Busy,
    /// A thread panicked while it used the value: no thread is admitted any more.
    Poisoned,
}

/// Marks the state poisoned if it is dropped by a panic.
struct Inside<'a>(&'a AtomicU8);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.store(POISONED, Ordering::Release);
    }
}

impl<T> Exclusive<T> {
    pub fn new(value: T) -> Self {
        Exclusive {
            state: AtomicU8::new(FREE),
            awaited: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    fn take(&self, state: u8) -> Result<u8, u8> {
        self.state.compare_exchange(FREE, state, Ordering::Acquire, Ordering::Relaxed)
    }

    /// Runs `f` on the value; `None` if another thread is using it. After a panic in `f` the answer
    /// is always `None`, so no thread sees a value that was left half changed.
    #[inline]
    pub fn enter<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.take(USED).is_err() {
            self.wait_for_visitor()?;
        }
        let inside = Inside(&self.state);
        // SAFETY: `state` was FREE and is USED now; until it is FREE again this is the only
        // reference.
        let result = f(unsafe { &mut *self.value.get() });
        std::mem::forget(inside);
        self.state.store(FREE, Ordering::Release);
        Some(result)
    }

    #[cold]
    fn wait_for_visitor(&self) -> Option<()> {
        // Relaxed, here and in `visit`: only a hint; `state` orders what counts.
        self.awaited.store(true, Ordering::Relaxed);
        let taken = loop {
            match self.take(USED) {
                Ok(_) => break Some(()),
                Err(VISITED) => std::thread::yield_now(),
                Err(_) => break None,
            }
        };
        self.awaited.store(false, Ordering::Relaxed);
        taken
    }

    /// Runs `f` on the value for a thread other than the one that normally uses it. That thread
    /// waits meanwhile, so `f` must be short.
    pub fn visit<R>(&self, f: impl FnOnce(&mut T) -> R) -> Result<R, Refused> {
        if self.awaited.load(Ordering::Relaxed) {
            return Err(Refused::Busy);
        }
        self.take(VISITED)
            .map_err(|state| if state == POISONED { Refused::Poisoned } else { Refused::Busy })?;
        let inside = Inside(&self.state);
        // SAFETY: `state` was FREE and is taken now; until it is FREE again this is the only
        // reference.
        let result = f(unsafe { &mut *self.value.get() });
        std::mem::forget(inside);
        self.state.store(FREE, Ordering::Release);
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn one_thread_at_a_time_enters_and_none_after_a_panic() {
        let cell = Exclusive::new(1);
        assert_eq!(cell.enter(|v| (*v, cell.enter(|v| *v))), Some((1, None)));
        assert_eq!(cell.enter(|v| *v), Some(1));
        let broken =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cell.enter(|_| panic!("half"))));
        assert!(broken.is_err());
        assert_eq!((cell.enter(|v| *v), cell.visit(|v| *v)), (None, Err(Refused::Poisoned)));
        let cell = Exclusive::new(1);
        let broken =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cell.visit(|_| panic!("half"))));
        assert!(broken.is_err());
        assert_eq!((cell.enter(|v| *v), cell.visit(|v| *v)), (None, Err(Refused::Poisoned)));
    }

    #[test]
    fn a_visitor_is_refused_while_the_value_is_used_and_the_user_waits_for_a_visitor() {
        let cell = Exclusive::new(0u64);
        assert_eq!(cell.enter(|_| cell.visit(|v| *v)), Some(Err(Refused::Busy)));
        let done = std::sync::atomic::AtomicBool::new(false);
        let visits = std::thread::scope(|scope| {
            let visitor = scope.spawn(|| {
                let mut visits = 0;
                while !done.load(Ordering::Relaxed) {
                    let visit = cell.visit(|v| {
                        *v += 1;
                        std::thread::yield_now();
                    });
                    visits += u64::from(visit.is_ok());
                    std::thread::sleep(std::time::Duration::from_micros(20));
                }
                visits
            });
            for _ in 0..2_000 {
                cell.enter(|v| *v += 1).expect("a visitor only");
            }
            while cell.enter(|v| *v) == Some(2_000) {
                std::thread::yield_now();
            }
            done.store(true, Ordering::Relaxed);
            visitor.join().unwrap()
        });
        assert_eq!(cell.enter(|v| *v), Some(2_000 + visits));
    }

    #[test]
    fn a_visitor_that_comes_again_at_once_does_not_keep_the_user_out() {
        let (cell, done) = (Exclusive::new(0u64), std::sync::atomic::AtomicBool::new(false));
        let visits = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let _ = cell.visit(|_| {
                        visits.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(std::time::Duration::from_micros(200));
                    });
                }
            });
            let mut most = 0;
            for _ in 0..50 {
                let ended = visits.load(Ordering::Relaxed);
                while visits.load(Ordering::Relaxed) == ended {
                    std::thread::yield_now();
                }
                let before = visits.load(Ordering::Relaxed);
                cell.enter(|_| most = most.max(visits.load(Ordering::Relaxed) - before)).unwrap();
            }
            done.store(true, Ordering::Relaxed);
            // One is under way, and one may begin before the user waits.
            assert!(most <= 2, "{most} visits while the user waited");
        });
    }
}
