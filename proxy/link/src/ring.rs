//! The few atomics of the shared rings. Every word that two parties use at the same time is stored and loaded
//! here, so that loom can try the interleavings.
//!
//! A ring slot is eight words. Each word carries the lap number of the pass that wrote it. The writer stores words 1
//! to 7 relaxed and then word 0 with release; the reader loads word 0, then an acquire fence, then words 1 to 7, each
//! once. Word 0 therefore orders the payload, which lies outside of the record, before the record. The laps prove
//! that the record is whole, even if a device's stores arrive in any order (P2, P3).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::abi;
#[cfg(not(loom))]
use pushgate_driver_shim::order;
use pushgate_driver_shim::record::{RecordWords, lap_of};

use crate::crash::may_crash;

/// Loom's fences: its threads stand for devices too.
#[cfg(loom)]
mod order {
    use loom::sync::atomic::{Ordering, fence};

    pub(super) fn from_device() {
        fence(Ordering::Acquire);
    }

    pub(super) fn total() {
        fence(Ordering::SeqCst);
    }
}

/// What [`look`] found in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The slot is not written yet, or only in part.
    Empty,
    /// The slot is complete; these words are a private copy.
    Ready(RecordWords),
    /// A word carries a lap that is neither this lap's number nor the last one's.
    Torn,
}

/// The slot for `cursor` in a ring of records of eight words.
#[inline(always)]
fn slot(ring: &[AtomicU64], cursor: u64, log: u32) -> &[AtomicU64] {
    let first = ((cursor & ((1 << log) - 1)) as usize) * abi::PUSHGATE_RECORD_WORDS as usize;
    &ring[first..first + abi::PUSHGATE_RECORD_WORDS as usize]
}

/// What [`look_into`] found in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The slot is not written yet, or only in part.
    Empty,
    /// The slot is complete and was copied.
    Ready,
    /// A word carries a lap that is neither this lap's number nor the last one's.
    Torn,
}

/// Looks at the slot for `cursor` in a ring of `1 << log` records and copies it to `words` if the slot is complete.
/// On any other answer `words` holds nothing of use.
///
/// The words go straight to the caller's memory: they are stored one by one, and wider loads that copied them from a
/// return value right afterwards would wait for those stores.
#[inline(always)]
pub fn look_into(ring: &[AtomicU64], cursor: u64, log: u32, words: &mut RecordWords) -> Found {
    look_at(slot(ring, cursor, log), lap_of(cursor, log), words)
}

/// Looks at a slot that the caller has found, for the lap number that is due there. Answers as [`look_into`] does.
#[inline(always)]
pub fn look_at(slot: &[AtomicU64], lap: u8, words: &mut RecordWords) -> Found {
    let slot = &slot[..abi::PUSHGATE_RECORD_WORDS as usize];
    let w0 = slot[0].load(Ordering::Relaxed);
    if (w0 >> abi::PUSHGATE_LAP_SHIFT) as u8 != lap {
        return classify((w0 >> abi::PUSHGATE_LAP_SHIFT) as u8, lap);
    }
    // PUBLISH (docs/protocol.md): pairs with the producer's release of word 0,
    // and so orders our reads of words 1 to 7 and of the payload after its
    // stores. A fence and not an acquire load, because the ring may be mapped
    // read-only, where Rust promises relaxed loads alone; and one that counts
    // for devices: a GPU or a NIC may have written the record and its payload.
    order::from_device();
    // Each word once, into memory that nobody else can write.
    words[0] = w0;
    let mut wrong = 0;
    for i in 1..8 {
        let w = slot[i].load(Ordering::Relaxed);
        words[i] = w;
        wrong |= w ^ w0;
    }
    if wrong >> abi::PUSHGATE_LAP_SHIFT == 0 || pushgate_core::planted!(P2Lap) {
        return Found::Ready;
    }
    for w in &words[1..] {
        let found = (w >> abi::PUSHGATE_LAP_SHIFT) as u8;
        if found != lap && classify(found, lap) == Found::Torn {
            return Found::Torn;
        }
    }
    Found::Empty
}

/// Looks at the slot for `cursor` in a ring of `1 << log` records and returns a copy, which costs a few nanoseconds
/// more than [`look_into`].
pub fn look(ring: &[AtomicU64], cursor: u64, log: u32) -> Look {
    let mut words = [0; abi::PUSHGATE_RECORD_WORDS as usize];
    match look_into(ring, cursor, log, &mut words) {
        Found::Empty => Look::Empty,
        Found::Ready => Look::Ready(words),
        Found::Torn => Look::Torn,
    }
}

#[cold]
#[inline(never)]
fn classify(found: u8, lap: u8) -> Found {
    if found == lap.wrapping_sub(1) { Found::Empty } else { Found::Torn }
}

/// Whether word 0 of the slot for `cursor` carries the lap that is due: a record was published there, in whole or in
/// part. Serves to find records after a slot that is missing.
pub fn touched(ring: &[AtomicU64], cursor: u64, log: u32) -> bool {
    (slot(ring, cursor, log)[0].load(Ordering::Relaxed) >> abi::PUSHGATE_LAP_SHIFT) as u8
        == lap_of(cursor, log)
}

/// Writes a record into the slot for `cursor`; the laps of the record's words are replaced by this ring's. The caller
/// holds credit for the slot: the reader is done with the last lap's record.
#[inline(always)]
pub fn publish(ring: &[AtomicU64], cursor: u64, log: u32, words: &RecordWords) {
    let slot = slot(ring, cursor, log);
    let lap = (lap_of(cursor, log) as u64) << abi::PUSHGATE_LAP_SHIFT;
    for i in 1..8 {
        slot[i].store(words[i] & abi::PUSHGATE_DATA_MASK | lap, Ordering::Relaxed);
        may_crash();
    }
    // The payload that this thread moved, and words 1 to 7, before word 0.
    slot[0].store(words[0] & abi::PUSHGATE_DATA_MASK | lap, Ordering::Release);
    may_crash();
}

/// Stores a cumulative count that another party reads with [`observe`].
#[inline(always)]
pub fn advance(word: &AtomicU64, value: u64) {
    // What the count covers (reads of a place, a completion) before the count.
    word.store(value, Ordering::Release);
    may_crash();
}

/// Reads a cumulative count that another party stores with [`advance`].
#[inline(always)]
pub fn observe(word: &AtomicU64) -> u64 {
    // Pairs with `advance` and with the device's release of CONSUMED. A fence and not an acquire load, for the reason
    // that `look_at` names.
    let value = word.load(Ordering::Relaxed);
    order::from_device();
    value
}

/// Announces that this engine sleeps, then looks for work once more. True if the engine may wait for its doorbell: a
/// producer or peer that publishes after that look sees a flag and rings.
///
/// Sleeper and waker each store, fence, and load the other's word (Dekker's algorithm). The two sequentially
/// consistent fences are ordered, so at least one of the two loads sees the other party's store, and no wake-up is
/// lost.
pub fn may_sleep(flags: &[&AtomicU64], mut work: impl FnMut() -> bool) -> bool {
    for flag in flags {
        flag.store(1, Ordering::Relaxed);
    }
    order::total();
    if !pushgate_core::planted!(P7WakeUp) && work() {
        awake(flags);
        return false;
    }
    true
}

/// Takes back what [`may_sleep`] announced: the engine is awake.
pub fn awake(flags: &[&AtomicU64]) {
    for flag in flags {
        flag.store(0, Ordering::Relaxed);
    }
}

/// Whether the engine whose flag this is must be rung. Called after publishing; [`may_sleep`] is the other half.
#[inline(always)]
pub fn must_ring(flag: &AtomicU64) -> bool {
    order::total();
    flag.load(Ordering::Relaxed) != 0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use pushgate_driver_shim::record::{Opcode, Record, with_lap};

    fn ring(log: u32) -> Vec<AtomicU64> {
        (0..8usize << log).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn p2_a_slot_is_empty_until_all_its_words_are_there() {
        let ring = ring(2);
        let words = Record { id: 9, length: 5, ..Record::new(Opcode::Put) }.encode(1);
        for i in 0..8 {
            assert_eq!(look(&ring, 2, 2), Look::Empty, "with {i} words");
            // From the last word to the first, then the other way below.
            ring[16 + 7 - i].store(words[7 - i], Ordering::Relaxed);
        }
        assert_eq!(look(&ring, 2, 2), Look::Ready(words));
        assert_eq!(look(&ring, 6, 2), Look::Empty, "the next lap is not there yet");
        for (i, w) in with_lap(&words, 2).iter().enumerate() {
            ring[16 + i].store(*w, Ordering::Relaxed);
            assert_eq!(look(&ring, 6, 2) == Look::Empty, i < 7);
        }
    }

    #[test]
    fn p2_a_word_of_any_other_lap_is_refused() {
        let ring = ring(0);
        publish(&ring, 0, 0, &Record::new(Opcode::Nop).encode(0));
        for i in 0..8 {
            let right = ring[i].load(Ordering::Relaxed);
            for lap in [2u64, 3, 0x80, 0xff] {
                ring[i].store(lap << 56, Ordering::Relaxed);
                assert_eq!(look(&ring, 0, 0), Look::Torn, "word {i}, lap {lap}");
            }
            ring[i].store(right, Ordering::Relaxed);
        }
        assert!(matches!(look(&ring, 0, 0), Look::Ready(_)));
    }

    #[test]
    fn p2_laps_wrap() {
        let ring = ring(1);
        for cursor in 0..2000 {
            assert_eq!(look(&ring, cursor, 1), Look::Empty);
            publish(&ring, cursor, 1, &Record { id: cursor as u32, ..Record::new(Opcode::Send) }.encode(0));
            let Look::Ready(w) = look(&ring, cursor, 1) else { panic!("cursor {cursor}") };
            assert_eq!(Record::decode(&w).unwrap().id, cursor as u32);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;
    use pushgate_driver_shim::record::{Opcode, Record};

    fn words(n: usize) -> Arc<Vec<AtomicU64>> {
        Arc::new((0..n).map(|_| AtomicU64::new(0)).collect())
    }

    /// Payload beside the ring. A plain cell and not an atomic: loom reports a
    /// read and a write of it that nothing orders, and so also the one that no
    /// interleaving of its own shows, a read of the place that runs after the
    /// credit for it was given.
    struct Payload(UnsafeCell<u64>);

    // SAFETY: who may touch it is what the test below is about; loom checks each
    // access against all others.
    unsafe impl Sync for Payload {}

    /// A producer of two records over a ring of one, held back by a credit word;
    /// the payload is rewritten as soon as the credit allows. The reader must see
    /// each record whole, in order, with its own payload.
    #[test]
    fn p1_p2_p3_records_payload_and_credit() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (ring, credit) = (words(8), words(1));
            let payload = Arc::new(Payload(UnsafeCell::new(0)));
            let (ring2, credit2, payload2) = (ring.clone(), credit.clone(), payload.clone());
            let producer = thread::spawn(move || {
                for cursor in 0..2u64 {
                    while cursor >= 1 + observe(&credit2[0]) {
                        thread::yield_now();
                    }
                    // SAFETY: the credit says that the reader is done with it.
                    payload2.0.with_mut(|p| unsafe { *p = 100 + cursor });
                    publish(
                        &ring2,
                        cursor,
                        0,
                        &Record { id: cursor as u32, ..Record::new(Opcode::Put) }.encode(0),
                    );
                }
            });
            for cursor in 0..2u64 {
                let w = loop {
                    match look(&ring, cursor, 0) {
                        Look::Ready(w) => break w,
                        Look::Torn => panic!("torn"),
                        Look::Empty => thread::yield_now(),
                    }
                };
                assert_eq!(Record::decode(&w).unwrap().id as u64, cursor);
                // SAFETY: the record says that it is written; no credit was given yet.
                assert_eq!(payload.0.with(|p| unsafe { *p }), 100 + cursor);
                advance(&credit[0], cursor + 1);
            }
            producer.join().unwrap();
        });
    }

    /// A device's stores of a WQE without payload may arrive in any order, word 0
    /// first in the worst of them: the laps alone prove it whole.
    #[test]
    fn p2_words_that_arrive_in_the_wrong_order() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let ring = words(8);
            let ring2 = ring.clone();
            let record = Record { id: 0x1234_5678, tag: 9, rkey: 8, ..Record::new(Opcode::Put) }.encode(1);
            let producer = thread::spawn(move || {
                for i in 0..8 {
                    ring2[i].store(record[i], Ordering::Relaxed);
                }
            });
            for _ in 0..2 {
                match look(&ring, 0, 0) {
                    Look::Ready(w) => assert_eq!(w, record),
                    Look::Torn => panic!("torn"),
                    Look::Empty => thread::yield_now(),
                }
            }
            producer.join().unwrap();
        });
    }

    /// However publication and falling asleep interleave, either the sleeper
    /// sees the work or the waker sees the flag.
    #[test]
    fn no_wake_up_is_lost() {
        loom::model(|| {
            let w = words(2); // work, sleeping
            let w2 = w.clone();
            let waker = thread::spawn(move || {
                w2[0].store(1, Ordering::Release);
                must_ring(&w2[1])
            });
            let slept = may_sleep(&[&w[1]], || w[0].load(Ordering::Relaxed) != 0);
            let rung = waker.join().unwrap();
            assert!(!slept || rung, "asleep with work and nobody rang");
        });
    }
}
