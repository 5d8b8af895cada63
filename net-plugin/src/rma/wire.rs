//! The header of a message between two ranks: one unit of the window, in front of the payload.
//!
//! | word | content |
//! | --- | --- |
//! | 0 | "PGRMA1" in the low 6 bytes; kind; 1 if a signal follows |
//! | 1 | number of the memory; number of the signal's memory |
//! | 2 | offset in the memory |
//! | 3 | offset in the signal's memory |
//! | 4 | what is added to the signal |
//! | 5 | the get that a message belongs to, by its sender's number |
//! | 6 | bytes: of the payload behind the header; of a get, all that is asked for |
//! | 7 | zero |
//!
//! Memories have the same numbers on all ranks: NCCL registers them collectively, so each rank counts alike.

use pushgate_driver_shim::abi;

/// Bytes of a header.
pub const HEADER: usize = abi::PUSHGATE_UNIT as usize;
const WORDS: usize = HEADER / size_of::<u64>();
const MAGIC: u64 = u64::from_le_bytes(*b"PGRMA1\0\0");
const MAGIC_BITS: u64 = (1 << 48) - 1;

/// A header's words.
pub type Words = [u64; WORDS];

/// Bytes in a rank's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The memory's number.
    pub memory: u32,
    /// Bytes from the memory's beginning.
    pub offset: u64,
}

/// What is added to a signal, and where the signal lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adds {
    /// The signal's 8 bytes.
    pub at: Place,
    /// What is added, modulo 2^64.
    pub value: u64,
}

/// What a message asks of the rank that it arrives at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// The first message of a queue pair: who sends. `ranks`: how many the sender's coll comm has.
    Hello { rank: u32, ranks: u32 },
    /// Payload for the memory at `to`; then, if there is one, a signal.
    Put { to: Place, bytes: u64, signal: Option<Adds> },
    /// The sender wants these bytes, which are to be sent as [`Header::Data`] of this `get`.
    Get { from: Place, bytes: u64, get: u64 },
    /// Payload of a get, from `offset` of the bytes that were asked for.
    Data { get: u64, offset: u64, bytes: u64 },
    /// The sender closes its coll comm: no more messages follow.
    Bye,
}

const HELLO: u8 = 1;
const PUT: u8 = 2;
const GET: u8 = 3;
const DATA: u8 = 4;
const BYE: u8 = 5;

impl Header {
    /// The header's words.
    pub fn encode(&self) -> Words {
        let mut w = [0; WORDS];
        let mut kind = |kind: u8, signal: bool| {
            w[0] = MAGIC | u64::from(kind) << 48 | u64::from(signal) << 56;
        };
        match *self {
            Header::Hello { rank, ranks } => {
                kind(HELLO, false);
                (w[1], w[2]) = (rank.into(), ranks.into());
            }
            Header::Put { to, bytes, signal } => {
                kind(PUT, signal.is_some());
                (w[1], w[2], w[6]) = (to.memory.into(), to.offset, bytes);
                if let Some(Adds { at, value }) = signal {
                    w[1] |= u64::from(at.memory) << 32;
                    (w[3], w[4]) = (at.offset, value);
                }
            }
            Header::Get { from, bytes, get } => {
                kind(GET, false);
                (w[1], w[2], w[5], w[6]) = (from.memory.into(), from.offset, get, bytes);
            }
            Header::Data { get, offset, bytes } => {
                kind(DATA, false);
                (w[2], w[5], w[6]) = (offset, get, bytes);
            }
            Header::Bye => kind(BYE, false),
        }
        w
    }

    /// Reads a header that lies in front of `payload` bytes. Fails with what is wrong with it.
    pub fn decode(w: &Words, payload: usize) -> Result<Header, String> {
        if w[0] & MAGIC_BITS != MAGIC {
            return Err("it begins with no header: load the same build of the plugin on all ranks".into());
        }
        let (kind, signal) = ((w[0] >> 48) as u8, (w[0] >> 56) as u8);
        let place = Place { memory: w[1] as u32, offset: w[2] };
        let header = match (kind, signal) {
            (HELLO, 0) => Header::Hello { rank: w[1] as u32, ranks: w[2] as u32 },
            (PUT, 0 | 1) => {
                let at = Place { memory: (w[1] >> 32) as u32, offset: w[3] };
                let signal = (signal == 1).then_some(Adds { at, value: w[4] });
                Header::Put { to: place, bytes: w[6], signal }
            }
            (GET, 0) => Header::Get { from: place, bytes: w[6], get: w[5] },
            (DATA, 0) => Header::Data { get: w[5], offset: w[2], bytes: w[6] },
            (BYE, 0) => Header::Bye,
            _ => return Err(format!("kind {kind} with flags {signal} is none of this version")),
        };
        let carried = match header {
            Header::Put { bytes, .. } | Header::Data { bytes, .. } => bytes,
            _ => 0,
        };
        match carried == payload as u64 {
            true => Ok(header),
            false => Err(format!("its header says {carried} bytes, and {payload} have come")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_their_words_and_p8_wrong_words_are_refused() {
        let to = Place { memory: u32::MAX, offset: u64::MAX };
        let signal = Some(Adds { at: Place { memory: 7, offset: 8 }, value: u64::MAX });
        for (header, payload) in [
            (Header::Hello { rank: 3, ranks: u32::MAX }, 0),
            (Header::Put { to, bytes: 100, signal: None }, 100),
            (Header::Put { to, bytes: 0, signal }, 0),
            (Header::Get { from: to, bytes: u64::MAX, get: 1 << 63 }, 0),
            (Header::Data { get: 5, offset: 6, bytes: 7 }, 7),
            (Header::Bye, 0),
        ] {
            let words = header.encode();
            assert_eq!(Header::decode(&words, payload), Ok(header));
            assert!(Header::decode(&words, payload + 1).is_err(), "{header:?}");
            for (bit, flags) in [(0, 0), (47, 0), (55, 0), (57, 0)] {
                let mut wrong = words;
                wrong[0] ^= 1 << bit;
                assert!(Header::decode(&wrong, payload).is_err(), "{header:?} {bit} {flags}");
            }
        }
    }
}
