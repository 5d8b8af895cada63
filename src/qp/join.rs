//! Sets a queue pair up: makes this end's memory and offer, waits for the other end's offer, then
//! hands both to the engine. The transport decides what an offer contains.

use std::sync::Arc;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::placed::{self, Placed};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_driver_shim::window::{Piece, Window};
use pushgate_proxy::endpoint::QpOptions;
use pushgate_proxy::engine::QpId;
use pushgate_proxy::memory::Mapped;

use super::local::LocalHalf;
use super::verbs::{VerbsAccepted, VerbsHalf};
use super::{QpConfig, QueuePair};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::mesh::{Frame, SetUp};
use crate::settings::{QpKind, RingsPlace};

/// This end's own parts of a queue pair, the same for every transport.
pub(super) struct Own {
    pub(super) geometry: Geometry,
    pub(super) config: QpConfig,
    pub(super) window: Arc<dyn Window>,
    pub(super) work: Piece,
    pub(super) control: Piece,
    /// The work and control segments, if they lie in host memory.
    pub(super) memory: Option<[Arc<SharedMemory>; 2]>,
    /// All parts of the window, if the segments lie in the window.
    pub(super) placed: Option<Placed>,
}

/// Where inbound payload lies.
pub(super) enum Inbound {
    /// In the sender's window, where the sender's device put it.
    Window(Arc<ReadOnlyMemory>),
    /// In this host's memory, where the sender's transport put it.
    Mirror(Arc<SharedMemory>),
}

/// A queue pair that an engine drives, with the memory that its device needs mapped.
pub(super) struct Joined {
    pub(super) id: QpId,
    pub(super) own: Own,
    pub(super) inbound: Inbound,
    pub(super) peer_geometry: Geometry,
}

enum Link {
    Local(LocalHalf),
    Verbs(Box<VerbsHalf>),
}

/// Our half of a queue pair, before the other end's offer is known.
pub(crate) struct Half<'a> {
    own: Own,
    link: Link,
    set_up: SetUp<'a>,
}

/// Our half of a queue pair, with the other end's offer.
pub(crate) struct Accepted<'a> {
    own: Own,
    link: AcceptedLink,
    set_up: SetUp<'a>,
}

enum AcceptedLink {
    Local(LocalHalf, Frame),
    Verbs(Box<VerbsAccepted>),
}

fn log2(name: &str, value: u64) -> Result<u32> {
    if !value.is_power_of_two() {
        return Err(Error::config(name, value, "a power of two"));
    }
    Ok(value.trailing_zeros())
}

impl Own {
    pub(super) fn new(context: &Context, rank: u32, config: QpConfig) -> Result<Self> {
        let s = context.settings();
        let window = config.window_size.unwrap_or(s.window_size);
        if window < abi::PUSHGATE_UNIT as u64 {
            return Err(Error::config("window-size", window, "64 or more"));
        }
        let slots_log = log2("slots", config.slots.unwrap_or(s.slots))?;
        let window_log = log2("window-size", window)? - abi::PUSHGATE_UNIT_LOG;
        let geometry = Geometry {
            window_log,
            slots_log,
            cq_log: slots_log.min(abi::PUSHGATE_MAX_CQ_LOG),
            rx_log: log2("receives", config.receives.unwrap_or(s.receives))?,
            link_log: slots_log,
            landing_log: window_log,
            signals: s.signals as u32,
            rank,
        };
        geometry.validate().map_err(|e| Error::Memory(e.into()))?;
        let name = format!("pushgate-window-{rank}");
        if s.rings == RingsPlace::Window {
            let all = context.window(&name, placed::bytes(&geometry))?;
            let placed = Placed::write(all, &geometry)?;
            let Placed { control, work, payload, .. } = placed.clone();
            let window = Arc::new(payload);
            return Ok(Own { work, control, memory: None, placed: Some(placed), window, geometry, config });
        }
        let memory =
            [segment(context, &geometry, Segment::Work)?, segment(context, &geometry, Segment::Control)?];
        let [work, control] = memory.clone().map(|m| Piece::whole(m));
        let window = context.window(&name, geometry.window_bytes())?;
        Ok(Own { work, control, memory: Some(memory), placed: None, window, geometry, config })
    }

    /// The work segment as the engine maps it, for reading only. In host memory this is a mapping
    /// of its own that can't be written.
    pub(super) fn work_to_read(&self) -> Result<Mapped> {
        let Some([work, _]) = &self.memory else { return Ok(self.work.clone().into()) };
        let fd = work.fd().try_clone_to_owned().map_err(Error::io("work segment"))?;
        Ok(Arc::new(ReadOnlyMemory::from_fd(fd, work.len())?).into())
    }

    /// The options with which the engine drives this queue pair.
    pub(super) fn options(&self, context: &Context, peer: u32) -> QpOptions {
        QpOptions {
            peer,
            posted_receives: self.config.posted_receives,
            reader_flushes: false,
            stuck_ns: context.settings().stuck.as_nanos() as u64,
            // A quarter of the sender's window stays free for its next messages.
            in_place_share: 192,
            // Long for a kernel that keeps receiving, short for one that computes meanwhile.
            slow_ns: 20_000_000,
            ungated: cfg!(feature = "test-ungated") && std::env::var_os("_PUSHGATE_UNGATED").is_some(),
            key_seed: std::process::id().wrapping_mul(2654435761) ^ peer,
        }
    }
}

/// Makes a segment with its header.
pub(super) fn segment(context: &Context, geometry: &Geometry, kind: Segment) -> Result<Arc<SharedMemory>> {
    let memory =
        context.memory(&format!("pushgate-{kind}-{}", geometry.rank), geometry.bytes(kind), false)?;
    write_header(&memory, kind, geometry)?;
    Ok(Arc::new(memory))
}

impl<'a> Half<'a> {
    /// Makes this end and sends its offer to the peer.
    pub(crate) fn offer(context: &Context, mut set_up: SetUp<'a>, config: QpConfig) -> Result<Self> {
        let own = Own::new(context, set_up.mesh.rank, config)?;
        let link = match context.settings().qp {
            QpKind::Local => Link::Local(LocalHalf::offer(context, &mut set_up, &own)?),
            QpKind::Verbs => Link::Verbs(Box::new(VerbsHalf::offer(context, &mut set_up, &own)?)),
        };
        Ok(Half { own, link, set_up })
    }

    /// Waits for an offer of the peer.
    pub(crate) fn take_offer(&mut self) -> Result<()> {
        self.set_up.take_offer()
    }

    /// Waits until both ends have each other's offer, and accepts the peer's.
    pub(crate) fn accept(mut self, context: &Context) -> Result<Accepted<'a>> {
        let offer = self.set_up.agree()?;
        let link = match self.link {
            Link::Local(half) => AcceptedLink::Local(half, offer),
            Link::Verbs(half) => {
                AcceptedLink::Verbs(Box::new(half.accept(context, &self.set_up, &offer.0)?))
            }
        };
        Ok(Accepted { own: self.own, link, set_up: self.set_up })
    }
}

impl<'a> Accepted<'a> {
    /// Hands both ends to the engine and registers the memory with the device.
    pub(crate) fn join(mut self, context: &Context) -> Result<(QueuePair, SetUp<'a>)> {
        let peer = self.set_up.peer;
        let joined = match self.link {
            AcceptedLink::Local(half, offer) => half.join(context, &self.set_up, self.own, offer)?,
            AcceptedLink::Verbs(end) => end.join(context, &mut self.set_up, self.own)?,
        };
        Ok((QueuePair::new(context, peer, joined)?, self.set_up))
    }
}
