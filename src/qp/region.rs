//! Memory that is registered with a queue pair.

use std::fmt;
use std::sync::{Mutex, PoisonError, Weak};

use pushgate_engine::engine::QpId;

use crate::context::Context;
use crate::error::Result;

/// The key of a region: lkey and rkey in one.
pub type RegionKey = u32;

/// Memory that is registered with a queue pair: the peer may put into it, and WQEs of this end may name it.
///
/// Dropping the region deregisters the memory. A drop waits up to 2 s for messages out of the memory and copies into it; what a
/// program must know of that, [`Region::deregister`] tells. When the queue pair is dropped its regions end with it, and a
/// later drop of the region does nothing. Any thread may use or drop a region.
#[must_use = "dropping a region deregisters its memory"]
pub struct Region {
    context: Context,
    qp: QpId,
    key: RegionKey,
    bytes: u64,
    /// Gone with the queue pair.
    qp_lives: Weak<()>,
    registered: Mutex<bool>,
}

impl Region {
    pub(super) fn new(context: &Context, qp: QpId, key: RegionKey, bytes: u64, qp_lives: Weak<()>) -> Self {
        Region { context: context.clone(), qp, key, bytes, qp_lives, registered: Mutex::new(true) }
    }

    /// The region's key. The peer's messages name it as their rkey, this end's WQEs as their lkey.
    pub fn key(&self) -> RegionKey {
        self.key
    }

    /// The region's length in bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Never true: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether bytes go out of the region, and come into it from a region of the peer, without a copy
    /// ([`HostEnd::try_put_region`](crate::HostEnd::try_put_region)). False over `local`, and where the RDMA device could not register
    /// the memory, which the log says.
    pub fn is_direct(&self) -> Result<bool> {
        Ok(self.qp_lives.strong_count() > 0 && self.context.inner.proxy.is_registered(self.qp, self.key)?)
    }

    /// Deregisters the memory once nothing under way uses it any more. True if the memory is free now, also when it was so
    /// before the call.
    ///
    /// False if messages out of the region, or copies to it, did not end within 2 s: then the region stays registered, its
    /// memory must stay, and the call may be repeated.
    ///
    /// On a queue pair that has failed only copies are waited for. A peer on the same host may then
    /// read, for a moment longer, what lies where the region was, but shows none of it.
    pub fn deregister(&self) -> Result<bool> {
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        if *registered && self.qp_lives.strong_count() > 0 {
            *registered = !self.context.inner.proxy.remove_region(self.qp, self.key)?;
            return Ok(!*registered);
        }
        Ok(true)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // An error means that the engine is gone, or that this is a child of `fork`, which has no part in the region.
        if let Ok(false) = self.deregister() {
            tracing::error!(
                key = self.key,
                bytes = self.bytes,
                "a region is dropped while messages still use its memory: that stays registered to the queue pair's end"
            );
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region(key {:#x}, {} bytes)", self.key, self.bytes)
    }
}
