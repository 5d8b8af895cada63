//! How many connections came through a door, and why the others did not.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pushgate_driver_shim::log::Limiter;

use super::Refused;

/// The pause between two lines of the log for one reason. It is long because anybody reaches a door.
const QUIET: Duration = Duration::from_secs(5);
const REASONS: usize = 14;

/// Counters of a door. Any thread may read them.
#[derive(Debug)]
pub struct Counts {
    accepted: AtomicU64,
    refused: [AtomicU64; REASONS],
    /// Of lines about each reason.
    lines: Mutex<Limiter<usize>>,
    last: Mutex<Option<(SocketAddr, Refused)>>,
}

/// What a door has counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Connections that came through.
    pub accepted: u64,
    /// Refused connections by reason; zero counts are omitted.
    pub refused: Vec<(&'static str, u64)>,
}

fn index(why: &Refused) -> usize {
    match why {
        Refused::Foreign => 0,
        Refused::Version(_) => 1,
        Refused::Purpose { .. } => 2,
        Refused::Tls { .. } => 3,
        Refused::Secret { .. } => 4,
        Refused::Reflected => 5,
        Refused::Proof => 6,
        Refused::TurnedAway => 7,
        Refused::Encryption(_) => 8,
        Refused::Greeting { .. } => 9,
        Refused::Closed => 10,
        Refused::Late => 11,
        Refused::Crowded => 12,
        Refused::Io(_) => 13,
    }
}

/// The names of the reasons, in the order of [`index`].
const NAMES: [&str; REASONS] = [
    "foreign",
    "version",
    "purpose",
    "tls-differs",
    "secret-missing",
    "reflected",
    "proof",
    "turned-away",
    "encryption",
    "greeting",
    "closed",
    "late",
    "crowded",
    "io",
];

impl Default for Counts {
    fn default() -> Self {
        let lines = Mutex::new(Limiter::new(1, QUIET));
        Counts { accepted: AtomicU64::new(0), refused: Default::default(), lines, last: Mutex::default() }
    }
}

impl Counts {
    // Relaxed throughout: each number stands alone.
    pub(super) fn accepted(&self) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection that was refused. The log gets a line for each reason at most every few seconds.
    pub(super) fn refused(&self, from: SocketAddr, why: Refused) {
        let i = index(&why);
        self.refused[i].fetch_add(1, Ordering::Relaxed);
        let said = self.lines.lock().unwrap_or_else(|e| e.into_inner()).lets(i, Instant::now());
        if let Some(left_out) = said {
            tracing::warn!(%from, left_out = (left_out > 0).then_some(left_out), "refused a connection: {why}");
        }
        *self.last.lock().unwrap_or_else(|e| e.into_inner()) = Some((from, why));
    }

    /// The connection that was refused last, and why.
    pub fn last_refused(&self) -> Option<(SocketAddr, Refused)> {
        self.last.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// What was counted so far.
    pub fn read(&self) -> Counted {
        let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let refused = NAMES.into_iter().zip(self.refused.iter().map(count)).filter(|(_, n)| *n > 0);
        Counted { accepted: count(&self.accepted), refused: refused.collect() }
    }
}

impl Counted {
    /// How many connections were refused for a reason.
    pub fn of(&self, why: &Refused) -> u64 {
        self.refused.iter().find(|(reason, _)| *reason == NAMES[index(why)]).map_or(0, |(_, n)| *n)
    }
}
