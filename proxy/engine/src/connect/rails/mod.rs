//! An end of a queue pair over several RDMA devices: a link for each, in the order in which the two ends name them.

mod frames;

use std::sync::Arc;
use std::time::Duration;

use pushgate_core::rails::{MOST_RAILS, Rules};
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Window;
use pushgate_link::Rail;
use pushgate_link_verbs::{
    Allocate, Config, Device, Offer, Places, VerbsAway, VerbsError, VerbsLink, VerbsOpening, VerbsPrepared,
};

use self::frames::Frames;
pub use self::frames::RailFrames;
use super::Patience;
use crate::rails::{Options, Rails};

/// A message is not cut into stripes shorter than this, bytes. A stripe costs its record's WRITE and a look at it at the
/// other end, about as much as 16 KiB take on the wire of a fast NIC (1.3 us at 100 Gbit/s).
const SHORTEST: u32 = 16 << 10;

/// One of several devices at this end.
enum One<There, Away> {
    /// The rail carries.
    There(There),
    /// The rail can't carry anything yet at one of the ends: it is joined later, as one that broke.
    Away(Away),
}

impl<There, Away> One<There, Away> {
    fn there(&self) -> Option<&There> {
        match self {
            One::There(there) => Some(there),
            One::Away(_) => None,
        }
    }
}

/// This end over several devices, before the other end is known.
pub struct RailsOpening {
    openings: Vec<One<VerbsOpening, VerbsAway>>,
    /// Why the first device that is away is so.
    away: Option<VerbsError>,
    geometry: Geometry,
}

/// This end over several devices, ready to receive.
pub struct RailsPrepared {
    all: Vec<One<VerbsPrepared, VerbsLink>>,
    geometry: Geometry,
}

/// This end over several devices, once both ends are ready.
pub struct RailsMet {
    links: Vec<One<VerbsLink, VerbsLink>>,
    /// The copy of the peer's window, where its payload arrives.
    pub mirror: Arc<SharedMemory>,
    /// The peer's rings, checked.
    pub peer_geometry: Geometry,
    peer_posts: bool,
    geometry: Geometry,
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
        let config = &Config { rail: true, ..config.clone() };
        let (mut openings, mut away) = (Vec::with_capacity(devices.len()), None);
        for device in devices {
            let window = window.clone();
            openings.push(match device.as_now() {
                Ok(device) => {
                    One::There(VerbsOpening::new(&device, config, geometry, window, &mut *allocate)?)
                }
                Err(why @ VerbsError::PortDown { .. }) => {
                    tracing::debug!("a rail is missing at the start: {why}");
                    away.get_or_insert(why);
                    One::Away(VerbsAway::new(device, config, geometry, window, &mut *allocate)?)
                }
                Err(e) => return Err(e),
            });
        }
        if openings.iter().all(|one| one.there().is_none()) {
            return Err(away.expect("there is a device"));
        }
        Ok(RailsOpening { openings, away, geometry })
    }

    /// Why a rail is missing, if one is.
    pub fn away(&mut self) -> Option<VerbsError> {
        self.away.take()
    }

    pub(super) fn offer(&self) -> Vec<Option<Offer>> {
        self.openings.iter().map(|one| one.there().map(VerbsOpening::offer)).collect()
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
        let mut first: Option<(Arc<SharedMemory>, Geometry, bool)> = None;
        let mut all = Vec::with_capacity(self.openings.len());
        for both in self.openings.into_iter().zip(offers) {
            all.push(match both {
                (One::There(opening), Some(offer)) => {
                    let beside = first.as_ref().map(|(mirror, geometry, _)| (mirror, *geometry));
                    let prepared = opening.prepare_beside(beside, peer, offer, allocate)?;
                    first.get_or_insert_with(|| {
                        (prepared.mirror().clone(), prepared.peer_geometry(), prepared.peer_receives())
                    });
                    One::There(prepared)
                }
                (One::There(opening), None) => One::Away(opening.away()),
                (One::Away(away), _) => One::Away(away),
            });
        }
        let Some((mirror, geometry, posts)) = first else {
            let why = "no port of its RDMA devices is up whose partner, by the order in ib-dev, is up here";
            return Err(VerbsError::Peer { rank: peer, why: why.into() });
        };
        let all = all.into_iter().map(|one| {
            Ok(match one {
                One::There(prepared) => One::There(prepared),
                One::Away(away) => One::Away(away.join(mirror.clone(), geometry, posts, &mut *allocate)?),
            })
        });
        Ok(RailsPrepared { all: all.collect::<Result<_, VerbsError>>()?, geometry: self.geometry })
    }
}

impl RailsPrepared {
    pub(super) fn places(&self) -> Vec<Places> {
        self.all.iter().filter_map(One::there).map(VerbsPrepared::places).collect()
    }

    pub(super) fn meet(self, places: Vec<Places>) -> Result<RailsMet, VerbsError> {
        let first = self.all.iter().find_map(One::there).expect("one carries");
        let (mirror, peer_geometry, peer_posts) =
            (first.mirror().clone(), first.peer_geometry(), first.peer_receives());
        let carry = self.all.iter().filter_map(One::there).count();
        if places.len() != carry {
            let why = format!("it has places of {} links, expected {carry}", places.len());
            return Err(VerbsError::Peer { rank: peer_geometry.rank, why });
        }
        let mut places = places.into_iter();
        let links = self.all.into_iter().map(|one| {
            Ok(match one {
                One::There(one) => One::There(one.join(places.next().expect("as many as links"))?),
                One::Away(link) => One::Away(link),
            })
        });
        let links = links.collect::<Result<_, VerbsError>>()?;
        let (geometry, shortest) = (self.geometry, SHORTEST);
        Ok(RailsMet { links, mirror, peer_geometry, peer_posts, geometry, shortest })
    }
}

impl RailsMet {
    /// Makes one link of the links of all devices. A rail that breaks comes back over another link of its device. For `recover` the ends
    /// may be without a rail; `jitter` tells many queue pairs' attempts apart.
    pub fn join(self, channel: RailFrames, recover: Duration, jitter: u64) -> Rails {
        let (geometry, peer_geometry) = (self.geometry, self.peer_geometry);
        let options = Options {
            rules: Rules { window_log: geometry.link_log, shortest: self.shortest },
            peer_window_log: peer_geometry.link_log,
            patience: Patience::within(recover, jitter),
            recover: u64::try_from(recover.as_nanos()).unwrap_or(u64::MAX),
            peer_posts: self.peer_posts,
            ranks: [geometry.rank, peer_geometry.rank],
        };
        let links = self.links.into_iter().map(|one| match one {
            One::There(link) => (Box::new(link) as Box<dyn Rail>, true),
            One::Away(link) => (Box::new(link) as Box<dyn Rail>, false),
        });
        Rails::new(links.collect(), Box::new(Frames::new(channel)), options, 0)
    }
}
