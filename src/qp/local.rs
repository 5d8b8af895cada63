//! A queue pair of two ranks of one host: each hands the other its link segment and its window for reading.

use std::time::Duration;

use pushgate_driver_shim::bell;
use pushgate_driver_shim::segment::Segment;
use pushgate_engine::connect::{LocalMet, LocalOpening, Opening};
use pushgate_engine::idle::Wake;
use pushgate_engine::proxy::Recovers;

use super::memory::{DrivenEnd, InboundPayload, Own, segment};
use super::undo::Undo;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::HandedOver;

/// Makes what the other end is offered.
pub(super) fn open(context: &Context, own: &Own) -> Result<Opening> {
    let link = segment(context, &own.geometry, Segment::Link)?;
    let rings = context.inner.wake == Wake::Doorbell;
    let bells = rings.then(bell::pair).transpose().map_err(Error::io("a doorbell's sockets"))?;
    let opening = LocalOpening::new(link, own.window.clone(), own.config.posted_receives, bells);
    Ok(Opening::Local(if recovery(context).is_some() { opening.recovering() } else { opening }))
}

/// For how long the ends may try to replace a link that breaks. `None`: they do not.
pub(super) fn recovery(context: &Context) -> Option<Duration> {
    context.settings().recovery()
}

/// Hands both ends to the engine. `peer_pid` is the peer's process, if it has a number in this PID namespace. `hand_over`
/// hands out how the ends meet again.
pub(super) fn drive(
    context: &Context,
    own: Own,
    peer: u32,
    peer_pid: Option<u32>,
    met: LocalMet,
    hand_over: &mut dyn FnMut() -> HandedOver,
) -> Result<DrivenEnd> {
    let (link, theirs) = (met.link.clone(), met.peer.window.clone());
    let peer_geometry = met.peer.geometry;
    let [work, control] = own.memory.clone().expect("settings refuse other places with qp = local");
    let recovery = recovery(context).filter(|_| met.recovers);
    let fds = met.into_fds(work, control, peer_pid);
    let (options, wake) = (own.options(context, peer), context.inner.wake);
    let id = match recovery {
        Some(limit) => {
            let HandedOver { connect, mailbox, channel } = hand_over();
            let send = Box::new(move |frame| channel.send(frame));
            let recovers = Recovers { connect, limit, mailbox, send };
            context.inner.proxy.add_recovering_qp(fds, options, wake, recovers)?
        }
        None => context.inner.proxy.add_qp(fds, options, wake)?,
    };
    let undo = Undo::new(context, id);
    // The engine has its own writable mapping now, wherever it runs. The peer already has the
    // descriptor, and may have sealed it first so that this call fails.
    link.seal_against_writers()?;
    undo.done();
    Ok(DrivenEnd { id, own, inbound: InboundPayload::Window(theirs), peer_geometry, streams: false })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use pushgate_engine::connect::Met;
    use rustix::fs::{SealFlags, fcntl_add_seals};

    use super::*;
    use crate::Settings;
    use crate::qp::QpConfig;

    #[test]
    fn p8_a_peer_that_seals_a_link_segment_first_leaves_no_queue_pair_in_the_engine() {
        let mut settings = Settings::default();
        settings.set("device", "cpu").unwrap();
        settings.set("recover", "0").unwrap();
        let context = Context::builder().settings(settings).build().unwrap();
        let [ours, theirs] = [0, 1].map(|rank| Own::new(&context, rank, QpConfig::default()).unwrap());
        let opening = open(&context, &ours).unwrap();
        let offer = opening.offer((), &[]).unwrap();
        let fds = offer.along.into_owned().unwrap();
        fcntl_add_seals(&fds[0], SealFlags::SEAL).unwrap();
        let theirs = open(&context, &theirs).unwrap().offer((), &[]).unwrap();
        let prepared =
            opening.prepare::<()>(1, theirs, 0, &mut |_, _| unreachable!("`local` needs no memory"));
        let Met::Local(met) = prepared.unwrap().0.meet(&[]).unwrap() else { panic!("not over RDMA") };
        let link = std::sync::Arc::downgrade(&met.link);
        let never = &mut || unreachable!("the setting `recover` is off");
        let failed = drive(&context, ours, 1, None, *met, never).err().expect("a seal is refused");
        assert!(failed.to_string().contains("F_ADD_SEALS"), "{failed}");
        // An engine that still had the queue pair would hold its link segment.
        let begin = Instant::now();
        while link.strong_count() > 0 {
            assert!(begin.elapsed() < pushgate_tests::hang(), "a queue pair is left in the engine");
            std::thread::yield_now();
        }
    }
}
