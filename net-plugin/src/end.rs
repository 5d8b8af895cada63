//! One end of a connection: what a sending end and a receiving end have in common, and how either goes away.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_engine::engine::{EngineError, QpId};
use pushgate_link::mailbox::Mailbox;

use crate::error::{Code, Failure, Result};
use crate::join::{Registered, Role};
use crate::lane::Lane;
use crate::log;
use crate::pushes;
use crate::runtime::Runtime;
use crate::socket::Line;
use crate::watch::{self, Peer};

/// How long closing a connection waits for the GPU.
pub const SETTLE: Duration = Duration::from_secs(2);

/// The part of a connection that sending and receiving ends have. Dropping it takes the queue pair out of the engine.
pub struct CommEnd {
    pub role: Role,
    pub qp: QpId,
    pub peer: Arc<Peer>,
    pub line: Arc<Line>,
    /// Both ends replace a link that breaks.
    pub recovers: bool,
    /// The connection's number at the watch.
    pub watched: u64,
    /// On a receiving end: a region for empty receives, which name no memory.
    pub nothing: u32,
    pub lane: Arc<Lane>,
    /// The RDMA device is used on the GPU's memory.
    pub reaches: bool,
    /// A posted receive drives the connection.
    pub receives_drive: bool,
    pub pushes: pushes::Counts,
    /// What the lane's GPU sees of this connection's memory; dropped once the engine has let go of
    /// it.
    pub registrations: Vec<Registered>,
    pub runtime: Arc<Runtime>,
}

impl fmt::Display for CommEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = if self.role == Role::Send { "sending" } else { "receiving" };
        write!(f, "{end} end of connection {}", self.qp.0)
    }
}

impl Drop for CommEnd {
    fn drop(&mut self) {
        if let Some(renewal) = self.line.renewal() {
            // A peer that dials from here on is told below how many messages have arrived, and not that nobody knows it.
            renewal.own.making();
        }
        self.runtime.watch.remove(self.watched);
        if self.recovers
            && let Ok(counters) = self.lane.engine.counters_of(self.qp)
        {
            // First: where no link is live the peer is told of the queue pair's end, and may see the end before the count
            // that says what has arrived (`CommEnd::peer_has`).
            watch::say_goodbye(&self.line, true, counters.delivered);
        }
        // An engine that is gone has already dropped the queue pair.
        let counters = match self.lane.engine.remove_qp(self.qp) {
            Err(EngineError::Unsettled(counters)) => {
                log::warn(&format!(
                    "{self}: the GPU still pulls out of the peer's window, so the window stays mapped"
                ));
                std::mem::forget(std::mem::take(&mut self.registrations));
                *counters
            }
            other => other.unwrap_or_default(),
        };
        watch::say_goodbye(&self.line, self.recovers, counters.delivered);
        if let Some(renewal) = self.line.renewal() {
            // A peer whose socket is broken dials, and is told.
            renewal.own.close(counters.delivered);
        }
        self.line.shutdown();
    }
}

impl CommEnd {
    /// The end of a queue pair that an engine has, watched for the end of its peer. A failure takes the queue pair out of
    /// the engine again.
    pub fn new(
        runtime: Arc<Runtime>,
        role: Role,
        line: Arc<Line>,
        (qp, mailbox, lane, registrations): (QpId, Option<Mailbox>, Arc<Lane>, Vec<Registered>),
    ) -> Result<Self> {
        // The sending end is rank 0.
        let peer = Arc::new(Peer::new((role == Role::Send) as u32));
        // From here on dropping `end` takes the queue pair out of the engine.
        let mut end = CommEnd {
            role,
            qp,
            peer: peer.clone(),
            line: line.clone(),
            recovers: mailbox.is_some(),
            watched: u64::MAX,
            nothing: 0,
            lane,
            reaches: false,
            receives_drive: false,
            pushes: pushes::Counts::default(),
            registrations,
            runtime,
        };
        end.watched = end.runtime.watch.add(line, peer, &end.lane.engine, qp, mailbox)?;
        Ok(end)
    }

    /// Fails if the lane's GPU copies no more; then the queue pair ends, so the peer learns of it
    /// and waits there end.
    #[inline]
    pub fn gpu_lives(&self) -> Result<()> {
        match self.lane.gpu.as_ref().and_then(|gpu| gpu.lost()) {
            None => Ok(()),
            Some(lost) => Err(self.gpu_is_lost(&lost.reason)),
        }
    }

    #[cold]
    fn gpu_is_lost(&self, reason: &str) -> Failure {
        self.abort();
        let text = format!("{self}: GPU memory is copied no more: {reason}");
        Failure::new(Code::System, text)
    }

    /// Ends the queue pair, so that the peer learns that this end has failed.
    #[cold]
    pub fn abort(&self) {
        // An engine that is gone has already ended the queue pair.
        let _ = self.lane.engine.fail(Some(self.qp), Status::new(abi::PUSHGATE_ABORTED));
    }

    /// Whether the peer of a queue pair that has ended had received our message `number` when it closed. What the peer said
    /// before the end may not have been read yet.
    #[cold]
    pub fn peer_has(&self, number: u64) -> bool {
        if self.recovers {
            self.runtime.watch.listen(self.watched);
        }
        self.peer.received() > number
    }

    /// True if the copier is gone, and copies nothing any more.
    pub fn gpu_has_ended(&self) -> bool {
        self.lane.gpu.as_ref().and_then(|gpu| gpu.lost()).is_some_and(|lost| lost.ended)
    }

    /// What a request that is not done should answer: false while it still waits, or the error if
    /// it will never be done. `status` is the queue pair's.
    #[inline]
    pub fn waits(&self, status: Option<Status>) -> Result<bool> {
        // The GPU's loss is the cause, so it comes before the queue pair's status.
        self.gpu_lives()?;
        match status {
            None => Ok(false),
            Some(status) => Err(Failure::ended(status, self)),
        }
    }
}
