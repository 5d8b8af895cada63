//! One queue pair as the engine drives it: takes WQEs out of the work segment,
//! asks the gate, posts, retires; takes in what the peer sent, puts it where it
//! belongs and tells the device. All state that decides anything is private.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{Bell, Ringer};
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{self, Malformed, Opcode, Record, Words as RecordWords, lap_of};
use pushgate_driver_shim::segment::{Geometry, HeaderError, Segment, check_header};
use pushgate_driver_shim::window::Interrupt;

use crate::counters::Counters;
use crate::gate::{Gate, Need, Stall};
use crate::memory::{Mapped, Words};
use crate::mover::{Failed, Move, Mover, SLICE, Source, Step};
use crate::qp::local::{LocalQp, Processes};
use crate::qp::{Inbound, PeerCounts, QueuePair, RegionSends};
use crate::region::{RegionMemory, Regions, Stretch};
use crate::ring::{self, Found, Look};
use crate::session::{Session, Status, count_of, count_word};
use crate::staging::Staging;

/// Records that one pass takes in each direction before the engine looks at
/// its other queue pairs.
const BATCH: u32 = 64;

/// Copies by a device that are under way at once: a copy engine reaches its rate
/// only with several queued, if each is a few hundred KiB.
const MOVES: usize = 16;

/// How long an end waits for copies by a device before it is shown all the same: a device that does
/// not end them must not hold up those who wait for the end.
const COPIES: Duration = Duration::from_secs(2);

/// The memory of one queue pair, as its program hands it to an engine. Every
/// segment's header is checked before anything else is read.
pub struct QpMemory {
    /// Work segment: the device writes, we read.
    pub work: Arc<ReadOnlyMemory>,
    /// Control segment: we write, the device reads.
    pub control: Arc<SharedMemory>,
    /// Our link segment.
    pub link: Arc<SharedMemory>,
    /// The peer's link segment.
    pub peer_link: Arc<ReadOnlyMemory>,
    /// The peer's window.
    pub peer_window: Arc<ReadOnlyMemory>,
    /// What the peer rings to wake our engine, if that sleeps.
    pub bell: Option<Bell>,
    /// Wakes the peer's engine, where it can be woken.
    pub peer_bell: Option<Ringer>,
    /// The peer's process, by its number in our PID namespace: what it sends out of
    /// regions is read there.
    pub peer_pid: Option<u32>,
    /// This engine runs in the process of its program, whose number the peer knows: its
    /// regions can be read there.
    pub in_program: bool,
}

/// What else an endpoint is told.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub struct QpOptions {
    /// The peer's rank.
    pub peer: u32,
    /// Messages land in buffers that receives name, not where they lie.
    pub posted_receives: bool,
    /// Whoever takes messages in sees to it that what an RDMA device wrote into a
    /// device's memory is there before that device is told of it (P3). Else the engine
    /// does, by its mover, before each such message is shown.
    pub reader_flushes: bool,
    /// A slot reserved and not published while later ones are complete ends the
    /// queue pair after this, nanoseconds.
    pub stuck_ns: u64,
    /// Share of the peer's window, in 256ths, that a slow reader may hold in
    /// place; what comes on top is copied out.
    pub in_place_share: u8,
    /// A reader that gives nothing back for this long while it holds messages is
    /// slow, nanoseconds: what it holds beyond its share is copied out. A reader
    /// that keeps up is never copied for.
    pub slow_ns: u64,
    /// Receive credits ignored; for tests alone.
    pub ungated: bool,
    /// Seed of the regions' tags.
    pub key_seed: u32,
}

/// Why a queue pair could not be taken in.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// A segment's header is wrong.
    #[error("{segment} segment: {source}")]
    Header {
        /// Which.
        segment: &'static str,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// Two segments of one side disagree.
    #[error("{segment} segment says {found:?}, the control segment {expected:?}")]
    Disagree {
        /// Which.
        segment: &'static str,
        /// Its geometry.
        found: Box<Geometry>,
        /// The control segment's.
        expected: Box<Geometry>,
    },
    /// The peer's window is smaller than its geometry says.
    #[error("the peer's window has {found} bytes, its geometry says {expected}")]
    Window {
        /// Bytes mapped.
        found: usize,
        /// Bytes that there should be.
        expected: usize,
    },
    /// The peer was told otherwise: it would wait for receives that nobody tells it of,
    /// or look for none.
    #[error(
        "posted_receives is {options} in QpOptions, but queue pair `{qp}` was offered to the peer with {offered}: \
         set both alike"
    )]
    PostedReceives {
        /// The transport.
        qp: &'static str,
        /// What the endpoint is to do.
        options: bool,
        /// What the peer was told.
        offered: bool,
    },
    /// `ungated` in a build without it.
    #[error("this build cannot switch the gate's receive credit off")]
    Ungated,
}

/// A receive that the device posted.
#[derive(Clone, Copy)]
struct Buffer {
    /// How many were posted before it.
    number: u64,
    key: u32,
    offset: u64,
    length: u32,
    tag: u32,
}

/// A delivered message whose place is still in use by the device.
#[derive(Clone, Copy)]
struct Held {
    /// Its receive record.
    rx: u64,
    /// Its sequence number.
    sequence: u64,
    /// Units that it holds, padding of the landing ring included.
    units: u64,
}

/// An inbound message as the transport gave it.
#[derive(Clone, Copy)]
struct Arrived<'a> {
    record: &'a Record,
    words: &'a RecordWords,
    /// Its payload is in its place already.
    placed: bool,
    sequence: u64,
}

/// One that waits. Few do, so none is copied before it has to.
struct Waiting {
    record: Record,
    words: RecordWords,
    placed: bool,
    sequence: u64,
}

/// An inbound message whose bytes are being moved.
struct Moving {
    movement: Move,
    record: Record,
    sequence: u64,
    /// Where it will be, for a SEND.
    landed: Landed,
}

impl Moving {
    /// The region that it is moved to.
    fn region(&self) -> Option<u32> {
        match self.landed {
            Landed::Region => Some(self.record.rkey),
            Landed::Buffer { key, .. } => Some(key),
            Landed::Landing { .. } => None,
        }
    }
}

#[derive(Clone, Copy)]
enum Landed {
    Region,
    /// The number of the posted receive, and its region.
    Buffer {
        number: u64,
        key: u32,
    },
    Landing {
        unit: u64,
        taken: u64,
    },
}

/// What came of an inbound message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// There is none.
    Nothing,
    /// Delivered, or its bytes are on their way.
    Taken,
    /// It waits, and those behind it with it.
    Waits,
}

/// Words of the control line.
const CREDIT: usize = 0;
const STATUS: usize = 1;
const DELIVERED: usize = 2;

/// Called once with the cause when a transport breaks.
pub type TellBroken = Box<dyn FnOnce(Status) + Send>;

/// One queue pair as the engine drives it: its rings, its regions, its transport, and how it ended.
pub struct Endpoint {
    geometry: Geometry,
    peer_geometry: Geometry,
    options: QpOptions,
    // The producer's side.
    wqes: Words,
    control_line: Words,
    sleeping: Words,
    cq: Words,
    cq_head: u64,
    staging: Staging,
    gate: Gate,
    session: Session,
    qp: Box<dyn QueuePair>,
    /// The WQE at the ring's head, our private copy.
    wqe: RecordWords,
    /// It is there and was checked, but has no permit yet.
    pending: bool,
    /// It was not checked to the end: only the peer knows whether it may be sent.
    undecided: bool,
    /// The transport is asked for the receive that a SEND takes.
    knows_receives: bool,
    stalled: bool,
    credit: u64,
    delivered_slots: u64,
    // The receiver's side.
    signals: Words,
    rx: Words,
    rx_head: u64,
    consumed: Words,
    consumed_seen: u64,
    receives: Words,
    receives_taken: u64,
    buffers: VecDeque<Buffer>,
    in_place: VecDeque<Held>,
    in_place_units: u64,
    /// What `consumed_seen` was, and when it last changed, by the clock of `tick`.
    progress: (u64, u64),
    slow: bool,
    next_scan: u64,
    landing: usize,
    landing_held: VecDeque<Held>,
    landing_head: u64,
    landing_tail: u64,
    /// A message that can't be delivered yet: no receive of its tag is posted, or what
    /// was begun before it is not done.
    waiting: Option<Waiting>,
    /// One host copy, or copies by a device, in the order of their messages.
    moving: VecDeque<Moving>,
    /// Bytes that the engine itself has moved.
    moved_here: u64,
    /// Inline payload on its way to device memory, for each copy that may be under way.
    inline: Box<[[u8; abi::PUSHGATE_INLINE_SEND as usize]; MOVES]>,
    next_inline: usize,
    acknowledged: PeerCounts,
    regions: Regions,
    counters: Counters,
    interrupt: Option<Box<dyn Interrupt>>,
    broken: Option<TellBroken>,
    /// The queue pair has failed, or this side has left: nothing is begun any more.
    over: bool,
    /// The end was shown to the device.
    shown: bool,
    /// Since when nothing but the end of the copies under way is waited for.
    settling: Option<Instant>,
    /// The device sees nothing of where the transport puts what comes.
    copies: bool,
    /// The control segment is a device's memory, to which this CPU's stores are not ordered.
    write_combined: bool,
    _control: Mapped,
}

fn header(
    words: &[AtomicU64],
    kind: Segment,
    name: &'static str,
    len: usize,
) -> Result<Geometry, EndpointError> {
    check_header(words, kind, len).map_err(|source| EndpointError::Header { segment: name, source })
}

impl Endpoint {
    /// A queue pair over the `local` transport.
    pub fn local(memory: QpMemory, options: QpOptions) -> Result<Self, EndpointError> {
        let geometry = header(memory.control.words(0, 8), Segment::Control, "control", memory.control.len())?;
        let page = abi::PUSHGATE_PAGE as usize;
        let check = |mem: &Arc<ReadOnlyMemory>, kind, name| {
            header(&Words::readable(mem, 0, 8.min(mem.len().min(page) / 8)), kind, name, mem.len())
        };
        let work = check(&memory.work, Segment::Work, "work")?;
        let link = header(memory.link.words(0, 8), Segment::Link, "link", memory.link.len())?;
        for (segment, found) in [("work", work), ("link", link)] {
            if found != geometry {
                return Err(EndpointError::Disagree {
                    segment,
                    found: Box::new(found),
                    expected: Box::new(geometry),
                });
            }
        }
        let peer_geometry = check(&memory.peer_link, Segment::Link, "peer's link")?;
        if memory.peer_window.len() < peer_geometry.window_bytes() {
            return Err(EndpointError::Window {
                found: memory.peer_window.len(),
                expected: peer_geometry.window_bytes(),
            });
        }
        let qp = LocalQp::new(
            &memory.link,
            &geometry,
            &memory.peer_link,
            &peer_geometry,
            memory.peer_window,
            (memory.bell, memory.peer_bell),
            Processes { peer: memory.peer_pid, in_program: memory.in_program },
        );
        Self::new(memory.work, memory.control, geometry, peer_geometry, Box::new(qp), options)
    }

    /// A queue pair over any transport; both geometries are checked.
    pub fn new(
        work: impl Into<Mapped>,
        control: impl Into<Mapped>,
        geometry: Geometry,
        peer_geometry: Geometry,
        qp: Box<dyn QueuePair>,
        options: QpOptions,
    ) -> Result<Self, EndpointError> {
        let (work, control) = (work.into(), control.into());
        if let Some(offered) = qp.offered_receives()
            && offered != options.posted_receives
        {
            return Err(EndpointError::PostedReceives {
                qp: qp.name(),
                options: options.posted_receives,
                offered,
            });
        }
        let limits = qp.limits();
        let gate = if options.ungated {
            #[cfg(feature = "test-ungated")]
            {
                Gate::without_receive_credit(limits)
            }
            #[cfg(not(feature = "test-ungated"))]
            return Err(EndpointError::Ungated);
        } else {
            Gate::new(limits)
        };
        let knows_receives = qp.knows_receives();
        let g = &geometry;
        let receives = (abi::PUSHGATE_RECV_WORDS as usize) << g.rx_log;
        let held = 1usize << g.rx_log;
        Ok(Endpoint {
            wqes: Words::readable(&work, abi::PUSHGATE_WORK_RING as usize, 8 << g.slots_log),
            consumed: Words::readable(&work, abi::PUSHGATE_WORK_CONSUMED as usize, 1),
            receives: Words::readable(&work, g.work_receives_offset(), receives),
            control_line: Words::writable(&control, abi::PUSHGATE_CTL_CREDIT as usize, 3),
            sleeping: Words::writable(&control, abi::PUSHGATE_CTL_SLEEPING as usize, 1),
            signals: Words::writable(&control, abi::PUSHGATE_CTL_SIGNALS as usize, g.signals as usize),
            cq: Words::writable(&control, g.control_cq_offset(), 2 << g.cq_log),
            rx: Words::writable(&control, g.control_rx_offset(), 8 << g.rx_log),
            landing: control.address() + g.control_landing_offset(),
            staging: Staging::new(g.slots_log, g.window_log),
            gate,
            session: Session::new(0),
            qp,
            wqe: [0; 8],
            pending: false,
            undecided: false,
            knows_receives,
            stalled: false,
            credit: 0,
            delivered_slots: 0,
            cq_head: 0,
            rx_head: 0,
            consumed_seen: 0,
            receives_taken: 0,
            buffers: VecDeque::with_capacity(if options.posted_receives { held } else { 0 }),
            in_place: VecDeque::with_capacity(held),
            in_place_units: 0,
            // No count yet: the first tick begins the time.
            progress: (u64::MAX, 0),
            slow: options.slow_ns == 0,
            next_scan: 0,
            landing_held: VecDeque::with_capacity(held),
            landing_head: 0,
            landing_tail: 0,
            waiting: None,
            moving: VecDeque::with_capacity(MOVES),
            moved_here: 0,
            inline: Box::new([[0; abi::PUSHGATE_INLINE_SEND as usize]; MOVES]),
            next_inline: 0,
            acknowledged: PeerCounts::default(),
            regions: Regions::new(options.key_seed),
            counters: Counters::default(),
            geometry,
            peer_geometry,
            options,
            interrupt: None,
            broken: None,
            over: false,
            shown: false,
            settling: None,
            copies: false,
            write_combined: control.is_io_memory(),
            _control: control,
        })
    }

    /// The device rings this whenever it has published something, instead of looking
    /// whether the engine sleeps.
    pub fn with_interrupt(mut self, interrupt: Option<Box<dyn Interrupt>>) -> Self {
        self.interrupt = interrupt;
        self
    }

    /// `tell` is called with the cause if the transport breaks, once: the transport may be
    /// unable to tell the peer of its own end. Called on the engine's thread, so it must not
    /// wait.
    pub fn with_broken(mut self, tell: TellBroken) -> Self {
        self.broken = Some(tell);
        self
    }

    /// The device sees its own segments alone, not where the transport puts what comes:
    /// a SEND's payload is copied into the landing ring, which lies in the control segment.
    pub fn with_inbound_copied(mut self) -> Self {
        self.copies = true;
        self
    }

    /// Rank of this side.
    pub fn rank(&self) -> u32 {
        self.geometry.rank
    }

    /// Rank of the other side.
    pub fn peer(&self) -> u32 {
        self.options.peer
    }

    /// Counts so far.
    pub fn counters(&self) -> Counters {
        let (bounced, bounced_bytes) = self.qp.bounced();
        Counters { bounced, bounced_bytes, ..self.counters }
    }

    /// Registers memory that WQEs of this side and records of the peer may name.
    pub fn add_region(&mut self, memory: RegionMemory, bytes: u64) -> Option<u32> {
        let key = self.regions.add(memory.clone(), bytes)?;
        self.qp.add_region(key, &memory, bytes);
        Some(key)
    }

    /// Whether SENDs may go out of regions of this side.
    pub fn region_sends(&self) -> RegionSends {
        self.qp.region_sends()
    }

    /// Whether our RDMA device has registered a region.
    pub fn is_registered(&self, key: u32) -> bool {
        self.qp.registers(key)
    }

    /// True once the peer's engine knows of all regions that it may write itself,
    /// or never will.
    pub fn regions_told(&self) -> bool {
        self.session.status().is_some() || self.qp.regions_told()
    }

    /// True while messages out of a region, or copies to it, are under way: its memory
    /// must stay. Of a queue pair that has failed every region is in use until the device was shown the
    /// end: over RDMA until the RDMA device has stopped. Behind that a peer on this host may still read
    /// in the region, but shows nothing that it has read.
    pub fn region_in_use(&mut self, key: u32) -> bool {
        self.moving.iter().any(|m| m.region() == Some(key))
            || match self.session.status() {
                None => self.qp.region_in_use(key, self.session.received()),
                // Until then the transport may touch any of them.
                Some(_) => !self.shown,
            }
    }

    /// Removes a region that `add_region` registered. False if the key names none, or one that is in use.
    pub fn remove_region(&mut self, key: u32) -> bool {
        if self.region_in_use(key) {
            return false;
        }
        // The transport first: it may have the memory registered.
        self.qp.remove_region(key);
        self.regions.remove(key)
    }

    /// Puts what this CPU stored to the control segment before what it stores next, and out of its
    /// buffers. On x86 a release store does not do that where the memory is write-combining.
    #[inline(always)]
    fn drain_stores(&self) {
        if self.write_combined {
            drain_stores();
        }
    }

    /// One pass: whatever can be done now, at most 64 records each way.
    /// True if anything was.
    #[inline]
    pub fn poll(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        if self.over {
            return self.poll_ended(mover);
        }
        let mut work = self.receive(mover);
        work |= self.acknowledge();
        work |= self.progress();
        // What was just ended posts nothing more: nobody would complete it.
        if self.session.status().is_none() {
            work |= self.transmit();
        }
        match self.qp.notify() {
            Ok(rang) => self.counters.rings += rang as u64,
            Err(status) => self.broke(status),
        }
        if work {
            // An engine that finds no more might leave them in its buffers for long.
            self.drain_stores();
        }
        work
    }

    /// A pass over a queue pair that has ended: waits for what may still touch memory, then shows the end.
    /// True if anything was done.
    #[cold]
    fn poll_ended(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        let moved = self.advance(mover);
        self.end() | moved
    }

    /// True while the queue pair has ended and the device was not shown that yet. What this waits for
    /// wakes no engine.
    #[inline]
    pub fn is_ending(&self) -> bool {
        self.over && !self.shown
    }

    /// True if a pass would find work; changes nothing. For the last look
    /// before sleeping.
    pub fn has_work(&self) -> bool {
        if self.over {
            return !self.shown;
        }
        let counts = self.qp.peer_counts();
        let count = |word: u64| count_of(word, self.session.epoch()).unwrap_or(0);
        let (sent, received) = (self.staging.messages(), self.session.received());
        (!self.pending && self.published())
            || (self.waiting.is_none() && self.qp.has_inbound())
            || !self.moving.is_empty()
            || ring::observe(&self.consumed[0]) != self.consumed_seen
            || (self.options.posted_receives && self.next_buffer().is_some())
            || Status::from_word(self.qp.peer_status()).is_some()
            || (received < sent && count(counts.received) > received)
            || (self.staging.outstanding() > 0 && count(counts.released) > self.session.released())
            || (self.pending && count(counts.granted) > self.gate.granted())
            || (self.undecided
                && Record::decode(&self.wqe).is_ok_and(|r| !matches!(self.check(&r), Ok(false))))
    }

    /// The words that tell others that this engine sleeps.
    pub fn sleeping(&self) -> impl Iterator<Item = &AtomicU64> {
        [Some(&self.sleeping[0]), self.qp.sleeping()].into_iter().flatten()
    }

    /// Now and then, with the time: looks for a slot that is never published,
    /// and for the peer's end.
    pub fn tick(&mut self, now: u64) {
        if self.over {
            return;
        }
        if let Some(status) = self.peers_end() {
            self.fail(status);
            return;
        }
        if self.in_place.is_empty() || self.consumed_seen != self.progress.0 {
            self.progress = (self.consumed_seen, now);
        }
        if let Some(status) = self.qp.check(now) {
            self.broke(status);
            return;
        }
        self.slow = now - self.progress.1 >= self.options.slow_ns;
        // A look at the whole ring, so only a few times within the limit.
        if now < self.next_scan {
            return;
        }
        let hole = !self.pending && self.hole();
        if self.staging.stuck(hole, now, self.options.stuck_ns) {
            self.counters.stuck += 1;
            let detail = self.staging.head() as u32;
            tracing::warn!(rank = self.rank(), slot = detail, "a WQE slot was reserved and never published");
            self.fail(Status { detail, ..Status::new(abi::PUSHGATE_STUCK) });
        }
        let limit = self.options.stuck_ns;
        let soon = now.saturating_add(limit / 8);
        self.next_scan = self.staging.stuck_at(limit).map_or(soon, |at| at.min(soon));
    }

    /// How the peer ended, if it has.
    fn peers_end(&self) -> Option<Status> {
        let status = Status::from_word(self.qp.peer_status())?;
        // It names the culprit, which may be a third rank.
        Some(Status { rank: status.rank.or(Some(self.options.peer)), ..status.checked() })
    }

    /// True if a later slot is written while the head is not.
    fn hole(&self) -> bool {
        let (head, log) = (self.staging.head(), self.staging.slots_log());
        let room = (1 << log) - self.staging.outstanding();
        !ring::touched(&self.wqes, head, log) && (1..room).any(|i| ring::touched(&self.wqes, head + i, log))
            || ring::touched(&self.wqes, head, log)
                && matches!(ring::look(&self.wqes, head, log), Look::Empty)
    }

    /// The transport failed.
    #[cold]
    fn broke(&mut self, status: Status) {
        let rnr = (abi::PUSHGATE_LINK_DOWN as u8, abi::PUSHGATE_DOWN_RNR);
        let first = self.session.status().is_none();
        self.counters.rnr += (first && (status.code, status.detail) == rnr) as u64;
        // Before the device sees the end, behind which a program may leave, and say so to the peer.
        if first && let Some(tell) = self.broken.take() {
            tell(Status { rank: status.rank.or(Some(self.rank())), ..status });
        }
        self.fail(status);
    }

    /// Ends the queue pair: the device's waits end with `status`, messages that
    /// were not retired complete with it, the peer is told. The device sees the end when nothing
    /// that is under way can touch memory any more: later passes see to that.
    pub fn fail(&mut self, status: Status) {
        if self.over {
            return;
        }
        self.session.fail(status);
        self.stop();
        // The peer names the culprit itself if it is another rank; else us.
        let told = Status { rank: status.rank.or(Some(self.rank())), ..status };
        self.qp.set_status(told.word());
        self.end();
        // If that fails too, the peer hears of it otherwise, or at its limit.
        let _ = self.qp.notify();
    }

    /// Begins nothing any more. Of the copies under way only those that a device makes go on.
    fn stop(&mut self) {
        self.over = true;
        self.moving.retain_mut(|m| m.movement.cut());
        self.settling.get_or_insert_with(Instant::now);
    }

    /// Shows the end to the device once the transport has stopped and the copies under way have ended,
    /// or [`COPIES`] have passed. True if it was shown now.
    #[cold]
    fn end(&mut self) -> bool {
        if self.shown {
            return false;
        }
        // P3, P5: a completion says that its source may be written again, and an end that posted buffers
        // and regions are the device's again.
        let copies = !self.moving.is_empty() && self.settling.is_some_and(|since| since.elapsed() < COPIES);
        if !self.qp.stopped() || copies {
            return false;
        }
        self.shown = true;
        // A side that has left has no status of its own.
        self.show_end(self.session.status().unwrap_or(Status::new(abi::PUSHGATE_ABORTED)));
        true
    }

    /// Completes what was not retired, then writes the status.
    fn show_end(&mut self, status: Status) {
        let (cq, head, log) = (&self.cq, &mut self.cq_head, self.geometry.cq_log);
        self.staging.retire(u64::MAX, |c| {
            complete(cq, head, log, c.wr_id, c.opcode, status.code, c.length);
        });
        // What was published and not yet released completes as well, so that a
        // device that polls its CQ gets an answer to each.
        let (first, slots) = (self.staging.head(), 1 << self.staging.slots_log());
        for slot in first..first + slots {
            let Look::Ready(words) = ring::look(&self.wqes, slot, self.staging.slots_log()) else { break };
            if let Ok(r) = Record::decode(&words)
                && r.has(Record::SIGNALED)
            {
                complete(cq, head, log, r.id, r.opcode as u8, status.code, r.length);
            }
        }
        // After the completions: who sees the end and looks at the CQ once more
        // finds them all.
        self.drain_stores();
        self.control_line[STATUS].store(status.word(), Ordering::Release);
        self.drain_stores();
    }

    /// Of a queue pair that was closed or has failed: true when nothing of its transport can touch
    /// memory any more, and the device was told. Asked again and again until then.
    pub fn is_gone(&mut self) -> bool {
        self.end();
        self.shown
    }

    /// Finishes copies under way, so that their memory can go. False if a device
    /// does not end them within `limit`: then the memory must stay.
    pub fn settle(&mut self, mover: &mut Option<Box<dyn Mover>>, limit: Duration) -> bool {
        let start = Instant::now();
        loop {
            let moved = self.advance(mover);
            if self.moving.is_empty() {
                break;
            }
            self.settling.get_or_insert(start);
            if start.elapsed() > limit {
                return false;
            }
            if !moved {
                std::thread::yield_now();
            }
        }
        self.settling = None;
        self.acknowledge();
        true
    }

    /// The engine stops. Whoever still waits here is told; the peer only if it
    /// still has something to wait for, for a peer that is done need not hear
    /// that we left first. The device sees the end as behind [`Endpoint::fail`]. Closing again does nothing.
    pub fn close(&mut self) {
        if self.over {
            return;
        }
        if self.staging.outstanding() > 0 || self.pending || self.published() {
            // The completions first, then the status, then the peer.
            self.fail(Status::new(abi::PUSHGATE_ABORTED));
            return;
        }
        self.stop();
        self.qp.leave();
        let _ = self.qp.notify();
        self.end();
    }

    /// True if the device has published a WQE that was not looked at yet.
    fn published(&self) -> bool {
        self.staging.has_room()
            && !matches!(ring::look(&self.wqes, self.staging.head(), self.staging.slots_log()), Look::Empty)
    }

    /// True while a device copies for this queue pair: the memory must stay.
    pub fn device_copies(&self) -> bool {
        self.moving.iter().any(|m| m.movement.on_device())
    }

    /// The engine is about to sleep. True if there is something to look for first.
    pub fn prepare_sleep(&mut self) -> bool {
        if self.over {
            return false;
        }
        // BELL: armed before the engine's last look at the ring. A ring behind a WQE that
        // this look did not see comes after that, and wakes.
        let rang = self.interrupt.as_mut().is_some_and(|i| !i.arm());
        self.qp.prepare_sleep() || rang
    }

    /// What the peer rings to wake a sleeping engine.
    pub fn bell(&self) -> Option<&Bell> {
        // Nothing that the peer of one that has ended says is waited for.
        self.qp.bell().filter(|_| !self.over)
    }

    /// Descriptors that wake a sleeping engine, besides the bells. True if those of
    /// the transport wake only for a while ([`QueuePair::wakes`]).
    pub fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) -> bool {
        if self.over {
            return false;
        }
        fds.extend(self.interrupt.as_ref().map(|i| i.fd()));
        let before = fds.len();
        self.qp.wakes(fds);
        fds.len() > before
    }

    /// The engine woke, or did not sleep after all.
    pub fn woken(&mut self) {
        self.counters.interrupts += self.interrupt.as_mut().is_some_and(|i| i.disarm()) as u64;
        self.qp.woken();
    }

    /// How it ended, if it has.
    pub fn status(&self) -> Option<Status> {
        self.session.status()
    }

    // ------------------------------------------------------------- producer

    #[inline]
    fn transmit(&mut self) -> bool {
        let mut n = 0;
        while n < BATCH {
            let new = !self.pending;
            if new {
                if !self.staging.has_room() {
                    break;
                }
                let (head, log) = (self.staging.head(), self.staging.slots_log());
                match ring::look_into(&self.wqes, head, log, &mut self.wqe) {
                    Found::Empty => break,
                    Found::Ready => {}
                    Found::Torn => {
                        self.refuse(&Malformed::Lap);
                        return true;
                    }
                }
            }
            // A pending one is decoded again: that is cheaper than to keep it.
            let record = match Record::decode(&self.wqe) {
                Ok(record) => record,
                Err(e) => {
                    self.refuse(&e);
                    return true;
                }
            };
            if new || self.undecided {
                match self.check(&record) {
                    Ok(decided) => self.undecided = !decided,
                    Err(e) => {
                        self.refuse(&*e);
                        return true;
                    }
                }
                if self.undecided {
                    self.pending = true;
                    if record.opcode == Opcode::Send && !std::mem::replace(&mut self.stalled, true) {
                        self.counters.stall_receive += 1;
                    }
                    break;
                }
            }
            if record.opcode == Opcode::Nop {
                self.staging.release(&record);
                self.counters.nops += 1;
                n += 1;
                continue;
            }
            let need = Need { bytes: record.length, receive: record.opcode == Opcode::Send };
            let sequence = self.staging.messages();
            let qp = &mut self.qp;
            let wqe = &self.wqe;
            let posted = self.gate.reserve(need).map(|permit| qp.post_send(permit, sequence, &record, wqe));
            match posted {
                Ok(Ok(())) => (self.pending, self.stalled) = (false, false),
                Ok(Err(status)) => {
                    self.broke(status);
                    return true;
                }
                Err(stall) => {
                    self.pending = true;
                    // Once for each message, not for each look.
                    if !std::mem::replace(&mut self.stalled, true) {
                        *match stall {
                            Stall::SendQueue => &mut self.counters.stall_send_queue,
                            Stall::CompletionQueue => &mut self.counters.stall_completion_queue,
                            Stall::Receive => &mut self.counters.stall_receive,
                            Stall::Bytes => &mut self.counters.stall_bytes,
                        } += 1;
                    }
                    break;
                }
            }
            self.staging.release(&record);
            self.counters.released += 1;
            self.counters.released_bytes += record.length as u64;
            n += 1;
        }
        n != 0
    }

    /// What the codec could not check: place, source region, signal. The peer
    /// checks what only it knows: rkey and bounds. False if the peer has yet to say
    /// whether it may be sent.
    #[inline]
    fn check(&self, r: &Record) -> Result<bool, Box<dyn std::error::Error>> {
        self.staging.check(r)?;
        if r.has(Record::REGION) {
            self.regions.resolve(r.place, r.place_offset, r.length)?;
            match self.qp.takes_region(r) {
                RegionSends::Yes => {}
                RegionSends::Unknown => return Ok(false),
                RegionSends::No(why) => {
                    let name = self.qp.name();
                    return Err(format!("a payload in a region, on queue pair `{name}`: {why}").into());
                }
            }
        }
        if self.knows_receives && r.opcode == Opcode::Send {
            match self.qp.receive_for(r) {
                None => return Ok(false),
                Some(room) if room < r.length => {
                    let bytes = r.length;
                    return Err(format!(
                        "{bytes} bytes for a receive of the peer that takes {room}: send less, or let it post a \
                         longer one"
                    )
                    .into());
                }
                Some(_) => {}
            }
        }
        if (r.opcode == Opcode::Signal || r.has(Record::WITH_SIGNAL))
            && r.signal >= self.peer_geometry.signals
        {
            return Err(format!("signal {} of {}", r.signal, self.peer_geometry.signals).into());
        }
        Ok(true)
    }

    #[cold]
    fn refuse(&mut self, why: &dyn std::fmt::Display) {
        self.counters.refused += 1;
        let slot = self.staging.head();
        tracing::warn!(rank = self.rank(), peer = self.peer(), slot, "WQE refused: {why}");
        let status =
            Status { rank: Some(self.rank()), detail: slot as u32, ..Status::new(abi::PUSHGATE_REFUSED) };
        self.fail(status);
    }

    /// Takes in the peer's counts; gives back what they free.
    #[inline]
    fn progress(&mut self) -> bool {
        if self.session.status().is_some() {
            return false;
        }
        let counts = self.qp.peer_counts();
        let sent = self.staging.messages();
        let (released, received) = match self.session.peer_counts(sent, counts.released, counts.received) {
            Ok(c) => c,
            Err(e) => {
                self.violated(&e);
                return true;
            }
        };
        let mut work = false;
        if let Some(granted) = count_of(counts.granted, self.session.epoch()) {
            match self.gate.grant(granted) {
                Ok(new) => work |= new,
                Err(e) => {
                    self.violated(&e);
                    return true;
                }
            }
        }
        match self.qp.poll_send(received) {
            Ok(0) => {}
            Ok(completed) => self.gate.complete(completed),
            Err(status) => {
                self.broke(status);
                return true;
            }
        }
        if self.staging.outstanding() > 0 {
            let (cq, head, log) = (&self.cq, &mut self.cq_head, self.geometry.cq_log);
            let ok = abi::PUSHGATE_OK as u8;
            let retired = self.staging.retire(released, |c| {
                complete(cq, head, log, c.wr_id, c.opcode, ok, c.length);
            });
            if retired.messages > 0 {
                self.gate.retire(retired.bytes);
                self.counters.retired += retired.messages;
            }
            let credit = self.staging.credit_word();
            if credit != self.credit {
                self.credit = credit;
                // CREDIT: the peer's last read of the place, seen through its
                // count, before the device may write there again.
                self.drain_stores();
                ring::advance(&self.control_line[CREDIT], credit);
                work = true;
            }
        }
        let delivered = self.staging.deliver(received);
        if delivered != self.delivered_slots {
            self.delivered_slots = delivered;
            self.drain_stores();
            ring::advance(&self.control_line[DELIVERED], delivered);
            work = true;
        }
        work
    }

    #[cold]
    fn violated(&mut self, why: &dyn std::fmt::Display) {
        self.blame(self.options.peer, why);
    }

    /// Refuses what a side's device or engine wrote, and names that side.
    #[cold]
    fn blame(&mut self, culprit: u32, why: &dyn std::fmt::Display) {
        self.counters.refused += 1;
        let (rank, peer) = (self.rank(), self.peer());
        tracing::warn!(rank, peer, "rank {culprit} broke the protocol: {why}");
        self.fail(Status { rank: Some(culprit), ..Status::new(abi::PUSHGATE_REFUSED) });
    }

    // ------------------------------------------------------------- receiver

    #[inline]
    fn receive(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        let mut work = self.reap();
        // Then other queue pairs have their turn.
        let enough = self.moved_here + SLICE as u64;
        if !self.moving.is_empty() {
            work |= self.advance(mover);
        }
        let mut n = 0;
        // Nothing is delivered behind a message that was not: a copy that failed,
        // a count that cannot be.
        while n < BATCH && self.moved_here < enough && self.session.status().is_none() && self.takes_another()
        {
            n += 1;
            let outcome = match self.waiting.is_some() {
                true => self.retry(mover),
                false => self.take_in(mover),
            };
            match outcome {
                Ok(Outcome::Taken) => work = true,
                Ok(Outcome::Nothing | Outcome::Waits) => break,
                Err(why) => {
                    self.broken_by(why);
                    return true;
                }
            }
        }
        work
    }

    /// The message that waits.
    #[cold]
    #[inline(never)]
    fn retry(&mut self, mover: &mut Option<Box<dyn Mover>>) -> Result<Outcome, Why> {
        let Some(w) = self.waiting.take() else { return Ok(Outcome::Nothing) };
        let Waiting { placed, sequence, .. } = w;
        let outcome = self.deliver(Arrived { record: &w.record, words: &w.words, placed, sequence }, mover);
        if let Ok(Outcome::Waits) = outcome {
            self.waiting = Some(w);
        }
        outcome
    }

    /// True unless what is under way has to end first.
    #[inline(always)]
    fn takes_another(&self) -> bool {
        self.moving.len() < MOVES && self.moving.back().is_none_or(|m| m.movement.queues())
    }

    /// The next message of the transport, if there is one.
    #[inline]
    fn take_in(&mut self, mover: &mut Option<Box<dyn Mover>>) -> Result<Outcome, Why> {
        let mut words = [0; 8];
        let placed = match self.qp.poll_recv(&mut words) {
            Inbound::Empty => return Ok(Outcome::Nothing),
            Inbound::Record => false,
            Inbound::Placed => true,
            Inbound::Torn => return Err(Why::Overrun(Box::new(Malformed::Lap))),
        };
        let record = Record::decode(&words).map_err(violation)?;
        if record.opcode == Opcode::Nop {
            return Err(Why::Violated("a NOP on the link".into()));
        }
        let sequence = self.session.inbound();
        self.session.accept(record.id).map_err(|e| Why::Overrun(Box::new(e)))?;
        let outcome = self.deliver(Arrived { record: &record, words: &words, placed, sequence }, mover)?;
        if outcome == Outcome::Waits {
            self.waiting = Some(Waiting { record, words, placed, sequence });
        }
        Ok(outcome)
    }

    #[cold]
    fn broken_by(&mut self, why: Why) {
        match why {
            Why::Overrun(e) => self.overrun(&*e),
            Why::Violated(e) => self.violated(&*e),
            Why::Own(e) => self.blame(self.geometry.rank, &*e),
        }
    }

    /// The receiver's check of P4 caught something.
    #[cold]
    fn overrun(&mut self, why: &dyn std::fmt::Display) {
        self.counters.dropped += 1;
        tracing::error!(rank = self.rank(), peer = self.peer(), "overrun: {why}");
        let detail = self.session.inbound() as u32;
        self.fail(Status { rank: Some(self.options.peer), detail, ..Status::new(abi::PUSHGATE_OVERRUN) });
    }

    /// Takes in what the device gave back and posted.
    #[inline]
    fn reap(&mut self) -> bool {
        let mut work = false;
        // CONSUMED: the device's reads of the places before they are given back.
        let consumed = ring::observe(&self.consumed[0]);
        if consumed != self.consumed_seen {
            if consumed < self.consumed_seen || consumed > self.rx_head {
                let delivered = self.rx_head;
                let why = format_args!("{consumed} receive records released of {delivered}");
                self.blame(self.rank(), &why);
                return true;
            }
            self.consumed_seen = consumed;
            while self.in_place.front().is_some_and(|h| h.rx < consumed) {
                self.in_place_units -= self.in_place.pop_front().expect("it is there").units;
            }
            while self.landing_held.front().is_some_and(|h| h.rx < consumed) {
                self.landing_tail += self.landing_held.pop_front().expect("it is there").units;
            }
            work = true;
        }
        if self.options.posted_receives {
            while let Some((buffer, words)) = self.next_buffer() {
                self.buffers.push_back(buffer);
                self.qp.receive_posted(buffer.number, words);
                self.receives_taken += 1;
                work = true;
            }
        }
        work
    }

    /// The next posted receive, if it is complete. At most as many ahead of
    /// what the device released as the ring has slots.
    fn next_buffer(&self) -> Option<(Buffer, [u64; 4])> {
        let log = self.geometry.rx_log;
        if self.receives_taken - self.consumed_seen >= 1 << log {
            return None;
        }
        let n = abi::PUSHGATE_RECV_WORDS as usize;
        let first = (self.receives_taken & ((1 << log) - 1)) as usize * n;
        let lap = lap_of(self.receives_taken, log);
        let word = |i: usize| {
            let w = self.receives[first + i].load(Ordering::Relaxed);
            ((w >> abi::PUSHGATE_LAP_SHIFT) as u8 == lap).then_some(w)
        };
        let w0 = word(0)?;
        // RECEIVE: the device's use of the buffer before ours.
        fence(Ordering::Acquire);
        let w = [w0, word(1)?, word(2)?, word(3)?];
        let buffer = Buffer {
            number: self.receives_taken,
            key: w[0] as u32,
            offset: w[1] & abi::PUSHGATE_DATA_MASK,
            length: w[2] as u32,
            tag: w[3] as u32,
        };
        Some((buffer, w))
    }

    /// Puts one inbound message where it belongs, or begins to.
    #[inline]
    fn deliver(&mut self, a: Arrived<'_>, mover: &mut Option<Box<dyn Mover>>) -> Result<Outcome, Why> {
        let r = a.record;
        let lands = match r.opcode {
            Opcode::Put => true,
            Opcode::Send => self.options.posted_receives,
            _ => false,
        };
        if a.placed && !lands {
            return Err(Why::Violated("a payload came alone for which there is no place".into()));
        }
        match r.opcode {
            Opcode::Send => {
                if self.options.posted_receives {
                    return self.deliver_to_buffer(a, mover);
                }
                if self.rx_head - self.consumed_seen >= 1 << self.geometry.rx_log {
                    return Err(Why::Overrun("no receive was granted for this message".into()));
                }
                if !self.moving.is_empty() {
                    return Ok(Outcome::Waits);
                }
                if r.has(Record::INLINE) {
                    ring::publish(&self.rx, self.rx_head, self.geometry.rx_log, a.words);
                    self.delivered(r);
                    self.rx_head += 1;
                    return Ok(Outcome::Taken);
                }
                self.deliver_placed(a, mover)
            }
            Opcode::Put => {
                let dst = self.regions.resolve(r.rkey, r.remote_offset, r.length).map_err(violation)?;
                if r.has(Record::WITH_SIGNAL) && r.signal >= self.geometry.signals {
                    return Err(Why::Violated("signal out of range".into()));
                }
                if a.placed {
                    return self.deliver_placed_put(r, dst, mover);
                }
                self.begin(a, Landed::Region, dst, mover)
            }
            Opcode::Signal => {
                if r.signal >= self.geometry.signals {
                    return Err(Why::Violated("signal out of range".into()));
                }
                if !self.moving.is_empty() {
                    return Ok(Outcome::Waits);
                }
                self.signal(r);
                self.delivered(r);
                Ok(Outcome::Taken)
            }
            Opcode::Nop => unreachable!("refused before"),
        }
    }

    /// A PUT whose payload the transport has written to its region.
    fn deliver_placed_put(
        &mut self,
        r: &Record,
        dst: Stretch,
        mover: &mut Option<Box<dyn Mover>>,
    ) -> Result<Outcome, Why> {
        if self.written(r.rkey, dst, mover)? == Outcome::Waits {
            return Ok(Outcome::Waits);
        }
        if r.has(Record::WITH_SIGNAL) {
            self.signal(r);
        }
        self.delivered(r);
        Ok(Outcome::Taken)
    }

    /// The transport says that it has written to a region of ours: whether it could,
    /// and that our device sees it.
    fn written(
        &mut self,
        key: u32,
        dst: Stretch,
        mover: &mut Option<Box<dyn Mover>>,
    ) -> Result<Outcome, Why> {
        if !self.qp.offers(key) {
            return Err(Why::Violated("it wrote to a region that was not offered to its device".into()));
        }
        if !self.moving.is_empty() {
            return Ok(Outcome::Waits);
        }
        if let (Stretch::Device(_), false) = (dst, self.options.reader_flushes) {
            // P3: an RDMA device's writes to another device are not ordered with ours to
            // host memory.
            let no_mover = || Why::Own("no mover to flush the device's memory with".into());
            let mover = mover.as_deref_mut().ok_or_else(no_mover)?;
            mover.flush().map_err(|e| Why::Own(Box::new(e)))?;
        }
        self.counters.placed += 1;
        Ok(Outcome::Taken)
    }

    /// A SEND whose payload lies in the peer's window or region: handed over in
    /// place, or copied to the landing ring.
    fn deliver_placed(&mut self, a: Arrived<'_>, mover: &mut Option<Box<dyn Mover>>) -> Result<Outcome, Why> {
        let r = a.record;
        self.source(a)?;
        if self.landing_head == self.landing_tail {
            // Nothing lies there: what is longer than half of it must find it whole.
            self.landing_head = self.landing_head.next_multiple_of(1 << self.geometry.landing_log);
            self.landing_tail = self.landing_head;
        }
        let units = r.length.div_ceil(abi::PUSHGATE_UNIT) as u64;
        let ring = 1u64 << self.geometry.landing_log;
        let bound = (self.options.in_place_share as u64) << self.peer_geometry.window_log >> 8;
        let readable = !self.copies && self.qp.in_place() && !r.has(Record::REGION);
        let pos = self.landing_head & (ring - 1);
        let skip = if pos + units > ring { ring - pos } else { 0 };
        let fits = self.landing_head + skip + units - self.landing_tail <= ring;
        // Nothing held: in place whatever its size, for it costs the sender
        // nothing that it does not cost already.
        let much = self.in_place_units > 0 && self.in_place_units + units > bound;
        if readable && !(much && self.slow && fits) {
            let w = Record { flags: 0, ..*r }.encode(0);
            ring::publish(&self.rx, self.rx_head, self.geometry.rx_log, &w);
            self.in_place.push_back(Held { rx: self.rx_head, sequence: a.sequence, units: r.units() as u64 });
            self.in_place_units += r.units() as u64;
            self.delivered(r);
            self.rx_head += 1;
            return Ok(Outcome::Taken);
        }
        if units > ring {
            let size = ring << abi::PUSHGATE_UNIT_LOG;
            return Err(Why::Violated(
                format!("{} bytes do not fit the landing ring of {size} bytes", r.length).into(),
            ));
        }
        if !fits {
            // The reader will give it back.
            return Ok(Outcome::Waits);
        }
        let unit = (self.landing_head + skip) & (ring - 1);
        self.landing_head += skip + units;
        self.counters.copied_out += 1;
        let dst = Stretch::Host(self.landing + ((unit as usize) << abi::PUSHGATE_UNIT_LOG));
        self.begin(a, Landed::Landing { unit, taken: skip + units }, dst, mover)
    }

    /// A SEND takes the oldest posted receive that has its tag, or takes any.
    fn deliver_to_buffer(
        &mut self,
        a: Arrived<'_>,
        mover: &mut Option<Box<dyn Mover>>,
    ) -> Result<Outcome, Why> {
        let r = a.record;
        if self.buffers.is_empty() {
            return Err(Why::Overrun("no receive was posted for this message".into()));
        }
        let matches = |b: &Buffer| b.tag == abi::PUSHGATE_ANY_TAG || b.tag == r.tag;
        let found = self.buffers.iter().position(matches);
        // What it says is compared, never followed.
        if a.placed && found.is_none_or(|at| self.buffers[at].number as u32 != r.place) {
            return Err(Why::Violated(
                format!("it wrote to receive {}, which is not the one that its message takes", r.place)
                    .into(),
            ));
        }
        let Some(at) = found else {
            // A credit says that there is a receive and not which. Its program has the
            // rest of this queue pair's life to post the right one.
            return Ok(Outcome::Waits);
        };
        let b = self.buffers[at];
        if b.length < r.length {
            // As with RDMA it is the sender that asked for what can't be done.
            return Err(Why::Violated(
                format!(
                    "{} bytes arrived for receive {}, which takes {}: post a longer one, or send less",
                    r.length, b.number, b.length
                )
                .into(),
            ));
        }
        let dst = self.regions.resolve(b.key, b.offset, r.length).map_err(|e| Why::Own(Box::new(e)))?;
        let outcome = match a.placed {
            true => self.written(b.key, dst, mover)?,
            false => self.begin(a, Landed::Buffer { number: b.number, key: b.key }, dst, mover)?,
        };
        if a.placed && outcome == Outcome::Taken {
            self.show(&Record { flags: Record::BUFFER, place: b.number as u32, place_offset: 0, ..*r });
        }
        if outcome == Outcome::Taken {
            self.buffers.remove(at);
        }
        Ok(outcome)
    }

    /// Where an inbound payload lies that is not in its record.
    fn source(&self, a: Arrived<'_>) -> Result<Source, Why> {
        let r = a.record;
        if r.has(Record::REGION) {
            return match self.qp.reads_peer() {
                true => Ok(Source::Peer(r.place_offset)),
                false => {
                    Err(Why::Violated("it sent out of a region, which we had not said we can read".into()))
                }
            };
        }
        if (r.units() as u64) * (abi::PUSHGATE_UNIT as u64) < r.length as u64 {
            return Err(Why::Violated(format!("{} bytes in {} units", r.length, r.units()).into()));
        }
        self.qp.payload(r.place, r.units()).map(Source::Mapped).ok_or_else(|| {
            let (unit, units) = (r.place, r.units());
            Why::Violated(format!("unit {unit} and {units} more leave the peer's window").into())
        })
    }

    /// Begins to move; small host copies end at once. It waits while a copy is under
    /// way that it can't stand behind: copies by a device end in the order in which
    /// they began, and nothing else may overtake them.
    fn begin(
        &mut self,
        a: Arrived<'_>,
        landed: Landed,
        dst: Stretch,
        mover: &mut Option<Box<dyn Mover>>,
    ) -> Result<Outcome, Why> {
        let src = match a.record.has(Record::INLINE) {
            // Of as many as there are copies, so the one before is out of use.
            true => Source::Mapped(self.inline[self.next_inline].as_ptr() as usize),
            false => self.source(a)?,
        };
        let queues = matches!((src, dst), (Source::Mapped(_), Stretch::Device(_)));
        if !self.moving.is_empty() && !queues {
            return Ok(Outcome::Waits);
        }
        let stage = self.stage();
        if stage.1 == 0 && matches!((src, dst), (Source::Peer(_), Stretch::Device(_))) {
            return Ok(Outcome::Waits);
        }
        if a.record.has(Record::INLINE) {
            self.inline[self.next_inline] = record::inline(a.words, a.record.opcode);
            self.next_inline = (self.next_inline + 1) % MOVES;
        }
        let movement = Move::start(src, dst, a.record.length as usize, mover.as_deref_mut(), stage)
            .map_err(|e| Why::Own(Box::new(e)))?;
        self.moving.push_back(Moving { movement, record: *a.record, sequence: a.sequence, landed });
        if self.moving.len() == 1 {
            self.advance(mover);
        }
        Ok(Outcome::Taken)
    }

    /// The longest free stretch of the landing ring, and its bytes: the stage of a copy
    /// that is alone under way, which takes nothing from the ring.
    fn stage(&self) -> (usize, usize) {
        let ring = 1u64 << self.geometry.landing_log;
        let (head, tail) = (self.landing_head & (ring - 1), self.landing_tail & (ring - 1));
        let (unit, free) = match self.landing_head - self.landing_tail {
            0 => (0, ring),
            held if held == ring => (head, 0),
            _ if head < tail => (head, tail - head),
            // What is held lies between: one stretch before it, and one behind.
            _ if tail > ring - head => (0, tail),
            _ => (head, ring - head),
        };
        let at = self.landing + ((unit as usize) << abi::PUSHGATE_UNIT_LOG);
        (at, (free as usize) << abi::PUSHGATE_UNIT_LOG)
    }

    /// Moves the bytes of `moving` on and delivers what is done, in order. True if
    /// anything was: a device's copy is only waited for. The queue pair may have
    /// failed.
    fn advance(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        let mut work = false;
        while let Some(m) = self.moving.front_mut() {
            // SAFETY: the destination was resolved in a registered region (which is not
            // removed while a copy in `moving` goes there) or in our landing ring, the source
            // in the peer's window, both mapped as long as this endpoint lives; they
            // are different mappings. What is read out of the peer's process the kernel
            // checks. The stage is free room of the landing ring: nothing else is begun
            // while it is used. The peer or its device may write the source
            // meanwhile only against P1, which spoils its own message.
            match unsafe { m.movement.advance(mover.as_deref_mut(), &*self.qp) } {
                Ok(Step::Done) => {}
                Ok(step) => return work | (step == Step::Moved),
                Err(e) => {
                    self.moving.pop_front();
                    self.cut_short(&e);
                    return true;
                }
            }
            work = true;
            let m = self.moving.pop_front().expect("it was there");
            // Behind one that failed nothing is delivered; its memory was waited for.
            if self.session.status().is_some() {
                continue;
            }
            match m.movement.reads_peer().then(|| self.end_before_read()).flatten() {
                Some(status) => self.fail(status),
                None => self.moved(&m),
            }
        }
        work
    }

    /// How the peer ended, if that may have been before a read of its process that is done.
    ///
    /// Behind its end the peer gives regions back, and their memory is used anew. So what was read
    /// is the message only if the peer had not ended when its last byte was read, and that is
    /// looked at here, after the read. P3: the peer stores its status, then (which happens after
    /// that, on whatever thread) the region is given back, then somebody writes there. If a
    /// byte that we read is one of those writes, the fence puts our load of the status after the
    /// read, and it finds the status.
    fn end_before_read(&self) -> Option<Status> {
        fence(Ordering::Acquire);
        self.peers_end()
    }

    /// A copy failed.
    #[cold]
    fn cut_short(&mut self, e: &Failed) {
        if let Failed::Peer { error, .. } = e {
            if let Some(status) = self.end_before_read() {
                // A region that was given back may be mapped no more.
                self.fail(status);
                return;
            }
            match rustix::io::Errno::from_io_error(error) {
                // Nobody reads it any more: its process is gone, or ends.
                Some(rustix::io::Errno::SRCH) => {
                    tracing::error!(rank = self.rank(), peer = self.peer(), "{e}");
                    self.fail(Status { rank: Some(self.peer()), ..Status::new(abi::PUSHGATE_PEER_LOST) });
                    return;
                }
                Some(rustix::io::Errno::NOMEM) => {}
                // It named what it does not have, or took back its leave to read.
                _ => return self.violated(e),
            }
        }
        tracing::error!(rank = self.rank(), "{e}");
        self.fail(Status { rank: Some(self.rank()), ..Status::new(abi::PUSHGATE_ABORTED) });
    }

    /// All bytes of a message are where they belong.
    fn moved(&mut self, m: &Moving) {
        let r = &m.record;
        self.counters.copies += 1;
        self.counters.copied_bytes += r.length as u64;
        if !m.movement.queues() {
            self.moved_here += r.length as u64;
        }
        let w = match m.landed {
            Landed::Region => {
                // P3: data, then signal.
                if r.has(Record::WITH_SIGNAL) {
                    self.signal(r);
                }
                self.delivered(r);
                return;
            }
            Landed::Buffer { number, .. } => {
                Record { flags: Record::BUFFER, place: number as u32, place_offset: 0, ..*r }
            }
            Landed::Landing { unit, taken } => {
                let (rx, sequence) = (self.rx_head, m.sequence);
                self.landing_held.push_back(Held { rx, sequence, units: taken });
                Record { flags: Record::LANDING, place: unit as u32, ..*r }
            }
        };
        self.show(&w);
    }

    /// Writes the next receive record.
    fn show(&mut self, r: &Record) {
        self.drain_stores();
        ring::publish(&self.rx, self.rx_head, self.geometry.rx_log, &r.encode(0));
        self.delivered(r);
        self.rx_head += 1;
    }

    #[inline(always)]
    fn delivered(&mut self, r: &Record) {
        self.counters.delivered += 1;
        self.counters.delivered_bytes += r.length as u64;
    }

    /// Signals only grow, so that writing one twice is harmless.
    #[inline]
    fn signal(&mut self, r: &Record) {
        let word = &self.signals[r.signal as usize];
        if word.load(Ordering::Relaxed) < r.signal_value {
            // SIGNAL: the data before it.
            self.drain_stores();
            ring::advance(word, r.signal_value);
        }
    }

    /// Publishes our counts, once a pass.
    #[inline]
    fn acknowledge(&mut self) -> bool {
        let open = self.moving.len() as u64 + self.waiting.is_some() as u64;
        let received = self.session.inbound() - open;
        let released = self.in_place.front().map_or(received, |h| h.sequence);
        let granted = if self.options.posted_receives {
            self.receives_taken
        } else {
            self.consumed_seen + (1 << self.geometry.rx_log)
        };
        let epoch = self.session.epoch();
        let counts = PeerCounts {
            released: count_word(epoch, released),
            received: count_word(epoch, received),
            granted: count_word(epoch, granted),
        };
        if counts == self.acknowledged || self.session.status().is_some() {
            return false;
        }
        self.acknowledged = counts;
        self.qp.acknowledge(counts);
        true
    }
}

#[cold]
fn drain_stores() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
    #[cfg(not(target_arch = "x86_64"))]
    fence(Ordering::SeqCst);
}

enum Why {
    Overrun(Box<dyn std::error::Error>),
    Violated(Box<dyn std::error::Error>),
    /// This side's own device named what it may not.
    Own(Box<dyn std::error::Error>),
}

fn violation(e: impl std::error::Error + 'static) -> Why {
    Why::Violated(Box::new(e))
}

/// Writes a CQE. Its slot was reserved by the producer together with the WQE
/// slot; one that lied about that overwrites its own completions.
#[inline]
fn complete(cq: &[AtomicU64], head: &mut u64, log: u32, wr_id: u32, opcode: u8, status: u8, length: u32) {
    let first = (*head & ((1 << log) - 1)) as usize * abi::PUSHGATE_CQE_WORDS as usize;
    let lap = (lap_of(*head, log) as u64) << abi::PUSHGATE_LAP_SHIFT;
    *head += 1;
    cq[first + 1].store(length as u64 | lap, Ordering::Relaxed);
    // COMPLETION: all of it, and what it stands for, before its first word.
    cq[first].store(
        (status as u64) << abi::PUSHGATE_CQE_STATUS_SHIFT
            | (opcode as u64) << abi::PUSHGATE_CQE_OPCODE_SHIFT
            | wr_id as u64
            | lap,
        Ordering::Release,
    );
}
