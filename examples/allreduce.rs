//! Allreduce around a ring of ranks: the kernel of each rank pushes to the next rank, and adds what arrives.
//!
//! Started alone, the program starts the ranks, each a process; `pushgate run`, torchrun, mpirun or srun may
//! start them in its place. `pushgate bench allreduce` measures the same kernel, with more types and operations.

use std::io::{ErrorKind, Write, stdout};
use std::ops::Range;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use pushgate::settings::{DeviceChoice, Transport, parse_size};
use pushgate::zerocopy::IntoBytes;
use pushgate::{Comm, Context, Counters, Error, Launch, Membership, Module, QpConfig, Settings};

/// Sums what all ranks have, in a kernel that pushes through windows and gate; every element is checked
#[derive(Parser)]
#[command(name = "allreduce", version = pushgate::VERSION)]
struct Options {
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(u32).range(2..=256), help = "Processes, 2 to 256")]
    ranks: u32,
    #[arg(long, default_value = "16M", help = "Bytes of each rank (1024-based)")]
    size: String,
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..), help = "Iterations, each checked")]
    iters: u32,
    #[arg(long, default_value = "f32", value_parser = ["f32", "f64", "i32", "i64"], help = "Type of an element")]
    dtype: String,
    #[arg(long, help = "Where kernels run: auto, cpu or cuda")]
    device: Option<String>,
    #[arg(long, help = "Queue pairs: auto, local, verbs or tcp")]
    qp: Option<String>,
    #[arg(long, help = "Prints one JSON object")]
    json: bool,
}

fn main() -> ExitCode {
    ExitCode::from(run(&Options::parse()).unwrap_or_else(|e| {
        eprintln!("allreduce: {}", pushgate::explain(&*e));
        if e.downcast_ref().is_some_and(Error::is_config) { 2 } else { 1 }
    }))
}

fn run(o: &Options) -> Result<u8> {
    // From a file, the environment, and flags.
    let mut settings = Settings::load()?;
    for (name, value) in [("device", &o.device), ("qp", &o.qp)] {
        value.iter().try_for_each(|value| settings.set_flag(name, value))?;
    }
    settings.check()?;
    if let (DeviceChoice::Cuda, Err(why)) = (settings.device, pushgate::probe_cuda()) {
        return Err(settings.refused("device", format!("auto or cpu here ({why})")).into());
    }
    let size = parse_size(&o.size).filter(|n| (8..=1 << 36).contains(n) && n % 8 == 0);
    let size = size.ok_or_else(|| Error::flag("size", &o.size, "a multiple of 8, as in 4096 or 16M"))?;
    // Which rank this process is, if it was started as one.
    let Some(membership) = Membership::of_process(&settings)? else { return start(o.ranks) };
    // A device, and the engine that serves it. Then all ranks meet.
    let context = Context::builder().settings(settings).for_rank(&membership).build()?;
    let comm = Comm::join(&context, &membership)?;
    // A rank that fails ends the queue pairs of all, so that none waits for it.
    rank(o, &comm, size as usize).inspect_err(|_| comm.abort()).map(|()| 0)
}

/// Starts the ranks with the variables of `pushgate run`. If one is lost, the others end by themselves.
fn start(ranks: u32) -> Result<u8> {
    let (program, job) = (std::env::current_exe()?, format!("allreduce-{}", std::process::id()));
    let start = |rank: u32| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).env("PUSHGATE_JOB", &job);
        command.env("PUSHGATE_RANK", rank.to_string()).env("PUSHGATE_LOCAL_RANK", rank.to_string());
        command.env("PUSHGATE_RANKS", ranks.to_string()).spawn()
    };
    let started = (0..ranks).map(start).collect::<Result<Vec<_>, _>>().context("starting the ranks")?;
    let code = |mut rank: std::process::Child| rank.wait().ok()?.code();
    Ok(started.into_iter().map(|rank| code(rank).unwrap_or(1) as u8).max().unwrap_or(0))
}

/// What these ranks have together. The numbers have few enough bits that all sums are exact.
fn elements(dtype: &str, size: usize, ranks: Range<u32>) -> Vec<u8> {
    let number = |rank: u32, at: usize| (at as u32 ^ rank << 24).wrapping_mul(0x9e37_79b9) >> 16;
    let sum = |at| ranks.clone().map(|rank| number(rank, at)).sum::<u32>();
    match dtype {
        "f32" => (0..size / 4).flat_map(|at| (sum(at) as f32).to_ne_bytes()).collect(),
        "f64" => (0..size / 8).flat_map(|at| f64::from(sum(at)).to_ne_bytes()).collect(),
        "i32" => (0..size / 4).flat_map(|at| sum(at).to_ne_bytes()).collect(),
        _ => (0..size / 8).flat_map(|at| u64::from(sum(at)).to_ne_bytes()).collect(),
    }
}

fn rank(o: &Options, comm: &Comm, size: usize) -> Result<()> {
    let (context, me, n) = (comm.context(), comm.rank(), comm.size());
    // To the next rank and from the previous one. Labels tell the queue pairs of the same two ranks apart.
    let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
    let qps = comm.queue_pairs(&[(next, me), (previous, previous)], QpConfig::default())?;
    // Kernels find queue pairs through structures in device memory.
    let to_next = pushgate::upload_descriptors(context, &qps[..1])?;
    let from_previous = pushgate::upload_descriptors(context, &qps[1..])?;
    let (module, stream, input) = (Module::embedded(context), context.stream()?, context.alloc(size)?);
    input.copy_from_host(&elements(&o.dtype, size, me..me + 1))?;
    let (right, mut got, mut marked) = (elements(&o.dtype, size, 0..n), vec![0; size], [0u64; 3]);
    for _ in 0..o.iters {
        // Zeros. The marks: how far the kernel is, the status of its block that sends, and of the one that receives.
        let (output, marks) = (context.alloc(size)?, context.alloc(3 * 8)?);
        let threads = if context.device() == "cuda" { 512 } else { 1 };
        // `struct allreduce_params` of gpu-kernels/kernels/allreduce.cu. custom_kernel.rs has a struct in Rust too.
        let count = (size / if o.dtype.ends_with("32") { 4 } else { 8 }) as u64;
        let slice = (context.settings().window_size / 4).clamp(64, 256 << 10);
        let params = [
            &[to_next.addr(), from_previous.addr(), input.addr(), output.addr()][..],
            &[count, slice, marks.addr(), marks.addr() + 8],
            &[u64::from(n) << 32 | u64::from(me), 1, threads.into()], // one channel, operation 0 (sum)
        ]
        .concat();
        comm.barrier()?;
        // `cooperating`: the two blocks wait for each other, so both must be able to run at once.
        let (kernel, launch) = (format!("allreduce_{}", o.dtype), Launch::new(2, threads).cooperating());
        // SAFETY: all that `params` names outlives the kernel, which is waited for here.
        let running = unsafe { context.launch(&stream, &module, &kernel, launch, &params[..])? };
        // Without a limit: the kernel's own waits end, with success or a cause.
        let _ = running.wait(None)?;
        marks.copy_to_host(marked.as_mut_bytes())?;
        // If a queue pair ended, its cause says more than the kernel's status.
        qps.iter().try_for_each(|qp| qp.check())?;
        let status = marked[1].max(marked[2]);
        ensure!(status == 0, "rank {me}: the kernel ended with: {}", pushgate::status_name(status));
        output.copy_to_host(&mut got)?;
        ensure!(got == right, "rank {me}: elements are wrong");
    }
    // Each rank tells the others what it has counted. Nobody leaves before all have.
    let mut sum = Counters::default();
    for told in comm.all_gather(&serde_json::to_vec(&context.counters()?)?)? {
        sum += serde_json::from_slice(&told)?;
    }
    ensure!(sum.dropped + sum.rnr == 0, "{} messages dropped, {} RNR", sum.dropped, sum.rnr);
    let (why, qp, stalls) = (context.why(), Transport::names(&comm.transports()), sum.credit_stalls());
    let text = match o.json {
        true => serde_json::json!({
            "ranks": n, "bytes": size, "dtype": o.dtype, "iters": o.iters, "device": context.device(),
            "qp": qp, "verified": true, "dropped": sum.dropped, "rnr": sum.rnr, "credit_stalls": stalls,
        })
        .to_string(),
        false => format!("# {why}\n# verified, nothing dropped, no RNR, waits for credit: {stalls}"),
    };
    match if me == 0 { writeln!(stdout(), "{text}") } else { Ok(()) } {
        // A reader that has gone, as `head` does, is no error; `println!` would panic.
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("cannot write to standard output"),
        _ => Ok(()),
    }
}
