//! The `verbs` queue pair alone: gate, permits, credit and counts as an endpoint has
//! them, but neither rings nor kernels, so that it can stand beside perftest. Both
//! ends are threads of this process, over one device.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use pushgate::{Settings, abi};
use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_link_verbs::choice::Distance;
use pushgate_link_verbs::{Config, Device, VerbsOpening};
use serde_json::json;

use super::Bench;
use super::ends::{End, Ends, cores};
use crate::output::outln;

/// The options that the command line adds.
pub struct Options {
    /// "bw", "lat", or both.
    pub mode: Option<String>,
    /// Bytes of a message.
    pub size: Option<u64>,
    /// Messages in flight.
    pub depth: Option<u32>,
}

pub fn run(b: &Bench, o: &Options) -> Result<()> {
    let modes: &[&str] = match o.mode.as_deref() {
        None => &["bw", "lat"],
        Some("bw") => &["bw"],
        Some(_) => &["lat"],
    };
    let s = &b.settings;
    let device = match s.rdma_device("for bench rdma")? {
        Some(name) => Device::open(name, s.ib_port as u8)?,
        None => Device::choose(s.ib_port as u8, &pushgate::rdma::wish(s), |_| Distance::default())?,
    };
    let cores = cores();
    for &mode in modes {
        let size = o.size.unwrap_or(if mode == "bw" { 64 << 10 } else { 64 });
        let depth = o.depth.unwrap_or(16) as u64;
        let units = size.div_ceil(abi::PUSHGATE_UNIT as u64);
        let need = depth * units * abi::PUSHGATE_UNIT as u64;
        let window = b.window(need, need)?;
        let (ends, imm) = connect(s, &device, size as u32, depth, window)?;
        let mut pair = Ends { ends, limit: s.timeout, cores, woken: false };
        let note = format!("{}, {} immediate data", device.name(), if imm { "with" } else { "no" });
        match mode {
            "bw" => bandwidth(b, &mut pair, size, depth, &note)?,
            _ => latency(b, &mut pair, size, &note)?,
        }
    }
    Ok(())
}

fn bandwidth(b: &Bench, pair: &mut Ends, size: u64, depth: u64, note: &str) -> Result<()> {
    let warm = pair.stream(2 * depth)?.as_secs_f64() / (2 * depth) as f64;
    let count = ((b.seconds / warm) as u64).clamp(64, 1 << 22);
    let mut best = f64::INFINITY;
    for _ in 0..b.runs {
        best = best.min(pair.stream(count)?.as_secs_f64());
    }
    let rate = (count * size) as f64 / best / 1e6;
    if b.json {
        let line = json!({
            "bench": "rdma", "mode": "bw", "bytes": size, "value": rate, "unit": "MB/s", "depth": depth,
            "messages": count, "runs": b.runs, "note": note,
        });
        outln!("{line}")?;
    } else {
        let gbs = rate / 1e3;
        outln!(
            "rdma bw  {size:>9} B  {rate:>9.2} MB/s {gbs:>8.4} GB/s  {note}, {count} messages, {depth} in flight"
        )?;
    }
    Ok(())
}

fn latency(b: &Bench, pair: &mut Ends, size: u64, note: &str) -> Result<()> {
    // What else this host does may take a core away for long.
    let most = Duration::from_secs_f64(b.seconds * 4.0).min(pair.limit / 2);
    let mut rounds = vec![0; 1 << 8];
    let (n, mhz) = pair.ping(&mut rounds, most)?;
    let rounds = &mut rounds[..n];
    rounds.sort_unstable();
    let count = (b.seconds * 1e6 * mhz / rounds[rounds.len() / 2] as f64) as usize;
    let mut rounds = vec![0; count.clamp(100, 1 << 22)];
    let (mut best, mut clock, mut shown) = ([f64::INFINITY; 3], mhz, n);
    for _ in 0..b.runs {
        let (n, mhz) = pair.ping(&mut rounds, most)?;
        let rounds = &mut rounds[..n];
        rounds.sort_unstable();
        // Half of a round, microseconds.
        let found = [0, n / 2, n * 99 / 100].map(|i| rounds[i] as f64 / mhz / 2.0);
        if found[1] < best[1] {
            (best, clock, shown) = (found, mhz, n);
        }
    }
    let ([min, median, p99], n) = (best, shown);
    if b.json {
        let line = json!({
            "bench": "rdma", "mode": "lat", "bytes": size, "value": median, "min": min, "p99": p99,
            "unit": "us", "clock_mhz": clock, "rounds": n, "runs": b.runs, "note": note,
        });
        outln!("{line}")?;
    } else {
        outln!(
            "rdma lat {size:>9} B  {median:>9.2} us one way, min {min:.2}, 99 % {p99:.2}  \
             {note}, {n} rounds, clock {clock:.1} MHz"
        )?;
    }
    Ok(())
}

/// Two ends joined, and whether SENDs carry immediate data.
fn connect(
    s: &Settings,
    device: &Arc<Device>,
    size: u32,
    depth: u64,
    window: u64,
) -> Result<([End; 2], bool)> {
    let unit = abi::PUSHGATE_UNIT as u64;
    let geometry = |rank| Geometry {
        window_log: (window / unit).ilog2(),
        slots_log: s.slots.ilog2(),
        cq_log: s.slots.ilog2().min(abi::PUSHGATE_MAX_CQ_LOG),
        rx_log: s.receives.ilog2(),
        link_log: s.slots.ilog2(),
        landing_log: 0,
        signals: 1,
        rank,
    };
    let huge = s.huge_pages;
    let allocate = |name: &str, bytes: usize| -> Result<SharedMemory, ShimError> {
        SharedMemory::builder(name, bytes).huge_pages(huge).create()
    };
    let config = Config::from(s);
    let open = |rank| -> Result<_> {
        let window = Arc::new(allocate("bench-window", geometry(rank).window_bytes())?);
        Ok((VerbsOpening::new(device, &config, geometry(rank), window.clone(), &mut { allocate })?, window))
    };
    let ((a, window_a), (b, window_b)) = (open(0)?, open(1)?);
    let (from_a, from_b) = (a.offer(), b.offer());
    let (a, b) = (a.prepare(1, &from_b, &mut { allocate })?, b.prepare(0, &from_a, &mut { allocate })?);
    let (at_a, at_b) = (a.places(), b.places());
    let (a, b) = (a.join(at_b)?, b.join(at_a)?);
    let imm = a.immediate();
    let end = |rank, qp, window| End::new(rank, qp, window, size, depth, s.receives);
    Ok(([end(0, Box::new(a), window_a), end(1, Box::new(b), window_b)], imm))
}
