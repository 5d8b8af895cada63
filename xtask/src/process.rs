//! Starts other programs, each in a process group of its own. The whole group ends when the program
//! ends, when it shows no progress, or when xtask is interrupted.

use std::ffi::{OsStr, c_int};
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use std::{env, io, thread};

use crate::output::{Output, say};
use crate::progress::{Guard, Watch, add_cpu_time};
use anyhow::{Context, Result, anyhow, bail};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// How often a running command is checked.
pub const TICK: Duration = Duration::from_millis(20);
/// The time between SIGTERM and SIGKILL, for a command to clean up.
pub const GRACE: Duration = Duration::from_secs(2);
/// How long the rest of an ended command's output is waited for. Only what the pipes hold can still
/// come, because the command's group is gone.
const REST: Duration = Duration::from_secs(60);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes SIGHUP, SIGINT and SIGTERM end the running commands instead of this process.
pub fn catch_signals() {
    // Rust's std has no way to catch a signal, and rustix leaves it to libc.
    unsafe extern "C" {
        fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    }
    extern "C" fn note(_: c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
    for number in [Signal::HUP, Signal::INT, Signal::TERM] {
        // SAFETY: the declaration is that of C's signal(). The handler only stores to a lock-free
        // atomic, which a signal handler may do at any point.
        unsafe { signal(number.as_raw(), note) };
    }
}

/// Whether one of those signals came.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Has a command killed when this process dies, even by SIGKILL. Call it only on a thread that outlives
/// the command, because the kernel watches the thread that started the child.
pub fn die_with_us(command: &mut Command) {
    let us = rustix::process::getpid();
    let ask = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the child asked.
        if rustix::process::getppid() == Some(us) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// Lets a command inherit a descriptor that is otherwise closed in programs that we start. The
/// descriptor must stay open until the command has started.
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

/// The cargo that runs this program.
pub fn cargo(dir: &Path) -> Command {
    cargo_by(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), dir)
}

/// A program that runs that cargo.
pub fn cargo_by(program: impl AsRef<OsStr>, dir: &Path) -> Command {
    let mut cargo = command(program, dir);
    // What the outer cargo says about our package. The build script of `ring` asks to be run again when these change, and
    // `ring` and all above it would be compiled anew at every change between a shell's cargo, this one and that of a test.
    let of_a_package = |name: &str| name.starts_with("CARGO_MANIFEST_") || name.starts_with("CARGO_PKG_");
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_a_package)) {
        cargo.env_remove(name);
    }
    cargo
}

/// Runs a command with its output on ours; an exit status other than 0 is an error.
pub fn run(command: Command, guard: Guard) -> Result<()> {
    show(&command);
    run_quietly(command, guard)
}

/// Files for output of a command that does not go to our stdout.
#[derive(Default)]
pub struct Redirect {
    /// A file for what the command writes to stdout.
    pub stdout: Option<File>,
    /// A file for what the command writes to stderr.
    pub stderr: Option<File>,
}

/// Runs a command as [`run`] does, without showing the command line.
pub fn run_quietly(command: Command, guard: Guard) -> Result<()> {
    run_redirected(command, Redirect::default(), guard)
}

/// Runs a command as [`run_quietly`] does, with a part of its output in files.
pub fn run_redirected(command: Command, to: Redirect, guard: Guard) -> Result<()> {
    let mut job = Job::start(command, to, guard)?;
    loop {
        if let Some(status) = job.poll()? {
            return job.running.check(status);
        }
        thread::sleep(TICK);
    }
}

/// Runs a command and returns what it wrote to stdout, which is also shown if `echo` is set.
pub fn capture(mut command: Command, echo: bool, guard: Guard) -> Result<String> {
    if echo {
        show(&command);
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    colour(&mut command, io::stderr().is_terminal());
    let mut running = Running::start(command)?;
    let output = Output::of_this_thread();
    let text = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&text);
    let shown = output.clone();
    let out = running.child.stdout.take().context("no pipe")?;
    let out = pass_on(out, &running.heard, move |bytes| {
        if echo {
            shown.write(bytes);
        }
        into.lock().expect("the reader does not panic").extend_from_slice(bytes);
    });
    let err = running.child.stderr.take().context("no pipe")?;
    let err = pass_on(err, &running.heard, move |bytes| output.write_error(bytes));
    let mut watch = Watch::new(guard);
    let status = loop {
        if let Some(status) = running.poll(&mut watch)? {
            break status;
        }
        thread::sleep(TICK);
    };
    let whole = ends_within(&out, REST);
    ends_within(&err, REST);
    running.check(status)?;
    if !whole {
        let name = &running.name;
        bail!(
            "{name} has ended, but its output has not within {REST:?}: a process outside of its group holds it"
        );
    }
    let bytes = text.lock().expect("the reader does not panic").clone();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs all commands, `at_once` at a time. A failure does not stop the commands after it.
pub fn run_all(commands: Vec<Command>, at_once: usize, guard: Guard) -> Result<()> {
    let mut waiting = commands.into_iter();
    let mut jobs: Vec<Job> = Vec::new();
    let mut failed = Vec::new();
    loop {
        while jobs.len() < at_once
            && let Some(command) = waiting.next()
        {
            show(&command);
            jobs.push(Job::start(command, Redirect::default(), guard)?);
        }
        if jobs.is_empty() {
            break;
        }
        let mut still = Vec::new();
        for mut job in jobs {
            match job.poll()? {
                Some(status) => failed.extend(job.running.check(status).err()),
                None => still.push(job),
            }
        }
        jobs = still;
        if jobs.len() == at_once || (waiting.len() == 0 && !jobs.is_empty()) {
            thread::sleep(TICK);
        }
    }
    match failed.len() {
        0 => Ok(()),
        1 => Err(failed.remove(0)),
        n => Err(anyhow!("{n} commands failed; the first: {:#}", failed[0])),
    }
}

/// A command whose output, of both kinds and in its order, goes to our stdout.
struct Job {
    running: Running,
    output_ended: mpsc::Receiver<()>,
    watch: Watch,
}

impl Job {
    fn start(mut command: Command, to: Redirect, guard: Guard) -> Result<Job> {
        // One pipe for both outputs, so that lines stay in order.
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        command
            .stdout(to.stdout.map_or_else(|| theirs.try_clone().map(Stdio::from), |file| Ok(file.into()))?);
        command.stderr(to.stderr.map_or_else(|| theirs.into(), Stdio::from));
        colour(&mut command, io::stdout().is_terminal());
        let running = Running::start(command)?;
        let (pipe, output) = (File::from(ours), Output::of_this_thread());
        let output_ended = pass_on(pipe, &running.heard, move |bytes| output.write(bytes));
        Ok(Job { running, output_ended, watch: Watch::new(guard) })
    }

    fn poll(&mut self) -> Result<Option<ExitStatus>> {
        let status = self.running.poll(&mut self.watch)?;
        if status.is_some() {
            ends_within(&self.output_ended, REST);
        }
        Ok(status)
    }
}

/// Waits until the output of a command that has ended is read to its end. False at the limit, or if
/// this process is interrupted: a process that left the command's group may hold the pipe for ever.
fn ends_within(output_ended: &mpsc::Receiver<()>, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    loop {
        match output_ended.recv_timeout(TICK) {
            Err(mpsc::RecvTimeoutError::Timeout) if interrupted() || Instant::now() >= until => return false,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => return true,
        }
    }
}

/// Asks cargo for colours if our output is a terminal: cargo sees our pipe and would omit them.
fn colour(command: &mut Command, is_terminal: bool) {
    let is_cargo = Path::new(command.get_program()).file_name() == Some(OsStr::new("cargo"));
    if is_terminal
        && is_cargo
        && env::var_os("CARGO_TERM_COLOR").is_none()
        && env::var_os("NO_COLOR").is_none()
    {
        command.env("CARGO_TERM_COLOR", "always");
    }
}

/// Reads a pipe to its end on a thread of its own and counts the bytes. The receiver is told when
/// the pipe has ended.
pub fn pass_on(
    mut pipe: impl Read + Send + 'static,
    heard: &Arc<AtomicU64>,
    mut to: impl FnMut(&[u8]) + Send + 'static,
) -> mpsc::Receiver<()> {
    let (done, is_done) = mpsc::channel();
    let heard = Arc::clone(heard);
    thread::spawn(move || {
        let mut buffer = [0; 8192];
        while let Ok(n @ 1..) = pipe.read(&mut buffer) {
            heard.fetch_add(n as u64, Ordering::Relaxed);
            to(&buffer[..n]);
        }
        let _ = done.send(());
    });
    is_done
}

/// A child and its process group. Dropping the value ends both.
pub struct Running {
    child: Child,
    name: String,
    reaped: bool,
    /// Bytes of the child's output, counted by [`pass_on`].
    pub heard: Arc<AtomicU64>,
}

impl Running {
    /// Starts the child, with nothing on stdin.
    pub fn start(mut command: Command) -> Result<Running> {
        if interrupted() {
            bail!("interrupted");
        }
        let name = words(&command);
        // No stdin, because a background group that reads a terminal is stopped.
        command.process_group(0).stdin(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Running { child, name, reaped: false, heard: Arc::default() })
    }

    /// The child's stdout, if it is piped. Only the first call gets it.
    pub fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// The exit status if the child has ended. If the watch says so or this process is interrupted,
    /// ends the child and returns an error.
    pub fn poll(&mut self, watch: &mut Watch) -> Result<Option<ExitStatus>> {
        if self.ended() {
            return Ok(Some(self.reap()?));
        }
        if interrupted() {
            self.end();
            bail!("interrupted: {}", self.name);
        }
        if let Err(reason) = watch.look(self.heard.load(Ordering::Relaxed)) {
            self.end();
            bail!("ended: {reason}: {}", self.name);
        }
        Ok(None)
    }

    /// Whether the child has ended, whatever its exit status; then its group ends too.
    pub fn has_ended(&mut self) -> Result<bool> {
        let has_ended = self.ended();
        if has_ended {
            self.reap()?;
        }
        Ok(has_ended)
    }

    fn check(&self, status: ExitStatus) -> Result<()> {
        if !status.success() {
            bail!("{status}: {}", self.name);
        }
        Ok(())
    }

    /// Whether the child has ended. It is not reaped, so that its id, which is also its group's, is
    /// not reused yet.
    fn ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        matches!(waitid(WaitId::Pid(Pid::from_child(&self.child)), options), Ok(Some(_)))
    }

    /// Ends what the child has left running, then reaps the child.
    fn reap(&mut self) -> Result<ExitStatus> {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        add_cpu_time(cpu_time(self.child.id()));
        self.reaped = true;
        Ok(self.child.wait()?)
    }

    /// Ends the child with its group, unless that is done already.
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

/// The CPU time of a process that has ended and is not reaped yet, and of the children that it waited for.
fn cpu_time(id: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    Duration::from_secs_f64(cpu_ticks(&stat) as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The sum of utime, stime, cutime and cstime in /proc/PID/stat (proc(5)). The name of the program, in brackets before
/// them, may hold anything.
fn cpu_ticks(stat: &str) -> u64 {
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(4).filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
}

/// A command as one would type it, without the variables set for it.
fn words(command: &Command) -> String {
    let program = Path::new(command.get_program());
    // The toolchain's cargo has a long path.
    let is_cargo = program.file_name() == Some(OsStr::new("cargo"));
    let program = if is_cargo { OsStr::new("cargo") } else { program.as_os_str() };
    [program].into_iter().chain(command.get_args()).map(quote).collect::<Vec<_>>().join(" ")
}

/// Shows a command that is about to run, with the variables set for it.
fn show(command: &Command) {
    let set = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let set: String =
        set.map(|(name, value)| format!("{}={} ", name.to_string_lossy(), quote(value))).collect();
    say!("$ {set}{}", words(command));
}

/// Quotes a word for a shell.
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
    use std::io::Write;

    use super::*;
    use crate::progress;

    fn shell(script: &str) -> Command {
        let mut command = command("sh", Path::new("/"));
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_failure_names_status_and_command() {
        let error = run(shell("exit 3"), Guard::NONE).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("sh -c 'exit 3'"), "{error}");
    }

    #[test]
    fn a_silent_command_ends_with_its_whole_group() {
        let file = env::temp_dir().join(format!("xtask-silence-{}", std::process::id()));
        let script = format!("sleep 600 & echo $! >{}; wait", file.display());
        let guard = Guard::new(Some(Duration::from_secs(1)), None);
        let error = run(shell(&script), guard).unwrap_err().to_string();
        assert!(error.contains("no progress"), "{error}");
        let sleep = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        // The process is gone, or dead and not yet reaped by init; on a busy machine a killed
        // process takes a moment.
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", sleep.trim())).unwrap_or_default();
        let is_gone = |stat: &str| stat.is_empty() || stat.contains(") Z ");
        let until = Instant::now() + Duration::from_secs(60);
        while !is_gone(&stat()) && Instant::now() < until {
            thread::sleep(TICK);
        }
        assert!(is_gone(&stat()), "{}", stat());
    }

    #[test]
    fn a_command_that_spins_and_says_nothing_ends() {
        let guard = Guard::new(Some(Duration::from_secs(1)), None);
        let error = capture(shell("while :; do :; done"), false, guard).unwrap_err().to_string();
        assert!(error.contains("no progress"), "{error}");
    }

    #[test]
    fn a_command_that_says_something_on_either_stream_goes_on() {
        // Silent for less than the limit each time, but for longer in all.
        let script = "for i in 1 2 3 4 5 6 7 8; do sleep 1; echo $i >&$((1 + i % 2)); done";
        let guard = Guard::new(Some(Duration::from_secs(6)), None);
        run_quietly(shell(script), guard).unwrap();
        assert_eq!(capture(shell(script), false, guard).unwrap().lines().count(), 4);
    }

    #[test]
    fn what_a_command_leaves_after_ends_with_it() {
        // The sleep would hold the pipe for ten minutes.
        let start = Instant::now();
        assert_eq!(capture(shell("sleep 600 & echo $!"), false, Guard::NONE).unwrap().lines().count(), 1);
        assert!(start.elapsed() < Duration::from_secs(300));
    }

    #[test]
    fn output_that_is_read_late_is_waited_for_and_a_pipe_that_is_held_is_not() {
        let (read, held) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let ended = pass_on(File::from(read), &Arc::default(), |_| {});
        assert!(!ends_within(&ended, TICK));
        drop(held);
        assert!(ends_within(&ended, REST));
        let (read, written) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        File::from(written).write_all(b"said").unwrap();
        // As on a machine on which the reader hardly runs.
        let ended = pass_on(File::from(read), &Arc::default(), |_| thread::sleep(GRACE + GRACE / 2));
        assert!(ends_within(&ended, REST));
    }

    #[test]
    fn the_cpu_time_of_a_process_and_its_children_is_summed() {
        let stat = "7 (a) 1 b) Z 1 7 7 0 -1 4 9 9 0 0 100 20 3000 400 20 0 1 0 5 0 0";
        assert_eq!(cpu_ticks(stat), 3520);
        assert_eq!(cpu_ticks(""), 0);
        progress::take_usage();
        run(shell("i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done"), Guard::NONE).unwrap();
        assert!(progress::take_usage().cpu > Duration::ZERO);
    }

    #[test]
    fn each_stream_may_go_to_a_file() {
        let file = |name: &str| env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        let (out, err) = (file("out"), file("err"));
        let both =
            Redirect { stdout: Some(File::create(&out).unwrap()), stderr: Some(File::create(&err).unwrap()) };
        run_redirected(shell("echo out; echo err >&2"), both, Guard::NONE).unwrap();
        let read = |file| {
            let text = std::fs::read_to_string(file).unwrap();
            std::fs::remove_file(file).unwrap();
            text
        };
        assert_eq!((read(&out).as_str(), read(&err).as_str()), ("out\n", "err\n"));
    }

    #[test]
    fn all_run_though_one_fails() {
        let dir = env::temp_dir().join(format!("xtask-run-all-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let touch = |name: &str| shell(&format!("touch {}/{name}", dir.display()));
        let error = run_all(vec![touch("a"), shell("exit 1"), touch("b")], 2, Guard::NONE).unwrap_err();
        assert!(error.to_string().contains("exit 1"), "{error}");
        assert!(dir.join("a").exists() && dir.join("b").exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
