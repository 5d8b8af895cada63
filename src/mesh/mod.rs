//! How ranks find and hear each other outside of the data path: a socket
//! between every two of them. Set-up messages go over it, and its end is how a
//! rank learns that another one died. On one host it is a Unix socket, which
//! carries descriptors too (`unix`), between hosts TCP (`tcp`).
//!
//! One thread reads all of a rank's sockets, so that an end is seen at once
//! even while nobody waits for a message.

mod tcp;
mod unix;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fdpass::{recv_message, send_message};
use pushgate_proxy::qp::verbs::gid::Family;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// "This rank leaves in order."
const BYE: u32 = 0;
/// Bytes of a message; what ranks exchange at set-up is small.
const MAX_BYTES: usize = 1 << 24;
const MAX_FDS: usize = 16;

/// How long the cause of a rank's leaving may come after its farewell.
const GRACE: Duration = Duration::from_millis(250);

/// A message: its bytes and descriptors.
pub(crate) type Frame = (Vec<u8>, Vec<OwnedFd>);

/// Called by the reader when a rank is lost.
pub(crate) type OnLost = Box<dyn Fn(u32) + Send>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Bye,
    Lost,
}

#[derive(Default)]
struct State {
    frames: HashMap<(u32, u32), VecDeque<Frame>>,
    ends: HashMap<u32, End>,
    lost: Option<u32>,
}

#[derive(Default)]
struct Inbox {
    state: Mutex<State>,
    arrived: Condvar,
}

/// A socket to another rank.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn set_timeouts(&self, limit: Duration) -> io::Result<()> {
        match self {
            Stream::Unix(s) => {
                s.set_read_timeout(Some(limit)).and_then(|()| s.set_write_timeout(Some(limit)))
            }
            Stream::Tcp(s) => s.set_write_timeout(Some(limit)),
        }
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self {
            Stream::Unix(s) => send_message(s, bytes, fds),
            Stream::Tcp(s) => tcp::send_frame(s, bytes),
        }
    }

    /// A frame, or none if it is not complete yet.
    fn recv(&self, incoming: &mut tcp::Incoming) -> io::Result<Option<Frame>> {
        match self {
            Stream::Unix(s) => recv_message(s, MAX_BYTES, MAX_FDS).map(Some),
            Stream::Tcp(s) => Ok(tcp::recv_frame(s, incoming)?.map(|bytes| (bytes, Vec::new()))),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(s) => s.as_fd(),
            Stream::Tcp(s) => s.as_fd(),
        }
    }
}

/// This rank's sockets to all others.
pub(crate) struct Mesh {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    peers: Vec<Option<Arc<Stream>>>,
    sending: Mutex<()>,
    inbox: Arc<Inbox>,
    stop: Arc<EventFd>,
    reader: Option<JoinHandle<()>>,
    timeout: Duration,
}

impl Mesh {
    /// All ranks of one process.
    pub(crate) fn local(size: u32, timeout: Duration) -> Result<Vec<Mesh>> {
        let all = unix::pairs(size)?.into_iter().enumerate();
        all.map(|(rank, s)| Mesh::new(rank as u32, s, Stream::Unix, timeout)).collect()
    }

    /// The process of a rank of this host, if it has a number here.
    pub(crate) fn pid(&self, rank: u32) -> Option<u32> {
        match &**self.peers[rank as usize].as_ref()? {
            // 0: of another PID namespace.
            Stream::Unix(s) => {
                pushgate_proxy::wire::peer_cred(s).ok().map(|c| c.pid as u32).filter(|pid| *pid != 0)
            }
            Stream::Tcp(_) => None,
        }
    }

    /// A rank in a process of its own, all on this host.
    pub(crate) fn connect(job: &str, rank: u32, size: u32, timeout: Duration) -> Result<Mesh> {
        Mesh::new(rank, unix::connect(job, rank, size, timeout)?, Stream::Unix, timeout)
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
        Mesh::new(rank, streams, Stream::Tcp, timeout)
    }

    fn new<S>(
        rank: u32,
        streams: Vec<Option<S>>,
        kind: impl Fn(S) -> Stream,
        timeout: Duration,
    ) -> Result<Mesh> {
        let mut peers = Vec::with_capacity(streams.len());
        for stream in streams {
            let stream = stream.map(&kind);
            if let Some(s) = &stream {
                // Within a frame a peer is quick, or something is wrong with it.
                s.set_timeouts(timeout).map_err(Error::io("socket"))?;
            }
            peers.push(stream.map(Arc::new));
        }
        Ok(Mesh {
            rank,
            size: peers.len() as u32,
            peers,
            sending: Mutex::new(()),
            inbox: Arc::default(),
            stop: Arc::new(EventFd::new().map_err(Error::io("eventfd"))?),
            reader: None,
            timeout,
        })
    }

    /// Starts to listen. `on_lost` is called from the reader's thread, once for
    /// each rank that ends without a farewell.
    pub(crate) fn listen(&mut self, on_lost: OnLost) -> Result<()> {
        let peers: Vec<_> =
            self.peers.iter().enumerate().filter_map(|(r, s)| Some((r as u32, s.clone()?))).collect();
        let (inbox, stop) = (self.inbox.clone(), self.stop.clone());
        let reader = std::thread::Builder::new()
            .name("pushgate-mesh".into())
            .spawn(move || read(peers, &inbox, &stop, on_lost))
            .map_err(Error::io("starting the mesh's thread"))?;
        self.reader = Some(reader);
        Ok(())
    }

    /// Sends `bytes` and descriptors to a rank, under a label (not 0).
    /// Descriptors go to ranks of this host only.
    pub(crate) fn send(&self, to: u32, label: u32, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let stream = self.peers[to as usize].as_ref().expect("not to itself");
        if !fds.is_empty() && matches!(**stream, Stream::Tcp(_)) {
            let reason = "descriptors can't cross hosts: qp=local needs ranks of one host, use qp=verbs";
            return Err(Error::Mismatch { rank: to, reason: reason.into() });
        }
        let mut frame = label.to_le_bytes().to_vec();
        frame.extend_from_slice(bytes);
        let _one = self.sending.lock().unwrap_or_else(|e| e.into_inner());
        stream.send(&frame, fds).map_err(|e| match Errno::from_io_error(&e) {
            // What TCP says of a host that is gone counts too.
            Some(
                Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH,
            ) => Error::PeerLost { rank: to },
            _ => Error::io(format!("sending to rank {to}"))(e),
        })
    }

    /// The next message from a rank under a label. Ends with an error when that
    /// rank is gone, any rank is lost, or time is up.
    pub(crate) fn recv(&self, from: u32, label: u32) -> Result<Frame> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.inbox.state.lock().unwrap_or_else(|e| e.into_inner());
        let mut left_in_order = None;
        loop {
            if let Some(frame) = state.frames.get_mut(&(from, label)).and_then(VecDeque::pop_front) {
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
            state = self.inbox.arrived.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// The kind of address by which the hosts reach each other, if they do so at all.
    pub(crate) fn family(&self) -> Option<Family> {
        let stream = self.peers.iter().flatten().next()?;
        match &**stream {
            Stream::Unix(_) => None,
            Stream::Tcp(s) => Some(match s.peer_addr().ok()?.ip().to_canonical() {
                IpAddr::V4(_) => Family::V4,
                IpAddr::V6(_) => Family::V6,
            }),
        }
    }

    /// The first rank that was lost.
    pub(crate) fn lost(&self) -> Option<u32> {
        self.inbox.state.lock().unwrap_or_else(|e| e.into_inner()).lost
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // A rank that unwinds is lost, not gone in order.
        let peers = if std::thread::panicking() { &[] } else { &self.peers[..] };
        for peer in peers.iter().flatten() {
            // Whoever does not hear it is gone already.
            let _ = peer.send(&BYE.to_le_bytes(), &[]);
        }
        self.stop.ring();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        for peer in self.peers.iter().flatten() {
            if let Stream::Tcp(s) = &**peer {
                tcp::close(s);
            }
        }
    }
}

fn read(peers: Vec<(u32, Arc<Stream>)>, inbox: &Inbox, stop: &EventFd, on_lost: OnLost) {
    let mut peers: Vec<_> = peers.into_iter().map(|(r, s)| (r, s, tcp::Incoming::frame())).collect();
    loop {
        let mut fds: Vec<_> =
            peers.iter().map(|(_, s, _)| PollFd::from_borrowed_fd(s.as_fd(), PollFlags::IN)).collect();
        fds.push(PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN));
        if poll(&mut fds, None).is_err() {
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|f| !f.revents().is_empty()).collect();
        drop(fds);
        if *ready.last().expect("the last is `stop`") {
            return;
        }
        for i in (0..peers.len()).rev().filter(|i| ready[*i]) {
            let (rank, stream, incoming) = &mut peers[i];
            let rank = *rank;
            let frame = stream.recv(incoming);
            let mut state = inbox.state.lock().unwrap_or_else(|e| e.into_inner());
            let end = match frame {
                Ok(None) => None,
                Ok(Some((bytes, fds))) if bytes.len() >= 4 => {
                    let label = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
                    if label == BYE {
                        Some(End::Bye)
                    } else {
                        state.frames.entry((rank, label)).or_default().push_back((bytes[4..].to_vec(), fds));
                        None
                    }
                }
                Err(e) => {
                    tracing::warn!(rank, "a rank's socket: {e}");
                    Some(End::Lost)
                }
                // Something that no rank of ours would send.
                Ok(Some(_)) => {
                    tracing::warn!(rank, "a rank sent a frame without a label");
                    Some(End::Lost)
                }
            };
            if let Some(end) = end {
                state.ends.insert(rank, end);
                peers.remove(i);
                if end == End::Lost {
                    state.lost.get_or_insert(rank);
                    drop(state);
                    tracing::warn!(rank, "a rank is lost");
                    on_lost(rank);
                }
            }
            inbox.arrived.notify_all();
        }
    }
}

fn timespec(d: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() }
}
