//! The `tcp` queue pair alone, as its end of a connection has it, but without rings and kernels. Both ends are threads of
//! this process. Ceiling: the same bytes between the same buffers over one plain socket, by turns with the queue pair.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use pushgate::{Settings, abi};
use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::SharedMemory;
use pushgate_driver_shim::segment::Geometry;
use pushgate_link_tcp::{Config, Host, Readiness, TcpLink, TcpOpening, Tuning};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use super::Bench;
use super::ends::{End, Ends, cores, pin, ticks};
use crate::output::outln;

/// Bytes in flight that a window holds, where no depth is asked for.
const WINDOW: u64 = 4 << 20;

/// The options that the command line adds.
pub struct Options {
    /// "bw", "lat", or both.
    pub mode: Option<String>,
    /// Bytes of a message; none: those of the mode.
    pub sizes: Vec<u64>,
    /// Messages in flight.
    pub depth: Option<u32>,
    /// Where both ends are.
    pub address: IpAddr,
}

pub fn run(b: &Bench, o: &Options) -> Result<()> {
    let modes: &[&str] = match o.mode.as_deref() {
        None => &["bw", "lat"],
        Some("bw") => &["bw"],
        Some(_) => &["lat"],
    };
    // Before a thread is bound to one of them.
    let cores = cores();
    for &mode in modes {
        let sizes: &[u64] = match (o.sizes.is_empty(), mode) {
            (false, _) => &o.sizes,
            (true, "bw") => &[64 << 10, 256 << 10, 1 << 20, 4 << 20],
            (true, _) => &[64],
        };
        for &size in sizes {
            let depth = o.depth.map_or((WINDOW / size).clamp(4, 64), u64::from);
            let mut pair = Pair::new(b, o.address, size, depth, cores)?;
            match mode {
                "bw" => pair.bandwidth(b, o.address)?,
                _ => pair.latency(b)?,
            }
        }
    }
    Ok(())
}

/// A queue pair, and beside it a plain connection between the same buffers.
struct Pair {
    ends: Ends,
    wire: &'static str,
    streams: u32,
    size: u64,
    depth: u64,
    bare: Bare,
    _hosts: [Arc<Host>; 2],
}

/// A plain connection, and the buffers between which it carries messages.
struct Bare {
    sockets: [TcpStream; 2],
    size: u64,
    depth: u64,
    /// Where the bytes of the first message lie, and where they go.
    from: usize,
    to: usize,
    limit: Duration,
    cores: [Option<usize>; 2],
}

/// The best of some runs: seconds, and CPU seconds of this process meanwhile.
#[derive(Clone, Copy)]
struct Best {
    seconds: f64,
    cpu: f64,
}

impl Best {
    const NONE: Best = Best { seconds: f64::INFINITY, cpu: 0.0 };

    fn take(&mut self, run: impl FnOnce() -> Result<Duration>) -> Result<()> {
        let before = cpu();
        let seconds = run()?.as_secs_f64();
        if seconds < self.seconds {
            *self = Best { seconds, cpu: cpu() - before };
        }
        Ok(())
    }
}

/// CPU seconds of this process.
fn cpu() -> f64 {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

impl Pair {
    fn new(b: &Bench, address: IpAddr, size: u64, depth: u64, cores: Option<[usize; 2]>) -> Result<Pair> {
        let s = &b.settings;
        let unit = abi::PUSHGATE_UNIT as u64;
        let need = depth * size.div_ceil(unit) * unit;
        let window = b.window(need, need)?;
        let tuning = Tuning { path_timeout: None, io: s.tcp_io.into(), one_thread: true, tls: s.tls };
        let host = || Host::open(&[(address, 0).into()], tuning);
        let hosts = [host()?, host()?];
        let (links, windows) = connect(s, &hosts, window)?;
        let wire = links[0].wire();
        let streams = s.tcp_streams;
        let from = windows[0].as_ptr().as_ptr() as usize;
        let [a, b] = links.map(|link| Box::new(link) as Box<dyn pushgate_link::Link>);
        let to = b.payload(0, size.div_ceil(unit) as u32).context("the mirror holds a message")?;
        let [window_a, window_b] = windows;
        let receives = s.receives;
        let ends = [
            End::new(0, a, window_a, size as u32, depth, receives),
            End::new(1, b, window_b, size as u32, depth, receives),
        ];
        let bare = Bare {
            sockets: plain(address)?,
            size,
            depth,
            from,
            to,
            limit: s.timeout,
            cores: [0, 1].map(|i| cores.map(|cores| cores[i])),
        };
        let ends = Ends { ends, limit: s.timeout, cores, woken: true };
        Ok(Pair { ends, wire, streams, size, depth, bare, _hosts: hosts })
    }

    fn bandwidth(&mut self, b: &Bench, address: IpAddr) -> Result<()> {
        let (size, depth) = (self.size, self.depth);
        let warm = self.ends.stream(2 * depth)?.as_secs_f64() / (2 * depth) as f64;
        self.bare.stream(2 * depth)?;
        let count = ((b.seconds / warm) as u64).clamp(64, 1 << 22);
        let (mut link, mut bare) = (Best::NONE, Best::NONE);
        for _ in 0..b.runs {
            link.take(|| self.ends.stream(count))?;
            bare.take(|| self.bare.stream(count))?;
        }
        let bytes = (count * size) as f64;
        let [rate, ceiling] = [link, bare].map(|best| bytes / best.seconds / 1e6);
        let [cost, ceiling_cost] = [link, bare].map(|best| best.cpu / bytes * 1e9);
        let iperf3 = iperf3(address, size, b.seconds)?;
        let (wire, streams, ratio) = (self.wire, self.streams, rate / ceiling);
        if b.json {
            let line = json!({
                "bench": "tcp", "mode": "bw", "bytes": size, "value": rate, "ceiling": ceiling, "ratio": ratio,
                "unit": "MB/s", "cpu_s_per_gb": cost, "ceiling_cpu_s_per_gb": ceiling_cost,
                "iperf3": iperf3.map(|(rate, _)| rate), "iperf3_cpu_s_per_gb": iperf3.map(|(_, cost)| cost),
                "wire": wire, "streams": streams, "depth": depth, "messages": count, "runs": b.runs,
            });
            outln!("{line}")?;
        } else {
            let iperf3 = match iperf3 {
                Some((rate, cost)) => format!("iperf3 {rate:.0} MB/s, {cost:.2} CPU s/GB"),
                None => "iperf3 is not installed".into(),
            };
            outln!(
                "tcp bw  {size:>9} B  {rate:>9.1} MB/s  ceiling {ceiling:>9.1}  ratio {ratio:>6.3}  CPU s/GB {cost:.2}, \
                 ceiling {ceiling_cost:.2}  {wire}, streams {streams}, {depth} in flight; {iperf3}"
            )?;
        }
        Ok(())
    }

    fn latency(&mut self, b: &Bench) -> Result<()> {
        // What else this host does may take a core away for long.
        let most = Duration::from_secs_f64(b.seconds * 4.0).min(self.ends.limit / 2);
        let mut rounds = vec![0; 1 << 10];
        let (n, mhz) = self.ends.ping(&mut rounds, most)?;
        let median = middle(&mut rounds[..n]);
        let count = ((b.seconds * 1e6 * mhz / median as f64) as usize).clamp(100, 1 << 20);
        let mut rounds = vec![0; count];
        // Median, least, and what 99 of 100 stay below, of the run with the best median; half of a round, microseconds.
        let (mut link, mut bare) = ([f64::INFINITY; 3], [f64::INFINITY; 3]);
        for _ in 0..b.runs {
            for (plain, best) in [(false, &mut link), (true, &mut bare)] {
                let n = match plain {
                    false => self.ends.ping(&mut rounds, most)?.0,
                    true => self.bare.ping(&mut rounds, most)?,
                };
                middle(&mut rounds[..n]);
                let found = [n / 2, 0, n * 99 / 100].map(|i| rounds[i] as f64 / mhz / 2.0);
                if found[0] < best[0] {
                    *best = found;
                }
            }
        }
        let ([us, min, p99], [ceiling, ceiling_min, ceiling_p99]) = (link, bare);
        let (size, wire, ratio) = (self.size, self.wire, us / ceiling);
        if b.json {
            let line = json!({
                "bench": "tcp", "mode": "lat", "bytes": size, "value": us, "min": min, "p99": p99,
                "ceiling": ceiling, "ceiling_min": ceiling_min, "ceiling_p99": ceiling_p99, "ratio": ratio,
                "unit": "us", "wire": wire, "streams": self.streams, "rounds": count, "runs": b.runs,
            });
            outln!("{line}")?;
        } else {
            outln!(
                "tcp lat {size:>9} B  {us:>9.2} us one way, min {min:.2}, 99 % {p99:.2}  ceiling {ceiling:>9.2}, \
                 min {ceiling_min:.2}, 99 % {ceiling_p99:.2}  ratio {ratio:>6.3}  {wire}, {count} rounds"
            )?;
        }
        Ok(())
    }
}

impl Bare {
    /// A message of the window, and its place at the other end.
    fn place(&self, message: u64) -> (usize, usize) {
        let unit = abi::PUSHGATE_UNIT as u64;
        let offset = (message % self.depth * self.size.div_ceil(unit) * unit) as usize;
        (self.from + offset, self.to + offset)
    }

    /// Sends `count` messages over the plain connection; the time until the receiver has said that it has all.
    fn stream(&self, count: u64) -> Result<Duration> {
        let size = self.size as usize;
        let [mut left, mut right] = [&self.sockets[0], &self.sockets[1]];
        let [a, b] = self.cores;
        for socket in &self.sockets {
            socket.set_nonblocking(false)?;
            socket.set_read_timeout(Some(self.limit))?;
            socket.set_write_timeout(Some(self.limit))?;
        }
        pin(a);
        std::thread::scope(|s| {
            let other = s.spawn(move || -> Result<()> {
                pin(b);
                for message in 0..count {
                    // SAFETY: `size` bytes of the mirror lie there, and stay; the queue pair is at rest, and this
                    // thread alone uses them.
                    let to =
                        unsafe { std::slice::from_raw_parts_mut(self.place(message).1 as *mut u8, size) };
                    right.read_exact(to)?;
                }
                Ok(right.write_all(&[1])?)
            });
            let start = Instant::now();
            for message in 0..count {
                // SAFETY: `size` bytes of the window lie there, and stay; nobody writes them meanwhile.
                let from = unsafe { std::slice::from_raw_parts(self.place(message).0 as *const u8, size) };
                left.write_all(from)?;
            }
            left.read_exact(&mut [0])?;
            let time = start.elapsed();
            other.join().expect("no panic at the other end")?;
            Ok(time)
        })
    }

    /// A message to and fro over the plain connection for each place of `rounds`, for no longer than `most`. Both ends
    /// poll. Returns how many places it came to.
    fn ping(&self, rounds: &mut [u64], most: Duration) -> Result<usize> {
        self.sockets.iter().try_for_each(|socket| socket.set_nonblocking(true))?;
        let [left, right] = &self.sockets;
        let [a, b] = self.cores;
        let over = AtomicBool::new(false);
        let size = self.size as usize;
        pin(a);
        std::thread::scope(|s| {
            let other = s.spawn(|| -> Result<()> {
                pin(b);
                let mut bytes = vec![0; size];
                while take(right, &mut bytes, &over)? {
                    put(right, &bytes, &over)?;
                }
                Ok(())
            });
            let mut mine = || -> Result<usize> {
                let (mut bytes, begin, mut n) = (vec![0; size], Instant::now(), 0);
                let mut start = ticks();
                while n < rounds.len() && (n == 0 || n % 64 != 0 || begin.elapsed() < most) {
                    put(left, &bytes, &over)?;
                    ensure!(take(left, &mut bytes, &over)?, "the other end failed");
                    let now = ticks();
                    rounds[n] = now - start;
                    (start, n) = (now, n + 1);
                }
                Ok(n)
            };
            let mine = mine();
            over.store(true, Ordering::Relaxed);
            other.join().expect("no panic at the other end")?;
            mine
        })
    }
}

/// Receives all of a message, polling. False if it is over.
fn take(socket: &TcpStream, bytes: &mut [u8], over: &AtomicBool) -> Result<bool> {
    let mut n = 0;
    while n < bytes.len() {
        match recv(socket, &mut bytes[n..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => bail!("the plain connection ended"),
            Ok((_, more)) => n += more,
            Err(Errno::AGAIN | Errno::INTR) if over.load(Ordering::Relaxed) => return Ok(false),
            Err(Errno::AGAIN | Errno::INTR) => std::hint::spin_loop(),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

/// Sends all of a message, polling.
fn put(socket: &TcpStream, bytes: &[u8], over: &AtomicBool) -> Result<()> {
    let mut n = 0;
    while n < bytes.len() && !over.load(Ordering::Relaxed) {
        match send(socket, &bytes[n..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(more) => n += more,
            Err(Errno::AGAIN | Errno::INTR) => std::hint::spin_loop(),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// The middle of some figures, which are sorted then.
fn middle(rounds: &mut [u64]) -> u64 {
    rounds.sort_unstable();
    rounds[rounds.len() / 2]
}

/// A plain connection of this host to itself.
fn plain(address: IpAddr) -> Result<[TcpStream; 2]> {
    let listener = TcpListener::bind((address, 0)).with_context(|| format!("listening at {address}"))?;
    let left = TcpStream::connect(listener.local_addr()?)?;
    let (right, from) = listener.accept()?;
    ensure!(from == left.local_addr()?, "another program has connected to the bench");
    left.set_nodelay(true)?;
    right.set_nodelay(true)?;
    Ok([left, right])
}

/// Two links joined, and their windows.
fn connect(
    s: &Settings,
    hosts: &[Arc<Host>; 2],
    window: u64,
) -> Result<([TcpLink; 2], [Arc<SharedMemory>; 2])> {
    let geometry = |rank| Geometry {
        window_log: (window / abi::PUSHGATE_UNIT as u64).ilog2(),
        slots_log: s.slots.ilog2(),
        cq_log: s.slots.ilog2().min(abi::PUSHGATE_MAX_CQ_LOG),
        rx_log: s.receives.ilog2(),
        link_log: s.slots.ilog2(),
        landing_log: 0,
        signals: 1,
        rank,
    };
    let huge = s.huge_pages;
    let allocate = |name: &str, bytes: usize| -> Result<SharedMemory, ShimError> {
        SharedMemory::builder(name, bytes).huge_pages(huge).create()
    };
    let config = Config {
        streams: s.tcp_streams,
        checksum: s.tcp_checksum,
        posted_receives: false,
        ahead: 0,
        thrifty: false,
        beat: 1_000_000_000,
    };
    let says = |why: String| anyhow::anyhow!("the tcp queue pair: {why}");
    let open = |rank: u32| -> Result<_> {
        let window = Arc::new(allocate("bench-window", geometry(rank).window_bytes())?);
        let meeting = hosts[rank as usize].meeting(rank == 0, &Readiness::new()?);
        let opening = TcpOpening::new(config.clone(), geometry(rank), window.clone(), meeting);
        Ok((opening.map_err(says)?, window))
    };
    let ((a, window_a), (b, window_b)) = (open(0)?, open(1)?);
    let (from_a, from_b) = (a.offer(), b.offer());
    let a = a.prepare(1, &from_b, &mut { allocate }).map_err(says)?;
    let b = b.prepare(0, &from_a, &mut { allocate }).map_err(says)?;
    let mut links = [a.join().0, b.join().0];
    let until = Instant::now() + s.timeout;
    for link in &mut links {
        while !link.joined().map_err(says)? {
            ensure!(Instant::now() < until, "the streams of the tcp queue pair did not come");
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    Ok((links, [window_a, window_b]))
}

/// What iperf3 reaches with one connection: MB/s, and CPU seconds of both its processes for each GB. `None` where it is not
/// installed.
fn iperf3(address: IpAddr, size: u64, seconds: f64) -> Result<Option<(f64, f64)>> {
    /// The longest block that iperf3 takes.
    const LONGEST: u64 = 1 << 20;
    // A port that was free a moment ago.
    let port = TcpListener::bind((address, 0))?.local_addr()?.port().to_string();
    let server = ["-s", "-1", "-p", &port, "-B", &address.to_string()].map(String::from);
    let server = Command::new("iperf3").args(server).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let Ok(mut server) = server else { return Ok(None) };
    let seconds = seconds.ceil().max(1.0);
    let client = ["-c", &address.to_string(), "-p", &port, "-J", "-l", &size.min(LONGEST).to_string(), "-t"]
        .map(String::from);
    let until = Instant::now() + Duration::from_secs(5);
    let found = loop {
        let out = Command::new("iperf3").args(&client).arg(seconds.to_string()).output()?;
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
        let number = |at: &str| report.pointer(at).and_then(|v| v.as_f64());
        if let Some(bits) = number("/end/sum_received/bits_per_second").filter(|bits| *bits > 0.0) {
            let percent = ["host_total", "remote_total"]
                .map(|of| number(&format!("/end/cpu_utilization_percent/{of}")).unwrap_or_default());
            let rate = bits / 8e6;
            break Ok(Some((rate, (percent[0] + percent[1]) / 100.0 / (rate / 1e3))));
        }
        let last = match report["error"].as_str() {
            Some(error) => error.to_owned(),
            // Of a wrong argument iperf3 makes no report: it writes to stderr.
            None => String::from_utf8_lossy(&out.stderr).trim().to_owned(),
        };
        // The server may not listen yet.
        if Instant::now() >= until {
            break Err(anyhow::anyhow!("iperf3 at {address}: {last}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let _ = server.kill();
    let _ = server.wait();
    found
}
