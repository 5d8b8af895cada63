//! One end of a queue pair on its way up.
//!
//! A [`VerbsOpening`] is made before the peer is known. With the peer's [`Offer`] it becomes a [`VerbsPrepared`] end, which
//! is ready to receive. With the peer's [`Places`] the end is ready to send, and the file `verbs_link` makes the link of it.

use std::sync::Arc;

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::versions::ABI;
use pushgate_driver_shim::window::Window;
use pushgate_link::memory::Words;
use pushgate_link::receives::{PostedReceives, RECEIVE_WORDS};
use pushgate_rdma_core_sys as sys;

use super::cm::{CmOffer, Connecting, Connection, Listening};
use super::config::{Config, WriteOrder, sources};
use super::device::Device;
use super::gid::{GidEntry, GidType, OwnAddress, Told};
use super::inbox::InboxLayout;
use super::kinds::{Kind, Protocol};
use super::line::AHEAD;
use super::objects::{Allocate, Cq, Mr, Pd, REMOTE_WRITE, Rc, SEND_ONLY};
use super::offer::{Agreed, Offer, Places, WIRE};
use super::sending::Sending;
use super::slot::{SHORT, slot_bytes};
use super::states::{PeerQp, States, first_packet};
use super::{CONTROL_WRS, LAST_WRS, NOTIFIES, VerbsError};

/// What this end is, whichever link carries its queue pair.
#[derive(Clone)]
pub(super) struct OwnEnd {
    pub(super) config: Config,
    pub(super) geometry: Geometry,
    /// The peer's inbox has two to the power of this slots for messages of this end.
    pub(super) link_log: u32,
    /// This end replaces a link that breaks.
    pub(super) recovers: bool,
}

/// This end over RDMA, before the other end is known: its queue pair is made, and its window registered.
pub struct VerbsOpening {
    pub(super) end: OwnEnd,
    pub(super) sources: Vec<OwnAddress>,
    /// The one that packets carry.
    pub(super) gid: GidEntry,
    pub(super) psn: u32,
    /// Goes before the queue pair: nobody connects to it any more.
    listening: Option<Listening>,
    pub(super) rc: Rc,
    pub(super) window: Sending,
    pub(super) window_mr: Mr,
    pub(super) outbox_mr: Mr,
    pub(super) outbox: Arc<SharedMemory>,
}

/// This end of a rail whose device, or whose peer's, can't carry anything when the ends meet.
pub struct VerbsAway {
    pub(super) end: OwnEnd,
    pub(super) device: Arc<Device>,
    pub(super) window: Sending,
    pub(super) outbox: Arc<SharedMemory>,
}

/// This end over RDMA, once it knows what the peer offers: ready to receive.
pub struct VerbsPrepared {
    connecting: Option<Connecting>,
    pub(super) opening: VerbsOpening,
    pub(super) peer: u32,
    pub(super) peer_geometry: Geometry,
    pub(super) peer_link_log: u32,
    pub(super) peer_events: bool,
    pub(super) peer_receives: bool,
    /// Both ends replace a link that breaks.
    pub(super) recovers: bool,
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
/// a record each, what is set aside for control writes, and the last. Where WRITEs tell nothing by their completion,
/// lines may follow another one, and one more READ than those is posted until they are known to be there: in front of them
/// and after. There is a READ for each WRITE at most.
fn send_queue(log: u32, kind: &Kind) -> u32 {
    let writes = (2 << log) + CONTROL_WRS + LAST_WRS;
    if kind.acknowledges() { writes } else { 2 * (writes + 2 * AHEAD) }
}

impl OwnEnd {
    /// The end with as many messages on their way as the link ring has slots, if the device has queues so long.
    fn new(device: &Device, config: &Config, geometry: Geometry) -> Result<Self, VerbsError> {
        geometry.validate().map_err(|e| VerbsError::Memory(e.into()))?;
        let (bytes, message) = (64u64 << geometry.window_log, device.longest_message());
        if bytes > message as u64 {
            return Err(VerbsError::Window { bytes, device: device.name().into(), message });
        }
        let config = &Config {
            imm: config.imm && !config.rail && device.kind.immediate,
            events: config.events && !config.rail,
            ..config.clone()
        };
        // Rails come back.
        let recovers = config.rail;
        let end = |link_log| OwnEnd { config: config.clone(), geometry, link_log, recovers };
        let logs = (1..=geometry.link_log).rev();
        Ok(logs.map(end).find(|end| end.fits(device)).unwrap_or_else(|| end(1)))
    }

    /// The memory that records and control writes are sent out of.
    fn outbox(&self, allocate: &mut Allocate<'_>) -> Result<Arc<SharedMemory>, VerbsError> {
        // Without a table of regions, whose entries are written one at a time.
        let layout = InboxLayout::new(self.link_log, self.geometry.rx_log);
        Ok(Arc::new(allocate("outbox", layout.regions + layout.bytes - layout.receives)?))
    }

    /// Work requests that the send queue and the receive queue hold.
    fn queues(&self, kind: &Kind) -> (u32, u32) {
        let receives = if self.config.imm { (1 << self.geometry.rx_log) + NOTIFIES } else { 0 } + LAST_WRS;
        (send_queue(self.link_log, kind), receives)
    }

    /// Whether the device has queues so long.
    fn fits(&self, device: &Device) -> bool {
        let ((send, receives), l) = (self.queues(device.kind), device.limits);
        send <= l.queue && receives <= l.queue && send + receives <= l.cq
    }

    /// Makes a queue pair, in a protection domain of its own unless the configuration shares one.
    pub(super) fn queue_pair(&self, device: &Arc<Device>) -> Result<Rc, VerbsError> {
        let (send, receives) = self.queues(device.kind);
        if !self.fits(device) {
            let (queue, cq) = (device.limits.queue, device.limits.cq);
            return Err(VerbsError::Queues { device: device.name().into(), receives, queue, cq });
        }
        let device = &device.for_queue_pair()?;
        let shared = self.config.domain.as_ref();
        let pd = shared.map_or_else(|| Pd::new(device), |domain| domain.on(device))?;
        // A CQ slot for every work request: on an error those complete too that did
        // not ask for it.
        let cq = Cq::new(device, send + receives, self.config.events && self.config.imm)?;
        // All that is ever sent inline, then a record with 64 bytes, a record, the line.
        let inline = [slot_bytes(SHORT), slot_bytes(64), slot_bytes(0), 64, 0].map(|n| n as u32);
        Rc::new(&pd, cq, send, receives, &inline)
    }

    /// What the peer is told of this end, with a queue pair and the addresses and first packet of it.
    pub(super) fn offer(&self, rc: &Rc, sources: &[OwnAddress], psn: u32, cm: Option<CmOffer>) -> Offer {
        let told = |source: &OwnAddress| Told { gid: source.entry.gid, subnet: source.subnet };
        let gid = &sources[0].entry;
        let (g, config) = (&self.geometry, &self.config);
        let port = &rc.port;
        Offer {
            version: WIRE.oldest(),
            newest: WIRE.newest(),
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            rank: g.rank,
            rings: [g.window_log, g.slots_log, g.cq_log, g.rx_log, g.link_log, g.landing_log, g.signals],
            link_log: self.link_log,
            qp: rc.number,
            psn,
            lid: port.lid,
            ethernet: port.ethernet,
            gid: gid.gid,
            gids: if port.ethernet { sources.iter().map(told).collect() } else { Vec::new() },
            roce_v2: gid.kind == GidType::RoceV2,
            mtu: config.mtu.unwrap_or(port.mtu).min(port.mtu),
            imm: config.imm,
            in_order: match config.write_order {
                WriteOrder::Auto => port.in_order,
                WriteOrder::Assume => true,
                WriteOrder::Wait => false,
            },
            events: config.events,
            posted_receives: config.posted_receives,
            iwarp: rc.pd.device.kind.protocol == Protocol::Iwarp,
            recovers: self.recovers,
            cm,
        }
    }

    /// Listens to rdma_cm, where queue pairs of the device come up through that.
    pub(super) fn listen(
        &self,
        device: &Arc<Device>,
        gid: &GidEntry,
    ) -> Result<Option<Listening>, VerbsError> {
        if !self.config.cm.decide(device.kind.rdma_cm) {
            return Ok(None);
        }
        let address = device.ip(gid, self.config.family)?;
        Listening::new(device, &self.config, address).map(Some)
    }

    /// The states of a queue pair of this end.
    pub(super) fn states<'a>(&'a self, rc: &'a Rc, gid: &'a GidEntry, psn: u32) -> States<'a> {
        States { rc, name: "the queue pair", config: &self.config, gid, psn }
    }
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
        let end = OwnEnd::new(device, config, geometry)?;
        let sources = sources(device, config)?;
        let gid = sources[0].entry.clone();
        let rc = end.queue_pair(device)?;
        let pd = rc.pd.clone();
        let outbox = end.outbox(allocate)?;
        let (window, window_mr) = Sending::new(&pd, window, allocate)?;
        let outbox_mr = register_outbox(&pd, &outbox)?;
        let listening = end.listen(device, &gid)?;
        let opening = VerbsOpening {
            end,
            sources,
            gid,
            psn: first_packet(),
            listening,
            rc,
            window,
            window_mr,
            outbox_mr,
            outbox,
        };
        opening.states().initialise(device.kind.access())?;
        Ok(opening)
    }

    /// Lets the queue pair go: the peer has none.
    pub fn away(self) -> VerbsAway {
        let device = self.device().clone();
        VerbsAway { end: self.end, device, window: self.window, outbox: self.outbox }
    }

    /// The end replaces a link that breaks, if the other end does so too ([`VerbsLink::recovers`](super::VerbsLink::recovers)).
    pub fn recovering(mut self) -> Self {
        self.end.recovers = true;
        self
    }

    fn device(&self) -> &Arc<Device> {
        &self.rc.pd.device
    }

    fn states(&self) -> States<'_> {
        self.end.states(&self.rc, &self.gid, self.psn)
    }

    /// The address that packets carry as their source.
    pub fn gid(&self) -> &GidEntry {
        &self.gid
    }

    /// What the peer is told.
    pub fn offer(&self) -> Offer {
        let cm = self.listening.as_ref().map(|listening| listening.told);
        self.end.offer(&self.rc, &self.sources, self.psn, cm)
    }

    /// Takes the peer's offer: checks it, makes the memory that the peer may write,
    /// and is ready to receive. `peer` is the rank that it should come from.
    pub fn prepare(
        self,
        peer: u32,
        offer: &Offer,
        allocate: &mut Allocate<'_>,
    ) -> Result<VerbsPrepared, VerbsError> {
        self.prepare_beside(None, peer, offer, allocate)
    }

    /// [`VerbsOpening::prepare`] of a link that carries stripes `beside` another link of the same session: the peer, whose
    /// rings are those of that link, writes both links' payload into one copy of its window.
    pub fn prepare_beside(
        mut self,
        beside: Option<(&Arc<SharedMemory>, Geometry)>,
        peer: u32,
        offer: &Offer,
        allocate: &mut Allocate<'_>,
    ) -> Result<VerbsPrepared, VerbsError> {
        let refused = |why| VerbsError::Peer { rank: peer, why };
        let Agreed { peer_geometry, mtu, imm, in_order } =
            offer.check(&self.offer(), peer).map_err(refused)?;
        let mirror = match beside {
            Some((_, other)) if other != peer_geometry => {
                return Err(refused("the rings of its links differ".into()));
            }
            Some((mirror, _)) => mirror.clone(),
            None => Arc::new(allocate("mirror", peer_geometry.window_bytes())?),
        };
        let layout = InboxLayout::new(offer.link_log, peer_geometry.rx_log);
        let inbox = Arc::new(allocate("inbox", layout.bytes)?);
        let pd = self.rc.pd.clone();
        let [mirror_mr, inbox_mr] = register_inbound(&pd, &mirror, &inbox)?;
        if imm {
            self.rc.post_receives(NOTIFIES).map_err(|error| VerbsError::Call {
                what: "posting receives".into(),
                error,
                remedy: String::new(),
            })?;
        }
        let ours = self.offer();
        let (own, gid) = ours.way(offer);
        self.gid = self.sources[own].entry.clone();
        let remote = PeerQp { number: offer.qp, psn: offer.psn, gid, lid: offer.lid };
        let mtu = sys::ibv_mtu(mtu);
        let connecting = match (self.listening.take(), offer.cm) {
            (Some(listening), Some(theirs)) => {
                let connects = ours.connects(offer);
                Some(listening.begin(theirs, connects, self.rc.lend(), &self.end.config, mtu)?)
            }
            _ => {
                self.states().ready_to_receive(&remote, mtu)?;
                None
            }
        };
        Ok(VerbsPrepared {
            peer,
            peer_geometry,
            peer_link_log: offer.link_log,
            // Nobody is woken by what has no immediate data.
            peer_events: offer.events && imm,
            peer_receives: offer.posted_receives,
            recovers: self.end.recovers && offer.recovers,
            imm,
            in_order,
            mirror_mr,
            inbox_mr,
            mirror,
            inbox,
            ends: [ours.name(), offer.name()],
            connecting,
            opening: self,
        })
    }
}

impl VerbsAway {
    /// On a device that can be opened, be its port up or down. `config` is that of a rail.
    pub fn new(
        device: &Arc<Device>,
        config: &Config,
        geometry: Geometry,
        window: Arc<dyn Window>,
        allocate: &mut Allocate<'_>,
    ) -> Result<Self, VerbsError> {
        let end = OwnEnd::new(device, config, geometry)?;
        let outbox = end.outbox(allocate)?;
        let (window, _) = Sending::new(&Pd::new(device)?, window, allocate)?;
        Ok(VerbsAway { end, device: device.clone(), window, outbox })
    }
}

/// Registers the memory that records and control writes are sent out of.
pub(super) fn register_outbox(pd: &Arc<Pd>, outbox: &SharedMemory) -> Result<Mr, VerbsError> {
    // SAFETY: the mapping is kept beside its registration; a device only reads it.
    unsafe { Mr::new(pd, "records", outbox.as_ptr().as_ptr() as usize, outbox.len(), SEND_ONLY) }
}

/// Registers the memory that the peer writes.
pub(super) fn register_inbound(
    pd: &Arc<Pd>,
    mirror: &SharedMemory,
    inbox: &SharedMemory,
) -> Result<[Mr; 2], VerbsError> {
    let register = |what: &str, m: &SharedMemory, access| {
        // SAFETY: both mappings are kept beside their registrations. The peer may write
        // them at any time: they are read as atomics, or moved as bytes that are
        // never interpreted.
        unsafe { Mr::new(pd, what, m.as_ptr().as_ptr() as usize, m.len(), access) }
    };
    let access = REMOTE_WRITE | pd.device.kind.access();
    Ok([register("mirror", mirror, REMOTE_WRITE)?, register("inbox", inbox, access)?])
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
        (self.peer_receives && !self.rail()).then(|| PostedReceives::new(ring(), log, 0))
    }

    /// Checks the peer's places and moves the queue pair to the state in which it sends.
    pub(super) fn ready_to_send(&mut self, places: &Places) -> Result<Option<Connection>, VerbsError> {
        places
            .check(&self.opening.end.geometry, self.opening.end.link_log)
            .map_err(|why| VerbsError::Peer { rank: self.peer, why })?;
        let connection = match self.connecting.take() {
            Some(connecting) => Some(connecting.wait()?),
            None => {
                self.opening.states().ready_to_send()?;
                None
            }
        };
        let h = &self.opening;
        tracing::debug!(
            peer = self.peer,
            device = h.device().name(),
            from = %h.gid.gid,
            netdev = h.gid.netdev,
            imm = self.imm,
            in_order = self.in_order,
            inline = h.rc.inline,
            rdma_cm = connection.is_some(),
            "RDMA queue pair {} is ready",
            h.rc.number
        );
        Ok(connection)
    }

    /// Receives of the peer name buffers.
    pub fn peer_receives(&self) -> bool {
        self.peer_receives
    }

    pub(super) fn rail(&self) -> bool {
        self.opening.end.config.rail
    }
}
