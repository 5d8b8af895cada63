//! One thread that watches the sockets of all connections: the end of a peer ends its queue pair,
//! so that no request waits for that peer. On one host the thread also watches the peer's process,
//! because a process's sockets stay open while a child that it forked lives (a data loader's).
//!
//! An end that closes in order says how many messages it had received. So its peer can tell its
//! requests apart: those that arrived are done, although the last counts may have been lost with
//! the queue pair.
//!
//! Where both ends replace a link that breaks, the socket also carries the frames by which they do. The thread hands the
//! peer's frames to the engine, and sends those of this end that the socket did not take at once. Between hosts the socket
//! itself is replaced too when it breaks (`again.rs`): each end counts the frames that have come, and says so.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_core::session::Status;
use pushgate_door as door;
use pushgate_door::redial::Attempts;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::closing::drop_elsewhere;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::process::Process;
use pushgate_engine::connect::{Fds, Frame};
use pushgate_engine::engine::{Engine, QpId};
use pushgate_link::mailbox::Mailbox;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::again::{self, Again, Finder, Found, Here, Key};
use crate::error::{Failure, Result};
use crate::log;
use crate::socket::{self, Channel, Line};
use crate::stream::Stream;

const BYE: [u8; 8] = *b"PGBYE\0\0\0";
const FAREWELL: usize = 16;
const STOP: u64 = u64::MAX;
/// Somebody dials again.
const DIALLED: u64 = u64::MAX - 1;
/// A thread that dials or reads a greeting has found something, or a socket broke.
const FOUND: u64 = u64::MAX - 2;
/// A peer's process has ended.
const ENDED: u64 = u64::MAX - 3;
/// Frames that one connection is heard for before the others are heard.
const TURN: usize = 64;
/// Breaks the links of this process again and again, each time after this number of milliseconds, for tests of their replacement.
const BREAK_LINKS: &str = "_PUSHGATE_BREAK_LINKS";
/// Cuts the sockets of this process that can be replaced again and again, each time after this number of milliseconds, for tests.
const CUT_SOCKETS: &str = "_PUSHGATE_CUT_SOCKETS";
/// Farewells of an end that closes: one before its queue pair ends, one after that.
const FAREWELLS: u32 = 2;

/// What is known about the other end.
#[derive(Default)]
pub struct Peer {
    /// Its rank of the queue pair.
    rank: u32,
    received: AtomicU64,
}

impl Peer {
    /// The end with this rank of the queue pair.
    pub fn new(rank: u32) -> Self {
        Peer { rank, received: AtomicU64::new(0) }
    }

    /// How many of our messages the peer had received when it closed.
    #[inline]
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Acquire)
    }
}

/// Tells the peer that this end closes, having received `received` of its messages: in a frame where the socket carries
/// frames.
pub fn say_goodbye(line: &Line, in_frame: bool, received: u64) {
    let mut bytes = [0; FAREWELL];
    bytes[..8].copy_from_slice(&BYE);
    bytes[8..].copy_from_slice(&received.to_le_bytes());
    if in_frame {
        line.tell(&bytes, Vec::new());
    } else {
        // An error means that the peer is gone already.
        let _ = line.stream().send(&bytes, &[]);
    }
}

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why.into())
}

/// The count in a farewell; `None` if these bytes are none.
fn farewell(bytes: &[u8]) -> Option<u64> {
    let (bye, count) = bytes.split_first_chunk::<8>()?;
    (*bye == BYE).then(|| count.try_into().ok().map(u64::from_le_bytes))?
}

/// What the peer says over the socket.
enum Hears {
    /// The part of a farewell that has come.
    Farewell(Vec<u8>),
    /// Frames for the engine, and a farewell in a frame.
    Frames(Channel, Mailbox),
}

/// How a connection's socket is replaced when it breaks.
struct Renewed {
    key: Key,
    /// The peer's frames that have come.
    received: u64,
    farewells: u32,
    broken: Option<Broken>,
}

/// A socket that broke, and that no other one has replaced yet.
struct Broken {
    why: String,
    /// When the peer counts as lost.
    until: Instant,
    _attempts: Attempts,
}

/// How this process meets others again.
struct Meeting {
    again: Again,
    finder: Finder,
    bell: Arc<EventFd>,
    here: Here,
}

/// A process at the other end of connections. The thread hears of its end as long as this lives.
struct Watched {
    process: Arc<Process>,
    epoll: Arc<OwnedFd>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        // A forked child of ours may hold the descriptor, so closing it is not enough.
        let _ = epoll::delete(&self.epoll, &self.process);
    }
}

struct Entry {
    line: Arc<Line>,
    /// What is watched: the line's socket, as long as no other one takes its place.
    stream: Arc<Stream>,
    /// The peer's process, if it has a number here; that of its other connections too.
    process: Option<Arc<Watched>>,
    peer: Arc<Peer>,
    qp: QpId,
    engine: Arc<Engine>,
    hears: Hears,
    /// Where the socket is replaced when it breaks.
    renewed: Option<Renewed>,
}

struct Shared {
    epoll: Arc<OwnedFd>,
    meeting: Option<Meeting>,
    entries: Mutex<HashMap<u64, Entry>>,
}

impl Shared {
    fn entries(&self) -> MutexGuard<'_, HashMap<u64, Entry>> {
        self.entries.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes what a peer has sent, and sends what waits for the peer. Ends the queue pair if the peer is gone.
    fn hear(&self, id: u64) {
        // Held while the queue pair is ended, so that `remove` returns only after that.
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&id) else { return };
        match entry.hear() {
            Ok(false) => {}
            // Reports it again, after the others that were reported.
            Ok(true) => {
                _ = epoll::modify(
                    &self.epoll,
                    entry.stream.as_fd(),
                    epoll::EventData::new_u64(id),
                    entry.events(),
                )
            }
            Err(why) => {
                if let Some(meeting) = &self.meeting
                    && entry.may_meet_again(&why)
                {
                    return entry.breaks(&self.epoll, meeting, &why.to_string());
                }
                let gone = entries.remove(&id).expect("it is there");
                gone.ends(&self.epoll, &why);
            }
        }
    }

    /// Takes what peers have sent whose processes have ended, and ends their queue pairs.
    #[cold]
    fn hear_of_the_ended(&self) {
        let ended = |entry: &Entry| entry.process_lives().is_err();
        let ids: Vec<u64> =
            self.entries().iter().filter(|(_, entry)| ended(entry)).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.hear(id));
    }

    /// The process, watched once for all connections to it.
    fn watched(
        &self,
        entries: &HashMap<u64, Entry>,
        process: Arc<Process>,
    ) -> rustix::io::Result<Arc<Watched>> {
        let mut there = entries.values().filter_map(|entry| entry.process.as_ref());
        if let Some(watched) = there.find(|watched| Arc::ptr_eq(&watched.process, &process)) {
            return Ok(watched.clone());
        }
        epoll::add(&self.epoll, &process, epoll::EventData::new_u64(ENDED), epoll::EventFlags::IN)?;
        Ok(Arc::new(Watched { process, epoll: self.epoll.clone() }))
    }

    /// Breaks every link that can be replaced.
    #[cold]
    fn break_links(&self) {
        for entry in self.entries().values().filter(|entry| matches!(entry.hears, Hears::Frames(..))) {
            let _ = entry.engine.break_link(entry.qp);
        }
    }

    /// Cuts every socket that can be replaced, as a network between the hosts does.
    #[cold]
    fn cut_sockets(&self) {
        for entry in self.entries().values().filter(|entry| entry.renewed.is_some()) {
            entry.stream.shutdown();
        }
    }

    /// Ends the queue pairs whose sockets broke and were not replaced in time. Returns when the next such time is over.
    fn give_up(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut entries = self.entries();
        let late = entries.extract_if(|_, entry| entry.until().is_some_and(|until| until <= now));
        for (_, entry) in late {
            let why =
                &entry.renewed.as_ref().and_then(|renewed| renewed.broken.as_ref()).expect("it is late").why;
            let why = format!("its socket broke ({why}), and no other one took its place in time");
            entry.ends(&self.epoll, &io::Error::other(why));
        }
        entries.values().filter_map(Entry::until).min()
    }

    /// Takes in what a thread found about a socket that broke.
    fn meet_again(&self, meeting: &Meeting, found: Found) {
        let key = found.key();
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&key.id) else {
            // The connection ended while its greeting came. The other end dials once more, and its token then tells how.
            if let Found::Greeted { stream, .. } = found {
                stream.close();
            }
            return;
        };
        let broken = entry.until().is_some();
        let went_on = match found {
            // A greeting of an attempt that the other end gave up came late. The socket that took over is whole.
            Found::Greeted { received, .. } if entry.line.has_gone_beyond(received) => Ok(()),
            Found::Greeted { stream, received, .. } => {
                if !broken {
                    entry.breaks(&self.epoll, meeting, "the other end dials again");
                }
                // Otherwise the other end dials once more.
                match meeting.again.answer(&stream, entry.renewed.as_ref().map_or(0, |r| r.received)) {
                    Ok(()) => entry.goes_on(&self.epoll, key.id, stream, received),
                    Err(_) => Ok(()),
                }
            }
            // Of attempts that were given up nothing is taken.
            Found::Met { stream, received, .. } if broken => {
                entry.goes_on(&self.epoll, key.id, stream, received)
            }
            // A late word concerns a socket that another one has replaced.
            Found::Told { received, .. } if !broken && !entry.line.has_gone_beyond(received) => {
                entry.breaks(&self.epoll, meeting, "the other end says so");
                Ok(())
            }
            Found::Gone { why, closed, .. } if broken => {
                if let Some(count) = closed {
                    entry.peer.received.fetch_max(count, Ordering::Release);
                }
                Err(io::Error::other(format!("its socket broke, and {why}")))
            }
            _ => Ok(()),
        };
        if let Err(why) = went_on {
            let gone = entries.remove(&key.id).expect("it is there");
            gone.ends(&self.epoll, &why);
        }
    }
}

/// The thread that watches connections for the end of their peers.
pub struct Watch {
    shared: Arc<Shared>,
    stop: EventFd,
    next: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts the thread. `dialled`: the socket at which other hosts dial this process again when a connection's socket
    /// broke, how long that may be gone, and whether sockets are encrypted; without it the end of a socket is the connection's.
    pub fn start(dialled: Option<(Vec<TcpListener>, Duration, bool)>) -> Result<Self> {
        const WHAT: &str = "starting the watch of connections";
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Failure::system(WHAT))?;
        let stop = EventFd::new().map_err(Failure::system(WHAT))?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)
            .map_err(Failure::system(WHAT))?;
        let bell = Arc::new(EventFd::new().map_err(Failure::system(WHAT))?);
        let (finder, found) = Finder::new(&bell);
        let meeting = match dialled {
            None => None,
            Some((listeners, recover, tls)) => {
                let (again, here) = again::listen(listeners, recover, tls)?;
                let flags = epoll::EventFlags::IN;
                epoll::add(&epoll, again.listener(), epoll::EventData::new_u64(DIALLED), flags)
                    .and_then(|()| epoll::add(&epoll, &*bell, epoll::EventData::new_u64(FOUND), flags))
                    .map_err(Failure::system(WHAT))?;
                Some(Meeting { again, finder, bell, here })
            }
        };
        let shared = Arc::new(Shared { epoll: Arc::new(epoll), meeting, entries: Mutex::default() });
        let theirs = shared.clone();
        let every = [BREAK_LINKS, CUT_SOCKETS].map(every);
        let thread = std::thread::Builder::new()
            .name("pushgate-watch".into())
            .spawn(move || log::scoped(|| run(&theirs, &found, every)))
            .map_err(Failure::system(WHAT))?;
        Ok(Watch { shared, stop, next: AtomicU64::new(0), thread: Some(thread) })
    }

    /// Where other hosts dial this process again.
    pub fn here(&self) -> Option<&Here> {
        self.shared.meeting.as_ref().map(|meeting| &meeting.here)
    }

    /// Watches the socket of a queue pair of `engine`, and the process at its other end. Frames of the peer go to `mailbox`,
    /// if both ends replace a link that breaks. The number returned is for [`Watch::remove`] and [`Watch::listen`].
    pub fn add(
        &self,
        line: Arc<Line>,
        peer: Arc<Peer>,
        engine: &Arc<Engine>,
        qp: QpId,
        mailbox: Option<Mailbox>,
    ) -> Result<u64> {
        // The peer has just sent something, so the process number is still its own.
        let stream = line.stream();
        let process = stream.peer_pid().and_then(|pid| Process::of(pid).ok());
        let hears = match mailbox {
            Some(mailbox) => Hears::Frames(Channel::of(line.clone()), mailbox),
            None => Hears::Farewell(Vec::new()),
        };
        let engine = engine.clone();
        let entry = Entry { line, stream, process: None, peer, qp, engine, hears, renewed: None };
        self.add_entry(entry, process)
    }

    fn add_entry(&self, mut entry: Entry, process: Option<Arc<Process>>) -> Result<u64> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let line = entry.line.clone();
        let renewal = line.renewal();
        entry.renewed = renewal.map(|renewal| {
            let key = Key { id, dials: renewal.dials, other: renewal.other };
            Renewed { key, received: 0, farewells: 0, broken: None }
        });
        let mut entries = self.shared.entries();
        let watch = |entries: &HashMap<u64, Entry>| {
            entry.process = process.map(|process| self.shared.watched(entries, process)).transpose()?;
            let data = epoll::EventData::new_u64(id);
            epoll::add(&self.shared.epoll, entry.stream.as_fd(), data, entry.events())
        };
        watch(&entries).map_err(Failure::system("watching a connection"))?;
        if let (Some(renewal), Some(renewed)) = (renewal, &entry.renewed) {
            renewal.own.open(renewed.key);
        }
        entries.insert(id, entry);
        Ok(id)
    }

    /// Takes what a peer has sent up to now, on the calling thread.
    #[cold]
    pub fn listen(&self, id: u64) {
        self.shared.hear(id);
    }

    /// Stops watching; afterwards the thread holds the socket no longer.
    pub fn remove(&self, id: u64) {
        if let Some(entry) = self.shared.entries().remove(&id) {
            entry.unwatch(&self.shared.epoll);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How often something is to be done for tests, by a variable of the environment.
fn every(name: &str) -> Option<Duration> {
    let value = std::env::var(name).ok()?;
    match value.parse() {
        Ok(every @ 1..) => {
            tracing::info!("{name} is set: what can be replaced is broken every {every} ms, for tests");
            Some(Duration::from_millis(every))
        }
        _ => {
            tracing::warn!("invalid {name} `{value}`: expected milliseconds, at least 1; nothing is broken");
            None
        }
    }
}

/// The watch's thread. `every`: how often links are broken, and sockets cut.
fn run(shared: &Shared, found: &Receiver<Found>, every: [Option<Duration>; 2]) {
    let mut events = Vec::with_capacity(64);
    let mut done = [Instant::now(); 2];
    loop {
        events.clear();
        let now = Instant::now();
        let mut next = shared.give_up();
        for ((every, done), act) in
            every.iter().zip(&mut done).zip([Shared::break_links, Shared::cut_sockets])
        {
            let Some(every) = every else { continue };
            if now >= *done + *every {
                act(shared);
                *done = now;
            }
            next = Some(next.map_or(*done + *every, |next| next.min(*done + *every)));
        }
        let limit = next.map(|next| {
            Timespec::try_from(next.saturating_duration_since(Instant::now())).expect("less than ages")
        });
        match epoll::wait(&shared.epoll, rustix::buffer::spare_capacity(&mut events), limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                tracing::error!("waiting for connections: {e}; deaths of peers are not noticed any more");
                return;
            }
        }
        for event in &events {
            let id = event.data.u64();
            match (id, &shared.meeting) {
                (STOP, _) => return,
                (DIALLED, Some(meeting)) => meeting.again.accept(&meeting.finder),
                (ENDED, _) => shared.hear_of_the_ended(),
                (FOUND, Some(meeting)) => {
                    meeting.bell.drain();
                    found.try_iter().for_each(|found| shared.meet_again(meeting, found));
                }
                _ => shared.hear(id),
            }
        }
    }
}

impl Entry {
    /// A forked child of ours may hold the descriptor, so closing it is not enough.
    fn unwatch(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, self.stream.as_fd());
    }

    /// Ends the queue pair: the peer is gone, or breaks the protocol.
    fn ends(self, epoll: &OwnedFd, why: &io::Error) {
        // An engine that is gone has no requests that wait.
        let _ = match why.kind() {
            ErrorKind::InvalidData => {
                limited!(
                    warn,
                    self.qp.0,
                    "queue pair {}: the other end broke the protocol: {why}",
                    self.qp.0
                );
                let status = Status { rank: Some(self.peer.rank), ..Status::new(abi::PUSHGATE_REFUSED) };
                self.engine.fail(Some(self.qp), status)
            }
            _ => {
                tracing::debug!("queue pair {}: {why}", self.qp.0);
                let status = Status { rank: None, ..Status::new(abi::PUSHGATE_PEER_LOST) };
                self.engine.peer_ended(self.qp, status)
            }
        };
        self.unwatch(epoll);
    }

    /// Whether another socket may take the place of the one that ended.
    fn may_meet_again(&self, why: &io::Error) -> bool {
        let Some(renewed) = &self.renewed else { return false };
        // A peer that has said all its farewells closes.
        renewed.farewells < FAREWELLS && why.kind() != ErrorKind::InvalidData
    }

    /// When the peer counts as lost, because its socket broke.
    fn until(&self) -> Option<Instant> {
        Some(self.renewed.as_ref()?.broken.as_ref()?.until)
    }

    /// The socket broke: nothing more is taken from it, and the other end is sought.
    fn breaks(&mut self, epoll: &OwnedFd, meeting: &Meeting, why: &str) {
        let Some(renewed) = &mut self.renewed else { return };
        let recover = meeting.again.recover();
        limited!(
            info,
            self.qp.0,
            "queue pair {}: its socket broke: {why}; another one is sought for {recover:?}",
            self.qp.0
        );
        let attempts = meeting.again.seek(renewed.key, renewed.received, &meeting.finder);
        renewed.broken =
            Some(Broken { why: why.into(), until: Instant::now() + recover, _attempts: attempts });
        self.line.breaks();
        let _ = epoll::delete(epoll, self.stream.as_fd());
        // The thread's next wait ends in time.
        meeting.bell.ring();
    }

    /// Another socket takes the place of the one that broke. The peer has received `received` of this end's frames.
    fn goes_on(&mut self, epoll: &OwnedFd, id: u64, stream: door::Stream, received: u64) -> io::Result<()> {
        let stream = Stream::tcp(stream, true)?;
        self.stream = self.line.goes_on(stream, received).map_err(invalid)?;
        if let Some(renewed) = &mut self.renewed {
            renewed.broken = None;
        }
        if let Hears::Frames(channel, _) = &mut self.hears {
            *channel = Channel::of(self.line.clone());
        }
        limited!(
            info,
            self.qp.0,
            "queue pair {}: another socket took the place of the one that broke",
            self.qp.0
        );
        Ok(epoll::add(epoll, self.stream.as_fd(), epoll::EventData::new_u64(id), self.events())?)
    }

    /// What the socket is watched for.
    fn events(&self) -> epoll::EventFlags {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        match self.hears {
            Hears::Farewell(_) => flags,
            // Each change is reported once, also that there is room again: an engine whose frame the socket did not take need
            // not ask for a report.
            Hears::Frames(..) => flags | epoll::EventFlags::OUT | epoll::EventFlags::ET,
        }
    }

    /// Takes what the peer has sent, and sends what waits. True if there may be more to take; fails when the peer is gone, and
    /// with `InvalidData` when the peer has sent what no peer would send.
    fn hear(&mut self) -> io::Result<bool> {
        let Hears::Frames(channel, mailbox) = &mut self.hears else { return self.hear_farewell() };
        if self.renewed.as_ref().is_some_and(|renewed| renewed.broken.is_some()) {
            return Ok(false);
        }
        let before = self.renewed.as_ref().map(|renewed| renewed.received);
        // A peer that takes no more may have said why.
        let sent = self.line.flush();
        for _ in 0..TURN {
            let (bytes, fds) = match channel.receive() {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    sent?;
                    self.tell_received(before);
                    return self.process_lives().map(|()| false);
                }
                Err(e) if e.kind() == ErrorKind::QuotaExceeded => {
                    limited!(warn, self.qp.0, "a frame of the other end is lost: {e}");
                    continue;
                }
                Err(e) => return Err(e),
            };
            if let Some(renewed) = &mut self.renewed {
                if let Some(count) = socket::received(&bytes) {
                    self.line.received(count).map_err(invalid)?;
                    continue;
                }
                renewed.received += 1;
            }
            if socket::is_ring(&bytes) {
                channel.discard(fds);
                self.engine.rung();
                continue;
            }
            if let Some(count) = farewell(&bytes) {
                channel.discard(fds);
                if let Some(renewed) = &mut self.renewed {
                    renewed.farewells += 1;
                }
                self.peer.received.fetch_max(count, Ordering::Release);
                continue;
            }
            // The engine, which must not wait, closes them.
            let along = Fds::from(fds);
            if !along.are_memory() {
                channel.discard(along.into_owned().unwrap_or_default());
                return Err(invalid("it sent a descriptor that is no shared memory"));
            }
            if mailbox.put(Frame { bytes, along }) {
                // An engine that is gone needs no link.
                let _ = self.engine.control(self.qp);
            }
        }
        self.tell_received(before);
        Ok(true)
    }

    /// Tells the peer how many of its frames have come, if more than `before`.
    fn tell_received(&self, before: Option<u64>) {
        if let Some(renewed) = &self.renewed
            && Some(renewed.received) != before
        {
            self.line.tell_received(renewed.received);
        }
    }

    /// Fails if the peer's process has ended and all that it sent has been read.
    fn process_lives(&self) -> io::Result<()> {
        match self.process.as_ref().is_some_and(|watched| watched.process.has_ended()) {
            true => Err(io::Error::other("the peer's process has ended")),
            false => Ok(()),
        }
    }

    fn hear_farewell(&mut self) -> io::Result<bool> {
        loop {
            let mut bytes = [0; FAREWELL];
            let mut fds = Vec::new();
            let received = self.stream.receive(&mut bytes, &mut fds);
            if !fds.is_empty() {
                drop_elsewhere(fds);
                return Err(io::Error::other("the peer has sent descriptors where none belong"));
            }
            let n = match received {
                Ok((0, _)) => return Err(io::Error::other("the peer has closed the connection")),
                Ok((n, _)) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    return self.process_lives().map(|()| false);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            let Hears::Farewell(said) = &mut self.hears else { return Ok(false) };
            said.extend_from_slice(&bytes[..n]);
            if said.len() > FAREWELL || said.iter().zip(BYE).any(|(a, b)| *a != b) {
                return Err(invalid("it said something that is no farewell"));
            }
            if let Some(count) = farewell(said) {
                self.peer.received.store(count, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests;
