//! Tests the examples as programs: what they print, and their exit codes.

use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pushgate::settings::PluginSettings;
use pushgate_tests::built::example;
use pushgate_tests::{children, hang, output, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Held by each test: there may be few cores, so one group of processes runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An example in an environment without settings, but for what it may wait within.
fn program(name: &str, args: &str) -> Command {
    let mut command = Command::new(example(name));
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env_remove("PUSHGATE_CONFIG").env("PUSHGATE_TIMEOUT", hang().as_millis().to_string());
    command.args(args.split_whitespace());
    command
}

/// Exit code, standard output and standard error.
fn ended(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = output(command, 2 * hang());
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// What `allreduce` prints on the CPU.
#[track_caller]
fn allreduce(args: &str) -> String {
    let (code, stdout, stderr) = ended(program("allreduce", args).env("PUSHGATE_DEVICE", "cpu"));
    assert_eq!((code, &*stderr), (Some(0), ""), "{args}");
    stdout
}

#[test]
fn without_flags_four_ranks_reduce_16_mib_and_nothing_is_dropped() {
    let _one = alone();
    let said = allreduce("");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("# cpu: ") && lines.len() == 2, "{said}");
    assert!(lines[1].starts_with("# verified, nothing dropped, no RNR, waits for credit: "), "{said}");
}

#[test]
fn json_has_what_was_asked_for_and_what_was_found_for_every_flag() {
    let _one = alone();
    for (args, field, value) in [
        ("--ranks 2", "ranks", Value::from(2)),
        ("--ranks 4 --device cpu", "ranks", 4.into()),
        ("--ranks 8 --iters 1", "ranks", 8.into()),
        ("--size 1000008", "bytes", 1_000_008.into()),
        ("--size 8 --ranks 5", "bytes", 8.into()),
        ("--iters 3", "iters", 3.into()),
        ("--dtype f64", "dtype", "f64".into()),
        ("--dtype i32", "dtype", "i32".into()),
        ("--dtype i64 --ranks 3", "dtype", "i64".into()),
        ("--qp local", "qp", "local".into()),
        ("--qp tcp", "qp", "tcp".into()),
    ] {
        let size = if args.contains("--size") { "" } else { "--size 100K" };
        let line: Value = serde_json::from_str(&allreduce(&format!("--json {size} {args}"))).unwrap();
        assert_eq!(line[field], value, "{args}: {line}");
        assert_eq!(line["verified"], true, "{args}: {line}");
        assert_eq!((&line["dropped"], &line["rnr"]), (&0.into(), &0.into()), "{args}: {line}");
    }
}

#[test]
fn p7_when_a_rank_dies_the_others_name_it_and_the_example_exits_with_1() {
    let _one = alone();
    let mut command = program("allreduce", "--ranks 3 --size 1M --iters 1000000 --device cpu");
    let mut ranks = Vec::new();
    let run = std::thread::spawn(move || ended(&mut command));
    let own = std::process::id();
    // The ranks, below the example, once each has its engine.
    wait_until("three ranks run", || {
        ranks = children(own).into_iter().flat_map(children).filter(|pid| threads(*pid) > 1).collect();
        ranks.len() == 3
    });
    let of = |pid: u32| std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let second = |pid: &&u32| of(**pid).split(|b| *b == 0).any(|v| v == b"PUSHGATE_RANK=1");
    let victim = *ranks.iter().find(second).expect("rank 1");
    std::thread::sleep(std::time::Duration::from_secs(1));
    kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::KILL).unwrap();
    let (code, stdout, stderr) = run.join().unwrap();
    assert_eq!((code, &*stdout), (Some(1), ""), "{stderr}");
    assert!(stderr.contains("rank 1 is lost"), "{stderr}");
}

fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

#[test]
fn a_users_own_kernel_compiles_and_runs() {
    let _one = alone();
    for device in ["cpu", "auto"] {
        let (code, stdout, stderr) = ended(program("custom_kernel", "").env("PUSHGATE_DEVICE", device));
        assert_eq!(code, Some(0), "{stderr}");
        let mut lines: Vec<_> = stdout.lines().collect();
        let why = lines.remove(0);
        lines.sort();
        assert_eq!(
            lines,
            ["rank 0: ok; rank 1 put 1001 and sent 1001", "rank 1: ok; rank 0 put 1000 and sent 1000"]
        );
        match device {
            "cpu" => assert!(why.starts_with("cpu: ") && why.ends_with(", as asked for"), "{why}"),
            _ => assert!(why.contains(", because "), "{why}"),
        }
    }
}
