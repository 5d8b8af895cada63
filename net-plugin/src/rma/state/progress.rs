//! How a coll comm goes on: what has arrived is taken in, and what waits is sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushgate_engine::idle::Step;
use pushgate_gpu_kernels::OrderedCopies;

use super::{Peer, Reach, State};
use crate::error::{Failure, Result};
use crate::log;
use crate::rma::incoming::{Incoming, Message};
use crate::rma::landing::{Addition, Landing};
use crate::rma::means::Means;
use crate::rma::memory::{Found, Memory};
use crate::rma::outgoing::{Op, Outgoing, What};
use crate::rma::requests::{Cause, Handle};
use crate::rma::wire::{Adds, Header, Place};

/// Messages that one call takes from a rank before it looks at the others.
const TURN: usize = 32;
/// Calls for progress between two looks for ranks that want to connect: a look is a system call or two.
const LOOK: u64 = 16;
/// Calls for progress between two looks at the queue pairs to ranks for which nothing waits.
const LOSSES: u64 = 256;
/// Calls for progress between two questions to the GPU whether it has failed, and two looks whether anything moves.
const CHECK: u64 = 1 << 14;
/// How long the lane's thread waits at first for what no bell announces, as a connection that is being made; twice as long after each
/// time in vain.
const AGAIN: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);
/// Times in vain after which that is the longest.
const LONGER: u32 = 5;
/// How often the lane's thread looks at a coll comm that has failed.
const BROKEN: Duration = Duration::from_millis(100);
/// Gets of one rank that may wait to be answered. NCCL has [`super::DEPTH`] in each context.
const MOST_REPLIES: usize = 1 << 16;

impl State {
    /// Moves everything on.
    pub fn progress(&mut self, means: &Means) {
        self.turns += 1;
        means.lane.drive_all();
        let moved = self.try_progress(means);
        self.unless_broken(means, moved);
    }

    /// A turn of the lane's thread, which has driven the lane, while NCCL does not call. Returns what the thread may do until the next
    /// turn.
    pub fn stand_in(&mut self, means: &Means) -> Step {
        let (moved, ends) = (self.moved(), self.incoming.len());
        self.turns += 1;
        let went = self.try_progress(means);
        self.unless_broken(means, went);
        if self.moved() == moved {
            // Who comes from now on wakes the thread.
            match self.broken {
                None => {
                    let came = self.let_in(means);
                    self.unless_broken(means, came);
                }
                Some(_) => self.turn_away(means),
            }
        }
        if self.moved() != moved || self.incoming.len() != ends {
            self.in_vain = 0;
            return Step::Spin;
        }
        let again = (AGAIN * (1 << self.in_vain.min(LONGER))).min(LONGEST);
        self.in_vain = self.in_vain.saturating_add(1);
        let dials = |rank: &u32| matches!(self.peers[*rank as usize].reach, Reach::Dialing(_));
        if self.broken.is_some() {
            // A rank that can't be let in keeps the listening socket readable.
            Step::Sleep(BROKEN)
        } else if means.listener.is_busy() || self.active.iter().any(dials) {
            Step::Sleep(again)
        } else if self.is_at_work() {
            Step::Block(again)
        } else {
            Step::Block(Duration::MAX)
        }
    }

    /// Whether something is under way that no bell may announce the end of.
    fn is_at_work(&self) -> bool {
        !self.active.is_empty()
            || self.copies_are_under_way()
            || self.incoming.iter().any(|from| !from.is_idle())
    }

    /// Fails the coll comm as a whole if `what` has failed.
    pub(super) fn unless_broken(&mut self, means: &Means, what: Result<()>) {
        if let Err(failure) = what {
            self.break_off(means, failure.into());
        }
    }

    fn try_progress(&mut self, means: &Means) -> Result<()> {
        if self.broken.is_some() {
            if self.turns % LOOK == 1 {
                self.turn_away(means);
            }
            return Ok(());
        }
        if self.come + 1 < self.peers.len() && self.turns % LOOK == 1 {
            self.let_in(means)?;
        }
        self.inward.advance()?;
        if let Some(outward) = &mut self.outward {
            outward.look().map_err(Failure::system("copying out of the GPU's memory"))?;
        }
        self.take_in(means)?;
        // One mark after all that was taken in, and after the signals, which are stored without waiting for it.
        self.own.advance(&mut self.inward, &mut self.requests)?;
        self.inward.mark()?;
        self.settle_flushes();
        // Those for whom nothing is left to do take themselves out.
        for at in (0..self.active.len()).rev() {
            let rank = self.active[at];
            if !self.send_to(means, rank) {
                self.peers[rank as usize].active = false;
                self.active.swap_remove(at);
            }
        }
        if self.turns.is_multiple_of(LOSSES) {
            self.look_for_losses(means);
        }
        if self.turns.is_multiple_of(CHECK) {
            self.inward.check()?;
            let waits = self.requests.waiting() > 0 || self.is_at_work();
            let limit = means.runtime.loaded.settings.stall_report;
            if let Some(long) = self.stall.look(Instant::now(), self.moved(), waits, limit) {
                log::warn(&format!("RMA: nothing has moved for {long:.0?}: {}", self.describe()));
            }
        }
        Ok(())
    }

    /// Another number whenever something has moved.
    fn moved(&self) -> u64 {
        let passed =
            self.inward.passed() + self.own.passed() + self.outward.as_ref().map_or(0, OrderedCopies::passed);
        let live = |peer: &Peer| match &peer.reach {
            Reach::Live(outgoing) => outgoing.moved(),
            _ => 0,
        };
        passed + self.taken + self.requests.ended() + self.peers.iter().map(live).sum::<u64>()
    }

    /// What waits, and for what, for the log.
    fn describe(&self) -> String {
        /// Ranks that are named.
        const MOST: usize = 8;
        let mut all = vec![format!("{} requests wait", self.requests.waiting())];
        if let Some(outward) = &self.outward {
            let queues =
                [("into", self.inward.queue()), ("out of", Some(outward)), ("within", self.own.queue())];
            for (way, queue) in queues {
                all.extend(queue.map(|queue| format!("copies {way} the GPU's memory: {queue:?}")));
            }
        }
        for &rank in self.active.iter().take(MOST) {
            let peer = &self.peers[rank as usize];
            let how = match &peer.reach {
                Reach::Live(outgoing) => outgoing.describe(),
                Reach::Dialing(_) => "a queue pair is being made".into(),
                Reach::Unasked | Reach::Lost(_) => "no queue pair".into(),
            };
            all.push(format!("to rank {rank}: {} operations are to be sent, {how}", peer.ops.len()));
        }
        all.extend(self.incoming.iter().filter(|from| !from.is_idle()).take(MOST).map(Incoming::describe));
        all.join("; ")
    }

    /// Lets ranks connect.
    fn let_in(&mut self, means: &Means) -> Result<()> {
        while let Some(made) = means.listener.next(&means.purpose())? {
            self.incoming.push(Incoming::new(means.runtime.clone(), made)?);
        }
        Ok(())
    }

    /// Takes in what has arrived from all ranks.
    fn take_in(&mut self, means: &Means) -> Result<()> {
        let mut incoming = std::mem::take(&mut self.incoming);
        let mut failure = None;
        incoming.retain_mut(|from| {
            let stays = self.take_from(means, from);
            stays.unwrap_or_else(|e| {
                failure = Some(e);
                true
            })
        });
        self.incoming = incoming;
        failure.map_or(Ok(()), Err)
    }

    /// Takes in what has arrived from one rank. False if nothing will come any more.
    fn take_from(&mut self, means: &Means, from: &mut Incoming) -> Result<bool> {
        // Looked at first: what came before the end is then found below.
        let ended = from.ended();
        let (mut refused, mut all) = (None, false);
        for _ in 0..TURN {
            match from.next() {
                Ok(None) => {
                    all = true;
                    break;
                }
                Ok(Some(message)) => match self.handle(means, from, message)? {
                    Handled::Taken => self.taken += 1,
                    Handled::Later => {
                        from.hold(message);
                        break;
                    }
                    Handled::Refused(why) => refused = Some(why),
                },
                Err(why) => refused = Some(why),
            }
            if refused.is_some() {
                break;
            }
        }
        from.settle(self.inward.passed(), &mut self.requests);
        if let Some(why) = refused {
            let cause = from.refuse(&why);
            // Its payload under way lands first: the memory stays.
            self.settle_copies()?;
            from.settle(self.inward.passed(), &mut self.requests);
            if let Some(rank) = from.rank {
                self.lose(means, rank, cause);
            }
            return Ok(false);
        }
        match ended {
            Some(cause) if all && from.is_idle() => {
                if let Some(rank) = from.rank {
                    self.lose(means, rank, cause);
                }
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    /// Does what a message asks.
    fn handle(&mut self, means: &Means, from: &mut Incoming, message: Message) -> Result<Handled> {
        let refused = |why: String| Ok(Handled::Refused(why));
        let mut landing = Landing::default();
        let Some(rank) = from.rank else {
            let ranks = self.peers.len() as u32;
            return match message.header {
                Header::Hello { rank, ranks: theirs }
                    if theirs == ranks && rank < ranks && rank != means.rank =>
                {
                    let came = &mut self.peers[rank as usize].came;
                    if std::mem::replace(came, true) {
                        return refused(format!("rank {rank} is connected already"));
                    }
                    from.rank = Some(rank);
                    self.come += 1;
                    from.landings.push(landing);
                    Ok(Handled::Taken)
                }
                other => refused(format!("{other:?} where a rank of {ranks} should say its name")),
            };
        };
        match message.header {
            Header::Hello { .. } => return refused("the rank says its name again".into()),
            Header::Bye => self.peers[rank as usize].bye = true,
            Header::Put { to, bytes, signal } => {
                let memory = match self.memory_of(means, to, bytes, bytes > 0) {
                    Named::Here(memory) => memory,
                    Named::Later => return Ok(Handled::Later),
                    Named::Refused(why) => return refused(why),
                };
                let adds = match signal {
                    None => None,
                    Some(Adds { at, value }) => match self.memory_of(means, at, 8, true) {
                        Named::Here(Some((memory, _))) => match memory.signal(at.offset) {
                            Ok(address) => Some(Addition { memory, address, value }),
                            Err(why) => return refused(why),
                        },
                        Named::Later => return Ok(Handled::Later),
                        Named::Refused(why) => return refused(why),
                        Named::Here(None) => unreachable!("it was asked for"),
                    },
                };
                if let Some((memory, address)) = memory {
                    // SAFETY: the payload lies in the peer's window, checked, which stays mapped until the message is given
                    // back after the mark; the memory is registered, and `settle_copies` comes before it is not.
                    landing.mark = unsafe { self.inward.copy(message.payload, &memory, address, bytes)? };
                }
                match adds {
                    Some(Addition { memory, address, value }) if memory.cuda => {
                        // SAFETY: `Memory::signal` checked the word, and the memory is registered.
                        unsafe { self.inward.add(&memory, address, value)? };
                    }
                    adds => landing.adds = adds,
                }
            }
            Header::Data { get, offset, bytes } => {
                let request = Handle(get);
                let found = self.requests.get(request).filter(|get| get.from == rank);
                let Some(get) = found else {
                    // The get may have failed meanwhile, as one into memory that was deregistered.
                    tracing::debug!("rank {rank} has answered get {get:#x}, which is not under way");
                    from.landings.push(landing);
                    return Ok(Handled::Taken);
                };
                let fits = offset.checked_add(bytes).is_some_and(|end| end <= get.bytes);
                let Some(address) =
                    get.memory.address_of(get.offset.wrapping_add(offset), bytes).filter(|_| fits)
                else {
                    return refused(format!("{bytes} bytes at {offset} for a get of {} bytes", get.bytes));
                };
                let memory = get.memory.clone();
                // SAFETY: as for a put.
                landing.mark = unsafe { self.inward.copy(message.payload, &memory, address, bytes)? };
                landing.arrived = Some((request, bytes));
            }
            Header::Get { from: place, bytes, get } => {
                let payload = match self.memory_of(means, place, bytes, bytes > 0) {
                    Named::Here(found) => found.map(|(memory, _)| (memory, place.offset)),
                    Named::Later => return Ok(Handled::Later),
                    Named::Refused(why) => return refused(why),
                };
                if self.peers[rank as usize].ops.len() >= MOST_REPLIES {
                    return refused(format!("more than {MOST_REPLIES} gets wait to be answered"));
                }
                let op = Op { what: What::Reply { get }, payload, bytes, sent: 0, request: None };
                self.begin(means, rank, op);
                if let Reach::Lost(cause) = &self.peers[rank as usize].reach {
                    return refused(format!("gets of rank {rank} can't be answered: {}", cause.text));
                }
            }
        }
        from.landings.push(landing);
        Ok(Handled::Taken)
    }

    /// The bytes that a message names, if it names any.
    fn memory_of(&self, means: &Means, place: Place, bytes: u64, any: bool) -> Named {
        if !any {
            return Named::Here(None);
        }
        match means.memories.find(place.memory) {
            Found::NotYet => Named::Later,
            Found::Gone => Named::Refused(format!("memory {} is not registered any more", place.memory)),
            Found::Here(memory) => match memory.address_of(place.offset, bytes) {
                Some(address) => Named::Here(Some((memory, address))),
                None => Named::Refused(format!(
                    "{bytes} bytes at offset {} of memory {}, which has {}",
                    place.offset, place.memory, memory.bytes
                )),
            },
        }
    }

    /// Sends what waits for a rank, as far as it can. False if nothing is left to do.
    pub(super) fn send_to(&mut self, means: &Means, rank: u32) -> bool {
        let peer = &mut self.peers[rank as usize];
        if let Reach::Unasked = peer.reach {
            peer.reach = Reach::Dialing(Box::new(means.handles[rank as usize]));
        }
        if let Reach::Dialing(handle) = &mut peer.reach {
            let hello = Header::Hello { rank: means.rank, ranks: means.ranks };
            let purpose = means.purpose();
            let made = means.attempts.dial(&means.runtime, handle, means.class(), &purpose);
            let new = made.and_then(|made| {
                made.map(|made| Outgoing::new(means.runtime.clone(), made, rank, hello)).transpose()
            });
            match new {
                Ok(None) => return true,
                Ok(Some(outgoing)) => peer.reach = Reach::Live(Box::new(outgoing)),
                Err(failure) => {
                    let text = format!("rank {rank} can't be reached: {}", failure.text);
                    let cause = Cause { code: failure.code, text: text.into() };
                    self.lose(means, rank, cause);
                    return false;
                }
            }
        }
        let peer = &mut self.peers[rank as usize];
        let lost = match &mut peer.reach {
            Reach::Live(outgoing) => match outgoing.ended() {
                Some(cause) => cause,
                None => {
                    let passed = self.outward.as_ref().map_or(0, OrderedCopies::passed);
                    outgoing.publish(passed, &mut self.requests);
                    // SAFETY: the memories of operations are registered; `State::forget` takes the operations out.
                    let sent =
                        unsafe { outgoing.advance(&mut peer.ops, self.outward.as_mut(), &mut self.requests) };
                    match sent {
                        Ok(()) => return outgoing.is_staging() || !peer.ops.is_empty(),
                        Err(failure) => failure.into(),
                    }
                }
            },
            Reach::Lost(cause) => cause.clone(),
            Reach::Unasked | Reach::Dialing(_) => unreachable!("handled above"),
        };
        self.lose(means, rank, lost);
        false
    }
}

/// What came of a message.
enum Handled {
    Taken,
    /// It names memory that this rank has yet to register.
    Later,
    /// Why it was refused.
    Refused(String),
}

/// What a message names.
enum Named {
    /// A memory and an address there; `None` if the message names none.
    Here(Option<(Arc<Memory>, usize)>),
    /// This rank has yet to register it.
    Later,
    Refused(String),
}
