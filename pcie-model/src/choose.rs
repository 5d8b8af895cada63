//! Chooses the way of a message: by a probe's readings, or else by the model, or else the safe way.

use crate::cost::{Way, estimate};
use crate::error::Result;
use crate::findings::{Findings, Transfer, collapses};
use crate::parameters::Parameters;
use crate::route::Route;

/// The two ends of a message.
#[derive(Debug, Clone, Copy)]
pub enum Between<'a> {
    /// From a GPU to another (or the same), by PCI address ("0000:3b:00.0").
    Devices {
        /// The sender's PCI address.
        from: &'a str,
        /// The receiver's PCI address.
        to: &'a str,
    },
    /// From a GPU to a NIC over a known route.
    Nic {
        /// The GPU's PCI address.
        from: &'a str,
        /// The route between the two.
        route: &'a Route,
    },
    /// From a GPU to a NIC whose place is not known.
    Unknown,
}

/// A way, with the reason for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The way.
    pub way: Way,
    /// The predicted time in microseconds; `None` if nothing is known.
    pub us: Option<f64>,
    /// The reason, as a sentence for a user.
    pub reason: String,
}

/// How sure a figure is: a way that is predicted to be faster by less than this fraction does not
/// replace a safer one.
const NOTICEABLE: f64 = 0.02;

/// Chooses the way for a message of `bytes` among those that the caller `can` use.
///
/// Between two devices that a probe has measured, takes the way that took least there (for sizes
/// between two readings by a power law through them). To a NIC, which a probe does not see, takes
/// the way by the model, with the probe's parameters or, without a probe, the given ones; but never
/// a push where the probe saw the writers of this host collapse. If nothing is known, takes bounce
/// through host memory, which works everywhere.
pub fn choose(
    findings: Option<&Findings>,
    parameters: &Parameters,
    between: Between,
    can: &[Way],
    bytes: u64,
) -> Choice {
    let safe = |why: &str| Choice {
        way: Way::Bounce,
        us: None,
        reason: format!("bounce, by way of host memory, which works everywhere: {why}"),
    };
    match between {
        Between::Unknown => safe("nothing is known of the way to the NIC"),
        Between::Devices { from, to } => {
            let Some(findings) = findings else { return safe("no probe has measured these devices") };
            measured(findings, from, to, can, bytes)
                .unwrap_or_else(|| safe("the probe's findings do not have these devices"))
        }
        Between::Nic { from, route } => {
            let probed = findings.is_some_and(|f| f.device(from).is_some());
            let source = match probed {
                true => "the model with the probe's parameters",
                false => "the model, without a probe of this host",
            };
            let collapsed = findings.and_then(|f| collapses(&f.writers));
            let mut times = Vec::new();
            for &way in can {
                match to_nic(findings, parameters, from, route, way, bytes) {
                    Ok(us) => times.extend(us.map(|us| (way, us))),
                    Err(e) => return safe(&format!("the model refuses this route ({e})")),
                }
            }
            let Some(mut choice) = fastest(&times, source, bytes) else {
                return safe("the model knows no way");
            };
            if let Some(w) = collapsed {
                choice.reason.push_str(&format!(
                    "; no push: {} writers at once reached {:.1} GB/s together in the probe",
                    w.n, w.rate
                ));
            }
            choice
        }
    }
}

/// Microseconds of a message from a GPU to a NIC, one way, by the model, with the probe's
/// parameters if there are some. `None` if the message does not arrive that way, or should not take
/// it: a push where the probe saw writers collapse.
///
/// # Errors
/// A route or parameters that are impossible.
pub fn to_nic(
    findings: Option<&Findings>,
    parameters: &Parameters,
    from: &str,
    route: &Route,
    way: Way,
    bytes: u64,
) -> Result<Option<f64>> {
    let mut parameters = findings.map_or_else(|| parameters.clone(), |f| f.parameters(from, parameters));
    // A GPU cuts its stores to the payload size that the route takes.
    parameters.store_tlp = parameters.store_tlp.min(route.link.mps);
    let estimate = estimate(way, route, &parameters, bytes.max(1))?;
    let collapsed = way == Way::Push && findings.is_some_and(|f| collapses(&f.writers).is_some());
    Ok((estimate.time_ns.is_finite() && !collapsed).then_some(estimate.time_ns / 1e3))
}

/// Chooses by a probe's own readings.
fn measured(findings: &Findings, from: &str, to: &str, can: &[Way], bytes: u64) -> Option<Choice> {
    let times: Vec<(Way, f64)> = can
        .iter()
        .filter_map(|way| Some((*way, findings.line(from, to, Transfer::from(*way))?.time(bytes.max(1)))))
        .collect();
    fastest(&times, &format!("measured on {}", findings.date), bytes)
}

/// Picks the fastest way. Ordered from the safest: bounce, push, pull; a later way must be
/// noticeably faster to be taken.
fn fastest(times: &[(Way, f64)], source: &str, bytes: u64) -> Option<Choice> {
    let safety = |way: &Way| match way {
        Way::Bounce => 0,
        Way::Push => 1,
        Way::Pull => 2,
    };
    let least = times.iter().map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
    let (way, us) = times
        .iter()
        .filter(|(_, us)| *us <= least * (1.0 + NOTICEABLE))
        .min_by_key(|(way, _)| safety(way))
        .copied()?;
    let mut others: Vec<String> =
        times.iter().filter(|(w, _)| *w != way).map(|(w, us)| format!("{w} {us:.1} us")).collect();
    if others.is_empty() {
        others.push("nothing else is known".to_owned());
    }
    let reason = format!("{way}, {us:.1} us for {bytes} bytes ({}; {source})", others.join(", "));
    Some(Choice { way, us: Some(us), reason })
}

impl From<Way> for Transfer {
    fn from(way: Way) -> Self {
        match way {
            Way::Push => Transfer::Push,
            Way::Pull => Transfer::Pull,
            Way::Bounce => Transfer::Bounce,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Writers;
    use crate::findings::tests::example;
    use crate::route::Hop;

    const A: &str = "0000:01:00.0";
    const B: &str = "0000:02:00.0";

    #[test]
    fn what_was_measured_decides() {
        let findings = example();
        let parameters = Parameters::default();
        let at = |bytes| {
            choose(Some(&findings), &parameters, Between::Devices { from: A, to: B }, &Way::ALL, bytes)
        };
        // Push takes 4 us + n/49, bounce 12 us + n/53: they cross at 5 MB.
        let (small, large) = (at(4096), at(64 << 20));
        assert_eq!((small.way, large.way), (Way::Push, Way::Bounce));
        assert!(
            small.reason.contains("2026-01-31") && small.reason.contains("bounce 12."),
            "{}",
            small.reason
        );
        let only = |can: &[Way]| {
            choose(Some(&findings), &parameters, Between::Devices { from: A, to: B }, can, 64).way
        };
        assert_eq!(
            (only(&[Way::Bounce]), only(&[Way::Push, Way::Pull]), only(&[])),
            (Way::Bounce, Way::Push, Way::Bounce)
        );
        for bytes in [0, 1, 64, 100_000, 1 << 20, 3 << 20, 1 << 32] {
            let choice = at(bytes);
            for way in [Way::Push, Way::Bounce] {
                let other = findings.line(A, B, way.into()).unwrap().time(bytes.max(1));
                assert!(choice.us.unwrap() <= other * 1.02, "{bytes}: {}", choice.reason);
            }
        }
    }

    #[test]
    fn the_unknown_is_safe_and_says_so() {
        let findings = example();
        let parameters = Parameters::default();
        for (findings, between, word) in [
            (None, Between::Devices { from: A, to: B }, "no probe"),
            (Some(&findings), Between::Devices { from: B, to: A }, "do not have"),
            (Some(&findings), Between::Unknown, "nothing is known"),
        ] {
            let choice = choose(findings, &parameters, between, &Way::ALL, 4096);
            assert_eq!((choice.way, choice.us), (Way::Bounce, None));
            assert!(choice.reason.contains(word), "{}", choice.reason);
        }
        let wrong = Route { sharers: 9999, ..Route::default() };
        let choice = choose(None, &parameters, Between::Nic { from: A, route: &wrong }, &Way::ALL, 64);
        assert!(choice.way == Way::Bounce && choice.reason.contains("sharers"), "{}", choice.reason);
    }

    #[test]
    fn a_nic_is_for_the_model() {
        let mut findings = example();
        let parameters = Parameters::default();
        let route = Route { hops: vec![Hop::RootComplex, Hop::Socket, Hop::RootComplex], ..Route::default() };
        let to = Between::Nic { from: A, route: &route };
        let at =
            |findings: Option<&Findings>, p: &Parameters, bytes| choose(findings, p, to, &Way::ALL, bytes);
        assert!(at(None, &parameters, 1 << 20).reason.contains("without a probe"));
        let with = at(Some(&findings), &parameters, 1 << 20);
        assert!(with.reason.contains("the probe's parameters"), "{}", with.reason);
        // Where reads between peers fail, pull is not chosen.
        let deaf = Parameters { root_read_gbs: Some(0.0), ..parameters.clone() };
        for bytes in [8, 4096, 1 << 20, 1 << 26] {
            assert_ne!(at(None, &deaf, bytes).way, Way::Pull);
            let least = Way::ALL
                .into_iter()
                .map(|way| estimate(way, &route, &parameters, bytes).unwrap().time_ns / 1e3)
                .fold(f64::INFINITY, f64::min);
            assert!(at(None, &parameters, bytes).us.unwrap() <= least * 1.021);
        }
        findings.writers = vec![Writers { n: 1, rate: 37.0 }, Writers { n: 2, rate: 2.7 }];
        for bytes in [8, 4096, 1 << 26] {
            let choice = at(Some(&findings), &deaf, bytes);
            assert!(choice.way == Way::Bounce && choice.reason.contains("2 writers"), "{}", choice.reason);
        }
    }
}
