//! NCCL's C API, opened at run time: what nccl.h of 2.20 and later declares.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

/// `ncclDataType_t`: `ncclFloat32`.
const FLOAT32: c_int = 7;
/// `ncclRedOp_t`: `ncclSum`.
const SUM: c_int = 0;
/// `ncclResult_t`: `ncclInProgress`.
const IN_PROGRESS: c_int = 7;

/// `ncclUniqueId`: by what ranks find each other.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

type Handle = *mut c_void;

macro_rules! functions {
    ($(fn $name:ident($($type:ty),*) -> $result:ty;)*) => {
        /// The functions that are called.
        #[allow(non_snake_case)] // NCCL's own names
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl Functions {
            fn of(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        // SAFETY: nccl.h declares the function with this type, an enum being an int in C.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|_| stringify!($name))?
                    },)*
                })
            }
        }
    };
}

functions! {
    fn ncclGetUniqueId(*mut UniqueId) -> c_int;
    fn ncclCommInitRank(*mut Handle, c_int, UniqueId, c_int) -> c_int;
    fn ncclCommDestroy(Handle) -> c_int;
    fn ncclCommGetAsyncError(Handle, *mut c_int) -> c_int;
    fn ncclGetErrorString(c_int) -> *const c_char;
    fn ncclGetLastError(Handle) -> *const c_char;
    fn ncclGroupStart() -> c_int;
    fn ncclGroupEnd() -> c_int;
    fn ncclAllReduce(u64, u64, usize, c_int, c_int, Handle, u64) -> c_int;
    fn ncclReduceScatter(u64, u64, usize, c_int, c_int, Handle, u64) -> c_int;
    fn ncclAllGather(u64, u64, usize, c_int, Handle, u64) -> c_int;
    fn ncclBroadcast(u64, u64, usize, c_int, c_int, Handle, u64) -> c_int;
    fn ncclSend(u64, usize, c_int, c_int, Handle, u64) -> c_int;
    fn ncclRecv(u64, usize, c_int, c_int, Handle, u64) -> c_int;
}

/// The library. It stays loaded: what it started can't be stopped.
pub struct Nccl(Functions);

impl Nccl {
    /// Opens the library of this name or path.
    pub fn open(path: &Path) -> Result<&'static Nccl> {
        // SAFETY: the library that the user chose; its constructors are made for being loaded by any program.
        let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.map_err(|e| {
            // libloading's own message leaves out what the loader said.
            anyhow!("{}", std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string))
        })?;
        let library: &'static Library = Box::leak(Box::new(library));
        match Functions::of(library) {
            Ok(functions) => Ok(Box::leak(Box::new(Nccl(functions)))),
            Err(name) => bail!("{} has no {name}: is it NCCL 2.20 or later?", path.display()),
        }
    }

    fn text(text: *const c_char) -> String {
        match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL's strings end with a NUL; they are constants, or written before an error was returned.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        }
    }

    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the first takes any number; the second takes NULL for "of any communicator".
        let (what, last) = unsafe {
            (
                Self::text((self.0.ncclGetErrorString)(code)),
                Self::text((self.0.ncclGetLastError)(std::ptr::null_mut())),
            )
        };
        match last.is_empty() {
            true => bail!("{call}: {what}"),
            false => bail!("{call}: {what}: {last}"),
        }
    }

    /// A name for ranks to meet by; this process answers them while it lives.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the place is ours.
        self.check("ncclGetUniqueId", unsafe { (self.0.ncclGetUniqueId)(&mut id) })?;
        Ok(id)
    }

    /// Joins the communicator `id` as one of its ranks, on this thread's device.
    pub fn join(&'static self, id: UniqueId, rank: u32, ranks: u32) -> Result<Comm> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place is ours; all ranks were told the same id and number.
        let code = unsafe { (self.0.ncclCommInitRank)(&mut handle, ranks as c_int, id, rank as c_int) };
        self.check("ncclCommInitRank", code)?;
        Ok(Comm { nccl: self, handle })
    }
}

/// A communicator. It is not destroyed on drop: a rank that fails ends as a process.
pub struct Comm {
    nccl: &'static Nccl,
    handle: Handle,
}

/// Where a call reads from and writes to (addresses of device memory), and the stream that it runs on.
///
/// Who makes a call promises that both are memory of this process's device that holds the elements of the call, and that
/// the memory and the stream live until the stream has passed the call.
#[derive(Clone, Copy)]
pub struct Call {
    pub input: u64,
    pub output: u64,
    pub stream: u64,
}

impl Comm {
    /// Sums `count` elements of every rank, at every rank.
    ///
    /// # Safety
    /// The promise of [`Call`].
    pub unsafe fn all_reduce(&self, c: Call, count: usize) -> Result<()> {
        let f = self.nccl.0.ncclAllReduce;
        // SAFETY: the caller's promise.
        self.nccl.check("ncclAllReduce", unsafe {
            f(c.input, c.output, count, FLOAT32, SUM, self.handle, c.stream)
        })
    }

    /// Sums a `part` for each rank of every rank, each part at its rank.
    ///
    /// # Safety
    /// The promise of [`Call`].
    pub unsafe fn reduce_scatter(&self, c: Call, part: usize) -> Result<()> {
        let f = self.nccl.0.ncclReduceScatter;
        // SAFETY: the caller's promise.
        let code = unsafe { f(c.input, c.output, part, FLOAT32, SUM, self.handle, c.stream) };
        self.nccl.check("ncclReduceScatter", code)
    }

    /// Gathers a `part` of every rank, at every rank.
    ///
    /// # Safety
    /// The promise of [`Call`].
    pub unsafe fn all_gather(&self, c: Call, part: usize) -> Result<()> {
        let f = self.nccl.0.ncclAllGather;
        // SAFETY: the caller's promise.
        self.nccl
            .check("ncclAllGather", unsafe { f(c.input, c.output, part, FLOAT32, self.handle, c.stream) })
    }

    /// Copies `count` elements of `root` to every rank.
    ///
    /// # Safety
    /// The promise of [`Call`].
    pub unsafe fn broadcast(&self, c: Call, count: usize, root: u32) -> Result<()> {
        let f = self.nccl.0.ncclBroadcast;
        // SAFETY: the caller's promise.
        let code = unsafe { f(c.input, c.output, count, FLOAT32, root as c_int, self.handle, c.stream) };
        self.nccl.check("ncclBroadcast", code)
    }

    /// Sends and receives in one group: each of `sends` and `receives` is a peer and a number of bytes from the start.
    ///
    /// # Safety
    /// The promise of [`Call`], for `count` elements from each of these places on.
    pub unsafe fn exchange(
        &self,
        c: Call,
        count: usize,
        sends: impl Iterator<Item = (u32, u64)>,
        receives: impl Iterator<Item = (u32, u64)>,
    ) -> Result<()> {
        let f = &self.nccl.0;
        // SAFETY: no arguments.
        self.nccl.check("ncclGroupStart", unsafe { (f.ncclGroupStart)() })?;
        for (peer, at) in sends {
            // SAFETY: the caller's promise.
            let code =
                unsafe { (f.ncclSend)(c.input + at, count, FLOAT32, peer as c_int, self.handle, c.stream) };
            self.nccl.check("ncclSend", code)?;
        }
        for (peer, at) in receives {
            // SAFETY: the caller's promise.
            let code =
                unsafe { (f.ncclRecv)(c.output + at, count, FLOAT32, peer as c_int, self.handle, c.stream) };
            self.nccl.check("ncclRecv", code)?;
        }
        // SAFETY: no arguments.
        self.nccl.check("ncclGroupEnd", unsafe { (f.ncclGroupEnd)() })
    }

    /// Whether the communicator has failed by itself.
    pub fn async_error(&self) -> Result<()> {
        let mut code = 0;
        // SAFETY: the place is ours, the communicator lives.
        let answer = unsafe { (self.nccl.0.ncclCommGetAsyncError)(self.handle, &mut code) };
        self.nccl.check("ncclCommGetAsyncError", answer)?;
        self.nccl.check("the communicator failed", code)
    }

    /// Destroys the communicator; its streams are idle.
    pub fn destroy(self) -> Result<()> {
        // SAFETY: made by `join`, used no more.
        self.nccl.check("ncclCommDestroy", unsafe { (self.nccl.0.ncclCommDestroy)(self.handle) })
    }
}
