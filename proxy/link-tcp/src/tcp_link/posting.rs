//! How a link over byte streams posts: messages, and what it tells the peer of itself.

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_link::receives::Ahead;
use pushgate_link::{LinkDown, crossing};

use super::super::frame::Kind;
use super::super::outgoing::Leaving;
use super::super::wire::Piece;
use super::{LAZY, MUCH, PASSES, TcpLink};

impl TcpLink {
    /// Posts a message, for which the caller holds a permit. `words` are the record as the producer wrote it.
    #[inline]
    pub(super) fn post_message(
        &mut self,
        sequence: u64,
        r: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.healthy()?;
        // A peer that has said how it ended has not just left: the endpoint hears that status next.
        if self.inbox.left && self.inbox.status == 0 {
            return Err(LinkDown::PeerLeft);
        }
        self.settle_receives(None);
        let receive = match (&mut self.peer_receives, &self.inbox.receives) {
            (Some(receives), Some(ring)) if r.opcode == Opcode::Send => {
                let receive = receives.take(ring, r.tag);
                if receive.is_none() {
                    // `receive_for` allowed it.
                    receives.go_ahead(Ahead { sequence, tag: r.tag, length: r.length });
                }
                receive
            }
            _ => None,
        };
        if !self.flight.taken.is_empty() {
            let mask = self.flight.taken.len() - 1;
            self.flight.taken[sequence as usize & mask] = receive;
        }
        let target = match receive {
            None => (r.opcode == Opcode::Put).then_some((r.rkey, r.remote_offset)),
            // `receive_for` saw that it is long enough.
            Some(p) => (p.length >= r.length).then_some((p.key, p.offset)),
        };
        let alone = !(r.opcode == Opcode::Signal || r.has(Record::INLINE) || r.length == 0);
        let placed = alone && target.is_some_and(|to| self.goes_straight(to, r.length));
        let payload = match (alone, r.has(Record::REGION)) {
            (false, _) => Piece { address: 0, bytes: 0 },
            (true, true) => {
                // `takes_region` said yes, or the region was taken back meanwhile.
                let Some(source) = self.sources.get_mut(&r.place).filter(|_| placed) else {
                    return Err(LinkDown::RegionGone);
                };
                source.last = sequence + 1;
                Piece { address: source.address + r.place_offset as usize, bytes: r.length as usize }
            }
            (true, false) => {
                let offset = (r.place as usize) << abi::PUSHGATE_UNIT_LOG;
                // The engine checked that it lies in the window.
                assert!(offset + r.length as usize <= self.window.bytes());
                Piece { address: self.window.address() + offset, bytes: r.length as usize }
            }
        };
        // What the peer copies to a region comes after what goes there straight. Over several streams also what goes
        // there straight may come in any order.
        if let Some(target) = target
            && r.length > 0
            && (!placed || self.terms.streams > 1)
        {
            self.flight.copies.posted(sequence, target, r.length);
        }
        let mut w = crossing(words, sequence).map(|word| word & abi::PUSHGATE_DATA_MASK);
        if placed || r.has(Record::REGION) {
            // Without the flag these two name a place in the mirror: here none.
            (w[5], w[6]) = (receive.filter(|_| placed).map_or(0, |p| p.number & 0xffff_ffff), 0);
        }
        self.outgoing.message(Leaving { sequence, words: w, payload, placed });
        self.flight.sent += 1;
        Ok(())
    }

    /// Whether payload can go straight to a region of the peer. It can't while this end does not know where each SEND belongs that went
    /// ahead: the peer copies those, and they come first (P6).
    #[inline]
    pub(super) fn goes_straight(&self, to: (u32, u64), length: u32) -> bool {
        self.peer_receives.as_ref().is_none_or(|receives| receives.knows_all())
            && self.peer_has(to, length)
            && !self.flight.copies.touch(to, length, 0)
    }

    /// Takes in receives that the peer has told of, until one is known for a SEND of `tag`, and gives SENDs that went ahead theirs.
    #[inline]
    pub(super) fn settle_receives(&mut self, tag: Option<u32>) -> bool {
        if let Some(receives) = &mut self.peer_receives
            && (tag.is_some() || !receives.knows_all())
            && let Some(ring) = &self.inbox.receives
        {
            let (taken, copies, completed, received) = (
                &mut self.flight.taken,
                &mut self.flight.copies,
                self.flight.completed,
                self.flight.received,
            );
            return receives.learn(ring, tag, |send, receive| {
                // What has completed is not posted again.
                if send.sequence >= completed {
                    let mask = taken.len() - 1;
                    taken[send.sequence as usize & mask] = Some(receive);
                }
                // What the peer has accepted may still wait there for its copy (P6).
                if send.sequence >= received && send.length > 0 {
                    copies.posted(send.sequence, (receive.key, receive.offset), send.length);
                }
            });
        }
        false
    }

    /// Whether the peer has told of a region that has such a stretch.
    pub(super) fn peer_has(&self, (key, offset): (u32, u64), length: u32) -> bool {
        let region = self.inbox.regions.get(&key);
        region.is_some_and(|bytes| offset.checked_add(length as u64).is_some_and(|end| end <= *bytes))
    }

    /// Whether the peer was not told of all posted receives of this end.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.terms.posts_receives && self.news.receives_told < self.inbox.posts
    }

    /// Tells the peer of posted receives, as far as there is room.
    fn tell_receives(&mut self) {
        while self.has_news() && self.outgoing.has_room() {
            let number = self.news.receives_told;
            // Those that a message has taken too: it may have come before the peer knew of its receive.
            let words = self.inbox.receive(number);
            self.outgoing.control(Kind::Receive, &[number, words[0], words[1], words[2], words[3]]);
            self.news.receives_told += 1;
        }
    }

    /// Makes frames of what the peer is to be told, as far as there is room.
    #[inline]
    pub(super) fn control(&mut self) {
        self.settle_receives(None);
        while !self.news.untold.is_empty() && self.outgoing.has_room() {
            let (key, bytes) = self.news.untold.pop_front().expect("there is one");
            self.outgoing.control(Kind::Region, &[key as u64, bytes]);
        }
        // After all regions that there were when the peer asked.
        if self.news.answers_sent != self.inbox.asked
            && self.news.untold.is_empty()
            && self.outgoing.has_room()
        {
            self.news.answers_sent = self.inbox.asked;
            self.outgoing.control(Kind::Answer, &[self.news.answers_sent]);
        }
        if self.news.asks_sent != self.news.asks.get() && self.outgoing.has_room() {
            self.news.asks_sent = self.news.asks.get();
            self.outgoing.control(Kind::Ask, &[self.news.asks_sent]);
        }
        if self.has_news() || self.news.counts_due {
            // Nothing is due soon while the peer's messages need not wait for news.
            let untold = self.inbox.posts - self.news.receives_told;
            let lazy = self.terms.thrifty
                && self.inbox.short
                && untold < u64::from(self.terms.takes_ahead).div_ceil(2);
            // The peer may be waiting for a receive where it knows of none.
            let starves = !lazy && self.has_news() && !self.inbox.has_receive_before(self.news.receives_told);
            let much = self.inbox.taken >= MUCH || self.news.waited >= if lazy { LAZY } else { PASSES };
            if starves || much || !self.outgoing.is_empty() {
                self.tell_receives();
                if self.news.counts_due && self.outgoing.has_room() {
                    self.inbox.taken = 0;
                    let c = self.news.counts;
                    self.outgoing.control(Kind::Counts, &[c.released, c.received, c.granted]);
                    self.news.counts_due = false;
                }
                // What found no room goes as soon as there is some.
                self.news.waited = if self.has_news() || self.news.counts_due { LAZY } else { 0 };
            } else {
                self.news.waited += 1;
            }
        }
        if self.news.status_due && self.outgoing.has_room() {
            self.outgoing.control(Kind::Status, &[self.news.status]);
            self.news.status_due = false;
        }
        if self.news.leave_due && self.outgoing.has_room() {
            self.outgoing.control(Kind::Leave, &[]);
            self.news.leave_due = false;
        }
    }

    /// Sends a beat, where nothing else is under way.
    pub(super) fn beat(&mut self) {
        if self.outgoing.is_empty() && self.outgoing.has_room() {
            self.outgoing.control(Kind::Beat, &[]);
        }
    }
}
