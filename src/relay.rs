//! Rings the doorbell for a device that can't write an eventfd: a thread watches a word that the
//! device stores to, and writes the eventfd.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_driver_shim::fork::OwnedHere;
use pushgate_driver_shim::order;
use pushgate_engine::idle::{Idle, Step, Wake};

use crate::context::Context;
use crate::error::{Error, Result};
use crate::shared::Shared;

/// Counters of a doorbell relay. Each duration is a sum or a maximum over all doorbells.
#[derive(Clone, Copy, Debug, Default)]
pub struct RelayStats {
    /// Doorbells passed on. Doorbells that came between two looks count once.
    pub rings: u64,
    /// Sum of the times from the look that saw a doorbell until the eventfd was written.
    pub write: Duration,
    /// The longest time from the look that saw a doorbell until the eventfd was written.
    pub worst_write: Duration,
    /// Sum of the times between the look that saw a doorbell and the look before: the most delay
    /// that watching can have added.
    pub look: Duration,
    /// The longest time between the look that saw a doorbell and the look before.
    pub worst_look: Duration,
}

#[derive(Default)]
struct Counts {
    rings: AtomicU64,
    write: AtomicU64,
    worst_write: AtomicU64,
    look: AtomicU64,
    worst_look: AtomicU64,
}

pub(crate) struct Relay {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    thread: OwnedHere<Option<JoinHandle<()>>>,
    address: u64,
}

impl Relay {
    /// Starts a thread that writes `bell` each time the device has stored 1 to the word at
    /// [`Relay::address`].
    pub(crate) fn start(context: &Context, bell: OwnedFd) -> Result<Self> {
        let word = context.shared("pushgate-doorbell", 4096)?;
        let address = word.device_addr();
        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(Counts::default()));
        let (stopped, counted) = (stop.clone(), counts.clone());
        let thread = std::thread::Builder::new()
            .name("pushgate-relay".into())
            .spawn(move || watch(&word, &bell, &stopped, &counted))
            .map_err(Error::io("starting the doorbell's relay"))?;
        Ok(Relay { stop, counts, thread: OwnedHere::new(Some(thread)), address })
    }

    /// The device address of the word that the device stores to.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn stats(&self) -> RelayStats {
        let c = &self.counts;
        let time = |word: &AtomicU64| Duration::from_nanos(word.load(Ordering::Relaxed));
        RelayStats {
            rings: c.rings.load(Ordering::Relaxed),
            write: time(&c.write),
            worst_write: time(&c.worst_write),
            look: time(&c.look),
            worst_look: time(&c.worst_look),
        }
    }
}

fn watch(memory: &Shared, bell: &OwnedFd, stop: &AtomicBool, counts: &Counts) {
    let word = &memory.words(0, 1)[0];
    let start = Instant::now();
    let mut idle = Idle::new(Wake::Polled, std::thread::available_parallelism().is_ok_and(|n| n.get() > 2));
    let mut last = start;
    while !stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        // BELL: the doorbell is taken before anyone looks for what it announces. The fence orders
        // the two; the eventfd's system call and the interrupt carry that order on to the proxy.
        // The swap takes the doorbell, so a doorbell rung after the swap is seen by the next look.
        if word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Relaxed) != 0 {
            order::from_device();
            // EAGAIN means that the counter is full, so the eventfd is rung already; nothing else
            // can fail.
            let _ = rustix::io::retry_on_intr(|| rustix::io::write(bell, &1u64.to_ne_bytes()));
            let (write, look) = (now.elapsed().as_nanos() as u64, (now - last).as_nanos() as u64);
            counts.rings.fetch_add(1, Ordering::Relaxed);
            for (sum, worst, time) in
                [(&counts.write, &counts.worst_write, write), (&counts.look, &counts.worst_look, look)]
            {
                sum.fetch_add(time, Ordering::Relaxed);
                worst.fetch_max(time, Ordering::Relaxed);
            }
            idle.busy();
        } else {
            match idle.idle((now - start).as_nanos() as u64) {
                Step::Spin => std::hint::spin_loop(),
                Step::Yield => std::thread::yield_now(),
                Step::Sleep(step) | Step::Block(step) => std::thread::sleep(step),
            }
        }
        last = now;
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // A child of `fork` does not have the thread.
        if self.thread.here().is_err() {
            return;
        }
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
