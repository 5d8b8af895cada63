//! How a link over RDMA ends: the last words go out, then the queue pair is brought to the error state, and drained.

use std::time::{Duration, Instant};

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_link::{Link, Telling};

use super::super::sge::Remote;
use super::super::{LAST_RECEIVE, LAST_SEND};
use super::VerbsLink;

/// How long a queue pair that ends waits until its last words are out, nanoseconds: three times a packet may be sent
/// again, within these bounds, for its device waits with it.
pub(super) const LINGER: std::ops::Range<u64> = 250_000_000..1_000_000_000;

/// How long a device may take to complete what is posted on a queue pair in the error state, nanoseconds. Then the queue
/// pair is destroyed, which the kernel does not return from before the device is done with it.
const DRAIN: u64 = 500_000_000;

/// How far a queue pair is on its way to its end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Open,
    /// The last words are on their way, since this time.
    Telling(u64),
    /// It is in the error state; whether the last send and the last receive have completed.
    Draining {
        since: u64,
        send: bool,
        receive: bool,
    },
    /// The device touches nothing for it any more.
    Stopped,
}

impl VerbsLink {
    /// Goes on towards the end of the link. True when the device touches nothing for it any more.
    pub(super) fn move_to_the_end(&mut self) -> bool {
        if self.ending == Ending::Open {
            self.ending = Ending::Telling(self.now);
        }
        if let Ending::Telling(since) = self.ending {
            if !self.nobody_to_tell() {
                if self.line.has_last_words() {
                    // The last line may have to wait for the completion of the line before it.
                    self.poll_cq();
                    self.control();
                }
                let _ = self.flush();
                if (self.line.has_last_words() || !self.is_quiet()) && self.now - since < self.own.linger {
                    return false;
                }
            }
            self.begin_to_drain();
        }
        if let Ending::Draining { .. } = self.ending {
            self.poll_cq();
        }
        match self.ending {
            Ending::Draining { send: true, receive: true, .. } => self.ending = Ending::Stopped,
            Ending::Draining { since, .. } if self.now - since >= DRAIN => {
                limited!(
                    warn,
                    self.terms.peer,
                    rank = self.own.rank,
                    peer = self.terms.peer,
                    "the RDMA device does not complete what was posted: the queue pair is destroyed"
                );
                self.destroy();
            }
            _ => {}
        }
        self.ending == Ending::Stopped
    }

    /// True once it was put into the error state by us.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.ending, Ending::Draining { .. } | Ending::Stopped)
    }

    /// One of the last work requests has completed, if that is its number.
    #[cold]
    pub(super) fn last_completed(&mut self, wr_id: u64) {
        if let Ending::Draining { send, receive, .. } = &mut self.ending {
            *send |= wr_id == LAST_SEND;
            *receive |= wr_id == LAST_RECEIVE;
        }
    }

    /// True once this end has written its last words. A peer that has read them may go at once, and over iWARP the connection
    /// ends with it, before the READ after these words is answered.
    pub(super) fn has_told_its_end(&self) -> bool {
        self.line.has_ended() && !self.line.has_last_words()
    }

    /// True if nobody is left whom the last words could reach, or who waits for them.
    pub(super) fn nobody_to_tell(&self) -> bool {
        let ours = Status::from_word(self.line.status());
        ours.is_some_and(|s| s.code as u32 == abi::PUSHGATE_PEER_LOST && s.rank == Some(self.terms.peer))
            || self.health.is_over()
            || self.inbox.peer_left()
            || self.peer_status() != 0
    }

    /// Puts the queue pair into the error state, after which nothing new is carried out.
    pub(super) fn begin_to_drain(&mut self) {
        self.chain.forget();
        self.flight.held.clear();
        self.ending = Ending::Draining { since: self.now, send: false, receive: false };
        // A device that flushes nothing would be waited for in vain.
        let Some(rc) = self.rc.as_ref().filter(|rc| rc.pd.device.kind.flushes) else { return self.destroy() };
        let inbox = Remote { address: self.peer_places.inbox, key: self.peer_places.inbox_key };
        if let Err(e) = rc.drain(LAST_SEND, LAST_RECEIVE, inbox) {
            limited!(
                info,
                self.terms.peer,
                rank = self.own.rank,
                peer = self.terms.peer,
                "{e}: the queue pair is destroyed instead"
            );
            self.destroy();
        }
    }

    /// The end of a queue pair whose device does not complete what is posted.
    pub(super) fn destroy(&mut self) {
        self.rc.iter_mut().for_each(super::Rc::destroy);
        self.ending = Ending::Stopped;
    }
}

impl Drop for VerbsLink {
    /// Stops it, if its engine has not: the last words go out, and the device is done with all that is
    /// posted before anything is deregistered.
    // An engine has stopped the link before, so a simulation does not come to the clock here.
    #[allow(clippy::disallowed_methods)]
    fn drop(&mut self) {
        // A child of `fork` has nothing to send.
        if !self.device.owner.is_here() {
            return;
        }
        let (before, start) = (self.now, Instant::now());
        let mut turn = 0;
        while !self.stopped(before + start.elapsed().as_nanos() as u64) {
            turn += 1;
            match turn {
                0..100 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }
}
