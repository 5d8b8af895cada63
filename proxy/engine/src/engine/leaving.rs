//! Queue pairs on their way out of an engine. The engine looks at all of them once a pass and goes on serving the
//! others: what each waits for (its own copies, the last words to its peer, its device) they wait for together.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::mover::Mover;
use pushgate_driver_shim::limited;

use super::command::{Removal, Removed, Waiter};
use crate::counters::Counters;
use crate::endpoint::Endpoint;

/// How long a queue pair that goes waits for a copy of its own, and a region for what uses it, nanoseconds.
pub(super) const SETTLE: u64 = 2_000_000_000;

/// How long, in nanoseconds, the removal of a region waits for a device that copies into it. Where the device has failed its mover says
/// so, and the copy ends.
pub(super) const DEVICE_SETTLE: u64 = 10_000_000_000;

/// So much later, in nanoseconds, is it for a queue pair whose program does not wait for its end: whatever it waits for has taken too
/// long then.
pub(super) const LATER: u64 = 3_600_000_000_000;

/// A queue pair that goes.
struct Leaver {
    endpoint: Box<Endpoint>,
    waiter: Option<Waiter<Removed>>,
    /// When it began to go, nanoseconds.
    since: u64,
    /// Its copies have ended; false: they did not within the limit. `None` until then.
    settled: Option<bool>,
}

impl Leaver {
    /// Moves it on. True when nothing of it touches memory any more, or its copies do not end.
    fn advance(&mut self, mover: &mut Option<Box<dyn Mover>>, now: u64) -> bool {
        let hurries = self.waiter.as_ref().is_some_and(Waiter::hurries);
        let now = if hurries { now.saturating_add(LATER) } else { now };
        self.endpoint.set_time(now);
        if self.settled.is_none() {
            // A device may be reading mappings that go with it.
            let settled = self.endpoint.settle(mover);
            if !settled && now.saturating_sub(self.since) < SETTLE {
                return false;
            }
            self.settled = Some(settled);
            self.endpoint.close();
        }
        self.endpoint.is_gone()
    }
}

/// A queue pair that is gone: nothing of it touches memory any more, and what it used can be freed.
pub struct Gone {
    endpoint: Box<Endpoint>,
    waiter: Option<Waiter<Removed>>,
    removal: Removal,
}

impl Gone {
    /// Frees what the queue pair used, then answers who asked for its removal. The kernel may take long to take back
    /// large registrations.
    pub fn free(self) {
        drop(self.endpoint);
        answer(self.waiter, self.removal);
    }
}

/// The queue pairs that go.
#[derive(Default)]
pub(super) struct Leaving {
    leavers: Vec<Leaver>,
    gone: Vec<Gone>,
}

impl Leaving {
    /// True if no queue pair is on its way.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.leavers.is_empty()
    }

    /// Takes a queue pair that goes from time `now` on, nanoseconds.
    pub(super) fn add(&mut self, mut endpoint: Box<Endpoint>, waiter: Option<Waiter<Removed>>, now: u64) {
        endpoint.set_time(now);
        endpoint.leave();
        self.leavers.push(Leaver { endpoint, waiter, since: now, settled: None });
    }

    /// Counts of those on their way.
    pub(super) fn counters(&self) -> impl Iterator<Item = Counters> + '_ {
        self.leavers.iter().map(|l| l.endpoint.counters())
    }

    /// Moves all of them on. Returns the counts of those that are gone, and whether the memory of each may go.
    #[cold]
    pub(super) fn advance(&mut self, mover: &mut Option<Box<dyn Mover>>, now: u64) -> (Counters, bool) {
        let (mut sum, mut settled) = (Counters::default(), true);
        let mut i = 0;
        while i < self.leavers.len() {
            if !self.leavers[i].advance(mover, now) {
                i += 1;
                continue;
            }
            let Leaver { mut endpoint, waiter, settled: own, .. } = self.leavers.swap_remove(i);
            endpoint.end_trace();
            let removal = removal(&endpoint, own == Some(true));
            sum += removal.counters;
            if removal.settled {
                self.gone.push(Gone { endpoint, waiter, removal });
                continue;
            }
            settled = false;
            limited!(
                error,
                endpoint.peer(),
                rank = endpoint.rank(),
                "a device's copy does not end; its memory stays"
            );
            std::mem::forget(endpoint);
            answer(waiter, removal);
        }
        (sum, settled)
    }

    /// The next queue pair that is gone and was not handed out.
    #[inline]
    pub(super) fn next_gone(&mut self) -> Option<Gone> {
        self.gone.pop()
    }

    /// Hands out those on their way, each with who waits for it.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Abandoned> + '_ {
        self.leavers.drain(..).map(|l| Abandoned { endpoint: l.endpoint, waiter: l.waiter })
    }
}

/// Answers who asked for a removal.
fn answer(waiter: Option<Waiter<Removed>>, removal: Removal) {
    if let Some(waiter) = waiter {
        waiter.answer(Some(removal));
    }
}

/// What is to be told of a queue pair that was removed.
fn removal(endpoint: &Endpoint, settled: bool) -> Removal {
    let (counters, peer, undelivered) = (endpoint.counters(), endpoint.peer(), endpoint.undelivered());
    Removal { counters, settled, peer, undelivered }
}

/// `None` if `act` panics: a panic out of a destructor that runs after another panic would end the process.
fn quietly<T>(act: impl FnOnce() -> T) -> Option<T> {
    // The caller only asks the queue pair for its end, or drops it.
    catch_unwind(AssertUnwindSafe(act)).ok()
}

/// A queue pair of an engine that panicked. The panic may have been the mover's, which is asked nothing more: what its
/// device may still touch stays.
pub(super) struct Abandoned {
    endpoint: Box<Endpoint>,
    waiter: Option<Waiter<Removed>>,
}

impl Abandoned {
    pub(super) fn new(endpoint: Box<Endpoint>) -> Self {
        Abandoned { endpoint, waiter: None }
    }

    /// Begins its end.
    pub(super) fn close(&mut self) {
        quietly(|| self.endpoint.close());
    }

    /// Moves it on to time `now`, nanoseconds. True when nothing of it touches memory any more, or when it panics: then
    /// it is asked no more.
    pub(super) fn is_gone(&mut self, now: u64) -> bool {
        let gone = quietly(|| {
            self.endpoint.set_time(now);
            self.endpoint.is_gone()
        });
        gone.unwrap_or(true)
    }

    /// Drops it if nothing of it touches memory any more, else keeps its memory for ever; answers who waits. True if it
    /// was dropped.
    pub(super) fn free(self) -> bool {
        let Abandoned { mut endpoint, waiter } = self;
        let settled = quietly(|| endpoint.is_gone() && !endpoint.device_copies()) == Some(true);
        let removal = quietly(|| removal(&endpoint, settled));
        if settled {
            quietly(|| drop(endpoint));
        } else {
            std::mem::forget(endpoint);
        }
        let nothing = Removal { counters: Counters::default(), settled, peer: 0, undelivered: 0 };
        answer(waiter, removal.unwrap_or(nothing));
        settled
    }
}
