//! How an engine that finds no work waits. Pure policy: time is passed in.
//!
//! A GPU cannot wake a CPU through host memory, so a window without an interrupt is polled: at first as fast as
//! possible, then in timed steps, whose length bounds the latency that they add. Where there is a doorbell, the engine
//! spins and yields for a moment and then blocks.
//!
//! On a core that others want, an engine that yields pays twice: the others run for milliseconds, and Linux (6.18 and
//! later) takes the rest of the time slice from a thread that yields, so that one that yields often gets less than its weight, while a
//! thread that sleeps keeps its claim. There the engine does not yield.

use std::time::Duration;

/// What may end an idle engine's wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Every producer rings a doorbell.
    Doorbell,
    /// Some producer is a device that cannot ring.
    Polled,
}

/// What to do after a pass that found no work. The lesser of two steps comes sooner to the next pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Look again at once.
    Spin,
    /// Let another thread run, then look again.
    Yield,
    /// Sleep this long, then look again.
    Sleep(Duration),
    /// Block until the doorbell rings, at most this long.
    Block(Duration),
}

const US: u64 = 1_000;

/// How long an engine has found no work, and what it does then.
#[derive(Debug)]
pub struct Idle {
    wake: Wake,
    spin: u64,
    since: Option<u64>,
    spinning: bool,
    yielded: Option<u64>,
    /// How many yields one after the other were long.
    long: u32,
    /// Until when the core counts as one that others want.
    wanted: u64,
}

/// How long others run while this engine yields on a core that they want: a core to spare gives the thread back after a microsecond.
const LONG: u64 = 100 * US;
/// This number of long yields one after the other means that other threads want the core. A few come where a thread of
/// another's passes by.
const MOST_LONG: u32 = 4;
/// How long an engine does not yield after those. One more long yield begins this anew.
const WANTED: u64 = 20_000 * US;

/// Length of a timed step in the first idle second. With the timer's own slack it stays under the 100 us that polling
/// may add, at about 5 % of a core.
const STEP_FIRST: Duration = Duration::from_micros(75);
/// Length of a timed step after the first idle second: under 1 ms, at well under 2 % of a core.
const STEP_LATER: Duration = Duration::from_micros(850);

impl Idle {
    /// A policy for an engine on a machine where `alone` says that there is a
    /// core to spare for spinning.
    pub fn new(wake: Wake, alone: bool) -> Self {
        let spin = match (wake, alone) {
            (Wake::Polled, true) => 2_000 * US,
            (Wake::Polled, false) => 200 * US,
            (Wake::Doorbell, true) => 20 * US,
            (Wake::Doorbell, false) => 2 * US,
        };
        Idle { wake, spin, since: None, spinning: true, yielded: None, long: 0, wanted: 0 }
    }

    /// Changes what may end the wait: a queue pair was added.
    pub fn set_wake(&mut self, wake: Wake, alone: bool) {
        *self = Idle { since: self.since, long: self.long, wanted: self.wanted, ..Idle::new(wake, alone) };
    }

    /// Notes that a pass found work.
    #[inline(always)]
    pub fn busy(&mut self) {
        self.since = None;
        self.spinning = true;
    }

    /// True until [`Idle::idle`] answers anything but [`Step::Spin`].
    #[inline(always)]
    pub fn spins(&self) -> bool {
        self.spinning
    }

    /// True from [`Step::Yield`] until [`Idle::back`].
    #[inline(always)]
    pub fn has_yielded(&self) -> bool {
        self.yielded.is_some()
    }

    /// Notes that the thread runs again at time `now`, after it yielded.
    pub fn back(&mut self, now: u64) {
        let Some(before) = self.yielded.take() else { return };
        self.long = if now.saturating_sub(before) > LONG { MOST_LONG.min(self.long + 1) } else { 0 };
        if self.long == MOST_LONG {
            self.wanted = now + WANTED;
        }
    }

    /// Says what to do after a pass at time `now` (nanoseconds, monotonic) that found no work.
    pub fn idle(&mut self, now: u64) -> Step {
        let idle = now - *self.since.get_or_insert(now);
        self.spinning = idle < self.spin;
        let yields = match self.wake {
            _ if now < self.wanted => 0,
            Wake::Doorbell => 50 * US,
            Wake::Polled => 100 * US,
        };
        match self.wake {
            _ if self.spinning => Step::Spin,
            _ if idle < self.spin + yields => {
                self.yielded = Some(now);
                Step::Yield
            }
            Wake::Doorbell => Step::Block(Duration::from_millis(100)),
            Wake::Polled if idle < 1_000_000 * US => Step::Sleep(STEP_FIRST),
            Wake::Polled => Step::Sleep(STEP_LATER),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polled_windows_are_never_blocked_on() {
        let mut idle = Idle::new(Wake::Polled, true);
        for ms in 0..3000 {
            match idle.idle(ms * 1_000_000) {
                Step::Block(_) => panic!("a GPU cannot ring"),
                Step::Sleep(d) => assert!(d < Duration::from_micros(if ms < 1000 { 100 } else { 1000 })),
                _ => {}
            }
        }
    }

    #[test]
    fn an_engine_whose_yields_let_others_run_for_long_yields_no_more_for_a_while() {
        for (wake, spun, last) in
            [(Wake::Doorbell, 10 * US, "Block(100ms)"), (Wake::Polled, 210 * US, "Sleep(75µs)")]
        {
            let mut idle = Idle::new(wake, false);
            // Yields from `now` on, and is back after `long`. What the wait that follows is, after no work for the time of spinning.
            let mut after = |now: u64, long: u64| {
                assert_eq!(idle.idle(now), Step::Spin);
                assert_eq!(idle.idle(now + spun), Step::Yield);
                assert!(idle.has_yielded());
                idle.back(now + spun + long);
                assert!(!idle.has_yielded());
                idle.busy();
                assert_eq!(idle.idle(now + 10_000 * US), Step::Spin);
                let step = idle.idle(now + 10_000 * US + spun);
                idle.busy();
                format!("{step:?}")
            };
            assert_eq!(after(0, 20 * US), "Yield", "{wake:?}");
            let mut all = |long: &[u64], from: u64| {
                let steps: Vec<_> =
                    (from..).zip(long).map(|(n, long)| after(n * 100_000 * US, long * US)).collect();
                steps.last().unwrap().clone()
            };
            assert_eq!(all(&[3_000, 3_000, 3_000, 20, 3_000, 3_000, 3_000], 1), "Yield");
            assert_eq!(all(&[3_000], 8), last);
            assert_eq!(all(&[3_000], 9), last);
            assert_eq!(all(&[20], 10), "Yield");
        }
    }

    #[test]
    fn work_starts_it_anew() {
        let mut idle = Idle::new(Wake::Doorbell, true);
        assert_eq!(idle.idle(0), Step::Spin);
        assert!(matches!(idle.idle(1_000_000_000), Step::Block(_)));
        idle.busy();
        assert_eq!(idle.idle(1_000_000_001), Step::Spin);
    }
}
