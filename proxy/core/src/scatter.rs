//! Spreads what a peer or a program chooses over a table, or over the priorities of a tree.
//!
//! The multiplier is another one for each table, and nobody outside of the process knows it: a peer that chooses tags or
//! addresses can't choose them so that they meet in one place of the table.

/// A multiplier of one table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scatter(u64);

impl Scatter {
    /// Another multiplier. The simulator always has the same one.
    pub(crate) fn new() -> Self {
        Scatter(multiplier() | 1)
    }

    /// Of `key` the highest `bits` bits of the product: multiply-shift, which is universal for keys of 32 bits.
    #[inline]
    pub(crate) fn of(self, key: u32, bits: u32) -> usize {
        (u64::from(key).wrapping_mul(self.0) >> (64 - bits)) as usize
    }

    /// As good as a random number for each `n`.
    #[inline]
    pub(crate) fn priority(self, n: u32) -> u32 {
        let mut bits = u64::from(n) ^ self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ bits >> 31) as u32
    }
}

#[cfg(not(feature = "sim"))]
fn multiplier() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    #[expect(
        clippy::disallowed_types,
        reason = "the multiplier decides how long a search takes, and never what it finds"
    )]
    std::hash::RandomState::new().build_hasher().finish()
}

#[cfg(feature = "sim")]
fn multiplier() -> u64 {
    0x9e37_79b9_7f4a_7c15
}
