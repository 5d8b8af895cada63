//! The queue pair over RDMA: a reliable connected QP of libibverbs.
//!
//! The peer has a copy of our window, the *mirror*. A payload is written there
//! by RDMA WRITE, to the very place that it has in our window: who may write the
//! one by its credit may write the other (P1), and the receiving device reads it
//! in place. Behind the payload goes its record, by a second WRITE into a slot
//! of the peer's *inbox*, in the same chain. A short payload travels in the slot.
//! A PUT into a region that the peer's device can write goes straight there.
//!
//! A SEND's record carries immediate data: it consumes a receive of the peer's
//! QP, and its credit is a receive that the peer has posted. One-sided messages
//! consume none. They and the counts may carry immediate data to wake a sleeping
//! peer, from a few receives set aside. Where a device has no immediate data, a
//! record announces itself: each of its words carries a lap.
//!
//! | inbox | written by the peer |
//! | --- | --- |
//! | 0 | line: received, released, granted, notified, left, status, its complement |
//! | 4096 | slots of 256 bytes: a record, received, released, granted, a short payload |
//! | next page | regions that we may write: 32 bytes each |

mod chain;
mod copies;
mod device;
mod device_memory;
mod error;
mod flush;
pub mod gid;
#[cfg(test)]
mod mock;
#[cfg_attr(not(test), expect(dead_code, reason = "a window in the NIC waits for hardware: docs/driver.md"))]
mod nic;
mod objects;
mod queue_pair;
mod sending;
mod setup;
mod slot;
mod states;

pub use device::{Device, PortState};
pub use error::VerbsError;
pub use flush::{Flusher, Word};
pub use queue_pair::VerbsQp;
pub use setup::{Accepted, Allocate, Config, Half, Offer, Places, WIRE_VERSION};

/// Control writes in the send queue at once: the line, the last line, an entry
/// of the table of regions, posted receives (two where they go round the ring's end). Their slots are set aside, and so they need no permit.
const CONTROL_WRS: u32 = 5;
/// Receives set aside for immediate data that only wakes.
const NOTIFIES: u32 = 16;
/// `wr_id` of all receives.
const RECEIVE: u64 = u64::MAX;
