//! The queue pair over TCP, for hosts without RDMA.
//!
//! As over RDMA, the peer has a copy of our window, the *mirror*. A payload arrives there, at the very place that it has in
//! our window: who may write the one by its credit may write the other (P1), and the receiving device reads it in place. A
//! PUT into a region of the peer's host, and a SEND to such a posted receive, go straight there instead, out of the window or
//! out of a region of this end.
//!
//! | part | file |
//! | --- | --- |
//! | what crosses a stream: headers, checksums | `frame.rs` |
//! | bytes to frames, and payload to its place | `incoming.rs` |
//! | what was heard of the peer: messages in their order, counts, regions | `inbox.rs` |
//! | messages to frames of several streams | `outgoing.rs` |
//! | what moves the bytes: the trait, plain sockets, io_uring, and which of the two | `wire.rs`, `sockets.rs`, `uring/`, `wires.rs` |
//! | streams of memory, for tests and the simulator | `simulated.rs` |
//! | how the ends come by their streams | `meeting.rs`, `host.rs`, `setup.rs` |
//! | the link as an endpoint drives it | `tcp_link.rs` |
//!
//! A link has one stream or several. Short messages and all that an end says of itself go over the first one; long messages
//! are cut into parts that go over all streams, and the receiver puts a message together before it takes it. Everything that
//! waits is bounded: messages by the gate's permits, payload by the room in window and mirror, frames by rings of fixed
//! length. A receiver that has no room leaves bytes in the sockets.
//!
//! `host.rs`, `sockets.rs`, `uring/` and `wires.rs` make system calls. All other files know no clock and no system call, and
//! the simulator runs them.

// Loom's atomics are no words of a mapping.
#![cfg(not(loom))]

#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod frame;
mod host;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod inbox;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod incoming;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod meeting;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod outgoing;
#[cfg(any(test, feature = "sim"))]
#[cfg_attr(not(feature = "sim"), allow(dead_code, reason = "unit tests need a part of it"))]
pub mod random;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod setup;
#[cfg(any(test, feature = "sim"))]
#[cfg_attr(
    not(all(test, feature = "sim")),
    allow(dead_code, reason = "tests and simulator need a part of it each")
)]
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
pub mod simulated;
mod sockets;
#[deny(clippy::disallowed_methods, clippy::disallowed_types)]
mod tcp_link;
#[cfg(test)]
mod tests;
mod uring;
pub mod wire;
mod wires;

pub use host::{Host, HostError, Tuning};
pub use meeting::{Meeting, Place};
pub use setup::{Config, Offer, TcpOpening, TcpPrepared};
pub use sockets::{Readiness, Sockets};
pub use tcp_link::TcpLink;
pub use uring::RingError;
pub use wires::{Io, Wires};
