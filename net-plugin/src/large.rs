//! Messages in slices: messages that are too long for the window, or for the connection's share of
//! it, where the queue pair does not send from regions; or too long for any message of a queue pair.
//! A connection has one at a time:
//!
//! 1. The sender announces the length (signal `BYTES`, the sum over all such messages) and that the
//!    next SEND begins one (signal `BEGINS`, the number of that SEND, from 1).
//! 2. The SEND carries the first slice, with tag and receive credit like any other SEND.
//! 3. The receiver invites the rest: an inline SEND the other way, with key and offset of the rest
//!    of the buffer that the SEND met.
//! 4. The sender puts the rest there, slice by slice as the window has room, and with the last
//!    slice the signal `ENDS`, the number of such messages.
//!
//! A queue pair is in order, so each of these has arrived when the next is seen. If the memory is a
//! GPU's, the GPU's worker pushes the slices, and several are under way at once. Slices of a region
//! are sent out of the region, and are as long as a message can be.

use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_link::producer::Producer;

use crate::error::Result;
use crate::path::Slices;

/// Signal: how many messages in slices are complete.
pub const ENDS: u32 = 0;
/// Signal: the number of the SEND that begins the latest message in slices.
pub const BEGINS: u32 = 1;
/// Signal: the bytes of all messages in slices so far.
pub const BYTES: u32 = 2;
/// How many signal words a connection has.
pub const SIGNALS: u32 = 3;

/// Bytes of a slice that a CPU pushes: small enough that push and delivery overlap.
pub const SLICE: usize = 128 << 10;
/// Bytes of a slice that a GPU pushes: larger, because a command costs a GPU more than a byte, and
/// all its blocks share in one command.
pub const GPU_SLICE: usize = 512 << 10;
/// The most slices in one call, because the calling thread has other connections to serve.
const TURN: usize = 4;

/// Where the rest of a message goes, as the receiver announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invitation {
    pub key: u32,
    pub offset: u64,
}

impl Invitation {
    pub const BYTES: usize = 12;

    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        b[..4].copy_from_slice(&self.key.to_le_bytes());
        b[4..].copy_from_slice(&self.offset.to_le_bytes());
        b
    }

    pub fn decode(b: &[u8]) -> Self {
        Invitation {
            key: u32::from_le_bytes(b[..4].try_into().expect("four bytes")),
            offset: u64::from_le_bytes(b[4..12].try_into().expect("eight bytes")),
        }
    }
}

/// A message in slices, on the sender's side.
pub struct Outgoing {
    /// The message's request.
    pub request: u32,
    data: *const u8,
    size: usize,
    tag: u32,
    /// Bytes of one slice.
    pub slice: usize,
    /// How the slices leave.
    pub slices: Slices,
    done: usize,
    stage: Stage,
    /// The message's memory is deregistered: nothing more of it is read.
    pub stopped: bool,
}

// SAFETY: NCCL keeps the memory until the request is done, and whichever thread has the connection
// may read it.
unsafe impl Send for Outgoing {}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Length,
    Begin,
    First,
    Invited(Option<Invitation>),
}

/// Totals over the messages in slices of a sending end.
#[derive(Default)]
pub struct Sums {
    bytes: u64,
    messages: u64,
}

impl Outgoing {
    /// A message of `size` bytes at `data`, which stay readable until the last slot is retired; the
    /// GPU reads them if they are its own memory. `most`: the most bytes that may leave at once.
    pub fn new(request: u32, data: *const u8, size: usize, tag: u32, slices: Slices, most: usize) -> Self {
        let slice = match slices {
            Slices::Copied => SLICE.min(most),
            Slices::Pushed => GPU_SLICE.min(most),
            Slices::Region { .. } => most,
        };
        Outgoing { request, data, size, tag, slice, slices, done: 0, stage: Stage::Length, stopped: false }
    }

    /// A record that names the next slice's source, for a slice whose payload is not read here.
    fn sourced(&self, record: Record) -> Record {
        let Slices::Region { key, offset } = self.slices else { return record };
        let flags = record.flags | Record::REGION;
        Record { flags, place: key, place_offset: offset + self.done as u64, ..record }
    }

    /// Whether the memory that the message is sent out of begins in these `bytes` at `address`.
    pub fn lies_in(&self, address: usize, bytes: usize) -> bool {
        (address..address.saturating_add(bytes)).contains(&(self.data as usize))
    }

    /// Whether the message's first SEND is still to come; that SEND must be the next one posted.
    pub fn begins(&self) -> bool {
        !matches!(self.stage, Stage::Invited(_))
    }

    /// Takes the receiver's invitation for the rest. False if this message did not ask for one.
    pub fn invited(&mut self, invitation: Invitation) -> bool {
        let asked = self.stage == Stage::Invited(None);
        if asked {
            self.stage = Stage::Invited(Some(invitation));
        }
        asked
    }

    /// Sends slices as long as there is credit, but at most `TURN` of them.
    ///
    /// `push` has a slice pushed into the window and returns the slot that it took, or `None`
    /// without credit. `posted` is told of each message and whether it is a SEND. Returns the last
    /// message's slot once that message is posted.
    pub fn advance(
        &mut self,
        producer: &mut Producer,
        sums: &mut Sums,
        sends: u64,
        mut push: impl FnMut(&mut Producer, Record, *const u8, usize) -> Result<Option<u64>>,
        mut posted: impl FnMut(bool),
    ) -> Result<Option<u64>> {
        let signal = |producer: &mut Producer, signal, signal_value| {
            producer.post(Record { signal, signal_value, ..Record::new(Opcode::Signal) }, &[])
        };
        let mut slices = 0;
        while slices < TURN {
            let n = (self.size - self.done).min(self.slice);
            // The pointer is not dereferenced here, and may be an address of the GPU's.
            let from = self.data.wrapping_add(self.done);
            match self.stage {
                Stage::Length => {
                    if !signal(producer, BYTES, sums.bytes + self.size as u64) {
                        return Ok(None);
                    }
                    posted(false);
                    sums.bytes += self.size as u64;
                    self.stage = Stage::Begin;
                }
                Stage::Begin => {
                    if !signal(producer, BEGINS, sends + 1) {
                        return Ok(None);
                    }
                    posted(false);
                    self.stage = Stage::First;
                }
                Stage::First => {
                    let record = Record { tag: self.tag, ..Record::new(Opcode::Send) };
                    if push(producer, self.sourced(record), from, n)?.is_none() {
                        return Ok(None);
                    }
                    posted(true);
                    slices += 1;
                    self.done = n;
                    self.stage = Stage::Invited(None);
                }
                Stage::Invited(None) => return Ok(None),
                Stage::Invited(Some(to)) => {
                    let last = self.done + n == self.size;
                    let first = self.size.min(self.slice);
                    let record = Record {
                        flags: if last { Record::WITH_SIGNAL } else { 0 },
                        rkey: to.key,
                        remote_offset: to.offset + (self.done - first) as u64,
                        signal: ENDS,
                        signal_value: sums.messages + 1,
                        ..Record::new(Opcode::Put)
                    };
                    let Some(slot) = push(producer, self.sourced(record), from, n)? else {
                        return Ok(None);
                    };
                    posted(false);
                    slices += 1;
                    self.done += n;
                    if last {
                        sums.messages += 1;
                        return Ok(Some(slot));
                    }
                }
            }
        }
        Ok(None)
    }
}

/// A message in slices, on the receiver's side.
#[derive(Clone, Copy, Debug)]
pub struct Incoming {
    /// The request, and which of its buffers the message fills.
    pub request: u32,
    pub buffer: u8,
    /// The region of that buffer.
    pub key: u32,
    pub size: usize,
    /// The invitation, until it has been sent.
    pub invitation: Option<Invitation>,
    /// The message's number among the messages in slices, from 1.
    pub number: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_is_read_back_as_it_was_written() {
        let i = Invitation { key: 0x8765_4321, offset: 0x1234_5678_9abc_def0 };
        assert_eq!(Invitation::decode(&i.encode()), i);
    }
}
