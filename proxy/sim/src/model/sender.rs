//! What a direction's sender does and shows: slots that its program takes, slots that are given back, completions, and
//! what the gate has lent.

use pushgate_core::journal::Sent;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::Opcode;
use pushgate_link::producer::{Completion, Reservation};
use pushgate_link::ring;

use super::{Flow, Message, Side, Slot};
use crate::violation::Violation;

const CURSOR: u64 = abi::PUSHGATE_CURSOR_MASK as u64;

impl Flow {
    /// Where the rule of abi.h places a payload of `units`, and the units taken after it.
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
        if number - self.sender.credit >= slots {
            return Err(self.broken(
                1,
                format_args!("slot {number} is taken, and {} are given back", self.sender.credit),
            ));
        }
        if slot.units_after - self.sender.credit_units > ring {
            let why = format_args!(
                "slot {number} takes units up to {} of a window of {ring}, and {} are given back",
                slot.units_after, self.sender.credit_units
            );
            return Err(self.broken(1, why));
        }
        self.slots.push(slot);
        Ok(())
    }

    /// The producer has given the window's end away with a NOP of its own.
    pub(crate) fn padded(&mut self) -> Result<(), Violation> {
        let ring = 1u64 << self.geometry.window_log;
        let last = self.slots.last().copied();
        let taken = last.map_or(0, |s| s.units_after);
        let nop = Slot {
            units_after: taken + ring - (taken & (ring - 1)),
            messages_after: last.map_or(0, |s| s.messages_after),
            sends_after: last.map_or(0, |s| s.sends_after),
            completions_after: last.map_or(0, |s| s.completions_after),
            signaled: false,
            opcode: Opcode::Nop as u8,
            wr_id: 0,
            length: 0,
        };
        self.take(nop)
    }

    /// The producer has reserved a slot with `units` for `message`, or for a NOP.
    pub(crate) fn reserved(
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
        self.sender.cqes.0 += signaled as u64;
        if self.sender.cqes.0 - self.sender.cqes.1 > 1 << self.geometry.cq_log {
            return Err(self.broken(
                1,
                format_args!(
                    "{} CQEs are reserved and {} were polled",
                    self.sender.cqes.0, self.sender.cqes.1
                ),
            ));
        }
        let is_send = message.is_some_and(|m| m.opcode == Opcode::Send);
        let slot = Slot {
            units_after,
            messages_after: self.messages.len() as u32 + message.is_some() as u32,
            sends_after: self.sends.len() as u32 + is_send as u32,
            completions_after: self.sender.cqes.0,
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

    /// The credit word as published. P5: what it gives back is where it belongs and nobody reads it any more. P1: it gives
    /// back no more than was taken, and whole slots. `head`: slots that the engine has taken.
    pub(crate) fn see_credit(&mut self, side: &Side, reader: &Side, head: u64) -> Result<bool, Violation> {
        let credit = ring::observe(&side.line[0]);
        let to = self.sender.credit
            + ((credit >> abi::PUSHGATE_CURSOR_BITS).wrapping_sub(self.sender.credit) & CURSOR);
        if to == self.sender.credit && credit & CURSOR == self.sender.credit_units & CURSOR {
            return Ok(false);
        }
        if to > self.slots.len() as u64 || to > head {
            let why =
                format_args!("slot {to} is given back; {} were taken, and {head} posted", self.slots.len());
            return Err(self.broken(1, why));
        }
        for slot in self.sender.credit..to {
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
            if self.messages[before as usize].in_place && m.sends >= self.receiver.released {
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
        (self.sender.credit, self.sender.credit_units) = (to, units);
        Ok(true)
    }

    /// The count of slots whose messages the peer has.
    pub(crate) fn see_delivered(&mut self, side: &Side, reader: &Side) -> Result<bool, Violation> {
        let delivered = ring::observe(&side.line[2]);
        if delivered == self.sender.delivered {
            return Ok(false);
        }
        if delivered < self.sender.delivered || delivered > self.slots.len() as u64 {
            let why = format_args!(
                "DELIVERED goes from {} to {delivered} of {}",
                self.sender.delivered,
                self.slots.len()
            );
            return Err(self.broken(5, why));
        }
        self.is_here(self.slots[delivered as usize - 1].messages_after, reader)?;
        self.sender.delivered = delivered;
        Ok(true)
    }

    /// A completion that the program has polled. P5, P6: those of signaled slots come in order, each once; with success
    /// once the slot is free. `ended`: the status with which the queue pair ended, if it has.
    pub(crate) fn completed(&mut self, c: Completion, ended: Option<u8>) -> Result<(), Violation> {
        while self.slots.get(self.sender.cq_head).is_some_and(|s| !s.signaled) {
            self.sender.cq_head += 1;
        }
        let Some(s) = self.slots.get(self.sender.cq_head).copied() else {
            return Err(self.broken(6, format_args!("a completion that nobody asked for: {c:?}")));
        };
        let slot = self.sender.cq_head as u64;
        if (c.wr_id, c.opcode, c.length) != (s.wr_id, s.opcode, s.length) {
            return Err(self.broken(6, format_args!("{c:?} is not that of slot {slot}: {s:?}")));
        }
        let ok = c.status as u32 == abi::PUSHGATE_OK;
        // An engine may have died between a completion and the credit.
        let before_credit = self.deaths.died && s.messages_after <= self.receiver.seen;
        if ok && slot >= self.sender.credit && !before_credit {
            return Err(self.broken(
                5,
                format_args!("slot {slot} completes, and {} are given back", self.sender.credit),
            ));
        }
        // Or between a completion and the status.
        if !ok && ended != Some(c.status) && !self.deaths.ending {
            return Err(self.broken(
                7,
                format_args!("slot {slot} completes with status {}, the queue pair has {ended:?}", c.status),
            ));
        }
        self.sender.cq_head += 1;
        self.sender.cqes.1 += 1;
        Ok(())
    }

    /// An engine of the sender's end has died. `ending`: the queue pair had a cause to end.
    pub(crate) fn engine_died(&mut self, ending: bool) {
        (self.deaths.died, self.deaths.ending) = (true, self.deaths.ending | ending);
    }

    /// P6: what the sender's session segment says was given back. It covers what CREDIT has given back, and counts exactly what
    /// the slots hold, all of which the reader has.
    pub(crate) fn see_journal_of_sender(&mut self, sent: &Sent, reader: &Side) -> Result<(), Violation> {
        if sent.slots == self.deaths.kept.0 && self.sender.credit <= sent.slots {
            return Ok(());
        }
        let slot = match sent.slots {
            0 => None,
            slots => self.slots.get(slots as usize - 1),
        };
        let expected = slot.map_or(Sent::default(), |s| Sent {
            slots: sent.slots,
            units: s.units_after,
            messages: s.messages_after.into(),
            sends: s.sends_after.into(),
            completions: s.completions_after,
        });
        if *sent != expected || sent.slots < self.deaths.kept.0.max(self.sender.credit) {
            let why = format_args!(
                "the session segment says {sent:?}, expected {expected:?}; {} slots are given back, and it said {} before",
                self.sender.credit, self.deaths.kept.0
            );
            return Err(self.broken(6, why));
        }
        self.deaths.kept.0 = sent.slots;
        self.is_delivered(expected.messages as u32, reader)
    }

    /// All completions that were asked for have come.
    pub(super) fn all_completed(&self) -> bool {
        self.sender.cqes.0 == self.sender.cqes.1
    }

    /// The sender's end is shown, and its program had published the first `published` slots without a hole.
    pub(crate) fn end(&mut self, published: u64) {
        self.sender.due = self.slots[..published as usize].iter().filter(|s| s.signaled).count() as u64;
    }

    /// All completions that are due after the sender's end have come.
    pub(crate) fn is_over(&self) -> bool {
        self.sender.cqes.1 >= self.sender.due
    }

    /// Slots, messages and SENDs that an engine has posted which has taken `head` slots.
    pub(crate) fn posted(&self, head: u64) -> (u64, u64) {
        match head {
            0 => (0, 0),
            _ => self
                .slots
                .get(head as usize - 1)
                .map_or((u64::MAX, 0), |s| (s.messages_after.into(), s.sends_after.into())),
        }
    }

    /// P4: what the gate has lent, by what the model knows. `head`: slots that the engine has taken; `in_flight`: work
    /// requests that hold slots; `left` and `granted`: receives. `exact`: the link has no completions of its own, so that
    /// the messages that the peer has, `received`, are the completed ones.
    pub(crate) fn see_gate(
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
        // A gate that goes on in place of another one hears what is granted with the next counts.
        if sends > granted && !self.deaths.died || left != granted.saturating_sub(sends) {
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
}
