//! The C boundary.

pub mod profiler;
pub mod tables;
pub mod tuner;
pub mod types;
