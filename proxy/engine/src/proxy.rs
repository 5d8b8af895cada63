//! The proxy as a program sees it, wherever the engine runs: the trait [`Proxy`].
//!
//! `in_process.rs` implements the trait for an engine of this process ([`Engine`](crate::engine::Engine)), `remote.rs`
//! for an engine of `pushgate proxy` (`RemoteEngine` of `pushgate-service`).

use std::sync::Arc;
use std::time::Duration;

use pushgate_core::session::Status;
use pushgate_driver_shim::bell::{Bell, Ring, Ringer};
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_link::RegionSends;
use pushgate_link::mailbox::{Mailbox, SendFrame};
use pushgate_link::memory::Keep;
use pushgate_link::region::Exported;

use crate::connect::{Connect, Fds};
use crate::counters::Counters;
use crate::endpoint::{Endpoint, QpMemory, QpOptions};
use crate::engine::{EngineError, QpId};
use crate::idle::{Step, Wake};

/// The memory of one queue pair, as the program has it.
///
/// An engine of another process maps all of it anew. That engine writes `control` and `link`, so these two must lie in
/// normal pages and must not be sealed against writers yet. `work` and the peer's memory may be sealed, and must be
/// sealed where they lie in huge pages.
#[derive(Debug)]
pub struct QpFds {
    /// Work segment: the program's devices write, the engine reads.
    pub work: Arc<SharedMemory>,
    /// Control segment: the engine writes.
    pub control: Arc<SharedMemory>,
    /// Our link segment: the engine writes.
    pub link: Arc<SharedMemory>,
    /// The peer's link segment.
    pub peer_link: Arc<ReadOnlyMemory>,
    /// The peer's window.
    pub peer_window: Arc<ReadOnlyMemory>,
    /// The bell that the peer rings to wake our engine from sleep.
    pub bell: Option<Bell>,
    /// The ringer that wakes the peer's engine, where that engine can be woken.
    pub peer_bell: Option<Ringer>,
    /// The peer's process, by its number in our PID namespace. With the number, the peer may send out of its regions:
    /// an engine of our own process reads the payload in the peer's process.
    pub peer_pid: Option<u32>,
}

/// What replaces a queue pair's link when it breaks, as the program has it.
pub struct Recovers {
    /// The machine by which the ends have met, live with the peer's end.
    pub connect: Connect<Fds>,
    /// How long the ends try to meet again.
    pub limit: Duration,
    /// Frames of the peer, which come over a channel of the program. [`Proxy::control`] says that there are some.
    pub mailbox: Mailbox,
    /// The way of frames to the peer. It is dropped when the queue pair is gone.
    pub send: SendFrame,
}

impl QpFds {
    /// The endpoint of this queue pair, for an engine of this process ([`Proxy::add_endpoint`]).
    pub fn into_endpoint(mut self, options: QpOptions) -> Result<Endpoint, EngineError> {
        let ring = self.peer_bell.take().map(Ringer::into_ring);
        self.endpoint(ring, options)
    }

    /// As [`QpFds::into_endpoint`], for ends whose engines wake each other over sockets of their programs: `bell` wakes this end's,
    /// `ring` the peer's.
    pub fn into_endpoint_beside(
        self,
        (bell, ring): (Bell, Ring),
        options: QpOptions,
    ) -> Result<Endpoint, EngineError> {
        QpFds { bell: Some(bell), ..self }.endpoint(Some(ring), options)
    }

    fn endpoint(self, ring: Option<Ring>, options: QpOptions) -> Result<Endpoint, EngineError> {
        let remote = |e: &dyn std::fmt::Display| EngineError::Remote(e.to_string());
        // The engine only reads the work segment, so it gets a mapping of its own that permits nothing else.
        let work = self.work.fd().try_clone_to_owned().map_err(|e| remote(&e))?;
        let work = ReadOnlyMemory::from_fd(work, self.work.len())
            .map_err(|e| EngineError::Remote(format!("work segment: {e}")))?;
        for (name, bytes) in [("control", self.control.len()), ("link", self.link.len())] {
            first_page(name, bytes)?;
        }
        let memory = QpMemory {
            work: Arc::new(work),
            control: self.control,
            link: self.link,
            peer_link: self.peer_link,
            peer_window: self.peer_window,
            bell: self.bell,
            peer_bell: ring,
            peer_pid: self.peer_pid,
            in_program: true,
        };
        Endpoint::local(memory, options).map_err(|e| remote(&e))
    }
}

/// The engine that drives a program's queue pairs.
///
/// All calls may be made from any thread. Each call waits for its answer; a dead proxy is an error and not a wait.
pub trait Proxy: Send + Sync {
    /// Takes in a queue pair over the `local` transport. `wake` says how its producer can wake the engine.
    fn add_qp(&self, fds: QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError>;

    /// Takes in a queue pair over the `local` transport whose link is replaced when it breaks. An engine of another process may
    /// die: then the next proxy goes on with the queue pair.
    fn add_recovering_qp(
        &self,
        fds: QpFds,
        options: QpOptions,
        wake: Wake,
        recovers: Recovers,
    ) -> Result<QpId, EngineError>;

    /// Takes in a queue pair over any other transport. Only an engine of this process can do that.
    fn add_endpoint(&self, endpoint: Endpoint, wake: Wake) -> Result<QpId, EngineError>;

    /// Registers all of a shared memory with a queue pair; returns the region's key (lkey and rkey in one). The engine
    /// keeps the memory until the region is removed.
    fn add_shared_region(&self, qp: QpId, memory: &Arc<SharedMemory>) -> Result<u32, EngineError>;

    /// Registers memory of this process. Only an engine of this process can do that.
    ///
    /// # Safety
    /// The `bytes` at `address` stay mapped, writable and free of Rust references until the region or the queue pair is
    /// removed. `keep`, which the engine holds for that time, may ensure that they stay mapped.
    unsafe fn add_host_region(
        &self,
        qp: QpId,
        address: usize,
        bytes: u64,
        keep: Option<Keep>,
    ) -> Result<u32, EngineError>;

    /// Registers memory of a device that the engine's mover reaches. Only an engine of this process can do that. With
    /// `exported`, an RDMA device may write into the memory directly.
    ///
    /// # Safety
    /// The `bytes` at device address `address` stay allocated until the region or the queue pair is removed. `exported`
    /// covers exactly these bytes.
    unsafe fn add_device_region(
        &self,
        qp: QpId,
        address: u64,
        bytes: u64,
        exported: Option<Exported>,
    ) -> Result<u32, EngineError>;

    /// Removes a region. Waits, for 2 s at most, until no copy to the region and no message out of it is under way.
    /// False if the key names no region, or the region is still in use: then its memory must stay.
    /// [`Engine::remove_region`](crate::engine::Engine::remove_region) says what holds where the queue pair has failed.
    fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError>;

    /// Drops a queue pair with its regions and mappings; returns its last counts.
    fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError>;

    /// Ends one queue pair, or all of this program's, with a status.
    fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError>;

    /// Tells a queue pair that frames of its peer wait in its mailbox ([`Recovers`]). Waits for nothing.
    fn control(&self, qp: QpId) -> Result<(), EngineError>;

    /// Breaks the link of a queue pair. True if another one is to take its place. Only an engine of this process can do
    /// that. For tests and fault injection.
    fn break_link(&self, _qp: QpId) -> Result<bool, EngineError> {
        Err(EngineError::Remote("links of a proxy process can't be broken: set proxy = thread".into()))
    }

    /// How a queue pair ended, if it has.
    fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError>;

    /// Whether the queue pair takes SENDs out of regions. Where the peer has not said so yet, such a SEND waits. Where
    /// the queue pair does not take them, the payload must go through the window.
    fn region_sends(&self, qp: QpId) -> Result<RegionSends, EngineError>;

    /// Whether bytes go out of a region, and come into it from a region of the peer, without a copy. Only an engine of this process
    /// knows.
    fn is_registered(&self, _qp: QpId, _key: u32) -> Result<bool, EngineError> {
        Ok(false)
    }

    /// Counts of all of this program's queue pairs, including those that were removed.
    fn counters(&self) -> Result<Counters, EngineError>;

    /// A pass of an engine that the program drives ([`Engine::drive`](crate::engine::Engine::drive)); nothing for any
    /// other engine. Returns what the caller may do until the next pass.
    fn drive(&self) -> Result<Step, EngineError>;

    /// A pass, and then the wait of an idle engine ([`Engine::rest`](crate::engine::Engine::rest)); any other engine lets the caller
    /// sleep.
    fn rest(&self, limit: Duration) -> Result<(), EngineError> {
        std::thread::sleep(limit);
        Ok(())
    }

    /// Why there is no engine, where its process has ended and no other one goes on with the queue pairs.
    fn lost_because(&self) -> Option<EngineError> {
        None
    }

    /// Where the engine runs: "thread" or "process".
    fn place(&self) -> &'static str;
}

/// Checks that a segment which the engine writes has room for its header, which
/// [`Endpoint::local`] reads without a look at the size.
pub fn first_page(name: &str, bytes: usize) -> Result<(), EngineError> {
    let page = pushgate_driver_shim::abi::PUSHGATE_PAGE as usize;
    if bytes >= page {
        return Ok(());
    }
    Err(EngineError::Remote(format!("{name} segment: {bytes} bytes hold no header, the least is {page}")))
}
