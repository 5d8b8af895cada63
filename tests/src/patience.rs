//! How long a test waits before it counts something as hanging, on a machine that may be slow or
//! busy.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The name of the variable that holds the factor.
const VARIABLE: &str = "_PUSHGATE_TEST_PATIENCE";

/// The factor by which the time limits of tests are stretched on this machine: 1 or more.
///
/// The variable `_PUSHGATE_TEST_PATIENCE` holds the factor, a decimal number. `cargo xtask test`
/// sets the variable from the speed and the load of the machine. Without the variable the factor
/// is 1.
///
/// # Panics
///
/// If the variable holds anything else than a number of at least 1.
pub fn patience_factor() -> f64 {
    static FACTOR: OnceLock<f64> = OnceLock::new();
    *FACTOR.get_or_init(|| match std::env::var(VARIABLE) {
        Ok(text) => parsed(&text).unwrap_or_else(|| {
            panic!("invalid {VARIABLE} `{text}`: expected a number of at least 1, such as 2.5")
        }),
        Err(std::env::VarError::NotPresent) => 1.0,
        Err(e) => panic!("invalid {VARIABLE}: {e}"),
    })
}

fn parsed(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|factor: &f64| factor.is_finite() && *factor >= 1.0)
}

/// A test's time limit, stretched by [`patience_factor`].
///
/// A limit inside a test guards against a hang and asserts nothing about speed: give 60 seconds or
/// more. A test whose subject is a deadline compares with that deadline instead and says so.
pub fn patience(limit: Duration) -> Duration {
    limit.mul_f64(patience_factor())
}

/// The limit against a hang for tests without a reason for another limit: a minute, stretched.
pub fn hang() -> Duration {
    patience(Duration::from_secs(60))
}

/// Waits until `done` is true.
///
/// # Panics
///
/// After [`hang`], naming `what` as the thing that did not come.
#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let (begin, limit) = (Instant::now(), hang());
    while !done() {
        assert!(begin.elapsed() < limit, "after {limit:?} there is still not: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The pause between two looks of a test that polls: yields at first, then sleeps. A poll that only yields takes most of the
/// cores from the threads and kernel tasks whose work the poll waits for, where cores are few.
#[derive(Debug, Default)]
pub struct Pause {
    /// Looks that found nothing since something was found.
    in_vain: std::cell::Cell<u32>,
}

impl Pause {
    /// Looks that find nothing before the pause sleeps.
    const YIELDS: u32 = 100;

    /// Call this after each look. `found`: the look found something.
    pub fn after(&self, found: bool) {
        self.in_vain.set(if found { 0 } else { self.in_vain.get().saturating_add(1) });
        match self.in_vain.get() {
            0..=Self::YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_is_a_number_of_at_least_one() {
        assert_eq!((parsed("1"), parsed("2.5\n"), parsed("40")), (Some(1.0), Some(2.5), Some(40.0)));
        assert!(["", "0.5", "-1", "inf", "NaN", "much"].iter().all(|text| parsed(text).is_none()));
    }

    #[test]
    fn a_limit_is_never_shortened() {
        assert!(patience(Duration::from_secs(3)) >= Duration::from_secs(3));
        assert!(hang() >= Duration::from_secs(60));
    }

    #[test]
    fn a_wait_ends_as_soon_as_the_condition_holds() {
        let mut left = 3;
        wait_until("the third look", || {
            left -= 1;
            left == 0
        });
    }
}
