//! `pushgate nixl-check`: transfers of NIXL between two processes of this host, by the plugin and by UCX in turns; whether every byte is
//! right; and which way the bytes went.
//!
//! NIXL is that of a Python, and so are the two agents (agent.py).

mod pair;
mod table;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use pushgate::Error;
use serde::Deserialize;
use serde_json::json;

use self::pair::{Pair, Said, Turn};
use self::table::{Row, Shape};
use crate::exit::Input;
use crate::folder::Folder;
use crate::output::{self, errln, out};
use crate::plugin::Plugin;
use crate::signals;

const PLUGIN: Plugin = Plugin {
    file: "libplugin_PUSHGATE.so",
    // The wheel's and the packages'.
    below: ["nixl", "pushgate/nixl"],
    build: "`cargo build --release -p pushgate-nixl-plugin`",
};

/// The agents' program, and what makes the folder from which NIXL loads its backends.
const FILES: [(&str, &str); 2] = [
    (pair::PROGRAM, include_str!("agent.py")),
    ("_nixl.py", include_str!("../../../python/src/pushgate/_nixl.py")),
];

pub fn command() -> Command {
    let arg = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    Command::new("nixl-check")
        .about("Runs NIXL over the plugin beside UCX, checks every byte, and says which way the bytes went")
        .after_help(
            "Needs a Python that has NIXL (`pip install nixl-cu13`) and numpy, and the plugin. Two processes of this host write and \
             read single pages and lists of scattered ones. PUSHGATE_ and UCX_ variables work. docs/nixl.md says what is printed.",
        )
        .arg(
            arg("backend", "NAME,...", "Backends of NIXL, by turns; the ratio of each is to the last one")
                .value_delimiter(',')
                .default_value("PUSHGATE,UCX"),
        )
        .arg(arg("memory", "KIND", "Whose memory: the host's, or of a GPU for each process").value_parser(["host", "gpu"]).default_value("host"))
        .arg(arg("gpus", "A,B", "The GPU that each process sees [default: the first two, or the only one for both]"))
        .arg(arg("turns", "N", "Turns of each backend, each with processes of its own; the median counts").default_value("3"))
        .arg(arg("seconds", "SECONDS", "Time of a row in a turn").default_value("0.5"))
        .arg(arg("set", "KEY=VALUE", "A parameter of the first backend, as in qp=tcp or direct=false").action(ArgAction::Append))
        .arg(arg("python", "PROGRAM", "The Python that has NIXL").default_value("python3"))
        .arg(arg("plugin", "FILE", "The plugin [default: beside this program, or where a package puts it]").value_parser(value_parser!(PathBuf)))
        .arg(arg("seed", "N", "Seed of the data [default: another each time]"))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("One JSON object"))
}

/// What the command line asks for, checked.
#[derive(Debug)]
struct Options {
    backends: Vec<String>,
    is_gpu: bool,
    gpus: Option<[String; 2]>,
    turns: u32,
    seconds: f64,
    parameters: Vec<(String, String)>,
    python: String,
    seed: u64,
}

fn options(m: &ArgMatches) -> Result<Options, Error> {
    let text = |name: &str| m.get_one::<String>(name).map(String::as_str);
    let given = |name: &str| text(name).expect("has a default");
    let is_gpu = given("memory") == "gpu";
    let gpus = match text("gpus") {
        None => None,
        Some(list) if !is_gpu => return Err(Error::flag("gpus", list, "none without --memory gpu")),
        Some(list) => match list.split(',').map(str::trim).collect::<Vec<_>>()[..] {
            [a, b] if !a.is_empty() && !b.is_empty() => Some([a.to_owned(), b.to_owned()]),
            _ => return Err(Error::flag("gpus", list, "two, as in 0,1; they may be one")),
        },
    };
    let seconds = given("seconds").parse().ok().filter(|seconds| (0.01..=60.0).contains(seconds));
    let mut parameters = Vec::new();
    for word in m.get_many::<String>("set").into_iter().flatten() {
        let (key, value) =
            word.split_once('=').ok_or_else(|| Error::flag("set", word, "KEY=VALUE, as in qp=tcp"))?;
        parameters.push((key.to_owned(), value.to_owned()));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seed = match text("seed") {
        None => now.as_micros() as u64,
        Some(v) => v.parse().map_err(|_| Error::flag("seed", v, "a whole number below 2^64"))?,
    };
    let mut backends: Vec<String> = Vec::new();
    for name in m.get_many::<String>("backend").into_iter().flatten() {
        if name.is_empty() || backends.contains(name) {
            return Err(Error::flag("backend", name, "names, each once, with commas between"));
        }
        backends.push(name.clone());
    }
    Ok(Options {
        backends,
        is_gpu,
        gpus,
        turns: crate::flags::number(m, "turns", 1, 1000)?.expect("has a default"),
        seconds: seconds.ok_or_else(|| Error::flag("seconds", given("seconds"), "0.01 to 60"))?,
        parameters,
        python: given("python").into(),
        seed,
    })
}

/// The NIXL of a Python.
#[derive(Debug, Deserialize)]
struct Nixl {
    /// Name and version.
    wheel: String,
    module: String,
    libraries: PathBuf,
    /// The folder for NIXL_PLUGIN_DIR.
    plugins: PathBuf,
    /// The Python's version.
    python: String,
    /// Where there are several wheels.
    chosen: Option<String>,
}

/// Finds the Python's NIXL, and makes the folder from which it loads its backends and `plugin`.
fn nixl(python: &str, plugin: &Path, folder: &Path) -> Result<Nixl, String> {
    let ran = pair::python(python, folder)
        .arg("prepare")
        .args([plugin, folder])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("a Python ({python}: {e}): name one that has NIXL with --python"))?;
    let text = String::from_utf8_lossy(&ran.stdout);
    let failed = |why: &str| format!("NIXL ({why}), or name another Python with --python than {python}");
    match text.lines().find_map(Said::of) {
        Some(Said::Good(found)) => serde_json::from_value(found).map_err(|e| failed(&e.to_string())),
        Some(Said::Failed(why)) => Err(failed(&why)),
        None => {
            let said = String::from_utf8_lossy(&ran.stderr);
            Err(failed(said.lines().next_back().unwrap_or("the Python says nothing")))
        }
    }
}

/// The GPU that each process is to see.
fn gpus(options: &Options) -> Result<Option<[String; 2]>, String> {
    if !options.is_gpu {
        return Ok(None);
    }
    if pair::is_played() {
        return Ok(Some(["0".into(), "0".into()]));
    }
    let found = pushgate::probe_cuda().map_err(|reason| {
        format!("a GPU ({reason}): install NVIDIA's driver (`nvidia-smi` then shows the GPU), or use --memory host")
    })?;
    if options.gpus.is_some() {
        return Ok(options.gpus.clone());
    }
    let shown = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let named: Vec<&str> = shown.split(',').map(str::trim).filter(|gpu| !gpu.is_empty()).collect();
    let gpu = |index: u32| {
        let index = index.min(found.devices - 1) as usize;
        named.get(index).map_or_else(|| index.to_string(), |gpu| (*gpu).to_owned())
    };
    Ok(Some([gpu(0), gpu(1)]))
}

/// Turns, each with the number of its backend.
type Turns = Vec<(usize, Turn)>;

/// All turns, and why backends failed. One that failed is not run again.
fn turns(plan: &pair::Plan, options: &Options) -> Result<(Turns, Vec<String>)> {
    let rows = Shape::all();
    let bar = output::bar(u64::from(options.turns) * (options.backends.len() * rows.len()) as u64)?;
    let (mut turns, mut failed) = (Turns::new(), Vec::new());
    let mut left: Vec<usize> = (0..options.backends.len()).collect();
    for turn in 1..=options.turns {
        for number in left.clone() {
            let name = &options.backends[number];
            let parameters = if number == 0 { &options.parameters[..] } else { &[] };
            let run = || Pair::start(plan, name, parameters)?.turn(&rows, &bar);
            match run() {
                Ok(ended) => turns.push((number, ended)),
                Err(e) if signals::caught().is_some() => return Err(e),
                Err(e) => {
                    left.retain(|other| *other != number);
                    failed.push(format!("{name} failed in turn {turn}: {e:#}"));
                }
            }
        }
    }
    bar.finish_and_clear();
    Ok((turns, failed))
}

pub fn run(m: &ArgMatches) -> Result<()> {
    let options = options(m)?;
    signals::catch(None);
    let folder = Folder::new(None, "nixl-check")?;
    for (file, text) in FILES {
        let path = folder.path().join(file);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    let named = m.get_one::<PathBuf>("plugin").map(PathBuf::as_path);
    let plugin = PLUGIN.find(named, std::env::current_exe().ok().as_deref());
    // Without the plugin the folder is made in vain, and says what else is missing.
    let nixl = nixl(&options.python, plugin.as_deref().unwrap_or(Path::new(PLUGIN.file)), folder.path());
    let (plugin, nixl, gpus) = match (plugin, nixl, gpus(&options)) {
        (Ok(plugin), Ok(nixl), Ok(gpus)) => (plugin, nixl, gpus),
        (plugin, nixl, gpus) => {
            let missing = [gpus.err(), nixl.err(), plugin.err()];
            let lines: String = missing.into_iter().flatten().map(|line| format!("\n  {line}")).collect();
            return Err(Input(format!("nixl-check needs what this host lacks:{lines}")).into());
        }
    };
    if let Some(chosen) = &nixl.chosen {
        errln!("pushgate: warning: {chosen}");
    }
    let plan = pair::Plan {
        python: options.python.clone(),
        folder: folder.path().to_owned(),
        module: nixl.module.clone(),
        plugins: nixl.plugins.clone(),
        gpus: gpus.clone(),
        seconds: options.seconds,
        seed: options.seed,
    };
    let (turns, failed) = turns(&plan, &options)?;
    let rows = table::rows(&options.backends, &turns);
    let used: Vec<(&str, &str)> = (options.backends.iter().enumerate())
        .filter_map(|(number, name)| {
            let turn = turns.iter().rev().find(|(of, _)| *of == number)?;
            Some((name.as_str(), turn.1.way.as_str()))
        })
        .collect();
    let devices = turns.iter().find_map(|(_, turn)| turn.devices.clone());
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let memory = match (&gpus, &devices) {
        (Some([a, b]), Some([first, second])) => {
            format!("memory of GPU {a} ({first}) and GPU {b} ({second})")
        }
        (Some([a, b]), None) => format!("memory of GPUs {a} and {b}"),
        (None, _) => "host memory".into(),
    };
    let about = format!("{}, Python {}, {memory}, {cores} cores", nixl.wheel, nixl.python);
    if m.get_flag("json") {
        let used: serde_json::Map<_, _> =
            used.iter().map(|(name, way)| ((*name).into(), json!(way))).collect();
        out!(
            "{}\n",
            serde_json::to_string_pretty(&json!({
                "about": about,
                "nixl": nixl.libraries,
                "plugin": plugin,
                "gpus": gpus,
                "cores": cores,
                "turns": options.turns,
                "seconds": options.seconds,
                "seed": options.seed,
                "used": used,
                "failed": failed,
                "rows": rows,
            }))?
        )?;
    } else {
        out!("# {about}\n# {}\n# {}\n", nixl.libraries.display(), plugin.display())?;
        out!(
            "# {} s a row, the median of its transfers and of the turns ({}); after the first transfer of each row all bytes of both \
             processes are checked (seed {})\n",
            options.seconds,
            options.turns,
            options.seed
        )?;
        for (name, way) in used {
            out!("# {name}: {way}\n")?;
        }
        out!("{}", table::text(&rows))?;
    }
    let wrong = failures(&options.backends, &rows, failed);
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\npushgate: "));
    }
    match m.get_flag("json") {
        true => errln!("# {RIGHT}"),
        false => out!("# {RIGHT}\n")?,
    }
    Ok(())
}

const RIGHT: &str = "right: no wrong byte, nothing failed";

/// Why the check fails.
fn failures(backends: &[String], rows: &[Row], failed: Vec<String>) -> Vec<String> {
    let mut all = failed;
    for backend in backends {
        let wrong: u64 = rows.iter().filter(|row| row.backend == *backend).map(|row| row.wrong).sum();
        if wrong > 0 {
            all.push(format!("{wrong} wrong bytes by {backend}"));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &str) -> Result<Options, Error> {
        let words = ["nixl-check"].into_iter().chain(args.split_whitespace());
        options(&command().try_get_matches_from(words).unwrap_or_else(|e| panic!("{e}")))
    }

    #[test]
    fn backends_and_their_parameters_are_named() {
        let default = parse("").unwrap();
        assert_eq!(
            (default.backends.join(" "), default.turns, default.is_gpu),
            ("PUSHGATE UCX".into(), 3, false)
        );
        let given =
            parse("--backend A --set qp=tcp --set host=a=b --memory gpu --gpus 1,1 --seconds 0.2 --seed 5")
                .unwrap();
        assert_eq!(given.backends, ["A"]);
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(given.parameters, [pair("qp", "tcp"), pair("host", "a=b")]);
        assert_eq!((given.gpus, given.seconds, given.seed), (Some(["1".into(), "1".into()]), 0.2, 5));
    }

    #[test]
    fn wrong_arguments_are_quoted_with_what_is_allowed() {
        for (args, says) in [
            ("--turns 0", "invalid turns `0` (from --turns): expected 1 to 1000"),
            ("--seconds 0", "invalid seconds `0` (from --seconds): expected 0.01 to 60"),
            ("--seed x", "invalid seed `x` (from --seed): expected a whole number below 2^64"),
            ("--set qp", "invalid set `qp` (from --set): expected KEY=VALUE, as in qp=tcp"),
            ("--gpus 0,1", "invalid gpus `0,1` (from --gpus): expected none without --memory gpu"),
            (
                "--memory gpu --gpus 0",
                "invalid gpus `0` (from --gpus): expected two, as in 0,1; they may be one",
            ),
            (
                "--backend A,A",
                "invalid backend `A` (from --backend): expected names, each once, with commas between",
            ),
        ] {
            assert_eq!(parse(args).unwrap_err().to_string(), says, "{args}");
        }
    }
}
