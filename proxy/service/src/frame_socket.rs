//! The way of frames between a program and its proxy: the proxy's ends of queue pairs talk with their peers through their
//! programs, which have the channels that outlive links and proxies.
//!
//! A pair of Unix sockets of type SOCK_SEQPACKET. A message is a tag, by which the program names one of its queue pairs, and a
//! frame. Each is sent whole or not at all, so neither side waits for the other; a frame that is not taken is lost, as on any
//! channel of frames.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pushgate_driver_shim::closing::{Held, drop_elsewhere_within};
use pushgate_link::frame::{Frame, are_memory};
use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// Most bytes of a frame. Those of a `local` queue pair have a few hundred.
const MAX_BYTES: usize = 16 << 10;
/// Most descriptors of a frame. An offer of a link has one.
const MAX_FDS: usize = 2;
const ANCILLARY: usize = cmsg_space!(ScmRights(MAX_FDS));
const TAG: usize = 4;
/// Most closes under way of descriptors that are no memory. Each has threads, and a close can hang.
const MOST_CLOSES: usize = 16;

/// One end of the way of frames. All calls may be made from any thread; none waits.
#[derive(Debug)]
pub(crate) struct FrameSocket {
    socket: OwnedFd,
    /// What the other end holds of a quota.
    held: Option<Held>,
    /// A copy for each close of descriptors that were no frame's, until that close has returned.
    closes: Arc<()>,
}

impl FrameSocket {
    /// Makes both ends.
    pub(crate) fn pair() -> io::Result<[FrameSocket; 2]> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok([a, b].map(|socket| FrameSocket { socket, held: None, closes: Arc::default() }))
    }

    /// Takes over an end that another process made. Fails with `InvalidInput` unless the descriptor is a Unix socket of type
    /// `SOCK_SEQPACKET`.
    pub(crate) fn from_fd(fd: OwnedFd) -> io::Result<FrameSocket> {
        let kind = socket_domain(&fd).and_then(|domain| Ok((domain, socket_type(&fd)?)));
        if kind != Ok((AddressFamily::UNIX, SocketType::SEQPACKET)) {
            let text = "descriptor is not a Unix socket of type SOCK_SEQPACKET";
            return Err(io::Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(FrameSocket { socket: fd, held: None, closes: Arc::default() })
    }

    /// The end of a process that holds so much of a quota, until what was received from it is closed.
    pub(crate) fn within(mut self, held: Held) -> Self {
        self.held = Some(held);
        self
    }

    /// Sends a frame of the queue pair with this tag. True if the socket took it. Fails if the other end is closed.
    pub(crate) fn send(&self, tag: u32, frame: &Frame) -> io::Result<bool> {
        let fds = frame.along.borrow();
        if frame.bytes.len() > MAX_BYTES || fds.len() > MAX_FDS {
            return Ok(false);
        }
        let tag = tag.to_le_bytes();
        let bytes = [IoSlice::new(&tag), IoSlice::new(&frame.bytes)];
        loop {
            let mut space = [MaybeUninit::uninit(); ANCILLARY];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "room for {MAX_FDS}");
            }
            match sendmsg(&self.socket, &bytes, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(e @ (Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN)) => return Err(e.into()),
                Err(_) => return Ok(false),
            }
        }
    }

    /// The next frame with its tag; `None` if none is there. A message that is no frame is passed over. Fails with
    /// `UnexpectedEof` if the other end is closed, with `InvalidData` if closes of what it sent hang.
    pub(crate) fn receive(&self) -> io::Result<Option<(u32, Frame)>> {
        loop {
            let mut bytes = vec![0; TAG + MAX_BYTES];
            let mut space = [MaybeUninit::uninit(); ANCILLARY];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let message = match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
            {
                Ok(message) => message,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                Err(e) => return Err(e.into()),
            };
            let mut fds = Vec::new();
            for m in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = m {
                    fds.extend(more);
                }
            }
            if message.bytes == 0 && fds.is_empty() {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    "the other end of the frames is closed",
                ));
            }
            let cut = message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
            // What is not memory may take long to close.
            if cut || message.bytes < TAG || !are_memory(&fds) {
                if !fds.is_empty() {
                    drop_elsewhere_within(fds, (self.held.clone(), self.closes.clone()));
                }
                if Arc::strong_count(&self.closes) > MOST_CLOSES {
                    let text = "descriptors that are no memory take long to close";
                    return Err(io::Error::new(ErrorKind::InvalidData, text));
                }
                continue;
            }
            let tag = u32::from_le_bytes(bytes[..TAG].try_into().expect("four bytes"));
            return Ok(Some((tag, Frame { bytes: bytes[TAG..message.bytes].to_vec(), along: fds.into() })));
        }
    }
}

impl AsFd for FrameSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<FrameSocket> for OwnedFd {
    fn from(socket: FrameSocket) -> OwnedFd {
        socket.socket
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pushgate_driver_shim::eventfd::EventFd;
    use pushgate_driver_shim::memory::{HugePages, SharedMemory};

    #[test]
    fn p8_frames_come_whole_and_what_is_no_frame_is_passed_over() {
        let [a, b] = FrameSocket::pair().unwrap();
        let b = FrameSocket::from_fd(b.into()).unwrap();
        let memory = SharedMemory::builder("frames", 4096).huge_pages(HugePages::Never).create().unwrap();
        let fd = || memory.fd().try_clone_to_owned().unwrap();
        let frame = |bytes: Vec<u8>, fds: Vec<OwnedFd>| Frame { bytes, along: fds.into() };
        let send = |tag, frame| a.send(tag, &frame).unwrap();
        assert!(send(7, frame(vec![1, 2], vec![fd()])) && send(8, frame(vec![], vec![])));
        assert!(!send(9, frame(vec![0; MAX_BYTES + 1], vec![])));
        assert!(!send(9, frame(vec![], vec![fd(), fd(), fd()])));
        let bell = EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
        assert!(send(9, frame(vec![3], vec![bell])), "the receiver looks at it");
        rustix::net::send(&a.socket, &[1, 2], SendFlags::DONTWAIT).unwrap();
        rustix::net::send(&a.socket, &vec![1; MAX_BYTES + TAG + 1], SendFlags::DONTWAIT).unwrap();
        assert!(send(10, frame(vec![4; MAX_BYTES], vec![])));
        let (tag, got) = b.receive().unwrap().unwrap();
        assert_eq!((tag, &got.bytes[..], got.along.len()), (7, &[1, 2][..], 1));
        assert_eq!(b.receive().unwrap().map(|(tag, f)| (tag, f.bytes.len())), Some((8, 0)));
        assert_eq!(b.receive().unwrap().map(|(tag, f)| (tag, f.bytes.len())), Some((10, MAX_BYTES)));
        assert!(b.receive().unwrap().is_none());
        // A side that does not read holds nobody up.
        let sent = (0..10_000).take_while(|n| send(*n, frame(vec![0; 1000], vec![]))).count();
        assert!(sent < 10_000);
        drop(a);
        while b.receive().is_ok() {}
        assert!(b.send(7, &frame(vec![], vec![])).is_err(), "nobody would ever read it");
    }
}
