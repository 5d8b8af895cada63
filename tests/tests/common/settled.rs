//! A link that has delivered everything to the other end when a pass is over: so when one end looks, the other end's pass is there, as
//! it is over `local`.

use std::sync::MutexGuard;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use pushgate_core::gate::{Budget, Permit};
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_link::region::RegionMemory;
use pushgate_link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Telling, Waking,
};

/// One end of a queue pair, whose link a test holds as well.
pub trait Wire: Send {
    /// What carries it.
    type Carrier: Link;

    /// The link.
    fn qp(&self) -> MutexGuard<'_, Self::Carrier>;

    /// Waits until all that was posted has arrived.
    fn settle(&self);

    /// Waits until the link has stopped, which was asked for at time `now`, nanoseconds.
    fn stop(&self, now: u64);
}

/// The link of such an end.
pub struct Settled<W>(pub W);

impl<W: Wire> Settled<W> {
    fn qp(&self) -> MutexGuard<'_, W::Carrier> {
        self.0.qp()
    }
}

impl<W: Wire> Link for Settled<W> {
    fn name(&self) -> &'static str {
        self.qp().name()
    }

    fn budget(&self) -> Budget {
        self.qp().budget()
    }

    fn post_send(
        &mut self,
        p: Permit<'_>,
        sequence: u64,
        r: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.qp().post_send(p, sequence, r, words)
    }

    fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown> {
        self.qp().poll_send(received)
    }

    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        self.qp().poll_recv(words)
    }

    fn has_inbound(&self) -> bool {
        self.qp().has_inbound()
    }

    fn stopped(&mut self, now: u64) -> bool {
        self.0.stop(now);
        true
    }

    fn notify(&mut self) -> Result<bool, LinkDown> {
        let rang = self.qp().notify()?;
        self.0.settle();
        Ok(rang)
    }

    fn check(&mut self, now: u64) -> Result<(), LinkDown> {
        self.qp().check(now)
    }
}

impl<W: Wire> Telling for Settled<W> {
    fn peer_counts(&self) -> PeerCounts {
        self.qp().peer_counts()
    }

    fn peer_status(&self) -> u64 {
        self.qp().peer_status()
    }

    fn hear(&mut self) -> bool {
        self.qp().hear()
    }

    fn acknowledge(&mut self, counts: PeerCounts) {
        self.qp().acknowledge(counts);
    }

    fn set_status(&mut self, word: u64) {
        self.qp().set_status(word);
    }

    fn leave(&mut self) {
        self.qp().leave();
    }
}

impl<W: Wire> Receives for Settled<W> {
    fn offered_receives(&self) -> Option<bool> {
        self.qp().offered_receives()
    }

    fn knows_receives(&self) -> bool {
        self.qp().knows_receives()
    }

    fn receive_for(&self, record: &Record) -> Option<u32> {
        self.qp().receive_for(record)
    }

    fn learn_receives(&mut self, tag: u32) -> bool {
        self.qp().learn_receives(tag)
    }

    fn may_learn_receives(&self, tag: u32) -> bool {
        self.qp().may_learn_receives(tag)
    }

    fn goes_ahead(&self) -> u32 {
        self.qp().goes_ahead()
    }

    fn takes_ahead(&self) -> u32 {
        self.qp().takes_ahead()
    }

    fn receive_posted(&mut self, number: u64, words: [u64; 4]) {
        self.qp().receive_posted(number, words);
    }
}

impl<W: Wire> OwnRegions for Settled<W> {
    fn takes_region(&self, record: &Record) -> RegionSends {
        self.qp().takes_region(record)
    }

    fn region_sends(&self) -> RegionSends {
        self.qp().region_sends()
    }

    fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64) {
        self.qp().add_region(key, memory, bytes);
        // A thread registers it.
        let begin = Instant::now();
        while self.qp().works_on_region(key) {
            assert!(begin.elapsed() < pushgate_tests::hang(), "a region is never registered");
            let _ = self.qp().notify();
            std::thread::yield_now();
        }
    }

    fn region_in_use(&mut self, key: u32, received: u64) -> bool {
        // A thread takes a registration back that nothing uses.
        let begin = Instant::now();
        loop {
            let mut qp = self.qp();
            let in_use = qp.region_in_use(key, received);
            if !qp.works_on_region(key) {
                return in_use;
            }
            drop(qp);
            assert!(begin.elapsed() < pushgate_tests::hang(), "a registration is never taken back");
            std::thread::yield_now();
        }
    }

    fn remove_region(&mut self, key: u32) {
        self.qp().remove_region(key);
    }

    fn offers(&self, key: u32) -> bool {
        self.qp().offers(key)
    }

    fn registers(&self, key: u32) -> bool {
        self.qp().registers(key)
    }

    fn works_on_region(&self, key: u32) -> bool {
        self.qp().works_on_region(key)
    }

    fn regions_told(&self) -> bool {
        self.qp().regions_told()
    }
}

impl<W: Wire> PeerMemory for Settled<W> {
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        self.qp().payload(unit, units)
    }

    fn in_place(&self) -> bool {
        self.qp().in_place()
    }
}

impl<W: Wire> Waking for Settled<W> {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }
}
