//! Copies into GPU memory by the GPU's copy engine, for payload that no NIC writes there.
//!
//! P3, data before signal: a copy's data is complete in GPU memory once the copy's event has
//! completed, that is, once [`CudaCopy::done`] has returned `true`. Only then may the signal for
//! the data be written. The event is recorded after the copy on the same stream, with nothing
//! between. Queueing the signal after the copy without checking the event would not guarantee the
//! order.

use std::fmt;

use crate::cuda::{CopyMark, CopyStream, CudaExecutor};
use crate::error::Result;

/// Copies from host memory into one GPU's memory, on a stream of its own, so that no kernel delays
/// them.
///
/// Copies run in the order in which they were started. May be used by several threads.
pub struct CudaCopy {
    stream: CopyStream,
}

/// A copy that was started ([`CudaCopy::start`]). Dropping the ticket does not stop the copy.
#[must_use = "the copy is complete when CudaCopy::done says so"]
pub struct CopyTicket {
    mark: CopyMark,
}

impl CudaCopy {
    /// Makes a stream of copies into the GPU of `executor`.
    pub fn new(executor: &CudaExecutor) -> Result<Self> {
        Ok(Self { stream: CopyStream::new(executor.context())? })
    }

    /// Starts a copy of `len` bytes to the device address `dst_dev`. Returns at once if the source
    /// is registered ([`crate::Executor::register`]); for other memory it may return only after the
    /// copy.
    ///
    /// # Safety
    /// `src_host` must be valid for reads, and `dst_dev` must be memory of this GPU valid for
    /// writes, of `len` bytes each, until [`CudaCopy::done`] has returned `true` for the ticket or
    /// this `CudaCopy` has been dropped (which waits).
    pub unsafe fn start(&self, dst_dev: u64, src_host: *const u8, len: usize) -> Result<CopyTicket> {
        // SAFETY: the caller's promise.
        let mark = unsafe { self.stream.copy_in(dst_dev, src_host, len) }?;
        Ok(CopyTicket { mark })
    }

    /// Makes what an RDMA device has written into the GPU's memory visible to the GPU's kernels,
    /// including those that are running. A signal written after this call may announce such data
    /// (P3). May be called by any thread, whatever context is current on the thread.
    pub fn flush_rdma_writes(&self) -> Result<()> {
        self.stream.flush_rdma_writes()
    }

    /// Whether the copy, and every copy started before it, is complete in GPU memory. Never blocks.
    pub fn done(&self, ticket: &CopyTicket) -> Result<bool> {
        ticket.mark.passed()
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
