//! Two endpoints whose messages are striped over two simulated devices, one of which fails.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pushgate_core::recovery::Control;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Window;
use pushgate_engine::connect::{Incarnation, Met, Opening, Prepared, RailFrames, RailsOpening, of_rail};
use pushgate_link::Link;
use pushgate_link::mailbox::{Mailbox, SendFrame};
use pushgate_link_verbs::Config;
use pushgate_link_verbs::simulated::Sim;
use pushgate_tests::hang;

use pushgate_test_ends::{End, GEOMETRY, Random, STRIPES, check_signal, ends, memory, words};

const PATIENCE: Duration = Duration::from_secs(10);

/// Both ends of a queue pair with a link over each of these devices.
fn pair(sims: &[Sim; 2], config: &Config) -> [End; 2] {
    let mailboxes: [Mailbox; 2] = Default::default();
    let sends = [1, 0].map(|to| -> SendFrame {
        let to: Mailbox = mailboxes[to].clone();
        Box::new(move |frame| _ = to.put(frame))
    });
    pair_over(sims, config, &mailboxes, sends)
}

/// As [`pair`], where frames of the peer come by `mailboxes` and frames for the peer leave by `sends`.
pub(super) fn pair_over(
    sims: &[Sim; 2],
    config: &Config,
    mailboxes: &[Mailbox; 2],
    sends: [SendFrame; 2],
) -> [End; 2] {
    let devices = [0, 1].map(|i| sims[i].device.clone());
    let windows = [0, 1].map(|rank| memory("window", Geometry { rank, ..GEOMETRY }.window_bytes()));
    let mut allocate = |name: &str, bytes: usize| SharedMemory::builder(name, bytes).create();
    let openings = [0, 1].map(|rank: u32| {
        let window: Arc<dyn Window> = windows[rank as usize].clone();
        let geometry = Geometry { rank, ..GEOMETRY };
        Opening::Rails(RailsOpening::new(&devices, config, geometry, &window, &mut allocate).unwrap())
    });
    let [to_b, to_a] = openings.each_ref().map(|opening| opening.offer((), &[]).unwrap());
    let [a, b] = openings;
    let a: Prepared = a.prepare::<()>(1, to_a, 0, &mut allocate).unwrap().0;
    let b: Prepared = b.prepare::<()>(0, to_b, 0, &mut allocate).unwrap().0;
    let places = [b.places(), a.places()];
    let one = Incarnation::MIN;
    let (mut links, mut mirrors): (Vec<Box<dyn Link>>, Vec<_>) = Default::default();
    for (rank, ((prepared, places), send)) in [a, b].into_iter().zip(places).zip(sends).enumerate() {
        let Met::Rails(mut met) = prepared.meet(&places).unwrap() else { panic!("over several devices") };
        let channel = RailFrames { own: one, peer: one, mailbox: mailboxes[rank].clone(), send };
        met.shortest = 64;
        mirrors.push(met.mirror.clone());
        links.push(Box::new(met.join(channel, PATIENCE, 1)));
    }
    let mirrors = mirrors.try_into().expect("two ends");
    ends(links, windows, mirrors, config.posted_receives, || sims.iter().for_each(work))
}

pub(super) fn work(sim: &Sim) {
    while sim.complete(0) {}
}

/// Number and words of each PUT to a stripe of the region, by sender.
type Puts = [[Vec<(u64, usize)>; STRIPES]; 2];

/// Posts a message from end `i`, if there is room.
fn posts(ends: &mut [End; 2], i: usize, key: u32, random: &mut Random, puts: &mut Puts) -> bool {
    let (before, last, state) = (ends[i].posted, ends[i].last, random.0);
    ends[i].post(key, random);
    if ends[i].posted == before {
        return false;
    }
    let put = (0..STRIPES).find(|stripe| ends[i].last[*stripe] != last[*stripe]);
    put.into_iter().for_each(|stripe| puts[i][stripe].push((before + 1, words(state))));
    true
}

/// What becomes of the second device, or of both.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Works,
    Fails,
    /// It fails, and works again later.
    ComesBack,
    /// Both fail, and work again later.
    BothComeBack,
    /// Its port is down when the queue pair is made, and comes up later.
    StartsDown,
}

/// One run. `seed` decides what is posted, what the devices do, and when the second one fails.
fn any_order(seed: u64, fate: Fate) {
    let starts_down = fate == Fate::StartsDown;
    let breaks = !matches!(fate, Fate::Works | Fate::StartsDown);
    let sims = [Sim::new(), Sim::new()];
    sims[1].port(!starts_down);
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    // Simulated time passes faster than the simulated devices work.
    let config = Config { path_timeout: 0, ..Config::default() };
    let mut ends = pair(&sims, &config);
    let keys = [ends[0].key, ends[1].key];
    let mut puts = Puts::default();
    let (mut messages, mut quiet, mut now) = (60, 0, 0);
    let fails_at = if breaks { 10 + random.next() % 45 } else { 0 };
    while quiet < 400 {
        let (i, j) = if random.next().is_multiple_of(2) { (0, 1) } else { (1, 0) };
        quiet += 1;
        match random.next() % 8 {
            0 if messages > 0 => {
                if posts(&mut ends, i, keys[j], &mut random, &mut puts) {
                    (messages, quiet) = (messages - 1, 0);
                    if messages == fails_at && breaks {
                        // Whatever is on its way there never completes.
                        let first = usize::from(fate != Fate::BothComeBack);
                        for sim in &sims[first..] {
                            sim.port(false);
                            sim.break_one();
                            sim.silence();
                            sim.expire();
                            sim.drains();
                        }
                    }
                }
            }
            1 | 2 => {
                // Time for what watches a sign of failure before it counts.
                now += 3_000_000;
                ends[i].now = now;
                ends[i].poll();
            }
            7 => quiet = if sims[random.next() % 2].complete(random.next()) { 0 } else { quiet },
            _ => quiet = if sims[random.next() % 2].place(random.next()) { 0 } else { quiet },
        }
        let [a, b] = &mut ends;
        a.take(b);
        b.take(a);
        check_signal(a, &puts[1]);
        check_signal(b, &puts[0]);
    }
    let (mut turns, begin, before) = (0, Instant::now(), sims[1].completions());
    // What was posted arrives, and the device that works again carries more than a few control writes.
    let mut awaited = matches!(fate, Fate::ComesBack | Fate::BothComeBack | Fate::StartsDown);
    assert!(!starts_down || before == 0, "seed {seed}: a device whose port is down carries");
    let mut marked = false;
    while turns < 400 || awaited || ends.iter().any(|end| end.taken < end.sends.len()) {
        assert!(
            begin.elapsed() < hang(),
            "seed {seed}: the rail does not come back, or a message does not arrive"
        );
        turns += 1;
        if turns > 100 {
            // The thread that makes the next link works in real time, and other tests want the processor.
            std::thread::sleep(Duration::from_micros(50));
        }
        // The last message of each end: after it all have arrived.
        if !awaited && turns > 300 && !marked {
            marked = ends.iter_mut().all(End::posts_its_last);
        }
        if fate == Fate::BothComeBack && turns == 90 {
            // The last one meets no rail that carries.
            assert!(
                (0..3).all(|_| ends[0].endpoint.break_link()),
                "seed {seed}: a break ended the queue pair"
            );
        }
        if awaited && turns == 100 {
            sims.iter().for_each(|sim| {
                sim.port(true);
                sim.speaks();
            });
        } else if awaited && turns > 100 {
            posts(&mut ends, 0, keys[1], &mut random, &mut puts);
            awaited = sims[1].completions() < before + 50;
            turns = turns.min(200);
        }
        sims.iter().for_each(work);
        now += 3_000_000;
        for end in &mut ends {
            end.now = now;
            end.poll();
        }
        let [a, b] = &mut ends;
        a.take(b);
        b.take(a);
    }
    assert!(marked, "seed {seed}: no room for a last message");
    sims.iter().for_each(Sim::drains);
    for i in [0, 1] {
        let (end, peer) = (&ends[i], &ends[1 - i]);
        assert_eq!((end.endpoint.status(), end.device.status()), (None, None), "seed {seed}");
        assert_eq!(end.taken, end.sends.len(), "seed {seed}: SENDs that did not arrive");
        for (stripe, puts) in puts[i].iter().enumerate() {
            for (at, word) in peer.stripe(stripe).iter().enumerate() {
                let last = puts.iter().rev().find(|(_, n)| at < *n).map_or(0, |p| p.0);
                assert_eq!(*word, last, "seed {seed}: stripe {stripe}, word {at} at the end");
            }
        }
    }
}

#[test]
fn p3_p6_stripes_over_two_devices_that_place_in_any_order_make_whole_messages_in_order() {
    for seed in 1..25 {
        any_order(seed, Fate::Works);
    }
}

#[test]
fn p6_what_a_device_that_fails_still_owes_goes_over_the_other_one() {
    for seed in 1..25 {
        any_order(seed, Fate::Fails);
    }
}

#[test]
fn p6_a_device_whose_port_is_down_at_the_start_carries_stripes_once_it_comes_up() {
    for seed in 1..13 {
        any_order(seed, Fate::StartsDown);
    }
}

#[test]
fn p6_both_devices_fail_and_carry_stripes_again_once_they_work() {
    for seed in 1..13 {
        any_order(seed, Fate::BothComeBack);
    }
}

#[test]
fn p6_a_device_that_works_again_carries_stripes_again() {
    for seed in 1..13 {
        any_order(seed, Fate::ComesBack);
    }
}

#[test]
fn p6_when_an_end_says_resume_of_a_rail_the_queue_pair_before_is_destroyed() {
    let (sims, mailboxes): (_, [Mailbox; 2]) = (Arc::new([Sim::new(), Sim::new()]), Default::default());
    let said: [Arc<Mutex<Vec<Vec<u32>>>>; 2] = Default::default();
    let sends = [1, 0].map(|to| -> SendFrame {
        let (to, said): (Mailbox, _) = (mailboxes[to].clone(), said[1 - to].clone());
        let sims = sims.clone();
        Box::new(move |frame| {
            if let Some((rail, Control::Resume { .. }, _)) = of_rail(&frame.bytes) {
                said.lock().unwrap().push(sims[rail as usize].numbers());
            }
            to.put(frame);
        })
    });
    let config = Config { path_timeout: 0, ..Config::default() };
    let mut ends = pair_over(&sims, &config, &mailboxes, sends);
    let before = sims[1].numbers();
    sims.iter().for_each(Sim::drains);
    assert!(ends[0].endpoint.break_link());
    let begin = Instant::now();
    while ends.iter().any(|end| end.endpoint.counters().recovered == 0) {
        assert!(begin.elapsed() < hang(), "the rail does not come back");
        for end in &mut ends {
            end.now += 3_000_000;
            end.poll();
        }
        sims.iter().for_each(work);
    }
    for (said, number) in said.iter().zip(before) {
        let said = said.lock().unwrap();
        assert!(!said.is_empty(), "RESUME of the second rail");
        assert!(said.iter().all(|there| !there.contains(&number)), "{number} of {said:?}");
    }
}
