//! Receives that the device has posted.

use pushgate_abi::abi;
use pushgate_abi::record::lap_of;

/// A receive that the device has posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// How many receives were posted before it.
    pub number: u64,
    /// The buffer's region.
    pub key: u32,
    /// The buffer's offset in its region, bytes.
    pub offset: u64,
    /// Bytes that the buffer takes.
    pub length: u32,
    /// Tag of the messages that the receive takes, or `PUSHGATE_ANY_TAG`.
    pub tag: u32,
}

impl Posted {
    /// Decodes the words of receive `number` in a ring of `1 << log`; `None` if one of them is not written yet.
    pub fn decode(number: u64, log: u32, words: &[u64; abi::PUSHGATE_RECV_WORDS as usize]) -> Option<Self> {
        let lap = lap_of(number, log);
        if words.iter().any(|w| (w >> abi::PUSHGATE_LAP_SHIFT) as u8 != lap) {
            return None;
        }
        Some(Posted {
            number,
            key: words[0] as u32,
            offset: words[1] & abi::PUSHGATE_DATA_MASK,
            length: words[2] as u32,
            tag: words[3] as u32,
        })
    }

    /// Whether a SEND of this tag may take the receive.
    pub(super) fn takes(&self, tag: u32) -> bool {
        self.tag == abi::PUSHGATE_ANY_TAG || self.tag == tag
    }
}
