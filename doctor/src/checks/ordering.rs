//! Whether an RDMA device's writes reach memory in the order in which they came, and by which way.

use super::rdma::{chosen, none, wrong};
use crate::finding::Finding;
use crate::readings::{Read, Readings};

/// A record that announces itself lies in memory after its payload, and a completion after what it announces, because a device's
/// later writes do not pass its earlier ones: PCI Express keeps them in order unless the later one is marked relaxed-ordered (base
/// specification, "Transaction Ordering"). A device marks its packets only with Enable Relaxed Ordering set in Device Control, and
/// NVIDIA's only those of registrations that ask for it, which pushgate's do not, unless the firmware's PCI_WR_ORDERING is
/// `force_relax`.
pub fn pci(r: &Readings) -> Vec<Finding> {
    if let Some(none) = none(r) {
        return vec![none];
    }
    let look = |name: &str| {
        let Some(function) = r.pci.iter().find(|f| f.what == name) else {
            return Finding::not_applicable(name, "a device in software");
        };
        match (&function.relaxed, &function.write_ordering) {
            (Read::Is(false), _) => Finding::passed(name, "relaxed ordering is off"),
            (_, Read::Is(word)) if word.starts_with("force_relax") => wrong(
                r,
                name,
                format!(
                    "the firmware's PCI_WR_ORDERING is {word}: a later write may reach memory before an earlier one"
                ),
                format!(
                    "mlxconfig -d {} set PCI_WR_ORDERING=per_mkey, then reset the device (mlxfwreset) or reboot",
                    function.address
                ),
            ),
            (Read::Is(true), Read::Is(word)) => Finding::passed(
                name,
                format!("only registrations that ask for it are relaxed: PCI_WR_ORDERING is {word}"),
            ),
            (Read::Is(true), Read::Absent) => Finding::passed(
                name,
                "only registrations that ask for it are relaxed, unless the firmware is set otherwise",
            ),
            (Read::Unreadable(why), _) | (_, Read::Unreadable(why)) => Finding::not_applicable(name, why),
            (Read::Absent, _) => {
                Finding::not_applicable(name, "it has no configuration space of PCI Express")
            }
        }
    };
    chosen(r).map(|device| look(&device.name)).collect()
}

/// With ATS a device asks the IOMMU for an address once, and sends what it has translated. A port that redirects peer traffic to the root
/// sends that too, unless Direct Translated is on there (PCI Express base specification, "ACS Control Register").
pub fn ats(r: &Readings) -> Vec<Finding> {
    const REDIRECT: u16 = 0x4 | 0x8;
    const DIRECT: u16 = 0x40;
    if let Some(none) = none(r) {
        return vec![none];
    }
    let look = |name: &str| {
        let Some(function) = r.pci.iter().find(|f| f.what == name) else {
            return Finding::not_applicable(name, "a device in software");
        };
        match &function.ats {
            Read::Is(false) => Finding::passed(name, "ATS is off"),
            Read::Absent => Finding::passed(name, "it has no ATS"),
            Read::Unreadable(why) => Finding::not_applicable(name, why),
            Read::Is(true) => {
                let up = |acs: &u16| acs & REDIRECT != 0 && acs & DIRECT == 0;
                let ports = function.bridges.iter().filter(|b| b.acs.is().is_some_and(up));
                let ports: Vec<_> = ports.map(|b| b.address.as_str()).collect();
                match ports.first() {
                    None => Finding::passed(
                        name,
                        "ATS is on, and no port above it redirects what it has translated",
                    ),
                    Some(first) => Finding::warned(
                        name,
                        format!(
                            "ATS is on, and ACS sends what it has translated up to the root at {}",
                            ports.join(", ")
                        ),
                        format!(
                            "setpci -s {first} ECAP_ACS+0x6.w=0040:0040, and so for each, as root after each boot, or ATS off \
                             (pci=noats on the kernel's command line)"
                        ),
                    ),
                }
            }
        }
    };
    chosen(r).map(|device| look(&device.name)).collect()
}
