//! One call of the kernel that sends over a socket, or receives, and never waits.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;

use rustix::net::{RecvAncillaryBuffer, recvmsg};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, sendmsg};

/// How many pieces one call takes; the kernel refuses more.
const PIECES: usize = 1024;

/// Sends over a socket; one system call.
pub(super) fn send_plain(socket: &TcpStream, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
    // NOSIGNAL: in a host program in C, SIGPIPE may still end the process.
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let bytes = &bytes[..bytes.len().min(PIECES)];
    let mut none = SendAncillaryBuffer::default();
    Ok(rustix::io::retry_on_intr(|| sendmsg(socket, bytes, &mut none, flags))?)
}

/// Receives from a socket; one system call.
pub(super) fn recv_plain(socket: &TcpStream, bytes: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    let most = bytes.len().min(PIECES);
    let bytes = &mut bytes[..most];
    let mut none = RecvAncillaryBuffer::default();
    let message = rustix::io::retry_on_intr(|| recvmsg(socket, bytes, &mut none, RecvFlags::DONTWAIT))?;
    Ok(message.bytes)
}
