//! The pushes of the GPU into a connection's window. A slot is published once its payload is there,
//! in the order of the slots.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use pushgate::copier::Ticket;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_link::producer::Producer;

use crate::error::{Code, Failure, Result};
use crate::gpu::{self, Gpu};

struct Push {
    ticket: Ticket,
    slot: u64,
    words: RecordWords,
}

/// Counts of pushes, for `deregister`, which reads them from another thread.
#[derive(Default)]
pub struct Counts {
    told: AtomicU64,
    done: AtomicU64,
}

impl Counts {
    /// How many pushes have been posted to the GPU.
    pub fn told(&self) -> u64 {
        self.told.load(Ordering::Relaxed)
    }

    /// How many pushes are done, so that their source is free.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }
}

/// The pushes under way into one window.
pub struct Pushes {
    /// Where the window lies, if the copier has it.
    window: Option<u64>,
    queue: VecDeque<Push>,
}

impl Pushes {
    /// The pushes for a window at this address, with at most `most` slots.
    pub fn new(window: Option<u64>, most: usize) -> Self {
        Pushes { window, queue: VecDeque::with_capacity(most) }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether no push into a slot is under way, or into one before it.
    #[inline]
    pub fn has_done(&self, slot: u64) -> bool {
        self.queue.front().is_none_or(|first| first.slot > slot)
    }

    /// Publishes the slots whose payload the GPU has pushed.
    #[inline]
    pub fn advance(&mut self, gpu: Option<&Gpu>, counts: &Counts, producer: &mut Producer) {
        let mut any = false;
        while let (Some(p), Some(gpu)) = (self.queue.front(), gpu) {
            if !gpu.pushed(p.ticket) {
                break;
            }
            producer.publish(p.slot, &p.words);
            self.queue.pop_front();
            // The source is free from here on.
            counts.done.fetch_add(1, Ordering::Release);
            any = true;
        }
        if any {
            producer.wake();
        }
    }

    /// Has the GPU push a message into the window. Returns the message's slot, or `None` if there
    /// is no room now.
    ///
    /// # Safety
    /// The `size` bytes at `data` are memory of this GPU, and stay until the push is done.
    pub unsafe fn push(
        &mut self,
        gpu: Option<&Gpu>,
        counts: &Counts,
        producer: &mut Producer,
        record: Record,
        (data, size): (*const u8, usize),
    ) -> Result<Option<u64>> {
        let (Some(gpu), Some(window)) = (gpu, self.window) else {
            return Err(Failure::new(
                Code::Internal,
                "the copier does not have the window of this connection",
            ));
        };
        // The lock is held until the push is posted, so that the room stays ours.
        let mut pushes = gpu.pushes()?;
        if !pushes.has_room() {
            return Ok(None);
        }
        let Some((taken, words)) = producer.stage(record, size) else { return Ok(None) };
        let to = window + taken.place * u64::from(abi::PUSHGATE_UNIT);
        // SAFETY: the caller promises the source; the target belongs to the reservation, in a
        // window that stays registered as long as the connection, whose end waits for the push.
        let ticket = unsafe { pushes.post(data as u64, to, size) }.map_err(gpu::failed)?;
        counts.told.fetch_add(1, Ordering::Relaxed);
        self.queue.push_back(Push { ticket, slot: taken.slot, words });
        Ok(Some(taken.slot))
    }
}
