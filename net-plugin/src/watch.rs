//! One thread that watches the sockets of all connections: the end of a peer ends its queue pair,
//! so that no request waits for that peer. On one host the thread also watches the peer's process,
//! because a process's sockets stay open while a child that it forked lives (a data loader's).
//!
//! An end that closes in order says how many messages it had received. So its peer can tell its
//! requests apart: those that arrived are done, although the last counts may have been lost with
//! the queue pair.
//!
//! Where both ends replace a link that breaks, the socket also carries the frames by which they do. The thread hands the
//! peer's frames to the engine, and sends those of this end that the socket did not take at once.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fdpass::drop_elsewhere;
use pushgate_driver_shim::process::Process;
use pushgate_proxy::connect::{Fds, Frame};
use pushgate_proxy::endpoint::Mailbox;
use pushgate_proxy::engine::{Engine, QpId};
use pushgate_proxy::session::Status;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::error::{Failure, Result};
use crate::log;
use crate::socket::{Channel, Line};

const BYE: [u8; 8] = *b"PGBYE\0\0\0";
const FAREWELL: usize = 16;
const STOP: u64 = u64::MAX;
/// Frames that one connection is heard for before the others are heard.
const TURN: usize = 64;
/// Breaks the links of this process again and again, each time after so many milliseconds, for tests of their replacement.
const BREAK_LINKS: &str = "_PUSHGATE_BREAK_LINKS";

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
        let _ = send(line, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

/// The count in a farewell; `None` if these bytes are none.
fn farewell(bytes: &[u8]) -> Option<u64> {
    let (bye, count) = bytes.split_first_chunk::<8>()?;
    (*bye == BYE).then(|| count.try_into().ok().map(u64::from_le_bytes))?
}

/// What the peer says over the socket.
enum Hears {
    /// A farewell, of which so much has come.
    Farewell(Vec<u8>),
    /// Frames for the engine, and a farewell in a frame.
    Frames(Channel, Mailbox),
}

struct Entry {
    line: Arc<Line>,
    /// The peer's process, if it has a number here.
    process: Option<Process>,
    peer: Arc<Peer>,
    qp: QpId,
    engine: Arc<Engine>,
    hears: Hears,
}

struct Shared {
    epoll: OwnedFd,
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
            // Reports it again, behind the others that were reported.
            Ok(true) => {
                _ = epoll::modify(
                    &self.epoll,
                    entry.line.as_fd(),
                    epoll::EventData::new_u64(id),
                    entry.events(),
                )
            }
            Err(why) => {
                let status = match why.kind() {
                    ErrorKind::InvalidData => {
                        tracing::warn!("queue pair {}: the other end broke the protocol: {why}", entry.qp.0);
                        Status { rank: Some(entry.peer.rank), ..Status::new(abi::PUSHGATE_REFUSED) }
                    }
                    _ => {
                        tracing::debug!("queue pair {}: {why}", entry.qp.0);
                        Status { rank: None, ..Status::new(abi::PUSHGATE_PEER_LOST) }
                    }
                };
                // An engine that is gone has no requests that wait.
                let _ = entry.engine.fail(Some(entry.qp), status);
                entry.unwatch(&self.epoll);
                entries.remove(&id);
            }
        }
    }

    /// Breaks every link that can be replaced.
    #[cold]
    fn break_links(&self) {
        for entry in self.entries().values().filter(|entry| matches!(entry.hears, Hears::Frames(..))) {
            let _ = entry.engine.break_link(entry.qp);
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
    pub fn start() -> Result<Self> {
        const WHAT: &str = "starting the watch of connections";
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Failure::system(WHAT))?;
        let stop = EventFd::new().map_err(Failure::system(WHAT))?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)
            .map_err(Failure::system(WHAT))?;
        let shared = Arc::new(Shared { epoll, entries: Mutex::default() });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("pushgate-watch".into())
            .spawn(move || log::scoped(|| run(&theirs, breaks())))
            .map_err(Failure::system(WHAT))?;
        Ok(Watch { shared, stop, next: AtomicU64::new(0), thread: Some(thread) })
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
        let process = line.peer_pid().and_then(|pid| Process::of(pid).ok());
        let hears = match mailbox {
            Some(mailbox) => Hears::Frames(Channel::of(line.clone()), mailbox),
            None => Hears::Farewell(Vec::new()),
        };
        self.add_entry(Entry { line, process, peer, qp, engine: engine.clone(), hears })
    }

    fn add_entry(&self, entry: Entry) -> Result<u64> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut entries = self.shared.entries();
        let (epoll, failed) = (&self.shared.epoll, Failure::system("watching a connection"));
        // Each event has the same number: what it tells is found by looking at all of the connection.
        let data = epoll::EventData::new_u64(id);
        let mut added = epoll::add(epoll, entry.line.as_fd(), data, entry.events());
        if let (Ok(()), Some(process)) = (added, &entry.process) {
            added = epoll::add(epoll, process, data, epoll::EventFlags::IN);
        }
        if let Err(e) = added {
            entry.unwatch(epoll);
            return Err(failed(e));
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

/// How often links are to be broken.
fn breaks() -> Option<Duration> {
    let value = std::env::var(BREAK_LINKS).ok()?;
    match value.parse() {
        Ok(every @ 1..) => {
            tracing::info!(
                "{BREAK_LINKS} is set: links that can be replaced are broken every {every} ms, for tests"
            );
            Some(Duration::from_millis(every))
        }
        _ => {
            tracing::warn!(
                "invalid {BREAK_LINKS} `{value}`: expected milliseconds, at least 1; no link is broken"
            );
            None
        }
    }
}

/// The watch's thread. `breaks`: how often links are broken.
fn run(shared: &Shared, breaks: Option<Duration>) {
    let mut events = Vec::with_capacity(64);
    let mut broken = Instant::now();
    loop {
        events.clear();
        let limit = breaks.map(|every| {
            if broken.elapsed() >= every {
                shared.break_links();
                broken = Instant::now();
            }
            Timespec::try_from(every.saturating_sub(broken.elapsed())).expect("some milliseconds")
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
            if id == STOP {
                return;
            }
            shared.hear(id);
        }
    }
}

impl Entry {
    /// A forked child of ours may hold both descriptors, so closing them is not enough.
    fn unwatch(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, self.line.as_fd());
        if let Some(process) = &self.process {
            let _ = epoll::delete(epoll, process);
        }
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
        // A peer that takes no more may have said why.
        let sent = self.line.flush();
        for _ in 0..TURN {
            let (bytes, fds) = match channel.receive() {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    sent?;
                    return self.process_lives().map(|()| false);
                }
                Err(e) if e.kind() == ErrorKind::QuotaExceeded => {
                    tracing::warn!("a frame of the other end is lost: {e}");
                    continue;
                }
                Err(e) => return Err(e),
            };
            if let Some(count) = farewell(&bytes) {
                self.peer.received.fetch_max(count, Ordering::Release);
                continue;
            }
            // The engine, which must not wait, closes them.
            let along = Fds::from(fds);
            if !along.are_memory() {
                drop_elsewhere(along);
                return Err(invalid("it sent a descriptor that is no shared memory"));
            }
            if mailbox.put(Frame { bytes, along }) {
                // An engine that is gone needs no link.
                let _ = self.engine.control(self.qp);
            }
        }
        Ok(true)
    }

    /// Fails if the peer's process has ended, of which all that was sent has been read.
    fn process_lives(&self) -> io::Result<()> {
        match self.process.as_ref().is_some_and(Process::has_ended) {
            true => Err(io::Error::other("the peer's process has ended")),
            false => Ok(()),
        }
    }

    fn hear_farewell(&mut self) -> io::Result<bool> {
        loop {
            let mut bytes = [0; FAREWELL];
            let n = match recv(&*self.line, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::Error::other("the peer has closed the connection")),
                Ok((_, n)) => n,
                Err(Errno::AGAIN) => return self.process_lives().map(|()| false),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
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
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use pushgate_proxy::engine::EngineOptions;

    use super::*;
    use crate::socket::Stream;
    use crate::testing::until;

    #[test]
    fn p7_a_peer_whose_process_has_ended_is_lost_though_its_socket_is_open() {
        let bell = EventFd::new().unwrap();
        let engine = Engine::start(bell, EngineOptions::default()).unwrap();
        let watch = Watch::start().unwrap();
        // As where a forked child of the peer holds the other end.
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut peer = Command::new("sleep").arg("600").spawn().unwrap();
        let entry = Entry {
            line: Arc::new(Line::new(Stream::Unix(ours))),
            process: Some(Process::of(peer.id()).unwrap()),
            peer: Arc::default(),
            qp: QpId(0),
            engine: Arc::new(engine),
            hears: Hears::Farewell(Vec::new()),
        };
        watch.add_entry(entry).unwrap();
        assert_eq!(watch.shared.entries().len(), 1);
        peer.kill().unwrap();
        let begin = Instant::now();
        while !watch.shared.entries().is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(120), "its queue pair goes on");
            std::thread::yield_now();
        }
        peer.wait().unwrap();
    }

    /// A connection that replaces its links, and the other end's socket.
    fn with_frames(watch: &Watch) -> (Arc<Line>, Channel) {
        let engine = Engine::start(EventFd::new().unwrap(), EngineOptions::default()).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let line = Arc::new(Line::new(Stream::Unix(ours)));
        let entry = Entry {
            line: line.clone(),
            process: None,
            peer: Arc::default(),
            qp: QpId(0),
            engine: Arc::new(engine),
            hears: Hears::Frames(Channel::of(line.clone()), Mailbox::default()),
        };
        watch.add_entry(entry).unwrap();
        (line, Channel::new(Stream::Unix(theirs)))
    }

    #[test]
    fn p7_frames_that_a_full_socket_did_not_take_are_sent_when_the_peer_reads() {
        let watch = Watch::start().unwrap();
        let (line, mut theirs) = with_frames(&watch);
        let mut sent = 1;
        while line.send(&[7; 4096], Vec::new()).unwrap() {
            sent += 1;
        }
        line.tell(b"last", Vec::new());
        for n in 0..sent {
            assert_eq!(until(|| theirs.receive().unwrap()).0, [7; 4096], "frame {n} of {sent}");
        }
        assert_eq!(until(|| theirs.receive().unwrap()).0, b"last");
    }

    #[test]
    fn p8_a_frame_with_a_descriptor_that_is_no_memory_ends_its_connection() {
        let watch = Watch::start().unwrap();
        let (_line, theirs) = with_frames(&watch);
        theirs.send(b"frame", vec![EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap()]).unwrap();
        until(|| watch.shared.entries().is_empty().then_some(()));
    }

    #[test]
    fn p5_a_count_that_a_closing_peer_has_sent_is_there_once_its_socket_was_listened_to() {
        let watch = Watch::start().unwrap();
        let (_line, theirs) = with_frames(&watch);
        let peer = watch.shared.entries()[&0].peer.clone();
        say_goodbye(theirs.line(), true, 9);
        watch.listen(0);
        assert_eq!(peer.received(), 9);
    }
}
