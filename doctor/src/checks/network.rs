//! The network under RoCE: MTU, pause frames, congestion notification, priorities.

use super::rdma::{each_port_but_iwarp, is_ethernet, taken};
use crate::finding::Finding;
use crate::readings::{Dcb, Netdev, RdmaDevice, RdmaPort, Read, Readings};

/// What RoCE takes of a frame beside the payload, as the kernel reckons: GRH 40, UDP 8, BTH 12,
/// extended headers 4 and 28, ICRC 4 (`iboe_get_mtu`, include/rdma/ib_addr.h).
const ROCE_HEADERS: u32 = 40 + 8 + 12 + 4 + 28 + 4;

/// The greatest path MTU of InfiniBand, and what is wanted.
const BEST: u32 = 4096;

/// The path MTU that an interface's MTU leaves: of 256, 512, 1024, 2048, 4096.
fn path_mtu(netdev: u32) -> u32 {
    let room = netdev.saturating_sub(ROCE_HEADERS);
    [4096, 2048, 1024, 512].into_iter().find(|mtu| *mtu <= room).unwrap_or(256)
}

fn netdev<'a>(r: &'a Readings, port: &RdmaPort) -> Option<(String, &'a Netdev)> {
    let name = taken(r, port).and_then(|e| e.netdev.clone()).or_else(|| port.netdev.clone())?;
    r.netdevs.get(&name).map(|n| (name, n))
}

/// 4096, for every packet costs the device the same; 2048 is usual on InfiniBand and passes there.
/// An interface of MTU 1500 leaves 1024.
pub fn mtu(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, _, port| {
        let active = port.verbs.is().map(|v| (v.mtu, v.max_mtu));
        if !is_ethernet(port) {
            return match active {
                Some((mtu, _)) if mtu >= 2048 => Finding::passed(subject, format!("path MTU {mtu}")),
                Some((mtu, max)) => Finding::warned(
                    subject,
                    format!("path MTU {mtu}; the port can have {max}"),
                    "have the subnet manager set a larger MTU for the partition (opensm: mtu=5 is 4096)",
                ),
                None => Finding::not_applicable(subject, "the port's MTU was not read: see rdma-verbs"),
            };
        }
        let Some((name, dev)) = netdev(r, port) else {
            return Finding::warned(
                subject,
                "no interface of this network namespace backs it, so its MTU is not known",
                "run in the namespace of the interface",
            );
        };
        let remedy = format!(
            "ip link set dev {name} mtu 4200 (or 9000), at all hosts of the network and with frames as large at its switches"
        );
        let of_netdev = match &dev.mtu {
            Read::Is(mtu) => *mtu,
            Read::Absent => return Finding::warned(subject, format!("{name} does not say its MTU"), remedy),
            Read::Unreadable(why) => return Finding::warned(subject, why, remedy),
        };
        let allowed = path_mtu(of_netdev);
        let mtu = active.map_or(allowed, |(mtu, _)| mtu);
        match active {
            _ if mtu >= BEST => Finding::passed(subject, format!("path MTU {mtu}, {name} has {of_netdev}")),
            Some((_, max)) if allowed > mtu && max > mtu => Finding::warned(
                subject,
                format!("path MTU {mtu}, though {name} has MTU {of_netdev}, which leaves room for {allowed}"),
                format!("set the interface's MTU anew: ip link set dev {name} mtu {of_netdev}"),
            ),
            Some((_, max)) if mtu == max => {
                Finding::passed(subject, format!("path MTU {mtu}, the port's greatest"))
            }
            _ => Finding::warned(subject, format!("path MTU {mtu}, for {name} has MTU {of_netdev}"), remedy),
        }
    })
}

/// What the traffic class of the settings stands for.
struct Class {
    dscp: u8,
    ecn: u8,
    priority: u8,
    by: &'static str,
}

/// The upper six bits are the DSCP, the lower two ECN (RFC 2474, RFC 3168). The interface's APP
/// table (selector 5, IEEE 802.1Qcd) gives a DSCP its priority; without an entry it has 0.
fn class(traffic_class: u8, dcb: &Dcb) -> Class {
    const DSCP: u8 = 5;
    let dscp = traffic_class >> 2;
    let entry =
        dcb.apps.iter().find(|(selector, _, protocol)| *selector == DSCP && *protocol == u16::from(dscp));
    let (priority, by) = match entry {
        Some((_, priority, _)) => (*priority & 7, "by the APP table"),
        None => (0, "without an entry in the APP table"),
    };
    Class { dscp, ecn: traffic_class & 3, priority, by }
}

fn list(bits: u8) -> String {
    let all: Vec<_> = (0..8).filter(|p| bits >> p & 1 != 0).map(|p| p.to_string()).collect();
    if all.is_empty() { "none".into() } else { all.join(", ") }
}

const LOOK: &str = "look with `dcb pfc show dev NAME`, `dcb app show dev NAME` or mlnx_qos -i NAME";

/// The interface's DCB, or why there is nothing to say.
fn dcb<'a>(
    r: &'a Readings,
    subject: &str,
    device: &RdmaDevice,
    port: &RdmaPort,
) -> Result<(String, &'a Netdev, &'a Dcb), Finding> {
    if !is_ethernet(port) {
        return Err(Finding::not_applicable(subject, "InfiniBand has credits of its own"));
    }
    if device.pci.is_none() {
        return Err(Finding::not_applicable(
            subject,
            "a software device: the interface below it has no say in RDMA",
        ));
    }
    let Some((name, dev)) = netdev(r, port) else {
        return Err(Finding::warned(subject, "can't be read: no interface backs the port", LOOK));
    };
    match &dev.dcb {
        Read::Is(dcb) => Ok((name, dev, dcb)),
        Read::Absent => {
            Err(Finding::warned(subject, format!("can't be read: {name}'s driver has no DCB"), LOOK))
        }
        Read::Unreadable(why) => Err(Finding::warned(subject, format!("can't be read: {why}"), LOOK)),
    }
}

/// A RoCE network drops packets unless pause frames (802.1Qbb) are on for the priority that RDMA
/// packets have; a drop costs a timeout.
pub fn pfc(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, device, port| {
        let (name, _, dcb) = match dcb(r, subject, device, port) {
            Ok(found) => found,
            Err(finding) => return finding,
        };
        let Some(on) = dcb.pfc else {
            return Finding::warned(
                subject,
                format!("can't be read: {name}'s driver says nothing of PFC"),
                LOOK,
            );
        };
        let class = class(r.wants.traffic_class, dcb);
        let (p, tc) = (class.priority, r.wants.traffic_class);
        let reading = format!("PFC on for priorities {}; traffic-class {tc} has priority {p}", list(on));
        if on >> p & 1 != 0 {
            return Finding::passed(subject, reading);
        }
        let dscp = |e: &&(u8, u8, u16)| e.0 == 5 && e.2 < 64 && on >> (e.1 & 7) & 1 != 0;
        match dcb.apps.iter().find(dscp) {
            Some((_, priority, dscp)) => Finding::warned(
                subject,
                reading,
                format!(
                    "set traffic-class to {} (DSCP {dscp}), which has priority {priority}",
                    dscp << 2 | 2
                ),
            ),
            None => Finding::warned(
                subject,
                reading,
                format!(
                    "turn it on at hosts and switches (dcb pfc set dev {name} prio-pfc {p}:on, or mlnx_qos -i {name} --pfc), \
                     or rely on ECN alone, knowing that packets are dropped under load"
                ),
            ),
        }
    })
}

/// DCQCN needs the NIC to notify and to react (`roce_np`, `roce_rp` in mlx5's sysfs), per priority.
pub fn ecn(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, device, port| {
        let (name, dev, priority) = match dcb(r, subject, device, port) {
            Ok((name, dev, dcb)) => (name, dev, class(r.wants.traffic_class, dcb).priority),
            Err(finding) => return finding,
        };
        let remedy = format!(
            "echo 1 > /sys/class/net/{name}/ecn/roce_np/enable/{priority}, and into roce_rp/enable/{priority}, and ECN marking at the switches"
        );
        match &dev.ecn {
            Read::Is(ecn) => {
                let reading = format!(
                    "notifies on priorities {}, reacts on {}; RDMA has priority {priority}",
                    list(ecn.notifies),
                    list(ecn.reacts)
                );
                match (ecn.notifies & ecn.reacts) >> priority & 1 {
                    1 => Finding::passed(subject, reading),
                    _ => Finding::warned(subject, reading, remedy),
                }
            }
            Read::Absent => Finding::warned(
                subject,
                format!(
                    "can't be read: {name} has no folder ecn in sysfs (the kernel's own mlx5 driver has none)"
                ),
                "look with the vendor's tool (mlxreg, niccli); NVIDIA's NICs have it on by default",
            ),
            Read::Unreadable(why) => Finding::warned(subject, format!("can't be read: {why}"), remedy),
        }
    })
}

/// Traffic class, DSCP, priority and the interface's traffic class; failing nobody. ECN bits of 0
/// mean that the NIC puts its own there, or that switches do not mark these packets (RFC 3168).
pub fn traffic_class(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, device, port| {
        let dcb = match dcb(r, subject, device, port) {
            Ok((_, _, dcb)) => dcb,
            Err(finding) => return finding,
        };
        let c = class(r.wants.traffic_class, dcb);
        let tc = dcb
            .prio_tc
            .map_or(String::new(), |t| format!(", traffic class {} of the NIC", t[usize::from(c.priority)]));
        let reading = format!(
            "traffic-class {}: DSCP {}, ECN bits {}, priority {} ({}){tc}",
            r.wants.traffic_class, c.dscp, c.ecn, c.priority, c.by
        );
        let mapped = dcb.apps.iter().any(|e| e.0 == 5);
        match c.by {
            "without an entry in the APP table" if mapped && r.wants.traffic_class != 0 => Finding::warned(
                subject,
                reading,
                "the table has other DSCPs: name one of them by traffic-class (4 times the DSCP, plus 2 for ECN), or add this one (dcb app add)",
            ),
            _ => Finding::passed(subject, reading),
        }
    })
}

/// An administrator may give packets of RoCE a ToS by configfs (`default_roce_tos`; the script cma_roce_tos of rdma-core writes it). Only
/// rdma_cm reads it: queue pairs that come up without it have `traffic-class`, 0 unless that is set.
pub fn tos(r: &Readings) -> Vec<Finding> {
    each_port_but_iwarp(r, |subject, device, port| {
        if !is_ethernet(port) {
            return Finding::not_applicable(
                subject,
                "InfiniBand has service levels, which its subnet manager chooses",
            );
        }
        let wanted = r.wants.traffic_class;
        match port.tos {
            Read::Is(tos) if tos == wanted => {
                Finding::passed(subject, format!("rdma_cm's default is {tos}, as traffic-class"))
            }
            Read::Is(tos) => Finding::warned(
                subject,
                format!("rdma_cm's default is {tos}, and queue pairs that come up without it have {wanted}"),
                format!(
                    "set traffic-class to {tos}, or the default to {wanted}: echo {wanted} > \
                     /sys/kernel/config/rdma_cm/{}/ports/{}/default_roce_tos",
                    device.name, port.number
                ),
            ),
            Read::Absent => Finding::passed(subject, "no default of rdma_cm is set"),
            Read::Unreadable(ref why) => Finding::warned(subject, format!("can't be read: {why}"), LOOK_TOS),
        }
    })
}

const LOOK_TOS: &str = "look with cma_roce_tos -d DEVICE, as root";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_mtus_are_those_of_the_kernel() {
        let expected =
            [(0, 256), (68, 256), (1500, 1024), (2143, 1024), (2144, 2048), (4191, 2048), (4192, 4096)];
        for (netdev, mtu) in expected.into_iter().chain([(9000, 4096), (u32::MAX, 4096)]) {
            assert_eq!(path_mtu(netdev), mtu, "{netdev}");
        }
    }

    #[test]
    fn a_traffic_class_has_the_priority_that_the_table_gives_its_dscp() {
        let dcb = Dcb { apps: vec![(1, 5, 26), (5, 3, 26)], ..Dcb::default() };
        let c = class(106, &dcb);
        assert_eq!((c.dscp, c.ecn, c.priority), (26, 2, 3));
        assert_eq!(class(0, &dcb).priority, 0);
    }
}
