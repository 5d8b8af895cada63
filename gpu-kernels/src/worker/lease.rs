//! Leases: operations of the program for which the worker stays.

use std::sync::atomic::Ordering;

use super::control::Layout;
use super::handle::Worker;
use super::shared::{LeaseSlot, Shared};
use crate::cuda::Follows;
use crate::error::Result;
use crate::lock::lock;

/// The generation number in the parameters of a launch that is part of a graph.
pub(super) const OF_A_GRAPH: u64 = 0;

/// An operation of the program for which the worker stays ([`Worker::lease`]).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the worker stays until Worker::lease_done has been called and the stream has reached its mark"]
pub struct Lease(pub(super) CountedBy);

/// What counts an operation as under way.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CountedBy {
    /// A pair of words, by its number.
    Words(usize),
    /// Nodes of the graph that the operation becomes part of.
    Graph,
    /// Nothing: copies for the operation start the worker on demand.
    Nothing,
}

impl Lease {
    /// Whether the worker is certain to be present for the operation. False if too many streams
    /// have operations under way, or if the driver lacks a call that counting needs.
    pub fn is_counted(&self) -> bool {
        self.0 != CountedBy::Nothing
    }
}

impl Worker {
    /// Announces an operation that will be put on `stream` (a `CUstream`) and will wait for copies.
    ///
    /// On return the worker is present, or queued before the operation, and it stays until
    /// [`Worker::lease_done`] has been called and the stream has reached that call's mark. May be
    /// called by any thread.
    ///
    /// The call starts the kernel if it is not there. Its only other call of the driver asks
    /// whether the stream captures a graph. If the stream does, the kernel becomes part of the
    /// graph, and the graph must not be replayed once the worker has been dropped.
    pub fn lease(&self, stream: u64) -> Result<Lease> {
        let shared = &*self.shared;
        shared.owner.check()?;
        if let Some(lost) = self.lost() {
            return Err(lost.error());
        }
        // Under this name every thread has a stream of its own (CU_STREAM_PER_THREAD).
        let is_many = shared.resident.is_some() && stream == 2;
        let follows = shared.resident.as_ref().map_or(Follows::Runs, |resident| resident.follows(stream));
        match follows {
            Follows::Captures => return join_graph(shared, stream).map(Lease),
            Follows::Runs if !is_many => {}
            _ => return Ok(Lease(CountedBy::Nothing)),
        }
        let slot = {
            let mut leases = lock(&shared.leases);
            // A pair of words whose stream has done all its operations may serve this stream.
            let is_free = |(at, slot): &(usize, &LeaseSlot)| {
                let done = shared.control.word(shared.lease_word(*at, true)).load(Ordering::Acquire);
                slot.opened == slot.closed && done >= slot.closed
            };
            let ours = leases.iter().position(|slot| slot.stream == stream && slot.opened > 0);
            let free = || leases.iter().enumerate().find(is_free).map(|(at, _)| at);
            let Some(at) = ours.or_else(free) else { return Ok(Lease(CountedBy::Nothing)) };
            let slot = &mut leases[at];
            slot.stream = stream;
            slot.opened += 1;
            // Under the lock, so no other thread counts at the same time. Stored before the lease,
            // which says more than a launch under way.
            let launching = shared.control.word(Layout::LAUNCHING);
            launching.store(launching.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            // Relaxed: `announce` orders this store before its look at the state.
            shared.control.word(shared.lease_word(at, false)).store(slot.opened, Ordering::Relaxed);
            at
        };
        let lease = Lease(CountedBy::Words(slot));
        if shared.control.announce() {
            if let Err(error) =
                shared.ensure(shared.options.lingers().at(shared.now(), shared.last_operation()))
            {
                self.launched();
                self.take_back(slot);
                return Err(error);
            }
        } else if shared.is_old() {
            shared.renew();
        }
        shared.behind_launches();
        Ok(lease)
    }

    /// Ends a lease: it is done once `stream` has reached this point, after the operation.
    ///
    /// On the device `cpu`, whose streams can't do that, the lease is done at once. If the stream
    /// can't be told to report, the lease is done at once too, and later copies for the operation
    /// start the worker on demand.
    pub fn lease_done(&self, lease: Lease, stream: u64) -> Result<()> {
        let shared = &*self.shared;
        shared.owner.check()?;
        let at = match lease.0 {
            CountedBy::Words(at) => at,
            CountedBy::Graph => return leave_graph(shared, stream),
            CountedBy::Nothing => return Ok(()),
        };
        self.launched();
        // Relaxed: used only for a guess.
        shared.last_launch.store(shared.now().as_nanos() as u64, Ordering::Relaxed);
        // The worker may have left to let the launch proceed. The next generation is queued after
        // the operation but before the mark: a mark that waits would hold up a device with one
        // queue for all streams.
        if shared.control.announce()
            && let Err(error) = shared.ensure(shared.options.linger)
        {
            self.take_back(at);
            return Err(error);
        }
        shared.behind_launches();
        // The lock is held over the call, so that values are written in the stream's order.
        let mut leases = lock(&shared.leases);
        let value = leases[at].closed + 1;
        let offset = shared.lease_word(at, true);
        let marked = match &shared.resident {
            Some(resident) => {
                let addr = shared.registration.device_addr() + offset as u64;
                resident.write_behind(stream, addr, value)
            }
            None => {
                shared.control.word(offset).store(value, Ordering::Release);
                Ok(())
            }
        };
        match marked {
            Ok(()) => {
                leases[at].closed = value;
                Ok(())
            }
            Err(error) => {
                drop(leases);
                self.take_back(at);
                Err(error)
            }
        }
    }

    /// Counts a launch of the program as made.
    fn launched(&self) {
        let _leases = lock(&self.shared.leases);
        let launching = self.shared.control.word(Layout::LAUNCHING);
        launching.store(launching.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    }

    fn take_back(&self, at: usize) {
        let mut leases = lock(&self.shared.leases);
        leases[at].opened -= 1;
        let word = self.shared.control.word(self.shared.lease_word(at, false));
        // This operation did not count as done before and does now, which only lets the worker
        // leave.
        word.store(leases[at].opened, Ordering::Relaxed);
    }
}

/// Puts the worker into the graph that a stream captures, beside the operation: a graph's
/// replay calls none of our code, so nothing could start the worker then.
fn join_graph(shared: &Shared, stream: u64) -> Result<CountedBy> {
    let Some(resident) = &shared.resident else { return Ok(CountedBy::Nothing) };
    let params = shared.params(OF_A_GRAPH, shared.options.linger_alone);
    // SAFETY: rings, words and mailboxes live as long as the worker, as in `Shared::start`. A graph
    // with operations of a library is not replayed after the library, and with it the worker,
    // has gone.
    let added = unsafe { resident.add_to_graph(stream, &params) }?;
    Ok(if added { CountedBy::Graph } else { CountedBy::Nothing })
}

/// Puts the mark after the operation into the graph. If that fails, for lack of memory, and the
/// graph is replayed all the same, a worker that has served it stays until its limit, and so do
/// all later ones.
fn leave_graph(shared: &Shared, stream: u64) -> Result<()> {
    let Some(resident) = &shared.resident else { return Ok(()) };
    let closed = shared.device.addr() + Layout::GRAPHS_CLOSED;
    // SAFETY: the word is the worker's own memory, which outlives the graph's replays, as in
    // `join_graph`. (False means that the capture has failed in the meantime, so there will be
    // no graph.)
    unsafe { resident.add_mark_to_graph(stream, closed) }.map(|_| ())
}
