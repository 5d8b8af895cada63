//! The data of a topology: plain and public, the same from sysfs and from a file.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::address::Address;
use crate::config::{Config, PortType, Read};
use crate::link::Link;
use crate::machine::Machine;

/// Where GPUs, NICs and windows sit on a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Topology {
    /// Where the tree was read from.
    pub source: Source,
    /// The host around it.
    pub machine: Machine,
    /// Root complexes, by name.
    pub root_complexes: Vec<RootComplex>,
    /// Every PCI function, by address. A function's parent is another of these, or a root complex.
    pub functions: BTreeMap<Address, Function>,
    /// GPUs, by address.
    pub gpus: Vec<Gpu>,
    /// RDMA NICs, by name.
    pub nics: Vec<Nic>,
    /// Functions of the shim driver, by address; their BAR is a window.
    pub shims: Vec<Shim>,
    /// What could not be read or understood, one sentence each.
    pub notes: Vec<String>,
}

/// Where a tree comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// From the kernel.
    #[default]
    Sysfs,
    /// From a file that describes how the machine is built.
    File,
}

/// A root complex: a host bridge with the buses below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RootComplex {
    /// The name in sysfs: `pci0000:15`.
    pub name: String,
    /// The NUMA node, if known.
    pub numa: Option<u32>,
}

/// The role of a function in the tree.
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
    /// Any other function.
    #[default]
    Endpoint,
}

/// What is directly above a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parent {
    /// The function lies on a root bus.
    RootComplex(String),
    /// The function lies behind this one.
    Function(Address),
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Function {
    /// The address.
    pub address: Address,
    /// What is directly above the function.
    pub parent: Parent,
    /// The function's role.
    pub role: Role,
    /// The class code, 24 bits.
    pub class: Option<u32>,
    /// The vendor's number.
    pub vendor: Option<u16>,
    /// The device's number.
    pub device: Option<u16>,
    /// The vendor of the subsystem.
    pub subsystem_vendor: Option<u16>,
    /// The kernel driver bound to it.
    pub driver: Option<String>,
    /// The NUMA node, if the kernel knows it.
    pub numa: Option<u32>,
    /// The link that the function reports.
    pub link: Link,
    /// The configuration space.
    pub config: Config,
    /// The IOMMU group.
    pub iommu: Option<Iommu>,
}

impl Function {
    /// A function, known only by its place.
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

    /// Whether the function is a GPU of NVIDIA's: class 0300 (VGA) or 0302 (3D controller).
    pub fn is_gpu(&self) -> bool {
        self.vendor == Some(NVIDIA) && matches!(self.class.map(|c| c >> 8), Some(0x0300 | 0x0302))
    }

    /// The class in a word or two.
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

/// The class of a bridge between PCI buses, which every port of a switch or root complex is.
const BRIDGE: u32 = 0x0604;

/// NVIDIA's vendor number.
pub(crate) const NVIDIA: u16 = 0x10de;

/// The IOMMU group of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Iommu {
    /// The group's number.
    pub group: u32,
    /// The group's type: `identity`, `DMA`, `DMA-FQ`, ...; `None` if this process may not read the
    /// file.
    pub kind: Option<String>,
}

impl Iommu {
    /// Whether the IOMMU translates addresses of the group's functions. If so, traffic between
    /// peers passes the IOMMU.
    pub fn translates(&self) -> Option<bool> {
        self.kind.as_deref().map(|k| k != "identity")
    }
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// The address of the GPU's function.
    pub address: Address,
    /// The index in NVML, which is also `nvidia-smi`'s.
    pub index: Option<u32>,
    /// The model's name.
    pub name: Option<String>,
    /// The UUID.
    pub uuid: Option<String>,
    /// The instances that the GPU is split into; `None` if MIG is off or unknown.
    pub mig: Option<Mig>,
    /// Whether a control daemon of the multi-process service serves the GPU; `None` if unknown.
    pub mps: Option<bool>,
    /// NVLinks that are up.
    pub nvlinks: Vec<NvLink>,
    /// The other GPUs, and whether the GPU can access their memory.
    pub peers: Vec<Peer>,
}

impl Gpu {
    /// A GPU, known only by its place.
    pub fn new(address: Address) -> Self {
        let (nvlinks, peers) = (Vec::new(), Vec::new());
        Self { address, index: None, name: None, uuid: None, mig: None, mps: None, nvlinks, peers }
    }
}

/// Multi-instance GPU: the instances of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Mig {
    /// Names of the instances, as `nvidia-smi -L` prints them.
    pub instances: Vec<String>,
}

/// NVLinks of a GPU to one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NvLink {
    /// The other end of the links.
    pub to: NvLinkEnd,
    /// The number of links.
    pub links: u32,
}

/// What is at the other end of an NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NvLinkEnd {
    /// A GPU.
    Gpu(Address),
    /// A switch: every GPU at the switch can be reached.
    Switch,
    /// The CPU.
    Cpu,
}

/// Whether a GPU can access the memory of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Peer {
    /// The other GPU.
    pub to: Address,
    /// Whether kernels of this GPU can read and write the other's memory.
    pub access: bool,
}

/// An RDMA NIC.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Nic {
    /// The NIC's name: `mlx5_0`.
    pub name: String,
    /// The NIC's PCI function; for a software device that of its network device, which may have
    /// none.
    pub address: Option<Address>,
    /// Whether the CPU does the NIC's work: soft-RoCE, soft-iWARP.
    pub software: bool,
    /// The network device of the first port.
    pub netdev: Option<String>,
    /// The NIC's ports.
    pub ports: Vec<Port>,
}

impl Nic {
    /// A NIC that a file tells by its function alone. Its name is the address.
    pub(crate) fn unnamed(address: Address) -> Self {
        let (name, ports) = (address.to_string(), Vec::new());
        Self { name, address: Some(address), software: false, netdev: None, ports }
    }

    /// Whether a file tells the NIC by its function alone.
    pub(crate) fn is_unnamed(&self) -> bool {
        self.name.parse::<Address>().is_ok()
    }
}

/// A port of an RDMA NIC.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Port {
    /// The port's number, from 1.
    pub number: u32,
    /// The port's state: `ACTIVE`, `DOWN`, ...
    pub state: Option<String>,
    /// The rate in Gb/s.
    pub gigabits: Option<f64>,
    /// The link layer: `InfiniBand` or `Ethernet`.
    pub link_layer: Option<String>,
}

/// A function of the shim driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shim {
    /// The address.
    pub address: Address,
    /// The name of its device file, `pushgate0`; `None` if the function is bound but has no such
    /// file.
    pub name: Option<String>,
}

impl Topology {
    /// The function at an address.
    pub fn function(&self, at: Address) -> Option<&Function> {
        self.functions.get(&at)
    }

    /// A function with everything above it, the function first; and the root complex at the end, if
    /// that is listed.
    pub fn above(&self, at: Address) -> (Vec<&Function>, Option<&RootComplex>) {
        let mut chain = Vec::new();
        let mut next = self.functions.get(&at);
        while let Some(f) = next {
            chain.push(f);
            match &f.parent {
                // A checked tree has no loop; a tree built by hand may have one.
                Parent::Function(up) if chain.len() <= self.functions.len() => next = self.functions.get(up),
                Parent::Function(_) => return (chain, None),
                Parent::RootComplex(name) => {
                    return (chain, self.root_complexes.iter().find(|r| r.name == *name));
                }
            }
        }
        (chain, None)
    }

    /// The functions directly below, by address.
    pub fn below<'a>(&'a self, parent: &'a Parent) -> impl Iterator<Item = &'a Function> {
        self.functions.values().filter(move |f| f.parent == *parent)
    }

    /// The NUMA node of a function: its own, or else its root complex's, or else the only one of
    /// the host.
    pub fn numa_of(&self, at: Address) -> Option<u32> {
        let (chain, root) = self.above(at);
        let own = chain.iter().find_map(|f| f.numa);
        own.or_else(|| root?.numa).or_else(|| self.machine.only_node())
    }

    /// Whether a GPU, a NIC or a shim function is attached to the function, so that its place
    /// matters.
    pub fn matters(&self, at: Address) -> bool {
        self.gpus.iter().any(|g| g.address == at)
            || self.nics.iter().any(|n| n.address == Some(at))
            || self.shims.iter().any(|s| s.address == at)
    }

    /// Whether configuration spaces were cut short for lack of privilege.
    pub fn needs_root(&self) -> bool {
        self.functions
            .values()
            .any(|f| f.config.express == Read::NeedsRoot || f.config.acs == Read::NeedsRoot)
    }

    /// Whether no switch stands above any device: distances read from such a tree of a virtual machine say nothing.
    pub(crate) fn is_flat(&self) -> bool {
        let mut ends = self.functions.values().filter(|f| f.role == Role::Endpoint);
        !ends.any(|f| self.above(f.address).0.iter().any(|up| up.role == Role::Switch))
    }

    /// The address of the device with this name: an address, a NIC's name, `gpu0`, `pushgate0`.
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

    /// Repairs what would mislead later steps. A function whose parent is missing, or that lies
    /// above itself, becomes unplaced, with a note. Roles that the configuration space did not tell
    /// are derived from the tree's shape.
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

    /// Whether anything other than a bridge is directly below.
    fn holds_endpoint(&self, at: Address) -> bool {
        let parent = Parent::Function(at);
        self.below(&parent).any(|f| f.class.map(|c| c >> 8) != Some(BRIDGE))
    }

    /// Derives the roles of bridges whose configuration space could not be read, by their place: on
    /// a root bus a root port, below one a switch, below that the switch's downstream port.
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
                        // Everything directly below a switch is one of its ports.
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

/// The most bridges above each other: more than any bus has, because bus numbers have 8 bits and a
/// switch takes two.
pub(crate) const DEEPEST: usize = 64;

/// The name of the root complex for functions whose place is unknown.
pub(crate) const UNPLACED: &str = "unplaced";
