//! Garbage that a lying engine sends over its rails.

use pushgate_core::rails::{MOST_RAILS, Stripe};
use pushgate_core::recovery::Control;
use pushgate_core::session::count_word;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_link::PeerCounts;

use super::Wires;
use crate::memory::GUARD;
use crate::program::Facts;
use crate::random::Random;

impl Wires {
    /// An end, which has posted `posted` messages, lies to the other one. Returns what the lie is, and whether the rank must be
    /// named for it if anybody is.
    pub(crate) fn lie(&self, end: usize, posted: u64, facts: &Facts, seed: u64) -> (&'static str, bool) {
        let mut random = Random::new(seed, 8);
        let state = &mut *self.state();
        let rail = random.below(state.wires.len() as u64) as usize;
        let lane = &mut state.wires[rail].lanes[1 - end];
        let put = Record {
            flags: Record::INLINE,
            length: 16,
            id: posted as u32,
            rkey: facts.rkey,
            ..Record::new(Opcode::Put)
        };
        let stripe = Stripe { message: posted, index: 0, of: 1, offset: 0, length: 0, placed: false };
        let beyond = (facts.region as u64 - 8) + 8 * random.below(GUARD as u64 / 8 - 2);
        let far = random.next() & abi::PUSHGATE_COUNT_MASK;
        let (what, stripe, record) = match random.below(12) {
            0 => ("a stripe of a PUT beyond the region", stripe, Record { remote_offset: beyond, ..put }),
            1 => {
                let record = Record { flags: 0, length: 64, remote_offset: beyond, ..put };
                (
                    "a stripe that was placed beyond the region",
                    Stripe { length: 64, placed: true, ..stripe },
                    record,
                )
            }
            2 => {
                let record = Record { flags: 0, length: 64, place: random.next() as u32, ..put };
                ("a stripe of a payload beyond the window", Stripe { length: 64, ..stripe }, record)
            }
            3 => ("a stripe of a message far ahead", Stripe { message: far, ..stripe }, put),
            4 => {
                ("a stripe of a message of before", Stripe { message: posted.wrapping_sub(1), ..stripe }, put)
            }
            5 => {
                let (index, of) = (random.next() as u8, random.below(MOST_RAILS as u64 + 3) as u8);
                ("a stripe with another number", Stripe { index, of, ..stripe }, put)
            }
            6 => {
                let (offset, length) = (random.next() as u32, random.next() as u32);
                ("a stripe of another length", Stripe { offset, length, ..stripe }, put)
            }
            7 => ("a stripe of a NOP", stripe, Record { id: posted as u32, ..Record::new(Opcode::Nop) }),
            8 => {
                lane.taken = far;
                return ("a count of stripes that cannot be", true);
            }
            9 | 10 => {
                let far = count_word(0, far);
                lane.counts = PeerCounts { released: far, received: far, granted: far };
                return ("counts that cannot be", true);
            }
            _ => {
                let epoch = random.below(3) as u32;
                let control = random.of(&[
                    Control::Break { epoch },
                    Control::Resume { epoch, accepted: far },
                    Control::Ready { epoch },
                ]);
                state.control[1 - end].push_back((0, rail, control, Vec::new()));
                return ("a control message", true);
            }
        };
        lane.ready.push_back((stripe, record.encode(0)));
        // The other end may count the stripe, and then the liar's own end finds that more was counted than it has posted.
        (what, stripe.message == far || stripe.length != 0 && record.has(Record::INLINE))
    }
}
