//! One call of the kernel that sends bytes and descriptors over a Unix socket, or receives them (`SCM_RIGHTS`), and never waits.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// How many descriptors one message may carry (`SCM_MAX_FD`).
pub(crate) const FDS_AT_ONCE: usize = 253;
const ANCILLARY: usize = cmsg_space!(ScmRights(FDS_AT_ONCE));

/// Sends what the socket takes now; the first byte carries the descriptors. `None` if the socket
/// takes nothing.
pub(crate) fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<Option<usize>> {
    let mut space = [MaybeUninit::uninit(); ANCILLARY];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room for {FDS_AT_ONCE}");
    }
    // NOSIGNAL: a host program in C may have left SIGPIPE deadly.
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(n) => return Ok(Some(n)),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Receives what is there, at least one byte; 0 if the peer closed, `None` if nothing has arrived. With the number of bytes:
/// whether descriptors were lost (`MSG_CTRUNC`), because this process may open no more files.
pub(crate) fn recv_some(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<Option<(usize, bool)>> {
    let mut space = [MaybeUninit::uninit(); ANCILLARY];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Ok(message) => {
                for m in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(more) = m {
                        fds.extend(more);
                    }
                }
                return Ok(Some((message.bytes, message.flags.contains(ReturnFlags::CTRUNC))));
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    }
}
