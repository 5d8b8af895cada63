//! What one rank does: queue pairs around the ring, then for every size and
//! iteration fill, launch, wait, check.

use std::time::Duration;

use anyhow::{Result, bail};
use pushgate::settings::Transport;
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{Comm, Counters, Launch, Module, QpConfig, WaitOutcome, status_name, upload_descriptors};
use serde::{Deserialize, Serialize};

use super::rnr::Rnr;
use super::{Options, Place, data};
use crate::output::errln;

/// `struct allreduce_params` of the kernel.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Params {
    send_qps: u64,
    recv_qps: u64,
    input: u64,
    output: u64,
    count: u64,
    slice: u64,
    progress: u64,
    result: u64,
    rank: u32,
    ranks: u32,
    channels: u32,
    op: u32,
    push_lanes: u32,
    pad: u32,
}

/// One line of `--json`.
#[derive(Clone, Serialize, Deserialize)]
pub struct Line {
    pub ranks: u32,
    pub bytes: u64,
    pub count: u64,
    pub dtype: String,
    pub op: String,
    pub device: String,
    pub window: String,
    pub qp: String,
    pub proxy: String,
    pub channels: u32,
    /// Whether the times and rates without `in_place_` in their names are in place, because nothing ran out of place.
    pub in_place: bool,
    pub iters: u32,
    pub verified: bool,
    /// Wrong elements, out of place and in place, of all iterations.
    pub wrong: u64,
    pub dropped: u64,
    /// Receiver-not-ready answers; none where they can't be counted.
    pub rnr: Option<u64>,
    pub refused: u64,
    pub copies: u64,
    /// Payloads that the sender had to copy out of its window.
    pub bounced: u64,
    pub credit_stalls: u64,
    /// Out of place, or in place where nothing ran out of place.
    #[serde(flatten)]
    pub first: Speed,
    /// In place; none where nothing ran in place.
    pub in_place_wrong: Option<u64>,
    pub in_place_time_us: Option<f64>,
    pub in_place_algbw_gbs: Option<f64>,
    pub in_place_busbw_gbs: Option<f64>,
    pub in_place_best_us: Option<f64>,
    pub in_place_best_busbw_gbs: Option<f64>,
}

/// What the iterations of a size took.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Speed {
    /// Mean of the iterations, each the slowest rank's kernel.
    pub time_us: f64,
    pub algbw_gbs: f64,
    pub busbw_gbs: f64,
    /// The fastest iteration.
    pub best_us: f64,
    pub best_busbw_gbs: f64,
}

impl Speed {
    fn of(bytes: u64, ranks: u32, times: &[f64]) -> Self {
        let time_us = times.iter().sum::<f64>() / times.len() as f64;
        let best_us = times.iter().copied().fold(f64::INFINITY, f64::min);
        // nccl-tests, doc/PERFORMANCE.md: what a rank's link carries, 2(n-1)/n of the size.
        let bus = 2.0 * (ranks - 1) as f64 / ranks as f64;
        let gbs = |us: f64| bytes as f64 / us / 1e3;
        Speed {
            time_us,
            algbw_gbs: gbs(time_us),
            busbw_gbs: gbs(time_us) * bus,
            best_us,
            best_busbw_gbs: gbs(best_us) * bus,
        }
    }
}

/// What the iterations of a size in one place came to.
struct Measured {
    place: Place,
    times: Vec<f64>,
    wrong: u64,
}

/// What a rank reports to the parent, one JSON object a line.
#[derive(Serialize, Deserialize)]
pub enum Report {
    /// Which executor, and why; from rank 0.
    Why(String),
    /// An iteration is done; from rank 0.
    Step,
    /// A size is done; from rank 0.
    Line(Box<Line>),
}

/// What ranks tell each other about an iteration.
#[derive(Serialize, Deserialize)]
struct Outcome {
    time_us: f64,
    wrong: u64,
}

/// What ranks tell each other about a size.
#[derive(Serialize, Deserialize)]
struct Counted {
    engine: Counters,
    rnr: Option<u64>,
}

/// A rank that leaves early ends its queue pairs first, so that no other waits
/// for it. Declared after them, and so dropped before.
struct GiveUp<'a>(Option<&'a Comm>);

impl Drop for GiveUp<'_> {
    fn drop(&mut self) {
        if let Some(comm) = self.0 {
            comm.abort();
        }
    }
}

/// How wide the kernel is.
struct Shape {
    channels: u32,
    block: u32,
    push_lanes: u32,
    slice: u64,
}

fn shape(o: &Options, comm: &Comm, ranks_here: u32) -> Shape {
    let cuda = comm.context().device() == "cuda";
    let channels = o.channels.unwrap_or(if !cuda { 1 } else { (16 / ranks_here).max(1) });
    let window = comm.context().settings().window_size;
    Shape {
        channels,
        block: o.block.unwrap_or(if cuda { 512 } else { 1 }),
        push_lanes: o.push_lanes.unwrap_or(if cuda { 64 } else { u32::MAX }),
        slice: o.slice.unwrap_or((window / 4).clamp(64, 256 << 10)).min(window),
    }
}

/// Nodes that were started differently would wait for messages that nobody sends.
fn agree(o: &Options, shape: &Shape, comm: &Comm) -> Result<()> {
    let sizes: Vec<_> = o.sizes.iter().map(u64::to_string).collect();
    let mine = [
        ("size", sizes.join(",")),
        ("iters", o.iters.to_string()),
        ("warmup", o.warmup.to_string()),
        ("dtype", o.dtype.name().into()),
        ("op", o.op.name().into()),
        ("in-place", (o.places == [Place::In]).to_string()),
        ("out-of-place", (o.places == [Place::Out]).to_string()),
        ("channels", shape.channels.to_string()),
        ("slice", shape.slice.to_string()),
    ];
    let all = comm.all_gather(&serde_json::to_vec(&mine)?)?;
    for (rank, bytes) in all.iter().enumerate() {
        let theirs: Vec<(String, String)> = serde_json::from_slice(bytes)?;
        if let Some(((name, mine), (_, theirs))) = mine.iter().zip(&theirs).find(|(m, t)| m.1 != t.1) {
            bail!(
                "--{name} is {theirs} at rank {rank}, and {mine} at rank {}: give all nodes and ranks the same",
                comm.rank()
            );
        }
    }
    Ok(())
}

/// Runs one rank to the end. `ranks_here`: ranks that share this process, device
/// and engine; one of them `counts` for all.
pub fn run(
    o: &Options,
    comm: &Comm,
    ranks_here: u32,
    counts: bool,
    report: &(dyn Fn(Report) + Sync),
) -> Result<()> {
    let context = comm.context();
    let (rank, n) = (comm.rank(), comm.size());
    let shape = shape(o, comm, ranks_here);
    agree(o, &shape, comm)?;
    let module = Module::embedded(context);
    let kernel = format!("allreduce_{}", o.dtype.name());
    if rank == 0 {
        report(Report::Why(context.why().to_owned()));
    }

    // Edge r goes from rank r to the next; each of its channels is a queue pair.
    let edge = |from: u32, peer: u32| (0..shape.channels).map(move |c| (peer, from * shape.channels + c));
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let ends: Vec<_> =
        if n == 1 { vec![] } else { edge(rank, next).chain(edge(previous, previous)).collect() };
    let qps = comm.queue_pairs(&ends, QpConfig::default())?;
    let mut give_up = GiveUp(Some(comm));
    let (to_next, from_previous) = qps.split_at(qps.len() / 2);
    let send_qps = upload_descriptors(context, to_next)?;
    let recv_qps = upload_descriptors(context, from_previous)?;

    let most = o.sizes.iter().copied().max().expect("at least one size") as usize;
    let input = context.alloc(most)?;
    let output = o.places.contains(&Place::Out).then(|| context.alloc(most)).transpose()?;
    let steps = (o.warmup + o.iters) as usize * o.sizes.len() * o.places.len();
    // A set of counters for each launch, so that none must be cleared between them.
    let progress = context.alloc(steps * shape.channels as usize * 8)?;
    let results = context.alloc(steps * shape.channels as usize * 16)?;
    let stream = context.stream()?;
    let threads = (std::thread::available_parallelism().map_or(1, |n| n.get()) / ranks_here as usize).max(1);
    let timeout = context.settings().timeout;
    let mut host = vec![0u8; most];
    let mut step = 0;
    // One rank of a host counts for its port. Said once: then there is no count to the end.
    let verbs = comm.transports().contains(&Transport::Verbs);
    let unknown = |why: String| errln!("pushgate: rank {rank} can't count RNR: {why}");
    let first = match &o.membership {
        None => o.share.start,
        // Where a launcher does not number the ranks of a host, rank 0's host alone is counted.
        Some(found) => {
            if found.local_rank.unwrap_or(rank) == 0 {
                rank
            } else {
                u32::MAX
            }
        }
    };
    let counts_rnr = verbs && rank == first;
    let mut port = if counts_rnr { Rnr::open(context).map_err(unknown).ok() } else { None };

    for &bytes in &o.sizes {
        let host = &mut host[..bytes as usize];
        let before = context.counters()?;
        let mut measured: Vec<Measured> = Vec::new();
        for (place, i) in o.places.iter().flat_map(|place| (0..o.warmup + o.iters).map(move |i| (*place, i)))
        {
            if i == 0 {
                measured.push(Measured { place, times: Vec::new(), wrong: 0 });
            }
            let measured = measured.last_mut().expect("one was pushed");
            let result = output.as_ref().filter(|_| place == Place::Out).unwrap_or(&input);
            let seed = (step as u64 + 1) << 8 ^ bytes;
            data::fill(host, o.dtype, seed, rank, o.op, threads);
            input.copy_from_host(host)?;
            let result_at = step * shape.channels as usize * 16;
            let params = Params {
                send_qps: send_qps.addr(),
                recv_qps: recv_qps.addr(),
                input: input.addr(),
                output: result.addr(),
                count: bytes / o.dtype.size() as u64,
                slice: shape.slice,
                progress: progress.addr() + (step * shape.channels as usize * 8) as u64,
                result: results.addr() + result_at as u64,
                rank,
                ranks: n,
                channels: shape.channels,
                op: o.op.code(),
                push_lanes: shape.push_lanes,
                pad: 0,
            };
            comm.barrier()?;
            if rank % 2 == 1 {
                std::thread::sleep(o.late);
            }
            let launch = Launch::new(2 * shape.channels, shape.block).cooperating();
            // SAFETY: all addresses are of buffers and queue pairs that live to the
            // end of this function, and the kernel is waited for below.
            let running = unsafe { context.launch(&stream, &module, &kernel, launch, &params)? };
            // The kernel's own waits end first; this is for one that can't end.
            match context.wait(&running, Some(timeout * 2 + Duration::from_secs(10)))? {
                WaitOutcome::Done => {}
                WaitOutcome::TimedOut => {
                    // It may still use what we would now free.
                    errln!("pushgate: rank {rank}: the kernel did not end");
                    std::process::abort();
                }
            }
            let mut codes = vec![0u8; shape.channels as usize * 16];
            results.copy_to_host_at(result_at, &mut codes)?;
            for (block, code) in codes.chunks_exact(8).enumerate() {
                let code = u64::from_le_bytes(code.try_into()?);
                if code != 0 {
                    comm.check()?;
                    for qp in &qps {
                        qp.check()?;
                    }
                    bail!("rank {rank}: block {block} ended with: {}", status_name(code));
                }
            }
            let time = running.elapsed()?.expect("it has ended");
            result.copy_to_host_at(0, host)?;
            let (wrong, first) = data::check(host, o.dtype, seed, n, o.op, threads);
            if let Some(w) = first {
                errln!(
                    "pushgate: rank {rank}: {bytes} bytes, iteration {i}: {wrong} wrong elements, the first is {}: {} instead of {}",
                    w.index,
                    w.got,
                    w.expected
                );
            }
            let mine = Outcome { time_us: time.as_secs_f64() * 1e6, wrong: wrong as u64 };
            let all = comm.all_gather(&serde_json::to_vec(&mine)?)?;
            let all: Vec<Outcome> =
                all.iter().map(|o| serde_json::from_slice(o)).collect::<Result<_, _>>()?;
            measured.wrong += all.iter().map(|o| o.wrong).sum::<u64>();
            if i >= o.warmup {
                measured.times.push(all.iter().map(|o| o.time_us).fold(0.0, f64::max));
            }
            step += 1;
            if rank == 0 {
                report(Report::Step);
            }
        }
        // All ranks have gathered the last outcome: their messages are through.
        let rnr = match &mut port {
            Some(p) => p.increase().map_err(unknown).ok(),
            None => (!counts_rnr).then_some(0),
        };
        if rnr.is_none() {
            port = None;
        }
        let engine = if counts { context.counters()? - before } else { Counters::default() };
        let all = comm.all_gather(&serde_json::to_vec(&Counted { engine, rnr })?)?;
        let all: Vec<Counted> = all.iter().map(|c| serde_json::from_slice(c)).collect::<Result<_, _>>()?;
        let mut sum = Counted { engine: Counters::default(), rnr: all.iter().map(|c| c.rnr).sum() };
        for counted in all {
            sum.engine += counted.engine;
        }
        if !verbs {
            // There is no such answer on `local`, and so the engine counts none.
            sum.rnr = Some(sum.engine.rnr);
        }
        if rank == 0 {
            report(Report::Line(Box::new(line(o, comm, &shape, bytes, &measured, sum))));
        }
        let wrong = measured.iter().map(|m| m.wrong).sum::<u64>();
        if wrong > 0 {
            bail!("{wrong} wrong elements");
        }
    }
    // Nobody leaves while another still drains.
    comm.barrier()?;
    give_up.0 = None;
    Ok(())
}

fn line(o: &Options, comm: &Comm, shape: &Shape, bytes: u64, measured: &[Measured], sum: Counted) -> Line {
    let context = comm.context();
    let n = comm.size();
    let speed = |m: &Measured| Speed::of(bytes, n, &m.times);
    let wrong = measured.iter().map(|m| m.wrong).sum();
    let in_place = measured.iter().find(|m| m.place == Place::In);
    let in_place_speed = in_place.map(speed);
    Line {
        ranks: n,
        bytes,
        count: bytes / o.dtype.size() as u64,
        dtype: o.dtype.name().into(),
        op: o.op.name().into(),
        device: context.device().into(),
        window: context.settings().window.to_string(),
        qp: Transport::names(&comm.transports()),
        proxy: context.proxy_place().into(),
        channels: shape.channels,
        in_place: o.places == [Place::In],
        iters: o.iters,
        verified: wrong == 0,
        wrong,
        dropped: sum.engine.dropped,
        rnr: sum.rnr,
        refused: sum.engine.refused,
        copies: sum.engine.copies,
        bounced: sum.engine.bounced,
        credit_stalls: sum.engine.credit_stalls(),
        first: speed(&measured[0]),
        in_place_wrong: in_place.map(|m| m.wrong),
        in_place_time_us: in_place_speed.map(|s| s.time_us),
        in_place_algbw_gbs: in_place_speed.map(|s| s.algbw_gbs),
        in_place_busbw_gbs: in_place_speed.map(|s| s.busbw_gbs),
        in_place_best_us: in_place_speed.map(|s| s.best_us),
        in_place_best_busbw_gbs: in_place_speed.map(|s| s.best_busbw_gbs),
    }
}
