//! The ranks of several hosts, joined by TCP. Rank 0 listens at the rendezvous. Every other rank
//! connects to rank 0 and says who it is and where it listens itself. Once all ranks are there,
//! rank 0 tells each where the others listen. Then each rank connects to all lower ranks, except
//! rank 0, to which it is connected already.
//!
//! The port is open to every host that reaches it. So each connection goes through the [`door`](pushgate_door): its
//! ends prove that they know one secret before the greeting, which is the first that a rank reads. docs/operations.md says
//! where the secret comes from.

mod again;
mod greeting;
mod reach;
#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use pushgate_door::addresses::{Message, Places, Reach, Wish, listen, offer, own, resolve};
use pushgate_door::redial::envelope::{HEADER, Incoming, envelope, opened, send_all, tune};
use pushgate_door::{Arrival, Dialer, Door, DoorError, Limits, Refused, Stream, Terms, VARIABLE};
use pushgate_driver_shim::interrupt;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::versions::ABI;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use again::Ranks;
pub(super) use again::{Again, Finder, Found};
use greeting::{Answer, Hello, MAX_ANSWER, MAX_GREETING, RELEASE, VERSIONS, answer, differs};
pub(crate) use reach::{Fabric, May};

use crate::error::{Error, Result};

/// Time for one try of all addresses of a rank: one that swallows packets must not use up the time of the others.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Time for an answer to leave.
const ANSWER: Duration = Duration::from_secs(5);
/// How many connections may be about to greet, in addition to one for each rank.
const STRANGERS: usize = 64;
/// The longest name of a job: it fits into a greeting, however it is escaped, and into a socket's
/// name.
const MAX_JOB: usize = 80;

// ---------------------------------------------------------------- rendezvous

/// Opens rank 0's listening sockets at a rendezvous: at the first of a name's addresses that this host has, or at each of several
/// places.
pub(super) fn bind_at(rendezvous: &str) -> Result<Vec<TcpListener>> {
    let bound = resolve(rendezvous, None).map(own).and_then(|all| match rendezvous.contains(',') {
        true => listen(&all),
        false => TcpListener::bind(&all[..]).map(|one| vec![one]),
    });
    bound.map_err(|e| match e.kind() {
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

/// An address without its port.
pub(super) fn portless(mut at: SocketAddr) -> SocketAddr {
    at.set_port(0);
    match at.ip().to_canonical() {
        IpAddr::V4(ip) => (ip, 0).into(),
        IpAddr::V6(_) => at,
    }
}

/// This rank while it connects to the others.
pub(super) struct Me<'a> {
    job: &'a str,
    rank: u32,
    size: u32,
    timeout: Duration,
    deadline: Instant,
    /// How long a connection that breaks may be gone; `None`: then its rank is lost.
    recover: Option<Duration>,
    terms: Terms,
}

type Streams = Vec<Option<Stream>>;
/// The connections to all ranks, and what replaces those that break.
type Joined = (Streams, Option<Again>);

impl<'a> Me<'a> {
    pub(super) fn new(
        job: &'a str,
        rank: u32,
        size: u32,
        timeout: Duration,
        recover: Option<Duration>,
        terms: Terms,
    ) -> Result<Self> {
        if job.len() > MAX_JOB {
            return Err(Error::config("job", job, format!("a name of at most {MAX_JOB} bytes")));
        }
        Ok(Me { job, rank, size, timeout, deadline: Instant::now() + timeout, recover, terms })
    }

    /// Opens rank 0's door at the rendezvous.
    pub(super) fn listen_at(&self, rendezvous: &str) -> Result<Door> {
        self.listen_on(bind_at(rendezvous)?, rendezvous)
    }

    /// Opens rank 0's door with the sockets of the rendezvous.
    pub(super) fn listen_on(&self, listeners: Vec<TcpListener>, rendezvous: &str) -> Result<Door> {
        self.door(listeners, |why| Error::config("rendezvous", rendezvous, why))
    }

    /// Lets ranks in at sockets. `refused`: the error for an address that other hosts reach, where there is no secret.
    fn door(&self, listeners: Vec<TcpListener>, refused: impl FnOnce(String) -> Error) -> Result<Door> {
        Door::on_all(listeners, self.terms.clone(), self.limits()).map_err(|e| match e {
            DoorError::Open(ip) => refused(needs_secret(ip)),
            e => Error::io("a socket at which other ranks connect")(io::Error::other(e)),
        })
    }

    fn limits(&self) -> Limits {
        let greeting = HEADER + MAX_GREETING;
        Limits { places: self.size as usize + STRANGERS, greeting, ..Limits::default() }
    }

    /// Rank 0: waits for all other ranks and tells each where the others listen.
    pub(super) fn gather(&self, door: &Door) -> Result<Joined> {
        let places = self.accept(door, None)?;
        let token = reach::secret().map_err(Error::io("a token for the job from /dev/urandom"))?;
        let all: Vec<_> =
            places.iter().flatten().map(|(hello, _)| hello.places().expect("checked")).collect();
        let (addresses, mut also): (Vec<_>, Vec<_>) =
            all.iter().map(|places| (places.first(), places.all().split_off(1))).unzip();
        if also.iter().all(Vec::is_empty) {
            also.clear();
        }
        // The rendezvous itself is free again for another job.
        let own = door.local_addr().map_err(Error::io("local address"))?;
        let here = door.local_addrs().map_err(Error::io("local address"))?;
        let here: Vec<_> = here.into_iter().map(portless).collect();
        let again = self.recover.map(|_| listen(&here)).transpose();
        let again = again.map_err(Error::io("a socket at which other ranks dial again"))?;
        let refused = |why| Error::config("rendezvous", own, why);
        let again = again.map(|listeners| self.door(listeners, refused)).transpose()?;
        let port = again.as_ref().map(|l| l.local_addr().map(|a| a.port())).transpose();
        let port = port.map_err(Error::io("local address"))?.unwrap_or(0);
        let table = Answer::Table { token: token.clone(), addresses, also, port };
        let streams = self.settle(places, &table)?;
        let all = [vec![own.into()], all].concat();
        Ok((streams, self.again(again, token, all)))
    }

    fn again(&self, door: Option<Door>, token: String, places: Vec<Places>) -> Option<Again> {
        let (door, recover) = door.zip(self.recover)?;
        let (job, rank, size, terms) = (self.job.into(), self.rank, self.size, self.terms.clone());
        Some(Again::new(door, Ranks { job, rank, size, token, places, terms }, recover))
    }

    /// Any other rank: meets rank 0, then connects to lower ranks and accepts higher ranks.
    pub(super) fn join(&self, rendezvous: &str, host: &str) -> Result<Joined> {
        let mut streams: Streams = (0..self.size).map(|_| None).collect();
        let first = self.dial(0, rendezvous)?;
        let at = self.listens(&first, host)?;
        let listeners = listen(&at).map_err(|e| bad_host(&shown(&at), e))?;
        let door = self.door(listeners, |why| Error::config("host", shown(&at), why))?;
        let listens = door.local_addrs().map_err(Error::io("local address"))?;
        let listens = Places::of(&listens).expect("a door listens somewhere");
        let (first, answer) = self.greet(first, 0, rendezvous, Some(listens), None)?;
        let (token, mut places, port) = match answer {
            Answer::Table { token, addresses, also, port }
                if addresses.len() == self.size as usize - 1
                    && (also.is_empty() || also.len() == addresses.len()) =>
            {
                let more = also.into_iter().chain(std::iter::repeat(Vec::new()));
                let places = addresses.into_iter().zip(more).map(|(at, more)| [vec![at], more].concat());
                let places: Vec<_> = places.filter_map(|all| Places::of(&all)).collect();
                (token, places, port)
            }
            _ => return Err(mismatch(0, format!("{rendezvous} answered without the table of ranks"))),
        };
        let mut rank0 = first.peer_addr().map_err(Error::io("rank 0's address"))?;
        rank0.set_port(port);
        streams[0] = Some(first);
        for lower in 1..self.rank {
            let of = &mut places[lower as usize - 1];
            let place = of.all().iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",");
            let stream = self.dial(lower, &place)?;
            let (stream, _) = self.greet(stream, lower, &place, None, Some(token.clone()))?;
            *of = stream.peer_addr().map_err(Error::io("a rank's address"))?.into();
            streams[lower as usize] = Some(stream);
        }
        // No deadlock: all wait for rank 1 first, which waits for none of them, then for rank 2,
        // and so on.
        let higher = self.settle(self.accept(&door, Some(&token))?, &Answer::Welcome)?;
        for (place, stream) in streams.iter_mut().zip(higher) {
            *place = place.take().or(stream);
        }
        Ok((streams, self.again(Some(door), token, [vec![rank0.into()], places].concat())))
    }

    /// Where this rank listens for the higher ones, without a port: at the address by which it reaches rank 0, and at others of this
    /// host, or where the setting `host` says.
    fn listens(&self, first: &TcpStream, host: &str) -> Result<Vec<SocketAddr>> {
        if host != "auto" {
            let wish = Wish { host, ..Wish::default() };
            return Ok(offer(&wish).map_err(|why| bad_host(host, why))?.sockets());
        }
        let own = portless(first.local_addr().map_err(Error::io("local address"))?);
        let mut all = vec![own];
        // Ranks that meet at a loopback address are all on this host.
        if !own.ip().is_loopback() {
            let others = offer(&Wish::default()).map(|offered| offered.sockets()).unwrap_or_default();
            all.extend(others.into_iter().filter(|at| *at != own && !at.ip().is_loopback()));
        }
        all.truncate(Places::MOST);
        Ok(all)
    }

    /// Connects to a rank; repeats until that rank listens or time is up.
    fn dial(&self, rank: u32, place: &str) -> Result<TcpStream> {
        let mut pause = Duration::from_millis(5);
        loop {
            match self.try_addresses(place)? {
                Ok(stream) => return Ok(stream),
                Err(tried) if Instant::now() >= self.deadline => {
                    let (whom, host) = (format!("rank {rank} at {place}"), format!("rank {rank}'s host"));
                    let what = Message::Unreached { whom: &whom, tried: &tried, host: &host }.to_string();
                    return Err(Error::TimedOut { what, after: self.timeout });
                }
                Err(_) => {
                    interrupt::check()?;
                    std::thread::sleep(pause);
                }
            }
            pause = (pause * 2).min(interrupt::LOOK);
        }
    }

    /// Tries each address of a place once; after an inner error, which says what was tried, another try may succeed. Where there is no
    /// secret, an address of another host ends it: this rank must not try to prove a secret that everybody knows.
    fn try_addresses(&self, place: &str) -> Result<std::result::Result<TcpStream, String>> {
        let addresses = match resolve(place, None) {
            Ok(addresses) if addresses.is_empty() => return Ok(Err("the name has no address".into())),
            Ok(addresses) => addresses,
            // A name that has no address now may have one later.
            Err(e) => return Ok(Err(e.to_string())),
        };
        let open = |at: &&SocketAddr| self.terms.secret.is_public() && !at.ip().to_canonical().is_loopback();
        if let Some(at) = addresses.iter().find(open) {
            return Err(Error::config("rendezvous", place, needs_secret(at.ip().to_canonical())));
        }
        let mut reach = Reach::new(&addresses);
        let mut asked = interrupt::Now::begin();
        let until = Instant::now() + ATTEMPT.min(self.deadline.saturating_duration_since(Instant::now()));
        loop {
            match reach.advance() {
                Ok(Some((at, stream))) => {
                    let set_up =
                        stream.set_nonblocking(false).and_then(|()| tune(&stream, self.recover.is_some()));
                    match set_up {
                        Ok(()) => return Ok(Ok(stream)),
                        Err(e) => reach.leads_elsewhere(at, e.to_string()),
                    }
                }
                Ok(None) if Instant::now() < until => {
                    reach.wait(until.min(Instant::now() + interrupt::LOOK));
                    asked.check()?;
                }
                Ok(None) => return Ok(Err(reach.tried())),
                Err(tried) => return Ok(Err(tried)),
            }
        }
    }

    /// Goes through the other rank's door, sends our greeting and returns the other rank's answer.
    fn greet(
        &self,
        socket: TcpStream,
        to: u32,
        place: &str,
        listens: Option<Places>,
        token: Option<String>,
    ) -> Result<(Stream, Answer)> {
        let (job, size, rank) = (self.job.into(), self.size, self.rank);
        let (newest, abi, newest_abi) = (VERSIONS.newest(), ABI.oldest(), ABI.newest());
        let mut listens = listens.map(|places| places.all()).unwrap_or_default().into_iter();
        let (listens, also) = (listens.next(), listens.collect());
        let hello = Hello { newest, abi, newest_abi, job, size, rank, to, listens, also, token, again: None };
        let late = || {
            let what = format!("waiting for an answer of rank {to} at {place}");
            Error::TimedOut { what, after: self.timeout }
        };
        let no_answer = |why: String| mismatch(to, format!("no answer at {place}: {why}"));
        let remedy = "its log says why, if it is ours; else look at `rendezvous`";
        let refused = |e: DoorError| match e {
            DoorError::Refused(Refused::Late) => late(),
            DoorError::Refused(why @ (Refused::Foreign | Refused::Closed)) => {
                no_answer(format!("{why}; {remedy}"))
            }
            e => no_answer(e.to_string()),
        };
        let hello = envelope(VERSIONS.oldest(), &hello);
        let mut dialer = Dialer::new(socket, &self.terms, &hello).map_err(refused)?;
        while !dialer.advance().map_err(refused)? {
            if !interrupt::wait(&mut [PollFd::new(&dialer, dialer.awaits())], self.deadline)? {
                return Err(late());
            }
        }
        let stream = dialer.finish();
        let mut incoming = Incoming::default();
        let (version, body) = loop {
            match incoming.open(&stream, MAX_ANSWER) {
                Ok(Some(all)) => break all,
                Ok(None) if interrupt::wait(&mut [PollFd::new(&stream, PollFlags::IN)], self.deadline)? => {}
                Ok(None) => return Err(late()),
                Err(why) => return Err(no_answer(format!("{why}; {remedy}"))),
            }
        };
        match serde_json::from_slice(&body) {
            Ok(Answer::Refused(why)) => Err(mismatch(
                to,
                format!("refused rank {} at {place}: {}", self.rank, Foreign::sentence(why)),
            )),
            Ok(answer) if VERSIONS.contains(version) => Ok((stream, answer)),
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
    fn accept(&self, door: &Door, token: Option<&str>) -> Result<Vec<Option<(Hello, Stream)>>> {
        let mut places: Vec<Option<(Hello, Stream)>> = (0..self.size).map(|_| None).collect();
        let mut last_refused = String::new();
        loop {
            let missing: Vec<_> = (self.rank + 1..self.size)
                .filter(|r| places[*r as usize].is_none())
                .map(|r| r.to_string())
                .collect();
            if missing.is_empty() {
                return Ok(places);
            }
            if Instant::now() >= self.deadline {
                let missing = missing.join(", ");
                let why = format!("rank {missing} did not come within {:?}", self.timeout);
                for (_, stream) in places.iter().flatten() {
                    self.refuse(stream, &why);
                }
                if let Some((from, why)) = door.counts().last_refused().filter(|_| last_refused.is_empty()) {
                    last_refused = format!(" (the last that was refused, {from}: {why})");
                }
                let what = format!("waiting for rank {missing}{last_refused}");
                return Err(Error::TimedOut { what, after: self.timeout });
            }
            let mut fds = vec![PollFd::new(door, PollFlags::IN)];
            let settled: Vec<_> = (0..places.len()).filter(|i| places[*i].is_some()).collect();
            fds.extend(
                settled
                    .iter()
                    .filter_map(|i| places[*i].as_ref())
                    .map(|(_, s)| PollFd::new(s, PollFlags::IN)),
            );
            if !interrupt::wait(&mut fds, self.deadline)? {
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|f| !f.revents().is_empty()).collect();
            drop(fds);
            // A rank that waits for its answer sends nothing, so a readable socket means that the
            // rank has gone; it may come back.
            for (i, _) in settled.into_iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
                limited!(warn, i as u64, rank = self.rank, "rank {i} left before all were there");
                places[i] = None;
            }
            // In the order of arrival, because the first of two equal ranks is taken.
            while let Some(Arrival { stream, greeting, from }) = door.next() {
                let heard = tune(&stream, self.recover.is_some()).map_err(|e| e.to_string());
                let checked = heard.and_then(|()| {
                    let (version, body) = opened(&greeting)?;
                    self.check(version, body, token, &places)
                });
                match checked {
                    Ok(hello) => {
                        let rank = hello.rank as usize;
                        places[rank] = Some((hello, stream));
                    }
                    Err(why) => {
                        limited!(warn, 0u32, rank = self.rank, %from, "refused: {why}");
                        self.refuse(&stream, &why);
                        last_refused = format!(" (the last that was refused, {from}: {why})");
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
        places: &[Option<(Hello, Stream)>],
    ) -> std::result::Result<Hello, String> {
        let hello = Hello::read(version, body, self.job, self.size)?;
        if hello.rank <= self.rank || hello.rank >= self.size || hello.to != self.rank {
            let allowed = format!("{} to {}", self.rank + 1, self.size - 1);
            let remedy = format!("this is rank {}, give every rank a number of its own", self.rank);
            return differs("rank", &hello.rank, &allowed, &remedy);
        }
        // The first one may have gone since this rank last looked.
        let is_there = |(_, stream): &(Hello, Stream)| !is_readable(stream);
        if places[hello.rank as usize].as_ref().is_some_and(is_there) {
            let remedy = "is it running twice? Give every rank a number of its own";
            return differs("rank", &hello.rank, &"one that is not there yet", remedy);
        }
        match token {
            _ if hello.again.is_some() => Err("not all ranks of this job are there yet".into()),
            None if hello.places().is_none() => Err(format!("its greeting names no address: {RELEASE}")),
            Some(token) if hello.token.as_deref() != Some(token) => {
                Err("its token is not that of this job: rank 0 of this job did not send it".into())
            }
            _ => Ok(hello),
        }
    }

    fn refuse(&self, stream: &Stream, why: &str) {
        // The sender receives the reason, or finds the connection closed.
        let _ = answer(stream, &Answer::Refused(why.into()));
        stream.close();
    }

    fn settle(&self, places: Vec<Option<(Hello, Stream)>>, what: &Answer) -> Result<Streams> {
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

/// Whether something of this connection can be read now, its end for instance.
fn is_readable(stream: &Stream) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&now)), Ok(1..))
}

fn mismatch(rank: u32, reason: String) -> Error {
    Error::Mismatch { rank, reason }
}

fn needs_secret(ip: IpAddr) -> String {
    format!(
        "an address of the loopback device, or a secret, because other hosts reach {ip}: set secret-file or {VARIABLE} to one \
         secret on all hosts"
    )
}

/// Addresses without ports, for messages.
fn shown(all: &[SocketAddr]) -> String {
    all.iter().map(|at| at.ip().to_string()).collect::<Vec<_>>().join(", ")
}

fn bad_host(host: &str, why: impl Display) -> Error {
    Error::config("host", host, format!("auto or an IP address of this host ({why})"))
}
