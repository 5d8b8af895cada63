//! Rails of the simulation: what lies between the two ends of a session over one to three links. Each link is a pair of
//! lanes with a speed and a delay of their own. A stripe's bytes land at any time before its record arrives; records of one
//! lane arrive in order, those of two lanes in any order. What is on its way over a link that broke may still land until the
//! receiving end has let the link go: it arrives no more once that end has fenced the link.
//!
//! Looked at here, beside the checks of all runs: an end says RESUME, and prepares the next link, only when it has let the
//! one before go; an end posts over a link only when the other end is ready for it.

mod end;
mod lies;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use pushgate_core::gate::Budget;
use pushgate_core::rails::Stripe;
use pushgate_core::recovery::Control;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_link::PeerCounts;
use pushgate_link::memory::Mapped;

pub(super) use self::end::join;
use super::plan::US;
use super::random::Random;
pub(super) use pushgate_engine::rails::Options;

/// The wires of one queue pair. Both ends and the cluster have them.
#[derive(Clone)]
pub(super) struct Wires(Arc<Mutex<State>>);

/// A stripe on its way.
struct Flying {
    stripe: Stripe,
    words: RecordWords,
    /// Where its bytes come from.
    from: usize,
    lands_at: u64,
    landed: bool,
    arrives_at: u64,
}

/// What goes to one end over one link.
#[derive(Default)]
struct Lane {
    /// The epoch that the end is ready for.
    epoch: u32,
    /// Nothing arrives over it any more.
    fenced: bool,
    /// Nothing lands over it any more.
    cleared: bool,
    flying: VecDeque<Flying>,
    /// What has arrived, and the end has not taken.
    ready: VecDeque<(Stripe, RecordWords)>,
    /// Stripes that have arrived.
    arrived: u64,
    /// When the last one posted arrives.
    last: u64,
    // What the other end publishes.
    counts: PeerCounts,
    status: u64,
    taken: u64,
}

/// One rail.
struct Wire {
    /// Nanoseconds for 1,024 bytes, and the usual delay.
    pace: u64,
    delay: u64,
    budget: Budget,
    /// To each end.
    lanes: [Lane; 2],
    /// Links of epochs before this one have broken.
    broken_before: u32,
    /// Calls until the link breaks; 0: it does not.
    breaks_in: u32,
}

/// The memory of one end that its links read and write.
struct Memory {
    window: Mapped,
    /// Where payload of the other end's window lands.
    mirror: Mapped,
    /// Regions: address, bytes, and whether the other end may write them.
    regions: BTreeMap<u32, (usize, u64, bool)>,
}

/// A control message: when it comes, the rail that it is about, and what the other end tells with it.
type Said = (u64, usize, Control, Vec<u8>);

struct State {
    wires: Vec<Wire>,
    memory: [Option<Memory>; 2],
    /// Control messages to each end.
    control: [VecDeque<Said>; 2],
    /// Statuses that each end was told beside its links.
    status: [u64; 2],
    random: Random,
    /// What an end did that no end may do.
    wrong: Option<String>,
    falls: Falls,
}

/// What became of links that broke.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Falls {
    pub(super) links: u32,
    /// Stripes that were on their way over them and never arrived.
    pub(super) stripes: u32,
}

impl Wires {
    /// `rails` rails, none of them like another.
    pub(super) fn new(rails: u8, mut random: Random) -> Self {
        let wire = |random: &mut Random| {
            let slots = random.within(1, 8) as u32;
            let bytes = random.of(&[64, 512, 4096, 1 << 20]);
            Wire {
                pace: random.of(&[20, 200, 2_000, 20_000]),
                delay: random.of(&[US, 5 * US, 50 * US]),
                budget: Budget { send_slots: slots, cq_slots: slots, bytes },
                lanes: Default::default(),
                broken_before: 0,
                breaks_in: 0,
            }
        };
        Wires(Arc::new(Mutex::new(State {
            wires: (0..rails).map(|_| wire(&mut random)).collect(),
            memory: [None, None],
            control: Default::default(),
            status: [0; 2],
            random,
            wrong: None,
            falls: Falls::default(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A rail's link breaks at its so-many-th call from now.
    pub(super) fn break_in(&self, rail: usize, calls: u32) {
        let state = &mut *self.state();
        let rails = state.wires.len();
        state.wires[rail % rails].breaks_in = calls;
    }

    /// Lands what is due. Returns when the next thing is, and what an end did that no end may do.
    pub(super) fn step(&self, now: u64) -> (Option<u64>, Option<String>) {
        let state = &mut *self.state();
        for rail in 0..state.wires.len() {
            (0..2).for_each(|to| state.land(rail, to, now));
        }
        (state.next(), state.wrong.take())
    }

    /// What became of links that broke.
    pub(super) fn falls(&self) -> Falls {
        self.state().falls
    }

    /// When something lands or arrives next.
    pub(super) fn next(&self) -> Option<u64> {
        self.state().next()
    }
}

impl State {
    fn next(&self) -> Option<u64> {
        let lanes = self.wires.iter().flat_map(|wire| &wire.lanes);
        let each = lanes.flat_map(|lane| {
            let lands = lane.flying.iter().filter(|f| !f.landed).map(|f| f.lands_at);
            let arrives = lane.flying.front().filter(|_| !lane.fenced);
            lands.chain(arrives.map(|f| f.arrives_at))
        });
        each.min()
    }

    /// Lands the bytes that are due on one lane, and lets the records arrive that are.
    fn land(&mut self, rail: usize, to: usize, now: u64) {
        let State { wires, memory, .. } = self;
        let lane = &mut wires[rail].lanes[to];
        for flying in lane.flying.iter_mut().filter(|f| !f.landed && f.lands_at <= now) {
            flying.landed = true;
            if let Some(memory) = &memory[to] {
                put(flying, memory);
            }
        }
        while !lane.fenced && lane.flying.front().is_some_and(|f| f.landed && f.arrives_at <= now) {
            let Flying { stripe, words, .. } = lane.flying.pop_front().expect("just seen");
            lane.ready.push_back((stripe, words));
            lane.arrived += 1;
        }
    }

    /// A rail's link breaks, at both ends. What is after some stripe never arrives; its bytes may have landed.
    fn fall(&mut self, rail: usize) {
        let State { wires, memory, random, falls, .. } = self;
        let wire = &mut wires[rail];
        falls.links += 1;
        wire.broken_before = wire.lanes[0].epoch.max(wire.lanes[1].epoch) + 1;
        wire.breaks_in = 0;
        for (to, lane) in wire.lanes.iter_mut().enumerate() {
            let whole = lane.flying.len() as u64;
            let kept = if random.one_in(2) { 0 } else { random.below(whole + 1) as usize };
            falls.stripes += (lane.flying.len() - kept) as u32;
            for lost in lane.flying.drain(kept..).filter(|f| !f.landed) {
                if let Some(memory) = &memory[to]
                    && random.one_in(2)
                {
                    put(&lost, memory);
                }
            }
        }
    }
}

/// Writes the bytes of a stripe to where they belong, if they belong within what the end lets the other one write.
fn put(flying: &Flying, memory: &Memory) {
    let Flying { stripe, words, from, .. } = flying;
    let (Ok(record), length) = (Record::decode(words), stripe.length as usize) else { return };
    let offset = stripe.offset as u64;
    let (base, bytes, at) = match stripe.placed {
        true => match memory.regions.get(&record.rkey) {
            Some((base, bytes, true)) => (*base, *bytes, record.remote_offset.saturating_add(offset)),
            _ => return,
        },
        false => {
            let place = (record.place as u64) << abi::PUSHGATE_UNIT_LOG;
            (memory.mirror.address(), memory.mirror.bytes() as u64, place + offset)
        }
    };
    if length == 0 || at.checked_add(length as u64).is_none_or(|end| end > bytes) {
        return;
    }
    // SAFETY: both stretches lie in memory of the simulation that `Memory` and the queue pair keep: the source was compared
    // with its window or region when the stripe was posted, the target just now. One thread runs the simulation. They are
    // different memories.
    unsafe { std::ptr::copy_nonoverlapping(*from as *const u8, (base + at as usize) as *mut u8, length) };
}
