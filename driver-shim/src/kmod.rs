//! The kernel module `pushgate` from user space: [`Device`] is an open /dev/pushgate or
//! /dev/pushgateN, and has at most one slice of the BAR, one staging area and one doorbell.
//!
//! docs/pushgate.4.md describes every call and every errno. The errors here are the module's own,
//! with the call and the file named.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::eventfd::EventFd;
use crate::fork::Owner;
use crate::uapi;

const fn command(number: u8) -> Opcode {
    opcode::none(uapi::PUSHGATE_IOC_MAGIC as u8, number)
}

/// The ioctl commands of the header, which bindgen cannot evaluate.
#[allow(missing_docs)]
pub mod commands {
    use super::{Opcode, command};
    pub const INFO: Opcode = command(0);
    pub const SLICE_ALLOC: Opcode = command(1);
    pub const SLICE_EXPORT: Opcode = command(2);
    pub const STAGING_CREATE: Opcode = command(3);
    pub const STAGING_OPEN: Opcode = command(4);
    pub const STAGING_FREE: Opcode = command(5);
    pub const DOORBELL_SET: Opcode = command(6);
    pub const DOORBELL_ARM: Opcode = command(7);
    pub const DOORBELL_RING: Opcode = command(8);
    pub const STAGING_EXPORT: Opcode = command(9);
}

/// Bytes of the staging area, if the descriptor is a view of one: a file of the module's that maps the area for reading and can do nothing
/// else ([`Staging::export`]). `None` if the descriptor is anything else. Waits for nobody, whatever the descriptor is.
pub fn view_bytes(fd: BorrowedFd<'_>) -> Option<u64> {
    use std::os::fd::AsRawFd;
    // Only the kernel gives a file such a name, and of the kernel only the module gives this one: the names of other files that
    // have a name there begin with a slash.
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    let view = uapi::PUSHGATE_VIEW_NAME.strip_suffix(b"\0")?;
    if name.as_os_str().as_encoded_bytes().strip_prefix(b"anon_inode:") != Some(view) {
        return None;
    }
    let mut info = Info { size: size_of::<Info>() as u32, ..Info::default() };
    // SAFETY: the command goes with this struct, whose first field is its length; the module writes no further.
    unsafe { ioctl(fd, Updater::<{ commands::INFO }, Info>::new(&mut info)) }.ok()?;
    Some(info.window_bytes)
}

/// A call that the module or the system refused.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {call}: {source}; {remedy}")]
pub struct KmodError {
    path: PathBuf,
    call: &'static str,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
    remedy: &'static str,
}

impl KmodError {
    /// The number of the system's error.
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}

/// What the module offers through a file, and the module's version.
pub type Info = uapi::pushgate_info;

/// An open device. Closing it gives the slice back and detaches from the area, once every
/// [`Mapping`] is gone too.
#[derive(Debug)]
pub struct Device {
    file: File,
    path: PathBuf,
}

impl Device {
    /// Opens /dev/pushgate, for staging only, or /dev/pushgateN.
    ///
    /// Fails with `Unsupported` if the module's version is older.
    pub fn open(path: impl AsRef<Path>) -> Result<Device, KmodError> {
        let path = path.as_ref().to_path_buf();
        let remedy = "load the module pushgate, bind the function to it, and be in the device's group";
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let file = opened.map_err(|source| KmodError { path: path.clone(), call: "open", source, remedy })?;
        let device = Device { file, path };
        let info = device.info()?;
        if info.version < uapi::PUSHGATE_UAPI_VERSION {
            let text =
                format!("module speaks version {}, needed is {}", info.version, uapi::PUSHGATE_UAPI_VERSION);
            let source = io::Error::new(io::ErrorKind::Unsupported, text);
            return Err(device.error("version", source, "install the module of this release"));
        }
        Ok(device)
    }

    /// Takes over a descriptor of such a device that another process opened.
    pub fn from_fd(fd: OwnedFd) -> Result<Device, KmodError> {
        let device = Device { file: fd.into(), path: "(a descriptor handed over)".into() };
        // Any other file refuses the command.
        device.info().map(|_| device)
    }

    pub(crate) fn error(&self, call: &'static str, source: io::Error, remedy: &'static str) -> KmodError {
        KmodError { path: self.path.clone(), call, source, remedy }
    }

    fn call<const CODE: Opcode, T>(
        &self,
        call: &'static str,
        argument: &mut T,
        remedy: &'static str,
    ) -> Result<(), KmodError> {
        // SAFETY: each caller pairs a command with the struct that the header names for it. The
        // struct's first field is its length, and the module writes no further.
        let result = unsafe { ioctl(&self.file, Updater::<CODE, T>::new(argument)) };
        result.map_err(|errno| self.error(call, errno.into(), remedy))
    }

    /// What the device offers.
    pub fn info(&self) -> Result<Info, KmodError> {
        let mut info = Info { size: size_of::<Info>() as u32, ..Info::default() };
        self.call::<{ commands::INFO }, _>("INFO", &mut info, "is it a device of the module pushgate?")?;
        Ok(info)
    }

    /// Takes a zeroed slice of the BAR: at least `bytes`, aligned to `align` (0: to a page). An
    /// open file can have one.
    pub fn slice(&self, bytes: usize, align: usize) -> Result<Slice<'_>, KmodError> {
        let mut alloc = uapi::pushgate_slice_alloc {
            size: size_of::<uapi::pushgate_slice_alloc>() as u32,
            bytes: bytes as u64,
            align: align as u64,
            ..Default::default()
        };
        let remedy = "ask for less, end the processes that had slices mapped, or (EDQUOT) raise the module's slice limits";
        self.call::<{ commands::SLICE_ALLOC }, _>("SLICE_ALLOC", &mut alloc, remedy)?;
        Ok(Slice { device: self, bytes: alloc.bytes as usize, offset: alloc.offset })
    }

    /// Makes a staging area that belongs to the user who opened this file, and attaches to it. The
    /// area lives on for `ttl_ms` after the last process has detached.
    pub fn create_staging(&self, name: &str, bytes: usize, ttl_ms: u32) -> Result<Staging<'_>, KmodError> {
        let mut create = uapi::pushgate_staging_create {
            size: size_of::<uapi::pushgate_staging_create>() as u32,
            bytes: bytes as u64,
            node: -1,
            ttl_ms,
            name: self.name(name)?,
            ..Default::default()
        };
        let remedy = "choose another name or size, or raise the module's staging limits";
        self.call::<{ commands::STAGING_CREATE }, _>("STAGING_CREATE", &mut create, remedy)?;
        Ok(Staging { device: self, bytes: create.bytes as usize, attaches: 1, pieces: Some(create.pieces) })
    }

    /// Attaches to an area of this user that no file is attached to.
    pub fn open_staging(&self, name: &str) -> Result<Staging<'_>, KmodError> {
        let mut open = uapi::pushgate_staging_open {
            size: size_of::<uapi::pushgate_staging_open>() as u32,
            name: self.name(name)?,
            ..Default::default()
        };
        let remedy = "end the process that is attached to it (EBUSY), or create it (ENOENT)";
        self.call::<{ commands::STAGING_OPEN }, _>("STAGING_OPEN", &mut open, remedy)?;
        Ok(Staging { device: self, bytes: open.bytes as usize, attaches: open.attaches, pieces: None })
    }

    /// Makes a view of the area that this file is attached to ([`view_bytes`]).
    pub(crate) fn export_staging(&self) -> Result<OwnedFd, KmodError> {
        let mut export = uapi::pushgate_staging_export {
            size: size_of::<uapi::pushgate_staging_export>() as u32,
            ..Default::default()
        };
        let remedy = "install the module of this release; the process may have too many files open";
        self.call::<{ commands::STAGING_EXPORT }, _>("STAGING_EXPORT", &mut export, remedy)?;
        // SAFETY: the module has just made this descriptor for us, and no other code knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(export.fd) })
    }

    /// Frees the area that this file is attached to, as [`Staging::free`] does.
    pub(crate) fn free_staging(&self) -> Result<(), KmodError> {
        let mut free =
            uapi::pushgate_staging_free { size: size_of::<uapi::pushgate_staging_free>() as u32, flags: 0 };
        self.call::<{ commands::STAGING_FREE }, _>("STAGING_FREE", &mut free, "free it once")
    }

    fn name(&self, name: &str) -> Result<[std::ffi::c_char; 64], KmodError> {
        let mut bytes = [0; uapi::PUSHGATE_NAME_BYTES as usize];
        if name.len() >= bytes.len() || name.contains('\0') {
            let source = io::Error::new(io::ErrorKind::InvalidInput, format!("area name {name:?}"));
            return Err(self.error("name", source, "at most 63 bytes, none of them zero"));
        }
        for (to, from) in bytes.iter_mut().zip(name.bytes()) {
            *to = from as std::ffi::c_char;
        }
        Ok(bytes)
    }

    /// Lets rings of an interrupt vector wake `bell`, at most once in `interval_us`, while the
    /// doorbell is armed.
    pub fn doorbell<'a>(
        &'a self,
        bell: &'a EventFd,
        vector: u32,
        interval_us: u32,
    ) -> Result<Doorbell<'a>, KmodError> {
        use std::os::fd::AsRawFd;
        let mut set = uapi::pushgate_doorbell_set {
            size: size_of::<uapi::pushgate_doorbell_set>() as u32,
            eventfd: bell.as_fd().as_raw_fd(),
            vector,
            interval_us,
            ..Default::default()
        };
        let remedy = "see PUSHGATE_IOC_INFO for the number of vectors";
        self.call::<{ commands::DOORBELL_SET }, _>("DOORBELL_SET", &mut set, remedy)?;
        Ok(Doorbell { device: self, bell })
    }

    /// Arms or disarms the doorbell; returns the number of rings so far and whether it is armed
    /// now.
    pub(crate) fn arm_doorbell(&self, flags: u32, seen: u64) -> Result<(u64, bool), KmodError> {
        let mut arm = uapi::pushgate_doorbell_arm {
            size: size_of::<uapi::pushgate_doorbell_arm>() as u32,
            flags,
            seen,
            ..Default::default()
        };
        let remedy = "ENODEV: the function is gone";
        self.call::<{ commands::DOORBELL_ARM }, _>("DOORBELL_ARM", &mut arm, remedy)?;
        Ok((arm.rings, arm.armed != 0))
    }

    /// Writes the device's doorbell register.
    pub fn ring(&self, value: u32) -> Result<(), KmodError> {
        let mut ring = uapi::pushgate_doorbell_ring {
            size: size_of::<uapi::pushgate_doorbell_ring>() as u32,
            value,
            ..Default::default()
        };
        let remedy = "name the register with the module's doorbell_bar and doorbell_offset";
        self.call::<{ commands::DOORBELL_RING }, _>("DOORBELL_RING", &mut ring, remedy)
    }

    /// Maps the page that says whether the function is still there.
    pub fn status(&self) -> Result<Status, KmodError> {
        let offset = uapi::PUSHGATE_MMAP_STATUS;
        Ok(Status(self.map("mmap of the status page", offset, 4096, ProtFlags::READ)?))
    }

    /// Maps the page of the doorbell register, if the register has a page of its own. Requires a
    /// slice.
    pub fn map_doorbell(&self) -> Result<Mapping, KmodError> {
        let offset = uapi::PUSHGATE_MMAP_DOORBELL;
        self.map("mmap of the doorbell", offset, 4096, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map(
        &self,
        call: &'static str,
        offset: u64,
        bytes: usize,
        protection: ProtFlags,
    ) -> Result<Mapping, KmodError> {
        // SAFETY: the kernel chooses the place, so no memory of ours is affected.
        let mapped =
            unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &self.file, offset) };
        let at = mapped.map_err(|errno| self.error(call, errno.into(), "is the function still there?"))?;
        let at = NonNull::new(at.cast()).expect("mmap returns no null");
        let mapping = Mapping { at, bytes, owner: Owner::here() };
        // SAFETY: the range was just mapped, and no byte of it changes. (For a BAR the module
        // itself keeps children out.)
        unsafe { madvise(at.as_ptr().cast(), bytes, Advice::LinuxDontFork) }
            .map_err(|errno| self.error("MADV_DONTFORK", errno.into(), "the sandbox must allow it"))?;
        Ok(mapping)
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A slice of the BAR. It belongs to the file until the file is closed.
#[derive(Debug)]
pub struct Slice<'a> {
    device: &'a Device,
    /// Length in bytes, rounded up to whole pages.
    pub bytes: usize,
    /// Offset of the slice in the window.
    pub offset: u64,
}

impl Slice<'_> {
    /// Maps the whole slice write-combined, as one contiguous range, which a GPU registers as
    /// IOMEMORY.
    ///
    /// Once the function is unbound, an access raises SIGBUS.
    pub fn map(&self) -> Result<Mapping, KmodError> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        self.device.map("mmap of the slice", uapi::PUSHGATE_MMAP_SLICE.into(), self.bytes, protection)
    }

    /// Exports the slice as a dma-buf for another device's driver. The slice lives as long as the
    /// dma-buf.
    pub fn export(&self) -> Result<OwnedFd, KmodError> {
        let mut export = uapi::pushgate_slice_export {
            size: size_of::<uapi::pushgate_slice_export>() as u32,
            ..Default::default()
        };
        let remedy = "the process may have too many files open";
        self.device.call::<{ commands::SLICE_EXPORT }, _>("SLICE_EXPORT", &mut export, remedy)?;
        // SAFETY: the module has just made this descriptor for us, and no other code knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(export.fd) })
    }
}

/// A staging area that the file is attached to until the file is closed.
#[derive(Debug)]
pub struct Staging<'a> {
    device: &'a Device,
    /// Length in bytes, rounded up to whole pages.
    pub bytes: usize,
    /// How often files have attached to the area; 1 right after its creation.
    pub attaches: u64,
    /// How many contiguous pieces the area consists of; known only to its creator.
    pub pieces: Option<u64>,
}

impl Staging<'_> {
    /// Maps the whole area: ordinary memory, which RDMA and GPU drivers pin.
    pub fn map(&self) -> Result<Mapping, KmodError> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        self.device.map("mmap of staging", uapi::PUSHGATE_MMAP_STAGING, self.bytes, protection)
    }

    /// Makes a view of the area, for a process that may only read it ([`view_bytes`]).
    pub fn export(&self) -> Result<OwnedFd, KmodError> {
        self.device.export_staging()
    }

    /// Frees the area as soon as no process has it mapped; its name is free at once.
    pub fn free(self) -> Result<(), KmodError> {
        self.device.free_staging()
    }
}

/// The rings of an interrupt vector, as counts and as wake-ups.
#[derive(Debug)]
pub struct Doorbell<'a> {
    device: &'a Device,
    bell: &'a EventFd,
}

impl Doorbell<'_> {
    /// Arms the doorbell unless there were rings after the `seen`th: then the caller must look
    /// before it sleeps. Returns the number of rings so far and whether the doorbell is armed.
    pub fn arm(&self, seen: u64) -> Result<(u64, bool), KmodError> {
        self.device.arm_doorbell(uapi::PUSHGATE_ARM, seen)
    }

    /// Disarms the doorbell: from now on rings are only counted. Returns how many there were.
    pub fn disarm(&self) -> Result<u64, KmodError> {
        Ok(self.device.arm_doorbell(uapi::PUSHGATE_DISARM, 0)?.0)
    }

    /// The eventfd that a ring wakes.
    pub fn eventfd(&self) -> &EventFd {
        self.bell
    }
}

/// The status page, which stays valid when the function is gone.
#[derive(Debug)]
pub struct Status(Mapping);

impl Status {
    fn word(&self, index: usize) -> u64 {
        // SAFETY: the page holds two aligned words and is mapped as long as self; the kernel writes
        // them while we read, so they are read as atomics.
        unsafe { &*self.0.at.as_ptr().cast::<AtomicU64>().add(index) }.load(Ordering::Acquire)
    }

    /// The state of the function: `PUSHGATE_FUNCTION_LIVE`, `_GONE`, or `_NONE` for /dev/pushgate.
    pub fn function(&self) -> u32 {
        self.word(0) as u32
    }

    /// Rings of this file's vector so far.
    pub fn rings(&self) -> u64 {
        self.word(1)
    }
}

/// A mapping of the module's memory. Other processes and devices write to it, so no reference may
/// ever be made over it. A child of `fork` does not have it.
#[derive(Debug)]
pub struct Mapping {
    at: NonNull<u8>,
    bytes: usize,
    owner: Owner,
}

// SAFETY: an address range of the process, whose bytes are accessed only through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as for Send: the bytes are accessed only through raw pointers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The mapping's address.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.at
    }

    /// The mapping's length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a child, the range may belong to something else.
        if !self.owner.is_here() {
            return;
        }
        // SAFETY: the range is what mmap returned, and nothing may use the address after the drop.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
