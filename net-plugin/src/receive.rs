//! The receiving end of a connection: what was posted, what arrived for it, and when a receive or a
//! flush is done.

use std::collections::VecDeque;

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_link::producer::{Producer, Received};
use pushgate_link_verbs::Flusher;

use crate::end::CommEnd;
use crate::error::{Code, Failure, Result};
use crate::ffi::types::MAX_RECVS;
use crate::join::RECEIVES_LOG;
use crate::large::{self, Incoming, Invitation};
use crate::pool::{Pool, REQUESTS};
use crate::registration::{Mr, Wanted};

/// A buffer that was posted.
struct Posted {
    request: u32,
    buffer: u8,
    key: u32,
    offset: u64,
    size: usize,
    /// A message has met this buffer.
    met: bool,
}

/// What NCCL waits for on a receiving end.
enum Awaited {
    Receive(Receiving),
    /// A flush, by its number.
    Flush(u64),
}

struct Receiving {
    buffers: u8,
    left: u8,
    sizes: [usize; MAX_RECVS],
}

/// The state of a receiving end.
pub struct Receiver {
    producer: Producer,
    /// Completes what the RDMA device wrote into the GPU's memory.
    flusher: Option<Flusher>,
    pool: Pool<Awaited>,
    /// Buffers in the order in which they were posted, from the oldest that no message has met.
    posted: VecDeque<Posted>,
    /// The number of the first buffer in `posted`.
    oldest: u64,
    /// How many SENDs have arrived.
    arrived: u64,
    large: Option<Incoming>,
    large_bytes: u64,
    large_messages: u64,
}

impl Receiver {
    pub fn new(producer: Producer, flusher: Option<Flusher>) -> Self {
        Receiver {
            producer,
            flusher,
            pool: Pool::new(),
            posted: VecDeque::with_capacity(1 << RECEIVES_LOG),
            oldest: 0,
            arrived: 0,
            large: None,
            large_bytes: 0,
            large_messages: 0,
        }
    }

    /// Posts a receive ([`crate::comm::Comm::receive`]).
    pub fn receive(&mut self, end: &CommEnd, wanted: &[Wanted<'_>]) -> Result<Option<u32>> {
        end.gpu_lives()?;
        let Some(request) = self.pool.free() else { return Ok(None) };
        // A connection that has ended still takes the receive; its test returns the cause.
        let ended = self.producer.status().is_some();
        if !ended && self.posted.len() + wanted.len() > 1 << RECEIVES_LOG {
            return Ok(None);
        }
        // All buffers are posted or none, so first check everything that may be wrong with any of
        // them.
        let mut places = [(0, 0); MAX_RECVS];
        for (w, place) in wanted.iter().zip(&mut places) {
            *place = match w.mr {
                // For an empty receive NCCL may name any address, even beyond the registration's
                // end.
                _ if w.size == 0 => (end.nothing, 0),
                Some(mr) => (mr.key, mr.offset(w.data, w.size)?),
                None => {
                    let text = format!("{end}: a receive of {} bytes without registration", w.size);
                    return Err(Failure::new(Code::Usage, text));
                }
            };
        }
        for (i, (w, (key, offset))) in wanted.iter().zip(places).enumerate().filter(|_| !ended) {
            // No SEND is longer: a longer message comes in slices.
            let room = w.size.min(crate::props::MAX_BYTES);
            assert!(self.producer.post_recv(key, offset, room as u32, w.tag), "room was counted");
            self.posted.push_back(Posted { request, buffer: i as u8, key, offset, size: w.size, met: false });
        }
        self.producer.wake();
        let n = wanted.len() as u8;
        self.pool.fill(Awaited::Receive(Receiving { buffers: n, left: n, sizes: [0; MAX_RECVS] }));
        Ok(Some(request))
    }

    /// Whether a receive that waits for its message, or for the rest of it, names this region.
    pub fn needs(&self, mr: &Mr) -> bool {
        self.producer.status().is_none()
            && (self.posted.iter().any(|p| !p.met && p.key == mr.key)
                || self.large.is_some_and(|large| large.key == mr.key))
    }

    /// Handles what has arrived.
    fn progress(&mut self, end: &CommEnd) -> Result<()> {
        let mut any = false;
        while let Some(r) = self.producer.try_recv() {
            any = true;
            // The payload is in its buffer already, and the record holds nothing more.
            self.producer.release(1);
            self.arrive(end, &r)?;
        }
        if any {
            self.producer.wake();
        }
        if self.large.is_some() {
            self.advance_large()?;
        }
        Ok(())
    }

    fn arrive(&mut self, end: &CommEnd, r: &Received) -> Result<()> {
        self.arrived += 1;
        // The engine names the receive by the low 32 bits of its number.
        let at = r.place.wrapping_sub(self.oldest as u32) as usize;
        let Some(p) = self.posted.get_mut(at).filter(|p| !p.met) else {
            let text =
                format!("{end}: a message of tag {} for receive {}, which is not posted", r.tag, r.place);
            return Err(Failure::new(Code::Internal, text));
        };
        p.met = true;
        let (request, buffer, key, room) = (p.request, p.buffer, p.key, p.size);
        let rest = Invitation { key: p.key, offset: p.offset + r.length as u64 };
        if self.producer.signal(large::BEGINS) == self.arrived {
            // One message in slices at a time: the previous one is complete, though perhaps not yet
            // noticed.
            self.advance_large()?;
            let bytes = self.producer.signal(large::BYTES);
            // Check what the peer claims: the message fits, is at least as long as its first slice,
            // and the previous one has ended.
            let (size, first) = (bytes.wrapping_sub(self.large_bytes) as usize, r.length as usize);
            self.large_bytes = bytes;
            self.large_messages += 1;
            let ended = self.large.is_none();
            if size > room || size < first || !ended {
                let text = match ended {
                    false => format!("{end}: a message in slices arrived amid another"),
                    true if size > room => format!("{end}: {size} bytes arrived for a buffer of {room}"),
                    true => format!("{end}: {first} bytes arrived of a message that has {size}"),
                };
                let status = Status { rank: Some(0), ..Status::new(abi::PUSHGATE_REFUSED) };
                end.lane.engine.fail(Some(end.qp), status)?;
                return Err(Failure::new(Code::Usage, text));
            }
            let number = self.large_messages;
            self.large = Some(Incoming { request, buffer, key, size, invitation: Some(rest), number });
        } else {
            self.arrived_whole(request, buffer, r.length as usize)?;
        }
        while self.posted.front().is_some_and(|p| p.met) {
            self.posted.pop_front();
            self.oldest += 1;
        }
        Ok(())
    }

    fn arrived_whole(&mut self, request: u32, buffer: u8, size: usize) -> Result<()> {
        let Awaited::Receive(receiving) = self.pool.get(request)? else {
            unreachable!("a place is a receive's until that is done")
        };
        receiving.left -= 1;
        receiving.sizes[buffer as usize] = size;
        Ok(())
    }

    /// Begins a flush. What the worker has pulled is complete when the receive is; what the RDMA
    /// device wrote may still be on its way. (For a message that came through the worker the flush
    /// costs one needless read.)
    pub fn flush(&mut self) -> Result<Option<u32>> {
        let Some(flusher) = &mut self.flusher else { return Ok(None) };
        let Some(request) = self.pool.free() else {
            let text = format!("more than {REQUESTS} receives and flushes at once on a connection");
            return Err(Failure::new(Code::Usage, text));
        };
        self.pool.fill(Awaited::Flush(flusher.begin()?));
        Ok(Some(request))
    }

    fn advance_large(&mut self) -> Result<()> {
        let Some(large) = &mut self.large else { return Ok(()) };
        if let Some(invitation) = large.invitation {
            let record = Record { flags: Record::INLINE, ..Record::new(Opcode::Send) };
            if self.producer.post(record, &invitation.encode()) {
                large.invitation = None;
            }
        }
        if self.producer.signal(large::ENDS) >= large.number {
            let Incoming { request, buffer, size, .. } = *large;
            self.large = None;
            self.arrived_whole(request, buffer, size)?;
        }
        Ok(())
    }

    /// Tests a request ([`crate::comm::Request::test`]).
    #[inline]
    pub fn test(&mut self, end: &CommEnd, request: u32, size: impl Fn(usize, usize)) -> Result<bool> {
        // Read the status first: what arrived before the end is then seen by `progress`.
        let status = self.producer.status();
        self.progress(end)?;
        let receiving = match self.pool.get(request)? {
            Awaited::Receive(receiving) => receiving,
            Awaited::Flush(number) => {
                let flusher = self.flusher.as_mut().expect("it began this one");
                let done = flusher.done(*number)?;
                if done {
                    self.pool.empty(request);
                } else {
                    // Do not fail by the queue pair's end: what has arrived becomes complete
                    // without a peer.
                    end.gpu_lives()?;
                }
                return Ok(done);
            }
        };
        if receiving.left == 0 {
            for i in 0..receiving.buffers as usize {
                size(i, receiving.sizes[i]);
            }
            self.pool.empty(request);
            return Ok(true);
        }
        end.waits(status)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU8;

    use super::*;
    use crate::comm::{Comm, Request};
    use crate::join::Role;
    use crate::registration::Kind;
    use crate::testing::{Pair, ended, pair, until};

    const ROOM: usize = 1000;
    const FIRST: usize = 100;

    /// Memory that the engine writes to.
    fn room<const N: usize>() -> [AtomicU8; N] {
        [const { AtomicU8::new(0) }; N]
    }

    /// Posts a receive of [`ROOM`] bytes into a buffer.
    fn receive<'a>(comm: &'a Comm, mr: &Mr, buffer: &[AtomicU8]) -> &'a Request {
        let wanted = Wanted { data: buffer.as_ptr() as usize, size: ROOM, tag: 7, mr: Some(mr) };
        // SAFETY: the buffers of the tests outlive the connections.
        unsafe { comm.receive(&[wanted]) }.unwrap().expect("room")
    }

    fn signal(peer: &mut Producer, signal: u32, signal_value: u64) {
        let record = Record { signal, signal_value, ..Record::new(Opcode::Signal) };
        until(|| peer.post(record, &[]).then_some(()));
    }

    /// Begins a message in slices with the `number`th SEND; `bytes` is the sum over all such
    /// messages.
    fn begin(peer: &mut Producer, number: u64, bytes: u64) {
        signal(peer, large::BYTES, bytes);
        signal(peer, large::BEGINS, number);
        let record = Record { tag: 7, ..Record::new(Opcode::Send) };
        until(|| peer.post(record, &[7; FIRST]).then_some(()));
    }

    /// Checks that the receive fails with this text, and that the peer is told that it was refused.
    fn refused(request: &Request, peer: &Producer, says: &str) {
        let e = ended(request).unwrap_err();
        assert!(e.code == Code::Usage && e.text.contains(says), "{e}");
        let status = until(|| peer.status());
        assert_eq!((status.code as u32, status.rank), (abi::PUSHGATE_REFUSED, Some(0)));
    }

    #[test]
    fn p7_a_receive_posted_after_the_end_of_its_connection_is_taken_and_its_test_returns_the_cause() {
        let buffer = room::<ROOM>();
        let Pair { comm, peer, socket } = pair(Role::Receive);
        let mr = comm.register(buffer.as_ptr() as usize, ROOM, Kind::Host).unwrap();
        let early = receive(&comm, &mr, &buffer);
        peer.lane.engine.remove_qp(peer.qp).unwrap();
        drop(socket);
        assert_eq!(ended(early).unwrap_err().code, Code::Remote);
        let late = receive(&comm, &mr, &buffer);
        assert_eq!(ended(late).unwrap_err().code, Code::Remote);
    }

    #[test]
    fn p7_memory_that_is_deregistered_with_a_receive_posted_ends_the_connection_and_names_its_own_end() {
        let buffer = room::<{ 2 * ROOM }>();
        let Pair { comm, mut peer, socket: _socket } = pair(Role::Receive);
        let mrs =
            [0, ROOM].map(|at| comm.register(buffer[at..].as_ptr() as usize, ROOM, Kind::Host).unwrap());
        let requests = [receive(&comm, &mrs[0], &buffer), receive(&comm, &mrs[1], &buffer[ROOM..])];
        let record = Record { tag: 7, ..Record::new(Opcode::Send) };
        until(|| peer.producer.post(record, &[7; FIRST]).then_some(()));
        assert_eq!(ended(requests[0]).unwrap(), FIRST);
        let [done, waits] = mrs;
        comm.deregister(done).unwrap();
        assert_eq!(peer.producer.status(), None, "its receive was done");
        comm.deregister(waits).unwrap();
        let status = until(|| peer.producer.status());
        assert_eq!((status.code as u32, status.rank), (abi::PUSHGATE_ABORTED, Some(1)));
        assert_eq!(ended(requests[1]).unwrap_err().code, Code::System);
    }

    #[test]
    fn p8_a_peers_claims_about_a_message_in_slices_are_checked() {
        for (bytes, says) in [
            (ROOM as u64 + 1, "1001 bytes arrived for a buffer of 1000"),
            (u64::MAX >> 8, "for a buffer of 1000"),
            (FIRST as u64 - 1, "100 bytes arrived of a message that has 99"),
        ] {
            let buffer = room::<ROOM>();
            let Pair { comm, mut peer, socket: _socket } = pair(Role::Receive);
            let mr = comm.register(buffer.as_ptr() as usize, ROOM, Kind::Host).unwrap();
            let request = receive(&comm, &mr, &buffer);
            begin(&mut peer.producer, 1, bytes);
            refused(request, &peer.producer, says);
        }
        // Messages of exactly these lengths, reported complete at once: if bytes are missing, that
        // is the sender's own fault.
        for bytes in [FIRST, ROOM] {
            let buffer = room::<ROOM>();
            let Pair { comm, mut peer, socket: _socket } = pair(Role::Receive);
            let mr = comm.register(buffer.as_ptr() as usize, ROOM, Kind::Host).unwrap();
            let request = receive(&comm, &mr, &buffer);
            begin(&mut peer.producer, 1, bytes as u64);
            signal(&mut peer.producer, large::ENDS, 1);
            assert_eq!(ended(request).unwrap(), bytes);
            assert_eq!(peer.producer.status(), None);
        }
    }

    #[test]
    fn p8_a_sum_of_bytes_that_does_not_grow_has_no_message() {
        let buffer = room::<{ 2 * ROOM }>();
        let Pair { comm, mut peer, socket: _socket } = pair(Role::Receive);
        let mr = comm.register(buffer.as_ptr() as usize, 2 * ROOM, Kind::Host).unwrap();
        let requests = [receive(&comm, &mr, &buffer), receive(&comm, &mr, &buffer[ROOM..])];
        begin(&mut peer.producer, 1, 500);
        signal(&mut peer.producer, large::ENDS, 1);
        assert_eq!(ended(requests[0]).unwrap(), 500);
        begin(&mut peer.producer, 2, 400);
        refused(requests[1], &peer.producer, "100 bytes arrived of a message that has 0");
    }

    #[test]
    fn p8_one_message_in_slices_is_under_way_at_a_time() {
        let buffer = room::<{ 2 * ROOM }>();
        let Pair { comm, mut peer, socket: _socket } = pair(Role::Receive);
        let mr = comm.register(buffer.as_ptr() as usize, 2 * ROOM, Kind::Host).unwrap();
        let requests = [receive(&comm, &mr, &buffer), receive(&comm, &mr, &buffer[ROOM..])];
        begin(&mut peer.producer, 1, 500);
        // Until the rest of the message was requested.
        until(|| {
            // SAFETY: the connection is open.
            assert!(!unsafe { requests[0].test(|_, _| ()) }.unwrap(), "400 bytes are missing");
            peer.producer.try_recv()
        });
        begin(&mut peer.producer, 2, 1000);
        refused(requests[1], &peer.producer, "amid another");
        assert!(ended(requests[0]).is_err(), "it has not ended well");
    }
}
