//! Where the links of one process meet their peers: a door, and threads that wait for the network beside the engine.
//!
//! An end says where it listens, the secret of its door, and a token that names the link there. The end with the lower rank
//! dials each stream; after the proof of the secret it says the token and the stream's number. A stream that names no link
//! which waits is closed.

use std::collections::HashMap;
use std::io::{self, ErrorKind, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_door::addresses::{Message, Reach, listen};
use pushgate_door::linger::Lingered;
use pushgate_door::{Counted, Door, Limits, PASSAGE, Purpose, Secret, Stream, Terms, pass};
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::{interrupt, limits};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use super::meeting::{Meeting, Place, hex};
use super::sockets::Readiness;
use super::uring::RingError;
use super::wire::Wire;
use super::wires::{Io, Wires};

/// Time for one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(1);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);
/// Time for all of a link's streams, for the end that dials, and for the other end where the link replaces another one.
///
/// The end that waits for the streams of a first link has no limit here: its peer may begin late, and its caller watches the
/// peer and the time.
const ALL: Duration = Duration::from_secs(10);
/// Streams that are on their way through the door at a time.
const PLACES: usize = 256;
/// Bytes of a stream's greeting: the link's token, and the stream's number.
const GREETING: usize = 18;
/// How long the peer may take to read the last words of a link.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long links that end may wait in vain for their peers, together, and then each of them.
pub(super) const LINGER: (Duration, Duration) = (Duration::from_secs(3), Duration::from_millis(20));
/// Links whose last words are waited for at a time.
const MOST_ENDING: usize = 4096;
/// Between two looks at streams that end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Why a process can't be met.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The listening sockets.
    #[error("{}", Message::Listening { at, why })]
    Listen {
        /// Where.
        at: String,
        /// What the system says.
        why: String,
    },
    /// A thread, what it waits for, or random numbers.
    #[error("a thread for links over TCP: {0}{remedy}", remedy = limits::added(limits::of_thread(.0)))]
    Thread(io::Error),
    /// The setting `tcp-io` asks for io_uring.
    #[error("`tcp-io` is io-uring: {0}")]
    Ring(#[from] RingError),
}

/// How the streams of links are set up.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// A path that is dead is found within this.
    pub path_timeout: Option<Duration>,
    /// What moves their bytes.
    pub io: Io,
    /// One thread drives the links.
    pub one_thread: bool,
    /// The streams are encrypted. Both ends must agree.
    pub tls: bool,
}

/// A stream that has said for which link it is.
type Arrived = (usize, Stream);

/// What all threads of a host share.
struct Shared {
    /// Links that wait for their streams, by token.
    waiting: Mutex<HashMap<[u8; 16], Sender<Arrived>>>,
    tuning: Tuning,
    stop: AtomicBool,
    /// Streams that end wait for their peers no more.
    hurry: AtomicBool,
    bell: EventFd,
    door: Door,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, HashMap<[u8; 16], Sender<Arrived>>> {
        // A panic leaves the map whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the links of this process meet their peers.
pub struct Host {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    /// The door's secret, for peers.
    key: String,
    accepting: Option<JoinHandle<()>>,
    /// To the thread that ends streams; `None` once nothing more comes.
    ending: Option<Sender<Vec<Stream>>>,
    closing: Option<JoinHandle<()>>,
    wires: Wires,
    lingered: Lingered,
}

impl Host {
    /// Listens at these addresses, on a port that is free; at least one. The door has a secret of its own, which peers are told with
    /// each link.
    pub fn open(addresses: &[SocketAddr], tuning: Tuning) -> Result<Arc<Host>, HostError> {
        // An encrypted stream is a plain socket's.
        let io = if tuning.tls { Io::Socket } else { tuning.io };
        let wires = Wires::choose(io, tuning.one_thread)?;
        let (secret, key) = Secret::random::<32>().map_err(HostError::Thread)?;
        let terms = Terms { secret, purpose: Purpose::LINK, tls: tuning.tls };
        let limits = Limits { places: PLACES, greeting: GREETING, time: PASSAGE };
        let failed = |why: &dyn std::fmt::Display| {
            let at: Vec<_> = addresses.iter().map(SocketAddr::ip).map(|ip| ip.to_string()).collect();
            HostError::Listen { at: at.join(", "), why: why.to_string() }
        };
        let listeners = listen(addresses).map_err(|e| failed(&e))?;
        let door = Door::on_all(listeners, terms, limits).map_err(|e| failed(&e))?;
        let addresses = door.local_addrs().map_err(HostError::Thread)?;
        let bell = EventFd::new().map_err(HostError::Thread)?;
        let stop = AtomicBool::new(false);
        let hurry = AtomicBool::new(false);
        let shared = Arc::new(Shared { waiting: Mutex::default(), tuning, stop, hurry, bell, door });
        // This one first: it ends when `ending` is dropped, as it is if the other one can't be started.
        let (ending, ends) = channel();
        let theirs = shared.clone();
        let closing = spawn("pushgate-close", move || close_all(&ends, &theirs.hurry))?;
        let theirs = shared.clone();
        let accepting = spawn("pushgate-accept", move || accept(&theirs))?;
        let (accepting, closing, ending) = (Some(accepting), Some(closing), Some(ending));
        let (key, lingered) = (hex(&key), Lingered::new(LINGER.0, LINGER.1));
        Ok(Arc::new(Host { shared, addresses, key, accepting, ending, closing, wires, lingered }))
    }

    /// How an end of a link meets its peer. `dials`: this end dials, and the peer waits. `readiness` is that of the engine that
    /// will drive the link.
    pub fn meeting(self: &Arc<Self>, dials: bool, readiness: &Arc<Readiness>) -> Box<dyn Meeting> {
        let (host, readiness) = (self.clone(), readiness.clone());
        Box::new(HostMeeting { host, readiness, dials, has_met: false, token: None, coming: None })
    }

    /// How many streams came through the door, and how many did not.
    pub fn counts(&self) -> Counted {
        self.shared.door.counts().read()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Relaxed: the bell's system calls order it.
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.bell.ring();
        // The last words are waited for: 2 s at most.
        self.ending = None;
        for thread in [self.accepting.take(), self.closing.take()].into_iter().flatten() {
            interrupt::join(thread, || {
                // Relaxed: the flag orders nothing.
                self.shared.hurry.store(true, Ordering::Relaxed);
                interrupt::leaves_undone("peers have not read the last words of links over TCP");
            });
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, HostError> {
    let log = tracing::dispatcher::get_default(Clone::clone);
    let scoped = move || tracing::dispatcher::with_default(&log, work);
    std::thread::Builder::new().name(name.into()).spawn(scoped).map_err(HostError::Thread)
}

/// Sets a stream of a link.
fn tune(stream: &Stream, tuning: Tuning) -> io::Result<()> {
    sockopt::set_tcp_nodelay(stream, true)?;
    if let Some(limit) = tuning.path_timeout {
        // What is sent and not acknowledged for so long ends the connection; beats see that something is sent.
        sockopt::set_tcp_user_timeout(stream, limit.as_millis().try_into().unwrap_or(u32::MAX))?;
    }
    Ok(())
}

/// Hands the streams that come through the door to their links.
fn accept(shared: &Shared) {
    while !shared.stop.load(Ordering::Relaxed) {
        let arrival = match shared.door.wait(None, Some(shared.bell.as_fd())) {
            Ok(Some(arrival)) => arrival,
            Ok(None) => continue,
            Err(e) => {
                tracing::warn!("waiting for streams of links: {e}");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let Some((token, number)) = arrival.greeting.split_first_chunk::<16>() else { continue };
        let Ok(number) = <[u8; 2]>::try_from(number) else { continue };
        let to = shared.waiting().get(token).cloned();
        match (to, tune(&arrival.stream, shared.tuning)) {
            // An end that has given up needs no stream.
            (Some(to), Ok(())) => _ = to.send((u16::from_le_bytes(number) as usize, arrival.stream)),
            (None, _) => tracing::debug!(from = %arrival.from, "a stream for no link that waits"),
            (_, Err(e)) => tracing::debug!(from = %arrival.from, "setting up a stream: {e}"),
        }
    }
}

/// A stream whose last words are on their way.
struct Last {
    stream: Stream,
    until: Instant,
    /// Nothing more is sent.
    closed: bool,
}

impl Last {
    /// Goes on. True once the stream is over.
    fn is_over(&mut self) -> bool {
        if !self.closed {
            match self.stream.flush() {
                Ok(true) => {
                    // After this the peer finds the end of the stream.
                    self.stream.close();
                    self.closed = true;
                }
                Ok(false) => {}
                Err(_) => return true,
            }
        }
        let mut scrap = [0; 16 << 10];
        loop {
            // Were bytes left unread, the kernel would send a reset, which may take the last words from the peer.
            match self.stream.recv(&mut [IoSliceMut::new(&mut scrap)]) {
                Ok(n) if n > 0 && Instant::now() < self.until => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Instant::now() >= self.until,
                _ => return true,
            }
        }
    }
}

/// Ends streams when their peers have read the last words, or at once when `hurry` is set.
fn close_all(ends: &Receiver<Vec<Stream>>, hurry: &AtomicBool) {
    let mut ending: Vec<Last> = Vec::new();
    loop {
        let next = match ending.is_empty() {
            true => ends.recv().map_err(|_| TryRecvError::Disconnected),
            false => ends.try_recv(),
        };
        match next {
            Ok(streams) => {
                let until = Instant::now() + LAST_WORDS;
                let room = MOST_ENDING.saturating_sub(ending.len());
                let streams = streams.into_iter().take(room);
                ending.extend(streams.map(|stream| Last { stream, until, closed: false }));
            }
            Err(TryRecvError::Disconnected) if ending.is_empty() => return,
            Err(_) => {
                let mut fds: Vec<_> = ending.iter().map(|l| PollFd::new(&l.stream, PollFlags::IN)).collect();
                let _ = poll(&mut fds, Some(&LOOK));
            }
        }
        ending.retain_mut(|last| !last.is_over() && !hurry.load(Ordering::Relaxed));
    }
}

/// How one end of a link meets its peer.
struct HostMeeting {
    host: Arc<Host>,
    readiness: Arc<Readiness>,
    dials: bool,
    /// An earlier link had its streams.
    has_met: bool,
    token: Option<[u8; 16]>,
    coming: Option<Coming>,
}

/// Streams on their way.
struct Coming {
    streams: Vec<Option<Stream>>,
    arrived: Receiver<Arrived>,
    failed: Receiver<String>,
    until: Option<Instant>,
    cancelled: Arc<AtomicBool>,
}

impl Drop for Coming {
    fn drop(&mut self) {
        // Relaxed: the flag orders no other memory.
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

impl Meeting for HostMeeting {
    fn offer(&mut self) -> Result<Place, String> {
        self.give_up();
        let (_, token) = Secret::random::<16>().map_err(|e| format!("random numbers: {e}"))?;
        let (to, arrived) = channel();
        self.host.shared.waiting().insert(token, to);
        self.token = Some(token);
        let (_, failed) = channel();
        self.coming =
            Some(Coming { streams: Vec::new(), arrived, failed, until: None, cancelled: Arc::default() });
        let host = &self.host;
        Ok(Place { addresses: host.addresses.clone(), token: hex(&token), key: host.key.clone() })
    }

    fn begin(&mut self, peer: &Place, streams: usize) -> Result<(), String> {
        let coming = self.coming.as_mut().ok_or("no place was offered")?;
        coming.streams = (0..streams).map(|_| None).collect();
        let until = Instant::now() + ALL;
        if !self.dials {
            coming.until = self.has_met.then_some(until);
            return Ok(());
        }
        let (to, arrived) = channel();
        let (tell, failed) = channel();
        (coming.arrived, coming.failed) = (arrived, failed);
        let mut dialing = Dialing::new(peer, self.host.shared.tuning, until, &coming.cancelled)?;
        let dial = move || {
            for number in 0..streams {
                match dialing.stream(number) {
                    // An end that has given up needs no stream.
                    Ok(stream) => _ = to.send((number, stream)),
                    Err(why) => {
                        let _ = tell.send(why);
                        return;
                    }
                }
            }
        };
        spawn("pushgate-dial", dial).map(drop).map_err(|e| e.to_string())
    }

    fn met(&mut self) -> Option<Result<Box<dyn Wire>, String>> {
        let coming = self.coming.as_mut()?;
        while let Ok((number, stream)) = coming.arrived.try_recv() {
            if let Some(place) = coming.streams.get_mut(number) {
                *place = Some(stream);
            }
        }
        if !coming.streams.is_empty() && coming.streams.iter().all(Option::is_some) {
            let streams = std::mem::take(&mut coming.streams).into_iter().flatten().collect();
            self.give_up();
            self.has_met = true;
            let ending = self.host.ending.clone();
            let finish = Box::new(move |streams| {
                // A host that is gone waits for nobody's last words.
                if let Some(ending) = &ending {
                    let _ = ending.send(streams);
                }
            });
            let wire = self.host.wires.wire(streams, finish, &self.readiness);
            return Some(wire.map_err(|e| format!("streams of a link: {e}")));
        }
        if let Ok(why) = coming.failed.try_recv() {
            self.give_up();
            return Some(Err(why));
        }
        if coming.until.is_some_and(|until| Instant::now() >= until) {
            let at: Vec<_> = self.host.addresses.iter().map(|a| a.to_string()).collect();
            let refused = match self.host.shared.door.counts().last_refused() {
                Some((from, why)) => format!(" (the last that was refused, {from}: {why})"),
                None => String::new(),
            };
            let at = at.join(", ");
            let why =
                format!("the peer did not connect to {at} within {ALL:?}{refused}; is the port reachable?");
            self.give_up();
            return Some(Err(why));
        }
        None
    }

    fn give_up(&mut self) {
        if let Some(token) = self.token.take() {
            self.host.shared.waiting().remove(&token);
        }
        self.coming = None;
    }

    fn lingered(&self) -> &Lingered {
        &self.host.lingered
    }
}

impl Drop for HostMeeting {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// How the streams of a link are dialled.
struct Dialing {
    addresses: Vec<SocketAddr>,
    token: [u8; 16],
    terms: Terms,
    tuning: Tuning,
    until: Instant,
    cancelled: Arc<AtomicBool>,
}

impl Dialing {
    fn new(
        peer: &Place,
        tuning: Tuning,
        until: Instant,
        cancelled: &Arc<AtomicBool>,
    ) -> Result<Dialing, String> {
        let (token, key) = peer.token_bytes().zip(peer.key_bytes()).ok_or("its place has no token or key")?;
        let secret = Secret::new(&key).map_err(|e| format!("its key {e}"))?;
        let terms = Terms { secret, purpose: Purpose::LINK, tls: tuning.tls };
        let (addresses, cancelled) = (peer.addresses.clone(), cancelled.clone());
        Ok(Dialing { addresses, token, terms, tuning, until, cancelled })
    }

    /// Dials one stream, until one stands or the time is over.
    fn stream(&mut self, number: usize) -> Result<Stream, String> {
        let mut greeting = self.token.to_vec();
        greeting.extend((number as u16).to_le_bytes());
        loop {
            let mut reach = Reach::new(&self.addresses);
            let attempt = Instant::now() + ATTEMPT;
            let last = loop {
                if self.cancelled.load(Ordering::Relaxed) {
                    return Err("given up".into());
                }
                match reach.advance() {
                    Ok(Some((at, socket))) => {
                        let passed = pass(socket, &self.terms, &greeting, Instant::now() + ATTEMPT);
                        let tuned = passed.map(|stream| tune(&stream, self.tuning).map(|()| stream));
                        match tuned {
                            Ok(Ok(stream)) => {
                                // The other streams need not seek the way again.
                                self.addresses = vec![at];
                                return Ok(stream);
                            }
                            Ok(Err(e)) => reach.leads_elsewhere(at, e.to_string()),
                            Err(e) => reach.leads_elsewhere(at, e.to_string()),
                        }
                    }
                    Ok(None) if Instant::now() < attempt => reach.wait(attempt.min(Instant::now() + PAUSE)),
                    Ok(None) => break reach.tried(),
                    Err(tried) => break tried,
                }
            };
            if Instant::now() >= self.until {
                let told = Message::Unreached { whom: "the peer", tried: &last, host: "the peer's host" };
                return Err(told.to_string());
            }
            std::thread::sleep(PAUSE);
        }
    }
}
