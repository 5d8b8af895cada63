//! Memory of the simulated ranks: all of it lies in the heap of this process. A region lies between two guards, whose bytes
//! nobody may change (P8).

use std::cell::RefCell;
use std::io;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_link::PeerProcess;
use pushgate_link::memory::Mapped;

/// Bytes of a guard.
pub(super) const GUARD: usize = 256;
const GUARD_WORD: u64 = 0x6775_6172_6467_7561;

thread_local! {
    /// What a simulated process may read of another one: addresses and lengths.
    static READABLE: RefCell<Vec<(usize, usize)>> = const { RefCell::new(Vec::new()) };
}

/// Shared memory, whose descriptor an end can hand to the other one.
pub(super) fn allocate(name: &str, bytes: usize) -> Result<SharedMemory, ShimError> {
    SharedMemory::builder(name, bytes).huge_pages(HugePages::Never).create()
}

/// Forgets what simulated processes may read.
pub(super) fn forget_readable() {
    READABLE.with_borrow_mut(Vec::clear);
}

/// Simulated processes may read this memory from now on, until [`forget_readable`].
pub(super) fn make_readable(address: usize, bytes: usize) {
    READABLE.with_borrow_mut(|all| all.push((address, bytes)));
}

/// A simulated process. Its memory is read as the kernel would: what is not mapped there is an error.
pub(super) struct SimulatedProcess;

impl PeerProcess for SimulatedProcess {
    fn allow(&self) {}

    unsafe fn read(&self, address: u64, to: usize, length: usize) -> io::Result<usize> {
        let from = address as usize;
        let mapped = READABLE.with_borrow(|all| {
            let inside = |(at, bytes): &(usize, usize)| {
                *at <= from && from.checked_add(length).is_some_and(|e| e <= at + bytes)
            };
            all.iter().any(inside)
        });
        if !mapped {
            // EFAULT.
            return Err(io::Error::from_raw_os_error(14));
        }
        // SAFETY: the source is memory of the simulation that its owner keeps until it calls `forget_readable`; the target
        // is the caller's promise. They may be the same bytes only where a liar names its peer's memory.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, length) };
        Ok(length)
    }
}

/// Memory between two guards.
pub(super) struct Guarded {
    memory: Mapped,
    bytes: usize,
}

impl Guarded {
    /// Zeroed memory of `bytes`, a multiple of 8.
    pub(super) fn new(bytes: usize) -> Self {
        let guarded = Guarded { memory: Mapped::heap(bytes + 2 * GUARD), bytes };
        guarded.guards(|word| *word = GUARD_WORD);
        guarded
    }

    /// Address of the first byte behind the first guard.
    pub(super) fn address(&self) -> usize {
        self.memory.address() + GUARD
    }

    /// Length without the guards, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// True if nobody has written to a guard.
    pub(super) fn is_whole(&self) -> bool {
        let mut whole = true;
        self.guards(|word| whole &= *word == GUARD_WORD);
        whole
    }

    fn guards(&self, mut act: impl FnMut(&mut u64)) {
        for at in [self.memory.address(), self.address() + self.bytes] {
            for i in 0..GUARD / 8 {
                // SAFETY: the word lies in the memory that `self` owns and is aligned. One thread runs the simulation, so
                // nobody else touches the word meanwhile.
                act(unsafe { &mut *((at + i * 8) as *mut u64) });
            }
        }
    }
}

/// The word at an aligned address of memory of the simulation.
///
/// # Safety
/// The word is mapped, and the calling thread alone touches it.
#[inline]
pub(super) unsafe fn word(address: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { (address as *const u64).read() }
}
