//! The queue pair over RDMA: a reliable connected QP of libibverbs.
//!
//! The peer has a copy of our window, the *mirror*. A payload is written there
//! by RDMA WRITE, to the very place that it has in our window: who may write the
//! one by its credit may write the other (P1), and the receiving device reads it
//! in place. After the payload goes its record, by a second WRITE into a slot
//! of the peer's *inbox*, in the same chain. A short payload travels in the slot.
//! A PUT into a region that the peer's device can write goes straight there.
//!
//! A SEND's record carries immediate data: it consumes a receive of the peer's
//! QP, and its credit is a receive that the peer has posted. One-sided messages
//! consume none. They and the counts may carry immediate data to wake a sleeping
//! peer, from a few receives set aside. Where a device has no immediate data, a
//! record announces itself: each of its words carries a lap.
//!
//! A receive completion announces all WRITEs of its queue pair before it. A record that announces itself
//! says nothing of its payload on a device that may place WRITEs out of order: there the record is held
//! back until the payload's WRITE has completed ([`WriteOrder`]).
//!
//! | inbox | written by the peer |
//! | --- | --- |
//! | 0 | line: received, released, granted, notified, left, status, its complement, stripes taken |
//! | 4096 | slots of 256 bytes: a record, received, released, granted, a short payload |
//! | next page | regions that we may write: 32 bytes each |

// Loom's atomics are no words of a mapping.
#![cfg(not(loom))]

#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod chain;
pub mod choice;
// It waits for the kernel on threads of its own, with the clock.
#[allow(clippy::disallowed_methods, clippy::disallowed_types)]
mod cm;
#[cfg(test)]
mod cm_tests;
mod config;
mod device;
mod device_memory;
#[cfg(test)]
mod erdma_tests;
mod error;
#[cfg(any(test, feature = "sim"))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod firmware;
#[cfg(test)]
mod firmware_tests;
mod flush;
pub mod gid;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod health;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod inbox;
#[cfg(test)]
mod infiniband_tests;
pub mod kinds;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod line;
mod looker;
#[cfg(test)]
mod many_tests;
#[cfg(any(test, feature = "sim"))]
#[cfg_attr(not(test), allow(dead_code, reason = "the simulator needs a part of it"))]
pub mod mock;
mod next;
#[cfg_attr(not(test), expect(dead_code, reason = "a window in the NIC waits for hardware: docs/driver.md"))]
mod nic;
mod objects;
mod offer;
#[cfg(test)]
mod offer_tests;
mod once;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod path;
#[cfg(test)]
mod peer_tests;
pub mod pkey;
#[cfg(test)]
mod port_tests;
#[cfg(any(test, feature = "sim"))]
pub mod profiles;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod sending;
mod setup;
mod sge;
#[cfg(any(test, feature = "sim"))]
#[cfg_attr(not(test), allow(dead_code, reason = "the simulator needs a part of it"))]
pub mod simulated;
#[cfg(test)]
mod simulated_tests;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod slot;
mod states;
#[cfg(test)]
mod storm_tests;
mod turn;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod verbs_link;

pub use config::{Config, RdmaCm, WriteOrder};
pub use device::{Device, PortState};
pub use error::VerbsError;
pub use flush::{Flusher, Word};
pub use objects::{Allocate, SharedDomain};
pub use offer::{Offer, Places, WIRE};
pub use setup::{VerbsAway, VerbsOpening, VerbsPrepared};
pub use verbs_link::VerbsLink;

/// Bytes of an end's inbox, for tests: of logarithms to base 2 of its slots and of its ring of posted receives.
#[cfg(feature = "sim")]
pub fn inbox_bytes(slots_log: u32, receives_log: u32) -> usize {
    inbox::InboxLayout::new(slots_log, receives_log).bytes
}

/// Control writes in the send queue at once: the line, the last line, an entry of the table of
/// regions, posted receives (two where they go round the ring's end). Their slots are set aside, and
/// so they need no permit.
const CONTROL_WRS: u32 = 5;
/// The last work request of each queue, after which nothing is under way.
const LAST_WRS: u32 = 1;
/// Receives set aside for immediate data that only wakes.
const NOTIFIES: u32 = 16;
/// `wr_id` of all receives but the last.
const RECEIVE: u64 = u64::MAX;
/// `wr_id` of the last receive, and of the last send. Those of other sends are counted from 1.
const LAST_RECEIVE: u64 = u64::MAX - 1;
const LAST_SEND: u64 = u64::MAX - 2;
