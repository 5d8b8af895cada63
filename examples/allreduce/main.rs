//! Allreduce through window, staging ring, gate and queue pair.
//!
//! Starts the ranks, each a process of its own on the CPU, one process for each
//! GPU otherwise, and prints what they measured as nccl-tests does: each size out of
//! place and in place.
//! On several hosts it is started once on each, with `--nodes` and `--node`; or a launcher starts every rank (torchrun,
//! mpirun, srun, `pushgate run`), and each of its processes is one rank.
//! Uses the public API alone.

#![allow(missing_docs)] // a program, not a library

mod data;
// The settings as flags, and the log, as the command has them.
#[path = "../../cli/src/flags.rs"]
mod flags;
#[path = "../../cli/src/log.rs"]
mod log;
// Sizes and columns, as `pushgate nccl-check` has them.
#[path = "../../cli/src/nccl_tests.rs"]
mod nccl_tests;
mod rank;
mod rnr;
mod table;

use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};
use data::{Dtype, Op};
use pushgate::ranks::{Environment, Given};
use pushgate::settings::{DeviceChoice, ProxyPlace, parse_size};
use pushgate::{Comm, Context, Error, MAX_RANKS, Membership, Settings, explain};
use rank::Report;
use rustix::process::{Pid, Signal};

/// Whether a result goes over the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Out,
    In,
}

/// What is printed on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Table,
    Json,
    Csv,
}

/// What the command line asks for, checked.
pub struct Options {
    pub ranks: u32,
    /// This process is one rank, which a launcher started.
    pub membership: Option<Membership>,
    pub node: u32,
    /// Ranks of this node.
    pub share: Range<u32>,
    pub job: String,
    /// Odd ranks start each iteration this much later.
    pub late: Duration,
    pub sizes: Vec<u64>,
    pub iters: u32,
    pub warmup: u32,
    pub dtype: Dtype,
    pub op: Op,
    pub channels: Option<u32>,
    pub block: Option<u32>,
    pub push_lanes: Option<u32>,
    pub slice: Option<u64>,
    /// In what order each size is run.
    pub places: &'static [Place],
    pub form: Form,
    /// A socket of the proxy process was named: the proxy there runs already.
    pub proxy_runs: bool,
    pub settings: Settings,
}

/// Smallest size, largest size and factor of `-b`, `-e` and `-f`.
const RANGE: [&str; 3] = ["8", "16M", "2"];

/// How a child knows which part it plays: `proxy`, or `INDEX/OF/JOB`.
const ROLE: &str = "_PUSHGATE_ROLE";
/// How a child knows the process that started it.
const PARENT: &str = "_PUSHGATE_PARENT";

fn command() -> clap::Command {
    let arg = |name: &'static str, value: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).default_value(default).help(help)
    };
    let option =
        |name: &'static str, help: &'static str| Arg::new(name).long(name).value_name("N").help(help);
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    let command = clap::Command::new("allreduce")
        .about("Allreduce around a ring of ranks, pushed through windows and released by the gate")
        .version(pushgate::VERSION)
        .arg(arg("ranks", "N", "4", "Ranks, on all nodes together; a launcher says their number itself"))
        .arg(option("rank", "This is one rank, the others are started elsewhere; with --ranks").requires("ranks"))
        .arg(arg("nodes", "N", "1", "Hosts that this is started on, with --rendezvous at that of node 0"))
        .arg(arg("node", "I", "0", "Which of them this is; node 0 prints the results"))
        .arg(
            Arg::new("job").long("job").value_name("NAME").help(
                "Name of the job, the same on all nodes [default: allreduce, on one node with its pid]",
            ),
        )
        .arg(
            Arg::new("size").long("size").value_name("BYTES,...").help(
                "Bytes a rank (1024-based); a list runs from small to large; in place of -b, -e and -f [default: 16M]",
            ),
        )
        .args(nccl_tests::range_flags(RANGE))
        .arg(arg("iters", "N", "5", "Iterations measured, each checked").short('n'))
        .arg(arg("warmup", "N", "1", "Iterations before, checked too").short('w'))
        .arg(arg("dtype", "TYPE", "f32", "f32, f64, f16, bf16, i32 or i64"))
        .arg(arg("op", "OP", "sum", "sum, max, min or prod"))
        .arg(option("channels", "Queue pairs to a peer [default: 1 on the CPU, 16 shared by a GPU's ranks]"))
        .arg(option("block", "Threads of a block [default: 1 on the CPU, 512 on a GPU]"))
        .arg(option("push-lanes", "Threads of a block that store into the window [default: 64 on a GPU]"))
        .arg(option("slice", "Bytes of a message [default: a quarter of the window, at most 256K]"))
        .arg(arg("late-ms", "N", "0", "Odd ranks start each iteration this much later, milliseconds"))
        .arg(switch("in-place", "Runs in place alone, output over input [default: both, out of place first]"))
        .arg(switch("out-of-place", "Runs out of place alone").conflicts_with("in-place"))
        .arg(switch("json", "One JSON object a line"))
        .arg(switch("csv", "One CSV line a size, below a line of names").conflicts_with("json"));
    flags::help(flags::settings(command, false))
}

fn options(m: &ArgMatches) -> Result<Options, Error> {
    let text = |name: &str| m.get_one::<String>(name).map(String::as_str);
    let number = |name, min, max| flags::number(m, name, min, max);
    let mut settings = flags::load(m)?;
    let dtype = text("dtype").expect("has a default");
    let dtype = Dtype::parse(dtype).ok_or_else(|| Error::flag("dtype", dtype, Dtype::ALL))?;
    let op = text("op").expect("has a default");
    let op = Op::parse(op).ok_or_else(|| Error::flag("op", op, Op::ALL))?;
    let allowed = format!("whole {} elements, at most 64G, as in 4096, 16M or 1K,1M", dtype.name());
    let mut sizes = Vec::new();
    match (text("size"), nccl_tests::range(m, dtype.size() as u64, RANGE)?) {
        (Some(list), Some(_)) => {
            return Err(Error::flag("size", list, "none beside --minbytes, --maxbytes and --stepfactor"));
        }
        (None, Some(range)) => sizes = range,
        (list, None) => {
            for s in list.unwrap_or("16M").split(',') {
                let bytes = parse_size(s)
                    .filter(|b| *b > 0 && *b <= nccl_tests::MOST && b % dtype.size() as u64 == 0);
                sizes.push(bytes.ok_or_else(|| Error::flag("size", s, &allowed))?);
            }
        }
    }
    // The last line is the largest size, whatever the order they came in.
    sizes.sort_unstable();
    let slice = match text("slice") {
        None => None,
        Some(s) => {
            let window = settings.window_size;
            let slice = parse_size(s).filter(|b| *b >= 16 && b.is_multiple_of(16) && *b <= window);
            let allowed = format!("a multiple of 16, at most the window's {window}");
            Some(slice.ok_or_else(|| Error::flag("slice", s, allowed))?)
        }
    };
    let ranks = number("ranks", 1, MAX_RANKS)?.expect("has a default");
    let membership = membership(m, ranks, &settings)?;
    let ranks = membership.as_ref().map_or(ranks, |found| found.size);
    if let Some(place) = membership.as_ref().and_then(|found| found.rendezvous.as_ref()) {
        settings.rendezvous.clone_from(place);
    }
    let nodes = number("nodes", 1, ranks)?.expect("has a default");
    let node = number("node", 0, nodes - 1)?.expect("has a default");
    if let Some(found) = membership.as_ref().filter(|_| nodes > 1) {
        return Err(Error::flag(
            "nodes",
            nodes,
            format!("none beside one rank, which {} named", found.launcher),
        ));
    }
    if nodes > 1 && settings.rendezvous == "none" {
        let allowed = format!("HOST:PORT of node 0 with nodes = {nodes}");
        return Err(settings.refused("rendezvous", allowed));
    }
    settings.check()?;
    let job = match text("job") {
        Some(job) if job.is_empty() || job.len() > 80 => {
            return Err(Error::flag("job", job, "a name of 1 to 80 bytes"));
        }
        Some(job) => job.into(),
        None if nodes > 1 => "allreduce".into(),
        None => format!("allreduce-{}", std::process::id()),
    };
    Ok(Options {
        node,
        share: share(ranks, nodes, node),
        job,
        late: Duration::from_millis(number("late-ms", 0, 60_000)?.expect("has a default").into()),
        ranks,
        membership,
        sizes,
        iters: number("iters", 1, 1_000_000)?.expect("has a default"),
        warmup: number("warmup", 0, 1_000_000)?.expect("has a default"),
        dtype,
        op,
        channels: number("channels", 1, 64)?,
        block: number("block", 1, 512)?,
        push_lanes: number("push-lanes", 1, 512)?,
        slice,
        places: match (m.get_flag("out-of-place"), m.get_flag("in-place")) {
            (true, _) => &[Place::Out],
            (_, true) => &[Place::In],
            _ => &[Place::Out, Place::In],
        },
        form: match (m.get_flag("json"), m.get_flag("csv")) {
            (true, _) => Form::Json,
            (_, true) => Form::Csv,
            _ => Form::Table,
        },
        proxy_runs: text("proxy-socket").is_some()
            || std::env::var_os("PUSHGATE_PROXY_SOCKET").is_some()
            || settings.proxy_socket != Settings::default().proxy_socket,
        settings,
    })
}

/// Which rank of a launcher's this process is; `None`: it starts ranks itself, or was started so.
fn membership(m: &ArgMatches, ranks: u32, settings: &Settings) -> Result<Option<Membership>, Error> {
    if std::env::var_os(ROLE).is_some() {
        return Ok(None);
    }
    let given = m.value_source("ranks") == Some(ValueSource::CommandLine);
    let rank = flags::number(m, "rank", 0, MAX_RANKS - 1)?;
    let job = m.get_one::<String>("job").cloned();
    let flags = Given { rank, ranks: (given && rank.is_some()).then_some(ranks), job };
    let found = Membership::find(&Environment::of_process(), &flags, settings)?;
    match found {
        // A person in a shell that srun started is no rank of a larger job.
        Some(found) if given && found.size == 1 && ranks > 1 => Ok(None),
        Some(found) if given && found.size != ranks => {
            Err(Error::flag("ranks", ranks, format!("{}, as {} says", found.size, found.launcher)))
        }
        found => Ok(found),
    }
}

/// Ranks of a node: as many as of any other, or one more on the first nodes.
fn share(ranks: u32, nodes: u32, node: u32) -> Range<u32> {
    let begin = |node: u32| node * (ranks / nodes) + node.min(ranks % nodes);
    begin(node)..begin(node + 1)
}

/// Public for allreduce-ungated, of which this is a module.
pub fn main() -> ExitCode {
    if let Err(e) = log::start("error") {
        tell(format_args!("allreduce: {e}"));
        return ExitCode::from(2);
    }
    let matches = match command().try_get_matches() {
        Ok(matches) => matches,
        Err(e) => match e.print() {
            Err(why) if !e.use_stderr() && why.kind() != std::io::ErrorKind::BrokenPipe => {
                tell(format_args!("allreduce: cannot write to standard output: {why}"));
                return ExitCode::FAILURE;
            }
            _ => return ExitCode::from(e.exit_code() as u8),
        },
    };
    let mut options = match options(&matches) {
        Ok(o) => o,
        Err(e) => {
            tell(format_args!("allreduce: {e}"));
            return ExitCode::from(2);
        }
    };
    let role = std::env::var(ROLE).ok();
    let done = match role.as_deref() {
        None if options.membership.is_some() => member(&mut options),
        None => parent(&mut options),
        Some("proxy") => proxy(&options).map(|()| ExitCode::SUCCESS),
        Some(role) => child(&options, role).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(e) if e.is::<ReaderGone>() => ExitCode::SUCCESS,
        Err(e) => {
            tell(format_args!("allreduce: {}", explain(&*e)));
            let config = e.downcast_ref().is_some_and(Error::is_config);
            ExitCode::from(if config { 2 } else { 1 })
        }
    }
}

// ------------------------------------------------------------------ children

/// Ends with the parent, whatever ends it.
fn follow_parent() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before that.
    let parent = std::env::var(PARENT).ok().and_then(|p| p.parse().ok());
    if rustix::process::getppid().map(|p| p.as_raw_nonzero().get()) != parent {
        bail!("the program that started this rank has ended");
    }
    Ok(())
}

fn proxy(o: &Options) -> Result<()> {
    follow_parent()?;
    // It ends with the parent.
    Ok(pushgate::proxy::run(&o.settings.proxy_socket, pushgate::proxy::Stop::new()?)?)
}

/// Ranks of this process: on the CPU one, on a GPU all that share it.
fn child(o: &Options, role: &str) -> Result<()> {
    follow_parent()?;
    pushgate::proxy::raise_open_files();
    let mut parts = role.splitn(3, '/');
    let mut next = || parts.next().ok_or_else(|| anyhow!("{ROLE} is {role}, expected INDEX/OF/JOB"));
    let (index, of, job) = (next()?.parse::<u32>()?, next()?.parse::<u32>()?, next()?.to_owned());
    let context = Context::builder()
        .settings(o.settings.clone())
        .device_index(index)
        .share(index as usize, of as usize)
        .build()?;
    let here: Vec<u32> = o.share.clone().filter(|r| (r - o.share.start) % of == index).collect();
    let report = |r: Report| {
        let mut line = serde_json::to_vec(&r).expect("a report is plain data");
        line.push(b'\n');
        // A parent that is gone has killed us.
        let _ = std::io::stdout().lock().write_all(&line);
    };
    if let [one] = here[..] {
        let comm = Comm::connect(&context, &job, one, o.ranks)?;
        return rank::run(o, &comm, 1, true, &report);
    }
    let (count, first) = (here.len() as u32, here[0]);
    std::thread::scope(|s| {
        let (context, report, job) = (&context, &report, &job);
        let ranks: Vec<_> = here
            .iter()
            .map(|r| {
                s.spawn(move || {
                    let comm = Comm::connect(context, job, *r, o.ranks)?;
                    rank::run(o, &comm, count, *r == first, report)
                })
            })
            .collect();
        let ended: Vec<_> =
            ranks.into_iter().map(|r| r.join().map_err(|_| anyhow!("a rank panicked"))?).collect();
        ended.into_iter().collect::<Result<Vec<()>>>().map(|_| ())
    })
}

// -------------------------------------------------------------------- member

/// Runs the one rank that a launcher started this process for. Rank 0 prints for all.
fn member(o: &mut Options) -> Result<ExitCode> {
    let membership = o.membership.clone().expect("it was looked at");
    if membership.rank == 0 {
        warn(o);
    }
    let mut service = Children(Vec::new());
    serve(o, &mut service)?;
    pushgate::proxy::raise_open_files();
    let o = &*o;
    let context = Context::builder().settings(o.settings.clone()).for_rank(&membership).build()?;
    let comm = Comm::join(&context, &membership)?;
    let results = Mutex::new((Results::new(o)?, Ok(())));
    let report = |r: Report| {
        let (results, printed) = &mut *results.lock().unwrap_or_else(PoisonError::into_inner);
        // Ranks go on without their reader: one that ended alone would be lost to the others.
        if printed.is_ok() {
            *printed = results.take(r);
        }
    };
    rank::run(o, &comm, 1, true, &report)?;
    let (results, printed) = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    printed?;
    if membership.rank == 0 {
        results.finish()?;
    }
    Ok(ExitCode::SUCCESS)
}

// ------------------------------------------------------------------- results

/// Prints what rank 0 reports, as it comes.
struct Results<'a> {
    o: &'a Options,
    bar: indicatif::ProgressBar,
    lines: Vec<rank::Line>,
}

impl<'a> Results<'a> {
    fn new(o: &'a Options) -> Result<Self> {
        let total = (o.warmup + o.iters) as u64 * (o.sizes.len() * o.places.len()) as u64;
        let is_first = o.node == 0 && o.membership.as_ref().is_none_or(|found| found.rank == 0);
        let bar = if std::io::stderr().is_terminal() && o.form == Form::Table && is_first {
            indicatif::ProgressBar::new(total).with_style(indicatif::ProgressStyle::with_template(
                "{bar:30} {pos}/{len} iterations {elapsed}",
            )?)
        } else {
            indicatif::ProgressBar::hidden()
        };
        Ok(Results { o, bar, lines: Vec::new() })
    }

    fn take(&mut self, report: Report) -> Result<()> {
        match report {
            Report::Why(why) => self.bar.suspend(|| say(&table::header(self.o.form, &why)))?,
            Report::Step => self.bar.inc(1),
            Report::Line(line) => {
                self.bar.suspend(|| say(&table::line(self.o.form, &line)))?;
                self.lines.push(*line);
            }
        }
        Ok(())
    }

    /// Prints what stands below the last line.
    fn finish(self) -> Result<()> {
        self.bar.finish_and_clear();
        let (lines, sizes) = (self.lines, self.o.sizes.len());
        if lines.len() != sizes {
            bail!("{} of {sizes} sizes were reported", lines.len());
        }
        say(&table::footer(self.o.form, &lines))
    }
}

// -------------------------------------------------------------------- parent

/// Says which settings have no effect.
fn warn(o: &Options) {
    o.settings.without_effect().iter().for_each(|said| tell(format_args!("allreduce: warning: {said}")));
}

/// Finds the proxy process that the settings name, or starts one, if the engine is to run in one.
fn serve(o: &mut Options, service: &mut Children) -> Result<()> {
    match (o.settings.proxy, o.proxy_runs) {
        (ProxyPlace::Process, true) => find_proxy(o),
        (ProxyPlace::Process, false) => start_proxy(o, service),
        _ => Ok(()),
    }
}

/// Processes: one a rank on the CPU, one a GPU otherwise.
fn processes(o: &Options) -> Result<u32> {
    let ranks = o.share.len() as u32;
    match (o.settings.device, pushgate::probe_cuda()) {
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, Err(_)) => Ok(ranks),
        (_, Ok(info)) => Ok(ranks.min(info.devices)),
        (DeviceChoice::Cuda, Err(why)) => {
            Err(o.settings.refused("device", format!("auto or cpu here ({why})")).into())
        }
    }
}

fn spawn(o: &Options, role: &str, stdout: Stdio) -> Result<Child> {
    Command::new(std::env::current_exe().context("finding this program")?)
        .args(std::env::args_os().skip(1))
        .env(ROLE, role)
        .env(PARENT, std::process::id().to_string())
        .env("PUSHGATE_PROXY_SOCKET", &o.settings.proxy_socket)
        .stdin(Stdio::null())
        .stdout(stdout)
        .spawn()
        .context("starting a rank")
}

/// Connects to the proxy process and hangs up: whether there is one.
fn dial_proxy(socket: &Path) -> std::io::Result<()> {
    let address = match socket.as_os_str().as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixStream::connect_addr(&address).map(drop)
}

/// Starts a proxy process for this job alone. Returns when the proxy takes connections, for a rank
/// that comes first is refused.
fn start_proxy(o: &mut Options, service: &mut Children) -> Result<()> {
    o.settings.proxy_socket = format!("@pushgate-allreduce-{}", std::process::id()).into();
    service.0.push(spawn(o, "proxy", Stdio::null())?);
    let socket = &o.settings.proxy_socket;
    let start = Instant::now();
    while dial_proxy(socket).is_err() {
        if let Some(status) = service.0[0].try_wait()? {
            return Err(anyhow!("the proxy at {} did not start: {status}", socket.display()));
        }
        if start.elapsed() > o.settings.timeout {
            return Err(anyhow!("the proxy at {} does not listen", socket.display()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Finds the proxy process that was named, which runs already.
fn find_proxy(o: &Options) -> Result<()> {
    let socket = o.settings.proxy_socket.display();
    if let Err(e) = dial_proxy(&o.settings.proxy_socket) {
        bail!(
            "no proxy runs at {socket} ({e}): start one with `pushgate proxy --proxy-socket {socket}`, or leave \
             proxy-socket out, and allreduce starts a proxy of its own"
        );
    }
    tell(format_args!("allreduce: using the proxy that runs at {socket}"));
    Ok(())
}

/// How long ranks may take to end by themselves after the first failure.
const GRACE: Duration = Duration::from_secs(10);

/// Whether a process was stopped by a signal (proc_pid_stat(5)).
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold anything but ends at the last parenthesis.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// Ends what it started, whatever happens.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        // All stop before one of them dies: the others would say that it is lost.
        for signal in [Signal::STOP, Signal::KILL] {
            // One that was waited for is gone, and its number another's.
            for c in self.0.iter_mut().filter_map(|c| matches!(c.try_wait(), Ok(None)).then_some(c)) {
                let _ = rustix::process::kill_process(Pid::from_child(c), signal);
            }
        }
        for c in &mut self.0 {
            let _ = c.wait();
        }
    }
}

fn parent(o: &mut Options) -> Result<ExitCode> {
    let of = processes(o)?;
    let mut service = Children(Vec::new());
    warn(o);
    serve(o, &mut service)?;
    let o = &*o;
    let (sender, reports) = channel();
    let mut children = Children(Vec::new());
    for index in 0..of {
        let mut child = spawn(o, &format!("{index}/{of}/{}", o.job), Stdio::piped())?;
        let stdout = child.stdout.take().expect("it is piped");
        let sender = sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Ok(r) = serde_json::from_str::<Report>(&line) {
                    let _ = sender.send(r);
                }
            }
        });
        children.0.push(child);
    }
    drop(sender);

    let mut results = Results::new(o)?;
    let bar = results.bar.clone();
    let mut failed: Option<Instant> = None;
    let mut code = ExitCode::SUCCESS;
    let who = |index: usize| match of as usize == o.share.len() {
        true => format!("rank {}", o.share.start as usize + index),
        false => format!("process {index}"),
    };
    // Whose end needs no word any more: it was told, or this process ended the child itself.
    let mut told = vec![false; of as usize];
    loop {
        match reports.recv_timeout(Duration::from_millis(20)) {
            Ok(report) => results.take(report)?,
            Err(RecvTimeoutError::Timeout) => {}
            // All pipes are closed: the children have ended or are about to.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(5)),
        }
        let mut running = 0;
        for (index, child) in children.0.iter_mut().enumerate() {
            match child.try_wait()? {
                None => running += 1,
                Some(status) if status.success() => {}
                Some(status) => {
                    // Those that end with a code say why themselves.
                    if let Some(signal) = status.signal()
                        && !told[index]
                    {
                        told[index] = true;
                        let (who, pid) = (who(index), child.id());
                        bar.suspend(|| {
                            tell(format_args!("allreduce: {who} (pid {pid}) was killed by signal {signal}"))
                        });
                    }
                    failed.get_or_insert_with(Instant::now);
                    code = ExitCode::from(if status.code() == Some(2) { 2 } else { 1 });
                }
            }
        }
        if running == 0 {
            break;
        }
        // The others end by themselves with a status; this is for one that can't.
        if failed.is_some_and(|t| t.elapsed() > GRACE) {
            for (index, child) in children.0.iter_mut().enumerate() {
                if child.try_wait()?.is_some() || told[index] {
                    continue;
                }
                told[index] = true;
                let (who, pid) = (who(index), child.id());
                let why = match is_stopped(pid) {
                    true => "is stopped (SIGSTOP) and can't end by itself".into(),
                    false => format!("did not end within {} s of the first failure", GRACE.as_secs()),
                };
                bar.suspend(|| tell(format_args!("allreduce: {who} (pid {pid}) {why}: ended by allreduce")));
                let _ = child.kill();
            }
        }
    }
    reports.iter().try_for_each(|report| results.take(report))?;
    if failed.is_some() {
        bar.finish_and_clear();
        return Ok(code);
    }
    if o.node > 0 {
        bar.finish_and_clear();
        // Rank 0's node has the results.
        let (first, last) = (o.share.start, o.share.end - 1);
        match first == last {
            _ if o.form != Form::Table => {}
            true => say(&format!("# node {}: its rank {first} is done\n", o.node))?,
            false => say(&format!("# node {}: its ranks {first} to {last} are done\n", o.node))?,
        }
    } else {
        results.finish()?;
    }
    Ok(code)
}

/// The reader of standard output has gone, as `head` does. The job then ends quietly.
#[derive(Debug)]
struct ReaderGone;

impl std::fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the reader of standard output has gone")
    }
}

impl std::error::Error for ReaderGone {}

/// Says a line on standard error. In one write, so that lines of ranks that share it stay whole.
fn tell(line: std::fmt::Arguments<'_>) {
    // Nobody may take it any more.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Prints text as it is.
fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        done => done.context("cannot write to standard output"),
    }
}
