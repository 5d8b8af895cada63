//! `pushgate metrics` on real processes, whose own counts are known, and under a real Prometheus.

use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use pushgate::settings::PluginSettings;
use pushgate::{Comm, Context, Launch, Module, QpConfig, Settings, WaitOutcome, upload_descriptors};
use pushgate_tests::built::scratch;
use pushgate_tests::{children, hang, pushgate, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Receives of a rank.
const RECEIVES: u64 = 64;
/// Bytes of a message.
const BYTES: u64 = 64;

// ---------------------------------------------------------------------- a rank

#[test]
#[ignore = "a rank of the tests below, in a process of its own"]
fn role() {
    let var = |name: &str| env::var(name).unwrap();
    let (rank, sends): (u32, u64) =
        (var("METRICS_RANK").parse().unwrap(), var("METRICS_SENDS").parse().unwrap());
    let mut settings = Settings::load().unwrap();
    settings.timeout = 10 * hang();
    for (name, value) in [("device", "cpu"), ("window-size", "64K"), ("slots", "128")] {
        settings.set(name, value).unwrap();
    }
    settings.receives = RECEIVES;
    let context = Context::builder().settings(settings).build().unwrap();
    let comm = Comm::connect(&context, &var("METRICS_JOB"), rank, 2).unwrap();
    let mut qp = Some(comm.queue_pair(1 - rank, 0, QpConfig::default()).unwrap());
    let module = Module::embedded(&context);
    let (stream, result) = (context.stream().unwrap(), context.alloc(8).unwrap());
    let descriptor = upload_descriptors(&context, qp.iter()).unwrap();
    // `struct hand_over_params`: the queue pair, the result, bytes, count, and no rkey.
    let params = [descriptor.addr(), result.addr(), BYTES, sends, 0];
    // SAFETY: what the kernel uses is dropped after a wait for the kernel alone, or with the process.
    let running =
        unsafe { context.launch(&stream, &module, "hand_over", Launch::new(1, 1), &params).unwrap() };
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "counters" => println!("@{}", serde_json::to_string(&context.counters().unwrap()).unwrap()),
            "drop" => {
                let done = context.wait(&running, Some(hang())).unwrap();
                assert!(matches!(done, WaitOutcome::Done), "{done:?}");
                drop(qp.take());
                println!("@{}", serde_json::to_string(&context.counters().unwrap()).unwrap());
            }
            other => panic!("{other:?}"),
        }
    }
    // A kernel may wait for a receive that never comes.
    std::mem::forget((running, descriptor, result));
    std::process::exit(0);
}

/// A process that is killed when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A rank in a process of its own.
struct Rank {
    child: Killed,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(job: &str, rank: u32, sends: u64, with: &[(&str, &str)]) -> Rank {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"]);
        clear(&mut command);
        command.env("METRICS_JOB", job).env("METRICS_RANK", rank.to_string());
        command.env("METRICS_SENDS", sends.to_string()).envs(with.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Rank { child: Killed(child), lines }
    }

    /// What the rank's own engine counts, after what it is told to do.
    fn counters(&mut self, told: &str) -> BTreeMap<String, u64> {
        writeln!(self.child.0.stdin.as_ref().unwrap(), "{told}").unwrap();
        // The line follows what the test harness prints.
        let said = self.lines.find_map(|line| Some(line.unwrap().split_once('@')?.1.to_string()));
        serde_json::from_str(&said.expect("a rank has ended")).unwrap()
    }

    fn pid(&self) -> u32 {
        self.child.0.id()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child.0), signal).unwrap();
    }
}

/// Rank 0, which sends `sends` messages, and rank 1, which takes none; both have their queue pair.
fn two(job: &str, sends: u64, with: &[(&str, &str)]) -> [Rank; 2] {
    let job = format!("{job}-{}", std::process::id());
    let mut ranks = [Rank::start(&job, 0, sends, with), Rank::start(&job, 1, 0, with)];
    ranks.iter_mut().for_each(|rank| drop(rank.counters("counters")));
    ranks
}

// ----------------------------------------------------------------- the command

/// A program in an environment without settings.
fn clear(command: &mut Command) {
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env_remove("PUSHGATE_CONFIG").env_remove("PUSHGATE_LOG");
}

fn metrics(args: &[&str]) -> Command {
    let mut command = Command::new(pushgate());
    clear(&mut command);
    command.arg("metrics").args(args);
    command
}

fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = metrics(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

#[track_caller]
fn print() -> String {
    let (code, out, err) = run(&[]);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    out
}

/// The samples of one name whose labels have all of these.
fn samples(text: &str, name: &str, labels: &[String]) -> Vec<f64> {
    let of = |line: &str| {
        let (series, value) = line.rsplit_once(' ')?;
        let (found, with) = series.split_once('{').unwrap_or((series, ""));
        (found == name && labels.iter().all(|label| with.contains(label))).then(|| value.parse().unwrap())
    };
    text.lines().filter(|line| !line.starts_with('#')).filter_map(of).collect()
}

fn label(name: &str, value: impl ToString) -> String {
    format!("{name}=\"{}\"", value.to_string())
}

/// The sum of a process's samples.
fn sum(text: &str, name: &str, pid: u32) -> f64 {
    samples(text, name, &[label("pid", pid)]).iter().sum()
}

/// Names of counts, in JSON and as metrics.
const COUNTS: [(&str, &str); 9] = [
    ("released", "messages_released_total"),
    ("released_bytes", "released_bytes_total"),
    ("retired", "messages_retired_total"),
    ("delivered", "messages_delivered_total"),
    ("delivered_bytes", "delivered_bytes_total"),
    ("copies", "payloads_copied_total"),
    ("placed", "payloads_placed_total"),
    ("inline", "messages_inline_total"),
    ("rings", "doorbells_rung_total"),
];

// ----------------------------------------------------------------------- tests

#[test]
fn metrics_of_a_process_are_its_own_counters_and_outlive_its_queue_pairs() {
    let mut ranks = two("own", RECEIVES, &[]);
    let pids = [ranks[0].pid(), ranks[1].pid()];
    let (mut own, mut text) = (Vec::new(), String::new());
    wait_until("the counters in the metrics", || {
        own = ranks.iter_mut().map(|rank| rank.counters("counters")).collect();
        text = print();
        own.iter().zip(pids).all(|(own, pid)| {
            let told = |(json, name): (&str, &str)| {
                own.get(json).copied().unwrap_or(0) as f64 == sum(&text, &format!("pushgate_{name}"), pid)
            };
            COUNTS.into_iter().all(told)
        }) && own[0]["released"] == RECEIVES
    });
    assert_eq!((own[0]["released_bytes"], own[1]["delivered"]), (RECEIVES * BYTES, RECEIVES));
    // The one queue pair of each has counted all of it.
    for (json, name) in COUNTS {
        let value = own[0].get(json).copied().unwrap_or(0) as f64;
        let labels = [
            ("pid", pids[0].to_string()),
            ("rank", "0".into()),
            ("peer", "1".into()),
            ("link", "local".into()),
        ];
        let labels = labels.map(|(name, value)| label(name, value));
        assert_eq!(samples(&text, &format!("pushgate_queue_pair_{name}"), &labels), [value], "{name}");
    }
    let live = |text: &str| sum(text, "pushgate_engine_queue_pairs", pids[0]);
    assert_eq!(live(&text), 1.0);
    assert_eq!(
        samples(&text, "pushgate_process_info", &[label("pid", pids[0]), "pushgate_job=\"own-".into()]),
        [1.0]
    );
    // A message's time was taken, and none takes longer than the test.
    let times = samples(&text, "pushgate_delivery_seconds_count", &[label("pid", pids[0])]);
    assert!(times[0] >= 1.0 && times[0] <= RECEIVES as f64, "{times:?}");

    let [sender, receiver] = &mut ranks;
    let after = std::thread::scope(|scope| {
        let peer = scope.spawn(|| receiver.counters("drop"));
        (sender.counters("drop"), peer.join().unwrap()).0
    });
    let text = print();
    assert_eq!(live(&text), 0.0);
    assert_eq!(samples(&text, "pushgate_queue_pair_live", &[label("pid", pids[0])]), [] as [f64; 0]);
    for (json, name) in COUNTS {
        let value = after.get(json).copied().unwrap_or(0) as f64;
        assert_eq!(sum(&text, &format!("pushgate_{name}"), pids[0]), value, "{name}");
    }
}

#[test]
fn a_sender_without_credit_is_seen_to_wait_for_receives_also_while_its_process_is_stopped() {
    let [sender, _receiver] = two("waits", 100, &[]);
    let receive = [label("pid", sender.pid()), label("cause", "receive")];
    let waited = |text: &str| samples(text, "pushgate_queue_pair_waited_seconds_total", &receive);
    let mut text = String::new();
    wait_until("a wait", || {
        text = print();
        waited(&text).iter().sum::<f64>() > 0.0
    });
    assert_eq!(sum(&text, "pushgate_messages_released_total", sender.pid()), RECEIVES as f64);
    // The first one may be from before the peer granted receives.
    assert!(matches!(samples(&text, "pushgate_credit_stalls_total", &receive)[..], [1.0 | 2.0]));
    let bytes = samples(
        &text,
        "pushgate_waited_seconds_total",
        &[label("pid", sender.pid()), label("cause", "bytes")],
    );
    assert_eq!(bytes, [0.0]);
    wait_until("more of the wait", || waited(&print()) > waited(&text));
    sender.signal(Signal::STOP);
    wait_until("an engine that does not run", || {
        text = print();
        sum(&text, "pushgate_engine_idle_seconds", sender.pid()) > 1.5
    });
    assert_eq!(sum(&text, "pushgate_messages_released_total", sender.pid()), RECEIVES as f64);
    assert_eq!(waited(&text), waited(&print()));
    assert!(sum(&text, "pushgate_queue_pair_blocked_seconds", sender.pid()) > 1.0);
    sender.signal(Signal::CONT);
}

#[test]
fn engines_of_a_proxy_bear_the_number_of_their_program() {
    let socket = format!("@pushgate-metrics-test-{}", std::process::id());
    let mut command = Command::new(pushgate());
    clear(&mut command);
    command.args(["proxy", "--proxy-socket", &socket]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let proxy = Rank { lines: BufReader::new(child.stdout.take().unwrap()).lines(), child: Killed(child) };
    assert!(log.any(|line| line.contains("serving at")));
    let with = [("PUSHGATE_PROXY", "process"), ("PUSHGATE_PROXY_SOCKET", socket.as_str())];
    let [sender, _receiver] = two("served", RECEIVES, &with);
    let labels = [label("pid", proxy.pid()), label("program", sender.pid())];
    wait_until("the messages in the proxy's metrics", || {
        samples(&print(), "pushgate_messages_released_total", &labels) == [RECEIVES as f64]
    });
}

/// A server of metrics, and where it listens.
struct Server(#[expect(dead_code, reason = "its drop ends the server")] Killed, SocketAddr);

impl Server {
    fn start() -> Server {
        Server::at("127.0.0.1:0")
    }

    fn at(listen: &str) -> Server {
        let mut child = metrics(&["--listen", listen]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.trim().strip_prefix("listening at http://").and_then(|at| at.strip_suffix("/metrics"));
        let address = address.unwrap_or_else(|| panic!("{line}")).parse().unwrap();
        Server(Killed(child), address)
    }

    /// What the server answers, closing the connection.
    fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.1).unwrap();
        stream.set_read_timeout(Some(hang())).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

#[test]
fn the_server_answers_while_other_connections_say_nothing_and_refuses_what_is_no_get() {
    let server = Server::start();
    let silent: Vec<_> = (0..8).map(|_| TcpStream::connect(server.1).unwrap()).collect();
    let answer = server.ask("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    assert!(body.contains("\npushgate_build_info{") && body.ends_with('\n'), "{body}");
    drop(silent);
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("\u{16}\u{3}\u{1}\r\n\r\n", "400"),
    ] {
        let answer = server.ask(request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
    }
    let long = format!("GET /metrics HTTP/1.1\r\nx: {}", "y".repeat(8192 - 26));
    assert!(server.ask(&long).starts_with("HTTP/1.1 400 "));
}

#[test]
fn a_port_alone_is_one_of_the_loopback() {
    let server = Server::at("0");
    assert!(server.1.ip().is_loopback(), "{}", server.1);
    assert!(server.ask("GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
}

#[test]
fn an_address_that_others_reach_wants_a_flag_of_its_own() {
    let (code, out, err) = run(&["--listen", "0.0.0.0:0"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(
        err.starts_with("pushgate: invalid --listen `0.0.0.0:0`: expected an address of the loopback"),
        "{err}"
    );
    for wrong in
        [&["--any-address"][..], &["--every", "1s"], &["--listen", "--textfile", "x"], &["--every", "0"]]
    {
        assert_eq!(run(wrong).0, Some(2), "{wrong:?}");
    }
}

#[test]
fn a_reader_of_the_text_file_never_sees_a_part_of_it() {
    let folder = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("metrics-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("pushgate.prom");
    let name = file.to_str().unwrap();
    assert_eq!(run(&["--textfile", name]), (Some(0), String::new(), String::new()));
    let writer = metrics(&["--textfile", name, "--every", "1ms"]).spawn().unwrap();
    let writer = Killed(writer);
    let identity = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&file).unwrap());
    let (mut files, mut last) = (0, identity());
    wait_until("twenty files", || {
        let text = std::fs::read_to_string(&file).unwrap();
        let whole = text.starts_with("# HELP pushgate_") && text.ends_with('\n');
        // The name of the last line of a text without engines.
        assert!(whole && text.contains("\npushgate_unread_recorders "), "{text:?}");
        let now = identity();
        files += (now != std::mem::replace(&mut last, now)) as u32;
        files >= 20
    });
    drop(writer);
    std::fs::remove_dir_all(&folder).unwrap();
    let (code, _, err) = run(&["--textfile", "/no-such-folder/x.prom"]);
    assert_eq!(code, Some(1));
    assert!(err.starts_with("pushgate: writing /no-such-folder/x.prom: "), "{err}");
}

// ------------------------------------------------------------------ Prometheus

/// A program of Prometheus's: in the folder that the step names.
fn program(name: &str) -> PathBuf {
    let folder = env::var_os("_PUSHGATE_TEST_PROMETHEUS").expect("the folder of prometheus and promtool");
    PathBuf::from(folder).join(name)
}

/// A Prometheus on the loopback that scrapes one server five times a second. Dropping it ends it and removes its data.
struct Prometheus {
    child: Killed,
    address: SocketAddr,
    folder: PathBuf,
}

impl Prometheus {
    fn start(scraped: SocketAddr) -> Prometheus {
        let folder = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("prometheus-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let config = folder.join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\n\
             scrape_configs: [{{job_name: pushgate, static_configs: [{{targets: ['{scraped}']}}]}}]\n"
        );
        std::fs::write(&config, text).unwrap();
        // A port that was free a moment ago. Prometheus itself takes no port of the kernel's choice.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new(program("prometheus"));
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.join("data").display()));
        command.arg(format!("--web.listen-address={free}"));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Prometheus { child: Killed(command.spawn().unwrap()), address: free, folder }
    }

    /// The values of a query's series.
    fn query(&self, query: &str) -> Option<Vec<f64>> {
        let encoded: String = query.bytes().map(|b| format!("%{b:02x}")).collect();
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(hang())).ok()?;
        write!(stream, "GET /api/v1/query?query={encoded} HTTP/1.0\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()?;
        let value = |series: &Value| series["value"][1].as_str()?.parse().ok();
        body["data"]["result"].as_array()?.iter().map(value).collect()
    }

    fn one(&self, query: &str) -> f64 {
        let values = self.query(query).unwrap();
        assert_eq!(values.len(), 1, "{query}: {values:?}");
        values[0]
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.0.kill();
        let _ = self.child.0.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
#[ignore = "needs Debian's package prometheus: cargo xtask test --only metrics"]
fn promtool_accepts_the_text() {
    let [_sender, _receiver] = two("checked", RECEIVES, &[]);
    let mut check = Command::new(program("promtool"));
    let mut check =
        check.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    check.stdin.take().unwrap().write_all(print().as_bytes()).unwrap();
    let said = check.wait_with_output().unwrap();
    assert!(said.status.success() && said.stderr.is_empty(), "{}", String::from_utf8_lossy(&said.stderr));
}

#[test]
#[ignore = "needs Debian's package prometheus: cargo xtask test --only metrics"]
fn a_prometheus_that_scrapes_an_allreduce_has_the_sums_that_the_bench_reports() {
    let server = Server::start();
    let prometheus = Prometheus::start(server.1);
    wait_until("a scrape", || prometheus.query("up == 1").is_some_and(|up| up.len() == 1));
    // Odd ranks begin an iteration a second late, and the others wait for them: some scrapes fall between two iterations.
    const RANKS: u64 = 2;
    const SIZE: u64 = 1 << 20;
    let mut allreduce = Command::new(pushgate());
    clear(&mut allreduce);
    allreduce.args([
        "bench",
        "allreduce",
        "--ranks",
        "2",
        "--size",
        "1M",
        "--device",
        "cpu",
        "--in-place",
        "--warmup",
        "0",
    ]);
    allreduce.args(["--iters", "4", "--late-ms", "1000", "--json"]);
    let mut allreduce = Killed(allreduce.stdout(Stdio::piped()).spawn().unwrap());
    let mut ranks = Vec::new();
    wait_until("the ranks", || {
        ranks = children(allreduce.0.id());
        ranks.len() == RANKS as usize
    });
    let mut stdout = Vec::new();
    allreduce.0.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
    let status = allreduce.0.wait().unwrap();
    // Other programs may run on this host.
    let own = format!("{{pid=~\"{}|{}\"}}", ranks[0], ranks[1]);
    let said: Value = serde_json::from_slice(&stdout).unwrap();
    assert!(status.success() && said["verified"] == true, "{said}");
    assert_eq!((said["bytes"].as_u64(), said["ranks"].as_u64()), (Some(SIZE), Some(RANKS)));
    let iterations = said["iters"].as_u64().unwrap();

    let total = |name: &str| prometheus.one(&format!("sum(max_over_time(pushgate_{name}{own}[10m]))"));
    for (name, key) in
        [("messages_dropped_total", "dropped"), ("rnr_total", "rnr"), ("refused_total", "refused")]
    {
        assert_eq!(Some(total(name) as u64), said[key].as_u64(), "{name}");
    }
    // Each of N ranks sends 2 (N - 1) / N of its bytes in an iteration. The last scrape may be from before the last
    // iteration, so all but the last are there, and no byte more than the bench has sent.
    let iteration = (2 * (RANKS - 1) * SIZE) as f64;
    let least = iteration * (iterations - 1) as f64;
    for name in ["released_bytes_total", "delivered_bytes_total"] {
        let bytes = total(name);
        assert!(
            bytes >= least && bytes <= iteration * iterations as f64,
            "{name}: {bytes}, at least {least}"
        );
    }
    let links = format!("count by (link) (last_over_time(pushgate_released_bytes_total{own}[10m]))");
    let links = prometheus.query(&links).unwrap();
    assert_eq!(links, [RANKS as f64], "one kind of link");
}
