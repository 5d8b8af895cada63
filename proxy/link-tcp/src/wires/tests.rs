//! Each test runs over both wires. Where the kernel allows no io_uring the tests say so, and run over sockets alone.

use std::io::{IoSliceMut, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use pushgate_door::{Door, Limits, Purpose, Secret, Terms, dial};
use pushgate_tests::hang;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

/// A wire, the sockets at its other ends, and where its sockets go when it ends in order.
struct End {
    wire: Box<dyn Wire>,
    peers: Vec<TcpStream>,
    finished: Receiver<Vec<Stream>>,
}

/// A wire of the engine that asks `readiness`.
fn made(wires: &Wires, readiness: &Arc<Readiness>, sockets: Vec<TcpStream>, finish: Finish) -> Box<dyn Wire> {
    let streams = sockets.into_iter().map(|socket| Stream::plain(socket).unwrap()).collect();
    wires.wire(streams, finish, readiness).unwrap()
}

/// A wire whose engine has no other one.
fn end(wires: &Wires, streams: usize) -> End {
    end_of(wires, &Readiness::new().unwrap(), streams)
}

fn end_of(wires: &Wires, readiness: &Arc<Readiness>, streams: usize) -> End {
    let (own, peers): (Vec<_>, Vec<_>) = (0..streams).map(|_| loopback().unwrap()).unzip();
    let (to, finished) = channel();
    let wire = made(wires, readiness, own, Box::new(move |streams| to.send(streams).unwrap()));
    End { wire, peers, finished }
}

/// Runs a test over each wire.
fn over_both(test: impl Fn(&Wires)) {
    test(&Wires::choose(Io::Socket, true).unwrap());
    for one_thread in [true, false] {
        match Wires::choose(Io::Uring, one_thread) {
            Ok(wires) => test(&wires),
            Err(e) => eprintln!("not run over io_uring: {e}"),
        }
    }
}

/// Does what a link does in a pass until `done` says so.
fn until(mut done: impl FnMut() -> bool) {
    let limit = Instant::now() + pushgate_tests::hang();
    while !done() {
        assert!(Instant::now() < limit, "it hangs");
        std::thread::yield_now();
    }
}

/// Numbers that look random and are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

/// The byte at a place of a stream.
fn byte(stream: usize, at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9) >> 11) as u8 ^ stream as u8
}

/// Memory of a test that wires read or write. Rust does not look at it but by `get` and `set`.
struct Memory(Vec<std::cell::UnsafeCell<u8>>);

impl Memory {
    fn new(bytes: usize) -> Self {
        Memory((0..bytes).map(|_| std::cell::UnsafeCell::new(0)).collect())
    }

    fn piece(&self, at: usize, bytes: usize) -> Piece {
        Piece { address: self.0[at..][..bytes].as_ptr() as usize, bytes }
    }

    fn get(&self, at: usize) -> u8 {
        // SAFETY: it lies in the vector; the kernel may write it meanwhile.
        unsafe { self.0[at].get().read_volatile() }
    }

    fn set(&self, at: usize, to: u8) {
        // SAFETY: as above.
        unsafe { self.0[at].get().write_volatile(to) };
    }
}

/// One way of one stream: what is left of the pieces that are being sent, and how far both ends are.
struct Way {
    stream: usize,
    from: Memory,
    /// Headers, by their numbers, with the end of each in the stream.
    heads: Memory,
    ends: Vec<u64>,
    to: Memory,
    pieces: Vec<Piece>,
    /// Bytes that pieces were made of, those that were sent, and those that have come.
    filled: u64,
    sent: u64,
    received: u64,
    into: Option<Vec<Piece>>,
}

/// Headers of a way that the wire may still read.
const HEADS: usize = 4;
/// Bytes of memory of a way.
const ROOM: usize = 512 << 10;

impl Way {
    fn new(stream: usize) -> Self {
        let (from, heads, to) = (Memory::new(ROOM), Memory::new(96 * HEADS), Memory::new(ROOM));
        Way {
            stream,
            from,
            heads,
            ends: vec![0; HEADS],
            to,
            pieces: Vec::new(),
            filled: 0,
            sent: 0,
            received: 0,
            into: None,
        }
    }

    /// A few bytes apart, as a header, and payload; they go to where the wire reads no more.
    fn fill(&mut self, wire: &dyn Wire, numbers: &mut Numbers, all: u64) {
        if !self.pieces.is_empty() || self.filled == all {
            return;
        }
        let room = (ROOM as u64 - (self.filled - wire.settled(self.stream))) as usize;
        let longest = [100, 9_000, 300_000][numbers.below(3)];
        let bytes = (1 + numbers.below(longest)).min(room).min((all - self.filled) as usize);
        let mut head = numbers.below(97).min(bytes);
        match self.ends.iter().position(|end| *end <= wire.settled(self.stream)) {
            Some(at) if head > 0 => {
                (0..head)
                    .for_each(|i| self.heads.set(at * 96 + i, byte(self.stream, self.filled + i as u64)));
                self.pieces.push(self.heads.piece(at * 96, head));
                self.ends[at] = self.filled + head as u64;
            }
            _ => head = 0,
        }
        let mut done = head;
        while done < bytes {
            let at = ((self.filled + done as u64) % ROOM as u64) as usize;
            let n = match self.pieces.len() < 60 {
                true => 1 + numbers.below(bytes - done),
                false => bytes - done,
            };
            let n = n.min(ROOM - at);
            (0..n).for_each(|i| self.from.set(at + i, byte(self.stream, self.filled + (done + i) as u64)));
            self.pieces.push(self.from.piece(at, n));
            done += n;
        }
        self.filled += bytes as u64;
    }

    fn send(&mut self, wire: &mut dyn Wire) {
        if self.pieces.is_empty() {
            return;
        }
        // SAFETY: the memory stays until the wire has stopped, and is written again only when it is settled.
        let mut taken = unsafe { wire.send(self.stream, &self.pieces) }.unwrap();
        self.sent += taken as u64;
        while let Some(first) = self.pieces.first_mut() {
            let n = taken.min(first.bytes);
            taken -= n;
            *first = Piece { address: first.address + n, bytes: first.bytes - n };
            if first.bytes > 0 {
                break;
            }
            self.pieces.remove(0);
        }
        assert_eq!(taken, 0, "more was taken than there was");
    }

    fn receive(&mut self, wire: &mut dyn Wire, numbers: &mut Numbers) {
        let at = (self.received % (ROOM / 2) as u64) as usize;
        let into = self.into.get_or_insert_with(|| {
            let first = 1 + numbers.below(100_000);
            match numbers.below(2) {
                0 => vec![self.to.piece(at, first)],
                _ => vec![self.to.piece(at, first), self.to.piece(at + first, 1 + numbers.below(200))],
            }
        });
        // SAFETY: the memory stays until the wire has stopped, and is read by `get` alone.
        let n = unsafe { wire.receive(self.stream, into) }.unwrap();
        if n > 0 {
            self.into = None;
        }
        for i in 0..n {
            let expected = byte(self.stream, self.received + i as u64);
            assert_eq!(self.to.get(at + i), expected, "byte {}", self.received + i as u64);
        }
        self.received += n as u64;
    }
}

#[test]
fn bytes_of_two_streams_arrive_in_order_out_of_any_pieces() {
    over_both(|wires| {
        const ALL: u64 = 6 << 20;
        let mut ways: Vec<_> = (0..2).map(Way::new).collect();
        let pairs: Vec<_> = (0..2).map(|_| loopback().unwrap()).collect();
        let (left, right): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        left.iter().chain(&right).for_each(|socket| socket.set_nonblocking(true).unwrap());
        let mut left = made(wires, &Readiness::new().unwrap(), left, Box::new(|_| {}));
        let mut right = made(wires, &Readiness::new().unwrap(), right, Box::new(|_| {}));
        let mut numbers = Numbers(7);
        until(|| {
            for way in &mut ways {
                if numbers.below(3) > 0 {
                    way.fill(&*left, &mut numbers, ALL);
                    way.send(&mut *left);
                }
                if numbers.below(3) > 0 && way.received < ALL {
                    way.receive(&mut *right, &mut numbers);
                }
            }
            left.submit().unwrap();
            right.submit().unwrap();
            ways.iter().all(|way| way.received == ALL && left.settled(way.stream) == ALL)
        });
        assert!(ways.iter().all(|way| way.sent == ALL));
        until(|| left.stopped() & right.stopped());
    });
}

#[test]
fn a_full_stream_takes_no_more_until_the_peer_reads() {
    over_both(|wires| {
        let End { mut wire, mut peers, .. } = end(wires, 1);
        let (memory, into) = (Memory::new(1 << 20), Memory::new(64));
        (0..1 << 20).for_each(|i| memory.set(i, byte(0, i as u64)));
        let (mut taken, mut quiet) = (0u64, 0);
        // Loopback is quick: what is not taken within 1,000 passes waits for the peer.
        until(|| {
            // What the sockets hold is bounded, and less than 64 times this memory.
            assert!(taken < 64 << 20, "the stream is never full");
            let at = (taken % (1 << 20)) as usize;
            // SAFETY: the memory stays until the wire has stopped, and keeps its bytes.
            let n = unsafe { wire.send(0, &[memory.piece(at, (1 << 20) - at)]) }.unwrap();
            // SAFETY: as above.
            assert_eq!(unsafe { wire.receive(0, &[into.piece(0, 64)]) }.unwrap(), 0);
            wire.submit().unwrap();
            taken += n as u64;
            quiet = if n > 0 { 0 } else { quiet + 1 };
            quiet == 1000
        });
        // What was told before may call for one more look; after that nothing can go on.
        until(|| !wire.prepare_sleep(&|_| true));
        assert!(!ready(&*wire, 0));
        let (mut bytes, mut read) = (vec![0; 1 << 20], 0u64);
        peers[0].set_nonblocking(true).unwrap();
        let full = taken;
        until(|| {
            if let Ok(n) = peers[0].read(&mut bytes) {
                (0..n).for_each(|i| assert_eq!(bytes[i], byte(0, (read + i as u64) % (1 << 20))));
                read += n as u64;
            }
            let at = (taken % (1 << 20)) as usize;
            // SAFETY: as above.
            taken += unsafe { wire.send(0, &[memory.piece(at, (1 << 20) - at)]) }.unwrap() as u64;
            wire.submit().unwrap();
            taken > full
        });
        until(|| wire.stopped());
    });
}

/// Both ends of an encrypted connection.
fn encrypted() -> [Stream; 2] {
    let terms = Terms { secret: Secret::new(&[7; 32]).unwrap(), purpose: Purpose::MESH, tls: true };
    let door = Door::listen([127, 0, 0, 1].into(), 0..=0, terms.clone(), Limits::default()).unwrap();
    let (at, soon) = (door.local_addr().unwrap(), Instant::now() + hang());
    std::thread::scope(|s| {
        let dials = s.spawn(|| dial(at, &terms, b"", soon).unwrap());
        let arrival = door.wait(Some(soon), None).unwrap();
        [arrival.unwrap().stream, dials.join().unwrap()]
    })
}

#[test]
fn an_encrypted_stream_that_is_full_takes_no_more_until_the_peer_reads() {
    const SIZE: usize = 1 << 20;
    let [own, peer] = encrypted();
    let mut wire = Sockets::new(vec![own], Box::new(|_| ()), &Readiness::new().unwrap());
    let (memory, into) = (Memory::new(SIZE), Memory::new(64));
    (0..SIZE).for_each(|i| memory.set(i, byte(0, i as u64)));
    let send = |wire: &mut Sockets, taken: u64| {
        let at = (taken % SIZE as u64) as usize;
        // SAFETY: the memory stays until the wire has stopped, and keeps its bytes.
        let n = unsafe { wire.send(0, &[memory.piece(at, SIZE - at)]) };
        // SAFETY: as above; nothing comes.
        assert_eq!(unsafe { wire.receive(0, &[into.piece(0, 64)]) }.unwrap(), 0);
        wire.submit().unwrap();
        n.expect("a full stream is no broken one") as u64
    };
    let (mut taken, mut quiet) = (0u64, 0);
    until(|| {
        assert!(taken < 64 << 20, "the stream is never full");
        let n = send(&mut wire, taken);
        taken += n;
        quiet = if n > 0 { 0 } else { quiet + 1 };
        quiet == 1000
    });
    // What was told before may call for one more look; after that the engine may sleep.
    until(|| !wire.prepare_sleep(&|_| true));
    assert!(!ready(&wire, 0));
    let (mut bytes, mut read) = (vec![0; SIZE], 0u64);
    let mut take = || {
        if let Ok(n) = peer.recv(&mut [IoSliceMut::new(&mut bytes)]) {
            (0..n).for_each(|i| assert_eq!(bytes[i], byte(0, (read + i as u64) % SIZE as u64)));
            read += n as u64;
        }
        read
    };
    // Room wakes the engine, which sleeps.
    until(|| {
        take();
        ready(&wire, 0)
    });
    // Everything arrives.
    let (full, mut more) = (taken, 0);
    until(|| {
        let read = take();
        if more < 4 << 20 {
            let n = send(&mut wire, taken);
            (taken, more) = (taken + n, more + n);
        } else {
            wire.submit().unwrap();
        }
        more >= 4 << 20 && read == taken
    });
    assert!(taken > full);
    until(|| wire.stopped());
}

/// Whether what wakes for a wire is readable within `ms` milliseconds.
fn ready(wire: &dyn Wire, ms: i64) -> bool {
    let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
    wire.wakes(&mut fds);
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let limit = Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 };
    poll(&mut fds, Some(&limit)).unwrap() > 0
}

fn hang_ms() -> i64 {
    pushgate_tests::hang().as_millis() as i64
}

#[test]
fn nothing_is_written_once_the_wire_has_stopped() {
    over_both(|wires| {
        let End { mut wire, mut peers, .. } = end(wires, 2);
        let memory = Memory::new(8192);
        let mut received = 0;
        let receive = |wire: &mut dyn Wire, stream: usize| {
            // SAFETY: the memory stays until the end of the test, and is read by `get` alone.
            unsafe { wire.receive(stream, &[memory.piece(stream * 4096, 4096)]) }.unwrap()
        };
        peers[0].write_all(&[1; 100]).unwrap();
        until(|| {
            received += receive(&mut *wire, 0);
            receive(&mut *wire, 1);
            wire.submit().unwrap();
            received > 0
        });
        // Both streams are received into again, and bytes are on their way.
        receive(&mut *wire, 0);
        wire.submit().unwrap();
        peers[0].write_all(&[2; 100]).unwrap();
        until(|| wire.stopped());
        let before: Vec<u8> = (0..8192).map(|i| memory.get(i)).collect();
        // The peer may find the stream reset.
        let _ = peers[0].write_all(&[3; 4000]);
        let _ = peers[1].write_all(&[3; 4000]);
        std::thread::sleep(Duration::from_millis(20));
        assert!((0..8192).all(|i| memory.get(i) == before[i]));
        assert!(!before.contains(&3));
        assert!(wire.stopped(), "it stays so");
    });
}

#[test]
fn a_wire_that_is_stopped_with_bytes_unsent_lets_their_memory_go() {
    over_both(|wires| {
        let End { mut wire, peers, .. } = end(wires, 1);
        let memory = Memory::new(1 << 20);
        let mut taken = 0;
        for _ in 0..200 {
            // SAFETY: the memory stays until the end of the test.
            taken += unsafe { wire.send(0, &[memory.piece(0, 1 << 20)]) }.unwrap();
            wire.submit().unwrap();
        }
        assert!(taken > 0);
        // The peer reads nothing, so what was sent without a copy is read from the memory until the streams end.
        until(|| wire.stopped());
        drop(peers);
    });
}

#[test]
fn the_end_of_a_stream_is_an_error_after_its_last_bytes() {
    over_both(|wires| {
        let End { mut wire, mut peers, .. } = end(wires, 1);
        peers[0].write_all(&[9; 5]).unwrap();
        drop(peers);
        let memory = Memory::new(64);
        let (mut received, mut ended) = (0, None);
        until(|| {
            // SAFETY: the memory stays until the wire has stopped.
            match unsafe { wire.receive(0, &[memory.piece(received, 8)]) } {
                Ok(n) => received += n,
                Err(e) => ended = Some(e.kind()),
            }
            wire.submit().unwrap();
            ended.is_some()
        });
        assert_eq!((received, ended), (5, Some(io::ErrorKind::UnexpectedEof)));
        assert!((0..5).all(|i| memory.get(i) == 9));
        // What was told and not looked at yet may call for another look.
        until(|| !wire.prepare_sleep(&|_| false));
        until(|| wire.stopped());
    });
}

#[test]
fn a_sleeper_is_woken_by_bytes() {
    over_both(|wires| {
        let End { mut wire, mut peers, .. } = end(wires, 2);
        let memory = Memory::new(64);
        let receive = |wire: &mut dyn Wire, stream: usize| {
            // SAFETY: the memory stays until the wire has stopped.
            unsafe { wire.receive(stream, &[memory.piece(stream * 32, 32)]) }.unwrap()
        };
        for stream in [0, 1, 1, 0] {
            until(|| {
                assert_eq!(receive(&mut *wire, 0) + receive(&mut *wire, 1), 0);
                wire.submit().unwrap();
                !wire.prepare_sleep(&|_| false)
            });
            assert!(!ready(&*wire, 0), "nothing has come");
            peers[stream].write_all(&[stream as u8; 3]).unwrap();
            assert!(ready(&*wire, hang_ms()), "it sleeps on");
            let mut received = [0; 2];
            until(|| {
                (0..2).for_each(|s| received[s] += receive(&mut *wire, s));
                wire.submit().unwrap();
                received[stream] == 3
            });
            assert_eq!(received[1 - stream], 0);
        }
        until(|| wire.stopped());
    });
}

#[test]
fn a_sleeper_is_woken_by_room() {
    over_both(|wires| {
        let End { mut wire, mut peers, .. } = end(wires, 1);
        let memory = Memory::new(1 << 20);
        let into = Memory::new(64);
        let mut quiet = 0;
        let pass = |wire: &mut dyn Wire| {
            // SAFETY: the memory stays until the wire has stopped.
            let n = unsafe { wire.send(0, &[memory.piece(0, 1 << 20)]) }.unwrap();
            // SAFETY: as above.
            assert_eq!(unsafe { wire.receive(0, &[into.piece(0, 64)]) }.unwrap(), 0);
            wire.submit().unwrap();
            n
        };
        until(|| {
            quiet = if pass(&mut *wire) > 0 { 0 } else { quiet + 1 };
            quiet > 1000 && !wire.prepare_sleep(&|_| true)
        });
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0; 1 << 20];
            // To the end of the stream, or until it is reset.
            while peers[0].read(&mut bytes).is_ok_and(|n| n > 0) {}
        });
        assert!(ready(&*wire, hang_ms()), "it sleeps on");
        until(|| pass(&mut *wire) > 0);
        until(|| wire.stopped());
        reader.join().unwrap();
    });
}

#[test]
fn what_comes_for_a_link_that_has_looked_keeps_the_engine_awake_when_another_link_has_read_it() {
    over_both(|wires| {
        let readiness = Readiness::new().unwrap();
        let (mut a, mut b) = (end_of(wires, &readiness, 1), end_of(wires, &readiness, 1));
        let memory = Memory::new(64);
        let receive = |wire: &mut dyn Wire, at: usize| {
            // SAFETY: the memory stays until the wires have stopped.
            unsafe { wire.receive(0, &[memory.piece(at, 32)]) }.unwrap()
        };
        until(|| {
            assert_eq!(receive(&mut *a.wire, 0) + receive(&mut *b.wire, 32), 0);
            a.wire.submit().unwrap();
            b.wire.submit().unwrap();
            !a.wire.prepare_sleep(&|_| false) && !b.wire.prepare_sleep(&|_| false)
        });
        a.peers[0].write_all(&[1]).unwrap();
        assert!(ready(&*a.wire, hang_ms()));
        assert_eq!(receive(&mut *b.wire, 32), 0);
        b.wire.submit().unwrap();
        let awake = b.wire.prepare_sleep(&|_| false);
        assert!(awake || ready(&*a.wire, 0), "the engine would sleep on a message");
        until(|| receive(&mut *a.wire, 0) == 1);
        until(|| a.wire.stopped() & b.wire.stopped());
    });
}

#[test]
fn what_comes_for_a_link_of_an_engine_that_sleeps_wakes_it_although_another_link_ends_meanwhile() {
    over_both(|wires| {
        let readiness = Readiness::new().unwrap();
        let (mut a, mut b) = (end_of(wires, &readiness, 1), end_of(wires, &readiness, 1));
        let memory = Memory::new(64);
        let receive = |wire: &mut dyn Wire, at: usize| {
            // SAFETY: the memory stays until the wires have stopped.
            unsafe { wire.receive(0, &[memory.piece(at, 32)]) }.unwrap()
        };
        until(|| {
            assert_eq!(receive(&mut *b.wire, 32) + receive(&mut *a.wire, 0), 0);
            a.wire.submit().unwrap();
            !a.wire.prepare_sleep(&|_| false)
        });
        a.peers[0].write_all(&[1]).unwrap();
        // As a program does whose set-up has failed, on a thread of its own.
        until(|| b.wire.stopped());
        assert!(ready(&*a.wire, hang_ms()), "the engine sleeps on a message");
        until(|| receive(&mut *a.wire, 0) == 1);
        until(|| a.wire.stopped());
    });
}

#[test]
fn a_link_that_was_alone_at_its_engine_misses_nothing_when_another_one_comes_and_goes() {
    over_both(|wires| {
        let readiness = Readiness::new().unwrap();
        let mut a = end_of(wires, &readiness, 1);
        let memory = Memory::new(64);
        // SAFETY: the memory stays until the wires have stopped.
        let receive = |wire: &mut dyn Wire, at| unsafe { wire.receive(0, &[memory.piece(at, 32)]) }.unwrap();
        for round in 0..40 {
            // Bytes that come before the other link, beside it, and after it, each with a look before them and without one.
            let look = |wire: &mut dyn Wire, when: u32| {
                if round >> when & 1 == 1 {
                    assert_eq!(receive(wire, 0), 0);
                    wire.submit().unwrap();
                }
            };
            look(&mut *a.wire, 0);
            a.peers[0].write_all(&[1]).unwrap();
            let mut b = end_of(wires, &readiness, 1);
            until(|| receive(&mut *b.wire, 32) + receive(&mut *a.wire, 0) == 1);
            look(&mut *a.wire, 1);
            a.peers[0].write_all(&[1]).unwrap();
            b.peers[0].write_all(&[1]).unwrap();
            until(|| receive(&mut *b.wire, 32) == 1);
            until(|| receive(&mut *a.wire, 0) == 1);
            look(&mut *a.wire, 2);
            a.peers[0].write_all(&[1]).unwrap();
            if round % 5 == 0 {
                // The other link's question is told of the byte.
                assert_eq!(receive(&mut *b.wire, 32), 0);
            }
            until(|| b.wire.stopped());
            drop(b);
            until(|| receive(&mut *a.wire, 0) == 1);
        }
        until(|| a.wire.stopped());
    });
}

#[test]
fn what_was_taken_arrives_although_the_link_ends() {
    over_both(|wires| {
        let End { mut wire, mut peers, finished } = end(wires, 1);
        let (memory, into) = (Memory::new(200_000), Memory::new(64));
        (0..200_000).for_each(|i| memory.set(i, byte(0, i as u64)));
        let mut taken = 0;
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            peers[0].read_to_end(&mut bytes).unwrap();
            bytes
        });
        until(|| {
            // SAFETY: the memory stays until the wire has stopped.
            taken += unsafe { wire.send(0, &[memory.piece(taken, 200_000 - taken)]) }.unwrap();
            // SAFETY: as above.
            assert_eq!(unsafe { wire.receive(0, &[into.piece(0, 64)]) }.unwrap(), 0);
            wire.submit().unwrap();
            taken == 200_000
        });
        wire.finish(Duration::from_secs(3));
        let sockets = finished.recv_timeout(pushgate_tests::hang()).unwrap();
        until(|| wire.stopped());
        for socket in sockets {
            rustix::net::shutdown(&socket, rustix::net::Shutdown::Write).unwrap();
        }
        let bytes = reader.join().unwrap();
        assert_eq!(bytes.len(), 200_000);
        assert!(bytes.iter().enumerate().all(|(i, b)| *b == byte(0, i as u64)));
    });
}

#[test]
fn a_wire_that_is_dropped_in_mid_flight_touches_its_memory_no_more() {
    over_both(|wires| {
        let End { mut wire, mut peers, .. } = end(wires, 1);
        let memory = Memory::new(64);
        // SAFETY: the memory stays until the end of the test.
        assert_eq!(unsafe { wire.receive(0, &[memory.piece(0, 64)]) }.unwrap(), 0);
        wire.submit().unwrap();
        drop(wire);
        let _ = peers[0].write_all(&[5; 64]);
        std::thread::sleep(Duration::from_millis(20));
        assert!((0..64).all(|i| memory.get(i) == 0));
    });
}

#[test]
fn where_io_uring_is_not_allowed_auto_takes_sockets_and_io_uring_is_refused() {
    let refused = || Err(RingError::Denied("the sysctl kernel.io_uring_disabled is 2"));
    let wires = Wires::choose_from(Io::Auto, true, refused).unwrap();
    assert_eq!(end(&wires, 1).wire.name(), "sockets");
    let why = Wires::choose_from(Io::Uring, true, refused).err().unwrap().to_string();
    assert!(why.contains("kernel.io_uring_disabled is 2") && why.contains("set `tcp-io` to socket"), "{why}");
    let wires = Wires::choose_from(Io::Socket, true, || panic!("no ring is asked for")).unwrap();
    assert_eq!(end(&wires, 1).wire.name(), "sockets");
}

#[test]
fn each_engine_has_a_ring_of_its_own_and_its_links_share_it() {
    let Ok(wires) = Wires::choose(Io::Uring, true) else { return eprintln!("not run over io_uring") };
    let engines = [0, 1].map(|_| Readiness::new().unwrap());
    let ring = |engine: usize| wires.ring(&engines[engine]).unwrap().unwrap();
    assert!(Arc::ptr_eq(&ring(0), &ring(0)) && Arc::ptr_eq(&ring(1), &ring(1)));
    assert!(!Arc::ptr_eq(&ring(0), &ring(1)));
    let rings = wires.rings.as_ref().unwrap();
    drop(engines);
    wires.ring(&Readiness::new().unwrap()).unwrap().unwrap();
    assert_eq!(rings.lock().unwrap().of.len(), 1, "rings of engines that are gone go too");
}

#[test]
fn auto_compares_the_two_and_carries_bytes() {
    let wires = Wires::choose(Io::Auto, true).unwrap();
    let End { mut wire, mut peers, .. } = end(&wires, 1);
    let memory = Memory::new(8);
    peers[0].write_all(&[4; 8]).unwrap();
    let mut received = 0;
    until(|| {
        // SAFETY: the memory stays until the wire has stopped.
        received += unsafe { wire.receive(0, &[memory.piece(received, 8 - received)]) }.unwrap();
        wire.submit().unwrap();
        received == 8
    });
    until(|| wire.stopped());
}
