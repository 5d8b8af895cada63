//! What an end of a queue pair over TCP becomes, once both ends are ready.

use std::sync::Arc;

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::receives::PostedReceives;
use pushgate_link_tcp::{TcpLink, TcpPrepared};

/// This end over TCP, once both ends are ready: what an endpoint is made of.
pub struct TcpMet {
    /// The link, for [`Endpoint::new`](crate::endpoint::Endpoint::new). Its streams may still be on their way
    /// ([`TcpLink::joined`]).
    pub link: TcpLink,
    /// The copy of the peer's window, where its payload arrives.
    pub mirror: Arc<SharedMemory>,
    /// The peer's rings, checked.
    pub peer_geometry: Geometry,
    /// The peer's posted receives, as the peer announces them, if it posts any.
    pub receives: Option<PostedReceives>,
}

impl TcpMet {
    /// Makes the link.
    pub(super) fn new(prepared: TcpPrepared) -> Self {
        let (mirror, peer_geometry) = (prepared.mirror().clone(), prepared.peer_geometry());
        let (link, receives) = prepared.join();
        TcpMet { link, mirror, peer_geometry, receives }
    }
}
