//! How a link over RDMA posts: payload and record of a message, and the control writes.

use std::sync::atomic::Ordering;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords, lap_of};
use pushgate_link::receives::RECEIVE_WORDS;
use pushgate_link::{LinkDown, crossing};

use super::super::inbox::{LINE_WORDS, NOTIFY, PLACED_FLAG, REGION_WORDS, SHORT_FLAG};
use super::super::line::{Due, Written};
use super::super::sge::{Remote, Sge};
use super::super::slot::{self, SHORT, SLOT_BYTES, SLOT_WORDS, slot_bytes};
use super::super::{CONTROL_WRS, NOTIFIES};
use super::{Held, VerbsLink};

impl VerbsLink {
    /// Writes anything anywhere into the peer's inbox, with any immediate data, as no
    /// sender of ours would. At most 32 words.
    #[cfg(feature = "test-ungated")]
    pub fn forge(&mut self, byte: usize, words: &[u64], imm: Option<u32>) -> Result<(), LinkDown> {
        const AT: usize = 64;
        for (word, value) in self.outbox.words[AT..AT + SLOT_WORDS].iter().zip(words) {
            word.store(*value, Ordering::Relaxed);
        }
        self.chain.write(self.outbox(AT, words.len() * 8), self.at_inbox(byte), imm, true);
        self.flush()
    }

    /// Posts a message's payload and record, for which the caller holds a permit. `words` are the record as the producer
    /// wrote it.
    #[inline]
    pub(super) fn post_message(
        &mut self,
        sequence: u64,
        r: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.health.healthy()?;
        if self.health.is_deserted() {
            return Err(LinkDown::PeerLeft);
        }
        // Control writes come after the messages of a pass.
        if !self.chain.has_room(2 + CONTROL_WRS as usize) {
            self.flush()?;
        }
        // Slots, laps and announcements begin anew with each link.
        let cursor = sequence - self.flight.base;
        let index = cursor as usize & (self.flight.last_wr.len() - 1);
        let first = abi::PUSHGATE_PAGE as usize / 8 + index * SLOT_WORDS;
        let receive = match &mut self.receives.peer {
            Some(receives) if r.opcode == Opcode::Send => receives.take(self.inbox.receives(), r.tag),
            _ => None,
        };
        if let Some(taken) = self.flight.taken.get_mut(index) {
            *taken = receive;
        }
        let target = match receive {
            None => (r.opcode == Opcode::Put).then_some((r.rkey, r.remote_offset)),
            // `receive_for` saw that it is long enough.
            Some(p) => (p.length >= r.length).then_some((p.key, p.offset)),
        };
        // A receive completion says that what was written before it is there. Nothing says so of a
        // record that announces itself, but the completion of its payload's WRITE.
        let announced = r.opcode == Opcode::Send && self.terms.imm;
        let holds = !(self.agrees.in_order || announced);
        let before = self.chain.written;
        let (flags, bytes) = self.post_payload((sequence, cursor), first, r, target, holds)?;
        let payload = self.chain.written;
        if let Some(target) = target
            && r.length > 0
        {
            if flags & PLACED_FLAG == 0 {
                self.flight.copies.posted(sequence, target, r.length);
            } else if !self.agrees.in_order {
                self.flight.copies.written(sequence, payload, target, r.length);
            }
        }
        let lap = (lap_of(cursor, self.own.out_log) as u64) << abi::PUSHGATE_LAP_SHIFT;
        let mut w = crossing(words, sequence);
        w[0] |= flags;
        if flags & PLACED_FLAG != 0 || r.has(Record::REGION) {
            // Without the flag these two name a place in the mirror: here none.
            let placed = receive.filter(|_| flags & PLACED_FLAG != 0);
            (w[5], w[6]) = (placed.map_or(0, |p| p.number & 0xffff_ffff), 0);
        }
        for (word, value) in self.outbox.words[first..].iter().zip(w) {
            word.store(value & abi::PUSHGATE_DATA_MASK | lap, Ordering::Relaxed);
        }
        // Counts ride along: a write, a packet and its answer less than by the line. Always, for the
        // peer may look at them only once for several messages: those of a later message are later.
        for (word, value) in self.outbox.words[first..][slot::COUNTS].iter().zip(self.line.counts()) {
            word.store(value, Ordering::Relaxed);
        }
        if holds && payload > before {
            // The counts stay due, and go by the line.
            self.flight.last_wr[index] = u64::MAX;
            self.flight.held.push_back(Held { cursor, payload, bytes });
        } else {
            self.line.rode_along();
            let imm = if announced { Some(cursor as u32 & !NOTIFY) } else { self.notify_imm() };
            self.post_record(cursor, bytes, imm);
        }
        self.flight.sent += 1;
        Ok(())
    }

    /// Posts the chain.
    pub(super) fn flush(&mut self) -> Result<(), LinkDown> {
        if self.health.is_doubtful() || self.has_ended() {
            self.chain.forget();
            self.flight.held.clear();
            return self.health.healthy();
        }
        let Some(rc) = &self.rc else { return self.health.healthy() };
        // SAFETY: each names the window, a region, or the outbox, all registered for as
        // long as this queue pair: `take_objects` takes the queue pair along; a slot of the outbox is written again only when
        // its message is done, a place of the window when the peer has released it.
        if let Err(e) = unsafe { self.chain.post(rc) } {
            self.refused("posting to the RDMA queue pair", &e);
        }
        self.health.healthy()
    }

    /// The device took no request. The port may say why a moment later.
    #[cold]
    pub(super) fn refused(&mut self, what: &str, e: &std::io::Error) {
        limited!(error, self.terms.peer, rank = self.own.rank, peer = self.terms.peer, "{what}: {e}");
        self.health.doubt(abi::PUSHGATE_DOWN_WC);
    }

    /// A stretch of the outbox, from a word on.
    #[inline]
    pub(super) fn outbox(&self, word: usize, bytes: usize) -> Sge {
        let address = self.outbox.address + word as u64 * 8;
        Sge { address, bytes: bytes as u32, key: self.outbox.key, own: true }
    }

    /// A stretch of the peer's inbox, from a byte on.
    #[inline]
    pub(super) fn at_inbox(&self, byte: usize) -> Remote {
        // `VerbsPrepared::join` saw that it does not wrap.
        Remote { address: self.peer_places.inbox + byte as u64, key: self.peer_places.inbox_key }
    }

    /// Immediate data that only wakes, if the peer may sleep and a receive is left for it.
    #[inline]
    pub(super) fn notify_imm(&mut self) -> Option<u32> {
        if !self.agrees.peer_events {
            return None;
        }
        let taken = self.inbox.notified();
        // A peer that counts more than were sent gets none: plain writes still arrive.
        if taken > self.notifies_sent || self.notifies_sent - taken >= NOTIFIES as u64 {
            return None;
        }
        self.notifies_sent += 1;
        Some(NOTIFY)
    }

    /// Writes the line to the peer.
    pub(super) fn write_line(&mut self, due: Due) {
        let first = due.at * LINE_WORDS;
        for (word, value) in self.outbox.words[first..].iter().zip(due.words) {
            word.store(value, Ordering::Relaxed);
        }
        let imm = if due.wakes { self.notify_imm() } else { None };
        self.chain.write(self.outbox(first, LINE_WORDS * 8), self.at_inbox(0), imm, due.asks);
        if due.asks {
            self.line.written(self.chain.written);
        }
    }

    /// Word of the outbox where our receives begin.
    pub(super) fn outbox_receives(&self) -> usize {
        // Behind the slots, where an inbox has its table of regions.
        self.peer_layout.regions / 8
    }

    /// Writes to the peer the receives that it was not told of, if the last ones have
    /// arrived.
    pub(super) fn tell_receives(&mut self) {
        if self.receives.wr > self.chain.done {
            return;
        }
        let ring = 1u64 << self.own.rx_log;
        // At most twice: there are no more than the ring has.
        while self.receives.told < self.receives.noted {
            let first = self.receives.told & (ring - 1);
            let n = (self.receives.noted - self.receives.told).min(ring - first);
            let word = first as usize * RECEIVE_WORDS;
            let to = self.at_inbox(self.peer_layout.receives + word * 8);
            let from = self.outbox(self.outbox_receives() + word, n as usize * RECEIVE_WORDS * 8);
            self.chain.write(from, to, None, true);
            self.receives.told += n;
            self.receives.wr = self.chain.written;
        }
    }

    /// Control writes that are due. Their slots are set aside: one of each kind is
    /// in the send queue at a time.
    pub(super) fn control(&mut self) {
        if self.health.is_deserted() || self.has_ended() {
            return;
        }
        let told = self.receives.told;
        self.tell_receives();
        if self.receives.told != told {
            // Nothing but what comes after it wakes a peer that waits for one of them.
            self.line.touch_to_wake();
        }
        let follow = self.agrees.in_order && self.chain.asks_by_echo() && self.chain.copies(LINE_WORDS * 8);
        let before = Written { done: self.chain.done, in_order: self.agrees.in_order, follow };
        if let Some(due) = self.line.next(before) {
            self.write_line(due);
        }
        if self.regions.wr <= self.chain.done
            && let Some((index, entry)) = self.regions.due.pop_front()
        {
            const AT: usize = 2 * LINE_WORDS;
            for (word, value) in self.outbox.words[AT..].iter().zip(entry) {
                word.store(value, Ordering::Relaxed);
            }
            let bytes = REGION_WORDS * 8;
            let to = self.at_inbox(self.peer_layout.regions + index * bytes);
            self.chain.write(self.outbox(AT, bytes), to, None, true);
            self.regions.wr = self.chain.written;
        }
    }

    /// Writes the payload of a message, of this number in the session and this cursor, to where it belongs, or packs it
    /// behind its record, whose slot begins at word `first` of the outbox. `target` is where in a region it
    /// belongs, if it does. `signal` asks for the completion of the payload's WRITE. Returns the record's
    /// flags and the bytes of the slot.
    #[inline]
    pub(super) fn post_payload(
        &mut self,
        (sequence, cursor): (u64, u64),
        first: usize,
        r: &Record,
        target: Option<(u32, u64)>,
        signal: bool,
    ) -> Result<(u64, usize), LinkDown> {
        let record = slot_bytes(0);
        if r.opcode == Opcode::Signal || r.has(Record::INLINE) || r.length == 0 {
            return Ok((0, record));
        }
        let offset = (r.place as u64) << abi::PUSHGATE_UNIT_LOG;
        let direct = target.and_then(|to| self.direct(to, r.length)).filter(|_| {
            // What the peer copies there first must not come second.
            target.is_some_and(|to| !self.flight.copies.touch(to, r.length, self.chain.done))
        });
        if r.has(Record::REGION) {
            // `takes_region` said yes to both, or one was taken back meanwhile.
            let (Some(region), Some((to, _))) = (self.regions.own.get_mut(&r.place), direct) else {
                return Err(LinkDown::RegionGone);
            };
            let address = region.address + r.place_offset;
            let from = Sge { address, bytes: r.length, key: region.lkey, own: false };
            self.chain.write(from, to, None, signal);
            (region.used, region.last) = (self.chain.written, sequence + 1);
            return Ok((PLACED_FLAG, record));
        }
        let short = r.length as usize <= SHORT;
        if let Some((to, of_device)) = direct
            && (!short || of_device)
        {
            self.chain.write(self.window.source(offset, r.length), to, None, signal);
            return Ok((PLACED_FLAG, record));
        }
        if short {
            let mut payload = [0; SHORT];
            let payload = &mut payload[..r.length as usize];
            self.window.read(offset, payload);
            slot::pack(&self.outbox.words[first..first + SLOT_WORDS], payload, cursor, self.own.out_log);
            return Ok((SHORT_FLAG, slot_bytes(payload.len())));
        }
        let places = &self.peer_places;
        let to = Remote { address: places.mirror + offset, key: places.mirror_key };
        self.chain.write(self.window.source(offset, r.length), to, None, signal);
        Ok((0, record))
    }

    /// Writes the record of a message to the peer, out of its slot of the outbox.
    #[inline]
    pub(super) fn post_record(&mut self, cursor: u64, bytes: usize, imm: Option<u32>) {
        let index = cursor as usize & (self.flight.last_wr.len() - 1);
        let first = abi::PUSHGATE_PAGE as usize / 8 + index * SLOT_WORDS;
        let slot = (cursor & ((1 << self.own.out_log) - 1)) as usize * SLOT_BYTES;
        let to = self.at_inbox(self.peer_layout.slots + slot);
        self.chain.write(self.outbox(first, bytes), to, imm, false);
        self.flight.last_wr[index] = self.chain.written;
    }

    /// Writes the records whose payload has arrived. The peer takes slots in their order, so a record that
    /// is held back holds back those after it there.
    #[cold]
    pub(super) fn release_held(&mut self) {
        while let Some(held) = self.flight.held.front()
            && held.payload <= self.chain.done
            && self.chain.has_room(1 + CONTROL_WRS as usize)
        {
            let Held { cursor, bytes, .. } = *held;
            self.flight.held.pop_front();
            let imm = self.notify_imm();
            self.post_record(cursor, bytes, imm);
        }
    }

    /// Where payload can go without a stop, if the peer told of such a region. What
    /// it says is only believed as far as it hurts itself.
    pub(super) fn direct(&self, (rkey, offset): (u32, u64), length: u32) -> Option<(Remote, bool)> {
        let region = self.inbox.region(rkey)?;
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= region.bytes);
        inside.then(|| {
            let to = Remote { address: region.address.wrapping_add(offset), key: region.key };
            (to, region.of_device)
        })
    }
}
