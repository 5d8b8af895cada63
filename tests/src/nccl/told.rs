//! What a plugin sets in the environment of NCCL's process.

use super::scenario::{Options, begin};

/// Prints NCCL's own variables as they are behind a communicator's init, a line each.
pub fn told(o: &Options) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    let mut variables: Vec<_> = std::env::vars()
        .filter(|(name, _)| name.starts_with("NCCL_") && !name.starts_with("NCCL_CALLER_"))
        .collect();
    variables.sort();
    for (name, value) in variables {
        println!("{name}={value}");
    }
    plugin.finalize(ctx).expect("finalize");
}
