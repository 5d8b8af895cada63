//! Single transfers as a probe measures them, and the parameters that follow from its figures.

use crate::cost::{Limit, Rate, one_way, round_trip};
use crate::error::Result;
use crate::link::Link;
use crate::parameters::Parameters;
use crate::route::Hop;

/// The rate of SMs that store to host memory: `threads` threads, `bytes` each time. The lesser of
/// the wire with TLPs of `store_tlp`, and `threads * bytes / store_interval`.
///
/// # Errors
/// Parameters that [`Parameters::check`] refuses.
pub fn sm_store(link: &Link, p: &Parameters, threads: u32, bytes: u32) -> Result<Rate> {
    bounded(link.write_rate(p.store_tlp)?, f64::from(threads) * f64::from(bytes) / p.store_interval_ns)
}

/// The rate of SMs that load from host memory with `bytes` in flight for each of `threads`: `in
/// flight / round trip`, under load.
///
/// # Errors
/// A link that [`Link::check`] refuses.
pub fn sm_load(link: &Link, p: &Parameters, threads: u32, bytes: u32) -> Result<Rate> {
    link.check()?;
    bounded(link.read_rate(), f64::from(threads) * f64::from(bytes) / p.load_interval_ns)
}

/// The rate of blocks that store buffers of `bytes` in bulk (TMA), one buffer at a time each.
///
/// # Errors
/// Parameters that [`Parameters::check`] refuses.
pub fn bulk_store(link: &Link, p: &Parameters, blocks: u32, bytes: u32) -> Result<Rate> {
    bounded(link.write_rate(link.mps)?, f64::from(blocks) * f64::from(bytes) / p.bulk_interval_ns)
}

fn bounded(link: f64, issue: f64) -> Result<Rate> {
    Ok(if issue < link {
        Rate { gbs: issue, limit: Limit::Issue }
    } else {
        Rate { gbs: link, limit: Limit::Link }
    })
}

/// The time of one copy by the copy engine, from launch to end, in ns: `launch + bytes /
/// bandwidth`.
pub fn copy(p: &Parameters, bytes: u64) -> f64 {
    p.copy_launch_ns + bytes as f64 / p.copy_gbs
}

/// The CPU time of a CPU's write-combined stores into a BAR, in ns: the first line's, plus the wire
/// in TLPs of 64 bytes.
///
/// # Errors
/// A link that [`Link::write_rate`] refuses.
pub fn cpu_store(link: &Link, p: &Parameters, bytes: u64) -> Result<f64> {
    Ok(p.cpu_store_ns + bytes as f64 / link.write_rate(64)?)
}

/// The time from a GPU's store of a flag until the flag lies in host memory, in ns.
pub fn gpu_flag(hops: &[Hop], p: &Parameters) -> f64 {
    p.sm_ns / 2.0 + one_way(hops, p)
}

/// The average time that a GPU that polls host memory takes to see a flag there, in ns: half a
/// round trip until its next read gets there, and half to come back.
pub fn gpu_poll(hops: &[Hop], p: &Parameters) -> f64 {
    p.sm_ns + round_trip(hops, p)
}

/// The time of a flag to the CPU, the CPU's answer in host memory, and the GPU being ready to send
/// the next flag, in ns.
pub fn flag_round_trip(hops: &[Hop], p: &Parameters) -> f64 {
    gpu_flag(hops, p) + p.cpu_turn_ns + gpu_poll(hops, p) + p.gpu_turn_ns
}

/// The time of a flag's round trip, in ns, if the CPU answers into GPU memory, which the GPU polls.
pub fn flag_round_trip_bar(hops: &[Hop], p: &Parameters) -> f64 {
    gpu_flag(hops, p) + p.cpu_turn_ns + one_way(hops, p) + p.gpu_turn_ns
}

/// The time of a system fence after stores to host memory, in ns: a round trip.
pub fn fence(hops: &[Hop], p: &Parameters) -> f64 {
    p.sm_ns + round_trip(hops, p)
}

/// Fits a line through (bytes, ns) with the least sum of squared *relative* errors; returns the
/// fixed part of a transfer in ns and its bandwidth in GB/s. `None` with fewer than two different
/// sizes, or if more bytes do not take longer.
pub fn fit_line(points: &[(u64, f64)]) -> Option<(f64, f64)> {
    // Weights of 1/t^2 make the error relative.
    let (mut w, mut x, mut y, mut xx, mut xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(bytes, ns) in points.iter().filter(|(_, ns)| ns.is_finite() && *ns > 0.0) {
        let (n, g) = (bytes as f64, 1.0 / (ns * ns));
        w += g;
        x += g * n;
        y += g * ns;
        xx += g * n * n;
        xy += g * n * ns;
    }
    let spread = w * xx - x * x;
    let slope = (w * xy - x * y) / spread;
    (spread > 1e-9 * w * xx && slope > 0.0).then(|| ((y - slope * x) / w, 1.0 / slope))
}

/// The interval between rounds of one thread (or block), if `workers` of them with `bytes` a round
/// reach `gbs`: the inverse of [`sm_store`], [`sm_load`] and [`bulk_store`] below the link's rate.
pub fn fit_interval(workers: u32, bytes: u32, gbs: f64) -> f64 {
    f64::from(workers) * f64::from(bytes) / gbs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let p = Parameters::default();
        let points = [4096u64, 65536, 1 << 20].map(|n| (n, copy(&p, n)));
        let (launch, gbs) = fit_line(&points).unwrap();
        assert!(
            (launch - p.copy_launch_ns).abs() < 0.01 && (gbs - p.copy_gbs).abs() < 0.01,
            "{launch} {gbs}"
        );
        assert_eq!(fit_line(&points[..1]), None);
        assert_eq!(fit_line(&[(8, 5.0), (8, 6.0)]), None);
        assert_eq!(fit_line(&[(8, 5.0), (16, 4.0)]), None);
    }

    #[test]
    fn intervals_are_found_again() {
        let (link, p) = (Link::default(), Parameters::default());
        let slow = sm_store(&link, &p, 256, 16).unwrap();
        assert_eq!(slow.limit, Limit::Issue);
        assert!((fit_interval(256, 16, slow.gbs) - p.store_interval_ns).abs() < 1e-9);
        assert_eq!(sm_store(&link, &p, 8192, 16).unwrap().limit, Limit::Link);
    }
}
