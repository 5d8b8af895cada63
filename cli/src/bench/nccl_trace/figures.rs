//! What a replay measured: times of messages by their length, counted in steps of a sixteenth, so that processes' figures add up.

use std::collections::BTreeMap;

use pushgate_net_trace::Role;
use serde::{Deserialize, Serialize};

/// Steps to the double.
const STEPS: f64 = 16.0;

/// How often times were seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Times(BTreeMap<u16, u64>);

impl Times {
    pub fn add(&mut self, nanoseconds: u64) {
        let step = (nanoseconds.max(1) as f64).log2() * STEPS;
        *self.0.entry(step.round() as u16).or_default() += 1;
    }

    pub fn count(&self) -> u64 {
        self.0.values().sum()
    }

    /// The time in microseconds that a share of them does not exceed, as exact as a step is.
    pub fn quantile(&self, share: f64) -> f64 {
        let wanted = (self.count() as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        let step = self.0.iter().find(|(_, n)| {
            seen += **n;
            seen >= wanted
        });
        step.map_or(0.0, |(step, _)| (f64::from(*step) / STEPS).exp2() / 1e3)
    }

    fn merge(&mut self, other: &Times) {
        other.0.iter().for_each(|(step, n)| *self.0.entry(*step).or_default() += n);
    }
}

/// Messages of one direction and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Class {
    /// The bytes of a post, rounded up to a power of two.
    pub bytes: u64,
    pub receives: bool,
}

/// The times of all messages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<(Class, Times)>", into = "Vec<(Class, Times)>")]
pub struct Latencies(BTreeMap<Class, Times>);

impl From<Vec<(Class, Times)>> for Latencies {
    fn from(all: Vec<(Class, Times)>) -> Self {
        Latencies(all.into_iter().collect())
    }
}

impl From<Latencies> for Vec<(Class, Times)> {
    fn from(all: Latencies) -> Self {
        all.0.into_iter().collect()
    }
}

impl Latencies {
    pub fn add(&mut self, role: Role, bytes: usize, nanoseconds: u64) {
        let bytes = if bytes == 0 { 0 } else { (bytes as u64).next_power_of_two() };
        self.0.entry(Class { bytes, receives: role == Role::Receive }).or_default().add(nanoseconds);
    }

    pub fn merge(&mut self, other: &Latencies) {
        other.0.iter().for_each(|(class, times)| self.0.entry(*class).or_default().merge(times));
    }

    pub fn classes(&self) -> impl Iterator<Item = Class> {
        self.0.keys().copied()
    }

    pub fn of(&self, class: Class) -> Option<&Times> {
        self.0.get(&class)
    }
}

/// What one process reports of a replay.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Seconds from the first post to the end of the last request.
    pub seconds: f64,
    /// CPU seconds of the process meanwhile.
    pub cpu: f64,
    /// How often its threads, but for those of the replay, went to sleep meanwhile.
    pub sleeps: u64,
    /// Bytes of messages that were received and right where they were looked at.
    pub received: u64,
    pub latencies: Latencies,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_times_of_all_processes_within_a_step() {
        let (mut a, mut b) = (Latencies::default(), Latencies::default());
        (1..=50).for_each(|us| a.add(Role::Send, 1000, us * 1000));
        (51..=100).for_each(|us| b.add(Role::Send, 1024, us * 1000));
        b.add(Role::Receive, 0, 7);
        a.merge(&b);
        let classes: Vec<_> = a.classes().map(|c| (c.bytes, c.receives)).collect();
        assert_eq!(classes, [(0, true), (1024, false)]);
        let times = a.of(Class { bytes: 1024, receives: false }).unwrap();
        assert_eq!(times.count(), 100);
        for (share, us) in [(0.5, 50.0), (0.9, 90.0), (1.0, 100.0)] {
            let found = times.quantile(share);
            assert!((found / us).log2().abs() <= 1.0 / STEPS, "{share}: {found}, expected {us}");
        }
        let again: Latencies = serde_json::from_str(&serde_json::to_string(&a).unwrap()).unwrap();
        assert_eq!(again, a);
    }
}
