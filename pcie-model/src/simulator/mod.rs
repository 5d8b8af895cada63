//! A simulator of PCIe, TLP by TLP: requesters behind a chain of hops write to targets or read from
//! them.
//!
//! ```text
//! requester 0 ─┐                          ┌─ target 0
//! requester 1 ─┼─ hop 1 ─── … ─── hop k ──┼─ target 1
//! requester n ─┘                          └─ …
//! ```
//!
//! Every wire has two directions. Each direction is a serialiser with credits for posted,
//! non-posted and completion TLPs, with headers and data counted apart. Every hop has finite
//! buffers at each input, and every output takes turns among the inputs. Reads hold tags. Without
//! jitter nothing is random; with jitter, a seed reproduces a run.

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

/// The simulator's unit of time, 10^-12 s. A byte on the fastest link takes 8.
type Picoseconds = u64;

/// Room at each input for each class: headers, and bytes of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffers {
    /// Posted writes.
    pub posted: (u32, u32),
    /// Read requests, which have only headers.
    pub non_posted: u32,
    /// Completions, in hops. The ends promise room for everything they asked for.
    pub completion: (u32, u32),
}

impl Default for Buffers {
    /// 1024 TLPs and 256 KiB of each class: enough for a Gen5 link over a microsecond.
    fn default() -> Self {
        Buffers { posted: (1024, 256 << 10), non_posted: 1024, completion: (1024, 256 << 10) }
    }
}

/// The machine to simulate.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// The settings of every wire.
    pub link: Link,
    /// Latency of each hop in ns.
    pub hops: Vec<f64>,
    /// Latency of both ends of a way together, in ns.
    pub wire_ns: f64,
    /// Time that a target takes to answer a read, in ns.
    pub memory_ns: f64,
    /// Largest deviation, up or down, of each answer's time, evenly spread, in ns.
    pub jitter_ns: f64,
    /// Seed of the jitter.
    pub seed: u64,
    /// Whether hops take in a whole TLP before sending it on.
    pub store_and_forward: bool,
    /// Number of devices that read or write.
    pub requesters: u32,
    /// Number of devices that are read or written. A requester goes on to the next one with every
    /// page of 4 KiB.
    pub targets: u32,
    /// Room at each input.
    pub buffers: Buffers,
    /// Time from when a TLP leaves a buffer until its sender knows, in ns.
    pub credit_ns: f64,
    /// Time between two posted writes that leave the last hop for different targets, in ns. Models
    /// a host that lets no write go to a second target before the first has everything that came
    /// before.
    pub drain_ns: f64,
    /// Bytes that a reader has room for, MRRS for every request; none: what its tags allow.
    pub completion_buffer: Option<u64>,
}

impl Machine {
    /// The machine of a route, with one requester and one target.
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

    /// Runs the machine: every requester moves `load`.
    ///
    /// # Errors
    /// A machine or a load that is impossible.
    pub fn run(&self, load: &Load) -> Result<Outcome> {
        self.check(load)?;
        Ok(engine::Engine::new(self, load).run())
    }
}

/// Whether requesters write or read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Posted writes in TLPs that end at multiples of `tlp`, at most one in `interval_ns`.
    Write {
        /// Payload of a TLP in bytes.
        tlp: u32,
        /// Time between two TLPs of one requester, in ns.
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
    /// Number of bytes.
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

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Time until the last byte of the last requester arrived, in ns.
    pub time_ns: f64,
    /// Time until each requester's last byte arrived, in ns.
    pub each_ns: Vec<f64>,
    /// Rate of all requesters together in GB/s (bytes a ns) while the middle half of the bytes
    /// arrived: without start and end.
    pub gbs: f64,
    /// Number of TLPs with data.
    pub data_tlps: u64,
    /// Bytes of those TLPs, headers included, on one wire of their way.
    pub data_wire: u64,
    /// Time from issue to arrival of one TLP with data (for a read, from its request), in ns: mean
    /// and maximum.
    pub delay_ns: (f64, f64),
    /// The most posted writes that were queued in one input of a hop.
    pub most_queued: usize,
}
