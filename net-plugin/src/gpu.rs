//! A GPU whose memory NCCL hands over: the worker that pushes it into windows and pulls
//! it out of them (docs/worker.md), without a call of CUDA's once it runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};

use pushgate::settings::DeviceChoice;
use pushgate::worker::{Lease, Lost, OneWay, PostError, Ticket, Worker, WorkerMover, WorkerOptions};
use pushgate_driver_shim::memory::ReadOnlyMemory;
use pushgate_driver_shim::window::Window;
use pushgate_gpu_kernels::{Access, DeviceBuffer, Executor, Registration, choose_at, current_device};
use pushgate_proxy::mover::Mover;

use crate::error::{Code, Failure, Result};
use crate::log;

/// See the module's text.
pub struct Gpu {
    executor: Arc<dyn Executor>,
    worker: Worker,
    // A lock that is held for a few stores: connections of one GPU are driven by a thread
    // or two.
    pushes: Mutex<OneWay>,
    /// Connections have something for it to copy.
    copies: AtomicBool,
}

/// Stands for the CPU executor in place of a GPU.
const CPU: u32 = u32::MAX;

/// The GPU that is current on this thread, by its index.
///
/// With `_PUSHGATE_NET_GPU=cpu` in the environment the CPU executor plays one, to which all
/// memory of the process is its own: so this path runs, and is tested, where there is no GPU.
pub fn current() -> Option<u32> {
    match std::env::var_os("_PUSHGATE_NET_GPU") {
        Some(which) if which == "cpu" => Some(CPU),
        _ => current_device(),
    }
}

/// NCCL tells when it launches kernels.
static HOOKED: AtomicBool = AtomicBool::new(false);

/// NCCL has taken our profiler, which it does before it makes connections.
pub fn hooked() {
    HOOKED.store(true, Ordering::Release);
}

/// For a connection of a GPU that copies: says, once, if copies may wait for ever for the kernel that makes
/// them, which stands behind the one that waits for it (docs/worker.md, "On demand").
pub fn warn_of_one_queue() {
    const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    static ONCE: Once = Once::new();
    let one = std::env::var_os(VARIABLE).is_some_and(|n| n == "1");
    if one && !HOOKED.load(Ordering::Acquire) {
        ONCE.call_once(|| {
            log::warn(&format!(
                "{VARIABLE}=1, and NCCL does not tell when it launches kernels (one before 2.28, or \
                 NCCL_PROFILER_PLUGIN names another profiler): the kernel that copies may wait for ever behind one \
                 that waits for it; unset {VARIABLE}, or set PUSHGATE_PATH=bounce on all ranks"
            ));
        });
    }
}

/// A command that was not taken.
pub fn failed(e: PostError) -> Failure {
    let code = if matches!(e, PostError::Lost { .. }) { Code::System } else { Code::Internal };
    Failure::new(code, format!("the GPU: {e}"))
}

impl Gpu {
    /// Opens it, and what copies into its memory for an engine. Its device should be idle.
    pub fn open(index: u32) -> Result<(Gpu, Box<dyn Mover>)> {
        let device = if index == CPU { DeviceChoice::Cpu } else { DeviceChoice::Cuda };
        let (executor, _) = choose_at(device, index).map_err(Failure::system("the GPU"))?;
        let (worker, queue) = Worker::new(&executor, WorkerOptions::of(&*executor))
            .map_err(Failure::system("the GPU's copying kernel"))?;
        let [pushes, pulls] = queue.split();
        // SAFETY: what the engine copies from besides small payloads are windows of peers and
        // landing rings, which `join` registers before the queue pair is the engine's, and
        // the connection keeps until it is not.
        let mover = unsafe { WorkerMover::new(&executor, pulls)? };
        let copies = AtomicBool::new(false);
        Ok((Gpu { executor, worker, pushes: Mutex::new(pushes), copies }, Box::new(mover)))
    }

    /// The GPU in words.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// Memory of its own.
    pub fn memory(&self, bytes: usize) -> Result<DeviceBuffer> {
        self.executor.alloc(bytes).map_err(Failure::system("memory of the GPU"))
    }

    /// Its place on PCIe, if it is a GPU.
    pub fn pci(&self) -> Option<&str> {
        self.executor.as_cuda().map(|cuda| cuda.pci_bus_id())
    }

    /// From now on connections push or pull by its worker. An error where that can't be.
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

    /// They do: without, its worker need not stand beside NCCL's kernels.
    pub fn copies(&self) -> bool {
        self.copies.load(Ordering::Relaxed)
    }

    /// The commands to push. Held for a few stores alone.
    pub fn pushes(&self) -> MutexGuard<'_, OneWay> {
        self.pushes.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Lets the worker store into memory of ours.
    pub fn register(&self, memory: &dyn Window) -> Result<Registration> {
        self.executor
            .register(memory.as_ptr(), memory.len(), Access::ReadWrite, memory.io_memory())
            .map_err(Failure::system("registering a window with the GPU"))
    }

    /// Lets the worker read a peer's memory.
    pub fn register_read_only(&self, memory: &ReadOnlyMemory) -> Result<Registration> {
        self.executor
            .register(memory.as_ptr(), memory.len(), Access::ReadOnly, false)
            .map_err(Failure::system("registering the peer's window with the GPU"))
    }

    /// True once it is complete.
    pub fn pushed(&self, ticket: Ticket) -> bool {
        self.pushes().done(ticket)
    }

    /// Why it copies no more, if so: no request that waits for it ends well. Asks no driver.
    #[inline]
    pub fn lost(&self) -> Option<&Lost> {
        self.worker.lost()
    }

    /// Before NCCL launches a kernel on `stream` that will wait for copies.
    pub fn lease(&self, stream: u64) -> Result<Lease> {
        self.worker.lease(stream).map_err(Failure::system("the GPU's copying kernel"))
    }

    /// Behind that launch.
    pub fn lease_done(&self, lease: Lease, stream: u64) -> Result<()> {
        self.worker.lease_done(lease, stream).map_err(Failure::system("the GPU's copying kernel"))
    }
}
