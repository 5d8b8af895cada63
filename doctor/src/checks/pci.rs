//! The way between GPUs and RDMA devices.

use crate::finding::Finding;
use crate::readings::{Bridge, GPU, PciFunction, Read, Readings, Window};

/// Both ends of a peer-to-peer transfer, or nothing to say.
fn functions(r: &Readings) -> Result<&[PciFunction], Finding> {
    match r.pci.len() {
        0 => Err(Finding::not_applicable("", "no GPU and no RDMA device on PCI")),
        _ => Ok(&r.pci),
    }
}

fn name(f: &PciFunction) -> String {
    format!("{} ({})", f.address, f.what)
}

/// Groups of type `identity` translate nothing (iommu=pt); `DMA` and `DMA-FQ` do, which takes peer
/// traffic by the root complex and its IOTLB (kernel documentation, sysfs-kernel-iommu_groups;
/// GPUDirect RDMA guide: "IOMMUs").
pub fn iommu(r: &Readings) -> Vec<Finding> {
    let functions = match functions(r) {
        Ok(functions) => functions,
        Err(finding) => return vec![finding],
    };
    let told = |text: &str| {
        let words = text.split_whitespace().filter(|w| w.contains("iommu"));
        let words: Vec<_> = words.collect();
        if words.is_empty() { "the command line says nothing of it".into() } else { words.join(" ") }
    };
    let line = r.cmdline.is().map_or_else(|| "the command line was not read".into(), |t| told(t));
    // One alone has no peer. A BAR is the peer of either.
    let gpus = functions.iter().filter(|f| f.what == GPU).count();
    if r.wants.window != Window::Bar && (gpus == 0 || functions.len() == 1) {
        return vec![Finding::not_applicable("", "no GPU has a peer on PCI")];
    }
    if r.iommu_groups == 0 {
        return vec![Finding::passed("", format!("no IOMMU is on ({line})"))];
    }
    let remedy = "iommu=pt on the kernel's command line (with intel_iommu=on or amd_iommu=on where they are wanted), then reboot";
    functions
        .iter()
        .map(|f| match &f.iommu {
            Read::Is(kind) if kind == "identity" => {
                Finding::passed(&name(f), format!("not translated: identity ({line})"))
            }
            Read::Is(kind) if kind.starts_with("DMA") => Finding::warned(
                &name(f),
                format!("the IOMMU translates what it does: {kind} ({line})"),
                remedy,
            ),
            Read::Is(kind) => {
                Finding::warned(&name(f), format!("its IOMMU group is of type {kind} ({line})"), remedy)
            }
            Read::Absent => Finding::passed(&name(f), format!("it is in no IOMMU group ({line})")),
            Read::Unreadable(why) => {
                Finding::warned(&name(f), why, "look at /sys/kernel/iommu_groups/*/type")
            }
        })
        .collect()
}

/// The ports between two functions and the last bridge that is above both; none is above both: `None`.
fn between<'a>(one: &'a PciFunction, other: &'a PciFunction) -> Option<Vec<&'a Bridge>> {
    let same = |(a, b): &(&Bridge, &Bridge)| a.address == b.address;
    let common = one.bridges.iter().zip(&other.bridges).take_while(same).count();
    (common > 0).then(|| one.bridges[common..].iter().chain(&other.bridges[common..]).collect())
}

/// P2P Request Redirect and P2P Completion Redirect of the ACS control register (PCI Express base
/// specification, "ACS Control Register"): with either at a port between two functions, what they send
/// each other goes up to the root instead of through the switch above both. A virtual machine to which
/// functions are passed needs them. Without a common switch all goes by the root anyway.
pub fn acs(r: &Readings) -> Vec<Finding> {
    const REDIRECT: u16 = 0x4 | 0x8;
    let functions = match functions(r) {
        Ok(functions) => functions,
        Err(finding) => return vec![finding],
    };
    let pairs =
        functions.iter().enumerate().flat_map(|(i, one)| functions[i + 1..].iter().map(move |o| (one, o)));
    let with_gpu = pairs.filter(|(one, other)| one.what == GPU || other.what == GPU);
    let ways: Vec<Vec<&Bridge>> = with_gpu.filter_map(|(one, other)| between(one, other)).collect();
    if ways.is_empty() {
        return vec![Finding::not_applicable("", "no GPU has a peer below a switch in common")];
    }
    let mut ports: Vec<&Bridge> = ways.iter().flatten().copied().collect();
    ports.sort_by(|a, b| a.address.cmp(&b.address));
    ports.dedup_by(|a, b| a.address == b.address);
    let of = |wanted: fn(&Read<u16>) -> bool| -> Vec<&str> {
        ports.iter().filter(|b| wanted(&b.acs)).map(|b| b.address.as_str()).collect()
    };
    let on = of(|acs| acs.is().is_some_and(|control| control & REDIRECT != 0));
    let why = ports.iter().find_map(|b| match &b.acs {
        Read::Unreadable(why) => Some(why),
        _ => None,
    });
    let hidden = of(|acs| matches!(acs, Read::Unreadable(_)));
    let mut findings = Vec::new();
    if let Some(first) = on.first() {
        findings.push(Finding::warned(
            "",
            format!("ACS sends peer traffic up to the root at {}", on.join(", ")),
            format!(
                "on a host without virtual machines: setpci -s {first} ECAP_ACS+0x6.w=0000, and so for each, as root \
                 after each boot; or off in the firmware"
            ),
        ));
    }
    if let Some(why) = why {
        findings.push(Finding::warned(
            "",
            format!("can't be read at {}: {why}", hidden.join(", ")),
            "run it as root, or: sudo lspci -vvv | grep ACSCtl",
        ));
    }
    if findings.is_empty() {
        let reading =
            format!("pairs below a switch in common: {}; no port between them redirects", ways.len());
        findings.push(Finding::passed("", reading));
    }
    findings
}
