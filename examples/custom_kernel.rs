//! A kernel of your own over the device API, from source to result: two ranks
//! of one process greet each other. The kernel is custom_kernel.cu.

use std::io::{ErrorKind, Write, stdout};
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Comm, Context, Error, Launch, Module, QpConfig, Source, status_name, upload_descriptors};

/// Two ranks of this process greet each other by a kernel of their own, custom_kernel.cu
///
/// Settings come from PUSHGATE_ variables, which `pushgate config` lists: with PUSHGATE_DEVICE=cpu the kernel runs on
/// the CPU.
#[derive(Parser)]
#[command(name = "custom_kernel", version = pushgate::VERSION)]
struct Options {}

/// `struct greet_params` of the kernel: the same fields in the same order.
#[derive(IntoBytes, Immutable)]
#[zerocopy(crate = "pushgate::zerocopy")]
#[repr(C)]
struct Params {
    qp: u64,
    region: u64,
    arrived: u64,
    greeting: u64,
    rkey: u32,
    pad: u32,
}

fn main() -> ExitCode {
    let Options {} = Options::parse();
    let Err(e) = run().and_then(|said| print(&said)) else { return ExitCode::SUCCESS };
    eprintln!("custom_kernel: {}", pushgate::explain(&*e));
    ExitCode::from(if e.downcast_ref().is_some_and(Error::is_config) { 2 } else { 1 })
}

/// Runs both ranks; returns what each has to say.
fn run() -> Result<String> {
    // A device and an engine. Settings come from the environment: with
    // PUSHGATE_DEVICE=cpu the same kernel runs on the CPU.
    let context = Context::builder().build()?;

    // Compiled now for that device, then cached. Before any kernel runs.
    let source = Source::text("custom_kernel.cu", include_str!("custom_kernel.cu"));
    let module = Module::from_source(&context, &source)?;

    // Ranks of other processes would be Comm::connect. Making a queue pair waits
    // for the other rank, so each rank has a thread.
    let (ranks, module) = (Comm::local(&context, 2)?, &module);
    let said = std::thread::scope(|s| {
        let ranks: Vec<_> = ranks.into_iter().map(|comm| s.spawn(move || rank(&comm, module))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Result<Vec<_>>>()
    })?;
    Ok(format!("{}\n{}", context.why(), said.join("\n")))
}

fn rank(comm: &Comm, module: &Module) -> Result<String> {
    let (context, me, peer) = (comm.context(), comm.rank(), 1 - comm.rank());
    // The label tells queue pairs of the same two ranks apart.
    let qp = comm.queue_pair(peer, 0, QpConfig::default())?;
    // Kernels find the queue pair through a structure in device memory.
    let qps = upload_descriptors(context, [&qp])?;

    // Memory that the peer may put into; its key has to get there first.
    let memory = context.shared("greetings", 8)?;
    let region = qp.register_shared(&memory)?;
    let keys = comm.all_gather(&region.key().to_le_bytes())?;
    let rkey = u32::from_le_bytes(keys[peer as usize][..].try_into().expect("a key is four bytes"));

    let arrived = context.alloc(3 * 8)?;
    let params = Params {
        qp: qps.addr(),
        region: memory.device_addr(),
        arrived: arrived.addr(),
        greeting: 1000 + u64::from(me),
        rkey,
        pad: 0,
    };
    let stream = context.stream()?;
    // The two kernels wait for each other: `cooperating` makes sure both can run.
    let launch = Launch::new(1, 1).cooperating();
    // SAFETY: `params` names the queue pair, the region and the buffer, which all
    // outlive the kernel, for it is waited for below.
    let running = unsafe { context.launch(&stream, module, "greet", launch, &params)? };
    // Without a limit: the kernel's own waits end, with success or a cause.
    let _ = running.wait(None)?;

    let mut bytes = [0; 24];
    arrived.copy_to_host(&mut bytes)?;
    let [status, put, sent] =
        [0, 8, 16].map(|i| u64::from_ne_bytes(bytes[i..i + 8].try_into().expect("eight")));
    // If the queue pair ended, its cause says more than the kernel's status.
    qp.check()?;
    ensure!(status == 0, "rank {me}: the kernel ended with: {}", status_name(status));
    // Neither rank leaves while the other one still needs it.
    comm.barrier()?;
    Ok(format!("rank {me}: {}; rank {peer} put {put} and sent {sent}", status_name(status)))
}

/// Prints a line. A reader that has gone, as `head` does, is no error; `println!` would panic.
fn print(line: &str) -> Result<()> {
    match writeln!(stdout(), "{line}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("cannot write to standard output"),
        _ => Ok(()),
    }
}
