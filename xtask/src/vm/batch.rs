//! Suites that share a boot: what is built for them, the job that runs them, and their results.

use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context, Result, bail, ensure};

use super::guest::{self, Ended, Job};
use super::kernel::{self, Kernel};
use super::siw;
use super::suites::{PACKAGE_NEEDS, Suite};
use crate::output::{self, Output, say};
use crate::paths::Paths;
use crate::programs::{self, Kind, Program};
use crate::progress::{self, Guard};
use crate::{kmod, package, process, system};

/// The results of suites.
#[derive(Default)]
pub struct Report {
    /// The exit status of the first suite that failed, or 0.
    pub code: u8,
    /// What failed and how, in words.
    pub failures: Vec<String>,
    /// What tests have left out.
    pub skips: Vec<String>,
    /// The suites that were left out, each with what it lacks.
    pub lacking: Vec<String>,
}

/// Runs the suites: those for one machine in one boot, then those for two. A suite that fails ends its boot, and the suites
/// after it get another.
pub fn run_suites(
    paths: &Paths,
    kernel: &Kernel,
    chosen: &[&Suite],
    limit: Option<Duration>,
    memory: u32,
    guard: Guard,
) -> Result<Report> {
    let mut report = Report::default();
    for guests in [1, 2] {
        let mut suites: Vec<_> = chosen.iter().copied().filter(|suite| suite.guests == guests).collect();
        if suites.is_empty() {
            continue;
        }
        // The source of software iWARP is one thread's work for some ten seconds, so cargo builds meanwhile.
        let wants_siw = suites.iter().any(|suite| suite.siw);
        let (siw, settings) = thread::scope(|scope| {
            let siw = scope.spawn(|| {
                let source = || wants_siw.then(|| siw::source(paths, kernel, guard));
                (output::collect(source), progress::take_usage())
            });
            // The limit covers what runs, not the compiler.
            let settings = build(paths, &suites, &[], guard);
            let ((source, output), usage) = siw.join().expect("no command panics");
            progress::add(usage);
            Output::of_this_thread().write(&output);
            (source, settings)
        });
        let mut settings = settings?;
        if let Some(Err(error)) = &siw {
            let (lacking, left): (Vec<_>, _) = suites.into_iter().partition(|suite| suite.siw);
            let reason = |suite: &&Suite| format!("suite {}: {error:#}", suite.name);
            report.lacking.extend(lacking.iter().map(reason));
            suites = left;
        }
        if suites.is_empty() {
            continue;
        }
        if suites.iter().any(|suite| suite.module) {
            let modules = kmod::build(paths, kernel, guard)?;
            settings.push_str(&export("KMOD_DIR", &modules));
        }
        if let Some(Ok(source)) = siw {
            let module = siw::build(paths, kernel, &source, guard)?;
            settings.push_str(&export("SIW_DIR", &module));
        }
        if suites.iter().any(|suite| suite.package) {
            if let Some(reason) = system::unmet(PACKAGE_NEEDS) {
                bail!("installing the package in the virtual machine {reason}");
            }
            let package = package::build(
                paths,
                package::Arch::HOST,
                package::For::Users,
                &[package::Kind::Deb],
                guard,
            )?
            .remove(0);
            settings.push_str(&export("PACKAGE", &package));
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
            say!("{guests} guest(s), boot to power-off: {:.1} s", start.elapsed().as_secs_f64());
            left = &left[run..];
        }
    }
    Ok(report)
}

/// The job of suites for one kind of machine, in one boot.
pub fn suites_job(
    suites: &[&Suite],
    settings: &str,
    memory: u32,
    limit: Option<Duration>,
    guard: Guard,
) -> Job {
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
    pub fn add(&mut self, suites: &[&Suite], ended: Ended) -> Result<usize> {
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
                    say!("---- {}: {verdict} in {s:.1} s, over its budget of {budget} s", suite.name)
                }
                Some(s) => say!("---- {}: {verdict} in {s:.1} s", suite.name),
                None => say!("---- {}: {verdict}", suite.name),
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
            say!("logs: {}", ended.folder.display());
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

/// Builds what the suites need; returns the shell variables that say where it is.
pub fn build(paths: &Paths, suites: &[&Suite], variables: &[(&str, &OsStr)], guard: Guard) -> Result<String> {
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
        say!("$ cargo {} --release", arguments.join(" "));
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
        let program = Program {
            name: "my-test".into(),
            path: "/a b/my-test-1".into(),
            package: "/a b".into(),
            kind: Kind::Test,
        };
        assert_eq!(variable(&program), "export TEST_MY_TEST='/a b/my-test-1'\n");
    }
}
