//! One process of a replay. It talks with the command by lines: what it listens at, that it is connected, what it measured.

use std::io::BufRead as _;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use pushgate::settings::PluginSettings;
use pushgate_net_caller::table::Plugin;
use pushgate_net_trace::Role;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::figures::Report;
use super::memory::Memory;
use super::plugin::{self, Handles};
use super::script::Script;
use super::sockets;
use super::thread::{Ran, Replay, Way};
use crate::output::outln;

/// The variable that tells a process its task.
pub const TASK: &str = "_PUSHGATE_NCCL_TRACE";
/// The table of the plugin.
const VERSION: u32 = 11;

/// What a process is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    pub folder: PathBuf,
    /// Which process of the script.
    pub process: usize,
    /// The plugin; without it the messages go over bare sockets.
    pub plugin: Option<PathBuf>,
    pub paced: bool,
    pub all: bool,
    pub silence_ms: u64,
}

/// What a process says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Said {
    Listening(Handles),
    Ready,
    Ran(Box<Report>),
    Failed(String),
}

/// What a process is told.
#[derive(Debug, Serialize, Deserialize)]
pub enum Told {
    Handles(Handles),
    Go,
    Close,
}

fn say(said: &Said) -> Result<()> {
    Ok(outln!("{}", serde_json::to_string(said)?)?)
}

fn hear() -> Result<Told> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    if line.is_empty() {
        bail!("the command that started this process is gone");
    }
    Ok(serde_json::from_str(&line)?)
}

/// Does the task of this process.
pub fn run(task: &str) -> Result<()> {
    let task: Task = serde_json::from_str(task).context(TASK)?;
    replay(&task).inspect_err(|e| drop(say(&Said::Failed(format!("{e:#}")))))
}

fn replay(task: &Task) -> Result<()> {
    let mut script = Script::of(&pushgate_net_trace::folder(&task.folder)?)?;
    if task.process >= script.processes.len() {
        bail!("process {} of {}", task.process, script.processes.len());
    }
    let mut process = script.processes.swap_remove(task.process);
    let ends = Arc::new(std::mem::take(&mut process.ends));
    let silence = Duration::from_millis(task.silence_ms);
    let memories: Vec<_> =
        ends.iter().map(|end| Memory::new(end.memory, end.connection, end.role == Role::Send)).collect();
    let memories = Arc::new(memories);
    enum Listening {
        Plugin(plugin::Listening),
        Sockets(sockets::Listening),
    }
    let (listening, handles) = match &task.plugin {
        Some(path) => {
            let plugin = Plugin::open(path, VERSION, false).map_err(|e| anyhow!(e))?;
            let (listening, handles) = plugin::Listening::open(plugin, &ends)?;
            (Listening::Plugin(listening), handles)
        }
        None => {
            let host = &PluginSettings::load()?.host;
            let at = if host == "auto" {
                Ipv4Addr::LOCALHOST.into()
            } else {
                host.parse::<IpAddr>().context("host")?
            };
            let (listening, handles) = sockets::Listening::open(at, &ends)?;
            (Listening::Sockets(listening), handles)
        }
    };
    say(&Said::Listening(handles))?;
    let Told::Handles(handles) = hear()? else { bail!("told something else than handles") };
    let until = Instant::now() + silence;
    let way = match listening {
        Listening::Plugin(listening) => Way::Plugin(listening.connect(&ends, &memories, &handles, until)?),
        Listening::Sockets(listening) => Way::Sockets(listening.connect(&ends, &memories, &handles, until)?),
    };
    say(&Said::Ready)?;
    let Told::Go = hear()? else { bail!("told something else than to go") };
    let replay = Replay {
        way: &way,
        ends: &ends,
        memories: &memories,
        paced: task.paced,
        all: task.all,
        silence,
        over: AtomicBool::new(false),
    };
    let (before, slept) = (cpu(), sleeps());
    let ran: Result<Vec<Ran>> = std::thread::scope(|scope| {
        let threads: Vec<_> = process.threads.iter().map(|steps| scope.spawn(|| replay.run(steps))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))).collect()
    });
    let mut report =
        Report { cpu: cpu() - before, sleeps: sleeps().saturating_sub(slept), ..Report::default() };
    let ran = ran?;
    for thread in &ran {
        report.received += thread.received;
        report.latencies.merge(&thread.latencies);
    }
    let first = ran.iter().filter_map(|r| r.first).min();
    let last = ran.iter().filter_map(|r| r.last).max();
    report.seconds = first.zip(last).map_or(0.0, |(first, last)| last.duration_since(first).as_secs_f64());
    say(&Said::Ran(Box::new(report)))?;
    let Told::Close = hear()? else { bail!("told something else than to close") };
    match way {
        Way::Plugin(calls) => calls.close(&ends)?,
        Way::Sockets(sockets) => sockets.close(),
    }
    Ok(())
}

/// CPU seconds of this process.
fn cpu() -> f64 {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// How often the threads of this process have gone to sleep; those that have ended do not count.
fn sleeps() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let of = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?
            .trim()
            .parse::<u64>()
            .ok()
    };
    tasks.filter_map(of).sum()
}
