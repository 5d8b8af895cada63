//! The C boundary.

pub mod profiler;
pub mod tables;
pub mod types;
