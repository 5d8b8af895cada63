//! The C boundary: the tables that NCCL looks up.

#[macro_use]
pub mod tables;
pub mod rma;
pub mod tuner;
pub mod types;
