//! The ranks of a bench: processes of this program, or threads of one process.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use pushgate::settings::DeviceChoice;
use pushgate::{Error, Settings};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};

/// How a child knows what it is: [`Role`] for a rank, another word for another process of the bench.
pub const ROLE: &str = "_PUSHGATE_ROLE";
/// How a child knows the process that started it.
const PARENT: &str = "_PUSHGATE_PARENT";
/// How long processes may take to end by themselves after the first failure.
const GRACE: Duration = Duration::from_secs(10);

/// Process `index` of the `of` that have the ranks of a job.
pub struct Role {
    pub index: u32,
    pub of: u32,
    pub job: String,
}

impl Role {
    /// Reads what a parent wrote: `INDEX/OF/JOB`.
    pub fn parse(text: &str) -> Result<Self> {
        let parts = || {
            let mut parts = text.splitn(3, '/');
            let (index, of) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
            Some(Role { index, of, job: parts.next()?.into() })
        };
        parts().ok_or_else(|| anyhow!("{ROLE} is {text}, expected INDEX/OF/JOB"))
    }
}

/// The role that this process was started with. It then ends with its parent, whatever ends the parent.
pub fn role() -> Result<Option<String>> {
    let Ok(role) = std::env::var(ROLE) else { return Ok(None) };
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before that.
    let parent = std::env::var(PARENT).ok().and_then(|p| p.parse().ok());
    if getppid().map(|p| p.as_raw_nonzero().get()) != parent {
        bail!("the program that started this rank has ended");
    }
    Ok(Some(role))
}

/// How many GPUs the ranks may use; none: they run on the CPU.
pub fn devices(settings: &Settings) -> Result<Option<u32>, Error> {
    match (settings.device, pushgate::probe_cuda()) {
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, Err(_)) => Ok(None),
        (_, Ok(info)) => Ok(Some(info.devices)),
        (DeviceChoice::Cuda, Err(why)) => {
            Err(settings.refused("device", format!("auto or cpu here ({why})")))
        }
    }
}

/// Runs ranks of this process, each in a thread. The error is the cause, before what other ranks made of it.
pub fn threads<T: Send>(ranks: impl IntoIterator<Item: FnOnce() -> Result<T> + Send>) -> Result<Vec<T>> {
    let ended: Vec<Result<T>> = std::thread::scope(|s| {
        let ranks: Vec<_> = ranks.into_iter().map(|rank| s.spawn(rank)).collect();
        ranks.into_iter().map(|r| r.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked")))).collect()
    });
    let lost =
        |e: &anyhow::Error| matches!(e.downcast_ref(), Some(Error::PeerLost { .. } | Error::Aborted { .. }));
    let (mut done, mut errors) = (Vec::new(), Vec::new());
    for end in ended {
        match end {
            Ok(value) => done.push(value),
            Err(e) => errors.push(e),
        }
    }
    errors.sort_by_key(lost);
    errors.into_iter().next().map_or(Ok(done), Err)
}

/// Processes of this program with its own arguments. Dropping them ends them.
#[derive(Default)]
pub struct Children(Vec<Child>);

impl Children {
    /// Starts one more process, with this role and these variables beside.
    pub fn start(&mut self, role: &str, variables: &[(&str, &OsStr)], stdout: Stdio) -> Result<&mut Child> {
        self.start_within(&[], role, variables, [Stdio::null(), stdout])
    }

    /// [`Children::start`] with words before the program, which put it into a namespace, say; and with its standard input and output.
    pub fn start_within(
        &mut self,
        within: &[String],
        role: &str,
        variables: &[(&str, &OsStr)],
        [stdin, stdout]: [Stdio; 2],
    ) -> Result<&mut Child> {
        let own = std::env::current_exe().context("finding this program")?;
        let words: Vec<_> = within.iter().map(OsStr::new).chain([own.as_os_str()]).collect();
        let child = Command::new(words[0])
            .args(&words[1..])
            .args(std::env::args_os().skip(1))
            .envs(variables.iter().copied())
            .env(ROLE, role)
            .env(PARENT, std::process::id().to_string())
            .stdin(stdin)
            .stdout(stdout)
            .spawn()
            .with_context(|| format!("starting {role}"))?;
        self.0.push(child);
        Ok(self.0.last_mut().expect("one was pushed"))
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        // All stop before one of them dies: the others would say that it is lost.
        for signal in [Signal::STOP, Signal::KILL] {
            // One that was waited for is gone, and its number another's.
            for c in self.0.iter_mut().filter_map(|c| matches!(c.try_wait(), Ok(None)).then_some(c)) {
                let _ = kill_process(Pid::from_child(c), signal);
            }
        }
        for c in &mut self.0 {
            let _ = c.wait();
        }
    }
}

/// The processes that run a job's ranks.
pub struct Processes {
    children: Children,
    lines: Receiver<String>,
    /// Whose end needs no word any more: it was told, or this process ended the child itself.
    told: Vec<bool>,
    /// The first failure: when, and with which exit code.
    failed: Option<(Instant, u8)>,
}

impl Processes {
    /// Starts `of` processes, with these variables beside.
    pub fn start(of: u32, job: &str, variables: &[(&str, &OsStr)]) -> Result<Self> {
        let (sender, lines) = channel();
        let mut children = Children::default();
        for index in 0..of {
            let child = children.start(&format!("{index}/{of}/{job}"), variables, Stdio::piped())?;
            let stdout = child.stdout.take().expect("it is piped");
            let sender = sender.clone();
            // It reads to the end, even if nobody takes the lines: a process that failed to print would be lost to the others.
            std::thread::spawn(move || {
                BufReader::new(stdout).lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)))
            });
        }
        Ok(Processes { children, lines, told: vec![false; of as usize], failed: None })
    }

    /// Waits for the end of all processes. `take` gets each line that they print, `tell` what is to be said of a process that was
    /// killed, or that this program has to end; `who` names a process by its index. Returns the exit code of the first that
    /// failed, which has said why. An error of `take` ends all.
    pub fn wait(
        mut self,
        who: impl Fn(usize) -> String,
        tell: impl Fn(String),
        mut take: impl FnMut(String) -> Result<()>,
    ) -> Result<Option<u8>> {
        loop {
            match self.lines.recv_timeout(Duration::from_millis(20)) {
                Ok(line) => take(line)?,
                Err(RecvTimeoutError::Timeout) => {}
                // All pipes are closed: the children have ended or are about to.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(5)),
            }
            if !self.look(&who, &tell)? {
                break;
            }
        }
        self.lines.iter().try_for_each(take)?;
        Ok(self.failed.map(|(_, code)| code))
    }

    /// Looks after each once. Returns whether one still runs.
    fn look(&mut self, who: &impl Fn(usize) -> String, tell: &impl Fn(String)) -> Result<bool> {
        let mut runs = false;
        for (index, child) in self.children.0.iter_mut().enumerate() {
            let Some(status) = child.try_wait()? else {
                runs = true;
                continue;
            };
            if status.success() {
                continue;
            }
            // Those that end with a code say why themselves.
            if let Some(signal) = status.signal()
                && !std::mem::replace(&mut self.told[index], true)
            {
                tell(format!("{} (pid {}) was killed by signal {signal}", who(index), child.id()));
            }
            let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
            self.failed.get_or_insert((Instant::now(), code));
        }
        // The others end by themselves with a status; this is for one that can't.
        if self.failed.is_none_or(|(since, _)| since.elapsed() <= GRACE) {
            return Ok(runs);
        }
        for (index, child) in self.children.0.iter_mut().enumerate() {
            if child.try_wait()?.is_some() || std::mem::replace(&mut self.told[index], true) {
                continue;
            }
            let why = match is_stopped(child.id()) {
                true => "is stopped (SIGSTOP) and can't end by itself".into(),
                false => format!("did not end within {} s of the first failure", GRACE.as_secs()),
            };
            tell(format!("{} (pid {}) {why}: ended by pushgate", who(index), child.id()));
            let _ = child.kill();
        }
        Ok(runs)
    }
}

/// Whether a process was stopped by a signal (proc_pid_stat(5)).
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold anything but ends at the last parenthesis.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}
