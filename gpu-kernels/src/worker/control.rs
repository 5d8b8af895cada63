//! The host memory that worker and host share: where its words lie, and what they say of the
//! worker's coming and going.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use pushgate_driver_shim::memory::SharedMemory;

use super::Direction;

pub(super) const COMMAND_WORDS: usize = 4;
pub(super) const LAP_SHIFT: u32 = 56;
pub(super) const RUNNING: u64 = 1;
pub(super) const LEAVING: u64 = 2;
pub(super) const LEFT: u64 = 3;
/// Pairs of words that a warp reads at once: the first holds the generations that are
/// to leave, the rest a stream with operations under way each.
pub(super) const LEASES: usize = 32;

/// Of the device's words, as kernels/worker.cu names them.
pub(super) const CLOSED_AT: usize = 6;
pub(super) const PASSED_AT: usize = 8;
pub(super) const FATES: usize = 256;

/// Where the words of host memory lie, in bytes. What the host writes and what the
/// device writes lie in lines apart, but for a lease, whose two words are looked at
/// by one load, and for `STAYS`, which the device sets and the host takes back.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) slots: usize,
    pub(super) pushers: usize,
    pub(super) pullers: usize,
}

impl Layout {
    pub(super) const STATE: usize = 0;
    /// Where the state of a kernel goes that is to die without a word (`fault`).
    pub(super) const UNHEARD: usize = 8;
    /// Not 0: a launch of a graph stays, and nothing is copied.
    pub(super) const STAYS: usize = 16;
    pub(super) const LEASES: usize = 64;
    pub(super) const QUIT: usize = Self::LEASES;
    /// Launches under way: leases whose `lease_done` is still to come.
    pub(super) const LAUNCHING: usize = Self::LEASES + 8;
    pub(super) const COUNTS: usize = Self::LEASES + LEASES * 16;

    /// How far the dispatcher has come with pulls whose bytes are in the command.
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

    /// Of device memory: cursors and the like (kernels/worker.cu), then the two mailboxes.
    pub(super) fn mailboxes(&self) -> usize {
        let copying = self.pushers + self.pullers;
        ((PASSED_AT + copying + 1 + copying + FATES + 1) * 8).next_multiple_of(256)
    }

    /// There, how many operations of graphs have ended.
    pub(super) const GRAPHS_CLOSED: u64 = CLOSED_AT as u64 * 8;
}

/// The host memory that worker and host share, and which generation was started.
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

    /// The last generation has left. False while one is on its way.
    pub(super) fn is_gone(&self) -> bool {
        self.last_is(&[LEFT])
    }

    /// The last generation has left, or has said that it will unless it sees
    /// something new at once.
    pub(super) fn may_be_gone(&self) -> bool {
        self.last_is(&[LEFT, LEAVING])
    }

    fn last_is(&self, phases: &[u64]) -> bool {
        // Acquire: who finds it gone may use what it used.
        let state = self.word(Layout::STATE).load(Ordering::Acquire);
        let launched = self.launched.load(Ordering::Relaxed);
        phases.iter().any(|phase| state == launched << 8 | phase)
    }

    /// Behind the store of a command or a lease: true if a generation must be
    /// started to see it.
    ///
    /// The fence orders that store before the load of the state; the worker's
    /// `fence_total` orders its store of "leaving" before its last look. In the one
    /// order of all such fences either ours comes first, and the worker's last look
    /// finds what we stored, or the worker's does, and we find it leaving. Both at once
    /// is possible and harmless: then a generation more is started, which stands
    /// behind the one that stayed, finds nothing to do and leaves.
    ///
    /// `launched` may be newer than the state. Then that generation's look is still
    /// to come, or came behind this fence: for had its "leaving" been stored before our
    /// fence, we would have read that.
    pub(super) fn announce(&self) -> bool {
        fence(Ordering::SeqCst);
        self.may_be_gone()
    }
}
