//! The resident worker (docs/worker.md), and the engine's [`Mover`] made of it.

use std::collections::VecDeque;

pub use pushgate_gpu_kernels::{Direction, Lease, PostError, Ticket, Worker, WorkerOptions, WorkerQueue};
use pushgate_proxy::mover::{MoveError, Mover};

/// The worker's pulls as the proxy's [`Mover`]: no copy of the engine's calls the
/// driver then. Its [`Mover::flush`], for what an RDMA device wrote, would have to and
/// says that it can't.
#[derive(Debug)]
pub struct WorkerMover {
    queue: WorkerQueue,
    /// Copies begun, and how many of them were posted: numbers of tickets, as the queue
    /// is ours alone.
    started: u64,
    posted: u64,
    /// For a full ring; those that were not posted.
    waiting: VecDeque<(u64, usize, usize)>,
}

impl WorkerMover {
    /// Takes the queue over; nothing may have been pulled through it before.
    ///
    /// # Safety
    /// All host memory that the engine copies from, windows of peers and landing rings
    /// among it, is registered with the worker's executor at the address that it has in
    /// this process ([`pushgate_gpu_kernels::Registration::device_addr`] is the host's
    /// own), and stays so as long as the engine has the mover: an address that is not
    /// registered ends the device's context.
    pub unsafe fn new(queue: WorkerQueue) -> Self {
        Self { queue, started: 0, posted: 0, waiting: VecDeque::with_capacity(64) }
    }

    /// Posts what waits, as far as there is room.
    fn post(&mut self) -> Result<(), MoveError> {
        while let Some(&(dst, src, length)) = self.waiting.front() {
            // SAFETY: the engine resolved both stretches, and keeps them valid until the
            // copy is done; that the device sees them there was promised in `new`.
            match unsafe { self.queue.post(Direction::Pull, dst, src as u64, length) } {
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

impl Mover for WorkerMover {
    fn start(&mut self, dst: u64, src: usize, length: usize) -> Result<u64, MoveError> {
        self.waiting.push_back((dst, src, length));
        self.started += 1;
        self.post()?;
        Ok(self.started - 1)
    }

    fn done(&mut self, ticket: u64) -> Result<bool, MoveError> {
        self.post()?;
        if ticket >= self.posted {
            return Ok(false);
        }
        // The engine asks in about the order in which it began, so the count of those
        // without a gap is as good as the ticket's own blocks.
        if ticket < self.queue.passed(Direction::Pull) {
            return Ok(true);
        }
        let lost = |error: PostError| MoveError { length: 0, reason: error.to_string() };
        self.queue.health().map_err(lost).map(|()| false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use pushgate_gpu_kernels::{CpuExecutor, Executor};

    use super::*;

    #[test]
    fn more_copies_than_the_ring_holds_all_come_in_order() {
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new());
        let options = WorkerOptions { slots: 32, ..WorkerOptions::of(&*executor) };
        let (_worker, queue) = Worker::new(&executor, options).unwrap();
        const EACH: usize = 1000;
        let from: Vec<u8> = (0..200 * EACH).map(|i| (i % 253) as u8).collect();
        let to = executor.alloc(from.len()).unwrap();
        // SAFETY: every address is valid on the device `cpu`.
        let mut mover = unsafe { WorkerMover::new(queue) };
        let tickets: Vec<u64> = (0..200)
            .map(|i| {
                mover.start(to.addr() + (i * EACH) as u64, from[i * EACH..].as_ptr() as usize, EACH).unwrap()
            })
            .collect();
        let began = Instant::now();
        for ticket in tickets {
            while !mover.done(ticket).unwrap() {
                assert!(began.elapsed() < Duration::from_secs(30), "{mover:?}");
                std::thread::yield_now();
            }
        }
        let mut got = vec![0; from.len()];
        to.copy_to_host(&mut got).unwrap();
        assert!(got == from);
        assert!(mover.flush().is_err());
    }
}
