//! Which RDMA device is taken where the settings name none: a pure choice over what sysfs says of each device.
//!
//! The order: what a device reaches, adapters before devices in software, its speed, its transport, its distance from the GPU, its
//! name. So no two devices are equal, and the order in which the kernel lists them means nothing.

use std::cmp::Reverse;
use std::fmt;
use std::net::IpAddr;
use std::path::Path;

use pushgate_door::addresses::Family;

use super::gid::{self, GidEntry, GidType};
use super::kinds::Protocol;

/// What carries a port's packets, the first before the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// InfiniBand.
    Infiniband,
    /// RDMA over UDP.
    RoceV2,
    /// RDMA over Ethernet, not routed.
    RoceV1,
    /// RDMA over TCP.
    Iwarp,
    /// Not known, or nothing that has reliable connected queue pairs.
    None,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Infiniband => "InfiniBand",
            Transport::RoceV2 => "RoCE v2",
            Transport::RoceV1 => "RoCE v1",
            Transport::Iwarp => "iWARP",
            Transport::None => "no transport with RC queue pairs",
        })
    }
}

/// What a port can reach, the most first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// It is active, with an address of the family by which the hosts reach each other.
    Good,
    /// It is active, with an address of the other family.
    OtherFamily,
    /// It is active, with an address of the link alone.
    LinkLocal,
    /// It is active, without an address.
    NoAddress,
    /// It is not active.
    Down,
    /// There is no such port.
    NoPort,
    /// Its device has no reliable connected queue pairs.
    Unconnected,
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reach::Good => "active with an address",
            Reach::OtherFamily => "its address is not of the family by which the hosts reach each other",
            Reach::LinkLocal => "its only address reaches no further than the link",
            Reach::NoAddress => "it has no address",
            Reach::Down => "its port is down",
            Reach::NoPort => "it has no such port",
            Reach::Unconnected => "it has no RC queue pairs",
        })
    }
}

/// How far a device is from the GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distance {
    /// Less is nearer. 255: not known.
    pub steps: u8,
    /// In words, for example `same switch`.
    pub words: String,
}

impl Default for Distance {
    fn default() -> Self {
        Distance { steps: u8::MAX, words: "distance not known".into() }
    }
}

/// What is known of one port of a device before the device is opened.
#[derive(Clone, Debug, Default)]
pub struct Description {
    /// The device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// The device has the port.
    pub exists: bool,
    /// What the device speaks, if it says.
    pub protocol: Option<Protocol>,
    /// The port's link layer is InfiniBand's, and not Ethernet.
    pub infiniband: bool,
    /// The CPU does its work.
    pub software: bool,
    /// The port can carry packets.
    pub active: bool,
    /// InfiniBand's address; 0: none.
    pub lid: u16,
    /// Entries of its GID table that hold an address.
    pub gids: Vec<GidEntry>,
    /// IP addresses of its network interface, which iWARP uses.
    pub addresses: Vec<IpAddr>,
    /// The port's rate, Gb/s.
    pub gigabits: Option<f64>,
    /// From the GPU.
    pub distance: Distance,
}

/// What is wished of the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish {
    /// The family by which the hosts reach each other, if known.
    pub family: Option<Family>,
    /// The entry of the GID table that is to be used.
    pub gid_index: Option<u32>,
}

/// One port of a device with what it is worth.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What is known of it.
    pub description: Description,
    /// What it reaches.
    pub reach: Reach,
    /// What carries its packets.
    pub transport: Transport,
    /// The IP address that it would use.
    pub address: Option<IpAddr>,
}

impl Candidate {
    /// Judges a port.
    pub fn new(description: Description, wish: &Wish) -> Self {
        let d = &description;
        let entry = match wish.gid_index {
            Some(index) => d.gids.iter().find(|e| e.index == index),
            None => gid::choose(&d.gids, wish.family),
        };
        let transport = match d.protocol {
            Some(Protocol::Iwarp) => Transport::Iwarp,
            Some(Protocol::Ib) if d.infiniband => Transport::Infiniband,
            Some(Protocol::Ib) if entry.is_some_and(|e| e.kind == GidType::RoceV2) => Transport::RoceV2,
            Some(Protocol::Ib) => Transport::RoceV1,
            Some(Protocol::Other) | None => Transport::None,
        };
        let other = |ip: &IpAddr| is_other(ip, wish.family);
        let address = match transport {
            Transport::RoceV1 | Transport::RoceV2 => entry.map(GidEntry::ip),
            Transport::Iwarp => netdev_address(&d.addresses, wish.family),
            Transport::Infiniband | Transport::None => None,
        };
        let reach = match address {
            _ if transport == Transport::None => Reach::Unconnected,
            _ if !d.exists => Reach::NoPort,
            _ if !d.active => Reach::Down,
            // Without a LID an active port is reached by its GID.
            _ if transport == Transport::Infiniband && (d.lid != 0 || entry.is_some()) => Reach::Good,
            None => Reach::NoAddress,
            Some(ip) if is_link_local(&ip) => Reach::LinkLocal,
            Some(ip) if other(&ip) => Reach::OtherFamily,
            Some(_) => Reach::Good,
        };
        Candidate { reach, transport, address, description }
    }

    /// Its rate in Mb/s; 0 where it says none, and for a device in software, whose rate says nothing.
    fn megabits(&self) -> u64 {
        match self.description.gigabits {
            Some(rate) if !self.description.software => (rate * 1000.0) as u64,
            _ => 0,
        }
    }

    /// What it is ranked by, the least first. No two ports have the same.
    fn key(&self) -> (Reach, bool, Reverse<u64>, Transport, u8, &str, u8) {
        let d = &self.description;
        let speed = Reverse(self.megabits());
        (self.reach, d.software, speed, self.transport, d.distance.steps, &d.device, d.port)
    }

    /// What it is, for people.
    fn words(&self) -> String {
        let d = &self.description;
        let mut all = vec![self.transport.to_string()];
        all.extend(self.address.map(|ip| format!("address {ip}")));
        match (d.software, d.gigabits) {
            (true, _) => all.push("in software".into()),
            (false, Some(rate)) => all.push(format!("{rate} Gb/s")),
            (false, None) => {}
        }
        if d.distance.steps != u8::MAX {
            all.push(format!("distance from the GPU: {}", d.distance.words));
        }
        all.join(", ")
    }

    /// Why it comes after another.
    fn behind(&self, first: &Candidate) -> String {
        let (ours, theirs) = (&self.description, &first.description);
        if self.reach != first.reach {
            return self.reach.to_string();
        }
        if ours.software != theirs.software {
            return "it is in software".into();
        }
        if self.megabits() != first.megabits() {
            return match ours.gigabits {
                Some(rate) => format!("{rate} Gb/s is slower"),
                None => "it says no speed".into(),
            };
        }
        if self.transport != first.transport {
            return format!("{} comes after {}", self.transport, first.transport);
        }
        if ours.distance.steps != theirs.distance.steps {
            return format!("it is farther from the GPU ({})", ours.distance.words);
        }
        "its name comes later".into()
    }
}

/// All devices of a host, the one to take first.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    ranked: Vec<Candidate>,
}

impl Choice {
    /// Ranks what is there, listed in whatever order.
    pub fn new(descriptions: impl IntoIterator<Item = Description>, wish: &Wish) -> Self {
        let mut ranked: Vec<_> = descriptions.into_iter().map(|d| Candidate::new(d, wish)).collect();
        ranked.sort_by(|a, b| a.key().cmp(&b.key()));
        Choice { ranked }
    }

    /// All, the best first.
    pub fn ranked(&self) -> &[Candidate] {
        &self.ranked
    }

    /// The best, if it is active and has reliable connected queue pairs. It may lack an address if all do.
    pub fn taken(&self) -> Option<&Candidate> {
        self.ranked.first().filter(|c| c.reach < Reach::Down)
    }

    /// Names of those nearest to the GPU that may stand side by side as links of one queue pair: they reach as much as the best
    /// device, over the same transport. In the order of the names, so that two hosts with the same devices pair them alike.
    pub fn near(&self) -> Vec<&str> {
        let Some(first) = self.taken() else { return Vec::new() };
        let worth = |c: &Candidate| (c.reach, c.transport, c.description.software);
        let alike = || self.ranked.iter().filter(|c| worth(c) == worth(first)).map(|c| &c.description);
        let least = alike().map(|d| d.distance.steps).min();
        let mut names: Vec<_> =
            alike().filter(|d| Some(d.distance.steps) == least).map(|d| &*d.device).collect();
        names.sort_unstable();
        names
    }

    /// Why `taken` was taken, and why each other one was not: one line.
    pub fn why(&self, taken: &str) -> String {
        let Some(first) = self.ranked.iter().find(|c| c.description.device == taken) else {
            return format!("{taken} is taken");
        };
        let others = self.ranked.iter().filter(|c| c.description.device != taken).map(|c| {
            let why = match c.key() < first.key() {
                // It ranked higher and could not be opened.
                true => "it does not open".into(),
                false => c.behind(first),
            };
            format!("; {} not: {why}", c.description.device)
        });
        let note = if first.reach == Reach::Good { String::new() } else { format!(" ({})", first.reach) };
        format!("{taken} is taken: {}{note}{}", first.words(), others.collect::<String>())
    }

    /// One line for people: which device is taken and why, or that none can be.
    pub fn report(&self) -> String {
        match self.taken() {
            Some(first) => self.why(&first.description.device),
            None if self.ranked.is_empty() => "no RDMA device".into(),
            None => {
                let each = self.ranked.iter().map(|c| format!("{}: {}", c.description.device, c.reach));
                format!("no RDMA device can be taken: {}", each.collect::<Vec<_>>().join("; "))
            }
        }
    }
}

/// An address that is not of the family by which the hosts reach each other.
fn is_other(ip: &IpAddr, family: Option<Family>) -> bool {
    family.is_some_and(|f| f != if ip.is_ipv4() { Family::V4 } else { Family::V6 })
}

fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The address that a device takes of those of its network interface, where its GIDs hold none.
pub(super) fn netdev_address(addresses: &[IpAddr], family: Option<Family>) -> Option<IpAddr> {
    addresses.iter().min_by_key(|ip| (is_link_local(ip), is_other(ip, family), **ip)).copied()
}

/// The network interface of a device that speaks iWARP: its one GID begins with the interface's hardware address.
pub fn iwarp_netdev(gids: &[GidEntry], net: &Path) -> Option<String> {
    if let Some(named) = gids.iter().find_map(|e| e.netdev.clone()) {
        return Some(named);
    }
    let hardware = &gids.first()?.gid.0[..6];
    let wanted = hardware.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(":");
    let mut names: Vec<_> = std::fs::read_dir(net).ok()?.flatten().map(|e| e.file_name()).collect();
    names.sort_unstable();
    let has = |name: &String| {
        gid::text(&net.join(name).join("address")).is_ok_and(|text| text.trim().eq_ignore_ascii_case(&wanted))
    };
    names.into_iter().filter_map(|name| name.into_string().ok()).find(has)
}

/// The network interface that lies beside a port of the device whose folder in sysfs this is: an adapter's function has one for each
/// port, which on InfiniBand is that of IPoIB.
pub fn netdev_of_port(device: &Path, port: u8, net: &Path) -> Option<String> {
    let mut names: Vec<_> = std::fs::read_dir(device.join("device/net")).ok()?.flatten().collect();
    names.sort_unstable_by_key(|entry| entry.file_name());
    let is_of_port = |name: &String| {
        let text = gid::text(&net.join(name).join("dev_port"));
        text.ok()
            .and_then(|text| text.trim().parse::<u8>().ok())
            .is_none_or(|at| at.checked_add(1) == Some(port))
    };
    names.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).find(is_of_port)
}

/// What `node_desc` of a device of software iWARP says. Such a device may seem to lie on PCI, below its network interface.
pub const SOFTWARE_IWARP: &str = "Software iWARP stack";

/// True for devices whose work the CPU does: soft-RoCE has the file `parent`, software iWARP its description.
fn in_software(device: &Path) -> bool {
    device.join("parent").exists()
        || gid::text(&device.join("node_desc")).is_ok_and(|text| text.trim() == SOFTWARE_IWARP)
        || std::fs::canonicalize(device)
            .is_ok_and(|real| real.components().any(|c| c.as_os_str() == "virtual"))
}

/// Reads what the sysfs at `sys` says of a device's port. What can't be read is as what is not there. `addresses` gives the IP
/// addresses of a network interface, by its name. The distance is the caller's to add.
pub fn describe(sys: &Path, device: &str, port: u8, addresses: impl Fn(&str) -> Vec<IpAddr>) -> Description {
    let folder = sys.join("class/infiniband").join(device);
    let (at, net) = (folder.join("ports").join(port.to_string()), sys.join("class/net"));
    let read = |path: &Path| gid::text(path).ok().map(|text| text.trim().to_owned());
    let protocol = read(&folder.join("node_type")).and_then(|text| Protocol::of_node_type(&text));
    let gids = gid::table(&at, &net);
    let netdev = (protocol == Some(Protocol::Iwarp)).then(|| iwarp_netdev(&gids, &net)).flatten();
    Description {
        device: device.into(),
        port,
        exists: at.exists(),
        protocol,
        infiniband: read(&at.join("link_layer")).as_deref() == Some("InfiniBand"),
        software: in_software(&folder),
        active: read(&at.join("state")).is_some_and(|s| s.starts_with("4:")),
        lid: read(&at.join("lid"))
            .and_then(|s| u16::from_str_radix(s.strip_prefix("0x")?, 16).ok())
            .unwrap_or(0),
        addresses: netdev.map(|name| addresses(&name)).unwrap_or_default(),
        gids,
        gigabits: read(&at.join("rate")).and_then(|text| rate(&text)),
        distance: Distance::default(),
    }
}

/// The rate in Gb/s of a text like `100 Gb/sec (4X EDR)`.
pub fn rate(text: &str) -> Option<f64> {
    let (number, unit) = text.split_once(' ')?;
    let rate: f64 = number.parse().ok()?;
    (unit.starts_with("Gb/sec") && (0.0..1e6).contains(&rate)).then_some(rate)
}

/// The names of the devices that the sysfs at `sys` shows, sorted.
pub fn names(sys: &Path) -> Vec<String> {
    let all = std::fs::read_dir(sys.join("class/infiniband")).into_iter().flatten().flatten();
    let mut names: Vec<_> = all.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
