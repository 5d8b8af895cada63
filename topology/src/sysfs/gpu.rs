//! Finds GPUs: functions of NVIDIA's with a display class, with what the driver reports about them
//! in /proc.

use super::files::Files;
use super::host::field;
use crate::address::Address;
use crate::tree::{Gpu, Topology};

pub(super) fn read(proc: &mut Files, topology: &mut Topology) {
    topology.gpus = topology.functions.values().filter(|f| f.is_gpu()).map(|f| Gpu::new(f.address)).collect();
    for name in proc.list("driver/nvidia/gpus") {
        let path = format!("driver/nvidia/gpus/{name}");
        let address = match name.parse::<Address>() {
            Ok(address) => address,
            Err(e) => {
                proc.note(format!("{path}: {e}"));
                continue;
            }
        };
        let Some(gpu) = topology.gpus.iter_mut().find(|g| g.address == address) else {
            proc.note(format!("{path}: no such function among the GPUs of sysfs"));
            continue;
        };
        let text = proc.text(&format!("{path}/information")).unwrap_or_default();
        let clean = |key| field(&text, key).map(|v| v.chars().filter(|c| !c.is_control()).take(96).collect());
        gpu.name = clean("Model");
        gpu.uuid = clean("GPU UUID");
    }
}
