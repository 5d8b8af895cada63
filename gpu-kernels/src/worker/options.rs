//! The worker's shape and its times.

use std::time::Duration;

use super::KERNEL;
use super::policy::Lingers;
use crate::error::{DeviceError, Result};
use crate::executor::{Executor, Launch};

/// Dynamic shared memory of a block: two `found` structures of worker.cu, with room to spare.
const SHARED_BYTES: u32 = 128;

/// The worker's shape and its times. [`WorkerOptions::of`] has the values that measured well on an
/// H200 (docs/benchmarks.md).
#[derive(Clone, Copy, Debug)]
pub struct WorkerOptions {
    /// Blocks that copy to the host, 1 to 256.
    pub pushers: u32,
    /// How many of the pushers, at least 1, copy a push of more than `bulk` bytes while pulls are
    /// under way. Stores to the host and read requests go the same way over the bus, and fewer
    /// stores at once leave room for the requests.
    pub pushers_beside_pulls: u32,
    /// The largest push in bytes that is spread over all pushers: up to here latency counts most.
    pub bulk: u32,
    /// Blocks that copy from the host, 1 to 256.
    pub pullers: u32,
    /// Threads of a block: at most 544, on a GPU a multiple of 32. The first 32 look for commands while the others copy, so of
    /// 544 threads 512 copy, which take 32 KiB in one trip over the bus.
    pub threads: u32,
    /// How many commands each ring holds: a power of two, 32 to 65536.
    pub slots: u32,
    /// The most bytes of a push that one block copies, as long as there are enough blocks.
    pub push_slice: u32,
    /// The most bytes of a pull that one block copies, as long as there are enough blocks. A pull
    /// gains from more loads in flight in a block.
    pub pull_slice: u32,
    /// The largest pull in bytes that is short. Short pulls are copied by the first half of the pullers, and one of them by a
    /// quarter of all pullers at most: 100 KiB of reads under way fill the bus, and whatever is read beyond that keeps
    /// commands, fences and other pulls waiting. A longer pull takes all pullers, because it is long beside such a wait.
    pub short_pull: u32,
    /// The most bytes of a short pull that one block copies, as long as there are enough blocks.
    pub short_pull_slice: u32,
    /// How long the worker stays after the last lease is done when operations follow one another.
    pub linger: Duration,
    /// How long the worker stays after the last lease is done when operations come alone: a thread
    /// that waits for the device waits for this time too.
    pub linger_alone: Duration,
    /// How long the worker stays after the last command when a command started it.
    pub linger_on_demand: Duration,
    /// The longest time that the worker stays after the last command, whatever the leases say (P7).
    /// Must be longer than any operation may wait for others: an operation that still waits
    /// afterwards has only a worker on demand.
    pub limit: Duration,
}

impl WorkerOptions {
    /// The default options for an executor.
    pub fn of(executor: &dyn Executor) -> Self {
        let gpu = executor.as_cuda().is_some();
        Self {
            pushers: if gpu { 8 } else { 1 },
            pushers_beside_pulls: if gpu { 2 } else { 1 },
            bulk: 128 << 10,
            pullers: if gpu { 16 } else { 1 },
            threads: if gpu { 544 } else { 1 },
            slots: 256,
            push_slice: 32 << 10,
            pull_slice: 64 << 10,
            short_pull: 256 << 10,
            short_pull_slice: 32 << 10,
            linger: Duration::from_micros(20),
            linger_alone: Duration::from_micros(5),
            linger_on_demand: Duration::from_millis(1),
            limit: Duration::from_secs(24 * 60 * 60),
        }
    }

    /// Refuses values out of bounds. `gpu`: the worker is to run on a GPU.
    pub(super) fn check(&self, gpu: bool) -> Result<()> {
        let bad = |what, value: u32, allowed: &str| {
            Err(DeviceError::Launch {
                kernel: KERNEL.to_owned(),
                what,
                value: value.into(),
                allowed: allowed.to_owned(),
            })
        };
        if !(1..=256).contains(&self.pushers) {
            return bad("pushers", self.pushers, "1 to 256");
        }
        if self.pushers_beside_pulls == 0 {
            return bad("pushers_beside_pulls", 0, "1 and more");
        }
        if !(1..=256).contains(&self.pullers) {
            return bad("pullers", self.pullers, "1 to 256");
        }
        if !(1..=544).contains(&self.threads) || (gpu && !self.threads.is_multiple_of(32)) {
            return bad("threads", self.threads, "1 to 544, on a GPU a multiple of 32");
        }
        if !(32..=65536).contains(&self.slots) || !self.slots.is_power_of_two() {
            return bad("slots", self.slots, "a power of two, 32 to 65536");
        }
        let slices = [
            ("push_slice", self.push_slice),
            ("pull_slice", self.pull_slice),
            ("short_pull_slice", self.short_pull_slice),
        ];
        for (what, slice) in slices {
            if slice == 0 {
                return bad(what, slice, "1 and more");
            }
        }
        Ok(())
    }

    /// The shape of the kernel's launches.
    pub(super) fn shape(&self) -> Launch {
        Launch::new(1 + self.pushers + self.pullers, self.threads).shared_bytes(SHARED_BYTES)
    }

    /// How long a worker that an operation starts lingers.
    pub(super) fn lingers(&self) -> Lingers {
        Lingers { in_a_row: self.linger, alone: self.linger_alone }
    }
}
