//! `pushgate proxy` is killed while kernels of the CPU executor send through it, and another one takes its place: the kernels
//! notice nothing but time.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{
    Comm, Context, Error, Launch, Module, QpConfig, QueuePair, Settings, Source, upload_descriptors,
};
use pushgate_tests::{built, hang};
use rustix::process::{Pid, Signal, kill_process};

/// `struct churn_params` of the kernel.
#[derive(IntoBytes, Immutable)]
#[zerocopy(crate = "pushgate::zerocopy")]
#[repr(C)]
struct Params {
    qp: u64,
    region: u64,
    out: u64,
    rounds: u64,
    rkey: u32,
    rank: u32,
}

/// `pushgate proxy`, which is killed when this is dropped.
struct Proxy(Child);

impl Proxy {
    fn start(socket: &Path) -> Self {
        let mut command = Command::new(built::pushgate());
        command.arg("proxy").arg("--proxy-socket").arg(socket).env_remove("PUSHGATE_CONFIG");
        Proxy(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.0.id() as i32).unwrap(), signal).unwrap();
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A private directory with the sockets of proxies.
struct Sockets(PathBuf);

impl Sockets {
    fn new(name: &str) -> Self {
        use std::os::unix::fs::DirBuilderExt;
        let dir = std::env::temp_dir().join(format!("pushgate-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::DirBuilder::new().mode(0o700).create(&dir).unwrap();
        Sockets(dir)
    }

    fn path(&self, proxy: usize) -> PathBuf {
        self.0.join(format!("proxy-{proxy}"))
    }

    /// Starts a proxy and waits until it listens.
    fn start(&self, proxy: usize) -> Proxy {
        let started = Proxy::start(&self.path(proxy));
        until("the proxy", || std::os::unix::net::UnixStream::connect(self.path(proxy)).is_ok());
        started
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn context(socket: &Path, recover: &str) -> Context {
    let mut settings = Settings::default();
    settings.set("device", "cpu").unwrap();
    settings.set("window-size", "4K").unwrap();
    settings.set("slots", "16").unwrap();
    settings.set("proxy", "process").unwrap();
    settings.set("proxy-socket", socket.to_str().unwrap()).unwrap();
    settings.set("timeout", &hang().as_millis().to_string()).unwrap();
    settings.set("recover", recover).unwrap();
    Context::builder().settings(settings).build().unwrap()
}

type Rank = (Comm, Context, QueuePair);

/// Two ranks, whose proxies listen at these sockets, and the queue pair between them.
fn joined(name: &str, sockets: [PathBuf; 2], recover: &str) -> [Rank; 2] {
    joined_with(name, sockets, recover, QpConfig::default())
}

fn joined_with(name: &str, sockets: [PathBuf; 2], recover: &str, config: QpConfig) -> [Rank; 2] {
    let job = format!("{name}-{}", std::process::id());
    let rank = |rank: u32| {
        let context = context(&sockets[rank as usize], recover);
        let comm = Comm::connect(&context, &job, rank, 2).unwrap();
        let qp = comm.queue_pair(1 - rank, 3, config).unwrap();
        (comm, context, qp)
    };
    std::thread::scope(|s| {
        let other = s.spawn(|| rank(1));
        [rank(0), other.join().unwrap()]
    })
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < hang(), "waiting for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Kernels of both ranks exchange checked messages while `kill` is called [`KILLS`] times.
fn churn(ranks: &[Rank; 2], kill: impl FnMut(usize)) {
    run("churn", ranks, kill);
}

const KILLS: usize = 10;

/// Runs this kernel of recovering.cu on both ranks, and calls `kill` [`KILLS`] times meanwhile.
fn run(kernel: &str, ranks: &[Rank; 2], mut kill: impl FnMut(usize)) {
    // More than the kernels make until the last kill. With cores for the kernels a round takes a few microseconds.
    let all_rounds: u64 = if std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 2) {
        400_000
    } else {
        20_000
    };
    // The kernel `posted` has its own buffers, and sends one message more.
    let posted = kernel == "posted";
    let (bytes, rounds_done) = if posted { (8 + 17 * 75 * 8, all_rounds + 1) } else { (8, all_rounds) };
    let text = include_str!("recovering.cu");
    let parts = ranks.each_ref().map(|(_, context, qp)| {
        let region = context.shared("churn", bytes).unwrap();
        let registered = qp.register_shared(&region).unwrap();
        let module = Module::from_source(context, &Source::text("recovering.cu", text)).unwrap();
        (region, registered, module, context.alloc(24).unwrap(), upload_descriptors(context, [qp]).unwrap())
    });
    let mut running = Vec::new();
    for (i, (_, context, _)) in ranks.iter().enumerate() {
        let (region, _, module, out, qps) = &parts[i];
        let params = Params {
            qp: qps.addr(),
            region: region.device_addr(),
            out: out.addr(),
            rounds: all_rounds,
            rkey: parts[if posted { i } else { 1 - i }].1.key(),
            rank: i as u32,
        };
        let stream = context.stream().unwrap();
        let launch = Launch::new(1, 1).cooperating();
        // SAFETY: what the parameters name outlives the kernel, which is waited for below.
        running.push(unsafe { context.launch(&stream, module, kernel, launch, &params).unwrap() });
    }
    let done = || running.iter().all(|running| running.is_done().unwrap());
    let rounds = || parts.each_ref().map(|part| part.0.words(0, 1)[0].load(Ordering::Relaxed));
    let moves = |what: &str| {
        let before = rounds();
        until(what, || done() || rounds().iter().zip(before).all(|(now, before)| *now > before + 1));
    };
    let (begin, mut gaps) = (Instant::now(), Vec::new());
    for n in 0..KILLS {
        moves("the kernels");
        assert!(!done(), "the kernels were over after {n} kills");
        let killed = Instant::now();
        kill(n);
        moves("messages after the kill");
        gaps.push(killed.elapsed());
    }
    until("the kernels' end", done);
    gaps.sort();
    println!("{KILLS} kills in {:?}, until messages moved {gaps:?}", begin.elapsed());
    for (i, (.., out, _)) in parts.iter().enumerate() {
        let mut bytes = [0; 24];
        out.copy_to_host(&mut bytes).unwrap();
        let [status, rounds, wrong] =
            [0, 8, 16].map(|at| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes")));
        assert_eq!((status, rounds, wrong), (0, rounds_done, 0), "rank {i}");
    }
}

#[test]
fn p6_kernels_lose_nothing_when_the_proxy_of_both_ranks_is_killed_under_them() {
    let sockets = Sockets::new("restarted");
    let mut proxy = sockets.start(0);
    let ranks = joined("restarted", [sockets.path(0), sockets.path(0)], "auto");
    churn(&ranks, |_| {
        proxy.kill();
        proxy = Proxy::start(&sockets.path(0));
    });
}

#[test]
fn p6_kernels_with_posted_receives_lose_nothing_when_proxies_are_killed_under_them() {
    let sockets = Sockets::new("restarted-posts");
    let mut proxies = [0, 1].map(|n| sockets.start(n));
    let config = QpConfig { posted_receives: true, receives: Some(8), ..QpConfig::default() };
    let paths = [sockets.path(0), sockets.path(1)];
    let ranks = joined_with("restarted-posts", paths, "auto", config);
    // One of them, or both at once.
    run("posted", &ranks, |n| {
        for n in (0..2).filter(|proxy| n % 3 == 2 || n % 2 == *proxy) {
            proxies[n].kill();
        }
        for n in (0..2).filter(|proxy| n % 3 == 2 || n % 2 == *proxy) {
            proxies[n] = Proxy::start(&sockets.path(n));
        }
    });
}

#[test]
fn p6_kernels_lose_nothing_when_one_ranks_proxy_is_killed_under_them() {
    let sockets = Sockets::new("restarted-one");
    let mut proxies = [0, 1].map(|n| sockets.start(n));
    let ranks = joined("restarted-one", [sockets.path(0), sockets.path(1)], "auto");
    churn(&ranks, |n| {
        let n = n % 2;
        proxies[n].kill();
        proxies[n] = Proxy::start(&sockets.path(n));
    });
}

#[test]
fn p7_both_ranks_end_where_no_proxy_takes_over() {
    let sockets = Sockets::new("no-next");
    let mut proxies = [0, 1].map(|n| sockets.start(n));
    let ranks = joined("no-next", [sockets.path(0), sockets.path(1)], "300ms");
    proxies[0].kill();
    for (_, _, qp) in &ranks {
        until("the end", || qp.check().is_err());
    }
    let [own, peers] = ranks.each_ref().map(|(_, _, qp)| qp.check().unwrap_err());
    let said = own.to_string();
    let parts = [sockets.path(0).display().to_string(), "none took over within 300ms".into()];
    assert!(matches!(own, Error::Proxy(_)) && parts.iter().all(|part| said.contains(part)), "{own}");
    assert!(matches!(peers, Error::PeerLost { rank: 0 }), "{peers}");
}

#[test]
fn p6_kernels_lose_nothing_when_a_proxy_leaves_after_sigterm_and_another_one_starts() {
    let sockets = Sockets::new("leaves");
    let mut proxy = sockets.start(0);
    let ranks = joined("leaves", [sockets.path(0), sockets.path(0)], "auto");
    churn(&ranks, |_| {
        proxy.signal(Signal::TERM);
        assert!(proxy.0.wait().unwrap().success(), "SIGTERM is how a service is ended");
        proxy = Proxy::start(&sockets.path(0));
    });
}

#[test]
fn p7_programs_of_a_proxy_that_ends_after_sigint_end_with_its_name_and_wait_for_no_other() {
    let sockets = Sockets::new("ends");
    let mut proxy = sockets.start(0);
    let recover = hang() / 2;
    let as_set = format!("{}ms", recover.as_millis());
    let ranks = joined("ends", [sockets.path(0), sockets.path(0)], &as_set);
    let (begin, pid) = (Instant::now(), proxy.0.id());
    proxy.signal(Signal::INT);
    proxy.0.wait().unwrap();
    for (_, _, qp) in &ranks {
        until("the end", || qp.check().is_err());
        let said = qp.check().unwrap_err();
        let at = format!("at {} (pid {pid}) was interrupted (SIGINT)", sockets.path(0).display());
        assert!(matches!(said, Error::Proxy(_)) && said.to_string().contains(&at), "{said}");
        // What is asked of the proxy ends with the same.
        let asked = qp.links_replaced().unwrap_err();
        assert!(asked.to_string().contains(&at), "{asked}");
    }
    drop(ranks);
    assert!(begin.elapsed() < recover, "somebody waited for another proxy: {:?}", begin.elapsed());
}

#[test]
fn p6_programs_that_dial_a_socket_of_the_service_manager_reach_the_next_proxy_whenever_it_starts() {
    let sockets = Sockets::new("activated");
    // The service manager has the socket, and hands it to each proxy.
    let listener = UnixListener::bind(sockets.path(0)).unwrap();
    let start = || {
        let mut command = Command::new("sh");
        command
            .args(["-c", "LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" proxy 3<&0 0</dev/null"])
            .arg(built::pushgate());
        command.stdin(listener.try_clone().map(OwnedFd::from).unwrap()).stderr(Stdio::null());
        Proxy(command.env_remove("PUSHGATE_CONFIG").spawn().unwrap())
    };
    let mut proxy = start();
    let ranks = joined("activated", [sockets.path(0), sockets.path(0)], "auto");
    churn(&ranks, |_| {
        proxy.kill();
        // Programs dial meanwhile, and wait in the queue of the socket.
        std::thread::sleep(Duration::from_millis(30));
        proxy = start();
    });
}

#[test]
fn p6_nobody_takes_over_from_a_proxy_that_is_only_stopped() {
    let sockets = Sockets::new("stopped");
    let first = sockets.start(0);
    let ranks = joined("stopped", [sockets.path(0), sockets.path(0)], "auto");
    first.signal(Signal::STOP);
    // Another one listens where the next one would.
    std::fs::remove_file(sockets.path(0)).unwrap();
    let _next = sockets.start(0);
    std::thread::sleep(Duration::from_millis(300));
    first.signal(Signal::CONT);
    churn(&ranks, |_| ());
}
