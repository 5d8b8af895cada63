//! Where the two ranks run: two processes of this host, threads of one, or one here and
//! one elsewhere, as `--rank` or a launcher says.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use pushgate::settings::DeviceChoice;
use pushgate::{Comm, Context, Error};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};

use super::{Options, rank};
use crate::output::{OutputError, errln, outln};

/// How a child knows which rank it is: `RANK/OF/JOB`, OF devices to choose from.
pub const ROLE: &str = "_PUSHGATE_OSU_ROLE";
/// How a child knows the process that started it.
const PARENT: &str = "_PUSHGATE_PARENT";
/// One rank has ended: how long until the other is ended too.
const GRACE: Duration = Duration::from_secs(5);

pub fn run(o: &Options) -> Result<()> {
    if let Ok(role) = std::env::var(ROLE) {
        return child(o, &role);
    }
    if let Some(membership) = &o.membership {
        let context = Context::builder().settings(o.settings.clone()).for_rank(membership).build()?;
        let wrong = one(o, &Comm::join(&context, membership)?, 1)?;
        // Of ranks that a launcher started rank 0 speaks for both.
        return if membership.rank == 0 || o.rank.is_some() { verdict(wrong) } else { Ok(()) };
    }
    let devices = match (o.settings.device, pushgate::probe_cuda()) {
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, Err(_)) => None,
        (_, Ok(info)) => Some(info.devices),
        (DeviceChoice::Cuda, Err(why)) => {
            return Err(o.settings.refused("device", format!("auto or cpu here ({why})")).into());
        }
    };
    // Kernels of two processes take turns on a GPU, milliseconds each.
    match o.processes.unwrap_or(if devices == Some(1) { 1 } else { 2 }) {
        1 => both(o),
        _ => parent(devices.unwrap_or(1)),
    }
}

fn verdict(wrong: Option<String>) -> Result<()> {
    match wrong {
        None => Ok(()),
        Some(wrong) => bail!("validation failed: {wrong}"),
    }
}

/// Runs one rank. One that fails does not leave its peer waiting.
fn one(o: &Options, comm: &Comm, processes: u32) -> Result<Option<String>> {
    let done = rank::run(o, comm, processes);
    if done.is_err() {
        comm.abort();
    }
    done
}

/// Both ranks as threads, over one device and one engine.
fn both(o: &Options) -> Result<()> {
    let context = Context::builder().settings(o.settings.clone()).share(0, 1).build()?;
    let comms = Comm::local(&context, 2)?;
    let ended: Vec<Result<Option<String>>> = std::thread::scope(|s| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| s.spawn(move || one(o, &comm, 1))).collect();
        ranks.into_iter().map(|r| r.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked")))).collect()
    });
    // The cause, before what the other rank made of it.
    let lost =
        |e: &anyhow::Error| matches!(e.downcast_ref(), Some(Error::PeerLost { .. } | Error::Aborted { .. }));
    let mut errors = Vec::new();
    let mut wrong = None;
    for end in ended {
        match end {
            Ok(w) => wrong = wrong.or(w),
            Err(e) => errors.push(e),
        }
    }
    errors.sort_by_key(lost);
    match errors.into_iter().next() {
        Some(e) => Err(e),
        None => verdict(wrong),
    }
}

fn child(o: &Options, role: &str) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before that.
    let parent = std::env::var(PARENT).ok().and_then(|p| p.parse().ok());
    if getppid().map(|p| p.as_raw_nonzero().get()) != parent {
        bail!("the program that started this rank has ended");
    }
    let mut parts = role.splitn(3, '/');
    let mut next = || parts.next().ok_or_else(|| anyhow!("{ROLE} is {role}, expected RANK/OF/JOB"));
    let (rank, of, job) = (next()?.parse::<u32>()?, next()?.parse::<u32>()?, next()?.to_owned());
    let context = Context::builder()
        .settings(o.settings.clone())
        .device_index(rank % of.max(1))
        .share(rank as usize, 2)
        .build()?;
    let wrong = one(o, &Comm::connect(&context, &job, rank, 2)?, 2)?;
    // Rank 0 speaks for both.
    if rank == 0 { verdict(wrong) } else { Ok(()) }
}

/// Ends what it started, whatever happens.
struct Children([Child; 2]);

impl Drop for Children {
    fn drop(&mut self) {
        // Both stop before one of them dies: the other would say that its peer is lost.
        for signal in [Signal::STOP, Signal::KILL] {
            // One that was waited for is gone, and its number another's.
            for child in
                self.0.iter_mut().filter_map(|child| matches!(child.try_wait(), Ok(None)).then_some(child))
            {
                let _ = kill_process(Pid::from_child(child), signal);
            }
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}

/// Prints what rank 0 says, until it ends or standard output fails. Rank 0 goes on until this program ends both
/// ranks: one that ended alone would make the other say that it is lost.
fn forward(rank0: &mut BufReader<ChildStdout>) -> Result<(), OutputError> {
    rank0.lines().try_for_each(|line| outln!("{}", line?))
}

/// Two processes of this program with the same arguments. Rank 0 prints, by way of this process.
fn parent(devices: u32) -> Result<()> {
    let spawn = |rank: u32| {
        let job = format!("osu-{}", std::process::id());
        Command::new(std::env::current_exe().context("finding this program")?)
            .args(std::env::args_os().skip(1))
            .env(ROLE, format!("{rank}/{devices}/{job}"))
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(if rank == 0 { Stdio::piped() } else { Stdio::inherit() })
            .spawn()
            .with_context(|| format!("starting rank {rank}"))
    };
    let first = spawn(0)?;
    let mut children = match spawn(1) {
        Ok(second) => Children([first, second]),
        Err(e) => {
            let mut first = first;
            let _ = first.kill();
            let _ = first.wait();
            return Err(e);
        }
    };
    let mut rank0 = BufReader::new(children.0[0].stdout.take().expect("it is piped"));
    let mut printed = Some(std::thread::spawn(move || (forward(&mut rank0), rank0)));
    let ended = |printed: &mut Option<JoinHandle<(_, _)>>| -> Result<(), OutputError> {
        printed.take().map_or(Ok(()), |printed| printed.join().expect("printing does not panic").0)
    };
    let mut failed: Option<(Instant, i32)> = None;
    let mut told = [false; 2];
    loop {
        let mut running = 0;
        for (rank, child) in children.0.iter_mut().enumerate() {
            match child.try_wait()? {
                None => running += 1,
                Some(status) if status.success() => {}
                Some(status) => {
                    // One that ends with a code says why itself.
                    if let Some(signal) = status.signal()
                        && !told[rank]
                    {
                        errln!("pushgate: rank {rank} (pid {}) was killed by signal {signal}", child.id());
                        told[rank] = true;
                    }
                    failed.get_or_insert((Instant::now(), status.code().unwrap_or(1)));
                }
            }
        }
        // It ends before rank 0 does if it can't print; rank 0 may also have closed its output and be about to end.
        if printed.as_ref().is_some_and(JoinHandle::is_finished) {
            ended(&mut printed)?;
        }
        match failed {
            Some((since, code)) if running == 0 || since.elapsed() > GRACE => {
                drop(children);
                ended(&mut printed)?;
                // What is to be said was said.
                std::process::exit(code);
            }
            None if running == 0 => return Ok(ended(&mut printed)?),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
