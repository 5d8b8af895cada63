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
//! | 40 and on | where receives name buffers: four words for each slot of their ring: an open receive's number plus one, or 0; its offset; its key and length; its tag |
//!
//! Of two lines the one with the greater generation counts. They are written in turn, the generation last, so an engine that
//! dies between two stores leaves the line before it whole.
//!
//! **Order.** A line is written after what it counts and before anybody is told: completions, line, CREDIT; data, line,
//! signal; receive record, line, the count that the peer reads. JOURNAL: the fence before a line's words orders what this
//! thread stored before (that includes the generation of the line before) before them, the release store of the generation
//! orders the words before it, and the program and the peer are told by release stores. A process that was killed has made the
//! stores that became visible, and no other.
//!
//! **Open receives.** The ring that the program writes has an open receive until the program has given back the receive record of
//! that number, and may post another one there. So a receive that is open when the receive record of its number is about to be written
//! is kept here first, and is cleared after the record that names it. Where messages take receives in the order in which they were posted, that
//! is never the case, and nothing is written.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use pushgate_core::inbound::Posted;
use pushgate_core::journal::{Broken, Sent, Taken};
use pushgate_driver_shim::abi;
use pushgate_link::crash::may_crash;
use pushgate_link::memory::{Mapped, Words};

/// Bytes of a session segment of a queue pair whose receives name no buffers.
pub const SESSION_BYTES: usize = abi::PUSHGATE_PAGE as usize;
/// Bytes of the largest session segment.
pub const MOST_SESSION_BYTES: usize = session_bytes(Some(abi::PUSHGATE_MAX_RX_LOG));

/// Says which words these are: "pgsess" and a version.
const MAGIC: u64 = 0x7067_7365_7373_0001;
const EPOCH: usize = 1;
const SENDER: [usize; 2] = [8, 16];
const RECEIVER: [usize; 2] = [24, 32];
const WORDS: usize = 40;
/// Words of an open receive.
const OPEN: usize = 4;
/// Words of a line behind its generation.
const LINE: usize = 5;

/// Bytes of a queue pair's session segment. `receives`: logarithm to base 2 of the ring of posted receives, if there is one.
pub const fn session_bytes(receives: Option<u32>) -> usize {
    match receives {
        None => SESSION_BYTES,
        Some(log) => (8 * (WORDS + (OPEN << log))).next_multiple_of(SESSION_BYTES),
    }
}

/// The session segment as the engine that owns the queue pair writes it.
pub struct Journal {
    words: Words,
    /// Generations of the lines written last.
    sender: u64,
    receiver: u64,
    taken: Taken,
    open: Open,
}

/// Open receives that are kept.
#[derive(Default)]
struct Open {
    words: Option<Words>,
    /// Slots that are free.
    free: Vec<u32>,
    /// Numbers of the receives that are kept, and their slots.
    kept: Vec<(u64, u32)>,
}

/// What a session segment says, checked as far as can be without the queue pair.
#[derive(Debug, PartialEq, Eq)]
pub struct Kept {
    pub(crate) epoch: u32,
    /// Of the sender.
    pub sent: Sent,
    /// Of the receiver.
    pub taken: Taken,
    pub(crate) open: Vec<Posted>,
}

impl Journal {
    /// The journal of a queue pair that begins, over zeroed memory. `receives`: logarithm to base 2 of the ring of posted
    /// receives, if there is one.
    ///
    /// # Panics
    /// If the memory is smaller than [`session_bytes`].
    pub fn new(memory: impl Into<Mapped>, epoch: u32, receives: Option<u32>) -> Self {
        let memory = memory.into();
        let words = Words::writable(&memory, 0, WORDS);
        let open = Open::new(&memory, receives);
        let journal = Journal { words, sender: 0, receiver: 0, taken: Taken::default(), open };
        journal.epoch(epoch);
        journal.words[0].store(MAGIC, Ordering::Release);
        journal
    }

    /// The journal of a queue pair whose engine died, and what it says.
    ///
    /// # Panics
    /// If the memory is smaller than [`session_bytes`].
    pub fn resumed(
        memory: impl Into<Mapped>,
        signals: u32,
        receives: Option<u32>,
    ) -> Result<(Self, Kept), Broken> {
        let memory = memory.into();
        let words = Words::writable(&memory, 0, WORDS);
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
        let (open, kept) = Open::resumed(&memory, receives);
        Ok((Journal { words, sender, receiver, taken, open }, Kept { epoch, sent, taken, open: kept }))
    }

    /// Keeps an open receive, before the receive record of its number is written.
    #[cold]
    pub(crate) fn keep_open(&mut self, receive: &Posted) {
        self.open.keep(receive);
    }

    /// A receive record names the receive with these low bits of its number, which was kept.
    #[cold]
    pub(crate) fn took(&mut self, number: u32) {
        self.open.clear(|kept| kept as u32 == number);
    }

    /// Receives of this number and later ones need not be kept, because they lie in the program's ring; nor those that are not
    /// among `open`.
    pub(crate) fn keep_only(&mut self, before: u64, open: impl Fn(u64) -> bool) {
        self.open.clear(|kept| kept >= before || !open(kept));
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

impl Open {
    /// Where nothing is kept.
    fn new(memory: &Mapped, receives: Option<u32>) -> Self {
        let Some(log) = receives else { return Open::default() };
        Open {
            words: Some(Words::writable(memory, 8 * WORDS, OPEN << log)),
            free: (0..1 << log).collect(),
            kept: Vec::with_capacity(1 << log),
        }
    }

    /// What an earlier engine has kept. The receives' numbers, keys and lengths are checked where they are used.
    fn resumed(memory: &Mapped, receives: Option<u32>) -> (Self, Vec<Posted>) {
        let (mut open, mut all) = (Open::new(memory, receives), Vec::new());
        let Some(words) = &open.words else { return (open, all) };
        open.free.clear();
        for (slot, words) in (0..).zip(words.chunks_exact(OPEN)) {
            // Acquire: the number was written after the other words.
            let Some(number) = words[0].load(Ordering::Acquire).checked_sub(1) else {
                open.free.push(slot);
                continue;
            };
            let [offset, place, tag] = [1, 2, 3].map(|i: usize| words[i].load(Ordering::Relaxed));
            open.kept.push((number, slot));
            let (key, length) = ((place >> 32) as u32, place as u32);
            all.push(Posted {
                number,
                key,
                offset: offset & abi::PUSHGATE_DATA_MASK,
                length,
                tag: tag as u32,
            });
        }
        (open, all)
    }

    fn keep(&mut self, receive: &Posted) {
        let Some(words) = &self.words else { return };
        // As many are open as the ring has slots, at most.
        let slot = self.free.pop().expect("a slot for each open receive");
        let words = &words[slot as usize * OPEN..][..OPEN];
        let place = (receive.key as u64) << 32 | receive.length as u64;
        // The slot's last number was cleared before its other words change.
        fence(Ordering::Release);
        for (word, value) in words[1..].iter().zip([receive.offset, place, receive.tag as u64]) {
            word.store(value, Ordering::Relaxed);
            may_crash();
        }
        // Release: the words before it. The receive record that follows is published by a release store as well.
        words[0].store(receive.number + 1, Ordering::Release);
        may_crash();
        self.kept.push((receive.number, slot));
    }

    /// Clears those that are named by their numbers.
    fn clear(&mut self, named: impl Fn(u64) -> bool) {
        let (Some(words), free) = (&self.words, &mut self.free) else { return };
        self.kept.retain(|(number, slot)| {
            let stays = !named(*number);
            if !stays {
                // Release: the receive record that names it, before it.
                words[*slot as usize * OPEN].store(0, Ordering::Release);
                may_crash();
                free.push(*slot);
            }
            stays
        });
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
    #[cfg(feature = "sim")]
    use pushgate_link::crash;

    use super::*;

    fn sent(n: u64) -> Sent {
        Sent { slots: 5 * n, units: 7 * n, messages: 4 * n, sends: 3 * n, completions: 2 * n }
    }

    // With `sim`: an engine dies here.
    #[cfg(feature = "sim")]
    #[test]
    fn p6_a_journal_that_is_cut_off_at_any_store_says_what_its_last_whole_line_said() {
        for at in 0u64.. {
            let memory = Mapped::heap(SESSION_BYTES);
            let mut journal = Journal::new(&memory, 3, None);
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
            let (next, kept) = Journal::resumed(&memory, 4, None).unwrap();
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
            let mut journal = Journal::new(&memory, 0, None);
            journal.sent(&sent(1));
            journal.taken(2, 1);
            let words = Words::writable(&memory, 0, WORDS);
            words[at].store(value, Ordering::Relaxed);
            Journal::resumed(&memory, 4, None).is_err()
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
