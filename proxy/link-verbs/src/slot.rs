//! What lies in a slot of an inbox: the record, the sender's counts, and behind
//! them a short payload, so that all cross in one RDMA WRITE.
//!
//! Nothing orders the bytes of one WRITE among themselves. So the payload is
//! cut into words of 56 bits, and each carries a lap number, as the record's
//! words do: what is there proves itself, in whatever order it arrives. The
//! counts only grow, so that one of long ago does no harm, and the reader looks
//! at them again until the next message comes.

use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_core::rails::Stripe;
use pushgate_driver_shim::abi;

/// Words of a slot.
pub(super) const SLOT_WORDS: usize = 32;
/// Bytes of a slot.
pub(super) const SLOT_BYTES: usize = SLOT_WORDS * 8;
const RECORD_WORDS: usize = abi::PUSHGATE_RECORD_WORDS as usize;
/// Words of the counts, which follow the record: received, released, granted.
pub(super) const COUNTS: std::ops::Range<usize> = RECORD_WORDS..PAYLOAD;
/// First word of a short payload.
const PAYLOAD: usize = RECORD_WORDS + 3;
/// Payload bytes of a word.
const CARRIED: usize = 7;
/// Longest payload that rides along. With record and counts it makes 240 bytes,
/// which devices send inline (mlx5 and rxe take more).
pub(super) const SHORT: usize = 128;

/// Bytes of a slot that a payload of `length` takes, record and counts included.
pub(super) const fn slot_bytes(length: usize) -> usize {
    (PAYLOAD + length.div_ceil(CARRIED)) * 8
}

const _: () = assert!(slot_bytes(SHORT) <= SLOT_BYTES);

/// Bytes that say which part of its message a stripe is. They stand where a short payload would: message, offset, length,
/// index, number of stripes, whether the payload was placed.
pub(super) const STRIPE_BYTES: usize = 19;

/// The bytes that a stripe's slot has of it.
pub(super) fn stripe_bytes(stripe: &Stripe) -> [u8; STRIPE_BYTES] {
    let mut bytes = [0; STRIPE_BYTES];
    bytes[..8].copy_from_slice(&stripe.message.to_le_bytes());
    bytes[8..12].copy_from_slice(&stripe.offset.to_le_bytes());
    bytes[12..16].copy_from_slice(&stripe.length.to_le_bytes());
    bytes[16..].copy_from_slice(&[stripe.index, stripe.of, stripe.placed as u8]);
    bytes
}

/// Reads what [`stripe_bytes`] wrote; `None` for bytes that it would not write. The receiver of the stripe checks the
/// numbers.
pub(super) fn stripe(bytes: &[u8; STRIPE_BYTES]) -> Option<Stripe> {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let message = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let placed = match bytes[18] {
        0 => false,
        1 => true,
        _ => return None,
    };
    let (offset, length) = (word(8), word(12));
    Some(Stripe { message, index: bytes[16], of: bytes[17], offset, length, placed })
}

/// The lap of a payload word. Never 0: the reader clears what it has taken, so
/// that a word of long ago can't be taken for a new one when laps come round.
/// (The record's words need no clearing: each pass writes all of them.)
const fn payload_lap(cursor: u64, log: u32) -> u64 {
    ((cursor >> log) % 255 + 1) << abi::PUSHGATE_LAP_SHIFT
}

/// Packs `payload` behind the record of `slot`.
pub(super) fn pack(slot: &[AtomicU64], payload: &[u8], cursor: u64, log: u32) {
    let lap = payload_lap(cursor, log);
    let store = |word: &AtomicU64, bytes: &[u8]| {
        let mut w = [0; 8];
        w[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(w) | lap, Ordering::Relaxed);
    };
    let mut words = slot[PAYLOAD..].iter();
    // Whole words apart: their length is known, and no copy is a call.
    let (whole, rest) = payload.as_chunks::<CARRIED>();
    whole.iter().zip(&mut words).for_each(|(bytes, word)| store(word, bytes));
    if !rest.is_empty() {
        store(words.next().expect("a slot holds the longest payload"), rest);
    }
}

/// Copies a short payload out of its slot. False if not all of the payload is there yet. `payload` is at most [`SHORT`]
/// bytes long.
pub(super) fn unpack(slot: &[AtomicU64], payload: &mut [u8], cursor: u64, log: u32) -> bool {
    let lap = payload_lap(cursor, log);
    let load = |word: &AtomicU64, bytes: &mut [u8]| {
        let w = word.load(Ordering::Relaxed) ^ lap;
        bytes.copy_from_slice(&w.to_le_bytes()[..bytes.len()]);
        w >> abi::PUSHGATE_LAP_SHIFT == 0
    };
    let mut words = slot[PAYLOAD..].iter();
    let (whole, rest) = payload.as_chunks_mut::<CARRIED>();
    whole.iter_mut().zip(&mut words).all(|(bytes, word)| load(word, bytes))
        && (rest.is_empty() || load(words.next().expect("a slot holds the longest payload"), rest))
}

/// Clears what [`unpack`] took. Before the peer hears that the slot is free.
pub(super) fn clear(slot: &[AtomicU64], length: usize) {
    for word in &slot[PAYLOAD..PAYLOAD + length.div_ceil(CARRIED)] {
        word.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> Vec<AtomicU64> {
        (0..SLOT_WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn p2_a_short_payload_is_whole_or_not_there() {
        for length in 0..=SHORT {
            let payload: Vec<u8> = (0..length).map(|i| (i as u8).wrapping_mul(37) ^ 0xff).collect();
            let packed = shared();
            pack(&packed, &payload, 5, 2);
            let slot = shared();
            let words = length.div_ceil(CARRIED);
            let mut found = vec![0; length];
            // The last word first.
            for i in (0..words).rev() {
                assert!(!unpack(&slot, &mut found, 5, 2), "{i} words of {length} bytes are missing");
                slot[PAYLOAD + i].swap(packed[PAYLOAD + i].load(Ordering::Relaxed), Ordering::Relaxed);
            }
            assert!(unpack(&slot, &mut found, 5, 2));
            assert_eq!(found, payload);
            if length > 0 {
                assert!(!unpack(&slot, &mut found, 9, 2), "not of another lap");
            }
            clear(&slot, length);
            assert!(slot.iter().all(|w| w.load(Ordering::Relaxed) == 0));
        }
    }

    #[test]
    fn p8_a_stripe_is_read_as_it_was_written_and_other_bytes_are_none() {
        let written = Stripe { message: 1 << 40, index: 2, of: 3, offset: 64, length: 4096, placed: true };
        let mut bytes = stripe_bytes(&written);
        assert_eq!(stripe(&bytes), Some(written));
        bytes[18] = 2;
        assert_eq!(stripe(&bytes), None);
    }

    #[test]
    fn p2_cleared_words_never_look_new() {
        let slot = shared();
        for lap in 0..2000 {
            assert!(!unpack(&slot, &mut [0; 1], lap << 3, 3));
        }
    }
}
