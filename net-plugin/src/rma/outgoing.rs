//! The queue pair to another rank: operations leave as messages, whose payload is copied into the window.

use std::collections::VecDeque;
use std::sync::Arc;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_gpu_kernels::OrderedCopies;
use pushgate_link::producer::Producer;

use super::memory::Memory;
use super::requests::{Cause, Handle, Requests};
use super::wire::{Adds, HEADER, Header, Place};
use crate::end::CommEnd;
use crate::error::{Code, Failure, Result};
use crate::handshake::Made;
use crate::join::{Joined, Role};
use crate::runtime::Runtime;

/// Payload of one message: long enough that its copy costs more than the message, short enough that the copies of both ends
/// overlap.
const SLICE: usize = 256 << 10;
/// The most payload of one message that the GPU copies, where a quarter of the window has room for it. Long copies, because each
/// has a fence.
const GPU_SLICE: usize = 8 << 20;
/// An operation with GPU memory is sent as this number of messages, as far as [`SLICE`] and [`GPU_SLICE`] allow: the copies of both ends
/// then overlap.
const PARTS: u64 = 8;
/// Messages that one call sends to a rank before it looks at the others.
const TURN: usize = 16;

/// What an operation asks of the other rank.
#[derive(Debug)]
pub enum What {
    /// Put the payload there, then add to the signal.
    Put { to: Place, signal: Option<Adds> },
    /// Send the bytes there for this get.
    Get { from: Place, bytes: u64, get: Handle },
    /// The payload is for the other rank's get of this number.
    Reply { get: u64 },
}

/// An operation that waits to be sent, or has been sent in part.
#[derive(Debug)]
pub struct Op {
    pub what: What,
    /// The payload: a memory and the offset in it.
    pub payload: Option<(Arc<Memory>, u64)>,
    /// Bytes of payload.
    pub bytes: u64,
    /// Bytes that are in the window or on their way there.
    pub sent: u64,
    /// Done when the payload may be reused.
    pub request: Option<Handle>,
}

impl Op {
    /// Whether the operation's payload lies in this memory.
    pub fn uses(&self, memory: &Arc<Memory>) -> bool {
        self.payload.as_ref().is_some_and(|(own, _)| Arc::ptr_eq(own, memory))
    }
}

/// A message whose payload the GPU copies into the window.
struct Staged {
    mark: u64,
    slot: u64,
    words: RecordWords,
    request: Option<Handle>,
}

/// Payload of one message.
enum Payload {
    None,
    /// The address of host memory.
    Host(usize),
    /// The address of GPU memory.
    Device(u64),
}

/// The queue pair to a rank.
pub struct Outgoing {
    end: CommEnd,
    rank: u32,
    producer: Producer,
    /// The GPU's address of the window.
    window: Option<u64>,
    staged: VecDeque<Staged>,
    /// The most bytes of a message, with its header.
    longest: usize,
}

impl Outgoing {
    /// The queue pair to rank `rank`, which is told who sends.
    pub fn new(runtime: Arc<Runtime>, made: Made, rank: u32, hello: Header) -> Result<Self> {
        let Joined { qp, mailbox, producer, geometry, lane, window, registrations, .. } = *made.joined;
        let end = CommEnd::new(runtime, Role::Send, made.line, (qp, mailbox, lane, registrations))?;
        let longest = (abi::PUSHGATE_UNIT as usize) << geometry.window_log >> 2;
        let mut new = Outgoing { end, rank, producer, window, staged: VecDeque::new(), longest };
        match new.send(&hello, (Payload::None, 0), None, None)? {
            true => Ok(new),
            false => Err(Failure::new(Code::Internal, "a new queue pair has no room for a message")),
        }
    }

    /// How the queue pair ended, if it has.
    pub fn ended(&self) -> Option<Cause> {
        let status = self.producer.status()?;
        let failure = Failure::ended(status, format!("the queue pair to rank {}", self.rank));
        Some(failure.into())
    }

    /// Ends the queue pair, because this end has failed.
    pub fn abort(&self) {
        self.end.abort();
    }

    /// Whether the other rank of a queue pair that has ended closed it in order, and had all that was sent.
    pub fn has_all(&self) -> bool {
        // An end that refuses a message, or fails, says farewell too.
        let closed =
            self.producer.status().is_some_and(|status| u32::from(status.code) == abi::PUSHGATE_PEER_LOST);
        closed && self.end.peer_has(self.producer.slots().saturating_sub(1))
    }

    /// Publishes messages whose payload the GPU has copied into the window: those with a mark up to `passed`.
    pub fn publish(&mut self, passed: u64, requests: &mut Requests) {
        let mut any = false;
        while let Some(staged) = self.staged.front()
            && staged.mark <= passed
        {
            self.producer.publish(staged.slot, &staged.words);
            if let Some(request) = staged.request {
                requests.done(request);
            }
            self.staged.pop_front();
            any = true;
        }
        if any {
            self.producer.wake();
        }
    }

    /// Sends as much of the operations as there is room for, up to [`TURN`] messages.
    ///
    /// # Safety
    /// The payload of each operation stays readable until the operation's request is done.
    pub unsafe fn advance(
        &mut self,
        ops: &mut VecDeque<Op>,
        mut copies: Option<&mut OrderedCopies>,
        requests: &mut Requests,
    ) -> Result<()> {
        self.end.lane.rouse();
        let mut messages = 0;
        while messages < TURN
            && let Some(op) = ops.front_mut()
        {
            let on_device = op.payload.as_ref().is_some_and(|(memory, _)| memory.cuda);
            let slice = match on_device {
                true => (op.bytes / PARTS).clamp(SLICE as u64, GPU_SLICE as u64) as usize,
                false => SLICE,
            };
            let bytes = (op.bytes - op.sent).min((slice.min(self.longest) - HEADER) as u64);
            let last = op.sent + bytes == op.bytes;
            let header = match op.what {
                What::Put { to, signal } => {
                    let to = Place { offset: to.offset + op.sent, ..to };
                    Header::Put { to, bytes, signal: signal.filter(|_| last) }
                }
                What::Get { from, bytes, get: Handle(get) } => Header::Get { from, bytes, get },
                What::Reply { get } => Header::Data { get, offset: op.sent, bytes },
            };
            let payload = match &op.payload {
                Some((memory, offset)) if bytes > 0 => {
                    let address = memory.address + (offset + op.sent) as usize;
                    if memory.cuda { Payload::Device(address as u64) } else { Payload::Host(address) }
                }
                _ => Payload::None,
            };
            let on_device = on_device && bytes > 0;
            let request = op.request.filter(|_| last);
            let payload = (payload, bytes as usize);
            if !self.send(&header, payload, copies.as_deref_mut(), request)? {
                break;
            }
            messages += 1;
            op.sent += bytes;
            if last {
                if let (Some(request), false) = (request, on_device) {
                    requests.done(request);
                }
                ops.pop_front();
            }
        }
        if let Some(copies) = copies {
            copies.mark_what_is_open().map_err(Failure::system("copying out of the GPU's memory"))?;
        }
        if messages > 0 {
            self.producer.wake();
            self.end.lane.drive(self.end.qp);
        }
        Ok(())
    }

    /// Sends one message. False without room.
    fn send(
        &mut self,
        header: &Header,
        (payload, bytes): (Payload, usize),
        copies: Option<&mut OrderedCopies>,
        request: Option<Handle>,
    ) -> Result<bool> {
        let record = Record::new(Opcode::Send);
        let Some((taken, words)) = self.producer.stage(record, HEADER + bytes) else { return Ok(false) };
        let header = header.encode();
        // SAFETY: a header's words are HEADER bytes of this function's own.
        unsafe { self.producer.push(taken.place, header.as_ptr().cast(), HEADER) };
        match payload {
            Payload::None => {}
            // SAFETY: the caller of `advance` promises that the payload can be read.
            Payload::Host(from) => unsafe { self.producer.push(taken.place + 1, from as *const u8, bytes) },
            Payload::Device(from) => {
                let (Some(window), Some(copies)) = (self.window, copies) else {
                    return Err(Failure::new(Code::Internal, "no GPU sees the window of this queue pair"));
                };
                let failed = Failure::system("copying out of the GPU's memory");
                let to = window + (taken.place + 1) * u64::from(abi::PUSHGATE_UNIT);
                // SAFETY: the caller promises the source; the target belongs to the reservation, in a window that stays
                // registered until the copies have ended (`State::close`).
                unsafe { copies.copy_out(to, from, bytes) }.map_err(failed)?;
                self.staged.push_back(Staged { mark: copies.next(), slot: taken.slot, words, request });
                return Ok(true);
            }
        }
        self.producer.publish(taken.slot, &words);
        Ok(true)
    }

    /// Another number whenever a message was begun, published or delivered.
    pub fn moved(&self) -> u64 {
        2 * self.producer.slots() + self.producer.delivered() - self.staged.len() as u64
    }

    /// How far the messages are, for the log.
    pub fn describe(&self) -> String {
        let (begun, staged) = (self.producer.slots(), self.staged.len());
        let delivered = self.producer.delivered();
        format!("{begun} messages were begun, {staged} wait for the GPU's copies, {delivered} are delivered")
    }

    /// Whether messages wait for the GPU.
    pub fn is_staging(&self) -> bool {
        !self.staged.is_empty()
    }

    /// What waits for the GPU's copies will not be sent: `failed` is told of each request.
    pub fn give_up(&mut self, failed: impl FnMut(Handle)) {
        self.staged.drain(..).filter_map(|staged| staged.request).for_each(failed);
    }

    /// Tells the other rank that no more follows. False without room.
    pub fn say_bye(&mut self) -> bool {
        let said = self.send(&Header::Bye, (Payload::None, 0), None, None).unwrap_or(false);
        self.producer.wake();
        self.end.lane.drive(self.end.qp);
        said
    }

    /// Whether the other rank's end has every message.
    pub fn is_delivered(&self) -> bool {
        self.producer.delivered() >= self.producer.slots()
    }
}
