//! One direction of a session over rails that break and come back: everything arrives once and in order, and no older byte
//! lies over a newer one.

use std::collections::VecDeque;

use proptest::prelude::*;
use pushgate_abi::record::{Opcode, Record, RecordWords};

use super::arriving::{Arriving, Unfit};
use super::placing::{Placing, Target};
use super::sending::Sending;
use super::{MOST_RAILS, Rules, Stripe};
use crate::gate::Budget;

const RULES: Rules = Rules { window_log: 3, shortest: 64 };
const BUDGET: Budget = Budget { send_slots: 5, cq_slots: 5, bytes: 700 };
/// Bytes of the peer's region, in units of 64.
const REGION: usize = 16;

fn put(begin: usize, units: usize) -> Record {
    let (length, remote_offset) = (64 * units as u32, 64 * begin as u64);
    Record { length, remote_offset, rkey: 1, ..Record::new(Opcode::Put) }
}

fn words(message: u64, record: &Record) -> RecordWords {
    Record { id: message as u32, ..*record }.encode(0)
}

/// Posts the next stripe, if a rail has room for it.
fn post(sending: &mut Sending) -> Option<(usize, Stripe)> {
    let (rail, permit, stripe) = sending.reserve()?;
    permit.post();
    sending.posted(rail);
    Some((rail, stripe))
}

/// A rail of the test: what travels over it, and whether the bytes have landed.
#[derive(Default)]
struct Rail {
    flying: VecDeque<(Stripe, bool)>,
    /// Stripes that were posted and whose work requests have not completed.
    incomplete: u32,
    /// The link broke, and the receiver has not fenced it.
    broken: bool,
}

struct World {
    sending: Sending,
    arriving: Arriving,
    placing: Placing,
    records: Vec<Record>,
    rails: Vec<Rail>,
    /// For each unit of the region one more than the message that was written there last.
    region: [u64; REGION],
    /// For each message, the stripes whose bytes landed beside the region.
    landed: Vec<u8>,
    /// Messages that the sender knows to be received.
    heard: u64,
}

impl World {
    fn new(rails: usize) -> Self {
        let mut sending = Sending::new(RULES, rails);
        (0..rails).for_each(|rail| sending.join(rail, BUDGET));
        World {
            sending,
            arriving: Arriving::new(RULES.window_log),
            placing: Placing::new(1 << RULES.window_log),
            records: Vec::new(),
            rails: (0..rails).map(|_| Rail::default()).collect(),
            region: [0; REGION],
            landed: Vec::new(),
            heard: 0,
        }
    }

    fn post(&mut self, x: usize) {
        if self.records.len() as u64 - self.heard == 1 << RULES.window_log {
            return;
        }
        let (begin, units) = (x % REGION, 1 + x / REGION % 7);
        let record = match x % 5 {
            0 => Record::new(Opcode::Signal),
            1 => Record { length: 64 * units as u32, ..Record::new(Opcode::Send) },
            _ => put(begin, units.min(REGION - begin)),
        };
        let is_put = record.opcode == Opcode::Put;
        let placed = is_put && self.placing.may_place(1, record.remote_offset, record.length);
        let message = self.sending.post(record.length, placed);
        let target = if is_put { Target::Region(1, record.remote_offset) } else { Target::Nowhere };
        self.placing.posted(message, target, record.length);
        assert_eq!(message, self.records.len() as u64);
        self.records.push(record);
        self.landed.push(0);
    }

    fn pump(&mut self) {
        while let Some((rail, stripe)) = post(&mut self.sending) {
            assert!(!self.rails[rail].broken, "a stripe over a rail that broke");
            self.rails[rail].flying.push_back((stripe, false));
            self.rails[rail].incomplete += 1;
        }
    }

    /// The bytes of a stripe land: in whatever order, and until the fence.
    fn land(&mut self, rail: usize, nth: usize) {
        let Some((stripe, landed)) = self.rails[rail].flying.get_mut(nth) else { return };
        if std::mem::replace(landed, true) {
            return;
        }
        let stripe = *stripe;
        if stripe.placed {
            let first = (self.records[stripe.message as usize].remote_offset + stripe.offset as u64) / 64;
            let units = stripe.length.div_ceil(64) as u64;
            (first..first + units).for_each(|unit| self.region[unit as usize] = stripe.message + 1);
        } else {
            self.landed[stripe.message as usize] |= 1 << stripe.index;
        }
    }

    fn arrive(&mut self, rail: usize) {
        self.land(rail, 0);
        let Some((stripe, _)) = self.rails[rail].flying.pop_front() else { return };
        let words = words(stripe.message, &self.records[stripe.message as usize]);
        self.arriving.arrive(rail, &stripe, &words).expect("the sender of this session posted it");
    }

    fn accept(&mut self) -> bool {
        let message = self.arriving.accepted();
        let Some((found, placed)) = self.arriving.accept() else { return false };
        let record = self.records[message as usize];
        assert_eq!(found, words(message, &record), "out of order");
        let units =
            record.remote_offset as usize / 64..(record.remote_offset + record.length as u64) as usize / 64;
        if record.opcode == Opcode::Put && !placed {
            // The payload landed elsewhere, and is copied when its turn comes.
            units.clone().for_each(|unit| self.region[unit] = message + 1);
        }
        if record.opcode == Opcode::Put {
            assert!(units.clone().all(|unit| self.region[unit] > message), "P3: {:?}", self.region);
        }
        true
    }

    /// The sender hears counts, which may be old.
    fn settle(&mut self, x: usize) {
        let accepted = self.arriving.accepted();
        self.heard += (accepted - self.heard) * (x as u64 % 3) / 2;
        self.sending.received(self.heard);
        self.placing.received(self.heard);
        for rail in 0..self.rails.len() {
            if self.rails[rail].broken {
                continue;
            }
            if x & 1 << rail == 0 {
                self.sending.taken(rail, self.arriving.taken(rail)).unwrap();
            }
            let n = self.rails[rail].incomplete.min(x as u32 % 4);
            if self.sending.is_up(rail) {
                self.sending.complete(rail, n);
                self.rails[rail].incomplete -= n;
            }
        }
    }

    fn fall(&mut self, rail: usize, x: usize) {
        if self.sending.is_up(rail) {
            self.sending.leave(rail);
            self.rails[rail].broken = true;
            // What is after some stripe never arrives. Its bytes may have landed.
            let kept = x % (self.rails[rail].flying.len() + 1);
            (kept..kept + x % 3).for_each(|nth| self.land(rail, nth));
            self.rails[rail].flying.truncate(kept);
        }
    }

    /// Both ends have fenced a rail that broke: what it carried is known, and goes over the others.
    fn fence(&mut self, rail: usize) {
        if self.rails[rail].broken {
            let owes = self.sending.owes(rail);
            self.rails[rail] = Rail::default();
            assert!(self.sending.owed(rail, self.arriving.taken(rail)).unwrap() <= owes);
            assert_eq!(self.sending.owes(rail), 0);
        }
    }

    fn rejoin(&mut self, rail: usize) {
        if !self.sending.is_up(rail) && !self.rails[rail].broken {
            self.sending.join(rail, BUDGET);
        }
    }

    fn finish(&mut self) {
        for _ in 0..10_000 {
            for rail in 0..self.rails.len() {
                self.fence(rail);
                self.rejoin(rail);
                self.arrive(rail);
            }
            while self.accept() {}
            self.settle(2);
            let up: Vec<usize> = (0..self.rails.len()).collect();
            for rail in up {
                let n = std::mem::take(&mut self.rails[rail].incomplete);
                self.sending.complete(rail, n);
                self.sending.taken(rail, self.arriving.taken(rail)).unwrap();
            }
            self.pump();
            if self.arriving.accepted() == self.records.len() as u64 {
                break;
            }
        }
        assert_eq!(self.arriving.accepted(), self.records.len() as u64, "P7: everything arrives");
        let mut last = [0; REGION];
        for (message, record) in self.records.iter().enumerate().filter(|(_, r)| r.opcode == Opcode::Put) {
            let first = record.remote_offset as usize / 64;
            last[first..first + record.length as usize / 64].fill(message as u64 + 1);
        }
        assert_eq!(self.region, last, "P6: an older PUT lies over a newer one");
    }
}

proptest! {
    #[test]
    fn p6_each_message_arrives_once_and_in_order_whatever_rail_breaks(
        rails in 1usize..=3,
        steps in prop::collection::vec((0u8..16, 0usize..3, 0usize..1000), 1..400),
    ) {
        let mut w = World::new(rails);
        let mut now = 0;
        for (what, rail, x) in steps {
            let rail = rail % rails;
            now += x as u64 * 3_000;
            match what {
                0..4 => w.post(x),
                4..6 => w.pump(),
                6..7 => w.land(rail, x % 5),
                7..10 => w.arrive(rail),
                10..12 => _ = w.accept(),
                12 => w.settle(x),
                13 => w.fall(rail, x),
                14 => w.fence(rail),
                _ => {
                    w.rejoin(rail);
                    w.sending.tick(now);
                }
            }
        }
        w.finish();
    }
}

#[test]
fn p6_accepted_is_a_prefix() {
    let mut a = Arriving::new(2);
    let record = put(0, 2);
    let stripe = |message, index| Stripe {
        message,
        index,
        of: 2,
        offset: 64 * index as u32,
        length: 64,
        placed: false,
    };
    a.arrive(1, &stripe(1, 0), &words(1, &record)).unwrap();
    a.arrive(1, &stripe(1, 1), &words(1, &record)).unwrap();
    a.arrive(0, &stripe(0, 1), &words(0, &record)).unwrap();
    assert_eq!((a.accept(), a.accepted()), (None, 0));
    a.arrive(0, &stripe(0, 0), &words(0, &record)).unwrap();
    assert_eq!(a.accept().map(|(words, _)| words[1] >> 40), Some(0));
    assert!(a.accept().is_some() && a.accept().is_none());
    assert_eq!((a.accepted(), a.taken(0), a.taken(1)), (2, 2, 2));
}

#[test]
fn p8_a_stripe_that_no_sender_could_have_posted_is_refused() {
    let record = put(0, 2);
    let good = Stripe { message: 0, index: 0, of: 2, offset: 0, length: 64, placed: false };
    let refused = |stripe: Stripe| {
        let mut a = Arriving::new(2);
        a.arrive(0, &good, &words(0, &record)).unwrap();
        let record = words(0, &record);
        (a.arrive(0, &stripe, &record).unwrap_err(), a.accepted())
    };
    assert!(matches!(refused(Stripe { message: 4, ..good }), (Unfit::Message { .. }, 0)));
    assert!(matches!(refused(Stripe { of: 0, ..good }), (Unfit::Index { .. }, 0)));
    assert!(matches!(refused(Stripe { of: 9, index: 3, ..good }), (Unfit::Index { .. }, 0)));
    assert!(matches!(refused(Stripe { index: 2, ..good }), (Unfit::Index { .. }, 0)));
    assert!(matches!(refused(good), (Unfit::Twice { .. }, 0)));
    assert!(matches!(refused(Stripe { index: 1, placed: true, ..good }), (Unfit::Differs { .. }, 0)));
    assert!(matches!(refused(Stripe { index: 1, of: 3, ..good }), (Unfit::Differs { .. }, 0)));
    let long = Stripe { index: 1, offset: 64, length: 65, ..good };
    assert!(matches!(refused(long), (Unfit::Length { .. }, 0)));
    assert!(matches!(refused(Stripe { index: 1, offset: u32::MAX, ..good }), (Unfit::Length { .. }, 0)));
    assert!(matches!(refused(Stripe { index: 1, offset: 0, length: 32, ..good }), (Unfit::Length { .. }, 0)));
}

#[test]
fn p8_a_peer_cannot_take_in_what_was_not_posted_nor_take_a_count_back() {
    let mut s = Sending::new(RULES, 2);
    s.join(0, BUDGET);
    for _ in 0..3 {
        s.post(0, false);
        post(&mut s).unwrap();
    }
    assert!(s.taken(0, 4).is_err() && s.taken(1, 1).is_err());
    s.taken(0, 2).unwrap();
    s.leave(0);
    assert!(s.owed(0, 1).is_err());
    assert_eq!(s.owed(0, 2), Ok(1));
}

#[test]
fn a_message_is_cut_by_measured_speed_and_what_a_rail_owes_goes_over_the_others() {
    let mut s = Sending::new(Rules { window_log: 4, shortest: 64 }, MOST_RAILS);
    let budget = Budget { send_slots: 64, cq_slots: 64, bytes: 1 << 40 };
    (0..2).for_each(|rail| s.join(rail, budget));
    let mut posted = [[0u64; MOST_RAILS]; 3];
    for (message, posted) in posted.iter_mut().enumerate() {
        s.post(1 << 20, false);
        while let Some((rail, stripe)) = post(&mut s) {
            posted[rail] += stripe.length as u64;
        }
        if message == 1 {
            // Both rails are busy. Rail 0 takes 2 ms for half a message, rail 1 takes 6 ms.
            s.tick(1_000_000);
            s.taken(0, 1).unwrap();
            s.tick(3_000_000);
            s.taken(1, 1).unwrap();
            s.tick(7_000_000);
            (0..2).for_each(|rail| s.taken(rail, 2).unwrap());
            s.received(2);
        }
    }
    assert_eq!(posted[0][..2], [1 << 19, 1 << 19]);
    let share = posted[2][0] as f64 / posted[2][1] as f64;
    assert!((2.9..3.1).contains(&share), "{posted:?}");
    // The fast one leaves: the slow one carries everything.
    s.leave(0);
    assert_eq!(s.owed(0, 2), Ok(1));
    let (rail, stripe) = post(&mut s).unwrap();
    assert_eq!((rail, stripe.message, stripe.length as u64), (1, 2, posted[2][0]));
}
