//! The resident worker: copies on command, beside the same loops without commands.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use pushgate::Launch;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_gpu_kernels::{
    Access, DeviceBuffer, Direction, Executor, LoadedModule, Registration, Running, Stream, Ticket,
    WaitOutcome, Worker, WorkerOptions, WorkerQueue, choose,
};

use super::Bench;

/// Of each buffer: more than any cache of the GPU's holds of host memory.
const BYTES: usize = 64 << 20;
const IN_FLIGHT: usize = 8;
/// Pushes under way beside a pull whose latency is measured, and the bytes of each.
const BESIDE: (usize, usize) = (4, 256 << 10);

struct Rig {
    executor: Arc<dyn Executor>,
    module: Arc<dyn LoadedModule>,
    /// For push and pull.
    streams: [Stream; 2],
    host: [(Registration, SharedMemory); 2],
    device: [DeviceBuffer; 2],
    limit: Duration,
}

impl Rig {
    fn words(&self, offset: usize) -> &std::sync::atomic::AtomicU64 {
        &self.host[0].1.words(offset, 1)[0]
    }

    fn launch(&self, at: usize, kernel: &str, shape: Launch, words: &[u64]) -> Result<Running> {
        let params: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        // SAFETY: the buffers hold what the kernels are told and outlive them.
        Ok(unsafe { self.executor.launch(&self.streams[at], &self.module, kernel, shape, &params)? })
    }

    fn finish(&self, running: &Running) -> Result<Duration> {
        match running.wait(Some(self.limit))? {
            WaitOutcome::Done => Ok(running.elapsed()?.expect("it has ended")),
            WaitOutcome::TimedOut => bail!("a kernel did not end"),
        }
    }

    /// Bytes a nanosecond of each direction, by kernels that do nothing else and move so many bytes each.
    fn bare(&self, options: &WorkerOptions, ways: &[Direction], bytes: &[f64]) -> Result<Vec<f64>> {
        let mut running = Vec::new();
        for (&way, bytes) in ways.iter().zip(bytes) {
            let (at, blocks) = shape(options, way, ways);
            let (host, device) = (self.host[at].0.device_addr(), self.device[at].addr());
            let (dst, src) = if way == Direction::Push { (host, device) } else { (device, host) };
            let shape = Launch::new(blocks, options.threads);
            let rounds = ((bytes / BYTES as f64).round() as u64).max(1);
            running.push((rounds, self.launch(at, "bare_copy", shape, &[dst, src, BYTES as u64, rounds])?));
        }
        running
            .iter()
            .map(|(rounds, run)| Ok((BYTES as u64 * rounds) as f64 / self.finish(run)?.as_nanos() as f64))
            .collect()
    }

    /// Rate of the bare loops for so many nanoseconds, of all directions together. The directions end together: the rate
    /// of one after the other has ended is no ceiling of both.
    fn ceiling(&self, options: &WorkerOptions, ways: &[Direction], time: f64) -> Result<f64> {
        let mut rates = vec![25.0; ways.len()];
        for part in [0.2, 0.2, 1.0] {
            let bytes: Vec<f64> = rates.iter().map(|rate| rate * time * part).collect();
            rates = self.bare(options, ways, &bytes)?;
        }
        Ok(rates.iter().sum())
    }

    fn post(&self, queue: &mut WorkerQueue, way: Direction, offset: usize, len: usize) -> Result<Ticket> {
        let at = way as usize;
        let (device, host) = (self.device[at].addr(), self.host[at].0.device_addr());
        // SAFETY: callers keep within the buffers, which outlive the worker; bytes
        // that two copies write are the same or nobody's.
        Ok(unsafe { queue.post(way, device + offset as u64, host + offset as u64, len)? })
    }

    /// Rate of the same copies by commands to the worker.
    fn through(&self, queue: &mut WorkerQueue, ways: &[Direction], len: usize, count: usize) -> Result<f64> {
        let places = BYTES / len;
        let (mut posted, mut done) = ([0; 2], [0; 2]);
        let mut tickets = [VecDeque::with_capacity(IN_FLIGHT), VecDeque::with_capacity(IN_FLIGHT)];
        let start = Instant::now();
        let mut spins = 0u64;
        while ways.iter().any(|way| done[*way as usize] < count) {
            for &way in ways {
                let at = way as usize;
                while posted[at] < count && posted[at] - done[at] < IN_FLIGHT {
                    tickets[at].push_back(self.post(queue, way, posted[at] % places * len, len)?);
                    posted[at] += 1;
                }
                while tickets[at].front().is_some_and(|ticket| queue.done(*ticket)) {
                    tickets[at].pop_front();
                    done[at] += 1;
                }
            }
            spins += 1;
            if spins.is_multiple_of(4096) {
                queue.health()?;
                ensure!(start.elapsed() < self.limit, "the worker made no progress within {:?}", self.limit);
                self.let_others_run();
            }
        }
        Ok((ways.len() * count * len) as f64 / start.elapsed().as_nanos() as f64)
    }

    fn let_others_run(&self) {
        if self.executor.as_cuda().is_none() {
            std::thread::yield_now();
        }
    }

    /// Median microseconds from post to done.
    fn latency(&self, queue: &mut WorkerQueue, way: Direction, len: usize, count: usize) -> Result<f64> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            let ticket = self.post(queue, way, 0, len)?;
            while !queue.done(ticket) {
                ensure!(start.elapsed() < self.limit, "the worker made no progress within {:?}", self.limit);
                self.let_others_run();
            }
            times.push(start.elapsed());
        }
        times.sort();
        Ok(times[count / 2].as_nanos() as f64 / 1e3)
    }

    /// Median microseconds of a pull from post to done while pushes are under way, as [`BESIDE`] says.
    fn latency_beside_pushes(&self, queue: &mut WorkerQueue, len: usize, count: usize) -> Result<f64> {
        let (depth, each) = BESIDE;
        let (mut times, mut pushes) = (Vec::with_capacity(count), VecDeque::with_capacity(depth));
        let mut pushed = 0;
        for _ in 0..count {
            let start = Instant::now();
            let pull = self.post(queue, Direction::Pull, 0, len)?;
            while !queue.done(pull) {
                while pushes.front().is_some_and(|push| queue.done(*push)) {
                    pushes.pop_front();
                }
                while pushes.len() < depth {
                    pushes.push_back(self.post(
                        queue,
                        Direction::Push,
                        pushed % (BYTES / each) * each,
                        each,
                    )?);
                    pushed += 1;
                }
                ensure!(start.elapsed() < self.limit, "the worker made no progress within {:?}", self.limit);
                self.let_others_run();
            }
            times.push(start.elapsed());
        }
        let start = Instant::now();
        while let Some(push) = pushes.pop_front() {
            while !queue.done(push) {
                ensure!(start.elapsed() < self.limit, "the worker made no progress within {:?}", self.limit);
                self.let_others_run();
            }
        }
        times.sort();
        Ok(times[count / 2].as_nanos() as f64 / 1e3)
    }

    /// Median microseconds of a bare word, there and back: to a kernel that waits for it in the
    /// host's memory, or, with `pulled`, in the device's, where the worker stores it.
    fn echo(&self, mut pulled: Option<&mut WorkerQueue>, count: u64) -> Result<f64> {
        let (word, echo) = (self.words(0), self.words(64));
        word.store(0, Ordering::Relaxed);
        echo.store(0, Ordering::Relaxed);
        let base = self.host[0].0.device_addr();
        let device = self.device[1].addr();
        if pulled.is_some() {
            self.device[1].copy_from_host(&[0; 8])?;
        }
        let waits_at = if pulled.is_some() { device } else { base };
        let running = self.launch(0, "bare_echo", Launch::new(1, 1), &[waits_at, base + 64, 0, count])?;
        let mut times = Vec::new();
        for i in 1..=count {
            let start = Instant::now();
            match &mut pulled {
                // SAFETY: a word of the buffer, which outlives the worker.
                Some(queue) => _ = unsafe { queue.post_inline(device, &[i])? },
                None => word.store(i, Ordering::Release),
            }
            while echo.load(Ordering::Acquire) < i {
                ensure!(start.elapsed() < self.limit, "no echo");
                self.let_others_run();
            }
            times.push(start.elapsed());
        }
        self.finish(&running)?;
        times.sort();
        Ok(times[count as usize / 2].as_nanos() as f64 / 1e3)
    }
}

/// Median microseconds of this thread for a lease and its end, on a stream with nothing else in it.
fn lease(worker: &Worker, stream: &Stream, count: usize) -> Result<f64> {
    let raw = stream.raw().unwrap_or(0);
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        let lease = worker.lease(raw)?;
        worker.lease_done(lease, raw)?;
        times.push(start.elapsed());
        // What a program does between two operations; the stream's queue must not be full.
        while start.elapsed() < Duration::from_micros(10) {
            std::hint::spin_loop();
        }
    }
    times.sort();
    Ok(times[count / 2].as_nanos() as f64 / 1e3)
}

/// The blocks that copy long messages one way of these. Short pulls are shared by fewer blocks, and the ceiling beside them is that of
/// all.
fn shape(options: &WorkerOptions, way: Direction, ways: &[Direction]) -> (usize, u32) {
    match way {
        Direction::Push if ways.len() > 1 => (0, options.pushers.min(options.pushers_beside_pulls)),
        Direction::Push => (0, options.pushers),
        Direction::Pull => (1, options.pullers),
    }
}

pub fn run(b: &Bench) -> Result<()> {
    let (executor, _) = choose(b.settings.device)?;
    let gpu = executor.as_cuda().is_some();
    let device = executor.name();
    let mut options =
        WorkerOptions { linger_on_demand: Duration::from_millis(50), ..WorkerOptions::of(&*executor) };
    if let Some(blocks) = b.blocks {
        (options.pushers, options.pullers) = (blocks.div_ceil(2), blocks);
    }
    options.threads = b.threads.unwrap_or(options.threads);
    options.push_slice = b.slice.unwrap_or(options.push_slice);
    options.pull_slice = b.slice.unwrap_or(options.pull_slice);
    options.short_pull_slice = b.slice.unwrap_or(options.short_pull_slice);
    let module = executor.load_embedded()?;
    let host = || -> Result<(Registration, SharedMemory)> {
        let memory = SharedMemory::builder("bench-worker", BYTES).create()?;
        let ptr: NonNull<u8> = memory.as_ptr();
        Ok((executor.register(ptr, BYTES, Access::ReadWrite, false)?, memory))
    };
    let rig = Rig {
        streams: [executor.stream()?, executor.stream()?],
        host: [host()?, host()?],
        device: [executor.alloc(BYTES)?, executor.alloc(BYTES)?],
        limit: b.settings.timeout * 2 + Duration::from_secs(30),
        module,
        executor: executor.clone(),
    };
    let (worker, mut queue) = Worker::new(&executor, options)?;
    let ways: [(&str, &[Direction]); 3] = [
        ("push", &[Direction::Push]),
        ("pull", &[Direction::Pull]),
        ("both", &[Direction::Push, Direction::Pull]),
    ];
    for (name, ways) in ways {
        for &len in &b.bytes {
            let len = len as usize;
            ensure!(len <= BYTES, "bytes = {len} is more than a buffer of this bench, {BYTES}");
            let warm = rig.through(&mut queue, ways, len, 2 * IN_FLIGHT)?;
            let count = ((warm * 1e9 * b.seconds) as usize / len / ways.len()).clamp(IN_FLIGHT, 1 << 20);
            let (mut value, mut ceiling) = (0f64, 0f64);
            for _ in 0..b.runs {
                ceiling = ceiling.max(rig.ceiling(&options, ways, b.seconds * 1e9)?);
                value = value.max(rig.through(&mut queue, ways, len, count)?);
            }
            let blocks: u32 = ways.iter().map(|way| shape(&options, *way, ways).1).sum();
            let note = format!(
                "{name}, {IN_FLIGHT} in flight each way, {blocks} blocks x {}; ceiling: the same loops without commands, which end together",
                options.threads
            );
            b.print("worker", len as u64, value, Some(ceiling), "GB/s", device, &note)?;
        }
    }
    for way in [Direction::Push, Direction::Pull] {
        for len in [8, 4 << 10, 64 << 10] {
            let count = if gpu { 2000 } else { 200 };
            rig.latency(&mut queue, way, len, count / 10)?;
            let (mut value, mut ceiling) = (f64::INFINITY, f64::INFINITY);
            for _ in 0..b.runs {
                ceiling = ceiling.min(rig.echo(None, count as u64)?);
                value = value.min(rig.latency(&mut queue, way, len, count)?);
            }
            let way = if way == Direction::Push { "push" } else { "pull" };
            let note = format!("{way}, from post to done; ceiling: a bare word there and back");
            b.print("worker", len as u64, value, Some(ceiling), "us (median)", device, &note)?;
        }
    }
    for len in [8, 64 << 10, 256 << 10] {
        let count = if gpu { 2000 } else { 200 };
        let (mut value, mut ceiling) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..b.runs {
            ceiling = ceiling.min(rig.latency(&mut queue, Direction::Pull, len, count)?);
            value = value.min(rig.latency_beside_pushes(&mut queue, len, count)?);
        }
        let (depth, each) = (BESIDE.0, BESIDE.1 >> 10);
        let note =
            format!("pull, from post to done, beside {depth} pushes of {each} KiB under way; ceiling: alone");
        b.print("worker", len as u64, value, Some(ceiling), "us (median)", device, &note)?;
    }
    let count = if gpu { 2000 } else { 200 };
    let (mut value, mut ceiling, mut leased) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
    for _ in 0..b.runs {
        ceiling = ceiling.min(rig.echo(None, count)?);
        value = value.min(rig.echo(Some(&mut queue), count)?);
        leased = leased.min(lease(&worker, &rig.streams[0], count as usize)?);
    }
    let note = "a word that travels in a command, to a kernel that waits for it in the device's memory, and its answer; \
                ceiling: it waits in the host's";
    b.print("worker", 8, value, Some(ceiling), "us (median)", device, note)?;
    let note = "a lease and its end: the time of the launching thread";
    b.print("worker", 0, leased, None, "us (median)", device, note)?;
    Ok(())
}
