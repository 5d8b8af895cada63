//! GPUs and RDMA devices on PCI: IOMMU groups, and ACS of the bridges above them.

use super::{Roots, binary, gpu, is_pci_address, names, text};
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
        .filter(|name| is_pci_address(name) && *name != address)
        .map(|name| {
            let config = devices.join(name).join("config");
            let acs = match binary(&config).then(|bytes| control(&bytes)) {
                Read::Is(Some(control)) => Read::Is(control),
                Read::Is(None) | Read::Absent => Read::Absent,
                Read::Unreadable(why) => Read::Unreadable(why),
            };
            Bridge { address: name.to_string(), acs }
        })
        .collect()
}

/// The ACS control register of a function's configuration space, if it has that capability
/// (PCI Express base specification: extended capability 0x000d, control at 6).
pub fn control(config: &[u8]) -> Result<Option<u16>, String> {
    const ACS: u16 = 0x000d;
    let word = |at: usize| Some(u16::from_le_bytes(config.get(at..at + 2)?.try_into().ok()?));
    if config.len() <= 64 {
        return Err("the kernel shows 64 bytes of configuration space to users that are not root".into());
    }
    if config.len() <= 256 {
        // A PCI function without extended configuration space.
        return Ok(None);
    }
    let mut at = 0x100;
    // There is room for so many; a list that goes in circles is longer.
    for _ in 0..(4096 - 0x100) / 4 {
        let (Some(id), Some(next)) = (word(at), word(at + 2)) else {
            return Err(format!("an extended capability lies at {at:#x}, beyond the configuration space"));
        };
        match id {
            ACS => return word(at + 6).map(Some).ok_or_else(|| "the ACS capability is cut short".into()),
            0 | 0xffff if next >> 4 == 0 || id == 0xffff => return Ok(None),
            _ => {}
        }
        at = usize::from(next >> 4) & !3;
        if at < 0x100 {
            return Ok(None);
        }
    }
    Err("the list of extended capabilities has no end".into())
}

#[cfg(test)]
mod tests {
    use super::control;

    fn space(capabilities: &[(usize, u16, u16, u16)]) -> Vec<u8> {
        let mut bytes = vec![0u8; 4096];
        for (at, id, next, control) in capabilities {
            bytes[*at..at + 2].copy_from_slice(&id.to_le_bytes());
            bytes[at + 2..at + 4].copy_from_slice(&(next << 4 | 1).to_le_bytes());
            bytes[at + 6..at + 8].copy_from_slice(&control.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn acs_is_found_wherever_it_stands_in_the_list() {
        assert_eq!(control(&space(&[(0x100, 1, 0x148, 0), (0x148, 0xd, 0, 0x1d)])), Ok(Some(0x1d)));
        assert_eq!(control(&space(&[(0x100, 1, 0, 0)])), Ok(None));
        assert_eq!(control(&space(&[])), Ok(None));
        assert_eq!(control(&[0; 256]), Ok(None));
        assert_eq!(control(&[0xff; 4096]), Ok(None), "a function that is gone");
    }

    #[test]
    fn what_makes_no_sense_is_a_sentence() {
        assert!(control(&[0; 64]).unwrap_err().contains("not root"));
        assert!(control(&space(&[(0x100, 1, 0x100, 0)])).unwrap_err().contains("no end"));
        let cut = &space(&[(0x100, 1, 0xff8, 0), (0xff8, 0xd, 0, 0)])[..0xffc];
        assert!(control(cut).unwrap_err().contains("cut short"));
        assert!(control(&space(&[(0x100, 1, 0xffc, 0)])[..300]).is_err());
    }
}
