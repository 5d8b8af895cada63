//! Closing what a peer has sent, without waiting for the peer.
//!
//! The last close of some files waits for as long as their sender likes: a TCP socket's with `SO_LINGER` and unsent bytes. A peer sends
//! such a descriptor over a Unix socket and closes its own copy. A thread that then drops the socket also closes the descriptor, received or not.
//!
//! In a thread that exits the kernel does not linger (`inet_release`: `PF_EXITING`). So the last close is left to the exit of a thread
//! with a table of descriptors of its own.

use std::any::Any;
use std::io::IoSliceMut;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::Builder;
use std::time::Duration;

use rustix::io::{Errno, ioctl_fionread};
use rustix::net::sockopt::set_socket_oobinline;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, Shutdown, recvmsg, shutdown};
use rustix::process::test_kill_process;
use rustix::thread::{UnshareFlags, gettid, unshare_unsafe};

use crate::fork::Owner;

/// What a peer holds of a quota. It is dropped once the peer's descriptors are closed.
pub type Held = Arc<dyn Any + Send + Sync>;

/// Drops a value that holds descriptors of a peer, on threads of its own. Those end at once unless a close waits in a thread that exits
/// too: the flush of a file that was received (FUSE, NFS). If no thread can be started, drops the value here.
pub fn drop_elsewhere(what: impl Send + 'static) {
    drop_elsewhere_within(what, ());
}

/// As [`drop_elsewhere`]; drops `held` once the last close of the value's descriptors has returned.
pub fn drop_elsewhere_within(what: impl Send + 'static, held: impl Send + 'static) {
    let closes = move || {
        let (ready, is_ready) = channel();
        let (dropped, is_dropped) = channel::<()>();
        let exits = Builder::new().name("pushgate-exit".into()).spawn(move || {
            // SAFETY: from here on this thread opens, uses and closes no descriptor: its copy of the table is closed by its exit.
            // Where the table can't be copied, the value's descriptors are closed by the thread that drops it, as any other.
            let _ = unsafe { unshare_unsafe(UnshareFlags::FILES) };
            let _ = ready.send(gettid());
            let _ = is_dropped.recv();
        });
        // The table is copied once the thread has said its number.
        let thread = exits.ok().and_then(|_| is_ready.recv().ok());
        // Not the last close of any file: the copied table has them all.
        drop(what);
        drop(dropped);
        // The kernel forgets the thread after it has closed the table, and joins it before. The number can be another thread's in
        // one of these pauses only if all other numbers were given meanwhile.
        let mut pause = Duration::from_millis(1);
        while thread.is_some_and(|thread| test_kill_process(thread) != Err(Errno::SRCH)) {
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(100));
        }
        drop(held);
    };
    let _ = Builder::new().name("pushgate-close".into()).spawn(closes);
}

/// A Unix stream socket whose other end is a peer's. Dropping the stream shuts the socket down in both directions, even if another process has a descriptor of the socket,
/// and waits for nobody, whatever the peer has sent. It makes a thread only if descriptors are left in it.
///
/// What the peer sends out of band (`MSG_OOB`) is received in line: the kernel would otherwise drop that byte and its descriptors on the
/// thread that receives the next byte.
///
/// In a child of `fork` dropping it closes the child's descriptor alone.
#[derive(Debug)]
pub struct PeerStream {
    stream: Option<UnixStream>,
    owner: Owner,
    held: Option<Held>,
}

impl PeerStream {
    /// The stream of a peer that holds so much of a quota, until what the peer has sent over the stream is closed.
    pub fn within(mut self, held: Held) -> Self {
        self.held = Some(held);
        self
    }

    /// What the peer holds of a quota.
    pub fn held(&self) -> Option<Held> {
        self.held.clone()
    }
}

impl From<UnixStream> for PeerStream {
    fn from(stream: UnixStream) -> Self {
        // A kernel without this option has no bytes out of band over Unix sockets.
        let _ = set_socket_oobinline(&stream, true);
        PeerStream { stream: Some(stream), owner: Owner::here(), held: None }
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
        // Nothing arrives after this.
        let _ = shutdown(&stream, Shutdown::Both);
        if may_have_descriptors(stream.as_fd()) {
            drop_elsewhere_within(stream, self.held.take());
        }
    }
}

/// The most bytes that are looked through for descriptors. What is left at an ordinary end is a frame or two.
const MOST_LEFT: usize = 64 << 10;

/// Whether descriptors may lie in a socket that is shut down. Receives nothing: a peer sees by the kernel's error that what it sent was
/// not read.
fn may_have_descriptors(socket: BorrowedFd<'_>) -> bool {
    // A descriptor lies on a byte.
    let left = match ioctl_fionread(socket) {
        Ok(0) => return false,
        Ok(left) if left <= MOST_LEFT as u64 => left as usize,
        _ => return true,
    };
    // A look goes on over messages up to the first with descriptors. Without room for those the kernel says that there are some and
    // closes copies of them, and the message keeps its own.
    let (mut bytes, mut none) = (vec![0; left], RecvAncillaryBuffer::default());
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    !recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut none, flags)
        .is_ok_and(|m| m.bytes == left && !m.flags.contains(ReturnFlags::CTRUNC))
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read, Write};
    use std::net::TcpStream;
    use std::sync::mpsc::Receiver;
    use std::time::Instant;

    use rustix::net::{RecvAncillaryMessage, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

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

    /// Sends a descriptor with a byte out of band.
    fn send_out_of_band(to: &UnixStream, fd: &OwnedFd) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut along = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.as_fd()];
        assert!(along.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(to, &[IoSlice::new(&[2])], &mut along, SendFlags::OOB).unwrap();
    }

    #[test]
    fn p7_a_peers_stream_with_descriptors_that_linger_is_dropped_at_once_and_leaves_no_thread() {
        let mut ends = Vec::new();
        for n in 0..24 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (fd, end) = lingering();
            // The descriptor lies before, between or after other bytes; every fourth descriptor lies on a byte out of band.
            (&theirs).write_all(&[1; 3][..n % 3]).unwrap();
            match n % 4 {
                0 => send_out_of_band(&theirs, &fd),
                _ => assert!(send_along(&theirs, &fd, &[2])),
            }
            drop(fd);
            (&theirs).write_all(&[3; 3][..n % 2]).unwrap();
            ends.push(end);
            drop(PeerStream::from(ours));
        }
        ends.iter().for_each(until_closed);
        until_no_thread_closes();
    }

    /// The kernel would close the descriptor on the thread that receives the next byte.
    #[test]
    fn p7_a_descriptor_that_lingers_on_a_byte_out_of_band_is_received_in_line() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = PeerStream::from(ours);
        let (fd, end) = lingering();
        send_out_of_band(&theirs, &fd);
        drop(fd);
        (&theirs).write_all(&[3]).unwrap();
        let mut bytes = [0; 2];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut along = RecvAncillaryBuffer::new(&mut space);
        recvmsg(&ours, &mut [IoSliceMut::new(&mut bytes[..1])], &mut along, RecvFlags::DONTWAIT).unwrap();
        let fds = along.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
            _ => None,
        });
        let fds: Vec<_> = fds.flatten().collect();
        assert_eq!((fds.len(), bytes), (1, [2, 0]));
        drop_elsewhere(fds);
        until_closed(&end);
    }

    #[test]
    fn bytes_that_nobody_received_take_no_thread_unless_they_are_many_or_have_descriptors() {
        let many = MOST_LEFT + 1;
        for (messages, along, may) in [
            (&[][..], 0, false),
            (&[1], 0, false),
            (&[1, 16, 4096], 0, false),
            (&[MOST_LEFT], 0, false),
            (&[many], 0, true),
            (&[], 1, true),
            (&[1, 16, 4096], 1, true),
        ] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            messages.iter().for_each(|bytes| (&theirs).write_all(&vec![7; *bytes]).unwrap());
            let fd = ours.as_fd().try_clone_to_owned().unwrap();
            (0..along).for_each(|_| assert!(send_along(&theirs, &fd, &[1])));
            shutdown(&ours, Shutdown::Both).unwrap();
            assert_eq!(may_have_descriptors(ours.as_fd()), may, "{messages:?}, {along} descriptors");
        }
    }

    #[test]
    fn p8_what_a_peer_holds_is_given_back_once_all_is_closed_and_not_before() {
        /// A value whose drop waits, as the flush of a file does that was received.
        struct Slow(Receiver<()>);
        impl Drop for Slow {
            fn drop(&mut self) {
                let _ = self.0.recv();
            }
        }
        let (goes_on, waits) = channel();
        let (held, is_held) = (Arc::new(()), |held: &Arc<()>| Arc::strong_count(held) > 1);
        drop_elsewhere_within(Slow(waits), held.clone());
        std::thread::sleep(Duration::from_millis(100));
        assert!(is_held(&held));
        drop(goes_on);
        pushgate_tests::wait_until("the slow one is given back", || !is_held(&held));
        // A stream gives its part of the quota back too, closed in place or by a thread.
        for along in [false, true] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let lingers = along.then(lingering).map(|(fd, end)| {
                assert!(send_along(&theirs, &fd, &[1]));
                end
            });
            let ours = PeerStream::from(ours).within(held.clone());
            assert!(is_held(&held));
            drop(ours);
            pushgate_tests::wait_until("the stream's is given back", || !is_held(&held));
            lingers.iter().for_each(until_closed);
        }
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
