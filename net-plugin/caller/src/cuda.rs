//! Memory of a real GPU for a caller of plugins, by the CUDA driver's own calls.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

/// The calls of the driver by which a rank has memory on a real GPU.
pub struct Driver {
    count: unsafe extern "C" fn(*mut c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    set_current: unsafe extern "C" fn(*mut c_void) -> c_int,
    allocate: unsafe extern "C" fn(*mut *mut u8, usize) -> c_int,
    free: unsafe extern "C" fn(*mut u8) -> c_int,
    set: unsafe extern "C" fn(*mut u8, u8, usize) -> c_int,
    download: unsafe extern "C" fn(*mut u8, *const u8, usize) -> c_int,
    upload: unsafe extern "C" fn(*mut u8, *const u8, usize) -> c_int,
    settle: unsafe extern "C" fn() -> c_int,
}

impl Driver {
    /// The driver of a real GPU; `None` where the CPU executor plays the GPU, or where there is no driver.
    pub fn real() -> Option<&'static Driver> {
        static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
        DRIVER.get_or_init(|| if played() { None } else { Driver::load() }).as_ref()
    }

    fn load() -> Option<Driver> {
        // SAFETY: NVIDIA's driver library, whose constructors are made for being loaded by any thread.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the types are cuda.h's.
        let driver = unsafe {
            let init = library.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit").ok()?;
            succeeded("cuInit", init(0));
            Driver {
                count: *library.get(b"cuDeviceGetCount").ok()?,
                retain: *library.get(b"cuDevicePrimaryCtxRetain").ok()?,
                set_current: *library.get(b"cuCtxSetCurrent").ok()?,
                allocate: *library.get(b"cuMemAlloc_v2").ok()?,
                free: *library.get(b"cuMemFree_v2").ok()?,
                set: *library.get(b"cuMemsetD8_v2").ok()?,
                download: *library.get(b"cuMemcpyDtoH_v2").ok()?,
                upload: *library.get(b"cuMemcpyHtoD_v2").ok()?,
                settle: *library.get(b"cuCtxSynchronize").ok()?,
            }
        };
        // It can't be unloaded once it is initialised, and the functions stay.
        std::mem::forget(library);
        Some(driver)
    }

    /// Makes a GPU current on this thread, as a program has done before it calls NCCL: `rank` counts through the GPUs.
    pub fn enter(&self, rank: usize) {
        let (mut count, mut context) = (0, std::ptr::null_mut());
        // SAFETY: as cuda.h says; both places can be written. The context is kept until the process ends.
        unsafe {
            succeeded("cuDeviceGetCount", (self.count)(&mut count));
            let gpu = (rank as c_int).checked_rem(count).expect("the driver shows a GPU");
            succeeded("cuDevicePrimaryCtxRetain", (self.retain)(&mut context, gpu));
            succeeded("cuCtxSetCurrent", (self.set_current)(context));
        }
    }

    /// Allocates zeroed memory of the GPU that is current.
    pub fn allocate(&self, bytes: usize) -> *mut u8 {
        let mut at = std::ptr::null_mut();
        // SAFETY: as cuda.h says; the place can be written.
        succeeded("cuMemAlloc", unsafe { (self.allocate)(&mut at, bytes) });
        // SAFETY: the memory is new and has the bytes.
        unsafe { self.set(at, 0, bytes) };
        at
    }

    /// Sets every byte of GPU memory.
    ///
    /// # Safety
    /// `at` has the bytes, and nothing else uses them now.
    pub unsafe fn set(&self, at: *mut u8, byte: u8, bytes: usize) {
        // SAFETY: the caller's promise. Setting memory may return before its end.
        unsafe {
            succeeded("cuMemsetD8", (self.set)(at, byte, bytes));
            succeeded("cuCtxSynchronize", (self.settle)());
        }
    }

    /// Copies out of GPU memory.
    ///
    /// # Safety
    /// `at` has as many bytes as `to`.
    pub unsafe fn download(&self, at: *const u8, to: &mut [u8]) {
        // SAFETY: the caller's promise.
        succeeded("cuMemcpyDtoH", unsafe { (self.download)(to.as_mut_ptr(), at, to.len()) });
    }

    /// Copies into GPU memory.
    ///
    /// # Safety
    /// `at` has as many bytes as `from`, and nothing else uses them now.
    pub unsafe fn upload(&self, at: *mut u8, from: &[u8]) {
        // SAFETY: the caller's promise. The copy from memory that the driver has not pinned may return before its end.
        unsafe {
            succeeded("cuMemcpyHtoD", (self.upload)(at, from.as_ptr(), from.len()));
            succeeded("cuCtxSynchronize", (self.settle)());
        }
    }

    /// Frees memory of [`Driver::allocate`].
    ///
    /// # Safety
    /// Nothing uses the memory any more.
    pub unsafe fn free(&self, at: *mut u8) {
        // SAFETY: the caller's promise.
        succeeded("cuMemFree", unsafe { (self.free)(at) });
    }
}

/// Whether the plugin is told to have the CPU executor play a GPU.
fn played() -> bool {
    std::env::var_os("_PUSHGATE_NET_GPU").is_some()
}

fn succeeded(call: &str, result: c_int) {
    assert_eq!(result, 0, "{call} answered {result}");
}
