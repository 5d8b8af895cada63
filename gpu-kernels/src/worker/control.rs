//! The host memory that worker and host share: where its words lie, and how they say whether the
//! worker is present.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use pushgate_driver_shim::memory::SharedMemory;

use super::Direction;

pub(super) const COMMAND_WORDS: usize = 4;
pub(super) const LAP_SHIFT: u32 = 56;
pub(super) const RUNNING: u64 = 1;
pub(super) const LEAVING: u64 = 2;
pub(super) const LEFT: u64 = 3;
/// Pairs of words that a warp reads at once. The first holds the last generation that is to leave;
/// each other pair belongs to a stream with operations under way.
pub(super) const LEASES: usize = 32;

/// Indices of the device's words, as kernels/worker.cu names them.
pub(super) const CLOSED_AT: usize = 6;
pub(super) const PASSED_AT: usize = 8;
pub(super) const FATES: usize = 256;

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

/// The host memory that worker and host share, and the number of the last generation started.
pub(super) struct Control {
    pub(super) memory: SharedMemory,
    pub(super) layout: Layout,
    /// Generations started so far: the kernel's launches are numbered from 1.
    pub(super) launched: AtomicU64,
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

    /// Whether the last generation has left. False while a generation is about to start.
    pub(super) fn is_gone(&self) -> bool {
        self.last_is(&[LEFT])
    }

    /// Whether the last generation has left, or has said that it leaves unless it sees something
    /// new at once.
    pub(super) fn may_be_gone(&self) -> bool {
        self.last_is(&[LEFT, LEAVING])
    }

    fn last_is(&self, phases: &[u64]) -> bool {
        // Acquire: a thread that finds the worker gone may use the memory that the worker used.
        let state = self.word(Layout::STATE).load(Ordering::Acquire);
        let launched = self.launched.load(Ordering::Relaxed);
        phases.iter().any(|phase| state == launched << 8 | phase)
    }

    /// Called after storing a command or a lease: true if a generation must be started to see it.
    ///
    /// The fence orders that store before the load of the state; the worker's `fence_total` orders
    /// its store of "leaving" before its last look. All such fences have one order. If ours comes
    /// first, the worker's last look finds what we stored; if the worker's comes first, we find it
    /// leaving. Both can happen at once, which is harmless: one more generation is started, runs
    /// after the one that stayed, finds nothing to do and leaves.
    ///
    /// `launched` may be newer than the state. Then the last look of that generation is still to
    /// come, or came after this fence: if its "leaving" had been stored before our fence, we would
    /// have read it.
    pub(super) fn announce(&self) -> bool {
        fence(Ordering::SeqCst);
        self.may_be_gone()
    }
}
