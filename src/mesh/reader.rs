//! The thread that serves a rank's sockets: it receives frames, sends what a peer did not take at
//! once, notices which ranks are gone, and says that this rank lives.
//!
//! The thread never waits for a single peer: each look at a socket takes what is there.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pushgate_driver_shim::fdpass::{Frame, Incoming, drop_elsewhere};
use pushgate_proxy::connect;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Resource, getrlimit};

use super::inbox::Dropped;
use super::set_up::Bound;
use super::{
    BEAT, BYE, Beats, Events, LOST, Leaving, MAX_BYTES, MAX_FDS, MAX_WAITING, MAX_WAITING_FDS, Most, Peer,
    QUEUE_PAIRS, Shared, Stream, set_up, timespec,
};

/// When sending is tried again after the kernel took no descriptors.
const REFUSED: Duration = Duration::from_millis(10);

/// A peer that has not left.
struct Heard<'a> {
    rank: u32,
    peer: &'a Peer,
    incoming: Incoming,
    /// How long the peer has said nothing, counting only the time between this thread's looks: time
    /// during which this process itself was stopped does not count.
    quiet: Duration,
}

pub(super) fn run(shared: &Shared, beats: Beats, events: &Events) {
    let heard = |(rank, peer)| Heard { rank, peer, incoming: Incoming::default(), quiet: Duration::ZERO };
    let all = shared.peers.iter().zip(0..).filter_map(|(peer, rank)| Some((rank, peer.as_ref()?)));
    let mut peers: Vec<_> = all.map(heard).collect();
    let beating = peers.iter().any(|p| p.beats());
    let mut previous = Instant::now();
    let mut next_beat = previous + beats.every;
    let most = most(peers.len());
    while !shared.stop.load(Ordering::Acquire) {
        let now = Instant::now();
        let passed = (now - previous).min(beats.every);
        previous = now;
        if beating && now >= next_beat {
            next_beat = now + beats.every;
            peers.iter().filter(|p| p.beats()).for_each(|p| p.beat());
        }
        let mut fds = vec![PollFd::new(&shared.bell, PollFlags::IN)];
        let mut refused = vec![false; peers.len()];
        for (p, refused) in peers.iter().zip(&mut refused) {
            let out = p.peer.out();
            *refused = out.frames.is_refused();
            let sends = !out.frames.is_empty() && !*refused;
            let flags = if sends { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::new(&p.peer.link.stream, flags));
        }
        let with_process = peers.iter().enumerate().filter(|(_, p)| p.peer.link.process.is_some());
        let with_process: Vec<usize> = with_process.map(|(i, _)| i).collect();
        for i in &with_process {
            let process = peers[*i].peer.link.process.as_ref().expect("filtered");
            fds.push(PollFd::new(process, PollFlags::IN));
        }
        let again = refused.contains(&true).then_some(REFUSED);
        let limit = again.into_iter().chain(beating.then(|| next_beat.saturating_duration_since(now))).min();
        if poll(&mut fds, limit.map(timespec).as_ref()).is_err() {
            continue;
        }
        let found: Vec<PollFlags> = fds.iter().map(|f| f.revents()).collect();
        drop(fds);
        let (sockets, processes) = found[1..].split_at(peers.len());
        let mut died = vec![false; peers.len()];
        for (i, found) in with_process.into_iter().zip(processes) {
            died[i] = !found.is_empty();
        }
        if !found[0].is_empty() {
            shared.bell.drain();
            shared.tell_ends();
        }
        for i in (0..peers.len()).rev() {
            let p = &mut peers[i];
            if refused[i] || sockets[i].contains(PollFlags::OUT) {
                // A broken socket shows when the receive side is looked at, so the error is ignored
                // here.
                let _ = p.peer.flush(&mut p.peer.out());
            }
            let says = !(sockets[i] - PollFlags::OUT).is_empty();
            p.quiet = if says { Duration::ZERO } else { p.quiet + passed };
            let silent = p.beats() && p.quiet > beats.silence;
            if !says && !died[i] && !silent {
                continue;
            }
            let leaves = match p.incoming.receive(&p.peer.link.stream, MAX_BYTES, p.max_fds()) {
                Ok(Some(frame)) => shared.deliver(p.rank, frame, most, events),
                // Everything that the process sent before it ended has been read.
                Ok(None) if died[i] => Err("its process has ended".to_string()),
                Ok(None) if silent => Err(format!("it said nothing for {:?}", beats.silence)),
                Ok(None) => Ok(None),
                Err(e) if e.kind() == ErrorKind::QuotaExceeded => {
                    tracing::warn!(rank = p.rank, "a frame of a rank is lost: {e}");
                    Ok(None)
                }
                Err(e) => Err(e.to_string()),
            };
            let leaving = match leaves {
                Ok(None) => continue,
                Ok(Some(leaving)) => leaving,
                // A peer that has heard this rank's farewell sends none, and closes.
                Err(_) if p.peer.out().farewell => Leaving::Bye,
                Err(why) => {
                    tracing::warn!(rank = p.rank, "a rank is lost: {why}");
                    Leaving::Lost
                }
            };
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
                let _ = shutdown(&gone.peer.link.stream, Shutdown::Both);
                (events.lost)(first);
            }
        }
    }
}

/// Limits on what may wait here from `peers` peers. A program that makes enough queue pairs at once
/// to reach these limits needs more descriptors than that for itself.
pub(super) fn most(peers: usize) -> Most {
    let files = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |n| n as usize / 2);
    let fds = files.min(MAX_WAITING_FDS);
    Most { bytes: MAX_WAITING, fds, share: (fds / 2 / peers.max(1)).max(MAX_FDS) }
}

impl Heard<'_> {
    /// Whether this mesh sends signs of life and expects them.
    fn beats(&self) -> bool {
        matches!(self.peer.link.stream, Stream::Tcp(_))
    }

    fn beat(&self) {
        let mut out = self.peer.out();
        // Other bytes that wait to be sent show that this rank lives just as well.
        if !out.closed && out.frames.is_empty() && out.frames.push(&BEAT.to_le_bytes(), Vec::new()).is_ok() {
            let _ = self.peer.flush(&mut out);
        }
    }

    /// Tells the peer that `rank` is lost. A push that fails means that the peer is gone, too.
    fn report_lost(&self, rank: u32) {
        let frame = [LOST, rank].map(u32::to_le_bytes).concat();
        let mut out = self.peer.out();
        if !out.closed && out.frames.push(&frame, Vec::new()).is_ok() {
            let _ = self.peer.flush(&mut out);
        }
    }

    fn max_fds(&self) -> usize {
        match self.peer.link.stream {
            Stream::Unix(_) => MAX_FDS,
            Stream::Tcp(_) => 0,
        }
    }
}

impl Shared {
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
            drop_elsewhere(fds);
            return Err("it sent a frame without a label".into());
        };
        bytes.drain(..4);
        let of_queue_pair = label >= QUEUE_PAIRS;
        let ended = if of_queue_pair { set_up::ended(rank, label, &bytes) } else { Ok(None) };
        let may_offer = of_queue_pair && matches!(ended, Ok(None));
        if !fds.is_empty() && !may_offer {
            // This thread closes none of them: a close can take as long as the peer likes.
            drop_elsewhere(fds);
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
