//! A message from GPU to NIC whose transfers are simulated; everything else is as in
//! [`crate::estimate`].

use super::{Kind, Load, Machine, Outcome};
use crate::cost::{Plan, Step, Way, one_way};
use crate::error::{Result, within};
use crate::parameters::Parameters;
use crate::route::Route;

/// How many bytes of a transfer are simulated, of all requesters together. A longer transfer goes
/// on at the rate that they reached.
const MOST: u64 = 4 << 20;

/// Time and steady rate of one simulated transfer.
struct Run {
    time_ns: f64,
    gbs: f64,
}

/// The time of a message in ns, from the GPU's first store, or its request, until the NIC has the
/// last byte. Other writers of a shared link send the same bytes at the same time.
///
/// # Errors
/// A route or parameters that [`crate::estimate`] refuses.
pub fn message_time(way: Way, route: &Route, p: &Parameters, bytes: u64) -> Result<f64> {
    route.check()?;
    p.check(&route.link)?;
    within("bytes", bytes as f64, 1.0, 1e15)?;
    let plan = Plan::of(way, route, p);
    let head = if plan.steps.len() == 1 { bytes } else { bytes.min(p.chunk) };
    let (mut time, mut slowest) = (plan.before_ns, f64::INFINITY);
    for step in &plan.steps {
        let run = simulate(step, p, head)?;
        time += run.time_ns;
        slowest = slowest.min(run.gbs);
    }
    Ok(if bytes > head { time + (bytes - head) as f64 / slowest } else { time })
}

fn simulate(step: &Step, p: &Parameters, bytes: u64) -> Result<Run> {
    // Narrow stores make many TLPs of few bytes.
    let most =
        if matches!(step, Step::Write { .. }) { MOST / 256 * u64::from(p.store_tlp.min(256)) } else { MOST };
    let some = bytes.min(most / u64::from(step.route().sharers.max(1)));
    let (route, before, memory_ns, kind) = match step {
        Step::Copy { route } => {
            // The copy engine is simulated by its rate only; nothing more is known about it.
            let gbs = p.copy_gbs.min(route.link.ceiling() / f64::from(route.sharers.max(1)));
            return Ok(Run { time_ns: bytes as f64 / gbs, gbs });
        }
        Step::Write { route, .. } => {
            let tlp = f64::from(p.store_tlp);
            let each = p.store_interval_ns * tlp / (f64::from(p.store_threads) * f64::from(p.store_bytes));
            let kind = Kind::Write { tlp: p.store_tlp, interval_ns: each };
            (route, one_way(&route.hops, p), 0.0, kind)
        }
        Step::Read { route, memory_ns, .. } => (route, 0.0, *memory_ns, Kind::Read),
    };
    let mut machine = Machine::of(route, &route.hops, p);
    machine.memory_ns += memory_ns;
    machine.requesters = route.sharers.max(1);
    if machine.hops.is_empty() && machine.requesters > 1 {
        // Requesters that share a link must meet at some hop.
        machine.hops.push(0.0);
    }
    let out = machine.run(&Load { kind, address: 0, bytes: some })?;
    let (gbs, cap) = (rate(&out, some, machine.requesters), step.cap(p));
    let over = if cap < gbs { some as f64 / cap - some as f64 / gbs } else { 0.0 };
    let gbs = gbs.min(cap);
    let rest = if bytes > some { (bytes - some) as f64 / gbs } else { 0.0 };
    Ok(Run { time_ns: out.time_ns - before + over + rest, gbs })
}

/// One requester's part of the rate.
fn rate(out: &Outcome, bytes: u64, requesters: u32) -> f64 {
    // Few TLPs have no middle to measure.
    if out.data_tlps < 64 { bytes as f64 / out.time_ns } else { out.gbs / f64::from(requesters) }
}
