//! The resident worker: a kernel that copies on command, so that a thread can move bytes between
//! device and host memory without a call of the driver. Such a call may block as long as other
//! threads' kernels wait for that very copy.
//!
//! docs/worker.md says what the worker is for, when it comes and when it goes. The rings and the
//! way of leaving are argued there and in `kernels/worker.cu`. This module has the host's half. Each
//! file uses only files that stand before it here:
//!
//! | file | subject |
//! | --- | --- |
//! | `policy` | pure: when the worker is started, lingers, is relieved, counts as lost |
//! | `flags` | the flags between threads, and whether the worker is present |
//! | `control` | the host memory that worker and host share |
//! | `options` | the worker's shape and its times |
//! | `lost`, `fault` | how a worker is lost; faults that tests cause |
//! | `shared` | what all handles share, and starting the kernel |
//! | `queue` | posting copies, and asking if they are complete |
//! | `keeper` | the thread that starts the worker on demand and checks that it lives |
//! | `handle` | the handle [`Worker`]: making a worker, and its end |
//! | `lease` | operations of the program for which the worker stays |
//!
//! P8: the worker copies between any addresses that it is given. It trusts only this process's
//! [`WorkerQueue`], whose caller has checked the addresses.

// Under loom the flags alone are built, with the policy that they use: loom's atomics are no words of a
// mapping.
#[cfg_attr(loom, allow(dead_code))]
mod flags;
#[cfg_attr(loom, allow(dead_code))]
mod policy;

#[cfg(not(loom))]
mod control;
#[cfg(not(loom))]
mod fault;
#[cfg(not(loom))]
mod handle;
#[cfg(not(loom))]
mod keeper;
#[cfg(not(loom))]
mod lease;
#[cfg(not(loom))]
mod lost;
#[cfg(not(loom))]
mod options;
#[cfg(not(loom))]
mod queue;
#[cfg(not(loom))]
mod shared;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use self::control::Direction;
#[cfg(not(loom))]
pub use self::handle::Worker;
#[cfg(not(loom))]
pub use self::lease::Lease;
#[cfg(not(loom))]
pub use self::lost::Lost;
#[cfg(not(loom))]
pub use self::options::WorkerOptions;
#[cfg(not(loom))]
pub use self::queue::{OneWay, PostError, Ticket, WorkerQueue};

/// The name of the worker's kernel.
#[cfg(not(loom))]
const KERNEL: &str = "copy_worker";
