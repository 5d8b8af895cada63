//! A launch: the call that starts a kernel, and the wait for the kernel's end.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUfunction, CUstream};

use super::context::Context;
use super::driver::NOT_READY;
use super::event::Event;
use crate::error::Result;
use crate::executor::{Launch, LoadedModule, RunningKernel, Stream, WaitOutcome};
use crate::lock::lock;

/// Passes a kernel's parameters as one block with its size. With a list of pointers the driver
/// would read as much from each pointer as the kernel's own signature says.
pub(super) fn by_size(bytes: &mut [u8], size: &mut usize) -> [*mut c_void; 5] {
    [
        sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut c_void,
        bytes.as_mut_ptr().cast(),
        sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut c_void,
        (&raw mut *size).cast(),
        sys::CU_LAUNCH_PARAM_END_AS_INT as usize as *mut c_void,
    ]
}

impl Context {
    /// Launches a kernel without any checks. The context must be current.
    ///
    /// # Safety
    /// Function and stream belong to this context, and until the kernel ends, it may do what it
    /// does with the memory that the parameters point to.
    pub(super) unsafe fn start(
        &self,
        function: CUfunction,
        stream: CUstream,
        launch: Launch,
        params: &[u8],
    ) -> u32 {
        let mut bytes = params.to_vec();
        let mut size = bytes.len();
        let mut extra = by_size(&mut bytes, &mut size);
        // SAFETY: the caller's promise; the driver copies the parameters before it returns.
        unsafe {
            (self.driver.cuLaunchKernel)(
                function,
                launch.grid,
                1,
                1,
                launch.block,
                1,
                1,
                launch.shared_bytes,
                stream,
                null_mut(),
                extra.as_mut_ptr(),
            )
        }
    }
}

/// A launch, between two events on its stream.
pub(super) struct CudaRunning {
    /// The launch's number in the ledger.
    pub(super) id: u64,
    /// The kernel and its shape, for error messages.
    pub(super) what: String,
    pub(super) start: Event,
    pub(super) end: Event,
    pub(super) _stream: Stream,
    pub(super) _module: Arc<dyn LoadedModule>,
}

impl CudaRunning {
    /// Marks the launch as ended, with success or not.
    fn finish(&self) {
        let context = &self.end.context;
        let mut ledger = lock(&context.ledger);
        let before = ledger.active.len();
        ledger.active.retain(|active| active.id != self.id);
        if before != ledger.active.len()
            && let Ok(_current) = context.current()
        {
            context.sweep(&mut ledger);
        }
    }

    /// Whether the launch has ended; a launch that failed has ended too.
    fn poll(&self) -> Result<bool> {
        let current = self.end.context.current()?;
        let code = self.end.context.query(self.end.raw.0);
        if code == NOT_READY {
            return Ok(false);
        }
        drop(current);
        self.finish();
        self.end.context.check("cuEventQuery", code, || format!("running {}", self.what))?;
        Ok(true)
    }
}

impl RunningKernel for CudaRunning {
    fn wait(&self, timeout: Option<Duration>) -> Result<WaitOutcome> {
        let began = Instant::now();
        loop {
            if self.poll()? {
                return Ok(WaitOutcome::Done);
            }
            let waited = began.elapsed();
            if timeout.is_some_and(|timeout| waited >= timeout) {
                return Ok(WaitOutcome::TimedOut);
            }
            // Spin while waiting for a short kernel. For a long one, sleep a tenth of the time it
            // has taken so far, which adds at most a tenth.
            if waited < Duration::from_micros(100) {
                std::hint::spin_loop();
            } else {
                let step = (waited / 10).min(Duration::from_micros(500));
                thread::sleep(timeout.map_or(step, |timeout| step.min(timeout - waited)));
            }
        }
    }

    fn is_done(&self) -> Result<bool> {
        self.poll()
    }

    fn elapsed(&self) -> Result<Option<Duration>> {
        if !self.poll()? {
            return Ok(None);
        }
        self.end.since(&self.start, || format!("timing {}", self.what)).map(Some)
    }
}

impl Drop for CudaRunning {
    fn drop(&mut self) {
        if let Err(error) = self.wait(None) {
            // A caller that waited has the error already; otherwise this line is the only report of
            // it.
            tracing::warn!("{error}");
        }
        self.finish();
    }
}
