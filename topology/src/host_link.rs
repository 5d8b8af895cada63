//! What joins a GPU and the host's memory: PCIe, NVLink-C2C, or one memory for both.

use serde::Serialize;

use crate::address::Address;
use crate::tree::{NVIDIA, NvLinkEnd, Topology};

/// What a GPU's stores and copy engines take to the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HostLink {
    /// The GPU's PCIe link.
    #[default]
    Pcie,
    /// NVLink to the processor: NVLink-C2C on Grace hosts. The GPU has memory of its own.
    #[serde(rename = "nvlink")]
    NvLink,
    /// No link: GPU and processor have one memory, as in GB10 (DGX Spark).
    Unified,
}

/// GPUs with NVLink-C2C to a Grace processor: GH200 with 96 and 144 GB, GB200, GB300 (the PCI ID list). Without NVML, as in most
/// containers and for a copy of sysfs, only the number tells.
const C2C: [u16; 5] = [0x2342, 0x2348, 0x2941, 0x31c2, 0x31c3];

/// GB10.
const UNIFIED: [u16; 1] = [0x2e12];

impl Topology {
    /// What joins a GPU and the host's memory.
    pub fn host_link(&self, gpu: Address) -> HostLink {
        let function = self.function(gpu).filter(|f| f.vendor == Some(NVIDIA));
        let number = function.and_then(|f| f.device);
        let links = self.gpus.iter().filter(|g| g.address == gpu).flat_map(|g| &g.nvlinks);
        match number {
            Some(number) if UNIFIED.contains(&number) => HostLink::Unified,
            Some(number) if C2C.contains(&number) => HostLink::NvLink,
            _ if links.into_iter().any(|l| l.to == NvLinkEnd::Cpu && l.links > 0) => HostLink::NvLink,
            _ => HostLink::Pcie,
        }
    }
}
