//! Bandwidth into the window.

use anyhow::Result;
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Context, Error, Launch, Module, QpConfig, upload_descriptors};

use super::{Bench, SinkParams, finish};

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct BareParams {
    dst: u64,
    bytes: u64,
    places: u64,
    rounds: u64,
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct PushParams {
    qps: u64,
    result: u64,
    bytes: u64,
    rounds: u64,
    n_qps: u32,
    pad: u32,
}

pub fn run(b: &Bench) -> Result<()> {
    let context = Context::builder().settings(b.settings.clone()).share(0, 1).build()?;
    let module = Module::embedded(&context);
    let cuda = context.device() == "cuda";
    let blocks = b.blocks.unwrap_or(if cuda { 4 } else { 1 });
    let threads = b.threads.unwrap_or(if cuda { 1024 } else { 1 });
    let (pushing, sinking) = (context.stream()?, context.stream()?);
    for &bytes in &b.bytes {
        // Room for two messages of each block at least, so that a block fills one
        // while another is retired.
        if bytes % 16 != 0 {
            let allowed = "a multiple of 16: what a thread stores at once";
            return Err(Error::flag("bytes", bytes, allowed).into());
        }
        let window = b.window((2 * blocks as u64 * bytes).max(64 << 10), blocks as u64 * bytes)?;
        let places = window / (blocks as u64 * bytes);
        let config = QpConfig { window_size: Some(window), ..QpConfig::default() };
        let pair = b.pair(&context, config)?;
        let plain = context.shared("bench-push", window as usize)?;
        let sender = upload_descriptors(&context, [&pair.ends[0]])?;
        let receiver = upload_descriptors(&context, [&pair.ends[1]])?;
        let result = context.alloc(blocks as usize * 8)?;
        let sunk = context.alloc(8)?;
        let bare = |rounds: u64| -> Result<f64> {
            let params = BareParams { dst: plain.device_addr(), bytes, places, rounds };
            // SAFETY: the buffer holds what all blocks write and outlives the kernel.
            let running = unsafe {
                context.launch(&pushing, &module, "bare_store", Launch::new(blocks, threads), &params)?
            };
            Ok((blocks as u64 * bytes * rounds) as f64 / finish(b, &context, &running)?.as_secs_f64() / 1e9)
        };
        let push = |rounds: u64| -> Result<f64> {
            let count = blocks as u64 * rounds;
            let sink = SinkParams { qps: receiver.addr(), result: sunk.addr(), count };
            let params =
                PushParams { qps: sender.addr(), result: result.addr(), bytes, rounds, n_qps: 1, pad: 0 };
            let shape = Launch::new(blocks, threads).cooperating();
            // SAFETY: buffers and queue pairs outlive both kernels.
            let (taking, running) = unsafe {
                (
                    context.launch(&sinking, &module, "sink", Launch::new(1, 1).cooperating(), &sink)?,
                    context.launch(&pushing, &module, "push_window", shape, &params)?,
                )
            };
            let time = finish(b, &context, &running)?.as_secs_f64();
            finish(b, &context, &taking)?;
            pair.expect_ok("push", &result, blocks as usize)?;
            pair.expect_ok("sink", &sunk, 1)?;
            Ok((count * bytes) as f64 / time / 1e9)
        };
        let warm = bare(4)?;
        let rounds = ((warm * 1e9 * b.seconds) as u64 / (blocks as u64 * bytes)).clamp(4, 1 << 24);
        push(rounds)?;
        let (mut value, mut ceiling) = (0f64, 0f64);
        for _ in 0..b.runs {
            ceiling = ceiling.max(bare(rounds)?);
            value = value.max(push(rounds)?);
        }
        let note =
            format!("{blocks} blocks x {threads}, window {}K, {rounds} messages a block", window >> 10);
        b.print("push", bytes, value, Some(ceiling), "GB/s", context.device(), &note)?;
    }
    Ok(())
}
