//! Two processes of different hosts meet again when the TCP connection between them broke.
//!
//! Each process listens as long as its connections live. One side of a connection dials; the other side, if it
//! sees the end of the connection first, tells the one that dials. Both are told how many frames the other end has
//! received, and send the rest again ([`Kept`]). Where nobody listens any more the process has ended.
//!
//! Threads of their own wait for the network, one for each connection that broke, and one for each greeting. They say what
//! they found to the owner's thread, which never waits. [`Party`] says who the owner is and what its greetings say.

pub mod envelope;
mod kept;

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use envelope::{Incoming, close, envelope, plain, send_all, tune, wait};
pub use kept::Kept;

/// Time for one attempt to connect, and for the answer then.
const ATTEMPT: Duration = Duration::from_secs(1);
/// How long a process without descriptors waits before it takes in another one who dials.
const NOT_NOW: Duration = Duration::from_millis(100);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// Time within which one who has connected must say who it is.
const GREETING: Duration = Duration::from_secs(5);
/// The most bytes of a greeting of one who dials again.
const MAX_GREETING: usize = 1024;
/// The most bytes of the answer.
const MAX_ANSWER: usize = 4096;

/// Who meets others again: what a greeting says, and which ones are taken.
pub trait Party: Send + Sync + 'static {
    /// Names a connection at this end.
    type Key: Copy + Send + 'static;

    /// The version in front of greetings and answers.
    fn version(&self) -> u32;

    /// The most greetings that are read side by side.
    fn most(&self) -> usize;

    /// Whether this end of the connection dials. Otherwise the other one does, and this end tells it to, and looks whether
    /// it is still there.
    fn dials(&self, key: Self::Key) -> bool;

    /// Where the other end listens.
    fn place(&self, key: Self::Key) -> SocketAddr;

    /// This end's greeting. It has received so many frames.
    fn greeting(&self, key: Self::Key, received: u64) -> impl Serialize;

    /// Reads the greeting of one who has dialled: which connection is meant, and how many frames the other end has received.
    /// Fails with the answer by which it is turned away; without one it is to try again.
    fn check(&self, version: u32, body: &[u8]) -> Result<(Self::Key, u64), Option<Answer>>;
}

/// The answer to one who has dialled again.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The connection goes on.
    Again {
        /// How many frames have been received.
        received: u64,
    },
    /// This end was closed in order.
    Closed {
        /// How many messages it had received then.
        received: u64,
    },
    /// The one who has dialled is turned away, for this reason.
    Refused(String),
}

/// What a thread found about a connection.
pub enum Found<K> {
    /// The other end has dialled, and waits for the answer ([`Again::answer`]).
    Greeted {
        /// The connection.
        key: K,
        /// The next connection's stream.
        stream: TcpStream,
        /// How many frames of this end the other end has received.
        received: u64,
    },
    /// The other end has answered.
    Met {
        /// The connection.
        key: K,
        /// The next connection's stream.
        stream: TcpStream,
        /// How many frames of this end the other end has received.
        received: u64,
    },
    /// The other end says that its connection to this end has ended.
    Told {
        /// The connection.
        key: K,
    },
    /// The other end's process has ended, or refuses this end.
    Gone {
        /// The connection.
        key: K,
        /// How this end knows.
        why: String,
        /// The other end was closed in order, when it had received so many messages.
        closed: Option<u64>,
    },
}

impl<K: Copy> Found<K> {
    /// The connection.
    pub fn key(&self) -> K {
        match self {
            Found::Greeted { key, .. }
            | Found::Met { key, .. }
            | Found::Told { key }
            | Found::Gone { key, .. } => *key,
        }
    }
}

/// By which a thread says what it has found.
pub struct Finder<K> {
    to: Sender<Found<K>>,
    bell: Weak<EventFd>,
}

impl<K> Clone for Finder<K> {
    fn clone(&self) -> Self {
        Finder { to: self.to.clone(), bell: self.bell.clone() }
    }
}

impl<K> Finder<K> {
    /// `bell` is rung when something is found.
    pub fn new(bell: &Arc<EventFd>) -> (Self, Receiver<Found<K>>) {
        let (to, found) = channel();
        (Finder { to, bell: Arc::downgrade(bell) }, found)
    }

    fn tell(&self, found: Found<K>) {
        // An owner that is gone needs no connection.
        if self.to.send(found).is_ok()
            && let Some(bell) = self.bell.upgrade()
        {
            bell.ring();
        }
    }
}

/// Attempts to meet a peer again, by a thread. They end when this is dropped.
pub struct Attempts(Arc<AtomicBool>);

impl Drop for Attempts {
    fn drop(&mut self) {
        // Relaxed: the flag alone is told; no other memory depends on it.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What a process needs to meet others again.
#[derive(Debug)]
pub struct Again<P> {
    listener: TcpListener,
    party: Arc<P>,
    /// How long a connection may be gone.
    recover: Duration,
    /// Greetings that threads are reading.
    greetings: Arc<AtomicUsize>,
}

impl<P: Party> Again<P> {
    /// `listener`: where the others dial.
    pub fn new(listener: TcpListener, party: P, recover: Duration) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Again { listener, party: Arc::new(party), recover, greetings: Arc::default() })
    }

    /// Who meets others here.
    pub fn party(&self) -> &P {
        &self.party
    }

    /// How long a connection may be gone.
    pub fn recover(&self) -> Duration {
        self.recover
    }

    /// Becomes readable when somebody dials.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Takes those in who have dialled: a thread reads the greeting of each.
    pub fn accept(&self, finder: &Finder<P::Key>) {
        loop {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == ErrorKind::Interrupted || e.kind() == ErrorKind::ConnectionAborted => {
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // No descriptor is left, for example. The connection still waits in the listener, which stays readable, so
                // without this pause the caller would spin.
                Err(e) => {
                    tracing::warn!("taking in one who dials again: {e}");
                    std::thread::sleep(NOT_NOW);
                    break;
                }
            };
            // Relaxed: a count for a limit; it orders no other memory.
            if self.greetings.load(Ordering::Relaxed) >= self.party.most() {
                tracing::warn!(%from, "closed a connection: too many others say who they are");
                continue;
            }
            self.greetings.fetch_add(1, Ordering::Relaxed);
            let (party, finder) = (self.party.clone(), finder.clone());
            let greetings = self.greetings.clone();
            let read = move || {
                match hear(&*party, stream) {
                    Ok(Some(found)) => finder.tell(found),
                    Ok(None) => {}
                    Err(why) => tracing::warn!(%from, "refused one who dials again: {why}"),
                }
                greetings.fetch_sub(1, Ordering::Relaxed);
            };
            if let Err(e) = spawn("pushgate-greet", read) {
                self.greetings.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!(%from, "closed a connection: a thread for its greeting: {e}");
            }
        }
    }

    /// Begins to seek the other end of a connection that broke. This end has received `received` frames over the
    /// connections before, and takes no more of them.
    pub fn seek(&self, key: P::Key, received: u64, finder: &Finder<P::Key>) -> Attempts {
        let stop = Arc::new(AtomicBool::new(false));
        let (party, finder, ended) = (self.party.clone(), finder.clone(), stop.clone());
        let until = Instant::now() + self.recover;
        let seek = move || {
            while !ended.load(Ordering::Relaxed) && Instant::now() < until {
                match dial(&*party, key, received) {
                    Some(found) => return finder.tell(found),
                    None => std::thread::sleep(PAUSE),
                }
            }
        };
        if let Err(e) = spawn("pushgate-dial", seek) {
            tracing::warn!("a thread that dials again: {e}");
        }
        Attempts(stop)
    }

    /// Answers one who has dialled: this end has received so many of its frames.
    pub fn answer(&self, stream: &TcpStream, received: u64) -> std::io::Result<()> {
        say(&*self.party, stream, &Answer::Again { received })
    }

    /// Turns one away who has dialled.
    pub fn refuse(&self, stream: &TcpStream, why: &str) {
        turn_away(&*self.party, stream, &Answer::Refused(why.into()));
    }
}

/// Starts a thread that logs where the calling one does.
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let log = tracing::dispatcher::get_default(Clone::clone);
    let scoped = move || tracing::dispatcher::with_default(&log, work);
    std::thread::Builder::new().name(name.into()).spawn(scoped).map(drop)
}

fn say<P: Party>(party: &P, stream: &TcpStream, answer: &Answer) -> std::io::Result<()> {
    send_all(stream, &envelope(party.version(), answer), Instant::now() + GREETING)
}

fn turn_away<P: Party>(party: &P, stream: &TcpStream, answer: &Answer) {
    // Its sender receives the reason, or finds the connection closed.
    let _ = say(party, stream, answer);
    close(stream);
}

/// One attempt to meet the other end. `None`: try again.
fn dial<P: Party>(party: &P, key: P::Key, received: u64) -> Option<Found<P::Key>> {
    let gone = |why: String, closed| Some(Found::Gone { key, why, closed });
    let place = party.place(key);
    let stream = match TcpStream::connect_timeout(&place, ATTEMPT) {
        // Where nobody listens, the kernel may connect a socket of this host to itself.
        Ok(s) if s.local_addr().ok() == s.peer_addr().ok() => {
            return gone(format!("nobody listens at {place}"), None);
        }
        Ok(stream) => stream,
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
            return gone(format!("nobody listens at {place}: its process has ended"), None);
        }
        Err(e) => {
            tracing::debug!("dialling {place} again: {e}");
            return None;
        }
    };
    let until = Instant::now() + ATTEMPT;
    let hello = envelope(party.version(), &party.greeting(key, received));
    tune(&stream, true).and_then(|()| send_all(&stream, &hello, until)).ok()?;
    let mut incoming = Incoming::default();
    let answer = loop {
        match incoming.open(&stream, MAX_ANSWER) {
            Ok(None) if wait(&mut [PollFd::new(&stream, PollFlags::IN)], until) => {}
            // The connection broke again, or nobody answers, as where the other end dials.
            Ok(None) | Err(_) => break None,
            Ok(Some((_, body))) => break Some(serde_json::from_slice(&body)),
        }
    };
    match answer {
        Some(Ok(Answer::Again { received })) if party.dials(key) => {
            Some(Found::Met { key, stream, received })
        }
        Some(Ok(Answer::Closed { received })) => gone("it was closed".into(), Some(received)),
        Some(Ok(Answer::Refused(why))) => gone(format!("it refused this end: {}", plain(&why)), None),
        Some(_) => gone("its answer is no answer to one who dials again".into(), None),
        None => {
            if !party.dials(key) {
                // The other end dials. Meanwhile this one looks whether the other end is still there.
                std::thread::sleep(ATTEMPT / 2);
            }
            None
        }
    }
}

/// Reads the greeting of one who has dialled. `None`: there is nothing to meet again for now.
fn hear<P: Party>(party: &P, stream: TcpStream) -> Result<Option<Found<P::Key>>, String> {
    tune(&stream, true).map_err(|e| e.to_string())?;
    let (until, mut incoming) = (Instant::now() + GREETING, Incoming::default());
    let (version, body) = loop {
        match incoming.open(&stream, MAX_GREETING)? {
            Some(all) => break all,
            None if !wait(&mut [PollFd::new(&stream, PollFlags::IN)], until) => {
                return Err("it sent no greeting in time".into());
            }
            None => {}
        }
    };
    match party.check(version, &body) {
        Ok((key, _)) if party.dials(key) => Ok(Some(Found::Told { key })),
        Ok((key, received)) => Ok(Some(Found::Greeted { key, stream, received })),
        Err(answer) => {
            if let Some(answer) = &answer {
                turn_away(party, &stream, answer);
            }
            match answer {
                Some(Answer::Refused(why)) => Err(why),
                _ => Ok(None),
            }
        }
    }
}
