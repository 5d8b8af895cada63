//! The trait [`Executor`], which runs device code, with its handles, its errors and the choice of
//! one.
//!
//! An [`Executor`] is a GPU ([`crate::CudaExecutor`]) or this CPU ([`crate::CpuExecutor`]). Both
//! run the same kernels over the same memory.

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

/// What can go wrong with a device. Each message names the thing, the value and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no usable CUDA driver or GPU.
    #[error(
        "CUDA is unavailable: {reason}; run with the device `cpu`, or install or repair the NVIDIA driver"
    )]
    CudaUnavailable {
        /// What is missing.
        reason: String,
    },
    /// The device index does not exist.
    #[error(
        "device {index} does not exist: this process sees {count} GPU(s); name one below {count} (CUDA_VISIBLE_DEVICES hides the others)"
    )]
    NoSuchDevice {
        /// The index that was asked for.
        index: u32,
        /// How many devices there are.
        count: u32,
    },
    /// The GPU can't run the kernels.
    #[error("device {index} ({name}) cannot run the kernels: {what}; {remedy}")]
    UnfitDevice {
        /// The GPU's index.
        index: u32,
        /// The GPU's name.
        name: String,
        /// What the GPU lacks.
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
        /// The driver's result code.
        code: u32,
        /// The driver's sentence for the code.
        text: String,
        /// What the library was doing, with the values.
        doing: String,
        /// The remedy, starting with "; ", or empty.
        hint: &'static str,
    },
    /// Neither NVRTC nor nvcc can compile device code for the GPU.
    #[error(
        "no compiler for the GPU: NVRTC: {nvrtc}; nvcc: {nvcc}; set PUSHGATE_NVRTC_DIR to the folder of libnvrtc.so, or PUSHGATE_NVCC to nvcc (at build time too: the project's kernels are then compiled in)"
    )]
    NoGpuCompiler {
        /// Why NVRTC can't be used.
        nvrtc: String,
        /// Why nvcc can't be used.
        nvcc: String,
    },
    /// There is no C++ compiler for a user's source on the CPU.
    #[error("no C++ compiler: tried {tried}; install g++ or clang++, or set CXX")]
    NoCompiler {
        /// The compilers that were tried.
        tried: String,
    },
    /// A source does not compile.
    #[error("{source_name} does not compile with {compiler}:\n{output}")]
    Compile {
        /// The source's name.
        source_name: String,
        /// The compiler.
        compiler: String,
        /// What the compiler printed.
        output: String,
    },
    /// A compiled module does not load.
    #[error("{module} does not load: {reason}; remove it to have it compiled again")]
    Load {
        /// The module's name or path.
        module: String,
        /// Why it does not load.
        reason: String,
    },
    /// The module has no kernel of this name.
    #[error("module {module} has no kernel `{kernel}`; it has: {known}")]
    UnknownKernel {
        /// The name that was asked for.
        kernel: String,
        /// The module's name.
        module: String,
        /// The kernels that the module has.
        known: String,
    },
    /// A kernel was passed parameters of the wrong size.
    #[error(
        "kernel `{kernel}` takes {expected} bytes of parameters, not {given}; pass its parameter struct, #[repr(C)] and whole"
    )]
    ParamsSize {
        /// The kernel's name.
        kernel: String,
        /// How many bytes were passed.
        given: usize,
        /// How many bytes the kernel takes.
        expected: usize,
    },
    /// A value of a launch is out of bounds.
    #[error("kernel `{kernel}`: {what} = {value} is out of bounds; allowed: {allowed}")]
    Launch {
        /// The kernel's name.
        kernel: String,
        /// Which value.
        what: &'static str,
        /// The value that was given.
        value: u64,
        /// What is allowed.
        allowed: String,
    },
    /// Not all cooperating blocks can be resident at once, so they would wait for each other for
    /// ever.
    #[error(
        "kernel `{kernel}`: {grid} cooperating blocks of {block} threads, but only {free} of the {resident} that the device holds are free ({busy} blocks of other cooperating launches run); take fewer or smaller blocks, or wait for those launches"
    )]
    NotResident {
        /// The kernel's name.
        kernel: String,
        /// How many blocks were asked for.
        grid: u32,
        /// Threads in each block.
        block: u32,
        /// How many blocks of this shape the whole device holds.
        resident: u32,
        /// How many blocks of this shape still fit.
        free: u32,
        /// How many blocks of other cooperating launches are resident.
        busy: u32,
    },
    /// The OS started too few threads for the launch.
    #[error(
        "kernel `{kernel}`: thread {started} of {wanted} did not start ({source}); take a smaller grid or raise `ulimit -u`"
    )]
    Threads {
        /// The kernel's name.
        kernel: String,
        /// How many threads the launch needs.
        wanted: u64,
        /// How many threads had started.
        started: u64,
        /// The OS's error.
        source: std::io::Error,
    },
    /// A resident kernel has died or can't be started.
    #[error("kernel `{kernel}` is lost: {reason}; make a new one, in another process if the context is lost")]
    Lost {
        /// The kernel's name.
        kernel: String,
        /// Why it is lost.
        reason: String,
    },
    /// A copy reaches outside of its buffer.
    #[error("{what}: {len} bytes at offset {offset} do not fit into {size}; keep to the buffer")]
    Range {
        /// What was tried.
        what: &'static str,
        /// Where the range starts.
        offset: usize,
        /// How long the range is.
        len: usize,
        /// How long the buffer is.
        size: usize,
    },
    /// The device has too little memory left.
    #[error("no memory for {bytes} bytes on the device `cpu`; ask for less")]
    OutOfMemory {
        /// How many bytes were asked for.
        bytes: usize,
    },
    /// This device can't register host memory that is mapped read-only.
    #[error(
        "device {index} ({name}) cannot register read-only host memory (READ_ONLY_HOST_REGISTER_SUPPORTED is 0); map {len} bytes at {addr:#x} writable as well, or use another device"
    )]
    ReadOnlyUnsupported {
        /// The device's index.
        index: u32,
        /// The device's name.
        name: String,
        /// The range's address.
        addr: usize,
        /// The range's length.
        len: usize,
    },
    /// The range is already registered with other access.
    #[error(
        "host memory {addr:#x}+{len} is registered as {held} and cannot be registered as {asked}; drop the other registration first"
    )]
    RegisteredOtherwise {
        /// The range's address.
        addr: usize,
        /// The range's length.
        len: usize,
        /// How the range is registered.
        held: String,
        /// How the range should be registered.
        asked: String,
    },
    /// A handle was passed to an executor that did not make it.
    #[error("a {handle} of another executor was passed to `{executor}`; use the one that made it")]
    Foreign {
        /// Which handle.
        handle: &'static str,
        /// The executor that was given the handle.
        executor: &'static str,
    },
    /// The executor belongs to another process, from which this one was forked.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// An operation on a file or a process failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The OS's error.
        source: std::io::Error,
    },
}

/// Codes of the driver after which no call on the context succeeds any more: cuda.h says of each
/// that it "leaves the process in an inconsistent state", or that there is no context:
/// DEINITIALIZED, INVALID_CONTEXT, ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED,
/// INVALID_HANDLE, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED, ASSERT,
/// HARDWARE_STACK_ERROR to LAUNCH_FAILED, TENSOR_MEMORY_LEAK, MPS_CLIENT_TERMINATED, UNKNOWN.
const FINAL: [u32; 19] =
    [4, 201, 214, 220, 226, 400, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999];

impl DeviceError {
    /// Whether trying again is useless because the context is lost, with everything that ran on it.
    pub fn is_final(&self) -> bool {
        match self {
            DeviceError::Cuda { code, .. } => FINAL.contains(code),
            DeviceError::Lost { .. } => true,
            _ => false,
        }
    }
}

/// How a device may access registered host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Loads and stores.
    ReadWrite,
    /// Loads only: the memory is mapped PROT_READ.
    ReadOnly,
}

/// The shape of a launch, in one dimension as all kernels here have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Number of blocks.
    pub grid: u32,
    /// Threads in each block, 1 to 1024.
    pub block: u32,
    /// Dynamic shared memory of each block in bytes.
    pub shared_bytes: u32,
    /// Whether blocks of this launch wait for each other, or for a peer's kernel that waits for
    /// them. Such a launch is refused unless all its blocks can be resident at once.
    pub cooperating: bool,
}

impl Launch {
    /// Makes a launch of `grid` blocks of `block` threads, without shared memory, not cooperating.
    pub fn new(grid: u32, block: u32) -> Self {
        Self { grid, block, shared_bytes: 0, cooperating: false }
    }

    /// Gives each block `shared_bytes` of dynamic shared memory.
    pub fn shared_bytes(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }

    /// Says that the blocks wait for each other ([`Launch::cooperating`]).
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

/// How a wait for a kernel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum WaitOutcome {
    /// The kernel has ended; what it wrote can be read.
    Done,
    /// The timeout passed first; the kernel still runs.
    TimedOut,
}

/// A module that an executor has loaded.
pub trait LoadedModule: Any + Send + Sync {
    /// The source's name, or "embedded".
    fn name(&self) -> &str;
    /// The kernels of the module that are known by name.
    fn kernels(&self) -> Vec<String>;
    /// The concrete type, for the executor that made the module.
    fn as_any(&self) -> &dyn Any;
}

impl fmt::Debug for dyn LoadedModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedModule").field("name", &self.name()).field("kernels", &self.kernels()).finish()
    }
}

/// An executor: runs device code on a GPU or on this CPU.
///
/// An executor and its handles work in the process that made them. In a child of `fork` calls fail
/// with [`DeviceError::Forked`], and drops do nothing.
///
/// All methods may be called from any thread, also while kernels run, with one exception: load
/// modules before starting the first kernel that waits for other kernels, because loading may wait
/// until the device is idle.
pub trait Executor: Send + Sync {
    /// The executor's kind: "cpu" or "cuda".
    fn name(&self) -> &'static str;
    /// A description of the device for people.
    fn describe(&self) -> String;
    /// The device's index among those of its kind, from 0.
    fn device_index(&self) -> u32;
    /// The CUDA executor if this is one, for calls that only a GPU has.
    fn as_cuda(&self) -> Option<&CudaExecutor> {
        None
    }

    /// Loads the project's own kernels. They are loaded once; later calls return the same module.
    fn load_embedded(&self) -> Result<Arc<dyn LoadedModule>>;
    /// Loads a user's own `.cu`, which is compiled if needed and cached.
    fn load_source(&self, source: &Source) -> Result<Arc<dyn LoadedModule>>;

    /// Allocates zeroed device memory, aligned to at least 256 bytes. It is freed on drop; if
    /// kernels of this device run at that moment, it is freed after they have ended.
    fn alloc(&self, bytes: usize) -> Result<DeviceBuffer>;
    /// Makes host memory accessible to the device.
    ///
    /// `access` says how the memory is mapped, `io_memory` whether it is a BAR. The memory must
    /// stay mapped until the registration is dropped; dropping may wait for running kernels. The
    /// same range may be registered several times.
    fn register(&self, ptr: NonNull<u8>, len: usize, access: Access, io_memory: bool)
    -> Result<Registration>;

    /// Makes a queue of launches.
    ///
    /// Launches on one stream run one after the other; launches on different streams run side by
    /// side. A GPU has about 8 independent hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, up to 32):
    /// with more streams than that, a kernel can be queued behind a kernel that waits for it.
    fn stream(&self) -> Result<Stream>;

    /// Starts a kernel and returns at once. `params` are the bytes of the kernel's parameter
    /// struct.
    ///
    /// # Safety
    /// The kernel does what its code says with the addresses in `params`. They must be valid on
    /// this device for those accesses from now until [`Running::wait`] returns
    /// [`WaitOutcome::Done`] or the [`Running`] is dropped.
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
    /// Exports the buffer ([`DeviceBuffer::export`]).
    fn export(&self, _bytes: usize) -> Result<Option<DmaBuf>> {
        Ok(None)
    }
}

/// Device memory in the form that other devices' drivers take ([`DeviceBuffer::export`]).
#[derive(Debug)]
pub struct DmaBuf {
    /// The dma-buf. It covers whole pages, so it may contain more than the buffer.
    pub fd: OwnedFd,
    /// Where in the dma-buf the buffer begins, in bytes.
    pub offset: u64,
}

/// A range of device memory, freed on drop.
pub struct DeviceBuffer {
    addr: u64,
    len: usize,
    memory: OwnedHere<Box<dyn BufferMemory>>,
}

impl DeviceBuffer {
    pub(crate) fn new(addr: u64, len: usize, memory: Box<dyn BufferMemory>) -> Self {
        DeviceBuffer { addr, len, memory: OwnedHere::new(memory) }
    }

    /// The buffer's address on the device.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The buffer's length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `from` to the buffer's start; complete on return.
    pub fn copy_from_host(&self, from: &[u8]) -> Result<()> {
        self.copy_from_host_at(0, from)
    }

    /// Copies `from` to byte `offset` of the buffer; complete on return.
    pub fn copy_from_host_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.check("copy to a device buffer", offset, from.len())?;
        self.memory.here()?.write(offset, from)
    }

    /// Copies from the buffer's start into `to`; complete on return.
    pub fn copy_to_host(&self, to: &mut [u8]) -> Result<()> {
        self.copy_to_host_at(0, to)
    }

    /// Copies from byte `offset` of the buffer into `to`; complete on return.
    pub fn copy_to_host_at(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.check("copy from a device buffer", offset, to.len())?;
        self.memory.here()?.read(offset, to)
    }

    /// Exports the buffer as a dma-buf, for an RDMA device that is to write into it.
    ///
    /// `None` if this device can't export memory, or if nothing could make an RDMA device's writes
    /// visible to its kernels in time. Drop the dma-buf, and everything registered with it, before
    /// the buffer.
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

/// Host memory that a device can access; unregistered on drop.
pub struct Registration {
    device_addr: u64,
    len: usize,
    /// Unregisters the memory when it is dropped.
    _guard: OwnedHere<Box<dyn Any + Send + Sync>>,
}

impl Registration {
    pub(crate) fn new(device_addr: u64, len: usize, guard: Box<dyn Any + Send + Sync>) -> Self {
        Registration { device_addr, len, _guard: OwnedHere::new(guard) }
    }

    /// The address at which the device sees the memory.
    pub fn device_addr(&self) -> u64 {
        self.device_addr
    }

    /// The memory's length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the memory has no bytes.
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
    /// The stream's `CUstream`, for libraries that take one; `None` on the CPU. The handle is valid
    /// as long as a clone of this stream lives.
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

/// A kernel that was started.
///
/// Dropping it waits for the kernel's end, so that what the kernel uses can be freed afterwards.
/// Kernels end by themselves, because every wait of the device API is bounded.
#[must_use = "dropping it waits for the kernel"]
pub struct Running(pub(crate) OwnedHere<Box<dyn RunningKernel>>);

impl Running {
    /// Waits for the kernel's end, for at most `timeout`. An error is one of the kernel itself (an
    /// illegal address, say), which has ended then.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<WaitOutcome> {
        self.0.here()?.wait(timeout)
    }

    /// Whether the kernel has ended.
    pub fn is_done(&self) -> Result<bool> {
        self.0.here()?.is_done()
    }

    /// How long the kernel ran by the device's clock; `None` before its end.
    pub fn elapsed(&self) -> Result<Option<Duration>> {
        self.0.here()?.elapsed()
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running(done: {:?})", self.is_done())
    }
}

/// Which kind of device to choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if one is usable, otherwise the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU; fails if none is usable.
    Cuda,
}

/// A kind of executor, and whether this host has it.
#[derive(Clone, Debug)]
pub struct Available {
    /// The executor's kind: "cpu" or "cuda".
    pub name: &'static str,
    /// The device that it would run on, or why there is none.
    pub state: std::result::Result<String, String>,
}

/// Lists every kind of executor, with the reason for each that this host lacks. Makes no CUDA
/// context.
pub fn available_executors() -> Vec<Available> {
    let cuda = cuda::probe().map(|info| info.to_string());
    vec![
        Available { name: "cuda", state: cuda },
        Available { name: "cpu", state: Ok(CpuExecutor::new().describe()) },
    ]
}

/// Opens an executor on device 0; also returns a sentence that says which one and why.
pub fn choose(device: DeviceChoice) -> Result<(Arc<dyn Executor>, String)> {
    choose_at(device, 0)
}

/// Opens an executor, on GPU `index` if it is a GPU.
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
            // A GPU that is present and fails is an error; the slow CPU does not silently replace
            // it.
            Err(error) => Err(error),
        },
    }
}
