//! How a thread that copies and a thread that ends the use of memory never miss each other.
//!
//! Who copies counts itself and then looks whether the memory is closed; who closes the memory stores that and then looks at the count.
//! Each has a sequentially consistent fence between the two, so at least one of them sees the other's store (C++20 [atomics.order]/4:
//! either fence precedes the other in the one order of such fences). So either nobody copies any more once the count is seen to be 0,
//! or the copy does not begin. Count and word may lie in a page that two processes share.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A copy that goes on, as long as this lives.
#[derive(Debug)]
pub struct Copy<'a>(&'a AtomicU64);

/// Counts a copy. Comes before the caller's look whether the memory is closed; the copy begins after the look.
pub fn begin(busy: &AtomicU64) -> Copy<'_> {
    // Relaxed: the fence orders it before the look.
    busy.fetch_add(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    Copy(busy)
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        // Release: what the copy has read and written comes before, for `goes_on`.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Stores a word that says that memory is closed.
pub fn close(word: &AtomicU64, closed: u64) {
    // Relaxed: the fence orders it before the looks at the count.
    word.store(closed, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Whether a copy goes on. False after [`close`]: nobody touches the memory any more.
pub fn goes_on(busy: &AtomicU64) -> bool {
    // Acquire: with the release of the last copy, and of those before it, whose subtractions it continues.
    busy.load(Ordering::Acquire) != 0
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn p8_memory_that_was_closed_is_touched_by_nobody_once_no_copy_goes_on() {
        loom::model(|| {
            let all = Arc::new((AtomicU64::new(0), AtomicU64::new(0), UnsafeCell::new(0)));
            let theirs = all.clone();
            let copies = thread::spawn(move || {
                let (busy, closed, memory) = &*theirs;
                let _copy = begin(busy);
                if closed.load(Ordering::Relaxed) == 0 {
                    // SAFETY: loom fails where this and the access below are not one after the other.
                    memory.with_mut(|byte| unsafe { *byte = 1 });
                }
            });
            let (busy, closed, memory) = &*all;
            close(closed, 1);
            if !goes_on(busy) {
                // SAFETY: as above. The program has its memory back.
                memory.with_mut(|byte| unsafe { *byte = 2 });
            }
            copies.join().unwrap();
        });
    }
}
