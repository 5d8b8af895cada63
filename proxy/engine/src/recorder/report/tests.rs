use pushgate_core::session::Status;
use pushgate_driver_shim::abi;

use super::*;
use crate::recorder::about::About;
use crate::recorder::reader::{Copier, Program};
use crate::recorder::view::{Errors, Moved, View};

const S: u64 = 1_000_000_000;
/// When snapshots are read.
const NOW: u64 = 100 * S;
const RANK1: Who = Who { rank: 1, roles: false };

/// A queue pair of rank 0 or 1 that moved last `still` ago.
fn qp(rank: u32, still: u64, view: View) -> QueuePair {
    let about = About {
        number: 7,
        rank,
        peer: 1 - rank,
        peer_pid: None,
        transport: About::transport("local"),
        ends: [10 + rank as u64, 11 - rank as u64],
        slots_log: 10,
        receives_log: 6,
        peer_receives_log: 6,
        posted_receives: false,
        roles: false,
    };
    let at = NOW - still;
    let moved = |at| Moved { sends: at, receives: at };
    let first = Entry { number: 0, time: S, moved: moved(S), view: View::default() };
    let last = Entry { number: 1, time: at, moved: moved(at), view };
    QueuePair { about, added: S, metrics: None, entries: vec![first, last] }
}

fn process(rank: u32, ran: u64, state: char, qp: QueuePair) -> Process {
    let engine = Engine {
        pid: 100 + rank,
        program: None,
        engine: 0,
        thread: None,
        state: Some(state),
        copier: None,
        ended: false,
        ran: NOW - ran,
        now: NOW,
        sleeps: 0,
        closed: None,
        queue_pairs: vec![qp],
    };
    Process { pid: 100 + rank, name: "rank".into(), engines: vec![engine] }
}

fn runs(rank: u32, view: View) -> Process {
    process(rank, 0, 'S', qp(rank, 12 * S, view))
}

fn counts(c: Counts) -> View {
    View { counts: c, ..View::default() }
}

/// The sentence about the one queue pair of these processes.
#[track_caller]
fn sentence(processes: &[Process]) -> String {
    let pairs = pairs(processes);
    assert_eq!(pairs.len(), 1);
    assert_eq!(pairs[0].ends.len(), processes.len());
    pairs[0].sentence.clone()
}

/// A sender that has posted `posted` WQEs, `received` of them arrived, and waits for a receive credit.
fn out_of_credit(posted: u64, received: u64) -> View {
    let counts = Counts {
        posted,
        released: received,
        peer_received: received,
        peer_freed: received,
        peer_granted: received,
        ..Counts::default()
    };
    View { counts, missing: Missing::Receive, ..View::default() }
}

fn holds(shown: u64, taken: u64) -> View {
    counts(Counts {
        accepted: shown,
        received: shown,
        freed: taken,
        granted: taken + 64,
        shown,
        taken,
        ..Counts::default()
    })
}

#[test]
fn a_receiver_that_takes_nothing_is_named_from_both_ends() {
    let (sender, receiver) = (runs(0, out_of_credit(100, 64)), runs(1, holds(64, 0)));
    let said = "rank 1 has not taken 64 messages that arrived: its kernel or program is slow (nothing has moved for \
                12.0 s)";
    assert_eq!(sentence(&[sender.clone(), receiver.clone()]), said);
    assert_eq!(sentence(&[receiver]), said);
    let alone = sentence(&[sender]);
    assert!(alone.starts_with("no receive credit: messages have used all of the 64 receives"), "{alone}");
}

#[test]
fn a_receiver_that_holds_places_is_named_by_the_sender_alone() {
    let counts = Counts {
        posted: 9,
        released: 9,
        peer_received: 9,
        peer_freed: 6,
        peer_granted: 70,
        credits: 61,
        ..Counts::default()
    };
    let said = sentence(&[runs(0, View { counts, ..View::default() })]);
    assert!(said.starts_with("rank 1 has not taken 3 messages that arrived"), "{said}");
}

#[test]
fn a_receiver_that_posts_no_receive_is_named() {
    let sender = runs(0, out_of_credit(1, 0));
    let said = "no receive credit: rank 1 has posted no receive (nothing has moved for 12.0 s)";
    assert_eq!(sentence(std::slice::from_ref(&sender)), said);
    let mut receiver = runs(1, View::default());
    receiver.engines[0].queue_pairs[0].about.posted_receives = true;
    assert_eq!(sentence(&[sender, receiver.clone()]), said);
    let both = [runs(0, out_of_credit(5, 4)), {
        let counts = Counts { accepted: 4, received: 4, granted: 4, shown: 4, taken: 4, ..Counts::default() };
        receiver.engines[0].queue_pairs[0] = QueuePair {
            about: receiver.engines[0].queue_pairs[0].about,
            ..qp(1, 12 * S, View { counts, ..View::default() })
        };
        receiver
    }];
    let said = sentence(&both);
    assert!(said.starts_with("no receive credit: rank 1 has posted 4 receives, and messages"), "{said}");
}

#[test]
fn a_sender_that_sends_nothing_is_named_where_receives_wait() {
    let mut receiver = runs(1, counts(Counts { granted: 2, ..Counts::default() }));
    receiver.engines[0].queue_pairs[0].about.posted_receives = true;
    let said = "rank 1 has posted 2 receives that no message has filled: rank 0 has nothing to send";
    assert_eq!(sentence(&[runs(0, View::default()), receiver.clone()]), said);
    assert_eq!(sentence(&[receiver]), format!("{said}, or its messages do not arrive"));
    assert_eq!(sentence(&[runs(0, View::default())]), "rank 0 has nothing to send");
    let idle = [runs(0, View::default()), runs(1, View::default())];
    assert_eq!(sentence(&idle), "neither rank 0 nor rank 1 has anything to send");
}

#[test]
fn an_engine_that_does_not_run_is_to_blame_before_anything_else() {
    let stopped = |state| process(0, 123 * S / 10, state, qp(0, 13 * S, out_of_credit(100, 64)));
    for (state, why) in [
        ('T', "(process stopped: state T)"),
        ('D', "(it waits in the kernel: state D)"),
        ('R', "(it gets no core, or a call of it does not end: state R)"),
        ('S', "(it waits in a call: state S)"),
    ] {
        let said = format!("rank 0's engine has not run for 12.3 s {why}");
        assert_eq!(sentence(&[stopped(state), runs(1, holds(64, 0))]), said);
    }
    let mut ended = runs(1, holds(64, 0));
    ended.engines[0].ended = true;
    assert!(sentence(&[ended]).starts_with("rank 1's engine has ended"));
}

#[test]
fn a_program_that_is_stopped_is_to_blame_though_the_proxys_engine_runs() {
    let with = |state| {
        let mut receiver = runs(1, holds(64, 0));
        receiver.engines[0].program = Some(Program { pid: 300, name: Some("rank".into()), state });
        receiver
    };
    let sender = || runs(0, out_of_credit(100, 64));
    let both = [sender(), with(Some('T'))];
    assert_eq!(sentence(&both), "rank 1's program (process 300) is stopped: state T");
    assert!(text_of(&both).contains(
        "process 101 (rank), engine 0 for program 300 (rank, state T): 1 queue pair, ran 0 us ago, state S\n"
    ));
    for state in [Some('R'), Some('S'), None] {
        assert!(sentence(&[sender(), with(state)]).contains("its kernel or program is slow"));
    }
}

#[test]
fn ends_of_two_programs_of_one_proxy_bear_the_programs_numbers() {
    let served = |rank: u32, view| {
        let mut process = runs(rank, view);
        process.engines[0].program =
            Some(Program { pid: 300 + rank, name: Some("rank".into()), state: Some('S') });
        (process.pid, process.engines[0].pid) = (200, 200);
        process
    };
    let text = text_of(&[served(0, out_of_credit(100, 64)), served(1, holds(64, 0))]);
    let line = "rank 0 (process 300, served by the proxy, process 200) and rank 1 (process 301, served by the proxy, \
                process 200), local: rank 1 has not taken 64 messages";
    assert!(text.contains(line), "{text}");
    // A proxy of another PID namespace knows its programs by numbers that do not hold here.
    let mut process = served(0, View::default());
    process.pid = 201;
    assert_eq!(process.owner(&process.engines[0]), (201, "rank"));
}

#[test]
fn a_copier_that_is_stopped_is_to_blame_before_what_waits_for_it() {
    let with = |state| {
        let copies = View { copies: 2, ..holds(64, 0) };
        let mut receiver = runs(1, copies);
        receiver.engines[0].copier = Some(Copier { pid: 77, state });
        sentence(&[process(0, 0, 'S', qp(0, 13 * S, out_of_credit(100, 64))), receiver])
    };
    assert_eq!(with(Some('T')), "the copier of rank 1's GPU (process 77) is stopped: state T");
    for state in [Some('R'), Some('S'), None] {
        let said = with(state);
        assert!(said.contains("did not end: its device or its copier (process 77) is slow"), "{said}");
    }
}

#[test]
fn messages_that_do_not_arrive_are_the_links() {
    let sender =
        counts(Counts { posted: 3, released: 3, peer_granted: 64, in_flight: 3, ..Counts::default() });
    let said = sentence(&[runs(0, sender)]);
    assert!(said.starts_with("rank 1 has not received 3 messages that rank 0 released"), "{said}");
    let said = sentence(&[runs(0, sender), runs(1, holds(0, 0))]);
    assert!(said.starts_with("3 messages of rank 0 have not arrived at rank 1"), "{said}");
    let said = sentence(&[runs(0, sender), runs(1, View { copies: 2, ..holds(0, 0) })]);
    assert!(said.starts_with("2 copies of messages into memory of rank 1 did not end"), "{said}");
}

#[test]
fn an_end_and_a_broken_link_are_named_with_their_cause() {
    let status = Status { rank: Some(1), ..Status::new(abi::PUSHGATE_PEER_LOST) };
    let ended = View { status: Some(status), phase: Phase::Ended, ..View::default() };
    let said = sentence(&[runs(0, ended), runs(1, View::default())]);
    assert_eq!(said, "the queue pair has ended at rank 0, 12.0 s ago: peer lost (rank 1)");
    let offered = View { phase: Phase::Offered, ..View::default() };
    let said = sentence(&[runs(0, offered)]);
    assert!(said.contains("rank 0 has waited for 12.0 s that rank 1 offers to resume"), "{said}");
    let fencing = View { phase: Phase::Fencing, ..View::default() };
    let said = sentence(&[runs(0, offered), runs(1, fencing)]);
    assert!(said.contains("rank 1 has been bringing it to its end"), "{said}");
}

#[test]
fn what_moved_a_moment_ago_is_not_stuck() {
    let busy = process(0, 0, 'R', qp(0, S / 500, out_of_credit(100, 64)));
    assert_eq!(sentence(&[busy, runs(1, holds(64, 0))]), "messages move, the last 2 ms ago");
}

#[test]
fn a_direction_that_is_stuck_is_named_though_the_other_one_moves() {
    let (mut sender, mut receiver) = (runs(0, out_of_credit(100, 64)), runs(1, holds(64, 0)));
    let last = |process: &mut Process| process.engines[0].queue_pairs[0].entries.pop().unwrap();
    let (mut s, mut r) = (last(&mut sender), last(&mut receiver));
    (s.moved.receives, r.moved.sends) = (NOW - 1_000_000, NOW - 2_000_000);
    sender.engines[0].queue_pairs[0].entries.push(s);
    receiver.engines[0].queue_pairs[0].entries.push(r);
    let said = sentence(&[sender, receiver]);
    assert!(said.starts_with("rank 1 has not taken 64 messages that arrived"), "{said}");
}

#[test]
fn of_several_queue_pairs_it_is_said_how_many_wait_for_whom() {
    let mut both = [runs(0, out_of_credit(100, 64)), runs(1, holds(64, 0))];
    for n in 0..3 {
        for (process, view) in both.iter_mut().zip([out_of_credit(100, 64), holds(64, 0)]) {
            let mut more = qp(process.pid - 100, 20 * S, view);
            more.about.ends = more.about.ends.map(|end| end + 10 * (n + 1));
            process.engines[0].queue_pairs.push(more);
        }
    }
    let text = text_of(&both);
    assert!(text.contains("\n4 of 4 queue pairs wait: 4 for rank 1 (process 101)\n"), "{text}");
    assert_eq!(pairs(&both).iter().map(|pair| pair.still / S).collect::<Vec<_>>(), [20, 20, 20, 12]);
}

#[test]
fn ends_are_put_together_by_what_names_their_link_and_the_stuck_ones_come_first() {
    let idle = |rank| {
        let mut idle = runs(rank, View::default());
        idle.engines[0].queue_pairs[0].about.ends = [20 + rank as u64, 21 - rank as u64];
        idle
    };
    let mut both = [idle(0), idle(1)];
    both[0].engines[0].queue_pairs.extend(runs(0, out_of_credit(100, 64)).engines[0].queue_pairs.clone());
    both[1].engines[0].queue_pairs.extend(runs(1, holds(64, 0)).engines[0].queue_pairs.clone());
    let found = pairs(&both);
    assert_eq!(found.iter().map(|pair| pair.ends.len()).collect::<Vec<_>>(), [2, 2]);
    assert!(found[0].sentence.starts_with("rank 1 has not taken 64"), "{}", found[0].sentence);
    // What no end is known by stands alone.
    let unknown = |rank| {
        let mut process = idle(rank);
        process.engines[0].queue_pairs[0].about.ends = [0, 0];
        process
    };
    assert_eq!(pairs(&[unknown(0), unknown(1)]).len(), 2);
}

#[test]
fn the_text_has_positions_credits_errors_and_events() {
    let errors = Errors { refused: 2, ..Errors::default() };
    let sender = runs(0, View { errors, ..out_of_credit(65, 64) });
    let expected = "\
process 100 (rank), engine 0: 1 queue pair, ran 0 us ago, state S

rank 0 (process 100) and rank 1, local: no receive credit: messages have used all of the 64 receives that rank 1 \
                    granted, and rank 1 takes no message: its kernel or program is slow (nothing has moved for 12.0 s)
  rank 0, queue pair 7: live, epoch 0
    sends     posted 65, released 64, received by rank 1 64, no longer needed there 64; 65 of 1024 WQE slots taken; \
                    moved 12.0 s ago
    credits   0 of 64 receives that rank 1 granted are left, 0 work requests in flight; the next WQE waits for a \
                    receive credit
    receives  granted 0, accepted 0, received 0, shown 0, taken by the device 0; moved 12.0 s ago
    errors    2 WQEs or records refused
    events    12.0 s ago: posted 65 (+65), released 64 (+64), received by rank 1 64 (+64), granted by rank 1 64 (+64), \
                    waits for a receive credit
              99.0 s ago: nothing had happened
";
    assert_eq!(text_of(&[sender]), expected);
}

#[test]
fn the_log_of_a_stall_begins_with_how_many_there_are() {
    let mut process = runs(0, out_of_credit(100, 64));
    let text = stalled(&process);
    assert!(
        text.starts_with("a queue pair has not moved, though something is under way")
            && text.contains("\nrank 0 (process 100) and rank 1, local: no receive credit")
            && !text.ends_with('\n'),
        "{text}"
    );
    let again = process.engines[0].queue_pairs[0].clone();
    process.engines[0].queue_pairs.push(again);
    assert!(stalled(&process).starts_with("2 queue pairs have not moved"), "{}", stalled(&process));
}

#[test]
fn json_has_the_sentence_and_all_that_was_recorded() {
    let json = json(&[runs(0, out_of_credit(100, 64)), runs(1, holds(64, 0))]);
    let pair = &json["queue_pairs"][0];
    assert!(pair["sentence"].as_str().unwrap().starts_with("rank 1 has not taken 64 messages"), "{json}");
    assert_eq!((pair["still_ns"].as_u64(), pair["ends"][1]["pid"].as_u64()), (Some(12 * S), Some(101)));
    let entry = &json["processes"][0]["engines"][0]["queue_pairs"][0]["entries"][1];
    assert_eq!((entry["missing"].as_str(), entry["counts"]["posted"].as_u64()), (Some("receive"), Some(100)));
}

#[test]
fn events_are_the_differences_of_entries() {
    let before = Entry { number: 1, time: 0, moved: Moved::default(), view: out_of_credit(65, 64) };
    let status = Some(Status { rank: Some(1), detail: 4, ..Status::new(abi::PUSHGATE_LINK_DOWN) });
    let view = |phase, epoch| View { phase, epoch, ..out_of_credit(65, 64) };
    for (view, said) in [
        (out_of_credit(70, 64), "posted 70 (+5)"),
        (view(Phase::Fencing, 0), "broken"),
        (
            View { status, phase: Phase::Ended, ..out_of_credit(65, 64) },
            "ended, link down (rank 1): it does not answer (retries exceeded)",
        ),
        (out_of_credit(65, 64), ""),
    ] {
        assert_eq!(events(Some(&before), &Entry { view, ..before }, RANK1), said);
    }
    let broken = Entry { view: view(Phase::Joining, 0), ..before };
    let resumed = Entry {
        view: View { counts: Counts { released: 60, ..before.view.counts }, ..view(Phase::Live, 1) },
        ..before
    };
    assert_eq!(events(Some(&broken), &resumed, RANK1), "released back to 60 (-4), resumed in epoch 1");
}

#[test]
fn ends_of_the_nccl_plugin_are_called_by_their_roles() {
    let mut process = runs(0, out_of_credit(3, 2));
    process.engines[0].queue_pairs[0].about.roles = true;
    process.engines[0].queue_pairs[0].about.peer_pid = Some(77);
    let text = text_of(std::slice::from_ref(&process));
    for says in
        ["the sender (process 100) and the receiver (process 77), local: ", "the receiver takes no message"]
    {
        assert!(text.contains(says), "{says}: {text}");
    }
    assert!(!text.contains("rank 0") && !text.contains("rank 1"), "{text}");
    assert_eq!(waits(&[process])[0].blamed.unwrap().to_string(), "the receiver");
}
