//! One program of the server: the thread that answers its connection, its engine, and what its requests do there.

use std::cmp::Reverse;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::closing::PeerStream;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::process::Process;
use pushgate_driver_shim::versions::Versions;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::engine::{Engine, EngineOptions, QpId};
use pushgate_engine::idle::Wake;
use pushgate_link::region::RegionMemory;

use crate::wire::{
    self, Answer, MOST_ROWS, Refusal, Reply, Request, SessionOffer, TIMEOUT, Usage, UserUsage,
};

use super::account::{Account, Limits};
use super::costs::PROGRAM;
use super::descriptors::{QpDescriptors, engine_bell, map_region};
use super::ledger::{Lease, Ledger};
use super::options::{Leaves, ServerOptions};
use super::sessions::Sessions;
use super::share::{Counted, Share};
use super::wait::{WaitEnd, wait};

/// The most requests that are answered after the program's process has ended. A program waits for each answer, so its
/// process can have left fewer requests behind.
const LAST_WORDS: usize = 64;
/// How long a proxy that leaves its queue pairs to the next one waits for what they have posted.
const DRAIN: Duration = Duration::from_millis(500);
/// How long the queue pairs of a proxy that ends go on after its last word.
const HEARD: Duration = Duration::from_millis(50);

/// What the threads of a server share.
pub(super) struct Server {
    pub(super) options: ServerOptions,
    pub(super) ledger: Arc<Ledger>,
    pub(super) share: Share,
    /// The user that the server runs as.
    pub(super) uid: u32,
}

/// A connection that was admitted.
pub(super) struct Guest {
    /// With what the connection takes of its user's.
    pub(super) stream: PeerStream,
    /// The process at the other end, where it has a number here.
    pub(super) process: Option<Arc<Process>>,
    /// The user at the other end.
    pub(super) uid: u32,
    /// The connection's number.
    pub(super) number: u64,
}

/// How a program's connection ended.
enum End {
    /// The program said Bye.
    Bye,
    /// The server ends.
    Stopped,
    /// The connection or the program broke, for this reason.
    Lost(String),
}

/// Answers a program until its connection ends, then ends its engine. The whole life of a program's thread.
pub(super) fn attend(server: &Server, guest: Guest) {
    // Dropped in this order: the engine with the client first, then what is counted for the user.
    let Guest { stream, process, number, uid } = &guest;
    let (number, uid, options) = (*number, *uid, &server.options);
    let _this = server.share.add_this(uid);
    let mut client = match greet(server, stream, number, uid) {
        Ok(Some(client)) => client,
        Ok(None) => return tracing::debug!(client = number, "was told the usage"),
        Err(why) => return limited!(info, uid, client = number, "left without an engine: {why}"),
    };
    // Whatever state a panic leaves in the client, the client is only dropped afterwards.
    let end = catch_unwind(AssertUnwindSafe(|| client.answer(&options.stop, stream, process.as_deref())))
        .unwrap_or_else(|_| End::Lost("a panic, which is a bug of the proxy".into()));
    let ends = |code| client.engine.fail(None, Status::new(code));
    match &end {
        End::Bye => limited!(info, uid, client = number, "done"),
        End::Stopped => {
            let why = match (options.leaves)() {
                Leaves::ToTheNext if client.keeps_any() => {
                    client.drain();
                    limited!(info, uid, client = number, "its queue pairs are left for the next proxy");
                    // The process ends, and with the process its engines, which write nothing about an end.
                    std::mem::forget(client);
                    return;
                }
                Leaves::ToTheNext => {
                    "was ended (SIGTERM), and no other proxy can go on with these queue pairs"
                }
                Leaves::Ends(why) => why,
            };
            farewell(stream, why);
            let _ = ends(abi::PUSHGATE_ABORTED);
        }
        End::Lost(why) => {
            // The program's peers wait for it, and nobody else can tell them (P7).
            let _ = ends(abi::PUSHGATE_PEER_LOST);
            limited!(warn, uid, client = number, "lost: {why}");
        }
    }
    drop(client);
    if let End::Bye = end {
        let _ = wire::send(stream, &Reply::Ok(Answer::Done), &[]);
    }
}

/// Tells a program that the server ends, before its queue pairs do: who finds an ended queue pair finds the reason too.
fn farewell(stream: &PeerStream, why: &str) {
    let ended = Refusal::Ended { pid: std::process::id(), why: why.into() };
    // A program that takes nothing is not waited for.
    let _ = stream.set_write_timeout(Some(HEARD));
    let _ = wire::send(stream, &Reply::Err(ended), &[]);
    let _ = stream.shutdown(Shutdown::Write);
    // Every program hears it before it hears of another one's end.
    std::thread::sleep(HEARD);
}

/// Takes Hello, starts the engine and answers; or answers who asks for the usage.
fn greet<'a>(
    server: &'a Server,
    stream: &PeerStream,
    number: u64,
    uid: u32,
) -> Result<Option<Client<'a>>, String> {
    let io = |e: io::Error| e.to_string();
    stream.set_read_timeout(Some(TIMEOUT)).map_err(io)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(io)?;
    // The number is 0 for a process of another PID namespace.
    let program =
        wire::peer_cred(stream).ok().and_then(|cred| u32::try_from(cred.pid).ok()).filter(|pid| *pid != 0);
    let begun = match wire::recv_from_peer(stream) {
        Ok((Request::Usage, fds)) if fds.is_empty() => {
            wire::send(stream, &Reply::Ok(Answer::Usage(server.usage(uid))), &[]).map_err(io)?;
            return Ok(None);
        }
        Ok((request, fds)) => begin(server, request, fds, number, (uid, program)),
        Err(e) if e.kind() == ErrorKind::InvalidData => Err(e.to_string()),
        Err(e) => return Err(e.to_string()),
    };
    let (reply, client) = match begun {
        Ok((client, version)) => (Ok(Answer::Welcome { version }), Ok(client)),
        Err(why) => (Err(Refusal::Why(why.clone())), Err(why)),
    };
    wire::send(stream, &reply, &[]).map_err(io)?;
    client.map(Some)
}

impl Server {
    /// What users hold, as far as user `uid` may know.
    fn usage(&self, uid: u32) -> Usage {
        let all = uid == 0 || uid == self.uid;
        let mut users = self.ledger.users();
        users.retain(|(of, _)| all || *of == uid);
        // Those that hold most.
        users.sort_by_key(|(_, held)| Reverse(held.bytes));
        let left_out = users.len().saturating_sub(MOST_ROWS);
        users.truncate(MOST_ROWS);
        users.sort_by_key(|(uid, _)| *uid);
        let row = |(uid, held)| {
            let (cpu_ns, nice) = self.share.of(uid);
            UserUsage { uid, held, cpu_ns, nice }
        };
        let users = users.into_iter().map(row).collect();
        Usage { proxy: self.uid, quota: self.ledger.quota(), users, left_out }
    }
}

/// Starts the engine that the first request of a program asks for. With the client comes the version that the program and
/// this proxy use.
fn begin(
    server: &Server,
    request: Request,
    fds: Vec<OwnedFd>,
    number: u64,
    (uid, program): (u32, Option<u32>),
) -> Result<(Client<'_>, u32), String> {
    let Request::Hello { version, newest, name } = request else {
        return Err("the first request must be Hello".into());
    };
    let version = wire::VERSIONS.agree(Versions::told(version, newest)).map_err(|e| e.to_string())?;
    let user = server.ledger.lease(uid, PROGRAM)?;
    let bell = engine_bell(fds)?;
    // The engine has a second bell for the handle in this process, which the program does not hold.
    let own = EventFd::new().map_err(|e| format!("eventfd: {e}"))?;
    let server_options = &server.options;
    let cpus = &server_options.cpus;
    let cpu = (!cpus.is_empty()).then(|| cpus[number as usize % cpus.len()]);
    let (bell, stall_report) = (Some(bell), server_options.stall_report);
    let options = EngineOptions {
        cpu,
        alone: server_options.alone,
        bell,
        stall_report,
        program,
        ..EngineOptions::default()
    };
    // The engine's thread begins with the weight of this one.
    server.share.come_forward(uid);
    let engine = Engine::start(own, options).map_err(|e| e.to_string())?;
    limited!(info, uid, client = number, name = ?Foreign::word(name), "an engine was started");
    let counted = server.share.add(uid, engine.thread().clone());
    let account = Account::new(Limits::from(server_options), user);
    Ok((Client { _counted: counted, engine, sessions: Sessions::default(), account, uid }, version))
}

/// One program's engine and account. Dropping it ends the engine, and with the engine everything that the program
/// brought.
struct Client<'a> {
    _counted: Counted<'a>,
    // Dropped before the account: the engine reads and writes the program's memory.
    engine: Engine,
    sessions: Sessions,
    account: Account,
    /// The program's user.
    uid: u32,
}

impl Client<'_> {
    /// Answers requests until the connection, the program's process or the server ends.
    fn answer(&mut self, stop: &EventFd, stream: &PeerStream, process: Option<&Process>) -> End {
        // The process is watched beside the connection, because a child that the program forked may hold the
        // connection for long, and write on it.
        let died = || End::Lost("its process has ended".into());
        let mut last_words = 0;
        loop {
            match wait(stop, stream, process, self.sessions.fd(), None) {
                Err(e) => return End::Lost(e.to_string()),
                Ok(WaitEnd::Stop) => return End::Stopped,
                Ok(WaitEnd::Died) => return died(),
                Ok(WaitEnd::Ready { died: true }) if last_words == LAST_WORDS => return died(),
                Ok(WaitEnd::Nothing) => continue,
                Ok(WaitEnd::Other) => {
                    self.sessions.take_frames(&self.engine);
                    continue;
                }
                Ok(WaitEnd::Ready { died }) => last_words += usize::from(died),
            }
            let (request, fds) = match wire::recv_from_peer(stream) {
                Ok(message) => message,
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(e) => {
                    let why = e.to_string();
                    if e.kind() == ErrorKind::InvalidData {
                        let _ = wire::send(stream, &Reply::Err(Refusal::Why(why.clone())), &[]);
                    }
                    return End::Lost(why);
                }
            };
            if let Request::Bye = request {
                return End::Bye;
            }
            let mut along = Vec::new();
            let reply = match request {
                Request::Channel if fds.is_empty() => self.sessions.open(stream.held()).map(|fds| {
                    along.extend(fds);
                    Answer::Channel
                }),
                request => self.request(request, fds),
            };
            let along: Vec<_> = along.iter().map(|fd| fd.as_fd()).collect();
            if let Err(e) = wire::send(stream, &reply, &along) {
                return End::Lost(format!("it does not take its answers: {e}"));
            }
            if let Err(Refusal::Gone) = reply {
                return End::Lost("its engine has ended".into());
            }
        }
    }

    /// Whether another proxy may go on with any of the queue pairs.
    fn keeps_any(&self) -> bool {
        self.account.qps().any(|qp| self.sessions.keeps(qp))
    }

    /// Ends the queue pairs with which no other proxy can go on, and waits a while for what the others have posted: what has
    /// arrived need not be posted again.
    fn drain(&self) {
        for qp in self.account.qps().filter(|qp| !self.sessions.keeps(*qp)) {
            let _ = self.engine.fail(Some(qp), Status::new(abi::PUSHGATE_ABORTED));
        }
        let begin = Instant::now();
        while begin.elapsed() < DRAIN {
            match self.engine.counters() {
                Ok(c) if c.released > c.retired => std::thread::sleep(Duration::from_millis(1)),
                _ => return,
            }
        }
    }

    /// Does what one request asks for.
    fn request(&mut self, request: Request, fds: Vec<OwnedFd>) -> Reply {
        match request {
            Request::AddQp { options, wake, bell, peer_bell, session } => {
                self.add_qp(options, wake, [session.is_some(), bell, peer_bell], session, fds)
            }
            Request::AddRegion { qp, bytes } => self.add_region(qp, bytes, fds),
            Request::ResumeQp { options, wake, bell, peer_bell, session } => {
                self.resume_qp((&session, options, wake), [true, bell, peer_bell], fds)
            }
            Request::RestoreRegion { key, bytes } => self.restore_region(key, bytes, fds),
            _ if !fds.is_empty() => Err(Refusal::Why(format!("{} descriptors where none belong", fds.len()))),
            Request::RemoveRegion { qp, key } => {
                self.account.check(qp)?;
                let removed = self.engine.remove_region(qp, key)?;
                if removed {
                    self.account.remove_region(qp, key);
                }
                Ok(Answer::Removed(removed))
            }
            Request::RemoveQp { qp } => {
                let counters = self.engine.remove_qp(qp)?;
                self.account.remove_qp(qp);
                self.sessions.remove(qp);
                Ok(Answer::Counters(counters))
            }
            Request::Fail { qp, status } => {
                let status = Status::from_word(status)
                    .ok_or_else(|| Refusal::Why("a queue pair cannot be failed with status 0, OK".into()))?
                    .checked();
                if let Some(qp) = qp {
                    self.account.check(qp)?;
                }
                self.engine.fail(qp, status)?;
                Ok(Answer::Done)
            }
            Request::Status { qp } => Ok(Answer::Status(self.engine.status(qp)?.map(Status::word))),
            Request::Counters => Ok(Answer::Counters(self.engine.counters()?)),
            Request::Begin => {
                self.account.may_add_qp()?;
                let (id, bytes, lease, regions) = self.sessions.finish(&self.engine)?;
                self.account.add_qp(id, bytes, lease);
                let mut add = |(key, bytes, lease)| self.account.add_region(id, key, bytes, lease);
                regions.into_iter().for_each(&mut add);
                Ok(Answer::Qp(id))
            }
            Request::Channel => unreachable!("`answer` takes Channel"),
            Request::Hello { .. } => Err(Refusal::Why("Hello was said before".into())),
            Request::Usage => {
                Err(Refusal::Why("Usage comes in place of Hello, which was said before".into()))
            }
            Request::Bye => unreachable!("`answer` returns on Bye"),
        }
    }

    /// Takes in a queue pair. `there` says whether there is a session segment, a bell that the peer rings, and a ringer of
    /// the peer's bell.
    fn add_qp(
        &mut self,
        options: QpOptions,
        wake: Wake,
        there: [bool; 3],
        session: Option<SessionOffer>,
        fds: Vec<OwnedFd>,
    ) -> Reply {
        self.account.may_add_qp()?;
        let mut descriptors = QpDescriptors::take(fds, there)?;
        let bytes = descriptors.bytes();
        self.account.room_for(bytes)?;
        let lease = self.lease(&descriptors)?;
        let memory = descriptors.map_session()?;
        let endpoint =
            Endpoint::local(descriptors.map()?, options).map_err(|e| Refusal::Why(e.to_string()))?;
        let id = match memory.zip(session) {
            Some((memory, offer)) => {
                let (endpoint, mailbox) = self.sessions.begin(endpoint, memory, &offer, &options)?;
                let kept = endpoint.is_kept();
                let id = self.engine.add_qp(endpoint, wake)?;
                self.sessions.add(offer.tag, mailbox, id, kept);
                id
            }
            None => self.engine.add_qp(endpoint, wake)?,
        };
        self.account.add_qp(id, bytes, lease);
        Ok(Answer::Qp(id))
    }

    /// What a new queue pair takes of the user's quota. Refuses another user's session.
    fn lease(&self, descriptors: &QpDescriptors) -> Result<Lease, Refusal> {
        descriptors.check_session(self.uid)?;
        let (segments, links) = descriptors.rings();
        self.account.lease_qp(descriptors.bytes(), segments, links)
    }

    /// Maps a queue pair that goes on where another proxy died.
    fn resume_qp(
        &mut self,
        offer: (&SessionOffer, QpOptions, Wake),
        there: [bool; 3],
        fds: Vec<OwnedFd>,
    ) -> Reply {
        self.account.may_add_qp()?;
        let mut descriptors = QpDescriptors::take(fds, there)?;
        let bytes = descriptors.bytes();
        self.account.room_for(bytes)?;
        let lease = self.lease(&descriptors)?;
        let none = || Refusal::Why("a queue pair that is resumed has a session segment".into());
        let session = descriptors.map_session()?.ok_or_else(none)?;
        self.sessions.resume(descriptors.map()?, session, offer, (bytes, lease))?;
        Ok(Answer::Done)
    }

    /// Registers a region of the queue pair that is being resumed.
    fn restore_region(&mut self, key: u32, bytes: u64, fds: Vec<OwnedFd>) -> Reply {
        let (account, resuming) = (&self.account, self.sessions.resuming()?);
        account.may_restore_region(resuming.regions.len())?;
        let mapped = resuming.mapped();
        let lease = account.lease_region(bytes)?;
        let memory = map_region(fds, bytes, |bytes| account.room_for(bytes.saturating_add(mapped)))?;
        resuming.restore(key, memory, lease)?;
        Ok(Answer::Key(key))
    }

    /// Registers a region with a queue pair.
    fn add_region(&mut self, qp: QpId, bytes: u64, fds: Vec<OwnedFd>) -> Reply {
        self.account.may_add_region(qp)?;
        // The memory that is mapped has `bytes` bytes, or is refused.
        let lease = self.account.lease_region(bytes)?;
        let memory = map_region(fds, bytes, |bytes| self.account.room_for(bytes))?;
        let address = memory.as_ptr().as_ptr() as usize;
        let region = RegionMemory::Host { address, keep: Some(memory) };
        // SAFETY: the mapping is writable for `bytes`, which cannot shrink; nothing in this process has a reference
        // to it; and `keep` holds the mapping as long as the region is registered.
        let key = unsafe { self.engine.add_region(qp, region, bytes)? };
        self.account.add_region(qp, key, bytes, lease);
        Ok(Answer::Key(key))
    }
}
