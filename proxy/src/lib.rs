//! Endpoint, engine and queue pairs: the proxy of pushgate.
//!
//! `pushgate-core` decides; this crate performs. `ring` holds the few atomics that two parties touch; `endpoint` joins
//! ring, core and queue pair; `engine` drives the endpoints; `producer` is the other side of the rings, for a program
//! whose device is a thread of the host. docs/architecture.md tells the whole path.

pub mod ring;

#[cfg(not(loom))]
pub use pushgate_core::{gate, inbound, outbound, session, staging};

// Under loom the ring alone is built: loom's atomics are no words of a mapping.
#[cfg(not(loom))]
pub mod counters;
#[cfg(not(loom))]
pub mod endpoint;
#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
pub mod idle;
#[cfg(not(loom))]
pub mod link;
#[cfg(not(loom))]
pub mod measure;
#[cfg(not(loom))]
pub mod memory;
#[cfg(not(loom))]
pub mod mover;
#[cfg(not(loom))]
pub mod offer;
#[cfg(not(loom))]
pub mod producer;
#[cfg(not(loom))]
pub mod proxy;
#[cfg(not(loom))]
pub mod receives;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
pub mod remote;
#[cfg(not(loom))]
mod segments;
#[cfg(not(loom))]
pub mod server;
#[cfg(not(loom))]
pub mod wire;
