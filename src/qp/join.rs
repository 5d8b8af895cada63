//! One end of a queue pair while it is made: the steps of `pushgate_engine::connect` with this program's memory, device and
//! engine.

use std::net::SocketAddr;

use pushgate_door::addresses::Family;
use pushgate_engine::connect::{ConnectError, Frame, Met, Opening, Prepared};

use super::memory::{Own, QpConfig, allocator};
use super::queue_pair::QueuePair;
use super::{local, tcp, verbs};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{Call, End, Mesh};
use crate::settings::Transport;

/// Our end of a queue pair that is being made.
pub(crate) struct OwnEnd<'a> {
    context: &'a Context,
    peer: u32,
    /// The address family by which the hosts reach each other, where they are several.
    family: Option<Family>,
    /// The address of this host by which the peer reaches it, without a port.
    address: SocketAddr,
    /// The peer's process, if it has a number in this PID namespace.
    peer_pid: Option<u32>,
    own: Own,
    transport: Transport,
    step: Step,
}

/// How far the transport is.
enum Step {
    /// It has nothing.
    Closed,
    Opened(Opening),
    Prepared(Prepared),
}

impl<'a> OwnEnd<'a> {
    /// Makes the memory of this end.
    pub(crate) fn new(context: &'a Context, mesh: &Mesh, peer: u32, config: QpConfig) -> Result<Self> {
        let own = Own::new(context, mesh.rank, config)?;
        let (family, address, peer_pid) = (mesh.family(peer), mesh.address(peer), mesh.pid(peer));
        let transport = mesh.transport(peer).unwrap_or_else(|| context.transport_here());
        Ok(OwnEnd { context, peer, family, address, peer_pid, own, transport, step: Step::Closed })
    }

    /// Hands both ends to the engine and registers the memory with the device. `places` is what the peer's transport
    /// says; `call` is how the peer is told of what it can't see.
    pub(crate) fn join(mut self, places: &[u8], call: &mut Call<'_>) -> Result<QueuePair> {
        let Step::Prepared(prepared) = self.take_step() else {
            unreachable!("an end is prepared before it goes live")
        };
        let met = prepared.meet(places).map_err(|e| self.refused(e))?;
        let OwnEnd { context, peer, peer_pid, own, address, .. } = self;
        let driven = match met {
            Met::Local(met) => local::drive(context, own, peer, peer_pid, *met, &mut || call.hand_over())?,
            Met::Verbs(met) => {
                let tell = call.teller();
                verbs::drive(context, own, peer, *met, tell, &mut || call.hand_over())?
            }
            Met::Tcp(met) => tcp::drive(context, own, (peer, address), *met, call)?,
            Met::Rails(met) => verbs::drive_rails(context, own, peer, *met, call)?,
        };
        QueuePair::new(context, peer, driven)
    }

    fn take_step(&mut self) -> Step {
        std::mem::replace(&mut self.step, Step::Closed)
    }

    fn refused(&self, e: ConnectError) -> Error {
        match e {
            ConnectError::Peer(reason) => Error::Mismatch { rank: self.peer, reason },
            ConnectError::Rdma(e) => e.into(),
            ConnectError::Descriptors(e) => Error::io("a descriptor for another rank")(e),
        }
    }
}

impl End for OwnEnd<'_> {
    fn offer(&mut self) -> Result<Frame> {
        // Released first, so that the older incarnation of the peer can write nothing of it.
        self.step = Step::Closed;
        let opening = match self.transport {
            Transport::Local => local::open(self.context, &self.own)?,
            Transport::Verbs => verbs::open(self.context, &self.own, self.family)?,
            Transport::Tcp => tcp::open(self.context, &self.own, self.address, self.peer)?,
        };
        let offer = opening.offer((), &[]).map_err(|e| self.refused(e))?;
        self.step = Step::Opened(opening);
        Ok(offer)
    }

    fn prepare(&mut self, offer: Frame) -> Result<Vec<u8>> {
        let Step::Opened(opening) = self.take_step() else { unreachable!("an end prepares what it offered") };
        let prepared = opening.prepare(self.peer, offer, 0, &mut allocator(self.context));
        let (prepared, (), _) = prepared.map_err(|e| self.refused(e))?;
        let places = prepared.places();
        self.step = Step::Prepared(prepared);
        Ok(places)
    }
}
