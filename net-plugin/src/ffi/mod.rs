//! The C boundary: the tables that NCCL looks up.

pub mod profiler;
mod second;
#[macro_use]
pub mod tables;
pub mod rma;
pub mod tuner;
pub mod types;
