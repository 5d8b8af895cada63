//! How many links of one RDMA device are rebuilt at once, and how soon: where a port flaps or a fabric is congested all links
//! break together, and links that are rebuilt together break again.
//!
//! At most [`Limits::most`] links are being made at any time. The first ones begin at once. Where a link that was rebuilt broke
//! before it carried anything, or could not be made, the links that are away take turns one at a time, after pauses that grow,
//! until one of them carries: that one ends the pauses. A link needs a turn at both of its ends, so the ends take their links in
//! one order ([`Order`]). A link that is away alone has no pauses but those of its own [`Recovery`](crate::recovery::Recovery).
//!
//! Pure state. Time is passed in, in nanoseconds of one monotonic clock, and so is a seed for the jitter of the pauses.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

/// Bounds of what is rebuilt.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Links that are being made at once.
    pub most: u32,
    /// The pause after the first failure, nanoseconds. It doubles with each turn up to [`Limits::longest_pause`], and is shortened by up
    /// to half.
    pub first_pause: u64,
    /// The longest pause, nanoseconds.
    pub longest_pause: u64,
}

/// Which links had their turns together: a failure among them that comes after another one's success says nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round(u64);

/// Which of the links that wait has the next turn, the least first: how often it has failed in a row, then a number that both ends give
/// it. Equal orders share a turn.
pub type Order = (u32, u64);

/// A link that has not asked for so long does not wait: its engine was stopped, or it is gone. Nanoseconds.
const ASKS: u64 = 50_000_000;

/// The links of one device that are away: broken, and not known to carry again.
#[derive(Debug)]
pub struct Fabric {
    limits: Limits,
    /// State of the jitter.
    seed: u64,
    away: u32,
    making: u32,
    round: u64,
    /// The first failure since a link carried, and the turns since then.
    failures: u32,
    not_before: u64,
    /// Who waits out a pause, and when each asked last.
    waiting: BTreeMap<Order, u64>,
}

impl Fabric {
    /// A device none of whose links is away.
    pub fn new(limits: Limits, seed: u64) -> Self {
        Fabric {
            limits,
            seed,
            away: 0,
            making: 0,
            round: 0,
            failures: 0,
            not_before: 0,
            waiting: BTreeMap::new(),
        }
    }

    /// A link has broken, or is to be made for the first time.
    pub fn leaves(&mut self) {
        self.away += 1;
    }

    /// Whether a link that is away may be made now. To be asked again if not; else [`Fabric::made`] follows.
    pub fn begins(&mut self, order: Order, now: u64) -> Option<Round> {
        let pauses = self.failures > 0 && self.away > 1;
        if pauses {
            self.waiting.insert(order, now);
        }
        if self.making >= self.limits.most || pauses && now < self.not_before {
            return None;
        }
        if pauses {
            while let Some(first) = self.waiting.first_entry()
                && now.saturating_sub(*first.get()) >= ASKS
            {
                first.remove();
            }
            if self.waiting.keys().next() != Some(&order) {
                return None;
            }
            self.waiting.remove(&order);
            self.failures = self.failures.saturating_add(1);
            self.not_before = now.saturating_add(self.pause());
        }
        self.making += 1;
        Some(Round(self.round))
    }

    /// A link that had its turn is made, or could not be made.
    pub fn made(&mut self) {
        self.making -= 1;
    }

    /// A link could not be made, or broke before it carried anything. It is away still.
    pub fn failed(&mut self, of: Round, now: u64) {
        if of.0 == self.round && self.failures == 0 {
            (self.failures, self.round) = (1, self.round + 1);
            self.not_before = now.saturating_add(self.pause());
        }
    }

    /// A link is not away any more: it carries, or nobody waits for it.
    pub fn returns(&mut self, carries: bool) {
        self.away -= 1;
        if carries && self.failures > 0 {
            self.round += 1;
            (self.failures, self.not_before) = (0, 0);
        }
    }

    /// The next pause.
    fn pause(&mut self) -> u64 {
        let doubled = self.limits.first_pause.saturating_mul(1 << self.failures.saturating_sub(1).min(32));
        let pause = doubled.min(self.limits.longest_pause);
        self.seed = self.seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        pause - pause / 2 * (self.seed >> 54) / 1024
    }
}
