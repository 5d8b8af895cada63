//! How two ends become a queue pair. Each tells the other three things, out of
//! band: an [`Offer`] (who it is, what it can, its queue pair's number and
//! address), then [`Places`] (where the peer may write), and that is all: who
//! has sent its places is ready to receive.

use std::sync::Arc;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::versions::{ABI, Versions};
use pushgate_driver_shim::window::Window;
use pushgate_rdma_core_sys as sys;
use serde::{Deserialize, Serialize};

use super::device::{Device, mtu_bytes};
use super::gid::{Family, Gid, GidEntry, GidType, choose};
use super::objects::{Cq, Mr, Pd, REMOTE_WRITE, Rc, SEND_ONLY};
use super::sending::Sending;
use super::slot::{SHORT, SLOT_BYTES, slot_bytes};
use super::states::{PeerQp, States};
use super::{CONTROL_WRS, LAST_WRS, NOTIFIES, VerbsError, VerbsLink};
use crate::memory::Words;
use crate::receives::{PostedReceives, RECEIVE_WORDS};
use crate::region::MAX_REGIONS;

/// Versions of offers, places and of what crosses the wire that this build speaks.
pub const WIRE: Versions = Versions::new(3, 3);

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

/// How a queue pair is brought up. `None` means: choose.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its port, from 1.
    pub port: u8,
    /// Place in the port's table of addresses.
    pub gid_index: Option<u32>,
    /// The kind of address by which the hosts reach each other, if known.
    pub family: Option<Family>,
    /// Path MTU, bytes; at most the port's and the peer's.
    pub mtu: Option<u32>,
    /// Of the IP header or GRH.
    pub traffic_class: u8,
    /// 0 to 15.
    pub service_level: u8,
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
}

impl Default for Config {
    fn default() -> Self {
        Config {
            port: 1,
            gid_index: None,
            family: None,
            mtu: None,
            traffic_class: 0,
            service_level: 0,
            ack_timeout: 14,
            retry_count: 7,
            imm: true,
            write_order: WriteOrder::Auto,
            events: false,
            posted_receives: false,
            regions_written: true,
        }
    }
}

/// The first message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Offer {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest: Option<u32>,
    abi: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest_abi: Option<u32>,
    rank: u32,
    rings: [u32; 7],
    link_log: u32,
    qp: u32,
    psn: u32,
    lid: u16,
    ethernet: bool,
    gid: Gid,
    roce_v2: bool,
    mtu: u32,
    imm: bool,
    in_order: bool,
    events: bool,
    posted_receives: bool,
}

/// What both ends keep to.
#[derive(Debug)]
struct Agreed {
    peer_geometry: Geometry,
    /// As an `ibv_mtu`.
    mtu: u32,
    imm: bool,
    /// WRITEs are placed in the order of their posting, at either end.
    in_order: bool,
}

impl Offer {
    /// Checks a peer's offer against `ours`; a sentence if they don't go together.
    fn check(&self, ours: &Offer, peer: u32) -> Result<Agreed, String> {
        WIRE.agree(Versions::told(self.version, self.newest))
            .map_err(|e| format!("RDMA wire protocol: {e}"))?;
        ABI.agree(Versions::told(self.abi, self.newest_abi)).map_err(|e| format!("segments: {e}"))?;
        if self.rank != peer {
            return Err(format!("it says that it is rank {}", self.rank));
        }
        let [window_log, slots_log, cq_log, rx_log, link_log, landing_log, signals] = self.rings;
        let peer_geometry =
            Geometry { window_log, slots_log, cq_log, rx_log, link_log, landing_log, signals, rank: peer };
        peer_geometry.validate().map_err(|e| format!("its rings: {e}"))?;
        if self.link_log < 1 || self.link_log > link_log {
            return Err(format!("its inbox has 2^{} slots, expected 2^1 to 2^{link_log}", self.link_log));
        }
        if self.ethernet != ours.ethernet {
            let layer = |e: bool| if e { "Ethernet" } else { "InfiniBand" };
            return Err(format!("its port is {}, ours is {}", layer(self.ethernet), layer(ours.ethernet)));
        }
        if self.roce_v2 != ours.roce_v2 {
            let kind = |v2: bool| if v2 { "RoCE v2" } else { "IB or RoCE v1" };
            return Err(format!(
                "its address {} is {}, ours {} is {}; set gid-index on one of the two",
                self.gid,
                kind(self.roce_v2),
                ours.gid,
                kind(ours.roce_v2)
            ));
        }
        let mtu = (1..=5).find(|code| mtu_bytes(*code) == self.mtu.min(ours.mtu));
        let mtu =
            mtu.ok_or_else(|| format!("its MTU is {}, expected 256, 512, 1024, 2048 or 4096", self.mtu))?;
        let (imm, in_order) = (self.imm && ours.imm, self.in_order && ours.in_order);
        Ok(Agreed { peer_geometry, mtu, imm, in_order })
    }
}

/// The second: memory of this end that the peer may write, and nothing else.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Places {
    /// A copy of the peer's window.
    pub(super) mirror: u64,
    pub(super) mirror_key: u32,
    /// Line, slots, table of regions, posted receives.
    pub(super) inbox: u64,
    pub(super) inbox_key: u32,
}

impl Places {
    /// That no address which this end will write to wraps. What lies there is the
    /// peer's business, and its RDMA device's.
    fn check(&self, geometry: &Geometry, link_log: u32) -> Result<(), String> {
        let inbox = InboxLayout::new(link_log, geometry.rx_log).bytes;
        let ends = [(self.mirror, geometry.window_bytes()), (self.inbox, inbox)];
        match ends.iter().find(|(address, bytes)| address.checked_add(*bytes as u64).is_none()) {
            None => Ok(()),
            Some((address, bytes)) => Err(format!("{bytes} bytes at {address:#x} are no place")),
        }
    }
}

/// Where everything lies in an inbox.
#[derive(Clone, Copy, Debug)]
pub(super) struct InboxLayout {
    pub(super) slots: usize,
    pub(super) regions: usize,
    pub(super) receives: usize,
    pub(super) bytes: usize,
}

/// Words of an entry of the table of regions.
pub(super) const REGION_WORDS: usize = 4;

impl InboxLayout {
    /// Of an inbox whose writer has `1 << link_log` messages in flight and posts
    /// `1 << rx_log` receives.
    pub(super) fn new(link_log: u32, rx_log: u32) -> Self {
        let page = abi::PUSHGATE_PAGE as usize;
        let regions = (page + (SLOT_BYTES << link_log)).next_multiple_of(page);
        let receives = regions + MAX_REGIONS * REGION_WORDS * 8;
        let bytes = (receives + ((RECEIVE_WORDS * 8) << rx_log)).next_multiple_of(page);
        InboxLayout { slots: page, regions, receives, bytes }
    }
}

/// Makes memory: a name and bytes.
pub type Allocate<'a> = dyn FnMut(&str, usize) -> Result<SharedMemory, ShimError> + 'a;

/// This end, before the other is known.
pub struct Half {
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

/// This end, once it knows what the peer offers: ready to receive.
pub struct Accepted {
    pub(super) half: Half,
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
}

/// Work requests that the send queue of `1 << log` messages holds: a payload and
/// a record each, what is set aside for control writes, and the last.
const fn send_queue(log: u32) -> u32 {
    (2 << log) + CONTROL_WRS + LAST_WRS
}

/// The address of the port that packets carry as their source.
pub(super) fn chosen_gid(device: &Device, config: &Config) -> Result<GidEntry, VerbsError> {
    let gids = device.gids();
    let gid = match config.gid_index {
        Some(index) => gids.iter().find(|e| e.index == index),
        None => choose(&gids, config.family),
    };
    gid.cloned().ok_or_else(|| VerbsError::NoGid {
        device: device.name().into(),
        port: device.port(),
        index: config.gid_index,
        found: gids.iter().map(|e| (e.index, e.gid)).collect(),
    })
}

impl Half {
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
        let half = Half {
            config: config.clone(),
            geometry,
            link_log,
            gid,
            psn: random() & 0xff_ffff,
            rc,
            window,
            outbox_mr,
            outbox,
        };
        half.states().initialise(sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0)?;
        Ok(half)
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
    pub fn accept(
        self,
        peer: u32,
        offer: &Offer,
        allocate: &mut Allocate<'_>,
    ) -> Result<Accepted, VerbsError> {
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
        Ok(Accepted {
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
            half: self,
        })
    }
}

impl Accepted {
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

    /// Where the inbox lies, and in it slots, regions, receives and the end, for the simulator: what a peer may write.
    #[cfg(feature = "sim")]
    pub(crate) fn inbox(&self) -> (usize, [usize; 4]) {
        let layout = InboxLayout::new(self.peer_link_log, self.peer_geometry.rx_log);
        let address = self.inbox.as_ptr().as_ptr() as usize;
        (address, [layout.slots, layout.regions, layout.receives, layout.bytes])
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

    /// Ready to send.
    pub fn join(self, places: Places) -> Result<VerbsLink, VerbsError> {
        places
            .check(&self.half.geometry, self.half.link_log)
            .map_err(|why| VerbsError::Peer { rank: self.peer, why })?;
        self.half.states().ready_to_send()?;
        let h = &self.half;
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
        Ok(VerbsLink::new(self, places))
    }

    pub(super) fn gid(&self) -> &GidEntry {
        &self.half.gid
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.half.geometry
    }

    pub(super) fn link_log(&self) -> u32 {
        self.half.link_log
    }

    pub(super) fn posts_receives(&self) -> bool {
        self.half.config.posted_receives
    }

    pub(super) fn regions_written(&self) -> bool {
        self.half.config.regions_written
    }

    pub(super) fn events(&self) -> bool {
        self.half.config.events && self.imm
    }
}

/// A first packet number that a packet of an earlier queue pair does not have by
/// accident. From the seed of the standard library's hash maps.
pub(super) fn random() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(rank: u32) -> Offer {
        Offer {
            version: WIRE.oldest(),
            newest: WIRE.newest(),
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            rank,
            rings: [14, 10, 10, 10, 10, 14, 64],
            link_log: 9,
            qp: 17,
            psn: 3,
            lid: 0,
            ethernet: true,
            gid: Gid([0; 16]),
            roce_v2: true,
            mtu: 4096,
            imm: true,
            in_order: true,
            events: false,
            posted_receives: false,
        }
    }

    #[test]
    fn two_ends_agree_on_the_least_that_both_have() {
        let agreed = Offer { mtu: 1024, imm: false, ..offer(1) }.check(&offer(0), 1).unwrap();
        assert_eq!((mtu_bytes(agreed.mtu), agreed.imm, agreed.in_order), (1024, false, true));
        for (ours, theirs) in [(true, false), (false, true), (false, false)] {
            let theirs = Offer { in_order: theirs, ..offer(1) };
            let agreed = theirs.check(&Offer { in_order: ours, ..offer(0) }, 1).unwrap();
            assert!(!agreed.in_order, "P3: each end places what the other writes");
        }
        assert_eq!((agreed.peer_geometry.rank, agreed.peer_geometry.window_log), (1, 14));
        let agreed = offer(1).check(&offer(0), 1).unwrap();
        assert_eq!((mtu_bytes(agreed.mtu), agreed.imm), (4096, true));
    }

    #[test]
    fn p8_an_offer_that_does_not_fit_is_refused_with_a_sentence() {
        let good = || offer(1);
        let wrong: [(Offer, &str); 9] = [
            (Offer { version: 77, ..good() }, "RDMA wire protocol: it speaks version 77, expected 3"),
            (Offer { abi: 77, ..good() }, "segments: it speaks version 77, expected 2"),
            (Offer { rank: 2, ..good() }, "says that it is rank 2"),
            (Offer { rings: [24, 10, 10, 10, 10, 14, 64], ..good() }, "window_log is 24"),
            (Offer { link_log: 11, ..good() }, "2^11 slots"),
            (Offer { link_log: 0, ..good() }, "2^0 slots"),
            (Offer { ethernet: false, ..good() }, "its port is InfiniBand, ours is Ethernet"),
            (Offer { roce_v2: false, ..good() }, "set gid-index"),
            (Offer { mtu: 100, ..good() }, "its MTU is 100"),
        ];
        for (offer_, said) in wrong {
            let why = offer_.check(&offer(0), 1).unwrap_err();
            assert!(why.contains(said), "{why:?} says nothing of {said:?}");
        }
        let geometry = Geometry { rank: 0, ..offer(0).check(&offer(1), 0).unwrap().peer_geometry };
        let places = |mirror, inbox| Places { mirror, mirror_key: 1, inbox, inbox_key: 2 };
        places(1 << 40, 1 << 41).check(&geometry, 9).unwrap();
        for wrong in [places(u64::MAX, 0), places(0, u64::MAX - 4096)] {
            assert!(wrong.check(&geometry, 9).unwrap_err().contains("are no place"));
        }
        // Anything else that a peer may send is no offer at all.
        assert!(serde_json::from_str::<Offer>("{\"version\": 1}").is_err());
    }
}
