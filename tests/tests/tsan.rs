//! Tests the device code's orderings under ThreadSanitizer: the code is clean as it stands, and
//! each ordering is needed. tests/litmus/ has the program; its engines are the proxy's, rewritten
//! in C++.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, PoisonError};
use std::time::Instant;

use pushgate_tests::built::{self, root};

/// The exit code with which ThreadSanitizer ends the program at its first report.
const RACE: i32 = 66;
/// How many seeds each scenario runs with: one schedule may hide what the next one shows.
const SEEDS: u64 = 4;
/// The most runs of a scenario with a weakened ordering. The first run that reports a race is
/// enough; on a busy machine threads may take turns so that a run has no race.
const WEAKENED_SEEDS: u64 = 40;
/// How many compilers and programs run at a time, over all tests of this file.
const AT_ONCE: usize = 2;

/// Each ordering, with the scenarios that only it keeps in order.
const ORDERINGS: &[(&str, &[&str])] = &[
    ("PUSHGATE_ORDER_PUBLISH", &["put", "recv-block", "cq-thread"]),
    ("PUSHGATE_ORDER_RECORD", &["recv-thread", "recv-block", "recv-warp"]),
    ("PUSHGATE_ORDER_CONSUMED", &["recv-thread", "recv-block", "recv-warp"]),
    ("PUSHGATE_ORDER_CREDIT", &["put", "recv-thread"]),
    ("PUSHGATE_ORDER_CREDIT_SHARE", &["share"]),
    ("PUSHGATE_ORDER_CREDIT_TAKE", &["share"]),
    ("PUSHGATE_ORDER_RECEIVE", &["post-recv-thread", "post-recv-block"]),
    ("PUSHGATE_ORDER_SIGNAL", &["signal-thread", "signal-block"]),
    ("PUSHGATE_ORDER_COMPLETION", &["cq-thread", "cq-block", "flush-thread", "flush-block"]),
    ("CONSUMER_LOOK", &["put", "recv-thread"]),
    ("CONSUMER_LINK", &["put", "recv-thread"]),
    ("CONSUMER_LINK_LOOK", &["put", "recv-thread"]),
    ("CONSUMER_DELIVER", &["recv-thread"]),
    ("CONSUMER_SIGNAL", &["signal-thread"]),
    ("CONSUMER_CONSUMED", &["recv-thread"]),
    ("CONSUMER_COUNT", &["put", "recv-thread"]),
    ("CONSUMER_OBSERVE", &["put", "recv-thread"]),
    ("CONSUMER_CREDIT", &["put", "recv-thread"]),
    ("CONSUMER_CQE", &["cq-thread"]),
    ("CONSUMER_DELIVERED", &["flush-thread"]),
    ("CONSUMER_RECEIVE", &["post-recv-thread"]),
];

/// Scenarios that run with nothing weakened; the others have a test each below.
const CLEAN: &[&str] = &[
    "put",
    "share",
    "recv-thread",
    "recv-block",
    "recv-warp",
    "signal-thread",
    "signal-block",
    "cq-thread",
    "cq-block",
    "cq-many",
    "flush-thread",
    "flush-block",
];

/// One of the [`AT_ONCE`] places.
struct Place;

static TAKEN: Mutex<usize> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

impl Place {
    fn take() -> Place {
        let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        *FREED.wait_while(taken, |n| *n >= AT_ONCE).unwrap_or_else(PoisonError::into_inner) += 1;
        Place
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        FREED.notify_one();
    }
}

/// How ThreadSanitizer's programs are made and run here.
struct Tools {
    cxx: String,
    /// Whether addresses must be fixed: some kernels spread addresses wider than this runtime can
    /// map.
    fixed_addresses: bool,
}

/// The tools, or what is missing if ThreadSanitizer does not work here.
static TOOLS: LazyLock<Result<Tools, String>> = LazyLock::new(|| {
    let cxx = std::env::var("CXX").ok().filter(|cxx| !cxx.is_empty()).unwrap_or_else(|| "g++".into());
    let source = scratch("probe.cc");
    std::fs::write(&source, "int main() { return 0; }\n").expect("the scratch folder is writable");
    let program = scratch("probe");
    let made = Command::new(&cxx).arg("-fsanitize=thread").arg(&source).arg("-o").arg(&program).output();
    match made {
        Err(e) => return Err(format!("no C++ compiler: {cxx}: {e}")),
        Ok(made) if !made.status.success() => {
            let text = String::from_utf8_lossy(&made.stderr);
            return Err(format!(
                "{cxx} has no ThreadSanitizer (libtsan): {}",
                text.lines().last().unwrap_or("no message")
            ));
        }
        Ok(_) => {}
    }
    let mut last = String::new();
    for fixed_addresses in [false, true] {
        let tools = Tools { cxx: cxx.clone(), fixed_addresses };
        match tools.command(&program).output() {
            Ok(out) if out.status.success() => return Ok(tools),
            Ok(out) => last = String::from_utf8_lossy(&out.stderr).lines().next().unwrap_or("").to_owned(),
            Err(e) => last = format!("setarch: {e}"),
        }
    }
    Err(format!("ThreadSanitizer's programs do not start here, nor under `setarch -R`: {last}"))
});

fn scratch(name: &str) -> PathBuf {
    let folder = built::scratch(env!("CARGO_TARGET_TMPDIR")).join("tsan");
    std::fs::create_dir_all(&folder).expect("cargo's scratch folder is writable");
    folder.join(name)
}

impl Tools {
    fn command(&self, program: &Path) -> Command {
        let mut command = if self.fixed_addresses {
            let mut setarch = Command::new("setarch");
            setarch.arg("-R").arg(program);
            setarch
        } else {
            Command::new(program)
        };
        command.env("TSAN_OPTIONS", format!("exitcode={RACE} halt_on_error=1 atexit_sleep_ms=0"));
        command
    }

    /// Compiles the litmus program; `weakened` names an ordering to weaken.
    fn compile(&self, weakened: Option<&str>) -> Result<PathBuf, String> {
        let _place = Place::take();
        let program = scratch(weakened.unwrap_or("right"));
        let mut command = Command::new(&self.cxx);
        // -Wno-tsan: the only fence is the doorbell's, which no scenario uses.
        command.args([
            "-std=c++17",
            "-fsanitize=thread",
            "-O1",
            "-g",
            "-fno-builtin",
            "-pthread",
            "-Wno-tsan",
        ]);
        command.arg("-I").arg(root().join("driver-shim/include"));
        command.arg("-I").arg(root().join("gpu-kernels/include"));
        if let Some(name) = weakened {
            let relaxed = if name.starts_with("PUSHGATE_") { "order::relaxed" } else { "__ATOMIC_RELAXED" };
            command.arg(format!("-D{name}={relaxed}"));
        }
        command.arg(root().join("tests/litmus/orderings.cc")).arg("-o").arg(&program);
        let made = command.output().map_err(|e| format!("{}: {e}", self.cxx))?;
        if !made.status.success() {
            return Err(format!("does not compile:\n{}", String::from_utf8_lossy(&made.stderr)));
        }
        Ok(program)
    }

    fn run(&self, program: &Path, scenario: &str, seed: u64) -> Outcome {
        let _place = Place::take();
        let out = self.command(program).arg(scenario).arg(seed.to_string()).output();
        let out = out.unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        let raced = out.status.code() == Some(RACE) && text.contains("ThreadSanitizer: data race");
        if raced {
            Outcome::Race(text)
        } else if out.status.success() && text.is_empty() {
            Outcome::Clean
        } else {
            Outcome::Failed(format!("{}\n{text}", out.status))
        }
    }
}

enum Outcome {
    Clean,
    Race(String),
    /// Wrong values, or the program did not end.
    Failed(String),
}

fn tools() -> Option<&'static Tools> {
    match &*TOOLS {
        Ok(tools) => Some(tools),
        Err(reason) => {
            pushgate_tests::skip(reason);
            None
        }
    }
}

static RIGHT: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
    let tools = TOOLS.as_ref().map_err(String::clone)?;
    tools.compile(None)
});

/// Runs scenarios with the code as it stands: the values must be right, and nothing reported.
fn clean(scenarios: &[&str]) {
    let Some(tools) = tools() else { return };
    let program = RIGHT.as_ref().unwrap_or_else(|e| panic!("{e}"));
    for scenario in scenarios {
        for seed in 1..=SEEDS {
            match tools.run(program, scenario, seed) {
                Outcome::Clean => {}
                Outcome::Race(text) | Outcome::Failed(text) => panic!("{scenario}, seed {seed}: {text}"),
            }
        }
    }
}

#[test]
fn p3_the_code_as_it_stands_is_clean() {
    clean(CLEAN);
}

#[test]
fn p1_a_cancelled_batch_is_done_with_its_room() {
    clean(&["cancel"]);
}

#[test]
fn p1_credit_remembered_through_a_full_turn_of_the_cursors_is_none() {
    clean(&["idle"]);
}

#[test]
fn p1_the_rings_end_is_given_away_where_the_proxy_expects_it() {
    clean(&["skip"]);
}

#[test]
fn p3_a_posted_receive_hands_over_its_buffer() {
    clean(&["post-recv-thread", "post-recv-block"]);
}

#[test]
fn p5_flush_covers_what_each_thread_of_its_scope_posted() {
    clean(&["flush-each"]);
}

/// Every `#ifndef` of these two headers with one of the prefixes.
fn named_orderings() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for header in ["gpu-kernels/include/pushgate/device.cuh", "tests/litmus/engine.h"] {
        let path = root().join(header);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        names.extend(
            text.lines()
                .filter_map(|line| line.strip_prefix("#ifndef ")?.split_whitespace().next())
                .filter(|name| name.starts_with("PUSHGATE_ORDER_") || name.starts_with("CONSUMER_"))
                .map(str::to_owned),
        );
    }
    names
}

#[test]
fn p3_every_named_ordering_has_a_scenario() {
    let here: BTreeSet<_> = ORDERINGS.iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(here, named_orderings(), "ORDERINGS (left) and the headers (right) name the same");
}

/// Weakens one ordering. Adds a line to the table for each scenario; false if one of them was not
/// reported.
fn weaken(tools: &Tools, name: &str, scenarios: &[&str], table: &mut String) -> bool {
    let began = Instant::now();
    let program = match tools.compile(Some(name)) {
        Ok(program) => program,
        Err(e) => {
            _ = writeln!(table, "{name}: {e}");
            return false;
        }
    };
    let compiled = began.elapsed().as_secs_f32();
    let mut all = true;
    for scenario in scenarios {
        let began = Instant::now();
        let found = (1..=WEAKENED_SEEDS)
            .find(|seed| matches!(tools.run(&program, scenario, *seed), Outcome::Race(_)));
        all &= found.is_some();
        _ = writeln!(
            table,
            "{name:28} {scenario:17} {:24} compiled in {compiled:.1} s, ran {:.2} s",
            found.map_or("NOT REPORTED".into(), |seed| format!("reported, seed {seed}")),
            began.elapsed().as_secs_f32()
        );
    }
    _ = std::fs::remove_file(program);
    all
}

#[test]
fn p3_each_weakened_ordering_is_reported() {
    let Some(tools) = tools() else { return };
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for _ in 0..AT_ONCE {
            s.spawn(|| {
                while let Some((name, scenarios)) = ORDERINGS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut table = String::new();
                    let all = weaken(tools, name, scenarios, &mut table);
                    results.lock().unwrap().push((*name, all, table));
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    let table: String = results.iter().map(|(_, _, table)| table.as_str()).collect();
    print!("{table}");
    let missed: Vec<_> = results.iter().filter(|(_, all, _)| !all).map(|(name, _, _)| *name).collect();
    assert!(missed.is_empty(), "weakened and not reported in each scenario: {missed:?}\n{table}");
}
