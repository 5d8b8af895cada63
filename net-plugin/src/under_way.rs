//! How many bytes a process has under way in its windows, and how the connections that send share them.
//!
//! A GPU's stores to host memory go into the processor's last-level cache, but into a part of it alone: Intel's data direct
//! I/O takes two of the cache's ways unless it is set up otherwise. While all windows of a host that are in use fit into that
//! part, the other GPU's loads find the bytes there. Beyond that every byte crosses the memory bus twice more. Two GPUs do
//! not notice; four GPUs that send and receive at once lose a quarter of their speed (docs/benchmarks.md).
//!
//! So a connection keeps its payload among the first bytes of its window ([`Producer::use_window`]), as many as are its
//! share. The share follows from how many connections send at the time.
//!
//! [`Producer::use_window`]: pushgate_link::producer::Producer::use_window

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate::settings::{AutoOr, PluginSettings};
use pushgate_driver_shim::abi;
use pushgate_pcie_model::findings::Findings;
use pushgate_topology::{Sysfs, Topology};

use crate::path;
use crate::ranks::Ranks;

const UNIT: u64 = abi::PUSHGATE_UNIT as u64;

/// The part of the last-level cache that devices write into, as a divisor: two ways of sixteen.
const PART: u64 = 8;

/// Messages of the process after which it is counted anew which connections send. Of more connections this many are counted. Their
/// shares are so small then that each takes what two messages need.
const TURN: u16 = 256;

/// How many connections send. A connection counts from a message on until a whole turn has passed without one, so that the
/// share of a connection stays the same while others wait a moment for their receivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    /// The number of the turn.
    turn: u16,
    /// Messages in this turn.
    messages: u16,
    /// Connections that sent in the turn before.
    before: u16,
    /// Connections that have sent in this turn.
    now: u16,
}

impl Count {
    /// The count after a message of a connection that was counted last in turn `counted`.
    fn with_message(self, counted: Option<u16>) -> Count {
        let mut count = match self.messages < TURN {
            true => self,
            false => Count { turn: self.turn.wrapping_add(1), messages: 0, before: self.now, now: 0 },
        };
        count.messages += 1;
        if counted != Some(count.turn) {
            count.now = count.now.saturating_add(1);
        }
        count
    }

    fn connections(self) -> u64 {
        u64::from(self.before.max(self.now).max(1))
    }

    fn to_word(self) -> u64 {
        [self.turn, self.messages, self.before, self.now]
            .iter()
            .fold(0, |word, part| word << 16 | u64::from(*part))
    }

    fn of_word(word: u64) -> Self {
        let [turn, messages, before, now] = [48, 32, 16, 0].map(|shift| (word >> shift) as u16);
        Count { turn, messages, before, now }
    }
}

/// How much of the host's bound a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Bytes that the process may have under way, or each of its GPUs.
    pub most: u64,
    /// Each GPU that the process uses has so much: nobody said how many ranks the host has, so each GPU counts as one.
    pub each_gpu: bool,
}

/// The bound of a process, and how many of its connections send.
pub struct UnderWay {
    /// Units of 64 bytes in all windows of this process together, for each of `parts`; `None`: no bound.
    most: Option<u64>,
    /// There is a part for each GPU that the process uses, and otherwise one.
    each_gpu: bool,
    /// How many parts the process has. Relaxed: the share of a moment ago does no harm.
    parts: AtomicU64,
    /// A [`Count`]. Nothing else is read or written by way of it, so its accesses are relaxed: who sees it late takes the
    /// share of a moment ago.
    count: AtomicU64,
}

impl UnderWay {
    /// A process whose connections may have so much under way; `None`: as much as their windows have.
    pub fn new(bound: Option<Bound>) -> Arc<Self> {
        Arc::new(UnderWay {
            most: bound.map(|bound| bound.most / UNIT),
            each_gpu: bound.is_some_and(|bound| bound.each_gpu),
            parts: AtomicU64::new(1),
            count: AtomicU64::new(0),
        })
    }

    /// The process uses `gpus` GPUs.
    pub fn serves(&self, gpus: usize) {
        if self.each_gpu {
            self.parts.store(gpus.max(1) as u64, Ordering::Relaxed);
        }
    }
}

/// The share of one connection.
pub struct Share {
    of: Arc<UnderWay>,
    /// The turn in which the connection was counted last.
    counted: Option<u16>,
}

impl Share {
    /// The share of a connection that has not sent yet.
    pub fn new(of: Arc<UnderWay>) -> Self {
        Share { of, counted: None }
    }

    /// The units of its window that the connection uses now; `u64::MAX`: all of them.
    #[inline]
    pub fn units(&self) -> u64 {
        let count = || Count::of_word(self.of.count.load(Ordering::Relaxed));
        let parts = || self.of.parts.load(Ordering::Relaxed);
        self.of.most.map_or(u64::MAX, |most| most.saturating_mul(parts()) / count().connections())
    }

    /// The connection has sent a message through its window.
    #[inline]
    pub fn sent(&mut self) {
        if self.of.most.is_none() {
            return;
        }
        let mut word = self.of.count.load(Ordering::Relaxed);
        loop {
            let count = Count::of_word(word).with_message(self.counted);
            match self.of.count.compare_exchange_weak(
                word,
                count.to_word(),
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    self.counted = Some(count.turn);
                    return;
                }
                Err(found) => word = found,
            }
        }
    }
}

/// The bound for this process, and a sentence for the log.
pub fn bound(settings: &PluginSettings, topology: &Topology, ranks: Ranks) -> (Option<Bound>, String) {
    match settings.net_under_way {
        AutoOr::Is(most) => {
            let why = format!("{most} bytes under way in all windows, as net-under-way says");
            (Some(Bound { most, each_gpu: false }), why)
        }
        AutoOr::None => (None, "no bound of what is under way in all windows, as net-under-way says".into()),
        AutoOr::Auto => match path::findings(topology).filter(|found| !found.both.is_empty()) {
            Some(found) => of_probe(&found, ranks),
            None => of_cache(Sysfs::host().last_level_cache(), ranks),
        },
    }
}

/// The part of a process of what the host may have, `all` bytes, and a sentence that says where that comes from.
fn share(ranks: Ranks, all: u64, by: &str) -> (Option<Bound>, String) {
    let (most, each_gpu) = (all / u64::from(ranks.count()), matches!(ranks, Ranks::Gpus(_)));
    let among = match ranks {
        Ranks::Told(n) => format!("by {n} rank{} of this host", if n == 1 { "" } else { "s" }),
        Ranks::Gpus(n) => {
            format!(
                "by {n} GPU{} of this host, so much for each that the process uses",
                if n == 1 { "" } else { "s" }
            )
        }
    };
    let why = format!("{most} bytes under way in all windows: {by}, shared {among}");
    (Some(Bound { most, each_gpu }), why)
}

/// The bound where ranks share what a probe of this host found to cost nothing.
fn of_probe(found: &Findings, ranks: Ranks) -> (Option<Bound>, String) {
    match found.under_way(ranks.count()) {
        Some(all) => share(ranks, all, &format!("{all}, by the probe")),
        None => (None, "no bound of what is under way in all windows: the probe found none".into()),
    }
}

/// The bound where ranks share a last-level cache of `cache` bytes.
fn of_cache(cache: Option<u64>, ranks: Ranks) -> (Option<Bound>, String) {
    let Some(cache) = cache else {
        let why = "no bound of what is under way in all windows: the last-level cache's size is not known";
        return (None, why.into());
    };
    share(ranks, cache / PART, &format!("an eighth of the last-level cache of {cache} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_send_share_the_bound_until_a_turn_has_passed_without_a_message_of_theirs() {
        let all = UnderWay::new(Some(Bound { most: 8 << 20, each_gpu: false }));
        let mut shares: Vec<Share> = (0..4).map(|_| Share::new(all.clone())).collect();
        let units = |parts: u64| (8 << 20) / UNIT / parts;
        assert_eq!(shares[0].units(), units(1), "nobody has sent");
        for at in 0..4 {
            shares[at].sent();
            shares[at].sent();
            assert_eq!(shares[0].units(), units(at as u64 + 1), "counted once each");
        }
        // Two go on. The others count to the end of the next turn.
        let mut messages = 8;
        let mut seen = Vec::new();
        while seen.last() != Some(&units(2)) {
            shares[messages % 2].sent();
            messages += 1;
            assert!(messages < 4 * TURN as usize, "{seen:?}");
            seen.push(shares[3].units());
        }
        assert_eq!(messages, 2 * TURN as usize + 1);
        assert!(seen[..seen.len() - 1].iter().all(|share| *share == units(4)), "{seen:?}");
    }

    #[test]
    fn threads_that_send_at_once_are_all_counted() {
        let all = UnderWay::new(Some(Bound { most: 8 << 20, each_gpu: false }));
        let threads = 4;
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let mut share = Share::new(all.clone());
                // Together less than a turn.
                scope.spawn(move || (0..50).for_each(|_| share.sent()));
            }
        });
        let count = Count::of_word(all.count.load(Ordering::Relaxed));
        assert_eq!((count.messages, count.now), (50 * threads, threads));
    }

    #[test]
    fn a_count_is_the_same_behind_its_word() {
        let count = Count { turn: u16::MAX, messages: 2, before: 3, now: 0x1234 };
        assert_eq!(Count::of_word(count.to_word()), count);
        let full = Count { messages: TURN, ..count };
        assert_eq!(full.with_message(Some(u16::MAX)), Count { turn: 0, messages: 1, before: 0x1234, now: 1 });
    }

    #[test]
    fn without_a_bound_the_window_is_the_bound() {
        let mut share = Share::new(UnderWay::new(None));
        share.sent();
        assert_eq!(share.units(), u64::MAX);
    }

    #[test]
    fn the_bound_is_an_eighth_of_the_cache_for_all_ranks_of_the_host() {
        let (bound, why) = of_cache(Some(320 << 20), Ranks::Told(4));
        assert_eq!(bound, Some(Bound { most: 10 << 20, each_gpu: false }));
        assert!(why.contains("10485760 bytes") && why.contains("by 4 ranks of this host"), "{why}");
        assert_eq!(of_cache(None, Ranks::Told(4)).0, None);
    }

    #[test]
    fn where_no_launcher_counts_the_ranks_a_process_has_a_part_for_each_gpu_that_it_uses() {
        let (bound, why) = of_cache(Some(320 << 20), Ranks::Gpus(4));
        assert_eq!(bound, Some(Bound { most: 10 << 20, each_gpu: true }));
        assert!(why.contains("by 4 GPUs of this host, so much for each"), "{why}");
        for (each_gpu, parts) in [(true, [1, 1, 4]), (false, [1; 3])] {
            let all = UnderWay::new(Some(Bound { most: 10 << 20, each_gpu }));
            let share = Share::new(all.clone());
            let units = [0, 1, 4].map(|gpus| {
                all.serves(gpus);
                share.units()
            });
            assert_eq!(units, parts.map(|parts| parts * (10 << 20) / UNIT), "{each_gpu}");
        }
    }

    #[test]
    fn what_a_probe_found_to_cost_nothing_is_the_bound_of_all_ranks() {
        let mut text = r#"
            format = 1
            date = "2026-01-31T23:59:59Z"
            host = "a"
            executor = "cuda"
            driver = "CUDA 13.0"
            topology = "0123456789abcdef"
            worst_error = 0.1
            devices = []
        "#
        .to_owned();
        for (devices, mib, rate) in
            [(2, 32, 39.0), (2, 64, 39.0), (4, 16, 38.0), (4, 32, 38.0), (4, 64, 30.0)]
        {
            text += &format!("[[both]]\ndevices = {devices}\nbytes = {}\nrate = {rate:.1}\n", mib << 20);
        }
        let found = Findings::parse(&text).unwrap();
        let (bound, why) = of_probe(&found, Ranks::Told(4));
        assert_eq!(bound, Some(Bound { most: 8 << 20, each_gpu: false }));
        assert!(why.contains("33554432, by the probe"), "{why}");
        assert_eq!(of_probe(&found, Ranks::Told(2)).0, None, "two devices lost nothing");
    }

    #[test]
    fn a_setting_is_the_bound_of_the_process() {
        let of = |under_way| {
            let mut settings = PluginSettings::default();
            settings.net_under_way = under_way;
            bound(&settings, &Topology::default(), Ranks::Gpus(1)).0
        };
        assert_eq!(of(AutoOr::Is(3 << 20)), Some(Bound { most: 3 << 20, each_gpu: false }));
        assert_eq!(of(AutoOr::None), None);
    }
}
