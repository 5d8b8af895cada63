//! Protection domains, and the regions that queue pairs of one domain have in common.
//!
//! A queue pair has a domain of its own, so a peer's keys reach nothing of another queue pair (P8). Queue pairs whose peers belong
//! together ([`Config::shares_domain`](super::config::Config::shares_domain)) share one for each device: memory that all of them
//! use is pinned once, counts once as locked, and is once in the device's tables.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pushgate_rdma_core_sys as sys;

use super::VerbsError;
use super::device::Device;
use super::next::{Region, Registration};
use super::objects::{Mr, failed};

/// A protection domain: what is registered in one can't be reached through a queue pair of another.
pub(super) struct Pd {
    pub(super) device: Arc<Device>,
    pub(super) raw: NonNull<sys::ibv_pd>,
    /// Of a domain that queue pairs share.
    shared: Option<Mutex<Shared>>,
}

/// What a region is, for all queue pairs of a process: address as the device names it with the flags of the region's entry, bytes,
/// whether peers may write it. The program keeps the memory there until every queue pair has removed the region.
type Place = ((u64, u64), u64, bool);

/// A region's registration as long as a link has it. Locked by who registers it.
type Slot = Arc<Mutex<Weak<Mr>>>;

#[derive(Default)]
struct Shared {
    regions: HashMap<Place, Slot>,
    /// Places from which those that nobody has any more are taken out.
    many: usize,
}

impl Shared {
    fn slot(&mut self, place: Place) -> Slot {
        if self.regions.len() >= self.many {
            self.regions.retain(|_, slot| {
                // One that is being registered is in use.
                slot.try_lock().map_or(true, |mr| mr.strong_count() > 0)
            });
            self.many = 2 * self.regions.len() + 16;
        }
        self.regions.entry(place).or_default().clone()
    }
}

// SAFETY: libibverbs' calls on its objects are thread-safe (rdma-core, "Thread
// Safe" of verbs(7)); nothing here is tied to the thread that made it.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// A domain for one queue pair.
    pub(super) fn new(device: &Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        Self::made(device, None)
    }

    /// The domain of this device that queue pairs share.
    pub(super) fn shared(device: &Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        let mut there = device.shared_domain.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pd) = there.upgrade() {
            return Ok(pd);
        }
        let pd = Self::made(device, Some(Mutex::default()))?;
        *there = Arc::downgrade(&pd);
        Ok(pd)
    }

    fn made(device: &Arc<Device>, shared: Option<Mutex<Shared>>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open as long as `device` lives.
        let raw = unsafe { device.verbs.ibv_alloc_pd(device.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("a protection domain", ""))?;
        Ok(Arc::new(Pd { device: device.clone(), raw, shared }))
    }

    /// The registration of a region in this domain: that of another queue pair, if the domain is shared and one has it. `written`:
    /// peers may write there. Waits while another thread registers the same region.
    pub(super) fn register(self: &Arc<Self>, region: &Region, written: bool) -> Registration {
        let register = || Ok(region.register(self, written)?.map(Arc::new));
        let Some(shared) = &self.shared else { return register() };
        let place = (region.place(), region.bytes, written);
        let slot = shared.lock().unwrap_or_else(PoisonError::into_inner).slot(place);
        let mut there = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mr) = there.upgrade() {
            return Ok(Some(mr));
        }
        let registered = register()?;
        *there = registered.as_ref().map_or_else(Weak::new, Arc::downgrade);
        Ok(registered)
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        if !self.device.owner.is_here() {
            return;
        }
        // SAFETY: made in `made`, and nothing refers to it any more: regions and
        // queue pairs hold this.
        unsafe { self.device.verbs.ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}
