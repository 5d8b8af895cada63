//! The supervisor: makes one fault after the other, and waits after each until the ranks are as they must be.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use pushgate::settings::ProxyPlace;
use rustix::process::Signal;

use super::children::{Cause, Children, Event, Order, Said, Traffic};
use super::fault::{Bounds, Fault, Kind, Plan};
use super::net::{Links, Netem};
use super::rank::RECEIVES;
use super::tally::{Tally, Total, all_arrived};
use super::{Options, say};
use crate::signals;

/// The longest that a rank is stopped.
const MOST_STOP: Duration = Duration::from_millis(500);
/// The longest that bytes between two ranks' sockets are held back.
const MOST_DELAY: Duration = Duration::from_secs(1);
/// The longest that a network device is disturbed.
const MOST_AWAY: Duration = Duration::from_secs(3);
/// How often signals and standstills are looked for.
const LOOK: Duration = Duration::from_millis(20);

/// Something did not happen in time.
#[derive(Debug)]
pub struct Hung(String);

impl fmt::Display for Hung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Hung {}

/// A signal asked this process to end.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// How a rank's queue pair with a peer ended.
struct Ended {
    peer: u32,
    cause: Cause,
    why: String,
    status: String,
}

/// What a rank has said since its start.
#[derive(Default)]
struct Rank {
    ready: bool,
    links: u64,
    traffic: Vec<Traffic>,
    ended: Option<Ended>,
    /// What each rank of the job has counted, once all are done.
    done: Option<BTreeMap<u32, Vec<Traffic>>>,
    gone: bool,
}

/// A run of ranks under faults.
pub struct Supervisor<'a> {
    o: &'a Options,
    plan: Plan,
    tally: Tally,
    links: Option<Links>,
    children: Option<Children>,
    /// The ranks that this process has started.
    ranks: BTreeMap<u32, Rank>,
    /// How often the ranks were started.
    starts: u32,
    /// Breaks that were ordered.
    breaks: u64,
    /// By break: how long until the next delivery.
    back: BTreeMap<u64, Duration>,
    /// When the counts of messages last changed, by rank and peer.
    moved: BTreeMap<(u32, u32), Instant>,
    /// A rank is stopped, or the ranks are about to end: nothing need move.
    still: bool,
    /// An end is made: ranks may end.
    ending: bool,
}

impl<'a> Supervisor<'a> {
    pub fn new(o: &'a Options, links: Option<Links>) -> Self {
        // A rank that is stopped for longer than these may count as lost, or its slots as stuck. The faults of several hosts may
        // follow each other without a message between them.
        let part = if o.membership.is_some() { 2 * o.ranks } else { 4 };
        let quarter =
            |limit: Option<Duration>, most: Duration| limit.map_or(most, |limit| (limit / part).min(most));
        let within = |most| quarter(o.settings.recovery(), quarter(Some(o.settings.timeout), most));
        let bounds = Bounds {
            every: o.every,
            ranks: o.ranks,
            own: o.membership.as_ref().map(|found| found.rank),
            most_stop: quarter(Some(o.settings.stuck), within(MOST_STOP)),
            most_delay: within(MOST_DELAY),
            proxy: o.settings.proxy == ProxyPlace::Process,
            cuts: o.settings.rendezvous != "none",
            links: links.as_ref().map_or(0, |links| links.names().len()),
            most_away: within(MOST_AWAY),
        };
        Supervisor {
            o,
            // Each host makes other faults.
            plan: Plan::new(o.seed ^ u64::from(bounds.own.unwrap_or(0)) << 48, bounds),
            tally: Tally::default(),
            links,
            children: None,
            ranks: BTreeMap::new(),
            starts: 0,
            breaks: 0,
            back: BTreeMap::new(),
            moved: BTreeMap::new(),
            still: false,
            ending: false,
        }
    }

    /// The processes of the ranks that run.
    pub fn pids(&self) -> Vec<u32> {
        self.children.as_ref().map_or_else(Vec::new, Children::pids)
    }

    /// Ends the children, and returns what was counted.
    pub fn end(&mut self) -> &Tally {
        self.collect();
        &self.tally
    }

    /// Runs to the end of the time that was asked for. Returns an error if a rank did what it must not do.
    pub fn run(&mut self) -> Result<()> {
        self.start()?;
        let end = Instant::now() + Duration::from_secs(self.o.seconds.into());
        loop {
            let fault = self.plan.next();
            let at = Instant::now() + fault.gap;
            self.pass(at.min(end))?;
            if at >= end {
                break;
            }
            self.make(&fault)?;
        }
        // The kernels end one after the other, so one that is done need not move.
        self.still = true;
        for rank in self.o.own() {
            self.children().order(rank, &Order::Finish)?;
        }
        self.until("the end of the traffic", |ranks| ranks.values().all(|rank| rank.done.is_some()))?;
        let all = self.ranks.values_mut().find_map(|rank| rank.done.take()).unwrap_or_default();
        let elsewhere = self.o.membership.is_some();
        self.tally.all = elsewhere.then(|| Total::of(all.values().flatten()));
        all_arrived(&all)
    }

    fn children(&mut self) -> &mut Children {
        self.children.as_mut().expect("the ranks were started")
    }

    /// Starts the ranks.
    fn start(&mut self) -> Result<()> {
        self.children = Some(Children::start(self.o, self.starts)?);
        self.starts += 1;
        self.ranks = self.o.own().map(|rank| (rank, Rank::default())).collect();
        (self.still, self.ending) = (true, false);
        self.until("the ranks' start", |ranks| ranks.values().all(|rank| rank.ready))?;
        self.go_on();
        Ok(())
    }

    /// From now on messages must move again.
    fn go_on(&mut self) {
        self.still = false;
        let now = Instant::now();
        for rank in self.o.own() {
            for peer in (0..self.o.ranks).filter(|peer| *peer != rank) {
                self.moved.insert((rank, peer), now);
            }
        }
    }

    /// Ends the children and adds what they have counted.
    fn collect(&mut self) {
        // What a rank said last may still be under way.
        while let Some((rank, event)) = self.children.as_ref().and_then(|c| c.event(Duration::ZERO)) {
            self.take(rank, event);
        }
        if self.children.take().is_none() {
            return;
        }
        self.tally.own.add(&Total::of(self.ranks.values().flat_map(|rank| &rank.traffic)));
        let replaced = self.ranks.values().map(|rank| rank.links).sum::<u64>();
        self.tally.epochs += match &self.o.membership {
            Some(_) => replaced + u64::from(self.o.ranks - 1),
            // Each link is counted at both of its ends, and one that a rank did not live to count at one alone.
            None => replaced.div_ceil(2) + u64::from(self.o.ranks * (self.o.ranks - 1) / 2),
        };
    }

    /// Makes a fault, and waits until the ranks are as they must be after it.
    fn make(&mut self, fault: &Fault) -> Result<()> {
        let Fault { kind, rank, peer, hold, .. } = *fault;
        *self.tally.by_kind.entry(kind).or_default() += 1;
        let number = self.tally.by_kind.values().sum::<u64>();
        let begin = Instant::now();
        let said = match kind {
            Kind::Break | Kind::BreakBoth | Kind::Burst | Kind::Cut | Kind::Delay => {
                let time = self.break_links(fault)?;
                self.tally.back(kind, time);
                let with = match kind {
                    Kind::Cut => "socket and the ".into(),
                    Kind::Delay => format!("socket for {hold:.0?} and the "),
                    _ => String::new(),
                };
                let ms = time.as_secs_f64() * 1e3;
                format!("the {with}link of ranks {rank} and {peer}, back after {ms:.3} ms")
            }
            Kind::Stop | Kind::StopBreak => {
                self.stop(fault)?;
                format!("rank {} for {hold:.0?}", if kind == Kind::Stop { rank } else { peer })
            }
            Kind::KillProxy => {
                let time = self.replace_proxy()?;
                self.tally.back(kind, time);
                format!("the proxy, back after {:.3} ms", time.as_secs_f64() * 1e3)
            }
            Kind::LinkDown | Kind::Netem => {
                let time = self.disturb(fault)?;
                self.tally.back(kind, time);
                let Netem { loss, delay } = fault.netem;
                let how = match kind {
                    Kind::LinkDown => "down".into(),
                    _ => format!("lost {loss} of 100 packets and delayed others by {delay:.0?}"),
                };
                let ms = time.as_secs_f64() * 1e3;
                format!("{} {how} for {hold:.0?}, back after {ms:.3} ms", self.links().names()[fault.link])
            }
            Kind::Kill | Kind::Abort => {
                self.finish_off(kind, rank)?;
                let took = begin.elapsed();
                self.collect();
                self.start()?;
                format!("rank {rank}: the others knew within {took:.0?}; started again")
            }
        };
        if !matches!(kind, Kind::Kill | Kind::Abort) {
            self.tally.recovered += 1;
        }
        say(format_args!("fault {number}, {}: {said}", kind.name()));
        Ok(())
    }

    /// Breaks links, and the socket of the two ranks before the last break; waits until messages move over another link. Returns
    /// the time from the last break to the next delivery: the longer one where two ends broke at once.
    fn break_links(&mut self, fault: &Fault) -> Result<Duration> {
        let mut ids = Vec::new();
        for (at, each) in fault.breaks.iter().enumerate() {
            if !each.gap.is_zero() {
                self.pass(Instant::now() + each.gap)?;
            }
            match fault.kind {
                Kind::Cut if at > 0 => self.children().order(fault.rank, &Order::Cut { peer: fault.peer })?,
                Kind::Delay if at > 0 => {
                    let order = Order::Hold { peer: fault.peer, time: fault.hold };
                    self.children().order(fault.rank, &order)?;
                }
                _ => {}
            }
            let (rank, peer) = if each.at_peer { (fault.peer, fault.rank) } else { (fault.rank, fault.peer) };
            self.breaks += 1;
            let id = self.breaks;
            self.children().order(rank, &Order::Break { peer, id })?;
            ids.push(id);
        }
        let waits = match fault.kind {
            Kind::BreakBoth => &ids[..],
            _ => &ids[ids.len() - 1..],
        };
        self.wait(&format!("messages between ranks {} and {}", fault.rank, fault.peer), |s| {
            waits.iter().all(|id| s.back.contains_key(id))
        })?;
        Ok(waits.iter().map(|id| self.back[id]).max().expect("a fault has a break"))
    }

    /// Kills the proxy, starts another one, and waits until messages move over it between all ranks. Returns the time from the
    /// kill until the last rank has said so.
    fn replace_proxy(&mut self) -> Result<Duration> {
        let begin = Instant::now();
        self.children().replace_proxy()?;
        self.moves("messages through the next proxy")?;
        Ok(begin.elapsed())
    }

    /// Disturbs a network device for a while, and waits until messages move between all ranks. Returns the time from the
    /// disturbance's end until the last rank has said so.
    fn disturb(&mut self, fault: &Fault) -> Result<Duration> {
        match fault.kind {
            Kind::LinkDown => self.links().down(fault.link)?,
            _ => self.links().disturb(fault.link, fault.netem)?,
        }
        let passed = self.pass(Instant::now() + fault.hold);
        // Also if something was wrong meanwhile.
        self.links().restore()?;
        let begin = Instant::now();
        passed?;
        self.moves("messages after a disturbed network device")?;
        Ok(begin.elapsed())
    }

    fn links(&mut self) -> &mut Links {
        self.links.as_mut().expect("only then such faults are drawn")
    }

    /// Waits until every rank has taken messages of every other one that were sent from now on.
    fn moves(&mut self, what: &str) -> Result<()> {
        // What a rank has said by now, and what it says next, may tell of messages that had arrived before. A peer that was
        // ahead by all its receives has sent one more.
        while let Some((rank, event)) = self.children().event(Duration::ZERO) {
            self.take(rank, event);
        }
        let before: Vec<Vec<Traffic>> = self.ranks.values().map(|rank| rank.traffic.clone()).collect();
        self.wait(what, |s| {
            let ranks = s.ranks.values().zip(&before);
            ranks.flat_map(|(rank, before)| before.iter().map(move |before| (rank, before))).all(
                |(rank, before)| {
                    rank.traffic
                        .iter()
                        .any(|now| now.peer == before.peer && now.taken > before.taken + RECEIVES)
                },
            )
        })
    }

    /// Stops a rank for a while and lets it go on. Nobody may count it as lost.
    fn stop(&mut self, fault: &Fault) -> Result<()> {
        let stopped = if fault.kind == Kind::Stop { fault.rank } else { fault.peer };
        self.still = true;
        self.children().signal(stopped, Signal::STOP)?;
        let end = Instant::now() + fault.hold;
        let broken = (fault.kind == Kind::StopBreak).then(|| {
            self.breaks += 1;
            let id = self.breaks;
            let order = Order::Break { peer: fault.peer, id };
            self.children().order(fault.rank, &order).map(|()| id)
        });
        let held = self.pass(end);
        let before: Vec<Traffic> = self.ranks[&stopped].traffic.clone();
        // Also if something was wrong meanwhile: the report of the flight recorder is not to blame the stopped rank.
        self.children().signal(stopped, Signal::CONT)?;
        self.go_on();
        held?;
        let id = broken.transpose()?;
        self.wait(&format!("messages at rank {stopped}, which was stopped"), |s| {
            let now = &s.ranks[&stopped].traffic;
            let moved =
                |before: &Traffic| now.iter().any(|now| now.peer == before.peer && now.taken > before.taken);
            before.iter().all(moved) && id.is_none_or(|id| s.back.contains_key(&id))
        })
    }

    /// Makes a fault that ends the job, and waits until each rank that is left has a status that names the cause.
    fn finish_off(&mut self, kind: Kind, rank: u32) -> Result<()> {
        (self.still, self.ending) = (true, true);
        match kind {
            Kind::Kill => self.children().signal(rank, Signal::KILL)?,
            _ => self.children().order(rank, &Order::Abort)?,
        }
        let left = |at: u32| at != rank;
        self.until("a status of each rank that is left", |ranks| {
            ranks.iter().all(|(at, rank)| !left(*at) || rank.ended.is_some())
        })?;
        let expected = match kind {
            Kind::Kill => Cause::Lost(rank),
            _ => Cause::Aborted(rank),
        };
        for (at, Rank { ended, .. }) in self.ranks.iter().filter(|(at, _)| left(**at)) {
            let Some(Ended { peer, cause, why, status }) = ended else { continue };
            if *cause != expected || status == "timed out" {
                bail!(
                    "after {} of rank {rank} the queue pair of rank {at} with rank {peer} ended with `{why}`, its kernel \
                     with `{status}`: that is another cause",
                    kind.name()
                );
            }
        }
        Ok(())
    }

    /// Goes on until `end`.
    fn pass(&mut self, end: Instant) -> Result<()> {
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.turn(left)?;
        }
        Ok(())
    }

    /// Goes on until the ranks are as `done` asks, for as long as a wait may take.
    fn until(&mut self, what: &str, done: impl Fn(&BTreeMap<u32, Rank>) -> bool) -> Result<()> {
        self.wait(what, |s| done(&s.ranks))
    }

    fn wait(&mut self, what: &str, done: impl Fn(&Self) -> bool) -> Result<()> {
        let begin = Instant::now();
        // The ranks' own waits end after `timeout`, and say more. A rank of another host may wait as long for its last fault.
        let turns = 1 + u32::from(self.o.membership.is_some());
        let limit = (self.o.settings.timeout + Duration::from_secs(5)) * turns;
        while !done(self) {
            if begin.elapsed() > limit {
                return Err(Hung(format!("waiting for {what}, nothing came for {limit:?}")).into());
            }
            self.turn(LOOK)?;
        }
        Ok(())
    }

    /// Takes one event if one comes within `wait`, and looks for what must not be.
    fn turn(&mut self, wait: Duration) -> Result<()> {
        if signals::caught().is_some() {
            return Err(Interrupted.into());
        }
        if let Some((rank, event)) = self.children().event(wait.min(LOOK)) {
            self.take(rank, event);
        }
        if self.ending {
            return Ok(());
        }
        for (at, rank) in &self.ranks {
            if let Some(Ended { peer, why, status, .. }) = &rank.ended {
                bail!(
                    "the queue pair of rank {at} with rank {peer} has ended, and no fault explains that: {why} (its kernel: \
                     {status})"
                );
            }
            if rank.gone {
                bail!("rank {at} has ended by itself; its own output says why");
            }
        }
        let limit = self.o.settings.timeout;
        let stood = |at: &Instant| at.elapsed() > limit;
        if !self.still
            && let Some(((rank, peer), _)) = self.moved.iter().find(|(_, at)| stood(at))
        {
            let what = format!("no message of rank {peer} has arrived at rank {rank} for {limit:?}");
            return Err(Hung(what).into());
        }
        Ok(())
    }

    /// Notes what a rank says.
    fn take(&mut self, rank: u32, event: Event) {
        let number = rank;
        let Some(rank) = self.ranks.get_mut(&rank) else { return };
        match event {
            Event::Gone => rank.gone = true,
            Event::Said(Said::Ready) => rank.ready = true,
            Event::Said(Said::Done { all }) => rank.done = Some(all),
            Event::Said(Said::Back { id, ns }) => _ = self.back.insert(id, Duration::from_nanos(ns)),
            Event::Said(Said::Ended { peer, cause, why, status }) => {
                rank.ended = Some(Ended { peer, cause, why, status });
            }
            Event::Said(Said::Moved { links, traffic }) => {
                // What this rank sends shows nothing of what arrives.
                let stands = |now: &Traffic| {
                    rank.traffic.iter().any(|before| (before.peer, before.taken) == (now.peer, now.taken))
                };
                for now in traffic.iter().filter(|now| !stands(now)) {
                    self.moved.insert((number, now.peer), Instant::now());
                }
                (rank.links, rank.traffic) = (links, traffic);
            }
        }
    }
}
