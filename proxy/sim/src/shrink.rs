//! A failing run made smaller: fewer faults, fewer queue pairs (and so fewer ranks), fewer messages, then the schedule
//! with the fewest steps. What is tried is a run of the same seed cut down, so what is found is replayed by its flags.

use super::plan::Plan;
use super::{Cut, Outcome, Plant, Simulator};

/// Schedules that are tried for each cut.
const SALTS: u64 = 12;

/// The smallest run that was found.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// What is left of the seed's plan.
    pub cut: Cut,
    /// What the run came to.
    pub outcome: Outcome,
    /// Runs that were tried.
    pub tried: u32,
}

struct Search<'a> {
    simulator: &'a mut Simulator,
    plant: Option<Plant>,
    best: Shrunk,
    /// Runs that may still be tried.
    left: u32,
}

impl Search<'_> {
    /// Runs the cut under some schedules. True if one of them fails as the first run did: then the cut is the best.
    fn attempt(&mut self, cut: &Cut) -> bool {
        let promise = self.best.outcome.violation.as_ref().map(|v| v.promise);
        let salts = std::iter::once(self.best.cut.salt).chain(0..SALTS);
        for salt in salts {
            if self.left == 0 {
                return false;
            }
            self.left -= 1;
            self.best.tried += 1;
            let cut = Cut { salt, ..cut.clone() };
            let outcome = self.simulator.run(self.best.outcome.seed, &cut, self.plant, false);
            if outcome.violation.as_ref().map(|v| v.promise) == promise {
                (self.best.cut, self.best.outcome) = (cut, outcome);
                return true;
            }
        }
        false
    }

    /// Leaves out as many of `all` as it can: first all of them, then halves, then each alone.
    fn without(&mut self, all: Vec<u32>, set: impl Fn(&mut Cut, Vec<u32>)) {
        let mut kept = all;
        let mut size = kept.len();
        while size > 0 {
            let mut at = 0;
            while at < kept.len() {
                let end = (at + size).min(kept.len());
                let fewer: Vec<u32> = kept[..at].iter().chain(&kept[end..]).copied().collect();
                let mut cut = self.best.cut.clone();
                set(&mut cut, fewer.clone());
                if self.attempt(&cut) {
                    kept = fewer;
                } else {
                    at = end;
                }
            }
            size /= 2;
        }
    }
}

impl Simulator {
    /// Makes a failing run smaller, with at most `runs` further runs.
    pub fn shrink(&mut self, cut: &Cut, failed: &Outcome, plant: Option<Plant>, runs: u32) -> Shrunk {
        let best = Shrunk { cut: cut.clone(), outcome: failed.clone(), tried: 0 };
        let mut search = Search { simulator: self, plant, best, left: runs };
        let seed = failed.seed;
        for _ in 0..2 {
            let plan = Plan::new(seed, &search.best.cut);
            let in_set_up = plan.set_up.iter().map(|f| f.number);
            let faults: Vec<u32> = plan.faults.iter().map(|f| f.number).chain(in_set_up).collect();
            let qps: Vec<u32> = plan.qps.iter().map(|q| q.number).collect();
            search.without(faults, |cut, kept| cut.faults = Some(kept));
            search.without(qps, |cut, kept| cut.qps = Some(kept));
            // Half as many messages, as long as that fails; then a few less.
            let plan = Plan::new(seed, &search.best.cut);
            let most = plan.qps.iter().flat_map(|q| &q.ends).map(|e| e.messages).max().unwrap_or(0);
            let mut messages = most.max(plan.replay);
            let mut step = messages / 2;
            while step > 0 && messages > 0 {
                let fewer = Cut { messages: messages - step, ..search.best.cut.clone() };
                if search.attempt(&fewer) {
                    messages -= step;
                    step = step.min(messages / 2).max(1);
                } else {
                    step /= 2;
                }
            }
        }
        // Another schedule may fail earlier.
        let (cut, promise) =
            (search.best.cut.clone(), search.best.outcome.violation.as_ref().map(|v| v.promise));
        for salt in 0..50 {
            if search.left == 0 {
                break;
            }
            search.left -= 1;
            search.best.tried += 1;
            let cut = Cut { salt, ..cut.clone() };
            let outcome = search.simulator.run(seed, &cut, plant, false);
            if outcome.violation.as_ref().map(|v| v.promise) == promise
                && outcome.steps < search.best.outcome.steps
            {
                (search.best.cut, search.best.outcome) = (cut, outcome);
            }
        }
        search.best
    }
}
