//! The proxy as a program sees it, wherever its engine runs: a thread of this
//! process ([`Engine`]) or of `pushgate proxy` ([`RemoteEngine`]).

use std::sync::Arc;

use pushgate_driver_shim::bell::{Bell, Ringer};
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};

use crate::counters::Counters;
use crate::endpoint::{Endpoint, QpMemory, QpOptions};
use crate::engine::{Engine, EngineError, QpId};
use crate::idle::Wake;
use crate::link::RegionSends;
use crate::memory::Keep;
use crate::region::{Exported, RegionMemory};
use crate::remote::RemoteEngine;
use crate::session::Status;

/// The memory of one queue pair, as the program has it.
///
/// An engine of another process maps all of it anew. It writes `control` and
/// `link`, so these must lie in normal pages and not yet be sealed against
/// writers; `work` and what is the peer's may be sealed, and must be if it lies
/// in huge pages.
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
    /// What the peer rings to wake our engine, if that sleeps.
    pub bell: Option<Bell>,
    /// Wakes the peer's engine, where it can be woken.
    pub peer_bell: Option<Ringer>,
    /// The peer's process, by its number in our PID namespace: its messages may go out
    /// of regions that an engine of our own process reads there.
    pub peer_pid: Option<u32>,
}

/// What drives a program's queue pairs. All calls may be made from any thread;
/// each waits for its answer, and a dead proxy is an error, not a wait.
pub trait Proxy: Send + Sync {
    /// Takes in a queue pair over the `local` transport. `wake` says how its
    /// producer can wake the engine.
    fn add_qp(&self, fds: QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError>;

    /// Takes in a queue pair over any other transport. Only for an engine of this
    /// process.
    fn add_endpoint(&self, endpoint: Endpoint, wake: Wake) -> Result<QpId, EngineError>;

    /// Registers all of a shared memory with a queue pair; returns its key (lkey
    /// and rkey). The engine keeps the memory until the region is removed.
    fn add_shared_region(&self, qp: QpId, memory: &Arc<SharedMemory>) -> Result<u32, EngineError>;

    /// Registers memory of this process. Only for an engine of this process.
    ///
    /// # Safety
    /// The `bytes` at `address` stay mapped, writable and free of Rust references
    /// until the region or the queue pair is removed; `keep` may see to that.
    unsafe fn add_host_region(
        &self,
        qp: QpId,
        address: usize,
        bytes: u64,
        keep: Option<Keep>,
    ) -> Result<u32, EngineError>;

    /// Registers memory of a device that the engine's mover reaches. Only for an
    /// engine of this process. What is `exported` an RDMA device may write itself.
    ///
    /// # Safety
    /// The `bytes` at device address `address` stay allocated until the region or
    /// the queue pair is removed. `exported` is of just them.
    unsafe fn add_device_region(
        &self,
        qp: QpId,
        address: u64,
        bytes: u64,
        exported: Option<Exported>,
    ) -> Result<u32, EngineError>;

    /// Removes a region. Waits, for 2 s at most, until no copy to it is under way and no
    /// message out of it. False if the key names none, or the region is still in use: then
    /// its memory must stay. See [`Engine::remove_region`] for one whose queue pair failed.
    fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError>;

    /// Drops a queue pair with its regions and mappings; returns its last counts.
    fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError>;

    /// Ends one queue pair, or all of this program's, with a status.
    fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError>;

    /// How a queue pair ended, if it has.
    fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError>;

    /// Whether the queue pair takes SENDs out of regions. Where the peer has not told
    /// yet, such a SEND waits; where it does not, the payload goes through the window.
    fn region_sends(&self, qp: QpId) -> Result<RegionSends, EngineError>;

    /// Counts of all of this program's queue pairs, those removed included.
    fn counters(&self) -> Result<Counters, EngineError>;

    /// Where the engine runs: "thread" or "process".
    fn place(&self) -> &'static str;
}

impl Proxy for Engine {
    fn add_qp(&self, fds: QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError> {
        // The memory is not mapped in a child.
        self.here()?;
        let remote = |e: &dyn std::fmt::Display| EngineError::Remote(e.to_string());
        // The engine only reads it: a mapping of its own that can do nothing else.
        let work = fds.work.fd().try_clone_to_owned().map_err(|e| remote(&e))?;
        let work = ReadOnlyMemory::from_fd(work, fds.work.len())
            .map_err(|e| EngineError::Remote(format!("work segment: {e}")))?;
        for (name, bytes) in [("control", fds.control.len()), ("link", fds.link.len())] {
            first_page(name, bytes)?;
        }
        let memory = QpMemory {
            work: Arc::new(work),
            control: fds.control,
            link: fds.link,
            peer_link: fds.peer_link,
            peer_window: fds.peer_window,
            bell: fds.bell,
            peer_bell: fds.peer_bell,
            peer_pid: fds.peer_pid,
            in_program: true,
        };
        let endpoint = Endpoint::local(memory, options).map_err(|e| remote(&e))?;
        self.add_qp(endpoint, wake)
    }

    fn add_endpoint(&self, endpoint: Endpoint, wake: Wake) -> Result<QpId, EngineError> {
        self.add_qp(endpoint, wake)
    }

    fn add_shared_region(&self, qp: QpId, memory: &Arc<SharedMemory>) -> Result<u32, EngineError> {
        let address = memory.as_ptr().as_ptr() as usize;
        let region = RegionMemory::Host { address, keep: Some(memory.clone()) };
        // SAFETY: the mapping is writable for its length, and `keep` holds it as long
        // as the region is registered. References to it are to atomic words alone,
        // which others may change.
        unsafe { self.add_region(qp, region, memory.len() as u64) }
    }

    unsafe fn add_host_region(
        &self,
        qp: QpId,
        address: usize,
        bytes: u64,
        keep: Option<Keep>,
    ) -> Result<u32, EngineError> {
        // SAFETY: our caller promises the same.
        unsafe { self.add_region(qp, RegionMemory::Host { address, keep }, bytes) }
    }

    unsafe fn add_device_region(
        &self,
        qp: QpId,
        address: u64,
        bytes: u64,
        exported: Option<Exported>,
    ) -> Result<u32, EngineError> {
        // SAFETY: our caller promises the same.
        unsafe { self.add_region(qp, RegionMemory::Device { address, exported }, bytes) }
    }

    fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        self.remove_region(qp, key)
    }

    fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        self.remove_qp(qp)
    }

    fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        self.fail(qp, status)
    }

    fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError> {
        self.status(qp)
    }

    fn region_sends(&self, qp: QpId) -> Result<RegionSends, EngineError> {
        self.region_sends(qp)
    }

    fn counters(&self) -> Result<Counters, EngineError> {
        self.counters()
    }

    fn place(&self) -> &'static str {
        "thread"
    }
}

/// [`Endpoint::local`] reads the header of a segment that we write as it stands.
pub(crate) fn first_page(name: &str, bytes: usize) -> Result<(), EngineError> {
    let page = pushgate_driver_shim::abi::PUSHGATE_PAGE as usize;
    if bytes >= page {
        return Ok(());
    }
    Err(EngineError::Remote(format!("{name} segment: {bytes} bytes hold no header, the least is {page}")))
}

impl Proxy for RemoteEngine {
    fn add_qp(&self, fds: QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError> {
        self.add_qp(&fds, options, wake)
    }

    fn add_endpoint(&self, _: Endpoint, _: Wake) -> Result<QpId, EngineError> {
        let why =
            "a proxy process has local queue pairs only: run the engine in this process (proxy = thread)";
        Err(EngineError::Remote(why.into()))
    }

    fn add_shared_region(&self, qp: QpId, memory: &Arc<SharedMemory>) -> Result<u32, EngineError> {
        self.add_region(qp, memory)
    }

    unsafe fn add_host_region(
        &self,
        _: QpId,
        address: usize,
        bytes: u64,
        _: Option<Keep>,
    ) -> Result<u32, EngineError> {
        Err(EngineError::Remote(format!(
            "{bytes} bytes at {address:#x} are memory of this process alone: allocate the region as shared \
             memory, or run the engine in this process (proxy = thread)"
        )))
    }

    unsafe fn add_device_region(
        &self,
        _: QpId,
        address: u64,
        bytes: u64,
        _: Option<Exported>,
    ) -> Result<u32, EngineError> {
        Err(EngineError::Remote(format!(
            "{bytes} bytes at device address {address:#x} are reached by a mover of this process alone: \
             allocate the region as shared memory, or run the engine in this process (proxy = thread)"
        )))
    }

    fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        self.remove_region(qp, key)
    }

    fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        self.remove_qp(qp)
    }

    fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        self.fail(qp, status)
    }

    fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError> {
        self.status(qp)
    }

    fn region_sends(&self, _: QpId) -> Result<RegionSends, EngineError> {
        Ok(RegionSends::No(
            "the engine is not in this process: use proxy = thread, or push the payload into the window",
        ))
    }

    fn counters(&self) -> Result<Counters, EngineError> {
        self.counters()
    }

    fn place(&self) -> &'static str {
        "process"
    }
}
