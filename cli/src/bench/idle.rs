//! What an idle engine costs, and what it adds to the message that ends its idleness.

use std::time::Duration;

use anyhow::{Context as _, Result};
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Context, Launch, Module, QpConfig, upload_descriptors};

use super::{Bench, finish};

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct ProbeParams {
    qp: u64,
    result: u64,
    rounds: u64,
    gap_ns: u64,
}

pub fn run(b: &Bench) -> Result<()> {
    let context = Context::builder().settings(b.settings.clone()).share(0, 1).build()?;
    let module = Module::embedded(&context);
    let stream = context.stream()?;
    let pair = b.pair(&context, QpConfig::default())?;
    let sender = upload_descriptors(&context, [&pair.ends[0]])?;
    let result = context.alloc(24)?;
    // Mean and worst microseconds of `rounds` messages, each after a silence.
    let probe = |rounds: u64, gap: Duration| -> Result<(f64, f64)> {
        let gap_ns = gap.as_nanos() as u64;
        let params = ProbeParams { qp: sender.addr(), result: result.addr(), rounds, gap_ns };
        // SAFETY: buffers and queue pairs outlive the kernel.
        let running = unsafe {
            context.launch(&stream, &module, "idle_probe", Launch::new(1, 1).cooperating(), &params)?
        };
        finish(b, &context, &running)?;
        let words = pair.expect_ok("probe", &result, 1)?;
        Ok((words[1] as f64 / 1e3 / rounds as f64, words[2] as f64 / 1e3))
    };
    let device = context.device();
    let wake = if device == "cpu" { "doorbell" } else { "polled" };
    probe(100, Duration::ZERO)?;
    let busy = probe(2000, Duration::ZERO)?.0;
    for (name, gap, rounds, settle, window) in [
        (
            "first second",
            Duration::from_millis(50),
            20,
            Duration::from_millis(100),
            Duration::from_millis(800),
        ),
        ("later", Duration::from_millis(1500), 3, Duration::from_millis(1500), Duration::from_millis(2000)),
    ] {
        let (mut share, mut added) = (f64::INFINITY, (f64::INFINITY, f64::INFINITY));
        for _ in 0..b.runs.min(5) {
            let (mean, worst) = probe(rounds, gap)?;
            if mean - busy < added.0 {
                added = (mean - busy, worst - busy);
            }
            std::thread::sleep(settle);
            let before = engine_time()?;
            std::thread::sleep(window);
            share = share.min((engine_time()? - before).as_secs_f64() / window.as_secs_f64() * 100.0);
        }
        b.print("idle", 0, share, None, "% of a core", device, &format!("{wake}, {name}"))?;
        let note = format!(
            "{wake}, {name}: added to a message after {gap:?}, mean of {rounds} (worst {:.0})",
            added.1
        );
        b.print("idle", 0, added.0, None, "us added", device, &note)?;
    }
    Ok(())
}

/// CPU time of this process's engine thread, from the scheduler's own account.
fn engine_time() -> Result<Duration> {
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        if std::fs::read_to_string(path.join("comm")).is_ok_and(|c| c.trim() == "pushgate-proxy") {
            let stat = std::fs::read_to_string(path.join("schedstat"))?;
            let ns = stat.split_whitespace().next().context("an empty schedstat")?.parse()?;
            return Ok(Duration::from_nanos(ns));
        }
    }
    anyhow::bail!("no engine thread in this process: run with --proxy thread")
}
