//! The profiler interface of NCCL 2.28 and later, used for one purpose only: it tells, on the
//! user's thread, when a kernel is about to be launched and when it has been. So the worker that
//! copies for that kernel can be queued before it and leave after it (docs/worker.md).

#![allow(non_upper_case_globals)] // The symbol's name is NCCL's.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use super::tables::{R, call, hand_out, hot};
use crate::gpu::{self, Gpu};
use crate::log::{self, Logger};
use crate::plugin;

/// The event type `ncclProfileKernelLaunch`.
const KERNEL_LAUNCH: u64 = 1 << 11;

/// The part of `ncclProfilerEventDescr_v5_t` that a kernel launch fills in.
#[repr(C)]
struct Event {
    kind: u64,
    parent: *mut c_void,
    rank: c_int,
    /// The first member of the union in a kernel launch.
    stream: *mut c_void,
}

/// The table `ncclProfiler_v5_t`.
#[repr(C)]
pub struct Profiler {
    name: *const c_char,
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut c_int,
        *const c_char,
        c_int,
        c_int,
        c_int,
        Logger,
    ) -> R,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const c_void) -> R,
    stop: unsafe extern "C" fn(*mut c_void) -> R,
    record: unsafe extern "C" fn(*mut c_void, c_int, *const c_void) -> R,
    finalize: unsafe extern "C" fn(*mut c_void) -> R,
}

// SAFETY: a constant table, which is never written.
unsafe impl Sync for Profiler {}

const _: () = assert!(std::mem::size_of::<Profiler>() == 48 && std::mem::offset_of!(Event, stream) == 24);

/// A kernel launch under way, with the worker's lease for it.
struct Launch {
    gpu: Arc<Gpu>,
    lease: pushgate::worker::Lease,
    stream: u64,
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    _comm: u64,
    mask: *mut c_int,
    _name: *const c_char,
    _nodes: c_int,
    _ranks: c_int,
    _rank: c_int,
    logger: Logger,
) -> R {
    log::set_logger(logger);
    call("profiler init", || {
        let gpu = gpu::current().and_then(plugin::gpu);
        // SAFETY: NCCL gives places that can be written.
        unsafe {
            // Without a GPU of ours the profiler asks for no events.
            if gpu.is_some() {
                gpu::hooked();
                *mask |= KERNEL_LAUNCH as c_int;
            }
            *context = hand_out(gpu.map(Box::new));
        }
        Ok(())
    })
}

unsafe extern "C" fn start(context: *mut c_void, handle: *mut *mut c_void, event: *const c_void) -> R {
    hot("profiler startEvent", || {
        // SAFETY: NCCL gives a place that can be written, a context of ours or NULL, and an event;
        // each type of event begins with its type.
        unsafe {
            *handle = std::ptr::null_mut();
            let event = event.cast::<Event>();
            let Some(gpu) = context.cast::<Arc<Gpu>>().as_ref() else { return Ok(()) };
            if (*event).kind == KERNEL_LAUNCH && gpu.copies() {
                let stream = (*event).stream as u64;
                let lease = gpu.lease(stream)?;
                *handle = hand_out(Some(Box::new(Launch { gpu: gpu.clone(), lease, stream })));
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn stop(handle: *mut c_void) -> R {
    hot("profiler stopEvent", || {
        if !handle.is_null() {
            // SAFETY: the pointer comes from `start` and is given back once.
            let Launch { gpu, lease, stream } = *unsafe { Box::from_raw(handle.cast::<Launch>()) };
            gpu.lease_done(lease, stream)?;
        }
        Ok(())
    })
}

unsafe extern "C" fn record(_handle: *mut c_void, _state: c_int, _arguments: *const c_void) -> R {
    0
}

unsafe extern "C" fn finalize(context: *mut c_void) -> R {
    call("profiler finalize", || {
        if !context.is_null() {
            // SAFETY: the pointer comes from `init` and is given back once.
            drop(unsafe { Box::from_raw(context.cast::<Arc<Gpu>>()) });
        }
        Ok(())
    })
}

/// The symbol that NCCL 2.28 and later looks up.
#[unsafe(no_mangle)]
pub static ncclProfiler_v5: Profiler =
    Profiler { name: c"pushgate".as_ptr(), init, start, stop, record, finalize };
