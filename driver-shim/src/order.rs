//! Fences between this processor and devices that share its memory.
//!
//! Rust's fences are for threads. On x86 they order what devices see as well. On 64-bit ARM they are `dmb ish`, a barrier
//! of the inner shareable domain: that of the processors. Devices may be outside of that domain, and write-combining
//! mappings (Normal, not cached) belong to the outer shareable domain always. So what a device writes or reads, and what
//! lies in its memory, takes `dmb osh`, as in Linux (`dma_rmb`, `dma_wmb`) and in rdma-core (`udma_from_device_barrier`).
//!
//! Each of these also orders threads, as Rust's fence of its name does: the barriers of the outer domain cover the inner
//! one, and an `asm!` without `nomem` is a barrier to the compiler.

#[cfg(target_arch = "aarch64")]
macro_rules! barrier {
    ($instruction:literal) => {
        // SAFETY: a barrier changes no memory, no register and no flag.
        unsafe { std::arch::asm!($instruction, options(nostack, preserves_flags)) }
    };
}

/// After a load that saw what a device, or a thread, has written: what it wrote before is seen by what this thread does
/// next. A fence of acquire.
#[inline(always)]
pub fn from_device() {
    #[cfg(target_arch = "aarch64")]
    barrier!("dmb oshld");
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
}

/// Before a store that a device, or a thread, looks for: what this thread did comes before the store. A fence of release.
/// (`dmb oshst` would let this thread's loads, of a place that it gives back, come after the store.)
#[inline(always)]
pub fn to_device() {
    #[cfg(target_arch = "aarch64")]
    barrier!("dmb osh");
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
}

/// Between a store and a load of another word, where a device or a thread stores that word and then loads ours: at least one
/// sees the other's store. A sequentially consistent fence.
#[inline(always)]
pub fn total() {
    #[cfg(target_arch = "aarch64")]
    barrier!("dmb osh");
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Puts what this thread has stored to a device's memory before what it stores next, and out of the buffers in which the
/// processor combines writes. There a release store does neither on x86; on ARM `dmb` orders them, and `dsb` also waits
/// until they have left.
#[cold]
pub fn drain() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
    #[cfg(target_arch = "aarch64")]
    barrier!("dsb sy");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Before loads from a device's memory that this processor has mapped write-combining: they come after the load that told
/// of what lies there. On x86 streaming loads are ordered with nothing else.
#[inline(always)]
pub fn device_loads() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE2.
    #[allow(unused_unsafe)]
    unsafe {
        std::arch::x86_64::_mm_mfence()
    };
    #[cfg(not(target_arch = "x86_64"))]
    from_device();
}
