//! The end of a connection that dials, on its way through the other end's door.

use std::io::{Error, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::passage::Passage;
use super::{DoorError, Refused, Stream, Terms};
use crate::redial::envelope::wait;

/// A connection that was dialled, on its way through the other end's door; it never waits.
pub struct Dialer(Passage);

impl Dialer {
    /// Begins with a connection that stands. `greeting` is sent once both ends have proved that they know the secret.
    pub fn new(socket: TcpStream, terms: &Terms, greeting: &[u8]) -> Result<Dialer, DoorError> {
        let begun = Passage::dialer(socket, terms, greeting).map(Dialer);
        begun.map_err(|error| DoorError::Io { what: "setting up a connection".into(), error })
    }

    /// Goes as far as it can. True once the connection is through and the greeting is sent; then call [`Dialer::finish`].
    pub fn advance(&mut self) -> Result<bool, DoorError> {
        Ok(self.0.advance()?)
    }

    /// What the socket must be ready for before there is more to do.
    pub fn awaits(&self) -> PollFlags {
        self.0.awaits()
    }

    /// The connection, after [`Dialer::advance`] has returned true.
    pub fn finish(self) -> Stream {
        self.0.finish().0
    }
}

impl AsFd for Dialer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.stream().as_fd()
    }
}

/// Connects to a door and greets. Waits until `deadline` at most.
pub fn dial(at: SocketAddr, terms: &Terms, greeting: &[u8], deadline: Instant) -> Result<Stream, DoorError> {
    let unreached = |error| DoorError::Connect { at, error };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(unreached(ErrorKind::TimedOut.into()));
    }
    let socket = TcpStream::connect_timeout(&at, left).map_err(unreached)?;
    // Where nobody listens, the kernel may connect a socket of this host to itself.
    if socket.local_addr().ok() == socket.peer_addr().ok() {
        return Err(unreached(Error::from(ErrorKind::ConnectionRefused)));
    }
    pass(socket, terms, greeting, deadline)
}

/// Goes through the door of a connection that stands, and greets. Waits until `deadline` at most.
pub fn pass(
    socket: TcpStream,
    terms: &Terms,
    greeting: &[u8],
    deadline: Instant,
) -> Result<Stream, DoorError> {
    let mut dialer = Dialer::new(socket, terms, greeting)?;
    while !dialer.advance()? {
        if !wait(&mut [PollFd::new(&dialer, dialer.awaits())], deadline) {
            return Err(Refused::Late.into());
        }
    }
    Ok(dialer.finish())
}
