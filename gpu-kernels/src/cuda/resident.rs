//! A resident kernel, which starts and ends by itself, and the calls of the driver around it.
//!
//! Any thread of a program may make these calls, also while it captures a graph and between a
//! library's own launches. So this code uses no events, allocates no memory, and queries only where
//! nothing else will do.

use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{CUDA_KERNEL_NODE_PARAMS, CUstream, CUstreamCaptureStatus_enum as CaptureStatus};

use super::context::Context;
use super::driver::{NOT_READY, SUCCESS};
use super::executor::CudaExecutor;
use super::launch::by_size;
use super::ledger::{Presence, WHOLE};
use super::module::Function;
use super::stream::CudaStream;
use crate::error::{DeviceError, Result};
use crate::executor::{Launch, LoadedModule};
use crate::lock::lock;

/// A kernel with its shape and a stream of its own, which has the highest priority.
pub(crate) struct Resident {
    context: Arc<Context>,
    function: Arc<Function>,
    launch: Launch,
    stream: CudaStream,
    _presence: Arc<Presence>,
    _module: Arc<dyn LoadedModule>,
    /// Whether a stream can be told to write a word (cuStreamWriteValue64).
    writes: bool,
    /// The kernel that counts the ends of a graph's operations.
    mark: Arc<Function>,
}

/// What a stream does now with work that is put on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follows {
    /// The work runs when its turn comes, and the stream can write a word after it.
    Runs,
    /// The work becomes part of a graph.
    Captures,
    /// The driver can't tell.
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
        let resident = loaded.resident_blocks(kernel, &function, launch.block, launch.shared_bytes)?;
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
        let writes = context.writes_words();
        let share = u64::from(launch.grid) * WHOLE / u64::from(resident);
        let presence = Arc::new(Presence { present, share, blocks: launch.grid });
        lock(&context.ledger).residents.push(Arc::downgrade(&presence));
        drop(current);
        let stream = CudaStream::new(&context, true)?;
        Ok(Self { context, function, launch, stream, _presence: presence, _module: module, writes, mark })
    }

    /// Starts the kernel once more, after its earlier launches.
    ///
    /// # Safety
    /// The requirements of [`crate::Executor::launch`] hold until [`Resident::ended`] returns true.
    pub(crate) unsafe fn start(&self, params: &[u8]) -> Result<()> {
        let _current = self.context.current()?;
        let raw = self.stream.raw.0;
        // SAFETY: function and stream belong to this context; the caller promises the rest.
        let code = unsafe { self.context.start(self.function.raw.0, raw, self.launch, params) };
        self.context.check("cuLaunchKernel", code, || format!("starting the worker ({:?})", self.launch))
    }

    /// Whether [`Resident::ended`] can tell.
    pub(crate) fn tells_its_end(&self) -> bool {
        self.context.driver.cuStreamQuery.is_some()
    }

    /// Whether every launch has ended.
    pub(crate) fn ended(&self) -> Result<bool> {
        let Some(query) = self.context.driver.cuStreamQuery else { return Ok(true) };
        let _current = self.context.current()?;
        // SAFETY: the stream is our own.
        match unsafe { query(self.stream.raw.0) } {
            NOT_READY => Ok(false),
            code => {
                self.context.check("cuStreamQuery", code, || "running the worker".to_owned()).map(|()| true)
            }
        }
    }

    /// Finds out what the stream does with work that is put on it now.
    pub(crate) fn follows(&self, stream: u64) -> Follows {
        let Some(ask) = self.context.driver.cuStreamIsCapturing else {
            return if self.writes { Follows::Runs } else { Follows::Unknown };
        };
        let Ok(_current) = self.context.current() else { return Follows::Unknown };
        let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
        // SAFETY: the caller's stream, which the caller says is alive; writes one enum of 32 bits.
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

    /// Adds the kernel to the graph that a stream captures, after what was captured on that stream
    /// before; no other node of the graph waits for the kernel. False: this driver can't, or
    /// nothing is captured.
    ///
    /// # Safety
    /// The requirements of [`crate::Executor::launch`] hold for as long as the graph may be
    /// replayed.
    pub(crate) unsafe fn add_to_graph(&self, stream: u64, params: &[u8]) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe { self.add_node(stream, &self.function, self.launch, params) }
    }

    /// Adds the kernel that increments the word at `addr` to the graph that a stream captures.
    /// False: this driver can't, or nothing is captured.
    ///
    /// # Safety
    /// The requirements of [`Resident::add_to_graph`] hold, and the word is memory of this device.
    pub(crate) unsafe fn add_mark_to_graph(&self, stream: u64, addr: u64) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe { self.add_node(stream, &self.mark, Launch::new(1, 1), &addr.to_le_bytes()) }
    }

    /// Adds a kernel node to the graph that a stream captures.
    ///
    /// # Safety
    /// The requirements of [`Resident::add_to_graph`] hold.
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
        let mut extra = by_size(&mut bytes, &mut size);
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
        // SAFETY: the graph is being captured on this stream, and the stream's owner does not use
        // the stream meanwhile. `before` are `count` nodes of the graph, valid until the next call
        // about the stream. The driver copies the parameters before it returns; the caller promises
        // what the kernel may do. (`edges` is requested because the query fails without it where
        // there are edges of other kinds than the plain one; our edges are plain, so our node runs
        // after the whole of the nodes before it.)
        let code = unsafe { add(&mut node, graph, before, count, &node_params) };
        self.context.check("cuGraphAddKernelNode", code, doing)?;
        Ok(true)
    }

    /// Puts a store of `value` to `addr` after all work that was put on `stream` before. The word
    /// is ours and outlives the stream's work (the worker waits for it).
    pub(crate) fn write_behind(&self, stream: u64, addr: u64, value: u64) -> Result<()> {
        let Some(write) = self.context.driver.cuStreamWriteValue64_v2 else { return Ok(()) };
        let _current = self.context.current()?;
        // SAFETY: the caller's stream; a registered word. Flag 0: the store happens only when the
        // work before it is complete and visible.
        let code = unsafe { write(stream as CUstream, addr, value, 0) };
        self.context.check("cuStreamWriteValue64", code, || format!("marking a place in stream {stream:#x}"))
    }
}
