//! How a client that posts and a copier that falls asleep never miss each other.
//!
//! The client stores the count of its commands and then loads `asleep`; the copier stores `asleep` and then loads the counts for the last
//! time. Each has a sequentially consistent fence between its store and its load, so at least one of the two sees the other's store
//! (C++20 [atomics.order]/4: either fence precedes the other in the one order of such fences). So either the client rings, or the copier
//! finds the command.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Publishes that `posted` commands were posted. True: the copier sleeps, so it must be rung.
pub fn publish(tail: &AtomicU64, asleep: &AtomicU64, posted: u64) -> bool {
    // Release: the commands, and what the client wrote to the memories, are there before the new count is.
    tail.store(posted, Ordering::Release);
    fence(Ordering::SeqCst);
    asleep.load(Ordering::Relaxed) != 0
}

/// Says to all clients that the copier is about to sleep. The counts must be looked at once more afterwards ([`has_more`]).
pub fn announce<'a>(asleep: impl Iterator<Item = &'a AtomicU64>) {
    for word in asleep {
        word.store(1, Ordering::Relaxed);
    }
    fence(Ordering::SeqCst);
}

/// Whether a ring has commands after `cursor`.
pub fn has_more(tail: &AtomicU64, cursor: u64) -> bool {
    tail.load(Ordering::Relaxed) != cursor
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn p7_a_command_is_found_before_the_copier_sleeps_or_its_client_rings() {
        loom::model(|| {
            let words = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
            let client = words.clone();
            let rung = thread::spawn(move || publish(&client[0], &client[1], 1));
            announce(std::iter::once(&words[1]));
            let found = has_more(&words[0], 0);
            assert!(rung.join().unwrap() || found);
        });
    }
}
