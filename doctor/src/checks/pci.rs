//! The way between GPUs and RDMA devices.

use crate::finding::Finding;
use crate::readings::{PciFunction, Read, Readings};

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

/// P2P Request Redirect and P2P Completion Redirect of the ACS control register (PCI Express base
/// specification, "ACS Control Register"): with either, traffic between two functions below one
/// switch goes up to the root. A virtual machine that passes functions through needs them.
pub fn acs(r: &Readings) -> Vec<Finding> {
    const REDIRECT: u16 = 0x4 | 0x8;
    let functions = match functions(r) {
        Ok(functions) => functions,
        Err(finding) => return vec![finding],
    };
    if functions.len() < 2 {
        return vec![Finding::not_applicable("", "one function alone: there is no peer on PCI")];
    }
    functions
        .iter()
        .map(|f| {
            let all = |of: fn(&Read<u16>) -> bool| -> Vec<_> {
                f.bridges.iter().filter(|b| of(&b.acs)).map(|b| b.address.as_str()).collect()
            };
            let on = all(|acs| acs.is().is_some_and(|control| control & REDIRECT != 0));
            let hidden = all(|acs| matches!(acs, Read::Unreadable(_)));
            if let Some(first) = on.first() {
                return Finding::warned(
                    &name(f),
                    format!("ACS sends peer traffic up to the root at {}", on.join(", ")),
                    format!(
                        "on a host without virtual machines: setpci -s {first} ECAP_ACS+0x6.w=0000 for each, as root after each boot, or off in the firmware"
                    ),
                );
            }
            if let (false, Some(bridge)) = (hidden.is_empty(), f.bridges.iter().find(|b| hidden.contains(&b.address.as_str()))) {
                let why = match &bridge.acs {
                    Read::Unreadable(why) => why.as_str(),
                    _ => "",
                };
                return Finding::warned(&name(f), format!("can't be read at {}: {why}", hidden.join(", ")), "run as root, or: sudo lspci -vvv | grep ACSCtl");
            }
            Finding::passed(&name(f), format!("no redirection at its bridges: {}", f.bridges.len()))
        })
        .collect()
}
