//! What outlives an engine of a simulated proxy; `restart.rs` makes another engine go on with it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pushgate_driver_shim::bell::{Bell, Ringer};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::journal::session_bytes;
use pushgate_link::memory::Mapped;

/// What outlives an engine of one end, beside the end's rings and regions.
pub(super) struct Kept {
    pub(super) session: Mapped,
    /// Logarithm to base 2 of the ring of posted receives, if there is one.
    pub(super) receives: Option<u32>,
    pub(super) peer_link: Mapped,
    pub(super) peer_geometry: Geometry,
    pub(super) window: Mapped,
    pub(super) bell: Option<OwnedFd>,
    pub(super) peer_bell: Option<OwnedFd>,
}

pub(super) fn copy(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().expect("a descriptor")
}

impl Kept {
    pub(super) fn new(
        receives: Option<u32>,
        peer_link: &Mapped,
        peer_geometry: Geometry,
        window: &Mapped,
        bell: &Option<Bell>,
        peer_bell: &Option<Ringer>,
    ) -> Self {
        Kept {
            session: Mapped::heap(session_bytes(receives)),
            receives,
            peer_link: peer_link.clone(),
            peer_geometry,
            window: window.clone(),
            bell: bell.as_ref().map(|bell| copy(bell.handle())),
            peer_bell: peer_bell.as_ref().map(|bell| copy(bell.as_fd())),
        }
    }
}
