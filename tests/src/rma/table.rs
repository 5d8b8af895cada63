//! NCCL's tables for one-sided operations, written after NCCL's headers, under one interface.
//!
//! NCCL 2.28.9 takes GIN v11, 2.29 GIN v12, 2.30.3 and 2.30.4 RMA v13, 2.30.7 RMA v14. RMA v15 and v16 are those of later headers.

#![allow(clippy::not_unsafe_ptr_arg_deref)] // What the plugin handed out goes back to it as it came.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

pub use crate::nccl::table::{Failed, Ptr, Result, warnings};
use crate::nccl::table::{Logger, log};

/// `NCCL_PTR_HOST`.
pub const HOST: c_int = 1;
/// `NCCL_PTR_CUDA`.
pub const CUDA: c_int = 2;
/// `NCCL_NET_MR_FLAG_FORCE_SO`.
pub const FORCE_SO: u64 = 1;
/// `NCCL_NET_MR_FLAG_SIGNAL_NEVER_RESET`.
pub const NEVER_RESET: u64 = 2;
/// `NCCL_NET_SIGNAL_OP_INC`.
pub const INC: u32 = 1;
/// `NCCL_NET_SIGNAL_OP_ADD`.
pub const ADD: u32 = 2;
/// `ncclRmaOptFlagsAggregateRequests`: more requests follow at once.
pub const MORE: u32 = 1;
/// `NCCL_NET_DEVICE_GIN_PROXY`, which NCCL requires of the device's type.
pub const PROXY: c_int = 2;
/// `NCCL_NET_MAX_REQUESTS`.
pub const MAX_REQUESTS: usize = 32;

/// What a place holds before the plugin writes it.
const UNWRITTEN: Ptr = std::ptr::without_provenance_mut(0xdead_dead_dead_dead);

/// The places of a table: a name, then functions.
macro_rules! table {
    ($(#[$doc:meta])* $table:ident, $words:literal words { $($field:ident($($argument:ty),*);)* }) => {
        $(#[$doc])*
        #[repr(C)]
        struct $table {
            name: *const c_char,
            $($field: Option<unsafe extern "C" fn($($argument),*) -> c_int>,)*
        }
        const _: () = assert!(size_of::<$table>() == 8 * $words);
    };
}

table! {
    /// `ncclGin_v11_t`
    Gin11, 19 words {
        init(*mut Ptr, u64, Logger);
        devices(*mut c_int);
        get_properties(c_int, *mut Properties);
        listen(Ptr, c_int, Ptr, *mut Ptr);
        connect(Ptr, *mut Ptr, c_int, c_int, Ptr, *mut Ptr);
        create_context(Ptr, c_int, c_int, *mut Ptr, *mut Ptr);
        reg_mr_sym(Ptr, Ptr, usize, c_int, u64, *mut Ptr, *mut Ptr);
        reg_mr_sym_dma_buf(Ptr, Ptr, usize, c_int, u64, c_int, u64, *mut Ptr, *mut Ptr);
        dereg_mr_sym(Ptr, Ptr);
        destroy_context(Ptr);
        close_coll(Ptr);
        close_listen(Ptr);
        iput(Ptr, u64, Ptr, usize, u64, Ptr, u32, *mut Ptr);
        iput_signal(Ptr, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, *mut Ptr);
        test(Ptr, Ptr, *mut c_int);
        progress(Ptr);
        query_last_error(Ptr, *mut u8);
        finalize(Ptr);
    }
}

table! {
    /// `ncclGin_v12_t`
    Gin12, 19 words {
        init(*mut Ptr, u64, Logger);
        devices(*mut c_int);
        get_properties(c_int, *mut Properties);
        listen(Ptr, c_int, Ptr, *mut Ptr);
        connect(Ptr, *mut Ptr, c_int, c_int, c_int, c_int, Ptr, *mut Ptr);
        create_context(Ptr, c_int, c_int, c_int, *mut Ptr, *mut Ptr);
        reg_mr_sym(Ptr, Ptr, usize, c_int, u64, *mut Ptr, *mut Ptr);
        reg_mr_sym_dma_buf(Ptr, Ptr, usize, c_int, u64, c_int, u64, *mut Ptr, *mut Ptr);
        dereg_mr_sym(Ptr, Ptr);
        destroy_context(Ptr);
        close_coll(Ptr);
        close_listen(Ptr);
        iput(Ptr, u64, Ptr, usize, u64, Ptr, u32, c_int, *mut Ptr);
        iput_signal(Ptr, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, c_int, *mut Ptr);
        test(Ptr, Ptr, *mut c_int);
        progress(Ptr);
        query_last_error(Ptr, *mut u8);
        finalize(Ptr);
    }
}

table! {
    /// `ncclRma_v13_t`, which is `ncclGin_v13_t` under another name
    Rma13, 21 words {
        init(*mut Ptr, u64, Logger);
        devices(*mut c_int);
        get_properties(c_int, *mut Properties);
        listen(Ptr, c_int, Ptr, *mut Ptr);
        connect(Ptr, *mut Ptr, c_int, c_int, Ptr, *mut Ptr);
        create_context(Ptr, *mut Config13, *mut Ptr, *mut Ptr);
        reg_mr_sym(Ptr, Ptr, usize, c_int, u64, *mut Ptr, *mut Ptr);
        reg_mr_sym_dma_buf(Ptr, Ptr, usize, c_int, u64, c_int, u64, *mut Ptr, *mut Ptr);
        dereg_mr_sym(Ptr, Ptr);
        destroy_context(Ptr);
        close_coll(Ptr);
        close_listen(Ptr);
        iput(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, *mut Ptr);
        iput_signal(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, *mut Ptr);
        iget(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, *mut Ptr);
        iflush(Ptr, c_int, Ptr, u32, *mut Ptr);
        test(Ptr, Ptr, *mut c_int);
        progress(Ptr);
        query_last_error(Ptr, *mut u8);
        finalize(Ptr);
    }
}

table! {
    /// `ncclRma_v14_t`
    Rma14, 21 words {
        init(*mut Ptr, u64, Logger);
        devices(*mut c_int);
        get_properties(c_int, *mut Properties);
        listen(Ptr, c_int, Ptr, *mut Ptr);
        connect(Ptr, *mut Ptr, c_int, c_int, Ptr, *mut Ptr);
        create_context(Ptr, *mut Config14, *mut Ptr);
        reg_mr_sym(Ptr, Ptr, usize, c_int, u64, *mut Ptr);
        reg_mr_sym_dma_buf(Ptr, Ptr, usize, c_int, u64, c_int, u64, *mut Ptr);
        dereg_mr_sym(Ptr, Ptr);
        destroy_context(Ptr);
        close_coll(Ptr);
        close_listen(Ptr);
        iput(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, *mut Ptr);
        iput_signal(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, bool, *mut Ptr);
        iget(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, *mut Ptr);
        iflush(Ptr, c_int, Ptr, u32, *mut Ptr);
        test(Ptr, Ptr, *mut c_int);
        progress(Ptr);
        query_last_error(Ptr, *mut u8);
        finalize(Ptr);
    }
}

table! {
    /// `ncclRma_v15_t`
    Rma15, 21 words {
        init(*mut Ptr, u64, Logger);
        devices(*mut c_int);
        get_properties(c_int, *mut Properties);
        listen(Ptr, c_int, Ptr, *mut Ptr);
        connect(Ptr, *mut Ptr, c_int, c_int, Ptr, *mut Ptr);
        create_context(Ptr, *mut Config14, *mut Ptr);
        reg_mr_sym(Ptr, Ptr, usize, c_int, u64, *mut Ptr);
        reg_mr_sym_dma_buf(Ptr, Ptr, usize, c_int, u64, c_int, u64, *mut Ptr);
        dereg_mr_sym(Ptr, Ptr);
        destroy_context(Ptr);
        close_coll(Ptr);
        close_listen(Ptr);
        iput(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u32, *mut Ptr);
        iput_signal(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, bool, u32, *mut Ptr);
        iget(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u32, *mut Ptr);
        iflush(Ptr, c_int, Ptr, u32, *mut Ptr);
        test(Ptr, Ptr, *mut c_int);
        progress(Ptr);
        query_last_error(Ptr, *mut u8);
        finalize(Ptr);
    }
}

table! {
    /// `ncclRma_v16_t`
    Rma16, 22 words {
        init(*mut Ptr, u64, Logger);
        devices(*mut c_int);
        get_rma_properties(Ptr, *mut u8);
        get_properties(c_int, *mut Properties);
        listen(Ptr, c_int, Ptr, *mut Ptr);
        connect(Ptr, *mut Ptr, c_int, c_int, Ptr, *mut Ptr);
        create_context(Ptr, *mut Config14, *mut Ptr);
        reg_mr_sym(Ptr, Ptr, usize, c_int, u64, *mut Ptr);
        reg_mr_sym_dma_buf(Ptr, Ptr, usize, c_int, u64, c_int, u64, *mut Ptr);
        dereg_mr_sym(Ptr, Ptr);
        destroy_context(Ptr);
        close_coll(Ptr);
        close_listen(Ptr);
        iput(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u32, *mut Ptr);
        iput_signal(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, bool, u32, *mut Ptr);
        iget(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u32, *mut Ptr);
        iflush(Ptr, c_int, Ptr, u32, *mut Ptr);
        test(Ptr, Ptr, *mut c_int);
        progress(Ptr);
        query_last_error(Ptr, *mut u8);
        finalize(Ptr);
    }
}

/// `ncclGinConfig_v13_t`
#[repr(C)]
struct Config13 {
    signals: c_int,
    counters: c_int,
    contexts: c_int,
    queue_depth: c_int,
    traffic_class: c_int,
}
const _: () = assert!(size_of::<Config13>() == 20);

/// `ncclRmaConfig_v14_t`
#[repr(C)]
struct Config14 {
    contexts: c_int,
    traffic_class: c_int,
    rank_stride: c_int,
}
const _: () = assert!(size_of::<Config14>() == 12);

/// The beginning of `ncclNetProperties_v11_t` and `_v12_t`, and the rest of either as words.
#[repr(C)]
struct Properties {
    name: *const c_char,
    pci_path: *const c_char,
    guid: u64,
    ptr_support: c_int,
    reg_is_global: c_int,
    force_flush: c_int,
    speed: c_int,
    port: c_int,
    latency: f32,
    max_comms: c_int,
    max_recvs: c_int,
    device_type: c_int,
    device_version: c_int,
    rest: [u64; 24],
}
const _: () = assert!(std::mem::offset_of!(Properties, rest) == 64);

/// A table's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// `ncclGinPlugin_v11`
    Gin11,
    /// `ncclGinPlugin_v12`
    Gin12,
    /// `ncclRmaPlugin_v13`
    Rma13,
    /// `ncclRmaPlugin_v14`
    Rma14,
    /// `ncclRmaPlugin_v15`
    Rma15,
    /// `ncclRmaPlugin_v16`
    Rma16,
}

impl Version {
    /// All versions.
    pub const ALL: [Version; 6] =
        [Version::Gin11, Version::Gin12, Version::Rma13, Version::Rma14, Version::Rma15, Version::Rma16];

    /// The name for `--table`.
    pub fn name(self) -> &'static str {
        match self {
            Version::Gin11 => "gin11",
            Version::Gin12 => "gin12",
            Version::Rma13 => "rma13",
            Version::Rma14 => "rma14",
            Version::Rma15 => "rma15",
            Version::Rma16 => "rma16",
        }
    }

    /// The version of this name.
    pub fn of(name: &str) -> Option<Version> {
        Version::ALL.into_iter().find(|version| version.name() == name)
    }

    fn symbol(self) -> String {
        let kind = if self.is_gin() { "Gin" } else { "Rma" };
        format!("nccl{kind}Plugin_v{}", &self.name()[3..])
    }

    /// Whether the table has gets and flushes.
    pub fn has_get(self) -> bool {
        !self.is_gin()
    }

    /// Whether the table is one of GIN, where NCCL makes no context: the operations and the progress take the collComm.
    pub fn is_gin(self) -> bool {
        matches!(self, Version::Gin11 | Version::Gin12)
    }

    /// `wanted` contexts, or as many as a context of this version can have.
    pub fn contexts(self, wanted: usize) -> usize {
        if self == Version::Gin11 { 1 } else { wanted }
    }
}

enum Raw {
    Gin11(&'static Gin11),
    Gin12(&'static Gin12),
    Rma13(&'static Rma13),
    Rma14(&'static Rma14),
    Rma15(&'static Rma15),
    Rma16(&'static Rma16),
}

/// A loaded plugin with one of its tables.
pub struct Table {
    raw: Raw,
    /// The version.
    pub version: Version,
    _library: libloading::Library,
}

// SAFETY: a table of C functions, which NCCL too calls from several threads.
unsafe impl Send for Table {}
// SAFETY: a table of C functions, which NCCL too calls from several threads.
unsafe impl Sync for Table {}

/// What a plugin reports about its device.
#[derive(Clone, Debug)]
pub struct Props {
    /// The device's name.
    pub name: String,
    /// Kinds of memory: `NCCL_PTR_*`.
    pub ptr_support: c_int,
    /// Speed in Mbit/s.
    pub speed: c_int,
    /// The most groups.
    pub max_comms: c_int,
    /// A 32nd of the most operations outstanding for a context and peer.
    pub max_recvs: c_int,
    /// The type of device: [`PROXY`].
    pub device_type: c_int,
    /// The longest operation.
    pub max_p2p_bytes: u64,
}

/// A registration: what deregistration takes, and what NCCL's device code names it by.
#[derive(Clone, Copy, Debug)]
pub struct Mr {
    /// mhandle
    pub host: Ptr,
    /// ginHandle; the mhandle in versions without it.
    pub device: Ptr,
}

// SAFETY: NCCL passes such pointers between its threads too.
unsafe impl Send for Mr {}
// SAFETY: NCCL passes such pointers between its threads too.
unsafe impl Sync for Mr {}

impl Mr {
    /// No registration.
    pub const NONE: Mr = Mr { host: std::ptr::null_mut(), device: std::ptr::null_mut() };
}

/// Where an operation goes: the context's handle (in GIN the collComm), the context in it, the peer, and flags
/// (`ncclRmaOptFlags`), which only v15 and v16 take.
#[derive(Clone, Copy, Debug)]
pub struct To {
    /// rmaCtx
    pub ctx: Ptr,
    /// context
    pub context: c_int,
    /// rank
    pub rank: u32,
    /// optFlags
    pub flags: u32,
}

/// A stretch of bytes from one registration to another. Of a put `local` is the source, of a get the destination.
#[derive(Clone, Copy, Debug)]
pub struct Bytes {
    /// The offset in the local registration.
    pub local: u64,
    /// The local registration.
    pub local_mr: Ptr,
    /// The length.
    pub size: usize,
    /// The offset in the peer's registration.
    pub remote: u64,
    /// The peer's registration, by ours of the same place in the order.
    pub remote_mr: Ptr,
}

impl Bytes {
    /// No bytes: a signal alone.
    pub const NONE: Bytes = Bytes {
        local: 0,
        local_mr: std::ptr::null_mut(),
        size: 0,
        remote: 0,
        remote_mr: std::ptr::null_mut(),
    };
}

/// A signal.
#[derive(Clone, Copy, Debug)]
pub struct Signal {
    /// The offset of its word in the peer's registration.
    pub at: u64,
    /// The peer's registration, by ours of the same place in the order.
    pub mr: Ptr,
    /// What [`ADD`] adds.
    pub value: u64,
    /// [`INC`] or [`ADD`].
    pub op: u32,
    /// isStrongSignal, which v14 and later take.
    pub strong: bool,
}

/// Calls a function whose arguments are the same in all versions.
macro_rules! every {
    ($self:ident, $field:ident($($argument:expr),*)) => {
        match &$self.raw {
            Raw::Gin11(t) => present(t.$field, stringify!($field))($($argument),*),
            Raw::Gin12(t) => present(t.$field, stringify!($field))($($argument),*),
            Raw::Rma13(t) => present(t.$field, stringify!($field))($($argument),*),
            Raw::Rma14(t) => present(t.$field, stringify!($field))($($argument),*),
            Raw::Rma15(t) => present(t.$field, stringify!($field))($($argument),*),
            Raw::Rma16(t) => present(t.$field, stringify!($field))($($argument),*),
        }
    };
}

fn present<F>(function: Option<F>, name: &str) -> F {
    function.unwrap_or_else(|| panic!("the table has no {name}"))
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Failed { call, code }) }
}

/// The outcome of a call that writes a pointer, which must not be NULL on success.
fn written(call: &'static str, code: c_int, at: Ptr) -> Result<Ptr> {
    check(call, code)?;
    assert!(at != UNWRITTEN && !at.is_null(), "{call} succeeded and left {at:?} in its place");
    Ok(at)
}

impl Table {
    /// Loads a library and takes its table of a version.
    pub fn open(path: &Path, version: Version) -> std::result::Result<Self, String> {
        use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
        // SAFETY: a plugin's constructors are as trustworthy as the plugin.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library: libloading::Library = library.map_err(|e| format!("{}: {e}", path.display()))?.into();
        let find = |version: Version| {
            // SAFETY: a data symbol; only its address is taken.
            let table = unsafe { library.get::<*const c_void>(version.symbol().as_bytes()) };
            // SAFETY: used as the address that it is.
            table.map(|table| unsafe { table.into_raw() }.as_raw_ptr() as *const c_void)
        };
        let at = find(version).map_err(|e| {
            let others: Vec<_> =
                Version::ALL.into_iter().filter(|v| find(*v).is_ok()).map(Version::symbol).collect();
            let others = if others.is_empty() { "none of RMA or GIN".into() } else { others.join(", ") };
            format!("{}: no {}: {e}; it has {others}", path.display(), version.symbol())
        })?;
        // SAFETY: under this name NCCL's headers put this table, which lives as long as the library; the library is dropped
        // last.
        let raw = unsafe {
            match version {
                Version::Gin11 => Raw::Gin11(&*at.cast()),
                Version::Gin12 => Raw::Gin12(&*at.cast()),
                Version::Rma13 => Raw::Rma13(&*at.cast()),
                Version::Rma14 => Raw::Rma14(&*at.cast()),
                Version::Rma15 => Raw::Rma15(&*at.cast()),
                Version::Rma16 => Raw::Rma16(&*at.cast()),
            }
        };
        Ok(Table { raw, version, _library: library })
    }

    /// The plugin's name.
    pub fn name(&self) -> String {
        let at = match &self.raw {
            Raw::Gin11(t) => t.name,
            Raw::Gin12(t) => t.name,
            Raw::Rma13(t) => t.name,
            Raw::Rma14(t) => t.name,
            Raw::Rma15(t) => t.name,
            Raw::Rma16(t) => t.name,
        };
        // SAFETY: a C string that lives as long as the library.
        unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
    }

    /// Calls init; returns the context, which may be NULL.
    pub fn init(&self) -> Result<Ptr> {
        let mut ctx = UNWRITTEN;
        // SAFETY: the place is ours.
        check("init", unsafe { every!(self, init(&mut ctx, 7, log())) })?;
        assert!(ctx != UNWRITTEN, "init succeeded and left the place of its context");
        Ok(ctx)
    }

    /// The number of devices.
    pub fn devices(&self) -> Result<c_int> {
        let mut n = -1;
        // SAFETY: the place is ours.
        check("devices", unsafe { every!(self, devices(&mut n)) }).map(|()| n)
    }

    /// The properties of device `dev`.
    pub fn properties(&self, dev: c_int) -> Result<Props> {
        const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;
        // NCCL does not clear this memory either.
        // SAFETY: integers, a float and pointers that are not followed: all of any bytes.
        let mut raw: Properties = unsafe { std::mem::transmute([POISON; size_of::<Properties>() / 8]) };
        // SAFETY: there is room for the properties of either version.
        check("getProperties", unsafe { every!(self, get_properties(dev, &mut raw)) })?;
        // Words of the rest: 6 of v11, 8 of v12.
        let (longest, end) = if self.version.is_gin() { (3, 6) } else { (5, 8) };
        assert_eq!(raw.rest[end..], [POISON; 24][end..], "getProperties wrote behind the properties");
        let name = match raw.name.is_null() {
            true => String::new(),
            // SAFETY: a C string that stays.
            false => unsafe { CStr::from_ptr(raw.name) }.to_string_lossy().into_owned(),
        };
        Ok(Props {
            name,
            ptr_support: raw.ptr_support,
            speed: raw.speed,
            max_comms: raw.max_comms,
            max_recvs: raw.max_recvs,
            device_type: raw.device_type,
            max_p2p_bytes: raw.rest[longest],
        })
    }

    /// `flushesAllPutsOnAnySignal` of v16; `None` before.
    pub fn flushes_all_puts(&self, coll: Ptr) -> Option<Result<bool>> {
        let Raw::Rma16(t) = &self.raw else { return None };
        let mut flushes = 0xa5;
        // SAFETY: the place is ours, and the structure is a bool.
        let code = unsafe { present(t.get_rma_properties, "getRmaProperties")(coll, &mut flushes) };
        Some(check("getRmaProperties", code).map(|()| {
            assert!(flushes < 2, "getRmaProperties wrote {flushes} as a bool");
            flushes == 1
        }))
    }

    /// Makes a listener at device `dev`; returns it and the handle for the other ranks.
    pub fn listen(&self, ctx: Ptr, dev: c_int) -> Result<(Ptr, [u8; 128])> {
        let (mut comm, mut handle) = (UNWRITTEN, [0u8; 128]);
        // SAFETY: the places are ours.
        let code = unsafe { every!(self, listen(ctx, dev, handle.as_mut_ptr().cast(), &mut comm)) };
        written("listen", code, comm).map(|comm| (comm, handle))
    }

    /// Makes a group of the ranks with these handles, with `contexts` contexts in the version that takes them here.
    pub fn connect(
        &self,
        ctx: Ptr,
        handles: &mut [[u8; 128]],
        rank: c_int,
        contexts: usize,
        listener: Ptr,
    ) -> Result<Ptr> {
        let mut pointers: Vec<Ptr> = handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        self.connect_raw(ctx, &mut pointers, handles.len() as c_int, rank, contexts, listener)
    }

    /// Makes a group, of any arguments.
    pub fn connect_raw(
        &self,
        ctx: Ptr,
        handles: &mut [Ptr],
        ranks: c_int,
        rank: c_int,
        contexts: usize,
        listener: Ptr,
    ) -> Result<Ptr> {
        let mut coll = UNWRITTEN;
        let at = if handles.is_empty() { std::ptr::null_mut() } else { handles.as_mut_ptr() };
        let n = contexts as c_int;
        macro_rules! connect {
            ($t:ident $(, $more:expr)*) => {
                present($t.connect, "connect")(ctx, at, ranks, rank $(, $more)*, listener, &mut coll)
            };
        }
        // SAFETY: the handles are a listener's, and the plugin copies them.
        let code = unsafe {
            match &self.raw {
                Raw::Gin11(t) => connect!(t),
                Raw::Gin12(t) => connect!(t, n, 0),
                Raw::Rma13(t) => connect!(t),
                Raw::Rma14(t) => connect!(t),
                Raw::Rma15(t) => connect!(t),
                Raw::Rma16(t) => connect!(t),
            }
        };
        written("connect", code, coll)
    }

    /// Makes a context. In GIN, where the collComm has its contexts, NCCL 2.30.3 and 2.30.4 call this all the same, and earlier
    /// versions take the collComm.
    pub fn create_context(&self, coll: Ptr, contexts: c_int) -> Result<Ptr> {
        let (mut ctx, mut device) = (UNWRITTEN, std::ptr::null_mut());
        let mut config13 =
            Config13 { signals: 0, counters: 0, contexts, queue_depth: 0, traffic_class: c_int::MIN };
        let mut config14 = Config14 { contexts, traffic_class: c_int::MIN, rank_stride: 1 };
        macro_rules! create {
            ($t:ident) => {
                present($t.create_context, "createContext")(coll, &mut config14, &mut ctx)
            };
        }
        // SAFETY: the places are ours.
        let code = unsafe {
            match &self.raw {
                Raw::Gin11(t) => {
                    present(t.create_context, "createContext")(coll, 1, 1, &mut ctx, &mut device)
                }
                Raw::Gin12(t) => {
                    present(t.create_context, "createContext")(coll, 1, 1, contexts, &mut ctx, &mut device)
                }
                Raw::Rma13(t) => {
                    present(t.create_context, "createContext")(coll, &mut config13, &mut ctx, &mut device)
                }
                Raw::Rma14(t) => create!(t),
                Raw::Rma15(t) => create!(t),
                Raw::Rma16(t) => create!(t),
            }
        };
        written("createContext", code, ctx)
    }

    /// Destroys a context.
    pub fn destroy_context(&self, ctx: Ptr) -> Result<()> {
        // SAFETY: a context of `create_context`, destroyed once, or NULL.
        check("destroyContext", unsafe { every!(self, destroy_context(ctx)) })
    }

    /// Registers memory of a kind, [`HOST`] or [`CUDA`].
    pub fn reg(&self, coll: Ptr, data: Ptr, size: usize, kind: c_int, flags: u64) -> Result<Mr> {
        let (mut host, mut device) = (UNWRITTEN, UNWRITTEN);
        macro_rules! reg {
            ($t:ident $(, $more:expr)*) => {
                present($t.reg_mr_sym, "regMrSym")(coll, data, size, kind, flags, &mut host $(, $more)*)
            };
        }
        // SAFETY: memory of ours that stays until `dereg`.
        let code = unsafe {
            match &self.raw {
                Raw::Gin11(t) => reg!(t, &mut device),
                Raw::Gin12(t) => reg!(t, &mut device),
                Raw::Rma13(t) => reg!(t, &mut device),
                Raw::Rma14(t) => reg!(t),
                Raw::Rma15(t) => reg!(t),
                Raw::Rma16(t) => reg!(t),
            }
        };
        self.registered("regMrSym", code, host, device)
    }

    /// Registers memory by a dma-buf.
    pub fn reg_dma_buf(&self, coll: Ptr, data: Ptr, size: usize, kind: c_int, fd: c_int) -> Result<Mr> {
        let (mut host, mut device) = (UNWRITTEN, UNWRITTEN);
        macro_rules! reg {
            ($t:ident $(, $more:expr)*) => {
                present($t.reg_mr_sym_dma_buf, "regMrSymDmaBuf")(coll, data, size, kind, 0, fd, 0, &mut host $(, $more)*)
            };
        }
        // SAFETY: memory of ours that stays until `dereg`.
        let code = unsafe {
            match &self.raw {
                Raw::Gin11(t) => reg!(t, &mut device),
                Raw::Gin12(t) => reg!(t, &mut device),
                Raw::Rma13(t) => reg!(t, &mut device),
                Raw::Rma14(t) => reg!(t),
                Raw::Rma15(t) => reg!(t),
                Raw::Rma16(t) => reg!(t),
            }
        };
        self.registered("regMrSymDmaBuf", code, host, device)
    }

    fn registered(&self, call: &'static str, code: c_int, host: Ptr, device: Ptr) -> Result<Mr> {
        let host = written(call, code, host)?;
        let has_device = self.version.is_gin() || self.version == Version::Rma13;
        let device = if has_device { written(call, code, device)? } else { host };
        Ok(Mr { host, device })
    }

    /// Deregisters memory.
    pub fn dereg(&self, coll: Ptr, mr: Mr) -> Result<()> {
        // SAFETY: a registration of `reg`, given back once, or NULL.
        check("deregMrSym", unsafe { every!(self, dereg_mr_sym(coll, mr.host)) })
    }

    /// Closes a group.
    pub fn close_coll(&self, coll: Ptr) -> Result<()> {
        // SAFETY: a group of `connect`, closed once, or NULL.
        check("closeColl", unsafe { every!(self, close_coll(coll)) })
    }

    /// Closes a listener.
    pub fn close_listen(&self, comm: Ptr) -> Result<()> {
        // SAFETY: a listener of `listen`, closed once, or NULL.
        check("closeListen", unsafe { every!(self, close_listen(comm)) })
    }

    /// Begins a put.
    ///
    /// # Safety
    /// The memory of both registrations stays until they are deregistered.
    pub unsafe fn iput(&self, to: To, b: Bytes) -> Result<Ptr> {
        let mut request = UNWRITTEN;
        let r = &mut request;
        macro_rules! put {
            ($t:ident, ($($first:expr),*), ($($last:expr),*)) => {
                present($t.iput, "iput")(
                    to.ctx $(, $first)*, b.local, b.local_mr, b.size, b.remote, b.remote_mr, to.rank $(, $last)*, r,
                )
            };
        }
        // SAFETY: the caller's promise.
        let code = unsafe {
            match &self.raw {
                Raw::Gin11(t) => put!(t, (), ()),
                Raw::Gin12(t) => put!(t, (), (to.context)),
                Raw::Rma13(t) => put!(t, (to.context), ()),
                Raw::Rma14(t) => put!(t, (to.context), ()),
                Raw::Rma15(t) => put!(t, (to.context), (to.flags)),
                Raw::Rma16(t) => put!(t, (to.context), (to.flags)),
            }
        };
        written("iput", code, request)
    }

    /// Begins a put with a signal.
    ///
    /// # Safety
    /// The requirements of [`Table::iput`] hold.
    pub unsafe fn iput_signal(&self, to: To, b: Bytes, s: Signal) -> Result<Ptr> {
        let mut request = UNWRITTEN;
        let r = &mut request;
        macro_rules! put {
            ($t:ident, ($($first:expr),*), ($($last:expr),*)) => {
                present($t.iput_signal, "iputSignal")(
                    to.ctx $(, $first)*, b.local, b.local_mr, b.size, b.remote, b.remote_mr, to.rank,
                    s.at, s.mr, s.value, s.op $(, $last)*, r,
                )
            };
        }
        // SAFETY: the caller's promise.
        let code = unsafe {
            match &self.raw {
                Raw::Gin11(t) => put!(t, (), ()),
                Raw::Gin12(t) => put!(t, (), (to.context)),
                Raw::Rma13(t) => put!(t, (to.context), ()),
                Raw::Rma14(t) => put!(t, (to.context), (s.strong)),
                Raw::Rma15(t) => put!(t, (to.context), (s.strong, to.flags)),
                Raw::Rma16(t) => put!(t, (to.context), (s.strong, to.flags)),
            }
        };
        written("iputSignal", code, request)
    }

    /// Begins a get.
    ///
    /// # Safety
    /// The requirements of [`Table::iput`] hold.
    pub unsafe fn iget(&self, to: To, b: Bytes) -> Result<Ptr> {
        let mut request = UNWRITTEN;
        let r = &mut request;
        macro_rules! get {
            ($t:ident $(, $last:expr)*) => {
                present($t.iget, "iget")(
                    to.ctx, to.context, b.remote, b.remote_mr, b.size, b.local, b.local_mr, to.rank $(, $last)*, r,
                )
            };
        }
        // SAFETY: the caller's promise.
        let code = unsafe {
            match &self.raw {
                Raw::Gin11(_) | Raw::Gin12(_) => panic!("the table has no iget"),
                Raw::Rma13(t) => get!(t),
                Raw::Rma14(t) => get!(t),
                Raw::Rma15(t) => get!(t, to.flags),
                Raw::Rma16(t) => get!(t, to.flags),
            }
        };
        written("iget", code, request)
    }

    /// Begins a flush. `None`: there is nothing to wait for.
    pub fn iflush(&self, to: To, mr: Ptr) -> Result<Option<Ptr>> {
        let mut request = UNWRITTEN;
        let r = &mut request;
        // SAFETY: a registration of ours, or NULL.
        let code = unsafe {
            match &self.raw {
                Raw::Gin11(_) | Raw::Gin12(_) => panic!("the table has no iflush"),
                Raw::Rma13(t) => present(t.iflush, "iflush")(to.ctx, to.context, mr, to.rank, r),
                Raw::Rma14(t) => present(t.iflush, "iflush")(to.ctx, to.context, mr, to.rank, r),
                Raw::Rma15(t) => present(t.iflush, "iflush")(to.ctx, to.context, mr, to.rank, r),
                Raw::Rma16(t) => present(t.iflush, "iflush")(to.ctx, to.context, mr, to.rank, r),
            }
        };
        check("iflush", code)?;
        assert!(request != UNWRITTEN, "iflush succeeded and left the place of its request");
        Ok((!request.is_null()).then_some(request))
    }

    /// Tests a request: true when it is done.
    ///
    /// # Safety
    /// The request was not seen to be done or to have failed, and its group is not closed; or the request is NULL.
    pub unsafe fn test(&self, coll: Ptr, request: Ptr) -> Result<bool> {
        let mut done = -1;
        // SAFETY: the caller's promise.
        check("test", unsafe { every!(self, test(coll, request, &mut done)) })?;
        assert!(done == 0 || done == 1, "test says done = {done}");
        Ok(done == 1)
    }

    /// Tests a request without a place for the answer.
    ///
    /// # Safety
    /// The requirements of [`Table::test`] hold.
    pub unsafe fn test_without_place(&self, coll: Ptr, request: Ptr) -> Result<()> {
        // SAFETY: the caller's promise.
        check("test", unsafe { every!(self, test(coll, request, std::ptr::null_mut())) })
    }

    /// Makes progress.
    pub fn progress(&self, ctx: Ptr) -> Result<()> {
        // SAFETY: a context of `create_context`, or NULL.
        check("progress", unsafe { every!(self, progress(ctx)) })
    }

    /// Whether a peer is lost or refused something. (Tables of GIN say no to any pointer: NCCL 2.30.3 and 2.30.4 give one of
    /// their own there, and earlier versions do not ask.)
    pub fn last_error(&self, ctx: Ptr) -> Result<bool> {
        let mut error = 0xa5;
        // SAFETY: a context of `create_context`, or NULL, and a place of ours for a bool.
        check("queryLastError", unsafe { every!(self, query_last_error(ctx, &mut error)) })?;
        assert!(error < 2, "queryLastError wrote {error} as a bool");
        Ok(error == 1)
    }

    /// Calls finalize.
    pub fn finalize(&self, ctx: Ptr) -> Result<()> {
        // SAFETY: a context of `init`, or NULL.
        check("finalize", unsafe { every!(self, finalize(ctx)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_names_and_the_symbols_that_nccl_looks_for() {
        let symbols = Version::ALL.map(Version::symbol);
        assert_eq!(
            symbols,
            [
                "ncclGinPlugin_v11",
                "ncclGinPlugin_v12",
                "ncclRmaPlugin_v13",
                "ncclRmaPlugin_v14",
                "ncclRmaPlugin_v15",
                "ncclRmaPlugin_v16"
            ]
        );
        assert!(Version::ALL.into_iter().all(|version| Version::of(version.name()) == Some(version)));
        assert_eq!(Version::of("rma12"), None);
    }
}
