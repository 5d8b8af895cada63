//! NCCL's RMA table: puts, gets and signals between registered memories, which NCCL's own proxy thread asks for on behalf
//! of kernels that use NCCL's device API (docs/device-api-nccl.md).
//!
//! The rank that begins an operation copies the payload into the window of a queue pair to the target rank, behind a
//! header that says where the payload belongs ([`wire`]). The target rank checks the header against its own registrations
//! and places the payload: so no address and no key of a memory is exchanged, and a peer reaches registered memory alone
//! (P8). One queue pair leads from a rank to each rank that it has asked for something, made at the first operation.
//! Everything that a rank asks of another goes through that queue pair in order; a get is answered through the queue pair
//! of the other direction.
//!
//! NCCL's thread does all of that in its progress calls. While it makes none, the thread of the coll comm's engine stands in for it
//! ([`pushgate_engine::engine::StandIn`]), so a rank that sits in a barrier holds nobody up.
//!
//! No kernel of this plugin takes part: a user's kernel may fill the GPU and wait for a signal meanwhile. GPU memory is
//! read and written by copy engines, in streams of a context of their own, so that calls of the program that wait for a kernel do
//! not hold the copies up. A signal in GPU memory is a store in such a stream after the payload ([`pushgate_gpu_kernels::OrderedCopies`]),
//! which is what orders data before signal there (P3). In host memory a signal is an atomic add with release after the
//! copies.
//!
//! | file | subject |
//! | --- | --- |
//! | `wire` | the header of a message |
//! | `memory` | registered memory |
//! | `requests` | what NCCL waits for |
//! | `signals` | adding to signals in GPU memory |
//! | `outgoing` | the queue pair to a rank, and what waits to be sent there |
//! | `incoming` | a queue pair from a rank, and what has arrived there |
//! | `landing` | copies into this rank's memory, and what follows each |
//! | `own` | what a rank does to its own memory |
//! | `state` | one coll comm: its ranks and what is asked of them; `state/progress`: how that goes on; `state/ending`: ranks that are lost, and closing |
//! | `stall` | when a coll comm in which nothing moves is reported |
//! | `coll` | what NCCL calls: coll comms, contexts, registrations |

mod coll;
mod incoming;
mod landing;
mod means;
mod memory;
mod outgoing;
mod own;
mod requests;
mod signals;
mod stall;
mod state;
#[cfg(test)]
mod tests;
mod wire;

pub use coll::{Coll, Contexts, Door, Registered};
pub use memory::{Signal, Stretch};
pub use requests::Handle;
