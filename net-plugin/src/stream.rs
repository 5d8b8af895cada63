//! The socket of a connection: over a Unix socket descriptors come along with bytes.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pushgate_door as door;
use pushgate_door::redial::envelope::tune;
use pushgate_driver_shim::closing::PeerStream;
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors that come along with bytes.
pub const FDS: usize = 4;

/// The socket of a connection.
pub enum Stream {
    Unix(PeerStream),
    Tcp(door::Stream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(s) => s.as_fd(),
            Stream::Tcp(s) => s.as_fd(),
        }
    }
}

impl Stream {
    /// Takes a TCP connection and sets it up so that a host that is gone is noticed in about ten
    /// seconds, or in three where the connection is replaced then.
    pub fn tcp(stream: door::Stream, replaced: bool) -> io::Result<Self> {
        tune(&stream, replaced)?;
        Ok(Stream::Tcp(stream))
    }

    /// The process at the other end, if it is on this host and has a number here.
    pub fn peer_pid(&self) -> Option<u32> {
        match self {
            // 0 stands for a process of another PID namespace.
            Stream::Unix(s) => {
                let cred = pushgate_service::wire::peer_cred(s).ok()?;
                (cred.pid > 0).then_some(cred.pid as u32)
            }
            Stream::Tcp(_) => None,
        }
    }

    /// Whether the other end has closed the connection, or its process has ended. What it sent before is still to be received.
    pub fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(self, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1..))
    }

    /// Sends what the socket takes now, with descriptors along with the first byte; `WouldBlock` if it takes nothing. Over TCP
    /// there are no descriptors.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let s = match self {
            Stream::Unix(s) => s,
            Stream::Tcp(s) => return s.send(&[IoSlice::new(bytes)]),
        };
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room for {FDS}");
        }
        // NOSIGNAL: the program may have left SIGPIPE deadly.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(rustix::io::retry_on_intr(|| sendmsg(s, &[IoSlice::new(bytes)], &mut control, flags))?)
    }

    /// Sends what is encrypted and waits for the socket. True when nothing is left.
    pub fn flush(&self) -> io::Result<bool> {
        match self {
            Stream::Unix(_) => Ok(true),
            Stream::Tcp(s) => s.flush(),
        }
    }

    /// Receives what is there: how many bytes, 0 at the end, `WouldBlock` if there are none yet, and whether descriptors were
    /// lost.
    pub fn receive(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<(usize, bool)> {
        let s = match self {
            Stream::Unix(s) => s,
            // Bytes that were changed on their way end the socket, as a reset would.
            Stream::Tcp(s) => {
                let n = s.recv(&mut [IoSliceMut::new(bytes)]).map_err(|e| match e.kind() {
                    ErrorKind::InvalidData => io::Error::new(ErrorKind::ConnectionAborted, e),
                    _ => e,
                });
                return Ok((n?, false));
            }
        };
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let message = recvmsg(s, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
        for m in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = m {
                fds.extend(more);
            }
        }
        Ok((message.bytes, message.flags.contains(ReturnFlags::CTRUNC)))
    }

    /// Shuts down both directions, so that the peer notices even if another process holds the
    /// descriptor.
    pub fn shutdown(&self) {
        let _ = rustix::net::shutdown(self, rustix::net::Shutdown::Both);
    }
}
