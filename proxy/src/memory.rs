//! Shared mappings as the engine uses them: slices of atomics that keep their
//! mapping alive, and addresses of payload.

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};

/// What holds a mapping in place.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Words of a shared mapping, with the mapping.
#[derive(Clone)]
pub struct Words {
    words: &'static [AtomicU64],
    _keep: Keep,
}

impl Words {
    /// `n` words from byte `offset` of memory that this process may write.
    ///
    /// # Panics
    /// If they do not lie within it.
    pub fn writable(memory: &Arc<SharedMemory>, offset: usize, n: usize) -> Self {
        // SAFETY: the slice borrows from a mapping whose address never changes and
        // which lives as long as the Arc stored beside it; `words` is only handed
        // out with the lifetime of `self`.
        let words =
            unsafe { std::mem::transmute::<&[AtomicU64], &'static [AtomicU64]>(memory.words(offset, n)) };
        Words { words, _keep: memory.clone() }
    }

    /// The same of memory that a peer or producer writes and this process only
    /// reads. Whoever holds it must not store: rings and words that are read go
    /// through `ring::look` and `ring::observe`, which load relaxed.
    pub(crate) fn readable(memory: &Arc<ReadOnlyMemory>, offset: usize, n: usize) -> Self {
        // SAFETY: as above for the lifetime; that nobody stores is upheld by the
        // engine, which passes these words to `look`, `touched` and `observe` only.
        let words =
            unsafe { std::mem::transmute::<&[AtomicU64], &'static [AtomicU64]>(memory.words(offset, n)) };
        Words { words, _keep: memory.clone() }
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
