//! The flight recorder of an engine: what each of its queue pairs did last, in memory that anybody who may open it can
//! read, also while the engine hangs or its process is stopped.
//!
//! **Where.** The memory is a memfd, which `/proc/PID/fd` shows as `/memfd:pushgate-recorder`. So the memory is found by the
//! process's number, only root and the process's own user can open it, and nothing is left behind when the process dies. It
//! is sealed against writers: readers can only read.
//!
//! **Size.** An engine has one memory with a slot of 4 KiB for each queue pair, and takes another memory, of as many slots as
//! it has, when all slots are taken. One memory for each queue pair would cost a descriptor for each.
//!
//! **Cost.** Nothing is recorded for a message, nor for a pass over the queue pairs. When an engine looks at its clock, at
//! most once a millisecond, it compares what it knows of some 64 queue pairs with their last entries, and writes an entry
//! where something has changed. The engine reads its clock only then, so more entries would bear the same times. The recorder
//! does not show what a busy engine did in the last millisecond or two before the engine was stopped.
//!
//! **One writer.** The engine writes, on whichever thread drives it. A slot belongs to its endpoint.
//!
//! [`read`] copies a memory; [`report`] makes a text of what was read.

mod layout;
mod reader;
pub mod report;
mod trace;
mod view;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use rustix::fs::{MemfdFlags, memfd_create};

use self::layout::Head;
pub use self::layout::{MOST_BYTES, NAME, ReadError};
pub use self::reader::{Engine, Entry, QueuePair, read};
pub(crate) use self::trace::{About, Stall, Trace};
pub use self::view::{Counts, Errors, Missing, Moved, Phase, View};
use crate::memory::Words;

/// Slots of an engine's first memory.
const FIRST: usize = 16;

/// The number of the next engine of this process.
static ENGINES: AtomicU64 = AtomicU64::new(0);

/// Descriptors of the recorder of an engine with so many queue pairs.
pub(crate) fn descriptors(queue_pairs: usize) -> usize {
    let (mut slots, mut memories) = (FIRST, 1);
    while slots < queue_pairs {
        (slots, memories) = (slots + slots.min(layout::MOST_SLOTS), memories + 1);
    }
    memories
}

/// How the name of the memfd begins that says of which job a process is; the job's name follows.
pub const JOB: &str = "pushgate-job:";

/// Says that this process is one of a job, as long as the descriptor lives: an empty memfd, whose name `/proc/PID/fd` shows.
/// `None` if the system makes none, as for a name that is too long; then the process is found by its number alone.
pub fn announce(job: &str) -> Option<OwnedFd> {
    memfd_create(format!("{JOB}{job}"), MemfdFlags::CLOEXEC).ok()
}

/// The flight recorder of one engine. Copies are of one recorder. Any thread may use it.
#[derive(Clone)]
pub(crate) struct Recorder(Arc<Pool>);

struct Pool {
    /// The first memory's head, but for the number of slots.
    head: Head,
    heart: Words,
    parts: Mutex<Parts>,
}

struct Parts {
    memories: Vec<Arc<SharedMemory>>,
    free: Vec<Words>,
}

impl Recorder {
    /// Makes the recorder of an engine whose clock starts now. `program` is the program that the engine serves, where that
    /// is another process.
    pub(crate) fn start(program: Option<u32>) -> Result<Recorder, ShimError> {
        let engine = ENGINES.fetch_add(1, Ordering::Relaxed);
        let (pid, started) = (std::process::id(), reader::monotonic());
        let head = Head { slots: FIRST, pid, program, engine, part: 0, started };
        let mut parts = Parts { memories: Vec::new(), free: Vec::new() };
        let first = parts.grow(&head)?;
        let heart = Words::writable(&first, layout::BEAT * 8, 2);
        Ok(Recorder(Arc::new(Pool { head, heart, parts: Mutex::new(parts) })))
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        // Every change of the lists is one call, so a panic leaves nothing half done.
        self.0.parts.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A slot for one more queue pair. `None` if the system gives no memory: then that queue pair is not recorded, and the
    /// log says so.
    pub(crate) fn trace(&self) -> Option<Trace> {
        let mut parts = self.parts();
        if parts.free.is_empty() {
            let has: usize = parts.memories.iter().map(|m| (m.len() - layout::PAGE) / layout::SLOT).sum();
            let part = parts.memories.len() as u64;
            let head = Head { slots: has.min(layout::MOST_SLOTS), part, ..self.0.head };
            if let Err(e) = parts.grow(&head) {
                tracing::warn!("a queue pair is not recorded for `pushgate inspect`: {e}");
            }
        }
        let slot = parts.free.pop()?;
        Some(Trace::new(slot, self.clone()))
    }

    /// Takes back a slot.
    fn give_back(&self, slot: Words) {
        self.parts().free.push(slot);
    }

    /// The engine runs, at this time of its clock, nanoseconds.
    #[inline]
    pub(crate) fn beat(&self, now: u64) {
        self.0.heart[0].store(now, Ordering::Relaxed);
    }

    /// The engine is driven by this thread alone.
    pub(crate) fn driven_by(&self, thread: u32) {
        self.0.heart[1].store((thread as u64) << 32, Ordering::Relaxed);
    }

    /// The engine has ended.
    pub(crate) fn end(&self) {
        let state = self.0.heart[1].load(Ordering::Relaxed);
        self.0.heart[1].store(state | 1, Ordering::Relaxed);
    }

    /// What a reader sees of this engine, with `queue_pairs`.
    pub(crate) fn snapshot(&self, now: u64, queue_pairs: Vec<QueuePair>) -> Engine {
        let Head { pid, program, engine, .. } = self.0.head;
        Engine { pid, program, engine, thread: None, state: None, ended: false, ran: now, now, queue_pairs }
    }

    #[cfg(test)]
    fn memories(&self) -> Vec<Arc<SharedMemory>> {
        self.parts().memories.clone()
    }
}

impl Parts {
    /// Makes another memory, with this head.
    fn grow(&mut self, head: &Head) -> Result<Arc<SharedMemory>, ShimError> {
        let bytes = Head::bytes(head.slots);
        let memory =
            Arc::new(SharedMemory::builder(layout::NAME, bytes).huge_pages(HugePages::Never).create()?);
        memory.seal_against_writers()?;
        head.write(memory.words(0, layout::HEAD_WORDS));
        let slot = |n| Words::writable(&memory, layout::PAGE + n * layout::SLOT, layout::SLOT_WORDS);
        // The first slot is taken first.
        self.free.extend((0..head.slots).rev().map(slot));
        self.memories.push(memory.clone());
        Ok(memory)
    }
}

#[cfg(test)]
mod tests;
