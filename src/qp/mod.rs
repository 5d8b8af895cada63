//! Queue pairs as the program sees them.
//!
//! `join.rs` makes one out of this end's memory (`memory.rs`) and the other end's offer, over the transport that the
//! settings name (`local.rs`, `verbs.rs`, `tcp.rs`); `queue_pair.rs` is the handle of the program, `region.rs` that of memory registered with it, `descriptor.rs` the structure
//! that kernels get, and `host_end.rs` an end for a thread of the host.

mod descriptor;
mod host_end;
mod join;
mod local;
mod memory;
mod queue_pair;
mod region;
mod tcp;
mod undo;
#[cfg(test)]
mod unsettled;
mod verbs;

pub use descriptor::{DeviceEnd, upload_descriptors};
pub(crate) use descriptor::{check_status, device_addresses, ring};
pub use host_end::{HostEnd, HostMessage, InPlace, Staged};
pub(crate) use join::OwnEnd;
pub use memory::QpConfig;
pub use queue_pair::QueuePair;
pub use region::{Region, RegionKey};
