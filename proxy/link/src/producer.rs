//! A program's end of a queue pair on the host: what `pushgate/device.cuh` does for a kernel, in Rust, for one thread. It
//! pushes payload into the window, publishes WQEs, posts receives and reads what the engine says.
//!
//! docs/protocol.md argues the orderings under the names that stand beside them here. No call allocates, locks or
//! waits. The only system call rings the doorbell of an engine that says that it sleeps.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords, inline, set_inline};
use pushgate_driver_shim::segment::Geometry;

use crate::memory::Mapped;
use crate::ring::Found;
use crate::segments::{ControlAtDevice, WorkOfDevice};

const UNIT: usize = abi::PUSHGATE_UNIT as usize;
/// The fields of reservation and credit are 24 bits wide.
const CURSOR: u64 = abi::PUSHGATE_CURSOR_MASK as u64;

/// A WQE slot with room in the window. The slot must be published, at least as a NOP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The WQE slot, counted from the queue pair's first.
    pub slot: u64,
    /// Where the payload goes: units from the window's beginning.
    pub place: u64,
}

/// A completion, as the engine wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The producer's number of the work request.
    pub wr_id: u32,
    /// `PUSHGATE_OP_*`.
    pub opcode: u8,
    /// `PUSHGATE_OK`, or how the queue pair ended.
    pub status: u8,
    /// Bytes.
    pub length: u32,
}

/// A receive record. The payload that it names stays in place until [`Producer::release`].
#[derive(Clone, Copy, Debug)]
pub struct Received {
    /// Bytes.
    pub length: u32,
    /// The tag that the sender gave.
    pub tag: u32,
    /// `PUSHGATE_F_*`: where the payload is.
    pub flags: u8,
    /// In a window or the landing ring: its first unit there. In a posted buffer: the
    /// number of the posted receive, its low 32 bits.
    pub place: u32,
    /// The payload itself, if it is inline.
    pub inline: [u8; abi::PUSHGATE_INLINE_SEND as usize],
}

/// A program's end of a queue pair on the host: pushes payload, publishes WQEs, posts receives and
/// reads what the engine says. For one thread at a time.
pub struct Producer {
    geometry: Geometry,
    window: Mapped,
    work: WorkOfDevice,
    control: ControlAtDevice,
    bell: Option<Arc<EventFd>>,
    /// Units of the window, from its beginning, among which payload is placed.
    usable: u64,
    slots: u64,
    units: u64,
    cqes: u64,
    cq_head: u64,
    rx_head: u64,
    released: u64,
    posted: u64,
    /// The credit word as last read, so that the shared one is read only when this
    /// one says full.
    credit: Cell<u64>,
}

impl Producer {
    /// The producer of a queue pair that has just been made. `bell` is the doorbell of an engine that sleeps. A queue
    /// pair has one producer.
    ///
    /// # Panics
    /// If a segment is smaller than the geometry says.
    pub fn new(
        geometry: Geometry,
        work: impl Into<Mapped>,
        control: impl Into<Mapped>,
        window: impl Into<Mapped>,
        bell: Option<Arc<EventFd>>,
    ) -> Self {
        let (g, window) = (&geometry, window.into());
        assert!(window.bytes() >= UNIT << g.window_log, "a window of {} bytes", window.bytes());
        Producer {
            work: WorkOfDevice::new(&work.into(), g),
            control: ControlAtDevice::new(&control.into(), g),
            window,
            bell,
            usable: 1 << geometry.window_log,
            slots: 0,
            units: 0,
            cqes: 0,
            cq_head: 0,
            rx_head: 0,
            released: 0,
            posted: 0,
            credit: Cell::new(0),
            geometry,
        }
    }

    /// Sets the engine's doorbell.
    pub fn set_bell(&mut self, bell: Option<impl Into<Arc<EventFd>>>) {
        self.bell = bell.map(Into::into);
    }

    /// Rings the engine if the engine sleeps. Call this once after a batch of `publish`, `post_recv` and `release`; an
    /// engine that is awake sees them without it.
    #[inline]
    pub fn wake(&self) {
        if let Some(bell) = &self.bell
            && self.control.must_ring()
        {
            bell.ring();
        }
    }

    // ---------------------------------------------------------------- sending

    /// Whether a slot and `units` of room are free, by what `credit` says.
    fn fits_by(&self, credit: u64, units: u64) -> bool {
        let g = &self.geometry;
        let slots = self.slots.wrapping_sub(credit >> abi::PUSHGATE_CURSOR_BITS) & CURSOR;
        let used = self.units.wrapping_sub(credit & CURSOR) & CURSOR;
        slots < 1 << g.slots_log && used + units <= 1 << g.window_log
    }

    fn fits(&self, units: u64) -> bool {
        // A credit that was read before is still one: only this thread takes, and the
        // engine's counts only grow. It is at most a ring behind, so the fields' width
        // does not matter.
        self.fits_by(self.credit.get(), units) || self.fits_by(self.fresh_credit(), units)
    }

    fn fresh_credit(&self) -> u64 {
        let credit = self.control.credit();
        self.credit.set(credit);
        credit
    }

    /// Keeps payload among the first `units` of the window, from the next reservation on. The rest of the window stays
    /// unused, so the payload under way takes no more of the processor's cache than that. A message longer than `units`
    /// takes what it needs; more than the window has means the whole window.
    #[inline]
    pub fn use_window(&mut self, units: u64) {
        self.usable = units.min(1 << self.geometry.window_log);
    }

    /// Takes a WQE slot and `units` of the window, and a CQ slot for a work request that is `signaled`: all of them or
    /// none. Payload that does not fit before the end of what is used of the window ([`Producer::use_window`]) goes to the
    /// window's beginning. In two cases a NOP with a slot of its own gives the rest of the ring back first: if only a part of
    /// the window is used, and if ring's end and payload together are longer than the ring. The NOP may be published though
    /// nothing else is taken.
    pub fn reserve(&mut self, units: u64, signaled: bool) -> Option<Reservation> {
        let ring = 1u64 << self.geometry.window_log;
        let mut pos = self.units & (ring - 1);
        let mut span = if pos + units > ring { ring - pos + units } else { units };
        let behind_usable = self.usable < ring && pos + units > self.usable;
        if units > 0 && pos > 0 && (span > ring || behind_usable) {
            if units > ring || !self.fits(ring - pos) {
                return None;
            }
            let nop = Record { place: pos as u32, place_offset: ring - pos, ..Record::new(Opcode::Nop) };
            let slot = self.slots;
            (self.slots, self.units) = (slot + 1, self.units + ring - pos);
            self.publish(slot, &nop.encode(0));
            self.wake();
            (pos, span) = (0, units);
        }
        if !self.fits(span) || signaled && self.cqes - self.cq_head >= 1 << self.geometry.cq_log {
            return None;
        }
        let slot = self.slots;
        (self.slots, self.units) = (slot + 1, self.units + span);
        self.cqes += signaled as u64;
        Some(Reservation { slot, place: if span > units || units == 0 { 0 } else { pos } })
    }

    /// Publishes a WQE in a slot that was reserved. Does not ring: see [`Producer::wake`]. PUBLISH (docs/protocol.md): the
    /// payload is stored before the WQE's first word.
    #[inline]
    pub fn publish(&self, slot: u64, words: &RecordWords) {
        self.work.publish(slot, words);
    }

    /// Stores payload into the window, from `place` of a reservation.
    ///
    /// # Panics
    /// If it leaves the window.
    ///
    /// # Safety
    /// The `length` bytes at `from` can be read.
    pub unsafe fn push(&self, place: u64, from: *const u8, length: usize) {
        let at = place as usize * UNIT;
        assert!(at + length <= UNIT << self.geometry.window_log, "{length} bytes at unit {place}");
        // SAFETY: `from` is the caller's word; the target lies in the window, checked
        // above, which is mapped writable as long as `self`, and is other memory than a
        // payload. That nobody reads these bytes now is the reservation's promise (P1).
        unsafe { std::ptr::copy_nonoverlapping(from, (self.window.address() + at) as *mut u8, length) };
    }

    /// Takes what `record` with a payload of `length` bytes in the window needs, for somebody
    /// else to push it there: the reservation, and the WQE to [`Producer::publish`] once the
    /// payload is there. `None` without credit: then at most a NOP was published, which gives the ring's end back.
    pub fn stage(&mut self, record: Record, length: usize) -> Option<(Reservation, RecordWords)> {
        let units = length.div_ceil(UNIT) as u64;
        let taken = self.reserve(units, record.has(Record::SIGNALED))?;
        let record = Record { length: length as u32, ..record };
        let words = Record { place: taken.place as u32, place_offset: units, ..record }.encode(0);
        Some((taken, words))
    }

    /// Pushes `payload` and publishes the work request: inline if `record` says so, else
    /// by way of the window, or of nothing where it names a region (then `payload`
    /// gives the length alone). The slot taken; `None` without credit: then at most a NOP was
    /// published, which gives the ring's end back.
    ///
    /// # Safety
    /// As [`Producer::push`]; a payload that lies in a region is not read.
    pub unsafe fn post_raw(&mut self, record: Record, payload: *const u8, length: usize) -> Option<u64> {
        let record = Record { length: length as u32, ..record };
        let units = if record.in_window() { length.div_ceil(UNIT) as u64 } else { 0 };
        let taken = self.reserve(units, record.has(Record::SIGNALED))?;
        let mut words = match record.in_window() {
            true => Record { place: taken.place as u32, place_offset: units, ..record }.encode(0),
            false => record.encode(0),
        };
        if record.has(Record::INLINE) {
            let mut bytes = [0; abi::PUSHGATE_INLINE_SEND as usize];
            assert!(length <= bytes.len(), "inline payload of {length} bytes");
            if length > 0 {
                // SAFETY: the caller's word for the source; the target has room, checked above.
                unsafe { std::ptr::copy_nonoverlapping(payload, bytes.as_mut_ptr(), length) };
            }
            set_inline(&mut words, record.opcode, &bytes[..length]);
        } else if units > 0 {
            // SAFETY: the caller's.
            unsafe { self.push(taken.place, payload, length) };
        }
        self.publish(taken.slot, &words);
        self.wake();
        Some(taken.slot)
    }

    /// Posts a slice as [`Producer::post_raw`] does. True if there was credit.
    pub fn post(&mut self, record: Record, payload: &[u8]) -> bool {
        // SAFETY: a slice can be read.
        unsafe { self.post_raw(record, payload.as_ptr(), payload.len()) }.is_some()
    }

    /// The next completion.
    pub fn poll_cq(&mut self) -> Option<Completion> {
        let [w0, w1] = self.control.completion(self.cq_head)?;
        self.cq_head += 1;
        Some(Completion {
            wr_id: w0 as u32,
            opcode: (w0 >> abi::PUSHGATE_CQE_OPCODE_SHIFT) as u8,
            status: (w0 >> abi::PUSHGATE_CQE_STATUS_SHIFT) as u8,
            length: w1 as u32,
        })
    }

    /// Slots given back so far: all messages before it need their place no more.
    /// Counts on, though the credit word wraps.
    #[inline]
    pub fn retired(&self) -> u64 {
        let behind = self.slots.wrapping_sub(self.fresh_credit() >> abi::PUSHGATE_CURSOR_BITS) & CURSOR;
        self.slots - behind
    }

    /// WQE slots taken.
    pub fn slots(&self) -> u64 {
        self.slots
    }

    /// Units of the window taken.
    pub fn units(&self) -> u64 {
        self.units
    }

    // -------------------------------------------------------------- receiving

    /// Posts a receive into `length` bytes at `offset` of region `key`. False if as many
    /// are out as the ring has room for. Does not ring: [`Producer::wake`].
    pub fn post_recv(&mut self, key: u32, offset: u64, length: u32, tag: u32) -> bool {
        // The engine takes no more ahead of what was released than the ring holds, and
        // has taken what was delivered: this slot's last receive is in its own copy.
        let room = self.posted - self.released < 1 << self.geometry.rx_log;
        if room {
            self.post_recv_unasked(key, offset, length, tag);
        }
        room
    }

    /// Posts a receive as [`Producer::post_recv`] does, whether there is room or not, for tests of what an engine makes of it.
    pub fn post_recv_unasked(&mut self, key: u32, offset: u64, length: u32, tag: u32) {
        self.work.post_receive(self.posted, &[key as u64, offset, length as u64, tag as u64]);
        self.posted += 1;
    }

    /// The words of the next posted receive's slot.
    pub fn receive_slot(&self) -> &[AtomicU64] {
        self.work.receive_slot(self.posted)
    }

    /// The next receive record.
    #[inline]
    pub fn try_recv(&mut self) -> Option<Received> {
        let mut words = [0; abi::PUSHGATE_RECORD_WORDS as usize];
        if self.control.look_into(self.rx_head, &mut words) != Found::Ready {
            return None;
        }
        self.rx_head += 1;
        Some(Received {
            length: words[0] as u32,
            tag: words[1] as u32,
            flags: (words[0] >> abi::PUSHGATE_FLAGS_SHIFT) as u8,
            place: words[5] as u32,
            inline: inline(&words, Opcode::Send),
        })
    }

    /// Gives back the oldest `count` receive records. Does not ring: [`Producer::wake`].
    #[inline]
    pub fn release(&mut self, count: u64) {
        self.released += count;
        self.work.consume(self.released);
    }

    /// Receive records taken.
    pub fn rx_head(&self) -> u64 {
        self.rx_head
    }

    /// Receive records given back.
    pub fn released(&self) -> u64 {
        self.released
    }

    // ------------------------------------------------------------------ state

    /// How the queue pair ended, if it has. What was delivered before is seen by a look
    /// that comes after this.
    #[inline]
    pub fn status(&self) -> Option<Status> {
        Status::from_word(self.control.status())
    }

    /// Slots whose message the peer has.
    pub fn delivered(&self) -> u64 {
        self.control.delivered()
    }

    /// A signal's value. The data that the signal announces is there for what this thread does next.
    ///
    /// # Panics
    /// If the queue pair has no such signal.
    #[inline]
    pub fn signal(&self, index: u32) -> u64 {
        self.control.signal(index)
    }

    /// The WQE ring's words, for tests that write there what no producer would.
    pub fn wqe_ring(&self) -> &[AtomicU64] {
        self.work.wqes()
    }

    /// The word CONSUMED, for tests that write there what no producer would.
    pub fn consumed(&self) -> &AtomicU64 {
        self.work.consumed()
    }
}
