//! GPUs and RDMA devices on PCI: IOMMU groups, and ACS of the bridges above them.

use std::path::Path;

use pushgate_topology::{Address, Read as Found};

use super::files::{binary, names, text};
use super::firmware;
use super::gpu;
use super::roots::Roots;
use crate::readings::{Bridge, GPU, PciFunction, RdmaDevice, Read};

pub fn functions(roots: &Roots, rdma: &Read<Vec<RdmaDevice>>) -> Vec<PciFunction> {
    let gpus = gpu::gpus(roots).into_iter().map(|address| (address, GPU.to_string()));
    let devices = rdma.is().into_iter().flatten().filter_map(|d| Some((d.pci.clone()?, d.name.clone())));
    gpus.chain(devices)
        .map(|(address, what)| {
            let folder = roots.sys.join("bus/pci/devices").join(&address);
            PciFunction {
                iommu: text(&folder.join("iommu_group/type")),
                relaxed: match what == GPU {
                    true => Read::Absent,
                    false => relaxed(&folder),
                },
                write_ordering: match roots.live && what != GPU {
                    true => firmware::write_ordering(&folder, &address),
                    false => Read::Absent,
                },
                ats: match what == GPU {
                    true => Read::Absent,
                    false => ats(&folder),
                },
                bridges: bridges(roots, &address),
                address,
                what,
            }
        })
        .collect()
}

pub fn iommu_groups(roots: &Roots) -> usize {
    names(&roots.sys.join("kernel/iommu_groups")).len()
}

/// The functions that lie above one in sysfs' tree, from the root on.
fn bridges(roots: &Roots, address: &str) -> Vec<Bridge> {
    let devices = roots.sys.join("bus/pci/devices");
    let Ok(place) = std::fs::canonicalize(devices.join(address)) else { return Vec::new() };
    let above = place.components().filter_map(|part| part.as_os_str().to_str());
    above
        .filter(|name| name.parse::<Address>().is_ok() && *name != address)
        .map(|name| {
            let config = devices.join(name).join("config");
            let acs = match binary(&config) {
                Read::Is(bytes) => control(&bytes),
                Read::Absent => Read::Absent,
                Read::Unreadable(why) => Read::Unreadable(why),
            };
            Bridge { address: name.to_string(), acs }
        })
        .collect()
}

/// What a fact of a configuration space is missing for.
fn missing<T>(found: Found<T>) -> Read<T> {
    match found {
        Found::Is(fact) => Read::Is(fact),
        Found::Absent => Read::Absent,
        Found::NeedsRoot => Read::Unreadable(
            "the kernel shows 64 bytes of configuration space to users that are not root".into(),
        ),
        Found::Unread => {
            Read::Unreadable("its configuration space makes no sense, or it does not answer".into())
        }
    }
}

/// Whether a function may mark its packets relaxed-ordered.
fn relaxed(folder: &Path) -> Read<bool> {
    match binary(&folder.join("config")) {
        Read::Is(bytes) => {
            missing(pushgate_topology::parse_config(&bytes).express).then(|e| Ok(e.relaxed_ordering))
        }
        Read::Absent => Read::Absent,
        Read::Unreadable(why) => Read::Unreadable(why),
    }
}

/// The ACS control register of a function's configuration space.
fn control(config: &[u8]) -> Read<u16> {
    missing(pushgate_topology::parse_config(config).acs).then(|acs| Ok(acs.control))
}

/// Whether a function's Address Translation Services are on: the highest bit of their control register (PCI Express, "ATS Extended
/// Capability").
fn ats(folder: &Path) -> Read<bool> {
    let bytes = match binary(&folder.join("config")) {
        Read::Is(bytes) => bytes,
        Read::Absent => return Read::Absent,
        Read::Unreadable(why) => return Read::Unreadable(why),
    };
    if bytes.len() <= EXTENDED {
        return missing(Found::NeedsRoot);
    }
    match extended(&bytes, ATS).and_then(|at| bytes.get(at + 7)) {
        Some(high) => Read::Is(high & 0x80 != 0),
        None => Read::Absent,
    }
}

/// Where extended capabilities begin (PCI Express, "Extended Configuration Space").
const EXTENDED: usize = 0x100;
/// Address Translation Services.
pub(crate) const ATS: u16 = 0xf;

/// Where an extended capability of a configuration space lies.
fn extended(config: &[u8], wanted: u16) -> Option<usize> {
    let mut at = EXTENDED;
    for _ in 0..(4096 - EXTENDED) / 4 {
        let head = u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?);
        if head as u16 == wanted {
            return Some(at);
        }
        at = (head >> 20) as usize & !3;
        if at < EXTENDED {
            return None;
        }
    }
    None
}
