//! Frames of bytes and descriptors over a Unix stream socket: how windows,
//! segments and doorbells reach another process.
//!
//! A frame is two little-endian u32, the number of bytes and the number of
//! descriptors; then, for every 253 descriptors (all that Linux takes at once)
//! or part of them, one zero byte that carries them; then the bytes.
//!
//! Both calls block whatever the socket's mode, and the socket's write and read
//! timeout is a limit on the whole frame, so that a peer cannot hold us by
//! dripping. After an error other than `WouldBlock` the two sides no longer
//! agree on where a frame begins: drop the stream.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::cmsg_space;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::eventfd::{deadline, poll_until};

/// `SCM_MAX_FD`: what one message may carry.
const FDS_AT_ONCE: usize = 253;
const ANCILLARY: usize = cmsg_space!(ScmRights(FDS_AT_ONCE));

/// Sends one frame; the descriptors stay open here.
///
/// One thread at a time may send on a stream. `TimedOut` if the stream's write
/// timeout passed first; `InvalidInput` if `bytes` is 4 GiB or longer.
pub fn send_message(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let too_many = |what: &str, n: usize| {
        io::Error::new(ErrorKind::InvalidInput, format!("frame of {n} {what}, at most {}", u32::MAX))
    };
    let length = u32::try_from(bytes.len()).map_err(|_| too_many("bytes", bytes.len()))?;
    let count = u32::try_from(fds.len()).map_err(|_| too_many("descriptors", fds.len()))?;
    let deadline = deadline(stream.write_timeout()?);
    let mut header = [0; 8];
    header[..4].copy_from_slice(&length.to_le_bytes());
    header[4..].copy_from_slice(&count.to_le_bytes());
    send_all(stream, &header, &[], deadline)?;
    for chunk in fds.chunks(FDS_AT_ONCE) {
        send_all(stream, &[0], chunk, deadline)?;
    }
    send_all(stream, bytes, &[], deadline)
}

/// Receives one frame of at most `max_bytes` and `max_fds`; the descriptors are
/// closed on exec.
///
/// One thread at a time may receive on a stream. Errors, besides the socket's
/// own: `UnexpectedEof` if the peer closed between frames, `ConnectionReset` if
/// it did so within one; `WouldBlock` if no frame had begun when the stream's
/// read timeout passed (call again), `TimedOut` if one had; `InvalidData` if the
/// frame is over a limit or descriptors were lost.
pub fn recv_message(
    stream: &UnixStream,
    max_bytes: usize,
    max_fds: usize,
) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let deadline = deadline(stream.read_timeout()?);
    let mut header = [0; 8];
    recv_exact(stream, &mut header, deadline, true)?;
    let [length, count] =
        [0, 4].map(|i| u32::from_le_bytes(header[i..i + 4].try_into().expect("four bytes")) as usize);
    for (what, found, limit) in [("bytes", length, max_bytes), ("descriptors", count, max_fds)] {
        if found > limit {
            return Err(invalid(format!("frame of {found} {what}, at most {limit} allowed here")));
        }
    }
    let mut fds = Vec::with_capacity(count);
    while fds.len() < count {
        let expected = (count - fds.len()).min(FDS_AT_ONCE);
        let before = fds.len();
        let mut carrier = [0];
        if recv_some(stream, &mut carrier, &mut fds, deadline)? == 0 {
            return Err(cut_off(before, count, "descriptors"));
        }
        let found = fds.len() - before;
        if found != expected {
            return Err(invalid(format!("{found} descriptors arrived together, expected {expected}")));
        }
    }
    let mut bytes = vec![0; length];
    recv_exact(stream, &mut bytes, deadline, false)?;
    Ok((bytes, fds))
}

fn invalid(text: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}

fn cut_off(found: usize, expected: usize, what: &str) -> io::Error {
    let text = format!("peer closed within a frame, after {found} of {expected} {what}");
    io::Error::new(ErrorKind::ConnectionReset, text)
}

/// Sends all of `bytes`, the descriptors with the first of them.
fn send_all(
    stream: &UnixStream,
    mut bytes: &[u8],
    mut fds: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); ANCILLARY];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room for {FDS_AT_ONCE}");
        }
        // NOSIGNAL: a host program in C may have left SIGPIPE deadly.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(n) => {
                bytes = &bytes[n..];
                fds = &[];
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if !poll_until(stream, PollFlags::OUT, deadline)? {
                    let text = format!("the peer did not take a frame, {} bytes left", bytes.len());
                    return Err(io::Error::new(ErrorKind::TimedOut, text));
                }
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Fills `bytes`. `boundary`: a frame may end here, or not yet have begun.
fn recv_exact(
    stream: &UnixStream,
    bytes: &mut [u8],
    deadline: Option<Instant>,
    boundary: bool,
) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let idle = boundary && done == 0;
        let mut stray = Vec::new();
        match recv_some(stream, &mut bytes[done..], &mut stray, deadline) {
            Ok(0) if idle => {
                return Err(io::Error::new(ErrorKind::UnexpectedEof, "peer closed the connection"));
            }
            Ok(0) => return Err(cut_off(done, bytes.len(), "bytes")),
            Ok(_) if !stray.is_empty() => {
                return Err(invalid(format!("{} descriptors where none belong", stray.len())));
            }
            Ok(n) => done += n,
            Err(e) if idle && e.kind() == ErrorKind::TimedOut => {
                return Err(io::Error::new(ErrorKind::WouldBlock, "no frame within the read timeout"));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Receives what is there, at least one byte; 0 if the peer closed.
fn recv_some(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Option<Instant>,
) -> io::Result<usize> {
    loop {
        let mut space = [MaybeUninit::uninit(); ANCILLARY];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Ok(message) => {
                for m in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(more) = m {
                        fds.extend(more);
                    }
                }
                if message.flags.contains(ReturnFlags::CTRUNC) {
                    return Err(invalid(format!(
                        "descriptors were lost after {} (MSG_CTRUNC): raise the limit of open files",
                        fds.len()
                    )));
                }
                return Ok(message.bytes);
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if !poll_until(stream, PollFlags::IN, deadline)? {
                    return Err(io::Error::new(
                        ErrorKind::TimedOut,
                        "the peer did not finish a frame in time",
                    ));
                }
            }
            Err(e) => return Err(e.into()),
        }
    }
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

    /// Descriptors that their file's size tells apart.
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
        // A byte now and then must not buy the peer more time. The frame has begun before it is waited for.
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
