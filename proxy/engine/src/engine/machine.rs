//! What an engine does, without its thread: a [`Machine`] is given commands and the time, and makes one pass over its
//! queue pairs in each [`Machine::step`]. A thread drives it (`thread.rs`), or a simulation in virtual time.

mod idles;
mod recording;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::mover::Mover;
use pushgate_driver_shim::bell::Bell;
use pushgate_driver_shim::interrupt::Interrupted;
use pushgate_link::{prefetch, ring};

use self::idles::Idles;
use self::recording::Recording;
use super::command::{Command, EngineError, QpId, Waiter};
use super::leaving::{Abandoned, DEVICE_SETTLE, Gone, Leaving, SETTLE};
use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::idle::{Idle, Step, Wake};
use crate::recorder::{Recorder, Stall};

/// Turns of queue pairs with work between two looks at [`Clock::is_due`]. A turn takes in at most 64 messages each way
/// and copies at most 1 MiB, some 0.1 ms, so 16 turns take a few milliseconds at most.
const TURNS: u32 = 16;

/// Passes between two looks at the clock while there is no work.
const IDLE_TICK: u32 = 32;

/// Ticks in which each queue pair that is watched gets a turn, whatever its words say.
const ROUND: usize = 32;

/// The least time between two ticks for each queue pair, nanoseconds: a tick takes some 0.1 us for each, so ticks take a
/// twentieth of the time at most, however many queue pairs there are.
const TICK_EVERY: u64 = 2_000;

/// Of fewer queue pairs than this all stay in a processor's caches from one turn to the next: nothing is asked for ahead.
const MANY: usize = 64;

/// Where a [`Machine`] reads the time. The time never goes back.
pub trait Clock {
    /// The time now, nanoseconds since a start that the clock chooses.
    fn now(&mut self) -> u64;

    /// True every millisecond or so: then the caller reads [`Clock::now`]. Costs less than that.
    fn is_due(&mut self) -> bool;
}

/// A region that was added, and who waits until the peer knows of it.
struct Telling {
    qp: QpId,
    key: u32,
    waiter: Waiter<Result<u32, EngineError>>,
}

/// A region that goes as soon as nothing uses it.
struct Removing {
    qp: QpId,
    key: u32,
    waiter: Waiter<bool>,
    /// When the removal was asked for, nanoseconds.
    since: u64,
}

/// The queue pairs of an engine and what is under way for them. Its driver owns it: one thread at a time.
pub struct Machine {
    mover: Option<Box<dyn Mover>>,
    /// There is a core to spare for spinning.
    alone: bool,
    idle: Idle,
    endpoints: Vec<(QpId, Box<Endpoint>)>,
    /// Which of them are idle.
    idles: Idles,
    /// Turns of the last pass that found work.
    worked: usize,
    /// Queue pairs whose links have something to tell or to send since a turn of their own ([`Machine::turn`]).
    owing: VecDeque<QpId>,
    /// When the time is passed on next, nanoseconds.
    next_tick: u64,
    next: u32,
    /// Counts of the queue pairs that are gone.
    gone: Counters,
    sleeps: u64,
    telling: Vec<Telling>,
    removing: Vec<Removing>,
    leaving: Leaving,
    /// Turns of queue pairs that did work.
    turns: u32,
    /// Passes that found no work.
    passes: u32,
    /// The last step said to sleep, so the time is out of date.
    slept: bool,
    /// The time as last read, nanoseconds.
    now: u64,
    /// A device's copies for a queue pair that is gone did not end. Written by [`Machine::keep`] alone.
    kept: Arc<AtomicBool>,
    recording: Option<Recording>,
    /// Queue pairs have done work that was not recorded.
    unrecorded: bool,
}

impl Machine {
    /// A machine without queue pairs. `mover` copies into device memory; `alone` says that there is a core to spare for
    /// spinning. `kept` is set when memory must stay for ever, because a device does not end its copies.
    pub fn new(mover: Option<Box<dyn Mover>>, alone: bool, kept: Arc<AtomicBool>) -> Self {
        Machine {
            mover,
            alone,
            idle: Idle::new(Wake::Doorbell, alone),
            endpoints: Vec::new(),
            idles: Idles::default(),
            worked: 0,
            owing: VecDeque::new(),
            next_tick: 0,
            next: 0,
            gone: Counters::default(),
            sleeps: 0,
            telling: Vec::new(),
            removing: Vec::new(),
            leaving: Leaving::default(),
            turns: 0,
            passes: 0,
            slept: false,
            now: 0,
            kept,
            recording: None,
            unrecorded: false,
        }
    }

    /// The machine writes this recorder, and logs each queue pair that stalls.
    pub(crate) fn with_recorder(mut self, recorder: Option<Recorder>, stall: Stall) -> Self {
        self.recording = recorder.map(|recorder| Recording::new(recorder, stall));
        self
    }

    /// This thread alone drives the machine.
    pub(crate) fn driven_by(&self, thread: u32) {
        if let Some(recording) = &self.recording {
            recording.driven_by(thread);
        }
    }

    /// One pass over all queue pairs. Returns what may be done until the next pass: before [`Step::Block`] is carried
    /// out, [`Machine::prepare_sleep`] has the last word.
    #[inline]
    pub fn step(&mut self, clock: &mut impl Clock) -> Step {
        if std::mem::take(&mut self.slept) {
            self.set_time(clock.now());
        }
        if self.idle.has_yielded() {
            self.set_time(clock.now());
            self.idle.back(self.now);
        }
        let mut worked = 0;
        let looks = self.idles.begin(self.worked);
        for i in 0..self.endpoints.len() {
            if self.idles.passes_over(i, looks) {
                continue;
            }
            self.fetch_ahead(i);
            if self.poll(i, clock) {
                worked += 1;
                // Turns are counted here, and not passes: a pass over all queue pairs may copy a MiB for each of
                // them, so the time that a pass takes has no small bound.
                self.look_at_clock(clock);
            }
        }
        self.worked = worked;
        let waited_for = !self.telling.is_empty() || !self.removing.is_empty() || !self.leaving.is_empty();
        if waited_for {
            self.tell();
            self.remove();
            self.let_go();
            self.look_at_clock(clock);
        }
        if worked > 0 {
            self.unrecorded = true;
            self.idle.busy();
            return Step::Spin;
        }
        if waited_for || self.is_ending() {
            // A peer or a device is waited for, which wakes nobody and may need this core: the kernel may simulate
            // the device.
            self.idle.busy();
            self.look_at_clock(clock);
            return Step::Yield;
        }
        // While the engine spins, the clock would cost more than the passes. In every other step of idling a pass is
        // worth a look at it.
        self.passes = self.passes.wrapping_add(1);
        if self.idle.spins() && !self.passes.is_multiple_of(IDLE_TICK) {
            return Step::Spin;
        }
        self.tick(clock);
        let step = match self.idle.idle(self.now) {
            Step::Block(limit) => Step::Block(self.until_due(limit)),
            step => step,
        };
        self.slept = matches!(step, Step::Sleep(_) | Step::Block(_));
        self.sleeps += matches!(step, Step::Sleep(_)) as u64;
        step
    }

    /// Asks for what the next turns after this place need ([`prefetch`]), in three steps, for each step reads what the
    /// one before has asked for a turn earlier: the endpoint, what the endpoint points to, what its link points to. A
    /// queue pair that is watched probably gets no turn.
    #[inline(always)]
    fn fetch_ahead(&self, at: usize) {
        if self.endpoints.len() < MANY {
            return;
        }
        let ahead = |turns: usize| {
            let (_, endpoint) = self.endpoints.get(at + turns)?;
            (!self.idles.is_watched(at + turns)).then_some(&**endpoint)
        };
        if let Some(endpoint) = ahead(3) {
            prefetch::value(endpoint);
        }
        if let Some(endpoint) = ahead(2) {
            endpoint.prefetch();
        }
        if let Some(endpoint) = ahead(1) {
            endpoint.prefetch_link();
        }
    }

    /// Asks for what the next ticks after this place need, as [`Machine::fetch_ahead`] does for turns.
    #[inline(always)]
    fn fetch_for_tick(&self, at: usize) {
        if self.endpoints.len() < MANY {
            return;
        }
        // A tick takes less time than a line from memory, so further ahead than for turns.
        if let Some((_, endpoint)) = self.endpoints.get(at + 8) {
            prefetch::value(&**endpoint);
        }
        if let Some((_, endpoint)) = self.endpoints.get(at + 4) {
            endpoint.prefetch_for_tick();
        }
    }

    /// A turn of the queue pair at a place. True if it did work.
    #[inline]
    fn poll(&mut self, at: usize, clock: &mut impl Clock) -> bool {
        let endpoint = &mut self.endpoints[at].1;
        self.idles.before(at, endpoint);
        let work = endpoint.poll(&mut self.mover);
        if work && endpoint.samples() {
            endpoint.sample(clock.now());
        }
        self.idles.after(at, work);
        work
    }

    /// True while a queue pair has ended and its end was not shown, or while its broken link is being stopped.
    #[inline]
    fn is_ending(&self) -> bool {
        // One that is watched is live.
        let mut all = self.endpoints.iter().enumerate();
        all.any(|(at, (_, endpoint))| !self.idles.is_watched(at) && endpoint.is_ending())
    }

    /// How long of `limit` the engine may block before a queue pair has to look at the time.
    #[cold]
    fn until_due(&self, limit: Duration) -> Duration {
        let due = self.endpoints.iter().filter_map(|(_, e)| e.wakes_at()).min();
        due.map_or(limit, |at| limit.min(Duration::from_nanos(at.saturating_sub(self.now))))
    }

    /// A turn of one queue pair alone, and of another one whose link has something to tell or to send since a turn of its own: the caller
    /// may not ask for that one again. [`Machine::step`] must come now and then: it does everything else.
    #[inline]
    pub fn turn(&mut self, qp: QpId, clock: &mut impl Clock) {
        if std::mem::take(&mut self.slept) {
            self.set_time(clock.now());
        }
        // Taken out first: what this turn leaves to be done waits for the next one.
        let other = self.owing.pop_front();
        self.turn_of(qp, clock);
        if let Some(other) = other.filter(|other| *other != qp) {
            self.turn_of(other, clock);
        }
    }

    fn turn_of(&mut self, qp: QpId, clock: &mut impl Clock) {
        // Numbers only grow, and the queue pairs stand in their order.
        let Ok(at) = self.endpoints.binary_search_by_key(&qp.0, |(id, _)| id.0) else { return };
        if self.poll(at, clock) {
            self.unrecorded = true;
            self.idle.busy();
            self.look_at_clock(clock);
        }
        // There is room for all: no allocation.
        if self.endpoints[at].1.owes() && !self.owing.contains(&qp) {
            self.owing.push_back(qp);
        }
    }

    /// Passes the time on to the queue pairs, if it is time to.
    #[inline(always)]
    fn look_at_clock(&mut self, clock: &mut impl Clock) {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) && clock.is_due() {
            self.tick(clock);
        }
    }

    /// Passes the time on to the queue pairs, which look for what the time has ended.
    fn tick(&mut self, clock: &mut impl Clock) {
        self.now = clock.now();
        if self.now < self.next_tick {
            return;
        }
        self.next_tick = self.now + TICK_EVERY * self.endpoints.len() as u64;
        for at in 0..self.endpoints.len() {
            self.fetch_for_tick(at);
            let endpoint = &mut self.endpoints[at].1;
            endpoint.tick(self.now);
            if !endpoint.is_live() {
                self.idles.rouse(at);
            }
        }
        self.idles.rouse_some(ROUND);
        if let Some(recording) = self.recording.as_mut().filter(|recording| recording.is_due(self.now)) {
            recording.record_some(self.now, self.sleeps, &mut self.endpoints);
        }
    }

    /// Passes the time on to the queue pairs, and nothing else.
    fn set_time(&mut self, now: u64) {
        self.now = now;
        for (_, endpoint) in &mut self.endpoints {
            endpoint.set_time(now);
        }
    }

    // ------------------------------------------------------------------ sleep

    /// What arrives after this wakes the engine. False if there is work already. After it comes
    /// [`Machine::woken`], whatever happened meanwhile.
    pub fn prepare_sleep(&mut self) -> bool {
        if std::mem::take(&mut self.unrecorded)
            && let Some(recording) = &self.recording
        {
            recording.record_worked(self.now, &mut self.endpoints);
        }
        // All are asked: each arms what wakes for it.
        !self.endpoints.iter_mut().fold(false, |any, (_, e)| e.prepare_sleep() | any)
    }

    /// Says to producers and peers that this engine sleeps, then looks for work once more. True if it may sleep now;
    /// then [`Machine::awake`] takes the word back. `pending` says whether a command waits.
    pub fn falls_asleep(&self, pending: impl Fn() -> bool) -> bool {
        let flags: Vec<_> = self.endpoints.iter().flat_map(|(_, e)| e.sleeping()).collect();
        ring::may_sleep(&flags, || pending() || self.endpoints.iter().any(|(_, e)| e.has_work()))
    }

    /// Takes back the word of [`Machine::falls_asleep`].
    pub fn awake(&mut self) {
        let flags: Vec<_> = self.endpoints.iter().flat_map(|(_, e)| e.sleeping()).collect();
        ring::awake(&flags);
        self.sleeps += 1;
    }

    /// The engine is awake, or did not sleep.
    pub fn woken(&mut self) {
        self.endpoints.iter_mut().for_each(|(_, e)| e.woken());
    }

    /// The bells that peers ring.
    pub fn bells(&self) -> impl Iterator<Item = &Bell> {
        self.endpoints.iter().flat_map(|(_, e)| e.bells())
    }

    /// Adds the descriptors besides the bells that wake the engine. True if those of a link wake only for a while.
    pub fn wakes<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) -> bool {
        self.endpoints.iter().fold(false, |any, (_, e)| e.wakes(fds) | any)
    }

    // ----------------------------------------------------- what is waited for

    /// Answers those whose regions the peers know by now, and those who do not wait for that: their regions go, which no program
    /// knows.
    #[cold]
    fn tell(&mut self) {
        let endpoints = &mut self.endpoints;
        self.telling.retain(|t| {
            let endpoint = endpoints.iter_mut().find(|(id, _)| *id == t.qp).map(|(_, endpoint)| endpoint);
            let answer = match endpoint {
                Some(e) if !e.regions_told() => {
                    (t.waiter.hurries() && e.remove_region(t.key)).then_some(Err(Interrupted.into()))
                }
                _ => Some(Ok(t.key)),
            };
            let waits = answer.is_none();
            answer.into_iter().for_each(|answer| t.waiter.answer(answer));
            waits
        });
    }

    /// Removes the regions that nothing uses any more, and answers who waits for that.
    #[cold]
    fn remove(&mut self) {
        let (endpoints, now) = (&mut self.endpoints, self.now);
        self.removing.retain(|r| {
            let Some((_, endpoint)) = endpoints.iter_mut().find(|(id, _)| *id == r.qp) else {
                r.waiter.answer(false);
                return false;
            };
            // A device can't be told to stop: memory that is given back under its copy would be written later.
            let limit = match endpoint.device_uses(r.key) {
                _ if r.waiter.hurries() => 0,
                true => DEVICE_SETTLE,
                false => SETTLE,
            };
            let waits = endpoint.region_in_use(r.key) && now.saturating_sub(r.since) < limit;
            if !waits {
                r.waiter.answer(endpoint.remove_region(r.key));
            }
            waits
        });
    }

    /// Moves the queue pairs on that were taken out.
    #[cold]
    fn let_go(&mut self) {
        let (counters, settled) = self.leaving.advance(&mut self.mover, self.now);
        self.gone += counters;
        if !settled {
            self.keep();
        }
    }

    /// Says that what a device still copies stays for ever, with its mover.
    #[cold]
    fn keep(&self) {
        // Release, before anybody can find the channel closed: `Engine::remove_qp` says why.
        self.kept.store(true, Ordering::Release);
    }

    /// The next queue pair that is gone, for the caller to free: that may take long.
    #[inline]
    pub fn next_gone(&mut self) -> Option<Gone> {
        self.leaving.next_gone()
    }

    // -------------------------------------------------------------------- end

    /// Takes all queue pairs out. [`Machine::is_leaving`] says when nothing of them touches memory any more.
    pub fn remove_all(&mut self, now: u64) {
        self.set_time(now);
        self.idles.clear();
        for (_, endpoint) in std::mem::take(&mut self.endpoints) {
            self.leaving.add(endpoint, None, now);
        }
    }

    /// Moves the queue pairs on that were taken out, each as long as its link's and its device's limits allow. True
    /// while there is one.
    pub fn is_leaving(&mut self, now: u64) -> bool {
        self.set_time(now);
        self.let_go();
        !self.leaving.is_empty()
    }

    /// Hands out all queue pairs after a panic.
    #[cold]
    pub(super) fn abandon(&mut self) -> Vec<Abandoned> {
        self.idles.clear();
        let own = std::mem::take(&mut self.endpoints).into_iter().map(|(_, e)| Abandoned::new(e));
        own.chain(self.leaving.take()).collect()
    }

    /// Frees what [`Machine::abandon`] handed out.
    #[cold]
    pub(super) fn free_abandoned(&mut self, all: Vec<Abandoned>) {
        for abandoned in all {
            if !abandoned.free() {
                self.keep();
            }
        }
    }

    // --------------------------------------------------------------- commands

    /// A queue pair that a command is for. What the command changes there is found by the next turn.
    fn find(&mut self, qp: QpId) -> Option<&mut Endpoint> {
        let at = self.endpoints.iter().position(|(id, _)| *id == qp)?;
        self.idles.rouse(at);
        Some(&mut self.endpoints[at].1)
    }

    /// Carries out a command at time `now`, nanoseconds, or begins to.
    pub fn apply(&mut self, command: Command, now: u64) {
        self.set_time(now);
        match command {
            Command::AddQp(mut endpoint, wake, reply) => {
                let id = QpId(self.next);
                self.next += 1;
                endpoint.set_time(now);
                endpoint.begin_trace(id.0, now);
                endpoint.begin_again();
                self.endpoints.push((id, endpoint));
                self.idles.push();
                self.owing.reserve(self.endpoints.len());
                // One that must be polled keeps the whole engine polling.
                if wake == Wake::Polled || self.endpoints.len() == 1 {
                    self.idle.set_wake(wake, self.alone);
                }
                let _ = reply.send(id);
            }
            Command::RemoveQp(qp, waiter) => match self.endpoints.iter().position(|(id, _)| *id == qp) {
                Some(at) => {
                    self.idles.remove(at);
                    self.leaving.add(self.endpoints.remove(at).1, Some(waiter), now);
                }
                None => waiter.answer(None),
            },
            Command::AddRegion(qp, memory, bytes, waiter) => {
                let answer = match self.find(qp) {
                    Some(e) => e.add_region(memory, bytes).ok_or(EngineError::TooManyRegions),
                    None => Err(EngineError::NoQp(qp.0)),
                };
                match answer {
                    // The peer may use the key as soon as our program has it.
                    Ok(key) => self.telling.push(Telling { qp, key, waiter }),
                    Err(_) => waiter.answer(answer),
                }
            }
            Command::RemoveRegion(qp, key, waiter) => {
                self.removing.push(Removing { qp, key, waiter, since: now });
            }
            Command::Fail(qp, status, reply) => {
                for (at, (id, endpoint)) in self.endpoints.iter_mut().enumerate() {
                    if qp.is_none_or(|qp| qp == *id) {
                        self.idles.rouse(at);
                        endpoint.fail(status);
                    }
                }
                let _ = reply.send(());
            }
            Command::PeerEnded(qp, status, reply) => {
                if let Some(at) = self.endpoints.iter().position(|(id, _)| *id == qp) {
                    self.idles.rouse(at);
                    self.endpoints[at].1.peer_ended(status);
                }
                let _ = reply.send(());
            }
            Command::Control(qp) => {
                self.unrecorded = true;
                if let Some(endpoint) = self.find(qp) {
                    endpoint.control();
                }
            }
            Command::BreakLink(qp, reply) => {
                self.unrecorded = true;
                let _ = reply.send(self.find(qp).map(Endpoint::break_link));
            }
            Command::Status(qp, reply) => _ = reply.send(self.find(qp).map(|e| e.status())),
            Command::CountersOf(qp, reply) => _ = reply.send(self.find(qp).map(|e| e.counters())),
            Command::RegionSends(qp, reply) => _ = reply.send(self.find(qp).map(|e| e.region_sends())),
            Command::IsRegistered(qp, key, reply) => {
                let _ = reply.send(self.find(qp).map(|e| e.is_registered(key)));
            }
            Command::Counters(reply) => _ = reply.send(self.counters()),
        }
    }

    /// A queue pair, for the simulator's checks.
    #[cfg(feature = "sim")]
    pub fn endpoint(&self, qp: QpId) -> Option<&Endpoint> {
        self.endpoints.iter().find(|(id, _)| *id == qp).map(|(_, e)| &**e)
    }

    /// Counts of all queue pairs, those that are gone included.
    pub fn counters(&self) -> Counters {
        let mut sum = self.gone;
        let here = self.endpoints.iter().map(|(_, e)| e.counters());
        here.chain(self.leaving.counters()).for_each(|c| sum += c);
        sum.sleeps = self.sleeps;
        sum
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(recording) = &self.recording {
            recording.end();
        }
        // This machine's own store, or none.
        if self.kept.load(Ordering::Relaxed) {
            // To end the mover would be to wait for its copies.
            std::mem::forget(self.mover.take());
        }
    }
}
