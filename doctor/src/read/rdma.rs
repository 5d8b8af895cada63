//! RDMA devices, their ports, and their network interfaces.

use std::collections::BTreeMap;
use std::path::Path;

use pushgate_door::netlink;
use pushgate_link_verbs::choice::{SOFTWARE_IWARP, iwarp_netdev, netdev_of_port};
use pushgate_link_verbs::kinds::Protocol;
use pushgate_link_verbs::{Device, gid, pkey};
use pushgate_topology::Address;

use super::dcb::dcb;
use super::files::{failed, names, number, text};
use super::roots::Roots;
use crate::checks::counters::ERRORS;
use crate::readings::{Ecn, Netdev, RdmaCm, RdmaDevice, RdmaPort, Read, Wants};

/// All devices by name and kind; the ports of those that the settings name, or of all. (A port may
/// have a thousand entries of its GID table, each a file.)
pub fn devices(roots: &Roots, wants: &Wants) -> Read<Vec<RdmaDevice>> {
    let class = roots.sys.join("class/infiniband");
    match std::fs::read_dir(&class) {
        Ok(_) => Read::Is(
            names(&class)
                .into_iter()
                .map(|name| device(roots, &class.join(&name), wants.allows(&name), name))
                .collect(),
        ),
        Err(error) => failed(&class, &error),
    }
}

fn device(roots: &Roots, folder: &Path, ports: bool, name: String) -> RdmaDevice {
    let numbers = if ports { names(&folder.join("ports")) } else { Vec::new() };
    let mut numbers: Vec<u8> = numbers.iter().filter_map(|n| n.parse().ok()).collect();
    numbers.sort();
    RdmaDevice {
        node_type: text(&folder.join("node_type")),
        pci: pci(folder),
        ports: numbers.into_iter().map(|number| port(roots, folder, &name, number)).collect(),
        name,
    }
}

/// The function that `device` leads to, or that it is a part of. Software devices have none; those of
/// soft-RoCE have `parent`, and on older kernels the `device` of their interface, too.
fn pci(folder: &Path) -> Option<String> {
    let software = text(&folder.join("node_desc")).is().is_some_and(|desc| desc == SOFTWARE_IWARP);
    if software || folder.join("parent").exists() {
        return None;
    }
    let target = std::fs::canonicalize(folder.join("device")).ok()?;
    Address::of_path(&target).map(|address| address.to_string())
}

/// What rdma_cm needs on this host.
pub fn cm(roots: &Roots) -> RdmaCm {
    let there = |path: &Path| if path.exists() { Read::Is(()) } else { Read::Absent };
    // The misc device is there too where the kernel has rdma_cm built in.
    let module = [roots.sys.join("module/rdma_ucm"), roots.sys.join("class/misc/rdma_cm")];
    let path = roots.dev.join("infiniband/rdma_cm");
    let device = there(&path).then(|()| {
        use rustix::fs::{Access, access};
        access(&path, Access::READ_OK | Access::WRITE_OK)
            .map_err(|e| format!("this user may not read and write {}: {e}", path.display()))
    });
    RdmaCm {
        module: module.iter().map(|path| there(path)).find(|read| read.is().is_some()).unwrap_or_default(),
        device,
        library: match roots.live {
            true => super::nccl::opens("librdmacm.so.1").map_or_else(Read::Unreadable, Read::Is),
            false => Read::Absent,
        },
    }
}

fn port(roots: &Roots, device: &Path, name: &str, number: u8) -> RdmaPort {
    let folder = device.join("ports").join(number.to_string());
    let net = roots.sys.join("class/net");
    let gids = gid::table(&folder, &net);
    let iwarp =
        text(&device.join("node_type")).is().and_then(|t| Protocol::of_node_type(t)) == Some(Protocol::Iwarp);
    let by_gid = || if iwarp { iwarp_netdev(&gids, &net) } else { None };
    // An empty table names no interface; soft-RoCE says its own, and others' lie beside them on PCI.
    let behind = || {
        let parent = text(&device.join("parent")).is().cloned();
        parent
            .or_else(|| netdev_of_port(device, number, &net))
            .filter(|n| !n.is_empty() && !n.contains('/') && net.join(n).exists())
    };
    let netdev = gids.iter().find_map(|e| e.netdev.clone()).or_else(by_gid).or_else(behind);
    RdmaPort {
        number,
        state: text(&folder.join("state")),
        phys_state: text(&folder.join("phys_state")),
        link_layer: text(&folder.join("link_layer")),
        rate: text(&folder.join("rate")),
        lid: text(&folder.join("lid")),
        gids,
        pkeys: pkey::table(&folder),
        netdev,
        tos: tos(roots, name, number),
        errors: errors(&folder),
        verbs: match roots.live {
            true => {
                Device::port_state(name, number).map_or_else(|e| Read::Unreadable(e.to_string()), Read::Is)
            }
            false => Read::Absent,
        },
    }
}

/// What an administrator has set of a port in configfs, which has the port's folder then.
fn tos(roots: &Roots, device: &str, port: u8) -> Read<u8> {
    let folder = roots.sys.join("kernel/config/rdma_cm").join(device).join("ports");
    number(&folder.join(port.to_string()).join("default_roce_tos"))
}

/// Errors that a port has counted. What can't be read as a number counts nothing.
fn errors(port: &Path) -> Vec<(String, u64)> {
    let count = |name: &str| {
        let files = ["counters", "hw_counters"].map(|folder| port.join(folder).join(name));
        files.iter().filter_map(|file| number::<u64>(file).is().copied()).max().filter(|count| *count > 0)
    };
    ERRORS.iter().filter_map(|name| Some((name.to_string(), count(name)?))).collect()
}

pub fn netdevs(roots: &Roots, devices: &Read<Vec<RdmaDevice>>) -> BTreeMap<String, Netdev> {
    let ports = devices.is().into_iter().flatten().flat_map(|d| &d.ports);
    let names = ports.flat_map(|p| p.gids.iter().filter_map(|e| e.netdev.clone()).chain(p.netdev.clone()));
    let mut all: BTreeMap<String, Netdev> = names.map(|name| (name, Netdev::default())).collect();
    if all.is_empty() {
        return all;
    }
    let mut addresses = if roots.live { Some(netlink::addresses()) } else { None };
    for (name, dev) in &mut all {
        let folder = roots.sys.join("class/net").join(name);
        dev.mtu = number(&folder.join("mtu"));
        dev.ecn = ecn(&folder.join("ecn"));
        dev.addresses = match (&mut addresses, number::<u32>(&folder.join("ifindex"))) {
            (None, _) => Read::Absent,
            (Some(Ok(all)), Read::Is(index)) => Read::Is(all.remove(&index).unwrap_or_default()),
            (Some(Err(why)), _) => Read::Unreadable(why.clone()),
            (_, Read::Unreadable(why)) => Read::Unreadable(why),
            (_, Read::Absent) => Read::Unreadable(format!("{name} has no index in sysfs")),
        };
        if roots.live {
            dev.dcb = dcb(name);
        }
    }
    all
}

/// mlx5's own folder: `roce_np/enable/P` and `roce_rp/enable/P` for each priority P.
fn ecn(folder: &Path) -> Read<Ecn> {
    let bits = |point: &str| -> Read<u8> {
        let mut set = 0;
        for priority in 0..8u8 {
            match number::<u8>(&folder.join(point).join("enable").join(priority.to_string())) {
                Read::Is(on) => set |= u8::from(on != 0) << priority,
                Read::Absent => return Read::Absent,
                Read::Unreadable(why) => return Read::Unreadable(why),
            }
        }
        Read::Is(set)
    };
    match (bits("roce_np"), bits("roce_rp")) {
        (Read::Is(notifies), Read::Is(reacts)) => Read::Is(Ecn { notifies, reacts }),
        (Read::Unreadable(why), _) | (_, Read::Unreadable(why)) => Read::Unreadable(why),
        _ => Read::Absent,
    }
}
