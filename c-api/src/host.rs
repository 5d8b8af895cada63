//! Ends of queue pairs for a thread of the host.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use pushgate::HostEnd;

use crate::arguments::{Out, bytes, bytes_mut};
use crate::boundary::{Failure, Result, call};
use crate::codes::*;
use crate::queue_pair::{QueuePairObject, pushgate_queue_pair};
use crate::table::{self, Object};

/// No signal follows the bytes.
pub const PUSHGATE_NO_SIGNAL: u32 = u32::MAX;

/// An end of a queue pair for a thread of the host, which posts, receives and waits as kernels do. No kernel may use that end. One
/// thread at a time uses it: a call finds PUSHGATE_E_BUSY while another thread's call is under way.
pub struct pushgate_host_end;

/// An end, with the queue pair that it was made of.
pub(crate) struct HostEndObject {
    end: Mutex<HostEnd>,
    _qp: Arc<QueuePairObject>,
}

impl Object for HostEndObject {
    type Handle = pushgate_host_end;
    const NAME: &'static str = "end of the host";
}

impl HostEndObject {
    fn lock(&self) -> Result<MutexGuard<'_, HostEnd>> {
        match self.end.try_lock() {
            Ok(end) => Ok(end),
            // A call that panicked has left cursors that may be wrong.
            Err(TryLockError::Poisoned(_)) => {
                Err(Failure::new(PUSHGATE_E_INTERNAL, "a call before this one has left the end unusable"))
            }
            Err(TryLockError::WouldBlock) => {
                Err(Failure::new(PUSHGATE_E_BUSY, "another thread's call uses this end of the host"))
            }
        }
    }
}

/// Success, or that there was no credit.
fn posted(done: bool) -> Result<()> {
    match done {
        true => Ok(()),
        false => Err(Failure::new(PUSHGATE_E_AGAIN, "there is no credit yet; nothing was posted")),
    }
}

/// Makes the end of a queue pair for a thread of the host. A queue pair gives it once, and its engine runs in this process
/// (`proxy = thread`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_create(
    qp: *const pushgate_queue_pair,
    end: *mut *mut pushgate_host_end,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::handle("end", end)? };
        let qp = table::get::<QueuePairObject>(qp)?;
        let end = Mutex::new(qp.qp.host_end()?);
        out.put(table::open(HostEndObject { end, _qp: qp }));
        Ok(())
    })
}

/// Closes an end of the host. What it has posted still arrives. NULL is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_close(end: *mut pushgate_host_end) -> c_int {
    call(|| table::close::<HostEndObject>(end))
}

/// Sends a message. It takes a receive of the peer; the bytes may be changed when the call returns. Returns PUSHGATE_E_AGAIN at once
/// if there is no credit.
///
/// @param tag  Goes to the receiver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_try_send(
    end: *const pushgate_host_end,
    payload: *const c_void,
    size: usize,
    tag: u32,
) -> c_int {
    call(|| {
        let object = table::get::<HostEndObject>(end)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let payload = unsafe { bytes("payload", payload.cast(), size)? };
        posted(object.lock()?.try_send(payload, tag)?)
    })
}

/// Sends a message as pushgate_host_end_try_send does, and waits for credit, for the setting `timeout` at most.
///
/// A send that has returned is posted, and the peer may not have it: pushgate_host_end_flush waits for that. If the message ends the
/// queue pair, the calls after it fail, and pushgate_last_message() says why.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_send(
    end: *const pushgate_host_end,
    payload: *const c_void,
    size: usize,
    tag: u32,
) -> c_int {
    call(|| {
        let object = table::get::<HostEndObject>(end)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let payload = unsafe { bytes("payload", payload.cast(), size)? };
        Ok(object.lock()?.send(payload, tag)?)
    })
}

/// The signal that a put asks for.
fn signal_of(index: u32, value: u64) -> Option<(u32, u64)> {
    (index != PUSHGATE_NO_SIGNAL).then_some((index, value))
}

/// Puts bytes into a region of the peer. The bytes may be changed when the call returns. Returns PUSHGATE_E_AGAIN at once if there is
/// no credit. A key that names no region, and bytes that leave theirs, end the queue pair.
///
/// @param rkey    The key of the peer's region.
/// @param offset  Bytes from the region's start, less than 2^56.
/// @param signal  The peer's signal that gets `value` once the bytes are there, or PUSHGATE_NO_SIGNAL.
/// @param value   Less than 2^56. A signal only grows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_try_put(
    end: *const pushgate_host_end,
    rkey: u32,
    offset: u64,
    payload: *const c_void,
    size: usize,
    signal: u32,
    value: u64,
) -> c_int {
    call(|| {
        let object = table::get::<HostEndObject>(end)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let payload = unsafe { bytes("payload", payload.cast(), size)? };
        posted(object.lock()?.try_put(rkey, offset, payload, signal_of(signal, value))?)
    })
}

/// Puts bytes as pushgate_host_end_try_put does, and waits for credit, for the setting `timeout` at most.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_put(
    end: *const pushgate_host_end,
    rkey: u32,
    offset: u64,
    payload: *const c_void,
    size: usize,
    signal: u32,
    value: u64,
) -> c_int {
    call(|| {
        let object = table::get::<HostEndObject>(end)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let payload = unsafe { bytes("payload", payload.cast(), size)? };
        Ok(object.lock()?.put(rkey, offset, payload, signal_of(signal, value))?)
    })
}

/// Sets a signal of the peer, which comes after all that was posted before, and waits for credit, for the setting `timeout` at most. A
/// signal only grows: a smaller value changes nothing.
///
/// @param value  Less than 2^56.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_signal(
    end: *const pushgate_host_end,
    index: u32,
    value: u64,
) -> c_int {
    call(|| Ok(table::get::<HostEndObject>(end)?.lock()?.signal(index, value)?))
}

/// The value of a signal of this end. What the peer posted before the signal is there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_signal_value(
    end: *const pushgate_host_end,
    index: u32,
    value: *mut u64,
) -> c_int {
    call(|| {
        let object = table::get::<HostEndObject>(end)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::new("value", value)? };
        out.put(object.lock()?.signal_value(index)?);
        Ok(())
    })
}

/// Waits until a signal of this end is at least `value`, for the setting `timeout` at most.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_wait_signal(
    end: *const pushgate_host_end,
    index: u32,
    value: u64,
) -> c_int {
    call(|| Ok(table::get::<HostEndObject>(end)?.lock()?.wait_signal(index, value)?))
}

/// Waits until the peer has all that was posted, for the setting `timeout` at most.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_flush(end: *const pushgate_host_end) -> c_int {
    call(|| Ok(table::get::<HostEndObject>(end)?.lock()?.flush()?))
}

/// Takes the next message, and waits for it, for the setting `timeout` at most. A message that is longer than `room` stays the next
/// one, and the call returns PUSHGATE_E_CONFIG.
///
/// @param buffer  Gets the message. Its other bytes may be zeroed.
/// @param length  Gets the message's length. May be NULL.
/// @param tag     Gets the tag that the sender gave. May be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_recv(
    end: *const pushgate_host_end,
    buffer: *mut c_void,
    room: usize,
    length: *mut usize,
    tag: *mut u32,
) -> c_int {
    // SAFETY: the header's rules for pointers, which the program keeps.
    call(|| unsafe { receive(end, buffer, room, length, tag, |end, into| Ok(Some(end.recv(into)?))) })
}

/// Takes the next message as pushgate_host_end_recv does. Returns PUSHGATE_E_AGAIN at once if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_host_end_try_recv(
    end: *const pushgate_host_end,
    buffer: *mut c_void,
    room: usize,
    length: *mut usize,
    tag: *mut u32,
) -> c_int {
    // SAFETY: the header's rules for pointers, which the program keeps.
    call(|| unsafe { receive(end, buffer, room, length, tag, |end, into| end.try_recv(into)) })
}

/// Receives a message by `take`.
///
/// # Safety
/// As [`bytes_mut`] and [`Out::new`].
unsafe fn receive(
    end: *const pushgate_host_end,
    buffer: *mut c_void,
    room: usize,
    length: *mut usize,
    tag: *mut u32,
    take: impl FnOnce(&mut HostEnd, &mut [u8]) -> pushgate::Result<Option<pushgate::HostMessage>>,
) -> Result<()> {
    let object = table::get::<HostEndObject>(end)?;
    // SAFETY: the caller's promise.
    let (into, length, tag) = unsafe {
        let length = if length.is_null() { None } else { Some(Out::new("length", length)?) };
        let tag = if tag.is_null() { None } else { Some(Out::new("tag", tag)?) };
        (bytes_mut("buffer", buffer.cast(), room)?, length, tag)
    };
    let message = take(&mut *object.lock()?, into)?;
    let message = message.ok_or_else(|| Failure::new(PUSHGATE_E_AGAIN, "there is no message yet"))?;
    if let Some(length) = length {
        length.put(message.length);
    }
    if let Some(tag) = tag {
        tag.put(message.tag);
    }
    Ok(())
}
