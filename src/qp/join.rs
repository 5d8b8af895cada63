//! Sets a queue pair up: makes this end's memory and offer, waits for the other end's offer, then hands both to the
//! engine. The transport decides what an offer contains.

use super::local::LocalEnd;
use super::memory::{Own, QpConfig};
use super::queue_pair::QueuePair;
use super::verbs::{AcceptedVerbs, OfferedVerbs};
use crate::context::Context;
use crate::error::Result;
use crate::mesh::{Frame, SetUp};
use crate::settings::QpKind;

/// The part of an offered end that its transport needs.
enum OfferedLink {
    Local(LocalEnd),
    Verbs(Box<OfferedVerbs>),
}

/// Our end of a queue pair, which has been offered to the other end. The other end's offer is not known yet.
pub(crate) struct OfferedEnd<'a> {
    own: Own,
    link: OfferedLink,
    set_up: SetUp<'a>,
}

/// Our end of a queue pair, with the other end's offer.
pub(crate) struct AcceptedEnd<'a> {
    own: Own,
    link: AcceptedLink,
    set_up: SetUp<'a>,
}

/// The part of an accepted end that its transport needs.
enum AcceptedLink {
    Local(LocalEnd, Frame),
    Verbs(Box<AcceptedVerbs>),
}

impl<'a> OfferedEnd<'a> {
    /// Makes this end and sends its offer to the peer.
    pub(crate) fn offer(context: &Context, mut set_up: SetUp<'a>, config: QpConfig) -> Result<Self> {
        let own = Own::new(context, set_up.mesh.rank, config)?;
        let link = match context.settings().qp {
            QpKind::Local => OfferedLink::Local(LocalEnd::offer(context, &mut set_up, &own)?),
            QpKind::Verbs => OfferedLink::Verbs(Box::new(OfferedVerbs::offer(context, &mut set_up, &own)?)),
        };
        Ok(OfferedEnd { own, link, set_up })
    }

    /// Waits for an offer of the peer.
    pub(crate) fn take_offer(&mut self) -> Result<()> {
        self.set_up.take_offer()
    }

    /// Waits until both ends have each other's offer, and accepts the peer's.
    pub(crate) fn accept(mut self, context: &Context) -> Result<AcceptedEnd<'a>> {
        let offer = self.set_up.agree()?;
        let link = match self.link {
            OfferedLink::Local(end) => AcceptedLink::Local(end, offer),
            OfferedLink::Verbs(end) => {
                AcceptedLink::Verbs(Box::new(end.accept(context, &self.set_up, &offer.0)?))
            }
        };
        Ok(AcceptedEnd { own: self.own, link, set_up: self.set_up })
    }
}

impl<'a> AcceptedEnd<'a> {
    /// Hands both ends to the engine and registers the memory with the device.
    pub(crate) fn join(mut self, context: &Context) -> Result<(QueuePair, SetUp<'a>)> {
        let peer = self.set_up.peer;
        let driven = match self.link {
            AcceptedLink::Local(end, offer) => end.join(context, &self.set_up, self.own, offer)?,
            AcceptedLink::Verbs(end) => end.join(context, &mut self.set_up, self.own)?,
        };
        Ok((QueuePair::new(context, peer, driven)?, self.set_up))
    }
}
