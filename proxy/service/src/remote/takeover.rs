//! What goes on with a program's queue pairs when the proxy that drives them dies: the next proxy that listens at the same
//! place.
//!
//! 1. The connection ends. Queue pairs whose links are not replaced end here.
//! 2. The old proxy's process ends, by its pidfd. Until then it may still write the queue pairs' memory, so nobody takes over
//!    from a proxy that is only stopped.
//! 3. The next proxy is dialled, every few milliseconds, and handed the memory of each queue pair: the rings, the window of the
//!    peer, the session segment, a new link segment, and the regions under the keys that they had.
//! 4. Each queue pair meets its peer again, over the next link.
//!
//! A proxy that dies meanwhile is another old one. All of it ends `recover` after the first death: then the queue pairs end
//! with *peer lost*, naming the own rank. A proxy that says that it ends, and leaves the queue pairs to nobody, is not waited for:
//! they end with *aborted*.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::interrupt::Interrupted;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::process::Process;
use pushgate_driver_shim::segment::{Segment, check_header, write_header};
use pushgate_engine::engine::{EngineError, QpId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::book::{QueuePair, Session};
use super::{RemoteEngine, Sessions, State, Unanswered, dial, exchange, greet, limit, unexpected};
use crate::wire::{Answer, Request, TIMEOUT};

/// The pause between two looks whether the next proxy listens.
const PAUSE: Duration = Duration::from_millis(5);
/// Most frames of the proxy that are passed on before this thread looks at what else has happened.
const FRAMES: usize = 64;

/// What ended a wait.
enum Woke {
    /// The program wants its thread back.
    Stop,
    /// The descriptor named first.
    First,
    /// The descriptor named second.
    Second,
    /// The time is over.
    Time,
}

/// Why a proxy did not go on.
enum Failed {
    /// None listens, or it does not answer yet. It was handed nothing.
    NotYet(EngineError),
    /// It was handed memory: nobody else may have that before it has ended.
    Died(Arc<Process>, EngineError),
}

fn wait(stop: &EventFd, fds: [Option<(BorrowedFd<'_>, PollFlags)>; 2], deadline: Option<Instant>) -> Woke {
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let time = left.and_then(|left| Timespec::try_from(left).ok());
        let mut all = vec![PollFd::new(stop, PollFlags::IN)];
        all.extend(fds.iter().flatten().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)));
        if poll(&mut all, time.as_ref()).is_err() {
            continue;
        }
        let mut ready = all.iter().map(|fd| !fd.revents().is_empty());
        let found =
            [true, fds[0].is_some(), fds[1].is_some()].map(|there| there && ready.next() == Some(true));
        match found {
            [true, ..] => return Woke::Stop,
            [_, true, _] => return Woke::First,
            [.., true] => return Woke::Second,
            _ if left.is_some_and(|left| left.is_zero()) => return Woke::Time,
            _ => {}
        }
    }
}

impl RemoteEngine {
    /// Sees to the proxy until `stop` is rung, or the proxy is lost and none goes on in its place: passes frames of queue pairs
    /// on to their peers, and hands the queue pairs to the next proxy when this one dies. One thread at a time.
    pub fn attend(&self, stop: &EventFd) {
        self.connection().attended = true;
        while self.attend_one(stop) {}
        let mut connection = self.connection();
        connection.attended = false;
        if matches!(connection.state, State::Away) {
            // Calls that wait for the next proxy.
            self.set_lost(&mut connection, "nobody waits for the next proxy".into());
        }
    }

    /// Sees to one proxy. True if the next one goes on.
    fn attend_one(&self, stop: &EventFd) -> bool {
        let (stream, mut sessions) = {
            let connection = self.connection();
            (connection.stream.clone(), connection.sessions.clone())
        };
        loop {
            // Only for the connection's end: the proxy's answers are for the threads that asked.
            let ends = (stream.as_fd(), PollFlags::RDHUP | PollFlags::HUP);
            let frames = sessions.as_ref().map(|s| (s.frames.as_fd(), PollFlags::IN));
            match wait(stop, [Some(ends), frames], None) {
                Woke::Stop => return false,
                Woke::First => break,
                // What the proxy does not read or write any more is its end, which comes by the connection.
                Woke::Second if !self.pass_on(&sessions) => sessions = None,
                Woke::Second | Woke::Time => {}
            }
        }
        self.take_over(stop)
    }

    /// Passes frames of the proxy on. False if there will be no more.
    fn pass_on(&self, sessions: &Option<Sessions>) -> bool {
        let Some(Sessions { frames, .. }) = sessions else { return false };
        for _ in 0..FRAMES {
            match frames.receive() {
                Ok(Some((tag, frame))) => {
                    if let Ok(qp) = self.book.find(QpId(tag))
                        && let Some(session) = &qp.session
                    {
                        session.send(frame);
                    }
                }
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    /// The connection has ended. True if the next proxy goes on with the queue pairs.
    fn take_over(&self, stop: &EventFd) -> bool {
        // Waits for a request that is under way, which fails by itself.
        let old = {
            let mut connection = self.connection();
            self.hear(&mut connection);
            connection.leave();
            self.changed.notify_all();
            // One that was lost for another reason, such as no answer in time, may be alive.
            let sessions = connection.sessions.take();
            sessions.filter(|_| matches!(connection.state, State::Away))
        };
        self.book.proxy_died();
        let all = self.book.all();
        let (go_on, end): (Vec<_>, Vec<_>) = all.iter().partition(|(_, qp)| qp.session.is_some());
        end.iter().for_each(|(_, qp)| qp.lose(self.code()));
        let sessions = || go_on.iter().filter_map(|(_, qp)| qp.session.as_ref());
        sessions().for_each(|session| session.set_frames(None));
        let recover = sessions().map(|session| session.limit).max();
        let (Some(old), Some(recover), Some(path)) = (old, recover, &self.path) else {
            return self.gives_up(&format!("the process{} went away: start it again", self.at()));
        };
        tracing::warn!("the proxy's process is gone; queue pairs wait for the next one{}", self.at());
        let begin = Instant::now();
        let none_took_over = |why: &str| {
            self.gives_up(&format!(
                "the process{} went away, and none took over within {recover:?}: start `pushgate proxy` sooner, or raise \
                 `recover` (the last try: {why})",
                self.at()
            ))
        };
        let deadline = Some(begin + recover);
        let mut process = old.process;
        let mut why = "it has not ended, although it closed the connection".to_string();
        loop {
            match wait(stop, [Some((process.as_fd(), PollFlags::IN)), None], deadline) {
                Woke::First | Woke::Second => {}
                Woke::Stop => return false,
                Woke::Time => return none_took_over(&why),
            }
            process = loop {
                match self.try_next(path) {
                    Ok(()) => {
                        let ms = begin.elapsed().as_millis() as u64;
                        tracing::warn!(ms, "another proxy goes on with the queue pairs");
                        return true;
                    }
                    Err(Failed::Died(process, e)) => {
                        why = format!("the next one failed ({e}) and has not ended");
                        break process;
                    }
                    Err(Failed::NotYet(EngineError::Remote(e))) => why = e,
                    Err(Failed::NotYet(e)) => why = e.to_string(),
                }
                let pause = Some(Instant::now() + PAUSE);
                match wait(stop, [None, None], pause.min(deadline)) {
                    Woke::Stop => return false,
                    _ if deadline.is_some_and(|at| at <= Instant::now()) => return none_took_over(&why),
                    _ => {}
                }
            };
        }
    }

    /// No proxy goes on: every queue pair has its status.
    fn gives_up(&self, why: &str) -> bool {
        // First: a queue pair that is added meanwhile is not.
        let e = self.lose(why.into());
        tracing::error!("{e}");
        self.book.all().iter().for_each(|(_, qp)| qp.lose(self.code()));
        false
    }

    /// How queue pairs end that have no proxy.
    fn code(&self) -> u32 {
        match self.connection().said_so {
            true => abi::PUSHGATE_ABORTED,
            false => abi::PUSHGATE_PEER_LOST,
        }
    }

    /// Dials the next proxy, and hands it the queue pairs.
    fn try_next(&self, path: &std::path::Path) -> Result<(), Failed> {
        let stream = dial(path, Instant::now(), self.trusts).map_err(Failed::NotYet)?;
        let Some(bell) = &self.bell else { return Err(Failed::NotYet(EngineError::Gone)) };
        let sessions = greet(&stream, bell, &self.name).map_err(Failed::NotYet)?;
        let old = || EngineError::Remote("the next proxy is an older release".into());
        let sessions = sessions.ok_or_else(|| Failed::NotYet(old()))?;
        let died = |e| Failed::Died(sessions.process.clone(), e);
        let all = self.book.all();
        for (id, qp) in &all {
            let Some(session) = qp.session.as_ref().filter(|_| !qp.is_gone()) else { continue };
            if qp.status().is_some() {
                qp.lose(abi::PUSHGATE_PEER_LOST);
                continue;
            }
            match resume(&stream, *id, qp, session) {
                Ok(there) => qp.goes_on(there),
                Err(Refused::Here(e)) => {
                    tracing::error!("a queue pair does not go on with the next proxy: {e}");
                    qp.lose(abi::PUSHGATE_PEER_LOST);
                }
                Err(Refused::Gone(e)) => return Err(died(e)),
            }
        }
        let mut connection = self.connection();
        if !matches!(connection.state, State::Away) {
            return Err(died(EngineError::Gone));
        }
        (connection.stream, connection.state) = (Arc::new(stream), State::Live);
        // Of the proxy that died.
        connection.owed.clear();
        self.later().clear();
        connection.sessions = Some(sessions.clone());
        self.changed.notify_all();
        drop(connection);
        for (id, qp) in &all {
            if let Some(session) = &qp.session {
                session.set_frames(Some(sessions.frames.clone()));
                session.hand_over(*id);
            }
        }
        Ok(())
    }
}

/// Why a queue pair does not go on.
enum Refused {
    /// The proxy said no.
    Here(EngineError),
    /// The proxy is gone, or this program's context is.
    Gone(EngineError),
}

impl From<EngineError> for Refused {
    fn from(e: EngineError) -> Self {
        Refused::Here(e)
    }
}

/// Hands a queue pair to a proxy. Returns the proxy's number for it.
fn resume(
    stream: &std::os::unix::net::UnixStream,
    id: QpId,
    qp: &QueuePair,
    session: &Session,
) -> Result<QpId, Refused> {
    let ask = |request: &Request, fds: &[BorrowedFd<'_>], limit| match exchange(stream, request, fds, limit) {
        Ok((reply, _)) => reply.map_err(|refusal| Refused::Here(refusal.into())),
        Err(Unanswered::Interrupted) => Err(Refused::Gone(Interrupted.into())),
        Err(Unanswered::Io(e)) => Err(Refused::Gone(EngineError::Remote(e.to_string()))),
    };
    let m = &*session.memory;
    let link = fresh_link(&m.control)?;
    let mut fds = vec![m.work.fd(), m.control.fd(), link.fd(), m.peer_link.fd(), m.peer_window.fd()];
    fds.push(session.segment.fd());
    fds.extend(m.bell.as_ref().map(|b| b.handle()));
    fds.extend(m.peer_bell.as_ref().map(|b| b.as_fd()));
    let bytes = [m.work.len(), m.control.len(), link.len(), m.peer_link.len(), m.peer_window.len()];
    let (options, wake) = (session.options, session.wake);
    let (bell, peer_bell) = (m.bell.is_some(), m.peer_bell.is_some());
    let request = Request::ResumeQp { options, wake, bell, peer_bell, session: session.offer(id) };
    ask(&request, &fds, limit(bytes.iter().sum()))?;
    for (key, memory) in qp.regions() {
        let request = Request::RestoreRegion { key, bytes: memory.len() as u64 };
        ask(&request, &[memory.fd()], limit(memory.len()))?;
    }
    match ask(&Request::Begin, &[], TIMEOUT)? {
        Answer::Qp(there) => Ok(there),
        other => Err(unexpected(&other).into()),
    }
}

/// A link segment that no peer has seen: the one before is sealed against new writers.
fn fresh_link(control: &SharedMemory) -> Result<SharedMemory, EngineError> {
    let wrong = |e: &dyn std::fmt::Display| EngineError::Remote(format!("a link segment: {e}"));
    let g = check_header(control.words(0, 8), Segment::Control, control.len()).map_err(|e| wrong(&e))?;
    let memory = SharedMemory::builder("pushgate-link", g.bytes(Segment::Link)).huge_pages(HugePages::Never);
    let memory = memory.create().map_err(|e| wrong(&e))?;
    write_header(&memory, Segment::Link, &g).map_err(|e| wrong(&e))?;
    Ok(memory)
}
