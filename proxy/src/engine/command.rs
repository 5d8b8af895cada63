//! What a program asks of an engine. Each command carries the channel of its reply; a reply whose asker is gone is
//! dropped.

use std::sync::mpsc::Sender;

use super::{EngineError, QpId};
use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::idle::Wake;
use crate::link::RegionSends;
use crate::region::RegionMemory;
use crate::session::Status;

/// The reply to a removal: the queue pair's last counts, and whether its memory can go. `None`: no such queue pair.
pub type Removed = Option<(Counters, bool)>;

/// A command to a [`Machine`](super::Machine).
pub enum Command {
    /// Takes in a queue pair. The reply comes at once.
    AddQp(Box<Endpoint>, Wake, Sender<QpId>),
    /// Drops a queue pair. The reply comes when nothing of the queue pair touches memory any more.
    RemoveQp(QpId, Sender<Removed>),
    /// Registers a region of so many bytes. The reply, its key, comes when the peer knows of the region.
    AddRegion(QpId, RegionMemory, u64, Sender<Result<u32, EngineError>>),
    /// Removes a region. The reply comes when nothing uses the region, or after 2 s.
    RemoveRegion(QpId, u32, Sender<bool>),
    /// Ends one queue pair, or all of them, with a status. The reply comes at once.
    Fail(Option<QpId>, Status, Sender<()>),
    /// Asks how a queue pair ended. The reply comes at once; `None`: no such queue pair.
    Status(QpId, Sender<Option<Option<Status>>>),
    /// Asks whether a queue pair takes SENDs out of regions. The reply comes at once; `None`: no such queue pair.
    RegionSends(QpId, Sender<Option<RegionSends>>),
    /// Asks whether the RDMA device has a region. The reply comes at once; `None`: no such queue pair.
    IsRegistered(QpId, u32, Sender<Option<bool>>),
    /// Asks for the counts of all queue pairs. The reply comes at once.
    Counters(Sender<Counters>),
}
