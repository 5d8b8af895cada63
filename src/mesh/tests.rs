//! Tests of one rank's mesh against ranks that are made by hand and can misbehave.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use pushgate_driver_shim::fdpass::{recv_message, send_message};
use pushgate_engine::connect;
use pushgate_tests::lingering::{lingering, send_along};
use pushgate_tests::{hang, patience};

use super::*;

/// How long tests wait for something that must not come: long enough that it would have come.
pub(super) const LATER: Duration = Duration::from_millis(500);

fn events(lost: impl Fn(u32) + Send + 'static, ended: impl Fn(Ended) + Send + 'static) -> Events {
    Events { lost: Box::new(lost), ended: Box::new(ended) }
}

/// Makes rank 0's mesh of `size`, and the sockets of ranks 1, 2, ... by hand.
pub(super) fn by_hand(size: u32, timeout: Duration) -> (Mesh, Receiver<u32>, Vec<UnixStream>) {
    let mut streams = unix::pairs(size).unwrap();
    let mine = streams.remove(0);
    let mut mesh = Mesh::new(0, mine, timeout, None).unwrap();
    let (sender, lost) = channel();
    mesh.listen(events(move |rank| sender.send(rank).unwrap(), |_| {})).unwrap();
    let others: Vec<_> = streams.into_iter().map(|mut s| s[0].take().unwrap()).collect();
    for other in &others {
        other.set_read_timeout(Some(hang())).unwrap();
        other.set_write_timeout(Some(hang())).unwrap();
    }
    (mesh, lost, others)
}

/// A frame as it is on the wire.
pub(super) fn wire(label: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32 + 4).to_le_bytes().to_vec();
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(label.to_le_bytes());
    bytes.extend(body);
    bytes
}

#[test]
fn a_peer_that_closes_after_this_ranks_farewell_is_not_lost() {
    let (mesh, lost, mut others) = by_hand(2, hang());
    mesh.leave();
    let mut farewell = [0; 12];
    others[0].read_exact(&mut farewell).unwrap();
    others.clear();
    assert!(lost.recv_timeout(LATER).is_err());
    assert_eq!(mesh.lost(), None);
}

#[test]
fn p7_a_rank_that_is_lost_after_its_report_of_another_rank_names_that_rank() {
    let (mesh, lost, mut others) = by_hand(4, hang());
    let (third, _second, mut first) = (others.pop().unwrap(), others.pop().unwrap(), others.pop().unwrap());
    // The second rank died first, but of this the first rank alone has heard yet.
    first.write_all(&wire(LOST, &2u32.to_le_bytes())).unwrap();
    drop(first);
    assert_eq!(lost.recv_timeout(hang()), Ok(2));
    assert_eq!(mesh.lost(), Some(2));
    // The others hear it before this rank's program can leave.
    let frame = wire(LOST, &2u32.to_le_bytes());
    let mut heard = vec![0; frame.len()];
    (&third).read_exact(&mut heard).unwrap();
    assert_eq!(heard, frame);
}

#[test]
fn p7_a_send_to_a_rank_that_left_because_another_died_names_the_one_that_died() {
    let (mesh, _lost, mut others) = by_hand(3, hang());
    // The second rank died, and the first alone has heard of it. The first one says so and leaves in order.
    let mut first = others.remove(0);
    first.write_all(&wire(LOST, &2u32.to_le_bytes())).unwrap();
    first.write_all(&wire(BYE, &[])).unwrap();
    drop(first);
    let error = loop {
        // Until the socket's end is seen, messages are taken.
        match mesh.send(1, 5, b"hello", &[]) {
            Ok(()) => std::thread::yield_now(),
            Err(e) => break e,
        }
    };
    assert!(matches!(error, Error::PeerLost { rank: 2 }), "{error}");
}

#[test]
fn p8_a_rank_that_reports_the_loss_of_no_other_rank_is_itself_lost() {
    for body in [&0u32.to_le_bytes()[..], &1u32.to_le_bytes(), &3u32.to_le_bytes(), &[2, 0, 0], &[]] {
        let (mesh, lost, mut others) = by_hand(3, hang());
        others[0].write_all(&wire(LOST, body)).unwrap();
        assert_eq!(lost.recv_timeout(hang()), Ok(1), "{body:?}");
        assert_eq!(mesh.lost(), Some(1));
    }
}

#[test]
fn p7_a_frame_that_one_rank_does_not_finish_hides_no_other_ranks_death() {
    let (mesh, lost, mut others) = by_hand(3, Duration::from_secs(5));
    let (dies, mut stops) = (others.pop().unwrap(), others.pop().unwrap());
    // First within a frame's header, then within its bytes.
    let frame = wire(5, b"late");
    stops.write_all(&frame[..6]).unwrap();
    thread::sleep(Duration::from_millis(50));
    stops.write_all(&frame[6..14]).unwrap();
    thread::sleep(Duration::from_millis(50));
    drop(dies);
    // A reader that waited for the rest would report the wrong rank when its time is up.
    assert_eq!(lost.recv_timeout(hang()), Ok(2));
    stops.write_all(&frame[14..]).unwrap();
    let begin = Instant::now();
    while mesh.shared.inbox.state().frames.is_empty() {
        assert!(begin.elapsed() < hang(), "the rest of a frame is not taken");
        thread::yield_now();
    }
    assert_eq!(mesh.lost(), Some(2));
}

#[test]
fn p7_a_send_that_times_out_within_a_frame_leaves_whole_frames_on_the_stream() {
    let (mesh, _lost, mut others) = by_hand(2, Duration::from_millis(300));
    let other = others.pop().unwrap();
    let body = vec![7; 1 << 20];
    let mut taken = 0u64;
    loop {
        let mut numbered = taken.to_le_bytes().to_vec();
        numbered.extend(&body);
        match mesh.send(1, 5, &numbered, &[]) {
            Ok(()) => taken += 1,
            Err(Error::TimedOut { .. }) => break,
            Err(e) => panic!("{e}"),
        }
        assert!(taken < 1000, "a peer that reads nothing takes everything");
    }
    // The peer reads again: every frame that was accepted arrives whole and in order, and so does
    // the next one.
    let reads = thread::spawn(move || {
        let mut next = 0u64;
        loop {
            let (bytes, _) = recv_message(&other, MAX_BYTES, 0).unwrap();
            if bytes[..4] == 6u32.to_le_bytes() {
                return (next, other);
            }
            assert_eq!(bytes[..4], 5u32.to_le_bytes());
            assert_eq!(bytes[4..12], next.to_le_bytes());
            next += 1;
        }
    });
    let begin = Instant::now();
    while let Err(e) = mesh.send(1, 6, b"next", &[]) {
        assert!(matches!(e, Error::TimedOut { .. }), "{e}");
        assert!(begin.elapsed() < hang());
    }
    assert_eq!(reads.join().unwrap().0, taken);
}

#[test]
fn p7_p8_a_rank_that_reads_nothing_does_not_hold_up_what_is_sent_to_others() {
    let (mesh, _lost, mut others) = by_hand(3, hang());
    let (reads, deaf) = (others.pop().unwrap(), others.pop().unwrap());
    let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|s| {
        s.spawn(|| {
            let body = vec![0; 8 << 20];
            let end = loop {
                begun.store(true, Ordering::Relaxed);
                if let Err(e) = mesh.send(1, 5, &body, &[]) {
                    break e;
                }
            };
            ended.store(true, Ordering::Relaxed);
            assert!(matches!(end, Error::PeerLost { rank: 1 }), "{end}");
        });
        while !begun.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        // By now the other send is in the middle of its wait.
        thread::sleep(Duration::from_millis(200));
        mesh.send(2, 5, b"through", &[]).unwrap();
        assert!(recv_message(&reads, 64, 0).unwrap().0.ends_with(b"through"));
        assert!(!ended.load(Ordering::Relaxed), "only when the other send had ended");
        drop(deaf);
    });
}

#[test]
fn p8_a_rank_that_floods_this_one_with_frames_is_lost_before_memory_is() {
    let (mesh, lost, others) = by_hand(3, hang());
    let mut others = others.into_iter();
    let (mut floods, mut behaves) = (others.next().unwrap(), others.next().unwrap());
    let frame = wire(5, &vec![0; 1 << 20]);
    // Sends 256 MiB that no caller asked for.
    for _ in 0..256 {
        if floods.write_all(&frame).is_err() {
            break;
        }
    }
    assert_eq!(lost.recv_timeout(hang()), Ok(1));
    behaves.write_all(&wire(5, b"still heard")).unwrap();
    let begin = Instant::now();
    while mesh.shared.inbox.state().take(2, 5).is_none() {
        assert!(begin.elapsed() < hang(), "the other rank is not heard");
        thread::yield_now();
    }
}

#[test]
fn p8_a_rank_that_floods_this_one_with_descriptors_is_lost_before_they_run_out() {
    let (_mesh, lost, mut others) = by_hand(2, hang());
    let floods = others.pop().unwrap();
    let stdin = std::io::stdin();
    let fds: Vec<_> = (0..MAX_FDS).map(|_| stdin.as_fd()).collect();
    for _ in 0..=reader::most(1).fds / MAX_FDS {
        if send_message(&floods, &LABEL.to_le_bytes(), &fds).is_err() {
            break;
        }
        // The kernel bounds how much can be on its way.
        thread::yield_now();
    }
    assert_eq!(lost.recv_timeout(hang()), Ok(1));
    // A new descriptor can still be opened.
    UnixStream::pair().unwrap();
}

#[test]
fn p8_descriptors_on_a_frame_that_is_no_set_up_lose_the_rank_that_sent_them() {
    let frame = |label: u32, body: &[u8]| [&label.to_le_bytes()[..], body].concat();
    let labels = [BYE, 1, 2, 3, 15].map(|label| frame(label, &[]));
    // An END, and one that is cut off.
    for bytes in labels.iter().chain(&[frame(LABEL, &end_of(1)), frame(LABEL, &end_of(1)[..20])]) {
        let (mesh, lost, mut others) = by_hand(3, hang());
        // The mesh's thread must not close the socket: that would take an hour.
        let (socket, _end) = lingering();
        send_message(&others[0], bytes, &[socket.as_fd()]).unwrap();
        // Elsewhere, for the other copy of the descriptor may be closed by now: then this close is the last.
        std::thread::spawn(|| drop(socket));
        assert_eq!(lost.recv_timeout(hang()), Ok(1), "{bytes:?}");
        others[1].write_all(&wire(5, b"still heard")).unwrap();
        pushgate_tests::wait_until("the other rank is heard", || {
            mesh.shared.inbox.state().take(2, 5).is_some()
        });
    }
}

/// The RESUME of an incarnation, without the label.
fn resume(incarnation: u64) -> Vec<u8> {
    let mut frame = vec![1, 0, 0, 0, 0];
    frame.extend(incarnation.to_le_bytes());
    frame.extend([0; 16]);
    frame
}

fn offer_of(incarnation: u64) -> Vec<u8> {
    [&LABEL.to_le_bytes()[..], &resume(incarnation)].concat()
}

/// The END of an incarnation, without the label.
fn end_of(incarnation: u64) -> Vec<u8> {
    connect::end(Incarnation::new(incarnation).unwrap(), None, ABORTED)
}

const ABORTED: Status = Status::new(pushgate_driver_shim::abi::PUSHGATE_ABORTED);

/// The socket's linger is an hour, so a close on the mesh's thread would take that long.
#[test]
fn p7_p8_descriptors_of_a_call_that_has_ended_hold_up_no_other_rank() {
    let (mesh, lost, mut others) = by_hand(4, hang());
    let (mut third, mut second, mut first) =
        (others.pop().unwrap(), others.pop().unwrap(), others.pop().unwrap());
    // A descriptor that is dropped with the end of its call.
    let (socket, end) = lingering();
    send_message(&first, &offer_of(1), &[socket.as_fd()]).unwrap();
    drop(socket);
    first.write_all(&wire(LABEL, &end_of(1))).unwrap();
    first.write_all(&wire(5, b"behind it")).unwrap();
    assert_eq!(mesh.recv(1, 5).unwrap().0, b"behind it");
    // A descriptor within a frame whose bytes never come: the mesh keeps the descriptor until the stream ends.
    let (socket, other_end) = lingering();
    second.write_all(&[4, 0, 0, 0, 1, 0, 0, 0]).unwrap();
    assert!(send_along(&second, &socket, &[0]));
    drop(socket);
    drop(second);
    assert_eq!(lost.recv_timeout(hang()), Ok(2));
    third.write_all(&wire(5, b"still heard")).unwrap();
    let begin = Instant::now();
    while mesh.shared.inbox.state().take(3, 5).is_none() {
        assert!(begin.elapsed() < hang(), "the other rank is not heard");
        thread::yield_now();
    }
    while mesh.shared.inbox.state().waiting[&1].open() > 0 {
        assert!(begin.elapsed() < hang(), "a closed descriptor is not counted out");
        thread::yield_now();
    }
    drop((end, other_end));
}

#[test]
fn p8_a_rank_that_offers_anew_all_the_time_and_reads_nothing_leaves_descriptors_for_others() {
    let (mesh, _lost, mut others) = by_hand(2, Duration::from_millis(300));
    let other = others.pop().unwrap();
    let done = AtomicBool::new(false);
    let most = thread::scope(|s| {
        let (done, shared) = (&done, &mesh.shared);
        s.spawn(move || {
            for incarnation in 1.. {
                let sent = send_message(&other, &offer_of(incarnation), &[]);
                if done.load(Ordering::Relaxed) || sent.is_err() {
                    return;
                }
            }
        });
        let looks = s.spawn(move || {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                most = most.max(shared.peer(1).out().fds());
            }
            most
        });
        let e = meet_one(&mesh, Says { fds: 2, ..Says::new("here") }).err().expect("it never answers");
        done.store(true, Ordering::Relaxed);
        assert!(matches!(e, Error::TimedOut { .. } | Error::PeerLost { rank: 1 }), "{e}");
        looks.join().unwrap()
    });
    assert!(most <= MAX_OUT_FDS, "{most} descriptors wait for a rank that reads nothing");
    // A new descriptor can still be opened.
    UnixStream::pair().unwrap();
}

#[test]
fn p7_the_report_of_an_end_that_breaks_as_its_rank_leaves_comes_before_the_farewell() {
    for _ in 0..50 {
        let [(a, _), (_b, heard)] = pair(hang());
        let tell = a.set_up(1, LABEL).teller(None);
        let cause = Status { rank: Some(0), ..ABORTED };
        tell.tell(cause);
        drop(a);
        assert_eq!(heard.recv_timeout(hang()).map(|e| e.status), Ok(cause));
    }
}

#[test]
fn a_frame_over_the_limit_is_refused_where_it_is_sent() {
    let (mesh, _lost, _others) = by_hand(2, hang());
    let e = mesh.send(1, 5, &vec![0; MAX_BYTES], &[]).unwrap_err();
    assert!(matches!(e, Error::Config { .. }), "{e}");
    let stdin = std::io::stdin();
    let e = mesh.send(1, 5, &[], &[stdin.as_fd(); MAX_FDS + 1]).unwrap_err();
    assert!(matches!(e, Error::Config { .. }), "{e}");
}

// ------------------------------------------------------------ ranks of other hosts

/// Makes two meshes over TCP, each with its own timing of signs of life.
fn over_tcp(beats: [Beats; 2]) -> [(Mesh, Receiver<u32>); 2] {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let here = listener.accept().unwrap().0;
    let mesh = |rank: u32, stream, beats| {
        let mut links = vec![Some(door::Stream::plain(stream).unwrap())];
        links.insert(rank as usize, None);
        let mut mesh = Mesh::new(rank, links, hang(), None).unwrap();
        mesh.beats = beats;
        let (sender, lost) = channel();
        mesh.listen(events(move |rank| sender.send(rank).unwrap(), |_| {})).unwrap();
        (mesh, lost)
    };
    [mesh(0, here, beats[0]), mesh(1, there, beats[1])]
}

#[test]
fn p7_a_rank_of_another_host_that_says_nothing_is_lost_though_its_socket_is_open() {
    let quick = Beats { every: Duration::from_millis(50), silence: Duration::from_millis(500) };
    // Like a rank that was killed while a forked child holds its socket: no message and no end of
    // file.
    let dead = Beats { every: hang() * 10, silence: hang() * 10 };
    let [(mesh, lost), _dead] = over_tcp([quick, dead]);
    assert_eq!(lost.recv_timeout(hang()), Ok(1));
    assert!(matches!(mesh.recv(1, 5), Err(Error::PeerLost { rank: 1 })));
}

#[test]
fn a_rank_of_another_host_that_beats_is_not_lost_however_long_nothing_else_is_said() {
    // A second mesh that receives nothing shows how long the loss takes to notice.
    let quick = Beats { every: Duration::from_millis(50), silence: patience(Duration::from_secs(2)) };
    let dead = Beats { every: hang() * 10, silence: hang() * 10 };
    let [(a, lost_a), (b, lost_b)] = over_tcp([quick, quick]);
    for _ in 0..2 {
        let [(_mesh, lost), _dead] = over_tcp([quick, dead]);
        assert_eq!(lost.recv_timeout(hang()), Ok(1));
    }
    assert!(lost_a.try_recv().is_err() && lost_b.try_recv().is_err());
    a.send(1, 5, b"still here", &[]).unwrap();
    assert_eq!(b.recv(0, 5).unwrap().0, b"still here");
}

#[test]
fn p6_frames_that_are_held_back_arrive_in_order_after_the_hold_in_both_directions() {
    const HOLD: Duration = Duration::from_millis(80);
    let [(a, _), (b, _)] = pair(hang());
    for (holds, other) in [(&a, &b), (&b, &a)] {
        let begin = Instant::now();
        holds.hold(other.rank, HOLD);
        for n in 0..3 {
            holds.send(other.rank, 5, &[n], &[]).unwrap();
            other.send(holds.rank, 5, &[n], &[]).unwrap();
        }
        for n in 0..3 {
            assert_eq!(holds.recv(other.rank, 5).unwrap().0, [n]);
            assert!(begin.elapsed() >= HOLD, "frame {n} came in during the hold");
            assert_eq!(other.recv(holds.rank, 5).unwrap().0, [n]);
        }
    }
    assert!(a.cut(1).is_err(), "a socket between ranks of one host has no other one to take its place");
}

// ------------------------------------------------------------ set-up of a queue pair

const LABEL: u32 = QUEUE_PAIRS + 7;

/// Makes two ranks of this process, each with a channel of the ends that it hears of.
fn pair(timeout: Duration) -> [(Mesh, Receiver<Ended>); 2] {
    let meshes = Mesh::local(2, timeout).unwrap().into_iter().map(|mut mesh| {
        let (sender, ended) = channel();
        mesh.listen(events(|_| {}, move |e| sender.send(e).unwrap())).unwrap();
        (mesh, ended)
    });
    meshes.collect::<Vec<_>>().try_into().ok().expect("two")
}

/// An end whose offer and places are a text.
struct Says {
    says: String,
    heard: Option<String>,
    /// Descriptors with the offer.
    fds: usize,
    /// Fails when it has the peer's offer.
    fails: bool,
}

impl Says {
    fn new(says: &str) -> Says {
        Says { says: says.into(), heard: None, fds: 0, fails: false }
    }
}

impl End for Says {
    fn offer(&mut self) -> Result<connect::Frame> {
        let fds: Vec<_> =
            (0..self.fds).map(|_| std::io::stdin().as_fd().try_clone_to_owned().unwrap()).collect();
        Ok(connect::Frame { bytes: self.says.clone().into_bytes(), along: fds.into() })
    }

    fn prepare(&mut self, offer: connect::Frame) -> Result<Vec<u8>> {
        self.heard = Some(String::from_utf8(offer.bytes).unwrap());
        if self.fails { Err(Error::Aborted { rank: 77 }) } else { Ok(self.says.clone().into_bytes()) }
    }
}

/// An end that takes so long to get ready.
struct Slow(Duration);

impl End for Slow {
    fn offer(&mut self) -> Result<connect::Frame> {
        Ok(connect::Frame::default())
    }

    fn prepare(&mut self, _offer: connect::Frame) -> Result<Vec<u8>> {
        thread::sleep(self.0);
        Ok(Vec::new())
    }
}

/// Meets the other rank of two.
fn meet_one(mesh: &Mesh, end: Says) -> Result<BothReady<'_, Says>> {
    let mut ready = meet(mesh, vec![(mesh.set_up(1 - mesh.rank, LABEL), end)])?;
    Ok(ready.pop().expect("one"))
}

/// Both ends of a queue pair, ready for each other.
fn both_meet<'a>(a: &'a Mesh, b: &'a Mesh) -> [BothReady<'a, Says>; 2] {
    thread::scope(|s| {
        let other = s.spawn(|| meet_one(b, Says::new("b")).unwrap());
        let both = [meet_one(a, Says::new("a")).unwrap(), other.join().unwrap()];
        assert_eq!(both.each_ref().map(|g| g.end.heard.as_deref()), [Some("b"), Some("a")]);
        assert_eq!(both.each_ref().map(|g| &g.places[..]), [b"b", b"a"]);
        both
    })
}

/// What both ends of a queue pair believe: each end's offer, by rank.
type Belief = Mutex<Option<[String; 2]>>;

/// Repeats calls until both ends believe the same. Calls fail at any point, some of them on
/// purpose.
fn try_until_both_agree(
    mesh: &mut Mesh,
    heard: &Receiver<Ended>,
    beliefs: &[Belief; 2],
    seed: u64,
) -> [String; 2] {
    let (own, peer) = (mesh.rank as usize, 1 - mesh.rank);
    let begin = Instant::now();
    for number in 0.. {
        assert!(begin.elapsed() < hang(), "they never agree");
        // Longer each time, because a busy machine needs longer.
        mesh.timeout = Duration::from_millis(10 + 5 * number);
        let mine = format!("{number} of {own}");
        let fate = (seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 32 & 3;
        if fate == 0 {
            // It fails before it has heard anything.
            let set_up = mesh.set_up(peer, LABEL);
            let offer = [&resume(set_up.own.get())[..], mine.as_bytes()].concat();
            let sent = mesh.send(peer, LABEL, &offer, &[]);
            assert!(matches!(sent, Ok(()) | Err(Error::TimedOut { .. })), "{sent:?}");
            drop(Call::begin(set_up, Default::default(), mesh.timeout, 0));
            continue;
        }
        let ready = match meet_one(mesh, Says { fails: fate == 1, ..Says::new(&mine) }) {
            Ok(ready) => ready,
            Err(Error::TimedOut { .. } | Error::Aborted { .. }) => continue,
            Err(e) => panic!("{e}"),
        };
        let theirs = ready.end.heard.expect("it has the peer's offer");
        assert_eq!(ready.places, theirs.as_bytes());
        let (_, incarnation) = ready.call.peers();
        if ready.call.joined(None).is_some() {
            continue;
        }
        let mut belief = [theirs.clone(), theirs];
        belief[own] = mine;
        *beliefs[own].lock().unwrap() = Some(belief.clone());
        // The peer may have given up after that; then we are told.
        while !heard.try_iter().any(|e| e.incarnation == incarnation) {
            if beliefs[1 - own].lock().unwrap().as_ref() == Some(&belief) {
                return belief;
            }
            assert!(begin.elapsed() < hang(), "one end believes {belief:?} alone");
            thread::sleep(Duration::from_millis(1));
        }
        *beliefs[own].lock().unwrap() = None;
    }
    unreachable!("numbers do not end")
}

#[test]
fn p7_p8_two_ends_that_call_again_at_any_time_agree_on_one_pair_of_calls() {
    for round in 0..10u64 {
        let [mut a, mut b] = pair(hang());
        let beliefs = [Belief::default(), Belief::default()];
        thread::scope(|s| {
            let beliefs = &beliefs;
            let first = s.spawn(move || try_until_both_agree(&mut a.0, &a.1, beliefs, round));
            let second = s.spawn(move || try_until_both_agree(&mut b.0, &b.1, beliefs, !round));
            assert_eq!(first.join().unwrap(), second.join().unwrap());
        });
    }
}

#[test]
fn p7_a_call_that_fails_after_the_peers_join_ends_the_peers_end() {
    let [(a, _), (b, heard)] = pair(hang());
    let [ours, theirs] = both_meet(&a, &b).map(|ready| ready.call);
    let (label, incarnation) = theirs.peers();
    assert_eq!(theirs.joined(None), None);
    drop(ours);
    let status = Status { rank: Some(0), ..ABORTED };
    assert_eq!(heard.recv_timeout(hang()), Ok(Ended { rank: 0, label, incarnation, status }));
}

#[test]
fn p7_a_call_ends_at_once_if_the_peers_call_fails_after_it_has_heard_of_it() {
    for _ in 0..20 {
        let [(a, _a_heard), (b, _b_heard)] = pair(hang());
        thread::scope(|s| {
            let other = s.spawn(|| meet_one(&b, Says::new("b")).err());
            let ours = meet_one(&a, Says { fails: true, ..Says::new("a") }).err();
            assert!(matches!(ours, Some(Error::Aborted { rank: 77 })), "{ours:?}");
            let theirs = other.join().unwrap();
            assert!(matches!(theirs, Some(Error::Aborted { rank: 0 })), "{theirs:?}");
        });
    }
}

#[test]
fn p7_an_end_that_fails_before_the_peers_join_is_told_when_the_peer_joins() {
    let [(a, _), (b, _heard)] = pair(hang());
    let [ours, theirs] = both_meet(&a, &b).map(|ready| ready.call);
    drop(ours);
    let begin = Instant::now();
    while b.shared.inbox.state().frames.is_empty() {
        assert!(begin.elapsed() < hang(), "it hears nothing");
        thread::yield_now();
    }
    assert_eq!(theirs.joined(None), Some(Status { rank: Some(0), ..ABORTED }));
    assert!(b.shared.inbox.state().frames.is_empty());
}

#[test]
fn p7_an_end_is_told_when_the_peer_joins_though_the_next_call_has_ended_too() {
    let [(a, _), (b, _heard)] = pair(hang());
    let [ours, theirs] = both_meet(&a, &b).map(|ready| ready.call);
    drop(ours);
    // The peer's next call fails before it has heard anything.
    drop(Call::begin(a.set_up(1, LABEL), Default::default(), hang(), 0));
    pushgate_tests::wait_until("both ends are heard", || {
        b.shared.inbox.state().frames.get(&(0, LABEL)).is_some_and(|frames| frames.len() == 2)
    });
    assert_eq!(theirs.joined(None), Some(Status { rank: Some(0), ..ABORTED }));
    // The END of the next call stays for this rank's next call.
    assert_eq!(b.shared.inbox.state().frames[&(0, LABEL)].len(), 1);
}

#[test]
fn p7_a_call_whose_peer_had_given_up_before_waits_for_the_peers_next_call() {
    let [(a, _), (b, _heard)] = pair(hang());
    thread::scope(|s| {
        let other = s.spawn(|| meet_one(&b, Says::new("b")).unwrap());
        // This call had given up before the peer came, but its end arrives late: the peer has its offer.
        let late = a.set_up(1, LABEL);
        a.send(1, LABEL, &resume(late.own.get()), &[]).unwrap();
        (0..2).for_each(|_| drop(a.recv(1, LABEL).unwrap()));
        late.send_end(&connect::end(late.own, None, ABORTED));
        drop(late);
        let ours = meet_one(&a, Says::new("a")).unwrap();
        let theirs = other.join().unwrap();
        assert_eq!((&ours.places[..], &theirs.places[..]), (&b"b"[..], &b"a"[..]));
        assert_eq!((ours.call.joined(None), theirs.call.joined(None)), (None, None));
    });
}

#[test]
fn p7_what_came_in_time_counts_though_one_of_many_ends_took_long_to_get_ready() {
    const ENDS: u32 = 80;
    let [(mut a, _a_heard), (b, _b_heard)] = pair(hang());
    a.timeout = Duration::from_millis(50);
    for i in 0..ENDS {
        b.send(0, LABEL + i, &resume(1), &[]).unwrap();
        // READY, which names the call that will come.
        let mut ready = vec![2, 0, 0, 0, 0];
        ready.extend(1u64.to_le_bytes());
        ready.extend((i as u64 + 1).to_le_bytes());
        b.send(0, LABEL + i, &ready, &[]).unwrap();
    }
    pushgate_tests::wait_until("all frames are there", || {
        a.shared.inbox.state().frames.values().map(VecDeque::len).sum::<usize>() == 2 * ENDS as usize
    });
    // Of each end the time is up before its first frame is read.
    let slow = |i| Slow(if i == 0 { a.timeout * 4 } else { Duration::ZERO });
    let ends = (0..ENDS).map(|i| (a.set_up(1, LABEL + i), slow(i))).collect();
    assert_eq!(meet(&a, ends).unwrap().len(), ENDS as usize);
}

#[test]
fn p7_an_end_that_breaks_alone_tells_its_peer_over_the_set_ups_socket() {
    let [(a, _), (b, heard)] = pair(hang());
    let [ours, theirs] = both_meet(&a, &b).map(|ready| ready.call);
    let (tell, (label, incarnation)) = (ours.teller(), theirs.peers());
    assert_eq!((ours.joined(None), theirs.joined(None)), (None, None));
    let cause =
        Status { rank: Some(0), detail: 4, ..Status::new(pushgate_driver_shim::abi::PUSHGATE_LINK_DOWN) };
    tell.tell(cause);
    assert_eq!(heard.recv_timeout(hang()), Ok(Ended { rank: 0, label, incarnation, status: cause }));
}

#[test]
fn p8_a_rank_that_sends_set_up_frames_without_end_is_lost_or_ends_the_call() {
    let (mesh, lost, mut others) = by_hand(2, Duration::from_millis(300));
    let mut other = others.pop().unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            let mut incarnation = 1u64;
            while !done.load(Ordering::Relaxed) {
                if other.write_all(&wire(LABEL, &resume(incarnation))).is_err() {
                    break;
                }
                incarnation += 1;
            }
        });
        let e = meet_one(&mesh, Says::new("here")).err().expect("it never answers");
        assert!(matches!(e, Error::TimedOut { .. } | Error::PeerLost { rank: 1 }), "{e}");
        done.store(true, Ordering::Relaxed);
    });
    // Messages END for queue pairs that no rank has take no room, in any order.
    let (_mesh, _lost, mut others) = by_hand(2, hang());
    for incarnation in (1..100_000u64).rev() {
        others[0].write_all(&wire(LABEL, &end_of(incarnation))).unwrap();
    }
    others[0].write_all(&wire(5, b"heard")).unwrap();
    assert_eq!(_mesh.recv(1, 5).unwrap().0, b"heard");
    assert!(_mesh.shared.inbox.state().frames.is_empty());
    drop(lost);
}
