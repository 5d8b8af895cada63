//! How a queue pair is brought up: what its user may choose, and which of its port's addresses that choice takes.

use std::sync::Arc;

use pushgate_door::addresses::Family;

use super::VerbsError;
use super::device::Device;
use super::gid::{GidEntry, MOST_TOLD, OwnAddress, ranked};
use super::objects::SharedDomain;

/// Whether a record may follow its payload at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrder {
    /// At once if both ends' devices are known to place RDMA WRITEs in the order of their posting, else
    /// as [`WriteOrder::Wait`].
    Auto,
    /// At once: this end's device and fabric place WRITEs in order.
    Assume,
    /// A record that no receive completion announces is posted when its payload's WRITE has completed.
    Wait,
}

/// Whether queue pairs over RDMA come up through rdma_cm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmaCm {
    /// Where the device needs it, as iWARP devices do.
    Auto,
    /// Always. Both ends must say so.
    On,
    /// Never.
    Off,
}

impl RdmaCm {
    /// Whether queue pairs come up through rdma_cm on a device that needs it, or does not.
    pub(super) fn decide(self, needed: bool) -> bool {
        match self {
            RdmaCm::Auto => needed,
            RdmaCm::On => true,
            RdmaCm::Off => false,
        }
    }
}

/// How a queue pair is brought up. `None` means: choose.
#[derive(Clone, Debug)]
pub struct Config {
    /// The RDMA device's port, from 1.
    pub port: u8,
    /// Place in the port's table of addresses.
    pub gid_index: Option<u32>,
    /// The kind of address by which the hosts reach each other, if known.
    pub family: Option<Family>,
    /// Path MTU, bytes; at most the port's and the peer's.
    pub mtu: Option<u32>,
    /// The traffic class of the IP header or GRH. `None`: what rdma_cm finds for the route (a site's default), 0 without rdma_cm.
    pub traffic_class: Option<u8>,
    /// 0 to 15. `None`: as for the traffic class.
    pub service_level: Option<u8>,
    /// The partition's key, with or without the bit of full members. `None`: the port's first one. rdma_cm takes that of the network
    /// interface, whatever this says.
    pub partition: Option<u16>,
    /// 4.096 us times 2 to the power of this, until a packet is sent again.
    pub ack_timeout: u8,
    /// Times that it is sent again, 0 to 7.
    pub retry_count: u8,
    /// A SEND carries immediate data and consumes a receive of the peer's queue
    /// pair. Only if both ends say so.
    pub imm: bool,
    /// What is known of the order in which WRITEs are placed at this end. A record follows its payload
    /// at once only if both ends say so.
    pub write_order: WriteOrder,
    /// Completions can wake this end.
    pub events: bool,
    /// This end's receives name buffers, and the peer is told of each: its SENDs are
    /// written there.
    pub posted_receives: bool,
    /// The peer's RDMA device may write this end's regions. Without, messages only go out
    /// of them, and the peer is not told of any.
    pub regions_written: bool,
    /// The protection domain that the queue pair shares with others. Only for peers that may reach what this process registers for
    /// each of them. `None`: a domain of its own (P8).
    pub domain: Option<Arc<SharedDomain>>,
    /// A path over which the peer's device answers nothing is found within this time, nanoseconds, where the link is replaced
    /// when it breaks, or is one of several; 0: by the device's own retries alone.
    pub path_timeout: u64,
    /// The link carries stripes beside other links of the same session: without immediate data, without events, and
    /// receives are not told to the peer's device.
    pub rail: bool,
    /// Whether the queue pair comes up through rdma_cm.
    pub cm: RdmaCm,
    /// Lowest and highest port at which this end listens to rdma_cm; `None`: the kernel's choice.
    pub cm_ports: Option<(u16, u16)>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            port: 1,
            gid_index: None,
            family: None,
            mtu: None,
            traffic_class: None,
            service_level: None,
            partition: None,
            ack_timeout: 14,
            retry_count: 7,
            imm: true,
            write_order: WriteOrder::Auto,
            events: false,
            posted_receives: false,
            regions_written: true,
            domain: None,
            path_timeout: 1_000_000_000,
            rail: false,
            cm: RdmaCm::Auto,
            cm_ports: None,
        }
    }
}

/// The addresses of the port that packets may carry as their source, the preferred one first: several only where the peer's
/// subnet may decide between them.
pub(super) fn sources(device: &Device, config: &Config) -> Result<Vec<OwnAddress>, VerbsError> {
    let gids = device.gids();
    let mut all = match config.gid_index {
        Some(index) => gids.iter().filter(|e| e.index == index).collect(),
        None => ranked(&gids, config.family),
    };
    let Some(first) = all.first().copied() else {
        return Err(VerbsError::NoGid {
            device: device.name().into(),
            port: device.port(),
            ethernet: device.is_ethernet(),
            index: config.gid_index,
            found: gids.iter().map(|e| (e.index, e.gid)).collect(),
        });
    };
    // On InfiniBand a router knows the way, and rdma_cm binds one address before the peer is known.
    let one = !device.is_ethernet() || config.cm.decide(device.kind.rdma_cm);
    all.retain(|e| e.kind == first.kind && e.netdev.is_some() == first.netdev.is_some());
    all.truncate(if one { 1 } else { MOST_TOLD });
    let subnets = if all.len() > 1 { device.subnets(&all) } else { vec![0] };
    Ok(all
        .into_iter()
        .zip(subnets)
        .map(|(entry, subnet)| OwnAddress { entry: entry.clone(), subnet })
        .collect())
}

/// The address that packets carry as their source where the peer is not asked.
pub(super) fn chosen_gid(device: &Device, config: &Config) -> Result<GidEntry, VerbsError> {
    Ok(sources(device, config)?.remove(0).entry)
}
