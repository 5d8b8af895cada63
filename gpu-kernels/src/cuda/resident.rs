//! A kernel that comes and goes by itself, and the calls around it that may be
//! made on any thread of a program: while it captures a graph, and between a
//! library's own launches. So no events here, no queries but where nothing else
//! will do, and no memory.

use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUdevice_attribute_enum as Attribute, CUstream,
    CUstreamCaptureStatus_enum as CaptureStatus,
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
    /// Counts the ends of a graph's operations.
    mark: Arc<Function>,
}

/// What a stream does with what is put on it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follows {
    /// It runs when its turn comes, and the stream can tell us.
    Runs,
    /// It becomes part of a graph.
    Captures,
    /// It can't be told.
    Unknown,
}

impl Resident {
    pub(crate) fn new(
        executor: &CudaExecutor,
        module: Arc<dyn LoadedModule>,
        (kernel, mark): (&str, &str),
        launch: Launch,
        present: Box<dyn Fn() -> bool + Send + Sync>,
    ) -> Result<Self> {
        let context = executor.context().clone();
        let loaded = executor.module(&module)?;
        let current = context.current()?;
        let (function, mark) = (loaded.find(kernel)?, loaded.find(mark)?);
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
        Ok(Self { context, function, launch, stream, _presence: presence, _module: module, writes, mark })
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

    /// What the stream does with what is put on it.
    pub(crate) fn follows(&self, stream: u64) -> Follows {
        let Some(ask) = self.context.driver.cuStreamIsCapturing else {
            return if self.writes { Follows::Runs } else { Follows::Unknown };
        };
        let Ok(_current) = self.context.current() else { return Follows::Unknown };
        let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
        // SAFETY: the caller's stream, alive as it says; writes one enum of 32 bits.
        let code = unsafe { ask(stream as CUstream, (&raw mut status).cast()) };
        if code != SUCCESS {
            Follows::Unknown
        } else if status == CaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 {
            Follows::Captures
        } else if status == CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32 && self.writes {
            Follows::Runs
        } else {
            Follows::Unknown
        }
    }

    /// Adds the kernel to the graph that a stream captures, behind what was captured before on that
    /// stream; nothing else of the graph waits for it. False: this driver can't, or nothing is captured.
    ///
    /// # Safety
    /// As [`crate::Executor::launch`], for as long as the graph may be replayed.
    pub(crate) unsafe fn add_to_graph(&self, stream: u64, params: &[u8]) -> Result<bool> {
        // SAFETY: the caller's.
        unsafe { self.add_node(stream, &self.function, self.launch, params) }
    }

    /// The same of the kernel that counts the word at `addr` up.
    ///
    /// # Safety
    /// As above; the word is this device's.
    pub(crate) unsafe fn add_mark_to_graph(&self, stream: u64, addr: u64) -> Result<bool> {
        // SAFETY: the caller's.
        unsafe { self.add_node(stream, &self.mark, Launch::new(1, 1), &addr.to_le_bytes()) }
    }

    /// # Safety
    /// As [`Resident::add_to_graph`].
    unsafe fn add_node(
        &self,
        stream: u64,
        function: &Function,
        launch: Launch,
        params: &[u8],
    ) -> Result<bool> {
        let driver = self.context.driver;
        let (Some(info), Some(add)) = (driver.cuStreamGetCaptureInfo_v3, driver.cuGraphAddKernelNode_v2)
        else {
            return Ok(false);
        };
        let _current = self.context.current()?;
        let doing = || "adding the worker to a graph".to_owned();
        let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
        let (mut id, mut graph, mut before, mut edges, mut count) = (0, null_mut(), null(), null(), 0);
        // SAFETY: the caller's stream; writes one of each, the first an enum of 32 bits.
        let code = unsafe {
            info(
                stream as CUstream,
                (&raw mut status).cast(),
                &mut id,
                &mut graph,
                &mut before,
                &mut edges,
                &mut count,
            )
        };
        self.context.check("cuStreamGetCaptureInfo", code, doing)?;
        if status != CaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 {
            return Ok(false);
        }
        let mut bytes = params.to_vec();
        let mut size = bytes.len();
        let mut extra = super::by_size(&mut bytes, &mut size);
        let node_params = CUDA_KERNEL_NODE_PARAMS {
            func: function.raw.0,
            gridDimX: launch.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            kernelParams: null_mut(),
            extra: extra.as_mut_ptr(),
            kern: null_mut(),
            ctx: null_mut(),
        };
        let mut node = null_mut();
        // SAFETY: the graph is being captured on this stream, which its owner does not use
        // meanwhile; `before` are `count` nodes of it, valid until the next call about the
        // stream. The driver copies the parameters before it returns; what the kernel may do is
        // the caller's promise. (`edges` is asked for, or the question fails where there are other
        // kinds than the plain one; ours are plain, so behind the whole of those nodes.)
        let code = unsafe { add(&mut node, graph, before, count, &node_params) };
        self.context.check("cuGraphAddKernelNode", code, doing)?;
        Ok(true)
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
