use std::os::fd::AsFd;

use pushgate_driver_shim::memory::ReadOnlyMemory;

use super::*;

fn open(memory: &SharedMemory) -> Arc<ReadOnlyMemory> {
    let fd = memory.fd().as_fd().try_clone_to_owned().unwrap();
    Arc::new(ReadOnlyMemory::from_fd(fd, memory.len()).unwrap())
}

fn engine(recorder: &Recorder) -> Engine {
    read(&memories(recorder)).unwrap()
}

fn memories(recorder: &Recorder) -> Vec<Memory> {
    recorder.memories().iter().map(|memory| Memory::open(&open(memory)).unwrap()).collect()
}

fn about(number: u32) -> About {
    About { number, rank: 3, peer: 4, transport: About::transport("local"), ends: [5, 6], ..About::default() }
}

fn posted(posted: u64) -> View {
    View { counts: Counts { posted, ..Counts::default() }, ..View::default() }
}

const NEVER: Stall = Stall { after: 0, receives: false };

#[test]
fn a_reader_sees_each_change_with_its_time() {
    let recorder = Recorder::start(Some(77)).unwrap();
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(9), 10, posted(0));
    trace.record(20, 0, posted(1), NEVER);
    trace.record(30, 0, posted(1), NEVER);
    trace.record(40, 0, View { missing: Missing::Receive, ..posted(1) }, NEVER);
    recorder.beat(40, 6);
    let seen = engine(&recorder);
    let program = seen.program.as_ref().map(|program| program.pid);
    assert_eq!((seen.pid, program, seen.ran, seen.ended), (std::process::id(), Some(77), 40, false));
    assert_eq!(seen.sleeps, 6);
    let [qp] = &seen.queue_pairs[..] else { panic!("{seen:?}") };
    assert_eq!((qp.about, qp.added), (about(9), 10));
    let entries: Vec<_> = qp
        .entries
        .iter()
        .map(|e| (e.number, e.time, (e.moved.sends, e.moved.receives), e.view.missing))
        .collect();
    let (nothing, receive) = (Missing::Nothing, Missing::Receive);
    let expected = [(0, 10, (10, 10), nothing), (1, 20, (20, 10), nothing), (2, 40, (20, 10), receive)];
    assert_eq!(entries, expected);
    recorder.end();
    assert!(engine(&recorder).ended);
}

#[test]
fn a_ring_that_wraps_holds_the_newest_entries() {
    let recorder = Recorder::start(None).unwrap();
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(0), 0, posted(0));
    for n in 1..=100 {
        trace.record(n, 0, posted(n), NEVER);
    }
    let seen = engine(&recorder);
    let entries = &seen.queue_pairs[0].entries;
    assert_eq!(entries.len(), layout::ENTRIES);
    assert!(
        entries.iter().rev().zip((0..=100).rev()).all(|(e, n)| (e.number, e.view.counts.posted) == (n, n))
    );
}

#[test]
fn a_slot_that_is_given_back_shows_nothing_of_its_last_queue_pair() {
    let recorder = Recorder::start(None).unwrap();
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(1), 5, posted(0));
    trace.record(6, 0, posted(1), NEVER);
    drop(trace);
    assert_eq!(engine(&recorder).queue_pairs, []);
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(2), 7, posted(8));
    let seen = engine(&recorder);
    let [qp] = &seen.queue_pairs[..] else { panic!("{seen:?}") };
    assert_eq!((qp.about.number, qp.entries.len(), qp.last().time), (2, 1, 7));
}

#[test]
fn an_engine_takes_more_memory_when_its_slots_are_taken() {
    let recorder = Recorder::start(None).unwrap();
    let traces: Vec<_> = (0..70).map(|_| recorder.trace().unwrap()).collect();
    let slots: Vec<_> = recorder.memories().iter().map(|m| (m.len() - layout::PAGE) / layout::SLOT).collect();
    assert_eq!(slots, [16, 16, 32, 64]);
    assert_eq!([1, 16, 17, 70, 1024, 3072].map(descriptors), [1, 1, 2, 4, 7, 9]);
    assert!(read(&memories(&recorder)[1..]).is_none());
    drop(traces);
    assert!(recorder.trace().is_some());
    assert_eq!(recorder.memories().len(), 4);
}

#[test]
fn p8_readers_cannot_write_and_a_memory_of_any_bytes_is_read() {
    let recorder = Recorder::start(None).unwrap();
    let fd = recorder.memories()[0].fd().try_clone_to_owned().unwrap();
    assert!(SharedMemory::from_fd(fd, Head::bytes(16)).is_err());
    // Words that no engine writes, each in turn: nothing but the reader's answer changes.
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(1), 5, posted(1));
    let memory = recorder.memories()[0].clone();
    let words = memory.words(0, memory.len() / 8);
    for at in (0..layout::HEAD_WORDS + layout::SLOT_WORDS).step_by(1) {
        for value in [1, u64::MAX, 1 << 47, 2] {
            let right = words[at].swap(value, Ordering::Relaxed);
            if let Some(engine) = Memory::open(&open(&memory)).ok().and_then(|memory| read(&[memory])) {
                let process = report::Process { pid: 1, name: "x".into(), engines: vec![engine] };
                let _ = (report::text_of(std::slice::from_ref(&process)), report::json(&[process]));
            }
            words[at].store(right, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_stall_is_said_once_and_again_only_when_something_has_moved() {
    let recorder = Recorder::start(None).unwrap();
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(1), 0, posted(0));
    let stall = Stall { after: 100, receives: false };
    let mut said = |now, away, view| trace.record(now, away, view, stall);
    // Nothing is under way.
    assert!(!said(500, 0, posted(0)));
    let stuck = posted(1);
    assert!(!said(510, 0, stuck));
    assert!(!said(609, 0, stuck));
    assert!(said(610, 0, stuck));
    assert!(!said(900, 0, stuck));
    // The engine did not run meanwhile.
    let stuck = posted(2);
    assert!(!said(1000, 0, stuck));
    assert!(!said(2000, 1000, stuck));
    assert!(!said(2099, 1000, stuck));
    assert!(said(2100, 1000, stuck));
}

#[test]
fn a_direction_that_stalls_is_said_though_the_other_one_moves() {
    let recorder = Recorder::start(None).unwrap();
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(1), 0, posted(0));
    let stall = Stall { after: 100, receives: false };
    let view = |accepted| View {
        counts: Counts { posted: 1, accepted, received: accepted, ..Counts::default() },
        ..View::default()
    };
    let said: Vec<u64> = (1..50).filter(|n| trace.record(10 * n, 0, view(*n), stall)).collect();
    assert_eq!(said, [11], "100 after the WQE was posted at 10");
}

#[test]
fn receives_that_nobody_fills_stall_where_the_program_waits_in_them() {
    let recorder = Recorder::start(None).unwrap();
    let view = View { counts: Counts { granted: 3, ..Counts::default() }, ..View::default() };
    for (receives, posted_receives) in [(false, true), (true, false), (true, true)] {
        let mut trace = recorder.trace().unwrap();
        trace.begin(About { posted_receives, ..about(1) }, 0, view);
        let due = trace.record(100, 0, view, Stall { after: 100, receives });
        assert_eq!(due, receives && posted_receives);
    }
}

fn counted(released: u64) -> crate::counters::Counters {
    crate::counters::Counters { released, ..Default::default() }
}

#[test]
fn a_reader_sees_counts_waits_and_times() {
    let recorder = Recorder::start(None).unwrap();
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(1), 100, posted(0));
    let waits = View { missing: Missing::Receive, ..posted(1) };
    for (now, released, view) in
        [(200, 5, posted(1)), (300, 5, waits), (450, 6, posted(1)), (1000, 7, posted(1))]
    {
        trace.count(now, counted(released));
        trace.record(now, 0, view, NEVER);
    }
    trace.delivered(1_500);
    trace.recovered(3_000_000);
    trace.count(1100, counted(9));
    let seen = engine(&recorder).queue_pairs[0].metrics.unwrap();
    assert_eq!(seen.counters, counted(9));
    // The WQE was seen to wait at 300, and no more at 450.
    assert_eq!(seen.waited, [0, 0, 150, 0, 0, 0]);
    let (delivery, recovery) = (seen.delivery, seen.recovery);
    assert_eq!(
        (delivery.counts[1], delivery.sum, recovery.counts[11], recovery.sum),
        (1, 1_500, 1, 3_000_000)
    );
}

#[test]
fn sums_of_an_engine_keep_what_queue_pairs_that_have_gone_counted() {
    let recorder = Recorder::start(None).unwrap();
    let transports = ["local", "tcp", "local", "verbs"];
    let mut traces: Vec<_> = transports.iter().map(|_| recorder.trace().unwrap()).collect();
    for (n, (trace, transport)) in traces.iter_mut().zip(transports).enumerate() {
        trace.begin(About { transport: About::transport(transport), ..about(n as u32) }, 0, posted(0));
        trace.count(10, counted(10 << n));
    }
    assert_eq!(engine(&recorder).closed, Some(vec![]));
    traces.truncate(1);
    let seen = engine(&recorder);
    let closed: Vec<_> =
        seen.closed.unwrap().into_iter().map(|c| (c.transport, c.metrics.counters.released)).collect();
    assert_eq!(closed, [("tcp".into(), 20), ("local".into(), 40), ("verbs".into(), 80)]);
    assert_eq!(seen.queue_pairs.len(), 1);
    // The next queue pair in a slot begins at nothing.
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(9), 20, posted(0));
    let seen = engine(&recorder).queue_pairs;
    let of = |number| seen.iter().find(|qp| qp.about.number == number).unwrap().metrics.unwrap().counters;
    assert_eq!((of(0), of(9)), (counted(10), counted(0)));
}

#[test]
fn a_reader_has_no_sums_while_a_queue_pair_goes() {
    let recorder = Recorder::start(None).unwrap();
    let memory = recorder.memories()[0].clone();
    let word = &memory.words(0, layout::HEAD_WORDS)[layout::CLOSINGS];
    word.store(1, Ordering::Relaxed);
    assert_eq!(engine(&recorder).closed, None);
    word.store(2, Ordering::Relaxed);
    assert_eq!(engine(&recorder).closed, Some(vec![]));
}

#[test]
fn an_engine_that_was_stopped_while_it_stored_metrics_shows_its_queue_pair() {
    let recorder = Recorder::start(None).unwrap();
    let mut trace = recorder.trace().unwrap();
    trace.begin(about(1), 5, posted(1));
    let memory = recorder.memories()[0].clone();
    let slot = memory.words(layout::PAGE, layout::SLOT_WORDS);
    layout::metrics(slot)[0].fetch_add(1, Ordering::Relaxed);
    let seen = engine(&recorder).queue_pairs;
    assert_eq!((seen.len(), seen[0].metrics), (1, None));
}

#[test]
fn a_reader_that_comes_while_a_queue_pair_goes_has_no_sums_and_has_them_after_it() {
    let recorder = Recorder::start(None).unwrap();
    let memories = memories(&recorder);
    let metrics = Metrics { counters: counted(3), ..Metrics::default() };
    for gone in 1..=2 {
        let slot = recorder.parts().free.pop().unwrap();
        // The reader comes when the slot is marked as free, and the sums are not written yet.
        let clear = || assert_eq!(read(&memories).unwrap().closed, None);
        recorder.give_back(slot, About::transport("tcp"), &metrics, clear);
        let [closed] = &read(&memories).unwrap().closed.unwrap()[..] else { panic!("one transport") };
        assert_eq!((closed.transport.as_str(), closed.metrics.counters), ("tcp", counted(3 * gone)));
    }
}
