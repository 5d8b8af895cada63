//! The sequence of faults that a seed gives.
//!
//! **The rule for faults of the network.** There are none yet. Those that come (a link of a network device set down, packets
//! delayed or dropped) must never touch the initial network namespace of a host: they are made inside a guest, or in a network
//! namespace that this command made itself. [`Kind`] is where such a fault is added, and [`Plan::new`] is where it
//! must be left out unless this process runs in such a namespace.

use std::time::Duration;

/// What is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The link of a queue pair, at one end.
    Break,
    /// The link of a queue pair, at both ends at once.
    BreakBoth,
    /// The link of a queue pair, several times in a row at either end.
    Burst,
    /// A rank gets SIGSTOP, and SIGCONT later.
    Stop,
    /// The link of a queue pair, while the rank at its other end is stopped.
    StopBreak,
    /// A rank gets SIGKILL. Ends the job by design.
    Kill,
    /// A rank ends all its queue pairs. Ends the job by design.
    Abort,
    /// The proxy process gets SIGKILL, and another one takes over.
    KillProxy,
    /// The socket between two ranks is reset, while their link is replaced.
    Cut,
    /// Bytes between two ranks' sockets are held back in both directions, while their link is replaced.
    Delay,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Break => "break",
            Kind::BreakBoth => "break-both",
            Kind::Burst => "burst",
            Kind::Stop => "stop",
            Kind::StopBreak => "stop-break",
            Kind::Kill => "kill",
            Kind::Abort => "abort",
            Kind::KillProxy => "kill-proxy",
            Kind::Cut => "cut",
            Kind::Delay => "delay",
        }
    }
}

/// One break of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Break {
    /// From the break before.
    pub gap: Duration,
    /// At the peer's end, not at the rank's.
    pub at_peer: bool,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// From the end of the fault before.
    pub gap: Duration,
    pub kind: Kind,
    /// The rank that is hit, or at whose end a link breaks.
    pub rank: u32,
    /// The other end of the link.
    pub peer: u32,
    /// The breaks of links. Those of [`Kind::Cut`] and [`Kind::Delay`] come before the socket's fault and behind it.
    pub breaks: Vec<Break>,
    /// How long a rank is stopped, or bytes are held back.
    pub hold: Duration,
}

/// What faults a run may make.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// The mean gap between two faults.
    pub every: Duration,
    pub ranks: u32,
    /// A rank is stopped for no longer.
    pub most_stop: Duration,
    /// Bytes are held back for no longer.
    pub most_delay: Duration,
    /// The engines run in a proxy process.
    pub proxy: bool,
    /// Another socket takes the place of one between two ranks that breaks.
    pub cuts: bool,
}

impl Bounds {
    /// Each kind of fault that the run may make, and how often of all weights together.
    fn weights(&self) -> Vec<(Kind, u64)> {
        if self.proxy {
            return PROXY.to_vec();
        }
        let mut weights = EMBEDDED.to_vec();
        weights.extend(self.cuts.then_some((Kind::Cut, 2)));
        weights
    }
}

/// The faults of a seed, one after the other.
pub struct Plan {
    state: u64,
    bounds: Bounds,
    weights: Vec<(Kind, u64)>,
}

/// With engines in the ranks.
const EMBEDDED: &[(Kind, u64)] = &[
    (Kind::Break, 8),
    (Kind::BreakBoth, 4),
    (Kind::Burst, 3),
    (Kind::Stop, 2),
    (Kind::StopBreak, 1),
    (Kind::Kill, 1),
    (Kind::Abort, 1),
    (Kind::Delay, 2),
];
/// With engines in a proxy process, links break with the proxy.
const PROXY: &[(Kind, u64)] = &[(Kind::KillProxy, 8), (Kind::Stop, 4), (Kind::Kill, 1), (Kind::Abort, 1)];
/// The shortest time that a rank is stopped, or bytes are held back.
const LEAST_HOLD: Duration = Duration::from_millis(20);
/// The longest gap between a break and the next one, or the fault of a socket.
const MOST_GAP: Duration = Duration::from_millis(30);

impl Plan {
    pub fn new(seed: u64, bounds: Bounds) -> Self {
        let weights = bounds.weights();
        Plan { state: seed, bounds, weights }
    }

    /// The next number of the sequence (splitmix64).
    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// A time from `least` to `most`.
    fn time(&mut self, least: Duration, most: Duration) -> Duration {
        let span = (most - least).as_nanos() as u64 + 1;
        least + Duration::from_nanos(self.draw() % span)
    }

    /// The next fault.
    pub fn next(&mut self) -> Fault {
        let Bounds { every, ranks, most_stop, most_delay, .. } = self.bounds;
        let gap = self.time(every / 2, every + every / 2);
        let mut left = self.draw() % self.weights.iter().map(|(_, weight)| weight).sum::<u64>();
        let mut kind = self.weights[0].0;
        for &(each, weight) in &self.weights {
            kind = each;
            if left < weight {
                break;
            }
            left -= weight;
        }
        let rank = (self.draw() % ranks as u64) as u32;
        let other = (self.draw() % (ranks as u64 - 1)) as u32;
        let peer = other + (other >= rank) as u32;
        let most_hold = if kind == Kind::Delay { most_delay } else { most_stop };
        let hold = self.time(LEAST_HOLD, most_hold.max(LEAST_HOLD));
        let later = |plan: &mut Self| Break {
            gap: plan.time(Duration::ZERO, MOST_GAP),
            at_peer: plan.draw() % 2 == 1,
        };
        let first = |at_peer| Break { gap: Duration::ZERO, at_peer };
        let breaks = match kind {
            Kind::Break | Kind::StopBreak => vec![first(false)],
            Kind::BreakBoth => vec![first(false), first(true)],
            Kind::Burst => {
                let times = 2 + self.draw() % 5;
                (0..times).map(|_| later(self)).collect()
            }
            Kind::Cut | Kind::Delay => vec![first(false), later(self)],
            _ => Vec::new(),
        };
        Fault { gap, kind, rank, peer, breaks, hold }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const BOUNDS: Bounds = Bounds {
        every: Duration::from_secs(2),
        ranks: 4,
        most_stop: Duration::from_millis(500),
        most_delay: Duration::from_secs(1),
        proxy: false,
        cuts: false,
    };

    fn faults(seed: u64, bounds: &Bounds) -> Vec<Fault> {
        let mut plan = Plan::new(seed, bounds.clone());
        (0..500).map(|_| plan.next()).collect()
    }

    #[test]
    fn one_seed_gives_the_same_faults_twice_and_another_seed_gives_others() {
        assert_eq!(faults(7, &BOUNDS), faults(7, &BOUNDS));
        assert_ne!(faults(7, &BOUNDS), faults(8, &BOUNDS));
    }

    #[test]
    fn faults_have_every_kind_and_stay_within_their_bounds() {
        for bounds in [BOUNDS, Bounds { proxy: true, ..BOUNDS }, Bounds { cuts: true, ..BOUNDS }] {
            let faults = faults(1, &bounds);
            let kinds: BTreeSet<Kind> = faults.iter().map(|fault| fault.kind).collect();
            assert_eq!(kinds, bounds.weights().iter().map(|(kind, _)| *kind).collect());
            assert_eq!(kinds.contains(&Kind::Cut), bounds.cuts);
            for fault in faults {
                assert!(fault.rank < 4 && fault.peer < 4 && fault.rank != fault.peer, "{fault:?}");
                assert!((Duration::from_secs(1)..=Duration::from_secs(3)).contains(&fault.gap), "{fault:?}");
                let most = if fault.kind == Kind::Delay { bounds.most_delay } else { bounds.most_stop };
                assert!((LEAST_HOLD..=most).contains(&fault.hold), "{fault:?}");
            }
        }
    }
}
