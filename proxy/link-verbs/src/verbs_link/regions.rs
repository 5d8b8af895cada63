//! Regions of this end, posted receives of both ends, and payload in the mirror, over RDMA.

use std::sync::atomic::Ordering;

use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_link::receives::RECEIVE_WORDS;
use pushgate_link::region::RegionMemory;
use pushgate_link::{Link, OwnRegions, PeerMemory, Receives, RegionSends};

use super::super::inbox::REGION_WORDS;
use super::super::next::Region;
use super::ending::Ending;
use super::{OwnRegion, VerbsLink};

impl Receives for VerbsLink {
    fn offered_receives(&self) -> Option<bool> {
        // Over rails a SEND lands beside the buffers, and the receiver moves it.
        (!self.own.rail).then_some(self.own.tells_receives)
    }

    fn knows_receives(&self) -> bool {
        self.receives.peer.is_some()
    }

    fn receive_for(&self, r: &Record) -> Option<u32> {
        self.receives.peer.as_ref()?.meets(r.tag).receive().map(|p| p.length)
    }

    fn learn_receives(&mut self, tag: u32) -> bool {
        let receives = self.receives.peer.as_mut();
        receives.is_some_and(|receives| receives.learn(self.inbox.receives(), Some(tag), |_, _| ()))
    }

    fn may_learn_receives(&self, tag: u32) -> bool {
        self.receives.peer.as_ref().is_some_and(|receives| receives.may_learn(self.inbox.receives(), tag))
    }

    fn receive_posted(&mut self, number: u64, words: [u64; 4]) {
        if !self.own.tells_receives {
            return;
        }
        // The slot is free: what was there has arrived, for a message has taken it since.
        let slot = number as usize & ((1 << self.own.rx_log) - 1);
        let first = self.outbox_receives() + slot * RECEIVE_WORDS;
        for (word, value) in self.outbox.words[first..].iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        self.receives.noted = number + 1;
    }
}

impl OwnRegions for VerbsLink {
    fn takes_region(&self, r: &Record) -> RegionSends {
        if self.regions.registrar.awaits(r.place) {
            return RegionSends::Unknown;
        }
        if !self.regions.own.contains_key(&r.place) {
            return RegionSends::No("the source region is not registered with the RDMA device");
        }
        if r.length > self.device.longest_message() {
            return RegionSends::No(
                "the payload is longer than the RDMA device's longest message (max_msg_sz of ibv_devinfo -v): \
                 send it in pieces",
            );
        }
        let to = match (r.opcode, &self.receives.peer) {
            (Opcode::Put, _) => (r.rkey, r.remote_offset),
            (_, None) => return self.region_sends(),
            (_, Some(receives)) => match receives.meets(r.tag).receive() {
                Some(p) => (p.key, p.offset),
                None => return RegionSends::Unknown,
            },
        };
        // Nothing of an empty one has to go anywhere.
        if r.length == 0 && r.opcode == Opcode::Send {
            return RegionSends::Yes;
        }
        match self.direct(to, r.length) {
            // It can only go straight there, and what the peer copies there, or what is on its way
            // there, comes first.
            Some(_) if self.flight.copies.touch(to, r.length, self.chain.done) => RegionSends::Unknown,
            Some(_) => RegionSends::Yes,
            None => RegionSends::No(
                "the peer has no such region that its RDMA device can write, or not so long: push the \
                 payload into the window",
            ),
        }
    }

    fn region_sends(&self) -> RegionSends {
        match self.receives.peer {
            Some(_) => RegionSends::Yes,
            None => RegionSends::No(
                "the peer's receives name no buffers that a region could be written to: push the payload into \
                 the window",
            ),
        }
    }

    fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64) {
        let what = Region { key, memory: memory.clone(), bytes };
        if matches!(memory, RegionMemory::Device { exported: None, .. }) {
            // A copy engine brings it there.
            return;
        }
        if self.is_renewing() || self.rc.is_some() && !(self.terms.recovers && self.has_ended()) {
            return self.register(what);
        }
        // The next link registers it.
        self.regions.own.insert(key, OwnRegion::new(what, None));
        self.publish(key, [0; REGION_WORDS]);
    }

    fn region_in_use(&mut self, key: u32, received: u64) -> bool {
        if self.is_being_registered(key) {
            return true;
        }
        let Some(region) = self.regions.own.get(&key) else { return false };
        // A thread registers it, or messages out of it are posted again.
        if self.is_registering() || region.before > received {
            return true;
        }
        // That the peer has the message is not enough: until its acknowledgement is here
        // the device may send it once more.
        let used = region.used > self.chain.done && !matches!(self.ending, Ending::Stopped);
        if used && self.health.is_deserted() {
            // Its work requests fail, and not all at once.
            return !self.stopped(self.now);
        }
        // A control write asks for a completion, and that speaks for all before it.
        if used && region.used > self.chain.signaled {
            self.line.touch();
        }
        used || self.takes_back(key)
    }

    fn works_on_region(&self, key: u32) -> bool {
        self.regions.registrar.works_on(key)
    }

    fn remove_region(&mut self, key: u32) {
        self.remove(key);
    }

    fn offers(&self, key: u32) -> bool {
        self.own.regions_written && self.regions.own.contains_key(&key)
    }

    fn registers(&self, key: u32) -> bool {
        self.regions.own.contains_key(&key)
    }

    fn regions_told(&self) -> bool {
        // Who is gone needs no answer. A peer that comes back is told with the next link, or over it.
        let gone = self.health.is_over() && !self.terms.recovers || self.health.is_deserted();
        gone || !self.is_renewing()
            && !self.health.is_over()
            && self.regions.registrar.is_done()
            && self.regions.due.is_empty()
            && self.regions.wr <= self.chain.done
    }
}

impl PeerMemory for VerbsLink {
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        self.inbox.payload(unit, units)
    }

    fn in_place(&self) -> bool {
        true
    }
}
