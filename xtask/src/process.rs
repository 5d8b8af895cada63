//! Starting other programs: each in a process group of its own, which ends as a
//! whole when the program ends, runs past its deadline or we are interrupted.

use std::ffi::{OsStr, c_int};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use std::{env, io, thread};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// When a command must have ended; `None`: never.
pub type Deadline = Option<Instant>;

/// How often a running command is looked at.
pub const TICK: Duration = Duration::from_millis(20);
/// What a command gets to clean up between SIGTERM and SIGKILL.
pub const GRACE: Duration = Duration::from_secs(2);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on SIGHUP, SIGINT and SIGTERM end the running commands instead of us.
pub fn catch_signals() {
    // Rust's std has no way to catch a signal and rustix leaves it to libc.
    unsafe extern "C" {
        fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    }
    extern "C" fn note(_: c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
    for number in [Signal::HUP, Signal::INT, Signal::TERM] {
        // SAFETY: the declaration is that of C's signal(); the handler does no more than store to
        // a lock-free atomic, which a signal handler may do at any point.
        unsafe { signal(number.as_raw(), note) };
    }
}

/// Whether one of those signals came.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Has a command killed when we die, even by SIGKILL. Only for the main thread: the kernel watches
/// the thread that started the child.
pub fn die_with_us(command: &mut Command) {
    let us = rustix::process::getpid();
    let ask = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // We may have died before it asked.
        if rustix::process::getppid() == Some(us) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// Lets a command inherit a descriptor that is otherwise closed in what we start. It must be open
/// until the command has started.
pub fn inherit(command: &mut Command, descriptor: BorrowedFd) {
    let number = descriptor.as_raw_fd();
    let keep = move || {
        // SAFETY: the caller keeps it open until the command has started.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        Ok(rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::empty())?)
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(keep) };
}

/// A command that runs in `dir`.
pub fn command(program: impl AsRef<OsStr>, dir: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(dir);
    command
}

/// The cargo that runs us.
pub fn cargo(dir: &Path) -> Command {
    command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), dir)
}

/// Runs a command with its output on ours; an exit status but 0 is an error.
pub fn run(command: Command, deadline: Deadline) -> Result<()> {
    show(&command);
    run_quietly(command, deadline)
}

/// The same, without showing the command.
pub fn run_quietly(command: Command, deadline: Deadline) -> Result<()> {
    let mut running = Running::start(command)?;
    let status = running.wait(deadline)?;
    running.check(status)
}

/// Runs a command and returns what it wrote to stdout, which is also shown if `echo` is set.
pub fn capture(mut command: Command, echo: bool, deadline: Deadline) -> Result<String> {
    if echo {
        show(&command);
    }
    command.stdout(Stdio::piped());
    let mut running = Running::start(command)?;
    let mut pipe = running.child.stdout.take().context("no pipe")?;
    let text = Arc::new(Mutex::new(Vec::new()));
    let (done, is_done) = mpsc::channel();
    let into = Arc::clone(&text);
    thread::spawn(move || {
        let mut buffer = [0; 8192];
        while let Ok(n @ 1..) = pipe.read(&mut buffer) {
            if echo {
                let _ = io::stdout().write_all(&buffer[..n]);
                let _ = io::stdout().flush();
            }
            into.lock().expect("the reader does not panic").extend_from_slice(&buffer[..n]);
        }
        let _ = done.send(());
    });
    let status = running.wait(deadline)?;
    // Something that left the group may hold the pipe for ever: do not wait for it that long.
    let _ = is_done.recv_timeout(GRACE);
    running.check(status)?;
    let bytes = text.lock().expect("the reader does not panic").clone();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs all commands, `at_once` at a time. A failure does not stop those that follow.
pub fn run_all(commands: Vec<Command>, at_once: usize, deadline: Deadline) -> Result<()> {
    let mut waiting = commands.into_iter();
    let mut running: Vec<Running> = Vec::new();
    let mut failed = Vec::new();
    loop {
        while running.len() < at_once
            && let Some(command) = waiting.next()
        {
            show(&command);
            running.push(Running::start(command)?);
        }
        if running.is_empty() {
            break;
        }
        let mut still = Vec::new();
        for mut job in running {
            match job.poll(deadline)? {
                Some(status) => failed.extend(job.check(status).err()),
                None => still.push(job),
            }
        }
        running = still;
        if running.len() == at_once || (waiting.len() == 0 && !running.is_empty()) {
            thread::sleep(TICK);
        }
    }
    match failed.len() {
        0 => Ok(()),
        1 => Err(failed.remove(0)),
        n => Err(anyhow!("{n} commands failed; the first: {:#}", failed[0])),
    }
}

/// A child and its process group. Dropped, it ends both.
pub struct Running {
    child: Child,
    name: String,
    reaped: bool,
}

impl Running {
    /// Starts it, with nothing on stdin.
    pub fn start(mut command: Command) -> Result<Running> {
        if interrupted() {
            bail!("interrupted");
        }
        let name = words(&command);
        // A background group that reads a terminal is stopped: no stdin.
        command.process_group(0).stdin(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Running { child, name, reaped: false })
    }

    /// What it writes to stdout, where that is piped. The first call gets it.
    pub fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// The exit status if it has ended; an error if it has run too long or we are interrupted.
    pub fn poll(&mut self, deadline: Deadline) -> Result<Option<ExitStatus>> {
        if self.ended() {
            return Ok(Some(self.reap()?));
        }
        if interrupted() {
            self.end();
            bail!("interrupted: {}", self.name);
        }
        if deadline.is_some_and(|d| Instant::now() >= d) {
            self.end();
            bail!("killed at the time limit: {}", self.name);
        }
        Ok(None)
    }

    fn wait(&mut self, deadline: Deadline) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.poll(deadline)? {
                return Ok(status);
            }
            thread::sleep(TICK);
        }
    }

    fn check(&self, status: ExitStatus) -> Result<()> {
        if !status.success() {
            bail!("{status}: {}", self.name);
        }
        Ok(())
    }

    /// Whether the child has ended. It is left unreaped, so that its id, which is also that of
    /// its group, belongs to nobody else yet.
    fn ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        matches!(waitid(WaitId::Pid(Pid::from_child(&self.child)), options), Ok(Some(_)))
    }

    /// Ends what the child has left running, then the child's own entry.
    fn reap(&mut self) -> Result<ExitStatus> {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        self.reaped = true;
        Ok(self.child.wait()?)
    }

    /// Ends it with its group, unless that is done.
    pub fn end(&mut self) {
        if self.reaped {
            return;
        }
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::TERM);
        let until = Instant::now() + GRACE;
        while !self.ended() && Instant::now() < until {
            thread::sleep(TICK);
        }
        let _ = self.reap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// A command as one would type it, without the variables set for it.
fn words(command: &Command) -> String {
    let program = Path::new(command.get_program());
    // The toolchain's cargo goes by a long path.
    let is_cargo = program.file_name() == Some(OsStr::new("cargo"));
    let program = if is_cargo { OsStr::new("cargo") } else { program.as_os_str() };
    [program].into_iter().chain(command.get_args()).map(quote).collect::<Vec<_>>().join(" ")
}

/// Shows a command that is about to run, with the variables set for it.
fn show(command: &Command) {
    print!("$ ");
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            print!("{}={} ", name.to_string_lossy(), quote(value));
        }
    }
    println!("{}", words(command));
}

/// A word as a shell wants it.
pub fn quote(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./,:@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = command("sh", Path::new("/"));
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_failure_names_status_and_command() {
        let error = run(shell("exit 3"), None).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("sh -c 'exit 3'"), "{error}");
    }

    #[test]
    fn the_deadline_ends_the_whole_group() {
        let file = env::temp_dir().join(format!("xtask-deadline-{}", std::process::id()));
        let script = format!("sleep 60 & echo $! >{}; wait", file.display());
        let error =
            run(shell(&script), Some(Instant::now() + Duration::from_secs(1))).unwrap_err().to_string();
        assert!(error.contains("time limit"), "{error}");
        let sleep = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        // Gone, or dead and not yet reaped by init.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", sleep.trim())).unwrap_or_default();
        assert!(stat.is_empty() || stat.contains(") Z "), "{stat}");
    }

    #[test]
    fn what_a_command_leaves_behind_ends_with_it() {
        // The sleep would hold the pipe for a minute.
        let start = Instant::now();
        assert_eq!(capture(shell("sleep 60 & echo $!"), false, None).unwrap().lines().count(), 1);
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn all_run_though_one_fails() {
        let dir = env::temp_dir().join(format!("xtask-run-all-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let touch = |name: &str| shell(&format!("touch {}/{name}", dir.display()));
        let error = run_all(vec![touch("a"), shell("exit 1"), touch("b")], 2, None).unwrap_err();
        assert!(error.to_string().contains("exit 1"), "{error}");
        assert!(dir.join("a").exists() && dir.join("b").exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
