//! NCCL's topology, as `NCCL_TOPO_DUMP_FILE` writes it and `NCCL_TOPO_FILE` reads it (NCCL,
//! src/graph/xml.cc and topo.cc):
//! `<system><cpu><pci>...<gpu/><nic><net/></nic></pci></cpu></system>`.
//!
//! NCCL leaves out root ports and a switch's downstream ports, and does not tell root complexes
//! apart. It joins the functions of a device into one, several NICs into one (`mlx5_0+mlx5_1`), and may give a switch the number
//! of a device elsewhere. So a bus id is no identity: what a file says is the place in its tree, and a switch whose bus id is
//! taken is given an address that no host has.

use std::collections::{BTreeMap, BTreeSet};

use roxmltree::{Document, Node as Element};

use crate::address::{Address, hex};
use crate::file::{FileError, LARGEST, MOST, MOST_DEVICES, MOST_GPUS};
use crate::link::{Link, LinkState, parse_speed, parse_width};
use crate::machine::Node;
use crate::tree::{
    DEEPEST, Function, Gpu, NVIDIA, Nic, NvLink, NvLinkEnd, Parent, Port, Role, RootComplex, Source, Topology,
};

impl Topology {
    /// Reads a topology from the text of NCCL's XML. The notes say what NCCL leaves out and what is
    /// strange in the text.
    pub fn from_nccl(xml: &str) -> Result<Self, FileError> {
        if xml.len() > LARGEST {
            return Err(FileError::Xml(format!("{} bytes; at most {LARGEST} are read", xml.len())));
        }
        // The parser compares each attribute of an element with every other one.
        let attributes = xml.split('<').map(|element| element.matches('=').count()).max().unwrap_or(0);
        within(attributes, MOST_ATTRIBUTES, |n| format!("an element with {n} attributes"))?;
        let document = Document::parse(xml).map_err(|e| FileError::Xml(e.to_string()))?;
        let system = document.root_element();
        if system.tag_name().name() != "system" {
            let name = system.tag_name().name();
            return Err(FileError::Xml(format!("its first element is <{name}>, where <system> should be")));
        }
        for (name, most) in [("pci", MOST_DEVICES), ("net", MOST), ("nvlink", MOST)] {
            let n = system.descendants().filter(|element| element.has_tag_name(name)).count();
            within(n, most, |n| format!("{n} <{name}>"))?;
        }
        let mut reading = Reading { devices: devices(system), ..Reading::default() };
        reading.topology.source = Source::File;
        for cpu in elements(system, "cpu") {
            reading.cpu(cpu);
        }
        let mut t = reading.topology;
        // Of a NIC that has a better place elsewhere in the file.
        let nics: BTreeSet<_> = t.nics.iter().filter_map(|nic| nic.address).collect();
        t.functions.retain(|at, f| !at.is_made_up() || f.role == Role::Switch || nics.contains(at));
        within(t.gpus.len(), MOST_GPUS, |n| format!("{n} GPUs"))?;
        if t.functions.is_empty() && t.nics.is_empty() {
            return Err(FileError::Xml("it has no <cpu> with a <pci> in it".into()));
        }
        t.notes.push(
            "NCCL does not tell root complexes apart: each device directly below a CPU is given one of its own".into(),
        );
        t.settle();
        Ok(t)
    }
}

/// The most attributes of an element that are accepted.
const MOST_ATTRIBUTES: usize = 1024;

/// Refuses more than `most` of something, which `named` names with their number.
fn within(n: usize, most: usize, named: impl Fn(usize) -> String) -> Result<(), FileError> {
    if n > most { Err(FileError::Xml(format!("{}; at most {most} are read", named(n)))) } else { Ok(()) }
}

fn elements<'a, 'i: 'a>(of: Element<'a, 'i>, name: &'static str) -> impl Iterator<Item = Element<'a, 'i>> {
    of.children().filter(move |c| c.has_tag_name(name))
}

/// An attribute, checked that it may be printed.
fn text(of: Element<'_, '_>, name: &str) -> Option<String> {
    let value = of.attribute(name)?.trim();
    let fits = !value.is_empty() && value.len() <= 256 && !value.chars().any(char::is_control);
    fits.then(|| value.to_owned())
}

fn number<T: std::str::FromStr>(of: Element<'_, '_>, name: &str) -> Option<T> {
    of.attribute(name)?.trim().parse().ok()
}

fn hexadecimal(of: Element<'_, '_>, name: &str, digits: usize) -> Option<u32> {
    hex(of.attribute(name)?.trim().strip_prefix("0x")?, digits)
}

fn busid(pci: Element<'_, '_>) -> Option<Address> {
    pci.attribute("busid")?.parse().ok()
}

fn is_switch(pci: Element<'_, '_>) -> bool {
    elements(pci, "pci").next().is_some()
}

/// The bus ids of all functions that are no switches.
fn devices(system: Element<'_, '_>) -> BTreeSet<Address> {
    let all = system.descendants().filter(|element| element.has_tag_name("pci") && !is_switch(*element));
    all.filter_map(busid).collect()
}

/// The names of the NICs that a `<net>` stands for: NCCL joins several by `+`, and names a NIC's function that reaches GPUs
/// directly after the NIC.
fn names(net: &str) -> impl Iterator<Item = &str> {
    net.split('+').map(|name| name.strip_suffix("_dma").unwrap_or(name)).filter(|name| !name.is_empty())
}

/// Whether a `<net>` is an RDMA device: NCCL's socket transport has port 0.
fn is_rdma(net: Element<'_, '_>) -> bool {
    number(net, "port").unwrap_or(1) != 0 || net.attribute("gdr") == Some("1")
}

#[derive(Default)]
struct Reading {
    topology: Topology,
    host: Option<String>,
    skipped: BTreeSet<String>,
    /// The bus ids of all functions that are no switches.
    devices: BTreeSet<Address>,
    /// By name: which of the topology's NICs.
    nics: BTreeMap<String, usize>,
    /// How many addresses were made up.
    made_up: u32,
}

impl Reading {
    fn note(&mut self, text: String) {
        if self.topology.notes.len() < 100 {
            self.topology.notes.push(text);
        }
    }

    fn cpu(&mut self, cpu: Element<'_, '_>) {
        // One file can describe several hosts, if NVLink joins them.
        let host = text(cpu, "host_hash");
        if self.host.is_none() {
            self.host = host.clone();
        } else if host != self.host {
            if self.skipped.insert(host.unwrap_or_default()) {
                self.note("it holds more than one host: the first is read".into());
            }
            return;
        }
        let numa: Option<u32> = number(cpu, "numaid");
        if let Some(number) = numa
            && !self.topology.machine.nodes.iter().any(|n| n.number == number)
        {
            self.topology.machine.nodes.push(Node { number, package: None, processors: true });
        }
        for pci in elements(cpu, "pci") {
            let root = self.root_complex(numa);
            self.pci(pci, root, 0);
        }
        for nic in elements(cpu, "nic") {
            // Without a function: NICs that NCCL joined, whose place is the CPU.
            let address = elements(nic, "net").any(is_rdma).then(|| {
                let (root, address) = (self.root_complex(numa), self.make_up());
                self.topology.functions.insert(address, Function::new(address, root));
                address
            });
            self.nic(nic, address);
        }
    }

    fn root_complex(&mut self, numa: Option<u32>) -> Parent {
        let node = numa.map_or("?".into(), |n| n.to_string());
        let name = format!("node{node}-{}", self.topology.root_complexes.len());
        self.topology.root_complexes.push(RootComplex { name: name.clone(), numa });
        Parent::RootComplex(name)
    }

    fn make_up(&mut self) -> Address {
        self.made_up += 1;
        Address::made_up(self.made_up - 1)
    }

    fn pci(&mut self, pci: Element<'_, '_>, parent: Parent, depth: usize) {
        let said = pci.attribute("busid").unwrap_or_default();
        let address = match said.parse::<Address>() {
            Ok(address) => address,
            Err(e) => return self.note(format!("<pci>: busid: {e}; left out with what is below it")),
        };
        if depth > DEEPEST {
            return self.note(format!("{address}: more than {DEEPEST} switches deep; left out"));
        }
        let taken = self.topology.functions.contains_key(&address);
        let address = match is_switch(pci) {
            false if taken => {
                self.note(format!("{address}: two functions have this bus id: the first counts"));
                return elements(pci, "nic").for_each(|nic| self.nic(nic, None));
            }
            true if taken || self.devices.contains(&address) => {
                let named = self.make_up();
                self.note(format!(
                    "{address}: a switch has the bus id of another function: it is {named} here"
                ));
                named
            }
            _ => address,
        };
        let mut f = Function::new(address, parent);
        f.class = hexadecimal(pci, "class", 6);
        f.vendor = hexadecimal(pci, "vendor", 4).map(|v| v as u16);
        f.device = hexadecimal(pci, "device", 4).map(|d| d as u16);
        let link = pci
            .attribute("link_speed")
            .and_then(parse_speed)
            .zip(pci.attribute("link_width").and_then(parse_width));
        f.link = Link { now: None, best: link.map(|(gts, width)| LinkState { gts, width }) };
        let below: Vec<_> = elements(pci, "pci").collect();
        let (display, nic) =
            (f.class.is_some_and(|c| c >> 16 == 0x03), f.class.map(|c| c >> 8) == Some(0x0207));
        let vendor = f.vendor;
        if !below.is_empty() {
            f.role = Role::Switch;
        }
        self.topology.functions.insert(address, f);
        let gpu = elements(pci, "gpu").next();
        let is_gpu = gpu.is_some() || display;
        // RCCL tells the architecture of AMD's GPUs.
        let other = gpu.is_some_and(|gpu| gpu.has_attribute("gcn"));
        if is_gpu && (other || vendor.is_some_and(|vendor| vendor != NVIDIA)) {
            if gpu.is_some() {
                self.note(format!("{address}: a GPU of another vendor than NVIDIA; it is no GPU here"));
            }
        } else if is_gpu && !self.topology.gpus.iter().any(|g| g.address == address) {
            let mut known = Gpu::new(address);
            if let Some(gpu) = gpu {
                known.index = number(gpu, "dev");
                known.nvlinks = nvlinks(gpu);
            }
            self.topology.gpus.push(known);
        }
        let before = self.topology.nics.len();
        for nic in elements(pci, "nic") {
            self.nic(nic, Some(address));
        }
        if nic && elements(pci, "nic").next().is_none() && before < MOST {
            // In files for NCCL_TOPO_FILE, to which NCCL adds the names that it finds.
            self.topology.nics.push(Nic::unnamed(address));
        }
        for child in below {
            self.pci(child, Parent::Function(address), depth + 1);
        }
    }

    fn nic(&mut self, nic: Element<'_, '_>, address: Option<Address>) {
        for net in elements(nic, "net") {
            let Some(name) = text(net, "name") else {
                self.note("a <net> without a name is left out".into());
                continue;
            };
            if !is_rdma(net) {
                self.note(format!("{name}: port 0 is NCCL's socket transport, no RDMA NIC; left out"));
                continue;
            }
            // NCCL counts in Mb/s, and adds up what it joins.
            let joined = names(&name).count().max(1) as f64;
            let gigabits = number::<f64>(net, "speed").map(|m| m / 1000.0 / joined);
            let gigabits = gigabits.filter(|g| (0.0..1e6).contains(g));
            for name in names(&name) {
                let number = number(net, "port").unwrap_or(1);
                self.port(name, address, Port { number, state: None, gigabits, link_layer: None });
            }
        }
    }

    fn port(&mut self, name: &str, address: Option<Address>, port: Port) {
        let nics = &mut self.topology.nics;
        let Some(&at) = self.nics.get(name) else {
            self.nics.insert(name.to_owned(), nics.len());
            let ports = vec![port];
            return nics.push(Nic { name: name.to_owned(), address, software: false, netdev: None, ports });
        };
        let known = &mut nics[at];
        if known.address.is_none_or(Address::is_made_up) {
            known.address = address.or(known.address);
        }
        if !known.ports.iter().any(|p| p.number == port.number) {
            known.ports.push(port);
        }
    }
}

fn nvlinks(gpu: Element<'_, '_>) -> Vec<NvLink> {
    let mut links: Vec<NvLink> = Vec::new();
    let mut add = |to: NvLinkEnd, count: u32| match links.iter_mut().find(|l| l.to == to) {
        Some(known) => known.links = known.links.saturating_add(count),
        None => links.push(NvLink { to, links: count }),
    };
    for link in elements(gpu, "nvlink") {
        let count = number(link, "count").unwrap_or(1);
        let target = link.attribute("target").and_then(|t| t.parse::<Address>().ok());
        // NCCL tells the other end of an NVLink by its class: 068000 is an NVSwitch, 068001 a CPU.
        match (link.attribute("tclass"), target) {
            (Some("0x068001"), _) => add(NvLinkEnd::Cpu, count),
            (Some("0x068000"), _) | (_, None) => add(NvLinkEnd::Switch, count),
            (_, Some(at)) => add(NvLinkEnd::Gpu(at), count),
        }
    }
    for link in elements(gpu, "c2c") {
        add(NvLinkEnd::Cpu, number(link, "count").unwrap_or(1));
    }
    links
}
