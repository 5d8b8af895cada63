//! Host memory that is registered with the driver, so that devices can access it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;

use super::context::Context;
use crate::error::{DeviceError, Result};
use crate::executor::Access;
use crate::lock::lock;

/// Host ranges that this process has registered: CUDA accepts each range only once.
type Ranges = Mutex<Option<HashMap<(usize, usize), Pinned>>>;

/// Ranges of primary contexts, which every context sees.
static PRIMARY: Ranges = Mutex::new(None);
/// Ranges of contexts beside them. A call that the driver holds up in a primary context must not hold up these too.
static BESIDE: Ranges = Mutex::new(None);

fn ranges(context: &Context) -> &'static Ranges {
    if context.is_primary() { &PRIMARY } else { &BESIDE }
}

/// A range that the driver has pinned.
struct Pinned {
    /// The context that registered the range, and the only one that can unregister it.
    context: Arc<Context>,
    /// How many registrations share the range.
    count: usize,
    access: Access,
    io_memory: bool,
}

/// A registration of a host range; the last one of a range unregisters the range on drop.
pub(super) struct CudaHostRange {
    context: Arc<Context>,
    ptr: usize,
    len: usize,
}

impl CudaHostRange {
    /// Registers a range, which may be registered already. The context must be current.
    pub(super) fn register(
        context: &Arc<Context>,
        ptr: NonNull<u8>,
        len: usize,
        access: Access,
        io_memory: bool,
    ) -> Result<Self> {
        let addr = ptr.as_ptr() as usize;
        let words = |access: Access, io: bool| format!("{access:?}{}", if io { ", io memory" } else { "" });
        let mut table = lock(ranges(context));
        let table = table.get_or_insert_default();
        if let Some(held) = table.get_mut(&(addr, len)) {
            let seen = context.is_primary() || Arc::ptr_eq(&held.context, context);
            if held.access != access || held.io_memory != io_memory || !seen {
                return Err(DeviceError::RegisteredOtherwise {
                    addr,
                    len,
                    held: words(held.access, held.io_memory),
                    asked: words(access, io_memory),
                });
            }
            held.count += 1;
        } else {
            let mut flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            if context.is_primary() {
                flags |= sys::CU_MEMHOSTREGISTER_PORTABLE;
            }
            if access == Access::ReadOnly {
                flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
            }
            if io_memory {
                flags |= sys::CU_MEMHOSTREGISTER_IOMEMORY;
            }
            // SAFETY: the driver pins the pages of this range, or says that it can't; it changes no
            // byte of them.
            let code = unsafe { (context.driver.cuMemHostRegister_v2)(ptr.as_ptr().cast(), len, flags) };
            context.check("cuMemHostRegister", code, || {
                format!("registering {len} bytes at {addr:#x} ({})", words(access, io_memory))
            })?;
            table.insert((addr, len), Pinned { context: context.clone(), count: 1, access, io_memory });
        }
        Ok(Self { context: context.clone(), ptr: addr, len })
    }

    /// The address at which the device sees the range.
    pub(super) fn device_addr(&self) -> Result<u64> {
        let mut addr = 0;
        // SAFETY: the range is registered for this context, which is current; writes one address.
        let code = unsafe {
            (self.context.driver.cuMemHostGetDevicePointer_v2)(&mut addr, self.ptr as *mut c_void, 0)
        };
        self.context.check("cuMemHostGetDevicePointer", code, || {
            format!("asking where the device sees {} bytes at {:#x}", self.len, self.ptr)
        })?;
        Ok(addr)
    }
}

impl Drop for CudaHostRange {
    fn drop(&mut self) {
        let mut table = lock(ranges(&self.context));
        let Some(table) = table.as_mut() else { return };
        let Some(held) = table.get_mut(&(self.ptr, self.len)) else { return };
        held.count -= 1;
        if held.count > 0 {
            return;
        }
        let Some(Pinned { context, .. }) = table.remove(&(self.ptr, self.len)) else { return };
        if let Ok(_current) = context.current() {
            // SAFETY: registered by this value, and its last holder is gone.
            let code = unsafe { (context.driver.cuMemHostUnregister)(self.ptr as *mut c_void) };
            context.note("cuMemHostUnregister", code, || {
                format!("unregistering {} bytes at {:#x}", self.len, self.ptr)
            });
        }
    }
}
