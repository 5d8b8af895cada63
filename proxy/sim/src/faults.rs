//! Faults: when they happen, what they do, and how the queue pairs that they hit may end.

use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_core::session::{Status, count_word};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, lap_of};
use pushgate_link::memory::{Mapped, Words};
use pushgate_link::ring;
use pushgate_link_verbs::simulated::Sim;

use super::cluster::Cluster;
use super::memory::GUARD;
use super::plan::{Carrier, FaultKind, FaultPlan, MS, NEVER};
use super::program::Facts;
use super::qp::{ANY, Inbox, LINK, bit};
use super::random::Random;
use super::set_up::state::FAILED;

impl Cluster<'_> {
    /// Faults whose time has come.
    pub(super) fn fire_faults(&mut self) {
        while let Some(fault) = self.faults.planned.last().copied() {
            if self.progress.posted * 1024 / self.progress.total < fault.after as u64 {
                return;
            }
            self.faults.planned.pop();
            self.fire(fault);
        }
    }

    fn fire(&mut self, fault: FaultPlan) {
        let Some(qp) = self.qps.iter().position(|q| q.number == fault.qp) else { return };
        let (end, now) = (fault.end, self.now);
        if self.qps[qp].finished || self.qps[qp].expected.is_some() {
            return;
        }
        if !self.qps[qp].started {
            self.faults.deferred.push(fault);
            return;
        }
        self.faults.fired += 1;
        self.progress.at = now;
        self.log.event(now, "fault", qp as u64 * 2 + end as u64, fault.number.into());
        self.log.note(format_args!("{:?}", fault.kind));
        let (node, program) = (self.qps[qp].nodes[end], 2 * qp + end);
        match fault.kind {
            FaultKind::Break { calls } => {
                self.qps[qp].controls[end].breaks_in.store(calls, Ordering::Relaxed)
            }
            FaultKind::Breaks { calls, again, fails } => {
                let control = &self.qps[qp].controls[end];
                control.again.store(again, Ordering::Relaxed);
                control.every.store(calls, Ordering::Relaxed);
                control.fails.store(fails, Ordering::Relaxed);
                control.lingers.store(fails.rotate_left(5) & 0xff, Ordering::Relaxed);
                control.breaks_in.store(calls, Ordering::Relaxed);
            }
            FaultKind::Lose { frames } => {
                self.set_ups[qp].lose(end, frames);
                self.schedule_set_up();
            }
            FaultKind::OldCounts { times } => {
                self.qps[qp].controls[end].old_counts.store(times, Ordering::Relaxed)
            }
            FaultKind::Delay { looks } => self.qps[qp].controls[end].delay.store(looks, Ordering::Relaxed),
            FaultKind::Rail { rail, calls } => match &self.qps[qp].wires {
                Some(wires) => wires.break_in(rail.into(), calls),
                None => self.break_device(qp, end, rail.into()),
            },
            FaultKind::Device if self.qps[qp].carrier == Carrier::Local => {
                self.qps[qp].controls[end].breaks_in.store(1, Ordering::Relaxed);
            }
            FaultKind::Stream { bytes, refused } => {
                if let Some(net) = &self.qps[qp].net {
                    net.refuse(refused);
                    net.break_behind(end, bytes.into());
                }
            }
            FaultKind::Device if let Some(net) = &self.qps[qp].net => {
                net.break_behind(end, 0);
                if !self.plan.qps[qp].recovers {
                    self.qps[qp].expect(now, [LINK; 2]);
                }
            }
            FaultKind::Device if let Some(wires) = &self.qps[qp].wires => wires.break_in(0, 1),
            FaultKind::Device if matches!(self.qps[qp].carrier, Carrier::Devices { .. }) => {
                self.break_device(qp, end, 0);
            }
            FaultKind::Device => {
                self.nic.break_down(self.qps[qp].numbers[end]);
                if !self.plan.qps[qp].recovers {
                    self.qps[qp].expect(now, [LINK; 2]);
                }
            }
            FaultKind::Restart { stores, again, both, down } => {
                let down = down.then_some((qp, end));
                if down.is_some() {
                    self.qps[qp].controls[end].breaks_in.store(1, Ordering::Relaxed);
                }
                self.crash(node, stores.into(), down, again);
                let other = self.qps[qp].nodes[1 - end];
                if both {
                    let left = self.deaths.random.below(60);
                    self.crash(other, left, down.map(|(qp, end)| (qp, 1 - end)), 0);
                }
            }
            FaultKind::StopEngine { time } => {
                self.nodes[node].stopped_until = now + time;
            }
            FaultKind::StopProgram { time } => self.programs[program].stopped_until = now + time,
            FaultKind::Abort => {
                let status = Status::new(abi::PUSHGATE_ABORTED);
                self.qps[qp].expect(now, [bit(abi::PUSHGATE_ABORTED); 2]);
                self.tell(qp, end, status, 0);
            }
            FaultKind::Die => self.die(node),
            FaultKind::Hole => {
                // Without credit for a slot there is no hole.
                if self.programs[program].make_hole() {
                    self.programs[program].give_up();
                    self.qps[qp].expect(now, [bit(abi::PUSHGATE_STUCK); 2]);
                    if self.nodes[node].is_asleep() && self.nodes[node].hears() {
                        self.rouse(node);
                    }
                }
            }
            FaultKind::LyingProgram { seed } => self.lie(qp, end, seed, false),
            FaultKind::LyingEngine { seed } => self.lie(qp, end, seed, true),
        }
        if let Some(expected) = self.qps[qp].expected {
            self.due = self.due.min(expected.by);
        }
    }

    /// Faults of a queue pair that waited for its ends to meet.
    pub(super) fn fire_deferred(&mut self, qp: usize) {
        let number = self.qps[qp].number;
        let due: Vec<FaultPlan> = self.faults.deferred.extract_if(.., |fault| fault.qp == number).collect();
        due.into_iter().for_each(|fault| self.fire(fault));
    }

    /// A rank is gone: its peers' meshes tell them.
    pub(super) fn die(&mut self, node: usize) {
        let now = self.now;
        self.nodes[node].dead = true;
        self.next[node] = NEVER;
        for (qp, end) in (0..self.qps.len()).flat_map(|qp| [(qp, 0), (qp, 1)]) {
            let q = &mut self.qps[qp];
            if q.nodes[end] != node {
                continue;
            }
            q.dead[end] = true;
            let actor = self.nodes.len() + 2 * qp + end;
            self.next[actor] = NEVER;
            self.set_up_dies(qp, end);
            let q = &mut self.qps[qp];
            if q.finished {
                continue;
            }
            if matches!(q.carrier, Carrier::Verbs { .. }) {
                self.nic.kill(q.numbers[end]);
            }
            // The kernel closes what a process leaves behind.
            q.net.iter().for_each(|net| net.break_behind(end, 0));
            let endpoint = self.nodes[node].endpoint(qp, end);
            for (rail, device) in self.rails.iter().enumerate() {
                if let Some(number) = endpoint.and_then(|e| e.rdma_number_of(rail)) {
                    device.kill(number);
                }
            }
            let lost = bit(abi::PUSHGATE_PEER_LOST) | LINK;
            q.expect(now, [if q.started { lost } else { lost | FAILED }; 2]);
            self.due = self.due.min(q.expected.map_or(NEVER, |e| e.by));
            let rank = Some(q.ranks[end]);
            let status = Status { rank, ..Status::new(abi::PUSHGATE_PEER_LOST) };
            let delay = self.random.within(MS, 50 * MS);
            self.tell(qp, 1 - end, status, delay);
            self.look_whether_finished(qp);
        }
    }

    /// The link of an end of a queue pair over several RDMA devices breaks, on one of them.
    fn break_device(&self, qp: usize, end: usize, rail: usize) {
        let Carrier::Devices { devices } = self.qps[qp].carrier else { return };
        let (rail, node) = (rail % devices as usize, self.qps[qp].nodes[end]);
        let endpoint = self.nodes[node].endpoint(qp, end);
        if let Some(number) = endpoint.and_then(|e| e.rdma_number_of(rail)) {
            self.rails[rail].break_down(number);
        }
    }

    /// One side writes garbage where it may write. Its queue pair is given up a while later, as programs do whose calls
    /// time out.
    fn lie(&mut self, qp: usize, end: usize, seed: u64, engine: bool) {
        let now = self.now;
        let q = &mut self.qps[qp];
        q.tainted = true;
        q.expect(now, [ANY; 2]);
        let rank = q.ranks[end];
        let node = q.nodes[end];
        let log = q.sides[end].geometry.link_log;
        let (own, inbox) = (q.links[end].clone(), q.inboxes[1 - end]);
        let endpoint = self.nodes[node].endpoint(qp, end);
        let posted = endpoint.map_or(0, |e| e.outbound().staging().messages());
        let facts = &self.programs[2 * qp + end].facts;
        let wires = self.qps[qp].wires.clone().filter(|_| engine);
        let (what, blamed) = match (own, inbox) {
            _ if let Some(wires) = wires => wires.lie(end, posted, facts, seed),
            _ if let Some(net) = self.qps[qp].net.as_ref().filter(|_| engine) => {
                net.lie(end, seed);
                ("garbage among the frames of a stream", false)
            }
            (Some(link), _) if engine => lie_as_engine(&link, log, posted, facts, seed),
            (_, Some(inbox)) if engine => {
                self.nic.refuses();
                self.rails.iter().for_each(Sim::refuses);
                lie_by_rdma(inbox, log, posted, facts, seed)
            }
            _ => (self.programs[2 * qp + end].lie(seed, GUARD), true),
        };
        if let Some(expected) = &mut self.qps[qp].expected {
            expected.liar = blamed.then_some(rank);
        }
        self.log.note(format_args!("{what}"));
        for end in [0, 1] {
            self.programs[2 * qp + end].give_up();
            let delay = self.random.within(20 * MS, 400 * MS);
            self.tell(qp, end, Status::new(abi::PUSHGATE_ABORTED), delay);
        }
    }
}

/// Garbage in a link segment, where the segment's own engine alone writes. Returns what it is, and whether the rank that
/// wrote it must be named for it: a status may name any rank.
fn lie_as_engine(link: &Mapped, log: u32, posted: u64, facts: &Facts, seed: u64) -> (&'static str, bool) {
    let mut random = Random::new(seed, 6);
    let line = Words::writable(link, abi::PUSHGATE_LINK_RECEIVED as usize, 6);
    let records = Words::writable(link, abi::PUSHGATE_LINK_RING as usize, 8 << log);
    let put = Record {
        flags: Record::INLINE,
        length: 16,
        id: posted as u32,
        rkey: facts.rkey,
        ..Record::new(Opcode::Put)
    };
    let beyond = (facts.region as u64 - 8) + 8 * random.below(GUARD as u64 / 8 - 2);
    let (what, record) = match random.below(12) {
        0 | 1 => ("a record of a PUT beyond the region", Record { remote_offset: beyond, ..put }),
        2 => (
            "a record with another sequence number",
            Record { id: posted as u32 ^ 1 << random.below(32), ..put },
        ),
        3 => ("a record of a NOP", Record { id: posted as u32, ..Record::new(Opcode::Nop) }),
        4 => {
            let place = random.next() as u32;
            (
                "a record of a payload beyond the window",
                Record { flags: 0, length: 64, place, place_offset: 1, opcode: Opcode::Send, ..put },
            )
        }
        5 => (
            "a record that names memory at address 0",
            Record {
                flags: Record::REGION,
                length: 64,
                place_offset: random.below(4096),
                remote_offset: 0,
                ..put
            },
        ),
        6 => {
            for word in &records[(posted as usize & ((1 << log) - 1)) * 8..][..8] {
                word.store(random.next(), Ordering::Release);
            }
            return ("a torn record", true);
        }
        n => {
            let far = count_word(0, random.next() & abi::PUSHGATE_COUNT_MASK);
            line[(n - 7).min(3) as usize].store(if n < 10 { far } else { random.next() }, Ordering::Release);
            return ("counts, or a status, that cannot be", n < 10);
        }
    };
    ring::publish(&records, posted, log, &record.encode(0));
    (what, true)
}

/// Garbage in the peer's inbox, which an RDMA device that serves a liar may write. Answers as [`lie_as_engine`] does.
fn lie_by_rdma(
    (address, [slots, regions, receives, bytes]): Inbox,
    log: u32,
    posted: u64,
    facts: &Facts,
    seed: u64,
) -> (&'static str, bool) {
    let mut random = Random::new(seed, 7);
    let store = |byte: usize, value: u64| {
        // SAFETY: the word lies in the inbox, which the queue pair keeps until it is taken down, and is aligned. The code
        // under test reads such words as atomics.
        unsafe { AtomicU64::from_ptr((address + byte) as *mut u64) }.store(value, Ordering::Release);
    };
    let some = |random: &mut Random, from: usize, to: usize| {
        from + 8 * random.below((to - from) as u64 / 8) as usize
    };
    match random.below(8) {
        0 => {
            let far = count_word(0, random.next() & abi::PUSHGATE_COUNT_MASK);
            store(8 * random.below(4) as usize, far);
            ("counts that cannot be", true)
        }
        1 => {
            let status = random.next();
            store(40, status);
            store(48, !status);
            ("a status that cannot be", false)
        }
        2 | 3 => {
            let beyond = (facts.region as u64 - 8) + 8 * random.below(GUARD as u64 / 8 - 2);
            let put = Record { length: 16, id: posted as u32, rkey: facts.rkey, ..Record::new(Opcode::Put) };
            let record = match random.below(4) {
                0 => Record { flags: Record::INLINE, remote_offset: beyond, ..put },
                // PLACED and SHORT, flags of this wire.
                1 => Record { flags: 0x40, remote_offset: beyond, ..put },
                2 => Record { flags: 0x80, place: random.next() as u32, place_offset: 1, ..put },
                _ => Record { id: posted as u32 ^ 1 << random.below(32), ..put },
            };
            let first = slots + (posted as usize & ((1 << log) - 1)) * 256;
            let words = record.encode(lap_of(posted, log));
            (0..8).for_each(|i| store(first + 8 * i, words[i]));
            ("a record that cannot be", true)
        }
        4 => {
            (0..64).for_each(|_| store(some(&mut random, slots, regions), random.next()));
            ("random words among the records", true)
        }
        5 => {
            // The entry of the region that the peer puts to: another address.
            store(regions + (facts.lkey as usize & 0xfff) * 32 + 16, 8 * random.below(1 << 40));
            store(regions + (random.below(3) as usize) * 32 + 16, 8 * random.below(1 << 40));
            ("regions at other addresses", false)
        }
        6 => {
            (0..16).for_each(|_| store(some(&mut random, receives, bytes), random.next()));
            ("random words among the receives", true)
        }
        _ => {
            store(32, 1);
            ("a farewell", false)
        }
    }
}
