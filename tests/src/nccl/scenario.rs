//! The scenarios that are tried on a plugin. Each runs in a process of its own (`nccl-caller`),
//! with the settings of its environment.

use std::ffi::{OsStr, c_int};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::cuda;
use super::pair::{self, Bootstrap, Buffer, Ends, Received, Streams, Traffic};
use super::table::{LOG, Plugin, Ptr, use_device, warnings};
use crate::{hang, patience};

/// The options of every scenario.
#[derive(Clone, Debug)]
pub struct Options {
    /// The plugin's file.
    pub plugin: std::path::PathBuf,
    /// The version of the table.
    pub version: u32,
    /// Ranks are processes, not threads of one process.
    pub processes: bool,
    /// Sends name no registration.
    pub unregistered: bool,
    /// Groups of messages each way.
    pub groups: usize,
    /// The longest message.
    pub max: usize,
    /// Requests in flight, each way.
    pub in_flight: usize,
    /// Seed of everything that is random.
    pub seed: u64,
    /// How often a scenario repeats something.
    pub times: usize,
    /// Threads of a rank, each with connections of its own, in scenarios that have several.
    pub threads: usize,
    /// Cores of a rank, in scenarios that measure; 0: all.
    pub cores: usize,
    /// Only what NCCL requires of a plugin can fail a scenario. Otherwise the promises of this
    /// project's plugin can fail it too.
    pub nccl_rules: bool,
}

/// Whether the plugin is told to connect over TCP alone.
pub(super) fn over_tcp() -> bool {
    std::env::var_os("PUSHGATE_QP").is_some_and(|qp| qp == "tcp")
}

impl Options {
    pub(super) fn traffic(&self, plugin: &Plugin) -> Traffic {
        let most = plugin.properties(0).expect("properties").max_recvs.clamp(1, 8);
        Traffic {
            groups: self.groups,
            max: self.max,
            in_flight: self.in_flight,
            grouping: most as usize,
            shuffle: true,
            registered: !self.unregistered,
            seed: self.seed,
        }
    }

    pub(super) fn open(&self) -> Plugin {
        Plugin::open(&self.plugin, self.version, !self.nccl_rules).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Checks something that this project's plugin promises and NCCL does not require. If it is not
    /// kept, the scenario fails, or, with only NCCL's rules, prints it.
    pub(super) fn promise(&self, what: &str, kept: bool, found: &dyn std::fmt::Debug) {
        match (kept, self.nccl_rules) {
            (true, _) => {}
            (false, true) => println!("not so here, and NCCL does not ask for it: {what} ({found:?})"),
            (false, false) => panic!("{what}: {found:?}"),
        }
    }

    /// Whether to try what NCCL never does and what may harm a plugin that does not expect it.
    /// Prints if not.
    fn dares(&self, what: &str) -> bool {
        if self.nccl_rules {
            println!("left out, NCCL never does it: {what}");
        }
        !self.nccl_rules
    }

    /// Starts the other rank, a process that runs `scenario`; returns it with the bootstrap between
    /// us.
    pub(super) fn spawn(&self, scenario: &str) -> (Child, Box<dyn Bootstrap>) {
        self.spawn_with(scenario, &[])
    }

    fn spawn_with(&self, scenario: &str, variables: &[(&str, &str)]) -> (Child, Box<dyn Bootstrap>) {
        // Words before the second rank's program, as those that put it into a namespace.
        let within = std::env::var("NCCL_CALLER_RANK_1_WITHIN").unwrap_or_default();
        let own = std::env::current_exe().expect("our own path");
        let words = within.split_whitespace().map(OsStr::new).chain([own.as_os_str()]).collect::<Vec<_>>();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(scenario).envs(variables.iter().copied());
        for (name, value) in [
            ("--plugin", self.plugin.display().to_string()),
            ("--version", self.version.to_string()),
            ("--groups", self.groups.to_string()),
            ("--max", self.max.to_string()),
            ("--in-flight", self.in_flight.to_string()),
            ("--seed", self.seed.to_string()),
            ("--times", self.times.to_string()),
            ("--threads", self.threads.to_string()),
            ("--cores", self.cores.to_string()),
        ] {
            command.args([name, &value]);
        }
        for (name, set) in [("--unregistered", self.unregistered), ("--nccl-rules", self.nccl_rules)] {
            command.args(set.then_some(name));
        }
        // Settings of the second rank's own.
        let other = std::env::var("NCCL_CALLER_RANK_1").unwrap_or_default();
        command.envs(other.split_whitespace().filter_map(|setting| setting.split_once('=')));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a second rank");
        let (from, to) = (child.stdout.take().expect("piped"), child.stdin.take().expect("piped"));
        (child, Box::new(Streams(from, to)))
    }

    /// Starts the other rank, a process that runs `scenario`, with a bootstrap between each of our
    /// threads and one of its threads.
    pub(super) fn spawn_threads(&self, scenario: &str) -> (Child, Vec<Box<dyn Bootstrap>>) {
        let name = format!("pushgate/nccl-caller/{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let listener = UnixListener::bind_addr(&address).expect("a listening socket");
        listener.set_nonblocking(true).expect("a listening socket that does not wait");
        let (mut child, _) = self.spawn_with(scenario, &[(THREADS, &name)]);
        let one = |_| accept(&listener, &mut child);
        let peers = (0..self.threads).map(one).collect();
        (child, peers)
    }

    /// The bootstraps between the first rank's threads and ours, in the process that the first rank
    /// started.
    pub(super) fn threads_of_parent(&self) -> Vec<Box<dyn Bootstrap>> {
        let name = std::env::var(THREADS).expect("the first rank says where its threads are");
        let address = SocketAddr::from_abstract_name(name).expect("a name");
        let one = |_| streams(UnixStream::connect_addr(&address).expect("the first rank"));
        (0..self.threads).map(one).collect()
    }
}

/// Accepts a connection of one of the second rank's threads. Does not wait for a second rank that
/// has ended.
fn accept(listener: &UnixListener, second: &mut Child) -> Box<dyn Bootstrap> {
    let begin = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => return streams(stream),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => panic!("accepting a thread of the second rank: {e}"),
        }
        if let Some(status) = second.try_wait().expect("wait") {
            panic!("the second rank ended before all of its threads were connected: {status}");
        }
        assert!(begin.elapsed() < hang(), "the second rank's threads do not connect");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The variable that tells a second rank where the first rank's threads are.
const THREADS: &str = "NCCL_CALLER_THREADS";

/// Makes this process end when the first rank does.
pub(crate) fn die_with_parent() {
    let killed = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(killed).expect("prctl");
}

/// Our own bootstrap, in a process that was started by the first rank.
pub(super) fn parent() -> Box<dyn Bootstrap> {
    Box::new(Streams(std::io::stdin(), std::io::stdout()))
}

fn streams(s: UnixStream) -> Box<dyn Bootstrap> {
    Box::new(Streams(s.try_clone().expect("a clone"), s))
}

pub(super) fn stream_pair() -> [Box<dyn Bootstrap>; 2] {
    let (a, b) = UnixStream::pair().expect("a socket pair");
    [a, b].map(streams)
}

pub(super) fn close(plugin: &Plugin, ends: Ends) {
    plugin.close_send(ends.send).expect("closeSend");
    plugin.close_recv(ends.recv).expect("closeRecv");
}

/// The calls with which a communicator begins.
pub(super) fn begin(plugin: &Plugin) -> Ptr {
    let ctx = plugin.init().unwrap_or_else(|e| {
        panic!("{e}: NCCL would pass the plugin over; it says: {:#?}", warnings());
    });
    let n = plugin.devices().expect("devices");
    assert!(n > 0, "the plugin has {n} devices: NCCL would pass it over for another network");
    ctx
}

/// One rank: init, connect, traffic, close, finalize.
fn rank(o: &Options, plugin: &Plugin, rank: u64, mut peer: Box<dyn Bootstrap>) -> Received {
    let ctx = begin(plugin);
    let connected = devices().map(|dev| {
        use_device(dev);
        pair::connect(plugin, ctx, &mut *peer)
            .unwrap_or_else(|e| panic!("rank {rank}: connect: {e:?}; the plugin says: {:#?}", warnings()))
    });
    let connected: Vec<Ends> = connected.collect();
    let traffic = &o.traffic(plugin);
    let exchange = |ends: Ends| {
        pair::exchange(plugin, rank, ends, traffic).unwrap_or_else(|e| {
            panic!("rank {rank}: {e}; the plugin says: {:#?}", warnings());
        })
    };
    let received = std::thread::scope(|scope| {
        let (first, others) = connected.split_first().expect("a device");
        let others: Vec<_> = others.iter().map(|ends| scope.spawn(|| exchange(*ends))).collect();
        let first = exchange(*first);
        others.into_iter().fold(first, |all, other| {
            let Received { bytes, flushes } = other.join().expect("the traffic of another connection");
            Received { bytes: all.bytes + bytes, flushes: all.flushes + flushes }
        })
    });
    // No barrier: NCCL's ranks close whenever they are done.
    connected.into_iter().for_each(|ends| close(plugin, ends));
    plugin.finalize(ctx).expect("finalize");
    received
}

/// The devices over which this rank has connections, one each: `NCCL_CALLER_DEVICES`, numbers with commas between them.
fn devices() -> impl Iterator<Item = c_int> {
    let named = std::env::var("NCCL_CALLER_DEVICES").unwrap_or_else(|_| "0".into());
    let numbers = named.split(',').map(|dev| dev.parse().expect("a device's number")).collect::<Vec<_>>();
    numbers.into_iter()
}

/// Traffic both ways between two ranks, with every byte checked.
pub fn traffic(o: &Options) {
    let begin = Instant::now();
    let plugin = o.open();
    let Received { bytes, flushes } = if o.processes {
        let (mut child, peer) = o.spawn("rank-1");
        let received = rank(o, &plugin, 0, peer);
        assert!(child.wait().expect("the second rank").success(), "the second rank failed");
        received
    } else {
        let [a, b] = stream_pair();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| rank(o, &plugin, 1, b));
            let here = rank(o, &plugin, 0, a);
            let there = other.join().expect("the second rank failed");
            Received { bytes: here.bytes + there.bytes, flushes: here.flushes + there.flushes }
        })
    };
    // Where a test has put a rank into another container.
    let warnings: Vec<_> =
        warnings().into_iter().filter(|line| !line.contains("runs on this host too")).collect();
    o.promise("no warnings without a reason", warnings.is_empty(), &warnings);
    println!(
        "{} v{}: {bytes} bytes received and right in {:.2} s, {flushes} flushes",
        plugin.name(),
        o.version,
        begin.elapsed().as_secs_f64()
    );
}

/// The second process of [`traffic`].
pub fn rank_1(o: &Options) {
    die_with_parent();
    rank(o, &o.open(), 1, parent());
}

/// Makes a connection to itself, one way.
pub(super) fn loopback(plugin: &Plugin, ctx: Ptr) -> Ends {
    let (listener, mut handle) = plugin.listen(ctx).expect("listen");
    let ends = pair::poll_ends(plugin, ctx, listener, &mut handle).expect("connect");
    plugin.close_listen(listener).expect("closeListen");
    ends
}

/// Tests a request that needs nothing else, without a place for its size, until it is done or has
/// failed.
pub(super) fn wait(plugin: &Plugin, request: Ptr) -> Result<(), super::table::Failed> {
    let begin = Instant::now();
    // SAFETY: our own request, not done yet.
    while !unsafe { plugin.test(request, None)? } {
        assert!(begin.elapsed() < hang(), "a request that does not end");
        std::thread::yield_now();
    }
    Ok(())
}

/// How a request ended: the sizes of a receive, or nothing in particular for a send.
type Outcome = Result<[i32; 8], super::table::Failed>;

/// Tests receives and sends in turn, as NCCL's one thread does, until all are done or have failed;
/// returns how they ended. A plugin may move bytes only in these calls, so a receive may need a
/// test of its send. With NCCL's rules only the oldest of each kind is tested.
fn finish(plugin: &Plugin, recvs: &[Ptr], sends: &[Ptr]) -> [Vec<Outcome>; 2] {
    let begin = Instant::now();
    let mut ended = [vec![None; recvs.len()], vec![None; sends.len()]];
    while ended.iter().flatten().any(Option::is_none) {
        for (kind, requests) in [recvs, sends].into_iter().enumerate() {
            for (i, request) in requests.iter().enumerate() {
                if ended[kind][i].is_some() {
                    continue;
                }
                // For some requests no sizes are asked.
                // SAFETY: our own request, not done yet.
                let outcome = unsafe {
                    match kind {
                        0 => plugin.test_receive(*request, i % 2 == 0),
                        _ => plugin.test_send(*request, i % 2 != 0).map(|done| done.then_some([0; 8])),
                    }
                };
                ended[kind][i] = outcome.transpose();
                if !plugin.strict {
                    break;
                }
            }
        }
        assert!(begin.elapsed() < hang(), "requests that do not end: receives, sends {ended:?}");
        std::thread::yield_now();
    }
    ended.map(|outcomes| outcomes.into_iter().flatten().collect())
}

/// Tests the receive and the send of one message that arrives; returns its size.
pub(super) fn finish_one(plugin: &Plugin, recv: Ptr, send: Ptr) -> i32 {
    let [received, sent] = finish(plugin, &[recv], &[send]);
    sent[0].expect("send");
    received[0].expect("receive")[0]
}

/// Posts a request; repeats if the plugin has no room, as NCCL does: the plugin may be waiting for
/// the end of a connection's handshake. (This project's plugin has room for a receive at once, or
/// never.)
pub(super) fn post(plugin: &Plugin, one: impl Fn() -> super::table::Result<Option<Ptr>>) -> Option<Ptr> {
    let begin = Instant::now();
    loop {
        let request = one().unwrap_or_else(|e| panic!("{e}; the plugin says: {:#?}", warnings()));
        if request.is_some() || plugin.strict || begin.elapsed() > Duration::from_secs(10) {
            return request;
        }
        std::thread::yield_now();
    }
}

/// Sends once the plugin has learned of the receive that was posted.
pub(super) fn send(
    plugin: &Plugin,
    ends: Ends,
    buffer: &Buffer,
    size: usize,
    tag: i32,
    mr: Ptr,
) -> Option<Ptr> {
    posted_send(plugin, || {
        // SAFETY: the buffer outlives the connection in all scenarios.
        unsafe { plugin.isend(ends.send, buffer.at(0), size, tag, mr) }
    })
}

fn posted_send(plugin: &Plugin, one: impl Fn() -> super::table::Result<Option<Ptr>>) -> Option<Ptr> {
    let begin = Instant::now();
    loop {
        let request = post(plugin, &one);
        if request.is_some() || begin.elapsed() > hang() {
            return request;
        }
        std::thread::yield_now();
    }
}

pub(super) fn receive(
    plugin: &Plugin,
    ends: Ends,
    buffer: &Buffer,
    size: usize,
    tag: i32,
    mr: Ptr,
) -> Option<Ptr> {
    // SAFETY: the buffer outlives the connection in all scenarios.
    post(plugin, || unsafe { plugin.irecv(ends.recv, &[buffer.at(0)], &[size], &[tag], &[mr]) })
}

/// Deregisters and closes a connection whose requests are under way or have failed.
pub(super) fn end(o: &Options, plugin: &Plugin, ends: Ends, (out_mr, into_mr): (Ptr, Ptr)) {
    let ended = [
        plugin.dereg_mr(ends.recv, into_mr),
        plugin.dereg_mr(ends.send, out_mr),
        plugin.close_send(ends.send),
        plugin.close_recv(ends.recv),
    ];
    let what = "closed without an error, though not all requests were done";
    o.promise(what, ended.iter().all(Result::is_ok), &ended);
}

/// Checks the properties and the small rules of the calls.
pub fn rules(o: &Options) {
    let plugin = o.open();
    // What NCCL calls after an init that failed.
    if o.version >= 11 && o.dares("finalize of NULL before any init") {
        plugin.finalize(std::ptr::null_mut()).expect("finalize of NULL");
    }
    let ctx = begin(&plugin);
    let p = plugin.properties(0).expect("properties");
    assert!(!p.name.is_empty() && p.speed < 10_000_000 && p.port >= 0, "{p:?}");
    assert!(p.max_recvs >= 1 && p.max_comms > 0 && p.ptr_support & 1 == 1, "{p:?}");
    assert!(p.latency >= 0.0 && p.latency < 1000.0 && p.device_type == 0, "{p:?}");
    assert!(p.max_p2p_bytes.is_none_or(|b| b > 0 && b <= 1 << 40), "{p:?}");
    // Without a speed NCCL assumes 10 Gbit/s.
    o.promise("it knows its speed", p.speed > 0, &p.speed);
    o.promise("at most 8 buffers in a receive", p.max_recvs <= 8, &p.max_recvs);
    if !o.nccl_rules {
        let most = if over_tcp() { 1 } else { 8 };
        assert_eq!(
            p.max_recvs, most,
            "8 so that PXN shares connections, 1 where messages are taken in their order"
        );
    }
    if o.dares("properties of a device that there is not") {
        assert!(plugin.properties(1000).is_err(), "there are no 1001 devices");
    }
    println!("{p:?}");

    let ends = loopback(&plugin, ctx);
    let (out, into) = (Buffer::new(1 << 20), Buffer::new(1 << 20));
    let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes()).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes()).expect("regMr");
    let has_handles = !out_mr.is_null() && !into_mr.is_null();
    o.promise("a registration has a handle", has_handles, &(out_mr, into_mr));
    // A descriptor that is no dma-buf is refused, and the connection stays good.
    if o.dares("a dma-buf that is none") {
        let file = std::fs::File::open("/dev/null").expect("/dev/null");
        for (kind, fd) in [(1, file.as_raw_fd()), (2, -1), (4, file.as_raw_fd())] {
            assert!(plugin.reg_mr_dma_buf(ends.recv, into.at(0), into.bytes(), kind, fd).is_err());
        }
        if !super::table::is_gpu_memory() {
            let fd = file.as_raw_fd();
            assert!(plugin.reg_mr_dma_buf(ends.recv, into.at(0), into.bytes(), 2, fd).is_err());
        }
    }
    assert!(p.ptr_support & 4 == 0 || plugin.takes_dma_bufs(), "dma-bufs are advertised, without a call");
    // 32 receives and sends at once; the sends are posted without testing the receives.
    let recvs: Vec<Ptr> = (0..32)
        .map(|i| receive(&plugin, ends, &into, 4096, i, into_mr).expect("room for 32 receives"))
        .collect();
    let sends: Vec<Ptr> =
        (0..32).map(|i| send(&plugin, ends, &out, 64, i, out_mr).expect("room for 32 sends")).collect();
    let [received, sent] = if o.nccl_rules || super::table::is_gpu_memory() {
        finish(&plugin, &recvs, &sends)
    } else {
        // Host memory arrives without a test of its send.
        let [received, _] = finish(&plugin, &recvs, &[]);
        let [_, sent] = finish(&plugin, &[], &sends);
        [received, sent]
    };
    for (i, outcome) in received.into_iter().enumerate() {
        let sizes = outcome.expect("receive");
        assert!(i % 2 != 0 || sizes[0] == 64, "{sizes:?}");
    }
    sent.into_iter().for_each(|s| assert!(s.is_ok(), "send: {s:?}"));
    // Empty messages, with registrations and without.
    let mut registrations = vec![(out_mr, into_mr)];
    if o.dares("a message of nothing without a registration") {
        registrations.push((std::ptr::null_mut(), std::ptr::null_mut()));
    }
    // For an empty message NCCL may name addresses beyond the buffers' ends.
    let behind = |buffer: &Buffer| buffer.at(buffer.bytes()).cast::<u8>().wrapping_add(32 << 10).cast();
    for (a, b) in registrations {
        // SAFETY: the message is empty, so nothing at the address is used.
        let r = post(&plugin, || unsafe { plugin.irecv(ends.recv, &[behind(&into)], &[0], &[5], &[b]) })
            .expect("room");
        // SAFETY: the message is empty, so nothing at the address is used.
        let s =
            posted_send(&plugin, || unsafe { plugin.isend(ends.send, behind(&out), 0, 5, a) }).expect("room");
        assert_eq!(finish_one(&plugin, r, s), 0);
    }
    if o.dares("flushes of host memory, and of buffers that are not there") {
        assert_eq!(plugin.iflush(ends.recv, into.at(0), 64, into_mr), Ok(None));
        assert_eq!(plugin.iflush_null(ends.recv, 0), Ok(None));
        for n in [-1, 1, 9] {
            plugin.iflush_null(ends.recv, n).expect_err("buffers and no arrays");
        }
    }
    // More receives than there is room for: refused with a NULL request, which is not an error.
    let most = if o.dares("more than 32 requests of a connection at once") { 1 << 20 } else { 32 };
    let mut posted = 0;
    while posted < most && receive(&plugin, ends, &into, 64, 9, into_mr).is_some() {
        posted += 1;
        assert!(posted < 1 << 20, "no end of receives");
    }
    assert!(posted >= 32);
    // Closes and deregisters with all of them in flight, and with a send: what an abort does. An
    // error here would be one line in NCCL's log, and NCCL would leave open what it had yet to
    // close.
    send(&plugin, ends, &out, if o.nccl_rules { 64 } else { 1 << 16 }, 9, out_mr);
    end(o, &plugin, ends, (out_mr, into_mr));
    plugin.finalize(ctx).expect("finalize");
}

/// A receive that is shorter than the message that arrives: nothing beyond its end is written. NCCL
/// requires no more, because it never does that; this project's plugin makes it an error on both
/// sides.
pub fn truncation(o: &Options) {
    let plugin = o.open();
    let ctx = begin(&plugin);
    // Sizes that travel in the WQE, in the window or a region, and in slices.
    for size in [30, 5000, o.max] {
        let ends = loopback(&plugin, ctx);
        let (out, into) = (Buffer::new(size), Buffer::new(size));
        let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes()).expect("regMr");
        let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes()).expect("regMr");
        into.set(0, size, 0xee);
        let r = receive(&plugin, ends, &into, size - 1, 3, into_mr).expect("room");
        let s = send(&plugin, ends, &out, size, 3, out_mr).expect("room");
        let [received, sent] = finish_cut(&plugin, r, s);
        let cut = format!("{size} bytes for a receive of {}: an error", size - 1);
        o.promise(&format!("{cut} of the receive"), matches!(received, Some(Err(_))), &received);
        o.promise(&format!("{cut} of the send"), matches!(sent, Some(Err(_))), &sent);
        let last = into.bytes() - 1;
        // SAFETY: within the buffer, which the plugin no longer writes.
        assert_eq!(unsafe { *into.at(last).cast::<u8>() }, 0xee, "a byte behind the receive was written");
        end(o, &plugin, ends, (out_mr, into_mr));
    }
    let said = warnings();
    o.promise("the log says why", said.iter().any(|w| w.contains("5000")), &said);
    plugin.finalize(ctx).expect("finalize");
    println!("nothing behind the receive was written");
}

/// Tests a receive that is too short, and its send, in turn until both have ended. With NCCL's
/// rules it stops a while after the first has ended, because no rule says that the other one ends
/// too.
fn finish_cut(plugin: &Plugin, recv: Ptr, send: Ptr) -> [Option<Outcome>; 2] {
    let (begin, mut first) = (Instant::now(), None);
    let mut ended: [Option<Outcome>; 2] = [None; 2];
    while ended.contains(&None) {
        // SAFETY: our own requests, not done yet.
        unsafe {
            if ended[0].is_none() {
                ended[0] = plugin.test_receive(recv, true).transpose();
            }
            if ended[1].is_none() {
                ended[1] = plugin.test_send(send, true).map(|done| done.then_some([0; 8])).transpose();
            }
        }
        if ended.iter().any(Option::is_some) {
            first.get_or_insert_with(Instant::now);
        }
        assert!(begin.elapsed() < hang(), "neither the receive nor the send ends");
        let patience = if plugin.strict { hang() } else { patience(Duration::from_secs(5)) };
        if first.is_some_and(|at| at.elapsed() > patience) {
            break;
        }
        std::thread::yield_now();
    }
    ended
}

/// The abstract name of the Unix socket at which a listener of this process listens. The name does not stand in its handle.
fn own_listener() -> String {
    let fds = std::fs::read_dir("/proc/self/fd").expect("descriptors");
    let links = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    let own: Vec<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("the host's Unix sockets");
    let name = sockets.lines().find_map(|line| {
        // Number, references, protocol, flags, type, state, inode, path.
        let mut fields = line.split_whitespace().skip(6);
        let (inode, path) = (fields.next()?, fields.next()?.strip_prefix('@')?);
        let ours = path.starts_with("pushgate/net/") && own.contains(&format!("socket:[{inode}]"));
        ours.then(|| path.to_owned())
    });
    name.expect("a listener's socket")
}

/// Handles that no listener made, and strangers that connect to a listener.
pub fn garbage(o: &Options) {
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    let (listener, good) = plugin.listen(ctx).expect("listen");
    for seed in 0..200u64 {
        let mut handle = good;
        let mut r = pair::Random(seed);
        match seed {
            0 => handle = [0; 128],
            1 => handle = [0xff; 128],
            _ => handle[r.below(112)] ^= 1 << r.below(8),
        }
        if seed == 2 {
            // The mark of an attempt that was never begun.
            handle = good;
            handle[112] = 77;
        }
        if handle != good {
            assert!(plugin.connect(ctx, &mut handle).is_err(), "garbage {seed} was taken: {handle:?}");
        }
    }
    // Three strangers: one sends nonsense, one sends nothing, one disconnects.
    let strangers = if good[8] & 1 != 0 {
        let address = SocketAddr::from_abstract_name(own_listener()).expect("a name");
        let mut rude = UnixStream::connect_addr(&address).expect("the listener's socket");
        rude.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it is taken");
        let mut half = UnixStream::connect_addr(&address).expect("the listener's socket");
        half.write_all(b"PGF1\x40\0\0\0\0\0\0\0{\"version\":1").expect("it is taken");
        let mut wrong = UnixStream::connect_addr(&address).expect("the listener's socket");
        wrong.write_all(b"PGF1\x02\0\0\0\0\0\0\0{}").expect("it is taken");
        drop(UnixStream::connect_addr(&address).expect("the listener's socket"));
        vec![UnixStream::connect_addr(&address).expect("the listener's socket"), rude, half, wrong]
    } else {
        Vec::new()
    };
    for _ in 0..10 {
        assert_eq!(plugin.accept(listener), Ok(None));
    }
    // The listener still accepts two connections, made with one handle.
    for _ in 0..2 {
        let mut handle = good;
        let ends = pair::poll_ends(&plugin, ctx, listener, &mut handle).expect("connect");
        close(&plugin, ends);
    }
    drop(strangers);
    plugin.close_listen(listener).expect("closeListen");
    // The handle's listener is gone.
    let mut handle = good;
    let begin = Instant::now();
    while let Ok(comm) = plugin.connect(ctx, &mut handle) {
        assert!(comm.is_none(), "connected to a listener that is gone");
        assert!(begin.elapsed() < hang(), "a connection to a listener that is gone never fails");
        std::thread::yield_now();
    }
    plugin.finalize(ctx).expect("finalize");
    println!("refused");
}

fn count(what: &str) -> usize {
    match what {
        "maps" => std::fs::read_to_string("/proc/self/maps").expect("maps").lines().count(),
        _ => std::fs::read_dir(format!("/proc/self/{what}")).expect(what).count(),
    }
}

/// The numbers of descriptors, threads and mappings.
pub(crate) fn counts() -> [usize; 3] {
    ["fd", "task", "maps"].map(count)
}

/// The counts, once there are no more descriptors and threads than before, or after `limit`: the
/// threads that play a GPU's worker end by themselves after the last copy.
pub(crate) fn counts_down_to(before: [usize; 3], limit: Duration) -> [usize; 3] {
    let begin = Instant::now();
    loop {
        let now = counts();
        if now[0] <= before[0] && now[1] <= before[1] || begin.elapsed() > limit {
            return now;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Many connections opened, used and closed: nothing of them is left.
pub fn many(o: &Options) {
    cuda::bring_up();
    let threads = count("task");
    let plugin = o.open();
    let fds = count("fd");
    let one = |ctx| {
        let ends = loopback(&plugin, ctx);
        let buffer = Buffer::new(8192);
        let out_mr = plugin.reg_mr(ends.send, buffer.at(0), 4096).expect("regMr");
        let into_mr = plugin.reg_mr(ends.recv, buffer.at(4096), 4096).expect("regMr");
        buffer.fill(0, 4096, 1);
        // SAFETY: the buffer outlives the connection.
        let r = post(&plugin, || unsafe {
            plugin.irecv(ends.recv, &[buffer.at(4096)], &[4096], &[1], &[into_mr])
        });
        let r = r.expect("room");
        let s = send(&plugin, ends, &buffer, 4096, 1, out_mr).expect("room");
        finish_one(&plugin, r, s);
        if super::table::is_gpu_memory()
            && let Some(flush) = plugin.iflush(ends.recv, buffer.at(4096), 4096, into_mr).expect("iflush")
        {
            wait(&plugin, flush).expect("flush");
        }
        assert_eq!(buffer.differs(4096, 4096, 1), None);
        plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
        plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
        close(&plugin, ends);
    };
    let ctx = begin(&plugin);
    // What is made once exists after the first few connections. The stacks of as many threads as
    // play a GPU's worker at once, which the C library keeps, exist only after more of them.
    let gpu = super::table::is_gpu_memory();
    (0..if gpu { 16 } else { 4 }).for_each(|_| one(ctx));
    let before = counts();
    (0..o.times).for_each(|_| one(ctx));
    let after = counts_down_to(before, if o.nccl_rules { patience(Duration::from_secs(5)) } else { hang() });
    // The allocator may map or unmap arenas of its own, and stacks come in pairs with their guards.
    let some = if gpu { 16 } else { 8 };
    let kept = after[0] <= before[0] && after[1] <= before[1] && after[2] <= before[2] + some;
    let what = format!("descriptors, threads and mappings as {before:?} before {} connections", o.times);
    o.promise(&what, kept, &after);
    plugin.finalize(ctx).expect("finalize");
    if o.version >= 11 {
        // The kernel may still show a thread that was joined a moment ago.
        let (since, mut left) = (Instant::now(), (count("fd"), count("task")));
        while left != (fds, threads) && since.elapsed() < patience(Duration::from_secs(5)) {
            std::thread::sleep(Duration::from_millis(1));
            left = (count("fd"), count("task"));
        }
        let what = format!("descriptors and threads as {:?} before init, after finalize", (fds, threads));
        o.promise(&what, left == (fds, threads), &left);
    }
    println!("{} connections; descriptors, threads, mappings {before:?} before and {after:?} after", o.times);
}

/// The library is loaded, used and unloaded, several times.
pub fn reload(o: &Options) {
    cuda::bring_up();
    let threads = count("task");
    for _ in 0..3 {
        let plugin = o.open();
        let ctx = begin(&plugin);
        // NCCL's second communicator; the first one ends before it.
        let second = plugin.init().expect("init");
        plugin.finalize(ctx).expect("finalize");
        let [a, b] = stream_pair();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| rank(o, &plugin, 1, b));
            rank(o, &plugin, 0, a);
            other.join().expect("the second rank failed");
        });
        plugin.finalize(second).expect("finalize");
        if o.version >= 11 {
            let begin = Instant::now();
            let limit = if o.nccl_rules { Duration::ZERO } else { hang() };
            while count("task") != threads && begin.elapsed() < limit {
                std::thread::yield_now();
            }
            let left = count("task");
            let what = format!("as many threads after the last finalize as before: {threads}");
            o.promise(&what, left == threads, &left);
        }
    }
    println!("three times");
}

/// A setting that is wrong: init fails and names it.
pub fn setting(o: &Options) {
    let plugin = o.open();
    let failed = plugin.init().expect_err("a wrong setting was taken");
    println!("{failed}");
    warnings().iter().for_each(|w| println!("{w}"));
    if o.version >= 11 {
        plugin.finalize(std::ptr::null_mut()).expect("finalize of NULL");
    }
}

/// A peer that is killed in the middle: requests fail within 10 s, including those posted
/// afterwards.
pub fn killed(o: &Options) {
    let plugin = o.open();
    let (mut child, mut peer) = o.spawn("victim");
    let ctx = plugin.init().expect("init");
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let buffer = Buffer::new(1 << 20);
    let out_mr = plugin.reg_mr(ends.send, buffer.at(0), buffer.bytes()).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, buffer.at(0), buffer.bytes()).expect("regMr");
    peer.barrier();
    let r = receive(&plugin, ends, &buffer, 1 << 20, 1, into_mr).expect("room");
    // SAFETY: the buffer outlives the connection.
    let early = unsafe { plugin.isend(ends.send, buffer.at(0), 4096, 1, out_mr) };
    assert_eq!(early, Ok(None), "no receive is posted");
    let mut half_made = {
        // Also a connection that is just being made with the peer.
        let mut theirs = [0; 128];
        peer.hear(&mut theirs);
        theirs
    };
    assert_eq!(plugin.connect(ctx, &mut half_made), Ok(None));
    child.kill().expect("kill");
    child.wait().expect("wait");
    let begin = Instant::now();
    // Accepted once the plugin knows that the peer posts no more receives.
    let s = send(&plugin, ends, &buffer, 4096, 1, out_mr).expect("a post to a peer that is gone is taken");
    for (what, request) in [("receive", r), ("send", s)] {
        let failed = wait(&plugin, request).expect_err("it succeeded, although the peer is gone");
        println!("{what}: {failed} after {:.2} s", begin.elapsed().as_secs_f64());
        // The promise is ten seconds; a slow machine gets the same multiple of that.
        assert!(begin.elapsed() < patience(Duration::from_secs(10)), "after {:?}", begin.elapsed());
    }
    while let Ok(comm) = plugin.connect(ctx, &mut half_made) {
        assert!(comm.is_none());
        assert!(begin.elapsed() < hang(), "a connection to a process that is gone never fails");
        std::thread::yield_now();
    }
    fail_when_tested(&plugin, ends, &buffer, (out_mr, into_mr));
    plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
}

/// Posts after the end of a connection are accepted, and their tests report that it has ended.
fn fail_when_tested(plugin: &Plugin, ends: Ends, buffer: &Buffer, (out_mr, into_mr): (Ptr, Ptr)) {
    let s = send(plugin, ends, buffer, 1, 1, out_mr).expect("isend after the end is taken");
    let r = receive(plugin, ends, buffer, 1, 1, into_mr).expect("irecv after the end is taken");
    for request in [s, r] {
        wait(plugin, request).expect_err("done, after the end");
    }
}

/// The other rank of [`killed`]: connects, and never answers.
pub fn victim(o: &Options) {
    let plugin = o.open();
    let mut peer = parent();
    let ctx = plugin.init().expect("init");
    pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    peer.barrier();
    let (_listener, handle) = plugin.listen(ctx).expect("listen");
    peer.tell(&handle);
    // Longer than the other rank waits; this process is killed before.
    std::thread::sleep(hang() * 2);
}

/// After this many messages a sender knows whether its peer reads its memory, as a rule.
const KNOWN: usize = 8;
/// Bytes of a message that goes through the window at once where the sender does not know yet, and is too long to be done when it lies
/// there.
const STOPPED: usize = 100_000;

/// Memory that a message is sent out of is deregistered while the peer stands still. NCCL, which
/// frees a communicator at that point, must not get an error, or it would not free the rest.
pub fn stopped(o: &Options) {
    let plugin = o.open();
    let (mut child, mut peer) = o.spawn("sleeper");
    let ctx = plugin.init().expect("init");
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let buffer = Buffer::new(STOPPED);
    let mr = plugin.reg_mr(ends.send, buffer.at(0), buffer.bytes()).expect("regMr");
    for _ in 0..KNOWN {
        let s = send(&plugin, ends, &buffer, buffer.bytes(), 1, mr).expect("room");
        wait(&plugin, s).expect("send");
    }
    peer.barrier();
    stop(&child);
    let s = send(&plugin, ends, &buffer, buffer.bytes(), 1, mr).expect("room");
    // So that the message is on its way.
    std::thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    plugin.dereg_mr(ends.send, mr).expect("deregMr");
    println!("deregistered after {:.2} s", begin.elapsed().as_secs_f64());
    // Over RDMA the peer's device already has the message, and the connection has not ended.
    child.kill().expect("kill");
    child.wait().expect("wait");
    wait(&plugin, s).expect_err("no receive took it");
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
}

/// Stops all threads of a rank that is a process, its engine's too.
pub(super) fn stop(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("kill");
    let stopped =
        rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED).expect("waitpid");
    assert!(stopped.is_some_and(|(_, status)| status.stopped()), "the rank is not stopped: {stopped:?}");
}

/// Has a rank go on that [`stop`] has stopped.
pub(super) fn goes_on(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("kill");
}

/// The other rank of [`stopped`], with one receive more than it waits for.
pub fn sleeper(o: &Options) {
    die_with_parent();
    let plugin = o.open();
    let mut peer = parent();
    let ctx = plugin.init().expect("init");
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let buffer = Buffer::new(STOPPED);
    let mr = plugin.reg_mr(ends.recv, buffer.at(0), buffer.bytes()).expect("regMr");
    let receives: Vec<_> =
        (0..=KNOWN).map(|_| receive(&plugin, ends, &buffer, STOPPED, 1, mr).expect("room")).collect();
    for r in &receives[..KNOWN] {
        wait(&plugin, *r).expect("receive");
    }
    peer.barrier();
    // This process is stopped, then killed.
    std::thread::sleep(hang() * 2);
}

/// Sends and receives until a call fails, then tries every call that could wait. Returns how it
/// failed.
fn until_lost(plugin: &Plugin, ends: Ends, peer: &mut dyn Bootstrap) -> super::table::Failed {
    let (out, into) = (Buffer::new(1 << 16), Buffer::new(1 << 16));
    let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes()).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes()).expect("regMr");
    let begin = Instant::now();
    let (mut s, mut r) = (None, None);
    // SAFETY: for all calls, the buffers stay until the ends are closed, and the requests are not
    // done.
    let mut one = || unsafe {
        if r.is_none() {
            r = plugin.irecv(ends.recv, &[into.at(0)], &[1 << 16], &[1], &[into_mr])?;
        }
        if s.is_none() {
            s = plugin.isend(ends.send, out.at(0), 1 << 16, 1, out_mr)?;
        }
        for request in [&mut s, &mut r] {
            if let Some(at) = *request
                && plugin.test(at, None)?
            {
                *request = None;
            }
        }
        Ok(())
    };
    let failed = loop {
        match one() {
            Ok(()) => assert!(begin.elapsed() < hang(), "no call reports that the GPU is lost"),
            Err(failed) => break failed,
        }
        std::thread::yield_now();
    };
    // So that neither rank learns of the failure by the other's closing.
    peer.barrier();
    let begin = Instant::now();
    // Both ends have ended or end now: no request waits any more. What had arrived, or was copied before the copier's end, may be done.
    for request in [s, r].into_iter().flatten() {
        let _done_or_failed = wait(plugin, request);
    }
    // Posts do not wait either: they fail, or their tests do, as soon as the connection has ended. Until then a send may find no receive,
    // or one that the other rank had posted, and such a short one is done.
    let refused = |post: &dyn Fn() -> Result<Option<Ptr>, super::table::Failed>| {
        while post().is_ok_and(|request| request.is_none_or(|request| wait(plugin, request).is_ok())) {
            assert!(begin.elapsed() < hang(), "posts are taken, although the GPU is lost");
            std::thread::yield_now();
        }
    };
    // SAFETY: the buffers stay until the ends are closed, and the requests are not done.
    unsafe {
        refused(&|| plugin.isend(ends.send, out.at(0), 64, 1, out_mr));
        refused(&|| plugin.irecv(ends.recv, &[into.at(0)], &[64], &[1], &[into_mr]));
    }
    plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    assert!(begin.elapsed() < hang(), "{:?} until all of it ended", begin.elapsed());
    peer.barrier();
    close(plugin, ends);
    failed
}

/// A copier that is killed: calls that would otherwise wait for ever fail, on this rank, whose copier is another one, and on the
/// peer, whose copier it is.
pub fn lost(o: &Options) {
    let plugin = o.open();
    let scope = format!("-lost-{}", std::process::id());
    let (mut child, mut peer) = o.spawn_with("lost-rank", &[("_PUSHGATE_COPIER_SCOPE", &scope)]);
    let ctx = plugin.init().expect("init");
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let failed = until_lost(&plugin, ends, &mut *peer);
    plugin.finalize(ctx).expect("finalize");
    assert!(child.wait().expect("the second rank").success(), "the second rank failed");
    println!("the peer: {failed}");
    let said = warnings();
    assert!(said.iter().any(|w| w.contains("end has aborted it")), "{said:#?}");
    said.iter().for_each(|w| println!("{w}"));
}

/// The other rank of [`lost`], whose GPU it is. The command `NCCL_CALLER_PUSHGATE`, if it is set, looks at the rank while its copier is
/// stopped.
pub fn lost_rank(o: &Options) {
    let plugin = o.open();
    let mut peer = parent();
    let ctx = plugin.init().expect("init");
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    let copier = copier();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        kill_process(copier, Signal::STOP).expect("a copier");
        if let Some(pushgate) = std::env::var_os("NCCL_CALLER_PUSHGATE") {
            let named = format!("'s GPU (process {}) is stopped: state T", copier.as_raw_nonzero());
            // A signal stops a process when it next has a core.
            crate::wait_until(&named, || {
                let said =
                    Command::new(&pushgate).args(["inspect", &std::process::id().to_string()]).output();
                String::from_utf8(said.expect("pushgate inspect").stdout).expect("text").contains(&named)
            });
        }
        kill_process(copier, Signal::KILL).expect("a copier");
    });
    until_lost(&plugin, ends, &mut *peer);
    killer.join().expect("a thread");
    plugin.finalize(ctx).expect("finalize");
    let said = warnings();
    let named = said.iter().find(|w| w.contains("copied no more: the copier of ") && w.contains("has ended"));
    eprintln!("{}", named.unwrap_or_else(|| panic!("{said:#?}")));
}

/// The process of this rank's copier, as the plugin's log names it.
fn copier() -> Pid {
    let log = LOG.lock().unwrap();
    let said = log.iter().find_map(|(_, text)| text.split_once("the copier is process "));
    let number = said.expect("the log names the copier").1;
    let digits: String = number.chars().take_while(char::is_ascii_digit).collect();
    Pid::from_raw(digits.parse().expect("a number")).expect("a process")
}

/// Stops the copier again and again for a while, until the value is dropped.
struct Stopping(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Stopping {
    fn begin(copier: Pid) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let seen = end.clone();
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                kill_process(copier, Signal::STOP).expect("a copier");
                std::thread::sleep(Duration::from_millis(400));
                kill_process(copier, Signal::CONT).expect("a copier");
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        Stopping(end, Some(thread))
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        let _ = self.1.take().map(JoinHandle::join);
    }
}

/// Memory that is deregistered with a send under way is free afterwards: nothing reads it any more,
/// and the message has its former content.
pub fn deregister(o: &Options) {
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    let ends = loopback(&plugin, ctx);
    let size = 60_000;
    let (out, into) = (Buffer::new(size), Buffer::new(size));
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), size).expect("regMr");
    let _stopping = std::env::var_os("NCCL_CALLER_FAULT").map(|_| Stopping::begin(copier()));
    for seed in 0..3 {
        let out_mr = plugin.reg_mr(ends.send, out.at(0), size).expect("regMr");
        out.fill(0, size, seed);
        let r = receive(&plugin, ends, &into, size, 1, into_mr).expect("room");
        let s = send(&plugin, ends, &out, size, 1, out_mr).expect("room");
        plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
        // The new use of the memory.
        out.set(0, size, 0x11);
        finish_one(&plugin, r, s);
        assert_eq!(into.differs(0, size, seed), None, "memory was read after its deregistration");
    }
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
    println!("three times");
}

/// The function of a scenario.
pub type Scenario = fn(&Options);

/// Scenarios with what NCCL requires of any plugin. What they check beyond that is marked.
pub const NCCL: [(&str, Scenario); 8] = [
    ("traffic", traffic),
    ("rules", rules),
    ("truncation", truncation),
    ("many", many),
    ("reload", reload),
    ("tags", super::tags::tags),
    ("speed", super::speed::speed),
    ("growth", super::growth::growth),
];

/// Scenarios with what this project's plugin promises beyond that.
pub const OWN: [(&str, Scenario); 23] = [
    ("ahead", super::early::ahead),
    ("long", super::early::long),
    ("garbage", garbage),
    ("setting", setting),
    ("forked", super::forked::forked),
    ("killed", killed),
    ("stopped", stopped),
    ("closing", super::closing::closing),
    ("early", super::early::early),
    ("gone", super::early::gone),
    ("late", super::early::late),
    ("hanging", super::early::hanging),
    ("lost", lost),
    ("deregister", deregister),
    ("fair", super::fair::fair),
    ("mixed", super::mixed::mixed),
    ("stall", super::stall::stall),
    ("still", super::still::still),
    ("recovering", super::recovering::recovering),
    ("abandoned", super::unanswered::abandoned),
    ("given-up", super::unanswered::given_up),
    ("told", super::told::told),
    ("devices", super::told::devices),
];

/// Functions of processes that a scenario starts.
const SECOND: [(&str, Scenario); 14] = [
    ("growth-rank", super::growth::second),
    ("rank-1", rank_1),
    ("victim", victim),
    ("sleeper", sleeper),
    ("lost-rank", lost_rank),
    ("closing-rank", super::closing::closing_rank),
    ("early-rank", super::early::second),
    ("gone-rank", super::early::gone_second),
    ("late-rank", super::early::late_second),
    ("still-rank", super::still::second),
    ("speed-rank", super::speed::second),
    ("fair-rank", super::fair::second),
    ("recovering-rank", super::recovering::second),
    ("unanswering-rank", super::unanswered::second),
];

/// Runs a scenario by its name; false if there is none of that name. With only NCCL's rules a
/// scenario of [`OWN`] just prints that it is left out.
pub fn run(name: &str, o: &Options) -> bool {
    if o.nccl_rules && OWN.iter().any(|(own, _)| *own == name) {
        println!("left out: {name} is a promise of this project's plugin, and NCCL asks nothing of the kind");
        return true;
    }
    let all = NCCL.iter().chain(&OWN).chain(&SECOND);
    let found = all.into_iter().find(|(n, _)| *n == name);
    found.inspect(|(_, scenario)| scenario(o)).is_some()
}
