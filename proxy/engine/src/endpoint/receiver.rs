//! The receiving half of an endpoint: performs what the receiver's state machine answers. It copies, writes receive records
//! and signals, and publishes the counts.

use std::sync::atomic::{Ordering, fence};

use crate::mover::{self, Advance, Failed, Move, Mover, SLICE, Source};
use pushgate_core::inbound::{
    Action, Destination, Fault, Finish, MOST_COPIES, Message, Payload, Posted, Site, torn,
};
use pushgate_core::refusal::Refusal;
use pushgate_core::session::{Status, count_word};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::record::{self, Record, RecordWords};
use pushgate_link::region::{self, Stretch};
use pushgate_link::segments::ReceiveWords;
use pushgate_link::{self as link, PeerCounts};

use super::{BATCH, Endpoint, Here, Moving};

/// What came of an inbound message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// There is none.
    Nothing,
    /// It is in its place, or its bytes are on their way.
    Taken,
    /// It waits, and the messages after it.
    Waits,
}

impl Site for Here {
    type Refused = region::Refused;

    #[inline]
    fn region(&self, key: u32, offset: u64, length: u32) -> Result<Stretch, region::Refused> {
        self.regions.resolve(key, offset, length)
    }

    fn offers(&self, key: u32) -> bool {
        self.qp.offers(key)
    }

    #[inline]
    fn reads_in_place(&self) -> bool {
        !self.copies && self.qp.in_place()
    }

    fn reads_peer(&self) -> bool {
        self.qp.reads_peer()
    }

    #[inline]
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        self.qp.payload(unit, units)
    }
}

impl Endpoint {
    /// Takes in what the device gave back and what the peer sent, [`BATCH`] messages at most. True if there was
    /// anything.
    #[inline]
    pub(super) fn receive(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        self.receive_from::<true>(mover)
    }

    /// As [`Endpoint::receive`]; without `LINK` nothing of the link, so only the messages that wait.
    #[inline]
    pub(super) fn receive_from<const LINK: bool>(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        let mut work = self.reap();
        // Then other queue pairs have their turn.
        let enough = self.moves.here + SLICE as u64;
        if !self.moves.under_way.is_empty() {
            work |= self.advance(mover);
        }
        let mut n = 0;
        // Nothing is delivered after a message that was not: a copy that failed,
        // a count that cannot be.
        while n < BATCH
            && self.moves.here < enough
            && self.session.status().is_none()
            && self.inbound.takes_another()
        {
            n += 1;
            let outcome = match self.inbound.waits() {
                true => self.retry(mover),
                false if LINK => self.take_in(mover),
                false => break,
            };
            match outcome {
                Ok(Outcome::Taken) => work = true,
                Ok(Outcome::Nothing) => break,
                Ok(Outcome::Waits) => {
                    if LINK {
                        work |= self.keep_more() | self.here.qp.hear();
                    }
                    break;
                }
                Err(fault) => {
                    self.fault(fault);
                    return true;
                }
            }
        }
        work
    }

    /// Takes SENDs of the transport that may come before their receives, while one before them waits for its own. True if there was one.
    #[cold]
    fn keep_more(&mut self) -> bool {
        let mut any = false;
        while self.inbound.keeps_another() && self.session.status().is_none() {
            let mut words = [0; 8];
            let placed = match self.here.qp.poll_recv(&mut words) {
                link::Arrival::Empty => break,
                link::Arrival::Record => Ok(false),
                link::Arrival::Placed => Ok(true),
                link::Arrival::Torn => Err(torn()),
            };
            any = true;
            match placed.and_then(|placed| Ok((placed, self.inbound.accept(&words)?))) {
                Ok((placed, (record, sequence))) => {
                    self.inbound.keep_behind(Message { record, words, placed, sequence });
                }
                Err(fault) => self.fault(fault),
            }
        }
        any
    }

    /// Tries the message that waits.
    #[cold]
    #[inline(never)]
    fn retry(&mut self, mover: &mut Option<Box<dyn Mover>>) -> Result<Outcome, Fault> {
        let Some(m) = self.inbound.retry() else { return Ok(Outcome::Nothing) };
        let outcome = self.deliver(&m.record, &m.words, m.placed, m.sequence, mover)?;
        if outcome == Outcome::Waits {
            self.inbound.keep(m);
        }
        Ok(outcome)
    }

    /// Takes the next message of the transport, if there is one.
    #[inline]
    fn take_in(&mut self, mover: &mut Option<Box<dyn Mover>>) -> Result<Outcome, Fault> {
        let mut words = [0; 8];
        let placed = match self.here.qp.poll_recv(&mut words) {
            link::Arrival::Empty => return Ok(Outcome::Nothing),
            link::Arrival::Record => false,
            link::Arrival::Placed => true,
            link::Arrival::Torn => return Err(torn()),
        };
        let (record, sequence) = self.inbound.accept(&words)?;
        let outcome = self.deliver(&record, &words, placed, sequence, mover)?;
        if outcome == Outcome::Waits {
            self.inbound.keep(Message { record, words, placed, sequence });
        }
        Ok(outcome)
    }

    #[cold]
    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Overrun(e) => self.overrun(&*e),
            Fault::Peer(refusal, e) => self.blame(self.options.peer, refusal, &*e),
            Fault::Device(refusal, e) => self.blame(self.geometry.rank, refusal, &*e),
        }
    }

    /// The receiver's check of P4 caught something.
    #[cold]
    fn overrun(&mut self, why: &dyn std::fmt::Display) {
        self.counters.dropped += 1;
        limited!(error, self.peer(), rank = self.rank(), peer = self.peer(), "overrun: {why}");
        let detail = self.inbound.accepted() as u32;
        self.fail(Status { rank: Some(self.options.peer), detail, ..Status::new(abi::PUSHGATE_OVERRUN) });
    }

    /// Takes in what the device gave back and posted.
    #[inline]
    fn reap(&mut self) -> bool {
        // CONSUMED: the device's reads of the places before they are given back.
        let mut work = match self.inbound.consume(self.work.consumed()) {
            Ok(new) => new,
            Err(fault) => {
                self.fault(fault);
                return true;
            }
        };
        if self.options.posted_receives {
            while let Some((receive, words)) = self.next_receive() {
                self.inbound.post(receive);
                self.here.qp.receive_posted(receive.number, words);
                work = true;
            }
        }
        work
    }

    /// The next posted receive and its words, if the device has written all of it.
    pub(super) fn next_receive(&self) -> Option<(Posted, ReceiveWords)> {
        let number = self.inbound.next_post()?;
        let words = self.work.receive(number)?;
        Posted::decode(number, self.geometry.rx_log, &words).map(|receive| (receive, words))
    }

    /// Puts one inbound message where it belongs, or begins to.
    #[inline]
    fn deliver(
        &mut self,
        r: &Record,
        words: &RecordWords,
        placed: bool,
        sequence: u64,
        mover: &mut Option<Box<dyn Mover>>,
    ) -> Result<Outcome, Fault> {
        match self.inbound.place(r, placed, sequence, &self.here)? {
            Action::Wait => return Ok(Outcome::Waits),
            Action::ShowWords => {
                self.control.record(self.inbound.shown() - 1, words);
                self.delivered(r);
            }
            Action::Finish(finish) => self.finish(r, finish),
            Action::Placed(to, finish) => {
                if let (Stretch::Device(_), false) = (to, self.options.reader_flushes) {
                    // P3: an RDMA device's writes to another device are not ordered with ours to
                    // host memory.
                    let no_mover = || {
                        Fault::Device(Refusal::Device, "no mover to flush the device's memory with".into())
                    };
                    let mover = mover.as_deref_mut().ok_or_else(no_mover)?;
                    mover.flush().map_err(|e| Fault::Device(Refusal::Device, Box::new(e)))?;
                }
                self.counters.placed += 1;
                self.finish(r, finish);
            }
            Action::Copy { from, to, stage } => self.begin(r, words, (from, to), stage, mover)?,
        }
        Ok(Outcome::Taken)
    }

    /// Begins a copy; small host copies end at once.
    fn begin(
        &mut self,
        r: &Record,
        words: &RecordWords,
        (from, to): (Payload, Destination),
        stage: (u64, u64),
        mover: &mut Option<Box<dyn Mover>>,
    ) -> Result<(), Fault> {
        let src = match from {
            Payload::Inline => {
                // There are as many buffers as copies, so that of the oldest copy is out of use.
                let buffer = &mut self.moves.inline[self.moves.next_inline];
                *buffer = record::inline(words, r.opcode);
                self.moves.next_inline = (self.moves.next_inline + 1) % MOST_COPIES;
                Source::Mapped(buffer.as_ptr() as usize)
            }
            Payload::Mapped(address) => Source::Mapped(address),
            Payload::Peer(address) => Source::Peer(address),
        };
        let landing = |unit: u64| self.control.landing(unit);
        let (region, dst) = match to {
            Destination::Region { key, stretch } => (Some(key), stretch),
            Destination::Landing(unit) => {
                self.counters.copied_out += 1;
                (None, Stretch::Host(landing(unit)))
            }
        };
        let stage = (landing(stage.0), (stage.1 as usize) << abi::PUSHGATE_UNIT_LOG);
        let movement = Move::start(src, dst, r.length as usize, mover.as_deref_mut(), stage)
            .map_err(|e: mover::MoveError| Fault::Device(Refusal::Device, Box::new(e)))?;
        self.moves.under_way.push_back(Moving { movement, region });
        if pushgate_core::planted!(P3Signal) && r.has(Record::WITH_SIGNAL) {
            self.control.signal(r.signal, r.signal_value);
        }
        if self.moves.under_way.len() == 1 {
            self.advance(mover);
        }
        Ok(())
    }

    /// Moves the bytes of `moving` on and delivers what is done, in order. True if
    /// anything was: a device's copy is only waited for. The queue pair may have
    /// failed.
    pub(super) fn advance(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        let mut work = false;
        while let Some(m) = self.moves.under_way.front_mut() {
            // SAFETY: the destination was resolved in a registered region (which is not
            // removed while a copy in `moving` goes there) or in our landing ring, the source
            // in the peer's window, both mapped as long as this endpoint lives; they
            // are different mappings. What is read out of the peer's process the kernel
            // checks. The stage is free room of the landing ring: nothing else is begun
            // while it is used. The peer or its device may write the source
            // meanwhile only against P1, which spoils its own message.
            match unsafe { m.movement.advance(mover.as_deref_mut(), &*self.here.qp) } {
                Ok(Advance::Done) => {}
                Ok(step) => return work | (step == Advance::Moved),
                Err(e) => {
                    self.moves.under_way.pop_front();
                    self.cut_short(&e);
                    return true;
                }
            }
            work = true;
            let m = self.moves.under_way.pop_front().expect("it was there");
            // After one that failed nothing is delivered; its memory was waited for.
            if self.session.status().is_some() {
                continue;
            }
            match m.movement.reads_peer().then(|| self.end_before_read()).flatten() {
                Some(status) => self.fail(status),
                None => self.moved(&m.movement),
            }
        }
        work
    }

    /// How the peer ended, if that may have been before a read of its process that is done.
    ///
    /// After its end the peer gives regions back, and their memory is used anew. So what was read
    /// is the message only if the peer had not ended when its last byte was read, and that is
    /// looked at here, after the read. P3: the peer stores its status, then (which happens after
    /// that, on whatever thread) the region is given back, then somebody writes there. If a
    /// byte that we read is one of those writes, the fence puts our load of the status after the
    /// read, and it finds the status.
    fn end_before_read(&self) -> Option<Status> {
        fence(Ordering::Acquire);
        self.peers_end()
    }

    /// A copy failed.
    #[cold]
    fn cut_short(&mut self, e: &Failed) {
        if let Failed::Peer { error, .. } = e {
            if let Some(status) = self.end_before_read() {
                // A region that was given back may be mapped no more.
                self.fail(status);
                return;
            }
            match rustix::io::Errno::from_io_error(error) {
                // The peer's process is gone, or ends: the queue pair's status says so.
                Some(rustix::io::Errno::SRCH) => {
                    tracing::debug!(rank = self.rank(), peer = self.peer(), "{e}");
                    self.fail(Status { rank: Some(self.peer()), ..Status::new(abi::PUSHGATE_PEER_LOST) });
                    return;
                }
                Some(rustix::io::Errno::NOMEM) => {}
                // It named what it does not have, or took back its leave to read.
                _ => return self.violated(e),
            }
        }
        limited!(error, self.peer(), rank = self.rank(), "{e}");
        self.fail(Status { rank: Some(self.rank()), ..Status::new(abi::PUSHGATE_ABORTED) });
    }

    /// All bytes of the oldest copy are where they belong.
    fn moved(&mut self, movement: &Move) {
        let (r, finish) = self.inbound.copied();
        self.counters.copies += 1;
        self.counters.copied_bytes += r.length as u64;
        if !movement.queues() {
            self.moves.here += r.length as u64;
        }
        self.finish(&r, finish);
    }

    /// Completes a message whose payload is in its place.
    #[inline]
    fn finish(&mut self, r: &Record, finish: Finish) {
        match finish {
            Finish::Show(shown) => {
                let at = self.inbound.shown() - 1;
                let journal = self.journal.as_mut().filter(|_| self.options.posted_receives);
                let Some(journal) = journal else {
                    self.control.record(at, &shown.encode(0));
                    return self.delivered(r);
                };
                // Once the device gives this record back it may post another receive in the place of this number.
                if let Some(open) = self.inbound.open(at) {
                    journal.keep_open(&open);
                }
                self.control.record(at, &shown.encode(0));
                if (at as u32).wrapping_sub(shown.place).cast_signed() > 0 {
                    journal.took(shown.place);
                }
            }
            Finish::Signal => {
                if let Some(journal) = &mut self.journal {
                    let received = self.inbound.in_places();
                    journal.signal(received, self.inbound.shown(), r.signal, r.signal_value);
                }
                self.control.signal(r.signal, r.signal_value);
            }
            Finish::Nothing => {}
        }
        self.delivered(r);
    }

    #[inline(always)]
    fn delivered(&mut self, r: &Record) {
        self.counters.delivered += 1;
        self.counters.delivered_bytes += r.length as u64;
    }

    /// Publishes our counts, once a pass.
    #[inline]
    pub(super) fn acknowledge(&mut self) -> bool {
        let (mut counts, epoch) = (self.inbound.counts(), self.session.epoch());
        let in_places = self.inbound.in_places();
        if self.journal.is_some() {
            // An engine that goes on in this one's place has the peer send again what is not in its place.
            counts.received = in_places;
        }
        let counts = PeerCounts {
            released: count_word(epoch, counts.released),
            received: count_word(epoch, counts.received),
            granted: count_word(epoch, counts.granted),
        };
        if counts == self.acknowledged || self.session.status().is_some() {
            return false;
        }
        self.acknowledged = counts;
        if let Some(journal) = &mut self.journal {
            journal.taken(in_places, self.inbound.shown());
        }
        self.here.qp.acknowledge(counts);
        true
    }
}
