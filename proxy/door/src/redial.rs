//! Two processes of different hosts meet again when the TCP connection between them broke.
//!
//! Each process listens as long as its connections live. One side of a connection dials; the other side, if it
//! sees the end of the connection first, tells the one that dials. Both are told how many frames the other end has
//! received, and send the rest again ([`Kept`]). Where nobody listens any more the process has ended.
//!
//! Each connection goes through the [`door`](crate). Threads of their own dial, one for each connection that broke, and
//! say what they found to the owner's thread, which never waits. [`Party`] says who the owner is and what its greetings say.

pub mod envelope;
mod kept;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use envelope::{HEADER, Incoming, envelope, opened, send_all, tune, wait};
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Foreign;
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use crate::addresses::routes;
use crate::{Arrival, Door, DoorError, Limits, PASSAGE, Refused, Stream, Terms, dial as dial_door};
pub use kept::Kept;

/// Time for one attempt to connect and to prove the secret, and for the answer then.
const ATTEMPT: Duration = Duration::from_secs(1);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
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

    /// Whether this end of the connection dials. Otherwise the other one does, and this end tells it to, and looks whether
    /// it is still there.
    fn dials(&self, key: Self::Key) -> bool;

    /// Where the other end listens, in the order in which its addresses are tried.
    fn places(&self, key: Self::Key) -> Vec<SocketAddr>;

    /// What this end and the one that listens there must agree on.
    fn terms(&self, key: Self::Key) -> Terms;

    /// This end's greeting. This end has received `received` frames.
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
        stream: Stream,
        /// How many frames of this end the other end has received.
        received: u64,
    },
    /// The other end has answered.
    Met {
        /// The connection.
        key: K,
        /// The next connection's stream.
        stream: Stream,
        /// How many frames of this end the other end has received.
        received: u64,
    },
    /// The other end says that its connection to this end has ended.
    Told {
        /// The connection.
        key: K,
        /// How many frames of this end the other end has received. A connection over which it has told of more is another one.
        received: u64,
    },
    /// The other end's process has ended, or refuses this end.
    Gone {
        /// The connection.
        key: K,
        /// How this end knows.
        why: String,
        /// The messages that the other end had received when it was closed in order.
        closed: Option<u64>,
    },
}

impl<K: Copy> Found<K> {
    /// The key of the connection about which something was found.
    pub fn key(&self) -> K {
        match self {
            Found::Greeted { key, .. }
            | Found::Met { key, .. }
            | Found::Told { key, .. }
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
    door: Door,
    party: Arc<P>,
    /// How long a connection may be gone.
    recover: Duration,
}

/// What a door for those who dial again spends, with `places` places.
pub fn limits(places: usize) -> Limits {
    Limits { places, greeting: HEADER + MAX_GREETING, time: PASSAGE }
}

impl<P: Party> Again<P> {
    /// `door`: where the others dial.
    pub fn new(door: Door, party: P, recover: Duration) -> Self {
        Again { door, party: Arc::new(party), recover }
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
        self.door.as_fd()
    }

    /// Takes those in who have dialled.
    pub fn accept(&self, finder: &Finder<P::Key>) {
        while let Some(arrival) = self.door.next() {
            let from = arrival.from;
            match hear(&*self.party, arrival) {
                Ok(Some(found)) => finder.tell(found),
                Ok(None) => {}
                Err(why) => limited!(warn, 0u32, %from, "refused one who dials again: {why}"),
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

    /// Answers one who has dialled: this end has received `received` of its frames.
    pub fn answer(&self, stream: &Stream, received: u64) -> std::io::Result<()> {
        say(&*self.party, stream, &Answer::Again { received })
    }

    /// Turns one away who has dialled.
    pub fn refuse(&self, stream: &Stream, why: &str) {
        turn_away(&*self.party, stream, &Answer::Refused(why.into()));
    }
}

/// Starts a thread that logs where the calling one does.
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let log = tracing::dispatcher::get_default(Clone::clone);
    let scoped = move || tracing::dispatcher::with_default(&log, work);
    std::thread::Builder::new().name(name.into()).spawn(scoped).map(drop)
}

/// Sends an answer, as far as the socket takes it: the owner's thread waits for nobody.
fn say<P: Party>(party: &P, stream: &Stream, answer: &Answer) -> std::io::Result<()> {
    send_all(stream, &envelope(party.version(), answer), Instant::now())
}

fn turn_away<P: Party>(party: &P, stream: &Stream, answer: &Answer) {
    // Its sender receives the reason, or finds the connection closed.
    let _ = say(party, stream, answer);
    stream.close();
}

/// One attempt to meet the other end. `None`: try again.
fn dial<P: Party>(party: &P, key: P::Key, received: u64) -> Option<Found<P::Key>> {
    let hello = envelope(party.version(), &party.greeting(key, received));
    let (terms, mut ended) = (party.terms(key), Vec::new());
    let places = routes(&party.places(key));
    for place in &places {
        match dial_door(*place, &terms, &hello, Instant::now() + ATTEMPT) {
            Ok(stream) => return answered(party, key, stream),
            Err(DoorError::Connect { error, .. }) if error.kind() == ErrorKind::ConnectionRefused => {
                ended.push(format!("nobody listens at {place}: its process has ended"));
            }
            Err(DoorError::Refused(
                why @ (Refused::Version(_)
                | Refused::Purpose { .. }
                | Refused::Tls { .. }
                | Refused::Secret { .. }
                | Refused::Reflected
                | Refused::Proof),
            )) => ended.push(format!("another process listens at {place}: {why}")),
            Err(e) => tracing::debug!("dialling {place} again: {e}"),
        }
    }
    // At one address the process has ended; of several another one may lead to it again.
    match !places.is_empty() && ended.len() == places.len() {
        true => Some(Found::Gone { key, why: ended.join("; "), closed: None }),
        false => None,
    }
}

/// Reads the answer to one who has dialled. `None`: try again.
fn answered<P: Party>(party: &P, key: P::Key, stream: Stream) -> Option<Found<P::Key>> {
    let gone = |why: String, closed| Some(Found::Gone { key, why, closed });
    let until = Instant::now() + ATTEMPT;
    tune(&stream, true).ok()?;
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
        Some(Ok(Answer::Refused(why))) => {
            gone(format!("it refused this end: {}", Foreign::sentence(why)), None)
        }
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
fn hear<P: Party>(party: &P, arrival: Arrival) -> Result<Option<Found<P::Key>>, String> {
    let Arrival { stream, greeting, .. } = arrival;
    tune(&stream, true).map_err(|e| e.to_string())?;
    let (version, body) = opened(&greeting)?;
    match party.check(version, body) {
        Ok((key, received)) if party.dials(key) => Ok(Some(Found::Told { key, received })),
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Write;
    use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};

    use pushgate_tests::fuzz::{fuzz, kind};

    use super::*;
    use crate::{Purpose, Secret};

    /// One connection, whose greeting is a number alone.
    struct One {
        at: SocketAddr,
    }

    impl Party for One {
        type Key = ();

        fn version(&self) -> u32 {
            3
        }

        fn dials(&self, _: ()) -> bool {
            true
        }

        fn places(&self, _: ()) -> Vec<SocketAddr> {
            vec![self.at]
        }

        fn terms(&self, _: ()) -> Terms {
            Terms { secret: Secret::public(), purpose: Purpose::MESH, tls: false }
        }

        fn greeting(&self, _: (), received: u64) -> impl Serialize {
            received
        }

        fn check(&self, _: u32, body: &[u8]) -> Result<((), u64), Option<Answer>> {
            serde_json::from_slice(body).map(|received| ((), received)).map_err(|_| None)
        }
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_answer_to_one_who_dials_again_makes_its_thread_panic_or_quotes_more_than_a_line() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let party = One { at: listener.local_addr().unwrap() };
        let answers = [
            Answer::Again { received: 7 },
            Answer::Closed { received: u64::MAX },
            Answer::Refused("its token is that of no connection of this process".into()),
        ];
        let seeds = answers.map(|answer| envelope(party.version(), &answer));
        let taken = Cell::new(0);
        let target = |bytes: &[u8]| {
            let mut peer = TcpStream::connect(party.at).unwrap();
            // The peer ends with a reset, so that its port is free at once.
            rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
            let stream = Stream::plain(listener.accept().unwrap().0).unwrap();
            peer.write_all(bytes).unwrap();
            peer.shutdown(Shutdown::Write).unwrap();
            match answered(&party, (), stream) {
                None => 0,
                Some(Found::Met { received, .. }) => {
                    taken.set(taken.get() + 1);
                    let again = envelope(party.version(), &Answer::Again { received });
                    let (_, body) = opened(&again).unwrap();
                    assert!(
                        matches!(serde_json::from_slice(body), Ok(Answer::Again { received: n }) if n == received)
                    );
                    1
                }
                Some(Found::Gone { why, closed, .. }) => {
                    taken.set(taken.get() + usize::from(closed.is_some() || why.starts_with("it refused")));
                    assert!(!why.contains(char::is_control) && why.len() <= MAX_ANSWER, "{why:?}");
                    kind(why) ^ u64::from(closed.is_some())
                }
                Some(Found::Greeted { .. } | Found::Told { .. }) => unreachable!("nobody has greeted"),
            }
        };
        seeds.iter().for_each(|seed| _ = target(seed));
        assert_eq!(taken.get(), seeds.len(), "each answer is understood");
        fuzz(&seeds, target);
    }
}
