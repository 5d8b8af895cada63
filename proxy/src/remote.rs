//! The engine of another process, `pushgate proxy`, as a [`Proxy`]. The process must run already: nothing here starts it.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushgate_driver_shim::bell::{self, Ringer};
use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::versions::{TooFarApart, Versions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::counters::Counters;
use crate::endpoint::{Endpoint, QpOptions};
use crate::engine::{EngineError, QpId};
use crate::idle::{Step, Wake};
use crate::link::RegionSends;
use crate::memory::Keep;
use crate::proxy::{Proxy, QpFds};
use crate::region::Exported;
use crate::session::Status;
use crate::wire::{self, Answer, Reply, Request, TIMEOUT};

/// The engine that a proxy process runs for this program, and for this program alone.
///
/// Calls may be made from any thread; one call at a time is under way. Each call ends with an answer or, after at most
/// [`TIMEOUT`] (a second longer for each 2 GiB to be mapped), with [`EngineError::Remote`]. After such an error all
/// calls end with that error, because nobody knows how much of the request the proxy carried out.
///
/// Dropping a `RemoteEngine` ends the engine, as dropping an [`Engine`](crate::engine::Engine) does. In a child of
/// `fork` calls end with [`EngineError::Forked`], and the drop does nothing.
#[derive(Debug)]
pub struct RemoteEngine {
    owner: Owner,
    stream: UnixStream,
    ringer: Ringer,
    /// Why the proxy was lost. Locked while a request is under way.
    cause: Mutex<Option<String>>,
    lost: AtomicBool,
}

fn remote(why: impl Into<String>) -> EngineError {
    EngineError::Remote(why.into())
}

impl RemoteEngine {
    /// Connects to the proxy that listens at `path` (`@name`: an abstract socket) and has the proxy start an engine.
    /// `name` is what the proxy's log calls this program.
    ///
    /// A proxy of another user is refused, because a proxy sees this program's memory. Root's proxy is accepted, and
    /// root may use any user's proxy by its path.
    pub fn connect(path: &Path, name: &str) -> Result<Self, EngineError> {
        let at = path.display();
        let stream = wire::dial(path, Instant::now() + TIMEOUT).map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                remote(format!("no proxy listens at {at} ({e}): start `pushgate proxy`"))
            }
            ErrorKind::WouldBlock => remote(format!("the proxy at {at} takes no connection; is it stopped?")),
            _ => remote(format!("connecting to {at}: {e}")),
        })?;
        let theirs = wire::peer_cred(&stream).map_err(|e| remote(format!("SO_PEERCRED of {at}: {e}")))?.uid;
        let ours = rustix::process::geteuid().as_raw();
        let named = ours == 0 && wire::abstract_name(path).is_none();
        if theirs != ours && theirs != 0 && !named {
            return Err(remote(format!(
                "the proxy at {at} is user {theirs}'s, this program is user {ours}'s: name the socket of a \
                 proxy of your own"
            )));
        }
        Self::over(stream, name)
    }

    /// Has the proxy at the other end of a connection start an engine.
    pub fn over(stream: UnixStream, name: &str) -> Result<Self, EngineError> {
        let (bell, ringer) = bell::pair().map_err(|e| remote(format!("a pair of sockets: {e}")))?;
        let (owner, cause, lost) = (Owner::here(), Mutex::new(None), AtomicBool::new(false));
        let engine = RemoteEngine { owner, stream, ringer, cause, lost };
        let (version, newest) = (wire::VERSIONS.oldest(), wire::VERSIONS.newest());
        let hello = Request::Hello { version, newest, name: name.into() };
        match engine.ask(&hello, &[bell.handle()])? {
            Answer::Welcome { version } if wire::VERSIONS.contains(version) => Ok(engine),
            Answer::Welcome { version } => {
                let (theirs, ours) = (Versions::told(version, None), wire::VERSIONS);
                Err(engine.lose(TooFarApart { theirs, ours }.to_string()))
            }
            other => Err(engine.unexpected(&other)),
        }
    }

    /// The ringer that this program's producers ring when they find the engine asleep.
    pub fn ringer(&self) -> &Ringer {
        &self.ringer
    }

    /// Takes in a queue pair over the `local` transport. `wake` says how its producer can wake the engine. [`QpFds`] says
    /// what the memory must be.
    pub fn add_qp(&self, memory: &QpFds, options: QpOptions, wake: Wake) -> Result<QpId, EngineError> {
        self.owner.check()?;
        let m = memory;
        let mut fds = vec![m.work.fd(), m.control.fd(), m.link.fd(), m.peer_link.fd(), m.peer_window.fd()];
        fds.extend(m.bell.as_ref().map(|b| b.handle()));
        fds.extend(m.peer_bell.as_ref().map(|b| b.as_fd()));
        let bytes = [m.work.len(), m.control.len(), m.link.len(), m.peer_link.len(), m.peer_window.len()];
        let (bell, peer_bell) = (m.bell.is_some(), m.peer_bell.is_some());
        let request = Request::AddQp { options, wake, bell, peer_bell };
        match self.ask_within(&request, &fds, limit(bytes.iter().sum()))? {
            Answer::Qp(qp) => Ok(qp),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Registers all of a shared memory with a queue pair; returns the region's key. The proxy holds the memory until the
    /// region is removed.
    pub fn add_region(&self, qp: QpId, memory: &SharedMemory) -> Result<u32, EngineError> {
        let request = Request::AddRegion { qp, bytes: memory.len() as u64 };
        match self.ask_within(&request, &[memory.fd()], limit(memory.len()))? {
            Answer::Key(key) => Ok(key),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Removes a region. False if the key names no region, or if copies to the region or messages out of it do not end
    /// within 2 s.
    pub fn remove_region(&self, qp: QpId, key: u32) -> Result<bool, EngineError> {
        match self.ask(&Request::RemoveRegion { qp, key }, &[])? {
            Answer::Removed(removed) => Ok(removed),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Drops a queue pair and its mappings; returns its last counts.
    pub fn remove_qp(&self, qp: QpId) -> Result<Counters, EngineError> {
        match self.ask(&Request::RemoveQp { qp }, &[])? {
            Answer::Counters(counters) => Ok(counters),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Ends one queue pair, or all of this program's, with a status.
    pub fn fail(&self, qp: Option<QpId>, status: Status) -> Result<(), EngineError> {
        match self.ask(&Request::Fail { qp, status: status.word() }, &[])? {
            Answer::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// How a queue pair ended, if it has.
    pub fn status(&self, qp: QpId) -> Result<Option<Status>, EngineError> {
        match self.ask(&Request::Status { qp }, &[])? {
            Answer::Status(word) => Ok(word.and_then(Status::from_word)),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Counts of all of this program's queue pairs, including those that were removed.
    pub fn counters(&self) -> Result<Counters, EngineError> {
        match self.ask(&Request::Counters, &[])? {
            Answer::Counters(counters) => Ok(counters),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Whether the proxy has died or hung up. True in a child of `fork`. Costs one system call.
    ///
    /// Control words stay as the proxy left them and do not show its death: a thread that waits for a control word must
    /// end its wait when this is true.
    pub fn lost(&self) -> bool {
        if self.lost.load(Ordering::Relaxed) || !self.owner.is_here() {
            return true;
        }
        let ends = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        let mut fds = [PollFd::new(&self.stream, ends)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0 && fds[0].revents().intersects(ends))
    }

    /// The connection, for a monitor that polls it for `POLLRDHUP` and `POLLHUP`. A monitor that reads or writes on it
    /// breaks the connection.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Answer, EngineError> {
        self.ask_within(request, fds, TIMEOUT)
    }

    fn ask_within(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<Answer, EngineError> {
        self.owner.check()?;
        let mut cause = self.cause();
        if let Some(why) = &*cause {
            return Err(remote(format!("lost earlier ({why}): start it again and make new queue pairs")));
        }
        match exchange(&self.stream, request, fds, limit) {
            Ok(reply) => Ok(reply?),
            Err(e) => {
                let why = match e.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                        format!("no answer within {} s; is it stopped?", limit.as_secs())
                    }
                    ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                        "it closed the connection; its log may say why".into()
                    }
                    _ => e.to_string(),
                };
                Err(self.set_lost(&mut cause, why))
            }
        }
    }

    fn unexpected(&self, answer: &Answer) -> EngineError {
        self.lose(format!("an answer to something else: {answer:?}"))
    }

    fn lose(&self, why: String) -> EngineError {
        self.set_lost(&mut self.cause(), why)
    }

    fn set_lost(&self, cause: &mut Option<String>, why: String) -> EngineError {
        self.lost.store(true, Ordering::Relaxed);
        // After a broken exchange the beginning of the next frame is unknown.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        remote(cause.get_or_insert(why).clone())
    }

    fn cause(&self) -> MutexGuard<'_, Option<String>> {
        // A panic leaves the string whole, so a poisoned lock is no reason to stop.
        self.cause.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RemoteEngine {
    fn drop(&mut self) {
        // Without Bye the peers would be told that this program was lost. The answer means that nothing of this program
        // is mapped there any more.
        if !self.lost() {
            let _ = self.ask(&Request::Bye, &[]);
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
) -> io::Result<Reply> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.set_read_timeout(Some(limit))?;
    match wire::send(stream, request, fds) {
        Ok(()) => {}
        // The proxy may have hung up behind a reply that says why.
        Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
            return wire::recv(stream).map(|(reply, _)| reply).map_err(|_| e);
        }
        Err(e) => return Err(e),
    }
    let (reply, fds) = wire::recv(stream)?;
    if !fds.is_empty() {
        return Err(io::Error::new(ErrorKind::InvalidData, "an answer with descriptors"));
    }
    Ok(reply)
}
