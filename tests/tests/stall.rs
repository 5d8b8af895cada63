//! What an engine says of queue pairs that stall, and what others read of it meanwhile.

mod common;
#[path = "common/log.rs"]
mod log;

use std::time::Duration;

use common::*;
use log::Log;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::engine::{Drive, Engine, EngineOptions, StallReport};
use pushgate_engine::idle::Wake;
use pushgate_tests::wait_until;
use tracing::{Dispatch, Level};

/// An engine for each of two ranks, with its device and its log.
fn pair(after: Duration, drive: Drive, receives: bool) -> [(Engine, Device, Log); 2] {
    let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let bells = [0, 1].map(|_| EventFd::new().unwrap());
    let mut peers = common::bells().map(Some);
    [0, 1].map(|i| {
        let log = Log::new(Level::WARN);
        let stall_report = StallReport { after, receives };
        let start = || {
            let options_of_engine = EngineOptions { drive, stall_report, ..EngineOptions::default() };
            Engine::start(bells[i].try_clone().unwrap(), options_of_engine).unwrap()
        };
        let engine = tracing::dispatcher::with_default(&Dispatch::new(log.clone()), start);
        let options = QpOptions { posted_receives: receives && i == 1, ..options(1 - i as u32) };
        let end = Endpoint::local(m[i].joined(&m[1 - i], peers[i].take()), options).unwrap();
        engine.add_qp(end, Wake::Doorbell).unwrap();
        let mut device = Device::new(&m[i], &m[1 - i]);
        device.set_bell(Some(bells[i].try_clone().unwrap()));
        (engine, device, log)
    })
}

/// Two ranks; the first sends more messages than the second has receives.
fn says_so_once_for_each_stall(drive: Drive) {
    let [(_a, mut sender, says), (_b, mut receiver, hears)] = pair(Duration::from_millis(100), drive, false);
    let ends =
        |a, b| [a, b].map(|rank| format!("rank {rank} (process {})", std::process::id())).join(" and ");
    let mut posted = 0;
    for round in 1..=2 {
        while posted < 8 * round + 4 {
            posted += sender.post(inline_send(posted), b"stalls") as u32;
        }
        // The test may be so slow that the engines say something of what it has done by halves.
        let at_end = format!("released {0}, received by rank 1 {0}, ", 8 * round);
        let taken = format!("shown {}, taken by the device {}; ", 8 * round, 8 * (round - 1));
        let last = |log: &Log| log.lines().pop().unwrap_or_default();
        wait_until("the report of both ends", || {
            last(&says).contains(&at_end) && last(&hears).contains(&taken)
        });
        let (sent, received) = (last(&says), last(&hears));
        assert!(sent.starts_with("a queue pair has not moved, though something is under way"), "{sent}");
        assert!(sent.contains(&format!("\n{}, local: no receive credit: ", ends(0, 1))), "{sent}");
        let said = "rank 1 has not taken 8 messages that arrived: its kernel or program is slow";
        assert!(received.contains(&format!("\n{}, local: {said}", ends(1, 0))), "{received}");
        // Longer than the limit: a stall that was reported is not reported again.
        let before = [&says, &hears].map(|log| log.lines().len());
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!([&says, &hears].map(|log| log.lines().len()), before, "{:?}", says.lines());
        // All that has arrived is taken at once, and as much arrives again.
        let mut taken = 0;
        wait_until("the messages", || {
            while taken < 8 && receiver.try_recv().is_some() {
                taken += 1;
            }
            taken == 8
        });
        receiver.release(8);
    }
}

#[test]
fn a_stall_is_logged_once_at_both_ends_and_again_when_messages_have_moved() {
    says_so_once_for_each_stall(Drive::Thread);
}

#[test]
fn a_stall_of_an_engine_whose_program_does_not_call_is_logged_too() {
    says_so_once_for_each_stall(Drive::Caller);
}

#[test]
fn receives_that_no_message_fills_are_a_stall_only_where_the_program_waits_in_them() {
    let [(_a, _sender, says), (_b, mut receiver, hears)] =
        pair(Duration::from_millis(100), Drive::Thread, true);
    receiver.post_recv(0, 0, 0, 1);
    wait_until("the report of the receiver", || !hears.lines().is_empty());
    let said = &hears.lines()[0];
    assert!(
        said.contains("rank 1 has posted 1 receive that no message has filled: rank 0 has nothing"),
        "{said}"
    );
    assert_eq!(says.lines(), [""; 0]);
}

#[test]
fn without_a_limit_nothing_is_logged() {
    let [(_a, mut sender, says), (_b, _receiver, hears)] = pair(Duration::ZERO, Drive::Thread, false);
    (0..12).for_each(|i| assert!(sender.post(inline_send(i), b"stalls")));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!([says.lines(), hears.lines()], [[""; 0], [""; 0]]);
}
