//! The loss of a worker, and how long calls that fail are repeated before the worker counts as
//! lost.

use std::time::{Duration, Instant};

use super::KERNEL;
use crate::error::DeviceError;

/// How long a call whose failure may pass is repeated.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);
/// Pause between the first two attempts; it doubles each time, up to `LONGEST`.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(100);

/// The loss of a worker, which is final.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Lost {
    /// The cause, as a sentence.
    pub reason: String,
    /// True if nothing of the worker runs on the device, so no memory is touched any more. False if
    /// the driver says neither that it runs nor that it does not.
    pub ended: bool,
}

impl Lost {
    pub(super) fn error(&self) -> DeviceError {
        DeviceError::Lost { kernel: KERNEL.to_owned(), reason: self.reason.clone() }
    }
}

/// Counts the failures of something that may recover.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    since: Option<Instant>,
    times: u32,
}

impl Trouble {
    /// Resets the count: the call succeeded, or nothing asks for it any more.
    pub(super) fn over(&mut self) {
        *self = Self::default();
    }

    /// Counts a failure. Returns how often and for how long the calls have failed, once that is
    /// `PATIENCE`.
    pub(super) fn again(&mut self) -> Option<(u32, Duration)> {
        self.times += 1;
        let time = self.since.get_or_insert_with(Instant::now).elapsed();
        (time >= PATIENCE).then_some((self.times, time))
    }

    /// The pause before the next attempt; `None` if nothing has failed.
    pub(super) fn pause(&self) -> Option<Duration> {
        self.times.checked_sub(1).map(|n| (SHORTEST * (1 << n.min(10))).min(LONGEST))
    }
}
