//! A kernel of your own over the device API, from source to result: two ranks
//! of one process greet each other. The kernel is custom_kernel.cu.

use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Comm, Context, Launch, Module, QpConfig, Result, Source, status_name, upload_descriptors};

/// `struct greet_params` of the kernel: the same fields in the same order.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Params {
    qp: u64,
    region: u64,
    arrived: u64,
    greeting: u64,
    rkey: u32,
    pad: u32,
}

fn main() -> Result<()> {
    // A device and an engine. Settings come from the environment: with
    // PUSHGATE_DEVICE=cpu the same kernel runs on the CPU.
    let context = Context::builder().build()?;
    println!("{}", context.why());

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
    let region = context.shared("greetings", 8)?;
    let key = qp.register_shared(&region)?;
    let keys = comm.all_gather(&key.to_le_bytes())?;
    let rkey = u32::from_le_bytes(keys[peer as usize][..].try_into().expect("a key is four bytes"));

    let arrived = context.alloc(3 * 8)?;
    let params = Params {
        qp: qps.addr(),
        region: region.device_addr(),
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
        eprintln!("rank {me}: the kernel ended with: {}", status_name(status));
        std::process::exit(1);
    }
    println!("rank {me}: {}; rank {peer} put {put} and sent {sent}", status_name(status));
    // Nobody leaves while the other still needs it.
    comm.barrier()
}
