//! The window as the RDMA device sends from it: where it lies, if the device can
//! register that, else out of a copy in ordinary memory.

use std::os::fd::AsFd;
use std::sync::Arc;

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::order;
use pushgate_driver_shim::window::Window;

use super::VerbsError;
use super::objects::{Allocate, Mr, Pd, SEND_ONLY};
use super::sge::Sge;

/// A copy of the window in ordinary memory, as long as it.
struct Shadow {
    address: usize,
    /// Its memory, if it is not the window's own.
    _memory: Option<SharedMemory>,
}

/// The memory that the RDMA device sends payload from, as it is registered for each link: the window, or a copy of it in
/// ordinary memory.
#[derive(Clone)]
pub(super) struct Source {
    window: Arc<dyn Window>,
    /// What is registered, if not the window itself.
    shadow: Option<Arc<Shadow>>,
}

impl Source {
    /// Registers the memory, as it was registered for the first link.
    pub(super) fn register(&self, pd: &Arc<Pd>) -> Result<Mr, VerbsError> {
        let (address, bytes) = (self.window.as_ptr().as_ptr() as usize, self.window.len());
        if let Some(shadow) = &self.shadow {
            // SAFETY: the owner of the registration keeps this value; the window keeps its stage.
            return unsafe { Mr::new(pd, "the window's copy", shadow.address, bytes, SEND_ONLY) };
        }
        match self.window.export().filter(|_| self.window.io_memory()) {
            // SAFETY: as above, of the memory of the dma-buf.
            Some((fd, at)) => unsafe { Mr::dmabuf(pd, fd.as_fd(), at, bytes, address as u64, SEND_ONLY) },
            // SAFETY: as above; a device only reads the mapping.
            None => unsafe { Mr::new(pd, "window", address, bytes, SEND_ONLY) },
        }
    }
}

/// The window's payload, as the link that is live sends it.
pub(super) struct Sending {
    pub(super) source: Source,
    /// Key of the link's registration, whose owner keeps it as long as anything is sent.
    pub(super) key: u32,
    /// Payloads that went through the copy, and their bytes.
    pub(super) bounced: (u64, u64),
}

impl Sending {
    /// Registers the window, or a copy of it.
    pub(super) fn new(
        pd: &Arc<Pd>,
        window: Arc<dyn Window>,
        allocate: &mut Allocate<'_>,
    ) -> Result<(Self, Mr), VerbsError> {
        let io_memory = window.io_memory();
        let mut source = Source { window, shadow: None };
        let with = |source, mr: Mr| (Sending { source, key: mr.lkey, bounced: (0, 0) }, mr);
        if !io_memory {
            let mr = source.register(pd)?;
            return Ok(with(source, mr));
        }
        if source.window.export().is_some() {
            match source.register(pd) {
                Ok(mr) => return Ok(with(source, mr)),
                Err(e) => tracing::info!("{e}: payload goes through a copy in host memory"),
            }
        }
        let shadow = match source.window.stage() {
            Some(stage) => Shadow { address: stage.as_ptr() as usize, _memory: None },
            None => {
                let memory = allocate("shadow", source.window.len())?;
                Shadow { address: memory.as_ptr().as_ptr() as usize, _memory: Some(memory) }
            }
        };
        source.shadow = Some(Arc::new(shadow));
        let mr = source.register(pd)?;
        Ok(with(source, mr))
    }

    /// Where `bytes` at byte `offset` of the window are sent from. The engine checked
    /// that they lie in it.
    #[inline]
    pub(super) fn source(&mut self, offset: u64, bytes: u32) -> Sge {
        let (key, window) = (self.key, &self.source.window);
        let Some(shadow) = &self.source.shadow else {
            return Sge { address: window.as_ptr().as_ptr() as u64 + offset, bytes, key, own: false };
        };
        let (offset, length) = (offset as usize, bytes as usize);
        assert!(offset + length <= window.len());
        self.bounced.0 += 1;
        self.bounced.1 += bytes as u64;
        // SAFETY: both stretches lie in their mappings, see above. The place in the copy is
        // free as long as the place in the window is this message's (P1); a device
        // that writes there now spoils its own message.
        let to = unsafe {
            let from = window.as_ptr().as_ptr().add(offset);
            let to = (shadow.address as *mut u8).add(offset);
            stream(from, to, length);
            to
        };
        Sge { address: to as u64, bytes, key, own: false }
    }

    /// Copies `out.len()` bytes at byte `offset` of the window out.
    #[inline]
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) {
        let window = &self.source.window;
        assert!(offset as usize + out.len() <= window.len());
        // SAFETY: they lie in the window, which is mapped; a device that writes there now
        // breaks P1 and spoils its own message.
        unsafe {
            let from = window.as_ptr().as_ptr().add(offset as usize);
            if window.io_memory() {
                order::device_loads();
                copy_out(from, out.as_mut_ptr(), out.len());
            } else {
                std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
            }
        }
    }
}

/// Copies out of a device's memory, which the CPU has mapped write-combining: such
/// reads are uncached, but streaming loads fetch a line at a time (Intel SDM 1,
/// 12.10.3). `from` and `to` begin at whole units, so both are aligned.
///
/// # Safety
/// Both are valid for `length` bytes and do not overlap.
unsafe fn stream(from: *const u8, to: *mut u8, length: usize) {
    order::device_loads();
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("sse4.1") {
        // SAFETY: the feature is there; the rest is the caller's promise.
        return unsafe { stream_sse(from, to, length) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy_out(from, to, length) }
}

/// Copies out of a device's memory, from the beginning of a unit.
///
/// # Safety
/// `from` is a whole unit's beginning, and valid to the end of the last unit; `to` is valid for `length` bytes.
unsafe fn copy_out(from: *const u8, to: *mut u8, length: usize) {
    #[cfg(not(target_arch = "aarch64"))]
    // SAFETY: the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, length)
    };
    // A BAR that is not prefetchable is Device memory on ARM, where an access that is not aligned is a fault, and the C
    // library's copy makes such accesses. Aligned ones of 16 bytes are right there and in memory that is mapped
    // write-combining.
    #[cfg(target_arch = "aarch64")]
    for at in (0..length).step_by(16) {
        use std::arch::aarch64::{vld1q_u8, vst1q_u8};
        let mut part = [0; 16];
        // SAFETY: `from` is aligned to 16 bytes and valid to the end of the unit; `part` holds what is stored, and of it no
        // more is copied than `to` holds.
        unsafe {
            vst1q_u8(part.as_mut_ptr(), vld1q_u8(from.add(at)));
            std::ptr::copy_nonoverlapping(part.as_ptr(), to.add(at), (length - at).min(16));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.1")]
unsafe fn stream_sse(from: *const u8, to: *mut u8, length: usize) {
    use std::arch::x86_64::{__m128i, _mm_store_si128, _mm_stream_load_si128};
    debug_assert!((from as usize | to as usize).is_multiple_of(64));
    let whole = length / 64;
    for line in 0..whole {
        for part in 0..4 {
            let at = line * 64 + part * 16;
            // SAFETY: `at + 16` is within `length`; both are aligned to 16 bytes.
            unsafe {
                let v = _mm_stream_load_si128(from.add(at) as *const __m128i);
                _mm_store_si128(to.add(at) as *mut __m128i, v);
            }
        }
    }
    let done = whole * 64;
    // SAFETY: what is left of the caller's stretches.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), length - done) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_copies_every_byte_and_no_other() {
        #[repr(align(64))]
        struct Line([u8; 512]);
        let from = Line(std::array::from_fn(|i| i as u8 ^ 0x5a));
        for length in [0, 1, 15, 16, 63, 64, 65, 127, 128, 300, 448] {
            let mut to = Line([0xcc; 512]);
            // SAFETY: both hold 512 bytes.
            unsafe { stream(from.0.as_ptr(), to.0.as_mut_ptr(), length) };
            assert_eq!(to.0[..length], from.0[..length]);
            assert!(to.0[length..].iter().all(|b| *b == 0xcc), "{length}");
        }
    }
}
