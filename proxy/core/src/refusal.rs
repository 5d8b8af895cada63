//! Why a request was refused, as it fits the detail of a status word: so the reason reaches both ends of a queue pair,
//! whichever of them knew it.

use pushgate_abi::abi;

use crate::session::Status;

/// Why something that a rank asked for was refused. Numbers are never used again: ends of two releases may meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 0. The end that refused it is of a release that does not say, or a later one.
    Unknown,
    /// 1. A WQE that the ring does not allow.
    Wqe,
    /// 2. The payload's own region.
    Source,
    /// 3. The peer's region.
    Target,
    /// 4. The signal.
    Signal,
    /// 5, or 64 to 127 with the lengths. Longer than its receive, or than what the peer has room for.
    Long(Option<Lengths>),
    /// 6. A payload in a region, which the link can't send.
    Unreadable,
    /// 7. The region of a posted receive, or a count of receives.
    Receive,
    /// 8. The bytes could not be brought to the device.
    Device,
    /// 9. What no engine of this release does.
    Protocol,
}

/// The bytes of a message, and of the receive that it met. A status has room for lengths below 32 KiB: enough for every SEND that
/// leaves before its sender knows the receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    message: u16,
    receive: u16,
}

impl Lengths {
    /// The lengths, if a status has room for them.
    pub fn of(message: u32, receive: u32) -> Option<Self> {
        let fits = |bytes: u32| u16::try_from(bytes).ok().filter(|bytes| bytes >> LENGTH_BITS == 0);
        Some(Lengths { message: fits(message)?, receive: fits(receive)? })
    }
}

/// Low bits of the detail: the slot. All ones: no slot is named.
const SLOT_BITS: u32 = 24;
const NO_SLOT: u32 = (1 << SLOT_BITS) - 1;
/// In the place of the slot and of the low bits of the number: the lengths of a message and of its receive.
const LENGTH_BITS: u32 = 15;
const WITH_LENGTHS: u32 = 1;

impl Refusal {
    /// In the order of their numbers, from 1.
    const ALL: [Refusal; 9] = [
        Refusal::Wqe,
        Refusal::Source,
        Refusal::Target,
        Refusal::Signal,
        Refusal::Long(None),
        Refusal::Unreadable,
        Refusal::Receive,
        Refusal::Device,
        Refusal::Protocol,
    ];

    /// The status of a queue pair that ends because something of `rank` was refused, in this slot of its WQE ring if the
    /// end that refuses knows the slot and names no lengths.
    pub fn status(self, rank: u32, slot: Option<u64>) -> Status {
        let slot = slot.map_or(NO_SLOT, |slot| slot as u32 & NO_SLOT);
        let detail = match self {
            Refusal::Long(Some(Lengths { message, receive })) => {
                WITH_LENGTHS << (2 * LENGTH_BITS) | u32::from(message) << LENGTH_BITS | u32::from(receive)
            }
            _ => self.number() << SLOT_BITS | slot,
        };
        Status { rank: Some(rank), detail, ..Status::new(abi::PUSHGATE_REFUSED) }
    }

    fn number(self) -> u32 {
        let plain = if let Refusal::Long(_) = self { Refusal::Long(None) } else { self };
        Refusal::ALL.iter().position(|refusal| *refusal == plain).map_or(0, |at| at as u32 + 1)
    }

    /// The reason, and the low bits of the slot if one is named, by the detail of a status.
    pub fn of(detail: u32) -> (Refusal, Option<u32>) {
        if detail >> (2 * LENGTH_BITS) == WITH_LENGTHS {
            let length = |low: u32| (detail >> low) as u16 & ((1 << LENGTH_BITS) - 1);
            let lengths = Lengths { message: length(LENGTH_BITS), receive: length(0) };
            return (Refusal::Long(Some(lengths)), None);
        }
        let (number, slot) = (detail >> SLOT_BITS, detail & NO_SLOT);
        let refusal = Refusal::ALL.get((number as usize).wrapping_sub(1)).copied();
        (refusal.unwrap_or(Refusal::Unknown), (number != 0 && slot != NO_SLOT).then_some(slot))
    }

    /// The reason as a part of a sentence, with the remedy.
    pub fn words(self) -> String {
        let words = match self {
            Refusal::Unknown => "the log of its proxy or of its peer's says why",
            Refusal::Wqe => {
                "the WQE is none that the ring allows (lap, opcode, flags, length or place): post by the calls of \
                 device.cuh alone"
            }
            Refusal::Source => {
                "its payload is not in a region of its own: check the lkey, offset and length, and that the region is \
                 still registered"
            }
            Refusal::Target => {
                "the peer has registered no region of this rkey on this queue pair that has the bytes: check the rkey, offset \
                 and length, and that the region is still registered"
            }
            Refusal::Signal => {
                "the peer has no signal of this number: check the index, or raise `signals` there"
            }
            Refusal::Long(Some(Lengths { message, receive })) => {
                return format!(
                    "it has {message} bytes, and the receive that it met takes {receive}: send less, or post a longer receive"
                );
            }
            Refusal::Long(None) => {
                "it is longer than the receive or the landing ring that it met: send less, or post a longer receive"
            }
            Refusal::Unreadable => {
                "its payload is in a region, which this link does not send: copy the payload into the window"
            }
            Refusal::Receive => {
                "a receive was posted or given back that it does not have: check the lkey, offset and length of its receives"
            }
            Refusal::Device => "its device's memory could not be written",
            Refusal::Protocol => "it broke the protocol: run one release of pushgate on all hosts",
        };
        words.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_and_its_slot_pass_through_a_status_word() {
        for refusal in Refusal::ALL {
            for slot in [None, Some(0), Some(77), Some(5 << 24 | 9)] {
                let status = Status::from_word(refusal.status(3, slot).word()).unwrap().checked();
                let low = slot.map(|slot| slot as u32 & NO_SLOT);
                assert_eq!((status.rank, Refusal::of(status.detail)), (Some(3), (refusal, low)));
            }
        }
    }

    #[test]
    fn the_lengths_of_a_message_and_its_receive_pass_through_a_status_word_where_they_fit() {
        for (message, receive) in [(1, 0), (8192, 8191), (32767, 32766), (32767, 0)] {
            let long = Refusal::Long(Lengths::of(message, receive));
            let status = Status::from_word(long.status(3, Some(7)).word()).unwrap().checked();
            assert_eq!((status.rank, Refusal::of(status.detail)), (Some(3), (long, None)));
            let words = format!("it has {message} bytes, and the receive that it met takes {receive}: ");
            assert!(long.words().starts_with(&words), "{}", long.words());
        }
        assert_eq!([Lengths::of(32768, 1), Lengths::of(1 << 20, 1 << 16)], [None; 2]);
        assert_eq!(
            Refusal::of(Refusal::Long(None).status(3, Some(7)).detail),
            (Refusal::Long(None), Some(7))
        );
    }

    #[test]
    fn p8_any_detail_is_a_reason_with_words() {
        for detail in [0, 9, u32::MAX, 200 << 24, 10 << 24 | 4, 63 << 24, 64 << 24, 127 << 24 | 1, 128 << 24]
        {
            assert!(!Refusal::of(detail).0.words().is_empty());
        }
        assert_eq!([63 << 24, 128 << 24].map(|detail| Refusal::of(detail).0), [Refusal::Unknown; 2]);
        // A release that does not say the reason says a slot, or 0 for none.
        assert_eq!(Refusal::of(0), (Refusal::Unknown, None));
    }
}
