//! Ports, queues, credits and arbitration: what a TLP passes between two ends.

use std::collections::VecDeque;

use super::{Buffers, Picoseconds};

/// The three classes of flow control. Base Specification 5.0, section 2.6.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Posted,
    NonPosted,
    Completion,
}

/// A TLP on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tlp {
    pub class: Class,
    /// Payload in whole words, in bytes.
    pub payload: u32,
    /// Bytes on the wire, headers included.
    pub wire: u32,
    /// Bytes that a user asked for, of the request that this TLP is or answers.
    pub useful: u32,
    pub requester: u32,
    pub target: u32,
    /// Address of the first byte that is asked for or carried.
    pub address: u64,
    /// Whether this is the last completion of its request.
    pub last: bool,
    /// True towards the target, false back.
    pub up: bool,
    /// Time at which its requester issued it.
    pub issued: Picoseconds,
}

impl Tlp {
    /// Data credits that the TLP takes, in units of 16 bytes.
    fn units(&self) -> u64 {
        if self.class == Class::NonPosted { 0 } else { u64::from(self.payload).div_ceil(16) }
    }
}

#[derive(Debug, Clone, Copy)]
struct Credit {
    headers: u64,
    units: u64,
}

/// One direction of a link: a serialiser, and the credits of the buffers at its far end.
#[derive(Debug)]
pub(super) struct Wire {
    pub from: usize,
    pub to: usize,
    pub busy_until: Picoseconds,
    credits: [Credit; 3],
    /// The input to look at next.
    turn: usize,
}

impl Wire {
    pub fn new(from: usize, to: usize, buffers: &Buffers) -> Self {
        let credit =
            |(headers, bytes): (u32, u32)| Credit { headers: headers.into(), units: u64::from(bytes / 16) };
        Wire {
            from,
            to,
            busy_until: 0,
            credits: [
                credit(buffers.posted),
                Credit { headers: buffers.non_posted.into(), units: 0 },
                credit(buffers.completion),
            ],
            turn: 0,
        }
    }

    /// Removes the limit on completions: the ends promise room for whatever they asked for. Base
    /// Specification 5.0, section 2.6.1: infinite completion credits.
    pub fn with_endless_completions(mut self) -> Self {
        self.credits[Class::Completion as usize] = Credit { headers: u64::MAX / 2, units: u64::MAX / 2 };
        self
    }

    fn has_room(&self, tlp: &Tlp) -> bool {
        let c = self.credits[tlp.class as usize];
        c.headers >= 1 && c.units >= tlp.units()
    }

    fn take(&mut self, tlp: &Tlp) {
        let c = &mut self.credits[tlp.class as usize];
        c.headers -= 1;
        c.units -= tlp.units();
    }

    pub fn give_back(&mut self, tlp: &Tlp) {
        let c = &mut self.credits[tlp.class as usize];
        c.headers += 1;
        c.units += tlp.units();
    }
}

#[derive(Debug, Clone, Copy)]
struct Queued {
    tlp: Tlp,
    ready: Picoseconds,
    order: u64,
}

/// Where TLPs enter a node: from a wire, or from the node itself.
#[derive(Debug)]
pub(super) struct Input {
    /// The wire whose buffers these are; none: the node's own.
    pub wire: Option<usize>,
    queues: [VecDeque<Queued>; 3],
    /// Target and time of the last posted write that left, for hosts that drain one target before
    /// the next.
    last_posted: Option<(u32, Picoseconds)>,
}

impl Input {
    pub fn new(wire: Option<usize>) -> Self {
        Input { wire, queues: Default::default(), last_posted: None }
    }

    pub fn push(&mut self, tlp: Tlp, ready: Picoseconds, order: u64) {
        self.queues[tlp.class as usize].push_back(Queued { tlp, ready, order });
    }

    pub fn len(&self, class: Class) -> usize {
        self.queues[class as usize].len()
    }

    /// The oldest TLP that may go to `wire` now. Within a class no TLP overtakes another; requests
    /// and completions do not overtake posted writes that came before them. Base Specification 5.0,
    /// section 2.4.1, without relaxed ordering.
    fn candidate(
        &self,
        now: Picoseconds,
        wire: &Wire,
        drain: Picoseconds,
        goes: impl Fn(&Tlp) -> bool,
    ) -> Option<(u64, usize)> {
        let posted = self.queues[Class::Posted as usize].front().map_or(u64::MAX, |q| q.order);
        let able = |q: &Queued| {
            let drained = match (q.tlp.class, self.last_posted) {
                (Class::Posted, Some((target, at))) => target == q.tlp.target || now >= at + drain,
                _ => true,
            };
            q.ready <= now && q.order <= posted && drained && goes(&q.tlp) && wire.has_room(&q.tlp)
        };
        let heads = self.queues.iter().enumerate().filter_map(|(class, q)| Some((q.front()?, class)));
        heads.filter(|(q, _)| able(q)).map(|(q, class)| (q.order, class)).min()
    }

    /// The time at which the posted write at the head may go, if it waits for its predecessor's
    /// target.
    pub fn waits_for_drain(&self, drain: Picoseconds) -> Option<Picoseconds> {
        let (target, at) = self.last_posted?;
        let head = self.queues[Class::Posted as usize].front()?;
        (head.tlp.target != target).then_some(at + drain)
    }
}

/// A node: ports with their queues.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub inputs: Vec<Input>,
    pub outputs: Vec<usize>,
    /// Time from a TLP's first byte in to its first byte out.
    pub latency: Picoseconds,
    /// Time between posted writes to different targets.
    pub drain: Picoseconds,
    /// When the node is next looked at because of that time.
    pub woken: Picoseconds,
}

impl Node {
    /// Takes the TLP that `wire` sends next, in turn among the inputs; returns it with its input.
    pub fn take(
        &mut self,
        now: Picoseconds,
        wire: &mut Wire,
        goes: impl Fn(&Tlp) -> bool,
    ) -> Option<(Tlp, usize)> {
        let count = self.inputs.len();
        for i in 0..count {
            let at = (wire.turn + i) % count;
            let Some((_, class)) = self.inputs[at].candidate(now, wire, self.drain, &goes) else { continue };
            let input = &mut self.inputs[at];
            let tlp = input.queues[class].pop_front().expect("a candidate is a head").tlp;
            if tlp.class == Class::Posted {
                input.last_posted = Some((tlp.target, now));
            }
            wire.take(&tlp);
            wire.turn = at + 1;
            return Some((tlp, at));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tlp(class: Class) -> Tlp {
        Tlp {
            class,
            payload: 64,
            wire: 88,
            useful: 64,
            requester: 0,
            target: 0,
            address: 0,
            last: false,
            up: true,
            issued: 0,
        }
    }

    /// No run so far has both classes in one direction; this test keeps the rule for later runs.
    #[test]
    fn nothing_overtakes_a_posted_write() {
        for late in [Class::NonPosted, Class::Completion] {
            let mut node = Node::default();
            node.inputs.push(Input::new(None));
            let mut wire = Wire::new(0, 1, &Buffers { posted: (0, 0), ..Buffers::default() });
            node.inputs[0].push(tlp(Class::Posted), 0, 1);
            node.inputs[0].push(tlp(late), 0, 2);
            assert!(node.take(0, &mut wire, |_| true).is_none(), "{late:?} after a write without credit");
            wire.credits[Class::Posted as usize] = Credit { headers: 1, units: 4 };
            let order = [0, 0].map(|at| node.take(at, &mut wire, |_| true).expect("there is room").0.class);
            assert_eq!(order, [Class::Posted, late]);
        }
    }

    /// Posted writes pass requests that have no credit. Otherwise two devices that read each other
    /// would stop for ever.
    #[test]
    fn a_posted_write_overtakes_a_stuck_request() {
        let mut node = Node::default();
        node.inputs.push(Input::new(None));
        let mut wire = Wire::new(0, 1, &Buffers { non_posted: 0, ..Buffers::default() });
        node.inputs[0].push(tlp(Class::NonPosted), 0, 1);
        node.inputs[0].push(tlp(Class::Posted), 0, 2);
        assert_eq!(node.take(0, &mut wire, |_| true).expect("it may pass").0.class, Class::Posted);
        assert!(node.take(0, &mut wire, |_| true).is_none());
    }
}
