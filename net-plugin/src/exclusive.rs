//! State that one thread at a time may use, without a lock: NCCL promises that,
//! and a caller that breaks the promise gets an error instead of a race.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// See the module's text.
pub struct Exclusive<T> {
    busy: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `enter` lets one thread at a time to the value, and what one thread did
// there happens before the next enters (acquire and release of `busy`).
unsafe impl<T: Send> Sync for Exclusive<T> {}

impl<T> Exclusive<T> {
    pub fn new(value: T) -> Self {
        Exclusive { busy: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Runs `f` on the value; `None` if somebody is there. After a panic in `f` that is
    /// so for good: nobody sees a value that was left half changed.
    #[inline]
    pub fn enter<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.busy.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: `busy` was false and is true now: until it is false again this is the
        // only reference.
        let result = f(unsafe { &mut *self.value.get() });
        self.busy.store(false, Ordering::Release);
        Some(result)
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
    }
}
