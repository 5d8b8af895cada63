//! A kernel of your own over the device API, from source to result: two ranks
//! of one process greet each other. The kernel is custom_kernel.cu.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Comm, Context, Launch, Module, QpConfig, Source, status_name, upload_descriptors};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const HELP: &str = "\
Two ranks of this process greet each other by a kernel of their own, custom_kernel.cu

Usage: custom_kernel [-h | --help | -V | --version]

Settings come from PUSHGATE_ variables, which `pushgate config` lists: with PUSHGATE_DEVICE=cpu the
kernel runs on the CPU.
";

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
    let argument = std::env::args_os().nth(1);
    let done = match argument.as_ref().map(|a| a.to_string_lossy()).as_deref() {
        None => run(),
        Some("-h" | "--help") => say(HELP.trim_end()),
        Some("-V" | "--version") => say(&format!("custom_kernel {}", pushgate::VERSION)),
        Some(other) => {
            eprintln!("custom_kernel: unknown argument `{other}`: expected --help, --version or nothing");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // By Display, which has the remedy and the lines of a compiler; Debug would show neither.
        Err(e) => {
            eprintln!("custom_kernel: {e}");
            let config = e.downcast_ref().is_some_and(pushgate::Error::is_config);
            ExitCode::from(if config { 2 } else { 1 })
        }
    }
}

/// Prints a line. A reader that has gone, as `head` does, is no error; `println!` would panic.
fn say(line: &str) -> Result<()> {
    match writeln!(io::stdout(), "{line}") {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {e}").into())
        }
        _ => Ok(()),
    }
}

fn run() -> Result<()> {
    // A device and an engine. Settings come from the environment: with
    // PUSHGATE_DEVICE=cpu the same kernel runs on the CPU.
    let context = Context::builder().build()?;
    say(context.why())?;

    // Compiled now for that device, then cached. Before any kernel runs.
    let source = Source::text("custom_kernel.cu", include_str!("custom_kernel.cu"));
    let module = Module::from_source(&context, &source)?;

    // Ranks of other processes would be Comm::connect. Making a queue pair waits
    // for the other rank, so each rank has a thread.
    std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(&context, 2)?
            .into_iter()
            .map(|comm| {
                let module = &module;
                s.spawn(move || rank(&comm, module))
            })
            .collect();
        ranks.into_iter().try_for_each(|r| r.join().expect("a rank panicked"))
    })
}

fn rank(comm: &Comm, module: &Module) -> Result<()> {
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
    if status != 0 {
        return Err(format!("rank {me}: the kernel ended with: {}", status_name(status)).into());
    }
    say(&format!("rank {me}: {}; rank {peer} put {put} and sent {sent}", status_name(status)))?;
    // Nobody leaves while the other still needs it.
    Ok(comm.barrier()?)
}
