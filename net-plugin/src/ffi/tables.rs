//! The tables that NCCL looks up, newest first, and the shims between each version's calls and the
//! one implementation. NCCL 2.28 to 2.29 take v11, 2.30 and later v12; v8 to v10 are for older
//! releases.
//!
//! No panic leaves a call, and every out parameter is written on every path.

#![allow(non_upper_case_globals)] // The symbols' names are NCCL's.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::types::{
    CommConfig, DeviceHandle, NetAttr, PTR_CUDA, PTR_HOST, PropsV8, PropsV9, PropsV11, PropsV12, VDevice4,
    VDevice8,
};
use crate::comm::{Comm, Request};
use crate::error::{Code, Failure, Result};
use crate::handle;
use crate::log::{self, Logger};
use crate::plugin::{self, Context, Listening, Table};
use crate::props;
use crate::registration::{Held, Kind, Wanted};

pub(super) type R = c_int;
/// `ncclProfilerCallback_t`, which is not used.
type ProfilerCallback = *const c_void;
pub(super) type OutPointer = *mut *mut c_void;
type OutDevice = *mut *mut DeviceHandle;

pub(super) const NAME: *const c_char = c"pushgate".as_ptr();

// ------------------------------------------------------------------- boundary

/// Runs one call: a failure goes to NCCL's log, and a panic counts as a failure.
#[inline]
pub(super) fn hot(what: &str, f: impl FnOnce() -> Result<()>) -> R {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(())) => 0,
        Ok(Err(e)) => failed(what, &e),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            failed(
                what,
                &Failure::new(Code::Internal, format!("{said}: a fault of the plugin, please report it")),
            )
        }
    }
}

#[cold]
fn failed(what: &str, e: &Failure) -> R {
    // NCCL's log has a lock, which a child of `fork` may have inherited locked.
    if plugin::here().is_err() {
        return e.code as c_int;
    }
    log::warn(&format!("{what}: {e}"));
    e.code as c_int
}

/// Runs one of the rare calls, and also sends to NCCL's log what the libraries below log in it.
pub(super) fn call(what: &str, f: impl FnOnce() -> Result<()>) -> R {
    hot(what, || log::scoped(f))
}

pub(super) fn null(what: &str) -> Failure {
    Failure::new(Code::Argument, format!("{what} is NULL"))
}

/// Writes a result to a place of NCCL's.
///
/// # Safety
/// `to` is NULL or can be written.
pub(super) unsafe fn put<T>(to: *mut T, what: &str, value: T) -> Result<()> {
    if to.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller promises that `to` can be written if it is not NULL.
    unsafe { to.write(value) };
    Ok(())
}

/// Borrows the object at a pointer that this plugin handed out.
///
/// # Safety
/// `p` is NULL, or came from this plugin as a pointer to a `T` and was not given back.
pub(super) unsafe fn at<'a, T>(p: *mut c_void, what: &str) -> Result<&'a T> {
    plugin::here()?;
    // SAFETY: the caller promises that `p` is NULL or such a pointer.
    unsafe { p.cast::<T>().as_ref() }.ok_or_else(|| null(what))
}

/// Takes back an object that this plugin handed out.
///
/// # Safety
/// The requirements of [`at`] hold, and nothing uses the object any more.
pub(super) unsafe fn back<T>(p: *mut c_void, what: &str) -> Result<Box<T>> {
    if p.is_null() {
        return Err(null(what));
    }
    plugin::here()?;
    // SAFETY: the caller's promise; every object handed out was a box.
    Ok(unsafe { Box::from_raw(p.cast::<T>()) })
}

pub(super) fn hand_out<T>(value: Option<Box<T>>) -> *mut c_void {
    value.map_or(std::ptr::null_mut(), |v| Box::into_raw(v).cast())
}

// -------------------------------------------------------- process and devices

unsafe extern "C" fn init_v11(
    ctx: OutPointer,
    comm_id: u64,
    config: *mut CommConfig,
    logger: Logger,
    _profiler: ProfilerCallback,
) -> R {
    log::set_logger(logger);
    call("init", || {
        // SAFETY: NCCL gives places that can be written, or NULL.
        unsafe {
            put(ctx, "ctx", std::ptr::null_mut())?;
            let traffic_class = traffic_class(config);
            let context = plugin::open(traffic_class, comm_id, Table::Net)?;
            put(ctx, "ctx", hand_out(Some(Box::new(context))))
        }
    })
}

unsafe extern "C" fn init_v10(logger: Logger, _profiler: ProfilerCallback) -> R {
    log::set_logger(logger);
    call("init", plugin::load)
}

unsafe extern "C" fn init_v9(logger: Logger) -> R {
    log::set_logger(logger);
    call("init", plugin::load)
}

unsafe extern "C" fn finalize(ctx: *mut c_void) -> R {
    call("finalize", || {
        // After an init that failed, NCCL calls finalize with NULL.
        if !ctx.is_null() {
            // SAFETY: a context that `init_v11` handed out, given back once.
            plugin::close(*unsafe { back::<Context>(ctx, "ctx")? });
        }
        Ok(())
    })
}

/// Reads the traffic class that a communicator asks for.
///
/// # Safety
/// `config` is NULL or points to a `CommConfig`.
unsafe fn traffic_class(config: *const CommConfig) -> Option<u8> {
    // SAFETY: the caller promises that `config` is NULL or valid.
    let class = unsafe { config.as_ref() }?.traffic_class;
    u8::try_from(class).ok()
}

unsafe extern "C" fn devices(ndev: *mut c_int) -> R {
    // SAFETY: NCCL gives a place that can be written, or NULL.
    call("devices", || unsafe { put(ndev, "ndev", plugin::network(|network| Ok(network.len() as c_int))?) })
}

unsafe extern "C" fn set_net_attr(_ctx: *mut c_void, _attr: *mut NetAttr) -> R {
    0
}

pub(super) fn props_v9(dev: c_int) -> Result<PropsV9> {
    let p = plugin::properties(dev)?;
    Ok(PropsV9 {
        name: p.name.as_ptr(),
        pci_path: p.pci_path(),
        guid: p.guid,
        ptr_support: p.ptr_support,
        reg_is_global: 0,
        force_flush: 0,
        speed: p.speed,
        port: p.port,
        latency: p.latency,
        max_comms: props::MAX_COMMS,
        max_recvs: p.max_recvs,
        net_device_type: 0,
        net_device_version: 0,
        v_props: VDevice4 { ndevs: 1, devs: [dev, 0, 0, 0] },
        max_p2p_bytes: p.max_bytes,
        max_coll_bytes: p.max_bytes,
    })
}

unsafe extern "C" fn properties_v8(dev: c_int, to: *mut PropsV8) -> R {
    call("getProperties", || {
        let p = props_v9(dev)?;
        let p = PropsV8 {
            name: p.name,
            pci_path: p.pci_path,
            guid: p.guid,
            ptr_support: p.ptr_support,
            reg_is_global: p.reg_is_global,
            speed: p.speed,
            port: p.port,
            latency: p.latency,
            max_comms: p.max_comms,
            max_recvs: p.max_recvs,
            net_device_type: p.net_device_type,
            net_device_version: p.net_device_version,
        };
        // SAFETY: NCCL gives a place that can be written, or NULL.
        unsafe { put(to, "props", p) }
    })
}

unsafe extern "C" fn properties_v9(dev: c_int, to: *mut PropsV9) -> R {
    // SAFETY: NCCL gives a place that can be written, or NULL.
    call("getProperties", || unsafe { put(to, "props", props_v9(dev)?) })
}

unsafe extern "C" fn properties_v11(dev: c_int, to: *mut PropsV11) -> R {
    call("getProperties", || {
        let v9 = props_v9(dev)?;
        // SAFETY: NCCL gives a place that can be written, or NULL.
        unsafe { put(to, "props", PropsV11 { v9, max_multi_request_size: 1 }) }
    })
}

unsafe extern "C" fn properties_v12(dev: c_int, to: *mut PropsV12) -> R {
    call("getProperties", || {
        // SAFETY: NCCL gives a place that can be written, or NULL.
        unsafe { put(to, "props", props_v12(props_v9(dev)?)) }
    })
}

/// The properties in the form of v12.
pub(super) fn props_v12(p: PropsV9) -> PropsV12 {
    let mut devs = [0; 8];
    devs[..4].copy_from_slice(&p.v_props.devs);
    PropsV12 {
        name: p.name,
        pci_path: p.pci_path,
        guid: p.guid,
        ptr_support: p.ptr_support,
        reg_is_global: p.reg_is_global,
        force_flush: p.force_flush,
        speed: p.speed,
        port: p.port,
        latency: p.latency,
        max_comms: p.max_comms,
        max_recvs: p.max_recvs,
        net_device_type: p.net_device_type,
        net_device_version: p.net_device_version,
        v_props: VDevice8 { ndevs: p.v_props.ndevs, devs },
        max_p2p_bytes: p.max_p2p_bytes,
        max_coll_bytes: p.max_coll_bytes,
        max_multi_request_size: 1,
        rail_id: -1,
        plane_id: -1,
    }
}

// ---------------------------------------------------------------- connections

unsafe fn listen(class: Option<u8>, dev: c_int, handle: *mut c_void, to: OutPointer) -> R {
    call("listen", || {
        // SAFETY: NCCL gives places that can be written, or NULL; a handle has 128 bytes.
        unsafe {
            put(to, "listenComm", std::ptr::null_mut())?;
            let handle = handle.cast::<[u8; handle::BYTES]>();
            let (listener, bytes) = Listening::new(dev, class)?;
            put(handle, "handle", bytes)?;
            put(to, "listenComm", hand_out(Some(Box::new(listener))))
        }
    })
}

unsafe fn connect(class: Option<u8>, dev: c_int, handle: *mut c_void, to: OutPointer) -> R {
    call("connect", || {
        // SAFETY: NCCL gives places that can be written, or NULL; a handle has 128 bytes, which
        // nothing else uses during the call.
        unsafe {
            put(to, "sendComm", std::ptr::null_mut())?;
            let handle = handle.cast::<[u8; handle::BYTES]>().as_mut().ok_or_else(|| null("handle"))?;
            let comm = plugin::connect(dev, handle, class)?;
            put(to, "sendComm", hand_out(comm))
        }
    })
}

/// Reads the traffic class of a context.
///
/// # Safety
/// `ctx` is NULL or a context of this plugin.
unsafe fn class_of(ctx: *mut c_void) -> Option<u8> {
    // SAFETY: the caller promises that `ctx` is NULL or a context.
    unsafe { ctx.cast::<Context>().as_ref() }.and_then(|c| c.traffic_class)
}

unsafe extern "C" fn listen_v11(ctx: *mut c_void, dev: c_int, handle: *mut c_void, to: OutPointer) -> R {
    // SAFETY: our caller promises what `listen` requires.
    unsafe { listen(class_of(ctx), dev, handle, to) }
}

unsafe extern "C" fn listen_v10(dev: c_int, handle: *mut c_void, to: OutPointer) -> R {
    // SAFETY: our caller promises what `listen` requires.
    unsafe { listen(None, dev, handle, to) }
}

unsafe extern "C" fn connect_v11(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    to: OutPointer,
    _device: OutDevice,
) -> R {
    // SAFETY: our caller promises what `connect` requires.
    unsafe { connect(class_of(ctx), dev, handle, to) }
}

unsafe extern "C" fn connect_v10(
    dev: c_int,
    config: *mut CommConfig,
    handle: *mut c_void,
    to: OutPointer,
    _device: OutDevice,
) -> R {
    // SAFETY: our caller promises what `connect` and `traffic_class` require.
    unsafe { connect(traffic_class(config), dev, handle, to) }
}

unsafe extern "C" fn connect_v9(dev: c_int, handle: *mut c_void, to: OutPointer, _device: OutDevice) -> R {
    // SAFETY: our caller promises what `connect` requires.
    unsafe { connect(None, dev, handle, to) }
}

unsafe extern "C" fn accept(listener: *mut c_void, to: OutPointer, _device: OutDevice) -> R {
    call("accept", || {
        // SAFETY: NCCL gives places that can be written, or NULL, and a listener of ours.
        unsafe {
            put(to, "recvComm", std::ptr::null_mut())?;
            let comm = at::<Listening>(listener, "listenComm")?.accept()?;
            put(to, "recvComm", hand_out(comm))
        }
    })
}

unsafe extern "C" fn close_comm(comm: *mut c_void) -> R {
    call("close", || {
        // SAFETY: a connection of ours, given back once.
        unsafe { back::<Comm>(comm, "comm")? }.close();
        Ok(())
    })
}

unsafe extern "C" fn close_listen(listener: *mut c_void) -> R {
    call("closeListen", || {
        // SAFETY: a listener of ours, given back once.
        drop(unsafe { back::<Listening>(listener, "listenComm")? });
        Ok(())
    })
}

// --------------------------------------------------------------------- memory

unsafe extern "C" fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    to: OutPointer,
) -> R {
    call("regMr", || {
        // SAFETY: NCCL gives a place that can be written, or NULL, and a connection of ours. The
        // memory is NCCL's, which keeps it until deregMr.
        unsafe {
            put(to, "mhandle", std::ptr::null_mut())?;
            if kind != PTR_HOST && kind != PTR_CUDA {
                let text = format!("memory of type {kind}, expected host ({PTR_HOST}) or CUDA ({PTR_CUDA})");
                return Err(Failure::new(Code::Usage, text));
            }
            let mr = at::<Comm>(comm, "comm")?.register(
                data as usize,
                size,
                if kind == PTR_CUDA { Kind::Cuda(None) } else { Kind::Host },
            )?;
            put(to, "mhandle", hand_out(Some(Box::new(mr))))
        }
    })
}

unsafe extern "C" fn reg_mr_dma_buf(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    to: OutPointer,
) -> R {
    call("regMrDmaBuf", || {
        // SAFETY: NCCL gives a place that can be written, or NULL, and a connection of ours. The
        // memory is NCCL's, which keeps it until deregMr; its descriptor is open until this call
        // returns.
        unsafe {
            put(to, "mhandle", std::ptr::null_mut())?;
            if kind != PTR_CUDA || fd < 0 {
                let text = format!(
                    "a dma-buf (descriptor {fd}) of memory of type {kind}, expected CUDA ({PTR_CUDA})"
                );
                return Err(Failure::new(Code::Usage, text));
            }
            let kind = Kind::Cuda(Some((BorrowedFd::borrow_raw(fd), offset)));
            let mr = at::<Comm>(comm, "comm")?.register(data as usize, size, kind)?;
            put(to, "mhandle", hand_out(Some(Box::new(mr))))
        }
    })
}

unsafe extern "C" fn dereg_mr(comm: *mut c_void, mr: *mut c_void) -> R {
    call("deregMr", || {
        if mr.is_null() {
            return Ok(());
        }
        // SAFETY: a connection of ours, and a registration of ours that is given back once.
        unsafe { at::<Comm>(comm, "comm")?.deregister(*back::<Held>(mr, "mhandle")?) }
    })
}

// ------------------------------------------------------------------- messages

/// Sends a message.
///
/// # Safety
/// As NCCL promises: a connection and a registration of ours, and `size` bytes at `data` that stay
/// until the request is done.
#[inline]
unsafe fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mr: *mut c_void,
    to: OutPointer,
) -> R {
    hot("isend", || {
        // SAFETY: the caller's promise.
        unsafe {
            put(to, "request", std::ptr::null_mut())?;
            let mr = mr.cast::<Held>().as_ref().map(|held| &held.mr);
            let request = at::<Comm>(comm, "sendComm")?.send(data.cast(), size, tag as u32, mr)?;
            put(
                to,
                "request",
                request.map_or(std::ptr::null_mut(), |r| std::ptr::from_ref(r).cast_mut().cast()),
            )
        }
    })
}

/// Posts a receive of `n` buffers.
///
/// # Safety
/// As NCCL promises: arrays of `n`, each buffer writable until the request is done.
#[inline]
unsafe fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    size: impl Fn(usize) -> usize,
    tags: *mut c_int,
    mrs: *mut *mut c_void,
    to: OutPointer,
) -> R {
    hot("irecv", || {
        // SAFETY: the caller's promise. `*request` may hold NCCL_NET_OPTIONAL_RECV_COMPLETION or an
        // old pointer; it is written on every path.
        unsafe {
            put(to, "request", std::ptr::null_mut())?;
            let max = super::types::MAX_RECVS;
            let count = usize::try_from(n).ok().filter(|n| (1..=max).contains(n)).ok_or_else(|| {
                Failure::new(Code::Argument, format!("a receive of {n} buffers, expected 1 to {max}"))
            })?;
            if data.is_null() || tags.is_null() || mrs.is_null() {
                return Err(null("an array of irecv"));
            }
            let mut wanted = [Wanted { data: 0, size: 0, tag: 0, mr: None }; super::types::MAX_RECVS];
            for (i, w) in wanted[..count].iter_mut().enumerate() {
                *w = Wanted {
                    data: *data.add(i) as usize,
                    size: size(i),
                    tag: *tags.add(i) as u32,
                    mr: (*mrs.add(i)).cast::<Held>().as_ref().map(|held| &held.mr),
                };
            }
            let request = at::<Comm>(comm, "recvComm")?.receive(&wanted[..count])?;
            put(
                to,
                "request",
                request.map_or(std::ptr::null_mut(), |r| std::ptr::from_ref(r).cast_mut().cast()),
            )
        }
    })
}

unsafe extern "C" fn isend_v10(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mr: *mut c_void,
    _phandle: *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `isend` requires.
    unsafe { isend(comm, data, size, tag, mr, to) }
}

unsafe extern "C" fn isend_v9(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mr: *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `isend` requires.
    unsafe { isend(comm, data, size, tag, mr, to) }
}

unsafe extern "C" fn isend_v8(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    mr: *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `isend` requires. A negative size becomes larger than any
    // message may be.
    unsafe { isend(comm, data, size as isize as usize, tag, mr, to) }
}

unsafe extern "C" fn irecv_v10(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mrs: *mut *mut c_void,
    _phandles: *mut *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `irecv` requires.
    unsafe { irecv(comm, n, data, |i| *sizes.add(i), tags, mrs, to) }
}

unsafe extern "C" fn irecv_v9(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mrs: *mut *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `irecv` requires.
    unsafe { irecv(comm, n, data, |i| *sizes.add(i), tags, mrs, to) }
}

unsafe extern "C" fn irecv_v8(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    mrs: *mut *mut c_void,
    to: OutPointer,
) -> R {
    // SAFETY: our caller promises what `irecv` requires.
    unsafe { irecv(comm, n, data, |i| (*sizes.add(i)).max(0) as usize, tags, mrs, to) }
}

unsafe extern "C" fn iflush(
    comm: *mut c_void,
    n: c_int,
    _data: *mut *mut c_void,
    sizes: *mut c_int,
    mrs: *mut *mut c_void,
    to: OutPointer,
) -> R {
    hot("iflush", || {
        // SAFETY: NCCL gives a place that can be written, or NULL; arrays of `n`; a connection and
        // registrations of ours.
        unsafe {
            put(to, "request", std::ptr::null_mut())?;
            let max = super::types::MAX_RECVS;
            let count = usize::try_from(n).ok().filter(|n| *n <= max).ok_or_else(|| {
                Failure::new(Code::Argument, format!("a flush of {n} buffers, expected 0 to {max}"))
            })?;
            if count > 0 && (sizes.is_null() || mrs.is_null()) {
                return Err(null("an array of iflush"));
            }
            let flushed = (0..count).map(|i| {
                let held = (*mrs.add(i)).cast::<Held>().as_ref();
                ((*sizes.add(i)).max(0) as usize, held.map(|held| &held.mr))
            });
            let request = at::<Comm>(comm, "recvComm")?.flush(flushed)?;
            put(
                to,
                "request",
                request.map_or(std::ptr::null_mut(), |r| std::ptr::from_ref(r).cast_mut().cast()),
            )
        }
    })
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> R {
    hot("test", || {
        // SAFETY: NCCL gives places that can be written, or NULL, and a request of ours that is not
        // done, of a connection that is not closed. `sizes` has as many entries as the request has
        // buffers.
        unsafe {
            put(done, "done", 0)?;
            let to = |i: usize, size: usize| {
                if !sizes.is_null() {
                    sizes.add(i).write(size as c_int);
                }
            };
            let ended = at::<Request>(request, "request")?.test(to)?;
            put(done, "done", ended as c_int)
        }
    })
}

// --------------------------------------------------------------------- tables

type ConnectFn = unsafe extern "C" fn(*mut c_void, OutPointer, OutDevice) -> R;
type RegMr = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, OutPointer) -> R;
type RegDmaBuf = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, OutPointer) -> R;
type Pair = unsafe extern "C" fn(*mut c_void, *mut c_void) -> R;
type One = unsafe extern "C" fn(*mut c_void) -> R;
type Flush =
    unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void, *mut c_int, *mut *mut c_void, OutPointer) -> R;
type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> R;
type DeviceMr = Option<unsafe extern "C" fn(*mut c_void, *mut c_void, OutPointer) -> R>;
type Consumed = Option<unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> R>;
type SendSized<S> = unsafe extern "C" fn(*mut c_void, *mut c_void, S, c_int, *mut c_void, OutPointer) -> R;
type RecvSized<S> = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut S,
    *mut c_int,
    *mut *mut c_void,
    OutPointer,
) -> R;
type Send10 =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, OutPointer) -> R;
type Recv10 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
    OutPointer,
) -> R;

macro_rules! table {
    ($(#[doc = $doc:literal])+ $table:ident, $symbol:ident, $bytes:literal, { $($field:ident: $type:ty = $value:expr,)+ }) => {
        $(#[doc = $doc])+
        #[repr(C)]
        #[allow(missing_docs)] // NCCL's names.
        pub struct $table {
            pub name: *const c_char,
            $(pub $field: $type,)+
        }

        // SAFETY: function pointers and a static string.
        unsafe impl Sync for $table {}

        const _: () = assert!(size_of::<$table>() == $bytes);

        $(#[doc = $doc])+
        #[unsafe(no_mangle)]
        pub static $symbol: $table = $table { name: NAME, $($field: $value,)+ };
    };
}

table! {
    /// The table `ncclNet_v8_t`.
    NetV8, ncclNetPlugin_v8, 152, {
        init: unsafe extern "C" fn(Logger) -> R = init_v9,
        devices: unsafe extern "C" fn(*mut c_int) -> R = devices,
        get_properties: unsafe extern "C" fn(c_int, *mut PropsV8) -> R = properties_v8,
        listen: unsafe extern "C" fn(c_int, *mut c_void, OutPointer) -> R = listen_v10,
        connect: unsafe extern "C" fn(c_int, *mut c_void, OutPointer, OutDevice) -> R = connect_v9,
        accept: ConnectFn = accept,
        reg_mr: RegMr = reg_mr,
        reg_mr_dma_buf: RegDmaBuf = reg_mr_dma_buf,
        dereg_mr: Pair = dereg_mr,
        isend: SendSized<c_int> = isend_v8,
        irecv: RecvSized<c_int> = irecv_v8,
        iflush: Flush = iflush,
        test: Test = test,
        close_send: One = close_comm,
        close_recv: One = close_comm,
        close_listen: One = close_listen,
        get_device_mr: DeviceMr = None,
        irecv_consumed: Consumed = None,
    }
}

table! {
    /// The table `ncclNet_v9_t`.
    NetV9, ncclNetPlugin_v9, 160, {
        init: unsafe extern "C" fn(Logger) -> R = init_v9,
        devices: unsafe extern "C" fn(*mut c_int) -> R = devices,
        get_properties: unsafe extern "C" fn(c_int, *mut PropsV9) -> R = properties_v9,
        listen: unsafe extern "C" fn(c_int, *mut c_void, OutPointer) -> R = listen_v10,
        connect: unsafe extern "C" fn(c_int, *mut c_void, OutPointer, OutDevice) -> R = connect_v9,
        accept: ConnectFn = accept,
        reg_mr: RegMr = reg_mr,
        reg_mr_dma_buf: RegDmaBuf = reg_mr_dma_buf,
        dereg_mr: Pair = dereg_mr,
        isend: SendSized<usize> = isend_v9,
        irecv: RecvSized<usize> = irecv_v9,
        iflush: Flush = iflush,
        test: Test = test,
        close_send: One = close_comm,
        close_recv: One = close_comm,
        close_listen: One = close_listen,
        get_device_mr: DeviceMr = None,
        irecv_consumed: Consumed = None,
        make_v_device: Option<unsafe extern "C" fn(*mut c_int, *mut VDevice4) -> R> = None,
    }
}

table! {
    /// The table `ncclNet_v10_t`.
    NetV10, ncclNetPlugin_v10, 160, {
        init: unsafe extern "C" fn(Logger, ProfilerCallback) -> R = init_v10,
        devices: unsafe extern "C" fn(*mut c_int) -> R = devices,
        get_properties: unsafe extern "C" fn(c_int, *mut PropsV9) -> R = properties_v9,
        listen: unsafe extern "C" fn(c_int, *mut c_void, OutPointer) -> R = listen_v10,
        connect: unsafe extern "C" fn(c_int, *mut CommConfig, *mut c_void, OutPointer, OutDevice) -> R = connect_v10,
        accept: ConnectFn = accept,
        reg_mr: RegMr = reg_mr,
        reg_mr_dma_buf: RegDmaBuf = reg_mr_dma_buf,
        dereg_mr: Pair = dereg_mr,
        isend: Send10 = isend_v10,
        irecv: Recv10 = irecv_v10,
        iflush: Flush = iflush,
        test: Test = test,
        close_send: One = close_comm,
        close_recv: One = close_comm,
        close_listen: One = close_listen,
        get_device_mr: DeviceMr = None,
        irecv_consumed: Consumed = None,
        make_v_device: Option<unsafe extern "C" fn(*mut c_int, *mut VDevice4) -> R> = None,
    }
}

macro_rules! since_11 {
    ($(#[doc = $doc:literal])+ $table:ident, $symbol:ident, $props:ty, $v_device:ty, $properties:ident) => {
        table! {
            $(#[doc = $doc])+
            $table, $symbol, 176, {
                init: unsafe extern "C" fn(OutPointer, u64, *mut CommConfig, Logger, ProfilerCallback) -> R = init_v11,
                devices: unsafe extern "C" fn(*mut c_int) -> R = devices,
                get_properties: unsafe extern "C" fn(c_int, *mut $props) -> R = $properties,
                listen: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, OutPointer) -> R = listen_v11,
                connect: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, OutPointer, OutDevice) -> R = connect_v11,
                accept: ConnectFn = accept,
                reg_mr: RegMr = reg_mr,
                reg_mr_dma_buf: RegDmaBuf = reg_mr_dma_buf,
                dereg_mr: Pair = dereg_mr,
                isend: Send10 = isend_v10,
                irecv: Recv10 = irecv_v10,
                iflush: Flush = iflush,
                test: Test = test,
                close_send: One = close_comm,
                close_recv: One = close_comm,
                close_listen: One = close_listen,
                get_device_mr: DeviceMr = None,
                irecv_consumed: Consumed = None,
                make_v_device: Option<unsafe extern "C" fn(*mut c_int, *mut $v_device) -> R> = None,
                finalize: One = finalize,
                set_net_attr: Option<unsafe extern "C" fn(*mut c_void, *mut NetAttr) -> R> = Some(set_net_attr),
            }
        }
    };
}

since_11!(
    /// The table `ncclNet_v11_t`.
    NetV11, ncclNetPlugin_v11, PropsV11, VDevice4, properties_v11
);
since_11!(
    /// The table `ncclNet_v12_t`.
    NetV12, ncclNetPlugin_v12, PropsV12, VDevice8, properties_v12
);
