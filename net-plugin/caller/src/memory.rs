//! Memory that is shared with a plugin, and the bytes that fill it.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cuda::Driver;
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
    /// Allocated the memory, if the process itself has not.
    driver: Option<&'static Driver>,
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
        Buffer { at, layout, driver: None }
    }

    /// Allocates zeroed memory of the GPU that is current on this thread, which the calling thread alone then reads and writes. Where the
    /// CPU executor plays the GPU, the memory is the process's.
    pub fn of_gpu(bytes: usize) -> Self {
        let Some(driver) = Driver::real() else { return Buffer::new(bytes) };
        let layout = std::alloc::Layout::from_size_align(bytes.max(1), 4096).expect("a size");
        Buffer { at: driver.allocate(layout.size()), layout, driver: Some(driver) }
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

    /// The bytes of a stretch: of GPU memory a copy.
    pub fn read(&self, offset: usize, length: usize) -> Cow<'_, [u8]> {
        assert!(offset + length <= self.bytes());
        // SAFETY: within the memory.
        let at = unsafe { self.at.add(offset) };
        match self.driver {
            // SAFETY: as above; the plugin is done with this stretch.
            None => unsafe { std::slice::from_raw_parts(at, length) }.into(),
            Some(driver) => {
                let mut bytes = vec![0; length];
                // SAFETY: as above.
                unsafe { driver.download(at, &mut bytes) };
                bytes.into()
            }
        }
    }

    /// Writes a stretch.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes());
        // SAFETY: within the memory; nothing else uses this stretch now.
        unsafe {
            let at = self.at.add(offset);
            match self.driver {
                None => std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()),
                Some(driver) => driver.upload(at, bytes),
            }
        }
    }

    /// The word at an offset, as the owner of a signal reads it: what came before the signal is seen after this call.
    pub fn word(&self, offset: usize) -> u64 {
        match self.driver {
            None => self.atomic(offset).load(Ordering::Acquire),
            // The driver's copy ends before the call does.
            Some(_) => u64::from_ne_bytes(self.read(offset, 8).as_ref().try_into().expect("8 bytes")),
        }
    }

    /// Writes the word at an offset.
    pub fn set_word(&self, offset: usize, value: u64) {
        match self.driver {
            None => self.atomic(offset).store(value, Ordering::Release),
            Some(_) => self.write(offset, &value.to_ne_bytes()),
        }
    }

    fn atomic(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes());
        // SAFETY: within the memory and aligned, as the memory is; the plugin writes it as a word too.
        unsafe { &*self.at.add(offset).cast::<AtomicU64>() }
    }

    /// Fills a stretch with the pattern of `seed`.
    pub fn fill(&self, offset: usize, length: usize, seed: u64) {
        assert!(offset + length <= self.bytes());
        let mut r = Random(seed);
        let mut draw = |to: &mut [u8]| to.copy_from_slice(&r.draw().to_le_bytes()[..to.len()]);
        match self.driver {
            // SAFETY: within the memory; nothing else uses this stretch now.
            None => unsafe { std::slice::from_raw_parts_mut(self.at.add(offset), length) }
                .chunks_mut(8)
                .for_each(draw),
            Some(_) => {
                let mut bytes = vec![0; length];
                bytes.chunks_mut(8).for_each(&mut draw);
                self.write(offset, &bytes);
            }
        }
    }

    /// The first byte that differs from the pattern of `seed`.
    pub fn differs(&self, offset: usize, length: usize, seed: u64) -> Option<usize> {
        let mut r = Random(seed);
        self.read(offset, length).chunks(8).enumerate().find_map(|(i, found)| {
            let word = r.draw().to_le_bytes();
            found.iter().zip(word).position(|(found, right)| *found != right).map(|k| 8 * i + k)
        })
    }

    /// Sets every byte of a stretch.
    pub fn set(&self, offset: usize, length: usize, byte: u8) {
        assert!(offset + length <= self.bytes());
        // SAFETY: within the memory; nothing else uses this stretch now.
        unsafe {
            let at = self.at.add(offset);
            match self.driver {
                None => at.write_bytes(byte, length),
                Some(driver) => driver.set(at, byte, length),
            }
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.driver {
            // SAFETY: allocated in `of_gpu`; a plugin has deregistered it.
            Some(driver) => unsafe { driver.free(self.at) },
            // SAFETY: allocated in `new` with this layout.
            None => unsafe { std::alloc::dealloc(self.at, self.layout) },
        }
    }
}
