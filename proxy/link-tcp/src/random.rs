//! Numbers that look random and follow from a seed alone.

/// A stream of numbers (splitmix64). Streams of one seed are independent of each other, so a decision more in one part of a
/// run changes no decision in another part.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// Spreads all bits of `x` over the result.
pub const fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

impl Random {
    /// Stream number `stream` of `seed`.
    pub fn new(seed: u64, stream: u64) -> Self {
        Random(mix(
            mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ mix(stream.wrapping_mul(0xd134_2543_de82_ef95))
        ))
    }

    /// The next number.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "the numbers are no sequence with an end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `n`; 0 if `n` is 0.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        ((self.next() as u128 * n as u128) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    #[inline]
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True once in `n` times on average.
    #[inline]
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// True in `share` of 100 cases on average.
    #[inline]
    pub fn percent(&mut self, share: u64) -> bool {
        self.below(100) < share
    }

    /// One of `all`.
    #[inline]
    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    /// How long something takes that usually takes about `usual` nanoseconds: now and then much longer.
    #[inline]
    pub fn time(&mut self, usual: u64) -> u64 {
        let time = usual / 2 + self.below(usual + 1);
        match self.below(512) {
            0 => time * 200,
            1..8 => time * 12,
            _ => time,
        }
    }
}
