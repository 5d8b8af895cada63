//! Rails as one link: what an endpoint and its engine ask of it.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;

use pushgate_core::gate::{Budget, Permit};
use pushgate_core::rails::carried;
use pushgate_core::rails::placing::Target;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_link::region::RegionMemory;
use pushgate_link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Several, Telling,
    Waking, crossing,
};

use super::{Held, Own, Rails};

impl Link for Rails {
    fn name(&self) -> &'static str {
        self.rails[self.first].link.name()
    }

    fn ends(&self) -> [u64; 2] {
        self.rails[self.first].link.ends()
    }

    fn budget(&self) -> Budget {
        // What a rail's link has room for its own gate says.
        let window = 1 << self.options.rules.window_log;
        Budget { send_slots: window, cq_slots: window, bytes: u64::MAX / 2 }
    }

    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        record: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.is_down()?;
        let length = carried(record);
        if record.has(Record::REGION) {
            self.regions.get_mut(&record.place).ok_or(LinkDown::RegionGone)?.used = sequence + 1;
        }
        // Of a payload in a region `takes_region` has asked the rails.
        let placed = record.opcode == Opcode::Put
            && length > 0
            && self.placing.may_place(record.rkey, record.remote_offset, length)
            && (record.has(Record::REGION) || self.reach(record) == Some(true));
        debug_assert!(placed || length == 0 || !record.has(Record::REGION));
        let target = match record.opcode {
            Opcode::Put => Target::Region(record.rkey, record.remote_offset),
            Opcode::Send if self.options.peer_posts => Target::Unknown,
            _ => Target::Nowhere,
        };
        let mask = self.held.len() - 1;
        let mut crosses = crossing(words, sequence);
        if record.has(Record::REGION) {
            // The payload goes straight to its region. Where it came from concerns this end alone.
            (crosses[5], crosses[6]) = (0, 0);
        }
        self.held[sequence as usize & mask] = Held { record: *record, words: crosses };
        let message = self.sending.post(length, placed);
        debug_assert_eq!(message, sequence);
        self.placing.posted(sequence, target, record.length);
        permit.post();
        self.pump();
        Ok(())
    }

    fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown> {
        self.is_down()?;
        for rail in 0..self.rails.len() {
            if !self.sending.is_up(rail) {
                continue;
            }
            let one = &mut self.rails[rail];
            let taken = one.link.stripes_taken();
            if let Err(e) = self.sending.taken(rail, one.before[0] + taken) {
                limited!(warn, rail as u64, rail, "{e}");
                self.torn = true;
                return Ok(0);
            }
            match one.link.poll_send(taken) {
                Ok(n) => self.sending.complete(rail, n),
                Err(down) => self.breaks(rail, down),
            }
        }
        self.sending.received(received);
        self.placing.received(received);
        self.pump();
        let n = received - self.received;
        self.received = received;
        Ok(n as u32)
    }

    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        if !self.arriving.has_next() {
            for rail in 0..self.rails.len() {
                if self.rails[rail].receives {
                    self.take_in(rail);
                }
            }
        }
        match self.arriving.accept() {
            _ if self.torn => Arrival::Torn,
            None => Arrival::Empty,
            Some((record, placed)) => {
                *words = record;
                if placed { Arrival::Placed } else { Arrival::Record }
            }
        }
    }

    fn has_inbound(&self) -> bool {
        self.torn || self.arriving.has_next() || self.receiving().any(|one| one.link.has_inbound())
    }

    fn stopped(&mut self, now: u64) -> bool {
        self.now = now;
        // All are asked: each goes on with its own end.
        self.rails.iter_mut().fold(true, |all, one| one.link.stopped(now) & all)
    }

    #[cfg(feature = "sim")]
    fn number_of(&self, rail: usize) -> Option<u32> {
        self.rails.get(rail)?.link.number()
    }

    fn notify(&mut self) -> Result<bool, LinkDown> {
        if self.status == 0 && !self.left {
            self.move_on();
            self.pump();
        }
        let mut rang = false;
        for rail in 0..self.rails.len() {
            if !self.sending.is_up(rail) {
                continue;
            }
            let (one, taken) = (&mut self.rails[rail], self.arriving.taken(rail));
            if taken != one.told {
                one.told = taken;
                one.link.acknowledge_stripes(taken - one.before[1]);
            }
            match one.link.notify() {
                Ok(one_rang) => rang |= one_rang,
                Err(down) => self.breaks(rail, down),
            }
        }
        self.is_down().map(|()| rang)
    }

    fn check(&mut self, now: u64) -> Result<(), LinkDown> {
        self.look_at_the_time(now);
        self.sending.tick(now);
        for rail in 0..self.rails.len() {
            let one = &mut self.rails[rail];
            if std::mem::take(&mut one.unborn) {
                let cause = abi::PUSHGATE_DOWN_PORT;
                self.breaks(rail, LinkDown::Failed { cause, by_peer: false });
            } else if one.receives
                && let Err(down) = one.link.check(now)
            {
                self.breaks(rail, down);
            }
            self.rails[rail].recovery.tick(self.arriving.taken(rail), now, &mut self.orders);
            self.perform(rail);
        }
        self.is_down()
    }

    fn bounced(&self) -> (u64, u64) {
        let each = self.rails.iter().map(|one| one.link.bounced());
        each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    fn several(&mut self) -> Option<&mut dyn Several> {
        Some(self)
    }
}

impl Telling for Rails {
    fn peer_counts(&self) -> PeerCounts {
        // Cumulative words: whichever rail told last, the greatest holds.
        self.rails.iter().fold(self.heard, |counts, one| counts.greatest(one.link.peer_counts()))
    }

    fn peer_status(&self) -> u64 {
        let over_links = self.receiving().map(|one| one.link.peer_status());
        over_links.chain([self.beside.peer_status()]).find(|word| *word != 0).unwrap_or(0)
    }

    fn acknowledge(&mut self, counts: PeerCounts) {
        self.counts = counts;
        self.live().for_each(|one| one.link.acknowledge(counts));
    }

    fn set_status(&mut self, word: u64) {
        self.status = word;
        self.live().for_each(|one| one.link.set_status(word));
        self.beside.set_status(word);
    }

    fn leave(&mut self) {
        self.left = true;
        self.rails.iter_mut().for_each(|one| one.link.leave());
    }
}

impl Several for Rails {
    fn break_one(&mut self) -> bool {
        let n = self.rails.len();
        let up = (1..=n).map(|i| (self.broken + i) % n).find(|rail| self.sending.is_up(*rail));
        if let Some(rail) = up {
            self.broken = rail;
            self.breaks(rail, LinkDown::Failed { cause: abi::PUSHGATE_DOWN_PORT, by_peer: false });
        }
        // While none carries, all are being replaced, and a break changes nothing.
        true
    }

    fn rejoined(&mut self) -> u64 {
        std::mem::take(&mut self.rejoined)
    }
}

impl Receives for Rails {
    fn offered_receives(&self) -> Option<bool> {
        self.rails[self.first].link.offered_receives()
    }
}

impl OwnRegions for Rails {
    fn takes_region(&self, record: &Record) -> RegionSends {
        if record.opcode != Opcode::Put || !self.regions.contains_key(&record.place) {
            return self.region_sends();
        }
        // The payload can only go straight to its region, and whatever goes to the same bytes comes first.
        if !self.placing.may_place(record.rkey, record.remote_offset, record.length) {
            return RegionSends::Unknown;
        }
        match self.reach(record) {
            None => RegionSends::Unknown,
            Some(true) => RegionSends::Yes,
            Some(false) => RegionSends::No(
                "the peer has no such region that all rails can write, or not so long: push the payload into the window",
            ),
        }
    }

    fn region_sends(&self) -> RegionSends {
        RegionSends::No(
            "over several rails SENDs go out of the window alone: push the payload into the window",
        )
    }

    fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64) {
        self.regions.insert(key, Own { used: 0 });
        self.rails.iter_mut().for_each(|one| one.link.add_region(key, memory, bytes));
    }

    fn region_in_use(&mut self, key: u32, received: u64) -> bool {
        let sends = self.regions.get(&key).is_some_and(|own| own.used > received);
        // A rail that is being fenced may touch any region.
        let fenced = self.rails.iter().all(|one| one.fencing.is_none());
        sends || !fenced || self.rails.iter_mut().any(|one| one.link.region_in_use(key, received))
    }

    fn works_on_region(&self, key: u32) -> bool {
        self.rails.iter().any(|one| one.link.works_on_region(key))
    }

    fn remove_region(&mut self, key: u32) {
        self.regions.remove(&key);
        self.rails.iter_mut().for_each(|one| one.link.remove_region(key));
    }

    fn offers(&self, key: u32) -> bool {
        self.rails.iter().any(|one| one.link.offers(key))
    }

    fn registers(&self, key: u32) -> bool {
        self.rails.iter().any(|one| one.link.registers(key))
    }

    fn regions_told(&self) -> bool {
        self.receiving().all(|one| one.link.regions_told())
    }
}

impl PeerMemory for Rails {
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        self.rails[self.first].link.payload(unit, units)
    }

    fn in_place(&self) -> bool {
        self.rails[self.first].link.in_place()
    }
}

impl Waking for Rails {
    fn sleeping(&self) -> Option<&AtomicU64> {
        self.rails[self.first].link.sleeping()
    }

    fn bell(&self) -> Option<&Bell> {
        self.rails[self.first].link.bell()
    }

    fn beside(&self, n: usize) -> Option<&dyn Waking> {
        // All but the one that `sleeping` and `bell` speak of.
        let one = self.rails.get(if n > self.first { n } else { n - 1 })?;
        Some(&*one.link)
    }

    fn prepare_sleep(&mut self) -> bool {
        // All are asked: each arms what wakes for it.
        self.rails.iter_mut().fold(false, |any, one| one.link.prepare_sleep() | any)
    }

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        self.rails.iter().for_each(|one| one.link.wakes(fds));
    }

    fn woken(&mut self) {
        self.rails.iter_mut().for_each(|one| one.link.woken());
    }
}
