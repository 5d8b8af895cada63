//! The rows of `pushgate top`. Pure: two looks at the flight recorders in, rows out.

use std::collections::{BTreeMap, BTreeSet};

use pushgate_engine::recorder::report::{Process, Waits, Who, waits};
use pushgate_engine::recorder::{Engine, Metrics, Missing, Phase, QueuePair};

use super::columns::Cells;

/// What rows are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Bytes,
    Messages,
    Waits,
    Pid,
    Name,
}

impl Order {
    pub const ALL: [(&'static str, Order); 5] = [
        ("bytes", Order::Bytes),
        ("messages", Order::Messages),
        ("waits", Order::Waits),
        ("pid", Order::Pid),
        ("name", Order::Name),
    ];

    pub fn word(self) -> &'static str {
        Order::ALL.iter().find(|(_, order)| *order == self).expect("ALL has all").0
    }
}

/// A queue pair, or with its others a process.
#[derive(Clone, Debug)]
pub struct Row {
    /// The process whose queue pair it is: of an engine in `pushgate proxy`, the program.
    pub pid: u32,
    pub name: String,
    /// Queue pairs in the row.
    pub queue_pairs: usize,
    /// The one queue pair of the row: its number, this end's rank, the peer's.
    pub of: Option<(u32, u32, u32)>,
    pub links: BTreeSet<String>,
    pub state: String,
    /// Payload released and delivered, bytes a second.
    pub sent: f64,
    pub received: f64,
    /// Messages released and delivered, a second.
    pub messages: f64,
    /// Stalls of the gate, a second.
    pub stalls: f64,
    /// The part of the time that the WQE at the head waited for each of [`Missing::CAUSES`], summed over queue pairs.
    pub waited: [f64; Missing::CAUSES.len()],
    /// The end that is waited for, and for how long, nanoseconds.
    pub blamed: Option<(Who, u64)>,
    /// Who waits for whom.
    pub sentence: String,
}

/// The numbers that rates are taken from: metrics and the time of the engine's clock, for each queue pair.
#[derive(Default)]
pub struct Before(BTreeMap<Key, (u64, Metrics)>);

/// The process, the engine, the queue pair, and when the engine took it in: numbers of processes come again.
type Key = (u32, u64, u32, u64);

impl Before {
    pub fn of(processes: &[Process]) -> Before {
        let mut all = BTreeMap::new();
        for (process, engine, qp) in queue_pairs(processes) {
            if let Some(metrics) = qp.metrics {
                all.insert(key(process, engine, qp), (engine.now, metrics));
            }
        }
        Before(all)
    }
}

fn key(process: &Process, engine: &Engine, qp: &QueuePair) -> Key {
    (process.pid, engine.engine, qp.about.number, qp.added)
}

fn queue_pairs(processes: &[Process]) -> impl Iterator<Item = (&Process, &Engine, &QueuePair)> {
    let engines =
        processes.iter().flat_map(|process| process.engines.iter().map(move |engine| (process, engine)));
    engines.flat_map(|(process, engine)| engine.queue_pairs.iter().map(move |qp| (process, engine, qp)))
}

/// A row for each queue pair or, `folded`, for each process, and for each process that has none.
pub fn rows(processes: &[Process], before: &Before, folded: bool, order: Order) -> Vec<Row> {
    let waits = waits(processes);
    let waits: BTreeMap<_, &Waits> =
        waits.iter().flat_map(|w| w.ends.iter().map(move |end| (*end, w))).collect();
    let mut rows: Vec<Row> = Vec::new();
    for process in processes {
        // A proxy has engines of several programs.
        let mut owners: BTreeMap<u32, Vec<Row>> = BTreeMap::new();
        for engine in &process.engines {
            let own = owners.entry(process.owner(engine).0).or_default();
            let none = Row { state: state(engine, None), ..empty(process, engine) };
            let queue_pairs = engine.queue_pairs.iter().map(|qp| {
                let waits = waits.get(&(process.pid, engine.engine, qp.about.number));
                row(process, engine, qp, before, waits.copied())
            });
            own.extend(std::iter::once(none).chain(queue_pairs));
        }
        for mut own in owners.into_values() {
            let first = own[0].clone();
            own.retain(|row| row.queue_pairs > 0);
            match own.len() {
                0 => rows.push(first),
                _ if folded => rows.push(fold(first, own)),
                _ => rows.extend(own),
            }
        }
    }
    let by = |number: fn(&Row) -> f64| {
        move |a: &Row, b: &Row| number(b).total_cmp(&number(a)).then((a.pid, a.of).cmp(&(b.pid, b.of)))
    };
    match order {
        Order::Bytes => rows.sort_by(by(|row| row.sent + row.received)),
        Order::Messages => rows.sort_by(by(|row| row.messages)),
        // Those in which somebody waits for long before those that have waited in the last interval.
        Order::Waits => rows.sort_by(by(|row| {
            row.blamed.map_or(0, |(_, still)| still) as f64 + row.waited.iter().sum::<f64>()
        })),
        Order::Pid => rows.sort_by_key(|row| (row.pid, row.of)),
        Order::Name => rows.sort_by(|a, b| (&a.name, a.pid, a.of).cmp(&(&b.name, b.pid, b.of))),
    }
    rows
}

fn empty(process: &Process, engine: &Engine) -> Row {
    let (pid, name) = process.owner(engine);
    Row {
        pid,
        name: name.into(),
        queue_pairs: 0,
        of: None,
        links: BTreeSet::new(),
        state: String::new(),
        sent: 0.0,
        received: 0.0,
        messages: 0.0,
        stalls: 0.0,
        waited: Default::default(),
        blamed: None,
        sentence: String::new(),
    }
}

fn state(engine: &Engine, phase: Option<Phase>) -> String {
    let program = engine.program.as_ref().and_then(|program| program.state);
    if engine.ended {
        return "engine ended".into();
    }
    if [engine.state, program].iter().any(|state| matches!(state, Some('T' | 't'))) {
        return "stopped".into();
    }
    let word = match phase {
        None => "no queue pair",
        Some(Phase::Live) => "live",
        Some(Phase::Fencing) => "fencing",
        Some(Phase::Offered) => "offered",
        Some(Phase::Joining) => "joining",
        Some(Phase::Ending) => "ending",
        Some(Phase::Ended) => "ended",
    };
    word.into()
}

fn row(process: &Process, engine: &Engine, qp: &QueuePair, before: &Before, waits: Option<&Waits>) -> Row {
    let about = &qp.about;
    let mut row = Row {
        queue_pairs: 1,
        of: Some((about.number, about.rank, about.peer)),
        links: BTreeSet::from([about.transport_name()]),
        state: state(engine, Some(qp.last().view.phase)),
        blamed: waits.and_then(|waits| Some((waits.blamed?, waits.still))),
        sentence: waits.map(|waits| waits.sentence.clone()).unwrap_or_default(),
        ..empty(process, engine)
    };
    let then = before.0.get(&key(process, engine, qp));
    let (Some((then, old)), Some(new)) = (then, &qp.metrics) else { return row };
    let seconds = engine.now.saturating_sub(*then) as f64 / 1e9;
    if seconds > 0.0 {
        let (new_counts, old_counts) = (&new.counters, &old.counters);
        let rate = |new: u64, old: u64| new.saturating_sub(old) as f64 / seconds;
        row.sent = rate(new_counts.released_bytes, old_counts.released_bytes);
        row.received = rate(new_counts.delivered_bytes, old_counts.delivered_bytes);
        row.messages =
            rate(new_counts.released, old_counts.released) + rate(new_counts.delivered, old_counts.delivered);
        let stalls = |c: &pushgate_engine::counters::Counters| {
            [c.stall_send_queue, c.stall_completion_queue, c.stall_receive, c.stall_bytes]
                .into_iter()
                .fold(0, u64::saturating_add)
        };
        row.stalls = rate(stalls(new_counts), stalls(old_counts));
        for ((part, new), old) in row.waited.iter_mut().zip(new.waited).zip(old.waited) {
            // The engine's looks and ours are not at the same times.
            *part = (rate(new, old) / 1e9).min(1.0);
        }
    }
    row
}

/// The rows of a process as one. `all` is its row without queue pairs.
fn fold(mut all: Row, rows: Vec<Row>) -> Row {
    let states: BTreeSet<&str> = rows.iter().map(|row| row.state.as_str()).collect();
    all.state = if states.len() == 1 { states.into_iter().collect() } else { "mixed".into() };
    for row in rows {
        all.queue_pairs += 1;
        all.links.extend(row.links);
        all.sent += row.sent;
        all.received += row.received;
        all.messages += row.messages;
        all.stalls += row.stalls;
        all.waited.iter_mut().zip(row.waited).for_each(|(sum, part)| *sum += part);
        // The longest wait speaks for the process.
        if row.blamed.map(|(_, still)| still) > all.blamed.map(|(_, still)| still) {
            (all.blamed, all.sentence) = (row.blamed, row.sentence);
        }
    }
    all
}

impl Row {
    /// The row's text, a cell for each of [`COLUMNS`](super::columns::COLUMNS).
    pub fn cells(&self) -> Cells {
        let number = |n: Option<u32>| n.map(|n| n.to_string()).unwrap_or_default();
        let qp = match self.of {
            Some((number, ..)) => number.to_string(),
            None => format!("{}x", self.queue_pairs),
        };
        let gb = |bytes: f64| format!("{:.3}", bytes / 1e9);
        [
            self.pid.to_string(),
            self.name.clone(),
            qp,
            number(self.of.map(|(_, rank, _)| rank)),
            number(self.of.map(|(_, _, peer)| peer)),
            Vec::from_iter(self.links.iter().map(String::as_str)).join(","),
            self.state.clone(),
            gb(self.sent),
            gb(self.received),
            format!("{:.0}", self.messages),
            format!("{:.0}", self.stalls),
            self.waits(),
        ]
    }

    /// What is waited for: an end, if somebody has waited for a second; the causes, with their parts of the time.
    fn waits(&self) -> String {
        let mut said = Vec::new();
        if let Some((who, still)) = self.blamed {
            said.push(format!("{who} {}", time(still)));
        }
        for (cause, part) in Missing::CAUSES.into_iter().zip(self.waited) {
            let percent = (part * 100.0).round();
            if percent >= 1.0 {
                said.push(format!("{} {percent}%", cause.word()));
            }
        }
        said.join(", ")
    }
}

/// A time that has passed.
fn time(ns: u64) -> String {
    match ns / 1_000_000_000 {
        s @ 0..120 => format!("{s}s"),
        s @ 120..7200 => format!("{}min", s / 60),
        s => format!("{}h", s / 3600),
    }
}

/// A sentence about all rows.
pub fn summary(processes: &[Process], rows: &[Row]) -> String {
    let queue_pairs = queue_pairs(processes).count();
    let waiting = rows.iter().filter(|row| row.blamed.is_some()).count();
    let sum = |of: fn(&Row) -> f64| rows.iter().map(of).sum::<f64>();
    format!(
        "{} processes, {queue_pairs} queue pairs, {waiting} rows wait; out {:.3} GB/s, in {:.3} GB/s, {:.0} messages/s",
        processes.len(),
        sum(|row| row.sent) / 1e9,
        sum(|row| row.received) / 1e9,
        sum(|row| row.messages),
    )
}

#[cfg(test)]
pub(super) mod tests {
    use pushgate_engine::recorder::{About, Entry, Moved, Program, View};

    use super::*;

    const S: u64 = 1_000_000_000;

    /// A process of rank `pid` whose queue pairs have counted `n` messages of a MB each at second `at`.
    fn process(pid: u32, at: u64, queue_pairs: &[u64]) -> Process {
        let qp = |(number, n): (usize, &u64)| {
            let mut metrics = Metrics::default();
            (metrics.counters.released, metrics.counters.released_bytes) = (*n, n * 1_000_000);
            metrics.counters.stall_receive = n / 10;
            metrics.waited[2] = n * 1_000_000;
            let view = View::default();
            let moved = Moved { sends: at * S, receives: at * S };
            let about = About {
                number: number as u32,
                rank: pid,
                peer: 9,
                transport: *b"local\0\0\0",
                ..About::default()
            };
            QueuePair {
                about,
                added: 0,
                metrics: Some(metrics),
                entries: vec![Entry { number: 0, time: 0, moved, view }],
            }
        };
        let engine = Engine {
            pid,
            program: None,
            engine: 0,
            thread: None,
            state: Some('S'),
            ended: false,
            ran: at * S,
            now: at * S,
            copier: None,
            sleeps: 0,
            closed: None,
            queue_pairs: queue_pairs.iter().enumerate().map(qp).collect(),
        };
        Process { pid, name: format!("rank{pid}"), engines: vec![engine] }
    }

    pub fn two(at: u64, first: &[u64], second: &[u64]) -> Vec<Process> {
        vec![process(1, at, first), process(2, at, second)]
    }

    #[test]
    fn rates_are_what_was_counted_in_the_time_between_two_looks() {
        let before = Before::of(&two(10, &[100], &[0, 0]));
        let now = two(12, &[300], &[1000, 2000]);
        let rows = rows(&now, &before, false, Order::Bytes);
        let seen: Vec<_> = rows.iter().map(|row| (row.pid, row.sent, row.messages, row.stalls)).collect();
        assert_eq!(seen, [(2, 1e9, 1000.0, 100.0), (2, 0.5e9, 500.0, 50.0), (1, 0.1e9, 100.0, 10.0)]);
        assert_eq!(rows[1].cells()[11], "receive 50%");
        assert_eq!(rows[0].cells()[7], "1.000");
    }

    #[test]
    fn a_process_is_one_row_where_rows_are_folded_and_a_new_queue_pair_has_no_rate() {
        let before = Before::of(&two(10, &[100], &[0]));
        let now = two(12, &[300], &[1000, 2000]);
        let rows = rows(&now, &before, true, Order::Pid);
        let seen: Vec<_> = rows.iter().map(|row| (row.pid, row.queue_pairs, row.sent)).collect();
        assert_eq!(seen, [(1, 1, 0.1e9), (2, 2, 0.5e9)]);
        assert_eq!(rows[1].cells()[2], "2x");
    }

    #[test]
    fn a_process_without_queue_pairs_has_a_row() {
        let rows = rows(&two(1, &[], &[5]), &Before::default(), false, Order::Name);
        let states: Vec<_> = rows.iter().map(|row| row.state.as_str()).collect();
        assert_eq!(states, ["no queue pair", "live"]);
    }

    #[test]
    fn programs_of_one_proxy_have_rows_of_their_own_with_their_names_and_states() {
        let serves = |mut process: Process, pid, name: &str, state| {
            process.engines[0].pid = 9;
            process.engines[0].program = Some(Program { pid, name: Some(name.into()), state: Some(state) });
            process.engines.remove(0)
        };
        let [first, second] = <[Process; 2]>::try_from(two(1, &[1], &[1, 1])).unwrap();
        let engines = vec![serves(first, 300, "train", 'T'), serves(second, 301, "infer", 'S')];
        let proxy = Process { pid: 9, name: "pushgate".into(), engines };
        for (folded, expected) in [(false, 3), (true, 2)] {
            let rows = rows(std::slice::from_ref(&proxy), &Before::default(), folded, Order::Pid);
            let seen: Vec<_> = rows.iter().map(|row| (row.pid, &*row.name, &*row.state)).collect();
            assert_eq!(seen.len(), expected);
            assert_eq!(seen[..2], [(300, "train", "stopped"), (301, "infer", "live")]);
        }
    }

    #[test]
    fn rows_are_sorted_by_each_order() {
        let before = Before::of(&two(10, &[0], &[0]));
        let now = two(11, &[10], &[20]);
        let pids = |order| rows(&now, &before, false, order).iter().map(|row| row.pid).collect::<Vec<_>>();
        assert_eq!(pids(Order::Bytes), [2, 1]);
        assert_eq!(pids(Order::Messages), [2, 1]);
        assert_eq!(pids(Order::Waits), [2, 1]);
        assert_eq!(pids(Order::Pid), [1, 2]);
        assert_eq!(pids(Order::Name), [1, 2]);
    }
}
