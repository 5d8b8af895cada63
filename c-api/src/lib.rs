//! The C API over the library: `libpushgate.so` and `pushgate/pushgate.h`, which cbindgen makes from these sources.
//!
//! `boundary.rs` is the one place at which a call enters and leaves: it catches panics, turns errors into numbers and keeps the
//! sentence of the last one. `table.rs` has the handles: a handle is a number in the form of a pointer, never an address, so a
//! wrong one is found and nothing is read through it. `arguments.rs` checks pointers, texts and structures. The other files are the
//! calls, one file for each kind of handle. docs/c-api.md is the page for users.

// What a pointer must be is said once, in the header's first comment; a `# Safety` in each comment would say it 60 times there.
#![allow(clippy::missing_safety_doc)]
// Names as they stand in the header.
#![allow(non_camel_case_types)]

mod arguments;
mod boundary;
mod codes;
mod comm;
mod context;
mod host;
mod interrupt;
mod kernel;
mod log;
mod memory;
mod queue_pair;
mod region;
mod table;

pub use boundary::*;
pub use codes::*;
pub use comm::*;
pub use context::*;
pub use host::*;
pub use interrupt::*;
pub use kernel::*;
pub use log::*;
pub use memory::*;
pub use queue_pair::*;
pub use region::*;
