//! A GPU whose memory NCCL hands over, with the worker that pushes the memory into windows and
//! pulls it out of them (docs/worker.md), and queues of copies for the RMA table. Once the worker runs, only those queues call CUDA.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pushgate::settings::DeviceChoice;
use pushgate::worker::{
    Lease, Lost, OneWay, PostError, SharedMover, Ticket, Worker, WorkerMover, WorkerOptions,
};
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::window::Window;
use pushgate_gpu_kernels::{
    Access, DeviceBuffer, Executor, OrderedCopies, Registration, choose_at, current_device,
};
use pushgate_proxy::mover::Mover;

use crate::error::{Code, Failure, Result};

/// A GPU with its worker.
pub struct Gpu {
    /// Copies into the GPU's memory, for all engines of the GPU.
    mover: SharedMover,
    executor: Arc<dyn Executor>,
    worker: Worker,
    // The lock is held only for a few stores: one or two threads drive the connections of a GPU.
    pushes: Mutex<OneWay>,
    /// Some connection has copies for the worker to do.
    copies: AtomicBool,
}

/// The index that stands for the CPU executor in place of a GPU.
const CPU: u32 = u32::MAX;

/// The index of the GPU that is current on this thread.
///
/// With `_PUSHGATE_NET_GPU=cpu` in the environment the CPU executor plays a GPU that owns all
/// memory of the process, so that this path runs and is tested where there is no GPU.
pub fn current() -> Option<u32> {
    match std::env::var_os("_PUSHGATE_NET_GPU") {
        Some(which) if which == "cpu" => Some(CPU),
        _ => current_device(),
    }
}

/// The failure of a command that could not be posted.
pub fn failed(e: PostError) -> Failure {
    let code = if matches!(e, PostError::Lost { .. }) { Code::System } else { Code::Internal };
    Failure::new(code, format!("the GPU: {e}"))
}

impl Gpu {
    /// Opens a GPU. The device should be idle.
    pub fn open(index: u32) -> Result<Gpu> {
        let device = if index == CPU { DeviceChoice::Cpu } else { DeviceChoice::Cuda };
        let (executor, _) = choose_at(device, index).map_err(Failure::system("the GPU"))?;
        let (worker, queue) = Worker::new(&executor, WorkerOptions::of(&*executor))
            .map_err(Failure::system("the GPU's copying kernel"))?;
        let [pushes, pulls] = queue.split();
        // SAFETY: besides small payloads the engine copies from peers' windows and landing rings.
        // `join` registers these before the queue pair is the engine's, and the connection keeps
        // them registered until the engine has let go of the queue pair.
        let mover = unsafe { WorkerMover::new(&executor, pulls)? }.into();
        let copies = AtomicBool::new(false);
        Ok(Gpu { mover, executor, worker, pushes: Mutex::new(pushes), copies })
    }

    /// Copies into the GPU's memory, for one of its engines.
    pub fn mover(&self) -> Box<dyn Mover> {
        Box::new(self.mover.clone())
    }

    /// A description of the GPU for people.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// Allocates memory on the GPU.
    pub fn memory(&self, bytes: usize) -> Result<DeviceBuffer> {
        self.executor.alloc(bytes).map_err(Failure::system("memory of the GPU"))
    }

    /// A queue of copies by the copy engines, with its words in `memory`.
    pub fn ordered_copies(&self, memory: SharedMemory) -> Result<OrderedCopies> {
        OrderedCopies::new(&self.executor, memory).map_err(Failure::system("a queue of copies of the GPU"))
    }

    /// The GPU's PCI address, if it is a GPU.
    pub fn pci(&self) -> Option<&str> {
        self.executor.as_cuda().map(|cuda| cuda.pci_bus_id())
    }

    /// Called before connections push or pull by the GPU's worker. Fails where that is impossible.
    pub fn will_copy(&self) -> Result<()> {
        const VARIABLE: &str = "CUDA_LAUNCH_BLOCKING";
        let value = std::env::var_os(VARIABLE).unwrap_or_default();
        if !value.is_empty() && value != "0" {
            let text = format!(
                "{VARIABLE}={}: no launch returns before its kernel has ended then, so NCCL's would wait for ever for the \
                 kernel that copies for it; unset it",
                value.display()
            );
            return Err(Failure::new(Code::Usage, text));
        }
        self.copies.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether connections push or pull by the worker. If not, the worker need not run beside
    /// NCCL's kernels.
    pub fn copies(&self) -> bool {
        self.copies.load(Ordering::Relaxed)
    }

    /// The queue of pushes, locked. Hold it only for a few stores.
    pub fn pushes(&self) -> MutexGuard<'_, OneWay> {
        self.pushes.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Registers our memory, so that the worker can store to it.
    pub fn register(&self, memory: &dyn Window) -> Result<Registration> {
        self.executor
            .register(memory.as_ptr(), memory.len(), Access::ReadWrite, memory.io_memory())
            .map_err(Failure::system("registering a window with the GPU"))
    }

    /// Registers host memory at `ptr` for queues of copies ([`Gpu::ordered_copies`]). A kernel that waits for those copies does not
    /// hold up the call.
    pub fn register_for_copies(&self, ptr: NonNull<u8>, len: usize, access: Access) -> Result<Registration> {
        OrderedCopies::register(&self.executor, ptr, len, access)
            .map_err(Failure::system("registering a window with the GPU"))
    }

    /// Registers a peer's memory, so that the worker can read it.
    pub fn register_read_only(&self, memory: &ReadOnlyMemory) -> Result<Registration> {
        self.executor
            .register(memory.as_ptr(), memory.len(), Access::ReadOnly, false)
            .map_err(Failure::system("registering the peer's window with the GPU"))
    }

    /// Whether a push is complete.
    pub fn pushed(&self, ticket: Ticket) -> bool {
        self.pushes().done(ticket)
    }

    /// Why the GPU copies no more, if that is so: then no request that waits for a copy succeeds.
    /// Does not call the driver.
    #[inline]
    pub fn lost(&self) -> Option<&Lost> {
        self.worker.lost()
    }

    /// Called before NCCL launches a kernel on `stream` that will wait for copies.
    pub fn lease(&self, stream: u64) -> Result<Lease> {
        self.worker.lease(stream).map_err(Failure::system("the GPU's copying kernel"))
    }

    /// Called after that launch.
    pub fn lease_done(&self, lease: Lease, stream: u64) -> Result<()> {
        self.worker.lease_done(lease, stream).map_err(Failure::system("the GPU's copying kernel"))
    }
}
