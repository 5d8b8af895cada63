//! A machine's part of the flight recorder: when it looks at its queue pairs, and what it logs of those that stall.

use crate::endpoint::Endpoint;
use crate::engine::command::QpId;
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

impl Recording {
    /// Writes this recorder, and logs each queue pair that stalls.
    pub(super) fn new(recorder: Recorder, stall: Stall) -> Self {
        Recording { recorder, stall, next: 0, last: 0, away: 0, at: 0 }
    }

    /// This thread alone drives the machine.
    pub(super) fn driven_by(&self, thread: u32) {
        self.recorder.driven_by(thread);
    }

    /// Whether it is time to record some of the queue pairs.
    #[inline]
    pub(super) fn is_due(&self, now: u64) -> bool {
        now >= self.next
    }

    /// Records what some of the queue pairs did. `sleeps`: how often the engine has slept.
    #[inline(never)]
    pub(super) fn record_some(&mut self, now: u64, sleeps: u64, endpoints: &mut [(QpId, Box<Endpoint>)]) {
        let gap = now - self.last;
        self.away += if gap > AWAY { gap } else { 0 };
        (self.last, self.next) = (now, now + EVERY);
        self.recorder.beat(now, sleeps);
        let (n, mut stalled) = (endpoints.len(), Vec::new());
        for i in 0..n.min(SOME) {
            stalled.extend(self.look(&mut endpoints[(self.at + i) % n].1));
        }
        self.at = (self.at + SOME) % n.max(1);
        self.say(now, stalled);
    }

    /// Records what the queue pairs did since they were looked at: the engine may sleep for long.
    #[inline(never)]
    pub(super) fn record_worked(&self, now: u64, endpoints: &mut [(QpId, Box<Endpoint>)]) {
        let worked = endpoints.iter_mut().filter(|(_, endpoint)| endpoint.has_worked());
        let stalled = worked.filter_map(|(_, endpoint)| self.look(endpoint)).collect();
        self.say(now, stalled);
    }

    /// The engine has ended: says so to readers.
    pub(super) fn end(&self) {
        self.recorder.end();
    }

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
