//! Which way a message goes: by what a probe read, else by the model, else the safe one.

pub use crate::findings::Way;
