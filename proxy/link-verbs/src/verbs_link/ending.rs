//! How a link over RDMA ends: the last words go out, then the queue pair is brought to the error state, and drained. What the
//! device's firmware does for that happens beside the engine, which has other queue pairs.

use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_link::{Link, Telling};

use super::super::objects::Rc;
use super::super::sge::Remote;
use super::super::{LAST_RECEIVE, LAST_SEND};
use super::VerbsLink;
use super::renew::{Answer, beside};

/// How long a queue pair that ends waits until its last words are out, nanoseconds: three times a packet may be sent
/// again, within these bounds, for its device waits with it.
pub(super) const LINGER: std::ops::Range<u64> = 250_000_000..1_000_000_000;

/// How long a device may take to complete what is posted on a queue pair in the error state, nanoseconds. Then the queue
/// pair is destroyed, which the kernel does not return from before the device is done with it.
const DRAIN: u64 = 500_000_000;

/// How far a queue pair is on its way to its end.
pub(super) enum Ending {
    Open,
    /// The last words are on their way, since this time.
    Telling(u64),
    /// A thread brings it to the error state or destroys it, and has it until then.
    Away(Answer<Rc>),
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
        if matches!(self.ending, Ending::Open) {
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
        self.comes_back();
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
                self.hand_out(|mut rc| {
                    rc.destroy();
                    rc
                });
                self.comes_back();
            }
            _ => {}
        }
        matches!(self.ending, Ending::Stopped)
    }

    /// Hands the queue pair to a thread. The device touches nothing for it any more where there is no thread, for it is dropped then.
    fn hand_out(&mut self, task: impl FnOnce(Rc) -> Rc + Send + 'static) {
        let away = self.rc.take().map(|rc| beside(&self.device, "the end of an RDMA link", move || task(rc)));
        self.ending = away.and_then(Result::ok).map_or(Ending::Stopped, Ending::Away);
    }

    /// Takes the queue pair back from a thread that is done with it.
    fn comes_back(&mut self) {
        let Ending::Away(answer) = &self.ending else { return };
        let back = answer.try_recv();
        self.ending = match back {
            Err(TryRecvError::Empty) => return,
            Ok(rc) => {
                let destroyed = rc.is_destroyed();
                self.rc = Some(rc);
                match destroyed {
                    true => Ending::Stopped,
                    false => Ending::Draining { since: self.now, send: false, receive: false },
                }
            }
            // A thread that panicked has dropped it.
            Err(TryRecvError::Disconnected) => Ending::Stopped,
        };
    }

    /// True once it was, or is being, put into the error state by us.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.ending, Ending::Away(_) | Ending::Draining { .. } | Ending::Stopped)
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

    /// Begins to put the queue pair into the error state, after which nothing new is carried out.
    pub(super) fn begin_to_drain(&mut self) {
        self.chain.forget();
        self.flight.held.clear();
        let inbox = Remote { address: self.peer_places.inbox, key: self.peer_places.inbox_key };
        let (own, peer) = (self.own.rank, self.terms.peer);
        self.hand_out(move |mut rc| {
            // A device that flushes nothing would be waited for in vain.
            if !rc.pd.device.kind.flushes {
                rc.destroy();
            } else if let Err(e) = rc.drain(LAST_SEND, LAST_RECEIVE, inbox) {
                limited!(info, peer, rank = own, peer = peer, "{e}: the queue pair is destroyed instead");
                rc.destroy();
            }
            rc
        });
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
