//! The profiler interfaces v5 (NCCL 2.28 and later) and v6. They tell, on the user's thread, when a kernel
//! is about to be launched and when it has been. So the worker that copies for that kernel can be queued
//! before it and leave after it (docs/worker.md).
//!
//! NCCL loads one profiler. A second one that the user names gets every event from here
//! (`second.rs`).

#![allow(non_upper_case_globals)] // The symbol's name is NCCL's.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

use super::second::{Second, Theirs};
use super::tables::{R, call, hand_out, hot};
use super::types::{KERNEL_LAUNCH, ProfilerEvent, ProfilerTable};
use crate::error::Result;
use crate::gpu::{self, Gpu};
use crate::log::{self, Logger};
use crate::plugin;

/// What the profiler knows of a communicator.
struct Context {
    gpu: Option<Arc<Gpu>>,
    theirs: Option<Theirs>,
}

/// A kernel launch under way, with the worker's lease for it.
struct Launch {
    gpu: Arc<Gpu>,
    lease: pushgate::worker::Lease,
    stream: u64,
}

impl Launch {
    fn begin(gpu: &Arc<Gpu>, stream: u64) -> Result<Box<Launch>> {
        let lease = gpu.lease(stream)?;
        Ok(Box::new(Launch { gpu: gpu.clone(), lease, stream }))
    }

    fn end(self) -> Result<()> {
        self.gpu.lease_done(self.lease, self.stream)
    }
}

/// A kernel launch that NCCL has a handle of.
struct Open {
    handle: usize,
    /// The handle is of the second profiler's event. Otherwise it is the launch's own address.
    theirs: bool,
    launch: Box<Launch>,
}

/// The launches under way: one or two.
static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());

fn open() -> MutexGuard<'static, Vec<Open>> {
    OPEN.lock().unwrap_or_else(|e| e.into_inner())
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    comm: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    logger: Logger,
) -> R {
    log::set_logger(logger);
    call("profiler init", || {
        let gpu = gpu::current().and_then(plugin::gpu);
        // SAFETY: NCCL gives places that can be written, and a name that is NULL or a string.
        unsafe {
            let second = Second::loaded(&ncclProfiler_v6);
            let theirs = second.and_then(|s| s.begin(comm, mask, name, [nodes, ranks, rank], logger));
            // Without a GPU of ours this profiler asks for no events.
            if gpu.is_some() {
                gpu::hooked();
                *mask |= KERNEL_LAUNCH as c_int;
            }
            let any = gpu.is_some() || theirs.is_some();
            *context = hand_out(any.then(|| Box::new(Context { gpu, theirs })));
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
            let event = event.cast::<ProfilerEvent>();
            let Some(context) = context.cast::<Context>().as_ref() else { return Ok(()) };
            let theirs = context.theirs.as_ref().map_or(std::ptr::null_mut(), |t| t.start(event));
            *handle = theirs;
            if let Some(gpu) = context.gpu.as_ref().filter(|gpu| gpu.copies())
                && (*event).kind == KERNEL_LAUNCH
            {
                let mut launch = Launch::begin(gpu, (*event).stream as u64)?;
                if theirs.is_null() {
                    *handle = (&raw mut *launch).cast();
                }
                open().push(Open { handle: *handle as usize, theirs: !theirs.is_null(), launch });
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn stop(handle: *mut c_void) -> R {
    hot("profiler stopEvent", || {
        if handle.is_null() {
            return Ok(());
        }
        let launch = {
            let mut open = open();
            open.iter().position(|o| o.handle == handle as usize).map(|at| open.swap_remove(at))
        };
        if let Some(second) = Second::loaded(&ncclProfiler_v6)
            && launch.as_ref().is_none_or(|launch| launch.theirs)
        {
            // SAFETY: the second profiler gave the handle out, and NCCL gives it back once.
            unsafe { second.stop(handle) };
        }
        launch.map_or(Ok(()), |open| open.launch.end())
    })
}

unsafe extern "C" fn record(handle: *mut c_void, state: c_int, arguments: *const c_void) -> R {
    if let (Some(second), false) = (Second::loaded(&ncclProfiler_v6), handle.is_null()) {
        // SAFETY: NCCL's own arguments. NCCL records nothing of a kernel launch, so the event is the second profiler's.
        unsafe { second.record(handle, state, arguments) };
    }
    0
}

unsafe extern "C" fn finalize(context: *mut c_void) -> R {
    call("profiler finalize", || {
        if !context.is_null() {
            // SAFETY: the pointer comes from `init` and is given back once.
            let context = unsafe { Box::from_raw(context.cast::<Context>()) };
            if let Some(theirs) = context.theirs {
                theirs.end();
            }
        }
        Ok(())
    })
}

const NAME: *const c_char = c"pushgate".as_ptr();

/// The symbol that NCCL 2.28 and later looks up.
#[unsafe(no_mangle)]
pub static ncclProfiler_v5: ProfilerTable = ProfilerTable { name: NAME, init, start, stop, record, finalize };

/// The symbol of v6, which NCCL takes in place of v5 where it knows both.
#[unsafe(no_mangle)]
pub static ncclProfiler_v6: ProfilerTable = ProfilerTable { name: NAME, init, start, stop, record, finalize };
