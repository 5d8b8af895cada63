//! The sending half of an endpoint: reads WQEs, has them checked, posts those that hold a permit, and gives back what the
//! peer no longer needs.

use pushgate_core::gate::Stall;
use pushgate_core::journal::Sent;
use pushgate_core::outbound::Next;
use pushgate_core::refusal::{Lengths, Refusal};
use pushgate_core::session::count_of;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::record::{Malformed, Opcode, Record};
use pushgate_link::RegionSends;
use pushgate_link::ring::Found;

use super::{BATCH, Endpoint};

/// Why a WQE is refused. Boxed by [`refused`]: the answer of each check of a good WQE stays in registers.
type Refused = (Refusal, Box<dyn std::error::Error>);

#[cold]
fn refused(refusal: Refusal, why: impl Into<Box<dyn std::error::Error>>) -> Box<Refused> {
    Box::new((refusal, why.into()))
}

impl Endpoint {
    /// Posts what the device has published, as far as the gate has permits, [`BATCH`] WQEs at most. True if there was
    /// any, or news of the peer's receives.
    #[inline]
    pub(super) fn transmit(&mut self) -> bool {
        let (mut n, mut learned) = (0, false);
        while n < BATCH {
            match self.outbound.next() {
                Next::Full => break,
                Next::Held => {}
                Next::Slot(slot) => match self.work.look_into(slot, self.outbound.words()) {
                    Found::Empty => break,
                    Found::Ready => {}
                    Found::Torn => {
                        self.refuse(Refusal::Wqe, &Malformed::Lap);
                        return true;
                    }
                },
            }
            let record = match self.outbound.record() {
                Ok(record) => record,
                Err(e) => {
                    self.refuse(Refusal::Wqe, &e);
                    return true;
                }
            };
            if self.outbound.is_unchecked() {
                if self.knows_receives && record.opcode == Opcode::Send {
                    learned |= self.here.qp.learn_receives(record.tag);
                }
                match self.check(&record) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.counters.stall_receive += self.outbound.undecided(&record) as u64;
                        break;
                    }
                    Err(refused) => {
                        self.refuse(refused.0, &*refused.1);
                        return true;
                    }
                }
            }
            if record.opcode == Opcode::Nop {
                self.outbound.skip(&record);
                self.counters.nops += 1;
                n += 1;
                continue;
            }
            let qp = &mut self.here.qp;
            let posted = self
                .outbound
                .reserve(&record)
                .map(|(permit, sequence, words)| qp.post_send(permit, sequence, &record, words));
            match posted {
                Ok(Ok(())) => {}
                Ok(Err(down)) => {
                    self.broke(down);
                    return true;
                }
                Err(stall) => {
                    if self.outbound.stall() {
                        *match stall {
                            Stall::SendQueue => &mut self.counters.stall_send_queue,
                            Stall::CompletionQueue => &mut self.counters.stall_completion_queue,
                            Stall::Receive => &mut self.counters.stall_receive,
                            Stall::Bytes => &mut self.counters.stall_bytes,
                        } += 1;
                    }
                    break;
                }
            }
            self.outbound.posted(&record);
            self.counters.released += 1;
            self.counters.released_bytes += record.length as u64;
            self.counters.inline += record.has(Record::INLINE) as u64;
            n += 1;
        }
        n != 0 || learned
    }

    /// What the codec could not check: place, source region, signal. The peer
    /// checks what only it knows: rkey and bounds. False if the peer has yet to say
    /// whether it may be sent.
    #[inline]
    pub(super) fn check(&self, r: &Record) -> Result<bool, Box<Refused>> {
        self.outbound.staging().check(r).map_err(|e| refused(Refusal::Wqe, e))?;
        if r.has(Record::REGION) {
            let found = self.here.regions.resolve(r.place, r.place_offset, r.length);
            found.map_err(|e| refused(Refusal::Source, e))?;
            match self.here.qp.takes_region(r) {
                RegionSends::Yes => {}
                RegionSends::Unknown => return Ok(false),
                RegionSends::No(why) => {
                    let name = self.here.qp.name();
                    let why = format!("a payload in a region, on queue pair `{name}`: {why}");
                    return Err(refused(Refusal::Unreadable, why));
                }
            }
        }
        if self.knows_receives && r.opcode == Opcode::Send {
            match self.here.qp.receive_for(r) {
                None => return Ok(false),
                Some(room) if room < r.length => {
                    let bytes = r.length;
                    let why = format!(
                        "{bytes} bytes for a receive of the peer that takes {room}: send less, or let it post a \
                         longer one"
                    );
                    return Err(refused(Refusal::Long(Lengths::of(r.length, room)), why));
                }
                Some(_) => {}
            }
        }
        if (r.opcode == Opcode::Signal || r.has(Record::WITH_SIGNAL))
            && r.signal >= self.peer_geometry.signals
        {
            let why = format!("signal {} of {}", r.signal, self.peer_geometry.signals);
            return Err(refused(Refusal::Signal, why));
        }
        Ok(true)
    }

    #[cold]
    pub(super) fn refuse(&mut self, refusal: Refusal, why: &dyn std::fmt::Display) {
        self.counters.refused += 1;
        let slot = self.outbound.staging().head();
        limited!(warn, self.peer(), rank = self.rank(), peer = self.peer(), slot, "WQE refused: {why}");
        self.fail(refusal.status(self.rank(), Some(slot)));
    }

    /// Takes in the peer's counts; gives back what they free.
    #[inline]
    pub(super) fn progress(&mut self) -> bool {
        if self.session.status().is_some() {
            return false;
        }
        let counts = self.here.qp.peer_counts();
        let sent = self.outbound.staging().messages();
        let (released, received) = match self.session.peer_counts(sent, counts.released, counts.received) {
            Ok(c) => c,
            Err(e) => {
                self.violated(&e);
                return true;
            }
        };
        let released = if pushgate_core::planted!(P5Freed) { received } else { released };
        let mut work = false;
        if let Some(granted) = count_of(counts.granted, self.session.epoch()) {
            match self.outbound.grant(granted) {
                Ok(new) => work |= new,
                Err(e) => {
                    self.violated(&e);
                    return true;
                }
            }
        }
        match self.here.qp.poll_send(received) {
            Ok(0) => {}
            Ok(completed) => self.outbound.complete(completed),
            Err(down) => {
                self.broke(down);
                return true;
            }
        }
        if self.outbound.staging().outstanding() > 0 {
            let (control, ok) = (&mut self.control, abi::PUSHGATE_OK as u8);
            let retired =
                self.outbound.retire(released, |c| control.complete(c.wr_id, c.opcode, ok, c.length));
            self.counters.retired += retired.messages;
            self.sends += retired.sends;
            if let Some(credit) = self.outbound.new_credit() {
                if pushgate_core::planted!(P6Session) {
                    control.credit(credit);
                }
                if let Some(journal) = &mut self.journal {
                    let staging = self.outbound.staging();
                    journal.sent(&Sent {
                        slots: staging.tail(),
                        units: staging.retired_units(),
                        messages: staging.retired_messages(),
                        sends: self.sends,
                        completions: control.completions(),
                    });
                }
                control.credit(credit);
                work = true;
            }
        }
        if let Some(delivered) = self.outbound.newly_delivered(received) {
            self.control.delivered(delivered);
            work = true;
        }
        work
    }
}
