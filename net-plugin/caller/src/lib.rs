//! Calls network plugins as NCCL does: a plugin's shared library with the calls of its table, and memory for messages. It knows
//! nothing about a plugin but what NCCL's headers say.

pub mod cuda;
pub mod memory;
pub mod table;
