//! Compares the functions of `src/inlines.rs` with the real inlines of `<infiniband/verbs.h>`: both
//! drive the same contexts, whose operations record how they are called. Also compares layouts with
//! C's.

mod common;

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};
use std::ptr;

use libloading::Library;
use pushgate_rdma_core_sys::*;

const EINVAL: c_int = 22;
const ENOSYS: c_int = 38;
const EOPNOTSUPP: c_int = 95;

type Call = (String, Vec<u64>);

thread_local! {
    /// The calls since `take`. Each test has a thread of its own.
    static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
    /// What an operation that returns a number returns.
    static RESULT: Cell<c_int> = const { Cell::new(0) };
    /// The size that the caller's language gives to the structure that it passes.
    static SIZE: Cell<usize> = const { Cell::new(0) };
}

fn note(name: &str, arguments: &[u64]) -> c_int {
    CALLS.with_borrow_mut(|calls| calls.push((name.into(), arguments.into())));
    RESULT.get()
}

/// Called by the stand-ins of inlines.c.
unsafe extern "C" fn note_from_c(name: *const c_char, arguments: *const u64, count: usize) {
    // SAFETY: inlines.c passes a literal, and an array of that length.
    let (name, arguments) = unsafe { (CStr::from_ptr(name), std::slice::from_raw_parts(arguments, count)) };
    note(name.to_str().unwrap(), arguments);
}

fn p<T>(pointer: *const T) -> u64 {
    pointer.addr() as u64
}

unsafe extern "C" fn post_send(q: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    note("post_send", &[p(q), p(wr), p(bad)])
}

unsafe extern "C" fn post_recv(q: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    note("post_recv", &[p(q), p(wr), p(bad)])
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the tests pass room for one completion.
    unsafe { (*wc).wr_id = 99 };
    note("poll_cq", &[p(cq), entries as u64, p(wc)])
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited: c_int) -> c_int {
    note("req_notify_cq", &[p(cq), solicited as u64])
}

unsafe extern "C" fn query_port(c: *mut ibv_context, port: u8, a: *mut ibv_port_attr, size: usize) -> c_int {
    // SAFETY: the tests pass attributes.
    unsafe { (*a).lid = 0x4321 };
    note("query_port", &[p(c), port as u64, p(a), (size == SIZE.get()) as u64])
}

unsafe extern "C" fn query_device_ex(
    c: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    a: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: the tests pass attributes.
    unsafe { (*a).max_dm_size = 4096 };
    note("query_device_ex", &[p(c), p(input), p(a), (size == SIZE.get()) as u64])
}

unsafe extern "C" fn alloc_dm(c: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    note("alloc_dm", &[p(c), p(attr)]);
    ptr::without_provenance_mut(0x8000)
}

unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    note("free_dm", &[p(dm)])
}

unsafe extern "C" fn to_dm(dm: *mut ibv_dm, offset: u64, host: *const c_void, length: usize) -> c_int {
    note("memcpy_to_dm", &[p(dm), offset, p(host), length as u64])
}

unsafe extern "C" fn from_dm(host: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    note("memcpy_from_dm", &[p(host), p(dm), offset, length as u64])
}

unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    note("reg_dm_mr", &[p(pd), p(dm), offset, length as u64, access as u64]);
    ptr::without_provenance_mut(0x9000)
}

/// A context with all operations, and the objects that belong to it.
#[repr(C)]
#[derive(Default)]
struct Objects {
    table: verbs_context,
    qp: ibv_qp,
    cq: ibv_cq,
    pd: ibv_pd,
    dm: ibv_dm,
    send: ibv_send_wr,
    recv: ibv_recv_wr,
    dm_attr: ibv_alloc_dm_attr,
}

/// The objects, reached only through pointers, as C reaches them.
struct Mock(*mut Objects);

impl Mock {
    fn new() -> Mock {
        let mock = Mock(Box::into_raw(Box::default()));
        let context = mock.context();
        // SAFETY: the objects are ours alone until the Mock is dropped, here and below.
        unsafe {
            let table = &mut (*mock.0).table;
            table.sz = size_of::<verbs_context>();
            table.context.abi_compat = ptr::without_provenance_mut(usize::MAX);
            table.query_port = Some(query_port);
            table.query_device_ex = Some(query_device_ex);
            table.alloc_dm = Some(alloc_dm);
            table.free_dm = Some(free_dm);
            table.reg_dm_mr = Some(reg_dm_mr);
            let ops = &mut table.context.ops;
            ops.post_send = Some(post_send);
            ops.post_recv = Some(post_recv);
            ops.poll_cq = Some(poll_cq);
            ops.req_notify_cq = Some(req_notify_cq);
            (*mock.0).qp.context = context;
            (*mock.0).cq.context = context;
            (*mock.0).pd.context = context;
            (*mock.0).dm.context = context;
            (*mock.0).dm.memcpy_to_dm = Some(to_dm);
            (*mock.0).dm.memcpy_from_dm = Some(from_dm);
        }
        mock
    }

    fn change(&self, change: impl FnOnce(&mut Objects)) {
        // SAFETY: no call is under way.
        change(unsafe { &mut *self.0 });
    }

    fn context(&self) -> *mut ibv_context {
        // SAFETY: the objects exist until the Mock is dropped, here and below.
        unsafe { &raw mut (*self.0).table.context }
    }

    fn qp(&self) -> *mut ibv_qp {
        // SAFETY: see context().
        unsafe { &raw mut (*self.0).qp }
    }

    fn cq(&self) -> *mut ibv_cq {
        // SAFETY: see context().
        unsafe { &raw mut (*self.0).cq }
    }

    fn pd(&self) -> *mut ibv_pd {
        // SAFETY: see context().
        unsafe { &raw mut (*self.0).pd }
    }

    fn dm(&self) -> *mut ibv_dm {
        // SAFETY: see context().
        unsafe { &raw mut (*self.0).dm }
    }

    fn send(&self) -> *mut ibv_send_wr {
        // SAFETY: see context().
        unsafe { &raw mut (*self.0).send }
    }

    fn recv(&self) -> *mut ibv_recv_wr {
        // SAFETY: see context().
        unsafe { &raw mut (*self.0).recv }
    }

    fn dm_attr(&self) -> *mut ibv_alloc_dm_attr {
        // SAFETY: see context().
        unsafe { &raw mut (*self.0).dm_attr }
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a box, and no other pointer to it remains.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Room for what an inline writes: more than any of the header's structures, at any alignment.
type Out = [u64; 256];
const FILL: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// Everything that can be observed of a call.
#[derive(Debug, PartialEq)]
struct Seen {
    result: u64,
    errno: c_int,
    calls: Vec<Call>,
    /// The first bytes of what the call may have written.
    out: Vec<u8>,
}

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
}

/// Makes a call that returns `result` and may write `size` bytes.
fn seen(out: *mut Out, size: usize, caller_size: usize, call: impl FnOnce() -> u64) -> Seen {
    // SAFETY: `out` is the test's own array; errno belongs to this thread.
    unsafe {
        *out = [FILL; 256];
        *__errno_location() = 0;
    }
    CALLS.take();
    SIZE.set(caller_size);
    let result = call();
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap();
    // SAFETY: the test's own array of 256 words, which is more than any size here.
    let out = unsafe { std::slice::from_raw_parts(out.cast::<u8>(), size) }.to_vec();
    Seen { result, errno, calls: CALLS.take(), out }
}

/// inlines.c, compiled.
struct C {
    library: Library,
    /// The stand-ins of inlines.c, used as if they were libibverbs.
    verbs: Verbs,
}

impl C {
    /// Compiles inlines.c. `None`, and a skip, if that is impossible on this machine.
    fn compile(name: &str, options: &[&str]) -> Option<C> {
        if let Some(reason) = common::missing(true) {
            pushgate_tests::skip(&format!("C's inlines can't be compared with: {reason}"));
            return None;
        }
        let path = common::shared_object(name, include_str!("inlines.c"), options);
        // SAFETY: inlines.c has no constructors, and its stand-ins have the types of verbs.h.
        let (library, verbs) = unsafe { (Library::new(&path), Verbs::new(&path)) };
        let c = C { library: library.unwrap(), verbs: verbs.unwrap() };
        c.will_return(0);
        Some(c)
    }

    /// Sets what operations and stand-ins return from now on.
    fn will_return(&self, result: c_int) {
        RESULT.set(result);
        type Note = unsafe extern "C" fn(*const c_char, *const u64, usize);
        let set = self.function::<unsafe extern "C" fn(Note, c_int)>("c_set");
        // SAFETY: this is c_set's type.
        unsafe { set(note_from_c, result) };
    }

    fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the types are those of inlines.c, from which each caller took them.
        *unsafe { self.library.get::<F>(name) }.unwrap()
    }

    fn size(&self, name: &str) -> usize {
        // SAFETY: the symbol is a uint64_t in inlines.c.
        unsafe { **self.library.get::<*const u64>(name).unwrap() as usize }
    }
}

/// Calls the C function of this name and our Rust function with these arguments, checks that they
/// do the same, and evaluates to what they did.
macro_rules! both {
    ($c:expr, $rust:expr, $name:literal($($argument:expr => $type:ty),*) -> $result:ty,
     out: $out:expr, $size:expr, $c_size:expr) => {{
        let c = $c.function::<unsafe extern "C" fn($($type),*) -> $result>($name);
        // SAFETY: this is the function's type in inlines.c, and the arguments belong to a mock.
        let of_c = seen($out, $size, $c_size, || unsafe { c($($argument),*) }.bits());
        // SAFETY: the arguments belong to the same mock, whose objects exist and which allows
        // anything to be written for which `out` has room.
        let of_rust = seen($out, $size, $size, || unsafe { $rust }.bits());
        assert_eq!(of_rust, of_c, "{}", $name);
        of_rust
    }};
}

/// A result as a number, the same type for all.
trait Bits {
    fn bits(self) -> u64;
}

impl Bits for c_int {
    fn bits(self) -> u64 {
        self as u64
    }
}

impl<T> Bits for *mut T {
    fn bits(self) -> u64 {
        p(self)
    }
}

fn called(name: &str, arguments: &[u64]) -> Vec<Call> {
    vec![(name.into(), arguments.into())]
}

#[test]
fn post_poll_and_notify_go_through_the_contexts_table() {
    let Some(c) = C::compile("post.so", &[]) else { return };
    let mock = Mock::new();
    let mut room: Out = [0; 256];
    let out = &raw mut room;
    for result in [0, 12] {
        c.will_return(result);
        let bad = out.cast();
        let it = both!(c, ibv_post_send(mock.qp(), mock.send(), bad),
            "c_post_send"(mock.qp() => *mut ibv_qp, mock.send() => *mut ibv_send_wr, bad => *mut *mut ibv_send_wr)
            -> c_int, out: out, 8, 8);
        assert_eq!(it.calls, called("post_send", &[p(mock.qp()), p(mock.send()), p(out)]));
        assert_eq!(it.result, result as u64);

        let bad = out.cast();
        let it = both!(c, ibv_post_recv(mock.qp(), mock.recv(), bad),
            "c_post_recv"(mock.qp() => *mut ibv_qp, mock.recv() => *mut ibv_recv_wr, bad => *mut *mut ibv_recv_wr)
            -> c_int, out: out, 8, 8);
        assert_eq!(it.calls, called("post_recv", &[p(mock.qp()), p(mock.recv()), p(out)]));

        let it = both!(c, ibv_req_notify_cq(mock.cq(), 1),
            "c_req_notify_cq"(mock.cq() => *mut ibv_cq, 1 => c_int) -> c_int, out: out, 0, 0);
        assert_eq!(it.calls, called("req_notify_cq", &[p(mock.cq()), 1]));
    }
    for result in [0, 3, -1] {
        c.will_return(result);
        let it = both!(c, ibv_poll_cq(mock.cq(), 16, out.cast()),
            "c_poll_cq"(mock.cq() => *mut ibv_cq, 16 => c_int, out.cast() => *mut ibv_wc) -> c_int,
            out: out, size_of::<ibv_wc>(), size_of::<ibv_wc>());
        assert_eq!(it.calls, called("poll_cq", &[p(mock.cq()), 16, p(out)]));
        assert_eq!(it.result, result as u64);
        assert_eq!(it.out[..8], 99_u64.to_ne_bytes());
    }
}

/// C calls the null pointer, so there is nothing to compare with.
#[test]
fn an_operation_that_a_provider_lacks_is_an_error_and_no_crash() {
    let mock = Mock::new();
    mock.change(|objects| {
        objects.table.context.ops = ibv_context_ops::default();
        (objects.dm.memcpy_to_dm, objects.dm.memcpy_from_dm) = (None, None);
    });
    let (mut send, mut recv) = (ptr::null_mut(), ptr::null_mut());
    let mut host = [0_u8; 8];
    let host = host.as_mut_ptr().cast::<c_void>();
    // SAFETY: a mock's objects, and room for everything that is written.
    unsafe {
        assert_eq!(ibv_post_send(mock.qp(), mock.send(), &mut send), EOPNOTSUPP);
        assert_eq!(ibv_post_recv(mock.qp(), mock.recv(), &mut recv), EOPNOTSUPP);
        assert_eq!(ibv_poll_cq(mock.cq(), 1, ptr::null_mut()), -EOPNOTSUPP);
        assert_eq!(ibv_req_notify_cq(mock.cq(), 0), EOPNOTSUPP);
        assert_eq!(ibv_memcpy_to_dm(mock.dm(), 0, host, 8), EOPNOTSUPP);
        assert_eq!(ibv_memcpy_from_dm(host, mock.dm(), 0, 8), EOPNOTSUPP);
    }
    assert_eq!((send, recv), (mock.send(), mock.recv()), "nothing was posted, so the first is the bad one");
}

/// Contexts that have the operation at `offset`, and contexts that for one of several reasons have
/// not.
fn contexts(offset: usize, remove: fn(&mut verbs_context)) -> Vec<(&'static str, bool, Mock)> {
    let mock = |change: &dyn Fn(&mut verbs_context)| {
        let mock = Mock::new();
        mock.change(|objects| change(&mut objects.table));
        mock
    };
    let size = size_of::<verbs_context>() - offset;
    vec![
        ("all", true, mock(&|_| ())),
        ("of a later library", true, mock(&|table| table.sz += 64)),
        ("just long enough", true, mock(&|table| table.sz = size)),
        ("one byte short", false, mock(&|table| table.sz = size - 1)),
        ("empty", false, mock(&|table| table.sz = 0)),
        ("no verbs_context", false, mock(&|table| table.context.abi_compat = ptr::null_mut())),
        (
            "an old library's own pointer",
            false,
            mock(&|table| table.context.abi_compat = ptr::without_provenance_mut(usize::MAX - 1)),
        ),
        ("null", false, mock(&remove)),
    ]
}

#[test]
fn query_port_prefers_the_extended_operation() {
    let Some(c) = C::compile("port.so", &[]) else { return };
    let mut room: Out = [0; 256];
    let out = &raw mut room;
    let size = size_of::<ibv_port_attr>();
    for (name, extended, mock) in
        contexts(offset_of!(verbs_context, query_port), |table| table.query_port = None)
    {
        for result in [0, EINVAL] {
            c.will_return(result);
            let it = both!(c, ibv_query_port(&c.verbs, mock.context(), 2, out.cast()),
                "c_query_port"(mock.context() => *mut ibv_context, 2 => u8, out.cast() => *mut ibv_port_attr) -> c_int,
                out: out, size, c.size("c_port_attr_size"));
            let context = p(mock.context());
            let calls = match extended {
                true => called("query_port", &[context, 2, p(out), 1]),
                false => called("ibv_query_port", &[context, 2, p(out)]),
            };
            assert_eq!((it.calls, it.result), (calls, result as u64), "{name}");
            // What the old function leaves alone must not keep its former content.
            let link_layer = it.out[offset_of!(ibv_port_attr, link_layer)];
            assert_eq!(link_layer, if extended { 0xaa } else { IBV_LINK_LAYER_UNSPECIFIED }, "{name}");
        }
    }
}

#[test]
fn query_device_ex_falls_back_to_the_first_attributes() {
    let Some(c) = C::compile("device.so", &[]) else { return };
    let mut room: Out = [0; 256];
    let out = &raw mut room;
    let size = size_of::<ibv_device_attr_ex>();
    let (plain, asks) = (ibv_query_device_ex_input::default(), ibv_query_device_ex_input { comp_mask: 1 });
    let remove = |table: &mut verbs_context| table.query_device_ex = None;
    for (name, extended, mock) in contexts(offset_of!(verbs_context, query_device_ex), remove) {
        for result in [0, EINVAL, ENOSYS, EOPNOTSUPP] {
            for input in [ptr::null(), &raw const plain, &raw const asks] {
                c.will_return(result);
                let it = both!(c, ibv_query_device_ex(&c.verbs, mock.context(), input, out.cast()),
                    "c_query_device_ex"(mock.context() => *mut ibv_context,
                        input => *const ibv_query_device_ex_input, out.cast() => *mut ibv_device_attr_ex) -> c_int,
                    out: out, size, c.size("c_device_attr_size"));
                let context = p(mock.context());
                let mut calls = Vec::new();
                if input != &raw const asks {
                    if extended {
                        calls.extend(called("query_device_ex", &[context, p(input), p(out), 1]));
                    }
                    if !extended || result == ENOSYS || result == EOPNOTSUPP {
                        calls.extend(called("ibv_query_device", &[context, p(out)]));
                    }
                }
                let wanted = if input == &raw const asks { EINVAL } else { result };
                assert_eq!((it.calls, it.result), (calls, wanted as u64), "{name}");
            }
        }
    }
}

#[test]
fn query_gid_ex_passes_the_size_of_an_entry() {
    let Some(c) = C::compile("gid.so", &[]) else { return };
    let mock = Mock::new();
    let mut room: Out = [0; 256];
    let out = &raw mut room;
    let size = size_of::<ibv_gid_entry>();
    for result in [0, EINVAL] {
        c.will_return(result);
        let it = both!(c, ibv_query_gid_ex(&c.verbs, mock.context(), 1, 3, out.cast(), 0),
            "c_query_gid_ex"(mock.context() => *mut ibv_context, 1 => u32, 3 => u32,
                out.cast() => *mut ibv_gid_entry, 0 => u32) -> c_int,
            out: out, size, size);
        let arguments = [p(mock.context()), 1, 3, p(out), 0, size as u64];
        assert_eq!((it.calls, it.result), (called("_ibv_query_gid_ex", &arguments), result as u64));
    }
}

const PLAIN: c_uint =
    ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
const RELAXED: c_uint =
    ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 | ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;

#[test]
fn optional_access_flags_take_the_newer_function() {
    let Some(c) = C::compile("mr.so", &[]) else { return };
    let mock = Mock::new();
    let mut room: Out = [0; 256];
    let out = &raw mut room;
    let (pd, address) = (mock.pd(), ptr::without_provenance_mut::<c_void>(0x10_0000));
    let it = both!(c, ibv_reg_mr(&c.verbs, pd, address, 64, PLAIN),
        "c_reg_mr_plain"(pd => *mut ibv_pd, address => *mut c_void, 64 => usize) -> *mut ibv_mr, out: out, 0, 0);
    assert_eq!(it.calls, called("ibv_reg_mr", &[p(pd), 0x10_0000, 64, PLAIN as u64]));
    let it = both!(c, ibv_reg_mr(&c.verbs, pd, address, 64, RELAXED),
        "c_reg_mr_relaxed"(pd => *mut ibv_pd, address => *mut c_void, 64 => usize) -> *mut ibv_mr, out: out, 0, 0);
    assert_eq!(it.calls, called("ibv_reg_mr_iova2", &[p(pd), 0x10_0000, 64, 0x10_0000, RELAXED as u64]));
    assert_ne!(it.result, 0);

    // C has no such inline, so there is nothing to compare with.
    // SAFETY: the stand-in uses none of the arguments.
    let it = seen(out, 0, 0, || p(unsafe { ibv_reg_dmabuf_mr(&c.verbs, pd, 1, 2, 3, 4, 5) }));
    assert_eq!(it.calls, called("ibv_reg_dmabuf_mr", &[p(pd), 1, 2, 3, 4, 5]));
}

/// A program linked to such a library would not start, so there is nothing to compare with.
#[test]
fn a_library_without_the_optional_functions_is_made_do_with() {
    let Some(c) = C::compile("old.so", &["-DOLD_LIBRARY"]) else { return };
    let mock = Mock::new();
    let mut room: Out = [0; 256];
    let out = &raw mut room;
    let (pd, address) = (mock.pd(), ptr::without_provenance_mut::<c_void>(0x10_0000));
    // SAFETY: the stand-ins use none of the arguments.
    let it = seen(out, 0, 0, || p(unsafe { ibv_reg_mr(&c.verbs, pd, address, 64, RELAXED) }));
    let plain = RELAXED & !IBV_ACCESS_OPTIONAL_RANGE;
    assert_eq!(it.calls, called("ibv_reg_mr", &[p(pd), 0x10_0000, 64, plain as u64]));
    // SAFETY: the stand-ins use none of the arguments.
    let it = seen(out, 0, 0, || p(unsafe { ibv_reg_dmabuf_mr(&c.verbs, pd, 1, 2, 3, 4, 5) }));
    assert_eq!((it.result, it.errno, it.calls), (0, EOPNOTSUPP, vec![]));
    // SAFETY: the stand-ins use none of the arguments.
    let it =
        seen(out, 0, 0, || unsafe { ibv_query_gid_ex(&c.verbs, mock.context(), 1, 3, out.cast(), 0) as u64 });
    assert_eq!((it.result, it.calls), (EOPNOTSUPP as u64, vec![]));
}

#[test]
fn device_memory_goes_through_the_extended_table() {
    let Some(c) = C::compile("dm.so", &[]) else { return };
    let mut room: Out = [0; 256];
    let out = &raw mut room;
    let result_of = |extended: bool, result: u64| if extended { (result, 0) } else { (0, EOPNOTSUPP) };
    let calls_of = |extended: bool, name, arguments: &[u64]| match extended {
        true => called(name, arguments),
        false => vec![],
    };

    let all = contexts(offset_of!(verbs_context, alloc_dm), |table| table.alloc_dm = None);
    for (name, extended, mock) in all {
        let it = both!(c, ibv_alloc_dm(mock.context(), mock.dm_attr()),
            "c_alloc_dm"(mock.context() => *mut ibv_context, mock.dm_attr() => *mut ibv_alloc_dm_attr)
            -> *mut ibv_dm, out: out, 0, 0);
        assert_eq!((it.result, it.errno), result_of(extended, 0x8000), "{name}");
        assert_eq!(
            it.calls,
            calls_of(extended, "alloc_dm", &[p(mock.context()), p(mock.dm_attr())]),
            "{name}"
        );
    }

    let all = contexts(offset_of!(verbs_context, reg_dm_mr), |table| table.reg_dm_mr = None);
    for (name, extended, mock) in all {
        let it = both!(c, ibv_reg_dm_mr(mock.pd(), mock.dm(), 8, 64, PLAIN),
            "c_reg_dm_mr"(mock.pd() => *mut ibv_pd, mock.dm() => *mut ibv_dm, 8 => u64, 64 => usize,
                PLAIN => c_uint) -> *mut ibv_mr, out: out, 0, 0);
        assert_eq!((it.result, it.errno), result_of(extended, 0x9000), "{name}");
        let arguments = [p(mock.pd()), p(mock.dm()), 8, 64, PLAIN as u64];
        assert_eq!(it.calls, calls_of(extended, "reg_dm_mr", &arguments), "{name}");
    }

    let all = contexts(offset_of!(verbs_context, free_dm), |table| table.free_dm = None);
    for (name, extended, mock) in all {
        for result in [0, EINVAL] {
            c.will_return(result);
            let it = both!(c, ibv_free_dm(mock.dm()),
                "c_free_dm"(mock.dm() => *mut ibv_dm) -> c_int, out: out, 0, 0);
            assert_eq!(it.result, if extended { result } else { EOPNOTSUPP } as u64, "{name}");
            assert_eq!(it.calls, calls_of(extended, "free_dm", &[p(mock.dm())]), "{name}");
        }
    }

    let mock = Mock::new();
    for result in [0, EINVAL] {
        c.will_return(result);
        let it = both!(c, ibv_memcpy_to_dm(mock.dm(), 8, out.cast(), 64),
            "c_memcpy_to_dm"(mock.dm() => *mut ibv_dm, 8 => u64, out.cast() => *const c_void, 64 => usize) -> c_int,
            out: out, 0, 0);
        assert_eq!(it.calls, called("memcpy_to_dm", &[p(mock.dm()), 8, p(out), 64]));
        let it = both!(c, ibv_memcpy_from_dm(out.cast(), mock.dm(), 8, 64),
            "c_memcpy_from_dm"(out.cast() => *mut c_void, mock.dm() => *mut ibv_dm, 8 => u64, 64 => usize) -> c_int,
            out: out, 0, 0);
        assert_eq!(it.calls, called("memcpy_from_dm", &[p(out), p(mock.dm()), 8, 64]));
        assert_eq!(it.result, result as u64);
    }
}

/// C expressions, with Rust's values for them.
macro_rules! layout {
    ($($tag:tt $name:ident { $($($field:ident).+),* $(,)? })*) => { vec![$(
        (format!("sizeof({} {})", stringify!($tag), stringify!($name)), size_of::<$name>() as u64),
        $((
            // bindgen gives a name to what is anonymous in C.
            format!("offsetof({} {}, {})", stringify!($tag), stringify!($name),
                [$(stringify!($field)),+].join(".").replace("__bindgen_anon_1.", "")),
            offset_of!($name, $($field).+) as u64,
        ),)*
    )*] };
}

/// The table of operations, whose end stays in place when the head grows.
macro_rules! operations {
    ($($field:ident)*) => { vec![$((
        format!("sizeof(struct verbs_context) - offsetof(struct verbs_context, {})", stringify!($field)),
        (size_of::<verbs_context>() - offset_of!(verbs_context, $field)) as u64,
    )),*] };
}

macro_rules! constants {
    ($($type:ident { $($name:ident)* })*) => { vec![$($(
        (stringify!($name).to_string(), $type::$name.0 as u64)
    ),*),*] };
}

#[test]
fn layouts_and_constants_are_those_of_c() {
    if let Some(reason) = common::missing(true) {
        return pushgate_tests::skip(&format!("C's layouts can't be compared with: {reason}"));
    }
    let mut numbers = layout! {
        union ibv_gid { raw, global.subnet_prefix, global.interface_id }
        struct ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        struct ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        struct ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        struct ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        struct ibv_device_attr { fw_ver, max_qp, max_qp_wr, max_cqe, atomic_cap, phys_port_cnt }
        struct ibv_alloc_dm_attr { length, log_align_req, comp_mask }
        struct ibv_dm { context, memcpy_to_dm, memcpy_from_dm, comp_mask }
        struct ibv_pd { context, handle }
        struct ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        struct ibv_comp_channel { context, fd, refcnt }
        struct ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed }
        struct ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond }
        struct ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        struct ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        struct ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        struct ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        struct ibv_qp_attr {
            qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, pkey_index,
            max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
            rate_limit,
        }
        struct ibv_sge { addr, length, lkey }
        struct ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, __bindgen_anon_1.imm_data,
            wr.rdma.remote_addr, wr.rdma.rkey, wr.atomic.compare_add, wr.atomic.swap, wr.atomic.rkey,
        }
        struct ibv_recv_wr { wr_id, next, sg_list, num_sge }
        struct ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, __bindgen_anon_1.imm_data, qp_num, src_qp, wc_flags,
        }
        struct ibv_async_event { element.qp, element.port_num, event_type }
        struct ibv_port_attr { state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, lid, link_layer, port_cap_flags2 }
        struct ibv_device_attr_ex { orig_attr, comp_mask, odp_caps, max_dm_size, phys_port_cnt_ex }
    };
    numbers.extend(operations! {
        query_port reg_dm_mr alloc_dm free_dm create_cq_ex query_device_ex create_qp_ex sz context
    });
    numbers.extend(constants! {
        ibv_qp_state { IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_ERR }
        ibv_qp_type { IBV_QPT_RC }
        ibv_qp_attr_mask { IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_AV IBV_QP_PATH_MTU IBV_QP_DEST_QPN }
        ibv_wr_opcode { IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_WR_SEND IBV_WR_ATOMIC_FETCH_AND_ADD }
        ibv_send_flags { IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_INLINE }
        ibv_wc_status { IBV_WC_SUCCESS IBV_WC_WR_FLUSH_ERR IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR }
        ibv_wc_opcode { IBV_WC_SEND IBV_WC_RDMA_WRITE IBV_WC_RECV IBV_WC_RECV_RDMA_WITH_IMM }
        ibv_access_flags { IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_RELAXED_ORDERING }
        ibv_event_type { IBV_EVENT_QP_FATAL IBV_EVENT_PORT_ERR IBV_EVENT_DEVICE_FATAL }
        ibv_port_state { IBV_PORT_ACTIVE }
        ibv_mtu { IBV_MTU_4096 }
    });
    // Constants that no generated file has.
    numbers.extend([
        ("IBV_LINK_LAYER_UNSPECIFIED".into(), IBV_LINK_LAYER_UNSPECIFIED as u64),
        ("IBV_LINK_LAYER_INFINIBAND".into(), IBV_LINK_LAYER_INFINIBAND as u64),
        ("IBV_LINK_LAYER_ETHERNET".into(), IBV_LINK_LAYER_ETHERNET as u64),
        ("IBV_ACCESS_OPTIONAL_RANGE".into(), IBV_ACCESS_OPTIONAL_RANGE as u64),
        ("sizeof(pthread_mutex_t)".into(), size_of::<pthread_mutex_t>() as u64),
        ("sizeof(pthread_cond_t)".into(), size_of::<pthread_cond_t>() as u64),
    ]);

    let mut text = String::from("#include <infiniband/verbs.h>\nconst uint64_t numbers[] = {\n");
    for (expression, _) in &numbers {
        text += &format!("\t{expression},\n");
    }
    let path = common::shared_object("layout.so", &(text + "};\n"), &[]);
    // SAFETY: the library has no code; the array is as long as the list from which it was made.
    let seen = unsafe {
        let library = Library::new(path).unwrap();
        let first = *library.get::<*const u64>("numbers").unwrap();
        std::slice::from_raw_parts(first, numbers.len()).to_vec()
    };
    for ((expression, rust), c) in numbers.iter().zip(seen) {
        // A later header adds fields at the end of these two; a call passes the size that it means.
        let grows =
            expression == "sizeof(struct ibv_port_attr)" || expression == "sizeof(struct ibv_device_attr_ex)";
        assert!(*rust == c || grows && *rust < c, "{expression}: Rust {rust}, C {c}");
    }
}
