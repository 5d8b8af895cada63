//! The link over byte streams itself, as the endpoint drives it.

mod posting;
mod regions;
mod renewing;

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use pushgate_core::copies::Copies;
use pushgate_core::gate::{Budget, Permit};
use pushgate_core::inbound::MOST_COPIES;
use pushgate_core::receives::Posted;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::limited;
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::memory::Mapped;
use pushgate_link::receives::PeerReceives;
use pushgate_link::{Arrival, Link, LinkDown, PeerCounts, Renew, Telling, Waking};

use super::inbox::Inbox;
use super::incoming::Incoming;
use super::meeting::Meeting;
use super::outgoing::Outgoing;
use super::wire::{MOST_PIECES, Piece, Wire};

/// How often bytes are sent and received in a row before other queue pairs have their turn.
const ROUNDS: u32 = 4;
/// Passes for which counts and news of posted receives wait for each other, for more of their kind, and for a message that they could
/// go along with. A pass may be a call of a program that has many queue pairs, so a few of them are some microseconds.
pub(super) const PASSES: u32 = 4;
/// Passes for which an end that is thrifty keeps counts and news of posted receives back while the peer's messages are short and may come
/// before their receives. A peer whose next message is long waits so long once. (An engine with a thread of its own should not keep them
/// back like that: it would often send them just when the next message comes.)
const LAZY: u32 = 64;
/// Counts of so much payload do not wait, bytes: the peer has room for little more, or will soon.
const MUCH: u64 = 16 << 10;
/// How long the other streams of a link may go on when one has ended, nanoseconds.
const ALONE: u64 = 1_000_000_000;

/// A region of this end that messages go out of.
struct Source {
    address: usize,
    bytes: u64,
    /// Messages of the session up to the last one out of it.
    last: u64,
}

/// What the two ends have agreed on, and what this end is.
pub(super) struct Terms {
    pub(super) geometry: Geometry,
    pub(super) peer_geometry: Geometry,
    /// Streams of the link.
    pub(super) streams: usize,
    /// This end's posted receives name buffers; so do the peer's.
    pub(super) posts_receives: bool,
    pub(super) peer_posts_receives: bool,
    /// SENDs of this end that may leave before their receives are known, and SENDs of the peer that may come before their receives.
    pub(super) goes_ahead: u32,
    pub(super) takes_ahead: u32,
    /// News of receives waits for more of its kind where the peer need not wait for it.
    pub(super) thrifty: bool,
    /// Both ends replace a link that breaks.
    pub(super) recovers: bool,
    /// Payloads have checksums.
    pub(super) sums: bool,
    /// Without a frame for so long a beat is sent, nanoseconds.
    pub(super) beat: u64,
    /// The most payload of a frame, bytes.
    pub(super) part: usize,
}

/// How far the next link is.
#[derive(Default)]
enum Next {
    /// The present link is live, or was not stopped yet.
    #[default]
    Nothing,
    /// The peer was told where this end is met.
    Offered,
    /// The streams are on their way.
    Meeting,
    /// The streams are there.
    Met(Box<dyn Wire>),
}

/// How far the link is on its way to its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Open,
    /// The last words are on their way.
    Telling(Wait),
    /// The wire ends; `None`: without last words.
    Closing(Option<Wait>),
}

/// A wait for the peer.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Wait {
    /// When it began, nanoseconds.
    since: u64,
    allowed: Duration,
}

/// A queue pair over byte streams, as the crate's first lines describe it.
pub struct TcpLink {
    // The wire goes before the memory that it reads and writes.
    /// `None` while the streams are still to come.
    wire: Option<Box<dyn Wire>>,
    incoming: Vec<Incoming>,
    outgoing: Outgoing,
    inbox: Inbox,
    // Before the meeting: streams that no link has taken end by the host that the meeting keeps.
    next: Next,
    meeting: Box<dyn Meeting>,
    terms: Terms,
    window: Mapped,
    sources: BTreeMap<u32, Source>,
    /// The peer's posted receives, if the peer posts any.
    peer_receives: Option<PeerReceives>,
    flight: Flight,
    news: News,
    quiet: Quiet,
    lost: Lost,

    failed: Option<LinkDown>,
    /// The peer takes nothing more.
    mute: bool,
    /// The peer has left in order, and its streams have ended.
    deserted: bool,
    ending: Ending,
    /// The time as it was passed in last, nanoseconds.
    now: u64,
}

/// Messages on their way.
struct Flight {
    /// For each message in flight the receive that it has taken.
    taken: Box<[Option<Posted>]>,
    copies: Copies,
    /// Messages of the session before the first one over this link; those sent; those that hold no slot any more.
    base: u64,
    sent: u64,
    completed: u64,
    /// Messages that are in their places at the peer, as last heard.
    received: u64,
    /// Up to which message the wire reads nothing any more.
    settled: u64,
}

/// What the peer is to be told beside messages.
#[derive(Default)]
struct News {
    counts: PeerCounts,
    /// The peer was not told the counts yet.
    counts_due: bool,
    /// Passes for which counts or news of posted receives have waited.
    waited: u32,
    /// Regions of this end that the peer was not told of: key, and bytes, or 0 for one that went.
    untold: VecDeque<(u32, u64)>,
    receives_told: u64,
    /// Questions to the peer: whether it has told of all its regions. The last one that is wanted, the last one that was
    /// sent, and the key for which the last one is wanted.
    asks: Cell<u64>,
    asks_sent: u64,
    asks_for: Cell<Option<u32>>,
    /// The last question of the peer that was answered.
    answers_sent: u64,
    /// The status of this end, if the peer is still to be told.
    status: u64,
    status_due: bool,
    leave_due: bool,
}

/// Frames that had come, or gone, when time was looked at last, and since when none has gone.
#[derive(Default)]
struct Quiet {
    since: u64,
    sent: u64,
    seen: u64,
}

/// Streams that have ended, a bit for each, and since when one has.
#[derive(Default)]
struct Lost {
    ended: u32,
    since: u64,
}

impl TcpLink {
    /// A link whose streams `meeting` is about to bring. The inbox belongs to the peer that `terms` names.
    pub(super) fn new(terms: Terms, window: Mapped, inbox: Inbox, meeting: Box<dyn Meeting>) -> Self {
        let slots = 1usize << terms.geometry.link_log;
        let (log, ahead) = (terms.peer_geometry.rx_log, terms.goes_ahead);
        let peer_receives = terms.peer_posts_receives.then(|| PeerReceives::new(log, ahead));
        let taken = if terms.peer_posts_receives { slots } else { 0 };
        TcpLink {
            wire: None,
            incoming: (0..terms.streams).map(Incoming::new).collect(),
            outgoing: Outgoing::new(terms.streams, slots, 0, terms.sums, terms.part),
            inbox,
            meeting,
            next: Next::Nothing,
            window,
            sources: BTreeMap::new(),
            peer_receives,
            flight: Flight {
                taken: vec![None; taken].into(),
                copies: Copies::new(slots + terms.goes_ahead as usize + MOST_COPIES),
                base: 0,
                sent: 0,
                completed: 0,
                received: 0,
                settled: 0,
            },
            news: News::default(),
            quiet: Quiet::default(),
            lost: Lost::default(),
            failed: None,
            mute: false,
            deserted: false,
            ending: Ending::Open,
            now: 0,
            terms,
        }
    }

    /// Whether the streams are there. An error says why they will not be.
    pub fn joined(&mut self) -> Result<bool, String> {
        if self.wire.is_none() && self.failed.is_none() && matches!(self.next, Next::Nothing) {
            match self.meeting.met() {
                Some(Ok(wire)) => self.adopt_wire(wire),
                Some(Err(why)) => {
                    self.fail(abi::PUSHGATE_DOWN_RETRY, true);
                    return Err(why);
                }
                None => {}
            }
        }
        Ok(self.wire.is_some())
    }

    /// What moves the bytes; nothing while the streams are still to come.
    pub fn wire(&self) -> &'static str {
        self.wire.as_ref().map_or("nothing", |wire| wire.name())
    }

    /// Whether both ends replace the link when it breaks.
    pub fn recovers(&self) -> bool {
        self.terms.recovers
    }

    fn adopt_wire(&mut self, wire: Box<dyn Wire>) {
        debug_assert_eq!(wire.streams(), self.terms.streams);
        self.wire = Some(wire);
    }

    /// Sends all that waits, counts too, and has `peer` take it from the streams. True when all of it is there and the kernel has
    /// said that it reads none of it any more, or when that will never be. For tests whose ends act in turns.
    pub fn passes_all_to(&mut self, peer: &mut TcpLink) -> bool {
        if self.healthy().is_err() || self.ending != Ending::Open || self.mute || self.deserted {
            return true;
        }
        if !self.is_joined() {
            return false;
        }
        self.news.waited = LAZY;
        self.control();
        self.pump_out();
        while peer.pump_in() {}
        let arrived = (0..self.terms.streams).all(|n| peer.incoming[n].whole() == self.outgoing.number(n));
        let over = peer.healthy().is_err() || peer.ending != Ending::Open || self.healthy().is_err();
        let settled = self.flight.settled == self.flight.base + self.flight.sent;
        if arrived && !settled {
            // What the kernel says of sends is read where the link looks for what arrives.
            self.pump_in();
        }
        over || arrived && settled && self.outgoing.is_empty()
    }

    /// Whether nothing more comes from the peer, after a look. For tests whose ends act in turns.
    pub fn hears_no_more(&mut self) -> bool {
        while self.pump_in() {}
        self.deserted || self.healthy().is_err() || self.ending != Ending::Open
    }

    fn healthy(&self) -> Result<(), LinkDown> {
        self.failed.map_or(Ok(()), Err)
    }

    #[cold]
    fn fail(&mut self, cause: u32, by_peer: bool) {
        self.failed.get_or_insert(LinkDown::Failed { cause, by_peer });
    }

    /// The peer has said that it is done: then it closes its streams.
    fn peer_is_done(&self) -> bool {
        self.inbox.left || self.inbox.status != 0
    }

    /// A stream has ended in order. What the others still bring counts, and the first one may yet bring the peer's last words.
    #[cold]
    fn stream_ended(&mut self, stream: usize) {
        if self.lost.ended == 0 {
            self.lost.since = self.now;
        }
        self.lost.ended |= 1 << stream;
        let all = self.lost.ended.count_ones() as usize == self.terms.streams;
        if all && self.peer_is_done() {
            (self.inbox.left, self.deserted) = (true, true);
        } else if all || stream == 0 && !self.peer_is_done() {
            self.broke("a stream of the link ended", &std::io::ErrorKind::UnexpectedEof.into());
        }
    }

    /// A stream broke.
    #[cold]
    fn broke(&mut self, what: &str, e: &std::io::Error) {
        if self.peer_is_done() {
            (self.inbox.left, self.deserted) = (true, true);
            return;
        }
        if self.failed.is_none() {
            let (rank, peer) = (self.terms.geometry.rank, self.terms.peer_geometry.rank);
            limited!(info, peer, rank, peer, "{what}: {e}");
        }
        self.fail(abi::PUSHGATE_DOWN_RETRY, true);
    }

    /// Takes in what the streams have brought. True if anything came.
    fn pump_in(&mut self) -> bool {
        if self.ending != Ending::Open || self.failed.is_some() || self.deserted || !self.is_joined() {
            return false;
        }
        let Some(wire) = &mut self.wire else { return false };
        let mut any = false;
        for stream in 0..self.incoming.len() {
            if self.lost.ended >> stream & 1 != 0 {
                continue;
            }
            let incoming = &mut self.incoming[stream];
            let (pieces, n) = incoming.pieces();
            // SAFETY: the pieces lie in the buffer of the stream, or where the inbox has said that a payload belongs: in the
            // mirror, which the inbox holds, or in a region that is not removed meanwhile (`region_in_use`). All of it
            // stays until the wire has stopped, which `fence`, `stopped` and `drop` wait for.
            let received = match unsafe { wire.receive(stream, &pieces[..n]) } {
                Ok(0) => continue,
                Ok(received) => received,
                Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                    self.stream_ended(stream);
                    // The other streams have their turn in the next round.
                    return any || self.failed.is_none() && !self.deserted;
                }
                Err(e) => {
                    self.broke("a stream of the link ended", &e);
                    return any;
                }
            };
            any = true;
            // SAFETY: the inbox answers with places that were checked against the mirror and the regions, as above.
            if let Err(e) = unsafe { incoming.received(received, &mut self.inbox) } {
                let (rank, peer) = (self.terms.geometry.rank, self.terms.peer_geometry.rank);
                limited!(error, peer, rank, peer, "{e}");
                self.fail(abi::PUSHGATE_DOWN_STREAM, true);
                return true;
            }
        }
        any
    }

    /// Sends what the streams take.
    fn pump_out(&mut self) {
        if self.deserted || self.mute {
            return;
        }
        let Some(wire) = &mut self.wire else { return };
        for _ in 0..ROUNDS {
            // Most passes have nothing to send.
            if self.outgoing.is_empty() {
                break;
            }
            let mut pieces = [Piece { address: 0, bytes: 0 }; MOST_PIECES];
            // SAFETY: payloads lie in the window, or in a region that stays until its messages are settled
            // (`region_in_use`); link and endpoint keep both until the wire has stopped.
            unsafe { self.outgoing.fill() };
            let mut any = false;
            for stream in 0..self.incoming.len() {
                let n = self.outgoing.pieces(stream, &mut pieces);
                if n == 0 {
                    continue;
                }
                // SAFETY: as above; the headers lie in frames that stay until the wire has taken them.
                match unsafe { wire.send(stream, &pieces[..n]) } {
                    Ok(0) => {}
                    Ok(taken) => {
                        any = true;
                        self.quiet.sent += 1;
                        self.outgoing.taken(stream, taken);
                    }
                    Err(e) => return self.cannot_send(&e),
                }
            }
            if !any {
                break;
            }
        }
        for stream in 0..self.incoming.len() {
            self.outgoing.settle(stream, wire.settled(stream));
        }
        self.flight.settled = self.outgoing.settled(self.flight.base + self.flight.sent);
        if let Err(e) = wire.submit() {
            self.cannot_send(&e);
        }
    }

    /// Nothing can be sent any more. What a peer that is done has sent before may still be read.
    #[cold]
    fn cannot_send(&mut self, e: &std::io::Error) {
        match self.peer_is_done() {
            true => self.mute = true,
            false => self.broke("sending on a stream of the link", e),
        }
    }

    /// Whether the streams are there, after a look.
    #[inline]
    fn is_joined(&mut self) -> bool {
        self.wire.is_some() || self.join_now()
    }

    #[cold]
    fn join_now(&mut self) -> bool {
        self.joined().unwrap_or_else(|why| {
            let (rank, peer) = (self.terms.geometry.rank, self.terms.peer_geometry.rank);
            limited!(info, peer, rank, peer, "the link has no streams: {why}");
            false
        })
    }

    /// Gives the last words to the wire, and ends it. True when it reads and writes no memory any more.
    fn move_to_the_end(&mut self) -> bool {
        if self.ending == Ending::Open {
            self.ending = Ending::Telling(self.wait());
            self.outgoing.forget();
        }
        if let Ending::Telling(wait) = self.ending {
            let over = self.failed.is_some() || self.wire.is_none() || self.deserted || self.mute;
            if !over {
                self.control();
                self.pump_out();
                let untold = self.news.status_due || self.news.leave_due || !self.outgoing.is_empty();
                if untold && !self.mute && self.failed.is_none() && !self.is_in_vain(wait) {
                    return false;
                }
            }
            let wait = self.wait();
            if let Some(wire) = &mut self.wire {
                wire.finish(wait.allowed);
            }
            self.ending = Ending::Closing(Some(wait));
        }
        if let (Ending::Closing(Some(wait)), Some(wire)) = (self.ending, &mut self.wire)
            && self.now.saturating_sub(wait.since) >= wait.allowed.as_nanos() as u64
        {
            // The engine's time may go on faster than the clock, for a program that wants its thread back.
            wire.cut();
        }
        let stopped = self.wire.as_mut().is_none_or(|wire| wire.stopped());
        if stopped
            && self.wire.take().is_some()
            && let Ending::Closing(Some(wait)) = self.ending
        {
            self.is_in_vain(wait);
        }
        stopped
    }

    /// A wait for the peer that begins now.
    fn wait(&self) -> Wait {
        Wait { since: self.now, allowed: self.meeting.lingered().left() }
    }

    /// Whether a wait has taken all that it may. Then it counts against the waits of other links.
    fn is_in_vain(&self, wait: Wait) -> bool {
        let in_vain = u128::from(self.now.saturating_sub(wait.since)) >= wait.allowed.as_nanos();
        if in_vain {
            self.meeting.lingered().in_vain(wait.allowed);
        }
        in_vain
    }
}

impl Link for TcpLink {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn budget(&self) -> Budget {
        let slots = 1 << self.terms.geometry.link_log;
        // Nothing is in flight but what the window holds.
        Budget { send_slots: slots, cq_slots: slots, bytes: u64::MAX / 2 }
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
        self.healthy()?;
        // SENDs that go ahead count as received before they are copied to their places (P6).
        let in_places = match self.terms.goes_ahead {
            0 => received,
            _ => received.min(self.inbox.counts.released & abi::PUSHGATE_COUNT_MASK),
        };
        self.flight.received = self.flight.received.max(in_places);
        self.flight.copies.received(self.flight.received, 0);
        let before = self.flight.completed;
        // A slot is free when the peer has the message and the wire reads it no more, whatever the peer says.
        self.flight.completed = self.flight.completed.max(received.min(self.flight.settled));
        Ok((self.flight.completed - before) as u32)
    }

    #[inline]
    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        let mut rounds = 0;
        loop {
            match self.inbox.take(words) {
                Arrival::Empty if rounds < ROUNDS && self.pump_in() => rounds += 1,
                found => return found,
            }
        }
    }

    fn has_inbound(&self) -> bool {
        self.inbox.is_ready()
    }

    fn stopped(&mut self, now: u64) -> bool {
        self.now = self.now.max(now);
        self.give_next_up();
        self.move_to_the_end()
    }

    fn renews(&mut self) -> Option<&mut dyn Renew> {
        self.terms.recovers.then_some(self)
    }

    #[inline]
    fn notify(&mut self) -> Result<bool, LinkDown> {
        self.healthy()?;
        if self.is_joined() && self.ending == Ending::Open {
            self.control();
            self.pump_out();
        }
        self.healthy()?;
        Ok(false)
    }

    fn check(&mut self, now: u64) -> Result<(), LinkDown> {
        self.now = self.now.max(now);
        if self.quiet.sent != self.quiet.seen {
            (self.quiet.seen, self.quiet.since) = (self.quiet.sent, now);
        } else if now.saturating_sub(self.quiet.since) >= self.terms.beat && self.wire.is_some() {
            // Something is under way then, and the kernel finds a path that is dead.
            self.quiet.since = now;
            self.beat();
        }
        if self.lost.ended != 0 && !self.deserted && now.saturating_sub(self.lost.since) >= ALONE {
            self.broke("some streams of the link ended", &std::io::ErrorKind::UnexpectedEof.into());
        }
        self.healthy()
    }
}

impl Telling for TcpLink {
    #[inline]
    fn peer_counts(&self) -> PeerCounts {
        // What the peer has counts once the wire reads it no more: the program may write there then. Counts that can't be go by
        // as they are, and end the session.
        let PeerCounts { released, received, granted } = self.inbox.counts;
        let settled = |word: u64| {
            let count = word & abi::PUSHGATE_COUNT_MASK;
            if count <= self.flight.base + self.flight.sent && !pushgate_core::planted!(P5Settled) {
                word - count + count.min(self.flight.settled)
            } else {
                word
            }
        };
        PeerCounts { released: settled(released), received: settled(received), granted }
    }

    fn peer_status(&self) -> u64 {
        self.inbox.status
    }

    /// The inbox has room for as many messages as the peer may have in flight.
    fn hear(&mut self) -> bool {
        (0..ROUNDS).take_while(|_| self.pump_in()).count() > 0
    }

    #[inline]
    fn acknowledge(&mut self, counts: PeerCounts) {
        self.news.counts = counts;
        self.news.counts_due = true;
    }

    fn set_status(&mut self, word: u64) {
        (self.news.status, self.news.status_due) = (word, true);
        // Nobody waits for these any more.
        self.outgoing.forget();
    }

    fn leave(&mut self) {
        self.news.leave_due = true;
    }

    #[inline]
    fn owes(&self) -> bool {
        (self.news.counts_due || self.has_news() || !self.outgoing.is_empty()) && self.wire.is_some()
    }
}

impl Waking for TcpLink {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }

    fn prepare_sleep(&mut self) -> bool {
        // A link that is being replaced brings nothing.
        if self.deserted || self.ending != Ending::Open {
            return false;
        }
        if self.failed.is_some() || !self.is_joined() {
            return true;
        }
        if self.news.counts_due || self.has_news() {
            self.news.waited = LAZY;
            let _ = self.notify();
        }
        let outgoing = &self.outgoing;
        let Some(wire) = &mut self.wire else { return true };
        wire.prepare_sleep(&|stream| outgoing.waits(stream))
    }

    fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        self.wire.iter().filter(|_| !self.deserted).for_each(|wire| wire.wakes(fds));
    }
}

impl Drop for TcpLink {
    /// Waits until the wire touches no memory any more. An engine has seen to that before, so this waits only where a link
    /// is dropped without one.
    fn drop(&mut self) {
        self.meeting.give_up();
        if let Some(mut wire) = self.wire.take() {
            wire.finish(self.meeting.lingered().left());
            while !wire.stopped() {
                std::thread::yield_now();
            }
        }
    }
}
