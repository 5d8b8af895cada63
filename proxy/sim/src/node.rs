//! A rank's engine without its thread: the machine, and what the thread around it does when there is no work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;

use pushgate_core::session::Status;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_engine::counters::Counters;
use pushgate_engine::endpoint::Endpoint;
use pushgate_engine::engine::{Clock, Command, Machine, QpId};
use pushgate_engine::idle::{Step, Wake};
use pushgate_link::crash;

use super::mover::CopyEngine;
use super::plan::{MS, NodePlan};
use super::random::Random;

/// The clock that a machine reads.
struct VirtualClock {
    now: u64,
    /// The last time that it was due.
    looked: u64,
}

impl Clock for VirtualClock {
    fn now(&mut self) -> u64 {
        self.now
    }

    fn is_due(&mut self) -> bool {
        let due = self.now - self.looked >= MS;
        if due {
            self.looked = self.now;
        }
        due
    }
}

/// Where an engine's thread stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// It makes passes.
    Passing,
    /// It was told to block, for so long at most, and has yet to say that it sleeps.
    Falling(u64),
    /// It sleeps.
    Asleep,
    /// It is dead, and no other one has taken its place.
    Dead,
}

/// An engine that is to die.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crash {
    /// Stores that it still makes.
    pub(super) left: u64,
    /// It dies at this time at the latest.
    pub(super) by: u64,
    /// Its stores count while the link of this end of a queue pair is replaced, and no others.
    pub(super) down: Option<(usize, usize)>,
    /// How many of the engines that take its place die, too.
    pub(super) again: u8,
}

/// What a step of a node was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Did {
    Worked,
    Idled,
    FellAsleep,
    StayedAwake,
    Woke,
    Died,
}

/// What an engine is asked while the run goes on.
pub(super) enum Order {
    /// Takes in an endpoint: the queue pair, which end this is, and the node at the other end.
    Add { endpoint: Box<Endpoint>, qp: usize, end: usize, peer: usize },
    /// Tells an end of a queue pair that a frame of the other end waits in its mailbox.
    Control { qp: usize, end: usize },
    /// Fails an end of a queue pair.
    Fail { qp: usize, end: usize, status: Status },
}

/// One rank's engine.
pub(super) struct Node {
    pub(super) machine: Machine,
    clock: VirtualClock,
    /// The time of its latest step, nanoseconds.
    pub(super) time: Arc<AtomicU64>,
    pub(super) doing: Doing,
    /// A bell was rung while it slept, or a command waits.
    pub(super) rung: bool,
    pub(super) doorbell: EventFd,
    random: Random,
    /// What seeds the copy engines of engines to come.
    copies: Random,
    plan: NodePlan,
    pub(super) orders: VecDeque<Order>,
    /// It makes no pass before this time.
    pub(super) stopped_until: u64,
    pub(super) dead: bool,
    /// The queue pairs: their place among all, and which end this is.
    pub(super) ends: Vec<(usize, usize, QpId)>,
    /// The nodes at the other ends.
    pub(super) neighbours: Vec<usize>,
    /// Whether its links hold nothing back: while it is asked for work.
    pub(super) truthful: Arc<AtomicBool>,
    /// Rings of its peers that were counted.
    pub(super) rings: u64,
    /// The engine is to die.
    pub(super) crash: Option<Crash>,
    /// The end that is told of its failure just now.
    failing: Option<(usize, usize, Status)>,
    /// Ends that wait for the engine to come.
    pub(super) waiting: Vec<(usize, usize)>,
    /// Counts of engines that died.
    gone: Counters,
    /// A peer's engine died while this engine slept: there may be work for which nobody has rung.
    pub(super) unrung: bool,
}

impl Node {
    pub(super) fn new(plan: NodePlan, random: Random, copies: Random, doorbell: EventFd) -> Self {
        let time = Arc::new(AtomicU64::new(0));
        let mover = Box::new(CopyEngine::new(time.clone(), copies.clone()));
        Node {
            copies,
            crash: None,
            failing: None,
            waiting: Vec::new(),
            gone: Counters::default(),
            unrung: false,
            machine: Machine::new(Some(mover), plan.alone, Arc::new(AtomicBool::new(false))),
            clock: VirtualClock { now: 0, looked: 0 },
            time,
            doing: Doing::Passing,
            rung: false,
            doorbell,
            random,
            plan,
            orders: VecDeque::new(),
            stopped_until: 0,
            dead: false,
            ends: Vec::new(),
            neighbours: Vec::new(),
            truthful: Arc::default(),
            rings: 0,
        }
    }

    /// The bell that the programs of this node ring, if its engine can block.
    pub(super) fn bell(&self) -> Option<EventFd> {
        self.plan.doorbell.then(|| self.doorbell.try_clone().expect("a descriptor"))
    }

    pub(super) fn add(&mut self, endpoint: Box<Endpoint>, qp: usize, end: usize, peer: usize, now: u64) {
        let (reply, answer) = channel();
        let wake = if self.plan.doorbell { Wake::Doorbell } else { Wake::Polled };
        self.machine.apply(Command::AddQp(endpoint, wake, reply), now);
        self.ends.push((qp, end, answer.try_recv().expect("the reply comes at once")));
        if !self.neighbours.contains(&peer) {
            self.neighbours.push(peer);
        }
    }

    /// An end of a queue pair, unless the engine does not have it.
    fn id(&self, qp: usize, end: usize) -> Option<QpId> {
        Some(self.ends.iter().find(|e| (e.0, e.1) == (qp, end))?.2)
    }

    /// An end of a queue pair, if the engine has it.
    pub(super) fn endpoint(&self, qp: usize, end: usize) -> Option<&Endpoint> {
        self.machine.endpoint(self.id(qp, end)?)
    }

    /// Counts of all engines that this node has had.
    pub(super) fn counters(&self) -> Counters {
        let mut sum = self.gone;
        sum += self.machine.counters();
        sum
    }

    /// `act` with links that hold nothing back.
    fn truly<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        self.truthful.store(true, Ordering::Relaxed);
        let result = act(self);
        self.truthful.store(false, Ordering::Relaxed);
        result
    }

    pub(super) fn set_time(&mut self, now: u64) {
        self.clock.now = now;
        self.time.store(now, Ordering::Relaxed);
    }

    /// One event of the engine's thread. Returns what it was and when the next one comes; `None`: when a bell is rung.
    pub(super) fn step(&mut self, now: u64) -> (Did, u64) {
        self.set_time(now);
        let mut did = (Did::Died, now);
        if self.dies_in(|node| did = node.act(now)) {
            self.doing = Doing::Dead;
            return (Did::Died, now);
        }
        did
    }

    /// What the engine does, with `act`. True if the engine has died on the way.
    pub(super) fn dies_in(&mut self, act: impl FnOnce(&mut Self)) -> bool {
        let Some(Crash { left, by, down, .. }) = self.crash else {
            act(self);
            return false;
        };
        if self.time.load(Ordering::Relaxed) >= by {
            return true;
        }
        let live = |(qp, end)| self.endpoint(qp, end).is_none_or(|e| e.counts().live);
        if down.is_some_and(live) {
            act(self);
            return false;
        }
        let mut left = left;
        let died = crash::within(&mut left, || act(self));
        if let Some(crash) = &mut self.crash {
            crash.left = left;
        }
        died
    }

    /// The engine has died: another one is to begin, without queue pairs. Returns the ends that the dead one had.
    pub(super) fn bury(&mut self) -> Vec<(usize, usize)> {
        self.gone = self.counters();
        let mover = Box::new(CopyEngine::new(self.time.clone(), Random::new(self.copies.next(), 0)));
        self.machine = Machine::new(Some(mover), self.plan.alone, Arc::new(AtomicBool::new(false)));
        (self.doing, self.rung, self.rings, self.crash) = (Doing::Dead, false, 0, None);
        // What a program asks for, it asks the next engine for again. Frames went with the engine.
        self.orders.retain(|order| !matches!(order, Order::Control { .. }));
        if let Some((qp, end, status)) = self.failing.take() {
            self.orders.push_front(Order::Fail { qp, end, status });
        }
        std::mem::take(&mut self.ends).into_iter().map(|(qp, end, _)| (qp, end)).collect()
    }

    fn act(&mut self, now: u64) -> (Did, u64) {
        match self.doing {
            Doing::Passing => self.pass(now),
            Doing::Dead => unreachable!("another engine takes over first"),
            Doing::Falling(limit) => {
                let pending = !self.orders.is_empty();
                let sleeps =
                    self.truly(|node| node.machine.prepare_sleep() && node.machine.falls_asleep(|| pending));
                if sleeps {
                    self.doing = Doing::Asleep;
                    self.rung = false;
                    return (Did::FellAsleep, now + limit);
                }
                self.machine.woken();
                self.doing = Doing::Passing;
                (Did::StayedAwake, now + self.random.time(self.plan.pace))
            }
            Doing::Asleep => {
                self.machine.bells().for_each(|bell| _ = bell.drain());
                self.doorbell.drain();
                self.machine.awake();
                self.machine.woken();
                (self.doing, self.rung, self.unrung) = (Doing::Passing, false, false);
                (Did::Woke, now + self.random.time(self.plan.pace))
            }
        }
    }

    fn pass(&mut self, now: u64) -> (Did, u64) {
        while let Some(order) = self.orders.pop_front() {
            match order {
                Order::Add { endpoint, qp, end, peer } => self.add(endpoint, qp, end, peer, now),
                Order::Control { qp, end } => {
                    if let Some(id) = self.id(qp, end) {
                        self.machine.apply(Command::Control(id), now);
                    }
                }
                Order::Fail { qp, end, status } => {
                    if let Some(id) = self.id(qp, end) {
                        let (reply, _answer) = channel();
                        self.failing = Some((qp, end, status));
                        self.machine.apply(Command::Fail(Some(id), status, reply), now);
                        self.failing = None;
                    }
                }
            }
        }
        let step = self.machine.step(&mut self.clock);
        let pace = self.random.time(self.plan.pace);
        match step {
            // An engine that yields has work, or waits for what wakes nobody.
            Step::Spin => (Did::Worked, now + pace),
            Step::Yield => (Did::Idled, now + pace + 500),
            Step::Sleep(time) => (Did::Idled, now + time.as_nanos() as u64),
            Step::Block(limit) => {
                self.doing = Doing::Falling(limit.as_nanos() as u64);
                (Did::Idled, now + pace)
            }
        }
    }

    /// Looks whether a peer's bell or a producer's was rung, and takes the ring.
    pub(super) fn hears(&mut self) -> bool {
        // All are drained: each ring is one wake-up.
        let bells = self.machine.bells().fold(false, |any, bell| bell.drain() | any);
        let rung = self.doorbell.drain() | bells;
        self.rung |= rung;
        rung
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.doing == Doing::Asleep && !self.rung
    }

    /// Takes all queue pairs out.
    pub(super) fn leave(&mut self, now: u64) {
        self.set_time(now);
        if self.doing == Doing::Asleep {
            self.machine.awake();
        }
        self.doing = Doing::Passing;
        // A dead rank's engine has taken in nothing more.
        while let Some(order) = self.orders.pop_front() {
            if let Order::Add { endpoint, qp, end, peer } = order {
                self.add(endpoint, qp, end, peer, now);
            }
        }
        self.machine.remove_all(now);
    }

    /// Moves the queue pairs on that were taken out, and frees those that are gone. True while there is one.
    pub(super) fn is_leaving(&mut self, now: u64) -> bool {
        self.set_time(now);
        let leaving = self.machine.is_leaving(now);
        while let Some(gone) = self.machine.next_gone() {
            gone.free();
        }
        leaving
    }
}
