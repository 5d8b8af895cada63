//! How long ends that are closed wait for their peers.
//!
//! An end that is closed may still have something to say to its peer. A peer that hangs would hold up each end that is closed, one
//! after the other. So the ends of a process share what they may wait in vain. Once that is spent each of them waits for as long
//! as a peer needs that runs; once as much again is spent, for a moment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long an end waits when all others have waited in vain for twice what they may.
const MOMENT: Duration = Duration::from_millis(1);

/// How long ends have waited in vain. May be used by several threads at once.
#[derive(Debug)]
pub struct Lingered {
    all: Duration,
    each: Duration,
    /// Nanoseconds. Relaxed: a sum that orders nothing. Threads that close at once may all have what is left.
    in_vain: AtomicU64,
}

impl Lingered {
    /// No end has waited yet. Together they may wait in vain for `all`, and after that each for `each`, until that is as much again.
    pub fn new(all: Duration, each: Duration) -> Self {
        Lingered { all, each, in_vain: AtomicU64::new(0) }
    }

    /// How long an end that is closed now may wait.
    pub fn left(&self) -> Duration {
        let in_vain = Duration::from_nanos(self.in_vain.load(Ordering::Relaxed));
        let least = if in_vain < 2 * self.all { self.each } else { MOMENT };
        self.all.saturating_sub(in_vain).max(least)
    }

    /// An end has waited in vain for as long as it may.
    pub fn in_vain(&self, allowed: Duration) {
        self.in_vain.fetch_add(u64::try_from(allowed.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p7_ends_wait_in_vain_together_then_briefly_each_and_at_last_for_a_moment() {
        let (all, each) = (Duration::from_secs(3), Duration::from_millis(20));
        let lingered = Lingered::new(all, each);
        assert_eq!(lingered.left(), all);
        lingered.in_vain(all / 4);
        assert_eq!(lingered.left(), all / 4 * 3);
        lingered.in_vain(lingered.left());
        for _ in 0..150 {
            assert_eq!(lingered.left(), each);
            lingered.in_vain(each);
        }
        assert_eq!(lingered.left(), MOMENT);
    }
}
