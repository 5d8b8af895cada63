//! Tests that the engine's passes, and what decides over rails, allocate nothing in steady state.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;

use common::*;
use pushgate_core::rails::arriving::Arriving;
use pushgate_core::rails::placing::{Placing, Target};
use pushgate_core::rails::sending::Sending;
use pushgate_core::rails::{Rules, Stripe};
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::QpOptions;

struct Counting;

thread_local! {
    /// Allocations of this thread only, so that those of the test harness do not count.
    static COUNT: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has allocated and not freed.
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    // A thread that ends may free and allocate after its variables are gone.
    let _ = COUNT.try_with(|c| c.set(c.get() + 1));
    freed(-bytes);
}

fn freed(bytes: i64) {
    let _ = BYTES.try_with(|c| c.set(c.get() - bytes));
}

// SAFETY: all calls go to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        freed(layout.size() as i64);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(p, layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PAYLOAD: usize = 700;

/// Passes messages of all kinds, with a reader that holds some of them back.
fn traffic(pair: &mut Pair, [lkey, rkey]: [u32; 2], begin: u32, messages: u32) {
    let payload = [7u8; PAYLOAD];
    let mut out = [0u8; PAYLOAD];
    let (mut posted, mut held, mut cqes) = (begin, 0, 0);
    while posted < begin + messages {
        let turn = posted;
        for _ in 0..4.min(begin + messages - posted) {
            let id = posted;
            let put = Record {
                flags: Record::WITH_SIGNAL,
                id,
                rkey,
                remote_offset: id as u64 % 100,
                signal: id % 4,
                signal_value: id as u64,
                ..Record::new(Opcode::Put)
            };
            let sent = match id % 6 {
                0 => pair.devices[0].post(inline_send(id), &payload[..40]),
                1 => pair.devices[0].post(put, &payload[..id as usize % PAYLOAD]),
                2 => pair.devices[0].post(Record { opcode: Opcode::Signal, flags: 0, ..put }, &[]),
                3 => {
                    let record = Record { flags: Record::SIGNALED, ..window_send(id) };
                    pair.devices[0].post(record, &payload[..id as usize % PAYLOAD])
                }
                // Over RDMA this would be refused.
                4 if !remote() => {
                    pair.devices[0].post_from(region_send(id, lkey, id as u64 % 100), id as usize % PAYLOAD)
                }
                _ => pair.devices[0].post(window_send(id), &payload[..id as usize % PAYLOAD]),
            };
            posted += sent as u32;
        }
        (0..2).for_each(|end| _ = pair.poll(end));
        pair.tick(posted as u64);
        while let Some(m) = pair.devices[1].try_recv() {
            pair.devices[1].read(&m, &mut out);
            held += 1;
        }
        // The messages that are held may be all that the sender waits for.
        if held > 4 || posted.is_multiple_of(3) || posted == turn {
            pair.devices[1].release(held);
            held = 0;
        }
        while pair.devices[0].poll_cq().is_some() {
            cqes += 1;
        }
    }
    pair.settle();
    pair.devices[1].release(held);
    pair.settle();
    while let Some(m) = pair.devices[1].try_recv() {
        pair.devices[1].read(&m, &mut out);
        pair.devices[1].release(1);
        pair.settle();
    }
    while pair.devices[0].poll_cq().is_some() {
        cqes += 1;
    }
    assert!(cqes >= messages / 6);
}

#[test]
fn no_pass_allocates_in_steady_state() {
    let mut pair = Pair::default();
    let region = Region::new(1000);
    let rkey = pair.ends[1].add_region(region.memory(), 1000).unwrap();
    let lkey = pair.ends[0].add_region(region.memory(), 1000).unwrap();
    let keys = [lkey, rkey];
    traffic(&mut pair, keys, 0, 2000);
    let before = COUNT.get();
    // Over RDMA each pass is waited for.
    let messages = if remote() { 4_000 } else { 100_000 };
    traffic(&mut pair, keys, 2000, messages);
    let allocations = COUNT.get() - before;
    assert_eq!(allocations, 0, "in {messages} messages");
    // Checks that the counter counts.
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(COUNT.get() - before, 1);
    assert_eq!(pair.ends[1].counters().delivered, 2000 + messages as u64);
    assert!(pair.ends[1].counters().copied_out > messages as u64 / 1000, "the landing ring was part of it");
    pair.assert_clean();
}

/// A proxy counts an endpoint's own memory as that of its rings and 64 KiB (`proxy/service/src/server/options.rs`).
#[test]
fn an_endpoint_allocates_less_than_its_rings_and_64_kib_take() {
    for (slots_log, rx_log, posted_receives) in
        [(3, 3, false), (10, 10, true), (16, 3, false), (3, 16, true), (16, 16, true)]
    {
        let geometry = Geometry { slots_log, link_log: slots_log, rx_log, ..GEOMETRY };
        let options = [1, 0].map(|peer| QpOptions { posted_receives, ..options(peer) });
        let before = BYTES.get();
        let pair = Pair::local(geometry, options);
        // Both ends, and what stands in for the devices.
        let allocated = (BYTES.get() - before) as usize;
        let rings = geometry.work_bytes() + geometry.control_bytes() + 2 * geometry.link_bytes();
        assert!(allocated < 2 * (rings + (64 << 10)), "{allocated} bytes for {geometry:?}");
        assert!(allocated > 2 << slots_log.max(rx_log), "{allocated} bytes: nothing was counted");
        drop(pair);
    }
}

#[test]
fn rails_decide_without_allocating_while_they_carry_break_and_come_back() {
    const RAILS: usize = 3;
    let rules = Rules { window_log: 5, shortest: 64 };
    let budget = pushgate_core::gate::Budget { send_slots: 20, cq_slots: 20, bytes: 1 << 20 };
    let mut sending = Sending::new(rules, RAILS);
    (0..RAILS).for_each(|rail| sending.join(rail, budget));
    let (mut arriving, mut placing) = (Arriving::new(rules.window_log), Placing::new(1 << rules.window_log));
    let mut wires: [VecDeque<Stripe>; RAILS] = std::array::from_fn(|_| VecDeque::with_capacity(1 << 8));
    let before = COUNT.get();
    let mut owed = 0;
    for round in 0..20_000u64 {
        let record =
            Record { length: round as u32 * 64 % 9000, id: round as u32, ..Record::new(Opcode::Put) };
        let placed = placing.may_place(1, 0, record.length);
        let message = sending.post(record.length, placed);
        placing.posted(message, Target::Region(1, 64 * (round % 7)), record.length);
        while let Some((rail, stripe)) = sending.reserve().map(|(rail, permit, stripe)| {
            permit.post();
            (rail, stripe)
        }) {
            sending.posted(rail);
            wires[rail].push_back(stripe);
        }
        if round % 50 == 0 {
            // A rail loses what it carries.
            let rail = (round / 50) as usize % RAILS;
            wires[rail].clear();
            sending.leave(rail);
            owed += sending.owed(rail, arriving.taken(rail)).unwrap();
            sending.join(rail, budget);
        }
        // One in three rounds lets everything arrive.
        for (rail, wire) in wires.iter_mut().enumerate().filter(|_| round % 3 == 0) {
            for stripe in wire.drain(..) {
                let record = Record {
                    length: stripe.message as u32 * 64 % 9000,
                    id: stripe.message as u32,
                    ..Record::new(Opcode::Put)
                };
                arriving.arrive(rail, &stripe, &record.encode(0)).unwrap();
                sending.complete(rail, 1);
            }
            sending.taken(rail, arriving.taken(rail)).unwrap();
        }
        while arriving.accept().is_some() {}
        sending.received(arriving.accepted());
        placing.received(arriving.accepted());
        sending.tick(round * 100_000);
    }
    assert_eq!(COUNT.get() - before, 0);
    assert!(arriving.accepted() > 19_900 && owed > 100, "{} accepted, {owed} owed", arriving.accepted());
}
