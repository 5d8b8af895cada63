//! The C face, `shim/face.h`, which says what each call does.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use pushgate_driver_shim::fork::OwnedHere;

use crate::agent::{Agent, Described, PARAMETERS};
use crate::gpu::Offer;
use crate::status::{Result, Status};
use crate::transfer::Transfer;
use crate::{log, release};

/// Bytes of the caller, for the call alone.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Bytes {
    at: *const c_char,
    length: usize,
}

/// A parameter of the backend.
#[repr(C)]
pub struct Parameter {
    key: Bytes,
    value: Bytes,
}

type Take = unsafe extern "C" fn(to: *mut c_void, bytes: Bytes);
type TakeTwo = unsafe extern "C" fn(to: *mut c_void, first: Bytes, second: Bytes);

impl Bytes {
    fn of(bytes: &[u8]) -> Bytes {
        Bytes { at: bytes.as_ptr().cast(), length: bytes.len() }
    }

    /// # Safety
    /// The bytes are there for `'a`.
    unsafe fn slice<'a>(self) -> &'a [u8] {
        match self.length {
            0 => &[],
            // SAFETY: the caller's word.
            _ => unsafe { std::slice::from_raw_parts(self.at.cast(), self.length) },
        }
    }

    /// # Safety
    /// The bytes are there for `'a`.
    unsafe fn text<'a>(self) -> Result<&'a str> {
        // SAFETY: the caller's word.
        std::str::from_utf8(unsafe { self.slice() }).map_err(|_| Status::InvalidParam)
    }
}

/// Runs a call: a panic becomes an error and does not leave it.
fn call(run: impl FnOnce() -> Result<Status>) -> c_int {
    let status = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(status) | Err(status)) => status,
        Err(_) => {
            tracing::error!("a call failed by a fault of the plugin");
            Status::Backend
        }
    };
    status as c_int
}

fn done(result: Result<()>) -> Result<Status> {
    result.map(|()| Status::Success)
}

/// An agent, as the caller holds it. A child of `fork` has none of its threads, and not the pages that it shares with its peers: calls
/// fail there, and its end does nothing.
type Held = OwnedHere<Agent>;

/// # Safety
/// face.h's rules: the pointer is what `pushgate_nixl_open` gave, and was not closed.
unsafe fn agent<'a>(agent: *const Held) -> Result<&'a Agent> {
    // SAFETY: the caller's word.
    unsafe { &*agent }.here().map_err(|_| Status::NotAllowed)
}

#[unsafe(no_mangle)]
extern "C" fn pushgate_nixl_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[unsafe(no_mangle)]
extern "C" fn pushgate_nixl_memories() -> u32 {
    if Offer::of_host() == Offer::Nothing { 1 } else { 3 }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_parameters(to: *mut c_void, take: TakeTwo) {
    for (key, value) in PARAMETERS {
        // SAFETY: the caller's function, for the caller's argument.
        unsafe { take(to, Bytes::of(key.as_bytes()), Bytes::of(value.as_bytes())) };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_open(
    name: Bytes,
    parameters: *const Parameter,
    count: usize,
) -> *mut Held {
    log::start();
    let open = || -> std::result::Result<Agent, String> {
        let no_text = |_| "a name or parameter that is no UTF-8".to_owned();
        // SAFETY: face.h's rules for what the caller hands over.
        let name = unsafe { name.text() }.map_err(no_text)?;
        let mut all = Vec::new();
        for i in 0..count {
            // SAFETY: as above.
            let (key, value) = unsafe {
                let parameter = &*parameters.add(i);
                (parameter.key.text(), parameter.value.text())
            };
            all.push((key.map_err(no_text)?.to_owned(), value.map_err(no_text)?.to_owned()));
        }
        Agent::open(name, &all, Offer::of_host())
    };
    match catch_unwind(open) {
        Ok(Ok(agent)) => Box::into_raw(Box::new(OwnedHere::new(agent))),
        Ok(Err(why)) => {
            tracing::error!("the backend PUSHGATE can't be made: {why}");
            ptr::null_mut()
        }
        Err(_) => ptr::null_mut(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_close(agent: *mut Held) {
    // SAFETY: face.h's rules: made by `pushgate_nixl_open`, and used by nobody else from here on.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(agent) })));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_register(
    to: *const Held,
    address: u64,
    length: u64,
    device: u64,
    memory: c_int,
    registration: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: face.h's rules.
        let key = unsafe { agent(to) }?.register(address, length, memory, device)?;
        // SAFETY: face.h's rules: the caller's word.
        unsafe { *registration = key };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_deregister(to: *const Held, registration: u64) -> c_int {
    // SAFETY: face.h's rules.
    call(|| done(unsafe { agent(to) }?.deregister(registration)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_public(
    of: *const Held,
    registration: u64,
    to: *mut c_void,
    take: Take,
) -> c_int {
    call(|| {
        // SAFETY: face.h's rules.
        let published = unsafe { agent(of) }?.publish(registration)?;
        // SAFETY: the caller's function, for the caller's argument.
        unsafe { take(to, Bytes::of(&published)) };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_connection(of: *const Held, to: *mut c_void, take: Take) -> c_int {
    call(|| {
        // SAFETY: face.h's rules.
        let connection = unsafe { agent(of) }?.connection();
        // SAFETY: the caller's function, for the caller's argument.
        unsafe { take(to, Bytes::of(&connection)) };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_load_connection(to: *const Held, peer: Bytes, connection: Bytes) -> c_int {
    // SAFETY: face.h's rules.
    call(|| done(unsafe { agent(to)?.load_connection(peer.text()?, connection.slice()) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_connect(to: *const Held, peer: Bytes) -> c_int {
    // SAFETY: face.h's rules.
    call(|| done(unsafe { agent(to)?.connect(peer.text()?) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_disconnect(to: *const Held, peer: Bytes) -> c_int {
    // SAFETY: face.h's rules.
    call(|| done(unsafe { agent(to)?.disconnect(peer.text()?) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_load(
    to: *const Held,
    peer: Bytes,
    published: Bytes,
    memory: c_int,
    registration: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: face.h's rules.
        let key = unsafe { agent(to)?.load(peer.text()?, published.slice(), memory)? };
        // SAFETY: face.h's rules: the caller's word.
        unsafe { *registration = key };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_unload(to: *const Held, registration: u64) -> c_int {
    // SAFETY: face.h's rules.
    call(|| done(unsafe { agent(to) }?.unload(registration)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_prepare(
    to: *const Held,
    write: c_int,
    peer: Bytes,
    local_memory: c_int,
    local: *const Described,
    remote_memory: c_int,
    remote: *const Described,
    count: usize,
    transfer: *mut *const Transfer,
) -> c_int {
    call(|| {
        let list = |at: *const Described| match count {
            0 => &[][..],
            // SAFETY: face.h's rules: `count` elements each.
            _ => unsafe { std::slice::from_raw_parts(at, count) },
        };
        let memory = [local_memory, remote_memory];
        // SAFETY: face.h's rules.
        let made =
            unsafe { agent(to)?.prepare(write != 0, peer.text()?, memory, list(local), list(remote))? };
        // SAFETY: face.h's rules: the caller's word.
        unsafe { *transfer = Arc::into_raw(made) };
        Ok(Status::Success)
    })
}

/// The transfer of a handle, which keeps its own count.
///
/// # Safety
/// face.h's rules: `pushgate_nixl_prepare` gave it, and it was not released.
unsafe fn held(transfer: *const Transfer) -> Arc<Transfer> {
    // SAFETY: the caller's word; the count that the handle has stays.
    unsafe {
        Arc::increment_strong_count(transfer);
        Arc::from_raw(transfer)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_post(
    to: *const Held,
    transfer: *const Transfer,
    notification: *const Bytes,
) -> c_int {
    // SAFETY: face.h's rules.
    call(|| unsafe {
        let note = notification.as_ref().map(|note| note.slice());
        agent(to)?.post(&held(transfer), note)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_check(to: *const Held, transfer: *const Transfer) -> c_int {
    // SAFETY: face.h's rules.
    call(|| Ok(unsafe { agent(to)?.check(&*transfer) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_release(to: *const Held, transfer: *const Transfer) -> c_int {
    call(|| {
        // SAFETY: face.h's rules.
        let Ok(agent) = (unsafe { agent(to) }) else {
            // Nothing of it goes on in a child of `fork`, where what it holds can't be given back.
            return Ok(Status::Success);
        };
        // SAFETY: face.h's rules.
        agent.release(&unsafe { held(transfer) })?;
        // SAFETY: face.h's rules: the handle is not used after success, so its count goes.
        drop(unsafe { Arc::from_raw(transfer) });
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_notifications(of: *const Held, to: *mut c_void, take: TakeTwo) -> c_int {
    call(|| {
        // SAFETY: face.h's rules.
        for (from, text) in unsafe { agent(of) }?.notifications() {
            // SAFETY: the caller's function, for the caller's argument.
            unsafe { take(to, Bytes::of(from.as_bytes()), Bytes::of(&text)) };
        }
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pushgate_nixl_notify(to: *const Held, peer: Bytes, message: Bytes) -> c_int {
    // SAFETY: face.h's rules.
    call(|| done(unsafe { agent(to)?.notify(peer.text()?, message.slice()) }))
}

unsafe extern "C" {
    fn pushgate_nixl_table() -> *mut c_void;
}

/// What NIXL calls when it has opened the plugin: the table that `shim/plugin.cpp` lays out. NULL: this NIXL has other classes.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_init() -> *mut c_void {
    log::start();
    if let Err(why) = release::check() {
        tracing::error!("{why}");
        return std::ptr::null_mut();
    }
    // SAFETY: a function of the shim, without conditions.
    unsafe { pushgate_nixl_table() }
}

/// What NIXL calls before it closes the plugin. The library stays in the process (`-z nodelete`), for threads may end later.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_fini() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_whose_memory_is_used_beyond_the_limit_stays_to_be_released_again() {
        let agent = crate::tests::agent("only", &[("qp", "local"), ("timeout", "200ms")]);
        let transfer = agent.prepare(true, "only", [0; 2], &[], &[]).unwrap();
        let (user, watched) = (transfer.users.clone(), Arc::downgrade(&transfer));
        let (held, transfer) = (Box::into_raw(Box::new(Held::new(agent))), Arc::into_raw(transfer));
        // SAFETY: face.h's rules are kept: both are released once with success, at the end.
        unsafe {
            assert_eq!(pushgate_nixl_release(held, transfer), Status::Backend as c_int);
            assert!(watched.strong_count() > 0);
            drop(user);
            assert_eq!(pushgate_nixl_release(held, transfer), Status::Success as c_int);
            assert_eq!(watched.strong_count(), 0);
            pushgate_nixl_close(held);
        }
    }
}
