//! Joins two ranks over RDMA: exchanges offers, then the places where each end may write.

use std::sync::Arc;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_proxy::endpoint::Endpoint;
use pushgate_proxy::idle::Wake;
use pushgate_proxy::link::verbs::{Accepted, Config, Device, Half, Offer, VerbsError};
use serde::Serialize;

use super::join::{Inbound, Joined, Own};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{Mesh, SetUp};
use crate::settings::{AutoOr, CqEvents, Settings};

impl From<VerbsError> for Error {
    fn from(e: VerbsError) -> Self {
        match e {
            VerbsError::Peer { rank, why } => Error::Mismatch { rank, reason: why },
            other => Error::Rdma(other),
        }
    }
}

/// Opens the RDMA device that the settings name.
pub(crate) fn open(settings: &Settings) -> Result<Arc<Device>> {
    Ok(Device::open(name(settings).as_deref(), settings.ib_port as u8)?)
}

fn name(settings: &Settings) -> Option<String> {
    (settings.ib_dev != "auto").then(|| settings.ib_dev.clone())
}

/// The part of the configuration that the settings determine. The caller fills in family, events
/// and posted receives.
impl From<&Settings> for Config {
    fn from(s: &Settings) -> Self {
        let number = |v: AutoOr<usize>| match v {
            AutoOr::Is(n) => Some(n as u32),
            _ => None,
        };
        Config {
            port: s.ib_port as u8,
            gid_index: number(s.gid_index),
            family: None,
            mtu: number(s.ib_mtu),
            traffic_class: s.traffic_class as u8,
            service_level: s.service_level as u8,
            ack_timeout: s.ack_timeout as u8,
            retry_count: s.retry_count as u8,
            imm: !s.no_imm,
            write_order: s.write_order,
            events: false,
            posted_receives: false,
            regions_written: true,
        }
    }
}

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
    move |name, bytes| context.try_memory(&format!("pushgate-{name}"), bytes, name == "mirror")
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
pub(super) struct VerbsHalf(Half);

/// What the `verbs` transport needs of this end once it is ready to receive.
pub(super) struct VerbsAccepted(Accepted);

impl VerbsHalf {
    pub(super) fn offer(context: &Context, set_up: &mut SetUp<'_>, own: &Own) -> Result<Self> {
        let device = context.rdma()?;
        let posted_receives = own.config.posted_receives;
        let config = Config { posted_receives, ..config(context, set_up.mesh)? };
        let half = Half::new(&device, &config, own.geometry, own.window.clone(), &mut allocator(context))?;
        set_up.offer(bytes(&half.offer()), &[])?;
        Ok(VerbsHalf(half))
    }

    pub(super) fn accept(self, context: &Context, set_up: &SetUp<'_>, offer: &[u8]) -> Result<VerbsAccepted> {
        let offer: Offer = parse(set_up.peer, offer)?;
        let accepted = self.0.accept(set_up.peer, &offer, &mut allocator(context))?;
        set_up.send(&bytes(&accepted.places()))?;
        Ok(VerbsAccepted(accepted))
    }
}

impl VerbsAccepted {
    pub(super) fn join(self, context: &Context, set_up: &mut SetUp<'_>, own: Own) -> Result<Joined> {
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
        Ok(Joined { id, own, inbound: Inbound::Mirror(mirror), peer_geometry })
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
