//! Closing what a peer has sent, without waiting for the peer.
//!
//! The last close of some files waits for as long as their sender likes: a TCP socket's with `SO_LINGER` and unsent bytes. A peer sends
//! such a descriptor over a Unix socket and closes its own copy. A thread that then drops the socket also closes the descriptor, received or not.
//!
//! In a thread that exits the kernel does not linger (`inet_release`: `PF_EXITING`). So the last close is left to the exit of a thread
//! with a table of descriptors of its own.

use std::any::Any;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IoSliceMut};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::{Errno, ioctl_fionread};
use rustix::net::sockopt::{set_socket_oobinline, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, connect, recvmsg, shutdown, socket_with,
};
use rustix::process::test_kill_process;
use rustix::thread::{UnshareFlags, gettid, unshare_unsafe};

use crate::closers::{self, Closers, Exiting, builder, lock_soon};
use crate::fork::Owner;

/// What a peer holds of a quota. It is dropped once the peer's descriptors are closed.
pub type Held = Arc<dyn Any + Send + Sync>;

/// Closes descriptors of a peer, on threads made for the call. These threads end at once unless a close waits in a thread that exits
/// too: the flush of a file that was received (FUSE, NFS). Then they wait alone: descriptors of other calls are closed all the same.
/// If no thread can be started, closes the descriptors here.
pub fn drop_elsewhere(fds: Vec<OwnedFd>) {
    drop_elsewhere_within(fds, ());
}

/// Closes descriptors as [`drop_elsewhere`] does, and drops `held` once the last close of the descriptors has returned.
pub fn drop_elsewhere_within(fds: Vec<OwnedFd>, held: impl Send + 'static) {
    let closers = closers::kept();
    let closes = move || {
        closers::stand_back();
        let exiting = closers.as_ref().and_then(|closers| closers.take(&fds)).or_else(with_all);
        // Not the last close of any file: the thread that exits has them all.
        drop(fds);
        let thread = exiting.map(|(thread, _exits)| thread);
        // The kernel forgets the thread after it has closed the table, and joins it before. The number can be another thread's in
        // one of these pauses only if all other numbers were given meanwhile.
        let mut pause = Duration::from_millis(1);
        while thread.is_some_and(|thread| test_kill_process(thread) != Err(Errno::SRCH)) {
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(100));
        }
        drop(held);
    };
    let _ = builder("pushgate-close").spawn(closes);
}

/// Closes descriptors of some peers as [`drop_elsewhere`] does, on few threads: at most 2 closes are under way. Descriptors that
/// come meanwhile stay open until one of those closes has returned; then they are closed together. So closes that hang keep few
/// threads, and hold up only the closes of peers that share the value.
#[derive(Clone, Debug, Default)]
pub struct Closes(Arc<Mutex<UnderWay>>);

/// Most closes under way. Each has two threads.
pub const MOST_CLOSES: usize = 2;

#[derive(Default)]
struct UnderWay {
    closes: usize,
    waiting: Vec<OwnedFd>,
    held: Vec<Box<dyn Any + Send>>,
}

impl std::fmt::Debug for UnderWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} closes under way, {:?} wait", self.closes, self.waiting)
    }
}

impl Closes {
    /// Closes descriptors; drops `held` once the last close of the descriptors has returned.
    pub fn close(&self, fds: Vec<OwnedFd>, held: impl Send + 'static) {
        if fds.is_empty() {
            return;
        }
        let mut all = self.all();
        if all.closes == MOST_CLOSES {
            all.waiting.extend(fds);
            all.held.push(Box::new(held));
            return;
        }
        all.closes += 1;
        drop(all);
        drop_elsewhere_within(fds, (held, Returned(self.clone())));
    }

    fn all(&self) -> MutexGuard<'_, UnderWay> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The closes of this process for each user whose streams were dropped, by the user's number, while any are under way.
static OF_USERS: Mutex<Option<(Owner, BTreeMap<u32, Closes>)>> = Mutex::new(None);

/// Closes a stream, and what its peer has sent, with the others of the peer's user: a user that connects all the time and sends descriptors
/// keeps few threads, and holds up no close of another user.
fn close_of_user(stream: UnixStream, held: Option<Held>) {
    // The user that has connected, or at whose listener this process has.
    let uid = socket_peercred(&stream).map_or(u32::MAX, |cred| cred.uid.as_raw());
    let closes = lock_soon(&OF_USERS).map(|mut all| {
        // A child of fork has none of its parent's threads.
        let (_, all) = match &mut *all {
            Some(own) if own.0.is_here() => own,
            all => all.insert((Owner::here(), BTreeMap::new())),
        };
        all.retain(|_, closes| closes.all().closes > 0);
        all.entry(uid).or_default().clone()
    });
    closes.unwrap_or_default().close(vec![stream.into()], held);
}

/// Descriptors that wait for a close of others.
fn waiting() -> usize {
    let all = lock_soon(&OF_USERS);
    all.iter()
        .flat_map(|all| all.as_ref())
        .flat_map(|(_, all)| all.values())
        .map(|c| c.all().waiting.len())
        .sum()
}

/// One of the closes under way, until it has returned.
struct Returned(Closes);

impl Drop for Returned {
    fn drop(&mut self) {
        let mut all = self.0.all();
        all.closes -= 1;
        let (fds, held) = (std::mem::take(&mut all.waiting), std::mem::take(&mut all.held));
        drop(all);
        self.0.close(fds, held);
    }
}

/// A thread with a copy of the whole table of descriptors, where there are no [`Closers`].
fn with_all() -> Option<Exiting> {
    let (ready, is_ready) = channel();
    let (goes, exits) = channel();
    let exits = move || {
        // SAFETY: from here on this thread opens, uses and closes no descriptor: its copy of the table is closed by its exit.
        // Where the table can't be copied, the descriptors are closed by the thread that drops them, as any other.
        let _ = unsafe { unshare_unsafe(UnshareFlags::FILES) };
        let _ = ready.send(gettid());
        let _: Result<(), _> = exits.recv();
    };
    builder("pushgate-exit").spawn(exits).ok()?;
    // The table is copied once the thread has said its number.
    Some((is_ready.recv().ok()?, goes))
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
    /// Kept from before the peer can have sent a descriptor.
    _closers: Option<Arc<Closers>>,
}

impl PeerStream {
    /// Connects to a listener. One whose queue of new connections is full is waited for until `deadline`, then the error is `WouldBlock`: a
    /// plain `connect` could wait for ever. The stream does not block.
    pub fn connect(to: &SocketAddrUnix, deadline: Instant) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        loop {
            match connect(&socket, to) {
                Ok(()) => return Ok(socket.into()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10))
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Has the stream's peer hold `held` of a quota until what the peer has sent over the stream is closed.
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
        PeerStream { stream: Some(stream), owner: Owner::here(), held: None, _closers: closers::kept() }
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
            close_of_user(stream, self.held.take());
        }
    }
}

/// A Unix socket at which peers connect. Dropping the listener refuses new connections, closes those that nobody has accepted, and
/// frees its name before it returns; it waits for nobody, whatever the peers have sent: the kernel would otherwise close the
/// descriptors that they sent on the thread that closes the listener.
///
/// In a child of `fork` dropping it closes the child's descriptor alone.
#[derive(Debug)]
pub struct PeerListener {
    listener: Option<UnixListener>,
    owner: Owner,
    shared: bool,
    /// Kept while nobody is connected too.
    _closers: Option<Arc<Closers>>,
}

impl PeerListener {
    /// Says that another process has a descriptor of this listener too: dropping the listener leaves new connections to that process.
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// The next connection. While many dropped streams of this process wait for their closes, this waits for those first, for 10 ms at most:
    /// peers that connect faster than their streams can be closed would take all descriptors of the process.
    pub fn accept(&self) -> io::Result<PeerStream> {
        for _ in 0..10 {
            if waiting() < MOST_WAITING {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        UnixListener::accept(self).map(|(stream, _)| stream.into())
    }
}

impl From<UnixListener> for PeerListener {
    fn from(listener: UnixListener) -> Self {
        let (owner, _closers) = (Owner::here(), closers::kept());
        PeerListener { listener: Some(listener), owner, shared: false, _closers }
    }
}

impl Deref for PeerListener {
    type Target = UnixListener;

    fn deref(&self) -> &UnixListener {
        self.listener.as_ref().expect("taken by drop alone")
    }
}

impl AsFd for PeerListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        (**self).as_fd()
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        let Some(listener) = self.listener.take() else { return };
        if !self.owner.is_here() {
            return;
        }
        // Nobody connects after this, so the loop ends.
        let shut = !self.shared && shutdown(&listener, Shutdown::Both).is_ok();
        let mut left = Vec::new();
        while shut && listener.set_nonblocking(true).is_ok() {
            match listener.accept() {
                Ok((stream, _)) => {
                    let _ = shutdown(&stream, Shutdown::Both);
                    if may_have_descriptors(stream.as_fd()) {
                        left.push(stream.into());
                    }
                    if left.len() == AT_ONCE {
                        drop_elsewhere(std::mem::take(&mut left));
                    }
                }
                Err(e) if [ErrorKind::Interrupted, ErrorKind::ConnectionAborted].contains(&e.kind()) => {}
                // The socket is shut down and its queue empty, so this close is of no other file.
                Err(e) if [ErrorKind::WouldBlock, ErrorKind::InvalidInput].contains(&e.kind()) => {
                    if !left.is_empty() {
                        drop_elsewhere(left);
                    }
                    return;
                }
                // This process may open no more files.
                Err(_) => break,
            }
        }
        left.push(listener.into());
        drop_elsewhere(left);
    }
}

/// How many streams may wait for their closes before new connections do.
const MOST_WAITING: usize = 256;

/// How many connections that nobody accepted are closed by one thread.
const AT_ONCE: usize = 64;

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
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;
    use std::sync::mpsc::RecvTimeoutError;
    use std::time::Instant;

    use rustix::net::{RecvAncillaryMessage, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use pushgate_tests::fuse::Hanging;
    use pushgate_tests::lingering::{lingering, send_along};

    use super::*;

    /// A stream of a peer, with which the threads that close begin.
    fn stream() -> PeerStream {
        PeerStream::from(UnixStream::pair().unwrap().0)
    }

    /// The threads of this process with this name.
    fn threads(name: &str) -> usize {
        let named = |task: &std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|own| own.trim() == name)
        };
        std::fs::read_dir("/proc/self/task").unwrap().flatten().filter(named).count()
    }

    /// Waits until no thread of this process closes anything.
    fn until_no_thread_closes() {
        let end = Instant::now() + pushgate_tests::hang();
        while threads("pushgate-close") + threads("pushgate-exit") > 0 {
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

    /// A stranger who connects all the time is in no quota.
    #[test]
    fn p7_dropped_streams_with_descriptors_keep_few_threads_while_their_closes_take_long() {
        let closers = closers::kept().unwrap();
        let (mut end, left) = UnixStream::pair().unwrap();
        let left = OwnedFd::from(left);
        closers.held(|| {
            for _ in 0..100 {
                let (ours, theirs) = UnixStream::pair().unwrap();
                assert!(send_along(&theirs, &left, &[1]));
                drop(PeerStream::from(ours));
            }
            // Other tests drop some too.
            assert!(threads("pushgate-close") < 50);
        });
        drop(left);
        end.set_read_timeout(Some(pushgate_tests::hang())).unwrap();
        assert_eq!(end.read(&mut [0]).unwrap(), 0, "one was not closed");
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

    fn name(of: &str) -> SocketAddr {
        SocketAddr::from_abstract_name(format!("pushgate-closing-{of}-{}", std::process::id())).unwrap()
    }

    /// Drops a listener; fails where that waits.
    fn drops(listener: PeerListener) {
        let (drops, dropped) = channel::<()>();
        std::thread::spawn(move || {
            drop(listener);
            drop(drops);
        });
        let waits = dropped.recv_timeout(pushgate_tests::hang()) == Err(RecvTimeoutError::Timeout);
        assert!(!waits, "the drop waits for a peer");
    }

    #[test]
    fn p7_a_listener_whose_queue_has_descriptors_that_linger_is_dropped_at_once_and_its_name_is_free() {
        let name = name("queue");
        for _ in 0..3 {
            let listener = PeerListener::from(UnixListener::bind_addr(&name).unwrap());
            let (fd, end) = lingering();
            // Every third peer sends nothing.
            let peers: Vec<_> = (0..2 * AT_ONCE)
                .map(|n| {
                    let peer = UnixStream::connect_addr(&name).unwrap();
                    assert!(n % 3 == 0 || send_along(&peer, &fd, &[1]));
                    peer
                })
                .collect();
            drop(fd);
            drops(listener);
            assert!(UnixStream::connect_addr(&name).is_err());
            until_closed(&end);
            for mut peer in peers {
                // The end, or the word that what the peer has sent was not read.
                assert!(matches!(peer.read(&mut [0]), Ok(0) | Err(_)));
            }
        }
        until_no_thread_closes();
    }

    #[test]
    fn p7_a_listener_that_another_process_has_too_leaves_new_connections_to_that_process() {
        let name = name("shared");
        let listener = PeerListener::from(UnixListener::bind_addr(&name).unwrap());
        let others = PeerListener::from(listener.try_clone().unwrap());
        let peers = [(); 2].map(|()| UnixStream::connect_addr(&name).unwrap());
        drops(listener.shared());
        for peer in &peers {
            let (fd, end) = lingering();
            assert!(send_along(peer, &fd, &[1]));
            drop(fd);
            drop(others.accept().unwrap());
            until_closed(&end);
        }
        UnixStream::connect_addr(&name).unwrap();
        drops(others);
        UnixStream::connect_addr(&name).unwrap_err();
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
        let (held, is_held) = (Arc::new(()), |held: &Arc<()>| Arc::strong_count(held) > 1);
        let _before = stream();
        match Hanging::open(1) {
            Ok(slow) => {
                drop_elsewhere_within(
                    slow.files().iter().map(|fd| fd.try_clone().unwrap()).collect(),
                    held.clone(),
                );
                pushgate_tests::wait_until("the close waits", || slow.waiting() > 0);
                std::thread::sleep(Duration::from_millis(100));
                assert!(is_held(&held));
                drop(slow);
            }
            Err(e) => pushgate_tests::skip(&format!("a close that waits: no file system in user space: {e}")),
        }
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
    fn p7_a_peer_whose_closes_hang_holds_up_no_close_of_another_peer() {
        let _before = stream();
        let hanging = match Hanging::open(3) {
            Ok(hanging) => hanging,
            Err(e) => {
                return pushgate_tests::skip(&format!("closes that hang: no file system in user space: {e}"));
            }
        };
        drop_elsewhere(hanging.files().iter().map(|fd| fd.try_clone().unwrap()).collect());
        pushgate_tests::wait_until("a close hangs", || hanging.waiting() > 0);
        let (fd, end) = lingering();
        let held = Arc::new(());
        drop_elsewhere_within(vec![fd], held.clone());
        until_closed(&end);
        pushgate_tests::wait_until("the other peer's part of the quota", || Arc::strong_count(&held) == 1);
        assert!(hanging.waiting() < 6, "all hang that could");
        // All goes on when the files' owner ends.
        drop(hanging);
        until_no_thread_closes();
    }

    #[test]
    fn p7_p8_peers_whose_closes_hang_keep_few_threads_and_all_is_closed_when_the_closes_return() {
        let _before = stream();
        let hanging = match Hanging::open(1) {
            Ok(hanging) => hanging,
            Err(e) => {
                return pushgate_tests::skip(&format!("closes that hang: no file system in user space: {e}"));
            }
        };
        let (closes, held) = (Closes::default(), Arc::new(()));
        for _ in 0..3 * MOST_CLOSES {
            closes.close(vec![hanging.files()[0].try_clone().unwrap()], held.clone());
        }
        let (fd, end) = lingering();
        closes.close(vec![fd], held.clone());
        pushgate_tests::wait_until("closes hang", || hanging.waiting() >= MOST_CLOSES);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(hanging.waiting(), MOST_CLOSES);
        // Those of peers that do not share the value.
        let (other, other_end) = lingering();
        Closes::default().close(vec![other], ());
        until_closed(&other_end);
        assert_eq!(Arc::strong_count(&held), 3 * MOST_CLOSES + 2, "one is given back before its close");
        drop(hanging);
        until_closed(&end);
        pushgate_tests::wait_until("all is given back", || Arc::strong_count(&held) == 1);
        until_no_thread_closes();
    }

    #[test]
    fn p7_a_connect_to_a_name_whose_queue_is_full_ends_at_its_deadline() {
        let name =
            SocketAddrUnix::new_abstract_name(format!("pushgate-full-{}", std::process::id()).as_bytes())
                .unwrap();
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &name).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let connect = |limit: Duration| PeerStream::connect(&name, Instant::now() + limit);
        let _waits = connect(Duration::ZERO).unwrap();
        assert_eq!(connect(Duration::from_millis(50)).unwrap_err().kind(), ErrorKind::WouldBlock);
        let frees = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let _ = rustix::net::accept(&socket);
            socket
        });
        connect(pushgate_tests::hang()).unwrap();
        frees.join().unwrap();
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
