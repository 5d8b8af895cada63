//! `cargo xtask vm`: a virtual machine with a kernel of its own, for what needs one that this host
//! may not have: RDMA devices, kernel modules. docs/testing.md tells more.

mod batch;
mod guest;
mod host;
pub mod initramfs;
mod ivshmem;
pub mod kernel;
mod pack;
mod qemu;
mod siw;
pub mod suites;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use self::batch::run_suites;
use self::guest::Job;
use self::suites::{SUITES, Suite};
use crate::bench::{Bench, Outcome};
use crate::paths::Paths;
use crate::process;
use crate::progress::{Guard, SILENCE};
use crate::system::{self, Need};

/// What the virtual machine needs.
pub const NEEDS: &[Need] = &[Need::Qemu, Need::Busybox, Need::RdmaTools, Need::Kmod];

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
        if !report.lacking.is_empty() {
            bail!("{}", report.lacking.join("; "));
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
    if report.lacking.len() == chosen.len() {
        return Ok(Outcome::Skipped(report.lacking.join("; ")));
    }
    bench.skips.extend(report.lacking);
    Ok(Outcome::Passed)
}

fn list() {
    for suite in SUITES {
        let guests = if suite.guests == 1 { "1 guest " } else { "2 guests" };
        println!("{:<16} {guests} {:>4} s  {}", suite.name, suite.budget, suite.about);
    }
}

fn first_failure(codes: &[u8]) -> u8 {
    codes.iter().copied().find(|code| *code != 0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_the_exit_code() {
        assert_eq!(first_failure(&[0, 7, 3]), 7);
        assert_eq!(first_failure(&[0, 0]), 0);
    }
}
