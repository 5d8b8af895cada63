//! `pushgate proxy`: engines for programs of other processes, reached over a
//! Unix socket.
//!
//! Each program has a connection, a thread that answers it, and **an engine of
//! its own**. That costs a thread for each program and buys that they are shut
//! off from one another by construction (P8): a queue pair or a region is looked
//! up in the program's engine alone, so no number names another's; a program
//! that floods its rings, or whose WQEs make its engine work, takes time from
//! its own thread, which the kernel's scheduler bounds; an engine that fails
//! takes down the queue pairs of one program; and when the connection ends,
//! everything that it brought goes by dropping one engine. Two programs share
//! what they agreed on themselves, a link and a window, read-only for the other.
//!
//! What a program hands over is checked where it comes in: memory must be of a
//! sealed size (else truncating it would be a SIGBUS here) and is counted
//! against [`ServerOptions`]' limits; a doorbell must be a Unix socket on which no
//! call waits, whatever a program or its peer sets there ([`pushgate_driver_shim::bell`]).

use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{Bell, Ringer};
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fork::OwnedHere;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::process::Process;
use pushgate_driver_shim::segment::{Geometry, Segment};
use pushgate_driver_shim::versions::Versions;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, SealFlags, fcntl_get_seals, flock, fstat};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::endpoint::{Endpoint, QpMemory, QpOptions};
use crate::engine::{Engine, EngineOptions, QpId};
use crate::idle::Wake;
use crate::proxy::first_page;
use crate::region::{MAX_REGIONS, RegionMemory};
use crate::session::Status;
use crate::wire::{self, Answer, QP_FDS, Refusal, Reply, Request, TIMEOUT};

/// How a server runs, and what one program may take of it.
#[derive(Debug)]
pub struct ServerOptions {
    /// Programs at once.
    pub max_clients: usize,
    /// Queue pairs of a program.
    pub max_qps: usize,
    /// Regions of a program, all of its queue pairs together.
    pub max_regions: usize,
    /// Bytes of a program's memory that are mapped here. What the program has
    /// not touched yet is allocated by mapping it, on this process's account.
    pub max_bytes: u64,
    /// Cores for the engines, one after the other; none: wherever there is room.
    pub cpus: Vec<usize>,
    /// The engines have cores to spare for spinning.
    pub alone: bool,
    /// Ringing it ends the server. The server leaves it rung.
    pub stop: EventFd,
}

impl ServerOptions {
    /// 64 programs, each with 64 queue pairs, 256 regions and 16 GiB; nothing
    /// pinned.
    pub fn new(stop: EventFd) -> Self {
        ServerOptions {
            max_clients: 64,
            max_qps: 64,
            max_regions: 256,
            max_bytes: 16 << 30,
            cpus: Vec::new(),
            alone: false,
            stop,
        }
    }

    /// Descriptors that the server holds if every program takes all it may. With
    /// a lower limit of open files, a greedy program is felt by the others: raise
    /// `RLIMIT_NOFILE` to this before [`serve`].
    pub fn descriptors(&self) -> usize {
        // A queue pair: five of memory, a bell and a ringer. Besides the connection, the program's
        // process and the engine's two bells, a request's are held for a moment.
        let client = 4 + wire::MAX_FDS + self.max_qps * (QP_FDS + 2) + self.max_regions;
        64 + self.max_clients * client
    }
}

/// How often it is looked for threads that have ended, and how long a refused program may take
/// to hear of it.
const WATCH: Duration = Duration::from_millis(100);
/// How long `serve` waits at its end for its programs' threads.
const GRACE: Duration = Duration::from_secs(10);
/// Requests of a program that are answered though its process has ended: more than it can have left
/// behind, for it waits for each answer.
const LAST_WORDS: usize = 64;
/// Characters of a program's name.
const MAX_NAME: usize = 64;

/// The largest segments that the ABI knows: nothing larger is mapped.
const LARGEST: Geometry = Geometry {
    window_log: abi::PUSHGATE_MAX_UNITS_LOG,
    slots_log: abi::PUSHGATE_MAX_SLOTS_LOG,
    cq_log: abi::PUSHGATE_MAX_CQ_LOG,
    rx_log: abi::PUSHGATE_MAX_RX_LOG,
    link_log: abi::PUSHGATE_MAX_SLOTS_LOG,
    landing_log: abi::PUSHGATE_MAX_UNITS_LOG,
    signals: abi::PUSHGATE_MAX_SIGNALS,
    rank: 0,
};

/// What [`Request::AddQp`] brings, in order, and how large it may be.
const MEMORY: [(&str, usize); QP_FDS] = [
    ("work segment", LARGEST.bytes(Segment::Work)),
    ("control segment", LARGEST.bytes(Segment::Control)),
    ("link segment", LARGEST.bytes(Segment::Link)),
    ("peer's link segment", LARGEST.bytes(Segment::Link)),
    ("peer's window", LARGEST.window_bytes()),
];

// ------------------------------------------------------------------ accepting

/// Serves programs until `options.stop` is rung: each connection of this user
/// or root gets an engine of its own. When it returns, all engines have ended
/// and their queue pairs with *aborted*.
///
/// Errors are the listener's own; nothing that a program does is one.
pub fn serve(listener: UnixListener, options: ServerOptions) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let (need, have) = (options.descriptors() as u64, getrlimit(Resource::Nofile).current);
    if have.is_some_and(|have| have < need) {
        tracing::warn!(need, have, "the limit of open files is low: a greedy program is felt by the others");
    }
    let uid = rustix::process::geteuid().as_raw();
    let server = Arc::new(Server { options });
    let mut clients: Vec<JoinHandle<()>> = Vec::new();
    let mut number = 0u64;
    tracing::info!("the proxy serves");
    let result = loop {
        let watch = (!clients.is_empty()).then_some(WATCH);
        let event = match server.wait(&listener, None, watch) {
            Err(e) => break Err(e),
            Ok(event) => event,
        };
        // In every turn: where accept fails, the listener stays ready, and none is idle.
        reap(&mut clients);
        match event {
            Event::Stop => break Ok(()),
            Event::Nothing => continue,
            // No process is waited for here.
            Event::Ready { .. } | Event::Died => {}
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) if accept_again(&e) => {
                // Where it does not pass at once (no descriptors), do not spin on it.
                if e.kind() != ErrorKind::WouldBlock {
                    tracing::warn!("accepting a program: {e}");
                    std::thread::sleep(WATCH);
                }
                continue;
            }
            Err(e) => break Err(e),
        };
        number += 1;
        match admit(&server, &stream, uid, clients.len(), number) {
            Ok(start) => match start(stream) {
                Ok(client) => clients.push(client),
                Err(e) => tracing::warn!(client = number, "starting its thread: {e}"),
            },
            Err(why) => refuse(&stream, number, why),
        }
    };
    // Stopped or broken: the programs' threads wait for the same bell.
    server.options.stop.ring();
    let begin = Instant::now();
    while !clients.is_empty() && begin.elapsed() < GRACE {
        reap(&mut clients);
        std::thread::sleep(Duration::from_millis(5));
    }
    if !clients.is_empty() {
        tracing::error!(left = clients.len(), "programs' threads did not end");
    }
    tracing::info!("the proxy has ended");
    result
}

type Spawn = Box<dyn FnOnce(UnixStream) -> io::Result<JoinHandle<()>>>;

/// Whether this connection may be a program. What comes back starts its thread.
fn admit(
    server: &Arc<Server>,
    stream: &UnixStream,
    uid: u32,
    clients: usize,
    number: u64,
) -> Result<Spawn, String> {
    let cred = wire::peer_cred(stream).map_err(|e| format!("SO_PEERCRED: {e}"))?;
    if cred.uid != uid && cred.uid != 0 {
        return Err(format!(
            "this proxy is user {uid}'s, the program user {}'s: start a proxy as that user",
            cred.uid
        ));
    }
    let most = server.options.max_clients;
    if clients >= most {
        return Err(format!("{clients} programs are connected, which is the limit: end one, or raise it"));
    }
    tracing::debug!(client = number, cred.pid, cred.uid, cred.gid, "connected");
    let server = server.clone();
    // 0: of another PID namespace, whose end the socket alone tells.
    let process = u32::try_from(cred.pid).ok().and_then(|pid| Process::of(pid).ok());
    Ok(Box::new(move |stream| {
        let name = format!("pushgate-{number}");
        std::thread::Builder::new()
            .name(name)
            .spawn(move || attend(&server, &stream, process.as_ref(), number))
    }))
}

fn refuse(stream: &UnixStream, number: u64, why: String) {
    tracing::warn!(client = number, "refused: {why}");
    // The socket is new and empty: this does not wait.
    let _ = stream.set_write_timeout(Some(WATCH));
    let _ = wire::send(stream, &Reply::Err(Refusal::Why(why)), &[]);
}

/// Takes away the threads that have ended.
fn reap(clients: &mut Vec<JoinHandle<()>>) {
    for client in clients.extract_if(.., |c| c.is_finished()) {
        if client.join().is_err() {
            tracing::error!("a program's thread panicked; the others go on");
        }
    }
}

/// Errors of `accept` that say nothing about the listener.
fn accept_again(e: &io::Error) -> bool {
    [
        Errno::AGAIN,
        Errno::INTR,
        Errno::CONNABORTED,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOBUFS,
        Errno::NOMEM,
        Errno::PERM,
    ]
    .iter()
    .any(|errno| e.raw_os_error() == Some(errno.raw_os_error()))
}

enum Event {
    Stop,
    /// The descriptor is readable or closed. `died`: the process has ended, too.
    Ready {
        died: bool,
    },
    /// The process has ended, and nothing that it said is left.
    Died,
    Nothing,
}

/// What all threads of a server share.
struct Server {
    options: ServerOptions,
}

impl Server {
    /// Waits for `fd` to be readable, or closed, or for a process to end.
    fn wait(&self, fd: impl AsFd, process: Option<&Process>, timeout: Option<Duration>) -> io::Result<Event> {
        let timeout = timeout.map(|t| Timespec::try_from(t).expect("a short time"));
        let stop = || PollFd::new(&self.options.stop, PollFlags::IN);
        let process = process.map(|p| PollFd::new(p, PollFlags::IN));
        let fds = if process.is_some() { 3 } else { 2 };
        let mut all = [stop(), PollFd::new(&fd, PollFlags::IN), process.unwrap_or_else(stop)];
        match poll(&mut all[..fds], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(match all.map(|fd| !fd.revents().is_empty()) {
            [true, ..] => Event::Stop,
            [_, true, died] => Event::Ready { died },
            [_, _, true] => Event::Died,
            _ => Event::Nothing,
        })
    }
}

// ---------------------------------------------------------------- one program

/// How a program's connection ended.
enum End {
    Bye,
    Stopped,
    Lost(String),
}

/// The thread of one program.
fn attend(server: &Server, stream: &UnixStream, process: Option<&Process>, number: u64) {
    let mut client = match greet(server, stream, number) {
        Ok(client) => client,
        Err(why) => return tracing::info!(client = number, "left without an engine: {why}"),
    };
    // Whatever state a panic leaves in the client, all that follows is dropping it.
    let end = catch_unwind(AssertUnwindSafe(|| client.answer(stream, process)))
        .unwrap_or_else(|_| End::Lost("a panic, which is a bug of the proxy".into()));
    let ends = |code| client.engine.fail(None, Status::new(code));
    match &end {
        End::Bye => tracing::info!(client = number, "done"),
        End::Stopped => {
            let _ = ends(abi::PUSHGATE_ABORTED);
        }
        End::Lost(why) => {
            // Its peers wait for it, and nobody else can tell them (P7).
            let _ = ends(abi::PUSHGATE_PEER_LOST);
            tracing::warn!(client = number, "lost: {why}");
        }
    }
    drop(client);
    if let End::Bye = end {
        let _ = wire::send(stream, &Reply::Ok(Answer::Done), &[]);
    }
}

/// Takes the Hello and starts the engine.
fn greet<'a>(server: &'a Server, stream: &UnixStream, number: u64) -> Result<Client<'a>, String> {
    let io = |e: io::Error| e.to_string();
    stream.set_read_timeout(Some(TIMEOUT)).map_err(io)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(io)?;
    let begun = match wire::recv(stream) {
        Ok((request, fds)) => begin(server, request, fds, number),
        Err(e) if e.kind() == ErrorKind::InvalidData => Err(e.to_string()),
        Err(e) => return Err(e.to_string()),
    };
    let (reply, client) = match begun {
        Ok((client, version)) => (Ok(Answer::Welcome { version }), Ok(client)),
        Err(why) => (Err(Refusal::Why(why.clone())), Err(why)),
    };
    wire::send(stream, &reply, &[]).map_err(io)?;
    client
}

/// The client, and the version that it and this proxy use.
fn begin(
    server: &Server,
    request: Request,
    fds: Vec<OwnedFd>,
    number: u64,
) -> Result<(Client<'_>, u32), String> {
    let Request::Hello { version, newest, name } = request else {
        return Err("the first request must be Hello".into());
    };
    let version = wire::VERSIONS.agree(Versions::told(version, newest)).map_err(|e| e.to_string())?;
    let [bell] = exactly(fds, "Hello", "the engine's doorbell")?;
    let bell = Bell::from_fd(bell).map_err(|e| format!("doorbell: {e}"))?;
    // What this process rings itself is no affair of the program's.
    let own = EventFd::new().map_err(|e| format!("eventfd: {e}"))?;
    let cpus = &server.options.cpus;
    let cpu = (!cpus.is_empty()).then(|| cpus[number as usize % cpus.len()]);
    let options =
        EngineOptions { cpu, alone: server.options.alone, bell: Some(bell), ..EngineOptions::default() };
    let engine = Engine::start(own, options).map_err(|e| e.to_string())?;
    let name: String = name.chars().take(MAX_NAME).collect();
    tracing::info!(client = number, ?name, "an engine was started");
    Ok((Client { engine, server, qps: HashMap::new(), bytes: 0, regions: 0 }, version))
}

/// One program, with all that it brought. Dropping it ends its engine.
struct Client<'a> {
    engine: Engine,
    server: &'a Server,
    qps: HashMap<QpId, Qp>,
    /// Mapped, regions included.
    bytes: u64,
    regions: usize,
}

struct Qp {
    bytes: u64,
    /// Sizes by key.
    regions: HashMap<u32, u64>,
}

impl Client<'_> {
    fn answer(&mut self, stream: &UnixStream, process: Option<&Process>) -> End {
        // A child that the program forked may hold the connection for long, and write on it.
        let died = || End::Lost("its process has ended".into());
        let mut last_words = 0;
        loop {
            match self.server.wait(stream, process, None) {
                Err(e) => return End::Lost(e.to_string()),
                Ok(Event::Stop) => return End::Stopped,
                Ok(Event::Died) => return died(),
                Ok(Event::Ready { died: true }) if last_words == LAST_WORDS => return died(),
                Ok(Event::Nothing) => continue,
                Ok(Event::Ready { died }) => last_words += usize::from(died),
            }
            let (request, fds) = match wire::recv(stream) {
                Ok(message) => message,
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(e) => {
                    let why = e.to_string();
                    if e.kind() == ErrorKind::InvalidData {
                        let _ = wire::send(stream, &Reply::Err(Refusal::Why(why.clone())), &[]);
                    }
                    return End::Lost(why);
                }
            };
            if let Request::Bye = request {
                return End::Bye;
            }
            let reply = self.request(request, fds);
            if let Err(e) = wire::send(stream, &reply, &[]) {
                return End::Lost(format!("it does not take its answers: {e}"));
            }
            if let Err(Refusal::Gone) = reply {
                return End::Lost("its engine has ended".into());
            }
        }
    }

    fn request(&mut self, request: Request, fds: Vec<OwnedFd>) -> Reply {
        match request {
            Request::AddQp { options, wake, bell, peer_bell } => {
                self.add_qp(options, wake, [bell, peer_bell], fds)
            }
            Request::AddRegion { qp, bytes } => self.add_region(qp, bytes, fds),
            _ if !fds.is_empty() => Err(Refusal::Why(format!("{} descriptors where none belong", fds.len()))),
            Request::RemoveRegion { qp, key } => {
                let entry = self.qps.get_mut(&qp).ok_or(Refusal::NoQp(qp.0))?;
                let removed = self.engine.remove_region(qp, key)?;
                if removed && let Some(bytes) = entry.regions.remove(&key) {
                    self.bytes -= bytes;
                    self.regions -= 1;
                }
                Ok(Answer::Removed(removed))
            }
            Request::RemoveQp { qp } => {
                let counters = self.engine.remove_qp(qp)?;
                if let Some(gone) = self.qps.remove(&qp) {
                    self.bytes -= gone.bytes + gone.regions.values().sum::<u64>();
                    self.regions -= gone.regions.len();
                }
                Ok(Answer::Counters(counters))
            }
            Request::Fail { qp, status } => {
                let status = Status::from_word(status)
                    .ok_or_else(|| Refusal::Why("a queue pair cannot be failed with status 0, OK".into()))?
                    .checked();
                if let Some(qp) = qp
                    && !self.qps.contains_key(&qp)
                {
                    return Err(Refusal::NoQp(qp.0));
                }
                self.engine.fail(qp, status)?;
                Ok(Answer::Done)
            }
            Request::Status { qp } => Ok(Answer::Status(self.engine.status(qp)?.map(Status::word))),
            Request::Counters => Ok(Answer::Counters(self.engine.counters()?)),
            Request::Hello { .. } => Err(Refusal::Why("Hello was said before".into())),
            Request::Bye => unreachable!("it ends the connection before"),
        }
    }

    /// `bells`: whether there is one that the peer rings, and one of the peer's.
    fn add_qp(&mut self, options: QpOptions, wake: Wake, bells: [bool; 2], mut fds: Vec<OwnedFd>) -> Reply {
        let most = self.server.options.max_qps;
        if self.qps.len() >= most {
            return Err(Refusal::Why(format!("the program has {most} queue pairs, which is the limit")));
        }
        let (n, [bell, peer_bell]) = (fds.len(), bells);
        let expected = QP_FDS + bell as usize + peer_bell as usize;
        if n != expected {
            return Err(Refusal::Why(format!(
                "AddQp brings {expected} descriptors (those of its memory, and the bells that it names), here are {n}"
            )));
        }
        let ringer = peer_bell.then(|| fds.pop()).flatten();
        let bell = bell.then(|| fds.pop()).flatten();
        let fds: [OwnedFd; QP_FDS] = exactly(fds, "AddQp", "those of its memory").map_err(Refusal::Why)?;
        let mut sizes = [0; QP_FDS];
        for ((size, fd), (name, largest)) in sizes.iter_mut().zip(&fds).zip(MEMORY) {
            *size = memory_size(fd).map_err(|why| Refusal::Why(format!("{name}: {why}")))?;
            if *size > largest {
                return Err(Refusal::Why(format!("{name}: {size} bytes, the largest has {largest}")));
            }
        }
        first_page("control", sizes[1])?;
        first_page("link", sizes[2])?;
        let bytes = self.room_for(sizes.iter().map(|s| *s as u64).sum())?;
        let wrong = |name| move |e: io::Error| Refusal::Why(format!("{name}: {e}"));
        let bell = bell.map(Bell::from_fd).transpose().map_err(wrong("bell"))?;
        let peer_bell = ringer.map(Ringer::from_fd).transpose().map_err(wrong("peer's bell"))?;
        let [work, control, link, peer_link, peer_window] = fds;
        let why = |i: usize| move |e| Refusal::Why(format!("{}: {e}", MEMORY[i].0));
        let readable = |fd, i: usize| ReadOnlyMemory::from_fd(fd, sizes[i]).map(Arc::new).map_err(why(i));
        let writable = |fd, i: usize| SharedMemory::from_fd(fd, sizes[i]).map(Arc::new).map_err(why(i));
        let memory = QpMemory {
            work: readable(work, 0)?,
            control: writable(control, 1)?,
            link: writable(link, 2)?,
            peer_link: readable(peer_link, 3)?,
            peer_window: readable(peer_window, 4)?,
            bell,
            peer_bell,
            // Of the program and not of this process: what it may read, we need not.
            peer_pid: None,
            in_program: false,
        };
        let endpoint = Endpoint::local(memory, options).map_err(|e| Refusal::Why(e.to_string()))?;
        let id = self.engine.add_qp(endpoint, wake)?;
        self.bytes += bytes;
        self.qps.insert(id, Qp { bytes, regions: HashMap::new() });
        Ok(Answer::Qp(id))
    }

    fn add_region(&mut self, qp: QpId, bytes: u64, fds: Vec<OwnedFd>) -> Reply {
        let entry = self.qps.get(&qp).ok_or(Refusal::NoQp(qp.0))?;
        let most = self.server.options.max_regions;
        if self.regions >= most {
            return Err(Refusal::Why(format!("the program has {most} regions, which is the limit")));
        }
        if entry.regions.len() >= MAX_REGIONS {
            return Err(Refusal::TooManyRegions);
        }
        let [fd] = exactly(fds, "AddRegion", "that of the memory").map_err(Refusal::Why)?;
        let size = memory_size(&fd).map_err(|why| Refusal::Why(format!("region: {why}")))?;
        if size as u64 != bytes {
            return Err(Refusal::Why(format!("region: {bytes} bytes were named, its memory has {size}")));
        }
        let bytes = self.room_for(bytes)?;
        let memory = SharedMemory::from_fd(fd, size).map_err(|e| Refusal::Why(format!("region: {e}")))?;
        let memory = Arc::new(memory);
        let address = memory.as_ptr().as_ptr() as usize;
        let region = RegionMemory::Host { address, keep: Some(memory) };
        // SAFETY: the mapping is writable for `bytes`, which cannot shrink, nobody here
        // has a reference to it, and `keep` holds it as long as it is registered.
        let key = unsafe { self.engine.add_region(qp, region, bytes)? };
        self.bytes += bytes;
        self.regions += 1;
        self.qps.get_mut(&qp).expect("found above").regions.insert(key, bytes);
        Ok(Answer::Key(key))
    }

    /// `bytes`, if that much more may be mapped.
    fn room_for(&self, bytes: u64) -> Result<u64, Refusal> {
        let most = self.server.options.max_bytes;
        if self.bytes.checked_add(bytes).is_some_and(|sum| sum <= most) {
            return Ok(bytes);
        }
        Err(Refusal::Why(format!(
            "{bytes} more bytes, with the {} that the program has mapped here, are over the limit of {most}",
            self.bytes
        )))
    }
}

fn exactly<const N: usize>(fds: Vec<OwnedFd>, request: &str, what: &str) -> Result<[OwnedFd; N], String> {
    fds.try_into()
        .map_err(|fds: Vec<_>| format!("{request} brings {N} descriptors ({what}), here are {}", fds.len()))
}

/// Size of memory that a program hands over; it is final.
fn memory_size(fd: &OwnedFd) -> Result<usize, String> {
    // Seals first. What has none is no memory: asking a file of some file systems
    // for its size could take as long as the program likes.
    let seals =
        fcntl_get_seals(fd).map_err(|e| format!("descriptor is no memory that can be sealed ({e})"))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err("its size is not sealed: hand over a memfd with F_SEAL_SHRINK and F_SEAL_GROW".into());
    }
    let size = fstat(fd).map_err(|e| format!("fstat: {e}"))?.st_size;
    usize::try_from(size).map_err(|_| format!("{size} bytes"))
}

// ------------------------------------------------------------------ the socket

/// Removes the socket's file when it is dropped, if it still is the one that
/// [`bind`] made. A child of `fork` leaves the file alone.
#[derive(Debug)]
pub struct SocketFile {
    _named: OwnedHere<Named>,
}

/// The path of a socket and which file lay there; none for an abstract name.
#[derive(Debug)]
struct Named(Option<(PathBuf, FileId)>);

/// Device, inode, and ctime, for inodes are used again.
type FileId = (u64, u64, i64, i64);

fn file_id(path: &Path) -> io::Result<FileId> {
    fs::symlink_metadata(path).map(|m| (m.dev(), m.ino(), m.ctime(), m.ctime_nsec()))
}

impl Drop for Named {
    fn drop(&mut self) {
        if let Some((path, id)) = &self.0
            && file_id(path).is_ok_and(|found| found == *id)
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// Listens at `path`, or for `@name` at an abstract socket, which any user can
/// reach (and is refused later) and any user can take first.
///
/// The directory of a path must be private (mode 0700, this user's); one that is
/// not there is made. The socket of a proxy that died is replaced; one that lives
/// is an `AddrInUse`.
pub fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let at = path.display();
    let live = || {
        let text = format!("a proxy listens at {at} already: use that one, end it, or name another socket");
        io::Error::new(ErrorKind::AddrInUse, text)
    };
    if let Some(name) = wire::abstract_name(path) {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?).map_err(|e| {
            if e.kind() == ErrorKind::AddrInUse { live() } else { told(e, format_args!("binding {at}")) }
        })?;
        return Ok((listener, SocketFile { _named: OwnedHere::new(Named(None)) }));
    }
    let dir = match path.parent() {
        Some(dir) if dir.as_os_str().is_empty() => Path::new("."),
        Some(dir) => dir,
        None => return Err(io::Error::new(ErrorKind::InvalidInput, format!("{at} names no socket"))),
    };
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => {
            return Err(told(e, format_args!("making {}", dir.display())));
        }
        _ => {}
    }
    let handle = fs::File::open(dir).map_err(|e| told(e, format_args!("opening {}", dir.display())))?;
    let meta = handle.metadata()?;
    let uid = rustix::process::geteuid().as_raw();
    if !meta.is_dir() || meta.uid() != uid || meta.mode() & 0o077 != 0 {
        let text = format!(
            "{} must be a directory of user {uid} with mode 0700 (it is user {}'s, mode {:o}), because a user who \
             reaches the socket there can hand the proxy work: chmod it, or name another",
            dir.display(),
            meta.uid(),
            meta.mode() & 0o7777
        );
        return Err(io::Error::new(ErrorKind::PermissionDenied, text));
    }
    // Two that start at once must not take each other's new socket for a dead one.
    flock(&handle, FlockOperation::LockExclusive)?;
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            let text = format!("{at} is there and no socket: name another path");
            return Err(io::Error::new(ErrorKind::AlreadyExists, text));
        }
        Ok(_) => match wire::dial(path, Instant::now()) {
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                tracing::info!("removing the socket of a proxy that is gone: {at}");
                fs::remove_file(path).map_err(|e| told(e, format_args!("removing {at}")))?;
            }
            // A queue that is full is somebody's too.
            Ok(_) => return Err(live()),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(live()),
            Err(e) => return Err(told(e, format_args!("looking whether a proxy listens at {at}"))),
        },
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(told(e, format_args!("looking at {at}"))),
    }
    let listener = UnixListener::bind(path).map_err(|e| told(e, format_args!("binding {at}")))?;
    let named = Named(Some((path.to_path_buf(), file_id(path)?)));
    Ok((listener, SocketFile { _named: OwnedHere::new(named) }))
}

fn told(e: io::Error, what: std::fmt::Arguments<'_>) -> io::Error {
    io::Error::new(e.kind(), format!("{what}: {e}"))
}
