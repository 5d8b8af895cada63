//! The report that `pushgate topo --json` prints, as one value. Field names are stable within a
//! version: docs/topology.md.

use serde::Serialize;

use crate::address::Address;
use crate::advise::{Advice, Evidence, advise, without_nic};
use crate::distance::{Distance, Path};
use crate::pair::Pair;
use crate::tree::{Gpu, NvLinkEnd, Topology};

/// A topology with its judgement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The version, 1. It grows when a field is removed or changes its meaning, not when one is
    /// added.
    pub version: u32,
    /// The topology that was read.
    pub topology: Topology,
    /// Every GPU with every NIC and shim function.
    pub gpu_nic: Vec<GpuNic>,
    /// Every pair of GPUs, once.
    pub gpu_gpu: Vec<GpuGpu>,
    /// The advice if there is no device to pair GPUs with.
    pub without_nic: Option<Advice>,
    /// What looks wrong with links and settings, one sentence each.
    pub findings: Vec<String>,
    /// Whether configuration spaces were cut short: run as root for MPS, MRRS, tags and ACS.
    pub needs_root: bool,
}

/// A GPU and a NIC or shim function, with the advice for them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuNic {
    /// The GPU's label: `gpu0`.
    pub gpu_label: String,
    /// The distance between the two.
    pub distance: Distance,
    /// The pair.
    #[serde(flatten)]
    pub pair: Pair,
    /// The advice.
    pub advice: Advice,
}

/// Two GPUs, with what joins them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuGpu {
    /// One GPU.
    pub from: Address,
    /// The other GPU.
    pub to: Address,
    /// The distance between the two.
    pub distance: Distance,
    /// The way over PCIe.
    pub path: Option<Path>,
    /// NVLinks between them, directly or through a switch.
    pub nvlinks: u32,
    /// Whether kernels of each GPU can use the other's memory; `None` if no driver was asked.
    pub peer_access: Option<bool>,
}

impl Topology {
    /// The label of a GPU: `gpu` and NVML's index, or its place by address if the index is not
    /// known.
    pub fn gpu_label(&self, at: Address) -> String {
        let place = self.gpus.iter().position(|g| g.address == at);
        match place.map(|p| (p, self.gpus[p].index)) {
            Some((_, Some(index))) => format!("gpu{index}"),
            Some((place, None)) => format!("gpu{place}"),
            None => at.to_string(),
        }
    }

    /// NVLinks between two GPUs, directly or through a switch.
    pub fn nvlinks(&self, a: Address, b: Address) -> u32 {
        let gpu = |at| self.gpus.iter().find(|g| g.address == at);
        let (Some(a), Some(b)) = (gpu(a), gpu(b)) else { return 0 };
        let to = |g: &Gpu, end| -> u32 {
            g.nvlinks.iter().filter(|l| l.to == end).fold(0, |n: u32, l| n.saturating_add(l.links))
        };
        let direct = to(a, NvLinkEnd::Gpu(b.address)).max(to(b, NvLinkEnd::Gpu(a.address)));
        direct.max(to(a, NvLinkEnd::Switch).min(to(b, NvLinkEnd::Switch)))
    }

    /// Whether kernels of each GPU can use the other's memory; `None` if no driver was asked.
    pub fn peer_access(&self, a: Address, b: Address) -> Option<bool> {
        let one = |a, b| {
            let gpu = self.gpus.iter().find(|g| g.address == a)?;
            Some(gpu.peers.iter().find(|p| p.to == b)?.access)
        };
        match (one(a, b), one(b, a)) {
            (Some(x), Some(y)) => Some(x && y),
            (x, y) => x.or(y),
        }
    }

    /// Judges the topology.
    pub fn report(&self, evidence: Evidence<'_>) -> Report {
        let gpu_nic: Vec<GpuNic> = self
            .pairs()
            .into_iter()
            .map(|pair| GpuNic {
                gpu_label: self.gpu_label(pair.gpu),
                distance: pair.distance(),
                advice: advise(&pair, evidence),
                pair,
            })
            .collect();
        let mut gpu_gpu = Vec::new();
        for (i, a) in self.gpus.iter().enumerate() {
            for b in &self.gpus[i + 1..] {
                let path = self.path(a.address, b.address);
                gpu_gpu.push(GpuGpu {
                    from: a.address,
                    to: b.address,
                    distance: path.as_ref().map_or(Distance::Unknown, |p| p.distance),
                    path,
                    nvlinks: self.nvlinks(a.address, b.address),
                    peer_access: self.peer_access(a.address, b.address),
                });
            }
        }
        Report {
            version: 1,
            without_nic: (self.nics.is_empty() && self.shims.is_empty()).then(without_nic),
            findings: self.findings(),
            needs_root: self.needs_root(),
            gpu_nic,
            gpu_gpu,
            topology: self.clone(),
        }
    }
}
