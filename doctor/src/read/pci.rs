//! GPUs and RDMA devices on PCI: IOMMU groups, and ACS of the bridges above them.

use pushgate_topology::{Address, Read as Found};

use super::files::{binary, names, text};
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

/// The ACS control register of a function's configuration space.
fn control(config: &[u8]) -> Read<u16> {
    match pushgate_topology::parse_config(config).acs {
        Found::Is(acs) => Read::Is(acs.control),
        Found::Absent => Read::Absent,
        Found::NeedsRoot => Read::Unreadable(
            "the kernel shows 64 bytes of configuration space to users that are not root".into(),
        ),
        Found::Unread => {
            Read::Unreadable("its configuration space makes no sense, or it does not answer".into())
        }
    }
}
