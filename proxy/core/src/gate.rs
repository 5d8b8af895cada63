//! The gate: a message is posted only with a permit, and a permit exists only while everything that the message will
//! consume is set aside for it: a send-queue slot, a completion-queue slot, a receive of the peer where the operation
//! consumes one, bytes in flight. The gate takes all of them or none (P4).
//!
//! Two kinds of credit meet here. Send-queue slots, completion-queue slots and bytes in flight are the link's
//! ([`Budget`]); receive credit is the session's.
//!
//! One gate serves one queue pair and belongs to one engine thread, so its counts are plain cells.

use std::cell::Cell;

/// What a link can hold at once. The next link of the same session brings a budget of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Work requests that the send queue holds.
    pub send_slots: u32,
    /// Completions that the completion queue holds. Every work request costs one, signaled or not: after an error the
    /// unsignaled work requests complete as well.
    pub cq_slots: u32,
    /// Bytes of payload that are posted and not yet retired.
    pub bytes: u64,
}

/// What a message needs besides a send-queue slot and a completion-queue slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Payload, bytes.
    pub bytes: u32,
    /// The message consumes a receive of the peer.
    pub receive: bool,
}

/// The first resource that was missing, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// The send queue has no free slot.
    SendQueue,
    /// The completion queue has no free slot.
    CompletionQueue,
    /// The peer has granted no further receive.
    Receive,
    /// Too many bytes in flight.
    Bytes,
}

/// Why a grant was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The peer granted more receives than it said that it would ever have.
    #[error("granted {granted} receives with {used} used, but the peer has only {limit}")]
    TooMany {
        /// The cumulative grant.
        granted: u64,
        /// Receives consumed so far.
        used: u64,
        /// Receives that the peer can have posted at once.
        limit: u32,
    },
}

/// The gate of one queue pair: lends the resources that a send consumes, as [`Permit`]s.
#[derive(Debug)]
pub struct Gate {
    budget: Budget,
    /// Receives that the peer can have posted at once.
    receives: u32,
    send_free: Cell<u32>,
    cq_free: Cell<u32>,
    bytes: Cell<u64>,
    granted: Cell<u64>,
    consumed: Cell<u64>,
    ungated: bool,
}

/// The right to post one message. Posting consumes the permit. A permit that is dropped instead returns what it held.
#[derive(Debug)]
#[must_use = "a permit that is dropped returns its credits"]
pub struct Permit<'g> {
    gate: &'g Gate,
    need: Need,
}

impl Gate {
    /// A gate with nothing in flight and no receive granted, for a peer that can have `receives` posted at once and a
    /// link of this budget.
    pub fn new(receives: u32, budget: Budget) -> Self {
        Gate {
            budget,
            receives,
            send_free: Cell::new(budget.send_slots),
            cq_free: Cell::new(budget.cq_slots),
            bytes: Cell::new(0),
            granted: Cell::new(0),
            consumed: Cell::new(0),
            ungated: false,
        }
    }

    /// A gate that ignores receive credit, with which tests prove that the receiver notices.
    #[cfg(feature = "test-ungated")]
    pub fn without_receive_credit(receives: u32, budget: Budget) -> Self {
        Gate { ungated: true, ..Gate::new(receives, budget) }
    }

    /// The gate that replaces an earlier one, after messages that are done consumed `consumed` receives.
    pub fn resumed(receives: u32, budget: Budget, consumed: u64) -> Self {
        Gate { consumed: Cell::new(consumed), ..Gate::new(receives, budget) }
    }

    /// Takes what `need` asks for, for a message that the peer has accepted from an earlier link and that is not retired:
    /// no slot of this link.
    pub fn was_posted(&self, need: Need) {
        self.consumed.set(self.consumed.get() + need.receive as u64);
        self.bytes.set(self.bytes.get() + need.bytes as u64);
    }

    /// Another link takes the place of one that broke. Its budget is fresh; receive credit belongs to the session and
    /// stays, less what the messages had consumed that are posted again: `sends` receives and `bytes` of payload.
    ///
    /// # Panics
    ///
    /// If less had been consumed.
    pub fn renew(&mut self, budget: Budget, sends: u64, bytes: u64) {
        let consumed = self.consumed.get().checked_sub(sends).expect("SENDs posted again were posted");
        self.retire(bytes);
        self.consumed.set(consumed);
        self.budget = budget;
        self.send_free.set(budget.send_slots);
        self.cq_free.set(budget.cq_slots);
    }

    /// Takes all that `need` asks for, or takes nothing and says what is missing.
    ///
    /// A message longer than [`Budget::bytes`] passes when nothing else is in flight: the limit bounds what is in flight
    /// together, not the message.
    #[inline]
    pub fn reserve(&self, need: Need) -> Result<Permit<'_>, Stall> {
        let stall = if self.send_free.get() == 0 {
            Stall::SendQueue
        } else if self.cq_free.get() == 0 {
            Stall::CompletionQueue
        } else if need.receive
            && self.consumed.get() >= self.granted.get()
            && !self.ungated
            && !planted!(P4Forged)
        {
            Stall::Receive
        } else if self.bytes.get() > 0 && self.bytes.get() + need.bytes as u64 > self.budget.bytes {
            Stall::Bytes
        } else {
            self.send_free.set(self.send_free.get() - 1);
            self.cq_free.set(self.cq_free.get() - 1);
            self.consumed.set(self.consumed.get() + need.receive as u64);
            self.bytes.set(self.bytes.get() + need.bytes as u64);
            return Ok(Permit { gate: self, need });
        };
        Err(stall)
    }

    /// Takes in the peer's cumulative grant. Returns whether it is new: an old or repeated grant changes nothing.
    #[inline]
    pub fn grant(&self, granted: u64) -> Result<bool, GrantError> {
        if granted <= self.granted.get() {
            return Ok(false);
        }
        let used = self.consumed.get();
        if granted.saturating_sub(used) > self.receives as u64 && !self.ungated {
            return Err(GrantError::TooMany { granted, used, limit: self.receives });
        }
        self.granted.set(granted);
        Ok(true)
    }

    /// Frees the send-queue and completion-queue slots of `n` work requests that completed.
    ///
    /// # Panics
    ///
    /// If more complete than were posted: the link counted wrong.
    #[inline]
    pub fn complete(&self, n: u32) {
        let n = if planted!(P4Leaked) && n > 1 { n - 1 } else { n };
        let send = self.send_free.get() + n;
        assert!(send <= self.budget.send_slots, "{n} completions are more than were posted");
        self.send_free.set(send);
        self.cq_free.set(self.cq_free.get() + n);
    }

    /// Frees `bytes` of payload that were retired.
    #[inline]
    pub fn retire(&self, bytes: u64) {
        self.bytes.set(self.bytes.get().checked_sub(bytes).expect("retired bytes were posted"));
    }

    /// Work requests that are posted and not completed.
    pub fn in_flight(&self) -> u32 {
        self.budget.send_slots - self.send_free.get()
    }

    /// The peer's cumulative grant, as taken in last.
    pub fn granted(&self) -> u64 {
        self.granted.get()
    }

    /// Receives that may still be consumed.
    pub fn receives_left(&self) -> u64 {
        self.granted.get().saturating_sub(self.consumed.get())
    }
}

impl Permit<'_> {
    /// Consumes the permit: the link has posted the message. What the permit held comes back by [`Gate::complete`],
    /// [`Gate::retire`] and [`Gate::grant`]. For links alone.
    #[inline]
    pub fn post(self) {
        std::mem::forget(self);
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.gate.complete(1);
        self.gate.retire(self.need.bytes as u64);
        self.gate.consumed.set(self.gate.consumed.get() - self.need.receive as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUDGET: Budget = Budget { send_slots: 4, cq_slots: 3, bytes: 1000 };
    const RECEIVES: u32 = 5;

    #[test]
    fn p4_what_is_missing_is_named_and_nothing_is_taken() {
        let gate = Gate::new(RECEIVES, BUDGET);
        assert_eq!(gate.reserve(Need { bytes: 1, receive: true }).unwrap_err(), Stall::Receive);
        assert_eq!(gate.in_flight(), 0);
        gate.grant(1).unwrap();
        gate.reserve(Need { bytes: 600, receive: true }).unwrap().post();
        assert_eq!(gate.reserve(Need { bytes: 401, receive: false }).unwrap_err(), Stall::Bytes);
        gate.reserve(Need { bytes: 1, receive: false }).unwrap().post();
        gate.reserve(Need { bytes: 1, receive: false }).unwrap().post();
        assert_eq!(gate.reserve(Need { bytes: 0, receive: false }).unwrap_err(), Stall::CompletionQueue);
    }

    #[test]
    fn p4_a_permit_not_posted_returns_what_it_held() {
        let gate = Gate::new(RECEIVES, BUDGET);
        gate.grant(1).unwrap();
        drop(gate.reserve(Need { bytes: 1000, receive: true }).unwrap());
        gate.reserve(Need { bytes: 1000, receive: true }).unwrap().post();
        assert_eq!(gate.reserve(Need { bytes: 0, receive: true }).unwrap_err(), Stall::Receive);
    }

    #[test]
    fn p4_old_grants_are_harmless_and_impossible_ones_refused() {
        let gate = Gate::new(RECEIVES, BUDGET);
        assert_eq!(gate.grant(3), Ok(true));
        assert_eq!(gate.grant(3), Ok(false));
        assert_eq!(gate.grant(1), Ok(false));
        assert_eq!(gate.receives_left(), 3);
        assert_eq!(gate.grant(6), Err(GrantError::TooMany { granted: 6, used: 0, limit: 5 }));
    }

    #[test]
    fn a_message_over_the_byte_limit_passes_alone() {
        let gate = Gate::new(RECEIVES, BUDGET);
        gate.reserve(Need { bytes: 5000, receive: false }).unwrap().post();
        assert_eq!(gate.reserve(Need { bytes: 1, receive: false }).map(|_| ()), Err(Stall::Bytes));
        gate.complete(1);
        gate.retire(5000);
        gate.reserve(Need { bytes: 1, receive: false }).unwrap().post();
    }

    proptest! {
        /// Against a model that keeps the plain counts: whatever the order of
        /// events, a permit exists exactly when every count allows it.
        #[test]
        fn p4_permits_exactly_when_all_credits_are_there(
            events in prop::collection::vec((0u8..6, 0u32..700), 1..200)
        ) {
            let mut gate = Gate::new(RECEIVES, BUDGET);
            // Payload and whether it consumed a receive, of messages posted and of those completed.
            let (mut flying, mut landed) = (Vec::<(u32, bool)>::new(), Vec::<(u32, bool)>::new());
            let (mut granted, mut used) = (0u64, 0u64);
            for (kind, bytes) in events {
                let in_flight: u64 = flying.iter().chain(&landed).map(|(b, _)| *b as u64).sum();
                match kind {
                    0 | 1 => {
                        let receive = kind == 1;
                        let allowed = flying.len() < 3
                            && (!receive || used < granted)
                            && (in_flight + bytes as u64 <= BUDGET.bytes || in_flight == 0);
                        match gate.reserve(Need { bytes, receive }) {
                            Ok(permit) => {
                                prop_assert!(allowed);
                                permit.post();
                                flying.push((bytes, receive));
                                used += receive as u64;
                            }
                            Err(_) => prop_assert!(!allowed),
                        }
                    }
                    2 if !flying.is_empty() => {
                        landed.push(flying.remove(0));
                        gate.complete(1);
                    }
                    3 if !landed.is_empty() => gate.retire(landed.remove(0).0 as u64),
                    4 => {
                        granted = (used + bytes as u64 % 6).max(granted);
                        gate.grant(granted).unwrap();
                    }
                    // The link breaks; the peer has accepted all but the last few of what is in flight.
                    5 => {
                        let again = flying.split_off(flying.len() - bytes as usize % (flying.len() + 1));
                        let sends = again.iter().filter(|(_, receive)| *receive).count() as u64;
                        gate.renew(BUDGET, sends, again.iter().map(|(b, _)| *b as u64).sum());
                        landed.append(&mut flying);
                        used -= sends;
                    }
                    _ => {}
                }
            }
        }
    }
}
