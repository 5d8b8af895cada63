//! `cargo xtask vm`: a virtual machine with a kernel of its own, for what needs one that this host
//! may not have: RDMA devices, kernel modules. docs/testing.md tells more.

mod guest;
mod host;
mod initramfs;
mod ivshmem;
pub mod kernel;
mod pack;
mod suites;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::guest::{Ended, Job};
use self::suites::{SUITES, Suite};
use crate::process::{self, Deadline};
use crate::programs::{self, Kind, Program};
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

/// What a command may take if nobody says.
const COMMAND_LIMIT: u64 = 600;
/// Memory of a guest in MiB if nobody says.
const MEMORY: u32 = 2048;

/// The command line.
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
    /// Kill what runs longer, boot and all [default: 600 for a command, the sum of their limits for suites].
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
    let kernel = kernel::get(paths, options.kernel.as_deref(), None)?;
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
        let report = run_suites(paths, &kernel, &chosen, limit, options.memory, None)?;
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
        limit: Duration::from_secs(options.limit.unwrap_or(COMMAND_LIMIT)),
        deadline: None,
    };
    let ended = guest::run(paths, &kernel, &job)?;
    Ok(ExitCode::from(first_failure(&ended.codes)))
}

/// Runs what [`pack`] has put into a folder, on the host where it was unpacked.
pub fn run_packed(folder: &Path) -> Result<ExitCode> {
    pack::run(folder)
}

/// A step of `cargo xtask test`: the suites for so many machines that are on by default, in one boot.
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
    let kernel = kernel::get(&bench.paths, None, bench.deadline)?;
    let chosen: Vec<_> = SUITES.iter().filter(|suite| is_chosen(suite)).collect();
    let report = run_suites(&bench.paths, &kernel, &chosen, None, MEMORY, bench.deadline)?;
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
        println!("{:<16} {guests} {:>4} s  {}", suite.name, suite.limit, suite.about);
    }
}

/// How suites ended.
#[derive(Default)]
struct Report {
    /// The exit status of the first that failed, or 0.
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
    deadline: Deadline,
) -> Result<Report> {
    let mut report = Report::default();
    for guests in [1, 2] {
        let suites: Vec<_> = chosen.iter().copied().filter(|suite| suite.guests == guests).collect();
        if suites.is_empty() {
            continue;
        }
        // The limit is on what runs, not on the compiler.
        let mut settings = build(paths, &suites, &[], deadline)?;
        if suites.iter().any(|suite| suite.module) {
            let modules = kmod::build(paths, kernel, deadline)?;
            settings.push_str(&export("KMOD_DIR", &modules));
        }
        if suites.iter().any(|suite| suite.package) {
            if let Some(reason) = system::unmet(PACKAGE_NEEDS) {
                bail!("installing the package in the virtual machine {reason}");
            }
            settings.push_str(&export("PACKAGE", &package::build(paths, deadline)?));
            settings.push_str(&export("HEADERS_DIR", &kernel::headers(paths, kernel, deadline)?));
        }
        let mut devices: Vec<_> = suites.iter().flat_map(|suite| suite.devices).copied().collect();
        devices.sort_by_key(|device| device.slot);
        devices.dedup();
        let own = Duration::from_secs(suites.iter().map(|suite| suite.limit).sum());
        let start = Instant::now();
        let job = Job {
            script: suites_script(&suites, &settings),
            files: suites.iter().map(|suite| (format!("suite-{}", suite.name), suite_file(suite))).collect(),
            guests,
            devices,
            host: host_script(&suites, &settings),
            memory,
            // Each is held to its own limit in the guest; this is for a guest that hangs.
            limit: limit.unwrap_or(own + guest::BOOT + Duration::from_secs(15)),
            deadline,
        };
        let ended = guest::run(paths, kernel, &job)?;
        report.add(&suites, &ended)?;
        println!("{guests} guest(s), boot to power-off: {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(report)
}

impl Report {
    /// Reads what the guests have written of each suite, and says it.
    fn add(&mut self, suites: &[&Suite], ended: &Ended) -> Result<()> {
        let guests = || (1..=ended.codes.len()).map(|number| ended.folder.join(number.to_string()));
        for suite in suites {
            let mut codes = Vec::new();
            let mut seconds: f64 = 0.0;
            for folder in guests() {
                let file = folder.join(format!("suite-{}", suite.name));
                let (code, took) = read_result(&file)
                    .with_context(|| format!("{}: the guest has left no result", suite.name))?;
                codes.push(code);
                seconds = seconds.max(took);
            }
            let code = first_failure(&codes);
            let verdict = match code {
                0 => "passed".to_string(),
                124 | 137 => format!("failed: exit code {code}; its limit is {} s", suite.limit),
                code => format!("failed: exit code {code}"),
            };
            println!("---- {}: {verdict} in {seconds:.1} s", suite.name);
            if code != 0 {
                self.failures.push(format!("{} {verdict}", suite.name));
                self.code = if self.code == 0 { code } else { self.code };
            }
        }
        for folder in guests() {
            let log = fs::read_to_string(folder.join("out/skips.txt")).unwrap_or_default();
            self.skips.extend(log.lines().filter(|line| !line.trim().is_empty()).map(str::to_string));
        }
        if !self.failures.is_empty() {
            println!("logs: {}", ended.folder.display());
        }
        Ok(())
    }
}

/// A suite's exit status and seconds, as suites_script writes them.
fn read_result(file: &Path) -> Result<(u8, f64)> {
    let text = fs::read_to_string(file)?;
    let (code, seconds) = text.trim().split_once(' ').context("no two numbers")?;
    Ok((code.parse()?, seconds.parse()?))
}

fn first_failure(codes: &[u8]) -> u8 {
    codes.iter().copied().find(|code| *code != 0).unwrap_or(0)
}

/// Builds what the suites need; returns the shell variables that say where it is.
fn build(
    paths: &Paths,
    suites: &[&Suite],
    variables: &[(&str, &OsStr)],
    deadline: Deadline,
) -> Result<String> {
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
        for program in programs::build(paths, &arguments, variables, deadline)? {
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

/// Runs one suite after the other, whatever becomes of the one before.
fn suites_script(suites: &[&Suite], settings: &str) -> String {
    let mut script = settings.to_string();
    script.push_str(
        r#"
first=0
suite() {
    export VM_SUITE=$1
    echo "==== $1"
    read -r start _ </proc/uptime
    timeout -k 5 "$2" /bin/sh -eu "/run/vm/suite-$1"
    code=$?
    read -r end _ </proc/uptime
    [ "$first" != 0 ] || first=$code
    seconds=$(awk "BEGIN { print $end - $start }")
    result=/run/share/$VM_GUEST/suite-$1
    echo "$code $seconds" >"$result.part"
    mv "$result.part" "$result"
}
"#,
    );
    for suite in suites {
        script.push_str(&format!("suite {} {}\n", suite.name, suite.limit));
    }
    script.push_str("exit $first\n");
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
