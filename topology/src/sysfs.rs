//! Reads the tree as the kernel shows it. Only this part of the crate reads /sys and /proc.
//!
//! Nothing there is trusted to be as the kernel writes it: what is missing is left out, and what
//! can't be parsed becomes a note.

mod files;
mod gpu;
mod host;
mod rdma;

use std::path::PathBuf;

use crate::address::{Address, hex};
use crate::config;
use crate::link::{Link, LinkState, parse_speed, parse_width};
use crate::machine::{Signs, why_virtual};
use crate::tree::{Function, Iommu, Parent, RootComplex, Shim, Source, Topology, UNPLACED};
use files::Files;

/// The most functions that are read: a folder that lists more is not sysfs.
const MOST_FUNCTIONS: usize = 1 << 14;

/// Where to read. The roots are arguments, so that trees in a folder can be read like the host's
/// own.
#[derive(Clone, Debug)]
pub struct Sysfs {
    sys: PathBuf,
    proc: PathBuf,
}

impl Sysfs {
    /// Reads from a sysfs at `sys`, without /proc.
    pub fn new(sys: impl Into<PathBuf>) -> Self {
        Self { sys: sys.into(), proc: PathBuf::from("/nonexistent") }
    }

    /// Reads from this host.
    pub fn host() -> Self {
        Self::new("/sys").with_proc("/proc")
    }

    /// Reads a /proc at `proc` besides: the processor's model, and what NVIDIA's driver reports.
    pub fn with_proc(mut self, proc: impl Into<PathBuf>) -> Self {
        self.proc = proc.into();
        self
    }

    /// Bytes of the last-level caches of all processors together: those of the highest level. `None` if the kernel does not
    /// tell of any.
    pub fn last_level_cache(&self) -> Option<u64> {
        host::last_level_cache(&mut Files::new(&self.sys))
    }

    /// Reads the topology. Failures become its notes; an empty folder gives an empty topology.
    pub fn read(&self) -> Topology {
        let mut sys = Files::new(&self.sys);
        let mut proc = Files::new(&self.proc);
        let mut topology = Topology { source: Source::Sysfs, ..Topology::default() };
        functions(&mut sys, &mut topology);
        topology.settle();
        topology.infer_roles();
        topology.drop_emulated_links();
        host::read(&mut sys, &mut proc, &mut topology);
        gpu::read(&mut proc, &mut topology);
        rdma::read(&mut sys, &mut topology);
        shims(&mut sys, &mut topology);
        topology.settle();
        let bridge = Address { domain: 0, bus: 0, device: 0, function: 0 };
        let signs = host::signs(&mut sys, &mut proc);
        topology.machine.virtual_machine = why_virtual(&Signs {
            dmi: [topology.machine.vendor.as_deref(), topology.machine.product.as_deref()],
            flag: signs.0,
            kind: signs.1.as_deref(),
            bridge: topology.function(bridge).and_then(|f| f.subsystem_vendor),
        });
        topology.machine.flat = topology.machine.virtual_machine.is_some() && topology.is_flat();
        topology.notes.extend(sys.into_notes());
        topology.notes.extend(proc.into_notes());
        topology
    }
}

fn functions(sys: &mut Files, topology: &mut Topology) {
    let names = sys.list("bus/pci/devices");
    if names.len() > MOST_FUNCTIONS {
        sys.note(format!(
            "bus/pci/devices: lists {} functions; the first {MOST_FUNCTIONS} are read",
            names.len()
        ));
    }
    for name in names.into_iter().take(MOST_FUNCTIONS) {
        let link = format!("bus/pci/devices/{name}");
        match name.parse::<Address>() {
            Ok(address) => {
                let Some(parent) = place(sys, &link, address) else { continue };
                let function = function(sys, &link, address, parent);
                topology.functions.insert(address, function);
            }
            Err(e) => sys.note(format!("{link}: {e}")),
        }
    }
    for f in topology.functions.values() {
        let Parent::RootComplex(name) = &f.parent else { continue };
        match topology.root_complexes.iter_mut().find(|r| r.name == *name) {
            Some(root) => root.numa = root.numa.or(f.numa),
            None => topology.root_complexes.push(RootComplex { name: name.clone(), numa: f.numa }),
        }
    }
}

/// What is above a function, by its real path: `devices/pci0000:15/0000:15:01.0/0000:16:00.0`.
fn place(sys: &mut Files, link: &str, address: Address) -> Option<Parent> {
    let real = sys.real(link)?;
    let parts: Vec<&str> = real.components().filter_map(|c| c.as_os_str().to_str()).collect();
    let is_root = |part: &&str| {
        let numbers = part.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
        numbers.is_some_and(|(domain, bus)| hex(domain, 8).is_some() && hex(bus, 2).is_some())
    };
    let unplaced = Some(Parent::RootComplex(UNPLACED.into()));
    let Some(at) = parts.iter().position(is_root) else {
        sys.note(format!("{link}: its real path names no root complex (pciDDDD:BB); its place is unknown"));
        return unplaced;
    };
    let chain: Vec<Address> = parts[at + 1..].iter().filter_map(|p| p.parse().ok()).collect();
    match &chain[..] {
        [.., up, last] if *last == address => Some(Parent::Function(*up)),
        [last] if *last == address => Some(Parent::RootComplex(parts[at].into())),
        _ => {
            sys.note(format!("{link}: its real path ends elsewhere; its place is unknown"));
            unplaced
        }
    }
}

fn function(sys: &mut Files, link: &str, address: Address, parent: Parent) -> Function {
    let mut f = Function::new(address, parent);
    let hex_file = |sys: &mut Files, name: &str, digits: usize| -> Option<u32> {
        sys.parsed(&format!("{link}/{name}"), "hexadecimal number like 0x10de", |t| {
            hex(t.strip_prefix("0x").unwrap_or(t), digits)
        })
    };
    f.class = hex_file(sys, "class", 6);
    f.vendor = hex_file(sys, "vendor", 4).map(|v| v as u16);
    f.device = hex_file(sys, "device", 4).map(|v| v as u16);
    f.subsystem_vendor = hex_file(sys, "subsystem_vendor", 4).map(|v| v as u16);
    f.driver = sys.link_name(&format!("{link}/driver"));
    let numa = sys.parsed(&format!("{link}/numa_node"), "NUMA node", |t| {
        t.parse::<i32>().ok().filter(|n| (-1..1 << 16).contains(n))
    });
    f.numa = numa.and_then(|n| n.try_into().ok());
    f.config = config::parse(&sys.bytes(&format!("{link}/config"), 4096).unwrap_or_default());
    let mut state = |when: &str| {
        // A port without a link reports "Unknown", 0 or 255, which is not an error.
        let speed = sys.word(&format!("{link}/{when}_link_speed"));
        let width = sys.word(&format!("{link}/{when}_link_width"));
        match (speed, width) {
            (Some(s), Some(w)) => match (parse_speed(&s), parse_width(&w)) {
                (Some(gts), Some(width)) => Some(LinkState { gts, width }),
                (gts, width) => {
                    let quiet = s.starts_with("Unknown") || matches!(w.as_str(), "0" | "255" | "63");
                    if !quiet && gts.is_none() {
                        sys.note(format!("{link}/{when}_link_speed: {s:?} is no speed like 32.0 GT/s"));
                    }
                    if !quiet && width.is_none() {
                        sys.note(format!("{link}/{when}_link_width: {w:?} is no width from 1 to 32"));
                    }
                    None
                }
            },
            _ => None,
        }
    };
    let (now, best) = (state("current"), state("max"));
    let express = f.config.express.get();
    f.link = Link { now: now.or_else(|| express?.link_now), best: best.or_else(|| express?.link_best) };
    f.iommu = sys
        .link_name(&format!("{link}/iommu_group"))
        .and_then(|n| n.parse().ok())
        .map(|group| Iommu { group, kind: sys.word(&format!("kernel/iommu_groups/{group}/type")) });
    f
}

/// Finds the functions of the driver `pushgate`, and the names of their files in class/pushgate.
fn shims(sys: &mut Files, topology: &mut Topology) {
    let bound = topology.functions.values().filter(|f| f.driver.as_deref() == Some("pushgate"));
    topology.shims = bound.map(|f| Shim { address: f.address, name: None }).collect();
    for name in sys.list("class/pushgate") {
        // `pushgate` itself, without a number, is the module's own file and has no device.
        let link = format!("class/pushgate/{name}/device");
        if !sys.exists(&link) {
            continue;
        }
        let Some(address) = sys.real(&link).as_deref().and_then(Address::of_path) else { continue };
        match topology.shims.iter_mut().find(|s| s.address == address) {
            Some(shim) => shim.name = Some(name),
            None if topology.functions.contains_key(&address) => {
                topology.shims.push(Shim { address, name: Some(name) });
            }
            None => sys.note(format!("{link}: its function {address} is not listed")),
        }
    }
}
