//! One turn of a replay: the processes are started, told each other's handles, started together, and ended.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::figures::Report;
use super::plugin::Handles;
use super::rank::{Said, TASK, Task, Told};
use crate::bench::ranks::Children;
use crate::signals;

/// What is the same in all turns.
pub struct Plan {
    /// But for its process and its plugin.
    pub task: Task,
    /// The processes' numbers in the recording.
    pub pids: Vec<u32>,
    /// Words before the program of each process.
    pub within: Vec<Vec<String>>,
    /// Variables of all processes.
    pub variables: Vec<(String, String)>,
}

struct Processes {
    _children: Children,
    stdin: Vec<ChildStdin>,
    lines: Receiver<(usize, Option<Said>)>,
    pids: Vec<u32>,
    silence: Duration,
}

impl Processes {
    fn start(plan: &Plan, task: &Task, variables: &[(String, String)]) -> Result<Processes> {
        let (mut children, mut stdin) = (Children::default(), Vec::new());
        let (sender, lines) = channel();
        for process in 0..plan.pids.len() {
            let text = serde_json::to_string(&Task { process, ..task.clone() })?;
            let all = plan.variables.iter().chain(variables);
            let mut set: Vec<(&str, &OsStr)> =
                all.map(|(name, value)| (&**name, OsStr::new(value))).collect();
            set.push((TASK, OsStr::new(&text)));
            let within = plan.within.get(process).map_or(&[][..], |words| words);
            let child = children.start_within(within, "trace", &set, [Stdio::piped(), Stdio::piped()])?;
            stdin.push(child.stdin.take().expect("it is piped"));
            let (stdout, sender) = (child.stdout.take().expect("it is piped"), sender.clone());
            std::thread::spawn(move || {
                let lines = BufReader::new(stdout).lines().map_while(Result::ok);
                let said = lines.filter_map(|line| serde_json::from_str(&line).ok());
                said.for_each(|said| drop(sender.send((process, Some(said)))));
                let _ = sender.send((process, None));
            });
        }
        // The children's own waits end first.
        let silence = Duration::from_millis(task.silence_ms) * 2 + Duration::from_secs(30);
        Ok(Processes { _children: children, stdin, lines, pids: plan.pids.clone(), silence })
    }

    fn tell(&mut self, process: usize, told: &Told) -> Result<()> {
        let line = serde_json::to_string(told)? + "\n";
        self.stdin[process].write_all(line.as_bytes()).with_context(|| self.name(process))
    }

    fn tell_all(&mut self, told: &Told) -> Result<()> {
        (0..self.stdin.len()).try_for_each(|process| self.tell(process, told))
    }

    fn name(&self, process: usize) -> String {
        format!("process {process} (pid {} in the recording)", self.pids[process])
    }

    /// What each process says next.
    fn hear<T>(&mut self, what: &str, mut take: impl FnMut(Said) -> Option<T>) -> Result<Vec<T>> {
        let mut heard: Vec<Option<T>> = self.pids.iter().map(|_| None).collect();
        let mut last = Instant::now();
        // A replay may be longer than its silence.
        while heard.iter().any(Option::is_none) {
            if signals::caught().is_some() {
                bail!("interrupted; the processes were ended");
            }
            let (process, said) = match self.lines.recv_timeout(Duration::from_millis(20)) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => {
                    if what != RUN && last.elapsed() > self.silence {
                        bail!("no process said for {} s that it {what}", self.silence.as_secs());
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => bail!("all processes ended before they {what}"),
            };
            last = Instant::now();
            match said {
                Some(Said::Failed(why)) => bail!("{}: {why}", self.name(process)),
                Some(said) => heard[process] = take(said),
                None if heard[process].is_none() => bail!("{} ended before it {what}", self.name(process)),
                None => {}
            }
        }
        Ok(heard.into_iter().flatten().collect())
    }
}

/// What the replay itself is called: its threads see to it that it ends.
const RUN: &str = "had replayed its calls";

/// Runs a turn with these variables; over bare sockets if the task names no plugin.
pub fn run(plan: &Plan, task: &Task, variables: &[(String, String)]) -> Result<Vec<Report>> {
    let mut processes = Processes::start(plan, task, variables)?;
    let handles = processes.hear("listened", |said| match said {
        Said::Listening(handles) => Some(handles),
        _ => None,
    })?;
    let handles: Handles = handles.into_iter().flatten().collect();
    processes.tell_all(&Told::Handles(handles))?;
    processes.hear("was connected", |said| matches!(said, Said::Ready).then_some(()))?;
    processes.tell_all(&Told::Go)?;
    let reports = processes.hear(RUN, |said| match said {
        Said::Ran(report) => Some(*report),
        _ => None,
    })?;
    processes.tell_all(&Told::Close)?;
    // Each ends by itself when it has closed its connections.
    let until = Instant::now() + processes.silence;
    let mut left = processes.pids.len();
    while left > 0 {
        match processes.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((process, Some(Said::Failed(why)))) => bail!("{}: {why}", processes.name(process)),
            Ok((_, Some(_))) => {}
            Ok((_, None)) => left -= 1,
            Err(_) => bail!("{left} processes do not close their connections"),
        }
    }
    Ok(reports)
}
