//! What an end of a queue pair over RDMA becomes, once both ends are ready.

use std::sync::Arc;

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::receives::PostedReceives;
use pushgate_link_verbs::{Places, VerbsError, VerbsLink, VerbsPrepared};

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

impl VerbsMet {
    /// Takes the peer's places: the link may send now.
    pub(super) fn new(prepared: VerbsPrepared, places: Places) -> Result<Self, VerbsError> {
        let (mirror, peer_geometry) = (prepared.mirror().clone(), prepared.peer_geometry());
        let receives = prepared.posted_receives();
        Ok(VerbsMet { link: prepared.join(places)?, mirror, peer_geometry, receives })
    }
}
