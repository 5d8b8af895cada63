//! The executor on this CPU: each CUDA thread is an OS thread that enters the kernel's C entry point
//! (arch.cuh).
//!
//! The files, from the lowest up: `memory` and `host_range` are what kernels work on; `stream` orders
//! launches and tells when one has ended; `launch` runs the threads of one launch; `module` finds
//! kernels; `executor` joins them under the trait [`crate::Executor`].

mod executor;
mod host_range;
mod launch;
mod memory;
mod module;
mod stream;
#[cfg(test)]
pub(crate) mod tests;

pub use self::executor::CpuExecutor;
