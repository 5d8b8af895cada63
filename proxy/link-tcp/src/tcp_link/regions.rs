//! Regions of this end, posted receives of both ends, and payload in the mirror, over byte streams.

use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_link::receives::{AHEAD_BYTES, Meets};
use pushgate_link::region::RegionMemory;
use pushgate_link::{OwnRegions, PeerMemory, Receives, RegionSends};

use super::super::inbox::OwnRegion;
use super::{Source, TcpLink};

impl Receives for TcpLink {
    fn offered_receives(&self) -> Option<bool> {
        Some(self.terms.posts_receives)
    }

    fn knows_receives(&self) -> bool {
        self.peer_receives.is_some()
    }

    fn receive_for(&self, r: &Record) -> Option<u32> {
        match self.peer_receives.as_ref()?.meets(r.tag) {
            Meets::Receive(p) => Some(p.length),
            // A payload in a region has no place in the mirror.
            Meets::Ahead if r.length <= AHEAD_BYTES && !r.has(Record::REGION) => Some(AHEAD_BYTES),
            Meets::Ahead | Meets::Unknown => None,
        }
    }

    fn learn_receives(&mut self, tag: u32) -> bool {
        self.settle_receives(Some(tag))
    }

    fn may_learn_receives(&self, tag: u32) -> bool {
        let (receives, ring) = (self.peer_receives.as_ref(), self.inbox.receives.as_ref());
        receives.zip(ring).is_some_and(|(receives, ring)| receives.may_learn(ring, tag))
    }

    fn goes_ahead(&self) -> u32 {
        self.terms.goes_ahead
    }

    fn takes_ahead(&self) -> u32 {
        self.terms.takes_ahead
    }

    fn receive_posted(&mut self, number: u64, words: [u64; 4]) {
        self.inbox.post(number, words);
    }
}

impl OwnRegions for TcpLink {
    fn takes_region(&self, r: &Record) -> RegionSends {
        if !self.sources.contains_key(&r.place) {
            return RegionSends::No(
                "the source region is not memory of the host: push the payload into the window",
            );
        }
        let to = match (r.opcode, &self.peer_receives) {
            (Opcode::Put, _) => (r.rkey, r.remote_offset),
            (_, Some(receives)) => match receives.meets(r.tag).receive() {
                Some(p) => (p.key, p.offset),
                None => return RegionSends::Unknown,
            },
            _ => return self.region_sends(),
        };
        // Nothing of an empty one has to go anywhere.
        if r.length == 0 {
            return RegionSends::Yes;
        }
        match self.peer_has(to, r.length) {
            // It can only go straight there, and what the peer copies there comes first.
            true if !self.goes_straight(to, r.length) => RegionSends::Unknown,
            true => RegionSends::Yes,
            // The program may have heard of the region by another way, and sooner than this link.
            false if !self.inbox.regions.contains_key(&to.0) && !self.was_answered(to.0) => {
                RegionSends::Unknown
            }
            false => RegionSends::No(
                "the peer has no such region in memory of its host, or not so long: push the payload into the window",
            ),
        }
    }

    fn region_sends(&self) -> RegionSends {
        match self.peer_receives {
            Some(_) => RegionSends::Yes,
            None => RegionSends::No(
                "the peer's receives name no buffers that a region could be written to: push the payload into \
                 the window",
            ),
        }
    }

    fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64) {
        // A copy engine brings payload to a device's memory, out of the mirror.
        if let RegionMemory::Host { address, .. } = memory {
            self.sources.insert(key, Source { address: *address, bytes, last: 0 });
            self.inbox.own.insert(key, OwnRegion { address: *address, bytes });
            self.news.untold.push_back((key, bytes));
        }
    }

    fn region_in_use(&mut self, key: u32, _received: u64) -> bool {
        // That the peer has the message is not enough: the wire may still read it.
        self.sources.get(&key).is_some_and(|source| source.last > self.flight.completed)
            || self.inbox.lands_in(key)
    }

    fn remove_region(&mut self, key: u32) {
        if self.sources.remove(&key).is_some() {
            self.inbox.own.remove(&key);
            match self.news.untold.iter().rposition(|(told, bytes)| *told == key && *bytes > 0) {
                // The peer need not hear of it at all.
                Some(at) => _ = self.news.untold.remove(at),
                None => self.news.untold.push_back((key, 0)),
            }
        }
    }

    fn offers(&self, key: u32) -> bool {
        self.inbox.own.contains_key(&key)
    }

    fn registers(&self, key: u32) -> bool {
        self.sources.contains_key(&key)
    }

    fn regions_told(&self) -> bool {
        // They are on their way. A peer that does not know one yet asks before it refuses a message that goes there, so this
        // end does not wait for the peer's answer: the peer's program may wait for this one.
        self.news.untold.is_empty() && self.wire.is_some()
            || self.inbox.left
            || self.failed.is_some() && !self.terms.recovers
    }
}

impl TcpLink {
    /// The peer is told of all regions anew, over another link.
    pub(super) fn tell_regions_anew(&mut self) {
        self.news.untold = self.sources.iter().map(|(key, source)| (*key, source.bytes)).collect();
        self.news.asks_for.set(None);
        (self.news.asks_sent, self.news.answers_sent) = (self.news.asks.get(), 0);
    }

    /// Whether the peer has told of all its regions since a message was to go to region `key` first. Asks the peer if not.
    fn was_answered(&self, key: u32) -> bool {
        if self.news.asks_for.get() != Some(key) {
            self.news.asks_for.set(Some(key));
            self.news.asks.set(self.news.asks.get() + 1);
            return false;
        }
        self.inbox.answered == self.news.asks.get()
    }
}

impl PeerMemory for TcpLink {
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        self.inbox.mirror.payload(unit, units)
    }

    fn in_place(&self) -> bool {
        true
    }
}
