//! The profiler interfaces v5 (NCCL 2.28 and later) and v6. They tell, on the user's thread, when a kernel
//! is about to be launched and when it has been. So the worker that copies for that kernel can be queued
//! before it and leave after it (docs/worker.md).
//!
//! NCCL 2.29 and later, which take v6, launch the kernels of broadcasts without an event (seen in 2.30.7: the task of a
//! broadcast that is made of another task gets no event mask). So for broadcasts the plugin takes two other events: the
//! call of the collective, before the launch, and the end of the group of calls, behind the launch.
//!
//! NCCL loads one profiler. A second one that the user names gets every event from here
//! (`second.rs`).

#![allow(non_upper_case_globals)] // The symbol's name is NCCL's.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

use super::second::{NAME, OWN, Second, Theirs};
use super::tables::{R, call, hand_out, hot};
use super::types::{
    COLL_API, CallEvent, GROUP_API, KERNEL_LAUNCH, LaunchEvent, P2P_API, ProfilerEvent, ProfilerTable,
};
use crate::error::Result;
use crate::gpu::{self, Gpu};
use crate::log::{self, Logger};
use crate::{calls, plugin, taken};

/// What the profiler knows of a communicator.
struct Context {
    gpu: Option<Arc<Gpu>>,
    theirs: Option<Theirs>,
    /// NCCL launches kernels of broadcasts without an event.
    silent_broadcasts: bool,
}

/// A kernel launch under way, with the worker's lease for it.
struct Launch {
    gpu: Arc<Gpu>,
    lease: pushgate::worker::Lease,
    stream: u64,
}

impl Launch {
    fn begin(gpu: &Arc<Gpu>, stream: u64) -> Result<Launch> {
        let lease = gpu.lease(stream)?;
        Ok(Launch { gpu: gpu.clone(), lease, stream })
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

/// The broadcasts of a stream in the group of calls under way.
struct Broadcasts {
    gpu: Arc<Gpu>,
    stream: u64,
    /// The worker's lease. `None` if no connection copied yet when the first broadcast was called: NCCL may connect between
    /// the call and the launch.
    launch: Option<Launch>,
}

impl Broadcasts {
    fn begin(gpu: &Arc<Gpu>, stream: u64) -> Result<Broadcasts> {
        let launch = gpu.copies().then(|| Launch::begin(gpu, stream)).transpose()?;
        Ok(Broadcasts { gpu: gpu.clone(), stream, launch })
    }

    fn end(self) -> Result<()> {
        match self.launch {
            Some(launch) => launch.end(),
            None if self.gpu.copies() => Launch::begin(&self.gpu, self.stream)?.end(),
            None => Ok(()),
        }
    }
}

/// A group of calls that a thread has begun.
#[derive(Default)]
struct Group {
    /// NCCL's handle of the group's event; 0 while there is no group.
    handle: usize,
    /// The handle is of the second profiler's event.
    theirs: bool,
    broadcasts: Vec<Broadcasts>,
}

/// What a group's handle points to if the second profiler gives none.
static GROUP: u64 = GROUP_API;

thread_local! {
    /// The thread's group of calls. NCCL tells of a group and its calls on the thread that makes the calls, and tells of the
    /// outermost group alone.
    static CALLS: RefCell<Group> = RefCell::default();
}

/// The launches under way: one or two.
static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());

fn open() -> MutexGuard<'static, Vec<Open>> {
    OPEN.lock().unwrap_or_else(|e| e.into_inner())
}

/// Begins the use for a communicator.
unsafe extern "C" fn init<const V6: bool>(
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
            let second = Second::loaded();
            let theirs = second.and_then(|s| s.begin(comm, mask, name, [nodes, ranks, rank], logger));
            // Without a GPU of ours this profiler asks for no events.
            if gpu.is_some() {
                taken::profiler_is_taken();
                *mask |= OWN as c_int;
            }
            let any = gpu.is_some() || theirs.is_some();
            *context = hand_out(any.then(|| Box::new(Context { gpu, theirs, silent_broadcasts: V6 })));
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
            let Some(gpu) = &context.gpu else { return Ok(()) };
            match (*event).kind {
                KERNEL_LAUNCH if gpu.copies() && !calls::need_no_copies() => {
                    let stream = (*event.cast::<LaunchEvent>()).stream;
                    let mut launch = Box::new(Launch::begin(gpu, stream as u64)?);
                    if theirs.is_null() {
                        *handle = (&raw mut *launch).cast();
                    }
                    open().push(Open { handle: *handle as usize, theirs: !theirs.is_null(), launch });
                }
                GROUP_API => {
                    calls::start_anew();
                    if theirs.is_null() {
                        *handle = (&raw const GROUP).cast_mut().cast();
                    }
                    let group =
                        Group { handle: *handle as usize, theirs: !theirs.is_null(), broadcasts: Vec::new() };
                    CALLS.set(group);
                }
                COLL_API => {
                    let call = &*event.cast::<CallEvent>();
                    let name = (!call.func.is_null()).then(|| CStr::from_ptr(call.func));
                    match name {
                        Some(name) if name == c"Broadcast" => {
                            calls::other();
                            if context.silent_broadcasts {
                                broadcast(gpu, call.stream as u64)?;
                            }
                        }
                        _ => calls::collective(),
                    }
                }
                P2P_API => calls::other(),
                _ => {}
            }
        }
        Ok(())
    })
}

/// Takes a lease for the broadcasts of a stream in the thread's group, unless the group has one.
fn broadcast(gpu: &Arc<Gpu>, stream: u64) -> Result<()> {
    CALLS.with_borrow_mut(|group| {
        let known = |b: &Broadcasts| b.stream == stream && Arc::ptr_eq(&b.gpu, gpu);
        if group.handle != 0 && !group.broadcasts.iter().any(known) {
            group.broadcasts.push(Broadcasts::begin(gpu, stream)?);
        }
        Ok(())
    })
}

unsafe extern "C" fn stop(handle: *mut c_void) -> R {
    hot("profiler stopEvent", || {
        if handle.is_null() {
            return Ok(());
        }
        let group =
            CALLS.with_borrow_mut(|group| (group.handle == handle as usize).then(|| std::mem::take(group)));
        if group.is_some() {
            calls::start_anew();
        }
        let launch = {
            let mut open = open();
            open.iter().position(|o| o.handle == handle as usize).map(|at| open.swap_remove(at))
        };
        let own = group.as_ref().is_some_and(|group| !group.theirs)
            || launch.as_ref().is_some_and(|launch| !launch.theirs);
        if let Some(second) = Second::loaded()
            && !own
        {
            // SAFETY: the second profiler gave the handle out, and NCCL gives it back once.
            unsafe { second.stop(handle) };
        }
        let broadcasts = group.map_or_else(Vec::new, |group| group.broadcasts);
        let ended = broadcasts.into_iter().map(Broadcasts::end).fold(Ok(()), Result::and);
        launch.map_or(Ok(()), |open| open.launch.end()).and(ended)
    })
}

unsafe extern "C" fn record(handle: *mut c_void, state: c_int, arguments: *const c_void) -> R {
    let own = handle.is_null() || std::ptr::eq(handle.cast(), &GROUP);
    if let (Some(second), false) = (Second::loaded(), own) {
        // SAFETY: NCCL's own arguments. NCCL records nothing of a kernel launch and the group's handle is another one, so
        // the event is the second profiler's.
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

/// The symbol that NCCL 2.28 and later looks up.
#[unsafe(no_mangle)]
pub static ncclProfiler_v5: ProfilerTable =
    ProfilerTable { name: NAME.as_ptr(), init: init::<false>, start, stop, record, finalize };

/// The symbol of v6, which NCCL takes in place of v5 where it knows both.
#[unsafe(no_mangle)]
pub static ncclProfiler_v6: ProfilerTable =
    ProfilerTable { name: NAME.as_ptr(), init: init::<true>, start, stop, record, finalize };
