//! Peers that are stopped within a copy or ask without taking the answers, and what is left of runs that have ended.

use std::sync::Arc;
use std::time::Instant;

use pushgate::{Comm, Context, HostEnd, Settings};

use crate::agent::Agent;
use crate::greet::Connection;
use crate::session::receiving::{MOST_NOTES, NOTE};
use crate::session::{MOST_ANSWERS, Session};
use crate::status::Status;
use crate::tests::{HANG, HOST, Memory, agent, pair, run};
use crate::transfer::{Copying, Way};
use crate::wire::{HEAD, Message};

#[test]
fn p8_memory_stays_registered_while_a_peer_copies_there_though_their_connection_has_ended() {
    let [first, second] = pair(&[("qp", "local"), ("timeout", "5s")]);
    let (here, there) = (Memory::new(&first, 4096, 1), Memory::new(&second, 4096, 2));
    let published = second.publish(there.key).unwrap();
    let key = first.load("second", &published, HOST).unwrap();
    let transfer = first
        .prepare(true, "second", [HOST; 2], &[here.part(0, 4096, here.key)], &[there.part(0, 4096, key)])
        .unwrap();
    let begin = Instant::now();
    // To connect may take longer than the setting where other tests have the cores.
    while run(&first, &transfer, None) != Status::Success {
        assert!(begin.elapsed() < HANG, "the agents do not connect");
    }
    // A process that is stopped within a batch.
    let reached = first.core.state().sessions.values().find_map(Session::reached).unwrap();
    let batch = reached.enter().unwrap();
    first.disconnect("second").unwrap();
    while second.connections() > 0 {
        assert!(begin.elapsed() < HANG, "the connection does not end");
        second.notifications();
    }
    let other = Memory::new(&second, 4096, 3);
    assert_eq!(second.deregister(other.key), Ok(()), "nobody copies there");
    assert_eq!(second.deregister(there.key), Err(Status::Backend));
    drop(batch);
    assert!(reached.enter().is_none());
    assert_eq!(second.deregister(there.key), Ok(()));
}

#[test]
fn batches_left_of_a_run_that_has_ended_do_not_end_the_next_run() {
    let only = agent("only", &[("qp", "local")]);
    let bytes = 4 << 20;
    let memory = Memory::new(&only, bytes, 1);
    let half = |from| [memory.part(from, bytes / 2, memory.key)];
    let transfer = only.prepare(true, "only", [HOST; 2], &half(0), &half(bytes / 2)).unwrap();
    let begin = || {
        transfer.begin(None);
        let copying = Arc::new(Copying::new(transfer.clone(), Way::Own));
        transfer.run().copying = Some(copying.clone());
        copying
    };
    let old = begin();
    only.core.help(&old);
    transfer.end(Status::RemoteDisconnect);
    let new = begin();
    while old.has_more() {
        only.core.help(&old);
    }
    assert!(transfer.is_active());
    while new.has_more() {
        only.core.help(&new);
    }
    assert_eq!(Status::of_transfer(&transfer), Status::Success);
}

/// A connection of a program of its own with an agent.
fn hostile(victim: &Agent) -> (Comm, HostEnd) {
    let mut settings = Settings::default();
    for (key, value) in [("device", "cpu"), ("qp", "local"), ("timeout", "20s")] {
        settings.set(key, value).unwrap();
    }
    let context = Context::builder().settings(settings).build().unwrap();
    let connection = Connection::from_bytes(&victim.connection()).unwrap();
    connection.dial(&context, "hostile", "another", 1 << 20).unwrap()
}

#[test]
fn p8_empty_notifications_that_no_program_takes_are_bounded_and_later_ones_come_once_it_does() {
    let victim = agent("victim", &[("qp", "local")]);
    let (_comm, mut end) = hostile(&victim);
    let (tag, bytes) = Message::Note { last: true, payload: HEAD }.encode();
    let (mut sent, begin) = (0, Instant::now());
    while victim.core.state().shared.inbox_bytes < MOST_NOTES {
        assert!(sent < 2 * (MOST_NOTES / NOTE), "the agent takes any number");
        sent += usize::from(end.try_send(&bytes, tag).unwrap());
        assert!(begin.elapsed() < HANG, "the agent takes no more, though it has room");
    }
    let mut taken = victim.notifications().len();
    assert!(taken >= MOST_NOTES / NOTE);
    while taken < sent {
        assert!(begin.elapsed() < HANG, "notifications are lost");
        taken += victim.notifications().len();
    }
    assert_eq!(taken, sent);
}

#[test]
fn p8_a_peer_that_asks_and_takes_no_answer_loses_its_connection_and_what_it_makes_an_agent_keep_is_bounded() {
    let victim = agent("victim", &[("qp", "local")]);
    let (_comm, mut end) = hostile(&victim);
    let revoke = |end: &mut HostEnd, key| {
        let (tag, bytes) = Message::Revoke { key }.encode();
        end.send(&bytes, tag)
    };
    let answer = Message::Revoked { key: 0 }.encode().0;
    // It revokes what it has never leased. Each is answered once it is taken in.
    let begin = Instant::now();
    for key in 0..100 {
        revoke(&mut end, key).unwrap();
        let mut answered = false;
        while !answered {
            assert!(begin.elapsed() < HANG, "no answer");
            let Some(message) = end.take().unwrap() else { continue };
            answered = message.message().tag == answer;
            end.give_back(1);
        }
    }
    assert_eq!(victim.core.state().sessions.values().map(Session::known_leases).sum::<usize>(), 0);
    assert!((0..2 * MOST_ANSWERS as u64).any(|key| revoke(&mut end, key).is_err()));
}
