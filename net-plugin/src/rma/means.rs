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

/// The most bytes of a coll comm's windows together with which they are longer than the settings say.
const WINDOWS: u64 = 256 << 20;

/// Bytes of the window to each of the other ranks: four times `setting`, unless all windows together would then exceed [`WINDOWS`].
/// Longer windows allow longer copies by the GPU, up to a quarter of the window each, and so fewer fences.
fn window_size(setting: u64, ranks: u32) -> u64 {
    let longer = setting.saturating_mul(4);
    let all = longer.saturating_mul(u64::from(ranks.max(2) - 1));
    if all <= WINDOWS { longer } else { setting }
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
    fn windows_are_longer_as_long_as_all_of_them_are_few_bytes() {
        let cases = [((4 << 20, 1), 16 << 20), ((4 << 20, 17), 16 << 20), ((4 << 20, 18), 4 << 20)];
        for ((setting, ranks), window) in cases {
            assert_eq!(window_size(setting, ranks), window, "{ranks} ranks");
        }
        assert_eq!((window_size(512 << 20, 2), window_size(64 << 10, 1024)), (512 << 20, 256 << 10));
    }
}
