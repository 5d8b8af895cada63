//! One coll comm: what waits for each rank, what has arrived, and how both go on. One thread at a time has it.

mod ending;
mod progress;

use std::collections::VecDeque;

use pushgate_gpu_kernels::OrderedCopies;

use super::incoming::Incoming;
use super::landing::{Inward, Landing, Landings};
use super::means::Means;
use super::memory::{Signal, Stretch};
use super::outgoing::{Op, Outgoing, What};
use super::own::Own;
use super::requests::{Cause, Counted, Get, Handle, Requests};
use super::stall::Stall;
use super::wire::{Adds, Place};
use crate::error::{Code, Failure, Result};
use crate::handle;

/// Operations that NCCL may have under way to one rank in one context: its 32 for each receive that
/// [`crate::ffi::types::MAX_RECVS`] tells it of.
pub const DEPTH: u16 = 32 * crate::ffi::types::MAX_RECVS as u16;
/// One in this number of tests in vain makes progress, where several requests are under way.
const TESTS: u64 = 8;

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
    /// Turns of the lane's thread in which nothing moved, one after the other.
    in_vain: u32,
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
            in_vain: 0,
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
        means: &Means,
        (contexts, context, rank): (u32, u32, u32),
        (from, to, bytes): (Option<Stretch<'_>>, Option<Stretch<'_>>, u64),
        signal: Option<Signal<'_>>,
    ) -> Result<Handle> {
        self.lives()?;
        let counted = self.count(contexts, context, rank)?;
        let request = self.requests.add(counted, None);
        if rank == means.rank {
            // SAFETY: the caller's promise.
            let put = unsafe { self.put_here(request, (from, to, bytes), signal) };
            self.unless_broken(means, put);
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
        self.begin(means, rank, op);
        Ok(request)
    }

    /// Gets `bytes` bytes out of a rank's memory.
    ///
    /// # Safety
    /// The memories stay valid until they are deregistered.
    pub unsafe fn get(
        &mut self,
        means: &Means,
        (contexts, context, rank): (u32, u32, u32),
        (from, to, bytes): (Stretch<'_>, Stretch<'_>, u64),
    ) -> Result<Handle> {
        self.lives()?;
        let counted = self.count(contexts, context, rank)?;
        if rank == means.rank {
            let request = self.requests.add(counted, None);
            // SAFETY: the caller's promise.
            let got = unsafe { self.put_here(request, (Some(from), Some(to), bytes), None) };
            self.unless_broken(means, got);
            return Ok(request);
        }
        let (memory, offset) = (to.memory.clone(), to.offset);
        let get = self.requests.add(counted, Some(Get { memory, offset, bytes, arrived: 0, from: rank }));
        let from = Place { memory: from.memory.number, offset: from.offset };
        let op = Op { what: What::Get { from, bytes, get }, payload: None, bytes: 0, sent: 0, request: None };
        self.begin(means, rank, op);
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
    fn begin(&mut self, means: &Means, rank: u32, op: Op) {
        self.peers[rank as usize].ops.push_back(op);
        self.activate(rank);
        self.send_to(means, rank);
    }

    fn activate(&mut self, rank: u32) {
        let peer = &mut self.peers[rank as usize];
        if !peer.active {
            peer.active = true;
            self.active.push(rank);
        }
    }

    /// Whether a request is done. Makes progress if it is not.
    pub fn test(&mut self, means: &Means, request: Handle) -> Result<bool> {
        let mut answer = self.requests.test(request);
        if let Ok((false, _)) = answer {
            // NCCL tests all that is under way one after the other, and asks for progress between.
            self.tests += 1;
            if self.requests.count() == 1 || self.tests.is_multiple_of(TESTS) {
                self.progress(means);
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
}
