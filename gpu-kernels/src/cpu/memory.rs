//! Device memory of the CPU executor: blocks of the heap.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::error::{DeviceError, Result};
use crate::executor::BufferMemory;

/// Alignment of device memory: as large as a GPU's allocator gives, and whole pages for callers
/// that register the memory.
pub(super) const ALIGN: usize = 4096;

/// A block of zeroed heap memory.
pub(super) struct Heap {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory without ties to a thread; `read` and `write` access it through atomics.
unsafe impl Send for Heap {}
// SAFETY: shared access is through atomics (`read`, `write`) or by kernels.
unsafe impl Sync for Heap {}

impl Heap {
    pub(super) fn new(bytes: usize, align: usize) -> Result<Self> {
        // At least one word, so that an empty buffer has an address too.
        let layout = bytes
            .checked_next_multiple_of(16)
            .and_then(|bytes| Layout::from_size_align(bytes.max(16), align).ok())
            .ok_or(DeviceError::OutOfMemory { bytes })?;
        // SAFETY: the size is not zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(DeviceError::OutOfMemory { bytes })?;
        Ok(Self { ptr, layout })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout. No kernel still uses the memory: that was
        // promised at the kernel's launch.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

// A kernel may run at the same time, so whole aligned words are copied as relaxed atomics, as
// arch.cuh accesses them: neither side sees half a word. Bytes before the first whole word and behind
// the last one are copied one by one.
impl BufferMemory for Heap {
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        debug_assert!(offset + from.len() <= self.layout.size());
        let (head, rest) = from.split_at(from.len().min(offset.wrapping_neg() % 8));
        let (words, tail) = rest.as_chunks::<8>();
        let at = |offset: usize| self.ptr.as_ptr().wrapping_add(offset);
        // SAFETY: DeviceBuffer has checked that the range lies in the buffer, which lives as long
        // as self and is accessed only through raw pointers and atomics. `base` + 8i is a multiple
        // of 8, because the block is aligned to more than that.
        unsafe {
            for (i, byte) in head.iter().enumerate() {
                AtomicU8::from_ptr(at(offset + i)).store(*byte, Ordering::Relaxed);
            }
            let base = offset + head.len();
            for (i, word) in words.iter().enumerate() {
                AtomicU64::from_ptr(at(base + 8 * i).cast())
                    .store(u64::from_ne_bytes(*word), Ordering::Relaxed);
            }
            let base = base + 8 * words.len();
            for (i, byte) in tail.iter().enumerate() {
                AtomicU8::from_ptr(at(base + i)).store(*byte, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        debug_assert!(offset + to.len() <= self.layout.size());
        let (head, rest) = to.split_at_mut(to.len().min(offset.wrapping_neg() % 8));
        let (words, tail) = rest.as_chunks_mut::<8>();
        let at = |offset: usize| self.ptr.as_ptr().wrapping_add(offset);
        // SAFETY: DeviceBuffer has checked the range, and the accesses are aligned and atomic as in
        // `write`.
        unsafe {
            for (i, byte) in head.iter_mut().enumerate() {
                *byte = AtomicU8::from_ptr(at(offset + i)).load(Ordering::Relaxed);
            }
            let base = offset + head.len();
            for (i, word) in words.iter_mut().enumerate() {
                *word = AtomicU64::from_ptr(at(base + 8 * i).cast()).load(Ordering::Relaxed).to_ne_bytes();
            }
            let base = base + 8 * words.len();
            for (i, byte) in tail.iter_mut().enumerate() {
                *byte = AtomicU8::from_ptr(at(base + i)).load(Ordering::Relaxed);
            }
        }
        Ok(())
    }
}
