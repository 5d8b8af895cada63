//! What one device does with host memory.

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Result, ensure};
use pushgate_pcie_model::findings::{Device, Line, Rate, Transfer, Writers};

use super::Bar;
use super::rig::{APART, CopyParams, PingParams, RECORDS, Rig, STREAMS, pattern, read_host};

/// Copies below this go another way through the engine: between the readings at 1 KiB
/// and at 4 KiB the time falls.
const SMALL_COPY: u64 = 2048;

/// The copy that leads a burst: 0.3 ms at 50 GB/s, in which 64 calls are made.
const LEADING: u64 = 16 << 20;

/// Of a ping-pong: many and short, so that one at least has the processor to itself.
const BATCHES: u64 = 32;

/// Seconds that all of them take, about; on a GPU it is less.
const LONGEST_RECORDS: f64 = 0.5;

/// How many steps of the progress bar a device takes.
pub fn steps(rig: &Rig, unit: usize) -> u64 {
    (widths(rig, unit).len() * block_counts(rig).len() + block_counts(rig).len()) as u64 + 5 + 4
}

pub fn device(rig: &Rig, unit: usize, bar: &Bar) -> Result<Device> {
    let u = &rig.units[unit];
    bar.say(&format!("{} ({})", u.name, u.pci));
    Ok(Device {
        index: unit as u32,
        name: u.name.clone(),
        pci: u.pci.clone(),
        stores: stores(rig, unit, bar)?,
        loads: loads(rig, unit, bar)?,
        flag: bar.step(|| record(rig, unit, 1))?,
        record: bar.step(|| record(rig, unit, 8))?,
        launch: bar.step(|| launch(rig, unit))?,
        writers: bar.step(|| writers(rig, unit))?,
        lines: [Transfer::Push, Transfer::Read, Transfer::CopyOut, Transfer::CopyIn, Transfer::Bounce]
            .into_iter()
            .map(|way| bar.step(|| line(rig, unit, way)))
            .collect::<Result<_>>()?,
    })
}

fn widths(rig: &Rig, unit: usize) -> &'static [u32] {
    // Bulk stores are sm_90's.
    match rig.units[unit].executor.as_cuda() {
        Some(cuda) if cuda.sm() >= 90 => &[4, 8, 16, 0],
        _ => &[4, 8, 16],
    }
}

fn block_counts(rig: &Rig) -> &'static [u32] {
    if rig.is_cpu() { &[1, 2] } else { &[1, 2, 4, 8, 16] }
}

/// Of the rates by blocks: long beside the fence at the end of each message.
fn long(rig: &Rig) -> u64 {
    rig.scale.most / 4
}

fn stores(rig: &Rig, unit: usize, bar: &Bar) -> Result<Vec<Rate>> {
    let u = &rig.units[unit];
    let bytes = long(rig);
    let sample = 1 << 20;
    let mut rates = Vec::new();
    for &width in widths(rig, unit) {
        // What is measured must be what arrives.
        let sent = pattern(sample, width.into());
        u.memory.copy_from_host(&sent)?;
        for word in rig.buffers[0].memory.words(0, sample / 8) {
            word.store(0, Ordering::Release);
        }
        for &blocks in block_counts(rig) {
            let params = CopyParams { width, ..outward(rig, unit, bytes) };
            let us = bar.step(|| rig.timed(unit, blocks, params))?;
            rates.push(Rate { width, blocks, rate: bytes as f64 / us / 1e3 });
        }
        ensure!(
            read_host(&rig.buffers[0], 0, sample) == sent,
            "stores of {width} bytes did not arrive as they were sent: {} or the way to host memory is faulty",
            u.name
        );
    }
    Ok(rates)
}

fn loads(rig: &Rig, unit: usize, bar: &Bar) -> Result<Vec<Rate>> {
    let bytes = long(rig);
    let mut rates = Vec::new();
    for &blocks in block_counts(rig) {
        let us = bar.step(|| rig.timed(unit, blocks, inward(rig, unit, bytes)))?;
        rates.push(Rate { width: 16, blocks, rate: bytes as f64 / us / 1e3 });
    }
    Ok(rates)
}

/// From device memory to host memory.
fn outward(rig: &Rig, unit: usize, bytes: u64) -> CopyParams {
    let u = &rig.units[unit];
    CopyParams { dst: u.host(0), src: u.memory.addr(), system: 1, ..places(rig, bytes) }
}

/// From host memory to device memory.
fn inward(rig: &Rig, unit: usize, bytes: u64) -> CopyParams {
    let u = &rig.units[unit];
    CopyParams { dst: u.memory.addr(), src: u.host(0), ..places(rig, bytes) }
}

/// Sixteen places in turn, as far as they fit.
fn places(rig: &Rig, bytes: u64) -> CopyParams {
    let stride = bytes.max(4096);
    CopyParams {
        bytes,
        stride,
        places: (rig.scale.most / stride).clamp(1, 16),
        width: 16,
        ..Default::default()
    }
}

fn line(rig: &Rig, unit: usize, way: Transfer) -> Result<Line> {
    let sizes = rig.scale.sizes();
    let times = sizes.iter().map(|n| Ok((*n, time(rig, unit, way, *n)?))).collect::<Result<Vec<_>>>()?;
    let (slice, blocks) = match way {
        Transfer::Push | Transfer::Read => (rig.scale.slice, rig.scale.blocks),
        Transfer::CopyOut | Transfer::CopyIn => (SMALL_COPY, 1),
        _ => (1, 1),
    };
    let launch = match way {
        Transfer::CopyOut | Transfer::CopyIn => copy_launch(rig, unit, way)?,
        _ => 0.0,
    };
    Ok(Line::fitted(way, launch, times, slice, blocks).expect("there are sizes"))
}

/// Microseconds of one transfer: a point of a line.
pub fn time(rig: &Rig, unit: usize, way: Transfer, bytes: u64) -> Result<f64> {
    rig.go_on()?;
    match way {
        Transfer::Push => rig.timed(unit, rig.scale.blocks_of(bytes), outward(rig, unit, bytes)),
        Transfer::Read => rig.timed(unit, rig.scale.blocks_of(bytes), inward(rig, unit, bytes)),
        Transfer::CopyOut | Transfer::CopyIn => copies(rig, unit, way, bytes),
        _ => bounce(rig, unit, bytes),
    }
}

fn ends(rig: &Rig, unit: usize, way: Transfer) -> (u64, u64) {
    let u = &rig.units[unit];
    if way == Transfer::CopyOut { (u.host(0), u.memory.addr()) } else { (u.memory.addr(), u.host(0)) }
}

/// One copy of a burst, by the device's clock. A long copy goes first, during which the
/// burst is put in: else small copies would take as long as the calls do, which are the
/// processor's and not the engine's.
fn copies(rig: &Rig, unit: usize, way: Transfer, bytes: u64) -> Result<f64> {
    let copies = &rig.units[unit].copies;
    let (dst, src) = ends(rig, unit, way);
    let mut best = f64::INFINITY;
    let mut n = 2;
    let began = Instant::now();
    let mut runs = 0;
    while runs < 4 || (runs < 64 && began.elapsed() < rig.scale.time) {
        if !rig.is_cpu() && bytes < LEADING {
            // SAFETY: as below.
            unsafe { copies.copy(dst, src, LEADING as usize)? };
        }
        let start = copies.point()?;
        for _ in 0..n {
            // SAFETY: both buffers have `most` bytes at least and are nobody else's until
            // the point after them was passed.
            unsafe { copies.copy(dst, src, bytes as usize)? };
        }
        let end = copies.point()?;
        passed(rig, &end)?;
        let us = end.since(&start)?.as_secs_f64() * 1e6 / n as f64;
        // The first finds cold caches.
        if runs > 0 {
            best = best.min(us);
        }
        n = ((200.0 / us.max(0.05)) as u64).clamp(1, 64);
        runs += 1;
    }
    Ok(best.max(1e-3))
}

fn passed(rig: &Rig, point: &pushgate_gpu_kernels::Point) -> Result<()> {
    let start = Instant::now();
    while !point.passed()? {
        ensure!(start.elapsed().as_secs() < 10, "copies did not end in 10 s");
        rig.breathe();
    }
    Ok(())
}

/// What one copy alone takes by the host's clock, call and news of its end, beyond its
/// time among others.
fn copy_launch(rig: &Rig, unit: usize, way: Transfer) -> Result<f64> {
    let copies = &rig.units[unit].copies;
    let (dst, src) = ends(rig, unit, way);
    let mut best = f64::INFINITY;
    for _ in 0..50 {
        let start = Instant::now();
        // SAFETY: as above.
        unsafe { copies.copy(dst, src, 4096)? };
        passed(rig, &copies.point()?)?;
        best = best.min(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok((best - self::copies(rig, unit, way, 4096)?).max(0.0))
}

/// Out by the copy engine, memcpy, in by the copy engine, one after the other, by the
/// host's clock: what a transport does that owns no window.
fn bounce(rig: &Rig, unit: usize, bytes: u64) -> Result<f64> {
    let u = &rig.units[unit];
    let [from, to] = [0, 1].map(|i| rig.buffers[i].memory.as_ptr().as_ptr());
    let mut best = f64::INFINITY;
    let began = Instant::now();
    let mut runs = 0;
    while runs < 3 || (runs < 20 && began.elapsed() < rig.scale.time) {
        let start = Instant::now();
        // SAFETY: buffers of `most` bytes at least; each copy has ended before the next
        // begins, and nobody else uses them.
        unsafe {
            u.copies.copy(u.host(0), u.memory.addr(), bytes as usize)?;
            passed(rig, &u.copies.point()?)?;
            std::ptr::copy_nonoverlapping(from.cast_const(), to, bytes as usize);
            u.copies.copy(u.second(&rig.scale), u.host(1), bytes as usize)?;
        }
        passed(rig, &u.copies.point()?)?;
        best = best.min(start.elapsed().as_secs_f64() * 1e6);
        runs += 1;
    }
    Ok(best)
}

/// Half a round trip between a kernel and the CPU, both records in host memory.
pub fn record(rig: &Rig, unit: usize, words: u32) -> Result<f64> {
    // On a processor that others use as well a round may take milliseconds: then fewer.
    let began = Instant::now();
    records(rig, unit, words, 1)?;
    let batches = (LONGEST_RECORDS / began.elapsed().as_secs_f64().max(1e-6)) as u64;
    records(rig, unit, words, batches.clamp(2, BATCHES))
}

fn records(rig: &Rig, unit: usize, words: u32, batches: u64) -> Result<f64> {
    rig.go_on()?;
    let u = &rig.units[unit];
    let repeat = rig.scale.rounds;
    rig.reset();
    let (out, back) = (RECORDS, RECORDS + APART * 4);
    let params = PingParams {
        out: u.control() + out,
        input: u.control() + back,
        result: 0,
        batches,
        repeat,
        limit_ns: 0,
        words,
        first: 1,
    };
    let running = rig.ping(unit, 0, params)?;
    for round in 1..=batches * repeat {
        for i in 0..u64::from(words) {
            rig.wait_word(out + 8 * i, round)?;
        }
        for i in 0..u64::from(words) {
            rig.control.word(back + 8 * i).store(round, Ordering::Release);
        }
    }
    let ns = rig.results(unit, 0, &running, batches)?;
    Ok(ns.iter().fold(f64::INFINITY, |a, b| a.min(*b)) / repeat as f64 / 2e3)
}

/// An empty kernel, from the call to the news of its end.
fn launch(rig: &Rig, unit: usize) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        let start = Instant::now();
        let running = rig.empty(unit)?;
        while !running.is_done()? {
            rig.breathe();
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(best)
}

/// Several streams of one device, each storing into its own part of host memory.
fn writers(rig: &Rig, unit: usize) -> Result<Vec<Writers>> {
    let counts: &[usize] = if rig.is_cpu() { &[1, 2] } else { &[1, 2, STREAMS] };
    counts.iter().map(|n| at_once(rig, &(0..*n).map(|stream| (unit, stream)).collect::<Vec<_>>())).collect()
}

/// Writers (device and stream) at once, each into its own part of host memory.
pub fn at_once(rig: &Rig, who: &[(usize, usize)]) -> Result<Writers> {
    let part = rig.scale.most / STREAMS.max(who.len()) as u64 / 4096 * 4096;
    let repeat = if rig.is_cpu() { 8 } else { 32 };
    let mut best = 0f64;
    for _ in 0..3 {
        rig.go_on()?;
        let mut running = Vec::new();
        for (i, &(unit, stream)) in who.iter().enumerate() {
            let offset = part * i as u64;
            let u = &rig.units[unit];
            let params = CopyParams {
                dst: u.host(0) + offset,
                src: u.memory.addr() + offset,
                bytes: part,
                stride: part,
                places: 1,
                width: 16,
                system: 1,
                batches: 1,
                repeat,
                ..Default::default()
            };
            running.push(rig.copy(unit, stream, rig.scale.blocks.div_ceil(STREAMS as u32), params)?);
        }
        // The slowest counts: all began within microseconds, and run for milliseconds.
        let mut slowest = 0f64;
        for (run, &(unit, stream)) in running.iter().zip(who) {
            slowest = slowest.max(rig.results(unit, stream, run, 1)?[0]);
        }
        best = best.max((who.len() as u64 * part * repeat) as f64 / slowest);
    }
    Ok(Writers { n: who.len() as u32, rate: best })
}
