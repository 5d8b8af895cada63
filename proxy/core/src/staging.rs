//! The staging ring of one queue pair, as the proxy keeps it: which WQE slot is next, where its payload must lie, what
//! was released to the link, and what may be given back to the producer.
//!
//! The cursors are private. The proxy never reads them back from shared memory, so a producer that lies about a place is
//! refused (P8). The credit word, which alone goes out, counts only what was retired in order (P1, P5).

#[cfg(test)]
mod tests;

use pushgate_abi::abi;
use pushgate_abi::record::{Malformed, Opcode, Record};

use crate::journal::Sent;

/// A slot that was released and not retired yet.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Units of payload that were taken up to and including this slot, padding included.
    units_after: u64,
    /// Messages up to and including this slot. NOPs are no messages.
    messages_after: u64,
    wr_id: u32,
    length: u32,
    opcode: u8,
    signaled: bool,
}

/// A completion for the producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The producer's number of the work request.
    pub wr_id: u32,
    /// `PUSHGATE_OP_*`.
    pub opcode: u8,
    /// Payload, bytes.
    pub length: u32,
}

/// The staging ring of one queue pair, as the proxy keeps it: which slots were released, and which
/// may be given back. Cursors are cumulative and never wrap in practice (2^64 messages).
#[derive(Debug)]
pub struct Staging {
    slots_log: u32,
    ring_units: u64,
    /// Slots that were released to the link, NOPs included.
    head: u64,
    /// Slots that the peer has.
    delivered: u64,
    /// Slots given back to the producer.
    tail: u64,
    units: u64,
    messages: u64,
    retired_units: u64,
    entries: Box<[Entry]>,
    /// The slot that is missing, and the time since which it is.
    hole: Option<(u64, u64)>,
}

/// What [`Staging::retire`] gave back in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired {
    /// Messages. NOPs are not counted.
    pub messages: u64,
    /// SENDs among the messages.
    pub sends: u64,
    /// Payload of the messages, bytes.
    pub bytes: u64,
}

/// What [`Staging::rewind`] put back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rewound {
    /// SENDs among the messages.
    pub sends: u64,
    /// Payload of the messages, bytes.
    pub bytes: u64,
}

impl Staging {
    /// A ring of `1 << slots_log` WQEs and `1 << window_log` units of payload,
    /// both within the limits of `abi.h`.
    pub fn new(slots_log: u32, window_log: u32) -> Self {
        assert!(slots_log <= abi::PUSHGATE_MAX_SLOTS_LOG && window_log <= abi::PUSHGATE_MAX_UNITS_LOG);
        Staging {
            slots_log,
            ring_units: 1 << window_log,
            head: 0,
            delivered: 0,
            tail: 0,
            units: 0,
            messages: 0,
            retired_units: 0,
            entries: vec![Entry::default(); 1 << slots_log].into(),
            hole: None,
        }
    }

    /// A ring as [`Staging::new`] makes it, whose first slots were given back already, as `sent` says, which was checked.
    /// Nothing is released yet of what comes after them.
    pub fn resumed(slots_log: u32, window_log: u32, sent: &Sent) -> Self {
        Staging {
            head: sent.slots,
            delivered: sent.slots,
            tail: sent.slots,
            units: sent.units,
            messages: sent.messages,
            retired_units: sent.units,
            ..Staging::new(slots_log, window_log)
        }
    }

    /// Slots that were given back to the producer.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Units of the window that were given back to the producer.
    pub fn retired_units(&self) -> u64 {
        self.retired_units
    }

    /// The next slot to look at.
    #[inline(always)]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// log2 of the number of slots.
    #[inline(always)]
    pub fn slots_log(&self) -> u32 {
        self.slots_log
    }

    /// Whether the producer can have published another slot: the ring has one that is not outstanding.
    #[inline(always)]
    pub fn has_room(&self) -> bool {
        self.head - self.tail < 1 << self.slots_log
    }

    /// Messages released so far, which is the sequence number of the next one.
    #[inline(always)]
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Slots that are released and not yet given back.
    pub fn outstanding(&self) -> u64 {
        self.head - self.tail
    }

    /// Checks a record of the producer against the ring. The payload must lie exactly where the rule of `abi.h` places it
    /// (behind the payload before it, or at the ring's start if it does not fit before the end), in room for which the
    /// producer held credit.
    #[inline]
    pub fn check(&self, r: &Record) -> Result<(), Malformed> {
        if !r.in_window() {
            return Ok(());
        }
        let units = r.units() as u64;
        let limit = (units * abi::PUSHGATE_UNIT as u64).min(abi::PUSHGATE_MAX_MESSAGE as u64) as u32;
        if r.length > limit {
            return Err(Malformed::Length { length: r.length, limit });
        }
        let (place, after) = self.place(units);
        if after - self.retired_units > self.ring_units {
            let free = self.ring_units - (self.units - self.retired_units);
            return Err(Malformed::Length {
                length: r.length,
                limit: (free as u32) << abi::PUSHGATE_UNIT_LOG,
            });
        }
        if units != 0 && r.place as u64 != place {
            return Err(Malformed::Offset { found: r.place, expected: place as u32 });
        }
        Ok(())
    }

    /// The place of a payload of `units`, and the cursor behind the payload.
    #[inline(always)]
    fn place(&self, units: u64) -> (u64, u64) {
        let pos = self.units & (self.ring_units - 1);
        if pos + units > self.ring_units {
            (0, self.units + (self.ring_units - pos) + units)
        } else {
            (pos, self.units + units)
        }
    }

    /// Notes that a record which passed [`Staging::check`] was posted, or was a NOP. Moves on to the next slot.
    #[inline]
    pub fn release(&mut self, r: &Record) {
        debug_assert!(self.has_room());
        if r.in_window() {
            self.units = self.place(r.units() as u64).1;
        }
        self.messages += (r.opcode != Opcode::Nop) as u64;
        self.entries[(self.head & ((1 << self.slots_log) - 1)) as usize] = Entry {
            units_after: self.units,
            messages_after: self.messages,
            wr_id: r.id,
            length: r.length,
            opcode: r.opcode as u8,
            signaled: r.has(Record::SIGNALED),
        };
        self.head += 1;
    }

    #[inline(always)]
    fn entry(&self, slot: u64) -> &Entry {
        &self.entries[(slot & ((1 << self.slots_log) - 1)) as usize]
    }

    /// What is kept of the slots from `slot` to the ring's end, `n` of them at most, for a caller who wants it in the cache
    /// before the slots are released, or given back.
    #[inline(always)]
    pub fn kept(&self, slot: u64, n: usize) -> &[impl Sized + use<>] {
        let first = (slot & ((1 << self.slots_log) - 1)) as usize;
        &self.entries[first..self.entries.len().min(first + n)]
    }

    /// Notes that the peer has `received` messages. Returns the number of slots whose messages the peer has.
    #[inline]
    pub fn deliver(&mut self, received: u64) -> u64 {
        while self.delivered < self.head && self.entry(self.delivered).messages_after <= received {
            self.delivered += 1;
        }
        self.delivered
    }

    /// Gives back, in order, the slots and the payload of the first `released` messages, whose places the peer no longer
    /// needs. Calls `completion` for each slot that asked for a completion.
    #[inline]
    pub fn retire(&mut self, released: u64, mut completion: impl FnMut(Completion)) -> Retired {
        let mut sum = Retired::default();
        while self.tail < self.head {
            let e = self.entry(self.tail);
            if e.messages_after > released {
                break;
            }
            let units = e.units_after;
            if e.opcode as u32 != abi::PUSHGATE_OP_NOP {
                sum.messages += 1;
                sum.sends += (e.opcode as u32 == abi::PUSHGATE_OP_SEND) as u64;
                sum.bytes += e.length as u64;
            }
            if e.signaled {
                completion(Completion { wr_id: e.wr_id, opcode: e.opcode, length: e.length });
            }
            self.tail += 1;
            self.retired_units = units;
        }
        sum
    }

    /// Puts the head back to the first slot whose message the peer has not accepted, so that the slots from there on are
    /// read, checked and released again. A slot stays in the producer's ring until its credit is given back, so nothing
    /// has to be kept for this.
    ///
    /// # Panics
    ///
    /// If `accepted` is less than what was given back or more than was released: the caller has compared the peer's
    /// counts with each other.
    pub fn rewind(&mut self, accepted: u64) -> Rewound {
        let retired = self.retired_messages();
        assert!((retired..=self.messages).contains(&accepted), "{accepted} messages accepted");
        let accepted = if planted!(P6Rewind) { self.messages.min(accepted + 1) } else { accepted };
        let mut sum = Rewound::default();
        while self.head > self.tail && self.entry(self.head - 1).messages_after > accepted {
            self.head -= 1;
            let e = self.entry(self.head);
            if e.opcode as u32 != abi::PUSHGATE_OP_NOP {
                sum.sends += (e.opcode as u32 == abi::PUSHGATE_OP_SEND) as u64;
                sum.bytes += e.length as u64;
            }
        }
        (self.units, self.messages) = match self.head > self.tail {
            true => (self.entry(self.head - 1).units_after, accepted),
            false => (self.retired_units, retired),
        };
        self.hole = None;
        sum
    }

    /// Messages whose slots were given back.
    pub fn retired_messages(&self) -> u64 {
        if self.head == self.tail {
            return self.messages;
        }
        let oldest = self.entry(self.tail);
        oldest.messages_after - (oldest.opcode as u32 != abi::PUSHGATE_OP_NOP) as u64
    }

    /// The credit word: the cumulative numbers of slots and of units that were given back.
    #[inline(always)]
    pub fn credit_word(&self) -> u64 {
        let planted = (planted!(P1Credit) && self.tail > 0) as u64;
        (self.tail & abi::PUSHGATE_CURSOR_MASK as u64) << abi::PUSHGATE_CURSOR_BITS
            | (self.retired_units + planted) & abi::PUSHGATE_CURSOR_MASK as u64
    }

    /// Takes in whether, at time `now` (any monotonic clock, nanoseconds), slots behind the head are complete while the
    /// head itself is not. True once that has lasted `limit` for one and the same head: its owner will never publish it
    /// (P2). A hole that moves on is only a slot that was published out of order.
    pub fn stuck(&mut self, hole: bool, now: u64, limit: u64) -> bool {
        let since = match self.hole {
            Some((slot, since)) if slot == self.head => since,
            _ => now,
        };
        self.hole = hole.then_some((self.head, since));
        hole && now - since >= limit
    }

    /// The time at which [`Staging::stuck`] becomes true if the hole that it saw last stays.
    pub fn stuck_at(&self, limit: u64) -> Option<u64> {
        self.hole.map(|(_, since)| since.saturating_add(limit))
    }
}
