//! What crosses a byte stream: frames. A frame is a header of 32 bytes, then up to 64 bytes that its kind asks for, then
//! payload, which DATA alone has. All integers are little endian.
//!
//! | offset | width | field | allowed |
//! | --- | --- | --- | --- |
//! | 0 | 8 | 0x50 | that |
//! | 1 | 8 | version | [`VERSION`] |
//! | 2 | 8 | kind | those of [`Kind`] |
//! | 3 | 8 | flags: 1 PLACED, 2 SUMMED | with DATA alone |
//! | 4 | 32 | bytes behind the header | as the kind has them; DATA: 64 and at most [`MOST_PAYLOAD`] more |
//! | 8 | 32 | number of the frame on its stream, from 0 | the next one |
//! | 12 | 32 | DATA: where the payload belongs in its message, bytes | within the message |
//! | 16 | 64 | DATA: the message's sequence number | one that is due |
//! | 24 | 32 | CRC-32 of the payload, with SUMMED; else 0 | |
//! | 28 | 32 | CRC-32 of the 28 bytes above and of what the kind asks for | |
//!
//! | kind | behind the header |
//! | --- | --- |
//! | 1 DATA | the message's record (64 bytes), then a part of the message's payload |
//! | 2 COUNTS | released, received, granted (64 bits each) |
//! | 3 STATUS | how the sender's end ended (64 bits) |
//! | 4 LEAVE | the sender leaves in order |
//! | 5 BEAT | so that something is under way |
//! | 6 RECEIVE | a posted receive of the sender: its number (64 bits), its four words |
//! | 7 REGION | a region of the sender: key (64 bits); bytes (64 bits), 0 for one that went |
//! | 8 ASK | a number (64 bits), which the receiver is to answer after all that it has told |
//! | 9 ANSWER | that number (64 bits) |

use pushgate_driver_shim::record::RecordWords;

/// Version of frames.
pub const VERSION: u8 = 1;
/// Length of a header.
pub const HEAD: usize = 32;
/// Length of a header with all that a kind may ask for.
pub const MOST_HEAD: usize = HEAD + RECORD;
/// The most payload of one frame, bytes.
pub const MOST_PAYLOAD: usize = 512 << 10;

const RECORD: usize = 64;
const MAGIC: u8 = 0x50;
const PLACED: u8 = 1;
const SUMMED: u8 = 2;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A message, or a part of it.
    Data,
    /// Counts.
    Counts,
    /// How an end ended.
    Status,
    /// An end leaves in order.
    Leave,
    /// Nothing.
    Beat,
    /// A posted receive.
    Receive,
    /// A region.
    Region,
    /// A question whether all has been told.
    Ask,
    /// The answer to it.
    Answer,
}

impl Kind {
    const ALL: [(u8, Kind, usize); 9] = [
        (1, Kind::Data, RECORD),
        (2, Kind::Counts, 24),
        (3, Kind::Status, 8),
        (4, Kind::Leave, 0),
        (5, Kind::Beat, 0),
        (6, Kind::Receive, 40),
        (7, Kind::Region, 16),
        (8, Kind::Ask, 8),
        (9, Kind::Answer, 8),
    ];

    fn of(code: u8) -> Option<(Kind, usize)> {
        Self::ALL.iter().find(|(c, ..)| *c == code).map(|(_, kind, words)| (*kind, *words))
    }

    /// Words that follow its header.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn words(self) -> usize {
        self.code().1 / 8
    }

    /// The kind's number, and how many bytes follow the header.
    fn code(self) -> (u8, usize) {
        let (code, _, bytes) = Self::ALL[self as usize];
        (code, bytes)
    }
}

/// Why bytes of a stream are no frame, or not one that may come now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The first byte is another.
    #[error("it begins with byte {0:#04x}, expected 0x50")]
    Magic(u8),
    /// The frame is of another version.
    #[error("its version is {0}, expected {VERSION}")]
    Version(u8),
    /// A kind or flags that there are not.
    #[error("its kind is {kind} with flags {flags:#x}")]
    Kind {
        /// The kind.
        kind: u8,
        /// The flags.
        flags: u8,
    },
    /// A length that the kind does not have.
    #[error("{0} bytes follow its header")]
    Length(u32),
    /// The checksum of header or payload.
    #[error("the checksum of its {0} is wrong")]
    Sum(&'static str),
    /// Another frame is due.
    #[error("its number is {found}, expected {expected}")]
    Number {
        /// The number that it has.
        found: u32,
        /// The number that is due.
        expected: u32,
    },
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// What it is.
    pub kind: Kind,
    /// DATA: the payload goes to a region of the receiver.
    pub placed: bool,
    /// DATA: the checksum of the payload, if it has one.
    pub sum: Option<u32>,
    /// Payload behind it, bytes.
    pub payload: u32,
    /// The frame's number on the stream.
    pub number: u32,
    /// DATA: where the payload belongs in the message.
    pub offset: u32,
    /// DATA: the message.
    pub message: u64,
}

impl Head {
    /// A frame of this kind without payload.
    pub fn new(kind: Kind, number: u32) -> Self {
        Head { kind, placed: false, sum: None, payload: 0, number, offset: 0, message: 0 }
    }

    /// Writes the header and `words`, which the kind asks for, and returns how many bytes these are.
    pub fn write(&self, words: &[u64], to: &mut [u8; MOST_HEAD]) -> usize {
        let (code, behind) = self.kind.code();
        debug_assert_eq!(words.len() * 8, behind);
        let flags = if self.placed { PLACED } else { 0 } | if self.sum.is_some() { SUMMED } else { 0 };
        to[..4].copy_from_slice(&[MAGIC, VERSION, code, flags]);
        to[4..8].copy_from_slice(&(behind as u32 + self.payload).to_le_bytes());
        to[8..12].copy_from_slice(&self.number.to_le_bytes());
        to[12..16].copy_from_slice(&self.offset.to_le_bytes());
        to[16..24].copy_from_slice(&self.message.to_le_bytes());
        to[24..28].copy_from_slice(&self.sum.unwrap_or(0).to_le_bytes());
        for (to, word) in to[HEAD..].chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let sum = head_sum(&to[..HEAD + behind]);
        to[28..32].copy_from_slice(&sum.to_le_bytes());
        HEAD + behind
    }

    /// Reads a header and what its kind asks for from the front of `bytes`: the header, the words, and how many bytes
    /// these are. `None`: they are not all there yet.
    pub fn read(bytes: &[u8]) -> Result<Option<(Head, RecordWords, usize)>, FrameError> {
        let Some((head, behind)) = bytes.split_at_checked(HEAD) else {
            return Ok(None);
        };
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if head[0] != MAGIC {
            return Err(FrameError::Magic(head[0]));
        }
        if head[1] != VERSION {
            return Err(FrameError::Version(head[1]));
        }
        let (code, flags, length) = (head[2], head[3], word(4));
        let Some((kind, asked)) = Kind::of(code) else { return Err(FrameError::Kind { kind: code, flags }) };
        if flags & !(PLACED | SUMMED) != 0 || flags != 0 && kind != Kind::Data {
            return Err(FrameError::Kind { kind: code, flags });
        }
        let payload = length.checked_sub(asked as u32).ok_or(FrameError::Length(length))?;
        if payload > if kind == Kind::Data { MOST_PAYLOAD as u32 } else { 0 } {
            return Err(FrameError::Length(length));
        }
        let Some(behind) = behind.get(..asked) else { return Ok(None) };
        if head_sum(&bytes[..HEAD + asked]) != word(28) {
            return Err(FrameError::Sum("header"));
        }
        let mut words = [0; 8];
        for (to, from) in words.iter_mut().zip(behind.chunks_exact(8)) {
            *to = u64::from_le_bytes(from.try_into().expect("eight bytes"));
        }
        let head = Head {
            kind,
            placed: flags & PLACED != 0,
            sum: (flags & SUMMED != 0).then(|| word(24)),
            payload,
            number: word(8),
            offset: word(12),
            message: u64::from(word(16)) | u64::from(word(20)) << 32,
        };
        Ok(Some((head, words, HEAD + asked)))
    }
}

/// The checksum of a header and of what follows it. The place of the checksum itself does not count.
fn head_sum(bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(&bytes[..28]);
    sum.update(&bytes[HEAD..]);
    sum.finalize()
}

/// Gives a frame that was changed the checksum that its header needs.
#[cfg(test)]
pub(crate) fn reseal(frame: &mut [u8]) {
    let asked = frame.get(2).and_then(|code| Kind::of(*code)).map_or(0, |(_, asked)| asked);
    if let Some(head) = frame.get(..HEAD + asked) {
        let sum = head_sum(head);
        frame[28..32].copy_from_slice(&sum.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn data() -> Head {
        Head {
            placed: true,
            sum: Some(7),
            payload: 100,
            offset: 64,
            message: 1 << 40,
            ..Head::new(Kind::Data, 9)
        }
    }

    #[test]
    fn a_frame_is_read_as_it_was_written_and_not_before_all_of_its_header_is_there() {
        for (_, kind, asked) in Kind::ALL {
            let head = if kind == Kind::Data { data() } else { Head::new(kind, 9) };
            let words: Vec<u64> = (1..=asked as u64 / 8).collect();
            let mut bytes = [0; MOST_HEAD];
            let n = head.write(&words, &mut bytes);
            for n in 0..n {
                assert_eq!(Head::read(&bytes[..n]), Ok(None));
            }
            let (read, found, length) = Head::read(&bytes).unwrap().unwrap();
            assert_eq!((read, length, &found[..words.len()]), (head, n, &words[..]));
        }
    }

    #[test]
    fn p8_each_field_that_is_wrong_is_refused_by_its_name() {
        let mut bytes = [0; MOST_HEAD];
        data().write(&[0; 8], &mut bytes);
        let wrong = |at: usize, value: u8| {
            let mut bytes = bytes;
            bytes[at] = value;
            Head::read(&bytes)
        };
        assert_eq!(wrong(0, 1), Err(FrameError::Magic(1)));
        assert_eq!(wrong(1, 2), Err(FrameError::Version(2)));
        assert_eq!(wrong(2, 0), Err(FrameError::Kind { kind: 0, flags: 3 }));
        assert_eq!(wrong(2, 5), Err(FrameError::Kind { kind: 5, flags: 3 }));
        assert_eq!(wrong(3, 4), Err(FrameError::Kind { kind: 1, flags: 4 }));
        assert!(matches!(wrong(7, 1), Err(FrameError::Length(_))));
        assert!(matches!(wrong(4, 63), Err(FrameError::Length(63))));
        assert_eq!(wrong(40, 1), Err(FrameError::Sum("header")));
    }

    proptest! {
        #[test]
        fn p8_a_header_with_any_byte_changed_is_refused(at in 0usize..MOST_HEAD, by in 1u8..) {
            let mut bytes = [0; MOST_HEAD];
            data().write(&[1, 2, 3, 4, 5, 6, 7, 8], &mut bytes);
            bytes[at] ^= by;
            prop_assert!(!matches!(Head::read(&bytes), Ok(Some(_))));
        }

        #[test]
        fn p8_no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Head::read(&bytes);
        }
    }
}
