//! The resident worker: a kernel that copies on command, so that a thread can move bytes between
//! device and host memory without a call of the driver. Such a call may block as long as other
//! threads' kernels wait for that very copy.
//!
//! docs/worker.md says what the worker is for, when it comes and when it goes. The rings and the
//! way of leaving are argued there and in `kernels/worker.cu`. This module has the host's half;
//! [`Control::announce`] is the one place where a missing worker is noticed.
//!
//! P8: the worker copies between any addresses that it is given. It trusts only this process's
//! [`WorkerQueue`], whose caller has checked the addresses.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use pushgate_driver_shim::fork::Owner;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::{ShimError, window::Window};

use crate::cuda::{Follows, Resident};
use crate::error::{DeviceError, Result};
use crate::executor::{Access, DeviceBuffer, Executor, Launch, LoadedModule, Registration, Running, Stream};
use crate::lock::lock;

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
/// The kernel that runs after a graph's operation and counts the operation as ended.
const MARK: &str = "copy_worker_mark";
/// The generation number in the parameters of a launch that is part of a graph.
const OF_A_GRAPH: u64 = 0;
/// Dynamic shared memory of a block: two `found` structures of worker.cu, with room to spare.
const SHARED_BYTES: u32 = 128;
/// How long a drop waits for the worker's end.
const END_LIMIT: Duration = Duration::from_secs(10);
/// How often the worker's thread checks that the kernel still lives.
const LOOK: Duration = Duration::from_millis(250);
/// How long one launch of the kernel serves a program that keeps leasing. A thread that waits for
/// all work that the device had at some moment waits for the launch of that moment, so the launch
/// must end.
const AGE: Duration = Duration::from_millis(100);

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
    /// Threads of a block: at most 512, on a GPU a multiple of 32.
    pub threads: u32,
    /// How many commands each ring holds: a power of two, 32 to 65536.
    pub slots: u32,
    /// The most bytes of a push that one block copies, as long as there are enough blocks.
    pub push_slice: u32,
    /// The most bytes of a pull that one block copies, as long as there are enough blocks. A pull
    /// gains from more loads in flight in a block.
    pub pull_slice: u32,
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

/// An operation of the program for which the worker stays ([`Worker::lease`]).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the worker stays until Worker::lease_done has been called and the stream has reached its mark"]
pub struct Lease(Held);

#[derive(Debug, PartialEq, Eq)]
enum Held {
    /// Counted by a pair of words.
    Slot(usize),
    /// Counted by nodes of the graph that the operation becomes part of.
    Graph,
    /// Not counted: copies for the operation start the worker on demand.
    Nothing,
}

impl Lease {
    /// Whether the worker is certain to be present for the operation. False if too many streams
    /// have operations under way, or if the driver lacks a call that counting needs.
    pub fn is_counted(&self) -> bool {
        self.0 != Held::Nothing
    }
}

/// How the kernel is launched.
enum Launcher {
    /// As OS threads of this process (device `cpu`).
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
    // Dropped first: the memory is unregistered before `control`, which holds it, unmaps it.
    registration: Registration,
    control: Arc<Control>,
    options: WorkerOptions,
    launcher: Mutex<Launcher>,
    /// Not behind the lock, because marks are put into streams without the lock.
    resident: Option<Resident>,
    leases: Mutex<Vec<LeaseSlot>>,
    stop: AtomicBool,
    /// Set at most once; final.
    lost: OnceLock<Lost>,
    /// The thread that starts the worker on demand and checks that it lives; `wanted` asks it to
    /// start one.
    keeper: OnceLock<Thread>,
    wanted: AtomicBool,
    fault: Option<Fault>,
    /// The last generation whose launch has been made, not just begun.
    started: AtomicU64,
    /// Copies posted so far, by direction.
    posted: [AtomicU64; 2],
    began: Instant,
    /// When an operation was last launched, in nanoseconds since `began`; 0 if none has been.
    last_launch: AtomicU64,
    /// When the kernel was last launched, in nanoseconds since `began`.
    launched_at: AtomicU64,
    device: DeviceBuffer,
}

/// The host's account of a lease's pair of words.
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
        // The words of `copy_worker_params`; both kinds of device are little-endian.
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

    /// Starts a generation if the last one is gone. A final error ends the worker; any other error
    /// leaves the keeper to try again if a command waits.
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

    /// Whether the present launch has served so long that another should take over; asked when an
    /// operation begins. Uses the time of the operation before, which saves reading the clock.
    fn is_old(&self) -> bool {
        let [last, launched] = [&self.last_launch, &self.launched_at].map(|at| at.load(Ordering::Relaxed));
        last.saturating_sub(launched) > AGE.as_nanos() as u64
    }

    /// Has another launch take over: starts it behind the present one, which is told to leave. If
    /// the start fails, the present launch stays.
    fn renew(&self) {
        let mut launcher = lock(&self.launcher);
        let old = self.control.launched.load(Ordering::Relaxed);
        let here = self.started.load(Ordering::Acquire) == old && !self.control.may_be_gone();
        let ends = self.lost.get().is_some() || self.stop.load(Ordering::Acquire);
        if ends || !here || !self.is_old() || self.start_next(&mut launcher, self.options.linger).is_err() {
            return;
        }
        // Release: ordered after the launch. (Only the drop stores a larger value, and no thread
        // leases during the drop.)
        self.control.word(Layout::QUIT).store(old, Ordering::Release);
    }

    /// Starts the next generation.
    fn start_next(&self, launcher: &mut Launcher, linger: Duration) -> Result<()> {
        let generation = self.control.launched.load(Ordering::Relaxed) + 1;
        // Stored before the launch: a thread that reads the new generation's state must recognise
        // it. The lock makes this thread the only writer.
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
                    // A thread that posted in the meantime took this generation for one about to
                    // start.
                    self.summon();
                }
            }
        }
        started
    }

    /// Nanoseconds since the worker was made.
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn start(&self, launcher: &mut Launcher, generation: u64, linger: Duration) -> Result<()> {
        if let Some(fault) = &self.fault {
            fault.before_launch(generation)?;
        }
        let params = self.params(generation, linger);
        match launcher {
            // SAFETY: rings, words and mailboxes live as long as self, and `Worker::drop` keeps
            // self until the kernel has ended. The caller of `post` promises that the addresses in
            // commands are valid.
            Launcher::Gpu => unsafe { self.resident.as_ref().expect("made with it").start(&params) },
            Launcher::Threads { executor, stream, module, running } => {
                running.retain(|run| !run.is_done().unwrap_or(true));
                // SAFETY: rings, words and mailboxes outlive the kernel, and the caller of `post`
                // promises that the addresses in commands are valid.
                unsafe { executor.launch(stream, module, KERNEL, self.shape(), &params) }
                    .map(|run| running.push(run))
            }
        }
    }

    /// Whether there are commands that not all blocks have passed.
    fn has_commands(&self) -> bool {
        [Direction::Push, Direction::Pull].iter().any(|way| {
            let posted = self.posted[*way as usize].load(Ordering::Relaxed);
            self.control.counts(*way).iter().any(|count| count.load(Ordering::Relaxed) < posted)
        })
    }

    /// Has the keeper start the worker if it is gone.
    fn summon(&self) {
        self.wanted.store(true, Ordering::Release);
        if let Some(keeper) = self.keeper.get() {
            keeper.unpark();
        }
    }

    /// Marks the worker lost: current and future waits fail. `ended`: nothing of the worker runs on
    /// the device.
    #[cold]
    fn lose(&self, reason: String, ended: bool) {
        let lost = Lost { reason, ended };
        if let Ok(()) = self.lost.set(lost) {
            tracing::error!("the worker is lost: {}", self.lost.get().expect("just set").reason);
        }
    }

    /// Checks whether the kernel has died: it ended without announcing that it leaves, or its
    /// context is lost. May block like any call of the driver, so only the keeper calls this.
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
            // This is the last that the host sees of the kernel.
            self.control.word(Layout::STATE).store(started << 8 | RUNNING, Ordering::Release);
            self.control.word(Layout::QUIT).store(started, Ordering::Release);
        }
        match self.ended() {
            Ok(false) => trouble.over(),
            Ok(true) => {
                trouble.over();
                // Acquire: the kernel's last stores are ordered before its end, which this thread
                // has seen.
                let state = self.control.word(Layout::STATE).load(Ordering::Acquire);
                if state >> 8 <= started && state != started << 8 | LEFT {
                    let said = "its kernel ended without announcing it, and CUDA reports no error";
                    self.lose(said.to_owned(), true);
                }
            }
            Err(error) if error.is_final() => self.lose(format!("its kernel has died: {error}"), true),
            Err(error) => {
                if let Some((times, time)) = trouble.again() {
                    self.lose(
                        format!(
                            "the driver can't say whether it runs, asked {times} times in {time:?}: {error}"
                        ),
                        false,
                    );
                }
            }
        }
    }

    /// How long a worker that an operation starts lingers. Recent launches predict more, so it
    /// lingers longer. After an operation that comes alone the program may wait for the whole
    /// device, and so for the worker.
    fn linger(&self) -> Duration {
        let last = self.last_launch.load(Ordering::Relaxed);
        let since = self.began.elapsed().saturating_sub(Duration::from_nanos(last));
        match last != 0 && since < 3 * self.options.linger {
            true => self.options.linger,
            false => self.options.linger_alone,
        }
    }

    /// Puts the worker into the graph that a stream captures, beside the operation: a graph's
    /// replay calls none of our code, so nothing could start the worker then.
    fn join_graph(&self, stream: u64) -> Result<Held> {
        let Some(resident) = &self.resident else { return Ok(Held::Nothing) };
        let params = self.params(OF_A_GRAPH, self.options.linger_alone);
        // SAFETY: rings, words and mailboxes live as long as the worker, as in `start`. A graph
        // with operations of a library is not replayed after the library, and with it the worker,
        // has gone.
        let added = unsafe { resident.add_to_graph(stream, &params) }?;
        Ok(if added { Held::Graph } else { Held::Nothing })
    }

    /// Puts the mark after the operation into the graph. If that fails, for lack of memory, and the
    /// graph is replayed all the same, a worker that has served it stays until its limit, and so do
    /// all later ones.
    fn leave_graph(&self, stream: u64) -> Result<()> {
        let Some(resident) = &self.resident else { return Ok(()) };
        let closed = self.device.addr() + Layout::GRAPHS_CLOSED;
        // SAFETY: the word is the worker's own memory, which outlives the graph's replays, as in
        // `join_graph`. (False means that the capture has failed in the meantime, so there will be
        // no graph.)
        unsafe { resident.add_mark_to_graph(stream, closed) }.map(|_| ())
    }

    /// Waits for a launch that another thread has begun, because what this thread launches next
    /// must stand behind it.
    fn behind_launches(&self) {
        if self.started.load(Ordering::Acquire) != self.control.launched.load(Ordering::Acquire) {
            drop(lock(&self.launcher));
        }
    }

    fn shape(&self) -> Launch {
        shape(&self.options)
    }

    /// Whether no launch of the worker runs or is about to.
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

/// A resident worker on one device. May be shared by threads; its [`WorkerQueue`] belongs to one
/// thread.
///
/// Dropping it tells the kernel to leave and waits until the kernel has left.
pub struct Worker {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

impl Worker {
    /// Makes the worker and runs its kernel once, so that the cost of a first start is paid before
    /// other kernels run. Call it while the device is idle.
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

    /// Announces an operation that will be put on `stream` (a `CUstream`) and will wait for copies.
    ///
    /// On return the worker is present, or queued before the operation, and it stays until
    /// [`Worker::lease_done`] has been called and the stream has reached that call's mark. May be
    /// called by any thread.
    ///
    /// The call starts the kernel if it is not there. Its only other call of the driver asks
    /// whether the stream captures a graph. If the stream does, the kernel becomes part of the
    /// graph, and the graph must not be replayed once the worker has been dropped.
    pub fn lease(&self, stream: u64) -> Result<Lease> {
        let shared = &*self.shared;
        shared.owner.check()?;
        if let Some(lost) = self.lost() {
            return Err(lost.error());
        }
        // Under this name every thread has a stream of its own (CU_STREAM_PER_THREAD).
        let is_many = shared.resident.is_some() && stream == 2;
        let follows = shared.resident.as_ref().map_or(Follows::Runs, |resident| resident.follows(stream));
        match follows {
            Follows::Captures => return shared.join_graph(stream).map(Lease),
            Follows::Runs if !is_many => {}
            _ => return Ok(Lease(Held::Nothing)),
        }
        let slot = {
            let mut leases = lock(&shared.leases);
            // A pair of words whose stream has done all its operations may serve this stream.
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
            // Under the lock, so no other thread counts at the same time. Stored before the lease,
            // which says more than a launch under way.
            let launching = shared.control.word(Layout::LAUNCHING);
            launching.store(launching.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            // Relaxed: `announce` orders this store before its look at the state.
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

    /// Ends a lease: it is done once `stream` has reached this point, after the operation.
    ///
    /// On the device `cpu`, whose streams can't do that, the lease is done at once. If the stream
    /// can't be told to report, the lease is done at once too, and later copies for the operation
    /// start the worker on demand.
    pub fn lease_done(&self, lease: Lease, stream: u64) -> Result<()> {
        let shared = &*self.shared;
        shared.owner.check()?;
        let at = match lease.0 {
            Held::Slot(at) => at,
            Held::Graph => return shared.leave_graph(stream),
            Held::Nothing => return Ok(()),
        };
        self.launched();
        // Relaxed: used only for a guess.
        shared.last_launch.store(shared.now(), Ordering::Relaxed);
        // The worker may have left to let the launch proceed. The next generation is queued after
        // the operation but before the mark: a mark that waits would hold up a device with one
        // queue for all streams.
        if shared.control.announce()
            && let Err(error) = shared.ensure(shared.options.linger)
        {
            self.take_back(at);
            return Err(error);
        }
        shared.behind_launches();
        // The lock is held over the call, so that values are written in the stream's order.
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

    /// Counts a launch of the program as made.
    fn launched(&self) {
        let _leases = lock(&self.shared.leases);
        let launching = self.shared.control.word(Layout::LAUNCHING);
        launching.store(launching.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    }

    fn take_back(&self, at: usize) {
        let mut leases = lock(&self.shared.leases);
        leases[at].opened -= 1;
        let word = self.shared.control.word(self.shared.lease_word(at, false));
        // This operation did not count as done before and does now, which only lets the worker
        // leave.
        word.store(leases[at].opened, Ordering::Relaxed);
    }

    /// Whether the kernel is on the device or about to start. Never true in a child of `fork`.
    pub fn is_present(&self) -> bool {
        self.shared.owner.is_here() && !self.shared.control.is_gone()
    }

    /// How often the kernel was started.
    pub fn starts(&self) -> u64 {
        self.shared.control.launched.load(Ordering::Relaxed)
    }

    /// The cause if the worker is lost and no copy completes any more: the kernel has died, with
    /// its context or alone, or can't be started.
    ///
    /// A death is noticed within about half a second; a start that keeps failing in a way that may
    /// pass counts after 3 s. Does not call the driver.
    #[inline]
    pub fn lost(&self) -> Option<&Lost> {
        self.shared.lost.get()
    }

    /// Waits until the kernel has left by itself; false if that takes longer than `limit`.
    pub fn wait_gone(&self, limit: Duration) -> Result<bool> {
        self.shared.owner.check()?;
        let began = Instant::now();
        while self.is_present() {
            if let Some(lost) = self.lost() {
                return Err(lost.error());
            }
            if began.elapsed() > limit {
                // If the kernel failed, its error says more than a timeout.
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

/// The keeper: the thread that starts the worker when a command finds none, and checks that it
/// lives. A launch may block, and a thread that posts must not.
fn keep(shared: &Shared) {
    let (mut starting, mut looking) = (Trouble::default(), Trouble::default());
    while !shared.stop.load(Ordering::Acquire) {
        match starting.pause() {
            // Sleep without being woken: threads that post meanwhile want the same start that is
            // being retried.
            Some(pause) => thread::sleep(pause),
            None => thread::park_timeout(LOOK),
        }
        // A needless wake-up starts a worker that finds nothing and leaves again. A graph's launch
        // that stays for other graphs' operations is relieved, so that its own graph can end.
        let stays = shared.control.word(Layout::STAYS);
        let relieves = stays.load(Ordering::Relaxed) != 0 && stays.swap(0, Ordering::Relaxed) != 0;
        let wanted = shared.wanted.swap(false, Ordering::AcqRel) || relieves || shared.has_commands();
        if wanted && shared.control.may_be_gone() {
            match shared.ensure(shared.options.linger_on_demand) {
                Ok(()) => starting.over(),
                // `ensure` has reported this error.
                Err(error) if error.is_final() => {}
                Err(error) => match starting.again() {
                    Some((times, time)) => {
                        // A worker that has only said that it leaves may still stay.
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
            // The handle names a thread that a child of `fork` does not have.
            std::mem::forget(self.keeper.take());
            return;
        }
        shared.stop.store(true, Ordering::Release);
        // Tells all launches to leave, including one that the keeper may be making. (No other
        // thread has the worker any more.)
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
        // A keeper that is still blocked in the driver may yet make a launch.
        while self.keeper.is_none() && began.elapsed() < END_LIMIT {
            match shared.ended() {
                Ok(true) => return,
                // The context is lost, and the kernel with it.
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
