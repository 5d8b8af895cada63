//! The way of a peer's frames to the engine of a queue pair that replaces its link when it breaks.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pushgate_engine::connect::{self, Incarnation};
use pushgate_link::mailbox::Mailbox;

/// Tells the engine of a queue pair whose link is replaced when it breaks that frames of the peer wait. Called by the
/// reader's thread, so it must not wait.
pub(crate) type TellEngine = Arc<dyn Fn() + Send + Sync>;

/// Where the frames for such a queue pair go.
pub(super) struct Route {
    /// Which of this rank's calls made the queue pair, and with which of the peer's.
    pub(super) own: Incarnation,
    pub(super) with: Incarnation,
    pub(super) mailbox: Mailbox,
    pub(super) tell: TellEngine,
}

impl Route {
    /// Hands over a frame whose descriptors are shared memory: an engine must not wait when it closes them. Returns what is
    /// to be called then, without the lock of the inbox; or, where there is no room, descriptors to close.
    pub(super) fn deliver(
        &self,
        bytes: Vec<u8>,
        fds: Vec<OwnedFd>,
    ) -> std::result::Result<Option<TellEngine>, Vec<OwnedFd>> {
        match self.mailbox.try_put(connect::Frame { bytes, along: fds.into() }) {
            Ok(tell) => Ok(tell.then(|| self.tell.clone())),
            Err(frame) => Err(frame.along.into_owned().unwrap_or_default()),
        }
    }
}
