//! The channel over which two ranks make a queue pair: the frames under the queue pair's label on their socket.
//!
//! `pushgate_engine::connect` says what the frames mean. Only an END is read here, as it arrives: the frames of the
//! incarnation that has ended are dropped, and a queue pair that is joined with that incarnation ends. So an end that breaks
//! later, and can't tell its peer over its own link, still ends the peer's end.
//!
//! The channel outlives the call where both ends replace a link that breaks: then the frames of the peer's end go to the
//! queue pair's engine ([`TellEngine`]), and those of this end leave by a [`Channel`].

#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::fdpass::Frame;
use pushgate_engine::connect::{self, Incarnation};
use pushgate_link::mailbox::Mailbox;

use super::inbox::Dropped;
use super::route::{Route, TellEngine};
use super::{Ended, MAX_OUT_FDS, Mesh, Most, Shared, State};
use crate::error::Result;

/// Frames about links are dropped while more bytes than this wait until the peer takes them, so that a peer which is answered
/// and reads nothing can't fill this process's memory. Such a frame has a few hundred bytes, over RDMA up to 90 more for each
/// region.
const MOST_TOLD: usize = 1 << 19;

/// Of more queue pairs than this whose frames lost descriptors no call hears: a rank that sends such frames under ever new
/// labels can't fill this process's memory.
const MOST_CUT: usize = 1024;

/// What an END under a queue pair's label reports; `None` for another frame. Fails if the END is malformed.
pub(super) fn ended(rank: u32, label: u32, bytes: &[u8]) -> std::result::Result<Option<Ended>, String> {
    let found = connect::ended(bytes).map_err(|e| format!("it reported an end: {e}"))?;
    Ok(found.map(|(incarnation, status)| {
        let status = Status { rank: status.rank.or(Some(rank)), ..status };
        Ended { rank, label, incarnation, status }
    }))
}

/// Drops the frames of an incarnation that has ended, and of earlier ones. A call of ours that is under way gets the END,
/// and keeps those of earlier incarnations: it may be joined with one of them. Returns false if the rank's frames exceed their
/// limits then.
pub(super) fn forget(state: &mut State, ended: Ended, end: Vec<u8>, most: Most) -> (bool, Dropped) {
    let Ended { rank, label, incarnation, .. } = ended;
    let under_way = state.set_ups.contains(&(rank, label));
    let dropped = state.retain(rank, label, |(bytes, _)| match connect::sender(bytes) {
        Some(from) if from < incarnation => under_way && matches!(connect::ended(bytes), Ok(Some(_))),
        from => from != Some(incarnation),
    });
    (!under_way || state.keep(rank, label, (end, Vec::new()), most), dropped)
}

/// Tells the peer of a queue pair that this end has broken, without waiting.
pub(crate) struct TellEnd {
    shared: Weak<Shared>,
    rank: u32,
    label: u32,
    own: Incarnation,
    peer: Option<Incarnation>,
}

impl TellEnd {
    /// Sends the report. A status that names no rank is taken for this rank's.
    pub(crate) fn tell(self, status: Status) {
        if let Some(shared) = self.shared.upgrade() {
            let bytes = connect::end(self.own, self.peer, status);
            shared.tells(self.rank, self.label, connect::Frame { bytes, along: Default::default() });
        }
    }
}

/// What becomes of a frame about a queue pair.
pub(super) enum Bound {
    /// It waits for a call of this rank.
    Here(Frame),
    /// A queue pair has it, whose engine is to be told.
    Delivered(Option<TellEngine>, Dropped),
    /// It was sent to a queue pair that is gone: the answer, an END.
    Gone(Vec<u8>, Dropped),
}

impl State {
    fn ends_set_up(&mut self, rank: u32, label: u32) {
        self.set_ups.remove(&(rank, label));
        self.cut.remove(&(rank, label));
    }

    /// Keeps for a call of this rank that a frame about its queue pair lost its descriptors. A queue pair that is made
    /// already has its peer send the frame again.
    pub(super) fn cut(&mut self, rank: u32, label: u32, bytes: &[u8]) {
        let made = |route: &Route| connect::sender(bytes) == Some(route.with);
        if !self.routes.get(&(rank, label)).is_some_and(made) && self.cut.len() < MOST_CUT {
            self.cut.insert((rank, label));
        }
    }

    /// Takes those frames of a label out that `fits` accepts.
    fn extract(&mut self, rank: u32, label: u32, fits: impl Fn(&Frame) -> bool) -> Vec<Frame> {
        let Some(queue) = self.frames.remove(&(rank, label)) else { return Vec::new() };
        let (taken, kept): (Vec<_>, Vec<_>) = queue.into_iter().partition(fits);
        self.unload(rank, &taken);
        if !kept.is_empty() {
            self.frames.insert((rank, label), kept.into());
        }
        taken
    }

    /// Hands a frame to the queue pair that it was sent to, if that takes frames. `memory`: its descriptors are shared
    /// memory. A frame with others loses all of them: the engine refuses such a frame.
    pub(super) fn route(&mut self, rank: u32, label: u32, (bytes, fds): Frame, memory: bool) -> Bound {
        let key = (rank, label);
        let (from, to) = (connect::sender(&bytes), connect::receiver(&bytes));
        if self.routes.get(&key).is_some_and(|route| from == Some(route.with)) {
            let (fds, mut others) = if memory { (fds, Vec::new()) } else { (Vec::new(), fds) };
            let tell = self.routes[&key].deliver(bytes, fds).unwrap_or_else(|left| {
                others.extend(left);
                None
            });
            return Bound::Delivered(tell, self.discard(rank, others));
        }
        // A frame to the incarnation that has a route comes from an incarnation of the peer that it is not joined with.
        let routed = |to| self.routes.get(&key).is_some_and(|route| route.own == to);
        let gone = |to: &Incarnation| self.gone.get(&key).is_some_and(|last| to <= last) && !routed(*to);
        match to.filter(gone) {
            Some(to) => {
                let end = connect::end(to, from, Status::new(abi::PUSHGATE_ABORTED));
                Bound::Gone(end, self.discard(rank, fds))
            }
            None => Bound::Here((bytes, fds)),
        }
    }
}

impl Shared {
    /// Tells a peer, without waiting, that our end is gone. A peer that can't be told is gone
    /// already, or ends at its timeout.
    pub(super) fn tell_end(&self, rank: u32, label: u32, end: Vec<u8>) {
        self.push(rank, label, &connect::Frame { bytes: end, along: Default::default() }, usize::MAX);
    }

    /// Answers a frame to a queue pair that is gone, without waiting. Drops the answer if the peer does not read: the peer
    /// says the same again later.
    pub(super) fn answer(&self, rank: u32, label: u32, end: Vec<u8>) {
        self.push(rank, label, &connect::Frame { bytes: end, along: Default::default() }, MOST_TOLD);
    }

    /// Sends a peer a frame of a queue pair, without waiting. Drops a frame about a link if the peer does not read, or if
    /// its descriptors can't be handed over now: its sender says the same again later. A queue pair sends one END.
    pub(super) fn tell(&self, rank: u32, label: u32, frame: &connect::Frame) {
        let most = if matches!(connect::ended(&frame.bytes), Ok(Some(_))) { usize::MAX } else { MOST_TOLD };
        self.push(rank, label, frame, most);
    }

    /// Puts a frame after those that wait for the peer, unless more than `most` bytes wait.
    fn push(&self, rank: u32, label: u32, frame: &connect::Frame, most: usize) {
        let peer = self.peer(rank);
        let fds = frame.along.borrow();
        let mut out = peer.out();
        if out.closed || out.waiting() > most {
            return;
        }
        if !fds.is_empty() && (!peer.is_here || out.fds() + fds.len() > MAX_OUT_FDS) {
            return;
        }
        let fds = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<Vec<_>>>();
        let bytes = [&label.to_le_bytes()[..], &frame.bytes].concat();
        if fds.is_ok_and(|fds| out.push(&bytes, fds).is_ok()) {
            let _ = peer.flush(&mut out);
            self.bell.ring();
        }
    }

    /// Has the reader's thread send a frame about a queue pair.
    fn tells(&self, rank: u32, label: u32, frame: connect::Frame) {
        self.tell.lock().unwrap_or_else(|e| e.into_inner()).push((rank, label, frame));
        self.bell.ring();
    }
}

/// The way of a queue pair's frames to its peer. When it is dropped the queue pair is gone: frames of the peer are answered
/// with END.
pub(crate) struct Channel {
    shared: Weak<Shared>,
    rank: u32,
    label: u32,
    own: Incarnation,
}

impl Channel {
    /// Sends a frame, without waiting. A frame that can't be sent is dropped.
    pub(crate) fn send(&self, frame: connect::Frame) {
        if let Some(shared) = self.shared.upgrade() {
            shared.tells(self.rank, self.label, frame);
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let (key, mut state) = ((self.rank, self.label), shared.inbox.state());
        // One that was made earlier may be freed later.
        let last = state.gone.entry(key).or_insert(self.own);
        *last = self.own.max(*last);
        let route = match state.routes.get(&key).is_some_and(|route| route.own == self.own) {
            true => state.routes.remove(&key),
            false => None,
        };
        drop(state);
        drop(route);
    }
}

/// The channel of one call that makes a queue pair with a rank.
pub(crate) struct SetUp<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) peer: u32,
    pub(super) label: u32,
    pub(super) own: Incarnation,
}

impl Mesh {
    /// Begins to make a queue pair with `peer`. Only one call at a time under a label.
    pub(crate) fn set_up(&self, peer: u32, label: u32) -> SetUp<'_> {
        self.shared.inbox.state().set_ups.insert((peer, label));
        // Relaxed: only the number itself matters; it orders no other memory.
        let own = Incarnation::MIN.saturating_add(self.incarnations.fetch_add(1, Ordering::Relaxed));
        SetUp { mesh: self, peer, label, own }
    }
}

impl SetUp<'_> {
    /// Sends a frame.
    pub(super) fn send(&self, frame: &connect::Frame) -> Result<()> {
        self.mesh.send(self.peer, self.label, &frame.bytes, &frame.along.borrow())
    }

    /// Sends an END, without waiting.
    pub(super) fn send_end(&self, end: &[u8]) {
        self.mesh.shared.tell_end(self.peer, self.label, end.to_vec());
    }

    /// Makes the value that tells the peer later if this end breaks and can't say so over its own
    /// link. `peer` is the incarnation with which this end is joined.
    pub(super) fn teller(&self, peer: Option<Incarnation>) -> TellEnd {
        TellEnd {
            shared: Arc::downgrade(&self.mesh.shared),
            rank: self.peer,
            label: self.label,
            own: self.own,
            peer,
        }
    }

    /// Makes the ways of the queue pair's later frames: to the peer, and from the peer.
    pub(super) fn channels(&self) -> (Channel, Mailbox) {
        let shared = Arc::downgrade(&self.mesh.shared);
        let channel = Channel { shared, rank: self.peer, label: self.label, own: self.own };
        (channel, self.mesh.shared.inbox.state().mailbox(self.peer))
    }

    /// Records that the queue pair is made with the peer's incarnation `with`. Returns the status of the peer's end if it
    /// has ended meanwhile. `route` is where the peer's later frames go, those that have come since the ends met among them.
    ///
    /// From this call on, [`super::Events`] reports the peer's ends, so the caller must have
    /// recorded the queue pair before.
    pub(super) fn joined(self, with: Incarnation, route: Option<(Mailbox, TellEngine)>) -> Option<Status> {
        let mut state = self.mesh.shared.inbox.state();
        state.ends_set_up(self.peer, self.label);
        let (mut waiting, mut left) = (None, Vec::new());
        if let Some((mailbox, tell)) = route {
            let route = Route { own: self.own, with, mailbox, tell };
            let waits = state.extract(self.peer, self.label, |(bytes, fds)| {
                let of_it = connect::sender(bytes) == Some(with) && matches!(connect::ended(bytes), Ok(None));
                of_it && connect::are_memory(fds)
            });
            for (bytes, fds) in waits {
                match route.deliver(bytes, fds) {
                    Ok(tell) => waiting = waiting.or(tell),
                    Err(fds) => left.extend(fds),
                }
            }
            state.routes.insert((self.peer, self.label), route);
        }
        let queue = state.frames.get(&(self.peer, self.label)).into_iter().flatten();
        let of_it = queue.filter_map(|(bytes, _)| ended(self.peer, self.label, bytes).ok()?);
        let status = of_it.filter(|ended| ended.incarnation == with).map(|ended| ended.status).next();
        // Frames of a later incarnation of the peer are for our next call.
        let dropped = state.retain(self.peer, self.label, |(bytes, _)| {
            connect::sender(bytes).is_none_or(|from| from > with)
        });
        let left = state.discard(self.peer, left);
        drop(state);
        [dropped, left].into_iter().for_each(Dropped::close);
        waiting.into_iter().for_each(|tell| tell());
        status
    }
}

impl Drop for SetUp<'_> {
    fn drop(&mut self) {
        self.mesh.shared.inbox.state().ends_set_up(self.peer, self.label);
    }
}
