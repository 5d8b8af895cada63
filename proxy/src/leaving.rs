//! Queue pairs on their way out of an engine. The engine looks at all of them once a pass and goes on
//! serving the others: what each waits for (its own copies, the last words to its peer, its device) they
//! wait for together. A thread beside the engine frees what they used, for the kernel takes its time
//! with large registrations.

use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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

    /// Drops those on their way at once, but keeps for ever, with their memory, those for which a device
    /// still copies. True if there were any of these.
    pub(crate) fn abandon(&mut self) -> bool {
        let (copied, others): (Vec<_>, Vec<_>) =
            self.leavers.drain(..).partition(|l| l.endpoint.device_copies());
        drop(others);
        let any = !copied.is_empty();
        copied.into_iter().for_each(|l| std::mem::forget(l.endpoint));
        any
    }

    fn free(&mut self, endpoint: Box<Endpoint>, reply: Option<Reply>, counters: Counters) {
        let freeing = self.freeing.get_or_insert_with(|| {
            let (to, from) = channel::<Freed>();
            let work = move || {
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

/// An asker that is gone is not waited for.
fn answer(reply: Option<Reply>, counters: Counters, settled: bool) {
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
