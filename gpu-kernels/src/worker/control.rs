//! The host memory that worker and host share: where its words lie.

use std::sync::atomic::AtomicU64;

use pushgate_driver_shim::memory::SharedMemory;

use super::flags::Flags;
use super::policy::Phase;

pub(super) const COMMAND_WORDS: usize = 4;
pub(super) const LAP_SHIFT: u32 = 56;
/// Pairs of words that a warp reads at once. The first holds the last generation that is to leave;
/// each other pair belongs to a stream with operations under way.
pub(super) const LEASES: usize = 32;

/// Indices of the device's words, as kernels/worker.cu names them.
pub(super) const CLOSED_AT: usize = 6;
pub(super) const PASSED_AT: usize = 8;
pub(super) const FATES: usize = 256;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device's memory to the host's.
    Push,
    /// From the host's memory to the device's.
    Pull,
}

/// Where the words of host memory lie, in bytes. Words that the host writes and words that the
/// device writes lie in separate cache lines, except for a lease, whose two words are read by one
/// load, and for `STAYS`, which the device sets and the host clears.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) slots: usize,
    pub(super) pushers: usize,
    pub(super) pullers: usize,
}

impl Layout {
    pub(super) const STATE: usize = 0;
    /// Where a kernel writes its state whose end is to stay unannounced (`fault`).
    pub(super) const UNHEARD: usize = 8;
    /// Not 0: a graph's launch stays although nothing is copied.
    pub(super) const STAYS: usize = 16;
    pub(super) const LEASES: usize = 64;
    pub(super) const QUIT: usize = Self::LEASES;
    /// How many launches are under way: leases for which `lease_done` has not been called yet.
    pub(super) const LAUNCHING: usize = Self::LEASES + 8;
    pub(super) const COUNTS: usize = Self::LEASES + LEASES * 16;

    /// The word with the number of pulls up to which the dispatcher has stored inline words.
    pub(super) fn inline_count(&self) -> usize {
        Self::COUNTS + (self.pushers + self.pullers) * 8
    }

    pub(super) fn ring(&self, direction: Direction) -> usize {
        let counts = ((self.pushers + self.pullers + 1) * 8).next_multiple_of(64);
        Self::COUNTS + counts + if direction == Direction::Pull { self.ring_bytes() } else { 0 }
    }

    pub(super) fn ring_bytes(&self) -> usize {
        self.slots * COMMAND_WORDS * 8
    }

    pub(super) fn bytes(&self) -> usize {
        self.ring(Direction::Pull) + self.ring_bytes()
    }

    /// Offset of the two mailboxes in device memory, after the cursors and other words
    /// (kernels/worker.cu).
    pub(super) fn mailboxes(&self) -> usize {
        let copying = self.pushers + self.pullers;
        ((PASSED_AT + copying + 1 + copying + FATES + 1) * 8).next_multiple_of(256)
    }

    /// Offset in device memory of the number of graphs' operations that have ended.
    pub(super) const GRAPHS_CLOSED: u64 = CLOSED_AT as u64 * 8;
}

/// The host memory that worker and host share, and the flags of this process that go with it.
pub(super) struct Control {
    pub(super) memory: SharedMemory,
    pub(super) layout: Layout,
    pub(super) flags: Flags,
}

impl Control {
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        &self.memory.words(offset, 1)[0]
    }

    /// How many commands each block has passed.
    pub(super) fn counts(&self, direction: Direction) -> &[AtomicU64] {
        let (first, n) = match direction {
            Direction::Push => (0, self.layout.pushers),
            Direction::Pull => (self.layout.pushers, self.layout.pullers),
        };
        self.memory.words(Layout::COUNTS + first * 8, n)
    }

    /// The phase of the last generation ([`Flags::phase`]).
    pub(super) fn phase(&self) -> Phase {
        self.flags.phase(self.word(Layout::STATE))
    }

    /// Whether a generation must be started to see what was stored before the call
    /// ([`Flags::announce`]).
    pub(super) fn announce(&self) -> bool {
        self.flags.announce(self.word(Layout::STATE))
    }
}
