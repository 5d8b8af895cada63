//! What a seed decides before a run begins: the ranks, the queue pairs between them, their rings, how their programs
//! behave, and the faults. A plan can be cut down, which is how a failing run is made smaller: what is left keeps its
//! numbers and its sizes.

use pushgate_driver_shim::segment::Geometry;

use super::random::Random;

/// Nanoseconds of a microsecond, a millisecond, a second.
pub(super) const US: u64 = 1_000;
pub(super) const MS: u64 = 1_000_000;
pub(super) const S: u64 = 1_000_000_000;
/// The time of what does not happen.
pub(super) const NEVER: u64 = u64::MAX;

/// How long a call that sets a queue pair up waits for the peer's first answer, and then for the rest.
pub(super) const SET_UP: u64 = 400 * MS;

/// Most ranks of a cluster.
pub const MOST_RANKS: u32 = 16;

/// What of a seed's plan is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Fewest and most ranks.
    pub ranks: (u32, u32),
    /// The queue pairs that are made, by their numbers. `None`: all of them.
    pub qps: Option<Vec<u32>>,
    /// The faults that happen, by their numbers. `None`: all of them.
    pub faults: Option<Vec<u32>>,
    /// Most messages of one direction of a queue pair.
    pub messages: u32,
    /// Another schedule of the same plan.
    pub salt: u64,
    /// All queue pairs go over TCP, whatever the plan says.
    pub tcp: bool,
}

impl Default for Cut {
    fn default() -> Self {
        Cut { ranks: (2, MOST_RANKS), qps: None, faults: None, messages: u32::MAX, salt: 0, tcp: false }
    }
}

/// What carries a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    Local,
    /// With immediate data or without.
    Verbs {
        imm: bool,
    },
    /// Several links, which carry stripes of messages.
    Rails {
        rails: u8,
    },
    /// Links over several RDMA devices, which carry stripes of messages.
    Devices {
        devices: u8,
    },
    /// The number of streams, the bytes of a part, and whether payload has checksums.
    Tcp {
        streams: u8,
        part: u32,
        checksum: bool,
        /// SENDs that may come before their receives.
        ahead: u32,
    },
}

/// How an end's program takes what comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// Gives every message back soon.
    Prompt,
    /// Gives back one message at a time, milliseconds apart.
    Slow,
    /// Gives back all that it holds, now and then.
    Bursts,
}

/// Which receives an end's program posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posts {
    /// None: a SEND lies where its sender put it, until the program gives it back.
    Nothing,
    /// Receives of any tag.
    AnyTag,
    /// Receives of the tags of the SENDs to come, in another order.
    Tags,
}

/// One end of a queue pair.
#[derive(Clone, Debug)]
pub(super) struct EndPlan {
    pub(super) rank: u32,
    pub(super) geometry: Geometry,
    /// Messages that the program posts.
    pub(super) messages: u32,
    pub(super) reader: Reader,
    pub(super) posts: Posts,
    /// The region that the peer puts to is a device's memory, reached by a mover.
    pub(super) device: bool,
    /// The peer's RDMA device may write regions of this end.
    pub(super) regions_written: bool,
    /// The device sees nothing of where the link puts what comes.
    pub(super) copies: bool,
    pub(super) in_place_share: u8,
    pub(super) slow_ns: u64,
    /// Usual time between two actions of the program, nanoseconds.
    pub(super) pace: u64,
    /// Of 100 messages, those that are PUTs, SIGNALs and NOPs. The others are SENDs.
    pub(super) mix: [u64; 3],
    /// Of 100 payloads, those in the WQE and those in a region.
    pub(super) ways: [u64; 2],
    /// Of 100 messages, those that want a completion.
    pub(super) signaled: u64,
    /// Of 100 WQEs, those whose words are stored one by one, in any order.
    pub(super) wordwise: u64,
    /// Longest payload, bytes.
    pub(super) longest: u32,
}

/// A queue pair.
#[derive(Clone, Debug)]
pub(super) struct QpPlan {
    pub(super) number: u32,
    pub(super) carrier: Carrier,
    /// A link that breaks is replaced.
    pub(super) recovers: bool,
    pub(super) ends: [EndPlan; 2],
}

impl QpPlan {
    /// Whether another engine can go on with an end whose engine died.
    pub(super) fn is_kept(&self) -> bool {
        self.carrier == Carrier::Local && self.recovers
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// The link of an end breaks at its so-many-th call from now.
    Break { calls: u32 },
    /// An end hears the peer's counts of some time ago, `times` times.
    OldCounts { times: u32 },
    /// What arrives at an end is held back for `looks` looks.
    Delay { looks: u32 },
    /// The link of an end breaks `calls` calls from now, and so do the next `again` links that take its place. Of
    /// the calls that make those links, some fail: from the lowest bit of `fails` on.
    Breaks { calls: u32, again: u32, fails: u32 },
    /// The channel beside the links loses the frames that are on their way to an end, and the next `frames`.
    Lose { frames: u32 },
    /// The link of one rail breaks, at its so-many-th call from now.
    Rail { rail: u8, calls: u32 },
    /// A stream of the link over TCP breaks after `bytes` more bytes from this end; of the attempts to meet again some fail.
    Stream { bytes: u32, refused: u32 },
    /// The queue pair of an end's RDMA device fails. Over `local` and TCP the link breaks, over rails the first rail's.
    Device,
    /// A rank's engine dies after its so-many-th store from now, and another one takes its place. So do `again` of those. `both`:
    /// the engine of the other end's rank dies, too. `down`: the stores count from the break of the end's link, which breaks now.
    Restart { stores: u32, again: u8, both: bool, down: bool },
    /// A rank's engine makes no pass for so long, nanoseconds.
    StopEngine { time: u64 },
    /// An end's program does nothing for so long, nanoseconds.
    StopProgram { time: u64 },
    /// A rank is gone from one moment to the next.
    Die,
    /// An end's program ends the queue pair.
    Abort,
    /// An end's program takes a WQE slot, never publishes it, and goes on.
    Hole,
    /// An end's program writes garbage where it may write.
    LyingProgram { seed: u64 },
    /// An end's engine writes garbage where it may write.
    LyingEngine { seed: u64 },
}

/// A fault.
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultPlan {
    pub(super) number: u32,
    /// When: after this share, in 1024ths, of all messages was posted.
    pub(super) after: u32,
    /// The end: the queue pair's number, and which of its ends.
    pub(super) qp: u32,
    pub(super) end: usize,
    pub(super) kind: FaultKind,
}

/// What goes wrong while a queue pair is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SetUpKind {
    /// An end's program calls so much later than the other, nanoseconds.
    Late { by: u64 },
    /// An end's call fails, and its program calls again after so long, nanoseconds.
    Repeat { pause: u64 },
    /// An end's call fails, and its program does not call again.
    GiveUp,
    /// An end does nothing for so long, nanoseconds.
    Stop { time: u64 },
    /// An end's rank is gone from one moment to the next.
    Die,
    /// An end hears earlier frames again, `times` times.
    Echo { times: u32 },
    /// An end forges frames.
    Lie { seed: u64 },
}

impl SetUpKind {
    /// Whether the other end may have given up before this one calls.
    pub(super) fn is_too_late(self) -> bool {
        matches!(self, SetUpKind::Late { by } if by > SET_UP * 3 / 5)
    }
}

/// A fault while a queue pair is set up.
#[derive(Clone, Copy, Debug)]
pub(super) struct SetUpFault {
    pub(super) number: u32,
    /// The end: the queue pair's number, and which of its ends.
    pub(super) qp: u32,
    pub(super) end: usize,
    /// After this number of events of this end's set-up.
    pub(super) after: u32,
    pub(super) kind: SetUpKind,
}

/// What an engine is like.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodePlan {
    /// Usual time of a pass, nanoseconds.
    pub(super) pace: u64,
    /// The producers can ring, so the engine may block.
    pub(super) doorbell: bool,
    /// There is a core to spare for spinning.
    pub(super) alone: bool,
}

/// A run, as its seed wants it.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) salt: u64,
    pub(super) nodes: Vec<NodePlan>,
    pub(super) qps: Vec<QpPlan>,
    pub(super) faults: Vec<FaultPlan>,
    /// Faults while queue pairs are set up.
    pub(super) set_up: Vec<SetUpFault>,
    /// Messages of a pair of core machines whose link breaks and is replaced (`replay`); 0: there is none.
    pub(super) replay: u32,
}

impl Plan {
    /// The plan of `seed`, cut down.
    pub(super) fn new(seed: u64, cut: &Cut) -> Plan {
        let mut random = Random::new(seed, 1);
        let ranks = ranks(&mut random, cut.ranks);
        let rdma = random.percent(if ranks <= 4 { 45 } else { 25 });
        let pairs = pairs(&mut random, ranks);
        let whole = random.within(300, 900) as u32;
        let each = (whole / (2 * pairs.len() as u32)).max(6);
        let mut qps: Vec<QpPlan> = pairs
            .iter()
            .enumerate()
            .map(|(i, pair)| qp(seed, i as u32, *pair, (rdma, cut.tcp), each))
            .collect();
        let faults = match random.below(10) {
            0 => 0,
            1..5 => 1,
            5..8 => 2,
            _ => 3,
        };
        let mut faults: Vec<FaultPlan> = (0..faults).map(|i| fault(seed, i, qps.len() as u64)).collect();
        faults.extend(qps.iter().flat_map(|qp| rail_faults(seed, qp)));
        faults.extend(qps.iter().flat_map(|qp| link_faults(seed, qp)));
        faults.extend(restarts(seed, &qps));
        let mut set_up = set_up_faults(seed, qps.len() as u64);
        let replay = if random.one_in(3) { random.within(20, 120) as u32 } else { 0 };
        let nodes = (0..ranks)
            .map(|rank| {
                let mut random = Random::new(seed, 2_000 + rank as u64);
                let verbs = qps
                    .iter()
                    .any(|qp| qp.carrier != Carrier::Local && qp.ends.iter().any(|end| end.rank == rank));
                let pace = random.of(&[250, 600, 1_500, 4_000]);
                // The simulated RDMA device and the simulated streams wake nobody.
                let doorbell = !verbs && !random.one_in(8);
                // An engine that polls alone on its core spins for 2 ms: thousands of passes in which nothing happens.
                NodePlan { pace, doorbell, alone: doorbell && random.one_in(2) }
            })
            .collect();
        // What is left out changes nothing of what is left.
        if let Some(kept) = &cut.qps {
            qps.retain(|qp| kept.contains(&qp.number));
        }
        if let Some(kept) = &cut.faults {
            faults.retain(|fault| kept.contains(&fault.number));
            set_up.retain(|fault| kept.contains(&fault.number));
        }
        faults.retain(|fault| qps.iter().any(|qp| qp.number == fault.qp));
        set_up.retain(|fault| qps.iter().any(|qp| qp.number == fault.qp));
        for end in qps.iter_mut().flat_map(|qp| &mut qp.ends) {
            end.messages = end.messages.min(cut.messages);
        }
        Plan { seed, salt: cut.salt, nodes, qps, faults, set_up, replay: replay.min(cut.messages) }
    }

    /// The most RDMA devices over which stripes go; 0: over none.
    pub(super) fn devices(&self) -> usize {
        let each = self.qps.iter().map(|qp| match qp.carrier {
            Carrier::Devices { devices } => devices.into(),
            _ => 0,
        });
        each.max().unwrap_or(0)
    }

    /// Whether the engine of a rank dies and another one takes its place.
    pub(super) fn restarts(&self, rank: u32) -> bool {
        self.faults.iter().any(|fault| {
            let FaultKind::Restart { both, .. } = fault.kind else { return false };
            let qp = self.qps.iter().find(|qp| qp.number == fault.qp);
            qp.is_some_and(|qp| {
                qp.ends[fault.end].rank == rank || both && qp.ends[1 - fault.end].rank == rank
            })
        })
    }

    /// Messages of all programs.
    pub(super) fn messages(&self) -> u64 {
        self.qps.iter().flat_map(|qp| &qp.ends).map(|end| end.messages as u64).sum()
    }

    /// Ranks that have a queue pair.
    pub(super) fn ranks(&self) -> u32 {
        let has = |rank: &u32| self.qps.iter().flat_map(|qp| &qp.ends).any(|end| end.rank == *rank);
        (0..self.nodes.len() as u32).filter(has).count() as u32
    }
}

/// How many ranks: small clusters more often than large ones, and 16 in some 7 of 100.
fn ranks(random: &mut Random, (low, high): (u32, u32)) -> u32 {
    let drawn = match random.below(100) {
        0..45 => 2,
        45..63 => 3,
        63..76 => 4,
        76..87 => random.within(5, 8) as u32,
        87..93 => random.within(9, 15) as u32,
        _ => MOST_RANKS,
    };
    if (low..=high).contains(&drawn) { drawn } else { random.within(low.into(), high.into()) as u32 }
}

/// Which ranks have queue pairs with each other: a tree over all ranks, and some more. Two ranks may have several.
fn pairs(random: &mut Random, ranks: u32) -> Vec<(u32, u32)> {
    let mut pairs: Vec<_> = (1..ranks).map(|rank| (random.below(rank.into()) as u32, rank)).collect();
    for _ in 0..random.below(ranks as u64 / 2 + 2) {
        let a = random.below(ranks.into()) as u32;
        let b = (a + random.within(1, ranks as u64 - 1) as u32) % ranks;
        pairs.push((a, b));
    }
    pairs
}

fn geometry(random: &mut Random, rank: u32) -> Geometry {
    let tiny = random.one_in(4);
    let log = |random: &mut Random, low: u64, high: u64| {
        let high = if tiny { low + (high - low) / 3 } else { high };
        random.within(low, high) as u32
    };
    Geometry {
        window_log: log(random, 0, 7),
        slots_log: log(random, 1, 6),
        cq_log: log(random, 0, 6),
        rx_log: log(random, 1, 5),
        link_log: log(random, 1, 6),
        landing_log: log(random, 0, 7),
        signals: random.within(1, 4) as u32,
        rank,
    }
}

fn qp(seed: u64, number: u32, (a, b): (u32, u32), (rdma, all_tcp): (bool, bool), each: u32) -> QpPlan {
    let mut random = Random::new(seed, 10_000 + number as u64);
    let carrier = match rdma && random.percent(60) {
        true => {
            let imm = random.one_in(2);
            devices(seed, number).map_or(Carrier::Verbs { imm }, |devices| Carrier::Devices { devices })
        }
        false => rails(seed, number).map_or(Carrier::Local, |rails| Carrier::Rails { rails }),
    };
    let carrier = tcp(seed, number, all_tcp).unwrap_or(carrier);
    let ends = [a, b].map(|rank| {
        let few = random.one_in(12);
        EndPlan {
            rank,
            geometry: geometry(&mut random, rank),
            messages: if few {
                random.below(4) as u32
            } else {
                random.within(each as u64 / 2, each as u64 * 3 / 2) as u32
            },
            reader: random.of(&[
                Reader::Prompt,
                Reader::Prompt,
                Reader::Prompt,
                Reader::Slow,
                Reader::Bursts,
            ]),
            posts: random.of(&[Posts::Nothing, Posts::Nothing, Posts::AnyTag, Posts::Tags]),
            device: random.one_in(4),
            regions_written: !random.one_in(4),
            copies: random.one_in(6),
            in_place_share: random.of(&[0, 16, 128, 192, 255]),
            slow_ns: random.of(&[0, 50 * US, 2 * MS, u64::MAX]),
            pace: random.of(&[200, 500, 2_000, 10_000]),
            mix: random.of(&[[30, 15, 5], [0, 10, 2], [70, 10, 0], [10, 60, 10], [45, 5, 5]]),
            ways: random.of(&[[30, 20], [90, 0], [5, 0], [5, 60], [0, 0]]),
            signaled: random.of(&[0, 20, 50, 100]),
            wordwise: random.of(&[0, 5, 20, 60]),
            longest: random.of(&[64, 256, 700, 8192, 8192]),
        }
    });
    let replaced = matches!(carrier, Carrier::Local | Carrier::Verbs { .. } | Carrier::Tcp { .. });
    let recovers = replaced && !Random::new(seed, 60_000 + number as u64).one_in(6);
    QpPlan { number, carrier, recovers, ends }
}

/// Whether a queue pair goes over rails, one to three: one in five of those that would go over `local`.
fn rails(seed: u64, number: u32) -> Option<u8> {
    let mut random = Random::new(seed, 40_000 + number as u64);
    random.one_in(5).then(|| random.of(&[1, 2, 2, 3]))
}

/// Whether a queue pair goes over several RDMA devices: one in four of those that go over RDMA.
fn devices(seed: u64, number: u32) -> Option<u8> {
    let mut random = Random::new(seed, 90_000 + number as u64);
    random.one_in(4).then(|| random.of(&[2, 2, 3]))
}

/// Whether a queue pair goes over TCP: one in five.
fn tcp(seed: u64, number: u32, all: bool) -> Option<Carrier> {
    let mut random = Random::new(seed, 95_000 + number as u64);
    let carrier = Carrier::Tcp {
        streams: random.of(&[1, 1, 2, 4]),
        part: random.of(&[16, 64, 300, 1 << 16]),
        checksum: random.one_in(2),
        ahead: Random::new(seed, 96_000 + number as u64).of(&[0, 1, 3, 16]),
    };
    (all || random.one_in(5)).then_some(carrier)
}

/// Rails of a queue pair that break while it carries messages. Their numbers begin after those of all other faults.
fn rail_faults(seed: u64, qp: &QpPlan) -> Vec<FaultPlan> {
    let mut random = Random::new(seed, 50_000 + qp.number as u64);
    let rails = matches!(qp.carrier, Carrier::Rails { .. } | Carrier::Devices { .. });
    let count = if rails { random.below(4) as u32 } else { 0 };
    let fault = |i| FaultPlan {
        number: 200 + 4 * qp.number + i,
        after: random.within(20, 1000) as u32,
        qp: qp.number,
        end: random.below(2) as usize,
        kind: FaultKind::Rail { rail: random.below(3) as u8, calls: random.within(1, 60) as u32 },
    };
    (0..count).map(fault).collect()
}

/// Links of a queue pair that break while it carries messages, and are replaced. Their numbers begin after those of all
/// other faults.
fn link_faults(seed: u64, qp: &QpPlan) -> Vec<FaultPlan> {
    let mut random = Random::new(seed, 70_000 + qp.number as u64);
    let count = if qp.recovers { random.below(4) as u32 } else { 0 };
    let fault = |i| {
        let fails = if random.one_in(3) { random.below(256) as u32 } else { 0 };
        let (calls, again) = (random.of(&[1, 3, 10, 60, 200]), random.of(&[0, 0, 1, 3, 10]));
        let tcp = matches!(qp.carrier, Carrier::Tcp { .. });
        let kind = match random.one_in(3) {
            _ if tcp && random.one_in(2) => {
                let refused = if random.one_in(3) { random.below(4) as u32 } else { 0 };
                FaultKind::Stream { bytes: random.of(&[0, 1, 31, 96, 500, 4_000]), refused }
            }
            true => FaultKind::Lose { frames: random.below(6) as u32 },
            false => FaultKind::Breaks { calls: random.within(1, calls) as u32, again, fails },
        };
        FaultPlan {
            number: 400 + 4 * qp.number + i,
            after: random.within(20, 1000) as u32,
            qp: qp.number,
            end: random.below(2) as usize,
            kind,
        }
    };
    (0..count).map(fault).collect()
}

/// Engines that die and are replaced, in half of the runs: as those of a proxy process, whose queue pairs all go over `local`.
/// Their numbers begin after those of all other faults.
fn restarts(seed: u64, qps: &[QpPlan]) -> Vec<FaultPlan> {
    let mut random = Random::new(seed, 80_000);
    let local = |rank: u32| {
        let mut own = qps.iter().filter(|qp| qp.ends.iter().any(|end| end.rank == rank));
        own.all(|qp| qp.carrier == Carrier::Local)
    };
    let all = qps.iter().flat_map(|qp| [(qp, 0), (qp, 1)]);
    let ends: Vec<(&QpPlan, usize)> =
        all.filter(|(qp, end)| qp.is_kept() && local(qp.ends[*end].rank)).collect();
    if !random.one_in(2) || ends.is_empty() {
        return Vec::new();
    }
    let count = random.of(&[1, 2, 2, 3, 5]);
    let fault = |i: u32| {
        let (qp, end) = ends[random.below(ends.len() as u64) as usize];
        let both = random.one_in(4) && local(qp.ends[1 - end].rank);
        let (again, down) = (random.of(&[0, 0, 0, 1, 3]), random.one_in(3));
        // While a link is replaced there are few.
        let stores = if down { 6 } else { random.of(&[8, 60, 400]) };
        let stores = random.below(stores) as u32;
        let kind = FaultKind::Restart { stores, again, both, down };
        FaultPlan { number: 600 + i, after: random.within(20, 1000) as u32, qp: qp.number, end, kind }
    };
    (0..count).map(fault).collect()
}

fn fault(seed: u64, number: u32, qps: u64) -> FaultPlan {
    let mut random = Random::new(seed, 20_000 + number as u64);
    let kind = match random.below(100) {
        0..14 => FaultKind::Break { calls: random.within(1, 200) as u32 },
        14..26 => FaultKind::OldCounts { times: random.within(1, 300) as u32 },
        26..36 => FaultKind::Delay { looks: random.within(1, 300) as u32 },
        36..44 => FaultKind::Device,
        44..56 => FaultKind::StopEngine { time: random.within(MS, 900 * MS) },
        56..64 => FaultKind::StopProgram { time: random.within(MS, 900 * MS) },
        64..70 => FaultKind::Die,
        70..76 => FaultKind::Abort,
        76..82 => FaultKind::Hole,
        82..91 => FaultKind::LyingProgram { seed: random.next() },
        _ => FaultKind::LyingEngine { seed: random.next() },
    };
    FaultPlan {
        number,
        after: random.within(50, 1000) as u32,
        qp: random.below(qps) as u32,
        end: random.below(2) as usize,
        kind,
    }
}

/// Faults while queue pairs are set up: one in a quarter of the runs, two in a twelfth. Their numbers begin after those of
/// all other faults.
fn set_up_faults(seed: u64, qps: u64) -> Vec<SetUpFault> {
    let mut random = Random::new(seed, 3);
    let count = [1, 1, 1, 2].get(random.below(12) as usize).copied().unwrap_or(0);
    // Two faults meet at one queue pair more often than not.
    let qp = random.below(qps) as u32;
    (0..count)
        .map(|i| {
            let kind = match random.below(100) {
                0..10 => SetUpKind::Late { by: random.within(MS, SET_UP * 3 / 5) },
                10..18 => SetUpKind::Late { by: random.within(SET_UP / 2, SET_UP * 3) },
                18..44 => SetUpKind::Repeat { pause: random.of(&[0, 20 * US, MS, 100 * MS]) },
                44..50 => SetUpKind::GiveUp,
                50..62 => SetUpKind::Stop { time: random.within(MS, 2 * SET_UP) },
                62..70 => SetUpKind::Die,
                70..82 => SetUpKind::Echo { times: random.within(1, 20) as u32 },
                _ => SetUpKind::Lie { seed: random.next() },
            };
            let qp = if i > 0 && random.one_in(3) { random.below(qps) as u32 } else { qp };
            let (end, after) = (random.below(2) as usize, random.within(1, 8) as u32);
            SetUpFault { number: 100 + i, qp, end, after, kind }
        })
        .collect()
}
