//! The byte streams under a link: what sends and receives bytes, and says when it is done with memory.
//!
//! A wire may work at once, as sockets do, or in the background, as io_uring does. One interface serves both: a call begins
//! what was not begun, and answers what came of what was begun before. So a caller names the same bytes until the
//! wire answers that it has taken some of them.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// A stretch of memory that a wire reads or writes. Has the layout of the kernel's `iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address of the first byte.
    pub address: usize,
    /// Length in bytes.
    pub bytes: usize,
}

/// The most pieces that one call names.
pub const MOST_PIECES: usize = 64;

/// The streams of one link to one peer. Belongs to one engine thread; no call blocks.
///
/// An error means that the stream, and with it the link, carries nothing more.
pub trait Wire: Send {
    /// How many streams there are, from 1.
    fn streams(&self) -> usize;

    /// Sends bytes on a stream, from the front of `pieces` on. Returns how many bytes the wire has taken; 0: none yet.
    ///
    /// A wire that works in the background answers later for what an earlier call began. Until then it goes by the
    /// pieces of that earlier call.
    ///
    /// # Safety
    ///
    /// The pieces are mapped for reading. They stay so, and their bytes stay as they are, until [`Wire::settled`] covers
    /// them or [`Wire::stopped`] has answered true.
    unsafe fn send(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize>;

    /// Receives bytes of a stream into `pieces`, in their order. Returns how many bytes came; 0: none yet. The end of the
    /// stream is the error `UnexpectedEof`.
    ///
    /// A wire that works in the background answers later for what an earlier call began. Until then it goes by the
    /// pieces of that earlier call.
    ///
    /// # Safety
    ///
    /// The pieces are mapped for writing and free of Rust references, until the call that answers for them has returned
    /// or [`Wire::stopped`] has answered true.
    unsafe fn receive(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize>;

    /// Bytes of a stream, from its beginning, that the wire has taken and will not read again. A wire that sends without
    /// a copy reads bytes after it has taken them.
    fn settled(&self, stream: usize) -> u64;

    /// Called at the end of a pass: what was begun goes out.
    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Ends all streams. True when the wire reads and writes no memory any more. Asked again and again until then.
    fn stopped(&mut self) -> bool;

    /// Takes the last words of this end along: what the wire has taken still goes out, and the streams are closed when the
    /// peer has read it, beside the engine. What the wire still reads after `patience` is dropped. Called once, after the last send.
    fn finish(&mut self, patience: Duration);

    /// The patience of [`Wire::finish`] is over. May be called again and again.
    fn cut(&mut self) {}

    /// The engine is about to sleep: what arrives from now on wakes it, and, on streams for which `full` says so, room to
    /// send. True if something may have arrived already.
    fn prepare_sleep(&mut self, full: &dyn Fn(usize) -> bool) -> bool;

    /// Adds the descriptors that become readable when a stream can go on.
    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>);

    /// A name for the log: how bytes are sent and received.
    fn name(&self) -> &'static str;

    /// Bytes that the kernel has sent out of the memory itself, and those that it copied, as far as the wire is told.
    fn copied(&self) -> Option<(u64, u64)> {
        None
    }
}
