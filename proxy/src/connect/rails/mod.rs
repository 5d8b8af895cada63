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
    openings: Vec<VerbsOpening>,
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
    all: Vec<VerbsPrepared>,
    same: Same,
}

/// This end over several devices, once both ends are ready.
pub struct RailsMet {
    links: Vec<VerbsLink>,
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
    /// Registers the window with each device, and makes a queue pair on each. `config` is that of every link.
    pub fn new(
        devices: &[Arc<Device>],
        config: &Config,
        geometry: Geometry,
        window: &Arc<dyn Window>,
        allocate: &mut Allocate<'_>,
    ) -> Result<Self, VerbsError> {
        let config = Config { rail: true, ..config.clone() };
        let open = |device| VerbsOpening::new(device, &config, geometry, window.clone(), &mut *allocate);
        let openings = devices.iter().map(open).collect::<Result<_, _>>()?;
        let window = window.clone();
        Ok(RailsOpening { openings, same: Same { config, geometry, window } })
    }

    pub(super) fn offer(&self) -> Vec<Offer> {
        self.openings.iter().map(VerbsOpening::offer).collect()
    }

    /// As many rails as the end that names fewer devices.
    pub(super) fn prepare(
        self,
        peer: u32,
        offers: &[Offer],
        allocate: &mut Allocate<'_>,
    ) -> Result<RailsPrepared, VerbsError> {
        if !(1..=MOST_RAILS).contains(&offers.len()) {
            let why = format!("it offers {} RDMA devices, expected 1 to {MOST_RAILS}", offers.len());
            return Err(VerbsError::Peer { rank: peer, why });
        }
        let mut all: Vec<VerbsPrepared> = Vec::with_capacity(self.openings.len());
        for (opening, offer) in self.openings.into_iter().zip(offers) {
            let first = all.first().map(|first| (first.mirror(), first.peer_geometry()));
            let prepared = opening.prepare_beside(first, peer, offer, allocate)?;
            all.push(prepared);
        }
        Ok(RailsPrepared { all, same: self.same })
    }
}

impl RailsPrepared {
    pub(super) fn places(&self) -> Vec<Places> {
        self.all.iter().map(VerbsPrepared::places).collect()
    }

    pub(super) fn meet(self, places: Vec<Places>) -> Result<RailsMet, VerbsError> {
        let (first, same) = (&self.all[0], self.same);
        let (mirror, peer_geometry, peer_posts) =
            (first.mirror().clone(), first.peer_geometry(), first.peer_receives());
        if places.len() != self.all.len() {
            let why = format!("it has places of {} links, expected {}", places.len(), self.all.len());
            return Err(VerbsError::Peer { rank: peer_geometry.rank, why });
        }
        let links = self.all.into_iter().zip(places).map(|(one, places)| one.join(places));
        let links = links.collect::<Result<_, _>>()?;
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
        let links = self.links.into_iter().map(|link| Box::new(link) as Box<dyn Rail>).collect();
        Rails::new(links, Box::new(beside), options, 0)
    }
}
