//! One rank: a process of its own, which joins a communicator and runs every collective at every size.
//!
//! A rank tells the program that started it what it does, a line of JSON each, and ends with that program.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use pushgate::zerocopy::{FromBytes as _, IntoBytes as _};
use pushgate::{DeviceBuffer, explain};
use pushgate_gpu_kernels::{Copies, CudaExecutor, Executor};
use rustix::process::{Signal, getpid, getppid, kill_process, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use super::barrier::Barrier;
use super::collective::{Collective, ELEMENT, Shape};
use super::data::{Data, SLACK, beginning};
use super::nccl::{Call, Comm, Nccl, UniqueId};

/// The variable that makes a process a rank: a [`Task`] as JSON.
pub const TASK: &str = "_PUSHGATE_NCCL_CHECK_TASK";
/// What a rank's lines begin with: libraries may write to standard output too.
pub const MARK: &str = "pushgate-rank ";
/// How often a communicator is asked whether it has failed, while something is waited for.
const ASK: Duration = Duration::from_millis(1);

/// What a rank is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    pub rank: u32,
    pub ranks: u32,
    /// The process that started this one.
    pub parent: i32,
    pub nccl: PathBuf,
    /// Where the ranks meet.
    pub folder: PathBuf,
    pub collectives: Vec<Collective>,
    pub sizes: Vec<u64>,
    pub iters: u32,
    pub warmup: u32,
    pub seed: u64,
    /// Most milliseconds that a wait takes.
    pub timeout_ms: u64,
}

/// What a rank says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Said {
    /// Its GPU, as the driver names it.
    Device(String),
    /// What it begins to do.
    Begins(String),
    /// The rank may be silent for this number of milliseconds more than usual.
    Takes(u64),
    Row(Timed),
    /// Why it ends before its time.
    Failed(String),
}

/// A collective at one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    pub collective: Collective,
    /// Which of the sizes.
    pub size: usize,
    /// Mean of the measured iterations at this rank.
    pub us: f64,
    /// Wrong elements at this rank, of all checked iterations.
    pub wrong: u64,
}

fn say(said: &Said) {
    let line = serde_json::to_string(said).expect("it is plain data");
    // A parent that is gone has killed us.
    let _ = std::io::stdout().lock().write_all(format!("{MARK}{line}\n").as_bytes());
}

/// Runs a rank. `task` is the content of [`TASK`].
pub fn run(task: &str) -> Result<()> {
    let task: Task = serde_json::from_str(task).with_context(|| format!("{TASK} is no task"))?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have ended before that.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(task.parent) {
        bail!("the program that started this rank has ended");
    }
    match work(&task) {
        Ok(()) => Ok(()),
        Err(e) => {
            say(&Said::Failed(explain(&*e)));
            // What NCCL and CUDA would do at an exit may wait for the peer, or for a kernel that never ends.
            let _ = kill_process(getpid(), Signal::KILL);
            unreachable!("it has ended");
        }
    }
}

/// How the ranks find each other: rank 0 writes a file.
fn meet(task: &Task, nccl: &'static Nccl) -> Result<UniqueId> {
    let path = task.folder.join("id");
    if task.rank == 0 {
        let id = nccl.unique_id()?;
        let new = task.folder.join("id.new");
        std::fs::write(&new, id.0).with_context(|| format!("writing {}", new.display()))?;
        std::fs::rename(&new, &path).with_context(|| format!("writing {}", path.display()))?;
        return Ok(id);
    }
    let start = Instant::now();
    while !path.exists() {
        if start.elapsed() > Duration::from_millis(task.timeout_ms) {
            bail!("rank 0 made no id within {} ms", task.timeout_ms);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    read_id(&path)
}

fn read_id(path: &Path) -> Result<UniqueId> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    Ok(UniqueId(<[u8; 128]>::read_from_bytes(&bytes).map_err(|_| anyhow::anyhow!("an id has 128 bytes"))?))
}

fn work(task: &Task) -> Result<()> {
    let begins = |what: String| say(&Said::Begins(what));
    begins("opening the GPU".into());
    // CUDA_VISIBLE_DEVICES shows this rank's alone.
    let gpu = CudaExecutor::new(0)?;
    say(&Said::Device(gpu.device_name().to_owned()));
    let executor: Arc<dyn Executor> = Arc::new(gpu);
    begins("preparing its data".into());
    let data = Data::new(task.seed, task.ranks);
    let shapes = || {
        let sizes = move |c: Collective| task.sizes.iter().map(move |size| c.shape(*size, task.ranks));
        task.collectives.iter().flat_map(move |c| sizes(*c))
    };
    let most = |of: fn(Shape) -> u64| shapes().map(of).max().unwrap_or(0);
    let input = executor.alloc((most(|s| s.sent) + SLACK) as usize)?;
    let output = executor.alloc(most(|s| s.received) as usize)?;
    data.fill(&input, task.rank)?;
    let queue = Copies::beside_kernels(&executor)?;
    let stream = queue.raw().context("a GPU has streams")?;
    let timeout = Duration::from_millis(task.timeout_ms);
    let mut barrier = Barrier::open(&task.folder.join("barrier"), task.ranks, timeout)?;

    begins("opening NCCL".into());
    let nccl = Nccl::open(&task.nccl)?;
    let id = meet(task, nccl)?;
    begins("joining the communicator (ncclCommInitRank)".into());
    let comm = nccl.join(id, task.rank, task.ranks)?;
    let mut rank = Rank {
        task,
        data: &data,
        comm: &comm,
        queue: &queue,
        stream,
        input: &input,
        output: &output,
        host: vec![0; (output.len() as u64 / ELEMENT) as usize],
        timeout,
        calls: 0,
    };
    for collective in &task.collectives {
        for size in 0..task.sizes.len() {
            let bytes = collective.shape(task.sizes[size], task.ranks).bytes;
            begins(format!("{} of {bytes} bytes", collective.name()));
            let timed = rank.measure(*collective, size, &mut barrier);
            say(&Said::Row(timed.with_context(|| format!("{} of {bytes} bytes", collective.name()))?));
        }
    }
    begins("destroying the communicator".into());
    barrier.meet()?;
    comm.destroy()
}

struct Rank<'a> {
    task: &'a Task,
    data: &'a Data,
    comm: &'a Comm,
    queue: &'a Copies,
    stream: u64,
    input: &'a DeviceBuffer,
    output: &'a DeviceBuffer,
    host: Vec<u32>,
    timeout: Duration,
    /// Calls whose beginning in the table was another.
    calls: usize,
}

impl Rank<'_> {
    /// As nccl-tests: warm-up, each iteration of it checked here; then all iterations one after the other, by the host's
    /// clock, from a barrier until the stream is idle.
    fn measure(&mut self, c: Collective, size: usize, barrier: &mut Barrier) -> Result<Timed> {
        let shape = c.shape(self.task.sizes[size], self.task.ranks);
        let mut wrong = 0;
        for _ in 0..self.task.warmup {
            let from = self.next();
            barrier.meet()?;
            self.launch(c, shape, from)?;
            self.finish(Duration::ZERO)?;
            wrong += self.check(c, shape, from)?;
        }
        let from = self.next();
        // After a check, which leaves NCCL's threads idle. Tells how long the iterations may take, too.
        let start = Instant::now();
        self.launch(c, shape, from)?;
        self.finish(Duration::ZERO)?;
        let more = start.elapsed() * self.task.iters * 10;
        if more > ASK * 1000 {
            say(&Said::Takes(more.as_millis() as u64));
        }
        barrier.meet()?;
        let start = Instant::now();
        for _ in 0..self.task.iters {
            self.launch(c, shape, from)?;
        }
        self.finish(more)?;
        let us = start.elapsed().as_secs_f64() * 1e6 / f64::from(self.task.iters);
        wrong += self.check(c, shape, from)?;
        Ok(Timed { collective: c, size, us, wrong })
    }

    fn next(&mut self) -> usize {
        self.calls += 1;
        beginning(self.calls)
    }

    fn launch(&self, c: Collective, shape: Shape, from: usize) -> Result<()> {
        let call = Call {
            input: self.input.addr() + from as u64 * ELEMENT,
            output: self.output.addr(),
            stream: self.stream,
        };
        // SAFETY: the buffers hold the largest shape, the input a beginning before it; they and the stream live until
        // the communicator is gone, or the process with them.
        unsafe { c.launch(self.comm, call, shape, self.task.rank, self.task.ranks) }
    }

    /// Waits until all that was launched has ended, for the timeout and `more`.
    fn finish(&self, more: Duration) -> Result<()> {
        let point = self.queue.point()?;
        let start = Instant::now();
        let mut asked = start;
        while !point.passed()? {
            let now = Instant::now();
            if now - asked > ASK {
                self.comm.async_error()?;
                asked = now;
            }
            let limit = self.timeout + more;
            if now - start > limit {
                bail!("it did not end within {:.1} s", limit.as_secs_f32());
            }
            // NCCL's threads, and the plugin's, may need this core.
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Wrong elements of the output.
    fn check(&mut self, c: Collective, shape: Shape, from: usize) -> Result<u64> {
        let host = &mut self.host[..(shape.received / ELEMENT) as usize];
        self.output.copy_to_host_at(0, host.as_mut_bytes())?;
        Ok(self.data.wrong(c, shape, self.task.rank, from, host))
    }
}
