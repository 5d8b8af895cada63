//! What an endpoint has by which its link is replaced; `recovering.rs` says how.

use pushgate_core::recovery::Phase;
use pushgate_link::frame::Fds;
use pushgate_link::mailbox::{Mailbox, SendFrame};

use crate::connect::Connect;
use crate::recorder;

/// What replaces an endpoint's link.
pub(super) struct Recovering {
    pub(super) connect: Connect<Fds>,
    pub(super) mailbox: Mailbox,
    /// `None` once this end says nothing more.
    pub(super) send: Option<SendFrame>,
    /// The link that broke has not stopped yet, or the next one's offer is still to be made.
    pub(super) fencing: bool,
    /// This end gets ready to receive over the link of this epoch.
    pub(super) preparing: Option<u32>,
    /// When the next look is due at what is being fenced, made or prepared, nanoseconds.
    pub(super) looks_at: u64,
    /// What the link that broke has brought is still to be taken in: before the first offer, and never after an offer,
    /// which says how much this end has accepted.
    pub(super) lands: bool,
    /// The peer has ended, and the peer may have been told how much this end has accepted: nothing more is taken from a link.
    pub(super) deaf: bool,
    /// Messages that the peer had accepted when the present link began.
    pub(super) resumed: u64,
    /// This end's own lack was told once since the link broke.
    pub(super) warned: bool,
    /// This end goes on in place of an engine that died: WQEs that the peer has accepted are still to be read.
    pub(super) rebuilds: bool,
}

impl Recovering {
    /// Where the session stands, for the flight recorder.
    pub(super) fn phase(&self) -> recorder::Phase {
        match self.connect.phase() {
            Phase::Live => recorder::Phase::Live,
            Phase::Fencing => recorder::Phase::Fencing,
            Phase::Offered => recorder::Phase::Offered,
            Phase::Joining => recorder::Phase::Joining,
            Phase::Ended(_) => recorder::Phase::Ending,
        }
    }

    /// Something is being fenced, made or prepared beside the engine.
    pub(super) fn waits(&self) -> bool {
        self.fencing || self.preparing.is_some()
    }

    /// The epoch of the link that is live, or of the next one.
    pub(super) fn epoch(&self) -> u32 {
        self.connect.epoch()
    }
}
