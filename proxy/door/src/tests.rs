//! Tests of the door: two handshakes in memory, and sockets of the loopback device.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use pushgate_tests::fuzz::Random;
use pushgate_tests::fuzz::{depth, fuzz, kind};
use pushgate_tests::{hang, patience, wait_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::redial::envelope::wait;

const OTHER: Purpose = Purpose::new("other");
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn terms(tls: bool) -> Terms {
    Terms { secret: Secret::new(&[7; 32]).unwrap(), purpose: Purpose::MESH, tls }
}

fn with_secret(terms: &Terms, secret: Secret) -> Terms {
    Terms { secret, ..terms.clone() }
}

// ---------------------------------------------------------------- handshakes in memory

/// Lets a dialer and a listener talk until neither has more to say, and says why each refused the other. `bindings`: what each knows of
/// the encryption.
fn talk(ends: &mut [Handshake; 2], bindings: [[u8; 32]; 2]) -> [Option<Refused>; 2] {
    let mut refused = [None, None];
    loop {
        let said = ends.each_mut().map(Handshake::output);
        let encrypts = ends.iter().all(Handshake::awaits_tls);
        if said.iter().all(Vec::is_empty) && !encrypts {
            return refused;
        }
        for (from, to) in [(0, 1), (1, 0)] {
            let bytes = &said[from][..said[from].len().min(ends[to].wants())];
            if let Err(why) = ends[to].take(bytes) {
                refused[to] = Some(why);
            }
        }
        if ends.iter().all(Handshake::awaits_tls) {
            ends.iter_mut().zip(bindings).for_each(|(end, binding)| end.encrypted(binding));
        }
    }
}

fn ends(dialer: &Terms, listener: &Terms) -> [Handshake; 2] {
    [Handshake::new(dialer, true).unwrap(), Handshake::new(listener, false).unwrap()]
}

fn outcome(dialer: &Terms, listener: &Terms) -> [Option<Refused>; 2] {
    let mut ends = ends(dialer, listener);
    let refused = talk(&mut ends, [[3; 32]; 2]);
    assert_eq!(ends.each_ref().map(Handshake::is_proved), [refused == [None, None]; 2]);
    refused
}

#[test]
fn ends_that_agree_prove_the_secret_and_others_say_what_differs() {
    for tls in [false, true] {
        let good = terms(tls);
        assert_eq!(outcome(&good, &good), [None, None]);
        let public = with_secret(&good, Secret::public());
        assert_eq!(outcome(&public, &public), [None, None]);
        // A wrong secret is not told: the dialer sees the connection end.
        let wrong = with_secret(&good, Secret::new(&[8; 32]).unwrap());
        assert_eq!(outcome(&good, &wrong), [None, Some(Refused::Proof)]);
        let differ = |here| Some(Refused::Secret { here });
        assert_eq!(outcome(&good, &public), [differ(true), differ(false)]);
        assert_eq!(outcome(&public, &good), [differ(false), differ(true)]);
        let other = Terms { purpose: OTHER, ..good.clone() };
        let differ = |ours, theirs| Some(Refused::Purpose { ours, theirs });
        let refused = outcome(&good, &other);
        assert_eq!(refused, [differ(Purpose::MESH, OTHER), differ(OTHER, Purpose::MESH)]);
        let text = refused[0].as_ref().unwrap().to_string();
        assert!(text.starts_with("it is for other, expected mesh"), "{text}");
        let differ = |here| Some(Refused::Tls { here });
        assert_eq!(outcome(&good, &terms(!tls)), [differ(tls), differ(!tls)]);
    }
}

#[test]
fn p8_one_who_encrypts_with_each_end_apart_is_found_out() {
    let mut ends = ends(&terms(true), &terms(true));
    let refused = talk(&mut ends, [[1; 32], [2; 32]]);
    assert_eq!(refused, [None, Some(Refused::Proof)]);
    assert!(!ends.iter().any(Handshake::is_proved));
}

#[test]
fn p8_what_another_connection_said_proves_nothing_when_it_is_repeated() {
    for tls in [false, true] {
        let mut said = ends(&terms(tls), &terms(tls));
        let mut recorded = Vec::new();
        // The dialer's part, as one who listens in has it.
        let hello = said[0].output();
        said[1].take(&hello).unwrap();
        recorded.extend(hello);
        let answer = said[1].output();
        said[0].take(&answer).unwrap();
        recorded.extend(said[0].output());
        let mut other = Handshake::new(&terms(tls), false).unwrap();
        other.take(&recorded[..HELLO]).unwrap();
        assert_eq!(other.take(&recorded[HELLO..]), Err(Refused::Proof));
        assert_eq!(other.output().len(), HELLO, "it says hello and nothing more");
    }
}

#[test]
fn p8_an_end_whose_own_bytes_come_back_refuses_them() {
    let mut dialer = Handshake::new(&terms(false), true).unwrap();
    let hello = dialer.output();
    assert_eq!(dialer.take(&hello), Err(Refused::Reflected));
    // The listener's nonce is its own, but the proof that comes back is the dialer's.
    let mut both = ends(&terms(false), &terms(false));
    let hello = both[0].output();
    both[1].take(&hello).unwrap();
    let answer = both[1].output();
    both[0].take(&answer).unwrap();
    let proof = both[0].output();
    assert_eq!(both[0].take(&proof), Err(Refused::Proof));
}

#[test]
fn releases_without_a_proof_are_told_the_version_by_a_header_that_they_read() {
    // As they greet: the header of 16 bytes, and JSON.
    let old = crate::redial::envelope::envelope(4, &"hello");
    let mut listener = Handshake::new(&terms(false), false).unwrap();
    let wants = listener.wants().min(old.len());
    assert_eq!(listener.take(&old[..wants]), Err(Refused::Version(4)));
    let said = listener.output();
    assert_eq!((&said[..8], said.len()), (&b"PUSHGATE"[..], HELLO));
    assert_eq!(said[8..16], [5, 0, 0, 0, HELLO as u8 - 16, 0, 0, 0]);
}

/// Changes what goes over the wire in one way. `earlier`: what another connection said in this direction.
fn change(random: &mut Random, bytes: &mut Vec<u8>, earlier: &[u8], back: &[u8]) {
    match random.below(7) {
        0 if !bytes.is_empty() => {
            let at = random.below(bytes.len());
            bytes[at] ^= 1 << random.below(8);
        }
        1 => bytes.truncate(random.below(bytes.len() + 1)),
        2 => {
            let at = random.below(bytes.len() + 1);
            let more: Vec<u8> = (0..random.below(100)).map(|_| random.next_u64() as u8).collect();
            bytes.splice(at..at, more);
        }
        3 => bytes.fill(random.next_u64() as u8),
        4 => *bytes = earlier.to_vec(),
        5 => *bytes = back.to_vec(),
        _ => {
            let at = random.below(bytes.len() + 1);
            bytes.rotate_left(at);
        }
    }
}

#[test]
fn p8_no_changed_handshake_of_a_hundred_thousand_is_taken() {
    let mut random = Random(20);
    let mut earlier: [Vec<u8>; 2] = Default::default();
    let (mut proved, mut refused) = (0, 0);
    for run in 0..100_000 {
        let terms = terms(run % 2 == 1);
        let mut ends = ends(&terms, &terms);
        // What each end has said, and what the other one has read.
        let (mut said, mut read) = ([vec![], vec![]], [vec![], vec![]]);
        // One in eight connections is left alone.
        let victim = (!random.next_u64().is_multiple_of(8)).then(|| random.below(4));
        for round in 0..8 {
            let mut wire = ends.each_mut().map(Handshake::output);
            assert!(wire.iter().all(|bytes| bytes.len() <= HELLO + PROOF));
            for (said, wire) in said.iter_mut().zip(&wire) {
                said.extend_from_slice(wire);
            }
            if let Some(victim) = victim.filter(|victim| round == victim / 2) {
                let from = victim % 2;
                let back = wire[1 - from].clone();
                change(&mut random, &mut wire[from], &earlier[from], &back);
            }
            for (from, to) in [(0, 1), (1, 0)] {
                // In pieces, as a socket gives them.
                let mut rest = &wire[from][..];
                while !rest.is_empty() && ends[to].wants() > 0 {
                    let piece = rest.len().min(ends[to].wants()).min(1 + random.below(HELLO));
                    read[to].extend_from_slice(&rest[..piece]);
                    if ends[to].take(&rest[..piece]).is_err() {
                        refused += 1;
                        assert_eq!(ends[to].wants(), 0);
                        assert!(ends[to].take(&[]).is_err());
                    }
                    rest = &rest[piece..];
                }
            }
            if ends.iter().all(Handshake::awaits_tls) {
                ends.iter_mut().for_each(|end| end.encrypted([9; 32]));
            }
        }
        for (end, other) in [(0, 1), (1, 0)] {
            if ends[end].is_proved() {
                proved += 1;
                assert!(said[other].starts_with(&read[end]), "run {run}: end {end} took changed bytes");
                assert_eq!(read[end].len(), HELLO + PROOF * if terms.tls && end == 1 { 2 } else { 1 });
            }
        }
        if victim.is_none() {
            assert!(ends.iter().all(Handshake::is_proved), "run {run}");
            earlier = said;
        }
    }
    assert!(proved > 20_000 && refused > 20_000, "{proved} proved, {refused} refused");
}

// ---------------------------------------------------------------- sockets

fn door(terms: Terms) -> Door {
    Door::listen(HERE, 0..=0, terms, Limits::default()).unwrap()
}

fn at(door: &Door) -> SocketAddr {
    door.local_addr().unwrap()
}

fn soon() -> Instant {
    Instant::now() + hang()
}

fn arrives(door: &Door) -> Arrival {
    door.wait(Some(soon()), None).unwrap().expect("one that knows the secret")
}

/// Dials on another thread, while the door works on this one.
fn meet(door: &Door, terms: &Terms, greeting: &[u8]) -> (Stream, Arrival) {
    let at = at(door);
    thread::scope(|s| {
        let dials = s.spawn(move || dial(at, terms, greeting, soon()).unwrap());
        let arrival = arrives(door);
        (dials.join().unwrap(), arrival)
    })
}

/// What a dialer is told, while the door works on this thread.
fn turned_away(door: &Door, terms: &Terms) -> Refused {
    let at = at(door);
    thread::scope(|s| {
        let dials = s.spawn(move || dial(at, terms, b"let me in", soon()).unwrap_err());
        wait_until("the dialer's end", || {
            assert!(door.next().is_none(), "it came through");
            dials.is_finished()
        });
        match dials.join().unwrap() {
            DoorError::Refused(why) => why,
            e => panic!("{e}"),
        }
    })
}

fn count(door: &Door, why: &Refused) -> u64 {
    while door.next().is_some() {}
    door.counts().read().of(why)
}

fn send_all(stream: &Stream, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match stream.send(&[IoSlice::new(&bytes[..bytes.len() / 2]), IoSlice::new(&bytes[bytes.len() / 2..])])
        {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                assert!(wait(&mut [PollFd::new(stream, PollFlags::OUT)], soon()));
            }
            Err(e) => panic!("{e}"),
        }
    }
    while !stream.flush().unwrap() {
        assert!(wait(&mut [PollFd::new(stream, PollFlags::OUT)], soon()));
    }
}

fn recv_all(stream: &Stream, length: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < length {
        let (mut a, mut b) = ([0; 1000], [0; 10_000]);
        match stream.recv(&mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)]) {
            Ok(0) => panic!("the end after {} bytes", all.len()),
            Ok(n) => {
                all.extend_from_slice(&a[..n.min(a.len())]);
                all.extend_from_slice(&b[..n.saturating_sub(a.len())]);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                assert!(!stream.has_bytes());
                assert!(wait(&mut [PollFd::new(stream, PollFlags::IN)], soon()));
            }
            Err(e) => panic!("{e}"),
        }
    }
    all
}

#[test]
fn bytes_go_both_ways_once_both_ends_have_proved_the_secret() {
    for tls in [false, true] {
        let door = door(terms(tls));
        let (ours, arrival) = meet(&door, &terms(tls), b"hello");
        let theirs = arrival.stream;
        assert_eq!((&arrival.greeting[..], arrival.from), (&b"hello"[..], ours.local_addr().unwrap()));
        assert_eq!([&ours, &theirs].map(Stream::is_encrypted), [tls; 2]);
        // More than the buffers of both sockets hold.
        let payload: Vec<u8> = (0..8 << 20).map(|i: u32| (i.wrapping_mul(2654435761) >> 24) as u8).collect();
        thread::scope(|s| {
            for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
                s.spawn(|| send_all(from, &payload));
                s.spawn(|| assert!(recv_all(to, payload.len()) == payload));
            }
        });
        send_all(&ours, b"last words");
        ours.close();
        assert_eq!(recv_all(&theirs, 10), b"last words");
        assert!(wait(&mut [PollFd::new(&theirs, PollFlags::IN)], soon()));
        assert_eq!(theirs.recv(&mut [IoSliceMut::new(&mut [0; 9])]).unwrap(), 0);
        assert_eq!(door.counts().read(), Counted { accepted: 1, refused: vec![] });
    }
}

#[test]
fn p8_dialers_on_other_terms_are_refused_with_a_sentence_and_counted() {
    for tls in [false, true] {
        let good = terms(tls);
        let door = door(good.clone());
        let wrong = with_secret(&good, Secret::new(&[8; 32]).unwrap());
        assert_eq!(turned_away(&door, &wrong), Refused::TurnedAway);
        assert_eq!(turned_away(&door, &terms(!tls)), Refused::Tls { here: !tls });
        let public = with_secret(&good, Secret::public());
        assert_eq!(turned_away(&door, &public), Refused::Secret { here: false });
        let other = Terms { purpose: OTHER, ..good.clone() };
        let differs = Refused::Purpose { ours: OTHER, theirs: Purpose::MESH };
        assert_eq!(turned_away(&door, &other), differs);
        let counted = door.counts().read();
        let expected = [Refused::Proof, Refused::Tls { here: tls }, Refused::Secret { here: true }, differs];
        assert_eq!(expected.map(|why| counted.of(&why)), [1; 4], "{counted:?}");
        assert_eq!(counted.accepted, 0);
        meet(&door, &good, b"");
    }
}

/// What a raw dialer of these terms sends, until its proof, and the socket.
fn said(door: &Door, terms: &Terms) -> (Vec<u8>, TcpStream) {
    let mut socket = TcpStream::connect(at(door)).unwrap();
    let mut handshake = Handshake::new(terms, true).unwrap();
    let hello = handshake.output();
    socket.write_all(&hello).unwrap();
    wait_until("the hello to arrive", || {
        assert!(door.next().is_none());
        socket.set_nonblocking(true).unwrap();
        let there = socket.peek(&mut [0; HELLO]).is_ok_and(|n| n == HELLO);
        socket.set_nonblocking(false).unwrap();
        there
    });
    let mut answer = [0; HELLO];
    socket.read_exact(&mut answer).unwrap();
    handshake.take(&answer).unwrap();
    ([hello, handshake.output()].concat(), socket)
}

#[test]
fn p8_garbage_replayed_and_truncated_handshakes_and_long_greetings_are_refused_and_counted() {
    let door = door(terms(false));
    // Garbage is answered by nothing.
    let mut socket = TcpStream::connect(at(&door)).unwrap();
    socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    wait_until("garbage to be refused", || count(&door, &Refused::Foreign) == 1);
    assert_eq!(socket.read(&mut [0; 9]).unwrap_or(0), 0);
    // A recorded handshake, whole.
    let (recorded, mut socket) = said(&door, &terms(false));
    socket.write_all(&recorded[HELLO..]).unwrap();
    let greeting = (Limits::default().greeting as u32 + 1).to_le_bytes();
    socket.write_all(&greeting).unwrap();
    let long = Refused::Greeting { bytes: 1025, most: 1024 };
    wait_until("a long greeting to be refused", || count(&door, &long) == 1);
    let mut socket = TcpStream::connect(at(&door)).unwrap();
    socket.write_all(&recorded).unwrap();
    wait_until("a replayed handshake to be refused", || count(&door, &Refused::Proof) == 1);
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), HELLO, "it hears hello and nothing more");
    // Truncated after each byte.
    for length in 0..recorded.len() {
        let mut socket = TcpStream::connect(at(&door)).unwrap();
        socket.write_all(&recorded[..length]).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        wait_until("a truncated handshake", || count(&door, &Refused::Closed) == length as u64 + 1);
    }
    assert_eq!((door.counts().read().accepted, door.on_their_way()), (0, 0));
    meet(&door, &terms(false), b"after all of them");
}

#[test]
fn p7_p8_more_strangers_than_places_keep_no_peer_out() {
    for tls in [false, true] {
        let limits = Limits { places: 8, ..Limits::default() };
        let door = Door::listen(HERE, 0..=0, terms(tls), limits).unwrap();
        let hello = Handshake::new(&terms(tls), true).unwrap().output();
        // They say a part of a handshake, and stay.
        let strangers: Vec<_> = (0..40)
            .map(|n: usize| {
                let mut socket = TcpStream::connect(at(&door)).unwrap();
                socket.write_all(&hello[..n.min(HELLO)]).unwrap();
                assert!(door.next().is_none() && door.on_their_way() <= limits.places);
                socket
            })
            .collect();
        let (_stream, arrival) = meet(&door, &terms(tls), b"a peer");
        assert_eq!(arrival.greeting, b"a peer");
        wait_until("the strangers to arrive", || count(&door, &Refused::Crowded) >= 32);
        assert!(door.on_their_way() <= limits.places);
        drop(strangers);
        wait_until("the strangers to go", || door.next().is_none() && door.on_their_way() == 0);
    }
}

/// Connects from an address of the loopback device, and does not wait for it.
fn connect_from(from: Ipv4Addr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    // Its port is free again as soon as it is closed.
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    rustix::net::bind(&socket, &SocketAddr::from((from, 0)))?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket.into()),
        Err(e) => Err(e.into()),
    }
}

/// Dials from this address, and takes in what the door says when `late` has returned. `greets` counts those that have not sent
/// their hello.
fn dial_from_afar(
    from: Ipv4Addr,
    to: SocketAddr,
    terms: &Terms,
    greets: &AtomicUsize,
    late: impl Fn(),
) -> Result<Stream, DoorError> {
    greets.fetch_add(1, Ordering::Relaxed);
    let socket = connect_from(from, to).unwrap();
    assert!(wait(&mut [PollFd::new(&socket, PollFlags::OUT)], soon()));
    let mut dialer = Dialer::new(socket, terms, b"from afar")?;
    let greeted = dialer.advance();
    greets.fetch_sub(1, Ordering::Relaxed);
    greeted?;
    while !dialer.advance()? {
        assert!(wait(&mut [PollFd::new(&dialer, dialer.awaits())], soon()));
        late();
    }
    Ok(dialer.finish())
}

/// 20 ms are 400 of 20,000 connects a second. Where fewer come in this time, peers answer after as many.
#[test]
fn p7_p8_20_of_20_peers_that_are_400_connects_of_a_flood_and_20_ms_away_come_through() {
    const PEERS: usize = 20;
    let [one, other] = [66, 9].map(|n| Ipv4Addr::new(127, 0, 0, n));
    for (tls, strangers, says) in
        [(false, one, HELLO), (true, one, HELLO), (false, other, 0), (true, other, 0)]
    {
        let (door, terms, done) = (door(terms(tls)), terms(tls), AtomicBool::new(false));
        let (to, counts) = (at(&door), door.counts().clone());
        let crowded = || counts.read().of(&Refused::Crowded);
        let late = || {
            let until = crowded() + 400;
            thread::sleep(Duration::from_millis(20));
            wait_until("400 more strangers", || crowded() >= until);
        };
        let greets = AtomicUsize::new(0);
        let dial = || dial_from_afar(other, to, &terms, &greets, late).is_ok();
        let begin = Instant::now();
        let through = thread::scope(|s| {
            s.spawn(|| {
                let hello = Handshake::new(&terms, true).unwrap().output();
                let (mut kept, mut came) = (VecDeque::new(), 0);
                while !done.load(Ordering::Relaxed) {
                    // A peer's hello comes with its connection, also where its thread has to wait for a core. And strangers come as
                    // fast as the door takes them in: where the kernel's queue is full, the kernel drops packets of peers too.
                    if greets.load(Ordering::Relaxed) > 0 || came > crowded() + 100 {
                        thread::yield_now();
                        continue;
                    }
                    // An error: for a moment there is no port.
                    let Ok(mut socket) = connect_from(strangers, to) else { continue };
                    let _ = socket.write(&hello[..says]);
                    came += 1;
                    kept.push_back(socket);
                    if kept.len() > 256 {
                        kept.pop_front();
                    }
                }
            });
            let peers: Vec<_> = (0..PEERS).map(|_| s.spawn(dial)).collect();
            while !peers.iter().all(|peer| peer.is_finished()) {
                let _ = door.wait(Some(Instant::now() + Duration::from_millis(20)), None).unwrap();
            }
            done.store(true, Ordering::Relaxed);
            peers.into_iter().filter_map(|peer| peer.join().ok()).filter(|through| *through).count()
        });
        let rate = crowded() as f64 / begin.elapsed().as_secs_f64();
        println!(
            "tls {tls}, strangers of {strangers} say {says} bytes: {rate:.0} make room each second, {through} of {PEERS} peers come through"
        );
        assert_eq!(through, PEERS, "tls {tls}, strangers of {strangers}");
        wait_until("the last peer", || {
            door.next();
            door.counts().read().accepted == PEERS as u64
        });
    }
}

#[test]
fn p7_one_who_says_a_byte_now_and_then_loses_its_place_though_nobody_calls_in_between() {
    let limits = Limits { time: Duration::from_millis(50), ..Limits::default() };
    let door = Door::listen(HERE, 0..=0, terms(false), limits).unwrap();
    let hello = Handshake::new(&terms(false), true).unwrap().output();
    let mut slow = TcpStream::connect(at(&door)).unwrap();
    slow.set_nodelay(true).unwrap();
    let mut silent = TcpStream::connect(at(&door)).unwrap();
    for byte in &hello {
        // An error is the end that is waited for.
        let _ = slow.write_all(&[*byte]);
        // The timer alone makes the descriptor readable for the silent one.
        assert!(wait(&mut [PollFd::new(&door, PollFlags::IN)], soon()));
        assert!(door.next().is_none());
        if door.counts().read().of(&Refused::Late) == 2 {
            break;
        }
        thread::sleep(Duration::from_millis(2));
    }
    wait_until("both to be late", || {
        assert!(door.next().is_none());
        door.counts().read().of(&Refused::Late) == 2
    });
    assert_eq!((silent.read(&mut [0; 9]).unwrap(), door.on_their_way()), (0, 0));
}

/// Another descriptor of the socket at whose other end `client` is, as a forked child has one.
fn held_by_a_child(client: &TcpStream) -> OwnedFd {
    let theirs = client.local_addr().unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let found = numbers.filter_map(|number: i32| {
        // SAFETY: the number may be closed by another thread meanwhile; then the call fails, or finds another socket and
        // looks at its address alone.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let peer = rustix::net::getpeername(fd).ok()??;
        (SocketAddr::try_from(peer).ok()? == theirs).then(|| fd.try_clone_to_owned().unwrap())
    });
    found.last().expect("the door has it")
}

#[test]
fn p7_a_connection_that_a_forked_child_holds_ends_and_makes_nobody_spin() {
    let limits = Limits { places: 1, ..Limits::default() };
    let one_place = Door::listen(HERE, 0..=0, terms(false), limits).unwrap();
    // The second one makes the first one go, and is refused.
    let first = TcpStream::connect(at(&one_place)).unwrap();
    wait_until("the first one to arrive", || one_place.next().is_none() && one_place.on_their_way() == 1);
    let first = (held_by_a_child(&first), first);
    let mut second = TcpStream::connect(at(&one_place)).unwrap();
    wait_until("the first one to make room", || count(&one_place, &Refused::Crowded) == 1);
    let held = held_by_a_child(&second);
    second.write_all(b"GET /").unwrap();
    wait_until("the second one to be refused", || count(&one_place, &Refused::Foreign) == 1);
    let limits = Limits { time: Duration::from_millis(50), ..Limits::default() };
    let short = Door::listen(HERE, 0..=0, terms(false), limits).unwrap();
    let mut third = TcpStream::connect(at(&short)).unwrap();
    wait_until("the third one to arrive", || short.next().is_none() && short.on_their_way() == 1);
    let third_held = held_by_a_child(&third);
    wait_until("the third one to be late", || count(&short, &Refused::Late) == 1);
    // No longer watched, though it is open and says something.
    let _ = third.write_all(b"PUSH");
    for door in [&one_place, &short] {
        assert!(door.next().is_none() && door.on_their_way() == 0);
        let mut fds = [PollFd::new(door, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap(), 0);
    }
    for (_held, mut client) in [first, (held, second), (third_held, third)] {
        // The end of the connection, although the socket is open.
        assert_eq!(client.read(&mut [0; 9]).unwrap_or(0), 0);
    }
}

#[test]
fn p8_a_relay_that_encrypts_with_both_ends_gets_neither_in() {
    let door = door(terms(true));
    let relay = TcpListener::bind((HERE, 0)).unwrap();
    let (place, far) = (relay.local_addr().unwrap(), at(&door));
    thread::scope(|s| {
        let dials = s.spawn(move || dial(place, &terms(true), b"a greeting", soon()).unwrap_err());
        let between = s.spawn(move || {
            let (mut near, _) = relay.accept().unwrap();
            let mut far = TcpStream::connect(far).unwrap();
            // Hellos and the proof in clear go through unchanged.
            let (mut hello, mut early) = ([0; HELLO], [0; PROOF]);
            near.read_exact(&mut hello).unwrap();
            far.write_all(&hello).unwrap();
            far.read_exact(&mut hello).unwrap();
            near.write_all(&hello).unwrap();
            near.read_exact(&mut early).unwrap();
            far.write_all(&early).unwrap();
            let ends = [(near, false), (far, true)].map(|(socket, dials)| {
                let mut stream = Stream::plain(socket).unwrap();
                stream.encrypt(dials).unwrap();
                while !stream.tls().unwrap().set_up(stream.socket()).unwrap() {
                    assert!(wait(&mut [PollFd::new(&stream, PollFlags::IN)], soon()));
                }
                stream
            });
            // The dialer's proof, which the relay can read and pass on.
            let proof = recv_all(&ends[0], PROOF);
            send_all(&ends[1], &proof);
            assert!(wait(&mut [PollFd::new(&ends[1], PollFlags::IN)], soon()));
            // Nothing comes back that would prove the listener's secret.
            let got = ends[1].recv(&mut [IoSliceMut::new(&mut [0; PROOF])]);
            assert!(got.as_ref().is_ok_and(|n| *n == 0) || got.is_err(), "{got:?}");
        });
        wait_until("the relay's end", || count(&door, &Refused::Proof) == 1 && between.is_finished());
        let told = dials.join().unwrap();
        assert!(matches!(told, DoorError::Refused(Refused::TurnedAway)), "{told}");
    });
    assert_eq!(door.counts().read().accepted, 0);
}

/// Passes bytes on until one end closes, with one bit of the byte at this place turned.
fn pass_on(mut from: TcpStream, mut to: TcpStream, turned: usize) {
    let (mut bytes, mut passed) = ([0; 512], 0);
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if let Some(byte) = turned.checked_sub(passed).and_then(|at| bytes[..n].get_mut(at)) {
            *byte ^= 0x10;
        }
        passed += n;
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[test]
fn p8_over_tls_no_bit_can_be_turned_on_the_way_and_nothing_changed_comes_through() {
    // A length that was changed has its reader wait for more.
    let limits = Limits { time: patience(Duration::from_secs(1)), ..Limits::default() };
    let door = Door::listen(HERE, 0..=0, terms(true), limits).unwrap();
    let mut random = Random(7);
    let greeting = [0xa5; 200];
    let (mut whole, mut stopped) = (0, 0);
    for run in 0..80 {
        // About as many bytes as a dialer and a listener say; the rest of the places are behind the end.
        let (place, back) = (random.below(1100), run % 2 == 1);
        let turned = |direction| if direction == back { place } else { usize::MAX };
        let relay = TcpListener::bind((HERE, 0)).unwrap();
        let (near, far) = (relay.local_addr().unwrap(), at(&door));
        let arrived = thread::scope(|s| {
            let dials = s.spawn(move || dial(near, &terms(true), &greeting, soon()));
            let (dialer, _) = relay.accept().unwrap();
            let listener = TcpStream::connect(far).unwrap();
            let copies = [&dialer, &listener].map(|socket| socket.try_clone().unwrap());
            let [dialers, listeners] = copies;
            s.spawn(move || pass_on(dialer, listener, turned(false)));
            s.spawn(move || pass_on(listeners, dialers, turned(true)));
            let mut arrived = None;
            wait_until("the end of both", || {
                arrived = arrived.take().or_else(|| door.next());
                dials.is_finished() && (arrived.is_some() || door.on_their_way() == 0)
            });
            // Otherwise the relay would wait for more.
            let ended = dials.join().unwrap();
            assert!(arrived.is_none() || ended.is_ok(), "run {run}: the dialer saw {ended:?}");
            arrived.map(|arrival: Arrival| arrival.greeting)
        });
        match arrived {
            Some(arrived) => {
                assert_eq!(arrived, greeting, "run {run}, byte {place}");
                whole += 1;
            }
            None => stopped += 1,
        }
    }
    assert!(whole > 0 && stopped > 40, "{whole} came through, {stopped} did not");
}

#[test]
fn without_a_secret_a_door_listens_for_this_host_alone() {
    let open = with_secret(&terms(false), Secret::public());
    for ip in ["0.0.0.0", "::", "192.0.2.1", "::ffff:192.0.2.1"] {
        let e = Door::listen(ip.parse().unwrap(), 0..=0, open.clone(), Limits::default()).unwrap_err();
        let e = e.to_string();
        assert!(e.starts_with(&format!("listening at {ip} takes a secret")), "{e}");
        assert!(e.contains("secret-file") && e.contains("PUSHGATE_SECRET"), "{e}");
    }
    let everywhere = TcpListener::bind("0.0.0.0:0").unwrap();
    assert!(matches!(Door::on(everywhere, open.clone(), Limits::default()), Err(DoorError::Open(_))));
    let door = door(open.clone());
    meet(&door, &open, b"from here");
}

#[test]
fn the_first_free_port_of_a_range_is_taken() {
    let taken = TcpListener::bind((HERE, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let listen = |ports| Door::listen(HERE, ports, terms(false), Limits::default());
    let e = listen(port..=port).unwrap_err().to_string();
    assert!(e.starts_with(&format!("listening at 127.0.0.1:{port}: ")), "{e}");
    // Other tests may take ports too; some of the next ones are free.
    let door = listen(port..=port.saturating_add(100)).unwrap();
    assert!(at(&door).port() > port);
}

/// Runs in a process of its own, whose limit of open files is lowered.
#[test]
fn p7_a_process_without_descriptors_neither_spins_nor_waits_and_takes_a_peer_in_later() {
    const NAME: &str =
        "tests::p7_a_process_without_descriptors_neither_spins_nor_waits_and_takes_a_peer_in_later";
    const ALONE: &str = "_PUSHGATE_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let output = alone.args([NAME, "--exact", "--nocapture"]).env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let door = door(terms(false));
    let mut dialer = Dialer::new(TcpStream::connect(at(&door)).unwrap(), &terms(false), b"patient").unwrap();
    assert!(!dialer.advance().unwrap());
    let before = getrlimit(Resource::Nofile);
    // A new descriptor has the lowest number that is free.
    let free = door.as_fd().try_clone_to_owned().unwrap().as_raw_fd() as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(free), ..before }).unwrap();
    let readable = || {
        let mut fds = [PollFd::new(&door, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    wait_until("the connection", readable);
    assert!(door.next().is_none());
    assert!(!readable(), "a caller that polls would spin");
    // The timer tells when it is time to look again; still there is no descriptor.
    wait_until("the end of the pause", readable);
    assert!(door.next().is_none() && door.next().is_none() && door.on_their_way() == 0);
    setrlimit(Resource::Nofile, before).unwrap();
    let mut through = None;
    wait_until("the peer", || {
        through = through.take().or_else(|| door.next());
        dialer.advance().unwrap() && through.is_some()
    });
    assert_eq!(through.unwrap().greeting, b"patient");
}

#[test]
fn dialing_where_nobody_or_something_else_listens_says_so() {
    let gone = TcpListener::bind((HERE, 0)).unwrap().local_addr().unwrap();
    let e = dial(gone, &terms(false), b"", soon()).unwrap_err();
    assert!(
        matches!(&e, DoorError::Connect { error, .. } if error.kind() == ErrorKind::ConnectionRefused),
        "{e}"
    );
    let other = TcpListener::bind((HERE, 0)).unwrap();
    let place = other.local_addr().unwrap();
    for (says, expected) in [(&b"SSH-2.0-OpenSSH\r\n"[..], Refused::Foreign), (b"", Refused::Closed)] {
        let dials = thread::spawn(move || dial(place, &terms(false), b"", soon()).unwrap_err());
        let (mut socket, _) = other.accept().unwrap();
        socket.read_exact(&mut [0; HELLO]).unwrap();
        socket.write_all(says).unwrap();
        drop(socket);
        let e = dials.join().unwrap();
        assert!(matches!(&e, DoorError::Refused(why) if *why == expected), "{e}");
    }
    // One that accepts and says nothing.
    let e = dial(place, &terms(false), b"", Instant::now() + Duration::from_millis(50)).unwrap_err();
    assert!(matches!(e, DoorError::Refused(Refused::Late)), "{e}");
}

// ---------------------------------------------------------------- any bytes

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_bytes_make_a_handshake_panic_and_only_those_of_the_other_end_prove_the_secret() {
    // The first byte says which end is spoken to, whether it encrypts, and in what pieces the bytes come.
    let ends = |how: u8| {
        let terms = terms(how & 2 != 0);
        [true, false].map(|dials| Handshake::with_nonce(&terms, dials, [dials.into(); 32]))
    };
    let right: Vec<Vec<u8>> = (0..4)
        .map(|how| {
            let (mut ends, mut said) = (ends(how), [Vec::new(), Vec::new()]);
            while !ends.iter().all(Handshake::is_proved) {
                for (from, to) in [(0, 1), (1, 0)] {
                    let bytes = ends[from].output();
                    ends[to].take(&bytes[..bytes.len().min(HELLO)]).unwrap();
                    ends[to].take(&bytes[bytes.len().min(HELLO)..]).unwrap();
                    said[from].extend(bytes);
                }
                if ends.iter().all(Handshake::awaits_tls) {
                    ends.iter_mut().for_each(|end| end.encrypted([3; 32]));
                }
            }
            said[how as usize & 1].clone()
        })
        .collect();
    let seeds: Vec<_> = right.iter().zip(0..).map(|(said, how)| [&[how], &said[..]].concat()).collect();
    let proved = std::cell::Cell::new(0);
    let target = |bytes: &[u8]| {
        let Some((how, bytes)) = bytes.split_first() else { return 0 };
        let (right, mut rest) = (&right[*how as usize & 3], bytes);
        // The end that hears them is the other one.
        let end = &mut ends(*how)[1 - (*how as usize & 1)];
        let mut steps = 0;
        let why = loop {
            let said = end.output().len();
            assert!(said <= HELLO + PROOF, "it says {said} bytes");
            end.encrypted([3; 32]);
            let n =
                end.wants().min(rest.len()).min((how >> 2).into()).max(end.wants().min(rest.len()).min(1));
            if n == 0 {
                break 0;
            }
            let now;
            (now, rest) = rest.split_at(n);
            if let Err(why) = end.take(now) {
                break kind(why);
            }
            steps += 1;
        };
        if end.is_proved() {
            assert!(bytes.starts_with(right), "other bytes have proved the secret");
            proved.set(proved.get() + 1);
        }
        why ^ depth(steps) << 1 ^ end.is_proved() as u64
    };
    seeds.iter().for_each(|seed| _ = target(seed));
    assert_eq!(proved.get(), seeds.len(), "what the other end says is taken");
    fuzz(&seeds, target);
}
