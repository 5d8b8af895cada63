//! What a program asks of an engine, and why the engine refuses. Each command carries the channel of its reply; a reply
//! whose asker is gone is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use pushgate_core::session::Status;
use pushgate_driver_shim::fork::Forked;
use pushgate_driver_shim::interrupt::Interrupted;
use pushgate_driver_shim::limits;
use pushgate_link::RegionSends;
use pushgate_link::region::RegionMemory;

use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::idle::Wake;

/// A queue pair of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct QpId(pub u32);

/// Why an engine has not carried out a command: it has ended, or refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The engine's thread is gone.
    #[error("the proxy's engine has ended")]
    Gone,
    /// The thread could not be started.
    #[error("starting the proxy's engine: {0}{remedy}", remedy = limits::added(limits::of_thread(.0)))]
    Start(#[source] std::io::Error),
    /// No such queue pair.
    #[error("queue pair {0} is not one of this engine's")]
    NoQp(u32),
    /// The queue pair is taken out, but a device still copies for it: what it used must stay.
    #[error("a device's copy for a queue pair that was removed does not end; its memory stays")]
    Unsettled(Box<Counters>),
    /// [`pushgate_link::region::MAX_REGIONS`] are registered.
    #[error("a queue pair holds at most {} regions", pushgate_link::region::MAX_REGIONS)]
    TooManyRegions,
    /// The engine is another process's, from which this one was forked.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The program has ended the call while it waited.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A proxy of another process said no, or cannot be reached.
    #[error("proxy: {0}")]
    Remote(String),
}

/// The reply to a removal. `None`: no such queue pair.
pub type Removed = Option<Removal>;

/// A queue pair that was removed.
#[derive(Clone, Copy, Debug)]
pub struct Removal {
    /// The last counts of the queue pair.
    pub counters: Counters,
    /// Whether its memory can go: no device copies for it.
    pub settled: bool,
    /// The rank of the other end.
    pub peer: u32,
    /// Messages that the device had posted and that the peer did not have.
    pub undelivered: u64,
}

/// Who waits for the reply to a command that may have to wait for a peer or a device.
pub struct Waiter<T> {
    reply: Sender<T>,
    hurry: Arc<AtomicBool>,
}

impl<T> Waiter<T> {
    /// A waiter that waits where `reply` comes, and sets `hurry` when the program wants its thread back.
    pub fn new(reply: Sender<T>, hurry: Arc<AtomicBool>) -> Self {
        Waiter { reply, hurry }
    }

    /// Whether the program wants its thread back. Then no peer is waited for any more.
    pub(super) fn hurries(&self) -> bool {
        // Relaxed: the flag orders nothing.
        self.hurry.load(Ordering::Relaxed)
    }

    /// Replies. One who is gone hears nothing.
    pub(super) fn answer(&self, reply: T) {
        let _ = self.reply.send(reply);
    }
}

/// A command to a [`Machine`](super::Machine).
pub enum Command {
    /// Takes in a queue pair. The reply comes at once.
    AddQp(Box<Endpoint>, Wake, Sender<QpId>),
    /// Drops a queue pair. The reply comes when nothing of the queue pair touches memory any more.
    RemoveQp(QpId, Waiter<Removed>),
    /// Registers a region of this number of bytes. The reply, its key, comes when the peer knows of the region.
    AddRegion(QpId, RegionMemory, u64, Waiter<Result<u32, EngineError>>),
    /// Removes a region. The reply comes when nothing uses the region, or after 2 s.
    RemoveRegion(QpId, u32, Waiter<bool>),
    /// Ends one queue pair, or all of them, with a status. The reply comes at once.
    Fail(Option<QpId>, Status, Sender<()>),
    /// The peer of a queue pair has ended: what it had sent is taken in, then the queue pair ends with the status. The reply comes at once.
    PeerEnded(QpId, Status, Sender<()>),
    /// Tells a queue pair that frames of its peer wait in its mailbox. No reply.
    Control(QpId),
    /// Breaks a queue pair's link. The reply comes at once: whether another link is to take its place; `None`: no such
    /// queue pair.
    BreakLink(QpId, Sender<Option<bool>>),
    /// Asks how a queue pair ended. The reply comes at once; `None`: no such queue pair.
    Status(QpId, Sender<Option<Option<Status>>>),
    /// Asks for the counts of one queue pair. The reply comes at once; `None`: no such queue pair.
    CountersOf(QpId, Sender<Option<Counters>>),
    /// Asks whether a queue pair takes SENDs out of regions. The reply comes at once; `None`: no such queue pair.
    RegionSends(QpId, Sender<Option<RegionSends>>),
    /// Asks whether the RDMA device has a region. The reply comes at once; `None`: no such queue pair.
    IsRegistered(QpId, u32, Sender<Option<bool>>),
    /// Asks for the counts of all queue pairs. The reply comes at once.
    Counters(Sender<Counters>),
}
