//! A rail that breaks, and comes back over its next link.

use pushgate_core::recovery::{Control, Order};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;

use super::{AHEAD, KnownRegion, Made, Next, Rails};
use crate::link::{LinkDown, Rail};
use crate::session::Status;

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
                    if matches!(self.rails[rail].next, Next::Prepared(e) if e == epoch) {
                        self.beside.send(rail, Control::Ready { epoch });
                    }
                }
                Order::Send(control) => self.beside.send(rail, control),
                Order::Fence => {
                    self.sending.leave(rail);
                    let one = &mut self.rails[rail];
                    (one.fencing, one.next, one.ready) = (true, Next::Nothing, None);
                    one.undecided |= one.away_since.is_none();
                    one.away_since.get_or_insert(self.now);
                    self.fence(rail);
                }
                Order::Prepare(epoch) => {
                    self.owed(rail);
                    self.rails[rail].next = Next::Preparing(epoch);
                    self.go_on(rail);
                }
                Order::Go { accepted, .. } => {
                    let regions: Vec<KnownRegion> =
                        self.regions.iter().map(|(key, own)| (*key, own.memory.clone(), own.bytes)).collect();
                    let one = &mut self.rails[rail];
                    one.before = [accepted, self.arriving.taken(rail)];
                    one.told = one.before[1];
                    one.next = Next::Joining(regions.iter().map(|region| region.0).collect());
                    self.beside.join(rail, regions);
                    self.go_on(rail);
                }
                Order::End(_) => self.give_up(rail),
            }
        }
    }

    /// Stops a rail's link. Once nothing of the link can touch memory of this end any more, takes in what has arrived.
    fn fence(&mut self, rail: usize) {
        let one = &mut self.rails[rail];
        if !one.fencing {
            return;
        }
        // Both are asked: each goes on towards its end.
        let stopped = one.link.stopped(self.now) & self.beside.fence(rail);
        if !stopped && !planted!(P6Fence) {
            return;
        }
        if self.rails[rail].receives {
            self.take_in(rail);
        }
        let (one, taken) = (&mut self.rails[rail], self.arriving.taken(rail));
        (one.fencing, one.receives) = (false, false);
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

    /// Goes on with the next link of a rail.
    fn go_on(&mut self, rail: usize) {
        match self.rails[rail].next {
            Next::Nothing | Next::Prepared(_) => {}
            Next::Preparing(epoch) => match self.beside.prepare(rail, epoch) {
                Made::Pending => {}
                Made::Failed => self.fails(rail),
                Made::Done(()) => {
                    let one = &mut self.rails[rail];
                    one.next = Next::Prepared(epoch);
                    self.beside.send(rail, Control::Ready { epoch });
                    if one.ready.take() == Some(epoch) {
                        self.hear(rail, Control::Ready { epoch });
                    }
                }
            },
            Next::Joining(_) => match self.beside.joined(rail) {
                Made::Pending => {}
                Made::Failed => self.fails(rail),
                Made::Done(link) => self.install(rail, link),
            },
        }
    }

    /// The next link of a rail could not be made: another attempt follows.
    fn fails(&mut self, rail: usize) {
        let one = &mut self.rails[rail];
        one.next = Next::Nothing;
        one.recovery.link_down(self.now, Status::new(abi::PUSHGATE_LINK_DOWN), &mut self.orders);
        self.perform(rail);
    }

    /// A rail's next link is there.
    fn install(&mut self, rail: usize, link: Box<dyn Rail>) {
        let one = &mut self.rails[rail];
        let Next::Joining(knows) = std::mem::replace(&mut one.next, Next::Nothing) else { return };
        self.beside.retire(std::mem::replace(&mut one.link, link));
        for (key, own) in self.regions.iter().filter(|(key, _)| !knows.contains(key)) {
            one.link.add_region(*key, &own.memory, own.bytes);
        }
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
        (one.over, one.fencing, one.next) = (true, true, Next::Nothing);
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
        while let Some((rail, control)) = self.beside.receive() {
            let Some(one) = self.rails.get_mut(rail) else { continue };
            let epoch = match control {
                Control::Break { epoch } | Control::Resume { epoch, .. } | Control::Ready { epoch } => epoch,
                Control::End(_) => 0,
            };
            if epoch > one.recovery.epoch().saturating_add(AHEAD) {
                continue;
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

    /// Whether a link that is being joined may have this region of this end.
    pub(super) fn is_joining_with(&self, key: u32) -> bool {
        self.rails.iter().any(|one| matches!(&one.next, Next::Joining(knows) if knows.contains(&key)))
    }
}
