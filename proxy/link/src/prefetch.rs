//! Asking the processor for cache lines before they are needed. An engine with a thousand queue pairs finds little of the
//! next one in its caches; what it asks for while it serves one queue pair is there when it comes to the next. Prefetches
//! are hints: they read and change nothing that a program can see, so they need no ordering, and no address can be wrong.

/// Bytes of a cache line. Where lines are longer, some are asked for twice.
const LINE: usize = 64;

/// Asks for the line in which `at` lies. Nothing where the processor has no such instruction that Rust offers.
#[inline(always)]
pub(crate) fn line<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64, accesses no memory as far as the program can tell, and never faults,
    // whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Asks for all lines of a value.
#[inline(always)]
pub fn value<T: ?Sized>(value: &T) {
    let at: *const u8 = std::ptr::from_ref(value).cast();
    lines(at, size_of_val(value));
}

/// Asks for the lines of `bytes` from `at`.
#[inline(always)]
pub(crate) fn lines<T>(at: *const T, bytes: usize) {
    let at: *const u8 = at.cast();
    let first = at.wrapping_sub(at.addr() % LINE);
    let end = at.addr() + bytes;
    for n in 0..(end - first.addr()).div_ceil(LINE) {
        line(first.wrapping_add(n * LINE));
    }
}
