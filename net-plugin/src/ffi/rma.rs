//! The tables of NCCL's RMA interface, newest first, and the shims between each version's calls and the one
//! implementation (`crate::rma`). NCCL 2.32 takes v16, 2.30 v14; 2.29 and 2.28 have the same interface under the name GIN
//! (`rma/gin.rs`).
//!
//! No panic leaves a call, and every out parameter is written on every path.

#![allow(non_upper_case_globals)] // The symbols' names are NCCL's.

mod gin;

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::tables::{NAME, OutPointer, R, at, back, call, hand_out, hot, null, props_v9, props_v12, put};
use super::types::{
    GIN_PROXY, GinConfig, MAX_RECVS, PTR_CUDA, PTR_DMABUF, PTR_HOST, PropsV9, PropsV12, RmaConfig,
    RmaProperties, SIGNAL_ADD, SIGNAL_INC, SIGNAL_NEVER_RESET,
};
use crate::error::{Code, Failure, Result};
use crate::handle;
use crate::log::{self, Logger};
use crate::plugin::{self, Context, Table};
use crate::rma::{Coll, Contexts, Door, Handle, Registered, Signal, Stretch};

/// What NCCL holds as a collComm.
struct CollComm {
    /// Of the tables without createContext: the contexts of all operations. Dropped before the coll comm.
    contexts: Option<Contexts>,
    coll: Coll,
}

// -------------------------------------------------------- process and devices

/// NCCL's contexts, by the number that NCCL holds in place of a pointer: communicators that share one may each give it back.
static OPEN: Mutex<Option<HashMap<usize, Context>>> = Mutex::new(None);
static NEXT: AtomicUsize = AtomicUsize::new(1);

fn open() -> std::sync::MutexGuard<'static, Option<HashMap<usize, Context>>> {
    OPEN.lock().unwrap_or_else(|e| e.into_inner())
}

/// Succeeds where the settings ask for the table. Otherwise NCCL looks for another plugin, and no warning is due.
unsafe extern "C" fn init(ctx: OutPointer, comm_id: u64, logger: Logger) -> R {
    log::set_logger(logger);
    let mut off = false;
    let opened = call("init", || {
        // SAFETY: NCCL gives a place that can be written, or NULL.
        unsafe { put(ctx, "ctx", std::ptr::null_mut())? };
        plugin::load()?;
        off = !plugin::offers_rma();
        if off {
            log::init("NCCL's RMA table is not offered; NCCL_GIN_TYPE=2 or PUSHGATE_NET_RMA=true offers it");
            return Ok(());
        }
        let context = plugin::open(None, comm_id, Table::Rma)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        open().get_or_insert_default().insert(number, context);
        // SAFETY: as above.
        unsafe { put(ctx, "ctx", number as *mut c_void) }
    });
    if off { Code::Usage as R } else { opened }
}

unsafe extern "C" fn finalize(ctx: *mut c_void) -> R {
    call("finalize", || {
        plugin::here()?;
        let context = open().as_mut().and_then(|all| all.remove(&(ctx as usize)));
        if let Some(context) = context {
            plugin::close(context);
        }
        Ok(())
    })
}

/// How many devices the table has: the RDMA devices, or one. Where there is no RDMA device, all of the network's devices are the same.
fn count() -> Result<c_int> {
    plugin::network(|network| Ok(if network.is_rdma() { network.len() as c_int } else { 1 }))
}

unsafe extern "C" fn devices(ndev: *mut c_int) -> R {
    // SAFETY: NCCL gives a place that can be written, or NULL.
    call("devices", || unsafe { put(ndev, "ndev", count()?) })
}

/// The properties of the network's device `dev`, as a device for operations of kernels.
fn properties_of(dev: c_int) -> Result<PropsV9> {
    let p = props_v9(dev)?;
    // GPU memory is taken by its address: copy engines read and write it. Buffers of a receive say here how many operations may be
    // under way.
    let (ptr_support, max_recvs) = (p.ptr_support & !PTR_DMABUF, MAX_RECVS as c_int);
    Ok(PropsV9 { net_device_type: GIN_PROXY, ptr_support, max_recvs, ..p })
}

/// The properties of a device of the table.
fn properties(dev: c_int) -> Result<PropsV9> {
    let count = count()?;
    if dev >= count {
        let text = format!("device {dev} of {count}: devices() says how many there are");
        return Err(Failure::new(Code::Argument, text));
    }
    properties_of(dev)
}

unsafe extern "C" fn properties_v12(dev: c_int, to: *mut PropsV12) -> R {
    // SAFETY: NCCL gives a place that can be written, or NULL.
    call("getProperties", || unsafe { put(to, "props", props_v12(properties(dev)?)) })
}

unsafe extern "C" fn rma_properties(_coll: *mut c_void, to: *mut RmaProperties) -> R {
    call("getRmaProperties", || {
        // All contexts share the one queue pair to a rank, which keeps the order of everything; but a signal of one rank tells
        // nothing of another rank's puts, and no public header says whether NCCL means these too.
        let properties = RmaProperties { flushes_all_puts_on_any_signal: false };
        // SAFETY: NCCL gives a place that can be written, or NULL.
        unsafe { put(to, "props", properties) }
    })
}

// ------------------------------------------------------------------ coll comms

/// Listens on a device, if `has` finds that there is one of this number.
///
/// # Safety
/// `handle` is NULL or has 128 bytes, `to` is NULL or can be written.
unsafe fn open_door(
    dev: c_int,
    has: impl FnOnce(c_int) -> Result<PropsV9>,
    handle: *mut c_void,
    to: OutPointer,
) -> R {
    call("listen", || {
        // SAFETY: the caller's promise.
        unsafe {
            put(to, "listenComm", std::ptr::null_mut())?;
            has(dev)?;
            let (door, bytes) = Door::new(plugin::running()?, dev as usize)?;
            put(handle.cast::<[u8; handle::BYTES]>(), "handle", bytes)?;
            put(to, "listenComm", hand_out(Some(Box::new(door))))
        }
    })
}

unsafe extern "C" fn listen(_ctx: *mut c_void, dev: c_int, handle: *mut c_void, to: OutPointer) -> R {
    // SAFETY: NCCL gives places that can be written, or NULL; a handle has 128 bytes.
    unsafe { open_door(dev, properties, handle, to) }
}

unsafe extern "C" fn close_listen(door: *mut c_void) -> R {
    call("closeListen", || {
        // SAFETY: a door of ours, given back once.
        drop(unsafe { back::<Door>(door, "listenComm")? });
        Ok(())
    })
}

/// Makes a coll comm; with `contexts` also its contexts, for tables whose operations name none.
///
/// # Safety
/// As NCCL promises: `handles` has `ranks` pointers to handles of 128 bytes, `door` is a listenComm of ours, `to` can be
/// written.
unsafe fn make(
    handles: *mut *mut c_void,
    (ranks, rank): (c_int, c_int),
    door: *mut c_void,
    contexts: Option<c_int>,
    to: OutPointer,
) -> R {
    call("connect", || {
        // SAFETY: the caller's promise.
        unsafe {
            put(to, "collComm", std::ptr::null_mut())?;
            let door = at::<Door>(door, "listenComm")?;
            let wrong = || Failure::new(Code::Argument, format!("rank {rank} of {ranks} ranks"));
            let (count, rank) =
                usize::try_from(ranks).ok().zip(u32::try_from(rank).ok()).ok_or_else(wrong)?;
            if handles.is_null() {
                return Err(null("handles"));
            }
            let copy = |i: usize| {
                let handle = (*handles.add(i)).cast::<[u8; handle::BYTES]>();
                if handle.is_null() { Err(null("a handle")) } else { Ok(handle.read()) }
            };
            let handles = (0..count).map(copy).collect::<Result<Box<[_]>>>()?;
            let coll = Coll::new(plugin::running_with_attempts()?, door, handles, rank)?;
            let contexts = contexts.map(|n| coll.contexts(checked(n)?, -1)).transpose()?;
            put(to, "collComm", hand_out(Some(Box::new(CollComm { contexts, coll }))))
        }
    })
}

/// The number of contexts that NCCL asks for.
fn checked(contexts: c_int) -> Result<u32> {
    /// More than any use; NCCL asks for about as many as a kernel has blocks.
    const MOST: u32 = 4096;
    u32::try_from(contexts)
        .ok()
        .filter(|n| (1..=MOST).contains(n))
        .ok_or_else(|| Failure::new(Code::Argument, format!("{contexts} contexts, expected 1 to {MOST}")))
}

unsafe extern "C" fn connect(
    _ctx: *mut c_void,
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    door: *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `make` requires.
    unsafe { make(handles, (ranks, rank), door, None, to) }
}

unsafe extern "C" fn close_coll(coll: *mut c_void) -> R {
    call("closeColl", || {
        // SAFETY: a coll comm of ours, given back once.
        drop(unsafe { back::<CollComm>(coll, "collComm")? });
        Ok(())
    })
}

/// Makes contexts.
///
/// # Safety
/// As NCCL promises: a coll comm of ours, and a place that can be written.
unsafe fn make_contexts(coll: *mut c_void, contexts: c_int, class: c_int, to: OutPointer) -> R {
    call("createContext", || {
        // SAFETY: the caller's promise.
        unsafe {
            put(to, "rmaCtx", std::ptr::null_mut())?;
            let contexts = at::<CollComm>(coll, "collComm")?.coll.contexts(checked(contexts)?, class)?;
            put(to, "rmaCtx", hand_out(Some(Box::new(contexts))))
        }
    })
}

unsafe extern "C" fn create_context(coll: *mut c_void, config: *mut RmaConfig, to: OutPointer) -> R {
    // SAFETY: NCCL gives a valid configuration, or NULL.
    match unsafe { config.as_ref() } {
        // SAFETY: our caller promises what `make_contexts` requires.
        Some(config) => unsafe { make_contexts(coll, config.contexts, config.traffic_class, to) },
        None => call("createContext", || Err(null("config"))),
    }
}

unsafe extern "C" fn create_context_v13(
    coll: *mut c_void,
    config: *mut GinConfig,
    to: OutPointer,
    device: OutPointer,
) -> R {
    if !device.is_null() {
        // SAFETY: NCCL gives a place that can be written. NCCL makes the handle for kernels itself.
        unsafe { device.write(std::ptr::null_mut()) };
    }
    // SAFETY: NCCL gives a valid configuration, or NULL.
    match unsafe { config.as_ref() } {
        // SAFETY: our caller promises what `make_contexts` requires.
        Some(config) => unsafe { make_contexts(coll, config.contexts, config.traffic_class, to) },
        None => call("createContext", || Err(null("config"))),
    }
}

unsafe extern "C" fn destroy_context(contexts: *mut c_void) -> R {
    call("destroyContext", || {
        // SAFETY: contexts of ours, given back once.
        drop(unsafe { back::<Contexts>(contexts, "rmaCtx")? });
        Ok(())
    })
}

// --------------------------------------------------------------------- memory

unsafe extern "C" fn reg_mr(
    coll: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    to: OutPointer,
) -> R {
    call("regMrSym", || {
        // SAFETY: NCCL gives a place that can be written, or NULL, and a coll comm of ours.
        unsafe {
            put(to, "mhandle", std::ptr::null_mut())?;
            if kind != PTR_HOST && kind != PTR_CUDA {
                let text = format!("memory of type {kind}, expected host ({PTR_HOST}) or CUDA ({PTR_CUDA})");
                return Err(Failure::new(Code::Usage, text));
            }
            let coll = &at::<CollComm>(coll, "collComm")?.coll;
            let (cuda, kept) = (kind == PTR_CUDA, flags & SIGNAL_NEVER_RESET != 0);
            let registered = coll.register(data as usize, size, cuda, kept)?;
            put(to, "mhandle", hand_out(Some(Box::new(registered))))
        }
    })
}

unsafe extern "C" fn reg_mr_dma_buf(
    coll: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `reg_mr` requires. The memory's address is all that a copy engine needs.
    unsafe { reg_mr(coll, data, size, kind, flags, to) }
}

unsafe extern "C" fn reg_mr_gin(
    coll: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    to: OutPointer,
    gin: OutPointer,
) -> R {
    // SAFETY: our caller promises what `reg_mr` requires.
    let result = unsafe { reg_mr(coll, data, size, kind, flags, to) };
    if !gin.is_null() && !to.is_null() {
        // SAFETY: NCCL gives places that can be written; `reg_mr` has written `to`. What kernels name in a descriptor comes
        // back as the handle of the memory.
        unsafe { gin.write(to.read()) };
    }
    result
}

unsafe extern "C" fn reg_mr_dma_buf_gin(
    coll: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    to: OutPointer,
    gin: OutPointer,
) -> R {
    // SAFETY: our caller promises what `reg_mr_gin` requires.
    unsafe { reg_mr_gin(coll, data, size, kind, flags, to, gin) }
}

unsafe extern "C" fn dereg_mr(coll: *mut c_void, memory: *mut c_void) -> R {
    call("deregMrSym", || {
        if memory.is_null() {
            return Ok(());
        }
        // SAFETY: a coll comm of ours, and a registration of ours that is given back once.
        unsafe { at::<CollComm>(coll, "collComm")?.coll.deregister(&*back::<Registered>(memory, "mhandle")?) }
    })
}

// ----------------------------------------------------------------- operations

/// Borrows the bytes at an offset of a registration.
///
/// # Safety
/// `memory` is NULL or a registration of ours.
unsafe fn stretch<'a>(memory: *mut c_void, offset: u64) -> Result<Option<Stretch<'a>>> {
    plugin::here()?;
    // SAFETY: the caller's promise.
    let memory = unsafe { memory.cast::<Registered>().as_ref() };
    Ok(memory.map(|memory| Stretch { memory, offset }))
}

/// A signal that NCCL asks for.
struct Asked {
    offset: u64,
    memory: *mut c_void,
    value: u64,
    op: u32,
}

/// Begins a put.
///
/// # Safety
/// As NCCL promises: contexts and registrations of ours; the payload stays until the request is done.
#[inline]
unsafe fn begin_put(
    what: &str,
    contexts: Result<&Contexts>,
    (context, rank): (c_int, u32),
    (from_offset, from, size): (u64, *mut c_void, usize),
    (to_offset, to): (u64, *mut c_void),
    signal: Option<Asked>,
    request: OutPointer,
) -> R {
    hot(what, || {
        // SAFETY: the caller's promise; NCCL gives a place that can be written, or NULL.
        unsafe {
            put(request, "request", std::ptr::null_mut())?;
            let contexts = contexts?;
            let signal = match signal {
                None => None,
                Some(Asked { offset, memory, value, op }) => {
                    let at = stretch(memory, offset)?.ok_or_else(|| null("signalMhandle"))?;
                    let value = match op {
                        SIGNAL_INC => 1,
                        SIGNAL_ADD => value,
                        _ => {
                            let text = format!("signal operation {op}, expected INC (1) or ADD (2)");
                            return Err(Failure::new(Code::Argument, text));
                        }
                    };
                    Some(Signal { at, value })
                }
            };
            let payload = (stretch(from, from_offset)?, stretch(to, to_offset)?, size as u64);
            let Handle(handle) = contexts.put((context as u32, rank), payload, signal)?;
            put(request, "request", handle as usize as *mut c_void)
        }
    })
}

#[inline]
unsafe fn contexts<'a>(contexts: *mut c_void) -> Result<&'a Contexts> {
    // SAFETY: our caller promises NULL or contexts of ours.
    unsafe { at::<Contexts>(contexts, "rmaCtx") }
}

unsafe extern "C" fn iput(
    ctx: *mut c_void,
    context: c_int,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    request: OutPointer,
) -> R {
    let (from, to) = ((from_offset, from, size), (to_offset, to));
    // SAFETY: our caller promises what `begin_put` requires.
    unsafe { begin_put("iput", contexts(ctx), (context, rank), from, to, None, request) }
}

unsafe extern "C" fn iput_v15(
    ctx: *mut c_void,
    context: c_int,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    _flags: u32,
    request: OutPointer,
) -> R {
    // SAFETY: our caller promises what `iput` requires.
    unsafe { iput(ctx, context, from_offset, from, size, to_offset, to, rank, request) }
}

unsafe extern "C" fn iput_signal_v13(
    ctx: *mut c_void,
    context: c_int,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    offset: u64,
    memory: *mut c_void,
    value: u64,
    op: u32,
    request: OutPointer,
) -> R {
    let (from, to) = ((from_offset, from, size), (to_offset, to));
    let signal = Some(Asked { offset, memory, value, op });
    // SAFETY: our caller promises what `begin_put` requires.
    unsafe { begin_put("iputSignal", contexts(ctx), (context, rank), from, to, signal, request) }
}

unsafe extern "C" fn iput_signal(
    ctx: *mut c_void,
    context: c_int,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    offset: u64,
    memory: *mut c_void,
    value: u64,
    op: u32,
    _strong: bool,
    request: OutPointer,
) -> R {
    // All signals are strong: seen after all earlier puts to their rank.
    // SAFETY: our caller promises what `iput_signal_v13` requires.
    unsafe {
        iput_signal_v13(
            ctx,
            context,
            from_offset,
            from,
            size,
            to_offset,
            to,
            rank,
            offset,
            memory,
            value,
            op,
            request,
        )
    }
}

unsafe extern "C" fn iput_signal_v15(
    ctx: *mut c_void,
    context: c_int,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    offset: u64,
    memory: *mut c_void,
    value: u64,
    op: u32,
    _strong: bool,
    _flags: u32,
    request: OutPointer,
) -> R {
    // SAFETY: our caller promises what `iput_signal_v13` requires.
    unsafe {
        iput_signal_v13(
            ctx,
            context,
            from_offset,
            from,
            size,
            to_offset,
            to,
            rank,
            offset,
            memory,
            value,
            op,
            request,
        )
    }
}

unsafe extern "C" fn iget(
    ctx: *mut c_void,
    context: c_int,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    request: OutPointer,
) -> R {
    hot("iget", || {
        // SAFETY: NCCL gives a place that can be written, or NULL; contexts and registrations of ours.
        unsafe {
            put(request, "request", std::ptr::null_mut())?;
            let from = stretch(from, from_offset)?.ok_or_else(|| null("remoteMhandle"))?;
            let to = stretch(to, to_offset)?.ok_or_else(|| null("localMhandle"))?;
            let Handle(handle) = contexts(ctx)?.get((context as u32, rank), (from, to, size as u64))?;
            put(request, "request", handle as usize as *mut c_void)
        }
    })
}

unsafe extern "C" fn iget_v15(
    ctx: *mut c_void,
    context: c_int,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    _flags: u32,
    request: OutPointer,
) -> R {
    // SAFETY: our caller promises what `iget` requires.
    unsafe { iget(ctx, context, from_offset, from, size, to_offset, to, rank, request) }
}

unsafe extern "C" fn iflush(
    ctx: *mut c_void,
    context: c_int,
    _memory: *mut c_void,
    rank: u32,
    request: OutPointer,
) -> R {
    hot("iflush", || {
        // SAFETY: NCCL gives a place that can be written, or NULL, and contexts of ours.
        unsafe {
            put(request, "request", std::ptr::null_mut())?;
            let Handle(handle) = contexts(ctx)?.flush(context as u32, rank)?;
            put(request, "request", handle as usize as *mut c_void)
        }
    })
}

unsafe extern "C" fn test(coll: *mut c_void, request: *mut c_void, done: *mut c_int) -> R {
    hot("test", || {
        // SAFETY: NCCL gives a place that can be written, or NULL, and a coll comm of ours. A request is a number.
        unsafe {
            put(done, "done", 0)?;
            let ended = at::<CollComm>(coll, "collComm")?.coll.test(Handle(request as usize as u64))?;
            put(done, "done", ended as c_int)
        }
    })
}

unsafe extern "C" fn progress(ctx: *mut c_void) -> R {
    // SAFETY: our caller promises NULL or contexts of ours.
    hot("rmaProgress", || unsafe { contexts(ctx) }?.progress())
}

unsafe extern "C" fn query_last_error(ctx: *mut c_void, has_error: *mut bool) -> R {
    // SAFETY: NCCL gives a place that can be written, or NULL, and contexts of ours.
    hot("queryLastError", || unsafe { put(has_error, "hasError", contexts(ctx)?.has_failed()) })
}

// --------------------------------------------------------------------- tables

type Ptr = *mut c_void;
type Init = unsafe extern "C" fn(OutPointer, u64, Logger) -> R;
type One = unsafe extern "C" fn(Ptr) -> R;
type Two = unsafe extern "C" fn(Ptr, Ptr) -> R;
type Listen = unsafe extern "C" fn(Ptr, c_int, Ptr, OutPointer) -> R;
type Connect = unsafe extern "C" fn(Ptr, *mut Ptr, c_int, c_int, Ptr, OutPointer) -> R;
type RegMr = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, OutPointer) -> R;
type RegDmaBuf = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, c_int, u64, OutPointer) -> R;
type RegMrGin = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, OutPointer, OutPointer) -> R;
type RegDmaBufGin =
    unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, c_int, u64, OutPointer, OutPointer) -> R;
type CreateContext = unsafe extern "C" fn(Ptr, *mut RmaConfig, OutPointer) -> R;
type Put = unsafe extern "C" fn(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, OutPointer) -> R;
type PutFlags = unsafe extern "C" fn(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u32, OutPointer) -> R;
type PutSignal13 =
    unsafe extern "C" fn(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, OutPointer) -> R;
type PutSignal14 = unsafe extern "C" fn(
    Ptr,
    c_int,
    u64,
    Ptr,
    usize,
    u64,
    Ptr,
    u32,
    u64,
    Ptr,
    u64,
    u32,
    bool,
    OutPointer,
) -> R;
type PutSignal15 = unsafe extern "C" fn(
    Ptr,
    c_int,
    u64,
    Ptr,
    usize,
    u64,
    Ptr,
    u32,
    u64,
    Ptr,
    u64,
    u32,
    bool,
    u32,
    OutPointer,
) -> R;
type Flush = unsafe extern "C" fn(Ptr, c_int, Ptr, u32, OutPointer) -> R;
type Test = unsafe extern "C" fn(Ptr, Ptr, *mut c_int) -> R;
type HasError = unsafe extern "C" fn(Ptr, *mut bool) -> R;

/// A table of version 13 or later.
macro_rules! rma {
    (
        $(#[doc = $doc:literal])+ $table:ident, $symbol:ident, $bytes:literal, { $($more:ident: $type:ty = $value:expr,)* },
        context: $create:ty = $create_context:expr,
        memory: $reg:ty = $reg_mr:expr, $reg_dma_buf_type:ty = $reg_mr_dma_buf:expr,
        operations: $put:ty = $iput:expr, $put_signal:ty = $iput_signal:expr, $iget:expr,
    ) => {
        table! {
            $(#[doc = $doc])+
            $table, $symbol, $bytes, {
                init: Init = init,
                devices: unsafe extern "C" fn(*mut c_int) -> R = devices,
                $($more: $type = $value,)*
                get_properties: unsafe extern "C" fn(c_int, *mut PropsV12) -> R = properties_v12,
                listen: Listen = listen,
                connect: Connect = connect,
                create_context: $create = $create_context,
                reg_mr: $reg = $reg_mr,
                reg_mr_dma_buf: $reg_dma_buf_type = $reg_mr_dma_buf,
                dereg_mr: Two = dereg_mr,
                destroy_context: One = destroy_context,
                close_coll: One = close_coll,
                close_listen: One = close_listen,
                iput: $put = $iput,
                iput_signal: $put_signal = $iput_signal,
                iget: $put = $iget,
                iflush: Flush = iflush,
                test: Test = test,
                progress: One = progress,
                query_last_error: HasError = query_last_error,
                finalize: One = finalize,
            }
        }
    };
}

rma! {
    /// The table `ncclRma_v16_t`.
    RmaV16, ncclRmaPlugin_v16, 176, {
        get_rma_properties: unsafe extern "C" fn(Ptr, *mut RmaProperties) -> R = rma_properties,
    },
    context: CreateContext = create_context,
    memory: RegMr = reg_mr, RegDmaBuf = reg_mr_dma_buf,
    operations: PutFlags = iput_v15, PutSignal15 = iput_signal_v15, iget_v15,
}

rma! {
    /// The table `ncclRma_v15_t`.
    RmaV15, ncclRmaPlugin_v15, 168, {},
    context: CreateContext = create_context,
    memory: RegMr = reg_mr, RegDmaBuf = reg_mr_dma_buf,
    operations: PutFlags = iput_v15, PutSignal15 = iput_signal_v15, iget_v15,
}

rma! {
    /// The table `ncclRma_v14_t`.
    RmaV14, ncclRmaPlugin_v14, 168, {},
    context: CreateContext = create_context,
    memory: RegMr = reg_mr, RegDmaBuf = reg_mr_dma_buf,
    operations: Put = iput, PutSignal14 = iput_signal, iget,
}

rma! {
    /// The table `ncclRma_v13_t`, which is `ncclGin_v13_t`.
    RmaV13, ncclRmaPlugin_v13, 168, {},
    context: unsafe extern "C" fn(Ptr, *mut GinConfig, OutPointer, OutPointer) -> R = create_context_v13,
    memory: RegMrGin = reg_mr_gin, RegDmaBufGin = reg_mr_dma_buf_gin,
    operations: Put = iput, PutSignal13 = iput_signal_v13, iget,
}
