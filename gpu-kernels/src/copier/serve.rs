//! The copier's process: it opens the device, and serves the clients that connect until the last has gone. A thread for each client
//! answers the client's requests; one thread copies for all (`engine`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use pushgate_driver_shim::bell;
use pushgate_driver_shim::closing::{PeerListener, PeerStream};
use pushgate_driver_shim::users::is_ours;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;

use super::engine::{Client, Engine, Mailbox, News};
use super::hands::{Fence, Hands, Line};
use super::layout::RINGS;
use super::places::{Kind, Place};
use super::protocol::{self, Request};
use super::start::{CopierCpus, address};
use crate::choose::{DeviceChoice, choose_at};
use crate::executor::Executor;

/// How long a copier waits for another client after the last one has gone.
const LINGER: Duration = Duration::from_secs(2);
/// How often it looks whether that is so.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Clients at once: a few ranks share a GPU.
const MOST: usize = 256;

/// What a copier is to do.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The GPU: its index among those that the process sees, or its UUID as 32 digits; or `cpu`.
    pub gpu: String,
    /// The cores that the copier uses.
    pub cpus: CopierCpus,
    /// The copier stays when its last client has gone, until it is killed.
    pub stay: bool,
}

/// What [`serve`] calls once clients can connect, with a sentence that says who serves.
pub type Ready<'a> = &'a mut dyn FnMut(&str);

/// Serves the clients of one GPU and user until the last has gone. Returns at once, after `ready`, if another copier serves that GPU for
/// this user. The calling thread waits; errors are sentences.
pub fn serve(options: &ServeOptions, ready: Ready<'_>) -> Result<(), String> {
    let gpu = uuid(&options.gpu)?;
    let name = super::start::name(&gpu);
    let at = address(&name).map_err(|e| e.to_string())?;
    // Before the GPU is opened: of the copiers that many ranks start at once, one opens it. Clients that connect meanwhile wait in the
    // listener's queue.
    let listener = match UnixListener::bind_addr(&at) {
        Ok(listener) => PeerListener::from(listener),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            ready(&format!("another copier serves GPU {gpu}"));
            return Ok(());
        }
        Err(e) => return Err(format!("listening at {name}: {e}")),
    };
    let executor = open(&gpu)?;
    options.cpus.take(executor.as_cuda().map(|cuda| cuda.pci_bus_id()));
    // What can't be had is said before a client relies on it.
    Hands(executor.clone()).line(std::process::id()).map_err(|e| e.to_string())?;
    ready(&format!("serving {}", executor.describe()));
    let server = Server::start(executor)?;
    server.run(&listener, options.stay)
}

/// The UUID of a GPU, given by its index or by its UUID; or `cpu`. Opens no GPU.
fn uuid(gpu: &str) -> Result<String, String> {
    match gpu.parse::<u32>() {
        Ok(index) if gpu.len() < 32 => crate::cuda::uuid_at(index).map_err(|e| e.to_string()),
        _ => Ok(gpu.to_owned()),
    }
}

/// The executor of a GPU by its UUID, or of the device `cpu`.
fn open(gpu: &str) -> Result<Arc<dyn Executor>, String> {
    let (device, index) = match gpu {
        "cpu" => (DeviceChoice::Cpu, 0),
        uuid => (DeviceChoice::Cuda, crate::cuda::index_of(uuid).map_err(|e| e.to_string())?),
    };
    choose_at(device, index).map(|(executor, _)| executor).map_err(|e| e.to_string())
}

/// A copier that serves, in this process.
pub(super) struct Server {
    hands: Hands,
    mailbox: Arc<Mailbox>,
    clients: Arc<AtomicUsize>,
    engine: Option<thread::JoinHandle<Result<(), String>>>,
}

impl Server {
    pub fn start(executor: Arc<dyn Executor>) -> Result<Self, String> {
        let failed = |e: io::Error| format!("the copier's thread: {e}");
        let mailbox = Arc::new(Mailbox::new().map_err(failed)?);
        let (engine, hands) = (Engine::new(mailbox.clone()), Hands(executor));
        let of = hands.clone();
        let copies = move || {
            let _current = of.enter().map_err(|e| e.to_string())?;
            engine.run()
        };
        let engine = thread::Builder::new().name("copier".into()).spawn(copies).map_err(failed)?;
        Ok(Server { hands, mailbox, clients: Arc::default(), engine: Some(engine) })
    }

    /// Accepts clients until the last has gone, or the device has failed.
    pub fn run(mut self, listener: &PeerListener, stay: bool) -> Result<(), String> {
        listener.set_nonblocking(true).map_err(|e| e.to_string())?;
        let mut alone = Instant::now();
        loop {
            if self.engine.as_ref().is_some_and(thread::JoinHandle::is_finished) {
                let ended = self.engine.take().map(thread::JoinHandle::join);
                // Clients have been told why; their threads let go of nothing, because the process ends.
                return ended
                    .and_then(Result::ok)
                    .unwrap_or_else(|| Err("the copier's thread has panicked".into()));
            }
            let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&LOOK));
            match listener.accept() {
                Ok(stream) => self.admit(stream),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => {
                    tracing::warn!("accepting a client: {e}");
                    thread::sleep(Duration::from_millis(100));
                }
            }
            if self.clients.load(Ordering::Acquire) > 0 {
                alone = Instant::now();
            } else if !stay && alone.elapsed() > LINGER {
                return Ok(());
            }
        }
    }

    /// Serves a client on a thread of its own, if it is of this user.
    pub fn admit(&self, stream: PeerStream) {
        let Ok(peer) = socket_peercred(&stream) else { return };
        if !is_ours(peer.uid.as_raw()) || self.clients.load(Ordering::Acquire) >= MOST {
            return;
        }
        let pid = peer.pid.as_raw_nonzero().get() as u32;
        let (hands, mailbox, clients) = (self.hands.clone(), self.mailbox.clone(), self.clients.clone());
        clients.fetch_add(1, Ordering::AcqRel);
        let served = thread::Builder::new().name(format!("client-{pid}")).spawn(move || {
            // A number for each client, which no two have.
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            let id = NEXT.fetch_add(1, Ordering::Relaxed) as u64;
            let conversation = Conversation { id, pid, hands, mailbox, stream };
            if let Err(e) = conversation.hold() {
                tracing::debug!("client {pid}: {e}");
            }
            clients.fetch_sub(1, Ordering::AcqRel);
        });
        if served.is_err() {
            self.clients.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.mailbox.stop();
        let _ = self.engine.take().map(thread::JoinHandle::join);
    }
}

/// A client's requests, one after the other.
struct Conversation {
    id: u64,
    pid: u32,
    hands: Hands,
    mailbox: Arc<Mailbox>,
    stream: PeerStream,
}

impl Conversation {
    /// Asks the thread that copies. `None`: that thread has ended.
    fn ask<T>(&self, news: impl FnOnce(SyncSender<T>) -> News) -> Option<T> {
        let (answer, answered) = sync_channel(1);
        self.mailbox.post(news(answer));
        // The thread that copies answers at its next pass, or is dropped with the sender.
        loop {
            match answered.recv_timeout(Duration::from_millis(100)) {
                Ok(value) => return Some(value),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) if self.mailbox.is_abandoned() => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Serves the client until it goes.
    fn hold(&self) -> io::Result<()> {
        self.stream.set_write_timeout(Some(protocol::PATIENCE))?;
        // A client greets at once.
        self.stream.set_read_timeout(Some(protocol::PATIENCE))?;
        let Request::Hello { bytes, memory } = protocol::hear(&self.stream)? else {
            return protocol::answer(&self.stream, Err("the first request must be a greeting"), &[]);
        };
        let (fences, ringer) = match self.join(memory, bytes) {
            Ok(joined) => joined,
            Err(why) => return protocol::answer(&self.stream, Err(&why), &[]),
        };
        let heard = protocol::answer(&self.stream, Ok(0), &[ringer.as_fd()]).and_then(|()| {
            self.stream.set_read_timeout(None)?;
            loop {
                let request = protocol::hear(&self.stream)?;
                let answer = self.serve(request, &fences);
                protocol::answer(&self.stream, answer.as_ref().copied().map_err(String::as_str), &[])?;
            }
        });
        // The memories are let go of once no copy uses them.
        if let Some(Some(client)) = self.ask(|answer| News::Left(self.id, answer)) {
            finish(&fences);
            drop(client);
        }
        heard
    }

    fn join(&self, memory: OwnedFd, bytes: u64) -> Result<([Fence; RINGS], bell::Ringer), String> {
        if bytes < super::layout::ASIDE as u64 {
            return Err(format!("{bytes} bytes are too few for the rings"));
        }
        let (place, memory) = self.hands.rings(memory, bytes)?;
        let mut places = super::places::Places::default();
        places.add(Kind::Host, place);
        let line = |_| self.hands.line(self.pid).map_err(|e| e.to_string());
        let lines: Vec<Line> = (0..RINGS).map(line).collect::<Result<_, _>>()?;
        let lines: [Line; RINGS] = lines.try_into().unwrap_or_else(|_| unreachable!("as many as rings"));
        let fences = lines.each_ref().map(Line::fence);
        let (bell, ringer) = bell::pair().map_err(|e| e.to_string())?;
        let stream = self.stream.try_clone().map_err(|e| e.to_string())?;
        let client =
            Client { id: self.id, memory, bell, lines, cursors: [0; RINGS], places, stream, ended: false };
        self.mailbox.post(News::Joined(Box::new(client)));
        Ok((fences, ringer))
    }

    fn serve(&self, request: Request, fences: &[Fence; RINGS]) -> Result<u64, String> {
        let add = |kind, place: Place| {
            let key = self.ask(|answer| News::Add(self.id, kind, place, answer)).flatten();
            key.map(u64::from)
                .ok_or_else(|| format!("more than {} memories are registered", super::places::MOST))
        };
        match request {
            Request::Hello { .. } => Err("a second greeting".into()),
            Request::Host { bytes, writable, memory } => {
                add(Kind::Host, self.hands.host(memory, bytes, writable)?)
            }
            Request::Device { address, bytes, how } => {
                add(Kind::Device, self.hands.device(address, bytes, how)?)
            }
            Request::Forget { device, key } => {
                let kind = if device { Kind::Device } else { Kind::Host };
                let place = self.ask(|answer| News::Remove(self.id, kind, key, answer)).flatten();
                let place = place.ok_or_else(|| format!("memory {key} is not registered"))?;
                // Copies that use it may be under way, though the client should have waited for them.
                finish(fences);
                drop(place.keep);
                Ok(0)
            }
        }
    }
}

/// Waits until all copies that were handed to the device are complete.
fn finish(fences: &[Fence; RINGS]) {
    for fence in fences {
        if let Err(e) = fence.wait() {
            tracing::warn!("{e}");
        }
    }
}
