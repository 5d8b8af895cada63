//! `pushgate inspect` on real processes: two ranks of a job, one of which is known to be to blame.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use pushgate::settings::PluginSettings;
use pushgate::{Comm, Context, Launch, Module, QpConfig, Settings, upload_descriptors};
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_engine::recorder::{JOB, NAME};
use pushgate_tests::{hang, pushgate, wait_until};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Receives of a rank.
const RECEIVES: u64 = 64;

// ---------------------------------------------------------------------- a rank

#[test]
#[ignore = "a rank of the tests below, in a process of its own"]
fn role() {
    let var = |name: &str| env::var(name).unwrap();
    let (rank, sends): (u32, u64) =
        (var("INSPECT_RANK").parse().unwrap(), var("INSPECT_SENDS").parse().unwrap());
    let mut settings = Settings::load().unwrap();
    settings.timeout = 10 * hang();
    for (name, value) in [("device", "cpu"), ("window-size", "64K"), ("slots", "128")] {
        settings.set(name, value).unwrap();
    }
    settings.receives = RECEIVES;
    let context = Context::builder().settings(settings).build().unwrap();
    let comm = Comm::connect(&context, &var("INSPECT_JOB"), rank, 2).unwrap();
    let posted_receives = var("INSPECT_POSTED") == "true";
    let qp = comm.queue_pair(1 - rank, 0, QpConfig { posted_receives, ..QpConfig::default() }).unwrap();
    let module = Module::embedded(&context);
    let (stream, result) = (context.stream().unwrap(), context.alloc(8).unwrap());
    let descriptor = upload_descriptors(&context, [&qp]).unwrap();
    // `struct hand_over_params`: the queue pair, the result, bytes, count, and no rkey.
    let params = [descriptor.addr(), result.addr(), 64, sends, 0];
    // SAFETY: the process ends before anything that the kernel uses does.
    let running =
        unsafe { context.launch(&stream, &module, "hand_over", Launch::new(1, 1), &params).unwrap() };
    println!("@{}", if env::var("INSPECT_FORKS").is_ok() { fork_sleeper() } else { 0 });
    // Until the test is done, or has died.
    let _ = std::io::stdin().read_line(&mut String::new());
    std::mem::forget(running);
    std::process::exit(0);
}

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
}

/// Forks a child that has all descriptors of this process, and ends after it. Returns the child's number.
fn fork_sleeper() -> i32 {
    let parent = rustix::process::getpid();
    // SAFETY: the child makes system calls alone and leaves by `_exit`.
    match unsafe { fork() } {
        0 => loop {
            std::thread::sleep(Duration::from_millis(10));
            if rustix::process::getppid() != Some(parent) {
                // SAFETY: ends the child, which has nothing to tidy up.
                unsafe { _exit(0) }
            }
        },
        child => child,
    }
}

/// A rank in a process of its own, and the child that it forked, or 0. Dropping it kills the process.
struct Rank(Child, u32);

impl Rank {
    fn start(job: &str, rank: u32, sends: u64, posted: bool, with: &[(&str, &str)]) -> Rank {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"]);
        clear(&mut command);
        command.env("INSPECT_JOB", job).env("INSPECT_RANK", rank.to_string());
        command.env("INSPECT_SENDS", sends.to_string()).env("INSPECT_POSTED", posted.to_string());
        command.envs(with.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
        Rank(command.spawn().unwrap(), 0)
    }

    /// Waits until the rank has its queue pair.
    fn ready(mut self) -> Rank {
        let mut lines = BufReader::new(self.0.stdout.take().unwrap()).lines().map(Result::unwrap);
        // The line follows what the test harness prints.
        let said = lines.find_map(|line| Some(line.split_once('@')?.1.to_string()));
        self.1 = said.expect("a rank has ended").parse().unwrap();
        self
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Rank 0, which sends `sends` messages, and rank 1, which takes none.
fn two(job: &str, sends: u64, posted: bool, with: &[(&str, &str)]) -> [Rank; 2] {
    let ranks = [Rank::start(job, 0, sends, false, with), Rank::start(job, 1, 0, posted, with)];
    ranks.map(Rank::ready)
}

// ----------------------------------------------------------------- the command

/// A program in an environment without settings.
fn clear(command: &mut Command) {
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env_remove("PUSHGATE_CONFIG").env_remove("PUSHGATE_LOG");
}

fn inspect(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(pushgate());
    clear(&mut command);
    let Output { status, stdout, stderr } = command.arg("inspect").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

#[track_caller]
fn prints(args: &[&str]) -> String {
    let (code, out, err) = inspect(args);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{args:?}\n{out}");
    out
}

/// The sentences about all queue pairs, with the numbers of their ends.
fn sentences(args: &[&str]) -> Vec<(String, usize)> {
    let all: Value = serde_json::from_str(&prints(&[args, &["--json"]].concat())).unwrap();
    let pairs = all["queue_pairs"].as_array().unwrap().iter();
    let of = |pair: &Value| {
        (pair["sentence"].as_str().unwrap().to_string(), pair["ends"].as_array().unwrap().len())
    };
    pairs.map(of).collect()
}

/// Asks until the one queue pair is said to wait for this: messages may still move.
#[track_caller]
fn says(args: &[&str], sentence: &str, ends: usize) {
    let mut last = Vec::new();
    wait_until(sentence, || {
        last = sentences(args);
        let [(said, of)] = &last[..] else { return false };
        said.starts_with(sentence) && *of == ends
    });
}

/// A name that no other job of this host has.
fn job(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

// ----------------------------------------------------------------------- tests

#[test]
fn a_receiver_that_takes_nothing_is_named_by_job_by_process_and_from_both_ends() {
    let job = job("slow");
    let [sender, receiver] = two(&job, 100, false, &[]);
    let said = "rank 1 has not taken 64 messages that arrived: its kernel or program is slow";
    says(&[&job], said, 2);
    let [sender, receiver] = [&sender, &receiver].map(|rank| rank.pid().to_string());
    says(&[&receiver], said, 1);
    says(&[&receiver, "--all"], said, 2);
    says(&[&sender, "--all"], said, 2);
    // The sender alone knows that it has no credit.
    says(&[&sender], "no receive credit: messages have used all of the 64 receives that rank 1 granted", 1);
    let text = prints(&[&job]);
    for line in [
        format!("process {sender} ("),
        format!("process {receiver} ("),
        format!("rank 0 (process {sender}) and rank 1 (process {receiver}), local: {said}"),
        "  rank 0, queue pair ".into(),
        "    sends     posted 65, released 64, received by rank 1 64, no longer needed there 0; 65 of 128"
            .into(),
        "    credits   0 of 64 receives that rank 1 granted are left, ".into(),
        "    receives  granted 64, accepted 64, received 64, shown 64, taken by the device 0".into(),
        "    events    ".into(),
    ] {
        assert!(text.lines().any(|l| l.starts_with(&line)), "no {line:?} in\n{text}");
    }
}

/// Nothing names the ends of such links, so the other end is not told from those of other jobs.
#[test]
fn an_end_of_a_link_over_tcp_is_shown_without_queue_pairs_of_others() {
    let tcp = [("PUSHGATE_QP", "tcp")];
    let [sender, _receiver] = two(&job("tcp-one"), 100, false, &tcp);
    let _others = two(&job("tcp-other"), 100, false, &tcp);
    let ends = sentences(&[&sender.pid().to_string(), "--all"]).iter().map(|(_, ends)| ends).sum::<usize>();
    assert_eq!(ends, 1);
}

#[test]
fn a_receiver_that_posts_no_receive_is_named() {
    let job = job("unposted");
    let [sender, _receiver] = two(&job, 1, true, &[]);
    let said = "no receive credit: rank 1 has posted no receive";
    says(&[&job], said, 2);
    says(&[&sender.pid().to_string()], said, 1);
}

#[test]
fn a_process_that_is_stopped_is_named_until_it_goes_on() {
    let job = job("stopped");
    let [_sender, receiver] = two(&job, 0, false, &[]);
    says(&[&job], "neither rank 0 nor rank 1 has anything to send", 2);
    receiver.signal(Signal::STOP);
    says(&[&job], "rank 1's engine has not run for ", 2);
    let [(said, _)] = &sentences(&[&job])[..] else { panic!("one queue pair") };
    assert!(said.ends_with(" s (process stopped: state T)"), "{said}");
    receiver.signal(Signal::CONT);
    says(&[&job], "neither rank 0 nor rank 1 has anything to send", 2);
}

#[test]
fn an_engine_of_a_proxy_is_found_by_its_program_and_says_so_by_sigusr1() {
    let job = job("served");
    let socket = format!("@pushgate-inspect-test-{}", std::process::id());
    let mut command = Command::new(pushgate());
    clear(&mut command);
    command.args(["proxy", "--proxy-socket", &socket, "--stall-report", "100ms"]).stderr(Stdio::piped());
    let mut proxy = Rank(command.spawn().unwrap(), 0);
    let mut lines = BufReader::new(proxy.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("serving at")));
    let with = [("PUSHGATE_PROXY", "process"), ("PUSHGATE_PROXY_SOCKET", socket.as_str())];
    let [sender, receiver] = two(&job, 100, false, &with);
    let said = "rank 1 has not taken 64 messages that arrived: its kernel or program is slow";
    says(&[&job], said, 2);
    says(&[&sender.pid().to_string(), "--all"], said, 2);
    // The programs' numbers and states, not those of the proxy that serves both.
    let rank = |rank, program: &Rank| {
        format!("rank {rank} (process {}, served by the proxy, process {})", program.pid(), proxy.pid())
    };
    let both = format!("{} and {}, local: {said}", rank(0, &sender), rank(1, &receiver));
    let text = prints(&[&job]);
    assert!(text.lines().any(|line| line.starts_with(&both)), "no {both:?} in\n{text}");
    receiver.signal(Signal::STOP);
    says(&[&job], &format!("rank 1's program (process {}) is stopped: state T", receiver.pid()), 2);
    let mut top = Command::new(pushgate());
    clear(&mut top);
    let top = top.args(["top", "--once", "--interval", "50ms"]).output().unwrap();
    let table = String::from_utf8(top.stdout).unwrap();
    let row = |program: &Rank| {
        let pid = program.pid().to_string();
        let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        rows.find(|cells| cells.first() == Some(&&*pid)).unwrap_or_else(|| panic!("no {pid} in\n{table}"))
    };
    assert_eq!((row(&sender)[6], row(&receiver)[6]), ("live", "stopped"), "{table}");
    receiver.signal(Signal::CONT);
    says(&[&proxy.pid().to_string()], said, 2);
    // The engines have said so too, in the proxy's log.
    assert!(lines.any(|line| line.contains("a queue pair has not moved, though something is under way")));
    let names = |line: &String| line.starts_with(&rank(0, &sender));
    assert!(lines.any(|line| names(&line) && line.contains(", local: no receive credit")));
    proxy.signal(Signal::USR1);
    let begins = format!("process {} (pushgate), engine ", proxy.pid());
    assert!(lines.any(|line| line.starts_with(&begins)), "no report");
    assert!(lines.any(|line| names(&line) && line.contains(&format!(", local: {said}"))));
}

#[test]
fn what_is_not_there_is_said_with_what_is() {
    let (code, out, err) = inspect(&["no-such-job-or-process"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(
        err.starts_with("pushgate: `no-such-job-or-process` is no job or process with an engine here: "),
        "{err}"
    );
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let pid = gone.id().to_string();
    assert_eq!(inspect(&[&pid]), (Some(2), String::new(), format!("pushgate: there is no process {pid}\n")));
    let own = std::process::id().to_string();
    let none = format!(
        "pushgate: process {own} has no engine of pushgate, nor has a proxy of this user one for it\n"
    );
    assert_eq!(inspect(&[&own]), (Some(1), String::new(), none));
    assert_eq!(inspect(&[]).0, Some(2));
}

/// The engine of such a recorder does not run yet, and its process is of a job already.
#[test]
fn a_recorder_that_is_being_set_up_is_passed_over() {
    let job = job("begun");
    let _of_the_job = memfd_create(format!("{JOB}{job}"), MemfdFlags::CLOEXEC).unwrap();
    let _without_size = memfd_create(NAME, MemfdFlags::CLOEXEC).unwrap();
    let _without_head = SharedMemory::builder(NAME, 1 << 16).create().unwrap();
    let _ranks = two(&job, 0, false, &[]);
    says(&[&job], "neither rank 0 nor rank 1 has anything to send", 2);
}

#[test]
fn nothing_is_left_of_a_process_that_was_killed() {
    let job = job("killed");
    let [sender, receiver] = two(&job, 0, false, &[]);
    let pid = receiver.pid();
    drop(receiver);
    wait_until("the end of rank 1", || {
        let said = sentences(&[&job]);
        matches!(&said[..], [(said, 1)] if said.starts_with("the queue pair has ended at rank 0"))
    });
    assert_eq!(inspect(&[&pid.to_string()]).0, Some(2));
    drop(sender);
}

#[test]
fn a_forked_child_that_has_a_ranks_descriptors_is_no_rank() {
    let job = job("forked");
    let [_sender, receiver] = two(&job, 0, false, &[("INSPECT_FORKS", "1")]);
    says(&[&job], "neither rank 0 nor rank 1 has anything to send", 2);
    let child = receiver.1.to_string();
    assert_ne!(child, "0");
    let (code, _, err) = inspect(&[&child]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.starts_with(&format!("pushgate: process {child} has no engine of pushgate")), "{err}");
}
