//! A client's end of the rings: copies are posted here and asked for their completion.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::client::Shared;
use super::layout::{Command, Layout, SLOTS};
use super::wake;

/// The way of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From device memory to host memory.
    Push,
    /// From host memory to device memory.
    Pull,
}

/// Bytes of copies that follow each other in a ring before the next ones go to the direction's other ring. Each ring has a stream of
/// its own. Two streams fill the gap that one leaves between copies; and copies of one ring that wait together cost the copier one
/// call of the driver, so short ones should wait together (docs/copier.md).
const RUN: u64 = 256 << 10;
/// Allocations that one copy may extend over.
const PIECES: u64 = 64;

/// Why a copy could not be posted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// As many copies are under way as the rings hold. Nothing was posted.
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
pub struct Ticket {
    second: bool,
    index: u64,
}

struct Ring {
    posted: u64,
    /// Copies that were seen complete.
    seen: u64,
}

/// The producer's end of the rings of one direction. It belongs to one thread at a time; it calls no driver and allocates nothing.
pub struct CopyQueue {
    shared: Arc<Shared>,
    direction: Direction,
    rings: [Ring; 2],
    /// The ring that the next copy goes to.
    second: bool,
    /// Bytes that went there since the last turn.
    run: u64,
}

impl CopyQueue {
    /// The queue of a direction, which goes on where an earlier one has left the rings. All copies of that one must be complete.
    pub(super) fn new(shared: Arc<Shared>, direction: Direction) -> Self {
        let rings = [false, true].map(|second| {
            // This process alone writes the word, and one queue at a time.
            let posted = Layout(&shared.memory).tail(ring_number(direction, second)).load(Ordering::Relaxed);
            Ring { posted, seen: posted }
        });
        CopyQueue { shared, direction, rings, second: false, run: 0 }
    }

    /// Posts a copy of `length` bytes between `device`, an address of the device's memory in this process, and `host`, an address of
    /// host memory in this process. Copies run side by side: a later copy may be complete before an earlier one.
    ///
    /// A pull reads what this thread wrote to the host memory before the call. A push reads what a kernel wrote to device memory
    /// before this thread saw a flag of that kernel.
    ///
    /// # Safety
    /// Until [`CopyQueue::done`] has returned true for the ticket, or the copier has ended, nothing else writes the source or touches
    /// the destination. (Both must be registered, which is checked.)
    pub unsafe fn post(&mut self, device: u64, host: u64, length: usize) -> Result<Ticket, PostError> {
        self.health()?;
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
        let layout = Layout(&self.shared.memory);
        if self.run >= RUN
            || !self.rings[usize::from(self.second)].has_room(layout.mark(self.number()), pieces)
        {
            (self.second, self.run) = (!self.second, 0);
        }
        let number = self.number();
        let ring = &mut self.rings[usize::from(self.second)];
        if !ring.has_room(layout.mark(number), pieces) {
            return Err(PostError::Full);
        }
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
            layout.write(number, ring.posted, command);
            ring.posted += 1;
            at += bytes;
        }
        if wake::publish(layout.tail(number), layout.asleep(), ring.posted) {
            self.shared.ringer.ring();
        }
        self.run += length;
        Ok(Ticket { second: self.second, index: ring.posted - 1 })
    }

    /// The number of the ring that the next copy goes to.
    fn number(&self) -> usize {
        ring_number(self.direction, self.second)
    }

    /// Whether a copy is complete. After true the host may read what was pushed, and a kernel that sees a flag which is written from
    /// now on reads what was pulled (P3).
    #[inline]
    pub fn done(&mut self, ticket: Ticket) -> bool {
        let ring = &mut self.rings[usize::from(ticket.second)];
        if ring.seen <= ticket.index {
            let number = ring_number(self.direction, ticket.second);
            ring.look(Layout(&self.shared.memory).mark(number));
        }
        ring.seen > ticket.index
    }

    /// Whether another copy can be posted, whatever allocations it lies in.
    #[inline]
    pub fn has_room(&mut self) -> bool {
        let layout = Layout(&self.shared.memory);
        [false, true].into_iter().any(|second| {
            let mark = layout.mark(ring_number(self.direction, second));
            self.rings[usize::from(second)].has_room(mark, PIECES)
        })
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

    #[cfg(test)]
    pub(super) fn memory(&self) -> &pushgate_driver_shim::memory::SharedMemory {
        &self.shared.memory
    }

    /// The address and size of registered host memory that is the queue's own; short payloads pass through it.
    pub fn aside(&self) -> (usize, usize) {
        self.shared.aside(self.direction)
    }
}

fn ring_number(direction: Direction, second: bool) -> usize {
    2 * usize::from(direction == Direction::Pull) + usize::from(second)
}

impl Ring {
    /// Looks how far the copier is. A number that it can't have reached does not count.
    fn look(&mut self, mark: &AtomicU64) {
        // Acquire: what was pushed is read after this. The GPU stored the mark after the bytes (`hands.rs`).
        let mark = mark.load(Ordering::Acquire);
        if mark <= self.posted {
            self.seen = self.seen.max(mark);
        }
    }

    fn has_room(&mut self, mark: &AtomicU64, pieces: u64) -> bool {
        if self.posted - self.seen + pieces > SLOTS {
            self.look(mark);
        }
        self.posted - self.seen + pieces <= SLOTS
    }
}

impl fmt::Debug for CopyQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = &self.rings;
        write!(f, "CopyQueue({:?}, {}/{} and {}/{} done)", self.direction, a.seen, a.posted, b.seen, b.posted)
    }
}
