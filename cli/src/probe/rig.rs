//! What the probe measures with: each device with its buffers, host memory that all of
//! them see, and launches of the probe's kernels. Every wait ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use pushgate::Launch;
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::order;
use pushgate_gpu_kernels::{
    Access, Copies, DeviceBuffer, Executor, LoadedModule, Registration, Running, Stream, WaitOutcome,
};

use crate::signals;

/// Batches of one launch at most.
const MOST_BATCHES: u64 = 32;
/// Apart by a line and the one that is fetched with it (probe.cu, `apart`).
pub const APART: u64 = 128;
/// Of the page of control words: records and words of ping-pongs, `go`, `done`, flags.
const CONTROL_BYTES: usize = 64 << 10;
pub const RECORDS: u64 = 0;
pub const GO: u64 = 4096;
pub const DONE: u64 = 8192;
pub const FLAGS: u64 = 12288;

/// `struct probe_copy_params`.
#[derive(Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct CopyParams {
    pub dst: u64,
    pub src: u64,
    pub bytes: u64,
    pub stride: u64,
    pub places: u64,
    pub chunk: u64,
    pub wait_flags: u64,
    pub set_flags: u64,
    pub go: u64,
    pub done: u64,
    pub meeting: u64,
    pub result: u64,
    pub batches: u64,
    pub repeat: u64,
    pub limit_ns: u64,
    pub width: u32,
    pub system: u32,
}

/// `struct probe_ping_params`.
#[derive(Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct PingParams {
    pub out: u64,
    pub input: u64,
    pub result: u64,
    pub batches: u64,
    pub repeat: u64,
    pub limit_ns: u64,
    pub words: u32,
    pub first: u32,
}

/// How much is measured at once: a GPU's, or what a CPU does in the same time.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Bytes of the largest message, and of each buffer.
    pub most: u64,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that a large message is cut among.
    pub blocks: u32,
    /// Bytes from which on a block more takes part.
    pub slice: u64,
    /// Aim of one measurement.
    pub time: Duration,
    /// No kernel runs longer; a wait for one ends after twice that.
    pub limit: Duration,
    /// Rounds of a ping-pong's batch.
    pub rounds: u64,
    /// Bytes under way in all, for devices that store and load at once.
    pub totals: &'static [u64],
}

impl Scale {
    pub fn of(executor: &dyn Executor) -> Self {
        match executor.as_cuda() {
            Some(_) => Self {
                most: 64 << 20,
                threads: 512,
                blocks: 16,
                slice: 32 << 10,
                time: Duration::from_millis(6),
                limit: Duration::from_secs(3),
                rounds: 1000,
                totals: &[4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20],
            },
            None => Self {
                most: 4 << 20,
                threads: 1,
                blocks: 1,
                slice: 1,
                time: Duration::from_millis(4),
                // Its threads share the cores with all other programs: each hand-over may
                // cost a turn of every one of them.
                limit: Duration::from_secs(30),
                rounds: 50,
                totals: &[1 << 20, 4 << 20],
            },
        }
    }

    /// 64 B to the largest, in steps of four.
    pub fn sizes(&self) -> Vec<u64> {
        (3..).map(|i| 4u64.pow(i)).take_while(|n| *n <= self.most).collect()
    }

    pub fn blocks_of(&self, bytes: u64) -> u32 {
        pushgate_pcie_model::curve::blocks(bytes, self.slice, self.blocks)
    }
}

/// Memory of the host that every device sees at the same place of its own.
pub struct Host {
    pub memory: SharedMemory,
}

impl Host {
    fn new(name: &str, bytes: usize) -> Result<Self> {
        Ok(Self { memory: SharedMemory::builder(name, bytes).create()? })
    }

    /// A control word.
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        &self.memory.words(offset as usize, 1)[0]
    }
}

/// One device and what it is measured with.
pub struct Unit {
    pub executor: Arc<dyn Executor>,
    pub name: String,
    pub pci: String,
    pub copies: Copies,
    /// Two buffers of [`Scale::most`] each.
    pub memory: DeviceBuffer,
    /// A record, for a peer that stores into this device's memory.
    pub inbox: DeviceBuffer,
    module: Arc<dyn LoadedModule>,
    streams: Vec<Stream>,
    /// For each stream: words to meet at, and results.
    meeting: Vec<DeviceBuffer>,
    results: Vec<DeviceBuffer>,
    seen: [Registration; 3],
}

impl Unit {
    /// Where this device sees the host's two buffers and the page of control words.
    pub fn host(&self, which: usize) -> u64 {
        self.seen[which].device_addr()
    }

    pub fn control(&self) -> u64 {
        self.seen[2].device_addr()
    }

    /// The second of the device's two buffers.
    pub fn second(&self, scale: &Scale) -> u64 {
        self.memory.addr() + scale.most
    }
}

pub struct Rig {
    pub scale: Scale,
    pub units: Vec<Unit>,
    /// Two buffers of [`Scale::most`] each, and control words.
    pub buffers: [Host; 2],
    pub control: Host,
}

/// Streams of a device: writers at once, or both ends of a message.
pub const STREAMS: usize = 4;

impl Rig {
    pub fn new(executors: Vec<Arc<dyn Executor>>) -> Result<Self> {
        let Some(first) = executors.first() else { bail!("no device to probe") };
        let scale = Scale::of(&**first);
        let most = scale.most as usize;
        let buffers = [Host::new("probe-0", most)?, Host::new("probe-1", most)?];
        let control = Host::new("probe-control", CONTROL_BYTES)?;
        let units = executors
            .into_iter()
            .map(|executor| {
                let seen = |host: &Host| {
                    executor.register(host.memory.as_ptr(), host.memory.len(), Access::ReadWrite, false)
                };
                let each = |bytes: usize| (0..STREAMS).map(move |_| bytes);
                let cuda = executor.as_cuda();
                Ok(Unit {
                    name: cuda.map_or_else(|| executor.describe(), |c| c.device_name().to_owned()),
                    pci: cuda.map_or_else(|| "cpu".to_owned(), |c| c.pci_bus_id().to_ascii_lowercase()),
                    copies: Copies::new(&executor)?,
                    memory: executor.alloc(2 * most)?,
                    inbox: executor.alloc(4096)?,
                    module: executor.load_embedded()?,
                    streams: (0..STREAMS).map(|_| executor.stream()).collect::<Result<_, _>>()?,
                    meeting: each(64 * APART as usize)
                        .map(|n| executor.alloc(n))
                        .collect::<Result<_, _>>()?,
                    results: each((1 + MOST_BATCHES as usize) * 8)
                        .map(|n| executor.alloc(n))
                        .collect::<Result<_, _>>()?,
                    seen: [seen(&buffers[0])?, seen(&buffers[1])?, seen(&control)?],
                    executor: executor.clone(),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { scale, units, buffers, control })
    }

    pub fn is_cpu(&self) -> bool {
        self.units[0].executor.as_cuda().is_none()
    }

    /// Between two measurements: whether the user wants out.
    pub fn go_on(&self) -> Result<()> {
        ensure!(signals::caught().is_none(), "interrupted; nothing was kept");
        Ok(())
    }

    /// For threads that spin beside CPU executors.
    pub fn breathe(&self) {
        if self.is_cpu() { std::thread::yield_now() } else { std::hint::spin_loop() }
    }

    fn launch(
        &self,
        unit: usize,
        stream: usize,
        kernel: &str,
        shape: Launch,
        params: &[u8],
    ) -> Result<Running> {
        let unit = &self.units[unit];
        // SAFETY: callers name memory of this rig, which outlives the launch: the caller that
        // holds the `Running` waits for it at the latest when it is dropped.
        Ok(unsafe { unit.executor.launch(&unit.streams[stream], &unit.module, kernel, shape, params)? })
    }

    /// Starts a copy kernel of `blocks`. Fills in where it meets, its results and limit.
    pub fn copy(&self, unit: usize, stream: usize, blocks: u32, params: CopyParams) -> Result<Running> {
        let u = &self.units[unit];
        u.meeting[stream].copy_from_host(&vec![0; u.meeting[stream].len()])?;
        u.results[stream].copy_from_host(&vec![0; u.results[stream].len()])?;
        let params = CopyParams {
            meeting: u.meeting[stream].addr(),
            result: u.results[stream].addr(),
            limit_ns: self.scale.limit.as_nanos() as u64,
            ..params
        };
        // Two buffers of the bulk stores.
        let shared = if params.width == 0 { 32 << 10 } else { 0 };
        let shape = Launch::new(blocks, self.scale.threads).shared_bytes(shared).cooperating();
        self.launch(unit, stream, "probe_copy", shape, params.as_bytes())
    }

    /// Starts one side of a ping-pong.
    pub fn ping(&self, unit: usize, stream: usize, params: PingParams) -> Result<Running> {
        let u = &self.units[unit];
        u.results[stream].copy_from_host(&vec![0; u.results[stream].len()])?;
        let limit_ns = self.scale.limit.as_nanos() as u64;
        let params = PingParams { result: u.results[stream].addr(), limit_ns, ..params };
        let threads = if self.is_cpu() { 1 } else { 32 };
        self.launch(unit, stream, "probe_ping", Launch::new(1, threads).cooperating(), params.as_bytes())
    }

    /// Starts a kernel that does nothing.
    pub fn empty(&self, unit: usize) -> Result<Running> {
        let none = PingParams::default();
        self.launch(unit, 0, "probe_ping", Launch::new(1, 1), none.as_bytes())
    }

    /// Waits for a kernel, and reads nanoseconds of each of its batches.
    pub fn results(&self, unit: usize, stream: usize, running: &Running, batches: u64) -> Result<Vec<f64>> {
        let limit = self.scale.limit;
        match running.wait(Some(limit * 2))? {
            WaitOutcome::Done => {}
            WaitOutcome::TimedOut => bail!("a kernel of the probe did not end in {:?}", limit * 2),
        }
        let mut bytes = vec![0; (1 + batches as usize) * 8];
        self.units[unit].results[stream].copy_to_host(&mut bytes)?;
        let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|c| u64::from_le_bytes(*c)).collect();
        ensure!(
            words[0] == 0,
            "a kernel of the probe gave up after {limit:?}, for its messages took longer: {}; run it again on an idle \
             host",
            self.units[unit].name
        );
        Ok(words[1..].iter().map(|ns| *ns as f64).collect())
    }

    /// Microseconds of one message by the device's clock: the best batch of several.
    pub fn timed(&self, unit: usize, blocks: u32, params: CopyParams) -> Result<f64> {
        self.go_on()?;
        let run = |batches: u64, repeat: u64| -> Result<f64> {
            let running = self.copy(unit, 0, blocks, CopyParams { batches, repeat, ..params })?;
            let ns = self.results(unit, 0, &running, batches)?;
            Ok(ns.iter().fold(f64::INFINITY, |a, b| a.min(*b)) / repeat as f64 / 1e3)
        };
        let warm = run(2, 1)?.max(0.01);
        // A batch is long beside a step of the clock, which may be a microsecond.
        let repeat = (60.0 / warm).clamp(1.0, 256.0) as u64;
        let batches = (self.scale.time.as_secs_f64() * 1e6 / warm / repeat as f64).clamp(3.0, 16.0) as u64;
        run(batches, repeat)
    }

    /// Waits until a word of the control page is `least`.
    pub fn wait_word(&self, offset: u64, least: u64) -> Result<()> {
        let word = self.control.word(offset);
        let start = Instant::now();
        let mut spins = 0u32;
        while word.load(Ordering::Relaxed) < least {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(1024) {
                let limit = self.scale.limit * 2;
                ensure!(start.elapsed() < limit, "no word from the device within {limit:?}");
            }
            self.breathe();
        }
        order::from_device();
        Ok(())
    }

    /// Sets the control page back to what it is before the first message.
    pub fn reset(&self) {
        for word in self.control.memory.words(0, CONTROL_BYTES / 8) {
            word.store(0, Ordering::Release);
        }
    }
}

/// A pattern that no shift or mix-up leaves alike.
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes / 8)
        .flat_map(|i| (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed).to_le_bytes())
        .collect()
}

/// The bytes of a host buffer from `offset` on, read word by word: devices write there.
pub fn read_host(host: &Host, offset: usize, bytes: usize) -> Vec<u8> {
    let words = host.memory.words(offset, bytes / 8);
    words.iter().flat_map(|w| w.load(Ordering::Acquire).to_le_bytes()).collect()
}
