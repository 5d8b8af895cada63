//! Memory that several processes share: the `memory` window, and the work, control and link
//! segments.
//!
//! The memory lies in a memfd whose size is sealed, so that no holder of the descriptor can
//! truncate it and turn the others' accesses into SIGBUS.
//!
//! A child of `fork` has none of these mappings: an access there raises SIGSEGV.
//!
//! No code here makes a `&[u8]` or `&mut [u8]` over shared memory, because other processes and
//! devices write it at any time. Words are atomics; bytes are accessed through a raw pointer.

use std::any::Any;
use std::ffi::{c_int, c_long, c_uint, c_ulong};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::ShimError;
use crate::abi::PUSHGATE_PAGE;
use crate::fork::{OwnedHere, keep_from_children};
use crate::kmod::view_bytes;
use crate::limits::check_file_size;
use crate::uapi::PUSHGATE_MMAP_STAGING;
use crate::window::Window;

/// The only size of huge pages that this module asks for.
const HUGE_PAGE: usize = 2 << 20;
/// `f_type` of hugetlbfs, the file system of huge memfds.
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;
/// What errors call memory that another process made.
const PEERS: &str = "a peer's memory";

/// The remedy when a mapping cannot be kept out of children.
const DONTFORK: &str = "the kernel must have MADV_DONTFORK, and the sandbox allow it";

/// Keeps a mapping in place for as long as it lives.
pub type Mapping = Arc<dyn Any + Send + Sync>;

/// Whether memory is to lie in 2 MiB pages (hugetlb).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Huge pages if the size is a multiple of 2 MiB and pages are free; otherwise normal pages,
    /// with a request for transparent huge ones.
    #[default]
    Try,
    /// Normal pages. Choose this for memory that another process is to write: see
    /// [`SharedMemory::from_fd`].
    Never,
    /// Huge pages, or an error.
    Require,
}

/// Options for new memory ([`SharedMemory::builder`]).
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `create`"]
pub struct SharedMemoryBuilder {
    name: String,
    bytes: usize,
    huge_pages: HugePages,
    numa_node: Option<u32>,
    when_touched: bool,
}

impl SharedMemoryBuilder {
    /// Sets whether to use 2 MiB pages. Default: [`HugePages::Try`].
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// Sets the NUMA node to prefer; when the node is full, pages come from elsewhere.
    pub fn numa_node(mut self, node: Option<u32>) -> Self {
        self.numa_node = node;
        self
    }

    /// Normal pages that the kernel allocates when they are touched first. For memory of this process alone that
    /// may stay unused for the most part. A process of another user refuses memory that lacks pages. If the host is short of memory, this
    /// call succeeds all the same, and the kernel may kill the process when it touches a page.
    pub fn when_touched(mut self) -> Self {
        (self.when_touched, self.huge_pages) = (true, HugePages::Never);
        self
    }

    /// Makes the memory: zeroed, with every page present ([`SharedMemoryBuilder::when_touched`] aside) and the size sealed.
    pub fn create(self) -> Result<SharedMemory, ShimError> {
        let fits = self.bytes.is_multiple_of(HUGE_PAGE);
        let refuse = |allowed| Err(ShimError::Size { name: self.name.clone(), bytes: self.bytes, allowed });
        match self.huge_pages {
            _ if self.bytes == 0 => refuse("1 byte or more"),
            HugePages::Require if !fits => refuse("a multiple of 2 MiB, or normal pages"),
            HugePages::Require => self.make(true),
            HugePages::Try if fits => self.make(true).or_else(|_| self.make(false)),
            HugePages::Try | HugePages::Never => self.make(false),
        }
    }

    fn make(&self, huge: bool) -> Result<SharedMemory, ShimError> {
        let failed = |call, remedy| {
            move |source: io::Error| match huge {
                true => ShimError::HugePages { name: self.name.clone(), bytes: self.bytes, call, source },
                false => system(&self.name, self.bytes, call, remedy)(source),
            }
        };
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let fd = memfd_create(&*self.name, flags)
            .map_err(io::Error::from)
            .map_err(failed("memfd_create", "the kernel and a sandbox (seccomp) must allow the call"))?;
        check_file_size(self.bytes)
            .and_then(|()| Ok(ftruncate(&fd, self.bytes as u64)?))
            .map_err(failed("ftruncate", "ask for less memory"))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(io::Error::from)
            .map_err(failed("F_ADD_SEALS", "the kernel must allow sealing"))?;
        // Mapped without MAP_NORESERVE: if huge pages are short, this call fails instead of some
        // later access.
        let map = MmapOptions::new()
            .len(self.bytes)
            .map_raw(&fd)
            .map_err(failed("mmap", "raise the limit of address space or ask for less memory"))?;
        keep_from_children(&map).map_err(failed("MADV_DONTFORK", DONTFORK))?;
        if let Some(node) = self.numa_node {
            prefer_node(&map, node).map_err(|source| ShimError::Numa {
                name: self.name.clone(),
                node,
                source,
            })?;
        }
        if self.huge_pages == HugePages::Try && !huge {
            // SAFETY: the range is the mapping that `map` owns, and the advice changes no byte of
            // it. Kernels without transparent huge pages refuse, which does no harm.
            let _ = unsafe { madvise(map.as_mut_ptr().cast(), map.len(), Advice::LinuxHugepage) };
        }
        if self.when_touched {
            return Ok(SharedMemory { map: Arc::new(OwnedHere::new(map)), fd, huge });
        }
        match populate(&map, Advice::LinuxPopulateWrite) {
            // An old kernel. The memory is new and no other process has it. Touching huge pages
            // that cannot be allocated would end in SIGBUS here, so huge memory is not touched.
            Err(Errno::INVAL) if !huge => touch(&map),
            other => other
                .map_err(io::Error::from)
                .map_err(failed("MADV_POPULATE_WRITE", "raise the memory limit or ask for less memory"))?,
        }
        Ok(SharedMemory { map: Arc::new(OwnedHere::new(map)), fd, huge })
    }
}

/// Memory that this process may write, and other processes too.
///
/// Mapping and descriptor live as long as the value, and the mapping also as long as its [`Mapping`]; address and length never
/// change. May be used from any thread.
#[derive(Debug)]
pub struct SharedMemory {
    map: Arc<OwnedHere<MmapRaw>>,
    fd: OwnedFd,
    huge: bool,
}

// There is no `is_empty`: the memory is never empty.
#[allow(clippy::len_without_is_empty)]
impl SharedMemory {
    /// Starts the options for new memory of `bytes`; /proc/PID/maps and errors show `name`.
    pub fn builder(name: impl Into<String>, bytes: usize) -> SharedMemoryBuilder {
        let (name, huge_pages) = (name.into(), HugePages::Try);
        SharedMemoryBuilder { name, bytes, huge_pages, numa_node: None, when_touched: false }
    }

    /// Maps memory that a peer handed over, writable, if it has `expected_len` bytes and its size
    /// is sealed.
    ///
    /// Huge pages are refused: a peer may punch holes into memory that both processes write, and a
    /// hole that no free huge page can fill again raises SIGBUS.
    pub fn from_fd(fd: OwnedFd, expected_len: usize) -> Result<SharedMemory, ShimError> {
        let map = Self::map_shared(&fd, expected_len)?;
        populate_peers(&map, Advice::LinuxPopulateWrite, false)?;
        Ok(SharedMemory { map: Arc::new(OwnedHere::new(map)), fd, huge: false })
    }

    /// Maps memory of a process of another user, as [`SharedMemory::from_fd`] does, and allocates none of it: a memory control
    /// group is charged for the pages that its processes allocate, and so this process's would be.
    ///
    /// Memory with holes is refused. The peer may still punch holes later; then an access allocates a page on this
    /// process's account.
    pub fn from_strangers_fd(fd: OwnedFd, expected_len: usize) -> Result<SharedMemory, ShimError> {
        let map = Self::map_shared(&fd, expected_len)?;
        check_whole(&fd, expected_len)?;
        Ok(SharedMemory { map: Arc::new(OwnedHere::new(map)), fd, huge: false })
    }

    /// Maps memory that a peer handed over, as [`SharedMemory::from_fd`] does, and takes huge pages too. For a caller that touches no
    /// byte of the mapping, but pins its pages for a device or names it in system calls: these fail where the peer has punched a hole,
    /// and an access would raise SIGBUS.
    pub fn from_fd_untouched(fd: OwnedFd, expected_len: usize) -> Result<SharedMemory, ShimError> {
        let huge = check_sealed(&fd, expected_len)?.huge;
        let map = map_writable(&fd, expected_len)?;
        populate_peers(&map, Advice::LinuxPopulateWrite, huge)?;
        Ok(SharedMemory { map: Arc::new(OwnedHere::new(map)), fd, huge })
    }

    /// Maps memory of normal pages that both processes write.
    fn map_shared(fd: &OwnedFd, expected_len: usize) -> Result<MmapRaw, ShimError> {
        if check_sealed(fd, expected_len)?.huge {
            return Err(ShimError::PeerHugePages);
        }
        map_writable(fd, expected_len)
    }

    /// Seals the memory against writers, for good: from now on no process can map it writable or
    /// change it through the descriptor. Existing mappings stay as they are. Call this before
    /// handing a window or a segment to processes that may only read it.
    pub fn seal_against_writers(&self) -> Result<(), ShimError> {
        fcntl_add_seals(&self.fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL).map_err(io::Error::from).map_err(
            system(
                "shared memory",
                self.len(),
                "F_ADD_SEALS",
                "it may be sealed already, or be a peer's; F_SEAL_FUTURE_WRITE needs Linux 5.1",
            ),
        )
    }

    /// The address of the mapping, page aligned and writable.
    pub fn as_ptr(&self) -> NonNull<u8> {
        base(&self.map)
    }

    /// Length in bytes; never 0.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// What keeps the mapping in place without the descriptor: for those who have no other process to share the memory with.
    pub fn mapping(&self) -> Mapping {
        self.map.clone()
    }

    /// The descriptor that another process maps to share the memory.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether the memory lies in hugetlb pages of 2 MiB. Transparent huge pages do not count,
    /// because the kernel decides about them.
    pub fn huge_pages(&self) -> bool {
        self.huge
    }

    /// `n` words that begin `offset` bytes into the memory.
    ///
    /// # Panics
    /// If `offset` is not a multiple of 8 or the words do not lie within the memory.
    pub fn words(&self, offset: usize, n: usize) -> &[AtomicU64] {
        check_words(self.len(), offset, n);
        // SAFETY: `check_words` keeps the words inside the mapping and aligned (the mapping is page
        // aligned). The mapping is readable and writable and lives as long as `self`, which the
        // slice borrows. Its pages cannot go away: the size was sealed against shrinking before it
        // was mapped. Other processes and devices do write these words at any time, but every
        // 64-bit pattern is a valid u64, and this process accesses them as atomics only, here and
        // through raw pointers.
        unsafe { std::slice::from_raw_parts(base(&self.map).as_ptr().add(offset).cast(), n) }
    }
}

impl Window for SharedMemory {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn as_ptr(&self) -> NonNull<u8> {
        self.as_ptr()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }

    fn huge_pages(&self) -> bool {
        self.huge
    }
}

/// Memory of a peer that this process only reads.
///
/// Mapping and descriptor live as long as the value, and the mapping also as long as its [`Mapping`]; address and length never
/// change. May be used from any thread.
#[derive(Debug)]
pub struct ReadOnlyMemory {
    map: Arc<OwnedHere<MmapRaw>>,
    fd: OwnedFd,
}

// There is no `is_empty`: the memory is never empty.
#[allow(clippy::len_without_is_empty)]
impl ReadOnlyMemory {
    /// Maps memory that a peer handed over, read-only, if it has `expected_len` bytes and its size
    /// is sealed. Memory in huge pages must be sealed against writers too; otherwise the peer could
    /// punch a hole, and an access there would raise SIGBUS.
    ///
    /// Takes also a view of a staging area ([`view_bytes`]), whose pages stay as long as the mapping. An area
    /// has whole pages, so the area may be longer by less than a page.
    ///
    /// The peer goes on writing the memory, so everything read from it must be treated as hostile.
    pub fn from_fd(fd: OwnedFd, expected_len: usize) -> Result<ReadOnlyMemory, ShimError> {
        let (map, huge) = Self::map(&fd, expected_len)?;
        populate_peers(&map, Advice::LinuxPopulateRead, huge)?;
        Ok(ReadOnlyMemory { map: Arc::new(OwnedHere::new(map)), fd })
    }

    /// Maps memory of a process of another user, as [`ReadOnlyMemory::from_fd`] does, and allocates none of it, as
    /// [`SharedMemory::from_strangers_fd`] says.
    pub fn from_strangers_fd(fd: OwnedFd, expected_len: usize) -> Result<ReadOnlyMemory, ShimError> {
        let (map, _) = Self::map(&fd, expected_len)?;
        // The module has all pages of a staging area.
        if view_bytes(fd.as_fd()).is_none() {
            check_whole(&fd, expected_len)?;
        }
        Ok(ReadOnlyMemory { map: Arc::new(OwnedHere::new(map)), fd })
    }

    /// The mapping, and whether it has huge pages.
    fn map(fd: &OwnedFd, expected_len: usize) -> Result<(MmapRaw, bool), ShimError> {
        let (peer, offset) = match view_bytes(fd.as_fd()) {
            Some(bytes) => (check_view(bytes, expected_len)?, PUSHGATE_MMAP_STAGING),
            None => (check_sealed(fd, expected_len)?, 0),
        };
        if peer.huge && !peer.seals.intersects(SealFlags::FUTURE_WRITE | SealFlags::WRITE) {
            return Err(ShimError::PeerSeals {
                missing: "F_SEAL_FUTURE_WRITE",
                remedy: "memory in huge pages is handed over after seal_against_writers",
            });
        }
        let map =
            MmapOptions::new().offset(offset).len(expected_len).map_raw_read_only(fd).map_err(system(
                PEERS,
                expected_len,
                "mmap",
                "the peer must hand over a descriptor open for reading; huge pages must be free",
            ))?;
        keep_from_children(&map).map_err(system(PEERS, expected_len, "MADV_DONTFORK", DONTFORK))?;
        Ok((map, peer.huge))
    }

    /// The address of the mapping, page aligned. A write there raises SIGSEGV.
    pub fn as_ptr(&self) -> NonNull<u8> {
        base(&self.map)
    }

    /// Length in bytes; never 0.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// What keeps the mapping in place without the descriptor: for those who hand the memory on to nobody.
    pub fn mapping(&self) -> Mapping {
        self.map.clone()
    }

    /// The descriptor that the peer handed over.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// `n` words that begin `offset` bytes into the memory.
    ///
    /// # Panics
    /// If `offset` is not a multiple of 8 or the words do not lie within the memory.
    ///
    /// # Safety
    /// The words may only be loaded: the pages are read-only, and a store or a read-modify-write,
    /// even one that would change nothing, is undefined behaviour. Rust guarantees relaxed loads on
    /// such pages; for an acquire use a relaxed load followed by `fence(Acquire)`.
    pub unsafe fn words(&self, offset: usize, n: usize) -> &[AtomicU64] {
        check_words(self.len(), offset, n);
        // SAFETY: `check_words` keeps the words inside the mapping and aligned (the mapping is page
        // aligned). The mapping is readable and lives as long as `self`, which the slice borrows.
        // Its pages cannot go away: the size was sealed against shrinking before it was mapped. The
        // peer writes these words at any time, but every 64-bit pattern is a valid u64 and this
        // process loads them as atomics only. The caller promises that nothing stores through the
        // slice.
        unsafe { std::slice::from_raw_parts(base(&self.map).as_ptr().add(offset).cast(), n) }
    }
}

fn system<'a>(
    name: &'a str,
    bytes: usize,
    call: &'static str,
    remedy: &'static str,
) -> impl FnOnce(io::Error) -> ShimError + 'a {
    move |source| ShimError::System { name: name.into(), bytes, call, source, remedy }
}

fn base(map: &MmapRaw) -> NonNull<u8> {
    NonNull::new(map.as_mut_ptr()).expect("mmap gives no null pointer")
}

fn check_words(len: usize, offset: usize, n: usize) {
    let end = n.checked_mul(8).and_then(|bytes| bytes.checked_add(offset));
    assert!(
        offset.is_multiple_of(8) && end.is_some_and(|end| end <= len),
        "{n} words at byte {offset} of a memory of {len} bytes"
    );
}

struct Peer {
    seals: SealFlags,
    huge: bool,
}

/// Whether a descriptor is memory that a process hands to another one. Closing such a descriptor waits for nobody.
pub fn is_memory(fd: BorrowedFd<'_>) -> bool {
    fcntl_get_seals(fd).is_ok() || view_bytes(fd).is_some()
}

fn check_view(found: u64, expected: usize) -> Result<Peer, ShimError> {
    // The module counts in the kernel's pages, which may be larger than the ABI's.
    if expected == 0 || (expected as u64).next_multiple_of(rustix::param::page_size() as u64) != found {
        return Err(ShimError::PeerSize { found, expected });
    }
    Ok(Peer { seals: SealFlags::empty(), huge: false })
}

fn check_sealed(fd: &OwnedFd, expected: usize) -> Result<Peer, ShimError> {
    // Read the seals first: once they are seen, the size that is read next is final. A descriptor
    // that cannot be sealed at all (a file, a socket) has no seals.
    let seals = fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(ShimError::PeerSeals {
            missing: "F_SEAL_SHRINK or F_SEAL_GROW",
            remedy: "hand over a memfd whose size is sealed",
        });
    }
    let failed = |call| {
        move |e: Errno| {
            system(PEERS, expected, call, "the peer must hand over a memfd that is open for reading")(
                e.into(),
            )
        }
    };
    let found = fstat(fd).map_err(failed("fstat"))?.st_size as u64;
    if found != expected as u64 || expected == 0 {
        return Err(ShimError::PeerSize { found, expected });
    }
    let huge = fstatfs(fd).map_err(failed("fstatfs"))?.f_type as u32 == HUGETLBFS_MAGIC;
    Ok(Peer { seals, huge })
}

/// Maps memory of a peer's, writable.
fn map_writable(fd: &OwnedFd, bytes: usize) -> Result<MmapRaw, ShimError> {
    let map = MmapOptions::new().len(bytes).map_raw(fd).map_err(system(
        PEERS,
        bytes,
        "mmap",
        "the peer must hand over a descriptor open for writing, not sealed against writers",
    ))?;
    keep_from_children(&map).map_err(system(PEERS, bytes, "MADV_DONTFORK", DONTFORK))?;
    Ok(map)
}

/// Refuses a peer's memory if it lacks pages.
fn check_whole(fd: &OwnedFd, bytes: usize) -> Result<(), ShimError> {
    let stat = fstat(fd).map_err(|e| system(PEERS, bytes, "fstat", "run the newest pushgate")(e.into()))?;
    // In units of 512 bytes, whatever the file system's block is (stat(3type)). Swapped pages count.
    let there = (stat.st_blocks as u64).saturating_mul(512);
    match there >= bytes as u64 {
        true => Ok(()),
        false => Err(ShimError::PeerHoles { there, bytes }),
    }
}

/// Makes every page present, for reading or writing; fails with `EINVAL` before Linux 5.14.
fn populate(map: &MmapRaw, advice: Advice) -> rustix::io::Result<()> {
    // SAFETY: the range is the mapping that `map` owns, and populating it changes no byte of it:
    // missing pages appear as zeroes, as they would when touched.
    rustix::io::retry_on_intr(|| unsafe { madvise(map.as_mut_ptr().cast(), map.len(), advice) })
}

fn populate_peers(map: &MmapRaw, advice: Advice, huge: bool) -> Result<(), ShimError> {
    match populate(map, advice) {
        // An old kernel: normal pages appear when they are touched.
        Err(Errno::INVAL) if !huge => Ok(()),
        other => other.map_err(io::Error::from).map_err(system(
            PEERS,
            map.len(),
            "MADV_POPULATE",
            "raise the memory limit, or use less or normal pages",
        )),
    }
}

/// Writes to every page. Only for new memory that no other process has.
fn touch(map: &MmapRaw) {
    for offset in (0..map.len() & !7).step_by(PUSHGATE_PAGE as usize) {
        // SAFETY: `offset` lies inside the mapping with at least 8 bytes after it and is aligned,
        // and the mapping is writable and owned by `map`. No other process has the descriptor yet,
        // and an atomic would be right even if one had.
        let word = unsafe { &*base(map).as_ptr().add(offset).cast::<AtomicU64>() };
        word.store(0, Ordering::Relaxed);
    }
}

// std links the C library anyway; rustix has no mbind.
unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
}

#[cfg(target_arch = "x86_64")]
const SYS_MBIND: c_long = 237;
/// The generic system call table, which aarch64 and riscv64 use.
#[cfg(not(target_arch = "x86_64"))]
const SYS_MBIND: c_long = 235;
/// The policy `MPOL_PREFERRED` and not `MPOL_BIND`: with this one a full node costs speed, and does
/// not call the OOM killer while other nodes have free memory.
const MPOL_PREFERRED: c_int = 1;
/// The most nodes that any kernel is built for.
const MAX_NODES: usize = 1024;

fn prefer_node(map: &MmapRaw, node: u32) -> io::Result<()> {
    let mut mask = [0u64; MAX_NODES / 64];
    let word = mask.get_mut(node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (node % 64);
    // SAFETY: mbind(addr, len, mode, nodemask, maxnode, flags) reads `mask`, which has MAX_NODES
    // bits (the kernel subtracts one from `maxnode`) and outlives the call, and sets the policy of
    // the range that `map` owns; no byte of it changes. Every argument has the width of the C
    // prototype's.
    let rc = unsafe {
        syscall(
            SYS_MBIND,
            map.as_mut_ptr(),
            map.len() as c_ulong,
            MPOL_PREFERRED,
            mask.as_ptr(),
            MAX_NODES as c_ulong + 1,
            0 as c_uint,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::mm::{MprotectFlags, mprotect};

    const SIZE: usize = 3 * 4096;

    fn memory() -> SharedMemory {
        SharedMemory::builder("test", SIZE).create().unwrap()
    }

    fn handed(memory: &SharedMemory) -> OwnedFd {
        memory.fd().try_clone_to_owned().unwrap()
    }

    fn memfd(bytes: usize, seals: SealFlags) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, bytes as u64).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    /// Loads a word of a read-only memory.
    fn load(memory: &ReadOnlyMemory, offset: usize) -> u64 {
        // SAFETY: the words are only loaded.
        let words = unsafe { memory.words(offset, 1) };
        words[0].load(Ordering::Relaxed)
    }

    fn shared_between_threads<T: Send + Sync>(_: &T) {}

    #[test]
    fn p8_memory_of_another_user_with_holes_is_refused_and_mapping_it_allocates_no_page() {
        let page = rustix::param::page_size();
        let bytes = 64 * page - 5;
        let pages = |fd: &OwnedFd| fstat(fd).unwrap().st_blocks * 512 / page as i64;
        let punch = |fd: &OwnedFd, offset: usize, bytes: usize| {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(fd, flags, offset as u64, bytes as u64).unwrap();
        };
        let whole = SharedMemory::builder("test", bytes).huge_pages(HugePages::Never).create().unwrap();
        SharedMemory::from_strangers_fd(handed(&whole), bytes).unwrap();
        let fd = handed(&whole);
        punch(&fd, page, page);
        let sparse = memfd(bytes, SealFlags::SHRINK | SealFlags::GROW);
        for (fd, there) in [(fd, 63), (sparse, 0)] {
            let twice = [fd.try_clone().unwrap(), fd.try_clone().unwrap()];
            let errors = twice.into_iter().zip([true, false]).map(|(fd, writable)| match writable {
                true => SharedMemory::from_strangers_fd(fd, bytes).err(),
                false => ReadOnlyMemory::from_strangers_fd(fd, bytes).err(),
            });
            for e in errors {
                assert!(
                    matches!(e, Some(ShimError::PeerHoles { there: t, bytes: b }) if t == there * page as u64 && b == bytes),
                    "{e:?}"
                );
            }
            assert_eq!(pages(&fd) as u64, there);
        }
        // A hole that is made once it is mapped stays one until it is touched.
        let whole = SharedMemory::builder("test", bytes).huge_pages(HugePages::Never).create().unwrap();
        let (writer, reader) = (
            SharedMemory::from_strangers_fd(handed(&whole), bytes).unwrap(),
            ReadOnlyMemory::from_strangers_fd(handed(&whole), bytes).unwrap(),
        );
        let fd = handed(&whole);
        punch(&fd, 0, 32 * page);
        assert_eq!(pages(&fd), 32);
        assert_eq!((load(&reader, 40 * page), pages(&fd)), (0, 32));
        writer.words(0, 1)[0].store(7, Ordering::Relaxed);
        assert_eq!((load(&reader, 0), pages(&fd)), (7, 33));
    }

    #[test]
    fn a_writer_and_a_reader_see_one_memory() {
        let memory = memory();
        assert_eq!(memory.len(), SIZE);
        assert_eq!(memory.as_ptr().as_ptr() as usize % 4096, 0);
        let reader = ReadOnlyMemory::from_fd(handed(&memory), SIZE).unwrap();
        let writer = SharedMemory::from_fd(handed(&memory), SIZE).unwrap();
        shared_between_threads(&reader);
        shared_between_threads(&writer);
        assert_eq!(load(&reader, SIZE - 8), 0);
        memory.words(SIZE - 16, 2)[1].store(7, Ordering::Relaxed);
        writer.words(8, 1)[0].store(9, Ordering::Relaxed);
        assert_eq!(load(&reader, SIZE - 8), 7);
        assert_eq!(memory.words(0, 2)[1].load(Ordering::Relaxed), 9);
        assert_eq!(memory.words(SIZE, 0).len(), 0);
    }

    #[test]
    fn memory_that_is_there_when_touched_has_the_pages_that_were_touched() {
        let memory = SharedMemory::builder("test", 1 << 20).when_touched().create().unwrap();
        let pages = || fstat(memory.fd()).unwrap().st_blocks / 8;
        assert_eq!(pages(), 0);
        memory.words(4096, 1)[0].store(1, Ordering::Relaxed);
        assert!((1..256).contains(&pages()), "{}", pages());
        assert_eq!(memory.words(8192, 1)[0].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn shared_memory_is_a_window() {
        let memory = memory();
        let window: &dyn Window = &memory;
        assert_eq!((window.kind(), window.len(), window.io_memory()), ("memory", SIZE, false));
        assert_eq!(window.as_ptr(), memory.as_ptr());
        assert_eq!(fstat(window.fd()).unwrap().st_size as usize, SIZE);
    }

    #[test]
    fn after_the_seal_only_existing_mappings_can_write() {
        let memory = memory();
        let early = SharedMemory::from_fd(handed(&memory), SIZE).unwrap();
        memory.seal_against_writers().unwrap();

        let fd = handed(&memory);
        assert!(MmapOptions::new().len(SIZE).map_raw(&fd).is_err());
        assert!(matches!(
            SharedMemory::from_fd(handed(&memory), SIZE),
            Err(ShimError::System { call: "mmap", .. })
        ));
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(&fd, punch, 0, 4096), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));
        assert!(matches!(memory.seal_against_writers(), Err(ShimError::System { .. })));

        let reader = ReadOnlyMemory::from_fd(fd, SIZE).unwrap();
        // SAFETY: the range is the mapping that `reader` owns. The call must fail, and otherwise
        // would only add a permission.
        let more = unsafe {
            mprotect(reader.as_ptr().as_ptr().cast(), SIZE, MprotectFlags::READ | MprotectFlags::WRITE)
        };
        assert_eq!(more, Err(Errno::ACCESS));
        memory.words(0, 1)[0].store(1, Ordering::Relaxed);
        assert_eq!(load(&reader, 0), 1);
        early.words(0, 1)[0].store(2, Ordering::Relaxed);
        assert_eq!(load(&reader, 0), 2);
    }

    #[test]
    fn the_size_is_final() {
        let memory = memory();
        for size in [0, SIZE - 4096, SIZE + 4096] {
            assert_eq!(ftruncate(memory.fd(), size as u64), Err(Errno::PERM));
        }
    }

    #[test]
    fn memory_that_a_peer_could_truncate_is_refused() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let length = file.metadata().unwrap().len() as usize;
        for (fd, length) in [
            (memfd(SIZE, SealFlags::empty()), SIZE),
            (memfd(SIZE, SealFlags::GROW), SIZE),
            (memfd(SIZE, SealFlags::SHRINK), SIZE),
            (file.into(), length),
        ] {
            let again = fd.try_clone().unwrap();
            assert!(matches!(ReadOnlyMemory::from_fd(fd, length), Err(ShimError::PeerSeals { .. })));
            assert!(matches!(SharedMemory::from_fd(again, length), Err(ShimError::PeerSeals { .. })));
        }
    }

    #[test]
    fn a_wrong_size_is_refused() {
        for (bytes, expected) in [(SIZE, SIZE - 1), (SIZE, SIZE + 4096), (SIZE, 0), (0, 0)] {
            let fd = memfd(bytes, SealFlags::SHRINK | SealFlags::GROW);
            let again = fd.try_clone().unwrap();
            let error = ReadOnlyMemory::from_fd(fd, expected).unwrap_err();
            assert!(matches!(error, ShimError::PeerSize { .. }), "{error}");
            assert!(error.to_string().contains(&format!("{bytes} bytes")), "{error}");
            assert!(matches!(SharedMemory::from_fd(again, expected), Err(ShimError::PeerSize { .. })));
        }
    }

    #[test]
    fn words_outside_the_memory_or_misaligned_panic() {
        let memory = memory();
        for (offset, n) in
            [(4, 1), (SIZE - 8, 2), (SIZE + 8, 0), (0, usize::MAX / 8 + 1), (usize::MAX - 7, 1)]
        {
            let call = std::panic::AssertUnwindSafe(|| memory.words(offset, n).len());
            assert!(std::panic::catch_unwind(call).is_err(), "{n} words at {offset}");
        }
    }

    #[test]
    fn huge_pages_are_used_where_there_are_any() {
        let size = 2 * HUGE_PAGE;
        let make = |huge| SharedMemory::builder("huge", size).huge_pages(huge).create();
        let tried = make(HugePages::Try).unwrap();
        tried.words(size - 8, 1)[0].store(1, Ordering::Relaxed);
        assert!(!make(HugePages::Never).unwrap().huge_pages());
        match make(HugePages::Require) {
            Err(error) => {
                assert!(matches!(error, ShimError::HugePages { .. }), "{error}");
                assert!(error.to_string().contains("nr_hugepages"), "{error}");
            }
            Ok(memory) => {
                assert!(memory.huge_pages());
                assert!(matches!(
                    SharedMemory::from_fd(handed(&memory), size),
                    Err(ShimError::PeerHugePages)
                ));
                assert!(matches!(
                    ReadOnlyMemory::from_fd(handed(&memory), size),
                    Err(ShimError::PeerSeals { .. })
                ));
                memory.seal_against_writers().unwrap();
                let reader = ReadOnlyMemory::from_fd(handed(&memory), size).unwrap();
                memory.words(size - 8, 1)[0].store(5, Ordering::Relaxed);
                assert_eq!(load(&reader, size - 8), 5);
            }
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let make = |bytes, huge| SharedMemory::builder("odd", bytes).huge_pages(huge).create();
        assert!(matches!(make(0, HugePages::Try), Err(ShimError::Size { bytes: 0, .. })));
        assert!(matches!(make(4096, HugePages::Require), Err(ShimError::Size { bytes: 4096, .. })));
        assert!(matches!(make(1 << 60, HugePages::Never), Err(ShimError::System { .. })));
        assert_eq!(make(12, HugePages::Never).unwrap().len(), 12);
    }

    #[test]
    fn touching_reaches_every_page_and_no_further() {
        for bytes in [4, 8, 4096, 4100, SIZE] {
            let memory = SharedMemory::builder("touch", bytes).create().unwrap();
            touch(&memory.map);
        }
    }

    #[test]
    fn a_node_that_is_not_there_is_named() {
        let make = |node| SharedMemory::builder("near", SIZE).numa_node(Some(node)).create();
        // A sandbox may forbid mbind altogether.
        if let Err(error) = make(0) {
            assert!(matches!(error, ShimError::Numa { node: 0, .. }), "{error}");
        }
        for node in [1023, 1024, u32::MAX] {
            let error = make(node).unwrap_err();
            assert!(matches!(error, ShimError::Numa { .. }), "{error}");
            assert!(error.to_string().contains(&format!("node {node}")), "{error}");
        }
    }
}
