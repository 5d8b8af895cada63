//! `pushgate doctor`, `report` and `proxy`, and how `bench allreduce` ends its ranks: wrong inputs and situations, each
//! with its exact message and exit code (docs/operations.md, "Exit codes").

use std::io::{BufRead, BufReader, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pushgate::settings::PluginSettings;
use pushgate_doctor::CHECKS;
use pushgate_tests::built::{pushgate, scratch};
use pushgate_tests::{hang, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A number that no other test of this process has.
fn number() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A folder of a test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let path = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("command-host-{}", number()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path.canonicalize().unwrap())
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A program in an environment without settings.
fn program(path: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(path);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    for name in ["PUSHGATE_CONFIG", "PUSHGATE_LOG", "PUSHGATE_PROBE_FILE", "NOTIFY_SOCKET", "NO_COLOR"] {
        command.env_remove(name);
    }
    command
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn ended(output: Output) -> Ended {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

fn run(args: &[&str]) -> Ended {
    ended(program(pushgate(), args).output().unwrap())
}

fn allreduce(args: &[&str]) -> Command {
    program(pushgate(), &[&["bench", "allreduce", "--device", "cpu"], args].concat())
}

/// It ends with this code, says this and nothing else, and prints nothing.
#[track_caller]
fn refused(args: &[&str], code: i32, says: &str) {
    let ended = run(args);
    assert_eq!((ended.code, &*ended.stderr), (Some(code), &*format!("pushgate: {says}\n")), "{args:?}");
    assert_eq!(ended.stdout, "", "{args:?}");
}

// --------------------------------------------------------------------- doctor

#[test]
fn a_root_that_is_no_folder_is_refused_with_what_it_should_be() {
    let says = "--root: /nonexistent is no folder: name one that holds sys, proc, dev and etc of a host, such as an \
                unpacked archive of `pushgate doctor --archive`";
    refused(&["doctor", "--root", "/nonexistent"], 2, says);
    refused(&["doctor", "--root", "/dev/null"], 2, &says.replace("/nonexistent", "/dev/null"));
}

#[test]
fn a_check_that_is_not_there_is_refused_with_those_that_are() {
    let names: Vec<_> = CHECKS.iter().map(|check| check.name).collect();
    let says = format!("--only: there is no check memlok; there are {}", names.join(", "));
    refused(&["doctor", "--only", "memlok"], 2, &says);
}

#[test]
fn a_host_without_rdma_is_told_what_was_looked_for_and_how_to_ask_for_rdma() {
    let folder = Folder::new();
    let root = folder.file("");
    let look = |more: &[&str]| {
        let ended = run(&[&["doctor", "--root", &root], more].concat());
        let line = ended.stdout.lines().rev().nth(1).unwrap().to_owned();
        (ended.code, line)
    };
    let (code, line) = look(&[]);
    assert_eq!(
        line,
        "Looked for what queue pairs of the kinds local and tcp need: local joins ranks of one host, tcp those of several. This \
         host has no RDMA device. `pushgate doctor --qp verbs` asks for RDMA."
    );
    assert_eq!(code, Some(0));
    let (code, line) = look(&["--qp", "verbs"]);
    assert_eq!(line, "Looked for what queue pairs of the kind verbs (RDMA) need, on any device.");
    assert_eq!(code, Some(2), "a host without RDMA fails where RDMA was asked for");
    let (_, line) = look(&["--qp", "verbs", "--ib-dev", "mlx5_0"]);
    assert_eq!(line, "Looked for what queue pairs of the kind verbs (RDMA) need, on the device mlx5_0.");
}

#[test]
fn an_archive_that_can_not_be_written_is_refused_and_what_is_there_stays() {
    let folder = Folder::new();
    let file = folder.file("host.tar");
    folder.write("host.tar", "mine");
    refused(
        &["doctor", "--archive", &file],
        1,
        &format!("{file} is there: --archive FILE names a file that is not"),
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    refused(
        &["doctor", "--archive", "/nonexistent/host.tar"],
        1,
        "/nonexistent/host.tar can't be written: No such file or directory (os error 2)",
    );
}

#[test]
fn answers_that_make_no_sense_are_refused_with_their_file() {
    let folder = Folder::new();
    folder.write("answers.json", "[1");
    let says = format!(
        "--root: {} is no file of `pushgate doctor --archive`: EOF while parsing a list at line 1 column 2",
        folder.file("answers.json")
    );
    refused(&["doctor", "--root", &folder.file("")], 2, &says);
}

/// Packs, unpacks, and looks again: the findings of both times.
fn archived(folder: &Folder, args: &[&str]) -> [Vec<Value>; 2] {
    let file = folder.file("host.tar");
    let findings = |ended: Ended| {
        let report: Value =
            serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {}", ended.stderr));
        report["findings"].as_array().unwrap().clone()
    };
    let packed = run(&[&["doctor", "--json", "--archive", &file], args].concat());
    let said = packed.stderr.lines().last().unwrap().to_owned();
    assert!(said.starts_with(&format!("pushgate: {file} holds ")), "{said}");
    assert!(said.ends_with(&format!("tar xf {file} && pushgate doctor --root pushgate-doctor")), "{said}");
    let here = findings(packed);
    let tar = Command::new("tar").args(["xf", &file, "-C"]).arg(&folder.0).status().unwrap();
    assert!(tar.success());
    [here, findings(run(&["doctor", "--json", "--root", &folder.file("pushgate-doctor")]))]
}

#[test]
fn an_archive_unpacked_has_the_findings_of_its_host() {
    let folder = Folder::new();
    for (name, text) in [
        ("proc/self/limits", "Max locked memory         65536                65536                bytes"),
        ("proc/sys/kernel/yama/ptrace_scope", "3\n"),
        ("sys/class/infiniband/mlx5_0/node_type", "1: CA\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n"),
        ("sys/module/pushgate/version", "0.0.1\n"),
    ] {
        folder.write(&format!("tree/{name}"), text);
    }
    // With the settings of the host, too.
    let tree = folder.file("tree");
    let [here, there] = archived(&folder, &["--qp", "verbs", "--window", "staging", "--root", &tree]);
    assert_eq!(here, there);
    let failed = here.iter().filter(|f| f["status"] == "failed").map(|f| f["check"].as_str().unwrap());
    assert_eq!(failed.collect::<Vec<_>>(), ["rdma-port", "memlock", "module"]);
}

#[test]
fn an_archive_of_this_host_has_the_statuses_of_this_host() {
    let folder = Folder::new();
    let [here, there] = archived(&folder, &[]);
    let status = |all: &[Value]| -> Vec<(Value, Value)> {
        all.iter().map(|f| (f["check"].clone(), f["status"].clone())).collect()
    };
    assert_eq!(status(&here), status(&there));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let bytes = std::fs::read(folder.file("host.tar")).unwrap();
    // A name as short as `vm` may be part of any word.
    assert!(host.len() < 6 || !String::from_utf8_lossy(&bytes).contains(&host), "{host}");
}

// --------------------------------------------------------------------- report

#[test]
fn a_page_that_can_not_be_written_is_refused() {
    let folder = Folder::new();
    let page = folder.file("page.html");
    folder.write("page.html", "mine");
    refused(
        &["report", "--out", &page],
        1,
        &format!("{page} is there: --force writes over it, --out FILE names another"),
    );
    refused(&["report", "--out", "/"], 1, "/ is a folder: name a file in it");
    refused(
        &["report", "--out", "/nonexistent/page.html"],
        1,
        "/nonexistent/page.html can't be written: No such file or directory (os error 2)",
    );
}

#[test]
fn a_page_goes_to_standard_output_opens_with_the_doctor_and_shows_no_other_host() {
    let ended = run(&["report", "--out", "-"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let page = ended.stdout;
    assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"), "{}", page.len());
    let at = |what: &str| page.find(what).unwrap_or_else(|| panic!("no {what}"));
    assert!(at("<section id=\"doctor\"") < at("<section id=\"summary\""));
    assert!(
        at("Looked for what queue pairs of the kinds local and tcp need") < at("<section id=\"summary\"")
    );
    assert!(!page.contains("example"), "a page shows this host alone");
}

// ----------------------------------------------------------- causes and codes

#[test]
fn an_input_that_is_not_there_has_one_code_and_names_its_cause_once() {
    let gone = "No such file or directory (os error 2)";
    let topology = format!("/nonexistent cannot be read: {gone}");
    refused(&["topo", "--topology", "/nonexistent"], 2, &topology);
    refused(&["report", "--out", "-", "--topology", "/nonexistent"], 2, &topology);
    refused(&["model", "--params", "/nonexistent"], 2, &format!("cannot read /nonexistent: {gone}"));
    refused(
        &["topo", "--sysfs", "/nonexistent"],
        2,
        "/nonexistent: no such folder; --sysfs takes the root of a sysfs",
    );
    refused(
        &["report", "--out", "-", "--findings", "/nonexistent"],
        2,
        &format!("findings /nonexistent: {gone}"),
    );
}

/// The command of each subcommand that works with settings.
fn workers() -> Vec<Command> {
    let benches =
        ["local", "osu-latency", "push", "allreduce"].map(|name| program(pushgate(), &["bench", name]));
    let others = ["probe", "nccl-check"].map(|name| program(pushgate(), &[name]));
    benches.into_iter().chain(others).collect()
}

#[test]
fn a_setting_that_is_wrong_has_one_code_everywhere_and_names_its_cause_once() {
    let more = [&["proxy"][..], &["devices"]].map(|args| program(pushgate(), args));
    for mut command in workers().into_iter().chain(more) {
        for (name, value) in [
            ("PUSHGATE_QP", "smoke"),
            ("PUSHGATE_QPS", "1"),
            ("PUSHGATE_CONFIG", "/nonexistent"),
            ("PUSHGATE_CONFIG", "/dev/null/pushgate.toml"),
        ] {
            command.env_remove("PUSHGATE_QP").env_remove("PUSHGATE_QPS").env_remove("PUSHGATE_CONFIG");
            let ended = ended(command.env(name, value).output().unwrap());
            assert_eq!(ended.code, Some(2), "{command:?} with {name}={value}: {}", ended.stderr);
            assert_eq!(ended.stdout, "", "{command:?}");
            assert!(ended.stderr.matches("os error").count() <= 1, "{}", ended.stderr);
        }
    }
}

#[test]
fn a_gpu_that_is_asked_for_and_not_there_has_one_code_everywhere() {
    if pushgate::probe_cuda().is_ok() {
        return skip("a GPU is here, so nothing fails for want of one");
    }
    for mut command in workers() {
        // `local` needs no device at all.
        if command.get_args().any(|arg| arg == "local") {
            continue;
        }
        let ended = ended(command.env("PUSHGATE_DEVICE", "cuda").output().unwrap());
        assert_eq!(ended.code, Some(2), "{command:?}: {}", ended.stderr);
    }
}

#[test]
fn nccl_check_says_at_once_all_that_is_missing_and_what_to_install() {
    if pushgate::probe_cuda().is_ok() {
        return skip("a GPU is here, so it is not missing");
    }
    let named = ["--nccl", "/nonexistent/libnccl.so.2", "--plugin", "/nonexistent/plugin.so"];
    let ended = run(&[&["nccl-check"][..], &named].concat());
    assert_eq!((ended.code, &*ended.stdout), (Some(2), ""), "{}", ended.stderr);
    let lines: Vec<_> = ended.stderr.lines().collect();
    assert_eq!(lines[0], "pushgate: nccl-check needs what this host lacks:");
    assert!(
        lines[1].starts_with("  a GPU (") && lines[1].contains("install NVIDIA's driver"),
        "{}",
        lines[1]
    );
    assert_eq!(lines[2], "  NCCL (no file /nonexistent/libnccl.so.2): name libnccl.so.2 with --nccl");
    let plugin = "  the plugin (no file /nonexistent/plugin.so): build it with `cargo xtask plugin`, which prints its path";
    assert_eq!(lines[3..], [plugin]);
    // Wrong arguments are refused before anything starts, and no process or file of the command stays.
    let wrong =
        "invalid minbytes `6` (from --minbytes): expected a multiple of 4, at most 64G, as in 8, 1K or 1G";
    refused(&["nccl-check", "-b", "6"], 2, wrong);
}

#[test]
fn nixl_check_says_at_once_all_that_is_missing_and_what_to_install() {
    let folder = Folder::new();
    // A Python without this host's packages.
    let python = folder.file("python");
    std::fs::write(&python, "#!/bin/sh\nunset PYTHONPATH\nexec python3 -S \"$@\"\n").unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let python = python.as_str();
    let check = |python: &str| run(&["nixl-check", "--plugin", "/nonexistent/p.so", "--python", python]);
    let ended = check(python);
    assert_eq!((ended.code, &*ended.stdout), (Some(2), ""), "{}", ended.stderr);
    let lines: Vec<_> = ended.stderr.lines().collect();
    assert_eq!(lines[0], "pushgate: nixl-check needs what this host lacks:");
    assert_eq!(
        lines[1],
        format!(
            "  NIXL (this Python has no wheel of NIXL with backends (looked for nixl-cu13, nixl-cu12, nixl): pip install nixl-cu13), \
             or name another Python with --python than {python}"
        )
    );
    let plugin = "  the plugin (no file /nonexistent/p.so): build it with `cargo build --release -p pushgate-nixl-plugin`";
    assert_eq!(lines[2..], [plugin]);
    let ended = check("/nonexistent/python");
    assert_eq!(ended.code, Some(2));
    let none = "  a Python (/nonexistent/python: No such file or directory (os error 2)): name one that has NIXL with --python";
    assert_eq!(ended.stderr.lines().nth(1), Some(none));
    // Wrong arguments are refused before anything starts, and no process or file of the command stays.
    refused(
        &["nixl-check", "--turns", "0", "--python", python],
        2,
        "invalid turns `0` (from --turns): expected 1 to 1000",
    );
}

#[test]
fn a_setting_without_effect_is_a_warning() {
    let cores = rustix::thread::sched_getaffinity(None).unwrap();
    assert!(!cores.is_set(999), "this machine has a core 999");
    let bench = ["bench", "local", "--runs", "1", "--seconds", "0.001", "--bytes", "64"];
    let ended_bench =
        run(&[&bench[..], &["--proxy-cpu", "999", "--ib-mtu", "1024", "--path", "push"]].concat());
    assert_eq!(ended_bench.code, Some(0), "{}", ended_bench.stderr);
    let lines: Vec<_> = ended_bench.stderr.lines().filter(|line| line.starts_with("pushgate: ")).collect();
    assert_eq!(
        lines[0],
        "pushgate: warning: ib-mtu has no effect: queue pairs are local, which use no RDMA device"
    );
    let cores = "pushgate: warning: proxy-cpu 999 has no effect: this process may run on cores ";
    assert!(lines[1].starts_with(cores) && lines.len() == 3, "{lines:?}");
    assert_eq!(lines[2], "pushgate: warning: path has no effect: the NCCL plugin alone has this setting");

    // These two have queue pairs of their kind, whatever the setting qp says.
    let tcp = ["bench", "tcp", "--runs", "1", "--seconds", "0.001", "--bytes", "64", "--tcp-streams", "2"];
    for bench in [&tcp[..], &["bench", "rdma", "--ib-dev", "none-of-this-name", "--rdma-cm", "on"]] {
        let said = run(bench).stderr;
        assert!(!said.contains("has no effect"), "{bench:?}: {said}");
    }

    let small = ["--ranks", "2", "--size", "1K", "--iters", "1", "--warmup", "0"];
    let ended = ended(allreduce(&[&small[..], &["--host", "10.0.0.1"]].concat()).output().unwrap());
    assert_eq!(
        ended.stderr,
        "pushgate: warning: host has no effect: queue pairs are local, whose ranks are all on this host\n"
    );
    assert_eq!(ended.code, Some(0));
}

// ---------------------------------------------------------------------- proxy

/// A `pushgate proxy` that serves.
struct Proxy {
    child: Child,
    stderr: BufReader<ChildStderr>,
    said: String,
}

impl Proxy {
    fn start(socket: &str, args: &[&str], env: &[(&str, &str)]) -> Proxy {
        let mut command = program(pushgate(), &["proxy", "--proxy-socket", socket]);
        let mut child = command.args(args).envs(env.iter().copied()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.ends_with(&format!("pushgate proxy: serving at {socket}\n")) {
            assert!(stderr.read_line(&mut said).unwrap() > 0, "it ended: {said}");
        }
        Proxy { child, stderr, said }
    }

    /// Ends it by a signal: how it ended, and all that it said.
    fn end(mut self, signal: Signal) -> (ExitStatus, String) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let mut said = std::mem::take(&mut self.said);
        self.stderr.read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap(), said)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn abstract_name() -> String {
    format!("@pushgate-command-host-{}", number())
}

#[test]
fn a_proxy_says_that_it_serves_and_tells_systemd() {
    let socket = abstract_name();
    let name = format!("pushgate-notify-{}", number());
    let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    manager.set_read_timeout(Some(hang())).unwrap();
    let told = || {
        let mut bytes = [0; 256];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    };
    let proxy =
        Proxy::start(&socket, &[], &[("NOTIFY_SOCKET", &format!("@{name}")), ("PUSHGATE_LOG", "info")]);
    assert_eq!(told(), format!("READY=1\nSTATUS=serving at {socket}"));
    let (status, said) = proxy.end(Signal::TERM);
    assert_eq!(told(), "STOPPING=1");
    assert_eq!(status.code(), Some(0), "SIGTERM is how a service is ended");
    assert!(said.contains("the proxy serves") && !said.contains('\x1b'), "colours in a pipe: {said:?}");
}

#[test]
fn a_service_manager_that_is_not_there_is_a_word_and_no_end() {
    let socket = abstract_name();
    let env = [("NOTIFY_SOCKET", "/nonexistent/notify"), ("PUSHGATE_LOG", "error")];
    let proxy = Proxy::start(&socket, &[], &env);
    let (status, said) = proxy.end(Signal::TERM);
    let gone =
        "the service manager at /nonexistent/notify was not told: No such file or directory (os error 2)";
    let line = format!("pushgate proxy: {gone}\n");
    assert_eq!(said, format!("pushgate proxy: serving at {socket}\n{line}{line}"));
    assert_eq!(status.code(), Some(0));
}

#[test]
fn a_proxy_takes_no_socket_that_is_taken_and_no_folder_of_others() {
    let socket = abstract_name();
    let proxy = Proxy::start(&socket, &[], &[]);
    refused(
        &["proxy", "--proxy-socket", &socket],
        1,
        &format!(
            "proxy at {socket}: a proxy listens at {socket} already: use that one, end it, or name another socket"
        ),
    );
    assert_eq!(proxy.end(Signal::INT).0.code(), Some(130), "Ctrl-C");

    let folder = Folder::new();
    let open = folder.file("open");
    std::fs::DirBuilder::new().mode(0o755).create(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
    let uid = rustix::process::geteuid().as_raw();
    refused(
        &["proxy", "--proxy-socket", &format!("{open}/proxy")],
        1,
        &format!(
            "proxy at {open}/proxy: {open} must be a directory of user {uid} with mode 0700 (it is user {uid}'s, mode \
             755), because a user who reaches the socket there can hand the proxy work: chmod it, or name another"
        ),
    );
    let private = folder.file("private");
    std::fs::DirBuilder::new().mode(0o700).create(&private).unwrap();
    folder.write("private/proxy", "");
    refused(
        &["proxy", "--proxy-socket", &format!("{private}/proxy")],
        1,
        &format!("proxy at {private}/proxy: {private}/proxy is there and no socket: name another path"),
    );
}

#[test]
fn a_proxy_warns_of_settings_that_are_its_programs_own() {
    let socket = abstract_name();
    let proxy = Proxy::start(&socket, &["--proxy-cpu", "0"], &[("PUSHGATE_LOG", "error")]);
    let (_, said) = proxy.end(Signal::TERM);
    let warning = "pushgate proxy: warning: proxy-cpu has no effect: each program brings its own settings\n";
    assert_eq!(said, format!("{warning}pushgate proxy: serving at {socket}\n"));
}

#[test]
fn a_proxy_of_another_user_serves_the_users_that_it_names_and_says_what_they_hold() {
    if !rustix::process::geteuid().is_root() {
        return skip(
            "a_proxy_of_another_user_serves_the_users_that_it_names_and_says_what_they_hold: only root can become other users",
        );
    }
    const PROXY: u32 = 65003;
    const USER: u32 = 65001;
    // Where other users find the command: the target folder may be closed to them.
    let folder = Folder(std::env::temp_dir().join(format!("pushgate-users-{}", number())));
    std::fs::create_dir(&folder.0).unwrap();
    std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&folder.0, Some(PROXY), Some(PROXY)).unwrap();
    let command = folder.0.join("pushgate");
    // By another process: a child of another test would have the file open for writing until it runs its program, and this one would
    // not start.
    assert!(Command::new("cp").arg(pushgate()).arg(&command).status().unwrap().success());
    std::fs::set_permissions(&command, std::fs::Permissions::from_mode(0o755)).unwrap();
    let socket = folder.file("proxy");
    let as_user = |uid: u32, args: &[&str]| {
        let mut command = program(&command, args);
        command.args(["--proxy-socket", &socket]).uid(uid).gid(uid).current_dir("/");
        command.env("XDG_CACHE_HOME", format!("{}/cache-{uid}", folder.0.display()));
        command
    };
    let mut serves = as_user(PROXY, &["proxy", "--proxy-serves", "@65001", "--proxy-user-queue-pairs", "2"]);
    let mut child = serves.spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.ends_with(&format!("pushgate proxy: serving at {socket}\n")) {
        assert!(stderr.read_line(&mut said).unwrap() > 0, "it ended: {said}");
    }
    let _proxy = Proxy { child, stderr, said };
    std::fs::create_dir(folder.file(&format!("cache-{USER}"))).unwrap();
    std::os::unix::fs::chown(folder.file(&format!("cache-{USER}")), Some(USER), Some(USER)).unwrap();

    let bench = [
        "bench",
        "push",
        "--device",
        "cpu",
        "--proxy",
        "process",
        "--runs",
        "1",
        "--seconds",
        "0.01",
        "--bytes",
        "4K",
    ];
    let out = as_user(USER, &bench).output().unwrap();
    let err = String::from_utf8_lossy(&out.stderr);
    let says = "is user 65003's, this program is user 65001's";
    assert!(!out.status.success() && err.contains(says) && err.contains("set proxy-user to 65003"), "{err}");
    let trusts = [&bench[..], &["--proxy-user", "65003"]].concat();
    let out = as_user(USER, &trusts).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let out = as_user(PROXY + 1, &trusts).output().unwrap();
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && err.contains("this proxy does not serve user 65004"), "{err}");

    let status = |uid, more: &[&str]| {
        let args = [&["proxy", "--status", "--proxy-user", "65003"], more].concat();
        let out = as_user(uid, &args).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let told: Value = serde_json::from_str(&status(USER, &["--json"])).unwrap();
    assert_eq!((&told["proxy"], &told["quota"]["queue_pairs"]), (&Value::from(PROXY), &Value::from(2)));
    let text = status(0, &[]);
    assert!(text.starts_with(&format!("proxy of user 65003 at {socket}\n")), "{text}");
    assert!(text.contains("may have") && text.contains("65536.0 MiB"), "{text}");
}

#[test]
fn a_job_uses_the_proxy_that_is_named_and_says_so() {
    let socket = abstract_name();
    let small =
        ["--ranks", "2", "--size", "1K", "--iters", "1", "--warmup", "0", "--json", "--proxy", "process"];
    let args = [&small[..], &["--proxy-socket", &socket]].concat();
    let none = ended(allreduce(&args).output().unwrap());
    assert_eq!(
        none.stderr,
        format!(
            "pushgate: no proxy runs at {socket} (Connection refused (os error 111)): start one with `pushgate proxy \
             --proxy-socket {socket}`, or leave proxy-socket out, and the bench starts a proxy of its own\n"
        )
    );
    assert_eq!((none.code, &*none.stdout), (Some(1), ""));

    let proxy = Proxy::start(&socket, &[], &[("PUSHGATE_LOG", "info")]);
    let done = ended(allreduce(&args).output().unwrap());
    assert_eq!(
        (done.code, &*done.stderr),
        (Some(0), &*format!("pushgate: using the proxy that runs at {socket}\n"))
    );
    let line: Value = serde_json::from_str(done.stdout.trim_end()).unwrap();
    assert_eq!(line["proxy"], "process");
    let (_, said) = proxy.end(Signal::TERM);
    assert_eq!(said.matches("an engine was started").count(), 2, "one for each rank: {said}");
}

// ---------------------------------------------------------------------- ranks

/// The ranks that a job has started: their processes, by rank.
fn ranks(parent: u32, count: usize) -> Vec<i32> {
    let mut found = Vec::new();
    wait_until("the ranks start", || {
        found =
            std::fs::read_dir("/proc").unwrap().flatten().filter_map(|e| rank(&e.path(), parent)).collect();
        found.sort();
        found.len() == count
    });
    found.into_iter().map(|(_, pid)| pid).collect()
}

/// The rank and the number of a process, if it is a rank of this parent.
fn rank(process: &Path, parent: u32) -> Option<(u32, i32)> {
    let pid = process.file_name()?.to_str()?.parse().ok()?;
    let environment = std::fs::read(process.join("environ")).ok()?;
    let value = |name: &str| {
        let of = environment.split(|b| *b == 0).find_map(|v| v.strip_prefix(name.as_bytes()))?;
        String::from_utf8(of.to_vec()).ok()
    };
    (value("_PUSHGATE_PARENT=")?.parse() == Ok(parent)).then_some(())?;
    Some((value("_PUSHGATE_ROLE=")?.split('/').next()?.parse().ok()?, pid))
}

fn long(ranks: &str, timeout: &str) -> Command {
    allreduce(&["--ranks", ranks, "--size", "64K", "--iters", "1000000", "--timeout", timeout])
}

fn wait(child: &mut Child) -> ExitStatus {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if begin.elapsed() > hang() {
            child.kill().unwrap();
            panic!("it did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_that_was_stopped_and_then_ended_by_the_job_is_not_reported_as_killed() {
    let mut job = long("2", "1000").spawn().unwrap();
    let pid = ranks(job.id(), 2)[1];
    kill_process(Pid::from_raw(pid).unwrap(), Signal::STOP).unwrap();
    let status = wait(&mut job);
    let mut said = String::new();
    job.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    let line = format!(
        "pushgate: rank 1 (pid {pid}) is stopped (SIGSTOP) and can't end by itself: ended by pushgate"
    );
    assert_eq!(said.lines().filter(|l| *l == line).count(), 1, "{said}");
    assert!(!said.contains("killed by signal"), "{said}");
}

#[test]
fn a_rank_that_was_killed_from_elsewhere_is_named_with_the_signal() {
    let mut job = long("2", "30000").spawn().unwrap();
    let pid = ranks(job.id(), 2)[1];
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    assert_eq!(wait(&mut job).code(), Some(1));
    let mut said = String::new();
    job.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let line = format!("pushgate: rank 1 (pid {pid}) was killed by signal 9");
    assert_eq!(said.lines().filter(|l| *l == line).count(), 1, "{said}");
}

#[test]
fn ctrl_c_is_130_to_a_shell_everywhere_and_leaves_no_rank() {
    // A shell says 128 and the signal's number, of a program that the signal ends as well.
    let of = |status: ExitStatus| status.code().or_else(|| Some(128 + status.signal()?));
    let mut job = long("2", "30000").spawn().unwrap();
    let pids = ranks(job.id(), 2);
    kill_process(Pid::from_child(&job), Signal::INT).unwrap();
    assert_eq!(of(wait(&mut job)), Some(130));
    for pid in pids {
        // A zombie waits for its new parent.
        let stat = move || std::fs::read_to_string(format!("/proc/{pid}/stat"));
        wait_until("the ranks end", || stat().map_or(true, |s| s.contains(") Z ")));
    }
    for args in [
        &["bench", "gate", "--runs", "1000", "--seconds", "60"][..],
        &["probe", "--device", "cpu", "--out", "/nonexistent/probe.toml"],
    ] {
        let mut child = program(pushgate(), args).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let status = wait(&mut child);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(of(status), Some(130), "{args:?}: {said}");
        assert!(["", "pushgate: interrupted; nothing was kept\n"].contains(&&*said), "{said}");
    }
}

#[test]
fn a_copier_stays_as_a_service_and_a_second_one_of_the_same_gpu_gives_way() {
    let scope = format!("-service-{}", number());
    let copier = |args: &[&str]| {
        let mut command = program(pushgate(), args);
        command.env("_PUSHGATE_COPIER_SCOPE", &scope);
        command
    };
    let mut first = copier(&["copier", "--gpu", "cpu"]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(first.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("serving "), "{line}");
    let second = ended(copier(&["copier", "--gpu", "cpu"]).output().unwrap());
    assert!(
        second.code == Some(0) && second.stdout.starts_with("another copier serves "),
        "{}",
        second.stderr
    );
    let wrong = ended(copier(&["copier", "--gpu", "cpu", "--cpus", "3-1"]).output().unwrap());
    assert!(wrong.code == Some(2) && wrong.stderr.contains("auto, inherit, or cores"), "{}", wrong.stderr);
    first.kill().unwrap();
    first.wait().unwrap();
}
