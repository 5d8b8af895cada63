//! Tests `pushgate nccl-check` as a command, with stand-ins for the CUDA driver and for NCCL (tests/stand_ins): what it
//! prints, its exit codes, what it says of ranks that fail, and what it leaves behind. They show nothing of a GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use pushgate::settings::PluginSettings;
use pushgate_tests::built::scratch;
use pushgate_tests::{hang, patience, pushgate, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The folder of both libraries, of a file in the plugin's place, and of temporary folders.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = scratch(env!("CARGO_TARGET_TMPDIR")).join("nccl-check");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let sources = [include_str!("../stand_ins/cuda.c"), include_str!("../stand_ins/nccl.c")];
        for (source, library) in sources.into_iter().zip(["libcuda.so.1", "libnccl.so.2"]) {
            let file = folder.join(library).with_extension("c");
            fs::write(&file, source).unwrap();
            let mut cc = Command::new("cc");
            cc.args(["-O1", "-shared", "-fPIC", "-o"]).arg(folder.join(library)).arg(file);
            assert!(cc.status().unwrap().success(), "{library}");
        }
        fs::write(folder.join("libnccl-net-pushgate.so"), "").unwrap();
        folder
    })
}

/// A run of the command with a temporary folder of its own, where nothing may be left.
struct Run {
    child: Child,
    temporary: PathBuf,
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Run {
    /// `name`: of the test, for its temporary folder.
    fn start(name: &str, args: &str, env: &[(&str, &str)]) -> Run {
        let temporary = folder().join(name);
        fs::create_dir_all(&temporary).unwrap();
        let mut command = Command::new(pushgate());
        for (variable, _) in std::env::vars_os() {
            let text = variable.to_string_lossy().into_owned();
            if text.starts_with("NCCL_") || text.starts_with("CUDA_") {
                command.env_remove(variable);
            }
        }
        for key in PluginSettings::keys() {
            command.env_remove(key.variable());
        }
        command
            .arg("nccl-check")
            .args(["--plugin".as_ref(), folder().join("libnccl-net-pushgate.so").as_os_str()])
            .args(args.split_whitespace())
            .env("LD_LIBRARY_PATH", folder())
            .env("TMPDIR", &temporary)
            .env_remove("PUSHGATE_CONFIG")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(fs::File::create(temporary.join("stdout")).unwrap())
            .stderr(fs::File::create(temporary.join("stderr")).unwrap());
        Run { child: command.spawn().unwrap(), temporary }
    }

    /// Waits for the end; no rank and no temporary folder is left then.
    fn end(mut self) -> Ended {
        let begin = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if begin.elapsed() > 2 * hang() => {
                    let _ = self.child.kill();
                    panic!("it did not end: {}", fs::read_to_string(self.temporary.join("stderr")).unwrap());
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let read = |name: &str| fs::read_to_string(self.temporary.join(name)).unwrap();
        let ended = Ended { code: status.code(), stdout: read("stdout"), stderr: read("stderr") };
        for name in ["stdout", "stderr"] {
            fs::remove_file(self.temporary.join(name)).unwrap();
        }
        let left: Vec<_> = fs::read_dir(&self.temporary).unwrap().flatten().map(|e| e.file_name()).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
        ended
    }

    /// The processes of the ranks.
    fn ranks(&self) -> Vec<i32> {
        let tasks = format!("/proc/{0}/task/{0}/children", self.child.id());
        let children = fs::read_to_string(tasks).unwrap_or_default();
        children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }
}

const SMALL: &str = "--sizes 8,64K -n 2 -w 1";

fn check(name: &str, args: &str, env: &[(&str, &str)]) -> Ended {
    let rounds = if args.contains("--rounds") { "" } else { "--rounds 1" };
    Run::start(name, &format!("{SMALL} {rounds} {args}"), env).end()
}

#[track_caller]
fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {}\n{}", ended.stdout, ended.stderr))
}

#[test]
fn every_collective_over_every_transport_is_checked_and_put_in_one_table() {
    let ended = check("all", "--json --transports pushgate,shm,socket,p2p --rounds 2 --seed 5", &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let all = json(&ended);
    assert_eq!((&all["took"]["plugin"], &all["took"]["connections"]), (&true.into(), &2.into()));
    for (table, version) in [("net", "v12"), ("tuner", "v4")] {
        assert_eq!(all["took"][table]["version"], version);
    }
    assert!(all["took"]["path"].as_str().unwrap().starts_with("path push: "), "{all}");
    assert_eq!((&all["ranks"], &all["seed"], &all["failed"]), (&2.into(), &5.into(), &Value::Array(vec![])));
    let rows = all["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6 * 2 * 4);
    for row in rows {
        assert!(row["wrong"] == 0 && row["us"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["ratio"].is_null(), row["transport"] != "pushgate", "{row}");
    }
}

#[test]
fn the_table_stands_below_what_nccl_took() {
    let ended = check("table", "--collectives all_reduce,broadcast --transports pushgate,shm", &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let has =
        |line: &str| assert!(ended.stdout.lines().any(|l| l.starts_with(line)), "{line}\n{}", ended.stdout);
    has("# NCCL 2.30.7, driver for CUDA 13.0, 2 ranks on 2 x Stand-in, ");
    has(&format!("# {}/libnccl.so.2 (2.30.7+cuda13.0)", folder().display()));
    has("# plugin: taken, table v12, 2 connections of all ranks go over it");
    has("# tuner: taken, table v4");
    has("# all_reduce, out of place");
    has("# broadcast, out of place");
    assert_eq!(ended.stdout.lines().filter(|line| !line.starts_with('#')).count(), 2 * 2 * 2);
    assert_eq!(ended.stdout.lines().last(), Some("# right: no wrong element, nothing failed"));
}

#[test]
fn csv_plot_and_logs_are_written() {
    let (svg, logs) = (folder().join("plot.svg"), folder().join("kept-logs"));
    let files = format!("--csv --svg {} --logs {}", svg.display(), logs.display());
    let args = format!("--collectives sendrecv --transports shm,pushgate {files}");
    let ended = check("files", &args, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.lines().count(), 1 + 2 * 2, "{}", ended.stdout);
    assert!(ended.stdout.starts_with("collective,size,count,"), "{}", ended.stdout);
    assert!(ended.stderr.contains("# plugin: taken"), "{}", ended.stderr);
    assert!(fs::read_to_string(&svg).unwrap().contains("sendrecv, bus bandwidth"));
    let log = fs::read_to_string(logs.join("1-pushgate/nccl-1.log")).unwrap();
    assert!(log.contains("via NET/pushgate/0"), "{log}");
    // The folder is there now, and stays as it is.
    let again = check("again", &args, &[]);
    assert_eq!(again.code, Some(1), "{}", again.stderr);
    assert!(again.stderr.contains("making the folder"), "{}", again.stderr);
}

#[test]
fn wrong_elements_are_counted_and_fail_the_check() {
    let ended = check("wrong", "--json --collectives all_reduce,all_gather", &[("STAND_IN_FAULT", "wrong")]);
    assert_eq!(ended.code, Some(1));
    // Two sizes; one element at one rank, in the warm-up and in the last iteration.
    assert!(ended.stderr.ends_with("pushgate: 4 wrong elements over pushgate\n"), "{}", ended.stderr);
    let all = json(&ended);
    let wrong = |collective: &str| -> Vec<_> {
        let rows = all["rows"].as_array().unwrap().iter();
        let rows = rows.filter(|row| row["collective"] == collective && row["transport"] == "pushgate");
        rows.map(|row| row["wrong"].as_u64().unwrap()).collect()
    };
    assert_eq!((wrong("all_reduce"), wrong("all_gather")), (vec![2, 2], vec![0, 0]));
}

#[test]
fn a_plugin_that_nccl_does_not_take_fails_the_check_and_the_others_run() {
    let args = "--json --collectives all_reduce --transports pushgate,shm";
    let refused = check("refused", args, &[("STAND_IN_FAULT", "refuse")]);
    assert_eq!(refused.code, Some(1));
    let why = json(&refused)["failed"][0].as_str().unwrap().to_owned();
    assert!(why.starts_with("pushgate failed in round 1: rank "), "{why}");
    assert!(why.contains("ncclCommInitRank: internal error"), "{why}");
    assert!(why.contains("NCCL's log said last: NET/pushgate: init: the stand-in refuses"), "{why}");
    assert_eq!(json(&refused)["rows"].as_array().unwrap().len(), 2, "shm has run");
    let unused = check("unused", args, &[("STAND_IN_FAULT", "unused")]);
    assert_eq!(unused.code, Some(1));
    assert!(
        unused.stderr.ends_with("pushgate: NCCL did not use the plugin for every rank\n"),
        "{}",
        unused.stderr
    );
    assert_eq!(json(&unused)["took"]["others"][0], "SHM");
}

#[test]
fn a_tuner_of_others_is_warned_of_and_named_in_what_nccl_took() {
    let env = [("NCCL_TUNER_PLUGIN", "none"), ("NCCL_PROTO", "LL")];
    let ended = check("others", "--collectives all_reduce --transports pushgate", &env);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for warning in [
        "pushgate: warning: NCCL_TUNER_PLUGIN is none: ",
        "pushgate: warning: the environment tells NCCL, for every transport: NCCL_PROTO=LL",
    ] {
        assert!(ended.stderr.lines().any(|line| line.starts_with(warning)), "{warning}\n{}", ended.stderr);
    }
    assert!(ended.stdout.contains("# tuner: NOT taken: "), "{}", ended.stdout);
}

#[test]
fn ranks_that_share_a_gpu_run_what_can_run_and_are_warned_of() {
    let ended = check("shared", "--json --collectives alltoall", &[("STAND_IN_GPUS", "1")]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("pushgate: warning: 2 ranks share one GPU: "), "{}", ended.stderr);
    let all = json(&ended);
    assert!(all["rows"].as_array().unwrap().iter().all(|row| row["transport"] != "shm"), "{all}");
    let three = check("three", "--json --collectives alltoall,all_gather,reduce_scatter --ranks 3", &[]);
    assert_eq!((three.code, &json(&three)["ranks"]), (Some(0), &3.into()), "{}", three.stderr);
}

#[test]
fn a_kernel_that_never_ends_and_a_rank_that_dies_are_told_with_rank_and_pid() {
    let args = "--collectives all_reduce --transports pushgate";
    // The ranks meet within it too.
    let timeout = patience(Duration::from_secs(3));
    let stuck = check(
        "stuck",
        &format!("{args} --timeout {}ms", timeout.as_millis()),
        &[("STAND_IN_FAULT", "stuck")],
    );
    assert_eq!(stuck.code, Some(1));
    let said = &stuck.stderr;
    assert!(
        said.contains("pushgate: pushgate failed in round 1: rank ") && said.contains(" (pid "),
        "{said}"
    );
    let ended =
        format!("it did not end within {:.1} s; NCCL's log said last: Channel 00/0", timeout.as_secs_f32());
    assert!(said.contains(&ended), "{said}");
    let dies = check("dies", args, &[("STAND_IN_FAULT", "dies")]);
    assert_eq!(dies.code, Some(1));
    assert!(
        dies.stderr.contains("rank 1 (pid ")
            && dies.stderr.contains(") ended with 7 at all_reduce of 8 bytes")
    );
}

#[test]
fn a_rank_that_was_killed_or_stopped_is_named_and_ctrl_c_leaves_nothing() {
    let start = |name: &str, timeout: &str| {
        let args = format!("{SMALL} --collectives all_reduce --transports pushgate --timeout {timeout}");
        let run = Run::start(name, &args, &[("STAND_IN_FAULT", "stuck")]);
        let logs = run.temporary.join(format!("pushgate-nccl-check-{}/1-pushgate", run.child.id()));
        let joined = |rank: u32| {
            let log = fs::read_to_string(logs.join(format!("nccl-{rank}.log")));
            log.is_ok_and(|log| log.contains("via NET/pushgate"))
        };
        wait_until("both ranks have joined", || joined(0) && joined(1));
        run
    };
    // Nothing ends by itself here.
    let endless = |name: &str| start(name, "1h");
    let run = endless("killed");
    let ranks = run.ranks();
    kill_process(Pid::from_raw(ranks[1]).unwrap(), Signal::KILL).unwrap();
    let ended = run.end();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let said = format!("rank 1 (pid {}) was killed by signal 9 at ", ranks[1]);
    assert!(ended.stderr.contains(&said), "{}", ended.stderr);

    let run = start("stopped", "5s");
    let ranks = run.ranks();
    kill_process(Pid::from_raw(ranks[1]).unwrap(), Signal::STOP).unwrap();
    let ended = run.end();
    let said = format!("; rank 1 (pid {}) is stopped (SIGSTOP)", ranks[1]);
    assert!(ended.code == Some(1) && ended.stderr.contains(&said), "{}", ended.stderr);

    let run = endless("interrupted");
    let ranks = run.ranks();
    kill_process(Pid::from_child(&run.child), Signal::INT).unwrap();
    let ended = run.end();
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert!(ended.stderr.ends_with("pushgate: interrupted; the ranks were ended\n"), "{}", ended.stderr);
    for pid in ranks {
        assert!(rustix::process::test_kill_process(Pid::from_raw(pid).unwrap()).is_err(), "{pid} is left");
    }
}
