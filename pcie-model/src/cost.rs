//! The cost of a message from a GPU to a NIC, pushed, pulled or bounced, and what limits it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::link::{Completions, PAGE};
use crate::parameters::Parameters;
use crate::route::{Hop, Route, Window, latency};

/// The way of a payload: which device moves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The GPU writes the payload into a window (posted).
    Push,
    /// The NIC reads the payload from GPU memory (non-posted).
    Pull,
    /// The GPU's copy engine writes the payload into host memory, and the NIC reads it there.
    Bounce,
}

impl Way {
    /// All ways.
    pub const ALL: [Way; 3] = [Way::Push, Way::Pull, Way::Bounce];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Push => "push",
            Way::Pull => "pull",
            Way::Bounce => "bounce",
        })
    }
}

/// What limits a stream of payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The wire, headers included.
    Link,
    /// Tags: the bytes of outstanding reads for each round trip.
    Tags,
    /// The threads do not store, or load, fast enough.
    Issue,
    /// The reader's room for completions.
    CompletionCredits,
    /// Other devices write through the same link.
    UpLink,
    /// The root complex passes less than the link between peers.
    RootComplex,
    /// The copy engine.
    CopyEngine,
}

impl Limit {
    /// The reason, as a clause for a user.
    pub fn reason(self) -> &'static str {
        match self {
            Limit::Link => "the link is full, headers included",
            Limit::Tags => "the reader's outstanding requests do not cover the round trip",
            Limit::Issue => "too few threads, or too narrow stores, to fill the link",
            Limit::CompletionCredits => {
                "the reader has too little room for completions to cover the round trip"
            }
            Limit::UpLink => "other writers share the link",
            Limit::RootComplex => "the root complex passes less between peers than the link",
            Limit::CopyEngine => "the copy engine is slower than the link",
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::Link => "link",
            Limit::Tags => "tags",
            Limit::Issue => "issue",
            Limit::CompletionCredits => "completion credits",
            Limit::UpLink => "up-link",
            Limit::RootComplex => "root complex",
            Limit::CopyEngine => "copy engine",
        })
    }
}

/// The steady rate of a stream, and what limits it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// GB/s of payload.
    pub gbs: f64,
    /// What limits the rate.
    pub limit: Limit,
}

impl Rate {
    fn least(of: impl IntoIterator<Item = (f64, Limit)>) -> Rate {
        let first = Rate { gbs: f64::INFINITY, limit: Limit::Link };
        of.into_iter().fold(first, |r, (gbs, limit)| if gbs < r.gbs { Rate { gbs, limit } } else { r })
    }

    fn and(self, other: Rate) -> Rate {
        if other.gbs < self.gbs { other } else { self }
    }
}

/// The cost of one message.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// Nanoseconds from the GPU's first store, or its request, until the NIC has the last byte.
    /// Infinite if the NIC never gets it.
    pub time_ns: f64,
    /// The part of the time that does not depend on the size.
    pub fixed_ns: f64,
    /// GB/s of this message alone: its bytes divided by its time.
    pub bandwidth: f64,
    /// The rate that a stream of such messages would reach, and what limits it.
    pub stream: Rate,
}

impl Estimate {
    /// Whether the fixed part is more than half of the time; then the limit of the stream says
    /// little.
    pub fn is_latency_bound(&self) -> bool {
        self.fixed_ns * 2.0 > self.time_ns
    }

    /// Why the message takes that long, for a user.
    pub fn reason(&self) -> &'static str {
        match self {
            e if e.time_ns.is_infinite() => "the root complex passes none of it",
            e if e.is_latency_bound() => "latency: most of the time does not depend on the size",
            e => e.stream.limit.reason(),
        }
    }
}

/// Latency of a posted write between devices, one way, in ns, without the bytes: `t_wire +
/// sum(t_hop)`.
pub fn one_way(hops: &[Hop], p: &Parameters) -> f64 {
    p.wire_ns() + latency(hops, p)
}

/// Round trip of a read of host memory in ns, without the bytes: `RTT0 + 2 sum(t_hop)`. A read of
/// GPU memory takes [`Parameters::gpu_memory_ns`] more.
pub fn round_trip(hops: &[Hop], p: &Parameters) -> f64 {
    p.rtt_ns + 2.0 * latency(hops, p)
}

/// The rate of posted writes by SMs: the least of the wire with TLPs of `store_tlp` (pcie-bench,
/// `mem_bw.write`), this writer's share of the link, and what the threads issue.
///
/// # Errors
/// Parameters that [`Parameters::check`] refuses.
pub fn write_rate(route: &Route, p: &Parameters) -> Result<Rate> {
    let wire = route.link.write_rate(p.store_tlp)?;
    let issue = f64::from(p.store_threads) * f64::from(p.store_bytes) / p.store_interval_ns;
    Ok(Rate::least([(wire, Limit::Link), (issue, Limit::Issue), (shared(wire, route), Limit::UpLink)]))
}

fn shared(wire: f64, route: &Route) -> f64 {
    if route.sharers > 1 { wire / f64::from(route.sharers) } else { f64::INFINITY }
}

/// The rate of a device's reads at an unloaded round trip of `rtt` ns: the least of the wire
/// (pcie-bench, `mem_bw.read`), of `tags * MRRS / (RTT + a request's own time on the wire)`, and of
/// that formula with the room for completions. A closed loop with deterministic service reaches the
/// least of them (Little's law).
pub fn read_rate(route: &Route, p: &Parameters, rtt: f64) -> Rate {
    let link = &route.link;
    let one = link.read_wire(0, link.mrrs.into());
    let round = rtt + (one.wire + one.request_wire) as f64 / link.tlp() + held(route, p, link.mrrs.into());
    let (tags, room) = in_flight(route, p);
    Rate::least([
        (link.read_rate(), Limit::Link),
        (tags / round, Limit::Tags),
        (room / round, Limit::CompletionCredits),
        (shared(link.read_rate(), route), Limit::UpLink),
    ])
}

/// How many bytes a reader may have outstanding, in whole requests: by its tags, and by its room
/// for completions.
fn in_flight(route: &Route, p: &Parameters) -> (f64, f64) {
    let mrrs = u64::from(route.link.mrrs);
    let room = p.completion_buffer.map_or(f64::INFINITY, |b| (b / mrrs * mrrs) as f64);
    ((u64::from(route.link.tags) * mrrs) as f64, room)
}

/// The time of a read of `bytes` at `address` in ns, at an unloaded round trip of `rtt`. Requests
/// that fit in flight go at the rate of the wire, or at `cap` if that is less, and each such round
/// takes at least a round trip. So where tags limit the rate, time has steps: one request more than
/// fits waits for another whole round trip.
pub fn read_time(route: &Route, p: &Parameters, rtt: f64, address: u64, bytes: u64, cap: f64) -> f64 {
    let link = &route.link;
    let (tags, room) = in_flight(route, p);
    let wire = link.read_wire(address, bytes);
    let at_once = (tags.min(room) / f64::from(link.mrrs)).min(wire.requests as f64);
    let cap = cap.min(shared(link.read_rate(), route));
    let time = |payload: u64, wire: u64| (wire as f64 / link.tlp()).max(payload as f64 / cap);
    let mrrs = u64::from(link.mrrs);
    // After the first page, requests are aligned.
    let address = if address % PAGE + bytes > PAGE { 0 } else { address };
    let each = time(mrrs, link.completions_of(address, mrrs) * link.completion_overhead() + mrrs);
    let all = time(bytes, wire.wire.max(wire.request_wire));
    let base = rtt + link.request_overhead() as f64 / link.tlp() + held(route, p, bytes);
    let earlier = (wire.requests as f64 / at_once).ceil() - 1.0;
    let last = (all - earlier * at_once * each).max(0.0);
    base + all.max(earlier * (base + each) + last)
}

/// The time of posted writes of `bytes` at `address` in TLPs of `tlp` bytes over `hops`, in ns,
/// from the device's port until the last one has arrived: one way, plus the wire.
///
/// # Errors
/// A `tlp` that [`crate::Link::write_wire`] refuses.
pub fn write_time(route: &Route, p: &Parameters, address: u64, bytes: u64, tlp: u32) -> Result<f64> {
    let link = &route.link;
    let wire = link.write_wire(address, bytes, tlp)? as f64;
    // A hop takes in the longest TLP whole before sending it on; the others follow meanwhile.
    let (tlp, first) = (u64::from(tlp), bytes.min(u64::from(tlp) - address % u64::from(tlp)));
    let longest = first.max(tlp.min(bytes - first)) + link.request_overhead();
    let held = if p.store_and_forward { route.hops.len() as f64 * longest as f64 / link.tlp() } else { 0.0 };
    Ok(one_way(&route.hops, p) + wire / link.tlp() + held)
}

/// What hops that store and forward add to the round trip of a read of `bytes`, in ns: the time of
/// a request and of a completion at each.
fn held(route: &Route, p: &Parameters, bytes: u64) -> f64 {
    if !p.store_and_forward {
        return 0.0;
    }
    let link = &route.link;
    let cut = match link.completions {
        Completions::Mps => link.mps,
        Completions::Rcb => link.rcb,
    };
    let piece = bytes.min(cut.min(link.mrrs).into()).next_multiple_of(4);
    let wire = link.request_overhead() + link.completion_overhead() + piece;
    route.hops.len() as f64 * wire as f64 / link.tlp()
}

/// One transfer of a message's payload.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// Posted writes by SMs over this route, after its one-way time; `peer`: not to host memory.
    Write { route: Route, peer: bool },
    /// A read over this route, its round trip included, of memory that takes `memory_ns` longer
    /// than the host's.
    Read { route: Route, memory_ns: f64, peer: bool },
    /// A copy by the copy engine, after its launch.
    Copy { route: Route },
}

impl Step {
    fn rtt(&self, p: &Parameters) -> f64 {
        match self {
            Step::Read { route, memory_ns, .. } => round_trip(&route.hops, p) + memory_ns,
            _ => 0.0,
        }
    }

    /// The most GB/s that a root complex passes of the transfer.
    pub(crate) fn cap(&self, p: &Parameters) -> f64 {
        match self {
            Step::Write { route, peer: true } if route.through_root() => p.root_write_gbs,
            Step::Read { route, peer: true, .. } if route.through_root() => p.root_read_gbs,
            _ => None,
        }
        .unwrap_or(f64::INFINITY)
    }

    fn rate(&self, p: &Parameters) -> Result<Rate> {
        let rate = match self {
            Step::Write { route, .. } => write_rate(route, p)?,
            Step::Read { route, .. } => read_rate(route, p, self.rtt(p)),
            Step::Copy { route } => Rate::least([
                (p.copy_gbs, Limit::CopyEngine),
                (route.link.ceiling(), Limit::Link),
                (shared(route.link.ceiling(), route), Limit::UpLink),
            ]),
        };
        Ok(rate.and(Rate { gbs: self.cap(p), limit: Limit::RootComplex }))
    }

    fn time(&self, p: &Parameters, bytes: u64) -> Result<f64> {
        Ok(match self {
            Step::Read { route, .. } => read_time(route, p, self.rtt(p), 0, bytes, self.cap(p)),
            Step::Write { .. } | Step::Copy { .. } => bytes as f64 / self.rate(p)?.gbs,
        })
    }
}

/// The plan of a message: ns that move no payload, and one or two transfers.
pub(crate) struct Plan {
    pub before_ns: f64,
    pub steps: Vec<Step>,
}

impl Plan {
    pub fn of(way: Way, route: &Route, p: &Parameters) -> Plan {
        let over = |hops: Vec<Hop>| Route { hops, ..route.clone() };
        let (out, back) = (over(route.gpu_to_host()), over(route.host_to_nic()));
        let doorbell = p.cpu_turn_ns + one_way(&back.hops, p);
        let told = p.sm_ns / 2.0 + one_way(&out.hops, p) + doorbell;
        let fence = |hops: &[Hop]| if p.fence { p.sm_ns + round_trip(hops, p) } else { 0.0 };
        let (fence_out, fence_all) = (fence(&out.hops), fence(&route.hops));
        let from_host = Step::Read { route: back, memory_ns: 0.0, peer: false };
        let (before_ns, steps) = match (way, route.window) {
            (Way::Push, Window::Nic) => {
                let landed = p.sm_ns / 2.0 + one_way(&route.hops, p);
                let step = Step::Write { route: route.clone(), peer: true };
                (landed.max(fence_all + told) + p.nic_memory_ns, vec![step])
            }
            (Way::Push, Window::Host) => {
                (fence_out + told, vec![Step::Write { route: out, peer: false }, from_host])
            }
            (Way::Pull, _) => {
                (told, vec![Step::Read { route: route.clone(), memory_ns: p.gpu_memory_ns, peer: true }])
            }
            (Way::Bounce, _) => (p.copy_launch_ns + doorbell, vec![Step::Copy { route: out }, from_host]),
        };
        Plan { before_ns, steps }
    }
}

/// The time and bandwidth of a message of `bytes`.
///
/// All ways begin alike: a WQE goes to host memory, the CPU takes it and rings the NIC's doorbell.
/// Then
/// * *push* into the NIC: the payload's way or the doorbell's, whichever is longer; with
///   [`Parameters::fence`] the WQE waits for a round trip after the payload.
/// * *push* into host memory: as into the NIC, and then a short read by the NIC.
/// * *pull*: a read of GPU memory over the whole way. No fence is charged, which favours this way.
/// * *bounce*: a copy by the copy engine, the doorbell, and a short read by the NIC.
///
/// Where payload is stored in host memory, messages longer than [`Parameters::chunk`] flow: the
/// first chunk takes both steps one after the other, the rest goes at the rate of the slower step.
///
/// # Errors
/// A route or parameters that are impossible; `bytes` of 0.
pub fn estimate(way: Way, route: &Route, p: &Parameters, bytes: u64) -> Result<Estimate> {
    route.check()?;
    p.check(&route.link)?;
    crate::error::within("bytes", bytes as f64, 1.0, 1e15)?;
    let plan = Plan::of(way, route, p);
    // A single transfer is one chunk of any size.
    let head = if plan.steps.len() == 1 { bytes } else { bytes.min(p.chunk) };
    let mut stream = plan.steps[0].rate(p)?;
    let (mut fixed_ns, mut time_ns) = (plan.before_ns, plan.before_ns);
    for step in &plan.steps {
        stream = stream.and(step.rate(p)?);
        fixed_ns += step.rtt(p);
        time_ns += step.time(p, head)?;
    }
    if bytes > head {
        time_ns += (bytes - head) as f64 / stream.gbs;
    }
    Ok(Estimate { time_ns, fixed_ns, bandwidth: bytes as f64 / time_ns, stream })
}

/// A size at which another way becomes the faster one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Crossing {
    /// The way that is faster below.
    pub below: Way,
    /// The way that is faster from that size on.
    pub above: Way,
    /// The least size at which `above` is not slower.
    pub bytes: u64,
}

/// All sizes between 8 B and 1 GiB at which one way overtakes another. If a pair has no crossing,
/// one of its ways is always faster.
///
/// # Errors
/// A route or parameters that [`estimate`] refuses.
pub fn crossings(route: &Route, p: &Parameters) -> Result<Vec<Crossing>> {
    let mut all = Vec::new();
    for (i, &a) in Way::ALL.iter().enumerate() {
        for &b in &Way::ALL[i + 1..] {
            // Whether `b` is not slower at this size.
            let wins = |n: u64| -> Result<bool> {
                Ok(estimate(b, route, p, n)?.time_ns <= estimate(a, route, p, n)?.time_ns)
            };
            // Eight marks to an octave: fine enough for the steps of reads.
            let marks: Vec<u64> =
                (8 * 3..=8 * 30).map(|e| 2f64.powf(f64::from(e) / 8.0).round() as u64).collect();
            for pair in marks.windows(2) {
                let (mut low, mut high) = (pair[0], pair[1]);
                let (was, is) = (wins(low)?, wins(high)?);
                if was == is {
                    continue;
                }
                while high - low > 1 {
                    let middle = low + (high - low) / 2;
                    if wins(middle)? == was { low = middle } else { high = middle }
                }
                let (below, above) = if is { (a, b) } else { (b, a) };
                all.push(Crossing { below, above, bytes: high });
            }
        }
    }
    Ok(all)
}
