//! The resident worker: a kernel that copies on command, so that a thread can move
//! bytes between device and host memory without a call of the driver, which may
//! block for as long as other threads' kernels wait for that very copy.
//!
//! docs/worker.md tells what it is for, when it comes and when it goes. The rings
//! and the way of leaving are argued there and in `kernels/worker.cu`; here stand
//! the host's halves of them: [`Control::announce`] is the one place where a
//! missed worker is noticed.
//!
//! P8: the worker copies between any addresses that it is told. It trusts this
//! process's [`WorkerQueue`] alone, whose caller has checked them.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::{ShimError, window::Window};

use crate::cuda::{Follows, Resident};
use crate::executor::{
    Access, DeviceBuffer, DeviceError, Executor, Launch, LoadedModule, Registration, Result, Running, Stream,
};

mod control;
mod fault;
mod health;
mod queue;
#[cfg(test)]
mod tests;

use control::{Control, LEASES, LEFT, Layout, RUNNING};
use fault::Fault;
pub use health::Lost;
use health::Trouble;
use queue::Ring;
pub use queue::{Direction, OneWay, PostError, Ticket, WorkerQueue};

const KERNEL: &str = "copy_worker";
/// Behind an operation of a graph.
const MARK: &str = "copy_worker_mark";
/// What the kernel is told in place of a generation where it is part of a graph.
const OF_A_GRAPH: u64 = 0;
/// Two of `found` in worker.cu, and room to spare.
const SHARED_BYTES: u32 = 128;
/// How long the end of the worker is waited for on drop.
const END_LIMIT: Duration = Duration::from_secs(10);
/// How often the worker's thread looks whether the kernel still lives.
const LOOK: Duration = Duration::from_millis(250);
/// How long one launch of the kernel serves a program that goes on and on: who waits for all that the device
/// had to do at some moment waits for the launch of then.
const AGE: Duration = Duration::from_millis(100);

/// A panic in another thread can't leave these locks' data half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The worker's shape and manners. [`WorkerOptions::of`] has the values that were
/// measured to be good on an H200 (docs/benchmarks.md).
#[derive(Clone, Copy, Debug)]
pub struct WorkerOptions {
    /// Blocks that copy to the host, 1 to 256.
    pub pushers: u32,
    /// Of those, how many copy a push of more than `bulk` bytes while there are pulls under way, 1
    /// and more: stores to the host and requests for reads go the same way over the bus, and
    /// fewer stores at once leave room for the requests.
    pub pushers_beside_pulls: u32,
    /// Bytes up to which a push is about latency, and is spread over all pushers.
    pub bulk: u32,
    /// Blocks that copy from the host, 1 to 256.
    pub pullers: u32,
    /// Threads of a block: on a GPU a multiple of 32, at most 512.
    pub threads: u32,
    /// Commands that each ring holds: a power of two, 32 to 65536.
    pub slots: u32,
    /// A push is cut among blocks so that none has more bytes than this, while there
    /// are blocks.
    pub push_slice: u32,
    /// The same for a pull, which gains by more loads in flight in a block.
    pub pull_slice: u32,
    /// How long the worker stays after the last lease is done, if operations come one after another.
    pub linger: Duration,
    /// The same if they come alone: whoever waits for the device waits for this too.
    pub linger_alone: Duration,
    /// How long it stays after the last command where it was started by one.
    pub linger_on_demand: Duration,
    /// How long it stays after the last command at most, whatever the leases say (P7). Longer than any
    /// operation may wait for others: behind it, one that still waits has a worker on demand alone.
    pub limit: Duration,
}

impl WorkerOptions {
    /// The defaults for an executor.
    pub fn of(executor: &dyn Executor) -> Self {
        let gpu = executor.as_cuda().is_some();
        Self {
            pushers: if gpu { 8 } else { 1 },
            pushers_beside_pulls: if gpu { 2 } else { 1 },
            bulk: 128 << 10,
            pullers: if gpu { 16 } else { 1 },
            threads: if gpu { 512 } else { 1 },
            slots: 256,
            push_slice: 32 << 10,
            pull_slice: 64 << 10,
            linger: Duration::from_micros(20),
            linger_alone: Duration::from_micros(5),
            linger_on_demand: Duration::from_millis(1),
            limit: Duration::from_secs(24 * 60 * 60),
        }
    }

    fn check(&self, gpu: bool) -> Result<()> {
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
        if !(1..=512).contains(&self.threads) || (gpu && !self.threads.is_multiple_of(32)) {
            return bad("threads", self.threads, "1 to 512, on a GPU a multiple of 32");
        }
        if !(32..=65536).contains(&self.slots) || !self.slots.is_power_of_two() {
            return bad("slots", self.slots, "a power of two, 32 to 65536");
        }
        for (what, slice) in [("push_slice", self.push_slice), ("pull_slice", self.pull_slice)] {
            if slice == 0 {
                return bad(what, slice, "1 and more");
            }
        }
        Ok(())
    }
}

/// An operation of the program's that the worker stays for ([`Worker::lease`]).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the worker stays until Worker::lease_done was called and the stream has come there"]
pub struct Lease(Held);

#[derive(Debug, PartialEq, Eq)]
enum Held {
    /// By a pair of words.
    Slot(usize),
    /// By nodes of the graph that it becomes a part of.
    Graph,
    /// Not: copies for it start the worker on demand.
    Nothing,
}

impl Lease {
    /// Whether the worker is there for the operation for certain. Not where too many streams
    /// have operations under way, or the driver is too old for what it takes.
    pub fn is_counted(&self) -> bool {
        self.0 != Held::Nothing
    }
}

/// What starts the kernel.
enum Launcher {
    /// Threads of this process.
    Threads {
        executor: Arc<dyn Executor>,
        stream: Stream,
        module: Arc<dyn LoadedModule>,
        running: Vec<Running>,
    },
    Gpu,
}

struct Shared {
    owner: Owner,
    // Dropped first: unregistered before the memory that `control` holds is unmapped.
    registration: Registration,
    control: Arc<Control>,
    options: WorkerOptions,
    launcher: Mutex<Launcher>,
    /// Outside of the lock: marks are put into streams without it.
    resident: Option<Resident>,
    leases: Mutex<Vec<LeaseSlot>>,
    stop: AtomicBool,
    /// Set once and for ever.
    lost: OnceLock<Lost>,
    /// The thread that starts the worker on demand and looks after it, and whether it is to start it.
    keeper: OnceLock<Thread>,
    wanted: AtomicBool,
    fault: Option<Fault>,
    /// The last generation whose launch was made, and not only begun.
    started: AtomicU64,
    /// Copies posted so far, of either direction.
    posted: [AtomicU64; 2],
    began: Instant,
    /// When an operation was last launched, in nanoseconds since `began`; 0: none yet.
    last_launch: AtomicU64,
    /// The same of the kernel.
    launched_at: AtomicU64,
    device: DeviceBuffer,
}

/// The host's account of a lease word.
#[derive(Clone, Copy, Default)]
struct LeaseSlot {
    stream: u64,
    opened: u64,
    closed: u64,
}

impl Shared {
    fn lease_word(&self, slot: usize, done: bool) -> usize {
        Layout::LEASES + (1 + slot) * 16 + if done { 8 } else { 0 }
    }

    fn params(&self, generation: u64, linger: Duration) -> Vec<u8> {
        let host = |offset: usize| self.registration.device_addr() + offset as u64;
        let layout = &self.control.layout;
        let mailboxes = self.device.addr() + layout.mailboxes() as u64;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let nanos = |time: Duration| time.as_nanos().min(u128::from(u64::MAX >> 2)) as u64;
        // `copy_worker_params`; both kinds of device are little-endian.
        let state = match &self.fault {
            Some(fault) if fault.dies(generation) => Layout::UNHEARD,
            _ => Layout::STATE,
        };
        let words = [
            host(state),
            host(Layout::LEASES),
            host(Layout::COUNTS),
            host(layout.ring(Direction::Push)),
            host(layout.ring(Direction::Pull)),
            mailboxes,
            mailboxes + layout.ring_bytes() as u64,
            self.device.addr(),
            generation,
            nanos(linger),
            nanos(self.options.limit),
            pair(self.options.slots.trailing_zeros(), LEASES as u32),
            pair(self.options.pushers, self.options.pullers),
        ];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Starts a generation if the last one is gone. What fails for the moment is for the
    /// keeper to try again, should somebody wait for it; what is final is the worker's end.
    fn ensure(&self, linger: Duration) -> Result<()> {
        let mut launcher = lock(&self.launcher);
        if let Some(lost) = self.lost.get() {
            return Err(lost.error());
        }
        if !self.control.may_be_gone() || self.stop.load(Ordering::Acquire) {
            return Ok(());
        }
        self.start_next(&mut launcher, linger)
    }

    /// For an operation that begins: whether the launch that is there has served for so long that
    /// another is to take over. By the clock of the operation before, which spares a look.
    fn is_old(&self) -> bool {
        let [last, launched] = [&self.last_launch, &self.launched_at].map(|at| at.load(Ordering::Relaxed));
        last.saturating_sub(launched) > AGE.as_nanos() as u64
    }

    /// Has another launch take over: it stands behind the one that is there, which is told to go.
    /// Should that fail, the old one stays.
    fn renew(&self) {
        let mut launcher = lock(&self.launcher);
        let old = self.control.launched.load(Ordering::Relaxed);
        let here = self.started.load(Ordering::Acquire) == old && !self.control.may_be_gone();
        let ends = self.lost.get().is_some() || self.stop.load(Ordering::Acquire);
        if ends || !here || !self.is_old() || self.start_next(&mut launcher, self.options.linger).is_err() {
            return;
        }
        // Release: behind the launch. (It is told more only by the drop, which nobody leases beside.)
        self.control.word(Layout::QUIT).store(old, Ordering::Release);
    }

    /// Starts the next generation.
    fn start_next(&self, launcher: &mut Launcher, linger: Duration) -> Result<()> {
        let generation = self.control.launched.load(Ordering::Relaxed) + 1;
        // Before the launch: whoever reads the state of the new generation must not
        // take it for a foreign one. The lock makes us the only writer.
        self.control.launched.store(generation, Ordering::Release);
        let started = self.start(launcher, generation, linger);
        match &started {
            Ok(()) => {
                self.started.store(generation, Ordering::Release);
                self.launched_at.store(self.now(), Ordering::Relaxed);
            }
            Err(error) => {
                self.control.launched.store(generation - 1, Ordering::Release);
                if error.is_final() {
                    self.lose(error.to_string(), true);
                } else {
                    // Who posted meanwhile took this generation for one on its way.
                    self.summon();
                }
            }
        }
        started
    }

    /// Nanoseconds since it was made.
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn start(&self, launcher: &mut Launcher, generation: u64, linger: Duration) -> Result<()> {
        if let Some(fault) = &self.fault {
            fault.before_launch(generation)?;
        }
        let params = self.params(generation, linger);
        match launcher {
            // SAFETY: rings, words and mailboxes live as long as self, which is not
            // dropped before the kernel has ended (`Worker::drop`); what commands
            // name is promised in `post`.
            Launcher::Gpu => unsafe { self.resident.as_ref().expect("made with it").start(&params) },
            Launcher::Threads { executor, stream, module, running } => {
                running.retain(|run| !run.is_done().unwrap_or(true));
                // SAFETY: as above.
                unsafe { executor.launch(stream, module, KERNEL, self.shape(), &params) }
                    .map(|run| running.push(run))
            }
        }
    }

    /// There are commands that not all blocks have passed.
    fn has_commands(&self) -> bool {
        [Direction::Push, Direction::Pull].iter().any(|way| {
            let posted = self.posted[*way as usize].load(Ordering::Relaxed);
            self.control.counts(*way).iter().any(|count| count.load(Ordering::Relaxed) < posted)
        })
    }

    /// Has the keeper start it, if it is gone.
    fn summon(&self) {
        self.wanted.store(true, Ordering::Release);
        if let Some(keeper) = self.keeper.get() {
            keeper.unpark();
        }
    }

    /// The end of it, for all who wait and will. `ended`: nothing of it runs on the device.
    #[cold]
    fn lose(&self, reason: String, ended: bool) {
        let lost = Lost { reason, ended };
        if let Ok(()) = self.lost.set(lost) {
            tracing::error!("the worker is lost: {}", self.lost.get().expect("just set").reason);
        }
    }

    /// Whether the kernel has died: it has ended and never said that it leaves, or its context
    /// is lost. May block as any call of the driver: the keeper's.
    fn look(&self, trouble: &mut Trouble) {
        let started = self.started.load(Ordering::Acquire);
        let changes = self.control.launched.load(Ordering::Acquire) != started;
        let tells = self.resident.as_ref().is_none_or(Resident::tells_its_end);
        if changes || self.control.is_gone() || self.lost.get().is_some() || !tells {
            return trouble.over();
        }
        if let Some(fault) = &self.fault
            && fault.dies(started)
        {
            // All that anybody hears of it from now on.
            self.control.word(Layout::STATE).store(started << 8 | RUNNING, Ordering::Release);
            self.control.word(Layout::QUIT).store(started, Ordering::Release);
        }
        match self.ended() {
            Ok(false) => trouble.over(),
            Ok(true) => {
                trouble.over();
                // Acquire: what it stored last is older than its end, which we have seen.
                let state = self.control.word(Layout::STATE).load(Ordering::Acquire);
                if state >> 8 <= started && state != started << 8 | LEFT {
                    let said = "its kernel has ended before its time, with no error that CUDA knows of";
                    self.lose(said.to_owned(), true);
                }
            }
            Err(error) if error.is_final() => self.lose(format!("its kernel has died: {error}"), true),
            Err(error) => {
                if let Some((times, time)) = trouble.again() {
                    self.lose(format!("asked {times} times in {time:?} how it is: {error}"), false);
                }
            }
        }
    }

    /// For a worker that an operation starts. One that was launched a moment ago stands for a row of
    /// them, between which the worker had better stay. One that comes alone may be
    /// waited for with the whole device, and so with the worker.
    fn linger(&self) -> Duration {
        let last = self.last_launch.load(Ordering::Relaxed);
        let since = self.began.elapsed().saturating_sub(Duration::from_nanos(last));
        match last != 0 && since < 3 * self.options.linger {
            true => self.options.linger,
            false => self.options.linger_alone,
        }
    }

    /// A graph's replay calls none of our code, so the graph has the worker in it, beside the operation.
    fn join_graph(&self, stream: u64) -> Result<Held> {
        let Some(resident) = &self.resident else { return Ok(Held::Nothing) };
        let params = self.params(OF_A_GRAPH, self.options.linger_alone);
        // SAFETY: as for `start`; a graph with operations of a library is not replayed when
        // the library has gone, and with it the worker.
        let added = unsafe { resident.add_to_graph(stream, &params) }?;
        Ok(if added { Held::Graph } else { Held::Nothing })
    }

    /// Behind the operation. With a graph without this mark, which takes a lack of memory, a worker
    /// that has served it stays until its limit, and so do all that come later.
    fn leave_graph(&self, stream: u64) -> Result<()> {
        let Some(resident) = &self.resident else { return Ok(()) };
        let closed = self.device.addr() + Layout::GRAPHS_CLOSED;
        // SAFETY: a word of ours; as for `join_graph`. (False: the capture has failed meanwhile, so
        // there will be no graph.)
        unsafe { resident.add_mark_to_graph(stream, closed) }.map(|_| ())
    }

    /// Waits for a launch that another thread has begun: what this thread launches next is to
    /// stand behind it.
    fn behind_launches(&self) {
        if self.started.load(Ordering::Acquire) != self.control.launched.load(Ordering::Acquire) {
            drop(lock(&self.launcher));
        }
    }

    fn shape(&self) -> Launch {
        shape(&self.options)
    }

    /// Whether nothing of it runs, or is to.
    fn ended(&self) -> Result<bool> {
        let ended = match &self.resident {
            Some(resident) => resident.ended()?,
            None => match &*lock(&self.launcher) {
                Launcher::Threads { running, .. } => {
                    running.iter().try_fold(true, |all, run| Ok::<_, DeviceError>(run.is_done()? && all))?
                }
                Launcher::Gpu => true,
            },
        };
        match &self.fault {
            Some(fault) if ended => fault.after_end(self.started.load(Ordering::Acquire)).map(|()| true),
            _ => Ok(ended),
        }
    }
}

fn shape(options: &WorkerOptions) -> Launch {
    Launch::new(1 + options.pushers + options.pullers, options.threads).shared_bytes(SHARED_BYTES)
}

// ---------------------------------------------------------------------- worker

/// A resident worker on one device. May be shared by threads; its [`WorkerQueue`]
/// belongs to one. Dropping it tells the kernel to leave and waits for that.
pub struct Worker {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

impl Worker {
    /// Makes the worker and runs it once, so that what a first start costs is spent
    /// before other kernels run. Call it where the device is idle.
    pub fn new(executor: &Arc<dyn Executor>, options: WorkerOptions) -> Result<(Worker, WorkerQueue)> {
        Self::with_fault(executor, options, Fault::from_environment())
    }

    fn with_fault(
        executor: &Arc<dyn Executor>,
        options: WorkerOptions,
        fault: Option<Fault>,
    ) -> Result<(Worker, WorkerQueue)> {
        options.check(executor.as_cuda().is_some())?;
        let module = executor.load_embedded()?;
        let layout = Layout {
            slots: options.slots as usize,
            pushers: options.pushers as usize,
            pullers: options.pullers as usize,
        };
        let memory = SharedMemory::builder("worker", layout.bytes()).create().map_err(no_memory(&layout))?;
        let registration =
            executor.register(memory.as_ptr(), Window::len(&memory), Access::ReadWrite, false)?;
        let device = executor.alloc(layout.mailboxes() + 2 * layout.ring_bytes())?;
        let control = Arc::new(Control { memory, layout, launched: AtomicU64::new(0) });
        control.word(Layout::STATE).store(LEFT, Ordering::Relaxed);
        let (launcher, resident) = match executor.as_cuda() {
            Some(cuda) => {
                let watched = control.clone();
                let present = Box::new(move || !watched.is_gone());
                let resident = Resident::new(cuda, module, (KERNEL, MARK), shape(&options), present)?;
                (Launcher::Gpu, Some(resident))
            }
            None => {
                let (executor, stream) = (executor.clone(), executor.stream()?);
                (Launcher::Threads { executor, stream, module, running: Vec::new() }, None)
            }
        };
        let shared = Arc::new(Shared {
            owner: Owner::here(),
            control,
            options,
            launcher: Mutex::new(launcher),
            resident,
            leases: Mutex::new(vec![LeaseSlot::default(); LEASES - 1]),
            stop: AtomicBool::new(false),
            lost: OnceLock::new(),
            keeper: OnceLock::new(),
            wanted: AtomicBool::new(false),
            fault,
            started: AtomicU64::new(0),
            posted: [AtomicU64::new(0), AtomicU64::new(0)],
            launched_at: AtomicU64::new(0),
            began: Instant::now(),
            last_launch: AtomicU64::new(0),
            registration,
            device,
        });
        let kept = shared.clone();
        let keeper =
            thread::Builder::new().name("pushgate-worker".to_owned()).spawn(move || keep(&kept)).map_err(
                |source| DeviceError::Threads { kernel: KERNEL.to_owned(), wanted: 1, started: 0, source },
            )?;
        shared.keeper.get_or_init(|| keeper.thread().clone());
        let queue = WorkerQueue { rings: [Ring::default(), Ring::default()], shared: shared.clone() };
        let worker = Worker { shared, keeper: Some(keeper) };
        let mut trouble = Trouble::default();
        while let Err(error) = worker.shared.ensure(Duration::ZERO) {
            if error.is_final() || trouble.again().is_some() {
                return Err(error);
            }
            thread::sleep(trouble.pause().unwrap_or_default());
        }
        if !worker.wait_gone(END_LIMIT)? {
            return Err(DeviceError::NotResident {
                kernel: KERNEL.to_owned(),
                grid: shape(&options).grid,
                block: options.threads,
                resident: 0,
                free: 0,
                busy: 0,
            });
        }
        Ok((worker, queue))
    }

    /// Before an operation is put on `stream` (a `CUstream`) that will wait for
    /// copies: the worker is there, or in line before the operation, and stays until
    /// [`Worker::lease_done`] was called and the stream has come that far. Any
    /// thread of the program; starts the kernel if it is not there, and makes no
    /// other call of the driver than that and one that asks whether the stream
    /// captures. If it does, the kernel becomes part of the graph, which must not be replayed
    /// once the worker has been dropped.
    pub fn lease(&self, stream: u64) -> Result<Lease> {
        let shared = &*self.shared;
        shared.owner.check()?;
        if let Some(lost) = self.lost() {
            return Err(lost.error());
        }
        // Every thread has another stream by that name (CU_STREAM_PER_THREAD).
        let is_many = shared.resident.is_some() && stream == 2;
        let follows = shared.resident.as_ref().map_or(Follows::Runs, |resident| resident.follows(stream));
        match follows {
            Follows::Captures => return shared.join_graph(stream).map(Lease),
            Follows::Runs if !is_many => {}
            _ => return Ok(Lease(Held::Nothing)),
        }
        let slot = {
            let mut leases = lock(&shared.leases);
            // A word that another stream has come to the end of may serve this one.
            let is_free = |(at, slot): &(usize, &LeaseSlot)| {
                let done = shared.control.word(shared.lease_word(*at, true)).load(Ordering::Acquire);
                slot.opened == slot.closed && done >= slot.closed
            };
            let ours = leases.iter().position(|slot| slot.stream == stream && slot.opened > 0);
            let free = || leases.iter().enumerate().find(is_free).map(|(at, _)| at);
            let Some(at) = ours.or_else(free) else { return Ok(Lease(Held::Nothing)) };
            let slot = &mut leases[at];
            slot.stream = stream;
            slot.opened += 1;
            // With the lock, so no other thread counts too. Before the lease, which says more.
            let launching = shared.control.word(Layout::LAUNCHING);
            launching.store(launching.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            // Relaxed: `announce` orders it against the state.
            shared.control.word(shared.lease_word(at, false)).store(slot.opened, Ordering::Relaxed);
            at
        };
        let lease = Lease(Held::Slot(slot));
        if shared.control.announce() {
            if let Err(error) = shared.ensure(shared.linger()) {
                self.launched();
                self.take_back(slot);
                return Err(error);
            }
        } else if shared.is_old() {
            shared.renew();
        }
        shared.behind_launches();
        Ok(lease)
    }

    /// Behind the operation: the lease is done when `stream` has come here. On the
    /// device `cpu`, which has no such streams, it is done at once. If the stream
    /// can't be told to say so, the lease is done at once too, and what is still
    /// copied for the operation starts the worker on demand.
    pub fn lease_done(&self, lease: Lease, stream: u64) -> Result<()> {
        let shared = &*self.shared;
        shared.owner.check()?;
        let at = match lease.0 {
            Held::Slot(at) => at,
            Held::Graph => return shared.leave_graph(stream),
            Held::Nothing => return Ok(()),
        };
        self.launched();
        // Relaxed: for a guess alone.
        shared.last_launch.store(shared.now(), Ordering::Relaxed);
        // It may have left for the launch. The next generation stands behind the operation, but
        // before the mark, which would hold up a device with one queue for all streams.
        if shared.control.announce()
            && let Err(error) = shared.ensure(shared.options.linger)
        {
            self.take_back(at);
            return Err(error);
        }
        shared.behind_launches();
        // Held over the call, so that values come in the stream's order.
        let mut leases = lock(&shared.leases);
        let value = leases[at].closed + 1;
        let offset = shared.lease_word(at, true);
        let marked = match &shared.resident {
            Some(resident) => {
                let addr = shared.registration.device_addr() + offset as u64;
                resident.write_behind(stream, addr, value)
            }
            None => {
                shared.control.word(offset).store(value, Ordering::Release);
                Ok(())
            }
        };
        match marked {
            Ok(()) => {
                leases[at].closed = value;
                Ok(())
            }
            Err(error) => {
                drop(leases);
                self.take_back(at);
                Err(error)
            }
        }
    }

    /// A launch is over.
    fn launched(&self) {
        let _leases = lock(&self.shared.leases);
        let launching = self.shared.control.word(Layout::LAUNCHING);
        launching.store(launching.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    }

    fn take_back(&self, at: usize) {
        let mut leases = lock(&self.shared.leases);
        leases[at].opened -= 1;
        let word = self.shared.control.word(self.shared.lease_word(at, false));
        // Not done before, done now: only lets the worker go.
        word.store(leases[at].opened, Ordering::Relaxed);
    }

    /// Whether the kernel is on the device or on its way there. Never in a child of `fork`.
    pub fn is_present(&self) -> bool {
        self.shared.owner.is_here() && !self.shared.control.is_gone()
    }

    /// How often the kernel was started.
    pub fn starts(&self) -> u64 {
        self.shared.control.launched.load(Ordering::Relaxed)
    }

    /// Why no copy ends any more, if so: the kernel has died, with its context or alone, or
    /// can't be started. Noticed within about half a second, or 3 s where starting it fails in
    /// a way that may pass. Asks no driver.
    #[inline]
    pub fn lost(&self) -> Option<&Lost> {
        self.shared.lost.get()
    }

    /// Waits until the kernel has gone by itself; false if that takes longer.
    pub fn wait_gone(&self, limit: Duration) -> Result<bool> {
        self.shared.owner.check()?;
        let began = Instant::now();
        while self.is_present() {
            if let Some(lost) = self.lost() {
                return Err(lost.error());
            }
            if began.elapsed() > limit {
                // An error of the kernel's is the better answer.
                self.shared.ended()?;
                return Ok(false);
            }
            thread::sleep(Duration::from_micros(20));
        }
        Ok(true)
    }
}

fn no_memory(layout: &Layout) -> impl Fn(ShimError) -> DeviceError {
    let bytes = layout.bytes();
    move |error| {
        tracing::warn!("memory for the worker's rings: {error}");
        DeviceError::OutOfMemory { bytes }
    }
}

/// The thread that starts the worker where a command finds none, for a launch may block,
/// and whoever posts must not; and that looks whether it lives.
fn keep(shared: &Shared) {
    let (mut starting, mut looking) = (Trouble::default(), Trouble::default());
    while !shared.stop.load(Ordering::Acquire) {
        match starting.pause() {
            // Not to be woken: whoever posts meanwhile wants the same.
            Some(pause) => thread::sleep(pause),
            None => thread::park_timeout(LOOK),
        }
        // Woken for nothing, it starts a worker for nothing, which leaves again. One of a graph that stays
        // for others' operations is to be relieved, so that its graph can end.
        let stays = shared.control.word(Layout::STAYS);
        let relieves = stays.load(Ordering::Relaxed) != 0 && stays.swap(0, Ordering::Relaxed) != 0;
        let wanted = shared.wanted.swap(false, Ordering::AcqRel) || relieves || shared.has_commands();
        if wanted && shared.control.may_be_gone() {
            match shared.ensure(shared.options.linger_on_demand) {
                Ok(()) => starting.over(),
                // Said by `ensure`.
                Err(error) if error.is_final() => {}
                Err(error) => match starting.again() {
                    Some((times, time)) => {
                        // Not one that says that it leaves, and may yet stay.
                        let ended = shared.control.is_gone();
                        shared.lose(format!("{error} ({times} times in {time:?})"), ended);
                    }
                    None => shared.wanted.store(true, Ordering::Release),
                },
            }
        } else {
            starting.over();
        }
        shared.look(&mut looking);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let shared = &self.shared;
        if !shared.owner.is_here() {
            // It names a thread that a child does not have.
            std::mem::forget(self.keeper.take());
            return;
        }
        shared.stop.store(true, Ordering::Release);
        // All launches, that which the keeper may be making too. (Nobody else has the worker any more.)
        shared.control.word(Layout::QUIT).store(u64::MAX, Ordering::Release);
        let began = Instant::now();
        while let Some(keeper) = &self.keeper
            && began.elapsed() < END_LIMIT
        {
            keeper.thread().unpark();
            if keeper.is_finished() {
                let _ = self.keeper.take().map(JoinHandle::join);
            } else {
                thread::sleep(Duration::from_micros(50));
            }
        }
        // A keeper that is still held up in the driver may yet have made a launch.
        while self.keeper.is_none() && began.elapsed() < END_LIMIT {
            match shared.ended() {
                Ok(true) => return,
                // The context is lost, and with it the kernel.
                Err(error) if error.is_final() => return tracing::warn!("{error}"),
                Ok(false) | Err(_) => thread::sleep(Duration::from_micros(50)),
            }
        }
        tracing::warn!(
            "the worker has not left within {END_LIMIT:?} (it may still stand in line behind other kernels); its memory is kept until the process ends"
        );
        std::mem::forget(shared.clone());
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker(present: {}, starts: {})", self.is_present(), self.starts())
    }
}
