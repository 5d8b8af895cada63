//! Sender and receiver of the core over a link that breaks and is replaced: what comes after the messages that the
//! receiver has accepted is posted again ([`Outbound::rewind`]). Endpoints do not go on over another link yet, so this
//! drives the state machines alone, without memory and without an engine.

use std::collections::VecDeque;

use pushgate_core::gate::{Budget, Gate};
use pushgate_core::outbound::{Next, Outbound};
use pushgate_core::session::Session;
use pushgate_core::staging::Staging;
use pushgate_driver_shim::record::{Opcode, Record};

use super::random::Random;
use super::violation::{Violation, broken};

const BUDGET: Budget = Budget { send_slots: 6, cq_slots: 6, bytes: 4096 };
const SLOTS_LOG: u32 = 3;
const RECEIVES: u32 = 4;

/// A message on its way: its sequence number and its place among all messages.
#[derive(Clone, Copy)]
struct Posted {
    sequence: u64,
    number: u64,
    send: bool,
}

/// A sender, its link, and a receiver.
pub(super) struct Replay {
    outbound: Outbound,
    session: Session,
    random: Random,
    /// What the producer has published and not got back: whether each is a SEND, or a NOP. The first one is slot `first`.
    ring: VecDeque<Option<bool>>,
    first: u64,
    produced: u64,
    messages: u64,
    /// The number of the next message that a slot at the head has.
    link: VecDeque<Posted>,
    /// What the receiver has: messages, SENDs among them, receives granted.
    accepted: u64,
    sends: u64,
    granted: u64,
    completed: u64,
    /// Links that broke.
    pub(super) breaks: u64,
}

impl Replay {
    /// A pair that carries `messages`.
    pub(super) fn new(messages: u64, random: Random) -> Self {
        Replay {
            outbound: Outbound::new(Staging::new(SLOTS_LOG, 0), Gate::new(RECEIVES, BUDGET)),
            session: Session::new(0),
            random,
            ring: VecDeque::with_capacity(1 << SLOTS_LOG),
            first: 0,
            produced: 0,
            messages,
            link: VecDeque::with_capacity(1 << SLOTS_LOG),
            accepted: 0,
            sends: 0,
            granted: 0,
            completed: 0,
            breaks: 0,
        }
    }

    /// Everything was accepted and given back.
    pub(super) fn is_finished(&self) -> bool {
        self.produced == self.messages && self.ring.is_empty()
    }

    /// One event. Returns what it was.
    pub(super) fn step(&mut self) -> Result<&'static str, Violation> {
        match self.random.below(16) {
            0..4 => self.publish(),
            4..9 => self.post()?,
            9..12 => self.arrive()?,
            12..14 => self.settle()?,
            14 => self.granted = self.granted.max(self.sends + self.random.below(RECEIVES as u64 + 1)),
            _ if self.random.one_in(4) => self.fall()?,
            _ => {}
        }
        Ok("replay")
    }

    fn publish(&mut self) {
        if self.produced < self.messages && self.ring.len() < 1 << SLOTS_LOG {
            let nop = self.random.one_in(8);
            self.ring.push_back((!nop).then(|| self.random.one_in(2)));
            self.produced += 1;
        }
    }

    /// The messages of slots before this one, of those that are in the ring.
    fn messages_before(&self, slot: u64) -> u64 {
        self.ring.iter().take((slot - self.first) as usize).flatten().count() as u64
    }

    fn post(&mut self) -> Result<(), Violation> {
        let Next::Slot(slot) = self.outbound.next() else { return Ok(()) };
        if slot < self.first {
            return Err(broken(
                5,
                format!("replay: slot {slot} is read again, and {} are given back", self.first),
            ));
        }
        let Some(kind) = self.ring.get((slot - self.first) as usize).copied() else { return Ok(()) };
        let record = match kind {
            None => Record::new(Opcode::Nop),
            Some(true) => Record { flags: Record::INLINE, ..Record::new(Opcode::Send) },
            Some(false) => Record { opcode: Opcode::Signal, ..Record::new(Opcode::Signal) },
        };
        if kind.is_none() {
            self.outbound.skip(&record);
            return Ok(());
        }
        // The number of this message among all: those given back, and those before it in the ring.
        let number = self.retired_messages() + self.messages_before(slot);
        let posted = self.outbound.reserve(&record).map(|(permit, sequence, _)| {
            permit.post();
            sequence
        });
        if let Ok(sequence) = posted {
            self.link.push_back(Posted { sequence, number, send: kind == Some(true) });
            self.outbound.posted(&record);
            if sequence != number {
                return Err(broken(
                    6,
                    format!("replay: message {number} is posted with sequence number {sequence}"),
                ));
            }
        }
        Ok(())
    }

    fn retired_messages(&self) -> u64 {
        self.completed
    }

    fn arrive(&mut self) -> Result<(), Violation> {
        let Some(p) = self.link.pop_front() else { return Ok(()) };
        if p.sequence != self.accepted || p.number != self.accepted {
            let why =
                format!("replay: message {} arrives as {}, expected {}", p.number, p.sequence, self.accepted);
            return Err(broken(6, why));
        }
        if p.send && self.sends >= self.granted {
            return Err(broken(
                4,
                format!("replay: SEND {} arrives with {} receives granted", self.sends, self.granted),
            ));
        }
        self.accepted += 1;
        self.sends += p.send as u64;
        Ok(())
    }

    /// The sender hears the receiver's counts.
    fn settle(&mut self) -> Result<(), Violation> {
        let sent = self.outbound.staging().messages();
        let heard = self.session.received() + self.random.below(self.accepted - self.session.received() + 1);
        let (released, received) = match self.session.peer_counts(sent, heard, heard) {
            Ok(counts) => counts,
            Err(e) => return Err(broken(6, format!("replay: {e}"))),
        };
        if let Err(e) = self.outbound.grant(self.granted) {
            return Err(broken(4, format!("replay: {e}")));
        }
        let in_flight = self.outbound.gate().in_flight() as u64;
        let on_link = self.outbound.staging().messages() - received;
        self.outbound.complete(in_flight.saturating_sub(on_link) as u32);
        let before = self.outbound.staging().outstanding();
        self.completed += self.outbound.retire(released, |_| ()).messages;
        let retired = before - self.outbound.staging().outstanding();
        for _ in 0..retired {
            if self.ring.pop_front().is_none() {
                return Err(broken(1, "replay: more slots are given back than were taken".into()));
            }
            self.first += 1;
        }
        if self.completed > self.accepted {
            return Err(broken(
                5,
                format!("replay: {} messages are given back of {}", self.completed, self.accepted),
            ));
        }
        Ok(())
    }

    /// The link breaks: what was on its way is lost from some message on, and another link takes its place.
    fn fall(&mut self) -> Result<(), Violation> {
        let arrives = self.random.below(self.link.len() as u64 + 1);
        for _ in 0..arrives {
            self.arrive()?;
        }
        self.link.clear();
        self.outbound.rewind(self.accepted, BUDGET);
        self.breaks += 1;
        let sent = self.outbound.staging().messages();
        if sent != self.accepted {
            return Err(broken(
                6,
                format!(
                    "replay: {} messages are accepted, and the sender goes on after {sent}",
                    self.accepted
                ),
            ));
        }
        if self.outbound.gate().in_flight() != 0 {
            return Err(broken(4, "replay: a fresh link has work requests in flight".into()));
        }
        Ok(())
    }
}
