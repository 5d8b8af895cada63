//! What moving a message between a GPU and a NIC costs over PCIe: by formulas ([`cost`], [`transfers`]) and by a
//! simulator of the link, TLP by TLP.
//!
//! Pure functions: no I/O, no clock. Times are in ns, bandwidths in GB/s (10^9 bytes a second), sizes in bytes.
//! docs/pcie-model.md says what is modelled and how well it fits what machines do.

pub mod cost;
mod error;
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
