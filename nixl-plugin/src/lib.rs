//! `libplugin_PUSHGATE.so`: a backend of NIXL, which moves KV caches between workers. docs/nixl.md says how to use it.
//!
//! `shim/plugin.cpp` is NIXL's class; it calls `face`. `agent` is what NIXL calls, `engine` what its calls and its
//! threads share, `session` a connection with another agent over a queue
//! pair of the library, `transfer` one transfer, with the copies of those that need no message. `regions` has
//! the memory that the queue pair reads and writes itself. `wire`, `pieces` and `registrations` decide, without I/O or threads. `greet` is how two agents meet.
//! `release` looks which NIXL it is.

#![allow(non_snake_case, reason = "NIXL looks for libplugin_NAME.so")]

mod agent;
mod engine;
mod face;
#[cfg(test)]
mod fuzzed;
mod gate;
mod gpu;
mod greet;
#[cfg(test)]
mod leaving;
mod log;
mod on_gpu;
mod pieces;
mod regions;
mod registrations;
mod release;
mod session;
mod status;
#[cfg(test)]
mod tests;
mod transfer;
#[cfg(test)]
mod unruly;
mod wire;

pub use face::{nixl_plugin_fini, nixl_plugin_init};
