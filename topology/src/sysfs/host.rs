//! Reads the processor, the NUMA nodes, and the signs of a virtual machine.

use std::collections::BTreeMap;

use super::files::Files;
use crate::machine::{CpuKind, Node, arm_model};
use crate::tree::Topology;

pub(super) fn read(sys: &mut Files, proc: &mut Files, topology: &mut Topology) {
    let machine = &mut topology.machine;
    machine.vendor = sys.word("class/dmi/id/sys_vendor");
    machine.product = sys.word("class/dmi/id/product_name");
    let cpuinfo = proc.text("cpuinfo").unwrap_or_default();
    let named = field(&cpuinfo, "model name").map(|m| m.chars().filter(|c| !c.is_control()).collect());
    machine.cpu_model = named.or_else(|| arm_model(&cpuinfo));
    machine.cpu = machine.cpu_model.as_deref().map_or(CpuKind::Unknown, CpuKind::of);
    machine.nodes = nodes(sys);
    machine.nvidia_driver = proc.text("driver/nvidia/version").and_then(|t| version(&t));
}

/// Bytes of the caches of the highest level. Each is counted once, by the processors that share it.
pub(super) fn last_level_cache(sys: &mut Files) -> Option<u64> {
    let mut last: (u32, BTreeMap<String, u64>) = (0, BTreeMap::new());
    for cpu in sys.list("devices/system/cpu") {
        let is_cpu =
            cpu.strip_prefix("cpu").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
        if !is_cpu {
            continue;
        }
        let caches = format!("devices/system/cpu/{cpu}/cache");
        for index in sys.list(&caches).into_iter().filter(|name| name.starts_with("index")) {
            let at = format!("{caches}/{index}");
            let level = sys.parsed(&format!("{at}/level"), "cache level", |t| t.parse::<u32>().ok());
            let size = sys.parsed(&format!("{at}/size"), "cache size", |t| {
                t.strip_suffix('K')
                    .and_then(|kib| kib.parse::<u64>().ok())
                    .and_then(|kib| kib.checked_mul(1024))
            });
            let (Some(level), Some(size)) = (level, size) else { continue };
            // A list of many processors is longer than a word. A processor without a list has the cache alone.
            let shared = sys.text(&format!("{at}/shared_cpu_list")).unwrap_or_else(|| cpu.clone());
            if level > last.0 {
                last = (level, BTreeMap::new());
            }
            if level == last.0 {
                last.1.insert(shared, size);
            }
        }
    }
    Some(last.1.into_values().fold(0, u64::saturating_add)).filter(|bytes| *bytes > 0)
}

/// Whether the processor has the flag `hypervisor`, and the type that Xen reports.
pub(super) fn signs(sys: &mut Files, proc: &mut Files) -> (bool, Option<String>) {
    let cpuinfo = proc.text("cpuinfo").unwrap_or_default();
    let flag = field(&cpuinfo, "flags").is_some_and(|f| f.split_whitespace().any(|w| w == "hypervisor"));
    (flag, sys.word("hypervisor/type"))
}

/// The first value of `name` in a file of lines `name : value`.
pub(super) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name && !value.trim().is_empty()).then(|| value.trim())
    })
}

/// The version in "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release
/// Build ...": the word that consists of numbers and points.
fn version(text: &str) -> Option<String> {
    let line = text.lines().find(|l| l.starts_with("NVRM version"))?;
    let is_version = |w: &&str| w.contains('.') && w.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    line.split_whitespace().find(is_version).map(str::to_owned)
}

fn nodes(sys: &mut Files) -> Vec<Node> {
    let mut nodes = Vec::new();
    for name in sys.list("devices/system/node") {
        let Some(number) = name.strip_prefix("node").and_then(|n| n.parse().ok()) else { continue };
        // A node of memory without processors has an empty list.
        let cpus = sys.word(&format!("devices/system/node/{name}/cpulist")).unwrap_or_default();
        let first: Option<u32> = cpus.split([',', '-']).next().and_then(|n| n.parse().ok());
        let package = first.and_then(|cpu| {
            let path = format!("devices/system/cpu/cpu{cpu}/topology/physical_package_id");
            // -1 means that the processor does not report its package.
            let id = sys.parsed(&path, "package", |t| t.parse::<i64>().ok())?;
            id.try_into().ok()
        });
        nodes.push(Node { number, package, processors: first.is_some() });
    }
    nodes.sort_by_key(|n| n.number);
    nodes
}
