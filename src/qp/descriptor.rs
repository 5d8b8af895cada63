//! The structure that kernels get for an end of a queue pair: where its segments lie, and how they ring the engine.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Piece;
use pushgate_gpu_kernels::DeviceBuffer;

use crate::context::Context;
use crate::error::{Error, Result};

/// An end of a queue pair that kernels can use.
pub trait DeviceEnd {
    /// The structure that kernels get. Pass an array of them in device memory
    /// ([`upload_descriptors`]).
    fn descriptor(&self) -> abi::pushgate_qp;
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
pub(super) extern "C" fn ring_process(fd: u64) {
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
