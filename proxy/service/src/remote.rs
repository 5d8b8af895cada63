//! The engine of another process, `pushgate proxy`, as a [`Proxy`]. The process must run already: nothing here starts it.

mod book;
mod takeover;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushgate_core::session::Status;
use pushgate_driver_shim::bell::{self, Bell, Ringer};
use pushgate_driver_shim::closing::PeerStream;
use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::interrupt::{self, Interrupted, LOOK, Turn, Turns};
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::process::Process;
use pushgate_driver_shim::users;
use pushgate_driver_shim::versions::{TooFarApart, Versions};
use pushgate_engine::counters::Counters;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::engine::{EngineError, QpId};
use pushgate_engine::idle::{Step, Wake};
use pushgate_engine::proxy::{Proxy, QpFds, Recovers};
use pushgate_link::RegionSends;
use pushgate_link::memory::Keep;
use pushgate_link::region::Exported;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::book::{Book, QueuePair, Session};
use crate::frame_socket::FrameSocket;
use crate::wire::{self, Answer, Refusal, Reply, Request, TIMEOUT, Usage};

/// The engine that a proxy process runs for this program, and for this program alone.
///
/// Calls may be made from any thread; one call at a time is under way. Each call ends with an answer or, after at most
/// [`TIMEOUT`] (a second longer for each 2 GiB to be mapped), with [`EngineError::Remote`]. After such an error all
/// calls end with that error, because nobody knows how much of the request the proxy carried out.
///
/// A call that the program ends while it waits ([`interrupt::interrupt_by`]) breaks nothing: the proxy's answer is taken by the next
/// call, which undoes what the request has added.
///
/// Queue pairs whose links are replaced outlive the proxy's process: while a thread is in [`RemoteEngine::attend`], the next
/// proxy that listens at the same path goes on with them, and calls wait for that.
///
/// Dropping a `RemoteEngine` ends the engine, as dropping an [`Engine`](pushgate_engine::engine::Engine) does. In a child of
/// `fork` calls end with [`EngineError::Forked`], and the drop does nothing.
#[derive(Debug)]
pub struct RemoteEngine {
    owner: Owner,
    name: String,
    /// Where the next proxy listens, if that is known.
    path: Option<PathBuf>,
    /// The user whose proxies are accepted besides root's and those of this program's own user.
    trusts: Option<u32>,
    /// What this program's producers ring. Each proxy is handed it. `None` in a drop alone.
    bell: Option<Bell>,
    ringer: Ringer,
    /// Of calls that wait for the proxy.
    turns: Turns,
    /// Locked while a request is under way, by the call whose turn it is.
    connection: Mutex<Connection>,
    /// The state of the connection has changed.
    changed: Condvar,
    book: Book,
    lost: AtomicBool,
    /// Requests of calls that were ended before it was their turn.
    later: Mutex<VecDeque<Request>>,
}

/// The connection to the proxy.
#[derive(Debug)]
struct Connection {
    stream: Arc<PeerStream>,
    state: State,
    /// What becomes of answers that no call waits for any more, in the order in which they come.
    owed: VecDeque<Owed>,
    /// A thread is in [`RemoteEngine::attend`].
    attended: bool,
    /// The proxy has said that it ends.
    said_so: bool,
    /// What came with a proxy that goes on with queue pairs when another one has died.
    sessions: Option<Sessions>,
}

/// What comes with a proxy that speaks of sessions.
#[derive(Clone, Debug)]
struct Sessions {
    frames: Arc<FrameSocket>,
    /// The proxy's process.
    process: Arc<Process>,
}

/// What becomes of the answer to a request whose call has ended.
#[derive(Debug)]
enum Owed {
    /// Nothing.
    Nothing,
    /// It names a queue pair that nobody has: that is removed.
    Qp,
    /// It names a region, of this queue pair by the proxy's number, that nobody has: that is removed.
    Region(QpId),
    /// It says whether this region, of this queue pair by the proxy's number, is removed.
    Removal(QpId, u32),
}

/// Why a request has no answer.
#[derive(Debug)]
enum Unanswered {
    Io(io::Error),
    /// The program has ended the call. The request is on its way.
    Interrupted,
}

impl From<io::Error> for Unanswered {
    fn from(e: io::Error) -> Self {
        Unanswered::Io(e)
    }
}

impl From<Interrupted> for Unanswered {
    fn from(_: Interrupted) -> Self {
        Unanswered::Interrupted
    }
}

#[derive(Debug)]
enum State {
    Live,
    /// The proxy is gone, and another one may take its place.
    Away,
    /// The proxy was lost, for this reason.
    Lost(String),
}

fn remote(why: impl Into<String>) -> EngineError {
    EngineError::Remote(why.into())
}

fn unexpected(answer: &Answer) -> EngineError {
    remote(format!("an answer to something else: {}", Foreign::word(format_args!("{answer:?}"))))
}

impl RemoteEngine {
    /// Connects to the proxy that listens at `path` (`@name`: an abstract socket) and has the proxy start an engine.
    /// `name` is what the proxy's log calls this program.
    ///
    /// A proxy of another user is refused, because a proxy sees this program's memory. Root's proxy is accepted.
    pub fn connect(path: &Path, name: &str) -> Result<Self, EngineError> {
        Self::connect_trusting(path, name, None)
    }

    /// Connects as [`RemoteEngine::connect`] does, and accepts a proxy that runs as the user `trusts` as well.
    pub fn connect_trusting(path: &Path, name: &str, trusts: Option<u32>) -> Result<Self, EngineError> {
        let stream = dial(path, Instant::now() + TIMEOUT, trusts)?;
        Self::start(stream, name, Some((path.into(), trusts)))
    }

    /// Has the proxy at the other end of a connection start an engine.
    pub fn over(stream: UnixStream, name: &str) -> Result<Self, EngineError> {
        Self::start(stream.into(), name, None)
    }

    fn start(
        stream: PeerStream,
        name: &str,
        place: Option<(PathBuf, Option<u32>)>,
    ) -> Result<Self, EngineError> {
        let (path, trusts) = place.map_or((None, None), |(path, trusts)| (Some(path), trusts));
        let (bell, ringer) = bell::pair().map_err(|e| remote(format!("a pair of sockets: {e}")))?;
        let sessions = greet(&stream, &bell, name)?;
        let (stream, state) = (Arc::new(stream), State::Live);
        let owed = VecDeque::new();
        let connection = Connection { stream, state, owed, attended: false, said_so: false, sessions };
        Ok(RemoteEngine {
            owner: Owner::here(),
            name: name.into(),
            path,
            trusts,
            bell: Some(bell),
            ringer,
            turns: Turns::default(),
            connection: Mutex::new(connection),
            changed: Condvar::new(),
            book: Book::default(),
            lost: AtomicBool::new(false),
            later: Mutex::default(),
        })
    }

    /// The ringer that this program's producers ring when they find the engine asleep.
    pub fn ringer(&self) -> &Ringer {
        &self.ringer
    }

    /// Takes in a queue pair over the `local` transport. `wake` says how its producer can wake the engine. [`QpFds`] says
    /// what the memory must be.
    pub fn add_qp(&self, memory: &QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError> {
        let qp = Arc::new(QueuePair::new(memory, None)?);
        self.add(memory, options, wake, qp)
    }

    /// Takes in a queue pair whose link is replaced when it breaks, and which goes on with the next proxy if this one dies.
    pub fn add_recovering_qp(
        &self,
        memory: QpFds,
        options: QpOptions,
        wake: Wake,
        recovers: Recovers,
    ) -> Result<QpId, EngineError> {
        self.owner.check()?;
        if self.turn()?.1.sessions.is_none() {
            // An older proxy: the end of the link is the queue pair's.
            return self.add_qp(&memory, options, wake);
        }
        let memory = Arc::new(memory);
        let session = Session::new(memory.clone(), options, wake, recovers)?;
        let qp = Arc::new(QueuePair::new(&memory, Some(session))?);
        self.add(&memory, options, wake, qp)
    }

    fn add(
        &self,
        m: &QpFds,
        options: QpOptions,
        wake: Wake,
        qp: Arc<QueuePair>,
    ) -> Result<QpId, EngineError> {
        self.owner.check()?;
        let id = self.book.number();
        let mut fds = vec![m.work.fd(), m.control.fd(), m.link.fd(), m.peer_link.fd(), m.peer_window.fd()];
        let session = qp.session.as_ref().map(|session| {
            fds.push(session.segment.fd());
            session.offer(id)
        });
        fds.extend(m.bell.as_ref().map(|b| b.handle()));
        fds.extend(m.peer_bell.as_ref().map(|b| b.as_fd()));
        let bytes = [m.work.len(), m.control.len(), m.link.len(), m.peer_link.len(), m.peer_window.len()];
        let (bell, peer_bell) = (m.bell.is_some(), m.peer_bell.is_some());
        let request = || Ok(Request::AddQp { options, wake, bell, peer_bell, session });
        // Before the connection is free again: a thread that ends the queue pairs of a lost proxy finds this one.
        let added = self.ask_and(&request, &fds, limit(bytes.iter().sum()), |answer, connection| {
            let Answer::Qp(there) = answer else { return };
            self.book.add(id, qp.clone(), *there);
            if let (Some(session), Some(Sessions { frames, .. })) = (&qp.session, &connection.sessions) {
                session.set_frames(Some(frames.clone()));
            }
        })?;
        let Answer::Qp(_) = added else { return Err(self.unexpected(&added)) };
        if let Some(session) = &qp.session {
            // Those that have come meanwhile.
            session.hand_over(id);
        }
        Ok(id)
    }

    /// Registers all of a shared memory with a queue pair; returns the region's key. The proxy holds the memory until the
    /// region is removed.
    pub fn add_region(&self, qp: QpId, memory: &Arc<SharedMemory>) -> Result<u32, EngineError> {
        let kept = self.book.find(qp)?;
        let bytes = memory.len() as u64;
        let request = || Ok(Request::AddRegion { qp: kept.there(qp)?, bytes });
        let answer = self.ask_and(&request, &[memory.fd()], limit(memory.len()), |answer, _| {
            if let Answer::Key(key) = answer {
                kept.add_region(*key, memory);
            }
        })?;
        match answer {
            Answer::Key(key) => Ok(key),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Removes a region. False if the key names no region, or if copies to the region or messages out of it do not end
    /// within 2 s. A call that the program has ended may be repeated.
    pub fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        let kept = self.book.find(qp)?;
        let request = || Ok(Request::RemoveRegion { qp: kept.there(qp)?, key });
        let answer = self.ask_and(&request, &[], TIMEOUT, |answer, _| {
            if let Answer::Removed(true) = answer {
                kept.remove_region(key);
            }
        })?;
        match answer {
            // Or it went by the answer to a call before this one.
            Answer::Removed(removed) => Ok(kept.has_removed(key) || removed),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Drops a queue pair and its mappings; returns its last counts. If the program ends the call, the proxy drops the queue pair as soon
    /// as it can.
    pub fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        self.owner.check()?;
        let kept = self.book.find(qp)?;
        let answer = match kept.is_gone() {
            // It did not go on with the next proxy.
            true => Ok(Answer::Counters(Counters::default())),
            false => self.ask(&|| Ok(Request::RemoveQp { qp: kept.there(qp)? })),
        };
        if let (Err(EngineError::Interrupted(_)), Ok(there)) = (&answer, kept.there(qp)) {
            // The proxy may be asked twice, and refuses the second time.
            self.later().push_back(Request::RemoveQp { qp: there });
            self.leaves("a queue pair is closed, and what its peer has not got is not known");
        }
        self.book.remove(qp);
        match answer? {
            Answer::Counters(counters) => Ok(counters),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Ends one queue pair, or all of this program's, with a status.
    pub fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        let request = || {
            let qp = qp.map(|qp| self.book.find(qp)?.there(qp)).transpose()?;
            Ok(Request::Fail { qp, status: status.word() })
        };
        match self.ask(&request)? {
            Answer::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// How a queue pair ended, if it has.
    pub fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError> {
        let kept = self.book.find(qp)?;
        if kept.is_gone() {
            return Ok(kept.status());
        }
        match self.ask(&|| Ok(Request::Status { qp: kept.there(qp)? }))? {
            Answer::Status(word) => Ok(word.and_then(Status::from_word)),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Counts of all of this program's queue pairs, including those that were removed. What a proxy that died had counted
    /// since the last call is missing.
    pub fn counters(&self) -> Result<Counters, EngineError> {
        let mut sum = None;
        let counted = |answer: &Answer, _: &Connection| {
            if let Answer::Counters(counters) = answer {
                sum = Some(self.book.counted(*counters));
            }
        };
        let answer = self.ask_and(&|| Ok(Request::Counters), &[], TIMEOUT, counted)?;
        match answer {
            Answer::Counters(counters) => Ok(sum.unwrap_or(counters)),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Hands frames of the peer that wait for a queue pair to the proxy. Waits for nothing. Those that come while there is no
    /// proxy are for the next one.
    pub fn control(&self, qp: QpId) -> Result<(), EngineError> {
        self.owner.check()?;
        let kept = self.book.find(qp)?;
        if let Some(session) = &kept.session {
            session.hand_over(qp);
        }
        Ok(())
    }

    /// Whether the proxy has died or hung up, and none goes on in its place. True in a child of `fork`. Costs one system call.
    ///
    /// Control words stay as the proxy left them and do not show its death: a thread that waits for a control word must
    /// end its wait when this is true.
    pub fn lost(&self) -> bool {
        if self.lost.load(Ordering::Relaxed) || !self.owner.is_here() {
            return true;
        }
        // Locked for as long as a request takes: then there is a proxy.
        let Ok(connection) = self.connection.try_lock() else { return false };
        if connection.attended {
            return false;
        }
        let ends = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        let mut fds = [PollFd::new(&connection.stream, ends)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0 && fds[0].revents().intersects(ends))
    }

    /// The present connection. Who reads or writes on it breaks it.
    pub fn stream(&self) -> Arc<PeerStream> {
        self.connection().stream.clone()
    }

    fn ask(&self, request: &dyn Fn() -> Result<Request, EngineError>) -> Result<Answer, EngineError> {
        self.ask_and(request, &[], TIMEOUT, |_, _| {})
    }

    /// Asks the proxy, and the next one if this one dies meanwhile. `request` is made for each, for numbers of queue pairs are
    /// the proxy's own. `then` is called with the answer before another request can be made.
    fn ask_and(
        &self,
        request: &dyn Fn() -> Result<Request, EngineError>,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
        mut then: impl FnMut(&Answer, &Connection),
    ) -> Result<Answer, EngineError> {
        self.owner.check()?;
        let (_turn, mut connection) = self.turn()?;
        loop {
            match &connection.state {
                State::Lost(why) => {
                    let why = format!("lost earlier ({why}): start it again and make new queue pairs");
                    return Err(remote(why));
                }
                State::Away => {
                    let waits = self.changed.wait_timeout(connection, LOOK);
                    let (kept, waited) = waits.unwrap_or_else(PoisonError::into_inner);
                    connection = kept;
                    if waited.timed_out() {
                        drop(connection);
                        interrupt::check()?;
                        connection = self.connection();
                    }
                    continue;
                }
                State::Live => {}
            }
            let answered = match self.settle(&mut connection) {
                Ok(None) => connection.exchange(&request()?, fds, limit),
                Ok(Some(ended)) => Ok(ended),
                Err(e) => Err(e),
            };
            match answered {
                Ok(Err(Refusal::Ended { pid, why })) => {
                    return Err(self.ends(&mut connection, pid, why));
                }
                Ok(reply) => {
                    let answer = reply?;
                    then(&answer, &connection);
                    return Ok(answer);
                }
                Err(Unanswered::Interrupted) => return Err(Interrupted.into()),
                Err(Unanswered::Io(e)) if is_closed(&e) && connection.attended => {
                    // The thread in `attend` sees the end of the connection too, and says what comes of it.
                    connection.leave();
                    self.changed.notify_all();
                }
                Err(Unanswered::Io(e)) => {
                    let why = match e.kind() {
                        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                            format!("no answer within {} s; is it stopped?", limit.as_secs())
                        }
                        _ if is_closed(&e) => "it closed the connection; its log may say why".into(),
                        _ => e.to_string(),
                    };
                    return Err(self.set_lost(&mut connection, why));
                }
            }
        }
    }

    /// Sends what earlier calls have left, and takes the answers that they did not wait for. Returns the proxy's word that it ends, if
    /// that comes instead.
    fn settle(&self, connection: &mut Connection) -> Result<Option<Reply>, Unanswered> {
        loop {
            while let Some(request) = self.later().pop_front() {
                wire::send(&connection.stream, &request, &[])?;
                connection.owed.push_back(Owed::Nothing);
            }
            let Some(owed) = connection.owed.front() else { return Ok(None) };
            let (reply, _) = answer(&connection.stream, TIMEOUT)?;
            let undo = match (owed, reply) {
                (_, reply @ Err(Refusal::Ended { .. })) => return Ok(Some(reply)),
                (Owed::Qp, Ok(Answer::Qp(qp))) => Some(Request::RemoveQp { qp }),
                (Owed::Region(qp), Ok(Answer::Key(key))) => Some(Request::RemoveRegion { qp: *qp, key }),
                (Owed::Removal(there, key), Ok(Answer::Removed(true))) => {
                    self.book.removed_later(*there, *key);
                    None
                }
                _ => None,
            };
            connection.owed.pop_front();
            self.later().extend(undo);
        }
    }

    /// Says of a close that the program has ended what it leaves.
    fn leaves(&self, what: &str) {
        let what = format!("the proxy's process{} has not answered (is it stopped?): {what}", self.at());
        limited!(warn, 0u32, "interrupted by the program: {what}");
        interrupt::leaves_undone(&what);
    }

    /// Why this program has no proxy, if it has none and waits for none.
    pub fn lost_because(&self) -> Option<EngineError> {
        let (_turn, mut connection) = self.turn().ok()?;
        self.hear(&mut connection);
        match &connection.state {
            State::Lost(why) => Some(remote(why.clone())),
            State::Live | State::Away => None,
        }
    }

    /// Takes in the last word of a proxy that has hung up. Waits for nothing.
    fn hear(&self, connection: &mut Connection) {
        let ends = PollFlags::HUP | PollFlags::RDHUP;
        let mut fds = [PollFd::new(&connection.stream, ends)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let hung_up = matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0);
        if matches!(connection.state, State::Lost(_)) || !hung_up {
            return;
        }
        // Who asked has taken the answer, or nobody will: the last one was said without a request.
        for _ in 0..=connection.owed.len() {
            if let Ok((Err(Refusal::Ended { pid, why }), _)) = wire::recv::<Reply>(&connection.stream) {
                self.ends(connection, pid, why);
            }
        }
        connection.owed.clear();
    }

    /// The proxy has said that it ends, and why.
    fn ends(&self, connection: &mut Connection, pid: u32, why: String) -> EngineError {
        connection.said_so = true;
        let why = format!(
            "the process{} (pid {pid}) {}: start it again and make new queue pairs; a proxy that is ended by SIGTERM leaves them \
             to the next one",
            self.at(),
            Foreign::sentence(why)
        );
        self.set_lost(connection, why)
    }

    /// ` at PATH`, where that is known.
    fn at(&self) -> String {
        self.path.as_ref().map(|path| format!(" at {}", path.display())).unwrap_or_default()
    }

    fn unexpected(&self, answer: &Answer) -> EngineError {
        self.lose(unexpected(answer).to_string())
    }

    fn lose(&self, why: String) -> EngineError {
        self.set_lost(&mut self.connection(), why)
    }

    fn set_lost(&self, connection: &mut Connection, why: String) -> EngineError {
        self.lost.store(true, Ordering::Relaxed);
        // After a broken exchange the beginning of the next frame is unknown.
        let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        if !matches!(connection.state, State::Lost(_)) {
            connection.state = State::Lost(why.clone());
        }
        self.changed.notify_all();
        match &connection.state {
            State::Lost(first) => remote(first.clone()),
            _ => remote(why),
        }
    }

    /// The connection, for a call whose turn it is, which may wait for the proxy.
    fn turn(&self) -> Result<(Turn<'_>, MutexGuard<'_, Connection>), Interrupted> {
        Ok((self.turns.take()?, self.connection()))
    }

    fn later(&self) -> MutexGuard<'_, VecDeque<Request>> {
        self.later.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic leaves the state whole, so a poisoned lock is no reason to stop.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connection {
    /// Asks the proxy, to which nothing is owed. The answer to a request whose call the program has ended is owed.
    fn exchange(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<Reply, Unanswered> {
        let answered = exchange(&self.stream, request, fds, limit);
        if let Err(Unanswered::Interrupted) = answered {
            self.owed.push_back(match request {
                Request::AddQp { .. } => Owed::Qp,
                Request::AddRegion { qp, .. } => Owed::Region(*qp),
                Request::RemoveRegion { qp, key } => Owed::Removal(*qp, *key),
                _ => Owed::Nothing,
            });
        }
        answered.map(|(reply, _)| reply)
    }

    /// The proxy is gone, and another one may take its place.
    fn leave(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if matches!(self.state, State::Live) {
            self.state = State::Away;
        }
    }
}

impl Drop for RemoteEngine {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The doorbells are the parent's: a drop here would take its rings.
            std::mem::forget((self.bell.take(), std::mem::take(&mut self.book)));
            return;
        }
        // Without Bye the peers would be told that this program was lost. The answer means that nothing of this program
        // is mapped there any more.
        if !self.lost()
            && let Err(EngineError::Interrupted(_)) = self.ask(&|| Ok(Request::Bye))
        {
            self.leaves("it ends this program's queue pairs when it goes on");
        }
    }
}

impl Proxy for RemoteEngine {
    fn add_qp(&self, fds: QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError> {
        self.add_qp(&fds, options, wake)
    }

    fn add_endpoint(&self, _: Endpoint, _: Wake) -> Result<QpId, EngineError> {
        let why =
            "a proxy process has local queue pairs only: run the engine in this process (proxy = thread)";
        Err(EngineError::Remote(why.into()))
    }

    fn add_shared_region(&self, qp: QpId, memory: &Arc<SharedMemory>) -> Result<u32, EngineError> {
        self.add_region(qp, memory)
    }

    unsafe fn add_host_region(
        &self,
        _: QpId,
        address: usize,
        bytes: u64,
        _: Option<Keep>,
    ) -> Result<u32, EngineError> {
        Err(EngineError::Remote(format!(
            "{bytes} bytes at {address:#x} are memory of this process alone: allocate the region as shared \
             memory, or run the engine in this process (proxy = thread)"
        )))
    }

    unsafe fn add_device_region(
        &self,
        _: QpId,
        address: u64,
        bytes: u64,
        _: Option<Exported>,
    ) -> Result<u32, EngineError> {
        Err(EngineError::Remote(format!(
            "{bytes} bytes at device address {address:#x} are reached by a mover of this process alone: \
             allocate the region as shared memory, or run the engine in this process (proxy = thread)"
        )))
    }

    fn add_recovering_qp(
        &self,
        fds: QpFds,
        options: QpOptions,
        wake: Wake,
        recovers: Recovers,
    ) -> Result<QpId, EngineError> {
        self.add_recovering_qp(fds, options, wake, recovers)
    }

    fn control(&self, qp: QpId) -> Result<(), EngineError> {
        self.control(qp)
    }

    fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        self.remove_region(qp, key)
    }

    fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        self.remove_qp(qp)
    }

    fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        self.fail(qp, status)
    }

    fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError> {
        self.status(qp)
    }

    fn region_sends(&self, _: QpId) -> Result<RegionSends, EngineError> {
        Ok(RegionSends::No(
            "the engine is not in this process: use proxy = thread, or push the payload into the window",
        ))
    }

    fn counters(&self) -> Result<Counters, EngineError> {
        self.counters()
    }

    fn drive(&self) -> Result<Step, EngineError> {
        Ok(Step::Yield)
    }

    fn lost_because(&self) -> Option<EngineError> {
        self.lost_because()
    }

    fn place(&self) -> &'static str {
        "process"
    }
}

/// How long the proxy may take to answer a request that has it map `bytes`.
fn limit(bytes: usize) -> Duration {
    TIMEOUT + Duration::from_secs(bytes as u64 >> 31)
}

fn exchange(
    stream: &UnixStream,
    request: &Request,
    fds: &[BorrowedFd<'_>],
    limit: Duration,
) -> Result<(Reply, Vec<OwnedFd>), Unanswered> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    match wire::send(stream, request, fds) {
        Ok(()) => {}
        // The proxy may have hung up after a reply that says why.
        Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
            return wire::recv(stream).map_err(|_| e.into());
        }
        Err(e) => return Err(e.into()),
    }
    answer(stream, limit)
}

/// Waits for an answer.
fn answer(stream: &UnixStream, limit: Duration) -> Result<(Reply, Vec<OwnedFd>), Unanswered> {
    // A frame that has begun is soon whole.
    if !interrupt::wait(&mut [PollFd::new(stream, PollFlags::IN)], Instant::now() + limit)? {
        return Err(io::Error::from(ErrorKind::TimedOut).into());
    }
    stream.set_read_timeout(Some(limit))?;
    let (reply, fds): (Reply, _) = wire::recv(stream)?;
    if !fds.is_empty() && !matches!(reply, Ok(Answer::Channel)) {
        return Err(io::Error::new(ErrorKind::InvalidData, "an answer with descriptors").into());
    }
    Ok((reply, fds))
}

/// Whether a proxy that fails so has closed the connection.
fn is_closed(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// What users hold of the proxy that listens at `path`, as far as this process's user may know. `trusts` as for
/// [`RemoteEngine::connect_trusting`].
pub fn usage(path: &Path, trusts: Option<u32>) -> Result<Usage, EngineError> {
    let stream = dial(path, Instant::now() + TIMEOUT, trusts)?;
    match asks(&stream, &Request::Usage, &[]) {
        Ok((Answer::Usage(usage), _)) => Ok(usage),
        Ok((other, _)) => Err(unexpected(&other)),
        Err(EngineError::Remote(why)) if why.contains("not a message") => {
            Err(remote("the proxy is of an earlier release, which does not say what users hold: restart it"))
        }
        Err(e) => Err(e),
    }
}

/// Connects to the proxy that listens at `path`, and checks whose it is: root's, this process's user's, or that of the user
/// `trusts`.
fn dial(path: &Path, deadline: Instant, trusts: Option<u32>) -> Result<PeerStream, EngineError> {
    let at = path.display();
    let dialled = loop {
        let until = deadline.min(Instant::now() + LOOK);
        match wire::dial(path, until) {
            // Its queue of connections is full.
            Err(e) if e.kind() == ErrorKind::WouldBlock && until < deadline => interrupt::check()?,
            dialled => break dialled,
        }
    };
    let stream = dialled.map_err(|e| match e.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            remote(format!("no proxy listens at {at} ({e}): start `pushgate proxy`"))
        }
        ErrorKind::WouldBlock => remote(format!("the proxy at {at} takes no connection; is it stopped?")),
        ErrorKind::PermissionDenied => remote(format!(
            "user {} may not connect to the proxy at {at} ({e}): have the user added to the group that may enter its \
             directory, or start a proxy of your own",
            rustix::process::geteuid().as_raw()
        )),
        _ => remote(format!("connecting to {at}: {e}")),
    })?;
    let theirs = wire::peer_cred(&stream).map_err(|e| remote(format!("SO_PEERCRED of {at}: {e}")))?.uid;
    let ours = rustix::process::geteuid().as_raw();
    if !users::is_ours_or_root(theirs) && trusts != Some(theirs) {
        return Err(remote(format!(
            "the proxy at {at} is user {theirs}'s, this program is user {ours}'s{}: name the socket of a proxy of your own, \
             or, if that user may see this program's memory, set proxy-user to {theirs}",
            users::remark(theirs)
        )));
    }
    Ok(stream)
}

/// Has the proxy start an engine, whose producers ring `bell`. Returns what comes with a proxy that speaks of sessions.
fn greet(stream: &UnixStream, bell: &Bell, name: &str) -> Result<Option<Sessions>, EngineError> {
    let (version, newest) = (wire::VERSIONS.oldest(), wire::VERSIONS.newest());
    let hello = Request::Hello { version, newest, name: name.into() };
    let version = match asks(stream, &hello, &[bell.handle()])? {
        (Answer::Welcome { version }, _) if wire::VERSIONS.contains(version) => version,
        (Answer::Welcome { version }, _) => {
            let (theirs, ours) = (Versions::told(version, None), wire::VERSIONS);
            return Err(remote(TooFarApart { theirs, ours }.to_string()));
        }
        (other, _) => return Err(unexpected(&other)),
    };
    if version < wire::SESSIONS {
        return Ok(None);
    }
    let (answer, fds) = asks(stream, &Request::Channel, &[])?;
    let (Answer::Channel, Ok([frames, process])) = (&answer, <[OwnedFd; 2]>::try_from(fds)) else {
        return Err(unexpected(&answer));
    };
    let wrong = |e: io::Error| remote(format!("its way of frames: {e}"));
    let frames = Arc::new(FrameSocket::from_fd(frames).map_err(wrong)?);
    let process = Arc::new(Process::from_fd(process).map_err(|(e, _)| wrong(e))?);
    Ok(Some(Sessions { frames, process }))
}

/// Asks a proxy with which nothing else is under way.
fn asks(
    stream: &UnixStream,
    request: &Request,
    fds: &[BorrowedFd<'_>],
) -> Result<(Answer, Vec<OwnedFd>), EngineError> {
    match exchange(stream, request, fds, TIMEOUT) {
        Ok((reply, fds)) => Ok((reply?, fds)),
        Err(Unanswered::Interrupted) => Err(Interrupted.into()),
        Err(Unanswered::Io(e)) => Err(remote(match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!("no answer within {} s; is it stopped?", TIMEOUT.as_secs())
            }
            _ if is_closed(&e) => "it closed the connection; its log may say why".into(),
            _ => e.to_string(),
        })),
    }
}
