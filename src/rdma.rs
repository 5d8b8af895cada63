//! The RDMA devices that the settings name, and what they say about its queue pairs.

use std::sync::Arc;

use pushgate_gpu_kernels::Executor;
use pushgate_proxy::connect::Reopen;
use pushgate_proxy::link::verbs::{Config, Device, VerbsError};
use pushgate_proxy::rails::MOST_RAILS;

use pushgate_topology::Sysfs;

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

/// Opens the RDMA devices that the settings name, in their order; or those near the GPU; or the first whose port is
/// active.
pub(crate) fn open(settings: &Settings, executor: &dyn Executor) -> Result<Vec<Arc<Device>>> {
    let (mut names, port) = (settings.rdma_devices(), settings.ib_port as u8);
    let host = settings.near_devices().then(|| Sysfs::host().read());
    if let Some(host) = &host {
        // The kernel writes addresses in small letters.
        let gpu = executor.as_cuda().and_then(|cuda| cuda.pci_bus_id().to_lowercase().parse().ok());
        names = host.near(gpu, settings.ib_port);
        names.truncate(MOST_RAILS);
        tracing::info!("RDMA devices near the GPU: {}", names.join(", "));
    }
    if names.is_empty() {
        return Ok(vec![Device::open(None, port)?]);
    }
    Ok(names.into_iter().map(|name| Device::open(Some(name), port)).collect::<Result<_, _>>()?)
}

/// Opens the device of the rail of that number again, from 0, by its name.
pub(crate) fn reopen(devices: &[Arc<Device>]) -> Reopen {
    let port = devices.first().map_or(1, |device| device.port());
    let names: Vec<String> = devices.iter().map(|device| device.name().into()).collect();
    Box::new(move |rail| Device::open(names.get(rail).map(String::as_str), port))
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
            traffic_class: s.traffic_class as u8,
            service_level: s.service_level as u8,
            ack_timeout: s.ack_timeout as u8,
            retry_count: s.retry_count as u8,
            imm: !s.no_imm,
            write_order: s.write_order,
            events: false,
            posted_receives: false,
            regions_written: true,
            path_timeout: s.path_timeout.as_nanos() as u64,
            rail: false,
        }
    }
}
