//! The simulator's loop: takes the next event and does what follows from it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::network::{Class, Input, Node, Tlp, Wire};
use super::split::{self, Piece};
use super::{Kind, Load, Machine, Outcome, Picoseconds};
use crate::link::PAGE;

#[derive(Debug, Clone, Copy)]
enum Event {
    /// Something at a node may have become able to go.
    Look(usize),
    /// A TLP left a buffer at the far end of a wire.
    Credit(usize, Tlp),
    /// A TLP has arrived completely.
    Arrive(Tlp),
    /// A target has the data that a request asked for.
    Answer(Tlp),
}

struct Scheduled {
    at: Picoseconds,
    order: u64,
    event: Event,
}

// Earliest first, then in the order in which they were made, so that every run is the same.
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Scheduled {}

struct Requester {
    pieces: Box<dyn Iterator<Item = Piece>>,
    next: Option<Piece>,
    /// The time from which it may issue again.
    free: Picoseconds,
    tags: u32,
    /// Bytes of room taken, MRRS for every request.
    outstanding: u64,
    arrived: u64,
    done: Picoseconds,
}

/// How many requesters and hops there are. Nodes are numbered from the requesters over the hops to
/// the targets.
#[derive(Clone, Copy)]
struct Shape {
    requesters: usize,
    hops: usize,
}

impl Shape {
    fn is_hop(self, node: usize) -> bool {
        (self.requesters..self.first_target()).contains(&node)
    }

    fn first_target(self) -> usize {
        self.requesters + self.hops
    }

    /// The node after `node` on a TLP's way.
    fn next(self, node: usize, tlp: &Tlp) -> usize {
        let (first, last) = (self.requesters, self.first_target() - 1);
        match (tlp.up, self.is_hop(node)) {
            (true, false) if self.hops > 0 => first,
            (true, true) if node < last => node + 1,
            (true, _) => self.first_target() + tlp.target as usize,
            (false, false) if self.hops > 0 => last,
            (false, true) if node > first => node - 1,
            (false, _) => tlp.requester as usize,
        }
    }
}

pub(super) struct Engine<'a> {
    machine: &'a Machine,
    load: &'a Load,
    shape: Shape,
    now: Picoseconds,
    order: u64,
    heap: BinaryHeap<Reverse<Scheduled>>,
    wires: Vec<Wire>,
    nodes: Vec<Node>,
    requesters: Vec<Requester>,
    random: u64,
    /// Bytes of data that have arrived, and the times at which a quarter and three quarters had
    /// arrived.
    arrived: u64,
    quarters: [Option<(Picoseconds, u64)>; 2],
    data_tlps: u64,
    data_wire: u64,
    delay: (Picoseconds, Picoseconds),
    most_queued: usize,
}

fn picoseconds(ns: f64) -> Picoseconds {
    (ns * 1000.0).round() as Picoseconds
}

fn nanoseconds(ps: Picoseconds) -> f64 {
    ps as f64 / 1000.0
}

impl<'a> Engine<'a> {
    pub fn new(machine: &'a Machine, load: &'a Load) -> Self {
        let (r, h, t) = (machine.requesters as usize, machine.hops.len(), machine.targets as usize);
        let shape = Shape { requesters: r, hops: h };
        let mut nodes: Vec<Node> = (0..r + h + t).map(|_| Node::default()).collect();
        for (i, ns) in machine.hops.iter().enumerate() {
            nodes[r + i].latency = picoseconds(*ns);
        }
        if h > 0 {
            nodes[r + h - 1].drain = picoseconds(machine.drain_ns);
        }
        for end in (0..r).chain(r + h..r + h + t) {
            nodes[end].inputs.push(Input::new(None));
        }
        let mut wires = Vec::new();
        let mut join = |a: usize, b: usize| {
            for (from, to) in [(a, b), (b, a)] {
                let wire = Wire::new(from, to, &machine.buffers);
                wires.push(if shape.is_hop(to) { wire } else { wire.with_endless_completions() });
                nodes[from].outputs.push(wires.len() - 1);
                nodes[to].inputs.push(Input::new(Some(wires.len() - 1)));
            }
        };
        // The first hop (or the only target) is `r`, the last hop (or the only requester) is `r + h
        // - 1`.
        (0..r).for_each(|i| join(i, r));
        (r..r + h).skip(1).for_each(|i| join(i - 1, i));
        if h > 0 {
            (0..t).for_each(|i| join(r + h - 1, r + h + i));
        }
        let requesters = (0..r)
            .map(|_| {
                let mut pieces: Box<dyn Iterator<Item = Piece>> = match load.kind {
                    Kind::Write { tlp, .. } => Box::new(split::writes(tlp, load.address, load.bytes)),
                    Kind::Read => Box::new(split::requests(&machine.link, load.address, load.bytes)),
                };
                let next = pieces.next();
                Requester {
                    pieces,
                    next,
                    free: 0,
                    tags: machine.link.tags,
                    outstanding: 0,
                    arrived: 0,
                    done: 0,
                }
            })
            .collect();
        Engine {
            machine,
            load,
            shape,
            now: 0,
            order: 0,
            heap: BinaryHeap::new(),
            wires,
            nodes,
            requesters,
            random: machine.seed,
            arrived: 0,
            quarters: [None; 2],
            data_tlps: 0,
            data_wire: 0,
            delay: (0, 0),
            most_queued: 0,
        }
    }

    fn schedule(&mut self, at: Picoseconds, event: Event) {
        self.order += 1;
        self.heap.push(Reverse(Scheduled { at, order: self.order, event }));
    }

    fn on_wire(&self, bytes: u32) -> Picoseconds {
        picoseconds(f64::from(bytes) / self.machine.link.tlp())
    }

    pub fn run(mut self) -> Outcome {
        for i in 0..self.requesters.len() {
            self.look(i);
        }
        while let Some(Reverse(next)) = self.heap.pop() {
            self.now = next.at;
            match next.event {
                Event::Look(node) => self.look(node),
                Event::Credit(wire, tlp) => {
                    self.wires[wire].give_back(&tlp);
                    self.look(self.wires[wire].from);
                }
                Event::Arrive(tlp) => self.arrive(tlp),
                Event::Answer(request) => self.answer(request),
            }
        }
        let total = self.load.bytes * self.requesters.len() as u64;
        assert_eq!(self.arrived, total, "all that was asked for has arrived");
        let each_ns: Vec<f64> = self.requesters.iter().map(|r| nanoseconds(r.done)).collect();
        let time_ns = each_ns.iter().copied().fold(0.0, f64::max);
        let gbs = match self.quarters {
            [Some((a, from)), Some((b, to))] if b > a => (to - from) as f64 / nanoseconds(b - a),
            _ => total as f64 / time_ns,
        };
        Outcome {
            time_ns,
            each_ns,
            gbs,
            data_tlps: self.data_tlps,
            data_wire: self.data_wire,
            delay_ns: (nanoseconds(self.delay.0) / self.data_tlps as f64, nanoseconds(self.delay.1)),
            most_queued: self.most_queued,
        }
    }

    /// Issues what a requester can issue now.
    fn issue(&mut self, index: usize) {
        let m = self.machine;
        // Two at a time: more would only wait in the device.
        loop {
            let r = &mut self.requesters[index];
            let Some(piece) = r.next else { return };
            let (class, gap) = match self.load.kind {
                Kind::Write { interval_ns, .. } => (Class::Posted, picoseconds(interval_ns)),
                Kind::Read => (Class::NonPosted, 0),
            };
            if self.nodes[index].inputs[0].len(class) >= 2 {
                return;
            }
            if class == Class::NonPosted {
                let slot = u64::from(m.link.mrrs);
                let room = m.completion_buffer.is_none_or(|b| r.outstanding + slot <= b);
                if r.tags == 0 || !room {
                    return;
                }
                r.tags -= 1;
                r.outstanding += slot;
            }
            let ready = r.free.max(self.now);
            r.free = ready + gap;
            r.next = r.pieces.next();
            let payload = if class == Class::Posted { piece.payload() as u32 } else { 0 };
            let page = (piece.address / PAGE) as u32;
            let tlp = Tlp {
                class,
                payload,
                wire: split::on_wire(&m.link, true, payload.into()) as u32,
                useful: piece.bytes as u32,
                requester: index as u32,
                target: (index as u32 + page) % m.targets,
                address: piece.address,
                last: false,
                up: true,
                issued: ready,
            };
            self.enqueue(index, 0, tlp, ready);
            if ready > self.now {
                self.schedule(ready, Event::Look(index));
            }
        }
    }

    fn enqueue(&mut self, node: usize, input: usize, tlp: Tlp, ready: Picoseconds) {
        self.order += 1;
        let order = self.order;
        self.nodes[node].inputs[input].push(tlp, ready, order);
    }

    /// Sends whatever a node can send.
    fn look(&mut self, node: usize) {
        loop {
            if node < self.requesters.len() {
                self.issue(node);
            }
            let mut sent = false;
            for i in 0..self.nodes[node].outputs.len() {
                sent |= self.send(node, self.nodes[node].outputs[i]);
            }
            if !sent {
                break;
            }
        }
        let at = &mut self.nodes[node];
        let due =
            at.inputs.iter().filter_map(|i| i.waits_for_drain(at.drain)).filter(|t| *t > self.now).min();
        if let Some(due) = due.filter(|due| *due != at.woken) {
            at.woken = due;
            self.schedule(due, Event::Look(node));
        }
    }

    fn send(&mut self, node: usize, index: usize) -> bool {
        let (shape, wire) = (self.shape, &mut self.wires[index]);
        if wire.busy_until > self.now {
            return false;
        }
        let to = wire.to;
        let taken = self.nodes[node].take(self.now, wire, |tlp| shape.next(node, tlp) == to);
        let Some((tlp, input)) = taken else { return false };

        let (m, end) = (self.machine, self.now + self.on_wire(tlp.wire));
        let credit = picoseconds(m.credit_ns);
        self.wires[index].busy_until = end;
        self.schedule(end, Event::Look(node));
        if let Some(came) = self.nodes[node].inputs[input].wire {
            self.schedule(end + credit, Event::Credit(came, tlp));
        }
        if shape.is_hop(to) {
            let taken_in = if m.store_and_forward { end } else { self.now };
            let input = self.nodes[to]
                .inputs
                .iter()
                .position(|i| i.wire == Some(index))
                .expect("wires end in inputs");
            let ready = taken_in + self.nodes[to].latency;
            self.enqueue(to, input, tlp, ready);
            self.schedule(ready, Event::Look(to));
            self.most_queued = self.most_queued.max(self.nodes[to].inputs[input].len(Class::Posted));
        } else {
            self.schedule(end + credit, Event::Credit(index, tlp));
            self.schedule(end + picoseconds(m.wire_ns), Event::Arrive(tlp));
        }
        true
    }

    fn arrive(&mut self, tlp: Tlp) {
        if tlp.class == Class::NonPosted {
            let spread = picoseconds(self.machine.jitter_ns);
            let late = if spread > 0 { self.draw() % (2 * spread + 1) } else { 0 };
            let memory = (picoseconds(self.machine.memory_ns) + late).saturating_sub(spread);
            self.schedule(self.now + memory, Event::Answer(tlp));
            return;
        }
        let bytes = u64::from(tlp.useful);
        self.arrived += bytes;
        self.data_tlps += 1;
        self.data_wire += u64::from(tlp.wire);
        let delay = self.now - tlp.issued;
        self.delay = (self.delay.0 + delay, self.delay.1.max(delay));
        let total = self.load.bytes * self.requesters.len() as u64;
        for (i, mark) in [total / 4, total * 3 / 4].into_iter().enumerate() {
            if self.arrived >= mark && self.quarters[i].is_none() {
                self.quarters[i] = Some((self.now, self.arrived));
            }
        }
        let index = tlp.requester as usize;
        let r = &mut self.requesters[index];
        r.arrived += bytes;
        r.done = self.now;
        if tlp.class == Class::Completion {
            if tlp.last {
                r.tags += 1;
                r.outstanding -= u64::from(self.machine.link.mrrs);
            }
            self.look(index);
        }
    }

    fn answer(&mut self, request: Tlp) {
        let node = self.shape.first_target() + request.target as usize;
        let asked = Piece { address: request.address, bytes: request.useful.into() };
        let mut pieces = split::completions(&self.machine.link, asked).peekable();
        while let Some(piece) = pieces.next() {
            let payload = piece.payload() as u32;
            let tlp = Tlp {
                class: Class::Completion,
                payload,
                wire: split::on_wire(&self.machine.link, false, payload.into()) as u32,
                useful: piece.bytes as u32,
                last: pieces.peek().is_none(),
                up: false,
                ..request
            };
            self.enqueue(node, 0, tlp, self.now);
        }
        self.look(node);
    }

    /// The next random number, by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
