//! What runs on a device, and what waits until nothing runs there.

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
}

impl Ledger {
    /// Whether no kernel runs that could wait for a thread of this process.
    pub(super) fn is_quiet(&self) -> bool {
        self.active.is_empty()
    }

    /// Refuses cooperating blocks that do not fit beside those that run; returns the share of the
    /// device that the blocks take.
    pub(super) fn share(&self, kernel: &str, launch: Launch, resident: u32) -> Result<u64> {
        let used = self.active.iter().map(|active| active.share).sum::<u64>();
        let free = ((u128::from(WHOLE.saturating_sub(used)) * u128::from(resident)) >> 32) as u32;
        if launch.grid > free {
            return Err(DeviceError::NotResident {
                kernel: kernel.to_owned(),
                grid: launch.grid,
                block: launch.block,
                resident,
                free,
                busy: self.active.iter().map(|active| active.blocks).sum::<u32>(),
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
    /// How much of the device the launch's cooperating blocks fill; `WHOLE` is
    /// all.
    pub(super) share: u64,
    pub(super) blocks: u32,
}
