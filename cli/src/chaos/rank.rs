//! A rank: a kernel with a block for each peer, and a loop that takes orders and says how far the kernel is.

use std::collections::BTreeMap;
use std::io::BufRead as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use pushgate::settings::{DeviceChoice, ProxyPlace};
use pushgate::zerocopy::{Immutable, IntoBytes};
use pushgate::{
    Comm, Context, Error, Launch, Module, QpConfig, QueuePair, Shared, status_name, upload_descriptors,
};

use super::Options;
use super::children::{Cause, Order, Said, Traffic};
use super::names::{SEED, job, proxy_socket};
use crate::output::outln;

/// For tests: rank 0's kernel leaves a message out (`lost`), sends one twice (`doubled`), or with a wrong bit (`wrong`), or stops
/// sending (`hung`).
const PLANT: &str = "_PUSHGATE_CHAOS_PLANT";

/// Receives of a queue pair: few, so that few messages can be under way when a link breaks.
pub const RECEIVES: u64 = 16;
/// How often a rank says how far its kernel is.
const SAY: Duration = Duration::from_millis(20);
/// How long the loop sleeps: while a break is measured, and else.
const LOOK: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(2)];

/// Bytes of each block's words, which the kernel shares with the host.
const BLOCK: usize = 16 * 8;
// Words of a block, as in chaos.cu.
const ORDER: usize = 0;
const STATUS: usize = 1;
const SENT: usize = 8;
const TAKEN: usize = 9;
const LOST: usize = 10;
const DOUBLED: usize = 11;
const WRONG: usize = 12;
// Values of ORDER.
const FINISH: u64 = 1;
const LEAVE: u64 = 2;

/// `struct chaos_params` of the kernel.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Params {
    qps: u64,
    words: u64,
    seed: u64,
    limit_ns: u64,
    rank: u32,
    plant: u32,
}

/// A break whose recovery is measured.
struct Measured {
    id: u64,
    block: usize,
    begin: Instant,
    /// The kernel has taken more than this when a message came that had no receive credit at the break.
    beyond: u64,
}

/// The queue pairs of a rank, in the order of the kernel's blocks, and the words of those.
struct Ends {
    qps: Vec<QueuePair>,
    words: Shared,
}

impl Ends {
    fn words(&self, block: usize) -> &[AtomicU64] {
        self.words.words(block * BLOCK, BLOCK / 8)
    }

    fn word(&self, block: usize, word: usize) -> u64 {
        self.words(block)[word].load(Ordering::Acquire)
    }

    fn order(&self, order: u64) {
        (0..self.qps.len()).for_each(|block| self.words(block)[ORDER].store(order, Ordering::Release));
    }

    fn traffic(&self) -> Vec<Traffic> {
        let of = |(block, qp): (usize, &QueuePair)| Traffic {
            peer: qp.peer(),
            sent: self.word(block, SENT),
            taken: self.word(block, TAKEN),
            lost: self.word(block, LOST),
            doubled: self.word(block, DOUBLED),
            wrong: self.word(block, WRONG),
        };
        self.qps.iter().enumerate().map(of).collect()
    }

    /// The first queue pair that has ended and whose block has ended too.
    fn ended(&self) -> Option<Said> {
        self.qps.iter().enumerate().find_map(|(block, qp)| {
            let e = qp.check().err()?;
            let status = self.word(block, STATUS).checked_sub(1)?;
            let cause = match &e {
                Error::PeerLost { rank } => Cause::Lost(*rank),
                Error::Aborted { rank } => Cause::Aborted(*rank),
                _ => Cause::Other,
            };
            let status = status_name(status).to_string();
            Some(Said::Ended { peer: qp.peer(), cause, why: e.to_string(), status })
        })
    }
}

fn say(said: &Said) -> Result<()> {
    Ok(outln!("{}", serde_json::to_string(said)?)?)
}

/// The orders, as they come on standard input. Disconnected when the supervisor has gone.
fn orders() -> Receiver<Order> {
    let (to, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let sent = serde_json::from_str(&line).map(|order| to.send(order));
            if !matches!(sent, Ok(Ok(()))) {
                return;
            }
        }
    });
    orders
}

fn planted(rank: u32) -> Result<u32> {
    let Ok(name) = std::env::var(PLANT) else { return Ok(0) };
    let faults = ["lost", "doubled", "wrong", "hung"];
    let fault = faults.iter().position(|fault| *fault == name);
    let fault = fault.with_context(|| format!("{PLANT} is {name}, expected one of {faults:?}"))?;
    Ok(if rank == 0 { fault as u32 + 1 } else { 0 })
}

/// Checks that all ranks were given the same: the contents of messages follow from the seed, and all stop sending at once.
fn same_everywhere(comm: &Comm, given: &str) -> Result<()> {
    let all = comm.all_gather(given.as_bytes())?;
    if let Some((rank, other)) = all.iter().enumerate().find(|(_, other)| *other != given.as_bytes()) {
        let other = String::from_utf8_lossy(other);
        bail!("rank {} was given {given}, rank {rank} {other}: give all hosts the same", comm.rank());
    }
    Ok(())
}

/// Waits until all ranks are here, however long a fault keeps one of them: the supervisor bounds this process's life.
fn all_here(comm: &Comm) -> Result<(), Error> {
    loop {
        match comm.barrier() {
            Err(Error::TimedOut { .. }) => {}
            done => return done,
        }
    }
}

/// Tells all ranks what this one has counted, and returns what each rank has.
fn exchanged(comm: &Comm, own: &[Traffic]) -> Result<BTreeMap<u32, Vec<Traffic>>> {
    let all = comm.all_gather(&serde_json::to_vec(own)?)?;
    // A rank that others no longer wait for may end. The last ones to go find that the first ones have.
    match comm.barrier() {
        Ok(()) | Err(Error::PeerLost { .. }) => {}
        Err(e) => return Err(e.into()),
    }
    let ranks = all.iter().zip(0..).map(|(one, rank)| Ok((rank, serde_json::from_slice(one)?)));
    ranks.collect()
}

/// Runs as rank `rank` of the start `number` of the supervisor `parent`, until the supervisor ends this process.
pub fn run(o: &Options, rank: u32, parent: u32, number: u32) -> Result<()> {
    let seed = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(o.seed);
    let mut settings = o.settings.clone();
    if settings.proxy == ProxyPlace::Process {
        settings.set("proxy_socket", &proxy_socket(parent, number))?;
    }
    if let Some(names) = o.ib_devs.get(rank as usize) {
        settings.set("ib_dev", names)?;
    }
    let devices = match (settings.device, pushgate::probe_cuda()) {
        (DeviceChoice::Cpu, _) | (_, Err(_)) => 1,
        (_, Ok(info)) => info.devices,
    };
    let builder = Context::builder().settings(settings);
    let (context, comm);
    if let Some(membership) = &o.membership {
        context = builder.for_rank(membership).build()?;
        comm = Comm::join(&context, membership)?;
    } else {
        let builder = builder.device_index(rank % devices.max(1)).share(rank as usize, o.ranks as usize);
        context = builder.build()?;
        comm = Comm::connect(&context, &job(parent, number), rank, o.ranks)?;
    }
    same_everywhere(&comm, &format!("--seconds {} --seed {seed}", o.seconds))?;
    let peers: Vec<(u32, u32)> = (0..o.ranks).filter(|peer| *peer != rank).map(|peer| (peer, 0)).collect();
    let config = QpConfig {
        window_size: Some(16 << 10),
        slots: Some(64),
        receives: Some(RECEIVES),
        ..Default::default()
    };
    let mut qps = comm.queue_pairs(&peers, config)?;
    qps.sort_by_key(QueuePair::peer);
    // Each next link registers it again. No message goes there.
    let region = o.region.map(|bytes| context.shared("chaos region", bytes as usize)).transpose()?;
    let registered = region.iter().flat_map(|memory| qps.iter().map(|qp| qp.register_shared(memory)));
    let _registered = registered.collect::<pushgate::Result<Vec<_>>>()?;
    let ends = Ends { words: context.shared("chaos", qps.len() * BLOCK)?, qps };
    let descriptors = upload_descriptors(&context, &ends.qps)?;
    let params = Params {
        qps: descriptors.addr(),
        words: ends.words.device_addr(),
        seed,
        // Far after the run's end: the kernel ends though nobody is left to tell it to.
        limit_ns: (2 * o.seconds as u64 + 600) * 1_000_000_000,
        rank,
        plant: planted(rank)?,
    };
    let (module, stream) = (Module::embedded(&context), context.stream()?);
    comm.barrier()?;
    let launch = Launch::new(ends.qps.len() as u32, 1).cooperating();
    // SAFETY: what `params` names is dropped after `running`, whose drop waits for the kernel.
    let running = unsafe { context.launch(&stream, &module, "chaos", launch, &params)? };
    let done = say(&Said::Ready).and_then(|()| serve(&comm, &context, &ends, || Ok(running.is_done()?)));
    ends.order(LEAVE);
    done
}

/// Takes orders and says how far the kernel is, until the supervisor goes.
fn serve(comm: &Comm, context: &Context, ends: &Ends, is_done: impl Fn() -> Result<bool>) -> Result<()> {
    let orders = orders();
    let mut measured: Vec<Measured> = Vec::new();
    let (mut last, mut links, mut finishing, mut told) = (Instant::now(), 0, false, false);
    loop {
        match orders.recv_timeout(LOOK[measured.is_empty() as usize]) {
            Ok(Order::Break { peer, id }) => {
                let block = ends.qps.iter().position(|qp| qp.peer() == peer);
                let block = block.with_context(|| format!("there is no rank {peer}"))?;
                let begin = Instant::now();
                // A queue pair that ends with its link is seen below.
                ends.qps[block].break_link()?;
                // What the peer may send without another credit could have arrived before the break.
                let beyond = ends.word(block, TAKEN) + RECEIVES;
                measured.push(Measured { id, block, begin, beyond });
            }
            Ok(Order::Cut { peer }) => comm.cut(peer)?,
            Ok(Order::Hold { peer, time }) => comm.hold(peer, time)?,
            Ok(Order::Abort) => comm.abort(),
            Ok(Order::Finish) => {
                // A rank in the middle of a fault waits for messages of this one.
                all_here(comm)?;
                ends.order(FINISH);
                finishing = true;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        let mut back = Vec::new();
        measured.retain(|m| {
            let waits = ends.word(m.block, TAKEN) <= m.beyond;
            if !waits {
                back.push(Said::Back { id: m.id, ns: m.begin.elapsed().as_nanos() as u64 });
            }
            waits
        });
        back.iter().try_for_each(say)?;
        if last.elapsed() >= SAY {
            last = Instant::now();
            // A kernel that a fault of the device ended is an error here, and stores no status.
            is_done()?;
            links = context.counters().map_or(links, |counters| counters.recovered);
            say(&Said::Moved { links, traffic: ends.traffic() })?;
        }
        if told {
            continue;
        }
        if let Some(ended) = ends.ended() {
            say(&Said::Moved { links, traffic: ends.traffic() })?;
            say(&ended)?;
            told = true;
        } else if finishing && is_done()? {
            let statuses = (0..ends.qps.len()).map(|block| ends.word(block, STATUS));
            if statuses.into_iter().all(|status| status == 1) {
                say(&Said::Moved { links, traffic: ends.traffic() })?;
                say(&Said::Done { all: exchanged(comm, &ends.traffic())? })?;
                told = true;
            }
        }
    }
}
