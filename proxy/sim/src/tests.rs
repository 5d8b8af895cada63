//! Tests of the simulator itself: it finds each planted fault, finds nothing without one, and repeats itself.

use crate::{Cut, MOST_RANKS, Plant, Simulator};

/// Seeds within which each planted fault must be found.
const SEEDS: u64 = 1000;

/// Runs seeds with a planted fault until it is found. Returns the promise that is said to be broken.
fn found(plant: Plant) -> u8 {
    let mut simulator = Simulator::new();
    let outcome = (1..=SEEDS)
        .map(|seed| simulator.run(seed, &Cut::default(), Some(plant), false))
        .find(|outcome| outcome.violation.is_some());
    let outcome = outcome.unwrap_or_else(|| panic!("{plant:?} is not found within {SEEDS} seeds"));
    let violation = outcome.violation.clone().expect("it is why the search ended");
    println!("{plant:?}: seed {}: P{}: {}", outcome.seed, violation.promise, violation.sentence);
    let again = simulator.run(outcome.seed, &Cut::default(), Some(plant), false);
    assert_eq!((again.violation, again.steps, again.hash), (outcome.violation, outcome.steps, outcome.hash));
    violation.promise
}

#[test]
fn p1_one_credit_too_many_is_found() {
    assert_eq!(found(Plant::P1Credit), 1);
}

#[test]
fn p2_a_lap_that_is_ignored_is_found() {
    found(Plant::P2Lap);
}

#[test]
fn p3_a_signal_before_its_data_is_found() {
    assert_eq!(found(Plant::P3Signal), 3);
}

#[test]
fn p4_a_permit_that_leaks_and_one_that_is_forged_are_found() {
    assert_eq!((found(Plant::P4Leaked), found(Plant::P4Forged)), (4, 4));
}

#[test]
fn p5_a_place_that_is_freed_too_early_is_found() {
    assert_eq!(found(Plant::P5Freed), 5);
}

#[test]
fn p5_a_slot_that_is_given_back_while_a_stream_reads_it_is_found() {
    assert_eq!(found(Plant::P5Settled), 5);
}

#[test]
fn p6_a_message_that_landed_in_part_over_the_last_link_is_found() {
    // The rest of its payload is not there when the message is shown; or no link can carry what follows, and the session ends.
    assert!([3, 7].contains(&found(Plant::P6Landed)));
}

#[test]
fn p6_a_rewind_by_one_too_few_is_found() {
    // Or the next message finds a slot taken that holds no message.
    assert!([4, 6].contains(&found(Plant::P6Rewind)));
}

#[test]
fn p6_a_frame_to_an_earlier_incarnation_that_is_taken_is_found() {
    assert_eq!(found(Plant::P6Stale), 6);
}

#[test]
fn p6_a_message_that_is_accepted_past_a_hole_is_found() {
    // What is missing is its payload, when the message is shown or when its slot is given back.
    assert!([3, 5].contains(&found(Plant::P6Hole)));
}

#[test]
fn p6_a_put_placed_before_an_older_one_and_a_rail_that_is_not_fenced_are_found() {
    // Of the first one older bytes lie over newer ones, or are not there when their signal is.
    assert!([3, 6].contains(&found(Plant::P6Overlap)));
    assert_eq!(found(Plant::P6Fence), 6);
}

#[test]
fn p6_an_end_that_uses_a_link_which_it_has_left_is_found() {
    assert_eq!((found(Plant::P6Late), found(Plant::P6Early)), (6, 6));
}

#[test]
fn p6_credit_before_the_session_segment_says_so_is_found() {
    assert_eq!(found(Plant::P6Session), 6);
}

#[test]
fn p7_an_end_that_tries_no_second_time_is_found() {
    assert_eq!(found(Plant::P7Attempt), 7);
}

#[test]
fn p7_a_lost_wake_up_and_a_lost_ready_are_found() {
    assert_eq!((found(Plant::P7WakeUp), found(Plant::P7Ready)), (7, 7));
}

#[test]
fn p8_a_region_that_is_not_checked_is_found() {
    assert_eq!(found(Plant::P8Region), 8);
}

#[test]
fn a_run_without_a_planted_fault_is_clean_and_repeats_itself() {
    let mut simulator = Simulator::new();
    let (mut messages, mut faults, mut large) = (Vec::new(), Vec::new(), 0);
    let (mut repeated, mut unmet, mut recovered, mut rails_broken, mut stripes_lost) = (0, 0, 0, 0, 0);
    let mut restarted = 0;
    for seed in 1..=100 {
        let outcome = simulator.run(seed, &Cut::default(), None, false);
        assert_eq!(outcome.violation, None, "seed {seed}: {:#?}", outcome.last);
        let again = simulator.run(seed, &Cut::default(), None, false);
        assert_eq!((outcome.steps, outcome.hash), (again.steps, again.hash), "seed {seed}");
        messages.push(outcome.messages);
        faults.push(outcome.faults);
        large += (outcome.ranks == MOST_RANKS) as u32;
        (repeated, unmet) = (repeated + outcome.repeated, unmet + outcome.unmet);
        recovered += outcome.recovered;
        restarted += outcome.restarted;
        rails_broken += outcome.rails_broken;
        stripes_lost += outcome.stripes_lost;
    }
    // A clean run says something only if much happens in it.
    messages.sort_unstable();
    faults.sort_unstable();
    assert!(messages[50] >= 200 && faults[50] >= 1 && large >= 5, "{messages:?}, {faults:?}, {large}");
    assert!(recovered > 50, "{recovered} links were replaced");
    assert!(restarted > 20, "{restarted} engines died and were replaced");
    assert!(
        rails_broken > 10 && stripes_lost > 10,
        "{rails_broken} links of rails broke, {stripes_lost} stripes lost"
    );
    assert!(repeated > 0 && unmet > 0, "{repeated} set-ups were repeated, {unmet} failed");
}

#[test]
fn a_failing_run_is_made_smaller_and_fails_again() {
    let mut simulator = Simulator::new();
    let plant = Some(Plant::P5Freed);
    let failed = (1..=SEEDS)
        .map(|seed| simulator.run(seed, &Cut::default(), plant, false))
        .find(|outcome| outcome.violation.is_some() && outcome.qps > 2)
        .expect("a planted fault is found");
    let small = simulator.shrink(&Cut::default(), &failed, plant, 600);
    assert!(small.outcome.qps == 1 && small.outcome.messages < failed.messages, "{small:?}");
    let again = simulator.run(failed.seed, &small.cut, plant, false);
    assert_eq!((again.violation, again.hash), (small.outcome.violation, small.outcome.hash));
}
