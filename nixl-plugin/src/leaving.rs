//! Agents and connections that end while others go on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::engine::Waiting;
use crate::session::Session;
use crate::session::receiving::MOST_NOTES;
use crate::status::Status;
use crate::tests::{GPU, HANG, HOST, Memory, agent, goes_directly, notes, pair, run, wait_for_ends};
use crate::transfer::Transfer;

/// More messages than one call takes.
const NOTES: u8 = 200;

/// A WRITE of all of `here`, which is memory of `agent`, to all of `there`, which is memory of `peer`.
fn write(
    agent: &Agent,
    (name, peer): (&str, &Agent),
    kind: i32,
    here: &Memory,
    there: &Memory,
) -> Arc<Transfer> {
    let bytes = here.content().len();
    let loaded = agent.load(name, &peer.publish(there.key).unwrap(), kind).unwrap();
    let parts = [here.part(0, bytes, here.key), there.part(0, bytes, loaded)];
    agent.prepare(true, name, [kind, kind], &parts[..1], &parts[1..]).unwrap()
}

/// Waits until no more than this number of connections is left: the notifications.
fn notes_or_end(agent: &Agent, connections: usize) -> VecDeque<(String, Vec<u8>)> {
    let (begin, mut all) = (Instant::now(), VecDeque::new());
    loop {
        let ended = agent.connections() <= connections;
        all.extend(agent.notifications());
        if ended {
            return all;
        }
        assert!(begin.elapsed() < HANG, "a connection does not end");
        std::thread::yield_now();
    }
}

/// The first agent with connections to a second and a third one, and a transfer to the third.
fn three() -> ([Agent; 3], Arc<Transfer>) {
    let way = [("qp", "tcp"), ("host", "127.0.0.1"), ("timeout", "10min")];
    let ([first, second], third) = (pair(&way), agent("third", &way));
    first.load_connection("third", &third.connection()).unwrap();
    let (here, there) = (Memory::new(&first, 4096, 1), Memory::new(&third, 4096, 2));
    let transfer = write(&first, ("third", &third), HOST, &here, &there);
    assert_eq!(run(&first, &transfer, None), Status::Success);
    first.notify("second", b"connected").unwrap();
    notes(&second);
    ([first, second, third], transfer)
}

#[test]
fn a_peer_that_takes_no_farewell_holds_up_no_transfer_with_another() {
    for leaves in [false, true] {
        // A slow machine needs a longer hold.
        let held_up = [1, 2, 4, 8, 16, 32].into_iter().all(|seconds| {
            let ([first, second, _third], transfer) = three();
            let number = first.core.state().peers["second"].session.unwrap();
            first.core.state().sessions[&number].hold(Duration::from_secs(seconds));
            if leaves {
                drop(second);
                notes_or_end(&first, 1);
            } else {
                first.disconnect("second").unwrap();
            }
            assert_eq!(run(&first, &transfer, None), Status::Success);
            first.core.state().farewells_under_way() == 0
        });
        assert!(!held_up, "no transfer ends before the farewell has left; the peer leaves: {leaves}");
    }
}

#[test]
fn p6_a_notification_to_a_peer_that_is_still_being_connected_comes_though_its_agent_ends() {
    let [first, second] = pair(&[("qp", "local")]);
    first.notify("second", b"last").unwrap();
    drop(first);
    let begin = Instant::now();
    while second.notifications() != [("first".to_owned(), b"last".to_vec())] {
        assert!(begin.elapsed() < HANG, "the notification is lost");
    }
}

#[test]
fn p6_all_that_a_leaving_peer_sent_arrives_though_the_agent_has_something_to_send_to_it() {
    for kind in [HOST, GPU] {
        let [first, second] = pair(&[("qp", "local"), ("direct", "false")]);
        second.load_connection("first", &first.connection()).unwrap();
        let (here, there) =
            (Memory::within(&second, 1 << 16, 1, 0, kind), Memory::within(&first, 1 << 16, 2, 0, kind));
        let transfer = write(&second, ("first", &first), kind, &here, &there);
        assert_eq!(run(&second, &transfer, None), Status::Success);
        // Nothing is taken meanwhile.
        let mut state = first.core.state();
        here.fill(0x77);
        (0..NOTES).for_each(|i| second.notify("first", &[i]).unwrap());
        second.post(&transfer, Some(&[NOTES])).unwrap();
        let expected = here.content();
        let begin = Instant::now();
        while !second.core.state().sessions.values().all(Session::is_empty) {
            assert!(begin.elapsed() < HANG, "the window does not hold what was sent");
            std::thread::yield_now();
        }
        drop(second);
        wait_for_ends(&first, &state);
        first.core.start(&mut state, Waiting::Note(b"too late".to_vec()), "second").unwrap();
        first.core.advance(&mut state);
        assert!(state.sessions.values().all(Session::has_left) && !state.sessions.is_empty(), "{kind}");
        drop(state);
        let got = notes_or_end(&first, 0);
        assert!(got.into_iter().map(|(_, text)| text).eq((0..=NOTES).map(|i| vec![i])), "{kind}");
        assert!(there.content() == expected, "{kind}");
    }
}

#[test]
fn p6_what_a_peer_sent_before_it_left_is_taken_before_what_it_sends_over_its_next_connection() {
    let [first, second] = pair(&[("qp", "local")]);
    // Nothing is taken meanwhile.
    first.core.state().shared.inbox_bytes = MOST_NOTES;
    let begin = Instant::now();
    for (connections, texts) in [(1, 0..NOTES), (2, NOTES..NOTES + 1)] {
        second.load_connection("first", &first.connection()).unwrap();
        texts.for_each(|i| second.notify("first", &[i]).unwrap());
        second.core.linger(None);
        while first.connections() < connections {
            assert!(begin.elapsed() < HANG, "the agents do not connect");
        }
        if connections == 1 {
            second.disconnect("first").unwrap();
        }
    }
    let mut got = Vec::new();
    while got.len() <= NOTES.into() {
        assert!(begin.elapsed() < HANG, "notifications are lost");
        got.extend(first.notifications().into_iter().map(|(_, text)| text));
    }
    assert!(got.into_iter().eq((0..=NOTES).map(|i| vec![i])));
}

#[test]
fn a_gpu_that_fills_a_message_late_ends_no_queue_pair_as_stuck() {
    let [first, second] = pair(&[("qp", "local"), ("direct", "false"), ("stuck", "1ms")]);
    let (here, there) =
        (Memory::within(&first, 1 << 16, 1, 0, GPU), Memory::within(&second, 1 << 16, 2, 0, GPU));
    let transfer = write(&first, ("second", &second), GPU, &here, &there);
    assert_eq!(run(&first, &transfer, None), Status::Success);
    let mut state = first.core.state();
    // The notification is published after the message's room was reserved, and before the GPU has filled the message.
    transfer.begin(Some(b"after".to_vec()));
    first.core.start(&mut state, Waiting::Transfer(transfer.clone()), "second").unwrap();
    first.core.advance(&mut state);
    assert!(state.needs_looks(), "the played GPU has filled the message at once");
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(100) {
        first.core.context.drive().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(state);
    while first.check(&transfer) == Status::InProgress {
        assert!(begin.elapsed() < HANG, "a transfer hangs");
    }
    assert_eq!(first.check(&transfer), Status::Success);
}

#[test]
fn a_connection_keeps_nothing_of_registrations_that_its_peer_has_ended() {
    let [first, second] = pair(&[("qp", "local")]);
    let leases = || first.core.state().sessions.values().map(Session::known_leases).collect::<Vec<_>>();
    let here = Memory::new(&first, 1 << 20, 1);
    for round in 0..10 {
        let there = Memory::new(&second, 1 << 20, round);
        let transfer = write(&first, ("second", &second), HOST, &here, &there);
        assert_eq!(run(&first, &transfer, None), Status::Success);
        // Without direct copies the bytes go in messages once it is known that they can't go from region to region.
        assert!(leases() == [1] || !goes_directly());
        first.release(&transfer).unwrap();
        second.deregister(there.key).unwrap();
    }
    assert_eq!(leases(), [0]);
}
