//! Links of one device that break together, over a fabric that carries nothing for a while.

use std::time::Instant;

use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_tests::hang;

use super::config::{Config, RdmaCm};
use super::simulated::Sim;
use super::simulated_tests::pair;
use pushgate_test_ends::{End, recovering};

const MS: u64 = 1_000_000;

/// A millisecond of all ends.
pub(super) fn pass(sim: &Sim, all: &mut [[End; 2]]) {
    for end in all.iter_mut().flatten() {
        end.now += MS;
        end.endpoint.control();
        end.poll();
    }
    while sim.complete(0) {}
    sim.expire();
    for [a, b] in all {
        a.take(b);
        b.take(a);
    }
}

pub(super) fn post(all: &mut [[End; 2]]) {
    for end in all.iter_mut().flatten() {
        end.posted += 1;
        let number = end.posted;
        assert!(end.device.post(Record::new(Opcode::Send), &number.to_ne_bytes()));
        end.sends.push(number);
    }
}

/// Until all messages have arrived. How many milliseconds that took.
fn until_all_have_arrived(sim: &Sim, all: &mut [[End; 2]]) -> u64 {
    let (begin, mut took) = (Instant::now(), 0);
    while all.iter().flatten().any(|end| end.taken < end.sends.len()) {
        assert!(begin.elapsed() < hang(), "links stay away");
        pass(sim, all);
        took += 1;
    }
    took
}

pub(super) fn made(all: &[[End; 2]]) -> u64 {
    all.iter().flatten().map(|end| end.endpoint.counters().recovered).sum()
}

#[test]
fn p7_links_that_break_together_over_a_congested_fabric_are_rebuilt_by_turns_and_all_carry_once_it_works() {
    const PAIRS: usize = 16;
    let sim = Sim::new();
    let config = Config { cm: RdmaCm::Off, ..Config::default() };
    let mut all: Vec<_> = (0..PAIRS).map(|_| recovering(pair(&sim, &config))).collect();
    sim.drains();
    post(&mut all);
    until_all_have_arrived(&sim, &mut all);
    assert_eq!(made(&all), 0);
    sim.silence();
    post(&mut all);
    for _ in 0..10_000 {
        pass(&sim, &mut all);
    }
    let in_vain = made(&all);
    // At first each link once, then a few by turns.
    assert!(
        (2..5 * PAIRS as u64).contains(&in_vain),
        "{in_vain} ends of links were made in ten seconds, in vain"
    );
    sim.speaks();
    let took = until_all_have_arrived(&sim, &mut all);
    assert!(took < 3_000, "{took} ms until all links carry");
    assert!(all.iter().flatten().all(|end| end.endpoint.status().is_none()));
}
