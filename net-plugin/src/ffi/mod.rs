//! The C boundary: the tables that NCCL looks up.

pub mod profiler;
mod second;
pub mod tables;
pub mod tuner;
pub mod types;
