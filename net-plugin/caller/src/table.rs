//! A plugin's shared library, and the calls of its table: those of v8 to v12, under one interface.

#![allow(clippy::not_unsafe_ptr_arg_deref)] // What the plugin handed out goes back to it as it came.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::io::Write as _;
use std::path::Path;
use std::sync::Mutex;

/// A pointer that the plugin handed out.
pub type Ptr = *mut c_void;
/// A result `ncclResult_t` other than 0, with the call that returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The call.
    pub call: &'static str,
    /// The call's result.
    pub code: c_int,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} answered {}", self.call, self.code)
    }
}

impl std::error::Error for Failed {}

/// The outcome of a call.
pub type Result<T> = std::result::Result<T, Failed>;

/// `NCCL_NET_OPTIONAL_RECV_COMPLETION`, which may stand in a receive's request.
pub const OPTIONAL: Ptr = std::ptr::without_provenance_mut(1);

/// A request that is done, which NCCL may have in the place of a new request. A plugin without room
/// must write NULL there.
const EARLIER: Ptr = std::ptr::without_provenance_mut(0xdead);

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// Has this thread listen and connect over the device of this number; device 0 otherwise.
pub fn use_device(dev: c_int) {
    DEVICE.set(dev);
}

/// What the plugin has logged through NCCL's logger: level and text.
pub static LOG: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());

/// Whether memory is registered as a GPU's: `NCCL_CALLER_MEMORY=cuda`.
pub fn is_gpu_memory() -> bool {
    std::env::var_os("NCCL_CALLER_MEMORY").is_some_and(|kind| kind == "cuda")
}

/// The warnings logged so far.
pub fn warnings() -> Vec<String> {
    let log = LOG.lock().unwrap();
    log.iter().filter(|(level, _)| *level == 2).map(|(_, text)| text.clone()).collect()
}

unsafe extern "C" {
    fn snprintf(to: *mut c_char, room: usize, format: *const c_char, ...) -> c_int;
}

/// Stands in for NCCL's logger, which is variadic: a plugin passes any format and its arguments.
///
/// Rust can't define such a function. On x86-64 and aarch64 the arguments are passed in the same
/// places as those of a function with many parameters: integers and pointers in registers, then on
/// the stack, floating point in registers of its own. So this function takes as many of both as a
/// line of a log may have, and passes all of them to `snprintf`, which reads those that the format
/// names.
#[rustfmt::skip] // For lines of many.
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn logger(
    level: c_int, _flags: c_ulong, _file: *const c_char, _line: c_int, format: *const c_char,
    w0: u64, w1: u64, w2: u64, w3: u64, w4: u64, w5: u64, w6: u64, w7: u64,
    w8: u64, w9: u64, w10: u64, w11: u64, w12: u64, w13: u64, w14: u64, w15: u64,
    f0: f64, f1: f64, f2: f64, f3: f64, f4: f64, f5: f64, f6: f64, f7: f64,
) {
    let mut line = [0u8; 4096];
    let to = line.as_mut_ptr().cast();
    // SAFETY: the plugin's format and the arguments that it names, which the plugin passed. The
    // words beyond are whatever lies on the stack above the plugin's call, and nothing reads them.
    unsafe {
        snprintf(
            to, line.len(), format,
            w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15,
            f0, f1, f2, f3, f4, f5, f6, f7,
        )
    };
    let said = CStr::from_bytes_until_nul(&line).unwrap_or_default().to_string_lossy().into_owned();
    if std::env::var_os("NCCL_CALLER_VERBOSE").is_some() {
        // By one call: processes that share the pipe do not mix their lines.
        let _ = std::io::stderr().write_all(format!("[{level}] {said}\n").as_bytes());
    }
    LOG.lock().unwrap().push((level, said));
}

/// The logger's type as plugins see it.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// The logger that is given to a plugin.
pub fn log() -> Logger {
    // SAFETY: `logger` says why it can be called like that.
    unsafe { std::mem::transmute::<*const c_void, Logger>(logger as *const c_void) }
}

/// Stands in for `ncclProfilerCallback_t` and does nothing.
unsafe extern "C" fn profiler(_: *mut Ptr, _: c_int, _: Ptr, _: i64, _: Ptr) -> c_int {
    0
}

type Profiler = unsafe extern "C" fn(*mut Ptr, c_int, Ptr, i64, Ptr) -> c_int;

/// Places in a table, the same in all versions.
#[derive(Clone, Copy)]
#[repr(usize)]
enum Slot {
    Name,
    Init,
    Devices,
    Properties,
    Listen,
    Connect,
    Accept,
    RegMr,
    RegMrDmaBuf,
    DeregMr,
    Isend,
    Irecv,
    Iflush,
    Test,
    CloseSend,
    CloseRecv,
    CloseListen,
    _GetDeviceMr,
    _IrecvConsumed,
    _MakeVDevice,
    Finalize,
}

/// What a plugin reports about its device.
#[derive(Clone, Debug)]
pub struct Props {
    /// The device's name.
    pub name: String,
    /// The device's path in sysfs, if any.
    pub pci_path: Option<String>,
    /// Which chip it is of.
    pub guid: u64,
    /// Kinds of memory: `NCCL_PTR_*`.
    pub ptr_support: c_int,
    /// Speed in Mbit/s.
    pub speed: c_int,
    /// The port's number.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// The most connections.
    pub max_comms: c_int,
    /// The most buffers of a receive.
    pub max_recvs: c_int,
    /// The type of device; 0 is the host.
    pub device_type: c_int,
    /// The longest message; `None` in v8.
    pub max_p2p_bytes: Option<usize>,
}

/// A loaded plugin with one of its tables.
pub struct Plugin {
    table: *const *const c_void,
    /// The version of the table.
    pub version: u32,
    /// Also checks what goes beyond NCCL's requirements and what NCCL leaves to chance.
    pub strict: bool,
    /// How many ranks of this process have called `init`.
    users: Mutex<u32>,
    _library: libloading::Library,
}

// SAFETY: a table of C functions, which NCCL too calls from several threads.
unsafe impl Send for Plugin {}
// SAFETY: a table of C functions, which NCCL too calls from several threads.
unsafe impl Sync for Plugin {}

/// A function of the table, with its type.
macro_rules! function {
    ($self:ident, $slot:ident, fn($($arg:ty),*)) => {{
        let f = $self.slot(Slot::$slot);
        assert!(!f.is_null(), "the table has no {}", stringify!($slot));
        // Within the caller's unsafe block: NCCL's headers give this slot this type in this
        // version.
        std::mem::transmute::<*const c_void, unsafe extern "C" fn($($arg),*) -> c_int>(f)
    }};
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Failed { call, code }) }
}

impl Plugin {
    /// Loads a library and takes its table of a version. With `strict` more is required of the
    /// plugin than NCCL requires: results are written whatever was there, even if the call fails;
    /// the sizes that `test` returns may be left out; and requests are tested in any order.
    pub fn open(path: &Path, version: u32, strict: bool) -> std::result::Result<Self, String> {
        use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
        // SAFETY: a plugin's constructors are as trustworthy as the plugin.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library: libloading::Library = library.map_err(|e| format!("{}: {e}", path.display()))?.into();
        let find = |version: u32| {
            // SAFETY: a data symbol; only its address is taken.
            let table =
                unsafe { library.get::<*const c_void>(format!("ncclNetPlugin_v{version}").as_bytes()) };
            // SAFETY: used as the address that it is.
            table.map(|table| unsafe { table.into_raw() }.as_raw_ptr() as *const *const c_void)
        };
        let table = find(version).map_err(|e| {
            let others: Vec<_> = (1..=99).filter(|v| find(*v).is_ok()).map(|v| format!("v{v}")).collect();
            let others = if others.is_empty() { "none of any version".into() } else { others.join(", ") };
            format!("{}: no table v{version}: {e}; it has {others}", path.display())
        })?;
        Ok(Plugin { table, version, strict, users: Mutex::new(0), _library: library })
    }

    fn slot(&self, slot: Slot) -> *const c_void {
        // SAFETY: every version has the slots that are read here, and all are pointers.
        unsafe { *self.table.add(slot as usize) }
    }

    /// The plugin's name, as NCCL_NET matches it.
    pub fn name(&self) -> String {
        // SAFETY: a C string that lives as long as the library.
        unsafe { CStr::from_ptr(self.slot(Slot::Name).cast()) }.to_string_lossy().into_owned()
    }

    /// Calls init; returns the context, NULL before v11. As in NCCL, one thread at a time calls it.
    /// Before v11 NCCL calls it only for a communicator that is the only one of the process.
    pub fn init(&self) -> Result<Ptr> {
        let mut users = self.users.lock().unwrap();
        let mut ctx = std::ptr::null_mut();
        if self.version < 11 && *users > 0 {
            *users += 1;
            return Ok(ctx);
        }
        let mut config: c_int = -1;
        // SAFETY: places of ours, of the types that the version requires.
        let code = unsafe {
            match self.version {
                8 | 9 => function!(self, Init, fn(Logger))(log()),
                10 => function!(self, Init, fn(Logger, Profiler))(log(), profiler),
                _ => function!(self, Init, fn(*mut Ptr, u64, *mut c_int, Logger, Profiler))(
                    &mut ctx,
                    7,
                    &mut config,
                    log(),
                    profiler,
                ),
            }
        };
        check("init", code)?;
        *users += 1;
        Ok(ctx)
    }

    /// Calls finalize; does nothing before v11.
    pub fn finalize(&self, ctx: Ptr) -> Result<()> {
        let mut users = self.users.lock().unwrap();
        *users = users.saturating_sub(1);
        if self.version < 11 {
            return Ok(());
        }
        // SAFETY: a context of `init`, or NULL.
        check("finalize", unsafe { function!(self, Finalize, fn(Ptr))(ctx) })
    }

    /// The number of devices.
    pub fn devices(&self) -> Result<c_int> {
        let mut n = -1;
        // SAFETY: the place is ours.
        check("devices", unsafe { function!(self, Devices, fn(*mut c_int))(&mut n) }).map(|()| n)
    }

    /// The properties of device `dev`.
    pub fn properties(&self, dev: c_int) -> Result<Props> {
        // NCCL does not clear this memory either.
        let mut raw = [0xa5a5_a5a5_a5a5_a5a5u64; 32];
        let p = raw.as_mut_ptr().cast::<u8>();
        // SAFETY: there is room for the properties of any version.
        check("getProperties", unsafe { function!(self, Properties, fn(c_int, *mut u8))(dev, p) })?;
        // SAFETY: the offsets lie within `raw` and are aligned as in C.
        let (int, float) =
            unsafe { (|at: usize| *p.add(at).cast::<c_int>(), |at: usize| *p.add(at).cast::<f32>()) };
        let text = |word: u64| {
            let at = word as usize as *const c_char;
            // SAFETY: NULL, or a C string that stays.
            (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
        };
        // Where the fields after ptrSupport begin.
        let base = if self.version == 8 { 32 } else { 36 };
        Ok(Props {
            name: text(raw[0]).unwrap_or_default(),
            pci_path: text(raw[1]),
            guid: raw[2],
            ptr_support: int(24),
            speed: int(base),
            port: int(base + 4),
            latency: float(base + 8),
            max_comms: int(base + 12),
            max_recvs: int(base + 16),
            device_type: int(base + 20),
            max_p2p_bytes: match self.version {
                8 => None,
                12 => Some(raw[13] as usize),
                _ => Some(raw[11] as usize),
            },
        })
    }

    /// Makes a listener; returns it and the handle for connectors.
    pub fn listen(&self, ctx: Ptr) -> Result<(Ptr, [u8; 128])> {
        let (mut comm, mut handle) = (self.unwritten(), [0u8; 128]);
        let (h, dev): (Ptr, _) = (handle.as_mut_ptr().cast(), DEVICE.get());
        // SAFETY: the places are ours.
        let code = unsafe {
            match self.version {
                ..11 => function!(self, Listen, fn(c_int, Ptr, *mut Ptr))(dev, h, &mut comm),
                _ => function!(self, Listen, fn(Ptr, c_int, Ptr, *mut Ptr))(ctx, dev, h, &mut comm),
            }
        };
        check("listen", code).map(|()| (comm, handle))
    }

    /// Polls once a connection that is being made.
    pub fn connect(&self, ctx: Ptr, handle: &mut [u8; 128]) -> Result<Option<Ptr>> {
        let mut comm = self.unwritten();
        let mut device = std::ptr::null_mut::<c_void>();
        let mut config: c_int = -1;
        let (h, dev): (Ptr, _) = (handle.as_mut_ptr().cast(), DEVICE.get());
        // SAFETY: the places are ours.
        let code = unsafe {
            match self.version {
                ..10 => function!(self, Connect, fn(c_int, Ptr, *mut Ptr, *mut Ptr))(
                    dev,
                    h,
                    &mut comm,
                    &mut device,
                ),
                10 => function!(self, Connect, fn(c_int, *mut c_int, Ptr, *mut Ptr, *mut Ptr))(
                    dev,
                    &mut config,
                    h,
                    &mut comm,
                    &mut device,
                ),
                _ => function!(self, Connect, fn(Ptr, c_int, Ptr, *mut Ptr, *mut Ptr))(
                    ctx,
                    dev,
                    h,
                    &mut comm,
                    &mut device,
                ),
            }
        };
        self.result("connect", code, comm).map(|comm| (!comm.is_null()).then_some(comm))
    }

    /// Polls a listener once.
    pub fn accept(&self, listener: Ptr) -> Result<Option<Ptr>> {
        let mut comm = self.unwritten();
        let mut device = std::ptr::null_mut::<c_void>();
        // SAFETY: the places are ours.
        let code =
            unsafe { function!(self, Accept, fn(Ptr, *mut Ptr, *mut Ptr))(listener, &mut comm, &mut device) };
        self.result("accept", code, comm).map(|comm| (!comm.is_null()).then_some(comm))
    }

    /// Registers memory, as the host's or, with `NCCL_CALLER_MEMORY=cuda`, as a GPU's, for a plugin
    /// whose GPU is the CPU executor.
    pub fn reg_mr(&self, comm: Ptr, data: Ptr, size: usize) -> Result<Ptr> {
        let mut mr = self.unwritten();
        let kind = if is_gpu_memory() { 2 } else { 1 };
        // SAFETY: memory of ours that stays until `dereg_mr`.
        let code = unsafe {
            function!(self, RegMr, fn(Ptr, Ptr, usize, c_int, *mut Ptr))(comm, data, size, kind, &mut mr)
        };
        self.result("regMr", code, mr)
    }

    /// Registers memory of a GPU (or of another type `kind`) by a dma-buf.
    pub fn reg_mr_dma_buf(&self, comm: Ptr, data: Ptr, size: usize, kind: c_int, fd: c_int) -> Result<Ptr> {
        let mut mr = self.unwritten();
        // SAFETY: memory of ours that stays until `dereg_mr`.
        let code = unsafe {
            function!(self, RegMrDmaBuf, fn(Ptr, Ptr, usize, c_int, u64, c_int, *mut Ptr))(
                comm, data, size, kind, 0, fd, &mut mr,
            )
        };
        self.result("regMrDmaBuf", code, mr)
    }

    /// Deregisters memory.
    pub fn dereg_mr(&self, comm: Ptr, mr: Ptr) -> Result<()> {
        // SAFETY: a registration of `reg_mr`, given back once.
        check("deregMr", unsafe { function!(self, DeregMr, fn(Ptr, Ptr))(comm, mr) })
    }

    /// Posts a send. `None`: no room, try again.
    ///
    /// # Safety
    /// The memory stays until the request is done or the connection is closed.
    pub unsafe fn isend(
        &self,
        comm: Ptr,
        data: Ptr,
        size: usize,
        tag: c_int,
        mr: Ptr,
    ) -> Result<Option<Ptr>> {
        let mut request = EARLIER;
        let (none, r) = (std::ptr::null_mut(), &mut request);
        // SAFETY: the caller's promise.
        let code = unsafe {
            match self.version {
                8 => function!(self, Isend, fn(Ptr, Ptr, c_int, c_int, Ptr, *mut Ptr))(
                    comm,
                    data,
                    size as c_int,
                    tag,
                    mr,
                    r,
                ),
                9 => function!(self, Isend, fn(Ptr, Ptr, usize, c_int, Ptr, *mut Ptr))(
                    comm, data, size, tag, mr, r,
                ),
                _ => function!(self, Isend, fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr))(
                    comm, data, size, tag, mr, none, r,
                ),
            }
        };
        self.result("isend", code, request).map(|request| (!request.is_null()).then_some(request))
    }

    /// Posts a receive. `None`: no room, try again. All slices have the same length.
    ///
    /// # Safety
    /// The requirements of [`Plugin::isend`] hold.
    pub unsafe fn irecv(
        &self,
        comm: Ptr,
        data: &[Ptr],
        sizes: &[usize],
        tags: &[c_int],
        mrs: &[Ptr],
    ) -> Result<Option<Ptr>> {
        let (mut data, mut sizes, mut tags, mut mrs) =
            (data.to_vec(), sizes.to_vec(), tags.to_vec(), mrs.to_vec());
        let mut ints: Vec<c_int> = sizes.iter().map(|s| *s as c_int).collect();
        let mut none = vec![std::ptr::null_mut::<c_void>(); data.len()];
        // NCCL writes `OPTIONAL` there in protocols whose data shows by itself that it has arrived;
        // then a plugin may report a receive as done before it is. This caller's data does not show
        // that, so `OPTIONAL` is used only with plugins that make no use of it.
        let mut request = if self.strict { OPTIONAL } else { EARLIER };
        let (n, r) = (data.len() as c_int, &mut request);
        let (d, s, t, m) = (data.as_mut_ptr(), sizes.as_mut_ptr(), tags.as_mut_ptr(), mrs.as_mut_ptr());
        // SAFETY: the caller's promise.
        let code = unsafe {
            match self.version {
                8 => function!(
                    self,
                    Irecv,
                    fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut c_int, *mut Ptr, *mut Ptr)
                )(comm, n, d, ints.as_mut_ptr(), t, m, r),
                9 => function!(
                    self,
                    Irecv,
                    fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr)
                )(comm, n, d, s, t, m, r),
                _ => function!(
                    self,
                    Irecv,
                    fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr, *mut Ptr)
                )(comm, n, d, s, t, m, none.as_mut_ptr(), r),
            }
        };
        self.result("irecv", code, request).map(|request| (!request.is_null()).then_some(request))
    }

    /// Begins a flush. `None`: there is nothing to wait for.
    pub fn iflush(&self, comm: Ptr, data: Ptr, size: c_int, mr: Ptr) -> Result<Option<Ptr>> {
        let (mut data, mut size, mut mr, mut request) = ([data], [size], [mr], std::ptr::null_mut());
        // SAFETY: memory of ours.
        let code = unsafe {
            function!(self, Iflush, fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut Ptr, *mut Ptr))(
                comm,
                1,
                data.as_mut_ptr(),
                size.as_mut_ptr(),
                mr.as_mut_ptr(),
                &mut request,
            )
        };
        check("iflush", code).map(|()| (!request.is_null()).then_some(request))
    }

    /// Begins a flush of `n` buffers whose arrays are NULL.
    pub fn iflush_null(&self, comm: Ptr, n: c_int) -> Result<Option<Ptr>> {
        let mut request = std::ptr::dangling_mut();
        // SAFETY: a place of ours, and no arrays.
        let code = unsafe {
            function!(self, Iflush, fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut Ptr, *mut Ptr))(
                comm,
                n,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                &mut request,
            )
        };
        assert!(request.is_null(), "iflush of {n} left its request");
        check("iflush", code).map(|()| None)
    }

    /// Tests a request: true when it is done; `sizes` may be left out.
    ///
    /// # Safety
    /// The request is not done, and its connection is not closed.
    pub unsafe fn test(&self, request: Ptr, sizes: Option<&mut [c_int; 8]>) -> Result<bool> {
        let mut done = -1;
        let sizes = sizes.map_or(std::ptr::null_mut(), |s| s.as_mut_ptr());
        // SAFETY: the caller's promise.
        let code =
            unsafe { function!(self, Test, fn(Ptr, *mut c_int, *mut c_int))(request, &mut done, sizes) };
        check("test", code)?;
        assert!(done == 0 || done == 1 || !self.strict && done != -1, "test says done = {done}");
        Ok(done != 0)
    }

    /// Tests a send ([`Plugin::test`]), for which NCCL has room for one size. Without `sized` the
    /// size is left out, which NCCL never does.
    ///
    /// # Safety
    /// The requirements of [`Plugin::test`] hold.
    pub unsafe fn test_send(&self, request: Ptr, sized: bool) -> Result<bool> {
        const NONE: c_int = c_int::MIN;
        let mut sizes = [NONE; 8];
        // SAFETY: the caller's promise.
        let done = unsafe { self.test(request, (sized || !self.strict).then_some(&mut sizes)) };
        assert_eq!(sizes[1..], [NONE; 7], "test of a send wrote more than one size");
        done
    }

    /// Tests a receive ([`Plugin::test`]). Without `sized` the sizes are left out, which NCCL never
    /// does.
    ///
    /// # Safety
    /// The requirements of [`Plugin::test`] hold.
    pub unsafe fn test_receive(&self, request: Ptr, sized: bool) -> Result<Option<[c_int; 8]>> {
        // NCCL's place holds 0 before the call.
        let mut sizes = [if self.strict { -1 } else { 0 }; 8];
        // SAFETY: the caller's promise.
        let done = unsafe { self.test(request, (sized || !self.strict).then_some(&mut sizes))? };
        Ok(done.then_some(sizes))
    }

    /// What the place of a connection or registration holds before the call: NCCL's hold NULL.
    fn unwritten(&self) -> Ptr {
        if self.strict { OPTIONAL } else { std::ptr::null_mut() }
    }

    /// The result of a call and what it wrote. This project's plugin writes there even if the call
    /// fails.
    fn result(&self, call: &'static str, code: c_int, at: Ptr) -> Result<Ptr> {
        let written = at != OPTIONAL && at != EARLIER;
        assert!(written || code != 0 && !self.strict, "{call} left what it should write at {at:?}");
        check(call, code).map(|()| at)
    }

    /// Whether the table has `regMrDmaBuf`.
    pub fn takes_dma_bufs(&self) -> bool {
        !self.slot(Slot::RegMrDmaBuf).is_null()
    }

    /// Closes a sending end.
    pub fn close_send(&self, comm: Ptr) -> Result<()> {
        // SAFETY: an end of `connect`, closed once.
        check("closeSend", unsafe { function!(self, CloseSend, fn(Ptr))(comm) })
    }

    /// Closes a receiving end.
    pub fn close_recv(&self, comm: Ptr) -> Result<()> {
        // SAFETY: an end of `accept`, closed once.
        check("closeRecv", unsafe { function!(self, CloseRecv, fn(Ptr))(comm) })
    }

    /// Closes a listener.
    pub fn close_listen(&self, comm: Ptr) -> Result<()> {
        // SAFETY: a listener of `listen`, closed once.
        check("closeListen", unsafe { function!(self, CloseListen, fn(Ptr))(comm) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logger_takes_any_format_as_nccls() {
        let (name, big) = (c"eth0".as_ptr(), usize::MAX);
        // SAFETY: the arguments are those that the formats name.
        unsafe {
            log()(2, 0, name, 1, c"plain 100%%".as_ptr());
            log()(
                2,
                0,
                name,
                1,
                c"%d %s %zu %.2f|%x %d %d %d %.1f %s".as_ptr(),
                -3,
                name,
                big,
                2.5f64,
                255,
                1,
                2,
                3,
                0.5f64,
                name,
            );
        }
        let said = warnings();
        assert!(said.contains(&"plain 100%".to_string()), "{said:?}");
        assert!(said.contains(&format!("-3 eth0 {big} 2.50|ff 1 2 3 0.5 eth0")), "{said:?}");
    }
}
