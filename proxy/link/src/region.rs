//! Regions: memory of this end that work requests may name. A key is an index and a tag that is not met by accident.
//! Every region that a WQE or a peer's record names is looked up here before a byte moves (P8).

use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use pushgate_core::inbound::Stretch;

use crate::memory::Keep;

/// How an RDMA device registers memory of another device.
#[derive(Clone, Debug)]
pub enum Exported {
    /// The driver exports the memory: a dma-buf, and the offset in it at which the region begins.
    DmaBuf(Arc<OwnedFd>, u64),
    /// By its address, like host memory: the driver lends the memory to RDMA drivers (nvidia_peermem does), or the
    /// device is `cpu`, whose memory is host memory.
    Address,
}

/// Where a region lies.
#[derive(Clone)]
pub enum RegionMemory {
    /// Mapped in this process, at an address that the CPU can use.
    Host {
        /// First byte.
        address: usize,
        /// Keeps the memory in place.
        keep: Option<Keep>,
    },
    /// Memory of a device, which only a `Mover` of `pushgate-engine` reaches.
    Device {
        /// First byte, as the device and the mover name it.
        address: u64,
        /// Set if an RDMA device can register the memory and write there itself.
        exported: Option<Exported>,
    },
}

/// Why a key, offset or length was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No such region on this queue pair.
    #[error("key {0:#010x} names no region of this queue pair")]
    Key(u32),
    /// The stretch leaves the region.
    #[error("{length} bytes at offset {offset} leave a region of {region} bytes")]
    Bounds {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
        /// Size of the region.
        region: u64,
    },
}

/// Regions that a queue pair may have at once.
pub const MAX_REGIONS: usize = 1 << INDEX_BITS;
const INDEX_BITS: u32 = 12;

/// The regions of one queue pair.
#[derive(Default)]
pub struct Regions {
    slots: Vec<Option<(u32, RegionMemory, u64)>>,
    tag: u32,
}

impl Regions {
    /// A table whose tags begin at `seed`.
    pub fn new(seed: u32) -> Self {
        Regions { slots: Vec::new(), tag: seed }
    }

    /// Adds a region and returns its key, lkey and rkey in one; `None` if there
    /// are [`MAX_REGIONS`].
    pub fn add(&mut self, memory: RegionMemory, bytes: u64) -> Option<u32> {
        let index = match self.slots.iter().position(|s| s.is_none()) {
            Some(i) => i,
            None if self.slots.len() < MAX_REGIONS => {
                self.slots.push(None);
                self.slots.len() - 1
            }
            None => return None,
        };
        // A new tag each time: a key of a removed region names nothing. (An LCG's
        // high bits; Knuth, TAOCP 2, 3.3.4.)
        self.tag = self.tag.wrapping_mul(1664525).wrapping_add(1013904223);
        let key = self.tag >> INDEX_BITS << INDEX_BITS | index as u32;
        self.slots[index] = Some((key, memory, bytes));
        Some(key)
    }

    /// Adds a region under a key that another table gave out for it. False if the key's place is taken.
    pub fn restore(&mut self, key: u32, memory: RegionMemory, bytes: u64) -> bool {
        let index = (key & ((1 << INDEX_BITS) - 1)) as usize;
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        let slot = &mut self.slots[index];
        let free = slot.is_none();
        if free {
            *slot = Some((key, memory, bytes));
            // No key that is given out later is this one.
            self.tag = self.tag.wrapping_add(1);
        }
        free
    }

    /// Removes a region. False if the key names none.
    pub fn remove(&mut self, key: u32) -> bool {
        let slot = self.slots.get_mut((key & ((1 << INDEX_BITS) - 1)) as usize);
        match slot {
            Some(s) if s.as_ref().is_some_and(|(k, ..)| *k == key) => {
                *s = None;
                true
            }
            _ => false,
        }
    }

    /// The stretch of `length` bytes at `offset` of region `key`.
    #[inline]
    pub fn resolve(&self, key: u32, offset: u64, length: u32) -> Result<Stretch, Refused> {
        let Some(Some((k, memory, region))) = self.slots.get((key & ((1 << INDEX_BITS) - 1)) as usize) else {
            return Err(Refused::Key(key));
        };
        if *k != key {
            return Err(Refused::Key(key));
        }
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= *region);
        if !inside && !pushgate_core::planted!(P8Region) {
            return Err(Refused::Bounds { offset, length, region: *region });
        }
        Ok(match memory {
            RegionMemory::Host { address, .. } => Stretch::Host(address + offset as usize),
            RegionMemory::Device { address, .. } => Stretch::Device(address + offset),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_only_stretches_of_live_regions_are_found() {
        let mut r = Regions::new(7);
        let host = || RegionMemory::Host { address: 0x1000, keep: None };
        let a = r.add(host(), 100).unwrap();
        let b = r.add(RegionMemory::Device { address: 0x8000, exported: None }, 50).unwrap();
        assert_eq!(r.resolve(a, 60, 40), Ok(Stretch::Host(0x1000 + 60)));
        assert_eq!(r.resolve(b, 50, 0), Ok(Stretch::Device(0x8000 + 50)));
        for (key, offset, length) in
            [(a, 61, 40), (a, u64::MAX, 2), (a, 101, 0), (b, 0, 51), (a, 0, u32::MAX)]
        {
            assert!(matches!(r.resolve(key, offset, length), Err(Refused::Bounds { .. })));
        }
        for key in [0, a ^ 0x8000_0000, b ^ a, a + 2, u32::MAX] {
            assert_eq!(r.resolve(key, 0, 1), Err(Refused::Key(key)));
        }
        assert!(r.remove(a) && !r.remove(a));
        assert_eq!(r.resolve(a, 0, 1), Err(Refused::Key(a)));
        assert_ne!(r.add(host(), 100), Some(a), "the old key stays dead");
    }
}
