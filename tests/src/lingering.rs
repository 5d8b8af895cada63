//! What a hostile peer sends over a Unix socket: a descriptor whose last close waits.

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// A TCP socket whose last close waits an hour for a peer that never reads; and the peer.
pub fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    set_socket_recv_buffer_size(&theirs, 4096).unwrap();
    set_socket_send_buffer_size(&ours, 1 << 20).unwrap();
    set_socket_linger(&ours, Some(Duration::from_secs(3600))).unwrap();
    ours.set_nonblocking(true).unwrap();
    while (&ours).write(&[0; 4096]).is_ok() {}
    (ours.into(), theirs)
}

/// Sends bytes with a descriptor. False: the peer is gone.
pub fn send_along(to: impl AsFd, fd: &OwnedFd, bytes: &[u8]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(along.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(to, &[IoSlice::new(bytes)], &mut along, SendFlags::NOSIGNAL).is_ok()
}
