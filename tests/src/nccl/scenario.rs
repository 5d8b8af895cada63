//! What is tried on a plugin. Each runs in a process of its own (`nccl-caller`), with
//! the settings of its environment.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::pair::{self, Bootstrap, Buffer, Ends, LIMIT, Received, Streams, Traffic};
use super::table::{Plugin, Ptr, warnings};

/// What every scenario gets.
#[derive(Clone, Debug)]
pub struct Options {
    /// The plugin's file.
    pub plugin: std::path::PathBuf,
    /// Of the table.
    pub version: u32,
    /// Ranks are processes, not threads of one.
    pub processes: bool,
    /// Sends name no registration.
    pub unregistered: bool,
    /// Groups of messages each way.
    pub groups: usize,
    /// Longest message.
    pub max: usize,
    /// Requests at once, each way.
    pub in_flight: usize,
    /// Of all that is random.
    pub seed: u64,
    /// How often, where a scenario repeats something.
    pub times: usize,
}

impl Options {
    fn traffic(&self, plugin: &Plugin) -> Traffic {
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

    fn open(&self) -> Plugin {
        Plugin::open(&self.plugin, self.version).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The other rank, a process that runs `scenario`, and the bytes between us.
    fn spawn(&self, scenario: &str) -> (Child, Box<dyn Bootstrap>) {
        self.spawn_with(scenario, &[])
    }

    fn spawn_with(&self, scenario: &str, variables: &[(&str, &str)]) -> (Child, Box<dyn Bootstrap>) {
        let mut command = Command::new(std::env::current_exe().expect("our own path"));
        command.arg(scenario).envs(variables.iter().copied());
        for (name, value) in [
            ("--plugin", self.plugin.display().to_string()),
            ("--version", self.version.to_string()),
            ("--groups", self.groups.to_string()),
            ("--max", self.max.to_string()),
            ("--in-flight", self.in_flight.to_string()),
            ("--seed", self.seed.to_string()),
            ("--times", self.times.to_string()),
        ] {
            command.args([name, &value]);
        }
        // Settings of its own.
        let other = std::env::var("NCCL_CALLER_RANK_1").unwrap_or_default();
        command.envs(other.split_whitespace().filter_map(|setting| setting.split_once('=')));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a second rank");
        let (from, to) = (child.stdout.take().expect("piped"), child.stdin.take().expect("piped"));
        (child, Box::new(Streams(from, to)))
    }
}

/// Our own bootstrap, in a process that was spawned.
fn parent() -> Box<dyn Bootstrap> {
    Box::new(Streams(std::io::stdin(), std::io::stdout()))
}

fn stream_pair() -> [Box<dyn Bootstrap>; 2] {
    let (a, b) = UnixStream::pair().expect("a socket pair");
    [a, b].map(|s| Box::new(Streams(s.try_clone().expect("a clone"), s)) as Box<dyn Bootstrap>)
}

fn close(plugin: &Plugin, ends: Ends) {
    plugin.close_send(ends.send).expect("closeSend");
    plugin.close_recv(ends.recv).expect("closeRecv");
}

/// One rank: init, connect, traffic, close, finalize.
fn rank(o: &Options, plugin: &Plugin, rank: u64, mut peer: Box<dyn Bootstrap>) -> Received {
    let ctx = plugin.init().expect("init");
    assert!(plugin.devices().expect("devices") > 0);
    let ends = pair::connect(plugin, ctx, &mut *peer).expect("connect");
    let received = pair::exchange(plugin, rank, ends, &o.traffic(plugin)).unwrap_or_else(|e| {
        panic!("rank {rank}: {e}; the plugin says: {:#?}", warnings());
    });
    // No barrier: NCCL's ranks close whenever they are done.
    close(plugin, ends);
    plugin.finalize(ctx).expect("finalize");
    received
}

/// Traffic both ways between two ranks, every byte checked.
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
    assert_eq!(warnings(), [""; 0], "warnings without a reason");
    println!(
        "{} v{}: {bytes} bytes received and right in {:.2} s, {flushes} flushes",
        plugin.name(),
        o.version,
        begin.elapsed().as_secs_f64()
    );
}

/// The second process of [`traffic`].
pub fn rank_1(o: &Options) {
    // A first rank that has failed is not waited for.
    let killed = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(killed).expect("prctl");
    rank(o, &o.open(), 1, parent());
}

/// A connection to itself, one way.
fn loopback(plugin: &Plugin, ctx: Ptr) -> Ends {
    let (listener, mut handle) = plugin.listen(ctx).expect("listen");
    let ends = pair::poll_ends(plugin, ctx, listener, &mut handle).expect("connect");
    plugin.close_listen(listener).expect("closeListen");
    ends
}

/// Tests until done or failed.
fn wait(plugin: &Plugin, request: Ptr, sizes: Option<&mut [i32; 8]>) -> Result<(), super::table::Failed> {
    let begin = Instant::now();
    let mut own = [0; 8];
    let with = sizes.is_some();
    loop {
        // SAFETY: ours, not done yet.
        if unsafe { plugin.test(request, with.then_some(&mut own))? } {
            if let Some(sizes) = sizes {
                *sizes = own;
            }
            return Ok(());
        }
        assert!(begin.elapsed() < LIMIT, "a request that does not end");
        std::thread::yield_now();
    }
}

fn send(plugin: &Plugin, ends: Ends, buffer: &Buffer, size: usize, tag: i32, mr: Ptr) -> Option<Ptr> {
    // SAFETY: the buffer outlives the connection in all scenarios.
    unsafe { plugin.isend(ends.send, buffer.at(0), size, tag, mr) }.expect("isend")
}

fn receive(plugin: &Plugin, ends: Ends, buffer: &Buffer, size: usize, tag: i32, mr: Ptr) -> Option<Ptr> {
    // SAFETY: as above.
    unsafe { plugin.irecv(ends.recv, &[buffer.at(0)], &[size], &[tag], &[mr]) }.expect("irecv")
}

/// What properties must hold, and the small rules of the calls.
pub fn rules(o: &Options) {
    let plugin = o.open();
    if o.version >= 11 {
        // What an init that failed is followed by.
        plugin.finalize(std::ptr::null_mut()).expect("finalize of NULL");
    }
    let ctx = plugin.init().expect("init");
    let p = plugin.properties(0).expect("properties");
    assert!(!p.name.is_empty() && p.speed > 0 && p.speed < 10_000_000 && p.port >= 0, "{p:?}");
    assert!((1..=8).contains(&p.max_recvs) && p.max_comms > 0 && p.ptr_support & 1 == 1, "{p:?}");
    assert!(p.latency >= 0.0 && p.latency < 1000.0 && p.device_type == 0, "{p:?}");
    assert!(p.max_p2p_bytes.is_none_or(|b| b > 0 && b <= 1 << 40), "{p:?}");
    assert!(plugin.properties(1000).is_err(), "there are no 1001 devices");
    println!("{p:?}");

    let ends = loopback(&plugin, ctx);
    let (out, into) = (Buffer::new(1 << 20), Buffer::new(1 << 20));
    let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes()).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes()).expect("regMr");
    // Nothing is taken for a dma-buf that is none, and the connection stays good.
    let file = std::fs::File::open("/dev/null").expect("/dev/null");
    for (kind, fd) in [(1, file.as_raw_fd()), (2, -1), (4, file.as_raw_fd())] {
        assert!(plugin.reg_mr_dma_buf(ends.recv, into.at(0), into.bytes(), kind, fd).is_err());
    }
    if !super::table::is_gpu_memory() {
        assert!(plugin.reg_mr_dma_buf(ends.recv, into.at(0), into.bytes(), 2, file.as_raw_fd()).is_err());
    }
    // 32 receives and sends at once, the sends without looking at the receives.
    let recvs: Vec<Ptr> = (0..32)
        .map(|i| receive(&plugin, ends, &into, 4096, i, into_mr).expect("room for 32 receives"))
        .collect();
    let sends: Vec<Ptr> =
        (0..32).map(|i| send(&plugin, ends, &out, 64, i, out_mr).expect("room for 32 sends")).collect();
    for (i, r) in recvs.into_iter().enumerate() {
        let mut sizes = [0; 8];
        // Sizes left out for some.
        wait(&plugin, r, (i % 2 == 0).then_some(&mut sizes)).expect("receive");
        assert!(i % 2 != 0 || sizes[0] == 64);
    }
    sends.into_iter().for_each(|s| wait(&plugin, s, None).expect("send"));
    // Nothing, with registrations and without.
    for (a, b) in [(out_mr, into_mr), (std::ptr::null_mut(), std::ptr::null_mut())] {
        let r = receive(&plugin, ends, &into, 0, 5, b).expect("room");
        let s = send(&plugin, ends, &out, 0, 5, a).expect("room");
        let mut sizes = [-1; 8];
        wait(&plugin, r, Some(&mut sizes)).expect("receive");
        wait(&plugin, s, None).expect("send");
        assert_eq!(sizes[0], 0);
    }
    assert_eq!(plugin.iflush(ends.recv, into.at(0), 64, into_mr), Ok(None));
    assert_eq!(plugin.iflush_null(ends.recv, 0), Ok(None));
    for n in [-1, 1, 9] {
        plugin.iflush_null(ends.recv, n).expect_err("so many buffers and no arrays");
    }
    // More receives than there is room for: refused with a NULL request, not an error.
    let mut posted = 0;
    while receive(&plugin, ends, &into, 64, 9, into_mr).is_some() {
        posted += 1;
        assert!(posted < 1 << 20, "no end of receives");
    }
    assert!(posted >= 32);
    // Closed and deregistered with all of them in flight, and a send too.
    send(&plugin, ends, &out, 1 << 16, 9, out_mr);
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
}

/// A receive that is shorter than what comes for it is an error on both sides.
pub fn truncation(o: &Options) {
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    // In the WQE, in the window or a region, in slices.
    for size in [30, 5000, o.max] {
        let ends = loopback(&plugin, ctx);
        let (out, into) = (Buffer::new(size), Buffer::new(size));
        let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes()).expect("regMr");
        let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes()).expect("regMr");
        into.set(0, size, 0xee);
        let r = receive(&plugin, ends, &into, size - 1, 3, into_mr).expect("room");
        let s = send(&plugin, ends, &out, size, 3, out_mr).expect("room");
        let failed = wait(&plugin, r, None).expect_err("a message longer than its receive was taken");
        assert_ne!(failed.code, 0);
        wait(&plugin, s, None).expect_err("its sender was told that all is well");
        let last = into.bytes() - 1;
        assert!(into.differs(last, 1, 0).is_some(), "a byte behind the receive");
        // SAFETY: within the buffer, which the plugin no longer writes.
        assert_eq!(unsafe { *into.at(last).cast::<u8>() }, 0xee, "a byte behind the receive was written");
        plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
        plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
        close(&plugin, ends);
    }
    assert!(warnings().iter().any(|w| w.contains("5000")), "the log does not say why: {:#?}", warnings());
    plugin.finalize(ctx).expect("finalize");
    println!("refused, with the reason in the log");
}

/// Handles that no listener made, and strangers at a listener.
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
            _ => handle[r.below(64)] ^= 1 << r.below(8),
        }
        if seed == 2 {
            // An attempt that nobody began.
            handle = good;
            handle[64] = 77;
        }
        if handle != good {
            assert!(plugin.connect(ctx, &mut handle).is_err(), "garbage {seed} was taken: {handle:?}");
        }
    }
    // Strangers: one who talks nonsense, one who says nothing, one who goes.
    let name = good[16..32].iter().map(|b| format!("{b:02x}")).collect::<String>();
    let address = SocketAddr::from_abstract_name(format!("pushgate/net/{name}")).expect("a name");
    let strangers = if good[8] == 1 {
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
    // Still good for two connections, of one handle.
    for _ in 0..2 {
        let mut handle = good;
        let ends = pair::poll_ends(&plugin, ctx, listener, &mut handle).expect("connect");
        close(&plugin, ends);
    }
    drop(strangers);
    plugin.close_listen(listener).expect("closeListen");
    // Its listener is gone.
    let mut handle = good;
    let begin = Instant::now();
    while let Ok(comm) = plugin.connect(ctx, &mut handle) {
        assert!(comm.is_none(), "connected to nobody");
        assert!(begin.elapsed() < LIMIT, "a connection to a listener that is gone never fails");
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

/// Descriptors, threads, mappings.
fn counts() -> [usize; 3] {
    ["fd", "task", "maps"].map(count)
}

/// The same, once there are no more descriptors and threads than before: the threads that play a
/// GPU's worker end by themselves behind the last copy.
fn counts_down_to(before: [usize; 3], what: &str) -> [usize; 3] {
    let begin = Instant::now();
    loop {
        let now = counts();
        if now[0] <= before[0] && now[1] <= before[1] {
            return now;
        }
        assert!(
            begin.elapsed() < LIMIT,
            "descriptors, threads, mappings: {before:?} before {what}, {now:?} after"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Many connections opened, used and closed: nothing is left of them.
pub fn many(o: &Options) {
    let plugin = o.open();
    let fds = count("fd");
    let one = |ctx| {
        let ends = loopback(&plugin, ctx);
        let buffer = Buffer::new(8192);
        let out_mr = plugin.reg_mr(ends.send, buffer.at(0), 4096).expect("regMr");
        let into_mr = plugin.reg_mr(ends.recv, buffer.at(4096), 4096).expect("regMr");
        buffer.fill(0, 4096, 1);
        // SAFETY: the buffer outlives the connection.
        let r = unsafe { plugin.irecv(ends.recv, &[buffer.at(4096)], &[4096], &[1], &[into_mr]) };
        let r = r.expect("irecv").expect("room");
        let s = send(&plugin, ends, &buffer, 4096, 1, out_mr).expect("room");
        // The send first: what a GPU pushes goes out when its sender looks.
        wait(&plugin, s, None).expect("send");
        wait(&plugin, r, None).expect("receive");
        if super::table::is_gpu_memory()
            && let Some(flush) = plugin.iflush(ends.recv, buffer.at(4096), 4096, into_mr).expect("iflush")
        {
            wait(&plugin, flush, None).expect("flush");
        }
        assert_eq!(buffer.differs(4096, 4096, 1), None);
        plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
        plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
        close(&plugin, ends);
    };
    let ctx = plugin.init().expect("init");
    // What is made once is there after the first few.
    (0..4).for_each(|_| one(ctx));
    let before = counts();
    (0..o.times).for_each(|_| one(ctx));
    let after = counts_down_to(before, &format!("{} connections", o.times));
    // The allocator may map or unmap arenas of its own.
    assert!(after[2] <= before[2] + 8, "mappings: {} before, {} after", before[2], after[2]);
    plugin.finalize(ctx).expect("finalize");
    if o.version >= 11 {
        assert_eq!((count("fd"), count("task")), (fds, 1), "descriptors and threads behind finalize");
    }
    println!("{} connections; descriptors, threads, mappings {before:?} before and {after:?} after", o.times);
}

/// Loaded, used, unloaded; again.
pub fn reload(o: &Options) {
    for _ in 0..3 {
        let plugin = o.open();
        let ctx = plugin.init().expect("init");
        // NCCL's second communicator, and the first one's end before the second's.
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
            while count("task") != 1 {
                assert!(begin.elapsed() < LIMIT, "threads are left behind the last finalize");
                std::thread::yield_now();
            }
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

/// A peer that is killed in the middle: requests fail within 10 s.
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
    let s = send(&plugin, ends, &buffer, 4096, 1, out_mr).expect("room");
    let mut half_made = {
        // A connection that is being made with it, too.
        let mut theirs = [0; 128];
        peer.hear(&mut theirs);
        theirs
    };
    assert_eq!(plugin.connect(ctx, &mut half_made), Ok(None));
    child.kill().expect("kill");
    child.wait().expect("wait");
    let begin = Instant::now();
    for (what, request) in [("receive", r), ("send", s)] {
        let failed = wait(&plugin, request, None).expect_err("it ended well, with nobody there");
        println!("{what}: {failed} after {:.2} s", begin.elapsed().as_secs_f64());
        assert!(begin.elapsed() < Duration::from_secs(10), "after {:?}", begin.elapsed());
    }
    while let Ok(comm) = plugin.connect(ctx, &mut half_made) {
        assert!(comm.is_none());
        assert!(begin.elapsed() < LIMIT, "a connection to a process that is gone never fails");
        std::thread::yield_now();
    }
    // SAFETY: the buffer stays.
    unsafe {
        assert!(plugin.isend(ends.send, buffer.at(0), 1, 1, out_mr).is_err());
        assert!(plugin.irecv(ends.recv, &[buffer.at(0)], &[1], &[1], &[into_mr]).is_err());
    }
    plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
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
    // Longer than the other waits; it is killed before.
    std::thread::sleep(LIMIT * 2);
}

/// Sends and receives until a call fails, and then tries each that could wait. How it failed.
fn until_lost(plugin: &Plugin, ends: Ends, peer: &mut dyn Bootstrap) -> super::table::Failed {
    let (out, into) = (Buffer::new(1 << 16), Buffer::new(1 << 16));
    let out_mr = plugin.reg_mr(ends.send, out.at(0), out.bytes()).expect("regMr");
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), into.bytes()).expect("regMr");
    let begin = Instant::now();
    let (mut s, mut r) = (None, None);
    // SAFETY: of all: the buffers stay until the ends are closed, requests are not done.
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
            Ok(()) => assert!(begin.elapsed() < Duration::from_secs(30), "nobody says that the GPU is lost"),
            Err(failed) => break failed,
        }
        std::thread::yield_now();
    };
    // Nobody hears of it by the other's closing.
    peer.barrier();
    let begin = Instant::now();
    // Both ends have ended, or do so now: nothing is left that waits.
    for request in [s, r].into_iter().flatten() {
        wait(plugin, request, None).expect_err("a copy that nobody makes is done");
    }
    // SAFETY: as above.
    unsafe {
        plugin.isend(ends.send, out.at(0), 64, 1, out_mr).expect_err("isend behind the end");
        let receive = plugin.irecv(ends.recv, &[into.at(0)], &[64], &[1], &[into_mr]);
        receive.expect_err("irecv behind the end");
    }
    plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?} until all of it ended", begin.elapsed());
    peer.barrier();
    close(plugin, ends);
    failed
}

/// A GPU of ours whose copying kernel dies (`_PUSHGATE_WORKER_FAULT` in `NCCL_CALLER_FAULT`): it
/// and the peer hear of it, in calls that otherwise would wait for ever.
pub fn lost(o: &Options) {
    let plugin = o.open();
    let fault = std::env::var("NCCL_CALLER_FAULT").expect("NCCL_CALLER_FAULT says how the other's GPU dies");
    let (mut child, mut peer) = o.spawn_with("lost-rank", &[("_PUSHGATE_WORKER_FAULT", &fault)]);
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

/// The other rank of [`lost`], whose GPU it is.
pub fn lost_rank(o: &Options) {
    let plugin = o.open();
    let mut peer = parent();
    let ctx = plugin.init().expect("init");
    let ends = pair::connect(&plugin, ctx, &mut *peer).expect("connect");
    until_lost(&plugin, ends, &mut *peer);
    plugin.finalize(ctx).expect("finalize");
    let said = warnings();
    assert!(said.iter().any(|w| w.contains("copying kernel is lost: ")), "{said:#?}");
}

/// Memory that is deregistered with a send under way is free behind that: nobody reads it any
/// more, and the message has what it held.
pub fn deregister(o: &Options) {
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    let ends = loopback(&plugin, ctx);
    let size = 60_000;
    let (out, into) = (Buffer::new(size), Buffer::new(size));
    let into_mr = plugin.reg_mr(ends.recv, into.at(0), size).expect("regMr");
    for seed in 0..3 {
        let out_mr = plugin.reg_mr(ends.send, out.at(0), size).expect("regMr");
        out.fill(0, size, seed);
        let r = receive(&plugin, ends, &into, size, 1, into_mr).expect("room");
        let s = send(&plugin, ends, &out, size, 1, out_mr).expect("room");
        plugin.dereg_mr(ends.send, out_mr).expect("deregMr");
        // What it was freed for.
        out.set(0, size, 0x11);
        // Who sends looks after it: the receive alone would not be done.
        wait(&plugin, s, None).expect("send");
        wait(&plugin, r, None).expect("receive");
        assert_eq!(into.differs(0, size, seed), None, "memory was read behind its deregistration");
    }
    plugin.dereg_mr(ends.recv, into_mr).expect("deregMr");
    close(&plugin, ends);
    plugin.finalize(ctx).expect("finalize");
    println!("three times");
}

/// What the plugin has to say of a program with one hardware queue, without its profiler
/// and, with `--times 1`, with it.
pub fn queue(o: &Options) {
    let plugin = o.open();
    let ctx = plugin.init().expect("init");
    if o.times == 1 {
        assert_eq!(plugin.profile(), Ok(true));
    }
    for _ in 0..2 {
        let ends = loopback(&plugin, ctx);
        close(&plugin, ends);
    }
    plugin.finalize(ctx).expect("finalize");
    warnings().iter().for_each(|w| println!("warning: {w}"));
}

/// The scenarios by name.
pub fn find(name: &str) -> Option<fn(&Options)> {
    Some(match name {
        "traffic" => traffic,
        "rank-1" => rank_1,
        "rules" => rules,
        "truncation" => truncation,
        "garbage" => garbage,
        "many" => many,
        "reload" => reload,
        "setting" => setting,
        "killed" => killed,
        "victim" => victim,
        "lost" => lost,
        "lost-rank" => lost_rank,
        "deregister" => deregister,
        "queue" => queue,
        _ => return None,
    })
}
