//! The time of one transfer by its size: the formula that is fitted to a probe's readings.
//!
//! ```text
//! kernel  blocks(n) = n / slice, at least 1, at most most_blocks
//!         T(n)      = fixed + (meet, where blocks > 1) + n / min(rate, blocks x block_rate)
//! engine  T(n)      = fixed + n / block_rate             below slice
//!                   = fixed + meet + n / rate            from there on
//! ```
//! `fixed` is the trip of the first byte, and of the word that reports the last one. The blocks of
//! a kernel meet in device memory; a single block need not. A block has a bounded number of bytes
//! in flight, and the link a bounded rate. A copy engine is modelled as one block without a bound,
//! but small copies take another way through it, at a rate of their own.

use serde::{Deserialize, Serialize};

use crate::fit::{Reading, fit, worst};

/// The parameters of a curve; all are positive.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    /// Microseconds that even an empty transfer takes.
    pub fixed: f64,
    /// Microseconds until several blocks have met; for an engine, what large copies take in
    /// addition.
    pub meet: f64,
    /// Gigabytes (10^9 bytes) a second of one block, or of an engine's small copies.
    pub block_rate: f64,
    /// Gigabytes a second of all blocks, or of an engine's large copies.
    pub rate: f64,
    /// Bytes for which one more block takes part, or from which on a copy is large.
    pub slice: u64,
    /// The most blocks; 1 stands for an engine.
    pub most_blocks: u32,
}

/// The longest transfer that counts, ten seconds, in microseconds.
const MOST_US: f64 = 1e7;
/// The highest rate that counts, in gigabytes a second: no memory is faster.
const MOST_RATE: f64 = 1e6;

/// How many blocks carry `bytes`.
pub fn blocks(bytes: u64, slice: u64, most: u32) -> u32 {
    (bytes / slice.max(1)).clamp(1, u64::from(most.max(1))) as u32
}

impl Curve {
    /// Microseconds of a transfer of `bytes`.
    pub fn time(&self, bytes: u64) -> f64 {
        self.at(bytes as f64)
    }

    fn at(&self, bytes: f64) -> f64 {
        if self.most_blocks <= 1 {
            return match bytes < self.slice as f64 {
                true => self.fixed + bytes / (self.block_rate * 1e3),
                false => self.fixed + self.meet + bytes / (self.rate * 1e3),
            };
        }
        let blocks = blocks(bytes as u64, self.slice, self.most_blocks);
        let rate = self.rate.min(self.block_rate * f64::from(blocks));
        self.fixed + if blocks > 1 { self.meet } else { 0.0 } + bytes / (rate * 1e3)
    }

    /// Gigabytes a second of transfers of `bytes`, one after the other.
    pub fn bandwidth(&self, bytes: u64) -> f64 {
        bytes as f64 / self.time(bytes) / 1e3
    }

    /// The curve nearest to the points, each (bytes, microseconds), of transfers that chose their
    /// blocks by `slice` and `most_blocks`. `None` without a point.
    pub fn fitted(points: &[(u64, f64)], slice: u64, most_blocks: u32) -> Option<Self> {
        let readings = readings(points);
        let least = readings.iter().map(|r| r.value).fold(f64::INFINITY, f64::min);
        let fastest = readings.iter().map(|r| r.at / r.value / 1e3).fold(0.0, f64::max);
        if readings.is_empty() || fastest <= 0.0 {
            return None;
        }
        // A parameter that the readings do not determine may take any value, but not one that no
        // link has.
        let of = |p: &[f64]| {
            let (fixed, rate) = (p[0].clamp(1e-6, MOST_US), p[1].clamp(1e-6, MOST_RATE));
            let (block_rate, meet) = match p {
                [_, _, block_rate, meet] => (block_rate.clamp(1e-6, MOST_RATE), meet.clamp(0.0, MOST_US)),
                _ => (rate, 0.0),
            };
            Self { fixed, meet, block_rate, rate, slice, most_blocks }
        };
        let mut guess = vec![least * 0.9, fastest * 1.05];
        // A straight line if no reading could tell more.
        if most_blocks > 1 || readings.iter().any(|r| r.at < slice as f64) {
            guess.extend([fastest / 4.0, least * 0.5]);
        }
        Some(of(&fit(&readings, &guess, |p, at| of(p).at(at))))
    }

    /// The largest relative error of the curve at the points, and the size in bytes where it
    /// occurs.
    pub fn worst(&self, points: &[(u64, f64)]) -> Option<(f64, u64)> {
        worst(&readings(points), |at| self.at(at)).map(|(error, at)| (error, at as u64))
    }

    /// Whether every parameter is one that a link could have.
    pub fn is_sane(&self) -> bool {
        let positive = |v: f64, most: f64| v.is_finite() && v > 0.0 && v <= most;
        positive(self.fixed, MOST_US)
            && (0.0..=MOST_US).contains(&self.meet)
            && positive(self.block_rate, MOST_RATE)
            && positive(self.rate, MOST_RATE)
            && self.slice > 0
            && self.most_blocks > 0
    }
}

fn readings(points: &[(u64, f64)]) -> Vec<Reading> {
    points.iter().map(|(bytes, us)| Reading { at: *bytes as f64, value: *us }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> impl Iterator<Item = u64> {
        (6..=26).map(|i| 1u64 << i)
    }

    /// Repeatable noise from -1 to 1.
    fn noise(seed: u64) -> f64 {
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
        for _ in 0..3 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
        }
        (x >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    const KERNEL: Curve =
        Curve { fixed: 1.4, meet: 1.2, block_rate: 10.0, rate: 52.0, slice: 32 << 10, most_blocks: 16 };
    const ENGINE: Curve =
        Curve { fixed: 2.8, meet: 0.0, block_rate: 55.4, rate: 55.4, slice: 1, most_blocks: 1 };
    const SMALL_APART: Curve = Curve { meet: 0.1, block_rate: 2.5, slice: 2048, ..ENGINE };

    fn near(found: f64, real: f64, what: &str) {
        assert!((found / real - 1.0).abs() < 0.02, "{what}: {found}, really {real}");
    }

    #[test]
    fn the_fit_finds_the_parameters() {
        for seed in 0..20 {
            for (real, kernel) in [(KERNEL, true), (ENGINE, false), (SMALL_APART, false)] {
                let points: Vec<_> = sizes()
                    .map(|n| (n, real.time(n) * (1.0 + 0.01 * noise(n.wrapping_add(seed * 7919)))))
                    .collect();
                let found = Curve::fitted(&points, real.slice, real.most_blocks).unwrap();
                near(found.fixed, real.fixed, "fixed");
                near(found.rate, real.rate, "rate");
                if kernel {
                    near(found.block_rate, real.block_rate, "block_rate");
                    // `meet` is a small part of every reading that contains it.
                    assert!((found.meet - real.meet).abs() < 0.1, "{found:?}");
                }
                assert!(found.worst(&points).unwrap().0 < 0.03 && found.is_sane());
            }
        }
    }

    #[test]
    fn outliers_do_not_move_it() {
        for seed in 0..10 {
            let mut points: Vec<_> = sizes()
                .map(|n| (n, KERNEL.time(n) * (1.0 + 0.005 * noise(n.wrapping_add(seed * 104_729)))))
                .collect();
            points[2].1 *= 8.0;
            points[9].1 *= 3.0;
            points[17].1 *= 0.5;
            let found = Curve::fitted(&points, KERNEL.slice, KERNEL.most_blocks).unwrap();
            near(found.fixed, KERNEL.fixed, "fixed");
            near(found.rate, KERNEL.rate, "rate");
            near(found.block_rate, KERNEL.block_rate, "block_rate");
        }
    }

    #[test]
    fn what_is_not_determined_stays_within_reason() {
        // Small copies that all take the same time: their rate could be anything.
        for slice in [1, 2048, 1 << 40] {
            for most in [1, 16] {
                let points: Vec<_> =
                    sizes().map(|n| (n, if n < 2048 { 19.0 } else { 21.0 + n as f64 / 1e4 })).collect();
                let found = Curve::fitted(&points, slice, most).unwrap();
                assert!(found.is_sane(), "{found:?}");
                let flat: Vec<_> = sizes().map(|n| (n, 1.0)).collect();
                assert!(Curve::fitted(&flat, slice, most).unwrap().is_sane());
                let tiny: Vec<_> = sizes().map(|n| (n, 1e-12)).collect();
                assert!(Curve::fitted(&tiny, slice, most).unwrap().is_sane());
            }
        }
    }

    #[test]
    fn few_points_give_a_curve_and_none_gives_none() {
        assert_eq!(Curve::fitted(&[], 1, 1), None);
        let one = Curve::fitted(&[(1 << 20, 20.0)], 1, 1).unwrap();
        assert!((one.time(1 << 20) / 20.0 - 1.0).abs() < 0.01, "{one:?}");
        assert!((KERNEL.bandwidth(64 << 20) - 52.0).abs() < 0.2);
        assert_eq!(
            (blocks(0, 0, 0), blocks(1 << 20, 32 << 10, 16), blocks(64 << 10, 32 << 10, 16)),
            (1, 16, 2)
        );
    }
}
