//! The receiver of one queue pair: what is done with each message that arrives, and what the peer is told.
//!
//! Messages are accepted in the order of their sequence numbers. Each is shown to the device, put into a region, or
//! waits; a message that waits holds up the messages after it. What needs a copy is shown when the copy is complete,
//! and copies end in the order in which they began (P6).
//!
//! Pure state. The caller performs what [`Inbound`] answers: it copies, writes receive records and signals, and
//! publishes the counts.

mod action;
mod place;
mod resumed;

use std::collections::VecDeque;

use pushgate_abi::record::{Malformed, Opcode, Record, RecordWords};

pub use self::action::{Action, Destination, Fault, Finish, Message, Payload, Site, Stretch};
use crate::landing::{Landing, Room};
pub use crate::receives::Posted;
use crate::receives::Receives;
use crate::refusal::Refusal;
use crate::session::Violation;

/// Copies by a device that may be under way at once. A copy engine reaches its rate only with several copies queued, if
/// each is a few hundred KiB.
pub const MOST_COPIES: usize = 16;

/// Sizes and rules of a receiver, fixed when the queue pair is set up.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Logarithm to base 2 of the number of receive records.
    pub rx_log: u32,
    /// Logarithm to base 2 of the landing ring's units.
    pub landing_log: u32,
    /// Signal words.
    pub signals: u32,
    /// Units of the peer's window that a slow reader may hold in place. What comes on top is copied out.
    pub in_place: u64,
    /// A reader that gives nothing back for this long while it holds messages is slow, nanoseconds.
    pub slow_ns: u64,
    /// SENDs go to the buffers that posted receives name.
    pub posted_receives: bool,
    /// SENDs that the peer may send before the receives that they take are posted.
    pub ahead: u32,
}

/// Cumulative counts that the peer is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages whose place at the sender is no longer needed.
    pub released: u64,
    /// Messages that are here: in their places, or waiting for their receives.
    pub received: u64,
    /// Receives granted.
    pub granted: u64,
}

/// A message that the device holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// The number of its receive record.
    rx: u64,
    sequence: u64,
    /// Units that it holds, at the sender or in the landing ring.
    units: u64,
}

/// What completes a copy.
#[derive(Clone, Copy, Debug)]
enum Landed {
    Region,
    /// The buffer of this posted receive.
    Buffer(Posted),
    Landing(Room),
}

/// A copy under way.
#[derive(Clone, Copy, Debug)]
struct Copying {
    record: Record,
    sequence: u64,
    landed: Landed,
    /// Others of its kind may be begun after it, and end after it.
    queues: bool,
}

/// The receiver of one queue pair.
#[derive(Debug)]
pub struct Inbound {
    rules: Rules,
    /// Messages accepted: the next one's sequence number.
    accepted: u64,
    /// Receive records written.
    shown: u64,
    /// Receive records that the device has given back.
    consumed: u64,
    posted: Receives,
    /// Receives that the device has posted, taken or not.
    posts: u64,
    in_place: VecDeque<Held>,
    in_place_units: u64,
    landing: Landing,
    landed: VecDeque<Held>,
    /// Messages that wait, oldest first. All but the last one are SENDs whose receives are yet to be posted.
    waiting: VecDeque<Message>,
    /// The first messages that are here, in their places or waiting for their receives.
    here: u64,
    copying: VecDeque<Copying>,
    /// What `consumed` was, and since when.
    progress: (u64, u64),
    slow: bool,
}

impl Inbound {
    /// A receiver that has accepted nothing.
    pub fn new(rules: Rules) -> Self {
        let receives = 1usize << rules.rx_log;
        // The payload of a SEND that goes to a buffer is held nowhere.
        let (posted, held) = if rules.posted_receives { (receives, 0) } else { (0, receives) };
        Inbound {
            rules,
            accepted: 0,
            shown: 0,
            consumed: 0,
            posted: Receives::new(posted),
            posts: 0,
            in_place: VecDeque::with_capacity(held),
            in_place_units: 0,
            landing: Landing::new(rules.landing_log),
            landed: VecDeque::with_capacity(held),
            waiting: VecDeque::with_capacity(rules.ahead.max(1) as usize),
            here: 0,
            copying: VecDeque::with_capacity(MOST_COPIES),
            // No count yet: the first look begins the time.
            progress: (u64::MAX, 0),
            slow: rules.slow_ns == 0,
        }
    }

    /// The receiver's sizes and rules.
    pub fn rules(&self) -> Rules {
        self.rules
    }

    // ------------------------------------------------- what the device says

    /// The device has given back `consumed` receive records in all. True if that is news.
    #[inline]
    pub fn consume(&mut self, consumed: u64) -> Result<bool, Fault> {
        if consumed == self.consumed {
            return Ok(false);
        }
        if consumed < self.consumed || consumed > self.shown {
            let shown = self.shown;
            return Err(Fault::Device(
                Refusal::Receive,
                format!("{consumed} receive records released of {shown}").into(),
            ));
        }
        self.consumed = consumed;
        while let Some(held) = self.in_place.front().copied().filter(|h| h.rx < consumed) {
            self.in_place_units -= held.units;
            self.in_place.pop_front();
        }
        while let Some(held) = self.landed.front().copied().filter(|h| h.rx < consumed) {
            self.landing.give_back(held.units);
            self.landed.pop_front();
        }
        Ok(true)
    }

    /// Receive records that the device has given back, as last told.
    #[inline(always)]
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// The number of the receive that the device may post next, if it may: it may have as many ahead of the records
    /// that it has given back as the ring has slots.
    #[inline]
    pub fn next_post(&self) -> Option<u64> {
        (self.posts - self.consumed < 1 << self.rules.rx_log).then_some(self.posts)
    }

    /// The device has posted the receive that [`Inbound::next_post`] names.
    #[inline]
    pub fn post(&mut self, receive: Posted) {
        debug_assert_eq!(receive.number, self.posts);
        self.posted.post(receive);
        self.posts += 1;
    }

    /// The posted receive of this number, if no receive record has named it yet.
    #[inline]
    pub fn open(&self, number: u64) -> Option<Posted> {
        let copied = self.copying.iter().find_map(|c| match c.landed {
            Landed::Buffer(receive) if receive.number == number => Some(receive),
            _ => None,
        });
        copied.or_else(|| self.posted.numbered(number as u32).copied().filter(|p| p.number == number))
    }

    // ------------------------------------------------------------- messages

    /// Whether another message may be begun: fewer copies are under way than may be, and the last one lets others stand
    /// after it.
    #[inline(always)]
    pub fn takes_another(&self) -> bool {
        self.copying.len() < MOST_COPIES && self.copying.back().is_none_or(|c| c.queues)
    }

    /// Takes the message that waits, to try it again.
    #[inline(always)]
    pub fn retry(&mut self) -> Option<Message> {
        self.waiting.pop_front()
    }

    /// Whether a message waits.
    #[inline(always)]
    pub fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether a SEND waits for a receive that the device has yet to post, and no posted receive waits for a message.
    pub fn lacks_receive(&self) -> bool {
        self.waiting.front().is_some_and(|m| self.comes_ahead(m)) && self.posted.is_empty()
    }

    /// Whether a message that waits is a SEND that may have come before its receive. Its payload lies in memory of this end's link.
    fn comes_ahead(&self, m: &Message) -> bool {
        self.rules.ahead > 0 && m.record.opcode == Opcode::Send && !m.placed
    }

    /// Whether another message may be accepted after the messages that wait, which may all have come before their receives.
    #[inline]
    pub fn keeps_another(&self) -> bool {
        self.waiting.len() < self.rules.ahead as usize
            && self.waiting.back().is_some_and(|m| self.comes_ahead(m))
    }

    /// Keeps a message after the messages that wait, where [`Inbound::keeps_another`] allows it.
    #[cold]
    pub fn keep_behind(&mut self, message: Message) {
        self.waiting.push_back(message);
        self.count_here();
    }

    /// Counts those that wait for their receives.
    fn count_here(&mut self) {
        let first = self.accepted - self.waiting.len() as u64;
        // What is still copied before them may be a PUT, which is here once it is in its place.
        if self.copying.is_empty() || self.here == first {
            let ahead = self.waiting.iter().take_while(|m| self.comes_ahead(m)).count() as u64;
            self.here = self.here.max(first + ahead);
        }
    }

    /// Messages that are in their places.
    #[inline]
    pub fn in_places(&self) -> u64 {
        self.accepted - (self.copying.len() + self.waiting.len()) as u64
    }

    /// Keeps a message that [`Action::Wait`] was answered for, before the messages that came after it.
    #[cold]
    pub fn keep(&mut self, message: Message) {
        self.waiting.push_front(message);
        self.count_here();
    }

    /// Accepts the next record of the link: decodes it, and checks its sequence number.
    #[inline]
    pub fn accept(&mut self, words: &RecordWords) -> Result<(Record, u64), Fault> {
        let record = Record::decode(words).map_err(|e| peer(Refusal::Protocol, e))?;
        if record.opcode == Opcode::Nop {
            return Err(Fault::Peer(Refusal::Protocol, "a NOP on the link".into()));
        }
        let expected = self.accepted;
        if record.id != expected as u32 {
            let violation = Violation::Sequence { found: record.id, expected: expected as u32 };
            return Err(Fault::Overrun(Box::new(violation)));
        }
        self.accepted += 1;
        Ok((record, expected))
    }

    /// Receive records that the caller was told to write. The last one's number is one less.
    #[inline(always)]
    pub fn shown(&self) -> u64 {
        self.shown
    }

    /// Messages accepted so far.
    #[inline(always)]
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// The oldest copy is complete: what remains to be done with its message, and the message's record.
    ///
    /// # Panics
    ///
    /// If no copy is under way.
    #[inline]
    pub fn copied(&mut self) -> (Record, Finish) {
        let c = self.copying.pop_front().expect("a copy is under way");
        let finish = match c.landed {
            // P3: data, then signal.
            Landed::Region if c.record.has(Record::WITH_SIGNAL) => return (c.record, Finish::Signal),
            Landed::Region => return (c.record, Finish::Nothing),
            Landed::Buffer(receive) => in_buffer(&c.record, receive.number),
            Landed::Landing(room) => {
                self.landed.push_back(Held { rx: self.shown, sequence: c.sequence, units: room.taken });
                Record { flags: Record::LANDING, place: room.unit as u32, ..c.record }
            }
        };
        self.shown += 1;
        (c.record, Finish::Show(finish))
    }

    // --------------------------------------------------------- what is told

    /// The counts that the peer may be told now.
    #[inline]
    pub fn counts(&self) -> Counts {
        let in_places = self.in_places();
        Counts {
            released: self.in_place.front().map_or(in_places, |h| h.sequence),
            received: in_places.max(self.here),
            granted: match self.rules.posted_receives {
                true => self.posts + u64::from(self.rules.ahead),
                false => self.consumed + (1 << self.rules.rx_log),
            },
        }
    }

    /// Now and then, with the time in nanoseconds: notes whether the reader is slow.
    pub fn tick(&mut self, now: u64) {
        if self.in_place.is_empty() || self.consumed != self.progress.0 {
            self.progress = (self.consumed, now);
        }
        self.slow = now - self.progress.1 >= self.rules.slow_ns;
    }
}

fn peer(why: Refusal, e: impl std::error::Error + 'static) -> Fault {
    Fault::Peer(why, Box::new(e))
}

fn device(why: Refusal, e: impl std::error::Error + 'static) -> Fault {
    Fault::Device(why, Box::new(e))
}

/// A slot that no sender of this session could have written.
pub fn torn() -> Fault {
    Fault::Overrun(Box::new(Malformed::Lap))
}

/// The receive record of a SEND whose payload is in the buffer of posted receive `number`.
fn in_buffer(r: &Record, number: u64) -> Record {
    Record { flags: Record::BUFFER, place: number as u32, place_offset: 0, ..*r }
}

#[cfg(test)]
mod tests;
