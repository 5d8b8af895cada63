//! Streams over io_uring: the links of an engine begin what they send and receive, and one system call has all of it go
//! out. Short bytes are copied by the kernel; long ones are sent out of their memory where the network device can do that.

mod ring;

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::BorrowedFd;
use std::ptr::{from_mut, from_ref};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::squeue::Entry;
use io_uring::{opcode, types};
use rustix::io::Errno;

use self::ring::{OpId, Outcome, Queues};
pub use self::ring::{Ring, RingError};
use super::wire::{MOST_PIECES, Piece, Wire};

/// From this number of bytes on a send asks the kernel to send without a copy. Below that a copy is cheaper than to pin pages and
/// to wait for the notice.
const ZERO_COPY: usize = 64 << 10;
/// Sends without a copy that a stream may have under way.
const NOTICES: usize = 16;
/// A stream asks for sends without a copy no more if the kernel has copied this number of its first ones after all.
const COPIED: u32 = 4;
/// `MSG_NOSIGNAL`.
const NO_SIGNAL: u32 = rustix::net::SendFlags::NOSIGNAL.bits();
/// `IORING_SEND_ZC_REPORT_USAGE`: the notice says whether the kernel has copied.
const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_RECVSEND_POLL_FIRST`: the kernel does not look whether there is anything to read before it waits for it.
const WAIT_FIRST: u16 = 1 << 0;

/// The pieces of one call, as the kernel takes them. Has the layout of its `msghdr`.
#[repr(C)]
struct Message {
    name: usize,
    name_bytes: u32,
    pieces: *const Piece,
    number: usize,
    control: usize,
    control_bytes: usize,
    flags: u32,
}

/// A message and its pieces, which do not move.
struct Pieces {
    message: Message,
    pieces: [Piece; MOST_PIECES],
}

// SAFETY: the pointer leads to the pieces beside it, and nobody but the owner has it.
unsafe impl Send for Pieces {}

impl Pieces {
    fn new() -> Box<Self> {
        let message = Message {
            name: 0,
            name_bytes: 0,
            pieces: std::ptr::null(),
            number: 0,
            control: 0,
            control_bytes: 0,
            flags: 0,
        };
        Box::new(Pieces { message, pieces: [Piece { address: 0, bytes: 0 }; MOST_PIECES] })
    }

    fn set(&mut self, pieces: &[Piece]) {
        self.pieces[..pieces.len()].copy_from_slice(pieces);
        self.message.pieces = self.pieces.as_ptr();
        self.message.number = pieces.len();
    }
}

/// Takes sockets that end, so that the last bytes still reach the peer.
pub type Finish = Box<dyn FnMut(Vec<TcpStream>) + Send>;

/// A send without a copy whose memory the kernel may still read.
struct Unsettled {
    op: OpId,
    /// Where it begins in the stream.
    from: u64,
    bytes: u64,
    /// The kernel reads it no more.
    over: bool,
}

/// What is under way on one stream.
struct Stream {
    /// `None` once the link has ended.
    socket: Option<TcpStream>,
    /// Its number in the ring.
    file: u32,
    receive: OpId,
    receiving: bool,
    /// The socket had more to read when it was read last.
    more: bool,
    into: Box<Pieces>,
    /// Sends that the kernel copies.
    send: OpId,
    /// What is being sent.
    sending: Option<OpId>,
    out: Box<Pieces>,
    /// What had gone out of the ring when this stream began something last.
    began: u64,
    /// Bytes that were taken.
    sent: u64,
    zero_copy: bool,
    /// Sends without a copy that the kernel has copied, and whether it has done one without.
    copied: u32,
    uncopied: bool,
    unsettled: VecDeque<Unsettled>,
    /// What sends without a copy take; there are [`NOTICES`] of them in all.
    free: Vec<OpId>,
}

/// Streams over a ring of io_uring, which the links of an engine share.
pub struct Uring {
    ring: Arc<Ring>,
    streams: Vec<Stream>,
    finish: Finish,
    /// A stream has ended or failed: nobody asks for the rest.
    broken: bool,
    stopping: bool,
    /// Nothing is under way any more, and the streams are off the ring.
    over: bool,
    /// Until when the streams may be on their way to their end, if they end in order.
    finishing: Option<Instant>,
    /// Bytes that the kernel has sent out of their memory, and those that it has copied.
    copied: (u64, u64),
}

impl Uring {
    /// Streams over these sockets, which are connected. `finish` takes them when the link ends in order; they do not block
    /// then.
    pub fn new(ring: &Arc<Ring>, sockets: Vec<TcpStream>, finish: Finish) -> io::Result<Self> {
        let copied = (0, 0);
        let streams = Vec::with_capacity(sockets.len());
        let mut wire = Uring {
            ring: ring.clone(),
            streams,
            finish,
            broken: false,
            stopping: false,
            over: false,
            finishing: None,
            copied,
        };
        ring.lock().add_wire();
        for socket in sockets {
            // Else operations would fail where they are to wait.
            socket.set_nonblocking(false)?;
            let mut queues = ring.lock();
            let file = queues.add_file(&socket)?;
            wire.streams.push(Stream {
                socket: Some(socket),
                file,
                receive: queues.add_op(),
                receiving: false,
                more: false,
                into: Pieces::new(),
                send: queues.add_op(),
                sending: None,
                out: Pieces::new(),
                began: 0,
                sent: 0,
                zero_copy: ring.zero_copy(),
                copied: 0,
                uncopied: false,
                unsettled: VecDeque::with_capacity(NOTICES),
                free: (0..NOTICES).map(|_| queues.add_op()).collect(),
            });
        }
        Ok(wire)
    }

    /// The wire carries nothing more.
    #[cold]
    fn fails(&mut self, error: io::Error) -> io::Error {
        self.broken = true;
        let mut queues = self.ring.lock();
        self.streams.iter().for_each(|stream| stream.ops().for_each(|op| queues.mute(op)));
        error
    }

    /// Ends what is under way. True when nothing is.
    fn cancel_all(&mut self) -> bool {
        let ring = self.ring.clone();
        let mut queues = ring.lock();
        for stream in &self.streams {
            for op in stream.ops() {
                queues.mute(op);
                // Where that fails for now, it is tried again with the next call.
                let _ = queues.cancel(op);
            }
        }
        let _ = queues.flush();
        let _ = queues.look();
        let _ = queues.wake();
        self.streams.iter().all(|stream| stream.ops().all(|op| !queues.is_busy(op)))
    }
}

impl Stream {
    /// All operations of the stream.
    fn ops(&self) -> impl Iterator<Item = OpId> {
        let unsettled = self.unsettled.iter().map(|u| u.op);
        [self.receive, self.send].into_iter().chain(unsettled).chain(self.free.iter().copied())
    }

    /// Takes what came of an operation that is under way; has it go out before, if it has not yet.
    #[inline]
    fn ask(&self, op: OpId, queues: &mut Queues) -> io::Result<Option<Outcome>> {
        queues.look()?;
        if let Some(outcome) = queues.take(op) {
            return Ok(Some(outcome));
        }
        if self.began != queues.flushes() {
            return Ok(None);
        }
        queues.flush()?;
        queues.look()?;
        Ok(queues.take(op))
    }

    /// Begins to send, without a copy if that helps.
    ///
    /// # Safety
    ///
    /// As [`Wire::send`].
    #[inline]
    unsafe fn begin_send(&mut self, pieces: &[Piece], queues: &mut Queues) -> io::Result<()> {
        let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let file = types::Fixed(self.file);
        self.out.set(pieces);
        if self.zero_copy
            && bytes >= ZERO_COPY
            && let Some(op) = self.free.pop()
        {
            let message = from_ref(&self.out.message).cast();
            let entry = opcode::SendMsgZc::new(file, message).flags(NO_SIGNAL).ioprio(REPORT_USAGE).build();
            self.unsettled.push_back(Unsettled { op, from: self.sent, bytes: 0, over: false });
            self.sending = Some(op);
            // SAFETY: message and pieces do not move, and are not set before this has a result. The bytes stay until
            // they are settled, as our caller promises.
            return unsafe { self.begin(op, entry, queues) };
        }
        self.sending = Some(self.send);
        let entry = match pieces {
            [one] => {
                let bytes = one.bytes.min(i32::MAX as usize) as u32;
                opcode::Send::new(file, one.address as *const u8, bytes).flags(NO_SIGNAL as i32).build()
            }
            _ => opcode::SendMsg::new(file, from_ref(&self.out.message).cast()).flags(NO_SIGNAL).build(),
        };
        // SAFETY: as above; the caller keeps the bytes until they are taken.
        unsafe { self.begin(self.send, entry, queues) }
    }

    /// Begins to receive.
    ///
    /// # Safety
    ///
    /// As [`Wire::receive`].
    #[inline]
    unsafe fn begin_receive(&mut self, pieces: &[Piece], queues: &mut Queues) -> io::Result<()> {
        let file = types::Fixed(self.file);
        let first = if self.more { 0 } else { WAIT_FIRST };
        let entry = match pieces {
            [one] => {
                let bytes = one.bytes.min(i32::MAX as usize) as u32;
                opcode::Recv::new(file, one.address as *mut u8, bytes).ioprio(first).build()
            }
            _ => {
                self.into.set(pieces);
                opcode::RecvMsg::new(file, from_mut(&mut self.into.message).cast()).ioprio(first).build()
            }
        };
        self.receiving = true;
        // SAFETY: message and pieces do not move, and are not set before this has a result. The caller keeps the bytes.
        unsafe { self.begin(self.receive, entry, queues) }
    }

    /// # Safety
    ///
    /// As [`Queues::begin`].
    #[inline]
    unsafe fn begin(&mut self, op: OpId, entry: Entry, queues: &mut Queues) -> io::Result<()> {
        // SAFETY: as our caller promises.
        unsafe { queues.begin(op, entry) }?;
        self.began = queues.flushes();
        Ok(())
    }

    /// Takes what came of a send.
    fn sent(&mut self, op: OpId, outcome: Outcome, queues: &Queues) -> io::Result<usize> {
        self.sending = None;
        let taken = outcome.result;
        if op != self.send {
            let unsettled = self.unsettled.back_mut().expect("it was begun last");
            unsettled.bytes = taken.map_or(0, |n| n as u64);
            // Without a notice the kernel reads the memory no more.
            unsettled.over = !queues.expects_notice(op);
        }
        match taken {
            Ok(n) => {
                self.sent += n as u64;
                Ok(n)
            }
            // The kernel, the memory or a limit has no room for it: from now on the kernel copies.
            Err(Errno::INVAL | Errno::NOBUFS | Errno::NOMEM | Errno::OPNOTSUPP | Errno::FAULT)
                if op != self.send =>
            {
                self.zero_copy = false;
                Ok(0)
            }
            // A thread that began it has ended.
            Err(Errno::CANCELED | Errno::INTR | Errno::AGAIN) => Ok(0),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes the notices that are in. Adds the bytes that were sent without and with a copy to `copied`.
    #[inline]
    fn settle(&mut self, queues: &mut Queues, copied: &mut (u64, u64)) {
        for unsettled in &mut self.unsettled {
            let bytes = unsettled.bytes;
            if self.sending == Some(unsettled.op) {
                continue;
            }
            if let Some(was_copied) = queues.take_notice(unsettled.op) {
                unsettled.over = true;
                if was_copied {
                    copied.1 += bytes;
                    self.copied += 1;
                } else {
                    copied.0 += bytes;
                    self.uncopied = true;
                }
            }
        }
        if self.copied >= COPIED && !self.uncopied {
            self.zero_copy = false;
        }
        while self.unsettled.front().is_some_and(|first| first.over) {
            let first = self.unsettled.pop_front().expect("there is one");
            self.free.push(first.op);
        }
    }
}

impl Wire for Uring {
    fn streams(&self) -> usize {
        self.streams.len()
    }

    #[inline]
    unsafe fn send(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize> {
        let stream = &mut self.streams[stream];
        let mut queues = self.ring.lock();
        let result = match stream.sending {
            None => {
                // SAFETY: as our caller promises.
                unsafe { stream.begin_send(pieces, &mut queues) }.map(|()| 0)
            }
            Some(op) => match stream.ask(op, &mut queues) {
                Ok(None) => Ok(0),
                Ok(Some(outcome)) => {
                    let sent = stream.sent(op, outcome, &queues);
                    if op == stream.send {
                        self.copied.1 += *sent.as_ref().unwrap_or(&0) as u64;
                    }
                    sent
                }
                Err(e) => Err(e),
            },
        };
        drop(queues);
        result.map_err(|e| self.fails(e))
    }

    #[inline]
    unsafe fn receive(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize> {
        let stream = &mut self.streams[stream];
        let mut queues = self.ring.lock();
        let mut receive = || -> io::Result<usize> {
            if !stream.receiving {
                // SAFETY: as our caller promises.
                unsafe { stream.begin_receive(pieces, &mut queues) }?;
                if !stream.more {
                    return Ok(0);
                }
            }
            let Some(outcome) = stream.ask(stream.receive, &mut queues)? else { return Ok(0) };
            (stream.receiving, stream.more) = (false, outcome.more);
            match outcome.result {
                Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => Ok(n),
                Err(Errno::CANCELED | Errno::INTR | Errno::AGAIN) => Ok(0),
                Err(e) => Err(e.into()),
            }
        };
        let result = receive();
        drop(queues);
        result.map_err(|e| self.fails(e))
    }

    #[inline]
    fn settled(&self, stream: usize) -> u64 {
        let stream = &self.streams[stream];
        stream.unsettled.front().map_or(stream.sent, |first| first.from)
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        let mut queues = self.ring.lock();
        for stream in &mut self.streams {
            if !stream.unsettled.is_empty() {
                stream.settle(&mut queues, &mut self.copied);
            }
        }
        // What several links begin goes out with one call: by the link that comes to its next turn first.
        if queues.is_shared() { Ok(()) } else { queues.flush() }
    }

    fn stopped(&mut self) -> bool {
        if self.over {
            return true;
        }
        if !self.stopping {
            self.stopping = true;
            for stream in &self.streams {
                let Some(socket) = &stream.socket else { continue };
                if self.finishing.is_none() {
                    // Bytes that wait for the peer's acknowledgement would be read until that comes, so they are dropped.
                    let dropped = !stream.unsettled.is_empty() && rustix::net::connect_unspec(socket).is_ok();
                    if !dropped {
                        let _ = socket.shutdown(Shutdown::Both);
                    }
                }
            }
        }
        if self.finishing.is_some_and(|until| Instant::now() >= until) {
            let sockets = self.streams.iter().filter_map(|stream| stream.socket.as_ref());
            sockets.for_each(|socket| _ = rustix::net::connect_unspec(socket));
        }
        if !self.cancel_all() {
            return false;
        }
        let mut queues = self.ring.lock();
        for stream in self.streams.drain(..) {
            queues.remove_file(stream.file);
            stream.ops().for_each(|op| queues.remove_op(op));
        }
        queues.remove_wire();
        self.over = true;
        true
    }

    fn finish(&mut self, patience: Duration) {
        if self.finishing.is_some() || self.stopping {
            return;
        }
        self.finishing = Some(Instant::now() + patience);
        // Else what is received now and what the closing reads would be two readers of a stream.
        self.cancel_all();
        let mut ends = Vec::new();
        for stream in &mut self.streams {
            let Some(socket) = stream.socket.take() else { continue };
            let _ = socket.set_nonblocking(true);
            if !stream.unsettled.is_empty() {
                // To drop what the peer does not acknowledge.
                stream.socket = socket.try_clone().ok();
                if stream.socket.is_none() {
                    let _ = rustix::net::connect_unspec(&socket);
                }
            }
            ends.push(socket);
        }
        if !ends.is_empty() {
            (self.finish)(ends);
        }
    }

    fn cut(&mut self) {
        self.finishing = self.finishing.map(|_| Instant::now());
    }

    fn prepare_sleep(&mut self, full: &dyn Fn(usize) -> bool) -> bool {
        if self.broken || self.over {
            return false;
        }
        let mut queues = self.ring.lock();
        if let Err(e) = queues.flush() {
            tracing::debug!("a ring of io_uring: {e}");
            return true;
        }
        // News of any link count: its own look may have come before this one's has read them.
        let idle = |(i, stream): (usize, &Stream)| !stream.receiving || full(i) && stream.sending.is_none();
        queues.has_news() || self.streams.iter().enumerate().any(idle)
    }

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        if !self.over {
            fds.push(self.ring.fd());
        }
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn copied(&self) -> Option<(u64, u64)> {
        Some(self.copied)
    }
}

impl Drop for Uring {
    /// Waits until the kernel touches no memory of the link any more. A link has seen to that before.
    fn drop(&mut self) {
        while !self.stopped() {
            std::thread::yield_now();
        }
        if let (sent, copied) = self.copied
            && sent + copied > 0
        {
            tracing::info!("io_uring sent {sent} bytes out of their memory, and copied {copied}");
        }
    }
}
