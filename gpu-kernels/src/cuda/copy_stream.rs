//! Copies by the GPU's copy engines, on a stream of their own, and marks between them.

use std::sync::Arc;
use std::time::Duration;

use super::context::Context;
use super::driver::NOT_READY;
use super::event::{Event, TIMED, UNTIMED};
use super::stream::CudaStream;
use crate::error::{DeviceError, Result};

/// A stream of copies, which run in the order in which they were added. Dropping it waits for all of
/// them.
pub(crate) struct CopyStream(CudaStream);

/// A point in a [`CopyStream`].
pub(crate) struct CopyMark(Event);

fn lacks(name: &str) -> DeviceError {
    DeviceError::CudaUnavailable { reason: format!("libcuda.so.1 lacks {name}: it is a stub, or too old") }
}

impl CopyStream {
    /// Makes a stream of the highest priority, so that no kernel delays its copies.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        CudaStream::new(context, true).map(Self)
    }

    /// Makes a stream of the lowest priority, as programs' own streams have it.
    pub(crate) fn beside_kernels(context: &Arc<Context>) -> Result<Self> {
        CudaStream::new(context, false).map(Self)
    }

    /// The stream's handle.
    pub(crate) fn raw(&self) -> u64 {
        self.0.raw.0 as u64
    }

    /// Starts a copy of `len` bytes from host memory to device memory; returns the point behind it.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, and `to` is device memory valid for writes of
    /// `len` bytes, until the mark has been seen passed or self has been dropped.
    pub(crate) unsafe fn copy_in(&self, to: u64, from: *const u8, len: usize) -> Result<CopyMark> {
        let context = &self.0.context;
        let mark = Event::new(context, UNTIMED)?;
        let _current = context.current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (context.driver.cuMemcpyHtoDAsync_v2)(to, from.cast(), len, self.0.raw.0) };
        context
            .check("cuMemcpyHtoDAsync", code, || format!("copying {len} bytes from {from:p} to {to:#x}"))?;
        mark.record(self.0.raw.0)?;
        Ok(CopyMark(mark))
    }

    /// Starts a copy of `len` bytes between any two memories that the driver knows.
    ///
    /// # Safety
    /// Both ranges are valid, and left alone, until a later mark has been passed.
    pub(crate) unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        let context = &self.0.context;
        let copy = context.driver.cuMemcpyAsync.ok_or_else(|| lacks("cuMemcpyAsync"))?;
        let _current = context.current()?;
        // SAFETY: the caller's promise; the stream is ours.
        let code = unsafe { copy(dst, src, len, self.0.raw.0) };
        context.check("cuMemcpyAsync", code, || format!("copying {len} bytes from {src:#x} to {dst:#x}"))
    }

    /// Fails if the GPU can't store a word in a stream's order.
    pub(crate) fn can_store(&self) -> Result<()> {
        let context = &self.0.context;
        match context.writes_words() {
            true => Ok(()),
            false => Err(lacks("64-bit stream memory operations (cuStreamWriteValue64)")),
        }
    }

    /// Adds a store of `value` to `dst` behind everything that was added before. The store is carried out when all of that
    /// is complete and visible to running kernels.
    ///
    /// # Safety
    /// `dst` is an 8-byte aligned word of memory that the GPU can write, and stays valid until a later mark has been
    /// passed.
    pub(crate) unsafe fn store(&self, dst: u64, value: u64) -> Result<()> {
        let context = &self.0.context;
        let write = context.driver.cuStreamWriteValue64_v2.ok_or_else(|| lacks("cuStreamWriteValue64"))?;
        let _current = context.current()?;
        // SAFETY: our own stream; the caller promises the word. Flag 0: with the barrier before the store.
        let code = unsafe { write(self.0.raw.0, dst, value, 0) };
        context.check("cuStreamWriteValue64", code, || format!("storing {value} to {dst:#x}"))
    }

    /// Fails with the device's error if the device has failed.
    pub(crate) fn check(&self) -> Result<()> {
        let context = &self.0.context;
        let _current = context.current()?;
        let query = context.driver.cuStreamQuery.ok_or_else(|| lacks("cuStreamQuery"))?;
        // SAFETY: our own stream.
        match unsafe { query(self.0.raw.0) } {
            NOT_READY => Ok(()),
            code => context.check("cuStreamQuery", code, || "copying".to_owned()),
        }
    }

    /// Marks the point behind all copies that were added so far, with its time.
    pub(crate) fn mark(&self) -> Result<CopyMark> {
        let mark = Event::new(&self.0.context, TIMED)?;
        let _current = self.0.context.current()?;
        mark.record(self.0.raw.0)?;
        Ok(CopyMark(mark))
    }

    /// Makes later copies wait for a mark of another stream, on this GPU or another.
    pub(crate) fn wait_for(&self, mark: &CopyMark) -> Result<()> {
        let context = &self.0.context;
        let wait = context.driver.cuStreamWaitEvent.ok_or_else(|| lacks("cuStreamWaitEvent"))?;
        let _current = context.current()?;
        // SAFETY: a stream of ours, and an event that lives as long as `mark`; the driver keeps what
        // it needs of the event.
        let code = unsafe { wait(self.0.raw.0, mark.0.raw.0, 0) };
        context.check("cuStreamWaitEvent", code, || "waiting for another stream".to_owned())
    }

    /// Makes what RDMA devices wrote visible to kernels ([`Context::flush_rdma_writes`]).
    pub(crate) fn flush_rdma_writes(&self) -> Result<()> {
        self.0.context.flush_rdma_writes()
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        let Ok(_current) = self.0.context.current() else { return };
        // SAFETY: the stream is our own; it holds only copies, which end by themselves.
        let code = unsafe { (self.0.context.driver.cuStreamSynchronize)(self.0.raw.0) };
        self.0.context.note("cuStreamSynchronize", code, || "waiting for copies to end".to_owned());
    }
}

impl CopyMark {
    /// Whether all copies before the mark are complete. Never blocks.
    pub(crate) fn passed(&self) -> Result<bool> {
        let context = &self.0.context;
        let _current = context.current()?;
        match context.query(self.0.raw.0) {
            NOT_READY => Ok(false),
            code => context.check("cuEventQuery", code, || "copying".to_owned()).map(|()| true),
        }
    }

    /// The time from `earlier` to this mark ([`CopyStream::mark`]). Both must have been passed.
    pub(crate) fn since(&self, earlier: &CopyMark) -> Result<Duration> {
        self.0.since(&earlier.0, || "timing copies".to_owned())
    }
}
