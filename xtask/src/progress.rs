//! Tells a hang from slowness: a command is ended if it shows no progress for far longer than it
//! ever needs, and for no other reason. The time allowed grows with the slowness of the machine.

use std::cell::Cell;
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

/// How long a command may show no progress on a quiet machine of two cores. The longest silence of
/// any step there is about a minute (the summary of `cargo xtask test` names each step's).
pub const SILENCE: Duration = Duration::from_secs(600);

/// Limits that end a command before its own end. Progress means output. CPU time does not count,
/// because a loop that waits for ever may spin.
#[derive(Clone, Copy, Debug, Default)]
pub struct Guard {
    /// The silence after which a command counts as hanging, on a quiet machine of two cores.
    /// `None`: never.
    silence: Option<Duration>,
    /// The time by which the whole run must have ended. `None`: never.
    end: Option<Instant>,
}

impl Guard {
    /// A guard that ends nothing.
    pub const NONE: Guard = Guard { silence: None, end: None };

    /// A guard that ends what is silent for `silence`, stretched by the machine's slowness, or
    /// still runs at `end`.
    pub fn new(silence: Option<Duration>, end: Option<Instant>) -> Guard {
        Guard { silence, end }
    }

    /// A guard with another limit of silence and this one's end of the run.
    pub fn but_silent_for(self, silence: Duration) -> Guard {
        Guard { silence: Some(silence), ..self }
    }

    /// Whether the time of the whole run is over.
    pub fn is_over(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }
}

/// Watches one command, or one machine, for a [`Guard`].
#[derive(Debug)]
pub struct Watch {
    guard: Guard,
    seen: u64,
    since: Instant,
    stretch: f64,
}

impl Watch {
    /// Makes a watch that begins now.
    pub fn new(guard: Guard) -> Watch {
        Watch { guard, seen: 0, since: Instant::now(), stretch: 1.0 }
    }

    /// Looks at the progress, which is any number that changes when there is some. An error says
    /// why the watched command must end.
    pub fn look(&mut self, progress: u64) -> Result<(), String> {
        self.look_at(progress, Instant::now(), slowness)
    }

    fn look_at(&mut self, progress: u64, now: Instant, slowness: impl Fn() -> f64) -> Result<(), String> {
        if self.guard.end.is_some_and(|end| now >= end) {
            return Err("the time of the whole run was over".into());
        }
        let silent = now.saturating_duration_since(self.since);
        note(|usage| usage.silence = usage.silence.max(silent));
        if progress != self.seen {
            (self.seen, self.since) = (progress, now);
            return Ok(());
        }
        let Some(limit) = self.guard.silence else { return Ok(()) };
        if silent >= limit.mul_f64(self.stretch) {
            // The load may have begun in the meantime, so it is measured only now, when it matters.
            self.stretch = self.stretch.max(slowness());
            if silent >= limit.mul_f64(self.stretch) {
                return Err(format!(
                    "no progress (no output) for {} s; the limit is {} s on a quiet machine, this one is {:.1} times as slow",
                    silent.as_secs(),
                    limit.as_secs(),
                    self.stretch
                ));
            }
        }
        Ok(())
    }
}

/// What the commands that one thread has run did to the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// The longest time without output.
    pub silence: Duration,
    /// The CPU time of the commands that have ended.
    pub cpu: Duration,
}

thread_local! {
    static USAGE: Cell<Usage> = Cell::default();
}

fn note(change: impl FnOnce(&mut Usage)) {
    let mut usage = USAGE.get();
    change(&mut usage);
    USAGE.set(usage);
}

/// Adds the CPU time of a command of this thread that has ended.
pub fn add_cpu_time(time: Duration) {
    note(|usage| usage.cpu += time);
}

/// Adds what commands have used that other threads ran for this one.
pub fn add(usage: Usage) {
    note(|sum| {
        sum.silence = sum.silence.max(usage.silence);
        sum.cpu += usage.cpu;
    });
}

/// What this thread's commands have used since the last call.
pub fn take_usage() -> Usage {
    USAGE.take()
}

/// Seconds that [`work`] takes on one thread of the machine from which the budgets in
/// docs/testing.md come, when nothing else runs.
const REFERENCE: f64 = 0.135;

/// How many times longer two busy threads take here and now than on a quiet machine of two cores,
/// at least 1; measured in about 0.2 s. It grows with slow cores, with few cores and with other
/// processes.
pub fn slowness() -> f64 {
    let begin = Instant::now();
    let threads = [thread::spawn(work), thread::spawn(work)];
    for thread in threads {
        let _ = thread.join();
    }
    (begin.elapsed().as_secs_f64() / REFERENCE).max(1.0)
}

/// The factor by which tests and suites multiply their limits against a hang. It is twice the
/// slowness, because the load may grow after the measurement.
pub fn patience(slowness: f64) -> u32 {
    (2.0 * slowness).ceil() as u32
}

/// Checks 128 MiB of UTF-8. The standard library's code is optimised in every build of this
/// program.
fn work() {
    let text = "é".repeat(32 << 10);
    for _ in 0..2000 {
        black_box(std::str::from_utf8(black_box(text.as_bytes())).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn guard() -> Guard {
        Guard::new(Some(LIMIT), None)
    }

    #[test]
    fn silence_beyond_the_limit_is_a_hang() {
        let mut watch = Watch::new(guard());
        let begin = watch.since;
        watch.look_at(0, begin + LIMIT / 2, || 1.0).unwrap();
        let error = watch.look_at(0, begin + LIMIT, || 1.0).unwrap_err();
        assert!(error.contains("no progress") && error.contains("10 s"), "{error}");
    }

    #[test]
    fn progress_begins_the_silence_anew() {
        let mut watch = Watch::new(guard());
        let begin = watch.since;
        for step in 1..100 {
            watch.look_at(u64::from(step), begin + LIMIT * step, || 1.0).unwrap();
        }
        watch.look_at(99, begin + LIMIT * 100, || 1.0).unwrap_err();
    }

    #[test]
    fn a_slow_machine_has_more_time() {
        let mut watch = Watch::new(guard());
        let begin = watch.since;
        watch.look_at(0, begin + LIMIT * 3, || 4.0).unwrap();
        // A machine that was once measured to be slow is not measured again at each look.
        watch.look_at(0, begin + LIMIT * 39 / 10, || unreachable!()).unwrap();
        watch.look_at(0, begin + LIMIT * 4, || 1.0).unwrap_err();
    }

    #[test]
    fn the_end_of_the_run_ends_what_makes_progress() {
        let begin = Instant::now();
        let mut watch = Watch::new(Guard::new(None, Some(begin + LIMIT)));
        watch.look_at(0, begin + LIMIT / 2, || 1.0).unwrap();
        watch.look_at(1, begin + LIMIT, || 1.0).unwrap_err();
        assert!(Watch::new(Guard::NONE).look_at(0, begin + LIMIT * 1000, || 1.0).is_ok());
    }

    #[test]
    fn slowness_is_at_least_one_and_finite() {
        let slowness = slowness();
        assert!((1.0..1e6).contains(&slowness), "{slowness}");
    }
}
