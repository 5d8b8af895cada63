//! Windows that the kernel module provides: a slice of a PCI function's BAR, or pages of the
//! kernel's. Also either of them as it appears to another process or machine: as a file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

use crate::eventfd::EventFd;
use crate::fork::{OwnedHere, Owner, keep_from_children};
use crate::kmod::{Device, KmodError, Mapping};
use crate::uapi;
use crate::window::{Interrupt, Window};

/// A window of payload in a PCI function's memory (`docs/driver.md`).
#[derive(Debug)]
pub struct BarWindow {
    // Mappings are dropped before the file that they belong to.
    slice: Mapping,
    stage: Option<Mapping>,
    export: Option<OwnedFd>,
    device: Arc<Device>,
    offset: u64,
    bytes: usize,
}

impl BarWindow {
    /// Takes a slice of `bytes`, of `path` or of the first /dev/pushgateN that has so much free.
    /// The slice is zeroed and no other window has it.
    ///
    /// Also makes a staging area of the same size, as far as the user's limits allow, for
    /// transports that can't send from the slice.
    pub fn open(path: Option<&str>, name: &str, bytes: usize) -> Result<Self, KmodError> {
        let mut last = None;
        for path in candidates(path) {
            match Self::of(Device::open(&path), name, bytes) {
                Ok(window) => return Ok(window),
                // Report the error of the last device that exists.
                Err(e) => last = Some(last.filter(|_| e.errno() == NOT_THERE).unwrap_or(e)),
            }
        }
        Err(last.expect("there is a candidate"))
    }

    fn of(device: Result<Device, KmodError>, name: &str, bytes: usize) -> Result<Self, KmodError> {
        let device = device?;
        let slice = device.slice(bytes, 0)?;
        let (mapping, offset) = (slice.map()?, slice.offset);
        // Not every function or kernel can export; then payload is copied.
        let export = slice.export().ok();
        let stage = device.create_staging(name, bytes, 0).and_then(|area| area.map()).ok();
        Ok(BarWindow { slice: mapping, stage, export, device: Arc::new(device), offset, bytes })
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

    fn export(&self) -> Option<(OwnedFd, u64)> {
        self.export.as_ref().and_then(|fd| fd.try_clone().ok()).map(|fd| (fd, 0))
    }

    fn stage(&self) -> Option<NonNull<u8>> {
        self.stage.as_ref().map(Mapping::as_ptr)
    }

    fn offset(&self) -> u64 {
        self.offset
    }

    fn interrupt(&self) -> io::Result<Option<Box<dyn Interrupt>>> {
        let make = || match self.device.info()?.vectors {
            0 => Ok(None),
            _ => Ok(Some(Box::new(FunctionInterrupt::new(self.device.clone())?) as _)),
        };
        make().map_err(|e: KmodError| io::Error::new(e.source.kind(), e))
    }
}

/// The first interrupt vector of a window's function.
struct FunctionInterrupt {
    device: Arc<Device>,
    bell: EventFd,
    /// How many rings there were at the last look.
    seen: u64,
}

impl FunctionInterrupt {
    fn new(device: Arc<Device>) -> Result<Self, KmodError> {
        let bell = EventFd::new().map_err(|e| device.error("eventfd", e, "raise the limit of open files"))?;
        // The doorbell is armed only before each sleep, so the module need not space out the
        // wake-ups.
        let seen = device.doorbell(&bell, 0, 0)?.disarm()?;
        Ok(FunctionInterrupt { device, bell, seen })
    }
}

impl Interrupt for FunctionInterrupt {
    fn arm(&mut self) -> bool {
        match self.device.arm_doorbell(uapi::PUSHGATE_ARM, self.seen) {
            Ok((rings, armed)) => {
                self.seen = rings;
                armed
            }
            // A function that is gone rings no more: a thread that sleeps does so until its limit.
            Err(_) => true,
        }
    }

    fn disarm(&mut self) -> bool {
        if let Ok((rings, _)) = self.device.arm_doorbell(uapi::PUSHGATE_DISARM, 0) {
            self.seen = rings;
        }
        self.bell.drain()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// A window of payload in pages of the kernel module, which outlive the process: a proxy of the
/// same user finds them by name.
#[derive(Debug)]
pub struct StagingWindow {
    owner: Owner,
    name: String,
    mapping: Mapping,
    /// For other processes, which may only read.
    view: OwnedFd,
    device: Device,
    bytes: usize,
}

impl StagingWindow {
    /// Makes an area of `bytes` under `name`, which lives `ttl_ms` longer than the processes
    /// attached to it. `path` is /dev/pushgate, or a /dev/pushgateN for pages near that function.
    pub fn create(path: Option<&str>, name: &str, bytes: usize, ttl_ms: u32) -> Result<Self, KmodError> {
        let device = Device::open(path.unwrap_or("/dev/pushgate"))?;
        let area = device.create_staging(name, bytes, ttl_ms)?;
        let made = area.map().and_then(|mapping| Ok((mapping, area.export()?)));
        // Otherwise nobody would know the area's name, and it would count for this user until its time is over.
        let (mapping, view) = made.inspect_err(|_| _ = device.free_staging())?;
        Ok(StagingWindow { owner: Owner::here(), name: name.into(), mapping, view, device, bytes })
    }

    /// Takes over an area of this user's that its last owner has left.
    pub fn take_up(path: Option<&str>, name: &str) -> Result<Self, KmodError> {
        let device = Device::open(path.unwrap_or("/dev/pushgate"))?;
        let area = device.open_staging(name)?;
        let (mapping, view, bytes) = (area.map()?, area.export()?, area.bytes);
        Ok(StagingWindow { owner: Owner::here(), name: name.into(), mapping, view, device, bytes })
    }
}

impl Drop for StagingWindow {
    /// Frees the area: a process that drops its window in order no longer needs it. A child of
    /// `fork` has the same open file and leaves its parent's area alone.
    fn drop(&mut self) {
        if self.owner.is_here() {
            let _ = self.device.free_staging();
        }
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
        self.view.as_fd()
    }

    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn huge_pages(&self) -> bool {
        false
    }
}

/// A window as another process or machine sees it: part of a file, which is a BAR
/// (`/sys/bus/pci/devices/FUNCTION/resourceN`) or the memory that backs a virtual machine's BAR.
#[derive(Debug)]
pub struct FileWindow {
    map: OwnedHere<MmapRaw>,
    file: File,
    offset: u64,
    io_memory: bool,
}

impl FileWindow {
    /// Maps `bytes`, a multiple of the page size, from `offset` on. `io_memory`: the file is a
    /// device's memory.
    pub fn open(path: &Path, offset: u64, bytes: usize, io_memory: bool) -> io::Result<Self> {
        // The kernel would map it all the same, from within a page, and its words would not be
        // aligned.
        let page = rustix::param::page_size() as u64;
        if !offset.is_multiple_of(page) {
            let path = path.display();
            let text =
                format!("offset {offset} of {path} is no multiple of the page size {page}: name one that is");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let file = File::options().read(true).write(true).open(path)?;
        let there = file.metadata()?.len();
        if offset.checked_add(bytes as u64).is_none_or(|end| end > there) {
            let text = format!("{bytes} bytes from {offset} leave {}, which has {there}", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let map = MmapOptions::new().offset(offset).len(bytes).map_raw(&file)?;
        keep_from_children(&map)?;
        Ok(FileWindow { map: OwnedHere::new(map), file, offset, io_memory })
    }
}

impl Window for FileWindow {
    fn kind(&self) -> &'static str {
        "file"
    }

    fn len(&self) -> usize {
        self.map.len()
    }

    fn as_ptr(&self) -> NonNull<u8> {
        NonNull::new(self.map.as_mut_ptr()).expect("a mapping is not at address 0")
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn huge_pages(&self) -> bool {
        false
    }

    fn io_memory(&self) -> bool {
        self.io_memory
    }

    fn offset(&self) -> u64 {
        self.offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_mapped_from_a_page_on() {
        let path = std::env::temp_dir().join(format!("pushgate-file-window-{}", std::process::id()));
        let page = rustix::param::page_size();
        std::fs::write(&path, vec![7; 3 * page]).unwrap();
        let window = FileWindow::open(&path, page as u64, 2 * page, false).unwrap();
        assert_eq!((window.len(), window.offset(), window.kind()), (2 * page, page as u64, "file"));
        for (offset, bytes, says) in
            [(8, 64, "offset 8 of"), (2048, 4096, "name one that is"), (page as u64, 3 * page, "leave")]
        {
            let e = FileWindow::open(&path, offset, bytes, false).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::InvalidInput);
            assert!(e.to_string().contains(says), "{e}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}
