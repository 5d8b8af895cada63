//! One rank's part: its buffers, its queue pair, its kernel, size by size.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{
    Comm, Context, DeviceBuffer, Launch, Module, QpConfig, QueuePair, RegionKey, Shared, WaitOutcome,
    status_name, upload_descriptors,
};
use serde::{Deserialize, Serialize};

use super::pattern::{Layout, Pattern, Wrong};
use super::table::{self, Line};
use super::{Kind, Options, Place};

/// Windows that are checked before those that are measured (there: warm-up validation).
const PASSES: u8 = 5;
/// Most that the messages of a window take in memory while they are checked; beyond it
/// some share a place.
const CHECKED: u64 = 64 << 20;
/// Most puts that are published together: the engine sees none of them before.
const BATCH: u64 = 32;
/// For tests: a byte of this offset is sent wrong.
const FLIP: &str = "_PUSHGATE_OSU_FLIP";

/// `struct osu_params`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Params {
    qp: u64,
    result: u64,
    src: u64,
    stride: u64,
    bytes: u64,
    slice: u64,
    first: u64,
    warmup: u64,
    rounds: u64,
    messages: u32,
    places: u32,
    batch: u32,
    senders: u32,
    peer_senders: u32,
    lkey: u32,
    rkey: u32,
    answers: u32,
    flushes: u32,
    pad: u32,
}

/// Memory that messages are sent out of, or land in.
enum Memory {
    Host(Shared),
    Device(DeviceBuffer),
}

impl Memory {
    fn new(context: &Context, place: Place, name: &str, bytes: u64) -> Result<Self> {
        let bytes = bytes as usize;
        Ok(match place {
            Place::Host => Memory::Host(context.shared(name, bytes.next_multiple_of(4096))?),
            Place::Device => Memory::Device(context.alloc(bytes)?),
        })
    }

    fn addr(&self) -> u64 {
        match self {
            Memory::Host(m) => m.device_addr(),
            Memory::Device(m) => m.addr(),
        }
    }

    /// # Safety
    /// It outlives the queue pair.
    unsafe fn register(&self, qp: &QueuePair) -> Result<RegionKey> {
        Ok(match self {
            Memory::Host(m) => qp.register_shared(m)?,
            // SAFETY: the caller's promise.
            Memory::Device(m) => unsafe { qp.register_buffer(m)? },
        })
    }

    /// While nobody else uses it: between two kernels.
    fn write(&self, from: &[u8]) -> Result<()> {
        match self {
            Memory::Host(m) => {
                assert!(from.len() <= m.len());
                // SAFETY: it is mapped and long enough, and no kernel and no engine uses it now.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), m.as_ptr().as_ptr(), from.len()) };
            }
            Memory::Device(m) => m.copy_from_host_at(0, from)?,
        }
        Ok(())
    }

    /// As above.
    fn read(&self, to: &mut [u8]) -> Result<()> {
        match self {
            Memory::Host(m) => {
                assert!(to.len() <= m.len());
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(m.as_ptr().as_ptr(), to.as_mut_ptr(), to.len()) };
            }
            Memory::Device(m) => m.copy_to_host_at(0, to)?,
        }
        Ok(())
    }
}

/// What one rank tells the other before the first message.
#[derive(Serialize, Deserialize, PartialEq)]
struct Hello {
    /// Must be the same at both: what is asked for.
    asked: String,
    /// Where the other's messages land.
    rkey: u32,
    /// For its number of senders.
    blocks: u32,
    window: u64,
}

/// How one rank sends messages of one size.
struct Shape {
    slice: u64,
    senders: u32,
    batch: u32,
}

impl Shape {
    /// Messages longer than a block's part of half a window go in slices, so that one is
    /// filled while another leaves.
    fn new(o: &Options, rank: usize, blocks: u32, window: u64, bytes: u64) -> Self {
        let sends = o.kind.roles(rank)[0];
        let slots = (o.settings.slots / 4).max(1);
        if !sends || o.buffers[rank] == Place::Host {
            // Out of a region nothing is copied here: one block posts it.
            return Shape { slice: bytes.max(1), senders: 1, batch: BATCH.min(slots) as u32 };
        }
        let part = (window / 2 / blocks as u64 / 64 * 64).max(64);
        let slice = bytes.clamp(1, part);
        let units = o.messages as u64 * bytes.max(1).div_ceil(slice);
        let senders = (blocks as u64).min(units) as u32;
        let room = window / 2 / senders as u64 / slice.next_multiple_of(64);
        let batch = room.min(slots / senders as u64).clamp(1, BATCH) as u32;
        Shape { slice, senders, batch }
    }

    /// A power of two of threads for what a block moves at a time, four loads each.
    fn threads(&self, o: &Options, cuda: bool) -> u32 {
        match (o.threads, cuda) {
            (Some(threads), _) => threads,
            (None, false) => 1,
            (None, true) => {
                let most = self.slice.next_multiple_of(64) * self.batch.min(o.messages) as u64 / 64;
                most.next_power_of_two().clamp(32, 1024) as u32
            }
        }
    }
}

/// All of one rank's run. False: bytes were wrong, which rank 0 has said in the table;
/// `why` then tells the first of them.
pub fn run(o: &Options, comm: &Comm, processes: u32) -> Result<Option<String>> {
    let context = comm.context();
    let (me, peer) = (comm.rank() as usize, 1 - comm.rank() as usize);
    let [sends, receives] = o.kind.roles(me);
    let module = Module::embedded(context);
    let stream = context.stream()?;
    let cuda = context.device() == "cuda";

    let layout = |bytes: u64| {
        let one = Layout { bytes, places: 1 };
        let places = if o.validate { (CHECKED / one.stride()).clamp(1, o.messages as u64) } else { 1 };
        Layout { places: places as u32, ..one }
    };
    let most = o.sizes.iter().map(|b| layout(*b).len()).max().expect("there is a size");
    let part = |has: bool, name: &str| -> Result<Option<Memory>> {
        let made = has.then(|| Memory::new(context, o.buffers[me], name, most)).transpose();
        made.with_context(|| format!("rank {me}: {most} bytes for its {name}"))
    };
    // Dropped after the queue pair that they are registered with.
    let (source, target) = (part(sends, "osu-source")?, part(receives, "osu-target")?);
    let qp = comm.queue_pair(peer as u32, 0, QpConfig::default())?;
    let blocks = o.blocks.unwrap_or(if cuda { 4 } else { 1 });
    let signals = context.settings().signals;
    ensure!(blocks as u64 <= signals, "--blocks {blocks} needs as many signals: --signals is {signals}");
    // SAFETY: both are dropped behind the queue pair.
    let lkey = match &source {
        Some(m @ Memory::Host(_)) => unsafe { m.register(&qp)? },
        _ => 0,
    };
    // SAFETY: as above.
    let rkey = target.as_ref().map(|m| unsafe { m.register(&qp) }).transpose()?.unwrap_or(0);
    let window = context.settings().window_size;
    let asked = format!(
        "{} -d {} -W {} -i {:?} -x {:?} validate {} sizes {:?}",
        o.kind.name(),
        o.buffers(),
        o.messages,
        o.iterations,
        o.warmup,
        o.validate,
        o.sizes
    );
    let hello = Hello { asked, rkey, blocks, window };
    let all = comm.all_gather(&serde_json::to_vec(&hello).expect("it is plain data"))?;
    let other: Hello = serde_json::from_slice(&all[peer])
        .map_err(|e| anyhow!("rank {peer} said what is no hello of this bench: {e}"))?;
    if other.asked != hello.asked {
        bail!("rank {peer} was started for another run: {}; this one is {}", other.asked, hello.asked);
    }

    let descriptor = upload_descriptors(context, [&qp])?;
    let result = context.alloc(16 * blocks as usize)?;
    if me == 0 && !o.json {
        println!("{}", table::header(o, context, processes));
    }
    // Iterations so far: signals only grow.
    let mut first = 0;
    for &bytes in &o.sizes {
        let layout = layout(bytes);
        let ours = Shape::new(o, me, blocks, window, bytes);
        let theirs = Shape::new(o, peer, other.blocks, other.window, bytes);
        let mut exchange = |warmup: u64, rounds: u64| -> Result<u64> {
            let grid = ours.senders;
            let params = Params {
                qp: descriptor.addr(),
                result: result.addr(),
                src: source.as_ref().map_or(0, Memory::addr),
                stride: layout.stride(),
                bytes,
                slice: ours.slice,
                first,
                warmup,
                rounds,
                messages: if sends { o.messages } else { 0 },
                places: layout.places,
                batch: ours.batch,
                senders: grid,
                peer_senders: theirs.senders,
                lkey,
                rkey: other.rkey,
                answers: (me == 1 && o.kind != Kind::Bidirectional) as u32,
                flushes: (o.kind == Kind::Bidirectional) as u32,
                pad: 0,
            };
            first += warmup + rounds;
            let shape = Launch::new(grid, ours.threads(o, cuda)).cooperating();
            // SAFETY: buffers and queue pair outlive the kernel, which is waited for, and
            // while it runs nothing else touches the messages.
            let running = unsafe { context.launch(&stream, &module, "osu_exchange", shape, &params)? };
            // As long as it takes: every wait in it ends, and their number is known.
            while running.wait(Some(Duration::from_secs(60)))? == WaitOutcome::TimedOut {}
            // Of both: a call to the driver may wait for a kernel, which waits for an engine,
            // which waits for the driver.
            comm.barrier()?;
            let mut words = vec![0; 16 * grid as usize];
            result.copy_to_host_at(0, &mut words)?;
            let words: Vec<u64> = words
                .chunks_exact(8)
                .map(|c| u64::from_le_bytes(c.try_into().expect("eight bytes")))
                .collect();
            if let Some(code) = words.iter().step_by(2).find(|code| **code != 0) {
                qp.check().with_context(|| hint(o, me))?;
                bail!("rank {me}: the exchange of {bytes} bytes ended with: {}", status_name(*code));
            }
            Ok(words[1])
        };
        let [iterations, warmup] = o.counts(bytes);
        let mut scratch = vec![0; if o.validate { layout.len() as usize } else { 0 }];
        let mut checked = |pass: u8, warmup: u64, rounds: u64| -> Result<(u64, Result<(), Wrong>)> {
            let pattern = |rank: usize| Pattern { rank: rank as u32, pass };
            if let Some(m) = &source {
                pattern(me).fill(layout, &mut scratch);
                flip(&mut scratch, layout)?;
                m.write(&scratch)?;
            }
            if let Some(m) = &target {
                pattern(peer).clear(layout, &mut scratch);
                m.write(&scratch)?;
            }
            comm.barrier()?;
            let ns = exchange(warmup, rounds)?;
            let found = target.as_ref().map_or(anyhow::Ok(Ok(())), |m| {
                m.read(&mut scratch)?;
                Ok(pattern(peer).check(layout, &scratch))
            })?;
            Ok((ns, found))
        };
        let mut wrong = None;
        let ns = if o.validate {
            for pass in 0..PASSES {
                wrong = wrong.or(checked(pass, 0, 1)?.1.err());
            }
            let (ns, found) = checked(PASSES, warmup, iterations)?;
            wrong = wrong.or(found.err());
            ns
        } else {
            comm.barrier()?;
            exchange(warmup, iterations)?
        };
        // Both hear what either found.
        let said = wrong.map_or(String::new(), |w| format!("{bytes} bytes, rank {me} received {w}"));
        let said: Vec<String> = comm
            .all_gather(said.as_bytes())?
            .into_iter()
            .map(|s| String::from_utf8_lossy(&s).into())
            .collect();
        let wrong = said.into_iter().find(|s| !s.is_empty());
        if me == 0 {
            let valid = o.validate.then_some(wrong.is_none());
            println!("{}", table::line(o, context, &Line { bytes, ns, valid }));
        }
        if wrong.is_some() {
            return Ok(wrong);
        }
    }
    // Nobody leaves while the other's engine still has something to say.
    comm.barrier()?;
    Ok(None)
}

/// What to do when a queue pair ended.
fn hint(o: &Options, rank: usize) -> String {
    let host = o.kind.roles(rank)[0] && o.buffers[rank] == Place::Host;
    let how = match host {
        true => " (out of host memory it is sent in place; -d D D pushes it through the window)",
        false => "",
    };
    format!("rank {rank}, buffers {}{how}", o.buffers())
}

/// For tests: what is sent wrong must be found.
fn flip(messages: &mut [u8], layout: Layout) -> Result<()> {
    if let Ok(at) = std::env::var(FLIP) {
        let at: u64 = at.parse().with_context(|| format!("{FLIP} is {at}, allowed is an offset"))?;
        if at < layout.bytes {
            messages[at as usize] ^= 1;
        }
    }
    Ok(())
}
