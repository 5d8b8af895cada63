//! What is compiled into the binary: kernels for the CPU, images for the GPU, and the sources and
//! headers from which either can be made again.

use std::ffi::c_void;

use crate::arch::CpuThread;

/// A kernel's entry point on the CPU (arch.cuh, `PUSHGATE_KERNEL`).
pub type CpuEntry = unsafe extern "C" fn(thread: *const CpuThread, params: *const c_void);

/// A kernel that was compiled in for the CPU.
pub struct CpuKernel {
    /// The kernel's name.
    pub name: &'static str,
    /// The function that each thread enters.
    pub entry: CpuEntry,
    /// The size of the kernel's parameter struct in bytes.
    pub params_size: extern "C" fn() -> u32,
}

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// The parameter size of a compiled-in kernel. The struct has the same layout everywhere, so the
/// CPU's size is the GPU's too.
pub fn params_size(kernel: &str) -> Option<u32> {
    CPU_KERNELS.iter().find(|known| known.name == kernel).map(|known| (known.params_size)())
}

/// Names of all kernels that are compiled in.
pub fn kernel_names() -> Vec<String> {
    CPU_KERNELS.iter().map(|kernel| kernel.name.to_owned()).collect()
}
