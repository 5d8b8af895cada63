//! libibverbs' objects with an owner each. Each keeps alive what it was made
//! from, so that they go in the order that the library wants. In a child of `fork` they
//! are not destroyed: the kernel's objects are the parent's.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_rdma_core_sys as sys;

use super::VerbsError;
use super::device::{Device, PortState};
use super::kinds::failure;
use super::once::Once;
use super::sge::Remote;

fn failed(what: &str, remedy: &str) -> VerbsError {
    let error = std::io::Error::last_os_error();
    VerbsError::Call { what: what.into(), error, remedy: remedy.into() }
}

/// A protection domain: what is registered in one can't be reached through a queue pair of another. Each queue pair has its own
/// (P8), unless its configuration has it share one.
pub(super) struct Pd {
    pub(super) device: Arc<Device>,
    pub(super) raw: NonNull<sys::ibv_pd>,
    /// Of a domain that queue pairs share: what several of them register.
    shared: Option<Once<Place, Mr>>,
}

/// What a region is, for all queue pairs of a process: address as the device names it with the flags of the region's entry, bytes,
/// whether peers may write it. The program keeps the memory there until every queue pair has removed the region.
pub(super) type Place = ((u64, u64), u64, bool);

// SAFETY: libibverbs' calls on its objects are thread-safe (rdma-core, "Thread
// Safe" of verbs(7)); nothing here is tied to the thread that made it.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// A domain for one queue pair.
    pub(super) fn new(device: &Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        Self::made(device, None)
    }

    fn made(device: &Arc<Device>, shared: Option<Once<Place, Mr>>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open as long as `device` lives.
        let raw = unsafe { device.verbs.ibv_alloc_pd(device.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("a protection domain", ""))?;
        Ok(Arc::new(Pd { device: device.clone(), raw, shared }))
    }

    /// The registration of what lies at `place`: that of another queue pair of a shared domain, if one has it, or else what
    /// `register` makes. Waits while another thread registers the same memory.
    pub(super) fn once(
        &self,
        place: Place,
        register: impl FnOnce() -> Result<Option<Mr>, VerbsError>,
    ) -> Result<Option<Arc<Mr>>, VerbsError> {
        match &self.shared {
            Some(shared) => shared.get(place, register),
            None => Ok(register()?.map(Arc::new)),
        }
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        if !self.device.owner.is_here() {
            return;
        }
        // SAFETY: made in `made`, and nothing refers to it any more: regions and
        // queue pairs hold this.
        unsafe { self.device.verbs.ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// A protection domain for the queue pairs of a process on one device: memory that several of them register is pinned once, counts
/// once as locked, and is once in the device's tables. Made when the first queue pair needs it, and again after the device was
/// opened again.
#[derive(Default)]
pub struct SharedDomain(Mutex<Weak<Pd>>);

impl fmt::Debug for SharedDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedDomain")
    }
}

impl SharedDomain {
    pub(super) fn on(&self, device: &Arc<Device>) -> Result<Arc<Pd>, VerbsError> {
        let mut there = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pd) = there.upgrade().filter(|pd| Arc::ptr_eq(&pd.device, device)) {
            return Ok(pd);
        }
        let pd = Pd::made(device, Some(Once::default()))?;
        *there = Arc::downgrade(&pd);
        Ok(pd)
    }
}

/// Makes memory that a device will register, given its name and its size in bytes.
pub type Allocate<'a> = dyn FnMut(&str, usize) -> Result<SharedMemory, ShimError> + 'a;

/// A registered stretch of memory.
pub(super) struct Mr {
    pd: Arc<Pd>,
    raw: NonNull<sys::ibv_mr>,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

// SAFETY: as for `Pd`.
unsafe impl Send for Mr {}
// SAFETY: as for `Pd`; nothing of it changes after it was made.
unsafe impl Sync for Mr {}

/// Remote writes need local ones.
pub(super) const REMOTE_WRITE: u32 =
    sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
/// For what is only sent from.
pub(super) const SEND_ONLY: u32 = 0;

impl Mr {
    /// Registers `bytes` from `address`. Never with relaxed ordering: data, record
    /// and signal are written one after the other, and seen so (P3).
    ///
    /// # Safety
    /// The memory stays mapped while this lives, and nobody holds Rust references
    /// to what a peer may write.
    pub(super) unsafe fn new(
        pd: &Arc<Pd>,
        what: &str,
        address: usize,
        bytes: usize,
        access: u32,
    ) -> Result<Self, VerbsError> {
        let remedy = "; raise the limit of locked memory (ulimit -l unlimited) if it says out of memory";
        // SAFETY: the caller's promise.
        unsafe { Self::with_remedy(pd, what, address, bytes, access, remedy) }
    }

    /// Registers host memory as [`Mr::new`] does; an error ends with `remedy`.
    ///
    /// # Safety
    /// As for [`Mr::new`].
    pub(super) unsafe fn with_remedy(
        pd: &Arc<Pd>,
        what: &str,
        address: usize,
        bytes: usize,
        access: u32,
        remedy: &str,
    ) -> Result<Self, VerbsError> {
        // SAFETY: the caller's promise.
        let raw = unsafe {
            sys::ibv_reg_mr(pd.device.verbs, pd.raw.as_ptr(), address as *mut _, bytes, access as _)
        };
        let what = || format!("registering {bytes} bytes of {what} with {}", pd.device.name());
        Self::made(pd, raw, || failed(&what(), remedy))
    }

    /// Registers device memory that its driver exported.
    ///
    /// # Safety
    /// As for [`Mr::new`], of the device's memory at `address`.
    pub(super) unsafe fn dmabuf(
        pd: &Arc<Pd>,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        address: u64,
        access: u32,
    ) -> Result<Self, VerbsError> {
        use std::os::fd::AsRawFd;
        let verbs = pd.device.verbs;
        if verbs.ibv_reg_dmabuf_mr.is_err() {
            let name = "ibv_reg_dmabuf_mr (rdma-core 34 or later)";
            return Err(VerbsError::Missing { name, device: pd.device.name().into() });
        }
        // SAFETY: the symbol is there; the descriptor is open during the call, the
        // rest is the caller's promise.
        let raw = unsafe {
            verbs.ibv_reg_dmabuf_mr(pd.raw.as_ptr(), offset, bytes, address, fd.as_raw_fd(), access as _)
        };
        Self::made(pd, raw, || {
            failed(&format!("registering {bytes} bytes of device memory with {}", pd.device.name()), "")
        })
    }

    /// Of what the library gave for the domain: a region, or null for an error.
    pub(super) fn made(
        pd: &Arc<Pd>,
        raw: *mut sys::ibv_mr,
        error: impl FnOnce() -> VerbsError,
    ) -> Result<Self, VerbsError> {
        let raw = NonNull::new(raw).ok_or_else(error)?;
        // SAFETY: just made; the library never changes its keys.
        let (lkey, rkey) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        Ok(Mr { pd: pd.clone(), raw, lkey, rkey })
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if !self.pd.device.owner.is_here() {
            return;
        }
        // SAFETY: made above and owned alone.
        unsafe { self.pd.device.verbs.ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// A completion channel: a descriptor that becomes readable when an armed CQ
/// has something.
pub(super) struct Channel {
    device: Arc<Device>,
    raw: NonNull<sys::ibv_comp_channel>,
}

// SAFETY: as for `Pd`.
unsafe impl Send for Channel {}

impl Channel {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, VerbsError> {
        // SAFETY: the context is open as long as `device` lives.
        let raw = unsafe { device.verbs.ibv_create_comp_channel(device.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("a completion channel", ""))?;
        let channel = Channel { device: device.clone(), raw };
        super::device::non_blocking(channel.as_fd())?;
        Ok(channel)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor is open until it is destroyed.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.device.owner.is_here() {
            return;
        }
        // SAFETY: made in `new`; its CQ, which owns it, is gone.
        unsafe { self.device.verbs.ibv_destroy_comp_channel(self.raw.as_ptr()) };
    }
}

/// A completion queue, with its channel if it can wake somebody.
pub(super) struct Cq {
    device: Arc<Device>,
    raw: NonNull<sys::ibv_cq>,
    // Dropped after the CQ was destroyed, see `drop`.
    channel: Option<Channel>,
    /// Events taken from the channel and not acknowledged yet.
    unacknowledged: u32,
}

// SAFETY: as for `Pd`.
unsafe impl Send for Cq {}

impl Cq {
    pub(super) fn new(device: &Arc<Device>, entries: u32, events: bool) -> Result<Self, VerbsError> {
        let channel = if events { Some(Channel::new(device)?) } else { None };
        let raw_channel = channel.as_ref().map_or(std::ptr::null_mut(), |c| c.raw.as_ptr());
        // Without a channel there are no interrupts.
        let vector = if events { device.next_vector() } else { 0 };
        // SAFETY: context and channel are alive; the device has that vector.
        let raw = unsafe {
            device.verbs.ibv_create_cq(device.raw(), entries as _, std::ptr::null_mut(), raw_channel, vector)
        };
        let raw = NonNull::new(raw).ok_or_else(|| {
            failed(&format!("a completion queue of {entries} entries on {}", device.name()), "")
        })?;
        Ok(Cq { device: device.clone(), raw, channel, unacknowledged: 0 })
    }

    /// Takes completions, as many as there are and `out` holds.
    #[inline]
    pub(super) fn poll(&self, out: &mut [sys::ibv_wc]) -> Result<usize, std::io::Error> {
        // SAFETY: the CQ is alive; `out` is written for at most its length.
        let n = unsafe { sys::ibv_poll_cq(self.raw.as_ptr(), out.len() as _, out.as_mut_ptr()) };
        if n < 0 { Err(failure(n)) } else { Ok(n as usize) }
    }

    /// Asks for an event at the next completion. What completed before must be
    /// polled for once more.
    pub(super) fn arm(&self) -> bool {
        // SAFETY: the CQ is alive.
        self.channel.is_some() && unsafe { sys::ibv_req_notify_cq(self.raw.as_ptr(), 0) } == 0
    }

    pub(super) fn channel(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(|c| c.as_fd())
    }

    /// Takes all events that the channel holds.
    pub(super) fn drain(&mut self) {
        let Some(channel) = &self.channel else { return };
        loop {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the channel is alive and does not block; both places are ours.
            let r =
                unsafe { self.device.verbs.ibv_get_cq_event(channel.raw.as_ptr(), &mut cq, &mut context) };
            if r != 0 {
                break;
            }
            self.unacknowledged += 1;
        }
        // Acknowledging takes a lock: seldom, and all at once (ibv_get_cq_event(3)).
        if self.unacknowledged >= 64 {
            self.acknowledge();
        }
    }

    fn acknowledge(&mut self) {
        if self.unacknowledged > 0 {
            // SAFETY: the CQ is alive and gave `unacknowledged` events.
            unsafe { self.device.verbs.ibv_ack_cq_events(self.raw.as_ptr(), self.unacknowledged) };
            self.unacknowledged = 0;
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if !self.device.owner.is_here() {
            return;
        }
        // It would wait for events that were taken and not acknowledged.
        self.acknowledge();
        // SAFETY: its queue pair, which owns it, is gone; the channel goes after it.
        unsafe { self.device.verbs.ibv_destroy_cq(self.raw.as_ptr()) };
    }
}

/// A reliable connected queue pair with one CQ for both directions.
pub(super) struct Rc {
    pub(super) pd: Arc<Pd>,
    /// None once it was destroyed.
    raw: Option<NonNull<sys::ibv_qp>>,
    pub(super) cq: Cq,
    /// Bytes that a work request may carry inline.
    pub(super) inline: u32,
    pub(super) number: u32,
    /// The port as it was when the queue pair was made.
    pub(super) port: PortState,
    /// What a thread that connects the queue pair has of it.
    lent: Option<Arc<Mutex<Raw>>>,
}

/// Moves a queue pair on, if it is there. `what` names the step in errors.
///
/// # Safety
///
/// The queue pair is alive during the call.
unsafe fn modify(
    device: &Device,
    raw: Option<NonNull<sys::ibv_qp>>,
    what: &str,
    mut attributes: sys::ibv_qp_attr,
    mask: u32,
) -> Result<(), VerbsError> {
    let modified = raw.ok_or_else(|| std::io::ErrorKind::NotConnected.into()).and_then(|raw| {
        // SAFETY: the caller's promise; the attributes are ours.
        match unsafe { device.verbs.ibv_modify_qp(raw.as_ptr(), &mut attributes, mask as _) } {
            0 => Ok(()),
            e => Err(failure(e)),
        }
    });
    modified.map_err(|error| VerbsError::Call { what: what.into(), error, remedy: String::new() })
}

/// The library's handle of a queue pair, until that is destroyed.
struct Raw(Option<NonNull<sys::ibv_qp>>);

// SAFETY: as for `Pd`.
unsafe impl Send for Raw {}

/// A queue pair in the hands of the thread that connects it, while its owner may destroy it.
pub(super) struct Lent {
    device: Arc<Device>,
    raw: Arc<Mutex<Raw>>,
    pub(super) number: u32,
}

impl Lent {
    /// Moves it on. `what` names the step in errors.
    pub(super) fn modify(
        &self,
        what: &str,
        attributes: sys::ibv_qp_attr,
        mask: u32,
    ) -> Result<(), VerbsError> {
        // Held over the call: the owner destroys nothing meanwhile.
        let raw = self.raw.lock().unwrap_or_else(|e| e.into_inner());
        // SAFETY: the queue pair is alive while the lock is held.
        unsafe { modify(&self.device, raw.0, what, attributes, mask) }
    }

    /// To its first state, for another attempt to connect it.
    pub(super) fn again(&self) -> Result<(), VerbsError> {
        let attributes =
            sys::ibv_qp_attr { qp_state: sys::ibv_qp_state::IBV_QPS_RESET, ..Default::default() };
        self.modify("moving the queue pair to RESET", attributes, sys::ibv_qp_attr_mask::IBV_QP_STATE.0)
    }
}

// SAFETY: as for `Pd`.
unsafe impl Send for Rc {}

impl Rc {
    /// Queues of `send` and `receive` work requests; `inline` is what is wished for, the
    /// most first.
    pub(super) fn new(
        pd: &Arc<Pd>,
        cq: Cq,
        send: u32,
        receive: u32,
        inline: &[u32],
    ) -> Result<Self, VerbsError> {
        let port = pd.device.query_port()?;
        let attempt = |inline: u32| {
            // SAFETY: plain data, for which zeroes are "nothing".
            let mut init: sys::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
            init.send_cq = cq.raw.as_ptr();
            init.recv_cq = cq.raw.as_ptr();
            init.cap.max_send_wr = send;
            init.cap.max_recv_wr = receive;
            init.cap.max_send_sge = 1;
            init.cap.max_recv_sge = 1;
            init.cap.max_inline_data = inline;
            init.qp_type = sys::ibv_qp_type::IBV_QPT_RC;
            // SAFETY: domain and CQ are alive.
            let raw = unsafe { pd.device.verbs.ibv_create_qp(pd.raw.as_ptr(), &mut init) };
            NonNull::new(raw).map(|raw| (raw, init.cap.max_inline_data))
        };
        // A device that can't send so much inline refuses; then less, and at last none.
        let most = pd.device.kind.inline.unwrap_or(u32::MAX);
        let made = inline.iter().filter(|bytes| **bytes <= most).find_map(|bytes| attempt(*bytes));
        let (raw, inline) = made.ok_or_else(|| {
            let name = pd.device.name();
            failed(
                &format!("a queue pair of {send} sends and {receive} receives on {name}"),
                "; try fewer slots",
            )
        })?;
        // SAFETY: just made.
        let number = unsafe { raw.as_ref().qp_num };
        Ok(Rc { pd: pd.clone(), raw: Some(raw), cq, inline, number, port, lent: None })
    }

    /// Lends it to the thread that connects it.
    pub(super) fn lend(&mut self) -> Lent {
        let raw = self.lent.insert(Arc::new(Mutex::new(Raw(self.raw)))).clone();
        Lent { device: self.pd.device.clone(), raw, number: self.number }
    }

    /// Moves it on. `what` names the step in errors.
    pub(super) fn modify(
        &self,
        what: &str,
        attributes: sys::ibv_qp_attr,
        mask: u32,
    ) -> Result<(), VerbsError> {
        // SAFETY: the queue pair is alive until `raw` is taken.
        unsafe { modify(&self.pd.device, self.raw, what, attributes, mask) }
    }

    /// The library's handle, until it is destroyed.
    #[inline]
    fn raw(&self) -> std::io::Result<*mut sys::ibv_qp> {
        self.raw.map(NonNull::as_ptr).ok_or_else(|| std::io::ErrorKind::NotConnected.into())
    }

    /// Ends it: what is posted completes with an error, and nothing more is carried out. A work request
    /// of each queue, with these numbers, completes after all others of its queue; they are the last
    /// that are posted. The send writes no bytes to `to`, memory that the peer's key reaches.
    pub(super) fn drain(&self, send: u64, receive: u64, to: Remote) -> Result<(), VerbsError> {
        let posting = |error| VerbsError::Call {
            what: "posting the last work requests".into(),
            error,
            remedy: String::new(),
        };
        // Before the error state: soft-RoCE looks at its receive queue when it comes to that state, and
        // not when a receive is posted.
        self.post_receive(receive).map_err(posting)?;
        // SAFETY: plain data, for which zeroes are "nothing": no bytes are read or written.
        let mut wr: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = send;
        wr.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        wr.send_flags = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
        (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (to.address, to.key);
        // SAFETY: one request, which names no memory of this end.
        let mut last = || unsafe { self.post_send(&mut wr) }.map_err(posting);
        let early = !self.pd.device.kind.posts_in_error;
        if early {
            last()?;
        }
        // SAFETY: plain data; the mask says which fields count.
        let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = sys::ibv_qp_state::IBV_QPS_ERR;
        self.modify("moving the queue pair to ERR", attributes, sys::ibv_qp_attr_mask::IBV_QP_STATE.0)?;
        if early { Ok(()) } else { last() }
    }

    /// Destroys it: the device touches nothing for it any more. Its CQ keeps what has completed.
    pub(super) fn destroy(&mut self) {
        if !self.pd.device.owner.is_here() {
            return;
        }
        if let Some(lent) = self.lent.take() {
            lent.lock().unwrap_or_else(|e| e.into_inner()).0 = None;
        }
        if let Some(raw) = self.raw.take() {
            // SAFETY: made in `new`, and destroyed here alone, before its CQ, which is a field.
            unsafe { self.pd.device.verbs.ibv_destroy_qp(raw.as_ptr()) };
        }
    }

    pub(super) fn is_destroyed(&self) -> bool {
        self.raw.is_none()
    }

    /// What asynchronous events name: libibverbs' handles of the queue pair and of its completion queue.
    pub(super) fn names(&self) -> [usize; 2] {
        [self.raw.map_or(0, |raw| raw.as_ptr().addr()), self.cq.raw.as_ptr().addr()]
    }

    /// Posts a chain of work requests.
    ///
    /// # Safety
    /// `chain` points to requests linked to a null pointer. What they name is
    /// registered and stays so, and unchanged where it is not inline, until they
    /// have completed.
    #[inline]
    pub(super) unsafe fn post_send(&self, chain: *mut sys::ibv_send_wr) -> std::io::Result<()> {
        let (raw, mut bad) = (self.raw()?, std::ptr::null_mut());
        // SAFETY: the queue pair is alive; the rest is the caller's promise.
        match unsafe { sys::ibv_post_send(raw, chain, &mut bad) } {
            0 => Ok(()),
            e => Err(failure(e)),
        }
    }

    /// Posts `n` receives without memory: what arrives is written by the peer, a
    /// receive is only consumed by its immediate data.
    pub(super) fn post_receives(&self, n: u32) -> Result<(), std::io::Error> {
        (0..n).try_for_each(|_| self.post_receive(super::RECEIVE))
    }

    fn post_receive(&self, wr_id: u64) -> Result<(), std::io::Error> {
        // SAFETY: plain data; no scatter list.
        let mut wr: sys::ibv_recv_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = wr_id;
        let mut nothing = sys::ibv_sge { addr: 0, length: 0, lkey: 0 };
        if self.pd.device.kind.receive_sge {
            (wr.sg_list, wr.num_sge) = (&mut nothing, 1);
        }
        let (raw, mut bad) = (self.raw()?, std::ptr::null_mut());
        // SAFETY: the queue pair is alive; the request is copied by the call.
        match unsafe { sys::ibv_post_recv(raw, &mut wr, &mut bad) } {
            0 => Ok(()),
            e => Err(failure(e)),
        }
    }
}

impl Drop for Rc {
    fn drop(&mut self) {
        self.destroy();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{IntoRawFd, OwnedFd};

    use super::super::kinds::{Kind, Protocol};
    use super::super::mock::{self, Mock};
    use super::*;

    unsafe extern "C" fn create_comp_channel(_: *mut sys::ibv_context) -> *mut sys::ibv_comp_channel {
        let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        // SAFETY: plain data.
        let channel = unsafe { std::mem::zeroed() };
        let fd = file.into_raw_fd();
        Box::leak(Box::new(sys::ibv_comp_channel { fd, ..channel }))
    }

    unsafe extern "C" fn destroy_comp_channel(_: *mut sys::ibv_comp_channel) -> std::ffi::c_int {
        0
    }

    #[test]
    fn completion_queues_that_interrupt_take_the_devices_vectors_in_turn() {
        let mock = Mock::with_functions(std::ptr::null_mut(), Kind::of(Protocol::Ib, 0), |verbs, context| {
            verbs.ibv_create_comp_channel = Ok(create_comp_channel);
            verbs.ibv_destroy_comp_channel = Ok(destroy_comp_channel);
            context.num_comp_vectors = 3;
        });
        let vectors = |events: [bool; 5]| {
            mock::take();
            let cqs = events.map(|events| Cq::new(&mock.device, 8, events).unwrap());
            let made: Vec<u64> = mock::take().into_iter().map(|(_, with)| with[1]).collect();
            drop(cqs);
            made
        };
        assert_eq!(vectors([true, true, false, true, true]), [0, 1, 0, 2, 0]);
    }
}
