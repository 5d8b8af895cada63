//! The CUDA driver, as NCCL has brought it up before it loads a plugin.

use std::ffi::{c_int, c_uint, c_void};

use libloading::{Error, Library};

/// Makes a context of the first GPU and lets it go, if there is a CUDA driver that shows a GPU. What the
/// driver opens and starts for that stays until the process ends, and is not counted as the plugin's.
pub fn bring_up() {
    // SAFETY: NVIDIA's driver library, whose constructors are made for being loaded by any thread.
    let Ok(library) = (unsafe { Library::new("libcuda.so.1") }) else { return };
    // SAFETY: `call_all` gives the functions their types of cuda.h.
    if let Err(e) = unsafe { call_all(&library) } {
        println!("the CUDA driver is not brought up: {e}");
    }
    // It can't be unloaded once it is initialised.
    std::mem::forget(library);
}

/// # Safety
/// `library` is libcuda.
unsafe fn call_all(library: &Library) -> Result<(), Error> {
    // SAFETY: the caller's promise; each type is cuda.h's.
    unsafe {
        let init = library.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit")?;
        let retain = library
            .get::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>(b"cuDevicePrimaryCtxRetain")?;
        let release = library.get::<unsafe extern "C" fn(c_int) -> c_int>(b"cuDevicePrimaryCtxRelease_v2")?;
        let mut context = std::ptr::null_mut();
        if init(0) == 0 && retain(&mut context, 0) == 0 {
            release(0);
        }
    }
    Ok(())
}
