//! The session segment: what an engine keeps of a queue pair in memory that outlives the engine's process, so that a later
//! engine goes on where the engine died.
//!
//! The program holds the segment and hands it to an engine. One engine at a time writes it; the next engine reads it once,
//! and takes what it finds for the word of a stranger: all counts are checked (P8).
//!
//! | word | |
//! | --- | --- |
//! | 0 | a fixed word |
//! | 1 | the last epoch that the engine may have named to the peer |
//! | 8, 16 | lines of the sender: generation, then slots, units, messages, SENDs and completions given back |
//! | 24, 32 | lines of the receiver: generation, then messages in their places, receive records, the last signal's index plus one, its value |
//!
//! Of two lines the one with the greater generation counts. They are written in turn, the generation last, so an engine that
//! dies between two stores leaves the line before it whole.
//!
//! **Order.** A line is written behind what it counts and before anybody is told: completions, line, CREDIT; data, line,
//! signal; receive record, line, the count that the peer reads. JOURNAL: the fence before a line's words orders what this
//! thread stored before (that includes the generation of the line before) before them, the release store of the generation
//! orders the words before it, and the program and the peer are told by release stores. A process that was killed has made the
//! stores that became visible, and no other.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use pushgate_core::journal::{Broken, Sent, Taken};
use pushgate_driver_shim::abi;

use crate::crash::may_crash;
use crate::memory::{Mapped, Words};

/// Bytes of a session segment.
pub const SESSION_BYTES: usize = abi::PUSHGATE_PAGE as usize;

/// Says which words these are: "pgsess" and a version.
const MAGIC: u64 = 0x7067_7365_7373_0001;
const EPOCH: usize = 1;
const SENDER: [usize; 2] = [8, 16];
const RECEIVER: [usize; 2] = [24, 32];
const WORDS: usize = 40;
/// Words of a line behind its generation.
const LINE: usize = 5;

/// The session segment as the engine that owns the queue pair writes it.
pub(crate) struct Journal {
    words: Words,
    /// Generations of the lines written last.
    sender: u64,
    receiver: u64,
    taken: Taken,
}

/// What a session segment says, checked as far as can be without the queue pair.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) epoch: u32,
    pub(crate) sent: Sent,
    pub(crate) taken: Taken,
}

impl Journal {
    /// The journal of a queue pair that begins, over zeroed memory.
    ///
    /// # Panics
    /// If the memory is smaller than [`SESSION_BYTES`].
    pub(crate) fn new(memory: impl Into<Mapped>, epoch: u32) -> Self {
        let words = Words::writable(memory, 0, WORDS);
        let journal = Journal { words, sender: 0, receiver: 0, taken: Taken::default() };
        journal.epoch(epoch);
        journal.words[0].store(MAGIC, Ordering::Release);
        journal
    }

    /// The journal of a queue pair whose engine died, and what it says.
    ///
    /// # Panics
    /// If the memory is smaller than [`SESSION_BYTES`].
    pub(crate) fn resumed(memory: impl Into<Mapped>, signals: u32) -> Result<(Self, Kept), Broken> {
        let words = Words::writable(memory, 0, WORDS);
        let magic = words[0].load(Ordering::Acquire);
        if magic != MAGIC {
            return Err(Broken(format!("the segment begins with {magic:#x}, expected {MAGIC:#x}")));
        }
        let epoch = words[EPOCH].load(Ordering::Relaxed);
        let epoch = u32::try_from(epoch).map_err(|_| Broken(format!("epoch {epoch}")))?;
        let (sender, [slots, units, messages, sends, completions]) = latest(&words, SENDER);
        let (receiver, [received, shown, signal, value, _]) = latest(&words, RECEIVER);
        let sent = Sent { slots, units, messages, sends, completions };
        let signal = match signal.checked_sub(1).map(u32::try_from) {
            None => None,
            Some(Ok(index)) => Some((index, value)),
            Some(Err(_)) => return Err(Broken(format!("signal {signal}"))),
        };
        let taken = Taken { received, shown, signal };
        sent.check()?;
        taken.check(signals)?;
        // They go on from there, and never overflow.
        if sender.max(receiver) > u64::MAX / 2 {
            return Err(Broken(format!("generations {sender} and {receiver}")));
        }
        Ok((Journal { words, sender, receiver, taken }, Kept { epoch, sent, taken }))
    }

    /// Keeps the epoch, before the peer hears of it.
    pub(crate) fn epoch(&self, epoch: u32) {
        self.words[EPOCH].store(epoch as u64, Ordering::Release);
        may_crash();
    }

    /// Keeps what was given back to the producer, before CREDIT says so.
    #[inline]
    pub(crate) fn sent(&mut self, sent: &Sent) {
        self.sender += 1;
        let line = [sent.slots, sent.units, sent.messages, sent.sends, sent.completions];
        write(&self.words, SENDER, self.sender, &line);
    }

    /// Keeps how many messages are in their places, and how many receive records are written, before the peer is told.
    #[inline]
    pub(crate) fn taken(&mut self, received: u64, shown: u64) {
        if (self.taken.received, self.taken.shown) != (received, shown) {
            self.write_taken(Taken { received, shown, ..self.taken });
        }
    }

    /// Keeps a signal that is about to be written, with the count that includes its message. The data that the signal
    /// announces is there: a later engine writes the signal again, and never the data.
    #[inline]
    pub(crate) fn signal(&mut self, received: u64, shown: u64, index: u32, value: u64) {
        self.write_taken(Taken { received, shown, signal: Some((index, value)) });
    }

    #[inline]
    fn write_taken(&mut self, taken: Taken) {
        self.taken = taken;
        self.receiver += 1;
        let (signal, value) = taken.signal.map_or((0, 0), |(index, value)| (index as u64 + 1, value));
        write(&self.words, RECEIVER, self.receiver, &[taken.received, taken.shown, signal, value, 0]);
    }
}

/// Writes a line of this generation. JOURNAL: see the module.
#[inline(always)]
fn write(words: &[AtomicU64], lines: [usize; 2], generation: u64, line: &[u64; LINE]) {
    let first = lines[generation as usize & 1];
    fence(Ordering::Release);
    for (word, value) in words[first + 1..][..LINE].iter().zip(line) {
        word.store(*value, Ordering::Relaxed);
        may_crash();
    }
    words[first].store(generation, Ordering::Release);
    may_crash();
}

/// The line with the greater generation: the generation and the words.
fn latest(words: &[AtomicU64], lines: [usize; 2]) -> (u64, [u64; LINE]) {
    let [a, b] = lines.map(|first| words[first].load(Ordering::Acquire));
    // Where none was finished yet, the second one may be half written.
    let (generation, first) = if b > a { (b, lines[1]) } else { (a, lines[0]) };
    (generation, std::array::from_fn(|i| words[first + 1 + i].load(Ordering::Relaxed)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crash;

    fn sent(n: u64) -> Sent {
        Sent { slots: 5 * n, units: 7 * n, messages: 4 * n, sends: 3 * n, completions: 2 * n }
    }

    #[test]
    fn p6_a_journal_that_is_cut_off_at_any_store_says_what_its_last_whole_line_said() {
        for at in 0u64.. {
            let memory = Mapped::heap(SESSION_BYTES);
            let mut journal = Journal::new(&memory, 3);
            let mut done = (0, 0);
            let crashed = crash::within(&mut { at }, || {
                for n in 1..4 {
                    journal.sent(&sent(n));
                    done.0 = n;
                    journal.taken(2 * n, n);
                    journal.signal(2 * n + 1, n, n as u32, 10 * n);
                    done.1 = n;
                }
            });
            let (next, kept) = Journal::resumed(&memory, 4).unwrap();
            assert_eq!(kept.epoch, 3);
            assert!(kept.sent == sent(done.0) || crashed && kept.sent == sent(done.0 + 1), "{at}: {kept:?}");
            let n = done.1;
            let of = |received, signal| Taken { received, shown: received / 2, signal };
            let signal = |n: u64| (n > 0).then_some((n as u32, 10 * n));
            let before = of(if n > 0 { 2 * n + 1 } else { 0 }, signal(n));
            let after = [of(2 * n + 2, signal(n)), of(2 * n + 3, signal(n + 1))];
            assert!(kept.taken == before || crashed && after.contains(&kept.taken), "{at}: {kept:?}");
            assert!(next.sender >= done.0 && next.receiver >= 2 * done.1);
            if !crashed {
                break;
            }
        }
    }

    #[test]
    fn p8_a_segment_that_no_engine_wrote_is_refused() {
        let broken = |at: usize, value: u64| {
            let memory = Mapped::heap(SESSION_BYTES);
            let mut journal = Journal::new(&memory, 0);
            journal.sent(&sent(1));
            journal.taken(2, 1);
            let words = Words::writable(&memory, 0, WORDS);
            words[at].store(value, Ordering::Relaxed);
            Journal::resumed(&memory, 4).is_err()
        };
        assert!(!broken(WORDS - 1, 1), "nothing lies there");
        let line = SENDER[1];
        assert!(broken(0, 0) && broken(EPOCH, 1 << 32) && broken(line, u64::MAX) && broken(line + 3, 99));
        let line = RECEIVER[1];
        assert!(
            broken(line + 1, 0) && broken(line + 2, 9) && broken(line + 3, 5) && broken(line + 3, 1 << 40)
        );
    }
}
