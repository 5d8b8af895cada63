//! Device code, the executors that run it, and copies to and from GPU memory.
//!
//! The kernels (`kernels/*.cu` over `include/pushgate/*.cuh`) are one source for a GPU and for a
//! CPU. An [`Executor`] loads and launches them on either.

mod arch;
mod build_support;
mod cache;
mod choose;
mod compiler;
mod copies;
mod cpu;
mod cuda;
mod embedded;
mod error;
mod executor;
mod library;
mod lock;
mod mover;
mod source;
mod worker;

pub use choose::{Available, DeviceChoice, available_executors, choose, choose_at};
pub use copies::{Copies, Point};
pub use cpu::CpuExecutor;
pub use cuda::{CudaExecutor, CudaInfo, current_device, probe};
pub use error::{DeviceError, Result};
pub use executor::{
    Access, DeviceBuffer, DmaBuf, Executor, Launch, LoadedModule, Registration, Running, Stream, WaitOutcome,
};
pub use mover::{CopyTicket, CudaCopy};
pub use source::Source;
pub use worker::{Direction, Lease, Lost, OneWay, PostError, Ticket, Worker, WorkerOptions, WorkerQueue};

/// Names of the kernels that are compiled in ([`Executor::load_embedded`]).
pub fn embedded_kernels() -> Vec<String> {
    embedded::kernel_names()
}
