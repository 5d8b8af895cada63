//! The producer's end of a worker's rings: copies are posted here and asked for their completion.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::control::{COMMAND_WORDS, Direction, LAP_SHIFT};
use super::shared::Shared;
use crate::error::Result;

/// Why a command could not be posted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// As many copies are under way as the ring holds. Nothing was posted.
    #[error("{slots} copies are under way, as many as the ring holds; wait for one of them")]
    Full {
        /// How many commands the ring holds.
        slots: u32,
    },
    /// A number does not fit into a command.
    #[error("{what} {value:#x} does not fit into 56 bits; no memory of this process lies there")]
    Range {
        /// Which number.
        what: &'static str,
        /// The number itself.
        value: u64,
    },
    /// The worker's kernel has died or can't be started: no copy of this worker completes any more.
    #[error("the worker is lost: {reason}; drop it and make another")]
    Lost {
        /// Why the worker is lost.
        reason: String,
    },
}

/// A copy that was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the copy is complete when WorkerQueue::done says so"]
pub struct Ticket {
    pub(super) direction: Direction,
    pub(super) index: u64,
    /// The blocks that copy it: the first and how many; no blocks for a copy by the dispatcher.
    first: u32,
    blocks: u32,
}

#[derive(Default)]
pub(super) struct Ring {
    posted: u64,
    /// Commands passed by all blocks, as last seen.
    passed: u64,
    /// The block with which the next command begins.
    block: u32,
    /// Commands up to and including the last one that carries its bytes.
    inline: u64,
}

/// The producer's end of a worker's rings, one ring for each direction. It belongs to one thread at
/// a time, calls no driver, takes no lock and allocates nothing.
pub struct WorkerQueue {
    pub(super) rings: [Ring; 2],
    pub(super) shared: Arc<Shared>,
}

impl WorkerQueue {
    /// Posts a copy of `len` bytes between `device_addr` and `host_addr`. `host_addr` is the host
    /// memory's address on the device ([`crate::Registration::device_addr`]). Copies run side by
    /// side: a later copy may be complete before an earlier one.
    ///
    /// A pull reads what this thread wrote to the host memory before the call. A push reads what a
    /// kernel wrote to device memory before this thread saw a flag of that kernel.
    ///
    /// # Safety
    /// Both ranges are memory that the device may use in this direction, and stay so until
    /// [`WorkerQueue::done`] has returned true for the ticket. Meanwhile nothing else writes the
    /// source or touches the destination.
    pub unsafe fn post(
        &mut self,
        direction: Direction,
        device_addr: u64,
        host_addr: u64,
        len: usize,
    ) -> Result<Ticket, PostError> {
        self.health()?;
        let len = len as u64;
        for (what, value) in [
            ("device address", device_addr.saturating_add(len)),
            ("host address", host_addr.saturating_add(len)),
            ("length", len),
        ] {
            if value >> LAP_SHIFT != 0 {
                return Err(PostError::Range { what, value });
            }
        }
        self.make_room(direction)?;
        let options = &self.shared.options;
        let all = match direction {
            Direction::Push => options.pushers,
            Direction::Pull => options.pullers,
        };
        // Among how many of the blocks the copies of this kind take turns, how many share one copy, and in which slices.
        let (most, share, slice) = match direction {
            Direction::Push if len > u64::from(options.bulk) && self.pulls_under_way() => {
                let most = all.min(options.pushers_beside_pulls);
                (most, most, options.push_slice)
            }
            Direction::Push => (all, all, options.push_slice),
            Direction::Pull if len <= u64::from(options.short_pull) => {
                (all.div_ceil(2), all.div_ceil(4), options.short_pull_slice)
            }
            Direction::Pull => (all, all, options.pull_slice),
        };
        let ring = &mut self.rings[direction as usize];
        let blocks = len.div_ceil(u64::from(slice)).clamp(1, u64::from(share)) as u32;
        // If not all blocks are to copy, the first ones do, without wrapping around.
        let first = if most < all && ring.block + blocks > most { 0 } else { ring.block };
        let place = u64::from(first) | u64::from(blocks) << 16;
        ring.block = (first + blocks) % most;
        let index = self.publish(direction, [device_addr, host_addr, len, place]);
        Ok(Ticket { direction, index, first, blocks })
    }

    /// Posts a pull of one or two words that travel in the command itself: no block handles the
    /// command, and none reads the words over the bus.
    ///
    /// # Panics
    /// If there is no word or more than two, or if `device_addr` is not a multiple of 8.
    ///
    /// # Safety
    /// The requirements of [`WorkerQueue::post`] hold for the device's memory.
    pub unsafe fn post_inline(&mut self, device_addr: u64, words: &[u64]) -> Result<Ticket, PostError> {
        assert!((1..=2).contains(&words.len()), "{} words", words.len());
        assert!(device_addr.is_multiple_of(8), "device address {device_addr:#x}");
        self.health()?;
        if device_addr.saturating_add(16) >> LAP_SHIFT != 0 {
            return Err(PostError::Range { what: "device address", value: device_addr });
        }
        self.make_room(Direction::Pull)?;
        let (one, two) = (words[0], words.get(1).copied().unwrap_or(0));
        let low = (1 << LAP_SHIFT) - 1;
        // A command without blocks; kernels/worker.cu has the layout.
        let rest = one >> LAP_SHIFT | two >> LAP_SHIFT << 8 | (words.len() as u64) << 32;
        let index = self.publish(Direction::Pull, [device_addr, one & low, two & low, rest]);
        self.rings[Direction::Pull as usize].inline = index + 1;
        Ok(Ticket { direction: Direction::Pull, index, first: 0, blocks: 0 })
    }

    fn make_room(&mut self, direction: Direction) -> Result<(), PostError> {
        let slots = u64::from(self.shared.options.slots);
        let Ring { posted, passed, .. } = self.rings[direction as usize];
        // A slot is written again only when every block has passed its last command.
        if posted - passed >= slots && posted - self.passed(direction) >= slots {
            return Err(PostError::Full { slots: slots as u32 });
        }
        Ok(())
    }

    /// Writes a command, for which there must be room, and wakes the worker; returns the command's
    /// index.
    fn publish(&mut self, direction: Direction, command: [u64; COMMAND_WORDS]) -> u64 {
        let index = self.write(direction, command);
        if self.shared.control.announce() {
            self.shared.summon();
        }
        index
    }

    /// Writes a command without waking the worker; returns the command's index.
    pub(super) fn write(&mut self, direction: Direction, command: [u64; COMMAND_WORDS]) -> u64 {
        let options = &self.shared.options;
        let slots = u64::from(options.slots);
        let index = self.rings[direction as usize].posted;
        self.rings[direction as usize].posted += 1;
        // Relaxed: used only to guess how many blocks should push, and whether a command was
        // forgotten.
        self.shared.posted[direction as usize].store(index + 1, Ordering::Relaxed);
        let lap = (index >> options.slots.trailing_zeros()).wrapping_add(1) << LAP_SHIFT;
        let control = &self.shared.control;
        let at = control.layout.ring(direction) + (index & (slots - 1)) as usize * COMMAND_WORDS * 8;
        let words = control.memory.words(at, COMMAND_WORDS);
        // Each word carries its lap, so the order of the words does not matter to the reader (P2).
        // Release: everything that this thread wrote before (the payload of a pull) or acquired
        // before (a kernel's flag that a push's payload is there) is ordered before each word.
        for (word, data) in words.iter().zip(command) {
            word.store(data | lap, Ordering::Release);
        }
        index
    }

    /// Whether the copy is complete. After true, the host memory of a push can be read, and a
    /// kernel that sees a flag which the host writes from now on reads the device memory of a pull
    /// as copied (P3).
    pub fn done(&mut self, ticket: Ticket) -> bool {
        if ticket.index < self.rings[ticket.direction as usize].passed {
            return true;
        }
        if ticket.blocks == 0 {
            return self.inlined() > ticket.index;
        }
        // Only the blocks that copy: the others pass the command when they come to it.
        let counts = self.shared.control.counts(ticket.direction);
        // Acquire: what each block stored is ordered before its count.
        (0..ticket.blocks as usize).all(|i| {
            counts[(ticket.first as usize + i) % counts.len()].load(Ordering::Acquire) > ticket.index
        })
    }

    fn pulls_under_way(&self) -> bool {
        let posted = self.shared.posted[Direction::Pull as usize].load(Ordering::Relaxed);
        self.shared.control.counts(Direction::Pull).iter().any(|count| count.load(Ordering::Relaxed) < posted)
    }

    /// How many copies of a direction are complete with all copies before them.
    pub fn passed(&mut self, direction: Direction) -> u64 {
        let counts = self.shared.control.counts(direction);
        // Acquire: what each block stored is ordered before its count, as in `done`.
        let passed = counts.iter().map(|count| count.load(Ordering::Acquire)).min().unwrap_or(0);
        let inline = self.rings[direction as usize].inline;
        // A block passes commands that the dispatcher stores without looking at them. So up to the
        // last such command, the dispatcher's word limits the count too. Copies between that word
        // and the next such command are counted later, together with that command.
        let passed = match inline > self.rings[direction as usize].passed {
            true => passed.min(Some(self.inlined()).filter(|n| *n < inline).unwrap_or(u64::MAX)),
            false => passed,
        };
        let ring = &mut self.rings[direction as usize];
        ring.passed = passed.min(ring.posted).max(ring.passed);
        ring.passed
    }

    /// How many commands, from the first, have their inline bytes stored.
    fn inlined(&self) -> u64 {
        let control = &self.shared.control;
        // Acquire: the dispatcher's stores are ordered before its word, as in `done`.
        control.word(control.layout.inline_count()).load(Ordering::Acquire)
    }

    /// Fails with the cause if no copy completes any more ([`crate::Worker::lost`]).
    pub fn health(&self) -> Result<(), PostError> {
        if let Err(forked) = self.shared.owner.check() {
            return Err(PostError::Lost { reason: forked.to_string() });
        }
        if let Some(lost) = self.shared.lost.get() {
            return Err(PostError::Lost { reason: lost.reason.clone() });
        }
        if self.shared.control.flags.is_stopping() {
            return Err(PostError::Lost { reason: "it was dropped".to_owned() });
        }
        Ok(())
    }
}

/// One direction of a worker's queue, for a thread of its own.
#[derive(Debug)]
pub struct OneWay {
    queue: WorkerQueue,
    pub(super) direction: Direction,
}

impl WorkerQueue {
    /// Splits the queue into its two directions, pushes first: the two rings share nothing.
    pub fn split(self) -> [OneWay; 2] {
        let WorkerQueue { rings: [push, pull], shared } = self;
        let half = |rings| WorkerQueue { rings, shared: shared.clone() };
        [
            OneWay { queue: half([push, Ring::default()]), direction: Direction::Push },
            OneWay { queue: half([Ring::default(), pull]), direction: Direction::Pull },
        ]
    }
}

impl OneWay {
    /// The direction of this half.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Posts a copy ([`WorkerQueue::post`]).
    ///
    /// # Safety
    /// The requirements of [`WorkerQueue::post`] hold.
    pub unsafe fn post(&mut self, device_addr: u64, host_addr: u64, len: usize) -> Result<Ticket, PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.queue.post(self.direction, device_addr, host_addr, len) }
    }

    /// Posts a pull of one or two words ([`WorkerQueue::post_inline`]).
    ///
    /// # Panics
    /// If [`WorkerQueue::post_inline`] would, and if this is the direction of pushes.
    ///
    /// # Safety
    /// The requirements of [`WorkerQueue::post_inline`] hold.
    pub unsafe fn post_inline(&mut self, device_addr: u64, words: &[u64]) -> Result<Ticket, PostError> {
        assert_eq!(self.direction, Direction::Pull);
        // SAFETY: the caller's promise.
        unsafe { self.queue.post_inline(device_addr, words) }
    }

    /// Whether the copy is complete ([`WorkerQueue::done`]).
    pub fn done(&mut self, ticket: Ticket) -> bool {
        self.queue.done(ticket)
    }

    /// How many copies are complete with all copies before them ([`WorkerQueue::passed`]).
    pub fn passed(&mut self) -> u64 {
        self.queue.passed(self.direction)
    }

    /// Whether the ring takes another command now.
    pub fn has_room(&mut self) -> bool {
        let slots = u64::from(self.queue.shared.options.slots);
        let ring = &self.queue.rings[self.direction as usize];
        let (posted, passed) = (ring.posted, ring.passed);
        posted - passed < slots || posted - self.passed() < slots
    }

    /// Fails with the cause if no copy completes any more ([`WorkerQueue::health`]).
    pub fn health(&self) -> Result<(), PostError> {
        self.queue.health()
    }
}

impl fmt::Debug for WorkerQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [push, pull] = &self.rings;
        write!(
            f,
            "WorkerQueue(push {} of {}, pull {} of {})",
            push.passed, push.posted, pull.passed, pull.posted
        )
    }
}
