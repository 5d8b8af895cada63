//! The C boundary: the tables that NCCL looks up.

pub mod profiler;
pub mod tables;
pub mod tuner;
pub mod types;
