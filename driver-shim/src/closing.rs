//! Closing what a peer has sent, without waiting for the peer.
//!
//! The last close of some files waits for as long as their sender likes: a TCP socket's with `SO_LINGER` and unsent bytes. A peer sends
//! such a descriptor over a Unix socket, keeps none, and whoever drops the socket closes the descriptor too, received or not.
//!
//! In a thread that exits the kernel does not linger (`inet_release`: `PF_EXITING`). So the last close is left to the exit of a thread
//! with a table of descriptors of its own.

use std::io::IoSliceMut;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::thread::Builder;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, Shutdown, recvmsg, shutdown};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::fork::Owner;

/// Drops a value that holds descriptors of a peer, on threads of its own, which end at once. If no thread can be started, drops
/// the value here.
pub fn drop_elsewhere(what: impl Send + 'static) {
    let closes = move || {
        let (ready, is_ready) = channel();
        let (dropped, is_dropped) = channel::<()>();
        let exits = Builder::new().name("pushgate-exit".into()).spawn(move || {
            // SAFETY: from here on this thread opens, uses and closes no descriptor: its copy of the table is closed by its exit.
            // Where the table can't be copied, the value's descriptors are closed by the thread that drops it, as any other.
            let _ = unsafe { unshare_unsafe(UnshareFlags::FILES) };
            drop(ready);
            let _ = is_dropped.recv();
        });
        if exits.is_ok() {
            // An error says that the other side was dropped: the table is copied.
            let _: Result<(), _> = is_ready.recv();
        }
        // Not the last close of any file: the copied table has them all.
        drop(what);
        drop(dropped);
    };
    let _ = Builder::new().name("pushgate-close".into()).spawn(closes);
}

/// A Unix stream socket whose other end is a peer's. Dropping it shuts it down in both directions, whoever else has a descriptor of it,
/// and waits for nobody, whatever the peer has sent.
///
/// In a child of `fork` dropping it closes the child's descriptor alone.
#[derive(Debug)]
pub struct PeerStream {
    stream: Option<UnixStream>,
    owner: Owner,
}

impl From<UnixStream> for PeerStream {
    fn from(stream: UnixStream) -> Self {
        PeerStream { stream: Some(stream), owner: Owner::here() }
    }
}

impl From<OwnedFd> for PeerStream {
    fn from(socket: OwnedFd) -> Self {
        UnixStream::from(socket).into()
    }
}

impl Deref for PeerStream {
    type Target = UnixStream;

    fn deref(&self) -> &UnixStream {
        self.stream.as_ref().expect("taken by drop alone")
    }
}

impl AsFd for PeerStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        (**self).as_fd()
    }
}

impl Drop for PeerStream {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        if !self.owner.is_here() {
            return;
        }
        // Nothing arrives behind this.
        let _ = shutdown(&stream, Shutdown::Both);
        if !is_empty(stream.as_fd()) {
            drop_elsewhere(stream);
        }
    }
}

/// Whether nothing has arrived that was not received.
fn is_empty(socket: BorrowedFd<'_>) -> bool {
    // A look: without room for descriptors the kernel closes copies of them, and the message keeps its own.
    let (mut byte, mut none) = ([0], RecvAncillaryBuffer::default());
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut none, flags) {
        Ok(message) => message.bytes == 0,
        Err(e) => e == Errno::AGAIN,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::time::{Duration, Instant};

    use pushgate_tests::lingering::{lingering, send_along};

    use super::*;

    /// Waits until no thread of this process closes anything.
    fn until_no_thread_closes() {
        let closes = |task: std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| {
                ["pushgate-close", "pushgate-exit"].iter().any(|closer| name.trim() == *closer)
            })
        };
        let end = Instant::now() + pushgate_tests::hang();
        while std::fs::read_dir("/proc/self/task").unwrap().flatten().any(closes) {
            assert!(Instant::now() < end, "a thread still waits for a close");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the other end is closed. The kernel still sends what that end has sent.
    fn until_closed(end: &TcpStream) {
        const FIN_WAIT_1: &str = "04";
        let ports = [end.peer_addr(), end.local_addr()].map(|at| format!(":{:04X}", at.unwrap().port()));
        let limit = Instant::now() + pushgate_tests::hang();
        loop {
            let all = std::fs::read_to_string("/proc/net/tcp").unwrap();
            let line = all.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).find(|words| {
                words.len() > 3 && words[1].ends_with(&ports[0]) && words[2].ends_with(&ports[1])
            });
            let state = line.expect("the connection is there").get(3).copied();
            if state == Some(FIN_WAIT_1) {
                return;
            }
            assert!(Instant::now() < limit, "state {state:?}: leaked");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn p7_a_peers_stream_with_descriptors_that_linger_is_dropped_at_once_and_leaves_no_thread() {
        let mut ends = Vec::new();
        for n in 0..20 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (fd, end) = lingering();
            // Before, behind and between bytes.
            (&theirs).write_all(&[1; 3][..n % 3]).unwrap();
            assert!(send_along(&theirs, &fd, &[2]));
            drop(fd);
            (&theirs).write_all(&[3; 3][..n % 2]).unwrap();
            ends.push(end);
            drop(PeerStream::from(ours));
        }
        ends.iter().for_each(until_closed);
        until_no_thread_closes();
    }

    #[test]
    fn p7_descriptors_that_linger_and_were_received_are_dropped_without_a_thread_that_stays() {
        let (fd, end) = lingering();
        drop_elsewhere(vec![fd]);
        until_closed(&end);
        until_no_thread_closes();
    }

    #[test]
    fn a_peer_reads_what_was_sent_before_the_stream_was_dropped_and_then_its_end() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ours = PeerStream::from(ours);
        let also = ours.try_clone().unwrap();
        (&*ours).write_all(b"last words").unwrap();
        drop(ours);
        let mut heard = String::new();
        theirs.read_to_string(&mut heard).unwrap();
        assert_eq!(heard, "last words");
        drop(also);
    }
}
