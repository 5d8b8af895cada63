//! What NCCL calls: doors (its listenComm), coll comms, contexts and registrations.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushgate_driver_shim::memory::HugePages;
use pushgate_engine::engine::StandIn;
use pushgate_engine::idle::Step;
use pushgate_gpu_kernels::OrderedCopies;

use super::means::Means;
use super::memory::{Memory, Signal, Stretch};
use super::requests::Handle;
use super::state::State;
use crate::end::SETTLE;
use crate::error::{Code, Failure, Result};
use crate::exclusive::{Exclusive, Refused};
use crate::handle;
use crate::handshake::{Attempts, Listener};
use crate::runtime::Runtime;

/// What NCCL calls a listenComm of the RMA table. Closing it leaves the coll comms that were made with it as they are.
pub struct Door {
    listener: Arc<Listener>,
    /// The device over which its coll comms go.
    dev: usize,
}

impl Door {
    /// Starts to listen, for coll comms over device `dev`; returns the handle for the other ranks.
    pub fn new(runtime: Arc<Runtime>, dev: usize) -> Result<(Self, [u8; handle::BYTES])> {
        let (listener, handle) = Listener::new(runtime, None)?;
        Ok((Door { listener: Arc::new(listener), dev }, handle))
    }
}

/// What the threads of a coll comm have in common.
struct Shared {
    means: Means,
    state: Exclusive<State>,
}

/// A memory, as NCCL holds it.
pub type Registered = Arc<Memory>;

/// What NCCL calls a collComm: this rank among its ranks.
pub struct Coll {
    shared: Arc<Shared>,
}

/// Contexts of a coll comm, which NCCL calls an rmaCtx.
pub struct Contexts {
    shared: Arc<Shared>,
    number: u32,
    contexts: u32,
}

impl Shared {
    /// Runs `f` for NCCL's thread that makes progress.
    #[inline]
    fn enter<R>(&self, f: impl FnOnce(&mut State) -> Result<R>) -> Result<R> {
        self.state.enter(f).unwrap_or_else(|| Err(self.two_threads()))
    }

    #[cold]
    fn two_threads(&self) -> Failure {
        let text = "two threads use an RMA coll comm at once, or one of them has failed there";
        Failure::new(Code::Usage, text)
    }

    /// Runs `f` for another thread, which waits until the first one leaves the state for a moment.
    fn visit<R>(&self, f: impl FnOnce(&mut State) -> R) -> Result<R> {
        let began = Instant::now();
        let mut f = Some(f);
        loop {
            let mut run = |state: &mut State| (f.take().expect("it runs once"))(state);
            match self.state.visit(&mut run) {
                Ok(result) => return Ok(result),
                Err(Refused::Poisoned) => return Err(self.two_threads()),
                Err(Refused::Busy) if began.elapsed() > SETTLE => {
                    let text = format!("another thread was in each call of the coll comm for {SETTLE:?}");
                    return Err(Failure::new(Code::System, text));
                }
                Err(Refused::Busy) => std::thread::yield_now(),
            }
        }
    }
}

/// While NCCL does not call, the lane's thread does what other ranks ask of this one. It makes the calls that NCCL's thread would make,
/// also those of the driver on the GPU's streams, and NCCL's thread waits for the end of a turn as it would for its own.
impl StandIn for Shared {
    fn turn(&self) -> Option<Step> {
        match self.state.visit(|state| state.stand_in(&self.means)) {
            Ok(step) => Some(step),
            Err(Refused::Busy) => None,
            // NCCL is told in its next call.
            Err(Refused::Poisoned) => Some(Step::Block(Duration::MAX)),
        }
    }

    fn bells(&self) -> Vec<BorrowedFd<'_>> {
        self.means.listener.bells()
    }
}

impl Coll {
    /// This rank's part of a coll comm whose ranks have these handles. Returns at once: queue pairs are made when something
    /// is asked of a rank.
    pub fn new(
        (runtime, attempts): (Arc<Runtime>, Arc<Attempts>),
        door: &Door,
        handles: Box<[[u8; handle::BYTES]]>,
        rank: u32,
    ) -> Result<Self> {
        let ranks = u32::try_from(handles.len()).ok().filter(|ranks| rank < *ranks);
        let Some(ranks) = ranks else {
            let text = format!("rank {rank} of {} ranks", handles.len());
            return Err(Failure::new(Code::Argument, text));
        };
        for handle in &handles {
            handle::Handle::decode(handle)?;
        }
        let lane = runtime.rma_lane(door.dev)?;
        let queue = |gpu: &Arc<crate::gpu::Gpu>, bytes| {
            let words = runtime.memory(&lane, "copies", bytes, HugePages::Never)?;
            gpu.ordered_copies(words)
        };
        let (between, within) = (OrderedCopies::BYTES, OrderedCopies::BYTES_TO_COPY_WITHIN);
        let copies = match &lane.gpu {
            Some(gpu) => Some([queue(gpu, between)?, queue(gpu, between)?, queue(gpu, within)?]),
            None => None,
        };
        let state = Exclusive::new(State::new(ranks, copies));
        let means = Means::new((runtime, attempts), lane, door.listener.clone(), handles, (rank, ranks));
        let shared = Arc::new(Shared { means, state });
        shared.means.lane.engine.stand_in_with(Some(shared.clone()))?;
        Ok(Coll { shared })
    }

    /// Registers memory. The call is collective: each rank makes the same registrations in the same order. `kept`: nobody
    /// but this plugin writes to signals in the memory.
    pub fn register(&self, address: usize, bytes: usize, cuda: bool, kept: bool) -> Result<Registered> {
        if cuda && self.shared.means.lane.gpu.is_none() {
            let text = "GPU memory, but this process has no GPU that the plugin can use; its first lines in this log say why";
            return Err(Failure::new(Code::Usage, text));
        }
        if address == 0 || address.checked_add(bytes).is_none() {
            let text = format!("registration of {bytes} bytes at {address:#x}");
            return Err(Failure::new(Code::Argument, text));
        }
        Ok(self.shared.means.memories.add(address, bytes, cuda, kept))
    }

    /// Deregisters memory. Afterwards nothing reads or writes it.
    pub fn deregister(&self, memory: &Registered) -> Result<()> {
        let shared = &*self.shared;
        if !shared.means.memories.remove(memory) {
            return Err(Failure::new(Code::Argument, "memory that was deregistered before"));
        }
        shared.visit(|state| state.forget(&shared.means, memory))?
    }

    /// Makes contexts. Operations of one context to one rank keep their order.
    pub fn contexts(&self, contexts: u32, class: i32) -> Result<Contexts> {
        if contexts == 0 {
            return Err(Failure::new(Code::Argument, "no context is asked for"));
        }
        let shared = self.shared.clone();
        shared.means.set_class(class);
        let number = shared.visit(|state| state.add_contexts(contexts))?;
        Ok(Contexts { shared, number, contexts })
    }

    /// Tests a request. After true, or a failure that is the request's, the request is gone.
    #[inline]
    pub fn test(&self, request: Handle) -> Result<bool> {
        let shared = &*self.shared;
        shared.enter(|state| state.test(&shared.means, request))
    }
}

#[cfg(test)]
impl Coll {
    /// The first failure that NCCL is told of, if there is one.
    pub fn failure(&self) -> Option<String> {
        self.shared.means.failure().map(|cause| cause.text.to_string())
    }
}

impl Drop for Coll {
    fn drop(&mut self) {
        let shared = &*self.shared;
        // An engine that is gone has no thread that stands in.
        let _ = shared.means.lane.engine.stand_in_with(None);
        if let Err(e) = shared.visit(|state| state.close(&shared.means)) {
            crate::log::warn(&format!("RMA: closing: {e}"));
        }
    }
}

impl Contexts {
    /// Checks the context and the rank that an operation names.
    fn check(&self, context: u32, rank: u32) -> Result<()> {
        let (contexts, ranks) = (self.contexts, self.shared.means.ranks);
        if context < contexts && rank < ranks {
            return Ok(());
        }
        let text = format!("context {context} of {contexts}, rank {rank} of {ranks}");
        Err(Failure::new(Code::Argument, text))
    }

    /// How many contexts these are.
    pub fn count(&self) -> u32 {
        self.contexts
    }

    /// Puts `bytes` bytes from own memory into a rank's memory, then adds to a signal of the rank. Without stretches there are
    /// no bytes.
    ///
    /// # Safety
    /// Registered memory is valid until it is deregistered, and the payload is left alone until the request is done.
    #[inline]
    pub unsafe fn put(
        &self,
        (context, rank): (u32, u32),
        (from, to, bytes): (Option<Stretch<'_>>, Option<Stretch<'_>>, u64),
        signal: Option<Signal<'_>>,
    ) -> Result<Handle> {
        self.check(context, rank)?;
        let none = || Failure::new(Code::Argument, format!("a put of {bytes} bytes without memory"));
        let (from, to) = match bytes {
            0 => (None, None),
            _ => (Some(from.ok_or_else(none)?), Some(to.ok_or_else(none)?)),
        };
        // Registrations are symmetric, so what leaves the own one leaves the other rank's, which checks again.
        for stretch in [from, to].into_iter().flatten() {
            stretch.memory.stretch(stretch.offset, bytes)?;
        }
        if let Some(signal) = signal {
            signal.at.memory.signal(signal.at.offset).map_err(|why| Failure::new(Code::Usage, why))?;
        }
        let shared = &*self.shared;
        // SAFETY: the caller's promise.
        shared.enter(|state| unsafe {
            state.put(&shared.means, (self.number, context, rank), (from, to, bytes), signal)
        })
    }

    /// Gets `bytes` bytes from a rank's memory into own memory.
    ///
    /// # Safety
    /// As [`Contexts::put`].
    #[inline]
    pub unsafe fn get(
        &self,
        (context, rank): (u32, u32),
        (from, to, bytes): (Stretch<'_>, Stretch<'_>, u64),
    ) -> Result<Handle> {
        self.check(context, rank)?;
        for stretch in [from, to] {
            stretch.memory.stretch(stretch.offset, bytes)?;
        }
        let shared = &*self.shared;
        // SAFETY: the caller's promise.
        shared.enter(|state| unsafe {
            state.get(&shared.means, (self.number, context, rank), (from, to, bytes))
        })
    }

    /// A request that is done once the bytes of all gets that are done can be seen.
    pub fn flush(&self, context: u32, rank: u32) -> Result<Handle> {
        self.check(context, rank)?;
        self.shared.enter(|state| state.flush((self.number, context, rank)))
    }

    /// Moves all operations of the coll comm on.
    #[inline]
    pub fn progress(&self) -> Result<()> {
        let shared = &*self.shared;
        shared.enter(|state| {
            state.progress(&shared.means);
            Ok(())
        })
    }

    /// Whether something has failed.
    pub fn has_failed(&self) -> bool {
        self.shared.means.failure().is_some()
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        // A state that nobody can enter has no use for contexts.
        let _ = self.shared.visit(|state| state.remove_contexts(self.number));
    }
}
