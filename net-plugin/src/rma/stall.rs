//! When to say that a coll comm has stalled: something waits, and nothing moves.

use std::time::{Duration, Instant};

/// Since when nothing has moved.
#[derive(Debug, Default)]
pub struct Stall {
    /// When `moved` was seen first.
    since: Option<Instant>,
    moved: u64,
    said: bool,
}

impl Stall {
    /// A look at time `now`. `moved` is another number whenever something has moved, and `waits` says whether something should move.
    /// Returns how long nothing has moved, once for each stall, where that is `limit` at least. A limit of 0 is none.
    pub fn look(&mut self, now: Instant, moved: u64, waits: bool, limit: Duration) -> Option<Duration> {
        if !waits || moved != self.moved || self.since.is_none() {
            *self = Stall { since: Some(now), moved, said: false };
            return None;
        }
        let long = now - self.since?;
        let says = !limit.is_zero() && long >= limit && !self.said;
        self.said |= says;
        says.then_some(long)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_told_once_and_only_where_something_waits() {
        const LIMIT: Duration = Duration::from_secs(30);
        let began = Instant::now();
        let mut stall = Stall::default();
        let mut look = |second, moved, waits| {
            stall.look(began + Duration::from_secs(second), moved, waits, LIMIT).map(|long| long.as_secs())
        };
        assert_eq!(look(0, 7, true), None);
        assert_eq!(look(29, 7, true), None);
        assert_eq!(look(31, 7, true), Some(31));
        assert_eq!(look(90, 7, true), None, "it was told");
        assert_eq!(look(100, 8, true), None);
        assert_eq!(look(131, 8, true), Some(31), "another one");
        assert_eq!(look(200, 8, false), None);
        assert_eq!(look(229, 8, true), None, "nothing waited until second 200");
        assert_eq!(look(231, 8, true), Some(31));
        assert_eq!(stall.look(began + 10 * LIMIT, 8, true, Duration::ZERO), None);
    }
}
