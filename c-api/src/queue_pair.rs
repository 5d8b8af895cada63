//! Queue pairs.

use std::ffi::{CString, c_char, c_int};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pushgate::{DeviceBuffer, QpConfig, QueuePair, abi, status_name, upload_descriptors};

use crate::arguments::{Options, Out, flags, options};
use crate::boundary::call;
use crate::comm::{CommObject, pushgate_comm};
use crate::table::{self, Object};

/// Messages land in buffers that the receiver's kernel posts.
pub const PUSHGATE_QUEUE_PAIR_POSTED_RECEIVES: u32 = 1;

/// A reliable, ordered connection between two ranks' devices. Any thread may use one.
pub struct pushgate_queue_pair;

/// Sizes of a queue pair. Members that are 0 mean the setting of that name.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pushgate_queue_pair_options {
    /// sizeof(struct pushgate_queue_pair_options).
    pub size: usize,
    /// Payload ring in bytes: a power of two, 64 to 512 Mi.
    pub window_size: u64,
    /// WQE slots: a power of two, 2 to 65536.
    pub slots: u64,
    /// Receives: a power of two, 2 to 65536.
    pub receives: u64,
    /// PUSHGATE_QUEUE_PAIR_*.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: integers, 4 times 8 + 4 + 4 bytes without padding, the size first.
unsafe impl Options for pushgate_queue_pair_options {
    const LEAST: usize = 40;
}
const _: () = assert!(size_of::<pushgate_queue_pair_options>() == 40);

/// A queue pair, with the communicator that it was made with.
pub(crate) struct QueuePairObject {
    // Dropped in this order.
    pub(crate) qp: Arc<QueuePair>,
    /// The structure that kernels get, once somebody has asked for its address.
    descriptor: Mutex<Option<DeviceBuffer>>,
    pub(crate) comm: Arc<CommObject>,
}

impl Object for QueuePairObject {
    type Handle = pushgate_queue_pair;
    const NAME: &'static str = "queue pair";
}

/// Makes a queue pair with `peer`, which makes the same call with the same label and its own sizes. Returns when both ends know
/// each other.
///
/// Two ranks that share several queue pairs give each a label of its own. After an error either rank may call again.
///
/// @param label    Below 2^24.
/// @param options  NULL: the sizes that the settings say.
/// @param qp       The result; NULL after an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_queue_pair_create(
    comm: *const pushgate_comm,
    peer: u32,
    label: u32,
    options: *const pushgate_queue_pair_options,
    qp: *mut *mut pushgate_queue_pair,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let (out, given) = unsafe { (Out::handle("qp", qp)?, self::options("options", options)?) };
        let comm = table::get::<CommObject>(comm)?;
        let mut config = QpConfig::default();
        if let Some(given) = given {
            flags("flags", given.flags, PUSHGATE_QUEUE_PAIR_POSTED_RECEIVES)?;
            flags("reserved", given.reserved, 0)?;
            let size = |value: u64| (value != 0).then_some(value);
            config.window_size = size(given.window_size);
            config.slots = size(given.slots);
            config.receives = size(given.receives);
            config.posted_receives = given.flags & PUSHGATE_QUEUE_PAIR_POSTED_RECEIVES != 0;
        }
        let qp = Arc::new(comm.comm.queue_pair(peer, label, config)?);
        out.put(table::open(QueuePairObject { qp, descriptor: Mutex::default(), comm }));
        Ok(())
    })
}

/// Closes a queue pair without open regions, which kernels use no more. The peer's end ends too. NULL is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_queue_pair_close(qp: *mut pushgate_queue_pair) -> c_int {
    call(|| table::close::<QueuePairObject>(qp))
}

/// The address of a queue pair's `struct pushgate_qp` in the device's memory, for a kernel's parameters: `queue_pair
/// qp(*reinterpret_cast<const pushgate_qp *>(address))`. Valid until the queue pair is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_queue_pair_device_address(
    qp: *const pushgate_queue_pair,
    address: *mut u64,
) -> c_int {
    call(|| {
        let object = table::get::<QueuePairObject>(qp)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::new("address", address)? };
        let mut descriptor = object.descriptor.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = match &*descriptor {
            Some(buffer) => buffer,
            None => descriptor.insert(upload_descriptors(object.comm.comm.context(), [&*object.qp])?),
        };
        out.put(buffer.addr());
        Ok(())
    })
}

/// The largest message in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_queue_pair_max_message(
    qp: *const pushgate_queue_pair,
    size: *mut u64,
) -> c_int {
    call(|| {
        let object = table::get::<QueuePairObject>(qp)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::new("size", size)? };
        out.put(object.qp.max_message());
        Ok(())
    })
}

/// Returns the cause if the queue pair has ended, as PUSHGATE_E_PEER_LOST; pushgate_last_message() says more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_queue_pair_check(qp: *const pushgate_queue_pair) -> c_int {
    call(|| Ok(table::get::<QueuePairObject>(qp)?.qp.check()?))
}

/// Ends the queue pair: waits end with PUSHGATE_E_ABORTED, here and at the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_queue_pair_abort(qp: *const pushgate_queue_pair) -> c_int {
    call(|| Ok(table::get::<QueuePairObject>(qp)?.qp.abort()?))
}

/// What a status that a kernel saw means, in words: `enum class status` of device.cuh, as a number. Never NULL; the text is
/// valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn pushgate_status_name(status: u64) -> *const c_char {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    // The last one is what no status has.
    const UNKNOWN: u64 = abi::PUSHGATE_LINK_DOWN as u64 + 1;
    let names = NAMES
        .get_or_init(|| (0..=UNKNOWN).map(|n| CString::new(status_name(n)).unwrap_or_default()).collect());
    names[status.min(UNKNOWN) as usize].as_ptr()
}
