//! An RDMA device of the tests: a context whose operations note how they are
//! called. What it lacks is missing in its library too.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use pushgate_rdma_core_sys::*;

use super::device::Device;
use super::kinds::{Kind, Protocol};

pub(super) const LKEY: u32 = 0x11;
pub(super) const RKEY: u32 = 0x22;
/// Number of every queue pair.
pub(super) const QP: u32 = 0x33;
/// A subnet of 24 bits of IPv4. The port has its first address.
pub(super) const SUBNET: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0x0a00, 0);
/// Address at index 0 of the port.
pub(super) const GID: &str = "0000:0000:0000:0000:0000:ffff:0a00:0001";

/// LID of a port of InfiniBand.
const LID: u16 = 7;

/// Address at index 0 of a port of InfiniBand: subnet and port.
const INFINIBAND_GID: &str = "fe80:0000:0000:0000:0002:c903:0012:ab35";

type Call = (&'static str, Vec<u64>);

thread_local! {
    /// What was called since `take`. Each test has a thread of its own.
    static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
    /// The call that fails.
    static REFUSED: Cell<&'static str> = const { Cell::new("") };
    /// What its completion queues have.
    static COMPLETIONS: RefCell<VecDeque<ibv_wc>> = const { RefCell::new(VecDeque::new()) };
    /// Asynchronous events that wait.
    static EVENTS: RefCell<VecDeque<(ibv_event_type, usize)>> = const { RefCell::new(VecDeque::new()) };
    /// The device's memory.
    static MEMORY: RefCell<[u8; 4096]> = const { RefCell::new([0; 4096]) };
}

/// The calls since the last time, with what of their arguments matters.
pub fn take() -> Vec<Call> {
    CALLS.take()
}

/// From now on this one fails.
pub(super) fn refuse(name: &'static str) {
    REFUSED.set(name);
}

/// A work request completes.
pub(super) fn complete(wr_id: u64, status: ibv_wc_status) {
    COMPLETIONS.with_borrow_mut(|all| all.push_back(ibv_wc { wr_id, status, ..Default::default() }));
}

/// The device has something to say.
pub(super) fn say(event: ibv_event_type) {
    say_of(event, 0);
}

/// The device has something to say of the queue pair or completion queue with this handle.
pub(super) fn say_of(event: ibv_event_type, handle: usize) {
    EVENTS.with_borrow_mut(|all| all.push_back((event, handle)));
}

fn note<T>(name: &'static str, arguments: &[u64], made: *mut T) -> *mut T {
    CALLS.with_borrow_mut(|calls| calls.push((name, arguments.into())));
    if REFUSED.get() == name { null_mut() } else { made }
}

fn noted(name: &'static str) -> c_int {
    note(name, &[], null_mut::<c_void>());
    0
}

/// What belongs to a context. Never freed: a test's device may outlive its mock.
#[repr(C)]
#[derive(Default)]
struct Objects {
    table: verbs_context,
    pd: ibv_pd,
    dm: ibv_dm,
    cq: ibv_cq,
    qp: ibv_qp,
    mr: ibv_mr,
    /// InfiniBand, and the port's LID.
    infiniband: Option<u16>,
    max_dm_size: u64,
    /// What other functions in place of these keep for the context.
    own: AtomicPtr<c_void>,
}

/// What [`Mock::with_functions`] keeps for a context.
pub(super) fn own(context: *mut ibv_context) -> *mut c_void {
    // SAFETY: see `objects`.
    unsafe { (*objects(context)).own.load(Ordering::Acquire) }
}

fn objects(context: *mut ibv_context) -> *mut Objects {
    // SAFETY: every context here is that of an `Objects`, which is never freed.
    unsafe {
        context.byte_sub(std::mem::offset_of!(Objects, table) + std::mem::offset_of!(verbs_context, context))
    }
    .cast()
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: see `objects`.
    note("alloc_pd", &[], unsafe { &raw mut (*objects(context)).pd })
}

unsafe extern "C" fn dealloc_pd(_: *mut ibv_pd) -> c_int {
    noted("dealloc_pd")
}

pub(super) unsafe extern "C" fn dereg_mr(_: *mut ibv_mr) -> c_int {
    noted("dereg_mr")
}

unsafe extern "C" fn close_device(_: *mut ibv_context) -> c_int {
    noted("close_device")
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the domain is a mock's, see `objects`.
    let mr = unsafe { &raw mut (*objects((*pd).context)).mr };
    note("reg_mr", &[address as u64, length as u64, access as u64], mr)
}

unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the domain is a mock's, see `objects`.
    let mr = unsafe { &raw mut (*objects((*pd).context)).mr };
    note("reg_dmabuf_mr", &[offset, length as u64, iova, fd as u64, access as u64], mr)
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _: *const ibv_query_device_ex_input,
    attributes: *mut ibv_device_attr_ex,
    _: usize,
) -> c_int {
    // SAFETY: see `objects`; the caller passes attributes.
    unsafe { (*attributes).max_dm_size = (*objects(context)).max_dm_size };
    noted("query_device_ex")
}

unsafe extern "C" fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    // SAFETY: see `objects`; the caller passes attributes.
    let (asked, dm) = unsafe { (*attr, &raw mut (*objects(context)).dm) };
    note("alloc_dm", &[asked.length as u64, asked.log_align_req as u64], dm)
}

unsafe extern "C" fn free_dm(_: *mut ibv_dm) -> c_int {
    noted("free_dm")
}

unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    _: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the domain is a mock's, see `objects`.
    let mr = unsafe { &raw mut (*objects((*pd).context)).mr };
    note("reg_dm_mr", &[offset, length as u64, access as u64], mr)
}

unsafe extern "C" fn to_dm(_: *mut ibv_dm, offset: u64, from: *const c_void, length: usize) -> c_int {
    note("memcpy_to_dm", &[offset, length as u64], null_mut::<c_void>());
    // SAFETY: the caller's memory, of that length.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), length) };
    MEMORY.with_borrow_mut(|m| m[offset as usize..][..length].copy_from_slice(from));
    0
}

unsafe extern "C" fn from_dm(to: *mut c_void, _: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    note("memcpy_from_dm", &[offset, length as u64], null_mut::<c_void>());
    // SAFETY: the caller's memory, of that length, initialised.
    let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), length) };
    MEMORY.with_borrow(|m| to.copy_from_slice(&m[offset as usize..][..length]));
    0
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    _: *mut c_void,
    _: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: see `objects`.
    note("create_cq", &[entries as u64, vector as u64], unsafe { &raw mut (*objects(context)).cq })
}

unsafe extern "C" fn destroy_cq(_: *mut ibv_cq) -> c_int {
    noted("destroy_cq")
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the domain is a mock's, see `objects`; the caller passes attributes.
    let (qp, cap) = unsafe { (&raw mut (*objects((*pd).context)).qp, (*init).cap) };
    note("create_qp", &[cap.max_send_wr as u64, cap.max_recv_wr as u64], qp)
}

unsafe extern "C" fn destroy_qp(_: *mut ibv_qp) -> c_int {
    noted("destroy_qp")
}

/// What the kernel wants said of a reliable connected queue pair that comes to this state, and no more
/// (`qp_state_table`, drivers/infiniband/core/verbs.c; the optional ones are nobody's here).
fn wanted(state: ibv_qp_state) -> u32 {
    use ibv_qp_attr_mask as m;
    let of_state: &[ibv_qp_attr_mask] = match state {
        ibv_qp_state::IBV_QPS_INIT => &[m::IBV_QP_PKEY_INDEX, m::IBV_QP_PORT, m::IBV_QP_ACCESS_FLAGS],
        ibv_qp_state::IBV_QPS_RTR => &[
            m::IBV_QP_AV,
            m::IBV_QP_PATH_MTU,
            m::IBV_QP_DEST_QPN,
            m::IBV_QP_RQ_PSN,
            m::IBV_QP_MAX_DEST_RD_ATOMIC,
            m::IBV_QP_MIN_RNR_TIMER,
        ],
        ibv_qp_state::IBV_QPS_ERR => &[],
        _ => &[
            m::IBV_QP_TIMEOUT,
            m::IBV_QP_RETRY_CNT,
            m::IBV_QP_RNR_RETRY,
            m::IBV_QP_SQ_PSN,
            m::IBV_QP_MAX_QP_RD_ATOMIC,
        ],
    };
    of_state.iter().fold(m::IBV_QP_STATE.0, |all, one| all | one.0)
}

unsafe extern "C" fn modify_qp(_: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller passes attributes.
    let a = unsafe { *attr };
    let matters = [a.qp_state.0, a.qp_access_flags, a.dest_qp_num, a.rq_psn, a.sq_psn, a.rnr_retry.into()];
    note("modify_qp", &matters.map(u64::from), null_mut::<c_void>());
    if REFUSED.get() == "modify_qp" || mask as u32 != wanted(a.qp_state) { 22 } else { 0 }
}

unsafe extern "C" fn post_send(_: *mut ibv_qp, wr: *mut ibv_send_wr, _: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller passes a list of requests, which are RDMA reads and writes.
    let (id, opcode, rdma) = unsafe { ((*wr).wr_id, (*wr).opcode.0, (*wr).wr.rdma) };
    note("post_send", &[id, opcode.into(), rdma.remote_addr, rdma.rkey.into()], null_mut::<c_void>());
    0
}

unsafe extern "C" fn post_recv(_: *mut ibv_qp, _: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    0
}

unsafe extern "C" fn poll_cq(_: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    COMPLETIONS.with_borrow_mut(|all| {
        let n = all.len().min(room as usize);
        for (i, wc) in all.drain(..n).enumerate() {
            // SAFETY: the caller has so much room.
            unsafe { to.add(i).write(wc) };
        }
        n as c_int
    })
}

/// An active port.
pub(super) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    _: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: see `objects`; the caller's attributes begin as those of this type do.
    let (infiniband, a) = unsafe { ((*objects(context)).infiniband, &mut *attr.cast::<ibv_port_attr>()) };
    a.state = ibv_port_state::IBV_PORT_ACTIVE;
    (a.active_mtu, a.max_mtu) = (ibv_mtu::IBV_MTU_4096, ibv_mtu::IBV_MTU_4096);
    a.max_msg_sz = 1 << 30;
    a.lid = infiniband.unwrap_or(0);
    a.link_layer = if infiniband.is_some() { IBV_LINK_LAYER_INFINIBAND } else { IBV_LINK_LAYER_ETHERNET };
    0
}

unsafe extern "C" fn get_async_event(_: *mut ibv_context, to: *mut ibv_async_event) -> c_int {
    let Some((event, handle)) = EVENTS.with_borrow_mut(VecDeque::pop_front) else { return -1 };
    // SAFETY: the caller's place.
    unsafe { ((*to).event_type, (*to).element.qp) = (event, std::ptr::without_provenance_mut(handle)) };
    0
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}

unsafe extern "C" fn event_type_str(_: ibv_event_type) -> *const c_char {
    c"an event".as_ptr()
}

unsafe extern "C" fn wc_status_str(_: ibv_wc_status) -> *const c_char {
    c"a status".as_ptr()
}

/// A device and its library.
pub(super) struct Mock {
    pub(super) device: Arc<Device>,
    /// What sysfs would have of its port.
    sysfs: PathBuf,
}

impl Drop for Mock {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.sysfs);
    }
}

impl Mock {
    /// With so much memory of its own.
    pub(super) fn new(max_dm_size: u64) -> Self {
        Self::with(max_dm_size, Kind::of(Protocol::Ib, 0), |_, _| {})
    }

    /// Of a library that knows no dma-bufs.
    pub(super) fn old() -> Self {
        Self::with(0, Kind::of(Protocol::Ib, 0), |verbs, _| {
            // This program itself has no function of libibverbs.
            // SAFETY: nothing is loaded, and nothing is called.
            let none = unsafe { Verbs::from_library(libloading::os::unix::Library::this()) }.unwrap();
            verbs.ibv_reg_dmabuf_mr = none.ibv_reg_dmabuf_mr;
        })
    }

    /// A device of this kind with other functions in place of some, which find `keep` by [`own`].
    pub(super) fn with_functions(
        keep: *mut c_void,
        kind: &'static Kind,
        change: impl FnOnce(&mut Verbs, &mut ibv_context),
    ) -> Self {
        let mock = Self::with(0, kind, change);
        // SAFETY: see `objects`.
        unsafe { (*objects(mock.device.raw())).own.store(keep, Ordering::Release) };
        mock
    }

    /// A device whose port is InfiniBand: the port has a LID, a GID that is no IP address, and no network interface.
    pub(super) fn on_infiniband(mut self) -> Self {
        let device = Arc::get_mut(&mut self.device).expect("nobody has it yet");
        // SAFETY: see `objects`; nobody else has the device.
        unsafe { (*objects(device.raw())).infiniband = Some(LID) };
        device.be_infiniband();
        for (name, text) in [("gids", INFINIBAND_GID), ("gid_attrs/types", "IB/RoCE v1")] {
            std::fs::write(self.sysfs.join(name).join("0"), text).unwrap();
        }
        self
    }

    /// The port's folder.
    pub(super) fn port(&self) -> &Path {
        &self.sysfs
    }

    fn with(
        max_dm_size: u64,
        kind: &'static Kind,
        change: impl FnOnce(&mut Verbs, &mut ibv_context),
    ) -> Self {
        let it: &'static mut Objects = Box::leak(Box::default());
        let context = &raw mut it.table.context;
        it.max_dm_size = max_dm_size;
        it.mr = ibv_mr { lkey: LKEY, rkey: RKEY, ..Default::default() };
        it.pd.context = context;
        it.dm.context = context;
        it.cq.context = context;
        it.qp.context = context;
        it.qp.qp_num = QP;
        it.table.context.ops.poll_cq = Some(poll_cq);
        it.table.context.ops.post_send = Some(post_send);
        it.table.context.ops.post_recv = Some(post_recv);
        it.dm.memcpy_to_dm = Some(to_dm);
        it.dm.memcpy_from_dm = Some(from_dm);
        it.table.sz = size_of::<verbs_context>();
        // How a context says that it has the table of extended operations.
        it.table.context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
        it.table.query_device_ex = Some(query_device_ex);
        it.table.alloc_dm = Some(alloc_dm);
        it.table.free_dm = Some(free_dm);
        it.table.reg_dm_mr = Some(reg_dm_mr);

        // This program itself has no function of libibverbs, so each is missing
        // until it is set here.
        // SAFETY: nothing is loaded; functions are set with the types of the fields.
        let mut verbs = unsafe { Verbs::from_library(libloading::os::unix::Library::this()) }.unwrap();
        verbs.ibv_alloc_pd = Ok(alloc_pd);
        verbs.ibv_dealloc_pd = Ok(dealloc_pd);
        verbs.ibv_reg_mr = Ok(reg_mr);
        verbs.ibv_dereg_mr = Ok(dereg_mr);
        verbs.ibv_close_device = Ok(close_device);
        verbs.ibv_create_cq = Ok(create_cq);
        verbs.ibv_destroy_cq = Ok(destroy_cq);
        verbs.ibv_create_qp = Ok(create_qp);
        verbs.ibv_destroy_qp = Ok(destroy_qp);
        verbs.ibv_modify_qp = Ok(modify_qp);
        verbs.ibv_query_port = Ok(query_port);
        verbs.ibv_get_async_event = Ok(get_async_event);
        verbs.ibv_ack_async_event = Ok(ack_async_event);
        verbs.ibv_event_type_str = Ok(event_type_str);
        verbs.ibv_wc_status_str = Ok(wc_status_str);
        verbs.ibv_reg_dmabuf_mr = Ok(reg_dmabuf_mr);
        change(&mut verbs, &mut it.table.context);
        let context = NonNull::new(context).expect("the address of a field");
        let sysfs = sysfs();
        let device = Device::mock(Box::leak(Box::new(verbs)), context, sysfs.clone(), kind);
        Mock { device: Arc::new(device), sysfs }
    }
}

/// The port of this folder has these addresses at their places, and no others. They are of no network interface.
pub(super) fn has_addresses(port: &Path, all: &[(u32, Ipv6Addr)]) {
    let _ = std::fs::remove_dir_all(port.join("gid_attrs/ndevs"));
    let text = |address: &Ipv6Addr| address.to_string();
    writes(port, "gids", all.iter().map(|(index, address)| (*index, text(address))));
    writes(port, "gid_attrs/types", all.iter().map(|(index, _)| (*index, "RoCE v2".into())));
}

/// The address at this place is of a network interface that every host has, and of this network namespace.
pub(super) fn has_interface(port: &Path, index: u32) {
    writes(port, "gid_attrs/ndevs", [(index, "lo".into())].into_iter());
}

/// The port has the partitions of these keys.
pub(super) fn has_partitions(port: &Path, keys: &[u16]) {
    writes(port, "pkeys", (0..).zip(keys.iter().map(|key| format!("{key:#06x}"))));
}

/// A folder has these files, and no others.
fn writes(port: &Path, folder: &str, files: impl Iterator<Item = (u32, String)>) {
    let folder = port.join(folder);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    files.for_each(|(index, text)| std::fs::write(folder.join(index.to_string()), text).unwrap());
}

/// A folder of its own, with one address.
fn sysfs() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("pushgate-mock-{}-{number}", std::process::id()));
    for (name, text) in [("gids", GID), ("gid_attrs/types", "RoCE v2")] {
        std::fs::create_dir_all(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("0"), text).unwrap();
    }
    folder
}

/// Makes memory for a test.
pub(super) fn allocate(
    name: &str,
    bytes: usize,
) -> Result<pushgate_driver_shim::memory::SharedMemory, pushgate_driver_shim::ShimError> {
    pushgate_driver_shim::memory::SharedMemory::builder(name, bytes).create()
}
