//! The RDMA devices that the settings name, and what they say about its queue pairs.

use std::sync::Arc;

use pushgate_proxy::connect::Reopen;
use pushgate_proxy::link::verbs::{Config, Device, VerbsError};

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

/// Opens the RDMA devices that the settings name, in their order; or the first whose port is active.
pub(crate) fn open(settings: &Settings) -> Result<Vec<Arc<Device>>> {
    let (names, port) = (settings.rdma_devices(), settings.ib_port as u8);
    if names.is_empty() {
        return Ok(vec![Device::open(None, port)?]);
    }
    Ok(names.into_iter().map(|name| Device::open(Some(name), port)).collect::<Result<_, _>>()?)
}

/// Opens the device of the rail of that number again, from 0: the one that the settings name.
pub(crate) fn reopen(settings: &Settings) -> Reopen {
    let names: Vec<String> = settings.rdma_devices().into_iter().map(Into::into).collect();
    let port = settings.ib_port as u8;
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
