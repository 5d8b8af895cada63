//! Whether the device at the other end of a link still answers. Pure policy: time is passed in, in nanoseconds.
//!
//! A path that has gone silent fails a work request only after all of the device's retries, which takes half a second to half a
//! minute. So this end looks how long no work request has completed though some are under way. Where nothing is
//! under way the link writes its line now and then. The peer's *device* answers a WRITE; whether the peer's process runs does
//! not matter.

/// The least bytes that a path carries in a second, below which it counts as silent: less than 100 Mbit/s Ethernet has.
const SLOWEST: u64 = 8_000_000;
/// A longer gap between two looks, nanoseconds, is that of an engine that did not run. It does not count.
const STARVED: u64 = 200_000_000;

/// What a look has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Work requests complete, or none is under way.
    Answers,
    /// Work requests are under way, and no completion is asked for.
    Unasked,
    /// Nothing has completed for too long.
    Silent,
}

/// The work requests of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnderWay {
    /// Work requests written, those known to be done, and the last that asks for a completion.
    pub(super) written: u64,
    pub(super) done: u64,
    pub(super) signaled: u64,
    /// The most bytes between two that ask for a completion.
    pub(super) bytes: u64,
}

/// The path of one link.
#[derive(Debug)]
pub(super) struct Path {
    /// Within this time a silent path is found; 0: it is not looked for.
    limit: u64,
    done: u64,
    /// Since when nothing has completed.
    since: u64,
    looked: u64,
}

impl Path {
    /// A path whose silence is found within `limit` nanoseconds; 0: it is not looked for.
    pub(super) fn new(limit: u64) -> Self {
        Path { limit, done: 0, since: 0, looked: 0 }
    }

    /// The path of the next link.
    pub(super) fn anew(&self) -> Self {
        Path::new(self.limit)
    }

    /// After this time without a message the link writes its line, nanoseconds.
    pub(super) fn beat(&self) -> u64 {
        const BEAT: u64 = 1_000_000_000;
        if self.limit == 0 { BEAT } else { (self.limit / 4).min(BEAT) }
    }

    /// Looks at the work requests.
    pub(super) fn look(&mut self, at: UnderWay, now: u64) -> Found {
        let gap = now.saturating_sub(std::mem::replace(&mut self.looked, now));
        if self.limit == 0 || at.done == at.written || at.done != self.done {
            (self.done, self.since) = (at.done, now);
            return Found::Answers;
        }
        if gap > STARVED.max(self.limit / 4) {
            self.since = self.since.saturating_add(gap).min(now);
        }
        let silent = now.saturating_sub(self.since);
        // A beat may have come a quarter of the limit after the path went silent.
        let most = self.limit - self.limit / 4;
        if silent >= most.saturating_add(at.bytes * (1_000_000_000 / SLOWEST)) {
            Found::Silent
        } else if at.signaled <= at.done && silent >= self.limit / 8 {
            Found::Unasked
        } else {
            Found::Answers
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const LIMIT: u64 = 1000 * MS;
    const ONE: UnderWay = UnderWay { written: 1, done: 0, signaled: 1, bytes: 64 };

    /// When a path that is looked at every 10 ms is found to be silent.
    fn found(path: &mut Path, at: UnderWay, from: u64) -> u64 {
        (from..from + 100_000 * MS)
            .step_by(10 * MS as usize)
            .find(|now| path.look(at, *now) == Found::Silent)
            .expect("it is silent")
    }

    #[test]
    fn p7_a_path_over_which_nothing_completes_is_silent_within_the_limit_with_the_beat_before() {
        let mut path = Path::new(LIMIT);
        assert_eq!(path.look(UnderWay { written: 0, ..ONE }, 0), Found::Answers);
        let took = found(&mut path, ONE, 10 * MS);
        assert!(took + path.beat() <= LIMIT + 20 * MS, "{took}");
    }

    #[test]
    fn p7_each_completion_begins_the_time_anew_and_an_idle_path_is_never_silent() {
        let mut path = Path::new(LIMIT);
        for turn in 0..100 {
            let at = UnderWay { written: 1000, done: turn, signaled: 1000, bytes: 64 };
            assert_eq!(path.look(at, turn * 700 * MS), Found::Answers);
        }
        let mut path = Path::new(LIMIT);
        for turn in 0..100 {
            let at = UnderWay { written: 7, done: 7, signaled: 7, bytes: 0 };
            assert_eq!(path.look(at, turn * 100 * MS), Found::Answers);
        }
    }

    #[test]
    fn a_long_message_has_the_time_that_a_slow_path_takes_for_it() {
        let long = UnderWay { bytes: 80_000_000, ..ONE };
        let took = found(&mut Path::new(LIMIT), long, 0);
        assert!((10_000 * MS..11_000 * MS).contains(&took), "{took}");
    }

    #[test]
    fn p7_an_engine_that_did_not_run_finds_no_silence_in_that_time() {
        let mut path = Path::new(LIMIT);
        path.look(ONE, 0);
        assert_eq!(path.look(ONE, 60_000 * MS), Found::Answers);
        assert!(found(&mut path, ONE, 60_010 * MS) > 60_500 * MS);
    }

    #[test]
    fn a_completion_is_asked_for_where_none_was_and_without_a_limit_nothing_is_looked_for() {
        let unasked = UnderWay { signaled: 0, ..ONE };
        let mut path = Path::new(LIMIT);
        path.look(unasked, 0);
        assert_eq!(path.look(unasked, 130 * MS), Found::Unasked);
        let mut path = Path::new(0);
        for turn in 0..1000 {
            assert_eq!(path.look(unasked, turn * 100 * MS), Found::Answers);
        }
    }
}
