//! Peers that are stopped within a copy or ask without taking the answers, and what is left of runs that have ended.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use pushgate::{Comm, Context, HostEnd, Settings};
use pushgate_tests::fuse::Hanging;
use pushgate_tests::skip;

use crate::agent::{Agent, Described};
use crate::greet::Connection;
use crate::registrations::{self, Published};
use crate::session::receiving::{MOST_NOTES, NOTE};
use crate::session::{MOST_ANSWERS, Session};
use crate::status::Status;
use crate::tests::{HANG, HOST, Memory, agent, pair, run, wait_for_ends};
use crate::transfer::{Copying, Way};
use crate::wire::{HEAD, Message, TOKEN};

#[test]
fn p8_memory_stays_registered_while_a_peer_copies_there_though_their_connection_has_ended() {
    [false, true].into_iter().for_each(memory_stays_registered_while_a_peer_copies_there);
}

/// `drains`: the end finds messages that are not taken yet.
fn memory_stays_registered_while_a_peer_copies_there(drains: bool) {
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
    let mut state = second.core.state();
    (0..if drains { 100 } else { 0 }).for_each(|i| first.notify("second", &[i]).unwrap());
    first.disconnect("second").unwrap();
    wait_for_ends(&second, &state);
    state.sessions.values_mut().for_each(|session| session.notify(b"too late"));
    second.core.advance(&mut state);
    assert_eq!(state.sessions.values().any(Session::has_left), drains);
    drop(state);
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

/// What a process of the test below is: its variable in the environment, and what it is there.
const PROCESS: &str = "_PUSHGATE_TEST_NIXL_PROCESS";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..][..2], 16).unwrap()).collect()
}

fn next_line() -> String {
    std::io::stdin().lines().next().expect("the test says it").unwrap()
}

/// No test: what runs in the processes of the test below.
#[test]
#[ignore = "runs in processes of another test"]
fn a_process_of_the_test_of_a_peer_that_is_killed() {
    let parameters = [("qp", "local"), ("timeout", "20s")];
    match std::env::var(PROCESS).as_deref() {
        Ok("owner") => {
            let owner = agent("owner", &parameters);
            let memory = Memory::new(&owner, 4096, 1);
            println!("\nsaid {} {}", hex(&owner.connection()), hex(&owner.publish(memory.key).unwrap()));
            assert_eq!(next_line(), "killed");
            println!("\nsaid {:?}", owner.deregister(memory.key));
        }
        Ok("peer") => {
            let line = next_line();
            let [connection, published] = [0, 1].map(|i| from_hex(line.split(' ').nth(i).unwrap()));
            let peer = agent("peer", &parameters);
            peer.load_connection("owner", &connection).unwrap();
            let key = peer.load("owner", &published, HOST).unwrap();
            let here = Memory::new(&peer, 4096, 2);
            let address = serde_json::from_slice::<Published>(&published).unwrap().address;
            let there = Described { address, length: 4096, device: 0, registration: key };
            let own = [here.part(0, 4096, here.key)];
            let transfer = peer.prepare(true, "owner", [HOST; 2], &own, &[there]).unwrap();
            assert_eq!(run(&peer, &transfer, None), Status::Success);
            let reached = peer.core.state().sessions.values().find_map(Session::reached).unwrap();
            std::mem::forget(reached.enter().unwrap());
            println!("\nsaid within");
            next_line();
        }
        _ => {}
    }
}

#[test]
fn p7_memory_is_free_once_a_peer_without_a_number_here_was_killed_within_a_copy() {
    let start = |which: &str, before: &[&str]| {
        let own = std::env::current_exe().unwrap();
        let mut words = before.iter().map(AsRef::as_ref).chain([own.as_os_str()]);
        let mut child = Command::new(words.next().unwrap());
        let name = "unruly::a_process_of_the_test_of_a_peer_that_is_killed";
        child.args(words).args(["--exact", name, "--ignored", "--nocapture"]).env(PROCESS, which);
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (say, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        (child, say, hear.lines().filter_map(|line| line.unwrap().strip_prefix("said ").map(str::to_owned)))
    };
    let apart = ["unshare", "--pid", "--fork", "--kill-child"];
    let tried = Command::new(apart[0]).args(&apart[1..]).arg("true").output();
    if !tried.as_ref().is_ok_and(|tried| tried.status.success()) {
        return skip(&format!("an owner in a PID namespace of its own: {tried:?}"));
    }
    let (mut owner, mut say, mut heard) = start("owner", &apart);
    let (mut peer, mut tell, mut told) = start("peer", &[]);
    writeln!(tell, "{}", heard.next().expect("it is reached")).unwrap();
    assert_eq!(told.next().as_deref(), Some("within"));
    peer.kill().and_then(|()| peer.wait()).unwrap();
    writeln!(say, "killed").unwrap();
    assert_eq!(heard.next().as_deref(), Some("Ok(())"));
    assert!(owner.wait().unwrap().success());
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
    hostile_over(victim, "local")
}

fn hostile_over(victim: &Agent, qp: &str) -> (Comm, HostEnd) {
    let mut settings = Settings::default();
    for (key, value) in [("device", "cpu"), ("qp", qp), ("timeout", "20s"), ("host", "127.0.0.1")] {
        settings.set(key, value).unwrap();
    }
    let context = Context::builder().settings(settings).build().unwrap();
    let connection = Connection::from_bytes(&victim.connection()).unwrap();
    connection.dial(&context, "hostile", "another", 1 << 20).unwrap()
}

/// Revokes a registration that was never leased: an agent answers that once it has taken the message in.
fn revoke(end: &mut HostEnd, key: u64) {
    let (tag, bytes) = Message::Revoke { key }.encode();
    end.send(&bytes, tag).unwrap();
    let (answer, begin) = (Message::Revoked { key: 0 }.encode().0, Instant::now());
    let mut answered = false;
    while !answered {
        assert!(begin.elapsed() < HANG, "no answer");
        let Some(message) = end.take().unwrap() else { continue };
        answered = message.message().tag == answer;
        end.give_back(1);
    }
}

#[test]
fn p7_p8_a_peer_that_names_a_file_whose_opening_is_not_answered_holds_up_nobody() {
    let victim = agent("victim", &[("qp", "local")]);
    let hanging = match Hanging::open(1) {
        Ok(hanging) => hanging,
        Err(e) => return skip(&format!("files whose opening hangs: no file system in user space: {e}")),
    };
    let (_comm, mut end) = hostile(&victim);
    let place = hanging.files()[0].as_raw_fd() as u64;
    let (tag, bytes) = Message::Hello { place, token: [7; TOKEN] }.encode();
    end.send(&bytes, tag).unwrap();
    revoke(&mut end, 1);
    assert!(victim.core.state().sessions.values().all(|session| session.reached().is_none()));
}

#[test]
fn p7_a_transfer_of_a_silent_peer_is_not_released_at_first_and_costs_that_peer_its_connection_then() {
    let victim = Arc::new(agent("victim", &[("qp", "tcp"), ("host", "127.0.0.1"), ("timeout", "1h")]));
    let (_comm, mut end) = hostile_over(&victim, "tcp");
    let (tag, bytes) = Message::Hello { place: 0, token: [7; TOKEN] }.encode();
    end.send(&bytes, tag).unwrap();
    revoke(&mut end, 1);
    let connection = String::from_utf8(victim.connection()).unwrap();
    let instance = victim.core.instance.clone();
    victim.load_connection("hostile", connection.replace(&instance, "another").as_bytes()).unwrap();
    let (address, length, memory) = (1 << 20, 1 << 20, registrations::Memory::Host);
    let published = Published { instance: "another".into(), key: 1, address, length, memory };
    let key = victim.load("hostile", &serde_json::to_vec(&published).unwrap(), HOST).unwrap();
    let here = Memory::new(&victim, 1 << 20, 1);
    let there = Described { address, length, device: 0, registration: key };
    let own = [here.part(0, 1 << 20, here.key)];
    let transfer = victim.prepare(false, "hostile", [HOST; 2], &own, &[there]).unwrap();
    victim.post(&transfer, None).unwrap();
    let begin = Instant::now();
    // It is asked to put the bytes into the victim's memory, and does not say that it has.
    while !victim.core.state().sessions.values().any(|session| session.uses(&transfer)) {
        assert!(begin.elapsed() < HANG, "the peer is not asked");
        victim.check(&transfer);
    }
    let release = || {
        let (tell, told) = channel();
        let (victim, transfer) = (victim.clone(), transfer.clone());
        std::thread::spawn(move || tell.send(victim.release(&transfer)));
        told.recv_timeout(HANG).expect("a release waits for a peer")
    };
    assert_eq!((release(), victim.connections()), (Err(Status::Backend), 1));
    assert_eq!((release(), victim.connections()), (Ok(()), 0));
    assert_eq!(victim.deregister(here.key), Ok(()));
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
    (0..100).for_each(|key| revoke(&mut end, key));
    assert_eq!(victim.core.state().sessions.values().map(Session::known_leases).sum::<usize>(), 0);
    let (tag, bytes) = Message::Revoke { key: 0 }.encode();
    assert!((0..2 * MOST_ANSWERS).any(|_| end.send(&bytes, tag).is_err()));
}
