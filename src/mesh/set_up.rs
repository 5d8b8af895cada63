//! Set-up of a queue pair between two ranks: the frames under the queue pair's label on their
//! socket.
//!
//! Either rank may repeat a call that failed while the other rank still waits in its own call. So
//! each attempt has a number, and each frame names the attempt. Two ends first **agree** on a pair
//! of attempts: each end takes the latest offer of the other and says so; the pair is agreed on
//! when each end knows that the other has taken its present offer.
//!
//! An attempt that fails is ended: the peer drops what it has of that attempt, and if the peer had
//! joined with it, the peer's end of the queue pair ends too. A rank that takes the offer of a
//! later attempt sends its own offer once more, because the peer's earlier attempt may have
//! consumed it.
//!
//! A frame END also tells a peer of a queue pair that breaks later and can't say so over its own
//! link.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use pushgate_driver_shim::abi;
use pushgate_proxy::session::Status;

use super::{END, Ended, Frame, Mesh, Most, Shared, State};
use crate::error::{Error, Result};

/// Length of a frame's head: kind, the sender's attempt, the receiver's attempt where it is known.
const HEAD: usize = 17;
/// Kind of a frame that carries the sender's offer.
const OFFER: u8 = 1;
/// Kind of a frame that says: the sender has taken the offer of that attempt.
const TAKEN: u8 = 2;
/// Kind of a frame that carries what the transport says after the offers.
const MORE: u8 = 3;
/// Kind under which a received frame [`END`] waits among the others; never sent.
const ENDED: u8 = 4;
/// How many frames an attempt still reads after its time is up: frames that had arrived by then.
const LATE: u32 = 64;

fn head(kind: u8, own: u64, of: u64) -> [u8; HEAD] {
    let mut bytes = [kind; HEAD];
    bytes[1..9].copy_from_slice(&own.to_le_bytes());
    bytes[9..].copy_from_slice(&of.to_le_bytes());
    bytes
}

/// Splits a frame's head into its kind and the two attempts.
fn parse(bytes: &[u8]) -> Option<(u8, u64, u64)> {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    (bytes.len() >= HEAD).then(|| (bytes[0], word(1), word(9)))
}

/// Makes the frame that reports an end: label, our attempt, status.
pub(super) fn end(ended: &Ended) -> Vec<u8> {
    let mut bytes = END.to_le_bytes().to_vec();
    bytes.extend(ended.label.to_le_bytes());
    bytes.extend(ended.attempt.to_le_bytes());
    bytes.extend(ended.status.word().to_le_bytes());
    bytes
}

/// Reads the body of a frame under the label END.
pub(super) fn parse_end(rank: u32, bytes: &[u8]) -> Option<Ended> {
    if bytes.len() != 20 {
        return None;
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let label = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
    let status = Status::from_word(word(12))?.checked();
    let status = Status { rank: status.rank.or(Some(rank)), ..status };
    (label >= super::QUEUE_PAIRS).then_some(Ended { rank, label, attempt: word(4), status })
}

/// Drops the frames of an attempt that has ended, and of earlier attempts; an attempt of ours that
/// is under way is told. False if the rank would have more here than it may.
pub(super) fn ended(state: &mut State, ended: Ended, most: Most) -> bool {
    let Ended { rank, label, attempt, status } = ended;
    state.retain(rank, label, |(bytes, _)| parse(bytes).is_some_and(|(_, own, _)| own > attempt));
    if !state.set_ups.contains(&(rank, label)) {
        return true;
    }
    let mut bytes = head(ENDED, attempt, 0).to_vec();
    bytes.extend(status.word().to_le_bytes());
    state.keep(rank, label, (bytes, Vec::new()), most)
}

/// Tells the peer of a queue pair that this end has broken. Never waits.
pub(crate) struct TellEnd {
    shared: Weak<Shared>,
    ended: Ended,
}

impl TellEnd {
    /// Sends the report. A status that names no rank is reported as this rank's.
    pub(crate) fn tell(self, status: Status) {
        if let Some(shared) = self.shared.upgrade() {
            let ended = Ended { status, ..self.ended };
            shared.tell.lock().unwrap_or_else(|e| e.into_inner()).push(ended);
            shared.bell.ring();
        }
    }
}

/// One attempt to make a queue pair with a rank. If it is dropped before [`SetUp::joined`], the
/// attempt ends and the peer is told.
pub(crate) struct SetUp<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) peer: u32,
    label: u32,
    own: u64,
    /// Our offer: its bytes and descriptors.
    ours: (Vec<u8>, Vec<OwnedFd>),
    /// The peer's latest offer, with the number of its attempt.
    offer: Option<(u64, Frame)>,
    /// The latest attempt of the peer that we heard of; 0 before the first.
    heard: u64,
    /// How many frames have been read after the deadline.
    late: u32,
    /// The last attempt of the peer that has taken our offer.
    taken: u64,
    joined: bool,
}

impl Mesh {
    /// Begins to make a queue pair with `peer`. Only one attempt at a time under a label.
    pub(crate) fn set_up(&self, peer: u32, label: u32) -> SetUp<'_> {
        self.shared.inbox.state().set_ups.insert((peer, label));
        // Relaxed: only the number itself matters; it orders no other memory.
        let own = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        let ours = (Vec::new(), Vec::new());
        SetUp { mesh: self, peer, label, own, ours, offer: None, heard: 0, late: 0, taken: 0, joined: false }
    }
}

impl SetUp<'_> {
    /// Sends our offer.
    pub(crate) fn offer(&mut self, bytes: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let fds = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<_>>();
        self.ours = (bytes, fds.map_err(Error::io("a descriptor for another rank"))?);
        self.send_offer()
    }

    fn send_offer(&self) -> Result<()> {
        let fds: Vec<_> = self.ours.1.iter().map(|fd| fd.as_fd()).collect();
        self.send_frame(OFFER, 0, &self.ours.0, &fds)
    }

    /// Waits for an offer of the peer, and tells the peer that the offer is taken.
    pub(crate) fn take_offer(&mut self) -> Result<()> {
        let deadline = self.deadline();
        while self.offer.is_none() {
            self.hear(deadline)?;
        }
        Ok(())
    }

    /// Waits until the peer has taken our offer and we have the offer of that same attempt of the
    /// peer. Returns the peer's offer.
    pub(crate) fn agree(&mut self) -> Result<Frame> {
        let deadline = self.deadline();
        loop {
            match &mut self.offer {
                Some((attempt, frame)) if *attempt == self.taken => return Ok(std::mem::take(frame)),
                _ => self.hear(deadline)?,
            };
        }
    }

    /// Sends a message of the transport that follows the offer.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<()> {
        self.send_frame(MORE, self.taken, bytes, &[])
    }

    /// Receives what the peer's transport says after its offer.
    pub(crate) fn recv(&mut self) -> Result<Vec<u8>> {
        let deadline = self.deadline();
        loop {
            if let Some(bytes) = self.hear(deadline)? {
                return Ok(bytes);
            }
            // The peer ended the attempt that we had agreed on.
            if self.offer.is_none() {
                return Err(Error::Aborted { rank: self.peer });
            }
        }
    }

    /// Makes the value that tells the peer later if this end breaks and can't say so over its own
    /// link.
    pub(crate) fn teller(&self) -> TellEnd {
        let status = Status::new(abi::PUSHGATE_ABORTED);
        let ended = Ended { rank: self.peer, label: self.label, attempt: self.own, status };
        TellEnd { shared: Arc::downgrade(&self.mesh.shared), ended }
    }

    /// The label, and the peer's attempt with which this end is joined.
    pub(crate) fn peers(&self) -> (u32, u64) {
        (self.label, self.taken)
    }

    /// Ends the set-up: the queue pair is made. Returns how the peer's end has ended, if it has.
    ///
    /// From this call on, [`super::Events`] reports the peer's ends, so the caller must have
    /// recorded the queue pair before.
    pub(crate) fn joined(mut self) -> Option<Status> {
        self.joined = true;
        let mut state = self.mesh.shared.inbox.state();
        state.set_ups.remove(&(self.peer, self.label));
        let queue = state.frames.get(&(self.peer, self.label)).into_iter().flatten();
        let ended = |(bytes, _): &Frame| match parse(bytes)? {
            (ENDED, own, _) if own == self.taken => status_of(&bytes[HEAD..]),
            _ => None,
        };
        let status = queue.filter_map(ended).next();
        // Frames of a later attempt of the peer are for our next attempt.
        let of_this = |(bytes, _): &Frame| parse(bytes).is_some_and(|(_, own, _)| own <= self.taken);
        state.retain(self.peer, self.label, |frame| !of_this(frame));
        status
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.mesh.timeout
    }

    fn send_frame(&self, kind: u8, of: u64, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut frame = head(kind, self.own, of).to_vec();
        frame.extend_from_slice(bytes);
        self.mesh.send(self.peer, self.label, &frame, fds)
    }

    /// Handles the next frame. Returns a message of the peer's transport to this attempt; all other
    /// frames are dealt with here.
    fn hear(&mut self, deadline: Instant) -> Result<Option<Vec<u8>>> {
        // Bounds how long a peer that sends all the time can keep an attempt going after the
        // deadline.
        self.late += (Instant::now() > deadline) as u32;
        if self.late > LATE {
            let what = format!("agreeing on a queue pair with rank {}", self.peer);
            return Err(Error::TimedOut { what, after: self.mesh.timeout });
        }
        let (mut bytes, fds) = self.mesh.recv_until(self.peer, self.label, deadline)?;
        let Some((kind, own, of)) = parse(&bytes) else {
            return Err(Error::Mismatch { rank: self.peer, reason: "a set-up frame without a head".into() });
        };
        bytes.drain(..HEAD);
        match kind {
            OFFER => {
                self.offer = Some((own, (bytes, fds)));
                let before = self.heard;
                self.heard = before.max(own);
                if before > 0 && own > before {
                    // Send our offer before TAKEN, because the peer may join on TAKEN: then this
                    // copy has arrived before and the peer drops it.
                    self.send_offer()?;
                }
                self.send_frame(TAKEN, own, &[], &[])?;
            }
            ENDED => {
                self.heard = self.heard.max(own);
                self.offer.take_if(|(attempt, _)| *attempt <= own);
            }
            TAKEN if of == self.own => self.taken = own,
            MORE if of == self.own && own == self.taken => return Ok(Some(bytes)),
            // A frame of an attempt that has failed in the meantime.
            _ => {}
        }
        Ok(None)
    }
}

fn status_of(bytes: &[u8]) -> Option<Status> {
    Status::from_word(u64::from_le_bytes(bytes.try_into().ok()?))
}

impl Drop for SetUp<'_> {
    fn drop(&mut self) {
        if !self.joined {
            self.mesh.shared.inbox.state().set_ups.remove(&(self.peer, self.label));
            self.mesh.shared.tell_end(self.teller().ended);
        }
    }
}
