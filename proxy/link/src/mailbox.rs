//! Frames between two ends about their link: where those of the peer wait, and the way of those that leave.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::frame::Frame;

/// Sends a frame to the peer, over a channel that outlives the links. What can't be sent at once is dropped. Called on the
/// engine's thread, so it must not wait. The endpoint drops it when the endpoint has ended or leaves: then the owner of the
/// channel answers frames of the peer.
pub type SendFrame = Box<dyn FnMut(Frame) + Send>;

/// Most frames that a [`Mailbox`] holds. An attempt has three frames of the peer.
const MOST_FRAMES: usize = 16;
/// Most bytes of them together. The longest frame is an RDMA peer's that lists its regions, 4,096 at most, in some 90 bytes
/// each; others have a few hundred bytes.
const MOST_BYTES: usize = 1 << 19;
/// Most descriptors of them together. An attempt has one.
const MOST_FDS: usize = 4;

/// Frames of the peer about the link that wait for an endpoint. Copies are the same mailbox; any thread may use them.
#[derive(Clone, Default)]
pub struct Mailbox(Arc<Shared>);

/// The frames, and a word that says whether there are any.
#[derive(Default)]
struct Shared {
    held: Mutex<Held>,
    waits: AtomicBool,
}

/// What waits in a mailbox.
#[derive(Default)]
struct Held {
    frames: VecDeque<Frame>,
    bytes: usize,
    fds: usize,
    /// Descriptors that wait, in this mailbox and in others of the same owner.
    open: Arc<AtomicUsize>,
}

impl Held {
    fn fits(&self, frame: &Frame) -> bool {
        self.frames.len() < MOST_FRAMES
            && self.bytes + frame.bytes.len() <= MOST_BYTES
            && self.fds + frame.along.len() <= MOST_FDS
    }

    fn take_all(&mut self) -> VecDeque<Frame> {
        // Relaxed: the count orders no other memory.
        self.open.fetch_sub(std::mem::take(&mut self.fds), Ordering::Relaxed);
        self.bytes = 0;
        std::mem::take(&mut self.frames)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.take_all();
    }
}

impl Mailbox {
    /// A mailbox whose owner keeps a count of the descriptors that wait in all of its mailboxes.
    pub fn counted(open: Arc<AtomicUsize>) -> Self {
        let mailbox = Mailbox::default();
        mailbox.held().open = open;
        mailbox
    }

    /// Puts a frame after the others. True if the endpoint must be told, by `Endpoint::control` of `pushgate-engine`: the mailbox was empty.
    /// Where 16 frames, 512 KiB or 4 descriptors would be exceeded the frame is lost, as on any channel that breaks: a peer
    /// can't fill this process's memory.
    pub fn put(&self, frame: Frame) -> bool {
        self.try_put(frame).unwrap_or(false)
    }

    /// Puts a frame as [`Mailbox::put`] does, or returns a frame for which there is no room, whose descriptors the caller closes.
    pub fn try_put(&self, frame: Frame) -> Result<bool, Frame> {
        let mut held = self.held();
        if !held.fits(&frame) {
            return Err(frame);
        }
        held.bytes += frame.bytes.len();
        held.fds += frame.along.len();
        held.open.fetch_add(frame.along.len(), Ordering::Relaxed);
        held.frames.push_back(frame);
        // Within the lock, so that no `take_all` comes between the frame and the word.
        self.0.waits.store(true, Ordering::Relaxed);
        Ok(held.frames.len() == 1)
    }

    /// Takes all frames that wait.
    pub fn take_all(&self) -> VecDeque<Frame> {
        let mut held = self.held();
        self.0.waits.store(false, Ordering::Relaxed);
        held.take_all()
    }

    /// Whether no frame waits, as far as this thread has heard. Takes no lock, for a caller that asks again and again.
    pub fn is_empty(&self) -> bool {
        // Relaxed: a frame that is missed now is found the next time, and the lock orders its bytes.
        !self.0.waits.load(Ordering::Relaxed)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // A panic leaves the list whole, so a poisoned lock is no reason to stop.
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
