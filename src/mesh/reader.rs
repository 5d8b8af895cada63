//! The thread that serves a rank's sockets: it receives frames, sends what a peer did not take at
//! once, notices which ranks are gone, and says that this rank lives.
//!
//! The thread never waits for a single peer: each look at a socket takes what is there.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pushgate_door as door;
use pushgate_door::redial::Attempts;
use pushgate_driver_shim::fdpass::{Cut, Frame, Incoming};
use pushgate_driver_shim::limited;
use pushgate_engine::connect;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Resource, getrlimit};

use super::inbox::Dropped;
use super::set_up::Bound;
use super::tcp::{Again, Finder, Found};
use super::{
    BEAT, BYE, Beats, Events, LOST, Leaving, MAX_BYTES, MAX_FDS, MAX_WAITING, MAX_WAITING_FDS, Most, Peer,
    QUEUE_PAIRS, Shared, Stream, set_up, timespec,
};

/// When sending is tried again after the kernel took no descriptors.
const REFUSED: Duration = Duration::from_millis(10);
/// Bytes of a peer's frames after which the peer is told that they have come, so that the peer need not keep them longer.
const TELL: usize = 64 << 10;

/// A peer that has not left.
struct Heard<'a> {
    rank: u32,
    peer: &'a Peer,
    stream: Arc<Stream>,
    incoming: Incoming,
    /// How long the peer has said nothing, counting only the time between this thread's looks: time
    /// during which this process itself was stopped does not count.
    quiet: Duration,
    /// The peer's frames that were taken, but signs of life.
    received: u64,
    /// Bytes of frames since the peer was last told of them.
    untold: usize,
    broken: Option<Broken>,
}

/// A connection that broke, and that no other one has replaced yet.
struct Broken {
    why: String,
    /// When the rank counts as lost.
    until: Instant,
    _attempts: Attempts,
}

/// Why nothing more is taken from a connection.
enum Trouble {
    /// The connection has ended; another one may take its place.
    Broke(String),
    /// The rank has ended, or says what no rank says.
    Wrong(String),
}

pub(super) fn run(shared: &Shared, beats: Beats, again: Option<&Again>, events: &Events) {
    let all = shared.peers.iter().zip(0..).filter_map(|(peer, rank)| Some((rank, peer.as_ref()?)));
    let mut peers: Vec<_> = all.map(|(rank, peer)| Heard::new(rank, peer)).collect();
    let beating = peers.iter().any(|p| p.beats());
    let mut previous = Instant::now();
    let mut next_beat = previous + beats.every;
    let most = most(peers.len());
    let (finder, found_again) = Finder::new(&shared.bell);
    while !shared.stop.load(Ordering::Acquire) {
        let now = Instant::now();
        let passed = (now - previous).min(beats.every);
        previous = now;
        if beating && now >= next_beat {
            next_beat = now + beats.every;
            peers.iter_mut().filter(|p| p.beats()).for_each(|p| p.beat());
        }
        let mut fds = vec![PollFd::new(&*shared.bell, PollFlags::IN)];
        let mut refused = vec![false; peers.len()];
        let mut held = vec![None; peers.len()];
        let mut has_bytes = vec![false; peers.len()];
        for (i, p) in peers.iter().enumerate() {
            let (refused, held, has_bytes) = (&mut refused[i], &mut held[i], &mut has_bytes[i]);
            let out = p.peer.out();
            (*refused, *held) = (out.is_refused(), out.held());
            // A connection that broke has nothing more to say; the bell stands in for it.
            let rests = p.broken.is_some() || held.is_some();
            let flags = match (rests, out.has_frames() && !*refused) {
                (false, true) => PollFlags::IN | PollFlags::OUT,
                (false, false) => PollFlags::IN,
                (true, _) => PollFlags::empty(),
            };
            // Bytes that are decrypted already do not make the socket readable.
            *has_bytes = !rests && p.stream.has_bytes();
            let fd = if rests { shared.bell.as_fd() } else { p.stream.fd() };
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
        let with_process = peers.iter().enumerate().filter(|(_, p)| p.peer.process.is_some());
        let with_process: Vec<usize> = with_process.map(|(i, _)| i).collect();
        for i in &with_process {
            let process = peers[*i].peer.process.as_ref().expect("filtered");
            fds.push(PollFd::new(process, PollFlags::IN));
        }
        fds.extend(again.map(|again| PollFd::from_borrowed_fd(again.listener(), PollFlags::IN)));
        let ends = peers.iter().filter_map(|p| Some(p.broken.as_ref()?.until)).min();
        let once_more = refused.contains(&true).then(|| now + REFUSED);
        let wakes_at = held
            .iter()
            .flatten()
            .copied()
            .chain(ends)
            .chain(beating.then_some(next_beat))
            .chain(once_more)
            .chain(has_bytes.contains(&true).then_some(now))
            .min();
        let limit = wakes_at.map(|at| timespec(at.saturating_duration_since(now)));
        if poll(&mut fds, limit.as_ref()).is_err() {
            continue;
        }
        let found: Vec<PollFlags> = fds.iter().map(|f| f.revents()).collect();
        drop(fds);
        let (sockets, others) = found[1..].split_at(peers.len());
        let (processes, dialled) = others.split_at(with_process.len());
        let mut died = vec![false; peers.len()];
        for (i, found) in with_process.into_iter().zip(processes) {
            died[i] = !found.is_empty();
        }
        if !found[0].is_empty() {
            shared.bell.drain();
            shared.tell_ends();
        }
        let mut left: Vec<Option<Leaving>> = Vec::with_capacity(peers.len());
        for (i, p) in peers.iter_mut().enumerate() {
            // A hold may have begun while this thread waited.
            let holds = held[i].is_some() || p.peer.out().held().is_some();
            if holds && !died[i] {
                left.push(None);
                continue;
            }
            let looks = Looks { shared, beats, most, events, passed, died: died[i], refused: refused[i] };
            let found = if has_bytes[i] { sockets[i] | PollFlags::IN } else { sockets[i] };
            let leaving = match p.look(found, &looks) {
                Ok(leaving) => leaving,
                // A peer that has heard this rank's farewell sends none, and closes.
                Err(_) if p.peer.out().farewell => Some(Leaving::Bye),
                Err(Trouble::Broke(why)) if again.is_some() && p.beats() => {
                    p.breaks(why, again.expect("it is there"), &finder);
                    None
                }
                Err(Trouble::Broke(why) | Trouble::Wrong(why)) => Some(p.lost(&why)),
            };
            left.push(leaving);
        }
        if let Some(again) = again {
            if dialled.iter().any(|found| !found.is_empty()) {
                again.accept(&finder);
            }
            for found in found_again.try_iter() {
                meet_again(&mut peers, &mut left, found, again, &finder);
            }
        }
        for i in (0..peers.len()).rev() {
            let Some(leaving) = left[i] else { continue };
            let gone = peers.remove(i);
            gone.peer.close();
            let mut state = shared.inbox.state();
            state.ends.insert(gone.rank, leaving);
            // A rank may leave because it has lost another, and be gone before the end of that other is seen here.
            let first = state.reported.get(&gone.rank).copied().unwrap_or(gone.rank);
            if leaving == Leaving::Lost {
                state.lost.get_or_insert(first);
            }
            drop(state);
            if leaving == Leaving::Lost {
                // Before this rank's program hears of the loss and leaves.
                peers.iter().for_each(|p| p.report_lost(first));
            }
            shared.inbox.arrived.notify_all();
            if leaving == Leaving::Lost {
                // A forked child of the dead rank has no use for the socket either.
                gone.stream.shutdown();
                (events.lost)(first);
            }
        }
    }
}

/// Takes in what a thread found about a connection that broke.
fn meet_again(
    peers: &mut [Heard],
    left: &mut [Option<Leaving>],
    found: Found,
    again: &Again,
    finder: &Finder,
) {
    let rank = found.key();
    let Some(i) = peers.iter().position(|p| p.rank == rank).filter(|i| left[*i].is_none()) else {
        if let Found::Greeted { stream, .. } = found {
            again.refuse(&stream, "this rank counts it as lost, or as gone");
        }
        return;
    };
    let p = &mut peers[i];
    left[i] = match found {
        // A greeting of an attempt that the other rank gave up came late. The connection that took over is whole.
        Found::Greeted { received, .. } if p.peer.out().has_gone_beyond(received) => None,
        Found::Greeted { stream, received, .. } => {
            if p.broken.is_none() {
                p.breaks("the other rank dials again".into(), again, finder);
            }
            match again.answer(&stream, p.received) {
                Ok(()) => p.goes_on(stream, received),
                // That rank dials once more.
                Err(_) => None,
            }
        }
        // Of attempts that were given up nothing is taken.
        Found::Met { stream, received, .. } if p.broken.is_some() => p.goes_on(stream, received),
        // A late word concerns a connection that another one has replaced.
        Found::Told { received, .. } if p.broken.is_none() && !p.peer.out().has_gone_beyond(received) => {
            p.breaks("the other rank says so".into(), again, finder);
            None
        }
        Found::Gone { why, .. } if let Some(broken) = &p.broken => {
            let why = format!("its connection broke ({}), and {why}", broken.why);
            Some(p.lost(&why))
        }
        _ => None,
    };
}

/// Limits on what may wait here from `peers` peers. A program that makes enough queue pairs at once
/// to reach these limits needs more descriptors than that for itself.
pub(super) fn most(peers: usize) -> Most {
    let files = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |n| n as usize / 2);
    let fds = files.min(MAX_WAITING_FDS);
    Most { bytes: MAX_WAITING, fds, share: (fds / 2 / peers.max(1)).max(MAX_FDS) }
}

/// What a look at a peer needs.
struct Looks<'a> {
    shared: &'a Shared,
    beats: Beats,
    most: Most,
    events: &'a Events,
    /// Since the look before.
    passed: Duration,
    /// The peer's process has ended.
    died: bool,
    /// The kernel took no descriptors of this rank.
    refused: bool,
}

impl<'a> Heard<'a> {
    fn new(rank: u32, peer: &'a Peer) -> Self {
        let stream = peer.out().stream.clone();
        Heard {
            rank,
            peer,
            stream,
            incoming: Incoming::default(),
            quiet: Duration::ZERO,
            received: 0,
            untold: 0,
            broken: None,
        }
    }

    /// Sends what waits, and takes a frame if one is there.
    fn look(&mut self, found: PollFlags, looks: &Looks) -> Result<Option<Leaving>, Trouble> {
        if let Some(broken) = &self.broken {
            return match Instant::now() >= broken.until {
                true => Err(Trouble::Wrong(format!(
                    "its connection broke ({}), and no other one took its place in time",
                    broken.why
                ))),
                false => Ok(None),
            };
        }
        if looks.refused || found.contains(PollFlags::OUT) {
            // A broken socket shows when the receive side is looked at, so the error is ignored
            // here.
            let _ = self.peer.flush(&mut self.peer.out());
        }
        let says = !(found - PollFlags::OUT).is_empty();
        self.quiet = if says { Duration::ZERO } else { self.quiet + looks.passed };
        let silent = self.beats() && self.quiet > looks.beats.silence;
        if !says && !looks.died && !silent {
            return Ok(None);
        }
        match self.incoming.receive(&*self.stream, MAX_BYTES, self.max_fds()) {
            Ok(Some(frame)) => {
                self.count(&frame)?;
                looks.shared.deliver(self.rank, frame, looks.most, looks.events).map_err(Trouble::Wrong)
            }
            // Everything that the process sent before it ended has been read.
            Ok(None) if looks.died => Err(Trouble::Wrong("its process has ended".into())),
            Ok(None) if silent => {
                Err(Trouble::Wrong(format!("it said nothing for {:?}", looks.beats.silence)))
            }
            Ok(None) => Ok(None),
            Err(e) if e.kind() == ErrorKind::QuotaExceeded => {
                limited!(warn, self.rank, rank = self.rank, "a frame of a rank is lost: {e}");
                looks.shared.cut(self.rank, &e);
                Ok(None)
            }
            Err(e) if e.kind() == ErrorKind::InvalidData => Err(Trouble::Wrong(e.to_string())),
            Err(e) => Err(Trouble::Broke(e.to_string())),
        }
    }

    /// Counts a frame of another host, so that the peer knows which ones have come; takes the peer's count out of a sign of
    /// life.
    fn count(&mut self, (bytes, _): &Frame) -> Result<(), Trouble> {
        if !self.beats() {
            return Ok(());
        }
        if !bytes.starts_with(&BEAT.to_le_bytes()) {
            self.received += 1;
            self.untold += bytes.len();
            if self.untold >= TELL {
                self.beat();
            }
            return Ok(());
        }
        let Some(count) = bytes[4..].try_into().ok().map(u64::from_le_bytes) else {
            return Err(Trouble::Wrong("its sign of life has no count".into()));
        };
        let mut out = self.peer.out();
        out.received(count).map_err(Trouble::Wrong)?;
        self.peer.room.notify_all();
        Ok(())
    }

    /// The connection broke: this rank takes nothing more from it, and seeks the peer.
    fn breaks(&mut self, why: String, again: &Again, finder: &Finder) {
        limited!(
            warn,
            self.rank,
            rank = self.rank,
            "the connection to a rank broke: {why}; another one is sought for {:?}",
            again.recover()
        );
        self.peer.out().breaks();
        self.stream.shutdown();
        let attempts = again.seek(self.rank, self.received, finder);
        self.broken = Some(Broken { why, until: Instant::now() + again.recover(), _attempts: attempts });
    }

    /// Another connection takes the place of the one that broke. The peer has received `received` of this rank's frames.
    fn goes_on(&mut self, stream: door::Stream, received: u64) -> Option<Leaving> {
        let stream = Arc::new(Stream::Tcp(stream));
        if let Err(why) = self.peer.out().goes_on(stream.clone(), received) {
            return Some(self.lost(&why));
        }
        limited!(
            info,
            self.rank,
            rank = self.rank,
            "another connection to the rank took the place of the one that broke"
        );
        (self.stream, self.incoming, self.broken) = (stream, Incoming::default(), None);
        (self.quiet, self.untold) = (Duration::ZERO, 0);
        self.peer.room.notify_all();
        None
    }

    fn lost(&self, why: &str) -> Leaving {
        limited!(warn, self.rank, rank = self.rank, "a rank is lost: {why}");
        Leaving::Lost
    }

    /// Whether this mesh sends signs of life and expects them.
    fn beats(&self) -> bool {
        !self.peer.is_here
    }

    /// Says that this rank lives, and what it has received.
    fn beat(&mut self) {
        let told = std::mem::take(&mut self.untold) == 0;
        let frame = [&BEAT.to_le_bytes()[..], &self.received.to_le_bytes()].concat();
        let mut out = self.peer.out();
        // Other bytes that wait to be sent show that this rank lives just as well.
        let spare = told && out.has_frames();
        if !out.closed && !spare && out.push_uncounted(&frame).is_ok() {
            let _ = self.peer.flush(&mut out);
        }
    }

    /// Tells the peer that `rank` is lost. A push that fails means that the peer is gone, too.
    fn report_lost(&self, rank: u32) {
        let frame = [LOST, rank].map(u32::to_le_bytes).concat();
        let mut out = self.peer.out();
        if !out.closed && out.push(&frame, Vec::new()).is_ok() {
            let _ = self.peer.flush(&mut out);
        }
    }

    fn max_fds(&self) -> usize {
        if self.peer.is_here { MAX_FDS } else { 0 }
    }
}

impl Shared {
    /// Has the call that waits for a frame hear that the frame lost its descriptors.
    fn cut(&self, rank: u32, error: &io::Error) {
        let cut = error.get_ref().and_then(|e| e.downcast_ref::<Cut>());
        let Some((label, bytes)) = cut.and_then(|cut| cut.bytes.split_first_chunk()) else { return };
        let label = u32::from_le_bytes(*label);
        if label >= QUEUE_PAIRS {
            self.inbox.state().cut(rank, label, bytes);
            self.inbox.arrived.notify_all();
        }
    }

    /// Closes descriptors of a rank, on another thread: a close can take as long as the peer likes.
    fn discard(&self, rank: u32, fds: Vec<OwnedFd>) {
        let dropped = self.inbox.state().discard(rank, fds);
        dropped.close();
    }

    /// Puts a frame where a caller waits for it. Fails on a frame that no rank of this release
    /// would send.
    fn deliver(
        &self,
        rank: u32,
        (mut bytes, fds): Frame,
        most: Most,
        events: &Events,
    ) -> Result<Option<Leaving>, String> {
        let Some(label) =
            bytes.get(..4).map(|label| u32::from_le_bytes(label.try_into().expect("four bytes")))
        else {
            self.discard(rank, fds);
            return Err("it sent a frame without a label".into());
        };
        bytes.drain(..4);
        let of_queue_pair = label >= QUEUE_PAIRS;
        let ended = if of_queue_pair { set_up::ended(rank, label, &bytes) } else { Ok(None) };
        let may_offer = of_queue_pair && matches!(ended, Ok(None));
        if !fds.is_empty() && !may_offer {
            self.discard(rank, fds);
            return Err("it sent descriptors with a frame that is no set-up of a queue pair".into());
        }
        let ended = ended?;
        let too_much = || {
            format!(
                "it sent more than {} bytes that no call asked for, or more than {} descriptors where all ranks \
                 together sent more than {}",
                most.bytes, most.share, most.fds
            )
        };
        match label {
            BYE => return Ok(Some(Leaving::Bye)),
            BEAT => {}
            LOST => {
                let lost = bytes.try_into().map(u32::from_le_bytes).ok();
                // Not of this rank, nor of the one that reports: neither explains why that one leaves.
                let lost = lost.filter(|lost| {
                    *lost != rank && self.peers.get(*lost as usize).is_some_and(Option::is_some)
                });
                let lost = lost.ok_or("it reported the loss of no other rank")?;
                self.inbox.state().reported.entry(rank).or_insert(lost);
            }
            _ => {
                // Before the lock is taken: it asks the kernel.
                let memory = connect::are_memory(&fds);
                let mut state = self.inbox.state();
                let (mut answer, mut tell) = (None, None);
                let (fits, dropped) = match ended {
                    Some(ended) => set_up::forget(&mut state, ended, bytes, most),
                    None if !of_queue_pair => {
                        (state.keep(rank, label, (bytes, fds), most), Dropped::default())
                    }
                    None => match state.route(rank, label, (bytes, fds), memory) {
                        Bound::Here(frame) => (state.keep(rank, label, frame, most), Dropped::default()),
                        Bound::Delivered(engine, dropped) => {
                            tell = engine;
                            (state.fits(rank, most), dropped)
                        }
                        Bound::Gone(end, dropped) => {
                            answer = Some(end);
                            (state.fits(rank, most), dropped)
                        }
                    },
                };
                drop(state);
                dropped.close();
                if let Some(tell) = tell {
                    tell();
                }
                if let Some(end) = answer {
                    self.answer(rank, label, end);
                }
                self.inbox.arrived.notify_all();
                if let Some(ended) = ended {
                    (events.ended)(ended);
                }
                return fits.then_some(None).ok_or_else(too_much);
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::fd::BorrowedFd;

    use pushgate_core::session::Status;
    use pushgate_driver_shim::abi;
    use pushgate_driver_shim::fdpass::Carrier;
    use pushgate_engine::connect::Incarnation;
    use pushgate_tests::fuzz::{depth, fuzz, kind};
    use pushgate_tests::hang;

    use super::super::{Mesh, unix};
    use super::*;

    /// What has come of a peer.
    struct Come<'a>(Cell<&'a [u8]>);

    impl Carrier for Come<'_> {
        fn send_some(&self, _: &[u8], _: &[BorrowedFd<'_>]) -> io::Result<Option<usize>> {
            unreachable!("nothing is sent here")
        }

        fn recv_some(&self, bytes: &mut [u8], _: &mut Vec<OwnedFd>) -> io::Result<Option<(usize, bool)>> {
            let n = bytes.len().min(self.0.get().len());
            let (now, later) = self.0.get().split_at(n);
            bytes[..n].copy_from_slice(now);
            self.0.set(later);
            Ok(Some((n, false)))
        }
    }

    #[test]
    #[ignore = "the step fuzz runs this"]
    fn p8_fuzz_no_frames_of_a_rank_make_the_reader_panic_or_keep_more_than_its_limit() {
        const ROUTED: u32 = QUEUE_PAIRS + 1;
        let most = Most { bytes: 4096, fds: 16, share: 16 };
        let own = unix::pairs(3).unwrap().remove(0);
        let mesh = Mesh::new(0, own, hang(), None).unwrap();
        let events = Events { lost: Box::new(|_| {}), ended: Box::new(|_| {}) };
        let frame = |label: u32, body: &[u8]| {
            let header = [body.len() as u32 + 4, 0, label].map(u32::to_le_bytes).concat();
            [&header, body].concat()
        };
        let (one, status) = (Incarnation::MIN, Status::new(abi::PUSHGATE_ABORTED));
        let end = connect::end(one, Some(one), status);
        let other = [&[1], &end[1..]].concat();
        let seeds = [
            frame(BEAT, &7u64.to_le_bytes()),
            frame(LOST, &2u32.to_le_bytes()),
            frame(BYE, &[]),
            frame(5, b"for a call"),
            [frame(QUEUE_PAIRS, &end), frame(ROUTED, &other), frame(ROUTED, &end)].concat(),
        ];
        fuzz(&seeds, |bytes| {
            *mesh.shared.inbox.state() = Default::default();
            let _under_way = mesh.set_up(1, QUEUE_PAIRS);
            let joined = mesh.set_up(1, ROUTED);
            let (channel, mailbox) = joined.channels();
            joined.joined(one, Some((mailbox, Arc::new(|| {}))));
            let (come, mut incoming, mut frames) = (Come(Cell::new(bytes)), Incoming::default(), 0);
            let ends = loop {
                let frame = match incoming.receive(&come, MAX_BYTES, MAX_FDS) {
                    Ok(frame) => frame.expect("there are bytes, or the end"),
                    Err(e) => break kind(e),
                };
                frames += 1;
                match mesh.shared.deliver(1, frame, most, &events) {
                    Ok(None) => {}
                    Ok(Some(_)) => break 1,
                    Err(why) => break kind(why),
                }
                let state = mesh.shared.inbox.state();
                let kept = state.waiting.get(&1).map_or(0, |load| load.bytes);
                assert!(kept <= most.bytes && state.reported.len() <= 1, "{kept} bytes");
            };
            drop(channel);
            ends ^ depth(frames) ^ depth(mesh.shared.inbox.state().frames.len()) << 8
        });
    }
}
