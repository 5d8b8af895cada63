//! An end of a queue pair over several RDMA devices: a link for each, in the order in which the two ends name them.

mod frames;
mod maker;

use std::sync::Arc;
use std::time::Duration;

use pushgate_core::rails::{MOST_RAILS, Rules};
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Window;

use self::frames::Frames;
pub use self::frames::RailFrames;
pub use self::maker::{AllocateLater, Reopen};
use self::maker::{Maker, Parts};
use super::Patience;
use crate::link::Rail;
use crate::link::verbs::{
    Allocate, Config, Device, Offer, Places, VerbsError, VerbsLink, VerbsOpening, VerbsPrepared,
};
use crate::rails::{Options, Rails};

/// A message is not cut into stripes shorter than this, bytes. A stripe costs its record's WRITE and a look at it at the
/// other end, about as much as 16 KiB take on the wire of a fast NIC (1.3 us at 100 Gbit/s).
const SHORTEST: u32 = 16 << 10;

/// This end over several devices, before the other end is known.
pub struct RailsOpening {
    /// `None` for a device whose port is down.
    openings: Vec<Option<VerbsOpening>>,
    /// Why the first of those is missing.
    away: Option<VerbsError>,
    same: Same,
}

/// What all links of this end have in common.
struct Same {
    config: Config,
    geometry: Geometry,
    window: Arc<dyn Window>,
}

/// This end over several devices, ready to receive.
pub struct RailsPrepared {
    /// `None` where one of the two ends has no device that carries.
    all: Vec<Option<VerbsPrepared>>,
    same: Same,
}

/// This end over several devices, once both ends are ready.
pub struct RailsMet {
    /// `None` for a rail that joins later.
    links: Vec<Option<VerbsLink>>,
    /// The copy of the peer's window, where its payload arrives.
    pub mirror: Arc<SharedMemory>,
    /// The peer's rings, checked.
    pub peer_geometry: Geometry,
    peer_posts: bool,
    same: Same,
    /// A message of this end is not cut into stripes shorter than this, bytes: a multiple of 64. 16 KiB unless set.
    pub shortest: u32,
}

impl RailsOpening {
    /// Registers the window with each device, and makes a queue pair on each whose port is up. `config` is that of every link.
    ///
    /// # Errors
    /// Where a device can't be used for another reason than its port's state, or all ports are down.
    pub fn new(
        devices: &[Arc<Device>],
        config: &Config,
        geometry: Geometry,
        window: &Arc<dyn Window>,
        allocate: &mut Allocate<'_>,
    ) -> Result<Self, VerbsError> {
        let config = Config { rail: true, ..config.clone() };
        let (mut openings, mut away) = (Vec::with_capacity(devices.len()), None);
        for device in devices {
            openings.push(match device.as_now() {
                Ok(device) => {
                    Some(VerbsOpening::new(&device, &config, geometry, window.clone(), &mut *allocate)?)
                }
                Err(why @ VerbsError::PortDown { .. }) => {
                    tracing::debug!("a rail is missing at the start: {why}");
                    away.get_or_insert(why);
                    None
                }
                Err(e) => return Err(e),
            });
        }
        if openings.iter().all(Option::is_none) {
            return Err(away.expect("there is a device"));
        }
        let window = window.clone();
        Ok(RailsOpening { openings, away, same: Same { config, geometry, window } })
    }

    /// Why a rail is missing, if one is.
    pub fn away(&mut self) -> Option<VerbsError> {
        self.away.take()
    }

    pub(super) fn offer(&self) -> Vec<Option<Offer>> {
        self.openings.iter().map(|one| one.as_ref().map(VerbsOpening::offer)).collect()
    }

    /// As many rails as the end that names fewer devices.
    pub(super) fn prepare(
        self,
        peer: u32,
        offers: &[Option<Offer>],
        allocate: &mut Allocate<'_>,
    ) -> Result<RailsPrepared, VerbsError> {
        if !(1..=MOST_RAILS).contains(&offers.len()) {
            let why = format!("it offers {} RDMA devices, expected 1 to {MOST_RAILS}", offers.len());
            return Err(VerbsError::Peer { rank: peer, why });
        }
        let mut all: Vec<Option<VerbsPrepared>> = Vec::with_capacity(self.openings.len());
        for both in self.openings.into_iter().zip(offers) {
            let (Some(opening), Some(offer)) = both else {
                all.push(None);
                continue;
            };
            let first = all.iter().flatten().next().map(|first| (first.mirror(), first.peer_geometry()));
            let prepared = opening.prepare_beside(first, peer, offer, allocate)?;
            all.push(Some(prepared));
        }
        if all.iter().all(Option::is_none) {
            let why = "no port of its RDMA devices is up whose partner, by the order in ib-dev, is up here";
            return Err(VerbsError::Peer { rank: peer, why: why.into() });
        }
        Ok(RailsPrepared { all, same: self.same })
    }
}

impl RailsPrepared {
    pub(super) fn places(&self) -> Vec<Places> {
        self.all.iter().flatten().map(VerbsPrepared::places).collect()
    }

    pub(super) fn meet(self, places: Vec<Places>) -> Result<RailsMet, VerbsError> {
        let (first, same) = (self.all.iter().flatten().next().expect("one carries"), self.same);
        let (mirror, peer_geometry, peer_posts) =
            (first.mirror().clone(), first.peer_geometry(), first.peer_receives());
        let carry = self.all.iter().flatten().count();
        if places.len() != carry {
            let why = format!("it has places of {} links, expected {carry}", places.len());
            return Err(VerbsError::Peer { rank: peer_geometry.rank, why });
        }
        let mut places = places.into_iter();
        let mut join = |one: VerbsPrepared| one.join(places.next().expect("as many as links"));
        let links =
            self.all.into_iter().map(|one| one.map(&mut join).transpose()).collect::<Result<_, _>>()?;
        Ok(RailsMet { links, mirror, peer_geometry, peer_posts, same, shortest: SHORTEST })
    }
}

impl RailsMet {
    /// Makes one link of them all. A rail that breaks comes back over a link on a device that `reopen` opens; `allocate` makes
    /// memory for it. For `recover` the ends may be without a rail; `jitter` tells many queue pairs' attempts apart.
    pub fn join(
        self,
        channel: RailFrames,
        reopen: Reopen,
        allocate: AllocateLater,
        recover: Duration,
        jitter: u64,
    ) -> Rails {
        self.join_with(channel, (reopen, allocate), recover, jitter, Maker::new)
    }

    /// As [`RailsMet::join`], without a thread: what that thread does is done when the link is asked for it.
    #[cfg(feature = "sim")]
    pub(crate) fn join_here(
        self,
        channel: RailFrames,
        reopen: Reopen,
        allocate: AllocateLater,
        recover: Duration,
        jitter: u64,
    ) -> Rails {
        self.join_with(channel, (reopen, allocate), recover, jitter, Maker::here)
    }

    fn join_with(
        self,
        channel: RailFrames,
        (reopen, allocate): (Reopen, AllocateLater),
        recover: Duration,
        jitter: u64,
        maker: impl FnOnce(Parts) -> Maker,
    ) -> Rails {
        let (peer_geometry, Same { config, geometry, window }) = (self.peer_geometry, self.same);
        let options = Options {
            rules: Rules { window_log: geometry.link_log, shortest: self.shortest },
            peer_window_log: peer_geometry.link_log,
            patience: Patience::within(recover, jitter),
            recover: u64::try_from(recover.as_nanos()).unwrap_or(u64::MAX),
            peer_posts: self.peer_posts,
            ranks: [geometry.rank, peer_geometry.rank],
        };
        let mirror = self.mirror;
        let parts = Parts { reopen, allocate, config, geometry, window, mirror, peer_geometry };
        let beside = Frames::new(channel, self.links.len(), maker(parts));
        let links =
            self.links.into_iter().map(|link| link.map(|link| Box::new(link) as Box<dyn Rail>)).collect();
        Rails::new(links, Box::new(beside), options, 0)
    }
}
