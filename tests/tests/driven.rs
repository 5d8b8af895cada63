//! Engines that the program drives, and the thread that stands in for a program that does not call.

mod common;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::Endpoint;
use pushgate_engine::engine::{Drive, Engine, EngineError, EngineOptions, QpId, StandIn};
use pushgate_engine::idle::{Step, Wake};
use pushgate_engine::mover::{MoveError, Mover};
use pushgate_link::region::RegionMemory;

/// Passes that are enough for whatever is on its way.
const PASSES: usize = 100;

/// Two driven engines with a queue pair between them, and the device of each.
fn pair() -> [(Engine, QpId, Device); 2] {
    pair_with(None)
}

/// As [`pair`], with a copy engine at the second one.
fn pair_with(mut mover: Option<Box<dyn Mover>>) -> [(Engine, QpId, Device); 2] {
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let mut bells = common::bells().map(Some);
    [0, 1].map(|i| {
        let mover = mover.take_if(|_| i == 1);
        let driven = EngineOptions { drive: Drive::Caller, mover, ..EngineOptions::default() };
        let engine = Engine::start(EventFd::new().unwrap(), driven).unwrap();
        let end = Endpoint::local(m[i].joined(&m[1 - i], bells[i].take()), options(1 - i as u32)).unwrap();
        let qp = engine.add_qp(end, Wake::Doorbell).unwrap();
        (engine, qp, Device::new(&m[i], &m[1 - i]))
    })
}

/// Receives `count` messages while `poll` is called again and again; checks their tags, which begin with `first`.
fn receive(device: &mut Device, count: u32, first: u32, mut poll: impl FnMut()) {
    let begin = Instant::now();
    let mut received = 0;
    while received < count {
        poll();
        while let Some(m) = device.try_recv() {
            assert_eq!(m.tag, first + received);
            received += 1;
            device.release(1);
        }
        assert!(begin.elapsed() < pushgate_tests::hang(), "{received} of {count} messages came");
    }
}

#[test]
fn a_peer_hears_of_its_message_though_the_receiver_calls_for_another_queue_pair_from_then_on() {
    const ROUNDS: u32 = 200;
    let engines = [0, 1].map(|_| {
        let driven = EngineOptions { drive: Drive::Caller, ..EngineOptions::default() };
        Engine::start(EventFd::new().unwrap(), driven).unwrap()
    });
    let [a, b] = &engines;
    // The first queue pair carries the messages, the other one nothing.
    let mut pairs = [0, 1].map(|_| {
        let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
        let mut ends = tcp::endpoints([&m[0], &m[1]], options(0)).into_iter();
        let qps = [a, b].map(|engine| engine.add_qp(ends.next().unwrap(), Wake::Doorbell).unwrap());
        (qps, [Device::new(&m[0], &m[1]), Device::new(&m[1], &m[0])])
    });
    let other = pairs[1].0[1];
    let ([qa, qb], [sender, receiver]) = &mut pairs[0];
    let mut late = 0;
    for tag in 0..ROUNDS {
        assert!(sender.post(inline_send(tag), b"told"));
        receive(receiver, 1, tag, || {
            a.drive_for(*qa).unwrap();
            b.drive_for(*qb).unwrap();
        });
        let (begin, mut calls) = (Instant::now(), 0);
        while sender.retired() <= u64::from(tag) {
            a.drive_for(*qa).unwrap();
            b.drive_for(other).unwrap();
            calls += 1;
            assert!(begin.elapsed() < pushgate_tests::hang(), "the sender never hears of message {tag}");
        }
        late += u32::from(calls > 20);
    }
    assert!(late < ROUNDS / 4, "{late} of {ROUNDS} took more than 20 calls");
}

#[test]
fn messages_move_in_the_calls_of_a_program_that_drives() {
    const ROUNDS: u32 = 20_000;
    let [(a, qa, mut sender), (b, qb, mut receiver)] = pair();
    let mut calls = 0;
    for tag in 0..ROUNDS {
        assert!(sender.post(inline_send(tag), b"driven"));
        a.drive_for(qa).unwrap();
        // The engine's thread may be in a pass: then this one comes to nothing.
        while receiver.try_recv().is_none_or(|m| m.tag != tag) {
            calls += 2;
            a.drive_for(qa).unwrap();
            b.drive_for(qb).unwrap();
        }
        receiver.release(1);
        (0..3).for_each(|_| _ = (b.drive().unwrap(), a.drive().unwrap()));
        calls += 6;
    }
    // On a busy machine the program is kept from calling now and then.
    let stood_in = a.stood_in() + b.stood_in();
    assert!(stood_in < calls / 10, "the engines' threads made {stood_in} passes beside {calls} calls");
    assert_eq!(b.remove_qp(qb).unwrap().delivered, ROUNDS as u64);
}

#[test]
fn messages_to_a_program_that_does_not_call_move() {
    let [(a, _, mut sender), (b, _, mut receiver)] = pair();
    for round in 0..20 {
        // Neither program calls: the sleeping engine of the sender is rung by its producer, the receiver's by its peer.
        let before = (a.stood_in(), b.stood_in());
        assert!(sender.post(inline_send(round), b"absent"));
        sender.wake();
        let begin = Instant::now();
        while receiver.try_recv().is_none_or(|m| m.tag != round) {
            assert!(begin.elapsed() < pushgate_tests::hang(), "message {round} does not come");
            std::thread::yield_now();
        }
        receiver.release(1);
        // A pass is counted after what it does.
        pushgate_tests::wait_until("the engines' threads have made passes", || {
            a.stood_in() > before.0 && b.stood_in() > before.1
        });
        // Their next calls take the engines back, asleep or not.
        (0..round).for_each(|_| _ = (b.drive().unwrap(), a.drive().unwrap()));
    }
}

/// A copy engine that takes this long to begin a copy: so long takes the pass that takes in a PUT to a device's region.
struct Slow(Duration);

impl Mover for Slow {
    fn start(&mut self, _: u64, _: usize, _: usize) -> Result<u64, MoveError> {
        std::thread::sleep(self.0);
        Ok(0)
    }
    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        Ok(true)
    }
}

#[test]
fn a_thread_does_not_stand_in_for_a_program_whose_last_call_was_long_and_ended_a_moment_ago() {
    /// The thread looks whether the program calls as often as this, and so long a program must be away for the thread to
    /// stand in: `engine/driven.rs` has the same number.
    const ABSENT: Duration = Duration::from_millis(5);
    /// How often the program was away for a shorter time after a longer call. The thread's looks come at any time of such
    /// a round: half of them would find the program away if the thread took the beginning of a call for its end.
    const ROUNDS: u32 = 40;
    let [(a, _, mut sender), (b, qb, _)] = pair_with(Some(Box::new(Slow(3 * ABSENT))));
    let device = RegionMemory::Device { address: 4096, exported: None };
    // SAFETY: nothing is at that address: the copy engine of this test copies nothing.
    let rkey = unsafe { b.add_region(qb, device, 4096) }.unwrap();
    let (begin, mut rounds) = (Instant::now(), 0);
    while rounds < ROUNDS {
        assert!(begin.elapsed() < pushgate_tests::hang(), "{rounds} rounds");
        assert!(sender.post(Record { rkey, ..Record::new(Opcode::Put) }, &[1; 100]));
        a.drive().unwrap();
        let (called, taken) = (Instant::now(), b.stood_in());
        // This one call takes the message in.
        b.drive().unwrap();
        let (returned, before) = (Instant::now(), b.stood_in());
        while returned.elapsed() < ABSENT / 2 {
            std::hint::spin_loop();
        }
        let after = b.stood_in();
        let away = returned.elapsed();
        // A machine that does other work takes the core away for longer than a program may be away, before a call or after
        // it. The thread then stands in as it should.
        let is_long = returned - called >= 3 * ABSENT;
        if taken == before && is_long && away < ABSENT {
            assert_eq!(after, before, "passes were made for a program that was away for {away:?}");
            rounds += 1;
        }
        // Short calls again, which finish the message and take its slot back.
        (0..4).for_each(|_| _ = (a.drive().unwrap(), b.drive().unwrap()));
    }
}

/// A copy engine that stays in a pass until it is let go.
struct Held {
    entered: Arc<AtomicBool>,
    leave: Arc<AtomicBool>,
}

impl Mover for Held {
    fn start(&mut self, _: u64, _: usize, _: usize) -> Result<u64, MoveError> {
        self.entered.store(true, Ordering::Release);
        pushgate_tests::wait_until("the pass may end", || self.leave.load(Ordering::Acquire));
        Ok(0)
    }
    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        Ok(true)
    }
}

#[test]
fn a_turn_that_another_threads_pass_forbids_is_told_from_one_that_was_made() {
    let [entered, leave] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let held = Held { entered: entered.clone(), leave: leave.clone() };
    let [(a, qa, mut sender), (b, qb, _)] = pair_with(Some(Box::new(held)));
    let device = RegionMemory::Device { address: 4096, exported: None };
    // SAFETY: nothing is at that address: the copy engine of this test copies nothing.
    let rkey = unsafe { b.add_region(qb, device, 4096) }.unwrap();
    assert!(sender.post(Record { rkey, ..Record::new(Opcode::Put) }, &[1; 100]));
    std::thread::scope(|scope| {
        // This thread's pass, or the engine's own thread's, takes the message in and stays there.
        scope.spawn(|| {
            while !entered.load(Ordering::Acquire) {
                a.drive_for(qa).unwrap();
                b.drive_for(qb).unwrap();
            }
        });
        pushgate_tests::wait_until("a pass is under way", || entered.load(Ordering::Acquire));
        let made = b.drive_for(qb).unwrap();
        leave.store(true, Ordering::Release);
        assert!(!made, "there was a turn amid another thread's pass");
    });
    pushgate_tests::wait_until("a turn is made", || b.drive_for(qb).unwrap());
}

#[test]
fn a_pass_without_work_lets_its_caller_sleep_and_never_block() {
    let [_a, (b, ..)] = pair();
    let sleeps = (0..1_000_000).any(|_| {
        let step = b.drive().unwrap();
        assert!(!matches!(step, Step::Block(_)), "nobody rings a caller");
        matches!(step, Step::Sleep(_))
    });
    assert!(sleeps, "it never rests");
}

#[test]
fn every_queue_pair_moves_on_though_the_caller_drives_for_one() {
    let [(a, qa, _), (b, qb, _)] = pair();
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let ends = [0, 1].map(|i| Endpoint::local(m[i].joined(&m[1 - i], None), options(1 - i as u32)).unwrap());
    for (engine, end) in [&a, &b].into_iter().zip(ends) {
        engine.add_qp(end, Wake::Polled).unwrap();
    }
    let [mut sender, mut receiver] = [0, 1].map(|i: usize| Device::new(&m[i], &m[1 - i]));
    (0..4).for_each(|tag| assert!(sender.post(inline_send(tag), b"another")));
    receive(&mut receiver, 4, 0, || _ = (a.drive_for(qa).unwrap(), b.drive_for(qb).unwrap()));
}

#[test]
fn p7_an_end_reaches_a_peer_that_is_driven() {
    let [(a, qa, _), (b, qb, device)] = pair();
    let status = Status { rank: Some(0), ..Status::new(abi::PUSHGATE_ABORTED) };
    a.fail(Some(qa), status).unwrap();
    // A look at the clock, with which the peer's end is seen, comes with every few passes.
    let ended = (0..PASSES).any(|_| {
        b.drive().unwrap();
        b.status(qb).unwrap().is_some()
    });
    assert!(ended, "the end is not seen in {PASSES} passes");
    assert_eq!((b.status(qb).unwrap(), device.status()), (Some(status), Some(status)));
}

#[test]
fn regions_come_and_go_in_calls_that_drive_the_engine_themselves() {
    let [(a, qa, _), _b] = pair();
    let region = Region::new(4096);
    // SAFETY: the region's memory is kept by what is handed over.
    let key = unsafe { a.add_region(qa, region.memory(), 4096) }.unwrap();
    assert!(a.remove_region(qa, key).unwrap());
    assert!(!a.remove_region(qa, key).unwrap());
}

#[test]
fn several_threads_may_drive_one_engine() {
    let [(a, qa, mut sender), (b, qb, mut receiver)] = pair();
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (engine, qp) in [(&a, None), (&a, Some(qa)), (&b, None), (&b, Some(qb))] {
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    match qp {
                        None => _ = engine.drive().unwrap(),
                        Some(qp) => _ = engine.drive_for(qp).unwrap(),
                    }
                    std::thread::yield_now();
                }
            });
        }
        let mut posted = 0;
        receive(&mut receiver, 2_000, 0, || {
            posted += (posted < 2_000 && sender.post(inline_send(posted), b"many")) as u32;
            std::thread::yield_now();
        });
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn p7_dropping_a_driven_engine_ends_its_queue_pairs() {
    let [(a, _, device), (b, ..)] = pair();
    drop(a);
    assert_eq!(device.status().map(|s| s.code as u32), Some(abi::PUSHGATE_ABORTED));
    assert!(b.drive().is_ok());
    assert!(matches!(b.status(QpId(9)), Err(EngineError::NoQp(9))));
}

/// Work of a program, done when its bell rings.
#[derive(Default)]
struct Work {
    turns: AtomicU64,
    done: AtomicU64,
    in_turn: AtomicBool,
    panics: bool,
    takes: Duration,
    bell: Option<EventFd>,
    tells: bool,
}

impl StandIn for Work {
    fn turn(&self) -> Option<Step> {
        self.in_turn.store(true, Ordering::SeqCst);
        self.turns.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics, "this turn panics, for the test");
        std::thread::sleep(self.takes);
        if self.bell.as_ref().is_some_and(|bell| bell.drain()) {
            self.done.fetch_add(1, Ordering::SeqCst);
        }
        self.in_turn.store(false, Ordering::SeqCst);
        Some(Step::Block(Duration::MAX))
    }

    fn bells(&self) -> Vec<BorrowedFd<'_>> {
        self.bell.iter().filter(|_| self.tells).map(AsFd::as_fd).collect()
    }
}

/// How long it takes, the median, until work is done after its bell has rung; `tells`: the thread is told of the bell. The program
/// does not call.
fn rung(tells: bool) -> Duration {
    let [(a, _, mut sender), (b, _, mut receiver)] = pair();
    let work = Arc::new(Work { bell: Some(EventFd::new().unwrap()), tells, ..Work::default() });
    b.stand_in_with(Some(work.clone())).unwrap();
    let mut waited: Vec<Duration> = (0..9)
        .map(|round| {
            // The thread falls asleep.
            std::thread::sleep(Duration::from_millis(5));
            let begin = Instant::now();
            work.bell.as_ref().unwrap().ring();
            pushgate_tests::wait_until("the work is done", || work.done.load(Ordering::SeqCst) > round);
            let waited = begin.elapsed();
            // Messages move as well.
            assert!(sender.post(inline_send(round as u32), b"absent"));
            sender.wake();
            receive(&mut receiver, 1, round as u32, || _ = a.drive().unwrap());
            waited
        })
        .collect();
    b.stand_in_with(None).unwrap();
    waited.sort();
    waited[waited.len() / 2]
}

#[test]
fn work_that_is_handed_over_is_done_when_its_bell_rings_while_the_program_does_not_call() {
    // Without the bell the work waits until the sleeping thread looks by itself.
    let [with, without] = [true, false].map(rung);
    assert!(with < without / 4, "{with:?} with the bell, {without:?} without it");
}

#[test]
fn work_that_is_handed_over_is_left_to_a_program_that_calls() {
    let alone = EngineOptions { drive: Drive::Caller, alone: true, ..EngineOptions::default() };
    let engine = Engine::start(EventFd::new().unwrap(), alone).unwrap();
    let work = Arc::new(Work::default());
    engine.stand_in_with(Some(work.clone())).unwrap();
    let turns = || work.turns.load(Ordering::SeqCst);
    // Whether the program was never kept from calling for a while, and the turns that the thread has made meanwhile.
    let calls = || {
        engine.drive().unwrap();
        let (before, begin) = (turns(), Instant::now());
        let (mut last, mut longest) = (begin, Duration::ZERO);
        while begin.elapsed() < Duration::from_millis(3) {
            engine.drive().unwrap();
            let now = Instant::now();
            longest = longest.max(now - last);
            last = now;
        }
        (longest < Duration::from_micros(200), turns() - before)
    };
    let mut seen = Vec::new();
    pushgate_tests::wait_until("the program may call all the time for a while, 100 times", || {
        let (free, turns) = calls();
        seen.extend(free.then_some(turns));
        seen.len() == 100
    });
    // A thread that was kept from going on makes a turn late.
    let sum: u64 = seen.iter().sum();
    assert!(sum <= seen.len() as u64 / 20, "{sum} turns beside the program: {seen:?}");
    let before = turns();
    pushgate_tests::wait_until("the thread does the work", || turns() > before);
}

#[test]
fn p7_work_is_taken_back_when_its_turn_has_ended_and_is_done_no_more() {
    let [(a, ..), _] = pair();
    for _ in 0..10 {
        let work = Arc::new(Work { takes: Duration::from_millis(20), ..Work::default() });
        a.stand_in_with(Some(work.clone())).unwrap();
        pushgate_tests::wait_until("a turn begins", || work.in_turn.load(Ordering::SeqCst));
        a.stand_in_with(None).unwrap();
        assert!(!work.in_turn.load(Ordering::SeqCst), "a turn is under way");
        let turns = work.turns.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!((work.turns.load(Ordering::SeqCst), Arc::strong_count(&work)), (turns, 1));
    }
}

#[test]
fn p7_a_panic_in_work_that_is_handed_over_leaves_the_queue_pairs_to_the_thread() {
    let [(a, _, mut sender), (b, _, mut receiver)] = pair();
    let work = Arc::new(Work { panics: true, ..Work::default() });
    b.stand_in_with(Some(work.clone())).unwrap();
    pushgate_tests::wait_until("the work is given up", || Arc::strong_count(&work) == 1);
    assert!(sender.post(inline_send(7), b"later"));
    receive(&mut receiver, 1, 7, || _ = a.drive().unwrap());
    assert_eq!(work.turns.load(Ordering::SeqCst), 1);
}
