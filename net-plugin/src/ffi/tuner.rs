//! The tuner interface v4. It corrects one thing that NCCL's model can't know about this plugin:
//! NCCL's low-latency protocol sends twice the bytes, from host memory, through threads of ours,
//! and NCCL would use it up to several megabytes.

#![allow(non_upper_case_globals)] // The symbol's name is NCCL's.

use std::ffi::{c_char, c_int, c_void};

use super::tables::{R, call, hot};
use crate::log::{self, Logger};
use crate::plugin;

/// Collectives of more bytes do not use the low-latency protocol (docs/benchmarks.md: both ways
/// cost the same at about this size on two H200).
const LL_LIMIT: usize = 256 << 10;
/// The protocol `NCCL_PROTO_LL`.
const LL: usize = 0;
/// The cost `NCCL_ALGO_PROTO_IGNORE`.
const IGNORE: f32 = -1.0;

/// The table `ncclTuner_v4_t`.
#[repr(C)]
pub struct Tuner {
    name: *const c_char,
    init: unsafe extern "C" fn(usize, usize, Logger, *mut *mut c_void) -> R,
    info: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        usize,
        c_int,
        *mut f32,
        c_int,
        c_int,
        c_int,
        *mut c_int,
    ) -> R,
    destroy: unsafe extern "C" fn(*mut c_void) -> R,
}

// SAFETY: a constant table, which is never written.
unsafe impl Sync for Tuner {}

unsafe extern "C" fn init(_ranks: usize, nodes: usize, logger: Logger, context: *mut *mut c_void) -> R {
    log::set_logger(logger);
    call("tuner init", || {
        // Within one node NCCL uses other transports. A context that is not NULL means that the
        // network is ours.
        let ours = nodes > 1 && plugin::properties().is_ok_and(|p| p.takes_gpu_memory());
        // SAFETY: NCCL gives a place that can be written.
        unsafe { *context = std::ptr::without_provenance_mut(usize::from(ours)) };
        Ok(())
    })
}

unsafe extern "C" fn info(
    context: *mut c_void,
    _function: c_int,
    bytes: usize,
    _operations: c_int,
    costs: *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    _channels: *mut c_int,
) -> R {
    hot("tuner getCollInfo", || {
        let (algorithms, protocols) = (algorithms.max(0) as usize, protocols.max(0) as usize);
        if !context.is_null() && bytes > LL_LIMIT && !costs.is_null() {
            // SAFETY: NCCL's table of algorithms by protocols, which is ours until the call
            // returns.
            let costs = unsafe { std::slice::from_raw_parts_mut(costs, algorithms * protocols) };
            without_ll(costs, protocols);
        }
        Ok(())
    })
}

/// Excludes the low-latency protocol from a table of costs, if that leaves another choice.
fn without_ll(costs: &mut [f32], protocols: usize) {
    let is_ll = |at: usize| at % protocols == LL;
    if costs.iter().enumerate().any(|(at, cost)| !is_ll(at) && *cost >= 0.0) {
        costs.iter_mut().enumerate().filter(|(at, _)| is_ll(*at)).for_each(|(_, cost)| *cost = IGNORE);
    }
}

unsafe extern "C" fn destroy(_context: *mut c_void) -> R {
    0
}

/// The symbol that NCCL 2.21 and later looks up.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v4: Tuner = Tuner { name: c"pushgate".as_ptr(), init, info, destroy };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_wants_nothing_else_keeps_it() {
        let mut costs = [1.0, 2.0, 3.0, 4.0, -1.0, 5.0];
        without_ll(&mut costs, 3);
        assert_eq!(costs, [-1.0, 2.0, 3.0, -1.0, -1.0, 5.0]);
        let mut pinned = [1.0, -1.0, -1.0, 4.0, -1.0, -1.0];
        without_ll(&mut pinned, 3);
        assert_eq!(pinned, [1.0, -1.0, -1.0, 4.0, -1.0, -1.0]);
        without_ll(&mut [], 3);
    }
}
