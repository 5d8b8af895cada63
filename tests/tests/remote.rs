//! Tests the engine as a process of its own: two programs on one server, and what a broken or
//! hostile program can do to the server, which must be nothing.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{self, Ringer};
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::fdpass::send_message;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record, lap_of};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_engine::engine::{Engine, EngineError, EngineOptions, QpId};
use pushgate_engine::idle::Wake;
use pushgate_engine::proxy::Proxy;
use pushgate_link::ring;
use pushgate_service::remote::RemoteEngine;
use pushgate_service::server::{ServerOptions, bind, serve};
use pushgate_service::wire::{self, Answer, Refusal, Reply, Request};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

#[path = "common/programs.rs"]
mod programs;

use programs::*;

/// Held by each test, because tests count descriptors and engines need a core.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn messages_cross_the_engines_of_two_programs() {
    let _one = alone();
    let server = server();
    let (a, b) = (server.program("a"), server.program("b"));
    let (pa, pb): (&dyn Proxy, &dyn Proxy) = (&a.proxy, &b.proxy);
    assert_eq!(pa.place(), "process");
    let mut pair = Pair::new(pa, a.bell(), pb, b.bell());
    pair.a_to_b(100);
    pair.b_to_a(100);

    // Read in place: the receiver reads the sender's window.
    let sent: Vec<u64> = (0..16).map(|i| 0x1111 * i).collect();
    for (word, value) in pair.a.window.words(0, 16).iter().zip(&sent) {
        word.store(*value, Ordering::Relaxed);
    }
    let record = Record { length: 128, place: 0, place_offset: 2, tag: 77, ..Record::new(Opcode::Send) };
    pair.a.post(record, &[], a.bell());
    let (got, _) = pair.b.receive();
    assert_eq!((got.tag, got.place, got.length, got.flags), (77, 0, 128, 0));
    pair.b.release(b.bell());
    pair.a.retired();

    // A put into a region, its signal, and its completion.
    let region = SharedMemory::builder("region", 4096).huge_pages(HugePages::Never).create().unwrap();
    let region = Arc::new(region);
    let rkey = pb.add_shared_region(pair.b_qp, &region).unwrap();
    let record = Record {
        flags: Record::WITH_SIGNAL | Record::SIGNALED,
        length: 128,
        place: 2,
        place_offset: 2,
        rkey,
        remote_offset: 512,
        signal: 5,
        signal_value: 9,
        id: 4242,
        ..Record::new(Opcode::Put)
    };
    for (word, value) in pair.a.window.words(128, 16).iter().zip(&sent) {
        word.store(value + 1, Ordering::Relaxed);
    }
    pair.a.post(record, &[], a.bell());
    let signal = &pair.b.control.words(abi::PUSHGATE_CTL_SIGNALS as usize + 5 * 8, 1)[0];
    until("the signal", || ring::observe(signal) == 9);
    for (word, value) in region.words(512, 16).iter().zip(&sent) {
        assert_eq!(word.load(Ordering::Relaxed), value + 1);
    }
    let cqe = &pair.a.control.words(pair.a.g.control_cq_offset(), 2)[0];
    until("the CQE", || ring::observe(cqe) >> 56 == lap_of(0, pair.a.g.cq_log) as u64);
    assert_eq!(cqe.load(Ordering::Relaxed) as u32, 4242);
    assert!(pb.remove_region(pair.b_qp, rkey).unwrap());
    assert!(!pb.remove_region(pair.b_qp, rkey).unwrap());

    assert_eq!(pb.status(pair.b_qp).unwrap(), None);
    let counters = pb.counters().unwrap();
    assert_eq!((counters.delivered, counters.released), (102, 100));
    let last = pa.remove_qp(pair.a_qp).unwrap();
    assert_eq!(last.retired, 102);
    assert!(matches!(pa.status(pair.a_qp), Err(EngineError::NoQp(_))));
    assert!(matches!(pa.remove_qp(QpId(99)), Err(EngineError::NoQp(99))));
    let status = Status { code: abi::PUSHGATE_TIMED_OUT as u8, rank: Some(3), detail: 8 };
    pb.fail(Some(pair.b_qp), status).unwrap();
    assert_eq!(pb.status(pair.b_qp).unwrap(), Some(status));
    assert_eq!(pair.b.status(), Some(status));
}

#[test]
fn a_thread_and_a_process_are_peers_all_the_same() {
    let _one = alone();
    let server = server();
    let b = server.program("b");
    let bell = EventFd::new().unwrap();
    let engine = Engine::start(bell.try_clone().unwrap(), EngineOptions::default()).unwrap();
    let (pa, pb): (&dyn Proxy, &dyn Proxy) = (&engine, &b.proxy);
    assert_eq!((pa.place(), pb.place()), ("thread", "process"));
    let mut pair = Pair::new(pa, &bell, pb, b.bell());
    pair.a_to_b(50);
    pair.b_to_a(50);

    let mut mine = vec![0u64; 64];
    let address = mine.as_mut_ptr() as usize;
    // SAFETY: nothing is sent there, and the region is removed before the vector is dropped.
    let key = unsafe { pa.add_host_region(pair.a_qp, address, 512, None) }.unwrap();
    assert!(pa.remove_region(pair.a_qp, key).unwrap());
    // SAFETY: the call is refused, so nothing is registered.
    let refused = unsafe {
        [
            pb.add_host_region(pair.b_qp, address, 512, None),
            pb.add_device_region(pair.b_qp, 0x1000, 512, None),
        ]
    };
    for refused in refused {
        let why = remote_sentence(refused);
        assert!(why.contains("shared memory") && why.contains("proxy = thread"), "{why}");
    }
    pair.a_to_b(3);
}

#[test]
fn p8_a_program_that_dies_disturbs_its_peers_alone() {
    let _one = alone();
    let server = server();
    let (a, b, c) = (server.program("a"), server.program("b"), server.program("c"));
    let mut with_dying = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
    let mut other = Pair::new(&b.proxy, b.bell(), &c.proxy, c.bell());
    with_dying.a_to_b(5);
    other.a_to_b(5);
    // As if the program were killed: no Bye.
    rustix::net::shutdown(a.proxy.stream(), rustix::net::Shutdown::Both).unwrap();
    // P7: its peer is told which rank was lost, although it was not waiting for anything yet.
    let status = with_dying.b.ends_with(abi::PUSHGATE_PEER_LOST);
    assert_eq!(status.rank, Some(0));
    until("lost", || a.proxy.lost());
    assert!(remote_sentence(a.proxy.counters()).contains("closed"));
    assert!(remote_sentence(a.proxy.counters()).contains("lost earlier"));
    other.a_to_b(20);
    other.b_to_a(20);
    assert!(!b.proxy.lost() && !c.proxy.lost());
    assert_eq!(b.proxy.status(other.a_qp).unwrap(), None);
    server.still_works();
}

#[test]
fn a_program_that_says_bye_is_not_lost_to_its_peers() {
    let _one = alone();
    let server = server();
    let (a, b) = (server.program("a"), server.program("b"));
    let own = a.proxy.ringer().as_fd().try_clone_to_owned().unwrap();
    let own = Ringer::from_fd(own).unwrap();
    let mut pair = Pair::new(&a.proxy, &own, &b.proxy, b.bell());
    pair.a_to_b(5);
    drop(a);
    // Bye is answered once the engine has ended.
    pair.a.ends_with(abi::PUSHGATE_ABORTED);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(b.proxy.status(pair.b_qp).unwrap(), None);
}

#[test]
fn p7_a_server_that_stops_ends_all_waits() {
    let _one = alone();
    let mut server = server();
    let (a, b) = (server.program("a"), server.program("b"));
    let mut pair = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
    pair.a_to_b(5);
    assert!(!a.proxy.lost());
    server.end().unwrap();
    pair.a.ends_with(abi::PUSHGATE_ABORTED);
    pair.b.ends_with(abi::PUSHGATE_ABORTED);
    assert!(a.proxy.lost() && b.proxy.lost());
    assert!(
        remote_sentence(b.proxy.remove_qp(pair.b_qp))
            .contains("was stopped by the program that it was a part of")
    );
    let why = remote_sentence(RemoteEngine::connect(&server.path, "late"));
    assert!(why.contains("pushgate proxy"), "{why}");
}

#[test]
fn p7_a_proxy_that_does_not_answer_is_an_error() {
    let _one = alone();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let begin = Instant::now();
    let why = remote_sentence(RemoteEngine::over(ours, "x"));
    assert!(why.contains("no answer within 5 s"), "{why}");
    assert!(begin.elapsed() >= wire::TIMEOUT && begin.elapsed() < long());
}

#[test]
fn programs_of_other_releases_are_served_in_the_newest_version_that_both_speak() {
    let _one = alone();
    let server = server();
    for (version, newest, spoken) in [(2, None, 2), (1, Some(2), 2), (2, Some(9), 3), (3, None, 3)] {
        let stream = server.dial();
        let (bell, _ringer) = bell::pair().unwrap();
        wire::send(&stream, &hello(version, newest, "of another release"), &[bell.handle()]).unwrap();
        let Ok(Answer::Welcome { version }) = answer(&stream) else { panic!("{version} to {newest:?}") };
        assert_eq!(version, spoken);
        wire::send(&stream, &Request::Bye, &[]).unwrap();
        assert!(matches!(answer(&stream), Ok(Answer::Done)));
    }
}

#[test]
fn a_version_too_far_away_is_refused_with_a_sentence() {
    let _one = alone();
    let server = server();
    let stream = server.dial();
    let (bell, _ringer) = bell::pair().unwrap();
    let hello = hello(4, Some(5), "newer");
    wire::send(&stream, &hello, &[bell.handle()]).unwrap();
    let why = sentence(answer(&stream));
    assert!(why.contains("speaks version 4 to 5, expected 2 to 3"), "{why}");
    assert_eq!(wire::recv::<Reply>(&stream).unwrap_err().kind(), ErrorKind::UnexpectedEof);

    let (ours, theirs) = UnixStream::pair().unwrap();
    wire::send(&theirs, &Reply::Ok(Answer::Welcome { version: 9 }), &[]).unwrap();
    let why = remote_sentence(RemoteEngine::over(ours, "older"));
    assert!(why.contains("version 9"), "{why}");
    server.still_works();
}

#[test]
fn p8_frames_that_are_none_end_their_program_alone() {
    let _one = alone();
    let server = server();
    let (a, b) = (server.program("a"), server.program("b"));
    let mut pair = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
    let frames: [&[u8]; 8] = [
        b"",
        b"\0",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x01\0\0\0\0\0\0\0",
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x09\0\0\0\0\0\0\0\"Counters",
        b"\x04\0\0\0\x01\0\0\0null",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ];
    for frame in frames {
        for stream in [server.dial(), server.raw()] {
            let _ = (&stream).write_all(frame);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            // Perhaps a sentence, then the end.
            while wire::recv::<Reply>(&stream).is_ok() {}
        }
        pair.a_to_b(2);
    }
    // A whole frame that is not of this protocol is answered before the end.
    let stream = server.raw();
    send_message(&stream, b"[1,2,3", &[]).unwrap();
    assert!(sentence(answer(&stream)).contains("not a message"));
    assert_eq!(wire::recv::<Reply>(&stream).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    let stream = server.raw();
    send_message(&stream, "[".repeat(60_000).as_bytes(), &[]).unwrap();
    assert!(sentence(answer(&stream)).contains("not a message"));
    // The order: Hello first, and only once.
    let stream = server.dial();
    wire::send(&stream, &Request::Counters, &[]).unwrap();
    assert!(sentence(answer(&stream)).contains("must be Hello"));
    let stream = server.raw();
    let hello = hello(wire::VERSIONS.oldest(), None, "");
    wire::send(&stream, &hello, &[]).unwrap();
    assert!(sentence(answer(&stream)).contains("said before"));
    server.still_works();
    pair.a_to_b(2);
}

fn ask(stream: &UnixStream, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
    wire::send(stream, request, fds).unwrap();
    answer(stream)
}

fn unsealed(bytes: usize) -> OwnedFd {
    let fd = memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes as u64).unwrap();
    fd
}

fn sealed(bytes: usize) -> SharedMemory {
    SharedMemory::builder("sealed", bytes).huge_pages(HugePages::Never).create().unwrap()
}

#[test]
fn p8_descriptors_that_are_wrong_are_refused_by_name() {
    let _one = alone();
    let server = server();
    let (mine, peer) = (Side::new(0), Side::new(1));
    let good = [mine.work.fd(), mine.control.fd(), mine.link.fd(), peer.link.fd(), peer.window.fd()];
    let add_with = |bell, peer_bell| Request::AddQp {
        options: options(1),
        wake: Wake::Doorbell,
        bell,
        peer_bell,
        session: None,
    };
    let add = |peer_bell| add_with(false, peer_bell);
    let both = add_with(true, true);
    let stream = server.raw();
    let event = EventFd::new().unwrap();
    let (bell, ringer) = bell::pair().unwrap();

    // Wrong numbers of descriptors.
    for n in 0..5 {
        for peer_bell in [false, true] {
            sentence(ask(&stream, &add(peer_bell), &good[..n]));
        }
    }
    let six = [good[0], good[1], good[2], good[3], good[4], ringer.as_fd()];
    let seven = [good[0], good[1], good[2], good[3], good[4], bell.handle(), ringer.as_fd()];
    assert!(sentence(ask(&stream, &add(false), &six)).contains("5 descriptors"));
    assert!(sentence(ask(&stream, &add(true), &good)).contains("6 descriptors"));
    assert!(sentence(ask(&stream, &Request::Counters, &[event.as_fd()])).contains("none belong"));
    assert!(sentence(ask(&stream, &both, &six)).contains("7 descriptors"));

    // Wrong kinds of descriptors.
    let (pipe_read, pipe_write) = rustix::pipe::pipe().unwrap();
    let file = fs::File::open("/proc/self/exe").unwrap();
    let (unsealed, small, page, large) = (unsealed(1 << 20), sealed(100), sealed(4096), sealed(1 << 20));
    let bad = [
        pipe_read.as_fd(),
        pipe_write.as_fd(),
        file.as_fd(),
        event.as_fd(),
        ringer.as_fd(),
        stream.as_fd(),
        unsealed.as_fd(),
        small.fd(),
        page.fd(),
        large.fd(),
    ];
    for (i, name) in ["work", "control", "link", "peer's link", "peer's window"].iter().enumerate() {
        for (j, fd) in bad.iter().enumerate() {
            // A window has no header, so one page is a window, and so is a larger size.
            if i == 4 && j >= 8 {
                continue;
            }
            let mut fds = good;
            fds[i] = *fd;
            let why = sentence(ask(&stream, &add(false), &fds));
            assert!(why.contains(name), "{name}, {j}: {why}");
        }
    }
    for fd in [pipe_write.as_fd(), large.fd(), stream.as_fd(), event.as_fd()] {
        let why = sentence(ask(&stream, &add(true), &[good[0], good[1], good[2], good[3], good[4], fd]));
        assert!(why.contains("peer's bell") && why.contains("SOCK_SEQPACKET"), "{why}");
        let mut fds = seven;
        fds[5] = fd;
        let why = sentence(ask(&stream, &both, &fds));
        assert!(why.starts_with("bell") && why.contains("SOCK_SEQPACKET"), "{why}");
    }
    // Segments in each other's place, a segment of another geometry, and one that cannot be
    // written.
    let why = sentence(ask(&stream, &add(false), &[good[1], good[0], good[2], good[3], good[4]]));
    assert!(why.contains("kind"), "{why}");
    let other = SharedMemory::builder("work", Geometry { slots_log: 9, ..geometry(0) }.work_bytes())
        .huge_pages(HugePages::Never)
        .create()
        .unwrap();
    write_header(&other, Segment::Work, &Geometry { slots_log: 9, ..geometry(0) }).unwrap();
    let why = sentence(ask(&stream, &add(false), &[other.fd(), good[1], good[2], good[3], good[4]]));
    assert!(why.contains("work segment says"), "{why}");
    mine.link.words(0, 1)[0].store(7, Ordering::Relaxed);
    let why = sentence(ask(&stream, &add(false), &good));
    assert!(why.contains("link segment") && why.contains("PUSHGATE"), "{why}");
    mine.link.words(0, 1)[0].store(abi::PUSHGATE_MAGIC, Ordering::Relaxed);
    let readers = Side::new(0);
    readers.control.seal_against_writers().unwrap();
    let why =
        sentence(ask(&stream, &add(false), &[good[0], readers.control.fd(), good[2], good[3], good[4]]));
    assert!(why.contains("control segment") && why.contains("sealed against writers"), "{why}");

    // After all that, the same connection accepts a correct request.
    let Ok(Answer::Qp(qp)) = ask(&stream, &both, &seven) else { panic!("refused") };
    // Regions: wrong kinds, sizes, queue pairs and keys.
    for fd in [pipe_read.as_fd(), file.as_fd(), unsealed.as_fd()] {
        sentence(ask(&stream, &Request::AddRegion { qp, bytes: 1 << 20 }, &[fd]));
    }
    for bytes in [0, 1, 99, 101, 4096, u64::MAX] {
        sentence(ask(&stream, &Request::AddRegion { qp, bytes }, &[small.fd()]));
    }
    sentence(ask(&stream, &Request::AddRegion { qp, bytes: 100 }, &[]));
    let nobodys = Request::AddRegion { qp: QpId(77), bytes: 100 };
    assert!(matches!(ask(&stream, &nobodys, &[small.fd()]), Err(Refusal::NoQp(77))));
    let Ok(Answer::Key(key)) = ask(&stream, &Request::AddRegion { qp, bytes: 100 }, &[small.fd()]) else {
        panic!("refused")
    };
    let wrong = ask(&stream, &Request::RemoveRegion { qp, key: key ^ 1 }, &[]);
    assert!(matches!(wrong, Ok(Answer::Removed(false))));
    assert!(matches!(ask(&stream, &Request::RemoveRegion { qp, key }, &[]), Ok(Answer::Removed(true))));
    assert!(sentence(ask(&stream, &Request::Fail { qp: None, status: 0 }, &[])).contains("status 0"));
    let nobodys = Request::Fail { qp: Some(QpId(5)), status: 4 };
    assert!(matches!(ask(&stream, &nobodys, &[]), Err(Refusal::NoQp(5))));

    // Wrong descriptors with Hello.
    let hello = hello(wire::VERSIONS.oldest(), None, "x");
    for fds in
        [&[][..], &[pipe_write.as_fd()], &[small.fd()], &[event.as_fd()], &[bell.handle(), bell.handle()]]
    {
        sentence(ask(&server.dial(), &hello, fds));
    }
    server.still_works();
}

/// A random generator (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

#[test]
fn p8_ten_thousand_random_frames_do_nothing() {
    let _one = alone();
    let server = server();
    let (a, b) = (server.program("a"), server.program("b"));
    let mut pair = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
    let seeds = [
        serde_json::to_string(&Request::AddQp {
            options: options(1),
            wake: Wake::Polled,
            bell: false,
            peer_bell: true,
            session: None,
        }),
        serde_json::to_string(&Request::AddRegion { qp: QpId(0), bytes: 4096 }),
        serde_json::to_string(&Request::RemoveRegion { qp: QpId(0), key: 12 }),
        serde_json::to_string(&Request::RemoveQp { qp: QpId(0) }),
        serde_json::to_string(&Request::Fail { qp: Some(QpId(1)), status: 0xffff_ff02 }),
        serde_json::to_string(&Request::Status { qp: QpId(0) }),
        serde_json::to_string(&Request::Counters),
        serde_json::to_string(&hello(1, None, "again")),
    ]
    .map(|s| s.unwrap().into_bytes());
    let side = Side::new(0);
    let ((_bell, ringer), small, (pipe, _pipe)) =
        (bell::pair().unwrap(), sealed(4096), rustix::pipe::pipe().unwrap());
    let any = [
        side.work.fd(),
        side.control.fd(),
        side.link.fd(),
        side.link.fd(),
        side.window.fd(),
        ringer.as_fd(),
        small.fd(),
        pipe.as_fd(),
    ];
    let mut random = Random(0x1234_5678_9abc_def1);
    let mut stream = server.raw();
    let mut answered = 0;
    for n in 0..10_000 {
        let mut bytes = seeds[random.below(seeds.len())].clone();
        for _ in 0..random.below(4) {
            let at = random.below(bytes.len());
            match random.below(5) {
                // Mostly digits: wrong numbers pass the parser.
                0 | 1 if bytes.iter().any(u8::is_ascii_digit) => {
                    let digits: Vec<_> = (0..bytes.len()).filter(|i| bytes[*i].is_ascii_digit()).collect();
                    bytes[digits[random.below(digits.len())]] = b'0' + random.below(10) as u8;
                }
                2 => bytes[at] = random.below(256) as u8,
                3 => bytes.truncate(at.max(1)),
                _ => {
                    let other = &seeds[random.below(seeds.len())];
                    bytes.splice(at..at, other[..random.below(other.len())].iter().copied());
                }
            }
        }
        // In order often enough that a queue pair is accepted now and then.
        let first = if random.below(2) == 0 { 0 } else { random.below(any.len()) };
        let fds = &any[first..(first + random.below(7)).min(any.len())];
        let sent = send_message(&stream, &bytes, fds);
        if sent.is_err() || wire::recv::<Reply>(&stream).is_err() {
            stream = server.raw();
        } else {
            answered += 1;
        }
        if n % 1000 == 0 {
            pair.a_to_b(3);
            pair.b_to_a(3);
        }
    }
    assert!(answered > 1000, "{answered} answered");
    server.still_works();
}

#[test]
fn limits_are_kept_and_named() {
    let _one = alone();
    let g = geometry(0);
    let qp_bytes = (g.work_bytes() + g.control_bytes() + 2 * g.link_bytes() + g.window_bytes()) as u64;
    let server = server_with(|o| {
        o.max_clients = 3;
        o.max_qps = 2;
        o.max_regions = 2;
        o.max_bytes = 2 * qp_bytes + 8192;
    });
    let (a, b) = (server.program("a"), server.program("b"));
    let first = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
    let mut second = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
    let third = || {
        let (x, y) = (Side::new(0), Side::new(1));
        a.proxy.add_qp(&x.fds(&y, None), options(1), Wake::Doorbell)
    };
    let why = remote_sentence(third());
    assert!(why.contains("2 queue pairs") && why.contains("limit"), "{why}");

    let (page, two) = (Arc::new(sealed(4096)), Arc::new(sealed(12288)));
    let why = remote_sentence(a.proxy.add_region(first.a_qp, &two));
    assert!(why.contains("12288") && why.contains("limit"), "{why}");
    let key = a.proxy.add_region(first.a_qp, &page).unwrap();
    a.proxy.add_region(second.a_qp, &page).unwrap();
    let why = remote_sentence(a.proxy.add_region(first.a_qp, &page));
    assert!(why.contains("2 regions"), "{why}");
    // What is given back can be taken again: a region, then a queue pair.
    assert!(a.proxy.remove_region(first.a_qp, key).unwrap());
    a.proxy.add_region(first.a_qp, &page).unwrap();
    a.proxy.remove_qp(first.a_qp).unwrap();
    third().unwrap();
    a.proxy.add_region(second.a_qp, &page).unwrap();

    let c = server.program("c");
    let why = remote_sentence(RemoteEngine::connect(&server.path, "d"));
    assert!(why.contains("3 programs") && why.contains("limit"), "{why}");
    drop(c);
    until("room for another", || RemoteEngine::connect(&server.path, "d").is_ok());
    second.a_to_b(3);
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|l| l.contains("/memfd:")).count()
}

#[test]
fn nothing_is_left_of_a_program_that_is_gone() {
    let _one = alone();
    let before = (descriptors(), mappings());
    {
        let server = server();
        let idle = (descriptors(), mappings());
        for round in 0..20 {
            let (a, b) = (server.program("a"), server.program("b"));
            let mut pair = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
            pair.a_to_b(2);
            let page = Arc::new(sealed(4096));
            a.proxy.add_region(pair.a_qp, &page).unwrap();
            let rejected = Side::new(3);
            rejected.link.words(0, 1)[0].store(0, Ordering::Relaxed);
            let fds = rejected.fds(&pair.b, Some(bell::pair().unwrap()));
            remote_sentence(a.proxy.add_qp(&fds, options(1), Wake::Doorbell));
            if round % 2 == 0 {
                rustix::net::shutdown(a.proxy.stream(), rustix::net::Shutdown::Both).unwrap();
            }
            let stream = server.raw();
            let _ = send_message(&stream, b"{", &[page.fd()]);
        }
        // The server may have had a file open for a moment, so that there are fewer now.
        until("programs gone", || descriptors() <= idle.0 && mappings() <= idle.1);
    }
    until("server gone", || descriptors() <= before.0 && mappings() <= before.1);
}

#[test]
fn another_user_is_refused_with_a_sentence() {
    let _one = alone();
    if !rustix::process::geteuid().is_root() {
        return pushgate_tests::skip(
            "another_user_is_refused_with_a_sentence: only root can become another user",
        );
    }
    let server = server();
    let path = server.path.clone();
    let nobody = || {
        let uid = rustix::process::Uid::from_raw(65534);
        // Only this thread's user changes, and the thread ends afterwards.
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
    };
    let why = std::thread::scope(|s| {
        let late = s.spawn(|| {
            nobody();
            remote_sentence(RemoteEngine::connect(&path, "nobody"))
        });
        late.join().unwrap()
    });
    assert!(why.contains("user 0's") && why.contains("65534"), "{why}");
    // The other case: an abstract name that another user took first.
    let name = format!("pushgate-squat-{}", std::process::id());
    let squat = std::thread::scope(|s| {
        let squatter = s.spawn(|| {
            nobody();
            UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap()
        });
        squatter.join().unwrap()
    });
    let at = PathBuf::from(format!("@{name}"));
    let why = remote_sentence(RemoteEngine::connect(&at, "root"));
    assert!(why.contains("65534"), "{why}");
    drop(squat);
    server.still_works();
}

#[test]
fn a_socket_has_one_proxy_and_a_private_directory() {
    let _one = alone();
    let base = std::env::temp_dir().join(format!("pushgate-bind-{}", std::process::id()));
    let _ = fs::remove_dir_all(&base);
    fs::DirBuilder::new().mode(0o700).create(&base).unwrap();
    let mode = |dir: &Path| fs::metadata(dir).unwrap().permissions().mode() & 0o7777;

    let path = base.join("made").join("proxy.sock");
    let (listener, file) = bind(&path).unwrap();
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    let error = bind(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    assert!(error.to_string().contains("already"), "{error}");
    // A server that died leaves its socket, which is replaced.
    drop(listener);
    let (_listener, newer) = bind(&path).unwrap();
    drop(file);
    assert!(path.exists(), "an older proxy's end leaves the newer's socket alone");
    drop(newer);
    assert!(!path.exists());

    let other = base.join("file");
    fs::write(&other, "precious").unwrap();
    assert_eq!(bind(&other).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(fs::read(&other).unwrap(), b"precious");
    let open = base.join("open");
    fs::DirBuilder::new().mode(0o700).create(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o750)).unwrap();
    let error = bind(&open.join("s")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.to_string().contains("0700"), "{error}");
    let error = bind(&base.join("x".repeat(200))).unwrap_err();
    assert!(error.to_string().contains("xxx"), "{error}");

    let name = PathBuf::from(format!("@pushgate-one-{}", std::process::id()));
    let held = bind(&name).unwrap();
    assert_eq!(bind(&name).unwrap_err().kind(), ErrorKind::AddrInUse);
    drop(held);
    bind(&name).unwrap();

    // The whole way, through a path.
    let (listener, file) = bind(&path).unwrap();
    let stop = EventFd::new().unwrap();
    let options = ServerOptions::new(stop.try_clone().unwrap());
    let server = std::thread::spawn(move || serve(listener, options));
    let proxy = RemoteEngine::connect(&path, "by path").unwrap();
    assert_eq!(proxy.counters().unwrap().released, 0);
    assert_eq!(bind(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
    stop.ring();
    server.join().unwrap().unwrap();
    drop(file);
    fs::remove_dir_all(&base).unwrap();
}
