//! What a message costs between a GPU and a NIC over PCIe.

pub mod choose;
pub mod curve;
pub mod findings;
pub mod fit;
