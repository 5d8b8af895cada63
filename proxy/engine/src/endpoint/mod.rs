//! One queue pair as the engine drives it. It takes WQEs out of the work segment, asks the gate, posts and retires; it
//! takes in what the peer sent, puts it where it belongs and tells the device. What decides is private state in
//! `pushgate-core`.

mod ending;
mod making;
mod receiver;
mod record;
mod recovering;
mod replacement;
mod resuming;
mod sender;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;

use crate::mover::{Move, Mover};
use pushgate_core::inbound::{Inbound, MOST_COPIES};
use pushgate_core::outbound::Outbound;
use pushgate_core::session::{Session, Status, count_of};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::record::Opcode;
use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::window::Interrupt;
use pushgate_link::prefetch;
use pushgate_link::region::{RegionMemory, Regions};
use pushgate_link::ring::Look;
use pushgate_link::segments::{ControlOfEngine, WorkAtEngine};
use pushgate_link::watch::Watch;
use pushgate_link::{Link, PeerCounts, RegionSends, Waking};

pub use self::making::{EndpointError, QpMemory, QpOptions};
use self::replacement::Recovering;
use crate::counters::Counters;
use crate::journal::Journal;

/// Records that one pass takes in each direction before the engine looks at other queue pairs.
const BATCH: u32 = 64;

/// Slots whose private state is prefetched before a turn: some cache lines; the processor notices the rest by itself.
const KEPT_AHEAD: usize = 8;

/// How long the end of a queue pair waits for copies by a device, nanoseconds. Then the end is shown all the same: a
/// device that does not end its copies must not hold up a program that waits for the end.
const COPIES: u64 = 2_000_000_000;

/// How long what a peer had sent is taken in after it has failed, nanoseconds. The peer's own messages have all ended by then, with
/// that status, but for those that it was told were done. The device hears of a failure within 100 ms (P7).
const FAILED: u64 = 50_000_000;

/// A copy under way.
struct Moving {
    movement: Move,
    /// The region that it goes to.
    region: Option<u32>,
}

/// What a queue pair has at hand for the receiver's state machine: a [`Site`](pushgate_core::inbound::Site).
struct Here {
    regions: Regions,
    qp: Box<dyn Link>,
    /// The device sees nothing of where the transport puts what comes.
    copies: bool,
}

/// Where a queue pair stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stands {
    /// Messages come and go.
    Live,
    /// The link broke, and the next one is not live yet. Nothing is begun; copies under way go on.
    Down,
    /// The peer has ended. What it sent before that is taken in and shown, also to receives that are posted only now.
    Last(Status),
    /// The queue pair has failed, or this side has left: nothing is begun any more.
    Over,
}

/// Called once with the cause when a transport breaks.
pub type TellBroken = Box<dyn FnOnce(Status) + Send>;

/// One queue pair as the engine drives it: its rings, its regions, its transport, and how it ended.
pub struct Endpoint {
    geometry: Geometry,
    peer_geometry: Geometry,
    options: QpOptions,
    // The producer's side.
    work: WorkAtEngine,
    control: ControlOfEngine,
    outbound: Outbound,
    session: Session,
    here: Here,
    /// The transport is asked for the receive that a SEND takes.
    knows_receives: bool,
    // The receiver's side.
    inbound: Inbound,
    next_scan: u64,
    moves: Moves,
    acknowledged: PeerCounts,
    counters: Counters,
    interrupt: Option<Box<dyn Interrupt>>,
    broken: Option<TellBroken>,
    recorded: record::Recorded,
    /// What a later engine goes on with if this engine dies, where one may.
    journal: Option<Journal>,
    /// SENDs that were retired.
    sends: u64,
    /// How a link that broke is replaced, where that is possible.
    recovering: Option<Box<Recovering>>,
    stands: Stands,
    /// The end was shown to the device.
    shown: bool,
    /// The time as it was passed in last, nanoseconds.
    now: u64,
}

/// Payload that this end copies to its place.
struct Moves {
    /// In the order of their messages.
    under_way: VecDeque<Moving>,
    /// Bytes that the engine itself has moved.
    here: u64,
    /// Inline payload on its way to device memory, for each copy that may be under way.
    inline: Box<[[u8; abi::PUSHGATE_INLINE_SEND as usize]; MOST_COPIES]>,
    next_inline: usize,
    /// Since when nothing but the end of the copies under way is waited for, nanoseconds.
    since: Option<u64>,
}

impl Moves {
    fn new() -> Self {
        Moves {
            under_way: VecDeque::with_capacity(MOST_COPIES),
            here: 0,
            inline: Box::new([[0; abi::PUSHGATE_INLINE_SEND as usize]; MOST_COPIES]),
            next_inline: 0,
            since: None,
        }
    }
}

impl Endpoint {
    /// Rank of this side.
    pub fn rank(&self) -> u32 {
        self.geometry.rank
    }

    /// Rank of the other side.
    pub fn peer(&self) -> u32 {
        self.options.peer
    }

    /// The counts of the queue pair so far.
    pub fn counters(&self) -> Counters {
        let (bounced, bounced_bytes) = self.here.qp.bounced();
        Counters { bounced, bounced_bytes, ..self.counters }
    }

    /// Messages that the device has posted and that the peer does not have.
    pub fn undelivered(&self) -> u64 {
        let staging = self.outbound.staging();
        let slots = staging.head()..staging.head() + (1 << staging.slots_log());
        let posted = slots.take_while(|slot| matches!(self.work.look(*slot), Look::Ready(_))).count();
        staging.messages().saturating_sub(self.session.received()) + posted as u64
    }

    /// Registers memory that WQEs of this side and records of the peer may name.
    pub fn add_region(&mut self, memory: RegionMemory, bytes: u64) -> Option<u32> {
        let key = self.here.regions.add(memory.clone(), bytes)?;
        self.here.qp.add_region(key, &memory, bytes);
        Some(key)
    }

    /// Registers memory under the key that it had in an engine that died. False if another region has that place.
    pub fn restore_region(&mut self, key: u32, memory: RegionMemory, bytes: u64) -> bool {
        let restored = self.here.regions.restore(key, memory.clone(), bytes);
        if restored {
            self.here.qp.add_region(key, &memory, bytes);
        }
        restored
    }

    /// Whether SENDs may go out of regions of this side.
    pub fn region_sends(&self) -> RegionSends {
        self.here.qp.region_sends()
    }

    /// Whether the link has something to tell the peer, or to send, that waits for the next passes.
    #[inline]
    pub fn owes(&self) -> bool {
        self.is_live() && self.here.qp.owes()
    }

    /// Whether our RDMA device has registered a region.
    pub fn is_registered(&self, key: u32) -> bool {
        self.here.qp.registers(key)
    }

    /// True once the peer's engine knows of all regions that it may write itself,
    /// or never will.
    pub fn regions_told(&self) -> bool {
        matches!(self.stands, Stands::Last(_))
            || self.session.status().is_some()
            || self.here.qp.regions_told()
    }

    /// True while messages out of a region, or copies to it, are under way: its memory
    /// must stay. Of a queue pair that has failed every region is in use until the device was shown the
    /// end: over RDMA until the RDMA device has stopped. After that a peer on this host may still read
    /// in the region, but shows nothing that it has read.
    pub fn region_in_use(&mut self, key: u32) -> bool {
        self.moves.under_way.iter().any(|m| m.region == Some(key))
            || match self.session.status() {
                None => self.here.qp.region_in_use(key, self.session.received()),
                // Until then the transport may touch any of them.
                Some(_) => !self.shown,
            }
    }

    /// Whether a device copies into a region, or registers it: neither can be told to stop.
    pub fn device_uses(&self, key: u32) -> bool {
        self.moves.under_way.iter().any(|m| m.region == Some(key) && m.movement.on_device())
            || self.here.qp.works_on_region(key)
    }

    /// Removes a region that `add_region` registered. False if the key names none, or one that is in use.
    pub fn remove_region(&mut self, key: u32) -> bool {
        if self.region_in_use(key) {
            return false;
        }
        // The transport first: it may have the memory registered.
        self.here.qp.remove_region(key);
        self.here.regions.remove(key)
    }

    /// One pass: whatever can be done now, at most 64 records each way.
    /// True if anything was.
    #[inline]
    pub fn poll(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        if self.stands != Stands::Live {
            return self.poll_stopped(mover);
        }
        let mut work = self.receive(mover);
        work |= self.acknowledge();
        work |= self.progress();
        // What was just ended, or has lost its link, posts nothing more: nobody would complete it.
        if self.stands == Stands::Live {
            work |= self.transmit();
        }
        match self.here.qp.notify() {
            Ok(rang) => self.counters.rings += rang as u64,
            Err(down) => self.broke(down),
        }
        if work {
            // An engine that finds no more might leave them in its buffers for long.
            self.control.drain_stores();
            self.recorded.worked = true;
        }
        work
    }

    /// Asks for the private state that this queue pair only points to, and for the first of the shared words that a turn
    /// needs ([`prefetch`]).
    #[inline]
    pub(crate) fn prefetch(&self) {
        prefetch::value(&*self.here.qp);
        let staging = self.outbound.staging();
        prefetch::value(staging.kept(staging.tail(), KEPT_AHEAD));
        prefetch::value(staging.kept(staging.head(), KEPT_AHEAD));
        self.work.prefetch(staging.head());
        self.control.prefetch(self.inbound.shown());
    }

    /// Asks for what [`Endpoint::tick`] needs besides this value.
    #[inline]
    pub(crate) fn prefetch_for_tick(&self) {
        prefetch::value(&*self.here.qp);
    }

    /// Asks for what the link points to: to be called once [`Endpoint::prefetch`] has had the time to fetch the link.
    #[inline]
    pub(crate) fn prefetch_link(&self) {
        self.here.qp.prefetch();
    }

    /// Watches what can give this queue pair something to do, before a pass that finds nothing. False, if more than shared
    /// words, a command or the time can.
    ///
    /// The words are added before the pass, so that what changes during the pass differs from what was seen.
    pub(crate) fn watch(&self, watch: &mut Watch) -> bool {
        watch.clear();
        let is_still = self.stands == Stands::Live
            && self.moves.under_way.is_empty()
            && !self.inbound.waits()
            && !self.outbound.is_pending();
        let watched = is_still
            && self.here.qp.watch(watch)
            && self.work.watch(
                self.outbound.staging().head(),
                self.options.posted_receives.then(|| self.inbound.next_post()).flatten(),
                watch,
            );
        if !watched {
            watch.clear();
        }
        watched
    }

    /// True while only what [`Endpoint::watch`] watches can give this queue pair something to do: its link stands.
    pub(crate) fn is_live(&self) -> bool {
        self.stands == Stands::Live
    }

    /// A pass over a queue pair that has ended, or whose link broke. True if anything was done.
    #[cold]
    fn poll_stopped(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        match self.stands {
            Stands::Down => self.poll_down(mover),
            Stands::Last(status) => self.poll_last(status, mover),
            _ => self.poll_ended(mover),
        }
    }

    /// A pass over a queue pair that has ended: waits for what may still touch memory, then shows the end.
    /// True if anything was done.
    fn poll_ended(&mut self, mover: &mut Option<Box<dyn Mover>>) -> bool {
        let moved = self.advance(mover);
        self.end() | moved
    }

    /// True while the queue pair has ended and the device was not shown that yet, or while its broken link is being
    /// stopped. What this waits for wakes no engine.
    #[inline]
    pub fn is_ending(&self) -> bool {
        match self.stands {
            Stands::Live => false,
            Stands::Down => self.is_fencing(),
            Stands::Last(_) => !self.keeps_messages(),
            Stands::Over => !self.shown,
        }
    }

    /// True if a pass would find work; changes nothing. For the last look
    /// before sleeping.
    pub fn has_work(&self) -> bool {
        match self.stands {
            Stands::Live => {}
            // What comes next is brought by a frame of the peer, by the peer's end, or by the time.
            Stands::Down => {
                return self.is_fencing() || !self.moves.under_way.is_empty() || self.peers_end().is_some();
            }
            Stands::Last(_) => return !self.keeps_messages(),
            Stands::Over => return !self.shown,
        }
        let counts = self.here.qp.peer_counts();
        let count = |word: u64| count_of(word, self.session.epoch()).unwrap_or(0);
        let (sent, received) = (self.outbound.staging().messages(), self.session.received());
        (!self.outbound.is_pending() && self.published())
            || ((!self.inbound.waits() || self.inbound.keeps_another()) && self.here.qp.has_inbound())
            || !self.moves.under_way.is_empty()
            || self.work.consumed() != self.inbound.consumed()
            || (self.options.posted_receives && self.next_receive().is_some())
            || Status::from_word(self.here.qp.peer_status()).is_some()
            || (received < sent && count(counts.received) > received)
            || (self.outbound.staging().outstanding() > 0 && count(counts.released) > self.session.released())
            || (self.outbound.is_pending() && count(counts.granted) > self.outbound.gate().granted())
            || (self.outbound.is_undecided()
                && self.outbound.record().is_ok_and(|r| {
                    !matches!(self.check(&r), Ok(false))
                        || r.opcode == Opcode::Send && self.here.qp.may_learn_receives(r.tag)
                }))
    }

    /// The words that tell others that this engine sleeps.
    pub fn sleeping(&self) -> impl Iterator<Item = &AtomicU64> {
        let words = self.links().filter_map(|link| link.sleeping());
        std::iter::once(self.control.sleeping()).chain(words)
    }

    /// Says what time it is, nanoseconds since a start that is the caller's, and the same in each call. Limits are
    /// counted by this time: the caller passes it on every few milliseconds, and before a pass if it has slept.
    #[inline]
    pub fn set_time(&mut self, now: u64) {
        self.now = now;
    }

    /// Now and then, with the time (as [`Endpoint::set_time`] has it): looks for a slot that is never published, and
    /// for the peer's end.
    pub fn tick(&mut self, now: u64) {
        self.set_time(now);
        if self.stands != Stands::Live {
            // The next pass looks at the time.
            return;
        }
        if let Some(status) = self.peers_end() {
            self.peer_ended(status);
            return;
        }
        self.inbound.tick(now);
        self.counters.recovered += self.here.qp.several().map_or(0, |links| links.rejoined());
        if let Err(down) = self.here.qp.check(now) {
            self.broke(down);
            return;
        }
        // A look at the whole ring, so only a few times within the limit.
        if now < self.next_scan {
            return;
        }
        let hole = !self.outbound.is_pending() && self.hole();
        if self.outbound.staging_mut().stuck(hole, now, self.options.stuck_ns) {
            self.counters.stuck += 1;
            let detail = self.outbound.staging().head() as u32;
            limited!(
                warn,
                self.peer(),
                rank = self.rank(),
                slot = detail,
                "a WQE slot was reserved and never published"
            );
            self.fail(Status { detail, ..Status::new(abi::PUSHGATE_STUCK) });
        }
        let limit = self.options.stuck_ns;
        let soon = now.saturating_add(limit / 8);
        self.next_scan = self.outbound.staging().stuck_at(limit).map_or(soon, |at| at.min(soon));
    }

    /// How the peer ended, if it has.
    fn peers_end(&self) -> Option<Status> {
        let status = Status::from_word(self.here.qp.peer_status())?;
        // It names the culprit, which may be a third rank.
        Some(Status { rank: status.rank.or(Some(self.options.peer)), ..status.checked() })
    }

    /// True if a later slot is written while the head is not.
    fn hole(&self) -> bool {
        let staging = self.outbound.staging();
        let head = staging.head();
        let room = (1 << staging.slots_log()) - staging.outstanding();
        match self.work.touched(head) {
            true => self.work.look(head) == Look::Empty,
            false => (1..room).any(|i| self.work.touched(head + i)),
        }
    }

    /// True if the device has published a WQE that was not looked at yet.
    fn published(&self) -> bool {
        let staging = self.outbound.staging();
        staging.has_room() && self.work.look(staging.head()) != Look::Empty
    }

    /// True while a device copies for this queue pair: the memory must stay.
    pub fn device_copies(&self) -> bool {
        self.moves.under_way.iter().any(|m| m.movement.on_device())
    }

    /// The engine is about to sleep. True if there is something to look for first.
    pub fn prepare_sleep(&mut self) -> bool {
        if self.stands == Stands::Over {
            return false;
        }
        // BELL: armed before the engine's last look at the ring. A ring after a WQE that
        // this look did not see comes after that, and wakes.
        let rang = self.interrupt.as_mut().is_some_and(|i| !i.arm());
        (self.hears_peer() && self.here.qp.prepare_sleep()) || rang
    }

    /// Whether something that the peer says is waited for: neither of the two has ended.
    fn hears_peer(&self) -> bool {
        !matches!(self.stands, Stands::Over | Stands::Last(_))
    }

    /// What the peer rings to wake a sleeping engine.
    pub fn bells(&self) -> impl Iterator<Item = &Bell> {
        self.links().filter(|_| self.hears_peer()).filter_map(|link| link.bell())
    }

    /// The link, and those beside it where several links are one.
    fn links(&self) -> impl Iterator<Item = &dyn Waking> {
        let first: &dyn Waking = &*self.here.qp;
        std::iter::once(first).chain((1..).map_while(|n| self.here.qp.beside(n)))
    }

    /// Descriptors that wake a sleeping engine, besides the bells. True if those of
    /// the transport wake only for a while ([`Waking::wakes`]).
    pub fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) -> bool {
        if self.stands == Stands::Over {
            return false;
        }
        fds.extend(self.interrupt.as_ref().map(|i| i.fd()));
        let before = fds.len();
        if self.hears_peer() {
            self.here.qp.wakes(fds);
        }
        fds.len() > before
    }

    /// The engine woke, or did not sleep after all.
    pub fn woken(&mut self) {
        self.counters.interrupts += self.interrupt.as_mut().is_some_and(|i| i.disarm()) as u64;
        self.here.qp.woken();
    }

    /// The sender's state, for the simulator's checks.
    #[cfg(feature = "sim")]
    pub fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// The number of the RDMA queue pair that carries the link, for the simulator's faults.
    #[cfg(feature = "sim")]
    pub fn rdma_number(&self) -> Option<u32> {
        self.here.qp.number()
    }

    /// The number of the RDMA queue pair of one of several links, for the simulator's faults.
    #[cfg(feature = "sim")]
    pub fn rdma_number_of(&self, rail: usize) -> Option<u32> {
        self.here.qp.number_of(rail)
    }

    /// Counts of messages, for the simulator's checks.
    #[cfg(feature = "sim")]
    pub fn counts(&self) -> crate::counters::Counts {
        crate::counters::Counts {
            released: self.session.released(),
            received: self.session.received(),
            accepted: self.inbound.accepted(),
            sent: self.outbound.staging().messages(),
            resumed: self.recovering.as_ref().map_or(0, |r| r.resumed),
            live: self.stands == Stands::Live,
            rebuilds: self.recovering.as_ref().is_some_and(|r| r.rebuilds),
        }
    }

    /// How the queue pair ended, if it has.
    pub fn status(&self) -> Option<Status> {
        self.session.status()
    }
}
