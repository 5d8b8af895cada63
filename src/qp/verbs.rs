//! A queue pair of two ranks over RDMA.

use pushgate_proxy::connect::{Opening, VerbsMet, VerbsOpening};
use pushgate_proxy::endpoint::Endpoint;
use pushgate_proxy::idle::Wake;
use pushgate_proxy::link::verbs::Config;
use pushgate_proxy::link::verbs::gid::Family;

use super::memory::{DrivenEnd, InboundPayload, Own, allocator};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::TellEnd;
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
    Ok(Config { family, events, ..Config::from(s) })
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
    let device = context.rdma()?;
    let posted_receives = own.config.posted_receives;
    let config = Config { posted_receives, ..config(context, family)? };
    let allocate = &mut allocator(context);
    let opening = VerbsOpening::new(&device, &config, own.geometry, own.window.clone(), allocate)?;
    Ok(Opening::Verbs(Box::new(opening)))
}

/// Hands both ends to the engine. `tell` tells the peer if the link breaks.
pub(super) fn drive(
    context: &Context,
    own: Own,
    peer: u32,
    met: VerbsMet,
    tell: TellEnd,
) -> Result<DrivenEnd> {
    let VerbsMet { link, mirror, peer_geometry, .. } = met;
    let can_wake = link.can_wake();
    let (work, control) = (own.work_to_read()?, own.control.clone());
    let options = own.options(context, peer);
    let mut endpoint = Endpoint::new(work, control, own.geometry, peer_geometry, Box::new(link), options)
        .map_err(|e| Error::Mismatch { rank: peer, reason: e.to_string() })?;
    let mut rings = Rings::Host;
    if own.placed.is_some() {
        // A device that shares only the window rings by the interrupt, and sees nothing else.
        let interrupt = own.window.interrupt().unwrap_or_else(|e| {
            tracing::warn!(rank = own.geometry.rank, peer, "no interrupt, so the proxy polls: {e}");
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
    let wake = wake(can_wake, rings);
    let id = context.inner.proxy.add_endpoint(endpoint, wake)?;
    Ok(DrivenEnd { id, own, inbound: InboundPayload::Mirror(mirror), peer_geometry })
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
