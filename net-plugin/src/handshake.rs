//! How two ends connect. Nothing here waits: every call looks at what has arrived, goes as far as
//! it can, and says whether the connection is complete.
//!
//! The connector chooses the transport by what it dials (`dial.rs`), and the listener takes that of the socket at which the
//! connection has come. Each end greets with versions and nonce, the connector first. Then both make their queue pair by
//! the frames of `pushgate_engine::connect`. A sender that does not greet in time, or not as an end of this plugin would,
//! loses its own connection and disturbs no other one.

mod attempts;
mod greeting;
mod listener;
mod progress;
#[cfg(test)]
mod tests;

pub use attempts::Attempts;
pub use listener::Listener;
pub use progress::Made;
