//! The host around the tree: its processor, its NUMA nodes, and whether it is a virtual machine.

use serde::Serialize;

/// What is known about the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Vendor of the system, from DMI.
    pub vendor: Option<String>,
    /// Product, from DMI.
    pub product: Option<String>,
    /// Model of the processor.
    pub cpu_model: Option<String>,
    /// What kind of machine the processor was made for.
    pub cpu: CpuKind,
    /// NUMA nodes.
    pub nodes: Vec<Node>,
    /// Why the host is taken for a virtual machine; `None` if it is not.
    pub virtual_machine: Option<String>,
    /// Whether the tree is the hypervisor's and flat: distances read from such a tree say nothing.
    pub flat: bool,
    /// Version of NVIDIA's kernel driver.
    pub nvidia_driver: Option<String>,
}

impl Machine {
    /// The number of the only NUMA node with processors, if there is one alone.
    pub(crate) fn only_node(&self) -> Option<u32> {
        let mut nodes = self.nodes.iter().filter(|node| node.processors);
        let first = nodes.next()?;
        nodes.next().is_none().then_some(first.number)
    }
}

/// What kind of machine a processor was made for. Processors of client machines are known to carry
/// writes between devices, but not reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuKind {
    /// Servers and workstations.
    Server,
    /// Desktops and laptops.
    Client,
    /// Not known.
    #[default]
    Unknown,
}

impl CpuKind {
    /// Derives the kind from the model's name.
    pub fn of(model: &str) -> Self {
        let has = |words: &[&str]| words.iter().any(|w| model.contains(w));
        if has(&["Xeon", "EPYC", "Threadripper", "Neoverse"]) {
            Self::Server
        } else if has(&["Core(TM)", "Intel(R) Core", "Ryzen", "Pentium", "Celeron", "Athlon"]) {
            Self::Client
        } else {
            Self::Unknown
        }
    }
}

/// The names of Arm's own cores in servers and in GB10, by the part's number; the implementer is 0x41. On 64-bit ARM
/// /proc/cpuinfo has numbers and no names.
const ARM: [(&str, &str); 9] = [
    ("0xd0c", "Neoverse N1"), // Graviton2
    ("0xd40", "Neoverse V1"), // Graviton3
    ("0xd49", "Neoverse N2"),
    ("0xd4f", "Neoverse V2"), // Grace, Graviton4
    ("0xd84", "Neoverse V3"),
    ("0xd8e", "Neoverse N3"),
    ("0xd85", "Cortex-X925"), // GB10, beside the next
    ("0xd87", "Cortex-A725"),
    ("0xd83", "Neoverse V3AE"),
];

/// The model of a 64-bit ARM processor by /proc/cpuinfo: each kind of core once.
pub(crate) fn arm_model(cpuinfo: &str) -> Option<String> {
    let mut cores: Vec<&str> = Vec::new();
    let mut by_arm = false;
    for line in cpuinfo.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        match name.trim() {
            "CPU implementer" => by_arm = value.trim() == "0x41",
            "CPU part" if by_arm => {
                let known = ARM.iter().find(|(part, _)| *part == value.trim());
                cores.extend(known.map(|(_, name)| *name).filter(|name| !cores.contains(name)));
            }
            _ => {}
        }
    }
    (!cores.is_empty()).then(|| format!("Arm {}", cores.join(" and ")))
}

/// A NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// The node's number.
    pub number: u32,
    /// The package (socket) of the node's first processor.
    pub package: Option<u32>,
    /// Whether the node has processors. One that has none is memory alone: on Grace hosts, a GPU's.
    pub processors: bool,
}

/// The signs of a virtual machine, as read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signs<'a> {
    /// `sys_vendor` and `product_name` of DMI.
    pub dmi: [Option<&'a str>; 2],
    /// Whether the flags in /proc/cpuinfo contain `hypervisor`.
    pub flag: bool,
    /// The content of /sys/hypervisor/type.
    pub kind: Option<&'a str>,
    /// The vendor of the subsystem of the host bridge at 00:00.0.
    pub bridge: Option<u16>,
}

/// Red Hat's number, which QEMU's devices have as vendor of the subsystem.
const QEMU: u16 = 0x1af4;

/// Names in DMI that no physical machine has.
const HYPERVISORS: [&str; 12] = [
    "QEMU",
    "KVM",
    "VMware",
    "VirtualBox",
    "Virtual Machine",
    "Bochs",
    "Parallels",
    "OpenStack",
    "Google Compute Engine",
    "HVM domU",
    "Alibaba Cloud ECS",
    "Firecracker",
];

/// Why a host with these signs is taken for a virtual machine.
pub(crate) fn why_virtual(signs: &Signs) -> Option<String> {
    let named = signs.dmi.iter().flatten().find(|text| HYPERVISORS.iter().any(|h| text.contains(h)));
    if let Some(text) = named {
        return Some(format!("DMI calls it {text:?}"));
    }
    // EC2's virtual machines and its whole servers have one vendor. On ARM no flag tells them apart.
    if let [Some("Amazon EC2"), Some(product)] = signs.dmi
        && !product.contains(".metal")
    {
        return Some(format!("DMI calls it \"Amazon EC2\" {product:?}"));
    }
    if signs.flag {
        return Some("/proc/cpuinfo has the flag hypervisor".into());
    }
    if let Some(kind) = signs.kind {
        return Some(format!("/sys/hypervisor/type says {kind:?}"));
    }
    (signs.bridge == Some(QEMU)).then(|| "its host bridge is QEMU's".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_known_by_name() {
        for (model, kind) in [
            ("Intel(R) Xeon(R) Platinum 8480C", CpuKind::Server),
            ("AMD EPYC 9575F 64-Core Processor", CpuKind::Server),
            ("AMD Ryzen Threadripper PRO 7985WX 64-Cores", CpuKind::Server),
            ("AMD Ryzen 9 7950X 16-Core Processor", CpuKind::Client),
            ("Intel(R) Core(TM) Ultra 9 285K", CpuKind::Client),
            ("13th Gen Intel(R) Core(TM) i9-13900K", CpuKind::Client),
            ("Arm Neoverse V2", CpuKind::Server),
            ("something else", CpuKind::Unknown),
        ] {
            assert_eq!(CpuKind::of(model), kind, "{model}");
        }
    }

    #[test]
    fn each_sign_tells_a_virtual_machine() {
        let signs = Signs::default();
        assert_eq!(why_virtual(&signs), None);
        let bare =
            Signs { dmi: [Some("Supermicro"), Some("SYS-821GE")], bridge: Some(0x8086), ..signs.clone() };
        assert_eq!(why_virtual(&bare), None);
        let vm = Signs { dmi: [Some("QEMU"), Some("Standard PC (Q35 + ICH9, 2009)")], ..signs.clone() };
        assert_eq!(why_virtual(&vm).unwrap(), "DMI calls it \"QEMU\"");
        let ec2 = |product| why_virtual(&Signs { dmi: [Some("Amazon EC2"), Some(product)], ..signs.clone() });
        assert_eq!(ec2("g5g.metal"), None);
        assert_eq!(ec2("g5g.16xlarge").unwrap(), "DMI calls it \"Amazon EC2\" \"g5g.16xlarge\"");
        assert!(why_virtual(&Signs { flag: true, ..signs.clone() }).unwrap().contains("cpuinfo"));
        assert!(why_virtual(&Signs { kind: Some("xen"), ..signs.clone() }).unwrap().contains("xen"));
        assert!(why_virtual(&Signs { bridge: Some(QEMU), ..signs }).unwrap().contains("QEMU"));
    }
}
