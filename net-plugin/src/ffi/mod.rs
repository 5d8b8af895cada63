//! The C boundary.

pub mod tables;
pub mod types;
