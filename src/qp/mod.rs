//! Queue pairs as the program sees them.
//!
//! `join.rs` makes one out of this end's memory (`memory.rs`) and the other end's offer, over the transport that the
//! settings name (`local.rs`, `verbs.rs`, `tcp.rs`); `queue_pair.rs` is the handle of the program, and `descriptor.rs` the structure
//! that kernels get.

mod descriptor;
mod join;
mod local;
mod memory;
mod queue_pair;
mod tcp;
mod undo;
#[cfg(test)]
mod unsettled;
mod verbs;

pub use descriptor::{DeviceEnd, upload_descriptors};
pub(crate) use descriptor::{check_status, device_addresses, ring};
pub(crate) use join::OwnEnd;
pub use memory::QpConfig;
pub use queue_pair::{QueuePair, RegionKey};
