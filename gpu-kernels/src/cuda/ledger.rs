//! What runs on a device, and what waits until nothing runs there.

use std::sync::Weak;

use cudarc::driver::sys::CUevent;

use super::driver::Raw;
use crate::error::{DeviceError, Result};
use crate::executor::Launch;

/// The whole device, in the unit of [`Active::share`].
pub(super) const WHOLE: u64 = 1 << 32;

/// What runs on the device, and what waits until nothing runs.
#[derive(Default)]
pub(super) struct Ledger {
    pub(super) active: Vec<Active>,
    /// Freed memory, kept here until nothing runs. cuMemFree waits for the device, and would never
    /// return if a kernel waits for the calling thread.
    pub(super) freed: Vec<u64>,
    /// Resident kernels, which start and end by themselves.
    pub(super) residents: Vec<Weak<Presence>>,
}

impl Ledger {
    /// Whether no kernel runs that could wait for a thread of this process.
    pub(super) fn is_quiet(&mut self) -> bool {
        self.residents.retain(|resident| resident.strong_count() > 0);
        self.active.is_empty() && !self.residents.iter().filter_map(Weak::upgrade).any(|r| (r.present)())
    }

    /// Refuses cooperating blocks that do not fit beside those that run; returns the share of the
    /// device that the blocks take.
    pub(super) fn share(&self, kernel: &str, launch: Launch, resident: u32) -> Result<u64> {
        let resident_share = |resident: &Weak<Presence>| resident.upgrade().map_or(0, |r| r.share);
        let used = self.active.iter().map(|active| active.share).sum::<u64>()
            + self.residents.iter().map(resident_share).sum::<u64>();
        let free = ((u128::from(WHOLE.saturating_sub(used)) * u128::from(resident)) >> 32) as u32;
        if launch.grid > free {
            return Err(DeviceError::NotResident {
                kernel: kernel.to_owned(),
                grid: launch.grid,
                block: launch.block,
                resident,
                free,
                busy: self.active.iter().map(|active| active.blocks).sum::<u32>()
                    + self.residents.iter().filter_map(Weak::upgrade).map(|r| r.blocks).sum::<u32>(),
            });
        }
        // Rounded down, as `free` is, so that several launches of one shape can fill the device to
        // its last block.
        Ok(u64::from(launch.grid) * WHOLE / u64::from(resident))
    }
}

/// A launch that has not been seen to end.
pub(super) struct Active {
    pub(super) id: u64,
    pub(super) end: Raw<CUevent>,
    /// How much of the device the launch's cooperating blocks fill, in units of which `WHOLE` is
    /// all.
    pub(super) share: u64,
    pub(super) blocks: u32,
}

/// A resident kernel, which starts and ends by itself, as the ledger knows it.
pub(super) struct Presence {
    /// Whether the kernel runs or may begin to.
    pub(super) present: Box<dyn Fn() -> bool + Send + Sync>,
    /// The share of the device that the kernel takes when it runs, in units of which `WHOLE` is
    /// all. Always set aside, because the kernel starts without asking the ledger.
    pub(super) share: u64,
    pub(super) blocks: u32,
}
