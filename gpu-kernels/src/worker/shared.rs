//! What all handles of a worker share, and starting its kernel.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pushgate_driver_shim::fork::Owner;

use super::KERNEL;
use super::control::{Control, Direction, LEASES, Layout};
use super::fault::Fault;
use super::lost::Lost;
use super::options::WorkerOptions;
use super::policy::{self, Seen};
use crate::cuda::Resident;
use crate::error::{DeviceError, Result};
use crate::executor::{DeviceBuffer, Executor, LoadedModule, Registration, Running, Stream};
use crate::lock::lock;

/// How the kernel is launched.
pub(super) enum Launcher {
    /// As OS threads of this process (device `cpu`).
    Threads {
        executor: Arc<dyn Executor>,
        stream: Stream,
        module: Arc<dyn LoadedModule>,
        running: Vec<Running>,
    },
    Gpu,
}

/// What all handles of a worker share.
pub(super) struct Shared {
    pub(super) owner: Owner,
    // Dropped first: the memory is unregistered before `control`, which holds it, unmaps it.
    pub(super) registration: Registration,
    pub(super) control: Arc<Control>,
    pub(super) options: WorkerOptions,
    /// Locked by who starts the kernel, from the decision to the end of the launch.
    pub(super) launcher: Mutex<Launcher>,
    /// Not behind the lock, because marks are put into streams without the lock.
    pub(super) resident: Option<Resident>,
    pub(super) leases: Mutex<Vec<LeaseSlot>>,
    /// Set at most once; final.
    pub(super) lost: OnceLock<Lost>,
    /// The thread that starts the worker on demand and checks that it lives.
    pub(super) keeper: OnceLock<Thread>,
    pub(super) fault: Option<Fault>,
    /// Copies posted so far, by direction.
    pub(super) posted: [AtomicU64; 2],
    pub(super) began: Instant,
    /// When an operation was last launched, in nanoseconds since `began`; 0 if none has been.
    pub(super) last_launch: AtomicU64,
    /// When the kernel was last launched, in nanoseconds since `began`.
    pub(super) launched_at: AtomicU64,
    pub(super) device: DeviceBuffer,
}

/// The host's account of a lease's pair of words.
#[derive(Clone, Copy, Default)]
pub(super) struct LeaseSlot {
    pub(super) stream: u64,
    pub(super) opened: u64,
    pub(super) closed: u64,
}

impl Shared {
    /// The time since the worker was made.
    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// When an operation was last launched, if one was.
    pub(super) fn last_operation(&self) -> Option<Duration> {
        // Relaxed: used only for a guess.
        let at = self.last_launch.load(Ordering::Relaxed);
        (at != 0).then(|| Duration::from_nanos(at))
    }

    /// Whether the present launch has served so long that another should take over.
    pub(super) fn is_old(&self) -> bool {
        // Relaxed: used only for a guess.
        let launched_at = Duration::from_nanos(self.launched_at.load(Ordering::Relaxed));
        policy::is_old(self.last_operation(), launched_at)
    }

    /// What decides about a start. To be called with the launcher's lock held.
    fn seen(&self) -> Seen {
        Seen { phase: self.control.phase(), stopping: self.control.flags.is_stopping() }
    }

    /// Starts a generation if the last one is gone. A final error ends the worker; any other error
    /// leaves the keeper to try again if a command waits.
    pub(super) fn ensure(&self, linger: Duration) -> Result<()> {
        let mut launcher = lock(&self.launcher);
        if let Some(lost) = self.lost.get() {
            return Err(lost.error());
        }
        if !self.seen().needs_start() {
            return Ok(());
        }
        self.start_next(&mut launcher, linger)
    }

    /// Has another launch take over: starts it behind the present one, which is told to leave. If
    /// the start fails, the present launch stays.
    pub(super) fn renew(&self) {
        let mut launcher = lock(&self.launcher);
        let flags = &self.control.flags;
        let old = flags.launched();
        let made = flags.started() == old;
        if self.lost.get().is_some()
            || !self.seen().may_relieve(made, self.is_old())
            || self.start_next(&mut launcher, self.options.linger).is_err()
        {
            return;
        }
        // Release: ordered after the launch. (Only the drop stores a larger value, and no thread
        // leases during the drop.)
        self.control.word(Layout::QUIT).store(old, Ordering::Release);
    }

    /// Starts the next generation.
    fn start_next(&self, launcher: &mut Launcher, linger: Duration) -> Result<()> {
        let flags = &self.control.flags;
        let generation = flags.begin();
        let started = self.start(launcher, generation, linger);
        match &started {
            Ok(()) => {
                flags.made(generation);
                // Relaxed: used only for a guess.
                self.launched_at.store(self.now().as_nanos() as u64, Ordering::Relaxed);
            }
            Err(error) => {
                flags.failed();
                if error.is_final() {
                    self.lose(error.to_string(), true);
                } else {
                    self.summon();
                }
            }
        }
        started
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
                unsafe { executor.launch(stream, module, KERNEL, self.options.shape(), &params) }
                    .map(|run| running.push(run))
            }
        }
    }

    /// Waits for a launch that another thread has begun, because what this thread launches next
    /// must stand behind it.
    pub(super) fn behind_launches(&self) {
        if self.control.flags.is_launching() {
            drop(lock(&self.launcher));
        }
    }

    /// Has the keeper start the worker if it is gone.
    pub(super) fn summon(&self) {
        self.control.flags.want();
        if let Some(keeper) = self.keeper.get() {
            keeper.unpark();
        }
    }

    /// Marks the worker lost: current and future waits fail. `ended`: nothing of the worker runs on
    /// the device.
    #[cold]
    pub(super) fn lose(&self, reason: String, ended: bool) {
        let lost = Lost { reason, ended };
        if let Ok(()) = self.lost.set(lost) {
            tracing::error!("the worker is lost: {}", self.lost.get().expect("just set").reason);
        }
    }

    /// Whether no launch of the worker runs or is about to.
    pub(super) fn ended(&self) -> Result<bool> {
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
            Some(fault) if ended => fault.after_end(self.control.flags.started()).map(|()| true),
            _ => Ok(ended),
        }
    }

    /// The kernel's parameters.
    pub(super) fn params(&self, generation: u64, linger: Duration) -> Vec<u8> {
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

    /// Where a lease's word lies: the number of its operations that have been opened, or that are
    /// done.
    pub(super) fn lease_word(&self, slot: usize, done: bool) -> usize {
        Layout::LEASES + (1 + slot) * 16 + if done { 8 } else { 0 }
    }
}
