//! The channel over which two ranks make a queue pair: the frames under the queue pair's label on their socket.
//!
//! `pushgate_proxy::connect` says what the frames mean. Only an END is read here, as it arrives: the frames of the
//! incarnation that has ended are dropped, and a queue pair that is joined with that incarnation ends. So an end that breaks
//! later, and can't tell its peer over its own link, still ends the peer's end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use pushgate_proxy::connect::{self, Incarnation};
use pushgate_proxy::session::Status;

use super::{Ended, Mesh, Most, Shared, State};
use crate::error::Result;

/// What an END under a queue pair's label reports; `None` for another frame. Fails if the END is malformed.
pub(super) fn ended(rank: u32, label: u32, bytes: &[u8]) -> std::result::Result<Option<Ended>, String> {
    let found = connect::ended(bytes).map_err(|e| format!("it reported an end: {e}"))?;
    Ok(found.map(|(incarnation, status)| {
        let status = Status { rank: status.rank.or(Some(rank)), ..status };
        Ended { rank, label, incarnation, status }
    }))
}

/// Drops the frames of an incarnation that has ended, and of earlier ones. A call of ours that is under way gets the END,
/// and keeps those of earlier incarnations: it may be joined with one of them. False if the rank would have more here than
/// it may.
pub(super) fn forget(state: &mut State, ended: Ended, end: Vec<u8>, most: Most) -> bool {
    let Ended { rank, label, incarnation, .. } = ended;
    let under_way = state.set_ups.contains(&(rank, label));
    state.retain(rank, label, |(bytes, _)| match connect::sender(bytes) {
        Some(from) if from < incarnation => under_way && matches!(connect::ended(bytes), Ok(Some(_))),
        from => from != Some(incarnation),
    });
    !under_way || state.keep(rank, label, (end, Vec::new()), most)
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
            let end = connect::end(self.own, self.peer, status);
            shared.tell.lock().unwrap_or_else(|e| e.into_inner()).push((self.rank, self.label, end));
            shared.bell.ring();
        }
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
        self.mesh.shared.tell_end(self.peer, self.label, end);
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

    /// Records that the queue pair is made with the peer's incarnation `with`. Returns the status of the peer's end if it
    /// has ended meanwhile.
    ///
    /// From this call on, [`super::Events`] reports the peer's ends, so the caller must have
    /// recorded the queue pair before.
    pub(super) fn joined(self, with: Incarnation) -> Option<Status> {
        let mut state = self.mesh.shared.inbox.state();
        state.set_ups.remove(&(self.peer, self.label));
        let queue = state.frames.get(&(self.peer, self.label)).into_iter().flatten();
        let of_it = queue.filter_map(|(bytes, _)| ended(self.peer, self.label, bytes).ok()?);
        let status = of_it.filter(|ended| ended.incarnation == with).map(|ended| ended.status).next();
        // Frames of a later incarnation of the peer are for our next call.
        state.retain(self.peer, self.label, |(bytes, _)| {
            connect::sender(bytes).is_none_or(|from| from > with)
        });
        status
    }
}

impl Drop for SetUp<'_> {
    fn drop(&mut self) {
        self.mesh.shared.inbox.state().set_ups.remove(&(self.peer, self.label));
    }
}
