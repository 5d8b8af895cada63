//! How an engine that finds no work waits. Pure policy: time is passed in.
//!
//! A GPU cannot wake a CPU through host memory, so a window without an interrupt is polled: at first as fast as
//! possible, then in timed steps, whose length bounds the latency that they add. Where there is a doorbell, the engine
//! spins and yields for a moment and then blocks.

use std::time::Duration;

/// What may end an idle engine's wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Every producer rings a doorbell.
    Doorbell,
    /// Some producer is a device that cannot ring.
    Polled,
}

/// What to do after a pass that found no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

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
        Idle { wake, spin, since: None, spinning: true }
    }

    /// Changes what may end the wait: a queue pair was added.
    pub fn set_wake(&mut self, wake: Wake, alone: bool) {
        *self = Idle { since: self.since, ..Idle::new(wake, alone) };
    }

    /// A pass found work.
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

    /// A pass at time `now` (nanoseconds, monotonic) found none.
    pub fn idle(&mut self, now: u64) -> Step {
        let idle = now - *self.since.get_or_insert(now);
        self.spinning = idle < self.spin;
        match self.wake {
            _ if self.spinning => Step::Spin,
            Wake::Doorbell if idle < self.spin + 50 * US => Step::Yield,
            Wake::Doorbell => Step::Block(Duration::from_millis(100)),
            Wake::Polled if idle < self.spin + 100 * US => Step::Yield,
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
    fn work_starts_it_anew() {
        let mut idle = Idle::new(Wake::Doorbell, true);
        assert_eq!(idle.idle(0), Step::Spin);
        assert!(matches!(idle.idle(1_000_000_000), Step::Block(_)));
        idle.busy();
        assert_eq!(idle.idle(1_000_000_001), Step::Spin);
    }
}
