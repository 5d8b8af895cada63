//! The 64-byte record that carries a message everywhere in pushgate: as a WQE from device to
//! engine, as a link record from engine to engine, as a receive record from engine to device.
//! `abi.h` shows its words.
//!
//! This module packs and unpacks private copies and accesses no shared memory.

use crate::abi;

/// The eight words of a record, including their laps.
pub type RecordWords = [u64; abi::PUSHGATE_RECORD_WORDS as usize];

const DATA: u64 = abi::PUSHGATE_DATA_MASK;
/// The lap bits of a word (bindgen gives `PUSHGATE_LAP_MASK` a signed type).
const LAP: u64 = !DATA;

/// The lap number that slot `cursor` of a ring of `1 << log` slots carries in its `cursor >>
/// log`-th pass. A zeroed ring reads as the lap before the first.
#[inline(always)]
pub const fn lap_of(cursor: u64, log: u32) -> u8 {
    ((cursor >> log) as u8).wrapping_add(1)
}

/// Replaces the lap of every word.
#[inline(always)]
pub fn with_lap(words: &RecordWords, lap: u8) -> RecordWords {
    let lap = (lap as u64) << abi::PUSHGATE_LAP_SHIFT;
    words.map(|w| (w & DATA) | lap)
}

/// The operation that a record asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// No operation: a reserved slot that is unused, and payload room given back.
    Nop = abi::PUSHGATE_OP_NOP as u8,
    /// Two-sided: consumes a receive of the peer.
    Send = abi::PUSHGATE_OP_SEND as u8,
    /// One-sided: writes into a region of the peer, followed by a signal if [`Record::WITH_SIGNAL`]
    /// is set.
    Put = abi::PUSHGATE_OP_PUT as u8,
    /// A signal alone.
    Signal = abi::PUSHGATE_OP_SIGNAL as u8,
}

/// Why a record was refused. Counters and logs show the variant's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A word carries neither this lap's number nor the last one's.
    #[error("a word carries a lap that is neither this one nor the last")]
    Lap,
    /// The opcode is not one of this ABI.
    #[error("opcode {0} is not one of nop 1, send 2, put 3, signal 4")]
    Opcode(u8),
    /// A flag that this opcode does not have, or two flags that exclude each other.
    #[error("flags {flags:#04x} do not go with opcode {opcode}")]
    Flags {
        /// The opcode.
        opcode: u8,
        /// All flags of the record.
        flags: u8,
    },
    /// The payload is longer than the operation, the inline area or the ring allows.
    #[error("length {length} is over the {limit} bytes allowed here")]
    Length {
        /// The length in the record, in bytes.
        length: u32,
        /// The length allowed, in bytes.
        limit: u32,
    },
    /// The payload does not lie where the ring's cursor says it must.
    #[error("payload at unit {found}, but the ring's cursor is at unit {expected}")]
    Offset {
        /// The unit named in the record.
        found: u32,
        /// The unit that the ring's cursor demands.
        expected: u32,
    },
}

/// A decoded record. Which fields have a meaning depends on opcode and `flags`; the others hold
/// whatever the words held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The operation.
    pub opcode: Opcode,
    /// The flags, `PUSHGATE_F_*`.
    pub flags: u8,
    /// The wr_id of a WQE; the sequence number of a link or receive record.
    pub id: u32,
    /// Length of the payload in bytes.
    pub length: u32,
    /// SEND: the tag.
    pub tag: u32,
    /// Payload in the window: offset in units. Payload in a region: the lkey.
    pub place: u32,
    /// Payload in a region: offset in bytes. Payload in the window: units held, at least what
    /// `length` needs.
    pub place_offset: u64,
    /// PUT: the rkey of the peer's region.
    pub rkey: u32,
    /// PUT: offset in the peer's region, in bytes.
    pub remote_offset: u64,
    /// The signal to write.
    pub signal: u32,
    /// The signal's new value.
    pub signal_value: u64,
}

impl Record {
    /// Flag: the payload lies in the record.
    pub const INLINE: u8 = abi::PUSHGATE_F_INLINE as u8;
    /// Flag: the payload lies in a registered region.
    pub const REGION: u8 = abi::PUSHGATE_F_REGION as u8;
    /// Flag: a CQE is wanted.
    pub const SIGNALED: u8 = abi::PUSHGATE_F_SIGNALED as u8;
    /// Flag: a signal follows the data.
    pub const WITH_SIGNAL: u8 = abi::PUSHGATE_F_WITH_SIGNAL as u8;
    /// Flag of a receive record: the payload lies in the landing ring.
    pub const LANDING: u8 = abi::PUSHGATE_F_LANDING as u8;
    /// Flag of a receive record: the payload lies in the posted buffer.
    pub const BUFFER: u8 = abi::PUSHGATE_F_BUFFER as u8;

    /// Makes a record of `opcode` with every other field zero.
    pub const fn new(opcode: Opcode) -> Self {
        Record {
            opcode,
            flags: 0,
            id: 0,
            length: 0,
            tag: 0,
            place: 0,
            place_offset: 0,
            rkey: 0,
            remote_offset: 0,
            signal: 0,
            signal_value: 0,
        }
    }

    /// Whether `flag` is set.
    #[inline(always)]
    pub const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Whether payload room of the window belongs to this record.
    #[inline(always)]
    pub const fn in_window(&self) -> bool {
        !matches!(self.opcode, Opcode::Signal) && self.flags & (Self::INLINE | Self::REGION) == 0
    }

    /// Units of the window that this record holds, padding not counted.
    #[inline(always)]
    pub const fn units(&self) -> u32 {
        if self.in_window() { self.place_offset as u32 } else { 0 }
    }

    /// Packs the record's fields; [`set_inline`] sets inline payload.
    pub fn encode(&self, lap: u8) -> RecordWords {
        let mut w = [0u64; 8];
        w[0] = (self.opcode as u64) << abi::PUSHGATE_OPCODE_SHIFT
            | (self.flags as u64) << abi::PUSHGATE_FLAGS_SHIFT
            | ((self.id >> abi::PUSHGATE_ID_LOW_BITS) as u64) << abi::PUSHGATE_ID_HIGH_SHIFT
            | self.length as u64;
        w[1] = ((self.id & 0xff_ffff) as u64) << abi::PUSHGATE_ID_LOW_SHIFT | self.tag as u64;
        if self.opcode != Opcode::Send || !self.has(Self::INLINE) {
            w[2] = (self.signal as u64) << abi::PUSHGATE_SIGNAL_SHIFT | self.rkey as u64;
            w[3] = self.remote_offset & DATA;
            w[4] = self.signal_value & DATA;
            if !self.has(Self::INLINE) {
                w[5] = self.place as u64;
                w[6] = self.place_offset & DATA;
            }
        }
        with_lap(&w, lap)
    }

    /// Unpacks a record and checks what can be checked without knowing the queue pair: opcode,
    /// flags, inline length, largest message. The code that copied the words out of the ring has
    /// checked the laps.
    #[inline(always)]
    pub fn decode(w: &RecordWords) -> Result<Self, Malformed> {
        let op = (w[0] >> abi::PUSHGATE_OPCODE_SHIFT) as u8;
        let flags = (w[0] >> abi::PUSHGATE_FLAGS_SHIFT) as u8;
        let (opcode, allowed) = match op as u32 {
            abi::PUSHGATE_OP_NOP => (Opcode::Nop, Self::SIGNALED),
            abi::PUSHGATE_OP_SEND => (Opcode::Send, Self::INLINE | Self::REGION | Self::SIGNALED),
            abi::PUSHGATE_OP_PUT => {
                (Opcode::Put, Self::INLINE | Self::REGION | Self::SIGNALED | Self::WITH_SIGNAL)
            }
            abi::PUSHGATE_OP_SIGNAL => (Opcode::Signal, Self::SIGNALED),
            _ => return Err(Malformed::Opcode(op)),
        };
        let both = Self::INLINE | Self::REGION;
        if flags & !allowed != 0 || flags & both == both {
            return Err(Malformed::Flags { opcode: op, flags });
        }
        let length = w[0] as u32;
        let limit = match opcode {
            Opcode::Signal => 0,
            Opcode::Send if flags & Self::INLINE != 0 => abi::PUSHGATE_INLINE_SEND,
            Opcode::Put if flags & Self::INLINE != 0 => abi::PUSHGATE_INLINE_PUT,
            _ => abi::PUSHGATE_MAX_MESSAGE,
        };
        if length > limit {
            return Err(Malformed::Length { length, limit });
        }
        Ok(Record {
            opcode,
            flags,
            id: ((w[0] >> abi::PUSHGATE_ID_HIGH_SHIFT) as u32 & 0xff) << abi::PUSHGATE_ID_LOW_BITS
                | (w[1] >> abi::PUSHGATE_ID_LOW_SHIFT) as u32 & 0xff_ffff,
            length,
            tag: w[1] as u32,
            place: w[5] as u32,
            place_offset: w[6] & DATA,
            rkey: w[2] as u32,
            remote_offset: w[3] & DATA,
            signal: (w[2] >> abi::PUSHGATE_SIGNAL_SHIFT) as u32 & 0xff_ffff,
            signal_value: w[4] & DATA,
        })
    }
}

/// Where an opcode's inline payload lies: first data word, word of the top bytes, number of data
/// words.
#[inline(always)]
fn inline_area(opcode: Opcode) -> Option<(usize, usize, usize)> {
    match opcode {
        Opcode::Send => Some((3, 2, 5)),
        Opcode::Put => Some((5, 7, 2)),
        Opcode::Nop | Opcode::Signal => None,
    }
}

/// Packs `payload` into the inline area of a SEND or PUT.
///
/// # Panics
/// If the opcode has no inline area or `payload` is longer than the area.
pub fn set_inline(words: &mut RecordWords, opcode: Opcode, payload: &[u8]) {
    let (first, tops, n) = inline_area(opcode).expect("opcode without inline payload");
    assert!(payload.len() <= n * 8, "inline payload of {} bytes, at most {}", payload.len(), n * 8);
    let mut bytes = [0u8; abi::PUSHGATE_INLINE_SEND as usize];
    bytes[..payload.len()].copy_from_slice(payload);
    words[tops] &= LAP;
    for i in 0..n {
        let d = u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("eight bytes"));
        words[first + i] = words[first + i] & LAP | d & DATA;
        words[tops] |= d >> 56 << (8 * i);
    }
}

/// Unpacks the inline area of a SEND or PUT; bytes past the record's length are whatever the words
/// held.
pub fn inline(words: &RecordWords, opcode: Opcode) -> [u8; abi::PUSHGATE_INLINE_SEND as usize] {
    let mut bytes = [0u8; abi::PUSHGATE_INLINE_SEND as usize];
    if let Some((first, tops, n)) = inline_area(opcode) {
        for i in 0..n {
            let d = words[first + i] & DATA | (words[tops] >> (8 * i) & 0xff) << 56;
            bytes[i * 8..i * 8 + 8].copy_from_slice(&d.to_le_bytes());
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zeroed_ring_is_the_lap_before_the_first() {
        assert_eq!(lap_of(0, 4), 1);
        assert_eq!(lap_of(15, 4), 1);
        assert_eq!(lap_of(16, 4), 2);
        assert_eq!(lap_of(255 * 16, 4), 0);
        assert_eq!(lap_of(256 * 16, 4), 1);
    }

    #[test]
    fn fields_survive_the_words() {
        let r = Record {
            opcode: Opcode::Put,
            flags: Record::SIGNALED | Record::WITH_SIGNAL | Record::REGION,
            id: 0xdead_beef,
            length: 12345,
            tag: 0x8765_4321,
            place: 0xffff_fff0,
            place_offset: DATA,
            rkey: 0x1234_5678,
            remote_offset: 0x00ab_cdef_0123_4567,
            signal: 0xff_fffe,
            signal_value: DATA - 1,
        };
        let w = r.encode(0xa5);
        assert!(w.iter().all(|w| w >> 56 == 0xa5));
        assert_eq!(Record::decode(&w), Ok(r));
    }

    #[test]
    fn inline_payload_survives_at_every_length() {
        let src: Vec<u8> = (0..40).map(|i| 255 - i as u8).collect();
        for (op, max) in [(Opcode::Send, 40), (Opcode::Put, 16)] {
            for n in 0..=max {
                let mut w = Record { flags: Record::INLINE, length: n as u32, ..Record::new(op) }.encode(7);
                set_inline(&mut w, op, &src[..n]);
                assert!(w.iter().all(|w| w >> 56 == 7), "laps untouched");
                assert_eq!(&inline(&w, op)[..n], &src[..n]);
                assert_eq!(Record::decode(&w).unwrap().length, n as u32);
            }
        }
    }

    #[test]
    fn wrong_fields_are_named() {
        let w = |op: u64, flags: u64, len: u64| [op << 48 | flags << 40 | len, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(Record::decode(&w(0, 0, 0)), Err(Malformed::Opcode(0)));
        assert_eq!(Record::decode(&w(5, 0, 0)), Err(Malformed::Opcode(5)));
        assert_eq!(Record::decode(&w(2, 8, 0)), Err(Malformed::Flags { opcode: 2, flags: 8 }));
        assert_eq!(Record::decode(&w(2, 3, 0)), Err(Malformed::Flags { opcode: 2, flags: 3 }));
        assert_eq!(Record::decode(&w(2, 0x10, 0)), Err(Malformed::Flags { opcode: 2, flags: 0x10 }));
        assert_eq!(Record::decode(&w(2, 1, 41)), Err(Malformed::Length { length: 41, limit: 40 }));
        assert_eq!(Record::decode(&w(3, 1, 17)), Err(Malformed::Length { length: 17, limit: 16 }));
        assert_eq!(Record::decode(&w(4, 0, 1)), Err(Malformed::Length { length: 1, limit: 0 }));
    }
}
