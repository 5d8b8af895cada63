//! An end of a queue pair for a thread of the host: what kernels do by the device API, for programs whose data lies in host memory.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::interrupt;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_driver_shim::window::Window;
use pushgate_gpu_kernels::Access;
use pushgate_link::producer::{Producer, Received};

use super::memory::{InboundPayload, Own};
use super::queue_pair::QueuePair;
use super::region::{Region, RegionKey};
use crate::engine::Doorbell;
use crate::error::{Error, Result};
use crate::settings::DriveChoice;

/// Looks at the shared words between two looks at the clock and at the queue pair's health.
const LOOKS: u32 = 64;

/// A message that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostMessage {
    /// The message's length in bytes.
    pub length: usize,
    /// The tag that the sender gave.
    pub tag: u32,
}

/// Room in the window for a message that is not sent yet ([`HostEnd::stage`]).
#[derive(Debug)]
#[must_use = "room that is never published ends the queue pair as stuck"]
pub struct Staged {
    slot: u64,
    words: RecordWords,
    at: NonNull<u8>,
    length: usize,
}

// SAFETY: the pointer is into memory that the queue pair keeps, and using it is the holder's own unsafe code.
unsafe impl Send for Staged {}

impl Staged {
    /// Where the message's bytes go. They are this end's alone until [`HostEnd::publish`], and mapped as long as the queue pair.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.at
    }

    /// Bytes of the message.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the message has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

/// A message that was taken in place ([`HostEnd::take`]). Its bytes stay until it is given back.
#[derive(Clone, Copy, Debug)]
pub struct InPlace {
    message: HostMessage,
    /// `None`: the bytes are `inline`.
    at: Option<NonNull<u8>>,
    inline: [u8; abi::PUSHGATE_INLINE_SEND as usize],
}

// SAFETY: as for `Staged`.
unsafe impl Send for InPlace {}

impl InPlace {
    /// The message's length and tag.
    pub fn message(&self) -> HostMessage {
        self.message
    }

    /// Where the bytes lie: host memory that the queue pair keeps mapped. The peer may change them, so read each byte once.
    /// `None`: the message came in its record, and [`InPlace::copy_to`] gives its bytes.
    pub fn as_ptr(&self) -> Option<NonNull<u8>> {
        self.at
    }

    /// Copies `length` bytes from byte `from` of the message on.
    ///
    /// # Panics
    /// If they leave the message.
    ///
    /// # Safety
    /// `to` can be written for `length` bytes, and the message was not given back, and its queue pair is there.
    pub unsafe fn copy_to(&self, from: usize, to: *mut u8, length: usize) {
        assert!(from.checked_add(length).is_some_and(|end| end <= self.message.length), "leaves the message");
        let source = self.at.map_or(self.inline.as_ptr(), |at| at.as_ptr().cast_const());
        // SAFETY: the source lies within the message, checked above, whose bytes `HostEnd::take` has checked to be mapped; the
        // caller's word for the target, and that both are there.
        unsafe { std::ptr::copy_nonoverlapping(source.add(from), to, length) };
    }
}

/// An end of a queue pair for one thread of the host at a time: posts, receives and waits as kernels do by the device API
/// ([`QueuePair::host_end`]). No kernel may use this end.
///
/// Payload is copied into the window when it is posted, so it may be changed when a call returns. Each wait ends with success, with
/// the cause if the queue pair ends, or after the setting `timeout`. With `drive = caller` waits drive the engine.
///
/// No call allocates or locks while there is credit. The only system call of a post rings an engine that sleeps.
pub struct HostEnd {
    producer: Producer,
    /// A message that was taken and did not fit into the buffer of the call.
    held: Option<Received>,
    // After the producer, whose memory it keeps.
    qp: Arc<QueuePair>,
}

impl QueuePair {
    /// The end of this queue pair for a thread of the host. A queue pair gives it once, because its cursors are lost with it.
    ///
    /// # Errors
    /// If it was given before, if the queue pair takes posted receives, or if the engine runs in the proxy's process.
    pub fn host_end(self: &Arc<Self>) -> Result<HostEnd> {
        self.context.here()?;
        let Own { geometry, window, work, control, config, .. } = &self.memory.own;
        if config.posted_receives {
            return Err(Error::config("posted_receives", true, "false for an end of the host"));
        }
        let Doorbell::Thread(bell) = &self.context.inner.bell else {
            return Err(self.context.settings().refused("proxy", "thread for an end of the host"));
        };
        // Relaxed: the flag orders nothing, it is only taken once.
        if self.host_end.swap(true, Ordering::Relaxed) {
            return Err(Error::config("host_end", "a second one", "one for each queue pair, made once"));
        }
        let producer =
            Producer::new(*geometry, work.clone(), control.clone(), window.clone(), Some(bell.clone()));
        Ok(HostEnd { producer, held: None, qp: self.clone() })
    }
}

impl HostEnd {
    /// The queue pair.
    pub fn queue_pair(&self) -> &Arc<QueuePair> {
        &self.qp
    }

    /// Sends a message with a tag. It takes a receive of the peer; without one it waits in the proxy, and what is posted after it
    /// too. False without credit: then nothing was taken.
    pub fn try_send(&mut self, payload: &[u8], tag: u32) -> Result<bool> {
        self.check_length(payload.len())?;
        let record = Record { tag, ..Record::new(Opcode::Send) };
        self.post(record, payload, abi::PUSHGATE_INLINE_SEND as usize)
    }

    /// Sends a message as [`HostEnd::try_send`] does, and waits for credit.
    ///
    /// A send that has returned is posted, and the peer may not have it: [`HostEnd::flush`] waits for that. If the message ends the
    /// queue pair, the calls after it fail, and their error says why. [`HostEnd::recv`] loses no message that is longer than its buffer.
    pub fn send(&mut self, payload: &[u8], tag: u32) -> Result<()> {
        self.until("credit for a send", |end| end.try_send(payload, tag))
    }

    /// Takes room in the window for a message of `length` bytes, so that its bytes can be written in place, by a device too. `None`
    /// without credit: then nothing was taken. What was staged must be published, in any order: messages leave in the order in which
    /// they were staged.
    pub fn stage(&mut self, length: usize, tag: u32) -> Result<Option<Staged>> {
        self.check_length(length)?;
        self.qp.check()?;
        let record = Record { tag, ..Record::new(Opcode::Send) };
        let Some((taken, words)) = self.producer.stage(record, length) else { return Ok(None) };
        let at = taken.place as usize * abi::PUSHGATE_UNIT as usize;
        // SAFETY: a reservation lies within the window.
        let at = unsafe { self.qp.memory.own.window.as_ptr().add(at) };
        Ok(Some(Staged { slot: taken.slot, words, at, length }))
    }

    /// Sends what was staged. Its bytes are written before this call: by this thread, or by a device whose work has ended.
    pub fn publish(&mut self, staged: Staged) {
        self.producer.publish(staged.slot, &staged.words);
        self.producer.wake();
    }

    /// Puts bytes into a region of the peer, at a byte offset. With a signal, an index and its new value, the peer's signal has that
    /// value once the bytes are there. False without credit: then nothing was taken.
    ///
    /// A key that names no region, and bytes that leave theirs, end the queue pair.
    pub fn try_put(
        &mut self,
        rkey: u32,
        offset: u64,
        payload: &[u8],
        signal: Option<(u32, u64)>,
    ) -> Result<bool> {
        self.check_length(payload.len())?;
        if offset > abi::PUSHGATE_DATA_MASK {
            return Err(Error::config("offset", offset, "less than 2^56"));
        }
        let mut record = Record { rkey, remote_offset: offset, ..Record::new(Opcode::Put) };
        if let Some(signal) = signal {
            (record.signal, record.signal_value) = checked(signal)?;
            record.flags |= Record::WITH_SIGNAL;
        }
        self.post(record, payload, abi::PUSHGATE_INLINE_PUT as usize)
    }

    /// Puts bytes as [`HostEnd::try_put`] does, and waits for credit.
    pub fn put(&mut self, rkey: u32, offset: u64, payload: &[u8], signal: Option<(u32, u64)>) -> Result<()> {
        self.until("credit for a put", |end| end.try_put(rkey, offset, payload, signal))
    }

    /// Puts `length` bytes of a region of this end, from byte `from.1` on, into a region of the peer, without a copy at either end where
    /// both regions are [direct](super::Region::is_direct). The bytes must not change until the peer has them: until
    /// [`HostEnd::delivered`] is at least what [`HostEnd::posted`] is after this call. False without credit: then nothing was taken.
    ///
    /// A region of this end or of the peer that is not direct, and bytes that leave a region of the peer, end the queue pair.
    ///
    /// # Errors
    /// Where the bytes leave the region of this end or are more than [`QueuePair::max_message`], or `offset` is 2^56 or more.
    pub fn try_put_region(
        &mut self,
        from: (&Region, u64),
        length: usize,
        rkey: RegionKey,
        offset: u64,
    ) -> Result<bool> {
        self.check_length(length)?;
        let (region, begin) = from;
        if begin.checked_add(length as u64).is_none_or(|end| end > region.len()) {
            let given = format!("{length} bytes at {begin}");
            return Err(Error::config("from", given, format!("bytes within the region's {}", region.len())));
        }
        if offset > abi::PUSHGATE_DATA_MASK {
            return Err(Error::config("offset", offset, "less than 2^56"));
        }
        self.qp.check()?;
        let (place, place_offset) = (region.key(), begin);
        let record = Record { rkey, remote_offset: offset, place, place_offset, ..Record::new(Opcode::Put) };
        let record = Record { flags: record.flags | Record::REGION, ..record };
        // SAFETY: a payload that lies in a region is not read here.
        Ok(unsafe { self.producer.post_raw(record, std::ptr::null(), length) }.is_some())
    }

    /// Sets a signal of the peer, which comes after all that was posted before. A signal only grows: a smaller value changes nothing.
    /// False without credit: then nothing was taken.
    pub fn try_signal(&mut self, index: u32, value: u64) -> Result<bool> {
        let (signal, signal_value) = checked((index, value))?;
        self.post(Record { signal, signal_value, ..Record::new(Opcode::Signal) }, &[], 0)
    }

    /// Sets a signal as [`HostEnd::try_signal`] does, and waits for credit.
    pub fn signal(&mut self, index: u32, value: u64) -> Result<()> {
        self.until("credit for a signal", |end| end.try_signal(index, value))
    }

    /// The value of a signal of this end. What the peer posted before it is there for what this thread does next.
    pub fn signal_value(&self, index: u32) -> Result<u64> {
        self.qp.context.here()?;
        let signals = self.qp.memory.own.geometry.signals;
        match index < signals {
            true => Ok(self.producer.signal(index)),
            false => Err(Error::config("signal", index, format!("0 to {}", signals - 1))),
        }
    }

    /// Waits until a signal of this end is at least `value`.
    pub fn wait_signal(&mut self, index: u32, value: u64) -> Result<()> {
        self.until("a signal", |end| Ok(end.signal_value(index)? >= value))
    }

    /// Waits until the peer has all that was posted.
    pub fn flush(&mut self) -> Result<()> {
        self.until("the peer's answer", |end| Ok(end.is_flushed()))
    }

    /// Whether the peer has all that was posted.
    pub fn is_flushed(&self) -> bool {
        self.delivered() >= self.posted()
    }

    /// Work requests posted so far, with those that the queue pair needs itself.
    pub fn posted(&self) -> u64 {
        self.producer.slots()
    }

    /// How many of them the peer has: the first ones.
    pub fn delivered(&self) -> u64 {
        self.producer.delivered()
    }

    /// Takes the next message into `into`. `None`: there is none.
    ///
    /// # Errors
    /// If `into` is shorter than the message: the message stays the next one, and the error names its length.
    pub fn try_recv(&mut self, into: &mut [u8]) -> Result<Option<HostMessage>> {
        self.qp.context.here()?;
        let Some(received) = self.held.take().or_else(|| self.producer.try_recv()) else { return Ok(None) };
        let length = received.length as usize;
        if length > into.len() {
            self.held = Some(received);
            return Err(Error::config(
                "room for the message",
                format!("{} bytes", into.len()),
                format!("{length} bytes or more"),
            ));
        }
        self.copy_out(&received, &mut into[..length])?;
        self.producer.release(1);
        self.producer.wake();
        Ok(Some(HostMessage { length, tag: received.tag }))
    }

    /// Waits for the next message and takes it into `into`, as [`HostEnd::try_recv`] does. Messages that arrived before the queue
    /// pair ended are still received.
    pub fn recv(&mut self, into: &mut [u8]) -> Result<HostMessage> {
        let mut message = None;
        self.until("a message", |end| {
            message = end.try_recv(into)?;
            Ok(message.is_some())
        })?;
        Ok(message.expect("the wait was for it"))
    }

    /// Takes the next message where it lies. `None`: there is none. [`HostEnd::give_back`] gives messages back in the order in
    /// which they came; what is kept holds the peer's window.
    pub fn take(&mut self) -> Result<Option<InPlace>> {
        self.qp.context.here()?;
        let Some(received) = self.held.take().or_else(|| self.producer.try_recv()) else { return Ok(None) };
        let length = received.length as usize;
        let at = match received.flags & Record::INLINE != 0 {
            true if length > received.inline.len() => return Err(self.outside()),
            true => None,
            false => Some(self.place_of(&received, length)?),
        };
        let message = HostMessage { length, tag: received.tag };
        Ok(Some(InPlace { message, at, inline: received.inline }))
    }

    /// Gives the oldest `count` messages back that [`HostEnd::take`] took.
    pub fn give_back(&mut self, count: u64) {
        self.producer.release(count);
        self.producer.wake();
    }

    /// The memories in which staged and taken messages lie, for a device that is to read or write them in place: where each begins, its
    /// bytes, and how it may be accessed. They stay as long as the queue pair.
    pub fn memories(&self) -> Vec<(NonNull<u8>, usize, Access)> {
        let Own { window, control, .. } = &self.qp.memory.own;
        let inbound = match &self.qp.memory.inbound {
            InboundPayload::Window(window) => (window.as_ptr(), window.len(), Access::ReadOnly),
            InboundPayload::Mirror(mirror) => (mirror.as_ptr(), mirror.len(), Access::ReadWrite),
        };
        let own = (window.as_ptr(), window.len(), Access::ReadWrite);
        vec![own, inbound, (control.as_ptr(), control.len(), Access::ReadWrite)]
    }

    fn check_length(&self, length: usize) -> Result<()> {
        let most = self.qp.max_message().min(abi::PUSHGATE_MAX_MESSAGE.into());
        match length as u64 <= most {
            true => Ok(()),
            false => Err(Error::config("payload", format!("{length} bytes"), format!("0 to {most}"))),
        }
    }

    /// Posts a work request, its payload in the WQE if that is no longer than `inline`. False without credit; an error then if the
    /// queue pair has ended.
    fn post(&mut self, mut record: Record, payload: &[u8], inline: usize) -> Result<bool> {
        // A slot may be free after the end, and what is posted there goes nowhere.
        self.qp.check()?;
        if payload.len() <= inline && record.opcode != Opcode::Signal {
            record.flags |= Record::INLINE;
        }
        if self.producer.post(record, payload) {
            return Ok(true);
        }
        self.qp.check()?;
        Ok(false)
    }

    /// Waits until `done`, the queue pair's end, or the setting `timeout`.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        let context = self.qp.context.clone();
        let (drives, timeout) = (context.settings().drive == DriveChoice::Caller, context.settings().timeout);
        let (begin, mut asked) = (Instant::now(), interrupt::Now::begin());
        loop {
            for _ in 0..LOOKS {
                if done(self)? {
                    return Ok(());
                }
                if drives {
                    context.drive()?;
                } else {
                    std::hint::spin_loop();
                }
            }
            let ended = self.qp.check();
            // What came before the end is there now.
            if ended.is_err() && done(self)? {
                return Ok(());
            }
            ended?;
            if begin.elapsed() >= timeout {
                return Err(Error::TimedOut { what: what.into(), after: timeout });
            }
            asked.check()?;
            std::thread::yield_now();
        }
    }

    /// Copies the payload of a message to where the program wants it, whose length is the message's.
    fn copy_out(&self, received: &Received, into: &mut [u8]) -> Result<()> {
        if received.flags & Record::INLINE != 0 {
            let Some(from) = received.inline.get(..into.len()) else { return Err(self.outside()) };
            into.copy_from_slice(from);
            return Ok(());
        }
        let from = self.place_of(received, into.len())?;
        // SAFETY: the source was checked, and `self.qp` keeps it mapped. The record was read with acquire, and the peer leaves the
        // place alone until it is released; a peer that does not spoils the bytes of its own message alone.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Where `length` bytes of a message lie that is not inline: mapped memory, which `self.qp` keeps mapped.
    fn place_of(&self, received: &Received, length: usize) -> Result<NonNull<u8>> {
        let Own { geometry, control, .. } = &self.qp.memory.own;
        let (base, bytes): (NonNull<u8>, usize) = match &self.qp.memory.inbound {
            _ if received.flags & Record::LANDING != 0 => {
                let offset = geometry.control_landing_offset();
                let bytes = (abi::PUSHGATE_UNIT as usize) << geometry.landing_log;
                if offset + bytes > control.len() {
                    return Err(self.outside());
                }
                // SAFETY: the offset lies within the segment, checked above.
                (unsafe { control.as_ptr().add(offset) }, bytes)
            }
            InboundPayload::Window(window) => (window.as_ptr(), window.len()),
            InboundPayload::Mirror(mirror) => (mirror.as_ptr(), mirror.len()),
        };
        let at = received.place as usize * abi::PUSHGATE_UNIT as usize;
        if at.checked_add(length).is_none_or(|end| end > bytes) {
            return Err(self.outside());
        }
        // SAFETY: the offset lies within the memory, checked above.
        Ok(unsafe { base.add(at) })
    }

    /// The error for a record that names a place which its memory does not have.
    fn outside(&self) -> Error {
        Error::Mismatch {
            rank: self.qp.peer(),
            reason: "a receive record names a place outside of its memory".into(),
        }
    }
}

/// A signal, its index and value checked.
fn checked((index, value): (u32, u64)) -> Result<(u32, u64)> {
    if index >= abi::PUSHGATE_MAX_SIGNALS {
        return Err(Error::config("signal", index, format!("less than {}", abi::PUSHGATE_MAX_SIGNALS)));
    }
    if value > abi::PUSHGATE_SIGNAL_MAX {
        return Err(Error::config("value", value, "less than 2^56"));
    }
    Ok((index, value))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    use super::*;
    use crate::{Comm, Context, QpConfig, Settings};

    /// Two ends of one queue pair, the queue pairs, and what they were made with.
    struct Pair {
        ends: [HostEnd; 2],
        context: Context,
        _comms: Vec<Comm>,
    }

    fn pair(settings: &[(&str, &str)]) -> Pair {
        let mut all = Settings::default();
        for (name, value) in [("device", "cpu"), ("timeout", "60s")].iter().chain(settings) {
            all.set(name, value).unwrap();
        }
        let context = Context::builder().settings(all).build().unwrap();
        let comms = Comm::local(&context, 2).unwrap();
        let make = |comm: &Comm| {
            let qp = Arc::new(comm.queue_pair(1 - comm.rank(), 0, QpConfig::default()).unwrap());
            qp.host_end().unwrap()
        };
        let ends = std::thread::scope(|s| {
            let second = s.spawn(|| make(&comms[1]));
            [make(&comms[0]), second.join().unwrap()]
        });
        Pair { ends, context, _comms: comms }
    }

    fn bytes(length: usize, seed: usize) -> Vec<u8> {
        (0..length).map(|i| (i * 31 + seed) as u8).collect()
    }

    fn messages_arrive(settings: &[(&str, &str)]) {
        let Pair { ends: [mut sender, mut receiver], .. } = pair(settings);
        let lengths = [0, 1, 40, 41, 64, 4095, 100_000];
        std::thread::scope(|s| {
            s.spawn(|| {
                // More than the window holds, several times.
                for i in 0..210 {
                    sender.send(&bytes(lengths[i % lengths.len()], i), i as u32).unwrap();
                }
                sender.flush().unwrap();
            });
            let mut into = vec![0; 100_000];
            for i in 0..210 {
                let message = receiver.recv(&mut into).unwrap();
                let length = lengths[i % lengths.len()];
                assert_eq!(message, HostMessage { length, tag: i as u32 });
                assert!(into[..length] == bytes(length, i), "message {i}");
            }
        });
        assert_eq!(receiver.try_recv(&mut []).unwrap(), None);
    }

    #[test]
    fn messages_of_every_length_arrive_in_order() {
        messages_arrive(&[]);
    }

    #[test]
    fn messages_arrive_where_the_program_drives_the_engine() {
        messages_arrive(&[("drive", "caller")]);
    }

    #[test]
    fn messages_that_are_staged_leave_in_that_order_and_lie_in_place_until_given_back() {
        let Pair { ends: [mut sender, mut receiver], .. } = pair(&[("window-size", "64K")]);
        for round in 0..20 {
            let mut staged: Vec<_> = (0..3)
                .map(|i| {
                    let staged =
                        sender.stage(10_000 + i, i as u32).unwrap().expect("the window has room for three");
                    let bytes = bytes(staged.len(), round + i);
                    // SAFETY: what was staged has room for its length, and nobody reads it before it is published.
                    unsafe {
                        staged.as_ptr().copy_from_nonoverlapping(NonNull::from(&bytes[0]), bytes.len())
                    };
                    staged
                })
                .collect();
            // The last one first.
            while let Some(one) = staged.pop() {
                sender.publish(one);
            }
            sender.send(&[7; 5], 99).unwrap();
            let mut taken = Vec::new();
            receiver
                .until("four messages", |end| {
                    taken.extend(end.take()?);
                    Ok(taken.len() == 4)
                })
                .unwrap();
            for (i, message) in taken[..3].iter().enumerate() {
                assert_eq!(message.message(), HostMessage { length: 10_000 + i, tag: i as u32 });
                let mut got = vec![0; 9_000];
                // SAFETY: the vector has room, and nothing was given back.
                unsafe { message.copy_to(100, got.as_mut_ptr(), got.len()) };
                assert!(got == bytes(10_000 + i, round + i)[100..9_100], "round {round}, message {i}");
            }
            assert!(taken[3].as_ptr().is_none(), "five bytes travel in their record");
            // SAFETY: the array has room.
            let outside = std::panic::catch_unwind(|| unsafe { taken[3].copy_to(1, [0; 8].as_mut_ptr(), 5) });
            assert!(outside.is_err(), "it leaves the message");
            receiver.give_back(4);
        }
        sender.flush().unwrap();
        assert!(sender.is_flushed());
        // 64 KiB hold six of these at most.
        let full: Vec<_> = std::iter::from_fn(|| sender.stage(10_000, 0).unwrap()).collect();
        assert!((1..=6).contains(&full.len()), "{}", full.len());
        full.into_iter().for_each(|staged| sender.publish(staged));
    }

    #[test]
    fn a_thread_that_rests_goes_on_when_another_one_has_work() {
        // Only guards against a hang: a wait that nobody ends takes this long.
        const LONG: Duration = Duration::from_secs(60);
        let Pair { ends: [mut sender, mut receiver], context, .. } = pair(&[("drive", "caller")]);
        let begin = Instant::now();
        std::thread::scope(|s| {
            s.spawn(|| {
                for i in 0..20 {
                    while receiver.take().unwrap().is_none() {
                        context.rest(LONG).unwrap();
                    }
                    receiver.give_back(1);
                    assert!(begin.elapsed() < LONG, "message {i} ended no rest");
                }
            });
            for i in 0..20 {
                std::thread::sleep(Duration::from_millis(i % 4));
                sender.send(b"work", 0).unwrap();
                context.drive().unwrap();
            }
        });
    }

    #[test]
    fn p3_what_is_put_is_there_when_its_signal_is() {
        let Pair { ends: [mut from, mut to], context, .. } = pair(&[]);
        let memory = context.shared("put", 4096).unwrap();
        let region = to.queue_pair().register_shared(&memory).unwrap();
        let key = region.key();
        for (round, length) in [8, 16, 24, 1000, 3000].into_iter().enumerate() {
            let value = round as u64 + 1;
            from.put(key, 64, &bytes(length, round), Some((3, value))).unwrap();
            to.wait_signal(3, value).unwrap();
            // SAFETY: the peer has put its bytes before the signal, and puts no others before the next round.
            let got = unsafe { std::slice::from_raw_parts(memory.as_ptr().as_ptr().add(64), length) };
            assert!(got == bytes(length, round), "round {round}");
        }
        from.put(key, 0, b"quiet", None).unwrap();
        from.signal(4, 9).unwrap();
        to.wait_signal(4, 9).unwrap();
        assert_eq!((to.signal_value(3).unwrap(), to.signal_value(5).unwrap()), (5, 0));
    }

    #[test]
    fn p3_what_is_put_out_of_a_region_is_in_the_peers_region_before_the_message_after_it() {
        let Pair { ends: [mut from, mut to], context, .. } = pair(&[("qp", "tcp"), ("window-size", "2M")]);
        const LENGTH: usize = 3 << 20;
        let [source, target] = ["source", "target"].map(|name| context.shared(name, LENGTH).unwrap());
        let all = bytes(LENGTH, 5);
        // SAFETY: nobody else accesses the memory yet.
        unsafe { source.as_ptr().copy_from_nonoverlapping(NonNull::from(&all[0]), LENGTH) };
        let own = from.queue_pair().register_shared(&source).unwrap();
        let theirs = to.queue_pair().register_shared(&target).unwrap();
        assert!(own.is_direct().unwrap() && theirs.is_direct().unwrap());
        let mut put = |begin: u64, length, at| from.try_put_region((&own, begin), length, theirs.key(), at);
        assert!(put(4096, 2 << 20, 64).unwrap());
        for (begin, length, at) in
            [(LENGTH as u64 - 7, 8, 0), (u64::MAX, 1, 0), (0, LENGTH + 1, 0), (0, 1, 1 << 56)]
        {
            let refused = put(begin, length, at);
            assert!(matches!(refused, Err(Error::Config { .. })), "{length} bytes at {begin} to {at}");
        }
        from.send(b"after", 0).unwrap();
        let mut into = [0; 8];
        assert_eq!(to.recv(&mut into).unwrap().length, 5);
        // SAFETY: the put has ended, and there is no other.
        let got = unsafe { std::slice::from_raw_parts(target.as_ptr().as_ptr().add(64), 2 << 20) };
        assert!(got == &all[4096..][..2 << 20]);
        from.flush().unwrap();
        assert!(from.posted() >= 2 && from.delivered() == from.posted());
        assert!(own.deregister().unwrap() && theirs.deregister().unwrap());
        assert!(!own.is_direct().unwrap());

        let Pair { ends: [local, _peer], .. } = pair(&[]);
        let region = local.queue_pair().register_shared(&source).unwrap();
        assert!(!region.is_direct().unwrap(), "`local` copies");
    }

    #[test]
    fn what_is_put_lands_in_memory_of_the_program_as_host_and_as_device_memory() {
        let Pair { ends: [mut from, mut to], context, .. } = pair(&[]);
        let words: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let at = NonNull::from(&words[0]).cast::<u8>();
        let held = |first: usize| words[first..first + 2].iter().map(|w| w.load(Ordering::Acquire));
        // SAFETY: atomics outlive the regions, which are deregistered below; nothing else accesses them meanwhile.
        unsafe {
            let memory = context.register_host(at, 512).unwrap();
            assert_eq!((memory.len(), memory.as_ptr()), (512, at));
            let region = to.queue_pair().register_host(&memory).unwrap();
            from.put(region.key(), 8, &7u64.to_ne_bytes(), Some((0, 1))).unwrap();
            to.wait_signal(0, 1).unwrap();
            assert!(held(0).eq([0, 7]));
            assert!(region.deregister().unwrap());
            // On this device an address of the host is one of the device.
            let region = to.queue_pair().register_device(memory.device_addr() + 256, 256).unwrap();
            from.put(region.key(), 8, &9u64.to_ne_bytes(), Some((0, 2))).unwrap();
            to.wait_signal(0, 2).unwrap();
            assert!(held(32).eq([0, 9]) && held(0).eq([0, 7]));
            assert!(region.deregister().unwrap());
            // What has no bytes, and what leaves the address space.
            assert!(context.register_host(at, 0).unwrap_err().is_config());
            assert!(context.register_host(at, usize::MAX).unwrap_err().is_config());
            for (address, bytes) in [(0, 8), (4096, 0), (u64::MAX - 7, 16)] {
                assert!(to.queue_pair().register_device(address, bytes).unwrap_err().is_config());
            }
        }
    }

    #[test]
    fn a_message_that_does_not_fit_stays_the_next_one() {
        let Pair { ends: [mut sender, mut receiver], .. } = pair(&[]);
        sender.send(&bytes(100, 1), 1).unwrap();
        sender.send(b"two", 2).unwrap();
        sender.flush().unwrap();
        let mut into = [0; 100];
        let refused = receiver.recv(&mut into[..99]).unwrap_err();
        assert!(
            refused.is_config() && refused.to_string().contains("expected 100 bytes or more"),
            "{refused}"
        );
        assert_eq!(receiver.recv(&mut into).unwrap().tag, 1);
        assert!(into[..] == bytes(100, 1));
        assert_eq!(receiver.recv(&mut into).unwrap(), HostMessage { length: 3, tag: 2 });
    }

    #[test]
    fn p7_waits_end_with_the_cause_or_after_the_timeout() {
        let Pair { mut ends, .. } = pair(&[("timeout", "200ms"), ("recover", "0")]);
        let [first, second] = &mut ends;
        assert!(matches!(first.wait_signal(0, 1), Err(Error::TimedOut { .. })));
        assert!(matches!(first.recv(&mut [0; 8]), Err(Error::TimedOut { .. })));
        second.send(b"before", 0).unwrap();
        second.flush().unwrap();
        second.queue_pair().abort().unwrap();
        // What came before the end is still received.
        assert_eq!(first.recv(&mut [0; 8]).unwrap().length, 6);
        for end in [first, second] {
            assert!(matches!(end.recv(&mut [0; 8]), Err(Error::Aborted { .. })));
            assert!(matches!(end.wait_signal(0, 1), Err(Error::Aborted { .. })));
        }
    }

    #[test]
    fn p8_arguments_that_are_not_allowed_are_refused_and_a_queue_pair_gives_its_end_once() {
        let Pair { ends: [mut end, _other], .. } = pair(&[("window-size", "4K")]);
        let refused = |done: Result<bool>| assert!(done.unwrap_err().is_config());
        refused(end.try_send(&[0; 4097], 0));
        refused(end.try_put(0, 1 << 56, &[], None));
        refused(end.try_put(0, 0, &[], Some((1 << 16, 1))));
        refused(end.try_signal(0, 1 << 56));
        assert!(end.signal_value(64).unwrap_err().is_config());
        assert!(end.qp.host_end().err().unwrap().is_config());
        end.queue_pair().check().unwrap();
    }
}
