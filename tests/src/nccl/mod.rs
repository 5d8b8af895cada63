//! A caller of network plugins in the manner of NCCL: it loads the shared library, takes one of its
//! tables, and drives it as NCCL's proxy threads do. It knows nothing about the plugin but what
//! NCCL's headers say, so any plugin can be tried.
//!
//! `pushgate_net_caller` has the library and its calls, `pair` two ranks with connections and traffic between
//! them, `scenario`, `closing`, `tags`, `fair`, `mixed`, `stall`, `recovering`, `unanswered` and `told`
//! what is tried, `speed` and `growth` what is measured.

pub mod closing;
mod cores;
mod cuda;
mod early;
mod fair;
pub(crate) mod forked;
mod growth;
mod mixed;
pub mod pair;
mod recovering;
pub mod scenario;
pub mod speed;
mod stall;
mod still;
pub mod tags;
mod told;
mod unanswered;

pub use pushgate_net_caller::table;
