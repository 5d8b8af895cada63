//! A rail that breaks, and comes back over its next link.

use pushgate_core::recovery::{Control, Order};
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_link::frame::Frame;
use pushgate_link::{LinkDown, RenewError};

use super::{AHEAD, Next, Rails};

/// A gap between two looks at the time that is longer than this, nanoseconds, is that of a process that was stopped. It does
/// not count for [`Options::recover`](super::Options::recover).
const STOPPED: u64 = 1_000_000_000;

impl Rails {
    /// A rail's link broke.
    #[cold]
    pub(super) fn breaks(&mut self, rail: usize, down: LinkDown) {
        if !down.is_recoverable() {
            // The peer left as a whole, or a message can't be posted over any rail.
            self.down.get_or_insert(down);
            self.sending.leave(rail);
            return;
        }
        limited!(info, rail as u64, rail, "a rail broke: {down}");
        let [own, peer] = self.options.ranks;
        let gives_up = down.status(own, peer);
        self.tell_progress(rail);
        self.rails[rail].recovery.link_down(self.now, gives_up, &mut self.orders);
        self.perform(rail);
    }

    /// Tells a rail's recovery how many stripes have come over the rail, both ways.
    fn tell_progress(&mut self, rail: usize) {
        let taken = self.arriving.taken(rail);
        let one = &mut self.rails[rail];
        one.recovery.progress(taken + one.before[0] + one.link.stripes_taken(), self.sending.owes(rail) > 0);
    }

    /// Does what a rail's recovery has ordered.
    pub(super) fn perform(&mut self, rail: usize) {
        // An order may bring others about.
        while !self.orders.is_empty() {
            let order = self.orders.remove(0);
            match order {
                Order::Send(Control::Ready { epoch }) => {
                    // Said when this end is ready; again, if the peer asks.
                    let one = &self.rails[rail];
                    if matches!(one.next, Next::Prepared(e) if e == epoch) {
                        self.beside.send(rail, Control::Ready { epoch }, &one.places);
                    }
                }
                Order::Send(control @ Control::Resume { epoch, .. }) => {
                    let one = &mut self.rails[rail];
                    if !one.offer.is_empty() {
                        one.offered = Some(epoch);
                    }
                    self.beside.send(rail, control, &one.offer);
                }
                Order::Send(control) => self.beside.send(rail, control, &[]),
                Order::Fence => {
                    self.sending.leave(rail);
                    let one = &mut self.rails[rail];
                    (one.fencing, one.next, one.ready) = (Some(self.now), Next::Nothing, None);
                    (one.offered, one.offer) = (None, Vec::new());
                    one.undecided |= one.away_since.is_none();
                    one.away_since.get_or_insert(self.now);
                    self.fence(rail);
                }
                Order::Prepare(epoch) => {
                    self.owed(rail);
                    self.prepare(rail, epoch);
                }
                Order::Go { epoch, accepted } => self.join(rail, epoch, accepted),
                Order::End(_) => self.give_up(rail),
            }
        }
    }

    /// Stops a rail's link, takes in what has arrived, and lets the link go. Once nothing of it can touch memory of this end any
    /// more, the peer may be told.
    fn fence(&mut self, rail: usize) {
        let one = &mut self.rails[rail];
        let Some(since) = one.fencing else { return };
        if !one.link.fence(self.now) && !pushgate_core::planted!(P6Fence) {
            return;
        }
        if std::mem::take(&mut one.receives) {
            self.take_in(rail);
            self.heard = self.heard.greatest(self.rails[rail].link.peer_counts());
        }
        let one = &mut self.rails[rail];
        if one.over {
            one.fencing = None;
            return;
        }
        match one.link.offer() {
            Ok(Some(offer)) => one.offer = offer.bytes,
            Ok(None) if !one.link.is_cleared() && !pushgate_core::planted!(P6Cleared) => return,
            // Nobody waits for a count of this end: then the offer is worth a while.
            Ok(None) if !one.undecided && self.now - since < self.options.patience.attempt => return,
            Ok(None) => {}
            Err(e) => tracing::debug!(rail, "the rail's next link: {e}"),
        }
        one.fencing = None;
        let taken = self.arriving.taken(rail);
        one.recovery.fenced(taken, self.now, &mut self.orders);
        self.perform(rail);
    }

    /// Both ends have fenced a rail: what it owes goes over the others.
    fn owed(&mut self, rail: usize) {
        let taken = self.rails[rail].recovery.peer_accepted().expect("its RESUME is there");
        self.rails[rail].undecided = false;
        match self.sending.owed(rail, taken) {
            // Later attempts to join the rail again owe nothing new.
            Ok(0) => {}
            Ok(stripes) => {
                limited!(info, rail as u64, rail, stripes, "what the rail owes goes over the others")
            }
            Err(e) => {
                limited!(warn, rail as u64, rail, "{e}");
                self.torn = true;
            }
        }
    }

    /// Both ends have fenced a rail: gets this end of its next link ready, if both have offered one.
    fn prepare(&mut self, rail: usize, epoch: u32) {
        let one = &mut self.rails[rail];
        let (of, bytes) = std::mem::take(&mut one.theirs);
        if of != epoch || bytes.is_empty() || one.offered != Some(epoch) {
            return self.fails(rail, None);
        }
        match one.link.prepare(Frame { bytes, along: Default::default() }) {
            Ok(()) => {
                one.next = Next::Preparing(epoch);
                self.go_on(rail);
            }
            Err(e) => self.fails(rail, Some(e)),
        }
    }

    /// Looks whether this end of a rail's next link is ready to receive.
    fn go_on(&mut self, rail: usize) {
        let one = &mut self.rails[rail];
        let Next::Preparing(epoch) = one.next else { return };
        match one.link.prepared() {
            Ok(None) => {}
            Ok(Some(places)) => {
                (one.next, one.places) = (Next::Prepared(epoch), places);
                self.beside.send(rail, Control::Ready { epoch }, &one.places);
                if one.ready.take() == Some(epoch) {
                    self.hear(rail, Control::Ready { epoch });
                }
            }
            Err(e) => self.fails(rail, Some(e)),
        }
    }

    /// The next link of a rail could not be made: another attempt follows.
    fn fails(&mut self, rail: usize, why: Option<RenewError>) {
        if let Some(e) = why {
            tracing::debug!(rail, "the rail's next link: {e}");
        }
        let one = &mut self.rails[rail];
        one.next = Next::Nothing;
        one.recovery.link_down(self.now, Status::new(abi::PUSHGATE_LINK_DOWN), &mut self.orders);
        self.perform(rail);
    }

    /// The peer is ready, too: the rail's next link carries. The peer has taken in `accepted` stripes over those before it.
    fn join(&mut self, rail: usize, epoch: u32, accepted: u64) {
        let one = &mut self.rails[rail];
        let (of, places) = std::mem::take(&mut one.their_places);
        let joined = match one.next {
            // Over each of its links a rail counts from 0.
            Next::Prepared(e) if e == epoch && of == epoch => one.link.go(&places, 0).map_err(Some),
            _ => Err(None),
        };
        if let Err(e) = joined {
            return self.fails(rail, e);
        }
        one.next = Next::Nothing;
        one.before = [accepted, self.arriving.taken(rail)];
        one.told = one.before[1];
        (one.receives, one.away_since) = (true, None);
        // The peer takes in what is written over the link from now on.
        one.link.acknowledge(self.counts);
        if self.status != 0 {
            one.link.set_status(self.status);
        }
        self.sending.join(rail, one.link.budget());
        self.rejoined += 1;
        self.came_back = Some(self.now);
        limited!(info, rail as u64, rail, "the rail carries again");
    }

    /// The peer has given a rail up for good.
    #[cold]
    fn give_up(&mut self, rail: usize) {
        let one = &mut self.rails[rail];
        (one.over, one.fencing, one.next) = (true, Some(self.now), Next::Nothing);
        one.away_since.get_or_insert(self.now);
        self.sending.leave(rail);
        let [own, _] = self.options.ranks;
        limited!(warn, rail as u64, rank = own, rail, "a rail is given up");
        // What it owes is known only if the peer has fenced it.
        if self.sending.owes(rail) > 0 || self.rails.iter().all(|one| one.over) {
            self.is_lost();
        }
    }

    /// The session's link is down.
    fn is_lost(&mut self) {
        let cause = abi::PUSHGATE_DOWN_PORT;
        self.down.get_or_insert(LinkDown::Failed { cause, by_peer: false });
    }

    /// A control message of the peer about a rail.
    fn hear(&mut self, rail: usize, control: Control) {
        self.tell_progress(rail);
        let taken = self.arriving.taken(rail);
        self.rails[rail].recovery.take(control, taken, self.now, &mut self.orders);
        self.perform(rail);
    }

    /// Control messages, fences that are under way, and links that are made.
    pub(super) fn move_on(&mut self) {
        while let Some((rail, control, body)) = self.beside.receive() {
            let Some(one) = self.rails.get_mut(rail) else { continue };
            let epoch = match control {
                Control::Break { epoch } | Control::Resume { epoch, .. } | Control::Ready { epoch } => epoch,
                Control::End(_) => 0,
            };
            if epoch > one.recovery.epoch().saturating_add(AHEAD) {
                continue;
            }
            match control {
                Control::Resume { epoch, .. } => one.theirs = (epoch, body),
                Control::Ready { epoch } => one.their_places = (epoch, body),
                Control::Break { .. } | Control::End(_) => {}
            }
            match control {
                Control::Ready { epoch } if matches!(one.next, Next::Preparing(e) if e == epoch) => {
                    one.ready = Some(epoch);
                }
                control => self.hear(rail, control),
            }
        }
        for rail in 0..self.rails.len() {
            self.fence(rail);
            self.go_on(rail);
        }
    }

    /// Looks at the time, for rails that are away.
    pub(super) fn look_at_the_time(&mut self, now: u64) {
        let gap = now.saturating_sub(self.now);
        self.now = now;
        let mut carries = false;
        let mut longest = 0;
        for one in &mut self.rails {
            let Some(since) = &mut one.away_since else {
                carries = true;
                continue;
            };
            if gap > STOPPED {
                *since = since.saturating_add(gap);
            }
            if one.undecided || self.options.recover == 0 {
                longest = longest.max(now.saturating_sub(*since) + 1);
            }
        }
        if !carries {
            let last = self.rails.iter().filter_map(|one| one.away_since).max().unwrap_or(now);
            longest = longest.max(now.saturating_sub(last) + 1);
        }
        if longest > self.options.recover {
            self.is_lost();
        }
    }
}
