//! `pushgate chaos`: short runs over `local`, planted faults, and Ctrl-C.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;

use pushgate_tests::{hang, pushgate, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// One run at a time: each has four threads that poll.
static ALONE: Mutex<()> = Mutex::new(());

fn chaos(args: &str) -> Command {
    let mut command = Command::new(pushgate());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PUSHGATE_")) {
        command.env_remove(name);
    }
    // The command's own limit against a hang.
    let timeout = format!("{}ms", hang().as_millis());
    command.args(["chaos", "--device", "cpu", "--json", "--timeout", &timeout]).args(args.split_whitespace());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The last line of standard output.
fn summary(out: &str) -> Value {
    let last = out.lines().last().unwrap_or_else(|| panic!("no summary in {out:?}"));
    serde_json::from_str(last).unwrap_or_else(|e| panic!("{last}: {e}"))
}

/// The faults that a run named on standard error, in order, without how long they took.
fn faults(err: &str) -> Vec<&str> {
    fn fault(line: &str) -> Option<&str> {
        let said = line.strip_prefix("pushgate chaos: fault ")?;
        said.split(", back after").next()?.split(": the others").next()
    }
    err.lines().filter_map(fault).collect()
}

/// Runs to the end; the summary says that nothing was lost.
fn clean(args: &str) -> (Value, String) {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Output { status, stdout, stderr } = chaos(args).output().unwrap();
    let (out, err) = (text(&stdout), text(&stderr));
    assert_eq!(status.code(), Some(0), "{args}\n{out}{err}");
    let said = summary(&out);
    for name in ["lost", "doubled", "wrong"] {
        assert_eq!(said[name], 0, "{said}");
    }
    let by_kind = said["by_kind"].as_object().unwrap();
    let sum: u64 = by_kind.values().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(said["faults"].as_u64(), Some(sum), "{said}");
    assert!(sum > 0 && said["messages"].as_u64() > Some(0), "{said}");
    // What is no end by design was recovered from.
    let ends: u64 = ["kill", "abort"].iter().filter_map(|kind| by_kind.get(*kind)?.as_u64()).sum();
    assert_eq!(said["recovered"].as_u64(), Some(sum - ends), "{said}");
    assert_eq!(faults(&err).len() as u64, sum, "{err}");
    (said, err)
}

#[test]
fn p6_no_message_is_lost_doubled_or_wrong_while_links_break_sockets_are_held_and_ranks_stop_and_die() {
    // A slow host makes fewer of the seed's faults in that time.
    let run = |seconds: u32| clean(&format!("--seconds {seconds} --every 100ms --seed 2044"));
    let has = |said: &Value, kind: &str| said["by_kind"][kind].as_u64() > Some(0);
    let all = |said: &Value| {
        ["kill", "stop", "abort", "delay"].iter().all(|kind| has(said, kind)) && said["p50_ms"].is_number()
    };
    let (said, err) = [8, 32].into_iter().map(run).find(|(said, _)| all(said)).unwrap_or_else(|| run(128));
    assert!(all(&said), "faults of a kind are missing: {said}");
    assert!(said["epochs"].as_u64() > Some(1) && said["p50_ms"].as_f64() > Some(0.0), "{said}");
    // Bytes are held back for 20 ms at least, from just before the last break on.
    assert!(said["times"]["delay"]["max_ms"].as_f64() > Some(15.0), "{said}");
    assert!(err.starts_with("pushgate chaos: seed 2044, 2 ranks, "), "{err}");
}

#[test]
fn p6_three_ranks_lose_nothing_and_a_seed_gives_the_same_faults_again() {
    let [a, b] =
        ["1", "2"].map(|seconds| clean(&format!("--seconds {seconds} --every 60ms --seed 5 --ranks 3")).1);
    let (a, b) = (faults(&a), faults(&b));
    let both = a.len().min(b.len());
    assert_eq!(a[..both], b[..both]);
}

#[test]
fn p6_no_message_is_lost_doubled_or_wrong_while_the_proxy_is_killed_and_another_one_takes_over() {
    // The first fault of this seed.
    let (said, _) = clean("--seconds 4 --every 100ms --seed 363 --proxy process");
    assert!(said["by_kind"]["kill-proxy"].as_u64() > Some(0) && said["p50_ms"].is_number(), "{said}");
}

/// Runs two commands at once, as on two hosts that meet at a port of this one.
fn two_hosts(args: [&str; 2]) -> [Output; 2] {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let args = format!("--qp tcp --rank {rank} --rendezvous 127.0.0.1:{port} {}", args[rank]);
        chaos(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    [0, 1].map(start).map(|child| child.wait_with_output().unwrap())
}

#[test]
fn p6_no_message_is_lost_doubled_or_wrong_between_two_hosts_each_of_which_breaks_its_own_rank() {
    // A slow host makes fewer of the seed's faults in that time.
    let run = |seconds: u32| {
        let args = format!("--seconds {seconds} --every 100ms --seed 5");
        two_hosts([&args, &args]).map(|Output { status, stdout, stderr }| {
            let (out, err) = (text(&stdout), text(&stderr));
            assert_eq!(status.code(), Some(0), "{out}{err}");
            summary(&out)
        })
    };
    let all = |said: &[Value; 2]| said.iter().all(|said| said["faults"].as_u64() > Some(2));
    let said = [4, 16].into_iter().map(run).find(all).unwrap_or_else(|| run(64));
    assert!(all(&said), "{said:?}");
    let [a, b] = &said;
    assert_eq!(a["all"], b["all"], "both hosts know of both");
    let sum = a["messages"].as_u64().unwrap() + b["messages"].as_u64().unwrap();
    assert_eq!([&a["all"]["sent"], &a["all"]["messages"]], [sum, sum], "{a} {b}");
    for name in ["lost", "doubled", "wrong"] {
        assert_eq!([&a[name], &b[name], &a["all"][name]], [0, 0, 0], "{a} {b}");
    }
    for said in &said {
        // Nothing that needs another host's processes, or ends the job.
        for kind in ["kill", "abort", "break-both", "stop-break"] {
            assert_eq!(said["by_kind"][kind], Value::Null, "{said}");
        }
        assert_eq!(said["recovered"], said["faults"], "{said}");
    }
}

#[test]
fn hosts_that_were_given_different_seeds_are_refused_at_both() {
    let args = ["--seconds 60 --seed 4", "--seconds 60 --seed 5"];
    for (run, rank) in two_hosts(args).into_iter().zip(0..) {
        assert_eq!(run.status.code(), Some(1), "{}", text(&run.stderr));
        let says = format!("rank {rank} was given {}, rank {} {}", args[rank], 1 - rank, args[1 - rank]);
        assert!(text(&run.stderr).contains(&says), "{}", text(&run.stderr));
    }
}

#[test]
fn a_planted_fault_makes_the_run_fail_and_is_counted_by_its_name() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for fault in ["lost", "doubled", "wrong"] {
        // The fault is in the 500th message, which a slow host sends later.
        let run = |seconds: u32| {
            let mut run = chaos(&format!("--seconds {seconds} --every 1h --seed 9"));
            run.env("_PUSHGATE_CHAOS_PLANT", fault).output().unwrap()
        };
        let found = |run: &Output| run.status.code() != Some(0);
        let run = [1, 8].into_iter().map(run).find(found).unwrap_or_else(|| run(64));
        let (out, err) = (text(&run.stdout), text(&run.stderr));
        assert_eq!(run.status.code(), Some(1), "{fault}\n{out}{err}");
        let said = summary(&out);
        for name in ["lost", "doubled", "wrong"] {
            assert_eq!(said[name], (name == fault) as u64, "{fault}: {said}");
        }
        assert!(err.contains("--seed 9"), "{fault}: {err}");
    }
}

#[test]
fn a_rank_that_sends_no_more_fails_the_run_with_the_report_of_who_waits_for_whom() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let standstill = "no message of rank 0 has arrived at rank 1";
    // The subject is this deadline. On a slow host the ranks' start alone may take longer than the shorter ones.
    let run = |timeout: &str| {
        let mut command = Command::new(pushgate());
        command.args("chaos --device cpu --json --seconds 600 --every 1h --seed 9 --timeout".split(' '));
        let run = command.arg(timeout).env("_PUSHGATE_CHAOS_PLANT", "hung").output().unwrap();
        assert_eq!(run.status.code(), Some(1), "{}{}", text(&run.stdout), text(&run.stderr));
        (text(&run.stdout), text(&run.stderr))
    };
    let runs = ["5s", "20s"].into_iter().map(run);
    let (out, err) = { runs }.find(|(_, err)| err.contains(standstill)).unwrap_or_else(|| run("80s"));
    assert!(err.contains(standstill), "{err}");
    assert!(err.contains("rank 0 (process ") && err.contains("--seed 9"), "{err}");
    summary(&out);
}

/// Processes of this host whose arguments have this seed.
fn of_run(seed: &str) -> usize {
    let has = |path: PathBuf| {
        let arguments = std::fs::read(path.join("cmdline")).unwrap_or_default();
        arguments.split(|b| *b == 0).any(|argument| argument == seed.as_bytes())
    };
    std::fs::read_dir("/proc").unwrap().filter(|entry| has(entry.as_ref().unwrap().path())).count()
}

#[test]
fn ctrl_c_ends_the_children_and_prints_the_summary_so_far() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    // By the seed the children are known again, which have the same arguments.
    let seed = (u64::MAX - u64::from(std::process::id())).to_string();
    let mut child = chaos(&format!("--seconds 600 --every 50ms --seed {seed}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("fault 3,") {
        line.clear();
        assert_ne!(err.read_line(&mut line).unwrap(), 0, "it ended before three faults");
    }
    wait_until("the ranks", || of_run(&seed) > 1);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let rest = std::thread::spawn(move || drop(err.read_to_string(&mut String::new())));
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    rest.join().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{out}");
    assert!(summary(&out)["faults"].as_u64() >= Some(3), "{out}");
    assert_eq!(of_run(&seed), 0, "the command ends its children before itself");
}

#[test]
fn what_chaos_cannot_break_is_refused_before_anything_starts() {
    for (args, says) in [
        (
            "--qp verbs --proxy process",
            "invalid proxy `process` (from --proxy): expected thread with qp = verbs",
        ),
        ("--recover 0", "invalid recover `0` (from --recover): expected a time"),
        (
            "--rendezvous localhost:1 --qp local",
            "invalid rendezvous `localhost:1` (from --rendezvous): expected none",
        ),
        ("--link lo", "invalid link `lo` (from --link): expected qp = verbs or tcp"),
        ("--rank-ib-dev x --qp local", "invalid rank-ib-dev `x` (from --rank-ib-dev): expected qp = verbs"),
        (
            "--rank-ib-dev x --qp verbs",
            "invalid rank-ib-dev `x` (from --rank-ib-dev): expected once for each of 2 ranks",
        ),
        ("--link a,,b --qp verbs", "invalid link `a,,b` (from --link): expected names of network devices"),
        ("--region 0", "invalid region `0` (from --region): expected 1 byte to 1024G"),
        ("--rank 1", "invalid rank `1` (from --rank): expected none without --rendezvous HOST:PORT"),
        (
            "--rank 1 --rendezvous localhost:1 --qp tcp",
            "invalid seed `none` (from --seed): expected a number, the same for all ranks",
        ),
        ("--rank 2 --rendezvous localhost:1 --qp tcp --seed 1", "expected 0 to 1"),
        ("--ranks 1", "invalid ranks `1` (from --ranks): expected 2 to 8"),
        ("--every 0", "invalid every `0` (from --every): expected 1ms to 1h"),
        ("--seed x", "invalid seed `x` (from --seed): expected a whole number"),
    ] {
        let run = chaos(args).output().unwrap();
        assert_eq!((run.status.code(), text(&run.stdout).as_str()), (Some(2), ""), "{args}");
        assert!(text(&run.stderr).contains(says), "{args}: {}", text(&run.stderr));
    }
}
