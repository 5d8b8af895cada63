//! What devices, engines and processes agree on: the numbers of `abi.h`, and the 64-byte record that carries a message.
//!
//! The crate packs and unpacks private copies. It accesses no shared memory and calls no operating system.

#![forbid(unsafe_code)]

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals)]
pub mod abi;
pub mod record;
pub mod versions;
