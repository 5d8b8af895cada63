//! The processes that a run starts: the ranks, and the proxy if the engines run in one.
//!
//! The supervisor and a rank talk in lines of JSON: [`Order`]s on the rank's standard input, [`Said`] on its standard
//! output. Signals go through pidfds, so none can reach a process that has taken over a child's number.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use pushgate::Membership;
use pushgate::settings::ProxyPlace;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::Options;
use super::names::{ROLE, SEED, proxy_socket};

/// How long the proxy may take until it serves.
const SERVES: Duration = Duration::from_secs(60);

/// What the supervisor tells a rank.
#[derive(Serialize, Deserialize)]
pub enum Order {
    /// Break the link to a peer.
    Break { peer: u32, id: u64 },
    /// Reset the socket to a peer.
    Cut { peer: u32 },
    /// Hold the bytes to and from a peer's socket back for a time.
    Hold { peer: u32, time: Duration },
    /// End all queue pairs.
    Abort,
    /// Send no more once every rank has this order, and end when all messages have arrived.
    Finish,
}

/// What has gone to one peer and come from it so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    pub peer: u32,
    pub sent: u64,
    pub taken: u64,
    pub lost: u64,
    pub doubled: u64,
    pub wrong: u64,
}

/// The rank that the end of a queue pair is laid to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    Lost(u32),
    Aborted(u32),
    Other,
}

/// What a rank tells the supervisor.
#[derive(Serialize, Deserialize)]
pub enum Said {
    /// The kernel runs.
    Ready,
    /// Every few milliseconds. `links`: how many took the place of one that broke, over all queue pairs of this rank.
    Moved { links: u64, traffic: Vec<Traffic> },
    /// A message has been taken that cannot have arrived before the break; `ns` after it.
    Back { id: u64, ns: u64 },
    /// A queue pair has ended, and the block of the kernel that uses it has ended with a status.
    Ended { peer: u32, cause: Cause, why: String, status: String },
    /// All messages have arrived, and the kernels of all ranks have ended. `all`: what each rank has counted.
    Done { all: BTreeMap<u32, Vec<Traffic>> },
}

/// What comes from the ranks.
pub enum Event {
    Said(Said),
    /// The rank's standard output is closed: it has ended.
    Gone,
}

/// A process of this run.
struct Process {
    child: Child,
    /// Refers to the child alone, even after the child was waited for.
    pidfd: OwnedFd,
}

impl Process {
    fn start(command: &mut Command) -> Result<Self> {
        use std::os::unix::process::CommandExt as _;
        // Ctrl-C goes to this process alone, which ends the children in order.
        let mut child = command.process_group(0).spawn().context("starting a child")?;
        // The child was not waited for, so the number is the child's.
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Process { child, pidfd }),
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(e).context("pidfd_open of a child")
            }
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        pidfd_send_signal(&self.pidfd, signal)
            .with_context(|| format!("signal {} to a child", signal.as_raw()))
    }
}

/// The ranks' processes, from one start to the end of all.
pub struct Children {
    ranks: BTreeMap<u32, (Process, ChildStdin)>,
    proxy: Option<(Process, Command)>,
    events: Receiver<(u32, Event)>,
}

/// Sends the lines of a rank on, until the rank ends.
fn listen(rank: u32, from: impl BufRead, to: Sender<(u32, Event)>) {
    for line in from.lines().map_while(Result::ok) {
        if let Ok(said) = serde_json::from_str(&line)
            && to.send((rank, Event::Said(said))).is_err()
        {
            return;
        }
    }
    let _ = to.send((rank, Event::Gone));
}

impl Children {
    /// Starts the ranks, and the proxy before them. `number` counts the starts.
    pub fn start(o: &Options, number: u32) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let parent = std::process::id();
        let (to, events) = channel();
        let mut children = Children { ranks: BTreeMap::new(), proxy: None, events };
        let command = |what: &str| {
            let mut command = Command::new(&program);
            command.args(std::env::args_os().skip(1)).env(ROLE, format!("{what}/{parent}/{number}"));
            // The seed may be the clock's.
            command.env(SEED, o.seed.to_string());
            if let Some(membership) = &o.membership {
                command.envs(variables(membership));
            }
            // The faults would fill the log with warnings that are expected.
            if std::env::var_os("PUSHGATE_LOG").is_none() {
                command.env("PUSHGATE_LOG", "error");
            }
            command
        };
        if o.settings.proxy == ProxyPlace::Process {
            let mut command = command("proxy");
            command.stdin(Stdio::null()).stdout(Stdio::null());
            children.proxy = Some((Process::start(&mut command)?, command));
            serves(&proxy_socket(parent, number))?;
        }
        for rank in o.own() {
            let mut command = command(&rank.to_string());
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut process = Process::start(&mut command)?;
            let orders = process.child.stdin.take().expect("it is piped");
            let said = BufReader::new(process.child.stdout.take().expect("it is piped"));
            children.ranks.insert(rank, (process, orders));
            let to = to.clone();
            std::thread::spawn(move || listen(rank, said, to));
        }
        Ok(children)
    }

    /// The numbers of the ranks' processes.
    pub fn pids(&self) -> Vec<u32> {
        self.ranks.values().map(|(process, _)| process.child.id()).collect()
    }

    pub fn signal(&self, rank: u32, signal: Signal) -> Result<()> {
        self.ranks[&rank].0.signal(signal)
    }

    /// Kills the proxy process, and starts another one in its place.
    pub fn replace_proxy(&mut self) -> Result<()> {
        let (process, command) = self.proxy.as_mut().context("no proxy process runs")?;
        process.signal(Signal::KILL)?;
        // Its socket is free once it has ended.
        process.child.wait().context("waiting for the proxy that was killed")?;
        *process = Process::start(command)?;
        Ok(())
    }

    pub fn order(&mut self, rank: u32, order: &Order) -> Result<()> {
        let line = serde_json::to_string(order)? + "\n";
        let (_, orders) = self.ranks.get_mut(&rank).expect("it is a rank of this process");
        let told = orders.write_all(line.as_bytes());
        told.with_context(|| format!("an order to rank {rank}, which may have ended"))
    }

    /// The next event, if one comes within `wait`.
    pub fn event(&self, wait: Duration) -> Option<(u32, Event)> {
        match self.events.recv_timeout(wait) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                // All ranks have ended. Their ends were told before.
                std::thread::sleep(wait);
                None
            }
        }
    }
}

impl Drop for Children {
    /// Ends all children, whatever state they are in.
    fn drop(&mut self) {
        let all = || {
            self.ranks
                .values()
                .map(|(process, _)| process)
                .chain(self.proxy.iter().map(|(process, _)| process))
        };
        // All stop before one dies: the others would say that their peer is lost.
        for signal in [Signal::STOP, Signal::KILL] {
            // A child that has ended already takes no signal.
            all().for_each(|process| drop(process.signal(signal)));
        }
        let proxy = self.proxy.iter_mut().map(|(process, _)| process);
        for process in self.ranks.values_mut().map(|(process, _)| process).chain(proxy) {
            let _ = process.child.wait();
        }
    }
}

/// The variables by which a child finds the same place in the job as this process: what a launcher set may hold for this
/// process alone.
fn variables(m: &Membership) -> impl Iterator<Item = (&'static str, String)> {
    let number = |name, n: Option<u32>| n.map(|n| (name, n.to_string()));
    let all = [
        number("PUSHGATE_RANK", Some(m.rank)),
        number("PUSHGATE_RANKS", Some(m.size)),
        number("PUSHGATE_LOCAL_RANK", m.local_rank),
        number("PUSHGATE_LOCAL_RANKS", m.local_size),
        Some(("PUSHGATE_JOB", m.job.clone())),
        m.rendezvous.clone().map(|place| ("PUSHGATE_RENDEZVOUS", place)),
    ];
    all.into_iter().flatten()
}

/// Waits until a proxy listens at an abstract socket.
fn serves(socket: &str) -> Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < SERVES {
        let sockets = std::fs::read_to_string("/proc/net/unix").context("reading /proc/net/unix")?;
        if sockets.lines().any(|line| line.ends_with(socket)) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    bail!("the proxy does not serve at {socket} after {SERVES:?}");
}
