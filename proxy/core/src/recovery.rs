//! How two ends of a session meet over their first link, leave a link that broke, and meet again over the next one.
//!
//! An end tells the peer to resume only when nothing of an earlier epoch can touch its memory any more. Both ends run this
//! machine. Messages may cross, come twice or be lost with the channel that carries them: one of a lower epoch is ignored,
//! one of a higher epoch is adopted, and an attempt that does not end is given up for the next epoch.
//!
//! Pure state. Time is passed in, in nanoseconds of any monotonic clock. The caller performs the [`Order`]s.

#[cfg(test)]
mod tests;

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
    /// Nothing of an epoch before this one can touch the sender's memory any more, and the sender has accepted `accepted`
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
    /// Post over the link of this epoch, from the message after the first `accepted` ones.
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
    /// An end that has waited for this long for the peer's answer to its RESUME sends the RESUME again. An attempt is given
    /// up if both ends have answered and are not both ready after this time.
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
    /// next ones after 10 ms times 2^n and at most 1 s. [`Patience::attempt`] is 2 s, or a quarter of `whole` if that is less,
    /// so that a lost frame never costs the session.
    pub fn within(whole: Duration, jitter: u64) -> Self {
        let whole = u64::try_from(whole.as_nanos()).unwrap_or(u64::MAX);
        Patience {
            attempt: (whole / 4).min(2_000_000_000),
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

    /// A link that had nothing to carry and lived for this long has worked.
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
    /// What `gives_up` is until this end knows better: where the peer alone says that a link broke.
    unknown: Status,
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
    /// Messages that were posted have not arrived, as last told.
    waits: bool,
    live_since: u64,
    /// The ends have met: a link has been live.
    met: bool,
    /// The peer has never answered: its first answer begins the limits anew.
    unanswered: bool,
    /// When RESUME is sent again or the attempt is given up, when the next attempt may begin, when the session ends.
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
            unknown: gives_up,
            epoch: 0,
            phase: Phase::Live,
            peer: None,
            fenced: None,
            attempts: 0,
            count: 0,
            moved: true,
            waits: false,
            live_since: 0,
            met: true,
            unanswered: false,
            gives_up_at: u64::MAX,
            not_before: 0,
            ends_at: u64::MAX,
        }
    }

    /// A session that is live over a later link.
    pub fn in_epoch(self, epoch: u32) -> Self {
        Recovery { epoch, ..self }
    }

    /// A session that has no link yet. This end has nothing to fence, so it sends RESUME of epoch 0 at once. It ends with
    /// `gives_up` if the peer does not answer within [`Patience::whole`], or if the link is not live within
    /// [`Patience::whole`] of the peer's first answer.
    pub fn offered(patience: Patience, gives_up: Status, now: u64, orders: &mut Vec<Order>) -> Self {
        orders.push(Order::Send(Control::Resume { epoch: 0, accepted: 0 }));
        Recovery {
            phase: Phase::Offered,
            met: false,
            unanswered: true,
            gives_up_at: now.saturating_add(patience.attempt),
            ends_at: now.saturating_add(patience.whole),
            ..Self::new(patience, gives_up)
        }
    }

    /// Limits of all recoveries to come, and the status with which the session ends where a link broke at the peer's end and
    /// none takes its place in time. For a session that has just become live for the first time.
    pub fn set_patience(&mut self, patience: Patience, gives_up: Status) {
        (self.patience, self.gives_up, self.unknown) = (patience, gives_up, gives_up);
        (self.attempts, self.moved) = (0, true);
    }

    /// Says how far the session has come, by any count that grows with each message that either end has accepted, and whether
    /// messages that this end has posted have not arrived. To be told before a link is given up. Links that break one after
    /// the other and bring the session no further are attempts of one recovery: the pauses go on to grow, and the time without
    /// a link has one limit. A link that had nothing to carry has worked if it lived for 8 times the first pause.
    pub fn progress(&mut self, count: u64, waits: bool) {
        self.moved |= count > self.count;
        self.count = self.count.max(count);
        self.waits = waits;
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
                // The cause of this break is not that of a later one.
                self.gives_up = self.unknown;
                (self.live_since, self.moved, self.met) = (now, false, true);
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

    /// Looks at the time. `accepted` is what this end has accepted. A call that comes later than [`Recovery::wakes_at`] by the
    /// length of an attempt or more is taken for one of a process that was stopped: that time does not count for the limit of
    /// a recovery.
    pub fn tick(&mut self, accepted: u64, now: u64, orders: &mut Vec<Order>) {
        let late = self.wakes_at().map_or(0, |due| now.saturating_sub(due));
        if self.met && late >= self.patience.attempt {
            let one_more = now.saturating_add(self.patience.attempt);
            self.ends_at = self.ends_at.saturating_add(late).max(one_more);
        }
        match self.phase {
            Phase::Live | Phase::Ended(_) => {}
            _ if now >= self.ends_at => self.end(self.gives_up, orders),
            Phase::Fencing => self.advance(accepted, now, orders),
            // The peer may take long to make its end, which no new attempt would shorten: each would begin anew at both
            // ends. If a frame was lost, this one brings the peer to the epoch, or has the peer say that it is ready.
            Phase::Offered if now >= self.gives_up_at => {
                self.gives_up_at = now.saturating_add(self.attempt());
                orders.push(Order::Send(Control::Resume { epoch: self.epoch, accepted }));
            }
            Phase::Joining if now >= self.gives_up_at => self.leave(self.epoch, now, orders),
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
            let lived = now.saturating_sub(self.live_since);
            // A message may have been posted just before the break, so a link that lived for long has worked all the same.
            let steady = if self.waits { self.patience.whole } else { self.patience.steady() };
            if self.moved || lived >= steady {
                self.attempts = 0;
            }
            self.ends_at = match self.attempts {
                0 => now.saturating_add(self.patience.whole),
                // The limit is for the time without a link.
                _ => self.ends_at.saturating_add(lived),
            };
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
            (self.phase, self.gives_up_at) = (Phase::Offered, now.saturating_add(self.attempt()));
            orders.push(Order::Send(Control::Resume { epoch: self.epoch, accepted }));
        }
        if self.phase == Phase::Offered && self.peer.is_some() {
            (self.phase, self.gives_up_at) = (Phase::Joining, now.saturating_add(self.attempt()));
            if std::mem::take(&mut self.unanswered) {
                // The peer may have come at the last moment.
                self.gives_up_at = now.saturating_add(self.patience.attempt);
                self.ends_at = now.saturating_add(self.patience.whole);
            }
            orders.push(Order::Prepare(self.epoch));
            orders.push(Order::Send(Control::Ready { epoch: self.epoch }));
        }
    }

    /// How long an attempt may wait for a frame of the peer.
    fn attempt(&self) -> u64 {
        if planted!(P7Attempt) { u64::MAX } else { self.patience.attempt }
    }

    fn end(&mut self, status: Status, orders: &mut Vec<Order>) {
        self.phase = Phase::Ended(status);
        orders.push(Order::Send(Control::End(status)));
        orders.push(Order::End(status));
    }
}
