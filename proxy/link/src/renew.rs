//! The next link of a session, in place of one that broke.

use crate::frame::Frame;

/// A link that can be made anew over the next epoch. What belongs to the session stays as it is: the peer's window, the
/// doorbells, the regions, the memory that devices have mapped.
///
/// The calls come in this order, and begin again with [`Renew::fence`] whenever an attempt is given up. No call blocks: what
/// takes long is done beside the engine, and asked for again.
pub trait Renew {
    /// Stops the link that broke, without a word to the peer. True when nothing of the link can read or write memory of this
    /// end any more. Asked again and again until then. Bounded: the answer becomes true whatever peer and device do, as the
    /// time `now`, nanoseconds, goes on.
    fn fence(&mut self, now: u64) -> bool;

    /// Makes this end of the next link, and what the peer is told of it; `None`: the link is not made yet, and this is
    /// called again. The present link has stopped: nothing is posted over it or taken in any more.
    fn offer(&mut self) -> Result<Option<Frame>, RenewError>;

    /// Whether nothing of an earlier link can touch memory of this end any more while [`Renew::offer`] has no answer: the peer may
    /// be told to resume before there is an offer.
    fn is_cleared(&self) -> bool {
        true
    }

    /// Takes the peer's offer, and begins to get ready to receive.
    fn prepare(&mut self, offer: Frame) -> Result<(), RenewError>;

    /// The places that the peer is told once this end is ready to receive; `None`: this end is not ready yet, and this is
    /// called again.
    fn prepared(&mut self) -> Result<Option<Vec<u8>>, RenewError>;

    /// Goes over to the next link, with the peer's places. The next message posted is the one after the first `accepted`
    /// messages of the session; a [`Rail`](super::Rail), which counts stripes from 0 over each link, is told 0.
    fn go(&mut self, places: &[u8], accepted: u64) -> Result<(), RenewError>;
}

/// Why an end of the next link could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RenewError {
    /// What the peer sent does not fit: the session ends. The text is a sentence.
    #[error("{0}")]
    Peer(String),
    /// This end lacks something: the attempt is given up, and another one follows. The text is a sentence.
    #[error("{0}")]
    Here(String),
}
