//! The counts and times of a queue pair that a reader makes metrics of. They only grow.

use serde::Serialize;

use super::view::Missing;
use crate::counters::Counters;

/// Words of [`Metrics`].
pub(super) const WORDS: usize = Counters::WORDS + Missing::CAUSES.len() + 2 * Times::WORDS;

/// How many times lay between which bounds, and their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Times {
    /// For each of [`Times::BOUNDS`] the times that did not exceed it and exceeded the bound before; the last number is of
    /// times that exceeded all bounds.
    pub counts: [u64; Times::BOUNDS.len() + 1],
    /// The sum of the times, nanoseconds.
    pub sum: u64,
}

impl Times {
    /// The bounds of times, in nanoseconds: 1, 2 and 5 from a microsecond to 10 ms, then decades to 10 s.
    pub const BOUNDS: [u64; 16] = {
        const US: u64 = 1_000;
        const MS: u64 = 1_000_000;
        [
            US,
            2 * US,
            5 * US,
            10 * US,
            20 * US,
            50 * US,
            100 * US,
            200 * US,
            500 * US,
            MS,
            2 * MS,
            5 * MS,
            10 * MS,
            100 * MS,
            1_000 * MS,
            10_000 * MS,
        ]
    };

    const WORDS: usize = Times::BOUNDS.len() + 2;

    /// The number of all times. No sum overflows, whatever another process says (P8).
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Takes in a time, nanoseconds.
    pub(super) fn add(&mut self, time: u64) {
        let at = Times::BOUNDS.iter().position(|bound| time <= *bound).unwrap_or(Times::BOUNDS.len());
        self.counts[at] += 1;
        self.sum += time;
    }

    fn add_all(&mut self, other: &Times) {
        self.counts.iter_mut().zip(other.counts).for_each(add);
        add((&mut self.sum, other.sum));
    }
}

fn add((to, more): (&mut u64, u64)) {
    *to = to.saturating_add(more);
}

/// Counts and times of one queue pair, or of several together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Metrics {
    /// What the engine counts.
    pub counters: Counters,
    /// For how long the WQE at the head has waited for each of [`Missing::CAUSES`], nanoseconds.
    pub waited: [u64; Missing::CAUSES.len()],
    /// From the release of a message until the engine learned that the peer has the message. Of some messages: one a millisecond at
    /// most.
    pub delivery: Times,
    /// From the break of a link until another one carries the queue pair.
    pub recovery: Times,
}

impl Metrics {
    /// Adds the counts and times of `other`. A number that would overflow stays at the largest one.
    pub fn add(&mut self, other: &Metrics) {
        self.counters += other.counters;
        self.waited.iter_mut().zip(other.waited).for_each(add);
        self.delivery.add_all(&other.delivery);
        self.recovery.add_all(&other.recovery);
    }

    pub(super) fn words(&self) -> [u64; WORDS] {
        let times = [self.delivery, self.recovery];
        let times = times.iter().flat_map(|t| t.counts.into_iter().chain([t.sum]));
        let mut all = self.counters.words().into_iter().chain(self.waited).chain(times);
        std::array::from_fn(|_| all.next().expect("WORDS counts them"))
    }

    /// The metrics in these words: any words are some.
    pub(super) fn of(words: &[u64; WORDS]) -> Metrics {
        let mut words = words.iter().copied();
        fn take<const N: usize>(words: &mut impl Iterator<Item = u64>) -> [u64; N] {
            std::array::from_fn(|_| words.next().expect("WORDS counts them"))
        }
        let (counters, waited) = (Counters::of(take(&mut words)), take(&mut words));
        let mut times = || Times { counts: take(&mut words), sum: words.next().expect("WORDS counts them") };
        Metrics { counters, waited, delivery: times(), recovery: times() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_come_back_from_their_words() {
        let words: [u64; WORDS] = std::array::from_fn(|i| 7 + i as u64);
        let metrics = Metrics::of(&words);
        assert_eq!(metrics.words(), words);
        assert_eq!(metrics.counters.released, 7);
        assert_eq!(metrics.recovery.sum, 7 + WORDS as u64 - 1);
    }

    #[test]
    fn p8_numbers_that_no_engine_reaches_overflow_nothing() {
        let mut sum = Metrics::of(&[u64::MAX; WORDS]);
        sum.add(&Metrics::of(&[u64::MAX; WORDS]));
        assert_eq!(sum.words(), [u64::MAX; WORDS]);
        assert_eq!(sum.delivery.count(), u64::MAX);
    }

    #[test]
    fn a_time_is_counted_by_the_first_bound_that_it_does_not_exceed() {
        let mut times = Times::default();
        for time in [0, 1_000, 1_001, 10_000_000_000, 10_000_000_001] {
            times.add(time);
        }
        let counted: Vec<_> =
            times.counts.iter().enumerate().filter(|(_, n)| **n > 0).map(|(at, n)| (at, *n)).collect();
        assert_eq!(counted, [(0, 2), (1, 1), (15, 1), (16, 1)]);
        assert_eq!(times.sum, 20_000_002_002);
    }
}
