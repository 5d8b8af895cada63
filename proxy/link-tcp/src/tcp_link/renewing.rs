//! The next link of a session over byte streams: new streams, which begin at 0. Mirror, window, regions and posted receives
//! stay; the peer is told of regions and receives again.

use pushgate_driver_shim::log::Foreign;
use pushgate_link::frame::Frame;
use pushgate_link::{Renew, RenewError};

use super::super::incoming::Incoming;
use super::super::meeting::Place;
use super::super::outgoing::Outgoing;
use super::{Ending, Next, TcpLink};

impl TcpLink {
    /// Gives the next link up.
    pub(super) fn give_next_up(&mut self) {
        match std::mem::take(&mut self.next) {
            Next::Nothing => {}
            Next::Offered | Next::Meeting => self.meeting.give_up(),
            // It has read and written nothing yet.
            Next::Met(_) => {}
        }
    }
}

impl Renew for TcpLink {
    fn fence(&mut self, now: u64) -> bool {
        self.now = self.now.max(now);
        self.give_next_up();
        // Also streams that were still to come.
        self.meeting.give_up();
        self.ending = Ending::Closing(None);
        let stopped = self.wire.as_mut().is_none_or(|wire| wire.stopped());
        if stopped {
            self.wire = None;
        }
        stopped
    }

    fn offer(&mut self) -> Result<Option<Frame>, RenewError> {
        self.give_next_up();
        let place = self.meeting.offer().map_err(RenewError::Here)?;
        self.next = Next::Offered;
        let bytes = serde_json::to_vec(&place).expect("a place is plain data");
        Ok(Some(Frame { bytes, along: Default::default() }))
    }

    fn prepare(&mut self, offer: Frame) -> Result<(), RenewError> {
        let peer = |why: String| RenewError::Peer(format!("its offer of the next link: {why}"));
        if offer.along.into_owned().is_ok_and(|fds| !fds.is_empty()) {
            return Err(peer("descriptors, expected none".into()));
        }
        let place: Place =
            serde_json::from_slice(&offer.bytes).map_err(|e| peer(Foreign::word(e).to_string()))?;
        place.check().map_err(peer)?;
        self.meeting.begin(&place, self.terms.streams).map_err(RenewError::Here)?;
        self.next = Next::Meeting;
        Ok(())
    }

    fn prepared(&mut self) -> Result<Option<Vec<u8>>, RenewError> {
        if let Next::Meeting = self.next {
            match self.meeting.met() {
                None => return Ok(None),
                Some(Err(why)) => {
                    self.next = Next::Nothing;
                    return Err(RenewError::Here(why));
                }
                Some(Ok(wire)) => self.next = Next::Met(wire),
            }
        }
        Ok(Some(Vec::new()))
    }

    fn go(&mut self, _places: &[u8], accepted: u64) -> Result<(), RenewError> {
        let Next::Met(wire) = std::mem::take(&mut self.next) else {
            unreachable!("a link goes live when both ends have prepared")
        };
        if let Some(receives) = &mut self.peer_receives {
            let mask = self.flight.taken.len() as u64 - 1;
            let sent = accepted..self.flight.base + self.flight.sent;
            receives.put_back(
                sent.filter_map(|message| self.flight.taken[(message & mask) as usize].take()).collect(),
            );
            receives.rewind(accepted);
        }
        let slots = 1 << self.terms.geometry.link_log;
        self.incoming = (0..self.terms.streams).map(Incoming::new).collect();
        self.outgoing = Outgoing::new(self.terms.streams, slots, accepted, self.terms.sums, self.terms.part);
        self.flight.copies.rewind(accepted);
        (self.flight.base, self.flight.sent, self.flight.completed, self.flight.settled) =
            (accepted, 0, accepted, accepted);
        self.inbox.begin();
        self.tell_regions_anew();
        // Receives that the peer was told of before are told again: the words are the same.
        self.news.receives_told = self.inbox.oldest_told_again();
        (self.news.counts_due, self.news.waited) = (true, 0);
        (self.failed, self.deserted, self.ending) = (None, false, Ending::Open);
        (self.lost.ended, self.mute) = (0, false);
        (self.quiet.sent, self.quiet.seen, self.quiet.since) = (0, 0, self.now);
        self.adopt_wire(wire);
        Ok(())
    }
}
