//! A cluster: its ranks, their queue pairs, programs and engines, the RDMA device, and the faults, in one thread and in
//! virtual time. [`Cluster::step`] carries out the event that is due next, then checks what the event can have changed.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use pushgate_core::session::Status;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_link::frame::Frame;
use pushgate_link::ring;
use pushgate_link_verbs::firmware;
use pushgate_link_verbs::profiles::Profile;
use pushgate_link_verbs::simulated::Sim;

use super::log::Log;
use super::make::make;
use super::memory;
use super::node::{self, Node};
use super::plan::{Carrier, FaultPlan, MS, NEVER, Plan, S, SetUpFault, SetUpKind};
use super::program::{self, Program};
use super::qp::{BOUND, LINK, Qp};
use super::rails::Falls;
use super::random::{Random, mix};
use super::replay::Replay;
use super::set_up::state::{FAILED, Grave, SetUp};
use super::violation::{Violation, broken};

/// RDMA devices of a queue pair that has several.
pub(super) const RAILS: usize = 3;

/// The RDMA devices of one kind.
pub(super) struct Devices {
    pub(super) nic: Sim,
    /// Those over which stripes go.
    pub(super) rails: [Sim; RAILS],
}

impl Devices {
    pub(super) fn new(make: impl Fn() -> Sim) -> Self {
        Devices { nic: make(), rails: std::array::from_fn(|_| make()) }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Sim> {
        [&self.nic].into_iter().chain(&self.rails)
    }
}

/// Between two looks of the RDMA device for retries that are exceeded.
const RETRIES: u64 = 200 * MS;

/// A status that a mesh brings to an end.
pub(super) struct Tell {
    at: u64,
    qp: usize,
    end: usize,
    status: Status,
}

/// Queue pairs, their ends, and the statuses with which their links broke.
pub(super) type Broken = Arc<Mutex<Vec<(usize, usize, Status)>>>;

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    pub(super) steps: u64,
    pub(super) messages: u64,
    pub(super) faults: u32,
    pub(super) ranks: u32,
    pub(super) qps: u32,
    pub(super) repeated: u32,
    pub(super) unmet: u32,
    pub(super) falls: Falls,
    /// Links that took the place of one that broke, those of rails too.
    pub(super) recovered: u64,
    /// Engines that died and were replaced.
    pub(super) restarted: u32,
    /// Nanoseconds of virtual time.
    pub(super) time: u64,
    pub(super) sleeps: u64,
}

/// The cluster.
pub(super) struct Cluster<'a> {
    // Before the queue pairs that wait for it.
    _firmware: firmware::Run,
    /// What the RDMA devices do.
    pub(super) profile: Profile,
    pub(super) plan: Plan,
    pub(super) nic: &'a Sim,
    /// The RDMA devices of queue pairs that have several.
    pub(super) rails: &'a [Sim; RAILS],
    pub(super) nodes: Vec<Node>,
    pub(super) qps: Vec<Qp>,
    pub(super) programs: Vec<Program>,
    pub(super) replay: Option<Replay>,
    pub(super) set_ups: Vec<SetUp>,
    /// Offers that were made.
    pub(super) attempts: u64,
    /// When each actor acts next: the nodes, the programs, the firmware, the wires of rails, the set-ups, the RDMA device, the
    /// replay, the mesh.
    pub(super) next: Vec<u64>,
    pub(super) now: u64,
    pub(super) random: Random,
    pub(super) deaths: Deaths,
    pub(super) log: Log,
    pub(super) progress: Progress,
    pub(super) faults: Faults,
    tells: Vec<Tell>,
    pub(super) broken: Broken,
    /// What engines have sent the other ends about their links: queue pairs, ends, frames.
    pub(super) sent: Arc<Mutex<Vec<(usize, usize, Frame)>>>,
    pub(super) next_retries: u64,
    /// When the first expected end is due.
    pub(super) due: u64,
    pub(super) verbs: bool,
}

/// Faults that break in.
pub(super) struct Faults {
    /// The last one first.
    pub(super) planned: Vec<FaultPlan>,
    pub(super) fired: u32,
    /// Faults whose time has come, of queue pairs whose ends have not met.
    pub(super) deferred: Vec<FaultPlan>,
}

/// Engines that die.
pub(super) struct Deaths {
    /// What becomes of them.
    pub(super) random: Random,
    pub(super) restarted: u32,
    pub(super) graves: Vec<Grave>,
}

/// How far the run is.
pub(super) struct Progress {
    pub(super) posted: u64,
    /// Messages that the programs mean to post.
    pub(super) total: u64,
    pub(super) at: u64,
    /// Queue pairs, and the replay, that are not finished.
    pub(super) unfinished: usize,
}

impl<'a> Cluster<'a> {
    /// Makes the cluster of a plan on simulated devices, which do as a profile says. `prints`: each event is printed to stderr.
    pub(super) fn new(plan: Plan, devices: &'a Devices, profile: Profile, prints: bool) -> Self {
        let firmware = firmware::begin(profile.slow);
        devices.all().for_each(Sim::reset);
        devices.all().for_each(|sim| sim.is_of(&profile));
        if plan.qps.iter().any(|qp| matches!(qp.carrier, Carrier::Verbs { .. }) && !qp.recovers) {
            devices.nic.keeps_its_address();
        }
        let Devices { nic, rails } = devices;
        // A link that is freed waits for its device, which does nothing meanwhile.
        rails.iter().for_each(Sim::drains);
        memory::forget_readable();
        let schedule = |stream: u64| Random::new(plan.seed ^ mix(plan.salt), 1 << 32 | stream);
        let nodes: Vec<Node> = (0..plan.nodes.len() as u64)
            .map(|rank| {
                let bell = EventFd::new().expect("an eventfd");
                Node::new(plan.nodes[rank as usize], schedule(100 + rank), schedule(200 + rank), bell)
            })
            .collect();
        let (mut qps, mut programs) = (Vec::<Qp>::new(), Vec::new());
        let mut set_ups = Vec::new();
        for qp in &plan.qps {
            make(&plan, qp, &nodes, &mut qps, &mut programs, &schedule);
            let faults: Vec<_> = plan.set_up.iter().filter(|fault| fault.qp == qp.number).copied().collect();
            set_ups.push(SetUp::new(&faults, schedule(3_000 + qp.number as u64)));
            if faults.iter().any(|fault| fault.kind.is_too_late()) {
                qps.last_mut().expect("just made").excused = FAILED;
            }
        }
        let late = |fault: &&SetUpFault| matches!(fault.kind, SetUpKind::Late { .. });
        let fired = plan.set_up.iter().filter(late).count() as u32;
        let (random, restarts) = (schedule(1), schedule(3));
        let replay = (plan.replay > 0).then(|| Replay::new(plan.replay.into(), schedule(2)));
        // A node acts when it has a queue pair, a program when its ends have met.
        let actors = nodes.len() + programs.len() + 6;
        let mut next = vec![NEVER; actors];
        let unfinished = qps.len() + replay.is_some() as usize;
        next[actors - 2] = if replay.is_some() { 0 } else { NEVER };
        let verbs =
            qps.iter().any(|qp| matches!(qp.carrier, Carrier::Verbs { .. } | Carrier::Devices { .. }));
        next[actors - 3] = if verbs { 0 } else { NEVER };
        next[actors - 4] = if qps.is_empty() { NEVER } else { 0 };
        let mut faults = plan.faults.clone();
        // The last one first, so that the next one is taken off the end.
        faults.sort_by_key(|fault| std::cmp::Reverse((fault.after, fault.number)));
        Cluster {
            _firmware: firmware,
            profile,
            nic,
            rails,
            nodes,
            qps,
            programs,
            replay,
            set_ups,
            attempts: 0,
            next,
            now: 0,
            random,
            deaths: Deaths { random: restarts, restarted: 0, graves: Vec::new() },
            log: Log::new(prints),
            progress: Progress { posted: 0, total: plan.messages().max(1), at: 0, unfinished },
            faults: Faults { planned: faults, fired, deferred: Vec::new() },
            tells: Vec::new(),
            broken: Broken::default(),
            sent: Arc::default(),
            next_retries: RETRIES,
            due: NEVER,
            verbs,
            plan,
        }
    }

    pub(super) fn sums(&self) -> Sums {
        let (repeated, unmet) = self.met();
        let wires = self.qps.iter().filter_map(|qp| qp.wires.as_ref());
        Sums {
            steps: self.log.steps(),
            messages: self.qps.iter().flat_map(|qp| &qp.flows).map(|f| f.messages.len() as u64).sum::<u64>()
                + self.replay.as_ref().map_or(0, |_| self.plan.replay.into()),
            faults: self.faults.fired + self.replay.as_ref().map_or(0, |r| (r.breaks > 0) as u32),
            ranks: self.plan.ranks(),
            qps: self.qps.len() as u32,
            repeated,
            unmet,
            falls: wires.fold(Falls::default(), |sum, wires| {
                let falls = wires.falls();
                Falls { links: sum.links + falls.links, stripes: sum.stripes + falls.stripes }
            }),
            recovered: self.nodes.iter().map(|n| n.counters().recovered).sum(),
            restarted: self.deaths.restarted,
            time: self.now,
            sleeps: self.nodes.iter().map(|n| n.counters().sleeps).sum(),
        }
    }

    /// Runs until everything is finished, then takes it all down, at most `steps` events.
    pub(super) fn run(&mut self, steps: u64) -> Result<(), Violation> {
        while self.progress.unfinished > 0 {
            if self.log.steps() >= steps {
                return Ok(());
            }
            self.step()?;
        }
        for node in 0..self.nodes.len() {
            // Nobody is left who would kill the next one.
            self.nodes[node].crash = None;
            if self.nodes[node].doing == node::Doing::Dead && !self.nodes[node].dead {
                self.take_over(node)?;
            }
        }
        self.check_the_end()?;
        self.leave()
    }

    // ------------------------------------------------------------------ actors

    fn node_actor(&self, node: usize) -> usize {
        node
    }

    fn program_actor(&self, program: usize) -> usize {
        self.nodes.len() + program
    }

    fn nic_actor(&self) -> usize {
        self.next.len() - 3
    }

    fn wires_actor(&self) -> usize {
        self.next.len() - 5
    }

    fn firmware_actor(&self) -> usize {
        self.next.len() - 6
    }

    /// One event: that of the actor that is due first.
    fn step(&mut self) -> Result<(), Violation> {
        let mut actor = 0;
        for (i, at) in self.next.iter().enumerate() {
            if *at < self.next[actor] {
                actor = i;
            }
        }
        let at = self.next[actor];
        if at == NEVER {
            return Err(broken(7, format!("nobody has anything to do: {}", self.unfinished_state())));
        }
        self.now = self.now.max(at);
        let now = self.now;
        if now - self.progress.at > BOUND {
            return Err(broken(7, format!("no progress for {} s: {}", BOUND / S, self.unfinished_state())));
        }
        if now > self.due {
            self.look_for_overdue()?;
        }
        let programs = self.nodes.len() + self.programs.len();
        if actor < self.nodes.len() {
            self.step_node(actor)?;
        } else if actor < programs {
            self.step_program(actor - self.nodes.len())?;
        } else if actor == self.nic_actor() {
            self.step_nic();
        } else if actor == self.wires_actor() {
            self.step_wires()?;
        } else if actor == self.set_up_actor() {
            self.step_set_up()?;
        } else if actor == self.firmware_actor() {
            firmware::advance(now);
            self.log.event(now, "firmware is done", 0, 0);
        } else if actor + 1 == self.next.len() {
            self.step_mesh()?;
        } else {
            self.step_replay()?;
        }
        self.fire_faults();
        let actor = self.firmware_actor();
        self.next[actor] = firmware::next().unwrap_or(NEVER);
        Ok(())
    }

    fn step_nic(&mut self) {
        if self.now >= self.next_retries {
            self.next_retries = self.now + RETRIES;
            self.expire();
            self.log.event(self.now, "device looks", 0, 0);
        }
        let choice = self.random.next();
        let pause = match self.devices_step(choice) {
            Some((qp, completed)) => {
                self.log.event(
                    self.now,
                    if completed { "device completes" } else { "device places" },
                    qp.into(),
                    choice,
                );
                self.random.time(150)
            }
            None => self.next_retries - self.now,
        };
        let actor = self.nic_actor();
        self.next[actor] = self.now + pause;
    }

    /// One event of one of the RDMA devices.
    fn devices_step(&self, choice: u64) -> Option<(u32, bool)> {
        let several = self.plan.devices();
        let first = if several > 0 { (choice >> 56) as usize % (several + 1) } else { 0 };
        (0..=several).find_map(|i| match (first + i) % (several + 1) {
            0 => self.nic.step(choice),
            n => self.rails[n - 1].step(choice),
        })
    }

    fn devices_are_busy(&self) -> bool {
        self.nic.is_busy() || self.plan.devices() > 0 && self.rails.iter().any(Sim::is_busy)
    }

    /// The RDMA devices find retries that are exceeded.
    fn expire(&self) {
        self.nic.expire();
        self.nic.drain();
        if self.plan.devices() > 0 {
            self.rails.iter().for_each(Sim::expire);
        }
    }

    /// Stripes land and arrive over rails.
    fn step_wires(&mut self) -> Result<(), Violation> {
        let (now, mut next) = (self.now, NEVER);
        for q in &self.qps {
            let Some(wires) = &q.wires else { continue };
            let (due, wrong) = wires.step(now);
            next = next.min(due.unwrap_or(NEVER));
            if let Some(wrong) = wrong.filter(|_| !q.tainted) {
                return Err(broken(6, format!("queue pair {}: {wrong}", q.number)));
            }
        }
        self.log.event(now, "wires carry", 0, 0);
        let actor = self.wires_actor();
        self.next[actor] = next;
        Ok(())
    }

    fn step_replay(&mut self) -> Result<(), Violation> {
        let actor = self.next.len() - 2;
        let replay = self.replay.as_mut().expect("it acts");
        let what = replay.step()?;
        self.log.event(self.now, what, 0, replay.breaks);
        self.progress.at = self.now;
        self.next[actor] = self.now + 300;
        if replay.is_finished() {
            self.next[actor] = NEVER;
            self.progress.unfinished -= 1;
        }
        Ok(())
    }

    fn step_mesh(&mut self) -> Result<(), Violation> {
        let now = self.now;
        let due: Vec<Tell> = self.tells.extract_if(.., |tell| tell.at <= now).collect();
        for Tell { qp, end, status, .. } in due {
            self.log.event(now, "mesh tells", qp as u64 * 2 + end as u64, status.word());
            self.end_one(qp, end, status)?;
        }
        self.next_tell();
        Ok(())
    }

    fn next_tell(&mut self) {
        let actor = self.next.len() - 1;
        self.next[actor] = self.tells.iter().map(|tell| tell.at).min().unwrap_or(NEVER);
    }

    pub(super) fn tell(&mut self, qp: usize, end: usize, status: Status, delay: u64) {
        self.tells.push(Tell { at: self.now + delay, qp, end, status });
        self.next_tell();
    }

    /// A node that sleeps was rung, or one that has no queue pair yet was asked for something.
    pub(super) fn rouse(&mut self, node: usize) {
        let n = &mut self.nodes[node];
        n.rung = true;
        if n.dead {
            return;
        }
        let at = self.now.max(n.stopped_until) + self.random.time(2_000);
        let actor = self.node_actor(node);
        let waits = self.next[actor] == NEVER || self.nodes[node].doing == node::Doing::Asleep;
        if waits && self.next[actor] > at {
            self.next[actor] = at;
        }
    }

    // ------------------------------------------------------------------- nodes

    fn step_node(&mut self, at: usize) -> Result<(), Violation> {
        let node = &mut self.nodes[at];
        if self.now < node.stopped_until {
            self.next[at] = node.stopped_until;
            return Ok(());
        }
        if node.doing == node::Doing::Dead {
            return self.take_over(at);
        }
        firmware::waited();
        let (did, next) = node.step(self.now);
        self.log.event(self.now, name(did), at as u64, 0);
        self.next[at] = next;
        let waited = firmware::waited();
        if waited > 0 {
            return Err(broken(
                8,
                format!("all queue pairs of rank {at} wait {waited} ns for the firmware of one"),
            ));
        }
        if matches!(did, node::Did::FellAsleep) {
            return self.must_sleep_well(at, None);
        }
        if !matches!(did, node::Did::Worked | node::Did::Idled | node::Did::Died) {
            return Ok(());
        }
        if did == node::Did::Died {
            self.neighbours_may_sleep(at);
        }
        // A node that was rung wakes.
        if self.nodes[at].neighbours.iter().any(|n| self.nodes[*n].is_asleep()) {
            let rings = self.nodes[at].machine.counters().rings;
            if rings != self.nodes[at].rings {
                self.nodes[at].rings = rings;
                for i in 0..self.nodes[at].neighbours.len() {
                    let other = self.nodes[at].neighbours[i];
                    if self.nodes[other].is_asleep() && self.nodes[other].hears() {
                        self.rouse(other);
                    }
                }
            }
            for i in 0..self.nodes[at].neighbours.len() {
                let other = self.nodes[at].neighbours[i];
                if let Err(violation) = self.must_sleep_well(other, Some(at)) {
                    // The end of a queue pair rings without being counted.
                    if !self.nodes[other].hears() {
                        return Err(violation);
                    }
                    self.rouse(other);
                }
            }
        }
        if self.verbs {
            let actor = self.nic_actor();
            if self.next[actor] > self.now + MS && self.devices_are_busy() {
                self.next[actor] = self.now + self.random.time(500);
            }
        }
        let wires = self.nodes[at].ends.iter().filter_map(|(qp, ..)| self.qps[*qp].wires.as_ref());
        if let Some(due) = wires.filter_map(|wires| wires.next()).min() {
            let actor = self.wires_actor();
            self.next[actor] = self.next[actor].min(due);
        }
        self.take_sent()?;
        self.take_broken()?;
        for i in 0..self.nodes[at].ends.len() {
            let (qp, end, _) = self.nodes[at].ends[i];
            if !self.qps[qp].started {
                self.try_start(qp);
            }
            if self.check_end(at, i)? {
                self.progress.at = self.now;
                for program in [2 * qp + end, 2 * qp + 1 - end] {
                    self.attend(program);
                }
            }
        }
        if did == node::Did::Died { self.bury(at) } else { Ok(()) }
    }

    /// A program has something to look at: it need not wait as long as it meant to.
    fn attend(&mut self, program: usize) {
        let actor = self.program_actor(program);
        self.programs[program].attend();
        let soon = self.now + 5 * self.programs[program].facts.plan.pace;
        if self.next[actor] != NEVER && self.next[actor] > soon && !self.qps[program / 2].dead[program % 2] {
            self.next[actor] = soon.max(self.programs[program].stopped_until);
        }
    }

    /// Links that broke tell the peer by way of the mesh.
    fn take_broken(&mut self) -> Result<(), Violation> {
        loop {
            let one = self.broken.lock().unwrap_or_else(|e| e.into_inner()).pop();
            let Some((qp, end, status)) = one else { return Ok(()) };
            // An RDMA device's own error has a cause of its own, which was noted with the fault.
            if self.qps[qp].controls[end].broken.load(Ordering::Relaxed) {
                self.qps[qp].expect(self.now, [LINK; 2]);
            }
            self.due = self.due.min(self.qps[qp].expected.map_or(NEVER, |e| e.by));
            self.tell_broken(qp, end, status)?;
        }
    }

    // ---------------------------------------------------------------- programs

    fn step_program(&mut self, at: usize) -> Result<(), Violation> {
        let actor = self.program_actor(at);
        let (qp, end) = (at / 2, at % 2);
        let (q, p, now) = (&mut self.qps[qp], &mut self.programs[at], self.now);
        if q.dead[end] || q.finished {
            self.next[actor] = NEVER;
            return Ok(());
        }
        if now < p.stopped_until {
            self.next[actor] = p.stopped_until;
            return Ok(());
        }
        let [first, second] = &mut q.flows;
        let (out, inward) = if end == 0 { (first, second) } else { (second, first) };
        let did = match q.ended[end] {
            Some(_) if q.tainted => program::Did::Nothing,
            Some(status) => p.wind_down(status.code, out)?,
            None if q.tainted => program::Did::Nothing,
            None => p.step(now, (out, inward), &q.sides[end])?,
        };
        self.log.event(now, program_name(did), at as u64, 0);
        self.progress.posted += (did == program::Did::Posted) as u64;
        self.next[actor] = now + p.pause(did);
        let node = q.nodes[end];
        if did == program::Did::Nothing {
            self.look_whether_finished(qp);
            return Ok(());
        }
        // Not only `Did::Woke`: a reservation that gives the window's end back publishes a NOP and rings for it, and the
        // program may have the WQE of its own message yet to store.
        if self.nodes[node].is_asleep() && self.nodes[node].hears() {
            self.rouse(node);
        }
        self.progress.at = now;
        self.must_sleep_well(node, None)
    }

    // --------------------------------------------------------------------- end

    /// Takes everything down. P7: each queue pair is gone within the bound, and its program sees the end.
    fn leave(&mut self) -> Result<(), Violation> {
        self.take_down();
        let begin = self.now;
        let mut leaving = true;
        while leaving {
            if self.now - begin > BOUND {
                return Err(broken(
                    7,
                    format!("queue pairs that were closed are not gone after {} s", BOUND / S),
                ));
            }
            leaving = self.move_out();
        }
        for (at, q) in self.qps.iter().enumerate() {
            for end in [0, 1] {
                if self.is_live(at, end) && !q.dead[end] && ring::observe(&q.sides[end].line[1]) == 0 {
                    return Err(broken(
                        7,
                        format!(
                            "queue pair {}, rank {}: closed, and no end is shown",
                            q.number, q.ranks[end]
                        ),
                    ));
                }
            }
        }
        self.check_graves()
    }

    /// Begins to take everything down.
    pub(super) fn take_down(&mut self) {
        for node in &mut self.nodes {
            node.leave(self.now);
        }
    }

    /// Goes on with that, a millisecond later. True while a queue pair is there.
    pub(super) fn move_out(&mut self) -> bool {
        self.now += MS;
        firmware::advance(self.now);
        let mut leaving = false;
        for node in &mut self.nodes {
            leaving |= node.is_leaving(self.now);
        }
        self.qps.iter().filter_map(|q| q.wires.as_ref()).for_each(|wires| _ = wires.step(self.now));
        for _ in 0..64 {
            let choice = self.random.next();
            if !self.verbs || self.devices_step(choice).is_none() {
                break;
            }
        }
        if self.now >= self.next_retries && self.verbs {
            self.next_retries = self.now + RETRIES;
            self.expire();
        }
        self.log.event(self.now, "leaving", 0, leaving as u64);
        leaving
    }
}

fn name(did: node::Did) -> &'static str {
    match did {
        node::Did::Worked => "engine passes",
        node::Did::Idled => "engine idles",
        node::Did::FellAsleep => "engine sleeps",
        node::Did::StayedAwake => "engine stays awake",
        node::Did::Woke => "engine wakes",
        node::Did::Died => "engine dies",
    }
}

fn program_name(did: program::Did) -> &'static str {
    match did {
        program::Did::Nothing => "program waits",
        program::Did::Posted => "program posts",
        program::Did::Padded => "program posts a NOP at the end",
        program::Did::Stored => "program stores a word",
        program::Did::Woke => "program rings",
        program::Did::Took => "program takes",
        program::Did::Released => "program gives back",
        program::Did::Completed => "program polls a CQE",
        program::Did::PostedReceive => "program posts a receive",
    }
}

#[cfg(test)]
mod tests {
    use pushgate_driver_shim::segment::Geometry;
    use pushgate_link_verbs::profiles::PROFILES;

    use super::super::plan::{EndPlan, NodePlan, Posts, QpPlan, Reader, US};
    use super::*;

    /// A queue pair whose engines fall asleep between the actions of its programs. The program of end 0 stores each WQE word
    /// by word, and its SENDs take a small part of the window.
    fn sleepy() -> Plan {
        let end = |rank, messages| EndPlan {
            rank,
            geometry: Geometry {
                window_log: 3,
                slots_log: 4,
                cq_log: 0,
                rx_log: 2,
                link_log: 2,
                landing_log: 1,
                signals: 1,
                rank,
            },
            messages,
            reader: Reader::Prompt,
            posts: Posts::Nothing,
            device: false,
            regions_written: true,
            copies: false,
            in_place_share: 255,
            slow_ns: 0,
            pace: MS,
            mix: [0; 3],
            ways: [0; 2],
            signaled: 0,
            wordwise: 100,
            longest: 128,
        };
        let qp =
            QpPlan { number: 0, carrier: Carrier::Local, recovers: false, ends: [end(0, 200), end(1, 0)] };
        Plan {
            seed: 1,
            salt: 0,
            nodes: vec![NodePlan { pace: US, doorbell: true, alone: false }; 2],
            qps: vec![qp],
            faults: Vec::new(),
            set_up: Vec::new(),
            replay: 0,
        }
    }

    #[test]
    fn p7_an_engine_that_sleeps_wakes_when_a_reservation_rings_before_its_message_is_published() {
        let devices = Devices::new(Sim::new);
        let mut cluster = Cluster::new(sleepy(), &devices, PROFILES[0], false);
        let mut woken = 0;
        while cluster.progress.unfinished > 0 {
            let (asleep, slots) = (cluster.nodes[0].is_asleep(), cluster.programs[0].producer.slots());
            cluster.step().unwrap_or_else(|violation| panic!("{violation:?}"));
            if asleep && cluster.programs[0].producer.slots() == slots + 2 && !cluster.programs[0].owes {
                assert!(!cluster.nodes[0].is_asleep());
                woken += 1;
            }
        }
        assert!(woken > 0, "no reservation published a NOP while the engine slept");
    }
}
