//! How two ends of a session meet over their first link, leave a link that broke, and meet again over the next one.
//!
//! An end tells the peer to resume only when nothing of an earlier epoch can touch its memory any more. Both ends run this
//! machine. Messages may cross, come twice or be lost with the channel that carries them: one of a lower epoch is ignored,
//! one of a higher epoch is adopted, and an attempt that does not end is given up for the next epoch.
//!
//! Pure state. Time is passed in, in nanoseconds of any monotonic clock. The caller performs the [`Order`]s.

use std::time::Duration;

use crate::session::Status;

/// What the two ends say to each other while no link carries messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// The link of this epoch is given up.
    Break {
        /// The link's epoch.
        epoch: u32,
    },
    /// Nothing of an epoch before this one can touch the sender's memory any more, and the sender has accepted so many
    /// messages.
    Resume {
        /// The epoch of the next link.
        epoch: u32,
        /// Messages of the receiver of this control message that its sender has accepted.
        accepted: u64,
    },
    /// The sender is ready to receive over the link of this epoch.
    Ready {
        /// The link's epoch.
        epoch: u32,
    },
    /// The session has ended.
    End(Status),
}

/// What the caller has to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Send this to the peer, if a channel is there; what can't be sent is lost.
    Send(Control),
    /// Bring everything of the present link and of a link that was prepared to its end; then call [`Recovery::fenced`].
    Fence,
    /// Prepare the link of this epoch: be ready to receive.
    Prepare(u32),
    /// Post over the link of this epoch, from the message behind the first `accepted` ones.
    Go {
        /// The link's epoch.
        epoch: u32,
        /// Messages that the peer has accepted.
        accepted: u64,
    },
    /// Show the end.
    End(Status),
}

/// Where a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Messages go over the link of the epoch.
    Live,
    /// The link is being brought to its end. The epoch is that of the next link.
    Fencing,
    /// Nothing of an earlier epoch can touch this end's memory. The peer was told.
    Offered,
    /// The peer has said the same; this end is ready to receive.
    Joining,
    /// The session has ended.
    Ended(Status),
}

/// Limits of a recovery, nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// An attempt that has not ended after this is given up.
    pub attempt: u64,
    /// The pause before the second attempt. It doubles with each one up to [`Patience::longest_pause`].
    pub first_pause: u64,
    /// The longest pause between two attempts.
    pub longest_pause: u64,
    /// A session that is not live again after this ends.
    pub whole: u64,
    /// Seed of the pauses' jitter. Each pause is shortened by up to half, so that many sessions whose links broke together
    /// do not try again together.
    pub jitter: u64,
}

impl Patience {
    /// For sessions of processes: a session ends that is not live again after `whole`. The first attempt comes at once, the
    /// next ones after 10 ms times 2^n and at most 1 s; an attempt is given up after 2 s.
    pub fn within(whole: Duration, jitter: u64) -> Self {
        let whole = u64::try_from(whole.as_nanos()).unwrap_or(u64::MAX);
        Patience {
            attempt: 2_000_000_000,
            first_pause: 10_000_000,
            longest_pause: 1_000_000_000,
            whole,
            jitter,
        }
    }

    /// The pause before attempt `n` in a row, counted from 0, for the link of `epoch`.
    fn pause(&self, n: u32, epoch: u32) -> u64 {
        let Some(before) = n.checked_sub(1) else { return 0 };
        let pause = self.first_pause.saturating_mul(1 << before.min(32)).min(self.longest_pause);
        let share = (self.jitter ^ epoch as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        pause - pause / 2 * share / 1024
    }

    /// A link that lived for this long has worked, whether or not anything was to be carried.
    fn steady(&self) -> u64 {
        8 * self.first_pause
    }
}

/// The recovery of one session at one end.
#[derive(Debug)]
pub struct Recovery {
    patience: Patience,
    /// What the session ends with if no link comes up in time.
    gives_up: Status,
    epoch: u32,
    phase: Phase,
    /// The peer's RESUME of `epoch`: messages that it has accepted.
    peer: Option<u64>,
    /// The caller has fenced, and the pause is not over.
    fenced: Option<u64>,
    /// Attempts in a row that brought the session no further.
    attempts: u32,
    /// The session's count as last told, and whether the present link has moved the count.
    count: u64,
    moved: bool,
    live_since: u64,
    /// The peer has never answered: its first answer begins the limits anew.
    unanswered: bool,
    /// When the attempt is given up, when the next one may begin, when the session ends.
    gives_up_at: u64,
    not_before: u64,
    ends_at: u64,
}

impl Recovery {
    /// A session that is live over its first link, of epoch 0. It ends with `gives_up` if a link breaks and none takes its
    /// place in time.
    pub fn new(patience: Patience, gives_up: Status) -> Self {
        Recovery {
            patience,
            gives_up,
            epoch: 0,
            phase: Phase::Live,
            peer: None,
            fenced: None,
            attempts: 0,
            count: 0,
            moved: true,
            live_since: 0,
            unanswered: false,
            gives_up_at: u64::MAX,
            not_before: 0,
            ends_at: u64::MAX,
        }
    }

    /// A session that has no link yet. This end has nothing to fence, so it sends RESUME of epoch 0 at once. It ends with
    /// `gives_up` if the peer does not answer within [`Patience::whole`], or if the link is not live within
    /// [`Patience::whole`] of the peer's first answer.
    pub fn offered(patience: Patience, gives_up: Status, now: u64, orders: &mut Vec<Order>) -> Self {
        orders.push(Order::Send(Control::Resume { epoch: 0, accepted: 0 }));
        Recovery {
            phase: Phase::Offered,
            unanswered: true,
            gives_up_at: now.saturating_add(patience.attempt),
            ends_at: now.saturating_add(patience.whole),
            ..Self::new(patience, gives_up)
        }
    }

    /// Limits and last status of all recoveries to come. For a session that has just become live for the first time.
    pub fn set_patience(&mut self, patience: Patience, gives_up: Status) {
        (self.patience, self.gives_up) = (patience, gives_up);
        (self.attempts, self.moved) = (0, true);
    }

    /// Says how far the session has come, by any count that grows with each message that either end has accepted. To be
    /// told before a link is given up. Links that break one after the other and bring the session no further are attempts
    /// of one recovery: the pauses go on to grow, and the limit is that of the first break.
    pub fn progress(&mut self, count: u64) {
        self.moved |= count > self.count;
        self.count = self.count.max(count);
    }

    /// Where the session stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The epoch of the link that is live, or of the next one.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What the peer has accepted, by its RESUME of the present epoch: final from [`Order::Prepare`] to [`Order::Go`], where
    /// both ends have fenced.
    pub fn peer_accepted(&self) -> Option<u64> {
        self.peer
    }

    /// The link that is live or being joined has broken. `gives_up` is what the session ends with if no other link takes
    /// its place.
    pub fn link_down(&mut self, now: u64, gives_up: Status, orders: &mut Vec<Order>) {
        if !matches!(self.phase, Phase::Ended(_) | Phase::Fencing) {
            self.gives_up = gives_up;
            self.leave(self.epoch, now, orders);
        }
    }

    /// Voids what the peer has said: its process has ended or called again, and another call may take its place. Leaves a
    /// live session as it is.
    pub fn forget_peer(&mut self, now: u64, orders: &mut Vec<Order>) {
        match self.phase {
            Phase::Fencing | Phase::Offered => self.peer = None,
            Phase::Joining => self.leave(self.epoch, now, orders),
            Phase::Live | Phase::Ended(_) => {}
        }
    }

    /// The peer has sent `control`; `accepted` is what this end has accepted, in case the peer has to be told. The caller
    /// has checked that the epoch is not far ahead.
    pub fn take(&mut self, control: Control, accepted: u64, now: u64, orders: &mut Vec<Order>) {
        match (self.phase, control) {
            (Phase::Ended(_), _) => {}
            (_, Control::End(status)) => self.end(status, orders),
            (_, Control::Break { epoch }) => {
                // In `Fencing` the epoch is the next link's, so a BREAK that crossed this end's own is nothing new.
                if epoch >= self.epoch {
                    self.leave(epoch, now, orders);
                }
            }
            (_, Control::Resume { epoch, accepted: peer }) => {
                // The peer has left every epoch before this one, whether or not its BREAK came.
                if epoch > self.epoch || self.phase == Phase::Live && epoch == self.epoch + 1 {
                    self.leave(epoch - 1, now, orders);
                }
                if epoch == self.epoch && matches!(self.phase, Phase::Fencing | Phase::Offered) {
                    self.peer = Some(peer);
                    self.advance(accepted, now, orders);
                } else if epoch == self.epoch && self.phase == Phase::Joining {
                    // Sent again: the peer may not have had the answer.
                    orders.push(Order::Send(Control::Ready { epoch }));
                }
            }
            (Phase::Joining, Control::Ready { epoch }) if epoch == self.epoch => {
                (self.phase, self.gives_up_at) = (Phase::Live, u64::MAX);
                (self.live_since, self.moved) = (now, false);
                let accepted = self.peer.take().expect("the peer's RESUME comes before its READY");
                orders.push(Order::Go { epoch, accepted });
            }
            (_, Control::Ready { .. }) => {}
        }
    }

    /// [`Order::Fence`] was carried out: nothing of an epoch before [`Recovery::epoch`] can touch this end's memory, and
    /// `accepted` messages of the peer were accepted.
    pub fn fenced(&mut self, accepted: u64, now: u64, orders: &mut Vec<Order>) {
        if self.phase == Phase::Fencing {
            self.fenced = Some(now);
            self.advance(accepted, now, orders);
        }
    }

    /// Looks at the time. `accepted` is what this end has accepted.
    pub fn tick(&mut self, accepted: u64, now: u64, orders: &mut Vec<Order>) {
        match self.phase {
            Phase::Live | Phase::Ended(_) => {}
            _ if now >= self.ends_at => self.end(self.gives_up, orders),
            Phase::Fencing => self.advance(accepted, now, orders),
            Phase::Offered | Phase::Joining if now >= self.gives_up_at => self.leave(self.epoch, now, orders),
            Phase::Offered | Phase::Joining => {}
        }
    }

    /// The next time at which [`Recovery::tick`] has something to do, if there is one.
    pub fn wakes_at(&self) -> Option<u64> {
        let at = match self.phase {
            Phase::Live | Phase::Ended(_) => return None,
            Phase::Fencing if self.fenced.is_some() => self.not_before,
            Phase::Fencing => u64::MAX,
            Phase::Offered | Phase::Joining => self.gives_up_at,
        };
        Some(at.min(self.ends_at))
    }

    /// Ends the session: the program does, or a promise was broken.
    pub fn abort(&mut self, status: Status, orders: &mut Vec<Order>) {
        if !matches!(self.phase, Phase::Ended(_)) {
            self.end(status, orders);
        }
    }

    /// Gives the link of `epoch` up, and every one before it.
    fn leave(&mut self, epoch: u32, now: u64, orders: &mut Vec<Order>) {
        let fences = self.phase != Phase::Fencing;
        if self.phase == Phase::Live {
            if self.moved || now.saturating_sub(self.live_since) >= self.patience.steady() {
                self.attempts = 0;
            }
            if self.attempts == 0 {
                self.ends_at = now.saturating_add(self.patience.whole);
            }
        }
        let pause = self.patience.pause(self.attempts, epoch);
        self.not_before = now.saturating_add(pause);
        self.attempts += 1;
        (self.phase, self.epoch, self.peer) = (Phase::Fencing, epoch + 1, None);
        orders.push(Order::Send(Control::Break { epoch }));
        if fences {
            self.fenced = None;
            orders.push(Order::Fence);
        }
    }

    /// Goes on from `Fencing` and from `Offered`, as far as may be.
    fn advance(&mut self, accepted: u64, now: u64, orders: &mut Vec<Order>) {
        if self.phase == Phase::Fencing && self.fenced.is_some() && now >= self.not_before {
            let attempt = if planted!(P7Attempt) { u64::MAX } else { self.patience.attempt };
            (self.phase, self.gives_up_at) = (Phase::Offered, now.saturating_add(attempt));
            orders.push(Order::Send(Control::Resume { epoch: self.epoch, accepted }));
        }
        if self.phase == Phase::Offered && self.peer.is_some() {
            self.phase = Phase::Joining;
            if std::mem::take(&mut self.unanswered) {
                // The peer may have come at the last moment.
                self.gives_up_at = now.saturating_add(self.patience.attempt);
                self.ends_at = now.saturating_add(self.patience.whole);
            }
            orders.push(Order::Prepare(self.epoch));
            orders.push(Order::Send(Control::Ready { epoch: self.epoch }));
        }
    }

    fn end(&mut self, status: Status, orders: &mut Vec<Order>) {
        self.phase = Phase::Ended(status);
        orders.push(Order::Send(Control::End(status)));
        orders.push(Order::End(status));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use pushgate_abi::abi;

    const PATIENCE: Patience =
        Patience { attempt: 200, first_pause: 10, longest_pause: 100, whole: 5000, jitter: 7 };
    const DOWN: Status = Status::new(abi::PUSHGATE_LINK_DOWN);

    /// One end: the machine, and what the orders have done.
    struct End {
        machine: Recovery,
        /// Messages of the peer that this end has accepted, and those that it has posted.
        accepted: u64,
        /// The next message that this end posts, and the epoch over which it may.
        sent: u64,
        posts_in: Option<u32>,
        /// The fence under way ends then.
        fence: Option<u64>,
        /// Nothing of an epoch before this one can touch this end's memory.
        safe_from: u32,
        ready_for: u32,
    }

    struct World {
        ends: [End; 2],
        /// To each end.
        channels: [VecDeque<Control>; 2],
        /// To each end: epoch and number of messages on their way over a link.
        links: [VecDeque<(u32, u64)>; 2],
        now: u64,
        orders: Vec<Order>,
    }

    impl World {
        fn new(whole: u64) -> Self {
            let end = || End {
                machine: Recovery::new(Patience { whole, ..PATIENCE }, DOWN),
                accepted: 0,
                sent: 0,
                posts_in: Some(0),
                fence: None,
                safe_from: 0,
                ready_for: 0,
            };
            World {
                ends: [end(), end()],
                channels: Default::default(),
                links: Default::default(),
                now: 0,
                orders: Vec::new(),
            }
        }

        fn perform(&mut self, at: usize) {
            for order in std::mem::take(&mut self.orders) {
                let end = &mut self.ends[at];
                match order {
                    Order::Send(control) => {
                        if let Control::Resume { epoch, .. } = control {
                            assert_eq!(end.safe_from, epoch, "RESUME before the fence");
                        }
                        self.channels[1 - at].push_back(control);
                    }
                    Order::Fence => (end.posts_in, end.fence) = (None, Some(self.now + 7)),
                    Order::Prepare(epoch) => end.ready_for = epoch,
                    Order::Go { epoch, accepted } => {
                        assert!(accepted <= end.sent, "the peer has more than was sent");
                        (end.sent, end.posts_in) = (accepted, Some(epoch));
                        let peer = &self.ends[1 - at];
                        assert!(
                            peer.safe_from >= epoch && peer.ready_for >= epoch,
                            "posts before the peer is ready"
                        );
                        assert_eq!(accepted, peer.accepted, "the peer accepts while it is fenced");
                    }
                    Order::End(_) => (end.posts_in, end.fence) = (None, None),
                }
            }
        }

        fn deliver(&mut self, at: usize) {
            if let Some(control) = self.channels[at].pop_front() {
                let end = &mut self.ends[at];
                end.machine.take(control, end.accepted, self.now, &mut self.orders);
                self.perform(at);
            }
        }

        fn pass(&mut self, by: u64) {
            self.now += by;
            for at in 0..2 {
                let end = &mut self.ends[at];
                if end.fence.is_some_and(|until| until <= self.now) {
                    end.fence = None;
                    end.safe_from = end.machine.epoch();
                    end.machine.fenced(end.accepted, self.now, &mut self.orders);
                    self.perform(at);
                }
                let end = &mut self.ends[at];
                // A higher epoch was adopted behind the fence: that fence is good for it, too.
                if end.fence.is_none() && end.machine.phase() == Phase::Fencing {
                    end.safe_from = end.machine.epoch();
                }
                end.machine.tick(end.accepted, self.now, &mut self.orders);
                self.perform(at);
            }
        }

        fn post(&mut self, at: usize) {
            let end = &mut self.ends[at];
            if let Some(epoch) = end.posts_in {
                self.links[1 - at].push_back((epoch, end.sent));
                end.sent += 1;
            }
        }

        /// A message arrives over a link, unless its epoch is fenced.
        fn arrive(&mut self, at: usize) {
            if let Some((epoch, number)) = self.links[at].pop_front() {
                let end = &mut self.ends[at];
                let fenced = end.machine.phase() != Phase::Live && end.fence.is_none();
                if epoch < end.safe_from || fenced && epoch < end.machine.epoch() {
                    return;
                }
                assert_eq!(number, end.accepted, "P6");
                end.accepted += 1;
            }
        }

        fn break_link(&mut self, at: usize) {
            // What is on its way over a broken link may be lost from some message on.
            self.links[1 - at].clear();
            let end = &mut self.ends[at];
            end.machine.link_down(self.now, DOWN, &mut self.orders);
            self.perform(at);
        }
    }

    #[test]
    fn p6_a_link_that_breaks_at_one_end_is_replaced_and_posting_goes_on_behind_what_was_accepted() {
        let mut w = World::new(PATIENCE.whole);
        for _ in 0..5 {
            w.post(0);
        }
        for _ in 0..3 {
            w.arrive(1);
        }
        w.break_link(0);
        for _ in 0..20 {
            w.pass(10);
            (0..2).for_each(|at| w.deliver(at));
        }
        assert_eq!(w.ends.each_ref().map(|e| (e.machine.phase(), e.machine.epoch())), [(Phase::Live, 1); 2]);
        assert_eq!((w.ends[0].sent, w.ends[0].posts_in), (3, Some(1)));
    }

    #[test]
    fn p6_what_is_said_of_another_epoch_moves_no_end_on() {
        let (mut m, mut orders) = (Recovery::new(PATIENCE, DOWN), Vec::new());
        let mut said = |m: &mut Recovery, control| {
            orders.clear();
            m.take(control, 5, 0, &mut orders);
            orders.clone()
        };
        m.link_down(0, DOWN, &mut Vec::new());
        m.fenced(5, 0, &mut Vec::new());
        assert_eq!((m.phase(), m.epoch()), (Phase::Offered, 1));
        assert_eq!(said(&mut m, Control::Resume { epoch: 0, accepted: 3 }), []);
        assert_eq!(said(&mut m, Control::Ready { epoch: 1 }), [], "not before the peer has fenced");
        assert_eq!(said(&mut m, Control::Break { epoch: 0 }), []);
        let ready = Order::Send(Control::Ready { epoch: 1 });
        assert_eq!(said(&mut m, Control::Resume { epoch: 1, accepted: 3 }), [Order::Prepare(1), ready]);
        assert_eq!(said(&mut m, Control::Resume { epoch: 1, accepted: 3 }), [ready], "said again");
        assert_eq!(said(&mut m, Control::Ready { epoch: 0 }), []);
        assert_eq!(said(&mut m, Control::Ready { epoch: 1 }), [Order::Go { epoch: 1, accepted: 3 }]);
        assert_eq!(said(&mut m, Control::Ready { epoch: 1 }), []);
        assert_eq!(said(&mut m, Control::Break { epoch: 0 }), []);
        // The peer has left epochs of which nothing was heard here.
        let left = said(&mut m, Control::Resume { epoch: 7, accepted: 3 });
        assert_eq!(left, [Order::Send(Control::Break { epoch: 6 }), Order::Fence]);
        assert_eq!((m.phase(), m.epoch()), (Phase::Fencing, 7));
    }

    #[test]
    fn p7_a_session_whose_peer_does_not_answer_ends_with_the_links_cause() {
        let mut w = World::new(PATIENCE.whole);
        w.break_link(0);
        for _ in 0..2000 {
            w.pass(10);
            w.channels[1].clear();
        }
        assert_eq!(w.ends[0].machine.phase(), Phase::Ended(DOWN));
        assert!(w.ends[0].machine.wakes_at().is_none());
    }

    #[test]
    fn p7_links_that_break_without_progress_are_attempts_of_one_recovery() {
        let orders = &mut Vec::new();
        // Until when a session that breaks every 50 lives, and its longest pause.
        let mut breaks = |moves: bool| {
            let (mut m, mut longest) = (Recovery::new(PATIENCE, DOWN), 0);
            for n in 0..400 {
                let now = 50 * n;
                if matches!(m.phase(), Phase::Ended(_)) {
                    return (now, longest);
                }
                m.progress(if moves { n } else { 0 });
                m.link_down(now, DOWN, orders);
                m.fenced(0, now, orders);
                let begins = m.wakes_at().filter(|_| m.phase() == Phase::Fencing).unwrap_or(now);
                longest = longest.max(begins - now);
                m.tick(0, begins, orders);
                let epoch = m.epoch();
                m.take(Control::Resume { epoch, accepted: 0 }, 0, begins, orders);
                m.take(Control::Ready { epoch }, 0, begins, orders);
            }
            (50 * 400, longest)
        };
        let (ended, longest) = breaks(false);
        assert!((5000..6000).contains(&ended) && (40..=100).contains(&longest), "{ended}, {longest}");
        assert_eq!(breaks(true), (50 * 400, 0));
    }

    #[test]
    fn p7_a_link_that_lived_for_a_while_has_worked() {
        let (mut m, orders) = (Recovery::new(PATIENCE, DOWN), &mut Vec::new());
        for n in 1..200 {
            let now = 100 * n;
            m.link_down(now, DOWN, orders);
            m.fenced(0, now, orders);
            assert_eq!(m.phase(), Phase::Offered, "no pause");
            let epoch = m.epoch();
            m.take(Control::Resume { epoch, accepted: 0 }, 0, now, orders);
            m.take(Control::Ready { epoch }, 0, now, orders);
        }
    }

    #[test]
    fn p7_the_end_of_one_end_is_the_others() {
        let mut w = World::new(PATIENCE.whole);
        let aborted = Status::new(abi::PUSHGATE_ABORTED);
        w.ends[0].machine.abort(aborted, &mut w.orders);
        w.perform(0);
        w.deliver(1);
        assert_eq!(w.ends[1].machine.phase(), Phase::Ended(aborted));
    }

    proptest! {
        /// Links break at any time and control messages cross, are repeated and are lost: no end posts before its peer is
        /// fenced and ready, no message is accepted twice or out of order, and once faults cease both ends are live over
        /// one epoch.
        #[test]
        fn p6_p7_both_ends_meet_over_one_epoch(
            steps in prop::collection::vec((0u8..16, any::<u8>()), 0..600),
        ) {
            // Long enough for any number of attempts.
            let mut w = World::new(1 << 40);
            for (kind, r) in steps {
                let at = (r & 1) as usize;
                match kind {
                    0..3 | 12.. => w.deliver(at),
                    3 | 4 => w.pass(r as u64 >> 3),
                    5 | 6 => w.post(at),
                    7 | 8 => w.arrive(at),
                    9 if r & 6 == 0 => w.break_link(at),
                    // Repeated, behind what was said later; or lost with its channel.
                    10 => {
                        if let Some(control) = w.channels[at].front().copied() {
                            w.channels[at].push_back(control);
                        }
                    }
                    11 if r & 6 == 0 => w.channels[at].clear(),
                    _ => {}
                }
            }
            for _ in 0..3000 {
                w.pass(5);
                for at in 0..2 {
                    w.deliver(at);
                    w.arrive(at);
                }
            }
            let [a, b] = w.ends.each_ref().map(|e| (e.machine.phase(), e.machine.epoch()));
            prop_assert_eq!(a.0, Phase::Live);
            prop_assert_eq!(a, b);
        }
    }
}
