//! Two endpoints over the simulated device, whose WRITEs the test carries out in any order.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::Link;
use pushgate_test_ends::{
    ABORTED, End, GEOMETRY, REGION, Random, STRIPES, check_signal, ends, memory, recovering, words,
};

use super::config::{Config, RdmaCm, WriteOrder};
use super::firmware;
use super::profiles::{PROFILES, Profile};
use super::setup::VerbsOpening;
use super::simulated::Sim;
use super::verbs_link::VerbsLink;

/// Both ends of a queue pair on one simulated device.
pub(super) fn pair(sim: &Sim, config: &Config) -> [End; 2] {
    pair_between([sim, sim], config)
}

/// Both ends of a queue pair, each on a device of the same simulated network.
pub(super) fn pair_between(sims: [&Sim; 2], config: &Config) -> [End; 2] {
    let (links, windows, mirrors) = links_between(sims, config, GEOMETRY);
    let links = links.map(|link| Box::new(link) as Box<dyn Link>);
    ends(links.into(), windows, mirrors, config.posted_receives, || while sims[0].complete(0) {})
}

/// The links of both ends, and the window and the mirror of each end.
pub(super) type Links = ([VerbsLink; 2], [Arc<SharedMemory>; 2], [Arc<SharedMemory>; 2]);

pub(super) fn links_between(sims: [&Sim; 2], config: &Config, geometry: Geometry) -> Links {
    let geometry = |rank| Geometry { rank, ..geometry };
    let mut allocate = |name: &str, bytes: usize| SharedMemory::builder(name, bytes).create();
    let windows = [0, 1].map(|rank| memory("window", geometry(rank).window_bytes()));
    let openings = [0, 1].map(|rank| {
        let window = windows[rank as usize].clone();
        // Without `with_recovery` the end of the link is the queue pair's all the same.
        let device = &sims[rank as usize].device;
        VerbsOpening::new(device, config, geometry(rank), window, &mut allocate).unwrap().recovering()
    });
    let [first, second] = [openings[0].offer(), openings[1].offer()];
    let [a, b] = openings;
    let a = a.prepare(1, &second, &mut allocate).unwrap();
    let b = b.prepare(0, &first, &mut allocate).unwrap();
    let places = [b.places(), a.places()];
    let mirrors = [a.mirror().clone(), b.mirror().clone()];
    let [to_b, to_a] = places;
    ([a.join(to_b).unwrap(), b.join(to_a).unwrap()], windows, mirrors)
}

/// Window and region of the end are memory of a device, which the CPU does not read.
fn lies_in_device(end: &End, sim: &Sim) {
    for memory in end.of_device() {
        let at = memory.as_ptr().as_ptr() as usize;
        sim.is_of_device(at, at..at + memory.len());
    }
}

/// One run. `seed` decides what is posted, which end has its turn, what the device does, and with `breaks` when links break.
/// Returns how many links took the place of one that broke.
fn any_order(seed: u64, imm: bool, breaks: bool) -> u64 {
    any_order_on(&Sim::new(), seed, imm, breaks)
}

/// One run, as [`any_order`], on this device.
pub(super) fn any_order_on(sim: &Sim, seed: u64, imm: bool, breaks: bool) -> u64 {
    // Simulated devices have no rdma_cm.
    any_order_with(sim, (&Config { cm: RdmaCm::Off, ..Config::default() }, false), seed, imm, breaks)
}

/// One run, as [`any_order`], on a device of this profile. An engine waits for no command to the firmware.
pub(super) fn any_order_over(profile: &Profile, seed: u64, imm: bool, breaks: bool) -> u64 {
    any_order_with(&Sim::of_profile(profile), (&profile.config(), profile.slow), seed, imm, breaks)
}

fn any_order_with(sim: &Sim, (config, slow): (&Config, bool), seed: u64, imm: bool, breaks: bool) -> u64 {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    // They place in any order, of whatever kind they are.
    let config = Config { imm, write_order: WriteOrder::Wait, ..config.clone() };
    let mut ends = pair(sim, &config);
    // The ends go after it.
    let _run = firmware::begin(slow);
    // Windows of the kernel module, and GPU memory that a region is of, lie in devices.
    ends.iter().for_each(|end| lies_in_device(end, sim));
    if breaks {
        ends = recovering(ends);
    }
    let keys = [ends[0].key, ends[1].key];
    // Number and words of each PUT to a stripe, by sender.
    let mut puts: [[Vec<(u64, usize)>; STRIPES]; 2] = Default::default();
    let mut messages = 60;
    let mut quiet = 0;
    while quiet < 100 {
        let (i, j) = if random.next().is_multiple_of(2) { (0, 1) } else { (1, 0) };
        quiet += 1;
        if breaks {
            // The device drains what is in the error state, and time goes on: frames, fences, pauses.
            ends.iter_mut().for_each(|end| {
                end.now += 100_000;
                end.endpoint.control();
            });
            firmware::advance(ends[0].now);
            match random.next() % 64 {
                0 if messages > 0 => _ = ends[i].endpoint.break_link(),
                1 if messages > 0 => sim.break_one(),
                2..=6 => sim.drain(),
                7 => sim.expire(),
                _ => {}
            }
        }
        match random.next() % 8 {
            0 if messages > 0 => {
                let (before, last) = (ends[i].posted, ends[i].last);
                let state = random.0;
                ends[i].post(keys[j], &mut random);
                if ends[i].posted > before {
                    (messages, quiet) = (messages - 1, 0);
                    let words = words(state);
                    let put = (0..STRIPES).find(|s| ends[i].last[*s] != last[*s]);
                    put.into_iter().for_each(|s| puts[i][s].push((before + 1, words)));
                }
            }
            1 | 2 => ends[i].poll(),
            7 => quiet = if sim.complete(random.next()) { 0 } else { quiet },
            _ => quiet = if sim.place(random.next()) { 0 } else { quiet },
        }
        let [a, b] = &mut ends;
        a.take(b);
        b.take(a);
        check_signal(a, &puts[1]);
        check_signal(b, &puts[0]);
    }
    for _ in 0..if breaks { 2_000 } else { 100 } {
        while sim.complete(0) {}
        if breaks {
            sim.drain();
            sim.expire();
        }
        ends.iter_mut().for_each(|end| {
            end.now += if breaks { 1_000_000 } else { 0 };
            end.endpoint.control();
            end.poll();
        });
        firmware::advance(ends[0].now);
        let [a, b] = &mut ends;
        a.take(b);
        b.take(a);
    }
    assert_eq!(firmware::waited(), 0, "nanoseconds that the engine waited for the firmware");
    // The ends go at once.
    sim.drains();
    for i in [0, 1] {
        let (end, peer) = (&ends[i], &ends[1 - i]);
        assert_eq!((end.endpoint.status(), end.device.status()), (None, None));
        assert_eq!(
            end.taken,
            end.sends.len(),
            "SENDs that did not arrive: {:?}, {:?}",
            end.endpoint.counters(),
            peer.endpoint.counters()
        );
        // The bytes of overlapping PUTs are those of the later one.
        for (stripe, puts) in puts[i].iter().enumerate() {
            for (at, word) in peer.stripe(stripe).iter().enumerate() {
                let last = puts.iter().rev().find(|(_, n)| at < *n).map_or(0, |p| p.0);
                assert_eq!(*word, last, "stripe {stripe}, word {at} at the end");
            }
        }
        assert_eq!(peer.device.signal(0), end.last.iter().copied().max().unwrap().max(peer.device.signal(0)));
    }
    ends.iter().map(|end| end.endpoint.counters().recovered).sum()
}

#[test]
fn p3_p6_links_that_break_and_are_replaced_lose_double_and_reorder_nothing() {
    for imm in [true, false] {
        let links: u64 = (1..30).map(|seed| any_order(seed, imm, true)).sum();
        assert!(links > 50, "{links} links took the place of one that broke");
    }
}

#[test]
fn p3_p6_writes_that_a_device_places_in_any_order_are_announced_when_they_are_there() {
    for seed in 1..100 {
        any_order(seed, true, false);
    }
}

#[test]
fn p3_p6_writes_placed_in_any_order_are_announced_when_they_are_there_without_immediate_data() {
    for seed in 1..100 {
        any_order(seed, false, false);
    }
}

#[test]
fn p7_a_status_is_not_overwritten_by_an_earlier_line_that_a_device_places_later() {
    let status = Status { rank: Some(0), ..Status::new(abi::PUSHGATE_ABORTED) };
    for seed in 1..100 {
        let sim = Sim::new();
        let mut random = Random(seed);
        let [mut a, mut b] = pair(&sim, &Config::default());
        // B sends, so that A has counts to tell: its line is under way when it fails.
        assert!(b.device.post(Record { flags: Record::INLINE, ..Record::new(Opcode::Send) }, &[1; 8]));
        b.poll();
        while sim.complete(0) {}
        a.poll();
        a.endpoint.fail(status);
        for _ in 0..400 {
            a.poll();
            match random.next() % 4 {
                0 => sim.complete(random.next()),
                _ => sim.place(random.next()),
            };
        }
        while sim.complete(0) {}
        sim.drains();
        // The first pass hears of the end, the second takes in what came before it.
        b.poll();
        b.poll();
        assert_eq!(b.endpoint.status(), Some(status), "seed {seed}");
    }
}

/// Both ends of a queue pair whose first end has a PUT out of its region under way to the second's.
fn reading(sim: &Sim) -> [End; 2] {
    let [mut a, b] = pair(sim, &Config::default());
    let put = Record {
        flags: Record::REGION | Record::SIGNALED,
        place: a.key,
        rkey: b.key,
        id: 77,
        ..Record::new(Opcode::Put)
    };
    // SAFETY: a payload in a region is not read here.
    assert!(unsafe { a.device.post_raw(put, std::ptr::null(), REGION) }.is_some());
    a.poll();
    [a, b]
}

/// Polls `end`, 1 ms of simulated time later each time, until its device sees how it ended, which is when its queue pair
/// works no more.
fn ends_when_stopped(sim: &Sim, end: &mut End, mut act: impl FnMut(&Sim)) {
    loop {
        assert!(end.now < 60_000_000_000, "the end is never shown");
        end.poll();
        end.now += 1_000_000;
        let told = (end.device.poll_cq(), end.device.status(), end.endpoint.remove_region(end.key));
        if told != (None, None, false) {
            assert_eq!(sim.working(), 1, "the device still works for it, and {told:?}");
            let (Some(completion), status, removed) = told else { panic!("{told:?}") };
            assert_eq!((completion.wr_id, completion.status), (77, ABORTED.code));
            assert_eq!((status, removed), (Some(ABORTED), true));
            return;
        }
        act(sim);
    }
}

#[test]
fn short_puts_out_of_a_devices_memory_are_read_by_the_device_alone() {
    let sim = Sim::new();
    let [mut a, mut b] = pair(&sim, &Config::default());
    lies_in_device(&a, &sim);
    sim.prompt();
    for words in 1..=40 {
        for (i, word) in a.region.words(0, words).iter().enumerate() {
            word.store((words << 8 | i) as u64, Ordering::Relaxed);
        }
        let put = Record { flags: Record::REGION, place: a.key, rkey: b.key, ..Record::new(Opcode::Put) };
        // SAFETY: a payload in a region is not read here.
        assert!(unsafe { a.device.post_raw(put, std::ptr::null(), words * 8) }.is_some());
        a.poll();
        b.poll();
        a.poll();
        assert_eq!(b.stripe(0)[..words], a.stripe(0)[..words], "{words} words");
    }
}

#[test]
fn p5_an_end_is_shown_and_a_region_is_given_back_when_the_device_has_flushed_its_work_requests() {
    let sim = Sim::new();
    let [mut a, _b] = reading(&sim);
    sim.silence();
    a.endpoint.fail(ABORTED);
    let mut looks = 0;
    ends_when_stopped(&sim, &mut a, |sim| {
        looks += 1;
        // Some looks find it in the error state, and not drained yet.
        if looks % 100 == 0 {
            sim.drain();
        }
    });
    assert_eq!(sim.queue_pairs(), 2);
}

#[test]
fn p5_p7_an_end_is_shown_after_the_queue_pairs_destruction_if_the_device_flushes_nothing() {
    let sim = Sim::new();
    let [mut a, _b] = reading(&sim);
    sim.silence();
    a.endpoint.fail(ABORTED);
    ends_when_stopped(&sim, &mut a, |_| {});
    assert_eq!(sim.queue_pairs(), 1);
}

#[test]
fn p7_an_end_does_not_wait_for_a_device_that_refuses_what_is_posted_in_the_error_state() {
    let shown_after = |name: &str| {
        let sim = Sim::of_profile(PROFILES.iter().find(|profile| profile.name == name).unwrap());
        let [mut a, _b] = reading(&sim);
        sim.silence();
        a.endpoint.fail(ABORTED);
        ends_when_stopped(&sim, &mut a, |_| {});
        assert_eq!(sim.queue_pairs(), 1);
        a.now
    };
    // The other device takes what is posted, and flushes nothing.
    assert!(shown_after("bnxt_re") < shown_after("mlx5"));
}

#[test]
fn p7_a_peer_that_answers_is_told_before_the_queue_pair_stops() {
    let sim = Sim::new();
    let [mut a, mut b] = reading(&sim);
    a.endpoint.fail(ABORTED);
    ends_when_stopped(&sim, &mut a, |sim| {
        sim.complete(0);
        sim.drain();
    });
    // The first pass hears of the end, the second takes in what came before it.
    b.poll();
    b.poll();
    assert_eq!(b.endpoint.status(), Some(ABORTED));
}

#[test]
fn p5_nothing_is_deregistered_before_a_queue_pair_that_is_dropped_has_stopped() {
    let sim = Sim::new();
    let [mut a, b] = reading(&sim);
    let before = sim.registrations();
    // While it lingers the device reads on: a source that is not registered any more would be noticed.
    sim.drains();
    a.endpoint.close();
    drop(a);
    assert_eq!(sim.queue_pairs(), 1);
    assert!(sim.registrations() < before);
    drop(b);
    assert_eq!((sim.queue_pairs(), sim.registrations()), (0, 0));
}

#[test]
fn p7_a_peer_that_only_receives_learns_of_an_end_that_broke_alone() {
    let sim = Sim::new();
    sim.drains();
    let [mut a, mut b] = reading(&sim);
    sim.break_one();
    // In simulated time.
    for now in (0..20_000).map(|ms| ms * 1_000_000) {
        for end in [&mut a, &mut b] {
            end.endpoint.poll(&mut None);
            end.endpoint.tick(now);
        }
        sim.expire();
        while sim.complete(0) {}
    }
    let down =
        |rank, detail| Some(Status { rank: Some(rank), detail, ..Status::new(abi::PUSHGATE_LINK_DOWN) });
    let own = abi::PUSHGATE_DOWN_WC + pushgate_rdma_core_sys::ibv_wc_status::IBV_WC_LOC_PROT_ERR.0;
    assert_eq!(a.endpoint.status(), down(0, own));
    assert_eq!(b.endpoint.status(), down(0, abi::PUSHGATE_DOWN_RETRY));
}

/// Queue pairs that one engine has, with peers that never answer.
const SILENT: usize = 16;

#[test]
fn p7_queue_pairs_that_go_linger_together_while_the_engine_serves_the_others() {
    use pushgate_driver_shim::eventfd::EventFd;
    use pushgate_engine::engine::{Engine, EngineOptions};
    use pushgate_engine::idle::Wake;
    use std::sync::atomic::AtomicUsize;

    // Each lingers for its longest, a second.
    let config = Config { ack_timeout: 20, path_timeout: 0, ..Config::default() };
    let (silent, live) = (Sim::new(), Sim::new());
    let engine = Engine::start(EventFd::new().unwrap(), EngineOptions::default()).unwrap();
    let (mut silents, mut peers) = (Vec::new(), Vec::new());
    for _ in 0..2 * SILENT + 1 {
        let [a, b] = pair(&silent, &config);
        silents.push(engine.add_qp(a.endpoint, Wake::Polled).unwrap());
        peers.push((b, a.region));
    }
    silent.silence();
    silent.drains();
    let [a, b] = pair(&live, &config);
    live.prompt();
    live.drains();
    let _served = [a.endpoint, b.endpoint].map(|e| engine.add_qp(e, Wake::Polled).unwrap());
    let mut sender = a.device;

    let begin = Instant::now();
    engine.remove_qp(silents.pop().unwrap()).unwrap();
    let one = begin.elapsed();

    let (removed, mut served) = (AtomicUsize::new(0), 0);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for qp in silents.drain(..SILENT) {
            let (engine, removed) = (&engine, &removed);
            scope.spawn(move || {
                engine.remove_qp(qp).unwrap();
                removed.fetch_add(1, Ordering::Relaxed);
            });
        }
        while removed.load(Ordering::Relaxed) < SILENT {
            let posted = sender.post(Record { opcode: Opcode::Signal, ..Record::new(Opcode::Send) }, &[]);
            let slots = sender.slots();
            while posted && sender.delivered() < slots && removed.load(Ordering::Relaxed) < SILENT {
                std::thread::yield_now();
            }
            served += usize::from(posted && removed.load(Ordering::Relaxed) == 0);
        }
    });
    let together = begin.elapsed();
    assert!(together < one * SILENT as u32 / 2, "{SILENT} took {together:?}, one {one:?}");
    assert!(served > 0, "nothing was delivered while they lingered");

    // Those that are left go with the engine.
    let begin = Instant::now();
    drop(engine);
    let together = begin.elapsed();
    assert!(together < one * SILENT as u32 / 2, "{SILENT} took {together:?}, one {one:?}");
    assert_eq!((silent.queue_pairs(), live.queue_pairs()), (peers.len(), 0));
}

#[test]
fn both_ends_have_the_same_names_the_other_way_round() {
    let sim = Sim::new();
    sim.drains();
    let ([a, b], ..) = links_between([&sim, &sim], &Config::default(), GEOMETRY);
    let [own, other] = a.ends();
    assert_eq!(b.ends(), [other, own]);
    assert!(own != other && ![own, other].contains(&0));
}
