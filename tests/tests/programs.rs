//! The runner of programs of others (tests/gpu/programs), with programs that need no GPU: it tells apart what ends well, what
//! differs, what fails and what hangs, and leaves nothing running.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use pushgate_tests::built::{pushgate, root, scratch};
use rustix::process::Signal;

/// A folder of this test's own, empty.
fn folder(name: &str) -> PathBuf {
    let folder = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("programs-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The runner with stand-ins over the transports. `None`, and said: Python is missing or too old to read the table.
fn runner(test: &str, only: &str, over: &str) -> Option<Command> {
    let reads = Command::new("python3").args(["-c", "import tomllib"]).output();
    if !reads.is_ok_and(|python| python.status.success()) {
        pushgate_tests::skip("no python3 of 3.11 or later here");
        return None;
    }
    let source = root().join("tests");
    let mut runner = Command::new("python3");
    runner
        .arg(source.join("gpu/programs/programs.py"))
        .args(["--gpus", "2", "--only", only, "--over", over])
        .arg("--programs")
        .arg(source.join("stand_ins/programs/programs.toml"))
        .arg("--pushgate")
        .arg(pushgate())
        // A plugin that none of these programs loads.
        .arg("--plugin")
        .arg(pushgate())
        .arg("--out")
        .arg(folder(test));
    Some(runner)
}

fn run(test: &str, only: &str, over: &str) -> Option<(Output, String)> {
    let done = runner(test, only, over)?.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    Some((done, text))
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no `{part}` in:\n{text}");
    }
}

#[test]
fn programs_that_agree_pass_and_numbers_that_differ_are_named() {
    let only = "right,within-bound,wrong-number,not-a-number,wrong-sum,missing";
    let Some((done, text)) = run("numbers", only, "shm,socket") else { return };
    assert_eq!(done.status.code(), Some(1), "{text}");
    let said = [
        "PASS  right                    ms: shm 1.50, socket 1.50\n",
        "PASS  within-bound ",
        "wrong-number over socket: rank 0: losses[1] is 2.01, over the other 2.0, allowed 0.0001 of it (shm)\n",
        "not-a-number over socket: rank 0: losses[0] is nan, over the other 1.0",
        "wrong-sum over socket: rank 0: sum is 4, over the other 3 (shm)\n",
        "SKIP  missing                  no a_module_that_nobody_has here\n",
        "2 passed, 3 failed: wrong-number, not-a-number, wrong-sum, 1 skipped\n",
    ];
    assert_says(&text, &said);
}

#[test]
fn p7_a_program_that_hangs_or_fails_is_ended_with_its_children_and_named() {
    let Some((done, text)) = run("ends", "hangs,one-fails,last-dies", "socket") else { return };
    assert_eq!(done.status.code(), Some(1), "{text}");
    let said = [
        "hangs over socket: still ran after 10 s; logs in ",
        "pushgate inspect --all:\n",
        "one-fails over socket: rank 1 ended with 1; logs in ",
        "the layer has no name",
        "PASS  last-dies ",
        "1 passed, 2 failed: hangs, one-fails, 0 skipped\n",
    ];
    assert_says(&text, &said);
    assert_children_are_gone("ends");
}

#[test]
fn on_ctrl_c_or_when_told_to_end_the_runner_ends_what_it_started() {
    for (test, signal) in [("ctrl-c", Signal::INT), ("told", Signal::TERM)] {
        let Some(mut runner) = runner(test, "waits", "socket,shm") else { return };
        let mut runner = runner.spawn().unwrap();
        let end = Instant::now() + pushgate_tests::hang();
        while (0..2).any(|rank| child_of(test, rank).is_none()) {
            assert!(Instant::now() < end && runner.try_wait().unwrap().is_none(), "the ranks have not begun");
            std::thread::sleep(Duration::from_millis(20));
        }
        rustix::process::kill_process(rustix::process::Pid::from_child(&runner), signal).unwrap();
        assert_eq!(runner.wait().unwrap().code(), Some(130));
        assert_children_are_gone(test);
        // Nothing was begun over the next transport once the first run had ended.
        let begun =
            fs::read_dir(scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("programs-{test}"))).unwrap();
        let begun: Vec<_> = begun.flatten().filter(|file| file.path().join("0.log").exists()).collect();
        assert_eq!(begun.len(), 1, "{begun:?}");
    }
}

/// The process that a rank of the stand-in `hangs` has started.
fn child_of(test: &str, rank: usize) -> Option<String> {
    let file = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("programs-{test}/child-{rank}"));
    fs::read_to_string(file).ok().filter(|pid| !pid.is_empty())
}

/// The children have been told to end when the runner ends; the kernel takes them down a moment later.
fn assert_children_are_gone(test: &str) {
    let end = Instant::now() + pushgate_tests::hang();
    for rank in 0..2 {
        let child = child_of(test, rank).unwrap();
        let state = || fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        // One that has ended may wait for its parent, which is gone, to be collected.
        while !state().is_empty() && !state().contains(") Z ") {
            assert!(Instant::now() < end, "rank {rank}'s child still runs: {}", state());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_program_that_did_not_use_the_plugin_does_not_pass_as_if_it_had() {
    let Some((done, text)) = run("plugin", "right", "local") else { return };
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(text.contains("right over local: NCCL's log does not say 'NET/pushgate'; logs in "), "{text}");
}

#[test]
fn a_program_that_was_compared_with_nothing_says_so() {
    let Some((done, text)) = run("alone", "right", "none") else { return };
    assert_eq!(done.status.code(), Some(0), "{text}");
    assert_says(&text, &["compared with nothing"]);
}

#[test]
fn wrong_arguments_are_refused_with_what_is_allowed() {
    for (only, over, said) in [
        ("right,lift", "shm", "--only names lift; there are right, "),
        ("right", "shm,pigeon", "--over names pigeon: local, tcp, shm, socket, none"),
    ] {
        let Some((done, text)) = run("arguments", only, over) else { return };
        assert_eq!(done.status.code(), Some(2), "{text}");
        assert_says(&text, &[said]);
    }
}
