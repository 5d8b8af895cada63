//! What a plugin tells NCCL: of its devices, and in the environment of NCCL's process.

use super::scenario::{Options, begin};

/// Prints NCCL's own variables as they are after a communicator's init, a line each.
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

/// Prints what NCCL is told of each device, a line each.
pub fn devices(o: &Options) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    for dev in 0..plugin.devices().expect("devices") {
        let p = plugin.properties(dev).expect("properties");
        let path = p.pci_path.as_deref().unwrap_or("no place");
        println!("{dev} {} {path} {:#018x} {} Mbit/s port {}", p.name, p.guid, p.speed, p.port);
    }
    plugin.finalize(ctx).expect("finalize");
}
