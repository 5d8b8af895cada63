//! The memory of one end in a replay, and what lies in it: bytes that follow from the connection and the place.

use pushgate_net_caller::memory::Buffer;
use pushgate_net_caller::table::Ptr;

/// Bytes at each end of a message that are looked at where not all are.
const LOOKED_AT: usize = 64;

/// An end's memory.
pub struct Memory {
    buffer: Buffer,
    seed: u64,
}

/// The word at a place (splitmix64's finish).
fn word(seed: u64, index: usize) -> [u8; 8] {
    let z = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ z >> 31).to_ne_bytes()
}

impl Memory {
    /// Memory of an end of connection `connection`; with `filled` it holds what is sent.
    pub fn new(bytes: usize, connection: usize, filled: bool) -> Memory {
        let memory = Memory { buffer: Buffer::new(bytes), seed: connection as u64 + 1 };
        if filled {
            for index in 0..bytes / 8 {
                let word = word(memory.seed, index);
                // SAFETY: within the buffer, which nothing else uses yet.
                unsafe { memory.buffer.at(index * 8).cast::<[u8; 8]>().write(word) };
            }
        }
        memory
    }

    pub fn at(&self, offset: usize) -> Ptr {
        self.buffer.at(offset)
    }

    /// The stretches of a message that are looked at.
    fn looked_at(size: usize, all: bool) -> [std::ops::Range<usize>; 2] {
        match all || size <= 2 * LOOKED_AT {
            true => [0..size, size..size],
            false => [0..LOOKED_AT, size - LOOKED_AT..size],
        }
    }

    /// Makes what [`Memory::differs`] looks at different from any message. Nothing may be under way into the buffer.
    pub fn spoil(&self, offset: usize, size: usize) {
        for range in Memory::looked_at(size, false) {
            self.buffer.set(offset + range.start, range.len(), 0);
        }
    }

    /// The first byte of the message at `offset` that is not what the sending end has at `from`. Nothing may be under way into the
    /// buffer.
    pub fn differs(&self, offset: usize, size: usize, from: usize, all: bool) -> Option<usize> {
        Memory::looked_at(size, all).into_iter().flatten().find(|at| {
            // SAFETY: within the buffer, which nothing writes now.
            let found = unsafe { self.buffer.at(offset + at).cast::<u8>().read() };
            found != word(self.seed, (from + at) / 8)[(from + at) % 8]
        })
    }
}
