//! The queue pair between two ranks of one host. It hands over the place of a
//! payload, not its bytes: the peer's device reads the sender's window, the peer's
//! engine the memory of the sender's process.
//!
//! Each side owns one link segment, which only its engine writes: a ring of
//! records for the peer, and the counts of what it received. The peer maps it
//! read-only. So neither can spoil the other's state, and no word has two
//! writers.

mod next;
mod renew;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::AtomicU64;

use pushgate_core::gate::{Budget, Permit};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{Bell, Ring};
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_driver_shim::segment::Geometry;

pub use self::next::MakeSegment;
use self::next::Next;
use super::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, PeerProcess, Receives, RegionSends, Renew,
    Waking, process_memory,
};
use crate::Telling;
use crate::memory::Mapped;
use crate::region::RegionMemory;
use crate::ring::Found;
use crate::segments::{LinkAtPeer, LinkOfEngine};
use crate::watch::Watch;

/// What is known of the two processes.
pub struct Processes {
    /// The process of the peer's program, where it is known.
    pub peer: Option<Box<dyn PeerProcess>>,
    /// This engine runs in the process of its program.
    pub in_program: bool,
}

/// A region of this process.
struct OwnRegion {
    address: u64,
    /// Messages sent over this link up to the last one out of it. The peer reads until it has that.
    used: u64,
    /// Messages of the session up to the last one out of it over an earlier link.
    before: u64,
}

impl OwnRegion {
    /// Messages of the session up to the last one out of the region; `base` were sent before this link.
    fn last(&self, base: u64) -> u64 {
        match self.used {
            0 => self.before,
            used => base + used,
        }
    }
}

/// A queue pair between two ranks of one host, as the module describes it.
pub struct LocalLink {
    own: LinkOfEngine,
    peer: LinkAtPeer,
    window: Mapped,
    window_units: u64,
    budget: Budget,
    /// Rung by the peer's engine.
    bell: Option<Bell>,
    /// Rings the peer's engine.
    peer_bell: Option<Ring>,
    /// Regions of this process that messages may go out of, by key.
    regions: BTreeMap<u32, OwnRegion>,
    peer_process: Option<Box<dyn PeerProcess>>,
    /// We have told the peer whether we can read its process.
    probed: bool,
    reads: bool,
    /// Messages of the session before the first one over this link.
    base: u64,
    /// Messages sent over this link.
    sent: u64,
    /// Messages of the session that hold no send slot any more.
    completed: u64,
    /// Messages taken in over this link.
    inbound: u64,
    dirty: bool,
    /// Apart, so that what a turn needs lies close together.
    next: Box<Next>,
}

impl LocalLink {
    /// Joins two link segments, both with checked headers: `own`, which this
    /// engine writes, and `peer`. `window` is the peer's payload ring. `bells`
    /// are what the peer rings to wake this engine and what wakes the peer's, each
    /// where that engine can be woken.
    pub fn new(
        own: &Mapped,
        geometry: &Geometry,
        peer: &Mapped,
        peer_geometry: &Geometry,
        window: Mapped,
        (bell, peer_bell): (Option<Bell>, Option<Ring>),
        processes: Processes,
    ) -> Self {
        let peer_process = processes.peer;
        if let Some(process) = &peer_process {
            process.allow();
        }
        let mut next = Box::new(Next::new(*geometry, *peer_geometry, processes.in_program));
        if peer_process.is_none() {
            next.answer = abi::PUSHGATE_READS_UNKNOWN as u64;
        }
        // After the leave to read, which the peer tries as soon as it sees where to read.
        let own = next.segment(own);
        LocalLink {
            own,
            peer: LinkAtPeer::new(peer, peer_geometry),
            window,
            window_units: 1 << peer_geometry.window_log,
            budget: Budget {
                send_slots: 1 << geometry.link_log,
                cq_slots: 1 << geometry.link_log,
                // Nothing is in flight but what the window holds.
                bytes: u64::MAX / 2,
            },
            bell,
            peer_bell,
            regions: BTreeMap::new(),
            probed: peer_process.is_none(),
            peer_process,
            reads: false,
            base: 0,
            sent: 0,
            completed: 0,
            inbound: 0,
            dirty: false,
            next,
        }
    }

    /// The memory of this end's later link segments comes from `make`, which is told their length in bytes.
    pub fn with_segments(mut self, make: MakeSegment) -> Self {
        self.next.make = make;
        self
    }

    /// Tries to read the peer's process, once its engine has said where to look.
    #[cold]
    fn probe(&mut self) {
        let address = self.peer.address();
        let Some(process) = self.peer_process.as_deref().filter(|_| address != 0) else { return };
        let answer = process_memory::probe(process, address);
        self.probed = true;
        self.reads = answer == abi::PUSHGATE_READS_YES;
        self.own.reads(answer as u64);
        self.next.answer = answer as u64;
        self.dirty = true;
    }
}

impl Link for LocalLink {
    fn name(&self) -> &'static str {
        "local"
    }

    fn budget(&self) -> Budget {
        self.budget
    }

    #[inline]
    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        r: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        let mut w = super::crossing(words, sequence);
        if r.has(Record::REGION) {
            let Some(region) = self.regions.get_mut(&r.place) else {
                // It was removed since the WQE was checked.
                return Err(LinkDown::RegionGone);
            };
            w[0] |= (Record::REGION as u64) << abi::PUSHGATE_FLAGS_SHIFT;
            region.used = self.sent + 1;
            (w[5], w[6]) = (0, region.address + r.place_offset);
        }
        self.own.publish(self.sent, &w);
        self.sent += 1;
        self.dirty = true;
        permit.post();
        Ok(())
    }

    #[inline]
    fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown> {
        // A peer may have accepted messages, over an earlier link, that it does not count as received yet.
        let n = received.saturating_sub(self.completed);
        self.completed += n;
        Ok(n as u32)
    }

    #[inline]
    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        if !self.probed {
            self.probe();
        }
        match self.peer.look_into(self.inbound, words) {
            Found::Empty => Arrival::Empty,
            Found::Torn => Arrival::Torn,
            Found::Ready => {
                self.inbound += 1;
                Arrival::Record
            }
        }
    }

    fn watch(&self, watch: &mut Watch) -> bool {
        self.probed && !self.dirty && self.peer.watch(self.inbound, watch)
    }

    fn prefetch(&self) {
        self.own.prefetch(self.sent);
        self.peer.prefetch(self.inbound);
    }

    fn has_inbound(&self) -> bool {
        !self.probed && self.peer.address() != 0
            || self.peer.look_into(self.inbound, &mut [0; 8]) != Found::Empty
    }

    fn renews(&mut self) -> Option<&mut dyn Renew> {
        Some(self)
    }

    #[inline]
    fn notify(&mut self) -> Result<bool, LinkDown> {
        if !std::mem::take(&mut self.dirty) {
            return Ok(false);
        }
        Ok(match &self.peer_bell {
            Some(ring) if self.peer.must_ring() => {
                ring();
                true
            }
            _ => false,
        })
    }
}

impl Telling for LocalLink {
    #[inline]
    fn peer_counts(&self) -> PeerCounts {
        self.peer.counts()
    }

    #[inline]
    fn peer_status(&self) -> u64 {
        match self.peer.status() {
            0 => self.next.peer_status(),
            status => status,
        }
    }

    #[inline]
    fn acknowledge(&mut self, counts: PeerCounts) {
        self.own.counts(counts);
        self.dirty = true;
    }

    fn set_status(&mut self, word: u64) {
        self.own.status(word);
        // The peer may look at the next link already.
        self.next.set_status(word);
        self.dirty = true;
    }
}

impl Receives for LocalLink {}

impl OwnRegions for LocalLink {
    fn takes_region(&self, r: &Record) -> RegionSends {
        if !self.regions.contains_key(&r.place) {
            return RegionSends::No(
                "the peer's engine can read memory of this process alone: push a device's into the window",
            );
        }
        self.region_sends()
    }

    fn region_sends(&self) -> RegionSends {
        match self.peer.reads() as u32 {
            0 => RegionSends::Unknown,
            abi::PUSHGATE_READS_YES => RegionSends::Yes,
            abi::PUSHGATE_READS_UNKNOWN => RegionSends::No(
                "the peer's engine does not know this process (proxy = process, or another PID namespace): \
                 run both engines as threads in one PID namespace, or push the payload into the window",
            ),
            abi::PUSHGATE_READS_ELSEWHERE => RegionSends::No(
                "this engine is not in the process of its program: use proxy = thread, or push the payload \
                 into the window",
            ),
            _ => RegionSends::No(
                "the kernel does not let the peer's process read this one: run both as one user and set \
                 kernel.yama.ptrace_scope to 0 or 1, or push the payload into the window",
            ),
        }
    }

    fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64) {
        if let RegionMemory::Host { address, .. } = memory {
            // Its addresses must fit beside a lap; those of user space do on all that we know.
            let end = (*address as u64).checked_add(bytes);
            if end.is_some_and(|end| end <= abi::PUSHGATE_DATA_MASK) {
                self.regions.insert(key, OwnRegion { address: *address as u64, used: 0, before: 0 });
            }
        }
    }

    fn region_in_use(&mut self, key: u32, received: u64) -> bool {
        self.regions.get(&key).is_some_and(|r| r.last(self.base) > received)
    }

    fn remove_region(&mut self, key: u32) {
        self.regions.remove(&key);
    }
}

impl PeerMemory for LocalLink {
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        let end = unit as u64 + units as u64;
        (end <= self.window_units)
            .then(|| self.window.address() + ((unit as usize) << abi::PUSHGATE_UNIT_LOG))
    }

    fn in_place(&self) -> bool {
        true
    }

    fn reads_peer(&self) -> bool {
        self.reads
    }

    unsafe fn read_peer(&self, address: u64, to: usize, length: usize) -> io::Result<usize> {
        let process = self.peer_process.as_deref().ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: our caller promises the same.
        unsafe { process.read(address, to, length) }
    }
}

impl Waking for LocalLink {
    fn sleeping(&self) -> Option<&AtomicU64> {
        Some(self.own.sleeping())
    }

    fn bell(&self) -> Option<&Bell> {
        self.bell.as_ref()
    }
}
