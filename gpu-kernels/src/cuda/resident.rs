//! A kernel that comes and goes by itself, and the calls around it that may be
//! made on any thread of a program: while it captures a graph, and between a
//! library's own launches. So no events here, no queries but where nothing else
//! will do, and no memory.

use std::sync::Arc;

use cudarc::driver::sys::{
    CUdevice_attribute_enum as Attribute, CUstream, CUstreamCaptureStatus_enum as CaptureStatus,
};

use super::guard::{NOT_READY, SUCCESS};
use super::{Context, CudaExecutor, CudaStream, Function, Raw, WHOLE, lock};
use crate::executor::{DeviceError, Launch, LoadedModule, Result};

/// What the ledger knows of a resident kernel.
pub(super) struct Presence {
    /// Whether it runs, or may begin to.
    pub(super) present: Box<dyn Fn() -> bool + Send + Sync>,
    /// What it takes of the device when it does, of `WHOLE`: always set aside,
    /// since nobody asks before it comes.
    pub(super) share: u64,
    pub(super) blocks: u32,
}

/// A kernel, its shape, and a stream of its own, first in line.
pub(crate) struct Resident {
    context: Arc<Context>,
    function: Arc<Function>,
    launch: Launch,
    stream: CudaStream,
    _presence: Arc<Presence>,
    _module: Arc<dyn LoadedModule>,
    /// What a stream may be told to write (cuStreamWriteValue64).
    writes: bool,
}

impl Resident {
    pub(crate) fn new(
        executor: &CudaExecutor,
        module: Arc<dyn LoadedModule>,
        kernel: &str,
        launch: Launch,
        present: Box<dyn Fn() -> bool + Send + Sync>,
    ) -> Result<Self> {
        let context = executor.context().clone();
        let loaded = executor.module(&module)?;
        let current = context.current()?;
        let function = loaded.find(kernel)?;
        launch.check(kernel, context.max_shared)?;
        let resident = loaded.resident(kernel, &function, launch.block, launch.shared_bytes)?;
        if launch.grid > resident {
            return Err(DeviceError::NotResident {
                kernel: kernel.to_owned(),
                grid: launch.grid,
                block: launch.block,
                resident,
                free: resident,
                busy: 0,
            });
        }
        let mut able = 0;
        let which = Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
        // SAFETY: writes one int about a valid device.
        let code = unsafe { (context.driver.cuDeviceGetAttribute)(&mut able, which, context.device) };
        let writes = code == SUCCESS && able != 0 && context.driver.cuStreamWriteValue64_v2.is_some();
        let share = u64::from(launch.grid) * WHOLE / u64::from(resident);
        let presence = Arc::new(Presence { present, share, blocks: launch.grid });
        lock(&context.ledger).residents.push(Arc::downgrade(&presence));
        drop(current);
        let raw = Raw(context.make_stream(true)?);
        let stream = CudaStream { context: context.clone(), raw };
        Ok(Self { context, function, launch, stream, _presence: presence, _module: module, writes })
    }

    /// Starts the kernel once more, behind itself.
    ///
    /// # Safety
    /// As [`crate::Executor::launch`], until [`Resident::ended`] says so.
    pub(crate) unsafe fn start(&self, params: &[u8]) -> Result<()> {
        let _current = self.context.current()?;
        let raw = self.stream.raw.0;
        // SAFETY: both are of this context; the rest is the caller's promise.
        let code = unsafe { self.context.start(self.function.raw.0, raw, self.launch, params) };
        self.context.check("cuLaunchKernel", code, || format!("starting the worker ({:?})", self.launch))
    }

    /// Whether [`Resident::ended`] knows.
    pub(crate) fn tells_its_end(&self) -> bool {
        self.context.driver.cuStreamQuery.is_some()
    }

    /// Whether every start has ended.
    pub(crate) fn ended(&self) -> Result<bool> {
        let Some(query) = self.context.driver.cuStreamQuery else { return Ok(true) };
        let _current = self.context.current()?;
        // SAFETY: our own stream.
        match unsafe { query(self.stream.raw.0) } {
            NOT_READY => Ok(false),
            code => {
                self.context.check("cuStreamQuery", code, || "running the worker".to_owned()).map(|()| true)
            }
        }
    }

    /// Whether what is put on a stream now would run when it gets its turn, and
    /// the stream can tell us. Not while it captures a graph.
    pub(crate) fn can_follow(&self, stream: u64) -> bool {
        if !self.writes {
            return false;
        }
        let Some(ask) = self.context.driver.cuStreamIsCapturing else { return true };
        let Ok(_current) = self.context.current() else { return false };
        let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
        // SAFETY: the caller's stream, alive as it says; writes one enum of 32 bits.
        let code = unsafe { ask(stream as CUstream, (&raw mut status).cast()) };
        code == SUCCESS && status == CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32
    }

    /// Puts a store of `value` to `addr` behind all that was put on `stream` before.
    /// The word is ours and outlives the stream's work (the worker waits for it).
    pub(crate) fn write_behind(&self, stream: u64, addr: u64, value: u64) -> Result<()> {
        let Some(write) = self.context.driver.cuStreamWriteValue64_v2 else { return Ok(()) };
        let _current = self.context.current()?;
        // SAFETY: the caller's stream; a registered word. Flag 0: not before the
        // work ahead of it is complete and visible.
        let code = unsafe { write(stream as CUstream, addr, value, 0) };
        self.context.check("cuStreamWriteValue64", code, || format!("marking a place in stream {stream:#x}"))
    }
}
