//! A GPU whose memory NCCL hands over, with the copier that pushes the memory into windows and pulls it out of them
//! (docs/copier.md), and queues of copies for the RMA table. Messages need no call of CUDA in this process.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use pushgate::copier::{
    Copier, CopierCpus, CopyQueue, DeviceMemory, Direction, HostPlace, Lost, PostError, SharedMover, Ticket,
};
use pushgate::settings::DeviceChoice;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_engine::mover::Mover;
use pushgate_gpu_kernels::{
    Access, DeviceBuffer, Executor, OrderedCopies, Registration, choose_at, current_device,
};

use crate::error::{Code, Failure, Result};
use crate::program;

/// A GPU, with its copier if messages need copies.
pub struct Gpu {
    executor: Arc<dyn Executor>,
    copies: Option<Copies>,
}

/// A GPU's copier, as connections use it.
struct Copies {
    copier: Copier,
    /// Copies into the GPU's memory, for all engines of the GPU.
    mover: SharedMover,
    // The lock is held only for a few stores: one or two threads drive the connections of a GPU.
    pushes: Mutex<CopyQueue>,
}

/// The index that stands for the CPU executor in place of a GPU.
const CPU: u32 = u32::MAX;

/// The variable that has the CPU executor play a GPU that owns all memory of the process, so that this path runs and is tested where
/// there is no GPU: `cpu`, or [`WITHOUT_RDMA`].
const PLAYED: &str = "_PUSHGATE_NET_GPU";

/// The played GPU has no GPUDirect RDMA.
const WITHOUT_RDMA: &str = "cpu-without-gpudirect-rdma";

/// The index of the GPU that is current on this thread.
pub fn current() -> Option<u32> {
    match std::env::var_os(PLAYED) {
        Some(which) if which == "cpu" || which == WITHOUT_RDMA => Some(CPU),
        _ => current_device(),
    }
}

/// The failure of a copy that could not be posted.
pub fn failed(e: PostError) -> Failure {
    let code = if matches!(e, PostError::Lost { .. }) { Code::System } else { Code::Internal };
    Failure::new(code, format!("the GPU: {e}"))
}

fn no_copier() -> Failure {
    Failure::new(Code::Internal, "a copy by a GPU that was opened without a copier")
}

impl Gpu {
    /// Opens a GPU. No message is copied before [`Gpu::join_copier`].
    pub fn open(index: u32) -> Result<Gpu> {
        let device = if index == CPU { DeviceChoice::Cpu } else { DeviceChoice::Cuda };
        let (executor, _) = choose_at(device, index).map_err(Failure::system("the GPU"))?;
        Ok(Gpu { executor, copies: None })
    }

    /// Joins the GPU's copier, which is started if there is none. The error is a sentence that says why no copier can copy here.
    pub fn join_copier(&mut self, cpus: &CopierCpus) -> Result<(), String> {
        let copier = Copier::join(&self.executor, &program::program()?, cpus).map_err(|e| e.to_string())?;
        let mover = SharedMover::new(copier.queue(Direction::Pull));
        let pushes = Mutex::new(copier.queue(Direction::Push));
        self.copies = Some(Copies { copier, mover, pushes });
        Ok(())
    }

    fn copies(&self) -> Result<&Copies> {
        self.copies.as_ref().ok_or_else(no_copier)
    }

    /// Copies into the GPU's memory, for one of its engines.
    pub fn mover(&self) -> Option<Box<dyn Mover>> {
        self.copies.as_ref().map(|copies| Box::new(copies.mover.clone()) as Box<dyn Mover>)
    }

    /// Whether NCCL hands over the GPU's memory. Without GPUDirect RDMA it keeps messages in host memory, whatever the network takes
    /// (`ncclTopoCheckGdr` of NCCL 2.28 and 2.30).
    pub fn is_handed_over(&self) -> bool {
        match self.executor.as_cuda() {
            Some(cuda) => cuda.has_gpu_direct_rdma(),
            None => std::env::var_os(PLAYED).is_none_or(|which| which != WITHOUT_RDMA),
        }
    }

    /// A description of the GPU for people.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// The process of the copier, if it has a number here.
    pub fn copier(&self) -> Option<u32> {
        self.copies.as_ref()?.copier.pid()
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

    /// Whether connections push or pull by the copier.
    pub fn has_copier(&self) -> bool {
        self.copies.is_some()
    }

    /// The queue of pushes, locked. Hold it only for a few stores.
    pub fn pushes(&self) -> Result<MutexGuard<'_, CopyQueue>> {
        Ok(self.copies()?.pushes.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// Hands our memory to the copier, which may write it. The memory must not be sealed against writers yet.
    pub fn register(&self, memory: &SharedMemory) -> Result<HostPlace> {
        let address = memory.as_ptr().as_ptr() as usize;
        let registered = self.copies()?.copier.register_host(address, memory.len(), memory.fd(), true);
        registered.map_err(Failure::system("registering a window with the GPU"))
    }

    /// Hands a peer's memory to the copier, which reads it.
    pub fn register_read_only(&self, memory: &ReadOnlyMemory) -> Result<HostPlace> {
        let address = memory.as_ptr().as_ptr() as usize;
        let registered = self.copies()?.copier.register_host(address, memory.len(), memory.fd(), false);
        registered.map_err(Failure::system("registering the peer's window with the GPU"))
    }

    /// Hands memory of the GPU to the copier.
    pub fn register_device(&self, address: usize, bytes: usize) -> Result<DeviceMemory> {
        let registered = self.copies()?.copier.register_device(address as u64, bytes as u64);
        registered.map_err(Failure::system("handing memory of the GPU to the copier"))
    }

    /// Registers host memory at `ptr` for queues of copies ([`Gpu::ordered_copies`]). A kernel that waits for those copies does not
    /// hold up the call.
    pub fn register_for_copies(&self, ptr: NonNull<u8>, len: usize, access: Access) -> Result<Registration> {
        OrderedCopies::register(&self.executor, ptr, len, access)
            .map_err(Failure::system("registering a window with the GPU"))
    }

    /// Whether a push is complete.
    pub fn pushed(&self, ticket: Ticket) -> bool {
        self.pushes().is_ok_and(|mut pushes| pushes.done(ticket))
    }

    /// Why the GPU copies no more, if that is so: then no request that waits for a copy succeeds.
    /// Makes no system call.
    #[inline]
    pub fn lost(&self) -> Option<&Lost> {
        self.copies.as_ref()?.copier.lost()
    }
}
