//! Tests `pushgate run` as a command: on this host, over a stand-in for ssh, and over sshd on the loopback device where there
//! is one.

use std::fs::{self, Permissions};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use pushgate_tests::built::scratch;
use pushgate_tests::{pushgate, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::{ALLREDUCE, Ended, Run, alone, is_table, program};

/// An empty folder of one test.
fn folder(name: &str) -> PathBuf {
    let folder = scratch(env!("CARGO_TARGET_TMPDIR")).join("run").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// `pushgate run` with these arguments.
fn started(arguments: &[&str]) -> Command {
    let mut command = program(pushgate());
    command.arg("run").args(arguments);
    command
}

fn run(arguments: &[&str]) -> Ended {
    Run::start(&mut started(arguments)).end()
}

/// A line of `text` for each rank, sorted.
fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// The numbers of the processes that ranks have written into files of a folder, each once it is whole.
fn processes(folder: &Path, count: usize) -> Vec<Pid> {
    let read = || -> Vec<Pid> {
        let files = fs::read_dir(folder).unwrap().flatten();
        let text = files.filter_map(|file| fs::read_to_string(file.path()).ok());
        text.filter_map(|text| Pid::from_raw(text.strip_suffix('\n')?.parse().ok()?)).collect()
    };
    wait_until("a file of each rank", || read().len() == count);
    read()
}

/// Writes the process's number and sleeps. The rank is the name of the file.
fn sleeps(folder: &Path) -> String {
    format!("echo $$ > {}/$PUSHGATE_RANK; exec sleep 1000", folder.display())
}

#[track_caller]
fn are_gone(processes: &[Pid]) {
    wait_until("the end of all ranks", || {
        // What has ended and was not waited for by its parent may still be there.
        let runs = |pid: &Pid| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
            test_kill_process(*pid).is_ok()
                && !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
        };
        !processes.iter().any(runs)
    });
}

#[test]
fn ranks_of_this_host_run_the_program_and_each_line_has_its_rank() {
    let _alone = alone();
    let words = [
        "-n",
        "3",
        "--",
        "sh",
        "-c",
        "echo $PUSHGATE_RANK of $PUSHGATE_RANKS, $PUSHGATE_LOCAL_RANK; echo e >&2",
    ];
    let ended = run(&words);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(sorted(&ended.stdout), ["[0] 0 of 3, 0", "[1] 1 of 3, 1", "[2] 2 of 3, 2"]);
    assert_eq!(sorted(&ended.stderr), ["[0] e", "[1] e", "[2] e"]);
    let words = [&["-n", "3", "--no-prefix", "--", pushgate().to_str().unwrap()], &ALLREDUCE[..]].concat();
    let ended = run(&words);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    is_table(&ended.stdout, 3);
}

#[test]
fn p7_all_ranks_end_when_one_fails_and_the_command_exits_as_it_did() {
    let _alone = alone();
    let folder = folder("fails");
    let others = sleeps(&folder);
    // A program that SIGTERM does not end.
    let stubborn = format!("trap '' TERM; {others}");
    for (fails, code, says, other) in [
        ("exit 7", 7, "pushgate run: rank 2 exited with 7\n", &others),
        ("kill -KILL $$", 137, "pushgate run: rank 2 was killed by signal 9 (exit status 137)\n", &stubborn),
    ] {
        let wait = format!("while [ ! -s {0}/0 ] || [ ! -s {0}/1 ]; do sleep 0.01; done", folder.display());
        let script = format!("case $PUSHGATE_RANK in 0) {others};; 1) {other};; *) {wait}; {fails};; esac");
        let ended = run(&["-n", "3", "--", "sh", "-c", &script]);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(code), says));
        are_gone(&processes(&folder, 2));
        fs::read_dir(&folder).unwrap().flatten().for_each(|file| fs::remove_file(file.path()).unwrap());
    }
}

#[test]
fn p7_a_signal_or_the_end_of_the_command_ends_all_ranks() {
    let _alone = alone();
    let folder = folder("signals");
    for (signal, code) in [(Signal::INT, Some(130)), (Signal::TERM, Some(143)), (Signal::KILL, None)] {
        let run = Run::start(&mut started(&["-n", "2", "--", "sh", "-c", &sleeps(&folder)]));
        let ranks = processes(&folder, 2);
        kill_process(Pid::from_child(&run.child), signal).unwrap();
        assert_eq!(run.end().code, code);
        are_gone(&ranks);
        fs::read_dir(&folder).unwrap().flatten().for_each(|file| fs::remove_file(file.path()).unwrap());
    }
}

#[test]
fn p7_what_a_rank_started_ends_with_it_when_the_command_ends_the_rank() {
    let _alone = alone();
    let folder = folder("started");
    // SIGTERM ends the rank and not what it started.
    let script =
        format!("(trap '' TERM; {}) & wait", sleeps(&folder).replace("$$", "$(exec sh -c 'echo $PPID')"));
    let run = Run::start(&mut started(&["--", "sh", "-c", &script]));
    let ranks = processes(&folder, 1);
    kill_process(Pid::from_child(&run.child), Signal::TERM).unwrap();
    assert_eq!(run.end().code, Some(143));
    are_gone(&ranks);
}

#[test]
fn a_reader_that_has_gone_ends_all_ranks_quietly() {
    let _alone = alone();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = started(&["-n", "2", "--", "yes"]);
    let output = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), vec![]));
}

/// A command that takes the arguments of ssh, writes them to a file, and runs the last one here, with a new environment.
fn stand_in(folder: &Path) -> PathBuf {
    let path = folder.join("ssh");
    let log = folder.join("arguments");
    let script = format!(
        "#!/bin/sh\nprintf '%s\\n' \"$*\" >> {}\nfor last; do host=$command; command=$last; done\n\
         [ \"$host\" != unreachable ] || {{ echo 'ssh: no route' >&2; exit 255; }}\n\
         exec env -i PATH=\"$PATH\" HOST=\"$host\" sh -c \"$command\"\n",
        log.display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn ranks_of_several_hosts_are_told_everything_and_arguments_tell_no_secret() {
    let _alone = alone();
    let folder = folder("hosts");
    let ssh = format!("{} -p 2222", stand_in(&folder).display());
    let print = "echo $HOST $PUSHGATE_RANK/$PUSHGATE_RANKS $PUSHGATE_LOCAL_RANK/$PUSHGATE_LOCAL_RANKS \
                 $PUSHGATE_RENDEZVOUS $PUSHGATE_QP $PUSHGATE_SECRET $GIVEN; pwd";
    let words = [
        "--ssh",
        &ssh,
        "--hosts",
        "node1:2,me@node2",
        "--rendezvous-port",
        "7000",
        "-x",
        "GIVEN",
        "--workdir",
        "/",
        "--",
        "sh",
        "-c",
        print,
    ];
    let mut command = started(&words);
    command.env("PUSHGATE_SECRET", "open sesame").env("PUSHGATE_QP", "verbs").env("GIVEN", "a 'gift'");
    let ended = Run::start(&mut command).end();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let rest = "node1:7000 verbs open sesame a 'gift'";
    assert_eq!(
        sorted(&ended.stdout),
        [
            "[0] /".into(),
            format!("[0] node1 0/3 0/2 {rest}"),
            "[1] /".into(),
            format!("[1] node1 1/3 1/2 {rest}"),
            "[2] /".into(),
            format!("[2] me@node2 2/3 0/1 {rest}"),
        ]
    );
    let arguments = fs::read_to_string(folder.join("arguments")).unwrap();
    assert_eq!(arguments.lines().count(), 3, "{arguments}");
    assert!(arguments.lines().all(|line| line.starts_with("-p 2222 -T -o BatchMode=yes")), "{arguments}");
    assert!(!arguments.contains("sesame") && !arguments.contains("gift"), "{arguments}");
}

#[test]
fn ranks_of_several_hosts_meet_at_the_first_one() {
    let _alone = alone();
    let folder = folder("meet");
    let ssh = stand_in(&folder);
    let words = ["--ssh", ssh.to_str().unwrap(), "--hosts", "127.0.0.1:2,localhost", "--"];
    let ended = run(&[&words[..], &[pushgate().to_str().unwrap(), "ranks", "--join"]].concat());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let said = sorted(&ended.stdout);
    for (rank, lines) in said.chunks(2).enumerate() {
        let here = ["0 of 2", "1 of 2", "0 of 1"][rank];
        let start = format!("[{rank}] rank {rank} of 3 ({here} here), by pushgate run, job run-");
        assert!(
            lines[0].starts_with(&start) && lines[0].contains(", meets at 127.0.0.1:2"),
            "{}",
            ended.stdout
        );
        // These hosts are one, as the ranks find.
        assert_eq!(lines[1], format!("[{rank}] rank {rank}: all 3 are there, queue pairs would be local"));
    }
    assert_eq!(said.len(), 6);
}

#[test]
fn a_host_that_can_not_be_reached_is_named() {
    let _alone = alone();
    let folder = folder("unreachable");
    let ssh = stand_in(&folder);
    let words = ["--ssh", ssh.to_str().unwrap(), "--hosts", "a,unreachable", "--", "sleep", "1000"];
    let ended = run(&words);
    assert_eq!(ended.code, Some(255));
    let says =
        "pushgate run: rank 1 on unreachable exited with 255: ssh failed, and its own message says why";
    assert!(
        ended.stderr.starts_with("[1] ssh: no route\n") && ended.stderr.contains(says),
        "{}",
        ended.stderr
    );
    let ended = run(&["--ssh", "/nonexistent/ssh", "--hosts", "a", "--", "true"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.starts_with("pushgate: starting a rank by /nonexistent/ssh: "), "{}", ended.stderr);
    let ended = run(&["--workdir", "/nonexistent", "--", "true"]);
    assert!(ended.code == Some(127) && ended.stderr.contains("/nonexistent"), "{}", ended.stderr);
}

#[test]
fn a_file_names_the_hosts() {
    let _alone = alone();
    let folder = folder("file");
    let (ssh, file) = (stand_in(&folder), folder.join("hosts"));
    fs::write(&file, "# two\nnode1 slots=2\nnode2\n").unwrap();
    let files = [ssh.to_str().unwrap(), file.to_str().unwrap()];
    let ended = run(&["--ssh", files[0], "--hostfile", files[1], "--", "sh", "-c", "echo $HOST"]);
    assert_eq!((ended.code, sorted(&ended.stdout)), (Some(0), vec!["[0] node1", "[1] node1", "[2] node2"]));
    fs::write(&file, "node1\n\nnode2 slots=many\n").unwrap();
    let ended = run(&["--ssh", files[0], "--hostfile", files[1], "--", "true"]);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains(&format!("invalid hostfile `{}:3`", files[1])), "{}", ended.stderr);
}

// ------------------------------------------------------------------------------------------------ real sshd

/// An sshd of this test's own, on the loopback device. Dropping it ends it.
struct Sshd {
    child: Child,
    /// The command that reaches it.
    ssh: String,
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts sshd with keys and a configuration of its own. The error says what this host lacks.
fn sshd(folder: &Path) -> Result<Sshd, String> {
    let sshd = ["/usr/sbin/sshd", "/usr/local/sbin/sshd"].into_iter().find(|path| Path::new(path).exists());
    let sshd = sshd.ok_or("it is not installed (Debian: openssh-server)")?;
    for name in ["host", "user"] {
        let mut command = Command::new("ssh-keygen");
        command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(name)).stdin(Stdio::null());
        let made = command.status().is_ok_and(|status| status.success());
        made.then_some(()).ok_or("ssh-keygen makes no key")?;
    }
    if rustix::process::geteuid().is_root() {
        // Where a service manager makes this folder when it starts sshd.
        fs::create_dir_all("/run/sshd").map_err(|e| format!("it needs /run/sshd: {e}"))?;
    }
    fs::copy(folder.join("user.pub"), folder.join("authorized")).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = folder.display();
    let config = format!(
        "Port {port}\nListenAddress 127.0.0.1\nHostKey {at}/host\nAuthorizedKeysFile {at}/authorized\nPidFile none\n\
         StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n"
    );
    fs::write(folder.join("config"), config).unwrap();
    let mut command = Command::new(sshd);
    command.arg("-D").arg("-e").arg("-f").arg(folder.join("config"));
    let log = fs::File::create(folder.join("log")).unwrap();
    let child = command.stdin(Stdio::null()).stderr(log).spawn().map_err(|e| format!("{sshd}: {e}"))?;
    let ssh = format!(
        "ssh -F none -p {port} -i {at}/user -o IdentitiesOnly=yes -o UserKnownHostsFile=/dev/null -o \
         StrictHostKeyChecking=no -o LogLevel=ERROR"
    );
    let mut sshd = Sshd { child, ssh };
    wait_until("sshd listens", || {
        let ended = sshd.child.try_wait().unwrap();
        assert!(ended.is_none(), "sshd: {}", fs::read_to_string(folder.join("log")).unwrap());
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    Ok(sshd)
}

#[test]
fn p7_ranks_after_sshd_run_and_end_with_the_command() {
    let _alone = alone();
    let folder = folder("sshd");
    let sshd = match sshd(&folder) {
        Ok(sshd) => sshd,
        Err(why) => return skip(&format!("no sshd: {why}")),
    };
    // What the user's shell prints by itself when it starts is not ours: only lines of these ranks count.
    let ours = |text: &str, mark: &str| -> Vec<String> {
        sorted(text).into_iter().filter(|line| line.contains(mark)).map(str::to_owned).collect()
    };
    let hosts = ["--ssh", &sshd.ssh, "--hosts", "127.0.0.1:3", "--", pushgate().to_str().unwrap()];
    let words = ["bench", "allreduce", "--device", "cpu", "--size", "4K", "-n", "2", "-w", "1", "--json"];
    let ended = run(&[&hosts[..], &words].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = ours(&ended.stdout, "\"ranks\":3,");
    assert_eq!(lines.len(), 1, "{}", ended.stdout);
    assert!(lines[0].starts_with("[0] ") && lines[0].contains("\"verified\":true"), "{}", lines[0]);
    // Two names of one host are two hosts.
    let hosts = ["--ssh", &sshd.ssh, "--hosts", "127.0.0.1,localhost", "--rendezvous-port", "7000", "--"];
    let print = ["sh", "-c", "echo mark $PUSHGATE_RANK $PUSHGATE_RENDEZVOUS ${#PUSHGATE_SECRET}"];
    let ended = run(&[&hosts[..], &print].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = ["[0] mark 0 127.0.0.1:7000 64", "[1] mark 1 127.0.0.1:7000 64"];
    assert_eq!(ours(&ended.stdout, "mark"), lines);
    let fails = ["sh", "-c", "[ $PUSHGATE_RANK = 0 ] || exit 9; exec sleep 1000"];
    let ended = run(&[&hosts[..], &fails].concat());
    assert_eq!(ended.code, Some(9));
    assert_eq!(ours(&ended.stderr, "pushgate run:"), ["pushgate run: rank 1 on localhost exited with 9"]);
    for signal in [Signal::INT, Signal::KILL] {
        let pids = folder.join(format!("pids-{}", signal.as_raw()));
        fs::create_dir(&pids).unwrap();
        let run = Run::start(&mut started(&[&hosts[..], &["sh", "-c", &sleeps(&pids)]].concat()));
        let ranks = processes(&pids, 2);
        kill_process(Pid::from_child(&run.child), signal).unwrap();
        run.end();
        are_gone(&ranks);
    }
}
