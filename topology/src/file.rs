//! The file that describes how a machine is built: TOML, written by people or converted from NCCL's
//! XML. docs/topology.md describes the format, with an example.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::address::{Address, hex};
use crate::config::{Acs, Read};
use crate::link::{Link, LinkState};
use crate::machine::{CpuKind, Node};
use crate::tree::{
    DEEPEST, Function, Gpu, Nic, NvLink, NvLinkEnd, Parent, Port, Role, RootComplex, Shim, Source, Topology,
};

/// The version of the format that is written and read.
const VERSION: u32 = 1;
/// The longest description of a machine that is accepted, in bytes.
pub(crate) const LARGEST: usize = 4 << 20;

/// The most GPUs of a host that are accepted; each makes a pair with each NIC.
pub(crate) const MOST_GPUS: usize = 64;
/// The most entries of another table that are accepted; each is looked up among the others.
pub(crate) const MOST: usize = 1 << 12;
/// The most PCI functions of a host that are accepted.
pub(crate) const MOST_DEVICES: usize = 1 << 14;

/// Why a file does not describe a machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The file is not TOML, or not a topology.
    #[error("it is no topology in TOML: {0}")]
    Toml(String),
    /// The file is not XML, or not NCCL's.
    #[error("it is no topology of NCCL's: {0}")]
    Xml(String),
    /// A value is impossible.
    #[error("{at}: {value:?}: {allowed}")]
    Value {
        /// Where the value stands.
        at: String,
        /// The value.
        value: String,
        /// What is allowed there.
        allowed: String,
    },
}

fn wrong(at: &str, value: impl ToString, allowed: &str) -> FileError {
    FileError::Value {
        at: at.into(),
        value: value.to_string().chars().take(80).collect(),
        allowed: allowed.into(),
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    vendor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    product: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_model: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    node: Vec<NodeForm>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    root_complex: Vec<RootForm>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    device: Vec<DeviceForm>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    gpu: Vec<GpuForm>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    nic: Vec<NicForm>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shim: Vec<ShimForm>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeForm {
    number: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    package: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootForm {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa: Option<u32>,
}

#[derive(Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RoleForm {
    RootPort,
    Switch,
    Port,
    Bridge,
    #[default]
    Endpoint,
}

impl RoleForm {
    fn is_endpoint(&self) -> bool {
        *self == Self::Endpoint
    }
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum AcsForm {
    Direct,
    Redirects,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceForm {
    address: Address,
    parent: String,
    #[serde(default, skip_serializing_if = "RoleForm::is_endpoint")]
    role: RoleForm,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vendor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    speed: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    width: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    acs: Option<AcsForm>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuForm {
    address: Address,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    nvlinks: Vec<NvLinkForm>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NvLinkForm {
    to: String,
    links: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NicForm {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<Address>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    software: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    netdev: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ports: Vec<PortForm>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PortForm {
    number: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    gigabits: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link_layer: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShimForm {
    address: Address,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// Checks that a name may be printed.
fn name(at: &str, text: &str) -> Result<String, FileError> {
    let fits = !text.is_empty() && text.len() <= 256 && !text.chars().any(char::is_control);
    if fits { Ok(text.to_owned()) } else { Err(wrong(at, text, "1 to 256 bytes without control characters")) }
}

fn optional(at: &str, text: &Option<String>) -> Result<Option<String>, FileError> {
    text.as_deref().map(|t| name(at, t)).transpose()
}

fn number(at: &str, text: &Option<String>, digits: usize) -> Result<Option<u32>, FileError> {
    let Some(text) = text else { return Ok(None) };
    let value = text.strip_prefix("0x").and_then(|t| hex(t, digits));
    value.map(Some).ok_or_else(|| wrong(at, text, &format!("0x and up to {digits} hexadecimal digits")))
}

impl DeviceForm {
    fn function(&self) -> Result<Function, FileError> {
        let at = |key: &str| format!("device {}: {key}", self.address);
        let parent = match self.parent.parse::<Address>() {
            Ok(up) => Parent::Function(up),
            Err(_) => Parent::RootComplex(name(&at("parent"), &self.parent)?),
        };
        let mut f = Function::new(self.address, parent);
        f.role = match self.role {
            RoleForm::RootPort => Role::RootPort,
            RoleForm::Switch => Role::Switch,
            RoleForm::Port => Role::DownstreamPort,
            RoleForm::Bridge => Role::Bridge,
            RoleForm::Endpoint => Role::Endpoint,
        };
        f.class = number(&at("class"), &self.class, 6)?;
        f.vendor = number(&at("vendor"), &self.vendor, 4)?.map(|v| v as u16);
        f.device = number(&at("device"), &self.device, 4)?.map(|v| v as u16);
        f.numa = self.numa;
        if let Some(speed) = self.speed.filter(|s| !(2.0..=256.0).contains(s)) {
            return Err(wrong(&at("speed"), speed, "2.5 to 256 GT/s"));
        }
        if let Some(width) = self.width.filter(|w| !(1..=32).contains(w)) {
            return Err(wrong(&at("width"), width, "1 to 32 lanes"));
        }
        f.link = match (self.speed, self.width) {
            (Some(gts), Some(width)) => Link { now: None, best: Some(LinkState { gts, width }) },
            (None, None) => Link::default(),
            _ => return Err(wrong(&at("speed"), "half a link", "give speed and width, or neither")),
        };
        f.config.acs = match self.acs {
            // P2P request redirect and completion redirect.
            Some(AcsForm::Redirects) => Read::Is(Acs { capability: 0xc, control: 0xc }),
            Some(AcsForm::Direct) => Read::Is(Acs { capability: 0xc, control: 0 }),
            None => Read::Unread,
        };
        Ok(f)
    }

    fn of(f: &Function) -> Self {
        let link = f.link.best.or(f.link.now);
        Self {
            address: f.address,
            parent: match &f.parent {
                Parent::RootComplex(name) => name.clone(),
                Parent::Function(up) => up.to_string(),
            },
            role: match f.role {
                Role::RootPort => RoleForm::RootPort,
                Role::Switch => RoleForm::Switch,
                Role::DownstreamPort => RoleForm::Port,
                Role::Bridge => RoleForm::Bridge,
                Role::Endpoint => RoleForm::Endpoint,
            },
            class: f.class.map(|c| format!("0x{c:06x}")),
            vendor: f.vendor.map(|v| format!("0x{v:04x}")),
            device: f.device.map(|d| format!("0x{d:04x}")),
            numa: f.numa,
            speed: link.map(|l| l.gts),
            width: link.map(|l| l.width),
            acs: f.config.acs.get().map(|a| {
                if a.redirects_requests() || a.redirects_completions() {
                    AcsForm::Redirects
                } else {
                    AcsForm::Direct
                }
            }),
        }
    }
}

impl Topology {
    /// Reads a topology from the text of a file.
    pub fn from_toml(text: &str) -> Result<Self, FileError> {
        if text.len() > LARGEST {
            return Err(FileError::Toml(format!("{} bytes; at most {LARGEST} are read", text.len())));
        }
        let form: Form = toml::from_str(text).map_err(|e| FileError::Toml(e.to_string()))?;
        form.topology()
    }

    /// The text of a file that describes this machine's shape. It does not contain states of ports,
    /// drivers and configuration spaces (except ACS).
    pub fn to_toml(&self) -> String {
        let form = Form {
            version: VERSION,
            vendor: self.machine.vendor.clone(),
            product: self.machine.product.clone(),
            cpu_model: self.machine.cpu_model.clone(),
            node: self
                .machine
                .nodes
                .iter()
                .map(|n| NodeForm { number: n.number, package: n.package })
                .collect(),
            root_complex: self
                .root_complexes
                .iter()
                .map(|r| RootForm { name: r.name.clone(), numa: r.numa })
                .collect(),
            device: self.functions.values().map(DeviceForm::of).collect(),
            gpu: self.gpus.iter().map(gpu_form).collect(),
            nic: self.nics.iter().map(nic_form).collect(),
            shim: self.shims.iter().map(|s| ShimForm { address: s.address, name: s.name.clone() }).collect(),
        };
        toml::to_string(&form).expect("tables of strings and numbers can be written")
    }
}

fn gpu_form(gpu: &Gpu) -> GpuForm {
    let to = |end: NvLinkEnd| match end {
        NvLinkEnd::Gpu(at) => at.to_string(),
        NvLinkEnd::Switch => "switch".into(),
        NvLinkEnd::Cpu => "cpu".into(),
    };
    let nvlinks = gpu.nvlinks.iter().map(|l| NvLinkForm { to: to(l.to), links: l.links }).collect();
    GpuForm { address: gpu.address, index: gpu.index, name: gpu.name.clone(), nvlinks }
}

fn nic_form(nic: &Nic) -> NicForm {
    let port =
        |p: &Port| PortForm { number: p.number, gigabits: p.gigabits, link_layer: p.link_layer.clone() };
    NicForm {
        name: nic.name.clone(),
        address: nic.address,
        software: nic.software,
        netdev: nic.netdev.clone(),
        ports: nic.ports.iter().map(port).collect(),
    }
}

impl Form {
    fn topology(self) -> Result<Topology, FileError> {
        if self.version != VERSION {
            return Err(wrong("version", self.version, "1 is what this program reads"));
        }
        for (table, entries, most) in [
            ("node", self.node.len(), MOST),
            ("root_complex", self.root_complex.len(), MOST),
            ("device", self.device.len(), MOST_DEVICES),
            ("gpu", self.gpu.len(), MOST_GPUS),
            ("nic", self.nic.len(), MOST),
            ("shim", self.shim.len(), MOST),
        ] {
            if entries > most {
                return Err(wrong(table, format!("{entries} entries"), &format!("at most {most}")));
            }
        }
        let mut t = Topology { source: Source::File, ..Topology::default() };
        t.machine.vendor = optional("vendor", &self.vendor)?;
        t.machine.product = optional("product", &self.product)?;
        t.machine.cpu_model = optional("cpu_model", &self.cpu_model)?;
        t.machine.cpu = t.machine.cpu_model.as_deref().map_or(CpuKind::Unknown, CpuKind::of);
        for n in &self.node {
            if t.machine.nodes.iter().any(|m| m.number == n.number) {
                return Err(wrong("node: number", n.number, "each number once"));
            }
            t.machine.nodes.push(Node { number: n.number, package: n.package, processors: true });
        }
        for r in &self.root_complex {
            let name = name("root_complex: name", &r.name)?;
            if name.parse::<Address>().is_ok() || t.root_complexes.iter().any(|o| o.name == name) {
                return Err(wrong("root_complex: name", name, "each name once, and no PCI address"));
            }
            t.root_complexes.push(RootComplex { name, numa: r.numa });
        }
        for d in &self.device {
            if t.functions.insert(d.address, d.function()?).is_some() {
                return Err(wrong("device: address", d.address, "each address once"));
            }
        }
        self.check_parents(&t)?;
        self.attach(&mut t)?;
        t.settle();
        Ok(t)
    }

    fn check_parents(&self, t: &Topology) -> Result<(), FileError> {
        for f in t.functions.values() {
            let at = format!("device {}: parent", f.address);
            match &f.parent {
                Parent::RootComplex(name) if !t.root_complexes.iter().any(|r| r.name == *name) => {
                    return Err(wrong(&at, name, "the name of a root_complex or the address of a device"));
                }
                Parent::Function(up) if !t.functions.contains_key(up) => {
                    return Err(wrong(
                        &at,
                        up,
                        "no such device: name a root_complex or a device of this file",
                    ));
                }
                _ if t.above(f.address).0.len() > DEEPEST => {
                    let most = format!("the way up has more than {DEEPEST} devices, or is a loop");
                    return Err(wrong(&at, f.address, &most));
                }
                _ if t.above(f.address).1.is_none() => {
                    return Err(wrong(&at, f.address, "the way up must end at a root_complex"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn attach(self, t: &mut Topology) -> Result<(), FileError> {
        let mut seen = BTreeSet::new();
        let placed = |what: &str, at: Address| match t.functions.contains_key(&at) {
            true => Ok(at),
            false => Err(wrong(&format!("{what}: address"), at, "the address of a device of this file")),
        };
        for g in self.gpu {
            let mut gpu = Gpu::new(placed("gpu", g.address)?);
            if !seen.insert((0, g.address.to_string())) {
                return Err(wrong("gpu: address", g.address, "each GPU once"));
            }
            gpu.index = g.index;
            gpu.name = optional("gpu: name", &g.name)?;
            for l in g.nvlinks {
                let to = match l.to.as_str() {
                    "switch" => NvLinkEnd::Switch,
                    "cpu" => NvLinkEnd::Cpu,
                    at => NvLinkEnd::Gpu(at.parse().map_err(|_| {
                        wrong("gpu: nvlinks: to", at, "the address of a GPU, or \"switch\", or \"cpu\"")
                    })?),
                };
                gpu.nvlinks.push(NvLink { to, links: l.links });
            }
            t.gpus.push(gpu);
        }
        for n in self.nic {
            let name = name("nic: name", &n.name)?;
            if !seen.insert((1, name.clone())) {
                return Err(wrong("nic: name", name, "each NIC once"));
            }
            let address = n.address.map(|at| placed("nic", at)).transpose()?;
            let netdev = optional("nic: netdev", &n.netdev)?;
            let mut ports = Vec::new();
            for p in n.ports {
                let link_layer = optional("nic: link_layer", &p.link_layer)?;
                if let Some(rate) = p.gigabits.filter(|g| !(0.0..1e6).contains(g)) {
                    return Err(wrong("nic: gigabits", rate, "0 to 1000000 Gb/s"));
                }
                ports.push(Port { number: p.number, state: None, gigabits: p.gigabits, link_layer });
            }
            t.nics.push(Nic { name, address, software: n.software, netdev, ports });
        }
        for s in self.shim {
            if !seen.insert((2, s.address.to_string())) {
                return Err(wrong("shim: address", s.address, "each function once"));
            }
            let name = optional("shim: name", &s.name)?;
            t.shims.push(Shim { address: placed("shim", s.address)?, name });
        }
        Ok(())
    }
}
