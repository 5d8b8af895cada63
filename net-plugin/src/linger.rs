//! How long closing connections waits for their peers.
//!
//! The request of a short message is done before the peer has the message, so a connection that is closed may still have to
//! send it. A peer that hangs would hold up each connection that is closed, one after the other. So the connections share
//! what they may wait in vain, and once that is spent each of them still waits for as long as a peer needs that runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long all connections may wait in vain together at least. A link that breaks is replaced within the setting `recover`, or the
/// connection ends, so they wait for longer than that.
const ALL: Duration = Duration::from_secs(5);

/// What is added to the setting `recover`, for the end of a connection to be noticed.
const NOTICED: Duration = Duration::from_secs(1);

/// How long a connection waits at least: a peer whose program does not call is moved on by a thread within 10 ms.
const EACH: Duration = Duration::from_millis(50);

/// How long connections have waited in vain. May be used by several threads at once.
pub struct Lingered {
    all: Duration,
    /// Nanoseconds. Relaxed: a sum that orders nothing. Threads that close at once may all have what is left.
    in_vain: AtomicU64,
}

impl Lingered {
    /// No connection has waited yet. `recover`: how long the replacement of a link may take.
    pub fn new(recover: Option<Duration>) -> Self {
        let all = recover.map_or(ALL, |recover| ALL.max(recover + NOTICED));
        Lingered { all, in_vain: AtomicU64::new(0) }
    }

    /// How long a connection that is closed now may wait.
    pub fn left(&self) -> Duration {
        let in_vain = Duration::from_nanos(self.in_vain.load(Ordering::Relaxed));
        self.all.saturating_sub(in_vain).max(EACH)
    }

    /// A connection has waited in vain for as long as it may.
    pub fn in_vain(&self, allowed: Duration) {
        self.in_vain.fetch_add(u64::try_from(allowed.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_wait_in_vain_together_and_behind_that_for_a_moment_each() {
        let lingered = Lingered::new(None);
        assert_eq!(lingered.left(), ALL);
        lingered.in_vain(ALL / 4);
        assert_eq!(lingered.left(), ALL / 4 * 3);
        for _ in 0..100 {
            lingered.in_vain(lingered.left());
            assert_eq!(lingered.left(), EACH);
        }
    }

    #[test]
    fn they_wait_for_longer_than_a_link_takes_to_be_replaced() {
        for recover in [Duration::from_secs(10), Duration::from_secs(3600)] {
            assert!(Lingered::new(Some(recover)).left() > recover);
        }
    }
}
