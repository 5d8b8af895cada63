//! How places that another process names are dialled: which of them first, and several at a time.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::{Held, Interface, is_link_local};

/// How long an address is waited for before the next one is tried beside it.
const HEAD_START: Duration = Duration::from_millis(200);
/// The most addresses that are tried for one place.
const MOST: usize = 32;

/// The addresses in the order in which this host tries them: those of its own networks first, then the others as the peer ordered
/// them. A link-local IPv6 address stands for that address at the link of each interface of this host that leads to such ones, because the
/// number of the peer's interface says nothing here.
pub fn routes(to: &[SocketAddr]) -> Vec<SocketAddr> {
    let needs_look = to.len() > 1 || to.iter().any(|at| at.is_ipv6() && is_link_local(at.ip()));
    match needs_look.then(Interface::all) {
        Some(Ok(all)) => routes_over(to, &all),
        // What can't be asked for can be tried.
        _ => to.to_vec(),
    }
}

pub(super) fn routes_over(to: &[SocketAddr], own: &[Interface]) -> Vec<SocketAddr> {
    let mut all: Vec<SocketAddr> = Vec::new();
    let mut push = |at| {
        if all.len() < MOST && !all.contains(&at) {
            all.push(at);
        }
    };
    for at in to {
        match at {
            SocketAddr::V6(v6) if is_link_local(at.ip()) => {
                let leads = |i: &&Interface| i.has_link_scope();
                let scopes = own.iter().filter(leads).map(|i| i.index);
                scopes.for_each(|scope| push(SocketAddrV6::new(*v6.ip(), v6.port(), 0, scope).into()));
            }
            at => push(*at),
        }
    }
    let near = |at: &SocketAddr| {
        let on_link = |held: &Held| held.prefix > 0 && is_of(at.ip(), held.ip, held.prefix);
        own.iter().any(|i| i.up && !i.loopback && i.addresses.iter().any(on_link))
    };
    all.sort_by_key(|at| !near(at));
    all
}

/// Whether two addresses are of one network whose prefix has this length.
fn is_of(a: IpAddr, b: IpAddr, prefix: u8) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= prefix.into(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= prefix.into(),
        _ => false,
    }
}

/// Addresses of one place that are being dialled. No call waits.
#[derive(Debug)]
pub struct Reach {
    rest: VecDeque<SocketAddr>,
    open: Vec<(SocketAddr, TcpStream)>,
    failed: Vec<(SocketAddr, String)>,
    next: Instant,
}

impl Reach {
    /// Begins to dial these addresses, in this host's order.
    pub fn new(to: &[SocketAddr]) -> Reach {
        Reach { rest: routes(to).into(), open: Vec::new(), failed: Vec::new(), next: Instant::now() }
    }

    /// A connection that stands; `None` before there is one. Call it again where that connection leads to another process
    /// ([`Reach::leads_elsewhere`]).
    ///
    /// # Errors
    /// Once no address is left: each with what came of it.
    pub fn advance(&mut self) -> Result<Option<(SocketAddr, TcpStream)>, String> {
        loop {
            if let Some(found) = self.look() {
                return Ok(Some(found));
            }
            let begins = self.open.is_empty() || Instant::now() >= self.next;
            match begins.then(|| self.rest.pop_front()).flatten() {
                Some(at) => match begin(at) {
                    Ok(socket) => {
                        self.open.push((at, socket));
                        self.next = Instant::now() + HEAD_START;
                    }
                    Err(e) => self.failed.push((at, e.to_string())),
                },
                None if self.open.is_empty() => return Err(self.tried()),
                None => return Ok(None),
            }
        }
    }

    /// Notes that the connection to this address led to another process, and why.
    pub fn leads_elsewhere(&mut self, at: SocketAddr, why: String) {
        self.failed.push((at, why));
    }

    /// Waits until there may be something to do, until `until` at most.
    pub fn wait(&self, until: Instant) {
        let now = Instant::now();
        let next = if self.rest.is_empty() { until } else { until.min(self.next) };
        let left = next.saturating_duration_since(now);
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut fds: Vec<_> = self.open.iter().map(|(_, s)| PollFd::new(s, PollFlags::OUT)).collect();
        let _ = poll(&mut fds, Some(&time));
    }

    /// What came of each address that was tried.
    pub fn tried(&self) -> String {
        let failed = self.failed.iter().map(|(at, why)| format!("{at}: {why}"));
        let open = self.open.iter().map(|(at, _)| format!("{at}: no answer yet"));
        let rest = self.rest.iter().map(|at| format!("{at}: not tried yet"));
        let all: Vec<_> = failed.chain(open).chain(rest).collect();
        match all.is_empty() {
            true => "no interface of this host leads to link-local addresses".into(),
            false => all.join("; "),
        }
    }

    fn look(&mut self) -> Option<(SocketAddr, TcpStream)> {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut place = 0;
        while let Some((at, socket)) = self.open.get(place) {
            let mut fds = [PollFd::new(socket, PollFlags::OUT)];
            if poll(&mut fds, Some(&now)).unwrap_or(0) == 0 {
                place += 1;
                continue;
            }
            let stands = match sockopt::socket_error(socket) {
                Ok(Ok(())) => Ok(()),
                Ok(Err(e)) | Err(e) => Err(io::Error::from(e)),
            };
            // Where nobody listens, the kernel may connect a socket of this host to itself.
            let itself = stands.is_ok() && socket.local_addr().ok() == socket.peer_addr().ok();
            let (at, why) = (*at, if itself { Err(ErrorKind::ConnectionRefused.into()) } else { stands });
            let (_, socket) = self.open.remove(place);
            match why {
                Ok(()) => return Some((at, socket)),
                Err(e) => self.failed.push((at, e.to_string())),
            }
        }
        None
    }
}

/// Begins to connect.
fn begin(to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket.into()),
        Err(e) => Err(e.into()),
    }
}
