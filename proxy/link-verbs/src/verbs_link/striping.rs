//! Stripes of messages over RDMA, for a link that is one rail of several.
//!
//! A stripe's payload is written to where the whole message would go, from the stripe's offset on: into the copy of the
//! window or straight into the region. Its record stands in the next slot of this link's inbox, with the stripe's own
//! numbers after it. Slots are counted for each link, messages for the session.

use std::sync::atomic::Ordering;

use pushgate_core::gate::Permit;
use pushgate_core::rails::Stripe;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Record, RecordWords, lap_of};
use pushgate_link::ring::Found;
use pushgate_link::{LinkDown, Rail, StripeArrival};

use super::super::CONTROL_WRS;
use super::super::sge::{Remote, Sge};
use super::super::slot::{self, SLOT_WORDS, STRIPE_BYTES, slot_bytes};
use super::{Held, VerbsLink};

impl Rail for VerbsLink {
    fn post_stripe(
        &mut self,
        permit: Permit<'_>,
        stripe: &Stripe,
        record: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.health.healthy()?;
        if self.health.is_deserted() {
            return Err(LinkDown::PeerLeft);
        }
        // Control writes come after the stripes of a pass.
        if !self.chain.has_room(2 + CONTROL_WRS as usize) {
            self.flush()?;
        }
        // Nothing announces a record over a rail but the record itself, so it may have to wait for its payload.
        let holds = !self.agrees.in_order && stripe.length > 0;
        if stripe.length > 0 {
            self.post_part(stripe, record, holds)?;
        }
        let (cursor, bytes) = (self.flight.sent, slot_bytes(STRIPE_BYTES));
        let index = cursor as usize & (self.flight.last_wr.len() - 1);
        let first = abi::PUSHGATE_PAGE as usize / 8 + index * SLOT_WORDS;
        let lap = (lap_of(cursor, self.own.out_log) as u64) << abi::PUSHGATE_LAP_SHIFT;
        for (word, value) in self.outbox.words[first..].iter().zip(words) {
            word.store(value & abi::PUSHGATE_DATA_MASK | lap, Ordering::Relaxed);
        }
        for (word, value) in self.outbox.words[first..][slot::COUNTS].iter().zip(self.line.counts()) {
            word.store(value, Ordering::Relaxed);
        }
        let outbox = &self.outbox.words[first..first + SLOT_WORDS];
        slot::pack(outbox, &slot::stripe_bytes(stripe), cursor, self.own.out_log);
        if holds {
            self.flight.last_wr[index] = u64::MAX;
            self.flight.held.push_back(Held { cursor, payload: self.chain.written, bytes });
        } else {
            self.line.rode_along();
            self.post_record(cursor, bytes, None);
        }
        self.flight.sent += 1;
        permit.post();
        Ok(())
    }

    fn poll_stripe(&mut self, words: &mut RecordWords) -> StripeArrival {
        match self.inbox.look(words) {
            Found::Empty => StripeArrival::Empty,
            Found::Torn => StripeArrival::Torn,
            Found::Ready => self.inbox.take_stripe(words),
        }
    }

    fn stripes_taken(&self) -> u64 {
        self.inbox.stripes()
    }

    fn acknowledge_stripes(&mut self, taken: u64) {
        self.line.acknowledge_stripes(taken);
    }

    fn reaches(&self, record: &Record) -> bool {
        self.direct((record.rkey, record.remote_offset), record.length).is_some()
    }
}

impl VerbsLink {
    /// Writes a stripe's payload to where it belongs. `signal` asks for the completion of that WRITE.
    fn post_part(&mut self, stripe: &Stripe, r: &Record, signal: bool) -> Result<(), LinkDown> {
        let (offset, bytes) = (stripe.offset as u64, stripe.length);
        let place = ((r.place as u64) << abi::PUSHGATE_UNIT_LOG) + offset;
        let to = if stripe.placed {
            // The caller saw that the region is there (`Rail::reaches`); the peer may have taken it back since.
            let begin = r.remote_offset.checked_add(offset).ok_or(LinkDown::RegionGone)?;
            self.direct((r.rkey, begin), bytes).ok_or(LinkDown::RegionGone)?.0
        } else {
            let places = &self.peer_places;
            // `VerbsPrepared::join` saw that the copy of the window does not wrap, and the payload lies in the window.
            Remote { address: places.mirror + place, key: places.mirror_key }
        };
        let from = if r.has(Record::REGION) {
            let region = self.regions.own.get_mut(&r.place).ok_or(LinkDown::RegionGone)?;
            let key = region.lkey;
            // This WRITE is the next one.
            region.used = self.chain.written + 1;
            let address = region.address + r.place_offset + offset;
            Sge { address, bytes, key, own: false }
        } else {
            self.window.source(place, bytes)
        };
        self.chain.write(from, to, None, signal);
        Ok(())
    }
}
