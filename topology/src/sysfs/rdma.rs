//! Finds RDMA NICs, and the PCI function that each is or is based on.

use std::collections::BTreeSet;

use super::files::Files;
use crate::address::Address;
use crate::tree::{Nic, Port, Topology};

/// The most network devices below one (a VLAN over a bond over its ports) that are followed.
const MOST_BELOW: usize = 256;

pub(super) fn read(sys: &mut Files, topology: &mut Topology) {
    for name in sys.list("class/infiniband") {
        let base = format!("class/infiniband/{name}");
        let Some(real) = sys.real(&base) else { continue };
        // Queue pairs are reliable connected ones, which channel adapters and iWARP devices have: node types 1 and 4.
        let kind = sys.word(&format!("{base}/node_type"));
        if let Some(kind) = kind.filter(|kind| !kind.starts_with("1:") && !kind.starts_with("4:")) {
            sys.note(format!(
                "{name}: node type {kind}: no InfiniBand, RoCE or iWARP (Amazon's EFA has no such queue pairs): not counted as a NIC"
            ));
            continue;
        }
        let ports = ports(sys, &base);
        // rxe names its network device in `parent`; every device has those of its addresses.
        let parent = sys.word(&format!("{base}/parent"));
        // Software iWARP lies on PCI below its network interface.
        let described =
            sys.word(&format!("{base}/node_desc")).is_some_and(|text| text == "Software iWARP stack");
        let software = described || parent.is_some() || real.components().any(|c| c.as_os_str() == "virtual");
        let by_address = || ports.first().map(|p| format!("{base}/ports/{}/gid_attrs/ndevs/0", p.number));
        let netdev = match parent {
            Some(name) => Some(name),
            None => by_address().and_then(|path| sys.word(&path)),
        };
        let netdev = netdev.or_else(|| sys.list(&format!("{base}/device/net")).into_iter().next());
        // The name becomes part of a path.
        let netdev = netdev.filter(|n| !n.contains('/') && n != "..");
        let mut address = None;
        if sys.exists(&format!("{base}/device")) {
            address = sys.real(&format!("{base}/device")).as_deref().and_then(Address::of_path);
        }
        if address.is_none()
            && let Some(netdev) = &netdev
        {
            address = of_netdev(sys, netdev, &mut BTreeSet::new());
        }
        if let Some(at) = address
            && !topology.functions.contains_key(&at)
        {
            sys.note(format!("{base}: its function {at} is not listed"));
            address = None;
        }
        topology.nics.push(Nic { name, address, software, netdev, ports });
    }
}

/// The PCI function of a network device: its own, or the first one found below it.
fn of_netdev(sys: &mut Files, name: &str, seen: &mut BTreeSet<String>) -> Option<Address> {
    let base = format!("class/net/{name}");
    // Visit each device once, because links may lead in circles.
    if seen.len() >= MOST_BELOW || !seen.insert(name.to_owned()) || !sys.exists(&base) {
        return None;
    }
    if sys.exists(&format!("{base}/device")) {
        return sys.real(&format!("{base}/device")).as_deref().and_then(Address::of_path);
    }
    let lower: Vec<String> =
        sys.list(&base).into_iter().filter_map(|n| Some(n.strip_prefix("lower_")?.to_owned())).collect();
    lower.iter().find_map(|n| of_netdev(sys, n, seen))
}

fn ports(sys: &mut Files, base: &str) -> Vec<Port> {
    let mut ports = Vec::new();
    for name in sys.list(&format!("{base}/ports")) {
        let path = format!("{base}/ports/{name}");
        let Ok(number) = name.parse() else {
            sys.note(format!("{path}: no port number"));
            continue;
        };
        // For example "4: ACTIVE" and "400 Gb/sec (4X NDR)".
        let state = sys.word(&format!("{path}/state"));
        let state = state.map(|s| s.split_once(": ").map_or(s.clone(), |(_, name)| name.to_owned()));
        let gigabits = sys.parsed(&format!("{path}/rate"), "rate like 400 Gb/sec", |t| {
            let (number, unit) = t.split_once(' ')?;
            let rate: f64 = number.parse().ok()?;
            (unit.starts_with("Gb/sec") && (0.0..1e6).contains(&rate)).then_some(rate)
        });
        let link_layer = sys.word(&format!("{path}/link_layer"));
        ports.push(Port { number, state, gigabits, link_layer });
    }
    ports.sort_by_key(|p| p.number);
    ports
}
