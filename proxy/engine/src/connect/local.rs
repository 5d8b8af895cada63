//! An end of a `local` queue pair: what it offers the other end, and what it makes of the other end's offer.
//!
//! An end offers its link segment and its window, as descriptors with their sizes. If its engine sleeps, it also hands over
//! the ringer of a doorbell, which no other peer has.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pushgate_driver_shim::bell::{Bell, Ringer};
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, check_header};
use pushgate_driver_shim::versions::{ABI, Versions};
use pushgate_driver_shim::window::Window;
use serde::{Deserialize, Serialize};

use crate::proxy::QpFds;

/// One end's offer of a `local` queue pair: the sizes of its link segment and window, and how its engine is woken. The
/// descriptors travel beside the offer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LocalOffer {
    abi: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest_abi: Option<u32>,
    link: usize,
    window: usize,
    posted_receives: bool,
    /// Its engine sleeps and must be rung; else it polls.
    rings: bool,
    /// It replaces a link that breaks. An earlier release says nothing, and does not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    recovers: bool,
    /// Rings may come over the socket of the ends' programs, in place of the doorbell. An earlier release says nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    beside: bool,
}

/// The other end's memory, mapped for reading, and its doorbell.
pub struct LocalPeer {
    /// The other end's link segment.
    pub link: Arc<ReadOnlyMemory>,
    /// The other end's window.
    pub window: Arc<ReadOnlyMemory>,
    /// The sizes of the other end's rings, checked.
    pub geometry: Geometry,
    /// The doorbell of the other end's engine, if that engine sleeps.
    pub bell: Option<Ringer>,
}

/// This end of a `local` queue pair, before the other is known.
pub struct LocalOpening {
    link: Arc<SharedMemory>,
    window: Arc<dyn Window>,
    posted_receives: bool,
    /// The bell that only the other end rings, and the ringer that it is handed.
    bells: Option<(Bell, Ringer)>,
    recovers: bool,
    beside: bool,
}

/// This end of a `local` queue pair, with the other end's memory and doorbell.
pub struct LocalPrepared {
    link: Arc<SharedMemory>,
    bell: Option<Bell>,
    peer: LocalPeer,
    recovers: bool,
    beside: bool,
}

/// This end of a `local` queue pair, once both ends are ready: what an engine is handed.
pub struct LocalMet {
    /// Our link segment.
    pub link: Arc<SharedMemory>,
    /// The bell that the peer rings to wake our engine from sleep.
    pub bell: Option<Bell>,
    /// The peer's memory and doorbell.
    pub peer: LocalPeer,
    /// Both ends replace a link that breaks.
    pub recovers: bool,
    /// The ends' engines wake each other over the programs' socket, and have no doorbells.
    pub beside: bool,
}

impl LocalOpening {
    /// An end with this memory. `bells`: the engine sleeps, and this is how the peer wakes it.
    pub fn new(
        link: Arc<SharedMemory>,
        window: Arc<dyn Window>,
        posted_receives: bool,
        bells: Option<(Bell, Ringer)>,
    ) -> Self {
        LocalOpening { link, window, posted_receives, bells, recovers: false, beside: false }
    }

    /// Has the end replace a link that breaks, if the other end does so too ([`LocalMet::recovers`]).
    pub fn recovering(self) -> Self {
        LocalOpening { recovers: true, ..self }
    }

    /// Has the engines ring over the socket that the programs keep, if both ends can, replace links and sleep
    /// ([`LocalMet::beside`]): a doorbell takes two descriptors of each end.
    pub fn ringing_beside(self) -> Self {
        LocalOpening { beside: true, ..self }
    }

    pub(super) fn offer(&self) -> LocalOffer {
        LocalOffer {
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            link: self.link.len(),
            window: self.window.len(),
            posted_receives: self.posted_receives,
            rings: self.bells.is_some(),
            recovers: self.recovers,
            beside: self.beside,
        }
    }

    /// The descriptors that go with the offer, in their order.
    pub(super) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let ringer = self.bells.as_ref().map(|(_, ringer)| ringer.as_fd());
        [self.link.fd(), self.window.fd()].into_iter().chain(ringer).collect()
    }

    pub(super) fn prepare(
        self,
        peer: u32,
        offer: &LocalOffer,
        fds: Vec<OwnedFd>,
    ) -> Result<LocalPrepared, String> {
        let mut peer = offer.take(fds, peer)?;
        let mut bell = self.bells.map(|(bell, _)| bell);
        let recovers = self.recovers && offer.recovers;
        // Where one end's engine polls, the other end's bell is the one that is left.
        let beside = recovers && self.beside && offer.beside && bell.is_some() && peer.bell.is_some();
        if beside {
            (bell, peer.bell) = (None, None);
        }
        Ok(LocalPrepared { link: self.link, bell, peer, recovers, beside })
    }
}

impl LocalPrepared {
    pub(super) fn meet(self) -> LocalMet {
        let LocalPrepared { link, bell, peer, recovers, beside } = self;
        LocalMet { link, bell, peer, recovers, beside }
    }
}

impl LocalMet {
    /// What an engine is handed, with this end's own segments. `peer_pid` is the peer's process, by its number in our PID
    /// namespace, if it has one.
    pub fn into_fds(
        self,
        work: Arc<SharedMemory>,
        control: Arc<SharedMemory>,
        peer_pid: Option<u32>,
    ) -> QpFds {
        QpFds {
            work,
            control,
            link: self.link,
            peer_link: self.peer.link,
            peer_window: self.peer.window,
            bell: self.bell,
            peer_bell: self.peer.bell,
            peer_pid,
        }
    }
}

impl LocalOffer {
    /// How many descriptors go with it.
    pub(super) fn descriptors(&self) -> usize {
        2 + self.rings as usize
    }

    /// Takes the offer of rank `peer`: checks it, and maps its memory for reading. An error is a sentence.
    fn take(&self, fds: Vec<OwnedFd>, peer: u32) -> Result<LocalPeer, String> {
        ABI.agree(Versions::told(self.abi, self.newest_abi)).map_err(|e| format!("segments: {e}"))?;
        let (n, expected) = (fds.len(), self.descriptors());
        let mut fds = fds.into_iter();
        let (Some(link), Some(window), bell, true) = (fds.next(), fds.next(), fds.next(), n == expected)
        else {
            return Err(format!("{n} descriptors with a queue pair, expected {expected}"));
        };
        // At most what the limits of the ABI allow, whatever it says.
        const MOST: usize = 1 << 30;
        if self.link > MOST || self.window > MOST {
            return Err(format!("segments of {} and {} bytes", self.link, self.window));
        }
        let map = |fd, bytes| ReadOnlyMemory::from_fd(fd, bytes).map(Arc::new).map_err(|e| e.to_string());
        let (link, window) = (map(link, self.link)?, map(window, self.window)?);
        // SAFETY: `check_header` only loads.
        let words = unsafe { link.words(0, 8.min(link.len() / 8)) };
        let geometry =
            check_header(words, Segment::Link, link.len()).map_err(|e| format!("its link segment: {e}"))?;
        if geometry.rank != peer {
            return Err(format!("its link segment says rank {}", geometry.rank));
        }
        // A peer without a doorbell polls, so no pass needs the fence before it looks whether the peer sleeps.
        let bell = bell.map(Ringer::from_fd).transpose().map_err(|e| format!("its doorbell: {e}"))?;
        Ok(LocalPeer { link, window, geometry, bell })
    }
}
