//! Joins two ranks over RDMA: exchanges offers, then the places where each end may write.

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_proxy::endpoint::Endpoint;
use pushgate_proxy::idle::Wake;
use pushgate_proxy::link::verbs::{Accepted, Config, Half, Offer};
use serde::Serialize;

use super::memory::{DrivenEnd, InboundPayload, Own};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{Mesh, SetUp};
use crate::settings::CqEvents;

fn config(context: &Context, mesh: &Mesh) -> Result<Config> {
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
    Ok(Config { family: mesh.family(), events, ..Config::from(s) })
}

fn bytes(what: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(what).expect("it is plain data")
}

fn parse<T: serde::de::DeserializeOwned>(peer: u32, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| {
        let reason = format!("its offer of a queue pair: {e}; is its qp = verbs too, and the same build?");
        Error::Mismatch { rank: peer, reason }
    })
}

/// An allocator of memory for the transport; the device reads the mirror.
fn allocator(context: &Context) -> impl FnMut(&str, usize) -> Result<SharedMemory, ShimError> {
    move |name, bytes| context.memory(&format!("pushgate-{name}"), bytes, name == "mirror")
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

/// What the `verbs` transport needs of this end, before the other end's offer is known.
pub(super) struct OfferedVerbs(Half);

/// What the `verbs` transport needs of this end once it is ready to receive.
pub(super) struct AcceptedVerbs(Accepted);

impl OfferedVerbs {
    pub(super) fn offer(context: &Context, set_up: &mut SetUp<'_>, own: &Own) -> Result<Self> {
        let device = context.rdma()?;
        let posted_receives = own.config.posted_receives;
        let config = Config { posted_receives, ..config(context, set_up.mesh)? };
        let half = Half::new(&device, &config, own.geometry, own.window.clone(), &mut allocator(context))?;
        set_up.offer(bytes(&half.offer()), &[])?;
        Ok(OfferedVerbs(half))
    }

    pub(super) fn accept(self, context: &Context, set_up: &SetUp<'_>, offer: &[u8]) -> Result<AcceptedVerbs> {
        let offer: Offer = parse(set_up.peer, offer)?;
        let accepted = self.0.accept(set_up.peer, &offer, &mut allocator(context))?;
        set_up.send(&bytes(&accepted.places()))?;
        Ok(AcceptedVerbs(accepted))
    }
}

impl AcceptedVerbs {
    pub(super) fn join(self, context: &Context, set_up: &mut SetUp<'_>, own: Own) -> Result<DrivenEnd> {
        let peer = set_up.peer;
        let mirror = self.0.mirror().clone();
        let peer_geometry = self.0.peer_geometry();
        let qp = self.0.join(parse(peer, &set_up.recv()?)?)?;
        let can_wake = qp.can_wake();
        let (work, control) = (own.work_to_read()?, own.control.clone());
        let options = own.options(context, peer);
        let mut endpoint = Endpoint::new(work, control, own.geometry, peer_geometry, Box::new(qp), options)
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
        let teller = set_up.teller();
        endpoint = endpoint.with_broken(Box::new(move |status| teller.tell(status)));
        let wake = wake(can_wake, rings);
        let id = context.inner.proxy.add_endpoint(endpoint, wake)?;
        Ok(DrivenEnd { id, own, inbound: InboundPayload::Mirror(mirror), peer_geometry })
    }
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
