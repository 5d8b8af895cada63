//! A doorbell between processes that need not trust each other: a pair of Unix sockets.
//!
//! The sleeper has the [`Bell`], one peer the [`Ringer`]. Each peer has a pair of its own, so that
//! one peer's ringer is no other peer's.
//!
//! An eventfd would not do: its file flags belong to every process that holds it. A peer could make
//! it blocking, and full, and then a thread that rings or drains it would wait for ever. On a
//! socket `MSG_DONTWAIT` says for each call that it must not wait, whatever a peer has set. What
//! else a peer can do with its end:
//!
//! * fill the queue: then the sleeper has been rung;
//! * shut its end down, or close it: `poll` would report that for ever, so the bell counts as
//!   silent ([`Bell::fd`]), and its sleeper looks by itself, as rarely as it always does;
//! * send descriptors along: the kernel closes descriptors that are not received on the receiver's
//!   thread, and the last close of some files waits (a TCP socket's with `SO_LINGER`). So a message
//!   is looked at before it is received, and one with descriptors is left in the queue and silences
//!   the bell. An end that is dropped is first shut down, so that nothing more arrives, and if
//!   descriptors lie in it, a thread of its own closes it ([`crate::closing`]).

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::closing::drop_elsewhere;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, Shutdown, SocketFlags, SocketType,
    recv, recvmsg, send, shutdown, socketpair,
};

/// How many rings one [`Bell::drain`] takes. If there are more, the next `poll` reports them at
/// once.
const RINGS: usize = 64;

/// How many messages a dropped end looks at: more than a peer can send between two of our calls.
const LAST_LOOKS: usize = 16;

/// One end of a pair of sockets.
#[derive(Debug)]
struct End {
    fd: Option<OwnedFd>,
    /// Another process has, or may have, a descriptor of this end too.
    shared: AtomicBool,
}

impl End {
    fn new(fd: OwnedFd, shared: bool) -> End {
        End { fd: Some(fd), shared: AtomicBool::new(shared) }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("taken by drop alone").as_fd()
    }

    /// Takes over an end from another process, and checks its type.
    fn from_fd(fd: OwnedFd) -> io::Result<End> {
        let kind = socket_domain(&fd).and_then(|domain| Ok((domain, socket_type(&fd)?)));
        if kind != Ok((AddressFamily::UNIX, SocketType::SEQPACKET)) {
            let text = "descriptor is not a Unix socket of type SOCK_SEQPACKET";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(End::new(fd, false))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let Some(socket) = self.fd.take() else { return };
        // Closing a descriptor that is not the last one closes nothing, and must not silence the
        // others.
        let shared = self.shared.load(Ordering::Relaxed);
        if empty(socket.as_fd(), RINGS + LAST_LOOKS)
            && (shared || shutdown(&socket, Shutdown::Both).is_err() || empty(socket.as_fd(), LAST_LOOKS))
        {
            return;
        }
        // The last close also closes the descriptors that the peer has sent, and may wait for as
        // long as the peer likes.
        drop_elsewhere(vec![socket]);
    }
}

/// Receives messages until there are none. False if one has descriptors, or after `most` messages:
/// a socket that was shut down seems to have empty messages for ever.
fn empty(socket: BorrowedFd<'_>, most: usize) -> bool {
    let mut seems_ended = 0;
    for _ in 0..most {
        match look(socket) {
            Look::Message { bytes: 0 } => seems_ended += 1,
            Look::Message { .. } => {}
            Look::Nothing => return true,
            Look::Descriptors | Look::Error => return false,
        }
        let _ = recv(socket, &mut [0; 1], RecvFlags::DONTWAIT);
    }
    seems_ended == most
}

/// What lies at the head of an end's queue.
enum Look {
    Nothing,
    /// A message without descriptors. Our ringers send no empty message, so an empty one means that
    /// the other end was closed or shut down, or that its holder sent one.
    Message {
        bytes: usize,
    },
    Descriptors,
    Error,
}

fn look(socket: BorrowedFd<'_>) -> Look {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let mut byte = [0];
    // Without room for descriptors, the kernel still reports that there were some.
    let mut none = RecvAncillaryBuffer::default();
    match recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut none, flags) {
        Ok(m) if m.flags.contains(ReturnFlags::CTRUNC) => Look::Descriptors,
        Ok(m) => Look::Message { bytes: m.bytes },
        Err(Errno::AGAIN | Errno::INTR) => Look::Nothing,
        Err(_) => Look::Error,
    }
}

/// Makes a doorbell and its ringer. A program that this process executes inherits neither.
pub fn pair() -> io::Result<(Bell, Ringer)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let bell = Bell::new(End::new(ours, false));
    // The ringer is made for another process.
    Ok((bell, Ringer(End::new(theirs, true))))
}

/// The sleeper's end of a doorbell. A clone is the same end and takes no descriptor: the last one that is dropped closes
/// the socket. All calls may be made from any thread; none blocks.
#[derive(Clone, Debug)]
pub struct Bell(Arc<Sleeper>);

#[derive(Debug)]
struct Sleeper {
    heard: Heard,
    silent: AtomicBool,
}

/// Where rings come.
enum Heard {
    /// At a socket of the bell's own.
    Own(End),
    /// Among other things at a socket that another thread reads.
    Beside(Arc<dyn AsFd + Send + Sync>),
}

impl std::fmt::Debug for Heard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Heard::Own(_)) { "Own" } else { "Beside" })
    }
}

impl AsFd for Heard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Heard::Own(end) => end.fd(),
            Heard::Beside(socket) => socket.as_fd(),
        }
    }
}

impl Bell {
    fn new(end: End) -> Bell {
        Bell(Arc::new(Sleeper { heard: Heard::Own(end), silent: AtomicBool::new(false) }))
    }

    /// A bell that takes no descriptor of its own: its rings come over a socket that carries other things too. The thread that
    /// reads it wakes the sleeper once more after taking a ring, because the sleeper may look at the socket after that.
    pub fn beside(socket: Arc<dyn AsFd + Send + Sync>) -> Bell {
        Bell(Arc::new(Sleeper { heard: Heard::Beside(socket), silent: AtomicBool::new(false) }))
    }

    /// Takes over a bell that another process made for us. Fails with `InvalidInput` unless the
    /// descriptor is a Unix socket of type `SOCK_SEQPACKET`.
    ///
    /// That process may have kept the descriptor, and a read of its own into a page that it holds
    /// up (its own FUSE mount, or `userfaultfd`) holds up our read too. So drain such a bell on a
    /// thread that works for that process only. A ringer's end has no such effect.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Bell> {
        End::from_fd(fd).map(Bell::new)
    }

    /// The descriptor that becomes readable when the bell is rung; `None` once the bell can never
    /// be rung again.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        // A hint about our own descriptor; it orders nothing.
        (!self.0.silent.load(Ordering::Relaxed)).then(|| self.0.heard.as_fd())
    }

    /// The descriptor, to be handed to the process that is to sleep.
    pub fn handle(&self) -> BorrowedFd<'_> {
        if let Heard::Own(end) = &self.0.heard {
            // Only the drop reads this, and it has the bell to itself.
            end.shared.store(true, Ordering::Relaxed);
        }
        self.0.heard.as_fd()
    }

    /// Takes the rings that have arrived; true if there were any. Those of a bell [beside](Bell::beside) other things are taken by
    /// the thread that reads the socket.
    pub fn drain(&self) -> bool {
        let Heard::Own(end) = &self.0.heard else { return false };
        if self.fd().is_none() {
            return false;
        }
        for n in 0..RINGS {
            match look(end.fd()) {
                Look::Message { bytes: 1.. } => {
                    let _ = recv(end.fd(), &mut [0; 1], RecvFlags::DONTWAIT);
                }
                Look::Nothing => return n > 0,
                // The other end is closed, or sent something that our ringers never send.
                Look::Message { bytes: 0 } | Look::Descriptors | Look::Error => {
                    self.0.silent.store(true, Ordering::Relaxed);
                    return n > 0;
                }
            }
        }
        true
    }
}

/// The end of a doorbell that one peer rings. All calls may be made from any thread; none blocks.
#[derive(Debug)]
pub struct Ringer(End);

impl Ringer {
    /// Takes over a ringer that a peer made. Fails with `InvalidInput` unless the descriptor is a
    /// Unix socket of type `SOCK_SEQPACKET`.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Ringer> {
        End::from_fd(fd).map(Ringer)
    }

    /// Wakes the thread that sleeps on the bell, now or next time. Has no effect if the bell is
    /// gone.
    pub fn ring(&self) {
        ring(self.0.fd());
    }

    /// The ringer as a call, for where other ways to wake a thread do too.
    pub fn into_ring(self) -> Ring {
        Box::new(move || self.ring())
    }
}

/// Wakes a sleeping thread; does not wait.
pub type Ring = Box<dyn Fn() + Send>;

/// Rings through the descriptor of a [`Ringer`].
pub fn ring(ringer: BorrowedFd<'_>) {
    // A full queue (EAGAIN) was rung already. Without memory for the message (ENOBUFS, ENOMEM) the
    // ring is lost, and the sleeper looks by itself. Every other error says that nothing sleeps
    // there any more.
    let _ = send(ringer, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

impl AsFd for Ringer {
    /// The descriptor, which may be handed to another process: from then on a drop here leaves the socket as it is.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // Only the drop reads this, and it has the ringer to itself.
        self.0.shared.store(true, Ordering::Relaxed);
        self.0.fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

    use pushgate_tests::lingering::{lingering, send_along};

    use super::*;

    fn readable(bell: &Bell) -> bool {
        let fd = bell.fd().expect("it can still be rung");
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&Timespec::default())).unwrap() > 0
    }

    /// What a peer can do to every process that holds its descriptor.
    fn make_blocking(fd: BorrowedFd<'_>) {
        fcntl_setfl(fd, fcntl_getfl(fd).unwrap() & !OFlags::NONBLOCK).unwrap();
    }

    #[test]
    fn a_ring_is_polled_and_taken() {
        let (bell, ringer) = pair().unwrap();
        assert!(!readable(&bell) && !bell.drain());
        ringer.ring();
        ringer.ring();
        assert!(readable(&bell) && bell.drain());
        assert!(!readable(&bell) && !bell.drain());
    }

    /// A call that waits would wait for ever.
    #[test]
    fn p8_neither_end_of_a_full_and_blocking_bell_waits() {
        let (bell, ringer) = pair().unwrap();
        make_blocking(bell.handle());
        make_blocking(ringer.as_fd());
        for _ in 0..100_000 {
            ringer.ring();
        }
        let mut drained = 0;
        while bell.drain() {
            drained += 1;
        }
        assert!((2..100_000).contains(&drained), "the queue was full: {drained} drains of {RINGS}");
        ringer.ring();
        assert!(bell.drain());
    }

    #[test]
    fn p8_a_ringer_that_is_shut_down_or_closed_silences_its_bell_alone() {
        let bells: Vec<_> = (0..4).map(|_| pair().unwrap()).collect();
        let [(a, x), (b, y), (c, z), (d, w)] = <[_; 4]>::try_from(bells).unwrap();
        // A ring that came before is still noticed.
        x.ring();
        shutdown(&x, Shutdown::Both).unwrap();
        shutdown(&y, Shutdown::Write).unwrap();
        z.ring();
        drop(z);
        while readable(&c) && !c.drain() {}
        w.ring();
        assert!(a.drain() && !b.drain() && d.drain());
        while c.drain() {}
        assert!(a.fd().is_none() && b.fd().is_none() && d.fd().is_some());
        // Ringing a bell that is gone does no harm.
        drop((a, b, c));
        x.ring();
        y.ring();
    }

    /// The socket's linger is an hour, so a close on this thread would take that long.
    #[test]
    fn p8_a_descriptor_sent_with_a_ring_is_not_closed_on_the_sleepers_thread() {
        let (bell, ringer) = pair().unwrap();
        let (first, first_end) = lingering();
        ringer.ring();
        assert!(send_along(ringer.as_fd(), &first, &[1]));
        assert!(bell.drain(), "the ring before it is heard");
        assert!(bell.fd().is_none(), "nothing after it is");
        // The other direction, to close the ringer; and descriptors without a byte of data.
        let (other, ringer_of_other) = pair().unwrap();
        let (second, second_end) = lingering();
        assert!(send_along(other.handle(), &second, &[]));
        drop((first, second));
        drop((bell, ringer, other, ringer_of_other));
        drop((first_end, second_end));
    }

    fn threads() -> usize {
        std::fs::read_dir("/proc/self/task").unwrap().count()
    }

    /// Threads of other tests come and go, but not by the hundred.
    #[test]
    fn an_end_without_descriptors_in_it_is_closed_where_it_is_dropped() {
        let bells: Vec<_> = (0..400).map(|_| pair().unwrap()).collect();
        let before = threads();
        for (i, (bell, ringer)) in bells.into_iter().enumerate() {
            ringer.ring();
            let theirs = Ringer::from_fd(ringer.as_fd().try_clone_to_owned().unwrap()).unwrap();
            if i % 2 == 0 { drop((bell, ringer, theirs)) } else { drop((theirs, ringer, bell)) }
        }
        assert!(threads() < before + 200, "{} threads, {before} before", threads());
    }

    #[test]
    fn a_bell_that_was_handed_over_is_not_silenced_by_the_drop_of_ours() {
        let (bell, ringer) = pair().unwrap();
        let theirs = Bell::from_fd(bell.handle().try_clone_to_owned().unwrap()).unwrap();
        drop(bell);
        ringer.ring();
        assert!(theirs.drain());
    }

    #[test]
    fn a_ringer_that_was_handed_over_rings_after_the_drop_of_ours() {
        let (bell, ringer) = pair().unwrap();
        let ours = Ringer::from_fd(ringer.as_fd().try_clone_to_owned().unwrap()).unwrap();
        drop(ringer);
        // A program has a peer's ringer, and hands it to its proxy.
        let handed = Ringer::from_fd(ours.as_fd().try_clone_to_owned().unwrap()).unwrap();
        drop(ours);
        handed.ring();
        assert!(readable(&bell) && bell.drain());
    }

    #[test]
    fn p8_a_descriptor_that_is_no_such_socket_is_refused() {
        let (read, _write) = rustix::pipe::pipe().unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let stream = std::os::unix::net::UnixStream::pair().unwrap().0;
        for fd in [read, event, stream.into()] {
            let number = fd.as_raw_fd();
            let error = Ringer::from_fd(fd).expect_err("no bell");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains("SOCK_SEQPACKET"), "{number}: {error}");
        }
        let (bell, ringer) = pair().unwrap();
        let handle = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
        let (bell, ringer) =
            (Bell::from_fd(handle(bell.handle())).unwrap(), Ringer::from_fd(handle(ringer.as_fd())).unwrap());
        ringer.ring();
        assert!(bell.drain());
    }
}
