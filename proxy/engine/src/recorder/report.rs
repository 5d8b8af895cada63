//! What recorders say, as one text: for each queue pair one sentence that names what everybody waits for, then the ring
//! positions, credits, errors and last events of each end that is at hand.
//!
//! Pure functions of what was read.

mod culprit;

use std::fmt;

use serde::Serialize;

use super::about::text;
use super::reader::{Engine, Entry, Program, QueuePair};
use super::view::{Counts, Missing, Phase};
use crate::status::status_text;

/// A queue pair in which something has moved within this time is not stuck, nanoseconds.
const STILL: u64 = 1_000_000_000;
/// Entries that a text shows of each end.
const SHOWN: usize = 8;

/// A process whose recorders were read.
#[derive(Clone, Debug, Serialize)]
pub struct Process {
    /// The process's number, as the reader sees it.
    pub pid: u32,
    /// The process's name, as `ps` shows it.
    pub name: String,
    /// The process's engines.
    pub engines: Vec<Engine>,
}

impl Process {
    /// The process, with its name, whose queue pairs one of these engines carries: the program that a proxy serves, or this
    /// process. A program of a proxy in another PID namespace has no number here: for it the proxy stands.
    pub fn owner<'a>(&'a self, engine: &'a Engine) -> (u32, &'a str) {
        match &engine.program {
            Some(program) if engine.pid == self.pid => {
                (program.pid, program.name.as_deref().unwrap_or("gone"))
            }
            _ => (self.pid, &self.name),
        }
    }
}

/// One end of a queue pair, with whose it is.
#[derive(Clone, Copy)]
struct End<'a> {
    process: &'a Process,
    engine: &'a Engine,
    qp: &'a QueuePair,
}

/// A queue pair: one end, or both.
struct Pair<'a> {
    /// The ends at hand: one, or two, the lower rank first.
    ends: Vec<End<'a>>,
    /// Who waits for whom.
    sentence: String,
    /// The rank that everybody waits for, if somebody waits.
    blamed: Option<u32>,
    /// For how long those have waited, nanoseconds; 0 if nobody waits.
    still: u64,
}

/// An end of a queue pair, as people call it: by its rank, or in the NCCL plugin by its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Who {
    rank: u32,
    /// It has a role and no rank that people know: [`About::roles`](super::About::roles).
    roles: bool,
}

impl Who {
    fn of(about: &super::About, rank: u32) -> Who {
        Who { rank, roles: about.roles }
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.roles, self.rank) {
            (true, 0) => f.write_str("the sender"),
            (true, _) => f.write_str("the receiver"),
            (false, rank) => write!(f, "rank {rank}"),
        }
    }
}

impl End<'_> {
    fn last(&self) -> &Entry {
        self.qp.last()
    }

    /// How long ago this time of the engine's clock was, nanoseconds.
    fn age(&self, time: u64) -> u64 {
        self.engine.now.saturating_sub(time)
    }

    /// This end, for people.
    fn own(&self) -> Who {
        Who::of(&self.qp.about, self.qp.about.rank)
    }

    /// The other end, for people.
    fn peer(&self) -> Who {
        Who::of(&self.qp.about, self.qp.about.peer)
    }

    /// For how long nothing has moved in either direction, nanoseconds.
    fn still(&self) -> u64 {
        let moved = self.last().moved;
        self.age(moved.sends).min(self.age(moved.receives))
    }
}

impl Pair<'_> {
    /// An end of this queue pair, with its process if that is known.
    fn named(&self, who: Who) -> String {
        if let Some(end) = self.ends.iter().find(|end| end.own() == who) {
            let (pid, proxy) = (end.process.owner(end.engine).0, end.process.pid);
            return match pid == proxy {
                true => format!("{who} (process {pid})"),
                false => format!("{who} (process {pid}, served by the proxy, process {proxy})"),
            };
        }
        let peer = self.ends.iter().find(|end| end.peer() == who);
        match peer.and_then(|end| end.qp.about.peer_pid) {
            Some(pid) => format!("{who} (process {pid})"),
            None => who.to_string(),
        }
    }
}

/// The queue pairs of these processes, the ends of each together. Those in which somebody waits come first, the longest
/// wait before the others.
fn pairs(processes: &[Process]) -> Vec<Pair<'_>> {
    pairs_still_for(processes, STILL)
}

/// [`pairs`], where nothing counts as stuck that has moved within the last `least` nanoseconds.
fn pairs_still_for(processes: &[Process], least: u64) -> Vec<Pair<'_>> {
    let mut ends: Vec<End> = Vec::new();
    for process in processes {
        for engine in &process.engines {
            ends.extend(engine.queue_pairs.iter().map(|qp| End { process, engine, qp }));
        }
    }
    let mut pairs = Vec::new();
    while let Some(first) = ends.pop() {
        let [own, other] = first.qp.about.ends;
        let known = [own, other] != [0, 0];
        let at = ends.iter().position(|end| known && end.qp.about.ends == [other, own]);
        let mut both: Vec<End> = at.map(|at| ends.swap_remove(at)).into_iter().chain([first]).collect();
        both.sort_by_key(|end| (end.own(), end.process.pid, end.qp.about.number));
        let culprit::Said { text, blames, still } = culprit::sentence(&both, least);
        pairs.push(Pair { ends: both, sentence: text, blamed: blames, still });
    }
    pairs.sort_by_key(|pair| {
        let about = pair.ends[0].qp.about;
        (pair.blamed.is_none(), u64::MAX - pair.still, about.rank, about.peer, about.number)
    });
    pairs
}

/// A queue pair of some processes, and who waits for whom in it.
#[derive(Clone, Debug)]
pub struct Waits {
    /// The ends at hand, one or two: the process, the engine's number there, the queue pair's number there.
    pub ends: Vec<(u32, u64, u32)>,
    /// Who waits for whom, in one sentence.
    pub sentence: String,
    /// The end that everybody waits for, if somebody waits.
    pub blamed: Option<Who>,
    /// For how long those have waited, nanoseconds; 0 if nobody waits.
    pub still: u64,
}

/// Who waits for whom in each queue pair of these processes, the longest wait first.
pub fn waits(processes: &[Process]) -> Vec<Waits> {
    let end = |end: &End| (end.process.pid, end.engine.engine, end.qp.about.number);
    let pairs = pairs(processes).into_iter();
    pairs
        .map(|pair| Waits {
            ends: pair.ends.iter().map(end).collect(),
            blamed: pair.blamed.map(|rank| Who::of(&pair.ends[0].qp.about, rank)),
            sentence: pair.sentence,
            still: pair.still,
        })
        .collect()
}

/// How many of several queue pairs wait, and for whom. Nothing for one queue pair, or if none waits.
fn summary(pairs: &[Pair]) -> String {
    let mut blamed: Vec<(String, usize)> = Vec::new();
    for pair in pairs {
        let Some(who) = pair.blamed.map(|rank| pair.named(Who::of(&pair.ends[0].qp.about, rank))) else {
            continue;
        };
        match blamed.iter_mut().find(|(known, _)| *known == who) {
            Some((_, n)) => *n += 1,
            None => blamed.push((who, 1)),
        }
    }
    let waiting: usize = blamed.iter().map(|(_, n)| n).sum();
    if pairs.len() < 2 || waiting == 0 {
        return String::new();
    }
    blamed.sort_by_key(|(_, n)| usize::MAX - n);
    let each: Vec<_> = blamed.iter().map(|(rank, n)| format!("{n} for {rank}")).collect();
    format!("\n{waiting} of {} queue pairs wait: {}\n", pairs.len(), each.join(", "))
}

/// The report as JSON: the processes with all that was read, and for each queue pair its sentence.
pub fn json(processes: &[Process]) -> serde_json::Value {
    let end = |end: &End| {
        serde_json::json!({
            "pid": end.process.pid, "engine": end.engine.engine, "number": end.qp.about.number,
            "program": end.engine.program.as_ref().map(|program| program.pid),
            "rank": end.qp.about.rank, "peer": end.qp.about.peer, "roles": end.qp.about.roles,
        })
    };
    let pairs: Vec<_> = pairs(processes)
        .iter()
        .map(|pair| {
            serde_json::json!({
                "sentence": pair.sentence, "blamed": pair.blamed, "still_ns": pair.still,
                "transport": text(&pair.ends[0].qp.about.transport),
                "ends": pair.ends.iter().map(end).collect::<Vec<_>>(),
            })
        })
        .collect();
    serde_json::json!({ "queue_pairs": pairs, "processes": processes })
}

/// The report as text.
pub fn text_of(processes: &[Process]) -> String {
    let mut text = String::new();
    for process in processes {
        for engine in &process.engines {
            text += &format!("{}\n", About(process, engine));
        }
    }
    let pairs = pairs(processes);
    text += &summary(&pairs);
    for pair in pairs {
        text += &format!("\n{pair}");
    }
    text
}

/// What an engine logs of its queue pairs that stall. `process` has this engine alone, with these queue pairs alone.
pub fn stalled(process: &Process) -> String {
    // The engine has waited as long as it was told to.
    let pairs = pairs_still_for(std::slice::from_ref(process), 0);
    let text: Vec<_> = pairs.iter().map(|pair| pair.to_string()).collect();
    let which = match pairs.len() {
        1 => "a queue pair has".into(),
        n => format!("{n} queue pairs have"),
    };
    format!(
        "{which} not moved, though something is under way (`pushgate inspect --all` shows both ends):\n{}",
        text.concat().trim_end()
    )
}

/// A line about an engine.
struct About<'a>(&'a Process, &'a Engine);

impl fmt::Display for About<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let About(process, engine) = self;
        write!(f, "process {} ({}), engine {}", process.pid, process.name, engine.engine)?;
        if let Some(Program { pid, name, state }) = &engine.program {
            write!(f, " for program {pid}")?;
            match (name, state) {
                (Some(name), Some(state)) => write!(f, " ({name}, state {state})")?,
                _ => write!(f, " (gone)")?,
            }
        }
        write!(f, ": {}", plural(engine.queue_pairs.len() as u64, "queue pair"))?;
        match engine.ended {
            true => write!(f, ", has ended")?,
            false => write!(f, ", ran {} ago", time(engine.now.saturating_sub(engine.ran)))?,
        }
        match engine.state {
            Some(state) => write!(f, ", state {state}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Pair<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let about = &self.ends[0].qp.about;
        let [own, peer] = [about.rank, about.peer].map(|rank| self.named(Who::of(about, rank)));
        writeln!(f, "{own} and {peer}, {}: {}", text(&about.transport), self.sentence)?;
        self.ends.iter().try_for_each(|end| write!(f, "{end}"))
    }
}

impl fmt::Display for End<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (about, last) = (&self.qp.about, self.last());
        let (v, c, peer) = (&last.view, &last.view.counts, self.peer());
        let phase = v.phase.name();
        writeln!(f, "  {}, queue pair {}: {phase}, epoch {}", self.own(), about.number, v.epoch)?;
        writeln!(
            f,
            "    sends     posted {}, released {}, received by {peer} {}, no longer needed there {}; {} of {} WQE slots \
             taken; moved {} ago",
            c.posted,
            c.released,
            c.peer_received,
            c.peer_freed,
            c.posted.saturating_sub(c.retired),
            1u64 << about.slots_log,
            time(self.age(last.moved.sends)),
        )?;
        let next = match v.missing {
            Missing::Nothing => "no WQE waits".into(),
            missing => format!("the next WQE waits for {}", missing.name()),
        };
        writeln!(
            f,
            "    credits   {} of {} receives that {peer} granted are left, {} in flight; {next}",
            c.credits,
            c.peer_granted,
            plural(c.in_flight, "work request"),
        )?;
        writeln!(
            f,
            "    receives  granted {}, accepted {}, received {}, shown {}, taken by the device {}{}{}; moved {} ago",
            c.granted,
            c.accepted,
            c.received,
            c.shown,
            c.taken,
            if v.waiting { "; a message waits for a receive or for room" } else { "" },
            match v.copies {
                0 => String::new(),
                n => format!("; {} under way", plural(n.into(), "copy")),
            },
            time(self.age(last.moved.receives)),
        )?;
        let e = &v.errors;
        let counted = [
            (e.rnr, "RNR answers"),
            (e.dropped, "messages dropped"),
            (e.refused, "WQEs or records refused"),
            (e.stuck, "slots stuck"),
        ];
        let mut errors: Vec<String> = v.status.map(status_text).into_iter().collect();
        errors.extend(counted.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")));
        if !errors.is_empty() {
            writeln!(f, "    errors    {}", errors.join(", "))?;
        }
        let skipped = self.qp.entries.len().saturating_sub(SHOWN);
        let mut head = "events";
        for i in (skipped..self.qp.entries.len()).rev() {
            let before = i.checked_sub(1).map(|i| &self.qp.entries[i]);
            let entry = &self.qp.entries[i];
            let what = events(before, entry, peer);
            if !what.is_empty() {
                writeln!(f, "    {head:<9} {} ago: {what}", time(self.age(entry.time)))?;
                head = "";
            }
        }
        Ok(())
    }
}

/// What happened between two entries. Without an earlier one: what holds.
fn events(before: Option<&Entry>, entry: &Entry, peer: Who) -> String {
    let (v, c) = (&entry.view, &entry.view.counts);
    let was = before.map(|before| before.view).unwrap_or_default();
    let mut said = Vec::new();
    let received = format!("received by {peer}");
    let granted = format!("granted by {peer}");
    type Count = fn(&Counts) -> u64;
    let counts: [(&str, Count); 9] = [
        ("posted", |c| c.posted),
        ("released", |c| c.released),
        (&received, |c| c.peer_received),
        ("given back to the device", |c| c.retired),
        (&granted, |c| c.peer_granted),
        ("received", |c| c.received),
        ("shown", |c| c.shown),
        ("taken by the device", |c| c.taken),
        ("granted", |c| c.granted),
    ];
    for (name, count) in counts {
        let (now, then) = (count(c), count(&was.counts));
        if now > then {
            said.push(format!("{name} {now} (+{})", now - then));
        } else if now < then {
            said.push(format!("{name} back to {now} (-{})", then - now));
        }
    }
    if v.missing != was.missing && v.missing != Missing::Nothing {
        said.push(format!("waits for {}", v.missing.name()));
    }
    if v.phase != was.phase {
        said.push(match (was.phase, v.phase) {
            (_, Phase::Live) => format!("resumed in epoch {}", v.epoch),
            (Phase::Live, Phase::Fencing) => "broken".into(),
            (_, phase) => phase.name().into(),
        });
    }
    if v.status != was.status
        && let Some(status) = v.status
    {
        said.push(status_text(status));
    }
    if before.is_none() && said.is_empty() {
        said.push("nothing had happened".into());
    }
    said.join(", ")
}

/// A number of things.
fn plural(n: u64, what: &str) -> String {
    match (n, what.strip_suffix('y')) {
        (1, _) => format!("1 {what}"),
        (n, Some(stem)) => format!("{n} {stem}ies"),
        (n, None) => format!("{n} {what}s"),
    }
}

/// A time in a unit that suits it.
fn time(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{} us", ns / 1_000),
        1_000_000..1_000_000_000 => format!("{} ms", ns / 1_000_000),
        1_000_000_000..120_000_000_000 => format!("{:.1} s", ns as f64 / 1e9),
        120_000_000_000..7_200_000_000_000 => format!("{:.1} min", ns as f64 / 60e9),
        _ => format!("{:.1} h", ns as f64 / 3600e9),
    }
}

#[cfg(test)]
mod tests;
