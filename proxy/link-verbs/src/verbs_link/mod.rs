//! The link over RDMA itself, as the endpoint drives it.

mod completing;
mod ending;
mod posting;
mod regions;
mod registering;
mod renew;
mod striping;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pushgate_core::copies::Copies;
use pushgate_core::gate::{Budget, Permit};
use pushgate_core::receives::Posted;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::memory::Words;
use pushgate_link::receives::PeerReceives;
use pushgate_link::region::MAX_REGIONS;
use pushgate_link::ring::Found;
use pushgate_link::{Arrival, Link, LinkDown, PeerCounts, Renew, Telling, Waking};
use pushgate_rdma_core_sys as sys;

use self::ending::{Ending, LINGER};
use self::registering::Registrar;
use self::renew::{Agrees, Next};
use super::chain::{Chain, Echo};
use super::cm::Connection;
use super::device::Device;
use super::gid::{GidEntry, OwnAddress};
use super::health::Health;
use super::inbox::{ECHO_BYTES, ECHO_FROM, ECHO_INTO, Inbox, InboxLayout, REGION_WORDS};
use super::line::Line;
use super::looker::Watch;
use super::next::{Kept, Made, Region, Registered};
use super::objects::{Allocate, Mr, Rc};
use super::offer::Places;
use super::path::{Found as PathFound, Path};
use super::sending::Sending;
use super::setup::{OwnEnd, VerbsAway, VerbsOpening, VerbsPrepared};
use super::sge::{Remote, Sge};
use super::turn::Turn;
use super::{CONTROL_WRS, VerbsError};

/// Completions taken in one go.
const COMPLETIONS: usize = 32;

/// A region of ours that the peer may know.
struct OwnRegion {
    what: Region,
    /// Its address as the RDMA device names it.
    address: u64,
    lkey: u32,
    /// `None` while the link is replaced.
    mr: Option<Arc<Mr>>,
    /// The last work request of the link that reads it.
    used: u64,
    /// Messages of the session up to the last one out of it.
    last: u64,
    /// What `last` was at the last break: those of these messages that the peer does not have are posted again.
    before: u64,
}

impl OwnRegion {
    /// Not used yet. `mr`: its registration for the present link, if there is a link.
    fn new(what: Region, mr: Option<Arc<Mr>>) -> Self {
        let (address, lkey) = (what.place().0, mr.as_ref().map_or(0, |mr| mr.lkey));
        OwnRegion { what, address, lkey, mr, used: 0, last: 0, before: 0 }
    }
}

/// A record whose payload is on its way.
struct Held {
    cursor: u64,
    /// The WRITE of its payload.
    payload: u64,
    /// Bytes of its slot.
    bytes: usize,
}

/// A queue pair over RDMA, as the crate's first lines describe it.
pub struct VerbsLink {
    // The queue pair goes before what it uses, registrations before their memory.
    /// `None` while the link is replaced, as the registrations.
    rc: Option<Rc>,
    /// Of rdma_cm, as long as the queue pair is there.
    connection: Option<Connection>,
    registered: Option<Registered>,
    /// The next link, as far as it is made.
    next: Next,
    kept: Arc<Kept>,
    device: Arc<Device>,
    window: Sending,
    outbox: Outbox,
    inbox: Inbox,
    peer_layout: InboxLayout,
    peer_places: Places,
    /// The addresses that packets may carry as their source, and the one that they do.
    sources: Vec<OwnAddress>,
    gid: GidEntry,
    terms: Terms,
    own: Own,
    /// Of the present link.
    agrees: Agrees,
    /// The peer's status as of the last break; 0: it had none.
    peer_ended: u64,

    completions: Box<[sys::ibv_wc; COMPLETIONS]>,
    chain: Chain,
    flight: Flight,
    /// Immediate data that only woke, sent from here.
    notifies_sent: u64,
    receives_posted: u64,

    line: Line,
    path: Path,
    regions: Regions,
    receives: ToldReceives,

    health: Health,
    /// The part in the looks at the port. `None` while the link is replaced.
    watch: Option<Watch>,
    /// Where the present link has not carried anything yet, or there is none.
    turn: Option<Turn>,
    /// When the present link began, nanoseconds.
    live_since: u64,
    ending: Ending,
    /// The time as it was passed in last, nanoseconds.
    now: u64,
    /// Something completed outside of a pass.
    fresh: bool,
}

/// What this end is, over all links of its session.
struct Own {
    rank: u32,
    /// The link carries stripes beside other links of the same session.
    rail: bool,
    events: bool,
    out_log: u32,
    rx_log: u32,
    tells_receives: bool,
    regions_written: bool,
    /// How long the end waits until its last words are out, nanoseconds.
    linger: u64,
    budget: Budget,
}

/// Where records, counts and receives lie until they are written to the peer.
struct Outbox {
    words: Words,
    address: u64,
    /// For the present link.
    key: u32,
}

/// Messages of this link on their way.
struct Flight {
    /// For each message in flight, the number of its last work request; of one whose record is held
    /// back, the greatest number.
    last_wr: Box<[u64]>,
    /// Records that announce themselves, until their payload is where it belongs. Oldest first.
    held: VecDeque<Held>,
    /// For each message in flight, the receive that it has taken. Empty where the peer's receives are not known.
    taken: Box<[Option<Posted>]>,
    copies: Copies,
    /// Messages of the session before the first one over this link.
    base: u64,
    /// Messages sent over this link. A message's place among them is its cursor.
    sent: u64,
    /// Messages of this link that are done, and those reported.
    messages_done: u64,
    completed: u64,
}

/// Regions of this end, and what the peer is to be told of them.
struct Regions {
    own: BTreeMap<u32, OwnRegion>,
    registrar: Registrar,
    /// Entries of the peer's table that are to be written, and the last work request that writes one.
    due: VecDeque<(usize, [u64; REGION_WORDS])>,
    wr: u64,
    /// Keys of regions that came or went since the peer was told of the next link.
    later: BTreeSet<u32>,
}

/// The peer's receives, if it posts any, and ours: how many are in the outbox, how many of those were written to the peer,
/// and the last work request that writes some.
struct ToldReceives {
    peer: Option<PeerReceives>,
    noted: u64,
    told: u64,
    wr: u64,
}

/// At least one in this number of work requests asks for a completion: a quarter of the queue, so that enough is free while the
/// answer is on its way.
fn interval(out_log: u32) -> u64 {
    (1 << out_log >> 1).max(1)
}

/// How a link of `rc` learns that what it writes is there, if the device's WRITEs do not tell. `registered`: this end's inbox.
fn echo(rc: &Rc, peer: &Places, inbox: &SharedMemory, registered: &Mr) -> Option<Echo> {
    let own = inbox.as_ptr().as_ptr() as u64;
    (!rc.pd.device.kind.acknowledges()).then_some(Echo {
        from: Remote { address: peer.inbox.wrapping_add(ECHO_FROM as u64), key: peer.inbox_key },
        into: Sge {
            address: own + ECHO_INTO as u64,
            bytes: ECHO_BYTES as u32,
            key: registered.lkey,
            own: true,
        },
    })
}

/// What the ends keep to over all links of their session.
pub(super) struct Terms {
    pub(super) peer: u32,
    pub(super) peer_geometry: Geometry,
    /// `None`: the peer says so with its first offer.
    pub(super) peer_link_log: Option<u32>,
    /// The peer's receives name buffers.
    pub(super) peer_posts: bool,
    /// Both ends replace a link that breaks.
    pub(super) recovers: bool,
    pub(super) imm: bool,
    pub(super) ends: [u64; 2],
}

/// The inbox of links whose peer has `1 << link_log` messages on their way.
fn inbox(kept: &Kept, peer: &Geometry, link_log: u32, imm: bool) -> Inbox {
    let layout = InboxLayout::new(link_log, peer.rx_log);
    Inbox::new(&kept.inbox, layout, link_log, imm, kept.mirror.clone(), 1 << peer.window_log)
}

impl VerbsPrepared {
    /// Makes the link: with the peer's places this end is ready to send.
    pub fn join(mut self, places: Places) -> Result<VerbsLink, VerbsError> {
        let connection = self.ready_to_send(&places)?;
        let VerbsPrepared { opening, mirror, inbox, mirror_mr, inbox_mr, .. } = self;
        let VerbsOpening { end, sources, gid, psn, rc, window, window_mr, outbox_mr, outbox, .. } = opening;
        let terms = Terms {
            peer: self.peer,
            peer_geometry: self.peer_geometry,
            peer_link_log: Some(self.peer_link_log),
            peer_posts: self.peer_receives,
            recovers: self.recovers,
            imm: self.imm,
            ends: self.ends,
        };
        let agrees = Agrees { in_order: self.in_order, peer_events: self.peer_events, granted: 0 };
        let registered =
            Registered { window: window_mr, outbox: outbox_mr, mirror: mirror_mr, inbox: inbox_mr };
        let device = rc.pd.device.clone();
        let mut link = VerbsLink::new(end, device, window, [outbox, mirror, inbox], terms);
        let regions = BTreeMap::new();
        link.adopt(
            Made { listening: None, rc, connection, registered, regions, sources, gid, psn },
            places,
            agrees,
            0,
        );
        Ok(link)
    }
}

impl VerbsAway {
    /// Makes a link that has stopped, and whose next one is the first that carries. What the peer writes goes to `mirror` and
    /// to an inbox that `allocate` makes; `peer_posts`: the peer's receives name buffers.
    pub fn join(
        self,
        mirror: Arc<SharedMemory>,
        peer_geometry: Geometry,
        peer_posts: bool,
        allocate: &mut Allocate<'_>,
    ) -> Result<VerbsLink, VerbsError> {
        let VerbsAway { end, device, window, outbox } = self;
        // No peer writes into more slots than its ring has.
        let bytes = InboxLayout::new(peer_geometry.link_log, peer_geometry.rx_log).bytes;
        let inbox = Arc::new(allocate("inbox", bytes)?);
        let (peer, imm) = (peer_geometry.rank, end.config.imm);
        let (peer_link_log, recovers, ends) = (None, end.recovers, [0, 0]);
        let terms = Terms { peer, peer_geometry, peer_link_log, peer_posts, recovers, imm, ends };
        Ok(VerbsLink::new(end, device, window, [outbox, mirror, inbox], terms))
    }
}

impl VerbsLink {
    /// A link that carries nothing: the first one takes its place.
    fn new(
        end: OwnEnd,
        device: Arc<Device>,
        window: Sending,
        [outbox, mirror, in_memory]: [Arc<SharedMemory>; 3],
        terms: Terms,
    ) -> Self {
        let Terms { peer_geometry, peer_link_log, peer_posts, recovers, imm, .. } = terms;
        // The time-out of InfiniBand: 4.096 us times a power of two, within what the wire has room for.
        let timeout = 4096 << end.config.ack_timeout.min(31);
        let path_timeout = if recovers { end.config.path_timeout } else { 0 };
        let slots = 1u32 << end.link_log;
        let own = Own {
            rank: end.geometry.rank,
            rail: end.config.rail,
            events: end.config.events && imm,
            out_log: end.link_log,
            rx_log: end.geometry.rx_log,
            tells_receives: end.config.posted_receives && !end.config.rail,
            regions_written: end.config.regions_written,
            linger: (3 * timeout).clamp(LINGER.start, LINGER.end),
            budget: Budget {
                send_slots: slots,
                // The CQ was made with one for every work request of each message.
                cq_slots: slots,
                // Nothing is in flight but what the window holds.
                bytes: u64::MAX / 2,
            },
        };
        let knows_receives = peer_posts && !own.rail;
        let source = window.source.clone();
        let kept =
            Kept { end, source, outbox, mirror, inbox: in_memory, regions_written: own.regions_written };
        VerbsLink {
            window,
            registered: None,
            next: Next::Nothing,
            device,
            outbox: Outbox {
                words: Words::writable(&kept.outbox, 0, kept.outbox.len() / 8),
                address: kept.outbox.as_ptr().as_ptr() as u64,
                key: 0,
            },
            inbox: inbox(&kept, &peer_geometry, peer_link_log.unwrap_or(peer_geometry.link_log), imm),
            peer_layout: InboxLayout::new(own.out_log, own.rx_log),
            peer_places: Places::default(),
            sources: Vec::new(),
            gid: GidEntry::none(),
            terms,
            agrees: Agrees { in_order: false, peer_events: false, granted: 0 },
            peer_ended: 0,
            completions: Box::new([sys::ibv_wc::default(); COMPLETIONS]),
            chain: Chain::new(0, interval(own.out_log), None),
            own,
            flight: Flight {
                last_wr: vec![0; slots as usize].into(),
                held: VecDeque::new(),
                taken: vec![None; if knows_receives { slots as usize } else { 0 }].into(),
                copies: Copies::new(slots as usize),
                base: 0,
                sent: 0,
                messages_done: 0,
                completed: 0,
            },
            notifies_sent: 0,
            receives_posted: 0,
            line: Line::default(),
            path: Path::new(path_timeout),
            regions: Regions {
                own: BTreeMap::new(),
                registrar: Registrar::default(),
                due: VecDeque::with_capacity(16),
                wr: 0,
                later: BTreeSet::new(),
            },
            receives: ToldReceives {
                peer: knows_receives.then(|| PeerReceives::new(peer_geometry.rx_log, 0)),
                noted: 0,
                told: 0,
                wr: 0,
            },
            health: Health::default(),
            watch: None,
            turn: None,
            live_since: 0,
            ending: Ending::Stopped,
            now: 0,
            fresh: false,
            rc: None,
            connection: None,
            kept: Arc::new(kept),
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
        if !self.health.is_doubtful() && !self.flight.held.is_empty() {
            self.release_held();
            // What it says is asked for below.
            let _ = self.flush();
        }
        self.chain.done == self.chain.written && self.flight.held.is_empty()
            || self.health.has_failed()
            || self.health.is_doubtful()
            || self.has_ended()
    }

    /// Number of the queue pair at its device, for the simulator.
    #[cfg(feature = "sim")]
    pub fn number(&self) -> u32 {
        self.rc.as_ref().map_or(0, |rc| rc.number)
    }

    /// What the peer may write beside the mirror, for the simulator: the inbox's address, and in it slots, regions, receives
    /// and the end.
    #[cfg(feature = "sim")]
    pub fn inbox(&self) -> (usize, [usize; 4]) {
        self.inbox.parts()
    }

    /// Both ends replace the link when it breaks.
    pub fn recovers(&self) -> bool {
        self.terms.recovers
    }

    /// Both ends agreed on immediate data.
    pub fn immediate(&self) -> bool {
        self.terms.imm
    }

    /// Completions can wake this end's engine.
    pub fn can_wake(&self) -> bool {
        self.own.events
    }

    /// What is wrong with the way out of this host, `PUSHGATE_DOWN_*`, as of the last look.
    fn found(&self) -> Option<u32> {
        self.watch.as_ref().and_then(Watch::found)
    }

    /// Takes in whether the device has reported the queue pair's error state. A responder learns of its end so, and not by a completion.
    fn hears_of_its_end(&mut self) {
        let in_error = self.watch.as_ref().is_some_and(Watch::is_in_error);
        if !in_error || self.health.is_doubtful() {
            return;
        }
        limited!(
            error,
            self.terms.peer,
            rank = self.own.rank,
            peer = self.terms.peer,
            "the RDMA queue pair is in an error state"
        );
        self.health.doubt(abi::PUSHGATE_DOWN_WC);
    }

    /// The peer is to know of a region, if it may write there.
    fn publish(&mut self, key: u32, entry: [u64; REGION_WORDS]) {
        match self.is_renewing() {
            _ if !self.own.regions_written => {}
            true => _ = self.regions.later.insert(key),
            false => self.regions.due.push_back((key as usize & (MAX_REGIONS - 1), entry)),
        }
    }
}

impl Link for VerbsLink {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn ends(&self) -> [u64; 2] {
        self.terms.ends
    }

    fn budget(&self) -> Budget {
        self.own.budget
    }

    #[inline]
    fn post_send(
        &mut self,
        permit: Permit<'_>,
        sequence: u64,
        r: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.post_message(sequence, r, words)?;
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
        self.flight.copies.received(received, self.chain.done);
        // A slot of the peer's inbox is free when the peer has taken its message, one
        // of our send queue when that has completed.
        let completed = self.flight.messages_done.min(received.saturating_sub(self.flight.base));
        let n = completed - self.flight.completed;
        self.flight.completed = completed;
        Ok(n as u32)
    }

    #[inline]
    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        let mut found = self.inbox.look(words);
        if found == Found::Empty && self.terms.imm {
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

    fn stopped(&mut self, now: u64) -> bool {
        self.now = self.now.max(now);
        self.gives_next_up() && self.move_to_the_end() && self.ends_registering()
    }

    fn renews(&mut self) -> Option<&mut dyn Renew> {
        self.terms.recovers.then_some(self)
    }

    #[cfg(feature = "sim")]
    fn number(&self) -> Option<u32> {
        self.rc.as_ref().map(|rc| rc.number)
    }

    #[inline]
    fn notify(&mut self) -> Result<bool, LinkDown> {
        if !self.flight.held.is_empty() {
            self.release_held();
        }
        if !self.regions.registrar.is_done() {
            self.go_on_registering();
        }
        let untold = self.receives.told != self.receives.noted;
        if self.line.is_due() || untold || !self.regions.due.is_empty() {
            self.control();
        }
        self.flush()?;
        Ok(false)
    }

    fn bounced(&self) -> (u64, u64) {
        self.window.bounced
    }

    fn check(&mut self, now: u64) -> Result<(), LinkDown> {
        self.now = self.now.max(now);
        if self.health.has_failed() || self.health.is_deserted() {
            return self.health.healthy();
        }
        if self.chain.done < self.chain.written {
            // A work request that failed completes though nobody asked.
            self.fresh |= self.poll_cq();
        }
        if !self.health.is_due(now) {
            return Ok(());
        }
        let ended = self.connection.as_ref().is_some_and(Connection::has_ended);
        if ended && !self.inbox.peer_left() && !self.has_told_its_end() {
            self.health.doubt(abi::PUSHGATE_DOWN_WC);
        }
        match self.path.look(self.chain.under_way(), now) {
            PathFound::Answers => self.line.beat(self.chain.written, self.path.beat(), now),
            PathFound::Unasked => self.line.touch(),
            PathFound::Silent => {
                let cause = self.found().unwrap_or(abi::PUSHGATE_DOWN_RETRY);
                limited!(
                    error,
                    self.terms.peer,
                    rank = self.own.rank,
                    peer = self.terms.peer,
                    device = self.device.name(),
                    "the peer's RDMA device answers nothing: the path is taken for broken"
                );
                self.health.fail(cause);
                return self.health.healthy();
            }
        }
        self.hears_of_its_end();
        self.has_carried();
        if let Some(watch) = &self.watch {
            if self.health.takes_ask() {
                watch.asks();
            }
            watch.drive(now);
        }
        let (found, device) = (self.found(), &self.device);
        if let Some(cause) = self.health.looked(found, now) {
            limited!(error, self.terms.peer,
                rank = self.own.rank,
                peer = self.terms.peer,
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

impl Telling for VerbsLink {
    #[inline]
    fn peer_counts(&self) -> PeerCounts {
        self.inbox.counts()
    }

    fn peer_status(&self) -> u64 {
        match self.inbox.status() {
            0 => self.peer_ended,
            status => status,
        }
    }

    #[inline]
    fn acknowledge(&mut self, counts: PeerCounts) {
        self.line.acknowledge(counts);
        // Before the messages of this pass, so that the messages wake a peer that waits for the receives.
        if self.receives.told != self.receives.noted
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
        self.flight.held.clear();
    }

    fn leave(&mut self) {
        if !self.inbox.peer_left() && !self.health.has_failed() {
            self.line.leave();
        }
    }
}

impl Waking for VerbsLink {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }

    fn prepare_sleep(&mut self) -> bool {
        if !self.own.events || self.health.is_deserted() {
            return false;
        }
        let Some(rc) = &self.rc else { return false };
        // What completes after this wakes; what completed before is looked for now, or was
        // taken since the last pass.
        std::mem::take(&mut self.fresh) || !rc.cq.arm() || self.poll_cq()
    }

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        let Some(rc) = &self.rc else { return };
        if self.own.events && !self.health.is_deserted() {
            fds.extend(rc.cq.channel());
        }
    }

    fn woken(&mut self) {
        if let Some(rc) = self.rc.as_mut().filter(|_| self.own.events) {
            rc.cq.drain();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use pushgate_driver_shim::segment::Geometry;

    use super::super::config::Config;
    use super::super::mock::{self, Mock};
    use super::super::setup::VerbsOpening;
    use super::*;
    use pushgate_link::OwnRegions;
    use pushgate_link::region::{Exported, RegionMemory};

    /// Two ends on one device.
    pub(in super::super) fn pair(mock: &Mock, config: &Config) -> [VerbsLink; 2] {
        let open = |rank| {
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
            VerbsOpening::new(&mock.device, config, geometry, window, &mut mock::allocate).unwrap()
        };
        let openings = [open(0), open(1)];
        let [first, second] = [openings[0].offer(), openings[1].offer()];
        let [a, b] = openings;
        let a = a.prepare(1, &second, &mut mock::allocate).unwrap();
        let b = b.prepare(0, &first, &mut mock::allocate).unwrap();
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
        assert!(moves[4..6].iter().all(|with| with[5] == 0), "a queue pair that retries after an RNR NAK");
    }

    thread_local! {
        /// Looks for events, and at the port.
        static LOOKS: std::cell::Cell<[u32; 2]> = const { std::cell::Cell::new([0; 2]) };
    }

    unsafe extern "C" fn get_async_event(
        _: *mut sys::ibv_context,
        _: *mut sys::ibv_async_event,
    ) -> std::ffi::c_int {
        LOOKS.set([LOOKS.get()[0] + 1, LOOKS.get()[1]]);
        -1
    }

    unsafe extern "C" fn query_port(
        context: *mut sys::ibv_context,
        port: u8,
        to: *mut sys::_compat_ibv_port_attr,
    ) -> std::ffi::c_int {
        LOOKS.set([LOOKS.get()[0], LOOKS.get()[1] + 1]);
        // SAFETY: the caller's promise.
        unsafe { mock::query_port(context, port, to) }
    }

    #[test]
    fn a_device_is_looked_at_as_often_for_many_links_as_for_few() {
        let mock = Mock::with_functions(
            std::ptr::null_mut(),
            super::super::kinds::Kind::of(super::super::kinds::Protocol::Ib, 0),
            |verbs, _| {
                verbs.ibv_get_async_event = Ok(get_async_event);
                verbs.ibv_query_port = Ok(query_port);
            },
        );
        let looks = |links: usize, begin: u64| {
            let pairs: Vec<_> = (0..links).map(|_| pair(&mock, &Config::default())).collect();
            let mut links: Vec<VerbsLink> = pairs.into_iter().flatten().collect();
            LOOKS.set([0; 2]);
            for now in (begin..begin + 10_000_000_000).step_by(1_000_000) {
                links.iter_mut().for_each(|link| link.check(now).unwrap());
            }
            LOOKS.get()
        };
        let (few, many) = (looks(1, 1_000_000_000_000), looks(32, 2_000_000_000_000));
        for (few, many) in few.into_iter().zip(many) {
            assert!(few > 0 && many <= few + few / 5 + 1, "{many} looks for 64 links, {few} for two");
        }
    }

    #[test]
    fn p7_receives_that_are_told_beside_a_beat_wake_the_peer() {
        let mock = Mock::new(0);
        let config = Config { posted_receives: true, ..Config::default() };
        for (noted, wakes) in [(0, 0), (1, 1)] {
            let [mut qp, _peer] = pair(&mock, &config);
            qp.agrees.peer_events = true;
            qp.line.beat(qp.chain.written, 1, 0);
            qp.line.beat(qp.chain.written, 1, u64::MAX);
            qp.receives.noted = noted;
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
                (qp.regions_told(), qp.regions.due.len()),
                if regions_written { (false, 3) } else { (true, 0) }
            );
            qp.remove_region(1);
            assert_eq!(qp.regions.due.len(), if regions_written { 4 } else { 0 });
            assert!(!qp.registers(1) && !qp.offers(1));
            mock::refuse("reg_mr");
            qp.add_region(9, &memories[0], 4096);
            assert!(!qp.registers(9) && !qp.offers(9));
            mock::refuse("");
        }
    }
}
