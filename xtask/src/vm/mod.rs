//! `cargo xtask vm`: a virtual machine with a kernel of its own, for what needs one that this host
//! may not have: RDMA devices, kernel modules. docs/testing.md tells more.

mod guest;
mod host;
mod initramfs;
mod ivshmem;
pub mod kernel;
mod pack;
pub mod suites;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context, Result, bail, ensure};

use self::guest::{Ended, Job};
use self::suites::{SUITES, Suite};
use crate::process;
use crate::programs::{self, Kind, Program};
use crate::progress::{self, Guard, SILENCE};
use crate::steps::{Bench, Outcome};
use crate::system::{self, Need};
use crate::{Paths, kmod, package};

/// What the virtual machine needs.
pub const NEEDS: &[Need] = &[Need::Qemu, Need::Busybox, Need::RdmaTools, Need::Kmod];
/// What the suite `package` needs: the machine, our module for comparison, and the package.
pub const PACKAGE_NEEDS: &[Need] = &[
    Need::Qemu,
    Need::Busybox,
    Need::RdmaTools,
    Need::Kmod,
    Need::ModuleBuild,
    Need::Cxx,
    Need::Packaging,
    Need::Installing,
];

/// Seconds that a command may take by default.
const COMMAND_LIMIT: u64 = 600;
/// Memory of a guest in MiB by default.
const MEMORY: u32 = 2048;

/// The options of `cargo xtask vm`.
#[derive(clap::Args)]
pub struct Options {
    /// Run these suites, those of one guest first.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', conflicts_with = "command",
          value_parser = clap::builder::PossibleValuesParser::new(suites::names()))]
    suite: Vec<String>,
    /// Show the suites and run nothing.
    #[arg(long)]
    list: bool,
    /// Run nothing: put the suite, and all that a host without packages needs to run it, into FILE.tar.xz.
    #[arg(long, value_name = "FILE", requires = "suite")]
    pack: Option<PathBuf>,
    /// How many machines run the command.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with = "suite")]
    guests: u8,
    /// End what runs longer, boot and all [default: 600 for a command, none for suites, which end where
    /// they are silent for too long].
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Memory of each machine.
    #[arg(long, value_name = "MiB", default_value_t = MEMORY, value_parser = clap::value_parser!(u32).range(512..))]
    memory: u32,
    /// Boot this one of Debian's kernels [default: the newest of Debian 12 itself].
    #[arg(long, value_name = "RELEASE")]
    kernel: Option<String>,
    /// Run in the guest as root, in the repository.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Runs a command or suites; the exit status is theirs.
pub fn run(paths: &Paths, options: &Options) -> Result<ExitCode> {
    if options.list || (options.suite.is_empty() && options.command.is_empty()) {
        list();
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(reason) = system::unmet(NEEDS) {
        bail!("the virtual machine {reason}");
    }
    let kernel = kernel::get(paths, options.kernel.as_deref(), Guard::NONE)?;
    if let Some(file) = &options.pack {
        let [name] = &options.suite[..] else { bail!("--pack takes one suite") };
        let suite = SUITES.iter().find(|suite| suite.name == name).context("clap knows the names")?;
        pack::pack(paths, &kernel, suite, file)?;
        return Ok(ExitCode::SUCCESS);
    }
    if options.command.is_empty() {
        let named = |suite: &&Suite| options.suite.iter().any(|name| name == suite.name);
        let chosen: Vec<_> = SUITES.iter().filter(named).collect();
        let limit = options.limit.map(Duration::from_secs);
        let guard = Guard::new(Some(SILENCE), None);
        let report = run_suites(paths, &kernel, &chosen, limit, options.memory, guard)?;
        for reason in report.skips {
            println!("{reason}");
        }
        return Ok(ExitCode::from(report.code));
    }
    let words: Vec<_> = options.command.iter().map(|word| process::quote(OsStr::new(word))).collect();
    let job = Job {
        script: format!("exec {}\n", words.join(" ")),
        files: Vec::new(),
        devices: Vec::new(),
        host: None,
        guests: options.guests,
        memory: options.memory,
        limit: Some(Duration::from_secs(options.limit.unwrap_or(COMMAND_LIMIT))),
        guard: Guard::NONE,
    };
    let ended = guest::run(paths, &kernel, &job)?;
    Ok(ExitCode::from(first_failure(&ended.codes?)))
}

/// Runs what [`pack`] has put into a folder, on the host where it was unpacked.
pub fn run_packed(folder: &Path) -> Result<ExitCode> {
    pack::run(folder)
}

/// A step of `cargo xtask test`: in one boot, the suites for this many machines that run by
/// default.
pub fn step(bench: &mut Bench, guests: u8) -> Result<Outcome> {
    step_of(bench, |suite| suite.default && suite.guests == guests)
}

/// A step that is one suite.
pub fn step_of_one(bench: &mut Bench, name: &str) -> Result<Outcome> {
    step_of(bench, |suite| suite.name == name)
}

fn step_of(bench: &mut Bench, is_chosen: impl Fn(&Suite) -> bool) -> Result<Outcome> {
    if let Some(reason) = kernel::unavailable() {
        return Ok(Outcome::Skipped(reason));
    }
    let kernel = kernel::get(&bench.paths, None, bench.guard)?;
    let chosen: Vec<_> = SUITES.iter().filter(|suite| is_chosen(suite)).collect();
    let report = run_suites(&bench.paths, &kernel, &chosen, None, MEMORY, bench.guard)?;
    bench
        .skips
        .extend(report.skips.iter().map(|line| line.trim_start_matches("SKIPPED:").trim().to_string()));
    if report.code != 0 {
        bail!("{}", report.failures.join("; "));
    }
    Ok(Outcome::Passed)
}

fn list() {
    for suite in SUITES {
        let guests = if suite.guests == 1 { "1 guest " } else { "2 guests" };
        println!("{:<16} {guests} {:>4} s  {}", suite.name, suite.budget, suite.about);
    }
}

/// The results of suites.
#[derive(Default)]
struct Report {
    /// The exit status of the first suite that failed, or 0.
    code: u8,
    /// What failed and how, in words.
    failures: Vec<String>,
    /// What tests have left out.
    skips: Vec<String>,
}

fn run_suites(
    paths: &Paths,
    kernel: &kernel::Kernel,
    chosen: &[&Suite],
    limit: Option<Duration>,
    memory: u32,
    guard: Guard,
) -> Result<Report> {
    let mut report = Report::default();
    for guests in [1, 2] {
        let suites: Vec<_> = chosen.iter().copied().filter(|suite| suite.guests == guests).collect();
        if suites.is_empty() {
            continue;
        }
        // The limit covers what runs, not the compiler.
        let mut settings = build(paths, &suites, &[], guard)?;
        if suites.iter().any(|suite| suite.module) {
            let modules = kmod::build(paths, kernel, guard)?;
            settings.push_str(&export("KMOD_DIR", &modules));
        }
        if suites.iter().any(|suite| suite.package) {
            if let Some(reason) = system::unmet(PACKAGE_NEEDS) {
                bail!("installing the package in the virtual machine {reason}");
            }
            settings.push_str(&export("PACKAGE", &package::build(paths, guard)?));
            settings.push_str(&export("HEADERS_DIR", &kernel::headers(paths, kernel, guard)?));
        }
        let patience = progress::patience(progress::slowness());
        settings.push_str(&format!("export VM_PATIENCE={patience} _PUSHGATE_TEST_PATIENCE={patience}\n"));
        let mut left = &suites[..];
        // A failed suite ends its machine, so that its effects do not reach the next suite.
        while !left.is_empty() {
            let start = Instant::now();
            let job = suites_job(left, &settings, memory, limit, guard);
            let ended = guest::run(paths, kernel, &job)?;
            let run = report.add(left, ended)?;
            println!("{guests} guest(s), boot to power-off: {:.1} s", start.elapsed().as_secs_f64());
            left = &left[run..];
        }
    }
    Ok(report)
}

/// The job of suites for one kind of machine, in one boot.
fn suites_job(suites: &[&Suite], settings: &str, memory: u32, limit: Option<Duration>, guard: Guard) -> Job {
    let mut devices: Vec<_> = suites.iter().flat_map(|suite| suite.devices).copied().collect();
    devices.sort_by_key(|device| device.slot);
    devices.dedup();
    Job {
        script: suites_script(suites, settings),
        files: suites.iter().map(|suite| (format!("suite-{}", suite.name), suite_file(suite))).collect(),
        guests: suites[0].guests,
        devices,
        host: host_script(suites, settings),
        memory,
        limit,
        guard,
    }
}

impl Report {
    /// Reads what the guests have written about each suite, and prints it. Returns how many suites
    /// have run; the others did not begin, because a suite before them failed.
    fn add(&mut self, suites: &[&Suite], ended: Ended) -> Result<usize> {
        let guests = if suites[0].guests == 1 { 1..=1 } else { 1..=2 };
        let folders: Vec<_> = guests.map(|number: u8| ended.folder.join(number.to_string())).collect();
        let mut error = ended.codes.err();
        let failures = self.failures.len();
        let mut run = 0;
        for suite in suites {
            let results = folders.iter().map(|folder| folder.join(format!("suite-{}", suite.name)));
            let results: Result<Option<Vec<_>>> = results.map(|file| read_result(&file)).collect();
            let (code, verdict, seconds) = match results? {
                Some(results) => {
                    let code = results.iter().map(|(code, _)| *code).find(|code| *code != 0).unwrap_or(0);
                    let seconds = results.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
                    let verdict =
                        if code == 0 { "passed".into() } else { format!("failed: exit code {code}") };
                    (code, verdict, Some(seconds))
                }
                // The suite was running when the machine ended.
                None => match error.take() {
                    Some(error) => (1, format!("failed: {error:#}"), None),
                    None => break,
                },
            };
            run += 1;
            let budget = suite.budget;
            match seconds {
                Some(s) if s > budget as f64 => {
                    println!("---- {}: {verdict} in {s:.1} s, over its budget of {budget} s", suite.name)
                }
                Some(s) => println!("---- {}: {verdict} in {s:.1} s", suite.name),
                None => println!("---- {}: {verdict}", suite.name),
            }
            if code != 0 {
                self.failures.push(format!("{} {verdict}", suite.name));
                self.code = if self.code == 0 { code } else { self.code };
            }
        }
        // All suites have passed, but the machine did not power off.
        if let Some(error) = error {
            self.failures.push(format!("after the suites: {error:#}"));
            self.code = 1;
        }
        for folder in &folders {
            let log = fs::read_to_string(folder.join("out/skips.txt")).unwrap_or_default();
            self.skips.extend(log.lines().filter(|line| !line.trim().is_empty()).map(str::to_string));
        }
        if self.failures.len() > failures {
            println!("logs: {}", ended.folder.display());
        }
        ensure!(run > 0, "no suite began, though the machine came up");
        Ok(run)
    }
}

/// A suite's exit status and seconds, as suites_script writes them; `None` if it has not ended.
fn read_result(file: &Path) -> Result<Option<(u8, f64)>> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    let wrong = || format!("{} says {text:?}, not an exit code and seconds", file.display());
    let (code, seconds) = text.trim().split_once(' ').with_context(wrong)?;
    Ok(Some((code.parse().with_context(wrong)?, seconds.parse().with_context(wrong)?)))
}

fn first_failure(codes: &[u8]) -> u8 {
    codes.iter().copied().find(|code| *code != 0).unwrap_or(0)
}

/// Builds what the suites need; returns the shell variables that say where it is.
fn build(paths: &Paths, suites: &[&Suite], variables: &[(&str, &OsStr)], guard: Guard) -> Result<String> {
    let release = paths.target.join("release");
    let mut settings = export("BIN_DIR", &release);
    let mut done: Vec<&[&str]> = Vec::new();
    for call in suites.iter().flat_map(|suite| suite.build) {
        if done.contains(call) {
            continue;
        }
        done.push(call);
        let mut arguments = call.to_vec();
        if call[0] == "test" {
            arguments.push("--no-run");
        }
        println!("$ cargo {} --release", arguments.join(" "));
        for program in programs::build(paths, &arguments, variables, guard)? {
            settings.push_str(&variable(&program));
        }
    }
    Ok(settings)
}

fn variable(program: &Program) -> String {
    let kind = match program.kind {
        Kind::Bin => "BIN",
        Kind::Example => "EXAMPLE",
        Kind::Test => "TEST",
    };
    let name = program.name.replace('-', "_").to_uppercase();
    export(&format!("{kind}_{name}"), &program.path)
}

fn export(name: &str, path: &Path) -> String {
    format!("export {name}={}\n", process::quote(path.as_os_str()))
}

/// A script that runs one suite after the other until one fails in any guest. Each suite runs in a
/// PID namespace of its own, so that processes it leaves end with it, and with empty folders for
/// temporary files.
fn suites_script(suites: &[&Suite], settings: &str) -> String {
    let mut script = settings.to_string();
    script.push_str(include_str!("suites.sh"));
    for suite in suites {
        script.push_str(&format!("suite {}\n", suite.name));
    }
    script
}

/// What the host runs for a guest: the script of the suite that has one.
fn host_script(suites: &[&Suite], settings: &str) -> Option<String> {
    let mut scripts = suites.iter().filter_map(|suite| suite.host);
    let script = scripts.next()?;
    assert!(scripts.next().is_none(), "who asks is not told apart");
    Some(format!("{settings}{script}"))
}

fn suite_file(suite: &Suite) -> String {
    let meet = if suite.guests == 2 { "together start\n" } else { "" };
    format!(". /run/vm/lib.sh\n{meet}{}", suite.script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_variable_is_a_shells() {
        let program = Program { name: "my-test".into(), path: "/a b/my-test-1".into(), kind: Kind::Test };
        assert_eq!(variable(&program), "export TEST_MY_TEST='/a b/my-test-1'\n");
    }

    #[test]
    fn the_first_failure_is_the_exit_code() {
        assert_eq!(first_failure(&[0, 7, 3]), 7);
        assert_eq!(first_failure(&[0, 0]), 0);
    }
}
