//! The resident worker (docs/worker.md), and a [`Mover`] for the engine that uses the worker.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_gpu_kernels::{Access, Executor, Registration};
pub use pushgate_gpu_kernels::{
    Direction, Lease, Lost, OneWay, PostError, Ticket, Worker, WorkerOptions, WorkerQueue,
};
use pushgate_proxy::mover::{MoveError, Mover};

use crate::error::Result;

/// Copies of up to this many bytes are first copied aside, into registered memory. The source is
/// free at once, and it need not be registered: inline payload lies in the engine's own memory.
const SMALL: usize = 256;
/// Copies of up to this many bytes travel in the commands themselves, two words in each, if length
/// and destination are multiples of 8.
const INLINE: usize = 64;
/// Places for copies put aside: more than all queue pairs of a device have under way.
const PLACES: usize = 4096;

/// A [`Mover`] that copies with the worker's pulls, so that none of the engine's copies calls the
/// driver.
///
/// [`Mover::flush`], which completes what an RDMA device wrote, would need a call of the driver;
/// here it always fails with an error.
pub struct WorkerMover {
    // Dropped before the memory it registers.
    _registration: Registration,
    aside: SharedMemory,
    queue: OneWay,
    /// Copies begun, and how many of them were posted. Both are ticket numbers, because no other
    /// code posts to the queue.
    started: u64,
    posted: u64,
    /// Copies that did not fit in the full ring and are still to be posted, oldest first.
    waiting: VecDeque<Waiting>,
}

/// A copy that is still to be posted.
#[derive(Clone, Copy)]
enum Waiting {
    From { dst: u64, src: usize, length: usize },
    Inline { dst: u64, words: [u64; 2], count: usize },
}

impl WorkerMover {
    /// Takes over the pulls of a worker. Nothing may have been pulled through `queue` before.
    ///
    /// # Panics
    /// If `queue` is the worker's other direction.
    ///
    /// # Safety
    /// All host memory of more than 256 bytes that the engine copies from, including peers' windows
    /// and landing rings, is registered with `executor`, which must be the worker's executor, at
    /// the address that the memory has in this process
    /// ([`pushgate_gpu_kernels::Registration::device_addr`] equals the host's address). It stays
    /// registered as long as the engine has the mover: an address that is not registered ends the
    /// device's context.
    pub unsafe fn new(executor: &Arc<dyn Executor>, queue: OneWay) -> Result<Self> {
        assert_eq!(queue.direction(), Direction::Pull);
        let aside = SharedMemory::builder("worker-aside", SMALL * PLACES).create()?;
        let registration = executor.register(aside.as_ptr(), aside.len(), Access::ReadWrite, false)?;
        let waiting = VecDeque::with_capacity(64);
        Ok(Self { _registration: registration, aside, queue, started: 0, posted: 0, waiting })
    }

    /// The address of the place aside for copy `number`.
    fn place(&self, number: u64) -> usize {
        self.aside.as_ptr().as_ptr() as usize + (number as usize % PLACES) * SMALL
    }

    /// Posts waiting copies as long as the ring has room.
    fn post(&mut self) -> Result<(), MoveError> {
        while let Some(&waiting) = self.waiting.front() {
            let (posted, length) = match waiting {
                Waiting::From { dst, src, length } => {
                    // SAFETY: the engine resolved both ranges and keeps them valid until the copy
                    // is done; the caller of `new` promised that the device sees them at these
                    // addresses.
                    (unsafe { self.queue.post(dst, src as u64, length) }, length)
                }
                Waiting::Inline { dst, words, count } => {
                    // SAFETY: the engine resolved the destination and keeps it valid until the copy
                    // is done, and these words lie within it; the caller of `new` promised that the
                    // device sees it at this address.
                    (unsafe { self.queue.post_inline(dst, &words[..count]) }, count * 8)
                }
            };
            match posted {
                Ok(_) => {
                    self.posted += 1;
                    self.waiting.pop_front();
                }
                Err(PostError::Full { .. }) => return Ok(()),
                Err(error) => return Err(MoveError { length, reason: error.to_string() }),
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for WorkerMover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WorkerMover({:?}, {} of {} posted)", self.queue, self.posted, self.started)
    }
}

impl Mover for WorkerMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> std::result::Result<u64, MoveError> {
        let mut from = src;
        if (1..=INLINE).contains(&length) && length.is_multiple_of(8) && dst.is_multiple_of(8) {
            for at in (0..length).step_by(16) {
                let (mut words, count) = ([0; 2], (length - at).min(16) / 8);
                let to = words.as_mut_ptr().cast::<u8>();
                // SAFETY: the engine promises that the source is readable; source and `words` are
                // at least `count` words long.
                unsafe { std::ptr::copy_nonoverlapping((src + at) as *const u8, to, count * 8) };
                self.waiting.push_back(Waiting::Inline { dst: dst + at as u64, words, count });
                self.started += 1;
            }
            self.post()?;
            // The ticket of the last command: `done` is true only when every earlier command is
            // done too.
            return Ok(self.started - 1);
        }
        if length <= SMALL {
            if self.started >= self.queue.passed() + PLACES as u64 {
                return Err(MoveError { length, reason: format!("more than {PLACES} copies are under way") });
            }
            from = self.place(self.started);
            // SAFETY: the engine promises that the source is readable. No copy under way uses the
            // place (checked above), and the device reads the place only after the command is
            // posted.
            unsafe { std::ptr::copy_nonoverlapping(src as *const u8, from as *mut u8, length) };
        }
        self.waiting.push_back(Waiting::From { dst, src: from, length });
        self.started += 1;
        self.post()?;
        Ok(self.started - 1)
    }

    fn done(&mut self, ticket: u64) -> std::result::Result<bool, MoveError> {
        self.post()?;
        if ticket >= self.posted {
            return Ok(false);
        }
        // The engine asks in about the order in which it began the copies, so the count of copies
        // done without a gap finds a ticket as well as the ticket's own blocks would.
        if ticket < self.queue.passed() {
            return Ok(true);
        }
        let lost = |error: PostError| MoveError { length: 0, reason: error.to_string() };
        self.queue.health().map_err(lost).map(|()| false)
    }
}

/// A [`WorkerMover`] for several engines of one device, of which each has a clone.
///
/// An engine holds the lock for a few stores into the worker's ring, or for a look at the worker's counts.
#[derive(Clone, Debug)]
pub struct SharedMover(Arc<Mutex<WorkerMover>>);

impl From<WorkerMover> for SharedMover {
    fn from(mover: WorkerMover) -> Self {
        SharedMover(Arc::new(Mutex::new(mover)))
    }
}

impl Mover for SharedMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> std::result::Result<u64, MoveError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).start(dst, src, length)
    }

    fn done(&mut self, ticket: u64) -> std::result::Result<bool, MoveError> {
        // An engine asks in each pass. While another one holds the lock, the answer waits for the next pass: no engine sleeps
        // in the kernel for the lock.
        match self.0.try_lock() {
            Ok(mut mover) => mover.done(ticket),
            Err(TryLockError::Poisoned(mover)) => mover.into_inner().done(ticket),
            Err(TryLockError::WouldBlock) => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use pushgate_gpu_kernels::CpuExecutor;

    use super::*;

    #[test]
    fn more_copies_than_the_ring_holds_all_come_in_order() {
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new());
        let options = WorkerOptions { slots: 32, ..WorkerOptions::of(&*executor) };
        let (_worker, queue) = Worker::new(&executor, options).unwrap();
        let [_, pulls] = queue.split();
        // SAFETY: every address of this process is valid on the device `cpu`.
        let mut mover = unsafe { WorkerMover::new(&executor, pulls) }.unwrap();
        // Lengths of 64, 40 and 24 bytes go in the commands themselves, two words each.
        for each in [1000, 64, 40, 24, 20] {
            let from: Vec<u8> = (0..200 * each).map(|i| (i % 253) as u8).collect();
            let to = executor.alloc(from.len()).unwrap();
            let tickets: Vec<u64> = (0..200)
                .map(|i| {
                    mover
                        .start(to.addr() + (i * each) as u64, from[i * each..].as_ptr() as usize, each)
                        .unwrap()
                })
                .collect();
            let began = Instant::now();
            for ticket in tickets {
                while !mover.done(ticket).unwrap() {
                    assert!(began.elapsed() < pushgate_tests::hang(), "{mover:?}");
                    std::thread::yield_now();
                }
            }
            let mut got = vec![0; from.len()];
            to.copy_to_host(&mut got).unwrap();
            assert!(got == from);
        }
        assert!(mover.flush().is_err());
    }

    #[test]
    fn p3_engines_that_share_a_mover_see_a_copy_done_once_its_bytes_are_there() {
        const COPIES: usize = 300;
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new());
        // Fewer slots than copies under way, so that the copies of one engine wait behind those of another one.
        let options = WorkerOptions { slots: 32, ..WorkerOptions::of(&*executor) };
        let (_worker, queue) = Worker::new(&executor, options).unwrap();
        let [_, pulls] = queue.split();
        // SAFETY: every address of this process is valid on the device `cpu`.
        let mover: SharedMover = unsafe { WorkerMover::new(&executor, pulls) }.unwrap().into();
        std::thread::scope(|s| {
            for engine in 0..3u8 {
                let (mut mover, executor) = (mover.clone(), &executor);
                s.spawn(move || {
                    // In commands, put aside, and out of the source itself.
                    for each in [64usize, 200, 1000] {
                        let from: Vec<u8> = (0..COPIES * each).map(|i| (i % 251) as u8 ^ engine).collect();
                        let to = executor.alloc(from.len()).unwrap();
                        let start = |mover: &mut SharedMover, at: usize| {
                            mover.start(to.addr() + at as u64, from[at..].as_ptr() as usize, each).unwrap()
                        };
                        let tickets: Vec<_> =
                            (0..COPIES).map(|i| (i * each, start(&mut mover, i * each))).collect();
                        let began = Instant::now();
                        for (at, ticket) in tickets {
                            while !mover.done(ticket).unwrap() {
                                assert!(began.elapsed() < pushgate_tests::hang(), "{mover:?}");
                                std::thread::yield_now();
                            }
                            // SAFETY: on the device `cpu` an address of the device is one of this process, and the copy,
                            // the only one to write these bytes, is done.
                            let got = unsafe {
                                std::slice::from_raw_parts((to.addr() as usize + at) as *const u8, each)
                            };
                            assert!(got == &from[at..at + each], "engine {engine}: copy at {at}");
                        }
                    }
                });
            }
        });
    }
}
