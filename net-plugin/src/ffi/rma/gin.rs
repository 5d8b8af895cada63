//! The tables of the RMA interface under its earlier name, GIN, versions 11 and 12: NCCL 2.28 and 2.29 take them. They have no contexts of
//! the plugin's own, so their operations name the coll comm, and a coll comm has its contexts from the beginning.

use std::ffi::{c_char, c_int, c_void};

use super::super::tables::{NAME, OutPointer, R, at, call, hot, put};
use super::super::types::PropsV11;
use super::{
    Asked, CollComm, Connect, HasError, Init, Listen, One, Ptr, RegDmaBufGin, RegMrGin, Test, Two, begin_put,
    checked, close_coll, close_listen, dereg_mr, devices, finalize, init, listen, make, open_door,
    properties, properties_of, reg_mr_dma_buf_gin, reg_mr_gin, test,
};
use crate::error::{Code, Failure, Result};
use crate::plugin;
use crate::rma::Contexts;

/// NCCL 2.28 names the network's devices to the table of version 11, whatever that table says of devices. So the table has as many.
unsafe extern "C" fn devices_v11(ndev: *mut c_int) -> R {
    // SAFETY: NCCL gives a place that can be written, or NULL.
    call("devices", || unsafe { put(ndev, "ndev", plugin::network(|network| Ok(network.len() as c_int))?) })
}

unsafe extern "C" fn properties_v11(dev: c_int, to: *mut PropsV11) -> R {
    call("getProperties", || {
        let v9 = properties_of(dev)?;
        // SAFETY: NCCL gives a place that can be written, or NULL.
        unsafe { put(to, "props", PropsV11 { v9, max_multi_request_size: 1 }) }
    })
}

unsafe extern "C" fn properties_v12(dev: c_int, to: *mut PropsV11) -> R {
    call("getProperties", || {
        let v9 = properties(dev)?;
        // SAFETY: NCCL gives a place that can be written, or NULL.
        unsafe { put(to, "props", PropsV11 { v9, max_multi_request_size: 1 }) }
    })
}

unsafe extern "C" fn listen_v11(_ctx: *mut c_void, dev: c_int, handle: *mut c_void, to: OutPointer) -> R {
    // SAFETY: NCCL gives places that can be written, or NULL; a handle has 128 bytes.
    unsafe { open_door(dev, properties_of, handle, to) }
}

unsafe extern "C" fn connect_v12(
    _ctx: *mut c_void,
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    contexts: c_int,
    _depth: c_int,
    door: *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `make` requires.
    unsafe { make(handles, (ranks, rank), door, Some(contexts), to) }
}

unsafe extern "C" fn connect_v11(
    _ctx: *mut c_void,
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    door: *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `make` requires.
    unsafe { make(handles, (ranks, rank), door, Some(1), to) }
}

/// Answers createContext of the tables whose coll comm has its contexts from the beginning: with the coll comm itself. NCCL 2.28
/// and 2.29 do not ask; 2.30.3 and 2.30.4, which take these tables too, do.
///
/// # Safety
/// As NCCL promises: a coll comm of ours, and places that can be written.
unsafe fn own_contexts(coll: *mut c_void, contexts: c_int, to: OutPointer, device: OutPointer) -> R {
    call("createContext", || {
        // SAFETY: the caller's promise.
        unsafe {
            put(to, "ginCtx", std::ptr::null_mut())?;
            if !device.is_null() {
                // NCCL makes the handle for kernels itself.
                device.write(std::ptr::null_mut());
            }
            let own = whole(coll)?.count();
            if checked(contexts)? > own {
                let text = format!("{contexts} contexts of a coll comm that was made with {own}");
                return Err(Failure::new(Code::Usage, text));
            }
            put(to, "ginCtx", coll)
        }
    })
}

unsafe extern "C" fn create_context_v11(
    coll: *mut c_void,
    _signals: c_int,
    _counters: c_int,
    to: OutPointer,
    device: OutPointer,
) -> R {
    // SAFETY: our caller promises what `own_contexts` requires.
    unsafe { own_contexts(coll, 1, to, device) }
}

unsafe extern "C" fn create_context_v12(
    coll: *mut c_void,
    _signals: c_int,
    _counters: c_int,
    contexts: c_int,
    to: OutPointer,
    device: OutPointer,
) -> R {
    // SAFETY: our caller promises what `own_contexts` requires.
    unsafe { own_contexts(coll, contexts, to, device) }
}

/// The contexts go with their coll comm.
unsafe extern "C" fn destroy_context(coll: *mut c_void) -> R {
    // SAFETY: our caller promises NULL or a coll comm of ours.
    call("destroyContext", || unsafe { whole(coll) }.map(|_| ()))
}

/// The contexts of a coll comm whose table has no createContext.
#[inline]
unsafe fn whole<'a>(coll: *mut c_void) -> Result<&'a Contexts> {
    // SAFETY: our caller promises NULL or a coll comm of ours.
    let contexts = unsafe { at::<CollComm>(coll, "collComm")? }.contexts.as_ref();
    contexts.ok_or_else(|| Failure::new(Code::Usage, "a coll comm of another version of the interface"))
}

unsafe extern "C" fn iput_v12(
    coll: *mut c_void,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    context: c_int,
    request: OutPointer,
) -> R {
    let (from, to) = ((from_offset, from, size), (to_offset, to));
    // SAFETY: our caller promises what `begin_put` requires.
    unsafe { begin_put("iput", whole(coll), (context, rank), from, to, None, request) }
}

unsafe extern "C" fn iput_v11(
    coll: *mut c_void,
    from_offset: u64,
    from: *mut c_void,
    size: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    request: OutPointer,
) -> R {
    // SAFETY: our caller promises what `iput_v12` requires.
    unsafe { iput_v12(coll, from_offset, from, size, to_offset, to, rank, 0, request) }
}

unsafe extern "C" fn iput_signal_v12(
    coll: *mut c_void,
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
    context: c_int,
    request: OutPointer,
) -> R {
    let (from, to) = ((from_offset, from, size), (to_offset, to));
    let signal = Some(Asked { offset, memory, value, op });
    // SAFETY: our caller promises what `begin_put` requires.
    unsafe { begin_put("iputSignal", whole(coll), (context, rank), from, to, signal, request) }
}

unsafe extern "C" fn iput_signal_v11(
    coll: *mut c_void,
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
    // SAFETY: our caller promises what `iput_signal_v12` requires.
    unsafe {
        iput_signal_v12(
            coll,
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
            0,
            request,
        )
    }
}

unsafe extern "C" fn progress(coll: *mut c_void) -> R {
    // SAFETY: our caller promises NULL or a coll comm of ours.
    hot("ginProgress", || unsafe { whole(coll) }?.progress())
}

/// Answers that nothing has failed. NCCL 2.30.3 and 2.30.4, the only ones that call this function of these tables, give a
/// pointer to a structure of their own, which nothing may follow. Failures show in the tests of requests.
unsafe extern "C" fn query_last_error(_theirs: *mut c_void, has_error: *mut bool) -> R {
    hot("queryLastError", || {
        plugin::here()?;
        // SAFETY: NCCL gives a place that can be written, or NULL.
        unsafe { put(has_error, "hasError", false) }
    })
}

type Put11 = unsafe extern "C" fn(Ptr, u64, Ptr, usize, u64, Ptr, u32, OutPointer) -> R;
type Put12 = unsafe extern "C" fn(Ptr, u64, Ptr, usize, u64, Ptr, u32, c_int, OutPointer) -> R;
type PutSignal11 =
    unsafe extern "C" fn(Ptr, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, OutPointer) -> R;
type PutSignal12 =
    unsafe extern "C" fn(Ptr, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, c_int, OutPointer) -> R;

/// A table of version 11 or 12, whose operations name the coll comm.
macro_rules! gin {
    (
        $(#[doc = $doc:literal])+ $table:ident, $symbol:ident,
        device: $devices:expr, $get_properties:expr, $listen:expr,
        connect: $connect_type:ty = $connect:expr,
        context: $create:ty = $create_context:expr,
        operations: $put:ty = $iput:expr, $put_signal:ty = $iput_signal:expr,
    ) => {
        table! {
            $(#[doc = $doc])+
            $table, $symbol, 152, {
                init: Init = init,
                devices: unsafe extern "C" fn(*mut c_int) -> R = $devices,
                get_properties: unsafe extern "C" fn(c_int, *mut PropsV11) -> R = $get_properties,
                listen: Listen = $listen,
                connect: $connect_type = $connect,
                create_context: $create = $create_context,
                reg_mr: RegMrGin = reg_mr_gin,
                reg_mr_dma_buf: RegDmaBufGin = reg_mr_dma_buf_gin,
                dereg_mr: Two = dereg_mr,
                destroy_context: One = destroy_context,
                close_coll: One = close_coll,
                close_listen: One = close_listen,
                iput: $put = $iput,
                iput_signal: $put_signal = $iput_signal,
                test: Test = test,
                progress: One = progress,
                query_last_error: HasError = query_last_error,
                finalize: One = finalize,
            }
        }
    };
}

gin! {
    /// The table `ncclGin_v12_t`.
    GinV12, ncclGinPlugin_v12,
    device: devices, properties_v12, listen,
    connect: unsafe extern "C" fn(Ptr, *mut Ptr, c_int, c_int, c_int, c_int, Ptr, OutPointer) -> R = connect_v12,
    context: unsafe extern "C" fn(Ptr, c_int, c_int, c_int, OutPointer, OutPointer) -> R = create_context_v12,
    operations: Put12 = iput_v12, PutSignal12 = iput_signal_v12,
}

gin! {
    /// The table `ncclGin_v11_t`.
    GinV11, ncclGinPlugin_v11,
    device: devices_v11, properties_v11, listen_v11,
    connect: Connect = connect_v11,
    context: unsafe extern "C" fn(Ptr, c_int, c_int, OutPointer, OutPointer) -> R = create_context_v11,
    operations: Put11 = iput_v11, PutSignal11 = iput_signal_v11,
}
