//! Advises a path for a pair, with the reason. Pure functions.

use std::fmt;

use serde::Serialize;

use crate::distance::{AcsOnWay, Distance};
use crate::host_link::HostLink;
use crate::machine::CpuKind;
use crate::pair::{Far, Pair};

/// How a message gets from a GPU into a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The GPU stores the message into the window, and the NIC reads it nearby.
    Push,
    /// The NIC reads the GPU's memory: plain GPUDirect RDMA.
    Pull,
    /// The GPU's copy engine copies the message to host memory, and the NIC reads it there.
    Bounce,
    /// There is no NIC: the message stays on this host.
    Local,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Push => "push",
            Self::Pull => "pull",
            Self::Bounce => "bounce",
            Self::Local => "local",
        })
    }
}

/// What an advice is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The distance between the two.
    Distance,
    /// Figures of a cost model.
    Model,
    /// Figures measured on this host.
    Probe,
}

/// An advice for a pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The method that is advised.
    pub method: Method,
    /// The reason, as a sentence.
    pub reason: String,
    /// What may spoil the advice, one sentence each.
    pub warnings: Vec<String>,
    /// What the advice is based on.
    pub basis: Basis,
}

/// A source of predicted times: a cost model, or measurements.
pub trait Costs {
    /// Seconds that one message of `bytes` takes from the GPU into the NIC by `method`; `None` if
    /// that is unknown, or if the method does not work there.
    fn seconds(&self, pair: &Pair, method: Method, bytes: u64) -> Option<f64>;
}

/// The evidence for an advice.
#[derive(Clone, Copy)]
pub enum Evidence<'a> {
    /// Distances and settings only.
    ByDistance,
    /// A cost model.
    Model {
        /// The model.
        costs: &'a dyn Costs,
        /// The size of the message to advise for, in bytes.
        bytes: u64,
    },
    /// A probe's measurements on this host.
    Probe {
        /// The measurements.
        costs: &'a dyn Costs,
        /// The size of the message to advise for, in bytes.
        bytes: u64,
    },
}

/// The advice for a host without a NIC and without a shim function.
pub fn without_nic() -> Advice {
    let reason = "this host has no RDMA NIC: messages to ranks of this host are local, those to other hosts go over tcp".to_owned();
    Advice { method: Method::Local, reason, warnings: Vec::new(), basis: Basis::Distance }
}

/// Advises a path for a pair.
///
/// Figures take precedence over distances: of the methods for which `evidence` has seconds, the
/// quickest one is advised. Where there are no figures, or they differ by less than such figures
/// can tell apart, the distance decides.
///
/// A pull through a root complex is never advised by figures: no formula knows whether and how fast
/// a processor carries one device's reads of another, and a probe has no NIC with which to try.
pub fn advise(pair: &Pair, evidence: Evidence<'_>) -> Advice {
    let (costs, bytes, basis, verb) = match evidence {
        Evidence::ByDistance => return by_distance(pair),
        Evidence::Model { costs, bytes } => (costs, bytes, Basis::Model, "the model expects"),
        Evidence::Probe { costs, bytes } => {
            (costs, bytes, Basis::Probe, "from a probe of this host the model predicts")
        }
    };
    let mut known: Vec<(Method, f64)> = [Method::Push, Method::Pull, Method::Bounce]
        .into_iter()
        .filter_map(|m| Some((m, costs.seconds(pair, m, bytes)?)))
        .filter(|(_, s)| s.is_finite() && *s >= 0.0)
        .collect();
    let reads = reads_stay_below(pair);
    let left_out = known.iter().any(|(m, _)| *m == Method::Pull) && !reads;
    known.retain(|(m, _)| *m != Method::Pull || reads);
    known.sort_by(|a, b| a.1.total_cmp(&b.1));
    let Some((quickest, least)) = known.first().copied() else { return by_distance(pair) };
    let usual = judge(pair).0;
    let as_quick = known.iter().any(|(m, s)| *m == usual && *s <= least * (1.0 + NOTICEABLE));
    let method = if as_quick { usual } else { quickest };
    let figures: Vec<String> = known.iter().map(|(m, s)| format!("{m} {:.2} us", s * 1e6)).collect();
    let mut reason = format!("{verb} {} for {bytes} bytes", figures.join(", "));
    if left_out {
        reason.push_str(&format!("; no pull: {}", judge(pair).1));
    }
    Advice { method, reason, warnings: warnings(pair, method), basis }
}

/// The model is within this fraction of what was measured elsewhere (docs/pcie-model.md), so a
/// smaller gain does not count.
const NOTICEABLE: f64 = 0.1;

fn by_distance(pair: &Pair) -> Advice {
    let (method, reason) = judge(pair);
    Advice { method, reason: reason.into(), warnings: warnings(pair, method), basis: Basis::Distance }
}

/// Whether the NIC's reads of the GPU reach no root complex, as far as is known.
fn reads_stay_below(pair: &Pair) -> bool {
    judge(pair).0 == Method::Pull
}

fn judge(pair: &Pair) -> (Method, &'static str) {
    let redirects = pair.path.as_ref().and_then(|p| p.acs.redirects());
    match pair.far {
        Far::SoftwareNic => {
            return (
                Method::Push,
                "a software NIC reads host memory with the CPU, so the GPU stores the payload there",
            );
        }
        Far::Shim => {
            return (
                Method::Push,
                "its BAR is a window, which takes the GPU's stores; it never reads GPU memory",
            );
        }
        Far::Nic => {}
    }
    // No figure is needed: nothing else works.
    if pair.host_link == HostLink::Unified {
        return (
            Method::Push,
            "GPU and processor have one memory, and no NIC can read what cudaMalloc returns: GPUDirect RDMA, dma-buf and GDRCopy do not work there; the window is host memory registered with CUDA, which both read",
        );
    }
    match pair.distance() {
        Distance::SameDevice => {
            (Method::Pull, "GPU and NIC are one device, so the NIC's reads stay inside it")
        }
        Distance::SameSwitch if redirects == Some(true) => (
            Method::Push,
            "one switch is above both, but ACS redirects packets to the root complex, where reads of a peer device are slow or fail; stores pass",
        ),
        Distance::SameSwitch => (
            Method::Pull,
            "one switch is above both, so the NIC's reads stay below it: plain GPUDirect RDMA is fine",
        ),
        _ if pair.host_link == HostLink::NvLink => (
            Method::Push,
            "the GPU's stores and copy engines reach host memory over NVLink-C2C, not over PCIe, and the NIC reads host memory",
        ),
        Distance::SameRootComplex | Distance::SameSocket | Distance::AcrossSockets
            if pair.cpu == CpuKind::Client =>
        {
            (
                Method::Push,
                "the path goes through a client processor, which forwards writes between devices but not reads",
            )
        }
        Distance::SameRootComplex => (
            Method::Push,
            "the path goes through the root complex, where reads are split into small ones and limited by tags; stores are posted",
        ),
        Distance::SameSocket => (
            Method::Push,
            "the devices are under different root complexes: each read by the NIC takes a round trip; stores go one way",
        ),
        Distance::AcrossSockets => (
            Method::Push,
            "the devices are at different sockets, where reads of a peer device are slowest or do not work; stores go one way",
        ),
        Distance::Virtual => (
            Method::Push,
            "this virtual machine does not show where the devices are; stores work on every platform, reads do not",
        ),
        Distance::Unknown => (
            Method::Push,
            "the distance between the devices is not known; stores work on every platform, reads do not",
        ),
    }
}

fn warnings(pair: &Pair, method: Method) -> Vec<String> {
    let mut said = Vec::new();
    // The bytes of a software NIC never travel from device to device.
    let acs = pair.path.as_ref().filter(|_| pair.far != Far::SoftwareNic).map(|p| &p.acs);
    let then = if pair.far == Far::Shim { "stores take the short path" } else { "pull takes the short path" };
    match acs {
        Some(AcsOnWay::Redirects(ports)) => {
            let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
            said.push(format!(
                "ACS redirects packets at {}: if no device is passed through to a virtual machine, switch ACS off there (setpci, or the firmware), and {then}",
                ports.join(", ")
            ));
        }
        Some(AcsOnWay::InferredRedirects) => said.push(
            "the devices' IOMMU groups differ, so ACS probably redirects packets: run as root to see the ports' settings"
                .into(),
        ),
        Some(AcsOnWay::Unknown) if method == Method::Pull => {
            said.push("the ACS settings are not known (root can read them, or a topology file can name them); if ACS redirects packets, push is the better path".into());
        }
        _ => {}
    }
    // A push into host memory passes the IOMMU anyway.
    if pair.iommu_translates == Some(true) && (method == Method::Pull || pair.far == Far::Shim) {
        said.push("the IOMMU translates addresses, so packets between devices go through it: boot with iommu=pt if your policy allows that".into());
    }
    if method == Method::Push && !pair.uplink_shared_with.is_empty() {
        let others: Vec<String> = pair.uplink_shared_with.iter().map(ToString::to_string).collect();
        said.push(format!(
            "{} shares the switch's uplink: on some switches the rate collapses when several GPUs store across the uplink at once (2.7 GB/s in all was seen, reads unaffected); measure with all GPUs at once",
            others.join(", ")
        ));
    }
    match pair.gpu_driver.as_deref() {
        None | Some("nvidia") => {}
        Some(other) => {
            said.push(format!("the GPU is bound to the driver {other}, so CUDA can't use it here"))
        }
    }
    said
}
