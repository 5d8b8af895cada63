//! An end of a queue pair over RDMA: its offer, and what it becomes once the other end is known.

use std::sync::Arc;

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Window;

use crate::link::verbs::{Accepted, Allocate, Config, Device, Half, Offer, Places, VerbsError, VerbsLink};
use crate::receives::PostedReceives;

/// This end over RDMA, before the other end is known: its queue pair is made, and its window registered.
pub struct VerbsOpening(Half);

/// This end over RDMA, ready to receive.
pub struct VerbsPrepared(Accepted);

/// This end over RDMA, once both ends are ready: what an endpoint is made of.
pub struct VerbsMet {
    /// The link, for [`Endpoint::new`](crate::endpoint::Endpoint::new).
    pub link: VerbsLink,
    /// The copy of the peer's window, where its payload arrives.
    pub mirror: Arc<SharedMemory>,
    /// The peer's rings, checked.
    pub peer_geometry: Geometry,
    /// The peer's posted receives, as its RDMA device writes them here, if it posts any.
    pub receives: Option<PostedReceives>,
}

impl VerbsOpening {
    /// Registers `window`, this end's payload ring, and makes the queue pair; the geometry is checked.
    pub fn new(
        device: &Arc<Device>,
        config: &Config,
        geometry: Geometry,
        window: Arc<dyn Window>,
        allocate: &mut Allocate<'_>,
    ) -> Result<Self, VerbsError> {
        Half::new(device, config, geometry, window, allocate).map(VerbsOpening)
    }

    pub(super) fn offer(&self) -> Offer {
        self.0.offer()
    }

    pub(super) fn prepare(
        self,
        peer: u32,
        offer: &Offer,
        allocate: &mut Allocate<'_>,
    ) -> Result<VerbsPrepared, VerbsError> {
        self.0.accept(peer, offer, allocate).map(VerbsPrepared)
    }
}

impl VerbsPrepared {
    pub(super) fn places(&self) -> Places {
        self.0.places()
    }

    pub(super) fn meet(self, places: Places) -> Result<VerbsMet, VerbsError> {
        let (mirror, peer_geometry) = (self.0.mirror().clone(), self.0.peer_geometry());
        let receives = self.0.posted_receives();
        Ok(VerbsMet { link: self.0.join(places)?, mirror, peer_geometry, receives })
    }
}
