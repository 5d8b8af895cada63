//! Tests `pushgate bench osu-latency`, `osu-bw` and `osu-bibw` as commands: what they print, what
//! they find, and what is left when a rank dies.

use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushgate::settings::PluginSettings;
use pushgate_tests::{cpu_time, hang, patience, pushgate, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const KINDS: [(&str, &str, &str); 3] = [
    ("osu-latency", "Latency Test", "Avg Latency(us)"),
    ("osu-bw", "Bandwidth Test", "Bandwidth (MB/s)"),
    ("osu-bibw", "Bi-Directional Bandwidth Test", "Bandwidth (MB/s)"),
];
const BUFFERS: [[&str; 2]; 4] = [["H", "H"], ["D", "D"], ["H", "D"], ["D", "H"]];

/// Held by each test: there may be few cores, so one group of processes runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `pushgate bench` in an environment without settings.
fn command(args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(pushgate());
    command.arg("bench").args(args).args(["--device", "cpu"]).stdin(Stdio::null());
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env_remove("PUSHGATE_CONFIG").env_remove("PUSHGATE_LOG").envs(env.iter().copied());
    command
}

fn run(args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command(args, env).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// The rows of a table with the right header: size, figure, and the word of the validation.
fn table(kind: usize, buffers: [&str; 2], out: &str) -> Vec<(u64, f64, Option<String>)> {
    let (name, test, column) = KINDS[kind];
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], format!("# pushgate {name}, in the form of OSU MPI {test} v7.5"), "{out}");
    assert!(lines[1].starts_with("# qp local, window memory of "), "{out}");
    assert!(lines[1].ends_with(&format!(", buffers {}", buffers.join(" "))), "{out}");
    assert_eq!(lines[2], "# Datatype: bytes.");
    let validated = lines[3].ends_with("Validation");
    let mut head = format!("{:<10}{column:>18}", "# Size");
    if validated {
        head += &format!("{:>18}", "Validation");
    }
    assert_eq!(lines[3], head);
    assert!(!lines[4..].is_empty(), "{out}");
    let row = |line: &&str| {
        assert_eq!(line.len(), head.len(), "{line}");
        let mut fields = line.split_whitespace();
        let size = fields.next().unwrap().parse().unwrap();
        let figure: f64 = fields.next().unwrap().parse().unwrap();
        assert!(line[..28].ends_with(&format!("{figure:.2}")), "{line}");
        let word = fields.next().map(String::from);
        assert_eq!((word.is_some(), fields.next()), (validated, None), "{line}");
        (size, figure, word)
    };
    lines[4..].iter().map(row).collect()
}

/// Checks that all sizes are there and right.
fn right(kind: usize, buffers: [&str; 2], sizes: &[u64], args: &[&str]) {
    let [a, b] = buffers;
    let all = [&[KINDS[kind].0, "-d", a, b, "-c"], args].concat();
    let (code, out, err) = run(&all, &[]);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{all:?}\n{out}");
    let rows = table(kind, buffers, &out);
    assert_eq!(rows.iter().map(|r| r.0).collect::<Vec<_>>(), sizes, "{out}");
    assert!(rows.iter().all(|(.., word)| word.as_deref() == Some("Pass")), "{out}");
    // Two digits may be too few for the bandwidth of a few bytes.
    assert!(rows.iter().all(|(size, figure, _)| *figure > 0.0 || kind != 0 && *size < 64), "{out}");
}

#[test]
fn every_bench_prints_its_table_from_every_memory_to_every_memory() {
    let _alone = alone();
    for kind in 0..KINDS.len() {
        for buffers in BUFFERS {
            let args = ["-m", "0:16", "-i", "4", "-x", "1", "-W", "16"];
            // The latency test has one message at a time.
            let args = &args[..if kind == 0 { 6 } else { 8 }];
            right(kind, buffers, &[0, 1, 2, 4, 8, 16], args);
        }
    }
}

#[test]
fn what_is_longer_than_half_a_window_goes_in_slices() {
    let _alone = alone();
    for kind in 0..KINDS.len() {
        for (buffers, processes) in BUFFERS.into_iter().zip(["2", "1", "1", "2"]) {
            let args =
                ["-m", "3000:12K", "-i", "4", "-x", "1", "--window-size", "4K", "--processes", processes];
            right(kind, buffers, &[3000, 6000, 12000], &args);
        }
        // Several blocks and threads share each message; there are few slots.
        let args = "-m 100:6400 -i 4 -x 0 --window-size 2K --slots 4 --blocks 3 --threads 2".split(' ');
        right(kind, ["D", "D"], &[100, 200, 400, 800, 1600, 3200, 6400], &args.collect::<Vec<_>>());
    }
    // A window of one unit, and one message at a time.
    right(
        1,
        ["D", "D"],
        &[512],
        &["-m", "512:512", "-i", "4", "-W", "1", "--window-size", "64", "--slots", "2"],
    );
}

#[test]
fn a_proxy_process_serves_it() {
    let _alone = alone();
    let socket = format!("@pushgate-osu-test-{}", std::process::id());
    let mut proxy = Command::new(pushgate()).args(["proxy", "--proxy-socket", &socket]).spawn().unwrap();
    let args = ["osu-bw", "-d", "D", "H", "-c", "-m", "8K:16K", "-i", "2"];
    let args = [&args[..], &["--proxy", "process", "--proxy-socket", &socket]].concat();
    let start = Instant::now();
    let (code, out, err) = loop {
        let ended = run(&args, &[]);
        // The other rank may not listen yet.
        if ended.0 == Some(0) || start.elapsed() > hang() {
            break ended;
        }
    };
    proxy.kill().unwrap();
    proxy.wait().unwrap();
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(table(1, ["D", "H"], &out).len(), 2, "{out}");
}

#[test]
fn without_validation_there_are_two_columns_and_json_has_all() {
    let _alone = alone();
    for (kind, (name, ..)) in KINDS.into_iter().enumerate() {
        let (code, out, err) = run(&[name, "-m", "4:8", "-i", "10"], &[]);
        assert_eq!(code, Some(0), "{err}");
        let rows = table(kind, ["H", "H"], &out);
        assert_eq!(rows.iter().map(|r| (r.0, r.2.clone())).collect::<Vec<_>>(), [(4, None), (8, None)]);
        let (code, out, err) =
            run(&[name, "-m", "4:8", "-i", "10", "-x", "3", "--json", "-c", "-d", "D", "H"], &[]);
        assert_eq!(code, Some(0), "{err}");
        let lines: Vec<Value> = out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{out}");
        for (line, bytes) in lines.iter().zip([4, 8]) {
            assert_eq!((&line["bench"], &line["bytes"]), (&name.into(), &bytes.into()));
            assert_eq!((&line["iterations"], &line["warmup"]), (&10.into(), &3.into()));
            assert_eq!((&line["buffers"], &line["valid"]), (&"D H".into(), &true.into()));
            assert_eq!(line["messages"], if kind == 0 { 1 } else { 64 });
            assert_eq!(line["unit"], if kind == 0 { "us" } else { "MB/s" });
            assert!(line["value"].as_f64().unwrap() > 0.0, "{line}");
        }
    }
}

#[test]
fn one_wrong_byte_on_its_way_is_found_by_validation_alone() {
    let _alone = alone();
    let flip = [("_PUSHGATE_OSU_FLIP", "17")];
    for (kind, (name, ..)) in KINDS.iter().enumerate() {
        for processes in ["1", "2"] {
            let args = [*name, "-d", "D", "D", "-m", "16:64", "-i", "5", "--processes", processes];
            let (code, out, err) = run(&[&args[..], &["-c"]].concat(), &flip);
            assert_eq!(code, Some(1), "{out}{err}");
            let rows = table(kind, ["D", "D"], &out);
            let words: Vec<_> = rows.iter().map(|r| (r.0, r.2.as_deref().unwrap())).collect();
            assert_eq!(words, [(16, "Pass"), (32, "Fail")], "{out}");
            let rank = if kind == 1 { 1 } else { 0 };
            let says = format!(
                "pushgate: validation failed: 32 bytes, rank {rank} received 1 wrong bytes, \
                 the first at offset 17 of message 0: "
            );
            // On a busy machine the other rank may report that this one is lost before the command ends it.
            let lines = err.lines().filter(|line| !line.contains("is lost"));
            assert!(lines.clone().count() == 1 && lines.clone().all(|l| l.starts_with(&says)), "{err}");
            assert_eq!(run(&args, &flip).0, Some(0));
        }
    }
}

#[test]
fn what_cannot_work_is_said_before_it_starts() {
    let _alone = alone();
    for (args, says) in [
        ("osu-bw -d D X", "invalid buffers `D X` (from --buffers): expected H H, D D, H D or D H"),
        (
            "osu-bw -m 9:8",
            "invalid message-size `9:8` (from --message-size): expected MAX or MIN:MAX, 0 to 256M",
        ),
        ("osu-bw -W 0", "invalid messages `0` (from --messages): expected 1 to 4096"),
        (
            "osu-bw --window bar",
            "invalid window `bar` (from --window): expected memory or staging with qp = local",
        ),
        (
            "osu-latency --proxy process -d D D",
            "invalid buffers `D D`: expected H for rank 0, which receives",
        ),
        ("osu-bibw --proxy process", "invalid buffers `H H`: expected D for rank 0, which sends"),
        ("osu-bw --rank 1", "invalid rank `1` (from --rank): expected none without --rendezvous"),
    ] {
        let (code, out, err) = run(&args.split(' ').collect::<Vec<_>>(), &[]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{args}: {err}");
        assert!(err.starts_with(&format!("pushgate: {says}")) && err.lines().count() == 1, "{args}: {err}");
    }
    // The ranks find that there are more blocks than signals; one rank reports first.
    let (code, _, err) = run(&["osu-bw", "--blocks", "8", "--signals", "4", "--processes", "1"], &[]);
    assert_eq!(code, Some(1));
    assert!(err.contains("--blocks 8 needs as many signals: --signals is 4"), "{err}");
}

/// Processes of the command that `parent` started, with rank and number.
fn ranks(parent: u32) -> Vec<(char, i32)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // After the name, which may contain anything: state, parent.
        let of =
            stat.rsplit(')').next().and_then(|s| s.split_whitespace().nth(1)).and_then(|p| p.parse().ok());
        let Ok(env) = std::fs::read(entry.path().join("environ")) else { continue };
        let role = env.split(|b| *b == 0).find_map(|v| v.strip_prefix(b"_PUSHGATE_ROLE="));
        if of == Some(parent)
            && let Some(role) = role
        {
            found.push((role[0] as char, pid));
        }
    }
    found.sort();
    found
}

#[test]
fn p7_a_rank_that_dies_ends_the_other_and_a_parent_that_dies_both() {
    let _alone = alone();
    let args = ["osu-latency", "-m", "8:8", "-i", "1000000000"];
    for victim in ["rank", "parent"] {
        let mut command = command(&args, &[]);
        let parent = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let start = Instant::now();
        let within = |what: &str| assert!(start.elapsed() < hang(), "{what}");
        let both = loop {
            let found = ranks(parent.id());
            if found.len() == 2 {
                break found;
            }
            within("two ranks start");
            std::thread::sleep(Duration::from_millis(5));
        };
        // Into the exchange, which polls.
        let worked = |pid| cpu_time(pid) >= patience(Duration::from_millis(300));
        wait_until("both ranks work", || both.iter().all(|(_, pid)| worked(*pid as u32)));
        let doomed = if victim == "rank" { both[1].1 } else { parent.id() as i32 };
        kill_process(Pid::from_raw(doomed).unwrap(), Signal::KILL).unwrap();
        let ended = parent.wait_with_output().unwrap();
        if victim == "rank" {
            assert_eq!(ended.status.code(), Some(1));
            let err = String::from_utf8(ended.stderr).unwrap();
            assert!(err.contains(&format!("rank 1 (pid {}) was killed by signal 9", both[1].1)), "{err}");
            // The rank has noticed the loss itself: its parent would have ended it without a
            // message.
            assert!(err.contains("pushgate: rank 1 is lost"), "{err}");
        }
        while both.iter().any(|(_, pid)| {
            // A zombie whose parent is gone waits for init.
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "))
        }) {
            within("both ranks end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
