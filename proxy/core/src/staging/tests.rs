use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

const UNIT: u32 = abi::PUSHGATE_UNIT;
const MASK: u64 = abi::PUSHGATE_CURSOR_MASK as u64;

// The rule of device.cuh, word for word.
fn span(pos: u32, ring: u32, n: u32, each: u32) -> u32 {
    if each == 0 {
        return 0;
    }
    let (left, fit) = (ring - pos, (ring - pos) / each);
    if fit >= n { n * each } else { left + (n - fit) * each }
}

fn place(pos: u32, ring: u32, i: u32, each: u32) -> u32 {
    if each == 0 {
        return 0;
    }
    let fit = (ring - pos) / each;
    if i < fit { pos + i * each } else { (i - fit) * each }
}

/// What the producer wrote into a slot, and what follows from it.
#[derive(Clone, Copy)]
struct Slot {
    record: Record,
    /// Cumulative, up to and including this slot.
    units: u64,
    messages: u64,
}

/// A producer that knows its own cursors and a credit word, nothing more, and
/// beside it the truth about which unit of the window is still being read.
struct Model {
    slots_log: u32,
    ring: u32,
    /// Cumulative; the producer itself looks at 24 bits of them.
    reserved: (u64, u64),
    credit: u64,
    slots: Vec<Slot>,
    first: u64,
    first_units: u64,
    /// For each unit the message (from 1) whose payload lies there.
    used: Vec<u64>,
    taken: usize,
    delivered: usize,
    retired: usize,
    received: u64,
    released: u64,
    completions: VecDeque<Completion>,
}

impl Model {
    fn new(staging: &Staging) -> Self {
        Model {
            slots_log: staging.slots_log,
            ring: staging.ring_units as u32,
            reserved: (staging.head, staging.units),
            credit: staging.credit_word(),
            slots: Vec::new(),
            first: staging.head,
            first_units: staging.units,
            used: vec![0; staging.ring_units as usize],
            taken: 0,
            delivered: 0,
            retired: 0,
            received: 0,
            released: 0,
            completions: VecDeque::new(),
        }
    }

    fn fits(&self, slots: u32, units: u32) -> bool {
        let used_slots = (self.reserved.0 - (self.credit >> abi::PUSHGATE_CURSOR_BITS)) & MASK;
        let used_units = (self.reserved.1 - (self.credit & MASK)) & MASK;
        used_slots + slots as u64 <= 1 << self.slots_log && used_units + units as u64 <= self.ring as u64
    }

    fn messages(&self) -> u64 {
        self.slots.last().map_or(0, |s| s.messages)
    }

    /// `n` records like `record` with `each` units. False: no credit.
    fn post(&mut self, n: u32, each: u32, record: Record) -> bool {
        let pos = (self.reserved.1 & (self.ring as u64 - 1)) as u32;
        let units = span(pos, self.ring, n, each);
        if units > self.ring {
            let skip = self.ring - pos;
            if !self.fits(1, skip) {
                return false;
            }
            self.take(1, skip, Record::new(Opcode::Nop), pos, skip);
            return self.post(n, each, record);
        }
        if !self.fits(n, units) {
            return false;
        }
        self.take(n, each, record, pos, units);
        true
    }

    fn take(&mut self, n: u32, each: u32, record: Record, pos: u32, units: u32) {
        let mut after = self.reserved.1;
        for i in 0..n {
            let unit = place(pos, self.ring, i, each);
            let messages = self.messages() + (record.opcode != Opcode::Nop) as u64;
            for u in unit..unit + each {
                let owner = &mut self.used[u as usize];
                assert!(
                    *owner <= self.released,
                    "P1: message {messages} may write unit {u}, which the peer reads for message {owner}"
                );
                // A NOP is nobody's payload.
                *owner = if record.opcode == Opcode::Nop { 0 } else { messages };
            }
            if each > 0 {
                let here = (after & (self.ring as u64 - 1)) as u32;
                after += (if unit == here { 0 } else { self.ring - here } + each) as u64;
            }
            let record = match record.in_window() {
                true => Record { place: unit, place_offset: each as u64, ..record },
                false => record,
            };
            let record = Record { id: self.slots.len() as u32, ..record };
            self.slots.push(Slot { record, units: after, messages });
        }
        assert_eq!(after, self.reserved.1 + units as u64, "the model's two ways to count");
        self.reserved = (self.reserved.0 + n as u64, after);
    }

    /// The proxy takes the next slot.
    fn release(&mut self, staging: &mut Staging) {
        let Some(slot) = self.slots.get(self.taken) else { return };
        let r = slot.record;
        assert!(staging.has_room());
        assert_eq!(staging.head(), self.first + self.taken as u64);
        assert_eq!(staging.check(&r), Ok(()), "slot {}", self.taken);
        if r.in_window() && r.place_offset > 0 {
            let wrong = Record { place: r.place ^ 1, ..r };
            let expected = r.place;
            assert_eq!(staging.check(&wrong), Err(Malformed::Offset { found: r.place ^ 1, expected }));
        }
        if r.in_window() {
            let limit = r.units() * UNIT;
            let length = limit + 1;
            assert_eq!(staging.check(&Record { length, ..r }), Err(Malformed::Length { length, limit }));
            let much = Record { place_offset: self.ring as u64 + 1, ..r };
            assert!(matches!(staging.check(&much), Err(Malformed::Length { .. })));
        }
        staging.release(&r);
        if r.has(Record::SIGNALED) {
            let (wr_id, opcode, length) = (r.id, r.opcode as u8, r.length);
            self.completions.push_back(Completion { wr_id, opcode, length });
        }
        self.taken += 1;
        assert_eq!(staging.messages(), self.slots[self.taken - 1].messages);
    }

    /// A link broke: the peer has accepted the first `accepted` messages.
    fn rewind(&mut self, staging: &mut Staging, accepted: u64) {
        let to = self.covered(accepted);
        let back = &self.slots[to..self.taken];
        let messages = back.iter().map(|s| &s.record).filter(|r| r.opcode != Opcode::Nop);
        let expected = Rewound {
            sends: messages.clone().filter(|r| r.opcode == Opcode::Send).count() as u64,
            bytes: messages.map(|r| r.length as u64).sum(),
        };
        let signaled = back.iter().filter(|s| s.record.has(Record::SIGNALED)).count();
        assert_eq!(staging.rewind(accepted), expected);
        self.completions.truncate(self.completions.len() - signaled);
        self.taken = to;
        assert_eq!((staging.head(), staging.messages()), (self.first + to as u64, accepted), "P6");
    }

    /// How many taken slots hold only messages up to `count`.
    fn covered(&self, count: u64) -> usize {
        self.slots[..self.taken].partition_point(|s| s.messages <= count)
    }

    /// The peer's counts reach the proxy.
    fn settle(&mut self, staging: &mut Staging) {
        self.delivered = self.delivered.max(self.covered(self.received));
        assert_eq!(staging.deliver(self.received), self.first + self.delivered as u64);
        let mut seen = Vec::new();
        let retired = staging.retire(self.released, |c| seen.push(c));
        let to = self.covered(self.released);
        let slots = &self.slots[self.retired..to];
        let messages = slots.iter().filter(|s| s.record.opcode != Opcode::Nop);
        assert_eq!(retired.messages, messages.clone().count() as u64);
        assert_eq!(retired.bytes, messages.map(|s| s.record.length as u64).sum::<u64>());
        let signaled = slots.iter().filter(|s| s.record.has(Record::SIGNALED)).count();
        let expected: Vec<_> = self.completions.drain(..signaled).collect();
        assert_eq!(seen, expected, "P5: completions in order, each once");
        self.retired = to;
        let units = self.slots[..to].last().map_or(self.first_units, |s| s.units);
        let slots = (self.first + to as u64) & MASK;
        let word = slots << abi::PUSHGATE_CURSOR_BITS | units & MASK;
        assert_eq!(staging.credit_word(), word);
        assert_eq!(staging.outstanding(), (self.taken - self.retired) as u64);
    }
}

/// A ring whose cursors have already come that far.
fn at(slots_log: u32, window_log: u32, slot: u64, unit: u64) -> Staging {
    Staging {
        head: slot,
        delivered: slot,
        tail: slot,
        units: unit,
        retired_units: unit,
        ..Staging::new(slots_log, window_log)
    }
}

fn send(units: u32, length: u32) -> Record {
    Record { length, place_offset: units as u64, ..Record::new(Opcode::Send) }
}

proptest! {
    /// Whatever the sizes, and whichever side is slow: the producer writes no unit
    /// that the peer may still read (P1), slots come back in order, each
    /// completion once (P5), and the credit word is exactly the model's, also
    /// where its fields wrap. A rewind releases again exactly what the peer
    /// has not accepted (P6).
    #[test]
    fn p1_p5_p6_any_schedule_keeps_the_model(
        slots_log in 1u32..5,
        window_log in 0u32..6,
        before_wrap in (0u64..40, 0u64..200),
        steps in prop::collection::vec((0u8..11, any::<u32>()), 1..300),
    ) {
        let wrap = 1 << abi::PUSHGATE_CURSOR_BITS;
        let mut staging = at(slots_log, window_log, wrap - before_wrap.0, wrap - before_wrap.1);
        let mut model = Model::new(&staging);
        let ring = 1u32 << window_log;
        for (kind, r) in steps {
            let signaled = if r & 1 == 0 { Record::SIGNALED } else { 0 };
            let op = if r & 2 == 0 { Opcode::Send } else { Opcode::Put };
            match kind {
                0..3 => {
                    // None, one, half a ring and one more, a whole ring, any.
                    let sizes = [0, 1, ring / 2 + 1, ring, (r >> 8) % (ring + 1), (r >> 8) % (ring + 1)];
                    let each = sizes[(r >> 2) as usize % 6].min(ring);
                    let most = ring.checked_div(each).unwrap_or(3);
                    let n = 1 + (r >> 5) % most;
                    let n = n.min(1 << slots_log);
                    let length = each * UNIT - if each > 0 { (r >> 16) % UNIT } else { 0 };
                    model.post(n, each, Record { flags: signaled, length, ..Record::new(op) });
                }
                3 => {
                    let (op, flags) = match r >> 2 & 3 {
                        0 => (Opcode::Signal, signaled),
                        1 => (Opcode::Nop, signaled),
                        2 => (op, signaled | Record::INLINE),
                        _ => (op, signaled | Record::REGION),
                    };
                    let place = r >> 8;
                    model.post(1, 0, Record { flags, place, place_offset: 5, ..Record::new(op) });
                }
                4..6 => (0..=r % 4).for_each(|_| model.release(&mut staging)),
                6..8 => {
                    let sent = model.slots[..model.taken].last().map_or(0, |s| s.messages);
                    model.received += r as u64 % (sent - model.received + 1);
                    model.released += (r >> 8) as u64 % (model.received - model.released + 1);
                    if kind == 6 { model.settle(&mut staging) }
                }
                8 => model.settle(&mut staging),
                9 => {
                    let sent = model.slots[..model.taken].last().map_or(0, |s| s.messages);
                    let accepted = model.received + (r as u64) % (sent - model.received + 1);
                    model.rewind(&mut staging, accepted);
                }
                _ => model.credit = staging.credit_word(),
            }
        }
        while model.taken < model.slots.len() {
            model.release(&mut staging);
        }
        (model.received, model.released) = (model.messages(), model.messages());
        model.settle(&mut staging);
        prop_assert!(model.completions.is_empty());
        prop_assert_eq!(model.retired, model.slots.len());
        // Nothing leaked: the largest message there is still passes, at the
        // latest when the NOP before it came back.
        model.credit = staging.credit_word();
        if !model.post(1, ring, send(ring, ring * UNIT)) {
            model.release(&mut staging);
            model.settle(&mut staging);
            model.credit = staging.credit_word();
            prop_assert!(model.post(1, ring, send(ring, ring * UNIT)));
        }
    }
}

#[test]
fn p1_the_credit_word_wraps_after_2_24_units() {
    let (slots_log, window_log) = (2, 21);
    let mut staging = Staging::new(slots_log, window_log);
    let mut model = Model::new(&staging);
    let ring = 1u32 << window_log;
    // Three eighths of the ring: every third needs the padding at its end.
    let each = ring / 8 * 3;
    let mut wrapped = 0;
    while model.reserved.1 < 3 << abi::PUSHGATE_CURSOR_BITS {
        while model.post(1, each, send(each, each * UNIT)) {}
        while model.taken < model.slots.len() {
            model.release(&mut staging);
        }
        model.received = model.messages();
        model.released = model.received - model.received % 2;
        model.settle(&mut staging);
        wrapped += (staging.credit_word() & MASK < model.credit & MASK) as u32;
        model.credit = staging.credit_word();
    }
    assert!(wrapped >= 2, "{wrapped}");
}

#[test]
fn p1_a_window_smaller_than_one_message_refuses_it_with_the_limit() {
    let staging = Staging::new(3, 2);
    let (length, limit) = (5 * UNIT, 4 * UNIT);
    assert_eq!(staging.check(&send(5, length)), Err(Malformed::Length { length, limit }));
    // Nor does it help to claim less room than the length needs.
    assert_eq!(staging.check(&send(4, length)), Err(Malformed::Length { length, limit }));
    assert_eq!(staging.check(&send(4, limit)), Ok(()));
    let huge = Record { place_offset: u32::MAX as u64, ..send(0, 1) };
    assert!(matches!(staging.check(&huge), Err(Malformed::Length { .. })));
}

#[test]
fn p1_a_window_that_holds_exactly_one_message_works() {
    for window_log in [0, 3] {
        let ring = 1u32 << window_log;
        let mut staging = Staging::new(4, window_log);
        for i in 0..100 {
            let r = Record { id: i, flags: Record::SIGNALED, ..send(ring, ring * UNIT) };
            assert_eq!(staging.check(&r), Ok(()));
            staging.release(&r);
            // The second has no room before the first is retired.
            assert_eq!(
                staging.check(&r),
                Err(Malformed::Length { length: ring * UNIT, limit: 0 }),
                "message {i}"
            );
            assert_eq!(staging.retire(i as u64, |_| panic!("too early")), Retired::default());
            let mut seen = Vec::new();
            let retired = staging.retire(i as u64 + 1, |c| seen.push(c.wr_id));
            assert_eq!((retired.messages, seen), (1, vec![i]));
            assert_eq!(staging.credit_word() & MASK, (i as u64 + 1) * ring as u64);
        }
    }
}

#[test]
fn p1_room_not_yet_given_back_is_refused_with_what_is_free() {
    let mut staging = Staging::new(3, 3);
    staging.release(&send(3, 3 * UNIT));
    let r = |units, place| Record { place, ..send(units, 1) };
    assert_eq!(staging.check(&r(5, 3)), Ok(()));
    assert_eq!(staging.check(&r(6, 0)), Err(Malformed::Length { length: 1, limit: 5 * UNIT }));
    // It would fit the ring, but not behind the padding.
    staging.release(&r(3, 3));
    assert_eq!(staging.check(&r(3, 0)), Err(Malformed::Length { length: 1, limit: 2 * UNIT }));
    staging.retire(1, |_| ());
    assert_eq!(staging.check(&r(3, 0)), Ok(()));
    assert_eq!(staging.check(&r(3, 6)), Err(Malformed::Offset { found: 6, expected: 0 }));
}

#[test]
fn p5_a_nop_waits_for_the_messages_before_it() {
    let mut staging = Staging::new(3, 3);
    let nop = Record { flags: Record::SIGNALED, id: 7, place: 2, ..Record::new(Opcode::Nop) };
    staging.release(&send(2, UNIT));
    staging.release(&Record { place_offset: 6, ..nop });
    assert_eq!(staging.deliver(0), 0);
    assert_eq!(staging.retire(0, |_| panic!("too early")), Retired::default());
    assert_eq!(staging.credit_word(), 0);
    let mut seen = Vec::new();
    assert_eq!(staging.retire(1, |c| seen.push(c)), Retired { messages: 1, sends: 1, bytes: UNIT as u64 });
    assert_eq!(seen, [Completion { wr_id: 7, opcode: Opcode::Nop as u8, length: 0 }]);
    assert_eq!(staging.credit_word(), 2 << abi::PUSHGATE_CURSOR_BITS | 8);
}

#[test]
fn p2_a_hole_is_stuck_only_when_it_lasts() {
    let mut staging = Staging::new(3, 3);
    assert!(!staging.stuck(true, 100, 50));
    assert!(!staging.stuck(true, 149, 50));
    assert!(!staging.stuck(false, 150, 50));
    assert!(!staging.stuck(true, 160, 50));
    assert!(staging.stuck(true, 210, 50));
}

/// Producers that publish out of order leave a hole at every look, but never
/// the same one: that is traffic, nobody is stuck.
#[test]
fn p2_holes_at_other_slots_do_not_add_up() {
    let mut staging = Staging::new(3, 3);
    for i in 0..100 {
        assert!(!staging.stuck(true, i * 40, 50), "look {i}");
        staging.release(&send(0, 0));
        staging.retire(i + 1, |_| ());
    }
    assert!(!staging.stuck(true, 4000, 50));
    assert!(staging.stuck(true, 4050, 50));
}
