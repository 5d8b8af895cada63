//! RDMA devices, ports and addresses.

use pushgate_link_verbs::choice::{Choice, Description, Distance, Reach, Transport, Wish, rate};
use pushgate_link_verbs::gid::{self, GidEntry, GidType};
use pushgate_link_verbs::kinds::Protocol;

use super::leading_number;
use crate::finding::Finding;
use crate::readings::{RdmaDevice, RdmaPort, Read, Readings};

/// The devices that the settings allow: those named, or all.
pub(super) fn chosen(r: &Readings) -> impl Iterator<Item = &RdmaDevice> {
    r.rdma.is().into_iter().flatten().filter(|d| r.wants.allows(&d.name))
}

/// Nobody asked for RDMA: neither a device, nor `qp = verbs`.
pub(super) fn none(r: &Readings) -> Option<Finding> {
    chosen(r).next().is_none().then(|| Finding::not_applicable("", "no RDMA device to look at"))
}

/// What keeps queue pairs from working: a failure where the settings ask for RDMA, a warning where a
/// device is there and nobody asked for it.
pub(super) fn wrong(
    r: &Readings,
    subject: &str,
    reading: impl Into<String>,
    remedy: impl Into<String>,
) -> Finding {
    match r.wants.verbs || !r.wants.devices.is_empty() {
        true => Finding::failed(subject, reading, remedy),
        false => Finding::warned(subject, reading, remedy),
    }
}

/// sysfs' number of an active port (`enum ib_port_state`).
const ACTIVE: u32 = 4;

fn is_active(port: &RdmaPort) -> bool {
    port.state.is().and_then(|s| leading_number(s)) == Some(ACTIVE)
}

pub(super) fn is_ethernet(port: &RdmaPort) -> bool {
    port.link_layer.is().is_some_and(|l| l == "Ethernet")
}

/// A finding for each port: of an active one what `look` says, of another that it is down.
pub(super) fn each_port(
    r: &Readings,
    look: impl Fn(&str, &RdmaDevice, &RdmaPort) -> Finding,
) -> Vec<Finding> {
    let mut findings: Vec<_> = none(r).into_iter().collect();
    for device in chosen(r) {
        for port in &device.ports {
            let subject = format!("{}/{}", device.name, port.number);
            findings.push(match is_active(port) {
                true => look(&subject, device, port),
                false => Finding::not_applicable(&subject, "the port is not active: see rdma-port"),
            });
        }
    }
    if findings.is_empty() {
        findings.push(Finding::not_applicable("", "no RDMA device has a port"));
    }
    findings
}

/// As [`each_port`]; a port of an iWARP device is not looked at, for what the check is about is not its own.
pub(super) fn each_port_but_iwarp(
    r: &Readings,
    look: impl Fn(&str, &RdmaDevice, &RdmaPort) -> Finding,
) -> Vec<Finding> {
    each_port(r, |subject, device, port| match device.is_iwarp() {
        true => Finding::not_applicable(subject, "iWARP: TCP connections of its network interface"),
        false => look(subject, device, port),
    })
}

/// A queue pair takes a reliable connection (docs/rdma.md), which InfiniBand, RoCE and iWARP have: node types 1 and 4 of the
/// kernel's `enum rdma_node_type`. EFA is 7.
pub fn devices(r: &Readings) -> Vec<Finding> {
    let load = "load the RDMA device's driver and ib_uverbs (modprobe mlx5_ib, or rdma_rxe and `rdma link add \
                NAME type rxe netdev INTERFACE`), or use qp = tcp, which needs none";
    let all = match &r.rdma {
        Read::Is(all) => all.as_slice(),
        Read::Absent => &[],
        Read::Unreadable(why) => {
            return vec![Finding::warned("", why, "run on a host whose /sys is mounted")];
        }
    };
    if let Some(name) = r.wants.devices.iter().find(|name| all.iter().all(|d| d.name != **name)) {
        let there: Vec<_> = all.iter().map(|d| d.name.as_str()).collect();
        let there = if there.is_empty() { "none".into() } else { there.join(", ") };
        let reading = format!("ib-dev is {name}, and this host has {there}");
        return vec![Finding::failed(name, reading, "name a device that is there, or leave ib-dev at auto")];
    }
    if all.is_empty() {
        let reading = "no RDMA device (/sys/class/infiniband has none)";
        return vec![match r.wants.verbs {
            true => Finding::failed("", reading, load),
            false => Finding::not_applicable("", format!("{reading}, and qp = local and qp = tcp need none")),
        }];
    }
    let is_usable = |d: &RdmaDevice| matches!(d.protocol(), Some(Protocol::Ib | Protocol::Iwarp));
    let another = chosen(r).any(is_usable);
    let look = |d: &RdmaDevice| {
        let place = if d.pci.is_some() { "on PCI" } else { "in software" };
        match &d.node_type {
            Read::Is(_) if is_usable(d) => {
                let what = if d.is_iwarp() { "an iWARP device" } else { "a channel adapter" };
                Finding::passed(&d.name, format!("{what} {place}, ports: {}", d.ports.len()))
            }
            Read::Is(t) => {
                let reading = format!("node type {t}: not InfiniBand, RoCE or iWARP");
                let remedy = "name an InfiniBand, RoCE or iWARP device by ib-dev; EFA connects otherwise";
                match another {
                    true => Finding::warned(&d.name, reading + "; another is", remedy),
                    false => wrong(r, &d.name, reading, remedy),
                }
            }
            Read::Absent => Finding::warned(&d.name, "its kind is unknown: it has no node_type", load),
            Read::Unreadable(why) => Finding::warned(&d.name, why, load),
        }
    };
    chosen(r).map(look).collect()
}

/// The device that `ib-dev = auto` takes, and why not another one. How far each is from a GPU is not looked at here: `pushgate
/// topo` does.
pub fn choice(r: &Readings) -> Vec<Finding> {
    if let Some(none) = none(r) {
        return vec![none];
    }
    if !r.wants.devices.is_empty() {
        return vec![Finding::not_applicable("", format!("ib-dev names {}", r.wants.devices.join(", ")))];
    }
    let describe = |d: &RdmaDevice| {
        let port = d.ports.iter().find(|p| p.number == r.wants.port);
        let text = |read: fn(&RdmaPort) -> &Read<String>| port.and_then(|p| read(p).is());
        let lid = text(|p| &p.lid).and_then(|lid| u16::from_str_radix(lid.strip_prefix("0x")?, 16).ok());
        let netdev = port.and_then(|p| r.netdevs.get(p.netdev.as_ref()?));
        Description {
            device: d.name.clone(),
            port: r.wants.port,
            exists: port.is_some(),
            protocol: d.protocol(),
            infiniband: text(|p| &p.link_layer).is_some_and(|layer| layer == "InfiniBand"),
            software: d.pci.is_none(),
            active: port.is_some_and(is_active),
            lid: lid.unwrap_or(0),
            gids: port.map(|p| p.gids.clone()).unwrap_or_default(),
            addresses: netdev.and_then(|n| n.addresses.is().cloned()).unwrap_or_default(),
            gigabits: text(|p| &p.rate).and_then(|text| rate(text)),
            distance: Distance::default(),
        }
    };
    let wish = Wish { family: None, gid_index: r.wants.gid_index };
    let choice = Choice::new(chosen(r).map(describe), &wish);
    let remedy = match choice.taken().map(|taken| taken.transport) {
        Some(Transport::Infiniband) => {
            "look whether a subnet manager (opensm) runs, which gives the port its LID, or name a device by ib-dev"
        }
        _ => {
            "have its port active, with an IP address that reaches beyond the link (see rdma-port, rdma-gid), or name a device \
             by ib-dev"
        }
    };
    vec![match choice.taken() {
        Some(taken) if taken.reach == Reach::Good => Finding::passed("", choice.report()),
        Some(_) => Finding::warned("", choice.report(), remedy),
        // Ports and devices have checks of their own.
        None => Finding::not_applicable("", choice.report() + ": see rdma-port and rdma-devices"),
    }]
}

/// rdma_cm brings the queue pairs of iWARP devices up, and those of others where the settings say so: the module rdma_ucm, its
/// device file, and librdmacm.
pub fn cm(r: &Readings) -> Vec<Finding> {
    if let Some(none) = none(r) {
        return vec![none];
    }
    let cm = &r.rdma_cm;
    let lack = match (&cm.module, &cm.device, &cm.library) {
        (Read::Absent, ..) => Some(("the module rdma_ucm is not loaded".into(), "modprobe rdma_ucm")),
        (_, Read::Absent, _) => Some((
            "/dev/infiniband/rdma_cm is not there".into(),
            "look whether udev runs; in a container, pass the device in (--device /dev/infiniband/rdma_cm)",
        )),
        (_, Read::Unreadable(why), _) => Some((
            why.clone(),
            "let this user read and write it: chmod 0666 /dev/infiniband/rdma_cm, as rdma-core's udev rules do",
        )),
        (.., Read::Unreadable(why)) => Some((
            format!("librdmacm.so.1 can't be opened: {why}"),
            "install librdmacm1 (rdma-core's librdmacm)",
        )),
        (Read::Unreadable(why), ..) => Some((why.clone(), "run on a host whose /sys is mounted")),
        _ => None,
    };
    let needed: Vec<_> = chosen(r).filter(|d| d.is_iwarp()).map(|d| &*d.name).collect();
    let who = match &needed[..] {
        [] => "no device here needs it".into(),
        needed => {
            format!("{} connect{} by it alone", needed.join(", "), if needed.len() == 1 { "s" } else { "" })
        }
    };
    vec![match lack {
        None if cm.library.is().is_none() => {
            Finding::passed("", format!("module and device are there, and the library was not asked; {who}"))
        }
        None => Finding::passed("", format!("module, device and library are there; {who}")),
        Some((lack, remedy)) if needed.is_empty() => Finding::warned("", format!("{lack}; {who}"), remedy),
        Some((lack, remedy)) => wrong(r, "", format!("{lack}; {who}"), remedy),
    }]
}

/// Opened by libibverbs, for a queue pair is: the library, a provider, /dev/infiniband/uverbsN.
pub fn verbs(r: &Readings) -> Vec<Finding> {
    let mut findings: Vec<_> = none(r).into_iter().collect();
    for (device, port) in chosen(r).flat_map(|d| d.ports.iter().map(move |p| (d, p))) {
        let subject = format!("{}/{}", device.name, port.number);
        findings.push(match &port.verbs {
            Read::Is(state) => {
                Finding::passed(&subject, format!("opens; messages of up to {} bytes", state.message))
            }
            Read::Absent => Finding::not_applicable(&subject, "libibverbs was not asked"),
            Read::Unreadable(why) => wrong(
                r,
                &subject,
                why,
                "install libibverbs1 and ibverbs-providers, load ib_uverbs, and let this user open \
                 /dev/infiniband/uverbs* (mode 0666; in a container, pass the devices in)",
            ),
        });
    }
    findings
}

/// Whether a record may follow its payload at once: only a device that is known to place WRITEs in the
/// order of their posting allows that.
pub fn write_order(r: &Readings) -> Vec<Finding> {
    each_port(r, |subject, _, port| match (&port.verbs, r.wants.assumes_order) {
        (Read::Is(state), _) if state.in_order => {
            Finding::passed(subject, "places WRITEs in order: a record follows its payload at once")
        }
        (Read::Is(_), false) => Finding::passed(
            subject,
            "may place WRITEs out of order: a PUT, and a SEND without immediate data, waits for its payload's \
             completion",
        ),
        (Read::Is(_), true) => Finding::warned(
            subject,
            "write-order is assume, and nothing says that the device places WRITEs in order",
            "set write-order to auto, unless neither the device nor the fabric changes the order of packets \
             (adaptive routing, out-of-order placement)",
        ),
        _ => Finding::not_applicable(subject, "libibverbs did not open the device: see rdma-verbs"),
    })
}

/// Active, as the kernel says (`4: ACTIVE`). Down is a failure if no other device could be taken.
pub fn port(r: &Readings) -> Vec<Finding> {
    let mut findings: Vec<_> = none(r).into_iter().collect();
    let another = chosen(r).flat_map(|d| &d.ports).any(|p| p.number == r.wants.port && is_active(p));
    for device in chosen(r) {
        if device.ports.iter().all(|p| p.number != r.wants.port) && !r.wants.devices.is_empty() {
            let numbers: Vec<_> = device.ports.iter().map(|p| p.number.to_string()).collect();
            let reading = format!("ib-port is {}, and its ports are {}", r.wants.port, numbers.join(", "));
            findings.push(Finding::failed(&device.name, reading, "set ib-port to one of them"));
        }
        for port in &device.ports {
            let subject = format!("{}/{}", device.name, port.number);
            let layer = port.link_layer.is().map_or("unknown link layer", String::as_str);
            findings.push(match &port.state {
                Read::Is(_) if is_active(port) => {
                    let known = ["Ethernet", "InfiniBand"].contains(&layer);
                    match known {
                        true => Finding::passed(&subject, format!("active, {layer}")),
                        false => Finding::warned(
                            &subject,
                            format!("active, but the link layer is `{layer}`"),
                            "InfiniBand and Ethernet are known; look at the driver",
                        ),
                    }
                }
                Read::Is(state) => {
                    let physical = port.phys_state.is().map_or("not known", String::as_str);
                    let reading = format!("the port is {state}, physically {physical}, {layer}");
                    // An InfiniBand port needs no interface, and one of IPoIB comes up after the port.
                    let remedy = match is_ethernet(port) {
                        true => format!(
                            "bring its interface up: ip link set dev {} up; then look at the cable",
                            interface(port)
                        ),
                        false => {
                            "look at the cable, and whether a subnet manager (opensm) runs: INIT waits for it"
                                .into()
                        }
                    };
                    match another {
                        true => Finding::warned(&subject, reading + "; another is active", remedy),
                        false => wrong(r, &subject, reading, remedy),
                    }
                }
                Read::Absent => {
                    Finding::warned(&subject, "the kernel does not say its state", "look with ibv_devinfo")
                }
                Read::Unreadable(why) => Finding::warned(&subject, why, "look with ibv_devinfo"),
            });
        }
    }
    findings
}

/// The entry that a queue pair would take: the one named, else the choice of `gid::choose`.
pub(super) fn taken<'a>(r: &Readings, port: &'a RdmaPort) -> Option<&'a GidEntry> {
    match r.wants.gid_index {
        Some(index) => port.gids.iter().find(|e| e.index == index),
        None => gid::choose(&port.gids, None),
    }
}

fn interface(port: &RdmaPort) -> &str {
    port.netdev.as_deref().unwrap_or("NAME")
}

/// At least one entry, and the one named by gid-index.
pub fn gid(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, _, port| match (taken(r, port), r.wants.gid_index) {
        (Some(entry), _) => {
            let of = entry.netdev.as_deref().map_or(String::new(), |n| format!(" of {n}"));
            Finding::passed(
                subject,
                format!("GID {}: {}{of}; entries: {}", entry.index, entry.gid, port.gids.len()),
            )
        }
        (None, Some(index)) if !port.gids.is_empty() => {
            let there: Vec<_> = port.gids.iter().map(|e| format!("{} ({})", e.index, e.gid)).collect();
            let reading =
                format!("gid-index is {index}, which holds no address; there is {}", there.join(", "));
            wrong(r, subject, reading, "set gid-index to one of these, or leave it at auto")
        }
        (None, _) if is_ethernet(port) => wrong(
            r,
            subject,
            "no GID: no entry of the table holds an address",
            format!(
                "give the interface an address (ip address add ADDRESS/LENGTH dev {0}) and let it not be the \
                 inactive slave of a bond; in a container, move interface and RDMA device to one namespace",
                interface(port)
            ),
        ),
        (None, _) => {
            wrong(r, subject, "no GID: the table is empty", "look whether a subnet manager (opensm) runs")
        }
    })
}

/// RoCE v1 packets are Ethernet frames that no router forwards (Annex A16 to the InfiniBand
/// specification); v2 are UDP (Annex A17).
pub fn gid_type(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, _, port| {
        if !is_ethernet(port) {
            return Finding::not_applicable(subject, "not Ethernet");
        }
        let Some(entry) = taken(r, port) else {
            return Finding::not_applicable(subject, "no GID: see rdma-gid");
        };
        let v2 = port.gids.iter().filter(|e| e.kind == GidType::RoceV2).count();
        match (entry.kind, v2) {
            (GidType::RoceV2, _) => Finding::passed(subject, format!("GID {} is RoCE v2", entry.index)),
            (_, 0) => Finding::warned(
                subject,
                "RoCE v1 alone: reaches hosts of the same Ethernet only",
                "have the driver offer RoCE v2 (mlx5 does; with NVIDIA's own mlx4 driver: options mlx4_core roce_mode=2), where peers are behind a router",
            ),
            _ => Finding::warned(
                subject,
                format!("gid-index {} is RoCE v1, though there are entries of v2", entry.index),
                "leave gid-index at auto, or name an entry of RoCE v2",
            ),
        }
    })
}

/// The address must be the interface's: it is where the peer's packets go. One of the link alone
/// serves hosts of that link.
pub fn address(r: &Readings) -> Vec<Finding> {
    each_port(r, |subject, device, port| {
        if device.is_iwarp() {
            return iwarp_address(r, subject, port);
        }
        if !is_ethernet(port) {
            return Finding::not_applicable(subject, "InfiniBand: peers are reached by LID");
        }
        let Some(entry) = taken(r, port) else {
            return Finding::not_applicable(subject, "no GID: see rdma-gid");
        };
        let Some(name) = entry.netdev.as_ref().or(port.netdev.as_ref()) else {
            return Finding::warned(
                subject,
                format!("GID {} ({}) belongs to no interface that is seen here", entry.index, entry.gid),
                "run where its interface is: in the same network namespace",
            );
        };
        let add = format!("ip address add ADDRESS/LENGTH dev {name}");
        let addresses = r.netdevs.get(name).map(|n| &n.addresses);
        let reach = |known: &str| match entry.link_local() {
            true => Finding::warned(
                subject,
                format!("only a link-local address backs GID {}: {}{known}", entry.index, entry.gid),
                format!("give the interface an address that reaches further: {add}"),
            ),
            false => {
                Finding::passed(subject, format!("GID {} is {} of {name}{known}", entry.index, entry.gid))
            }
        };
        match addresses {
            Some(Read::Is(all)) if all.contains(&entry.ip()) => reach(""),
            Some(Read::Is(all)) => {
                let there: Vec<_> = all.iter().map(ToString::to_string).collect();
                let there = if there.is_empty() { "no address".into() } else { there.join(", ") };
                wrong(
                    r,
                    subject,
                    format!("no address of {name} backs GID {} ({}): it has {there}", entry.index, entry.gid),
                    format!("give the interface an address: {add}"),
                )
            }
            Some(Read::Unreadable(why)) => {
                Finding::warned(subject, why, format!("look with: ip address show dev {name}"))
            }
            _ => reach("; its interface's addresses were not asked"),
        }
    })
}

/// An iWARP device has the addresses of its network interface.
fn iwarp_address(r: &Readings, subject: &str, port: &RdmaPort) -> Finding {
    let Some(name) = &port.netdev else {
        let remedy = "run where its interface is: in the same network namespace";
        return Finding::warned(subject, "no interface with its hardware address is seen here", remedy);
    };
    match r.netdevs.get(name).map(|n| &n.addresses) {
        Some(Read::Is(all)) if all.is_empty() => wrong(
            r,
            subject,
            format!("{name} has no address"),
            format!("give the interface an address: ip address add ADDRESS/LENGTH dev {name}"),
        ),
        Some(Read::Is(all)) => {
            let all: Vec<_> = all.iter().map(ToString::to_string).collect();
            Finding::passed(subject, format!("iWARP at {} of {name}", all.join(", ")))
        }
        Some(Read::Unreadable(why)) => {
            Finding::warned(subject, why, format!("look with: ip address show dev {name}"))
        }
        _ => Finding::passed(subject, format!("iWARP over {name}, whose addresses were not asked")),
    }
}
