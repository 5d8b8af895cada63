//! What a receiver is told of a message, asks about its site, and answers.

use pushgate_abi::record::{Record, RecordWords};

use crate::refusal::Refusal;

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
    /// Nothing: the message waits, and the messages after it.
    Wait,
    /// Write the message's own words as the next receive record.
    ShowWords,
    /// Do what is said.
    Finish(Finish),
    /// Make what the peer's device has written visible to this side's device, if that is a device's memory; then do
    /// what is said.
    Placed(Stretch, Finish),
    /// Begin a copy. Its end is told by [`Inbound::copied`](super::Inbound::copied).
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
    /// The peer's device or engine asked for what it may not (P8).
    Peer(Refusal, Box<dyn std::error::Error>),
    /// This side's own device named what it may not, or failed.
    Device(Refusal, Box<dyn std::error::Error>),
}
