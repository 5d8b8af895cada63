//! The words of a trace's file.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// What a file begins with.
pub const MAGIC: [u8; 8] = *b"PGNTRACE";
/// The version of header and records. Another one is refused.
pub const VERSION: u32 = 1;
/// The most buffers of a receive.
pub const MOST_BUFFERS: usize = 8;

/// The end of a connection that a file is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum Role {
    /// The end that sends: NCCL's sendComm.
    Send = 1,
    /// The end that receives: NCCL's recvComm.
    Receive = 2,
}

/// What one file is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: u32,
    /// Bytes of a record.
    pub record: u32,
    /// Names the process: random, the same in all of its files.
    pub process: [u8; 16],
    /// Names the connection: the same at both of its ends.
    pub connection: [u8; 16],
    /// The boot id of the host, whose clock the records are timed by.
    pub boot: [u8; 16],
    /// The process's number.
    pub pid: u32,
    /// The number of the end among those of its process.
    pub end: u32,
    /// The device that NCCL named.
    pub device: u32,
    /// The cores that the process might use.
    pub cores: u32,
    /// Which end it is.
    pub role: Role,
    /// Zeros.
    pub zero: [u8; 7],
}

/// What a record tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum Kind {
    /// `listen` was called.
    Listen = 1,
    /// `connect` or `accept` handed the connection out.
    Made = 2,
    /// `regMr` or `regMrDmaBuf` of `size` bytes at `address`; `count` is the kind of memory.
    Register = 3,
    /// `deregMr` of `size` bytes at `address`.
    Deregister = 4,
    /// `isend` that gave request `request`.
    Send = 5,
    /// A buffer of an `irecv` that gave request `request`.
    Receive = 6,
    /// `iflush` that gave request `request`.
    Flush = 7,
    /// `test` that said that `request` is done, with `size` bytes in one of its buffers.
    Done = 8,
    /// A call that failed with result `count`.
    Failed = 9,
    /// The connection was closed: the last record of a whole trace. `count` records were left out before.
    Closed = 10,
}

/// One call, or one buffer of a call with several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Record {
    /// When the call was made, in nanoseconds of the monotonic clock. Of a post that was refused at first: its first call.
    pub time: u64,
    /// Memory of the call.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// NCCL's tag.
    pub tag: u32,
    /// The number of the request among those of this end, from 0 on.
    pub request: u32,
    /// For a post, how often it was refused before; for `Done`, how often `test` said "not yet" before; else see [`Kind`].
    pub count: u32,
    /// Nanoseconds from `time` to the return of the call, at most about 4 s.
    pub took: u32,
    /// The thread that called, numbered within its process.
    pub thread: u16,
    /// What it tells.
    pub kind: Kind,
    /// How many records of the same call follow: one for each other buffer.
    pub more: u8,
    /// 1 if the memory was named by a registration.
    pub registered: u8,
    /// Zeros.
    pub zero: [u8; 3],
}

const _: () = assert!(size_of::<Header>() == 88 && size_of::<Record>() == 48);

impl Record {
    /// A record of nothing but its kind, its time and the thread.
    pub fn new(kind: Kind, time: u64, thread: u16) -> Self {
        Record {
            time,
            address: 0,
            size: 0,
            tag: 0,
            request: 0,
            count: 0,
            took: 0,
            thread,
            kind,
            more: 0,
            registered: 0,
            zero: [0; 3],
        }
    }
}

/// What is read before all else, whatever version wrote the file.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Begin {
    pub magic: [u8; 8],
    pub version: u32,
}
