//! A rank's engine without its thread: the machine, and what the thread around it does when there is no work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;

use pushgate_driver_shim::eventfd::EventFd;

use super::mover::CopyEngine;
use super::plan::{MS, NodePlan};
use super::random::Random;
use crate::endpoint::Endpoint;
use crate::engine::{Clock, Command, Machine, QpId};
use crate::idle::{Step, Wake};
use crate::session::Status;

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
}

/// What a step of a node was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Did {
    Worked,
    Idled,
    FellAsleep,
    StayedAwake,
    Woke,
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
}

impl Node {
    pub(super) fn new(plan: NodePlan, random: Random, copies: Random, doorbell: EventFd) -> Self {
        let time = Arc::new(AtomicU64::new(0));
        let mover = Box::new(CopyEngine::new(time.clone(), copies));
        Node {
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

    fn add(&mut self, endpoint: Box<Endpoint>, qp: usize, end: usize, peer: usize, now: u64) {
        let (reply, answer) = channel();
        let wake = if self.plan.doorbell { Wake::Doorbell } else { Wake::Polled };
        self.machine.apply(Command::AddQp(endpoint, wake, reply), now);
        self.ends.push((qp, end, answer.try_recv().expect("the reply comes at once")));
        if !self.neighbours.contains(&peer) {
            self.neighbours.push(peer);
        }
    }

    /// An end of a queue pair that the engine has.
    fn id(&self, qp: usize, end: usize) -> QpId {
        self.ends.iter().find(|e| (e.0, e.1) == (qp, end)).expect("it was added").2
    }

    /// An end of a queue pair, if the engine has it.
    pub(super) fn endpoint(&self, qp: usize, end: usize) -> Option<&Endpoint> {
        self.machine.endpoint(self.ends.iter().find(|e| (e.0, e.1) == (qp, end))?.2)
    }

    /// `act` with links that hold nothing back.
    fn truly<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        self.truthful.store(true, Ordering::Relaxed);
        let result = act(self);
        self.truthful.store(false, Ordering::Relaxed);
        result
    }

    fn set_time(&mut self, now: u64) {
        self.clock.now = now;
        self.time.store(now, Ordering::Relaxed);
    }

    /// One event of the engine's thread. Returns what it was and when the next one comes; `None`: when a bell is rung.
    pub(super) fn step(&mut self, now: u64) -> (Did, u64) {
        self.set_time(now);
        match self.doing {
            Doing::Passing => self.pass(now),
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
                (self.doing, self.rung) = (Doing::Passing, false);
                (Did::Woke, now + self.random.time(self.plan.pace))
            }
        }
    }

    fn pass(&mut self, now: u64) -> (Did, u64) {
        while let Some(order) = self.orders.pop_front() {
            match order {
                Order::Add { endpoint, qp, end, peer } => self.add(endpoint, qp, end, peer, now),
                Order::Control { qp, end } => {
                    let id = self.id(qp, end);
                    self.machine.apply(Command::Control(id), now);
                }
                Order::Fail { qp, end, status } => {
                    let id = self.id(qp, end);
                    let (reply, _answer) = channel();
                    self.machine.apply(Command::Fail(Some(id), status, reply), now);
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
