//! A machine's part of the flight recorder: when it looks at its queue pairs, and what it logs of those that stall.

use super::Machine;
use crate::recorder::report::{Process, stalled};
use crate::recorder::{EACH, EVERY, QueuePair, Recorder, Stall};

/// A gap between two looks at the queue pairs beyond which the engine did not run as it should, nanoseconds. An engine that
/// sleeps wakes ten times as often. The time of such a gap says nothing against a queue pair.
const AWAY: u64 = 1_000_000_000;

/// The recorder of a machine, and when it is written.
pub(super) struct Recording {
    recorder: Recorder,
    stall: Stall,
    /// When the queue pairs are looked at next, nanoseconds.
    next: u64,
    /// When they were looked at last.
    last: u64,
}

impl Machine {
    /// The machine writes this recorder, and logs each queue pair that stalls.
    pub(crate) fn with_recorder(mut self, recorder: Option<Recorder>, stall: Stall) -> Self {
        self.recording = recorder.map(|recorder| Recording { recorder, stall, next: 0, last: 0 });
        self
    }

    /// This thread alone drives the machine.
    pub(crate) fn driven_by(&self, thread: u32) {
        if let Some(recording) = &self.recording {
            recording.recorder.driven_by(thread);
        }
    }

    /// Records what the queue pairs did, if it is time to.
    #[inline]
    pub(super) fn record(&mut self) {
        if self.recording.as_ref().is_some_and(|recording| self.now >= recording.next) {
            self.record_now();
        }
    }

    /// Records what the queue pairs did since the last look: the engine may sleep for long.
    #[inline]
    pub(super) fn record_before_sleep(&mut self) {
        if self.unrecorded {
            self.record_now();
        }
    }

    #[inline(never)]
    fn record_now(&mut self) {
        self.unrecorded = false;
        let Some(recording) = &mut self.recording else { return };
        let now = self.now;
        let gap = now - recording.last;
        let away = if gap > AWAY { gap } else { 0 };
        recording.last = now;
        recording.next = now + EVERY.max(self.endpoints.len() as u64 * EACH);
        recording.recorder.beat(now);
        let mut stalled = Vec::new();
        for (_, endpoint) in &mut self.endpoints {
            if endpoint.record(away, recording.stall) {
                stalled.extend(endpoint.recorded());
            }
        }
        if !stalled.is_empty() {
            say(&recording.recorder, now, stalled);
        }
    }

    /// The engine has ended: says so to readers.
    pub(super) fn end_recording(&self) {
        if let Some(recording) = &self.recording {
            recording.recorder.end();
        }
    }
}

/// Logs queue pairs that stall.
#[cold]
fn say(recorder: &Recorder, now: u64, queue_pairs: Vec<QueuePair>) {
    let engine = recorder.snapshot(now, queue_pairs);
    let process = Process { pid: engine.pid, name: String::new(), engines: vec![engine] };
    tracing::warn!("{}", stalled(&process));
}
