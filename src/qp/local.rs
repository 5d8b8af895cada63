//! Joining two ranks of one host: each hands the other its link segment and its
//! window, to read.

use std::os::fd::AsFd;
use std::sync::Arc;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Segment, check_header};
use pushgate_driver_shim::window::Piece;
use pushgate_proxy::idle::Wake;
use pushgate_proxy::proxy::QpFds;
use serde::{Deserialize, Serialize};

use super::join::{Inbound, Joined, Own, segment};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{Frame, Mesh};

/// What one end tells the other about its segments.
#[derive(Serialize, Deserialize)]
struct Offer {
    abi: u32,
    link: usize,
    window: usize,
    posted_receives: bool,
    /// Its engine sleeps and must be rung; else it polls.
    rings: bool,
}

/// What this transport needs of ours.
pub(super) struct LocalHalf {
    link: Arc<SharedMemory>,
}

impl LocalHalf {
    pub(super) fn offer(context: &Context, mesh: &Mesh, peer: u32, label: u32, own: &Own) -> Result<Self> {
        let link = segment(context, &own.geometry, Segment::Link)?;
        let offer = Offer {
            abi: abi::PUSHGATE_ABI_VERSION,
            link: link.len(),
            window: own.window.len(),
            posted_receives: own.config.posted_receives,
            rings: context.inner.wake == Wake::Doorbell,
        };
        let bytes = serde_json::to_vec(&offer).expect("an offer is plain data");
        mesh.send(peer, label, &bytes, &[link.fd(), own.window.fd(), context.inner.bell.as_fd()])?;
        Ok(LocalHalf { link })
    }

    pub(super) fn join(
        self,
        context: &Context,
        mesh: &Mesh,
        peer: u32,
        own: Own,
        (bytes, fds): Frame,
    ) -> Result<Joined> {
        let mismatch = |reason: String| Error::Mismatch { rank: peer, reason };
        let offer: Offer = serde_json::from_slice(&bytes)
            .map_err(|e| mismatch(format!("its offer of a queue pair: {e}; is its qp = local too?")))?;
        if offer.abi != abi::PUSHGATE_ABI_VERSION {
            return Err(mismatch(format!(
                "it speaks ABI version {}, this is {}; run the same build on both",
                offer.abi,
                abi::PUSHGATE_ABI_VERSION
            )));
        }
        let [link, window, bell] = <[_; 3]>::try_from(fds)
            .map_err(|fds| mismatch(format!("{} descriptors with a queue pair, expected 3", fds.len())))?;
        // At most what the limits of the ABI allow, whatever it says.
        const MOST: usize = 1 << 30;
        if offer.link > MOST || offer.window > MOST {
            return Err(mismatch(format!("segments of {} and {} bytes", offer.link, offer.window)));
        }
        let peer_link = Arc::new(ReadOnlyMemory::from_fd(link, offer.link)?);
        let peer_window = Arc::new(ReadOnlyMemory::from_fd(window, offer.window)?);
        // SAFETY: `check_header` only loads.
        let words = unsafe { peer_link.words(0, 8.min(peer_link.len() / 8)) };
        let theirs = check_header(words, Segment::Link, peer_link.len())
            .map_err(|e| mismatch(format!("its link segment: {e}")))?;
        if theirs.rank != peer {
            return Err(mismatch(format!("its link segment says rank {}", theirs.rank)));
        }
        let bell = EventFd::from_fd(bell).map_err(Error::io("doorbell of the peer"))?;
        let [work, control] = own.memory.clone().expect("settings refuse other places with qp = local");
        let fds = QpFds {
            work,
            control,
            link: self.link.clone(),
            peer_link,
            peer_window: peer_window.clone(),
            // Without one, every pass saves the fence that looks if it sleeps.
            peer_bell: offer.rings.then_some(bell),
            peer_pid: mesh.pid(peer),
        };
        let proxy = &context.inner.proxy;
        let id = proxy.add_qp(fds, own.options(context, peer), context.inner.wake)?;
        // The engine has its own writable mapping now, wherever it runs.
        self.link.seal_against_writers()?;
        {
            let mut members = context.inner.members.lock().unwrap_or_else(|e| e.into_inner());
            members.retain(|(control, ..)| control.is_alive());
            members.push((
                own.control.downgrade(),
                Piece::whole(self.link.clone()).downgrade(),
                own.geometry.rank,
            ));
        }
        Ok(Joined { id, own, inbound: Inbound::Window(peer_window), peer_geometry: theirs })
    }
}
