//! The next link of an end within one host, as far as it is made; `renew.rs` makes it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, check_header};
use serde::{Deserialize, Serialize};

use crate::RenewError;
use crate::frame::Frame;
use crate::memory::Mapped;
use crate::process_memory::NOWHERE;
use crate::segments::{LinkAtPeer, LinkOfEngine};

/// Makes the memory of a link segment, whose size in bytes it is given.
pub type MakeSegment = Box<dyn FnMut(usize) -> Result<Arc<SharedMemory>, ShimError> + Send>;

/// What an end tells the peer of its next link. The segment's descriptor goes beside it.
#[derive(Serialize, Deserialize)]
pub(super) struct LinkOffer {
    /// Bytes of the link segment.
    pub(super) link: usize,
}

/// The next link, as far as it is made, and what making it takes.
pub(super) struct Next {
    pub(super) make: MakeSegment,
    pub(super) geometry: Geometry,
    pub(super) peer_geometry: Geometry,
    pub(super) in_program: bool,
    /// Whether this engine can read the peer's process, `PUSHGATE_READS_*`; 0: it has not tried.
    pub(super) answer: u64,
    pub(super) own: Option<LinkOfEngine>,
    /// The peer may be live over `own`: this end got ready for the attempt.
    pub(super) ready: bool,
    /// The segment of the last attempt for which this end got ready, and which was given up. The peer may be live over that
    /// segment, and has to find this end's status there: once this end has ended, its program may use the memory of a region
    /// for something else, which the peer must not show as a message (P3).
    pub(super) given_up: Option<LinkOfEngine>,
    /// The peer's segment of the latest attempt. It stays when the attempt is given up: a peer that went live over it, and
    /// ends, says so there.
    pub(super) peer: Option<LinkAtPeer>,
}

impl Next {
    pub(super) fn new(geometry: Geometry, peer_geometry: Geometry, in_program: bool) -> Self {
        let make = Box::new(|bytes| {
            let memory = SharedMemory::builder("pushgate-link", bytes).huge_pages(HugePages::Never);
            memory.create().map(Arc::new)
        });
        Next {
            make,
            geometry,
            peer_geometry,
            in_program,
            answer: 0,
            own: None,
            ready: false,
            given_up: None,
            peer: None,
        }
    }

    /// A segment of this end, whose header was checked. Says there where the peer finds what this end names.
    pub(super) fn segment(&self, memory: &Mapped) -> LinkOfEngine {
        let own = LinkOfEngine::new(memory, &self.geometry);
        // The program maps the segment too, and may have it at our address: only its own
        // engine may say where the peer finds what it names.
        own.address(if self.in_program { memory.address() as u64 } else { NOWHERE });
        if self.answer != 0 {
            own.reads(self.answer);
        }
        own
    }

    pub(super) fn set_status(&self, word: u64) {
        self.own.iter().chain(&self.given_up).for_each(|own| own.status(word));
    }

    pub(super) fn peer_status(&self) -> u64 {
        self.peer.as_ref().map_or(0, LinkAtPeer::status)
    }

    /// Takes the peer's offer: its segment, checked.
    pub(super) fn take(&self, offer: Frame) -> Result<LinkAtPeer, RenewError> {
        let peer = |why: String| RenewError::Peer(why);
        let LinkOffer { link } = serde_json::from_slice(&offer.bytes)
            .map_err(|e| peer(format!("its offer of the next link: {}", Foreign::word(e))))?;
        let fds = offer.along.into_owned();
        let fds =
            fds.map_err(|e| RenewError::Here(format!("a descriptor of the peer's link segment: {e}")))?;
        let [fd]: [OwnedFd; 1] = fds.try_into().map_err(|fds: Vec<_>| {
            peer(format!("{} descriptors with its offer of the next link, expected 1", fds.len()))
        })?;
        let expected = self.peer_geometry.bytes(Segment::Link);
        if link != expected {
            return Err(peer(format!("a link segment of {link} bytes, expected {expected}")));
        }
        let memory = ReadOnlyMemory::from_fd(fd, link).map_err(|e| match e {
            ShimError::System { .. } => RenewError::Here(format!("the peer's link segment: {e}")),
            e => peer(format!("its link segment: {e}")),
        })?;
        // SAFETY: `check_header` only loads.
        let words = unsafe { memory.words(0, 8) };
        let geometry =
            check_header(words, Segment::Link, link).map_err(|e| peer(format!("its link segment: {e}")))?;
        if geometry != self.peer_geometry {
            let expected = self.peer_geometry;
            return Err(peer(format!("its link segment says {geometry:?}, expected {expected:?}")));
        }
        Ok(LinkAtPeer::new(&Arc::new(memory).into(), &geometry))
    }
}
