//! A stream of the driver.

use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use super::context::Context;
use super::driver::Raw;
use crate::error::Result;
use crate::executor::LaunchQueue;

/// A stream of the driver, destroyed on drop.
pub(super) struct CudaStream {
    pub(super) context: Arc<Context>,
    pub(super) raw: Raw<CUstream>,
}

impl CudaStream {
    /// Makes a stream ([`Context::make_stream`]).
    pub(super) fn new(context: &Arc<Context>, first: bool) -> Result<Self> {
        let raw = Raw(context.make_stream(first)?);
        Ok(Self { context: context.clone(), raw })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        let Ok(_current) = self.context.current() else { return };
        // SAFETY: made by this value; the driver documents that work already put on the stream
        // still completes.
        let code = unsafe { (self.context.driver.cuStreamDestroy_v2)(self.raw.0) };
        self.context.note("cuStreamDestroy", code, || "destroying a stream".to_owned());
    }
}

impl LaunchQueue for CudaStream {
    fn raw(&self) -> Option<u64> {
        Some(self.raw.0 as u64)
    }
}
