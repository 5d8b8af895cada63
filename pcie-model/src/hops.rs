//! Latency by number of hops: a posted write travels the way once, a read twice.

use serde::Serialize;

use crate::cost::{read_time, round_trip, write_time};
use crate::error::{Result, within};
use crate::link::Link;
use crate::parameters::Parameters;
use crate::plot::{Axis, Plot, Scale, Series};
use crate::route::{Hop, Route};

/// The latency of 64 bytes over a number of hops, in ns.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Latency {
    /// How many hops lie between the ends.
    pub hops: u32,
    /// A posted write, one way.
    pub push_ns: f64,
    /// A read, round trip.
    pub pull_ns: f64,
}

/// Bytes of the message.
pub const BYTES: u64 = 64;

/// The latencies over 1 to `most` hops of one kind. The memory that is read is as quick as the
/// host's.
///
/// # Errors
/// A link or parameters that are impossible; `most` above 32.
pub fn by_hops(link: &Link, p: &Parameters, hop: Hop, most: u32) -> Result<Vec<Latency>> {
    link.check()?;
    p.check(link)?;
    within("most", most.into(), 1.0, 32.0)?;
    let tlp = p.store_tlp.min(64);
    (1..=most)
        .map(|hops| {
            let route = Route { link: *link, hops: vec![hop; hops as usize], ..Route::default() };
            Ok(Latency {
                hops,
                push_ns: write_time(&route, p, 0, BYTES, tlp)?,
                pull_ns: read_time(&route, p, round_trip(&route.hops, p), 0, BYTES, f64::INFINITY),
            })
        })
        .collect()
}

/// Plots the latencies.
pub fn plot(rows: &[Latency], hop: Hop) -> Plot {
    let line = |of: fn(&Latency) -> f64| rows.iter().map(|r| (f64::from(r.hops), of(r))).collect();
    let name = match hop {
        Hop::Switch => "switches",
        Hop::RootComplex => "root complexes",
        Hop::Socket => "socket links",
    };
    Plot {
        title: format!("{BYTES} bytes over a chain of {name}"),
        x: Axis::new("hops", Scale::Linear),
        y: Axis::new("ns", Scale::Linear),
        series: vec![
            Series::new("push, one way", line(|r| r.push_ns)),
            Series::new("pull, round trip", line(|r| r.pull_ns)),
        ],
    }
}
