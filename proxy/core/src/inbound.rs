//! The receiver of one queue pair: what is done with each message that arrives, and what the peer is told.
//!
//! Messages are accepted in the order of their sequence numbers. Each is shown to the device, put into a region, or
//! waits; a message that waits holds up the messages behind it. What needs a copy is shown when the copy is complete,
//! and copies end in the order in which they began (P6).
//!
//! Pure state. The caller performs what [`Inbound`] answers: it copies, writes receive records and signals, and
//! publishes the counts.

use std::collections::VecDeque;

use pushgate_abi::abi;
use pushgate_abi::record::{Malformed, Opcode, Record, RecordWords, lap_of};

use crate::landing::{Landing, NoRoom, Room};
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
}

/// Where a stretch of memory begins that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// An address of the host.
    Host(usize),
    /// An address of the device.
    Device(u64),
}

/// Where the bytes of a payload lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// In the record itself.
    Inline,
    /// In mapped memory of the peer, at this address.
    Mapped(usize),
    /// At this address of the peer's process.
    Peer(u64),
}

/// What a receiver asks of the link and of the regions while it decides. No answer may change between two messages of
/// one pass.
pub trait Site {
    /// Why a key, offset or length was refused.
    type Refused: std::error::Error + 'static;

    /// The stretch of `length` bytes at `offset` of region `key`.
    fn region(&self, key: u32, offset: u64, length: u32) -> Result<Stretch, Self::Refused>;

    /// The peer was told that its device may write region `key`.
    fn offers(&self, key: u32) -> bool;

    /// The device reads payload where the sender put it.
    fn reads_in_place(&self) -> bool;

    /// The engine reads memory of the peer's process.
    fn reads_peer(&self) -> bool;

    /// Host address of `units` units of the peer's window at `unit`, if they lie within it.
    fn payload(&self, unit: u32, units: u32) -> Option<usize>;
}

/// A message as it arrived.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// The decoded record.
    pub record: Record,
    /// The record's words.
    pub words: RecordWords,
    /// The link has put the payload into its place already.
    pub placed: bool,
    /// The message's sequence number.
    pub sequence: u64,
}

/// What the caller has to do with a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    /// Nothing: the message waits, and the messages behind it.
    Wait,
    /// Write the message's own words as the next receive record.
    ShowWords,
    /// Do what is said.
    Finish(Finish),
    /// Make what the peer's device has written visible to this side's device, if that is a device's memory; then do
    /// what is said.
    Placed(Stretch, Finish),
    /// Begin a copy. Its end is told by [`Inbound::copied`].
    Copy {
        /// Where the payload is.
        from: Payload,
        /// Where it belongs.
        to: Destination,
        /// Free units of the landing ring that the copy may use until its end: the first one, and how many.
        stage: (u64, u64),
    },
}

/// Where a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Into a region.
    Region {
        /// The region's key.
        key: u32,
        /// Where the bytes go.
        stretch: Stretch,
    },
    /// To this unit of the landing ring.
    Landing(u64),
}

/// What completes a message once its payload is in its place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Finish {
    /// Write this receive record.
    Show(Record),
    /// Write the message's signal.
    Signal,
    /// Nothing more.
    Nothing,
}

/// Why a receiver ends its queue pair.
#[derive(Debug)]
pub enum Fault {
    /// The peer sent what it held no credit for, or a slot was overwritten (P4).
    Overrun(Box<dyn std::error::Error>),
    /// The peer broke the protocol (P8).
    Peer(Box<dyn std::error::Error>),
    /// This side's own device named what it may not.
    Device(Box<dyn std::error::Error>),
}

/// A receive that the device has posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// How many receives were posted before it.
    pub number: u64,
    /// The buffer's region.
    pub key: u32,
    /// The buffer's offset in its region, bytes.
    pub offset: u64,
    /// Bytes that the buffer takes.
    pub length: u32,
    /// Tag of the messages that the receive takes, or `PUSHGATE_ANY_TAG`.
    pub tag: u32,
}

impl Posted {
    /// Decodes the words of receive `number` in a ring of `1 << log`; `None` if one of them is not written yet.
    pub fn decode(number: u64, log: u32, words: &[u64; abi::PUSHGATE_RECV_WORDS as usize]) -> Option<Self> {
        let lap = lap_of(number, log);
        if words.iter().any(|w| (w >> abi::PUSHGATE_LAP_SHIFT) as u8 != lap) {
            return None;
        }
        Some(Posted {
            number,
            key: words[0] as u32,
            offset: words[1] & abi::PUSHGATE_DATA_MASK,
            length: words[2] as u32,
            tag: words[3] as u32,
        })
    }

    fn takes(&self, tag: u32) -> bool {
        self.tag == abi::PUSHGATE_ANY_TAG || self.tag == tag
    }
}

/// Cumulative counts that the peer is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages whose place at the sender is no longer needed.
    pub released: u64,
    /// Messages that are in their places.
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
    /// The posted receive's number.
    Buffer(u64),
    Landing(Room),
}

/// A copy under way.
#[derive(Clone, Copy, Debug)]
struct Copying {
    record: Record,
    sequence: u64,
    landed: Landed,
    /// Others of its kind may be begun behind it, and end behind it.
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
    posted: VecDeque<Posted>,
    /// Receives that the device has posted, taken or not.
    posts: u64,
    in_place: VecDeque<Held>,
    in_place_units: u64,
    landing: Landing,
    landed: VecDeque<Held>,
    waiting: Option<Message>,
    copying: VecDeque<Copying>,
    /// What `consumed` was, and since when.
    progress: (u64, u64),
    slow: bool,
}

impl Inbound {
    /// A receiver that has accepted nothing.
    pub fn new(rules: Rules) -> Self {
        let held = 1usize << rules.rx_log;
        Inbound {
            rules,
            accepted: 0,
            shown: 0,
            consumed: 0,
            posted: VecDeque::with_capacity(if rules.posted_receives { held } else { 0 }),
            posts: 0,
            in_place: VecDeque::with_capacity(held),
            in_place_units: 0,
            landing: Landing::new(rules.landing_log),
            landed: VecDeque::with_capacity(held),
            waiting: None,
            copying: VecDeque::with_capacity(MOST_COPIES),
            // No count yet: the first look begins the time.
            progress: (u64::MAX, 0),
            slow: rules.slow_ns == 0,
        }
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
            return Err(Fault::Device(format!("{consumed} receive records released of {shown}").into()));
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
        self.posted.push_back(receive);
        self.posts += 1;
    }

    // ------------------------------------------------------------- messages

    /// Another message may be begun: fewer copies are under way than may be, and the last one lets others stand
    /// behind it.
    #[inline(always)]
    pub fn takes_another(&self) -> bool {
        self.copying.len() < MOST_COPIES && self.copying.back().is_none_or(|c| c.queues)
    }

    /// Takes the message that waits, to try it again.
    #[inline(always)]
    pub fn retry(&mut self) -> Option<Message> {
        self.waiting.take()
    }

    /// A message waits.
    #[inline(always)]
    pub fn waits(&self) -> bool {
        self.waiting.is_some()
    }

    /// Keeps a message that [`Action::Wait`] was answered for.
    #[cold]
    pub fn keep(&mut self, message: Message) {
        self.waiting = Some(message);
    }

    /// Accepts the next record of the link: decodes it, and checks its sequence number.
    #[inline]
    pub fn accept(&mut self, words: &RecordWords) -> Result<(Record, u64), Fault> {
        let record = Record::decode(words).map_err(peer)?;
        if record.opcode == Opcode::Nop {
            return Err(Fault::Peer("a NOP on the link".into()));
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

    /// Decides on an accepted message. Whatever is answered but [`Action::Wait`] has been taken into account: the caller
    /// must do it, or end the queue pair.
    #[inline]
    pub fn place<S: Site>(
        &mut self,
        r: &Record,
        placed: bool,
        sequence: u64,
        site: &S,
    ) -> Result<Action, Fault> {
        let lands = match r.opcode {
            Opcode::Put => true,
            Opcode::Send => self.rules.posted_receives,
            _ => false,
        };
        if placed && !lands {
            return Err(Fault::Peer("a payload came alone for which there is no place".into()));
        }
        match r.opcode {
            Opcode::Send => {
                if self.rules.posted_receives {
                    return self.place_in_buffer(r, placed, sequence, site);
                }
                if self.shown - self.consumed >= 1 << self.rules.rx_log {
                    return Err(Fault::Overrun("no receive was granted for this message".into()));
                }
                if !self.copying.is_empty() {
                    return Ok(Action::Wait);
                }
                if r.has(Record::INLINE) {
                    self.shown += 1;
                    return Ok(Action::ShowWords);
                }
                self.place_at_hand(r, sequence, site)
            }
            Opcode::Put => {
                let to = site.region(r.rkey, r.remote_offset, r.length).map_err(peer)?;
                let with_signal = r.has(Record::WITH_SIGNAL);
                if with_signal && r.signal >= self.rules.signals {
                    return Err(Fault::Peer("signal out of range".into()));
                }
                if !placed {
                    let to = Destination::Region { key: r.rkey, stretch: to };
                    return self.begin(r, sequence, Landed::Region, to, site);
                }
                if self.written(r.rkey, site)? {
                    return Ok(Action::Placed(
                        to,
                        if with_signal { Finish::Signal } else { Finish::Nothing },
                    ));
                }
                Ok(Action::Wait)
            }
            Opcode::Signal => {
                if r.signal >= self.rules.signals {
                    return Err(Fault::Peer("signal out of range".into()));
                }
                if !self.copying.is_empty() {
                    return Ok(Action::Wait);
                }
                Ok(Action::Finish(Finish::Signal))
            }
            Opcode::Nop => unreachable!("`accept` refuses it"),
        }
    }

    /// The link says that it has written to region `key`: whether it could have, and whether that may be shown now.
    fn written<S: Site>(&self, key: u32, site: &S) -> Result<bool, Fault> {
        if !site.offers(key) {
            return Err(Fault::Peer("it wrote to a region that was not offered to its device".into()));
        }
        Ok(self.copying.is_empty())
    }

    /// A SEND without posted receives whose payload lies with the sender: shown where it lies, or copied to the
    /// landing ring.
    fn place_at_hand<S: Site>(&mut self, r: &Record, sequence: u64, site: &S) -> Result<Action, Fault> {
        self.payload(r, site)?;
        let units = r.length.div_ceil(abi::PUSHGATE_UNIT) as u64;
        let room = self.landing.room(units);
        let held = r.units() as u64;
        // While nothing is held a payload of any size stays in place: that costs the sender nothing that the message
        // does not cost already.
        let much = self.in_place_units > 0 && self.in_place_units + held > self.rules.in_place;
        let readable = site.reads_in_place() && !r.has(Record::REGION);
        if readable && !(much && self.slow && room.is_ok()) {
            self.in_place.push_back(Held { rx: self.shown, sequence, units: held });
            self.in_place_units += held;
            self.shown += 1;
            return Ok(Action::Finish(Finish::Show(Record { flags: 0, ..*r })));
        }
        match room {
            Ok(room) => {
                self.landing.take(room);
                self.begin(r, sequence, Landed::Landing(room), Destination::Landing(room.unit), site)
            }
            // The reader will give room back.
            Err(NoRoom::Now) => Ok(Action::Wait),
            Err(NoRoom::Ever) => {
                let size = self.landing.units() << abi::PUSHGATE_UNIT_LOG;
                let why = format!("{} bytes do not fit the landing ring of {size} bytes", r.length);
                Err(Fault::Peer(why.into()))
            }
        }
    }

    /// A SEND takes the oldest posted receive whose tag is the SEND's or any.
    fn place_in_buffer<S: Site>(
        &mut self,
        r: &Record,
        placed: bool,
        sequence: u64,
        site: &S,
    ) -> Result<Action, Fault> {
        if self.posted.is_empty() {
            return Err(Fault::Overrun("no receive was posted for this message".into()));
        }
        let found = self.posted.iter().position(|b| b.takes(r.tag));
        // What the peer says is compared, never followed.
        if placed && found.is_none_or(|at| self.posted[at].number as u32 != r.place) {
            let why = format!("it wrote to receive {}, which is not the one that its message takes", r.place);
            return Err(Fault::Peer(why.into()));
        }
        let Some(at) = found else {
            // A credit says that there is a receive and not which. The program has the rest of the queue pair's life
            // to post the right one.
            return Ok(Action::Wait);
        };
        let b = self.posted[at];
        if b.length < r.length {
            // As with RDMA the sender is the one that asked for what can't be done.
            return Err(Fault::Peer(
                format!(
                    "{} bytes arrived for receive {}, which takes {}: post a longer one, or send less",
                    r.length, b.number, b.length
                )
                .into(),
            ));
        }
        let to = site.region(b.key, b.offset, r.length).map_err(device)?;
        let step = match placed {
            false => {
                let to = Destination::Region { key: b.key, stretch: to };
                self.begin(r, sequence, Landed::Buffer(b.number), to, site)?
            }
            true if self.written(b.key, site)? => {
                self.shown += 1;
                Action::Placed(to, Finish::Show(in_buffer(r, b.number)))
            }
            true => Action::Wait,
        };
        if step != Action::Wait {
            self.posted.remove(at);
        }
        Ok(step)
    }

    /// Where the payload of a record lies.
    fn payload<S: Site>(&self, r: &Record, site: &S) -> Result<Payload, Fault> {
        if r.has(Record::INLINE) {
            return Ok(Payload::Inline);
        }
        if r.has(Record::REGION) {
            return match site.reads_peer() {
                true => Ok(Payload::Peer(r.place_offset)),
                false => {
                    Err(Fault::Peer("it sent out of a region, which we had not said we can read".into()))
                }
            };
        }
        let (unit, units) = (r.place, r.units());
        if (units as u64) * (abi::PUSHGATE_UNIT as u64) < r.length as u64 {
            return Err(Fault::Peer(format!("{} bytes in {units} units", r.length).into()));
        }
        let lies = site.payload(unit, units).map(Payload::Mapped);
        lies.ok_or_else(|| {
            Fault::Peer(format!("unit {unit} and {units} more leave the peer's window").into())
        })
    }

    /// Begins a copy, or answers that the message waits: copies out of mapped memory into a device's are queued behind
    /// each other, and every other copy is alone.
    fn begin<S: Site>(
        &mut self,
        r: &Record,
        sequence: u64,
        landed: Landed,
        to: Destination,
        site: &S,
    ) -> Result<Action, Fault> {
        let from = self.payload(r, site)?;
        let on_device = matches!(to, Destination::Region { stretch: Stretch::Device(_), .. });
        let of_peer = matches!(from, Payload::Peer(_));
        let queues = on_device && !of_peer;
        let stage = self.landing.longest_free();
        if !self.copying.is_empty() && !queues || on_device && of_peer && stage.1 == 0 {
            return Ok(Action::Wait);
        }
        self.copying.push_back(Copying { record: *r, sequence, landed, queues });
        Ok(Action::Copy { from, to, stage })
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
            Landed::Buffer(number) => in_buffer(&c.record, number),
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
        let open = self.copying.len() as u64 + self.waiting.is_some() as u64;
        let received = self.accepted - open;
        Counts {
            released: self.in_place.front().map_or(received, |h| h.sequence),
            received,
            granted: match self.rules.posted_receives {
                true => self.posts,
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

/// The receive record of a SEND whose payload is in the buffer of posted receive `number`.
fn in_buffer(r: &Record, number: u64) -> Record {
    Record { flags: Record::BUFFER, place: number as u32, place_offset: 0, ..*r }
}

fn peer(e: impl std::error::Error + 'static) -> Fault {
    Fault::Peer(Box::new(e))
}

fn device(e: impl std::error::Error + 'static) -> Fault {
    Fault::Device(Box::new(e))
}

/// A slot that no sender of this session could have written.
pub fn torn() -> Fault {
    Fault::Overrun(Box::new(Malformed::Lap))
}

#[cfg(test)]
mod tests;
