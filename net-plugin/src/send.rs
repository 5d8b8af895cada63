//! The sending end of a connection: how messages leave, and when their requests are done.

use std::time::{Duration, Instant};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record};
use pushgate_engine::proxy::Proxy;
use pushgate_link::RegionSends;
use pushgate_link::producer::Producer;
use pushgate_link::receives::{AHEAD_BYTES, Meets, PostedReceives};

use crate::end::{CommEnd, SETTLE};
use crate::error::{Code, Failure, Result};
use crate::join::SLOTS_LOG;
use crate::large::{self, Invitation, Outgoing};
use crate::log;
use crate::path::{self, Path, Slices};
use crate::pool::Pool;
use crate::pushes::Pushes;
use crate::registration::Mr;
use crate::under_way::Share;

/// A message of at most this number of bytes is done once its payload has left the program's memory: it is in its WQE or in the
/// window, and the engine sends it from there. So the program's next message need not wait until the peer has told that it has
/// this one. A longer message is done when the peer has it: that wait is little beside the time that its bytes take.
const SHORT: usize = 64 << 10;

struct Sent {
    size: usize,
    /// Done once the payload is in the WQE or in the window.
    done_when_staged: bool,
    /// The message's last slot, and how many messages of the connection came before it. `None`
    /// while slices of it are still to be posted, or if the connection had ended before it.
    last: Option<(u64, u64)>,
}

/// Between two looks of a thread that closes a connection, and has waited so long: what it waits for may need this core.
fn pause(waited: Duration) {
    match waited < Duration::from_micros(100) {
        true => std::thread::yield_now(),
        false => std::thread::sleep(Duration::from_micros(50)),
    }
}

/// Bytes of the window that messages use which a processor copies and which may go ahead of their receives. What was used a moment ago is
/// still in its cache: an allreduce of 8 KiB over TCP took 41 us in place of 52 with all of 4 MiB.
const AHEAD_WINDOW: u64 = 256 << 10;

/// Units of the window that are used for a message of `bytes`: the connection's share and `most` bytes at most, but at least two such
/// messages, so that one can be pushed while the other is pulled.
fn window(share: u64, most: u64, bytes: usize) -> u64 {
    let two = 2 * bytes.div_ceil(abi::PUSHGATE_UNIT as usize) as u64;
    share.min(most / u64::from(abi::PUSHGATE_UNIT)).max(two)
}

/// Whether messages may go out of registered regions. A peer tells only once it has tried, so the
/// engine is asked again after a message has arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Regions {
    Known(bool),
    /// Unknown; asked again once this many messages have been sent.
    Unknown(u64),
}

/// The state of a sending end.
pub struct Sender {
    producer: Producer,
    /// How much of the window is used.
    share: Share,
    /// The receives that the peer has posted and no message has taken.
    receives: PostedReceives,
    pushes: Pushes,
    in_record: bool,
    regions: Regions,
    /// The most bytes that go through the window at once: half of the window, so that there is
    /// always room for them when the other half is given back.
    whole: usize,
    /// The most bytes of a message that may leave before its receive is known.
    ahead: usize,
    /// The most bytes that go out of a region at once.
    longest: usize,
    pool: Pool<Sent>,
    messages: u64,
    sends: u64,
    /// The last slot whose request was done, and how many messages of the connection came before it. The peer may have yet to
    /// get that message.
    done: Option<(u64, u64)>,
    sums: large::Sums,
    large: Option<Outgoing>,
}

impl Sender {
    /// Makes a sending end.
    ///
    /// `share`: the connection's part of what the process has under way. `receives`: what the peer
    /// posts. `whole`, `longest`: the most bytes that go at once through the window, and out of a
    /// region. `window`: the GPU's address of the window. `regions`: whether messages may go out of
    /// registered memory, if that is known. `in_record`: a short payload may travel in its record.
    pub fn new(
        producer: Producer,
        share: Share,
        receives: PostedReceives,
        (whole, longest): (usize, usize),
        window: Option<u64>,
        regions: Option<bool>,
        in_record: bool,
    ) -> Self {
        let regions = regions.map_or(Regions::Unknown(0), Regions::Known);
        // At most one push for each slot.
        let pushes = Pushes::new(window, 1 << SLOTS_LOG);
        let (pool, sums) = (Pool::new(), large::Sums::default());
        let (messages, sends, done, large) = (0, 0, None, None);
        let ahead = if receives.go_ahead() { whole.min(AHEAD_BYTES as usize) } else { 0 };
        Sender {
            producer,
            share,
            receives,
            pushes,
            regions,
            in_record,
            whole,
            ahead,
            longest,
            pool,
            messages,
            sends,
            done,
            sums,
            large,
        }
    }

    /// Waits for the GPU's pushes. False if they do not end in time.
    pub fn settle(&mut self, end: &CommEnd) -> bool {
        let began = Instant::now();
        loop {
            self.advance_pushes(end);
            if self.pushes.is_empty() || end.gpu_has_ended() {
                return true;
            }
            if began.elapsed() > SETTLE {
                return false;
            }
            pause(began.elapsed());
        }
    }

    /// Waits until the peer has all messages whose requests were done. What it does not get is told in the log: if the connection
    /// has ended, or if that takes longer than connections of this process may still wait ([`Lingered`](pushgate_door::linger::Lingered)).
    pub fn linger(&self, end: &CommEnd) {
        let Some((slot, number)) = self.done else { return };
        let (began, allowed) = (Instant::now(), end.runtime.lingered.left());
        loop {
            // NCCL's thread may be the one that moves the connection on.
            end.lane.drive(end.qp);
            // The end first: what the peer had before it is then seen below.
            let ended = self.producer.status();
            if self.producer.delivered() > slot {
                return;
            }
            if let Some(status) = ended {
                if !end.peer_has(number) {
                    let why = Failure::ended(status, end);
                    log::info(&format!("{why}; it did not get the last messages whose sends were done"));
                }
                return;
            }
            let waited = began.elapsed();
            if waited > allowed {
                end.runtime.lingered.in_vain(allowed);
                log::warn(&format!(
                    "{end}: closed before the peer received messages already reported as sent: it has taken none for {allowed:?}"
                ));
                return;
            }
            pause(waited);
        }
    }

    /// Stops a message whose slices in this memory are still to be posted: none is posted or read
    /// from now on. True if there was one on a connection that has not ended; that connection must
    /// end then.
    pub fn stop(&mut self, mr: &Mr) -> bool {
        let Some(large) = self.large.as_mut().filter(|large| large.lies_in(mr.address, mr.bytes)) else {
            return false;
        };
        large.stopped = true;
        self.producer.status().is_none()
    }

    /// Publishes the slots whose payload the GPU has pushed.
    #[inline]
    pub fn advance_pushes(&mut self, end: &CommEnd) {
        self.pushes.advance(end.lane.gpu.as_deref(), &end.pushes, &mut self.producer);
    }

    /// The most bytes that go through the window at once. What the GPU pushes goes in slices where the connection's share
    /// has no room for two such messages, if the slices are shorter.
    fn whole(&self, mr: Option<&Mr>) -> usize {
        if !mr.is_some_and(|mr| mr.cuda) {
            return self.whole;
        }
        let share = self.share.units().saturating_mul(abi::PUSHGATE_UNIT.into());
        self.whole.min(usize::try_from(share / 2).unwrap_or(usize::MAX).max(large::GPU_SLICE))
    }

    /// Sends a message ([`crate::comm::Comm::send`]).
    ///
    /// # Safety
    /// The requirements of [`crate::comm::Comm::send`] hold.
    pub unsafe fn send(
        &mut self,
        end: &CommEnd,
        data: *const u8,
        size: usize,
        tag: u32,
        mr: Option<&Mr>,
    ) -> Result<Option<u32>> {
        self.advance_pushes(end);
        let ended = self.producer.status().is_some();
        if !ended {
            self.advance_large(end)?;
        }
        end.gpu_lives()?;
        let ways = path::Ways {
            regions: self.regions == Regions::Known(true),
            in_record: self.in_record,
            whole: self.whole(mr),
            longest: self.longest,
        };
        let mut path = path::choose(data as usize, size, mr, ways)?;
        let Some(request) = self.pool.free() else { return Ok(None) };
        if ended {
            // The request's test returns how the connection ended.
            self.pool.fill(Sent { size, done_when_staged: false, last: None });
            return Ok(Some(request));
        }
        // The first SEND of a message in slices must be the next SEND.
        if self.large.as_ref().is_some_and(|l| matches!(path, Path::Slices(_)) || l.begins() || l.stopped) {
            return Ok(None);
        }
        // A message that no receive fits would hold up later messages of other tags, and what is still to come of a message in slices.
        // Where the messages of a connection are taken in their order, a short one may leave all the same.
        let room = match self.receives.meets(tag) {
            Meets::Receive(receive) => receive.length,
            Meets::Ahead if self.large.is_none() && size <= self.ahead && path.goes_ahead(mr) => AHEAD_BYTES,
            Meets::Ahead | Meets::Unknown => return Ok(None),
        };
        let record = Record { tag, ..Record::new(Opcode::Send) };
        let record = match path {
            Path::Inline => Record { flags: Record::INLINE, ..record },
            Path::Push | Path::Copier => record,
            Path::Region { key, offset } => {
                Record { flags: Record::REGION, place: key, place_offset: offset, ..record }
            }
            Path::Slices(slices) => {
                let most = if let Slices::Region { .. } = slices { self.longest } else { self.whole };
                self.large = Some(Outgoing::new(request, data, size, tag, slices, most));
                self.receives.take(tag);
                self.pool.fill(Sent { size, done_when_staged: false, last: None });
                self.advance_large(end)?;
                return Ok(Some(request));
            }
        };
        if record.in_window() {
            let most = match path {
                Path::Push if size <= self.ahead => AHEAD_WINDOW,
                _ => u64::MAX,
            };
            self.producer.use_window(window(self.share.units(), most, size));
        }
        let slot = match path {
            // SAFETY: the caller's promise.
            Path::Copier => unsafe {
                self.pushes.push(
                    end.lane.gpu.as_deref(),
                    &end.pushes,
                    &mut self.producer,
                    record,
                    (data, size),
                )?
            },
            // SAFETY: the caller's promise.
            _ => unsafe { self.producer.post_raw(record, data, size) },
        };
        let Some(slot) = slot else { return Ok(None) };
        if let Path::Copier = path {
            self.share.sent();
        }
        self.receives.take(tag);
        // The engine refuses a message that is too long for its receive: its request ends with the connection.
        let fits = size <= room as usize;
        let done_when_staged = fits && size <= SHORT && !record.has(Record::REGION);
        self.pool.fill(Sent { size, done_when_staged, last: Some((slot, self.messages)) });
        self.messages += 1;
        self.sends += 1;
        Ok(Some(request))
    }

    #[cold]
    fn ask(&mut self, end: &CommEnd) -> Result<()> {
        let proxy: &dyn Proxy = &*end.lane.engine;
        self.regions = match proxy.region_sends(end.qp)? {
            RegionSends::Yes => Regions::Known(true),
            RegionSends::Unknown => Regions::Unknown(2 * self.messages + 1),
            RegionSends::No(why) => {
                log::info(&format!("{end}: messages are copied into the window: {why}"));
                Regions::Known(false)
            }
        };
        Ok(())
    }

    fn advance_large(&mut self, end: &CommEnd) -> Result<()> {
        let Some(large) = self.large.as_mut().filter(|large| !large.stopped) else { return Ok(()) };
        let windowed = !matches!(large.slices, Slices::Region { .. });
        if windowed {
            self.producer.use_window(window(self.share.units(), u64::MAX, large.slice));
        }
        if let Some(r) = self.producer.try_recv() {
            self.producer.release(1);
            self.producer.wake();
            let fits = r.flags & Record::INLINE != 0 && r.length as usize == Invitation::BYTES;
            if !fits || !large.invited(Invitation::decode(&r.inline)) {
                return Err(Failure::new(
                    Code::Remote,
                    format!("{end}: the receiver sent an answer to no message in slices"),
                ));
            }
        }
        let before = self.sends;
        let (messages, sends) = (&mut self.messages, &mut self.sends);
        let posted = |send: bool| {
            *messages += 1;
            *sends += send as u64;
        };
        let (share, pushes, pushed) = (&mut self.share, &mut self.pushes, large.slices == Slices::Pushed);
        let slice = |producer: &mut Producer, record, data, size| {
            let slot = match pushed {
                // SAFETY: a slice of what `Comm::send` was given, whose request is not done.
                true => unsafe {
                    pushes.push(end.lane.gpu.as_deref(), &end.pushes, producer, record, (data, size))
                }?,
                // SAFETY: a slice of what `Comm::send` was given, whose request is not done.
                false => unsafe { producer.post_raw(record, data, size) },
            };
            if pushed && slot.is_some() {
                share.sent();
            }
            Ok(slot)
        };
        if let Some(slot) = large.advance(&mut self.producer, &mut self.sums, before, slice, posted)? {
            let request = large.request;
            self.large = None;
            self.pool.get(request)?.last = Some((slot, self.messages - 1));
        }
        Ok(())
    }

    /// Tests a request ([`crate::comm::Request::test`]). `seen`: the engine has seen all that was published, or will soon.
    #[inline]
    pub fn test(
        &mut self,
        end: &CommEnd,
        request: u32,
        seen: bool,
        size: impl Fn(usize, usize),
    ) -> Result<bool> {
        // Read the status first: slots that were given back before the end are then seen below.
        let status = self.producer.status();
        // On a connection that has ended, nothing needs the message's memory any more.
        if self.large.is_some() && status.is_none() {
            self.advance_large(end)?;
        }
        let sent = self.pool.get(request)?;
        let Some((slot, number)) = sent.last else { return end.waits(status) };
        let staged = || sent.done_when_staged && seen && status.is_none() && self.pushes.has_done(slot);
        let arrived = self.producer.retired() > slot || status.is_some() && end.peer_has(number);
        if !arrived && !staged() {
            return end.waits(status);
        }
        size(0, sent.size);
        self.done = self.done.max(Some((slot, number)));
        self.pool.empty(request);
        if arrived && matches!(self.regions, Regions::Unknown(at) if self.messages >= at) {
            self.ask(end)?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use pushgate::settings::AutoOr;

    use super::*;
    use crate::comm::Request;
    use crate::join::Role;
    use crate::registration::Kind;
    use crate::runtime::Runtime;
    use crate::testing::{Pair, WINDOW, ended, pair, pair_in, pair_of, until};

    /// More bytes than are under way at once.
    const BYTES: usize = 4 * WINDOW as usize;

    /// Sends a message in slices to a receiver that answers the first slice with all of `answers`.
    fn answered(answers: &[&[u8]]) -> Result<usize> {
        let (payload, mut room) = (vec![7u8; BYTES], vec![0u8; BYTES]);
        let Pair { comm, mut peer, socket: _socket } = pair(Role::Send);
        let proxy: &dyn Proxy = &*peer.lane.engine;
        // SAFETY: the buffer outlives the connection and is not read meanwhile.
        let key = unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, BYTES as u64, None) }
            .unwrap();
        assert!(peer.producer.post_recv(key, 0, BYTES as u32, 7));
        // SAFETY: the payload outlives the connection.
        let request: &Request =
            unsafe { comm.send(payload.as_ptr(), payload.len(), 7, None) }.unwrap().expect("room");
        // The sender's first slice has arrived.
        let first = until(|| peer.producer.try_recv()).length;
        let invitation = Invitation { key, offset: u64::from(first) }.encode();
        for answer in answers {
            let answer = if answer.is_empty() { &invitation[..] } else { answer };
            let record = Record { flags: Record::INLINE, ..Record::new(Opcode::Send) };
            assert!(peer.producer.post(record, answer));
        }
        // All answers are there before the sender looks; otherwise it might be done before the last
        // one.
        until(|| (peer.producer.retired() >= answers.len() as u64).then_some(()));
        let ended = ended(request);
        drop(comm);
        if ended.is_ok() {
            assert_eq!(room, payload);
        }
        ended
    }

    #[test]
    fn p4_p6_a_message_is_taken_when_a_receive_of_its_tag_is_posted() {
        let Pair { comm, mut peer, socket: _socket } = pair(Role::Send);
        let proxy: &dyn Proxy = &*peer.lane.engine;
        let mut room = [0u8; 64];
        // SAFETY: the buffer outlives the connection and is not read meanwhile.
        let key = unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, 64, None) }.unwrap();
        let payload = [7u8; 64];
        let send = |size: usize, tag| {
            // SAFETY: the payload outlives the connection.
            unsafe { comm.send(payload.as_ptr(), size, tag, None) }.unwrap()
        };
        assert!(send(8, 1).is_none() && send(64, 1).is_none(), "nothing is posted");
        for tag in [0, 1, 2] {
            assert!(peer.producer.post_recv(key, 0, 64, tag));
        }
        peer.producer.wake();
        let one = send(8, 1).expect("a receive of tag 1 is posted");
        assert!(send(8, 1).is_none(), "that was the only one");
        let others = [send(64, 2), send(8, 0)].map(|sent| sent.expect("its receive is posted"));
        assert!((0..4).all(|tag| send(8, tag).is_none()), "all receives are taken");
        for request in [one, others[0], others[1]] {
            ended(request).unwrap();
        }
        drop(comm);
    }

    #[test]
    fn p7_a_send_posted_after_the_end_of_its_connection_is_taken_and_its_test_returns_the_cause() {
        let Pair { comm, peer, socket } = pair(Role::Send);
        let payload = [7u8; 64];
        // As a peer does that closes in order.
        peer.lane.engine.remove_qp(peer.qp).unwrap();
        drop(socket);
        let request = until(|| {
            // SAFETY: the payload outlives the connection.
            unsafe { comm.send(payload.as_ptr(), 64, 1, None) }.unwrap()
        });
        assert_eq!(ended(request).unwrap_err().code, Code::Remote);
        drop(comm);
    }

    #[test]
    fn p5_memory_deregistered_between_slices_is_not_read_any_more() {
        let (payload, mut room) = (vec![7u8; BYTES], vec![0u8; BYTES]);
        let Pair { comm, mut peer, socket: _socket } = pair(Role::Send);
        let proxy: &dyn Proxy = &*peer.lane.engine;
        // SAFETY: the buffer outlives the connection and is not read meanwhile.
        let key = unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, BYTES as u64, None) }
            .unwrap();
        assert!(peer.producer.post_recv(key, 0, BYTES as u32, 7));
        let mr = comm.register(payload.as_ptr() as usize, BYTES, Kind::Host).unwrap();
        // SAFETY: the payload outlives the connection.
        let request = unsafe { comm.send(payload.as_ptr(), BYTES, 7, Some(&mr)) }.unwrap().expect("room");
        // The first slice has arrived; the rest waits to be invited.
        until(|| peer.producer.try_recv());
        comm.deregister(mr).unwrap();
        assert_eq!(ended(request).unwrap_err().code, Code::System);
        let status = until(|| peer.producer.status());
        assert_eq!((status.code as u32, status.rank), (abi::PUSHGATE_ABORTED, Some(0)));
        drop(comm);
    }

    #[test]
    fn p5_a_message_that_a_deregistration_has_stopped_reads_nothing_before_its_connection_ends() {
        let (payload, mut room) = (vec![7u8; BYTES], vec![0u8; BYTES]);
        let Pair { comm, mut peer, socket: _socket } = pair(Role::Send);
        let proxy: &dyn Proxy = &*peer.lane.engine;
        // SAFETY: the buffer outlives the connection and is not read meanwhile.
        let key = unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, BYTES as u64, None) }
            .unwrap();
        assert!(peer.producer.post_recv(key, 0, BYTES as u32, 7));
        let mr = comm.register(payload.as_ptr() as usize, BYTES, Kind::Host).unwrap();
        // SAFETY: the payload outlives the connection.
        let request = unsafe { comm.send(payload.as_ptr(), BYTES, 7, Some(&mr)) }.unwrap().expect("room");
        let first = until(|| peer.producer.try_recv()).length;
        let invitation = Invitation { key, offset: u64::from(first) }.encode();
        let record = Record { flags: Record::INLINE, ..Record::new(Opcode::Send) };
        assert!(peer.producer.post(record, &invitation));
        until(|| (peer.producer.retired() >= 1).then_some(()));
        // The state of a deregistration before the engine ends the connection: a thread that tests
        // meanwhile finds a connection that goes on.
        assert!(comm.stop(&mr).unwrap());
        for _ in 0..100 {
            // SAFETY: the connection is open.
            assert!(!unsafe { request.test(|_, _| {}) }.unwrap(), "all of it is sent");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        comm.deregister(mr).unwrap();
        assert_eq!(ended(request).unwrap_err().code, Code::System);
        drop(comm);
        drop(peer);
        let arrived = room.iter().filter(|byte| **byte == 7).count();
        assert_eq!(arrived, first as usize, "after the first slice nothing is sent");
    }

    #[test]
    fn p5_memory_is_not_read_after_its_deregistration_while_a_thread_tests_all_the_time() {
        for round in 0..20 {
            let size = 64 * WINDOW as usize;
            let (mut payload, mut room) = (vec![7u8; size], vec![0u8; size]);
            let Pair { comm, mut peer, socket: _socket } = pair(Role::Send);
            let proxy: &dyn Proxy = &*peer.lane.engine;
            // SAFETY: the buffer outlives the connection and is not read meanwhile.
            let key =
                unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, size as u64, None) }
                    .unwrap();
            assert!(peer.producer.post_recv(key, 0, size as u32, 7));
            let at = payload.as_mut_ptr();
            let mr = comm.register(at as usize, size, Kind::Host).unwrap();
            // SAFETY: the payload outlives the connection.
            let request = unsafe { comm.send(at, size, 7, Some(&mr)) }.unwrap().expect("room");
            let first = until(|| peer.producer.try_recv()).length;
            let invitation = Invitation { key, offset: u64::from(first) }.encode();
            let record = Record { flags: Record::INLINE, ..Record::new(Opcode::Send) };
            assert!(peer.producer.post(record, &invitation));
            std::thread::scope(|scope| {
                scope.spawn(|| ended(request));
                std::thread::sleep(std::time::Duration::from_micros(50 * round));
                comm.deregister(mr).unwrap();
                // SAFETY: the vector's own bytes, which nothing reads any more.
                unsafe { at.write_bytes(9, size) };
            });
            drop(comm);
            drop(peer);
            assert!(!room.contains(&9), "round {round}: read after its deregistration");
        }
    }

    #[test]
    fn a_send_that_finds_no_room_drives_its_connection() {
        let Pair { comm, mut peer, socket: _socket } = pair(Role::Send);
        let proxy: &dyn Proxy = &*peer.lane.engine;
        // Two of these fit into the window.
        let (payload, mut room) = (vec![7u8; 100 << 10], vec![0u8; 100 << 10]);
        // SAFETY: the buffer outlives the connection and is not read meanwhile.
        let key = unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, 100 << 10, None) };
        let key = key.unwrap();
        let rounds = 40;
        let mut helped = 0;
        for _ in 0..rounds {
            for _ in 0..4 {
                assert!(peer.producer.post_recv(key, 0, 100 << 10, 1));
            }
            peer.producer.wake();
            let (before, began) = (peer.lane.engine.stood_in(), Instant::now());
            // Nothing is tested before all are taken, and nothing here yields: the engine's own thread has no reason to help.
            let requests = [(); 4].map(|()| {
                loop {
                    // SAFETY: the payload outlives the connection.
                    match unsafe { comm.send(payload.as_ptr(), payload.len(), 1, None) }.unwrap() {
                        Some(request) => break request,
                        None => assert!(began.elapsed() < pushgate_tests::hang(), "no room ever"),
                    }
                }
            });
            helped += u32::from(peer.lane.engine.stood_in() > before);
            for request in requests {
                assert_eq!(ended(request).unwrap(), payload.len());
                until(|| peer.producer.try_recv());
                peer.producer.release(1);
            }
        }
        // It may help where this thread loses its core.
        assert!(helped < rounds / 2, "the engine's thread helped in {helped} of {rounds} rounds");
        drop(comm);
    }

    #[test]
    fn the_window_that_is_used_is_bounded_and_has_room_for_two_messages() {
        assert_eq!(window(u64::MAX, AHEAD_WINDOW, 8), 4096);
        assert_eq!(window(u64::MAX, AHEAD_WINDOW, 64 << 10), 4096);
        assert_eq!(window(1000, AHEAD_WINDOW, 8), 1000, "a connection's share may be less");
        assert_eq!(window(1000, u64::MAX, 64 << 10), 2048);
        assert_eq!(window(u64::MAX, u64::MAX, 8), u64::MAX / 64);
    }

    #[test]
    fn messages_keep_to_the_share_of_their_connection_in_its_window() {
        const BOUND: usize = 64 << 10;
        let runtime = Runtime::of_a_test_with(WINDOW, |settings| {
            settings.net_under_way = AutoOr::Is(BOUND as u64);
        });
        let Pair { comm, mut peer, socket: _socket } = pair_in(runtime, Role::Send, WINDOW as usize, None);
        let window = peer.inbound.take().expect("the sender's window");
        let used = || {
            // SAFETY: the window is mapped as long as `window` lives, and nothing writes there between two messages.
            let bytes = unsafe { std::slice::from_raw_parts(window.address as *const u8, window.bytes) };
            bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)
        };
        let mut room = vec![0u8; WINDOW as usize];
        let proxy: &dyn Proxy = &*peer.lane.engine;
        // SAFETY: the buffer outlives the connection and is read only when a message has arrived.
        let key =
            unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, WINDOW, None) }.unwrap();
        let mut send = |size: usize, times: u8| {
            for n in 1..=times {
                let payload = vec![n; size];
                assert!(peer.producer.post_recv(key, 0, size as u32, 7));
                peer.producer.wake();
                // SAFETY: the payload outlives the request.
                let request = until(|| unsafe { comm.send(payload.as_ptr(), size, 7, None) }.unwrap());
                assert_eq!(ended(request).unwrap(), size);
                until(|| peer.producer.try_recv());
                peer.producer.release(1);
                assert!(room[..size] == payload);
            }
        };
        // More than the window has, in messages that do not fill the share.
        send(12 << 10, 60);
        assert_eq!(used(), 5 * (12 << 10));
        // Two messages have room, whatever the share is.
        send(40 << 10, 20);
        assert_eq!(used(), 2 * (40 << 10));
        drop(comm);
    }

    #[test]
    fn a_message_over_the_longest_goes_out_of_its_region_in_slices() {
        // More than goes through the window at once, with slices of different lengths.
        let (longest, short, whole) = (WINDOW as usize, 50_000, 5 * WINDOW as usize / 2 + 1);
        let payload: Vec<u8> = (0..whole).map(|i| (i >> 8 ^ i) as u8).collect();
        let mut room = vec![0u8; whole];
        let Pair { comm, mut peer, socket: _socket } = pair_of(Role::Send, longest, Some(std::process::id()));
        let proxy: &dyn Proxy = &*peer.lane.engine;
        // SAFETY: the buffer outlives the connection and is read only after it.
        let key = unsafe { proxy.add_host_region(peer.qp, room.as_mut_ptr() as usize, whole as u64, None) }
            .unwrap();
        let mr = comm.register(payload.as_ptr() as usize, whole, Kind::Host).unwrap();
        // Sends this many bytes; returns the request, and how many of the bytes the peer got first.
        let send = |producer: &mut Producer, size: usize| {
            assert!(producer.post_recv(key, 0, size.min(longest) as u32, 7));
            producer.wake();
            // SAFETY: the payload outlives the connection.
            let request = unsafe { comm.send(payload.as_ptr(), size, 7, Some(&mr)) }.unwrap().expect("room");
            let length = until(|| producer.try_recv()).length as usize;
            producer.release(1);
            (request, length)
        };
        // Until the sender knows that its memory is read.
        for _ in 0..8 {
            let (request, length) = send(&mut peer.producer, short);
            assert_eq!((ended(request).unwrap(), length), (short, short));
        }
        let (request, first) = send(&mut peer.producer, whole);
        assert_eq!(first, longest, "no slice that goes through the window is so long");
        let invitation = Invitation { key, offset: first as u64 }.encode();
        let record = Record { flags: Record::INLINE, ..Record::new(Opcode::Send) };
        assert!(peer.producer.post(record, &invitation));
        assert_eq!(ended(request).unwrap(), whole);
        drop(comm);
        assert!(room == payload);
    }

    #[test]
    fn p8_a_receiver_that_answers_no_message_in_slices_ends_the_connection() {
        assert_eq!(answered(&[&[]]).unwrap(), BYTES);
        for answers in [&[&[1u8; 11][..]][..], &[&[1; 13]], &[&[], &[]]] {
            let e = answered(answers).unwrap_err();
            assert!(e.code == Code::Remote && e.text.contains("an answer to no message in slices"), "{e}");
        }
    }
}
