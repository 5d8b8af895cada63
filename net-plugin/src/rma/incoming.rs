//! A queue pair from another rank: messages are read where they lie, and checked.

use std::sync::Arc;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::Record;
use pushgate_link::producer::{Producer, Received};

use super::landing::Landings;
use super::requests::{Cause, Requests};
use super::wire::{HEADER, Header, Words};
use crate::end::CommEnd;
use crate::error::{Code, Failure, Result};
use crate::handshake::Made;
use crate::join::{Inbound, Joined, Role};
use crate::log;
use crate::runtime::Runtime;

/// A message that has arrived.
#[derive(Clone, Copy)]
pub struct Message {
    pub header: Header,
    /// The address of the payload behind the header, in the peer's window.
    pub payload: usize,
}

/// A queue pair from a rank.
pub struct Incoming {
    end: CommEnd,
    producer: Producer,
    inbound: Inbound,
    /// Who sends, once it has said so.
    pub rank: Option<u32>,
    /// A message that can't be handled yet.
    held: Option<Message>,
    pub landings: Landings,
}

impl Incoming {
    pub fn new(runtime: Arc<Runtime>, made: Made) -> Result<Self> {
        let Joined { qp, mailbox, producer, lane, inbound, registrations, .. } = *made.joined;
        let end = CommEnd::new(runtime, Role::Receive, made.line, (qp, mailbox, lane, registrations))?;
        let Some(inbound) = inbound else {
            return Err(Failure::new(Code::Internal, "a receiving end without a place for payload"));
        };
        let landings = Landings::default();
        Ok(Incoming { end, producer, inbound, rank: None, held: None, landings })
    }

    /// The next message. Fails with what is wrong with it.
    pub fn next(&mut self) -> Result<Option<Message>, String> {
        if let Some(held) = self.held.take() {
            return Ok(Some(held));
        }
        let Some(received) = self.producer.try_recv() else { return Ok(None) };
        self.read(&received).map(Some)
    }

    /// Reads and checks the header of a message.
    fn read(&self, received: &Received) -> Result<Message, String> {
        let length = received.length as usize;
        let payload = length.checked_sub(HEADER);
        let Some(payload) = payload.filter(|_| received.flags & (Record::INLINE | Record::LANDING) == 0)
        else {
            return Err(format!("{length} bytes with flags {:#x} have no header", received.flags));
        };
        let at = received.place as usize * abi::PUSHGATE_UNIT as usize;
        if at.checked_add(length).is_none_or(|end| end > self.inbound.bytes) {
            return Err(format!("{length} bytes at {at} leave a window of {} bytes", self.inbound.bytes));
        }
        let begins = self.inbound.address + at;
        // One copy, which is checked as a whole: the peer may write there at any time.
        // SAFETY: the stretch lies within memory that `inbound` keeps mapped, checked above; the record was read with
        // acquire. Volatile, because a peer that breaks the rules writes meanwhile.
        let words: Words = unsafe { (begins as *const Words).read_volatile() };
        Ok(Message { header: Header::decode(&words, payload)?, payload: begins + HEADER })
    }

    /// Keeps a message that can't be handled yet; [`Incoming::next`] returns it again.
    pub fn hold(&mut self, message: Message) {
        self.held = Some(message);
    }

    /// Does what follows the copies that are complete, and gives back the places of their messages.
    pub fn settle(&mut self, passed: u64, requests: &mut Requests) {
        let settled = self.landings.settle(passed, requests, |_| {
            unreachable!("what is added to a signal of the GPU is in the queue since its message was handled")
        });
        if settled > 0 {
            self.producer.release(settled);
            self.producer.wake();
        }
    }

    /// How the queue pair ended, if it has. A look for messages that comes after this finds all that came before the end.
    pub fn ended(&self) -> Option<Cause> {
        let status = self.producer.status()?;
        let failure = match self.rank {
            Some(rank) => Failure::ended(status, format!("the queue pair from rank {rank}")),
            None => Failure::ended(status, "a queue pair from a rank that has not said its name"),
        };
        Some(failure.into())
    }

    /// What waits here, for the log.
    pub fn describe(&self) -> String {
        let from =
            self.rank.map_or("a rank that has not said its name".into(), |rank| format!("rank {rank}"));
        let held = if self.held.is_some() { ", and the next one waits for a registration" } else { "" };
        format!("from {from}: {} messages wait for their copies{held}", self.landings.len())
    }

    /// Whether nothing of this end is under way.
    pub fn is_idle(&self) -> bool {
        self.held.is_none() && self.landings.is_empty()
    }

    /// Ends the queue pair, because this end has failed.
    pub fn abort(&self) {
        self.end.abort();
    }

    /// Ends the queue pair, because its other end broke a rule.
    pub fn refuse(&self, why: &str) -> Cause {
        let from =
            self.rank.map_or("a rank that has not said its name".into(), |rank| format!("rank {rank}"));
        let text = format!("a message from {from} was refused: {why}");
        log::warn(&text);
        let status = Status { rank: Some(0), ..Status::new(abi::PUSHGATE_REFUSED) };
        // An engine that is gone has already ended the queue pair.
        let _ = self.end.lane.engine.fail(Some(self.end.qp), status);
        Cause { code: Code::Usage, text: text.into() }
    }
}
