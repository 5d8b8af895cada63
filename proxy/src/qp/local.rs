//! The queue pair between two ranks of one host. It hands over the place of a
//! payload, not its bytes: the peer's device reads the sender's window.
//!
//! Each side owns one link segment, which only its engine writes: a ring of
//! records for the peer, and the counts of what it received. The peer maps it
//! read-only. So neither can spoil the other's state, and no word has two
//! writers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{Record, Words as RecordWords};
use pushgate_driver_shim::segment::Geometry;

use super::{Inbound, PeerCounts, QueuePair};
use crate::gate::{Limits, Permit};
use crate::memory::Words;
use crate::ring;
use crate::session::Status;

/// Words of the link line: received, released, granted, status.
const RECEIVED: usize = 0;
const RELEASED: usize = 1;
const GRANTED: usize = 2;
const STATUS: usize = 3;

/// See the module's text.
pub struct LocalQp {
    out_ring: Words,
    out_line: Words,
    out_sleeping: Words,
    out_log: u32,
    in_ring: Words,
    in_line: Words,
    in_sleeping: Words,
    in_log: u32,
    window: Arc<ReadOnlyMemory>,
    window_units: u64,
    limits: Limits,
    bell: Option<EventFd>,
    sent: u64,
    completed: u64,
    inbound: u64,
    dirty: bool,
}

impl LocalQp {
    /// Joins two link segments, both with checked headers: `own`, which this
    /// engine writes, and `peer`. `window` is the peer's payload ring. `bell`
    /// wakes the peer's engine, where it can be woken.
    pub fn new(
        own: &Arc<SharedMemory>,
        geometry: &Geometry,
        peer: &Arc<ReadOnlyMemory>,
        peer_geometry: &Geometry,
        window: Arc<ReadOnlyMemory>,
        bell: Option<EventFd>,
    ) -> Self {
        let line = abi::PUSHGATE_LINK_RECEIVED as usize;
        let sleeping = abi::PUSHGATE_LINK_SLEEPING as usize;
        let ring = abi::PUSHGATE_LINK_RING as usize;
        LocalQp {
            out_ring: Words::writable(own, ring, 8 << geometry.link_log),
            out_line: Words::writable(own, line, 4),
            out_sleeping: Words::writable(own, sleeping, 1),
            out_log: geometry.link_log,
            in_ring: Words::readable(peer, ring, 8 << peer_geometry.link_log),
            in_line: Words::readable(peer, line, 4),
            in_sleeping: Words::readable(peer, sleeping, 1),
            in_log: peer_geometry.link_log,
            window,
            window_units: 1 << peer_geometry.window_log,
            limits: Limits {
                send_slots: 1 << geometry.link_log,
                cq_slots: 1 << geometry.link_log,
                receives: 1 << peer_geometry.rx_log,
                // Nothing is in flight but what the window holds.
                bytes: u64::MAX / 2,
            },
            bell,
            sent: 0,
            completed: 0,
            inbound: 0,
            dirty: false,
        }
    }
}

impl QueuePair for LocalQp {
    fn name(&self) -> &'static str {
        "local"
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    #[inline]
    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        _record: &Record,
        words: &RecordWords,
    ) -> Result<(), Status> {
        ring::publish(&self.out_ring, self.sent, self.out_log, &super::crossing(words, sequence));
        self.sent += 1;
        self.dirty = true;
        permit.post();
        Ok(())
    }

    #[inline]
    fn poll_send(&mut self, received: u64) -> Result<u32, Status> {
        let n = received - self.completed;
        self.completed = received;
        Ok(n as u32)
    }

    #[inline]
    fn peer_counts(&self) -> PeerCounts {
        // Released before received: then it can only lag behind it.
        let released = ring::observe(&self.in_line[RELEASED]);
        PeerCounts {
            released,
            received: ring::observe(&self.in_line[RECEIVED]),
            granted: ring::observe(&self.in_line[GRANTED]),
        }
    }

    #[inline]
    fn peer_status(&self) -> u64 {
        self.in_line[STATUS].load(Ordering::Relaxed)
    }

    #[inline]
    fn poll_recv(&mut self, words: &mut RecordWords) -> Inbound {
        match ring::look_into(&self.in_ring, self.inbound, self.in_log, words) {
            ring::Found::Empty => Inbound::Empty,
            ring::Found::Torn => Inbound::Torn,
            ring::Found::Ready => {
                self.inbound += 1;
                Inbound::Record
            }
        }
    }

    fn has_inbound(&self) -> bool {
        ring::look(&self.in_ring, self.inbound, self.in_log) != ring::Look::Empty
    }

    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        let end = unit as u64 + units as u64;
        (end <= self.window_units)
            .then(|| self.window.as_ptr().as_ptr() as usize + ((unit as usize) << abi::PUSHGATE_UNIT_LOG))
    }

    fn in_place(&self) -> bool {
        true
    }

    fn takes_region(&self, _: &Record) -> Result<(), &'static str> {
        Err("the peer maps our window, not our regions")
    }

    #[inline]
    fn acknowledge(&mut self, counts: PeerCounts) {
        // Received before released, see `peer_counts`.
        ring::advance(&self.out_line[RECEIVED], counts.received);
        ring::advance(&self.out_line[RELEASED], counts.released);
        ring::advance(&self.out_line[GRANTED], counts.granted);
        self.dirty = true;
    }

    fn set_status(&mut self, word: u64) {
        self.out_line[STATUS].store(word, Ordering::Release);
        self.dirty = true;
    }

    #[inline]
    fn notify(&mut self) -> Result<bool, Status> {
        if !std::mem::take(&mut self.dirty) {
            return Ok(false);
        }
        Ok(match &self.bell {
            Some(bell) if ring::must_ring(&self.in_sleeping[0]) => {
                bell.ring();
                true
            }
            _ => false,
        })
    }

    fn sleeping(&self) -> Option<&AtomicU64> {
        Some(&self.out_sleeping[0])
    }
}
