//! A device's copy engine: copies take time, and their bytes appear at the end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_engine::mover::{MoveError, Mover};

use super::random::Random;

/// A copy under way.
struct Copy {
    ticket: u64,
    to: u64,
    from: usize,
    length: usize,
    /// When it ends, nanoseconds.
    ends: u64,
}

/// The copy engine of one rank. Copies end in the order in which they began.
pub(super) struct CopyEngine {
    now: Arc<AtomicU64>,
    random: Random,
    copies: VecDeque<Copy>,
    tickets: u64,
}

impl CopyEngine {
    /// A copy engine that reads the time at `now`, nanoseconds.
    pub(super) fn new(now: Arc<AtomicU64>, random: Random) -> Self {
        CopyEngine { now, random, copies: VecDeque::with_capacity(64), tickets: 0 }
    }
}

impl Mover for CopyEngine {
    fn start(&mut self, to: u64, from: usize, length: usize) -> Result<u64, MoveError> {
        self.tickets += 1;
        let now = self.now.load(Ordering::Relaxed);
        let before = self.copies.back().map_or(now, |c| c.ends.max(now));
        let ends = before + self.random.time(3_000);
        self.copies.push_back(Copy { ticket: self.tickets, to, from, length, ends });
        Ok(self.tickets)
    }

    fn done(&mut self, ticket: u64) -> Result<bool, MoveError> {
        let now = self.now.load(Ordering::Relaxed);
        while let Some(c) = self.copies.front().filter(|c| c.ends <= now) {
            // SAFETY: who began the copy keeps both stretches until it is told that the copy has ended; both lie in memory
            // of the simulation, and one thread runs it. A copy that nobody asks for any more is not carried out.
            unsafe { std::ptr::copy_nonoverlapping(c.from as *const u8, c.to as *mut u8, c.length) };
            self.copies.pop_front();
        }
        Ok(self.copies.front().is_none_or(|c| c.ticket > ticket))
    }

    fn flush(&mut self) -> Result<(), MoveError> {
        Ok(())
    }
}
