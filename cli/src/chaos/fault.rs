//! The sequence of faults that a seed gives.

use std::time::Duration;

use super::net::Netem;

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
    /// A network device is set down, and up again later.
    LinkDown,
    /// Packets over a network device are lost and late for a while.
    Netem,
}

impl Kind {
    /// Whether a fault of this kind needs no process but one rank's, and ends no job.
    fn is_of_one_rank(self) -> bool {
        !matches!(self, Kind::BreakBoth | Kind::StopBreak | Kind::Kill | Kind::Abort)
    }

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
            Kind::LinkDown => "link-down",
            Kind::Netem => "netem",
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
    /// The breaks of links. Those of [`Kind::Cut`] and [`Kind::Delay`] come before the socket's fault and after it.
    pub breaks: Vec<Break>,
    /// How long a rank is stopped, bytes are held back, or a network device is disturbed.
    pub hold: Duration,
    /// The network device of [`Kind::LinkDown`] and [`Kind::Netem`].
    pub link: usize,
    /// How packets suffer.
    pub netem: Netem,
}

/// The faults that a run may make.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// The mean gap between two faults.
    pub every: Duration,
    pub ranks: u32,
    /// The one rank that faults are made of, where the others run elsewhere.
    pub own: Option<u32>,
    /// A rank is stopped for no longer.
    pub most_stop: Duration,
    /// Bytes are held back for no longer.
    pub most_delay: Duration,
    /// The engines run in a proxy process.
    pub proxy: bool,
    /// Another socket takes the place of one between two ranks that breaks.
    pub cuts: bool,
    /// How many network devices may be disturbed.
    pub links: usize,
    /// A network device is disturbed for no longer.
    pub most_away: Duration,
}

impl Bounds {
    /// Each kind of fault that the run may make, and how often of all weights together.
    fn weights(&self) -> Vec<(Kind, u64)> {
        let mut weights = if self.proxy { PROXY.to_vec() } else { EMBEDDED.to_vec() };
        if self.own.is_some() {
            weights.retain(|(kind, _)| kind.is_of_one_rank());
        }
        if self.proxy {
            return weights;
        }
        weights.extend(self.cuts.then_some((Kind::Cut, 2)));
        if self.links > 0 {
            weights.extend([(Kind::LinkDown, 4), (Kind::Netem, 4)]);
        }
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
/// The shortest time that a network device is disturbed.
const LEAST_AWAY: Duration = Duration::from_millis(200);
/// The most that packets are late, and of how many of 100 one is lost where not all are.
const MOST_LATE: Duration = Duration::from_millis(20);
const MOST_LOSS: u64 = 20;
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
        let Bounds { every, ranks, own, most_stop, most_delay, most_away, links, .. } = self.bounds;
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
        let drawn = (self.draw() % ranks as u64) as u32;
        let rank = own.unwrap_or(drawn);
        let other = (self.draw() % (ranks as u64 - 1)) as u32;
        let peer = other + (other >= rank) as u32;
        let (least_hold, most_hold) = match kind {
            Kind::Delay => (LEAST_HOLD, most_delay),
            Kind::LinkDown | Kind::Netem => (LEAST_AWAY, most_away),
            _ => (LEAST_HOLD, most_stop),
        };
        let hold = self.time(least_hold, most_hold.max(least_hold));
        let (mut link, mut netem) = (0, Netem { loss: 0, delay: Duration::ZERO });
        if matches!(kind, Kind::LinkDown | Kind::Netem) {
            link = (self.draw() % links as u64) as usize;
            let loss = if self.draw().is_multiple_of(2) { 100 } else { 1 + (self.draw() % MOST_LOSS) as u32 };
            netem = Netem { loss, delay: self.time(Duration::ZERO, MOST_LATE) };
        }
        let later = |plan: &mut Self| Break {
            gap: plan.time(Duration::ZERO, MOST_GAP),
            at_peer: plan.draw() % 2 == 1 && own.is_none(),
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
        Fault { gap, kind, rank, peer, breaks, hold, link, netem }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const BOUNDS: Bounds = Bounds {
        every: Duration::from_secs(2),
        ranks: 4,
        own: None,
        most_stop: Duration::from_millis(500),
        most_delay: Duration::from_secs(1),
        proxy: false,
        cuts: false,
        links: 0,
        most_away: Duration::from_secs(3),
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
        let proxy = Bounds { proxy: true, ..BOUNDS };
        let sockets = Bounds { cuts: true, links: 2, ..BOUNDS };
        let host = Bounds { own: Some(2), ..sockets.clone() };
        let proxy_of_host = Bounds { own: Some(0), ..proxy.clone() };
        for bounds in [BOUNDS, proxy, sockets, host, proxy_of_host] {
            let faults = faults(1, &bounds);
            let kinds: BTreeSet<Kind> = faults.iter().map(|fault| fault.kind).collect();
            assert_eq!(kinds, bounds.weights().iter().map(|(kind, _)| *kind).collect());
            assert_eq!(kinds.contains(&Kind::Cut), bounds.cuts);
            assert_eq!(kinds.contains(&Kind::Kill), bounds.own.is_none());
            assert_eq!(kinds.contains(&Kind::LinkDown), bounds.links > 0);
            for fault in faults {
                assert!(
                    bounds
                        .own
                        .is_none_or(|own| fault.rank == own && fault.breaks.iter().all(|each| !each.at_peer))
                );
                assert!(fault.rank < 4 && fault.peer < 4 && fault.rank != fault.peer, "{fault:?}");
                assert!((Duration::from_secs(1)..=Duration::from_secs(3)).contains(&fault.gap), "{fault:?}");
                let (least, most) = match fault.kind {
                    Kind::Delay => (LEAST_HOLD, bounds.most_delay),
                    Kind::LinkDown | Kind::Netem => (LEAST_AWAY, bounds.most_away),
                    _ => (LEAST_HOLD, bounds.most_stop),
                };
                assert!((least..=most).contains(&fault.hold), "{fault:?}");
                assert!(fault.link <= bounds.links.saturating_sub(1) && fault.netem.loss <= 100, "{fault:?}");
            }
        }
    }
}
