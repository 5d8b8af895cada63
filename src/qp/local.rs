//! Joins two ranks of one host: each hands the other its link segment and its window for reading.

use std::sync::Arc;

use pushgate_driver_shim::bell::{self, Bell};
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Segment;
use pushgate_driver_shim::window::Piece;
use pushgate_proxy::idle::Wake;
use pushgate_proxy::offer::LocalOffer;
use pushgate_proxy::proxy::QpFds;

use super::memory::{DrivenEnd, InboundPayload, Own, segment};
use super::undo::Undo;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{Frame, SetUp};

/// What the `local` transport needs of this end.
pub(super) struct LocalEnd {
    link: Arc<SharedMemory>,
    /// The bell that only this peer rings, if our engine sleeps.
    bell: Option<Bell>,
}

impl LocalEnd {
    pub(super) fn offer(context: &Context, set_up: &mut SetUp<'_>, own: &Own) -> Result<Self> {
        let link = segment(context, &own.geometry, Segment::Link)?;
        let rings = context.inner.wake == Wake::Doorbell;
        let (bell, ringer) =
            rings.then(bell::pair).transpose().map_err(Error::io("a doorbell's sockets"))?.unzip();
        let offer = LocalOffer::new(&link, &*own.window, own.config.posted_receives, rings);
        let bytes = serde_json::to_vec(&offer).expect("an offer is plain data");
        set_up.offer(bytes, &LocalOffer::fds(&link, &*own.window, ringer.as_ref()))?;
        Ok(LocalEnd { link, bell })
    }

    pub(super) fn join(
        self,
        context: &Context,
        set_up: &SetUp<'_>,
        own: Own,
        (bytes, fds): Frame,
    ) -> Result<DrivenEnd> {
        let peer = set_up.peer;
        let mismatch = |reason: String| Error::Mismatch { rank: peer, reason };
        let offer: LocalOffer = serde_json::from_slice(&bytes)
            .map_err(|e| mismatch(format!("its offer of a queue pair: {e}; is its qp = local too?")))?;
        let theirs = offer.take(fds, peer).map_err(mismatch)?;
        let [work, control] = own.memory.clone().expect("settings refuse other places with qp = local");
        let fds = QpFds {
            work,
            control,
            link: self.link.clone(),
            peer_link: theirs.link,
            peer_window: theirs.window.clone(),
            bell: self.bell,
            peer_bell: theirs.bell,
            peer_pid: set_up.mesh.pid(peer),
        };
        let proxy = &context.inner.proxy;
        let id = proxy.add_qp(fds, own.options(context, peer), context.inner.wake)?;
        let undo = Undo::new(context, id);
        // The engine has its own writable mapping now, wherever it runs. The peer already has the
        // descriptor, and may have sealed it first so that this call fails.
        self.link.seal_against_writers()?;
        undo.done();
        let link = Piece::whole(self.link.clone());
        context.inner.members.add(own.control.downgrade(), link.downgrade(), own.geometry.rank);
        Ok(DrivenEnd {
            id,
            own,
            inbound: InboundPayload::Window(theirs.window),
            peer_geometry: theirs.geometry,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::fs::{SealFlags, fcntl_add_seals};

    use super::*;
    use crate::Settings;
    use crate::mesh::{Events, Mesh, QUEUE_PAIRS};
    use crate::qp::QpConfig;

    #[test]
    fn p8_a_peer_that_seals_a_link_segment_first_leaves_no_queue_pair_in_the_engine() {
        let mut settings = Settings::default();
        settings.set("device", "cpu").unwrap();
        let context = Context::builder().settings(settings).build().unwrap();
        let mut meshes = Mesh::local(2, pushgate_tests::hang()).unwrap();
        for mesh in &mut meshes {
            mesh.listen(Events { lost: Box::new(|_| {}), ended: Box::new(|_| {}) }).unwrap();
        }
        let [a, b] = &meshes[..] else { unreachable!("two ranks") };
        let (mut ours, mut theirs) = (a.set_up(1, QUEUE_PAIRS), b.set_up(0, QUEUE_PAIRS));
        let offer = |set_up: &mut SetUp<'_>| {
            let own = Own::new(&context, set_up.mesh.rank, QpConfig::default()).unwrap();
            let half = LocalEnd::offer(&context, set_up, &own).unwrap();
            (half, own)
        };
        let ((half, own), _theirs) = (offer(&mut ours), offer(&mut theirs));
        ours.take_offer().unwrap();
        let (_, fds) = theirs.agree().unwrap();
        fcntl_add_seals(&fds[0], SealFlags::SEAL).unwrap();
        let link = Arc::downgrade(&half.link);
        let offer = ours.agree().unwrap();
        let failed = half.join(&context, &ours, own, offer).err().expect("a seal is refused");
        assert!(failed.to_string().contains("F_ADD_SEALS"), "{failed}");
        // An engine that still had the queue pair would hold its link segment.
        let begin = Instant::now();
        while link.strong_count() > 0 {
            assert!(begin.elapsed() < pushgate_tests::hang(), "a queue pair is left in the engine");
            std::thread::yield_now();
        }
    }
}
