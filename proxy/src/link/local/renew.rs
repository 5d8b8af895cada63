//! The next link of a `local` session: each end makes a new link segment and hands it to the peer. Records and counts begin
//! at 0 over zeroed memory, so no word of an earlier link is taken for one of this link. Windows, doorbells and regions stay.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, check_header, write_header};
use serde::{Deserialize, Serialize};

use super::LocalLink;
use crate::frame::Frame;
use crate::link::process_memory::NOWHERE;
use crate::link::{Renew, RenewError};
use crate::memory::Mapped;
use crate::segments::{LinkAtPeer, LinkOfEngine};

/// Makes the memory of a link segment of so many bytes.
pub type MakeSegment = Box<dyn FnMut(usize) -> Result<Arc<SharedMemory>, ShimError> + Send>;

/// What an end tells the peer of its next link. The segment's descriptor goes beside it.
#[derive(Serialize, Deserialize)]
struct LinkOffer {
    /// Bytes of the link segment.
    link: usize,
}

/// The next link, as far as it is made, and what making it takes.
pub(super) struct Next {
    pub(super) make: MakeSegment,
    geometry: Geometry,
    peer_geometry: Geometry,
    in_program: bool,
    /// Whether this engine can read the peer's process, `PUSHGATE_READS_*`; 0: it has not tried.
    pub(super) answer: u64,
    own: Option<LinkOfEngine>,
    /// The peer's segment of the latest attempt. It stays when the attempt is given up: a peer that went live over it, and
    /// ends, says so there.
    peer: Option<LinkAtPeer>,
}

impl Next {
    pub(super) fn new(geometry: Geometry, peer_geometry: Geometry, in_program: bool) -> Self {
        let make = Box::new(|bytes| {
            let memory = SharedMemory::builder("pushgate-link", bytes).huge_pages(HugePages::Never);
            memory.create().map(Arc::new)
        });
        Next { make, geometry, peer_geometry, in_program, answer: 0, own: None, peer: None }
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
        if let Some(own) = &self.own {
            own.status(word);
        }
    }

    pub(super) fn peer_status(&self) -> u64 {
        self.peer.as_ref().map_or(0, LinkAtPeer::status)
    }

    fn take(&self, offer: Frame) -> Result<LinkAtPeer, RenewError> {
        let peer = |why: String| RenewError::Peer(why);
        let LinkOffer { link } = serde_json::from_slice(&offer.bytes)
            .map_err(|e| peer(format!("its offer of the next link: {e}")))?;
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

impl Renew for LocalLink {
    fn offer(&mut self) -> Result<Frame, RenewError> {
        let here = |e: &dyn std::fmt::Display| RenewError::Here(format!("a link segment: {e}"));
        let next = &mut self.next;
        let memory = (next.make)(next.geometry.bytes(Segment::Link)).map_err(|e| here(&e))?;
        write_header(&memory, Segment::Link, &next.geometry).map_err(|e| here(&e))?;
        memory.seal_against_writers().map_err(|e| here(&e))?;
        let fd = memory.fd().try_clone_to_owned().map_err(|e| here(&e))?;
        let offer = LinkOffer { link: memory.len() };
        next.own = Some(next.segment(&memory.into()));
        let bytes = serde_json::to_vec(&offer).expect("an offer is plain data");
        Ok(Frame { bytes, along: vec![fd].into() })
    }

    fn prepare(&mut self, offer: Frame) -> Result<Vec<u8>, RenewError> {
        self.next.peer = Some(self.next.take(offer)?);
        Ok(Vec::new())
    }

    fn go(&mut self, _places: &[u8], accepted: u64) -> Result<(), RenewError> {
        let (Some(own), Some(peer)) = (self.next.own.take(), self.next.peer.take()) else {
            unreachable!("a link goes live when both ends have prepared")
        };
        for region in self.regions.values_mut() {
            (region.before, region.used) = (region.last(self.base), 0);
        }
        (self.own, self.peer) = (own, peer);
        (self.base, self.sent, self.completed, self.inbound) = (accepted, 0, accepted, 0);
        self.dirty = true;
        Ok(())
    }
}
