//! What a program keeps of the queue pairs that a proxy drives: their numbers there, and what the next proxy is handed if this
//! one dies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::segment::{Segment, check_header};
use pushgate_engine::connect::{self, Incarnation};
use pushgate_engine::counters::Counters;
use pushgate_engine::endpoint::QpOptions;
use pushgate_engine::engine::{EngineError, QpId};
use pushgate_engine::idle::Wake;
use pushgate_engine::journal::session_bytes;
use pushgate_engine::proxy::{QpFds, Recovers};
use pushgate_link::frame::Frame;
use pushgate_link::mailbox::{Mailbox, SendFrame};

use crate::frame_socket::FrameSocket;
use crate::wire::SessionOffer;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves what is locked here whole, so a poisoned lock is no reason to stop.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All queue pairs of a program that a proxy drives, by the program's own numbers. Any thread may use it; no call waits.
#[derive(Debug, Default)]
pub(super) struct Book(Mutex<Pages>);

#[derive(Debug, Default)]
struct Pages {
    next: u32,
    all: BTreeMap<u32, Arc<QueuePair>>,
    /// What proxies that died have told last.
    before: Counters,
    /// What the present proxy has told last.
    last: Counters,
}

/// A queue pair that a proxy drives.
#[derive(Debug)]
pub(super) struct QueuePair {
    control: Arc<SharedMemory>,
    link: Arc<SharedMemory>,
    rank: u32,
    /// The proxy's number for it; `None`: it did not go on with the next proxy.
    there: Mutex<Option<QpId>>,
    regions: Mutex<BTreeMap<u32, Arc<SharedMemory>>>,
    /// Keys of regions whose removal was answered when nobody waited for that any more.
    removed: Mutex<BTreeSet<u32>>,
    /// What replaces its link; `None`: nothing does, and its proxy's end is its own.
    pub(super) session: Option<Session>,
}

/// What replaces the link of a queue pair, and what the next proxy is handed.
pub(super) struct Session {
    pub(super) memory: Arc<QpFds>,
    pub(super) options: QpOptions,
    pub(super) wake: Wake,
    /// The session segment, which proxies alone write and read.
    pub(super) segment: SharedMemory,
    own: Incarnation,
    peer: Incarnation,
    epoch: u32,
    pub(super) limit: Duration,
    mailbox: Mailbox,
    /// `None` once this end has said that it has ended.
    send: Mutex<Option<SendFrame>>,
    /// The way of frames to the proxy, while there is one.
    frames: Mutex<Option<Arc<FrameSocket>>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("own", &self.own).field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Book {
    /// The next number.
    pub(super) fn number(&self) -> QpId {
        let mut pages = lock(&self.0);
        pages.next += 1;
        QpId(pages.next - 1)
    }

    pub(super) fn add(&self, id: QpId, qp: Arc<QueuePair>, there: QpId) {
        *lock(&qp.there) = Some(there);
        lock(&self.0).all.insert(id.0, qp);
    }

    pub(super) fn remove(&self, id: QpId) {
        // Dropped when the lock is free again: a channel of the program goes with it.
        let gone = lock(&self.0).all.remove(&id.0);
        drop(gone);
    }

    pub(super) fn find(&self, id: QpId) -> Result<Arc<QueuePair>, EngineError> {
        lock(&self.0).all.get(&id.0).cloned().ok_or(EngineError::NoQp(id.0))
    }

    /// A region of the queue pair that is `there` at the proxy has been removed, and nobody waited for that any more.
    pub(super) fn removed_later(&self, there: QpId, key: u32) {
        let mut all = self.all().into_iter();
        if let Some((_, qp)) = all.find(|(id, qp)| qp.there(*id).is_ok_and(|its| its == there)) {
            qp.remove_region(key);
            lock(&qp.removed).insert(key);
        }
    }

    /// The present proxy has counted so much. Returns the sum over all proxies.
    pub(super) fn counted(&self, counters: Counters) -> Counters {
        let mut pages = lock(&self.0);
        pages.last = counters;
        let mut sum = pages.before;
        sum += counters;
        sum
    }

    /// The present proxy has died.
    pub(super) fn proxy_died(&self) {
        let mut pages = lock(&self.0);
        let last = std::mem::take(&mut pages.last);
        pages.before += last;
    }

    pub(super) fn all(&self) -> Vec<(QpId, Arc<QueuePair>)> {
        lock(&self.0).all.iter().map(|(id, qp)| (QpId(*id), qp.clone())).collect()
    }
}

impl QueuePair {
    pub(super) fn new(memory: &QpFds, session: Option<Session>) -> Result<Self, EngineError> {
        let (control, link) = (memory.control.clone(), memory.link.clone());
        let words = (control.len() / 8).min(8);
        // A proxy refuses what is none; it has no rank.
        let header = check_header(control.words(0, words), Segment::Control, control.len());
        let rank = header.map_or(abi::PUSHGATE_NO_RANK, |g| g.rank);
        let (there, regions, removed) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(QueuePair { control, link, rank, there, regions, removed, session })
    }

    /// The proxy's number for the queue pair that is `id` here.
    pub(super) fn there(&self, id: QpId) -> Result<QpId, EngineError> {
        lock(&self.there).ok_or(EngineError::NoQp(id.0))
    }

    /// It goes on under this number.
    pub(super) fn goes_on(&self, there: QpId) {
        *lock(&self.there) = Some(there);
    }

    /// It did not go on with the next proxy.
    pub(super) fn is_gone(&self) -> bool {
        lock(&self.there).is_none()
    }

    /// How it has ended, by its control word.
    pub(super) fn status(&self) -> Option<Status> {
        let word = self.control.words(abi::PUSHGATE_CTL_STATUS as usize, 1)[0].load(Ordering::Acquire);
        Status::from_word(word)
    }

    pub(super) fn add_region(&self, key: u32, memory: &Arc<SharedMemory>) {
        // The key may be one that was in use before.
        lock(&self.removed).remove(&key);
        if self.session.is_some() {
            lock(&self.regions).insert(key, memory.clone());
        }
    }

    pub(super) fn remove_region(&self, key: u32) {
        lock(&self.regions).remove(&key);
    }

    /// Whether the answer that a region is removed has come when nobody waited for it.
    pub(super) fn has_removed(&self, key: u32) -> bool {
        lock(&self.removed).contains(&key)
    }

    pub(super) fn regions(&self) -> Vec<(u32, Arc<SharedMemory>)> {
        lock(&self.regions).iter().map(|(key, memory)| (*key, memory.clone())).collect()
    }

    /// Writes a status in place of the proxy (P7), where device and peer look, and tells the peer beside the link. A status
    /// that is there stays.
    pub(super) fn lose(&self, code: u32) {
        *lock(&self.there) = None;
        let status = Status { rank: Some(self.rank), ..Status::new(code) };
        let word = |memory: &SharedMemory, at: u32, store: &dyn Fn(&AtomicU64)| {
            if memory.len() >= at as usize + 8 {
                store(&memory.words(at as usize, 1)[0]);
            }
        };
        let store = |word: &AtomicU64| {
            // Release: as an engine's own store. What the proxy did before, its end has ordered.
            _ = word.compare_exchange(0, status.word(), Ordering::Release, Ordering::Relaxed);
        };
        word(&self.control, abi::PUSHGATE_CTL_STATUS, &store);
        word(&self.link, abi::PUSHGATE_LINK_STATUS, &store);
        if let Some(session) = &self.session {
            session.end(status);
        }
    }
}

impl Session {
    pub(super) fn new(
        memory: Arc<QpFds>,
        options: QpOptions,
        wake: Wake,
        recovers: Recovers,
    ) -> Result<Self, EngineError> {
        let Recovers { connect, limit, mailbox, send } = recovers;
        let wrong = |e: &dyn std::fmt::Display| EngineError::Remote(format!("session segment: {e}"));
        let control = &memory.control;
        let geometry = check_header(control.words(0, 8), Segment::Control, control.len());
        let rx_log = geometry.map_err(|e| wrong(&e))?.rx_log;
        let bytes = session_bytes(options.posted_receives.then_some(rx_log));
        let segment = SharedMemory::builder("pushgate-session", bytes).huge_pages(HugePages::Never);
        let segment = segment.create().map_err(|e| wrong(&e))?;
        let peer = connect.peer().ok_or_else(|| EngineError::Remote("its ends have not met".into()))?;
        Ok(Session {
            memory,
            options,
            wake,
            segment,
            own: connect.own(),
            peer,
            epoch: connect.epoch(),
            limit,
            mailbox,
            send: Mutex::new(Some(send)),
            frames: Mutex::default(),
        })
    }

    /// What a proxy is told of the session of the queue pair that is `id` here.
    pub(super) fn offer(&self, id: QpId) -> SessionOffer {
        let recover_ns = u64::try_from(self.limit.as_nanos()).unwrap_or(u64::MAX);
        SessionOffer { tag: id.0, own: self.own, peer: self.peer, epoch: self.epoch, recover_ns }
    }

    /// A proxy goes on with it, or none does: where frames of the peer go.
    pub(super) fn set_frames(&self, frames: Option<Arc<FrameSocket>>) {
        *lock(&self.frames) = frames;
    }

    /// Hands frames of the peer to the proxy, if there is one. A frame that its socket does not take is lost; those that come while
    /// there is no proxy are for the next one.
    pub(super) fn hand_over(&self, id: QpId) {
        let Some(frames) = lock(&self.frames).clone() else { return };
        let mut all = self.mailbox.take_all().into_iter();
        while let Some(frame) = all.next() {
            if frames.send(id.0, &frame).is_err() {
                // The proxy has died, and that was not heard yet: these are for the next one.
                for frame in std::iter::once(frame).chain(all) {
                    self.mailbox.put(frame);
                }
                // The next proxy may have come just now.
                let mut now = lock(&self.frames);
                if now.as_ref().is_some_and(|now| Arc::ptr_eq(now, &frames)) {
                    *now = None;
                }
                let again = now.is_some();
                drop(now);
                return if again {
                    self.hand_over(id)
                };
            }
        }
    }

    /// Sends the peer a frame of this end. After an END nothing more is sent.
    pub(super) fn send(&self, frame: Frame) {
        let ends = matches!(connect::ended(&frame.bytes), Ok(Some(_)));
        let mut send = lock(&self.send);
        if let Some(send) = &mut *send {
            send(frame);
        }
        // Dropped when the lock is free again: the program's channel goes with it.
        let gone = ends.then(|| send.take()).flatten();
        drop(send);
        drop(gone);
    }

    fn end(&self, status: Status) {
        let bytes = connect::end(self.own, Some(self.peer), status);
        self.send(Frame { bytes, along: Default::default() });
    }
}
