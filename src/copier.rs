//! The copier (docs/copier.md), and a [`Mover`] for the engine that uses it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pushgate_engine::mover::{MoveError, Mover};
pub use pushgate_gpu_kernels::copier::{
    Copier, CopierCpus, CopyQueue, DeviceMemory, Direction, HostPlace, Lost, PostError, Program,
    ServeOptions, Ticket, Unavailable, background, serve,
};

/// Copies of up to this many bytes are first copied aside, into memory that the copier has. The source is free at once, and it need
/// not be registered: inline payload lies in the engine's own memory.
const SMALL: usize = 256;

/// Copies that could not be posted and that no engine has asked for, at most.
const FAILED: usize = 1024;

/// The number of a copy of no bytes, which is done at once.
const EMPTY: u64 = u64::MAX;

/// A copy of an engine's.
enum Under {
    /// It did not fit in the full ring and is still to be posted.
    Waiting {
        dst: u64,
        src: usize,
        length: usize,
    },
    Posted(Ticket),
    Done,
}

/// A [`Mover`] whose copies the copier makes, so that none of them calls the driver in this process.
///
/// [`Mover::flush`], which completes what an RDMA device wrote, would need a call of the driver; here it always fails with an error.
#[derive(Debug)]
struct CopierMover {
    queue: CopyQueue,
    /// Copies that are not known to be done, or follow one that is not, oldest first.
    under_way: VecDeque<Under>,
    /// The number of the oldest of them.
    first: u64,
    /// How many of them have been posted, or could not be: the others wait.
    posted: usize,
    /// Copies that could not be posted, by their numbers, oldest first: an engine that asks is told why, and the copies of other queue
    /// pairs go on. An engine that gave a queue pair up does not ask, so at most [`FAILED`] are kept.
    failed: VecDeque<(u64, MoveError)>,
}

impl std::fmt::Debug for Under {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Under::Waiting { .. } => "waiting",
            Under::Posted(_) => "posted",
            Under::Done => "done",
        })
    }
}

impl CopierMover {
    /// Takes over the pulls of a copier.
    ///
    /// # Panics
    /// If `queue` is of the other direction.
    fn new(queue: CopyQueue) -> Self {
        assert_eq!(queue.direction(), Direction::Pull);
        Self { queue, under_way: VecDeque::with_capacity(64), first: 0, posted: 0, failed: VecDeque::new() }
    }

    /// Places for copies put aside.
    fn places(&self) -> usize {
        self.queue.aside().1 / SMALL
    }

    /// Posts waiting copies as long as the rings have room.
    fn post(&mut self) {
        while let Some(&Under::Waiting { dst, src, length }) = self.under_way.get(self.posted) {
            // SAFETY: the engine resolved both ranges, and leaves them alone until the copy is done. (What it puts aside is this
            // value's own, and is used again only once the copy is done.)
            self.under_way[self.posted] = match unsafe { self.queue.post(dst, src as u64, length) } {
                Ok(ticket) => Under::Posted(ticket),
                Err(PostError::Full) => return,
                Err(error) => {
                    let number = self.first + self.posted as u64;
                    self.failed.push_back((number, MoveError { length, reason: error.to_string() }));
                    if self.failed.len() > FAILED {
                        self.failed.pop_front();
                    }
                    Under::Done
                }
            };
            self.posted += 1;
        }
    }
}

impl Mover for CopierMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        // An empty message may name memory that the copier does not have: an RDMA device writes what is longer.
        if length == 0 {
            return Ok(EMPTY);
        }
        let number = self.first + self.under_way.len() as u64;
        let mut from = src;
        if length <= SMALL {
            let places = self.places();
            if self.under_way.len() >= places {
                return Err(MoveError { length, reason: format!("more than {places} copies are under way") });
            }
            from = self.queue.aside().0 + (number as usize % places) * SMALL;
            // SAFETY: the engine promises that the source is readable. No copy under way uses the place (checked above), which the
            // device reads only after the copy is posted.
            unsafe { std::ptr::copy_nonoverlapping(src as *const u8, from as *mut u8, length) };
        }
        self.under_way.push_back(Under::Waiting { dst, src: from, length });
        self.post();
        Ok(number)
    }

    fn done(&mut self, number: u64) -> Result<bool, MoveError> {
        if number == EMPTY {
            return Ok(true);
        }
        self.post();
        if let Some(at) = self.failed.iter().position(|(failed, _)| *failed == number) {
            return Err(self.failed.remove(at).expect("found").1);
        }
        let Some(at) = number.checked_sub(self.first) else { return Ok(true) };
        let copy = &mut self.under_way[at as usize];
        let done = match copy {
            Under::Posted(ticket) => self.queue.done(*ticket),
            Under::Done => true,
            Under::Waiting { .. } => false,
        };
        if !done {
            let lost = |error: PostError| MoveError { length: 0, reason: error.to_string() };
            return self.queue.health().map_err(lost).map(|()| false);
        }
        *copy = Under::Done;
        // An engine that gave a queue pair up asks for none of its copies any more.
        while self.under_way.front().is_some_and(|front| match front {
            Under::Posted(ticket) => self.queue.done(*ticket),
            Under::Done => true,
            Under::Waiting { .. } => false,
        }) {
            self.under_way.pop_front();
            self.first += 1;
            self.posted -= 1;
        }
        Ok(true)
    }
}

/// A [`Mover`] for several engines of one device. Each engine has a clone.
///
/// An engine holds the lock for a few stores into the copier's rings, or for a look at its marks.
#[derive(Clone, Debug)]
pub struct SharedMover(Arc<Mutex<CopierMover>>);

impl SharedMover {
    /// The mover over a copier's pulls. `queue` must be of that direction.
    ///
    /// Host memory of more than 256 bytes that the engine copies from must be registered with the copier, or the copy fails.
    pub fn new(queue: CopyQueue) -> Self {
        SharedMover(Arc::new(Mutex::new(CopierMover::new(queue))))
    }
}

impl Mover for SharedMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).start(dst, src, length)
    }

    fn done(&mut self, ticket: u64) -> Result<bool, MoveError> {
        // An engine asks in each pass. While another one holds the lock, the answer waits for the next pass: no engine sleeps
        // in the kernel for the lock.
        match self.0.try_lock() {
            Ok(mut mover) => mover.done(ticket),
            Err(TryLockError::Poisoned(mover)) => mover.into_inner().done(ticket),
            Err(TryLockError::WouldBlock) => Ok(false),
        }
    }

    fn process(&self) -> Option<u32> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).queue.process()
    }
}
