//! A queue pair as the program sees it: its memory, the registrations with the device, and the
//! structure that kernels get.

mod join;
mod local;
#[cfg(test)]
mod unsettled;
mod verbs;

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell;
use pushgate_driver_shim::placed::{Placed, State as RingState};
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::{Piece, Window};
use pushgate_gpu_kernels::{Access, DeviceBuffer, Registration};
use pushgate_proxy::engine::{EngineError, QpId};
use pushgate_proxy::region::Exported;
use pushgate_proxy::session::Status;

use crate::context::{Context, Doorbell, Shared};
use crate::error::{Error, Result};
use crate::settings::QpKind;

pub(crate) use join::Half;
use join::{Inbound, Joined, Own};
pub(crate) use verbs::open as open_rdma;

/// Sizes of a queue pair that differ from the settings.
#[derive(Clone, Copy, Debug, Default)]
pub struct QpConfig {
    /// Size of the payload ring in bytes: a power of two of at least 64.
    pub window_size: Option<u64>,
    /// Number of WQE slots: a power of two.
    pub slots: Option<u64>,
    /// Number of receives: a power of two.
    pub receives: Option<u64>,
    /// Whether messages land in buffers that `post_recv` names.
    pub posted_receives: bool,
}

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
    memory: Joined,
    context: Context,
}

/// The key of a region: lkey and rkey in one.
pub type RegionKey = u32;

/// Rings an engine in this process, on behalf of the CPU executor; `fd` is the engine's eventfd.
pub(crate) extern "C" fn ring(fd: u64) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the context of the queue pair whose structure names the descriptor keeps it open, and
    // kernels that use that structure end before the queue pair is dropped. A full counter gives
    // EAGAIN: then the engine is awake already.
    let fd = unsafe { BorrowedFd::borrow_raw(fd as i32) };
    let _ = rustix::io::write(fd, &one);
}

/// Rings an engine in the proxy process, on behalf of the CPU executor; `fd` is the descriptor of a
/// ringer.
extern "C" fn ring_process(fd: u64) {
    // SAFETY: the context keeps the descriptor open, as in `ring`.
    bell::ring(unsafe { BorrowedFd::borrow_raw(fd as i32) });
}

/// Fails with the cause if the queue pair of a control segment has ended. Reads the word that
/// devices read, which is the same wherever the engine runs.
pub(crate) fn check_status(control: &Piece, rank: u32) -> Result<()> {
    let word = control.words(abi::PUSHGATE_CTL_STATUS as usize, 1)[0].load(Ordering::Acquire);
    match Status::from_word(word) {
        None => Ok(()),
        Some(status) => Err(Error::from_status(status, rank)),
    }
}

/// Fills in the part of a kernel's structure that says where segments and window lie, by their
/// device addresses.
pub(crate) fn device_addresses(g: &Geometry, window: u64, work: u64, control: u64) -> abi::pushgate_qp {
    abi::pushgate_qp {
        window,
        wqes: work + abi::PUSHGATE_WORK_RING as u64,
        receives: work + g.work_receives_offset() as u64,
        consumed: work + abi::PUSHGATE_WORK_CONSUMED as u64,
        credit: control + abi::PUSHGATE_CTL_CREDIT as u64,
        delivered: control + abi::PUSHGATE_CTL_DELIVERED as u64,
        sleeping: control + abi::PUSHGATE_CTL_SLEEPING as u64,
        signals: control + abi::PUSHGATE_CTL_SIGNALS as u64,
        cq: control + g.control_cq_offset() as u64,
        rx: control + g.control_rx_offset() as u64,
        landing: control + g.control_landing_offset() as u64,
        window_log: g.window_log,
        slots_log: g.slots_log,
        cq_log: g.cq_log,
        rx_log: g.rx_log,
        landing_log: g.landing_log,
        n_signals: g.signals,
        rank: g.rank,
        ..Default::default()
    }
}

/// An end of a queue pair that kernels can use.
pub trait DeviceEnd {
    /// The structure that kernels get. Pass an array of them in device memory
    /// ([`upload_descriptors`]).
    fn descriptor(&self) -> abi::pushgate_qp;
}

impl DeviceEnd for QueuePair {
    fn descriptor(&self) -> abi::pushgate_qp {
        self.descriptor
    }
}

/// Takes a queue pair out of its engine, and tells the peer, if it is dropped before `done`.
struct Undo<'a> {
    context: &'a Context,
    id: QpId,
    done: bool,
}

impl<'a> Undo<'a> {
    fn new(context: &'a Context, id: QpId) -> Self {
        Undo { context, id, done: false }
    }

    /// Keeps the queue pair.
    fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if !self.done {
            let proxy = &self.context.inner.proxy;
            let _ = proxy.fail(Some(self.id), Status::new(abi::PUSHGATE_ABORTED));
            let _ = proxy.remove_qp(self.id);
        }
    }
}

impl QueuePair {
    /// Makes the queue pair from what both ends joined: registers its memory with the device.
    fn new(context: &Context, peer: u32, joined: Joined) -> Result<QueuePair> {
        // Undoes the join until the queue pair belongs to a `QueuePair`.
        let undo = Undo::new(context, joined.id);
        let settings = context.settings();
        let Own { geometry: g, window, work, control, .. } = &joined.own;
        let register = |m: &dyn Window| context.register(m, Access::ReadWrite);
        let inbound = match &joined.inbound {
            Inbound::Window(window) => context.register_read_only(window)?,
            Inbound::Mirror(mirror) => register(&**mirror)?,
        };
        let registrations = vec![register(&**window)?, register(work)?, register(control)?, inbound];
        let [window, work, control_at, inbound] =
            [0, 1, 2, 3].map(|i: usize| Registration::device_addr(&registrations[i]));
        let state = context.alloc(size_of::<abi::pushgate_qp_state>())?;
        let doorbell = match context.device() {
            "cpu" => match &context.inner.bell {
                Doorbell::Thread(_) => ring as extern "C" fn(u64) as usize as u64,
                Doorbell::Process(_) => ring_process as extern "C" fn(u64) as usize as u64,
            },
            _ => 0,
        };
        let descriptor = abi::pushgate_qp {
            peer_window: inbound,
            state: state.addr(),
            doorbell,
            doorbell_arg: context.inner.bell.fd().as_raw_fd() as u64,
            limit_ns: settings.timeout.as_nanos() as u64,
            peer_window_log: joined.peer_geometry.window_log,
            peer,
            ..device_addresses(g, window, work, control_at)
        };
        undo.done();
        Ok(QueuePair {
            descriptor,
            registrations,
            _state: state,
            id: joined.id,
            peer,
            rank: g.rank,
            control: control.clone(),
            memory: joined,
            context: context.clone(),
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
    pub fn register_shared(&self, memory: &Shared) -> Result<RegionKey> {
        Ok(self.context.inner.proxy.add_shared_region(self.id, memory.memory())?)
    }

    /// Registers device memory: the peer may put into it. Works only with the engine in this
    /// process.
    ///
    /// Between RDMA devices the peer's device writes into the buffer directly, where the GPU and
    /// both RDMA devices allow that. Elsewhere the payload arrives in host memory, and the GPU's
    /// copy engine fetches it.
    ///
    /// # Safety
    /// The buffer outlives the queue pair, or a successful [`QueuePair::deregister`]. (If the log
    /// says that the device's copies did not end when the queue pair was dropped, the buffer must
    /// stay until they do.)
    pub unsafe fn register_buffer(&self, buffer: &DeviceBuffer) -> Result<RegionKey> {
        self.context.here()?;
        let (proxy, bytes) = (&self.context.inner.proxy, buffer.len() as u64);
        if self.context.device() == "cpu" {
            // SAFETY: the CPU executor's device addresses are host addresses; the caller keeps the
            // buffer, and no references into it exist.
            return Ok(unsafe { proxy.add_host_region(self.id, buffer.addr() as usize, bytes, None)? });
        }
        let exported = match self.context.settings().qp {
            QpKind::Verbs => self.export(buffer),
            QpKind::Local => None,
        };
        // SAFETY: the caller keeps the buffer; the export covers all of it.
        Ok(unsafe { proxy.add_device_region(self.id, buffer.addr(), bytes, exported)? })
    }

    /// Exports a buffer for an RDMA device that is to write into it. On an error the copy engine is
    /// used instead, so an error is no reason to refuse the buffer.
    fn export(&self, buffer: &DeviceBuffer) -> Option<Exported> {
        match buffer.export() {
            Ok(dma_buf) => dma_buf.map(|d| Exported::DmaBuf(Arc::new(d.fd), d.offset)),
            Err(e) => {
                tracing::warn!(rank = self.rank, peer = self.peer, "{e}: payload for it will be copied");
                None
            }
        }
    }

    /// Deregisters a region once nothing under way uses it any more.
    ///
    /// False if the key names no region, or if messages out of the region, or copies to it, did not
    /// end within 2 s: then the region stays registered, and its memory must stay.
    ///
    /// On a queue pair that has failed only copies are waited for. A peer on the same host may then
    /// read, for a moment longer, what lies where the region was, but shows none of it.
    pub fn deregister(&self, key: RegionKey) -> Result<bool> {
        Ok(self.context.inner.proxy.remove_region(self.id, key)?)
    }

    /// Fails with the cause if the queue pair has ended.
    pub fn check(&self) -> Result<()> {
        self.context.here()?;
        check_status(&self.control, self.rank)
    }

    /// Ends the queue pair: waits end with *aborted*, here and at the peer.
    pub fn abort(&self) -> Result<()> {
        Ok(self.context.inner.proxy.fail(Some(self.id), Status::new(abi::PUSHGATE_ABORTED))?)
    }

    /// Keeps mapped and registered, for ever, what a device may still read or write.
    fn keep_memory(&mut self) {
        let Own { window, work, control, .. } = &self.memory.own;
        std::mem::forget((window.clone(), work.clone(), control.clone()));
        match &self.memory.inbound {
            Inbound::Window(window) => std::mem::forget(window.clone()),
            Inbound::Mirror(mirror) => std::mem::forget(mirror.clone()),
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
            tracing::error!(
                rank = self.rank,
                peer = self.peer,
                "the device still copies for a queue pair that is dropped; its memory stays to the process's end"
            );
            self.keep_memory();
        }
    }
}

/// Copies the structures of several queue pairs to device memory, side by side.
pub fn upload_descriptors<'a, Q: DeviceEnd + 'a>(
    context: &Context,
    qps: impl IntoIterator<Item = &'a Q>,
) -> Result<DeviceBuffer> {
    let all: Vec<_> = qps.into_iter().map(|q| q.descriptor()).collect();
    // SAFETY: `pushgate_qp` is plain integers without padding (16 u64, 10 u32), so all its bytes
    // are initialised; the slice covers the vector exactly.
    let bytes = unsafe { std::slice::from_raw_parts(all.as_ptr().cast::<u8>(), size_of_val(all.as_slice())) };
    const { assert!(size_of::<abi::pushgate_qp>() == 16 * 8 + 10 * 4) };
    context.upload(bytes)
}
