//! What moving a message between a GPU and a NIC costs over PCIe: by formulas ([`cost`], [`transfers`]) and by a
//! simulator of the link, TLP by TLP.
//!
//! [`findings`] is what a probe read on a host, and its file; [`choose`](choose::choose) takes the way of a message by
//! them.
//!
//! Pure functions, but for that file: no I/O, no clock. Times are in ns (those of findings in us, and say so),
//! bandwidths in GB/s (10^9 bytes a second), sizes in bytes.
//! docs/pcie-model.md says what is modelled and how well it fits what machines do.

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
pub mod simulator;
pub mod transfers;

pub use cost::{Crossing, Estimate, Limit, Rate, Way, crossings, estimate};
pub use error::{ParameterError, Result};
pub use link::{Completions, Dllps, Link};
pub use parameters::Parameters;
pub use route::{Hop, Route, Window};
