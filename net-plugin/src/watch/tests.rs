//! Tests of the watch against peers that die, stop reading or break the rules, and of sockets that break.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;

use pushgate_door::redial::Answer;
use pushgate_door::redial::envelope::{Incoming, envelope};
use pushgate_engine::engine::{Drive, EngineOptions};

use super::*;
use crate::handle::VERSIONS;
use crate::socket::Renewal;
use crate::testing::until;

#[test]
fn p7_a_peer_whose_process_has_ended_is_lost_on_all_connections_though_their_sockets_are_open() {
    let engine = Arc::new(Engine::start(EventFd::new().unwrap(), EngineOptions::default()).unwrap());
    let watch = Watch::start(None).unwrap();
    let mut peer = Command::new("sleep").arg("600").spawn().unwrap();
    // As where a forked child of the peer holds the other ends.
    let (mut ids, mut theirs) = (Vec::new(), Vec::new());
    for process in [Some(peer.id()), None, Some(peer.id()), Some(peer.id())] {
        let (ours, other) = UnixStream::pair().unwrap();
        let line = Arc::new(Line::new(Stream::Unix(ours.into())));
        let entry = Entry {
            stream: line.stream(),
            line,
            process: None,
            peer: Arc::default(),
            qp: QpId(0),
            engine: engine.clone(),
            hears: Hears::Farewell(Vec::new()),
            renewed: None,
        };
        ids.push(watch.add_entry(entry, process.map(|pid| Process::of(pid).unwrap())).unwrap());
        theirs.push(other);
    }
    // The first connection that was watched ends; the others' process is watched all the same.
    watch.remove(ids[0]);
    assert_eq!(watch.shared.entries().len(), 3);
    peer.kill().unwrap();
    let begin = Instant::now();
    while watch.shared.entries().len() > 1 {
        assert!(begin.elapsed() < Duration::from_secs(120), "their queue pairs go on");
        std::thread::yield_now();
    }
    assert!(watch.shared.entries().contains_key(&ids[1]), "a connection to somebody else");
    peer.wait().unwrap();
}

/// A connection that replaces its links, and the other end's socket.
fn with_frames(watch: &Watch) -> (Arc<Line>, Channel) {
    with_frames_for(watch, EventFd::new().unwrap(), EngineOptions::default())
}

fn with_frames_for(watch: &Watch, bell: EventFd, options: EngineOptions) -> (Arc<Line>, Channel) {
    let engine = Engine::start(bell, options).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let line = Arc::new(Line::new(Stream::Unix(ours.into())));
    let entry = Entry {
        line: line.clone(),
        stream: line.stream(),
        process: None,
        peer: Arc::default(),
        qp: QpId(0),
        engine: Arc::new(engine),
        hears: Hears::Frames(Channel::of(line.clone()), Mailbox::default()),
        renewed: None,
    };
    watch.add_entry(entry, None).unwrap();
    (line, Channel::new(Stream::Unix(theirs.into())))
}

#[test]
fn p7_frames_that_a_full_socket_did_not_take_are_sent_when_the_peer_reads() {
    let watch = Watch::start(None).unwrap();
    let (line, mut theirs) = with_frames(&watch);
    let mut sent = 1;
    while line.send(&[7; 4096], Vec::new()).unwrap() {
        sent += 1;
    }
    line.tell(b"last", Vec::new());
    for n in 0..sent {
        assert_eq!(until(|| theirs.receive().unwrap()).0, [7; 4096], "frame {n} of {sent}");
    }
    assert_eq!(until(|| theirs.receive().unwrap()).0, b"last");
}

#[test]
fn p7_a_ring_that_the_watch_took_wakes_the_engine_that_looks_at_the_socket_after_that() {
    let watch = Watch::start(None).unwrap();
    let (bell, options) =
        (EventFd::new().unwrap(), EngineOptions { drive: Drive::Caller, ..Default::default() });
    let (_line, theirs) = with_frames_for(&watch, bell.try_clone().unwrap(), options);
    // The engine's own thread may drain the bell first.
    until(|| {
        theirs.line().ring();
        watch.listen(0);
        bell.drain().then_some(())
    });
    assert_eq!(watch.shared.entries().len(), 1);
}

#[test]
fn p8_rings_for_a_peer_that_reads_nothing_pile_up_nowhere_and_later_frames_arrive_whole() {
    let watch = Watch::start(None).unwrap();
    let (line, mut theirs) = with_frames(&watch);
    for _ in 0..10_000 {
        line.ring();
    }
    assert!(line.flush().unwrap(), "a ring waits for room");
    let mut rings = 0;
    while let Some((bytes, _)) = theirs.receive().unwrap() {
        assert!(socket::is_ring(&bytes));
        rings += 1;
    }
    assert!((1..10_000).contains(&rings), "the socket was full: {rings}");
    line.tell(b"last", Vec::new());
    assert_eq!(until(|| theirs.receive().unwrap()).0, b"last");
}

#[test]
fn p8_a_frame_with_a_descriptor_that_is_no_memory_ends_its_connection() {
    let watch = Watch::start(None).unwrap();
    let (_line, theirs) = with_frames(&watch);
    theirs.send(b"frame", vec![EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap()]).unwrap();
    until(|| watch.shared.entries().is_empty().then_some(()));
}

#[test]
fn p5_a_count_that_a_closing_peer_has_sent_is_there_once_its_socket_was_listened_to() {
    let watch = Watch::start(None).unwrap();
    let (_line, theirs) = with_frames(&watch);
    let peer = watch.shared.entries()[&0].peer.clone();
    say_goodbye(theirs.line(), true, 9);
    watch.listen(0);
    assert_eq!(peer.received(), 9);
}

// ------------------------------------------------------------ sockets that are replaced

/// One end of a connection between two processes that take each other for other hosts.
struct Far {
    // Dropped before the line, as in a process that ends.
    watch: Watch,
    line: Arc<Line>,
    peer: Arc<Peer>,
    mailbox: Mailbox,
}

/// Two ends over loopback; the first one dials.
fn far(recover: Duration) -> [Far; 2] {
    far_with(recover, false)
}

/// `tls`: sockets that take the place of broken ones are encrypted.
fn far_with(recover: Duration, tls: bool) -> [Far; 2] {
    let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
    let watches = [(); 2].map(|()| Watch::start(Some((vec![listen()], recover, tls))).unwrap());
    let tokens = [0, 1].map(|i: usize| watches[i].here().unwrap().token().unwrap());
    let listener = listen();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let streams = [near, listener.accept().unwrap().0].map(|s| door::Stream::plain(s).unwrap());
    let places = [tokens[1].place(), tokens[0].place()];
    let mut dials = true;
    let mut all = Vec::new();
    for (((watch, own), stream), other) in watches.into_iter().zip(tokens).zip(streams).zip(places) {
        let line = Arc::new(Line::new(Stream::tcp(stream, true).unwrap()));
        line.may_renew(Renewal { own, dials: std::mem::take(&mut dials), other });
        line.keep();
        let engine = Arc::new(Engine::start(EventFd::new().unwrap(), EngineOptions::default()).unwrap());
        let (peer, mailbox) = (Arc::new(Peer::default()), Mailbox::default());
        watch.add(line.clone(), peer.clone(), &engine, QpId(0), Some(mailbox.clone())).unwrap();
        all.push(Far { watch, line, peer, mailbox });
    }
    all.try_into().ok().expect("two")
}

impl Far {
    /// Whether the connection goes on.
    fn lives(&self) -> bool {
        !self.watch.shared.entries().is_empty()
    }

    fn is_broken(&self) -> bool {
        self.watch.shared.entries().values().any(|entry| entry.until().is_some())
    }
}

#[test]
fn p6_frames_come_once_and_in_order_though_sockets_are_cut_again_and_again() {
    [false, true].into_iter().for_each(frames_come_once_and_in_order);
}

fn frames_come_once_and_in_order(tls: bool) {
    const FRAMES: u32 = 1200;
    let ends = far_with(pushgate_tests::hang(), tls);
    // Of very different lengths, some longer than a socket's buffers.
    let body = |n: u32| {
        let length = (n.wrapping_mul(2654435761) >> 8) as usize % 3000;
        let mut bytes = n.to_le_bytes().to_vec();
        bytes.resize(4 + if n % 500 == 499 { 150 * length } else { length }, n as u8);
        bytes
    };
    let mut cut = 0;
    // More frames than a mailbox holds are not under way, nor enough for a line to drop one: a mailbox may be emptied long
    // before the watch has told that its frames came.
    let (mut told, mut heard) = ([0; 2], [0; 2]);
    let begun = Instant::now();
    while heard != [FRAMES; 2] {
        assert!(begun.elapsed() < pushgate_tests::hang(), "{heard:?} of {told:?}");
        for (i, other) in [(0, 1), (1, 0)] {
            while told[i] < FRAMES && told[i] < heard[other] + 6 && !ends[i].line.is_full() {
                ends[i].line.tell(&body(told[i]), Vec::new());
                told[i] += 1;
            }
            for frame in ends[i].mailbox.take_all() {
                assert!(frame.bytes == body(heard[i]), "frame {} of end {i}", heard[i]);
                heard[i] += 1;
            }
        }
        // At one end, at the other, at both.
        if heard[0] / 100 > cut {
            cut += 1;
            ends.iter().zip([cut % 3 != 0, cut % 3 != 1]).filter(|(_, cut)| *cut).for_each(|(end, _)| {
                end.line.stream().shutdown();
            });
        }
        std::thread::yield_now();
    }
    assert!(ends.iter().all(Far::lives));
}

/// One end of two, whose other end does nothing any more. It has sent one frame.
fn beside_a_silent_one(dials: bool) -> [Far; 2] {
    let [first, second] = far(pushgate_tests::hang());
    let (end, silent) = if dials { (first, second) } else { (second, first) };
    silent.line.renewal().unwrap().own.making();
    silent.watch.shared.entries().clear();
    end.line.tell(b"a frame", Vec::new());
    [end, silent]
}

/// A connection, and its other end.
fn connection() -> (door::Stream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (door::Stream::plain(listener.accept().unwrap().0).unwrap(), far)
}

impl Far {
    fn finds(&self, found: impl FnOnce(Key) -> Found) {
        let shared = &self.watch.shared;
        let key = shared.entries().values().next().unwrap().renewed.as_ref().unwrap().key;
        shared.meet_again(shared.meeting.as_ref().unwrap(), found(key));
    }
}

#[test]
fn p6_what_the_other_end_said_of_a_socket_that_was_replaced_since_breaks_none() {
    let [end, _silent] = beside_a_silent_one(true);
    end.finds(|key| Found::Told { key, received: 0 });
    assert!(end.is_broken());
    let (stream, _far) = connection();
    end.finds(|key| Found::Met { key, stream, received: 1 });
    assert!(!end.is_broken());
    end.finds(|key| Found::Told { key, received: 0 });
    assert!(!end.is_broken(), "that was late");
    end.finds(|key| Found::Told { key, received: 1 });
    assert!(end.is_broken());
}

#[test]
fn p6_a_greeting_of_an_attempt_that_was_given_up_replaces_no_socket() {
    let [end, _silent] = beside_a_silent_one(false);
    // By a greeting that says `received` frames: the other end of the new socket, and whether that took over.
    let greets = |received| {
        let ((stream, far), before) = (connection(), end.line.stream());
        end.finds(|key| Found::Greeted { key, stream, received });
        assert!(!end.is_broken());
        (far, !Arc::ptr_eq(&end.line.stream(), &before))
    };
    let (_first, took_over) = greets(1);
    assert!(took_over);
    assert!(!greets(0).1, "that was late");
    assert!(greets(1).1);
}

#[test]
fn p7_a_peer_whose_process_has_ended_is_lost_at_once_though_sockets_are_replaced() {
    for dead in [0, 1] {
        // A peer that is waited for would be waited for during this.
        let [a, b] = far(pushgate_tests::hang() * 10);
        let (dead, left) = if dead == 0 { (a, b) } else { (b, a) };
        let stream = dead.line.stream();
        // As where the process dies: its sockets close.
        drop(dead);
        stream.shutdown();
        until(|| (!left.lives()).then_some(()));
    }
}

#[test]
fn p7_a_socket_that_no_other_one_replaces_ends_its_connection_after_recover() {
    let [dials, silent] = far(Duration::from_millis(500));
    // It goes on listening, and answers nobody.
    silent.line.renewal().unwrap().own.making();
    dials.watch.shared.cut_sockets();
    for end in [dials, silent] {
        until(|| (!end.lives()).then_some(()));
    }
}

#[test]
fn p5_a_peer_that_was_closed_while_the_socket_was_broken_tells_what_it_had_received() {
    let [a, b] = far(pushgate_tests::hang());
    // The watch no longer serves it, so that its farewell does not come.
    b.watch.shared.entries().clear();
    b.line.renewal().unwrap().own.close(9);
    a.watch.shared.cut_sockets();
    until(|| (!a.lives()).then_some(()));
    assert_eq!(a.peer.received(), 9);
}

#[test]
fn p8_who_dials_again_without_a_token_or_with_an_impossible_count_is_turned_away() {
    let [dials, other] = far(pushgate_tests::hang());
    let place = dials.line.renewal().unwrap().other;
    let say = |token: [u8; 16], received: u64| {
        let hello = serde_json::json!({ "token": token, "received": received });
        let until = Instant::now() + pushgate_tests::hang();
        let hello = envelope(VERSIONS.oldest(), &hello);
        let stream = door::dial(place.at.first(), &place.terms(false), &hello, until).unwrap();
        let mut incoming = Incoming::default();
        loop {
            if let Some((_, body)) = incoming.open(&stream, 4096).unwrap() {
                return (stream, serde_json::from_slice::<Answer>(&body).unwrap());
            }
            std::thread::yield_now();
        }
    };
    let mut wrong = place.token;
    wrong[15] ^= 1;
    // One without the key gets no further than the door.
    let key = door::Terms { secret: door::Secret::random::<16>().unwrap().0, ..place.terms(false) };
    let e = door::dial(place.at.first(), &key, b"", Instant::now() + pushgate_tests::hang()).unwrap_err();
    assert!(matches!(e, door::DoorError::Refused(door::Refused::TurnedAway)), "{e}");
    let Answer::Refused(why) = say(wrong, 0).1 else { panic!("it is taken") };
    assert!(why.contains("its token is that of no connection"), "{why}");
    assert!(other.lives() && !other.is_broken());
    // Who knows the token says what can't be.
    assert!(matches!(say(place.token, 1).1, Answer::Again { received: 0 }));
    until(|| (!other.lives()).then_some(()));
}
