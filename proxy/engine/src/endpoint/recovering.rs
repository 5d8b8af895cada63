//! How an endpoint goes on over another link when its link broke.
//!
//! [`Connect`] says what comes next; this does it, one step a pass, and never waits:
//!
//! 1. The link breaks here, or the peer says that it broke. This end posts and takes in nothing any more. Copies of messages
//!    that it has accepted go on.
//! 2. The link is stopped, and what has landed whole is taken in. This end tells the peer how many messages it has accepted
//!    (RESUME), with its offer of the next link.
//! 3. With the peer's RESUME this end gets ready to receive (READY). With the peer's READY it puts the head of the staging
//!    ring back to the first message that the peer has not accepted, and goes on. The ordinary path reads, checks and posts
//!    those messages again.
//!
//! Frames come by a [`Mailbox`] and leave by [`SendFrame`]. A frame may be lost, late or repeated.

use crate::mover::Mover;
use pushgate_core::recovery::Patience;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_link::frame::Fds;
use pushgate_link::mailbox::{Mailbox, SendFrame};
use pushgate_link::{LinkDown, PeerCounts, RenewError};

use super::replacement::Recovering;
use super::{Endpoint, Stands};
use crate::connect::{Connect, Event};

/// How long after an offer could not be made it is tried again, nanoseconds.
const AGAIN: u64 = 10_000_000;
/// Between two looks whether what is made beside the engine is there, nanoseconds.
const LOOK: u64 = 500_000;

impl Endpoint {
    /// Has the link replaced when it breaks. `connect` has just become live with the peer's end, which replaces its link
    /// too; from now on frames of the peer come by `mailbox`, and frames for the peer leave by `send`. Without effect over a
    /// link that can't be made anew: then the end of the link is the queue pair's.
    pub fn with_recovery(
        mut self,
        mut connect: Connect<Fds>,
        patience: Patience,
        mailbox: Mailbox,
        send: SendFrame,
    ) -> Self {
        let lost = LinkDown::Failed { cause: abi::PUSHGATE_DOWN_RETRY, by_peer: true };
        connect.recovers(patience, lost.status(self.rank(), self.peer()));
        if self.here.qp.renews().is_some() {
            let recovering = Recovering {
                connect,
                mailbox,
                send: Some(send),
                fencing: false,
                preparing: None,
                looks_at: 0,
                lands: false,
                deaf: false,
                resumed: 0,
                warned: false,
                rebuilds: false,
            };
            self.recovering = Some(Box::new(recovering));
        }
        self
    }

    /// Takes the frames of the peer out of the mailbox that are there now. A frame that is out of date changes nothing.
    #[cold]
    pub fn control(&mut self) {
        let now = self.now;
        for frame in self.recovering.as_ref().map(|r| r.mailbox.take_all()).unwrap_or_default() {
            self.tell_progress();
            let ends = matches!(self.stands, Stands::Over | Stands::Last(_));
            let Some(r) = self.recovering.as_mut().filter(|_| !ends) else { return };
            let was_live = self.stands == Stands::Live;
            match r.connect.take(frame, now) {
                Ok(()) => self.perform(),
                Err(e) => self.violated(&e),
            }
            if was_live && self.stands == Stands::Down {
                let (rank, peer) = (self.geometry.rank, self.options.peer);
                limited!(info, peer, rank, peer, "the link broke at the peer's end; another one follows");
            }
        }
    }

    /// Breaks the link of this end, or one of its rails. True if another one is to take its place. For tests and fault injection.
    #[cold]
    pub fn break_link(&mut self) -> bool {
        if self.stands == Stands::Live && self.here.qp.several().is_some_and(|links| links.break_one()) {
            return true;
        }
        if self.stands == Stands::Live {
            self.broke(LinkDown::Failed { cause: abi::PUSHGATE_DOWN_PORT, by_peer: false });
        }
        self.stands == Stands::Down
    }

    /// The next time at which a pass has something to do though nothing has arrived: nanoseconds, as in
    /// [`Endpoint::set_time`].
    pub fn wakes_at(&self) -> Option<u64> {
        let r = self.recovering.as_ref().filter(|_| self.stands == Stands::Down)?;
        let looks = (r.waits() && r.looks_at > self.now).then_some(r.looks_at);
        r.connect.wakes_at().into_iter().chain(looks).min()
    }

    /// The link broke. True if another one is to take its place.
    pub(super) fn recovers(&mut self, down: LinkDown) -> bool {
        self.tell_progress();
        let (now, status) = (self.now, down.status(self.rank(), self.peer()));
        let Some(r) = self.recovering.as_mut().filter(|_| down.is_recoverable()) else { return false };
        limited!(
            info,
            self.options.peer,
            rank = self.geometry.rank,
            peer = self.options.peer,
            "{down}; another one follows"
        );
        r.connect.link_down(status, now);
        self.perform();
        true
    }

    /// Whether a look is due at what is being fenced, made or prepared.
    pub(super) fn is_fencing(&self) -> bool {
        self.recovering.as_ref().is_some_and(|r| r.waits() && self.now >= r.looks_at)
    }

    /// A pass while the link is replaced. True if anything was done.
    pub(super) fn poll_down(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        // The END that says so may be lost.
        if let Some(status) = self.peers_end() {
            self.peer_ended(status);
            return true;
        }
        let mut work = self.advance(mover);
        if self.is_fencing() && self.stands == Stands::Down {
            work |= self.fence(mover) | self.prepares();
        }
        let now = self.now;
        let due = self.wakes_at().is_some_and(|at| at <= now);
        if let Some(r) = self.recovering.as_mut().filter(|_| due) {
            r.connect.tick(now);
            self.perform();
            work = true;
        }
        let fenced = self.recovering.as_ref().is_some_and(|r| !r.fencing);
        if pushgate_core::planted!(P6Early) && self.stands == Stands::Down && fenced {
            self.transmit();
        }
        if pushgate_core::planted!(P6Late) && self.stands == Stands::Down && fenced {
            self.receive(mover);
        }
        if work {
            // As after a pass of a live link: what was delivered may lie in a buffer for long.
            self.control.drain_stores();
        }
        work
    }

    /// The peer has ended while the link was replaced.
    pub(super) fn hears_no_more(&mut self) {
        if let Some(r) = &mut self.recovering {
            r.deaf = !r.lands;
        }
    }

    /// After the end of the peer: whether nothing more may be taken from a link.
    pub(super) fn is_deaf(&self) -> bool {
        self.recovering.as_ref().is_some_and(|r| r.deaf)
    }

    /// After the end of the peer: whether what a link that broke has brought lies still, so that it may be taken in. `None`: the link did
    /// not break, or that was taken in.
    pub(super) fn lands(&mut self) -> Option<bool> {
        let now = self.now;
        let r = self.recovering.as_mut().filter(|r| r.lands)?;
        let still = self.here.qp.renews().is_none_or(|link| link.fence(now));
        r.lands = !still;
        Some(still)
    }

    /// Stops the link that broke. When nothing of it can touch memory any more, takes in what has landed, and makes the
    /// offer of the next link.
    fn fence(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        let now = self.now;
        let (Some(r), Some(link)) = (&self.recovering, self.here.qp.renews()) else { return false };
        if !r.fencing || !link.fence(now) {
            return false;
        }
        if self.recovering.as_mut().is_some_and(|r| std::mem::take(&mut r.lands)) {
            self.receive(mover);
            if self.stands != Stands::Down {
                return true;
            }
        }
        let accepted = self.inbound.accepted();
        let (Some(r), Some(link)) = (&mut self.recovering, self.here.qp.renews()) else { return false };
        match link.offer() {
            Ok(None) => {
                r.looks_at = now.saturating_add(LOOK);
                false
            }
            Ok(Some(offer)) => {
                r.fencing = false;
                r.connect.fenced(accepted, offer, now);
                self.perform();
                true
            }
            Err(e) => {
                // Until the session's limit. What is missing, such as a descriptor, comes back at no particular time.
                r.looks_at = now.saturating_add(AGAIN);
                if !std::mem::replace(&mut r.warned, true) {
                    limited!(
                        warn,
                        self.options.peer,
                        rank = self.geometry.rank,
                        peer = self.options.peer,
                        "{e}"
                    );
                }
                false
            }
        }
    }

    /// Does what the set-up machine says.
    pub(super) fn perform(&mut self) {
        self.recorded.worked = true;
        if let (Some(journal), Some(r)) = (&self.journal, &self.recovering) {
            journal.epoch(r.epoch());
        }
        while let Some(r) = &mut self.recovering
            && let Some(event) = r.connect.poll()
        {
            match event {
                Event::Send(frame) => {
                    if let Some(send) = &mut r.send {
                        send(frame);
                    }
                }
                Event::Fence => {
                    (r.fencing, r.preparing, r.looks_at) = (true, None, 0);
                    if self.stands == Stands::Live {
                        (self.stands, r.lands) = (Stands::Down, true);
                    }
                    self.record_break();
                }
                Event::Prepare { epoch, offer } => {
                    let Some(link) = self.here.qp.renews() else { return };
                    match link.prepare(offer) {
                        Ok(()) => {
                            (r.preparing, r.looks_at) = (Some(epoch), 0);
                            self.look_whether_prepared();
                        }
                        Err(e) => self.gives_up_attempt(&e),
                    }
                }
                Event::Go { places, accepted, .. } => self.goes_on(&places, accepted),
                Event::End(status) if r.connect.peer_has_ended() => self.peer_ended(status),
                Event::End(status) => self.fail(status),
            }
        }
    }

    /// Looks whether this end is ready to receive. True if it is now, or can't be.
    fn prepares(&mut self) -> bool {
        let any = self.stands == Stands::Down && self.look_whether_prepared();
        if any {
            self.perform();
        }
        any
    }

    /// Looks whether this end is ready to receive. True if the set-up machine was told: then the caller performs what it says.
    fn look_whether_prepared(&mut self) -> bool {
        let now = self.now;
        let (Some(r), Some(link)) = (&mut self.recovering, self.here.qp.renews()) else { return false };
        let Some(epoch) = r.preparing else { return false };
        match link.prepared() {
            Ok(None) => {
                r.looks_at = now.saturating_add(LOOK);
                return false;
            }
            Ok(Some(places)) => {
                r.preparing = None;
                r.connect.prepared(epoch, places, now);
            }
            Err(e) => self.gives_up_attempt(&e),
        }
        true
    }

    /// This end's part of the next link could not be made.
    fn gives_up_attempt(&mut self, e: &RenewError) {
        if let RenewError::Peer(why) = e {
            return self.violated(why);
        }
        let status = LinkDown::Failed { cause: abi::PUSHGATE_DOWN_DEVICE, by_peer: false };
        let (now, status) = (self.now, status.status(self.rank(), self.peer()));
        let Some(r) = &mut self.recovering else { return };
        if !std::mem::replace(&mut r.warned, true) {
            limited!(warn, self.options.peer, rank = self.geometry.rank, peer = self.options.peer, "{e}");
        }
        r.connect.link_down(status, now);
    }

    /// Both ends are ready: goes on after the first `accepted` messages, which the peer has accepted.
    fn goes_on(&mut self, places: &[u8], accepted: u64) {
        if self.recovering.as_mut().is_some_and(|r| std::mem::take(&mut r.rebuilds))
            && !self.rebuild(accepted)
        {
            return;
        }
        let (received, sent) = (self.session.received(), self.outbound.staging().messages());
        // P8: before anything is done by the number.
        if !(received..=sent).contains(&accepted) {
            let why = format!("it says that it has accepted {accepted} messages of {received} to {sent}");
            return self.violated(&why);
        }
        let Some(link) = self.here.qp.renews() else { return };
        if let Err(e) = link.go(places, accepted) {
            return self.gives_up_attempt(&e);
        }
        self.outbound.rewind(accepted, self.here.qp.budget());
        if let Some(r) = &mut self.recovering {
            (r.resumed, r.warned) = (accepted, false);
        }
        self.stands = Stands::Live;
        self.counters.recovered += 1;
        self.record_recovery();
        limited!(
            info,
            self.options.peer,
            rank = self.geometry.rank,
            peer = self.options.peer,
            again = sent - accepted,
            "another link carries the queue pair"
        );
        // The next link knows no counts yet.
        self.acknowledged = PeerCounts::default();
        self.acknowledge();
    }

    /// Tells the peer beside the link that this end has ended with `status`, and nothing more.
    pub(super) fn tell_end(&mut self, status: Status) {
        let Some(r) = &mut self.recovering else { return };
        let Some(mut send) = r.send.take() else { return };
        r.connect.abort(status);
        while let Some(event) = r.connect.poll() {
            if let Event::Send(frame) = event {
                send(frame);
            }
        }
    }

    /// The engine has taken this endpoint out, and passes come no more: an end without a link ends now, and frames of the
    /// peer are left to who owns the channel, for whom the drop of the way to send says so. A peer whose link breaks from
    /// now on hears that this end is gone.
    pub fn leave(&mut self) {
        if matches!(self.stands, Stands::Down | Stands::Last(_)) {
            self.close();
        }
        if let Some(r) = &mut self.recovering {
            r.send = None;
        }
    }

    /// Tells how far the session has come.
    fn tell_progress(&mut self) {
        let received = self.session.received();
        let (count, waits) =
            (received + self.inbound.accepted(), self.outbound.staging().messages() > received);
        if let Some(r) = &mut self.recovering {
            r.connect.progress(count, waits);
        }
    }
}
