//! How two ends connect. Nothing here waits: every call looks at what has arrived, goes as far as
//! it can, and says whether the connection is complete.
//!
//! The connector greets with nonce and offer. The listener answers with its own offer. Over RDMA
//! both ends then say where the other may write. A sender that does not greet in time, or not as an
//! end of this plugin would, loses its own connection and disturbs no other one.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pushgate::Settings;
use pushgate_driver_shim::versions::Versions;
use pushgate_proxy::engine::EngineError;
use pushgate_proxy::link::verbs::Device;
use pushgate_proxy::wire::peer_cred;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};
use serde::{Deserialize, Serialize};

use crate::comm::Comm;
use crate::error::{Code, Failure, Result};
use crate::handle::{self, Address, Handle, Nonce};
use crate::join::{EndOffer, Exchange, Joined, NewEnd, Role, Taken};
use crate::runtime::Runtime;
use crate::socket::{Channel, Frame, Stream};

/// Versions that this build speaks of everything that the two ends say to each other.
const VERSIONS: Versions = Versions::new(3, 3);
/// Time within which a connector must greet. It leaves room for a rank whose thread is held up on a
/// busy machine. A connection that never greets occupies one descriptor for this time.
const GREETING: Duration = Duration::from_secs(30);
/// How many connections may be about to greet.
const STRANGERS: usize = 256;

/// The first frame of either end.
#[derive(Serialize, Deserialize)]
struct Greeting {
    /// The oldest version that the sender speaks.
    version: u32,
    /// The newest, if that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest: Option<u32>,
    nonce: Nonce,
    offer: EndOffer,
}

/// The part that the greetings of all versions have.
#[derive(Deserialize)]
struct Spoken {
    version: u32,
    newest: Option<u32>,
}

fn greet_with(nonce: Nonce, offer: EndOffer) -> Greeting {
    Greeting { version: VERSIONS.oldest(), newest: VERSIONS.newest(), nonce, offer }
}

fn bytes_of(what: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(what).expect("it is plain data")
}

fn lost(e: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Remote, format!("making a connection: {e}"))
}

/// Reads the offer from a frame that should be a greeting for `nonce`.
fn greeting(bytes: &[u8], nonce: &Nonce) -> Result<EndOffer> {
    // The versions come first: the rest of a greeting of another version can't be read.
    let Spoken { version, newest } = serde_json::from_slice(bytes).map_err(lost)?;
    VERSIONS.agree(Versions::told(version, newest)).map_err(|e| lost(format!("the other end: {e}")))?;
    let g: Greeting = serde_json::from_slice(bytes).map_err(lost)?;
    if g.nonce != *nonce {
        return Err(lost("the greeting is for another listener"));
    }
    Ok(g.offer)
}

fn name_of(nonce: &Nonce) -> String {
    format!("pushgate/net/{:032x}", u128::from_be_bytes(*nonce))
}

fn random() -> Result<Nonce> {
    let mut nonce = [0; 16];
    let mut file = std::fs::File::open("/dev/urandom").map_err(Failure::system("/dev/urandom"))?;
    std::io::Read::read_exact(&mut file, &mut nonce).map_err(Failure::system("/dev/urandom"))?;
    Ok(nonce)
}

/// The host's boot id, which names one start of one host.
fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0).to_be_bytes()
}

/// The address at which other hosts reach this one: the setting, or else the RDMA device's, or else
/// that of the default route.
fn own_address(settings: &Settings, device: &Device) -> Result<IpAddr> {
    if let Ok(ip) = settings.host.parse() {
        return Ok(ip);
    }
    // The address of a RoCE v2 device is an address of its network interface.
    let gids = device.gids();
    let ips = gids.iter().filter(|g| g.netdev.is_some()).map(|g| IpAddr::from(g.gid.0).to_canonical());
    let mut ips: Vec<_> =
        ips.filter(|ip| !matches!(ip, IpAddr::V6(v) if v.is_unicast_link_local())).collect();
    ips.sort_by_key(|ip| ip.is_ipv6());
    if let Some(ip) = ips.first() {
        return Ok(*ip);
    }
    // Sends nothing: connecting a UDP socket only asks which route the kernel would take.
    let routed =
        UdpSocket::bind("0.0.0.0:0").and_then(|s| s.connect("192.0.2.1:9").and_then(|()| s.local_addr()));
    routed
        .map(|a| a.ip())
        .map_err(Failure::system("no address at which others reach this host; set PUSHGATE_HOST to one"))
}

// ------------------------------------------------------------------ accepting

enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// What NCCL calls a listenComm. Accepts one connection after the other.
pub struct Listener {
    nonce: Nonce,
    socket: Socket,
    class: Option<u8>,
    state: Mutex<Accepting>,
    runtime: Arc<Runtime>,
}

#[derive(Default)]
struct Accepting {
    strangers: Vec<(Channel, Instant)>,
    /// Connectors that have greeted.
    ready: Vec<(Channel, Frame)>,
    current: Option<Progress>,
}

impl Listener {
    /// Starts to listen; returns the handle for connectors.
    pub fn new(runtime: Arc<Runtime>, class: Option<u8>) -> Result<(Self, [u8; handle::BYTES])> {
        let nonce = random()?;
        let failed = || Failure::system("listening for connections");
        let (socket, address) = match &runtime.loaded.rdma {
            None => {
                let name = UnixAddr::from_abstract_name(name_of(&nonce)).map_err(failed())?;
                let socket = UnixListener::bind_addr(&name).map_err(failed())?;
                socket.set_nonblocking(true).map_err(failed())?;
                (Socket::Unix(socket), Address::Unix(boot_id()))
            }
            Some(device) => {
                let ip = own_address(&runtime.loaded.settings, device)?;
                let socket = TcpListener::bind((ip, 0)).map_err(Failure::system(format!(
                    "listening for connections at {ip}; set PUSHGATE_HOST to another address of this host"
                )))?;
                socket.set_nonblocking(true).map_err(failed())?;
                let address = socket.local_addr().map_err(failed())?;
                (Socket::Tcp(socket), Address::Tcp(address))
            }
        };
        let bytes = Handle { nonce, address }.encode();
        Ok((Listener { nonce, socket, class, state: Mutex::default(), runtime }, bytes))
    }

    /// Returns the next connection if it is ready.
    pub fn accept(&self) -> Result<Option<Box<Comm>>> {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        let state = &mut *state;
        if state.current.is_none() {
            self.let_in(&mut state.strangers)?;
            self.hear(state);
        }
        loop {
            if state.current.is_none() {
                if state.ready.is_empty() {
                    return Ok(None);
                }
                let (channel, frame) = state.ready.remove(0);
                match greeting(&frame.0, &self.nonce) {
                    // Any process can connect here and send anything.
                    Err(e) => {
                        tracing::warn!("refused a connection at the listening socket: {e}");
                        continue;
                    }
                    Ok(offer) => {
                        let end = NewEnd::new(&self.runtime, Role::Receive, self.class)?;
                        let (own, fds) = end.offer()?;
                        let mut progress = Progress::new(channel);
                        let answer = greet_with(self.nonce, own);
                        let made =
                            progress.channel.send(&bytes_of(&answer), fds).map_err(lost).and_then(|_| {
                                progress.take(end.take(
                                    &self.runtime,
                                    offer,
                                    frame.1,
                                    progress.channel.peer_pid(),
                                )?)
                            });
                        if let Err(e) = made {
                            self.gave_up(&e);
                            continue;
                        }
                        state.current = Some(progress);
                    }
                }
            }
            let Some(current) = &mut state.current else { continue };
            match current.advance(&self.runtime) {
                Ok(None) => return Ok(None),
                Ok(Some(joined)) => {
                    let channel = state.current.take().expect("it is there").channel;
                    return Comm::new(self.runtime.clone(), joined, channel.into_stream(), Role::Receive)
                        .map(Some);
                }
                Err(e) => {
                    state.current = None;
                    self.gave_up(&e);
                }
            }
        }
    }

    /// Logs a connection that failed. The connector notices by the end of its socket, and NCCL by
    /// the connector.
    fn gave_up(&self, e: &Failure) {
        tracing::warn!("a connection failed while it was set up; waiting for the next one: {e}");
    }

    fn let_in(&self, strangers: &mut Vec<(Channel, Instant)>) -> Result<()> {
        loop {
            let stream = match &self.socket {
                Socket::Unix(s) => s.accept().map(|(s, _)| Stream::Unix(s)),
                Socket::Tcp(s) => s.accept().and_then(|(s, _)| Stream::tcp(s)),
            };
            match stream {
                Ok(stream) if is_ours(&stream) => {
                    if strangers.len() == STRANGERS {
                        strangers.remove(0);
                    }
                    strangers.push((Channel::new(stream), Instant::now()));
                }
                Ok(_) => tracing::warn!("refused a process of another user at the listening socket"),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The connector had gone before we accepted it.
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted
                    ) => {}
                Err(e) => return Err(Failure::system("accepting a connection")(e)),
            }
        }
    }

    fn hear(&self, state: &mut Accepting) {
        for (mut channel, since) in std::mem::take(&mut state.strangers) {
            match channel.receive() {
                Ok(Some(frame)) => state.ready.push((channel, frame)),
                Ok(None) if since.elapsed() < GREETING => state.strangers.push((channel, since)),
                Ok(None) => {
                    tracing::warn!("a connection at the listening socket did not greet within {GREETING:?}")
                }
                Err(e) => tracing::warn!("refused a connection at the listening socket: {e}"),
            }
        }
    }
}

/// Over Unix sockets, accepts only processes of our own user or root's, because they get our
/// memory.
fn is_ours(stream: &Stream) -> bool {
    match stream {
        Stream::Unix(s) => {
            peer_cred(s).is_ok_and(|peer| peer.uid == rustix::process::geteuid().as_raw() || peer.uid == 0)
        }
        Stream::Tcp(_) => true,
    }
}

// ------------------------------------------------------------------ both ends

/// A connection between the offers and the joined queue pair.
struct Progress {
    channel: Channel,
    joined: Unclaimed,
    exchange: Option<Box<Exchange>>,
}

/// A queue pair that belongs to no connection yet. If it is dropped here, the engine lets go of it
/// before the GPU lets go of its memory.
struct Unclaimed(Option<Joined>);

impl Drop for Unclaimed {
    fn drop(&mut self) {
        let Some(mut joined) = self.0.take() else { return };
        if let Err(EngineError::Unsettled(_)) = joined.lane.engine.remove_qp(joined.qp) {
            std::mem::forget(std::mem::take(&mut joined.registrations));
        }
    }
}

impl Progress {
    fn new(channel: Channel) -> Self {
        Progress { channel, joined: Unclaimed(None), exchange: None }
    }

    fn take(&mut self, taken: Taken) -> Result<()> {
        match taken {
            Taken::Joined(joined) => self.joined.0 = Some(*joined),
            Taken::Exchange(exchange, places) => {
                self.exchange = Some(exchange);
                self.channel.send(&bytes_of(&places), Vec::new()).map_err(lost)?;
            }
        }
        Ok(())
    }

    /// Returns the queue pair once every frame has been sent and received.
    fn advance(&mut self, runtime: &Runtime) -> Result<Option<Joined>> {
        if self.exchange.is_some()
            && let Some(frame) = self.channel.receive().map_err(lost)?
        {
            let exchange = self.exchange.take().expect("checked above");
            self.joined.0 = Some(exchange.join(runtime, frame)?);
        }
        let gone = self.channel.flush().map_err(lost)?;
        Ok(if gone { self.joined.0.take() } else { None })
    }
}

// ----------------------------------------------------------------- connecting

/// The connections that are being made. Each has a mark, by which the connector's copy of its handle names it.
pub struct Attempts {
    made: Mutex<HashMap<u64, Connecting>>,
    next_mark: AtomicU64,
}

/// A connection that is being made.
struct Connecting {
    handle: Handle,
    stage: Stage,
}

enum Stage {
    /// The listener's backlog was full; dial again.
    Again,
    /// The TCP connection is being established.
    Dialing(TcpStream),
    /// The greeting has been sent; there is no answer yet.
    Greeted(NewEnd, Channel),
    Joining(Box<Progress>),
}

impl Attempts {
    /// No attempt yet.
    pub fn new() -> Self {
        Attempts { made: Mutex::default(), next_mark: AtomicU64::new(1) }
    }

    /// Connects to a listener if that can be completed by now. The call changes the handle to
    /// remember what it has begun.
    pub fn connect(
        &self,
        runtime: Arc<Runtime>,
        bytes: &mut [u8; handle::BYTES],
        class: Option<u8>,
    ) -> Result<Option<Box<Comm>>> {
        let wanted = Handle::decode(bytes)?;
        let table = || self.made.lock().unwrap_or_else(|e| e.into_inner());
        let mark = handle::mark(bytes);
        let connecting = match mark {
            0 => Connecting { handle: wanted, stage: Stage::Again },
            _ => table().remove(&mark).filter(|c| c.handle == wanted).ok_or_else(|| {
                let text = format!("a connection handle that names attempt {mark}, which was never begun");
                Failure::new(Code::Argument, text)
            })?,
        };
        handle::set_mark(bytes, 0);
        match connecting.advance(&runtime, class)? {
            Advanced::Done(joined, stream) => Comm::new(runtime, *joined, stream, Role::Send).map(Some),
            Advanced::Later(connecting) => {
                let mark = self.next_mark.fetch_add(1, Ordering::Relaxed);
                table().insert(mark, *connecting);
                handle::set_mark(bytes, mark);
                Ok(None)
            }
        }
    }
}

enum Advanced {
    Done(Box<Joined>, Stream),
    Later(Box<Connecting>),
}

impl Connecting {
    fn advance(self, runtime: &Runtime, class: Option<u8>) -> Result<Advanced> {
        let Connecting { handle, mut stage } = self;
        let later = |stage| Ok(Advanced::Later(Box::new(Connecting { handle, stage })));
        loop {
            stage = match stage {
                Stage::Again => match handle.address {
                    Address::Unix(host) => match dial_unix(&handle.nonce, host)? {
                        Some(stream) => greet(runtime, &handle, Stream::Unix(stream), class)?,
                        None => return later(Stage::Again),
                    },
                    Address::Tcp(to) => Stage::Dialing(dial_tcp(to)?),
                },
                Stage::Dialing(stream) => {
                    let mut fds = [PollFd::new(&stream, PollFlags::OUT)];
                    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                    if poll(&mut fds, Some(&now)).unwrap_or(0) == 0 {
                        return later(Stage::Dialing(stream));
                    }
                    let Address::Tcp(to) = handle.address else { unreachable!("it was dialed") };
                    let unreachable = |e: Errno| {
                        lost(format!("{to} can't be reached: {e}; may the hosts reach each other there?"))
                    };
                    sockopt::socket_error(&stream).map_err(unreachable)?.map_err(unreachable)?;
                    greet(runtime, &handle, Stream::tcp(stream).map_err(lost)?, class)?
                }
                Stage::Greeted(end, mut channel) => {
                    channel.flush().map_err(lost)?;
                    match channel.receive().map_err(lost)? {
                        None => return later(Stage::Greeted(end, channel)),
                        Some((bytes, fds)) => {
                            let offer = greeting(&bytes, &handle.nonce)?;
                            let mut progress = Progress::new(channel);
                            let taken = end.take(runtime, offer, fds, progress.channel.peer_pid())?;
                            progress.take(taken)?;
                            Stage::Joining(Box::new(progress))
                        }
                    }
                }
                Stage::Joining(mut progress) => match progress.advance(runtime)? {
                    Some(joined) => {
                        return Ok(Advanced::Done(Box::new(joined), progress.channel.into_stream()));
                    }
                    None => return later(Stage::Joining(progress)),
                },
            }
        }
    }
}

fn greet(runtime: &Runtime, handle: &Handle, stream: Stream, class: Option<u8>) -> Result<Stage> {
    if !is_ours(&stream) {
        return Err(lost("the listener runs as another user"));
    }
    let end = NewEnd::new(runtime, Role::Send, class)?;
    let (offer, fds) = end.offer()?;
    let mut channel = Channel::new(stream);
    channel.send(&bytes_of(&greet_with(handle.nonce, offer)), fds).map_err(lost)?;
    Ok(Stage::Greeted(end, channel))
}

/// Dials a Unix socket. `None`: the listener's backlog is full, try again.
fn dial_unix(nonce: &Nonce, host: [u8; 16]) -> Result<Option<UnixStream>> {
    if host != boot_id() {
        return Err(lost(
            "the listener is on another host, where qp = local can't go: set PUSHGATE_QP=verbs",
        ));
    }
    let name = name_of(nonce);
    let address =
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(Failure::system("a socket's name"))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(Failure::system("socket"))?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(Some(socket.into())),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(e) => Err(lost(format!("{name}: {e}; its listener is closed, or in another network namespace"))),
    }
}

fn dial_tcp(to: SocketAddr) -> Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(Failure::system("socket"))?;
    match rustix::net::connect(socket.as_fd(), &to) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket.into()),
        Err(e) => Err(lost(format!("{to} can't be reached: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_of_another_version_is_refused_by_its_version() {
        let say = |version: u32, offer: &str| {
            let nonce = [7u8; 16];
            let text = format!(r#"{{"version":{version},"nonce":{nonce:?},"offer":{offer}}}"#);
            greeting(text.as_bytes(), &nonce).err().expect("no such offer").text
        };
        for offer in [r#"{"Verbs":{"qp":1}}"#, r#"{"Other":null}"#, "7"] {
            for version in [1, 4] {
                let text = say(version, offer);
                assert!(text.contains(&format!("speaks version {version}")), "{text}");
            }
            let text = say(3, offer);
            assert!(!text.contains("speaks version"), "{text}");
        }
    }
}
