//! Reads a recorder's memory. The reader does not trust the writer (P8): the reader checks every field, and never waits for
//! the writer, which may be stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::memory::ReadOnlyMemory;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::layout::{self, Head, ReadError};
use super::trace::About;
use super::view::{Moved, View};
use crate::cell;
use crate::memory::Words;

/// How often a slot is read again whose queue pair changed meanwhile.
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
    pub program: Option<u32>,
    /// The engine's number in its process.
    pub engine: u64,
    /// The engine's thread, where it has one that drives it alone.
    pub thread: Option<u32>,
    /// The state of that thread, or else of the process, as /proc names states: R, S, D, T and others. [`read`] does not
    /// know it.
    pub state: Option<char>,
    /// The engine has ended, by a panic or because its program is done.
    pub ended: bool,
    /// When the engine ran last.
    pub ran: u64,
    /// When this was read.
    pub now: u64,
    /// Its queue pairs.
    pub queue_pairs: Vec<QueuePair>,
}

/// What a recorder says of one queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueuePair {
    /// What does not change.
    #[serde(flatten)]
    pub about: About,
    /// When the engine took it in.
    pub added: u64,
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

/// Reads a memory: the number of the memory among the engine's, from 0, and the engine with the queue pairs of this memory.
/// Only memory 0 says when the engine ran.
pub fn read(memory: &Arc<ReadOnlyMemory>) -> Result<(u64, Engine), ReadError> {
    let least = Head::bytes(0);
    if memory.len() < least {
        return Err(ReadError::Size {
            what: "size in bytes",
            found: memory.len() as u64,
            expected: least as u64,
        });
    }
    let head_words = Words::readable(memory, 0, layout::HEAD_WORDS);
    let head = Head::read(&head_words, memory.len())?;
    let slot = |n| Words::readable(memory, layout::PAGE + n * layout::SLOT, layout::SLOT_WORDS);
    let queue_pairs = (0..head.slots).filter_map(|n| queue_pair(&slot(n))).collect();
    let ran = head_words[layout::BEAT].load(Ordering::Relaxed);
    let state = head_words[layout::STATE].load(Ordering::Relaxed);
    // Behind everything else, so that nothing that was read is of later.
    let now = monotonic().saturating_sub(head.started);
    let engine = Engine {
        pid: head.pid,
        program: head.program,
        engine: head.engine,
        thread: Some((state >> 32) as u32).filter(|thread| *thread != 0),
        state: None,
        ended: state & 1 != 0,
        ran,
        now,
        queue_pairs,
    };
    Ok((head.part, engine))
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
        if of().is_some_and(|(end, _)| end == begin) {
            return (!entries.is_empty()).then_some(QueuePair { about, added, entries });
        }
    }
    None
}
