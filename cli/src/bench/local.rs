//! The `local` queue pair alone: messages whose payload lies in the window
//! already, put into the receiver's memory or taken by it in place.

use std::time::Instant;

use anyhow::{Result, ensure};
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Context, Launch, Module, QpConfig, upload_descriptors};

use super::{Bench, SinkParams, finish};

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct HandOverParams {
    qp: u64,
    result: u64,
    bytes: u64,
    count: u64,
    rkey: u32,
    pad: u32,
}

pub fn run(b: &Bench) -> Result<()> {
    let context = Context::builder().settings(b.settings.clone()).share(0, 1).build()?;
    let module = Module::embedded(&context);
    let (sending, sinking) = (context.stream()?, context.stream()?);
    for &bytes in &b.bytes {
        let window = b.window(4 * bytes, bytes)?;
        let pair = b.pair(&context, QpConfig { window_size: Some(window), ..QpConfig::default() })?;
        let sender = upload_descriptors(&context, [&pair.ends[0]])?;
        let receiver = upload_descriptors(&context, [&pair.ends[1]])?;
        let target = context.shared("bench-target", bytes as usize)?;
        let region = pair.ends[1].register_shared(&target)?;
        let rkey = region.key();
        let (result, sunk) = (context.alloc(8)?, context.alloc(8)?);
        let one = Launch::new(1, 1).cooperating();

        // Seconds for `count` messages, and payloads copied.
        let hand_over = |count: u64, rkey: u32| -> Result<(f64, u64)> {
            let before = context.counters()?.copies;
            let params =
                HandOverParams { qp: sender.addr(), result: result.addr(), bytes, count, rkey, pad: 0 };
            let sink = SinkParams { qps: receiver.addr(), result: sunk.addr(), count };
            let taking = match rkey {
                // SAFETY: buffers and queue pairs outlive both kernels.
                0 => Some(unsafe { context.launch(&sinking, &module, "sink", one, &sink)? }),
                _ => None,
            };
            // SAFETY: as above.
            let running = unsafe { context.launch(&sending, &module, "hand_over", one, &params)? };
            let time = finish(b, &context, &running)?.as_secs_f64();
            if let Some(taking) = taking {
                finish(b, &context, &taking)?;
                pair.expect_ok("sink", &sunk, 1)?;
            }
            pair.expect_ok("hand-over", &result, 1)?;
            Ok((time, context.counters()?.copies - before))
        };
        // Copies those bytes from a ring like the window into one buffer.
        let source = context.shared("bench-source", window as usize)?;
        let copy = |count: u64| -> f64 {
            let start = Instant::now();
            for i in 0..count {
                let from = i % (window / bytes) * bytes;
                // SAFETY: both are mapped and this long, no one else uses them, and
                // they do not overlap.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        source.as_ptr().as_ptr().add(from as usize),
                        target.as_ptr().as_ptr(),
                        bytes as usize,
                    );
                }
                std::hint::black_box(target.as_ptr());
            }
            start.elapsed().as_secs_f64()
        };
        copy(100);
        let warm = hand_over(64, rkey)?.0.max(hand_over(64, 0)?.0) / 64.0;
        let count = ((b.seconds / warm) as u64).clamp(64, 1 << 22);
        hand_over(count, rkey)?;
        let (mut put, mut placed, mut ceiling) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
        let mut copied = 0;
        for _ in 0..b.runs {
            ceiling = ceiling.min(copy(count));
            let (time, copies) = hand_over(count, rkey)?;
            ensure!(copies == count, "{copies} copies of {count} messages");
            put = put.min(time);
            let (time, copies) = hand_over(count, 0)?;
            placed = placed.min(time);
            copied += copies;
        }
        let gbs = |time: f64| (count * bytes) as f64 / time / 1e9;
        let note = format!("put into host memory, {count} messages");
        b.print("local", bytes, gbs(put), Some(gbs(ceiling)), "GB/s", context.device(), &note)?;
        let note = format!("taken in place, {copied} of {} payloads copied", count * b.runs as u64);
        b.print("local", bytes, gbs(placed), Some(gbs(ceiling)), "GB/s", context.device(), &note)?;
    }
    Ok(())
}
