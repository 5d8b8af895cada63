//! Host memory that device and host share.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_gpu_kernels::Registration;

/// Host memory that device and host share, made by [`Context::shared`](crate::Context::shared).
pub struct Shared {
    owner: Owner,
    // Dropped first: the memory is unregistered before it is unmapped.
    registration: Registration,
    memory: Arc<SharedMemory>,
}

impl Shared {
    /// Memory of this process with its registration on the device.
    pub(crate) fn new(memory: Arc<SharedMemory>, registration: Registration) -> Shared {
        Shared { owner: Owner::here(), registration, memory }
    }

    /// The memory's address for kernels.
    pub fn device_addr(&self) -> u64 {
        self.registration.device_addr()
    }

    /// The memory's length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Never true: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// A pointer to the first byte, for raw access.
    ///
    /// A child of `fork` has no memory there: an access raises SIGSEGV.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.memory.as_ptr()
    }

    /// `n` 8-byte words from byte `offset`, as atomics.
    ///
    /// # Panics
    /// If the words do not lie within the memory, or in a child of `fork`, which does not have the
    /// memory.
    pub fn words(&self, offset: usize, n: usize) -> &[AtomicU64] {
        self.owner.check().unwrap_or_else(|forked| panic!("{forked}"));
        self.memory.words(offset, n)
    }

    /// The memory itself, which other processes can map.
    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }
}
