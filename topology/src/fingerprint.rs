//! The fingerprint of a topology: measurements on one topology do not hold for another.

use crate::address::Address;
use crate::tree::{Parent, Topology};

impl Topology {
    /// 16 hexadecimal digits that identify this topology.
    ///
    /// They change with the GPUs, NICs and windows of this host, with their places and what is
    /// above them, and with the processor. They do not change with what a process is allowed to see
    /// of these, nor from one start of the host to the next. `of` is part of them: it names what
    /// ran the kernels ("cuda", "cpu"), because figures of the two have nothing in common.
    pub fn fingerprint(&self, of: &str) -> String {
        let mut text = format!("{of};{};", self.machine.cpu_model.as_deref().unwrap_or("?"));
        let nics = self.nics.iter().filter_map(|n| n.address);
        let mut ends: Vec<Address> = self.gpus.iter().map(|g| g.address).chain(nics).collect();
        ends.extend(self.shims.iter().map(|s| s.address));
        ends.extend(self.functions.values().filter(|f| f.is_gpu()).map(|f| f.address));
        ends.sort_unstable();
        ends.dedup();
        for end in ends {
            let mut at = Some(end);
            // A tree from a file could contain a ring.
            for _ in 0..64 {
                let Some(function) = at.and_then(|a| self.functions.get(&a)) else { break };
                let ids = (function.vendor.unwrap_or(0), function.device.unwrap_or(0));
                text.push_str(&format!("{}={:04x}:{:04x}<", function.address, ids.0, ids.1));
                at = match &function.parent {
                    Parent::Function(above) => Some(*above),
                    Parent::RootComplex(name) => {
                        text.push_str(name);
                        None
                    }
                };
            }
            text.push(';');
        }
        // FNV-1a, 64 bits: Fowler, Noll and Vo; draft-eastlake-fnv.
        let hash = text
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        format!("{hash:016x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Function, Gpu};

    fn host(gpus: &[&str]) -> Topology {
        let mut topology = Topology::default();
        for at in gpus {
            let address: Address = at.parse().unwrap();
            let mut function = Function::new(address, Parent::RootComplex("pci0000:00".into()));
            (function.vendor, function.device) = (Some(0x10de), Some(0x2335));
            topology.functions.insert(address, function);
            topology.gpus.push(Gpu::new(address));
        }
        topology
    }

    #[test]
    fn the_fingerprint_changes_only_with_the_hardware() {
        let one = host(&["0000:17:00.0"]);
        let name = one.fingerprint("cuda");
        assert!(name.len() == 16 && name.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(name, host(&["0000:17:00.0"]).fingerprint("cuda"));
        let mut noted = one.clone();
        noted.notes.push("a note".into());
        noted.gpus[0].name = Some("NVIDIA H200".into());
        assert_eq!(noted.fingerprint("cuda"), name);
        let mut moved = one.clone();
        moved.functions.values_mut().for_each(|f| f.parent = Parent::RootComplex("pci0000:80".into()));
        let mut ring = one.clone();
        let at = *ring.functions.keys().next().unwrap();
        ring.functions.values_mut().for_each(|f| f.parent = Parent::Function(at));
        let two = host(&["0000:17:00.0", "0000:18:00.0"]);
        for other in [
            one.fingerprint("cpu"),
            two.fingerprint("cuda"),
            moved.fingerprint("cuda"),
            ring.fingerprint("cuda"),
        ] {
            assert_ne!(other, name);
        }
        assert_eq!(host(&["0000:18:00.0", "0000:17:00.0"]).fingerprint("cuda"), two.fingerprint("cuda"));
    }
}
