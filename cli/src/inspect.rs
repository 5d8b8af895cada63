//! `pushgate inspect`: what the queue pairs of running programs wait for, by their flight recorders.

use std::collections::BTreeSet;

use anyhow::{Context, Result, anyhow};
use clap::{Arg, ArgAction, ArgMatches, Command};
use pushgate_engine::recorder::Engine;
use pushgate_engine::recorder::report::{Process, json, text_of};

use crate::exit::Input;
use crate::find::{self, Found};
use crate::output::{errln, out, outln};

pub fn command() -> Command {
    let flag = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    Command::new("inspect")
        .about("Says what the queue pairs of a running program wait for, and who is to blame")
        .after_help(
            "Reads what each engine records all the time, so the program may hang or be stopped. Needs to be root or the \
             program's user. docs/inspect.md says what the lines mean.",
        )
        .arg(
            Arg::new("who")
                .value_name("PID|NAME")
                .required_unless_present("all")
                .help("A process, a job by its name, or processes by their name"),
        )
        .arg(flag(
            "all",
            "The processes at the other ends too; without PID or NAME, every process of this host",
        ))
        .arg(flag("json", "One JSON object, with all that was recorded"))
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let who = m.get_one::<String>("who");
    let (processes, unread) = select(who.map(String::as_str), m.get_flag("all"))?;
    for said in unread {
        errln!("pushgate inspect: {said}");
    }
    match m.get_flag("json") {
        true => outln!("{}", serde_json::to_string_pretty(&json(&processes))?)?,
        false => out!("{}", text_of(&processes))?,
    }
    Ok(())
}

/// The report of this process, as text.
pub fn of_this_process() -> String {
    match find::one(std::process::id()) {
        Ok(found) if found.process.engines.is_empty() => "no engine runs in this process\n".into(),
        Ok(found) => text_of(&[found.process]),
        Err(e) => format!("{}\n", find::refused(std::process::id(), &e)),
    }
}

/// The report of these processes, as text.
pub fn of_processes(pids: &[u32]) -> String {
    let none = || "no engine runs for these processes".into();
    match all().and_then(|found| chosen(found, &pids.iter().copied().collect(), false, none)) {
        Ok((processes, _)) => text_of(&processes),
        Err(e) => format!("{e:#}\n"),
    }
}

/// The processes that were asked for, and sentences about what could not be read.
fn select(who: Option<&str>, peers: bool) -> Result<(Vec<Process>, Vec<String>)> {
    let Some(who) = who else {
        return Ok(split(all()?));
    };
    if let Ok(pid) = who.parse::<u32>() {
        return of_pid(pid, peers);
    }
    let found = all()?;
    let of_job = |found: &&Found| found.jobs.iter().any(|job| job == who);
    let mut pids: BTreeSet<u32> = found.iter().filter(of_job).map(|found| found.process.pid).collect();
    if pids.is_empty() {
        pids.extend(found.iter().filter(|f| f.process.name == who).map(|f| f.process.pid));
    }
    if pids.is_empty() {
        let jobs: BTreeSet<&str> =
            found.iter().flat_map(|found| found.jobs.iter().map(String::as_str)).collect();
        let known = match jobs.is_empty() {
            true => "no job runs here as this user".into(),
            false => format!("known jobs are {}", Vec::from_iter(jobs).join(", ")),
        };
        return Err(Input(format!("`{who}` is no job or process with an engine here: {known}")).into());
    }
    chosen(found, &pids, peers, || format!("the processes of `{who}` have no engine"))
}

fn of_pid(pid: u32, peers: bool) -> Result<(Vec<Process>, Vec<String>)> {
    let own = match find::one(pid) {
        Ok(own) => own,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(Input(find::refused(pid, &e)).into());
        }
        Err(e) => return Err(anyhow!(find::refused(pid, &e))),
    };
    if !peers && !own.process.engines.is_empty() {
        return Ok(split(vec![own]));
    }
    // Its engine may run in a `pushgate proxy`, and its peers anywhere.
    chosen(all()?, &BTreeSet::from([pid]), peers, || {
        format!("process {pid} has no engine of pushgate, nor has a proxy of this user one for it")
    })
}

fn all() -> Result<Vec<Found>> {
    find::all().context("looking for processes in /proc")
}

/// The processes that have engines, and sentences about what could not be read.
pub fn split(found: Vec<Found>) -> (Vec<Process>, Vec<String>) {
    let (mut processes, mut unread) = (Vec::new(), Vec::new());
    for found in found {
        if !found.process.engines.is_empty() {
            processes.push(found.process);
        }
        unread.extend(found.unread);
    }
    (processes, unread)
}

/// Of what was found, the engines that are these processes' own or serve them, and with `peers` the other ends of their
/// queue pairs.
fn chosen(
    found: Vec<Found>,
    pids: &BTreeSet<u32>,
    peers: bool,
    none: impl Fn() -> String,
) -> Result<(Vec<Process>, Vec<String>)> {
    let (mut processes, unread) = split(found);
    let mut ends = BTreeSet::new();
    for process in &processes {
        let own = process.engines.iter().filter(|engine| serves(process.pid, engine, pids));
        ends.extend(
            own.flat_map(|engine| engine.queue_pairs.iter().filter_map(|qp| other_end(qp.about.ends))),
        );
    }
    for process in &mut processes {
        let pid = process.pid;
        process.engines.retain_mut(|engine| {
            if !serves(pid, engine, pids) {
                engine.queue_pairs.retain(|qp| peers && ends.contains(&qp.about.ends));
                return !engine.queue_pairs.is_empty();
            }
            true
        });
    }
    processes.retain(|process| !process.engines.is_empty());
    match processes.is_empty() {
        true => Err(anyhow!(none())),
        false => Ok((processes, unread)),
    }
}

/// What the recorder of the peer's end says of that end, where this end's says `ends`. `None`: ends of such links have no names, so
/// that none can be found.
fn other_end(ends: [u64; 2]) -> Option<[u64; 2]> {
    (ends != [0, 0]).then_some([ends[1], ends[0]])
}

/// Whether an engine of process `pid` is of these processes or serves one of them.
fn serves(pid: u32, engine: &Engine, pids: &BTreeSet<u32>) -> bool {
    pids.contains(&pid) || engine.program.as_ref().is_some_and(|program| pids.contains(&program.pid))
}
