//! The bytes that validation sends, and the look at what arrived.

use std::fmt;

/// Bytes behind each message, none of which may change.
pub const GUARD: u64 = 64;
const GUARD_BYTE: u8 = 0x5a;

/// Where the messages of one window lie, at both ends alike.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Bytes of a message.
    pub bytes: u64,
    /// Message m has place m % places.
    pub places: u32,
}

impl Layout {
    /// Bytes from one place to the next: whole units of the window, and the guard.
    pub fn stride(&self) -> u64 {
        self.bytes.next_multiple_of(64) + GUARD
    }

    /// Bytes of all places.
    pub fn len(&self) -> u64 {
        self.stride() * self.places as u64
    }
}

/// What one rank sends in one pass. Each byte differs from that of the pass before, so
/// that what was there is not taken for what should have come.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    pub rank: u32,
    pub pass: u8,
}

/// What is wrong with what arrived.
#[derive(Debug, PartialEq, Eq)]
pub struct Wrong {
    pub bytes: u64,
    /// The place of the first wrong byte; then its offset there, what it is and what it should be.
    pub place: u64,
    pub offset: u64,
    pub is: u8,
    pub expected: u8,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wrong { bytes, place, offset, is, expected } = self;
        write!(
            f,
            "{bytes} wrong bytes, the first at offset {offset} of message {place}: {is:#04x} in place of {expected:#04x}"
        )
    }
}

impl Pattern {
    /// Eight bytes from offset `8 * word` of a message on (splitmix64's finalizer).
    fn word(&self, place: u64, word: u64) -> [u8; 8] {
        let mut z = ((self.rank as u64) << 60 | place << 40 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).to_le_bytes().map(|b| b.wrapping_add(self.pass))
    }

    /// Fills memory with the messages of a window, for their sender.
    pub fn fill(&self, layout: Layout, memory: &mut [u8]) {
        for (place, memory) in memory.chunks_exact_mut(layout.stride() as usize).enumerate() {
            let message = &mut memory[..layout.bytes as usize];
            for (word, to) in message.chunks_mut(8).enumerate() {
                to.copy_from_slice(&self.word(place as u64, word as u64)[..to.len()]);
            }
        }
    }

    /// Fills the receiver's memory before the messages come: no byte is right, and each place ends with guard bytes.
    pub fn clear(&self, layout: Layout, memory: &mut [u8]) {
        self.fill(layout, memory);
        for memory in memory.chunks_exact_mut(layout.stride() as usize) {
            let (message, guard) = memory.split_at_mut(layout.bytes as usize);
            message.iter_mut().for_each(|b| *b = !*b);
            guard.fill(GUARD_BYTE);
        }
    }

    /// Checks every byte of every place, and its guard bytes.
    pub fn check(&self, layout: Layout, memory: &[u8]) -> Result<(), Wrong> {
        let mut wrong: Option<Wrong> = None;
        let mut seen = |place: usize, offset: usize, is: u8, expected: u8| {
            let first = Wrong { bytes: 0, place: place as u64, offset: offset as u64, is, expected };
            wrong.get_or_insert(first).bytes += 1;
        };
        for (place, memory) in memory.chunks_exact(layout.stride() as usize).enumerate() {
            let (message, guard) = memory.split_at(layout.bytes as usize);
            for (word, is) in message.chunks(8).enumerate() {
                let expected = &self.word(place as u64, word as u64)[..is.len()];
                if is != expected {
                    for (i, (is, expected)) in
                        is.iter().zip(expected).enumerate().filter(|(_, (a, b))| a != b)
                    {
                        seen(place, 8 * word + i, *is, *expected);
                    }
                }
            }
            for (i, is) in guard.iter().enumerate().filter(|(_, b)| **b != GUARD_BYTE) {
                seen(place, message.len() + i, *is, GUARD_BYTE);
            }
        }
        wrong.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: Pattern = Pattern { rank: 1, pass: 3 };

    /// As it arrives when nothing goes wrong.
    fn arrived(layout: Layout) -> Vec<u8> {
        let mut memory = vec![0; layout.len() as usize];
        SENT.clear(layout, &mut memory);
        let mut sent = memory.clone();
        SENT.fill(layout, &mut sent);
        for (to, from) in
            memory.chunks_exact_mut(layout.stride() as usize).zip(sent.chunks_exact(layout.stride() as usize))
        {
            to[..layout.bytes as usize].copy_from_slice(&from[..layout.bytes as usize]);
        }
        memory
    }

    #[test]
    fn what_was_sent_is_right_and_every_single_wrong_byte_is_found() {
        for bytes in [0, 1, 7, 8, 63, 64, 65, 200] {
            let layout = Layout { bytes, places: 3 };
            let good = arrived(layout);
            assert_eq!(SENT.check(layout, &good), Ok(()));
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 0x80;
                let wrong = SENT.check(layout, &bad).unwrap_err();
                let place = at as u64 / layout.stride();
                assert_eq!((wrong.bytes, wrong.place, wrong.offset), (1, place, at as u64 % layout.stride()));
                assert_eq!((wrong.is, wrong.expected), (bad[at], good[at]));
            }
        }
    }

    #[test]
    fn what_was_there_before_is_wrong_in_every_byte() {
        let layout = Layout { bytes: 100, places: 2 };
        let mut memory = vec![0; layout.len() as usize];
        SENT.clear(layout, &mut memory);
        assert_eq!(SENT.check(layout, &memory).unwrap_err().bytes, 200);
        for other in [Pattern { pass: 2, ..SENT }, Pattern { pass: 4, ..SENT }] {
            assert_eq!(other.check(layout, &arrived(layout)).unwrap_err().bytes, 200);
        }
    }

    #[test]
    fn messages_that_changed_places_are_wrong() {
        let layout = Layout { bytes: 64, places: 2 };
        let mut memory = arrived(layout);
        let (a, b) = memory.split_at_mut(layout.stride() as usize);
        a.swap_with_slice(b);
        let wrong = SENT.check(layout, &memory).unwrap_err();
        assert!(wrong.bytes > 100, "{wrong}");
        assert_eq!((wrong.place, wrong.offset), (0, 0));
    }
}
