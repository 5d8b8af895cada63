//! A stream of the CPU executor: launches one after the other, and the end of each.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::executor::{LaunchQueue, WaitOutcome};
use crate::lock::lock;

/// A stream. The next launch waits for the end of the launch before it.
#[derive(Default)]
pub(super) struct CpuStream {
    /// The end of the stream's last launch; `None` if the stream has had none.
    pub(super) last: Mutex<Option<Arc<End>>>,
}

impl LaunchQueue for CpuStream {
    fn raw(&self) -> Option<u64> {
        None
    }
}

/// The end of one launch: whether it has ended, and the times of its beginning and end.
#[derive(Default)]
pub(super) struct End {
    times: Mutex<(Option<Instant>, Option<Instant>)>,
    ended: Condvar,
}

impl End {
    pub(super) fn begin(&self) {
        lock(&self.times).0.get_or_insert_with(Instant::now);
    }

    pub(super) fn finish(&self) {
        lock(&self.times).1 = Some(Instant::now());
        self.ended.notify_all();
    }

    pub(super) fn is_done(&self) -> bool {
        lock(&self.times).1.is_some()
    }

    pub(super) fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        let times = lock(&self.times);
        let running = |times: &mut (Option<Instant>, Option<Instant>)| times.1.is_none();
        match timeout {
            None => {
                drop(self.ended.wait_while(times, running).unwrap_or_else(PoisonError::into_inner));
                WaitOutcome::Done
            }
            Some(timeout) => {
                let waited = self.ended.wait_timeout_while(times, timeout, running);
                let (times, _) = waited.unwrap_or_else(PoisonError::into_inner);
                if times.1.is_some() { WaitOutcome::Done } else { WaitOutcome::TimedOut }
            }
        }
    }

    pub(super) fn elapsed(&self) -> Option<Duration> {
        let times = lock(&self.times);
        Some(times.1?.duration_since(times.0?))
    }
}
