//! How an endpoint ends: the cause is kept, the peer is told, and the device sees the end when nothing that is under way
//! can touch memory any more.

use crate::mover::Mover;
use pushgate_core::refusal::Refusal;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::record::Record;
use pushgate_link::LinkDown;
use pushgate_link::ring::Look;

use super::{COPIES, Endpoint, FAILED, Stands};

impl Endpoint {
    /// The link broke: gives it up for another one, or ends the queue pair.
    #[cold]
    pub(super) fn broke(&mut self, down: LinkDown) {
        if !matches!(self.stands, Stands::Last(_)) && self.recovers(down) {
            return;
        }
        let rnr = LinkDown::Failed { cause: abi::PUSHGATE_DOWN_RNR, by_peer: true };
        let status = down.status(self.rank(), self.peer());
        let first = self.session.status().is_none();
        self.counters.rnr += (first && down == rnr) as u64;
        // Before the device sees the end, after which a program may leave, and say so to the peer.
        if first && let Some(tell) = self.broken.take() {
            tell(status);
        }
        self.fail(status);
    }

    /// Ends the queue pair: the device's waits end with `status`, messages that
    /// were not retired complete with it, the peer is told. The device sees the end when nothing
    /// that is under way can touch memory any more: later passes see to that.
    pub fn fail(&mut self, status: Status) {
        if self.stands == Stands::Over {
            return;
        }
        self.session.fail(status);
        self.stop();
        // The peer names the culprit itself if it is another rank; else us.
        let told = Status { rank: status.rank.or(Some(self.rank())), ..status };
        self.here.qp.set_status(told.word());
        self.tell_end(told);
        self.end();
        // If that fails too, the peer hears of it otherwise, or at its limit.
        let _ = self.here.qp.notify();
    }

    /// The peer has ended: its status says so, or its process is gone. Later passes take in what it had sent before that, and then end
    /// the queue pair.
    pub fn peer_ended(&mut self, status: Status) {
        if !matches!(self.stands, Stands::Over | Stands::Last(_)) {
            if self.stands == Stands::Down {
                self.hears_no_more();
            }
            self.stands = Stands::Last(status);
            self.recorded.worked = true;
        }
    }

    /// A pass after the end of the peer. True if anything was done.
    pub(super) fn poll_last(&mut self, status: Status, mover: &mut Option<Box<dyn Mover>>) -> bool {
        let since = *self.moves.since.get_or_insert(self.now);
        let lost = u32::from(status.code) == abi::PUSHGATE_PEER_LOST;
        let patient = self.now.saturating_sub(since) < if lost { COPIES } else { FAILED };
        match self.lands() {
            Some(false) if patient => return false,
            Some(false) => {
                self.fail(status);
                return true;
            }
            Some(true) | None => {}
        }
        let shown = self.inbound.shown();
        let work = match self.is_deaf() {
            false => self.receive(mover) | self.here.qp.hear(),
            true => self.receive_from::<false>(mover),
        };
        if work {
            // As after a pass of a live link: what was delivered may lie in a buffer for long.
            self.control.drain_stores();
            self.recorded.worked = true;
        }
        if self.stands != Stands::Last(status) {
            return true;
        }
        // Only what takes a receive of this side prolongs the wait: a peer that says that it has ended, and sends on, does not.
        if (lost && self.inbound.shown() != shown) || self.keeps_messages() {
            self.moves.since = None;
            return work;
        }
        if patient && (work || !self.moves.under_way.is_empty()) {
            return work;
        }
        if self.options.posted_receives && self.next_receive().is_some() {
            // It was posted since this pass looked, and may be the one that a message waits for. There are no more than the ring has.
            return true;
        }
        self.fail(status);
        true
    }

    /// Whether a queue pair whose peer has ended stays as it is: all that is there to be taken in is a SEND for which the device has yet
    /// to post a receive. It holds no memory of the device. Nothing else may wait there, for it would wait for ever (P7): no posted
    /// receive, no message to the peer, no copy.
    pub(super) fn keeps_messages(&self) -> bool {
        let staging = self.outbound.staging();
        self.inbound.lacks_receive()
            && self.moves.under_way.is_empty()
            && self.next_receive().is_none()
            && !self.recovering.as_ref().is_some_and(|r| r.lands)
            && staging.outstanding() == 0
            && !self.outbound.is_pending()
            && !self.published()
    }

    /// Begins nothing any more. Of the copies under way only those that a device makes go on.
    pub(super) fn stop(&mut self) {
        self.stands = Stands::Over;
        self.moves.under_way.retain_mut(|m| m.movement.cut());
        self.moves.since.get_or_insert(self.now);
    }

    /// Shows the end to the device once the transport has stopped and the copies under way have ended,
    /// or [`COPIES`] have passed. True if it was shown now.
    #[cold]
    pub(super) fn end(&mut self) -> bool {
        if self.shown {
            return false;
        }
        // P3, P5: a completion says that its source may be written again, and an end that posted buffers
        // and regions are the device's again.
        let since = self.moves.since.unwrap_or(self.now);
        let copies = !self.moves.under_way.is_empty() && self.now.saturating_sub(since) < COPIES;
        if !self.here.qp.stopped(self.now) || copies {
            return false;
        }
        self.shown = true;
        // A side that has left has no status of its own.
        self.show_end(self.session.status().unwrap_or(Status::new(abi::PUSHGATE_ABORTED)));
        true
    }

    /// Completes what was not retired, then writes the status.
    fn show_end(&mut self, status: Status) {
        let control = &mut self.control;
        let staging = self.outbound.staging_mut();
        staging.retire(u64::MAX, |c| control.complete(c.wr_id, c.opcode, status.code, c.length));
        // What was published and not yet released completes as well, so that a
        // device that polls its CQ gets an answer to each.
        let first = staging.head();
        for slot in first..first + (1 << staging.slots_log()) {
            let Look::Ready(words) = self.work.look(slot) else { break };
            if let Ok(r) = Record::decode(&words)
                && r.has(Record::SIGNALED)
            {
                control.complete(r.id, r.opcode as u8, status.code, r.length);
            }
        }
        control.status(status.word());
    }

    /// Whether a queue pair that was closed or has failed is gone: nothing of its transport can touch
    /// memory any more, and the device was told. Asked again and again until then.
    pub fn is_gone(&mut self) -> bool {
        self.end();
        self.shown
    }

    /// Moves the copies under way on, so that their memory can go. True if none is left; else the memory must stay, and
    /// the caller asks again.
    pub fn settle(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        self.advance(mover);
        if !self.moves.under_way.is_empty() {
            self.moves.since.get_or_insert(self.now);
            return false;
        }
        self.moves.since = None;
        self.acknowledge();
        true
    }

    /// This side leaves: its engine stops, or its program gives the queue pair back. The device's waits end with
    /// *aborted*, and the device sees the end as after [`Endpoint::fail`]. The peer is told of that status only if
    /// messages of this side are under way, or the link broke, for a peer that is done need not hear that this side left
    /// first. Closing again does nothing.
    pub fn close(&mut self) {
        if self.stands == Stands::Over {
            return;
        }
        // A peer whose link broke would wait for this side.
        let awaited = self.stands == Stands::Down;
        let staging = self.outbound.staging();
        // The peer needs this side no more for SENDs that went ahead, once it has them.
        let under_way = match self.here.qp.goes_ahead() {
            0 => staging.outstanding() > 0,
            _ => staging.messages() > self.session.received(),
        };
        if awaited || under_way || self.outbound.is_pending() || self.published() {
            // The completions first, then the status, then the peer.
            self.fail(Status::new(abi::PUSHGATE_ABORTED));
            return;
        }
        self.stop();
        self.here.qp.leave();
        let _ = self.here.qp.notify();
        self.end();
    }

    #[cold]
    pub(super) fn violated(&mut self, why: &dyn std::fmt::Display) {
        self.blame(self.options.peer, Refusal::Protocol, why);
    }

    /// Refuses what a side's device or engine wrote, and names that side.
    #[cold]
    pub(super) fn blame(&mut self, culprit: u32, refusal: Refusal, why: &dyn std::fmt::Display) {
        self.counters.refused += 1;
        let (rank, peer) = (self.rank(), self.peer());
        limited!(warn, peer, rank, peer, "refused a request of rank {culprit}: {why}");
        self.fail(refusal.status(culprit, None));
    }
}
