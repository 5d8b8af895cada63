//! Streams over plain sockets: one system call sends or receives for a stream, and the kernel copies.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pushgate_door::Stream;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};

use super::wire::{Piece, Wire};

/// Pieces of at most this number of bytes are put together before they are sent: that costs less than to have the kernel
/// read a list of pieces.
const SHORT: usize = 512;
/// The most streams of one engine that are watched. Others are asked one by one.
const MOST: usize = 1 << 14;
/// Events that are taken at once.
const EVENTS: usize = 64;

/// Takes streams that end, so that the last bytes still reach the peer.
pub type Finish = Box<dyn FnMut(Vec<Stream>) + Send>;

/// Tells which streams of one engine can go on. One system call asks for all of them, so that links over which nothing comes cost
/// none. One thread at a time asks, the engine's.
pub struct Readiness {
    /// Edge-triggered: says once that a stream can go on again.
    epoll: OwnedFd,
    /// How often it was asked.
    asked: AtomicU64,
    /// An answer named streams since an engine looked whether it may sleep.
    news: AtomicBool,
    /// Streams that are watched.
    watched: AtomicUsize,
    /// Four bits for each stream.
    bits: Box<[AtomicU64]>,
    free: Mutex<Vec<u32>>,
}

/// Bytes of a stream may be there.
const BYTES: u64 = 1;
/// There may be room for bytes.
const ROOM: u64 = 2;
/// The stream ends. That is told once, perhaps together with the last bytes, so this bit stays.
const END: u64 = 4;

impl Readiness {
    /// Watches no stream yet.
    pub fn new() -> io::Result<Arc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bits = (0..MOST * 4 / 64).map(|_| AtomicU64::new(0)).collect();
        let free = Mutex::new((0..MOST as u32).rev().collect());
        let (asked, news, watched) = (AtomicU64::new(0), AtomicBool::new(false), AtomicUsize::new(0));
        Ok(Arc::new(Readiness { epoll, asked, news, watched, bits, free }))
    }

    /// Watches a stream. `None`: it can't be, and is asked each time.
    fn watch(&self, stream: &Stream) -> Option<u32> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let place = *free.last()?;
        self.clear(place, END);
        self.set(place, BYTES | ROOM);
        use epoll::EventFlags as Flags;
        let flags = Flags::IN | Flags::RDHUP | Flags::OUT | Flags::ET;
        epoll::add(&self.epoll, stream, epoll::EventData::new_u64(place as u64), flags).ok()?;
        // Relaxed, as below: whether a stream is alone decides who is asked, its socket or the epoll instance. What is told
        // meanwhile stays to be told.
        self.watched.fetch_add(1, Ordering::Relaxed);
        free.pop()
    }

    /// Watches a stream no more.
    fn forget(&self, stream: &Stream, place: u32) {
        let _ = epoll::delete(&self.epoll, stream);
        self.watched.fetch_sub(1, Ordering::Relaxed);
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(place);
    }

    // Relaxed in all of these: the bits are hints, and the sockets' system calls order the bytes.

    fn set(&self, place: u32, bits: u64) {
        let at = place as usize * 4;
        self.bits[at / 64].fetch_or(bits << (at % 64), Ordering::Relaxed);
    }

    fn clear(&self, place: u32, bits: u64) {
        let at = place as usize * 4;
        self.bits[at / 64].fetch_and(!(bits << (at % 64)), Ordering::Relaxed);
    }

    fn has(&self, place: u32, bits: u64) -> bool {
        let at = place as usize * 4;
        self.bits[at / 64].load(Ordering::Relaxed) >> (at % 64) & bits != 0
    }

    /// Asks which streams can go on again.
    fn ask(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        loop {
            let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let Ok((events, _)) = epoll::wait(&self.epoll, &mut events[..], Some(&now)) else { return };
            for event in events.iter() {
                let epoll::Event { flags, data } = *event;
                let (place, out) = (data.u64() as u32, flags.contains(epoll::EventFlags::OUT));
                let ends = flags.intersects(!(epoll::EventFlags::OUT | epoll::EventFlags::IN));
                let bytes = if flags.contains(epoll::EventFlags::IN) { BYTES } else { 0 };
                self.set(place, bytes | if out { ROOM } else { 0 } | if ends { END | ROOM } else { 0 });
            }
            if !events.is_empty() {
                self.news.store(true, Ordering::Relaxed);
            }
            if events.len() < EVENTS {
                return;
            }
        }
    }
}

/// Streams over plain sockets.
pub struct Sockets {
    streams: Vec<Stream>,
    sent: Vec<u64>,
    finish: Finish,
    readiness: Arc<Readiness>,
    /// The streams' places there.
    places: Vec<Option<u32>>,
    /// How often the readiness had been asked when this link looked last.
    asked: u64,
    /// Streams whose end was received, a bit for each. Nothing that is told of them keeps the engine awake.
    ended: u64,
}

impl Sockets {
    /// Streams of a link whose engine asks `readiness`. `finish` takes them when the link ends in order.
    pub fn new(streams: Vec<Stream>, finish: Finish, readiness: &Arc<Readiness>) -> Self {
        let places = streams.iter().map(|stream| readiness.watch(stream)).collect();
        let (sent, readiness) = (vec![0; streams.len()], readiness.clone());
        Sockets { streams, sent, finish, readiness, places, asked: 0, ended: 0 }
    }

    /// Whether a stream may go on as one of `bits` says.
    #[inline]
    fn may(&mut self, stream: usize, bits: u64) -> bool {
        let Some(place) = self.places[stream] else { return true };
        // A stream alone is asked itself: that is one system call for bytes that are there, and not two.
        if self.readiness.has(place, bits) || self.readiness.watched.load(Ordering::Relaxed) == 1 {
            return true;
        }
        // Another link of the engine has asked since, or this one does for all.
        let asked = self.readiness.asked.load(Ordering::Relaxed);
        if self.asked == asked {
            self.readiness.ask();
        }
        self.asked = self.readiness.asked.load(Ordering::Relaxed);
        self.readiness.has(place, bits)
    }

    /// Lets the streams go.
    fn take(&mut self) -> Vec<Stream> {
        for (stream, place) in self.streams.iter().zip(&self.places) {
            if let Some(place) = place {
                self.readiness.forget(stream, *place);
            }
        }
        self.places.clear();
        std::mem::take(&mut self.streams)
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        self.take();
    }
}

/// The error of an encrypted stream as a system call would give it: `other` if the error is none of the kernel's. An encrypted stream
/// that waits for its socket says `WouldBlock` without an errno.
fn errno(e: &io::Error, other: Errno) -> Errno {
    match e.kind() {
        io::ErrorKind::WouldBlock => Errno::AGAIN,
        _ => Errno::from_io_error(e).unwrap_or(other),
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
        if !self.may(stream, ROOM) {
            return Ok(0);
        }
        let (socket, place) = (&self.streams[stream], self.places[stream]);
        if let Some(place) = place {
            // Before the call: room that comes after it is told again.
            self.readiness.clear(place, ROOM);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let result = if socket.is_encrypted() {
            // SAFETY: as below. Encrypting reads the bytes in this process; a device that writes there meanwhile spoils its own
            // message (P1).
            let slices =
                unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast::<IoSlice<'_>>(), pieces.len()) };
            socket.send(slices).map_err(|e| errno(&e, Errno::PIPE))
        } else if bytes <= SHORT {
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
        // An encrypted stream takes what fits into a buffer of its own, which the kernel does not report, and nothing while the
        // socket has no room for that.
        if let Some(place) =
            place.filter(|_| sent == bytes || sent > 0 && self.streams[stream].is_encrypted())
        {
            self.readiness.set(place, ROOM);
        }
        self.sent[stream] += sent as u64;
        Ok(sent)
    }

    unsafe fn receive(&mut self, stream: usize, pieces: &[Piece]) -> io::Result<usize> {
        if !self.streams[stream].has_bytes() && !self.may(stream, BYTES | END) {
            return Ok(0);
        }
        let (socket, place) = (&self.streams[stream], self.places[stream]);
        if let Some(place) = place {
            // Before the call: bytes that come after it are told again.
            self.readiness.clear(place, BYTES);
        }
        let result = if socket.is_encrypted() {
            let mut slices: [Piece; 2] = [pieces[0], pieces[pieces.len() - 1]];
            // SAFETY: as below; decrypting writes there in this process.
            let slices = unsafe {
                std::slice::from_raw_parts_mut(
                    slices.as_mut_ptr().cast::<IoSliceMut<'_>>(),
                    pieces.len().min(2),
                )
            };
            socket.recv(slices).map_err(|e| errno(&e, Errno::CONNRESET))
        } else if let [one] = pieces {
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
        let asked: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let some = matches!(result, Ok(n) if 0 < n && n < asked) && !self.streams[stream].is_encrypted();
        if let Some(place) = place.filter(|_| !some) {
            // Fewer bytes than there was room for were all, and so was none; an encrypted stream gives a part of what it has. All
            // else may be told no second time: more bytes, an error.
            if !matches!(result, Err(Errno::AGAIN) | Ok(0)) {
                self.readiness.set(place, BYTES);
            }
        }
        match result {
            Ok(0) => {
                self.ended |= 1 << stream;
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            result => moved(result),
        }
    }

    fn settled(&self, stream: usize) -> u64 {
        self.sent[stream]
    }

    fn submit(&mut self) -> io::Result<()> {
        for stream in &self.streams {
            // What an encrypted stream could not send at once.
            if stream.wants_write() {
                stream.flush()?;
            }
        }
        Ok(())
    }

    fn stopped(&mut self) -> bool {
        // The kernel has copied, and copies no more: nothing else reads from these sockets.
        for stream in self.take() {
            stream.shutdown();
        }
        true
    }

    fn finish(&mut self, _patience: Duration) {
        let streams = self.take();
        if !streams.is_empty() {
            (self.finish)(streams);
        }
    }

    fn prepare_sleep(&mut self, full: &dyn Fn(usize) -> bool) -> bool {
        // Whatever is told is told once, and may concern a link that was looked at before this one: the engine looks at all its
        // links again.
        self.readiness.ask();
        if self.readiness.news.swap(false, Ordering::Relaxed) {
            return true;
        }
        let may_go_on = |(i, stream): (usize, &Stream)| match self.places[i] {
            Some(place) => {
                let open = self.ended >> i & 1 == 0;
                open && (self.readiness.has(place, BYTES | END) || stream.has_bytes())
                    || full(i) && self.readiness.has(place, ROOM)
            }
            None => true,
        };
        self.streams.iter().enumerate().any(may_go_on)
    }

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        fds.push(self.readiness.epoll.as_fd());
    }

    fn name(&self) -> &'static str {
        "sockets"
    }
}
