//! Memory that kernels and peers access.

use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use pushgate::{Context, DeviceBuffer, HostMemory, Shared};

use crate::arguments::{Out, bytes, bytes_mut};
use crate::boundary::{Failure, Result, call};
use crate::context::pushgate_context;
use crate::table::{self, Object};

/// Memory that the device of a context accesses. Any thread may use one.
pub struct pushgate_memory;

/// Memory, by whose it is and where it lies.
pub(crate) enum Place {
    /// Made by the library, shared by host and device.
    Host(Shared),
    /// Made by the library, the device's.
    Device(DeviceBuffer),
    /// The program's own, of the host.
    OwnHost(HostMemory),
    /// The program's own, of the device.
    OwnDevice { address: u64, size: u64 },
}

/// Memory, with the context that it was made with.
pub(crate) struct MemoryObject {
    pub(crate) place: Place,
    _context: Arc<Context>,
}

impl Object for MemoryObject {
    type Handle = pushgate_memory;
    const NAME: &'static str = "memory";
}

/// Makes memory with `make`.
///
/// # Safety
/// As [`Out::handle`].
unsafe fn create(
    context: *const pushgate_context,
    out: *mut *mut pushgate_memory,
    make: impl FnOnce(&Context) -> Result<Place>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let out = unsafe { Out::handle("memory", out)? };
    let context = table::get::<Context>(context)?;
    out.put(table::open(MemoryObject { place: make(&context)?, _context: context }));
    Ok(())
}

/// A size of memory that the library allocates.
fn size_of_new(size: usize) -> Result<usize> {
    match size {
        0 => Err(Failure::argument("size", "0, expected 1 or more")),
        size if size > isize::MAX as usize => Err(Failure::argument("size", "more than memory can hold")),
        size => Ok(size),
    }
}

/// Allocates zeroed host memory that kernels access too. Works with every proxy, and peers on this host read it without a copy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_memory_alloc_host(
    context: *const pushgate_context,
    size: usize,
    memory: *mut *mut pushgate_memory,
) -> c_int {
    // SAFETY: the header's rules for pointers, which the program keeps.
    call(|| unsafe {
        create(context, memory, |c| Ok(Place::Host(c.shared("memory of a C program", size_of_new(size)?)?)))
    })
}

/// Allocates zeroed memory of the device, aligned to 256 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_memory_alloc_device(
    context: *const pushgate_context,
    size: usize,
    memory: *mut *mut pushgate_memory,
) -> c_int {
    // SAFETY: the header's rules for pointers, which the program keeps.
    call(|| unsafe { create(context, memory, |c| Ok(Place::Device(c.alloc(size_of_new(size)?)?))) })
}

/// Makes host memory of the program's own accessible to kernels, and to peers by a region. The program keeps it mapped until this
/// handle is closed. Regions in it need `proxy = thread`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_memory_use_host(
    context: *const pushgate_context,
    pointer: *mut c_void,
    size: usize,
    memory: *mut *mut pushgate_memory,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        unsafe {
            create(context, memory, |c| {
                let Some(at) = NonNull::new(pointer.cast()) else {
                    return Err(Failure::argument("pointer", "NULL, expected memory"));
                };
                // SAFETY: that it stays mapped, and that accesses do not race, is what this call's comment asks for.
                Ok(Place::OwnHost(c.register_host(at, size_of_new(size)?)?))
            })
        }
    })
}

/// Names memory of the device that another library allocated, as by cudaMalloc, so that a region can be made of it. The program
/// keeps it allocated until this handle is closed. Regions in it need `proxy = thread`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_memory_use_device(
    context: *const pushgate_context,
    address: u64,
    size: usize,
    memory: *mut *mut pushgate_memory,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        unsafe {
            create(context, memory, |_| {
                let size = size_of_new(size)? as u64;
                if address == 0 || address.checked_add(size).is_none() {
                    let why = format!("{address:#x}, expected that of {size} bytes");
                    return Err(Failure::argument("address", why));
                }
                Ok(Place::OwnDevice { address, size })
            })
        }
    })
}

/// Closes memory that no region, kernel or peer uses any more; what the library allocated is freed. NULL is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_memory_close(memory: *mut pushgate_memory) -> c_int {
    call(|| table::close::<MemoryObject>(memory))
}

/// Where memory lies. Each place may be NULL.
///
/// @param address  Gets the address for kernels.
/// @param pointer  Gets the address for the host; NULL for memory of the device.
/// @param size     Gets the size in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_memory_address(
    memory: *const pushgate_memory,
    address: *mut u64,
    pointer: *mut *mut c_void,
    size: *mut usize,
) -> c_int {
    call(|| {
        let object = table::get::<MemoryObject>(memory)?;
        let (at, host, bytes) = match &object.place {
            Place::Host(m) => (m.device_addr(), m.as_ptr().as_ptr().cast(), m.len()),
            Place::Device(m) => (m.addr(), null_mut(), m.len()),
            Place::OwnHost(m) => (m.device_addr(), m.as_ptr().as_ptr().cast(), m.len()),
            Place::OwnDevice { address, size } => (*address, null_mut(), *size as usize),
        };
        // SAFETY: the header's rules for pointers, which the program keeps.
        unsafe {
            if !address.is_null() {
                Out::new("address", address)?.put(at);
            }
            if !pointer.is_null() {
                Out::new("pointer", pointer)?.put(host);
            }
            if !size.is_null() {
                Out::new("size", size)?.put(bytes);
            }
        }
        Ok(())
    })
}

/// The buffer that backs memory of the device.
fn buffer(object: &MemoryObject) -> Result<&DeviceBuffer> {
    match &object.place {
        Place::Device(buffer) => Ok(buffer),
        Place::OwnDevice { .. } => {
            Err(Failure::argument("memory", "memory of another library, which copies to and from it"))
        }
        Place::Host(_) | Place::OwnHost(_) => {
            Err(Failure::argument("memory", "host memory; access it by its pointer"))
        }
    }
}

/// Copies from the program to memory of pushgate_memory_alloc_device. Complete on return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_memory_write(
    memory: *const pushgate_memory,
    offset: usize,
    from: *const c_void,
    size: usize,
) -> c_int {
    call(|| {
        let object = table::get::<MemoryObject>(memory)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let from = unsafe { bytes("from", from.cast(), size)? };
        Ok(buffer(&object)?.copy_from_host_at(offset, from).map_err(pushgate::Error::from)?)
    })
}

/// Copies from memory of pushgate_memory_alloc_device to the program. Complete on return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_memory_read(
    memory: *const pushgate_memory,
    offset: usize,
    to: *mut c_void,
    size: usize,
) -> c_int {
    call(|| {
        let object = table::get::<MemoryObject>(memory)?;
        let from = buffer(&object)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let to = unsafe { bytes_mut("to", to.cast(), size)? };
        Ok(from.copy_to_host_at(offset, to).map_err(pushgate::Error::from)?)
    })
}
