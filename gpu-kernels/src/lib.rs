//! Device code, the executors that run it, and copies to and from GPU memory.
//!
//! The kernels (`kernels/*.cu` over `include/pushgate/*.cuh`) are one source for a GPU and for a
//! CPU. An [`Executor`] loads and launches them on either.

// Under loom only the words by which a copier sleeps are built (`copier/wake.rs`), and build.rs compiles no kernels.
#[cfg(not(loom))]
mod arch;
#[cfg(not(loom))]
mod build_support;
#[cfg(not(loom))]
mod cache;
#[cfg(not(loom))]
mod choose;
#[cfg(not(loom))]
mod compiler;
#[cfg(not(loom))]
pub mod copier;
#[cfg(not(loom))]
mod copies;
#[cfg(not(loom))]
mod cpu;
#[cfg(not(loom))]
mod cuda;
#[cfg(not(loom))]
mod embedded;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod executor;
#[cfg(not(loom))]
mod image;
#[cfg(not(loom))]
mod library;
#[cfg(not(loom))]
mod lock;
#[cfg(not(loom))]
mod mover;
#[cfg(not(loom))]
mod ordered;
#[cfg(not(loom))]
mod pages;
#[cfg(not(loom))]
mod source;
#[cfg(loom)]
#[path = "copier/wake.rs"]
mod wake;

#[cfg(not(loom))]
pub use choose::{Available, DeviceChoice, available_executors, choose, choose_at};
#[cfg(not(loom))]
pub use copies::{Copies, Point};
#[cfg(not(loom))]
pub use cpu::CpuExecutor;
#[cfg(not(loom))]
pub use cuda::{CudaExecutor, CudaInfo, current_device, probe};
#[cfg(not(loom))]
pub use error::{DeviceError, Result};
#[cfg(not(loom))]
pub use executor::{
    Access, DeviceBuffer, DmaBuf, Executor, Launch, LoadedModule, Registration, Running, Stream, WaitOutcome,
};
#[cfg(not(loom))]
pub use image::{Image, Target};
#[cfg(not(loom))]
pub use mover::{CopyTicket, CudaCopy};
#[cfg(not(loom))]
pub use ordered::OrderedCopies;
#[cfg(not(loom))]
pub use pages::{PageCopies, PageCopy, PageTicket, PageWay};
#[cfg(not(loom))]
pub use source::Source;

/// Names of the kernels that are compiled in ([`Executor::load_embedded`]).
#[cfg(not(loom))]
pub fn embedded_kernels() -> Vec<String> {
    embedded::kernel_names()
}
