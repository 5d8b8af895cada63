//! The trait [`Executor`], which runs device code, and the handles that it gives out.
//!
//! An [`Executor`] is a GPU ([`crate::CudaExecutor`]) or this CPU ([`crate::CpuExecutor`]). Both
//! run the same kernels over the same memory. This file knows neither of the two: they implement
//! the traits that stand here.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use pushgate_driver_shim::fork::OwnedHere;

use crate::error::{DeviceError, Result};
use crate::image::Image;
use crate::source::Source;

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
    /// The concrete type. `as_cuda` uses it to find a [`crate::CudaExecutor`].
    fn as_any(&self) -> &dyn Any;

    /// Loads the project's own kernels. They are loaded once; later calls return the same module.
    fn load_embedded(&self) -> Result<Arc<dyn LoadedModule>>;
    /// Loads a user's own `.cu`, which is compiled if needed and cached.
    fn load_source(&self, source: &Source) -> Result<Arc<dyn LoadedModule>>;
    /// Loads kernels that were compiled before. An image for other devices is refused.
    fn load_image(&self, image: &Image) -> Result<Arc<dyn LoadedModule>>;

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
    /// with more streams than that, a kernel can be queued after a kernel that waits for it.
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

/// The memory of a [`DeviceBuffer`].
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

/// What an executor's own queue of launches can do for a [`Stream`].
pub(crate) trait LaunchQueue: Any + Send + Sync {
    /// The queue's `CUstream`, if it is one.
    fn raw(&self) -> Option<u64>;
}

/// A queue of launches ([`Executor::stream`]). Clones are the same queue.
#[derive(Clone)]
pub struct Stream(Arc<dyn LaunchQueue>);

impl Stream {
    pub(crate) fn new(queue: impl LaunchQueue) -> Self {
        Self(Arc::new(queue))
    }

    /// The queue, if it has the type `T`.
    pub(crate) fn queue<T: LaunchQueue>(&self) -> Option<&T> {
        let queue: &dyn Any = &*self.0;
        queue.downcast_ref()
    }

    /// The stream's `CUstream`, for libraries that take one; `None` on the CPU. The handle is valid
    /// as long as a clone of this stream lives.
    pub fn raw(&self) -> Option<u64> {
        self.0.raw()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

/// The launch of a [`Running`]; its methods are those of [`Running`].
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
