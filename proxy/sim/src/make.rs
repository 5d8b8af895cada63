//! The parts of a queue pair before its ends meet: the memory of both ends, regions, programs and the model.

use std::sync::Arc;

use pushgate_link_tcp::simulated::Net;

use super::flaky::Control;
use super::memory::{self, Guarded};
use super::model::Flow;
use super::node::Node;
use super::plan::{Carrier, Plan, Posts, QpPlan};
use super::program::{self, Facts, Program};
use super::qp::{Memory, Qp};
use super::rails::Wires;
use super::random::{Random, mix};

/// Bytes of the region that a peer puts to.
const REGION: usize = 2048;

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
    let tcp = matches!(qp.carrier, Carrier::Tcp { .. });
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
        let writes = !peer.device && (peer.regions_written || tcp);
        let facts = Facts {
            plan: e.clone(),
            peer_posts: peer.posts,
            peer_signals: peer.geometry.signals,
            rkey: 0,
            region: REGION as u32,
            lkey: 0,
            region_sends: local || (verbs || tcp) && writes && peer.posts != Posts::Nothing,
            region_puts: local || writes,
            buffers: 0,
            buffer: buffer[end] as u32,
            longest_send: longest[end][0],
            longest_put: longest[end][1],
        };
        let source = Guarded::new(program::source_bytes(longest[end][0].max(longest[end][1])));
        memory::make_readable(source.address(), source.bytes());
        let producer = memory[end].producer(nodes[places[end]].bell());
        let stream = 1_000 + 2 * qp.number as u64 + end as u64;
        programs.push(Program::new(facts, producer, source, seed | end as u64, schedule(stream)));
    }
    let flows = [0, 1].map(|end: usize| {
        let (e, peer) = (&qp.ends[end], &qp.ends[1 - end]);
        let name = format!("queue pair {}, rank {} to rank {}", qp.number, ranks[end], ranks[1 - end]);
        let id = (2 * qp.number + end as u32) as u16;
        let signals = peer.geometry.signals as usize;
        let posts = peer.posts != Posts::Nothing;
        let mut flow = Flow::new(id, name, e.geometry, e.messages as usize, signals, REGION, posts);
        flow.bytewise = tcp;
        if let Carrier::Tcp { ahead, .. } = qp.carrier {
            flow.ahead = u64::from(ahead).min(1 << peer.geometry.rx_log);
        }
        flow
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
        mailboxes: Default::default(),
        key_seeds: [0, 1].map(|_| random.next() as u32),
        keys: [[0; 3]; 2],
        numbers: [0; 2],
        inboxes: [None; 2],
        regions,
        wires: match qp.carrier {
            Carrier::Rails { rails } => Some(Wires::new(rails, schedule(4_000 + qp.number as u64))),
            _ => None,
        },
        net: tcp.then(|| Net::new(schedule(5_000 + qp.number as u64), None)),
        links: [None, None],
        first_links: [None, None],
        started: false,
        excused: 0,
        expected: None,
        ended: [None; 2],
        dead: [false; 2],
        lost: [false; 2],
        kept: [None, None],
        tainted: false,
        lied_in_set_up: false,
        finished: false,
    });
}
