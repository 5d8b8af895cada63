//! One coll comm: what waits for each rank, what has arrived, and how both go on. One thread at a time has it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushgate_gpu_kernels::OrderedCopies;

use super::coll::Shared;
use super::incoming::{Incoming, Message};
use super::landing::{Addition, Inward, Landing, Landings};
use super::memory::{Found, Memory};
use super::outgoing::{Op, Outgoing, What};
use super::own::Own;
use super::requests::{Cause, Counted, Get, Handle, Requests};
use super::stall::Stall;
use super::wire::{Adds, Header, Place};
use crate::end::SETTLE;
use crate::error::{Code, Failure, Result};
use crate::handle;
use crate::log;

/// Operations that NCCL may have under way to one rank in one context: its 32 for each receive that
/// [`crate::ffi::types::MAX_RECVS`] tells it of.
pub const DEPTH: u16 = 32 * crate::ffi::types::MAX_RECVS as u16;
/// Messages that one call takes from a rank before it looks at the others.
const TURN: usize = 32;
/// Calls for progress between two looks for ranks that want to connect: a look is a system call or two.
const LOOK: u64 = 16;
/// Calls for progress between two looks at the queue pairs to ranks for which nothing waits.
const LOSSES: u64 = 256;
/// Calls for progress between two questions to the GPU whether it has failed, and two looks whether anything moves.
const CHECK: u64 = 1 << 14;
/// Tests in vain of which one makes progress, where several requests are under way.
const TESTS: u64 = 8;
/// Gets of one rank that may wait to be answered. NCCL has [`DEPTH`] in each context.
const MOST_REPLIES: usize = 1 << 16;
/// How long closing waits until other ranks have what was sent to them.
const DELIVERY: Duration = Duration::from_secs(2);

/// Bytes of registered memory.
#[derive(Clone, Copy)]
pub struct Stretch<'a> {
    pub memory: &'a Arc<Memory>,
    pub offset: u64,
}

/// A signal of the other rank, and what is added to it.
#[derive(Clone, Copy)]
pub struct Signal<'a> {
    pub at: Stretch<'a>,
    pub value: u64,
}

/// How another rank is reached.
enum Reach {
    /// Nothing was asked of the rank.
    Unasked,
    /// A queue pair is being made; its handle, in which [`crate::handshake::Attempts`] keeps a mark.
    Dialing(Box<[u8; handle::BYTES]>),
    Live(Box<Outgoing>),
    Lost(Cause),
}

/// What is known of another rank.
struct Peer {
    reach: Reach,
    ops: VecDeque<Op>,
    /// Named in [`State::active`].
    active: bool,
    /// The rank's own queue pair to this rank has come.
    came: bool,
    /// The rank has said that it closes.
    bye: bool,
}

/// The counts of some contexts: operations under way, by context and rank.
struct Counts(Box<[u16]>);

/// The state of a coll comm.
pub struct State {
    // The queues first: dropping one waits until the GPU uses no window any more.
    inward: Inward,
    outward: Option<OrderedCopies>,
    own: Own,
    peers: Box<[Peer]>,
    /// Ranks for which something is to be done.
    active: Vec<u32>,
    incoming: Vec<Incoming>,
    /// Ranks whose queue pair has come.
    come: usize,
    /// Flushes that wait for copies.
    flushes: Landings,
    pub requests: Requests,
    contexts: Vec<Option<Counts>>,
    /// Calls for progress.
    turns: u64,
    /// Tests of requests that were not done.
    tests: u64,
    /// Messages that were taken in.
    taken: u64,
    stall: Stall,
    /// The coll comm as a whole has failed.
    broken: Option<Cause>,
}

impl State {
    /// A coll comm of `ranks` ranks. `copies`: queues for copies into the GPU's memory, out of it and within it, if there is a GPU.
    pub fn new(ranks: u32, copies: Option<[OrderedCopies; 3]>) -> Self {
        let (inward, outward, own) = match copies {
            Some([inward, outward, own]) => (Some(inward), Some(outward), Some(own)),
            None => (None, None, None),
        };
        let peer =
            |_| Peer { reach: Reach::Unasked, ops: VecDeque::new(), active: false, came: false, bye: false };
        State {
            peers: (0..ranks).map(peer).collect(),
            active: Vec::new(),
            incoming: Vec::new(),
            come: 0,
            own: Own::new(own),
            flushes: Landings::default(),
            requests: Requests::default(),
            inward: Inward::new(inward),
            outward,
            contexts: Vec::new(),
            turns: 0,
            tests: 0,
            taken: 0,
            stall: Stall::default(),
            broken: None,
        }
    }

    // ------------------------------------------------------------------ contexts

    /// Makes `contexts` contexts; returns their number.
    pub fn add_contexts(&mut self, contexts: u32) -> u32 {
        let counts = Counts(vec![0; contexts as usize * self.peers.len()].into());
        let free = self.contexts.iter().position(Option::is_none);
        match free {
            Some(free) => {
                self.contexts[free] = Some(counts);
                free as u32
            }
            None => {
                self.contexts.push(Some(counts));
                self.contexts.len() as u32 - 1
            }
        }
    }

    /// Forgets contexts. Operations that are under way go on.
    pub fn remove_contexts(&mut self, number: u32) {
        self.contexts[number as usize] = None;
    }

    /// Counts an operation of a context that exists.
    fn count(&mut self, contexts: u32, context: u32, rank: u32) -> Result<Counted> {
        let place = context * self.peers.len() as u32 + rank;
        let Some(Counts(counts)) = &mut self.contexts[contexts as usize] else {
            return Err(Failure::new(Code::Argument, "contexts that are destroyed"));
        };
        let count = &mut counts[place as usize];
        if *count == DEPTH {
            let text = format!(
                "more than {DEPTH} operations under way to rank {rank} in context {context}: test those that were begun"
            );
            return Err(Failure::new(Code::Usage, text));
        }
        *count += 1;
        Ok(Counted { contexts, place })
    }

    fn uncount(&mut self, counted: Option<Counted>) {
        let Some(Counted { contexts, place }) = counted else { return };
        // The contexts may be gone, and others may have their number: those have counts of their own, which may be 0.
        if let Some(Some(Counts(counts))) = self.contexts.get_mut(contexts as usize)
            && let Some(count) = counts.get_mut(place as usize)
        {
            *count = count.saturating_sub(1);
        }
    }

    // ---------------------------------------------------------------- operations

    /// Puts `bytes` bytes into a rank's memory, then adds to a signal there.
    ///
    /// # Safety
    /// The memories stay valid until they are deregistered.
    pub unsafe fn put(
        &mut self,
        shared: &Shared,
        (contexts, context, rank): (u32, u32, u32),
        (from, to, bytes): (Option<Stretch<'_>>, Option<Stretch<'_>>, u64),
        signal: Option<Signal<'_>>,
    ) -> Result<Handle> {
        self.lives()?;
        let counted = self.count(contexts, context, rank)?;
        let request = self.requests.add(counted, None);
        if rank == shared.rank {
            // SAFETY: the caller's promise.
            let put = unsafe { self.put_here(request, (from, to, bytes), signal) };
            self.unless_broken(shared, put);
            return Ok(request);
        }
        let place = |s: Stretch<'_>| Place { memory: s.memory.number, offset: s.offset };
        let signal = signal.map(|signal| Adds { at: place(signal.at), value: signal.value });
        let op = Op {
            what: What::Put { to: to.map_or(Place { memory: 0, offset: 0 }, place), signal },
            payload: from.map(|from| (from.memory.clone(), from.offset)),
            bytes,
            sent: 0,
            request: Some(request),
        };
        self.begin(shared, rank, op);
        Ok(request)
    }

    /// Gets `bytes` bytes out of a rank's memory.
    ///
    /// # Safety
    /// The memories stay valid until they are deregistered.
    pub unsafe fn get(
        &mut self,
        shared: &Shared,
        (contexts, context, rank): (u32, u32, u32),
        (from, to, bytes): (Stretch<'_>, Stretch<'_>, u64),
    ) -> Result<Handle> {
        self.lives()?;
        let counted = self.count(contexts, context, rank)?;
        if rank == shared.rank {
            let request = self.requests.add(counted, None);
            // SAFETY: the caller's promise.
            let got = unsafe { self.put_here(request, (Some(from), Some(to), bytes), None) };
            self.unless_broken(shared, got);
            return Ok(request);
        }
        let (memory, offset) = (to.memory.clone(), to.offset);
        let get = self.requests.add(counted, Some(Get { memory, offset, bytes, arrived: 0, from: rank }));
        let from = Place { memory: from.memory.number, offset: from.offset };
        let op = Op { what: What::Get { from, bytes, get }, payload: None, bytes: 0, sent: 0, request: None };
        self.begin(shared, rank, op);
        Ok(get)
    }

    /// A request that is done when all copies so far are complete.
    pub fn flush(&mut self, (contexts, context, rank): (u32, u32, u32)) -> Result<Handle> {
        self.lives()?;
        // A get is done when its bytes are in place and can be seen, so what was begun before it suffices. First, because a
        // failure must leave nothing counted.
        let mark = self.inward.mark()?;
        let counted = self.count(contexts, context, rank)?;
        let request = self.requests.add(counted, None);
        self.flushes.push(Landing { mark, done: Some(request), ..Landing::default() });
        self.settle_flushes();
        Ok(request)
    }

    fn settle_flushes(&mut self) {
        self.flushes
            .settle(self.inward.passed(), &mut self.requests, |_| unreachable!("a flush adds to no signal"));
    }

    /// Operates on this rank's own memory.
    ///
    /// # Safety
    /// As [`State::put`].
    unsafe fn put_here(
        &mut self,
        request: Handle,
        what: (Option<Stretch<'_>>, Option<Stretch<'_>>, u64),
        signal: Option<Signal<'_>>,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.own.put(request, what, signal)? };
        self.own.advance(&mut self.inward, &mut self.requests)?;
        self.inward.mark().map(|_| ())
    }

    /// Begins an operation at another rank.
    fn begin(&mut self, shared: &Shared, rank: u32, op: Op) {
        self.peers[rank as usize].ops.push_back(op);
        self.activate(rank);
        self.send_to(shared, rank);
    }

    fn activate(&mut self, rank: u32) {
        let peer = &mut self.peers[rank as usize];
        if !peer.active {
            peer.active = true;
            self.active.push(rank);
        }
    }

    /// Whether a request is done. Makes progress if it is not.
    pub fn test(&mut self, shared: &Shared, request: Handle) -> Result<bool> {
        let mut answer = self.requests.test(request);
        if let Ok((false, _)) = answer {
            // NCCL tests all that is under way one after the other, and asks for progress between.
            self.tests += 1;
            if self.requests.count() == 1 || self.tests.is_multiple_of(TESTS) {
                self.progress(shared);
                answer = self.requests.test(request);
            }
        }
        match answer {
            Ok((done, counted)) => {
                self.uncount(counted);
                Ok(done)
            }
            Err((failure, counted)) => {
                self.uncount(counted);
                Err(failure)
            }
        }
    }

    fn lives(&self) -> Result<()> {
        self.broken.as_ref().map_or(Ok(()), |cause| Err(cause.failure()))
    }

    // ------------------------------------------------------------------ progress

    /// Moves everything on.
    pub fn progress(&mut self, shared: &Shared) {
        self.turns += 1;
        shared.lane.drive_all();
        let moved = self.try_progress(shared);
        self.unless_broken(shared, moved);
    }

    fn unless_broken(&mut self, shared: &Shared, what: Result<()>) {
        if let Err(failure) = what {
            self.break_off(shared, failure.into());
        }
    }

    fn try_progress(&mut self, shared: &Shared) -> Result<()> {
        if self.broken.is_some() {
            if self.turns % LOOK == 1 {
                self.turn_away(shared);
            }
            return Ok(());
        }
        if self.come + 1 < self.peers.len() && self.turns % LOOK == 1 {
            self.let_in(shared)?;
        }
        self.inward.advance()?;
        if let Some(outward) = &mut self.outward {
            outward.look().map_err(Failure::system("copying out of the GPU's memory"))?;
        }
        self.take_in(shared)?;
        // One mark behind all that was taken in, and behind the signals, which are stored without waiting for it.
        self.own.advance(&mut self.inward, &mut self.requests)?;
        self.inward.mark()?;
        self.settle_flushes();
        // Those for whom nothing is left to do take themselves out.
        for at in (0..self.active.len()).rev() {
            let rank = self.active[at];
            if !self.send_to(shared, rank) {
                self.peers[rank as usize].active = false;
                self.active.swap_remove(at);
            }
        }
        if self.turns.is_multiple_of(LOSSES) {
            self.look_for_losses(shared);
        }
        if self.turns.is_multiple_of(CHECK) {
            self.inward.check()?;
            let waits = self.requests.waiting() > 0
                || !self.active.is_empty()
                || self.copies_are_under_way()
                || self.incoming.iter().any(|from| !from.is_idle());
            let limit = shared.runtime.loaded.settings.stall_report;
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
    fn let_in(&mut self, shared: &Shared) -> Result<()> {
        while let Some(made) = shared.listener.next(&shared.purpose())? {
            self.incoming.push(Incoming::new(shared.runtime.clone(), made)?);
        }
        Ok(())
    }

    /// Takes in what has arrived from all ranks.
    fn take_in(&mut self, shared: &Shared) -> Result<()> {
        let mut incoming = std::mem::take(&mut self.incoming);
        let mut failure = None;
        incoming.retain_mut(|from| {
            let stays = self.take_from(shared, from);
            stays.unwrap_or_else(|e| {
                failure = Some(e);
                true
            })
        });
        self.incoming = incoming;
        failure.map_or(Ok(()), Err)
    }

    /// Takes in what has arrived from one rank. False if nothing will come any more.
    fn take_from(&mut self, shared: &Shared, from: &mut Incoming) -> Result<bool> {
        // Looked at first: what came before the end is then found below.
        let ended = from.ended();
        let (mut refused, mut all) = (None, false);
        for _ in 0..TURN {
            match from.next() {
                Ok(None) => {
                    all = true;
                    break;
                }
                Ok(Some(message)) => match self.handle(shared, from, message)? {
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
                self.lose(shared, rank, cause);
            }
            return Ok(false);
        }
        match ended {
            Some(cause) if all && from.is_idle() => {
                if let Some(rank) = from.rank {
                    self.lose(shared, rank, cause);
                }
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    /// Does what a message asks.
    fn handle(&mut self, shared: &Shared, from: &mut Incoming, message: Message) -> Result<Handled> {
        let refused = |why: String| Ok(Handled::Refused(why));
        let mut landing = Landing::default();
        let Some(rank) = from.rank else {
            let ranks = self.peers.len() as u32;
            return match message.header {
                Header::Hello { rank, ranks: theirs }
                    if theirs == ranks && rank < ranks && rank != shared.rank =>
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
                let memory = match self.memory_of(shared, to, bytes, bytes > 0) {
                    Named::Here(memory) => memory,
                    Named::Later => return Ok(Handled::Later),
                    Named::Refused(why) => return refused(why),
                };
                let adds = match signal {
                    None => None,
                    Some(Adds { at, value }) => match self.memory_of(shared, at, 8, true) {
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
                    // back behind the mark; the memory is registered, and `settle_copies` comes before it is not.
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
                let payload = match self.memory_of(shared, place, bytes, bytes > 0) {
                    Named::Here(found) => found.map(|(memory, _)| (memory, place.offset)),
                    Named::Later => return Ok(Handled::Later),
                    Named::Refused(why) => return refused(why),
                };
                if self.peers[rank as usize].ops.len() >= MOST_REPLIES {
                    return refused(format!("more than {MOST_REPLIES} gets wait to be answered"));
                }
                let op = Op { what: What::Reply { get }, payload, bytes, sent: 0, request: None };
                self.begin(shared, rank, op);
            }
        }
        from.landings.push(landing);
        Ok(Handled::Taken)
    }

    /// The bytes that a message names, if it names any.
    fn memory_of(&self, shared: &Shared, place: Place, bytes: u64, any: bool) -> Named {
        if !any {
            return Named::Here(None);
        }
        match shared.memories.find(place.memory) {
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
    fn send_to(&mut self, shared: &Shared, rank: u32) -> bool {
        let peer = &mut self.peers[rank as usize];
        if let Reach::Unasked = peer.reach {
            peer.reach = Reach::Dialing(Box::new(shared.handles[rank as usize]));
        }
        if let Reach::Dialing(handle) = &mut peer.reach {
            let hello = Header::Hello { rank: shared.rank, ranks: shared.ranks };
            let purpose = shared.purpose();
            let made = shared.attempts.dial(&shared.runtime, handle, shared.class(), &purpose);
            let new = made.and_then(|made| {
                made.map(|made| Outgoing::new(shared.runtime.clone(), made, rank, hello)).transpose()
            });
            match new {
                Ok(None) => return true,
                Ok(Some(outgoing)) => peer.reach = Reach::Live(Box::new(outgoing)),
                Err(failure) => {
                    let text = format!("rank {rank} can't be reached: {}", failure.text);
                    let cause = Cause { code: failure.code, text: text.into() };
                    self.lose(shared, rank, cause);
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
        self.lose(shared, rank, lost);
        false
    }

    // -------------------------------------------------------------------- losses

    /// A rank is lost: what waits for it fails, and what is asked of it later. A rank that closes in order is no loss, unless
    /// something still waits for it.
    fn lose(&mut self, shared: &Shared, rank: u32, cause: Cause) {
        let peer = &mut self.peers[rank as usize];
        // A rank that has asked nothing of this one has no queue pair to say so with.
        let in_order = peer.bye || matches!(&peer.reach, Reach::Live(outgoing) if outgoing.has_all());
        let ops = std::mem::take(&mut peer.ops);
        let mut waited = !ops.is_empty();
        for request in ops.into_iter().filter_map(|op| op.request) {
            self.requests.fail(request, &cause);
        }
        waited |= self.requests.fail_gets(rank, &cause);
        match std::mem::replace(&mut peer.reach, Reach::Lost(cause.clone())) {
            Reach::Live(mut outgoing) => {
                waited |= outgoing.is_staging();
                outgoing.give_up(|request| self.requests.fail(request, &cause));
                // The window goes with the queue pair, unless the GPU still copies to it.
                if let Err(failure) = self.settle_copies() {
                    log::warn(&format!("RMA: the window to rank {rank} stays mapped: {failure}"));
                    std::mem::forget(outgoing);
                }
            }
            Reach::Dialing(mut handle) => shared.attempts.abandon(&mut handle),
            Reach::Unasked => {}
            Reach::Lost(_) => {
                // It was said when the rank was lost, unless the rank had closed in order.
                if waited {
                    shared.failed(&cause);
                }
                return;
            }
        }
        if waited || !in_order {
            log::warn(&format!("RMA: rank {rank} is lost: {}", cause.text));
            shared.failed(&cause);
        }
    }

    /// Looks whether a rank is lost to which nothing waits to be sent.
    fn look_for_losses(&mut self, shared: &Shared) {
        for rank in 0..self.peers.len() as u32 {
            if let Reach::Live(outgoing) = &self.peers[rank as usize].reach
                && let Some(cause) = outgoing.ended()
            {
                self.lose(shared, rank, cause);
            }
        }
    }

    /// The coll comm as a whole fails. The other ranks are told by the end of all queue pairs.
    fn break_off(&mut self, shared: &Shared, cause: Cause) {
        log::warn(&format!("RMA: {}", cause.text));
        shared.failed(&cause);
        self.requests.fail_all(&cause);
        self.incoming.iter().for_each(Incoming::abort);
        for peer in &mut self.peers {
            match &mut peer.reach {
                Reach::Live(outgoing) => outgoing.abort(),
                Reach::Dialing(handle) => {
                    shared.attempts.abandon(handle);
                    peer.reach = Reach::Lost(cause.clone());
                }
                Reach::Unasked | Reach::Lost(_) => {}
            }
        }
        self.broken = Some(cause);
    }

    /// Of a coll comm that has failed: ranks that connect are told so by the end of their queue pairs.
    fn turn_away(&mut self, shared: &Shared) {
        // What fails here ends the attempt of that rank too.
        while let Ok(Some(made)) = shared.listener.next(&shared.purpose()) {
            drop(Incoming::new(shared.runtime.clone(), made));
        }
    }

    // ------------------------------------------------------------------- endings

    /// Whether copies by the GPU are under way.
    fn copies_are_under_way(&self) -> bool {
        self.inward.is_busy()
            || self.own.is_busy()
            || self.outward.as_ref().is_some_and(|copies| !copies.is_done())
    }

    /// Waits until the GPU has done what it was told. A copy takes as long as its bytes take over PCIe.
    fn settle_copies(&mut self) -> Result<()> {
        let began = Instant::now();
        while self.copies_are_under_way() {
            self.inward.advance()?;
            self.own.advance(&mut self.inward, &mut self.requests)?;
            self.inward.mark()?;
            if let Some(outward) = &mut self.outward {
                outward
                    .mark_what_is_open()
                    .and_then(|_| outward.look())
                    .map_err(Failure::system("copying"))?;
            }
            if began.elapsed() > SETTLE {
                self.inward.check()?;
                return Err(Failure::new(Code::System, format!("the GPU still copies after {SETTLE:?}")));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Nothing uses this memory any more, which is deregistered: what still waits to be sent out of it fails, with all that
    /// is asked of the same ranks.
    pub fn forget(&mut self, shared: &Shared, memory: &Arc<Memory>) -> Result<()> {
        let cause = || Cause {
            code: Code::Usage,
            text: format!(
                "{} bytes at {:#x} were deregistered while an operation still needed them",
                memory.bytes, memory.address
            )
            .into(),
        };
        for rank in 0..self.peers.len() as u32 {
            if self.peers[rank as usize].ops.iter().any(|op| op.uses(memory)) {
                self.lose(shared, rank, cause());
            }
        }
        self.requests.fail_gets_into(memory, &cause());
        self.settle_copies()?;
        let passed = self.inward.passed();
        for from in &mut self.incoming {
            from.settle(passed, &mut self.requests);
        }
        self.settle_flushes();
        self.inward.forget(memory);
        Ok(())
    }

    /// Sends what was begun, tells the ranks that no more follows, and waits a while until they have it.
    pub fn close(&mut self, shared: &Shared) {
        let began = Instant::now();
        let mut said = vec![false; self.peers.len()];
        loop {
            self.progress(shared);
            let mut waits = false;
            for (peer, said) in self.peers.iter_mut().zip(&mut said) {
                let outgoing = match &mut peer.reach {
                    Reach::Live(outgoing) if outgoing.ended().is_none() => outgoing,
                    Reach::Dialing(_) => {
                        waits |= !peer.ops.is_empty();
                        continue;
                    }
                    _ => continue,
                };
                if peer.ops.is_empty() && !outgoing.is_staging() && !*said {
                    *said = outgoing.say_bye();
                }
                waits |= !*said || !outgoing.is_delivered();
            }
            if !waits || self.broken.is_some() {
                break;
            }
            if began.elapsed() > DELIVERY {
                log::warn(&format!(
                    "RMA: closed after {DELIVERY:?}, though some rank does not have all that was sent to it"
                ));
                break;
            }
            std::thread::yield_now();
        }
        for peer in &mut self.peers {
            if let Reach::Dialing(handle) = &mut peer.reach {
                shared.attempts.abandon(handle);
            }
        }
        let cause = Cause { code: Code::Usage, text: "the coll comm is closed".into() };
        self.requests.fail_all(&cause);
        self.broken = Some(cause);
        let settled = self.settle_copies();
        let ends = (std::mem::take(&mut self.incoming), std::mem::take(&mut self.peers));
        if settled.is_err() {
            log::warn("RMA: the GPU still copies, so the memory that it copies to stays mapped");
            std::mem::forget(ends);
            std::mem::forget(std::mem::replace(&mut self.inward, Inward::new(None)));
            std::mem::forget(self.outward.take());
            self.own.forget();
        }
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
