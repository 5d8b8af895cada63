//! RDMA devices, ports and addresses.

use pushgate_proxy::link::verbs::gid::{self, GidEntry, GidType};

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

/// A queue pair takes a reliable connection (docs/rdma.md), which channel adapters of InfiniBand and
/// RoCE have: node type 1 of the kernel's `enum rdma_node_type`. iWARP is 4 (RNIC), EFA 7.
pub fn devices(r: &Readings) -> Vec<Finding> {
    let load = "load the RDMA device's driver and ib_uverbs (modprobe mlx5_ib, or rdma_rxe and `rdma link add \
                NAME type rxe netdev INTERFACE`), or use qp = local on one host";
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
            false => Finding::not_applicable("", format!("{reading}, and qp = local needs none")),
        }];
    }
    let is_adapter = |d: &RdmaDevice| d.node_type.is().and_then(|t| leading_number(t)) == Some(1);
    let another = chosen(r).any(is_adapter);
    let look = |d: &RdmaDevice| {
        let kind = if d.pci.is_some() { "on PCI" } else { "in software" };
        match &d.node_type {
            Read::Is(_) if is_adapter(d) => {
                Finding::passed(&d.name, format!("a channel adapter {kind}, ports: {}", d.ports.len()))
            }
            Read::Is(t) => {
                let reading = format!("node type {t}: not InfiniBand or RoCE");
                let remedy = "name an InfiniBand or RoCE device by ib-dev; iWARP and EFA connect otherwise";
                match another {
                    true => Finding::warned(&d.name, reading + "; another is", remedy),
                    false => wrong(r, &d.name, reading, remedy),
                }
            }
            Read::Absent => Finding::warned(&d.name, "it does not say of which kind it is", load),
            Read::Unreadable(why) => Finding::warned(&d.name, why, load),
        }
    };
    chosen(r).map(look).collect()
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
                    let remedy = match (&port.netdev, is_ethernet(port)) {
                        (Some(netdev), _) => format!(
                            "bring its interface up: ip link set dev {netdev} up; then look at the cable"
                        ),
                        (None, true) => {
                            "bring its network interface up (ip link set dev NAME up); then look at the cable"
                                .into()
                        }
                        (None, false) => {
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
    each_port(r, |subject, _, port| match (taken(r, port), r.wants.gid_index) {
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
    each_port(r, |subject, _, port| {
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
    each_port(r, |subject, _, port| {
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
                format!("only a link-local address is behind GID {}: {}{known}", entry.index, entry.gid),
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
                    format!(
                        "no address of {name} is behind GID {} ({}): it has {there}",
                        entry.index, entry.gid
                    ),
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
