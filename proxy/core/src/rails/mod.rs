//! Rails: several links that carry one session together.
//!
//! A message is cut into stripes, and the stripes travel over different rails. Each rail delivers its own stripes in
//! order; between two rails there is no order. Each rail is a link with its own epoch and fence
//! ([`Recovery`](crate::recovery::Recovery), one for each rail) and its own [`Budget`](crate::gate::Budget). Sequence
//! numbers, counts and receive credit belong to the session.
//!
//! * [`sending`] is the sender: where a message is cut, which rail gets which stripe, and what becomes of the stripes of a
//!   rail that left.
//! * [`divide`](mod@divide) cuts a message by the measured speed of the rails.
//! * [`arriving`] is the receiver: which arrivals make the accepted prefix.
//! * [`placing`] decides when a PUT may be written straight into its region.
//!
//! A session over one link uses none of this.

pub mod arriving;
pub mod divide;
pub mod placing;
pub mod sending;

#[cfg(test)]
mod tests;

use pushgate_abi::record::Record;

/// Rails that a session may have at once.
pub const MOST_RAILS: usize = 4;

/// Sizes and rules of a session's rails, fixed when the session is set up. Both ends use the same.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Logarithm to base 2 of the messages of one direction that may be on their way at once.
    pub window_log: u32,
    /// A message is not cut into stripes shorter than this, bytes: a multiple of 64.
    pub shortest: u32,
}

/// A part of a message, which travels over one rail. A message has at least one stripe and at most [`MOST_RAILS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    /// The message's sequence number.
    pub message: u64,
    /// The stripe's number in its message, from 0.
    pub index: u8,
    /// Stripes that the message has.
    pub of: u8,
    /// Where the stripe begins in the message's payload, bytes.
    pub offset: u32,
    /// The stripe's payload, bytes.
    pub length: u32,
    /// The payload goes straight into the region that the message names. Otherwise the payload lands where nothing but
    /// this message lies, and the receiver copies it.
    pub placed: bool,
}

/// Bytes of a message that stripes carry. Payload that lies in the record travels with the record.
#[inline]
pub fn carried(record: &Record) -> u32 {
    if record.has(Record::INLINE) { 0 } else { record.length }
}
