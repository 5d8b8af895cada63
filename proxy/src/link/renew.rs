//! The next link of a session, in place of one that broke.

use crate::frame::Frame;

/// A link that can be made anew over the next epoch. What belongs to the session stays as it is: the peer's window, the
/// doorbells, the regions, the memory that devices have mapped.
///
/// The calls come in this order, and begin again with [`Renew::offer`] whenever an attempt is given up. No call blocks.
pub trait Renew {
    /// Makes this end of the next link, and what the peer is told of it. The present link has broken and has stopped:
    /// nothing is posted over it or taken in any more.
    fn offer(&mut self) -> Result<Frame, RenewError>;

    /// Takes the peer's offer, and gets ready to receive. Returns the places that the peer is told.
    fn prepare(&mut self, offer: Frame) -> Result<Vec<u8>, RenewError>;

    /// Goes over to the next link, with the peer's places. The next message posted is the one behind the first `accepted`
    /// messages of the session.
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
