//! Runs the steps, lane by lane, and reports the results.

use std::fs;
use std::num::NonZero;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use crate::bench::{Bench, Outcome};
use crate::lanes::{Lanes, NICE};
use crate::output::{self, Output, say};
use crate::paths::Paths;
use crate::process;
use crate::progress::{self, Guard, SILENCE};
use crate::steps::{STEPS, Step, When};
use crate::system;

/// The options of the command line.
pub struct Options {
    /// Skips count as failures, except those for lack of a GPU, of a second core, or of sshd.
    pub strict: bool,
    /// Also run the long steps.
    pub full: bool,
    /// Run only the quick steps.
    pub quick: bool,
    /// Install nothing.
    pub no_install: bool,
    /// The time after which the run ends itself, with its summary.
    pub limit: Duration,
    /// Run only these steps; if empty, all.
    pub only: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// Minutes after which a run ends itself: less than the 90 that continuous integration may allow.
pub const LIMIT: u64 = 80;
/// Minutes after which a run with `--full` ends itself.
pub const FULL_LIMIT: u64 = 240;

/// A line of the summary, and what stands below it.
struct Row {
    name: &'static str,
    verdict: Verdict,
    seconds: f64,
    budget: u64,
    /// The CPU time of the step's commands, seconds.
    cpu: f64,
    /// The longest time without output, seconds.
    silence: f64,
    /// [`progress::slowness`], the mean of before and after.
    slowness: f64,
    /// The step ran beside others, so that its seconds do not compare with its budget.
    beside: bool,
    notes: Vec<String>,
}

/// Shows the table of steps.
pub fn list() {
    for step in STEPS {
        let when = match step.when {
            When::Full => "with --full: ",
            When::Quick => "with --quick: ",
            When::Default | When::Always => "",
        };
        println!("{:<11} {:>4} s  {when}{}", step.name, step.budget, step.about);
    }
}

/// Runs the steps that the options name. Exit status 1 if any failed.
pub fn test(paths: Paths, options: &Options) -> Result<ExitCode> {
    paths.scratch("")?;
    let begin = Instant::now();
    let guard = Guard::new(Some(SILENCE), Some(begin + options.limit));
    let named = |step: &&Step| options.only.iter().any(|name| name == step.name);
    let by_default = |step: &&Step| options.only.is_empty() && step.when.is_in(options.quick, options.full);
    let chosen: Vec<_> = STEPS.iter().filter(|step| named(step) || by_default(step)).collect();
    let lanes = Lanes::of(&chosen, thread::available_parallelism().map_or(1, NonZero::get));
    let mut rows = run_all(&lanes, &paths, guard, options)?;
    rows.sort_by_key(|row| STEPS.iter().position(|step| step.name == row.name));
    let failed = summary(&rows, begin.elapsed());
    Ok(match (process::interrupted(), failed) {
        (true, _) => ExitCode::from(130),
        (false, 0) => ExitCode::SUCCESS,
        (false, _) => ExitCode::FAILURE,
    })
}

/// Runs the steps of all lanes.
fn run_all(lanes: &Lanes, paths: &Paths, guard: Guard, options: &Options) -> Result<Vec<Row>> {
    let mut main = Runner::new(paths, guard, options);
    let mut rows = Vec::new();
    for step in &lanes.first {
        rows.push(main.run(step)?);
    }
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        scope.spawn(move || {
            if lanes.beside.is_empty() {
                return;
            }
            // Counts for this thread and for all that it starts. If it fails, the steps run all the same.
            let _ = rustix::process::nice(NICE);
            let mut beside = Runner::new(paths, guard, options);
            for step in &lanes.beside {
                let (row, output) = output::collect(|| beside.run(step));
                if !row.as_ref().is_ok_and(|row| row.verdict != Verdict::Failed) {
                    println!("\n---- {}: failed; its output follows", step.name);
                }
                let _ = sender.send((row, output));
            }
        });
        let show = |(row, output): (Result<Row>, Vec<u8>)| {
            Output::default().write(&output);
            row.map(|row| Row { beside: true, ..row })
        };
        for step in &lanes.main {
            rows.push(main.run(step)?);
            for ended in receiver.try_iter() {
                rows.push(show(ended)?);
            }
        }
        let has_ended = |step: &&&Step| rows.iter().any(|row| row.name == step.name);
        let left: Vec<_> =
            lanes.beside.iter().filter(|step| !has_ended(step)).map(|step| step.name).collect();
        if !left.is_empty() {
            println!("\nwaiting for {}, whose output is shown after each step", left.join(", "));
        }
        for ended in receiver {
            rows.push(show(ended)?);
        }
        Ok(rows)
    })
}

/// Runs the steps of one lane.
struct Runner {
    bench: Bench,
    strict: bool,
    /// [`progress::slowness`] before the next step.
    slowness: f64,
}

impl Runner {
    /// Measures the slowness, so it is made on the thread that runs the steps.
    fn new(paths: &Paths, guard: Guard, options: &Options) -> Runner {
        let bench = Bench {
            paths: paths.clone(),
            step: "",
            guard,
            patience: 1,
            full: options.full,
            no_install: options.no_install,
            skips: Vec::new(),
        };
        Runner { bench, strict: options.strict, slowness: progress::slowness() }
    }

    fn run(&mut self, step: &Step) -> Result<Row> {
        let bench = &mut self.bench;
        bench.step = step.name;
        bench.patience = progress::patience(self.slowness);
        say!("\n==== {}: {}", step.name, step.about);
        let log = bench.skip_log();
        fs::write(&log, "").with_context(|| format!("cannot write {}", log.display()))?;
        bench.skips.clear();
        let start = Instant::now();
        progress::take_usage();
        let result = if process::interrupted() {
            Ok(Outcome::Skipped("interrupted".into()))
        } else if bench.guard.is_over() {
            Err(anyhow!("not run: the time of the whole run was over"))
        } else if let Some(reason) = system::unmet(step.needs) {
            Ok(Outcome::Skipped(reason))
        } else {
            (step.run)(bench)
        };
        let seconds = start.elapsed().as_secs_f64();
        let usage = progress::take_usage();
        bench.skips.extend(counted(&fs::read_to_string(&log).unwrap_or_default()));
        let (verdict, notes) = judge(result, &bench.skips, self.strict);
        for note in &notes {
            say!("{}: {note}", step.name);
        }
        say!("---- {}: {} in {seconds:.1} s", step.name, verdict.name());
        let before = self.slowness;
        self.slowness = progress::slowness();
        Ok(Row {
            name: step.name,
            verdict,
            seconds,
            budget: step.budget,
            cpu: usage.cpu.as_secs_f64(),
            silence: usage.silence.as_secs_f64(),
            slowness: (before + self.slowness) / 2.0,
            beside: false,
            notes,
        })
    }
}

/// The verdict on a step with this result and these parts left out, and the notes below it.
fn judge(result: Result<Outcome>, skips: &[String], strict: bool) -> (Verdict, Vec<String>) {
    // What this machine does not have, and no package brings.
    // A run must not install a server that takes logins from the network.
    let excuses = ["no GPU", "no second core", "no sshd"];
    let excused = |reason: &str| excuses.iter().any(|excuse| reason.starts_with(excuse));
    let forbidden = |reason: &str| strict && !excused(reason);
    let mut notes = Vec::new();
    let mut verdict = match result {
        Ok(Outcome::Passed) => Verdict::Passed,
        Ok(Outcome::Skipped(reason)) => {
            let verdict = if forbidden(&reason) { Verdict::Failed } else { Verdict::Skipped };
            notes.push(format!("skipped: {reason}"));
            verdict
        }
        Err(error) => {
            notes.push(format!("failed: {error:#}"));
            Verdict::Failed
        }
    };
    for reason in skips {
        notes.push(format!("skipped in part: {reason}"));
        if forbidden(reason) {
            verdict = Verdict::Failed;
        }
    }
    (verdict, notes)
}

/// The reasons in a log of skips, each once, in the order in which they came.
fn counted(log: &str) -> Vec<String> {
    let mut reasons: Vec<(&str, usize)> = Vec::new();
    for line in log.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let reason = line.strip_prefix("SKIPPED:").unwrap_or(line).trim();
        match reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, count)) => *count += 1,
            None => reasons.push((reason, 1)),
        }
    }
    let show = |(reason, count): (&str, usize)| match count {
        1 => reason.to_string(),
        n => format!("{reason} ({n} times)"),
    };
    reasons.into_iter().map(show).collect()
}

/// Prints the table; returns how many steps failed.
fn summary(rows: &[Row], took: Duration) -> usize {
    println!("\n==== summary");
    println!(
        "{:<11} {:<8} {:>8} {:>7} {:>7} {:>8} {:>8}",
        "step", "", "seconds", "budget", "cpu", "slowness", "silence"
    );
    for row in rows {
        println!(
            "{:<11} {:<8} {:>8.1} {:>7} {:>7.0} {:>8.1} {:>8.1}{}",
            row.name,
            row.verdict.name(),
            row.seconds,
            row.budget,
            row.cpu,
            row.slowness,
            row.silence,
            if row.beside { "  beside others" } else { "" }
        );
        for note in &row.notes {
            println!("  {}", note.replace('\n', "\n  "));
        }
    }
    // What ran with lower priority tells nothing of the machine.
    let alone = || rows.iter().filter(|row| !row.beside);
    let slowness = alone().map(|row| row.seconds * row.slowness).sum::<f64>()
        / alone().map(|row| row.seconds).sum::<f64>().max(0.1);
    println!(
        "{:.0} s in all, {:.0} s of CPU time. A budget is for a step alone on two quiet cores and is not enforced; by samples \
         between the steps this machine was {slowness:.1} times as slow as those",
        took.as_secs_f64(),
        rows.iter().map(|row| row.cpu).sum::<f64>()
    );
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let (passed, failed) = (count(Verdict::Passed), count(Verdict::Failed));
    println!("{passed} passed, {failed} failed, {} skipped", count(Verdict::Skipped));
    failed
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Passed => "passed",
            Verdict::Failed => "failed",
            Verdict::Skipped => "skipped",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn under_strict_a_missing_gpu_core_or_sshd_is_an_excuse_and_nothing_else() {
        let verdict = |outcome: Outcome, skip: &[&str], strict| {
            let skips: Vec<String> = skip.iter().map(|s| s.to_string()).collect();
            judge(Ok(outcome), &skips, strict).0
        };
        let skipped = |reason: &str| Outcome::Skipped(reason.into());
        assert_eq!(verdict(Outcome::Passed, &["no GPU: cuInit", "x"], false), Verdict::Passed);
        assert_eq!(verdict(Outcome::Passed, &["no GPU: cuInit"], true), Verdict::Passed);
        assert_eq!(verdict(Outcome::Passed, &["no GPU: cuInit", "no RDMA"], true), Verdict::Failed);
        assert_eq!(verdict(Outcome::Passed, &["no second core: taskset"], true), Verdict::Passed);
        assert_eq!(verdict(Outcome::Passed, &["no sshd: x"], true), Verdict::Passed);
        assert_eq!(verdict(skipped("no GPU"), &[], true), Verdict::Skipped);
        assert_eq!(verdict(skipped("needs g++"), &[], false), Verdict::Skipped);
        assert_eq!(verdict(skipped("needs g++"), &[], true), Verdict::Failed);
    }

    #[test]
    fn a_reason_is_listed_once() {
        let log = "SKIPPED: no GPU: a\nSKIPPED: b\n\nSKIPPED: no GPU: a\n";
        assert_eq!(counted(log), ["no GPU: a (2 times)", "b"]);
    }
}
