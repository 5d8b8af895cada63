//! A device that shares nothing with its proxy but a window: it pushes into a BAR whose
//! function, and proxy, are another machine's, and wakes that proxy by an interrupt.
//!
//! Three programs, each this one with another `--role`:
//!
//! * `proxy`: has the window, with WQE ring and control words in it, the gate and the queue pair.
//!   It says in a line of JSON where in the BAR the window begins. No kernel runs here.
//! * `peer`: sends the device one message, then receives and checks every byte. With `proxy`, a job of two ranks.
//! * `device`: maps the BAR as a file, and runs the kernel that pushes.
//!
//! Uses the public API alone. docs/driver.md tells how a virtual machine plays the first two.

#![allow(missing_docs)] // a program, not a library

use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum};
use pushgate::settings::{RingsPlace, parse_size};
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{
    AttachedQueuePair, Comm, Context, DeviceBuffer, Error, Launch, Module, QpConfig, Settings, WaitOutcome,
    status_name, upload_descriptors,
};

// The log, as the command has it.
#[path = "../cli/src/log.rs"]
mod log;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Role {
    Proxy,
    Peer,
    Device,
}

/// A device that shares nothing with its proxy but a window
///
/// Settings come from PUSHGATE_ variables; `pushgate config` lists them.
#[derive(Parser)]
#[command(name = "outside", version = pushgate::VERSION)]
struct Options {
    #[arg(long)]
    role: Role,
    /// Name of the job that proxy and peer are of
    #[arg(long, default_value = "outside")]
    job: String,
    /// Messages
    #[arg(long, default_value_t = 64)]
    count: u64,
    /// Bytes of each, a multiple of 16, more than 40 (1024-based)
    #[arg(long, default_value = "16K", value_parser = size)]
    bytes: u64,
    /// Kernels that the messages are spread over; between two of them the proxy falls asleep
    #[arg(long, default_value_t = 8)]
    bursts: u64,
    /// Pause between two bursts, milliseconds
    #[arg(long, default_value_t = 100)]
    pause: u64,
    /// Threads of the kernel's one block
    #[arg(long, default_value_t = 1)]
    threads: u32,
    /// device: the file whose bytes the BAR is
    #[arg(long)]
    memory: Option<PathBuf>,
    /// device: where in it the window begins, as the proxy said
    #[arg(long, default_value_t = 0)]
    offset: u64,
    /// device: it is a PCI function's memory (resourceN of sysfs)
    #[arg(long)]
    io_memory: bool,
    /// device: number of an inherited eventfd that raises the function's interrupt
    #[arg(long)]
    bell_fd: Option<i32>,
}

fn size(s: &str) -> Result<u64, String> {
    let good = parse_size(s).filter(|b| b % 16 == 0 && *b > 40);
    good.ok_or_else(|| "a multiple of 16, more than 40, as in 64 or 16K".into())
}

/// Bytes of the message that the peer sends to the device.
const HELLO: u64 = 1024;

#[derive(IntoBytes, Immutable)]
#[zerocopy(crate = "pushgate::zerocopy")]
#[repr(C)]
struct Send {
    qp: u64,
    result: u64,
    first: u64,
    count: u64,
    bytes: u64,
}

#[derive(IntoBytes, Immutable)]
#[zerocopy(crate = "pushgate::zerocopy")]
#[repr(C)]
struct Take {
    qp: u64,
    result: u64,
    count: u64,
    bytes: u64,
}

fn main() -> ExitCode {
    match log::start("warn").map_err(Into::into).and_then(|()| run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("outside: {e:#}");
            ExitCode::from(if e.downcast_ref().is_some_and(pushgate::Error::is_config) { 2 } else { 1 })
        }
    }
}

fn run() -> Result<()> {
    let options = Options::parse();
    let settings = Settings::load()?;
    match options.role {
        Role::Proxy => proxy(&options, settings),
        Role::Peer => peer(&options, settings),
        Role::Device => device(&options, settings),
    }
}

/// Prints a line. `println!` would panic where standard output takes no more.
fn say(line: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").context("cannot write to standard output")
}

fn proxy(o: &Options, settings: Settings) -> Result<()> {
    if settings.rings != RingsPlace::Window {
        return Err(settings.refused("rings", "window, with window = bar, for the role proxy").into());
    }
    let context = Context::builder().settings(settings).build()?;
    let comm = Comm::connect(&context, &o.job, 0, 2)?;
    let qp = comm.queue_pair(1, 0, QpConfig::default())?;
    let offset = qp.place().context("the rings are not in the window")?;
    say(&format!("{{\"ready\":true,\"offset\":{offset}}}"))?;
    // The peer comes when it has all. That its kernel gave the last back, its engine tells a little later.
    comm.barrier()?;
    let end = Instant::now() + context.settings().timeout;
    let c = loop {
        qp.check()?;
        let c = context.counters()?;
        if c.retired == c.released || Instant::now() > end {
            break c;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    // Until now the peer's engine was needed.
    comm.barrier()?;
    say(&format!(
        "{{\"role\":\"proxy\",\"released\":{},\"retired\":{},\"dropped\":{},\"rnr\":{},\"refused\":{},\
         \"bounced\":{},\"sleeps\":{},\"interrupts\":{}}}",
        c.released, c.retired, c.dropped, c.rnr, c.refused, c.bounced, c.sleeps, c.interrupts
    ))?;
    Ok(())
}

fn peer(o: &Options, mut settings: Settings) -> Result<()> {
    // Only the proxy's window is elsewhere.
    settings.set("rings", "host")?;
    settings.set("window", "memory")?;
    let context = Context::builder().settings(settings).build()?;
    let comm = Comm::connect(&context, &o.job, 1, 2)?;
    let qp = comm.queue_pair(0, 0, QpConfig::default())?;
    let (module, qps) = (Module::embedded(&context), upload_descriptors(&context, [&qp])?);
    let (stream, result) = (context.stream()?, context.alloc(3 * 8)?);
    let (qps, to) = (qps.addr(), result.addr());
    let hello = Send { qp: qps, result: to, first: 0, count: 1, bytes: HELLO };
    let take = Take { qp: qps, result: to, count: o.count, bytes: o.bytes };
    let launch = Launch::new(1, o.threads);
    // SAFETY: queue pair and buffers outlive the kernel, whose own waits end.
    let running = unsafe { context.launch(&stream, &module, "outside_send", launch, &hello)? };
    let _ = context.wait(&running, None)?;
    let [status, ..] = words::<3>(&result)?;
    if status != 0 {
        bail!("the message to the device ended with: {}", status_name(status));
    }
    // SAFETY: as above.
    let running = unsafe { context.launch(&stream, &module, "outside_take", launch, &take)? };
    let _ = context.wait(&running, None)?;
    let [status, got, wrong] = words(&result)?;
    qp.check()?;
    let c = context.counters()?;
    say(&format!(
        "{{\"role\":\"peer\",\"status\":\"{}\",\"messages\":{got},\"wrong\":{wrong},\"dropped\":{},\"rnr\":{}}}",
        status_name(status),
        c.dropped,
        c.rnr
    ))?;
    comm.barrier()?;
    comm.barrier()?;
    if (status, got, wrong) != (0, o.count, 0) {
        bail!("{got} of {} messages came, {wrong} pairs of words were wrong", o.count);
    }
    Ok(())
}

fn device(o: &Options, settings: Settings) -> Result<()> {
    let file = o.memory.as_deref().context("--memory: name the file that the BAR is")?;
    let limit = settings.timeout;
    // Before the context starts threads and opens files.
    let bell = o.bell_fd.map(inherited).transpose()?;
    let context = Context::builder().settings(settings).build()?;
    let qp = AttachedQueuePair::new(&context, file, o.offset, o.io_memory, bell)?;
    if o.bytes > qp.max_message() {
        return Err(
            Error::flag("bytes", o.bytes, format!("at most the window's {}", qp.max_message())).into()
        );
    }
    let (module, qps) = (Module::embedded(&context), upload_descriptors(&context, [&qp])?);
    let (stream, result, heard) = (context.stream()?, context.alloc(8)?, context.alloc(3 * 8)?);
    // What the peer says first: it is longer than a record holds, and lies where this device sees it.
    let take = Take { qp: qps.addr(), result: heard.addr(), count: 1, bytes: HELLO };
    // SAFETY: queue pair and buffers outlive the kernel, whose own waits end.
    let running =
        unsafe { context.launch(&stream, &module, "outside_take", Launch::new(1, o.threads), &take)? };
    if context.wait(&running, Some(2 * limit))? != WaitOutcome::Done {
        bail!("the kernel that takes the peer's message does not end");
    }
    let [status, got, wrong] = words(&heard)?;
    if (status, got, wrong) != (0, 1, 0) {
        let status = status_name(status);
        bail!("{got} of 1 message of the peer came, {wrong} pairs of words were wrong: {status}");
    }
    let mut times = Vec::new();
    let bursts = o.bursts.clamp(1, o.count);
    for burst in 0..bursts {
        if burst > 0 {
            std::thread::sleep(Duration::from_millis(o.pause));
        }
        let first = o.count * burst / bursts;
        let count = o.count * (burst + 1) / bursts - first;
        let send = Send { qp: qps.addr(), result: result.addr(), first, count, bytes: o.bytes };
        let start = Instant::now();
        // SAFETY: queue pair and buffers outlive the kernel, whose own waits end.
        let running =
            unsafe { context.launch(&stream, &module, "outside_send", Launch::new(1, o.threads), &send)? };
        if context.wait(&running, Some(2 * limit))? != WaitOutcome::Done {
            bail!("the kernel of burst {burst} does not end");
        }
        times.push(start.elapsed());
        let [status] = words(&result)?;
        qp.check()?;
        if status != 0 {
            bail!("burst {burst} ended with: {}", status_name(status));
        }
    }
    times.sort();
    let us = |d: Duration| d.as_nanos() as f64 / 1e3;
    let mut line = format!(
        "{{\"role\":\"device\",\"device\":\"{}\",\"messages\":{},\"bytes\":{},\"bursts\":{bursts},\
         \"burst_us_min\":{:.1},\"burst_us_median\":{:.1},\"heard\":1",
        context.device(),
        o.count,
        o.bytes,
        us(times[0]),
        us(times[times.len() / 2])
    );
    if let Some(r) = qp.relay() {
        let mean = |d: Duration| us(d) / r.rings.max(1) as f64;
        line += &format!(
            ",\"relay\":{{\"rings\":{},\"look_us_mean\":{:.2},\"look_us_worst\":{:.2},\
             \"write_us_mean\":{:.2},\"write_us_worst\":{:.2}}}",
            r.rings,
            mean(r.look),
            us(r.worst_look),
            mean(r.write),
            us(r.worst_write)
        );
    }
    say(&format!("{line}}}"))
}

/// A descriptor of its own for what this process was started with.
fn inherited(number: i32) -> Result<OwnedFd> {
    let target = std::fs::read_link(format!("/proc/self/fd/{number}"));
    let target = target.with_context(|| format!("--bell-fd {number}: no such descriptor was inherited"))?;
    if target.as_os_str() != "anon_inode:[eventfd]" {
        bail!("--bell-fd {number} is {}, not an eventfd", target.display());
    }
    // SAFETY: it is open, as was just seen, and this program, which has one thread so
    // far and has opened nothing by that number, closes nothing.
    Ok(unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()?)
}

fn words<const N: usize>(buffer: &DeviceBuffer) -> Result<[u64; N]> {
    let mut bytes = vec![0; 8 * N];
    buffer.copy_to_host(&mut bytes)?;
    Ok(std::array::from_fn(|i| u64::from_ne_bytes(bytes[8 * i..8 * i + 8].try_into().expect("eight"))))
}
