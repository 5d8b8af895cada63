//! What runs device code: the trait, its handles, and which one to take.
//!
//! An [`Executor`] is a GPU ([`crate::CudaExecutor`]) or this CPU
//! ([`crate::CpuExecutor`]). Both run the same kernels over the same memory.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use pushgate_driver_shim::fork::{Forked, OwnedHere};

use crate::cpu::CpuExecutor;
use crate::cuda::{self, CudaExecutor};
use crate::module::Source;

/// `Result` with a [`DeviceError`].
pub type Result<T, E = DeviceError> = std::result::Result<T, E>;

/// What can go wrong with a device. Each message names the thing, the value and
/// the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no usable CUDA driver or GPU.
    #[error("CUDA is unavailable: {reason}; run with the device `cpu`, or mend the driver")]
    CudaUnavailable {
        /// What was missing.
        reason: String,
    },
    /// A device index that does not exist.
    #[error(
        "device {index} does not exist: this process sees {count} GPU(s); name one below {count} (CUDA_VISIBLE_DEVICES hides the others)"
    )]
    NoSuchDevice {
        /// The index that was asked for.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// A GPU that can't run the kernels.
    #[error("device {index} ({name}) cannot run the kernels: {what}; {remedy}")]
    UnfitDevice {
        /// Its index.
        index: u32,
        /// Its name.
        name: String,
        /// What it lacks.
        what: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A call of the CUDA driver failed.
    #[error("{call} failed with {name} ({code}): {text}; while {doing}{hint}")]
    Cuda {
        /// The function of the driver API.
        call: &'static str,
        /// The code's name, such as CUDA_ERROR_OUT_OF_MEMORY.
        name: String,
        /// The code.
        code: u32,
        /// The driver's sentence.
        text: String,
        /// What we were doing, with the values.
        doing: String,
        /// The remedy, or nothing; starts with "; ".
        hint: &'static str,
    },
    /// No way to compile device code for the GPU.
    #[error(
        "no compiler for the GPU: NVRTC: {nvrtc}; nvcc: {nvcc}; set PUSHGATE_NVRTC_DIR to the folder of libnvrtc.so, or PUSHGATE_NVCC to nvcc (at build time too: the project's kernels are then compiled in)"
    )]
    NoGpuCompiler {
        /// Why NVRTC can't be used.
        nvrtc: String,
        /// Why nvcc can't be used.
        nvcc: String,
    },
    /// No C++ compiler for a user's source on the CPU.
    #[error("no C++ compiler: tried {tried}; install g++ or clang++, or set CXX")]
    NoCompiler {
        /// What was tried.
        tried: String,
    },
    /// A source does not compile.
    #[error("{source_name} does not compile with {compiler}:\n{output}")]
    Compile {
        /// The source's name.
        source_name: String,
        /// The compiler.
        compiler: String,
        /// What it printed.
        output: String,
    },
    /// A compiled module does not load.
    #[error("{module} does not load: {reason}; remove it to have it compiled again")]
    Load {
        /// The module's name or path.
        module: String,
        /// Why.
        reason: String,
    },
    /// A kernel that the module does not have.
    #[error("module {module} has no kernel `{kernel}`; it has: {known}")]
    UnknownKernel {
        /// The name asked for.
        kernel: String,
        /// The module.
        module: String,
        /// The names it has.
        known: String,
    },
    /// Parameters of the wrong size.
    #[error(
        "kernel `{kernel}` takes {expected} bytes of parameters, not {given}; pass its parameter struct, #[repr(C)] and whole"
    )]
    ParamsSize {
        /// The kernel.
        kernel: String,
        /// Bytes passed.
        given: usize,
        /// Bytes it takes.
        expected: usize,
    },
    /// A launch with a value out of bounds.
    #[error("kernel `{kernel}`: {what} = {value} is out of bounds; allowed: {allowed}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// Which value.
        what: &'static str,
        /// The value.
        value: u64,
        /// What is allowed.
        allowed: String,
    },
    /// Cooperating blocks that can't all be resident: they would wait for each other for ever.
    #[error(
        "kernel `{kernel}`: {grid} cooperating blocks of {block} threads, but only {free} of the {resident} that the device holds are free ({busy} blocks of other cooperating launches run); take fewer or smaller blocks, or wait for those launches"
    )]
    NotResident {
        /// The kernel.
        kernel: String,
        /// Blocks asked for.
        grid: u32,
        /// Threads in each.
        block: u32,
        /// Blocks of this shape that the whole device holds.
        resident: u32,
        /// Blocks of this shape that still fit.
        free: u32,
        /// Blocks of other cooperating launches.
        busy: u32,
    },
    /// The OS gave too few threads.
    #[error(
        "kernel `{kernel}`: thread {started} of {wanted} did not start ({source}); take a smaller grid or raise `ulimit -u`"
    )]
    Threads {
        /// The kernel.
        kernel: String,
        /// How many it takes.
        wanted: u64,
        /// How many had started.
        started: u64,
        /// The OS's error.
        source: std::io::Error,
    },
    /// A resident kernel that has died, or can't be started.
    #[error("kernel `{kernel}` is lost: {reason}; make it anew, in another process if the context is lost")]
    Lost {
        /// The kernel.
        kernel: String,
        /// Why.
        reason: String,
    },
    /// A copy or an allocation with a range that can't be.
    #[error("{what}: {len} bytes at offset {offset} do not fit into {size}; keep to the buffer")]
    Range {
        /// What was tried.
        what: &'static str,
        /// Where it starts.
        offset: usize,
        /// How long it is.
        len: usize,
        /// What there is.
        size: usize,
    },
    /// No memory.
    #[error("no memory for {bytes} bytes on the device `cpu`; ask for less")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// Host memory that this device can't be shown read-only.
    #[error(
        "device {index} ({name}) cannot register read-only host memory (READ_ONLY_HOST_REGISTER_SUPPORTED is 0); map {len} bytes at {addr:#x} writable as well, or use another device"
    )]
    ReadOnlyUnsupported {
        /// The device.
        index: u32,
        /// Its name.
        name: String,
        /// The range's address.
        addr: usize,
        /// The range's length.
        len: usize,
    },
    /// The same range is registered otherwise already.
    #[error(
        "host memory {addr:#x}+{len} is registered as {held} and cannot be registered as {asked}; drop the other registration first"
    )]
    RegisteredOtherwise {
        /// The range's address.
        addr: usize,
        /// The range's length.
        len: usize,
        /// How it is registered.
        held: String,
        /// How it should be.
        asked: String,
    },
    /// A handle of another executor.
    #[error("a {handle} of another executor was passed to `{executor}`; use the one that made it")]
    Foreign {
        /// Which handle.
        handle: &'static str,
        /// The executor that got it.
        executor: &'static str,
    },
    /// The executor is another process's, from which this one was forked.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// A file or a process.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// The OS's error.
        source: std::io::Error,
    },
}

/// Codes of the driver behind which no call on the context succeeds any more, as cuda.h says
/// of each ("leaves the process in an inconsistent state"), or which say that there is none:
/// DEINITIALIZED, INVALID_CONTEXT, ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED,
/// INVALID_HANDLE, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED, ASSERT,
/// HARDWARE_STACK_ERROR to LAUNCH_FAILED, TENSOR_MEMORY_LEAK, MPS_CLIENT_TERMINATED, UNKNOWN.
const FINAL: [u32; 19] =
    [4, 201, 214, 220, 226, 400, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999];

impl DeviceError {
    /// Whether trying again is of no use: the context is lost, and all that ran on it.
    pub fn is_final(&self) -> bool {
        match self {
            DeviceError::Cuda { code, .. } => FINAL.contains(code),
            DeviceError::Lost { .. } => true,
            _ => false,
        }
    }
}

/// How a device may use registered host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Loads and stores.
    ReadWrite,
    /// Loads only: the mapping is PROT_READ.
    ReadOnly,
}

/// The shape of a launch. One dimension, as the kernels have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: u32,
    /// Threads of a block, 1 to 1024.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Blocks of this launch wait for each other, or for a peer's kernel that
    /// waits for them: refused unless all of them are resident at once.
    pub cooperating: bool,
}

impl Launch {
    /// `grid` blocks of `block` threads, no shared memory, not cooperating.
    pub fn new(grid: u32, block: u32) -> Self {
        Self { grid, block, shared_bytes: 0, cooperating: false }
    }

    /// With dynamic shared memory.
    pub fn shared_bytes(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }

    /// With blocks that wait for each other.
    pub fn cooperating(self) -> Self {
        Self { cooperating: true, ..self }
    }

    pub(crate) fn check(&self, kernel: &str, max_shared: u32) -> Result<()> {
        let bad = |what, value: u32, allowed: String| {
            Err(DeviceError::Launch { kernel: kernel.to_owned(), what, value: value.into(), allowed })
        };
        if self.grid == 0 || self.grid > i32::MAX as u32 {
            return bad("grid", self.grid, format!("1 to {}", i32::MAX));
        }
        if self.block == 0 || self.block > 1024 {
            return bad("block", self.block, "1 to 1024".to_owned());
        }
        if self.shared_bytes > max_shared {
            return bad("shared_bytes", self.shared_bytes, format!("0 to {max_shared}"));
        }
        Ok(())
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum WaitOutcome {
    /// The kernel has ended; what it wrote can be read.
    Done,
    /// The time was up first; the kernel still runs.
    TimedOut,
}

/// A module that an executor has loaded.
pub trait LoadedModule: Any + Send + Sync {
    /// The source's name, or "embedded".
    fn name(&self) -> &str;
    /// The kernels that are known by name.
    fn kernels(&self) -> Vec<String>;
    /// For the executor that made it.
    fn as_any(&self) -> &dyn Any;
}

impl fmt::Debug for dyn LoadedModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedModule").field("name", &self.name()).field("kernels", &self.kernels()).finish()
    }
}

/// Runs device code.
///
/// An executor and its handles work in the process that made them: in a child of `fork`
/// calls end with [`DeviceError::Forked`], and drops do nothing.
///
/// All methods may be called from any thread, and while kernels run, with one
/// exception: load modules before the first kernel starts that waits for
/// others, since loading may wait for the device to be idle.
pub trait Executor: Send + Sync {
    /// "cpu" or "cuda".
    fn name(&self) -> &'static str;
    /// The device in words.
    fn describe(&self) -> String;
    /// Which device of its kind, from 0.
    fn device_index(&self) -> u32;
    /// The GPU executor, if it is one: for what only a GPU has.
    fn as_cuda(&self) -> Option<&CudaExecutor> {
        None
    }

    /// The project's own kernels. Loaded once; later calls return the same.
    fn load_embedded(&self) -> Result<Arc<dyn LoadedModule>>;
    /// A user's own `.cu`, compiled at need and cached.
    fn load_source(&self, source: &Source) -> Result<Arc<dyn LoadedModule>>;

    /// Zeroed device memory, aligned to 256 bytes at least. Freed on drop; where
    /// kernels of this device run at that moment, after they ended.
    fn alloc(&self, bytes: usize) -> Result<DeviceBuffer>;
    /// Makes host memory visible to the device. `access` says how the memory is
    /// mapped, `io_memory` that it is a BAR. It must stay mapped until the
    /// registration is dropped; dropping may wait for running kernels. The same
    /// range may be registered again.
    fn register(&self, ptr: NonNull<u8>, len: usize, access: Access, io_memory: bool)
    -> Result<Registration>;

    /// A queue of launches: those on one stream run one after the other, those
    /// on several side by side. A GPU has about 8 independent queues
    /// (CUDA_DEVICE_MAX_CONNECTIONS, up to 32): with more streams than that, a
    /// kernel can stand behind one that waits for it.
    fn stream(&self) -> Result<Stream>;

    /// Starts a kernel and returns at once. `params` are the bytes of its
    /// parameter struct.
    ///
    /// # Safety
    /// The kernel does what its code says with the addresses in `params`: these
    /// must be valid on this device for what the kernel does with them, from now
    /// until [`Running::wait`] returns [`WaitOutcome::Done`] or the [`Running`]
    /// is dropped.
    unsafe fn launch(
        &self,
        stream: &Stream,
        module: &Arc<dyn LoadedModule>,
        kernel: &str,
        launch: Launch,
        params: &[u8],
    ) -> Result<Running>;

    /// How many blocks of this shape the idle device runs at the same time.
    fn max_resident_blocks(
        &self,
        module: &Arc<dyn LoadedModule>,
        kernel: &str,
        block: u32,
        shared_bytes: u32,
    ) -> Result<u32>;
}

pub(crate) trait BufferMemory: Send + Sync {
    /// Copies to the device. The caller has checked the range.
    fn write(&self, offset: usize, from: &[u8]) -> Result<()>;
    /// Copies from the device. The caller has checked the range.
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()>;
    /// See [`DeviceBuffer::export`].
    fn export(&self, _bytes: usize) -> Result<Option<DmaBuf>> {
        Ok(None)
    }
}

/// Device memory as other devices' drivers take it ([`DeviceBuffer::export`]).
#[derive(Debug)]
pub struct DmaBuf {
    /// The dma-buf: the pages that the buffer touches, so that more than the
    /// buffer may lie in it.
    pub fd: OwnedFd,
    /// Where the buffer begins in it.
    pub offset: u64,
}

/// Device memory; freed on drop.
pub struct DeviceBuffer {
    addr: u64,
    len: usize,
    memory: OwnedHere<Box<dyn BufferMemory>>,
}

impl DeviceBuffer {
    pub(crate) fn new(addr: u64, len: usize, memory: Box<dyn BufferMemory>) -> Self {
        DeviceBuffer { addr, len, memory: OwnedHere::new(memory) }
    }

    /// Its address on the device.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies to the buffer's start; complete on return.
    pub fn copy_from_host(&self, from: &[u8]) -> Result<()> {
        self.copy_from_host_at(0, from)
    }

    /// Copies to `offset`; complete on return.
    pub fn copy_from_host_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.check("copy to a device buffer", offset, from.len())?;
        self.memory.here()?.write(offset, from)
    }

    /// Copies from the buffer's start.
    pub fn copy_to_host(&self, to: &mut [u8]) -> Result<()> {
        self.copy_to_host_at(0, to)
    }

    /// Copies from `offset`.
    pub fn copy_to_host_at(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.check("copy from a device buffer", offset, to.len())?;
        self.memory.here()?.read(offset, to)
    }

    /// A dma-buf of the buffer, for an RDMA device that is to write there. `None`
    /// if this device gives none, or if nothing could make such writes visible to
    /// its kernels in time. Let it, and what was registered with it, go before the
    /// buffer.
    pub fn export(&self) -> Result<Option<DmaBuf>> {
        self.memory.here()?.export(self.len)
    }

    fn check(&self, what: &'static str, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(DeviceError::Range { what, offset, len, size: self.len }),
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({:#x}, {} bytes)", self.addr, self.len)
    }
}

/// Host memory that a device sees; unregistered on drop.
pub struct Registration {
    device_addr: u64,
    len: usize,
    /// Unregisters.
    _guard: OwnedHere<Box<dyn Any + Send + Sync>>,
}

impl Registration {
    pub(crate) fn new(device_addr: u64, len: usize, guard: Box<dyn Any + Send + Sync>) -> Self {
        Registration { device_addr, len, _guard: OwnedHere::new(guard) }
    }

    /// Where the device sees the memory.
    pub fn device_addr(&self) -> u64 {
        self.device_addr
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({:#x}, {} bytes)", self.device_addr, self.len)
    }
}

/// A queue of launches ([`Executor::stream`]). Clones are the same queue.
#[derive(Clone)]
pub struct Stream(pub(crate) Arc<dyn Any + Send + Sync>);

impl Stream {
    /// Its `CUstream`, for libraries that take one; none on the CPU. It is the
    /// stream's for as long as a clone lives.
    pub fn raw(&self) -> Option<u64> {
        cuda::raw_stream(self)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

pub(crate) trait RunningKernel: Send + Sync {
    fn wait(&self, timeout: Option<Duration>) -> Result<WaitOutcome>;
    fn is_done(&self) -> Result<bool>;
    fn elapsed(&self) -> Result<Option<Duration>>;
}

/// A kernel that was started. Dropping it waits for the kernel's end, so that
/// what it uses can be freed: kernels end by themselves (every wait of the
/// device API has an end).
#[must_use = "dropping it waits for the kernel"]
pub struct Running(pub(crate) OwnedHere<Box<dyn RunningKernel>>);

impl Running {
    /// Waits for the kernel's end, for `timeout` at most. An error is the
    /// kernel's own (an illegal address, say) and ends it too.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<WaitOutcome> {
        self.0.here()?.wait(timeout)
    }

    /// Whether it has ended.
    pub fn is_done(&self) -> Result<bool> {
        self.0.here()?.is_done()
    }

    /// How long it ran by the device's clock; none before its end.
    pub fn elapsed(&self) -> Result<Option<Duration>> {
        self.0.here()?.elapsed()
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running(done: {:?})", self.is_done())
    }
}

/// Which kind of device to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU where one is usable, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU, or an error.
    Cuda,
}

/// A kind of executor and whether it can be had here.
#[derive(Clone, Debug)]
pub struct Available {
    /// "cpu" or "cuda".
    pub name: &'static str,
    /// What it would run on, or why it can't.
    pub state: std::result::Result<String, String>,
}

/// Every kind of executor, with the reason where it can't be had. Makes no
/// CUDA context.
pub fn available_executors() -> Vec<Available> {
    let cuda = cuda::probe().map(|info| info.to_string());
    vec![
        Available { name: "cuda", state: cuda },
        Available { name: "cpu", state: Ok(CpuExecutor::new().describe()) },
    ]
}

/// Takes an executor on device 0, and says in a sentence which and why.
pub fn choose(device: DeviceChoice) -> Result<(Arc<dyn Executor>, String)> {
    choose_at(device, 0)
}

/// Takes an executor, on GPU `index` where it is a GPU.
pub fn choose_at(device: DeviceChoice, index: u32) -> Result<(Arc<dyn Executor>, String)> {
    let cpu = |why: String| -> (Arc<dyn Executor>, String) {
        let executor = CpuExecutor::new();
        let sentence = format!("cpu: {}, {why}", executor.describe());
        (Arc::new(executor), sentence)
    };
    match device {
        DeviceChoice::Cpu => Ok(cpu("as asked for".to_owned())),
        DeviceChoice::Cuda => {
            let executor = CudaExecutor::new(index)?;
            let sentence = format!("cuda: {}, as asked for", executor.describe());
            Ok((Arc::new(executor), sentence))
        }
        DeviceChoice::Auto => match CudaExecutor::new(index) {
            Ok(executor) => {
                let sentence = format!("cuda: {}, because a usable GPU was found", executor.describe());
                Ok((Arc::new(executor), sentence))
            }
            Err(DeviceError::CudaUnavailable { reason }) => {
                Ok(cpu(format!("because CUDA is unavailable: {reason}")))
            }
            Err(error @ DeviceError::UnfitDevice { .. }) => Ok(cpu(format!("because {error}"))),
            // A GPU that is there and fails is not hidden behind a slow CPU.
            Err(error) => Err(error),
        },
    }
}
