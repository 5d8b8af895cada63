//! Tests of how ranks of several hosts meet.

use std::io::{Read as _, Write};
use std::net::Shutdown;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};

use pushgate_door::redial;
use pushgate_door::redial::envelope::{MAGIC, send_all, wait};
use pushgate_door::{HELLO, PASSAGE, Purpose, Secret, dial};
use pushgate_tests::{hang, patience, wait_until};
use rustix::net::sockopt::set_socket_linger;
use serde::de::DeserializeOwned;

use super::*;
use crate::mesh::tests::LATER;
use crate::mesh::{Events, MAX_BYTES, Mesh};

/// What ranks without a secret agree on.
fn terms() -> Terms {
    Terms { secret: Secret::public(), purpose: Purpose::MESH, tls: false }
}

fn with_secret(byte: u8, tls: bool) -> Terms {
    Terms { secret: Secret::new(&[byte; 32]).unwrap(), tls, ..terms() }
}

fn me_with(rank: u32, size: u32, terms: Terms) -> Me<'static> {
    Me::new("red", rank, size, hang(), None, terms).unwrap()
}

pub(super) fn me(rank: u32, size: u32) -> Me<'static> {
    me_with(rank, size, terms())
}

pub(super) fn mesh(rank: u32, (streams, again): Joined) -> (Mesh, Receiver<u32>) {
    let mut mesh = Mesh::new(rank, streams, hang(), again).unwrap();
    let (sender, lost) = channel();
    let events = Events { lost: Box::new(move |rank| sender.send(rank).unwrap()), ended: Box::new(|_| {}) };
    mesh.listen(events).unwrap();
    (mesh, lost)
}

/// Starts rank 0 at a port of its own.
pub(super) fn rank0(at: &str, size: u32) -> (String, JoinHandle<Result<Joined>>) {
    let door = me(0, size).listen_at(at).unwrap();
    let place = door.local_addr().unwrap().to_string();
    (place, thread::spawn(move || me(0, size).gather(&door)))
}

pub(super) fn join(place: &str, rank: u32, size: u32) -> JoinHandle<Result<Joined>> {
    let place = place.to_owned();
    thread::spawn(move || me(rank, size).join(&place, "auto"))
}

fn hello(rank: u32, size: u32) -> Hello {
    Hello {
        newest: VERSIONS.newest(),
        abi: ABI.oldest(),
        newest_abi: ABI.newest(),
        job: "red".into(),
        size,
        rank,
        to: 0,
        also: Vec::new(),
        listens: Some("127.0.0.1:1".parse().unwrap()),
        token: None,
        again: None,
    }
}

/// Goes through a rank's door by hand, with this greeting.
fn greets(place: &str, greeting: &[u8]) -> Stream {
    dial(place.parse().unwrap(), &terms(), greeting, Instant::now() + hang()).unwrap()
}

fn put(stream: &Stream, bytes: &[u8]) {
    send_all(stream, bytes, Instant::now() + hang()).unwrap();
}

/// Makes a client by hand, which sends `bytes` and knows nothing of a door.
fn raw(place: &str, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(place).unwrap();
    stream.set_read_timeout(Some(hang())).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

fn sealed(hello: &Hello) -> Vec<u8> {
    envelope(VERSIONS.oldest(), hello)
}

fn hear<A: DeserializeOwned>(stream: &Stream) -> A {
    let mut incoming = Incoming::default();
    loop {
        assert!(wait(&mut [PollFd::new(stream, PollFlags::IN)], Instant::now() + hang()));
        if let Some((_, body)) = incoming.open(stream, MAX_ANSWER).unwrap() {
            return serde_json::from_slice(&body).unwrap();
        }
    }
}

#[track_caller]
fn refused(place: &str, bytes: &[u8], expected: &[&str]) {
    let Answer::Refused(why) = hear(&greets(place, bytes)) else { panic!("taken in: {expected:?}") };
    assert!(expected.iter().all(|e| why.contains(e)), "{why}");
}

fn ranks(at: &str, size: u32) -> Vec<(Mesh, Receiver<u32>)> {
    let (place, first) = rank0(at, size);
    let mut all = vec![first];
    all.extend((1..size).map(|r| join(&place, r, size)));
    all.into_iter().zip(0..).map(|(t, rank)| mesh(rank, t.join().unwrap().unwrap())).collect()
}

#[test]
fn four_ranks_exchange_frames_in_order() {
    let mut places = vec!["127.0.0.1:0"];
    // Not every machine has IPv6.
    places.extend(TcpListener::bind("[::1]:0").is_ok().then_some("[::1]:0"));
    for at in places {
        let all = ranks(at, 4);
        // Longer than a socket buffer, so that frames arrive in pieces.
        let payload = |from: u32, to: u32| vec![(16 * from + to) as u8; 3 << 20];
        thread::scope(|s| {
            for (mesh, _) in &all {
                s.spawn(move || {
                    let others = || (0..4).filter(|r| *r != mesh.rank);
                    for to in others() {
                        mesh.send(to, 7, &payload(mesh.rank, to), &[]).unwrap();
                        mesh.send(to, 8, &[], &[]).unwrap();
                    }
                    for from in others() {
                        assert!(mesh.recv(from, 8).unwrap().0.is_empty());
                        assert!(mesh.recv(from, 7).unwrap().0 == payload(from, mesh.rank));
                    }
                });
            }
        });
    }
}

#[test]
fn ranks_that_do_not_fit_are_told_why_and_the_others_meet() {
    let (place, first) = rank0("127.0.0.1:0", 3);
    let changed = |change: fn(&mut Hello)| {
        let mut h = hello(1, 3);
        change(&mut h);
        sealed(&h)
    };
    let version = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[8] = 9;
        bytes
    };
    let good = sealed(&hello(1, 3));
    refused(&place, &version(&good), &["wire version is 9, expected 6", "one release"]);
    // A version that has a different greeting altogether.
    let mut other = version(&good)[..12].to_vec();
    other.extend([3, 0, 0, 0, 1, 2, 3]);
    refused(&place, &other, &["wire version is 9"]);
    refused(&place, &changed(|h| h.abi = 77), &["ABI version is 77, expected", "one release"]);
    refused(
        &place,
        &changed(|h| h.job = "bl\u{1b}ue".into()),
        &["job is bl\\u{1b}ue, expected red", "give all"],
    );
    refused(&place, &changed(|h| h.size = 5), &["size is 5, expected 3", "number of ranks"]);
    refused(&place, &changed(|h| h.rank = 0), &["rank is 0, expected 1 to 2"]);
    refused(&place, &changed(|h| h.rank = 3), &["rank is 3, expected 1 to 2"]);
    refused(&place, &changed(|h| h.listens = None), &["no address"]);
    // The refused rank reports the same reason in its own error.
    let e = me(1, 4).join(&place, "auto").unwrap_err().to_string();
    assert!(e.starts_with(&format!("rank 0: refused rank 1 at {place}: its size is 4, expected 3")), "{e}");

    let early = greets(&place, &good);
    refused(&place, &good, &["rank is 1, expected one that is not there yet", "running twice"]);
    // The rank is gone, and comes back.
    drop(early);
    let others = [join(&place, 1, 3), join(&place, 2, 3)];
    first.join().unwrap().unwrap();
    for other in others {
        other.join().unwrap().unwrap();
    }
}

#[test]
fn a_rank_that_has_gone_since_rank_0_looked_takes_its_place_again() {
    let first = me(0, 3);
    let door = first.listen_at("127.0.0.1:0").unwrap();
    let place = door.local_addrs().unwrap()[0].to_string();
    let dials = thread::spawn(move || greets(&place, &sealed(&hello(1, 3))));
    let mut arrival = None;
    wait_until("it arrives", || {
        arrival = door.next();
        arrival.is_some()
    });
    // Either end of the connection will do.
    let places = [None, Some((hello(1, 3), dials.join().unwrap())), None];
    let body = serde_json::to_vec(&hello(1, 3)).unwrap();
    let check = || first.check(VERSIONS.oldest(), &body, None, &places).map(|hello| hello.rank);
    assert!(check().unwrap_err().contains("running twice"));
    // It ends after rank 0 has waited, and before rank 0 takes in who arrived.
    drop(arrival);
    assert_eq!(check(), Ok(1));
}

#[test]
fn p8_slow_connectors_that_are_no_rank_do_not_delay_the_set_up() {
    let mut huge = MAGIC.to_vec();
    huge.extend([1, 0, 0, 0, 255, 255, 255, 255]);
    let slow = [
        &b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"[..],
        &[0; 4096],
        &[],
        // A slow connector that is no rank: a correct beginning, then nothing.
        b"PUSH",
        &sealed(&hello(1, 2))[..40],
        &[MAGIC.as_slice(), &[5, 0, 0, 0, 48, 0, 0, 0, 0, 0]].concat(),
        &huge,
    ];
    // Once while the other connectors stay connected, once without them.
    let meet = |staying: &[&[u8]]| {
        let start = Instant::now();
        let (place, first) = rank0("127.0.0.1:0", 2);
        let _open: Vec<_> = staying.iter().map(|bytes| raw(&place, bytes)).collect();
        for _ in 0..2 * STRANGERS {
            drop(raw(&place, b"x"));
        }
        let second = join(&place, 1, 2);
        first.join().unwrap().unwrap();
        second.join().unwrap().unwrap();
        start.elapsed()
    };
    // The best of three each, because a busy machine may hold up any of them.
    let best = |staying: &[&[u8]]| (0..3).map(|_| meet(staying)).min().expect("three");
    let (with, without) = (best(&slow), best(&[]));
    // Waiting for one of the slow connectors would cost the whole time limit. The term with
    // `without` leaves room for a slow machine.
    assert!(
        with < PASSAGE / 2 + 4 * without,
        "{with:?} with other connectors that stay connected, {without:?} without"
    );
}

#[test]
fn p8_ranks_know_each_other_by_the_token() {
    let (place, first) = rank0("127.0.0.1:0", 3);
    let second = join(&place, 1, 3);
    let third = greets(&place, &sealed(&hello(2, 3)));
    let Answer::Table { token, addresses, port: 0, .. } = hear(&third) else { panic!("no table") };
    assert_eq!((token.len(), addresses.len()), (32, 2));
    let to_second = |token: Option<String>| sealed(&Hello { to: 1, token, ..hello(2, 3) });
    let at = addresses[0].to_string();
    refused(&at, &to_second(None), &["token is not that of this job"]);
    refused(&at, &to_second(Some("0".repeat(32))), &["token is not that of this job"]);
    let taken = greets(&at, &to_second(Some(token)));
    assert!(matches!(hear(&taken), Answer::Welcome));
    assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
}

#[test]
fn p8_ranks_meet_with_one_secret_and_a_rank_with_another_is_refused_with_the_remedy() {
    for tls in [false, true] {
        let own = with_secret(1, tls);
        let me0 = me_with(0, 2, own.clone());
        let door = me0.listen_at("127.0.0.1:0").unwrap();
        let place = door.local_addr().unwrap().to_string();
        thread::scope(|s| {
            let first = s.spawn(|| me0.gather(&door).unwrap());
            let no = |terms: Terms| me_with(1, 2, terms).join(&place, "auto").unwrap_err().to_string();
            let e = no(with_secret(2, tls));
            let begins =
                format!("rank 0: no answer at {place}: it closed the connection where it should prove");
            assert!(e.starts_with(&begins) && e.contains("PUSHGATE_SECRET"), "{e}");
            let e = no(with_secret(1, !tls));
            assert!(e.contains("for TLS") && e.contains("set tls (PUSHGATE_TLS) alike"), "{e}");
            let e = no(Terms { tls, ..terms() });
            assert!(e.contains("this end has none: set one secret on all hosts"), "{e}");
            let (streams, _) = me_with(1, 2, own).join(&place, "auto").unwrap();
            let (others, _) = first.join().unwrap();
            let ends = [streams[0].as_ref().unwrap(), others[1].as_ref().unwrap()];
            assert_eq!(ends.map(Stream::is_encrypted), [tls; 2]);
        });
    }
}

#[test]
fn without_a_secret_ranks_listen_at_the_loopback_device_alone() {
    let e = me(0, 2).listen_at("0.0.0.0:0").unwrap_err().to_string();
    assert!(
        e.starts_with(
            "invalid rendezvous `0.0.0.0:0`: expected an address of the loopback device, or a secret"
        ),
        "{e}"
    );
    assert!(e.contains("set secret-file or PUSHGATE_SECRET to one secret on all hosts"), "{e}");
    me_with(0, 2, with_secret(1, false)).listen_at("0.0.0.0:0").unwrap();
}

#[test]
fn p7_a_rank_that_waits_in_vain_names_the_last_one_that_did_not_know_the_secret() {
    let limit = patience(Duration::from_secs(1));
    let own = with_secret(1, false);
    let me0 = Me::new("red", 0, 2, limit, None, own).unwrap();
    let door = me0.listen_at("127.0.0.1:0").unwrap();
    let place = door.local_addr().unwrap().to_string();
    let other = thread::spawn(move || me_with(1, 2, with_secret(2, false)).join(&place, "auto").unwrap_err());
    let e = me0.gather(&door).unwrap_err().to_string();
    assert!(e.starts_with("waiting for rank 1 (the last that was refused, 127.0.0.1:"), "{e}");
    assert!(e.contains("it does not know the secret"), "{e}");
    other.join().unwrap();
}

/// Makes rank 0's mesh of `size`, and the sockets of ranks 1, 2, ... by hand.
fn by_hand(size: u32) -> (Mesh, Receiver<u32>, Vec<Stream>) {
    let (place, first) = rank0("127.0.0.1:0", size);
    let others: Vec<_> = (1..size).map(|r| greets(&place, &sealed(&hello(r, size)))).collect();
    let (mesh, lost) = mesh(0, first.join().unwrap().unwrap());
    for other in &others {
        assert!(matches!(hear(other), Answer::Table { .. }));
    }
    (mesh, lost, others)
}

#[test]
fn p7_p8_a_frame_that_is_wrong_loses_its_rank() {
    let mut long = (MAX_BYTES as u32 + 1).to_le_bytes().to_vec();
    long.extend([0; 4]);
    // Too long; with descriptors; without a label; empty; an END that is cut off.
    for bytes in [
        &long[..],
        &[255; 8],
        &[4, 0, 0, 0, 1, 0, 0, 0],
        &[3, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3],
        &[0; 8],
        &[8, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 4, 0, 0, 0],
    ] {
        let (mesh, lost, mut others) = by_hand(3);
        // A peer that stops in the middle of a frame does not keep the others from being heard.
        put(&others[0], &[9, 0, 0, 0, 0, 0, 0, 0, 5]);
        put(&others[1], bytes);
        assert_eq!(lost.recv_timeout(hang()), Ok(2));
        assert!(matches!(mesh.recv(1, 5), Err(Error::PeerLost { rank: 2 })));
        assert_eq!(mesh.lost(), Some(2));
        // A frame that was cut off is not taken for a whole one.
        others.remove(0);
        assert_eq!(lost.recv_timeout(hang()), Ok(1));
    }
}

#[test]
fn p7_a_rank_that_dies_is_lost_and_one_that_leaves_is_not() {
    let (place, first) = rank0("127.0.0.1:0", 3);
    let (second, third) = (join(&place, 1, 3), join(&place, 2, 3));
    let all: Vec<_> = [first, second]
        .into_iter()
        .zip(0..)
        .map(|(t, rank)| mesh(rank, t.join().unwrap().unwrap()))
        .collect();
    // As if the process died: its sockets close, and it sends no farewell and no report.
    drop(third.join().unwrap().unwrap());
    for (mesh, lost) in &all {
        assert_eq!(lost.recv_timeout(hang()), Ok(2));
        assert!(matches!(mesh.recv(2, 5), Err(Error::PeerLost { rank: 2 })));
    }

    let mut all = ranks("127.0.0.1:0", 2);
    let ((one, lost), (other, _)) = (all.remove(0), all.remove(0));
    // Still unread at the other end when this rank leaves.
    one.send(1, 5, &[1; 1 << 20], &[]).unwrap();
    other.send(0, 6, b"last words", &[]).unwrap();
    drop(other);
    assert_eq!(one.recv(1, 6).unwrap().0, b"last words");
    assert!(matches!(one.recv(1, 6), Err(Error::PeerLost { rank: 1 })), "it will not say more");
    assert!(lost.recv_timeout(LATER).is_err());
    assert_eq!(one.lost(), None);
}

#[test]
fn a_farewell_counts_though_a_reset_follows() {
    let (mesh, lost, mut others) = by_hand(2);
    put(&others[0], &[4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    set_socket_linger(&others[0], Some(Duration::ZERO)).unwrap();
    others.clear();
    assert!(lost.recv_timeout(LATER).is_err());
    assert!(matches!(mesh.recv(1, 5), Err(Error::PeerLost { rank: 1 })));
    assert_eq!(mesh.lost(), None);
}

#[test]
fn descriptors_stay_on_their_host() {
    let all = ranks("127.0.0.1:0", 2);
    let stdin = std::io::stdin();
    let e = all[0].0.send(1, 5, b"x", &[std::os::fd::AsFd::as_fd(&stdin)]).unwrap_err().to_string();
    assert_eq!(e, "rank 1: descriptors can't cross hosts: qp=local needs ranks of one host, use qp=verbs");
    all[0].0.send(1, 5, b"y", &[]).unwrap();
    assert_eq!(all[1].0.recv(0, 5).unwrap().0, b"y");
}

#[test]
fn p7_ranks_that_never_come_or_answer_end_the_set_up_at_the_timeout() {
    // Within the limit two clients say who they are.
    let limit = patience(Duration::from_secs(2));
    let short = |rank, size| Me::new("red", rank, size, limit, None, terms()).unwrap();
    let door = me(0, 3).listen_at("127.0.0.1:0").unwrap();
    let place = door.local_addr().unwrap().to_string();
    let wrong = sealed(&hello(1, 5));
    thread::scope(|s| {
        let first = s.spawn(|| short(0, 3).gather(&door).unwrap_err().to_string());
        refused(&place, &wrong, &["size is 5"]);
        let waits = greets(&place, &sealed(&hello(1, 3)));
        let Answer::Refused(why) = hear(&waits) else { panic!("taken in") };
        assert!(why.starts_with("rank 2 did not come within"), "{why}");
        let e = first.join().unwrap();
        assert!(e.starts_with("waiting for rank 2 (the last that was refused"), "{e}");
        assert!(e.contains("size is 5") && e.contains(&format!("timed out after {limit:?}")), "{e}");
    });
    // First a rank 0 that listens and never answers; then one that does not listen.
    let e = short(1, 2).join(&place, "auto").unwrap_err().to_string();
    assert!(e.starts_with(&format!("waiting for an answer of rank 0 at {place} timed out")), "{e}");
    drop(door);
    let e = short(1, 2).join(&place, "auto").unwrap_err().to_string();
    assert!(e.starts_with(&format!("connecting to rank 0 at {place} ({place}: Connection refused")), "{e}");
}

#[test]
fn addresses_of_other_hosts_are_refused_by_name() {
    // 192.0.2.0/24 is reserved for documentation: no host has such an address.
    let e = me(0, 2).listen_at("192.0.2.1:7000").unwrap_err().to_string();
    assert!(
        e.starts_with("invalid rendezvous `192.0.2.1:7000`: expected an address and port of the host"),
        "{e}"
    );
    let (place, _first) = rank0("127.0.0.1:0", 2);
    let e = me(1, 2).join(&place, "192.0.2.1").unwrap_err().to_string();
    assert!(e.starts_with("invalid host `192.0.2.1`: expected auto or an IP address of this host"), "{e}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let e = me(0, 2).listen_at(&taken.local_addr().unwrap().to_string()).unwrap_err().to_string();
    assert!(e.contains("another program or job has that port"), "{e}");
    let long = "x".repeat(MAX_JOB + 1);
    assert!(
        Me::new(&long, 0, 2, hang(), None, terms())
            .err()
            .unwrap()
            .to_string()
            .starts_with("invalid job `xxx")
    );
    me(1, 2).join(&place, "127.0.0.1").unwrap();
}

#[test]
fn something_else_at_the_rendezvous_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap().to_string();
    for (says, expected) in
        [(&b"SSH-2.0-OpenSSH\r\n"[..], "does not speak pushgate's protocol"), (b"", "closed the connection")]
    {
        let error = join(&place, 1, 2);
        let (mut s, _) = listener.accept().unwrap();
        // An unread greeting would turn the close into a reset.
        s.read_exact(&mut [0; HELLO]).unwrap();
        s.write_all(says).unwrap();
        // The other side may have closed the connection by then.
        let _ = s.shutdown(Shutdown::Write);
        let e = error.join().unwrap().unwrap_err().to_string();
        assert!(e.starts_with(&format!("rank 0: no answer at {place}: ")) && e.contains(expected), "{e}");
    }
}

// ------------------------------------------------------------ ranks that meet again

/// Ranks that replace a connection that breaks, with what each needs for that.
fn joined(size: u32, recover: Duration) -> Vec<Joined> {
    joined_with(size, recover, &terms())
}

fn joined_with(size: u32, recover: Duration, terms: &Terms) -> Vec<Joined> {
    joined_at("127.0.0.1:0", size, recover, terms)
}

fn joined_at(at: &str, size: u32, recover: Duration, terms: &Terms) -> Vec<Joined> {
    let me = |rank| Me::new("red", rank, size, hang(), Some(recover), terms.clone()).unwrap();
    let (own, door) = (me(0), me(0).listen_at(at).unwrap());
    let place = door.local_addr().unwrap().to_string();
    let first = thread::spawn(move || own.gather(&door).unwrap());
    let others: Vec<_> = (1..size)
        .map(|rank| {
            let (me, place) = (me(rank), place.clone());
            thread::spawn(move || me.join(&place, "auto").unwrap())
        })
        .collect();
    [first].into_iter().chain(others).map(|t| t.join().unwrap()).collect()
}

#[test]
fn p6_frames_come_once_and_in_order_though_connections_break_again_and_again() {
    [terms(), with_secret(1, true)].iter().for_each(frames_come_once_and_in_order);
}

fn frames_come_once_and_in_order(terms: &Terms) {
    const FRAMES: u32 = 600;
    let all = joined_with(3, hang(), terms);
    let all: Vec<_> = all.into_iter().zip(0..).map(|(joined, rank)| mesh(rank, joined)).collect();
    // Of very different lengths, some longer than a socket's buffers.
    let body = |n: u32| {
        let length = (n.wrapping_mul(2654435761) >> 8) as usize % 9000;
        vec![n as u8; if n % 500 == 499 { 500 * length } else { length }]
    };
    thread::scope(|s| {
        let mut threads = Vec::new();
        for (mesh, _) in &all {
            for peer in (0..3).filter(|peer| *peer != mesh.rank) {
                threads.push(s.spawn(move || {
                    (0..FRAMES).for_each(|n| mesh.send(peer, 9, &body(n), &[]).unwrap());
                }));
                threads.push(s.spawn(move || {
                    for n in 0..FRAMES {
                        assert!(mesh.recv(peer, 9).unwrap().0 == body(n), "frame {n} of rank {peer}");
                    }
                }));
            }
        }
        let mut breaks = 0u32;
        while !threads.iter().all(|t| t.is_finished()) {
            let (rank, other) = [(0, 1), (1, 0), (2, 1), (0, 2), (1, 2), (2, 0)][breaks as usize % 6];
            all[rank].0.cut(other).unwrap();
            all[other as usize].0.hold(rank as u32, Duration::from_millis(2));
            breaks += 1;
            thread::sleep(Duration::from_millis(3));
        }
        assert!(breaks > 3, "the frames came before a connection broke");
    });
    assert!(all.iter().all(|(mesh, lost)| lost.try_recv().is_err() && mesh.lost().is_none()));
}

/// Runs `ip` in the calling thread's network.
fn ip(words: &str) -> bool {
    let ip = Command::new("ip").args(words.split(' ')).status();
    ip.is_ok_and(|status| status.success())
}

/// Sets the loopback device of the calling thread's network up or down.
fn loopback(state: &str) -> bool {
    ip(&format!("link set lo {state}"))
}

/// Gives the calling thread a network of its own, and those threads that it starts from now on. False if that is not allowed
/// here.
fn own_network() -> bool {
    // SAFETY: only the network of this thread changes, and that of threads which this thread starts later.
    let own = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) };
    own.is_ok() && loopback("up")
}

/// The address is of a network of this test's own.
#[test]
fn at_an_address_that_other_hosts_reach_ranks_meet_with_a_secret_and_say_nothing_without() {
    thread::spawn(|| {
        // As other hosts would reach it, if there were any.
        if !own_network() || !ip("address add 10.99.0.1/24 dev lo") {
            return pushgate_tests::skip(
                "an address that other hosts reach: no network namespace of the test's own, or no `ip`",
            );
        }
        let e = me(0, 2).listen_at("10.99.0.1:7000").unwrap_err().to_string();
        assert!(
            e.starts_with("invalid rendezvous `10.99.0.1:7000`: expected an address of the loopback"),
            "{e}"
        );
        let stranger = TcpListener::bind("10.99.0.1:7000").unwrap();
        let e = me(1, 2).join("10.99.0.1:7000", "auto").unwrap_err().to_string();
        assert!(
            e.starts_with("invalid rendezvous `10.99.0.1:7000`: expected an address of the loopback"),
            "{e}"
        );
        assert!(e.contains("set secret-file or PUSHGATE_SECRET to one secret on all hosts"), "{e}");
        stranger.set_nonblocking(true).unwrap();
        assert!(stranger.accept().is_err(), "it must not prove a secret that everybody knows");
        let (place, _first) = rank0("127.0.0.1:0", 2);
        let e = me(1, 2).join(&place, "10.99.0.1").unwrap_err().to_string();
        assert!(e.starts_with("invalid host `10.99.0.1`: expected an address of the loopback device"), "{e}");
        let all = joined_at("10.99.0.1:0", 2, hang(), &with_secret(1, true)).into_iter().zip(0..);
        let all: Vec<_> = all.map(|(joined, rank)| mesh(rank, joined)).collect();
        all[0].0.send(1, 9, b"to 1", &[]).unwrap();
        assert_eq!(all[1].0.recv(0, 9).unwrap().0, b"to 1");
    })
    .join()
    .unwrap();
}

/// The network is of this test's own: nothing else uses its loopback device.
#[test]
fn p6_frames_come_though_the_path_was_dead_for_longer_than_a_connection_lives() {
    thread::spawn(|| {
        if !own_network() {
            return pushgate_tests::skip(
                "a path that is dead: no network namespace of the test's own, or no `ip`",
            );
        }
        let all = joined(2, hang()).into_iter().zip(0..);
        let all: Vec<_> = all.map(|(joined, rank)| mesh(rank, joined)).collect();
        let (a, b) = (&all[0].0, &all[1].0);
        a.send(1, 9, b"before", &[]).unwrap();
        assert_eq!(b.recv(0, 9).unwrap().0, b"before");
        assert!(loopback("down"));
        a.send(1, 9, b"to 1", &[]).unwrap();
        b.send(0, 9, b"to 0", &[]).unwrap();
        wait_until("connections that broke", || {
            all.iter().zip([1, 0]).all(|((mesh, _), peer)| !mesh.shared.peer(peer).out().has_left())
        });
        assert!(loopback("up"));
        assert_eq!(b.recv(0, 9).unwrap().0, b"to 1");
        assert_eq!(a.recv(1, 9).unwrap().0, b"to 0");
        assert!(all.iter().all(|(mesh, lost)| lost.try_recv().is_err() && mesh.lost().is_none()));
    })
    .join()
    .unwrap();
}

#[test]
fn p7_a_rank_whose_process_has_ended_is_lost_at_once_though_connections_are_replaced() {
    for dead in [0, 2] {
        // A rank that is waited for would be waited for during this.
        let mut all = joined(3, hang() * 10);
        // As if the process died: its sockets close.
        drop(all.remove(dead));
        let ranks = (0..3).filter(|rank| *rank != dead as u32);
        let all: Vec<_> = all.into_iter().zip(ranks).map(|(joined, rank)| mesh(rank, joined)).collect();
        for (_, lost) in &all {
            assert_eq!(lost.recv_timeout(hang()), Ok(dead as u32));
        }
    }
}

#[test]
fn p7_a_connection_that_no_other_one_replaces_loses_its_rank_after_recover() {
    let mut all = joined(2, Duration::from_millis(500));
    // This rank goes on listening, and answers nobody.
    let (streams, _again) = all.pop().unwrap();
    let (mesh, lost) = mesh(0, all.pop().unwrap());
    mesh.send(1, 5, b"to nobody", &[]).unwrap();
    drop(streams);
    assert_eq!(lost.recv_timeout(hang()), Ok(1));
    assert!(matches!(mesh.send(1, 5, b"x", &[]), Err(Error::PeerLost { rank: 1 })));
}

#[test]
fn p8_ranks_that_dial_again_know_the_token_and_say_what_can_be() {
    let mut all = joined(2, hang());
    let (_streams, again) = all.pop().unwrap();
    let again = again.unwrap();
    let (mesh, lost) = mesh(0, all.pop().unwrap());
    let (at, token) = (again.party().places[0].first().to_string(), Some(again.party().token.clone()));
    let dials = |change: fn(&mut Hello)| {
        let mut h = Hello { token: token.clone(), again: Some(0), listens: None, ..hello(1, 2) };
        change(&mut h);
        sealed(&h)
    };
    refused(&at, &dials(|h| h.token = None), &["token is not that of this job"]);
    refused(&at, &dials(|h| h.token = Some("0".repeat(32))), &["token is not that of this job"]);
    refused(&at, &dials(|h| h.job = "blue".into()), &["job is blue, expected red"]);
    refused(&at, &dials(|h| h.rank = 2), &["rank is 2, expected another rank of 2"]);
    refused(&at, &dials(|h| h.rank = 0), &["rank is 0, expected another rank of 2"]);
    refused(&at, &dials(|h| h.to = 1), &["rank is 1"]);
    refused(&at, &dials(|h| h.again = None), &["all ranks of this job are there already"]);
    // Slow ones, and ones that are no rank, hold up nobody.
    let _slow: Vec<_> = [&b"PUSH"[..], b"GET / HTTP/1.1\r\n\r\n"].map(|bytes| raw(&at, bytes)).into();
    let taken = greets(&at, &dials(|_| {}));
    assert!(matches!(hear(&taken), redial::Answer::Again { received: 0 }));
    assert!(lost.try_recv().is_err());
    mesh.send(1, 5, b"x", &[]).unwrap();
    // More than was sent.
    let taken = greets(&at, &dials(|h| h.again = Some(2)));
    assert!(matches!(hear(&taken), redial::Answer::Again { received: 0 }));
    assert_eq!(lost.recv_timeout(hang()), Ok(1));
    refused(&at, &dials(|_| {}), &["counts it as lost"]);
}

/// Has calls of this thread end at their first question.
fn interrupted<T>(call: impl FnOnce() -> Result<T>) -> Option<Error> {
    crate::interrupt_by(Some(std::rc::Rc::new(|| true)));
    let end = call().err();
    crate::interrupt_by(None);
    end
}

#[test]
fn a_dial_of_an_address_that_does_not_answer_is_interrupted_before_its_attempt_is_over() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let at = listener.local_addr().unwrap();
    // The queue of connections is full, and the kernel answers no more.
    let mut queued = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&at, Duration::from_millis(100)) {
        queued.push(stream);
        assert!(queued.len() < 100, "the queue has no end");
    }
    let begin = Instant::now();
    let end = interrupted(|| me(1, 2).dial(0, &at.to_string()));
    assert!(matches!(end, Some(Error::Interrupted)), "{end:?}");
    assert!(begin.elapsed() < ATTEMPT, "it took the whole attempt, {:?}", begin.elapsed());
}

#[test]
fn a_rank_whose_greeting_gets_no_answer_is_interrupted() {
    // Connections wait in its queue.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let end = interrupted(|| me(1, 2).join(&at, "auto"));
    assert!(matches!(end, Some(Error::Interrupted)), "{end:?}");
}
