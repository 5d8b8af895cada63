//! The staging ring of one queue pair, as the proxy keeps it: which WQE slot is
//! next, where its payload must lie, what has been released to the queue pair
//! and what may be given back to the producer.
//!
//! Pure state. Its cursors are private: nothing here is ever read back from
//! shared memory, so a producer that lies about a place is refused (P8), and
//! the credit word, which is all that goes out, counts only what was retired
//! in order (P1, P5).

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Malformed, Opcode, Record};

/// One released slot that has not been retired yet.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Payload units taken up to and including this slot, padding included.
    units_after: u64,
    /// Messages up to and including this slot (NOPs are none).
    messages_after: u64,
    wr_id: u32,
    length: u32,
    opcode: u8,
    signaled: bool,
}

/// A completion to hand to the producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The producer's own number.
    pub wr_id: u32,
    /// `PUSHGATE_OP_*`.
    pub opcode: u8,
    /// Payload, bytes.
    pub length: u32,
}

/// See the module's text. Cursors are cumulative and never wrap in practice
/// (2^64 messages).
#[derive(Debug)]
pub struct Staging {
    slots_log: u32,
    ring_units: u64,
    /// Slots released to the queue pair (or to nowhere, if NOPs).
    head: u64,
    /// Slots that the peer has.
    delivered: u64,
    /// Slots given back to the producer.
    tail: u64,
    units: u64,
    messages: u64,
    retired_units: u64,
    entries: Box<[Entry]>,
    hole_since: Option<u64>,
}

/// What [`Staging::retire`] gave back in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired {
    /// Messages, NOPs not counted.
    pub messages: u64,
    /// Their payload.
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
            hole_since: None,
        }
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

    /// True if the producer can have published another slot at all.
    #[inline(always)]
    pub fn has_room(&self) -> bool {
        self.head - self.tail < 1 << self.slots_log
    }

    /// Messages released so far; the next one's sequence number.
    #[inline(always)]
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Slots released and not yet given back.
    pub fn outstanding(&self) -> u64 {
        self.head - self.tail
    }

    /// Checks a record from the producer against the ring: its payload must lie
    /// exactly where the rule of `abi.h` places it (behind its predecessor, or
    /// at the ring's start if it does not fit before the end), within room that
    /// the producer held credit for.
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

    /// Where a payload of `units` goes, and the cursor behind it.
    #[inline(always)]
    fn place(&self, units: u64) -> (u64, u64) {
        let pos = self.units & (self.ring_units - 1);
        if pos + units > self.ring_units {
            (0, self.units + (self.ring_units - pos) + units)
        } else {
            (pos, self.units + units)
        }
    }

    /// Takes in a record that passed [`Staging::check`]: it was posted (or was a
    /// NOP). Moves on to the next slot.
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

    /// The peer has `received` messages. Returns the delivered slot cursor.
    #[inline]
    pub fn deliver(&mut self, received: u64) -> u64 {
        while self.delivered < self.head && self.entry(self.delivered).messages_after <= received {
            self.delivered += 1;
        }
        self.delivered
    }

    /// The peer no longer needs the places of its first `released` messages:
    /// gives back their slots and payload, in order, with a completion for each
    /// that asked for one.
    #[inline]
    pub fn retire(&mut self, released: u64, mut completion: impl FnMut(Completion)) -> Retired {
        let mut sum = Retired::default();
        while self.tail < self.head {
            let e = *self.entry(self.tail);
            if e.messages_after > released {
                break;
            }
            self.tail += 1;
            self.retired_units = e.units_after;
            if e.opcode as u32 != abi::PUSHGATE_OP_NOP {
                sum.messages += 1;
                sum.bytes += e.length as u64;
            }
            if e.signaled {
                completion(Completion { wr_id: e.wr_id, opcode: e.opcode, length: e.length });
            }
        }
        sum
    }

    /// The credit word: cumulative slots and units given back.
    #[inline(always)]
    pub fn credit_word(&self) -> u64 {
        (self.tail & abi::PUSHGATE_CURSOR_MASK as u64) << abi::PUSHGATE_CURSOR_BITS
            | self.retired_units & abi::PUSHGATE_CURSOR_MASK as u64
    }

    /// Reports at time `now` (any monotonic clock, nanoseconds) whether slots
    /// behind the head are complete while the head itself is not. True once
    /// that has lasted `limit`: the head's owner will never publish it (P2).
    pub fn stuck(&mut self, hole: bool, now: u64, limit: u64) -> bool {
        if !hole {
            self.hole_since = None;
            return false;
        }
        now - *self.hole_since.get_or_insert(now) >= limit
    }
}
