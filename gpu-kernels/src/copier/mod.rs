//! The copier: a process that copies between GPU memory and host memory by the GPU's copy engines, on command.
//!
//! Take a library whose kernels wait on the GPU until a host thread has moved bytes, for example a network plugin of a
//! collective library. That thread must need nothing that can wait for those kernels: no launch and no other call of the
//! driver in the program's process (the driver has one lock for the process, held while a launch waits for room in a full
//! queue), and no SM (kernels may fill all of them). So another process makes the copies. docs/copier.md says how it is
//! used, what it costs, and why copies by the copy engines of another context are not held up.
//!
//! One copier serves all processes of one user on one GPU. A client hands over its buffers and host memory once, by
//! descriptors over a Unix socket, and then posts copies to rings in memory that both share; the GPU itself stores to that
//! memory how far it has come. Each file uses only files that stand before it here:
//!
//! | file | subject |
//! | --- | --- |
//! | `layout` | the shared memory: rings of commands, marks, the copier's state |
//! | `wake` | how a client and a copier that falls asleep never miss each other |
//! | `protocol` | what is said over the socket |
//! | `places` | pure: memory that a client registered, and the check of each command against it (P8) |
//! | `hands` | what copies: a GPU's copy engines, or on the device `cpu` the kernel's copies between processes; how memory is handed over |
//! | `queue`, `client` | a client's end of the rings; a client's handle: registering memory, noticing the copier's end |
//! | `start` | finding a GPU's copier, starting one, and trying it |
//! | `engine` | the copier's one thread that copies |
//! | `serve` | the copier's process: clients come and go |
//! | `program` | the program that a client starts

mod client;
mod engine;
#[cfg(test)]
mod fuzzed;
mod hands;
mod layout;
mod places;
mod program;
mod protocol;
mod queue;
mod serve;
mod shared;
mod start;
#[cfg(test)]
mod tests;
mod wake;

pub use client::{Copier, DeviceMemory, HostPlace};
pub use program::background;
pub use queue::{CopyQueue, PostError, Ticket};
pub use serve::{ServeOptions, serve};
pub use shared::{Direction, Lost, Unavailable};
pub use start::{CopierCpus, Program};
