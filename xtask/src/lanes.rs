//! The lanes of `cargo xtask test`. Steps that run tests or boot guests leave a core idle for much of their time. Steps
//! that only compute fill that time: they run beside the others, in a lane of their own.
//!
//! On fewer than [`CORES`] cores all steps run one after the other.

use crate::steps::{Lane, Step};

/// What the commands of [`Lane::Beside`] add to the nice value. Beside the lane's two busy processes two busy ones of
/// [`Lane::Main`] still get three quarters of the machine, and beside two strangers' the lane gets a quarter.
pub const NICE: i32 = 5;

/// The fewest cores on which steps run beside others. On two cores nothing was gained: steps that compute slowed the tests
/// down by more time than they needed alone (the step `tests` took 1,169 s in place of 526).
pub const CORES: usize = 4;

/// Steps by the lane in which they run.
#[derive(Default)]
pub struct Lanes {
    /// Before all others.
    pub first: Vec<&'static Step>,
    /// One after the other, beside those of `beside`.
    pub main: Vec<&'static Step>,
    /// One after the other, beside those of `main`.
    pub beside: Vec<&'static Step>,
}

impl Lanes {
    /// Sorts the steps for a machine with `cores` cores; each lane keeps their order.
    pub fn of(steps: &[&'static Step], cores: usize) -> Lanes {
        let is_in = |lane| steps.iter().copied().filter(move |step| step.lane == lane);
        let first = is_in(Lane::First).collect();
        if cores < CORES || is_in(Lane::Main).next().is_none() {
            let main = steps.iter().copied().filter(|step| step.lane != Lane::First).collect();
            return Lanes { first, main, beside: Vec::new() };
        }
        Lanes { first, main: is_in(Lane::Main).collect(), beside: is_in(Lane::Beside).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::STEPS;

    fn named(names: &[&str]) -> Vec<&'static Step> {
        STEPS.iter().filter(|step| names.contains(&step.name)).collect()
    }

    fn names(steps: &[&'static Step]) -> Vec<&'static str> {
        steps.iter().map(|step| step.name).collect()
    }

    #[test]
    fn steps_that_compute_run_beside_steps_that_wait() {
        let lanes = Lanes::of(&named(&["system", "clippy", "tests", "sim", "vm"]), CORES);
        assert_eq!(names(&lanes.first), ["system"]);
        assert_eq!(names(&lanes.main), ["tests", "vm"]);
        assert_eq!(names(&lanes.beside), ["clippy", "sim"]);
    }

    #[test]
    fn on_few_cores_all_steps_run_one_after_the_other_in_the_order_of_the_table() {
        let lanes = Lanes::of(&named(&["system", "clippy", "tests", "sim", "vm"]), CORES - 1);
        assert_eq!(names(&lanes.first), ["system"]);
        assert_eq!(names(&lanes.main), ["clippy", "tests", "sim", "vm"]);
        assert!(lanes.beside.is_empty());
    }

    #[test]
    fn without_a_step_that_waits_none_runs_beside() {
        let lanes = Lanes::of(&named(&["format", "sim"]), 16);
        assert_eq!(names(&lanes.main), ["format", "sim"]);
        assert!(lanes.first.is_empty() && lanes.beside.is_empty());
    }

    #[test]
    fn every_step_is_in_one_lane_once() {
        let all: Vec<_> = STEPS.iter().collect();
        for cores in [1, CORES, 64] {
            let lanes = Lanes::of(&all, cores);
            let mut found = names(&[lanes.first, lanes.main, lanes.beside].concat());
            let mut wanted = names(&all);
            found.sort();
            wanted.sort();
            assert_eq!(found, wanted);
        }
    }
}
