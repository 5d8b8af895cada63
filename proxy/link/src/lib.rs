//! Links: what carries released messages to the peer, and the memory that both ends of a queue pair share.
//!
//! [`Link`] is the trait of a link; [`local`] is the link between two ends of one host. `pushgate-link-verbs` and
//! `pushgate-link-tcp` have the others. [`ring`] holds the few atomics that two parties touch; [`segments`] has the memory of one
//! end as engine and peer see it; [`producer`] is the other side of the rings, for a program whose device is a thread of the
//! host.

// The simulator runs this code: one seed replays a run, so it reads no clock and keeps no order of a hash (proxy/clippy.toml).
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod busy;
pub mod ring;

#[cfg_attr(loom, allow(dead_code))]
pub mod crash;

// Under loom these alone are built: loom's atomics are no words of a mapping.
#[cfg(not(loom))]
mod forward;
#[cfg(not(loom))]
pub mod frame;
#[cfg(not(loom))]
mod link;
#[cfg(not(loom))]
pub mod local;
#[cfg(not(loom))]
pub mod mailbox;
#[cfg(not(loom))]
pub mod memory;
#[cfg(not(loom))]
pub mod prefetch;
#[cfg(not(loom))]
mod process_memory;
#[cfg(not(loom))]
pub mod producer;
#[cfg(not(loom))]
pub mod receives;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
mod renew;
#[cfg(not(loom))]
pub mod segments;
#[cfg(not(loom))]
pub mod watch;

#[cfg(not(loom))]
pub use link::*;
#[cfg(not(loom))]
pub use process_memory::{HostProcess, PeerProcess, Stretch, callable as process_vm_readv_callable};
#[cfg(not(loom))]
pub use renew::{Renew, RenewError};
