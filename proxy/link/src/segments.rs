//! The segments of a queue pair, word by word: who writes which word, who reads it, and in which order. Every access of
//! a host to shared words stands here, and in the inbox and outbox of `pushgate-link-verbs`; the atomics themselves are those of
//! [`ring`]. Offsets are the ABI's (docs/protocol.md, Segments).
//!
//! | segment | writer | reader |
//! | --- | --- | --- |
//! | work | the device: `WorkOfDevice` | the engine: `WorkAtEngine` |
//! | control | the engine: `ControlOfEngine` | the device: `ControlAtDevice` |
//! | link | one end's engine: `LinkOfEngine` | the peer's engine: `LinkAtPeer` |
//!
//! Each segment has one writer. Cursors are private to each side: no party reads its own state back from shared memory.

use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::order;
use pushgate_driver_shim::record::{RecordWords, lap_of};
use pushgate_driver_shim::segment::{Geometry, HeaderError};

use crate::PeerCounts;
use crate::crash::may_crash;
use crate::memory::{Mapped, Words};
use crate::prefetch;
use crate::ring::{self, Found, Look};
use crate::watch::Watch;

/// Words of a posted receive.
const RECEIVE: usize = abi::PUSHGATE_RECV_WORDS as usize;
/// Words of a completion.
const CQE: usize = abi::PUSHGATE_CQE_WORDS as usize;

/// Why a segment is refused.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The header is wrong.
    #[error("{segment} segment: {source}")]
    Header {
        /// The segment.
        segment: &'static str,
        /// What is wrong with the header.
        source: HeaderError,
    },
    /// Two segments of one side disagree.
    #[error("{segment} segment says {found:?}, the control segment {expected:?}")]
    Disagree {
        /// The segment.
        segment: &'static str,
        /// The segment's geometry.
        found: Box<Geometry>,
        /// The control segment's.
        expected: Box<Geometry>,
    },
}

/// A posted receive's four words, laps included.
pub type ReceiveWords = [u64; RECEIVE];

/// First word of the entry for `cursor` in a ring of `1 << log` entries of `words` words.
#[inline(always)]
fn first(cursor: u64, log: u32, words: usize) -> usize {
    (cursor & ((1 << log) - 1)) as usize * words
}

/// The lap of `cursor`, at its place in a word.
#[inline(always)]
fn lap(cursor: u64, log: u32) -> u64 {
    (lap_of(cursor, log) as u64) << abi::PUSHGATE_LAP_SHIFT
}

/// Records of a ring that are asked for ahead of a turn. The processor notices a row of lines by itself, but only from the
/// second or third one on, and anew in each page; more than these delay what is asked for after them (measured).
const AHEAD: usize = 4;

/// Asks for the first records of a turn, from `cursor` on.
#[inline(always)]
fn prefetch_slots(ring: &Words, cursor: u64, log: u32) {
    let first = first(cursor, log, 8);
    let end = ring.len().min(first + 8 * AHEAD);
    ring[first..end].chunks(8).for_each(|slot| prefetch::line(slot.as_ptr()));
}

/// Watches the first word of the entry for `cursor`. False if that word has the lap that is due: the entry is there, in whole
/// or in part.
fn watch_slot(ring: &Words, cursor: u64, log: u32, words: usize, watch: &mut Watch) -> bool {
    let (value, watched) = ring.watch(first(cursor, log, words), watch);
    watched && (value >> abi::PUSHGATE_LAP_SHIFT) as u8 != lap_of(cursor, log)
}

// ------------------------------------------------------------------------ work

/// The work segment as the engine reads it.
pub struct WorkAtEngine {
    wqes: Words,
    consumed: Words,
    receives: Words,
    slots_log: u32,
    rx_log: u32,
}

impl WorkAtEngine {
    /// The words of a work segment, whose header was checked.
    pub fn new(memory: &Mapped, g: &Geometry) -> Self {
        WorkAtEngine {
            wqes: Words::readable(memory, abi::PUSHGATE_WORK_RING as usize, 8 << g.slots_log),
            consumed: Words::readable(memory, abi::PUSHGATE_WORK_CONSUMED as usize, 1),
            receives: Words::readable(memory, g.work_receives_offset(), RECEIVE << g.rx_log),
            slots_log: g.slots_log,
            rx_log: g.rx_log,
        }
    }

    /// Asks for what a turn reads: WQEs from slot `head` on, and CONSUMED.
    #[inline]
    pub fn prefetch(&self, head: u64) {
        prefetch_slots(&self.wqes, head, self.slots_log);
        prefetch::line(&self.consumed[0]);
    }

    /// Looks at the WQE of a slot, and copies it to `words` if it is complete. PUBLISH: the payload and the WQE's other
    /// words before its first word.
    #[inline(always)]
    pub fn look_into(&self, slot: u64, words: &mut RecordWords) -> Found {
        ring::look_into(&self.wqes, slot, self.slots_log, words)
    }

    /// [`WorkAtEngine::look_into`] that returns the words.
    pub fn look(&self, slot: u64) -> Look {
        ring::look(&self.wqes, slot, self.slots_log)
    }

    /// Whether the WQE of a slot was published, in whole or in part.
    pub fn touched(&self, slot: u64) -> bool {
        ring::touched(&self.wqes, slot, self.slots_log)
    }

    /// Watches what the device may write next: a WQE of slot `head`, CONSUMED, and the posted receive of a number. False if
    /// one of the two is there already, in whole or in part: later words of it are not watched.
    pub fn watch(&self, head: u64, receive: Option<u64>, watch: &mut Watch) -> bool {
        let wqe = watch_slot(&self.wqes, head, self.slots_log, 8, watch);
        let receives = receive.is_none_or(|at| watch_slot(&self.receives, at, self.rx_log, RECEIVE, watch));
        wqe && receives && self.consumed.watch(0, watch).1
    }

    /// Receive records that the device has given back. CONSUMED: the device's reads of their places before the count.
    #[inline(always)]
    pub fn consumed(&self) -> u64 {
        ring::observe(&self.consumed[0])
    }

    /// The words of the posted receive of this number, if its first word carries the lap that is due. RECEIVE: the
    /// device's use of the buffer, and the other words, before the first word. The words' own laps are the caller's to
    /// check.
    #[inline(always)]
    pub fn receive(&self, number: u64) -> Option<ReceiveWords> {
        let slot = &self.receives[first(number, self.rx_log, RECEIVE)..][..RECEIVE];
        let w0 = slot[0].load(Ordering::Relaxed);
        if (w0 >> abi::PUSHGATE_LAP_SHIFT) as u8 != lap_of(number, self.rx_log) {
            return None;
        }
        // A fence and not an acquire load: the segment may be mapped read-only, where Rust promises relaxed loads alone. A GPU
        // may have posted the receive.
        order::from_device();
        Some([
            w0,
            slot[1].load(Ordering::Relaxed),
            slot[2].load(Ordering::Relaxed),
            slot[3].load(Ordering::Relaxed),
        ])
    }
}

/// The work segment as a device of the host writes it.
pub(crate) struct WorkOfDevice {
    wqes: Words,
    consumed: Words,
    receives: Words,
    slots_log: u32,
    rx_log: u32,
}

impl WorkOfDevice {
    /// The words of a work segment that this process may write.
    pub(crate) fn new(memory: &Mapped, g: &Geometry) -> Self {
        WorkOfDevice {
            wqes: Words::writable(memory, abi::PUSHGATE_WORK_RING as usize, 8 << g.slots_log),
            consumed: Words::writable(memory, abi::PUSHGATE_WORK_CONSUMED as usize, 1),
            receives: Words::writable(memory, g.work_receives_offset(), RECEIVE << g.rx_log),
            slots_log: g.slots_log,
            rx_log: g.rx_log,
        }
    }

    /// Publishes a WQE in a slot that the device holds. PUBLISH: this thread's stores of the payload, and the WQE's
    /// other words, before its first word.
    #[inline]
    pub(crate) fn publish(&self, slot: u64, words: &RecordWords) {
        ring::publish(&self.wqes, slot, self.slots_log, words);
    }

    /// Writes the posted receive of this number. RECEIVE: this thread's use of the buffer, and the other words, before
    /// the first word.
    pub(crate) fn post_receive(&self, number: u64, words: &ReceiveWords) {
        let (slot, lap) = (self.receive_slot(number), lap(number, self.rx_log));
        for (word, value) in slot[1..].iter().zip(&words[1..]) {
            word.store(value & abi::PUSHGATE_DATA_MASK | lap, Ordering::Relaxed);
        }
        slot[0].store(words[0] & abi::PUSHGATE_DATA_MASK | lap, Ordering::Release);
    }

    /// Gives back all receive records before `count`. CONSUMED: this thread's reads of their places before the count.
    #[inline]
    pub(crate) fn consume(&self, count: u64) {
        ring::advance(&self.consumed[0], count);
    }

    /// The words of the posted receive of this number, for tests that write what no producer would.
    pub(crate) fn receive_slot(&self, number: u64) -> &[AtomicU64] {
        &self.receives[first(number, self.rx_log, RECEIVE)..][..RECEIVE]
    }

    /// The words of the WQE ring, for such tests.
    pub(crate) fn wqes(&self) -> &[AtomicU64] {
        &self.wqes
    }

    /// CONSUMED itself, for such tests.
    pub(crate) fn consumed(&self) -> &AtomicU64 {
        &self.consumed[0]
    }
}

// --------------------------------------------------------------------- control

/// Words of the control line.
const CREDIT: usize = 0;
const STATUS: usize = 1;
const DELIVERED: usize = 2;
const CONTROL_LINE: usize = 3;

/// The control segment as the engine writes it.
pub struct ControlOfEngine {
    line: Words,
    sleeping: Words,
    signals: Words,
    cq: Words,
    rx: Words,
    cq_log: u32,
    rx_log: u32,
    cq_head: u64,
    /// The segment is a device's memory, to which this CPU's stores are not ordered.
    write_combined: bool,
    landing: usize,
}

impl ControlOfEngine {
    /// The words of a control segment, whose header was checked.
    pub fn new(memory: &Mapped, g: &Geometry) -> Self {
        ControlOfEngine {
            line: Words::writable(memory, abi::PUSHGATE_CTL_CREDIT as usize, CONTROL_LINE),
            sleeping: Words::writable(memory, abi::PUSHGATE_CTL_SLEEPING as usize, 1),
            signals: Words::writable(memory, abi::PUSHGATE_CTL_SIGNALS as usize, g.signals as usize),
            cq: Words::writable(memory, g.control_cq_offset(), CQE << g.cq_log),
            rx: Words::writable(memory, g.control_rx_offset(), 8 << g.rx_log),
            cq_log: g.cq_log,
            rx_log: g.rx_log,
            cq_head: 0,
            write_combined: memory.is_io_memory(),
            landing: memory.address() + g.control_landing_offset(),
        }
    }

    /// Asks for what a turn writes: the counts for the device, and receive records from number `at` on.
    #[inline]
    pub fn prefetch(&self, at: u64) {
        prefetch::line(&self.line[CREDIT]);
        prefetch_slots(&self.rx, at, self.rx_log);
    }

    /// Address of a unit of the landing ring.
    pub fn landing(&self, unit: u64) -> usize {
        self.landing + ((unit as usize) << abi::PUSHGATE_UNIT_LOG)
    }

    /// CREDIT: the peer's last read of the places, which the caller has seen through the peer's count, before the device
    /// may write there again.
    #[inline]
    pub fn credit(&self, word: u64) {
        self.before_word();
        ring::advance(&self.line[CREDIT], word);
    }

    /// WQE slots whose messages the peer has, cumulative.
    #[inline]
    pub fn delivered(&self, slots: u64) {
        self.before_word();
        ring::advance(&self.line[DELIVERED], slots);
    }

    /// How the queue pair ended. Completions that were written before are found by a device that sees the status and
    /// looks at its CQ once more.
    pub fn status(&self, word: u64) {
        self.before_word();
        self.line[STATUS].store(word, Ordering::Release);
        self.drain_stores();
    }

    /// SIGNAL: the data that the signal announces, before the word. Signals only grow, so that writing one twice is
    /// harmless.
    #[inline]
    pub fn signal(&self, index: u32, value: u64) {
        let word = &self.signals[index as usize];
        if word.load(Ordering::Relaxed) < value {
            self.before_word();
            ring::advance(word, value);
        }
    }

    /// RECORD: the payload, before the receive record number `at`.
    #[inline]
    pub fn record(&self, at: u64, words: &RecordWords) {
        self.before_word();
        ring::publish(&self.rx, at, self.rx_log, words);
    }

    /// COMPLETION: the CQE's second word, and what the completion stands for, before its first word. The producer
    /// reserved the slot together with the WQE slot; one that lied about that overwrites its own completions.
    #[inline]
    pub fn complete(&mut self, wr_id: u32, opcode: u8, status: u8, length: u32) {
        let (cqe, lap) =
            (&self.cq[first(self.cq_head, self.cq_log, CQE)..][..CQE], lap(self.cq_head, self.cq_log));
        self.cq_head += 1;
        cqe[1].store(length as u64 | lap, Ordering::Relaxed);
        may_crash();
        order::to_device();
        cqe[0].store(
            (status as u64) << abi::PUSHGATE_CQE_STATUS_SHIFT
                | (opcode as u64) << abi::PUSHGATE_CQE_OPCODE_SHIFT
                | wr_id as u64
                | lap,
            Ordering::Release,
        );
        may_crash();
    }

    /// Completions that were written.
    #[inline(always)]
    pub fn completions(&self) -> u64 {
        self.cq_head
    }

    /// Goes on after an engine that died: its last completion was number `completions` less one. Returns the status and
    /// DELIVERED as that engine, or a program that lies, has left them.
    pub fn resume(&mut self, completions: u64) -> (u64, u64) {
        self.cq_head = completions;
        // That engine may have slept.
        ring::awake(&[&self.sleeping[0]]);
        (ring::observe(&self.line[STATUS]), ring::observe(&self.line[DELIVERED]))
    }

    /// The words of receive record number `at`, if that engine wrote it.
    pub fn shown(&self, at: u64) -> Look {
        ring::look(&self.rx, at, self.rx_log)
    }

    /// The word that tells producers that the engine sleeps.
    pub fn sleeping(&self) -> &AtomicU64 {
        &self.sleeping[0]
    }

    /// Puts what this CPU stored to the segment before what it stores next, and out of its buffers, where the memory is
    /// write-combining.
    #[inline(always)]
    pub fn drain_stores(&self) {
        if self.write_combined {
            order::drain();
        }
    }

    /// Before a word that a device looks for: a release store alone orders what came before for threads.
    #[inline(always)]
    fn before_word(&self) {
        if self.write_combined {
            order::drain();
        } else {
            order::to_device();
        }
    }
}

/// The control segment as a device of the host reads it.
pub(crate) struct ControlAtDevice {
    line: Words,
    sleeping: Words,
    signals: Words,
    cq: Words,
    rx: Words,
    cq_log: u32,
    rx_log: u32,
}

impl ControlAtDevice {
    /// The words of a control segment.
    pub(crate) fn new(memory: &Mapped, g: &Geometry) -> Self {
        ControlAtDevice {
            line: Words::readable(memory, abi::PUSHGATE_CTL_CREDIT as usize, CONTROL_LINE),
            sleeping: Words::readable(memory, abi::PUSHGATE_CTL_SLEEPING as usize, 1),
            signals: Words::readable(memory, abi::PUSHGATE_CTL_SIGNALS as usize, g.signals as usize),
            cq: Words::readable(memory, g.control_cq_offset(), CQE << g.cq_log),
            rx: Words::readable(memory, g.control_rx_offset(), 8 << g.rx_log),
            cq_log: g.cq_log,
            rx_log: g.rx_log,
        }
    }

    /// CREDIT: the peer's last read of the room before this thread's stores into it.
    #[inline]
    pub(crate) fn credit(&self) -> u64 {
        ring::observe(&self.line[CREDIT])
    }

    /// The status word; 0 while the queue pair has not ended.
    #[inline]
    pub(crate) fn status(&self) -> u64 {
        ring::observe(&self.line[STATUS])
    }

    /// WQE slots whose messages the peer has, cumulative.
    #[inline]
    pub(crate) fn delivered(&self) -> u64 {
        ring::observe(&self.line[DELIVERED])
    }

    /// SIGNAL: a signal's value; the data that it announces before what this thread does next.
    ///
    /// # Panics
    /// If the queue pair has no such signal.
    #[inline]
    pub(crate) fn signal(&self, index: u32) -> u64 {
        ring::observe(&self.signals[index as usize])
    }

    /// Looks at the receive record number `at`, and copies it to `words` if it is complete. RECORD: the payload before
    /// this thread's use of it.
    #[inline]
    pub(crate) fn look_into(&self, at: u64, words: &mut RecordWords) -> Found {
        ring::look_into(&self.rx, at, self.rx_log, words)
    }

    /// The two words of completion number `at`, if it is complete. COMPLETION: what the completion stands for before
    /// what this thread does next.
    #[inline]
    pub(crate) fn completion(&self, at: u64) -> Option<[u64; CQE]> {
        let cqe = &self.cq[first(at, self.cq_log, CQE)..][..CQE];
        let words = [ring::observe(&cqe[0]), cqe[1].load(Ordering::Relaxed)];
        let lap = lap_of(at, self.cq_log);
        words.iter().all(|w| (w >> abi::PUSHGATE_LAP_SHIFT) as u8 == lap).then_some(words)
    }

    /// Whether the engine sleeps and must be rung. Called after publishing.
    #[inline]
    pub(crate) fn must_ring(&self) -> bool {
        ring::must_ring(&self.sleeping[0])
    }
}

// ------------------------------------------------------------------------ link

/// Words of the link line.
const LINK_RECEIVED: usize = 0;
const LINK_RELEASED: usize = 1;
const LINK_GRANTED: usize = 2;
const LINK_STATUS: usize = 3;
const LINK_ADDRESS: usize = 4;
const LINK_READS: usize = 5;
const LINK_LINE: usize = 6;

/// The link segment of this end, which its engine alone writes.
pub(crate) struct LinkOfEngine {
    ring: Words,
    line: Words,
    sleeping: Words,
    log: u32,
}

impl LinkOfEngine {
    /// The words of this end's link segment, whose header was checked.
    pub(crate) fn new(memory: &Mapped, g: &Geometry) -> Self {
        LinkOfEngine {
            ring: Words::writable(memory, abi::PUSHGATE_LINK_RING as usize, 8 << g.link_log),
            line: Words::writable(memory, abi::PUSHGATE_LINK_RECEIVED as usize, LINK_LINE),
            sleeping: Words::writable(memory, abi::PUSHGATE_LINK_SLEEPING as usize, 1),
            log: g.link_log,
        }
    }

    /// Asks for what a turn writes: the counts, and records from message number `at` on.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64) {
        prefetch::line(&self.line[LINK_RECEIVED]);
        prefetch_slots(&self.ring, at, self.log);
    }

    /// Publishes the record of message number `at`. The caller holds credit for its slot.
    #[inline]
    pub(crate) fn publish(&self, at: u64, words: &RecordWords) {
        ring::publish(&self.ring, at, self.log, words);
    }

    /// Publishes this end's counts. Received goes before released, so that the peer, who reads released first, never
    /// sees more released than received.
    #[inline]
    pub(crate) fn counts(&self, counts: PeerCounts) {
        ring::advance(&self.line[LINK_RECEIVED], counts.received);
        ring::advance(&self.line[LINK_RELEASED], counts.released);
        ring::advance(&self.line[LINK_GRANTED], counts.granted);
    }

    /// Publishes how this end ended.
    pub(crate) fn status(&self, word: u64) {
        self.line[LINK_STATUS].store(word, Ordering::Release);
    }

    /// Says where this segment lies in its engine's process. What the peer may do there, the caller has seen to before.
    pub(crate) fn address(&self, address: u64) {
        self.line[LINK_ADDRESS].store(address, Ordering::Release);
    }

    /// Says whether this engine can read the peer's process, `PUSHGATE_READS_*`.
    pub(crate) fn reads(&self, answer: u64) {
        self.line[LINK_READS].store(answer, Ordering::Release);
    }

    /// The word that tells the peer's engine that this engine sleeps.
    pub(crate) fn sleeping(&self) -> &AtomicU64 {
        &self.sleeping[0]
    }
}

/// The peer's link segment, which this end reads.
pub(crate) struct LinkAtPeer {
    ring: Words,
    line: Words,
    sleeping: Words,
    log: u32,
}

impl LinkAtPeer {
    /// The words of the peer's link segment, whose header was checked.
    pub(crate) fn new(memory: &Mapped, g: &Geometry) -> Self {
        LinkAtPeer {
            ring: Words::readable(memory, abi::PUSHGATE_LINK_RING as usize, 8 << g.link_log),
            line: Words::readable(memory, abi::PUSHGATE_LINK_RECEIVED as usize, LINK_LINE),
            sleeping: Words::readable(memory, abi::PUSHGATE_LINK_SLEEPING as usize, 1),
            log: g.link_log,
        }
    }

    /// Asks for what a turn reads: the peer's counts, whether the peer's engine sleeps, and records from message number `at`
    /// on.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64) {
        prefetch::line(&self.line[LINK_RECEIVED]);
        prefetch::line(&self.sleeping[0]);
        prefetch_slots(&self.ring, at, self.log);
    }

    /// Watches what the peer's engine may write next: the record of message number `at`, and its counts. False if the record
    /// is there already, in whole or in part.
    pub(crate) fn watch(&self, at: u64, watch: &mut Watch) -> bool {
        let record = watch_slot(&self.ring, at, self.log, 8, watch);
        let counts = [LINK_RECEIVED, LINK_RELEASED, LINK_GRANTED];
        record && counts.into_iter().all(|count| self.line.watch(count, watch).1)
    }

    /// Looks at the record of message number `at`, and copies it to `words` if it is complete.
    #[inline(always)]
    pub(crate) fn look_into(&self, at: u64, words: &mut RecordWords) -> Found {
        ring::look_into(&self.ring, at, self.log, words)
    }

    /// The peer's counts. Released is read before received: then it can only lag behind it.
    #[inline]
    pub(crate) fn counts(&self) -> PeerCounts {
        let released = ring::observe(&self.line[LINK_RELEASED]);
        PeerCounts {
            released,
            received: ring::observe(&self.line[LINK_RECEIVED]),
            granted: ring::observe(&self.line[LINK_GRANTED]),
        }
    }

    /// The peer's status word; 0 while the peer has not ended. Orders nothing: a caller that needs an order has a fence.
    #[inline]
    pub(crate) fn status(&self) -> u64 {
        self.line[LINK_STATUS].load(Ordering::Relaxed)
    }

    /// Where the segment lies in the peer's engine's process; 0 while the peer has not said.
    pub(crate) fn address(&self) -> u64 {
        ring::observe(&self.line[LINK_ADDRESS])
    }

    /// Whether the peer's engine can read this process, `PUSHGATE_READS_*`; 0 while the peer has not tried.
    pub(crate) fn reads(&self) -> u64 {
        ring::observe(&self.line[LINK_READS])
    }

    /// Whether the peer's engine sleeps and must be rung. Called after publishing.
    #[inline]
    pub(crate) fn must_ring(&self) -> bool {
        ring::must_ring(&self.sleeping[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: Geometry = Geometry {
        window_log: 4,
        slots_log: 2,
        cq_log: 1,
        rx_log: 1,
        link_log: 1,
        landing_log: 4,
        signals: 2,
        rank: 0,
    };

    #[test]
    fn what_one_side_writes_the_other_reads_word_by_word() {
        let (work, control, link) =
            (Mapped::heap(G.work_bytes()), Mapped::heap(G.control_bytes()), Mapped::heap(G.link_bytes()));
        let (device, engine) = (WorkOfDevice::new(&work, &G), WorkAtEngine::new(&work, &G));
        let mut words = [0; 8];
        for slot in 0..10 {
            assert_eq!((engine.look_into(slot, &mut words), engine.touched(slot)), (Found::Empty, false));
            device.publish(slot, &[slot; 8]);
            assert_eq!(engine.look_into(slot, &mut words), Found::Ready);
            assert!(words.iter().all(|w| w & abi::PUSHGATE_DATA_MASK == slot) && engine.touched(slot));
            assert_eq!(engine.receive(slot), None);
            device.post_receive(slot, &[slot, 1, 2, 3]);
            let receive = engine.receive(slot).unwrap().map(|w| w & abi::PUSHGATE_DATA_MASK);
            assert_eq!(receive, [slot, 1, 2, 3]);
            device.consume(slot);
            assert_eq!(engine.consumed(), slot);
        }
        let (mut engine, device) = (ControlOfEngine::new(&control, &G), ControlAtDevice::new(&control, &G));
        for n in 1..10 {
            engine.credit(n);
            engine.delivered(2 * n);
            engine.signal(1, 3 * n);
            assert_eq!((device.credit(), device.delivered(), device.signal(1)), (n, 2 * n, 3 * n));
            engine.signal(1, 3 * n - 1);
            assert_eq!((device.signal(0), device.signal(1)), (0, 3 * n), "a signal only grows");
            assert_eq!(device.look_into(n - 1, &mut words), Found::Empty);
            engine.record(n - 1, &[n; 8]);
            assert_eq!(device.look_into(n - 1, &mut words), Found::Ready);
            assert_eq!(device.completion(n - 1), None);
            engine.complete(n as u32, 5, 6, 7);
            let [w0, w1] = device.completion(n - 1).unwrap();
            assert_eq!((w0 as u32, w1 as u32, w0 >> abi::PUSHGATE_CQE_OPCODE_SHIFT & 0xff), (n as u32, 7, 5));
        }
        assert_eq!(device.status(), 0);
        engine.status(77);
        assert_eq!((device.status(), device.must_ring()), (77, false));
        engine.sleeping().store(1, Ordering::Relaxed);
        assert!(device.must_ring());

        let (own, peer) = (LinkOfEngine::new(&link, &G), LinkAtPeer::new(&link, &G));
        own.publish(0, &[9; 8]);
        assert_eq!(peer.look_into(0, &mut words), Found::Ready);
        let counts = PeerCounts { released: 1, received: 2, granted: 3 };
        own.counts(counts);
        own.status(4);
        own.address(5);
        own.reads(6);
        assert_eq!((peer.counts(), peer.status(), peer.address(), peer.reads()), (counts, 4, 5, 6));
        own.sleeping().store(1, Ordering::Relaxed);
        assert!(peer.must_ring());
    }

    #[test]
    fn p3_the_words_of_a_segment_do_not_overlap() {
        let memory = Mapped::heap(G.control_bytes());
        let mut engine = ControlOfEngine::new(&memory, &G);
        let device = ControlAtDevice::new(&memory, &G);
        // All of one part is written; nothing of the others changes.
        (0..2).for_each(|at| engine.record(at, &[u64::MAX; 8]));
        assert_eq!((device.completion(0), device.signal(0), device.signal(1)), (None, 0, 0));
        (0..2).for_each(|i| engine.signal(i, u64::MAX));
        assert_eq!(
            (device.completion(0), device.credit(), device.status(), device.delivered()),
            (None, 0, 0, 0)
        );
        (0..2).for_each(|_| engine.complete(1, 1, 1, 1));
        let mut words = [0; 8];
        assert_eq!(device.look_into(0, &mut words), Found::Ready);
        assert_eq!((device.signal(0), device.must_ring()), (u64::MAX, false));
    }
}
