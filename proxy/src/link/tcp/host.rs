//! Where the links of one process meet their peers: a listening socket, and threads that wait for the network beside the
//! engine.
//!
//! An end says where it listens, and a token that names the link there. The end with the lower rank dials each stream, and
//! says the token and the stream's number. A stream that names no link which waits is closed.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use super::meeting::{Meeting, Place};
use super::uring::RingError;
use super::wire::Wire;
use super::wires::{Io, Wires};

/// Time for one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(1);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);
/// Time for all of a link's streams.
const ALL: Duration = Duration::from_secs(10);
/// Time within which a stream must say which link it is for.
const GREETING: Duration = Duration::from_secs(5);
/// Streams that say so at a time.
const MOST_GREETINGS: usize = 256;
/// How long the peer may take to read the last words of a link.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Links whose last words are waited for at a time.
const MOST_ENDING: usize = 4096;

/// Why a process can't be met.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The listening socket.
    #[error("listening for links at {address}: {error}; set `host` to an address of this host")]
    Listen {
        /// Where.
        address: IpAddr,
        /// Why not.
        error: io::Error,
    },
    /// A thread or what it waits for.
    #[error("a thread for links over TCP: {0}")]
    Thread(io::Error),
    /// The setting `tcp-io` asks for io_uring.
    #[error("`tcp-io` is io-uring: {0}")]
    Ring(#[from] RingError),
}

/// How the sockets of links are set.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// A path that is dead is found within this.
    pub path_timeout: Option<Duration>,
    /// What moves their bytes.
    pub io: Io,
    /// One thread drives the links.
    pub one_thread: bool,
}

/// A stream that has said for which link it is.
type Arrived = (usize, TcpStream);

/// What all threads of a host share.
struct Shared {
    /// Links that wait for their streams, by token.
    waiting: Mutex<HashMap<String, Sender<Arrived>>>,
    greetings: AtomicUsize,
    tuning: Tuning,
    stop: AtomicBool,
    bell: EventFd,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, HashMap<String, Sender<Arrived>>> {
        // A panic leaves the map whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the links of this process meet their peers.
pub struct Host {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    accepting: Option<JoinHandle<()>>,
    /// To the thread that ends streams; `None` once nothing more comes.
    ending: Option<Sender<Vec<TcpStream>>>,
    closing: Option<JoinHandle<()>>,
    wires: Wires,
}

impl Host {
    /// Listens at `address`, on a port that is free.
    pub fn open(address: IpAddr, tuning: Tuning) -> Result<Arc<Host>, HostError> {
        let listen = |error| HostError::Listen { address, error };
        let wires = Wires::choose(tuning.io, tuning.one_thread)?;
        let listener = TcpListener::bind((address, 0)).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let addresses = vec![listener.local_addr().map_err(listen)?];
        let bell = EventFd::new().map_err(HostError::Thread)?;
        let shared = Arc::new(Shared {
            waiting: Mutex::default(),
            greetings: AtomicUsize::new(0),
            tuning,
            stop: AtomicBool::new(false),
            bell,
        });
        let theirs = shared.clone();
        let accepting = spawn("pushgate-accept", move || accept(&theirs, &listener))?;
        let (ending, ends) = channel();
        let closing = Some(spawn("pushgate-close", move || close_all(&ends))?);
        let (accepting, ending) = (Some(accepting), Some(ending));
        Ok(Arc::new(Host { shared, addresses, accepting, ending, closing, wires }))
    }

    /// How an end of a link meets its peer. `dials`: this end dials, and the peer waits.
    pub fn meeting(self: &Arc<Self>, dials: bool) -> Box<dyn Meeting> {
        Box::new(HostMeeting { host: self.clone(), dials, token: None, coming: None })
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
            let _ = thread.join();
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, HostError> {
    let log = tracing::dispatcher::get_default(Clone::clone);
    let scoped = move || tracing::dispatcher::with_default(&log, work);
    std::thread::Builder::new().name(name.into()).spawn(scoped).map_err(HostError::Thread)
}

/// Sets a stream of a link.
fn tune(stream: &TcpStream, tuning: Tuning) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    if let Some(limit) = tuning.path_timeout {
        // What is sent and not acknowledged for so long ends the connection; beats see that something is sent.
        sockopt::set_tcp_user_timeout(stream, limit.as_millis().try_into().unwrap_or(u32::MAX))?;
    }
    Ok(())
}

/// Takes streams in, and has a thread read what each of them is for.
fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    while !shared.stop.load(Ordering::Relaxed) {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.bell, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
            Err(e) => {
                tracing::debug!("taking in a stream: {e}");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        // Relaxed: a count for a limit; it orders no other memory.
        if shared.greetings.fetch_add(1, Ordering::Relaxed) >= MOST_GREETINGS {
            shared.greetings.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let theirs = shared.clone();
        let hear = move || {
            if let Err(e) = hear(&theirs, stream) {
                tracing::debug!(%from, "refused a stream: {e}");
            }
            theirs.greetings.fetch_sub(1, Ordering::Relaxed);
        };
        if spawn("pushgate-greet", hear).is_err() {
            shared.greetings.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Reads for which link a stream is, and hands it over.
fn hear(shared: &Shared, mut stream: TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(GREETING))?;
    let mut greeting = [0; 34];
    stream.read_exact(&mut greeting)?;
    let token = String::from_utf8_lossy(&greeting[..32]).into_owned();
    let number = u16::from_le_bytes([greeting[32], greeting[33]]) as usize;
    tune(&stream, shared.tuning)?;
    let waiting = shared.waiting();
    let to = waiting.get(&token).ok_or(io::Error::other("it names no link that waits"))?;
    // An end that has given up needs no stream.
    let _ = to.send((number, stream));
    Ok(())
}

/// Ends streams when their peers have read the last words.
fn close_all(ends: &Receiver<Vec<TcpStream>>) {
    let mut ending: Vec<(TcpStream, Instant)> = Vec::new();
    loop {
        let next = match ending.is_empty() {
            true => ends.recv().map_err(|_| TryRecvError::Disconnected),
            false => ends.try_recv(),
        };
        match next {
            Ok(streams) => {
                for stream in streams {
                    // Behind this the peer finds the end of the stream.
                    let open = stream.shutdown(Shutdown::Write).is_ok();
                    if open && ending.len() < MOST_ENDING {
                        ending.push((stream, Instant::now() + LAST_WORDS));
                    }
                }
                continue;
            }
            Err(TryRecvError::Disconnected) if ending.is_empty() => return,
            Err(_) => {}
        }
        let mut fds: Vec<_> = ending.iter().map(|(s, _)| PollFd::new(s, PollFlags::IN)).collect();
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 }));
        drop(fds);
        let mut scrap = [0; 4096];
        ending.retain_mut(|(stream, until)| {
            loop {
                // Were bytes left unread, the kernel would send a reset, which may take the last words from the peer.
                match stream.read(&mut scrap) {
                    Ok(0) => break false,
                    Ok(_) if Instant::now() < *until => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break Instant::now() < *until,
                    _ => break false,
                }
            }
        });
    }
}

/// How one end of a link meets its peer.
struct HostMeeting {
    host: Arc<Host>,
    dials: bool,
    token: Option<String>,
    coming: Option<Coming>,
}

/// Streams on their way.
struct Coming {
    streams: Vec<Option<TcpStream>>,
    arrived: Receiver<Arrived>,
    failed: Receiver<String>,
    until: Instant,
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
        let mut random = [0; 16];
        let urandom = std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut random));
        urandom.map_err(|e| format!("/dev/urandom: {e}"))?;
        let token: String = random.iter().map(|b| format!("{b:02x}")).collect();
        let (to, arrived) = channel();
        self.host.shared.waiting().insert(token.clone(), to);
        self.token = Some(token.clone());
        let (_, failed) = channel();
        let until = Instant::now() + ALL;
        self.coming = Some(Coming { streams: Vec::new(), arrived, failed, until, cancelled: Arc::default() });
        Ok(Place { addresses: self.host.addresses.clone(), token })
    }

    fn begin(&mut self, peer: &Place, streams: usize) -> Result<(), String> {
        let coming = self.coming.as_mut().ok_or("no place was offered")?;
        coming.streams = (0..streams).map(|_| None).collect();
        coming.until = Instant::now() + ALL;
        if !self.dials {
            return Ok(());
        }
        let (to, arrived) = channel();
        let (tell, failed) = channel();
        (coming.arrived, coming.failed) = (arrived, failed);
        let (peer, cancelled, tuning) = (peer.clone(), coming.cancelled.clone(), self.host.shared.tuning);
        let until = coming.until;
        let dial = move || {
            for number in 0..streams {
                let stream = dial(&peer, number, until, &cancelled).and_then(|stream| {
                    tune(&stream, tuning).map(|()| stream).map_err(|e| format!("a stream to the peer: {e}"))
                });
                match stream {
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
            let ending = self.host.ending.clone();
            let finish = Box::new(move |streams| {
                // A host that is gone waits for nobody's last words.
                if let Some(ending) = &ending {
                    let _ = ending.send(streams);
                }
            });
            let wire = self.host.wires.wire(streams, finish);
            return Some(wire.map_err(|e| format!("streams over io_uring: {e}; set `tcp-io` to socket")));
        }
        if let Ok(why) = coming.failed.try_recv() {
            self.give_up();
            return Some(Err(why));
        }
        if Instant::now() >= coming.until {
            let at: Vec<_> = self.host.addresses.iter().map(|a| a.to_string()).collect();
            let why = format!(
                "the peer did not connect to {} within {ALL:?}; is the port reachable?",
                at.join(", ")
            );
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
}

impl Drop for HostMeeting {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Dials one stream of a link.
fn dial(peer: &Place, number: usize, until: Instant, cancelled: &AtomicBool) -> Result<TcpStream, String> {
    let mut last = String::from("no address");
    loop {
        for address in &peer.addresses {
            if cancelled.load(Ordering::Relaxed) {
                return Err("given up".into());
            }
            match attempt(address, &peer.token, number) {
                Ok(stream) => return Ok(stream),
                Err(e) => last = format!("connecting to {address}: {e}"),
            }
        }
        if Instant::now() >= until {
            return Err(last);
        }
        std::thread::sleep(PAUSE);
    }
}

fn attempt(address: &SocketAddr, token: &str, number: usize) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(address, ATTEMPT)?;
    let mut greeting = token.as_bytes().to_vec();
    greeting.extend((number as u16).to_le_bytes());
    stream.write_all(&greeting)?;
    Ok(stream)
}
