//! NCCL's topology, as `NCCL_TOPO_DUMP_FILE` writes it and `NCCL_TOPO_FILE` reads it (NCCL,
//! src/graph/xml.cc and topo.cc):
//! `<system><cpu><pci>...<gpu/><nic><net/></nic></pci></cpu></system>`.
//!
//! NCCL leaves out root ports and a switch's downstream ports, and does not tell root complexes
//! apart.

use std::collections::BTreeSet;

use roxmltree::{Document, Node as Element};

use crate::address::{Address, hex};
use crate::file::{FileError, LARGEST, MOST, MOST_DEVICES, MOST_GPUS};
use crate::link::{Link, LinkState, parse_speed, parse_width};
use crate::machine::Node;
use crate::tree::{
    DEEPEST, Function, Gpu, Nic, NvLink, NvLinkEnd, Parent, Port, Role, RootComplex, Source, Topology,
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
        let mut reading = Reading::default();
        reading.topology.source = Source::File;
        for cpu in elements(system, "cpu") {
            reading.cpu(cpu);
        }
        let mut t = reading.topology;
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

#[derive(Default)]
struct Reading {
    topology: Topology,
    host: Option<String>,
    skipped: BTreeSet<String>,
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
            self.topology.machine.nodes.push(Node { number, package: None });
        }
        for pci in elements(cpu, "pci") {
            let name = format!(
                "node{}-{}",
                numa.map_or("?".into(), |n| n.to_string()),
                self.topology.root_complexes.len()
            );
            self.topology.root_complexes.push(RootComplex { name: name.clone(), numa });
            self.pci(pci, Parent::RootComplex(name), 0);
        }
        for nic in elements(cpu, "nic") {
            self.nic(nic, None);
        }
    }

    fn pci(&mut self, pci: Element<'_, '_>, parent: Parent, depth: usize) {
        let busid = pci.attribute("busid").unwrap_or_default();
        let address = match busid.parse::<Address>() {
            Ok(address) => address,
            Err(e) => return self.note(format!("<pci>: busid: {e}; left out with what is below it")),
        };
        if depth > DEEPEST {
            return self.note(format!("{address}: more than {DEEPEST} switches deep; left out"));
        }
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
        let gpu_class = f.class.is_some_and(|c| c >> 16 == 0x03);
        if !below.is_empty() {
            f.role = Role::Switch;
        }
        if self.topology.functions.insert(address, f).is_some() {
            self.note(format!("{address}: it stands there twice: the last counts"));
        }
        let gpu = elements(pci, "gpu").next();
        if (gpu.is_some() || gpu_class) && !self.topology.gpus.iter().any(|g| g.address == address) {
            let mut known = Gpu::new(address);
            if let Some(gpu) = gpu {
                known.index = number(gpu, "dev");
                known.nvlinks = nvlinks(gpu);
            }
            self.topology.gpus.push(known);
        }
        for nic in elements(pci, "nic") {
            self.nic(nic, Some(address));
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
            let port: u32 = number(net, "port").unwrap_or(1);
            if port == 0 && net.attribute("gdr") != Some("1") {
                self.note(format!("{name}: port 0 is NCCL's socket transport, no RDMA NIC; left out"));
                continue;
            }
            // NCCL counts in Mb/s.
            let gigabits = number::<f64>(net, "speed").map(|m| m / 1000.0).filter(|g| (0.0..1e6).contains(g));
            let port = Port { number: port, state: None, gigabits, link_layer: None };
            match self.topology.nics.iter_mut().find(|n| n.name == name) {
                Some(known) if known.ports.iter().any(|p| p.number == port.number) => {}
                Some(known) => known.ports.push(port),
                None => self.topology.nics.push(Nic {
                    name,
                    address,
                    software: false,
                    netdev: None,
                    ports: vec![port],
                }),
            }
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
