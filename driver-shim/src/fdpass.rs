//! Frames of bytes and descriptors over a Unix stream socket: how windows, segments and doorbells
//! reach another process.
//!
//! A frame is two little-endian u32, the number of bytes and the number of descriptors; then, for
//! every 253 descriptors (as many as Linux takes at once) or the rest of them, one zero byte that
//! carries them; then the bytes.
//!
//! [`send_message`] and [`recv_message`] block whatever the socket's mode. The socket's write and
//! read timeouts limit the whole frame, so a peer cannot hold us up by sending a byte now and then.
//! After an error other than `WouldBlock` and `QuotaExceeded` the two sides no longer agree on where a
//! frame begins: drop the stream.
//!
//! [`Incoming`] and [`Outgoing`] never block, and keep a frame that is half sent or half received;
//! they are for threads that serve several streams. Frames without descriptors may go over any
//! stream socket, also TCP.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::closing::{Closes, Held, PeerStream};
use crate::eventfd::{deadline, poll_until};
use crate::limits::{added, remedy};
use crate::scm::{FDS_AT_ONCE, recv_some, send_some};

/// Length of a frame's header: number of bytes, number of descriptors.
const HEADER: usize = 8;

/// A frame's bytes and descriptors.
pub type Frame = (Vec<u8>, Vec<OwnedFd>);

/// A frame that lost descriptors, because this process may open no more files. [`Incoming::receive`] fails with it as
/// `QuotaExceeded` ([`io::Error::get_ref`]).
#[derive(Debug)]
pub struct Cut {
    /// The frame's bytes.
    pub bytes: Vec<u8>,
    lost: usize,
    of: usize,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remedy = added(remedy(&Errno::MFILE.into()));
        write!(f, "{} of {} descriptors of a frame were lost{remedy}", self.lost, self.of)
    }
}

impl std::error::Error for Cut {}

/// Sends one frame; the descriptors stay open here.
///
/// One thread at a time may send on a stream. Fails with `TimedOut` if the stream's write timeout
/// passes first, with `InvalidInput` if `bytes` is 4 GiB or longer.
pub fn send_message(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let header = header(bytes.len(), fds.len())?;
    let deadline = deadline(stream.write_timeout()?);
    send_all(stream, &header, &[], deadline)?;
    for chunk in fds.chunks(FDS_AT_ONCE) {
        send_all(stream, &[0], chunk, deadline)?;
    }
    send_all(stream, bytes, &[], deadline)
}

/// Receives one frame of at most `max_bytes` and `max_fds`; the descriptors are closed on exec.
///
/// One thread at a time may receive on a stream. Errors, besides the socket's own: `UnexpectedEof`
/// if the peer closed between frames, `ConnectionReset` if it closed within one; `WouldBlock` if no
/// frame had begun when the stream's read timeout passed (call again), `TimedOut` if one had;
/// `InvalidData` if the frame is over a limit or has not the descriptors that it announces;
/// `QuotaExceeded` if descriptors were lost because this process may open no more files: then the
/// frame is lost, and the stream goes on with the next one.
pub fn recv_message(stream: &UnixStream, max_bytes: usize, max_fds: usize) -> io::Result<Frame> {
    receive_whole(stream, Incoming::default(), max_bytes, max_fds)
}

/// Receives one frame from a peer as [`recv_message`] does. The peer holds what it holds of a quota until
/// descriptors of a frame that is not whole are closed.
pub fn recv_from_peer(stream: &PeerStream, max_bytes: usize, max_fds: usize) -> io::Result<Frame> {
    let mut incoming = Incoming::default();
    incoming.held = stream.held();
    receive_whole(stream, incoming, max_bytes, max_fds)
}

fn receive_whole(
    stream: &UnixStream,
    mut incoming: Incoming,
    max_bytes: usize,
    max_fds: usize,
) -> io::Result<Frame> {
    let deadline = deadline(stream.read_timeout()?);
    loop {
        if let Some(frame) = incoming.receive(stream, max_bytes, max_fds)? {
            return Ok(frame);
        }
        if !poll_until(stream, PollFlags::IN, deadline)? {
            return Err(match incoming.begun {
                0 => io::Error::new(ErrorKind::WouldBlock, "no frame within the read timeout"),
                _ => io::Error::new(ErrorKind::TimedOut, "the peer did not finish a frame in time"),
            });
        }
    }
}

/// A stream that carries frames: a socket, or something above one, which then carries no descriptors.
pub trait Carrier {
    /// Sends what the stream takes now; the first byte carries the descriptors. `None` if the stream takes nothing.
    fn send_some(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Option<usize>>;

    /// Receives what is there, at least one byte; 0 if the peer closed, `None` if nothing has arrived. With the number of
    /// bytes: whether descriptors were lost, because this process may open no more files.
    fn recv_some(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Option<(usize, bool)>>;
}

impl<T: AsFd + ?Sized> Carrier for T {
    fn send_some(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Option<usize>> {
        send_some(self.as_fd(), bytes, fds)
    }

    fn recv_some(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Option<(usize, bool)>> {
        recv_some(self.as_fd(), bytes, fds)
    }
}

/// A frame that is being received piece by piece without waiting. Descriptors that it holds when it
/// is dropped are closed without waiting ([`Closes`]).
///
/// Use one for each stream. Memory grows with what arrived, not with the announced length.
#[derive(Debug, Default)]
pub struct Incoming {
    header: [u8; HEADER],
    /// How many bytes of the header have arrived.
    begun: usize,
    /// How many descriptors have arrived, those that were lost included.
    arrived: usize,
    /// Some were lost: this process may open no more files.
    lost: bool,
    fds: Vec<OwnedFd>,
    bytes: Vec<u8>,
    /// What the peer holds of a quota.
    held: Option<Held>,
    closes: Closes,
}

impl Incoming {
    /// A frame whose descriptors are closed with those of other peers, if it has to close any.
    pub fn closed_by(closes: &Closes) -> Self {
        let mut incoming = Incoming::default();
        incoming.closes = closes.clone();
        incoming
    }

    /// Receives what is there. Returns the frame once it is whole, `None` before. Never takes a
    /// byte of the next frame. The descriptors are closed on exec.
    ///
    /// Errors, after which the stream is useless, besides the socket's own: `UnexpectedEof` if the
    /// peer closed between frames, `ConnectionReset` if it closed within one; `InvalidData` if the
    /// frame has more than `max_bytes` or `max_fds`, or not the descriptors that it announces.
    ///
    /// The stream stays useful after `QuotaExceeded`: descriptors were lost because this process may
    /// open no more files. That frame is lost, but for the bytes in [`Cut`]; the next call goes on after it.
    pub fn receive(
        &mut self,
        from: &(impl Carrier + ?Sized),
        max_bytes: usize,
        max_fds: usize,
    ) -> io::Result<Option<Frame>> {
        while self.begun < HEADER {
            match from.recv_some(&mut self.header[self.begun..], &mut self.fds)? {
                None => return Ok(None),
                Some((0, _)) if self.begun == 0 => {
                    return Err(io::Error::new(ErrorKind::UnexpectedEof, "peer closed the connection"));
                }
                Some((0, _)) => return Err(cut_off(self.begun, HEADER, "bytes")),
                Some((_, lost)) if lost || !self.fds.is_empty() => return Err(unexpected(self.fds.len())),
                Some((n, _)) => self.begun += n,
            }
        }
        let [length, count] = [0, 4]
            .map(|i| u32::from_le_bytes(self.header[i..i + 4].try_into().expect("four bytes")) as usize);
        for (what, found, limit) in [("bytes", length, max_bytes), ("descriptors", count, max_fds)] {
            if found > limit {
                return Err(invalid(format!("frame of {found} {what}, at most {limit} allowed here")));
            }
        }
        while self.arrived < count {
            let (arrived, before) = (self.arrived, self.fds.len());
            let expected = (count - arrived).min(FDS_AT_ONCE);
            let lost = match from.recv_some(&mut [0], &mut self.fds)? {
                None => return Ok(None),
                Some((0, _)) => return Err(cut_off(arrived, count, "descriptors")),
                Some((_, lost)) => lost,
            };
            let found = self.fds.len() - before;
            if found > expected || found < expected && !lost {
                return Err(invalid(format!("{found} descriptors arrived together, expected {expected}")));
            }
            self.arrived += expected;
            self.lost |= lost;
        }
        while self.bytes.len() < length {
            let mut chunk = [0; 16 << 10];
            let most = (length - self.bytes.len()).min(chunk.len());
            match from.recv_some(&mut chunk[..most], &mut self.fds)? {
                None => return Ok(None),
                Some((0, _)) => return Err(cut_off(self.bytes.len(), length, "bytes")),
                Some((_, lost)) if lost || self.fds.len() > count => {
                    return Err(unexpected(self.fds.len().saturating_sub(count)));
                }
                Some((n, _)) => self.bytes.extend_from_slice(&chunk[..n]),
            }
        }
        (self.begun, self.arrived) = (0, 0);
        let (bytes, fds) = (std::mem::take(&mut self.bytes), std::mem::take(&mut self.fds));
        if std::mem::take(&mut self.lost) {
            let cut = Cut { bytes, lost: count - fds.len(), of: count };
            self.closes.close(fds, self.held.clone());
            return Err(io::Error::new(ErrorKind::QuotaExceeded, cut));
        }
        Ok(Some((bytes, fds)))
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.closes.close(std::mem::take(&mut self.fds), self.held.take());
    }
}

/// Frames that wait to be sent; sends as much as the socket takes, without waiting.
///
/// A later [`Outgoing::flush`] finishes a frame that was begun, so no frame begins within another.
/// Use one for each stream.
#[derive(Debug, Default)]
pub struct Outgoing {
    parts: VecDeque<Part>,
    bytes: usize,
    fds: usize,
    refused: bool,
}

/// Bytes of a frame, the first of which carries the descriptors.
#[derive(Debug)]
struct Part {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

impl Outgoing {
    /// Adds a frame after those that wait; sends nothing yet. Fails with `InvalidInput` if `bytes`
    /// is 4 GiB or longer.
    pub fn push(&mut self, bytes: &[u8], mut fds: Vec<OwnedFd>) -> io::Result<()> {
        let mut first = header(bytes.len(), fds.len())?.to_vec();
        if fds.is_empty() {
            first.extend_from_slice(bytes);
            self.part(first, fds);
            return Ok(());
        }
        self.part(first, Vec::new());
        while !fds.is_empty() {
            let rest = fds.split_off(fds.len().min(FDS_AT_ONCE));
            self.part(vec![0], std::mem::replace(&mut fds, rest));
        }
        self.part(bytes.to_vec(), Vec::new());
        Ok(())
    }

    fn part(&mut self, bytes: Vec<u8>, fds: Vec<OwnedFd>) {
        self.bytes += bytes.len();
        self.fds += fds.len();
        if !bytes.is_empty() {
            self.parts.push_back(Part { bytes, sent: 0, fds });
        }
    }

    /// Sends what the stream takes now. True when nothing is left. After an error the stream is
    /// useless.
    pub fn flush(&mut self, to: &(impl Carrier + ?Sized)) -> io::Result<bool> {
        self.refused = false;
        while let Some(part) = self.parts.front_mut() {
            let fds: Vec<_> = part.fds.iter().map(|fd| fd.as_fd()).collect();
            let sent = match to.send_some(&part.bytes[part.sent..], &fds) {
                Ok(Some(sent)) => sent,
                Ok(None) => return Ok(false),
                // The frame's header has left, so the frame can't be dropped.
                Err(e) if Errno::from_io_error(&e) == Some(Errno::TOOMANYREFS) => {
                    self.refused = true;
                    return Ok(false);
                }
                Err(e) => return Err(e),
            };
            self.fds -= part.fds.len();
            part.fds.clear();
            part.sent += sent;
            self.bytes -= sent;
            if part.sent == part.bytes.len() {
                self.parts.pop_front();
            }
        }
        Ok(true)
    }

    /// Whether the last [`Outgoing::flush`] stopped because the kernel takes no more descriptors: as many of this user's as
    /// a process may open wait in sockets until peers read them. Nothing tells when there is room again, and the socket
    /// counts as ready, so the caller tries again after a while.
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// How many bytes are not sent yet.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// How many descriptors are not sent yet.
    pub fn fds(&self) -> usize {
        self.fds
    }

    /// Whether everything is sent.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

fn header(bytes: usize, fds: usize) -> io::Result<[u8; HEADER]> {
    let mut header = [0; HEADER];
    for (at, what, n) in [(0, "bytes", bytes), (4, "descriptors", fds)] {
        let n = u32::try_from(n).map_err(|_| {
            io::Error::new(ErrorKind::InvalidInput, format!("frame of {n} {what}, at most {}", u32::MAX))
        })?;
        header[at..at + 4].copy_from_slice(&n.to_le_bytes());
    }
    Ok(header)
}

fn invalid(text: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}

fn cut_off(found: usize, expected: usize, what: &str) -> io::Error {
    let text = format!("peer closed within a frame, after {found} of {expected} {what}");
    io::Error::new(ErrorKind::ConnectionReset, text)
}

fn unexpected(fds: usize) -> io::Error {
    invalid(format!("{fds} descriptors where none belong"))
}

/// Sends all of `bytes`; the first byte carries the descriptors.
fn send_all(
    stream: &UnixStream,
    mut bytes: &[u8],
    mut fds: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> io::Result<()> {
    while !bytes.is_empty() {
        if let Some(n) = send_some(stream.as_fd(), bytes, fds)? {
            bytes = &bytes[n..];
            fds = &[];
        } else if !poll_until(stream, PollFlags::OUT, deadline)? {
            let text = format!("the peer did not take a frame, {} bytes left", bytes.len());
            return Err(io::Error::new(ErrorKind::TimedOut, text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
    use rustix::io::{FdFlags, fcntl_getfd};
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::thread;
    use std::time::Duration;

    fn pair() -> (UnixStream, UnixStream) {
        let (a, b) = UnixStream::pair().unwrap();
        for s in [&a, &b] {
            s.set_read_timeout(Some(pushgate_tests::hang())).unwrap();
            s.set_write_timeout(Some(pushgate_tests::hang())).unwrap();
        }
        (a, b)
    }

    /// Descriptors of files that can be told apart by size.
    fn numbered(n: usize) -> Vec<OwnedFd> {
        let number = |i| {
            let fd = memfd_create("n", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&fd, i as u64).unwrap();
            fd
        };
        (0..n).map(number).collect()
    }

    fn kind_of(stream: &UnixStream) -> (ErrorKind, String) {
        let e = recv_message(stream, 64, 300).unwrap_err();
        (e.kind(), e.to_string())
    }

    #[test]
    fn descriptors_arrive_in_order() {
        let (a, b) = pair();
        for (n, bytes) in [(0, 0), (1, 0), (253, 5), (254, 1), (300, 0), (0, 3)] {
            let fds = numbered(n);
            let sent = vec![n as u8; bytes];
            send_message(&a, &sent, &fds.iter().map(|f| f.as_fd()).collect::<Vec<_>>()).unwrap();
            let (got, got_fds) = recv_message(&b, bytes, n).unwrap();
            assert_eq!(got, sent);
            assert_eq!(got_fds.len(), n);
            for (i, fd) in got_fds.iter().enumerate() {
                assert_eq!(fstat(fd).unwrap().st_size, i as i64);
                assert!(fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC));
            }
        }
    }

    #[test]
    fn a_frame_larger_than_the_socket_buffer_arrives() {
        let (a, b) = pair();
        let sent: Vec<u8> = (0..1usize << 20).map(|i| (i * 7 / 8) as u8).collect();
        let copy = sent.clone();
        let sender = thread::spawn(move || send_message(&a, &copy, &[]).unwrap());
        assert_eq!(recv_message(&b, 1 << 20, 0).unwrap().0, sent);
        sender.join().unwrap();
    }

    #[test]
    fn frames_that_never_block_arrive_whole_and_in_order_whatever_the_socket_takes_at_once() {
        let (a, b) = pair();
        let (mut out, mut incoming) = (Outgoing::default(), Incoming::default());
        let frames = [(0, 3), (0, 0), (1 << 20, 1), (5, 300), (1 << 20, 0)];
        for (n, &(bytes, fds)) in frames.iter().enumerate() {
            out.push(&vec![n as u8; bytes], numbered(fds)).unwrap();
        }
        assert!(!out.flush(&a).unwrap() && !out.is_empty(), "more than a socket takes");
        for (n, &(bytes, fds)) in frames.iter().enumerate() {
            let (got, got_fds) = loop {
                out.flush(&a).unwrap();
                if let Some(frame) = incoming.receive(&b, 1 << 20, 300).unwrap() {
                    break frame;
                }
            };
            assert!(got == vec![n as u8; bytes], "frame {n}");
            assert_eq!(got_fds.len(), fds);
            for (i, fd) in got_fds.iter().enumerate() {
                assert_eq!(fstat(fd).unwrap().st_size, i as i64);
            }
        }
        assert!(out.flush(&a).unwrap() && out.is_empty());
        assert!(incoming.receive(&b, 1 << 20, 300).unwrap().is_none());
    }

    #[test]
    fn oversize_frames_are_refused_by_name() {
        let (a, b) = pair();
        send_message(&a, &[0; 65], &[]).unwrap();
        let (kind, text) = kind_of(&b);
        assert_eq!(kind, ErrorKind::InvalidData);
        assert!(text.contains("65 bytes") && text.contains("64"), "{text}");

        let (a, b) = pair();
        (&a).write_all(&[0, 0, 0, 0, 0x2d, 1, 0, 0]).unwrap();
        let (kind, text) = kind_of(&b);
        assert_eq!(kind, ErrorKind::InvalidData);
        assert!(text.contains("301 descriptors") && text.contains("300"), "{text}");
    }

    #[test]
    fn a_closed_peer_is_told_from_a_cut_frame() {
        let (a, b) = pair();
        drop(a);
        assert_eq!(kind_of(&b).0, ErrorKind::UnexpectedEof);
        for cut in [&[1u8, 0, 0][..], &[4, 0, 0, 0, 0, 0, 0, 0, 9], &[0, 0, 0, 0, 1, 0, 0, 0]] {
            let (a, b) = pair();
            (&a).write_all(cut).unwrap();
            drop(a);
            assert_eq!(kind_of(&b).0, ErrorKind::ConnectionReset);
        }
    }

    #[test]
    fn descriptors_that_were_not_announced_are_refused() {
        let fds = numbered(2);
        let fds: Vec<_> = fds.iter().map(|f| f.as_fd()).collect();
        for (count, chunk) in [(1, &fds[..]), (3, &fds[..]), (1, &[])] {
            let (a, b) = pair();
            (&a).write_all(&[0, 0, 0, 0, count, 0, 0, 0]).unwrap();
            send_all(&a, &[0], chunk, None).unwrap();
            assert_eq!(kind_of(&b).0, ErrorKind::InvalidData);
        }
        let (a, b) = pair();
        send_all(&a, &[0; 8], &fds, None).unwrap();
        assert_eq!(kind_of(&b).0, ErrorKind::InvalidData);
    }

    #[test]
    fn timeouts_bound_the_whole_frame() {
        let (a, b) = pair();
        b.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        assert_eq!(kind_of(&b).0, ErrorKind::WouldBlock);
        // A byte now and then must not gain the peer more time. The frame has begun before the wait
        // for it begins.
        (&a).write_all(&[60, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        let drip = thread::spawn(move || {
            while (&a).write_all(&[0]).is_ok() {
                thread::sleep(Duration::from_millis(300));
            }
        });
        assert_eq!(kind_of(&b).0, ErrorKind::TimedOut);
        drop(b);
        drip.join().unwrap();

        let (a, _b) = pair();
        a.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
        assert_eq!(send_message(&a, &vec![0; 8 << 20], &[]).unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
