//! Tests of an engine with many queue pairs, most of them idle: it looks at the words of those alone, and misses nothing.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use common::*;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::engine::{Clock, Command, Machine};
use pushgate_engine::idle::Wake;

/// More than a machine looks at in each pass while some are busy.
const QPS: usize = 100;
/// Passes of either machine within which a message of an idle queue pair arrives beside busy ones.
const PASSES: usize = 24;

/// A clock that goes on by 10 us with each look.
struct Steps(u64);

impl Clock for Steps {
    fn now(&mut self) -> u64 {
        self.0 += 10_000;
        self.0
    }

    fn is_due(&mut self) -> bool {
        true
    }
}

/// Two machines, each with one end of every queue pair.
struct Rig {
    machines: [Machine; 2],
    devices: Vec<[Device; 2]>,
    clock: Steps,
}

impl Rig {
    fn new() -> Self {
        let mut machines = [0, 1].map(|_| Machine::new(None, true, Arc::new(AtomicBool::new(false))));
        let devices = (0..QPS).map(|_| {
            let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
            for i in 0..2 {
                // No WQE counts as stuck: a test leaves one unfinished for long.
                let options = QpOptions { stuck_ns: u64::MAX, ..options(1 - i as u32) };
                let end = Endpoint::local(m[i].joined(&m[1 - i], None), options).unwrap();
                machines[i].apply(Command::AddQp(Box::new(end), Wake::Polled, channel().0), 0);
            }
            [Device::new(&m[0], &m[1]), Device::new(&m[1], &m[0])]
        });
        let devices = devices.collect();
        let mut rig = Rig { machines, devices, clock: Steps(0) };
        rig.pass(200);
        rig
    }

    fn pass(&mut self, passes: usize) {
        for _ in 0..passes {
            self.machines.iter_mut().for_each(|machine| _ = machine.step(&mut self.clock));
        }
    }

    /// Keeps the first queue pair busy for a pass.
    fn busy_pass(&mut self) {
        self.devices[0][0].post(inline_send(0), &[1; 8]);
        self.pass(1);
        while self.devices[0][1].try_recv().is_some() {
            self.devices[0][1].release(1);
        }
    }

    /// Whether a message has come to side 1 of a queue pair.
    fn came(&mut self, qp: usize) -> bool {
        let came = self.devices[qp][1].try_recv().is_some();
        if came {
            self.devices[qp][1].release(1);
        }
        came
    }
}

#[test]
fn p7_messages_of_queue_pairs_that_were_idle_arrive_beside_a_busy_one_within_some_passes() {
    let mut rig = Rig::new();
    for round in 0..3 {
        for qp in (1..QPS).rev() {
            // It gets a message, goes idle, and is watched again.
            assert!(rig.devices[qp][0].post(inline_send(1), &[2; 8]));
            let passes = (0..PASSES).find(|_| {
                rig.busy_pass();
                rig.came(qp)
            });
            assert!(passes.is_some(), "round {round}: no message on queue pair {qp}");
        }
    }
}

#[test]
fn p7_receives_that_an_idle_queue_pair_gives_back_let_the_messages_after_them_arrive() {
    let mut rig = Rig::new();
    let receives = 1 << GEOMETRY.rx_log;
    // Twice as many as there are receives.
    for _ in 0..2 * receives {
        assert!(rig.devices[7][0].post(inline_send(1), &[3; 8]));
    }
    for _ in 0..2 {
        rig.pass(200);
        let taken = (0..).take_while(|_| rig.devices[7][1].try_recv().is_some()).count();
        assert_eq!(taken, receives);
        rig.pass(200);
        rig.devices[7][1].release(taken as u64);
    }
    rig.pass(PASSES);
    assert_eq!(rig.devices[7][0].retired(), 2 * receives as u64);
}

#[test]
fn p2_a_wqe_whose_first_word_comes_long_before_the_others_is_taken_once_it_is_whole() {
    let mut rig = Rig::new();
    let (slot, _) = rig.devices[9][0].take(0, false).unwrap();
    let words = inline_send(1).encode(1);
    let at = slot as usize * abi::PUSHGATE_RECORD_WORDS as usize;
    rig.devices[9][0].wqe_ring()[at].store(words[0], Ordering::Release);
    rig.pass(200);
    assert!(!rig.came(9));
    for (i, word) in words.iter().enumerate().skip(1) {
        rig.devices[9][0].wqe_ring()[at + i].store(*word, Ordering::Release);
    }
    rig.pass(PASSES);
    assert!(rig.came(9));
}

#[test]
fn p7_an_idle_queue_pair_that_is_ended_by_a_command_shows_its_end_to_both_devices() {
    let mut rig = Rig::new();
    let end = pushgate_core::session::Status::new(abi::PUSHGATE_ABORTED);
    rig.machines[0].apply(Command::Fail(None, end, channel().0), 1);
    rig.pass(2000);
    for (qp, devices) in rig.devices.iter().enumerate() {
        let codes = [0, 1].map(|side: usize| devices[side].status().map(|status| status.code as u32));
        assert_eq!(codes, [Some(abi::PUSHGATE_ABORTED); 2], "queue pair {qp}");
    }
}
