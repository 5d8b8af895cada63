//! The parts of a queue pair: the memory of both ends, regions, programs and the model before the run; an end's transport,
//! link and endpoint once the ends meet.

use std::sync::Arc;

use pushgate_core::rails::Rules;
use pushgate_core::recovery::Patience;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_driver_shim::{ShimError, eventfd};

use super::cluster::Cluster;
use super::flaky::{Control, Flaky};
use super::memory::{self, Guarded, SimulatedProcess};
use super::model::{Flow, Side};
use super::node::Node;
use super::plan::{Carrier, MS, Plan, Posts, QpPlan, S};
use super::program::{self, Facts, Program};
use super::qp::Qp;
use super::rails::{self, Wires};
use super::random::{Random, mix};
use crate::connect::{LocalMet, LocalOpening, Met, Opening, VerbsOpening};
use crate::endpoint::{Endpoint, QpOptions};
use crate::link::Link;
use crate::link::local::{LocalLink, Processes};
use crate::link::verbs::Config;
use crate::memory::{Mapped, Words};
use crate::producer::Producer;
use crate::region::RegionMemory;

/// Bytes of the region that a peer puts to.
const REGION: usize = 2048;
/// Limits of a rail's recovery.
const PATIENCE: Patience =
    Patience { attempt: 20 * MS, first_pause: MS, longest_pause: 50 * MS, whole: 10 * S };
/// A slot that is never published ends its queue pair after this time.
const STUCK: u64 = 3 * S;

pub(super) fn allocate(name: &str, bytes: usize) -> Result<SharedMemory, ShimError> {
    SharedMemory::builder(name, bytes).huge_pages(HugePages::Never).create()
}

/// The memory that a program makes for one call that sets its end up.
pub(super) struct Memory {
    geometry: Geometry,
    window: Arc<SharedMemory>,
    work: Mapped,
    control: Mapped,
}

impl Memory {
    fn new(geometry: Geometry) -> Self {
        let window = allocate("window", geometry.window_bytes());
        Memory {
            geometry,
            window: Arc::new(window.expect("memory for a window of the simulation")),
            work: Mapped::heap(geometry.work_bytes()),
            control: Mapped::heap(geometry.control_bytes()),
        }
    }

    /// What the checks read. Link and inbound payload come when the ends have met.
    fn side(&self, rank: u32, regions: &[Guarded; 2], buffer: usize) -> Side {
        let (g, control) = (&self.geometry, &self.control);
        Side {
            rank,
            geometry: self.geometry,
            line: Words::writable(control, abi::PUSHGATE_CTL_CREDIT as usize, 3),
            signals: Words::writable(control, abi::PUSHGATE_CTL_SIGNALS as usize, g.signals as usize),
            rx: Words::writable(control, g.control_rx_offset(), 8 << g.rx_log),
            link: None,
            inbound: 0,
            landing: control.address() + g.control_landing_offset(),
            buffers: regions[1].address(),
            buffer,
            region: regions[0].address(),
        }
    }

    fn producer(&self, bell: Option<eventfd::EventFd>) -> Producer {
        Producer::new(self.geometry, &self.work, &self.control, &self.window, bell)
    }
}

/// The bell that the programs of a node ring, if its engine can block.
fn bell_of(plan: &Plan, nodes: &[Node], node: usize) -> Option<eventfd::EventFd> {
    plan.nodes[node].doorbell.then(|| nodes[node].doorbell.try_clone().expect("a descriptor"))
}

/// Makes what a queue pair has before its ends meet.
pub(super) fn make(
    plan: &Plan,
    qp: &QpPlan,
    nodes: &[Node],
    qps: &mut Vec<Qp>,
    programs: &mut Vec<Program>,
    schedule: &dyn Fn(u64) -> Random,
) {
    let ranks = [qp.ends[0].rank, qp.ends[1].rank];
    let places = ranks.map(|rank| rank as usize);
    let mut random = Random::new(plan.seed, 30_000 + qp.number as u64);
    let memory = [0, 1].map(|end: usize| Memory::new(qp.ends[end].geometry));
    let (local, verbs) = (qp.carrier == Carrier::Local, matches!(qp.carrier, Carrier::Verbs { .. }));
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
    let sides = [0, 1].map(|end: usize| memory[end].side(ranks[end], &regions[end], buffer[end]));
    let controls = places.map(|node| {
        let truthful = nodes[node].truthful.clone();
        Arc::new(Control { truthful, ..Control::default() })
    });
    let seed = mix(plan.seed ^ (qp.number as u64) << 20) & !1;
    for end in [0, 1] {
        let (e, peer) = (&qp.ends[end], &qp.ends[1 - end]);
        let writes = !peer.device && peer.regions_written;
        let facts = Facts {
            plan: e.clone(),
            peer_posts: peer.posts,
            peer_signals: peer.geometry.signals,
            rkey: 0,
            region: REGION as u32,
            lkey: 0,
            region_sends: local || verbs && writes && peer.posts != Posts::Nothing,
            region_puts: local || writes,
            buffers: 0,
            buffer: buffer[end] as u32,
            longest_send: longest[end][0],
            longest_put: longest[end][1],
        };
        let source = Guarded::new(program::source_bytes(longest[end][0].max(longest[end][1])));
        memory::make_readable(source.address(), source.bytes());
        let producer = memory[end].producer(bell_of(plan, nodes, places[end]));
        let stream = 1_000 + 2 * qp.number as u64 + end as u64;
        programs.push(Program::new(facts, producer, source, seed | end as u64, schedule(stream)));
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
        memory,
        sides,
        flows,
        controls,
        key_seeds: [0, 1].map(|_| random.next() as u32),
        keys: [[0; 3]; 2],
        numbers: [0; 2],
        inboxes: [None; 2],
        regions,
        wires: match qp.carrier {
            Carrier::Rails { rails } => Some(Wires::new(rails, schedule(4_000 + qp.number as u64))),
            _ => None,
        },
        links: [None, None],
        started: false,
        excused: 0,
        expected: None,
        ended: [None; 2],
        dead: [false; 2],
        tainted: false,
        lied_in_set_up: false,
        finished: false,
    });
}

impl Cluster<'_> {
    /// An end's program calls again: nothing of its earlier call is used.
    pub(super) fn make_anew(&mut self, qp: usize, end: usize) {
        let q = &mut self.qps[qp];
        q.memory[end] = Memory::new(q.memory[end].geometry);
        q.sides[end] = q.memory[end].side(q.ranks[end], &q.regions[end], q.sides[end].buffer);
        let bell = bell_of(&self.plan, &self.nodes, q.nodes[end]);
        self.programs[2 * qp + end].producer = q.memory[end].producer(bell);
    }

    /// Opens an end's transport.
    pub(super) fn open(&self, qp: usize, end: usize) -> Opening {
        let (q, e) = (&self.qps[qp], &self.plan.qps[qp].ends[end]);
        let (window, posted_receives) = (q.memory[end].window.clone(), e.posts != Posts::Nothing);
        let Carrier::Verbs { imm } = q.carrier else {
            let link = allocate("link", e.geometry.link_bytes()).expect("memory for a link segment");
            write_header(&link, Segment::Link, &e.geometry).expect("a segment of this geometry");
            let rings = self.plan.nodes[q.nodes[end]].doorbell;
            let bells = rings.then(|| bell::pair().expect("a pair of sockets"));
            return Opening::Local(LocalOpening::new(Arc::new(link), window, posted_receives, bells));
        };
        let config = Config { imm, posted_receives, regions_written: e.regions_written, ..Config::default() };
        let opening = VerbsOpening::new(&self.nic.device, &config, e.geometry, window, &mut allocate);
        Opening::Verbs(Box::new(opening.expect("a queue pair of the simulated device")))
    }

    /// Makes the endpoint of an end that has met the other. A sentence if what the other end handed over does not fit.
    pub(super) fn join(&mut self, qp: usize, end: usize, met: Met) -> Result<Endpoint, String> {
        let plan = &self.plan.qps[qp];
        let (e, q) = (&plan.ends[end], &mut self.qps[qp]);
        let (link, peer_geometry): (Box<dyn Link>, Geometry) = match met {
            Met::Local(met) if let Some(wires) = &q.wires => {
                let peer = met.peer.geometry;
                let (window, mirror) = (&q.memory[end].window, Mapped::heap(peer.window_bytes()));
                q.sides[end].inbound = mirror.address();
                let options = rails::Options {
                    rules: Rules { window_log: e.geometry.link_log, shortest: 64 },
                    peer_window_log: peer.link_log,
                    patience: PATIENCE,
                    peer_posts: plan.ends[1 - end].posts != Posts::Nothing,
                    ranks: [q.ranks[end], q.ranks[1 - end]],
                };
                let (memory, time) = ((window.into(), mirror), self.nodes[q.nodes[end]].time.clone());
                let rails = rails::join(wires, end, memory, e.regions_written, options, time);
                (Box::new(rails), peer)
            }
            Met::Local(met) => {
                let LocalMet { link, bell, peer } = *met;
                let [own, theirs, window] =
                    [Mapped::from(link), Mapped::from(peer.link), Mapped::from(peer.window)];
                if window.bytes() < peer.geometry.window_bytes() {
                    return Err(format!("a window of {} bytes", window.bytes()));
                }
                memory::make_readable(own.address(), own.bytes());
                let side = &mut q.sides[end];
                side.link = Some(Words::writable(&own, abi::PUSHGATE_LINK_RECEIVED as usize, 4));
                side.inbound = window.address();
                let processes = Processes { peer: Some(Box::new(SimulatedProcess)), in_program: true };
                let (geometry, bells) = (&peer.geometry, (bell, peer.bell));
                let link = LocalLink::new(&own, &e.geometry, &theirs, geometry, window, bells, processes);
                q.links[end] = Some(own);
                (Box::new(link), peer.geometry)
            }
            Met::Verbs(met) => {
                q.numbers[end] = met.link.number();
                q.inboxes[end] = Some(met.link.inbox());
                q.sides[end].inbound = met.mirror.as_ptr().as_ptr() as usize;
                (Box::new(met.link), met.peer_geometry)
            }
        };
        let options = QpOptions {
            peer: q.ranks[1 - end],
            posted_receives: e.posts != Posts::Nothing,
            reader_flushes: false,
            stuck_ns: STUCK,
            in_place_share: e.in_place_share,
            slow_ns: e.slow_ns,
            ungated: false,
            key_seed: q.key_seeds[end],
        };
        let local = q.carrier == Carrier::Local;
        let (link, m) = (Box::new(Flaky::new(link, q.controls[end].clone(), !local)), &q.memory[end]);
        let endpoint = Endpoint::new(&m.work, &m.control, e.geometry, peer_geometry, link, options);
        let told = self.broken.clone();
        let tell =
            Box::new(move |status| told.lock().unwrap_or_else(|e| e.into_inner()).push((qp, end, status)));
        let mut endpoint = endpoint.expect("an endpoint of the simulation").with_broken(tell);
        if e.copies {
            endpoint = endpoint.with_inbound_copied();
        }
        let region = |memory: &Guarded, device: bool| match device {
            true => RegionMemory::Device { address: memory.address() as u64, exported: None },
            false => RegionMemory::Host { address: memory.address(), keep: None },
        };
        let ([put, buffers], source) = (&q.regions[end], &self.programs[2 * qp + end].source);
        let all = [region(put, e.device), region(buffers, e.device), region(source, false)];
        let bytes = [put.bytes(), buffers.bytes(), source.bytes()];
        q.keys[end] = std::array::from_fn(|i| {
            endpoint.add_region(all[i].clone(), bytes[i] as u64).expect("few regions")
        });
        Ok(endpoint)
    }
}
