//! Shared mappings as the engine uses them: slices of atomics that keep their
//! mapping alive, and addresses of payload.

use std::alloc::Layout;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::{Mapping, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::window::{Piece, Window};

use crate::watch::Watch;

/// Keeps a mapping in place for as long as it lives.
pub type Keep = Mapping;

/// Memory that an engine shares with a device, wherever it comes from: what a segment lies in.
#[derive(Clone)]
pub struct Mapped {
    address: usize,
    bytes: usize,
    keep: Keep,
    io_memory: bool,
}

/// Zeroed heap memory, aligned to a page.
struct Heap {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory that its owner frees; nothing is tied to a thread.
unsafe impl Send for Heap {}
// SAFETY: nothing is read or written through a `Heap`; those who use the address say who may.
unsafe impl Sync for Heap {}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { std::alloc::dealloc(self.at.as_ptr(), self.layout) };
    }
}

impl Mapped {
    /// Zeroed heap memory of this process alone, for tests and simulations: what stands for a segment there.
    ///
    /// # Panics
    /// If `bytes` is 0 or more than the address space holds.
    pub fn heap(bytes: usize) -> Self {
        assert!(bytes > 0, "a segment of 0 bytes");
        let layout =
            Layout::from_size_align(bytes, abi::PUSHGATE_PAGE as usize).expect("a size that there is");
        // SAFETY: the layout's size is not 0, checked above.
        let at = unsafe { std::alloc::alloc_zeroed(layout) };
        let at = NonNull::new(at).unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        Mapped { address: at.as_ptr() as usize, bytes, keep: Arc::new(Heap { at, layout }), io_memory: false }
    }

    /// Whether this is a device's memory (a BAR).
    pub(crate) fn is_io_memory(&self) -> bool {
        self.io_memory
    }

    /// Address of the first byte.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl From<&Arc<SharedMemory>> for Mapped {
    fn from(memory: &Arc<SharedMemory>) -> Self {
        let (address, bytes) = (memory.as_ptr().as_ptr() as usize, memory.len());
        Mapped { address, bytes, keep: memory.mapping(), io_memory: false }
    }
}

impl From<Arc<SharedMemory>> for Mapped {
    fn from(memory: Arc<SharedMemory>) -> Self {
        (&memory).into()
    }
}

impl From<&Arc<ReadOnlyMemory>> for Mapped {
    fn from(memory: &Arc<ReadOnlyMemory>) -> Self {
        let (address, bytes) = (memory.as_ptr().as_ptr() as usize, memory.len());
        Mapped { address, bytes, keep: memory.mapping(), io_memory: false }
    }
}

impl From<Arc<ReadOnlyMemory>> for Mapped {
    fn from(memory: Arc<ReadOnlyMemory>) -> Self {
        (&memory).into()
    }
}

impl From<&Mapped> for Mapped {
    fn from(memory: &Mapped) -> Self {
        memory.clone()
    }
}

impl From<Arc<dyn Window>> for Mapped {
    fn from(window: Arc<dyn Window>) -> Self {
        let (address, bytes) = (window.as_ptr().as_ptr() as usize, window.len());
        let io_memory = window.io_memory();
        Mapped { address, bytes, keep: Arc::new(window), io_memory }
    }
}

impl From<Piece> for Mapped {
    fn from(piece: Piece) -> Self {
        let (address, bytes, io_memory) = (piece.as_ptr().as_ptr() as usize, piece.len(), piece.io_memory());
        Mapped { address, bytes, keep: Arc::new(piece), io_memory }
    }
}

/// Words of a shared mapping, with the mapping.
#[derive(Clone)]
pub struct Words {
    words: &'static [AtomicU64],
    keep: Keep,
}

impl Words {
    /// `n` words from byte `offset` of memory that this process may write.
    ///
    /// # Panics
    /// If they do not lie within it.
    pub fn writable(memory: impl Into<Mapped>, offset: usize, n: usize) -> Self {
        Self::of(memory.into(), offset, n)
    }

    fn of(memory: Mapped, offset: usize, n: usize) -> Self {
        let end = n.checked_mul(8).and_then(|b| b.checked_add(offset));
        assert!(offset.is_multiple_of(8) && end.is_some_and(|end| end <= memory.bytes));
        // SAFETY: the words lie in a mapping that is page aligned, whose address never
        // changes, and which lives as long as what is kept beside them; `words` is only
        // handed out with the lifetime of `self`. Others change them at any time, which
        // atomics allow.
        let words = unsafe { std::slice::from_raw_parts((memory.address + offset) as *const AtomicU64, n) };
        Words { words, keep: memory.keep }
    }

    /// `n` words from byte `offset` of memory that a peer or producer writes and this process only reads. The caller
    /// must not store to them: `ring::look` and `ring::observe` read such words by relaxed loads.
    pub fn readable(memory: impl Into<Mapped>, offset: usize, n: usize) -> Self {
        Self::of(memory.into(), offset, n)
    }
}

impl Words {
    /// Adds a word to a watch; its value, and whether there was room.
    pub(crate) fn watch(&self, at: usize, watch: &mut Watch) -> (u64, bool) {
        watch.add(&self.words[at], &self.keep)
    }
}

impl Deref for Words {
    type Target = [AtomicU64];
    #[inline(always)]
    fn deref(&self) -> &[AtomicU64] {
        self.words
    }
}

impl std::fmt::Debug for Words {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Words({})", self.words.len())
    }
}
