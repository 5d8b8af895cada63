//! A window: the memory that a device pushes payload into and that a queue pair
//! sends it from.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// A payload window, whoever provides it.
///
/// The device writes payload into it with posted writes, in units of
/// [`PUSHGATE_UNIT`](crate::abi::PUSHGATE_UNIT) bytes, and never reads it; the
/// queue pair sends from it in place. It is payload from its first byte: it has
/// no header, and WQEs and control words lie elsewhere.
///
/// The mapping lives as long as the value, and address and length never change.
/// All calls may be made from any thread at any time; who may touch which byte
/// when is the business of the credits, not of this trait.
// A window is never empty.
#[allow(clippy::len_without_is_empty)]
pub trait Window: Send + Sync {
    /// The provider, as in settings and logs: `memory` for shared memory.
    fn kind(&self) -> &'static str;

    /// Bytes; never 0.
    fn len(&self) -> usize;

    /// Where this process has it mapped, page aligned. Devices, queue pairs and
    /// other processes write and read behind this address, so no `&[u8]` or
    /// `&mut [u8]` may ever be made over it.
    fn as_ptr(&self) -> NonNull<u8>;

    /// What another process maps to see the same memory.
    fn fd(&self) -> BorrowedFd<'_>;

    /// True if the memory is known to lie in 2 MiB pages.
    fn huge_pages(&self) -> bool;

    /// True if this is a device's memory (a BAR): a CPU's reads of it are slow
    /// and uncached, and a GPU must register it as IOMEMORY.
    fn io_memory(&self) -> bool {
        false
    }

    /// As many bytes of ordinary memory beside it, mapped as long as the value, for
    /// transports that can't send from the window itself.
    fn stage(&self) -> Option<NonNull<u8>> {
        None
    }

    /// A dma-buf of it, for RDMA devices that can't register the mapping itself.
    /// `None` where there is none, or no need for one.
    fn export(&self) -> Option<OwnedFd> {
        None
    }
}
