//! Why a request was refused, as it fits the detail of a status word: so the reason reaches both ends of a queue pair,
//! whichever of them knew it.

use pushgate_abi::abi;

use crate::session::Status;

/// Why something that a rank asked for was refused. Numbers are never used again: ends of two releases may meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// The end that refused it is of a release that does not say, or a later one.
    Unknown = 0,
    /// A WQE that the ring does not allow.
    Wqe = 1,
    /// The payload's own region.
    Source = 2,
    /// The peer's region.
    Target = 3,
    /// The signal.
    Signal = 4,
    /// Longer than its receive, or than what the peer has room for.
    Long = 5,
    /// A payload in a region, which the link can't send.
    Unreadable = 6,
    /// The region of a posted receive, or a count of receives.
    Receive = 7,
    /// The bytes could not be brought to the device.
    Device = 8,
    /// What no engine of this release does.
    Protocol = 9,
}

/// Low bits of the detail: the slot. All ones: no slot is named.
const SLOT_BITS: u32 = 24;
const NO_SLOT: u32 = (1 << SLOT_BITS) - 1;

impl Refusal {
    const ALL: [Refusal; 9] = [
        Refusal::Wqe,
        Refusal::Source,
        Refusal::Target,
        Refusal::Signal,
        Refusal::Long,
        Refusal::Unreadable,
        Refusal::Receive,
        Refusal::Device,
        Refusal::Protocol,
    ];

    /// The status of a queue pair that ends because something of `rank` was refused, in this slot of its WQE ring if the
    /// end that refuses knows the slot.
    pub fn status(self, rank: u32, slot: Option<u64>) -> Status {
        let slot = slot.map_or(NO_SLOT, |slot| slot as u32 & NO_SLOT);
        let detail = (self as u32) << SLOT_BITS | slot;
        Status { rank: Some(rank), detail, ..Status::new(abi::PUSHGATE_REFUSED) }
    }

    /// The reason, and the low bits of the slot if one is named, by the detail of a status.
    pub fn of(detail: u32) -> (Refusal, Option<u32>) {
        let number = detail >> SLOT_BITS;
        let refusal = Refusal::ALL.into_iter().find(|refusal| *refusal as u32 == number);
        let slot = detail & NO_SLOT;
        (refusal.unwrap_or(Refusal::Unknown), (number != 0 && slot != NO_SLOT).then_some(slot))
    }

    /// The reason as a part of a sentence, with the remedy.
    pub fn words(self) -> &'static str {
        match self {
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
            Refusal::Long => {
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
        }
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
    fn p8_any_detail_is_a_reason_with_words() {
        for detail in [0, 9, u32::MAX, 200 << 24, 10 << 24 | 4] {
            assert!(!Refusal::of(detail).0.words().is_empty());
        }
        // A release that does not say the reason says a slot, or 0 for none.
        assert_eq!(Refusal::of(0), (Refusal::Unknown, None));
    }
}
