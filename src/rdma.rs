//! The RDMA devices that the settings name or leave to be chosen, and what the settings say about queue pairs over them.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use pushgate_door::addresses::Family;
use pushgate_door::netlink::addresses_of;
use pushgate_engine::rails::MOST_RAILS;
use pushgate_gpu_kernels::Executor;
use pushgate_link_verbs::choice::{self, Choice, Description, Distance, Wish};
use pushgate_link_verbs::{Config, Device, VerbsError};
use pushgate_topology::{Address, Sysfs, Topology};

use crate::error::{Error, Result};
use crate::settings::{AutoOr, Settings};

impl From<VerbsError> for Error {
    fn from(e: VerbsError) -> Self {
        match e {
            VerbsError::Peer { rank, why } => Error::Mismatch { rank, reason: why },
            other => Error::Rdma(other),
        }
    }
}

/// Opens the RDMA devices that the settings name, in their order; or those near the GPU; or the best one. Of several devices
/// some may have a port that is down.
pub(crate) fn open(settings: &Settings, executor: &dyn Executor) -> Result<Vec<Arc<Device>>> {
    // The kernel writes addresses in small letters.
    let gpu = executor.as_cuda().and_then(|cuda| cuda.pci_bus_id().to_lowercase().parse().ok());
    let (mut names, port) = (rails(settings)?, settings.ib_port as u8);
    let ranked = settings
        .near_devices()
        .then(|| rank(Path::new("/sys"), settings, &Sysfs::host().read(), gpu, addresses_of));
    if let Some(choice) = &ranked {
        names = choice.near();
        names.truncate(MOST_RAILS);
        tracing::info!("RDMA devices near the GPU: {}", names.join(", "));
        tracing::debug!("ib-dev = near: {}", choice.report());
    }
    if names.is_empty() {
        return Ok(vec![choose(settings, gpu)?]);
    }
    if let [name] = names[..] {
        return Ok(vec![Device::open(name, port)?]);
    }
    let devices: Vec<_> =
        names.into_iter().map(|name| Device::open_as_is(name, port)).collect::<Result<_, _>>()?;
    for device in devices.iter().filter(|device| !device.is_active()) {
        tracing::warn!(
            device = device.name(),
            port,
            "the port is down: queue pairs start over the other devices of ib-dev, and take this one when it comes up"
        );
    }
    Ok(devices)
}

/// The devices that are named as links of each queue pair.
fn rails(settings: &Settings) -> Result<Vec<&str>> {
    let names = settings.rdma_devices();
    match names.len() <= MOST_RAILS {
        true => Ok(names),
        false => Err(settings.refused("ib-dev", format!("up to {MOST_RAILS} names but in the NCCL plugin"))),
    }
}

/// What the settings wish of the device that `ib-dev = auto` takes.
pub fn wish(settings: &Settings) -> Wish {
    let host = settings.rendezvous.rsplit_once(':').map(|(host, _)| host.trim_matches(['[', ']']));
    let address = host.and_then(|host| host.parse::<IpAddr>().ok());
    let family = address.map(|ip| if ip.is_ipv4() { Family::V4 } else { Family::V6 });
    let gid_index = match settings.gid_index {
        AutoOr::Is(index) => Some(index as u32),
        _ => None,
    };
    Wish { family, gid_index }
}

/// How far a device of this host is from the GPU.
pub fn distance(host: &Topology, gpu: Option<Address>, device: &str) -> Distance {
    let nic = host.nics.iter().find(|nic| nic.name == device).and_then(|nic| nic.address);
    let path = gpu.zip(nic).and_then(|(gpu, nic)| host.path(gpu, nic));
    let Some(distance) = path.map(|path| path.distance) else { return Distance::default() };
    let steps = match distance {
        pushgate_topology::Distance::SameDevice => 0,
        pushgate_topology::Distance::SameSwitch => 1,
        pushgate_topology::Distance::SameRootComplex => 2,
        pushgate_topology::Distance::SameSocket => 3,
        pushgate_topology::Distance::AcrossSockets => 4,
        // A virtual machine's tree, or an unknown place.
        _ => return Distance::default(),
    };
    Distance { steps, words: distance.to_string() }
}

/// Ranks the RDMA devices that the sysfs at `sys` shows, as `ib-dev = auto` does. `addresses` gives the IP addresses of a
/// network interface.
pub fn rank(
    sys: &Path,
    settings: &Settings,
    host: &Topology,
    gpu: Option<Address>,
    addresses: impl Fn(&str) -> Vec<IpAddr>,
) -> Choice {
    let port = settings.ib_port as u8;
    let all = choice::names(sys).into_iter().map(|name| Description {
        distance: distance(host, gpu, &name),
        ..choice::describe(sys, &name, port, &addresses)
    });
    Choice::new(all, &wish(settings))
}

/// Opens the best RDMA device of this host.
fn choose(settings: &Settings, gpu: Option<Address>) -> Result<Arc<Device>> {
    let port = settings.ib_port as u8;
    // Without a GPU no device is nearer than another.
    let host = gpu.is_some().then(|| Sysfs::host().read());
    let away = |name: &str| host.as_ref().map(|host| distance(host, gpu, name)).unwrap_or_default();
    Ok(Device::choose(port, &wish(settings), away)?)
}

/// The part of the configuration that the settings determine. The caller fills in family, events
/// and posted receives.
impl From<&Settings> for Config {
    fn from(s: &Settings) -> Self {
        let number = |v: AutoOr<usize>| match v {
            AutoOr::Is(n) => Some(n as u32),
            _ => None,
        };
        Config {
            port: s.ib_port as u8,
            gid_index: number(s.gid_index),
            family: None,
            mtu: number(s.ib_mtu),
            traffic_class: number(s.traffic_class).map(|class| class as u8),
            service_level: number(s.service_level).map(|level| level as u8),
            partition: number(s.pkey).map(|key| key as u16),
            ack_timeout: s.ack_timeout as u8,
            retry_count: s.retry_count as u8,
            imm: !s.no_imm,
            write_order: s.write_order,
            events: false,
            posted_receives: false,
            regions_written: true,
            domain: None,
            path_timeout: s.path_timeout.as_nanos() as u64,
            rail: false,
            cm: s.rdma_cm,
            cm_ports: match s.rdma_port_range {
                AutoOr::Is(range) => Some(range),
                _ => None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_stands_on_four_devices_at_most() {
        let mut settings = Settings::default();
        settings.set("ib-dev", "a,b,c,d").unwrap();
        assert_eq!(rails(&settings).unwrap(), ["a", "b", "c", "d"]);
        settings.set("ib-dev", "a,b,c,d,e").unwrap();
        let e = rails(&settings).unwrap_err().to_string();
        assert!(
            e.contains("invalid ib-dev `a,b,c,d,e`") && e.contains("up to 4 names but in the NCCL plugin"),
            "{e}"
        );
    }
}
