//! One thread that watches the sockets of all connections: the end of a peer ends its queue pair,
//! so that no request waits for that peer. On one host the thread also watches the peer's process,
//! because a process's sockets stay open while a child that it forked lives (a data loader's).
//!
//! An end that closes in order says how many messages it had received. So its peer can tell its
//! requests apart: those that arrived are done, although the last counts may have been lost with
//! the queue pair.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::process::Process;
use pushgate_proxy::engine::{Engine, QpId};
use pushgate_proxy::session::Status;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::error::{Failure, Result};
use crate::log;
use crate::socket::Stream;

const BYE: [u8; 8] = *b"PGBYE\0\0\0";
const FAREWELL: usize = 16;
const STOP: u64 = u64::MAX;

/// What is known about the other end.
#[derive(Default)]
pub struct Peer {
    received: AtomicU64,
}

impl Peer {
    /// How many of our messages the peer had received when it closed.
    #[inline]
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Acquire)
    }
}

/// Tells the peer that this end closes, having received `received` of its messages.
pub fn say_goodbye(stream: &Stream, received: u64) {
    let mut bytes = [0; FAREWELL];
    bytes[..8].copy_from_slice(&BYE);
    bytes[8..].copy_from_slice(&received.to_le_bytes());
    // An error means that the peer is gone already.
    let _ = send(stream, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

struct Entry {
    stream: Arc<Stream>,
    /// The peer's process, if it has a number here.
    process: Option<Process>,
    peer: Arc<Peer>,
    qp: QpId,
    engine: Arc<Engine>,
    said: Vec<u8>,
}

struct Shared {
    epoll: OwnedFd,
    entries: Mutex<HashMap<u64, Entry>>,
}

impl Shared {
    fn entries(&self) -> MutexGuard<'_, HashMap<u64, Entry>> {
        self.entries.lock().unwrap_or_else(|e| e.into_inner())
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
            .spawn(move || log::scoped(|| run(&theirs)))
            .map_err(Failure::system(WHAT))?;
        Ok(Watch { shared, stop, next: AtomicU64::new(0), thread: Some(thread) })
    }

    /// Watches the socket of a queue pair of `engine`, and the process at its other end. The number
    /// returned is for [`Watch::remove`].
    pub fn add(&self, stream: Arc<Stream>, peer: Arc<Peer>, engine: &Arc<Engine>, qp: QpId) -> Result<u64> {
        // The peer has just sent something, so the process number is still its own.
        let process = stream.peer_pid().and_then(|pid| Process::of(pid).ok());
        self.add_entry(Entry { stream, process, peer, qp, engine: engine.clone(), said: Vec::new() })
    }

    fn add_entry(&self, entry: Entry) -> Result<u64> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut entries = self.shared.entries();
        let (epoll, failed) = (&self.shared.epoll, Failure::system("watching a connection"));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        // Both events have the same meaning: look whether the peer is still there.
        let data = epoll::EventData::new_u64(id);
        let mut added = epoll::add(epoll, entry.stream.as_fd(), data, flags);
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

fn run(shared: &Shared) {
    let mut events = Vec::with_capacity(64);
    loop {
        events.clear();
        match epoll::wait(&shared.epoll, rustix::buffer::spare_capacity(&mut events), None) {
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
            // Held while the queue pair is ended, so that `remove` returns only after that.
            let mut entries = shared.entries();
            let Some(entry) = entries.get_mut(&id) else { continue };
            match entry.hear() {
                Ok(()) => continue,
                Err(why) => {
                    tracing::debug!("queue pair {}: {why}", entry.qp.0);
                    let status = Status { rank: None, ..Status::new(abi::PUSHGATE_PEER_LOST) };
                    // An engine that is gone has no requests that wait.
                    let _ = entry.engine.fail(Some(entry.qp), status);
                    entry.unwatch(&shared.epoll);
                    entries.remove(&id);
                }
            }
        }
    }
}

impl Entry {
    /// A forked child of ours may hold both descriptors, so closing them is not enough.
    fn unwatch(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, self.stream.as_fd());
        if let Some(process) = &self.process {
            let _ = epoll::delete(epoll, process);
        }
    }

    /// Reads what the peer sends; fails when the peer is gone.
    fn hear(&mut self) -> io::Result<()> {
        loop {
            let mut bytes = [0; FAREWELL];
            match recv(&*self.stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::Error::other("the peer has closed the connection")),
                Ok((_, n)) => self.said.extend_from_slice(&bytes[..n]),
                // Everything that the process sent before it ended has been read.
                Err(Errno::AGAIN) if self.process.as_ref().is_some_and(Process::has_ended) => {
                    return Err(io::Error::other("the peer's process has ended"));
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            if self.said.len() > FAREWELL || self.said.iter().zip(BYE).any(|(a, b)| *a != b) {
                return Err(io::Error::other("the peer said something that is no farewell"));
            }
            if let Some(count) = self.said.get(8..FAREWELL) {
                let count = u64::from_le_bytes(count.try_into().expect("eight bytes"));
                self.peer.received.store(count, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use pushgate_proxy::engine::EngineOptions;

    use super::*;

    #[test]
    fn p7_a_peer_whose_process_has_ended_is_lost_though_its_socket_is_open() {
        let bell = EventFd::new().unwrap();
        let engine = Engine::start(bell, EngineOptions::default()).unwrap();
        let watch = Watch::start().unwrap();
        // As where a forked child of the peer holds the other end.
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut peer = Command::new("sleep").arg("600").spawn().unwrap();
        let entry = Entry {
            stream: Arc::new(Stream::Unix(ours)),
            process: Some(Process::of(peer.id()).unwrap()),
            peer: Arc::default(),
            qp: QpId(0),
            engine: Arc::new(engine),
            said: Vec::new(),
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
}
