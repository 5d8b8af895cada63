//! The ranks of several hosts, joined by TCP. Rank 0 listens at the rendezvous. Every other rank
//! connects to rank 0 and says who it is and where it listens itself. Once all ranks are there,
//! rank 0 tells each where the others listen. Then each rank connects to all lower ranks, except
//! rank 0, to which it is connected already.
//!
//! The port is open to every host that reaches it. So a greeting is limited in bytes and in time,
//! all greetings are read side by side, and a wrong one costs only its sender the connection. None
//! of this keeps out a sender that wants to get in: docs/operations.md.

use std::fmt::Display;
use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use pushgate_driver_shim::versions::{ABI, Versions};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use serde::{Deserialize, Serialize};

use super::wait;
use crate::error::{Error, Result};

/// First bytes of every greeting and answer. The magic, the version and the length that follow, and
/// the refusal stay the same in all versions, so that any two versions can tell each other that
/// they do not fit.
const MAGIC: [u8; 8] = *b"PUSHGATE";
/// Versions that this build speaks of everything that goes over these connections.
const VERSIONS: Versions = Versions::new(3, 3);
/// Length of the header: magic, version, length of the body.
const HEADER: usize = 16;
const MAX_GREETING: usize = 1024;
const MAX_ANSWER: usize = 1 << 16;
/// Time within which a rank that has connected must say who it is.
const GREETING: Duration = Duration::from_secs(5);
/// How many connections may be about to greet, in addition to one for each rank.
const STRANGERS: usize = 64;
/// The longest name of a job: it fits into a greeting, however it is escaped, and into a socket's
/// name.
const MAX_JOB: usize = 80;

/// A greeting: who connects, and to which rank.
#[derive(Serialize, Deserialize)]
struct Hello {
    /// The newest version that the sender speaks, if that is another than the header's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest: Option<u32>,
    abi: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest_abi: Option<u32>,
    job: String,
    size: u32,
    rank: u32,
    to: u32,
    /// Sent to rank 0 only: where this rank listens.
    listens: Option<SocketAddr>,
    /// Sent to other ranks only: the secret that rank 0 gave to this job's ranks alone.
    token: Option<String>,
}

/// The part of a greeting that tells whether the rest can be read.
#[derive(Deserialize)]
struct Spoken {
    newest: Option<u32>,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    /// From rank 0: where ranks 1, 2, ... listen.
    Table {
        token: String,
        addresses: Vec<SocketAddr>,
    },
    Welcome,
    Refused(String),
}

// ----------------------------------------------------------------- greetings

/// A greeting or an answer that is still arriving. It is read without waiting, so a peer that stops
/// in the middle does not hold up anyone else.
struct Incoming {
    bytes: Vec<u8>,
    want: usize,
}

impl Incoming {
    fn envelope() -> Self {
        Incoming { bytes: Vec::new(), want: HEADER }
    }

    /// Reads what is there, never more than is wanted. True when everything is there.
    fn fill(&mut self, stream: &TcpStream) -> io::Result<bool> {
        // Memory grows with what arrived, not with the announced length.
        let mut chunk = [0; 16 << 10];
        let most = (self.want - self.bytes.len()).min(chunk.len());
        match recv(stream, &mut chunk[..most], RecvFlags::DONTWAIT) {
            Ok((_, 0)) if self.bytes.is_empty() => {
                Err(io::Error::new(ErrorKind::UnexpectedEof, "peer closed the connection"))
            }
            Ok((_, 0)) => {
                let text =
                    format!("peer closed within a frame, after {} of {} bytes", self.bytes.len(), self.want);
                Err(io::Error::new(ErrorKind::ConnectionReset, text))
            }
            Ok((_, n)) => {
                self.bytes.extend_from_slice(&chunk[..n]);
                Ok(self.bytes.len() == self.want)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().expect("four bytes"))
    }
}

fn send_all(stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        // NOSIGNAL: in a host program in C, SIGPIPE may still end the process.
        match send(stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if !wait(&mut [PollFd::new(stream, PollFlags::OUT)], deadline) {
                    let text = format!("the peer did not take a frame, {} bytes left", bytes.len());
                    return Err(io::Error::new(ErrorKind::TimedOut, text));
                }
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Closes a connection so that the last bytes we sent still arrive: if unread bytes were left, the
/// kernel would send a reset and discard what it has not sent yet.
pub(super) fn close(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let mut chunk = [0; 16 << 10];
    for _ in 0..1024 {
        match recv(stream, &mut chunk[..], RecvFlags::DONTWAIT) {
            Ok((_, n)) if n > 0 => {}
            _ => return,
        }
    }
}

fn envelope(body: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_vec(body).expect("plain data");
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSIONS.oldest().to_le_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// Returns version and body of a greeting or an answer, once it is complete.
fn open(
    stream: &TcpStream,
    incoming: &mut Incoming,
    max: usize,
) -> std::result::Result<Option<(u32, Vec<u8>)>, String> {
    loop {
        let full = incoming.fill(stream).map_err(|e| e.to_string())?;
        let begun = incoming.bytes.len().min(MAGIC.len());
        if incoming.bytes[..begun] != MAGIC[..begun] {
            return Err("it does not speak pushgate's protocol".into());
        }
        if !full {
            return Ok(None);
        }
        let length = incoming.word(12) as usize;
        if length > max {
            return Err(format!("a greeting or answer of {length} bytes, at most {max} allowed"));
        }
        if incoming.bytes.len() == HEADER + length {
            return Ok(Some((incoming.word(8), incoming.bytes.split_off(HEADER))));
        }
        incoming.want = HEADER + length;
    }
}

fn answer(stream: &TcpStream, answer: &Answer) -> io::Result<()> {
    send_all(stream, &envelope(answer), Instant::now() + GREETING)
}

/// Text from another host, made fit to stand within one line of ours.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(1000).collect()
}

/// Sets keepalive and timeouts, so that a host that is gone is noticed in about ten seconds, idle
/// or not.
fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(4))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_tcp_user_timeout(stream, 10_000)?;
    Ok(())
}

// ---------------------------------------------------------------- rendezvous

/// Opens rank 0's listening socket at the rendezvous.
pub(super) fn listen_at(rendezvous: &str) -> Result<TcpListener> {
    TcpListener::bind(rendezvous).map_err(|e| match e.kind() {
        ErrorKind::AddrInUse => Error::io(format!(
            "listening as rank 0 at {rendezvous}: another program or job has that port, choose another for \
             `rendezvous`"
        ))(e),
        _ => Error::config(
            "rendezvous",
            rendezvous,
            format!("an address and port of the host where rank 0 runs ({e})"),
        ),
    })
}

/// A connection that has not said yet who it is.
struct Greeting {
    from: SocketAddr,
    stream: TcpStream,
    incoming: Incoming,
    until: Instant,
}

/// This rank while it connects to the others.
pub(super) struct Me<'a> {
    job: &'a str,
    rank: u32,
    size: u32,
    timeout: Duration,
    deadline: Instant,
}

type Streams = Vec<Option<TcpStream>>;

impl<'a> Me<'a> {
    pub(super) fn new(job: &'a str, rank: u32, size: u32, timeout: Duration) -> Result<Self> {
        if job.len() > MAX_JOB {
            return Err(Error::config("job", job, format!("a name of at most {MAX_JOB} bytes")));
        }
        Ok(Me { job, rank, size, timeout, deadline: Instant::now() + timeout })
    }

    /// Rank 0: waits for all other ranks and tells each where the others listen.
    pub(super) fn gather(&self, listener: &TcpListener) -> Result<Streams> {
        let places = self.accept(listener, None)?;
        let mut random = [0; 16];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut f| f.read_exact(&mut random))
            .map_err(Error::io("a token for the job from /dev/urandom"))?;
        let token = random.iter().map(|b| format!("{b:02x}")).collect();
        let addresses = places.iter().flatten().map(|(hello, _)| hello.listens.expect("checked")).collect();
        self.settle(places, &Answer::Table { token, addresses })
    }

    /// Any other rank: meets rank 0, then connects to lower ranks and accepts higher ranks.
    pub(super) fn join(&self, rendezvous: &str, host: &str) -> Result<Streams> {
        let mut streams: Streams = (0..self.size).map(|_| None).collect();
        let first = self.dial(0, rendezvous)?;
        let ip = match host {
            "auto" => first.local_addr().map_err(Error::io("local address"))?.ip(),
            given => given.parse::<IpAddr>().map_err(|e| bad_host(given, e))?,
        };
        let listener = TcpListener::bind((ip, 0)).map_err(|e| bad_host(&ip.to_string(), e))?;
        let listens = listener.local_addr().map_err(Error::io("local address"))?;
        let (token, addresses) = match self.greet(&first, 0, rendezvous, Some(listens), None)? {
            Answer::Table { token, addresses } if addresses.len() == self.size as usize - 1 => {
                (token, addresses)
            }
            _ => return Err(mismatch(0, format!("{rendezvous} answered without the table of ranks"))),
        };
        streams[0] = Some(first);
        for lower in 1..self.rank {
            let place = addresses[lower as usize - 1].to_string();
            let stream = self.dial(lower, &place)?;
            self.greet(&stream, lower, &place, None, Some(token.clone()))?;
            streams[lower as usize] = Some(stream);
        }
        // No deadlock: all wait for rank 1 first, which waits for none of them, then for rank 2,
        // and so on.
        let higher = self.settle(self.accept(&listener, Some(&token))?, &Answer::Welcome)?;
        for (place, stream) in streams.iter_mut().zip(higher) {
            *place = place.take().or(stream);
        }
        Ok(streams)
    }

    /// Connects to a rank; repeats until that rank listens or time is up.
    fn dial(&self, rank: u32, place: &str) -> Result<TcpStream> {
        let mut pause = Duration::from_millis(5);
        loop {
            let attempt = || -> io::Result<TcpStream> {
                let mut failed = io::Error::new(ErrorKind::NotFound, "the name has no address");
                for address in place.to_socket_addrs()? {
                    // One address that swallows packets must not use up the time of the others.
                    let left = self.deadline.saturating_duration_since(Instant::now());
                    let limit = left.clamp(Duration::from_millis(1), Duration::from_secs(3));
                    match TcpStream::connect_timeout(&address, limit) {
                        // Where nobody listens, the kernel may connect a socket of this host to
                        // itself.
                        Ok(s) if s.local_addr()? == s.peer_addr()? => {}
                        Ok(s) => return tune(&s).map(|()| s),
                        Err(e) => failed = e,
                    }
                }
                Err(failed)
            };
            match attempt() {
                Ok(stream) => return Ok(stream),
                Err(e) if Instant::now() >= self.deadline => {
                    let what = format!("connecting to rank {rank} at {place} ({e})");
                    return Err(Error::TimedOut { what, after: self.timeout });
                }
                Err(_) => std::thread::sleep(pause),
            }
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }

    /// Sends our greeting and returns the other rank's answer.
    fn greet(
        &self,
        stream: &TcpStream,
        to: u32,
        place: &str,
        listens: Option<SocketAddr>,
        token: Option<String>,
    ) -> Result<Answer> {
        let (job, size, rank) = (self.job.into(), self.size, self.rank);
        let (newest, abi, newest_abi) = (VERSIONS.newest(), ABI.oldest(), ABI.newest());
        let hello = Hello { newest, abi, newest_abi, job, size, rank, to, listens, token };
        send_all(stream, &envelope(&hello), self.deadline)
            .map_err(Error::io(format!("greeting rank {to} at {place}")))?;
        let mut incoming = Incoming::envelope();
        let (version, body) = loop {
            match open(stream, &mut incoming, MAX_ANSWER) {
                Ok(Some(all)) => break all,
                Ok(None) => {
                    if !wait(&mut [PollFd::new(stream, PollFlags::IN)], self.deadline) {
                        let what = format!("waiting for an answer of rank {to} at {place}");
                        return Err(Error::TimedOut { what, after: self.timeout });
                    }
                }
                Err(why) => {
                    let remedy = "its log says why, if it is ours; else look at `rendezvous`";
                    return Err(mismatch(to, format!("no answer at {place}: {why}; {remedy}")));
                }
            }
        };
        match serde_json::from_slice(&body) {
            Ok(Answer::Refused(why)) => {
                Err(mismatch(to, format!("refused rank {} at {place}: {}", self.rank, plain(&why))))
            }
            Ok(answer) if VERSIONS.contains(version) => Ok(answer),
            _ => Err(mismatch(
                to,
                format!(
                    "its wire version is {version}, expected {VERSIONS}: run one release of pushgate on all \
                     hosts"
                ),
            )),
        }
    }

    /// Waits until all higher ranks have greeted. They get no answer yet.
    fn accept(&self, listener: &TcpListener, token: Option<&str>) -> Result<Vec<Option<(Hello, TcpStream)>>> {
        listener.set_nonblocking(true).map_err(Error::io("rendezvous socket"))?;
        let mut places: Vec<Option<(Hello, TcpStream)>> = (0..self.size).map(|_| None).collect();
        let mut greetings: Vec<Greeting> = Vec::new();
        let mut last_refused = String::new();
        loop {
            let missing: Vec<_> = (self.rank + 1..self.size)
                .filter(|r| places[*r as usize].is_none())
                .map(|r| r.to_string())
                .collect();
            if missing.is_empty() {
                return Ok(places);
            }
            let now = Instant::now();
            if now >= self.deadline {
                let missing = missing.join(", ");
                let why = format!("rank {missing} did not come within {:?}", self.timeout);
                for (_, stream) in places.iter().flatten() {
                    self.refuse(stream, &why);
                }
                let what = format!("waiting for rank {missing}{last_refused}");
                return Err(Error::TimedOut { what, after: self.timeout });
            }
            greetings.retain(|g| {
                if g.until <= now {
                    tracing::warn!(rank = self.rank, from = %g.from, "closed a connection that sent no greeting in time");
                }
                g.until > now
            });
            let until = greetings.iter().map(|g| g.until).fold(self.deadline, Instant::min);
            let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
            fds.extend(greetings.iter().map(|g| PollFd::new(&g.stream, PollFlags::IN)));
            let settled: Vec<_> = (0..places.len()).filter(|i| places[*i].is_some()).collect();
            fds.extend(
                settled
                    .iter()
                    .filter_map(|i| places[*i].as_ref())
                    .map(|(_, s)| PollFd::new(s, PollFlags::IN)),
            );
            if !wait(&mut fds, until) {
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|f| !f.revents().is_empty()).collect();
            drop(fds);
            let (to_greetings, to_settled) = ready[1..].split_at(greetings.len());
            // A rank that waits for its answer sends nothing, so a readable socket means that the
            // rank has gone; it may come back.
            for (i, _) in settled.into_iter().zip(to_settled).filter(|(_, ready)| **ready) {
                tracing::warn!(rank = self.rank, "rank {i} left before all were there");
                places[i] = None;
            }
            // In the order of arrival, because the first of two equal ranks is taken.
            let mut i = 0;
            for ready in to_greetings {
                let g = &mut greetings[i];
                let heard = if *ready { open(&g.stream, &mut g.incoming, MAX_GREETING) } else { Ok(None) };
                if matches!(heard, Ok(None)) {
                    i += 1;
                    continue;
                }
                let g = greetings.remove(i);
                let (version, body) = match heard {
                    Ok(all) => all.expect("handled above"),
                    // Not a rank of ours. Its sender could not read an answer of ours, so send
                    // none.
                    Err(why) => {
                        tracing::warn!(rank = self.rank, from = %g.from, "refused a connection at the rendezvous: {why}");
                        continue;
                    }
                };
                match self.check(version, &body, token, &places) {
                    Ok(hello) => {
                        let rank = hello.rank as usize;
                        places[rank] = Some((hello, g.stream));
                    }
                    Err(why) => {
                        tracing::warn!(rank = self.rank, from = %g.from, "refused: {why}");
                        self.refuse(&g.stream, &why);
                        last_refused = format!(" (the last that was refused, {}: {why})", g.from);
                    }
                }
            }
            if ready[0] {
                match listener.accept() {
                    Ok((stream, from)) => {
                        // The oldest connection is the least likely to be a rank of ours.
                        if greetings.len() >= self.size as usize + STRANGERS {
                            greetings.remove(0);
                        }
                        // An error means that the connection is gone already.
                        if tune(&stream).is_ok() {
                            let until = Instant::now() + GREETING;
                            greetings.push(Greeting { from, stream, incoming: Incoming::envelope(), until });
                        }
                    }
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                    Err(e) => {
                        tracing::warn!(rank = self.rank, "accepting a rank: {e}");
                        // Perhaps no descriptor is left; some will be free again soon.
                        std::thread::sleep(Duration::from_millis(10));
                    }
                }
            }
        }
    }

    /// Checks a greeting. An error says what is wrong, what is allowed and what to do.
    fn check(
        &self,
        version: u32,
        body: &[u8],
        token: Option<&str>,
        places: &[Option<(Hello, TcpStream)>],
    ) -> std::result::Result<Hello, String> {
        let differs = |what: &str, its: &dyn Display, allowed: &dyn Display, remedy: &str| {
            Err(format!("its {what} is {its}, expected {allowed}: {remedy}"))
        };
        let release = "run one release of pushgate on all hosts";
        let newest = serde_json::from_slice::<Spoken>(body).ok().and_then(|s| s.newest);
        if let Err(e) = VERSIONS.agree(Versions::told(version, newest)) {
            return differs("wire version", &e.theirs, &e.ours, release);
        }
        let hello: Hello = serde_json::from_slice(body)
            .map_err(|e| format!("its greeting: {}: {release}", plain(&e.to_string())))?;
        if let Err(e) = ABI.agree(Versions::told(hello.abi, hello.newest_abi)) {
            return differs("ABI version", &e.theirs, &e.ours, release);
        }
        if hello.job != self.job {
            let remedy = "give all ranks of a job its name, and every job a rendezvous of its own";
            return differs("job", &plain(&hello.job), &self.job, remedy);
        }
        if hello.size != self.size {
            return differs("size", &hello.size, &self.size, "give all ranks the same number of ranks");
        }
        if hello.rank <= self.rank || hello.rank >= self.size || hello.to != self.rank {
            let allowed = format!("{} to {}", self.rank + 1, self.size - 1);
            let remedy = format!("this is rank {}, give every rank a number of its own", self.rank);
            return differs("rank", &hello.rank, &allowed, &remedy);
        }
        if places[hello.rank as usize].is_some() {
            let remedy = "is it running twice? Give every rank a number of its own";
            return differs("rank", &hello.rank, &"one that is not there yet", remedy);
        }
        match token {
            None if hello.listens.is_none() => Err(format!("its greeting names no address: {release}")),
            Some(token) if hello.token.as_deref() != Some(token) => {
                Err("its token is not that of this job: rank 0 of this job did not send it".into())
            }
            _ => Ok(hello),
        }
    }

    fn refuse(&self, stream: &TcpStream, why: &str) {
        // The sender receives the reason, or finds the connection closed.
        let _ = answer(stream, &Answer::Refused(why.into()));
        close(stream);
    }

    fn settle(&self, places: Vec<Option<(Hello, TcpStream)>>, what: &Answer) -> Result<Streams> {
        let mut streams: Streams = Vec::with_capacity(places.len());
        for place in places {
            if let Some((hello, stream)) = &place {
                answer(stream, what).map_err(|e| match Errno::from_io_error(&e) {
                    Some(Errno::PIPE | Errno::CONNRESET) => Error::PeerLost { rank: hello.rank },
                    _ => Error::io(format!("answering rank {}", hello.rank))(e),
                })?;
            }
            streams.push(place.map(|(_, stream)| stream));
        }
        Ok(streams)
    }
}

fn mismatch(rank: u32, reason: String) -> Error {
    Error::Mismatch { rank, reason }
}

fn bad_host(host: &str, why: impl Display) -> Error {
    Error::config("host", host, format!("auto or an IP address of this host ({why})"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::{self, JoinHandle};

    use pushgate_tests::{hang, patience};
    use rustix::net::sockopt::set_socket_linger;

    use super::*;
    use crate::mesh::tests::LATER;
    use crate::mesh::{Events, MAX_BYTES, Mesh};

    fn me(rank: u32, size: u32) -> Me<'static> {
        Me::new("red", rank, size, hang()).unwrap()
    }

    fn mesh(rank: u32, streams: Streams) -> (Mesh, Receiver<u32>) {
        let mut mesh = Mesh::new(rank, streams, hang()).unwrap();
        let (sender, lost) = channel();
        let events =
            Events { lost: Box::new(move |rank| sender.send(rank).unwrap()), ended: Box::new(|_| {}) };
        mesh.listen(events).unwrap();
        (mesh, lost)
    }

    /// Starts rank 0 at a port of its own.
    fn rank0(at: &str, size: u32) -> (String, JoinHandle<Result<Streams>>) {
        let listener = TcpListener::bind(at).unwrap();
        let place = listener.local_addr().unwrap().to_string();
        (place, thread::spawn(move || me(0, size).gather(&listener)))
    }

    fn join(place: &str, rank: u32, size: u32) -> JoinHandle<Result<Streams>> {
        let place = place.to_owned();
        thread::spawn(move || me(rank, size).join(&place, "auto"))
    }

    fn hello(rank: u32, size: u32) -> Hello {
        Hello {
            newest: VERSIONS.newest(),
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            job: "red".into(),
            size,
            rank,
            to: 0,
            listens: Some("127.0.0.1:1".parse().unwrap()),
            token: None,
        }
    }

    /// Makes a client by hand, which sends `bytes`.
    fn raw(place: &str, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(place).unwrap();
        stream.set_read_timeout(Some(hang())).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    }

    fn hear(stream: &TcpStream) -> Answer {
        let mut incoming = Incoming::envelope();
        loop {
            assert!(wait(&mut [PollFd::new(stream, PollFlags::IN)], Instant::now() + hang()));
            if let Some((_, body)) = open(stream, &mut incoming, MAX_ANSWER).unwrap() {
                return serde_json::from_slice(&body).unwrap();
            }
        }
    }

    #[track_caller]
    fn refused(place: &str, bytes: &[u8], expected: &[&str]) {
        let Answer::Refused(why) = hear(&raw(place, bytes)) else { panic!("taken in: {expected:?}") };
        assert!(expected.iter().all(|e| why.contains(e)), "{why}");
    }

    fn ranks(at: &str, size: u32) -> Vec<(Mesh, Receiver<u32>)> {
        let (place, first) = rank0(at, size);
        let mut all = vec![first];
        all.extend((1..size).map(|r| join(&place, r, size)));
        all.into_iter().zip(0..).map(|(t, rank)| mesh(rank, t.join().unwrap().unwrap())).collect()
    }

    #[test]
    fn four_ranks_exchange_frames_in_order() {
        let mut places = vec!["127.0.0.1:0"];
        // Not every machine has IPv6.
        places.extend(TcpListener::bind("[::1]:0").is_ok().then_some("[::1]:0"));
        for at in places {
            let all = ranks(at, 4);
            // Longer than a socket buffer, so that frames arrive in pieces.
            let payload = |from: u32, to: u32| vec![(16 * from + to) as u8; 3 << 20];
            thread::scope(|s| {
                for (mesh, _) in &all {
                    s.spawn(move || {
                        let others = || (0..4).filter(|r| *r != mesh.rank);
                        for to in others() {
                            mesh.send(to, 7, &payload(mesh.rank, to), &[]).unwrap();
                            mesh.send(to, 8, &[], &[]).unwrap();
                        }
                        for from in others() {
                            assert!(mesh.recv(from, 8).unwrap().0.is_empty());
                            assert!(mesh.recv(from, 7).unwrap().0 == payload(from, mesh.rank));
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn ranks_that_do_not_fit_are_told_why_and_the_others_meet() {
        let (place, first) = rank0("127.0.0.1:0", 3);
        let changed = |change: fn(&mut Hello)| {
            let mut h = hello(1, 3);
            change(&mut h);
            envelope(&h)
        };
        let version = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            bytes[8] = 9;
            bytes
        };
        let good = envelope(&hello(1, 3));
        refused(&place, &version(&good), &["wire version is 9, expected 3", "one release"]);
        // A version that has a different greeting altogether.
        let mut other = version(&good)[..12].to_vec();
        other.extend([3, 0, 0, 0, 1, 2, 3]);
        refused(&place, &other, &["wire version is 9"]);
        refused(&place, &changed(|h| h.abi = 77), &["ABI version is 77, expected", "one release"]);
        refused(
            &place,
            &changed(|h| h.job = "bl\u{1b}ue".into()),
            &["job is blue, expected red", "give all"],
        );
        refused(&place, &changed(|h| h.size = 5), &["size is 5, expected 3", "number of ranks"]);
        refused(&place, &changed(|h| h.rank = 0), &["rank is 0, expected 1 to 2"]);
        refused(&place, &changed(|h| h.rank = 3), &["rank is 3, expected 1 to 2"]);
        refused(&place, &changed(|h| h.listens = None), &["no address"]);
        // The refused rank reports the same reason in its own error.
        let e = me(1, 4).join(&place, "auto").unwrap_err().to_string();
        assert!(
            e.starts_with(&format!("rank 0: refused rank 1 at {place}: its size is 4, expected 3")),
            "{e}"
        );

        let early = raw(&place, &good);
        refused(&place, &good, &["rank is 1, expected one that is not there yet", "running twice"]);
        // The rank is gone, and comes back.
        drop(early);
        let others = [join(&place, 1, 3), join(&place, 2, 3)];
        first.join().unwrap().unwrap();
        for other in others {
            other.join().unwrap().unwrap();
        }
    }

    #[test]
    fn p8_slow_connectors_that_are_no_rank_do_not_delay_the_set_up() {
        let mut huge = MAGIC.to_vec();
        huge.extend([1, 0, 0, 0, 255, 255, 255, 255]);
        let slow = [
            &b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"[..],
            &[0; 4096],
            &[],
            // A slow connector that is no rank: a correct beginning, then nothing.
            b"PUSH",
            &envelope(&hello(1, 2))[..40],
            &huge,
        ];
        // Once while the other connectors stay connected, once without them.
        let meet = |staying: &[&[u8]]| {
            let start = Instant::now();
            let (place, first) = rank0("127.0.0.1:0", 2);
            let _open: Vec<_> = staying.iter().map(|bytes| raw(&place, bytes)).collect();
            for _ in 0..2 * STRANGERS {
                drop(raw(&place, b"x"));
            }
            let second = join(&place, 1, 2);
            first.join().unwrap().unwrap();
            second.join().unwrap().unwrap();
            start.elapsed()
        };
        // The best of three each, because a busy machine may hold up any of them.
        let best = |staying: &[&[u8]]| (0..3).map(|_| meet(staying)).min().expect("three");
        let (with, without) = (best(&slow), best(&[]));
        // Waiting for one of the slow connectors would cost the whole time limit. The term with
        // `without` leaves room for a slow machine.
        assert!(
            with < GREETING / 2 + 4 * without,
            "{with:?} with other connectors that stay connected, {without:?} without"
        );
    }

    #[test]
    fn p8_ranks_know_each_other_by_the_token() {
        let (place, first) = rank0("127.0.0.1:0", 3);
        let second = join(&place, 1, 3);
        let third = raw(&place, &envelope(&hello(2, 3)));
        let Answer::Table { token, addresses } = hear(&third) else { panic!("no table") };
        assert_eq!((token.len(), addresses.len()), (32, 2));
        let to_second = |token: Option<String>| envelope(&Hello { to: 1, token, ..hello(2, 3) });
        let at = addresses[0].to_string();
        refused(&at, &to_second(None), &["token is not that of this job"]);
        refused(&at, &to_second(Some("0".repeat(32))), &["token is not that of this job"]);
        let taken = raw(&at, &to_second(Some(token)));
        assert!(matches!(hear(&taken), Answer::Welcome));
        assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
    }

    /// Makes rank 0's mesh of `size`, and the sockets of ranks 1, 2, ... by hand.
    fn by_hand(size: u32) -> (Mesh, Receiver<u32>, Vec<TcpStream>) {
        let (place, first) = rank0("127.0.0.1:0", size);
        let others: Vec<_> = (1..size).map(|r| raw(&place, &envelope(&hello(r, size)))).collect();
        let (mesh, lost) = mesh(0, first.join().unwrap().unwrap());
        for other in &others {
            assert!(matches!(hear(other), Answer::Table { .. }));
        }
        (mesh, lost, others)
    }

    #[test]
    fn p7_p8_a_frame_that_is_wrong_loses_its_rank() {
        let mut long = (MAX_BYTES as u32 + 1).to_le_bytes().to_vec();
        long.extend([0; 4]);
        // Too long; with descriptors; without a label; empty; an END that is cut off.
        for bytes in [
            &long[..],
            &[255; 8],
            &[4, 0, 0, 0, 1, 0, 0, 0],
            &[3, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3],
            &[0; 8],
            &[8, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 4, 0, 0, 0],
        ] {
            let (mesh, lost, mut others) = by_hand(3);
            // A peer that stops in the middle of a frame does not keep the others from being heard.
            others[0].write_all(&[9, 0, 0, 0, 0, 0, 0, 0, 5]).unwrap();
            others[1].write_all(bytes).unwrap();
            assert_eq!(lost.recv_timeout(hang()), Ok(2));
            assert!(matches!(mesh.recv(1, 5), Err(Error::PeerLost { rank: 2 })));
            assert_eq!(mesh.lost(), Some(2));
            // A frame that was cut off is not taken for a whole one.
            others.remove(0);
            assert_eq!(lost.recv_timeout(hang()), Ok(1));
        }
    }

    #[test]
    fn p7_a_rank_that_dies_is_lost_and_one_that_leaves_is_not() {
        let (place, first) = rank0("127.0.0.1:0", 3);
        let (second, third) = (join(&place, 1, 3), join(&place, 2, 3));
        let all: Vec<_> = [first, second]
            .into_iter()
            .zip(0..)
            .map(|(t, rank)| mesh(rank, t.join().unwrap().unwrap()))
            .collect();
        // As if the process died: its sockets close, and it sends no farewell and no report.
        drop(third.join().unwrap().unwrap());
        for (mesh, lost) in &all {
            assert_eq!(lost.recv_timeout(hang()), Ok(2));
            assert!(matches!(mesh.recv(2, 5), Err(Error::PeerLost { rank: 2 })));
        }

        let mut all = ranks("127.0.0.1:0", 2);
        let ((one, lost), (other, _)) = (all.remove(0), all.remove(0));
        // Still unread at the other end when this rank leaves.
        one.send(1, 5, &[1; 1 << 20], &[]).unwrap();
        other.send(0, 6, b"last words", &[]).unwrap();
        drop(other);
        assert_eq!(one.recv(1, 6).unwrap().0, b"last words");
        assert!(matches!(one.recv(1, 6), Err(Error::PeerLost { rank: 1 })), "it will not say more");
        assert!(lost.recv_timeout(LATER).is_err());
        assert_eq!(one.lost(), None);
    }

    #[test]
    fn a_farewell_counts_though_a_reset_follows() {
        let (mesh, lost, mut others) = by_hand(2);
        others[0].write_all(&[4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        set_socket_linger(&others[0], Some(Duration::ZERO)).unwrap();
        others.clear();
        assert!(lost.recv_timeout(LATER).is_err());
        assert!(matches!(mesh.recv(1, 5), Err(Error::PeerLost { rank: 1 })));
        assert_eq!(mesh.lost(), None);
    }

    #[test]
    fn descriptors_stay_on_their_host() {
        let all = ranks("127.0.0.1:0", 2);
        let stdin = std::io::stdin();
        let e = all[0].0.send(1, 5, b"x", &[std::os::fd::AsFd::as_fd(&stdin)]).unwrap_err().to_string();
        assert_eq!(
            e,
            "rank 1: descriptors can't cross hosts: qp=local needs ranks of one host, use qp=verbs"
        );
        all[0].0.send(1, 5, b"y", &[]).unwrap();
        assert_eq!(all[1].0.recv(0, 5).unwrap().0, b"y");
    }

    #[test]
    fn p7_ranks_that_never_come_or_answer_end_the_set_up_at_the_timeout() {
        // Within the limit two clients say who they are.
        let limit = patience(Duration::from_secs(2));
        let short = |rank, size| Me::new("red", rank, size, limit).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        let wrong = envelope(&hello(1, 5));
        thread::scope(|s| {
            let first = s.spawn(|| short(0, 3).gather(&listener).unwrap_err().to_string());
            refused(&place, &wrong, &["size is 5"]);
            let waits = raw(&place, &envelope(&hello(1, 3)));
            let Answer::Refused(why) = hear(&waits) else { panic!("taken in") };
            assert!(why.starts_with("rank 2 did not come within"), "{why}");
            let e = first.join().unwrap();
            assert!(e.starts_with("waiting for rank 2 (the last that was refused"), "{e}");
            assert!(e.contains("size is 5") && e.contains(&format!("timed out after {limit:?}")), "{e}");
        });
        // First a rank 0 that listens and never answers; then one that does not listen.
        let e = short(1, 2).join(&place, "auto").unwrap_err().to_string();
        assert!(e.starts_with(&format!("waiting for an answer of rank 0 at {place} timed out")), "{e}");
        drop(listener);
        let e = short(1, 2).join(&place, "auto").unwrap_err().to_string();
        assert!(e.starts_with(&format!("connecting to rank 0 at {place} (Connection refused")), "{e}");
    }

    #[test]
    fn addresses_of_other_hosts_are_refused_by_name() {
        // 192.0.2.0/24 is reserved for documentation: no host has such an address.
        let e = listen_at("192.0.2.1:7000").unwrap_err().to_string();
        assert!(
            e.starts_with("invalid rendezvous `192.0.2.1:7000`: expected an address and port of the host"),
            "{e}"
        );
        let (place, _first) = rank0("127.0.0.1:0", 2);
        let e = me(1, 2).join(&place, "192.0.2.1").unwrap_err().to_string();
        assert!(
            e.starts_with("invalid host `192.0.2.1`: expected auto or an IP address of this host"),
            "{e}"
        );
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let e = listen_at(&taken.local_addr().unwrap().to_string()).unwrap_err().to_string();
        assert!(e.contains("another program or job has that port"), "{e}");
        let long = "x".repeat(MAX_JOB + 1);
        assert!(Me::new(&long, 0, 2, hang()).err().unwrap().to_string().starts_with("invalid job `xxx"));
        me(1, 2).join(&place, "127.0.0.1").unwrap();
    }

    #[test]
    fn something_else_at_the_rendezvous_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        for (says, expected) in [
            (&b"SSH-2.0-OpenSSH\r\n"[..], "does not speak pushgate's protocol"),
            (b"", "closed the connection"),
        ] {
            let error = join(&place, 1, 2);
            let (mut s, _) = listener.accept().unwrap();
            // An unread greeting would turn the close into a reset.
            s.read_exact(&mut [0; HEADER]).unwrap();
            s.write_all(says).unwrap();
            // The other side may have closed the connection by then.
            let _ = s.shutdown(Shutdown::Write);
            let e = error.join().unwrap().unwrap_err().to_string();
            assert!(e.starts_with(&format!("rank 0: no answer at {place}: ")) && e.contains(expected), "{e}");
        }
    }
}
