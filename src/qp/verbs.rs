//! A queue pair of two ranks over RDMA.

use std::sync::Arc;
use std::time::Duration;

use pushgate_door::addresses::Family;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::connect::{
    Opening, Patience, RailFrames, RailsMet, RailsOpening, VerbsMet, VerbsOpening,
};
use pushgate_engine::endpoint::Endpoint;
use pushgate_engine::idle::Wake;
use pushgate_link::Link;
use pushgate_link_verbs::Config;

use super::local::recovery;
use super::memory::{DrivenEnd, InboundPayload, Own, allocator};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{Call, HandedOver, TellEnd};
use crate::settings::CqEvents;

fn config(context: &Context, family: Option<Family>) -> Result<Config> {
    let s = context.settings();
    // An engine that its kernels can't wake polls, so its completions can be polled too.
    let sleeps = context.inner.wake == Wake::Doorbell;
    if s.cq_events == CqEvents::Event && !sleeps {
        let allowed = "auto or poll with device = cuda: a GPU's kernels can't wake the proxy";
        return Err(s.refused("cq-events", allowed));
    }
    if s.cq_events == CqEvents::Event && s.no_imm {
        let allowed = "auto or poll with no-imm: without immediate data nothing announces a message";
        return Err(s.refused("cq-events", allowed));
    }
    let events = sleeps && s.cq_events != CqEvents::Poll;
    // Where the end of a link is the queue pair's, the device's own retries decide.
    let path_timeout = if s.recovery().is_some() { s.path_timeout.as_nanos() as u64 } else { 0 };
    Ok(Config { family, events, path_timeout, ..Config::from(s) })
}

/// Whose memory the rings lie in.
#[derive(Clone, Copy)]
enum Rings {
    Host,
    /// A device's memory; its kernels may run elsewhere.
    Device {
        interrupts: bool,
    },
}

/// How an engine waits: it sleeps only if everything that it waits for can wake it.
fn wake(completions: bool, rings: Rings) -> Wake {
    match (completions, rings) {
        (false, _) | (_, Rings::Device { interrupts: false }) => Wake::Polled,
        (true, Rings::Host | Rings::Device { interrupts: true }) => Wake::Doorbell,
    }
}

/// Makes what the other end is offered. `family` is the address family by which the hosts reach each other, where they
/// are several.
pub(super) fn open(context: &Context, own: &Own, family: Option<Family>) -> Result<Opening> {
    let devices = context.rdma()?;
    let posted_receives = own.config.posted_receives;
    let config = Config { posted_receives, ..config(context, family)? };
    if context.settings().cq_events == CqEvents::Event
        && let Some(device) = devices.iter().find(|device| !device.kind().immediate)
    {
        let (kind, name) = (device.kind().name, device.name());
        let allowed = format!("auto or poll with {name}: {kind}, which has no immediate data to wake by");
        return Err(context.settings().refused("cq-events", allowed));
    }
    let allocate = &mut allocator(context);
    if let [device] = &devices[..] {
        let opening = VerbsOpening::new(device, &config, own.geometry, own.window.clone(), allocate)?;
        let opening = if recovery(context).is_some() { opening.recovering() } else { opening };
        return Ok(Opening::Verbs(Box::new(opening)));
    }
    let s = context.settings();
    if s.cq_events == CqEvents::Event {
        return Err(s.refused("cq-events", "auto or poll with several devices in ib-dev"));
    }
    let mut opening = RailsOpening::new(&devices, &config, own.geometry, &own.window, allocate)?;
    // Without recovery no rail comes back, and the end of one is the end of its queue pair.
    match opening.away().filter(|_| recovery(context).is_none()) {
        Some(why) => Err(why.into()),
        None => Ok(Opening::Rails(opening)),
    }
}

/// Hands both ends to the engine. `tell` tells the peer if the link breaks for good. `hand_over` hands out how the ends meet
/// again.
pub(super) fn drive(
    context: &Context,
    own: Own,
    peer: u32,
    met: VerbsMet,
    tell: TellEnd,
    hand_over: &mut dyn FnMut() -> HandedOver,
) -> Result<DrivenEnd> {
    let VerbsMet { link, mirror, peer_geometry, .. } = met;
    let can_wake = link.can_wake();
    let again = recovery(context).filter(|_| link.recovers()).map(|limit| (limit, hand_over()));
    drive_link(context, own, peer, Box::new(link), (mirror, peer_geometry), can_wake, tell, again)
}

/// Hands both ends to the engine, with a link for each of several devices. What the ends say about a link that broke goes
/// the way on which they have met.
pub(super) fn drive_rails(
    context: &Context,
    own: Own,
    peer: u32,
    met: RailsMet,
    call: &mut Call<'_>,
) -> Result<DrivenEnd> {
    let tell = call.teller();
    let HandedOver { connect, mailbox, channel } = call.hand_over();
    let with = connect.peer().expect("this end is live with an incarnation of the peer");
    let send = Box::new(move |frame| channel.send(frame));
    let frames = RailFrames { own: connect.own(), peer: with, mailbox, send };
    // Without recovery a link that breaks ends the queue pair at once.
    let recover = context.settings().recovery().unwrap_or_default();
    let peers = (met.mirror.clone(), met.peer_geometry);
    let jitter = own.options(context, peer).key_seed as u64;
    let link = met.join(frames, recover, jitter);
    drive_link(context, own, peer, Box::new(link), peers, false, tell, None)
}

/// Hands the link to the engine. `peers`: the copy of the peer's window, and the peer's rings. `again`: the link as a whole is
/// replaced when it breaks, within this time.
#[expect(clippy::too_many_arguments, reason = "three callers, which have them apart")]
pub(super) fn drive_link(
    context: &Context,
    own: Own,
    peer: u32,
    link: Box<dyn Link>,
    peers: (Arc<SharedMemory>, Geometry),
    can_wake: bool,
    tell: TellEnd,
    again: Option<(Duration, HandedOver)>,
) -> Result<DrivenEnd> {
    let (mirror, peer_geometry) = peers;
    let (work, control) = (own.work_to_read()?, own.control.clone());
    let options = own.options(context, peer);
    let mut endpoint = Endpoint::new(work, control, own.geometry, peer_geometry, link, options)
        .map_err(|e| Error::Mismatch { rank: peer, reason: e.to_string() })?;
    let mut rings = Rings::Host;
    if own.placed.is_some() {
        // A device that shares only the window rings by the interrupt, and sees nothing else.
        let interrupt = own.window.interrupt().unwrap_or_else(|e| {
            limited!(warn, peer, rank = own.geometry.rank, peer, "no interrupt, so the proxy polls: {e}");
            None
        });
        rings = match own.window.io_memory() {
            true => Rings::Device { interrupts: interrupt.is_some() },
            false => Rings::Host,
        };
        endpoint = endpoint.with_interrupt(interrupt).with_inbound_copied();
    }
    // The link that would tell the peer is the one that may break.
    endpoint = endpoint.with_broken(Box::new(move |status| tell.tell(status)));
    if let Some((limit, HandedOver { connect, mailbox, channel })) = again {
        let patience = Patience::within(limit, options.key_seed as u64);
        let send = Box::new(move |frame| channel.send(frame));
        endpoint = endpoint.with_recovery(connect, patience, mailbox, send);
    }
    let wake = wake(can_wake, rings);
    let id = context.inner.proxy.add_endpoint(endpoint, wake)?;
    Ok(DrivenEnd { id, own, inbound: InboundPayload::Mirror(mirror), peer_geometry, streams: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p7_an_engine_that_nothing_can_wake_polls() {
        assert_eq!(wake(true, Rings::Host), Wake::Doorbell);
        assert_eq!(wake(true, Rings::Device { interrupts: true }), Wake::Doorbell);
        assert_eq!(wake(true, Rings::Device { interrupts: false }), Wake::Polled);
        assert_eq!(wake(false, Rings::Host), Wake::Polled);
        assert_eq!(wake(false, Rings::Device { interrupts: true }), Wake::Polled);
    }
}
