//! What a coll comm works with: its rank, its lane, what makes its queue pairs, and its registrations.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};

use super::memory::Memories;
use super::requests::Cause;
use crate::handle;
use crate::handshake::{Attempts, Listener};
use crate::join::Purpose;
use crate::lane::Lane;
use crate::runtime::Runtime;

/// Bytes of a coll comm's windows together, in bytes of the setting: 48 MiB by default.
const ALL: u64 = 12;
/// Bytes of a window in bytes of the setting, at most.
const MOST: u64 = 4;
/// Bytes of a window at most, as the setting's own limit.
const LONGEST: u64 = 512 << 20;
/// Bytes of a window, below which messages of one copy would be short, unless the setting says less.
const LEAST: u64 = 64 << 10;

/// Bytes of the window to each of the other ranks: of few ranks four times `setting`, because longer windows allow longer copies by the
/// GPU, up to a quarter of the window each, and so fewer fences. Of more ranks less, so that what a rank holds does not grow
/// with their number: what is under way at once is spread over them too.
fn window_size(setting: u64, ranks: u32) -> u64 {
    let share = setting.saturating_mul(ALL) / u64::from(ranks.max(2) - 1);
    let share = share.checked_ilog2().map_or(0, |log| 1 << log);
    share.min(setting.saturating_mul(MOST)).min(LONGEST).max(setting.min(LEAST))
}

/// The traffic class of a coll comm before a context names one.
const UNSET: i32 = -1;

/// What all operations of a coll comm use. Any thread may.
pub struct Means {
    pub runtime: Arc<Runtime>,
    pub attempts: Arc<Attempts>,
    pub lane: Arc<Lane>,
    pub listener: Arc<Listener>,
    pub rank: u32,
    pub ranks: u32,
    pub handles: Box<[[u8; handle::BYTES]]>,
    pub memories: Memories,
    class: AtomicI32,
    failed: OnceLock<Cause>,
}

impl Means {
    /// What rank `rank` of the ranks with these handles works with. `runtime`, `attempts`, `listener` make its queue pairs, which
    /// `lane` carries.
    pub fn new(
        (runtime, attempts): (Arc<Runtime>, Arc<Attempts>),
        lane: Arc<Lane>,
        listener: Arc<Listener>,
        handles: Box<[[u8; handle::BYTES]]>,
        (rank, ranks): (u32, u32),
    ) -> Self {
        let (memories, class, failed) = (Memories::default(), AtomicI32::new(UNSET), OnceLock::new());
        Means { runtime, attempts, lane, listener, rank, ranks, handles, memories, class, failed }
    }

    /// The traffic class of the coll comm's queue pairs.
    pub fn class(&self) -> Option<u8> {
        // Relaxed: a number that orders nothing.
        u8::try_from(self.class.load(Ordering::Relaxed)).ok()
    }

    /// What the coll comm's queue pairs are for.
    pub fn purpose(&self) -> Purpose {
        let window = window_size(self.runtime.loaded.settings.net_window_size, self.ranks);
        Purpose::Rma { lane: self.lane.clone(), window }
    }

    /// Something has failed: NCCL is told when it asks.
    pub fn failed(&self, cause: &Cause) {
        let _ = self.failed.set(cause.clone());
    }

    /// Sets the traffic class, if no context has set one before.
    pub fn set_class(&self, class: i32) {
        // Relaxed: a number that orders nothing.
        let _ = self.class.compare_exchange(UNSET, class, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The first failure, if something has failed.
    pub fn failure(&self) -> Option<&Cause> {
        self.failed.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_shorter_the_more_ranks_there_are_and_no_shorter_than_a_copy_needs() {
        const SETTING: u64 = 4 << 20;
        for (ranks, window) in
            [(1, 16 << 20), (4, 16 << 20), (5, 8 << 20), (17, 2 << 20), (65, 512 << 10), (1024, 64 << 10)]
        {
            assert_eq!(window_size(SETTING, ranks), window, "{ranks} ranks");
        }
        assert_eq!((window_size(512 << 20, 2), window_size(64 << 10, 2)), (512 << 20, 256 << 10));
        assert_eq!((window_size(64 << 10, 1024), window_size(4096, 1024)), (64 << 10, 4096));
    }
}
