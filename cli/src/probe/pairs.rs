//! Messages from one device's memory to another's, each way that there is: what a
//! transport between them would do, from the host's word that it may begin to the word
//! that all of it is there.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use pushgate_gpu_kernels::Running;
use pushgate_pcie_model::findings::{Line, Pair, Transfer, Writers};

use super::Bar;
use super::rig::{APART, CopyParams, DONE, FLAGS, GO, PingParams, RECORDS, Rig, pattern};
use super::single::at_once;

/// Repetitions that have taken longer are not gone on with: somebody else is at work, and a
/// figure would be no better for it.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// How many messages of `bytes` are sent for a median within about `time`, at what a
/// slow way of today takes.
fn messages(bytes: u64, time: Duration) -> u64 {
    let us = 10.0 + bytes as f64 / 40e3;
    (time.as_secs_f64() * 1e6 / us).clamp(5.0, 64.0) as u64
}

/// Measures every ordered pair of devices; of a single device the one with itself.
pub fn all(rig: &Rig) -> Vec<(usize, usize)> {
    let n = rig.units.len();
    if n == 1 {
        return vec![(0, 0)];
    }
    (0..n).flat_map(|a| (0..n).filter(move |b| *b != a).map(move |b| (a, b))).collect()
}

/// Whether kernels of `reader` can load from the other's memory. A driver that fails to
/// say so counts as no: the other ways are there.
pub fn reaches(rig: &Rig, reader: usize, other: usize) -> bool {
    let (reader, other) = (&rig.units[reader].executor, &rig.units[other].executor);
    match (reader.as_cuda(), other.as_cuda()) {
        (Some(reader), Some(other)) => reader.reach(other).unwrap_or_else(|error| {
            tracing::warn!("no peer access: {error}");
            false
        }),
        _ => true,
    }
}

pub fn pair(rig: &Rig, from: usize, to: usize, bar: &Bar) -> Result<Pair> {
    let (a, b) = (&rig.units[from], &rig.units[to]);
    bar.say(&format!("{} to {}", a.pci, b.pci));
    let lines = [Transfer::Push, Transfer::Bounce, Transfer::Pull]
        .into_iter()
        .filter(|way| *way != Transfer::Pull || reaches(rig, to, from))
        .map(|way| {
            check(rig, from, to, way)?;
            let time = rig.scale.time.mul_f64((12.0 / all(rig).len() as f64).clamp(0.1, 1.0));
            let points = rig
                .scale
                .sizes()
                .into_iter()
                .map(|n| {
                    // The middle of three launches: which places a kernel gets makes a difference.
                    let (began, mut times) = (Instant::now(), Vec::new());
                    while times.len() < 3 && (times.is_empty() || began.elapsed() < PATIENCE) {
                        times.push(message(rig, from, to, way, n, time / 3)?);
                    }
                    Ok((n, median(times)))
                })
                .collect::<Result<_>>()?;
            let (slice, blocks) = match way {
                Transfer::Bounce => (1, 1),
                _ => (rig.scale.slice, rig.scale.blocks),
            };
            Ok(Line::fitted(way, 0.0, points, slice, blocks).expect("there are sizes"))
        })
        .collect::<Result<_>>()?;
    let peer = from != to && reaches(rig, from, to) && reaches(rig, to, from);
    Ok(Pair {
        from: a.pci.clone(),
        to: b.pci.clone(),
        record: record(rig, from, to, false)?,
        peer_record: if peer { Some(record(rig, from, to, true)?) } else { None },
        lines,
    })
}

/// Measures devices that store into host memory at once, one more each time.
pub fn writers(rig: &Rig) -> Result<Vec<Writers>> {
    let n = rig.units.len();
    if n < 2 {
        return Ok(Vec::new());
    }
    (1..=n).map(|n| at_once(rig, &(0..n).map(|unit| (unit, 0)).collect::<Vec<_>>())).collect()
}

/// A message of every way arrives as it was sent.
fn check(rig: &Rig, from: usize, to: usize, way: Transfer) -> Result<()> {
    let bytes = rig.scale.most.min(1 << 20) as usize;
    let sent = pattern(bytes, from as u64 * 64 + to as u64 + 7 * way as u64);
    rig.units[from].memory.copy_from_host(&sent)?;
    let target = &rig.units[to].memory;
    target.copy_from_host_at(rig.scale.most as usize, &vec![0; bytes])?;
    message(rig, from, to, way, bytes as u64, Duration::ZERO)?;
    let mut got = vec![0; bytes];
    target.copy_to_host_at(rig.scale.most as usize, &mut got)?;
    ensure!(got == sent, "a {way} from {} to {} arrived changed", rig.units[from].pci, rig.units[to].pci);
    Ok(())
}

/// Median microseconds of a message, by the host's clock: messages one after the other
/// for about `time`.
pub fn message(rig: &Rig, from: usize, to: usize, way: Transfer, bytes: u64, time: Duration) -> Result<f64> {
    rig.go_on()?;
    let what = || format!("{way} of {bytes} bytes from {} to {}", rig.units[from].pci, rig.units[to].pci);
    match way {
        Transfer::Bounce => bounce(rig, from, to, bytes, time),
        _ => kernels(rig, from, to, way, bytes, time),
    }
    .with_context(what)
}

pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Resident kernels at the ends, told by words in host memory.
fn kernels(rig: &Rig, from: usize, to: usize, way: Transfer, bytes: u64, time: Duration) -> Result<f64> {
    let (a, b) = (&rig.units[from], &rig.units[to]);
    let blocks = rig.scale.blocks_of(bytes);
    // Pieces of a block's slice, so that the receiver takes one while the next comes.
    let slice = bytes.div_ceil(u64::from(blocks));
    let chunk = (slice / 4).next_multiple_of(4096).clamp(16 << 10, 128 << 10);
    let common = |unit: u64| CopyParams {
        bytes,
        stride: 0,
        places: 1,
        chunk,
        go: unit + GO,
        batches: messages(bytes, time),
        repeat: 1,
        width: 16,
        ..Default::default()
    };
    rig.reset();
    let running: Vec<(usize, usize, Running)> = match way {
        Transfer::Push => {
            let receiver = CopyParams {
                dst: b.second(&rig.scale),
                src: b.host(0),
                wait_flags: b.control() + FLAGS,
                done: b.control() + DONE,
                ..common(b.control())
            };
            let sender = CopyParams {
                dst: a.host(0),
                src: a.memory.addr(),
                set_flags: a.control() + FLAGS,
                system: 1,
                ..common(a.control())
            };
            vec![(to, 0, rig.copy(to, 0, blocks, receiver)?), (from, 1, rig.copy(from, 1, blocks, sender)?)]
        }
        _ => {
            let reader = CopyParams {
                dst: b.second(&rig.scale),
                src: a.memory.addr(),
                done: b.control() + DONE,
                ..common(b.control())
            };
            vec![(to, 0, rig.copy(to, 0, blocks, reader)?)]
        }
    };
    let mut times = Vec::new();
    for number in 1..=messages(bytes, time) {
        let start = Instant::now();
        rig.control.word(GO).store(number, Ordering::Release);
        rig.wait_word(DONE, number)?;
        // The first finds cold caches and pages.
        if number > 1 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    for (unit, stream, run) in &running {
        rig.results(*unit, *stream, run, 0)?;
    }
    Ok(median(times))
}

/// Copy engines of both by way of host memory, piece by piece.
fn bounce(rig: &Rig, from: usize, to: usize, bytes: u64, time: Duration) -> Result<f64> {
    let (a, b) = (&rig.units[from], &rig.units[to]);
    let chunk = (bytes / 8).clamp(512 << 10, 4 << 20);
    let mut times = Vec::new();
    for number in 1..=messages(bytes, time) {
        let start = Instant::now();
        for at in (0..bytes).step_by(chunk as usize) {
            let n = chunk.min(bytes - at) as usize;
            // SAFETY: buffers of `most` bytes at least, the target's second one behind
            // its first; nobody else uses them until the last point was passed.
            unsafe {
                a.copies.copy(a.host(0) + at, a.memory.addr() + at, n)?;
                // One queue keeps its own order.
                if from != to {
                    b.copies.wait_for(&a.copies.point()?)?;
                }
                b.copies.copy(b.second(&rig.scale) + at, b.host(0) + at, n)?;
            }
        }
        let end = b.copies.point()?;
        while !end.passed()? {
            ensure!(start.elapsed().as_secs() < 10, "copies did not end in 10 s");
            rig.breathe();
        }
        if number > 1 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(median(times))
}

/// Half a round trip of 64-byte records between two kernels: in host memory, or each in
/// the other's own memory.
fn record(rig: &Rig, from: usize, to: usize, peer: bool) -> Result<f64> {
    const BATCHES: u64 = 8;
    rig.go_on()?;
    let (a, b) = (&rig.units[from], &rig.units[to]);
    let repeat = rig.scale.rounds;
    rig.reset();
    for unit in [a, b] {
        unit.inbox.copy_from_host(&[0; 4096])?;
    }
    let side = |first: bool| {
        let me = if first { a } else { b };
        let other = if first { b } else { a };
        let host = [RECORDS, RECORDS + 4 * APART];
        let (out, input) = match peer {
            true => (other.inbox.addr(), me.inbox.addr()),
            false => (me.control() + host[usize::from(!first)], me.control() + host[usize::from(first)]),
        };
        let (batches, first) = (BATCHES, u32::from(first));
        PingParams { out, input, batches, repeat, words: 8, first, ..Default::default() }
    };
    let answers = rig.ping(to, 0, side(false))?;
    let asks = rig.ping(from, 1, side(true))?;
    let ns = rig.results(from, 1, &asks, BATCHES)?;
    rig.results(to, 0, &answers, BATCHES)?;
    Ok(ns.iter().fold(f64::INFINITY, |a, b| a.min(*b)) / repeat as f64 / 2e3)
}
