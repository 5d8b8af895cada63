//! Adding to signals in GPU memory, which the CPU can't write.
//!
//! The value is read by a copy, and the sum is stored after all copies that were begun before. What is added while the
//! value is being read joins that store. Of a memory that nobody else writes to, the value is remembered, so that the next
//! addition is a store alone.

use std::collections::{HashMap, VecDeque};

use pushgate_gpu_kernels::OrderedCopies;

/// What is known of a signal.
#[derive(Debug)]
enum Word {
    /// Its value is being copied to a word of the queue; `sum` is to be added.
    Read { sum: u64, kept: bool },
    /// Nobody else writes to it.
    Known(u64),
}

/// A value that is being read.
struct Reading {
    address: u64,
    /// The word of the queue that the value is copied to.
    place: usize,
    /// The mark after the copy.
    mark: u64,
}

/// The signals of a coll comm in its GPU's memory.
pub struct Signals {
    words: HashMap<u64, Word>,
    reading: VecDeque<Reading>,
    /// Signals that are to be read, for lack of a free word.
    waiting: VecDeque<u64>,
    free: Vec<usize>,
}

impl Signals {
    /// No signal is known.
    pub fn new() -> Self {
        let free = (0..OrderedCopies::WORDS).collect();
        Signals { words: HashMap::new(), reading: VecDeque::new(), waiting: VecDeque::new(), free }
    }

    /// Adds `value` to the signal at `address`, after all copies that `copies` has. `kept`: nobody else writes to it.
    ///
    /// # Safety
    /// `address` is 8-byte aligned memory of the queue's device, which stays until [`Signals::forget`].
    pub unsafe fn add(
        &mut self,
        copies: &mut OrderedCopies,
        address: u64,
        value: u64,
        kept: bool,
    ) -> pushgate_gpu_kernels::Result<()> {
        match self.words.get_mut(&address) {
            Some(Word::Read { sum, .. }) => *sum = sum.wrapping_add(value),
            Some(Word::Known(known)) => {
                *known = known.wrapping_add(value);
                // SAFETY: the caller's promise.
                unsafe { copies.store(address, *known)? };
            }
            None => {
                self.words.insert(address, Word::Read { sum: value, kept });
                self.waiting.push_back(address);
            }
        }
        self.advance(copies)
    }

    /// Goes as far as the copies are.
    pub fn advance(&mut self, copies: &mut OrderedCopies) -> pushgate_gpu_kernels::Result<()> {
        while self.free.last().is_some()
            && let Some(address) = self.waiting.pop_front()
        {
            let place = self.free.pop().expect("there is one");
            // SAFETY: the promise of `add`; the word is the queue's own.
            unsafe { copies.copy_out(copies.word_address(place), address, 8)? };
            self.reading.push_back(Reading { address, place, mark: copies.next() });
        }
        while let Some(&Reading { address, place, mark }) = self.reading.front()
            && mark <= copies.passed()
        {
            self.reading.pop_front();
            self.free.push(place);
            let Some(Word::Read { sum, kept }) = self.words.remove(&address) else { continue };
            let value = copies.word(place).wrapping_add(sum);
            // SAFETY: the promise of `add`.
            unsafe { copies.store(address, value)? };
            if kept {
                self.words.insert(address, Word::Known(value));
            }
        }
        Ok(())
    }

    /// Whether some addition is not yet in the queue.
    pub fn is_busy(&self) -> bool {
        !self.reading.is_empty() || !self.waiting.is_empty()
    }

    /// Whether the sum of a signal in `bytes` bytes at `address` is not yet in the queue.
    pub fn are_open_in(&self, address: u64, bytes: u64) -> bool {
        let inside = |at: &u64| *at < address.saturating_add(bytes) && address < at.saturating_add(8);
        self.is_busy()
            && (self.waiting.iter().any(inside)
                || self.reading.iter().any(|reading| inside(&reading.address)))
    }

    /// Forgets the signals in `bytes` bytes at `address`, which are deregistered. None of them is being read.
    pub fn forget(&mut self, address: u64, bytes: u64) {
        self.words.retain(|at, _| !(address..address + bytes).contains(at));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use pushgate_driver_shim::memory::SharedMemory;
    use pushgate_gpu_kernels::{DeviceChoice, Executor, choose_at};

    use super::*;

    fn queue() -> OrderedCopies {
        let (executor, _): (Arc<dyn Executor>, _) = choose_at(DeviceChoice::Cpu, 0).unwrap();
        let memory = SharedMemory::builder("test", OrderedCopies::BYTES).create().unwrap();
        OrderedCopies::new(&executor, memory).unwrap()
    }

    /// Turns, as the coll comm takes them, until every addition is in memory.
    fn settle(signals: &mut Signals, copies: &mut OrderedCopies) {
        while signals.is_busy() || !copies.is_done() {
            copies.mark_what_is_open().unwrap();
            copies.look().unwrap();
            signals.advance(copies).unwrap();
        }
    }

    #[test]
    fn what_the_owner_writes_counts_only_where_the_signal_is_not_kept() {
        let mut copies = queue();
        for (kept, sum) in [(true, 12), (false, 107)] {
            let mut signals = Signals::new();
            let word = AtomicU64::new(0);
            // SAFETY: the word outlives the queue's work; on the CPU executor it is device memory.
            let mut add = |value| unsafe {
                signals.add(&mut copies, word.as_ptr() as u64, value, kept).unwrap();
                settle(&mut signals, &mut copies);
            };
            add(5);
            assert_eq!(word.load(Ordering::Acquire), 5);
            word.store(100, Ordering::Relaxed);
            add(7);
            assert_eq!(word.load(Ordering::Acquire), sum, "kept: {kept}");
        }
    }

    #[test]
    fn more_signals_than_words_are_all_added_to() {
        let (mut copies, mut signals) = (queue(), Signals::new());
        let words: Vec<_> = (0..2 * OrderedCopies::WORDS as u64).map(AtomicU64::new).collect();
        for round in 1..=2 {
            for word in &words {
                // SAFETY: as above.
                unsafe { signals.add(&mut copies, word.as_ptr() as u64, u64::MAX, round == 1).unwrap() };
            }
            settle(&mut signals, &mut copies);
            for (i, word) in (0u64..).zip(&words) {
                assert_eq!(word.load(Ordering::Acquire), i.wrapping_sub(round));
            }
        }
        let (address, bytes) = (words[0].as_ptr() as u64, 8 * words.len() as u64);
        signals.forget(address, bytes);
        assert!(signals.words.is_empty());
    }
}
