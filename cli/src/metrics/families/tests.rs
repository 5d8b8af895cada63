use prometheus::TextEncoder;
use pushgate_engine::counters::Counters;
use pushgate_engine::recorder::{About, Closed, Counts, Entry, Moved, Program, View};

use super::*;

const S: u64 = 1_000_000_000;

/// Metrics in which each number differs from the others: `from`, and one more for each.
fn metrics(from: u64) -> Metrics {
    let mut metrics = Metrics::default();
    metrics.counters.released = from;
    metrics.counters.released_bytes = from + 1;
    metrics.counters.stall_receive = from + 2;
    metrics.waited[2] = (from + 3).saturating_mul(S);
    metrics.delivery.counts[0] = from;
    metrics.delivery.counts[16] = 1;
    metrics.delivery.sum = from.saturating_mul(S);
    metrics
}

fn qp(number: u32, metrics: Option<Metrics>) -> QueuePair {
    let about =
        About { number, rank: 3, peer: 4, transport: *b"local\0\0\0", slots_log: 7, ..About::default() };
    let counts = Counts { posted: 5, retired: 2, credits: 9, ..Counts::default() };
    let view = View { counts, ..View::default() };
    let entry = Entry { number: 0, time: S, moved: Moved { sends: 2 * S, receives: S }, view };
    QueuePair { about, added: 0, metrics, entries: vec![entry] }
}

fn found(queue_pairs: Vec<QueuePair>, closed: Option<Vec<Closed>>) -> Vec<Found> {
    let engine = Engine {
        pid: 17,
        program: Some(Program { pid: 18, name: None, state: None }),
        engine: 0,
        thread: None,
        state: None,
        ended: false,
        ran: 4 * S,
        now: 5 * S,
        copier: None,
        sleeps: 6,
        closed,
        queue_pairs,
    };
    let process = Process { pid: 17, name: "a \"name\"\\".into(), engines: vec![engine] };
    vec![Found { process, jobs: vec!["job".into()], unread: vec!["no".into()] }]
}

fn text(found: Vec<Found>, each: bool) -> String {
    TextEncoder::new().encode_to_string(&families(found, each)).unwrap()
}

#[track_caller]
fn says(text: &str, line: &str) {
    assert!(text.lines().any(|l| l == line), "no line {line:?} in\n{text}");
}

#[test]
fn sums_of_an_engine_hold_its_queue_pairs_and_those_that_have_gone() {
    let closed = vec![
        Closed { transport: "local".into(), metrics: metrics(1000) },
        Closed { transport: "tcp".into(), metrics: metrics(5) },
    ];
    let text = text(found(vec![qp(0, Some(metrics(10))), qp(1, Some(metrics(200)))], Some(closed)), true);
    let engine = "pid=\"17\",engine=\"0\",program=\"18\"";
    for (name, local, tcp) in [
        ("messages_released_total", 1210, 5),
        ("released_bytes_total", 1213, 6),
        ("delivery_seconds_sum", 1210, 5),
        ("delivery_seconds_count", 1213, 6),
    ] {
        says(&text, &format!("pushgate_{name}{{{engine},link=\"local\"}} {local}"));
        says(&text, &format!("pushgate_{name}{{{engine},link=\"tcp\"}} {tcp}"));
    }
    let cause = ",link=\"tcp\",cause=\"receive\"}";
    says(&text, &format!("pushgate_credit_stalls_total{{{engine}{cause} 7"));
    says(&text, &format!("pushgate_waited_seconds_total{{{engine}{cause} 8"));
    says(&text, &format!("pushgate_delivery_seconds_bucket{{{engine},link=\"tcp\",le=\"0.000001\"}} 5"));
    says(&text, &format!("pushgate_delivery_seconds_bucket{{{engine},link=\"tcp\",le=\"10\"}} 5"));
    says(&text, &format!("pushgate_delivery_seconds_bucket{{{engine},link=\"tcp\",le=\"+Inf\"}} 6"));
    let qp = format!("{{{engine},qp=\"1\",rank=\"3\",peer=\"4\",link=\"local\"");
    says(&text, &format!("pushgate_queue_pair_messages_released_total{qp}}} 200"));
    says(&text, &format!("pushgate_queue_pair_wqe_slots_taken{qp}}} 3"));
    says(&text, &format!("pushgate_queue_pair_unmoved_seconds{qp},direction=\"send\"}} 3"));
    says(&text, &format!("pushgate_engine_sleeps_total{{{engine}}} 6"));
    says(&text, &format!("pushgate_engine_idle_seconds{{{engine}}} 1"));
    says(&text, "pushgate_process_info{pid=\"17\",name=\"a \\\"name\\\"\\\\\",pushgate_job=\"job\"} 1");
    says(&text, "pushgate_unread_recorders 1");
}

#[test]
fn no_sum_is_told_that_would_fall() {
    let known = || qp(0, Some(metrics(1)));
    for (queue_pairs, closed) in [(vec![known()], None), (vec![known(), qp(1, None)], Some(vec![]))] {
        let text = text(found(queue_pairs, closed), true);
        assert!(!text.contains("pushgate_messages_released_total"), "{text}");
        says(
            &text,
            "pushgate_queue_pair_messages_released_total{pid=\"17\",engine=\"0\",program=\"18\",qp=\"0\",rank=\"3\",peer=\"4\",link=\"local\"} 1",
        );
    }
}

#[test]
fn engines_alone_have_as_many_metrics_however_many_queue_pairs_there_are() {
    let lines = |n| {
        let queue_pairs = (0..n).map(|number| qp(number, Some(metrics(1)))).collect();
        text(found(queue_pairs, Some(vec![])), false).lines().count()
    };
    assert_eq!(lines(1), lines(100));
}

#[test]
fn every_count_of_a_queue_pair_has_a_name() {
    let nameless: Vec<_> =
        Counters::default().iter().map(|(name, _)| name).filter(|name| told(name).is_none()).collect();
    assert_eq!(nameless, ["sleeps"], "an engine's, told as pushgate_engine_sleeps_total");
}

#[test]
fn p8_metrics_of_any_numbers_are_told() {
    let mut wild = metrics(u64::MAX / 2);
    (wild.counters.delivered, wild.delivery.counts) = (u64::MAX, [u64::MAX; 17]);
    let closed = Closed { transport: "local".into(), metrics: wild };
    text(found(vec![qp(0, Some(wild)), qp(0, Some(wild))], Some(vec![closed])), true);
}

/// The names of all families of an engine with queue pairs.
fn names() -> Vec<String> {
    let found = found(vec![qp(0, Some(metrics(1)))], Some(vec![]));
    families(found, true).iter().map(|family| family.name().to_string()).collect()
}

/// The words of a text that begin with `pushgate_`.
fn told_names(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("pushgate_")).collect()
}

#[test]
fn the_dashboard_asks_for_names_that_are_told() {
    let dashboard = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/grafana-dashboard.json"));
    let _: serde_json::Value = serde_json::from_str(dashboard).unwrap();
    let names = names();
    let asked = told_names(dashboard);
    assert!(asked.len() > 20, "{asked:?}");
    for asked in asked {
        let family =
            ["_bucket", "_sum", "_count"].iter().find_map(|end| asked.strip_suffix(end)).unwrap_or(asked);
        assert!(names.iter().any(|name| name == family), "no metric {asked}");
    }
}

#[test]
fn the_page_has_every_name_and_no_other() {
    let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md"));
    let names = names();
    let bare = |name: &str| {
        name.strip_prefix("pushgate_queue_pair_").unwrap_or(&name["pushgate_".len()..]).to_string()
    };
    for name in &names {
        assert!(
            page.contains(&format!("`{}`", bare(name))) || page.contains(&format!("`{name}`")),
            "the page lacks {name}"
        );
    }
    for told in told_names(page).into_iter().filter(|told| !told.ends_with('_') && *told != "pushgate_job") {
        assert!(told.ends_with("_NAME") || names.iter().any(|name| name == told), "the page has {told}");
    }
}
