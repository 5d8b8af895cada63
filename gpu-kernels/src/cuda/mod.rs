//! The executor on an NVIDIA GPU.
//!
//! A kernel may run as long as the program does and wait for other kernels. So this code never
//! waits for the whole device and never uses the default stream: copies have a stream of their own,
//! an event tells when a launch has ended, and memory is freed only when no launch is under way.
//! The context is pushed for each call and popped after it, so threads of other libraries (NCCL's,
//! say) keep their own context.
//!
//! Each file uses only files that stand before it here:
//!
//! | file | subject |
//! | --- | --- |
//! | `driver` | calls of the CUDA driver that can't panic |
//! | `rdma` | when a kernel may read what an RDMA device wrote |
//! | `ledger` | what runs on a device, and what waits until nothing runs |
//! | `context` | a GPU's primary context, and making it current on a thread |
//! | `event`, `stream` | the driver's events and streams |
//! | `export`, `peer` | device memory for RDMA devices; for kernels of another GPU |
//! | `buffer`, `host_range` | device memory; host memory that the device can access |
//! | `module`, `compile` | kernels that are loaded; compiling them |
//! | `launch` | starting a kernel, and its end |
//! | `copy_stream` | copies by the copy engines, and stores after them |
//! | `page_kernel` | the kernel that copies lists of pages |
//! | `share` | memory that another process has, or gets |
//! | `executor` | the trait [`crate::Executor`] over all of these |

mod buffer;
mod compile;
mod context;
mod copy_stream;
mod driver;
mod event;
mod executor;
mod export;
mod host_range;
mod launch;
mod ledger;
mod module;
mod page_kernel;
mod peer;
mod rdma;
mod share;
mod stream;
#[cfg(test)]
mod stub;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use self::context::Current;
pub(crate) use self::copy_stream::{Copy, CopyMark, CopyStream, ROWS_BELOW, STORES, Store};
pub use self::driver::{CudaInfo, probe};
pub use self::executor::{CudaExecutor, current_device};
pub(crate) use self::page_kernel::{PageKernel, PiecesEntry, PiecesTable};
pub(crate) use self::share::{HandedOver, index_of, uuid_at};
