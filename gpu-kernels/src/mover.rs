//! What moves bytes into GPU memory where no NIC does it: the copy engine.
//!
//! P3, data before signal: a copy's data is complete in GPU memory when its
//! event has completed, that is, once [`CudaCopy::done`] has said `true`. Only
//! then may the signal for it be written. The event is recorded behind the copy
//! on the same stream and nothing else is put between; to queue the signal
//! behind the copy without looking would order it by hope.

use std::fmt;

use crate::cuda::{CopyMark, CopyStream, CudaExecutor};
use crate::executor::Result;

/// Copies from host memory into one GPU's memory, on a stream of its own, so
/// that no kernel stands in their way. Copies run in the order in which they
/// were started. May be shared by threads.
pub struct CudaCopy {
    stream: CopyStream,
}

/// A copy that was started ([`CudaCopy::start`]). Dropping it stops nothing.
#[must_use = "the copy is complete when CudaCopy::done says so"]
pub struct CopyTicket {
    mark: CopyMark,
}

impl CudaCopy {
    /// A stream of copies into the GPU of `executor`.
    pub fn new(executor: &CudaExecutor) -> Result<Self> {
        Ok(Self { stream: CopyStream::new(executor.context())? })
    }

    /// Starts a copy of `len` bytes to the device address `dst_dev`. From memory
    /// that is registered ([`crate::Executor::register`]) it returns at once;
    /// from other memory it may return after the copy.
    ///
    /// # Safety
    /// `src_host` must be valid for reads, and `dst_dev` be memory of this GPU
    /// valid for writes, of `len` bytes each, until [`CudaCopy::done`] has said
    /// `true` for the ticket or this `CudaCopy` was dropped (which waits).
    pub unsafe fn start(&self, dst_dev: u64, src_host: *const u8, len: usize) -> Result<CopyTicket> {
        // SAFETY: the caller's promise.
        let mark = unsafe { self.stream.copy(dst_dev, src_host, len) }?;
        Ok(CopyTicket { mark })
    }

    /// Makes what an RDMA device has written into the GPU's memory visible to its
    /// kernels, those that run among them: for a signal that is written after this
    /// and announces such data (P3). May be called by any thread, whatever context
    /// is current there.
    pub fn flush_rdma_writes(&self) -> Result<()> {
        self.stream.flush_rdma_writes()
    }

    /// Whether the copy, and every one started before it, is complete in GPU
    /// memory. Never blocks.
    pub fn done(&self, ticket: &CopyTicket) -> Result<bool> {
        self.stream.passed(&ticket.mark)
    }
}

impl fmt::Debug for CudaCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CudaCopy")
    }
}

impl fmt::Debug for CopyTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CopyTicket")
    }
}
