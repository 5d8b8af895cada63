//! `pushgate nccl-check`: collectives of NCCL over the plugin and over NCCL's own transports, by turns; whether NCCL
//! really took the plugin and its tuner; and what spoils them.
//!
//! Plain NCCL by its C API, a process for each rank, a table in the form of nccl-tests.

mod barrier;
mod collective;
mod data;
mod evidence;
mod find;
mod nccl;
mod rank;
mod table;
mod transport;
mod turns;
mod warnings;

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use pushgate::settings::PluginSettings;
use pushgate::settings::parse_size;
use pushgate::{Error, Settings};
use serde_json::json;

use self::collective::{Collective, ELEMENT};
use self::evidence::Verdict;
use self::find::Found;
pub use self::find::PLUGIN;
use self::rank::Task;
use self::table::Row;
use self::transport::{Transport, Way};
use self::turns::{Plan, Turn};
use self::warnings::Situation;
use crate::folder::Folder;
use crate::nccl_tests;
use crate::output::{self, errln, out};
use crate::signals;

/// Smallest size, largest size and factor.
const RANGE: [&str; 3] = ["8", "256M", "32"];
/// The largest size of [`RANGE`] where ranks share a GPU.
const MOST_SHARED: u64 = 1 << 20;
/// Most ranks of a host.
const MOST_RANKS: u32 = 64;

pub fn command(settings: impl Fn(Command) -> Command) -> Command {
    let arg = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    let file = |name: &'static str, value: &'static str, help: &'static str| {
        arg(name, value, help).value_parser(value_parser!(PathBuf))
    };
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
    };
    settings(
        Command::new("nccl-check")
            .about("Runs NCCL over the plugin beside NCCL's own transports, and says whether NCCL took the plugin")
            .after_help(
                "Needs a GPU, NCCL (libnccl.so.2, as PyTorch brings it) and the plugin; no PyTorch. Each rank is a process \
                 with a GPU of its own, as long as there are enough. Settings that are given as flags are the plugin's. \
                 docs/nccl.md, \"Checking it\", says what is printed and how it is measured.",
            )
            .args(nccl_tests::range_flags(RANGE))
            .arg(arg("sizes", "BYTES,...", "These sizes, in place of -b, -e and -f"))
            .arg(arg("iters", "N", "Iterations measured").short('n').default_value("20"))
            .arg(arg("warmup", "N", "Iterations before, each checked").short('w').default_value("5"))
            .arg(arg("rounds", "N", "Turns of each transport, each with processes of its own; the best counts").default_value("3"))
            .arg(arg("collectives", "NAME,...", "all_reduce, sendrecv, alltoall, all_gather, reduce_scatter, broadcast [default: all]"))
            .arg(arg("transports", "NAME,...", "pushgate, shm, socket, p2p [default: pushgate,shm,socket; without shm where ranks share a GPU]"))
            .arg(arg("ranks", "N", "Ranks, 2 to 64 [default: one a GPU, two at least]"))
            .arg(file("plugin", "FILE", "The plugin [default: beside this program, or where a package puts it]"))
            .arg(file("nccl", "FILE", "libnccl.so.2 [default: the linker's, or the active Python environment's]"))
            .arg(arg("seed", "N", "Seed of the data [default: another each time]"))
            .arg(switch("csv", "CSV on standard output, all else on standard error").conflicts_with("json"))
            .arg(switch("json", "One JSON object"))
            .arg(file("svg", "FILE", "Draws times and bandwidths into this file"))
            .arg(file("logs", "FOLDER", "Keeps NCCL's logs in this folder, which must not be there")),
    )
}

/// What the command line asks for, checked.
#[derive(Debug)]
struct Options {
    /// None: the default, by whether ranks share a GPU.
    sizes: Option<Vec<u64>>,
    iters: u32,
    warmup: u32,
    rounds: u32,
    collectives: Vec<Collective>,
    transports: Option<Vec<Transport>>,
    ranks: Option<u32>,
    seed: Option<u64>,
}

/// Names with commas between, each once, in the order given.
fn names<T: Copy + PartialEq>(
    flag: &str,
    text: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<Vec<T>, Error> {
    let mut found = Vec::new();
    for word in text.split(',') {
        let Some(one) = all.iter().copied().find(|one| name(*one) == word) else {
            let known: Vec<_> = all.iter().map(|one| name(*one)).collect();
            return Err(Error::flag(flag, word, format!("any of {}, with commas between", known.join(", "))));
        };
        if !found.contains(&one) {
            found.push(one);
        }
    }
    Ok(found)
}

fn options(m: &ArgMatches) -> Result<Options, Error> {
    let text = |name: &str| m.get_one::<String>(name).map(String::as_str);
    let number = |name, min, max| crate::flags::number(m, name, min, max);
    let range = nccl_tests::range(m, ELEMENT, RANGE)?;
    let sizes = match (text("sizes"), range) {
        (Some(list), Some(_)) => {
            return Err(Error::flag("sizes", list, "none beside --minbytes, --maxbytes and --stepfactor"));
        }
        (None, range) => range,
        (Some(list), None) => {
            let mut sizes = Vec::new();
            for word in list.split(',') {
                let bytes = parse_size(word)
                    .filter(|bytes| (1..=nccl_tests::MOST).contains(bytes) && bytes % ELEMENT == 0);
                let allowed = format!("multiples of {ELEMENT}, at most 64G, as in 8,4K,256M");
                sizes.push(bytes.ok_or_else(|| Error::flag("sizes", word, allowed))?);
            }
            sizes.sort_unstable();
            sizes.dedup();
            Some(sizes)
        }
    };
    let seed = match text("seed") {
        None => None,
        Some(v) => Some(v.parse().map_err(|_| Error::flag("seed", v, "a whole number below 2^64"))?),
    };
    Ok(Options {
        sizes,
        iters: number("iters", 1, 1_000_000)?.expect("has a default"),
        warmup: number("warmup", 0, 1_000_000)?.expect("has a default"),
        rounds: number("rounds", 1, 1000)?.expect("has a default"),
        collectives: match text("collectives") {
            None => Collective::ALL.to_vec(),
            Some(list) => names("collectives", list, &Collective::ALL, Collective::name)?,
        },
        transports: (text("transports"))
            .map(|list| names("transports", list, &Transport::ALL, Transport::name))
            .transpose()?,
        ranks: number("ranks", 2, MOST_RANKS)?,
        seed,
    })
}

/// All turns, in the order in which they ran.
type Turns = Vec<(Way, Turn)>;

/// What is run: what was asked for, on what was found.
struct Run {
    options: Options,
    found: Found,
    ranks: u32,
    sizes: Vec<u64>,
    transports: Vec<Transport>,
    /// What spoils it.
    warnings: Vec<String>,
    cores: usize,
}

impl Run {
    fn new(options: Options, found: Found) -> Result<Self, Error> {
        let ranks = options.ranks.unwrap_or(found.gpus.clamp(2, MOST_RANKS));
        let shared = found.gpus < ranks;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let text = |s: std::ffi::OsString| s.to_string_lossy().into_owned();
        let situation = Situation {
            cores,
            ranks,
            gpus: found.gpus,
            nccl: found.nccl_version,
            plugin: &found.plugin,
            variables: std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect(),
        };
        let mut warnings = situation.warnings();
        let possible = |t: &Transport| !shared || t.may_share_a_gpu();
        let asked = options.transports.clone();
        for left_out in asked.iter().flatten().filter(|t| !possible(t)) {
            let name = left_out.name();
            warnings.push(format!("{name} is left out: NCCL refuses it between ranks that share a GPU"));
        }
        let default = vec![Transport::Pushgate, Transport::Shm, Transport::Socket];
        let transports: Vec<_> = asked.unwrap_or(default).into_iter().filter(possible).collect();
        if transports.is_empty() {
            let given = options.transports.iter().flatten().map(|t| t.name()).collect::<Vec<_>>().join(",");
            return Err(Error::flag("transports", given, "pushgate or socket, as ranks share a GPU here"));
        }
        let sizes = options.sizes.clone().unwrap_or_else(|| {
            let [min, max, factor] = RANGE.map(|text| parse_size(text).expect("defaults are sizes"));
            let max = if shared { max.min(MOST_SHARED) } else { max };
            std::iter::successors(Some(min), |size| Some(size * factor))
                .take_while(|size| *size <= max)
                .collect()
        });
        Ok(Run { options, found, ranks, sizes, transports, warnings, cores })
    }

    fn plan(&self, m: &ArgMatches, settings: &Settings) -> Result<Plan> {
        // What CUDA_VISIBLE_DEVICES shows of this process's GPUs, one a rank.
        let shown = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        let named: Vec<String> = shown.split(',').map(|gpu| gpu.trim().to_owned()).collect();
        let gpus: Vec<String> = (0..self.found.gpus as usize)
            .map(|index| named.get(index).filter(|gpu| !gpu.is_empty()).cloned().unwrap_or(index.to_string()))
            .collect();
        let given = PluginSettings::keys()
            .filter_map(|key| m.get_one::<String>(&key.flag()).map(|value| (key.variable(), value.clone())));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let timeout = settings.timeout;
        Ok(Plan {
            // The task says all; the arguments are for people who list the processes.
            program: (
                std::env::current_exe().context("finding this program")?,
                std::env::args_os().skip(1).collect(),
            ),
            task: Task {
                rank: 0,
                ranks: self.ranks,
                parent: std::process::id() as i32,
                nccl: self.found.nccl.clone(),
                folder: PathBuf::new(),
                collectives: self.options.collectives.clone(),
                sizes: self.sizes.clone(),
                iters: self.options.iters,
                warmup: self.options.warmup,
                seed: self.options.seed.unwrap_or(now.as_nanos() as u64),
                timeout_ms: timeout.as_millis() as u64,
            },
            plugin: self.found.plugin.clone(),
            gpus,
            settings: given.collect(),
            // The ranks' own waits end first.
            silence: timeout * 2 + Duration::from_secs(30),
        })
    }

    /// All turns, and why transports failed. A transport that failed is not run again.
    fn turns(&self, plan: &Plan, folder: &Folder) -> Result<(Turns, Vec<String>)> {
        let mut ways: Vec<Way> = self.transports.iter().flat_map(|t| t.ways()).collect();
        let bar = output::bar(ways.len() as u64 * u64::from(self.options.rounds))?;
        let (mut turns, mut failed) = (Turns::new(), Vec::new());
        for round in 1..=self.options.rounds {
            for way in ways.clone() {
                bar.set_message(way.name());
                let name = format!("{round}-{}", way.name().replace(' ', "-"));
                match turns::run(plan, way, &folder.path().join(name))? {
                    Ok(turn) => turns.push((way, turn)),
                    Err(why) => {
                        ways.retain(|left| *left != way);
                        failed.push(format!("{} failed in round {round}: {why}", way.name()));
                    }
                }
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok((turns, failed))
    }

    /// One line about this run. `device`: the GPUs' name.
    fn about(&self, device: &str) -> String {
        let (major, minor, patch) = self.found.nccl_version;
        let gpus = self.found.gpus.min(self.ranks);
        format!(
            "NCCL {major}.{minor}.{patch}, driver for CUDA {}.{}, {} ranks on {gpus} x {device}, {} cores",
            self.found.driver.0, self.found.driver.1, self.ranks, self.cores
        )
    }
}

/// Where NCCL's connections went otherwise than the transport's name says.
fn elsewhere(turns: &[(Way, Turn)]) -> Vec<String> {
    let mut said = Vec::new();
    for (way, turn) in turns {
        let expected = match way.transport {
            Transport::Pushgate => continue,
            Transport::Shm => "SHM",
            Transport::Socket => "NET/Socket",
            Transport::P2p => "P2P",
        };
        let mut others: Vec<&str> =
            turn.logs.iter().flat_map(|log| log.via.keys().map(String::as_str)).collect();
        others.retain(|via| *via != expected);
        others.sort_unstable();
        others.dedup();
        if !others.is_empty() {
            said.push(format!("{}: NCCL's connections went over {}", way.name(), others.join(", ")));
        }
    }
    said.dedup();
    said
}

pub fn run(m: &ArgMatches) -> Result<()> {
    if let Ok(task) = std::env::var(rank::TASK) {
        return rank::run(&task);
    }
    let settings = crate::flags::load(m)?;
    let options = options(m)?;
    let path = |name: &str| m.get_one::<PathBuf>(name);
    let found = find::find(path("nccl").map(PathBuf::as_path), path("plugin").map(PathBuf::as_path))?;
    let run = Run::new(options, found)?;
    // Before the work, not after it.
    let svg = path("svg").map(|file| {
        File::create(file)
            .map(|made| (file, made))
            .with_context(|| format!("{} can't be written", file.display()))
    });
    let svg = svg.transpose()?;
    let folder = Folder::new(path("logs").map(PathBuf::as_path), "nccl-check")?;
    signals::catch(None);

    let (csv, json) = (m.get_flag("csv"), m.get_flag("json"));
    let comment = |line: &str| -> Result<()> {
        match csv || json {
            true => errln!("# {line}"),
            false => out!("# {line}\n")?,
        }
        Ok(())
    };
    for warning in &run.warnings {
        errln!("pushgate: warning: {warning}");
    }
    let plan = run.plan(m, &settings)?;
    let (turns, failed) = run.turns(&plan, &folder)?;
    let rows = table::rows(&run.options.collectives, &run.sizes, &run.transports, run.ranks, &turns);
    let verdict = verdict(&turns);
    let device = turns.iter().find_map(|(_, turn)| turn.device.clone()).unwrap_or_else(|| "GPU".into());
    let about = run.about(&device);
    let elsewhere = elsewhere(&turns);

    if json {
        out!(
            "{}\n",
            serde_json::to_string_pretty(&json!({
                "about": about,
                "nccl": run.found.nccl,
                "plugin": run.found.plugin,
                "ranks": run.ranks,
                "gpus": run.found.gpus,
                "cores": run.cores,
                "iters": run.options.iters,
                "warmup": run.options.warmup,
                "rounds": run.options.rounds,
                "seed": plan.task.seed,
                "took": verdict,
                "warnings": run.warnings.iter().chain(&elsewhere).collect::<Vec<_>>(),
                "failed": failed,
                "rows": rows,
            }))?
        )?;
    } else {
        comment(&about)?;
        comment(&format!("{} ({})", run.found.nccl.display(), nccl_says(&turns)))?;
        comment(&run.found.plugin.display().to_string())?;
        comment(&format!(
            "{} iterations after {}, the mean of them and of the ranks, the best of {}; every element of the warm-up \
             and of the last iteration is checked (seed {})",
            run.options.iters,
            run.options.warmup,
            if run.options.rounds == 1 {
                "one round".into()
            } else {
                format!("{} rounds", run.options.rounds)
            },
            plan.task.seed
        ))?;
        for sentence in verdict.iter().flat_map(Verdict::sentences) {
            comment(&sentence)?;
        }
        for sentence in &elsewhere {
            comment(sentence)?;
        }
        match csv {
            true => out!("{}", table::csv(&rows))?,
            false => out!("{}", table::text(&rows, &run.options.collectives))?,
        }
    }
    if let Some((path, mut file)) = svg {
        let drawn = table::svg(&rows, &run.options.collectives, &run.transports, &about);
        file.write_all(drawn.as_bytes()).with_context(|| format!("{} can't be written", path.display()))?;
    }
    let wrong = failures(verdict.as_ref(), &rows, failed);
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\npushgate: "));
    }
    comment("right: no wrong element, nothing failed")
}

/// NCCL's own words for its version, which name its CUDA.
fn nccl_says(turns: &[(Way, Turn)]) -> String {
    let logs = turns.iter().flat_map(|(_, turn)| &turn.logs);
    logs.filter_map(|log| log.nccl.clone()).next().unwrap_or_else(|| "its log says no version".into())
}

/// What NCCL did in the turns over the plugin; none if there was no such turn.
fn verdict(turns: &[(Way, Turn)]) -> Option<Verdict> {
    let ours = turns.iter().find(|(way, _)| way.transport == Transport::Pushgate);
    ours.map(|(_, turn)| Verdict::of(&turn.logs))
}

/// Why the check fails.
fn failures(verdict: Option<&Verdict>, rows: &[Row], failed: Vec<String>) -> Vec<String> {
    let mut all = failed;
    if verdict.is_some_and(|v| !v.plugin) {
        all.push("NCCL did not use the plugin for every rank".into());
    }
    for transport in Transport::ALL {
        let wrong: u64 = rows.iter().filter(|row| row.transport == transport).map(|row| row.wrong).sum();
        if wrong > 0 {
            all.push(format!("{wrong} wrong elements over {}", transport.name()));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &str) -> Result<Options, Error> {
        let words = ["nccl-check"].into_iter().chain(args.split_whitespace());
        let m = command(|c| c).try_get_matches_from(words).unwrap_or_else(|e| panic!("{e}"));
        options(&m)
    }

    fn found(gpus: u32) -> Found {
        Found {
            gpus,
            driver: (13, 0),
            nccl: "/x/libnccl.so.2".into(),
            nccl_version: (2, 30, 7),
            plugin: "/x/libnccl-net-pushgate.so".into(),
        }
    }

    fn run(args: &str, gpus: u32) -> Run {
        Run::new(parse(args).unwrap(), found(gpus)).unwrap()
    }

    #[test]
    fn sizes_are_named_as_in_nccl_tests_or_one_by_one() {
        let sizes = |args: &str| parse(args).unwrap().sizes;
        assert_eq!(sizes("-b 8 -e 1K -f 4"), Some(vec![8, 32, 128, 512]));
        assert_eq!(sizes("-b 1G"), Some(vec![1 << 30]));
        assert_eq!(sizes("-e 16"), Some(vec![8]));
        assert_eq!(sizes("--sizes 4K,8,4K"), Some(vec![8, 4096]));
        assert_eq!(run("", 2).sizes, [8, 256, 8 << 10, 256 << 10, 8 << 20, 256 << 20]);
        assert_eq!(run("", 1).sizes, [8, 256, 8 << 10, 256 << 10], "two ranks on a GPU are slow");
    }

    #[test]
    fn wrong_arguments_are_quoted_with_what_is_allowed() {
        for (args, says) in [
            (
                "-b 6",
                "invalid minbytes `6` (from --minbytes): expected a multiple of 4, at most 64G, as in 8, 1K or 1G",
            ),
            (
                "-b 1K -e 8",
                "invalid maxbytes `8` (from --maxbytes): expected at least minbytes, which is 1024",
            ),
            ("-b 8 -f 1", "invalid stepfactor `1` (from --stepfactor): expected 2 to 1073741824"),
            (
                "--sizes 8,9",
                "invalid sizes `9` (from --sizes): expected multiples of 4, at most 64G, as in 8,4K,256M",
            ),
            (
                "--sizes 8 -b 8",
                "invalid sizes `8` (from --sizes): expected none beside --minbytes, --maxbytes and --stepfactor",
            ),
            ("-n 0", "invalid iters `0` (from --iters): expected 1 to 1000000"),
            ("-w many", "invalid warmup `many` (from --warmup): expected 0 to 1000000"),
            ("--rounds 0", "invalid rounds `0` (from --rounds): expected 1 to 1000"),
            ("--ranks 1", "invalid ranks `1` (from --ranks): expected 2 to 64"),
            ("--seed x", "invalid seed `x` (from --seed): expected a whole number below 2^64"),
            (
                "--collectives all_reduce,reduce",
                "invalid collectives `reduce` (from --collectives): expected any of all_reduce, sendrecv, alltoall, all_gather, \
                 reduce_scatter, broadcast, with commas between",
            ),
            (
                "--transports tcp",
                "invalid transports `tcp` (from --transports): expected any of pushgate, shm, socket, p2p, with commas between",
            ),
        ] {
            assert_eq!(parse(args).unwrap_err().to_string(), says, "{args}");
        }
    }

    #[test]
    fn ranks_and_transports_follow_the_gpus() {
        let names = |run: &Run| run.transports.iter().map(|t| t.name()).collect::<Vec<_>>().join(",");
        let two = run("", 2);
        assert_eq!((two.ranks, names(&two).as_str()), (2, "pushgate,shm,socket"));
        assert_eq!(run("", 8).ranks, 8);
        let one = run("", 1);
        assert_eq!((one.ranks, names(&one).as_str()), (2, "pushgate,socket"));
        assert!(one.warnings.iter().any(|w| w.contains("share one GPU")), "{:?}", one.warnings);
        let asked = run("--transports p2p,socket,socket --ranks 3", 2);
        assert_eq!((asked.ranks, names(&asked).as_str()), (3, "socket"));
        assert!(asked.warnings.iter().any(|w| w.starts_with("p2p is left out")), "{:?}", asked.warnings);
        let none = Run::new(parse("--transports shm").unwrap(), found(1)).err().unwrap().to_string();
        assert_eq!(
            none,
            "invalid transports `shm` (from --transports): expected pushgate or socket, as ranks share a GPU here"
        );
    }

    #[test]
    fn the_check_fails_for_each_thing_that_is_not_right() {
        let used = Verdict { plugin: true, ..Verdict::default() };
        assert!(failures(Some(&used), &[], vec![]).is_empty());
        assert!(failures(None, &[], vec![]).is_empty(), "the plugin was not asked for");
        let said = failures(Some(&Verdict::default()), &[], vec!["shm failed in round 1: why".into()]);
        assert_eq!(said, ["shm failed in round 1: why", "NCCL did not use the plugin for every rank"]);
    }

    #[test]
    fn where_connections_went_otherwise_is_said_once() {
        let via = |line: &str| Turn { logs: vec![evidence::Evidence::of(line)], ..Turn::default() };
        let ways = |t: Transport| t.ways()[0];
        let line = |via: &str| format!("h:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via {via}");
        let turns = [
            (ways(Transport::P2p), via(&line("SHM/direct"))),
            (ways(Transport::P2p), via(&line("SHM/direct"))),
            (ways(Transport::Shm), via(&line("SHM/direct"))),
            (ways(Transport::Socket), via(&line("NET/Socket/0"))),
            (ways(Transport::Pushgate), via(&line("NET/pushgate/0"))),
        ];
        assert_eq!(elsewhere(&turns), ["p2p: NCCL's connections went over SHM"]);
    }
}
