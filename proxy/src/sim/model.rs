//! What a run must look like: one direction of a queue pair as its sender's program posted it, kept apart from the code
//! under test. Every word that an engine publishes, and every payload that it shows, is compared with this.
//!
//! A payload is a function of its direction and its message's number, word by word, so each word tells where it belongs.

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_driver_shim::segment::Geometry;

use super::memory::word;
use super::{Violation, broken};
use crate::memory::Words;
use crate::producer::{Completion, Reservation};
use crate::ring::{self, Found};
use crate::session::count_of;

const UNIT: usize = abi::PUSHGATE_UNIT as usize;
const CURSOR: u64 = abi::PUSHGATE_CURSOR_MASK as u64;

/// Where a message's payload is when it is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Window,
    Inline,
    Region,
}

/// A message that was posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) opcode: Opcode,
    pub(super) way: Way,
    pub(super) length: u32,
    pub(super) tag: u32,
    /// SENDs before it.
    pub(super) sends: u32,
    /// In the window: its first unit.
    pub(super) place: u32,
    /// PUT: where it goes in the peer's region, bytes.
    pub(super) offset: u32,
    /// The signal that follows it.
    pub(super) signal: Option<u32>,
    /// SEND, once shown: the reader reads it in the sender's window.
    pub(super) in_place: bool,
}

/// A WQE slot that was taken.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Units of the window, padding included, up to and with this slot.
    units_after: u64,
    messages_after: u32,
    sends_after: u32,
    signaled: bool,
    opcode: u8,
    wr_id: u32,
    length: u32,
}

/// A receive that the reader has posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receive {
    pub(super) tag: u32,
    pub(super) buffer: u16,
    pub(super) length: u32,
    taken: bool,
}

/// What the checks read of one end: its control words, and where payload lies.
pub(super) struct Side {
    pub(super) rank: u32,
    pub(super) geometry: Geometry,
    /// CREDIT, STATUS, DELIVERED.
    pub(super) line: Words,
    pub(super) signals: Words,
    pub(super) rx: Words,
    /// Over `local`: what this end publishes to the peer. RECEIVED, RELEASED, GRANTED.
    pub(super) link: Option<Words>,
    /// Where this end reads payload of the peer's window, of its landing ring, of its buffers.
    pub(super) inbound: usize,
    pub(super) landing: usize,
    pub(super) buffers: usize,
    /// Bytes of a buffer.
    pub(super) buffer: usize,
    /// The region that the peer puts to.
    pub(super) region: usize,
}

/// One direction of a queue pair.
pub(super) struct Flow {
    id: u16,
    /// The queue pair's number and both ranks, for sentences.
    name: String,
    geometry: Geometry,
    slots: Vec<Slot>,
    pub(super) messages: Vec<Message>,
    /// The messages that are SENDs.
    sends: Vec<u32>,
    /// For each word of the peer's region, one more than the last PUT that covers it.
    last: Vec<u32>,
    /// The greatest value of each signal that a message carries so far.
    signaled: Vec<u64>,
    // What the sender's side has shown.
    credit: u64,
    credit_units: u64,
    delivered: u64,
    cq_head: usize,
    /// CQEs reserved and polled.
    cqes: (u64, u64),
    /// Once the sender's end is shown: completions that must come.
    due: u64,
    // What the receiver's side has shown.
    /// Messages that are known to be where they belong.
    pub(super) seen: u32,
    /// SENDs that were shown, taken by the program, and given back.
    pub(super) shown: u32,
    pub(super) taken: u32,
    pub(super) released: u32,
    signals: Vec<u64>,
    link: [u64; 3],
    /// Receives that the reader has posted, and the first that no message has taken.
    pub(super) receives: Vec<Receive>,
    first_free: usize,
    /// For each SEND that was shown: the posted receive that it took.
    pub(super) took: Vec<u32>,
    posts: bool,
}

impl Flow {
    /// A direction from an end of `geometry` to a reader that has `peer_signals` signals and a region of `region` bytes.
    /// `posts`: its SENDs go to posted receives.
    pub(super) fn new(
        id: u16,
        name: String,
        geometry: Geometry,
        messages: usize,
        peer_signals: usize,
        region: usize,
        posts: bool,
    ) -> Self {
        Flow {
            id,
            name,
            geometry,
            slots: Vec::with_capacity(2 * messages + 64),
            messages: Vec::with_capacity(messages),
            sends: Vec::with_capacity(messages),
            last: vec![0; region / 8],
            signaled: vec![0; peer_signals],
            credit: 0,
            credit_units: 0,
            delivered: 0,
            cq_head: 0,
            cqes: (0, 0),
            due: 0,
            seen: 0,
            shown: 0,
            taken: 0,
            released: 0,
            signals: vec![0; peer_signals],
            link: [0; 3],
            receives: Vec::with_capacity(if posts { messages + 64 } else { 0 }),
            first_free: 0,
            took: Vec::with_capacity(if posts { messages } else { 0 }),
            posts,
        }
    }

    /// The words of a payload: of message `number`, word `index` of the payload or, for a PUT, of the region.
    pub(super) fn word(&self, number: u32, index: u32) -> u64 {
        (number as u64 + 1) << 36 | (self.id as u64) << 20 | index as u64 & 0xf_ffff
    }

    /// Writes the payload of message `number` to `to`.
    pub(super) fn fill(&self, number: u32, first: u32, to: &mut [u8]) {
        for (i, bytes) in to.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&self.word(number, first + i as u32).to_le_bytes()[..bytes.len()]);
        }
    }

    #[cold]
    fn broken(&self, promise: u8, what: impl std::fmt::Display) -> Violation {
        broken(promise, format!("{}: {what}", self.name))
    }

    /// The number, among all messages, of a SEND.
    pub(super) fn number_of_send(&self, send: u32) -> u32 {
        self.sends[send as usize]
    }

    /// SENDs posted so far.
    pub(super) fn sends(&self) -> u32 {
        self.sends.len() as u32
    }

    /// Slots taken so far.
    pub(super) fn taken_slots(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Slots that were given back, as the checks have seen.
    pub(super) fn credit(&self) -> u64 {
        self.credit
    }

    // ------------------------------------------------------------ the sender

    /// Where the rule of abi.h places a payload of `units`, and the units taken behind it.
    fn place(&self, units: u64) -> (u64, u64) {
        let taken = self.slots.last().map_or(0, |s| s.units_after);
        let ring = 1u64 << self.geometry.window_log;
        let pos = taken & (ring - 1);
        match units {
            0 => (0, taken),
            _ if pos + units <= ring => (pos, taken + units),
            _ => (0, taken + (ring - pos) + units),
        }
    }

    /// P1: what was taken lies within what was given back.
    fn take(&mut self, slot: Slot) -> Result<(), Violation> {
        let (slots, ring) = (1u64 << self.geometry.slots_log, 1u64 << self.geometry.window_log);
        let number = self.slots.len() as u64;
        if number - self.credit >= slots {
            return Err(
                self.broken(1, format_args!("slot {number} is taken, and {} are given back", self.credit))
            );
        }
        if slot.units_after - self.credit_units > ring {
            let why = format_args!(
                "slot {number} takes units up to {} of a window of {ring}, and {} are given back",
                slot.units_after, self.credit_units
            );
            return Err(self.broken(1, why));
        }
        self.slots.push(slot);
        Ok(())
    }

    /// The producer has given the window's end away with a NOP of its own.
    pub(super) fn padded(&mut self) -> Result<(), Violation> {
        let ring = 1u64 << self.geometry.window_log;
        let last = self.slots.last().copied();
        let taken = last.map_or(0, |s| s.units_after);
        let nop = Slot {
            units_after: taken + ring - (taken & (ring - 1)),
            messages_after: last.map_or(0, |s| s.messages_after),
            sends_after: last.map_or(0, |s| s.sends_after),
            signaled: false,
            opcode: Opcode::Nop as u8,
            wr_id: 0,
            length: 0,
        };
        self.take(nop)
    }

    /// The producer has reserved a slot with `units` for `message`, or for a NOP.
    pub(super) fn reserved(
        &mut self,
        at: Reservation,
        units: u64,
        message: Option<Message>,
        signaled: bool,
        wr_id: u32,
    ) -> Result<(), Violation> {
        let (place, units_after) = self.place(units);
        let number = self.slots.len() as u64;
        if (at.slot, at.place) != (number, place) {
            let why = format!(
                "slot {} at unit {} was reserved, expected slot {number} at unit {place}",
                at.slot, at.place
            );
            return Err(self.broken(1, why));
        }
        self.cqes.0 += signaled as u64;
        if self.cqes.0 - self.cqes.1 > 1 << self.geometry.cq_log {
            return Err(self.broken(
                1,
                format_args!("{} CQEs are reserved and {} were polled", self.cqes.0, self.cqes.1),
            ));
        }
        let is_send = message.is_some_and(|m| m.opcode == Opcode::Send);
        let slot = Slot {
            units_after,
            messages_after: self.messages.len() as u32 + message.is_some() as u32,
            sends_after: self.sends.len() as u32 + is_send as u32,
            signaled,
            opcode: message.map_or(Opcode::Nop, |m| m.opcode) as u8,
            wr_id,
            length: message.map_or(0, |m| m.length),
        };
        self.take(slot)?;
        let Some(m) = message else { return Ok(()) };
        let seq = self.messages.len() as u32;
        if is_send {
            self.sends.push(seq);
        }
        if m.opcode == Opcode::Put {
            let first = m.offset as usize / 8;
            self.last[first..first + m.length as usize / 8].fill(seq + 1);
        }
        if let Some(signal) = m.signal {
            self.signaled[signal as usize] = seq as u64 + 1;
        }
        self.messages.push(Message { place: at.place as u32, ..m });
        Ok(())
    }

    /// A message to be posted: its number is how many there were.
    pub(super) fn message(opcode: Opcode, way: Way, length: u32) -> Message {
        Message { opcode, way, length, tag: 0, sends: 0, place: 0, offset: 0, signal: None, in_place: false }
    }

    /// The credit word as published. P5: what it gives back is where it belongs and nobody reads it any more. P1: it gives
    /// back no more than was taken, and whole slots. `head`: slots that the engine has taken.
    pub(super) fn see_credit(&mut self, side: &Side, reader: &Side, head: u64) -> Result<bool, Violation> {
        let credit = ring::observe(&side.line[0]);
        let to = self.credit + ((credit >> abi::PUSHGATE_CURSOR_BITS).wrapping_sub(self.credit) & CURSOR);
        if to == self.credit && credit & CURSOR == self.credit_units & CURSOR {
            return Ok(false);
        }
        if to > self.slots.len() as u64 || to > head {
            let why =
                format_args!("slot {to} is given back; {} were taken, and {head} posted", self.slots.len());
            return Err(self.broken(1, why));
        }
        for slot in self.credit..to {
            let s = self.slots[slot as usize];
            let before = if slot == 0 { 0 } else { self.slots[slot as usize - 1].messages_after };
            if s.messages_after == before {
                continue;
            }
            let m = self.messages[before as usize];
            self.is_delivered(s.messages_after, reader).map_err(|e| Violation {
                promise: 5,
                sentence: format!("slot {slot} is given back before its message has arrived: {}", e.sentence),
            })?;
            if self.messages[before as usize].in_place && m.sends >= self.released {
                let why = format_args!(
                    "slot {slot} is given back, and the reader still reads SEND {} there",
                    m.sends
                );
                return Err(self.broken(5, why));
            }
        }
        let units = if to == 0 { 0 } else { self.slots[to as usize - 1].units_after };
        if credit & CURSOR != units & CURSOR {
            let why =
                format_args!("{} units are given back with {to} slots, which hold {units}", credit & CURSOR);
            return Err(self.broken(1, why));
        }
        (self.credit, self.credit_units) = (to, units);
        Ok(true)
    }

    /// The count of slots whose messages the peer has.
    pub(super) fn see_delivered(&mut self, side: &Side, reader: &Side) -> Result<bool, Violation> {
        let delivered = ring::observe(&side.line[2]);
        if delivered == self.delivered {
            return Ok(false);
        }
        if delivered < self.delivered || delivered > self.slots.len() as u64 {
            let why =
                format_args!("DELIVERED goes from {} to {delivered} of {}", self.delivered, self.slots.len());
            return Err(self.broken(5, why));
        }
        self.is_delivered(self.slots[delivered as usize - 1].messages_after, reader)?;
        self.delivered = delivered;
        Ok(true)
    }

    /// A completion that the program has polled. P5, P6: those of signaled slots come in order, each once; with success
    /// once the slot is free. `ended`: the status with which the queue pair ended, if it has.
    pub(super) fn completed(&mut self, c: Completion, ended: Option<u8>) -> Result<(), Violation> {
        while self.slots.get(self.cq_head).is_some_and(|s| !s.signaled) {
            self.cq_head += 1;
        }
        let Some(s) = self.slots.get(self.cq_head).copied() else {
            return Err(self.broken(6, format_args!("a completion that nobody asked for: {c:?}")));
        };
        let slot = self.cq_head as u64;
        if (c.wr_id, c.opcode, c.length) != (s.wr_id, s.opcode, s.length) {
            return Err(self.broken(6, format_args!("{c:?} is not that of slot {slot}: {s:?}")));
        }
        let ok = c.status as u32 == abi::PUSHGATE_OK;
        if ok && slot >= self.credit {
            return Err(
                self.broken(5, format_args!("slot {slot} completes, and {} are given back", self.credit))
            );
        }
        if !ok && ended != Some(c.status) {
            return Err(self.broken(
                7,
                format_args!("slot {slot} completes with status {}, the queue pair has {ended:?}", c.status),
            ));
        }
        self.cq_head += 1;
        self.cqes.1 += 1;
        Ok(())
    }

    /// All completions that were asked for have come.
    fn all_completed(&self) -> bool {
        self.cqes.0 == self.cqes.1
    }

    /// The sender's end is shown, and its program had published the first `published` slots without a hole.
    pub(super) fn end(&mut self, published: u64) {
        self.due = self.slots[..published as usize].iter().filter(|s| s.signaled).count() as u64;
    }

    /// All completions that are due behind the sender's end have come.
    pub(super) fn is_over(&self) -> bool {
        self.cqes.1 >= self.due
    }

    /// Slots, messages and SENDs that an engine has posted which has taken `head` slots.
    pub(super) fn posted(&self, head: u64) -> (u64, u64) {
        match head {
            0 => (0, 0),
            _ => self
                .slots
                .get(head as usize - 1)
                .map_or((u64::MAX, 0), |s| (s.messages_after.into(), s.sends_after.into())),
        }
    }

    // ---------------------------------------------------------- the receiver

    /// All of the first `upto` messages are where they belong, by what lies in the reader's memory.
    fn is_delivered(&mut self, upto: u32, reader: &Side) -> Result<(), Violation> {
        while self.seen < upto {
            let (number, m) = (self.seen, self.messages[self.seen as usize]);
            match m.opcode {
                Opcode::Send if m.sends < self.shown => {}
                Opcode::Send => {
                    return Err(
                        self.broken(6, format_args!("SEND {} (message {number}) was not shown", m.sends))
                    );
                }
                Opcode::Put => self.has_landed(number, &m, reader)?,
                _ => {}
            }
            if let Some(signal) = m.signal
                && ring::observe(&reader.signals[signal as usize]) <= number as u64
            {
                return Err(
                    self.broken(6, format_args!("signal {signal} of message {number} was not written"))
                );
            }
            self.seen += 1;
        }
        Ok(())
    }

    /// P3, P6: each word of the region that a PUT covers is that PUT's or a later one's.
    fn has_landed(&self, number: u32, m: &Message, reader: &Side) -> Result<(), Violation> {
        for i in 0..m.length / 8 {
            let index = m.offset / 8 + i;
            // SAFETY: the model keeps PUTs within the region, which the cluster owns.
            let found = unsafe { word(reader.region + index as usize * 8) };
            let of = (found >> 36) as u32;
            let right = of > number && of <= self.messages.len() as u32 && found == self.word(of - 1, index);
            if !right {
                let why = format_args!("PUT {number} is not there: word {index} of the region is {found:#x}");
                return Err(self.broken(3, why));
            }
        }
        Ok(())
    }

    /// Receive records that the engine has written. P2, P3, P6: each is the next SEND, whole, and its payload is there.
    pub(super) fn see_records(&mut self, reader: &Side) -> Result<bool, Violation> {
        let mut any = false;
        let mut words = [0; 8];
        loop {
            // The ring has no room for more than the program has yet to give back.
            match ring::look_into(&reader.rx, self.shown.into(), reader.geometry.rx_log, &mut words) {
                Found::Empty => return Ok(any),
                Found::Torn => {
                    return Err(self.broken(2, format_args!("receive record {} is torn", self.shown)));
                }
                Found::Ready => {}
            }
            let n = self.shown;
            let Some(number) = self.sends.get(n as usize).copied() else {
                return Err(self.broken(
                    6,
                    format_args!("receive record {n} is there, and {} SENDs were posted", self.sends.len()),
                ));
            };
            if n - self.released >= 1 << reader.geometry.rx_log {
                return Err(self.broken(
                    4,
                    format_args!("receive record {n} is there, and {} are given back", self.released),
                ));
            }
            let record = match Record::decode(&with_receive_flags(&words)) {
                Ok(record) => record,
                Err(e) => return Err(self.broken(2, format_args!("receive record {n}: {e}"))),
            };
            let m = self.messages[number as usize];
            let right = record.opcode == Opcode::Send
                && record.id == number
                && (record.length, record.tag) == (m.length, m.tag);
            if !right {
                return Err(self.broken(
                    6,
                    format_args!("receive record {n} is {record:?}, expected message {number}: {m:?}"),
                ));
            }
            self.is_delivered(number, reader)?;
            let flags = (words[0] >> abi::PUSHGATE_FLAGS_SHIFT) as u8;
            self.matched(n, number, flags, record.place)?;
            if flags & (Record::INLINE | Record::LANDING | Record::BUFFER) == 0 && m.length > 0 {
                self.messages[number as usize].in_place = true;
                if m.way != Way::Window || record.place != m.place {
                    let why =
                        format_args!("SEND {n} is said to lie at unit {}, expected {m:?}", record.place);
                    return Err(self.broken(6, why));
                }
            }
            if flags & Record::INLINE != 0 {
                let bytes = pushgate_driver_shim::record::inline(&words, Opcode::Send);
                self.is_payload(3, number, &bytes[..m.length as usize])?;
            } else {
                self.check_payload(3, number, flags, record.place, reader)?;
            }
            self.shown += 1;
            self.is_delivered(number + 1, reader)?;
            any = true;
        }
    }

    /// P6: a SEND takes the oldest posted receive that fits.
    fn matched(&mut self, n: u32, number: u32, flags: u8, place: u32) -> Result<(), Violation> {
        if (flags & Record::BUFFER != 0) != self.posts {
            return Err(self
                .broken(6, format_args!("SEND {n} has flags {flags:#x}; posted receives: {}", self.posts)));
        }
        if !self.posts {
            return Ok(());
        }
        let tag = self.messages[number as usize].tag;
        let fits = |r: &Receive| !r.taken && (r.tag == tag || r.tag == abi::PUSHGATE_ANY_TAG);
        let found = self.receives[self.first_free..].iter().position(fits).map(|at| self.first_free + at);
        if found != Some(place as usize) {
            return Err(self
                .broken(6, format_args!("SEND {n} of tag {tag} took receive {place}, expected {found:?}")));
        }
        self.receives[place as usize].taken = true;
        while self.receives.get(self.first_free).is_some_and(|r| r.taken) {
            self.first_free += 1;
        }
        self.took.push(place);
        Ok(())
    }

    /// Compares the payload of a SEND where the record says that it lies.
    pub(super) fn check_payload(
        &self,
        promise: u8,
        number: u32,
        flags: u8,
        place: u32,
        reader: &Side,
    ) -> Result<(), Violation> {
        let length = self.messages[number as usize].length as usize;
        if length == 0 {
            return Ok(());
        }
        let unit = place as usize * UNIT;
        let (at, room) = if flags & Record::BUFFER != 0 {
            let receive = self.receives[place as usize];
            (reader.buffers + receive.buffer as usize * reader.buffer, receive.length as usize)
        } else if flags & Record::LANDING != 0 {
            (
                reader.landing + unit,
                (UNIT << reader.geometry.landing_log) - unit.min(UNIT << reader.geometry.landing_log),
            )
        } else {
            (
                reader.inbound + unit,
                (UNIT << self.geometry.window_log) - unit.min(UNIT << self.geometry.window_log),
            )
        };
        if room < length {
            return Err(self.broken(
                8,
                format_args!("SEND {number} of {length} bytes is said to lie at {place}, flags {flags:#x}"),
            ));
        }
        // SAFETY: the stretch lies in the memory that was just named, by the test above; the cluster owns it, and nothing
        // writes while this runs.
        self.is_payload(promise, number, unsafe { std::slice::from_raw_parts(at as *const u8, length) })
    }

    fn is_payload(&self, promise: u8, number: u32, found: &[u8]) -> Result<(), Violation> {
        let (whole, rest) = found.as_chunks::<8>();
        let wrong = whole
            .iter()
            .enumerate()
            .find(|(i, bytes)| u64::from_le_bytes(**bytes) != self.word(number, *i as u32));
        if let Some((i, bytes)) = wrong {
            let found = u64::from_le_bytes(*bytes);
            return Err(
                self.broken(promise, format_args!("word {i} of message {number}'s payload is {found:#x}"))
            );
        }
        if rest != &self.word(number, whole.len() as u32).to_le_bytes()[..rest.len()] {
            return Err(self.broken(
                promise,
                format_args!("the last bytes of message {number}'s payload are {rest:x?}"),
            ));
        }
        Ok(())
    }

    /// Signals that the engine has written. P3, P6: all that a signal covers is there; it grows, and only to what was posted.
    pub(super) fn see_signals(&mut self, reader: &Side) -> Result<bool, Violation> {
        let mut any = false;
        for i in 0..self.signals.len() {
            let (value, before) = (ring::observe(&reader.signals[i]), self.signals[i]);
            if value == before {
                continue;
            }
            let message = value.checked_sub(1).and_then(|number| self.messages.get(number as usize));
            if value < before || message.is_none_or(|m| m.signal != Some(i as u32)) {
                return Err(
                    self.broken(6, format_args!("signal {i} goes from {before} to {value}: {message:?}"))
                );
            }
            self.signals[i] = value;
            any = true;
            self.is_delivered(value as u32, reader)?;
        }
        Ok(any)
    }

    /// Over `local`, the counts that the receiver publishes. P4, P5: they cover nothing that is not so.
    pub(super) fn see_counts(&mut self, reader: &Side) -> Result<bool, Violation> {
        let Some(link) = &reader.link else { return Ok(false) };
        let counts = [0, 1, 2].map(|i| count_of(ring::observe(&link[i]), 0).unwrap_or(0));
        if counts == self.link {
            return Ok(false);
        }
        let [received, released, granted] = counts;
        if counts.iter().zip(self.link).any(|(new, old)| *new < old) || released > received {
            return Err(
                self.broken(5, format_args!("the published counts go from {:?} to {counts:?}", self.link))
            );
        }
        if received > self.messages.len() as u64 {
            return Err(
                self.broken(5, format_args!("{received} messages are received of {}", self.messages.len()))
            );
        }
        self.is_delivered(received as u32, reader)?;
        // Those given back come in order, so the last one that was read in place speaks for all of them.
        let held = self.sends.get(self.released as usize..self.shown as usize).unwrap_or_default();
        if let Some(number) = held.iter().find(|n| self.messages[**n as usize].in_place)
            && released > *number as u64
        {
            return Err(self.broken(
                5,
                format_args!("{released} messages are released, and message {number} is still read"),
            ));
        }
        if granted > self.may_grant(reader) {
            return Err(
                self.broken(4, format_args!("{granted} receives are granted of {}", self.may_grant(reader)))
            );
        }
        self.link = counts;
        Ok(true)
    }

    /// Receives that the reader has at most granted.
    fn may_grant(&self, reader: &Side) -> u64 {
        match self.posts {
            true => self.receives.len() as u64,
            false => self.released as u64 + (1 << reader.geometry.rx_log),
        }
    }

    /// P4: what the gate has lent, by what the model knows. `head`: slots that the engine has taken; `in_flight`: work
    /// requests that hold slots; `left` and `granted`: receives. `exact`: the link has no completions of its own, so that
    /// the messages that the peer has, `received`, are the completed ones.
    pub(super) fn see_gate(
        &self,
        reader: &Side,
        head: u64,
        (in_flight, received): (u64, u64),
        (left, granted): (u64, u64),
        exact: bool,
    ) -> Result<(), Violation> {
        let (messages, sends) = self.posted(head);
        if messages == u64::MAX {
            return Err(self.broken(1, format_args!("{head} slots are posted of {}", self.slots.len())));
        }
        if granted > self.may_grant(reader) {
            return Err(self.broken(
                4,
                format_args!(
                    "the gate knows {granted} receives, the reader has granted {}",
                    self.may_grant(reader)
                ),
            ));
        }
        if sends > granted || left != granted - sends {
            return Err(self.broken(
                4,
                format_args!("{sends} SENDs are posted with {granted} receives, {left} of them left"),
            ));
        }
        let expected = messages.saturating_sub(received);
        if exact && in_flight != expected || in_flight < expected || in_flight > messages {
            let why = format_args!(
                "{in_flight} work requests hold slots; {messages} messages are posted, the peer has {received}"
            );
            return Err(self.broken(4, why));
        }
        Ok(())
    }

    /// Everything was posted, has arrived, was given back and has completed.
    pub(super) fn is_finished(&self) -> bool {
        self.seen as usize == self.messages.len()
            && self.credit == self.slots.len() as u64
            && self.released as usize == self.sends.len()
            && self.all_completed()
    }

    /// P6: at the end the region holds each word of the last PUT that covers it, and nothing else.
    pub(super) fn check_region(&self, reader: &Side) -> Result<(), Violation> {
        for (i, last) in self.last.iter().enumerate() {
            // SAFETY: the region has as many words, and the cluster owns it.
            let found = unsafe { word(reader.region + i * 8) };
            let expected = if *last == 0 { 0 } else { self.word(last - 1, i as u32) };
            if found != expected {
                return Err(self.broken(
                    6,
                    format_args!("at the end word {i} of the region is {found:#x}, expected {expected:#x}"),
                ));
            }
        }
        for (i, last) in self.signaled.iter().enumerate() {
            let found = ring::observe(&reader.signals[i]);
            if found != *last {
                return Err(self.broken(6, format_args!("at the end signal {i} is {found}, expected {last}")));
            }
        }
        Ok(())
    }

    /// What is not finished, for sentences.
    pub(super) fn state(&self) -> String {
        format!(
            "{}: {} messages posted, {} arrived; {} of {} slots given back; {} SENDs: {} shown, {} given back; {} of {} \
             completions polled; {} receives posted",
            self.name,
            self.messages.len(),
            self.seen,
            self.credit,
            self.slots.len(),
            self.sends.len(),
            self.shown,
            self.released,
            self.cqes.1,
            self.cqes.0,
            self.receives.len()
        )
    }
}

impl Receive {
    /// A receive into a buffer.
    pub(super) fn new(tag: u32, buffer: u16, length: u32) -> Self {
        Receive { tag, buffer, length, taken: false }
    }
}

/// The flags that only receive records have are none of a WQE's, so `Record::decode` does not take them.
fn with_receive_flags(words: &[u64; 8]) -> [u64; 8] {
    let mut words = *words;
    words[0] &= !(((Record::LANDING | Record::BUFFER) as u64) << abi::PUSHGATE_FLAGS_SHIFT);
    words
}
