//! `pushgate bench nccl-trace`: replays what NCCL asked of the plugin, without NCCL and GPUs, beside bare sockets.

mod figures;
mod memory;
mod plugin;
mod rank;
mod script;
mod sockets;
mod thread;
mod turn;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use pushgate::Error;
use pushgate::settings::{Key, PluginSettings, parse_size};
use pushgate_net_trace::ring::Ring;
use serde_json::json;

use self::figures::{Latencies, Report};
use self::rank::Task;
use self::script::Script;
use self::turn::Plan;
use super::ranks;
use crate::exit::{FAILED, Input};
use crate::flags;
use crate::folder::Folder;
use crate::nccl_check::PLUGIN;
use crate::output::outln;

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    let arg = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    settings(
        Command::new("nccl-trace")
            .about("Replays what NCCL asked of the plugin, as PUSHGATE_NET_TRACE=FOLDER recorded it; beside it: bare sockets")
            .after_help(
                "A process for each recorded one makes the same calls on host memory. A post waits for all requests that the \
                 recorded thread had seen done before. docs/testing.md, \"Traces of NCCL's calls\", has more.",
            )
            .arg(
                Arg::new("folder")
                    .value_name("FOLDER")
                    .value_parser(value_parser!(PathBuf))
                    .required_unless_present("ring")
                    .help("The traces of all processes of a job"),
            )
            .arg(
                arg("ring", "HOSTSxGPUSxCHANNELSxBYTESxROUNDS", "Replays made calls instead, of allreduces around a ring, as in 2x2x8x256Kx20")
                    .conflicts_with("folder"),
            )
            .arg(
                arg("with", "NAME=VALUE,...", "Replays also with these settings of the plugin; may be given several times")
                    .action(ArgAction::Append),
            )
            .arg(
                arg("pace", "PACE", "What a post waits for beside requests that were done before: nothing, or the recorded gap too")
                    .value_parser(["none", "recorded"])
                    .default_value("none"),
            )
            .arg(
                arg("within", "WORDS", "Words before the program of the next process, as in 'ip netns exec a'; may be given several times")
                    .action(ArgAction::Append),
            )
            .arg(switch("alone", "Leaves the bare sockets out, as for a profiler"))
            .arg(switch("check-all", "Compares all bytes of each message, not its first and last 64 alone"))
            .arg(
                arg("plugin", "FILE", "The plugin [default: beside this program, or where a package puts it]")
                    .value_parser(value_parser!(PathBuf)),
            )
            .arg(arg("runs", "N", "Turns of each way, each with processes of its own; best and median are shown").default_value("5"))
            .arg(switch("json", "One JSON object for each way")),
    )
}

/// A way to replay: its name, the settings as variables, and whether the plugin is used.
struct Way {
    name: String,
    variables: Vec<(String, String)>,
    plugin: bool,
    turns: Vec<Vec<Report>>,
}

/// The ways that the command line asks for: the bare sockets first.
fn ways(m: &ArgMatches) -> Result<Vec<Way>, Error> {
    let way = |name: &str, variables, plugin| Way { name: name.into(), variables, plugin, turns: Vec::new() };
    let mut all = Vec::new();
    if !m.get_flag("alone") {
        all.push(way("sockets", Vec::new(), false));
    }
    for text in m.get_many::<String>("with").into_iter().flatten() {
        let mut variables = Vec::new();
        for one in text.split(',') {
            let (name, value) = one
                .split_once('=')
                .ok_or_else(|| Error::flag("with", one, "settings as in qp=tcp,net-tcp-threads=2"))?;
            PluginSettings::default().set_flag(name, value)?;
            variables.push((Key::of(name).expect("it was set").variable(), value.into()));
        }
        all.push(way(text, variables, true));
    }
    if all.iter().all(|way| !way.plugin) {
        all.push(way("plugin", Vec::new(), true));
    }
    Ok(all)
}

/// What `--ring` says.
fn ring(text: &str) -> Result<Ring, Error> {
    let wrong = || {
        Error::flag(
            "ring",
            text,
            "HOSTSxGPUSxCHANNELSxBYTESxROUNDS, as in 2x2x8x256Kx20: 2 to 16 hosts, 1 to 16 GPUs and channels, up to 1G, up to 10000 rounds",
        )
    };
    let parts: Vec<&str> = text.split('x').collect();
    let [hosts, gpus, channels, bytes, rounds] = parts[..] else { return Err(wrong()) };
    let number = |text: &str, least: u64, most: u64| {
        text.parse().ok().filter(|n| (least..=most).contains(n)).ok_or_else(wrong)
    };
    Ok(Ring {
        hosts: number(hosts, 2, 16)?,
        gpus: number(gpus, 1, 16)?,
        channels: number(channels, 1, 16)?,
        bytes: parse_size(bytes).filter(|n| (1..=1 << 30).contains(n)).ok_or_else(wrong)?,
        rounds: number(rounds, 1, 10_000)?,
    })
}

pub fn run(m: &ArgMatches) -> Result<ExitCode> {
    if let Ok(task) = std::env::var(rank::TASK) {
        ranks::role()?;
        // The command that started this process says what failed.
        return Ok(rank::run(&task).map_or(ExitCode::from(FAILED), |()| ExitCode::SUCCESS));
    }
    let settings = flags::load_plugins(m)?;
    let runs = flags::number(m, "runs", 1, 1000)?.expect("has a default");
    let mut ways = ways(m)?;
    let made;
    let folder: &Path = match m.get_one::<String>("ring") {
        Some(text) => {
            made = Folder::new(None, "nccl-trace")?;
            for end in ring(text)?.ends() {
                end.write(made.path()).with_context(|| format!("writing into {}", made.path().display()))?;
            }
            made.path()
        }
        None => m.get_one::<PathBuf>("folder").expect("one of the two is there"),
    };
    let ends = pushgate_net_trace::folder(folder).map_err(|e| Input(e.to_string()))?;
    let script =
        Script::of(&ends).with_context(|| Input(format!("{} can't be replayed", folder.display())))?;
    let plugin = PLUGIN
        .find(m.get_one::<PathBuf>("plugin").map(PathBuf::as_path), std::env::current_exe().ok().as_deref());
    let plugin =
        plugin.map_err(|missing| Input(format!("nccl-trace needs what this host lacks: {missing}")))?;
    has_memory(&script)?;
    let given = PluginSettings::keys()
        .filter_map(|key| m.get_one::<String>(&key.flag()).map(|value| (key.variable(), value.clone())));
    let within = m.get_many::<String>("within").into_iter().flatten();
    let plan = Plan {
        task: Task {
            folder: std::path::absolute(folder)?,
            process: 0,
            plugin: None,
            paced: m.get_one::<String>("pace").is_some_and(|pace| pace == "recorded"),
            all: m.get_flag("check-all"),
            silence_ms: settings.timeout.as_millis() as u64,
        },
        pids: script.processes.iter().map(|p| p.pid).collect(),
        within: within.map(|words| words.split_whitespace().map(Into::into).collect()).collect(),
        variables: given.collect(),
    };
    let json = m.get_flag("json");
    if !json {
        about(&script)?;
    }
    for _ in 0..runs {
        for way in &mut ways {
            let task = Task { plugin: way.plugin.then(|| plugin.clone()), ..plan.task.clone() };
            let reports = turn::run(&plan, &task, &way.variables).with_context(|| way.name.clone())?;
            way.turns.push(reports);
        }
    }
    print(&script, &ways, json)?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses a replay for which this host has too little memory.
fn has_memory(script: &Script) -> Result<()> {
    let memories = script.processes.iter().flat_map(|p| &p.ends).map(|end| end.memory as u64);
    let needed = memories.fold(0, u64::saturating_add);
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let available =
        available.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).map(|kib| kib << 10);
    match available {
        Some(available) if needed > available / 4 * 3 => Err(Input(format!(
            "the replay needs {} MiB for messages, this host has {} MiB available: record fewer or shorter messages",
            needed >> 20,
            available >> 20
        ))
        .into()),
        _ => Ok(()),
    }
}

fn messages(script: &Script) -> (usize, u64) {
    let sends = script
        .processes
        .iter()
        .flat_map(|p| &p.ends)
        .filter(|end| end.role == pushgate_net_trace::Role::Send);
    let parts = || sends.clone().flat_map(|end| &end.posts).flat_map(|post| &post.parts);
    (parts().count(), parts().map(|part| part.size as u64).sum())
}

fn about(script: &Script) -> Result<()> {
    let (count, bytes) = messages(script);
    let (processes, connections) =
        (script.processes.len(), script.processes.iter().map(|p| p.ends.len()).sum::<usize>() / 2);
    outln!("# {processes} processes, {connections} connections, {count} messages of {bytes} bytes in all")?;
    for (n, what) in [
        (script.lone, "ends are left out: the other end has no trace here"),
        (script.unmatched, "posts are left out: the trace of their other side has none for them"),
        (script.unclosed, "ends have no record of their close: their last calls may be missing"),
    ] {
        if n > 0 {
            outln!("# {n} {what}")?;
        }
    }
    outln!(
        "# sockets: bare TCP, one socket and one blocking helper thread for each end of a connection; ratio: their best / the best"
    )?;
    Ok(())
}

/// The figures of a way, of all turns.
struct Figures {
    best: f64,
    median: f64,
    cpu: f64,
    /// Of all processes in a turn.
    sleeps: f64,
    latencies: Latencies,
}

impl Figures {
    fn of(way: &Way) -> Figures {
        let mut seconds: Vec<f64> =
            way.turns.iter().map(|turn| turn.iter().map(|r| r.seconds).fold(0.0, f64::max)).collect();
        seconds.sort_by(f64::total_cmp);
        let mut latencies = Latencies::default();
        way.turns.iter().flatten().for_each(|report| latencies.merge(&report.latencies));
        let cpu = way.turns.iter().flatten().map(|r| r.cpu).sum::<f64>();
        let reports = way.turns.iter().map(Vec::len).sum::<usize>();
        let sleeps =
            way.turns.iter().flatten().map(|r| r.sleeps).sum::<u64>() as f64 / way.turns.len() as f64;
        let (best, median) = (seconds[0], seconds[seconds.len() / 2]);
        Figures { best, median, cpu: cpu / reports as f64, sleeps, latencies }
    }
}

/// Times of the recording itself.
fn recorded(script: &Script) -> (f64, Latencies) {
    let mut latencies = Latencies::default();
    for end in script.processes.iter().flat_map(|p| &p.ends) {
        for post in &end.posts {
            if let Some(time) = post.recorded {
                latencies.add(end.role, post.parts.iter().map(|part| part.size).sum(), time);
            }
        }
    }
    (script.processes.iter().map(|p| p.span).max().unwrap_or(0) as f64 / 1e9, latencies)
}

fn print(script: &Script, ways: &[Way], json: bool) -> Result<()> {
    let (span, of_recording) = recorded(script);
    let figures: Vec<Figures> = ways.iter().map(Figures::of).collect();
    // Without the sockets there is no ratio.
    let sockets = if ways[0].plugin { f64::NAN } else { figures[0].best };
    if json {
        for (way, f) in ways.iter().zip(&figures) {
            let classes: Vec<_> = (f.latencies.classes())
                .map(|class| {
                    let times = f.latencies.of(class).expect("it is one");
                    json!({"bytes": class.bytes, "receives": class.receives, "count": times.count(),
                        "p50_us": times.quantile(0.5), "p99_us": times.quantile(0.99)})
                })
                .collect();
            let received: u64 = way.turns[0].iter().map(|r| r.received).sum();
            let line = json!({
                "bench": "nccl-trace", "way": way.name, "recorded_ms": span * 1e3, "best_ms": f.best * 1e3,
                "median_ms": f.median * 1e3, "ratio": sockets / f.best, "cpu_s": f.cpu, "sleeps": f.sleeps, "received": received,
                "turns": way.turns.len(), "messages": classes,
            });
            outln!("{line}")?;
        }
        return Ok(());
    }
    let each = messages(script).0 as f64;
    outln!(
        "{:<40} {:>10} {:>10} {:>7} {:>14} {:>15}",
        "way",
        "best ms",
        "median ms",
        "ratio",
        "CPU s/process",
        "sleeps/message"
    )?;
    outln!("{:<40} {:>10.3}", "recorded", span * 1e3)?;
    for (way, f) in ways.iter().zip(&figures) {
        let (best, median) = (f.best * 1e3, f.median * 1e3);
        let (ratio, sleeps) = (sockets / f.best, f.sleeps / each);
        outln!("{:<40} {best:>10.3} {median:>10.3} {ratio:>7.2} {:>14.4} {sleeps:>15.2}", way.name, f.cpu)?;
    }
    outln!("# from post to done, us: median, and what 99 of 100 do not exceed")?;
    outln!("{:>10} {:<8} {:<40} {:>8} {:>10} {:>10}", "bytes to", "", "way", "count", "median", "99 %")?;
    for class in figures[0].latencies.classes() {
        let direction = if class.receives { "receive" } else { "send" };
        let named = ways.iter().zip(&figures).map(|(way, f)| (&*way.name, &f.latencies));
        for (name, latencies) in std::iter::once(("recorded", &of_recording)).chain(named) {
            let Some(times) = latencies.of(class) else { continue };
            let [median, most] = [0.5, 0.99].map(|share| times.quantile(share));
            let (bytes, count) = (class.bytes, times.count());
            outln!("{bytes:>10} {direction:<8} {name:<40} {count:>8} {median:>10.1} {most:>10.1}")?;
        }
    }
    Ok(())
}
