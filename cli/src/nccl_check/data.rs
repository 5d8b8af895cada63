//! What ranks send, and what must arrive: random whole numbers by a seed, as floats, that the host computes.
//!
//! A rank's input repeats a table of a prime number of elements, so that a message that lands in the wrong place is
//! noticed: no slice is a multiple of it. Numbers are small and whole, so sums are exact in any order, and every element
//! is compared to the bit. Each call begins at another element of the table, so that what an earlier call left in the
//! output is wrong.

use anyhow::Result;
use pushgate::DeviceBuffer;
use pushgate::zerocopy::IntoBytes as _;

use super::collective::{Collective, ELEMENT, ROOT, Shape};

/// Elements of a table, a prime.
const PERIOD: usize = 262_147;
/// Elements between the beginnings of two calls: 512 bytes, so that addresses stay as aligned as an allocation's.
const STEP: usize = 128;
/// Different beginnings.
const BEGINNINGS: usize = 2048;
/// Bytes of the input beyond the largest message.
pub const SLACK: u64 = (STEP * BEGINNINGS) as u64 * ELEMENT;

/// The element of the table at which call number `call` begins.
pub fn beginning(call: usize) -> usize {
    call % BEGINNINGS * STEP
}

/// The tables of all ranks, as bits of floats, and of their sum.
pub struct Data {
    tables: Vec<Vec<u32>>,
    sum: Vec<u32>,
}

/// SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): every bit
/// depends on every bit.
fn hash(seed: u64, rank: u32, index: usize) -> u64 {
    let mut z = seed ^ u64::from(rank) << 48 ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Data {
    pub fn new(seed: u64, ranks: u32) -> Self {
        // 16 bits each: the sum of 256 ranks is exact in a float's 24.
        let number = |rank, index| (hash(seed, rank, index) >> 48) as f32 - 32768.0;
        let numbers: Vec<Vec<f32>> =
            (0..ranks).map(|rank| (0..PERIOD).map(|index| number(rank, index)).collect()).collect();
        let sum = (0..PERIOD).map(|index| numbers.iter().map(|table| table[index]).sum::<f32>().to_bits());
        let sum = sum.collect();
        let bits = |table: Vec<f32>| table.into_iter().map(f32::to_bits).collect();
        Self { sum, tables: numbers.into_iter().map(bits).collect() }
    }

    /// Fills a rank's input with its table, again and again.
    pub fn fill(&self, input: &DeviceBuffer, rank: u32) -> Result<()> {
        // Several tables in a copy, whole ones, so that each copy is the same bytes.
        let chunk = self.tables[rank as usize].repeat((8 << 20) / PERIOD);
        let chunk = chunk.as_bytes();
        let mut at = 0;
        while at < input.len() {
            let length = chunk.len().min(input.len() - at);
            input.copy_from_host_at(at, &chunk[..length])?;
            at += length;
        }
        Ok(())
    }

    /// How many elements of a rank's output are wrong, where the call began at element `from` of the tables.
    pub fn wrong(&self, c: Collective, shape: Shape, rank: u32, from: usize, output: &[u32]) -> u64 {
        let (ranks, count) = (self.tables.len(), shape.count as usize);
        let table = |of: usize| &self.tables[of];
        let me = rank as usize;
        match c {
            Collective::AllReduce => differ(output, &self.sum, from),
            Collective::ReduceScatter => differ(output, &self.sum, from + me * count),
            Collective::Broadcast => differ(output, table(ROOT as usize), from),
            Collective::SendRecv => differ(output, table((me + ranks - 1) % ranks), from),
            Collective::AllGather => {
                output.chunks(count).enumerate().map(|(of, part)| differ(part, table(of), from)).sum()
            }
            Collective::AllToAll => {
                let parts = output.chunks(count).enumerate();
                parts.map(|(of, part)| differ(part, table(of), from + me * count)).sum()
            }
        }
    }
}

/// Elements that are not those of the table from `from` on, which goes round.
fn differ(output: &[u32], table: &[u32], from: usize) -> u64 {
    let (mut wrong, mut at, mut rest) = (0, from % table.len(), output);
    while !rest.is_empty() {
        let length = rest.len().min(table.len() - at);
        let (part, after) = rest.split_at(length);
        let expected = &table[at..at + length];
        if part != expected {
            wrong += part.iter().zip(expected).filter(|(a, b)| a != b).count() as u64;
        }
        (rest, at) = (after, 0);
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a collective right by definition writes at a rank.
    fn output(data: &Data, c: Collective, shape: Shape, rank: u32, from: usize) -> Vec<u32> {
        let ranks = data.tables.len();
        let (me, count) = (rank as usize, shape.count as usize);
        let input = |of: usize, at: usize| f32::from_bits(data.tables[of][(from + at) % PERIOD]);
        let sum = |at: usize| (0..ranks).rev().map(|of| input(of, at)).sum::<f32>();
        let total = (shape.received / ELEMENT) as usize;
        let element = |i: usize| match c {
            Collective::AllReduce => sum(i),
            Collective::ReduceScatter => sum(me * count + i),
            Collective::Broadcast => input(0, i),
            Collective::SendRecv => input((me + ranks - 1) % ranks, i),
            Collective::AllGather => input(i / count, i % count),
            Collective::AllToAll => input(i / count, me * count + i % count),
        };
        (0..total).map(|i| element(i).to_bits()).collect()
    }

    #[test]
    fn what_every_collective_should_give_is_right_and_each_wrong_element_is_counted() {
        let data = Data::new(7, 3);
        for c in Collective::ALL {
            // Beyond the table's end, and a size that is not divided evenly.
            for size in [4, 1000, 4 * PERIOD as u64 + 1236] {
                let shape = c.shape(size, 3);
                for rank in 0..3 {
                    let from = beginning(BEGINNINGS - 1 + rank as usize);
                    let mut got = output(&data, c, shape, rank, from);
                    assert_eq!(data.wrong(c, shape, rank, from, &got), 0, "{c:?} {size} {rank}");
                    // What an earlier call left, shifted as the next call is.
                    let stale = data.wrong(c, shape, rank, beginning(5), &got);
                    assert!(stale * 2 > got.len() as u64, "{c:?} {size}: {stale} of {}", got.len());
                    let last = got.len() - 1;
                    got[0] ^= 1;
                    got[last] ^= 1 << 31;
                    assert_eq!(data.wrong(c, shape, rank, from, &got), if last == 0 { 1 } else { 2 });
                }
            }
        }
    }

    #[test]
    fn ranks_and_seeds_have_numbers_of_their_own_and_sums_are_exact() {
        let (a, b) = (Data::new(1, 2), Data::new(2, 2));
        assert!(a.tables[0] != a.tables[1] && a.tables[0] != b.tables[0]);
        assert_eq!(Data::new(1, 2).tables, a.tables);
        let most = a.tables.iter().flatten().map(|bits| f32::from_bits(*bits).abs()).fold(0.0, f32::max);
        assert!(most <= 32768.0, "256 ranks' sum fits into 24 bits");
        assert!(a.tables.iter().flatten().all(|bits| f32::from_bits(*bits).fract() == 0.0));
    }
}
