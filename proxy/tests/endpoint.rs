//! Tests two endpoints joined by a queue pair (see `common`), with a device on each side, in one
//! thread and virtual time. Tests' names begin with the promises that they test.

mod common;

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, lap_of, set_inline};
use pushgate_driver_shim::segment::Geometry;
use pushgate_proxy::endpoint::{Endpoint, QpMemory, QpOptions};
use pushgate_proxy::gate::{Gate, Need};
use pushgate_proxy::link::verbs::{Config as VerbsConfig, VerbsLink};
use pushgate_proxy::link::{Link, OwnRegions, RegionSends};
use pushgate_proxy::mover::{MoveError, Mover};
use pushgate_proxy::region::RegionMemory;
use pushgate_proxy::session::{Status, count_word};

const OVERRUN: Option<u32> = Some(abi::PUSHGATE_OVERRUN);
const REFUSED: Option<u32> = Some(abi::PUSHGATE_REFUSED);
const ABORTED: Option<u32> = Some(abi::PUSHGATE_ABORTED);
const STUCK: Option<u32> = Some(abi::PUSHGATE_STUCK);

fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut b = vec![0; length];
    pattern(seed, &mut b);
    b
}

/// Receives one message, checks tag and content, and releases it.
fn take(device: &mut Device, tag: u32, content: &[u8]) {
    let m = device.try_recv().unwrap_or_else(|| panic!("message {tag} is not there"));
    let mut found = vec![0; m.length as usize];
    device.read(&m, &mut found);
    assert_eq!((m.tag, &found[..]), (tag, content));
    device.release(1);
}

// ------------------------------------------------------------ random traffic

#[derive(Clone, Copy, Debug)]
enum Kind {
    Inline,
    Window,
    Put,
    PutInline,
    Signal,
}

#[derive(Clone, Copy, Debug)]
struct Planned {
    kind: Kind,
    length: usize,
    signaled: bool,
}

impl Planned {
    fn is_send(&self) -> bool {
        matches!(self.kind, Kind::Inline | Kind::Window)
    }
}

fn planned(largest: usize) -> impl Strategy<Value = Planned> {
    let kind = prop_oneof![
        3 => Just(Kind::Inline),
        4 => Just(Kind::Window),
        2 => Just(Kind::Put),
        1 => Just(Kind::PutInline),
        1 => Just(Kind::Signal),
    ];
    (kind, any::<u32>(), any::<bool>()).prop_map(move |(kind, r, signaled)| {
        let length = match kind {
            Kind::Inline => r as usize % 41,
            Kind::PutInline => r as usize % 17,
            Kind::Signal => 0,
            // Often whole units or the whole ring, otherwise any length.
            _ => match r % 4 {
                0 => largest,
                1 => r as usize / 4 % (largest / UNIT + 1) * UNIT,
                _ => r as usize / 4 % (largest + 1),
            },
        };
        Planned { kind, length, signaled }
    })
}

fn geometry() -> impl Strategy<Value = Geometry> {
    (0u32..5, 1u32..5, 0u32..4, 1u32..4, 1u32..5, 0u32..6).prop_map(|(w, s, c, r, l, landing)| Geometry {
        window_log: w,
        slots_log: s,
        cq_log: c,
        rx_log: r,
        link_log: l,
        landing_log: landing,
        signals: 3,
        rank: 0,
    })
}

/// One direction: what is to be sent, and how far both devices are.
struct Flow {
    from: usize,
    plan: Vec<Planned>,
    /// Where each put lands in the receiver's region.
    offsets: Vec<usize>,
    region: Region,
    rkey: u32,
    posted: usize,
    nops: u64,
    completed: usize,
    received: usize,
    seen: usize,
    held: Vec<(Message, usize)>,
}

impl Flow {
    fn new(pair: &mut Pair, from: usize, plan: Vec<Planned>) -> Self {
        let mut end = 0;
        let offsets = plan
            .iter()
            .map(|p| {
                let at = end;
                end += p.length;
                at
            })
            .collect();
        let region = Region::new(end.max(1));
        let rkey = pair.ends[1 - from].add_region(region.memory(), region.bytes as u64).unwrap();
        Flow {
            from,
            plan,
            offsets,
            region,
            rkey,
            posted: 0,
            nops: 0,
            completed: 0,
            received: 0,
            seen: 0,
            held: Vec::new(),
        }
    }

    fn content(&self, i: usize) -> Vec<u8> {
        bytes((self.from as u64) << 32 | i as u64, self.plan[i].length)
    }

    fn post(&mut self, device: &mut Device) {
        let i = self.posted;
        let Some(p) = self.plan.get(i) else { return };
        let id = i as u32;
        let flags = if p.signaled { Record::SIGNALED } else { 0 };
        let put = Record {
            flags: flags | Record::WITH_SIGNAL,
            id,
            rkey: self.rkey,
            remote_offset: self.offsets[i] as u64,
            signal: id % 3,
            signal_value: i as u64 + 1,
            ..Record::new(Opcode::Put)
        };
        let record = match p.kind {
            Kind::Inline => Record { flags: flags | Record::INLINE, ..inline_send(id) },
            Kind::Window => Record { flags, ..window_send(id) },
            Kind::Put => put,
            Kind::PutInline => Record { flags: put.flags | Record::INLINE, ..put },
            Kind::Signal => Record { opcode: Opcode::Signal, flags, ..put },
        };
        self.posted += device.post(record, &self.content(i)) as usize;
    }

    /// Does what a kernel does that has reserved and then has nothing to send.
    fn nop(&mut self, device: &mut Device, units: u64) {
        if let Some((slot, place)) = device.take(units, false) {
            let nop = Record { place: place as u32, place_offset: units, ..Record::new(Opcode::Nop) };
            device.publish(slot, &nop.encode(0));
            self.nops += 1;
        }
    }

    fn poll_cq(&mut self, device: &mut Device) {
        while let Some(c) = device.poll_cq() {
            let next = (self.completed..self.plan.len()).find(|i| self.plan[*i].signaled);
            let i = next.expect("a completion too many");
            assert_eq!((c.wr_id, c.status as u32), (i as u32, abi::PUSHGATE_OK), "P5: once, in order");
            assert_eq!(c.length as usize, self.plan[i].length);
            self.completed = i + 1;
        }
    }

    fn recv(&mut self, device: &mut Device) {
        let Some(m) = device.try_recv() else { return };
        let i = (self.received..self.plan.len()).find(|i| self.plan[*i].is_send()).expect("one too many");
        assert!(i < self.posted);
        assert_eq!((m.tag, m.length as usize), (i as u32, self.plan[i].length), "P6: once, in order");
        self.received = i + 1;
        self.held.push((m, i));
        self.check_held(device, 0..self.held.len());
    }

    /// P1: what a reader holds stays unchanged.
    fn check_held(&self, device: &Device, which: std::ops::Range<usize>) {
        for (m, i) in &self.held[which] {
            let mut found = vec![0; m.length as usize];
            device.read(m, &mut found);
            assert_eq!(found, self.content(*i), "message {i}");
        }
    }

    fn release(&mut self, device: &mut Device, count: usize) {
        let count = count.min(self.held.len());
        if count > 0 {
            self.check_held(device, 0..count);
            self.held.drain(..count);
            device.release(count as u64);
        }
    }

    /// P3: a reader that sees a signal sees the data before it.
    fn look_at_signals(&mut self, device: &Device) {
        for i in self.seen..self.plan.len() {
            if self.plan[i].is_send() {
                continue;
            }
            let value = device.signal(i as u32 % 3);
            assert!(value <= self.posted as u64, "a signal that nobody sent");
            if value <= i as u64 {
                break;
            }
            let p = self.plan[i];
            assert_eq!(self.region.read(self.offsets[i], p.length), self.content(i), "P3: put {i}");
            self.seen = i + 1;
        }
    }

    /// P4: no message was released for which the receiver had not granted a receive.
    fn check_credits(&self, pair: &Pair, rx_log: u32) {
        let released = pair.ends[self.from].counters().released as usize;
        let sends = self.plan[..released].iter().filter(|p| p.is_send()).count() as u64;
        assert!(
            sends <= pair.devices[1 - self.from].released() + (1 << rx_log),
            "P4: {sends} sends released"
        );
    }

    fn done(&self) -> bool {
        let open = |from: usize, what: fn(&Planned) -> bool| self.plan[from..].iter().any(what);
        self.posted == self.plan.len()
            && self.held.is_empty()
            && !open(self.completed, |p| p.signaled)
            && !open(self.received, Planned::is_send)
            && !open(self.seen, |p| !p.is_send())
    }
}

proptest! {
    #![proptest_config(Config::with_cases(300))]

    #[test]
    fn p1_p3_p4_p5_p6_any_schedule_delivers_everything_once_in_order(
        (geometry, plans) in geometry().prop_flat_map(|g| {
            let plan = || prop::collection::vec(planned(UNIT << g.window_log), 0..60);
            (Just(g), [plan(), plan()])
        }),
        share in any::<u8>(),
        steps in prop::collection::vec((0u8..20, any::<u8>()), 0..400),
    ) {
        let with = |peer| QpOptions { in_place_share: share, ..options(peer) };
        let mut pair = Pair::new(geometry, [with(1), with(0)]);
        let [a, b] = plans;
        let mut flows = [Flow::new(&mut pair, 0, a), Flow::new(&mut pair, 1, b)];
        let mut now = 0;
        let mut step = |pair: &mut Pair, flows: &mut [Flow; 2], kind: u8, r: u8| {
            let flow = &mut flows[(kind & 1) as usize];
            let (from, to) = (flow.from, 1 - flow.from);
            match kind >> 1 {
                0 | 1 => (0..r % 8).for_each(|_| flow.post(&mut pair.devices[from])),
                2 | 3 => _ = pair.poll(from),
                4 => flow.recv(&mut pair.devices[to]),
                5 => (0..r % 8).for_each(|_| flow.recv(&mut pair.devices[to])),
                6 => flow.release(&mut pair.devices[to], r as usize % 4),
                7 => flow.poll_cq(&mut pair.devices[from]),
                8 => flow.nop(&mut pair.devices[from], r as u64 % ((1 << geometry.window_log) + 1)),
                _ => {
                    now += r as u64 * 1_000_000;
                    pair.tick(now);
                }
            }
            for flow in flows {
                flow.look_at_signals(&pair.devices[1 - flow.from]);
                flow.check_credits(pair, geometry.rx_log);
            }
        };
        for (kind, r) in steps {
            step(&mut pair, &mut flows, kind, r);
        }
        let mut rounds = 0;
        while !flows.iter().all(Flow::done) {
            for kind in [0, 1, 4, 5, 10, 11, 12, 13, 14, 15] {
                step(&mut pair, &mut flows, kind, 3);
            }
            rounds += 1;
            prop_assert!(rounds < 10_000, "it stands still");
        }
        pair.settle();
        pair.assert_clean();
        for f in &flows {
            let (sender, receiver) = (pair.ends[f.from].counters(), pair.ends[1 - f.from].counters());
            let (n, sum) = (f.plan.len() as u64, f.plan.iter().map(|p| p.length as u64).sum::<u64>());
            prop_assert_eq!((sender.released, sender.retired, receiver.delivered), (n, n, n));
            prop_assert_eq!((sender.released_bytes, receiver.delivered_bytes), (sum, sum));
            prop_assert!(sender.nops >= f.nops);
            prop_assert_eq!(pair.devices[f.from].delivered(), pair.devices[f.from].slots());
            f.region.check_guards();
        }
    }
}

// -------------------------------------------------------- P4: credits, overrun

#[test]
fn p4_a_receiver_that_takes_nothing_stalls_the_sender_and_loses_nothing() {
    let mut pair = Pair::default();
    let receives = 1 << GEOMETRY.rx_log;
    pair.settle(); // The grants arrive.
    let (mut sent, mut now) = (0u32, 0);
    let post = |pair: &mut Pair, sent: &mut u32| {
        while pair.devices[0].post(inline_send(*sent), &bytes(*sent as u64, 9)) {
            *sent += 1;
        }
    };
    // For long: minutes of virtual time, and more messages than there is room for.
    for _ in 0..1000 {
        post(&mut pair, &mut sent);
        pair.settle();
        now += 1_000_000_000;
        pair.tick(now);
    }
    let c = pair.ends[0].counters();
    assert_eq!(c.released, receives);
    assert_eq!(c.stall_receive, 1, "one message waits: counted once, not at each look");
    assert_eq!(c.credit_stalls(), 1);
    assert_eq!(sent as u64, receives + (1 << GEOMETRY.slots_log), "what waits fills the WQE ring");
    pair.assert_clean();

    for tag in 0..200 {
        take(&mut pair.devices[1], tag, &bytes(tag as u64, 9));
        pair.settle();
        post(&mut pair, &mut sent);
        pair.settle();
    }
    let c = pair.ends[0].counters();
    assert!(c.stall_receive > 100 && c.stall_receive <= sent as u64, "{c:?}");
    pair.assert_clean();
}

#[test]
fn p4_a_message_that_needs_no_receive_waits_behind_one_that_does() {
    let mut pair = Pair::default();
    for i in 0..=1 << GEOMETRY.rx_log {
        assert!(pair.devices[0].post(inline_send(i), b"x"));
    }
    let signal = Record { signal: 1, signal_value: 5, ..Record::new(Opcode::Signal) };
    assert!(pair.devices[0].post(signal, b""));
    pair.settle();
    assert_eq!(pair.devices[1].signal(1), 0, "it would have overtaken");
    take(&mut pair.devices[1], 0, b"x");
    pair.settle();
    assert_eq!(pair.devices[1].signal(1), 5);
    pair.assert_clean();
}

#[test]
fn p4_a_full_link_ring_stalls_on_the_send_queue() {
    let mut pair = Pair::new(Geometry { link_log: 1, ..GEOMETRY }, [options(1), options(0)]);
    for i in 0..5 {
        assert!(pair.devices[0].post(inline_send(i), b"x"));
    }
    pair.poll(1); // Grants receives.
    (0..10).for_each(|_| _ = pair.poll(0));
    let c = pair.ends[0].counters();
    assert_eq!((c.released, c.stall_send_queue, c.credit_stalls()), (2, 1, 1));
    pair.settle();
    (0..5).for_each(|i| take(&mut pair.devices[1], i, b"x"));
    pair.assert_clean();
}

#[test]
fn p4_a_sender_without_credit_is_an_overrun_that_both_sides_see() {
    let ungated = QpOptions { ungated: true, ..options(1) };
    let mut pair = Pair::new(GEOMETRY, [ungated, options(0)]);
    let receives = 1 << GEOMETRY.rx_log;
    for i in 0..=receives {
        let record = Record { flags: Record::INLINE | Record::SIGNALED, ..inline_send(i) };
        assert!(pair.devices[0].post(record, b"flood"));
    }
    (0..2).for_each(|i| _ = pair.poll(i));
    assert_eq!(pair.codes(), [None, OVERRUN]);
    let status = pair.devices[1].status().unwrap();
    assert_eq!((status.rank, status.detail), (Some(0), receives + 1), "it names the sender and the message");
    pair.tick(1);
    assert_eq!(pair.codes(), [OVERRUN, OVERRUN]);
    let c = pair.ends[1].counters();
    assert_eq!((c.dropped, c.delivered), (1, receives as u64));
    // Nothing that the receiver holds was overwritten.
    (0..receives).for_each(|i| take(&mut pair.devices[1], i, b"flood"));
    assert!(pair.devices[1].try_recv().is_none());
}

#[test]
fn p4_an_ungated_sender_with_a_quick_reader_is_no_overrun() {
    let ungated = QpOptions { ungated: true, ..options(1) };
    let mut pair = Pair::new(GEOMETRY, [ungated, options(0)]);
    for i in 0..100 {
        assert!(pair.devices[0].post(inline_send(i), b"x"));
        pair.settle();
        take(&mut pair.devices[1], i, b"x");
        pair.settle();
    }
    pair.assert_clean();
}

#[test]
fn p4_a_skipped_sequence_number_is_an_overrun() {
    let mut pair = Pair::default();
    pair.poll(1); // Grants receives.
    for (slot, sequence) in [0, 1, 3].into_iter().enumerate() {
        pair.forge(0, slot as u64, &inline_send(sequence));
    }
    pair.poll(1);
    assert_eq!(pair.devices[1].status().map(|s| s.code as u32), OVERRUN);
    let c = pair.ends[1].counters();
    assert_eq!((c.delivered, c.dropped), (2, 1));
    take(&mut pair.devices[1], 0, b"");
    take(&mut pair.devices[1], 1, b"");
    assert!(pair.devices[1].try_recv().is_none(), "nothing behind the gap is shown");
    pair.tick(1);
    assert_eq!(pair.codes(), [OVERRUN, OVERRUN]);
}

#[test]
fn p4_an_overwritten_link_slot_is_an_overrun() {
    let mut pair = Pair::default();
    // The second lap came before the first was read.
    pair.forge(0, 1 << GEOMETRY.link_log, &inline_send(16));
    pair.poll(1);
    pair.tick(1);
    assert_eq!(pair.codes(), [OVERRUN, OVERRUN]);
    assert_eq!(pair.ends[1].counters().dropped, 1);
}

// ------------------------------------------------------- slow readers, landing

#[test]
fn p5_a_slow_reader_is_copied_out_so_that_the_sender_goes_on() {
    // A quarter of the window of 32 units may be held in place: 8 units.
    let share = QpOptions { in_place_share: 64, ..options(0) };
    let mut pair = Pair::new(GEOMETRY, [options(1), share]);
    let content = |i: u32| bytes(i as u64, 4 * UNIT - i as usize);
    for i in 0..8 {
        assert!(pair.devices[0].post(window_send(i), &content(i)), "message {i}");
        pair.settle();
    }
    let c = pair.ends[1].counters();
    assert_eq!((c.copied_out, c.copies, c.delivered), (6, 6, 8), "two in place, then copies");
    // The first eight messages fill the window: what is copied out is not given back before the
    // messages held in place in front of it (P5).
    assert_eq!(pair.ends[0].counters().retired, 0);
    assert!(!pair.devices[0].post(window_send(8), &content(8)));
    for i in 0..2 {
        take(&mut pair.devices[1], i, &content(i));
    }
    pair.settle();
    assert_eq!(pair.ends[0].counters().retired, 8, "the reader still has six, in its landing ring");
    for i in 8..10 {
        assert!(pair.devices[0].post(window_send(i), &content(i)));
    }
    pair.settle();
    (2..10).for_each(|i| take(&mut pair.devices[1], i, &content(i)));
    pair.settle();
    assert_eq!(pair.ends[0].counters().retired, 10);
    pair.assert_clean();
}

#[test]
fn p3_p8_a_device_that_sees_its_segments_alone_receives_in_its_landing_ring() {
    // A reader that keeps up and would otherwise receive in place.
    let mut pair = Pair::new(GEOMETRY, [options(1), QpOptions { slow_ns: 1_000_000, ..options(0) }]);
    pair.ends = pair.ends.map(|end| end.with_inbound_copied());
    for i in 0..50 {
        let content = bytes(i as u64, 5 * UNIT - i as usize);
        assert!(pair.devices[0].post(window_send(i), &content));
        pair.settle();
        let m = pair.devices[1].try_recv().expect("it is there");
        assert_ne!(m.flags & Record::LANDING, 0, "message {i}");
        let mut found = vec![0; m.length as usize];
        pair.devices[1].read(&m, &mut found);
        assert_eq!(found, content);
        pair.devices[1].release(1);
        pair.settle();
    }
    let c = pair.ends[1].counters();
    assert_eq!((c.copied_out, c.delivered), (50, 50));
    pair.assert_clean();
}

#[test]
fn p5_nothing_is_copied_out_for_a_reader_that_keeps_up() {
    let hasty = QpOptions { in_place_share: 64, slow_ns: 1000, ..options(0) };
    let mut pair = Pair::new(GEOMETRY, [options(1), hasty]);
    let content = |i: u32| bytes(i as u64, 4 * UNIT);
    let mut posted = 0;
    for i in 0..50u64 {
        // The reader holds far more than its share, but gives messages back all the time.
        while pair.devices[0].post(window_send(posted), &content(posted)) {
            posted += 1;
        }
        pair.settle();
        pair.tick(1_000_000 + i * 900);
        take(&mut pair.devices[1], i as u32, &content(i as u32));
        pair.settle();
    }
    assert_eq!(pair.ends[1].counters().copied_out, 0);
    // Now the reader stops.
    pair.tick(1_000_000 + 50 * 900);
    pair.tick(1_000_000 + 51 * 900);
    pair.tick(1_000_000 + 52 * 900);
    while pair.devices[0].post(window_send(posted), &content(posted)) {
        posted += 1;
    }
    pair.settle();
    assert!(pair.ends[1].counters().copied_out > 0);
    for i in 50..posted {
        take(&mut pair.devices[1], i, &content(i));
        pair.settle();
    }
    pair.assert_clean();
}

#[test]
fn p5_a_place_is_given_back_only_when_its_reader_is_done() {
    let mut pair = Pair::default();
    let whole = UNIT << GEOMETRY.window_log;
    assert!(pair.devices[0].post(window_send(0), &bytes(1, whole)));
    pair.settle();
    assert_eq!(pair.devices[0].delivered(), 1, "the peer has it");
    assert!(!pair.devices[0].post(window_send(1), &bytes(2, 1)), "but reads it yet");
    take(&mut pair.devices[1], 0, &bytes(1, whole));
    assert!(!pair.devices[0].post(window_send(1), &bytes(2, 1)), "not before the engines know");
    pair.settle();
    assert!(pair.devices[0].post(window_send(1), &bytes(2, 1)));
    pair.assert_clean();
}

// --------------------------------------------------------------- posted receives

fn with_receives(bytes: usize) -> (Pair, Region, u32) {
    let receiver = QpOptions { posted_receives: true, ..options(0) };
    let mut pair = Pair::new(GEOMETRY, [options(1), receiver]);
    let region = Region::new(bytes);
    let key = pair.ends[1].add_region(region.memory(), bytes as u64).unwrap();
    (pair, region, key)
}

#[test]
fn p3_p4_messages_land_in_the_buffers_that_receives_name() {
    let (mut pair, region, key) = with_receives(1000);
    let post = |pair: &mut Pair, i: u32| match i % 2 {
        0 => assert!(pair.devices[0].post(inline_send(i), &bytes(i as u64, 17))),
        _ => assert!(pair.devices[0].post(window_send(i), &bytes(i as u64, 90))),
    };
    for i in 0..100 {
        post(&mut pair, i);
        pair.settle();
        assert!(pair.devices[1].try_recv().is_none(), "nothing arrives before a receive is posted");
        let tag = if i % 3 == 0 { i } else { abi::PUSHGATE_ANY_TAG };
        pair.devices[1].post_recv(key, 7 * i as u64, 100, tag);
        pair.settle();
        let m = pair.devices[1].try_recv().expect("it landed");
        let length = m.length as usize;
        assert_eq!((m.tag, m.flags & Record::BUFFER), (i, Record::BUFFER));
        assert_eq!(region.read(7 * i as usize, length), bytes(i as u64, length));
        pair.devices[1].release(1);
        pair.settle();
    }
    assert_eq!(pair.ends[0].counters().stall_receive, 100);
    pair.assert_clean();
    region.check_guards();
}

#[test]
fn p4_posted_receives_are_taken_in_order_and_no_more_than_the_ring_holds() {
    let (mut pair, region, key) = with_receives(800);
    (0..8).for_each(|i| pair.devices[1].post_recv(key, i * 100, 100, abi::PUSHGATE_ANY_TAG));
    (0..9).for_each(|i| assert!(pair.devices[0].post(inline_send(i), &bytes(i as u64, 30))));
    pair.settle();
    assert_eq!(pair.ends[1].counters().delivered, 8);
    for i in 0..8 {
        let m = pair.devices[1].try_recv().unwrap();
        assert_eq!((m.tag, region.read(i * 100, 30)), (i as u32, bytes(i as u64, 30)));
    }
    pair.assert_clean();
}

#[test]
fn p7_receives_that_do_not_fit_end_both_sides_with_a_status() {
    // What was posted, derived from the right key: key, offset, length, tag.
    type Receive = fn(u32) -> (u32, u64, u32, u32);
    let cases: [(&str, Receive); 3] = [
        ("too small a buffer", |key| (key, 0, 29, 5)),
        ("a buffer that leaves its region", |key| (key, 171, 30, 5)),
        ("no such region", |key| (key ^ 0x8000_0000, 0, 100, 5)),
    ];
    for (what, receive) in cases {
        let (mut pair, region, key) = with_receives(200);
        let (key, offset, length, tag) = receive(key);
        pair.devices[1].post_recv(key, offset, length, tag);
        let record = Record { flags: Record::INLINE | Record::SIGNALED, ..inline_send(5) };
        assert!(pair.devices[0].post(record, &bytes(5, 30)));
        pair.settle();
        pair.tick(1);
        assert_eq!(pair.codes(), [REFUSED, REFUSED], "{what}");
        // The end at fault: it sent more than there was room for, or posted something that is no
        // room.
        let culprit = if what == "too small a buffer" { 0 } else { 1 };
        assert_eq!(pair.devices[1].status().unwrap().rank, Some(culprit), "{what}");
        assert!(pair.devices[1].try_recv().is_none(), "{what}");
        let cqe = pair.devices[0].poll_cq().unwrap();
        assert_eq!((cqe.wr_id, Some(cqe.status as u32)), (5, REFUSED), "{what}");
        assert_eq!(region.read(0, 200), vec![0; 200], "{what}");
        region.check_guards();
    }
}

const ANY: u32 = abi::PUSHGATE_ANY_TAG;

#[test]
fn p4_a_send_takes_the_oldest_receive_of_its_tag_and_says_which() {
    let (mut pair, region, key) = with_receives(1000);
    for (i, tag) in [5, ANY, 6, 5, 7].into_iter().enumerate() {
        pair.devices[1].post_recv(key, i as u64 * 100, 100, tag);
    }
    for (tag, length) in [(6, 17), (5, 90), (6, 90), (5, 17)] {
        let content = bytes(tag as u64, length);
        let record = if length <= 40 { inline_send(tag) } else { window_send(tag) };
        assert!(pair.devices[0].post(record, &content));
        pair.settle();
    }
    for (tag, receive, length) in [(6, 1, 17), (5, 0, 90), (6, 2, 90), (5, 3, 17)] {
        let m = pair.devices[1].try_recv().expect("it landed");
        assert_eq!((m.tag, m.place, m.length, m.flags), (tag, receive, length, Record::BUFFER));
        let at = receive as usize * 100;
        assert_eq!(region.read(at, length as usize), bytes(tag as u64, length as usize));
    }
    assert_eq!(region.read(400, 100), [0; 100], "the one that nobody asked for");
    pair.assert_clean();
}

#[test]
fn p4_p7_a_send_whose_tag_is_not_posted_waits_for_it_or_for_the_end() {
    let waiting = || {
        let (mut pair, region, key) = with_receives(1000);
        pair.devices[1].post_recv(key, 0, 100, 1);
        pair.devices[1].post_recv(key, 100, 100, 2);
        let record = Record { flags: Record::SIGNALED, ..window_send(3) };
        assert!(pair.devices[0].post(record, &bytes(3, 80)));
        // Posted later, with its receive there: it does not overtake.
        assert!(pair.devices[0].post(inline_send(1), b"one"));
        pair.settle();
        pair.tick(1 << 40);
        assert_eq!(pair.codes(), [None, None]);
        assert!(pair.devices[1].try_recv().is_none() && pair.devices[0].poll_cq().is_none());
        assert_eq!(pair.devices[0].delivered(), 0, "the peer does not have it yet");
        (pair, region, key)
    };
    let (mut pair, region, key) = waiting();
    pair.devices[1].post_recv(key, 200, 100, 3);
    pair.settle();
    let numbers: Vec<_> = std::iter::from_fn(|| pair.devices[1].try_recv()).map(|m| m.place).collect();
    assert_eq!(numbers, [2, 0]);
    assert_eq!((region.read(200, 80), region.read(0, 3)), (bytes(3, 80), b"one".to_vec()));
    assert_eq!(pair.devices[0].poll_cq().map(|c| c.status), Some(0));
    pair.assert_clean();

    let (mut pair, _region, _) = waiting();
    pair.ends[1].fail(Status { rank: Some(1), ..Status::new(abi::PUSHGATE_ABORTED) });
    pair.tick(1);
    assert_eq!(pair.codes(), [ABORTED, ABORTED]);
    assert_eq!(pair.devices[0].poll_cq().map(|c| c.status as u32), ABORTED);
    assert!(pair.devices[1].try_recv().is_none());
}

proptest! {
    #![proptest_config(Config::with_cases(if rdma::chosen() { 20 } else { 200 }))]

    /// Compared with a simple list as model.
    #[test]
    fn p4_p6_tags_match_as_the_model_says(steps in prop::collection::vec((0u8..6, 0u32..4), 0..150)) {
        let (mut pair, region, key) = with_receives(15_000);
        let (mut posted, mut sent) = (Vec::new(), Vec::new());
        let (mut open, mut landed, mut taken) = (Vec::<usize>::new(), Vec::<(usize, usize)>::new(), 0);
        for (step, tag) in steps {
            match step {
                0..2 if posted.len() < taken + 8 => {
                    let tag = if tag == 3 { ANY } else { tag };
                    pair.devices[1].post_recv(key, posted.len() as u64 * 100, 100, tag);
                    open.push(posted.len());
                    posted.push(tag);
                }
                2..4 => {
                    let content = bytes(sent.len() as u64, 41 + sent.len() % 50);
                    let record = Record { tag: tag % 3, ..window_send(sent.len() as u32) };
                    if pair.devices[0].post(record, &content) {
                        sent.push(tag % 3);
                    }
                }
                4 => pair.settle(),
                _ => {
                    pair.settle();
                    while landed.len() < sent.len() {
                        let tag = sent[landed.len()];
                        let fits = |k: &usize| posted[*k] == ANY || posted[*k] == tag;
                        let Some(at) = open.iter().position(fits) else { break };
                        landed.push((landed.len(), open.remove(at)));
                    }
                    for (message, receive) in &landed[taken..] {
                        let m = pair.devices[1].try_recv().expect("the model has it");
                        prop_assert_eq!((m.place as usize, m.tag), (*receive, sent[*message]));
                        let content = bytes(*message as u64, 41 + message % 50);
                        prop_assert_eq!(region.read(receive * 100, content.len()), content);
                    }
                    prop_assert!(pair.devices[1].try_recv().is_none(), "the model has none");
                    let new = landed.len() - taken;
                    taken = landed.len();
                    pair.devices[1].release(new as u64);
                }
            }
        }
        pair.settle();
        pair.assert_clean();
        region.check_guards();
    }
}

// ------------------------------------------------- out of regions of the sender

/// A region of each side; the sender's holds the bytes of `bytes(3, ...)`.
struct Sending {
    pair: Pair,
    from: Region,
    lkey: u32,
    to: Region,
    rkey: u32,
}

/// Sends over the queue pair that the suite runs over. RDMA needs posted receives: without them it
/// refuses a SEND out of a region.
fn sending(posted_receives: bool, length: usize) -> Sending {
    let receiver = QpOptions { posted_receives, ..options(0) };
    sending_over(Pair::new(GEOMETRY, [options(1), receiver]), length)
}

/// Sends over `local`, whatever the suite runs over.
fn sending_locally(posted_receives: bool, length: usize) -> Sending {
    let receiver = QpOptions { posted_receives, ..options(0) };
    sending_over(Pair::local(GEOMETRY, [options(1), receiver]), length)
}

fn sending_over(mut pair: Pair, length: usize) -> Sending {
    let [from, to] = [0, 1].map(|_| Region::new(length));
    from.write(0, &bytes(3, length));
    let lkey = pair.ends[0].add_region(from.memory(), length as u64).unwrap();
    let rkey = pair.ends[1].add_region(to.memory(), length as u64).unwrap();
    Sending { pair, from, lkey, to, rkey }
}

const SIGNALED: u8 = Record::SIGNALED;

#[test]
fn p3_p5_a_send_out_of_a_region_lands_in_a_posted_buffer_and_then_completes() {
    const MIB: usize = 1 << 20;
    let mut s = sending(true, 4 * MIB);
    for (i, length) in [0, 1, 100, 4000, MIB, 3 * MIB + 77].into_iter().enumerate() {
        let (at, to) = (13 * i, 7 * i);
        s.pair.devices[1].post_recv(s.rkey, to as u64, length as u32, i as u32);
        let record = region_send(i as u32, s.lkey, at as u64);
        assert!(s.pair.devices[0].post_from(Record { flags: record.flags | SIGNALED, ..record }, length));
        // One pass of the receiver reads only a part, so that others get their turn.
        let mut passes = 0;
        while s.pair.ends[1].counters().delivered == i as u64 {
            s.pair.poll(0);
            assert!(s.pair.devices[0].poll_cq().is_none(), "the source is still read");
            passes += s.pair.poll(1) as usize;
        }
        let slices = if rdma::chosen() { 0 } else { length.div_ceil(MIB) };
        assert!(passes >= slices, "{passes} passes for {length} bytes");
        s.pair.settle();
        let m = s.pair.devices[1].try_recv().expect("it landed");
        assert_eq!((m.tag, m.length as usize, m.flags), (i as u32, length, Record::BUFFER));
        assert!(s.to.read(to, length) == s.from.read(at, length), "message {i}");
        assert_eq!(s.pair.devices[0].poll_cq().map(|c| (c.wr_id, c.status)), Some((i as u32, 0)));
        s.pair.devices[1].release(1);
        s.pair.settle();
    }
    assert_eq!(s.pair.devices[0].units(), 0, "no room in the window was taken");
    let c = s.pair.ends[1].counters();
    // Over RDMA without a copy at either end; for the empty message there is nothing to write.
    let expected = if rdma::chosen() { (5, 1) } else { (0, 6) };
    assert_eq!((c.placed, c.copies), expected);
    s.pair.assert_clean();
    s.to.check_guards();
}

#[test]
fn p8_a_region_stays_until_nobody_reads_what_goes_out_of_it() {
    let mut s = sending_locally(true, 200);
    assert!(s.pair.devices[0].post_from(region_send(5, s.lkey, 0), 200));
    s.pair.settle();
    assert!(!s.pair.ends[0].region_in_use(s.lkey), "the peer was told nothing of it yet");
    // There is a credit but no receive of its tag: the peer reads once there is one.
    s.pair.devices[1].post_recv(s.rkey, 0, 200, 4);
    s.pair.settle();
    assert!(s.pair.ends[0].region_in_use(s.lkey) && !s.pair.ends[0].remove_region(s.lkey));
    // No queue pair has this other region.
    let other = Region::new(64);
    let key = s.pair.ends[0].add_region(other.memory(), 64).unwrap();
    assert!(s.pair.ends[0].remove_region(key));
    s.pair.devices[1].post_recv(s.rkey, 0, 200, 5);
    s.pair.settle();
    assert!(s.to.read(0, 200) == s.from.read(0, 200));
    assert!(s.pair.ends[0].remove_region(s.lkey) && !s.pair.ends[0].remove_region(s.lkey));
    s.pair.assert_clean();

    // A queue pair that failed gives its regions back.
    let mut s = sending_locally(true, 200);
    s.pair.devices[1].post_recv(s.rkey, 0, 200, 4);
    assert!(s.pair.devices[0].post_from(region_send(5, s.lkey, 0), 200));
    s.pair.settle();
    assert!(!s.pair.ends[0].remove_region(s.lkey));
    s.pair.ends[0].fail(Status::new(abi::PUSHGATE_ABORTED));
    assert!(s.pair.ends[0].remove_region(s.lkey));
}

#[test]
fn p8_a_region_stays_while_a_copy_to_it_is_under_way() {
    let (mut pair, mover, key) = with_mover();
    let host = Region::new(64);
    let other = pair.ends[1].add_region(host.memory(), 64).unwrap();
    assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(1, 300)));
    (0..4).for_each(|i| _ = pair.poll(i % 2));
    assert_eq!(mover.0.lock().unwrap().copies.len(), 1);
    assert!(!pair.ends[1].remove_region(key));
    assert!(pair.ends[1].remove_region(other), "nothing goes there");
    mover.0.lock().unwrap().allowed = 1;
    pair.settle();
    assert!(pair.ends[1].remove_region(key));
    pair.assert_clean();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-endpoint"]
fn p8_over_rdma_a_region_stays_until_the_device_has_sent_what_goes_out_of_it() {
    rdma::must_be_chosen();
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let config = VerbsConfig { imm: rdma::imm(), ..VerbsConfig::default() };
    let [(mut a, ..), (mut b, ..)] = rdma::joined([&m[0], &m[1]], [false; 2], &config);
    let [from, to] = [0, 1].map(|_| Region::new(4096));
    a.add_region(17, &from.memory(), 4096);
    b.add_region(18, &to.memory(), 4096);
    let record =
        Record { rkey: 18, place: 17, flags: Record::REGION, length: 4096, ..Record::new(Opcode::Put) };
    let begin = std::time::Instant::now();
    let pass = |a: &mut VerbsLink, b: &mut VerbsLink| {
        assert!(begin.elapsed() < pushgate_tests::hang(), "it never ends");
        for qp in [a, b] {
            qp.poll_send(0).unwrap();
            qp.notify().unwrap();
        }
    };
    while a.takes_region(&record) != RegionSends::Yes {
        pass(&mut a, &mut b);
    }
    assert!(!a.region_in_use(17, 0));
    let gate = Gate::new(1 << GEOMETRY.rx_log, a.budget());
    let permit = gate.reserve(Need { bytes: 4096, receive: false }).unwrap();
    a.post_send(permit, 0, &record, &record.encode(0)).unwrap();
    // Whatever the peer claims to have, and although nothing else asks for a completion.
    assert!(a.region_in_use(17, 0) && a.region_in_use(17, 1) && !a.region_in_use(18, 0));
    while a.region_in_use(17, 1) {
        pass(&mut a, &mut b);
    }
    a.remove_region(17);
}

#[test]
fn p6_puts_to_the_same_bytes_land_in_their_order() {
    let mut s = sending(rdma::chosen(), 4000);
    let region = |record: Record| Record { flags: record.flags | Record::REGION, place: s.lkey, ..record };
    let mut value = 0;
    // Inline, short and long payloads; then what an RDMA device writes where it belongs.
    for length in [9, 100, 128, 300] {
        for (from_region, offset) in [(false, 0), (true, 0), (false, 200), (true, 90)] {
            let mut next = |record: Record, length: usize, flags: u8| {
                value += 1;
                let record = Record { flags: record.flags | flags, signal_value: value, ..record };
                let content = bytes(value, length);
                assert!(s.pair.devices[0].post(record, &content));
                content
            };
            let inline = if length <= 16 { Record::INLINE } else { 0 };
            let first = next(put(s.rkey, 0, 0, 0), length, inline);
            let mut expected = first;
            expected.resize(1000, 0);
            s.to.write(length, &vec![0; 1000 - length]);
            let second = match from_region {
                false => next(put(s.rkey, offset, 0, 0), 500, 0),
                true => {
                    value += 1;
                    let record = region(put(s.rkey, offset, 0, value));
                    assert!(s.pair.devices[0].post_from(record, 500));
                    s.from.read(0, 500)
                }
            };
            expected[offset as usize..][..500].copy_from_slice(&second);
            // Both are on their way before the peer looks.
            s.pair.poll(0);
            s.pair.settle();
            assert_eq!(s.pair.devices[1].signal(0), value);
            let what = format!("{length} bytes, then 500 at {offset}, out of a region: {from_region}");
            assert!(s.to.read(0, 1000) == expected, "{what}");
            while s.pair.devices[0].poll_cq().is_some() {}
            s.pair.settle();
        }
    }
    if rdma::chosen() {
        assert!(s.pair.ends[1].counters().placed > 0, "what touches nothing goes straight there");
    }
    s.pair.assert_clean();
}

#[test]
fn p4_messages_of_nothing_out_of_a_region_take_one_receive_after_the_other() {
    let mut s = sending(true, 100);
    // More messages than the window has units, because a number is no place.
    for i in 0..100u32 {
        s.pair.devices[1].post_recv(s.rkey, 0, 100, ANY);
        assert!(s.pair.devices[0].post_from(region_send(i, s.lkey, 0), 0));
        s.pair.settle();
        let m = s.pair.devices[1].try_recv().expect("it landed");
        assert_eq!((m.tag, m.length, m.place, m.flags), (i, 0, i, Record::BUFFER));
        s.pair.devices[1].release(1);
        s.pair.settle();
    }
    s.pair.assert_clean();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-endpoint"]
fn p3_p4_over_rdma_a_long_send_is_written_to_the_receive_that_it_takes() {
    rdma::must_be_chosen();
    let (mut pair, region, key) = with_receives(2000);
    let mut placed = 0;
    for round in 0..10u32 {
        // Out of order by tag, in bursts, around the ring's end.
        for i in 0..5 {
            pair.devices[1].post_recv(key, i * 400, 400, if i == 2 { ANY } else { i as u32 });
        }
        let receives = [1, 2, 0, 4, 3].map(|i| i as usize);
        for (n, tag) in [1, 4, 0, 4, 3].into_iter().enumerate() {
            let length = [300, 400, 40, 129, 128][(n + round as usize) % 5];
            let content = bytes((tag + round) as u64, length);
            assert!(pair.devices[0].post(window_send(tag), &content));
            placed += (length > 128) as u64;
            pair.settle();
            let m = pair.devices[1].try_recv().expect("it landed");
            assert_eq!((m.tag, m.place, m.flags), (tag, round * 5 + receives[n] as u32, Record::BUFFER));
            assert_eq!(region.read(receives[n] * 400, length), content);
        }
        pair.devices[1].release(5);
        pair.settle();
    }
    assert_eq!(pair.ends[1].counters().placed, placed);
    pair.assert_clean();
    region.check_guards();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-endpoint"]
fn p4_p8_over_rdma_a_send_longer_than_its_receive_is_refused_at_its_sender() {
    rdma::must_be_chosen();
    let (mut pair, region, key) = with_receives(2000);
    pair.devices[1].post_recv(key, 0, 299, 5);
    pair.devices[1].post_recv(key, 500, 400, 5);
    assert!(pair.devices[0].post(window_send(5), &bytes(1, 300)));
    pair.settle();
    pair.tick(1);
    assert_eq!(pair.codes(), [REFUSED, REFUSED]);
    assert_eq!([0, 1].map(|i| pair.devices[i].status().unwrap().rank), [Some(0); 2]);
    assert_eq!((pair.ends[0].counters().released, region.read(0, 2000)), (0, vec![0; 2000]));
}

#[test]
fn p4_p5_sends_out_of_a_region_wait_for_room_in_the_landing_ring() {
    let mut s = sending_locally(false, 8000);
    // The ring has 2048 bytes: two messages fit, wherever the ring's head is.
    for i in 0..6u32 {
        assert!(s.pair.devices[0].post_from(region_send(i, s.lkey, i as u64 * 1000), 1000 + i as usize % 2));
    }
    s.pair.settle();
    assert_eq!(s.pair.ends[1].counters().delivered, 2);
    for i in 0..6u32 {
        take(&mut s.pair.devices[1], i, &s.from.read(i as usize * 1000, 1000 + i as usize % 2));
        s.pair.settle();
    }
    // Longer than half of the ring, with its head a little past the middle.
    for i in 6..12 {
        assert!(s.pair.devices[0].post_from(region_send(i, s.lkey, 0), 2000));
        s.pair.settle();
        take(&mut s.pair.devices[1], i, &s.from.read(0, 2000));
        s.pair.settle();
    }
    s.pair.assert_clean();
    // A message that never fits is its sender's fault.
    assert!(s.pair.devices[0].post_from(region_send(12, s.lkey, 0), 2049));
    s.pair.settle();
    s.pair.tick(1);
    assert_eq!(s.pair.codes(), [REFUSED, REFUSED]);
    assert_eq!(s.pair.devices[1].status().unwrap().rank, Some(0));
}

#[test]
fn p3_a_put_out_of_a_region_reaches_host_and_device_before_its_signal() {
    let mut s = sending_locally(false, 8000);
    let mover = SlowMover::default();
    mover.0.lock().unwrap().bytes = vec![0; 8000];
    s.pair.mover = Some(Box::new(mover.clone()));
    let device = RegionMemory::Device { address: DEVICE, exported: None };
    let device = s.pair.ends[1].add_region(device, 8000).unwrap();
    let from = |record: Record| Record {
        flags: record.flags | Record::REGION,
        place: s.lkey,
        place_offset: 100,
        ..record
    };
    assert!(s.pair.devices[0].post_from(from(put(s.rkey, 5, 0, 1)), 7000));
    assert!(s.pair.devices[0].post_from(from(put(device, 9, 1, 1)), 7000));
    assert!(s.pair.devices[0].post(inline_send(3), b"behind"));
    // Through the landing ring, 2048 bytes at a time.
    for step in 0..4 {
        if step > 0 {
            assert!(s.pair.poll(1), "the next piece was read");
            assert!(!s.pair.poll(1), "the device is waited for");
        }
        (0..20).for_each(|i| _ = s.pair.poll(i % 2));
        assert_eq!([0, 1].map(|i| s.pair.devices[1].signal(i)), [1, 0]);
        assert_eq!(mover.0.lock().unwrap().copies.len(), step + 1);
        assert!(s.pair.devices[1].try_recv().is_none());
        mover.0.lock().unwrap().allowed = step + 1;
    }
    s.pair.settle();
    assert_eq!(s.pair.devices[1].signal(1), 1);
    assert!(s.to.read(5, 7000) == s.from.read(100, 7000));
    assert!(mover.0.lock().unwrap().bytes[9..7009] == s.from.read(100, 7000));
    take(&mut s.pair.devices[1], 3, b"behind");
    s.pair.assert_clean();
}

#[test]
fn p3_a_relay_goes_by_the_longest_stretch_of_the_landing_ring() {
    // Units that lie at the ring's end, of 32: given back, or held.
    for (before, held, pieces) in [(31, 0, 4), (0, 31, 110), (30, 1, 4), (3, 20, 13), (20, 3, 6)] {
        let mut s = sending_locally(false, 8000);
        let mover = SlowMover::default();
        *mover.0.lock().unwrap() =
            DeviceMemory { bytes: vec![0; 8000], allowed: usize::MAX, ..Default::default() };
        s.pair.mover = Some(Box::new(mover.clone()));
        let device = RegionMemory::Device { address: DEVICE, exported: None };
        let device = s.pair.ends[1].add_region(device, 8000).unwrap();
        // Both before the first is given back; otherwise the second begins at the ring's start.
        for (tag, units) in [(0, before), (1, held)] {
            if units > 0 {
                assert!(s.pair.devices[0].post_from(region_send(tag, s.lkey, 0), units * UNIT));
            }
        }
        s.pair.settle();
        if before > 0 {
            take(&mut s.pair.devices[1], 0, &s.from.read(0, before * UNIT));
            s.pair.settle();
        }
        let flags = Record::REGION | Record::WITH_SIGNAL;
        let put = Record { flags, place: s.lkey, place_offset: 9, ..put(device, 0, 0, 1) };
        assert!(s.pair.devices[0].post_from(put, 7000));
        s.pair.settle();
        assert_eq!(s.pair.devices[1].signal(0), 1);
        let m = mover.0.lock().unwrap();
        assert_eq!(m.copies.len(), pieces, "{before} units before {held}");
        assert!(m.bytes[..7000] == s.from.read(9, 7000));
        if held > 0 {
            take(&mut s.pair.devices[1], 1, &s.from.read(0, held * UNIT));
        }
        s.pair.assert_clean();
    }
}

#[test]
fn p8_a_turn_ends_when_the_engine_has_copied_enough() {
    const HALF: usize = 1 << 19;
    let mut s = sending_locally(true, 8 * HALF);
    for i in 0..8 {
        s.pair.devices[1].post_recv(s.rkey, (i * HALF) as u64, HALF as u32, ANY);
        assert!(s.pair.devices[0].post_from(region_send(i as u32, s.lkey, (i * HALF) as u64), HALF));
    }
    (0..3).for_each(|_| _ = s.pair.poll(1));
    while s.pair.poll(0) {}
    for turn in 1..=4 {
        assert!(s.pair.poll(1));
        assert_eq!(s.pair.ends[1].counters().delivered, turn * 2);
    }
    s.pair.settle();
    assert!(s.to.read(0, 8 * HALF) == s.from.read(0, 8 * HALF));
    s.pair.assert_clean();
}

#[test]
fn p8_a_sender_that_names_memory_it_does_not_have_is_refused_and_hurts_nobody_else() {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
    let mut bystander = Pair::default();
    let page = abi::PUSHGATE_PAGE as usize;
    // SAFETY: new memory that no other code knows.
    let readable = unsafe {
        let at = mmap_anonymous(
            std::ptr::null_mut(),
            2 * page,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
        .unwrap();
        mprotect(at.cast::<u8>().add(page).cast(), page, MprotectFlags::empty()).unwrap();
        at as u64
    };
    let cases = [
        ("nothing", 0),
        ("nothing at all", 1 << 55),
        ("beyond what there can be", abi::PUSHGATE_DATA_MASK),
        ("the half of it", readable + page as u64 - 50),
    ];
    for (n, (what, address)) in cases.into_iter().enumerate() {
        let mut s = sending_locally(true, 200);
        s.pair.devices[1].post_recv(s.rkey, 0, 100, ANY);
        s.pair.settle();
        let record = Record { length: 100, id: 0, ..region_send(0, 0, address) };
        s.pair.forge(0, 0, &record);
        (0..4).for_each(|_| _ = s.pair.poll(1));
        assert_eq!(
            s.pair.devices[1].status().map(|s| (Some(s.code as u32), s.rank)),
            Some((REFUSED, Some(0))),
            "{what}"
        );
        assert!(s.pair.devices[1].try_recv().is_none(), "{what}");
        s.to.check_guards();
        s.pair.devices[1].own.check_gaps();
        assert!(bystander.devices[0].post(inline_send(n as u32), b"well"));
        bystander.settle();
        take(&mut bystander.devices[1], n as u32, b"well");
        bystander.settle();
    }
    bystander.assert_clean();
}

#[test]
fn p7_p8_where_the_peer_cannot_read_a_region_send_is_refused_with_a_sentence() {
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    // A process that exists and is not this one: its memory is not what the offer names.
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let own = std::process::id();
    let cases = [
        (None, true, "does not know this process"),
        (Some(other.id()), true, "proxy = thread"),
        // A proxy process whose program has the segment at the same address.
        (Some(own), false, "proxy = thread"),
    ];
    for (pid, in_program, sentence) in cases {
        m.iter().for_each(|m| m.reset());
        let reader = QpMemory { peer_pid: pid, ..m[1].joined(&m[0], None) };
        let sender = QpMemory { in_program, ..m[0].joined(&m[1], None) };
        let mut sender = Endpoint::local(sender, options(1)).unwrap();
        assert!(matches!(sender.region_sends(), RegionSends::Unknown));
        let region = Region::new(100);
        let lkey = sender.add_region(region.memory(), 100).unwrap();
        let mut device = Device::new(&m[0], &m[1]);
        assert!(device.post_from(region_send(0, lkey, 0), 100));
        // The sender waits until the peer has reported.
        (0..4).for_each(|_| _ = sender.poll(&mut None));
        assert!(sender.status().is_none() && !sender.has_work());
        let mut reader = Endpoint::local(reader, options(0)).unwrap();
        reader.poll(&mut None);
        assert!(sender.has_work());
        let RegionSends::No(why) = sender.region_sends() else { panic!("{pid:?} was read") };
        assert!(why.contains(sentence) && why.contains("window"), "{why}");
        sender.poll(&mut None);
        let status = sender.status().unwrap();
        assert_eq!((Some(status.code as u32), status.rank), (REFUSED, Some(0)));
        // A sender that ignores this is refused by the reader.
        ring_forge(&m[0], &Record { length: 8, ..region_send(0, 0, region_address(&region)) });
        reader.poll(&mut None);
        let status = reader.status().unwrap();
        assert_eq!((Some(status.code as u32), status.rank), (REFUSED, Some(0)));
    }
    other.kill().unwrap();
    other.wait().unwrap();
}

fn ring_forge(from: &Memory, record: &Record) {
    let log = from.geometry.link_log;
    let slots = from.link.words(abi::PUSHGATE_LINK_RING as usize, 8 << log);
    pushgate_proxy::ring::publish(slots, 0, log, &record.encode(0));
}

fn region_address(region: &Region) -> u64 {
    let RegionMemory::Host { address, .. } = region.memory() else { unreachable!() };
    address as u64
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite verbs-endpoint"]
fn p8_over_rdma_no_message_out_of_a_region_is_longer_than_the_device_can_send() {
    rdma::must_be_chosen();
    let longest = rdma::device().longest_message() as usize;
    // Soft-RoCE sends 8 MiB. Others send as much as a message can have.
    if longest > 64 << 20 {
        return pushgate_tests::skip("no RDMA device here has a longest message of 64 MiB or less");
    }
    for (length, codes) in [(longest, [None; 2]), (longest + 1, [REFUSED; 2])] {
        let mut s = sending(true, length);
        s.pair.devices[1].post_recv(s.rkey, 0, length as u32, 1);
        s.pair.settle();
        assert!(s.pair.devices[0].post_from(region_send(1, s.lkey, 0), length));
        s.pair.settle();
        s.pair.tick(1);
        assert_eq!(s.pair.codes(), codes);
        let expected = if codes[0].is_none() { s.from.read(0, length) } else { vec![0; length] };
        assert!(s.to.read(0, length) == expected);
    }
}

#[test]
fn p8_only_memory_of_this_process_goes_out_of_a_region() {
    let mut s = sending(true, 100);
    s.pair.settle();
    assert_eq!(s.pair.ends[0].region_sends(), RegionSends::Yes);
    let device = RegionMemory::Device { address: DEVICE, exported: None };
    let lkey = s.pair.ends[0].add_region(device, 100).unwrap();
    s.pair.devices[1].post_recv(s.rkey, 0, 100, ANY);
    s.pair.settle();
    assert!(s.pair.devices[0].post_from(region_send(0, lkey, 0), 100));
    s.pair.settle();
    s.pair.tick(1);
    assert_eq!(s.pair.codes(), [REFUSED, REFUSED]);
    assert_eq!(s.pair.devices[1].status().unwrap().rank, Some(0));
}

// --------------------------------------------------------------- P2: torn, stuck

#[test]
fn p2_a_slot_that_is_never_published_is_stuck_after_the_limit() {
    let mut pair = Pair::default();
    let limit = options(0).stuck_ns;
    // A hole with nothing after it is a kernel at work, however long it takes.
    let (slot, place) = pair.devices[0].take(1, false).unwrap();
    assert_eq!((slot, place), (0, 0));
    pair.settle();
    [0, limit, 10 * limit].into_iter().for_each(|now| pair.tick(now));
    assert_eq!(pair.codes(), [None, None]);

    let record = Record { flags: Record::INLINE | Record::SIGNALED, ..inline_send(1) };
    assert!(pair.devices[0].post(record, b"later"));
    let begin = 20 * limit;
    for now in [begin, begin + limit / 2, begin + limit - 1] {
        pair.settle();
        pair.tick(now);
        assert_eq!(pair.codes(), [None, None], "before the limit");
    }
    pair.tick(begin + limit);
    assert_eq!(pair.codes(), [STUCK, STUCK]);
    let (a, b) = (pair.devices[0].status().unwrap(), pair.devices[1].status().unwrap());
    assert_eq!((a.detail, b.rank), (0, Some(0)), "the slot, and whose it is");
    assert_eq!(pair.ends[0].counters().stuck, 1);
    assert!(pair.devices[1].try_recv().is_none(), "nothing overtook the hole");
}

#[test]
fn p2_a_hole_that_is_filled_in_time_is_nothing() {
    let mut pair = Pair::default();
    let limit = options(0).stuck_ns;
    for i in 0..40u32 {
        // Each time another slot is late, and at every look one is missing.
        let (slot, _) = pair.devices[0].take(0, false).unwrap();
        assert!(pair.devices[0].post(inline_send(2 * i + 1), b"b"));
        pair.settle();
        pair.tick(i as u64 * limit / 2);
        let mut words = Record { length: 1, ..inline_send(2 * i) }.encode(0);
        set_inline(&mut words, Opcode::Send, b"a");
        pair.devices[0].publish(slot, &words);
        pair.settle();
        take(&mut pair.devices[1], 2 * i, b"a");
        take(&mut pair.devices[1], 2 * i + 1, b"b");
        pair.settle();
    }
    pair.assert_clean();
}

#[test]
fn p2_a_half_written_slot_is_not_taken_and_stuck_if_it_stays_so() {
    let mut pair = Pair::default();
    let (slot, _) = pair.devices[0].take(0, false).unwrap();
    let words = Record { length: 0, ..inline_send(0) }.encode(lap_of(slot, GEOMETRY.slots_log));
    for (w, value) in pair.devices[0].wqe_ring()[..7].iter().zip(words) {
        w.store(value, Ordering::Relaxed);
    }
    pair.settle();
    pair.tick(0);
    assert_eq!((pair.codes(), pair.ends[0].counters().released), ([None, None], 0));
    pair.tick(options(0).stuck_ns);
    assert_eq!(pair.codes(), [STUCK, STUCK]);
}

#[test]
fn p2_a_word_of_another_lap_is_refused() {
    for word in 0..8 {
        let mut pair = Pair::default();
        assert!(pair.devices[0].post(inline_send(0), b"x"));
        pair.devices[0].wqe_ring()[word].fetch_add(1 << abi::PUSHGATE_LAP_SHIFT, Ordering::Relaxed);
        pair.settle();
        pair.tick(1);
        assert_eq!(pair.codes(), [REFUSED, REFUSED], "word {word}");
        let c = pair.ends[0].counters();
        assert_eq!((c.refused, c.released), (1, 0));
    }
}

// ------------------------------------------------------------------ P3: movers

/// A device memory that only this mover can reach; a copy is done when the test says so.
#[derive(Default)]
struct DeviceMemory {
    bytes: Vec<u8>,
    copies: Vec<(u64, usize, usize)>,
    allowed: usize,
    fail: bool,
    refuse: bool,
}

#[derive(Clone, Default)]
struct SlowMover(Arc<Mutex<DeviceMemory>>);

const DEVICE: u64 = 0x7000_0000_0000;

impl Mover for SlowMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        let mut m = self.0.lock().unwrap();
        if m.refuse {
            return Err(MoveError { length, reason: "no room for another copy".into() });
        }
        m.copies.push((dst - DEVICE, src, length));
        Ok(m.copies.len() as u64 - 1)
    }

    fn done(&mut self, ticket: u64) -> Result<bool, MoveError> {
        let m = &mut *self.0.lock().unwrap();
        let (dst, src, length) = m.copies[ticket as usize];
        if m.fail {
            return Err(MoveError { length, reason: "the device is gone".into() });
        }
        if ticket as usize >= m.allowed {
            return Ok(false);
        }
        // SAFETY: the endpoint keeps the source valid until the copy is reported as done.
        let src = unsafe { std::slice::from_raw_parts(src as *const u8, length) };
        m.bytes[dst as usize..][..length].copy_from_slice(src);
        Ok(true)
    }
}

fn with_mover() -> (Pair, SlowMover, u32) {
    let mut pair = Pair::default();
    let mover = SlowMover::default();
    mover.0.lock().unwrap().bytes = vec![0; 4096];
    pair.mover = Some(Box::new(mover.clone()));
    let key =
        pair.ends[1].add_region(RegionMemory::Device { address: DEVICE, exported: None }, 4096).unwrap();
    (pair, mover, key)
}

fn put(rkey: u32, offset: u64, signal: u32, value: u64) -> Record {
    Record {
        flags: Record::WITH_SIGNAL | Record::SIGNALED,
        rkey,
        remote_offset: offset,
        signal,
        signal_value: value,
        ..Record::new(Opcode::Put)
    }
}

#[test]
fn p3_p5_signal_count_and_what_follows_wait_for_the_devices_copy() {
    let (mut pair, mover, key) = with_mover();
    assert!(pair.devices[0].post(put(key, 100, 0, 1), &bytes(1, 300)));
    assert!(
        pair.devices[0].post(
            Record { flags: Record::INLINE | Record::WITH_SIGNAL, ..put(key, 500, 1, 2) },
            &bytes(2, 16)
        )
    );
    assert!(pair.devices[0].post(inline_send(3), b"behind"));
    for _ in 0..50 {
        (0..2).for_each(|i| _ = pair.poll(i));
    }
    assert_eq!(mover.0.lock().unwrap().copies.len(), 2, "both are under way");
    assert_eq!((pair.devices[1].signal(0), pair.devices[0].delivered()), (0, 0));
    assert!(pair.devices[0].poll_cq().is_none());
    assert!(!pair.ends[1].remove_region(key), "not while its bytes are being moved");

    mover.0.lock().unwrap().allowed = 1;
    (0..4).for_each(|i| _ = pair.poll(i % 2));
    assert_eq!((pair.devices[1].signal(0), pair.devices[1].signal(1)), (1, 0));
    assert_eq!(mover.0.lock().unwrap().bytes[100..400], bytes(1, 300));
    assert!(pair.devices[1].try_recv().is_none());
    mover.0.lock().unwrap().allowed = 2;
    pair.settle();
    assert_eq!(mover.0.lock().unwrap().bytes[500..516], bytes(2, 16));
    assert_eq!(pair.devices[1].signal(1), 2);
    take(&mut pair.devices[1], 3, b"behind");
    assert_eq!(pair.devices[0].poll_cq().map(|c| c.status), Some(0));
    pair.assert_clean();
}

#[test]
fn p3_p7_nothing_is_delivered_behind_a_copy_that_failed() {
    let (mut pair, mover, key) = with_mover();
    mover.0.lock().unwrap().fail = true;
    assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(1, 300)));
    let signal = Record { signal: 1, signal_value: 1, ..Record::new(Opcode::Signal) };
    assert!(pair.devices[0].post(signal, b""));
    assert!(pair.devices[0].post(inline_send(2), b"behind"));
    pair.settle();
    assert_eq!([0, 1].map(|i| pair.devices[1].signal(i)), [0, 0]);
    assert!(pair.devices[1].try_recv().is_none());
    pair.tick(1);
    assert_eq!(pair.codes(), [ABORTED, ABORTED]);
    assert_eq!(pair.devices[0].poll_cq().map(|c| c.status as u32), ABORTED);
}

#[test]
fn p3_p5_many_device_copies_are_under_way_and_end_in_order() {
    let receiver = QpOptions { posted_receives: true, ..options(0) };
    let geometry = Geometry { rx_log: 5, slots_log: 5, cq_log: 5, link_log: 5, ..GEOMETRY };
    let mut pair = Pair::new(geometry, [options(1), receiver]);
    let mover = SlowMover::default();
    mover.0.lock().unwrap().bytes = vec![0; 4096];
    pair.mover = Some(Box::new(mover.clone()));
    let region = RegionMemory::Device { address: DEVICE, exported: None };
    let key = pair.ends[1].add_region(region, 4096).unwrap();
    let host = Region::new(100);
    let host_key = pair.ends[1].add_region(host.memory(), 100).unwrap();
    // Twenty into the device, short and long, then one into the host's memory.
    for i in 0..20 {
        pair.devices[1].post_recv(key, i as u64 * 100, 100, ANY);
    }
    pair.devices[1].post_recv(host_key, 0, 100, ANY);
    let content = |i: u32| bytes(i as u64, if i.is_multiple_of(3) { 33 } else { 60 });
    for i in 0..21u32 {
        let record = if i.is_multiple_of(3) { inline_send(i) } else { window_send(i) };
        assert!(
            pair.devices[0].post(Record { flags: record.flags | Record::SIGNALED, ..record }, &content(i))
        );
    }
    let turn = |pair: &mut Pair| (0..40).for_each(|i| _ = pair.poll(i % 2));
    turn(&mut pair);
    assert_eq!(mover.0.lock().unwrap().copies.len(), 16, "a bound");
    assert!(pair.devices[1].try_recv().is_none() && pair.devices[0].poll_cq().is_none());
    assert!(!pair.ends[1].remove_region(key), "not while its bytes are being moved");
    for done in 1..=20 {
        mover.0.lock().unwrap().allowed = done;
        turn(&mut pair);
        let i = done as u32 - 1;
        let m = pair.devices[1].try_recv().expect("the oldest is done");
        assert_eq!((m.tag, m.place), (i, i));
        let found = mover.0.lock().unwrap().bytes[i as usize * 100..][..content(i).len()].to_vec();
        assert_eq!(found, content(i), "message {i}");
        assert_eq!(mover.0.lock().unwrap().copies.len(), (16 + done).min(20));
        assert_eq!(pair.devices[1].try_recv().is_some(), done == 20, "the host's memory is no short cut");
        assert_eq!(pair.devices[0].poll_cq().map(|c| c.wr_id), Some(i));
    }
    pair.settle();
    assert_eq!(host.read(0, 60), content(20));
    pair.assert_clean();
}

#[test]
fn p3_p7_behind_a_copy_that_failed_those_under_way_are_only_waited_for() {
    let (mut pair, mover, key) = with_mover();
    for i in 0..3 {
        assert!(pair.devices[0].post(put(key, i * 300, i as u32, 1), &bytes(i, 300)));
    }
    (0..8).for_each(|i| _ = pair.poll(i % 2));
    assert_eq!(mover.0.lock().unwrap().copies.len(), 3);
    mover.0.lock().unwrap().fail = true;
    pair.poll(1);
    assert_eq!(pair.ends[1].status().map(|s| s.code as u32), ABORTED);
    mover.0.lock().unwrap().fail = false;
    assert!(!pair.ends[1].settle(&mut pair.mover), "a device writes yet");
    mover.0.lock().unwrap().allowed = 3;
    assert!(pair.ends[1].settle(&mut pair.mover));
    pair.poll(1);
    assert_eq!([0, 1, 2].map(|i| pair.devices[1].signal(i)), [0; 3]);
    pair.tick(1);
    assert_eq!((pair.codes(), pair.devices[0].delivered()), ([ABORTED, ABORTED], 0));
}

#[test]
fn p7_a_copy_that_cannot_begin_is_laid_to_the_side_whose_device_it_is() {
    let (mut pair, mover, key) = with_mover();
    mover.0.lock().unwrap().refuse = true;
    assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(1, 300)));
    pair.settle();
    pair.tick(1);
    assert_eq!(pair.codes(), [REFUSED, REFUSED]);
    assert_eq!([0, 1].map(|i| pair.devices[i].status().unwrap().rank), [Some(1), Some(1)]);
    assert_eq!(pair.devices[1].signal(0), 0);
}

// --------------------------------------------------------------- P7: the end

#[test]
fn p7_an_end_reaches_the_peer_and_every_signaled_wqe_completes_once() {
    for limit in [0, 3, 100] {
        let mut pair = Pair::default();
        let rx = 1 << GEOMETRY.rx_log;
        // Some are retired, some are at the peer, one waits for a receive.
        for i in 0..rx + 3 {
            let record = Record { flags: Record::SIGNALED | Record::INLINE, ..inline_send(i) };
            assert!(pair.devices[0].post(record, b"x"));
            if i < limit {
                pair.settle();
            }
        }
        if limit > 0 {
            assert!(pair.ends[0].counters().retired > 0);
        }
        let done = pair.ends[0].counters().retired as u32;
        let lost = Status { rank: Some(7), detail: 9, ..Status::new(abi::PUSHGATE_PEER_LOST) };
        pair.ends[0].fail(lost);
        assert_eq!(pair.devices[0].status(), Some(lost));
        pair.settle();
        pair.tick(1);
        let told = pair.devices[1].status().expect("the peer is told");
        assert_eq!((told.code, told.detail), (lost.code, 9));
        // A second cause changes nothing.
        pair.ends.iter_mut().for_each(|e| e.fail(Status::new(abi::PUSHGATE_ABORTED)));
        pair.settle();
        pair.tick(2);
        assert_eq!(pair.devices[0].status(), Some(lost));
        let mut seen = Vec::new();
        while let Some(c) = pair.devices[0].poll_cq() {
            let expected = if c.wr_id < done { abi::PUSHGATE_OK } else { abi::PUSHGATE_PEER_LOST };
            assert_eq!(c.status as u32, expected, "{c:?}");
            seen.push(c.wr_id);
        }
        // This includes those that the engine never took.
        assert!(seen.iter().copied().eq(0..rx + 3), "{done} done, {limit}: {seen:?}");
    }
}

#[test]
fn p7_a_refused_wqe_completes_behind_those_before_it_and_nothing_after_it_goes_out() {
    let mut pair = Pair::default();
    pair.settle();
    let signaled = |i| Record { flags: Record::SIGNALED | Record::INLINE, ..inline_send(i) };
    for i in 0..2 {
        assert!(pair.devices[0].post(signaled(i), b"x"));
    }
    let wrong = Record { flags: Record::SIGNALED, id: 2, signal: 4, ..Record::new(Opcode::Signal) };
    assert!(pair.devices[0].post(wrong, b""));
    assert!(pair.devices[0].post(signaled(3), b"x"));
    pair.poll(0);
    pair.tick(1);
    pair.settle();
    assert_eq!(pair.codes(), [REFUSED, REFUSED]);
    let status = pair.devices[0].status().unwrap();
    assert_eq!((status.rank, status.detail), (Some(0), 2), "rank and slot at fault");
    let cqes: Vec<_> =
        std::iter::from_fn(|| pair.devices[0].poll_cq()).map(|c| (c.wr_id, c.status)).collect();
    let code = abi::PUSHGATE_REFUSED as u8;
    assert_eq!(cqes, [(0, code), (1, code), (2, code), (3, code)]);
    assert_eq!(pair.ends[0].counters().released, 2);
}

#[test]
fn p7_nothing_is_posted_in_the_pass_that_failed() {
    let mut pair = Pair::default();
    pair.settle();
    assert!(
        pair.devices[0].post(Record { flags: Record::INLINE | Record::SIGNALED, ..inline_send(0) }, b"x")
    );
    // The device of side 0 gives back a message that it never had.
    pair.devices[0].release(1);
    pair.poll(0);
    assert_eq!(pair.devices[0].status().map(|s| s.code as u32), REFUSED);
    assert_eq!(pair.ends[0].counters().released, 0);
    pair.tick(1);
    pair.poll(1);
    assert!(pair.devices[1].try_recv().is_none());
}

#[test]
fn p7_closing_tells_the_peer_only_if_it_waits_for_something() {
    let mut pair = Pair::default();
    pair.ends[0].close();
    pair.tick(1);
    assert_eq!(pair.devices.each_ref().map(|d| d.status().map(|s| s.code as u32)), [ABORTED, None]);

    let mut pair = Pair::default();
    assert!(pair.devices[0].post(window_send(0), b"x"));
    pair.settle();
    pair.ends[0].close();
    pair.tick(1);
    assert_eq!(pair.codes(), [ABORTED, ABORTED]);
}

// ------------------------------------------------------------- P8: wrong input

#[test]
fn p8_a_put_outside_of_a_region_is_refused_and_hurts_nobody_else() {
    let mut bystander = Pair::default();
    // What was requested, derived from the right key: key, offset, length.
    type Wrong = fn(u32) -> (u32, u64, usize);
    let cases: [(&str, Wrong); 6] = [
        ("a byte too far", |key| (key, 1, 200)),
        ("far outside", |key| (key, 1 << 40, 1)),
        ("an offset that would wrap", |key| (key, abi::PUSHGATE_DATA_MASK, 200)),
        ("another tag", |key| (key ^ 1 << 31, 0, 8)),
        ("another index", |key| (key + 1, 0, 8)),
        ("no key at all", |_| (0, 0, 8)),
    ];
    for (n, (what, wrong)) in cases.into_iter().enumerate() {
        for inline in [false, true] {
            let mut pair = Pair::default();
            let region = Region::new(200);
            let key = pair.ends[1].add_region(region.memory(), 200).unwrap();
            assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(9, 200)));
            let (rkey, offset, length) = wrong(key);
            let length = if inline { length.min(16) } else { length };
            let flags = Record::SIGNALED | Record::WITH_SIGNAL | if inline { Record::INLINE } else { 0 };
            // One byte too far is an error only with all 200 of them.
            let offset = if inline && n == 0 { 200 - 15 } else { offset };
            assert!(pair.devices[0].post(Record { flags, ..put(rkey, offset, 1, 1) }, &bytes(1, length)));
            pair.settle();
            pair.tick(1);
            assert_eq!(pair.codes(), [REFUSED, REFUSED], "{what}");
            assert_eq!(pair.ends[1].counters().refused, 1, "{what}");
            assert_eq!((pair.devices[1].signal(0), pair.devices[1].signal(1)), (1, 0), "{what}");
            assert_eq!(region.read(0, 200), bytes(9, 200), "{what}");
            let last = std::iter::from_fn(|| pair.devices[0].poll_cq()).last().unwrap();
            assert_eq!(Some(last.status as u32), REFUSED, "{what}");
            region.check_guards();
            pair.devices[1].own.check_gaps();

            let tag = 2 * n as u32 + inline as u32;
            assert!(bystander.devices[0].post(inline_send(tag), b"well"));
            bystander.settle();
            take(&mut bystander.devices[1], tag, b"well");
            bystander.settle();
        }
    }
    bystander.assert_clean();
}

#[test]
fn p8_a_removed_region_is_refused() {
    let mut pair = Pair::default();
    let region = Region::new(64);
    let key = pair.ends[1].add_region(region.memory(), 64).unwrap();
    assert!(pair.ends[1].remove_region(key) && !pair.ends[1].remove_region(key));
    assert!(pair.devices[0].post(put(key, 0, 0, 1), &bytes(1, 64)));
    pair.settle();
    pair.tick(1);
    assert_eq!(pair.codes(), [REFUSED, REFUSED]);
    assert_eq!(region.read(0, 64), [0; 64]);
}

/// A mover that checks its requests and copies nothing.
struct Watch {
    region: u64,
    window: std::ops::Range<usize>,
    polls: u64,
}

impl Mover for Watch {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        let end = dst.checked_add(length as u64).expect("the address wraps");
        assert!(dst >= DEVICE && end <= DEVICE + self.region, "{length} bytes to {dst:#x}");
        let inside = self.window.contains(&src) && src + length <= self.window.end;
        assert!(inside || length <= abi::PUSHGATE_INLINE_SEND as usize, "{length} bytes from {src:#x}");
        Ok(0)
    }

    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        self.polls += 1;
        match self.polls % 97 {
            0 => Err(MoveError { length: 0, reason: "now and then one fails".into() }),
            n => Ok(n % 2 == 0),
        }
    }
}

const HOSTILE: Geometry = Geometry {
    window_log: 3,
    slots_log: 2,
    cq_log: 1,
    rx_log: 2,
    link_log: 3,
    landing_log: 2,
    signals: 3,
    rank: 0,
};

const REGION: usize = 150;

/// One endpoint between a program and a peer that write what they like.
struct Victim {
    own: Arc<Memory>,
    peer: Arc<Memory>,
    region: Region,
}

/// How a case ended, and how far it came.
#[derive(Default)]
struct Outcome {
    ended: bool,
    delivered: u64,
    released: u64,
    copied: u64,
}

/// Picks one of the values, the last of them seldom; now and then anything at all.
fn pick(r: u64, values: &[u64]) -> u64 {
    let last = values.len() - 1;
    match r % 100 {
        0 => r / 100,
        1..4 => values[last],
        _ => values[(r >> 8) as usize % last],
    }
}

impl Victim {
    fn new() -> Self {
        let own = Memory::new(HOSTILE);
        let peer = Memory::new(Geometry { rank: 1, window_log: 2, ..HOSTILE });
        Victim { own, peer, region: Region::new(REGION) }
    }

    /// A record that may be right, made of values that are right or nearly so.
    fn record(w: &[u64; 10], id: u32, keys: &[u64], place: u64, units: u64) -> Record {
        let opcode = [Opcode::Send, Opcode::Send, Opcode::Put, Opcode::Put, Opcode::Signal, Opcode::Nop]
            [w[1] as usize % 6];
        let all = [0, 0, 0, 0, Record::INLINE, Record::INLINE, Record::INLINE, Record::REGION];
        let mut flags = all[(w[1] >> 8) as usize % 8];
        if opcode == Opcode::Put && w[1] >> 16 & 1 == 0 {
            flags |= Record::WITH_SIGNAL;
        }
        if matches!(opcode, Opcode::Signal | Opcode::Nop) {
            flags = 0;
        }
        if w[1] >> 17 & 1 == 0 {
            flags |= Record::SIGNALED;
        }
        let inline = flags & Record::INLINE != 0;
        let most = if inline { if opcode == Opcode::Send { 40 } else { 16 } } else { units * UNIT as u64 };
        let most = if opcode == Opcode::Put { most.min(128) } else { most };
        let length = match opcode {
            Opcode::Signal => 0,
            _ => pick(w[2], &[0, 1, most / 2, most.saturating_sub(1), most, most + 1]),
        };
        let region = flags & Record::REGION != 0;
        Record {
            opcode,
            flags,
            id,
            length: length as u32,
            tag: pick(w[3], &[1, 2]) as u32,
            place: if region { pick(w[4], keys) } else { pick(w[4], &[place, place + 1]) } as u32,
            place_offset: if region { pick(w[5], &[0, 1]) } else { pick(w[5], &[units, units + 1]) },
            rkey: pick(w[6], keys) as u32,
            remote_offset: pick(w[7], &[0, 1, 10, 22, REGION as u64 - 16, 1 << 55]),
            signal: pick(w[8], &[0, 1, 2, 3]) as u32,
            signal_value: w[9],
        }
    }

    /// The record for a slot, now and then with a word or a lap that is wrong.
    fn spoiled(slot: u64, log: u32, record: &Record, r: u64) -> [u64; 8] {
        let lap = lap_of(slot, log);
        let mut words = record.encode(lap);
        let word = &mut words[(r >> 4) as usize % 8];
        match r % 100 {
            0 => *word = r.rotate_right(13),
            1 => {
                let lap = (lap as u64) << abi::PUSHGATE_LAP_SHIFT;
                *word = r.rotate_right(13) & abi::PUSHGATE_DATA_MASK | lap;
            }
            2 => *word ^= 1 << (r >> 7 & 63),
            _ => {}
        }
        words
    }

    fn store(ring_words: &[AtomicU64], slot: u64, log: u32, words: &[u64; 8]) {
        let first = (slot as usize & ((1 << log) - 1)) * 8;
        for i in (0..8).rev() {
            ring_words[first + i].store(words[i], Ordering::Release);
        }
    }

    fn run(&self, posted_receives: bool, share: u8, steps: &[[u64; 10]]) -> Outcome {
        self.own.reset();
        self.peer.reset();
        self.region.reset();
        let options = QpOptions { posted_receives, in_place_share: share, ..options(1) };
        let wires = rdma::chosen().then(|| rdma::connect([&self.own, &self.peer], [posted_receives, false]));
        let mut end = match &wires {
            Some(wires) => wires[0].endpoint(&self.own, options),
            None => Endpoint::local(self.own.joined(&self.peer, None), options).unwrap(),
        };
        let host = end.add_region(self.region.memory(), REGION as u64).unwrap() as u64;
        let device = end
            .add_region(RegionMemory::Device { address: DEVICE, exported: None }, REGION as u64)
            .unwrap() as u64;
        let keys = [host, device, host + 1];
        let window = match &wires {
            Some(wires) => wires[0].mirror.as_ptr().as_ptr() as usize,
            None => self.peer.window_read.as_ptr().as_ptr() as usize,
        };
        let window = window..window + (UNIT << self.peer.geometry.window_log);
        let mut mover: Option<Box<dyn Mover>> =
            Some(Box::new(Watch { region: REGION as u64, window, polls: 1 }));

        let mut program = Device::new(&self.own, &self.peer);
        let link = self.peer.link.words(abi::PUSHGATE_LINK_RING as usize, 8 << HOSTILE.link_log);
        let line = self.peer.link.words(abi::PUSHGATE_LINK_RECEIVED as usize, 4);
        let (mut sequence, mut now, mut sends, mut receives) = (0u64, 0u64, 0u32, 0u32);
        for w in steps {
            let r = w[0] >> 8;
            match w[0] % 16 {
                0..4 => {
                    let units = w[2] >> 32 & 3;
                    let like = Self::record(w, 0, &keys, 0, units);
                    let units = if like.in_window() { units } else { 0 };
                    if let Some((slot, place)) = program.take(units, false) {
                        let record = Self::record(w, slot as u32, &keys, place, units);
                        let words = Self::spoiled(slot, HOSTILE.slots_log, &record, r);
                        Self::store(program.wqe_ring(), slot, HOSTILE.slots_log, &words);
                    }
                }
                4..8 => {
                    let id = pick(r, &[sequence, sequence + 1]) as u32;
                    let units = w[2] >> 32 & 3;
                    let mut record = Self::record(w, id, &keys, (w[2] >> 40) % (5 - units), units);
                    // Now and then the peer does what it may never do, or not now.
                    let held = program.rx_head().wrapping_sub(program.consumed().load(Ordering::Relaxed));
                    let full = held >= 3 || posted_receives && sends >= receives;
                    if w[3] >> 48 & 15 != 0 {
                        record.flags &= !Record::REGION;
                        if record.opcode == Opcode::Nop || record.opcode == Opcode::Send && full {
                            let flags = record.flags & Record::SIGNALED;
                            record = Record { opcode: Opcode::Signal, length: 0, flags, ..record };
                        }
                    }
                    sends += (record.opcode == Opcode::Send) as u32;
                    let mut words = Self::spoiled(sequence, HOSTILE.link_log, &record, w[9] >> 3);
                    match &wires {
                        Some(wires) => {
                            // What only this wire has: a short payload in the slot (here never a
                            // whole one), and a payload that lies in its region already.
                            match w[9] >> 40 & 31 {
                                0 => words[0] |= 0x80 << abi::PUSHGATE_FLAGS_SHIFT,
                                1 | 2 => words[0] |= 0x40 << abi::PUSHGATE_FLAGS_SHIFT,
                                _ => {}
                            }
                            wires[1].forge_record(sequence, HOSTILE.link_log, &words);
                        }
                        None => Self::store(link, sequence, HOSTILE.link_log, &words),
                    }
                    sequence += 1;
                }
                8 => {
                    let true_count = program.rx_head();
                    let count = pick(r, &[true_count, true_count + 1]);
                    program.consumed().store(count, Ordering::Relaxed);
                }
                9 | 10 => {
                    let released = end.counters().released;
                    let granted = program.slots() + 4;
                    let count = match r % 3 {
                        2 => pick(r >> 4, &[2, 4, granted]),
                        _ => pick(r >> 4, &[released / 2, released, released, released, released + 1]),
                    };
                    let epoch = if w[1].is_multiple_of(16) { w[1] as u16 } else { 0 };
                    match &wires {
                        Some(wires) => {
                            wires[1].forge((r % 3) as usize * 8, &[count_word(epoch, count)], None)
                        }
                        None => line[(r % 3) as usize].store(count_word(epoch, count), Ordering::Relaxed),
                    }
                }
                11 | 15 => {
                    receives += 1;
                    let field = |i: usize, likely: &[u64]| pick(w[i], likely);
                    let (key, offset) = (field(1, &keys) as u32, field(2, &[0, 10, 22, REGION as u64]));
                    program.post_recv(
                        key,
                        offset,
                        field(3, &[64, 128, 30]) as u32,
                        field(4, &[u64::MAX, u64::MAX, 1]) as u32,
                    );
                    if r.is_multiple_of(64) {
                        program.receive_slot()[(r >> 4) as usize % 4].store(w[5], Ordering::Relaxed);
                    }
                }
                12 => {
                    now += r % 2_000_000;
                    end.tick(now);
                }
                13 if r % 32 == 0 => match &wires {
                    // A status counts only with its complement after it.
                    Some(wires) => wires[1].forge(40, &[w[1], if r & 64 == 0 { !w[1] } else { w[2] }], None),
                    None => line[3].store(w[1], Ordering::Relaxed),
                },
                // Places of regions that do not exist.
                13 if r % 32 == 1 => {
                    if let Some(wires) = &wires {
                        let at = 8192 + (w[1] as usize % (4096 + 4)) * 32;
                        wires[1].forge(at, &w[2..6], None);
                    }
                }
                14 if r % 16 == 0 => _ = end.remove_region(host as u32),
                _ => {}
            }
            end.has_work();
            end.poll(&mut mover);
            while program.try_recv().is_some() {}
        }
        (0..4).for_each(|_| _ = end.poll(&mut mover));
        end.tick(now + 1);
        end.tick(now + 10_000_000);
        self.own.check_gaps();
        self.peer.check_gaps();
        self.region.check_guards();
        // A run of canaries in the region can only have come from beyond the window.
        let found = self.region.read(0, REGION);
        assert!(!found.windows(16).any(|w| w == [0xc5; 16]), "bytes from outside of the window");
        assert_eq!(program.status().map(|s| s.word()), end.status().map(|s| s.word()));
        let c = end.counters();
        Outcome {
            ended: end.status().is_some(),
            delivered: c.delivered,
            released: c.released,
            copied: c.copied_bytes,
        }
    }
}

/// Random programs and random peers: nothing outside of what was registered is touched, nothing
/// panics, and another queue pair in the same loop delivers everything as usual.
#[test]
fn p8_whatever_they_write_nothing_else_is_touched_or_stopped() {
    let victim = Victim::new();
    let bystander = RefCell::new((Pair::default(), 0u32));
    let sum = RefCell::new((0, Outcome::default(), 0));
    // Over RDMA each case makes a queue pair of its own and waits for every write.
    let count = if rdma::chosen() { 40 } else { 4000 };
    let config = Config { cases: count, failure_persistence: None, ..Config::default() };
    let steps = prop::collection::vec(any::<[u64; 10]>(), 1..60);
    let outcome =
        TestRunner::new(config).run(&(any::<bool>(), any::<u8>(), steps), |(receives, share, steps)| {
            let outcome = victim.run(receives, share, &steps);
            let (pair, tag) = &mut *bystander.borrow_mut();
            for _ in 0..3 {
                let content = bytes(*tag as u64, *tag as usize % 500);
                assert!(pair.devices[0].post(window_send(*tag), &content));
                pair.settle();
                take(&mut pair.devices[1], *tag, &content);
                pair.settle();
                *tag += 1;
            }
            let mut sum = sum.borrow_mut();
            sum.0 += 1;
            sum.1.delivered += outcome.delivered;
            sum.1.released += outcome.released;
            sum.1.copied += outcome.copied;
            sum.2 += outcome.ended as u32;
            Ok(())
        });
    outcome.unwrap();
    bystander.borrow().0.assert_clean();
    let (cases, all, ended) = sum.into_inner();
    println!(
        "{cases} cases, {ended} ended with a status; {} released, {} delivered, {} bytes copied",
        all.released, all.delivered, all.copied
    );
    // Not every case was refused at its first step.
    assert!(cases >= count / 2 && ended > count / 8 && ended < cases);
    let count = count as u64;
    assert!(all.released > count / 8 && all.delivered > count / 4 && all.copied > count / 4);
}
