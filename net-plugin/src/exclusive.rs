//! State that one thread at a time may use, without a lock: NCCL promises that,
//! and a caller that breaks the promise gets an error instead of a race.
//!
//! Another thread of ours may look in for a moment: for that one the first waits.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU8, Ordering};

/// See the module's text.
pub struct Exclusive<T> {
    state: AtomicU8,
    value: UnsafeCell<T>,
}

/// Nobody is there.
const FREE: u8 = 0;
/// The thread that NCCL promised is, or it has failed there.
const TAKEN: u8 = 1;
/// A visitor is.
const VISITED: u8 = 2;

// SAFETY: `enter` and `visit` let one thread at a time to the value, and what one thread
// did there happens before the next comes (acquire and release of `state`).
unsafe impl<T: Send> Sync for Exclusive<T> {}

/// Leaves a state behind, however the scope ends.
struct Leave<'a> {
    state: &'a AtomicU8,
    to: u8,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.state.store(self.to, Ordering::Release);
    }
}

impl<T> Exclusive<T> {
    pub fn new(value: T) -> Self {
        Exclusive { state: AtomicU8::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Runs `f` on the value; `None` if somebody is there. After a panic in `f` that is
    /// so for good: nobody sees a value that was left half changed. A visitor is waited for.
    #[inline]
    pub fn enter<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        while let Err(who) = self.try_take(TAKEN) {
            if who == TAKEN {
                return None;
            }
            std::thread::yield_now();
        }
        Some(self.run(f))
    }

    /// The same for a thread that has no right to be there, for a moment; `None` if anybody
    /// is there already.
    pub fn visit<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.try_take(VISITED).ok()?;
        Some(self.run(f))
    }

    #[inline]
    fn try_take(&self, who: u8) -> Result<u8, u8> {
        self.state.compare_exchange(FREE, who, Ordering::Acquire, Ordering::Relaxed)
    }

    #[inline]
    fn run<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let mut leave = Leave { state: &self.state, to: TAKEN };
        // SAFETY: the state was free and is ours: until it is free again this is the
        // only reference.
        let result = f(unsafe { &mut *self.value.get() });
        leave.to = FREE;
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_nobody_after_a_panic() {
        let cell = Exclusive::new(1);
        assert_eq!(cell.enter(|v| (*v, cell.enter(|v| *v))), Some((1, None)));
        assert_eq!(cell.enter(|v| *v), Some(1));
        let broken =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cell.enter(|_| panic!("half"))));
        assert!(broken.is_err());
        assert_eq!(cell.enter(|v| *v), None);
        assert_eq!(cell.visit(|v| *v), None);
    }

    #[test]
    fn a_visitor_is_waited_for_and_does_not_wait() {
        let cell = Exclusive::new(0u64);
        assert_eq!(cell.enter(|_| cell.visit(|v| *v)), Some(None));
        let stop = std::sync::atomic::AtomicBool::new(false);
        let (cell, stopped) = (&cell, &stop);
        let visits = std::thread::scope(|scope| {
            let visitor = scope.spawn(move || {
                let mut visits = 0;
                while !stopped.load(Ordering::Relaxed) || visits == 0 {
                    visits += cell.visit(|v| *v += 1).is_some() as u64;
                }
                visits
            });
            for _ in 0..100_000 {
                assert!(cell.enter(|v| *v += 1).is_some(), "a visitor was taken for a second thread");
            }
            stop.store(true, Ordering::Relaxed);
            visitor.join().unwrap()
        });
        assert_eq!(cell.enter(|v| *v), Some(100_000 + visits));
    }

    #[test]
    fn nobody_comes_after_a_visitor_that_panicked() {
        let cell = Exclusive::new(1);
        let visit = || cell.visit(|_| panic!("half"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(visit)).is_err());
        assert_eq!(cell.enter(|v| *v), None);
    }
}
