//! How long closing connections waits for their peers.
//!
//! The request of a short message is done before the peer has the message, so a connection that is closed may still have to
//! send it. A peer that hangs, or is cut off, would hold up each connection that is closed, one after the other. So the
//! connections share what they may wait in vain.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long all connections of a process may wait in vain together, as they are closed. A peer that runs takes its messages in
/// within microseconds, on a busy machine within milliseconds.
const MOST: Duration = Duration::from_secs(5);

/// How long connections have waited in vain. May be used by several threads at once.
#[derive(Default)]
pub struct Lingered(AtomicU64);

impl Lingered {
    /// How long a connection that is closed now may wait.
    pub fn left(&self) -> Duration {
        // Relaxed, here and below: a sum that orders nothing. Threads that close at once may all have what is left.
        MOST.saturating_sub(Duration::from_nanos(self.0.load(Ordering::Relaxed)))
    }

    /// A connection has waited in vain for so long.
    pub fn in_vain(&self, waited: Duration) {
        self.0.fetch_add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_wait_in_vain_for_no_longer_than_all_may_together() {
        let lingered = Lingered::default();
        assert_eq!(lingered.left(), MOST);
        lingered.in_vain(MOST / 4);
        assert_eq!(lingered.left(), MOST / 4 * 3);
        lingered.in_vain(MOST);
        assert_eq!(lingered.left(), Duration::ZERO);
    }
}
