//! A simulator of PCIe, TLP by TLP: requesters behind a chain of hops, writing to or reading from targets.
//!
//! ```text
//! requester 0 ─┐                          ┌─ target 0
//! requester 1 ─┼─ hop 1 ─── … ─── hop k ──┼─ target 1
//! requester n ─┘                          └─ …
//! ```
//!
//! Every wire has both directions, each a serialiser with credits for posted, non-posted and completion TLPs, headers
//! and data apart; every hop has finite buffers at each input, and every output takes turns among them. Reads hold
//! tags. Without jitter nothing is random; with it, a seed gives the same run again.

mod engine;
mod message;
mod network;
pub mod split;

pub use message::message_time;
use serde::Serialize;

use crate::error::{ParameterError, Result, within};
use crate::link::Link;
use crate::parameters::Parameters;
use crate::route::{Hop, Route};

/// 10^-12 s: the simulator's clock. A byte on the fastest link takes 8.
type Picoseconds = u64;

/// Room at each input, for one class: headers, and bytes of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffers {
    /// Posted writes.
    pub posted: (u32, u32),
    /// Read requests: headers alone.
    pub non_posted: u32,
    /// Completions, in hops. Ends promise room for all they asked for.
    pub completion: (u32, u32),
}

impl Default for Buffers {
    /// 1024 TLPs and 256 KiB of each class: enough for a Gen5 link over a microsecond.
    fn default() -> Self {
        Buffers { posted: (1024, 256 << 10), non_posted: 1024, completion: (1024, 256 << 10) }
    }
}

/// What is simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Every wire.
    pub link: Link,
    /// Latency of each hop, ns.
    pub hops: Vec<f64>,
    /// Latency of both ends of a way together, ns.
    pub wire_ns: f64,
    /// What a target takes to answer a read, ns.
    pub memory_ns: f64,
    /// At most this much more or less in each answer's time, evenly spread, ns.
    pub jitter_ns: f64,
    /// Of the jitter.
    pub seed: u64,
    /// Whether hops take a whole TLP in before they send it on.
    pub store_and_forward: bool,
    /// Devices that read or write.
    pub requesters: u32,
    /// Devices that are read or written. A requester goes from one to the next with every page of 4 KiB.
    pub targets: u32,
    /// Room at each input.
    pub buffers: Buffers,
    /// From a TLP's leaving a buffer until its sender knows, ns.
    pub credit_ns: f64,
    /// Between two posted writes that leave the last hop for different targets, ns: a host that lets no write go to a
    /// second target before the first has all that came before.
    pub drain_ns: f64,
    /// Bytes that a reader has room for, MRRS for every request; none: what its tags allow.
    pub completion_buffer: Option<u64>,
}

impl Machine {
    /// The machine of a route: one requester, one target.
    pub fn of(route: &Route, hops: &[Hop], p: &Parameters) -> Self {
        Machine {
            link: route.link,
            hops: hops.iter().map(|h| h.latency(p)).collect(),
            wire_ns: p.wire_ns(),
            memory_ns: p.memory_ns,
            jitter_ns: 0.0,
            seed: 0,
            store_and_forward: p.store_and_forward,
            requesters: 1,
            targets: 1,
            buffers: Buffers::default(),
            credit_ns: 50.0,
            drain_ns: 0.0,
            completion_buffer: p.completion_buffer,
        }
    }

    fn check(&self, load: &Load) -> Result<()> {
        self.link.check()?;
        within("requesters", self.requesters.into(), 1.0, 64.0)?;
        within("targets", self.targets.into(), 1.0, 64.0)?;
        if self.hops.is_empty() && self.requesters + self.targets > 2 {
            return Err(ParameterError::new(
                "hops",
                "none",
                "at least one with several requesters or targets",
            ));
        }
        for &ns in &self.hops {
            within("hops", ns, 0.0, 1e9)?;
        }
        let times = [
            ("wire_ns", self.wire_ns),
            ("memory_ns", self.memory_ns),
            ("jitter_ns", self.jitter_ns),
            ("credit_ns", self.credit_ns),
            ("drain_ns", self.drain_ns),
        ];
        for (name, ns) in times {
            within(name, ns, 0.0, 1e9)?;
        }
        // Less room than one TLP would stop everything for ever.
        let (b, mps) = (self.buffers, f64::from(self.link.mps));
        within("buffers.posted headers", b.posted.0.into(), 1.0, 1e9)?;
        within("buffers.posted bytes", b.posted.1.into(), mps, 4e9)?;
        within("buffers.non_posted", b.non_posted.into(), 1.0, 1e9)?;
        within("buffers.completion headers", b.completion.0.into(), 1.0, 1e9)?;
        within("buffers.completion bytes", b.completion.1.into(), mps, 4e9)?;
        if let Some(bytes) = self.completion_buffer {
            within("completion_buffer", bytes as f64, self.link.mrrs.into(), 1e12)?;
        }
        within("bytes", load.bytes as f64, 1.0, 1e10)?;
        within("address", load.address as f64, 0.0, 1e18)?;
        match load.kind {
            Kind::Read => Ok(()),
            Kind::Write { tlp, interval_ns } => {
                self.link.check_tlp(tlp)?;
                within("interval_ns", interval_ns, 0.0, 1e9)
            }
        }
    }

    /// Runs it: every requester moves `load`.
    ///
    /// # Errors
    /// What of the machine or the load cannot be.
    pub fn run(&self, load: &Load) -> Result<Outcome> {
        self.check(load)?;
        Ok(engine::Engine::new(self, load).run())
    }
}

/// What requesters do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Posted writes in TLPs that end at multiples of `tlp`, one every `interval_ns` at most.
    Write {
        /// Bytes of a TLP's payload.
        tlp: u32,
        /// Between two TLPs of one requester.
        interval_ns: f64,
    },
    /// Reads of MRRS bytes, as many at once as there are tags.
    Read,
}

/// What each requester moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Writes or reads.
    pub kind: Kind,
    /// The first byte's address.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Load {
    /// A read of aligned memory.
    pub fn read(bytes: u64) -> Self {
        Load { kind: Kind::Read, address: 0, bytes }
    }

    /// A write of aligned memory, as fast as the wire takes it.
    pub fn write(bytes: u64, tlp: u32) -> Self {
        Load { kind: Kind::Write { tlp, interval_ns: 0.0 }, address: 0, bytes }
    }
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Until the last byte of the last requester arrived, ns.
    pub time_ns: f64,
    /// The same of each requester.
    pub each_ns: Vec<f64>,
    /// Bytes of all requesters a ns, GB/s, while the middle half of them arrived: without start and end.
    pub gbs: f64,
    /// TLPs with data.
    pub data_tlps: u64,
    /// Their bytes on the wire, headers included, on one wire of their way.
    pub data_wire: u64,
    /// From issue to arrival of one TLP with data (of a read: from its request), ns: mean and most.
    pub delay_ns: (f64, f64),
    /// Most posted writes that stood in one input of a hop.
    pub most_queued: usize,
}
