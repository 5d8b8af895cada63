//! What a run counted, and its summary.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use super::fault::Kind;

/// Counts of a run.
#[derive(Default)]
pub struct Tally {
    /// Messages that a kernel has taken and checked.
    pub messages: u64,
    /// Links that carried queue pairs: the first one of each, and each that took the place of one that broke.
    pub epochs: u64,
    pub by_kind: BTreeMap<Kind, u64>,
    /// Faults after which messages moved again, without a new start of the ranks.
    pub recovered: u64,
    pub lost: u64,
    pub doubled: u64,
    pub wrong: u64,
    /// By kind, of each fault that broke a link while both ranks ran: from the last break to the next delivery. Of each proxy
    /// that was killed, and each disturbance of a network device: from the kill, or the disturbance's end, until all ranks have told of
    /// deliveries behind that.
    times: BTreeMap<Kind, Vec<Duration>>,
}

/// The time, in milliseconds, that `percent` of some times did not exceed.
fn percentile<'a>(times: impl IntoIterator<Item = &'a Duration>, percent: usize) -> Option<f64> {
    let mut times: Vec<_> = times.into_iter().collect();
    times.sort();
    let at = (times.len() * percent).div_ceil(100).max(1) - 1;
    times.get(at).map(|time| (time.as_secs_f64() * 1e6).round() / 1e3)
}

impl Tally {
    /// Whether every message arrived once, in order and whole.
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.doubled == 0 && self.wrong == 0
    }

    fn faults(&self) -> u64 {
        self.by_kind.values().sum()
    }

    /// After a fault of a kind messages moved again after this time.
    pub fn back(&mut self, kind: Kind, time: Duration) {
        self.times.entry(kind).or_default().push(time);
    }

    /// The recovery time, in milliseconds, that `percent` of the faults of links alone, or of the proxy, did not exceed.
    fn percentile(&self, percent: usize) -> Option<f64> {
        let kinds = [Kind::Break, Kind::BreakBoth, Kind::Burst, Kind::KillProxy];
        percentile(kinds.iter().filter_map(|kind| self.times.get(kind)).flatten(), percent)
    }

    pub fn json(&self) -> Value {
        let by_kind: BTreeMap<_, _> = self.by_kind.iter().map(|(kind, n)| (kind.name(), n)).collect();
        let times = self.times.iter().map(|(kind, times)| {
            let [p50, max] = [50, 100].map(|percent| percentile(times, percent));
            (kind.name(), json!({ "p50_ms": p50, "max_ms": max }))
        });
        let times: BTreeMap<_, _> = times.collect();
        json!({
            "messages": self.messages, "epochs": self.epochs, "faults": self.faults(), "by_kind": by_kind,
            "recovered": self.recovered, "lost": self.lost, "doubled": self.doubled, "wrong": self.wrong,
            "p50_ms": self.percentile(50), "p99_ms": self.percentile(99), "max_ms": self.percentile(100),
            "times": times,
        })
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by_kind: Vec<String> =
            self.by_kind.iter().map(|(kind, n)| format!("{} {n}", kind.name())).collect();
        writeln!(f, "messages  {} over {} links", self.messages, self.epochs)?;
        writeln!(f, "faults    {} ({})", self.faults(), by_kind.join(", "))?;
        write!(f, "recovered {}", self.recovered)?;
        if let (Some(p50), Some(p99), Some(max)) =
            (self.percentile(50), self.percentile(99), self.percentile(100))
        {
            write!(f, "; from a break to the next delivery p50 {p50} ms, p99 {p99} ms, at most {max} ms")?;
        }
        write!(f, "\nlost      {}, doubled {}, wrong {}", self.lost, self.doubled, self.wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured_and_null_without_any() {
        let mut tally = Tally::default();
        assert_eq!(tally.json()["p50_ms"], Value::Null);
        (1..=200).rev().for_each(|ms| tally.back(Kind::Break, Duration::from_millis(ms)));
        (1..=3).for_each(|s| tally.back(Kind::Delay, Duration::from_secs(s)));
        let json = tally.json();
        assert_eq!(
            ["p50_ms", "p99_ms", "max_ms"].map(|name| json[name].as_f64()),
            [Some(100.0), Some(198.0), Some(200.0)]
        );
        assert_eq!(json["times"]["delay"], json!({ "p50_ms": 2000.0, "max_ms": 3000.0 }));
    }
}
