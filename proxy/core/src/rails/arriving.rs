//! The receiver of a session with rails: keeps what arrives out of order until it makes a prefix.
//!
//! Pure state. Payload lands beside it; only records, which stripes are there and counts are kept here.

use pushgate_abi::record::{Record, RecordWords};

use super::{MOST_RAILS, Stripe, carried};

/// Why a stripe is none that a sender of this session could have posted (P8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The message lies outside of the window, or was accepted already.
    #[error("a stripe of message {message}, expected one of {first} to {last}")]
    Message {
        /// The stripe's message.
        message: u64,
        /// The first message that is not accepted.
        first: u64,
        /// The last message that may be on its way.
        last: u64,
    },
    /// The stripe's number is none that its message has.
    #[error("stripe {index} of {of}")]
    Index {
        /// The stripe's number.
        index: u8,
        /// Stripes that its message is said to have.
        of: u8,
    },
    /// The stripe was there already (P6).
    #[error("stripe {index} of message {message} came twice")]
    Twice {
        /// The message.
        message: u64,
        /// The stripe's number.
        index: u8,
    },
    /// Two stripes of one message disagree on what the message is.
    #[error("two stripes of message {message} disagree on the message")]
    Differs {
        /// The message.
        message: u64,
    },
    /// The stripes do not make up the message's payload, or the record is none.
    #[error("stripes of {bytes} bytes for message {message}, whose record says otherwise")]
    Length {
        /// The message.
        message: u64,
        /// Bytes of the stripes that are there.
        bytes: u64,
    },
}

/// What is there of one message.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    words: RecordWords,
    /// Stripes of the message; 0: none has arrived.
    of: u8,
    /// The stripes that are there, one bit each.
    got: u8,
    placed: bool,
    bytes: u64,
}

impl Slot {
    fn is_whole(&self) -> bool {
        self.of > 0 && self.got == u8::MAX >> (8 - self.of)
    }
}

/// The receiver of a session with rails.
#[derive(Debug)]
pub struct Arriving {
    slots: Box<[Slot]>,
    /// Messages accepted: a prefix, in order.
    accepted: u64,
    /// Stripes taken in over each rail, over all of its epochs.
    taken: [u64; MOST_RAILS],
}

impl Arriving {
    /// A receiver for which nothing has arrived. At most `1 << window_log` messages are on their way at once.
    pub fn new(window_log: u32) -> Self {
        Arriving { slots: vec![Slot::default(); 1 << window_log].into(), accepted: 0, taken: [0; MOST_RAILS] }
    }

    fn slot(&self, message: u64) -> &Slot {
        &self.slots[message as usize & (self.slots.len() - 1)]
    }

    /// A stripe has arrived over a rail, its payload included. `words` are its message's record, which each stripe carries.
    pub fn arrive(&mut self, rail: usize, stripe: &Stripe, words: &RecordWords) -> Result<(), Unfit> {
        let (message, first) = (stripe.message, self.accepted);
        let last = first + self.slots.len() as u64 - 1;
        if planted!(P6Hole) && message < first {
            // It was accepted without this stripe.
            self.taken[rail] += 1;
            return Ok(());
        }
        if !(first..=last).contains(&message) {
            return Err(Unfit::Message { message, first, last });
        }
        let Stripe { index, of, length, offset, placed, .. } = *stripe;
        if of == 0 || of as usize > MOST_RAILS || index >= of {
            return Err(Unfit::Index { index, of });
        }
        let mask = self.slots.len() - 1;
        let slot = &mut self.slots[message as usize & mask];
        if slot.of == 0 {
            *slot = Slot { words: *words, of, got: 0, placed, bytes: 0 };
        } else if (slot.of, slot.placed, &slot.words) != (of, placed, words) {
            return Err(Unfit::Differs { message });
        }
        if slot.got & 1 << index != 0 {
            return Err(Unfit::Twice { message, index });
        }
        slot.got |= 1 << index;
        slot.bytes += length as u64;
        let whole = Record::decode(words).ok().map(|record| carried(&record) as u64);
        let bytes = slot.bytes;
        let fits = whole.is_some_and(|whole| {
            offset as u64 + length as u64 <= whole && (!slot.is_whole() || bytes == whole)
        });
        if !fits {
            return Err(Unfit::Length { message, bytes });
        }
        self.taken[rail] += 1;
        Ok(())
    }

    /// Stripes taken in over a rail, over all of its epochs. The peer is told, and posts no stripe of these again.
    pub fn taken(&self, rail: usize) -> u64 {
        self.taken[rail]
    }

    /// Messages accepted: a prefix in order.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Whether the next message of the order has arrived whole.
    #[inline]
    pub fn has_next(&self) -> bool {
        self.slot(self.accepted).is_whole() || self.jumps_a_hole()
    }

    /// Planted: counts on past a message that is not whole, once the message after it is whole.
    fn jumps_a_hole(&self) -> bool {
        planted!(P6Hole) && self.slot(self.accepted).of > 0 && self.slot(self.accepted + 1).is_whole()
    }

    /// Accepts the next message of the order, if all of its stripes have arrived: its record, and whether its payload is in
    /// the region that the record names.
    #[inline]
    pub fn accept(&mut self) -> Option<(RecordWords, bool)> {
        if !self.has_next() {
            return None;
        }
        let mask = self.slots.len() - 1;
        let slot = &mut self.slots[self.accepted as usize & mask];
        slot.of = 0;
        let message = (slot.words, slot.placed);
        self.accepted += 1;
        Some(message)
    }
}
