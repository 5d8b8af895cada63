//! A machine's part of the flight recorder: when it looks at its queue pairs, and what it logs of those that stall.

use super::Machine;
use crate::endpoint::Endpoint;
use crate::recorder::report::{Process, stalled};
use crate::recorder::{QueuePair, Recorder, Stall};
use pushgate_driver_shim::limited;

/// The least time between two looks at the queue pairs, nanoseconds.
const EVERY: u64 = 1_000_000;
/// Queue pairs that one look takes in, by turns: a look takes some microseconds however many queue pairs there are.
const SOME: usize = 64;
/// A gap between two looks beyond which the engine did not run as it should, nanoseconds. An engine that sleeps wakes ten
/// times as often. The time of such a gap says nothing against a queue pair.
const AWAY: u64 = 1_000_000_000;

/// The recorder of a machine, and when it is written.
pub(super) struct Recording {
    recorder: Recorder,
    stall: Stall,
    /// When queue pairs are looked at next, nanoseconds.
    next: u64,
    /// When they were looked at last.
    last: u64,
    /// For how long in all the engine did not run when it should have, nanoseconds.
    away: u64,
    /// The place of the queue pair at which the next look begins.
    at: usize,
}

impl Machine {
    /// The machine writes this recorder, and logs each queue pair that stalls.
    pub(crate) fn with_recorder(mut self, recorder: Option<Recorder>, stall: Stall) -> Self {
        self.recording =
            recorder.map(|recorder| Recording { recorder, stall, next: 0, last: 0, away: 0, at: 0 });
        self
    }

    /// This thread alone drives the machine.
    pub(crate) fn driven_by(&self, thread: u32) {
        if let Some(recording) = &self.recording {
            recording.recorder.driven_by(thread);
        }
    }

    /// Records what some of the queue pairs did, if it is time to.
    #[inline]
    pub(super) fn record(&mut self) {
        if self.recording.as_ref().is_some_and(|recording| self.now >= recording.next) {
            self.record_some();
        }
    }

    /// Records what the queue pairs did since they were looked at: the engine may sleep for long.
    #[inline]
    pub(super) fn record_before_sleep(&mut self) {
        if std::mem::take(&mut self.unrecorded) {
            self.record_worked();
        }
    }

    #[inline(never)]
    fn record_some(&mut self) {
        let (now, n) = (self.now, self.endpoints.len());
        let Some(recording) = &mut self.recording else { return };
        let gap = now - recording.last;
        recording.away += if gap > AWAY { gap } else { 0 };
        (recording.last, recording.next) = (now, now + EVERY);
        recording.recorder.beat(now, self.sleeps);
        let mut stalled = Vec::new();
        for i in 0..n.min(SOME) {
            stalled.extend(recording.look(&mut self.endpoints[(recording.at + i) % n].1));
        }
        recording.at = (recording.at + SOME) % n.max(1);
        recording.say(now, stalled);
    }

    #[inline(never)]
    fn record_worked(&mut self) {
        let Some(recording) = &self.recording else { return };
        let worked = self.endpoints.iter_mut().filter(|(_, endpoint)| endpoint.has_worked());
        let stalled = worked.filter_map(|(_, endpoint)| recording.look(endpoint)).collect();
        recording.say(self.now, stalled);
    }

    /// The engine has ended: says so to readers.
    pub(super) fn end_recording(&self) {
        if let Some(recording) = &self.recording {
            recording.recorder.end();
        }
    }
}

impl Recording {
    /// Records what a queue pair did. Returns what a reader sees of it if it stalls and that was not said yet.
    fn look(&self, endpoint: &mut Endpoint) -> Option<QueuePair> {
        endpoint.record(self.away, self.stall).then(|| endpoint.recorded()).flatten()
    }

    /// Logs queue pairs that stall.
    fn say(&self, now: u64, queue_pairs: Vec<QueuePair>) {
        if queue_pairs.is_empty() {
            return;
        }
        let engine = self.recorder.snapshot(now, queue_pairs);
        let process = Process { pid: engine.pid, name: String::new(), engines: vec![engine] };
        limited!(warn, 0u32, "{}", stalled(&process));
    }
}
