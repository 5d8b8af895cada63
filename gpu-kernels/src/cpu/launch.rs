//! A launch on this CPU: one OS thread for each CUDA thread, started all or none.

use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::memory::Heap;
use super::stream::End;
use crate::arch::{CpuBlock, CpuThread};
use crate::embedded::CpuEntry;
use crate::error::{DeviceError, Result};
use crate::executor::{Launch, LoadedModule, RunningKernel, WaitOutcome};
use crate::lock::lock;

/// Stack of a kernel's thread: kernels are leaf code with a few words of state.
const STACK_BYTES: usize = 256 << 10;

/// Whether a launch's threads may enter the kernel. Blocks wait for each other, so none may enter
/// before all of them exist.
#[derive(Clone, Copy, PartialEq)]
enum Admission {
    /// Not all threads exist yet.
    Pending,
    /// All threads exist and enter.
    Granted,
    /// Not all threads could be made, so none enters.
    Refused,
}

/// Everything that the threads of one launch share.
pub(super) struct Job {
    entry: CpuEntry,
    /// The parameters, aligned for any struct.
    params: Vec<u128>,
    blocks: Vec<UnsafeCell<CpuBlock>>,
    /// The memory that `CpuBlock::shared` points to.
    _shared: Vec<Heap>,
    /// Keeps the kernel's code mapped.
    _module: Arc<dyn LoadedModule>,
    /// The end of the launch before this one on the stream.
    before: Option<Arc<End>>,
    admission: Mutex<Admission>,
    decided: Condvar,
    /// Threads that have not left the kernel yet.
    left: AtomicUsize,
    pub(super) end: Arc<End>,
}

// SAFETY: the raw pointers point into heap blocks that the job owns. Once the job is made, Rust
// only reads `params` and takes addresses of `blocks`; the kernel alone accesses what lies there,
// with atomics.
unsafe impl Send for Job {}
// SAFETY: as for Send: after the job is made, Rust only reads it, and the kernel uses atomics.
unsafe impl Sync for Job {}

impl Job {
    pub(super) fn new(
        module: Arc<dyn LoadedModule>,
        entry: CpuEntry,
        launch: Launch,
        params: &[u8],
        before: Option<Arc<End>>,
    ) -> Result<Self> {
        let mut copy: Vec<u128> = params
            .chunks(16)
            .map(|chunk| {
                let mut bytes = [0; 16];
                bytes[..chunk.len()].copy_from_slice(chunk);
                u128::from_ne_bytes(bytes)
            })
            .collect();
        copy.push(0); // an address even where there are no parameters
        let shared: Vec<Heap> = if launch.shared_bytes == 0 {
            Vec::new()
        } else {
            (0..launch.grid).map(|_| Heap::new(launch.shared_bytes as usize, 128)).collect::<Result<_>>()?
        };
        let blocks = (0..launch.grid)
            .map(|index| {
                let shared = shared.get(index as usize).map_or(null_mut(), |heap| heap.as_ptr().cast());
                UnsafeCell::new(CpuBlock::new(index, launch.grid, launch.block, shared))
            })
            .collect();
        Ok(Self {
            entry,
            params: copy,
            blocks,
            _shared: shared,
            _module: module,
            before,
            admission: Mutex::new(Admission::Pending),
            decided: Condvar::new(),
            left: AtomicUsize::new(launch.grid as usize * launch.block as usize),
            end: Arc::default(),
        })
    }

    fn admit(&self, admission: Admission) {
        *lock(&self.admission) = admission;
        self.decided.notify_all();
    }

    /// Runs one thread of the launch.
    ///
    /// # Safety
    /// `entry` takes what `params` holds, and the caller of the launch promised that the addresses
    /// in `params` are valid.
    unsafe fn run(&self, block: usize, index: u32) {
        let admission = self
            .decided
            .wait_while(lock(&self.admission), |admission| *admission == Admission::Pending)
            .map_or_else(|poisoned| *poisoned.into_inner(), |admission| *admission);
        if admission == Admission::Refused {
            return;
        }
        if let Some(before) = &self.before {
            let _ = before.wait(None);
        }
        self.end.begin();
        let thread = CpuThread { block: self.blocks[block].get(), index: index.into() };
        // SAFETY: `thread` and its block live until the call returns (the job is borrowed). The
        // parameters are aligned to 16 and as large as the kernel asked for. The caller promises
        // the rest.
        unsafe { (self.entry)(&thread, self.params.as_ptr().cast()) };
        // AcqRel: the thread that counts down to zero has seen all that the other threads wrote,
        // and passes it on through End's lock.
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end.finish();
        }
    }
}

/// Starts all threads of a job, or none.
///
/// # Safety
/// The requirements of [`Job::run`] hold for every thread.
pub(super) unsafe fn start(job: &Arc<Job>, kernel: &str, launch: Launch) -> Result<Vec<JoinHandle<()>>> {
    let wanted = u64::from(launch.grid) * u64::from(launch.block);
    let mut handles = Vec::with_capacity(wanted as usize);
    for block in 0..launch.grid {
        for index in 0..launch.block {
            let shared = job.clone();
            let spawned = thread::Builder::new()
                .name(format!("gpu-{block}-{index}"))
                .stack_size(STACK_BYTES)
                // SAFETY: the caller of `start` promises what `Job::run` requires.
                .spawn(move || unsafe { shared.run(block as usize, index) });
            match spawned {
                Ok(handle) => handles.push(handle),
                Err(source) => {
                    let started = handles.len() as u64;
                    job.admit(Admission::Refused);
                    join(handles);
                    return Err(DeviceError::Threads { kernel: kernel.to_owned(), wanted, started, source });
                }
            }
        }
    }
    job.admit(Admission::Granted);
    Ok(handles)
}

fn join(handles: Vec<JoinHandle<()>>) {
    for handle in handles {
        // The thread runs C code and a few lines of ours. The panic hook prints a panic in those
        // lines; there is nothing more to do about it here.
        let _ = handle.join();
    }
}

/// A launch with the handles of its threads.
pub(super) struct CpuRunning {
    pub(super) job: Arc<Job>,
    pub(super) handles: Mutex<Vec<JoinHandle<()>>>,
}

impl RunningKernel for CpuRunning {
    fn wait(&self, timeout: Option<Duration>) -> Result<WaitOutcome> {
        let outcome = self.job.end.wait(timeout);
        if outcome == WaitOutcome::Done {
            join(std::mem::take(&mut *lock(&self.handles)));
        }
        Ok(outcome)
    }

    fn is_done(&self) -> Result<bool> {
        Ok(self.job.end.is_done())
    }

    fn elapsed(&self) -> Result<Option<Duration>> {
        Ok(self.job.end.elapsed())
    }
}

impl Drop for CpuRunning {
    fn drop(&mut self) {
        join(std::mem::take(&mut *lock(&self.handles)));
    }
}
