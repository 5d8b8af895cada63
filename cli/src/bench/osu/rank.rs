//! One rank's part: its buffers, its queue pair, its kernel, size by size.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{
    Comm, Context, DeviceBuffer, Launch, Module, QpConfig, QueuePair, Region, Shared, Stream, WaitOutcome,
    status_name, upload_descriptors,
};
use pushgate_driver_shim::log::Foreign;
use serde::{Deserialize, Serialize};

use super::pattern::{Layout, Pattern, Wrong};
use super::table::{self, Line};
use super::{Kind, MOST_BLOCKS, Options, Place};
use crate::output::outln;

/// Windows that are checked before those that are measured. There, the measured ones are filled and
/// checked one by one as well; here one kernel runs them all, and they carry the same bytes.
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
    unsafe fn register(&self, qp: &QueuePair) -> Result<Region> {
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

    /// Copies this memory to `to`, wherever the memory lies.
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

impl Hello {
    /// What came from rank `peer`.
    fn parse(bytes: &[u8], peer: usize) -> Result<Self> {
        let hello: Hello = serde_json::from_slice(bytes).map_err(|e| {
            anyhow!(
                "rank {peer} said what is no hello of this bench: {}; is it the same build?",
                Foreign::word(e)
            )
        })?;
        let Hello { blocks, window, .. } = hello;
        ensure!((1..=MOST_BLOCKS).contains(&blocks), "rank {peer} says that it has {blocks} blocks");
        ensure!(window >= 64, "rank {peer} says that its window has {window} bytes");
        Ok(hello)
    }
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
    fn new(o: &Options, rank: usize, &Hello { blocks, window, .. }: &Hello, bytes: u64) -> Self {
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

/// A rank that has met its peer.
struct Rank<'a> {
    o: &'a Options,
    comm: &'a Comm,
    // Dropped before the memory that is registered with it.
    qp: QueuePair,
    source: Option<Memory>,
    target: Option<Memory>,
    module: Module,
    stream: Stream,
    descriptor: DeviceBuffer,
    result: DeviceBuffer,
    /// The source where messages go out of it in place.
    sends_from: Option<Region>,
    _puts_into: Option<Region>,
    ours: Hello,
    theirs: Hello,
    /// Iterations so far: signals only grow.
    first: u64,
}

impl<'a> Rank<'a> {
    fn new(o: &'a Options, comm: &'a Comm) -> Result<Self> {
        let context = comm.context();
        let (me, peer) = (comm.rank() as usize, 1 - comm.rank() as usize);
        let [sends, receives] = o.kind.roles(me);
        let most = o.sizes.iter().map(|b| layout(o, *b).len()).max().expect("there is a size");
        let memory = |has: bool, name: &str| -> Result<Option<Memory>> {
            let made = has.then(|| Memory::new(context, o.buffers[me], name, most)).transpose();
            made.with_context(|| format!("rank {me}: {most} bytes for its {name}"))
        };
        let (source, target) = (memory(sends, "osu-source")?, memory(receives, "osu-target")?);
        let qp = comm.queue_pair(peer as u32, 0, QpConfig::default())?;
        let register = |memory: Option<&Memory>| -> Result<Option<Region>> {
            // SAFETY: source and target are dropped after the queue pair, here and in the struct.
            memory.map(|m| unsafe { m.register(&qp) }).transpose()
        };
        // What lies in device memory is pushed.
        let sends_from = register(source.as_ref().filter(|m| matches!(m, Memory::Host(_))))?;
        let puts_into = register(target.as_ref())?;
        let rkey = puts_into.as_ref().map_or(0, Region::key);
        let blocks = o.blocks.unwrap_or(if context.device() == "cuda" { 4 } else { 1 });
        let ours = Hello { asked: o.asked(), rkey, blocks, window: o.settings.window_size };
        let all = comm.all_gather(&serde_json::to_vec(&ours).expect("it is plain data"))?;
        let theirs = Hello::parse(&all[peer], peer)?;
        if theirs.asked != ours.asked {
            bail!("rank {peer} was started for another run: {}; this one is {}", theirs.asked, ours.asked);
        }
        // Each block that sends has a signal of its own, and the signals are the receiver's.
        let (blocks, signals) = (ours.blocks.max(theirs.blocks), o.settings.signals);
        ensure!(
            u64::from(blocks) <= signals,
            "--blocks {blocks} needs as many signals: --signals is {signals}"
        );
        Ok(Rank {
            o,
            comm,
            descriptor: upload_descriptors(context, [&qp])?,
            result: context.alloc(16 * ours.blocks as usize)?,
            qp,
            source,
            target,
            module: Module::embedded(context),
            stream: context.stream()?,
            sends_from,
            _puts_into: puts_into,
            ours,
            theirs,
            first: 0,
        })
    }

    fn me(&self) -> usize {
        self.comm.rank() as usize
    }

    /// One kernel on each side; the nanoseconds of `rounds`. Both have ended then.
    fn exchange(&mut self, layout: Layout, [rounds, warmup]: [u64; 2]) -> Result<u64> {
        let (o, context, me) = (self.o, self.comm.context(), self.me());
        let shape = Shape::new(o, me, &self.ours, layout.bytes);
        let params = Params {
            qp: self.descriptor.addr(),
            result: self.result.addr(),
            src: self.source.as_ref().map_or(0, Memory::addr),
            stride: layout.stride(),
            bytes: layout.bytes,
            slice: shape.slice,
            first: self.first,
            warmup,
            rounds,
            messages: if self.source.is_some() { o.messages } else { 0 },
            places: layout.places,
            batch: shape.batch,
            senders: shape.senders,
            peer_senders: Shape::new(o, 1 - me, &self.theirs, layout.bytes).senders,
            lkey: self.sends_from.as_ref().map_or(0, Region::key),
            rkey: self.theirs.rkey,
            answers: (me == 1 && o.kind != Kind::Bidirectional) as u32,
            flushes: (o.kind == Kind::Bidirectional) as u32,
            pad: 0,
        };
        self.first += warmup + rounds;
        let launch = Launch::new(shape.senders, shape.threads(o, context.device() == "cuda")).cooperating();
        // SAFETY: buffers and queue pair outlive the kernel, which is waited for, and
        // while it runs nothing else touches the messages.
        let running = unsafe { context.launch(&self.stream, &self.module, "osu_exchange", launch, &params)? };
        // As long as it takes: every wait in it ends, and their number is known.
        while context.wait(&running, Some(Duration::from_secs(60)))? == WaitOutcome::TimedOut {}
        // Of both: a call to the driver may wait for a kernel, which waits for an engine,
        // which waits for the driver.
        self.comm.barrier()?;
        let mut words = vec![0; 16 * shape.senders as usize];
        self.result.copy_to_host_at(0, &mut words)?;
        let words: Vec<u64> =
            words.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().expect("eight bytes"))).collect();
        if let Some(code) = words.iter().step_by(2).find(|code| **code != 0) {
            self.qp.check().with_context(|| hint(o, me))?;
            bail!("rank {me}: the exchange of {} bytes ended with: {}", layout.bytes, status_name(*code));
        }
        // The slowest block's: the first may have ended while others still sent.
        Ok(words.into_iter().skip(1).step_by(2).max().expect("there is a block"))
    }

    /// Runs a pass whose payload is a pattern of that pass, and compares every byte that arrives.
    fn checked(&mut self, layout: Layout, pass: u8, counts: [u64; 2]) -> Result<(u64, Option<Wrong>)> {
        let mut bytes = vec![0; layout.len() as usize];
        let sent = Pattern { rank: self.comm.rank(), pass };
        let expected = Pattern { rank: 1 - self.comm.rank(), pass };
        if let Some(m) = &self.source {
            sent.fill(layout, &mut bytes);
            flip(&mut bytes, layout)?;
            m.write(&bytes)?;
        }
        if let Some(m) = &self.target {
            expected.clear(layout, &mut bytes);
            m.write(&bytes)?;
        }
        self.comm.barrier()?;
        let ns = self.exchange(layout, counts)?;
        let Some(m) = &self.target else { return Ok((ns, None)) };
        m.read(&mut bytes)?;
        Ok((ns, expected.check(layout, &bytes).err()))
    }

    /// One size: its nanoseconds, and what either rank found wrong.
    fn size(&mut self, bytes: u64) -> Result<(u64, Option<String>)> {
        let (layout, counts) = (layout(self.o, bytes), self.o.counts(bytes));
        if !self.o.validate {
            self.comm.barrier()?;
            return Ok((self.exchange(layout, counts)?, None));
        }
        let mut wrong = None;
        for pass in 0..PASSES {
            wrong = wrong.or(self.checked(layout, pass, [1, 0])?.1);
        }
        let (ns, last) = self.checked(layout, PASSES, counts)?;
        let wrong = wrong.or(last);
        let said = wrong.map_or(String::new(), |w| format!("{bytes} bytes, rank {} received {w}", self.me()));
        let mut said = self.comm.all_gather(said.as_bytes())?.into_iter();
        let wrong = said.find(|s| !s.is_empty());
        Ok((ns, wrong.map(|s| String::from_utf8_lossy(&s).into())))
    }
}

/// Where messages of a size lie. Unchecked, all of a window share one place, as there.
fn layout(o: &Options, bytes: u64) -> Layout {
    let one = Layout { bytes, places: 1 };
    let places = if o.validate { (CHECKED / one.stride()).clamp(1, o.messages as u64) } else { 1 };
    Layout { places: places as u32, ..one }
}

/// Runs one rank to the end. Returns what was wrong with the bytes, if anything; rank 0 has put that in
/// the table.
pub fn run(o: &Options, comm: &Comm, processes: u32) -> Result<Option<String>> {
    let mut rank = Rank::new(o, comm)?;
    let prints = comm.rank() == 0;
    if prints && !o.json {
        outln!("{}", table::header(o, comm, processes))?;
    }
    for &bytes in &o.sizes {
        let (ns, wrong) = rank.size(bytes)?;
        if prints {
            let valid = o.validate.then_some(wrong.is_none());
            outln!("{}", table::line(o, comm, &Line { bytes, ns, valid }))?;
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
        let at: u64 = at.parse().with_context(|| format!("{FLIP} is {at}, expected an offset"))?;
        if at < layout.bytes {
            messages[at as usize] ^= 1;
        }
    }
    Ok(())
}
