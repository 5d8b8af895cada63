//! Queue pairs on their way out of an engine. The engine looks at all of them once a pass and goes on
//! serving the others: what each waits for (its own copies, the last words to its peer, its device) they
//! wait for together. A thread beside the engine frees what they used, for the kernel takes its time
//! with large registrations.

use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::mover::Mover;

/// Who asked for the removal is told the last counts, and whether the memory can go.
pub(crate) type Reply = Sender<Option<(Counters, bool)>>;

/// A queue pair that goes.
struct Leaver {
    endpoint: Box<Endpoint>,
    reply: Option<Reply>,
    since: Instant,
    /// Its copies have ended; false: they did not within the limit. `None` until then.
    settled: Option<bool>,
}

impl Leaver {
    /// Moves it on. True when nothing of it touches memory any more, or its copies do not end.
    fn advance(&mut self, mover: &mut Option<Box<dyn Mover>>, limit: Duration) -> bool {
        if self.settled.is_none() {
            // A device may be reading mappings that go with it.
            let settled = self.endpoint.settle(mover, Duration::ZERO);
            if !settled && self.since.elapsed() < limit {
                return false;
            }
            self.settled = Some(settled);
            self.endpoint.close();
        }
        self.endpoint.is_gone()
    }
}

/// What the thread frees, and whom it tells of that.
type Freed = (Box<Endpoint>, Option<Reply>, Counters);

/// The thread that frees them, if it could be started.
struct Freeing {
    to: Sender<Freed>,
    thread: Option<JoinHandle<()>>,
}

/// The queue pairs that go.
#[derive(Default)]
pub(crate) struct Leaving {
    leavers: Vec<Leaver>,
    /// Started by the first that is gone.
    freeing: Option<Freeing>,
    /// Where it runs, if not where the engine does.
    cores: Option<CpuSet>,
}

impl Leaving {
    /// True if none is on its way.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.leavers.is_empty()
    }

    /// Takes a queue pair that goes.
    pub(crate) fn add(&mut self, endpoint: Box<Endpoint>, reply: Option<Reply>) {
        self.leavers.push(Leaver { endpoint, reply, since: Instant::now(), settled: None });
    }

    /// Counts of those on their way.
    pub(crate) fn counters(&self) -> impl Iterator<Item = Counters> + '_ {
        self.leavers.iter().map(|l| l.endpoint.counters())
    }

    /// Moves all of them on. Returns the counts of those that are gone, and whether the memory of each
    /// may go; `limit` is how long one waits for its own copies.
    #[cold]
    pub(crate) fn advance(
        &mut self,
        mover: &mut Option<Box<dyn Mover>>,
        limit: Duration,
    ) -> (Counters, bool) {
        let (mut sum, mut settled) = (Counters::default(), true);
        let mut i = 0;
        while i < self.leavers.len() {
            if !self.leavers[i].advance(mover, limit) {
                i += 1;
                continue;
            }
            let gone = self.leavers.swap_remove(i);
            let counters = gone.endpoint.counters();
            sum += counters;
            if gone.settled == Some(true) {
                self.free(gone.endpoint, gone.reply, counters);
                continue;
            }
            settled = false;
            tracing::error!(rank = gone.endpoint.rank(), "a device's copy does not end; its memory stays");
            std::mem::forget(gone.endpoint);
            answer(gone.reply, counters, false);
        }
        (sum, settled)
    }

    /// Hands out those on their way, each with who waits for it.
    pub(crate) fn abandon(&mut self) -> impl Iterator<Item = (Box<Endpoint>, Option<Reply>)> + '_ {
        self.leavers.drain(..).map(|l| (l.endpoint, l.reply))
    }

    /// The cores of the thread that frees, if it is not to inherit those of the engine's.
    pub(crate) fn free_on(&mut self, cores: Option<CpuSet>) {
        self.cores = cores;
    }

    fn free(&mut self, endpoint: Box<Endpoint>, reply: Option<Reply>, counters: Counters) {
        let freeing = self.freeing.get_or_insert_with(|| {
            let (to, from) = channel::<Freed>();
            let cores = self.cores;
            let work = move || {
                if let Some(cores) = cores {
                    // Where that is refused it runs where the engine does.
                    let _ = sched_setaffinity(None, &cores);
                }
                for (endpoint, reply, counters) in from {
                    drop(endpoint);
                    answer(reply, counters, true);
                }
            };
            // Without a thread the channel has no other end, and they are freed here.
            let thread = std::thread::Builder::new().name("pushgate-free".into()).spawn(work).ok();
            Freeing { to, thread }
        });
        if let Err(e) = freeing.to.send((endpoint, reply, counters)) {
            let (endpoint, reply, counters) = e.0;
            drop(endpoint);
            answer(reply, counters, true);
        }
    }
}

/// Answers who asked for a removal; an asker that is gone is not waited for.
pub(crate) fn answer(reply: Option<Reply>, counters: Counters, settled: bool) {
    if let Some(reply) = reply {
        let _ = reply.send(Some((counters, settled)));
    }
}

impl Drop for Leaving {
    /// What is being freed is gone when the engine is.
    fn drop(&mut self) {
        if let Some(Freeing { to, thread }) = self.freeing.take() {
            drop(to);
            // A panic there was printed by its hook.
            let _ = thread.map(JoinHandle::join);
        }
    }
}
