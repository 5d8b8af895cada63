//! Windows that the kernel module provides: a slice of a PCI function's BAR, or
//! pages of its own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use crate::kmod::{Device, KmodError, Mapping};
use crate::window::Window;

/// Payload in a PCI function's memory. See `docs/driver.md`.
#[derive(Debug)]
pub struct BarWindow {
    // Mappings go before the file that they are of.
    slice: Mapping,
    stage: Option<Mapping>,
    export: Option<OwnedFd>,
    device: Device,
    bytes: usize,
}

impl BarWindow {
    /// A slice of `bytes`, of `path` or of the first /dev/pushgateN that has so much
    /// free. Zeroed, and nobody else's.
    ///
    /// Beside it a staging area of the same size is made, as far as the user's limits
    /// allow, for transports that can't send from the slice.
    pub fn open(path: Option<&str>, name: &str, bytes: usize) -> Result<Self, KmodError> {
        let mut last = None;
        for path in candidates(path) {
            match Self::of(Device::open(&path), name, bytes) {
                Ok(window) => return Ok(window),
                // What is said of the last one that is there is what counts.
                Err(e) => last = Some(last.filter(|_| e.errno() == NOT_THERE).unwrap_or(e)),
            }
        }
        Err(last.expect("there is a candidate"))
    }

    fn of(device: Result<Device, KmodError>, name: &str, bytes: usize) -> Result<Self, KmodError> {
        let device = device?;
        let slice = device.slice(bytes, 0)?;
        let mapping = slice.map()?;
        // Not every function or kernel has them; then a copy has to do.
        let export = slice.export().ok();
        let stage = device.create_staging(name, bytes, 0).and_then(|area| area.map()).ok();
        Ok(BarWindow { slice: mapping, stage, export, device, bytes })
    }
}

const NOT_THERE: Option<i32> = Some(2);

fn candidates(path: Option<&str>) -> Vec<String> {
    match path {
        Some(path) => vec![path.into()],
        None => (0..16).map(|n| format!("/dev/pushgate{n}")).collect(),
    }
}

impl Window for BarWindow {
    fn kind(&self) -> &'static str {
        "bar"
    }

    fn len(&self) -> usize {
        self.bytes
    }

    fn as_ptr(&self) -> NonNull<u8> {
        self.slice.as_ptr()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    fn huge_pages(&self) -> bool {
        false
    }

    fn io_memory(&self) -> bool {
        true
    }

    fn export(&self) -> Option<OwnedFd> {
        self.export.as_ref().and_then(|fd| fd.try_clone().ok())
    }

    fn stage(&self) -> Option<NonNull<u8>> {
        self.stage.as_ref().map(Mapping::as_ptr)
    }
}

/// Payload in pages of the kernel module, which outlive the process: a proxy of the
/// same user finds them by their name.
#[derive(Debug)]
pub struct StagingWindow {
    mapping: Mapping,
    device: Device,
    bytes: usize,
}

impl StagingWindow {
    /// An area of `bytes` under `name`, which lives `ttl_ms` longer than whoever has it.
    /// `path` is /dev/pushgate, or a /dev/pushgateN for pages near that function.
    pub fn create(path: Option<&str>, name: &str, bytes: usize, ttl_ms: u32) -> Result<Self, KmodError> {
        let device = Device::open(path.unwrap_or("/dev/pushgate"))?;
        let mapping = device.create_staging(name, bytes, ttl_ms)?.map()?;
        Ok(StagingWindow { mapping, device, bytes })
    }
}

impl Drop for StagingWindow {
    /// Who drops it in order has no use for it any more.
    fn drop(&mut self) {
        let _ = self.device.free_staging();
    }
}

impl Window for StagingWindow {
    fn kind(&self) -> &'static str {
        "staging"
    }

    fn len(&self) -> usize {
        self.bytes
    }

    fn as_ptr(&self) -> NonNull<u8> {
        self.mapping.as_ptr()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    fn huge_pages(&self) -> bool {
        false
    }
}
