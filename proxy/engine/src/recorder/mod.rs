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
//! **Metrics.** Behind the entries of a slot lie the queue pair's counts and times, written at the same looks. Those of queue
//! pairs that have gone are added up in the first memory's head, so that an engine's sums only grow.
//!
//! [`Memory::open`] checks a memory, [`read`] copies those of an engine; [`report`] makes a text of what was read.

mod about;
mod layout;
mod metrics;
mod reader;
pub mod report;
mod trace;
mod view;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_link::memory::Words;
use rustix::fs::{MemfdFlags, memfd_create};

pub use self::about::About;
use self::layout::Head;
pub use self::layout::{MOST_BYTES, NAME, ReadError};
pub use self::metrics::{Metrics, Times};
pub use self::reader::{Closed, Copier, Engine, Entry, Memory, Program, QueuePair, read};
pub(crate) use self::trace::{Stall, Trace};
pub use self::view::{Counts, Errors, Missing, Moved, Phase, View};
use crate::cell;

/// Slots of an engine's first memory.
const FIRST: usize = 16;

/// The number of the next engine of this process.
static ENGINES: AtomicU64 = AtomicU64::new(0);

/// Descriptors of the recorder of an engine with `queue_pairs` queue pairs.
pub fn descriptors(queue_pairs: usize) -> usize {
    let (mut slots, mut memories) = (FIRST, 1);
    while slots < queue_pairs {
        (slots, memories) = (slots + slots.min(layout::MOST_SLOTS), memories + 1);
    }
    memories
}

/// How the name of the memfd begins that says which job a process belongs to; the job's name follows.
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
    /// The first memory's head.
    words: Words,
    parts: Mutex<Parts>,
}

struct Parts {
    memories: Vec<Arc<SharedMemory>>,
    free: Vec<Words>,
    /// Transports, each with the metrics of its queue pairs that have gone.
    closed: Vec<([u8; 8], Metrics)>,
    /// How many have gone.
    closings: u64,
}

impl Recorder {
    /// Makes the recorder of an engine whose clock starts now. `program` is the program that the engine serves, where that
    /// is another process.
    pub(crate) fn start(program: Option<u32>) -> Result<Recorder, ShimError> {
        let engine = ENGINES.fetch_add(1, Ordering::Relaxed);
        let (pid, started) = (std::process::id(), reader::monotonic());
        let head = Head { slots: FIRST, pid, program, engine, part: 0, started };
        let mut parts = Parts { memories: Vec::new(), free: Vec::new(), closed: Vec::new(), closings: 0 };
        let first = parts.grow(&head)?;
        let words = Words::writable(&first, 0, layout::HEAD_WORDS);
        Ok(Recorder(Arc::new(Pool { head, words, parts: Mutex::new(parts) })))
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
                limited!(warn, 0u32, "a queue pair is not recorded for `pushgate inspect`: {e}");
            }
        }
        let slot = parts.free.pop()?;
        Some(Trace::new(slot, self.clone()))
    }

    /// Takes back a slot, which `clear` marks as free, and adds the queue pair's metrics to those of the ones that have gone.
    ///
    /// A reader must neither miss that queue pair in its sums nor count it twice. So the number of closings is odd from before
    /// the slot is marked until after the sums, and a reader copies everything between two looks at that number. The release fence
    /// keeps the stores after the odd number, the release store keeps the even number after the stores; the reader's
    /// fences are in [`read`].
    fn give_back(&self, slot: Words, transport: [u8; 8], metrics: &Metrics, clear: impl FnOnce()) {
        let mut parts = self.parts();
        let word = &self.0.words[layout::CLOSINGS];
        // Relaxed: the lock makes this thread the only writer, and the fence after it orders it for readers.
        word.store(2 * parts.closings + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        clear();
        if *metrics != Metrics::default() {
            parts.close(transport, metrics, &self.0.words);
        }
        parts.closings += 1;
        word.store(2 * parts.closings, Ordering::Release);
        parts.free.push(slot);
    }

    /// The engine runs, at this time of its clock, nanoseconds, and has slept so often.
    #[inline]
    pub(crate) fn beat(&self, now: u64, sleeps: u64) {
        self.0.words[layout::BEAT].store(now, Ordering::Relaxed);
        self.0.words[layout::SLEEPS].store(sleeps, Ordering::Relaxed);
    }

    /// The engine is driven by this thread alone.
    pub(crate) fn driven_by(&self, thread: u32) {
        self.0.words[layout::STATE].store((thread as u64) << 32, Ordering::Relaxed);
    }

    /// The process `copier` copies for the engine.
    pub(crate) fn copied_by(&self, copier: u32) {
        self.0.words[layout::COPIER].store(copier.into(), Ordering::Relaxed);
    }

    /// The engine has ended.
    pub(crate) fn end(&self) {
        let word = &self.0.words[layout::STATE];
        word.store(word.load(Ordering::Relaxed) | 1, Ordering::Relaxed);
    }

    /// What a reader sees of this engine, with `queue_pairs`.
    pub(crate) fn snapshot(&self, now: u64, queue_pairs: Vec<QueuePair>) -> Engine {
        let Head { pid, program, engine, .. } = self.0.head;
        Engine {
            pid,
            program: program.map(Program::of),
            engine,
            thread: None,
            state: None,
            copier: Copier::of(&self.0.words),
            ended: false,
            ran: now,
            now,
            sleeps: 0,
            closed: None,
            queue_pairs,
        }
    }

    #[cfg(test)]
    fn memories(&self) -> Vec<Arc<SharedMemory>> {
        self.parts().memories.clone()
    }
}

impl Parts {
    /// Adds the metrics of a queue pair that has gone to those of its transport.
    fn close(&mut self, transport: [u8; 8], metrics: &Metrics, head: &[AtomicU64]) {
        let at = match self.closed.iter().position(|(name, _)| *name == transport) {
            Some(at) => at,
            // There are fewer transports. One too many would be counted with the last.
            None if self.closed.len() == layout::TRANSPORTS => layout::TRANSPORTS - 1,
            None => {
                self.closed.push((transport, Metrics::default()));
                self.closed.len() - 1
            }
        };
        let (name, sum) = &mut self.closed[at];
        sum.add(metrics);
        let words = layout::tagged(u64::from_le_bytes(*name), sum);
        cell::store(layout::closed(head, at), self.closings, &words);
    }

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
