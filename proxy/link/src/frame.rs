//! Frames that the two ends of a queue pair send each other beside their links: bytes and descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pushgate_driver_shim::memory::is_memory;

/// A frame between two ends: bytes and descriptors.
pub type Frame = pushgate_core::connect::Frame<Fds>;

/// The descriptors of a frame. A copy shares them.
#[derive(Clone, Debug, Default)]
pub struct Fds(Arc<Vec<OwnedFd>>);

impl Fds {
    /// The descriptors, in their order.
    pub fn borrow(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(|fd| fd.as_fd()).collect()
    }

    /// How many descriptors there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no descriptors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The descriptors as the caller's own. Duplicates those that a copy shares.
    pub fn into_owned(self) -> io::Result<Vec<OwnedFd>> {
        Arc::try_unwrap(self.0).or_else(|shared| shared.iter().map(OwnedFd::try_clone).collect())
    }

    /// Whether each descriptor is shared memory ([`are_memory`]).
    pub fn are_memory(&self) -> bool {
        are_memory(&self.0)
    }
}

/// Whether each descriptor is shared memory. An engine, which must not wait, may close such a descriptor; the last close of
/// other files may take as long as a peer likes.
pub fn are_memory(fds: &[OwnedFd]) -> bool {
    fds.iter().all(|fd| is_memory(fd.as_fd()))
}

impl From<Vec<OwnedFd>> for Fds {
    fn from(fds: Vec<OwnedFd>) -> Self {
        Fds(Arc::new(fds))
    }
}
