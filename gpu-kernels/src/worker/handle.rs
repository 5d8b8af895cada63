//! The handle of a worker: making one, and its end.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::window::Window;

use super::KERNEL;
use super::control::{Control, LEASES, Layout};
use super::fault::Fault;
use super::flags::Flags;
use super::keeper::keep;
use super::lost::Lost;
use super::options::WorkerOptions;
use super::policy::{Phase, Retries};
use super::queue::{Ring, WorkerQueue};
use super::shared::{Launcher, LeaseSlot, Shared};
use crate::cuda::Resident;
use crate::error::{DeviceError, Result};
use crate::executor::{Access, Executor};

/// The kernel that runs after a graph's operation and counts the operation as ended.
pub(super) const MARK: &str = "copy_worker_mark";
/// How long a drop waits for the worker's end.
pub(super) const END_LIMIT: Duration = Duration::from_secs(10);

/// A resident worker on one device. May be shared by threads; its [`WorkerQueue`] belongs to one
/// thread.
///
/// Dropping it tells the kernel to leave and waits until the kernel has left.
pub struct Worker {
    pub(super) shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

impl Worker {
    /// Makes the worker and runs its kernel once, so that the cost of a first start is paid before
    /// other kernels run. Call it while the device is idle.
    pub fn new(executor: &Arc<dyn Executor>, options: WorkerOptions) -> Result<(Worker, WorkerQueue)> {
        Self::with_fault(executor, options, Fault::from_environment())
    }

    /// Makes a worker with a fault.
    pub(super) fn with_fault(
        executor: &Arc<dyn Executor>,
        options: WorkerOptions,
        fault: Option<Fault>,
    ) -> Result<(Worker, WorkerQueue)> {
        options.check(executor.as_cuda().is_some())?;
        let module = executor.load_embedded()?;
        let layout = Layout {
            slots: options.slots as usize,
            pushers: options.pushers as usize,
            pullers: options.pullers as usize,
        };
        let memory = SharedMemory::builder("worker", layout.bytes()).create().map_err(no_memory(&layout))?;
        let registration =
            executor.register(memory.as_ptr(), Window::len(&memory), Access::ReadWrite, false)?;
        let device = executor.alloc(layout.mailboxes() + 2 * layout.ring_bytes())?;
        let control = Arc::new(Control { memory, layout, flags: Flags::new() });
        // Relaxed: no other thread has the memory yet. (0 is the number of the last generation.)
        control.word(Layout::STATE).store(Phase::LEFT, Ordering::Relaxed);
        let (launcher, resident) = match executor.as_cuda() {
            Some(cuda) => {
                let watched = control.clone();
                let present = Box::new(move || !watched.phase().is_gone());
                let resident = Resident::new(cuda, module, (KERNEL, MARK), options.shape(), present)?;
                (Launcher::Gpu, Some(resident))
            }
            None => {
                let (executor, stream) = (executor.clone(), executor.stream()?);
                (Launcher::Threads { executor, stream, module, running: Vec::new() }, None)
            }
        };
        let shared = Arc::new(Shared {
            owner: Owner::here(),
            control,
            options,
            launcher: Mutex::new(launcher),
            resident,
            leases: Mutex::new(vec![LeaseSlot::default(); LEASES - 1]),
            lost: OnceLock::new(),
            keeper: OnceLock::new(),
            fault,
            posted: [AtomicU64::new(0), AtomicU64::new(0)],
            launched_at: AtomicU64::new(0),
            began: Instant::now(),
            last_launch: AtomicU64::new(0),
            registration,
            device,
        });
        let kept = shared.clone();
        let keeper =
            thread::Builder::new().name("pushgate-worker".to_owned()).spawn(move || keep(&kept)).map_err(
                |source| DeviceError::Threads { kernel: KERNEL.to_owned(), wanted: 1, started: 0, source },
            )?;
        shared.keeper.get_or_init(|| keeper.thread().clone());
        let queue = WorkerQueue { rings: [Ring::default(), Ring::default()], shared: shared.clone() };
        let worker = Worker { shared, keeper: Some(keeper) };
        let mut retries = Retries::default();
        while let Err(error) = worker.shared.ensure(Duration::ZERO) {
            if error.is_final() || retries.again(worker.shared.now()).is_some() {
                return Err(error);
            }
            thread::sleep(retries.pause().unwrap_or_default());
        }
        if !worker.wait_gone(END_LIMIT)? {
            return Err(DeviceError::NotResident {
                kernel: KERNEL.to_owned(),
                grid: options.shape().grid,
                block: options.threads,
                resident: 0,
                free: 0,
                busy: 0,
            });
        }
        Ok((worker, queue))
    }

    /// Whether the kernel is on the device or about to start. Never true in a child of `fork`.
    pub fn is_present(&self) -> bool {
        self.shared.owner.is_here() && !self.shared.control.phase().is_gone()
    }

    /// How often the kernel was started.
    pub fn starts(&self) -> u64 {
        self.shared.control.flags.launched()
    }

    /// The cause if the worker is lost and no copy completes any more: the kernel has died, with
    /// its context or alone, or can't be started.
    ///
    /// A death is noticed within about half a second; a start that keeps failing in a way that may
    /// pass counts after 3 s. Does not call the driver.
    #[inline]
    pub fn lost(&self) -> Option<&Lost> {
        self.shared.lost.get()
    }

    /// Waits until the kernel has left by itself; false if that takes longer than `limit`.
    pub fn wait_gone(&self, limit: Duration) -> Result<bool> {
        self.shared.owner.check()?;
        let began = Instant::now();
        while self.is_present() {
            if let Some(lost) = self.lost() {
                return Err(lost.error());
            }
            if began.elapsed() > limit {
                // If the kernel failed, its error says more than a timeout.
                self.shared.ended()?;
                return Ok(false);
            }
            thread::sleep(Duration::from_micros(20));
        }
        Ok(true)
    }
}

fn no_memory(layout: &Layout) -> impl Fn(ShimError) -> DeviceError {
    let bytes = layout.bytes();
    move |error| {
        tracing::warn!("memory for the worker's rings: {error}");
        DeviceError::OutOfMemory { bytes }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let shared = &self.shared;
        if !shared.owner.is_here() {
            // The handle names a thread that a child of `fork` does not have.
            std::mem::forget(self.keeper.take());
            return;
        }
        shared.control.flags.stop();
        // Tells all launches to leave, including one that the keeper may be making. (No other
        // thread has the worker any more.)
        shared.control.word(Layout::QUIT).store(u64::MAX, Ordering::Release);
        let began = Instant::now();
        while let Some(keeper) = &self.keeper
            && began.elapsed() < END_LIMIT
        {
            keeper.thread().unpark();
            if keeper.is_finished() {
                let _ = self.keeper.take().map(JoinHandle::join);
            } else {
                thread::sleep(Duration::from_micros(50));
            }
        }
        // A keeper that is still blocked in the driver may yet make a launch.
        while self.keeper.is_none() && began.elapsed() < END_LIMIT {
            match shared.ended() {
                Ok(true) => return,
                // The context is lost, and the kernel with it.
                Err(error) if error.is_final() => return tracing::warn!("{error}"),
                Ok(false) | Err(_) => thread::sleep(Duration::from_micros(50)),
            }
        }
        tracing::warn!(
            "the worker has not left within {END_LIMIT:?} (it may still stand in line behind other kernels); its memory is kept until the process ends"
        );
        std::mem::forget(shared.clone());
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker(present: {}, starts: {})", self.is_present(), self.starts())
    }
}
