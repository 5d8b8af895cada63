//! What a run counted, and its summary.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::children::Traffic;
use super::fault::Kind;

/// Counts of messages, added up over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    pub sent: u64,
    /// Messages that a kernel has taken and checked.
    pub taken: u64,
    pub lost: u64,
    pub doubled: u64,
    pub wrong: u64,
}

impl Total {
    pub fn of<'a>(traffic: impl IntoIterator<Item = &'a Traffic>) -> Self {
        let mut all = Total::default();
        for &Traffic { sent, taken, lost, doubled, wrong, .. } in traffic {
            all.add(&Total { sent, taken, lost, doubled, wrong });
        }
        all
    }

    pub fn add(&mut self, more: &Total) {
        self.sent += more.sent;
        self.taken += more.taken;
        self.lost += more.lost;
        self.doubled += more.doubled;
        self.wrong += more.wrong;
    }

    /// Whether every message arrived once, in order and whole.
    fn is_clean(&self) -> bool {
        self.lost == 0 && self.doubled == 0 && self.wrong == 0
    }
}

/// Checks that each rank has taken as many messages of each other one as that one has sent to it.
pub fn all_arrived(all: &BTreeMap<u32, Vec<Traffic>>) -> Result<()> {
    for (rank, traffic) in all {
        for Traffic { peer, taken, .. } in traffic {
            let theirs = all.get(peer).into_iter().flatten().find(|theirs| theirs.peer == *rank);
            let sent = theirs.map_or(0, |theirs| theirs.sent);
            ensure!(
                sent == *taken,
                "rank {peer} sent {sent} messages to rank {rank}, which has taken {taken}"
            );
        }
    }
    Ok(())
}

/// Counts of a run.
#[derive(Default)]
pub struct Tally {
    /// Counts of the ranks that this process started.
    pub own: Total,
    /// Counts of all ranks of the job, where others ran elsewhere, as exchanged at the end.
    pub all: Option<Total>,
    /// Links that carried queue pairs: the first one of each, and each that took the place of one that broke.
    pub epochs: u64,
    pub by_kind: BTreeMap<Kind, u64>,
    /// Faults after which messages moved again, without a new start of the ranks.
    pub recovered: u64,
    /// By kind, of each fault that broke a link while both ranks ran: from the last break to the next delivery. Of each proxy
    /// that was killed, and each disturbance of a network device: from the kill, or the disturbance's end, until all ranks have told of
    /// deliveries after that.
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
        self.own.is_clean() && self.all.is_none_or(|all| all.is_clean())
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
        let Total { taken, lost, doubled, wrong, .. } = self.own;
        let mut said = json!({
            "messages": taken, "epochs": self.epochs, "faults": self.faults(), "by_kind": by_kind,
            "recovered": self.recovered, "lost": lost, "doubled": doubled, "wrong": wrong,
            "p50_ms": self.percentile(50), "p99_ms": self.percentile(99), "max_ms": self.percentile(100),
            "times": times,
        });
        if let Some(Total { sent, taken, lost, doubled, wrong }) = self.all {
            said["all"] =
                json!({ "sent": sent, "messages": taken, "lost": lost, "doubled": doubled, "wrong": wrong });
        }
        said
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by_kind: Vec<String> =
            self.by_kind.iter().map(|(kind, n)| format!("{} {n}", kind.name())).collect();
        writeln!(f, "messages  {} over {} links", self.own.taken, self.epochs)?;
        writeln!(f, "faults    {} ({})", self.faults(), by_kind.join(", "))?;
        write!(f, "recovered {}", self.recovered)?;
        if let (Some(p50), Some(p99), Some(max)) =
            (self.percentile(50), self.percentile(99), self.percentile(100))
        {
            write!(f, "; from a break to the next delivery p50 {p50} ms, p99 {p99} ms, at most {max} ms")?;
        }
        let Total { lost, doubled, wrong, .. } = self.own;
        write!(f, "\nlost      {lost}, doubled {doubled}, wrong {wrong}")?;
        if let Some(Total { sent, taken, lost, doubled, wrong }) = self.all {
            write!(
                f,
                "\nall ranks sent {sent}, took {taken}, lost {lost}, doubled {doubled}, wrong {wrong}"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_were_sent_and_not_taken_or_taken_and_not_sent_are_told() {
        let of = |peer, sent, taken| vec![Traffic { peer, sent, taken, ..Default::default() }];
        let run = |sent, taken| all_arrived(&BTreeMap::from([(0, of(1, sent, 7)), (1, of(0, 7, taken))]));
        assert!(run(5, 5).is_ok());
        for (sent, taken) in [(5, 4), (4, 5)] {
            let said = run(sent, taken).unwrap_err().to_string();
            assert_eq!(said, format!("rank 0 sent {sent} messages to rank 1, which has taken {taken}"));
        }
        // A rank that told nothing.
        assert!(all_arrived(&BTreeMap::from([(0, of(1, 5, 7))])).is_err());
    }

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
