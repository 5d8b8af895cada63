//! Ranks of two hosts meet again when their connection broke.
//!
//! Each rank listens as long as its mesh lives. The rank with the higher number dials; a rank with the lower number that sees
//! the end of the connection first tells the other one to dial. Both are told how many frames the other end has received, and
//! send the rest again ([`crate::mesh::out`]). Where nobody listens any more the rank's process has ended.
//!
//! Threads of their own wait for the network, one for each connection that broke, and one for each greeting. They say what
//! they found to the mesh's reader, which never waits.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::versions::ABI;
use rustix::event::{PollFd, PollFlags};

use super::{
    Answer, GREETING, Hello, Incoming, MAX_ANSWER, MAX_GREETING, STRANGERS, VERSIONS, answer, close, differs,
    envelope, open, plain, send_all, tune,
};
use crate::error::{Error, Result};
use crate::mesh::wait;

/// Time for one attempt to connect, and for the answer then.
const ATTEMPT: Duration = Duration::from_secs(1);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// What a rank needs to meet the others again.
#[derive(Debug)]
pub(in crate::mesh) struct Again {
    listener: TcpListener,
    own: Arc<Own>,
    /// How long a connection may be gone.
    pub(in crate::mesh) recover: Duration,
    /// Greetings that threads are reading.
    greetings: Arc<AtomicUsize>,
}

/// By which a thread says what it has found.
#[derive(Clone)]
pub(in crate::mesh) struct Finder {
    to: Sender<Found>,
    bell: Weak<EventFd>,
}

impl Finder {
    /// `bell` is rung when something is found.
    pub(in crate::mesh) fn new(bell: &Arc<EventFd>) -> (Self, Receiver<Found>) {
        let (to, found) = channel();
        (Finder { to, bell: Arc::downgrade(bell) }, found)
    }

    fn tell(&self, found: Found) {
        // A mesh that is gone needs no connection.
        if self.to.send(found).is_ok()
            && let Some(bell) = self.bell.upgrade()
        {
            bell.ring();
        }
    }
}

/// Who this rank is, and where the others listen.
#[derive(Debug)]
struct Own {
    job: String,
    rank: u32,
    size: u32,
    /// The secret of this job's ranks.
    token: String,
    /// By rank.
    places: Vec<SocketAddr>,
}

/// What a thread found.
pub(in crate::mesh) enum Found {
    /// A higher rank has dialled. It has received so many frames of this rank, and waits for the answer
    /// ([`Again::answer`]).
    Greeted { rank: u32, stream: TcpStream, received: u64 },
    /// A lower rank has answered. It has received so many frames of this rank.
    Met { rank: u32, stream: TcpStream, received: u64 },
    /// A lower rank says that its connection to this rank has ended.
    Told { rank: u32 },
    /// The rank's process has ended, or refuses this rank.
    Gone { rank: u32, why: String },
}

/// Attempts to meet a rank again, by a thread. They end when this is dropped.
pub(in crate::mesh) struct Attempts(Arc<AtomicBool>);

impl Drop for Attempts {
    fn drop(&mut self) {
        // Relaxed: the flag alone is told; no other memory depends on it.
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Again {
    /// `places`: where the ranks listen, by rank; that of rank `rank` is not used.
    pub(super) fn new(
        listener: TcpListener,
        me: &super::Me,
        token: String,
        places: Vec<SocketAddr>,
        recover: Duration,
    ) -> Result<Self> {
        listener.set_nonblocking(true).map_err(Error::io("the socket at which other ranks dial"))?;
        let own = Own { job: me.job.into(), rank: me.rank, size: me.size, token, places };
        Ok(Again { listener, own: Arc::new(own), recover, greetings: Arc::default() })
    }

    /// Where a rank listens, or would.
    #[cfg(test)]
    pub(super) fn place(&self, rank: usize) -> SocketAddr {
        self.own.places[rank]
    }

    #[cfg(test)]
    pub(super) fn token(&self) -> String {
        self.own.token.clone()
    }

    /// Becomes readable when a rank dials.
    pub(in crate::mesh) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Takes those in who have dialled: a thread reads the greeting of each.
    pub(in crate::mesh) fn accept(&self, finder: &Finder) {
        while let Ok((stream, from)) = self.listener.accept() {
            // Relaxed: a count for a limit; it orders no other memory.
            if self.greetings.load(Ordering::Relaxed) >= self.own.size as usize + STRANGERS {
                tracing::warn!(rank = self.own.rank, %from, "closed a connection: too many others say who they are");
                continue;
            }
            self.greetings.fetch_add(1, Ordering::Relaxed);
            let (own, finder) = (self.own.clone(), finder.clone());
            let greetings = self.greetings.clone();
            let read = move || {
                match own.hear(stream) {
                    Ok(found) => finder.tell(found),
                    Err(why) => tracing::warn!(rank = own.rank, %from, "refused: {why}"),
                }
                greetings.fetch_sub(1, Ordering::Relaxed);
            };
            if let Err(e) = std::thread::Builder::new().name("pushgate-greet".into()).spawn(read) {
                self.greetings.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!(rank = self.own.rank, %from, "closed a connection: a thread for its greeting: {e}");
            }
        }
    }

    /// Begins to seek a rank whose connection broke. This rank has received `received` frames of that rank over the
    /// connections before, and takes no more of them.
    pub(in crate::mesh) fn seek(&self, rank: u32, received: u64, finder: &Finder) -> Attempts {
        let stop = Arc::new(AtomicBool::new(false));
        let (own, finder, ended) = (self.own.clone(), finder.clone(), stop.clone());
        let until = Instant::now() + self.recover;
        let seek = move || {
            while !ended.load(Ordering::Relaxed) && Instant::now() < until {
                match own.dial(rank, received) {
                    Some(found) => return finder.tell(found),
                    None => std::thread::sleep(PAUSE),
                }
            }
        };
        if let Err(e) = std::thread::Builder::new().name("pushgate-dial".into()).spawn(seek) {
            tracing::warn!(rank = self.own.rank, "a thread that dials rank {rank} again: {e}");
        }
        Attempts(stop)
    }

    /// Answers a rank that has dialled: this rank has received so many of its frames.
    pub(in crate::mesh) fn answer(&self, stream: &TcpStream, received: u64) -> std::io::Result<()> {
        answer(stream, &Answer::Again { received })
    }

    /// Turns a rank away that has dialled.
    pub(in crate::mesh) fn refuse(&self, stream: &TcpStream, why: &str) {
        let _ = answer(stream, &Answer::Refused(why.into()));
        close(stream);
    }
}

impl Own {
    /// One attempt to meet a rank. `None`: try again.
    fn dial(&self, rank: u32, received: u64) -> Option<Found> {
        let gone = |why: String| Some(Found::Gone { rank, why });
        let place = self.places[rank as usize];
        let stream = match TcpStream::connect_timeout(&place, ATTEMPT) {
            // Where nobody listens, the kernel may connect a socket of this host to itself.
            Ok(s) if s.local_addr().ok() == s.peer_addr().ok() => {
                return gone(format!("nobody listens at {place}"));
            }
            Ok(stream) => stream,
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                return gone(format!("nobody listens at {place}: its process has ended"));
            }
            Err(e) => {
                tracing::debug!("dialling rank {rank} at {place}: {e}");
                return None;
            }
        };
        let until = Instant::now() + ATTEMPT;
        let hello = Hello {
            newest: VERSIONS.newest(),
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            job: self.job.clone(),
            size: self.size,
            rank: self.rank,
            to: rank,
            listens: None,
            token: Some(self.token.clone()),
            again: Some(received),
        };
        tune(&stream, true).and_then(|()| send_all(&stream, &envelope(&hello), until)).ok()?;
        if rank > self.rank {
            // The other rank dials. Meanwhile this one looks whether the other rank is still there.
            close(&stream);
            std::thread::sleep(ATTEMPT / 2);
            return None;
        }
        let mut incoming = Incoming::envelope();
        loop {
            match open(&stream, &mut incoming, MAX_ANSWER) {
                Ok(None) if wait(&mut [PollFd::new(&stream, PollFlags::IN)], until) => {}
                // The connection broke again, or nobody answers.
                Ok(None) | Err(_) => return None,
                Ok(Some((_, body))) => {
                    return match serde_json::from_slice(&body) {
                        Ok(Answer::Again { received }) => Some(Found::Met { rank, stream, received }),
                        Ok(Answer::Refused(why)) => gone(format!("it refused this rank: {}", plain(&why))),
                        _ => gone("its answer is no answer to a rank that dials again".into()),
                    };
                }
            }
        }
    }

    /// Reads a greeting.
    fn hear(&self, stream: TcpStream) -> std::result::Result<Found, String> {
        tune(&stream, true).map_err(|e| e.to_string())?;
        let (until, mut incoming) = (Instant::now() + GREETING, Incoming::envelope());
        let (version, body) = loop {
            match open(&stream, &mut incoming, MAX_GREETING)? {
                Some(all) => break all,
                None if !wait(&mut [PollFd::new(&stream, PollFlags::IN)], until) => {
                    return Err("it sent no greeting in time".into());
                }
                None => {}
            }
        };
        let checked = Hello::read(version, &body, &self.job, self.size).and_then(|hello| self.check(hello));
        match checked {
            Ok((rank, received)) if rank > self.rank => Ok(Found::Greeted { rank, stream, received }),
            Ok((rank, _)) => Ok(Found::Told { rank }),
            Err(why) => {
                let _ = answer(&stream, &Answer::Refused(why.clone()));
                close(&stream);
                Err(why)
            }
        }
    }

    fn check(&self, hello: Hello) -> std::result::Result<(u32, u64), String> {
        if hello.rank == self.rank || hello.rank >= self.size || hello.to != self.rank {
            let allowed = format!("another rank of {}", self.size);
            return differs("rank", &hello.rank, &allowed, "give every rank a number of its own");
        }
        if hello.token.as_deref() != Some(&*self.token) {
            return Err("its token is not that of this job".into());
        }
        let Some(received) = hello.again else {
            return Err("all ranks of this job are there already".into());
        };
        Ok((hello.rank, received))
    }
}
