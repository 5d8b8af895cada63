//! The structures of arch.cuh through which a kernel on the CPU finds its place in the launch,
//! mirrored in Rust.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};

/// Mirrors `cpu_barrier` of arch.cuh. Only kernels access its fields.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct CpuBarrier {
    arrived: u32,
    generation: u32,
    slot: u64,
}

/// Mirrors `cpu_block` of arch.cuh.
#[repr(C)]
pub struct CpuBlock {
    index: u32,
    grid: u32,
    size: u32,
    pad: u32,
    shared: *mut c_void,
    barrier: CpuBarrier,
    warps: [CpuBarrier; 32],
}

impl CpuBlock {
    /// Makes block `index` of `grid` blocks of `size` threads, whose dynamic shared memory begins at
    /// `shared`.
    pub(crate) fn new(index: u32, grid: u32, size: u32, shared: *mut c_void) -> Self {
        Self {
            index,
            grid,
            size,
            pad: 0,
            shared,
            barrier: CpuBarrier::default(),
            warps: [CpuBarrier::default(); 32],
        }
    }
}

/// Mirrors `cpu_thread` of arch.cuh.
#[repr(C)]
pub struct CpuThread {
    /// The thread's block, valid as long as the kernel runs.
    pub(crate) block: *mut CpuBlock,
    /// The thread's index in its block.
    pub(crate) index: u64,
}

// build.rs asserts the same sizes and offsets on the C++ side.
const _: () = {
    assert!(size_of::<CpuBarrier>() == 16 && offset_of!(CpuBarrier, generation) == 4);
    assert!(offset_of!(CpuBarrier, slot) == 8);
    assert!(size_of::<CpuBlock>() == 552 && offset_of!(CpuBlock, grid) == 4);
    assert!(offset_of!(CpuBlock, size) == 8 && offset_of!(CpuBlock, shared) == 16);
    assert!(offset_of!(CpuBlock, barrier) == 24 && offset_of!(CpuBlock, warps) == 40);
    assert!(size_of::<CpuThread>() == 16 && offset_of!(CpuThread, index) == 8);
};
