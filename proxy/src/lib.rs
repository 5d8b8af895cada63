//! Endpoint, engine and queue pairs: the proxy of pushgate.
//!
//! `pushgate-core` decides; this crate performs. `ring` holds the few atomics that two parties touch; `connect` makes a
//! queue pair with the other end; `endpoint` joins ring, core and queue pair; `rails` makes several links one; `engine` drives the endpoints; `recorder`
//! shows others what the engine does; `door` lets TCP connections in whose other end knows the secret; `producer` is the other side of the rings, for a program whose device is a thread of the host. docs/architecture.md tells the whole
//! path.

/// Whether a planted fault is switched on. Without the feature `sim` there is none.
#[cfg(feature = "sim")]
macro_rules! planted {
    ($plant:ident) => {
        pushgate_core::plant::is(pushgate_core::plant::Plant::$plant)
    };
}
#[cfg(not(feature = "sim"))]
macro_rules! planted {
    ($plant:ident) => {
        false
    };
}

// Modules that the simulator runs: one seed replays a run, so they read no clock and keep no order of a hash
// (proxy/clippy.toml).
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod ring;

#[cfg_attr(loom, allow(dead_code))]
mod calls;

#[cfg_attr(loom, allow(dead_code))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod cell;

#[cfg_attr(loom, allow(dead_code))]
mod crash;

#[cfg(not(loom))]
pub use pushgate_core::{gate, inbound, outbound, refusal, session, staging};

// Under loom these alone are built: loom's atomics are no words of a mapping.
#[cfg(not(loom))]
pub mod addresses;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod connect;
#[cfg(not(loom))]
pub mod counters;
#[cfg(not(loom))]
pub mod door;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod endpoint;
#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
pub mod folder;
#[cfg(not(loom))]
mod frame;
#[cfg(not(loom))]
mod frame_socket;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod idle;
#[cfg(not(loom))]
mod in_process;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod journal;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod linger;
#[cfg(not(loom))]
pub mod link;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod mailbox;
#[cfg(not(loom))]
pub mod measure;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod memory;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod mover;
#[cfg(not(loom))]
pub mod netlink;
#[cfg(not(loom))]
mod prefetch;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod producer;
#[cfg(not(loom))]
pub mod proxy;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod rails;
#[cfg(all(any(test, feature = "sim"), not(loom)))]
#[cfg_attr(not(feature = "sim"), allow(dead_code, reason = "unit tests need a part of it"))]
mod random;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod receives;
#[cfg(not(loom))]
pub mod recorder;
#[cfg(not(loom))]
pub mod redial;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod region;
#[cfg(not(loom))]
pub mod remote;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod segments;
#[cfg(not(loom))]
pub mod server;
#[cfg(all(feature = "sim", not(loom)))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod sim;
#[cfg(not(loom))]
mod socket_file;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod status;
#[cfg(not(loom))]
pub mod users;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod watch;
#[cfg(not(loom))]
pub mod wire;
