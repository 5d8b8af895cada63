//! The cost of moving a message between a GPU and a NIC over PCIe, by formulas ([`cost`], [`transfers`]).
//!
//! [`findings`] holds what a probe read on a host, and its file; [`choose`](choose::choose) uses
//! them to choose the way of a message.
//!
//! Everything but that file is pure functions: no I/O, no clock. Times are in ns (those of findings
//! in us, which their docs say), bandwidths in GB/s (10^9 bytes a second), sizes in bytes.
//! docs/pcie-model.md says what is modelled and how well it agrees with machines.

pub mod choose;
pub mod cost;
pub mod curve;
mod error;
pub mod findings;
pub mod fit;
pub mod hops;
pub mod link;
pub mod parameters;
pub mod plot;
pub mod route;
pub mod transfers;
pub mod whole;

pub use cost::{Crossing, Estimate, Limit, Rate, Way, crossings, estimate};
pub use error::{ParameterError, Result};
pub use link::{Completions, Dllps, Link};
pub use parameters::Parameters;
pub use route::{Hop, Route, Window};
