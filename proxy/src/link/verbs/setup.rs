//! One end of a queue pair on its way up.
//!
//! A [`VerbsOpening`] is made before the peer is known. With the peer's [`Offer`] it becomes a [`VerbsPrepared`] end, which
//! is ready to receive. With the peer's [`Places`] the end is ready to send, and the file `verbs_link` makes the link of it.

use std::sync::Arc;

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::versions::ABI;
use pushgate_driver_shim::window::Window;
use pushgate_rdma_core_sys as sys;

use super::config::{Config, WriteOrder, chosen_gid};
use super::device::Device;
use super::gid::{GidEntry, GidType};
use super::inbox::InboxLayout;
use super::objects::{Allocate, Cq, Mr, Pd, REMOTE_WRITE, Rc, SEND_ONLY};
use super::offer::{Agreed, Offer, Places, WIRE};
use super::sending::Sending;
use super::slot::{SHORT, slot_bytes};
use super::states::{PeerQp, States, first_packet};
use super::{CONTROL_WRS, LAST_WRS, NOTIFIES, VerbsError};
use crate::memory::Words;
use crate::receives::{PostedReceives, RECEIVE_WORDS};

/// This end over RDMA, before the other end is known: its queue pair is made, and its window registered.
pub struct VerbsOpening {
    config: Config,
    geometry: Geometry,
    link_log: u32,
    gid: GidEntry,
    psn: u32,
    pub(super) rc: Rc,
    pub(super) window: Sending,
    pub(super) outbox_mr: Mr,
    pub(super) outbox: Arc<SharedMemory>,
}

/// This end over RDMA, once it knows what the peer offers: ready to receive.
pub struct VerbsPrepared {
    pub(super) opening: VerbsOpening,
    pub(super) peer: u32,
    pub(super) peer_geometry: Geometry,
    pub(super) peer_link_log: u32,
    pub(super) peer_events: bool,
    pub(super) peer_receives: bool,
    pub(super) imm: bool,
    pub(super) in_order: bool,
    pub(super) mirror_mr: Mr,
    pub(super) inbox_mr: Mr,
    pub(super) mirror: Arc<SharedMemory>,
    pub(super) inbox: Arc<SharedMemory>,
    /// What names this end and the peer's.
    pub(super) ends: [u64; 2],
}

/// Work requests that the send queue of `1 << log` messages holds: a payload and
/// a record each, what is set aside for control writes, and the last.
const fn send_queue(log: u32) -> u32 {
    (2 << log) + CONTROL_WRS + LAST_WRS
}

impl VerbsOpening {
    /// Registers the window and makes the queue pair. `window` is this end's payload
    /// ring; the geometry is checked.
    pub fn new(
        device: &Arc<Device>,
        config: &Config,
        geometry: Geometry,
        window: Arc<dyn Window>,
        allocate: &mut Allocate<'_>,
    ) -> Result<Self, VerbsError> {
        geometry.validate().map_err(|e| VerbsError::Memory(e.into()))?;
        let (bytes, message) = (64u64 << geometry.window_log, device.port_state.message);
        if bytes > message as u64 {
            return Err(VerbsError::Window { bytes, device: device.name().into(), message });
        }
        let gid = chosen_gid(device, config)?;
        let receives = if config.imm { (1 << geometry.rx_log) + NOTIFIES } else { 0 } + LAST_WRS;
        // As many messages as the link ring has slots, if the device has queues so long.
        let fits = |log: u32| {
            let (send, l) = (send_queue(log), device.limits);
            send <= l.queue && receives <= l.queue && send + receives <= l.cq
        };
        let link_log =
            (1..=geometry.link_log).rev().find(|log| fits(*log)).ok_or_else(|| VerbsError::Queues {
                device: device.name().into(),
                receives,
                queue: device.limits.queue,
                cq: device.limits.cq,
            })?;
        let send = send_queue(link_log);
        let pd = Pd::new(device)?;
        // A CQ slot for every work request: on an error those complete too that did
        // not ask for it.
        let cq = Cq::new(device, send + receives, config.events && config.imm)?;
        // All that is ever sent inline, then a record with 64 bytes, a record, the line.
        let inline = [slot_bytes(SHORT), slot_bytes(64), slot_bytes(0), 64, 0].map(|n| n as u32);
        let rc = Rc::new(&pd, cq, send, receives, &inline)?;
        // Without a table of regions, whose entries are written one at a time.
        let layout = InboxLayout::new(link_log, geometry.rx_log);
        let outbox = Arc::new(allocate("outbox", layout.regions + layout.bytes - layout.receives)?);
        let window = Sending::new(&pd, window, allocate)?;
        // SAFETY: the mapping is kept beside its registration; a device only reads it.
        let outbox_mr =
            unsafe { Mr::new(&pd, "records", outbox.as_ptr().as_ptr() as usize, outbox.len(), SEND_ONLY)? };
        let opening = VerbsOpening {
            config: config.clone(),
            geometry,
            link_log,
            gid,
            psn: first_packet(),
            rc,
            window,
            outbox_mr,
            outbox,
        };
        opening.states().initialise(sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0)?;
        Ok(opening)
    }

    fn device(&self) -> &Arc<Device> {
        &self.rc.pd.device
    }

    /// As in [`Config`], within what the wire has room for.
    pub(super) fn ack_timeout(&self) -> u8 {
        self.config.ack_timeout.min(31)
    }

    fn states(&self) -> States<'_> {
        States { rc: &self.rc, name: "the queue pair", config: &self.config, gid: &self.gid, psn: self.psn }
    }

    /// The address that packets carry as their source.
    pub fn gid(&self) -> &GidEntry {
        &self.gid
    }

    /// What the peer is told.
    pub fn offer(&self) -> Offer {
        let g = &self.geometry;
        let port = &self.device().port_state;
        Offer {
            version: WIRE.oldest(),
            newest: WIRE.newest(),
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            rank: g.rank,
            rings: [g.window_log, g.slots_log, g.cq_log, g.rx_log, g.link_log, g.landing_log, g.signals],
            link_log: self.link_log,
            qp: self.rc.number,
            psn: self.psn,
            lid: port.lid,
            ethernet: port.ethernet,
            gid: self.gid.gid,
            roce_v2: self.gid.kind == GidType::RoceV2,
            mtu: self.config.mtu.unwrap_or(port.mtu).min(port.mtu),
            imm: self.config.imm,
            in_order: match self.config.write_order {
                WriteOrder::Auto => port.in_order,
                WriteOrder::Assume => true,
                WriteOrder::Wait => false,
            },
            events: self.config.events,
            posted_receives: self.config.posted_receives,
        }
    }

    /// Takes the peer's offer: checks it, makes the memory that the peer may write,
    /// and is ready to receive. `peer` is the rank that it should come from.
    pub fn prepare(
        self,
        peer: u32,
        offer: &Offer,
        allocate: &mut Allocate<'_>,
    ) -> Result<VerbsPrepared, VerbsError> {
        let Agreed { peer_geometry, mtu, imm, in_order } =
            offer.check(&self.offer(), peer).map_err(|why| VerbsError::Peer { rank: peer, why })?;
        let mirror = Arc::new(allocate("mirror", peer_geometry.window_bytes())?);
        let layout = InboxLayout::new(offer.link_log, peer_geometry.rx_log);
        let inbox = Arc::new(allocate("inbox", layout.bytes)?);
        let pd = self.rc.pd.clone();
        // SAFETY: both mappings are kept beside their registrations. The peer may write
        // them at any time: they are read as atomics, or moved as bytes that are
        // never interpreted.
        let [mirror_mr, inbox_mr] = unsafe {
            let register = |what: &str, m: &SharedMemory| {
                Mr::new(&pd, what, m.as_ptr().as_ptr() as usize, m.len(), REMOTE_WRITE)
            };
            [register("mirror", &mirror)?, register("inbox", &inbox)?]
        };
        if imm {
            self.rc.post_receives(NOTIFIES).map_err(|error| VerbsError::Call {
                what: "posting receives".into(),
                error,
                remedy: String::new(),
            })?;
        }
        let remote = PeerQp { number: offer.qp, psn: offer.psn, gid: offer.gid, lid: offer.lid };
        self.states().ready_to_receive(&remote, sys::ibv_mtu(mtu))?;
        Ok(VerbsPrepared {
            peer,
            peer_geometry,
            peer_link_log: offer.link_log,
            // Nobody is woken by what has no immediate data.
            peer_events: offer.events && imm,
            peer_receives: offer.posted_receives,
            imm,
            in_order,
            mirror_mr,
            inbox_mr,
            mirror,
            inbox,
            ends: [self.offer().name(), offer.name()],
            opening: self,
        })
    }
}

impl VerbsPrepared {
    /// What the peer is told: it may write now.
    pub fn places(&self) -> Places {
        let address = |m: &SharedMemory| m.as_ptr().as_ptr() as u64;
        Places {
            mirror: address(&self.mirror),
            mirror_key: self.mirror_mr.rkey,
            inbox: address(&self.inbox),
            inbox_key: self.inbox_mr.rkey,
        }
    }

    /// The copy of the peer's window, where its payload arrives.
    pub fn mirror(&self) -> &Arc<SharedMemory> {
        &self.mirror
    }

    /// The peer's rings, checked.
    pub fn peer_geometry(&self) -> Geometry {
        self.peer_geometry
    }

    /// The peer's posted receives, as its RDMA device writes them here, if it posts any.
    pub fn posted_receives(&self) -> Option<PostedReceives> {
        let log = self.peer_geometry.rx_log;
        let at = InboxLayout::new(self.peer_link_log, log).receives;
        let ring = || Words::readable(&self.inbox, at, RECEIVE_WORDS << log);
        self.peer_receives.then(|| PostedReceives::new(ring(), log))
    }

    /// Checks the peer's places and moves the queue pair to the state in which it sends.
    pub(super) fn ready_to_send(&self, places: &Places) -> Result<(), VerbsError> {
        places
            .check(&self.opening.geometry, self.opening.link_log)
            .map_err(|why| VerbsError::Peer { rank: self.peer, why })?;
        self.opening.states().ready_to_send()?;
        let h = &self.opening;
        tracing::debug!(
            peer = self.peer,
            device = h.device().name(),
            from = %h.gid.gid,
            netdev = h.gid.netdev,
            imm = self.imm,
            in_order = self.in_order,
            inline = h.rc.inline,
            "RDMA queue pair {} is ready",
            h.rc.number
        );
        Ok(())
    }

    pub(super) fn gid(&self) -> &GidEntry {
        &self.opening.gid
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.opening.geometry
    }

    pub(super) fn link_log(&self) -> u32 {
        self.opening.link_log
    }

    pub(super) fn posts_receives(&self) -> bool {
        self.opening.config.posted_receives
    }

    pub(super) fn regions_written(&self) -> bool {
        self.opening.config.regions_written
    }

    pub(super) fn events(&self) -> bool {
        self.opening.config.events && self.imm
    }
}
