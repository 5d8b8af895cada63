//! Access to the memory of another GPU.

use std::ffi::c_int;
use std::sync::Arc;

use super::context::Context;
use super::driver::SUCCESS;
use crate::error::Result;

const ALREADY: u32 = 704; // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED

/// Lets kernels of `context`'s GPU load from and store to the memory of `other`'s from now on. False
/// if the two GPUs can't.
pub(super) fn reach(context: &Arc<Context>, other: &Arc<Context>) -> Result<bool> {
    if Arc::ptr_eq(context, other) {
        return Ok(true);
    }
    let driver = context.driver;
    let (Some(can), Some(enable)) = (driver.cuDeviceCanAccessPeer, driver.cuCtxEnablePeerAccess) else {
        return Ok(false);
    };
    let mut yes: c_int = 0;
    // SAFETY: two valid devices; writes one int.
    let code = unsafe { can(&mut yes, context.device, other.device) };
    let doing = || format!("asking for the memory of device {} ({})", other.index, other.name);
    context.check("cuDeviceCanAccessPeer", code, doing)?;
    if yes == 0 {
        return Ok(false);
    }
    let _current = context.current()?;
    // SAFETY: the other GPU's context is retained as long as `other` lives, and access to it
    // ends with it.
    match unsafe { enable(other.raw.0, 0) } {
        SUCCESS | ALREADY => Ok(true),
        code => context.check("cuCtxEnablePeerAccess", code, doing).map(|()| true),
    }
}
