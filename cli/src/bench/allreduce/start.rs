//! Where the ranks run: in processes of this host, as the one rank that a launcher started, and beside a proxy process.

use std::io::IsTerminal;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use pushgate::settings::ProxyPlace;
use pushgate::{Comm, Context, Membership, proxy};

use super::super::ranks::{self, Children, Processes, Role};
use super::rank::{self, Report};
use super::{Form, Options, table};
use crate::output::{errln, out};

/// The role of the proxy process that this bench starts.
const PROXY: &str = "proxy";

pub fn run(o: &mut Options) -> Result<ExitCode> {
    match ranks::role()?.as_deref() {
        // It ends with the parent.
        Some(PROXY) => proxy::run(&o.settings.proxy_socket, proxy::Stop::new()?)?,
        Some(role) => child(o, &Role::parse(role)?)?,
        None => match o.membership.clone() {
            Some(membership) => member(o, &membership)?,
            None => return parent(o),
        },
    }
    Ok(ExitCode::SUCCESS)
}

/// Ranks of this process: on the CPU one, on a GPU all that share it.
fn child(o: &Options, role: &Role) -> Result<()> {
    proxy::raise_open_files();
    let (index, of) = (role.index, role.of);
    let context = Context::builder()
        .settings(o.settings.clone())
        .device_index(index)
        .share(index as usize, of as usize)
        .build()?;
    let here: Vec<u32> = o.share.clone().filter(|r| (r - o.share.start) % of == index).collect();
    let (count, first) = (here.len() as u32, here[0]);
    let report = |r: Report| {
        // A parent that is gone has killed us.
        let _ = out!("{}\n", serde_json::to_string(&r).expect("a report is plain data"));
    };
    let (context, report) = (&context, &report);
    let one = &|rank: u32| -> Result<()> {
        let comm = Comm::connect(context, &role.job, rank, o.ranks)?;
        rank::run(o, &comm, count, rank == first, report)
    };
    match here[..] {
        [only] => one(only),
        _ => ranks::threads(here.into_iter().map(|rank| move || one(rank))).map(drop),
    }
}

/// Runs the one rank that a launcher started this process for. Rank 0 prints for all.
fn member(o: &mut Options, membership: &Membership) -> Result<()> {
    let _proxy = serve(o)?;
    proxy::raise_open_files();
    let o = &*o;
    let context = Context::builder().settings(o.settings.clone()).for_rank(membership).build()?;
    let comm = Comm::join(&context, membership)?;
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
    if membership.rank == 0 { results.finish() } else { Ok(()) }
}

/// Starts processes for the ranks of this node, and prints what rank 0 reports.
fn parent(o: &mut Options) -> Result<ExitCode> {
    // One a rank on the CPU, one a GPU otherwise.
    let count = o.share.len() as u32;
    let of = ranks::devices(&o.settings)?.map_or(count, |devices| count.min(devices));
    let _proxy = serve(o)?;
    let o = &*o;
    let socket = o.settings.proxy_socket.as_os_str();
    let processes = Processes::start(of, &o.job, &[("PUSHGATE_PROXY_SOCKET", socket)])?;
    let mut results = Results::new(o)?;
    let bar = results.bar.clone();
    let who = |index: usize| match of == count {
        true => format!("rank {}", o.share.start as usize + index),
        false => format!("process {index}"),
    };
    let tell = |what: String| bar.suspend(|| errln!("pushgate: {what}"));
    let failed = processes.wait(who, tell, |line| match serde_json::from_str(&line) {
        Ok(report) => results.take(report),
        Err(_) => Ok(()),
    })?;
    if let Some(code) = failed {
        bar.finish_and_clear();
        return Ok(ExitCode::from(code));
    }
    if o.node == 0 {
        results.finish()?;
        return Ok(ExitCode::SUCCESS);
    }
    bar.finish_and_clear();
    // Rank 0's node has the results.
    if o.form == Form::Table {
        match (o.share.start, o.share.end - 1) {
            (first, last) if first == last => out!("# node {}: its rank {first} is done\n", o.node)?,
            (first, last) => out!("# node {}: its ranks {first} to {last} are done\n", o.node)?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

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
            Report::Why(why) => self.bar.suspend(|| out!("{}", table::header(self.o.form, &why)))?,
            Report::Step => self.bar.inc(1),
            Report::Line(line) => {
                self.bar.suspend(|| out!("{}", table::line(self.o.form, &line)))?;
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
        Ok(out!("{}", table::footer(self.o.form, &lines))?)
    }
}

/// Finds the proxy process that the settings name, or starts one, if the engines are to run in one. One that was started
/// ends when the result is dropped.
fn serve(o: &mut Options) -> Result<Children> {
    match (o.settings.proxy, o.proxy_runs) {
        (ProxyPlace::Process, true) => find_proxy(o).map(|()| Children::default()),
        (ProxyPlace::Process, false) => start_proxy(o),
        _ => Ok(Children::default()),
    }
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
fn start_proxy(o: &mut Options) -> Result<Children> {
    o.settings.proxy_socket = format!("@pushgate-allreduce-{}", std::process::id()).into();
    let socket = &o.settings.proxy_socket;
    let mut service = Children::default();
    // Its warnings are for operators who run a proxy for many programs.
    let log = std::env::var_os("PUSHGATE_LOG").unwrap_or("error".into());
    let variables = [("PUSHGATE_PROXY_SOCKET", socket.as_os_str()), ("PUSHGATE_LOG", &log)];
    let child = service.start(PROXY, &variables, Stdio::null())?;
    let start = Instant::now();
    while dial_proxy(socket).is_err() {
        if let Some(status) = child.try_wait()? {
            bail!("the proxy at {} did not start: {status}", socket.display());
        }
        if start.elapsed() > o.settings.timeout {
            bail!("the proxy at {} does not listen", socket.display());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(service)
}

/// Finds the proxy process that was named, which runs already.
fn find_proxy(o: &Options) -> Result<()> {
    let socket = o.settings.proxy_socket.display();
    if let Err(e) = dial_proxy(&o.settings.proxy_socket) {
        bail!(
            "no proxy runs at {socket} ({e}): start one with `pushgate proxy --proxy-socket {socket}`, or leave \
             proxy-socket out, and the bench starts a proxy of its own"
        );
    }
    errln!("pushgate: using the proxy that runs at {socket}");
    Ok(())
}
