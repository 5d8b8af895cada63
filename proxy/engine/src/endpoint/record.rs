//! What the flight recorder is told of a queue pair.

use std::os::fd::BorrowedFd;

use pushgate_core::gate::Stall as Short;
use pushgate_driver_shim::record::Record;
use pushgate_link::RegionSends;

use super::{Endpoint, QpMemory, Stands};
use crate::recorder::{About, Counts, Errors, Missing, Phase, QueuePair, Stall, Trace, View};

/// A message whose time from its release to the peer's word that it has the message is taken.
#[derive(Clone, Copy, Default)]
enum Sample {
    /// None until the next look.
    #[default]
    Off,
    /// Waits for the next pass that releases messages, and its last message; holds the number released before that pass.
    Armed(u64),
    /// Message number `messages` was that message, released at `at`.
    Released { messages: u64, at: u64 },
}

/// The queue pair's part of the flight recorder.
#[derive(Default)]
pub(super) struct Recorded {
    /// Its slot, if its engine records.
    trace: Option<Box<Trace>>,
    /// What names this end's half of the first link, and the peer's; both 0 where the link itself is asked. The names stay
    /// when another link takes the first one's place: they tell readers which two ends belong together.
    ends: [u64; 2],
    /// The peer's process.
    peer_pid: Option<u32>,
    /// A pass has done work since the last look.
    pub(super) worked: bool,
    sample: Sample,
    /// When the link broke that is being replaced, nanoseconds.
    broke: Option<u64>,
}

impl Recorded {
    /// Of a queue pair of one host: both halves of the link lie in memfds, whose inodes name them.
    pub(super) fn local(memory: &QpMemory) -> Self {
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map_or(0, |stat| stat.st_ino);
        let ends = [inode(memory.link.fd()), inode(memory.peer_link.fd())];
        Recorded { ends, peer_pid: memory.peer_pid, ..Recorded::default() }
    }
}

impl Endpoint {
    /// Gives the queue pair a slot of the engine's recorder.
    pub(crate) fn set_trace(&mut self, trace: Option<Trace>) {
        self.recorded.trace = trace.map(Box::new);
    }

    /// The engine took the queue pair in at time `now`, under this number.
    pub(crate) fn begin_trace(&mut self, number: u32, now: u64) {
        let ends = match self.recorded.ends {
            [0, 0] => self.here.qp.ends(),
            ends => ends,
        };
        let about = About {
            number,
            rank: self.rank(),
            peer: self.peer(),
            peer_pid: self.recorded.peer_pid,
            transport: About::transport(self.here.qp.name()),
            ends,
            slots_log: self.geometry.slots_log as u8,
            receives_log: self.geometry.rx_log as u8,
            peer_receives_log: self.peer_geometry.rx_log as u8,
            posted_receives: self.options.posted_receives,
            roles: self.options.roles,
        };
        let view = self.view();
        if let Some(trace) = &mut self.recorded.trace {
            trace.begin(about, now, view);
            // A queue pair whose messages are all sent before the first look has a time as well.
            self.recorded.sample = Sample::Armed(self.outbound.staging().messages());
        }
    }

    /// Whether a pass has done work since the last [`Endpoint::record`].
    #[inline]
    pub(crate) fn has_worked(&self) -> bool {
        self.recorded.worked
    }

    /// Records what has changed. `away`: for how long in all the engine did not run when it should have, nanoseconds. True if
    /// the queue pair stalls, once for each stall.
    pub(crate) fn record(&mut self, away: u64, stall: Stall) -> bool {
        self.recorded.worked = false;
        if self.recorded.trace.is_none() {
            return false;
        }
        let (now, view, counters) = (self.now, self.view(), self.counters());
        if matches!(self.recorded.sample, Sample::Off) {
            self.recorded.sample = Sample::Armed(self.outbound.staging().messages());
        }
        self.recorded.trace.as_mut().is_some_and(|trace| {
            trace.count(now, counters);
            trace.record(now, away, view, stall)
        })
    }

    /// Whether [`Endpoint::sample`] wants the time after this pass, which has done work.
    #[inline]
    pub(crate) fn samples(&self) -> bool {
        match self.recorded.sample {
            Sample::Off => false,
            Sample::Armed(messages) => self.outbound.staging().messages() != messages,
            Sample::Released { messages, .. } => self.session.received() >= messages,
        }
    }

    /// Takes in the time, nanoseconds, after a pass in which a message was released, or was seen to have arrived, whose time
    /// is taken: see [`Endpoint::samples`].
    #[cold]
    pub(crate) fn sample(&mut self, time: u64) {
        self.recorded.sample = match self.recorded.sample {
            Sample::Released { at, .. } => {
                if let Some(trace) = &mut self.recorded.trace {
                    trace.delivered(time.saturating_sub(at));
                }
                Sample::Off
            }
            _ => Sample::Released { messages: self.outbound.staging().messages(), at: time },
        };
    }

    /// The link broke, or the link that was to take its place.
    pub(super) fn record_break(&mut self) {
        self.recorded.broke.get_or_insert(self.now);
    }

    /// Another link carries the queue pair.
    pub(super) fn record_recovery(&mut self) {
        if let (Some(broke), Some(trace)) = (self.recorded.broke.take(), &mut self.recorded.trace) {
            trace.recovered(self.now.saturating_sub(broke));
        }
    }

    /// The queue pair has gone: records its last counts.
    pub(crate) fn end_trace(&mut self) {
        let (now, counters) = (self.now, self.counters());
        if let Some(trace) = &mut self.recorded.trace {
            trace.count(now, counters);
        }
    }

    /// What a reader of the recorder sees of the queue pair.
    pub(crate) fn recorded(&self) -> Option<QueuePair> {
        self.recorded.trace.as_ref()?.snapshot()
    }

    fn view(&self) -> View {
        let (staging, gate) = (self.outbound.staging(), self.outbound.gate());
        let counts = self.inbound.counts();
        let missing = self.missing();
        let few = |n: u64| n.min(u16::MAX.into()) as u16;
        let c = &self.counters;
        View {
            counts: Counts {
                posted: staging.head() + self.outbound.is_pending() as u64,
                retired: staging.head() - staging.outstanding(),
                released: staging.messages(),
                peer_received: self.session.received(),
                peer_freed: self.session.released(),
                // Those that are posted: some more may come before their receives.
                peer_granted: gate.granted().saturating_sub(self.here.qp.goes_ahead().into()),
                accepted: self.inbound.accepted(),
                received: counts.received,
                freed: counts.released,
                granted: counts.granted - u64::from(self.inbound.rules().ahead),
                shown: self.inbound.shown(),
                taken: self.inbound.consumed(),
                credits: gate.receives_left(),
                in_flight: gate.in_flight().into(),
            },
            phase: self.phase(),
            epoch: self.recovering.as_ref().map_or(self.session.epoch(), |r| r.epoch() as u16),
            missing,
            waiting: self.inbound.waits(),
            copies: self.moves.under_way.len().min(u8::MAX.into()) as u8,
            status: self.session.status(),
            errors: Errors {
                rnr: few(c.rnr),
                dropped: few(c.dropped),
                refused: few(c.refused),
                stuck: few(c.stuck),
            },
        }
    }

    fn phase(&self) -> Phase {
        match (self.stands, &self.recovering) {
            (Stands::Down, Some(r)) => r.phase(),
            (Stands::Live | Stands::Down, _) => Phase::Live,
            (Stands::Over, _) if self.shown => Phase::Ended,
            (Stands::Over | Stands::Last(_), _) => Phase::Ending,
        }
    }

    /// What the WQE at the head waits for. Asks as the next pass will, and takes nothing. Without a link the WQE waits for the
    /// link, which the phase says.
    fn missing(&self) -> Missing {
        if self.stands != Stands::Live || !self.outbound.is_pending() {
            return Missing::Nothing;
        }
        let Ok(record) = self.outbound.record() else { return Missing::Nothing };
        if self.outbound.is_undecided() {
            let region = record.has(Record::REGION)
                && matches!(self.here.qp.takes_region(&record), RegionSends::Unknown);
            return if region { Missing::Region } else { Missing::PostedReceive };
        }
        // A permit that is dropped gives back what it held.
        match self.outbound.reserve(&record) {
            Ok(_) => Missing::Nothing,
            Err(Short::SendQueue) => Missing::SendQueue,
            Err(Short::CompletionQueue) => Missing::CompletionQueue,
            Err(Short::Receive) => Missing::Receive,
            Err(Short::Bytes) => Missing::Bytes,
        }
    }
}
