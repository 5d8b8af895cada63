//! The plots of a report. How they are drawn is `pushgate_pcie_model::plot`'s.

use pushgate_pcie_model::findings::{Device, Line, Pair};
use pushgate_pcie_model::plot::{Axis, Plot, Scale, Series};
use pushgate_pcie_model::{Link, Parameters, Result, Route, Way, estimate};

/// Sizes of messages, 2 to the power of these.
const SIZES: std::ops::RangeInclusive<u32> = 3..=26;

fn microseconds() -> Axis {
    Axis::new("microseconds", Scale::Log10)
}

fn rate() -> Axis {
    Axis::new("GB/s (10^9 bytes a second)", Scale::Linear)
}

fn sizes() -> Axis {
    Axis::new("size of the message", Scale::Bytes)
}

/// A line across, from the smallest to the largest of these sizes.
fn ceiling(name: &str, gbs: f64, from: u64, to: u64) -> Series {
    Series::beside(&format!("{name}: {gbs:.1} GB/s"), Vec::new(), vec![(from as f64, gbs), (to as f64, gbs)])
}

/// Push, pull and bounce by size over a route, by the model: times, and rates below the link's ceiling.
pub fn by_size(who: &str, route: &Route, p: &Parameters) -> Result<[Plot; 2]> {
    let (mut times, mut rates) = (Vec::new(), Vec::new());
    for way in Way::ALL {
        let all =
            SIZES.map(|e| Ok((1u64 << e, estimate(way, route, p, 1 << e)?))).collect::<Result<Vec<_>>>()?;
        let line = |of: fn(&pushgate_pcie_model::Estimate) -> f64| {
            all.iter().map(|(n, e)| (*n as f64, of(e))).collect::<Vec<_>>()
        };
        times.push(Series::new(&way.to_string(), line(|e| e.time_ns / 1e3)));
        rates.push(Series::new(&way.to_string(), line(|e| e.bandwidth)));
    }
    rates.push(ceiling(
        "ceiling of the narrowest link",
        route.link.ceiling(),
        1 << SIZES.start(),
        1 << SIZES.end(),
    ));
    let plot =
        |what: &str, y, series| Plot { title: format!("{who}: {what}, by the model"), x: sizes(), y, series };
    Ok([plot("time of a message", microseconds(), times), plot("rate of one message alone", rate(), rates)])
}

/// Lines as they were measured, over the curves that were fitted to them: times, and rates below ceilings.
fn measured(who: &str, lines: &[Line], ceilings: &[(&str, f64)]) -> [Plot; 2] {
    let span = || lines.iter().flat_map(|l| &l.points).map(|p| p.0);
    let (from, to) = (span().min().unwrap_or(1), span().max().unwrap_or(1));
    let series = |of: fn(u64, f64) -> f64| {
        lines.iter().map(move |line| {
            // Twice as many as powers of two: a curve has steps.
            let (low, high) = ((from as f64).log2(), (to as f64).log2());
            let count = (2.0 * (high - low)).ceil().clamp(1.0, 60.0);
            let at = |i: u32| 2f64.powf(low + (high - low) * f64::from(i) / count).round() as u64;
            let along = (0..=count as u32).map(at).map(|n| (n as f64, of(n, line.curve.time(n))));
            let points = line.points.iter().map(|(n, us)| (*n as f64, of(*n, *us)));
            Series::beside(&line.way.to_string(), points.collect(), along.collect())
        })
    };
    let mut rates: Vec<Series> = series(|n, us| n as f64 / us / 1e3).collect();
    rates.extend(ceilings.iter().map(|(name, gbs)| ceiling(name, *gbs, from, to)));
    let plot = |what: &str, y, series| Plot {
        title: format!("{who}: {what}; points measured, lines fitted"),
        x: sizes(),
        y,
        series,
    };
    [plot("time", microseconds(), series(|_, us| us).collect()), plot("rate", rate(), rates)]
}

/// The plots of one device by itself.
pub fn device(who: &str, device: &Device, link: Option<&Link>) -> [Plot; 2] {
    let ceilings = link.map(|l| ("ceiling of its link", l.ceiling()));
    measured(who, &device.lines, ceilings.as_slice())
}

/// The plots of messages between two devices.
pub fn pair(who: &str, pair: &Pair) -> [Plot; 2] {
    measured(who, &pair.lines, &[])
}
