//! The data of a topology: plain, public, the same from sysfs and from a file.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::address::Address;
use crate::config::{Config, PortType, Read};
use crate::link::Link;
use crate::machine::Machine;

/// Where GPUs, NICs and windows sit on a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Topology {
    /// Where the tree was read.
    pub source: Source,
    /// The host around it.
    pub machine: Machine,
    /// Root complexes, by name.
    pub root_complexes: Vec<RootComplex>,
    /// Every PCI function, by address. A function's parent is in here or a root complex.
    pub functions: BTreeMap<Address, Function>,
    /// GPUs, by address.
    pub gpus: Vec<Gpu>,
    /// RDMA NICs, by name.
    pub nics: Vec<Nic>,
    /// Functions of the shim driver, by address: their BAR is a window.
    pub shims: Vec<Shim>,
    /// What could not be read or understood, a sentence each.
    pub notes: Vec<String>,
}

/// Where a tree comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The kernel's view.
    #[default]
    Sysfs,
    /// A file that says how the machine is built.
    File,
}

/// A root complex: a host bridge with the buses below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RootComplex {
    /// As sysfs names it: `pci0000:15`.
    pub name: String,
    /// Its NUMA node, if known.
    pub numa: Option<u32>,
}

/// What a function is in the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A port of the root complex.
    RootPort,
    /// A switch, at its upstream port. In a file it stands for the whole switch.
    Switch,
    /// A switch's port away from the root complex.
    DownstreamPort,
    /// A bridge to a conventional bus.
    Bridge,
    /// Everything else.
    #[default]
    Endpoint,
}

/// What stands above a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parent {
    /// It lies on a root bus.
    RootComplex(String),
    /// It lies behind this function.
    Function(Address),
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// What is above it.
    pub parent: Parent,
    /// What it is.
    pub role: Role,
    /// Class code, 24 bits.
    pub class: Option<u32>,
    /// Vendor.
    pub vendor: Option<u16>,
    /// Device.
    pub device: Option<u16>,
    /// Vendor of the subsystem.
    pub subsystem_vendor: Option<u16>,
    /// The kernel driver bound to it.
    pub driver: Option<String>,
    /// NUMA node, if the kernel knows it.
    pub numa: Option<u32>,
    /// Its link.
    pub link: Link,
    /// Its configuration space.
    pub config: Config,
    /// Its IOMMU group.
    pub iommu: Option<Iommu>,
}

impl Function {
    /// One of which nothing is known but its place.
    pub fn new(address: Address, parent: Parent) -> Self {
        Self {
            address,
            parent,
            role: Role::Endpoint,
            class: None,
            vendor: None,
            device: None,
            subsystem_vendor: None,
            driver: None,
            numa: None,
            link: Link::default(),
            config: Config::default(),
            iommu: None,
        }
    }

    /// Whether it is a GPU of NVIDIA: class 0300 (VGA) or 0302 (3D controller).
    pub fn is_gpu(&self) -> bool {
        self.vendor == Some(NVIDIA) && matches!(self.class.map(|c| c >> 8), Some(0x0300 | 0x0302))
    }

    /// What the class says in a word or two.
    pub fn class_name(&self) -> &'static str {
        let Some(class) = self.class else { return "function" };
        match (class >> 8) as u16 {
            0x0600 => "host bridge",
            0x0604 => "PCI bridge",
            0x0680 if self.vendor == Some(NVIDIA) => "NVSwitch",
            0x0108 => "NVMe",
            0x0200 => "Ethernet",
            0x0207 => "InfiniBand",
            0x0300 => "VGA",
            0x0302 => "3D controller",
            0x1200 => "accelerator",
            other => match other >> 8 {
                0x01 => "storage",
                0x02 => "network",
                0x03 => "display",
                0x06 => "bridge",
                0x08 => "system peripheral",
                0x0c => "serial bus",
                _ => "function",
            },
        }
    }
}

/// Class of a bridge between PCI buses, which every port of a switch or root complex is.
const BRIDGE: u32 = 0x0604;

/// NVIDIA's vendor number.
pub(crate) const NVIDIA: u16 = 0x10de;

/// The IOMMU group of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Iommu {
    /// Its number.
    pub group: u32,
    /// Its type: `identity`, `DMA`, `DMA-FQ`, ...; unknown where the kernel keeps the file from us.
    pub kind: Option<String>,
}

impl Iommu {
    /// Whether addresses of its functions are translated. Then traffic between peers goes by the IOMMU.
    pub fn translates(&self) -> Option<bool> {
        self.kind.as_deref().map(|k| k != "identity")
    }
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Where it is.
    pub address: Address,
    /// NVML's index, which is `nvidia-smi`'s.
    pub index: Option<u32>,
    /// Model.
    pub name: Option<String>,
    /// UUID.
    pub uuid: Option<String>,
    /// Instances that it is split into; none: MIG is off or unknown.
    pub mig: Option<Mig>,
    /// Whether a control daemon of the multi-process service serves it; none: unknown.
    pub mps: Option<bool>,
    /// NVLinks that are up.
    pub nvlinks: Vec<NvLink>,
    /// What it can reach in other GPUs.
    pub peers: Vec<Peer>,
}

impl Gpu {
    /// One of which nothing is known but its place.
    pub fn new(address: Address) -> Self {
        let (nvlinks, peers) = (Vec::new(), Vec::new());
        Self { address, index: None, name: None, uuid: None, mig: None, mps: None, nvlinks, peers }
    }
}

/// Multi-instance GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Mig {
    /// Names of the instances, as `nvidia-smi -L` prints them.
    pub instances: Vec<String>,
}

/// NVLinks of a GPU to one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NvLink {
    /// What is there.
    pub to: NvLinkEnd,
    /// How many.
    pub links: u32,
}

/// What is at the other end of an NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NvLinkEnd {
    /// A GPU.
    Gpu(Address),
    /// A switch: every GPU at it can be reached.
    Switch,
    /// The CPU.
    Cpu,
}

/// What a GPU can reach in another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Peer {
    /// The other one.
    pub to: Address,
    /// Kernels of this GPU can read and write that one's memory.
    pub access: bool,
}

/// An RDMA NIC.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Nic {
    /// Its name: `mlx5_0`.
    pub name: String,
    /// Its PCI function. Of a software device that of its network device, which may have none.
    pub address: Option<Address>,
    /// The CPU does its work: soft-RoCE, soft-iWARP.
    pub software: bool,
    /// Network device of its first port.
    pub netdev: Option<String>,
    /// Ports.
    pub ports: Vec<Port>,
}

/// A port of an RDMA NIC.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Port {
    /// Its number, from 1.
    pub number: u32,
    /// Its state: `ACTIVE`, `DOWN`, ...
    pub state: Option<String>,
    /// Rate in Gb/s.
    pub gigabits: Option<f64>,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: Option<String>,
}

/// A function of the shim driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shim {
    /// Where it is.
    pub address: Address,
    /// Its device file's name, `pushgate0`; none: bound, but no such device.
    pub name: Option<String>,
}

impl Topology {
    /// The function at an address.
    pub fn function(&self, at: Address) -> Option<&Function> {
        self.functions.get(&at)
    }

    /// A function with all that is above it, itself first; with the root complex it ends at, if it is listed.
    pub fn above(&self, at: Address) -> (Vec<&Function>, Option<&RootComplex>) {
        let mut chain = Vec::new();
        let mut next = self.functions.get(&at);
        while let Some(f) = next {
            chain.push(f);
            match &f.parent {
                // A tree that is checked has no loop; one built by hand may.
                Parent::Function(up) if chain.len() <= self.functions.len() => next = self.functions.get(up),
                Parent::Function(_) => return (chain, None),
                Parent::RootComplex(name) => {
                    return (chain, self.root_complexes.iter().find(|r| r.name == *name));
                }
            }
        }
        (chain, None)
    }

    /// What lies directly below, by address.
    pub fn below<'a>(&'a self, parent: &'a Parent) -> impl Iterator<Item = &'a Function> {
        self.functions.values().filter(move |f| f.parent == *parent)
    }

    /// NUMA node of a function: its own, else its root complex's, else the only one that the host has.
    pub fn numa_of(&self, at: Address) -> Option<u32> {
        let (chain, root) = self.above(at);
        let own = chain.iter().find_map(|f| f.numa);
        own.or_else(|| root?.numa).or_else(|| match &self.machine.nodes[..] {
            [only] => Some(only.number),
            _ => None,
        })
    }

    /// Whether anything is attached to it whose place matters: a GPU, a NIC or a shim function.
    pub fn matters(&self, at: Address) -> bool {
        self.gpus.iter().any(|g| g.address == at)
            || self.nics.iter().any(|n| n.address == Some(at))
            || self.shims.iter().any(|s| s.address == at)
    }

    /// Whether configuration spaces were cut short for want of privilege.
    pub fn needs_root(&self) -> bool {
        self.functions
            .values()
            .any(|f| f.config.express == Read::NeedsRoot || f.config.acs == Read::NeedsRoot)
    }

    /// The address of what is called so: an address, a NIC's name, `gpu0`, `pushgate0`.
    pub fn find(&self, name: &str) -> Option<Address> {
        if let Ok(at) = name.parse::<Address>() {
            return self.functions.contains_key(&at).then_some(at);
        }
        let gpu = self.gpus.iter().map(|g| g.address).find(|at| self.gpu_label(*at) == name);
        let nic = || self.nics.iter().find(|n| n.name == name)?.address;
        let shim = || Some(self.shims.iter().find(|s| s.name.as_deref() == Some(name))?.address);
        gpu.or_else(nic).or_else(shim)
    }

    /// Whether the way up from a function ends at a root complex.
    fn ends(&self, at: Address) -> bool {
        let mut up = self.functions.get(&at);
        for _ in 0..=self.functions.len() {
            match up.map(|f| &f.parent) {
                Some(Parent::RootComplex(_)) => return true,
                Some(Parent::Function(p)) => up = self.functions.get(p),
                None => return false,
            }
        }
        false
    }

    /// Mends what would mislead the rest: a function whose parent is not there, or that lies above itself, is
    /// taken as unplaced, with a note; roles that the configuration space did not tell follow from the shape.
    pub(crate) fn settle(&mut self) {
        let lost: Vec<Address> = self.functions.keys().copied().filter(|at| !self.ends(*at)).collect();
        for at in lost {
            if self.ends(at) {
                continue; // what was above it has been mended
            }
            self.notes
                .push(format!("{at}: what is above it is not listed, or is itself; its place is unknown"));
            if let Some(f) = self.functions.get_mut(&at) {
                f.parent = Parent::RootComplex(UNPLACED.into());
            }
        }
        for f in self.functions.values() {
            if let Parent::RootComplex(name) = &f.parent
                && !self.root_complexes.iter().any(|r| r.name == *name)
            {
                self.root_complexes.push(RootComplex { name: name.clone(), numa: None });
            }
        }
        self.root_complexes.sort_by(|a, b| a.name.cmp(&b.name));
        self.root_complexes.dedup_by(|a, b| a.name == b.name);
        self.gpus.sort_by_key(|g| g.address);
        self.nics.sort_by(|a, b| a.name.cmp(&b.name));
        self.shims.sort_by_key(|s| s.address);
    }

    /// Whether anything but a bridge is directly below.
    fn holds_endpoint(&self, at: Address) -> bool {
        let parent = Parent::Function(at);
        self.below(&parent).any(|f| f.class.map(|c| c >> 8) != Some(BRIDGE))
    }

    /// Roles of bridges whose configuration space could not be read, by their place: on a root bus a root port,
    /// below one a switch, below that its downstream ports.
    pub(crate) fn infer_roles(&mut self) {
        let mut by_depth: Vec<(usize, Address)> =
            self.functions.keys().map(|at| (self.above(*at).0.len(), *at)).collect();
        by_depth.sort();
        for (_, at) in by_depth {
            let f = &self.functions[&at];
            let role = match f.config.express.get().map(|e| e.port) {
                Some(PortType::Root) => Role::RootPort,
                Some(PortType::Upstream) => Role::Switch,
                Some(PortType::Downstream) => Role::DownstreamPort,
                Some(PortType::Bridge) => Role::Bridge,
                Some(PortType::Endpoint | PortType::Other) => Role::Endpoint,
                None if f.class.map(|c| c >> 8) != Some(BRIDGE) => Role::Endpoint,
                None => match &f.parent {
                    Parent::RootComplex(_) => Role::RootPort,
                    Parent::Function(up) => match self.functions.get(up).map(|f| f.role) {
                        // All that is directly below a switch are its ports.
                        Some(Role::RootPort | Role::DownstreamPort) if !self.holds_endpoint(at) => {
                            Role::Switch
                        }
                        Some(Role::Switch) => Role::DownstreamPort,
                        _ => Role::Bridge,
                    },
                },
            };
            if let Some(f) = self.functions.get_mut(&at) {
                f.role = role;
            }
        }
    }
}

/// Bridges above each other: more than any bus has, for numbers of buses are 8 bits and a switch takes two.
pub(crate) const DEEPEST: usize = 64;

/// The root complex of functions whose place is not known.
pub(crate) const UNPLACED: &str = "unplaced";
