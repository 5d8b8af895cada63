//! The choice of the wire for the links of a host: io_uring or plain sockets.

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use pushgate_door::Stream;

use super::sockets::{Finish, Readiness, Sockets};
use super::uring::{Ring, RingError, Uring};
use super::wire::{Piece, Wire};

/// What moves the bytes of links over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// io_uring where it is allowed and is faster in a short transfer over loopback, else plain sockets.
    Auto,
    /// io_uring; where the kernel refuses, that is an error.
    Uring,
    /// Plain sockets.
    Socket,
}

/// Makes the wires of a host.
pub struct Wires {
    /// The rings of the engines that drive the links; `None`: plain sockets. Asked when a link is made.
    rings: Option<Mutex<Rings>>,
    /// One thread drives the links of an engine.
    one_thread: bool,
    /// Nothing else will do.
    only: bool,
}

/// The rings of engines. Two engines can't share one: one would read what the other sleeps for.
struct Rings {
    /// For the first engine that asks.
    spare: Option<Arc<Ring>>,
    /// By what each engine asks.
    of: Vec<(Weak<Readiness>, Arc<Ring>)>,
}

/// What the transfer moves each way in a turn: long sends, and short ones to and fro.
const LONG: usize = 64 << 10;
const LONGS: usize = 24;
const SHORT: usize = 64;
const SHORTS: usize = 48;
/// Turns of each wire. The best one counts.
const TURNS: u32 = 4;
/// The transfers of both wires together end within this.
const LIMIT: Duration = Duration::from_millis(60);
/// io_uring is taken where it needs at most this part of the time that sockets need, percent. Between the two lies what
/// differs from run to run.
const FASTER: u32 = 95;

impl Wires {
    /// Makes the choice, and says so in the log. `one_thread`: one thread drives the links.
    pub fn choose(io: Io, one_thread: bool) -> Result<Wires, RingError> {
        Self::choose_from(io, one_thread, || Ring::open(one_thread))
    }

    fn choose_from(
        io: Io,
        one_thread: bool,
        open: impl FnOnce() -> Result<Arc<Ring>, RingError>,
    ) -> Result<Wires, RingError> {
        let sockets = Wires { rings: None, one_thread, only: false };
        let over = |ring, only| {
            let rings = Rings { spare: Some(ring), of: Vec::new() };
            Wires { rings: Some(Mutex::new(rings)), one_thread, only }
        };
        match io {
            Io::Socket => Ok(sockets),
            Io::Uring => Ok(over(open()?, true)),
            Io::Auto => {
                let ring = match open() {
                    Ok(ring) => ring,
                    Err(e) => {
                        tracing::info!("links over TCP use plain sockets: {e}");
                        return Ok(sockets);
                    }
                };
                match compare(&ring) {
                    Ok((uring, socket)) => {
                        let faster = uring * 100 < socket * FASTER;
                        let chosen = if faster { "io_uring" } else { "plain sockets" };
                        tracing::info!(
                            "links over TCP use {chosen}: a transfer over loopback took {uring:?} with io_uring and \
                             {socket:?} with plain sockets"
                        );
                        Ok(if faster { over(ring, false) } else { sockets })
                    }
                    Err(e) => {
                        tracing::info!("links over TCP use plain sockets: comparing them with io_uring: {e}");
                        Ok(sockets)
                    }
                }
            }
        }
    }

    /// A wire over these streams, whose engine asks `readiness`. `finish` takes them when the link ends in order.
    pub fn wire(
        &self,
        streams: Vec<Stream>,
        mut finish: Finish,
        readiness: &Arc<Readiness>,
    ) -> io::Result<Box<dyn Wire>> {
        let ring = self.ring(readiness).transpose();
        let ring = match ring {
            Err(e) if self.only => return Err(io::Error::other(e)),
            ring => ring.ok().flatten(),
        };
        let Some(ring) = ring.filter(|ring| self.only || ring.has_room(streams.len())) else {
            return Ok(Box::new(Sockets::new(streams, finish, readiness)));
        };
        let sockets = streams.into_iter().map(Stream::into_plain).collect::<io::Result<_>>()?;
        let finish = Box::new(move |sockets: Vec<TcpStream>| {
            // A socket that can't be set is closed at once.
            finish(sockets.into_iter().filter_map(|socket| Stream::plain(socket).ok()).collect())
        });
        Ok(Box::new(Uring::new(&ring, sockets, finish)?))
    }

    /// The ring of the engine that asks `readiness`; `None`: plain sockets.
    fn ring(&self, readiness: &Arc<Readiness>) -> Option<Result<Arc<Ring>, RingError>> {
        // A panic leaves the list whole.
        let mut rings = self.rings.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        rings.of.retain(|(engine, _)| engine.strong_count() > 0);
        let found = rings.of.iter().find(|(engine, _)| engine.as_ptr() == Arc::as_ptr(readiness));
        if let Some((_, ring)) = found {
            return Some(Ok(ring.clone()));
        }
        let ring = match rings.spare.take().map_or_else(|| Ring::open(self.one_thread), Ok) {
            Ok(ring) => ring,
            Err(e) => return Some(Err(e)),
        };
        rings.of.push((Arc::downgrade(readiness), ring.clone()));
        Some(Ok(ring))
    }
}

/// How long the transfer takes over io_uring and over sockets, by turns.
fn compare(ring: &Arc<Ring>) -> io::Result<(Duration, Duration)> {
    let until = Instant::now() + LIMIT;
    let readiness = Readiness::new()?;
    let make = |uring: bool| -> io::Result<[Box<dyn Wire>; 2]> {
        let (left, right) = loopback()?;
        let wire = |socket: TcpStream| -> io::Result<Box<dyn Wire>> {
            Ok(if uring {
                Box::new(Uring::new(ring, vec![socket], Box::new(|_| {}))?)
            } else {
                Box::new(Sockets::new(vec![Stream::plain(socket)?], Box::new(|_| {}), &readiness))
            })
        };
        Ok([wire(left)?, wire(right)?])
    };
    let (from, mut to) = (vec![1u8; LONG], vec![0u8; LONG]);
    let mut best = [Duration::MAX; 2];
    let mut pairs = [make(true)?, make(false)?];
    // The first turn of each warms up: pages, and what a socket may hold.
    for turn in 0..=TURNS {
        for (pair, best) in pairs.iter_mut().zip(&mut best) {
            let begin = Instant::now();
            let [left, right] = pair;
            for _ in 0..LONGS {
                carry(&mut **left, &mut **right, &from, &mut to, until)?;
            }
            for _ in 0..SHORTS {
                carry(&mut **left, &mut **right, &from[..SHORT], &mut to[..SHORT], until)?;
                carry(&mut **right, &mut **left, &from[..SHORT], &mut to[..SHORT], until)?;
            }
            if turn > 0 {
                *best = (*best).min(begin.elapsed());
            }
        }
    }
    for mut wire in pairs.into_iter().flatten() {
        while !wire.stopped() {
            std::thread::yield_now();
        }
    }
    Ok((best[0], best[1]))
}

/// Sends bytes over one wire and receives them over the other one, on this thread.
fn carry(a: &mut dyn Wire, b: &mut dyn Wire, from: &[u8], to: &mut [u8], until: Instant) -> io::Result<()> {
    let (mut sent, mut received) = (0, 0);
    let source = from.as_ptr() as usize;
    let target = to.as_mut_ptr() as usize;
    while received < to.len() {
        if sent < from.len() {
            let piece = Piece { address: source + sent, bytes: from.len() - sent };
            // SAFETY: the caller keeps `from` until it has stopped or dropped the wires.
            sent += unsafe { a.send(0, &[piece]) }?;
        }
        a.submit()?;
        if received < to.len() {
            let piece = Piece { address: target + received, bytes: to.len() - received };
            // SAFETY: as above, for `to`, which nobody else uses meanwhile.
            received += unsafe { b.receive(0, &[piece]) }?;
        }
        b.submit()?;
        if Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Two connected sockets of this host.
fn loopback() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let left = TcpStream::connect(listener.local_addr()?)?;
    let from = left.local_addr()?;
    loop {
        let (right, at) = listener.accept()?;
        if at == from {
            left.set_nodelay(true)?;
            right.set_nodelay(true)?;
            return Ok((left, right));
        }
    }
}

#[cfg(test)]
mod tests;
