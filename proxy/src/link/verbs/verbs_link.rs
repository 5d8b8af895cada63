//! The queue pair itself, as the endpoint drives it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Opcode, Record, Words as RecordWords, lap_of};
use pushgate_rdma_core_sys as sys;

use super::chain::{Chain, Remote, Source};
use super::copies::Copies;
use super::gid::GidEntry;
use super::health::Health;
use super::inbox::{Inbox, LINE_WORDS, NOTIFY, OF_DEVICE, PLACED_FLAG, SHORT_FLAG};
use super::line::{Due, Line};
use super::objects::{Mr, REMOTE_WRITE, Rc, SEND_ONLY};
use super::sending::Sending;
use super::setup::{Accepted, InboxLayout, Places, REGION_WORDS};
use super::slot::{self, SHORT, SLOT_BYTES, SLOT_WORDS, slot_bytes};
use super::{CONTROL_WRS, LAST_RECEIVE, LAST_SEND, NOTIFIES, RECEIVE};
use crate::gate::{Budget, Permit};
use crate::link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Waking, crossing,
};
use crate::memory::Words;
use crate::receives::{PeerReceives, RECEIVE_WORDS};
use crate::region::{MAX_REGIONS, RegionMemory};
use crate::ring::{self, Found};
use crate::session::{self, Status, count_word};

/// Completions taken in one go, and how often before others have their turn.
const COMPLETIONS: usize = 32;
const ROUNDS: u32 = 4;

/// How long a queue pair that ends waits until its last words are out: three times a
/// packet may be sent again, within these bounds, for its device waits with it.
const LINGER: std::ops::Range<Duration> = Duration::from_millis(250)..Duration::from_secs(1);

/// How long a device may take to complete what is posted on a queue pair in the error state. Then the
/// queue pair is destroyed, which the kernel does not return from before the device is done with it.
const DRAIN: Duration = Duration::from_millis(500);

/// How far a queue pair is on its way to its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Open,
    /// The last words are on their way.
    Telling(Instant),
    /// It is in the error state; whether the last send and the last receive have completed.
    Draining {
        since: Instant,
        send: bool,
        receive: bool,
    },
    /// The device touches nothing for it any more.
    Stopped,
}

/// A region of ours that the peer may know.
struct OwnRegion {
    address: u64,
    mr: Mr,
    /// The last work request that reads it.
    used: u64,
}

/// A record whose payload is on its way.
struct Held {
    sequence: u64,
    /// The WRITE of its payload.
    payload: u64,
    /// Bytes of its slot.
    bytes: usize,
}

/// A queue pair over RDMA, as the folder's module describes it.
pub struct VerbsLink {
    // The queue pair goes before what it uses, registrations before their memory.
    rc: Rc,
    window: Sending,
    outbox_mr: Mr,
    _mirror_mr: Mr,
    _inbox_mr: Mr,
    regions: HashMap<u32, OwnRegion>,
    outbox: Words,
    outbox_address: u64,
    inbox: Inbox,
    peer_layout: InboxLayout,
    peer_places: Places,
    gid: GidEntry,
    rank: u32,
    peer: u32,
    linger: Duration,
    imm: bool,
    /// Both ends place WRITEs in the order in which they are posted.
    in_order: bool,
    events: bool,
    peer_events: bool,
    out_log: u32,
    budget: Budget,

    completions: Box<[sys::ibv_wc; COMPLETIONS]>,
    chain: Chain,
    /// For each message in flight, the number of its last work request; of one whose record is held
    /// back, the greatest number.
    last_wr: Box<[u64]>,
    /// Records that announce themselves, until their payload is where it belongs. Oldest first.
    held: VecDeque<Held>,
    sent: u64,
    copies: Copies,
    /// Messages that are done, and those reported.
    messages_done: u64,
    completed: u64,

    /// Immediate data that only woke, sent from here.
    notifies_sent: u64,
    receives_posted: u64,

    line: Line,
    publish: VecDeque<(usize, [u64; REGION_WORDS])>,
    publish_wr: u64,
    /// The peer's receives, if it posts any, and ours: how many are in the outbox,
    /// and how many of those were written to the peer.
    peer_receives: Option<PeerReceives>,
    tells_receives: bool,
    regions_written: bool,
    rx_log: u32,
    receives_noted: u64,
    receives_told: u64,
    receives_wr: u64,

    health: Health,
    ending: Ending,
    /// Something completed outside of a pass.
    fresh: bool,
}

impl VerbsLink {
    pub(super) fn new(a: Accepted, places: Places) -> Self {
        let (out_log, in_log) = (a.link_log(), a.peer_link_log);
        let (gid, events) = (a.gid().clone(), a.events());
        let (rank, rx_log) = (a.geometry().rank, a.geometry().rx_log);
        let (tells_receives, regions_written) = (a.posts_receives(), a.regions_written());
        let half = a.half;
        let timeout = Duration::from_nanos(4096 << half.ack_timeout());
        let linger = (3 * timeout).clamp(LINGER.start, LINGER.end);
        let slots = 1u32 << out_log;
        let inbox = Inbox::new(
            &a.inbox,
            InboxLayout::new(in_log, a.peer_geometry.rx_log),
            in_log,
            a.imm,
            a.mirror,
            1 << a.peer_geometry.window_log,
        );
        let peer_layout = InboxLayout::new(out_log, rx_log);
        VerbsLink {
            window: half.window,
            outbox_mr: half.outbox_mr,
            _mirror_mr: a.mirror_mr,
            _inbox_mr: a.inbox_mr,
            regions: HashMap::new(),
            outbox: Words::writable(&half.outbox, 0, half.outbox.len() / 8),
            outbox_address: half.outbox.as_ptr().as_ptr() as u64,
            inbox,
            peer_layout,
            peer_places: places,
            gid,
            rank,
            peer: a.peer,
            linger,
            imm: a.imm,
            in_order: a.in_order,
            events,
            peer_events: a.peer_events,
            out_log,
            budget: Budget {
                send_slots: slots,
                // The CQ was made with one for every work request of each message.
                cq_slots: slots,
                // Nothing is in flight but what the window holds.
                bytes: u64::MAX / 2,
            },
            completions: Box::new([sys::ibv_wc::default(); COMPLETIONS]),
            // A quarter of the queue: enough is free while the answer is on its way.
            chain: Chain::new(half.rc.inline, (slots as u64 / 2).max(1)),
            last_wr: vec![0; slots as usize].into(),
            held: VecDeque::with_capacity(if a.in_order { 0 } else { slots as usize }),
            sent: 0,
            copies: Copies::new(slots as usize),
            messages_done: 0,
            completed: 0,
            notifies_sent: 0,
            receives_posted: NOTIFIES as u64,
            line: Line::default(),
            publish: VecDeque::with_capacity(16),
            publish_wr: 0,
            peer_receives: a.peer_receives.then(|| PeerReceives::new(a.peer_geometry.rx_log)),
            tells_receives,
            regions_written,
            rx_log,
            receives_noted: 0,
            receives_told: 0,
            receives_wr: 0,
            health: Health::default(),
            ending: Ending::Open,
            fresh: false,
            rc: half.rc,
        }
    }

    /// Asks for a completion of every work request. For tests that wait for each.
    pub fn signal_all(&mut self) {
        self.chain.signal_all();
    }

    /// True if every work request is known to be done, or none will be carried out any more. The last words
    /// of an end are waited for by this, and so do tests that wait for each request.
    pub fn is_quiet(&mut self) -> bool {
        self.poll_cq();
        if !self.health.is_doubtful() && !self.held.is_empty() {
            self.release_held();
            // What it says is asked for below.
            let _ = self.flush();
        }
        self.chain.done == self.chain.written && self.held.is_empty()
            || self.health.has_failed()
            || self.health.is_doubtful()
            || self.has_ended()
    }

    /// Both ends agreed on immediate data.
    pub fn immediate(&self) -> bool {
        self.imm
    }

    /// Completions can wake this end's engine.
    pub fn can_wake(&self) -> bool {
        self.events
    }

    /// Writes anything anywhere into the peer's inbox, with any immediate data, as no
    /// sender of ours would. At most 32 words.
    #[cfg(feature = "test-ungated")]
    pub fn forge(&mut self, byte: usize, words: &[u64], imm: Option<u32>) -> Result<(), LinkDown> {
        const AT: usize = 64;
        for (word, value) in self.outbox[AT..AT + SLOT_WORDS].iter().zip(words) {
            word.store(*value, Ordering::Relaxed);
        }
        self.chain.write(self.outbox(AT, words.len() * 8), self.at_inbox(byte), imm, true);
        self.flush()
    }

    /// The peer is to know of a region, if it may write there.
    fn publish(&mut self, key: u32, entry: [u64; REGION_WORDS]) {
        if self.regions_written {
            self.publish.push_back((key as usize & (MAX_REGIONS - 1), entry));
        }
    }

    // ---------------------------------------------------------------- posting

    /// Posts the chain.
    fn flush(&mut self) -> Result<(), LinkDown> {
        if self.health.is_doubtful() || self.has_ended() {
            self.chain.forget();
            self.held.clear();
            return self.health.healthy();
        }
        // SAFETY: each names the window, a region, or the outbox, all registered for as
        // long as this queue pair; a slot of the outbox is written again only when
        // its message is done, a place of the window when the peer has released it.
        if let Err(e) = unsafe { self.chain.post(&self.rc) } {
            self.refused("posting to the RDMA queue pair", &e);
        }
        self.health.healthy()
    }

    /// The device took no request. The port may say why a moment later.
    #[cold]
    fn refused(&mut self, what: &str, e: &std::io::Error) {
        tracing::error!(rank = self.rank, peer = self.peer, "{what}: {e}");
        self.health.doubt(abi::PUSHGATE_DOWN_WC);
    }

    /// A stretch of the outbox, from a word on.
    #[inline]
    fn outbox(&self, word: usize, bytes: usize) -> Source {
        let address = self.outbox_address + word as u64 * 8;
        Source { address, bytes: bytes as u32, key: self.outbox_mr.lkey }
    }

    /// A stretch of the peer's inbox, from a byte on.
    #[inline]
    fn at_inbox(&self, byte: usize) -> Remote {
        // `Accepted::join` saw that it does not wrap.
        Remote { address: self.peer_places.inbox + byte as u64, key: self.peer_places.inbox_key }
    }

    /// Immediate data that only wakes, if the peer may sleep and a receive is left for it.
    #[inline]
    fn notify_imm(&mut self) -> Option<u32> {
        if !self.peer_events {
            return None;
        }
        let taken = self.inbox.notified();
        // A peer that counts more than were sent gets none: plain writes still arrive.
        if taken > self.notifies_sent || self.notifies_sent - taken >= NOTIFIES as u64 {
            return None;
        }
        self.notifies_sent += 1;
        Some(NOTIFY)
    }

    /// Writes the line to the peer.
    fn write_line(&mut self, due: Due) {
        let first = due.at * LINE_WORDS;
        for (word, value) in self.outbox[first..].iter().zip(due.words) {
            word.store(value, Ordering::Relaxed);
        }
        let imm = if due.wakes { self.notify_imm() } else { None };
        self.chain.write(self.outbox(first, LINE_WORDS * 8), self.at_inbox(0), imm, true);
        self.line.written(self.chain.written);
    }

    /// Word of the outbox where our receives begin.
    fn outbox_receives(&self) -> usize {
        // Behind the slots, where an inbox has its table of regions.
        self.peer_layout.regions / 8
    }

    /// Writes to the peer the receives that it was not told of, if the last ones have
    /// arrived.
    fn tell_receives(&mut self) {
        if self.receives_wr > self.chain.done {
            return;
        }
        let ring = 1u64 << self.rx_log;
        // At most twice: there are no more than the ring has.
        while self.receives_told < self.receives_noted {
            let first = self.receives_told & (ring - 1);
            let n = (self.receives_noted - self.receives_told).min(ring - first);
            let word = first as usize * RECEIVE_WORDS;
            let to = self.at_inbox(self.peer_layout.receives + word * 8);
            let from = self.outbox(self.outbox_receives() + word, n as usize * RECEIVE_WORDS * 8);
            self.chain.write(from, to, None, true);
            self.receives_told += n;
            self.receives_wr = self.chain.written;
        }
    }

    /// Control writes that are due. Their slots are set aside: one of each kind is
    /// in the send queue at a time.
    fn control(&mut self) {
        if self.health.is_deserted() || self.has_ended() {
            return;
        }
        let told = self.receives_told;
        self.tell_receives();
        if self.receives_told != told {
            // Nothing but what comes behind it wakes a peer that waits for one of them.
            self.line.touch_to_wake();
        }
        if let Some(due) = self.line.next(self.chain.done, self.in_order) {
            self.write_line(due);
        }
        if self.publish_wr <= self.chain.done
            && let Some((index, entry)) = self.publish.pop_front()
        {
            const AT: usize = 2 * LINE_WORDS;
            for (word, value) in self.outbox[AT..].iter().zip(entry) {
                word.store(value, Ordering::Relaxed);
            }
            let bytes = REGION_WORDS * 8;
            let to = self.at_inbox(self.peer_layout.regions + index * bytes);
            self.chain.write(self.outbox(AT, bytes), to, None, true);
            self.publish_wr = self.chain.written;
        }
    }

    /// Writes a message's payload to where it belongs, or packs it behind its record,
    /// whose slot begins at word `first` of the outbox. `target` is where in a region it
    /// belongs, if it does. `signal` asks for the completion of the payload's WRITE. Returns the record's
    /// flags and the bytes of the slot.
    #[inline]
    fn post_payload(
        &mut self,
        sequence: u64,
        first: usize,
        r: &Record,
        target: Option<(u32, u64)>,
        signal: bool,
    ) -> Result<(u64, usize), LinkDown> {
        let record = slot_bytes(0);
        if r.opcode == Opcode::Signal || r.has(Record::INLINE) || r.length == 0 {
            return Ok((0, record));
        }
        let offset = (r.place as u64) << abi::PUSHGATE_UNIT_LOG;
        let direct = target.and_then(|to| self.direct(to, r.length)).filter(|_| {
            // What the peer copies there first must not come second.
            target.is_some_and(|to| !self.copies.touch(to, r.length, self.chain.done))
        });
        if r.has(Record::REGION) {
            // `takes_region` said yes to both, or one was taken back meanwhile.
            let (Some(region), Some((to, _))) = (self.regions.get_mut(&r.place), direct) else {
                return Err(LinkDown::RegionGone);
            };
            let address = region.address + r.place_offset;
            self.chain.write(Source { address, bytes: r.length, key: region.mr.lkey }, to, None, signal);
            region.used = self.chain.written;
            return Ok((PLACED_FLAG, record));
        }
        let short = r.length as usize <= SHORT;
        if let Some((to, of_device)) = direct
            && (!short || of_device)
        {
            self.chain.write(self.window.source(offset, r.length), to, None, signal);
            return Ok((PLACED_FLAG, record));
        }
        if short {
            let mut payload = [0; SHORT];
            let payload = &mut payload[..r.length as usize];
            self.window.read(offset, payload);
            slot::pack(&self.outbox[first..first + SLOT_WORDS], payload, sequence, self.out_log);
            return Ok((SHORT_FLAG, slot_bytes(payload.len())));
        }
        let places = &self.peer_places;
        let to = Remote { address: places.mirror + offset, key: places.mirror_key };
        self.chain.write(self.window.source(offset, r.length), to, None, signal);
        Ok((0, record))
    }

    /// Writes the record of a message to the peer, out of its slot of the outbox.
    #[inline]
    fn post_record(&mut self, sequence: u64, bytes: usize, imm: Option<u32>) {
        let index = sequence as usize & (self.last_wr.len() - 1);
        let first = abi::PUSHGATE_PAGE as usize / 8 + index * SLOT_WORDS;
        let slot = (sequence & ((1 << self.out_log) - 1)) as usize * SLOT_BYTES;
        let to = self.at_inbox(self.peer_layout.slots + slot);
        self.chain.write(self.outbox(first, bytes), to, imm, false);
        self.last_wr[index] = self.chain.written;
    }

    /// Writes the records whose payload has arrived. The peer takes slots in their order, so a record that
    /// is held back holds back those behind it there.
    #[cold]
    fn release_held(&mut self) {
        while let Some(held) = self.held.front()
            && held.payload <= self.chain.done
            && self.chain.has_room(1 + CONTROL_WRS as usize)
        {
            let Held { sequence, bytes, .. } = *held;
            self.held.pop_front();
            let imm = self.notify_imm();
            self.post_record(sequence, bytes, imm);
        }
    }

    /// Where payload can go without a stop, if the peer told of such a region. What
    /// it says is only believed as far as it hurts itself.
    fn direct(&self, (rkey, offset): (u32, u64), length: u32) -> Option<(Remote, bool)> {
        let region = self.inbox.region(rkey)?;
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= region.bytes);
        inside.then(|| {
            let to = Remote { address: region.address.wrapping_add(offset), key: region.key };
            (to, region.of_device)
        })
    }

    // ------------------------------------------------------------- completing

    /// Takes completions. True if there were any.
    fn poll_cq(&mut self) -> bool {
        let mut any = false;
        // A bound, for a peer may send what wakes as fast as we take it (P8).
        for _ in 0..ROUNDS {
            let n = match self.rc.cq.poll(&mut self.completions[..]) {
                Ok(n) => n,
                Err(e) => {
                    tracing::error!(rank = self.rank, peer = self.peer, "polling the CQ: {e}");
                    self.health.fail(abi::PUSHGATE_DOWN_DEVICE);
                    return true;
                }
            };
            any |= n > 0;
            for i in 0..n {
                let wc = self.completions[i];
                if wc.status != sys::ibv_wc_status::IBV_WC_SUCCESS {
                    self.broken(&wc);
                } else if wc.wr_id == RECEIVE {
                    if wc.wc_flags & sys::ibv_wc_flags::IBV_WC_WITH_IMM.0 == 0 {
                        tracing::error!(
                            rank = self.rank,
                            peer = self.peer,
                            "a receive without immediate data"
                        );
                        self.health.fail(abi::PUSHGATE_DOWN_WC);
                        return true;
                    }
                    // SAFETY: the flag says that this member of the union was set.
                    self.arrived(u32::from_be(unsafe { wc.__bindgen_anon_1.imm_data }));
                } else if wc.wr_id >= LAST_SEND {
                    self.last_completed(wc.wr_id);
                } else {
                    self.chain.done = self.chain.done.max(wc.wr_id);
                }
            }
            if n < COMPLETIONS {
                break;
            }
        }
        if any {
            let mask = self.last_wr.len() as u64 - 1;
            while self.messages_done < self.sent
                && self.last_wr[(self.messages_done & mask) as usize] <= self.chain.done
            {
                self.messages_done += 1;
            }
            // What the completions announce was written before them.
            fence(Ordering::Acquire);
        }
        any
    }

    /// Immediate data arrived, and with it a receive was consumed.
    fn arrived(&mut self, imm: u32) {
        if imm & NOTIFY != 0 {
            self.line.was_notified();
            self.post_receives();
            return;
        }
        self.inbox.announce(imm);
    }

    /// As many receives as were granted, and those set aside.
    fn post_receives(&mut self) {
        if !self.imm || self.has_ended() {
            return;
        }
        let due = self.line.granted() + NOTIFIES as u64 + self.line.notified();
        let missing = due.saturating_sub(self.receives_posted);
        self.receives_posted += missing;
        if let Err(e) = self.rc.post_receives(missing as u32) {
            self.refused("posting receives", &e);
        }
    }

    /// A work request failed.
    #[cold]
    fn broken(&mut self, wc: &sys::ibv_wc) {
        if self.has_ended() {
            // Flushed, as they should be.
            return self.last_completed(wc.wr_id);
        }
        if self.health.is_over() {
            return;
        }
        use sys::ibv_wc_status as s;
        let detail = match wc.status {
            s::IBV_WC_RETRY_EXC_ERR => abi::PUSHGATE_DOWN_RETRY,
            s::IBV_WC_RNR_RETRY_EXC_ERR => abi::PUSHGATE_DOWN_RNR,
            s::IBV_WC_REM_ACCESS_ERR => abi::PUSHGATE_DOWN_ACCESS,
            other => abi::PUSHGATE_DOWN_WC + other.0,
        };
        // Who said that it leaves takes nothing more, and need not.
        if self.inbox.peer_left() && self.sent == self.inbox.received() {
            self.health.desert();
            return;
        }
        // SAFETY: the library's own text for any value.
        let text = unsafe { std::ffi::CStr::from_ptr(self.rc.pd.device.verbs.ibv_wc_status_str(wc.status)) };
        let device = self.rc.pd.device.name();
        tracing::error!(
            rank = self.rank,
            peer = self.peer,
            device,
            "RDMA work request failed: {}",
            text.to_string_lossy()
        );
        match detail {
            // The peer's answer: there is no doubt.
            abi::PUSHGATE_DOWN_RNR | abi::PUSHGATE_DOWN_ACCESS => self.health.fail(detail),
            // This host's own end may be the cause of a packet that does not go out, or that
            // nobody answers, and the port may say so a moment later.
            _ => self.health.doubt(detail),
        }
    }

    /// True once it was put into the error state by us.
    fn has_ended(&self) -> bool {
        matches!(self.ending, Ending::Draining { .. } | Ending::Stopped)
    }

    /// One of the last work requests has completed, if that is its number.
    #[cold]
    fn last_completed(&mut self, wr_id: u64) {
        if let Ending::Draining { send, receive, .. } = &mut self.ending {
            *send |= wr_id == LAST_SEND;
            *receive |= wr_id == LAST_RECEIVE;
        }
    }

    /// True if nobody is left whom the last words could reach, or who waits for them.
    fn nobody_to_tell(&self) -> bool {
        let ours = Status::from_word(self.line.status());
        ours.is_some_and(|s| s.code as u32 == abi::PUSHGATE_PEER_LOST && s.rank == Some(self.peer))
            || self.health.is_over()
            || self.inbox.peer_left()
            || self.peer_status() != 0
    }

    /// Puts the queue pair into the error state, behind which nothing new is carried out.
    fn begin_to_drain(&mut self) {
        self.chain.forget();
        self.held.clear();
        self.ending = Ending::Draining { since: Instant::now(), send: false, receive: false };
        if let Err(e) = self.rc.drain(LAST_SEND, LAST_RECEIVE) {
            tracing::info!(rank = self.rank, peer = self.peer, "{e}: the queue pair is destroyed instead");
            self.destroy();
        }
    }

    /// The end of a queue pair whose device does not complete what is posted.
    fn destroy(&mut self) {
        self.rc.destroy();
        self.ending = Ending::Stopped;
    }
}

impl Link for VerbsLink {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn budget(&self) -> Budget {
        self.budget
    }

    #[inline]
    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        r: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.health.healthy()?;
        if self.health.is_deserted() {
            return Err(LinkDown::PeerLeft);
        }
        // Control writes come behind the messages of a pass.
        if !self.chain.has_room(2 + CONTROL_WRS as usize) {
            self.flush()?;
        }
        let index = sequence as usize & (self.last_wr.len() - 1);
        let first = abi::PUSHGATE_PAGE as usize / 8 + index * SLOT_WORDS;
        let receive = match &mut self.peer_receives {
            Some(receives) if r.opcode == Opcode::Send => receives.take(self.inbox.receives(), r.tag),
            _ => None,
        };
        let target = match receive {
            None => (r.opcode == Opcode::Put).then_some((r.rkey, r.remote_offset)),
            // `receive_for` saw that it is long enough.
            Some(p) => (p.length >= r.length).then_some((p.rkey, p.offset)),
        };
        // A receive completion says that what was written before it is there. Nothing says so of a
        // record that announces itself, but the completion of its payload's WRITE.
        let announced = r.opcode == Opcode::Send && self.imm;
        let holds = !(self.in_order || announced);
        let before = self.chain.written;
        let (flags, bytes) = self.post_payload(sequence, first, r, target, holds)?;
        let payload = self.chain.written;
        if let Some(target) = target
            && r.length > 0
        {
            if flags & PLACED_FLAG == 0 {
                self.copies.posted(sequence, target, r.length);
            } else if !self.in_order {
                self.copies.written(sequence, payload, target, r.length);
            }
        }
        let lap = (lap_of(sequence, self.out_log) as u64) << abi::PUSHGATE_LAP_SHIFT;
        let mut w = crossing(words, sequence);
        w[0] |= flags;
        if flags & PLACED_FLAG != 0 || r.has(Record::REGION) {
            // Without the flag these two name a place in the mirror: here none.
            let placed = receive.filter(|_| flags & PLACED_FLAG != 0);
            (w[5], w[6]) = (placed.map_or(0, |p| p.number & 0xffff_ffff), 0);
        }
        for (word, value) in self.outbox[first..].iter().zip(w) {
            word.store(value & abi::PUSHGATE_DATA_MASK | lap, Ordering::Relaxed);
        }
        // Counts ride along: a write, a packet and its answer less than by the line. Always, for the
        // peer may look at them only once for several messages: those of a later message are later.
        for (word, value) in self.outbox[first..][slot::COUNTS].iter().zip(self.line.counts()) {
            word.store(value, Ordering::Relaxed);
        }
        if holds && payload > before {
            // The counts stay due, and go by the line.
            self.last_wr[index] = u64::MAX;
            self.held.push_back(Held { sequence, payload, bytes });
        } else {
            self.line.rode_along();
            let imm = if announced { Some(sequence as u32 & !NOTIFY) } else { self.notify_imm() };
            self.post_record(sequence, bytes, imm);
        }
        self.sent += 1;
        permit.post();
        Ok(())
    }

    #[inline]
    fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown> {
        // Without one asked for none is due. (`check` finds that of a failure.)
        if self.chain.done < self.chain.signaled {
            self.poll_cq();
        }
        self.health.healthy()?;
        self.copies.received(received, self.chain.done);
        // A slot of the peer's inbox is free when the peer has taken its message, one
        // of our send queue when that has completed.
        let completed = self.messages_done.min(received);
        let n = completed - self.completed;
        self.completed = completed;
        Ok(n as u32)
    }

    #[inline]
    fn peer_counts(&self) -> PeerCounts {
        self.inbox.counts()
    }

    fn peer_status(&self) -> u64 {
        self.inbox.status()
    }

    #[inline]
    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        let mut found = self.inbox.look(words);
        if found == Found::Empty && self.imm {
            if !self.poll_cq() {
                return Arrival::Empty;
            }
            found = self.inbox.look(words);
        }
        match found {
            Found::Empty => Arrival::Empty,
            Found::Torn => Arrival::Torn,
            Found::Ready => self.inbox.take(words),
        }
    }

    fn has_inbound(&self) -> bool {
        self.inbox.look(&mut [0; 8]) != Found::Empty
    }

    #[inline]
    fn acknowledge(&mut self, counts: PeerCounts) {
        self.line.acknowledge(counts);
        // Before the messages of this pass, so that these wake whoever waits for them.
        if self.receives_told != self.receives_noted
            && !self.health.is_deserted()
            && self.chain.has_room(2 + CONTROL_WRS as usize)
        {
            self.tell_receives();
        }
        // A receive is there before the peer hears of it.
        self.post_receives();
    }

    fn set_status(&mut self, word: u64) {
        self.line.end(word);
        // The peer shows nothing more.
        self.held.clear();
    }

    fn leave(&mut self) {
        if !self.inbox.peer_left() && !self.health.has_failed() {
            self.line.leave();
        }
    }

    fn stopped(&mut self) -> bool {
        if self.ending == Ending::Open {
            self.ending = Ending::Telling(Instant::now());
        }
        if let Ending::Telling(since) = self.ending {
            if !self.nobody_to_tell() {
                if self.line.has_last_words() {
                    // The last line may have to wait for the completion of the line before it.
                    self.poll_cq();
                    self.control();
                }
                let _ = self.flush();
                if (self.line.has_last_words() || !self.is_quiet()) && since.elapsed() < self.linger {
                    return false;
                }
            }
            self.begin_to_drain();
        }
        if let Ending::Draining { .. } = self.ending {
            self.poll_cq();
        }
        match self.ending {
            Ending::Draining { send: true, receive: true, .. } => self.ending = Ending::Stopped,
            Ending::Draining { since, .. } if since.elapsed() >= DRAIN => {
                tracing::warn!(
                    rank = self.rank,
                    peer = self.peer,
                    "the RDMA device does not complete what was posted: the queue pair is destroyed"
                );
                self.destroy();
            }
            _ => {}
        }
        self.ending == Ending::Stopped
    }

    #[inline]
    fn notify(&mut self) -> Result<bool, LinkDown> {
        if !self.held.is_empty() {
            self.release_held();
        }
        let untold = self.receives_told != self.receives_noted;
        if self.line.is_due() || untold || !self.publish.is_empty() {
            self.control();
        }
        self.flush()?;
        Ok(false)
    }

    fn bounced(&self) -> (u64, u64) {
        self.window.bounced
    }

    fn check(&mut self, now: u64) -> Result<(), LinkDown> {
        if self.health.has_failed() || self.health.is_deserted() {
            return self.health.healthy();
        }
        if self.chain.done < self.chain.written {
            // A work request that failed completes though nobody asked.
            self.fresh |= self.poll_cq();
        }
        if !self.health.asks_for_events(now) {
            return Ok(());
        }
        self.line.beat(self.chain.written, now);
        let device = &self.rc.pd.device;
        let news = device.poll_events();
        if !self.health.needs_a_look(news, now) {
            return Ok(());
        }
        let in_error = || {
            let in_error = self.rc.is_in_error();
            if in_error {
                tracing::error!(
                    rank = self.rank,
                    peer = self.peer,
                    "the RDMA queue pair is in an error state"
                );
            }
            in_error
        };
        if let Some(cause) = self.health.looked(news, in_error, device.diagnose(&self.gid), now) {
            tracing::error!(
                rank = self.rank,
                peer = self.peer,
                device = device.name(),
                port = device.port(),
                address = %self.gid.gid,
                netdev = self.gid.netdev,
                "the RDMA link is down: {}",
                match cause {
                    abi::PUSHGATE_DOWN_PORT => "the port is not active",
                    abi::PUSHGATE_DOWN_ADDRESS => "the address was removed",
                    abi::PUSHGATE_DOWN_DEVICE => "the device or its network interface was removed",
                    _ => "a work request failed, and nothing is wrong at this end",
                }
            );
        }
        self.health.healthy()
    }
}

impl Receives for VerbsLink {
    fn offered_receives(&self) -> Option<bool> {
        Some(self.tells_receives)
    }

    fn knows_receives(&self) -> bool {
        self.peer_receives.is_some()
    }

    fn receive_for(&self, r: &Record) -> Option<u32> {
        self.peer_receives.as_ref()?.find(self.inbox.receives(), r.tag).map(|p| p.length)
    }

    fn receive_posted(&mut self, number: u64, words: [u64; 4]) {
        if !self.tells_receives {
            return;
        }
        // The slot is free: what was there has arrived, for a message has taken it since.
        let slot = number as usize & ((1 << self.rx_log) - 1);
        let first = self.outbox_receives() + slot * RECEIVE_WORDS;
        for (word, value) in self.outbox[first..].iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        self.receives_noted = number + 1;
    }
}

impl OwnRegions for VerbsLink {
    fn takes_region(&self, r: &Record) -> RegionSends {
        if !self.regions.contains_key(&r.place) {
            return RegionSends::No("the source region is not registered with the RDMA device");
        }
        if r.length > self.rc.pd.device.longest_message() {
            return RegionSends::No(
                "the payload is longer than the RDMA device's longest message (max_msg_sz of ibv_devinfo -v): \
                 send it in pieces",
            );
        }
        let to = match (r.opcode, &self.peer_receives) {
            (Opcode::Put, _) => (r.rkey, r.remote_offset),
            (_, None) => return self.region_sends(),
            (_, Some(receives)) => match receives.find(self.inbox.receives(), r.tag) {
                Some(p) => (p.rkey, p.offset),
                None => return RegionSends::Unknown,
            },
        };
        // Nothing of an empty one has to go anywhere.
        if r.length == 0 && r.opcode == Opcode::Send {
            return RegionSends::Yes;
        }
        match self.direct(to, r.length) {
            // It can only go straight there, and what the peer copies there, or what is on its way
            // there, comes first.
            Some(_) if self.copies.touch(to, r.length, self.chain.done) => RegionSends::Unknown,
            Some(_) => RegionSends::Yes,
            None => RegionSends::No(
                "the peer has no such region that its RDMA device can write, or not so long: push the \
                 payload into the window",
            ),
        }
    }

    fn region_sends(&self) -> RegionSends {
        match self.peer_receives {
            Some(_) => RegionSends::Yes,
            None => RegionSends::No(
                "the peer's receives name no buffers that a region could be written to: push the payload into \
                 the window",
            ),
        }
    }

    fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64) {
        let pd = &self.rc.pd;
        let access = if self.regions_written { REMOTE_WRITE } else { SEND_ONLY };
        let made = match memory {
            RegionMemory::Host { address, .. } => {
                // SAFETY: whoever adds a region promises that it stays mapped and free of
                // references until it is removed, which drops this.
                unsafe { Mr::new(pd, "a region", *address, bytes as usize, access) }
                    .map(|mr| (*address as u64, 0, mr))
            }
            RegionMemory::Device { address, exported: Some(exported) } => {
                // SAFETY: as above, of the device's memory.
                unsafe { Mr::of_device(pd, *address, bytes as usize, exported, access) }
                    .map(|mr| (*address, OF_DEVICE, mr))
            }
            // A copy engine brings it there.
            RegionMemory::Device { exported: None, .. } => return,
        };
        match made {
            Ok((address, of_device, mr)) => {
                let id = key as u64;
                let entry = [id | of_device, address, bytes, id << 32 | mr.rkey as u64];
                self.regions.insert(key, OwnRegion { address, mr, used: 0 });
                self.publish(key, entry);
            }
            // Payload for it lands in the mirror and is moved from there.
            Err(e) => tracing::info!(rank = self.rank, peer = self.peer, "{e}: its payload will be copied"),
        }
    }

    fn region_in_use(&mut self, key: u32, _received: u64) -> bool {
        let Some(region) = self.regions.get(&key) else { return false };
        // That the peer has the message is not enough: until its acknowledgement is here
        // the device may send it once more.
        let used = region.used > self.chain.done && self.ending != Ending::Stopped;
        if used && self.health.is_deserted() {
            // Its work requests fail, and not all at once.
            return !self.stopped();
        }
        // A control write asks for a completion, and that speaks for all before it.
        if used && region.used > self.chain.signaled {
            self.line.touch();
        }
        used
    }

    fn remove_region(&mut self, key: u32) {
        if self.regions.remove(&key).is_some() {
            self.publish(key, [0; REGION_WORDS]);
        }
    }

    fn offers(&self, key: u32) -> bool {
        self.regions_written && self.regions.contains_key(&key)
    }

    fn registers(&self, key: u32) -> bool {
        self.regions.contains_key(&key)
    }

    fn regions_told(&self) -> bool {
        // Who is gone needs no answer.
        self.health.is_over() || self.publish.is_empty() && self.publish_wr <= self.chain.done
    }
}

impl PeerMemory for VerbsLink {
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        self.inbox.payload(unit, units)
    }

    fn in_place(&self) -> bool {
        true
    }
}

impl Waking for VerbsLink {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }

    fn prepare_sleep(&mut self) -> bool {
        if !self.events || self.health.is_deserted() {
            return false;
        }
        // What completes after this wakes; what completed before is looked for now, or was
        // taken since the last pass.
        std::mem::take(&mut self.fresh) || !self.rc.cq.arm() || self.poll_cq()
    }

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        if self.events && !self.health.is_deserted() {
            fds.extend(self.rc.cq.channel());
            fds.push(self.rc.pd.device.async_fd());
        }
    }

    fn woken(&mut self) {
        if self.events {
            self.rc.cq.drain();
            self.rc.pd.device.poll_events();
        }
    }
}

impl Drop for VerbsLink {
    /// Stops it, if its engine has not: the last words go out, and the device is done with all that is
    /// posted before anything is deregistered.
    fn drop(&mut self) {
        // A child of `fork` has nothing to send.
        if !self.rc.pd.device.owner.is_here() {
            return;
        }
        let mut turn = 0;
        while !self.stopped() {
            turn += 1;
            match turn {
                0..100 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pushgate_driver_shim::segment::Geometry;

    use super::super::mock::{self, Mock};
    use super::super::setup::{Config, Half};
    use super::*;
    use crate::region::Exported;

    /// Two ends on one device.
    fn pair(mock: &Mock, config: &Config) -> [VerbsLink; 2] {
        let half = |rank| {
            let geometry = Geometry {
                window_log: 8,
                slots_log: 4,
                cq_log: 4,
                rx_log: 4,
                link_log: 4,
                landing_log: 8,
                signals: 1,
                rank,
            };
            let window = Arc::new(mock::allocate("window", geometry.window_bytes()).unwrap());
            Half::new(&mock.device, config, geometry, window, &mut mock::allocate).unwrap()
        };
        let halves = [half(0), half(1)];
        let [first, second] = [halves[0].offer(), halves[1].offer()];
        let [a, b] = halves;
        let a = a.accept(1, &second, &mut mock::allocate).unwrap();
        let b = b.accept(0, &first, &mut mock::allocate).unwrap();
        let [to_b, to_a] = [a.places(), b.places()];
        [a.join(to_a).unwrap(), b.join(to_b).unwrap()]
    }

    #[test]
    fn two_ends_come_to_send_with_each_others_first_packets() {
        let mock = Mock::new(0);
        drop(pair(&mock, &Config::default()));
        let moves: Vec<_> =
            mock::take().into_iter().filter(|(n, _)| *n == "modify_qp").map(|m| m.1).collect();
        let states: Vec<u64> = moves.iter().map(|with| with[0]).collect();
        assert_eq!(states, [1, 1, 2, 2, 3, 3, 6, 6], "INIT, RTR, RTS, ERR");
        for with in &moves[..2] {
            assert_eq!(with[1], u64::from(sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0));
        }
        for (receives, sends) in [(2, 5), (3, 4)] {
            assert_eq!(moves[receives][2], u64::from(mock::QP));
            assert_eq!(moves[receives][3], moves[sends][4], "first packets");
        }
        // P4.
        assert!(moves[4..6].iter().all(|with| with[5] == 0), "a queue pair that retries behind an RNR NAK");
    }

    #[test]
    fn p7_receives_that_are_told_beside_a_beat_wake_the_peer() {
        let mock = Mock::new(0);
        let config = Config { posted_receives: true, ..Config::default() };
        for (noted, wakes) in [(0, 0), (1, 1)] {
            let [mut qp, _peer] = pair(&mock, &config);
            qp.peer_events = true;
            qp.line.beat(qp.chain.written, 0);
            qp.line.beat(qp.chain.written, u64::MAX);
            qp.receives_noted = noted;
            qp.control();
            assert_eq!(qp.notifies_sent, wakes);
        }
    }

    #[test]
    fn p8_a_region_that_nobody_writes_is_registered_to_be_read_and_told_to_nobody() {
        let file: std::os::fd::OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let dma_buf = Some(Exported::DmaBuf(Arc::new(file), 0));
        let memories = [
            RegionMemory::Host { address: 0x1000, keep: None },
            RegionMemory::Device { address: 0x1000, exported: Some(Exported::Address) },
            RegionMemory::Device { address: 0x1000, exported: dma_buf },
        ];
        for regions_written in [true, false] {
            let mock = Mock::new(0);
            let [mut qp, _peer] = pair(&mock, &Config { regions_written, ..Config::default() });
            mock::take();
            for (key, memory) in (1..).zip(&memories) {
                qp.add_region(key, memory, 4096);
                let [(_, with)] = &mock::take()[..] else { panic!("one registration") };
                // Local and remote writes, or neither.
                assert_eq!(*with.last().unwrap(), if regions_written { 1 | 2 } else { 0 });
                assert_eq!((qp.registers(key), qp.offers(key)), (true, regions_written));
            }
            // An entry of the table is a write to the peer.
            assert_eq!(
                (qp.regions_told(), qp.publish.len()),
                if regions_written { (false, 3) } else { (true, 0) }
            );
            qp.remove_region(1);
            assert_eq!(qp.publish.len(), if regions_written { 4 } else { 0 });
            assert!(!qp.registers(1) && !qp.offers(1));
            mock::refuse("reg_mr");
            qp.add_region(9, &memories[0], 4096);
            assert!(!qp.registers(9) && !qp.offers(9));
            mock::refuse("");
        }
    }
}
