//! Engines over devices whose firmware takes up to a tenth of a second for a command: no engine waits for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pushgate_link::region::RegionMemory;
use pushgate_test_ends::{ABORTED, End, memory, recovering};

use super::config::{Config, RdmaCm};
use super::firmware;
use super::simulated::Sim;
use super::simulated_tests::pair;
use super::storm_tests::{made, pass, post};

/// Two queue pairs of one engine. The second one sends a message each way in each pass, until `done` says of the first one that it
/// is done. How many milliseconds of virtual time that took.
fn goes_on(sim: &Sim, all: &mut [[End; 2]; 2], mut done: impl FnMut(&mut [End; 2]) -> bool) -> u64 {
    let [begin, taken] = [all[1][0].now, all[1][0].taken as u64];
    while !done(&mut all[0]) {
        assert!(all[1][0].now - begin < 20_000_000_000, "the device is never done");
        post(&mut all[1..]);
        firmware::advance(all[1][0].now);
        pass(sim, all);
        assert_eq!(firmware::waited(), 0, "nanoseconds that the engine waited for the firmware");
    }
    let took = (all[1][0].now - begin) / 1_000_000;
    // Each pass's message arrives in the next pass at the latest.
    assert!(all[1][0].taken as u64 - taken + 1 >= took, "{} of {took} messages", all[1][0].taken);
    took
}

#[test]
fn p8_commands_that_take_the_firmware_long_hold_up_no_other_queue_pair_of_the_engine() {
    let sim = Sim::new();
    let config = Config { cm: RdmaCm::Off, ..Config::default() };
    let mut all = [0, 1].map(|_| recovering(pair(&sim, &config)));
    sim.drains();
    let _run = firmware::begin(true);

    // A region comes, and goes.
    let region = memory("region", 4096);
    let at = region.as_ptr().as_ptr() as usize;
    let key = all[0][0].endpoint.add_region(RegionMemory::Host { address: at, keep: None }, 4096).unwrap();
    let before = sim.registrations();
    let told = goes_on(&sim, &mut all, |ends| ends[0].endpoint.regions_told());
    assert_eq!(sim.registrations(), before + 1);
    let gone = goes_on(&sim, &mut all, |ends| ends[0].endpoint.remove_region(key));
    assert_eq!(sim.registrations(), before);

    // A link breaks, and another one takes its place.
    assert!(all[0][0].endpoint.break_link());
    let recovered = goes_on(&sim, &mut all, |ends| made(std::slice::from_ref(ends)) == 2);

    // An end that waits for its peer is given up: what it has made of the next link goes.
    let queue_pairs = sim.queue_pairs();
    assert!(all[0][0].endpoint.break_link());
    goes_on(&sim, &mut all, |_| sim.queue_pairs() < queue_pairs);
    goes_on(&sim, &mut all, |_| sim.queue_pairs() == queue_pairs);
    for end in &mut all[0] {
        end.endpoint.fail(ABORTED);
        end.endpoint.close();
    }
    let ended = goes_on(&sim, &mut all, |ends| ends.iter_mut().all(|end| end.endpoint.is_gone()));
    assert_eq!(sim.working(), 2);

    // A command at the least for each, and as many as a link takes for the others.
    assert!(told > 0 && gone > 0 && recovered > 2 && ended > 0, "{told}, {gone}, {recovered}, {ended} ms");
    assert!(Arc::strong_count(&region) == 1 && region.words(0, 1)[0].load(Ordering::Relaxed) == 0);
}
