//! How a worker ends before its time, and how long one is patient with it.

use std::time::{Duration, Instant};

use super::KERNEL;
use crate::executor::DeviceError;

/// How long what may pass is tried again.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);
/// Between the first two attempts; twice as long each time, up to `LONGEST`.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(100);

/// The end of a worker, which is for ever.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Lost {
    /// A sentence: the cause.
    pub reason: String,
    /// Nothing of it runs on the device, so that no memory is touched any more. False where
    /// the driver says neither that it runs nor that it does not.
    pub ended: bool,
}

impl Lost {
    pub(super) fn error(&self) -> DeviceError {
        DeviceError::Lost { kernel: KERNEL.to_owned(), reason: self.reason.clone() }
    }
}

/// Something that fails, and may do so for a while only.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    since: Option<Instant>,
    times: u32,
}

impl Trouble {
    /// It went well, or nobody asks for it any more.
    pub(super) fn over(&mut self) {
        *self = Self::default();
    }

    /// It failed. How often and for how long it has, if that is long enough.
    pub(super) fn again(&mut self) -> Option<(u32, Duration)> {
        self.times += 1;
        let time = self.since.get_or_insert_with(Instant::now).elapsed();
        (time >= PATIENCE).then_some((self.times, time))
    }

    /// Until the next attempt; none where nothing fails.
    pub(super) fn pause(&self) -> Option<Duration> {
        self.times.checked_sub(1).map(|n| (SHORTEST * (1 << n.min(10))).min(LONGEST))
    }
}
