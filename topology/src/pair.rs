//! A GPU and a device that it may send through, with everything that an advice needs. Plain data.

use serde::Serialize;

use crate::address::Address;
use crate::config::{Express, Read};
use crate::distance::{Distance, Hop, Path, link_above};
use crate::host_link::HostLink;
use crate::link::LinkState;
use crate::machine::CpuKind;
use crate::tree::{Function, Gpu, Role, Topology};

/// The kind of device at the other end of a pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Far {
    /// An RDMA NIC.
    Nic,
    /// A software RDMA device: the CPU does its work, from host memory.
    SoftwareNic,
    /// A function of the shim driver, whose BAR is a window.
    Shim,
}

/// A GPU and a NIC or a shim function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// The GPU.
    pub gpu: Address,
    /// The kind of device at the other end.
    pub far: Far,
    /// The name of that device: `mlx5_0`, `pushgate0`.
    pub name: String,
    /// The PCI function of that device; a software device may have none.
    pub to: Option<Address>,
    /// The way between the two; `None` without a PCI function.
    pub path: Option<Path>,
    /// What kind of machine the processor was made for.
    pub cpu: CpuKind,
    /// What joins the GPU and the host's memory.
    pub host_link: HostLink,
    /// The GPU's driver.
    pub gpu_driver: Option<String>,
    /// Other GPUs that share a switch's upstream link with this one on the way. Empty if the way
    /// uses no such link.
    pub uplink_shared_with: Vec<Address>,
    /// Whether the IOMMU translates the GPU's or the NIC's addresses, if known.
    pub iommu_translates: Option<bool>,
    /// The numbers that a cost model needs.
    pub parameters: Parameters,
}

impl Pair {
    /// The distance between the two.
    pub fn distance(&self) -> Distance {
        self.path.as_ref().map_or(Distance::Unknown, |p| p.distance)
    }
}

/// A way in numbers, for a cost model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Parameters {
    /// The narrowest link.
    pub link: Option<LinkState>,
    /// How many switches are passed; a switch passed twice counts twice.
    pub switches: u32,
    /// How many root complexes are passed.
    pub root_complexes: u32,
    /// How many links between sockets are passed.
    pub sockets: u32,
    /// The largest payload that can go the whole way, in bytes: the least MPS of all functions on
    /// it.
    pub max_payload: Option<u32>,
    /// The largest read of the far end, in bytes (MRRS).
    pub max_read_request: Option<u32>,
    /// The read completion boundary of the far end, in bytes.
    pub read_completion_boundary: Option<u32>,
    /// How many reads the far end's tags allow under way.
    pub tags: Option<u32>,
    /// Whether the GPU may mark its packets relaxed-ordered.
    pub gpu_relaxed_ordering: Option<bool>,
}

impl Parameters {
    /// The numbers of a way from a GPU to a far end.
    pub fn of(topology: &Topology, path: &Path) -> Self {
        let count = |what: fn(&Hop) -> bool| path.hops.iter().filter(|h| what(h)).count() as u32;
        let express = |at: Address| -> Option<&Express> { topology.function(at)?.config.express.get() };
        let far = express(path.to);
        Self {
            link: path.narrowest.map(|l| l.state),
            switches: count(|h| matches!(h, Hop::Switch(_))),
            root_complexes: count(|h| matches!(h, Hop::RootComplex(_))),
            sockets: count(|h| matches!(h, Hop::Sockets(..))),
            max_payload: path.through.iter().filter_map(|at| Some(express(*at)?.max_payload)).min(),
            max_read_request: far.map(|e| e.max_read_request),
            read_completion_boundary: far.map(|e| e.read_completion_boundary),
            tags: far.map(Express::tags),
            gpu_relaxed_ordering: express(path.from).map(|e| e.relaxed_ordering),
        }
    }
}

impl Topology {
    /// Pairs every GPU with every NIC and every shim function.
    pub fn pairs(&self) -> Vec<Pair> {
        let nics = self.nics.iter().map(|n| {
            let far = if n.software { Far::SoftwareNic } else { Far::Nic };
            (far, n.name.clone(), n.address)
        });
        let shims = self
            .shims
            .iter()
            .map(|s| (Far::Shim, s.name.clone().unwrap_or_else(|| s.address.to_string()), Some(s.address)));
        let far: Vec<_> = nics.chain(shims).collect();
        let of = |gpu: &Gpu| {
            far.iter()
                .map(|(far, name, to)| self.pair(gpu, far.clone(), name.clone(), *to))
                .collect::<Vec<_>>()
        };
        self.gpus.iter().flat_map(of).collect()
    }

    fn pair(&self, gpu: &Gpu, far: Far, name: String, to: Option<Address>) -> Pair {
        let path = to.and_then(|to| self.path(gpu.address, to));
        let translates = |at: Address| self.function(at)?.iommu.as_ref()?.translates();
        let both = [translates(gpu.address), to.and_then(translates)];
        Pair {
            gpu: gpu.address,
            far,
            name,
            to,
            cpu: self.machine.cpu,
            host_link: self.host_link(gpu.address),
            gpu_driver: self.function(gpu.address).and_then(|f| f.driver.clone()),
            uplink_shared_with: path.as_ref().map_or(Vec::new(), |p| self.uplink_shared_with(gpu.address, p)),
            iommu_translates: match both {
                [Some(a), Some(b)] => Some(a || b),
                [a, b] => a.or(b),
            },
            parameters: path.as_ref().map_or_else(Parameters::default, |p| Parameters::of(self, p)),
            path,
        }
    }

    /// The GPUs behind the outermost switch above `gpu`, if the way leaves that switch by its
    /// upstream link.
    fn uplink_shared_with(&self, gpu: Address, path: &Path) -> Vec<Address> {
        let leaves = path.hops.iter().any(|h| matches!(h, Hop::RootComplex(_)));
        let (chain, _) = self.above(gpu);
        let Some(outermost) = chain.iter().rfind(|f| f.role == Role::Switch).filter(|_| leaves) else {
            return Vec::new();
        };
        let behind = |g: &&Gpu| {
            g.address != gpu && self.above(g.address).0.iter().any(|f| f.address == outermost.address)
        };
        self.gpus.iter().filter(behind).map(|g| g.address).collect()
    }

    /// What looks wrong with the links and settings of GPUs, NICs and shim functions, one sentence
    /// each.
    pub fn findings(&self) -> Vec<String> {
        let mut found = Vec::new();
        for f in self.functions.values().filter(|f| self.matters(f.address)) {
            // A GPU that reaches the host otherwise may have few lanes of PCIe, or none.
            let by_pcie = self.host_link(f.address) == HostLink::Pcie;
            if let (Some(now), Some(best), true) = (f.link.now, f.link.best, by_pcie) {
                if now.width < best.width {
                    found.push(format!(
                        "{}: its link has {} lanes of {}: see the slot",
                        f.address, now.width, best.width
                    ));
                }
                if now.gts < best.gts && !f.is_gpu() {
                    let port = link_above(self, f).map_or(now.gts, |l| l.gts);
                    found.push(format!(
                        "{}: its link runs at {port} of {} GT/s: see the slot",
                        f.address, best.gts
                    ));
                }
            }
            if let Read::Is(e) = &f.config.express {
                // All functions above must accept the packets too. Not with pcie_bus_perf, which
                // sets each function by its own bus only; a packet larger than its receiver accepts
                // is malformed (Linux, kernel-parameters.txt).
                let supported = |f: &&Function| f.config.express.get().map(|e| e.max_payload_supported);
                let could = self.above(f.address).0.iter().filter_map(supported).min().unwrap_or(0);
                if e.max_payload < 256 && could >= 256 {
                    found.push(format!(
                        "{}: it sends {} bytes a packet and could send {could}: see the firmware's MPS, or boot with pci=pcie_bus_safe",
                        f.address, e.max_payload
                    ));
                }
                if self.nics.iter().any(|n| n.address == Some(f.address)) && e.max_read_request < 512 {
                    found.push(format!(
                        "{}: it asks for {} bytes a read; 512 or more keep the bus busier",
                        f.address, e.max_read_request
                    ));
                }
            }
        }
        found.extend(self.too_large());
        found
    }

    /// GPUs that send larger packets than something behind the same switch accepts: their stores
    /// are malformed packets there.
    fn too_large(&self) -> Vec<String> {
        let mut found = Vec::new();
        for pair in self.pairs().iter().filter(|p| p.far != Far::SoftwareNic) {
            let Some(path) = &pair.path else { continue };
            // A root complex may cut packets; a switch does not.
            if path.distance != Distance::SameSwitch {
                continue;
            }
            let payload = |at: Address| Some(self.function(at)?.config.express.get()?.max_payload);
            let (Some(sends), Some(least)) = (payload(pair.gpu), pair.parameters.max_payload) else {
                continue;
            };
            if sends > least {
                found.push(format!(
                    "{}: it sends {sends} bytes a packet, and on the way to {} {least} are taken: boot with pci=pcie_bus_safe",
                    pair.gpu, pair.name
                ));
            }
        }
        found
    }
}
