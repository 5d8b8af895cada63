//! Engines that the program drives, pass by pass, in one thread.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::segment::Geometry;
use pushgate_proxy::endpoint::Endpoint;
use pushgate_proxy::engine::{Drive, Engine, EngineError, EngineOptions, QpId};
use pushgate_proxy::idle::{Step, Wake};
use pushgate_proxy::session::Status;

/// Passes that are enough for whatever is on its way.
const PASSES: usize = 100;

/// Two driven engines with a queue pair between them, and the device of each.
fn pair() -> [(Engine, QpId, Device); 2] {
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let mut bells = common::bells().map(Some);
    [0, 1].map(|i| {
        let driven = EngineOptions { drive: Drive::Caller, ..EngineOptions::default() };
        let engine = Engine::start(EventFd::new().unwrap(), driven).unwrap();
        let end = Endpoint::local(m[i].joined(&m[1 - i], bells[i].take()), options(1 - i as u32)).unwrap();
        let qp = engine.add_qp(end, Wake::Doorbell).unwrap();
        (engine, qp, Device::new(&m[i], &m[1 - i]))
    })
}

fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // One that ended meanwhile has no name any more.
    tasks.filter_map(|t| std::fs::read_to_string(t.unwrap().path().join("comm")).ok()).collect()
}

#[test]
fn messages_move_while_the_caller_drives_and_only_then() {
    let [(a, _, mut sender), (b, qb, mut receiver)] = pair();
    assert!(!threads().iter().any(|name| name.trim() == "pushgate-proxy"), "{:?}", threads());
    for tag in 0..100 {
        assert!(sender.post(inline_send(tag), b"driven"));
        a.drive().unwrap();
        assert!(receiver.try_recv().is_none(), "the receiver's engine was not driven");
        b.drive().unwrap();
        assert_eq!(receiver.try_recv().map(|m| m.tag), Some(tag));
        receiver.release(1);
        (0..3).for_each(|_| _ = (b.drive().unwrap(), a.drive().unwrap()));
    }
    assert_eq!(b.counters().unwrap().delivered, 100);
    assert_eq!(b.remove_qp(qb).unwrap().delivered, 100);
}

#[test]
fn an_engine_without_work_lets_its_caller_sleep_and_says_to_nobody_that_it_sleeps() {
    let [(a, _, mut sender), (b, ..)] = pair();
    let sleeps = (0..1_000_000).any(|_| {
        let step = b.drive().unwrap();
        assert!(!matches!(step, Step::Block(_)), "nobody rings a caller");
        matches!(step, Step::Sleep(_))
    });
    assert!(sleeps, "it never rests");
    assert!(sender.post(inline_send(1), b"no bell"));
    a.drive().unwrap();
    assert_eq!(a.counters().unwrap().rings, 0);
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
    let [(a, _, mut sender), (b, _, mut receiver)] = pair();
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        for engine in [&a, &a, &b, &b] {
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    engine.drive().unwrap();
                    std::thread::yield_now();
                }
            });
        }
        let mut received = 0;
        for tag in 0..2_000 {
            while !sender.post(inline_send(tag), b"many") {
                std::thread::yield_now();
            }
            while let Some(m) = receiver.try_recv() {
                assert_eq!(m.tag, received);
                received += 1;
                receiver.release(1);
            }
        }
        while received < 2_000 {
            let Some(m) = receiver.try_recv() else { continue };
            assert_eq!(m.tag, received);
            received += 1;
            receiver.release(1);
        }
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
