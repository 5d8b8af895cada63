//! What a work request reads and where it writes.

/// An address at the peer, with its key.
#[derive(Clone, Copy)]
pub(super) struct Remote {
    pub(super) address: u64,
    pub(super) key: u32,
}

/// A scatter/gather element: a stretch of this end's registered memory.
#[derive(Clone, Copy)]
pub(super) struct Sge {
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) key: u32,
    /// Whether libibverbs may read it as it posts, and send it inline. Only a link's own host memory may be read so: a window or a region
    /// may be a GPU's, at whose addresses the CPU finds nothing, or a device's, whose bytes only the device's own read orders.
    pub(super) own: bool,
}
