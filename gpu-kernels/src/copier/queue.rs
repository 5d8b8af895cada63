//! A client's end of the rings, one for each direction: copies are posted here and asked for their completion.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::{Command, Layout, SLOTS};
use super::shared::{Direction, Shared};
use super::wake;

/// Allocations that one copy may extend over.
const PIECES: u64 = 64;

/// Why a copy could not be posted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The rings are full: as many copies are under way as they hold. Nothing was posted.
    #[error("{SLOTS} copies are under way, as many as a ring of the copier holds; wait for one of them")]
    Full,
    /// Memory that was not registered with the copier.
    #[error("{length} bytes of {kind} memory at {address:#x} are not registered with the copier")]
    Unregistered {
        /// "device" or "host".
        kind: &'static str,
        /// The first byte.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// The copier has ended or copies no more.
    #[error("{reason}")]
    Lost {
        /// Why.
        reason: String,
    },
}

/// A copy that was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the copy is complete when CopyQueue::done says so"]
pub struct Ticket(u64);

/// The producer's end of the ring of one direction. It belongs to one thread at a time; it calls no driver and allocates nothing.
pub struct CopyQueue {
    shared: Arc<Shared>,
    direction: Direction,
    posted: u64,
    /// Copies that were seen complete.
    seen: u64,
}

impl CopyQueue {
    /// The queue of a direction, which goes on where an earlier one has left the ring. All copies of that one must be complete.
    pub(super) fn new(shared: Arc<Shared>, direction: Direction) -> Self {
        // This process alone writes the word, and one queue at a time.
        let posted = Layout(&shared.memory).tail(direction.ring()).load(Ordering::Relaxed);
        CopyQueue { shared, direction, posted, seen: posted }
    }

    /// Posts a copy of `length` bytes between `device`, an address of the device's memory in this process, and `host`, an address of
    /// host memory in this process. Copies of one queue are complete in the order in which they were posted.
    ///
    /// A pull reads what this thread wrote to the host memory before the call. A push reads what a kernel wrote to device memory
    /// before this thread saw a flag of that kernel.
    ///
    /// # Safety
    /// Until [`CopyQueue::done`] has returned true for the ticket, or the copier has ended, nothing else writes the source or touches
    /// the destination. (Both must be registered, which is checked.)
    pub unsafe fn post(&mut self, device: u64, host: u64, length: usize) -> Result<Ticket, PostError> {
        self.health()?;
        let room = self.room();
        let length = length as u64;
        let tables = self.shared.tables();
        let (host_key, host_offset) = tables.host(host, length).ok_or(PostError::Unregistered {
            kind: "host",
            address: host,
            length,
        })?;
        let unregistered = PostError::Unregistered { kind: "device", address: device, length };
        // It may lie in several allocations that follow each other in the address space.
        let pieces = tables.pieces(device, length).filter(|pieces| *pieces <= PIECES).ok_or(unregistered)?;
        if pieces > room {
            return Err(PostError::Full);
        }
        let (layout, ring) = (Layout(&self.shared.memory), self.direction.ring());
        let mut at = 0;
        for _ in 0..pieces {
            let (key, offset, bytes) = tables.device(device + at, length - at).expect("counted above");
            let command = Command {
                out: self.direction == Direction::Push,
                device: key,
                host: host_key,
                device_offset: offset,
                host_offset: host_offset + at,
                length: bytes,
            };
            layout.write(ring, self.posted, command);
            self.posted += 1;
            at += bytes;
        }
        if wake::publish(layout.tail(ring), layout.asleep(), self.posted) {
            self.shared.ringer.ring();
        }
        Ok(Ticket(self.posted - 1))
    }

    /// Whether a copy is complete. After true the host may read what was pushed, and a kernel that sees a flag which is written from
    /// now on reads what was pulled (P3).
    #[inline]
    pub fn done(&mut self, ticket: Ticket) -> bool {
        if self.seen <= ticket.0 {
            self.look();
        }
        self.seen > ticket.0
    }

    /// Whether another copy can be posted, whatever allocations it lies in.
    #[inline]
    pub fn has_room(&mut self) -> bool {
        self.room() >= PIECES
    }

    /// How many commands the ring has room for, as far as that matters.
    fn room(&mut self) -> u64 {
        if self.posted - self.seen + PIECES > SLOTS {
            self.look();
        }
        SLOTS - (self.posted - self.seen)
    }

    /// Looks how far the copier is. A number that it can't have reached does not count.
    fn look(&mut self) {
        // Acquire: pairs with the release in the copier's `Client::look`, so that what was pushed is read after this.
        let mark = Layout(&self.shared.memory).mark(self.direction.ring()).load(Ordering::Acquire);
        if mark <= self.posted {
            self.seen = self.seen.max(mark);
        }
    }

    /// Fails if the copier has ended or copies no more.
    #[inline]
    pub fn health(&self) -> Result<(), PostError> {
        match self.shared.lost.get() {
            None => Ok(()),
            Some(lost) => Err(PostError::Lost { reason: lost.reason.clone() }),
        }
    }

    /// The queue's direction.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The copier's process, if it has a number here.
    pub fn process(&self) -> Option<u32> {
        self.shared.pid
    }

    #[cfg(test)]
    pub(super) fn memory(&self) -> &pushgate_driver_shim::memory::SharedMemory {
        &self.shared.memory
    }

    /// The address and size of registered host memory that is the queue's own; short payloads pass through it.
    pub fn aside(&self) -> (usize, usize) {
        self.shared.aside(self.direction)
    }
}

impl fmt::Debug for CopyQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CopyQueue({:?}, {}/{} done)", self.direction, self.seen, self.posted)
    }
}
