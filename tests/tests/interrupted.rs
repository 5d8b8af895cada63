//! Calls end when the program wants its thread back, whatever they wait for: a rank that is stopped, a proxy's process that is
//! stopped, a compiler. Without that each of these waits lasts seconds, or as long as the setting `timeout`.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushgate::settings::PluginSettings;
use pushgate::{
    Comm, Context, Error, HostEnd, Module, QpConfig, QueuePair, Settings, Source, interrupt_by, left_undone,
};
use pushgate_service::remote;
use pushgate_tests::{built, hang};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// What a call returns that is told to end as soon as it asks, and what it says to have left undone. It must ask.
fn interrupted<T>(call: impl FnOnce() -> T) -> (T, String) {
    let asked = Rc::new(Cell::new(false));
    let ask = asked.clone();
    assert_eq!(left_undone(), None);
    interrupt_by(Some(Rc::new(move || {
        ask.set(true);
        true
    })));
    let returned = call();
    interrupt_by(None);
    assert!(asked.get(), "it waited for nothing");
    (returned, left_undone().unwrap_or_default())
}

#[track_caller]
fn is_interrupted<T>((returned, left): (pushgate::Result<T>, String)) {
    let e = returned.err().expect("it is interrupted");
    assert!(matches!(e, Error::Interrupted), "{e}");
    assert_eq!(left, "");
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < hang(), "waiting for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A process that is killed when this is dropped.
struct Process(Child);

impl Process {
    /// Stops it. It has stopped when this returns.
    fn stop(&self) {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, Signal::STOP).unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().expect("it is a child");
        assert!(status.stopped(), "{status:?}");
    }

    /// It goes on.
    fn go_on(&self) {
        kill_process(Pid::from_child(&self.0), Signal::CONT).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A private folder, which goes when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pushgate-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        Folder(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("proxy")
    }

    /// Starts `pushgate proxy`, and waits until it listens.
    fn proxy(&self) -> Process {
        let mut command = Command::new(built::pushgate());
        command.arg("proxy").arg("--proxy-socket").arg(self.socket()).env_remove("PUSHGATE_CONFIG");
        let proxy = Process(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        until("a proxy", || std::os::unix::net::UnixStream::connect(self.socket()).is_ok());
        proxy
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn context(settings: &[(&str, &str)]) -> pushgate::Result<Context> {
    let mut all = Settings::default();
    let timeout = hang().as_millis().to_string();
    for (name, value) in [("device", "cpu"), ("timeout", &timeout)].iter().chain(settings) {
        all.set(name, value).unwrap();
    }
    Context::builder().settings(all).build()
}

fn context_of_proxy(socket: &Path) -> pushgate::Result<Context> {
    context(&[("proxy", "process"), ("proxy-socket", socket.to_str().unwrap()), ("window-size", "64K")])
}

/// Two ranks of this process, and the queue pair between them.
fn joined(context: &Context) -> ([Comm; 2], [QueuePair; 2]) {
    let comms = <[Comm; 2]>::try_from(Comm::local(context, 2).unwrap()).ok().unwrap();
    let make = |comm: &Comm| comm.queue_pair(1 - comm.rank(), 0, QpConfig::default()).unwrap();
    let qps = std::thread::scope(|s| {
        let other = s.spawn(|| make(&comms[1]));
        [make(&comms[0]), other.join().unwrap()]
    });
    (comms, qps)
}

// ---------------------------------------------------------------------------------------- a proxy's process

#[test]
fn p7_calls_to_a_proxy_that_is_stopped_end_when_they_are_interrupted_and_the_proxy_goes_on_later() {
    let folder = Folder::new("interrupted-calls");
    let proxy = folder.proxy();
    let context = context_of_proxy(&folder.socket()).unwrap();
    let (comms, [first, second]) = joined(&context);
    let memory = context.shared("region", 4096).unwrap();
    let region = first.register_shared(&memory).unwrap();
    let held = || remote::usage(&folder.socket(), None).unwrap().users[0].held;
    let before = held();

    proxy.stop();
    is_interrupted(interrupted(|| context.counters()));
    is_interrupted(interrupted(|| first.register_shared(&memory)));
    is_interrupted(interrupted(|| region.deregister()));
    is_interrupted(interrupted(|| first.abort()));
    is_interrupted(interrupted(|| comms[0].queue_pair(1, 1, QpConfig::default())));
    is_interrupted(interrupted(|| context_of_proxy(&folder.socket())));
    proxy.go_on();

    // The handles are as good as before, and nothing is left of what was asked for in vain.
    context.counters().unwrap();
    second.check().unwrap();
    assert!(region.deregister().unwrap());
    let _region = first.register_shared(&memory).unwrap();
    // The proxy finds last that the program of a context that was not made has hung up.
    until("the proxy to undo what was added", || held() == before);
}

#[test]
fn p7_queue_pairs_and_contexts_of_a_proxy_that_is_stopped_close_when_they_are_interrupted() {
    let folder = Folder::new("interrupted-closes");
    let proxy = folder.proxy();
    let context = context_of_proxy(&folder.socket()).unwrap();
    let (comms, [first, second]) = joined(&context);
    let queue_pairs = || {
        remote::usage(&folder.socket(), None).unwrap().users.iter().map(|u| u.held.queue_pairs).sum::<u64>()
    };
    assert_eq!(queue_pairs(), 2);

    proxy.stop();
    let ((), left) = interrupted(|| drop(first));
    assert!(left.contains("has not answered (is it stopped?): a queue pair is closed"), "{left}");
    proxy.go_on();
    context.counters().unwrap();
    assert_eq!(queue_pairs(), 1);

    drop((second, comms));
    proxy.stop();
    let ((), left) = interrupted(|| drop(context));
    assert!(left.contains("it ends this program's queue pairs when it goes on"), "{left}");
}

// ---------------------------------------------------------------------------------------- a rank

/// What the process of [`rank`] does: it is rank 1 of a job, makes a queue pair if it is told to, and waits to be killed.
#[test]
#[ignore = "a process that the tests of this file start"]
fn role() {
    let settings = std::env::var("INTERRUPTED_SETTINGS").expect("started by a test of this file");
    let pairs: Vec<_> = settings.split(' ').map(|pair| pair.split_once('=').unwrap()).collect();
    let context = context(&pairs).unwrap();
    let comm = Comm::connect(&context, "interrupted", 1, 2).unwrap();
    let qp = Arc::new(comm.queue_pair(0, 0, QpConfig::default()).unwrap());
    qp.host_end().unwrap().recv(&mut [0; 8]).unwrap();
    println!("@ready");
    std::thread::sleep(Duration::from_secs(3600));
}

/// This process as rank 0, its end of the queue pair with rank 1, and that rank's process, which is stopped.
fn with_a_rank_that_is_stopped(settings: &str) -> (Comm, HostEnd, Process) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"]);
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env("INTERRUPTED_SETTINGS", settings).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut rank = Process(command.spawn().unwrap());
    let pairs: Vec<_> = settings.split(' ').map(|pair| pair.split_once('=').unwrap()).collect();
    let comm = Comm::connect(&context(&pairs).unwrap(), "interrupted", 0, 2).unwrap();
    let mut end = Arc::new(comm.queue_pair(1, 0, QpConfig::default()).unwrap()).host_end().unwrap();
    // This needs a receive of the rank, so its receives are known before it stops.
    end.send(b"first", 0).unwrap();
    let says = BufReader::new(rank.0.stdout.take().unwrap());
    assert!(says.lines().any(|line| line.unwrap().contains("@ready")));
    rank.stop();
    (comm, end, rank)
}

/// More than the engine needs to fill the sockets.
const PASSES: usize = 1000;

fn rendezvous() -> String {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    format!("rendezvous=127.0.0.1:{port}")
}

#[test]
fn p7_a_queue_pair_over_tcp_with_a_rank_that_is_stopped_closes_when_it_is_interrupted_and_says_what_has_not_arrived()
 {
    for io in ["socket", "io-uring"] {
        let settings = format!("qp=tcp window-size=64M tcp-io={io} {}", rendezvous());
        let (comm, mut end, _rank) = with_a_rank_that_is_stopped(&settings);
        // More than the sockets hold.
        let payload = vec![7; 1 << 20];
        while end.try_send(&payload, 0).unwrap() {}
        // Each takes a pass of the engine, so that the sockets are full.
        (0..PASSES).for_each(|_| _ = comm.context().counters().unwrap());
        let ((), left) = interrupted(|| drop(end));
        let says = "the queue pair with rank 1 was closed at once: ";
        let (_, arrived) = left.split_once(says).unwrap_or_else(|| panic!("{left}"));
        let count: u64 = arrived.split(' ').next().unwrap().parse().unwrap();
        assert!((1..=64).contains(&count) && arrived.ends_with("messages have not arrived there"), "{left}");
        drop(comm);
    }
}

#[test]
fn p7_a_communicator_whose_peer_is_stopped_closes_when_it_is_interrupted() {
    for settings in ["qp=tcp", "qp=local"] {
        let settings = match settings {
            "qp=tcp" => format!("{settings} {}", rendezvous()),
            _ => format!("{settings} window-size=64K"),
        };
        let (comm, end, _rank) = with_a_rank_that_is_stopped(&settings);
        // More than the socket holds.
        is_interrupted(interrupted(|| comm.all_gather(&vec![1; 15 << 20])));
        drop(end);
        let ((), left) = interrupted(|| drop(comm));
        let says = "the communicator of rank 0 was closed at once: ranks [1] have not taken all that was sent to them";
        assert!(left.starts_with(says), "{left}");
    }
}

// ---------------------------------------------------------------------------------------- a compiler

#[test]
fn p7_a_module_whose_compiler_hangs_is_given_up_when_it_is_interrupted() {
    let folder = Folder::new("interrupted-compiler");
    // It says its version, and compiles for ever: in another process, as compilers do.
    let (compiler, pid) = (folder.0.join("c++"), folder.0.join("pid"));
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *--version*) echo hangs;; *) sleep 3600 & echo $! > {0}.new; mv {0}.new {0}; wait;; esac\n",
        pid.display()
    );
    std::fs::write(&compiler, script).unwrap();
    std::fs::set_permissions(&compiler, std::fs::Permissions::from_mode(0o700)).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "compiles", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("CXX", &compiler).env("XDG_CACHE_HOME", &folder.0).env("INTERRUPTED_PID", &pid);
    let ended = pushgate_tests::output(command.stdin(Stdio::null()), hang());
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
}

/// What the process of the test above does, whose environment names the compiler.
#[test]
#[ignore = "a process that a test of this file starts"]
fn compiles() {
    let started = PathBuf::from(std::env::var_os("INTERRUPTED_PID").expect("started by a test of this file"));
    let context = context(&[]).unwrap();
    let source = Source::text("hangs.cu", "#include \"pushgate/device.cuh\"\n");
    let waits = started.clone();
    interrupt_by(Some(Rc::new(move || waits.exists())));
    let e = Module::from_source(&context, &source).err().expect("it is interrupted");
    assert!(matches!(e, Error::Interrupted), "{e}");
    let sleeper: i32 = std::fs::read_to_string(&started).unwrap().trim().parse().unwrap();
    // It has ended, or is about to.
    let stat = || std::fs::read_to_string(format!("/proc/{sleeper}/stat"));
    until("the end of what the compiler started", || {
        stat().is_ok_and(|s| s.contains(") Z ")) || stat().is_err()
    });
}
