//! What one end of a `local` queue pair tells the other: the sizes of its link
//! segment and window, whose descriptors go along, and if its engine sleeps the ringer of a
//! doorbell that is this peer's alone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pushgate_driver_shim::bell::Ringer;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, check_header};
use pushgate_driver_shim::versions::{ABI, Versions};
use pushgate_driver_shim::window::Window;
use serde::{Deserialize, Serialize};

/// One end's offer of a `local` queue pair: the sizes of its link segment and window, and how its
/// engine is woken. The descriptors travel beside it.
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
}

/// What an end has of the other.
pub struct LocalPeer {
    /// Its link segment.
    pub link: Arc<ReadOnlyMemory>,
    /// Its window.
    pub window: Arc<ReadOnlyMemory>,
    /// Its rings, checked.
    pub geometry: Geometry,
    /// Its engine's doorbell, if that sleeps.
    pub bell: Option<Ringer>,
}

impl LocalOffer {
    /// Of an end with this memory. `rings`: its engine sleeps and must be rung.
    pub fn new(link: &SharedMemory, window: &dyn Window, posted_receives: bool, rings: bool) -> Self {
        LocalOffer {
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            link: link.len(),
            window: window.len(),
            posted_receives,
            rings,
        }
    }

    /// The descriptors that go with it, in their order. `ringer` is what the peer is to ring, if
    /// our engine sleeps.
    pub fn fds<'a>(
        link: &'a SharedMemory,
        window: &'a dyn Window,
        ringer: Option<&'a Ringer>,
    ) -> Vec<BorrowedFd<'a>> {
        let ringer = ringer.map(|ringer| ringer.as_fd());
        [link.fd(), window.fd()].into_iter().chain(ringer).collect()
    }

    /// Takes over what `peer` offers: checks it, and maps its memory to read. A sentence
    /// if it can't be.
    pub fn take(&self, fds: Vec<OwnedFd>, peer: u32) -> Result<LocalPeer, String> {
        ABI.agree(Versions::told(self.abi, self.newest_abi)).map_err(|e| format!("segments: {e}"))?;
        let (n, expected) = (fds.len(), 2 + self.rings as usize);
        let mut fds = fds.into_iter();
        let (Some(link), Some(window), bell, None) = (fds.next(), fds.next(), fds.next(), fds.next()) else {
            return Err(format!("{n} descriptors with a queue pair, expected {expected}"));
        };
        if bell.is_some() != self.rings {
            return Err(format!("{n} descriptors with a queue pair, expected {expected}"));
        }
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
        // Without one, every pass saves the fence that looks if it sleeps.
        let bell = bell.map(Ringer::from_fd).transpose().map_err(|e| format!("its doorbell: {e}"))?;
        Ok(LocalPeer { link, window, geometry, bell })
    }
}
