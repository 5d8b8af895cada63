//! Messages that are too long for the window, where the queue pair does not send from regions, or
//! too long for any message of a queue pair. One at a time on a connection:
//!
//! 1. The sender says how long it is (signal `BYTES`, the sum over all such
//!    messages) and that the next SEND begins one (signal `BEGINS`, the number of
//!    that SEND, from 1).
//! 2. The SEND carries the first slice, by tag and receive credit like any other.
//! 3. The receiver invites: an inline SEND the other way, with key and offset of the
//!    rest of the buffer that the SEND met.
//! 4. The sender puts the rest there, slice by slice as the window has room, and with
//!    the last one the signal `ENDS`, the number of such messages.
//!
//! A queue pair is in order, so each is there when the next is seen. Where the memory is a
//! GPU's, its worker pushes the slices, and several of them are under way at once. Slices of a
//! region go out of it, and are as long as a message can be.

use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_proxy::producer::Producer;

use crate::error::Result;
use crate::path::Slices;

/// Number of the last such message that is complete.
pub const ENDS: u32 = 0;
/// Number of the SEND that begins one.
pub const BEGINS: u32 = 1;
/// Bytes of all of them so far.
pub const BYTES: u32 = 2;
/// Signal words of a connection.
pub const SIGNALS: u32 = 3;

/// Pushed at once: small enough that push and delivery overlap.
pub const SLICE: usize = 128 << 10;
/// The same where a GPU pushes, to which a command costs more than a byte, and all of whose
/// blocks share in one.
pub const GPU_SLICE: usize = 512 << 10;
/// So many slices in one call, for the thread that makes it has other connections to look after.
const TURN: usize = 4;

/// Where the rest of a message goes, as the receiver says it.
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

/// The sender's side of one.
pub struct Outgoing {
    /// Its request.
    pub request: u32,
    data: *const u8,
    size: usize,
    tag: u32,
    /// Bytes that go at once.
    slice: usize,
    /// How they go.
    pub slices: Slices,
    done: usize,
    stage: Stage,
    /// Its memory is deregistered: nothing more of it is read.
    pub stopped: bool,
}

// SAFETY: a place that NCCL keeps until the request is done; whichever thread has
// the connection may read it.
unsafe impl Send for Outgoing {}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Length,
    Begin,
    First,
    Invited(Option<Invitation>),
}

/// Totals of a sending end.
#[derive(Default)]
pub struct Sums {
    bytes: u64,
    messages: u64,
}

impl Outgoing {
    /// Of `size` bytes at `data`, which can be read until the last slot is retired, by the
    /// GPU if they are its own. `most`: what goes at once that way.
    pub fn new(request: u32, data: *const u8, size: usize, tag: u32, slices: Slices, most: usize) -> Self {
        let slice = match slices {
            Slices::Copied => SLICE.min(most),
            Slices::Pushed => GPU_SLICE.min(most),
            Slices::Region { .. } => most,
        };
        Outgoing { request, data, size, tag, slice, slices, done: 0, stage: Stage::Length, stopped: false }
    }

    /// The next slice's source, beside which the payload itself need not be known.
    fn sourced(&self, record: Record) -> Record {
        let Slices::Region { key, offset } = self.slices else { return record };
        let flags = record.flags | Record::REGION;
        Record { flags, place: key, place_offset: offset + self.done as u64, ..record }
    }

    /// Whether what it sends begins in these `bytes` at `address`.
    pub fn lies_in(&self, address: usize, bytes: usize) -> bool {
        (address..address.saturating_add(bytes)).contains(&(self.data as usize))
    }

    /// Its first SEND is still to come, and must be the next.
    pub fn begins(&self) -> bool {
        !matches!(self.stage, Stage::Invited(_))
    }

    /// The receiver has said where the rest goes. False if nobody asked it.
    pub fn invited(&mut self, invitation: Invitation) -> bool {
        let asked = self.stage == Stage::Invited(None);
        if asked {
            self.stage = Stage::Invited(Some(invitation));
        }
        asked
    }

    /// Goes as far as there is credit, and not for long. `push` has a slice pushed into the window: the slot
    /// that it took, or none without credit. `posted` is told of each message, and whether it
    /// is a SEND; the slot of the last one, when that was posted.
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
            // Not followed here, and maybe an address of the GPU's.
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

/// The receiver's side of one.
#[derive(Clone, Copy, Debug)]
pub struct Incoming {
    /// Its request, and which of that one's buffers.
    pub request: u32,
    pub buffer: u8,
    /// The region of that one.
    pub key: u32,
    pub size: usize,
    /// Until the invitation could be sent.
    pub invitation: Option<Invitation>,
    /// Its number among such messages, from 1.
    pub number: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_survives() {
        let i = Invitation { key: 0x8765_4321, offset: 0x1234_5678_9abc_def0 };
        assert_eq!(Invitation::decode(&i.encode()), i);
    }
}
