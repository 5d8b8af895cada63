//! Endpoints and the engine that drives them: the proxy of pushgate, as a library.
//!
//! `pushgate-core` decides; this crate performs. [`connect`] makes a queue pair with the other end, and is the one place that
//! names transports; [`endpoint`] joins rings, core and link; [`rails`] makes several links one; [`engine`] drives the endpoints;
//! [`recorder`] shows others what the engine does. docs/architecture.md has the whole path.

#[cfg_attr(loom, allow(dead_code))]
mod calls;

#[cfg_attr(loom, allow(dead_code))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod cell;

// Under loom these alone are built: loom's atomics are no words of a mapping. Modules that the simulator runs read no clock and
// keep no order of a hash (proxy/clippy.toml).
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod connect;
#[cfg(not(loom))]
pub mod counters;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod endpoint;
#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod idle;
#[cfg(not(loom))]
mod in_process;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod journal;
#[cfg(not(loom))]
pub mod measure;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod mover;
#[cfg(not(loom))]
pub mod proxy;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod rails;
#[cfg(not(loom))]
pub mod recorder;
#[cfg(not(loom))]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod status;
