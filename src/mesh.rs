//! How the ranks of one host find and hear each other outside of the data path:
//! a Unix socket between every two of them. Set-up messages and descriptors go
//! over it, and its end is how a rank learns that another one died.
//!
//! One thread reads all of a rank's sockets, so that an end is seen at once
//! even while nobody waits for a message.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fdpass::{recv_message, send_message};
use rustix::event::{PollFd, PollFlags, poll};

use crate::error::{Error, Result};

/// Version of the messages of this module and of `comm`.
const VERSION: u32 = 1;
/// "This rank leaves in order."
const BYE: u32 = 0;
/// Bytes of a message; what ranks exchange at set-up is small.
const MAX_BYTES: usize = 1 << 24;
const MAX_FDS: usize = 16;

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

/// This rank's sockets to all others.
pub(crate) struct Mesh {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    peers: Vec<Option<Arc<UnixStream>>>,
    sending: Mutex<()>,
    inbox: Arc<Inbox>,
    stop: Arc<EventFd>,
    reader: Option<JoinHandle<()>>,
    timeout: Duration,
}

impl Mesh {
    /// All ranks of one process: sockets in pairs.
    pub(crate) fn local(size: u32, timeout: Duration) -> Result<Vec<Mesh>> {
        let mut streams: Vec<Vec<Option<UnixStream>>> =
            (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
        for (a, b) in (0..size as usize).flat_map(|a| (a + 1..size as usize).map(move |b| (a, b))) {
            let (x, y) = UnixStream::pair().map_err(Error::io("socket pair between ranks"))?;
            (streams[a][b], streams[b][a]) = (Some(x), Some(y));
        }
        streams.into_iter().enumerate().map(|(rank, s)| Mesh::new(rank as u32, s, timeout)).collect()
    }

    /// A rank in a process of its own: each listens under an abstract name made
    /// of `job` and its rank, and connects to all lower ranks. Nothing is left
    /// behind whatever happens.
    pub(crate) fn connect(job: &str, rank: u32, size: u32, timeout: Duration) -> Result<Mesh> {
        let deadline = Instant::now() + timeout;
        let address = |rank: u32| {
            SocketAddr::from_abstract_name(format!("pushgate/{job}/{rank}"))
                .map_err(|_| Error::config("job", job, "a name of at most 80 bytes"))
        };
        let listener = UnixListener::bind_addr(&address(rank)?)
            .map_err(Error::io(format!("listening as rank {rank} of job {job}; is it running twice?")))?;
        listener.set_nonblocking(true).map_err(Error::io("rendezvous socket"))?;
        let hello = |to: u32| {
            let mut bytes = Vec::with_capacity(20);
            for v in [VERSION, rank, to, size, std::process::id()] {
                bytes.extend(v.to_le_bytes());
            }
            bytes
        };
        let mut streams: Vec<Option<UnixStream>> = (0..size).map(|_| None).collect();
        for lower in 0..rank {
            let stream = loop {
                match UnixStream::connect_addr(&address(lower)?) {
                    Ok(s) => break s,
                    Err(_) if Instant::now() >= deadline => {
                        return Err(Error::TimedOut {
                            what: format!("waiting for rank {lower}"),
                            after: timeout,
                        });
                    }
                    // It has not begun to listen, or its backlog is full.
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            check_owner(&stream, lower)?;
            send_message(&stream, &hello(lower), &[]).map_err(Error::io(format!("greeting rank {lower}")))?;
            streams[lower as usize] = Some(stream);
        }
        while streams[rank as usize + 1..].iter().any(Option::is_none) {
            let stream = loop {
                match listener.accept() {
                    Ok((s, _)) => break s,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        if Instant::now() >= deadline {
                            let missing: Vec<_> = (rank + 1..size)
                                .filter(|r| streams[*r as usize].is_none())
                                .map(|r| r.to_string())
                                .collect();
                            let what = format!("waiting for rank {}", missing.join(", "));
                            return Err(Error::TimedOut { what, after: timeout });
                        }
                        let mut fds = [PollFd::new(&listener, PollFlags::IN)];
                        let _ = poll(&mut fds, Some(&timespec(Duration::from_millis(50))));
                    }
                    Err(e) => return Err(Error::io("accepting a rank")(e)),
                }
            };
            // The name is public: whoever is not ours is shown the door unheard.
            if let Err(e) = check_owner(&stream, rank) {
                tracing::warn!(rank, "a stranger at the rendezvous: {e}");
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            stream.set_read_timeout(Some(left)).map_err(Error::io("rendezvous socket"))?;
            let (bytes, _) = recv_message(&stream, 64, 0).map_err(Error::io("greeting of a rank"))?;
            let words: Vec<u32> = bytes
                .chunks_exact(4)
                .map(|c| u32::from_le_bytes(c.try_into().expect("four bytes")))
                .collect();
            let [version, from, to, theirs, _] = words[..] else {
                return Err(Error::Mismatch { rank, reason: "a greeting of the wrong length".into() });
            };
            if (version, to, theirs) != (VERSION, rank, size) || from <= rank || from >= size {
                return Err(Error::Mismatch {
                    rank: from,
                    reason: format!(
                        "it speaks version {version} to rank {to} of {theirs}, but this is version {VERSION}, rank \
                         {rank} of {size}"
                    ),
                });
            }
            // A rank that was started anew takes the place of its former self.
            streams[from as usize] = Some(stream);
        }
        Mesh::new(rank, streams, timeout)
    }

    fn new(rank: u32, streams: Vec<Option<UnixStream>>, timeout: Duration) -> Result<Mesh> {
        let mut peers = Vec::with_capacity(streams.len());
        for stream in streams {
            if let Some(s) = &stream {
                // Within a frame a peer is quick, or something is wrong with it.
                let limit = Some(timeout);
                s.set_read_timeout(limit)
                    .and_then(|()| s.set_write_timeout(limit))
                    .map_err(Error::io("socket"))?;
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
    pub(crate) fn send(&self, to: u32, label: u32, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let stream = self.peers[to as usize].as_ref().expect("not to itself");
        let mut frame = label.to_le_bytes().to_vec();
        frame.extend_from_slice(bytes);
        let _one = self.sending.lock().unwrap_or_else(|e| e.into_inner());
        send_message(stream, &frame, fds).map_err(|e| match e.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Error::PeerLost { rank: to },
            _ => Error::io(format!("sending to rank {to}"))(e),
        })
    }

    /// The next message from a rank under a label. Ends with an error when that
    /// rank is gone, any rank is lost, or time is up.
    pub(crate) fn recv(&self, from: u32, label: u32) -> Result<Frame> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.inbox.state.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            if let Some(frame) = state.frames.get_mut(&(from, label)).and_then(VecDeque::pop_front) {
                return Ok(frame);
            }
            if let Some(rank) = state.lost.or(state.ends.contains_key(&from).then_some(from)) {
                return Err(Error::PeerLost { rank });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut {
                    what: format!("a message from rank {from}"),
                    after: self.timeout,
                });
            }
            state = self.inbox.arrived.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
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
            let _ = send_message(peer, &BYE.to_le_bytes(), &[]);
        }
        self.stop.ring();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn read(mut peers: Vec<(u32, Arc<UnixStream>)>, inbox: &Inbox, stop: &EventFd, on_lost: OnLost) {
    loop {
        let mut fds: Vec<_> =
            peers.iter().map(|(_, s)| PollFd::from_borrowed_fd(s.as_fd(), PollFlags::IN)).collect();
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
            let (rank, stream) = &peers[i];
            let rank = *rank;
            let frame = recv_message(stream, MAX_BYTES, MAX_FDS);
            let mut state = inbox.state.lock().unwrap_or_else(|e| e.into_inner());
            let end = match frame {
                Ok((bytes, fds)) if bytes.len() >= 4 => {
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
                Ok(_) => Some(End::Lost),
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

/// Only processes of our own user (or root) may be ranks of our job.
fn check_owner(stream: &UnixStream, rank: u32) -> Result<()> {
    let peer = pushgate_proxy::wire::peer_cred(stream).map_err(Error::io("peer's user"))?;
    let own = rustix::process::geteuid().as_raw();
    if peer.uid != own && peer.uid != 0 {
        let reason = format!("runs as user {}, this rank as {own}", peer.uid);
        return Err(Error::Mismatch { rank, reason });
    }
    Ok(())
}

fn timespec(d: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() }
}
