//! Streams over plain sockets: one system call sends or receives for a stream, and the kernel copies.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};

use super::wire::{Piece, Wire};

/// So many bytes are put together before they are sent: that costs less than to have the kernel read a list of pieces.
const SHORT: usize = 512;

/// Takes streams that end, so that the last bytes still reach the peer.
pub type Finish = Box<dyn FnMut(Vec<TcpStream>) + Send>;

/// Streams over plain sockets.
pub struct Sockets {
    streams: Vec<TcpStream>,
    sent: Vec<u64>,
    finish: Finish,
    /// Becomes readable when a stream can go on; made for the first sleep.
    epoll: Option<OwnedFd>,
    /// Streams that are watched for room.
    full: Vec<bool>,
}

impl Sockets {
    /// Streams over these sockets, which are connected and do not block. `finish` takes them when the link ends in order.
    pub fn new(streams: Vec<TcpStream>, finish: Finish) -> Self {
        let n = streams.len();
        Sockets { streams, sent: vec![0; n], finish, epoll: None, full: vec![false; n] }
    }

    /// Has the streams watched.
    fn watch(&mut self, full: &dyn Fn(usize) -> bool) -> io::Result<()> {
        let made = self.epoll.is_none();
        let epoll = match &self.epoll {
            Some(epoll) => epoll,
            None => self.epoll.insert(epoll::create(epoll::CreateFlags::CLOEXEC)?),
        };
        for (i, stream) in self.streams.iter().enumerate() {
            let full = full(i);
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, full);
            let data = epoll::EventData::new_u64(i as u64);
            if made {
                epoll::add(epoll, stream, data, flags)?;
            } else if full != self.full[i] {
                epoll::modify(epoll, stream, data, flags)?;
            }
            self.full[i] = full;
        }
        Ok(())
    }
}

/// What a call on a socket that does not block has moved: 0 if it would have blocked.
fn moved(result: Result<usize, Errno>) -> io::Result<usize> {
    match result {
        Ok(n) => Ok(n),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(e) => Err(e.into()),
    }
}

impl Wire for Sockets {
    fn streams(&self) -> usize {
        self.streams.len()
    }

    unsafe fn send(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize> {
        let socket = &self.streams[stream];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let result = if bytes <= SHORT {
            let (mut short, mut n) = ([0; SHORT], 0);
            for piece in pieces {
                // SAFETY: the piece is mapped for reading, as the caller promises, and the copy is this function's own and
                // long enough.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        piece.address as *const u8,
                        short[n..].as_mut_ptr(),
                        piece.bytes,
                    )
                };
                n += piece.bytes;
            }
            send(socket, &short[..n], flags)
        } else {
            // SAFETY: `Piece` has the layout of the kernel's `iovec`, which `IoSlice` has by its documentation; the caller
            // promises that the bytes are mapped. No reference to the bytes is made: the kernel alone reads them.
            let slices =
                unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast::<IoSlice<'_>>(), pieces.len()) };
            sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags)
        };
        let sent = moved(result)?;
        self.sent[stream] += sent as u64;
        Ok(sent)
    }

    unsafe fn receive(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize> {
        let socket = &self.streams[stream];
        let result = if let [one] = pieces {
            // SAFETY: the bytes are mapped for writing and free of Rust references meanwhile, as the caller promises.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(one.address as *mut MaybeUninit<u8>, one.bytes) };
            recv(socket, bytes, RecvFlags::DONTWAIT).map(|(_, n)| n)
        } else {
            let mut slices: [Piece; 2] = [pieces[0], pieces[pieces.len() - 1]];
            // SAFETY: as in `send`, for writing; the copy of the pieces is this function's own.
            let slices = unsafe {
                std::slice::from_raw_parts_mut(
                    slices.as_mut_ptr().cast::<IoSliceMut<'_>>(),
                    pieces.len().min(2),
                )
            };
            rustix::io::readv(socket, slices)
        };
        match result {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            result => moved(result),
        }
    }

    fn settled(&self, stream: usize) -> u64 {
        self.sent[stream]
    }

    fn stopped(&mut self) -> bool {
        // The kernel has copied, and copies no more: nothing else reads from these sockets.
        for stream in self.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        true
    }

    fn finish(&mut self) {
        let streams = std::mem::take(&mut self.streams);
        if !streams.is_empty() {
            (self.finish)(streams);
        }
    }

    fn prepare_sleep(&mut self, full: &dyn Fn(usize) -> bool) -> bool {
        match self.watch(full) {
            Ok(()) => false,
            Err(e) => {
                tracing::debug!("watching the streams of a link: {e}");
                true
            }
        }
    }

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        fds.extend(self.epoll.iter().map(|epoll| epoll.as_fd()));
    }

    fn name(&self) -> &'static str {
        "sockets"
    }
}
