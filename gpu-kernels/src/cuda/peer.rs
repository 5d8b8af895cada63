//! Copies by the copy engines in both directions, and access to the memory of another GPU.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use super::{CudaExecutor, CudaStream, EVENT_TIMED, Event, NOT_READY, Raw, SUCCESS};
use crate::error::{DeviceError, Result};

const ALREADY: u32 = 704; // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED

/// A stream of copies between any two memories that the driver knows.
pub(crate) struct CudaCopies(CudaStream);

/// A point in a stream of copies, with its time.
pub(crate) struct CudaPoint(Event);

fn lacks(name: &str) -> DeviceError {
    DeviceError::CudaUnavailable { reason: format!("libcuda.so.1 lacks {name}: it is a stub, or too old") }
}

impl CudaCopies {
    pub(crate) fn new(executor: &CudaExecutor) -> Result<Self> {
        let context = executor.context();
        Ok(Self(CudaStream { context: context.clone(), raw: Raw(context.make_stream(true)?) }))
    }

    /// Starts a copy of `len` bytes.
    ///
    /// # Safety
    /// Both ranges are valid, and left alone, until a later point has been passed.
    pub(crate) unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        let context = &self.0.context;
        let copy = context.driver.cuMemcpyAsync.ok_or_else(|| lacks("cuMemcpyAsync"))?;
        let _current = context.current()?;
        // SAFETY: the caller's promise; the stream is ours.
        let code = unsafe { copy(dst, src, len, self.0.raw.0) };
        context.check("cuMemcpyAsync", code, || format!("copying {len} bytes from {src:#x} to {dst:#x}"))
    }

    pub(crate) fn point(&self) -> Result<CudaPoint> {
        let event = Event::new(&self.0.context, EVENT_TIMED)?;
        let _current = self.0.context.current()?;
        event.record(self.0.raw.0)?;
        Ok(CudaPoint(event))
    }

    /// Makes later copies wait for a point of another stream, on this GPU or another.
    pub(crate) fn wait_for(&self, point: &CudaPoint) -> Result<()> {
        let context = &self.0.context;
        let wait = context.driver.cuStreamWaitEvent.ok_or_else(|| lacks("cuStreamWaitEvent"))?;
        let _current = context.current()?;
        // SAFETY: a stream of ours, and an event that lives as long as `point`; the driver keeps
        // what it needs of the event.
        let code = unsafe { wait(self.0.raw.0, point.0.raw.0, 0) };
        context.check("cuStreamWaitEvent", code, || "waiting for another stream".to_owned())
    }
}

impl Drop for CudaCopies {
    fn drop(&mut self) {
        let context = &self.0.context;
        let Ok(_current) = context.current() else { return };
        // SAFETY: the stream is our own; it holds only copies, which end by themselves.
        let code = unsafe { (context.driver.cuStreamSynchronize)(self.0.raw.0) };
        context.note("cuStreamSynchronize", code, || "waiting for copies to end".to_owned());
    }
}

impl CudaPoint {
    pub(crate) fn passed(&self) -> Result<bool> {
        let context = &self.0.context;
        let _current = context.current()?;
        match context.query(self.0.raw.0) {
            NOT_READY => Ok(false),
            code => context.check("cuEventQuery", code, || "copying".to_owned()).map(|()| true),
        }
    }

    /// The time from `earlier` to this point. Both must have been passed.
    pub(crate) fn since(&self, earlier: &CudaPoint) -> Result<Duration> {
        let context = &self.0.context;
        let _current = context.current()?;
        let mut milliseconds = 0f32;
        // SAFETY: both events are timed and were recorded in this context; otherwise the driver
        // returns an error. Writes one float.
        let code =
            unsafe { (context.driver.cuEventElapsedTime)(&mut milliseconds, earlier.0.raw.0, self.0.raw.0) };
        context.check("cuEventElapsedTime", code, || "timing copies".to_owned())?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl CudaExecutor {
    /// Lets kernels of this GPU load from and store to the memory of `other` from now on. False if
    /// the two GPUs can't.
    pub fn reach(&self, other: &CudaExecutor) -> Result<bool> {
        let (context, theirs) = (self.context(), other.context());
        if Arc::ptr_eq(context, theirs) {
            return Ok(true);
        }
        let driver = context.driver;
        let (Some(can), Some(enable)) = (driver.cuDeviceCanAccessPeer, driver.cuCtxEnablePeerAccess) else {
            return Ok(false);
        };
        let mut yes: c_int = 0;
        // SAFETY: two valid devices; writes one int.
        let code = unsafe { can(&mut yes, context.device, theirs.device) };
        let doing = || format!("asking for the memory of device {} ({})", theirs.index, theirs.name);
        context.check("cuDeviceCanAccessPeer", code, doing)?;
        if yes == 0 {
            return Ok(false);
        }
        let _current = context.current()?;
        // SAFETY: the other GPU's context is retained as long as `other` lives, and access to it
        // ends with it.
        match unsafe { enable(theirs.context.0, 0) } {
            SUCCESS | ALREADY => Ok(true),
            code => context.check("cuCtxEnablePeerAccess", code, doing).map(|()| true),
        }
    }
}
