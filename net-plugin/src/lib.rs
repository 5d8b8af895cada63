//! NCCL's network plugin: what NCCL sends between ranks goes through windows, gate and queue pairs.
//! docs/nccl.md says how to use it.
//!
//! `ffi` is the C boundary: the tables of five versions of the interface, which are thin shims over
//! one implementation. No other module knows a version. `plugin` is what NCCL asks of a
//! process, `runtime` the threads that a process has once, `handshake` how two ends connect without ever blocking, `comm`
//! a connection in use, `send` and `receive` its two ends. `rma` is NCCL's other table, of puts and signals.

mod address;
mod again;
mod alike;
mod comm;
mod devices;
mod dial;
mod end;
mod error;
mod exclusive;
pub mod ffi;
#[cfg(test)]
mod fuzzed;
mod gpu;
mod handle;
mod handshake;
mod hosts;
mod identity;
mod join;
mod lane;
mod large;
mod listening;
mod loaded;
mod log;
mod path;
mod plan;
mod plugin;
mod pool;
mod program;
mod props;
mod pushes;
mod ranks;
mod rdma;
mod reach;
mod reaching;
mod receive;
mod registration;
mod rma;
mod runtime;
mod send;
mod socket;
mod stream;
mod taken;
#[cfg(test)]
mod testing;
mod trace;
mod tuning;
mod under_way;
mod variables;
mod watch;
