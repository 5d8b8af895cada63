//! The metrics of engines, by name. Pure: what was read of the flight recorders in, metric families out.
//!
//! Every count exists twice. `pushgate_NAME` is an engine's, for each kind of link: the sum over its queue pairs, those that
//! have gone included, so that it only grows. `pushgate_queue_pair_NAME` is of one queue pair, and goes with it.

use std::collections::BTreeMap;

use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use pushgate_engine::recorder::report::{Process, waits};
use pushgate_engine::recorder::{Engine, Metrics, Missing, Phase, QueuePair, Times};

use crate::find::Found;

/// Most jobs of one process that are told: a process may name any number.
const JOBS: usize = 8;

/// How a count of the engine is told.
struct Told {
    /// The name without prefix.
    name: &'static str,
    help: &'static str,
    /// What the gate lacked.
    cause: Option<Missing>,
}

/// How the count of this name is told. `None`: it is no queue pair's.
fn told(count: &str) -> Option<Told> {
    let stalls = "Times that the gate had no permit for a WQE, by what was missing.";
    let (name, help, cause) = match count {
        "released" => {
            ("messages_released_total", "Messages released to the link, again after a break included.", None)
        }
        "released_bytes" => ("released_bytes_total", "Payload of the messages released, bytes.", None),
        "inline" => ("messages_inline_total", "Messages released whose payload lies in the WQE.", None),
        "retired" => {
            ("messages_retired_total", "Messages that the peer has and whose place is free again.", None)
        }
        "delivered" => {
            ("messages_delivered_total", "Messages of the peer delivered to the device here.", None)
        }
        "delivered_bytes" => ("delivered_bytes_total", "Payload of the messages delivered, bytes.", None),
        "nops" => ("nops_total", "NOPs.", None),
        "copies" => {
            ("payloads_copied_total", "Payloads that the engine or the GPU copied into their place.", None)
        }
        "copied_bytes" => ("copied_bytes_total", "Bytes of the payloads copied.", None),
        "placed" => ("payloads_placed_total", "Payloads that the link wrote to their place itself.", None),
        "bounced" => {
            ("payloads_bounced_total", "Payloads copied at the sender before the link sent them.", None)
        }
        "bounced_bytes" => ("bounced_bytes_total", "Bytes of the payloads bounced.", None),
        "copied_out" => (
            "payloads_copied_out_total",
            "Payloads copied because a slow reader held too much in place.",
            None,
        ),
        "stall_send_queue" => ("credit_stalls_total", stalls, Some(Missing::SendQueue)),
        "stall_completion_queue" => ("credit_stalls_total", stalls, Some(Missing::CompletionQueue)),
        "stall_receive" => ("credit_stalls_total", stalls, Some(Missing::Receive)),
        "stall_bytes" => ("credit_stalls_total", stalls, Some(Missing::Bytes)),
        "rnr" => ("rnr_total", "Receiver-not-ready answers of the transport; stays 0.", None),
        "dropped" => ("messages_dropped_total", "Messages that the receiver could not take; stays 0.", None),
        "refused" => ("refused_total", "WQEs and records refused.", None),
        "stuck" => ("slots_stuck_total", "WQE slots reserved and never published.", None),
        "rings" => ("doorbells_rung_total", "Doorbells rung at a peer's engine that slept.", None),
        "interrupts" => ("interrupts_total", "Times that a window's interrupt woke the engine.", None),
        "recovered" => ("recoveries_total", "Links that took the place of one that broke.", None),
        _ => return None,
    };
    Some(Told { name, help, cause })
}

/// The families, in the order of their names.
#[derive(Default)]
struct Families(BTreeMap<String, MetricFamily>);

/// Labels in their order, without those that have no value.
type Labels = Vec<(&'static str, String)>;

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

impl Families {
    fn add(
        &mut self,
        name: String,
        kind: MetricType,
        help: &str,
        labels: &Labels,
        set: impl FnOnce(&mut Metric),
    ) {
        let pairs = labels.iter().filter(|(_, value)| !value.is_empty()).map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.to_string());
            pair.set_value(value.clone());
            pair
        });
        let mut metric = Metric::from_label(pairs.collect());
        set(&mut metric);
        let family = self.0.entry(name).or_insert_with_key(|name| {
            let mut family = MetricFamily::default();
            family.set_name(name.clone());
            family.set_help(help.into());
            family.set_field_type(kind);
            family
        });
        family.mut_metric().push(metric);
    }

    fn counter(&mut self, name: String, help: &str, labels: &Labels, value: f64) {
        self.add(name, MetricType::COUNTER, help, labels, |metric| {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        });
    }

    fn gauge(&mut self, name: &str, help: &str, labels: &Labels, value: f64) {
        self.add(format!("pushgate_{name}"), MetricType::GAUGE, help, labels, |metric| {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        });
    }

    fn times(&mut self, name: String, help: &str, labels: &Labels, times: &Times) {
        let mut sum = 0u64;
        let mut up_to = |count: u64| {
            sum = sum.saturating_add(count);
            sum
        };
        let buckets = Times::BOUNDS.iter().zip(times.counts).map(|(bound, count)| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(seconds(*bound));
            bucket.set_cumulative_count(up_to(count));
            bucket
        });
        let buckets = buckets.collect();
        self.add(name, MetricType::HISTOGRAM, help, labels, |metric| {
            let mut histogram = Histogram::default();
            histogram.set_bucket(buckets);
            histogram.set_sample_count(times.count());
            histogram.set_sample_sum(seconds(times.sum));
            metric.set_histogram(histogram);
        });
    }

    /// All counts and times, as metrics whose names begin with `prefix`.
    fn metrics(&mut self, prefix: &str, labels: &Labels, metrics: &Metrics) {
        let with = |cause: Missing| [&labels[..], &[("cause", cause.word().into())]].concat();
        for (count, value) in metrics.counters.iter() {
            let Some(Told { name, help, cause }) = told(count) else { continue };
            let labels = cause.map_or_else(|| labels.clone(), with);
            self.counter(format!("{prefix}{name}"), help, &labels, value as f64);
        }
        let help = "Time that the WQE at the head waited, by what it waited for.";
        for (cause, waited) in Missing::CAUSES.into_iter().zip(metrics.waited) {
            self.counter(format!("{prefix}waited_seconds_total"), help, &with(cause), seconds(waited));
        }
        let help = "From the release of a message until the engine learned that the peer has it; of one message a millisecond \
                    and queue pair at most.";
        self.times(format!("{prefix}delivery_seconds"), help, labels, &metrics.delivery);
        let help = "From the break of a link until another one carried the queue pair.";
        self.times(format!("{prefix}recovery_seconds"), help, labels, &metrics.recovery);
    }
}

/// The metrics of these processes. `each`: of each queue pair too, not of the engines alone.
pub fn families(found: Vec<Found>, each: bool) -> Vec<MetricFamily> {
    let mut families = Families::default();
    let labels = vec![("version", pushgate::VERSION.to_string())];
    families.gauge(
        "build_info",
        "The release of `pushgate` that tells these metrics; the value is 1.",
        &labels,
        1.0,
    );
    let unread = found.iter().map(|found| found.unread.len()).sum::<usize>();
    let help = "Flight recorders of this host that could not be read, as those of another release.";
    families.gauge("unread_recorders", help, &vec![], unread as f64);
    for found in &found {
        process(&mut families, found);
    }
    let processes: Vec<Process> = found.into_iter().map(|found| found.process).collect();
    for process in &processes {
        for engine in &process.engines {
            self::engine(&mut families, process.pid, engine);
            for qp in engine.queue_pairs.iter().filter(|_| each) {
                queue_pair(&mut families, process.pid, engine, qp);
            }
        }
    }
    if each {
        blocked(&mut families, &processes);
    }
    families.0.into_values().collect()
}

fn process(families: &mut Families, found: &Found) {
    let jobs = found.jobs.iter().take(JOBS).cloned().chain(found.jobs.is_empty().then(String::new));
    for job in jobs {
        let labels = vec![
            ("pid", found.process.pid.to_string()),
            ("name", found.process.name.clone()),
            ("pushgate_job", job),
        ];
        let help = "A process that has an engine, with its name and, if it has one, its job; the value is 1.";
        families.gauge("process_info", help, &labels, 1.0);
    }
}

fn of_engine(pid: u32, engine: &Engine) -> Labels {
    let program = engine.program.as_ref().map(|program| program.pid.to_string());
    vec![
        ("pid", pid.to_string()),
        ("engine", engine.engine.to_string()),
        ("program", program.unwrap_or_default()),
    ]
}

fn engine(families: &mut Families, pid: u32, engine: &Engine) {
    let labels = of_engine(pid, engine);
    let help = "Queue pairs of the engine.";
    families.gauge("engine_queue_pairs", help, &labels, engine.queue_pairs.len() as f64);
    let help = "1 once the engine has ended.";
    families.gauge("engine_ended", help, &labels, engine.ended as u8 as f64);
    let help = "Since the engine ran last. An engine that sleeps wakes ten times a second.";
    families.gauge("engine_idle_seconds", help, &labels, seconds(engine.now.saturating_sub(engine.ran)));
    families.counter(
        "pushgate_engine_sleeps_total".into(),
        "Times that the engine slept.",
        &labels,
        engine.sleeps as f64,
    );
    // Without one of these the sums would fall, and a sum that falls is taken for one that began anew.
    let Some(closed) = &engine.closed else { return };
    let live: Option<Vec<_>> =
        engine.queue_pairs.iter().map(|qp| Some((qp.about.transport_name(), qp.metrics?))).collect();
    let Some(live) = live else { return };
    let mut sums: BTreeMap<String, Metrics> = BTreeMap::new();
    for (link, metrics) in closed.iter().map(|c| (c.transport.clone(), c.metrics)).chain(live) {
        sums.entry(link).or_default().add(&metrics);
    }
    for (link, sum) in sums {
        families.metrics("pushgate_", &[&labels[..], &[("link", link)]].concat(), &sum);
    }
}

fn of_queue_pair(pid: u32, engine: &Engine, qp: &QueuePair) -> Labels {
    let about = &qp.about;
    let own = [
        ("qp", about.number.to_string()),
        ("rank", about.rank.to_string()),
        ("peer", about.peer.to_string()),
        ("link", about.transport_name()),
    ];
    [&of_engine(pid, engine)[..], &own].concat()
}

fn queue_pair(families: &mut Families, pid: u32, engine: &Engine, qp: &QueuePair) {
    let labels = of_queue_pair(pid, engine, qp);
    if let Some(metrics) = &qp.metrics {
        families.metrics("pushgate_queue_pair_", &labels, metrics);
    }
    let last = qp.last();
    let (view, counts) = (&last.view, &last.view.counts);
    let mut gauge = |name: &str, help: &str, value: f64| {
        families.gauge(&format!("queue_pair_{name}"), help, &labels, value);
    };
    let help = "1 while a link carries the queue pair, 0 while a broken one is replaced and once the queue pair has ended.";
    gauge("live", help, (view.phase == Phase::Live) as u8 as f64);
    let ended = matches!(view.phase, Phase::Ending | Phase::Ended);
    gauge("ended", "1 once the queue pair has ended.", ended as u8 as f64);
    gauge("epoch", "The link's epoch: how often the link was replaced.", view.epoch.into());
    gauge("receive_credits", "Receive credits of the peer that are left.", counts.credits as f64);
    gauge("work_requests_in_flight", "Work requests posted and not completed.", counts.in_flight as f64);
    let taken = counts.posted.saturating_sub(counts.retired);
    gauge("wqe_slots_taken", "WQE slots that are not given back to the device.", taken as f64);
    gauge("wqe_slots", "WQE slots of the ring.", (1u64 << qp.about.slots_log) as f64);
    let untaken = counts.shown.saturating_sub(counts.taken);
    gauge("receives_untaken", "Receive records shown to the device and not given back.", untaken as f64);
    for (direction, moved) in [("send", last.moved.sends), ("receive", last.moved.receives)] {
        let labels = [&labels[..], &[("direction", direction.into())]].concat();
        let since = seconds(engine.now.saturating_sub(moved));
        let help = "Since something moved last in this direction.";
        families.gauge("queue_pair_unmoved_seconds", help, &labels, since);
    }
}

/// For how long somebody waits in each queue pair.
fn blocked(families: &mut Families, processes: &[Process]) {
    let waits = waits(processes);
    let still: BTreeMap<_, _> = waits.iter().flat_map(|w| w.ends.iter().map(move |end| (*end, w))).collect();
    for process in processes {
        for engine in &process.engines {
            for qp in &engine.queue_pairs {
                let Some(waits) = still.get(&(process.pid, engine.engine, qp.about.number)) else { continue };
                let labels = of_queue_pair(process.pid, engine, qp);
                let help = "For how long somebody has waited in the queue pair; 0 if nobody waits. `pushgate inspect` says for whom.";
                let since = waits.blamed.map_or(0.0, |_| seconds(waits.still));
                families.gauge("queue_pair_blocked_seconds", help, &labels, since);
            }
        }
    }
}

#[cfg(test)]
mod tests;
