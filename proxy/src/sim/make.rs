//! How a queue pair of a cluster is made: the memory of both ends, the links over it, endpoints, producers and the model.

use std::sync::Arc;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::segment::Geometry;

use super::cluster::Broken;
use super::flaky::{Control, Flaky};
use super::memory::{self, Guarded, SimulatedProcess};
use super::model::{Flow, Side};
use super::node::Node;
use super::plan::{Carrier, Plan, Posts, QpPlan, S};
use super::program::{self, Facts, Program};
use super::qp::{Inbox, Qp};
use super::random::{Random, mix};
use crate::endpoint::{Endpoint, QpOptions};
use crate::link::Link;
use crate::link::local::{LocalLink, Processes};
use crate::link::verbs::simulated::Sim;
use crate::link::verbs::{Config, Half};
use crate::memory::{Mapped, Words};
use crate::producer::Producer;
use crate::region::RegionMemory;

/// Bytes of the region that a peer puts to.
const REGION: usize = 2048;
/// A slot that is never published ends its queue pair after this time.
const STUCK: u64 = 3 * S;

fn allocate(name: &str, bytes: usize) -> Result<SharedMemory, ShimError> {
    SharedMemory::builder(name, bytes).huge_pages(HugePages::Never).create()
}

/// The memory of one end, before the link is made.
struct Memory {
    geometry: Geometry,
    window: Mapped,
    shared_window: Option<Arc<SharedMemory>>,
    work: Mapped,
    control: Mapped,
    link: Option<Mapped>,
}

impl Memory {
    fn new(geometry: Geometry, carrier: Carrier) -> Self {
        let local = carrier == Carrier::Local;
        let shared = (!local).then(|| {
            Arc::new(
                allocate("window", geometry.window_bytes()).expect("memory for a window of the simulation"),
            )
        });
        let link = local.then(|| {
            let link = Mapped::heap(geometry.link_bytes());
            memory::make_readable(link.address(), link.bytes());
            link
        });
        Memory {
            geometry,
            window: shared.as_ref().map_or_else(|| Mapped::heap(geometry.window_bytes()), Into::into),
            shared_window: shared,
            work: Mapped::heap(geometry.work_bytes()),
            control: Mapped::heap(geometry.control_bytes()),
            link,
        }
    }

    fn side(&self, rank: u32, inbound: usize, regions: &[Guarded; 2], buffer: usize) -> Side {
        let (g, control) = (&self.geometry, &self.control);
        Side {
            rank,
            geometry: self.geometry,
            line: Words::writable(control, abi::PUSHGATE_CTL_CREDIT as usize, 3),
            signals: Words::writable(control, abi::PUSHGATE_CTL_SIGNALS as usize, g.signals as usize),
            rx: Words::writable(control, g.control_rx_offset(), 8 << g.rx_log),
            link: self
                .link
                .as_ref()
                .map(|link| Words::writable(link, abi::PUSHGATE_LINK_RECEIVED as usize, 4)),
            inbound,
            landing: control.address() + g.control_landing_offset(),
            buffers: regions[1].address(),
            buffer,
            region: regions[0].address(),
        }
    }
}

/// What both links of a queue pair are made of.
struct Links {
    links: [Box<dyn Link>; 2],
    numbers: [u32; 2],
    /// Over `verbs`, where what the peer may write at each end lies, and its parts.
    inboxes: [Option<Inbox>; 2],
    /// Where each end reads payload of its peer's window, and what keeps that in place.
    inbound: [usize; 2],
}

fn local_links(memory: &[Memory; 2], doorbells: [bool; 2]) -> Links {
    let pairs = doorbells.map(|rings| rings.then(|| bell::pair().expect("a pair of sockets")));
    let [first, second] =
        pairs.map(|pair| pair.map_or((None, None), |(bell, ringer)| (Some(bell), Some(ringer))));
    let ((bell_a, rings_a), (bell_b, rings_b)) = (first, second);
    let link = |own: usize, bells| {
        let (m, p) = (&memory[own], &memory[1 - own]);
        let segments = [m, p].map(|m| m.link.as_ref().expect("`local` has link segments"));
        let processes = Processes { peer: Some(Box::new(SimulatedProcess)), in_program: true };
        let window = p.window.clone();
        let [own, peer] = segments;
        let link = LocalLink::new(own, &m.geometry, peer, &p.geometry, window, bells, processes);
        Box::new(link) as Box<dyn Link>
    };
    Links {
        links: [link(0, (bell_a, rings_b)), link(1, (bell_b, rings_a))],
        numbers: [0; 2],
        inboxes: [None; 2],
        inbound: [memory[1].window.address(), memory[0].window.address()],
    }
}

fn verbs_links(nic: &Sim, plan: &QpPlan, memory: &[Memory; 2], imm: bool) -> Links {
    let [a, b] = [0, 1].map(|end| {
        let e = &plan.ends[end];
        let config = Config {
            imm,
            posted_receives: e.posts != Posts::Nothing,
            regions_written: e.regions_written,
            ..Config::default()
        };
        let window = memory[end].shared_window.clone().expect("`verbs` has shared windows");
        Half::new(&nic.device, &config, e.geometry, window, &mut allocate)
            .expect("a queue pair of the simulated device")
    });
    let [first, second] = [a.offer(), b.offer()];
    let ranks = [plan.ends[0].rank, plan.ends[1].rank];
    let a = a.accept(ranks[1], &second, &mut allocate).expect("an offer of the simulation");
    let b = b.accept(ranks[0], &first, &mut allocate).expect("an offer of the simulation");
    let inbound = [&a, &b].map(|end| end.mirror().as_ptr().as_ptr() as usize);
    let inboxes = [a.inbox(), b.inbox()].map(Some);
    let [to_b, to_a] = [a.places(), b.places()];
    let [a, b] = [a.join(to_a), b.join(to_b)].map(|link| link.expect("places of the simulation"));
    let numbers = [a.number(), b.number()];
    Links { links: [Box::new(a), Box::new(b)], numbers, inboxes, inbound }
}

/// Makes one queue pair.
#[allow(clippy::too_many_arguments)]
pub(super) fn make(
    plan: &Plan,
    qp: &QpPlan,
    nic: &Sim,
    nodes: &mut [Node],
    qps: &mut Vec<Qp>,
    programs: &mut Vec<Program>,
    told: &Broken,
    schedule: &dyn Fn(u64) -> Random,
) {
    let at = qps.len();
    let ranks = [qp.ends[0].rank, qp.ends[1].rank];
    let places = ranks.map(|rank| rank as usize);
    let mut random = Random::new(plan.seed, 30_000 + qp.number as u64);
    let memory = [0, 1].map(|end: usize| Memory::new(qp.ends[end].geometry, qp.carrier));
    let links = match qp.carrier {
        Carrier::Local => local_links(&memory, places.map(|rank| plan.nodes[rank].doorbell)),
        Carrier::Verbs { imm } => verbs_links(nic, qp, &memory, imm),
    };
    let local = qp.carrier == Carrier::Local;
    // Longest payload of each end's SENDs and PUTs.
    let longest = [0, 1].map(|end: usize| {
        let (own, peer) = (&qp.ends[end], &qp.ends[1 - end]);
        let window = 64u32 << own.geometry.window_log;
        let room = match peer.posts {
            Posts::Nothing => 64 << peer.geometry.landing_log,
            _ => 2048,
        };
        [own.longest.min(window).min(room), own.longest.min(window).min(REGION as u32)]
    });
    let buffer = [0, 1].map(|end: usize| (longest[1 - end][0] as usize).next_multiple_of(8).max(8));
    let regions = [0, 1].map(|end: usize| {
        let buffers = buffer[end] << qp.ends[end].geometry.rx_log;
        [Guarded::new(REGION), Guarded::new(buffers)]
    });
    let sources = [0, 1].map(|end: usize| {
        let source = Guarded::new(program::source_bytes(longest[end][0].max(longest[end][1])));
        memory::make_readable(source.address(), source.bytes());
        source
    });
    let sides =
        [0, 1].map(|end: usize| memory[end].side(ranks[end], links.inbound[end], &regions[end], buffer[end]));
    let controls = places.map(|node| {
        let truthful = nodes[node].truthful.clone();
        Arc::new(Control { truthful, ..Control::default() })
    });
    let mut both = links.links.into_iter();
    let mut keys = [[0; 3]; 2];
    let mut endpoints = [0, 1].map(|end: usize| {
        let (e, peer) = (&qp.ends[end], &qp.ends[1 - end]);
        let options = QpOptions {
            peer: ranks[1 - end],
            posted_receives: e.posts != Posts::Nothing,
            reader_flushes: false,
            stuck_ns: STUCK,
            in_place_share: e.in_place_share,
            slow_ns: e.slow_ns,
            ungated: false,
            key_seed: random.next() as u32,
        };
        let link = Box::new(Flaky::new(both.next().expect("two"), controls[end].clone(), !local));
        let m = &memory[end];
        let endpoint = Endpoint::new(&m.work, &m.control, e.geometry, peer.geometry, link, options);
        let told = told.clone();
        let tell =
            Box::new(move |status| told.lock().unwrap_or_else(|e| e.into_inner()).push((at, end, status)));
        let mut endpoint = endpoint.expect("an endpoint of the simulation").with_broken(tell);
        if e.copies {
            endpoint = endpoint.with_inbound_copied();
        }
        let region = |memory: &Guarded, device: bool| match device {
            true => RegionMemory::Device { address: memory.address() as u64, exported: None },
            false => RegionMemory::Host { address: memory.address(), keep: None },
        };
        let [put, buffers] = &regions[end];
        let all = [region(put, e.device), region(buffers, e.device), region(&sources[end], false)];
        let bytes = [put.bytes(), buffers.bytes(), sources[end].bytes()];
        keys[end] = std::array::from_fn(|i| {
            endpoint.add_region(all[i].clone(), bytes[i] as u64).expect("few regions")
        });
        endpoint
    });
    // A program has the key of a region when the peer knows of the region.
    while !endpoints.iter().all(Endpoint::regions_told) {
        endpoints.iter_mut().for_each(|e| _ = e.poll(&mut None));
        while nic.complete(0) {}
    }
    let seed = mix(plan.seed ^ (qp.number as u64) << 20) & !1;
    for (end, (endpoint, source)) in endpoints.into_iter().zip(sources).enumerate() {
        let (e, peer) = (&qp.ends[end], &qp.ends[1 - end]);
        let m = &memory[end];
        let writes = !peer.device && peer.regions_written;
        let facts = Facts {
            plan: e.clone(),
            peer_posts: peer.posts,
            peer_signals: peer.geometry.signals,
            rkey: keys[1 - end][0],
            region: REGION as u32,
            lkey: keys[end][2],
            region_sends: local || writes && peer.posts != Posts::Nothing,
            region_puts: local || writes,
            buffers: keys[end][1],
            buffer: buffer[end] as u32,
            longest_send: longest[end][0],
            longest_put: longest[end][1],
        };
        let node = &mut nodes[places[end]];
        let bell = plan.nodes[places[end]].doorbell.then(|| node.doorbell.try_clone().expect("a descriptor"));
        let producer = Producer::new(e.geometry, &m.work, &m.control, &m.window, bell);
        let stream = 1_000 + 2 * qp.number as u64 + end as u64;
        programs.push(Program::new(facts, producer, source, seed | end as u64, schedule(stream)));
        node.add(endpoint, at, end, places[1 - end]);
    }
    let flows = [0, 1].map(|end: usize| {
        let (e, peer) = (&qp.ends[end], &qp.ends[1 - end]);
        let name = format!("queue pair {}, rank {} to rank {}", qp.number, ranks[end], ranks[1 - end]);
        let id = (2 * qp.number + end as u32) as u16;
        let signals = peer.geometry.signals as usize;
        Flow::new(id, name, e.geometry, e.messages as usize, signals, REGION, peer.posts != Posts::Nothing)
    });
    qps.push(Qp {
        number: qp.number,
        carrier: qp.carrier,
        ranks,
        nodes: places,
        sides,
        flows,
        controls,
        numbers: links.numbers,
        inboxes: links.inboxes,
        regions,
        links: memory.map(|m| m.link),
        expected: None,
        ended: [None; 2],
        dead: [false; 2],
        tainted: false,
        finished: false,
    });
}
