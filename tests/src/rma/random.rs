//! Random operations over all contexts and peers, with a model that says what every byte and every signal must be.

use super::group::Group;
use super::rank::{Memory, Rank};
use super::scenario::Options;
use super::table::{ADD, Bytes, FORCE_SO, INC, NEVER_RESET, Ptr, Signal, Table};
use crate::Pause;
use crate::nccl::pair::{Buffer, Random};

/// Bytes of each rank's area at each target, and the same of what a rank gets.
const AREA: usize = 1 << 20;
/// Bytes that a rank shows to gets.
const WINDOW: usize = 64 << 10;
/// The most operations in flight; as many places for what is put.
const PLACES: usize = 96;
/// Bytes of a place.
const PLACE: usize = 64 << 10;
/// What no operation has written.
const UNTOUCHED: u8 = 0xee;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Put,
    /// A put, of nothing or of bytes, with a signal in the word of its source and context.
    Own(u64),
    /// A put, of nothing or of bytes, with a signal in the word that all ranks add to.
    Shared(u64),
    Get,
    Flush,
}

#[derive(Clone, Copy, Debug)]
struct Op {
    peer: usize,
    context: usize,
    kind: Kind,
    size: usize,
    /// Of a put: in the source's area at the peer. Of a get: in the rank's own.
    at: usize,
    /// Of a get: in the peer's window.
    from: usize,
    seed: u64,
}

impl Op {
    fn puts(&self) -> bool {
        !matches!(self.kind, Kind::Get | Kind::Flush)
    }

    /// The pattern of a put.
    fn bytes(&self) -> Vec<u8> {
        let mut r = Random(self.seed);
        let words = self.size.div_ceil(8);
        let mut all: Vec<u8> = (0..words).flat_map(|_| r.draw().to_le_bytes()).collect();
        all.truncate(self.size);
        all
    }
}

/// A value that a signal adds: 1 stands for INC.
fn value(r: &mut Random) -> u64 {
    if r.below(2) == 0 { 1 } else { 2 + r.draw() % (1 << 40) }
}

/// What a rank does in a round. Every rank derives every rank's operations.
fn plan(o: &Options, round: usize, source: usize, contexts: usize) -> Vec<Op> {
    let mut r =
        Random(o.seed ^ (round as u64) << 32 ^ (source as u64 + 1).wrapping_mul(0x5851_f42d_4c95_7f2d));
    let mut used = vec![0; o.ranks];
    let mut got = 0;
    let mut ops = Vec::new();
    for _ in 0..o.times {
        let peer = r.below(o.ranks);
        let size = match r.below(12) {
            0 => 0,
            1..6 => 1 + r.below(64),
            6..10 => 1 + r.below(4096),
            10 => 1 + r.below(PLACE),
            _ => 8 << r.below(10),
        };
        let size = size.min(o.max);
        let kind = match r.below(10) {
            0..5 => Kind::Put,
            5 | 6 => Kind::Own(value(&mut r)),
            7 => Kind::Shared(value(&mut r)),
            8 if o.table.has_get() => Kind::Get,
            9 if o.table.has_get() => Kind::Flush,
            _ => Kind::Put,
        };
        let mut op = Op { peer, context: r.below(contexts), kind, size, at: 0, from: 0, seed: r.draw() };
        let place = match kind {
            Kind::Get => {
                op.from = r.below(WINDOW - size + 1);
                &mut got
            }
            Kind::Flush => {
                op.size = 0;
                &mut got
            }
            _ => &mut used[peer],
        };
        op.at = *place + r.below(17);
        if op.at + op.size > AREA {
            (op.at, op.size) = (0, 0);
        } else {
            *place = op.at + op.size;
        }
        ops.push(op);
    }
    // So that the words tell when all has arrived.
    let last = |peer| {
        (0..contexts).map(move |context| Op {
            peer,
            context,
            kind: Kind::Own(1),
            size: 0,
            at: 0,
            from: 0,
            seed: 0,
        })
    };
    ops.extend((0..o.ranks).flat_map(last));
    ops
}

/// What arrives of one source on one context: its operations up to the last signal that was seen are checked.
struct Arriving {
    source: usize,
    word: usize,
    ops: Vec<Op>,
    checked: usize,
    sum: u64,
}

impl Arriving {
    /// Looks at the word, and checks the bytes of all puts before the signals that it announces. True if something came.
    fn look(&mut self, me: usize, base: u64, signals: &Memory, target: &Memory) -> bool {
        let told = signals.value(8 * self.word).wrapping_sub(base);
        let before = self.checked;
        while self.sum != told && self.checked < self.ops.len() {
            let op = self.ops[self.checked];
            if let Kind::Own(add) = op.kind {
                self.sum += add;
                assert!(
                    self.sum <= told,
                    "rank {me}: the word of rank {} says {told}, which its signals do not add up to",
                    self.source
                );
            }
            let here = target.buffer.read(self.source * AREA + op.at, op.size);
            assert!(here == op.bytes(), "rank {me}: a signal of rank {} came before {op:?}", self.source);
            self.checked += 1;
        }
        assert!(self.sum == told, "rank {me}: the word of rank {} says {told}, too much", self.source);
        self.checked > before
    }

    fn ended(&self) -> bool {
        self.checked == self.ops.len()
    }
}

struct Memories {
    source: Memory,
    target: Memory,
    got: Memory,
    window: Memory,
    /// Words for each rank and context, for signals that order.
    signals: Memory,
    /// The word that all ranks add to, which the owner resets.
    shared: Memory,
}

/// Rounds of random operations.
pub fn random(o: &Options, table: &Table, group: Group) {
    let mut rank = Rank::new(o, table, group, 2);
    let (ranks, contexts, kind) = (rank.ranks(), rank.all_contexts(0), rank.kind);
    let m = Memories {
        source: rank.memory(0, PLACES * PLACE, kind, 0),
        target: rank.memory(0, ranks * AREA, kind, 0),
        got: rank.memory(0, AREA, kind, 0),
        window: rank.memory(0, WINDOW, kind, 0),
        signals: rank.memory(0, 8 * ranks * contexts, kind, FORCE_SO | NEVER_RESET),
        shared: rank.memory(0, 8, kind, FORCE_SO),
    };
    // What the other ranks show.
    let windows: Vec<Buffer> = (0..ranks)
        .map(|peer| {
            let window = Buffer::new(WINDOW);
            window.fill(0, WINDOW, o.seed + peer as u64);
            window
        })
        .collect();
    m.window.buffer.fill(0, WINDOW, o.seed + rank.me() as u64);
    if rank.me() == 0 {
        println!("{}: seed {}, {ranks} ranks, {contexts} contexts", table.version.name(), o.seed);
    }
    let mut bases = vec![0u64; ranks * contexts];
    for round in 0..o.rounds {
        m.target.buffer.set(0, m.target.buffer.bytes(), UNTOUCHED);
        m.got.buffer.set(0, AREA, UNTOUCHED);
        m.shared.buffer.set_word(0, 0);
        rank.barrier();
        one(o, &rank, &m, &windows, &mut bases, round);
        rank.barrier();
    }
    rank.no_error();
    rank.end([m.source, m.target, m.got, m.window, m.signals, m.shared]);
}

fn one(o: &Options, rank: &Rank, m: &Memories, windows: &[Buffer], bases: &mut [u64], round: usize) {
    let (me, contexts) = (rank.me(), rank.all_contexts(0));
    let plans: Vec<Vec<Op>> = (0..rank.ranks()).map(|source| plan(o, round, source, contexts)).collect();
    let of = |source: usize, context: usize| {
        let mine = |op: &&Op| op.peer == me && op.context == context && op.puts();
        let ops = plans[source].iter().filter(mine).copied().collect();
        Arriving { source, word: source * contexts + context, ops, checked: 0, sum: 0 }
    };
    let mut arriving: Vec<Arriving> = (0..rank.ranks())
        .flat_map(|source| (0..contexts).map(move |context| (source, context)))
        .map(|(s, c)| of(s, c))
        .collect();
    let own = &plans[me];
    let mut r = Random(o.seed ^ me as u64 ^ 0xabcd);
    let mut free: Vec<usize> = (0..PLACES).collect();
    let mut pending: Vec<(Ptr, Op, usize)> = Vec::new();
    let (mut next, pause, mut last) = (0, Pause::default(), std::time::Instant::now());
    while next < own.len() || !pending.is_empty() || !arriving.iter().all(Arriving::ended) {
        let mut moved = false;
        for _ in 0..r.below(8) {
            if next == own.len() || free.is_empty() {
                break;
            }
            let place = free.swap_remove(r.below(free.len()));
            match begin(rank, m, own[next], place) {
                Some(request) => pending.push((request, own[next], place)),
                None => free.push(place),
            }
            (next, moved) = (next + 1, true);
        }
        // In any order.
        for _ in 0..r.below(8) {
            if pending.is_empty() {
                break;
            }
            let i = r.below(pending.len());
            let (request, op, place) = pending[i];
            let done = rank.test(0, request);
            if done.unwrap_or_else(|e| panic!("rank {me}: {op:?}: {e}: {:#?}", super::table::warnings())) {
                pending.swap_remove(i);
                ended(rank, m, windows, op, place);
                free.push(place);
                moved = true;
            }
        }
        for a in &mut arriving {
            moved |= a.look(me, bases[a.word], &m.signals, &m.target);
        }
        rank.progress();
        if moved {
            last = std::time::Instant::now();
        }
        assert!(
            last.elapsed() < crate::hang(),
            "rank {me}, seed {}, round {round}: no progress; {next} of {} begun, {} in flight",
            o.seed,
            own.len(),
            pending.len()
        );
        pause.after(moved);
    }
    for a in &arriving {
        bases[a.word] = bases[a.word].wrapping_add(a.sum);
        // Also what lies between the puts.
        let mut image = vec![UNTOUCHED; AREA];
        for op in plans[a.source].iter().filter(|op| op.peer == me && op.puts()) {
            image[op.at..op.at + op.size].copy_from_slice(&op.bytes());
        }
        let here = m.target.buffer.read(a.source * AREA, AREA);
        let wrong = (0..AREA).find(|i| here[*i] != image[*i]);
        assert_eq!(wrong, None, "rank {me}, round {round}: a byte of what rank {} put", a.source);
    }
    let mine = |op: &&Op| op.peer == me;
    let adds =
        plans.iter().flatten().filter(mine).map(|op| if let Kind::Shared(add) = op.kind { add } else { 0 });
    rank.until_value(&m.shared, 0, adds.sum());
    let mut image = vec![UNTOUCHED; AREA];
    for op in own.iter().filter(|op| op.kind == Kind::Get) {
        image[op.at..op.at + op.size].copy_from_slice(&windows[op.peer].read(op.from, op.size));
    }
    assert!(
        m.got.buffer.read(0, AREA) == image,
        "rank {me}, round {round}: what was got, and what lies between"
    );
}

/// Begins an operation. `None`: a flush with nothing to wait for.
fn begin(rank: &Rank, m: &Memories, op: Op, place: usize) -> Option<Ptr> {
    let to = rank.to(0, op.context, op.peer);
    let contexts = rank.all_contexts(0);
    let bytes = match op.kind {
        Kind::Get => Bytes {
            local: op.at as u64,
            local_mr: m.got.mr.device,
            size: op.size,
            remote: op.from as u64,
            remote_mr: m.window.mr.device,
        },
        _ if op.size == 0 && op.seed.is_multiple_of(2) => Bytes::NONE,
        _ => {
            m.source.buffer.write(place * PLACE, &op.bytes());
            Bytes {
                local: (place * PLACE) as u64,
                local_mr: m.source.mr.device,
                size: op.size,
                remote: (rank.me() * AREA + op.at) as u64,
                remote_mr: m.target.mr.device,
            }
        }
    };
    let signal = |at: usize, mr: Ptr, add: u64| Signal {
        at: at as u64,
        mr,
        value: add,
        op: if add == 1 { INC } else { ADD },
        strong: op.seed.is_multiple_of(3),
    };
    match op.kind {
        Kind::Put if bytes.local_mr.is_null() => {
            // A put of nothing, which still names its registrations.
            let (local_mr, remote_mr) = (m.source.mr.device, m.target.mr.device);
            Some(rank.put(to, Bytes { local_mr, remote_mr, ..bytes }))
        }
        Kind::Put => Some(rank.put(to, bytes)),
        Kind::Own(add) => {
            let word = 8 * (rank.me() * contexts + op.context);
            Some(rank.put_signal(to, bytes, signal(word, m.signals.mr.device, add)))
        }
        Kind::Shared(add) => Some(rank.put_signal(to, bytes, signal(0, m.shared.mr.device, add))),
        Kind::Get => Some(rank.get(to, bytes)),
        Kind::Flush => rank.table.iflush(to, m.signals.mr.device).expect("iflush"),
    }
}

/// Checks what an operation that is done promises to the rank that began the operation.
fn ended(rank: &Rank, m: &Memories, windows: &[Buffer], op: Op, place: usize) {
    if op.kind == Kind::Get {
        let here = m.got.buffer.read(op.at, op.size);
        assert!(here == windows[op.peer].read(op.from, op.size), "rank {}: {op:?} is wrong", rank.me());
    }
    // The source may be used again.
    m.source.buffer.set(place * PLACE, op.size, 0x11);
}
