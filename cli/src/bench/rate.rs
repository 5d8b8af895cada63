//! Small messages a second.

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Result, ensure};
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Context, Launch, Module, QpConfig, upload_descriptors};

use super::{Bench, finish};

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct RateParams {
    qp: u64,
    result: u64,
    count: u64,
    single: u32,
    pad: u32,
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct RateSinkParams {
    qp: u64,
    result: u64,
    count: u64,
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct RecordsParams {
    dst: u64,
    slots: u64,
    count: u64,
}

/// Records of one run without flow control: the ring holds them all.
const BARE: u64 = 1 << 20;

pub fn run(b: &Bench) -> Result<()> {
    let context = Context::builder().settings(b.settings.clone()).share(0, 1).build()?;
    let module = Module::embedded(&context);
    let cuda = context.device() == "cuda";
    let (sending, sinking) = (context.stream()?, context.stream()?);
    let config = QpConfig { slots: Some(4096), receives: Some(8192), ..QpConfig::default() };
    let pair = b.pair(&context, config)?;
    let sender = upload_descriptors(&context, [&pair.ends[0]])?;
    let receiver = upload_descriptors(&context, [&pair.ends[1]])?;
    let plain = context.shared("bench-records", BARE as usize * 64)?;
    // (blocks, threads, one thread by itself)
    let shapes: &[(u32, u32, bool)] =
        if cuda { &[(1, 1, true), (1, 32, false), (8, 128, false)] } else { &[(1, 1, true), (1, 1, false)] };
    for &(blocks, threads, single) in shapes {
        let result = context.alloc(blocks as usize * 8)?;
        let warps = (blocks * threads.div_ceil(32)) as u64;
        let lanes = threads.min(32) as u64;
        let sink_threads = if cuda { 1024 } else { 1 };
        // Returns million messages a second.
        let through = |each: u64| -> Result<f64> {
            let total = if single { each } else { each * warps };
            // Cleared anew: the kernel adds to it.
            let sunk = context.alloc(24)?;
            let sink = RateSinkParams { qp: receiver.addr(), result: sunk.addr(), count: total };
            let params = RateParams {
                qp: sender.addr(),
                result: result.addr(),
                count: each,
                single: single as u32,
                pad: 0,
            };
            // SAFETY: buffers and queue pairs outlive both kernels.
            let (taking, running) = unsafe {
                let sink_shape = Launch::new(1, sink_threads).cooperating();
                let taking = context.launch(&sinking, &module, "rate_sink", sink_shape, &sink)?;
                let shape = Launch::new(blocks, threads).cooperating();
                (taking, context.launch(&sending, &module, "rate_send", shape, &params)?)
            };
            let start = Instant::now();
            finish(b, &context, &running)?;
            finish(b, &context, &taking)?;
            let time = start.elapsed();
            pair.expect_ok("sender", &result, blocks as usize)?;
            let words = pair.expect_ok("receiver", &sunk, 1)?;
            let sum = if single { each * (each - 1) / 2 } else { warps * (each * (each - 1) / 2) };
            ensure!(words[1] == total && words[2] == sum, "{} messages, sum {}", words[1], words[2]);
            Ok(total as f64 / time.as_secs_f64() / 1e6)
        };
        // As many threads write records that one CPU thread checks.
        let bare = || -> Result<f64> {
            let words = plain.words(0, BARE as usize * 8);
            words.iter().for_each(|w| w.store(0, Ordering::Relaxed));
            let all = (blocks * threads) as u64;
            let params = RecordsParams { dst: plain.device_addr(), slots: BARE, count: BARE / all };
            // SAFETY: the buffer outlives the kernel.
            let running = unsafe {
                context.launch(&sending, &module, "bare_records", Launch::new(blocks, threads), &params)?
            };
            let (start, deadline) = (Instant::now(), b.settings.timeout);
            for n in 0..BARE / all * all {
                let record = &words[n as usize * 8..n as usize * 8 + 8];
                let mut spins = 0u32;
                while record.iter().any(|w| w.load(Ordering::Acquire) != n + 1) {
                    spins += 1;
                    if spins.is_multiple_of(1024) {
                        ensure!(start.elapsed() < deadline, "record {n} never came");
                        if !cuda {
                            std::thread::yield_now();
                        }
                    }
                }
            }
            let time = start.elapsed();
            finish(b, &context, &running)?;
            Ok(BARE as f64 / time.as_secs_f64() / 1e6)
        };
        let warm = through(64 * lanes)?.max(0.01);
        let per = (warm * 10.0 * 1e6 * b.seconds) as u64 / if single { 10 } else { warps };
        let each = (per / lanes).clamp(256, 1 << 20) * lanes;
        let (mut value, mut ceiling) = (0f64, 0f64);
        for _ in 0..b.runs {
            ceiling = ceiling.max(bare()?);
            value = value.max(through(each)?);
        }
        let how = if single { "one thread, one message at a time" } else { "warps, 32 messages at a time" };
        let note = format!("{blocks} blocks x {threads}: {how}, {each} each");
        b.print("rate", 8, value, Some(ceiling), "million messages/s", context.device(), &note)?;
    }
    Ok(())
}
