//! How ranks find and hear each other outside of the data path: a socket
//! between every two of them. Set-up messages go over it, and its end is how a
//! rank learns that another one died. On one host it is a Unix socket, which
//! carries descriptors too (`unix`), between hosts TCP (`tcp`).
//!
//! One thread (`reader`) serves all of a rank's sockets and never waits for one
//! of them, so that an end is seen at once even while nobody waits for a message,
//! and whatever another rank does. What a peer has not taken yet waits here, and
//! what nobody has asked for yet too, both bounded.
//!
//! A socket does not end while a forked child of a dead rank holds it. So on one
//! host each rank hands over a pidfd of itself, and between hosts it says now and
//! then that it lives ([`Beats`]).

mod reader;
mod set_up;
mod tcp;
#[cfg(test)]
mod tests;
mod unix;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
pub(crate) use pushgate_driver_shim::fdpass::Frame;
use pushgate_driver_shim::fdpass::{Outgoing, drop_elsewhere};
use pushgate_driver_shim::process::Process;
use pushgate_proxy::qp::verbs::gid::Family;
use pushgate_proxy::session::Status;
use rustix::event::{PollFd, poll};
use rustix::io::Errno;

use crate::error::{Error, Result};
pub(crate) use set_up::SetUp;

/// "This rank leaves in order."
const BYE: u32 = 0;
/// "This rank lives."
const BEAT: u32 = 2;
/// "My end of a queue pair is gone, and why."
const END: u32 = 3;
/// The first label of a queue pair; its frames are those of [`SetUp`].
pub(crate) const QUEUE_PAIRS: u32 = 16;

/// Bytes of a frame, its label included; what ranks exchange at set-up is small.
const MAX_BYTES: usize = 1 << 24;
const MAX_FDS: usize = 16;
/// Bytes that may wait until a peer takes them.
const MAX_OUT: usize = 2 * MAX_BYTES;
/// Descriptors that may wait until a peer takes them.
const MAX_OUT_FDS: usize = 4 * MAX_FDS;
/// Bytes of a peer's frames that may wait until somebody asks for them. A collective has
/// two of a rank's frames here at most, and a queue pair a few hundred bytes.
const MAX_WAITING: usize = 4 * MAX_BYTES;
/// Descriptors of all peers' frames that may wait until somebody asks for them; at most half of the limit of
/// open files.
const MAX_WAITING_FDS: usize = 1 << 14;
/// Memory that a frame takes besides its bytes.
const FRAME: usize = 128;

/// How long the cause of a rank's leaving may come after its farewell.
const GRACE: Duration = Duration::from_millis(250);

/// What is called by the reader's thread. Neither call may wait for a peer.
pub(crate) struct Events {
    /// A rank is lost.
    pub(crate) lost: Box<dyn Fn(u32) + Send>,
    /// A rank's end of a queue pair is gone.
    pub(crate) ended: Box<dyn Fn(Ended) + Send>,
}

/// A rank's end of a queue pair is gone, or its attempt to make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Whose end.
    pub(crate) rank: u32,
    /// The queue pair's.
    pub(crate) label: u32,
    /// That rank's number of its attempt to make it.
    pub(crate) attempt: u64,
    /// Why.
    pub(crate) status: Status,
}

/// How a rank of another host shows that it lives.
#[derive(Clone, Copy)]
struct Beats {
    /// It says so as often as this.
    every: Duration,
    /// A rank that says nothing for as long as this is lost.
    silence: Duration,
}

const BEATS: Beats = Beats { every: Duration::from_secs(2), silence: Duration::from_secs(10) };

#[derive(Clone, Copy, PartialEq, Eq)]
enum Leaving {
    Bye,
    Lost,
}

#[derive(Default)]
struct State {
    frames: HashMap<(u32, u32), VecDeque<Frame>>,
    /// What each rank's frames in `frames` take.
    waiting: HashMap<u32, Load>,
    /// Queue pairs that are being made here, by rank and label.
    set_ups: HashSet<(u32, u32)>,
    ends: HashMap<u32, Leaving>,
    lost: Option<u32>,
}

#[derive(Default)]
struct Load {
    bytes: usize,
    fds: usize,
    /// Descriptors of frames that were dropped, which a thread closes.
    closing: Arc<AtomicUsize>,
}

impl Load {
    /// Descriptors that are open here.
    fn open(&self) -> usize {
        // Relaxed: a count that orders nothing.
        self.fds + self.closing.load(Ordering::Relaxed)
    }
}

/// What may wait of peers' frames until somebody asks for them.
#[derive(Clone, Copy)]
struct Most {
    /// Bytes, of one peer.
    bytes: usize,
    /// Descriptors, of all peers together.
    fds: usize,
    /// Descriptors of one peer for which that peer is not lost, whatever the others have here.
    share: usize,
}

/// So many descriptors that a thread closes are counted out when this is dropped.
struct Counted(Arc<AtomicUsize>, usize);

impl Drop for Counted {
    fn drop(&mut self) {
        // Relaxed: as where the count is read.
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl State {
    /// Keeps a frame until somebody asks for it. False if the rank has more here than it may.
    fn keep(&mut self, rank: u32, label: u32, frame: Frame, most: Most) -> bool {
        let load = self.waiting.entry(rank).or_default();
        load.bytes += frame.0.len() + FRAME;
        load.fds += frame.1.len();
        let (bytes, share) = (load.bytes <= most.bytes, load.open() <= most.share);
        self.frames.entry((rank, label)).or_default().push_back(frame);
        bytes && (share || self.waiting.values().map(Load::open).sum::<usize>() <= most.fds)
    }

    fn take(&mut self, rank: u32, label: u32) -> Option<Frame> {
        let queue = self.frames.get_mut(&(rank, label))?;
        let frame = queue.pop_front();
        if queue.is_empty() {
            self.frames.remove(&(rank, label));
        }
        self.unload(rank, frame.as_slice());
        frame
    }

    /// Drops those of a label's frames that are not to be kept; a thread closes their descriptors.
    fn retain(&mut self, rank: u32, label: u32, keep: impl Fn(&Frame) -> bool) {
        if let Some(queue) = self.frames.remove(&(rank, label)) {
            let (kept, dropped): (Vec<_>, Vec<_>) = queue.into_iter().partition(keep);
            self.unload(rank, &dropped);
            let fds: Vec<OwnedFd> = dropped.into_iter().flat_map(|(_, fds)| fds).collect();
            if !fds.is_empty() {
                let closing = self.waiting.entry(rank).or_default().closing.clone();
                closing.fetch_add(fds.len(), Ordering::Relaxed);
                let count = Counted(closing, fds.len());
                // In that order: they are closed before they are counted out.
                drop_elsewhere((fds, count));
            }
            if !kept.is_empty() {
                self.frames.insert((rank, label), kept.into());
            }
        }
    }

    fn unload(&mut self, rank: u32, frames: &[Frame]) {
        let load = self.waiting.entry(rank).or_default();
        for (bytes, fds) in frames {
            load.bytes -= bytes.len() + FRAME;
            load.fds -= fds.len();
        }
    }
}

#[derive(Default)]
struct Inbox {
    state: Mutex<State>,
    arrived: Condvar,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A socket to another rank.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(s) => s.as_fd(),
            Stream::Tcp(s) => s.as_fd(),
        }
    }
}

/// What set-up makes for each other rank.
struct Link {
    stream: Stream,
    /// The rank's process, where it could be handed over.
    process: Option<Process>,
}

impl From<UnixStream> for Link {
    fn from(stream: UnixStream) -> Self {
        Link { stream: Stream::Unix(stream), process: None }
    }
}

impl From<TcpStream> for Link {
    fn from(stream: TcpStream) -> Self {
        Link { stream: Stream::Tcp(stream), process: None }
    }
}

/// Another rank.
struct Peer {
    link: Link,
    out: Mutex<Out>,
    /// Something of `out` has left, or it is closed.
    room: Condvar,
}

#[derive(Default)]
struct Out {
    frames: Outgoing,
    /// Nothing more leaves.
    closed: bool,
}

impl Peer {
    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Sends what the socket takes now. True if something is left, for the reader's thread.
    fn flush(&self, out: &mut Out) -> std::io::Result<bool> {
        let sent = out.frames.flush(&self.link.stream);
        if sent.is_err() {
            *out = Out { closed: true, ..Out::default() };
        }
        self.room.notify_all();
        sent.map(|all| !all)
    }

    /// Nothing more is sent, and nobody waits to.
    fn close(&self) {
        *self.out() = Out { closed: true, ..Out::default() };
        self.room.notify_all();
    }
}

/// This rank's sockets to all others.
pub(crate) struct Mesh {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
    timeout: Duration,
    beats: Beats,
    /// Attempts to make a queue pair so far.
    attempts: AtomicU64,
}

/// What the reader's thread uses as well.
struct Shared {
    peers: Vec<Option<Peer>>,
    inbox: Inbox,
    /// Rings for what others want of the reader's thread.
    bell: EventFd,
    stop: AtomicBool,
    /// Ends of ours that peers are to be told of.
    tell: Mutex<Vec<Ended>>,
}

impl Shared {
    /// Tells peers of the ends that are to be told of. Under the lock, so that a farewell which follows comes
    /// behind all of them, whichever thread tells; no peer is waited for.
    fn tell_ends(&self) {
        let mut tell = self.tell.lock().unwrap_or_else(|e| e.into_inner());
        tell.drain(..).for_each(|ended| self.tell_end(ended));
    }

    fn peer(&self, rank: u32) -> &Peer {
        self.peers[rank as usize].as_ref().expect("not to itself")
    }

    /// Tells a peer, without waiting, that our end is gone. One that does not hear it is gone
    /// already or ends at its limit.
    fn tell_end(&self, ended: Ended) {
        let peer = self.peer(ended.rank);
        let mut out = peer.out();
        if !out.closed && out.frames.push(&set_up::end(&ended), Vec::new()).is_ok() {
            let _ = peer.flush(&mut out);
            self.bell.ring();
        }
    }
}

impl Mesh {
    /// All ranks of one process.
    pub(crate) fn local(size: u32, timeout: Duration) -> Result<Vec<Mesh>> {
        let all = unix::pairs(size)?.into_iter().enumerate();
        all.map(|(rank, links)| Mesh::new(rank as u32, links, timeout)).collect()
    }

    /// The process of a rank of this host, if it has a number here.
    pub(crate) fn pid(&self, rank: u32) -> Option<u32> {
        match &self.shared.peers[rank as usize].as_ref()?.link.stream {
            // 0: of another PID namespace.
            Stream::Unix(s) => {
                pushgate_proxy::wire::peer_cred(s).ok().map(|c| c.pid as u32).filter(|pid| *pid != 0)
            }
            Stream::Tcp(_) => None,
        }
    }

    /// A rank in a process of its own, all on this host.
    pub(crate) fn connect(job: &str, rank: u32, size: u32, timeout: Duration) -> Result<Mesh> {
        Mesh::new(rank, unix::connect(job, rank, size, timeout)?, timeout)
    }

    /// A rank on any host. All meet at `rendezvous`, where rank 0 listens; `host`
    /// is the address at which this rank listens to higher ones, or "auto".
    pub(crate) fn connect_tcp(
        job: &str,
        rank: u32,
        size: u32,
        rendezvous: &str,
        host: &str,
        timeout: Duration,
    ) -> Result<Mesh> {
        let me = tcp::Me::new(job, rank, size, timeout)?;
        let streams = match rank {
            0 => me.gather(&tcp::listen_at(rendezvous)?)?,
            _ => me.join(rendezvous, host)?,
        };
        Mesh::new(rank, streams, timeout)
    }

    fn new(rank: u32, links: Vec<Option<impl Into<Link>>>, timeout: Duration) -> Result<Mesh> {
        let peer = |link| Peer { link, out: Mutex::default(), room: Condvar::new() };
        let peers: Vec<_> = links.into_iter().map(|link| Some(peer(link?.into()))).collect();
        Ok(Mesh {
            rank,
            size: peers.len() as u32,
            shared: Arc::new(Shared {
                peers,
                inbox: Inbox::default(),
                bell: EventFd::new().map_err(Error::io("eventfd"))?,
                stop: AtomicBool::new(false),
                tell: Mutex::default(),
            }),
            reader: None,
            timeout,
            beats: BEATS,
            attempts: AtomicU64::new(0),
        })
    }

    /// Starts to listen. `events` are called from the reader's thread; `lost` once for
    /// each rank that ends without a farewell.
    pub(crate) fn listen(&mut self, events: Events) -> Result<()> {
        let (shared, beats) = (self.shared.clone(), self.beats);
        let reader = std::thread::Builder::new()
            .name("pushgate-mesh".into())
            .spawn(move || reader::run(&shared, beats, &events))
            .map_err(Error::io("starting the mesh's thread"))?;
        self.reader = Some(reader);
        Ok(())
    }

    /// Sends `bytes` and descriptors to a rank, under a label (1, or [`QUEUE_PAIRS`] and up).
    /// Descriptors go to ranks of this host only.
    ///
    /// The frame is taken as a whole, and leaves as the peer takes it, or not at all. So
    /// after *timed out*, which means that the peer has not taken what was sent before, it
    /// may be sent again.
    pub(crate) fn send(&self, to: u32, label: u32, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let peer = self.shared.peer(to);
        if !fds.is_empty() && matches!(peer.link.stream, Stream::Tcp(_)) {
            let reason = "descriptors can't cross hosts: qp=local needs ranks of one host, use qp=verbs";
            return Err(Error::Mismatch { rank: to, reason: reason.into() });
        }
        if bytes.len() + 4 > MAX_BYTES || fds.len() > MAX_FDS {
            let value = format!("{} bytes and {} descriptors", bytes.len(), fds.len());
            let allowed = format!("at most {} bytes and {MAX_FDS} descriptors", MAX_BYTES - 4);
            return Err(Error::config("a message between ranks", value, allowed));
        }
        let mut frame = label.to_le_bytes().to_vec();
        frame.extend_from_slice(bytes);
        let owned = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<_>>();
        let owned = owned.map_err(Error::io("a descriptor for another rank"))?;
        let deadline = Instant::now() + self.timeout;
        let mut out = peer.out();
        let full = |out: &Outgoing| out.len() + frame.len() > MAX_OUT || out.fds() + fds.len() > MAX_OUT_FDS;
        while !out.closed && !out.frames.is_empty() && full(&out.frames) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = format!("sending to rank {to}, which takes nothing");
                return Err(Error::TimedOut { what, after: self.timeout });
            }
            out = peer.room.wait_timeout(out, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        if out.closed {
            return Err(Error::PeerLost { rank: to });
        }
        let failed = Error::io(format!("sending to rank {to}"));
        match out.frames.push(&frame, owned).and_then(|()| peer.flush(&mut out)) {
            Ok(left) => {
                if left {
                    self.shared.bell.ring();
                }
                Ok(())
            }
            Err(e) => Err(match Errno::from_io_error(&e) {
                // What TCP says of a host that is gone counts too.
                Some(
                    Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH,
                ) => Error::PeerLost { rank: to },
                _ => failed(e),
            }),
        }
    }

    /// The next message from a rank under a label. Ends with an error when that
    /// rank is gone, any rank is lost, or time is up.
    pub(crate) fn recv(&self, from: u32, label: u32) -> Result<Frame> {
        self.recv_until(from, label, Instant::now() + self.timeout)
    }

    fn recv_until(&self, from: u32, label: u32, deadline: Instant) -> Result<Frame> {
        let mut state = self.shared.inbox.state();
        let mut left_in_order = None;
        loop {
            if let Some(frame) = state.take(from, label) {
                return Ok(frame);
            }
            if let Some(rank) = state.lost {
                return Err(Error::PeerLost { rank });
            }
            let now = Instant::now();
            let mut left = deadline.saturating_duration_since(now);
            if state.ends.contains_key(&from) {
                // It may have left because another rank died, whose end is not here yet.
                let until = *left_in_order.get_or_insert(now + GRACE);
                if now >= until {
                    return Err(Error::PeerLost { rank: from });
                }
                left = left.min(until - now);
            }
            if left.is_zero() {
                return Err(Error::TimedOut {
                    what: format!("a message from rank {from}"),
                    after: self.timeout,
                });
            }
            let arrived = &self.shared.inbox.arrived;
            state = arrived.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// The kind of address by which the hosts reach each other, if they do so at all.
    pub(crate) fn family(&self) -> Option<Family> {
        match &self.shared.peers.iter().flatten().next()?.link.stream {
            Stream::Unix(_) => None,
            Stream::Tcp(s) => Some(match s.peer_addr().ok()?.ip().to_canonical() {
                IpAddr::V4(_) => Family::V4,
                IpAddr::V6(_) => Family::V6,
            }),
        }
    }

    /// The first rank that was lost.
    pub(crate) fn lost(&self) -> Option<u32> {
        self.shared.inbox.state().lost
    }

    /// Says goodbye to all who still listen, and waits until that has left.
    fn leave(&self) {
        // A peer hears nothing behind the farewell.
        self.shared.tell_ends();
        for peer in self.shared.peers.iter().flatten() {
            let mut out = peer.out();
            // A peer that does not hear it is gone already.
            if !out.closed && out.frames.push(&BYE.to_le_bytes(), Vec::new()).is_ok() {
                let _ = peer.flush(&mut out);
            }
        }
        if self.reader.is_none() {
            return;
        }
        self.shared.bell.ring();
        let deadline = Instant::now() + self.timeout;
        for peer in self.shared.peers.iter().flatten() {
            let mut out = peer.out();
            while !out.closed && !out.frames.is_empty() {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                out = peer.room.wait_timeout(out, left).unwrap_or_else(|e| e.into_inner()).0;
            }
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // A rank that unwinds is lost, not gone in order.
        let unwinds = std::thread::panicking();
        if !unwinds {
            self.leave();
        }
        // Release, to the reader's Acquire: no more than the flag itself is told by it.
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        for peer in self.shared.peers.iter().flatten() {
            // Whatever process still holds this end of the socket, it has ended.
            match &peer.link.stream {
                Stream::Tcp(s) => tcp::close(s),
                Stream::Unix(s) => drop(s.shutdown(Shutdown::Write)),
            }
        }
    }
}

/// Waits for any of `fds`. False when time is up.
fn wait(fds: &mut [PollFd<'_>], until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    // An interrupted wait is one that has to look again.
    !left.is_zero() && poll(fds, Some(&timespec(left))) != Ok(0)
}

fn timespec(d: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() }
}
