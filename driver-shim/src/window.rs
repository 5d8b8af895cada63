//! The trait [`Window`]: memory into which a device pushes payload and from which a queue pair
//! sends it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

/// A payload window of any provider.
///
/// The device writes payload into the window with posted writes, in units of
/// [`PUSHGATE_UNIT`](crate::abi::PUSHGATE_UNIT) bytes, and never reads it; the queue pair sends
/// from it in place. The window is payload from its first byte: it has no header, and WQEs and
/// control words lie elsewhere.
///
/// The mapping lives as long as the value, and address and length never change. All calls may be
/// made from any thread at any time. Credits, not this trait, decide who may access which byte
/// when.
///
// There is no `is_empty`: a window is never empty.
#[allow(clippy::len_without_is_empty)]
pub trait Window: Send + Sync {
    /// The provider's name in settings and logs: `memory` for shared memory.
    fn kind(&self) -> &'static str;

    /// Length in bytes; never 0.
    fn len(&self) -> usize;

    /// The address of this process's mapping, page aligned. Devices, queue pairs and other
    /// processes write and read there, so no `&[u8]` or `&mut [u8]` may ever be made over it.
    fn as_ptr(&self) -> NonNull<u8>;

    /// The descriptor that another process maps to see the same memory.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Whether the memory is known to lie in 2 MiB pages.
    fn huge_pages(&self) -> bool;

    /// Whether the window is a device's memory (a BAR): a CPU's reads of it are slow and uncached,
    /// and a GPU must register it as IOMEMORY.
    fn io_memory(&self) -> bool {
        false
    }

    /// Ordinary memory of as many bytes as the window has, mapped as long as the value, for
    /// transports that can't send from the window itself.
    fn stage(&self) -> Option<NonNull<u8>> {
        None
    }

    /// A dma-buf that holds the window, and the byte in it where the window begins, for RDMA
    /// devices that can't register the mapping itself. `None` if there is no dma-buf, or no need
    /// for one.
    fn export(&self) -> Option<(OwnedFd, u64)> {
        None
    }

    /// Where the window begins in its provider: for a slice, its offset in the BAR.
    fn offset(&self) -> u64 {
        0
    }

    /// The name by which a process of the same user takes over the window after this process was
    /// killed. `None` if the window goes with its process.
    fn name(&self) -> Option<&str> {
        None
    }

    /// The interrupt by which devices that write into the window wake the thread that waits for
    /// them. `None` if they have none; an error if they have one that could not be used.
    fn interrupt(&self) -> io::Result<Option<Box<dyn Interrupt>>> {
        Ok(None)
    }
}

/// The doorbell of a window whose device can interrupt. Used by one thread.
///
/// Devices ring whenever they have published something and never check whether anyone sleeps, which
/// would cost a read over the bus. Rings are counted, and wake a thread only between
/// [`Interrupt::arm`] and [`Interrupt::disarm`].
pub trait Interrupt: Send {
    /// Arms the interrupt: the next ring makes [`Interrupt::fd`] readable. False, with nothing
    /// armed, if there were rings since the last call of `arm` or `disarm`: then first look for
    /// what they announced.
    fn arm(&mut self) -> bool;

    /// Disarms the interrupt: from now on rings are only counted. True if one woke.
    fn disarm(&mut self) -> bool;

    /// The descriptor that becomes readable.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// A stretch of a window in whole pages, in which a segment lies. It keeps the window alive.
#[derive(Clone)]
pub struct Piece {
    window: Arc<dyn Window>,
    offset: usize,
    bytes: usize,
}

/// A stretch of a window that does not keep the window alive.
#[derive(Clone)]
pub struct WeakPiece {
    window: Weak<dyn Window>,
    offset: usize,
    bytes: usize,
}

impl Piece {
    /// A piece that is all of a window.
    pub fn whole(window: Arc<dyn Window>) -> Self {
        let bytes = window.len();
        Piece { window, offset: 0, bytes }
    }

    /// A piece of `bytes` from byte `offset` on.
    ///
    /// # Panics
    /// If the piece reaches beyond the window, or does not begin on a page.
    pub fn part(window: &Arc<dyn Window>, offset: usize, bytes: usize) -> Self {
        assert!(offset.is_multiple_of(4096) && offset.checked_add(bytes).is_some_and(|e| e <= window.len()));
        Piece { window: window.clone(), offset, bytes }
    }

    /// `n` words from byte `offset` of the piece, as atomics.
    ///
    /// # Panics
    /// If the words do not lie within the piece, or the offset is not a multiple of 8.
    pub fn words(&self, offset: usize, n: usize) -> &[AtomicU64] {
        let end = n.checked_mul(8).and_then(|b| b.checked_add(offset));
        assert!(offset.is_multiple_of(8) && end.is_some_and(|end| end <= self.bytes));
        // SAFETY: the words lie in the window's mapping, which lives as long as `self`, and are
        // aligned because the piece begins on a page. Other processes and devices change them
        // meanwhile, which atomics allow.
        unsafe { std::slice::from_raw_parts(self.as_ptr().as_ptr().add(offset).cast(), n) }
    }

    /// The offset of the piece in the window.
    pub fn begin(&self) -> usize {
        self.offset
    }

    /// A piece of `bytes` that begins where this piece does.
    ///
    /// # Panics
    /// If the piece reaches beyond the window.
    pub fn beginning(&self, bytes: usize) -> Self {
        Piece::part(&self.window, self.offset, bytes)
    }

    /// A reference to the piece that does not keep the window alive.
    pub fn downgrade(&self) -> WeakPiece {
        WeakPiece { window: Arc::downgrade(&self.window), offset: self.offset, bytes: self.bytes }
    }
}

impl WeakPiece {
    /// The piece, if its window still exists.
    pub fn upgrade(&self) -> Option<Piece> {
        let window = self.window.upgrade()?;
        Some(Piece { window, offset: self.offset, bytes: self.bytes })
    }

    /// Whether the window of the piece still exists.
    pub fn is_alive(&self) -> bool {
        self.window.strong_count() > 0
    }
}

impl Window for Piece {
    fn kind(&self) -> &'static str {
        self.window.kind()
    }

    fn len(&self) -> usize {
        self.bytes
    }

    fn as_ptr(&self) -> NonNull<u8> {
        // SAFETY: the piece lies within the window.
        unsafe { self.window.as_ptr().add(self.offset) }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.window.fd()
    }

    fn huge_pages(&self) -> bool {
        self.window.huge_pages()
    }

    fn io_memory(&self) -> bool {
        self.window.io_memory()
    }

    fn stage(&self) -> Option<NonNull<u8>> {
        // SAFETY: the stage is as long as the window.
        self.window.stage().map(|at| unsafe { at.add(self.offset) })
    }

    fn export(&self) -> Option<(OwnedFd, u64)> {
        self.window.export().map(|(fd, at)| (fd, at + self.offset as u64))
    }

    fn offset(&self) -> u64 {
        self.window.offset() + self.offset as u64
    }

    fn name(&self) -> Option<&str> {
        self.window.name()
    }

    fn interrupt(&self) -> io::Result<Option<Box<dyn Interrupt>>> {
        self.window.interrupt()
    }
}

impl std::fmt::Debug for Piece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Piece({}, {} + {})", self.kind(), self.offset, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::SharedMemory;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_piece_is_its_part_of_the_window_and_keeps_it() {
        let window: Arc<dyn Window> = Arc::new(SharedMemory::builder("window", 3 * 4096).create().unwrap());
        let (all, piece) = (Piece::whole(window.clone()), Piece::part(&window, 4096, 4096));
        piece.words(8, 1)[0].store(7, Ordering::Relaxed);
        assert_eq!(all.words(4096 + 8, 1)[0].load(Ordering::Relaxed), 7);
        assert_eq!((piece.len(), piece.offset(), piece.begin()), (4096, 4096, 4096));
        for (offset, n) in [(4096, 1), (8, 512), (1, 1), (0, usize::MAX)] {
            let words = std::panic::AssertUnwindSafe(|| piece.words(offset, n).len());
            let wrong = std::panic::catch_unwind(words);
            assert!(wrong.is_err(), "{n} words from {offset}");
        }
        let weak = piece.downgrade();
        drop((window, all));
        assert!(weak.is_alive() && weak.upgrade().is_some());
        drop(piece);
        assert!(!weak.is_alive() && weak.upgrade().is_none());
    }
}
