//! What has come from other ranks and waits for a caller, and what is known of those ranks.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use pushgate_driver_shim::closing::Closes;
use pushgate_driver_shim::fdpass::Frame;
use pushgate_engine::connect::Incarnation;
use pushgate_link::mailbox::Mailbox;

use super::FRAME;
use super::route::Route;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    Bye,
    Lost,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) frames: HashMap<(u32, u32), VecDeque<Frame>>,
    /// By rank: how much room its frames in `frames` take.
    pub(super) waiting: HashMap<u32, Load>,
    /// Queue pairs that this rank is making, by rank and label.
    pub(super) set_ups: HashSet<(u32, u32)>,
    /// Those whose frame lost descriptors, by rank and label. No call has heard of it yet.
    pub(super) cut: HashSet<(u32, u32)>,
    /// Queue pairs whose links are replaced when they break, by rank and label: where their frames go.
    pub(super) routes: HashMap<(u32, u32), Route>,
    /// Of such queue pairs that are gone, the latest under each rank and label: which of this rank's calls made it. All
    /// earlier calls are gone too, but for one that has a route.
    pub(super) gone: HashMap<(u32, u32), Incarnation>,
    pub(super) ends: HashMap<u32, Leaving>,
    pub(super) lost: Option<u32>,
    /// By rank: the rank that it has reported as lost.
    pub(super) reported: HashMap<u32, u32>,
}

#[derive(Default)]
pub(super) struct Load {
    pub(super) bytes: usize,
    pub(super) fds: usize,
    /// How many descriptors besides are open: a thread is still closing them, or they wait in a mailbox of a queue pair.
    elsewhere: Arc<AtomicUsize>,
    closes: Closes,
}

impl Load {
    /// How many descriptors are open here, including those that a thread is still closing or an engine has yet to take.
    pub(super) fn open(&self) -> usize {
        // Relaxed: the count orders no other memory.
        self.fds + self.elsewhere.load(Ordering::Relaxed)
    }
}

/// Limits on peers' frames that wait until a caller asks for them.
#[derive(Clone, Copy)]
pub(super) struct Most {
    /// The most bytes of one peer.
    pub(super) bytes: usize,
    /// The most descriptors of all peers together.
    pub(super) fds: usize,
    /// A peer with no more descriptors here than this is not lost, however many the others have.
    pub(super) share: usize,
}

/// Subtracts a number of closed descriptors from a count when it is dropped.
struct Counted(Arc<AtomicUsize>, usize);

/// Descriptors of dropped frames. They count as their rank's until they are closed.
#[derive(Default)]
#[must_use]
pub(super) struct Dropped(Option<(Closes, Vec<OwnedFd>, Counted)>);

impl Dropped {
    /// Has a few threads of the rank close them. For callers that do not hold the inbox's lock: if no thread can be
    /// started, they are closed here, which can take as long as the peer likes.
    pub(super) fn close(self) {
        self.0.into_iter().for_each(|(closes, fds, counted)| closes.close(fds, counted));
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // Relaxed: the count orders no other memory (see `Load::open`).
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl State {
    /// Keeps a frame until a caller asks for it. Returns false if the rank's frames exceed their limits now.
    pub(super) fn keep(&mut self, rank: u32, label: u32, frame: Frame, most: Most) -> bool {
        let load = self.waiting.entry(rank).or_default();
        load.bytes += frame.0.len() + FRAME;
        load.fds += frame.1.len();
        self.frames.entry((rank, label)).or_default().push_back(frame);
        self.fits(rank, most)
    }

    /// Whether the frames of a rank, and its descriptors that are still open, are within their limits.
    pub(super) fn fits(&self, rank: u32, most: Most) -> bool {
        let Some(load) = self.waiting.get(&rank) else { return true };
        let all = || self.waiting.values().map(Load::open).sum::<usize>();
        load.bytes <= most.bytes && (load.open() <= most.share || all() <= most.fds)
    }

    pub(super) fn take(&mut self, rank: u32, label: u32) -> Option<Frame> {
        let queue = self.frames.get_mut(&(rank, label))?;
        let frame = queue.pop_front();
        if queue.is_empty() {
            self.frames.remove(&(rank, label));
        }
        self.unload(rank, frame.as_slice());
        frame
    }

    /// Drops those frames of a label that `keep` rejects.
    pub(super) fn retain(&mut self, rank: u32, label: u32, keep: impl Fn(&Frame) -> bool) -> Dropped {
        let Some(queue) = self.frames.remove(&(rank, label)) else { return Dropped::default() };
        let (kept, dropped): (Vec<_>, Vec<_>) = queue.into_iter().partition(keep);
        self.unload(rank, &dropped);
        if !kept.is_empty() {
            self.frames.insert((rank, label), kept.into());
        }
        self.discard(rank, dropped.into_iter().flat_map(|(_, fds)| fds).collect())
    }

    /// Makes the mailbox of a queue pair with a rank. Descriptors that wait there count as the rank's.
    pub(super) fn mailbox(&mut self, rank: u32) -> Mailbox {
        Mailbox::counted(self.waiting.entry(rank).or_default().elsewhere.clone())
    }

    /// Counts descriptors of a rank that nothing needs until they are closed.
    pub(super) fn discard(&mut self, rank: u32, fds: Vec<OwnedFd>) -> Dropped {
        if fds.is_empty() {
            return Dropped::default();
        }
        let load = self.waiting.entry(rank).or_default();
        load.elsewhere.fetch_add(fds.len(), Ordering::Relaxed);
        let count = Counted(load.elsewhere.clone(), fds.len());
        Dropped(Some((load.closes.clone(), fds, count)))
    }

    pub(super) fn unload(&mut self, rank: u32, frames: &[Frame]) {
        let load = self.waiting.entry(rank).or_default();
        for (bytes, fds) in frames {
            load.bytes -= bytes.len() + FRAME;
            load.fds -= fds.len();
        }
    }
}

#[derive(Default)]
pub(super) struct Inbox {
    state: Mutex<State>,
    pub(super) arrived: Condvar,
}

impl Inbox {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}
