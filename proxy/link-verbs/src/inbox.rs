//! What the peer has written to this end: its line, the slots of messages, its table of regions, its receives, and the
//! mirror of its window. Every word is read as the peer's, and is believed only as far as it hurts the peer itself (P8).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_core::session;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Opcode, RecordWords, lap_of};
use pushgate_link::memory::Words;
use pushgate_link::receives::RECEIVE_WORDS;
use pushgate_link::region::MAX_REGIONS;
use pushgate_link::ring::{self, Found};
use pushgate_link::{Arrival, PeerCounts, StripeArrival};

use super::slot::{self, SHORT, SLOT_BYTES, SLOT_WORDS, STRIPE_BYTES};

/// Immediate data that only wakes. Without it: 31 bits of a SEND's sequence number.
pub(super) const NOTIFY: u32 = 1 << 31;

/// Words of the line. A message's slot has the first three as well.
const RECEIVED: usize = 0;
const RELEASED: usize = 1;
const GRANTED: usize = 2;
const NOTIFIED: usize = 3;
const LEFT: usize = 4;
const STATUS: usize = 5;
const NOT_STATUS: usize = 6;
const STRIPES: usize = 7;
/// Words of the whole line.
pub(super) const LINE_WORDS: usize = 8;

/// Flags of a record on this wire, taken off before anybody else sees it.
pub(super) const SHORT_FLAG: u64 = 0x80 << abi::PUSHGATE_FLAGS_SHIFT;
pub(super) const PLACED_FLAG: u64 = 0x40 << abi::PUSHGATE_FLAGS_SHIFT;

/// A region of the peer, as the peer has told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerRegion {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) key: u32,
    pub(super) of_device: bool,
}

/// Second word of a region's entry: memory of a device.
pub(super) const OF_DEVICE: u64 = 1 << 32;

/// Where everything lies in an inbox.
#[derive(Clone, Copy, Debug)]
pub(super) struct InboxLayout {
    pub(super) slots: usize,
    pub(super) regions: usize,
    pub(super) receives: usize,
    pub(super) bytes: usize,
}

/// Bytes of the inbox's first page that nobody writes and the peer may read, to learn that its WRITEs are here; and where
/// what this end reads so of the peer's inbox goes.
pub(super) const ECHO_FROM: usize = 2048;
pub(super) const ECHO_INTO: usize = 3072;
pub(super) const ECHO_BYTES: usize = 8;

/// Words of an entry of the table of regions.
pub(super) const REGION_WORDS: usize = 4;

impl InboxLayout {
    /// Of an inbox whose writer has `1 << link_log` messages in flight and posts
    /// `1 << rx_log` receives.
    pub(super) fn new(link_log: u32, rx_log: u32) -> Self {
        let page = abi::PUSHGATE_PAGE as usize;
        let regions = (page + (SLOT_BYTES << link_log)).next_multiple_of(page);
        let receives = regions + MAX_REGIONS * REGION_WORDS * 8;
        let bytes = (receives + ((RECEIVE_WORDS * 8) << rx_log)).next_multiple_of(page);
        InboxLayout { slots: page, regions, receives, bytes }
    }
}

/// Clears what an earlier link has brought: all of an inbox of this layout but the peer's receives. Nobody writes there.
pub(super) fn clear(words: &Words, layout: &InboxLayout) {
    words[..layout.receives / 8].iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

/// The inbox of a session's links, and the mirror of the peer's window.
pub(super) struct Inbox {
    words: Words,
    layout: InboxLayout,
    log: u32,
    /// SENDs are announced by immediate data.
    imm: bool,
    mirror: Arc<SharedMemory>,
    mirror_units: u64,
    /// The next message to come.
    next: u64,
    /// SENDs up to this message were announced by immediate data.
    announced: u64,
    /// SENDs that were taken, over all links.
    sends: u64,
}

impl Inbox {
    /// An inbox of `1 << log` slots in `memory`, and the `mirror` of a window of `mirror_units`.
    pub(super) fn new(
        memory: &Arc<SharedMemory>,
        layout: InboxLayout,
        log: u32,
        imm: bool,
        mirror: Arc<SharedMemory>,
        mirror_units: u64,
    ) -> Self {
        let words = Words::writable(memory, 0, layout.bytes / 8);
        Inbox { words, layout, log, imm, mirror, mirror_units, next: 0, announced: 0, sends: 0 }
    }

    /// Its memory and where everything lies there, for [`clear`].
    pub(super) fn memory(&self) -> (Words, InboxLayout) {
        (self.words.clone(), self.layout)
    }

    /// Begins anew for another link, whose peer writes zeroed memory ([`clear`]).
    pub(super) fn begin(&mut self) {
        (self.next, self.announced) = (0, 0);
    }

    /// SENDs that were taken, over all links.
    pub(super) fn sends(&self) -> u64 {
        self.sends
    }

    /// Writes an entry of the peer's table of regions, as the peer has offered it with a link that has not begun.
    pub(super) fn tell_region(&self, entry: [u64; REGION_WORDS]) {
        let index = entry[0] as usize & (MAX_REGIONS - 1);
        let first = self.layout.regions / 8 + index * REGION_WORDS;
        for (word, value) in self.words[first..].iter().zip(entry) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Its address, and in it slots, regions, receives and the end, for the simulator.
    #[cfg(feature = "sim")]
    pub(super) fn parts(&self) -> (usize, [usize; 4]) {
        let l = &self.layout;
        (self.words.as_ptr() as usize, [l.slots, l.regions, l.receives, l.bytes])
    }

    // --------------------------------------------------------------- the line

    /// The peer's counts: by its line, or by its last message. That message's slot holds until this end lets go of it,
    /// and then a later message's, whose counts are later too.
    #[inline]
    pub(super) fn counts(&self) -> PeerCounts {
        let slot = &self.slot(self.next.wrapping_sub(1))[slot::COUNTS];
        let count = |at: usize| {
            let (line, slot) = (ring::observe(&self.words[at]), ring::observe(&slot[at]));
            // A word of another epoch counts nothing, however much it says.
            let counted = |word: u64| session::count_of(word, 0).unwrap_or(0);
            if counted(slot) > counted(line) { slot } else { line }
        };
        // Released before received: then it can only lag behind it.
        let released = count(RELEASED);
        PeerCounts { released, received: count(RECEIVED), granted: count(GRANTED) }
    }

    /// Messages that the peer says it has.
    pub(super) fn received(&self) -> u64 {
        session::count_of(self.counts().received, 0).unwrap_or(0)
    }

    /// Immediate data that only wakes, as the peer counts what it took.
    #[inline]
    pub(super) fn notified(&self) -> u64 {
        ring::observe(&self.words[NOTIFIED]) & abi::PUSHGATE_COUNT_MASK
    }

    /// Stripes of this end that the peer says it has taken in over the link.
    pub(super) fn stripes(&self) -> u64 {
        ring::observe(&self.words[STRIPES])
    }

    /// Whether the peer has left in order.
    pub(super) fn peer_left(&self) -> bool {
        ring::observe(&self.words[LEFT]) != 0
    }

    /// The peer's status word; 0 while it has none.
    pub(super) fn status(&self) -> u64 {
        let word = ring::observe(&self.words[STATUS]);
        // The complement follows the word: a word that has come in part is none yet.
        if ring::observe(&self.words[NOT_STATUS]) == !word { word } else { 0 }
    }

    // --------------------------------------------------------------- messages

    /// Immediate data that announces the SEND with these low bits of its sequence number. Data that no sender of this
    /// link could have sent announces nothing.
    pub(super) fn announce(&mut self, imm: u32) {
        let ahead = imm.wrapping_sub(self.next as u32) & !NOTIFY;
        if ahead < 1 << 30 {
            self.announced = self.announced.max(self.next + ahead as u64 + 1);
        }
    }

    /// The slot for the message of `cursor`.
    #[inline]
    fn slot(&self, cursor: u64) -> &[AtomicU64] {
        let at = self.layout.slots / 8 + (cursor as usize & ((1 << self.log) - 1)) * SLOT_WORDS;
        &self.words[at..at + SLOT_WORDS]
    }

    /// Looks at the next slot, and copies its record.
    #[inline]
    pub(super) fn look(&self, words: &mut RecordWords) -> Found {
        let found = ring::look_at(self.slot(self.next), lap_of(self.next, self.log), words);
        if found != Found::Ready {
            return found;
        }
        // P4: a SEND has a receive of this queue pair, or it is not there.
        let opcode = (words[0] >> abi::PUSHGATE_OPCODE_SHIFT) as u8;
        if self.imm && opcode == Opcode::Send as u8 && self.announced <= self.next {
            return Found::Empty;
        }
        found
    }

    /// Takes the message that [`Inbox::look`] has found `Ready`, and whose record is in `words`.
    #[inline]
    pub(super) fn take(&mut self, words: &mut RecordWords) -> Arrival {
        let placed = words[0] & PLACED_FLAG != 0;
        if words[0] & SHORT_FLAG != 0 && !self.unpack(words) {
            return Arrival::Empty;
        }
        words[0] &= !(SHORT_FLAG | PLACED_FLAG);
        self.next += 1;
        self.sends += ((words[0] >> abi::PUSHGATE_OPCODE_SHIFT) as u8 == Opcode::Send as u8) as u64;
        if placed { Arrival::Placed } else { Arrival::Record }
    }

    /// Takes the stripe that [`Inbox::look`] has found `Ready`, and whose message's record is in `words`.
    pub(super) fn take_stripe(&mut self, words: &mut RecordWords) -> StripeArrival {
        let mut header = [0; STRIPE_BYTES];
        if words[0] & (SHORT_FLAG | PLACED_FLAG) != 0 {
            return StripeArrival::Torn;
        }
        if !slot::unpack(self.slot(self.next), &mut header, self.next, self.log) {
            return StripeArrival::Empty;
        }
        let Some(stripe) = slot::stripe(&header) else { return StripeArrival::Torn };
        slot::clear(self.slot(self.next), header.len());
        // The laps are this rail's, and the record is its message's.
        words.iter_mut().for_each(|word| *word &= abi::PUSHGATE_DATA_MASK);
        self.next += 1;
        StripeArrival::Stripe(stripe)
    }

    /// Puts a short payload into the mirror, where it would lie had it come alone. False if not all of it is there yet.
    fn unpack(&self, words: &RecordWords) -> bool {
        let (length, unit, units) = (words[0] as u32, words[5] as u32, words[6] as u32);
        // Anything else is no short payload; the receiver of the record checks this, too.
        if length as usize > SHORT || length > units.saturating_mul(abi::PUSHGATE_UNIT) {
            return true;
        }
        let Some(to) = self.payload(unit, units) else { return true };
        let mut payload = [0; SHORT];
        let payload = &mut payload[..length as usize];
        if !slot::unpack(self.slot(self.next), payload, self.next, self.log) {
            return false;
        }
        // SAFETY: `payload` says that the units lie in the mirror, which is mapped
        // writable; the peer's writes there could only spoil its own message (P1).
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), to as *mut u8, payload.len()) };
        slot::clear(self.slot(self.next), length as usize);
        true
    }

    /// Host address of `units` units of the mirror at `unit`, if they lie within it.
    pub(super) fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        let end = unit as u64 + units as u64;
        (end <= self.mirror_units)
            .then(|| self.mirror.as_ptr().as_ptr() as usize + ((unit as usize) << abi::PUSHGATE_UNIT_LOG))
    }

    // ------------------------------------------- the peer's regions and receives

    /// The region of `rkey`, if the peer has told of it.
    pub(super) fn region(&self, rkey: u32) -> Option<PeerRegion> {
        let index = rkey as usize & (MAX_REGIONS - 1);
        let first = self.layout.regions / 8 + index * REGION_WORDS;
        // Bytes may arrive in ascending order: with the last word of an entry the first is there.
        let [key, bytes, address, id] = [3, 2, 1, 0].map(|i| ring::observe(&self.words[first + i]));
        let known = rkey != 0 && id as u32 == rkey && (key >> 32) as u32 == rkey;
        known.then_some(PeerRegion { address, bytes, key: key as u32, of_device: id & OF_DEVICE != 0 })
    }

    /// The ring of the peer's receives.
    pub(super) fn receives(&self) -> &[AtomicU64] {
        &self.words[self.layout.receives / 8..]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use pushgate_driver_shim::record::Record;

    use super::super::mock;
    use super::*;

    const LOG: u32 = 2;
    /// Units of the mirror.
    const UNITS: u64 = 64;

    fn inbox(imm: bool) -> Inbox {
        let layout = InboxLayout::new(LOG, 2);
        let memory = |name, bytes| Arc::new(mock::allocate(name, bytes).unwrap());
        let mirror = memory("mirror", UNITS as usize * 64);
        Inbox::new(&memory("inbox", layout.bytes), layout, LOG, imm, mirror, UNITS)
    }

    fn store(inbox: &Inbox, word: usize, value: u64) {
        inbox.words[word].store(value, Ordering::Relaxed);
    }

    /// Writes a record into the slot for `cursor`, as the peer's device would.
    fn arrive(inbox: &Inbox, cursor: u64, record: &Record) {
        let words = record.encode(lap_of(cursor, LOG));
        for (to, word) in inbox.slot(cursor).iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
    }

    fn send(id: u64) -> Record {
        Record { id: id as u32, length: 8, flags: Record::INLINE, ..Record::new(Opcode::Send) }
    }

    fn taken(inbox: &mut Inbox) -> Arrival {
        let mut words = [0; 8];
        match inbox.look(&mut words) {
            Found::Ready => inbox.take(&mut words),
            Found::Empty => Arrival::Empty,
            Found::Torn => Arrival::Torn,
        }
    }

    #[test]
    fn p4_a_send_that_no_receive_announced_is_not_there() {
        let mut i = inbox(true);
        for cursor in 0..2 {
            arrive(&i, cursor, &send(cursor));
        }
        assert_eq!(taken(&mut i), Arrival::Empty);
        // No sender is half of all numbers ahead.
        i.announce(NOTIFY - 1);
        assert_eq!(taken(&mut i), Arrival::Empty);
        i.announce(0);
        assert_eq!((taken(&mut i), taken(&mut i)), (Arrival::Record, Arrival::Empty));
        // One announcement speaks for those before it.
        arrive(&i, 2, &send(2));
        i.announce(2);
        assert_eq!(
            [taken(&mut i), taken(&mut i), taken(&mut i)],
            [Arrival::Record, Arrival::Record, Arrival::Empty]
        );
    }

    #[test]
    fn p7_a_status_of_which_a_part_has_come_is_none() {
        let i = inbox(false);
        assert_eq!(i.status(), 0);
        store(&i, STATUS, 77);
        assert_eq!(i.status(), 0);
        store(&i, NOT_STATUS, !77);
        assert_eq!(i.status(), 77);
    }

    #[test]
    fn p5_the_later_of_line_and_last_message_counts_and_another_epoch_counts_nothing() {
        let mut i = inbox(false);
        let count = |n| session::count_word(0, n);
        store(&i, RECEIVED, count(3));
        assert_eq!(i.received(), 3);
        arrive(&i, 0, &send(0));
        i.slot(0)[slot::COUNTS][RECEIVED].store(count(5), Ordering::Relaxed);
        assert_eq!(i.received(), 3, "of a message that was not taken");
        assert_eq!(taken(&mut i), Arrival::Record);
        assert_eq!(i.received(), 5);
        store(&i, RECEIVED, session::count_word(9, 100));
        assert_eq!(i.received(), 5);
        store(&i, RECEIVED, count(6));
        assert_eq!(i.received(), 6);
    }

    #[test]
    fn p8_only_a_whole_entry_of_the_right_key_is_a_region() {
        let i = inbox(false);
        let key = 7u64 << 12 | 3;
        let first = i.layout.regions / 8 + 3 * REGION_WORDS;
        let entry = [key | OF_DEVICE, 0x5000, 4096, key << 32 | 99];
        for (word, value) in (first..).zip(entry) {
            assert_eq!(i.region(key as u32), None);
            store(&i, word, value);
        }
        let region = PeerRegion { address: 0x5000, bytes: 4096, key: 99, of_device: true };
        assert_eq!(i.region(key as u32), Some(region));
        // A key with that index, of another region.
        assert_eq!((i.region(8 << 12 | 3), i.region(0)), (None, None));
        store(&i, first + 3, (key + 1) << 32 | 99);
        assert_eq!(i.region(key as u32), None);
    }

    #[test]
    fn p8_payload_outside_of_the_mirror_has_no_address() {
        let i = inbox(false);
        assert!(i.payload(0, UNITS as u32).is_some());
        for (unit, units) in [(1, UNITS as u32), (UNITS as u32 + 1, 0), (u32::MAX, u32::MAX)] {
            assert_eq!(i.payload(unit, units), None);
        }
    }
}
