//! Reads a recorder's memory. The reader does not trust the writer (P8): the reader checks every field, and never waits for
//! the writer, which may be stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use pushgate_driver_shim::memory::ReadOnlyMemory;
use pushgate_link::memory::Words;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::about::{About, text};
use super::layout::{self, Head, ReadError};
use super::metrics::Metrics;
use super::view::{Moved, View};
use crate::cell;

/// How often a slot is read again whose queue pair changed meanwhile, and an engine that lost a queue pair meanwhile.
const TRIES: u32 = 3;

/// CLOCK_MONOTONIC, nanoseconds: one clock for all processes of a host (of one time namespace).
pub(super) fn monotonic() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What a recorder says of one engine. Times are nanoseconds of the engine's own clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Engine {
    /// The process that runs the engine, by its number in its own PID namespace.
    pub pid: u32,
    /// The program that the engine serves, where `pushgate proxy` runs the engine.
    pub program: Option<Program>,
    /// The engine's number in its process.
    pub engine: u64,
    /// The engine's thread, where it has one that drives it alone.
    pub thread: Option<u32>,
    /// The state of that thread, or else of the process, as /proc names states: R, S, D, T and others. [`read`] does not
    /// know it.
    pub state: Option<char>,
    /// The process that copies for the engine between GPU memory and windows, if there is one.
    pub copier: Option<Copier>,
    /// The engine has ended, by a panic or because its program is done.
    pub ended: bool,
    /// When the engine ran last.
    pub ran: u64,
    /// When this was read.
    pub now: u64,
    /// How often the engine has slept.
    pub sleeps: u64,
    /// Metrics of the queue pairs that have gone, for each transport. `None` if queue pairs went all the time: then the sums would
    /// not fit the queue pairs that were read.
    pub closed: Option<Vec<Closed>>,
    /// The engine's queue pairs.
    pub queue_pairs: Vec<QueuePair>,
}

/// A program that an engine of `pushgate proxy` serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Program {
    /// The process, by its number in the PID namespace of the engine's process.
    pub pid: u32,
    /// The program's name, as `ps` shows it. [`read`] does not know it.
    pub name: Option<String>,
    /// The program's state, as /proc names states. [`read`] does not know it.
    pub state: Option<char>,
}

impl Program {
    /// The program of this number.
    pub(super) fn of(pid: u32) -> Self {
        Program { pid, name: None, state: None }
    }
}

/// A process that copies for an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Copier {
    /// The process, by its number in the PID namespace of the engine's process.
    pub pid: u32,
    /// The process's state, as /proc names states. [`read`] does not know it.
    pub state: Option<char>,
}

impl Copier {
    /// The copier that the words of an engine's first memory name.
    pub(super) fn of(words: &[AtomicU64]) -> Option<Self> {
        let pid = words[layout::COPIER].load(Ordering::Relaxed) as u32;
        (pid != 0).then_some(Copier { pid, state: None })
    }
}

/// The queue pairs of one transport that have gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Closed {
    /// The transport's name.
    pub transport: String,
    /// The metrics of all of them together.
    pub metrics: Metrics,
}

/// What a recorder says of one queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueuePair {
    /// What does not change.
    #[serde(flatten)]
    pub about: About,
    /// When the engine took it in.
    pub added: u64,
    /// The queue pair's counts and times so far. `None` if the engine was storing them, or was stopped while it did.
    pub metrics: Option<Metrics>,
    /// The last entries, the newest last; never empty.
    pub entries: Vec<Entry>,
}

/// What an engine knew of a queue pair at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// The entry's number. Numbers have no gaps; entries that are missing were overwritten.
    pub number: u64,
    /// When it was written.
    pub time: u64,
    /// When something had moved last by then.
    pub moved: Moved,
    /// What the engine knew.
    #[serde(flatten)]
    pub view: View,
}

impl QueuePair {
    /// The newest entry, which is what holds now.
    pub fn last(&self) -> &Entry {
        self.entries.last().expect("never empty")
    }
}

/// One of the memories of an engine's recorder, checked.
pub struct Memory {
    head: Head,
    words: Words,
    memory: Arc<ReadOnlyMemory>,
}

impl Memory {
    /// Checks the head of a memory.
    pub fn open(memory: &Arc<ReadOnlyMemory>) -> Result<Memory, ReadError> {
        let least = Head::bytes(0);
        if memory.len() < least {
            return Err(ReadError::Size {
                what: "size in bytes",
                found: memory.len() as u64,
                expected: least as u64,
            });
        }
        let words = Words::readable(memory, 0, layout::HEAD_WORDS);
        let head = Head::read(&words, memory.len())?;
        Ok(Memory { head, words, memory: memory.clone() })
    }

    /// The process that runs the engine, by its number in its own PID namespace.
    pub fn pid(&self) -> u32 {
        self.head.pid
    }

    /// The engine's number in its process.
    pub fn engine(&self) -> u64 {
        self.head.engine
    }

    /// Which of the engine's memories it is, from 0.
    fn part(&self) -> u64 {
        self.head.part
    }

    fn queue_pairs(&self) -> impl Iterator<Item = QueuePair> + '_ {
        let slot = |n| Words::readable(&self.memory, layout::PAGE + n * layout::SLOT, layout::SLOT_WORDS);
        (0..self.head.slots).filter_map(move |n| queue_pair(&slot(n)))
    }

    fn closed(&self) -> Vec<Closed> {
        let cells = (0..layout::TRANSPORTS).map(|at| layout::closed(&self.words, at));
        let read = cells.filter_map(|cell| layout::untagged(&cell::load(cell)?.1));
        read.map(|(name, metrics)| Closed { transport: text(&name.to_le_bytes()), metrics }).collect()
    }
}

/// Reads an engine, all of whose memories these are. `None` without the first of them, which says when the engine ran.
pub fn read(memories: &[Memory]) -> Option<Engine> {
    let first = memories.iter().find(|memory| memory.part() == 0)?;
    let closings = || first.words[layout::CLOSINGS].load(Ordering::Relaxed);
    let (mut queue_pairs, mut closed) = (Vec::new(), None);
    for _ in 0..TRIES {
        let before = closings();
        // With an even number that has not changed after the second fence, no queue pair went while these were copied:
        // `Recorder::give_back` has the writer's side. Fences, because the pages may be mapped read-only.
        fence(Ordering::Acquire);
        let gone = first.closed();
        queue_pairs = memories.iter().flat_map(Memory::queue_pairs).collect();
        fence(Ordering::Acquire);
        if before.is_multiple_of(2) && closings() == before {
            closed = Some(gone);
            break;
        }
    }
    let head = &first.head;
    let ran = first.words[layout::BEAT].load(Ordering::Relaxed);
    let state = first.words[layout::STATE].load(Ordering::Relaxed);
    let sleeps = first.words[layout::SLEEPS].load(Ordering::Relaxed);
    // After everything else, so that nothing that was read is of later.
    let now = monotonic().saturating_sub(head.started);
    Some(Engine {
        pid: head.pid,
        program: head.program.map(Program::of),
        engine: head.engine,
        thread: Some((state >> 32) as u32).filter(|thread| *thread != 0),
        state: None,
        copier: Copier::of(&first.words),
        ended: state & 1 != 0,
        ran,
        now,
        sleeps,
        closed,
        queue_pairs,
    })
}

/// Reads a slot. `None` if it is free, or changes hands all the time.
pub(super) fn queue_pair(slot: &[AtomicU64]) -> Option<QueuePair> {
    let of = || cell::load::<{ layout::ABOUT }>(layout::about(slot));
    for _ in 0..TRIES {
        let Some((begin, words)) = of() else { continue };
        let (about, added, first) = About::of(&words)?;
        let mut entries: Vec<Entry> = (0..layout::ENTRIES)
            .filter_map(|at| layout::read_entry(slot, at))
            .filter(|(number, ..)| *number >= first)
            .map(|(number, time, moved, view)| Entry { number, time, moved, view })
            .collect();
        entries.sort_by_key(|entry| entry.number);
        let cell = (0..TRIES).find_map(|_| cell::load(layout::metrics(slot)));
        // Metrics of the slot's last queue pair are none of this one's.
        let own = cell.and_then(|(_, words)| layout::untagged(&words)).filter(|(whose, _)| *whose == begin);
        let metrics = own.map(|(_, metrics)| metrics);
        if of().is_some_and(|(end, _)| end == begin) {
            return (!entries.is_empty()).then_some(QueuePair { about, added, metrics, entries });
        }
    }
    None
}
