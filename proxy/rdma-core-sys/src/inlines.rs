//! The functions that `<infiniband/verbs.h>` has as static inlines and macros, which no library
//! exports: calls through a context's tables of operations, and choices between two functions.
//!
//! Where C would call a null pointer or not link, these functions return `EOPNOTSUPP`, as the
//! header does for operations that a provider may lack.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};
use std::ptr;

use rustix::io::Errno;

use crate::*;

const EINVAL: c_int = Errno::INVAL.raw_os_error();
const ENOSYS: c_int = Errno::NOSYS.raw_os_error();
const EOPNOTSUPP: c_int = Errno::OPNOTSUPP.raw_os_error();

/// Access flags that a kernel may ignore if it does not know them (relaxed ordering is one). Only
/// `ibv_reg_mr_iova2` accepts them.
pub const IBV_ACCESS_OPTIONAL_RANGE: c_uint =
    ib_uverbs_access_flags::IB_UVERBS_ACCESS_OPTIONAL_RANGE.0 as c_uint;

/// An operation of the `verbs_context` around a context. `None` if there is no `verbs_context`
/// around it, if it is of a library that did not know the operation yet, or if the provider lacks
/// the operation.
macro_rules! extended_op {
    ($context:expr, $op:ident) => {
        extended($context, offset_of!(verbs_context, $op), |table| table.$op)
    };
}

/// Reads the operation at `offset`, for the macro `extended_op`. The last argument is not called;
/// it only gives the operation's type.
///
/// # Safety
///
/// `context` is a context of libibverbs, and `offset` that of a field of type `Option<F>`.
#[inline]
unsafe fn extended<F: Copy>(
    context: *mut ibv_context,
    offset: usize,
    _: fn(&verbs_context) -> Option<F>,
) -> Option<F> {
    // SAFETY: the caller promises a context.
    if unsafe { (*context).abi_compat }.addr() != usize::MAX {
        return None;
    }
    // The table grows at its head, so an older library's table begins later than ours. The field is
    // found from the table's end, and no reference to the whole table is made.
    let field = |offset| context.wrapping_byte_sub(offset_of!(verbs_context, context) - offset);
    // SAFETY: this value of abi_compat says that the context lies in a verbs_context, which has the
    // size right before the context.
    let size = unsafe { field(offset_of!(verbs_context, sz)).cast::<usize>().read() };
    if size < size_of::<verbs_context>() - offset {
        return None;
    }
    // SAFETY: by its size the table includes this field, whose type the caller promises.
    unsafe { field(offset).cast::<Option<F>>().read() }
}

fn set_errno(value: c_int) {
    // std and rustix can only read errno.
    unsafe extern "C" {
        fn __errno_location() -> *mut c_int;
    }
    // SAFETY: glibc and musl both declare the function so; the result is this thread's own errno.
    unsafe { *__errno_location() = value }
}

/// What C's inlines return for an absent operation that returns a pointer.
fn unsupported<T>() -> *mut T {
    set_errno(EOPNOTSUPP);
    ptr::null_mut()
}

/// Posts a list of work requests to a send queue. Returns 0, or an errno value with `*bad_wr` the
/// first request that was not posted; `EOPNOTSUPP` if the provider has no such operation.
///
/// # Safety
///
/// `qp` is a queue pair, `wr` a list whose requests and scatter lists are valid, `bad_wr` writable.
/// The buffers stay registered, and as the operation needs them, until the operation's completion
/// is polled.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller promises a queue pair, whose context lives as long; this function's caller
    // promises the rest of the operation's contract.
    unsafe {
        match (*(*qp).context).ops.post_send {
            Some(post_send) => post_send(qp, wr, bad_wr),
            None => {
                *bad_wr = wr;
                EOPNOTSUPP
            }
        }
    }
}

/// Posts a list of work requests to a receive queue. Returns what [`ibv_post_send`] returns.
///
/// # Safety
///
/// The requirements of [`ibv_post_send`] hold, and nothing else uses the buffers until the
/// completion is polled.
#[inline]
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller promises a queue pair and the rest of the operation's contract.
    unsafe {
        match (*(*qp).context).ops.post_recv {
            Some(post_recv) => post_recv(qp, wr, bad_wr),
            None => {
                *bad_wr = wr;
                EOPNOTSUPP
            }
        }
    }
}

/// Polls up to `num_entries` completions. Returns their number, or a negative value on error;
/// `-EOPNOTSUPP` if the provider has no such operation.
///
/// # Safety
///
/// `cq` is a completion queue, and `wc` has room for `num_entries`.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller promises a completion queue, whose context lives as long, and the rest of
    // the operation's contract.
    unsafe {
        match (*(*cq).context).ops.poll_cq {
            Some(poll_cq) => poll_cq(cq, num_entries, wc),
            None => -EOPNOTSUPP,
        }
    }
}

/// Requests an event on the queue's channel at the next completion, or, if `solicited_only` is not
/// 0, at the next solicited one. Returns 0 or an errno value; `EOPNOTSUPP` if the provider has no
/// such operation.
///
/// # Safety
///
/// `cq` is a completion queue.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller promises a completion queue.
    unsafe {
        match (*(*cq).context).ops.req_notify_cq {
            Some(req_notify_cq) => req_notify_cq(cq, solicited_only),
            None => EOPNOTSUPP,
        }
    }
}

/// Queries a port. Returns 0 or an errno value.
///
/// All of `port_attr` is written: what a provider without the extended operation does not know
/// (from `link_layer` on, in the oldest) becomes 0. The method `Verbs::ibv_query_port` is that
/// provider's operation and leaves such fields unchanged.
///
/// # Safety
///
/// `context` is an open context of `verbs`, `port_attr` writable.
pub unsafe fn ibv_query_port(
    verbs: &Verbs,
    context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: the caller promises a context and writable attributes, which are as large as stated.
    // The exported function writes the first part of them, which is what its own type describes.
    unsafe {
        match extended_op!(context, query_port) {
            Some(query_port) => query_port(context, port_num, port_attr, size_of::<ibv_port_attr>()),
            None => {
                ptr::write_bytes(port_attr, 0, 1);
                verbs.ibv_query_port(context, port_num, port_attr.cast())
            }
        }
    }
}

/// Queries an entry of a port's GID table, with its type (RoCE v1 or v2). Returns 0 or an errno
/// value; `EOPNOTSUPP` if the library is older than the function (rdma-core 32).
///
/// # Safety
///
/// `context` is an open context of `verbs`, `entry` writable.
pub unsafe fn ibv_query_gid_ex(
    verbs: &Verbs,
    context: *mut ibv_context,
    port_num: u32,
    gid_index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
) -> c_int {
    match &verbs._ibv_query_gid_ex {
        // SAFETY: the caller promises a context and a writable entry, which is as large as stated.
        Ok(query) => unsafe { query(context, port_num, gid_index, entry, flags, size_of::<ibv_gid_entry>()) },
        Err(_) => EOPNOTSUPP,
    }
}

/// Queries a device, including what was added since the first interface (such as `max_dm_size`).
/// Returns 0 or an errno value; `EINVAL` if `input` requests something. All of `attr` is written:
/// what the provider does not know becomes 0.
///
/// # Safety
///
/// `context` is an open context of `verbs`, `input` null or readable, `attr` writable.
pub unsafe fn ibv_query_device_ex(
    verbs: &Verbs,
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
) -> c_int {
    // SAFETY: the caller promises a context, an `input` that is null or readable, and writable
    // attributes, which are as large as stated and begin with the field that the exported function
    // writes.
    unsafe {
        if !input.is_null() && (*input).comp_mask != 0 {
            return EINVAL;
        }
        if let Some(query) = extended_op!(context, query_device_ex) {
            let result = query(context, input, attr, size_of::<ibv_device_attr_ex>());
            if result != EOPNOTSUPP && result != ENOSYS {
                return result;
            }
        }
        ptr::write_bytes(attr, 0, 1);
        verbs.ibv_query_device(context, &raw mut (*attr).orig_attr)
    }
}

/// Registers memory. Returns the region, or null with errno set. Flags in
/// [`IBV_ACCESS_OPTIONAL_RANGE`] are dropped if the library or the kernel does not know them.
///
/// # Safety
///
/// `pd` is a protection domain of `verbs`. The memory stays mapped until the region is
/// deregistered, and all code that uses the memory meanwhile expects the device, and with remote
/// access the peers, to access it too.
pub unsafe fn ibv_reg_mr(
    verbs: &Verbs,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    let plain = access & !IBV_ACCESS_OPTIONAL_RANGE;
    // SAFETY: this function's contract includes those of both functions.
    unsafe {
        match &verbs.ibv_reg_mr_iova2 {
            Ok(register) if plain != access => register(pd, addr, length, addr.addr() as u64, access),
            // An older library returns an error for flags that it does not know.
            _ => verbs.ibv_reg_mr(pd, addr, length, plain as c_int),
        }
    }
}

/// Registers memory of another device, given as a dma-buf. Returns the region, or null with errno
/// set; `EOPNOTSUPP` if the library is older than the function (rdma-core 34).
///
/// # Safety
///
/// The requirements of [`ibv_reg_mr`] hold, with this part of the dma-buf `fd` as the memory.
pub unsafe fn ibv_reg_dmabuf_mr(
    verbs: &Verbs,
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    match &verbs.ibv_reg_dmabuf_mr {
        // SAFETY: this function's contract is that of the exported function.
        Ok(register) => unsafe { register(pd, offset, length, iova, fd, access) },
        Err(_) => unsupported(),
    }
}

/// Allocates memory on the device. Returns the memory, or null with errno set; `EOPNOTSUPP` if the
/// provider has no such operation.
///
/// # Safety
///
/// `context` is an open context, `attr` readable.
pub unsafe fn ibv_alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    // SAFETY: the caller promises a context and the operation's contract.
    unsafe {
        match extended_op!(context, alloc_dm) {
            Some(alloc_dm) => alloc_dm(context, attr),
            None => unsupported(),
        }
    }
}

/// Frees memory of the device. Returns 0 or an errno value; `EOPNOTSUPP` if the provider has no
/// such operation.
///
/// # Safety
///
/// `dm` came from [`ibv_alloc_dm`] and is not used any more; no region over it remains.
pub unsafe fn ibv_free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: the caller promises device memory, whose context lives as long, and the operation's
    // contract.
    unsafe {
        match extended_op!((*dm).context, free_dm) {
            Some(free_dm) => free_dm(dm),
            None => EOPNOTSUPP,
        }
    }
}

/// Copies to memory of the device. Returns 0 or an errno value; `EOPNOTSUPP` if the provider has no
/// such operation.
///
/// # Safety
///
/// `dm` came from [`ibv_alloc_dm`], `host_addr` is readable for `length` bytes.
pub unsafe fn ibv_memcpy_to_dm(
    dm: *mut ibv_dm,
    dm_offset: u64,
    host_addr: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: the caller promises device memory, which holds its operations, and their contract.
    unsafe {
        match (*dm).memcpy_to_dm {
            Some(memcpy_to_dm) => memcpy_to_dm(dm, dm_offset, host_addr, length),
            None => EOPNOTSUPP,
        }
    }
}

/// Copies from memory of the device. Returns what [`ibv_memcpy_to_dm`] returns.
///
/// # Safety
///
/// `dm` came from [`ibv_alloc_dm`], `host_addr` is writable for `length` bytes.
pub unsafe fn ibv_memcpy_from_dm(
    host_addr: *mut c_void,
    dm: *mut ibv_dm,
    dm_offset: u64,
    length: usize,
) -> c_int {
    // SAFETY: the caller promises device memory, which holds its operations, and their contract.
    unsafe {
        match (*dm).memcpy_from_dm {
            Some(memcpy_from_dm) => memcpy_from_dm(host_addr, dm, dm_offset, length),
            None => EOPNOTSUPP,
        }
    }
}

/// Registers memory of the device. The region is addressed from 0 (most providers require
/// `IBV_ACCESS_ZERO_BASED`). Returns the region, or null with errno set; `EOPNOTSUPP` if the
/// provider has no such operation.
///
/// # Safety
///
/// `pd` is a protection domain of the context of `dm`, which came from [`ibv_alloc_dm`] and is
/// freed after the region.
pub unsafe fn ibv_reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    dm_offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller promises a protection domain, whose context lives as long, and the
    // operation's contract.
    unsafe {
        match extended_op!((*pd).context, reg_dm_mr) {
            Some(reg_dm_mr) => reg_dm_mr(pd, dm, dm_offset, length, access),
            None => unsupported(),
        }
    }
}
