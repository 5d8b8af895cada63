//! The mesh: a socket between every two ranks, beside the data path. Ranks find each other through
//! it, send set-up messages over it, and learn from a socket's end that another rank died. On one
//! host the sockets are Unix sockets, which also carry descriptors (`unix`); between hosts they are
//! TCP (`tcp`). Ranks that met over TCP and find that they share a host go on over a Unix socket (`tcp/reach.rs`).
//!
//! One thread (`reader`) serves all of a rank's sockets and never waits for one of them. So a
//! rank's end is noticed at once, even while no thread waits for a message, and whatever another
//! rank does. Two bounded queues hold what is in between: bytes that a peer has not taken yet, and
//! frames that no caller has asked for yet.
//!
//! A socket does not end while a forked child of a dead rank holds it. So on one host each rank
//! hands a pidfd of itself to its peers, and between hosts each rank says now and then that it
//! lives ([`Beats`]).
//!
//! Connections between hosts go through the [`door`]: both ends prove that they know the job's secret before they say anything else.
//!
//! Between hosts a connection that breaks is replaced, so that a path may be gone for a while: see `tcp/again.rs`. No frame is
//! lost then, and none comes twice.

mod inbox;
mod meeting;
mod out;
mod reader;
mod route;
mod set_up;
mod tcp;
#[cfg(test)]
mod tests;
mod unix;

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use inbox::{Inbox, Leaving, Most, State};
use pushgate_core::session::Status;
use pushgate_door::addresses::Family;
use pushgate_door::{self as door, Terms};
use pushgate_driver_shim::closing::PeerStream;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fdpass::{Carrier, Frame};
use pushgate_driver_shim::interrupt::{self, interrupt_by};
use pushgate_driver_shim::limited;
use pushgate_driver_shim::process::Process;
use pushgate_engine::connect::{self, Incarnation};
use pushgate_service::folder::Folder;
use rustix::io::Errno;
use rustix::net::connect_unspec;

use crate::error::{Error, Result};
use crate::settings::Transport;
#[cfg(test)]
pub(crate) use meeting::meet;
pub(crate) use meeting::{BothReady, Call, End, HandedOver, Meetings};
use out::Out;
pub(crate) use route::TellEngine;
pub(crate) use set_up::{Channel, SetUp, TellEnd};
pub(crate) use tcp::{Fabric, May};

/// Label of a farewell: this rank leaves in order.
const BYE: u32 = 0;
/// Label of a sign of life, with the number of frames that its sender has received. It is no frame of that number.
const BEAT: u32 = 2;
/// Label of a report that another rank is lost, with that rank's number.
const LOST: u32 = 4;
/// The first label of a queue pair. The frames under it are those of `pushgate_engine::connect`.
pub(crate) const QUEUE_PAIRS: u32 = 16;

/// The most bytes of a frame, its label included. Set-up messages are far smaller.
const MAX_BYTES: usize = 1 << 24;
const MAX_FDS: usize = 16;
/// The most bytes that may wait until a peer takes them.
const MAX_OUT: usize = 2 * MAX_BYTES;
/// The most descriptors that may wait until a peer takes them.
const MAX_OUT_FDS: usize = 4 * MAX_FDS;
/// The most bytes of one peer's frames that may wait until a caller asks for them. A collective has
/// at most two frames of a rank here, and a queue pair a few hundred bytes.
const MAX_WAITING: usize = 4 * MAX_BYTES;
/// The most descriptors of all peers' frames that may wait until a caller asks for them; half of
/// the limit of open files if that is less.
const MAX_WAITING_FDS: usize = 1 << 14;
/// Memory that a frame takes besides its bytes.
const FRAME: usize = 128;

/// How long after a rank's farewell the cause of its leaving may still arrive.
const GRACE: Duration = Duration::from_millis(250);

/// Callbacks, called by the reader's thread. Neither may wait for a peer.
pub(crate) struct Events {
    /// Called when a rank is lost, with the rank that was lost first: the lost rank may have left because
    /// of that one.
    pub(crate) lost: Box<dyn Fn(u32) + Send>,
    /// Called when a rank's end of a queue pair is gone.
    pub(crate) ended: Box<dyn Fn(Ended) + Send>,
}

/// A report that a rank's end of a queue pair, or its call that was to make one, is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// The rank whose end is gone.
    pub(crate) rank: u32,
    /// The queue pair's label.
    pub(crate) label: u32,
    /// Which of the rank's calls for this queue pair.
    pub(crate) incarnation: Incarnation,
    /// Why the end is gone.
    pub(crate) status: Status,
}

/// How ranks of different hosts show each other that they live.
#[derive(Clone, Copy)]
struct Beats {
    /// How often a rank says that it lives.
    every: Duration,
    /// A rank whose connection stands and that says nothing for this long is lost: its process is stopped, or has ended
    /// while a forked child holds the connection.
    silence: Duration,
}

const BEAT_EVERY: Duration = Duration::from_secs(2);
/// Ranks say nothing for less than this, whatever `timeout` is.
const LEAST_SILENCE: Duration = Duration::from_secs(10);

/// A socket to another rank.
enum Stream {
    Unix(PeerStream),
    Tcp(door::Stream),
}

impl Stream {
    /// What to wait for; [`Carrier`] sends and receives.
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(s) => s.as_fd(),
            Stream::Tcp(s) => s.as_fd(),
        }
    }

    /// Whether bytes that were sent wait for the socket.
    fn wants_write(&self) -> bool {
        matches!(self, Stream::Tcp(s) if s.wants_write())
    }

    /// Whether bytes wait that the socket does not report.
    fn has_bytes(&self) -> bool {
        matches!(self, Stream::Tcp(s) if s.has_bytes())
    }

    /// Sends what waits for the socket. True when nothing is left.
    fn flush(&self) -> io::Result<bool> {
        match self {
            Stream::Unix(_) => Ok(true),
            Stream::Tcp(s) => s.flush(),
        }
    }

    /// Shuts both directions down.
    fn shutdown(&self) {
        match self {
            Stream::Unix(s) => drop(s.shutdown(Shutdown::Both)),
            Stream::Tcp(s) => s.shutdown(),
        }
    }
}

/// What a call on a connection that may be encrypted has found; `None` if it would have to wait.
fn unless_it_waits(n: io::Result<usize>) -> io::Result<Option<usize>> {
    match n {
        Ok(n) => Ok(Some(n)),
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(None),
        // Bytes that were changed on their way end the connection, as a reset would. They are no word of the rank's.
        Err(e) if e.kind() == ErrorKind::InvalidData => Err(io::Error::new(ErrorKind::ConnectionAborted, e)),
        Err(e) => Err(e),
    }
}

impl Carrier for Stream {
    fn send_some(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Option<usize>> {
        match self {
            Stream::Unix(s) => s.send_some(bytes, fds),
            Stream::Tcp(s) => unless_it_waits(s.send(&[IoSlice::new(bytes)])),
        }
    }

    fn recv_some(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Option<(usize, bool)>> {
        match self {
            Stream::Unix(s) => s.recv_some(bytes, fds),
            Stream::Tcp(s) => {
                let n = unless_it_waits(s.recv(&mut [IoSliceMut::new(bytes)]))?;
                Ok(n.map(|n| (n, false)))
            }
        }
    }
}

/// What set-up makes for each other rank: the socket, and the process if known.
struct Link {
    stream: Stream,
    /// The rank's process, where the rank could hand over a pidfd.
    process: Option<Process>,
    /// What the two ranks agreed on for their queue pairs; `None` where the settings say it.
    transport: Option<Transport>,
}

impl From<PeerStream> for Link {
    fn from(stream: PeerStream) -> Self {
        Link { stream: Stream::Unix(stream), process: None, transport: None }
    }
}

impl From<UnixStream> for Link {
    fn from(stream: UnixStream) -> Self {
        PeerStream::from(stream).into()
    }
}

impl From<door::Stream> for Link {
    fn from(stream: door::Stream) -> Self {
        Link { stream: Stream::Tcp(stream), process: None, transport: None }
    }
}

/// This rank's side of the connection to another rank.
struct Peer {
    /// The rank is on this host.
    is_here: bool,
    /// The rank's process, where the rank could hand over a pidfd.
    process: Option<Arc<Process>>,
    /// What the two ranks agreed on for their queue pairs; `None` where the settings say it.
    transport: Option<Transport>,
    out: Mutex<Out>,
    /// Signalled when some of `out` has left, or when `out` is closed.
    room: Condvar,
}

impl Peer {
    /// `replaced`: a connection to another host that breaks is replaced.
    fn new(Link { stream, process, transport }: Link, replaced: bool) -> Self {
        let is_here = matches!(stream, Stream::Unix(_));
        let out = Mutex::new(Out::new(stream, replaced && !is_here));
        let process = process.map(Arc::new);
        Peer { is_here, process, transport, out, room: Condvar::new() }
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Sends what the socket takes now. True if something is left for the reader's thread to send.
    fn flush(&self, out: &mut Out) -> std::io::Result<bool> {
        let left = out.flush();
        self.room.notify_all();
        left
    }

    /// Stops sending to this peer and wakes every thread that waits to send.
    fn close(&self) {
        self.out().close();
        self.room.notify_all();
    }
}

/// This rank's sockets to all other ranks.
pub(crate) struct Mesh {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
    timeout: Duration,
    beats: Beats,
    /// What replaces connections to other hosts that break, until the reader's thread has it.
    again: Option<tcp::Again>,
    /// How many calls that make a queue pair this rank has begun.
    incarnations: AtomicU64,
}

/// State that the reader's thread uses too.
struct Shared {
    peers: Vec<Option<Peer>>,
    inbox: Inbox,
    /// Wakes the reader's thread when another thread wants something of it.
    bell: Arc<EventFd>,
    stop: AtomicBool,
    /// What peers are still to be told of queue pairs on this rank, their ends among it: ranks, labels, frames.
    tell: Mutex<Vec<(u32, u32, connect::Frame)>>,
    /// Held while peers are told what was in `tell`.
    telling: Mutex<()>,
}

impl Shared {
    /// Tells peers what is in `tell`, without waiting for any peer. Holds `telling` meanwhile, so that a farewell that
    /// follows is sent after all of it, whichever thread tells the peers. Does not hold `tell`, which engines take.
    fn tell_ends(&self) {
        let _telling = self.telling.lock().unwrap_or_else(|e| e.into_inner());
        let tell = std::mem::take(&mut *self.tell.lock().unwrap_or_else(|e| e.into_inner()));
        tell.into_iter().for_each(|(rank, label, frame)| self.tell(rank, label, &frame));
    }

    fn peer(&self, rank: u32) -> &Peer {
        self.peers[rank as usize].as_ref().expect("not to itself")
    }
}

/// Opens rank 0's listening sockets at a rendezvous.
pub(crate) fn listen_at(rendezvous: &str) -> Result<Vec<TcpListener>> {
    tcp::bind_at(rendezvous)
}

impl Mesh {
    /// Makes the meshes of all ranks of one process.
    pub(crate) fn local(size: u32, timeout: Duration) -> Result<Vec<Mesh>> {
        let all = unix::pairs(size)?.into_iter().enumerate();
        all.map(|(rank, links)| Mesh::new(rank as u32, links, timeout, None)).collect()
    }

    /// The process number of a rank of this host, if the rank has a number in this PID namespace.
    pub(crate) fn pid(&self, rank: u32) -> Option<u32> {
        match &*self.shared.peers[rank as usize].as_ref()?.out().stream {
            // 0 stands for a process of another PID namespace.
            Stream::Unix(s) => {
                pushgate_service::wire::peer_cred(s).ok().map(|c| c.pid as u32).filter(|pid| *pid != 0)
            }
            Stream::Tcp(_) => None,
        }
    }

    /// The process of a rank of this host: as the kernel numbers it here, else as the rank has handed it over.
    pub(crate) fn process(&self, rank: u32) -> Option<Arc<Process>> {
        let by_number = self.pid(rank).and_then(|pid| Process::of(pid).ok());
        by_number.or_else(|| self.shared.peers[rank as usize].as_ref()?.process.clone())
    }

    /// Joins as a rank in a process of its own; all ranks are on this host.
    pub(crate) fn connect(
        job: &str,
        rank: u32,
        size: u32,
        timeout: Duration,
        folder: Option<&Folder>,
    ) -> Result<Mesh> {
        Mesh::new(rank, unix::connect(job, rank, size, timeout, folder)?, timeout, None)
    }

    /// Joins as a rank on any host. All ranks meet at `rendezvous`, where rank 0 listens; `host` is
    /// the address at which this rank listens to other ranks, or "auto". A connection that breaks may be gone for `recover`;
    /// `None`: its rank is lost then. `terms`: what all ranks must agree on. `may`: what this rank's queue pairs may be.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn connect_tcp(
        job: &str,
        rank: u32,
        size: u32,
        rendezvous: &str,
        host: &str,
        timeout: Duration,
        recover: Option<Duration>,
        terms: Terms,
        may: &May,
    ) -> Result<Mesh> {
        let me = tcp::Me::new(job, rank, size, timeout, recover, terms)?;
        let joined = match rank {
            0 => me.gather(&me.listen_at(rendezvous)?)?,
            _ => me.join(rendezvous, host)?,
        };
        let (links, again) = me.agree(joined, may)?;
        Mesh::new(rank, links, timeout, again)
    }

    /// Joins as rank 0, at which all other ranks arrive by sockets that listen already, at `rendezvous`.
    pub(crate) fn listen_tcp(
        job: &str,
        size: u32,
        (listeners, rendezvous): (Vec<TcpListener>, &str),
        timeout: Duration,
        recover: Option<Duration>,
        terms: Terms,
        may: &May,
    ) -> Result<Mesh> {
        let me = tcp::Me::new(job, 0, size, timeout, recover, terms)?;
        let joined = me.gather(&me.listen_on(listeners, rendezvous)?)?;
        let (links, again) = me.agree(joined, may)?;
        Mesh::new(0, links, timeout, again)
    }

    fn new<L: Into<Link>>(
        rank: u32,
        links: Vec<Option<L>>,
        timeout: Duration,
        again: Option<tcp::Again>,
    ) -> Result<Mesh> {
        let peer = |link: Option<L>| Some(Peer::new(link?.into(), again.is_some()));
        let peers: Vec<_> = links.into_iter().map(peer).collect();
        Ok(Mesh {
            rank,
            size: peers.len() as u32,
            shared: Arc::new(Shared {
                peers,
                inbox: Inbox::default(),
                bell: Arc::new(EventFd::new().map_err(Error::io("eventfd"))?),
                stop: AtomicBool::new(false),
                tell: Mutex::default(),
                telling: Mutex::default(),
            }),
            reader: None,
            timeout,
            beats: Beats { every: BEAT_EVERY, silence: timeout.max(LEAST_SILENCE) },
            again,
            incarnations: AtomicU64::new(0),
        })
    }

    /// Starts the reader's thread. It calls `events`, and `lost` once for each rank that ends
    /// without a farewell.
    pub(crate) fn listen(&mut self, events: Events) -> Result<()> {
        let (shared, beats, again) = (self.shared.clone(), self.beats, self.again.take());
        let reader = std::thread::Builder::new()
            .name("pushgate-mesh".into())
            .spawn(move || {
                let stop = shared.clone();
                // Relaxed: the reader's loop looks at the flag again.
                interrupt_by(Some(Rc::new(move || stop.stop.load(Ordering::Relaxed))));
                reader::run(&shared, beats, again.as_ref(), &events);
            })
            .map_err(Error::io("starting the mesh's thread"))?;
        self.reader = Some(reader);
        Ok(())
    }

    /// Sends `bytes` and descriptors to a rank, under a label (1, or [`QUEUE_PAIRS`] and up). Only
    /// ranks of this host can be sent descriptors.
    ///
    /// The frame is either accepted as a whole, and then leaves as fast as the peer takes it, or
    /// not accepted at all. *Timed out* means that the peer has not taken what was sent before; the
    /// frame was not accepted and may be sent again.
    pub(crate) fn send(&self, to: u32, label: u32, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let peer = self.shared.peer(to);
        if !fds.is_empty() && !peer.is_here {
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
        while !out.closed && out.is_full(frame.len(), fds.len()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = format!("sending to rank {to}, which takes nothing");
                return Err(Error::TimedOut { what, after: self.timeout });
            }
            let waited = peer.room.wait_timeout(out, left.min(interrupt::LOOK));
            let (kept, waited) = waited.unwrap_or_else(|e| e.into_inner());
            out = kept;
            if waited.timed_out() {
                drop(out);
                interrupt::check()?;
                out = peer.out();
            }
        }
        if out.closed {
            drop(out);
            return Err(Error::PeerLost { rank: self.lost_before(to) });
        }
        let failed = Error::io(format!("sending to rank {to}"));
        let pushed = out.push(&frame, owned).and_then(|()| peer.flush(&mut out));
        drop(out);
        match pushed {
            Ok(left) => {
                if left {
                    self.shared.bell.ring();
                }
                Ok(())
            }
            Err(e) => Err(match Errno::from_io_error(&e) {
                // TCP reports a host that is gone as a send error, which counts as the loss of the
                // rank.
                Some(
                    Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH,
                ) => Error::PeerLost { rank: self.lost_before(to) },
                _ => failed(e),
            }),
        }
    }

    /// The rank that was lost first, where sending to `to` has failed: `to` may have left because another rank died, whose
    /// end has not been noticed here yet. Waits for that for a moment.
    #[cold]
    fn lost_before(&self, to: u32) -> u32 {
        let state = self.shared.inbox.state();
        let none = |state: &mut State| state.lost.is_none();
        let waited = self.shared.inbox.arrived.wait_timeout_while(state, GRACE, none);
        let (state, _) = waited.unwrap_or_else(|e| e.into_inner());
        state.lost.or_else(|| state.reported.get(&to).copied()).unwrap_or(to)
    }

    /// Returns the next message from a rank under a label. Fails when that rank is gone, when any
    /// rank is lost, or when time is up.
    pub(crate) fn recv(&self, from: u32, label: u32) -> Result<Frame> {
        let first = self.next_of(&[(from, label)], Instant::now() + self.timeout)?;
        let what = || format!("a message from rank {from}");
        first.map(|(_, frame)| frame).ok_or_else(|| Error::TimedOut { what: what(), after: self.timeout })
    }

    /// Returns the next message of any of these ranks and labels, with its place in `of`; `None` if none has come by
    /// `until`. Fails when one of these ranks is gone or when any rank is lost.
    fn next_of(&self, of: &[(u32, u32)], until: Instant) -> Result<Option<(usize, Frame)>> {
        let mut state = self.shared.inbox.state();
        let mut left_in_order = None;
        loop {
            let next =
                of.iter().enumerate().find_map(|(i, (from, label))| Some((i, state.take(*from, *label)?)));
            if next.is_some() {
                return Ok(next);
            }
            if let Some((rank, _)) = of.iter().find(|of| state.cut.remove(of)) {
                let what = format!("the descriptors of a queue pair with rank {rank}");
                return Err(Error::io(what)(Errno::MFILE.into()));
            }
            if let Some(rank) = state.lost {
                return Err(Error::PeerLost { rank });
            }
            let now = Instant::now();
            let mut left = until.saturating_duration_since(now);
            if let Some((from, _)) = of.iter().find(|(from, _)| state.ends.contains_key(from)) {
                // The rank may have left because another rank died whose end has not been noticed
                // here yet.
                let until = *left_in_order.get_or_insert(now + GRACE);
                if now >= until {
                    let rank = state.reported.get(from).copied().unwrap_or(*from);
                    return Err(Error::PeerLost { rank });
                }
                left = left.min(until - now);
            }
            if left.is_zero() {
                return Ok(None);
            }
            let arrived = &self.shared.inbox.arrived;
            let waited = arrived.wait_timeout(state, left.min(interrupt::LOOK));
            let (kept, waited) = waited.unwrap_or_else(|e| e.into_inner());
            state = kept;
            if waited.timed_out() {
                drop(state);
                interrupt::check()?;
                state = self.shared.inbox.state();
            }
        }
    }

    /// What queue pairs with a rank are, where the two ranks agreed on it; `None` where the settings say it.
    pub(crate) fn transport(&self, rank: u32) -> Option<Transport> {
        self.shared.peer(rank).transport
    }

    /// The address family by which this host and a rank's reach each other; `None` if the rank was met over a Unix socket.
    pub(crate) fn family(&self, rank: u32) -> Option<Family> {
        match &*self.shared.peer(rank).out().stream {
            Stream::Unix(_) => None,
            Stream::Tcp(s) => Some(match s.peer_addr().ok()?.ip().to_canonical() {
                IpAddr::V4(_) => Family::V4,
                IpAddr::V6(_) => Family::V6,
            }),
        }
    }

    /// The address of this host by which a rank reaches it, without a port; a loopback address if the rank was met over a Unix
    /// socket.
    pub(crate) fn address(&self, rank: u32) -> SocketAddr {
        let own = match &*self.shared.peer(rank).out().stream {
            Stream::Unix(_) => None,
            Stream::Tcp(s) => s.local_addr().ok(),
        };
        own.map_or((Ipv4Addr::LOCALHOST, 0).into(), tcp::portless)
    }

    /// The first rank that was lost, if any.
    pub(crate) fn lost(&self) -> Option<u32> {
        self.shared.inbox.state().lost
    }

    /// Cuts the connection to a rank of another host, as a fault would: both ends see a reset, and what was under way is lost.
    /// For tests of recovery.
    pub(crate) fn cut(&self, rank: u32) -> Result<()> {
        let out = self.shared.peer(rank).out();
        let Stream::Tcp(stream) = &*out.stream else {
            let allowed = "a rank of another host: the socket of two ranks of one host ends with one of them";
            return Err(Error::config("rank", rank, allowed));
        };
        connect_unspec(stream).map_err(|e| Error::io("cutting a connection")(e.into()))
    }

    /// Holds the bytes to and from a rank back for `time`. For tests of recovery.
    pub(crate) fn hold(&self, rank: u32, time: Duration) {
        self.shared.peer(rank).out().hold(Instant::now() + time);
        self.shared.bell.ring();
    }

    /// Says farewell to all peers that still listen, and waits until the farewells have left, or until the program wants its thread
    /// back.
    fn leave(&self) {
        // A peer ignores everything after the farewell, so report the ends first.
        self.shared.tell_ends();
        for peer in self.shared.peers.iter().flatten() {
            let mut out = peer.out();
            // A push that fails means that the peer is gone already.
            if !out.closed && out.push(&BYE.to_le_bytes(), Vec::new()).is_ok() {
                out.farewell = true;
                let _ = peer.flush(&mut out);
            }
        }
        if self.reader.is_none() {
            return;
        }
        self.shared.bell.ring();
        let deadline = Instant::now() + self.timeout;
        let mut untold = Vec::new();
        for (rank, peer) in self.shared.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            let mut out = peer.out();
            while !out.closed && !out.has_left() {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                if !untold.is_empty() {
                    untold.push(rank);
                    break;
                }
                let waited = peer.room.wait_timeout(out, left.min(interrupt::LOOK));
                let (kept, waited) = waited.unwrap_or_else(|e| e.into_inner());
                out = kept;
                if waited.timed_out() {
                    drop(out);
                    if interrupt::check().is_err() {
                        untold.push(rank);
                        break;
                    }
                    out = peer.out();
                }
            }
        }
        if !untold.is_empty() {
            let what = format!(
                "the communicator of rank {} was closed at once: ranks {untold:?} have not taken all that was sent to them, and                  count this rank as lost",
                self.rank
            );
            limited!(warn, self.rank, "interrupted by the program: {what}");
            interrupt::leaves_undone(&what);
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // A rank that unwinds from a panic must count as lost, so it says no farewell.
        let unwinds = std::thread::panicking();
        if !unwinds {
            self.leave();
        }
        // Release, paired with the Acquire of the reader's thread. The flag alone is told; no other
        // memory depends on it.
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        for peer in self.shared.peers.iter().flatten() {
            // Shut the socket down, so that the connection ends even if another process still holds
            // this end.
            match &*peer.out().stream {
                Stream::Tcp(s) => s.close(),
                Stream::Unix(s) => drop(s.shutdown(Shutdown::Write)),
            }
        }
    }
}

fn timespec(d: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() }
}
