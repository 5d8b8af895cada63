//! A queue pair as the program sees it: its memory, the registrations with the device, and the structure that kernels
//! get.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::placed::{Placed, State as RingState};
use pushgate_driver_shim::window::{Piece, Window};
use pushgate_engine::engine::{EngineError, QpId};
use pushgate_gpu_kernels::{Access, DeviceBuffer, Registration};
use pushgate_link::producer::Producer;
use pushgate_link::region::Exported;

use super::descriptor::{DeviceEnd, check_status, device_addresses, ring, ring_process};
use super::memory::{DrivenEnd, InboundPayload, Own};
use super::region::{Region, RegionKey};
use super::undo::Undo;
use crate::context::Context;
use crate::engine::Doorbell;
use crate::error::{Error, Result};
use crate::host_memory::HostMemory;
use crate::shared::Shared;

/// A reliable, ordered connection between two ranks' devices.
///
/// Dropping it takes the queue pair out of the engine. Kernels that use it must have ended by then.
pub struct QueuePair {
    // Fields drop in this order: out of the engine (Drop), unregister, unmap.
    descriptor: abi::pushgate_qp,
    registrations: Vec<Registration>,
    _state: DeviceBuffer,
    id: QpId,
    peer: u32,
    rank: u32,
    control: Piece,
    pub(super) memory: DrivenEnd,
    /// Whether a thread of the host has this end.
    pub(super) host_end: AtomicBool,
    pub(super) context: Context,
    /// Its regions see by this that it is gone.
    lives: Arc<()>,
}

impl DeviceEnd for QueuePair {
    fn descriptor(&self) -> abi::pushgate_qp {
        self.descriptor
    }
}

impl QueuePair {
    /// Makes the queue pair from an end that the engine drives: registers the end's memory with the device.
    pub(super) fn new(context: &Context, peer: u32, driven: DrivenEnd) -> Result<QueuePair> {
        // Undoes the join until the queue pair belongs to a `QueuePair`.
        let undo = Undo::new(context, driven.id);
        let settings = context.settings();
        let Own { geometry: g, window, work, control, .. } = &driven.own;
        let register = |m: &dyn Window| context.register(m, Access::ReadWrite);
        let inbound = match &driven.inbound {
            InboundPayload::Window(window) => context.register_read_only(window)?,
            InboundPayload::Mirror(mirror) => register(&**mirror)?,
        };
        let peer_window = inbound.device_addr();
        let (mut registrations, [window, work, control_at]) = match &driven.own.placed {
            Some(placed) => {
                let (all, at) = context.register_placed(placed)?;
                (vec![all], at)
            }
            None => {
                let each = [register(&**window)?, register(work)?, register(control)?];
                let at = each.each_ref().map(Registration::device_addr);
                (Vec::from(each), at)
            }
        };
        registrations.push(inbound);
        let state = context.alloc(size_of::<abi::pushgate_qp_state>())?;
        let doorbell = match context.device() {
            "cpu" => match &context.inner.bell {
                Doorbell::Thread(_) => ring as extern "C" fn(u64) as usize as u64,
                Doorbell::Process(_) => ring_process as extern "C" fn(u64) as usize as u64,
            },
            _ => 0,
        };
        let descriptor = abi::pushgate_qp {
            peer_window,
            state: state.addr(),
            doorbell,
            doorbell_arg: context.inner.bell.fd().as_raw_fd() as u64,
            limit_ns: settings.timeout.as_nanos() as u64,
            peer_window_log: driven.peer_geometry.window_log,
            peer,
            ..device_addresses(g, window, work, control_at)
        };
        undo.done();
        Ok(QueuePair {
            descriptor,
            registrations,
            _state: state,
            id: driven.id,
            peer,
            rank: g.rank,
            control: control.clone(),
            memory: driven,
            host_end: AtomicBool::new(false),
            context: context.clone(),
            lives: Arc::new(()),
        })
    }

    /// Where the window begins in its provider, if WQE ring and control words lie in the window too
    /// (`rings = window`). An [`crate::AttachedQueuePair`] needs this offset.
    pub fn place(&self) -> Option<u64> {
        self.memory.own.placed.as_ref().map(|placed| placed.control.offset())
    }

    /// The name of the staging area that contains the window (`window = staging`). If this process
    /// is killed, another process takes over the area by this name.
    pub fn area(&self) -> Option<&str> {
        self.memory.own.window.name()
    }

    /// The content of the rings, if they lie in the window (`rings = window`): what another proxy
    /// would find there if this process died. Kernels that still send change it meanwhile.
    pub fn ring_state(&self) -> Option<RingState> {
        self.memory.own.placed.as_ref().filter(|_| self.context.here().is_ok()).map(Placed::state)
    }

    /// The rank of the other end.
    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// The largest message in bytes: the size of the window's payload.
    pub fn max_message(&self) -> u64 {
        (abi::PUSHGATE_UNIT as u64) << self.descriptor.window_log
    }

    /// Registers shared memory: the peer may put into it, and WQEs of this end may name it.
    ///
    /// The queue pair keeps the memory as long as it is registered.
    pub fn register_shared(&self, memory: &Shared) -> Result<Region> {
        let key = self.context.inner.proxy.add_shared_region(self.id, memory.memory())?;
        Ok(self.region(key, memory.len() as u64))
    }

    fn region(&self, key: RegionKey, bytes: u64) -> Region {
        Region::new(&self.context, self.id, key, bytes, Arc::downgrade(&self.lives))
    }

    /// Registers device memory: the peer may put into it. Works only with the engine in this
    /// process.
    ///
    /// Between RDMA devices the peer's device writes into the buffer directly, where the GPU and
    /// both RDMA devices allow that. Elsewhere the payload arrives in host memory, and the GPU's
    /// copy engine fetches it.
    ///
    /// # Safety
    /// The buffer stays until the region has ended: until [`Region::deregister`] has returned true, the region was dropped
    /// and the log says nothing of messages that still use it, or the queue pair was dropped. (If the log
    /// says that the device's copies did not end when the queue pair was dropped, the buffer must
    /// stay until they do.)
    pub unsafe fn register_buffer(&self, buffer: &DeviceBuffer) -> Result<Region> {
        self.context.here()?;
        let (proxy, bytes) = (&self.context.inner.proxy, buffer.len() as u64);
        if self.context.device() == "cpu" {
            // SAFETY: the CPU executor's device addresses are host addresses; the caller keeps the
            // buffer, and no references into it exist.
            let key = unsafe { proxy.add_host_region(self.id, buffer.addr() as usize, bytes, None)? };
            return Ok(self.region(key, bytes));
        }
        let exported = match &self.memory.inbound {
            InboundPayload::Mirror(_) if !self.memory.streams => self.export(buffer),
            _ => None,
        };
        // SAFETY: the caller keeps the buffer; the export covers all of it.
        let key = unsafe { proxy.add_device_region(self.id, buffer.addr(), bytes, exported)? };
        Ok(self.region(key, bytes))
    }

    /// Registers host memory of the program's own: the peer may put into it, and WQEs of this end may name it. Works only with
    /// the engine in this process.
    ///
    /// # Safety
    /// The memory stays mapped and writable, and no Rust reference into it lives, until the queue pair is dropped or the region
    /// has ended, as [`QueuePair::register_buffer`] says.
    pub unsafe fn register_host(&self, memory: &HostMemory) -> Result<Region> {
        self.context.here()?;
        memory.owner().check()?;
        let (at, bytes) = (memory.as_ptr().as_ptr() as usize, memory.len() as u64);
        // SAFETY: the caller's promise.
        let key = unsafe { self.context.inner.proxy.add_host_region(self.id, at, bytes, None)? };
        Ok(self.region(key, bytes))
    }

    /// Registers memory of the device that another library allocated, as by cudaMalloc: the peer may put into it. Works only
    /// with the engine in this process. The GPU's copy engine brings payload there.
    ///
    /// # Errors
    /// Where `bytes` is 0 or the range leaves the address space.
    ///
    /// # Safety
    /// The `bytes` at `address` are memory of this context's device (on the device `cpu`, of this process) and stay allocated
    /// until the region has ended, as [`QueuePair::register_buffer`] says.
    pub unsafe fn register_device(&self, address: u64, bytes: u64) -> Result<Region> {
        self.context.here()?;
        if address == 0 || bytes == 0 || address.checked_add(bytes).is_none() {
            let allowed = "1 or more at an address that is not 0, within the address space";
            return Err(Error::config("bytes", bytes, allowed));
        }
        let proxy = &self.context.inner.proxy;
        if self.context.device() == "cpu" {
            // SAFETY: the caller's promise; on this device an address is one of this process.
            let key = unsafe { proxy.add_host_region(self.id, address as usize, bytes, None)? };
            return Ok(self.region(key, bytes));
        }
        // SAFETY: the caller's promise; nothing is exported.
        let key = unsafe { proxy.add_device_region(self.id, address, bytes, None)? };
        Ok(self.region(key, bytes))
    }

    /// Exports a buffer for an RDMA device that is to write into it. On an error the copy engine is
    /// used instead, so an error is no reason to refuse the buffer.
    fn export(&self, buffer: &DeviceBuffer) -> Option<Exported> {
        match buffer.export() {
            Ok(dma_buf) => dma_buf.map(|d| Exported::DmaBuf(Arc::new(d.fd), d.offset)),
            Err(e) => {
                limited!(
                    warn,
                    self.peer,
                    rank = self.rank,
                    peer = self.peer,
                    "{e}: payload for it will be copied"
                );
                None
            }
        }
    }

    /// Fails with the cause if the queue pair has ended.
    pub fn check(&self) -> Result<()> {
        self.context.here()?;
        let ended = check_status(&self.control, self.rank);
        ended.map_err(|e| match e {
            // A proxy that is gone knows the reason better than the status that it left.
            Error::PeerLost { rank } if rank != self.rank => e,
            Error::PeerLost { .. } | Error::Aborted { .. } => {
                self.context.inner.proxy.lost_because().map_or(e, Error::from)
            }
            e => e,
        })
    }

    /// Ends the queue pair: waits end with *aborted*, here and at the peer.
    pub fn abort(&self) -> Result<()> {
        Ok(self.context.inner.proxy.fail(Some(self.id), Status::new(abi::PUSHGATE_ABORTED))?)
    }

    /// Breaks the link of this end, as a fault would. True if another link is to take its place; else the queue pair ends.
    /// For tests of recovery; needs `proxy = thread`.
    #[doc(hidden)]
    pub fn break_link(&self) -> Result<bool> {
        Ok(self.context.inner.proxy.break_link(self.id)?)
    }

    /// Links of this context's queue pairs that took the place of one that broke. For tests of recovery.
    #[doc(hidden)]
    pub fn links_replaced(&self) -> Result<u64> {
        Ok(self.context.inner.proxy.counters()?.recovered)
    }

    /// The producer under [`QueuePair::host_end`], without its checks and waits, for a program that drives the engine
    /// (`drive = caller`). A queue pair has one: no kernel uses this end, nor another producer. For benches.
    #[doc(hidden)]
    pub fn producer(&self) -> Producer {
        let Own { geometry, window, work, control, .. } = &self.memory.own;
        // Who drives the engine finds it awake, so there is nothing to ring.
        Producer::new(*geometry, work.clone(), control.clone(), window.clone(), None)
    }

    /// Keeps mapped and registered, for ever, what a device may still read or write.
    fn keep_memory(&mut self) {
        let Own { window, work, control, .. } = &self.memory.own;
        std::mem::forget((window.clone(), work.clone(), control.clone()));
        match &self.memory.inbound {
            InboundPayload::Window(window) => std::mem::forget(window.clone()),
            InboundPayload::Mirror(mirror) => std::mem::forget(mirror.clone()),
        }
        std::mem::forget(std::mem::take(&mut self.registrations));
    }

    /// The engine's number for the queue pair.
    pub(crate) fn id(&self) -> QpId {
        self.id
    }

    /// The control segment, for code that must write the final status when the engine is gone.
    pub(crate) fn control(&self) -> &Piece {
        &self.control
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // An error means that the engine is gone and has dropped the queue pair already. In a child
        // of `fork` the engine refuses, and the fields' drops do nothing.
        if let Err(EngineError::Unsettled(_)) = self.context.inner.proxy.remove_qp(self.id) {
            limited!(
                error,
                self.peer,
                rank = self.rank,
                peer = self.peer,
                "the device still copies for a queue pair that is dropped; its memory stays to the process's end"
            );
            self.keep_memory();
        }
    }
}
