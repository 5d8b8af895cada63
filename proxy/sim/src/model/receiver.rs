//! What a direction's receiver shows: receive records, payloads, signals, counts.

use pushgate_core::journal::Taken;
use pushgate_core::session::count_of;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, inline};
use pushgate_link::ring::{self, Found};

use super::{Flow, Message, Receive, Side, Way};
use crate::memory::word;
use crate::violation::Violation;

const UNIT: usize = abi::PUSHGATE_UNIT as usize;

impl Flow {
    /// All of the first `upto` messages are where they belong, by what lies in the reader's memory.
    pub(super) fn is_delivered(&mut self, upto: u32, reader: &Side) -> Result<(), Violation> {
        while self.receiver.seen < upto {
            let (number, m) = (self.receiver.seen, self.messages[self.receiver.seen as usize]);
            match m.opcode {
                Opcode::Send if m.sends < self.receiver.shown => {}
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
            self.receiver.seen += 1;
        }
        Ok(())
    }

    /// All of the first `upto` messages are at the reader's end: where they belong, but for SENDs after all others, where SENDs may come
    /// before their receives.
    pub(super) fn is_here(&mut self, upto: u32, reader: &Side) -> Result<(), Violation> {
        let waits = |m: &&Message| m.opcode == Opcode::Send && m.sends >= self.receiver.shown;
        let last = self.messages[self.receiver.seen.min(upto) as usize..upto as usize].iter().rev();
        let waiting = if self.ahead == 0 { 0 } else { last.take_while(waits).count() as u32 };
        self.is_delivered(upto - waiting, reader)
    }

    /// P3, P6: each word of the region that a PUT covers is that PUT's or a later one's.
    fn has_landed(&self, number: u32, m: &Message, reader: &Side) -> Result<(), Violation> {
        for i in 0..m.length / 8 {
            let index = m.offset / 8 + i;
            // SAFETY: the model keeps PUTs within the region, which the cluster owns.
            let found = unsafe { word(reader.region + index as usize * 8) };
            let of = (found >> 36) as u32;
            let right = of > number && of <= self.messages.len() as u32 && found == self.word(of - 1, index);
            if !(right || self.bytewise && self.is_mixed(number, index, found)) {
                let why = format_args!("PUT {number} is not there: word {index} of the region is {found:#x}");
                return Err(self.broken(3, why));
            }
        }
        Ok(())
    }

    /// Whether each byte of a word of the region is that of message `number` or of a later one.
    #[cold]
    fn is_mixed(&self, number: u32, index: u32, found: u64) -> bool {
        let words = || (number..self.messages.len() as u32).map(|of| self.word(of, index));
        (0..64).step_by(8).all(|at| words().any(|word| word >> at & 0xff == found >> at & 0xff))
    }

    /// Receive records that the engine has written. P2, P3, P6: each is the next SEND, whole, and its payload is there.
    pub(crate) fn see_records(&mut self, reader: &Side) -> Result<bool, Violation> {
        let mut any = false;
        let mut words = [0; 8];
        loop {
            // The ring has no room for more than the program has yet to give back.
            match ring::look_into(&reader.rx, self.receiver.shown.into(), reader.geometry.rx_log, &mut words)
            {
                Found::Empty => return Ok(any),
                Found::Torn => {
                    return Err(
                        self.broken(2, format_args!("receive record {} is torn", self.receiver.shown))
                    );
                }
                Found::Ready => {}
            }
            let n = self.receiver.shown;
            let Some(number) = self.sends.get(n as usize).copied() else {
                return Err(self.broken(
                    6,
                    format_args!("receive record {n} is there, and {} SENDs were posted", self.sends.len()),
                ));
            };
            if n - self.receiver.released >= 1 << reader.geometry.rx_log {
                return Err(self.broken(
                    4,
                    format_args!(
                        "receive record {n} is there, and {} are given back",
                        self.receiver.released
                    ),
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
                let bytes = inline(&words, Opcode::Send);
                self.is_payload(3, number, &bytes[..m.length as usize])?;
            } else {
                self.check_payload(3, number, flags, record.place, reader)?;
            }
            self.receiver.shown += 1;
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
        let found = self.receiver.receives[self.receiver.first_free..]
            .iter()
            .position(fits)
            .map(|at| self.receiver.first_free + at);
        if found != Some(place as usize) {
            return Err(self
                .broken(6, format_args!("SEND {n} of tag {tag} took receive {place}, expected {found:?}")));
        }
        self.receiver.receives[place as usize].taken = true;
        while self.receiver.receives.get(self.receiver.first_free).is_some_and(|r| r.taken) {
            self.receiver.first_free += 1;
        }
        self.receiver.took.push(place);
        Ok(())
    }

    /// Compares the payload of a SEND where the record says that it lies.
    pub(crate) fn check_payload(
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
            let receive = self.receiver.receives[place as usize];
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
    pub(crate) fn see_signals(&mut self, reader: &Side) -> Result<bool, Violation> {
        let mut any = false;
        for i in 0..self.receiver.signals.len() {
            let (value, before) = (ring::observe(&reader.signals[i]), self.receiver.signals[i]);
            if value == before {
                continue;
            }
            let message = value.checked_sub(1).and_then(|number| self.messages.get(number as usize));
            if value < before || message.is_none_or(|m| m.signal != Some(i as u32)) {
                return Err(
                    self.broken(6, format_args!("signal {i} goes from {before} to {value}: {message:?}"))
                );
            }
            self.receiver.signals[i] = value;
            any = true;
            self.is_delivered(value as u32, reader)?;
        }
        Ok(any)
    }

    /// Over `local`, the counts that the receiver publishes. P4, P5: they cover nothing that is not so.
    pub(crate) fn see_counts(&mut self, reader: &Side) -> Result<bool, Violation> {
        let Some(link) = &reader.link else { return Ok(false) };
        let counts = [0, 1, 2].map(|i| match count_of(ring::observe(&link[i]), 0) {
            // A link that has just begun knows no counts yet.
            None | Some(0) => self.receiver.link[i],
            Some(count) => count,
        });
        if counts == self.receiver.link {
            return Ok(false);
        }
        let [received, released, granted] = counts;
        if counts.iter().zip(self.receiver.link).any(|(new, old)| *new < old) || released > received {
            return Err(self.broken(
                5,
                format_args!("the published counts go from {:?} to {counts:?}", self.receiver.link),
            ));
        }
        if received > self.messages.len() as u64 {
            return Err(
                self.broken(5, format_args!("{received} messages are received of {}", self.messages.len()))
            );
        }
        self.is_delivered(received as u32, reader)?;
        // Those given back come in order, so the last one that was read in place speaks for all of them.
        let held =
            self.sends.get(self.receiver.released as usize..self.receiver.shown as usize).unwrap_or_default();
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
        self.receiver.link = counts;
        Ok(true)
    }

    /// Messages that the reader's device, or the sender, has been told of.
    pub(crate) fn told(&self) -> u64 {
        let shown = self.receiver.shown.checked_sub(1).map_or(0, |n| self.sends[n as usize] as u64 + 1);
        self.receiver.signals.iter().fold(shown.max(self.receiver.link[0]), |told, signal| told.max(*signal))
    }

    /// P6: what the reader's session segment says has arrived. It covers the signals that are written and the counts that the
    /// sender was told, and all of it is in its place: but for the last signal, which is written after that line.
    pub(crate) fn see_journal_of_receiver(&mut self, taken: &Taken, reader: &Side) -> Result<(), Violation> {
        let Taken { received, shown, signal } = *taken;
        let told = self.receiver.signals.iter().copied().max().unwrap_or(0).max(self.receiver.link[0]);
        if received == self.deaths.kept.1 && told <= received {
            return Ok(());
        }
        let posted = self.messages.get(..received as usize);
        let sends = posted.map(|all| all.iter().filter(|m| m.opcode == Opcode::Send).count() as u64);
        let known = signal.is_none_or(|(index, value)| {
            value <= received
                && value
                    .checked_sub(1)
                    .and_then(|n| self.messages.get(n as usize))
                    .is_some_and(|m| m.signal == Some(index))
        });
        if sends != Some(shown)
            || shown > self.receiver.shown.into()
            || !known
            || received < told.max(self.deaths.kept.1)
        {
            let why = format_args!(
                "the session segment says {taken:?}; {} messages are posted, {} SENDs shown, {told} messages told, and it \
                 said {} before",
                self.messages.len(),
                self.receiver.shown,
                self.deaths.kept.1
            );
            return Err(self.broken(6, why));
        }
        self.deaths.kept.1 = received;
        let unwritten = signal.is_some_and(|(index, value)| {
            value == received && ring::observe(&reader.signals[index as usize]) < value
        });
        self.is_delivered(received as u32 - unwritten as u32, reader)
    }

    /// Receives that the reader has at most granted.
    pub(super) fn may_grant(&self, reader: &Side) -> u64 {
        match self.posts {
            true => self.receiver.receives.len() as u64 + self.ahead,
            false => self.receiver.released as u64 + (1 << reader.geometry.rx_log),
        }
    }

    /// P6: at the end the region holds each word of the last PUT that covers it, and nothing else.
    pub(crate) fn check_region(&self, reader: &Side) -> Result<(), Violation> {
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
}

/// The flags that only receive records have are none of a WQE's, so `Record::decode` does not take them.
fn with_receive_flags(words: &[u64; 8]) -> [u64; 8] {
    let mut words = *words;
    words[0] &= !(((Record::LANDING | Record::BUFFER) as u64) << abi::PUSHGATE_FLAGS_SHIFT);
    words
}
