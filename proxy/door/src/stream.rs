//! A connection that has come through the door.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard};

use super::plain::{recv_plain, send_plain};
use super::tls::Tls;

/// A connection, encrypted or not, that never blocks. Any thread may call; one at a time should send, and one receive.
///
/// Over a plain connection [`Stream::send`] and [`Stream::recv`] are one system call. An encrypted one keeps bytes of its own: after
/// `recv` there may be more of them though the socket has none, so receive until `WouldBlock` before waiting for the socket
/// or ask [`Stream::has_bytes`]; and while [`Stream::wants_write`], wait until the socket takes more and call [`Stream::flush`].
pub struct Stream {
    socket: TcpStream,
    tls: Option<Box<Mutex<Tls>>>,
}

impl Stream {
    /// Takes a connection between ends that know each other already; it is not encrypted.
    pub fn plain(socket: TcpStream) -> io::Result<Stream> {
        socket.set_nonblocking(true)?;
        Ok(Stream { socket, tls: None })
    }

    /// The socket, for an owner that has its own ways with it. Fails for an encrypted connection.
    pub fn into_plain(self) -> io::Result<TcpStream> {
        match self.tls {
            None => Ok(self.socket),
            Some(_) => Err(io::Error::other("the connection is encrypted")),
        }
    }

    /// Begins to encrypt.
    pub(super) fn encrypt(&mut self, dials: bool) -> io::Result<()> {
        self.tls = Some(Box::new(Mutex::new(Tls::new(dials)?)));
        Ok(())
    }

    pub(super) fn tls(&self) -> Option<MutexGuard<'_, Tls>> {
        self.tls.as_ref().map(|tls| tls.lock().unwrap_or_else(|e| e.into_inner()))
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Whether the connection is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Sends what the connection takes now, and says how many bytes that were; `WouldBlock` if none.
    pub fn send(&self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.tls() {
            None => send_plain(&self.socket, bytes),
            Some(mut tls) => tls.send(&self.socket, bytes),
        }
    }

    /// Receives what is there, and says how many bytes that were: 0 at the end, `WouldBlock` if there are none yet. An encrypted connection
    /// that ends without its other end's saying so fails with `UnexpectedEof`.
    pub fn recv(&self, bytes: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self.tls() {
            None => recv_plain(&self.socket, bytes),
            Some(mut tls) => tls.recv(&self.socket, bytes),
        }
    }

    /// Whether bytes that were sent wait for the socket to take them.
    pub fn wants_write(&self) -> bool {
        self.tls().is_some_and(|tls| tls.wants_write())
    }

    /// Sends what waits for the socket. True when nothing is left.
    pub fn flush(&self) -> io::Result<bool> {
        self.tls().map_or(Ok(true), |mut tls| tls.flush(&self.socket))
    }

    /// Whether bytes wait here that the socket does not report.
    pub fn has_bytes(&self) -> bool {
        self.tls().is_some_and(|mut tls| tls.has_bytes())
    }

    /// Shuts both directions down at once, so that both ends notice even if another process holds the descriptor.
    pub fn shutdown(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Sends nothing more, so that the last bytes that were sent still arrive: if unread bytes were left, the kernel would send a
    /// reset and discard what it has not sent yet.
    pub fn close(&self) {
        self.close_past(1024);
    }

    /// Closes, and passes over `chunks` chunks of 16 KiB that have arrived.
    pub(super) fn close_past(&self, chunks: u32) {
        if let Some(mut tls) = self.tls() {
            tls.close(&self.socket);
        }
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut chunk = [0; 16 << 10];
        for _ in 0..chunks {
            match recv_plain(&self.socket, &mut [IoSliceMut::new(&mut chunk)]) {
                Ok(n) if n > 0 => {}
                _ => return,
            }
        }
    }

    /// The other end's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    /// This end's address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?}, encrypted: {})", self.socket, self.is_encrypted())
    }
}
