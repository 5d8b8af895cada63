//! What a run must look like: one direction of a queue pair as its sender's program posted it, kept apart from the code
//! under test. Every word that an engine publishes, and every payload that it shows, is compared with this.
//!
//! A payload is a function of its direction and its message's number, word by word, so each word tells where it belongs.

mod receiver;
mod sender;

use pushgate_driver_shim::record::Opcode;
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::memory::Words;

use super::violation::{Violation, broken};

/// Where a message's payload is when it is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Window,
    Inline,
    Region,
}

/// A message that was posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) opcode: Opcode,
    pub(super) way: Way,
    pub(super) length: u32,
    pub(super) tag: u32,
    /// SENDs before it.
    pub(super) sends: u32,
    /// In the window: its first unit.
    pub(super) place: u32,
    /// PUT: where it goes in the peer's region, bytes.
    pub(super) offset: u32,
    /// The signal that follows it.
    pub(super) signal: Option<u32>,
    /// SEND, once shown: the reader reads it in the sender's window.
    pub(super) in_place: bool,
}

/// A WQE slot that was taken.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Units of the window, padding included, up to and with this slot.
    units_after: u64,
    messages_after: u32,
    sends_after: u32,
    /// Completions up to and with this slot.
    completions_after: u64,
    signaled: bool,
    opcode: u8,
    wr_id: u32,
    length: u32,
}

/// A receive that the reader has posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receive {
    pub(super) tag: u32,
    pub(super) buffer: u16,
    pub(super) length: u32,
    taken: bool,
}

/// What the checks read of one end: its control words, and where payload lies.
pub(super) struct Side {
    pub(super) rank: u32,
    pub(super) geometry: Geometry,
    /// CREDIT, STATUS, DELIVERED.
    pub(super) line: Words,
    pub(super) signals: Words,
    pub(super) rx: Words,
    /// Over `local`: what this end publishes to the peer. RECEIVED, RELEASED, GRANTED.
    pub(super) link: Option<Words>,
    /// Where this end reads payload of the peer's window, of its landing ring, of its buffers.
    pub(super) inbound: usize,
    pub(super) landing: usize,
    pub(super) buffers: usize,
    /// Bytes of a buffer.
    pub(super) buffer: usize,
    /// The region that the peer puts to.
    pub(super) region: usize,
}

/// One direction of a queue pair.
pub(super) struct Flow {
    id: u16,
    /// The queue pair's number and both ranks, for sentences.
    name: String,
    geometry: Geometry,
    /// What carries it places payload byte by byte, so a word may be in part of an older and in part of a newer PUT.
    pub(super) bytewise: bool,
    slots: Vec<Slot>,
    pub(super) messages: Vec<Message>,
    /// The messages that are SENDs.
    sends: Vec<u32>,
    /// For each word of the peer's region, one more than the last PUT that covers it.
    last: Vec<u32>,
    /// The greatest value of each signal that a message carries so far.
    signaled: Vec<u64>,
    sender: ShownBySender,
    pub(super) receiver: ShownByReceiver,
    posts: bool,
    /// SENDs that may be posted ahead of their receives.
    pub(super) ahead: u64,
    deaths: Deaths,
}

/// What the sender's side has shown.
#[derive(Default)]
struct ShownBySender {
    credit: u64,
    credit_units: u64,
    delivered: u64,
    cq_head: usize,
    /// CQEs reserved and polled.
    cqes: (u64, u64),
    /// Once the sender's end is shown: completions that must come.
    due: u64,
}

/// What the receiver's side has shown.
pub(super) struct ShownByReceiver {
    /// Messages that are known to be where they belong.
    pub(super) seen: u32,
    /// SENDs that were shown, taken by the program, and given back.
    pub(super) shown: u32,
    pub(super) taken: u32,
    pub(super) released: u32,
    signals: Vec<u64>,
    link: [u64; 3],
    /// Receives that the reader has posted, and the first that no message has taken.
    pub(super) receives: Vec<Receive>,
    first_free: usize,
    /// For each SEND that was shown: the posted receive that it took.
    pub(super) took: Vec<u32>,
}

/// Where engines die and others go on.
#[derive(Default)]
struct Deaths {
    /// An engine of the sender has died; one that had a cause to end has.
    died: bool,
    ending: bool,
    /// Slots and messages that the session segments of both ends covered last.
    kept: (u64, u64),
}

impl Flow {
    /// A direction from an end of `geometry` to a reader that has `peer_signals` signals and a region of `region` bytes.
    /// `posts`: its SENDs go to posted receives.
    pub(super) fn new(
        id: u16,
        name: String,
        geometry: Geometry,
        messages: usize,
        peer_signals: usize,
        region: usize,
        posts: bool,
    ) -> Self {
        Flow {
            id,
            name,
            geometry,
            bytewise: false,
            slots: Vec::with_capacity(2 * messages + 64),
            messages: Vec::with_capacity(messages),
            sends: Vec::with_capacity(messages),
            last: vec![0; region / 8],
            signaled: vec![0; peer_signals],
            sender: ShownBySender::default(),
            receiver: ShownByReceiver {
                seen: 0,
                shown: 0,
                taken: 0,
                released: 0,
                signals: vec![0; peer_signals],
                link: [0; 3],
                receives: Vec::with_capacity(if posts { messages + 64 } else { 0 }),
                first_free: 0,
                took: Vec::with_capacity(if posts { messages } else { 0 }),
            },
            posts,
            ahead: 0,
            deaths: Deaths::default(),
        }
    }

    /// The words of a payload: of message `number`, word `index` of the payload or, for a PUT, of the region.
    pub(super) fn word(&self, number: u32, index: u32) -> u64 {
        (number as u64 + 1) << 36 | (self.id as u64) << 20 | index as u64 & 0xf_ffff
    }

    /// Writes the payload of message `number` to `to`.
    pub(super) fn fill(&self, number: u32, first: u32, to: &mut [u8]) {
        for (i, bytes) in to.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&self.word(number, first + i as u32).to_le_bytes()[..bytes.len()]);
        }
    }

    #[cold]
    fn broken(&self, promise: u8, what: impl std::fmt::Display) -> Violation {
        broken(promise, format!("{}: {what}", self.name))
    }

    /// The number, among all messages, of a SEND.
    pub(super) fn number_of_send(&self, send: u32) -> u32 {
        self.sends[send as usize]
    }

    /// SENDs posted so far.
    pub(super) fn sends(&self) -> u32 {
        self.sends.len() as u32
    }

    /// Slots taken so far.
    pub(super) fn taken_slots(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Slots that were given back, as the checks have seen.
    pub(super) fn credit(&self) -> u64 {
        self.sender.credit
    }

    /// A message to be posted: its number is how many there were.
    pub(super) fn message(opcode: Opcode, way: Way, length: u32) -> Message {
        Message { opcode, way, length, tag: 0, sends: 0, place: 0, offset: 0, signal: None, in_place: false }
    }

    /// Everything was posted, has arrived, was given back and has completed.
    pub(super) fn is_finished(&self) -> bool {
        self.receiver.seen as usize == self.messages.len()
            && self.sender.credit == self.slots.len() as u64
            && self.receiver.released as usize == self.sends.len()
            && self.all_completed()
    }

    /// What is not finished, for sentences.
    pub(super) fn state(&self) -> String {
        format!(
            "{}: {} messages posted, {} arrived; {} of {} slots given back; {} SENDs: {} shown, {} given back; {} of {} \
             completions polled; {} receives posted",
            self.name,
            self.messages.len(),
            self.receiver.seen,
            self.sender.credit,
            self.slots.len(),
            self.sends.len(),
            self.receiver.shown,
            self.receiver.released,
            self.sender.cqes.1,
            self.sender.cqes.0,
            self.receiver.receives.len()
        )
    }
}

impl Receive {
    /// A receive into a buffer.
    pub(super) fn new(tag: u32, buffer: u16, length: u32) -> Self {
        Receive { tag, buffer, length, taken: false }
    }
}
