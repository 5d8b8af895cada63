//! The layout of a recorder's memory, version [`VERSION`]. All fields are words of 64 bits.
//!
//! A page of head, then slots of a page each, one for a queue pair:
//!
//! | word | head |
//! | --- | --- |
//! | 0 | magic, stored last |
//! | 1 | version |
//! | 2 | bytes of the memory |
//! | 3 | slots |
//! | 4 | bytes of a slot; in the high half, entries of a slot |
//! | 5 | the process; in the high half, the program that `pushgate proxy` serves by this engine, or 0 |
//! | 6 | the engine's number in its process |
//! | 7 | which of the engine's memories this is, from 0 |
//! | 8 | the start of the engine's clock, by CLOCK_MONOTONIC, nanoseconds |
//! | 16 | when the engine ran last, nanoseconds of its clock (in memory 0 alone) |
//! | 17 | 1 once the engine has ended; in the high half, its thread (in memory 0 alone) |
//! | 18 | how often the engine has slept (in memory 0 alone) |
//! | 19 | twice the number of queue pairs that have gone, and 1 while one goes (in memory 0 alone) |
//! | 20 | the process that copies for the engine, or 0 (in memory 0 alone) |
//! | 32 | four cells, each a transport's name and the metrics of all of its queue pairs that have gone (in memory 0 alone) |
//!
//! A slot is a cell ([`crate::cell`]) that names the slot's queue pair, and a ring of cells, the entries. An entry is a
//! whole [`View`](super::View) with its time and those of the last moves, so the newest entry is what holds now, and the difference of two entries is
//! what happened between them. Behind the entries is a cell with the queue pair's metrics: the number of the store to the
//! slot's first cell that says whose they are, then the [`Metrics`].

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::metrics::{self, Metrics};
use super::view::{self, Moved, View};
use crate::cell;

/// The name of the memories: `/proc/PID/fd` shows them as `/memfd:pushgate-recorder`.
pub const NAME: &str = "pushgate-recorder";
/// The version of the layout.
pub const VERSION: u64 = 4;
/// The most bytes of one memory.
pub const MOST_BYTES: u64 = (PAGE + MOST_SLOTS * SLOT) as u64;

pub(super) const PAGE: usize = pushgate_driver_shim::abi::PUSHGATE_PAGE as usize;
/// Bytes of a slot.
pub(super) const SLOT: usize = 4096;
pub(super) const SLOT_WORDS: usize = SLOT / 8;
/// The most slots of one memory.
pub(super) const MOST_SLOTS: usize = 1024;
/// Words of a memory's head.
pub(super) const HEAD_WORDS: usize = PAGE / 8;
/// Entries of a slot.
pub(super) const ENTRIES: usize = 20;

/// Where the engine stores that it runs.
pub(super) const BEAT: usize = 16;
pub(super) const STATE: usize = 17;
/// Where the engine stores how often it has slept.
pub(super) const SLEEPS: usize = 18;
/// Where it is counted how many queue pairs have gone.
pub(super) const CLOSINGS: usize = 19;
/// Where the engine stores which process copies for it.
pub(super) const COPIER: usize = 20;
const CLOSED: usize = 32;
/// Transports whose queue pairs that have gone are counted apart.
pub(super) const TRANSPORTS: usize = 4;
/// Words of a cell with metrics, without its mark.
pub(super) const TAGGED: usize = 1 + metrics::WORDS;
const _: () = assert!(CLOSED + TRANSPORTS * (1 + TAGGED) <= HEAD_WORDS);

const MAGIC: u64 = u64::from_le_bytes(*b"PGRECORD");

/// Words of the cell that names a slot's queue pair, without its mark.
pub(super) const ABOUT: usize = 9;
/// Words of an entry without its mark.
const ENTRY: usize = 3 + view::WORDS;
const FIRST_ENTRY: usize = 16;
const METRICS: usize = FIRST_ENTRY + ENTRIES * (1 + ENTRY);
const _: () = assert!(ABOUT < FIRST_ENTRY && METRICS + 1 + TAGGED <= SLOT_WORDS);

/// What the head of a memory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) slots: usize,
    pub(super) pid: u32,
    pub(super) program: Option<u32>,
    pub(super) engine: u64,
    pub(super) part: u64,
    pub(super) started: u64,
}

/// Why a memory was not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The memory is no recorder's, or its head is not written yet.
    #[error("it begins with {0:#018x}, not with {MAGIC:#018x} (\"PGRECORD\")")]
    Magic(u64),
    /// The layout has another version.
    #[error("its layout is version {0}, expected {VERSION}: take `pushgate` of the program's release")]
    Version(u64),
    /// Sizes that do not fit together.
    #[error("its {what} is {found}, expected {expected}")]
    Size {
        /// The field.
        what: &'static str,
        /// What the field says.
        found: u64,
        /// What it should say.
        expected: u64,
    },
}

fn pack(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

impl Head {
    /// Bytes of a memory with `slots` slots.
    pub(super) fn bytes(slots: usize) -> usize {
        PAGE + slots * SLOT
    }

    /// Writes the head of a memory, the magic last.
    pub(super) fn write(&self, words: &[AtomicU64]) {
        let head = [
            VERSION,
            Head::bytes(self.slots) as u64,
            self.slots as u64,
            pack(SLOT as u32, ENTRIES as u32),
            pack(self.pid, self.program.unwrap_or(0)),
            self.engine,
            self.part,
            self.started,
        ];
        for (word, value) in words[1..].iter().zip(head) {
            word.store(value, Ordering::Relaxed);
        }
        // Release: a reader that sees the magic sees the whole head.
        words[0].store(MAGIC, Ordering::Release);
    }

    /// Reads and checks the head of a memory of `bytes`, anybody's (P8). `words` are the first [`HEAD_WORDS`].
    pub(super) fn read(words: &[AtomicU64], bytes: usize) -> Result<Head, ReadError> {
        let magic = words[0].load(Ordering::Relaxed);
        // An acquire that is sound on read-only pages.
        fence(Ordering::Acquire);
        if magic != MAGIC {
            return Err(ReadError::Magic(magic));
        }
        let [version, size, slots, sizes, pids, engine, part, started] =
            std::array::from_fn(|i| words[1 + i].load(Ordering::Relaxed));
        if version != VERSION {
            return Err(ReadError::Version(version));
        }
        let same = |what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(ReadError::Size { what, found, expected }),
        };
        same("size in bytes", size, bytes as u64)?;
        same("slot, in bytes and entries,", sizes, pack(SLOT as u32, ENTRIES as u32))?;
        if slots > MOST_SLOTS as u64 {
            return Err(ReadError::Size {
                what: "number of slots",
                found: slots,
                expected: MOST_SLOTS as u64,
            });
        }
        same("size in bytes", size, Head::bytes(slots as usize) as u64)?;
        Ok(Head {
            slots: slots as usize,
            pid: pids as u32,
            program: Some((pids >> 32) as u32).filter(|pid| *pid != 0),
            engine,
            part,
            started,
        })
    }
}

/// The cell of a slot that names the slot's queue pair.
pub(super) fn about(slot: &[AtomicU64]) -> &[AtomicU64] {
    &slot[..=ABOUT]
}

/// The cell of a slot that has the queue pair's metrics.
pub(super) fn metrics(slot: &[AtomicU64]) -> &[AtomicU64] {
    &slot[METRICS..=METRICS + TAGGED]
}

/// The cell of the head that has the metrics of queue pairs of one transport that have gone.
pub(super) fn closed(head: &[AtomicU64], at: usize) -> &[AtomicU64] {
    &head[CLOSED + at * (1 + TAGGED)..][..=TAGGED]
}

/// Metrics behind the word that says whose they are.
pub(super) fn tagged(tag: u64, metrics: &Metrics) -> [u64; TAGGED] {
    let mut words = [tag; TAGGED];
    words[1..].copy_from_slice(&metrics.words());
    words
}

/// The word that says whose metrics these are, and the metrics.
pub(super) fn untagged(words: &[u64; TAGGED]) -> Option<(u64, Metrics)> {
    Some((words[0], Metrics::of(words[1..].first_chunk()?)))
}

fn entry(slot: &[AtomicU64], at: usize) -> &[AtomicU64] {
    &slot[FIRST_ENTRY + at * (1 + ENTRY)..][..=ENTRY]
}

/// Writes the entry of this number.
pub(super) fn write_entry(slot: &[AtomicU64], number: u64, time: u64, moved: Moved, view: &View) {
    let mut words = [0; ENTRY];
    (words[0], words[1], words[2]) = (time, moved.sends, moved.receives);
    words[3..].copy_from_slice(&view.words());
    cell::store(entry(slot, (number % ENTRIES as u64) as usize), number, &words);
}

/// The entry at a place of the ring: its number, its times and its view. `None` if nothing was written there, a store is
/// under way, or the words are none that an engine writes.
pub(super) fn read_entry(slot: &[AtomicU64], at: usize) -> Option<(u64, u64, Moved, View)> {
    let (number, words) = cell::load::<ENTRY>(entry(slot, at))?;
    if number % ENTRIES as u64 != at as u64 {
        return None;
    }
    let view = View::of(words[3..].first_chunk()?)?;
    Some((number, words[0], Moved { sends: words[1], receives: words[2] }, view))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(bytes: usize) -> Vec<AtomicU64> {
        (0..bytes / 8).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn p8_a_head_with_a_wrong_field_is_refused_by_name() {
        let head = Head { slots: 2, pid: 7, program: None, engine: 1, part: 0, started: 5 };
        let bytes = Head::bytes(2);
        let memory = words(bytes);
        assert_eq!(Head::read(&memory, bytes), Err(ReadError::Magic(0)));
        head.write(&memory);
        assert_eq!(Head::read(&memory, bytes), Ok(head));
        for (word, value, says) in [
            (0, 1, "it begins with 0x0000000000000001"),
            (1, 1, "its layout is version 1, expected 4"),
            (2, 1 << 60, "its size in bytes is 1152921504606846976, expected 12288"),
            (3, u64::MAX, "its number of slots is 18446744073709551615, expected 1024"),
            (3, 3, "its size in bytes is 12288, expected 16384"),
            (4, 4096, "its slot, in bytes and entries,"),
        ] {
            let right = memory[word].swap(value, Ordering::Relaxed);
            let why = Head::read(&memory, bytes).unwrap_err().to_string();
            assert!(why.starts_with(says), "{why}");
            memory[word].store(right, Ordering::Relaxed);
        }
    }

    /// What the words of the layout mean: names, each with the number of the word that a reader takes it from.
    fn described() -> String {
        use super::super::about::About;
        use super::super::view::{Missing, Phase};
        let json = |value: serde_json::Value| value.to_string().replace('"', "");
        let mut view: [u64; view::WORDS] = std::array::from_fn(|i| i as u64);
        let [.., flags, status, errors] = &mut view;
        *flags = 1 | 2 << 8 | 3 << 16 | 4 << 32 | 1 << 40;
        (*status, *errors) = (0, 1 | 2 << 16 | 3 << 32 | 4 << 48);
        let about = [1, 2 | 3 << 32, 4 | 5 << 32, 6 | 7 << 8 | 8 << 16, 9, 10, 11, 12, 13];
        [
            format!("head {BEAT} {STATE} {SLEEPS} {CLOSINGS} {COPIER} {CLOSED} {TRANSPORTS}"),
            format!("slot {SLOT} {ENTRIES} {ABOUT} {FIRST_ENTRY} {ENTRY} {METRICS} {TAGGED}"),
            format!("phases {:?}", Phase::ALL),
            format!("missing {:?} causes {:?}", Missing::ALL, Missing::CAUSES),
            format!("bounds {:?}", metrics::Times::BOUNDS),
            json(serde_json::to_value(About::of(&about).unwrap().0).unwrap()),
            json(serde_json::to_value(View::of(&view).unwrap()).unwrap()),
            json(serde_json::to_value(Metrics::of(&std::array::from_fn(|i| i as u64))).unwrap()),
        ]
        .join("\n")
    }

    /// A reader of another release tells by the version alone whether the words mean what they mean here. Where this text
    /// differs, change `VERSION` and the text.
    #[test]
    fn words_that_change_their_meaning_have_another_version() {
        let expected = concat!(
            "head 16 17 18 19 20 32 4\n",
            "slot 4096 20 9 16 20 436 68\n",
            "phases [Live, Fencing, Offered, Joining, Ending, Ended]\n",
            "missing [Nothing, SendQueue, CompletionQueue, Receive, Bytes, PostedReceive, Region] causes [SendQue",
            "ue, CompletionQueue, Receive, Bytes, PostedReceive, Region]\n",
            "bounds [1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000, 2000000, 5000000, 10",
            "000000, 100000000, 1000000000, 10000000000]\n",
            "{number:2,peer:4,peer_pid:5,peer_receives_log:8,posted_receives:false,rank:3,receives_log:7,roles:f",
            "alse,slots_log:6,transport:}\n",
            "{copies:4,counts:{accepted:6,credits:12,freed:8,granted:9,in_flight:13,peer_freed:4,peer_granted:5,p",
            "eer_received:3,posted:0,received:7,released:2,retired:1,shown:10,taken:11},epoch:3,errors:{dropped:2",
            ",refused:3,rnr:1,stuck:4},missing:completion-queue,phase:fencing,status:null,waiting:true}\n",
            "{counters:{bounced:9,bounced_bytes:10,copied_bytes:7,copied_out:11,copies:6,delivered:3,delivered_by",
            "tes:4,dropped:17,inline:24,interrupts:22,nops:5,placed:8,recovered:23,refused:18,released:0,released",
            "_bytes:1,retired:2,rings:20,rnr:16,sleeps:21,stall_bytes:15,stall_completion_queue:13,stall_receive:",
            "14,stall_send_queue:12,stuck:19},delivery:{counts:[31,32,33,34,35,36,37,38,39,40,41,42,43,44,45,46,4",
            "7],sum:48},recovery:{counts:[49,50,51,52,53,54,55,56,57,58,59,60,61,62,63,64,65],sum:66},waited:[25,",
            "26,27,28,29,30]}"
        );
        assert_eq!((VERSION, described().as_str()), (4, expected));
    }

    #[test]
    fn an_entry_of_another_place_is_none() {
        let slot = words(SLOT);
        let (moved, at) = (Moved { sends: 4, receives: 3 }, ENTRIES + 1);
        write_entry(&slot, at as u64, 5, moved, &View::default());
        assert_eq!(read_entry(&slot, 1), Some((at as u64, 5, moved, View::default())));
        assert_eq!(read_entry(&slot, 0), None);
        // The mark of the entry before, whose place is 0.
        entry(&slot, 1)[0].store(2 * ENTRIES as u64 + 2, Ordering::Relaxed);
        assert_eq!(read_entry(&slot, 1), None);
    }
}
