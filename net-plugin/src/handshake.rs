//! How two ends connect. Nothing here waits: every call looks at what has arrived, goes as far as
//! it can, and says whether the connection is complete.
//!
//! The connector chooses the transport by what it dials (`dial.rs`), and the listener takes that of the socket at which the
//! connection has come. Each end greets with versions and nonce, the connector first. Then both make their queue pair by
//! the frames of `pushgate_proxy::connect`. A sender that does not greet in time, or not as an end of this plugin would,
//! loses its own connection and disturbs no other one.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pushgate::settings::Transport;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::closing::Closes;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::versions::Versions;
use pushgate_proxy::connect::{self, Connect, Event, Fds, Incarnation};
use pushgate_proxy::engine::EngineError;
use pushgate_proxy::session::Status;
use serde::{Deserialize, Serialize};

use crate::again::{Here, Place, Token};
use crate::alike::Alike;
use crate::dial::{self, Dial, Dialed};
use crate::error::{Code, Failure, Result};
use crate::handle::{self, Between, Handle, Key, Nonce};
use crate::hosts::Listed;
use crate::identity::Identity;
use crate::join::{Again, Joined, MetEnd, NewEnd, Purpose, ReadyEnd, Role};
use crate::listening::{Sockets, terms};
use crate::log;
use crate::reaching::Reaching;
use crate::runtime::{Loaded, Runtime};
use crate::socket::{Channel, Line, Renewal, Stream};

/// Versions that this build speaks of everything that the two ends say to each other.
pub const VERSIONS: Versions = Versions::new(6, 6);
/// Time within which a connector must greet. NCCL calls the connector from a thread that also allocates and registers memory, and
/// calls nothing meanwhile. A connection that never greets occupies one descriptor for this time.
pub const GREETING: Duration = Duration::from_secs(600);
/// How many connections may be about to greet. The ranks of a job may all come at once, as for their first puts (RMA), and NCCL calls
/// none of them to the end before the others.
pub const STRANGERS: usize = 2048;
/// The most frames that one end takes from the other. Three are needed: greeting, RESUME, READY.
const FRAMES: u32 = 8;

/// The first frame of either end.
#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    /// The oldest version that the sender speaks.
    version: u32,
    /// The newest, if that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    newest: Option<u32>,
    nonce: Nonce,
    /// What NCCL was told at the sender.
    told: Alike,
    /// The sender's RDMA devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    listed: Option<Listed>,
    /// Over TCP: where the sender is dialled when the connection broke, if it replaces connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    again: Option<Place>,
    /// Over TCP: the queue pair is over `tcp`, else over `verbs`. The connector says so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    links: bool,
}

/// The part that the greetings of all versions have.
#[derive(Deserialize)]
struct Spoken {
    version: u32,
    newest: Option<u32>,
}

/// The bytes of this end's greeting.
fn greet_with(
    key: &Key,
    told: &Alike,
    listed: Option<&Listed>,
    again: Option<Place>,
    links: bool,
) -> Vec<u8> {
    let (nonce, again) = (key.nonce(), again.map(|place| place.hidden(&key.secret())));
    let (version, newest, told) = (VERSIONS.oldest(), VERSIONS.newest(), told.clone());
    let greeting = Greeting { version, newest, nonce, told, listed: listed.cloned(), again, links };
    serde_json::to_vec(&greeting).expect("it is plain data")
}

/// The bytes of this process's greeting.
fn greet(runtime: &Runtime, key: &Key, again: Option<Place>, links: bool) -> Vec<u8> {
    greet_with(key, &runtime.loaded.alike, runtime.loaded.listed.as_ref(), again, links)
}

fn lost(e: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Remote, format!("making a connection: {e}"))
}

/// Checks a frame that should be a greeting for the listener with this key. What it says is checked by [`same_told`].
fn greeting(bytes: &[u8], key: &Key) -> Result<Greeting> {
    // The versions come first: the rest of a greeting of another version can't be read.
    let Spoken { version, newest } = serde_json::from_slice(bytes).map_err(|e| lost(Foreign::word(e)))?;
    VERSIONS.agree(Versions::told(version, newest)).map_err(|e| lost(format!("the other end: {e}")))?;
    let g: Greeting = serde_json::from_slice(bytes).map_err(|e| lost(Foreign::word(e)))?;
    if g.nonce != key.nonce() {
        return Err(lost("the greeting is for another listener"));
    }
    let again = g.again.map(|place| place.hidden(&key.secret()));
    Ok(Greeting { again, ..g })
}

/// Refuses an end at which NCCL was told other things than here, or other devices than at another rank of that end's host.
fn same_told(runtime: &Runtime, theirs: &Greeting) -> Result<()> {
    let listed = || theirs.listed.as_ref().and_then(|listed| runtime.hosts.differs(listed));
    match runtime.loaded.alike.differs(&theirs.told).or_else(listed) {
        None => Ok(()),
        Some(why) => Err(Failure::new(Code::Usage, why)),
    }
}

/// 16 bytes that nobody can guess.
pub fn random() -> Result<Nonce> {
    let mut nonce = [0; 16];
    let mut file = std::fs::File::open("/dev/urandom").map_err(Failure::system("/dev/urandom"))?;
    std::io::Read::read_exact(&mut file, &mut nonce).map_err(Failure::system("/dev/urandom"))?;
    Ok(nonce)
}

// ------------------------------------------------------------------ accepting

/// Accepts one connection after the other.
pub struct Listener {
    key: Key,
    sockets: Sockets,
    class: Option<u8>,
    state: Mutex<Accepting>,
    runtime: Arc<Runtime>,
    /// Of strangers.
    closes: Closes,
}

#[derive(Default)]
struct Accepting {
    strangers: Vec<(Channel, Instant)>,
    /// Connectors that have greeted.
    ready: Vec<(Channel, Vec<u8>)>,
    current: Option<Progress>,
}

impl Listener {
    /// Starts to listen; returns the handle for connectors.
    pub fn new(runtime: Arc<Runtime>, class: Option<u8>) -> Result<(Self, [u8; handle::BYTES])> {
        let key = Key(random()?);
        let sockets = Sockets::open(&runtime.loaded, &key)?;
        let (unix, tcp) = sockets.addresses()?;
        let Loaded { rdma, tcp: links, identity, .. } = &*runtime.loaded;
        let between = match tcp {
            Some(_) => Between { verbs: !rdma.is_empty(), tcp: *links },
            None => Between::default(),
        };
        let bytes = Handle { key, unix, tcp, between, listener: *identity }.encode();
        let (state, closes) = (Mutex::default(), Closes::default());
        Ok((Listener { key, sockets, class, state, runtime, closes }, bytes))
    }

    /// The threads that its queue pairs are carried by.
    pub fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    /// Returns the next queue pair if it is ready. All calls name the same purpose.
    pub fn next(&self, purpose: &Purpose) -> Result<Option<Made>> {
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
                let (channel, bytes) = state.ready.remove(0);
                // An end that is refused hears from our greeting why.
                let answer = || {
                    let ours = greet(&self.runtime, &self.key, None, false);
                    let _ = channel.send(&ours, Vec::new());
                };
                // Any process can connect here and send anything.
                let heard = greeting(&bytes, &self.key).and_then(|heard| {
                    let transport = transport(&self.runtime, channel.stream(), heard.links)?;
                    Ok((heard, transport))
                });
                let (again, transport) = match heard {
                    Ok((heard, transport)) => {
                        // It knew the key, so it is a rank of this job, and none that fits will come in its place.
                        same_told(&self.runtime, &heard).inspect_err(|_| answer())?;
                        (heard.again, transport)
                    }
                    Err(e) => {
                        answer();
                        limited!(warn, 0u32, "refused a connection at the listening socket: {e}");
                        continue;
                    }
                };
                let end = NewEnd::new(&self.runtime, Role::Receive, self.class, transport, purpose)?;
                let offer = end.offer()?;
                let mut progress = Progress::new(&self.runtime, channel, end, offer, self.key, transport)?;
                progress.greeted(again, Role::Receive);
                state.current = Some(progress);
            }
            let Some(current) = &mut state.current else { continue };
            // The connector is the rank that this call waits for: if it fails, no other one comes in its place.
            let joined = current.advance(&self.runtime).inspect_err(|_| state.current = None)?;
            return Ok(joined.and_then(|joined| {
                let line = state.current.take()?.channel.line().clone();
                Some(Made { joined: Box::new(joined), line })
            }));
        }
    }

    fn let_in(&self, strangers: &mut Vec<(Channel, Instant)>) -> Result<()> {
        // More wait at the socket: these are processes of this user, or have proved the key.
        while strangers.len() < STRANGERS
            && let Some(stream) = self.sockets.accept()?
        {
            strangers.push((Channel::closed_by(stream, &self.closes), Instant::now()));
        }
        Ok(())
    }

    fn hear(&self, state: &mut Accepting) {
        for (mut channel, since) in std::mem::take(&mut state.strangers) {
            match channel.receive() {
                // A greeting has no descriptors.
                Ok(Some((bytes, fds))) => {
                    channel.discard(fds);
                    state.ready.push((channel, bytes));
                }
                Ok(None) if since.elapsed() < GREETING => state.strangers.push((channel, since)),
                Ok(None) => {
                    limited!(
                        warn,
                        0u32,
                        "a connection at the listening socket did not greet within {GREETING:?}"
                    )
                }
                Err(e) => limited!(warn, 0u32, "refused a connection at the listening socket: {e}"),
            }
        }
    }
}

/// The transport of a queue pair whose connector came over `stream`, and asks for `tcp` if `links`.
fn transport(runtime: &Runtime, stream: &Stream, links: bool) -> Result<Transport> {
    let loaded = &runtime.loaded;
    match stream {
        Stream::Unix(_) => Ok(Transport::Local),
        Stream::Tcp(_) if links && loaded.tcp => Ok(Transport::Tcp),
        Stream::Tcp(_) if !links && !loaded.rdma.is_empty() => Ok(Transport::Verbs),
        Stream::Tcp(_) => {
            Err(lost("it asks for queue pairs that this end does not make; set qp alike on all ranks"))
        }
    }
}

// ------------------------------------------------------------------ both ends

/// A connection between the greeting and the joined queue pair. NCCL calls as long as it waits, and gives up by closing
/// the connection, so this end has no limit of its own and no clock.
struct Progress {
    channel: Channel,
    key: Key,
    /// That of the queue pair.
    transport: Transport,
    /// How many frames of the other end have come. The first is its greeting.
    heard: u32,
    /// `None` once the queue pair's engine has it.
    connect: Option<Connect<Fds>>,
    step: Step,
    joined: Unclaimed,
    /// By which the other end names this connection when it dials again.
    token: Option<Token>,
}

/// How far this end is.
enum Step {
    New(NewEnd),
    Ready(ReadyEnd),
    /// Both ends are ready; the link may still lack its streams.
    Met(Box<MetEnd>),
    /// Joined, or failed on the way.
    Over,
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
    /// Greets the other end and makes it an offer.
    fn new(
        runtime: &Runtime,
        channel: Channel,
        end: NewEnd,
        offer: connect::Frame,
        key: Key,
        transport: Transport,
    ) -> Result<Self> {
        let between_hosts = transport != Transport::Local;
        let token = runtime.watch.here().filter(|_| between_hosts).map(Here::token).transpose()?;
        let links = transport == Transport::Tcp;
        let ours = greet(runtime, &key, token.as_ref().map(Token::place), links);
        channel.send(&ours, Vec::new()).map_err(lost)?;
        // A connection has one call of each end; none is repeated.
        let own = Incarnation::MIN;
        let connect = Connect::new(own, offer, u64::MAX, Status::new(abi::PUSHGATE_ABORTED), 0);
        let connect = Some(connect);
        let (step, joined) = (Step::New(end), Unclaimed(None));
        Ok(Progress { channel, key, transport, heard: 0, connect, step, joined, token })
    }

    /// The other end has greeted; it is dialled again at `again` if this end dials, and dials this end otherwise.
    fn greeted(&mut self, again: Option<Place>, role: Role) {
        self.heard = 1;
        if let Some((own, other)) = self.token.take_if(|_| again.is_some()).zip(again) {
            let other = match self.channel.stream() {
                Stream::Tcp(s) => s.peer_addr().map_or(other, |peer| other.reached(peer)),
                Stream::Unix(_) => other,
            };
            self.channel.line().may_renew(Renewal { own, dials: role == Role::Send, other });
        }
    }

    /// Returns the queue pair once every frame has been sent and received.
    fn advance(&mut self, runtime: &Runtime) -> Result<Option<Joined>> {
        let advanced = self.exchange(runtime);
        // An end that refuses this one greets it and closes, perhaps before this end has sent its offer.
        if advanced.is_err()
            && self.heard == 0
            && let Ok(Some((bytes, fds))) = self.channel.receive()
        {
            self.channel.discard(fds);
            same_told(runtime, &greeting(&bytes, &self.key)?)?;
        }
        advanced
    }

    fn exchange(&mut self, runtime: &Runtime) -> Result<Option<Joined>> {
        self.perform(runtime)?;
        // Looked at before the streams: they come before the other end closes.
        let is_hung_up = matches!(self.step, Step::Met(_)) && self.channel.stream().is_hung_up();
        self.join(runtime)?;
        if is_hung_up && matches!(self.step, Step::Met(_)) {
            return Err(lost(
                "the other end gave up while the streams of the queue pair were to come; its log says why",
            ));
        }
        // What comes after the last frame is the watch's.
        while self.joined.0.is_none()
            && !matches!(self.step, Step::Met(_))
            && let Some((bytes, fds)) = self.channel.receive().map_err(lost)?
        {
            if self.heard == 0 {
                self.channel.discard(fds);
                let heard = greeting(&bytes, &self.key)?;
                same_told(runtime, &heard)?;
                self.greeted(heard.again, Role::Send);
                continue;
            }
            self.heard += 1;
            // Otherwise a peer that sends all the time would keep this call going, and one that reads nothing could make
            // our answers pile up.
            if self.heard > FRAMES {
                return Err(lost(format!("the other end sent more than {FRAMES} frames")));
            }
            let frame = connect::Frame { bytes, along: fds.into() };
            let connect = self.connect.as_mut().expect("it is not joined");
            connect.take(frame, 0).map_err(lost)?;
            self.perform(runtime)?;
        }
        let sent = self.channel.flush().map_err(lost)?;
        Ok(if sent { self.joined.0.take() } else { None })
    }

    /// Joins the queue pair, if both ends are ready and the link has all that it needs.
    fn join(&mut self, runtime: &Runtime) -> Result<()> {
        if let Step::Met(end) = &mut self.step
            && end.is_complete()?
            && let Step::Met(end) = std::mem::replace(&mut self.step, Step::Over)
        {
            let pid = self.channel.stream().peer_pid();
            let again = Again { connect: &mut self.connect, line: self.channel.line() };
            self.joined.0 = Some(end.join(runtime, pid, Some(again))?);
        }
        Ok(())
    }

    /// Does everything that the machine says.
    fn perform(&mut self, runtime: &Runtime) -> Result<()> {
        while let Some(connect) = &mut self.connect
            && let Some(event) = connect.poll()
        {
            match (event, std::mem::replace(&mut self.step, Step::Over)) {
                (Event::Send(connect::Frame { bytes, along }), step) => {
                    self.step = step;
                    let fds = along.into_owned().map_err(Failure::system("a connection's descriptors"))?;
                    self.channel.send(&bytes, fds).map_err(lost)?;
                }
                (Event::Prepare { epoch, offer }, Step::New(end)) => {
                    let ready = end.prepare(runtime, offer)?;
                    connect.prepared(epoch, ready.places(), 0);
                    self.step = Step::Ready(ready);
                }
                (Event::Go { places, .. }, Step::Ready(end)) => {
                    self.step = Step::Met(Box::new(end.meet(&places)?));
                    return self.join(runtime);
                }
                _ => return Err(lost("the other end gave it up; its log says why")),
            }
        }
        Ok(())
    }
}

// ----------------------------------------------------------------- connecting

/// A queue pair that was just made, and the socket by which its ends hear of each other's end.
pub struct Made {
    pub joined: Box<Joined>,
    pub line: Arc<Line>,
}

/// The connections that are being made. Each has a mark, by which the connector's copy of its handle names it.
pub struct Attempts {
    made: Mutex<HashMap<u64, Connecting>>,
    next_mark: AtomicU64,
    /// The peers of which the log has said how they are reached, and how.
    told: Mutex<HashSet<(Identity, String)>>,
}

/// A connection that is being made.
struct Connecting {
    handle: Handle,
    stage: Stage,
    transport: Transport,
    /// Why the transport is what it is.
    why: String,
    /// Why the peer can't be reached by `local`, once that was tried.
    not_local: Option<String>,
}

enum Stage {
    /// To be dialed, perhaps again.
    Again,
    /// Over TCP: to one of the listener's addresses, and through its door.
    Reaching(Box<Reaching>),
    /// This end has greeted.
    Joining(Box<Progress>),
}

impl Attempts {
    /// No attempt yet.
    pub fn new() -> Self {
        Attempts { made: Mutex::default(), next_mark: AtomicU64::new(1), told: Mutex::default() }
    }

    /// Makes a queue pair to a listener if that can be completed by now. The call changes the handle to
    /// remember what it has begun. All calls with a handle name the same purpose.
    pub fn dial(
        &self,
        runtime: &Arc<Runtime>,
        bytes: &mut [u8; handle::BYTES],
        class: Option<u8>,
        purpose: &Purpose,
    ) -> Result<Option<Made>> {
        let handle = Handle::decode(bytes)?;
        let table = || self.made.lock().unwrap_or_else(|e| e.into_inner());
        let mark = handle::mark(bytes);
        let mut connecting = match mark {
            0 => Connecting::new(handle),
            _ => table().remove(&mark).filter(|c| c.handle == handle).ok_or_else(|| {
                let text = format!("a connection handle that names attempt {mark}, which was never begun");
                Failure::new(Code::Argument, text)
            })?,
        };
        handle::set_mark(bytes, 0);
        match connecting.advance(runtime, class, purpose)? {
            Some(made) => {
                self.tell(&handle.listener, &made.joined, &connecting.why);
                Ok(Some(made))
            }
            None => {
                let mark = self.next_mark.fetch_add(1, Ordering::Relaxed);
                table().insert(mark, connecting);
                handle::set_mark(bytes, mark);
                Ok(None)
            }
        }
    }

    /// Gives up what [`Attempts::dial`] has begun with this handle.
    pub fn abandon(&self, bytes: &mut [u8; handle::BYTES]) {
        let begun = self.made.lock().unwrap_or_else(|e| e.into_inner()).remove(&handle::mark(bytes));
        handle::set_mark(bytes, 0);
        drop(begun);
    }

    /// Logs, once for each peer and device, how the peer is reached.
    fn tell(&self, peer: &Identity, joined: &Joined, why: &str) {
        let by = match &joined.lane.device {
            Some(rdma) if joined.transport == Transport::Verbs => format!("verbs ({})", rdma.describe()),
            _ => joined.transport.to_string(),
        };
        let mut told = self.told.lock().unwrap_or_else(|e| e.into_inner());
        if !told.insert((*peer, by.clone())) {
            return;
        }
        log::init(&format!("queue pairs to {peer} are {by}: {why}"));
    }
}

impl Connecting {
    fn new(handle: Handle) -> Self {
        let transport = Transport::Local;
        Connecting { handle, stage: Stage::Again, transport, why: String::new(), not_local: None }
    }

    /// Goes as far as it can; the queue pair and its socket once they are there.
    fn advance(&mut self, runtime: &Runtime, class: Option<u8>, purpose: &Purpose) -> Result<Option<Made>> {
        loop {
            self.stage = match std::mem::replace(&mut self.stage, Stage::Again) {
                Stage::Again => {
                    let here = dial::Here::of(&runtime.loaded);
                    let (to, why) = dial::choose(here, &self.handle, self.not_local.as_deref())?;
                    self.why = why;
                    match to {
                        Dial::Tcp(to, transport) => {
                            self.transport = transport;
                            let terms = terms(&self.handle.key, runtime.loaded.settings.tls);
                            let host = self.handle.listener.host();
                            Stage::Reaching(Box::new(Reaching::new(&to, terms, host)))
                        }
                        Dial::Unix => match dial::dial_unix(&self.handle.key.nonce())? {
                            Dialed::Connected(stream) => {
                                self.transport = Transport::Local;
                                begin(runtime, &self.handle, stream, (class, Transport::Local), purpose)?
                            }
                            Dialed::Later => return Ok(None),
                            Dialed::Nowhere(why) => {
                                self.not_local = Some(why);
                                Stage::Again
                            }
                        },
                    }
                }
                Stage::Reaching(mut reaching) => {
                    let Some(stream) = reaching.advance().map_err(lost)? else {
                        self.stage = Stage::Reaching(reaching);
                        return Ok(None);
                    };
                    let replaced = runtime.loaded.settings.recovery().is_some();
                    let stream = Stream::tcp(stream, replaced).map_err(lost)?;
                    begin(runtime, &self.handle, stream, (class, self.transport), purpose)?
                }
                Stage::Joining(mut progress) => match progress.advance(runtime) {
                    Ok(Some(joined)) => {
                        let line = progress.channel.line().clone();
                        return Ok(Some(Made { joined: Box::new(joined), line }));
                    }
                    Ok(None) => {
                        self.stage = Stage::Joining(progress);
                        return Ok(None);
                    }
                    // The listener takes no process of another user, which this end can't always see.
                    Err(e) if progress.heard == 0 && progress.transport == Transport::Local => {
                        self.not_local = Some(format!("its listener turned this process away, {e}"));
                        Stage::Again
                    }
                    Err(e) => return Err(e),
                },
            }
        }
    }
}

/// Greets the listener of a handle.
fn begin(
    runtime: &Runtime,
    handle: &Handle,
    stream: Stream,
    (class, transport): (Option<u8>, Transport),
    purpose: &Purpose,
) -> Result<Stage> {
    let end = NewEnd::new(runtime, Role::Send, class, transport, purpose)?;
    let offer = end.offer()?;
    let progress = Progress::new(runtime, Channel::new(stream), end, offer, handle.key, transport)?;
    Ok(Stage::Joining(Box::new(progress)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream;

    use pushgate::settings::QpKind;
    use pushgate_driver_shim::closing::PeerStream;
    use pushgate_proxy::addresses::Places;
    use pushgate_tests::fuse::Hanging;
    use pushgate_tests::fuzz::{depth, fuzz, kind};
    use pushgate_tests::lingering::lingering;
    use pushgate_tests::users::{STRANGER, as_user, is_root};
    use pushgate_tests::wait_until;

    use super::*;

    const MESSAGES: Purpose = Purpose::Messages { dev: 0 };

    #[test]
    fn a_greeting_of_another_version_is_refused_by_its_version() {
        let key = Key([7u8; 16]);
        let nonce = key.nonce();
        let say = |version: u32, rest: &str| {
            let text = format!(r#"{{"version":{version},{rest}}}"#);
            greeting(text.as_bytes(), &key).map_err(|e| e.text)
        };
        // Version 3 had the offer in its greeting.
        let earlier = format!(r#""nonce":{nonce:?},"offer":{{"Verbs":{{"qp":1}}}}"#);
        for rest in [&earlier[..], r#""Other":null"#] {
            for version in [1, 3, 5, 7] {
                let text = say(version, rest).unwrap_err();
                assert!(text.contains(&format!("speaks version {version}, expected 6")), "{text}");
            }
        }
        let text = say(6, r#""Other":null"#).unwrap_err();
        assert!(!text.contains("speaks version"), "{text}");
        say(6, &format!(r#""nonce":{nonce:?},"told":{{}}"#)).unwrap();
    }

    #[test]
    fn ends_at_which_nccl_was_told_different_things_refuse_each_other_by_name() {
        let [here, there] = [QpKind::Local, QpKind::Auto]
            .map(|qp| Runtime::of_a_test_with(crate::testing::WINDOW, |settings| settings.qp = qp));
        let (listener, mut bytes) = Listener::new(there, None).unwrap();
        let attempts = Attempts::new();
        assert!(attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap().is_none());
        let refused = crate::testing::until(|| listener.next(&MESSAGES).err());
        let e = crate::testing::until(|| attempts.dial(&here, &mut bytes, None, &MESSAGES).err());
        assert!(refused.text.contains("qp is auto here and local there"), "{refused}");
        assert!(e.text.contains("qp is local here and auto there"), "{e}");
        assert_eq!([refused.code, e.code], [Code::Usage; 2]);
    }

    #[test]
    fn an_end_that_is_refused_before_it_has_sent_its_offer_hears_why() {
        let [here, there] = [QpKind::Local, QpKind::Auto]
            .map(|qp| Runtime::of_a_test_with(crate::testing::WINDOW, |settings| settings.qp = qp));
        let (listener, bytes) = Listener::new(there, None).unwrap();
        let handle = Handle::decode(&bytes).unwrap();
        let Dialed::Connected(stream) = dial::dial_unix(&handle.key.nonce()).unwrap() else {
            panic!("it listens")
        };
        let joining = begin(&here, &handle, stream, (None, Transport::Local), &MESSAGES).unwrap();
        let Stage::Joining(mut progress) = joining else { panic!("it joins") };
        crate::testing::until(|| listener.next(&MESSAGES).err());
        let e = progress.advance(&here).err().expect("the listener refuses it");
        assert!(e.code == Code::Usage && e.text.contains("qp is local here and auto there"), "{e}");
    }

    #[test]
    fn a_listener_that_turns_a_process_away_is_not_reached_by_local() {
        let runtime = Runtime::of_a_test(crate::testing::WINDOW);
        let key = Key([0x77; 16]);
        let sockets = Sockets::open(&runtime.loaded, &key).unwrap();
        let listener = runtime.loaded.identity;
        let mut bytes = Handle { key, unix: true, tcp: None, between: Between::default(), listener }.encode();
        let attempts = Attempts::new();
        assert!(attempts.dial(&runtime, &mut bytes, None, &MESSAGES).unwrap().is_none());
        // As a listener does with a process of another user.
        drop(sockets.accept().unwrap().expect("a connection"));
        let e = crate::testing::until(|| attempts.dial(&runtime, &mut bytes, None, &MESSAGES).err());
        let why = "local queue pairs do not go there (its listener turned this process away, ";
        assert!(e.text.contains(why) && e.text.contains("no RDMA device for verbs (a test has none)"), "{e}");
    }

    /// A connection to a listener's Unix socket, over which these bytes have come with a descriptor.
    fn stranger(key: &Key, bytes: &[u8], fd: BorrowedFd<'_>) -> Stream {
        let Dialed::Connected(stream) = dial::dial_unix(&key.nonce()).unwrap() else { panic!("it listens") };
        assert_eq!(stream.send(bytes, &[fd]).unwrap(), bytes.len());
        stream
    }

    /// A frame with one descriptor.
    fn frame(bytes: &[u8]) -> Vec<u8> {
        [&b"PGF1"[..], &(bytes.len() as u32).to_le_bytes(), &1u32.to_le_bytes(), bytes].concat()
    }

    /// The runtimes of two ends that meet over `local`.
    fn local() -> [Arc<Runtime>; 2] {
        [(); 2]
            .map(|()| Runtime::of_a_test_with(crate::testing::WINDOW, |settings| settings.qp = QpKind::Local))
    }

    #[test]
    fn p7_p8_strangers_of_another_user_who_know_the_key_are_refused_unread_and_the_connector_comes_through() {
        if !is_root("strangers of another user at a listener of the plugin") {
            return;
        }
        let [here, there] = local();
        let (listener, mut bytes) = Listener::new(there, None).unwrap();
        let key = Handle::decode(&bytes).unwrap().key;
        let right = frame(&greet_with(&key, &here.loaded.alike, None, None, false));
        let strangers: Vec<_> = (0..20)
            .map(|_| {
                let (fd, end) = lingering();
                let stranger = as_user(STRANGER, || stranger(&key, &right, fd.as_fd()));
                // The listener's copy may be closed already, and then this close lingers.
                std::thread::spawn(|| drop(fd));
                (stranger, end)
            })
            .collect();
        let accepts = std::thread::spawn(move || crate::testing::until(|| listener.next(&MESSAGES).unwrap()));
        let attempts = Attempts::new();
        let connected = crate::testing::until(|| attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap());
        wait_until("the connector is accepted", || accepts.is_finished());
        drop((connected, accepts.join().unwrap()));
        for (stranger, _) in &strangers {
            // A listener that had read the greeting would answer.
            assert!(!matches!(stranger.receive(&mut [0], &mut Vec::new()), Ok((1.., _))));
        }
    }

    /// Each close of the descriptors hangs for as long as the stranger likes.
    #[test]
    fn p7_p8_greetings_with_files_that_hang_hold_up_no_listener_and_leave_few_threads() {
        // The threads that close begin before there is a file that hangs.
        let _before = PeerStream::from(UnixStream::pair().unwrap().0);
        let hanging = match Hanging::open(1) {
            Ok(hanging) => hanging,
            Err(e) => {
                return pushgate_tests::skip(&format!("closes that hang: no file system in user space: {e}"));
            }
        };
        let [here, there] = local();
        let (listener, mut bytes) = Listener::new(there, None).unwrap();
        let key = Handle::decode(&bytes).unwrap().key;
        let accepts = std::thread::spawn(move || crate::testing::until(|| listener.next(&MESSAGES).unwrap()));
        for n in 0..60 {
            // A frame that is no greeting, or the beginning of a frame.
            let said = if n % 2 == 0 { frame(b"none") } else { b"PGF1".to_vec() };
            stranger(&key, &said, hanging.files()[0].as_fd());
        }
        // Each close under way has two threads.
        wait_until("closes hang", || hanging.waiting() >= 16);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(hanging.waiting(), 16);
        let attempts = Attempts::new();
        let connected = crate::testing::until(|| attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap());
        wait_until("the connector is accepted", || accepts.is_finished());
        drop((connected, accepts.join().unwrap()));
    }

    #[test]
    fn p8_a_connector_that_greets_and_then_sends_frames_without_end_loses_its_connection() {
        let runtime = Runtime::of_a_test(crate::testing::WINDOW);
        let told = runtime.loaded.alike.clone();
        let (listener, bytes) = Listener::new(runtime, None).unwrap();
        let key = Handle::decode(&bytes).unwrap().key;
        let Dialed::Connected(stream) = dial::dial_unix(&key.nonce()).unwrap() else { panic!("it listens") };
        let mut channel = Channel::new(stream);
        channel.send(&greet_with(&key, &told, None, None, false), Vec::new()).unwrap();
        // They change nothing: they are of an end that has never heard of this one.
        let end = connect::end(Incarnation::MIN, None, Status::new(abi::PUSHGATE_ABORTED));
        for _ in 0..FRAMES {
            channel.send(&end, Vec::new()).unwrap();
        }
        let refused = listener.next(&MESSAGES).err().expect("it goes on");
        assert!(refused.text.contains("more than 8 frames"), "{refused}");
        // Greeting and offer at most, then the end of the connection.
        let closed = (0..3).any(|_| channel.receive().is_err());
        assert!(closed, "the connection is still open");
    }

    /// Calls both ends until the listener waits for a connector that has made an offer and is not called any more.
    fn begun() -> (Listener, Arc<Runtime>, Attempts, [u8; handle::BYTES]) {
        let runtime =
            || Runtime::of_a_test_with(crate::testing::WINDOW, |settings| settings.qp = QpKind::Tcp);
        let (here, there) = (runtime(), runtime());
        let (listener, mut bytes) = Listener::new(there, None).unwrap();
        let attempts = Attempts::new();
        crate::testing::until(|| {
            assert!(listener.next(&MESSAGES).unwrap().is_none());
            let is_ready = |current: &Progress| matches!(current.step, Step::Ready(_));
            if listener.state.lock().unwrap().current.as_ref().is_some_and(is_ready) {
                return Some(());
            }
            assert!(attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap().is_none());
            None
        });
        (listener, here, attempts, bytes)
    }

    #[test]
    fn p7_a_connector_that_nccl_does_not_call_for_12_seconds_is_joined() {
        let (listener, here, attempts, mut bytes) = begun();
        let until = Instant::now() + Duration::from_secs(12);
        while Instant::now() < until {
            assert!(listener.next(&MESSAGES).unwrap().is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut connected, mut accepted) = (None, None);
        crate::testing::until(|| {
            if connected.is_none() {
                connected = attempts.dial(&here, &mut bytes, None, &MESSAGES).unwrap();
            }
            // Before the streams that the connector has just begun to dial.
            if accepted.is_none() {
                accepted = listener.next(&MESSAGES).unwrap();
            }
            (connected.is_some() && accepted.is_some()).then_some(())
        });
        for Made { joined, .. } in [connected, accepted].into_iter().flatten() {
            joined.lane.engine.remove_qp(joined.qp).unwrap();
        }
    }

    #[test]
    fn p7_a_listener_whose_connector_gives_up_in_the_middle_fails_its_accept() {
        let (listener, _here, attempts, mut bytes) = begun();
        attempts.abandon(&mut bytes);
        let e = crate::testing::until(|| listener.next(&MESSAGES).err());
        assert_eq!(e.code, Code::Remote, "{e}");
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_greeting_or_handle_of_a_stranger_makes_an_end_of_the_plugin_panic() {
        let key = Key([7; 16]);
        let ours = Alike::of_a_test(&[("devices", "4"), ("tuner", "ours")]);
        let again = Place::of_a_test();
        let listed = Listed::here(&Identity::here(), None, &["mlx5_0", "mlx5_1"]);
        let places = |all: &[&str]| Places::of(&all.iter().map(|at| at.parse().unwrap()).collect::<Vec<_>>());
        let handle = |unix, tcp| {
            let between = Between { verbs: false, tcp: true };
            Handle { key, unix, tcp, between, listener: Identity::here() }.encode().to_vec()
        };
        let seeds = [
            greet_with(&key, &ours, None, None, false),
            greet_with(&key, &Alike::of_a_test(&[("devices", "8")]), Some(&listed), Some(again), true),
            handle(false, places(&["10.1.2.3:4567", "[2001:db8::1]:4567"])),
            handle(true, places(&["[fe80::1%3]:9"])),
        ];
        greeting(&seeds[0], &key).unwrap();
        fuzz(&seeds, |bytes| {
            if let Ok(mut bytes) = <[u8; handle::BYTES]>::try_from(bytes) {
                // The checksum finds accidents; a stranger makes it right.
                handle::seal(&mut bytes);
                return match Handle::decode(&bytes) {
                    Ok(handle) => {
                        assert!(handle.unix || handle.tcp.is_some());
                        assert!(!handle.listener.to_string().contains(char::is_control));
                        handle.unix as u64
                            | (handle.tcp.is_some() as u64) << 1
                            | (handle.between.verbs as u64) << 2
                    }
                    Err(e) => kind(e),
                };
            }
            match greeting(bytes, &key) {
                Ok(heard) => {
                    let why = ours.differs(&heard.told).unwrap_or_default();
                    assert!(!why.contains(char::is_control) && why.len() < 4096, "{why:?}");
                    depth(why.len()) << 2 | (heard.again.is_some() as u64) << 1 | heard.links as u64
                }
                Err(e) => kind(e),
            }
        });
    }
}
