//! One-way latency, half of a ping-pong between two blocks of one device.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Context, Launch, Module, QpConfig, upload_descriptors};

use super::{Bench, finish};

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct PingPongParams {
    qps: u64,
    result: u64,
    bytes: u64,
    warmup: u64,
    rounds: u64,
    first: u32,
    pad: u32,
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct RelayParams {
    out: u64,
    input: u64,
    stride: u64,
    payload: u64,
    result: u64,
    bytes: u64,
    warmup: u64,
    rounds: u64,
    limit_ns: u64,
}

/// Flags of the relay stand this far apart: two cache lines.
const STRIDE: usize = 128;
const WARMUP: u64 = 100;

pub fn run(b: &Bench) -> Result<()> {
    let context = Context::builder().settings(b.settings.clone()).share(0, 1).build()?;
    let module = Module::embedded(&context);
    let cuda = context.device() == "cuda";
    let stream = context.stream()?;
    for &bytes in &b.bytes {
        let inline = bytes <= 40;
        // A warp receives fastest; a payload wants more threads.
        let threads = match (cuda, inline) {
            (false, _) => 1,
            (true, true) => 32,
            (true, false) => 256,
        };
        let shape = Launch::new(2, threads).cooperating();
        let window = b.window((4 * bytes).max(64 << 10), bytes)?;
        let pair = b.pair(&context, QpConfig { window_size: Some(window), ..QpConfig::default() })?;
        let qps = upload_descriptors(&context, &pair.ends)?;
        let result = context.alloc(48)?;
        let through = |rounds: u64| -> Result<f64> {
            let params = PingPongParams {
                qps: qps.addr(),
                result: result.addr(),
                bytes,
                warmup: WARMUP,
                rounds,
                first: 0,
                pad: 0,
            };
            // SAFETY: buffers and queue pairs outlive the kernel.
            let running = unsafe { context.launch(&stream, &module, "pingpong", shape, &params)? };
            finish(b, &context, &running)?;
            let words = pair.expect_ok("ping-pong", &result, 1)?;
            ensure!(words[3] == 0 && words[2] == 0 && words[5] == 0, "wrong words or messages: {words:?}");
            Ok(words[1] as f64 / 1e3 / rounds as f64 / 2.0)
        };
        // out0, out1, in0, in1, then the two payloads.
        let payload = if inline { 0 } else { bytes as usize };
        let plain = context.shared("bench-relay", 4096 + 2 * payload)?;
        let flag = |i: usize| &plain.words(i * STRIDE, 1)[0];
        let bare = |rounds: u64| -> Result<f64> {
            for i in 0..4 {
                flag(i).store(0, Ordering::Relaxed);
            }
            let params = RelayParams {
                out: plain.device_addr(),
                input: plain.device_addr() + 2 * STRIDE as u64,
                stride: STRIDE as u64,
                payload: plain.device_addr() + 4096,
                result: result.addr(),
                bytes: payload as u64,
                warmup: WARMUP,
                rounds,
                limit_ns: b.settings.timeout.as_nanos() as u64,
            };
            let stop = AtomicBool::new(false);
            std::thread::scope(|s| {
                // One thread relays both flags, as one engine serves both ends.
                let relay = s.spawn(|| {
                    let mut last = [0; 2];
                    let mut idle = 0u32;
                    while !stop.load(Ordering::Relaxed) {
                        idle += 1;
                        for (i, last) in last.iter_mut().enumerate() {
                            let seen = flag(i).load(Ordering::Acquire);
                            if seen != *last {
                                *last = seen;
                                flag(2 + (1 - i)).store(seen, Ordering::Release);
                                idle = 0;
                            }
                        }
                        // Without this, two cores and three threads would wait for
                        // a time slice; with a GPU it is never reached.
                        if !cuda && idle > 200 {
                            std::thread::yield_now();
                        }
                    }
                });
                // SAFETY: buffers outlive the kernel, whose waits end.
                let time = unsafe { context.launch(&stream, &module, "bare_relay", shape, &params) }
                    .map_err(anyhow::Error::from)
                    .and_then(|running| finish(b, &context, &running));
                stop.store(true, Ordering::Relaxed);
                relay.join().expect("the relay does not panic");
                time
            })?;
            let words = pair.expect_ok("bare relay", &result, 1)?;
            ensure!(words[3] == 0 && words[2] == 0 && words[5] == 0, "wrong words: {words:?}");
            Ok(words[1] as f64 / 1e3 / rounds as f64 / 2.0)
        };
        let warm = through(200)?;
        let rounds = ((b.seconds * 1e6 / warm / 2.0) as u64).clamp(100, 1 << 24);
        let (mut value, mut ceiling) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..b.runs {
            ceiling = ceiling.min(bare(rounds)?);
            value = value.min(through(rounds)?);
        }
        let note =
            format!("{}, {threads} threads, {rounds} rounds", if inline { "inline" } else { "window" });
        b.print("latency", bytes, value, Some(ceiling), "us one way", context.device(), &note)?;
    }
    Ok(())
}
