//! Errors of the executors: one enum, whose messages name the thing, the value and the remedy.

use std::path::PathBuf;

use pushgate_driver_shim::fork::Forked;
use pushgate_driver_shim::interrupt::Interrupted;

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
    /// Bytes that are no image of kernels, or a damaged one.
    #[error("image {image} is not loaded: {why}")]
    Image {
        /// The image's name.
        image: String,
        /// What is wrong with it, with the remedy.
        why: String,
    },
    /// An image for other devices.
    #[error("image {image} is for {is_for}, and {device}; {remedy}")]
    ImageTarget {
        /// The image's name.
        image: String,
        /// What it is for.
        is_for: String,
        /// What the device is.
        device: String,
        /// What to do.
        remedy: String,
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
        /// The value's name.
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
        /// The handle's name.
        handle: &'static str,
        /// The executor that was given the handle.
        executor: &'static str,
    },
    /// Memory that a device needs could not be made.
    #[error(transparent)]
    Memory(#[from] pushgate_driver_shim::ShimError),
    /// The executor belongs to another process, from which this one was forked.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The program has ended the call while a compiler ran.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
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

/// Joins names for a message as "a, b, c"; "(none)" if there are none.
pub(crate) fn list(names: &[String]) -> String {
    if names.is_empty() { "(none)".to_owned() } else { names.join(", ") }
}
