//! Host memory that the program allocated itself, made known to the device.

use std::fmt;
use std::ptr::NonNull;

use pushgate_driver_shim::fork::Owner;
use pushgate_gpu_kernels::Registration;

/// Host memory of the program's own that the device can access, made by
/// [`Context::register_host`](crate::Context::register_host). Dropping it takes the memory back from the device.
pub struct HostMemory {
    owner: Owner,
    registration: Registration,
    at: NonNull<u8>,
}

// SAFETY: the handle is an address and a registration that any thread may drop; nothing is read or written through it.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn new(registration: Registration, at: NonNull<u8>) -> Self {
        HostMemory { owner: Owner::here(), registration, at }
    }

    /// The memory's address for kernels.
    pub fn device_addr(&self) -> u64 {
        self.registration.device_addr()
    }

    /// A pointer to the first byte.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.at
    }

    /// The memory's length in bytes.
    pub fn len(&self) -> usize {
        self.registration.len()
    }

    /// Never true: memory that is registered has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({:?}, {} bytes)", self.at, self.len())
    }
}
