//! Memory that is shared with a plugin, and the bytes that fill it.

use crate::table::Ptr;

/// A small random generator with a seed (splitmix64).
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next random number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A random number from 0 to `n` - 1.
    pub fn below(&mut self, n: usize) -> usize {
        (self.draw() % n as u64) as usize
    }
}

/// Memory that is shared with a plugin: raw, without Rust references.
pub struct Buffer {
    at: *mut u8,
    layout: std::alloc::Layout,
}

// SAFETY: raw memory, whose users take turns.
unsafe impl Send for Buffer {}
// SAFETY: raw memory, whose users take turns.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates zeroed memory.
    pub fn new(bytes: usize) -> Self {
        let layout = std::alloc::Layout::from_size_align(bytes.max(1), 4096).expect("a size");
        // SAFETY: the size is not 0.
        let at = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!at.is_null(), "no memory of {bytes} bytes");
        Buffer { at, layout }
    }

    /// The address of byte `offset`.
    pub fn at(&self, offset: usize) -> Ptr {
        assert!(offset <= self.layout.size());
        // SAFETY: within the memory, or at its end.
        unsafe { self.at.add(offset) }.cast()
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// Fills a stretch with the pattern of `seed`.
    pub fn fill(&self, offset: usize, length: usize, seed: u64) {
        assert!(offset + length <= self.bytes());
        let mut r = Random(seed);
        for i in (0..length).step_by(8) {
            let word = r.draw().to_le_bytes();
            // SAFETY: within the memory; nothing else uses this stretch now.
            unsafe {
                let to = self.at.add(offset + i);
                std::ptr::copy_nonoverlapping(word.as_ptr(), to, word.len().min(length - i));
            }
        }
    }

    /// The first byte that differs from the pattern of `seed`.
    pub fn differs(&self, offset: usize, length: usize, seed: u64) -> Option<usize> {
        assert!(offset + length <= self.bytes());
        let mut r = Random(seed);
        (0..length).step_by(8).find_map(|i| {
            let word = r.draw().to_le_bytes();
            let n = word.len().min(length - i);
            // SAFETY: within the memory; the plugin is done with this stretch.
            let found = unsafe { std::slice::from_raw_parts(self.at.add(offset + i), n) };
            (0..n).find(|k| found[*k] != word[*k]).map(|k| i + k)
        })
    }

    /// Sets every byte of a stretch.
    pub fn set(&self, offset: usize, length: usize, byte: u8) {
        assert!(offset + length <= self.bytes());
        // SAFETY: within the memory; nothing else uses this stretch now.
        unsafe { self.at.add(offset).write_bytes(byte, length) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.at, self.layout) };
    }
}
