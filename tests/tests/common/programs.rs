//! Programs of a proxy process and their queue pairs, without kernels: each test stands in for the devices.

#![allow(dead_code)] // Each test file uses its own part.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{self, Bell, Ringer};
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record, inline, set_inline};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_engine::endpoint::QpOptions;
use pushgate_engine::engine::{EngineError, QpId};
use pushgate_engine::idle::Wake;
use pushgate_engine::proxy::{Proxy, QpFds};
use pushgate_link::ring::{self, Look};
use pushgate_service::remote::RemoteEngine;
use pushgate_service::server::{ServerOptions, bind, serve};
use pushgate_service::wire::{self, Answer, Refusal, Reply, Request};

/// A limit against a hang, for what should happen at once.
pub fn long() -> Duration {
    pushgate_tests::hang()
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < long(), "{what}: not within {:?}", long());
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub struct TestServer {
    pub path: PathBuf,
    pub stop: EventFd,
    pub thread: Option<JoinHandle<std::io::Result<()>>>,
}

pub fn server_with(set: impl FnOnce(&mut ServerOptions)) -> TestServer {
    server_behind(|_| {}, set)
}

/// A server whose socket is there before it accepts: `first` gets the socket's name meanwhile.
pub fn server_behind(first: impl FnOnce(&str), set: impl FnOnce(&mut ServerOptions)) -> TestServer {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = PathBuf::from(format!("@pushgate-test-{}-{n}", std::process::id()));
    let (listener, _file) = bind(&path).unwrap();
    first(path.to_str().unwrap().strip_prefix('@').unwrap());
    let stop = EventFd::new().unwrap();
    let mut options = ServerOptions::new(stop.try_clone().unwrap());
    set(&mut options);
    TestServer { path, stop, thread: Some(std::thread::spawn(move || serve(listener, options))) }
}

pub fn server() -> TestServer {
    server_with(|_| {})
}

impl TestServer {
    pub fn program(&self, name: &str) -> Program {
        Program { proxy: RemoteEngine::connect(&self.path, name).unwrap() }
    }

    pub fn dial(&self) -> UnixStream {
        let name = self.path.to_str().unwrap().strip_prefix('@').unwrap();
        let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        stream.set_read_timeout(Some(long())).unwrap();
        stream.set_write_timeout(Some(long())).unwrap();
        stream
    }

    /// Connects and sends Hello, so that a test can then send what `RemoteEngine` would not.
    pub fn raw(&self) -> UnixStream {
        let stream = self.dial();
        let hello = hello(wire::VERSIONS.oldest(), None, "raw");
        let (bell, _ringer) = bell::pair().unwrap();
        wire::send(&stream, &hello, &[bell.handle()]).unwrap();
        assert!(matches!(answer(&stream), Ok(Answer::Welcome { version: 2 })));
        stream
    }

    pub fn end(&mut self) -> std::io::Result<()> {
        self.stop.ring();
        self.thread.take().unwrap().join().unwrap()
    }

    /// Checks that two new programs can pass a message.
    pub fn still_works(&self) {
        let (a, b) = (self.program("good a"), self.program("good b"));
        let mut pair = Pair::new(&a.proxy, a.bell(), &b.proxy, b.bell());
        pair.a_to_b(3);
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if self.thread.is_some() && !std::thread::panicking() {
            self.end().unwrap();
        }
    }
}

pub struct Program {
    pub proxy: RemoteEngine,
}

impl Program {
    pub fn bell(&self) -> &dyn Ring {
        self.proxy.ringer()
    }
}

/// What a producer rings: an engine in another process, or in this one.
pub trait Ring {
    fn ring(&self);
}

impl Ring for Ringer {
    fn ring(&self) {
        Ringer::ring(self);
    }
}

impl Ring for EventFd {
    fn ring(&self) {
        EventFd::ring(self);
    }
}

pub fn hello(version: u32, newest: Option<u32>, name: &str) -> Request {
    Request::Hello { version, newest, name: name.into() }
}

pub fn answer(stream: &UnixStream) -> Reply {
    wire::recv(stream).unwrap().0
}

pub fn sentence(reply: Reply) -> String {
    match reply {
        Err(Refusal::Why(why)) => why,
        other => panic!("{other:?}"),
    }
}

pub fn remote_sentence<T: std::fmt::Debug>(result: Result<T, EngineError>) -> String {
    match result {
        Err(EngineError::Remote(why)) => why,
        other => panic!("{other:?}"),
    }
}

pub fn geometry(rank: u32) -> Geometry {
    Geometry {
        window_log: 6,
        slots_log: 3,
        cq_log: 3,
        rx_log: 3,
        link_log: 3,
        landing_log: 6,
        signals: 8,
        rank,
    }
}

pub fn options(peer: u32) -> QpOptions {
    QpOptions {
        peer,
        roles: false,
        posted_receives: false,
        reader_flushes: false,
        stuck_ns: 60_000_000_000,
        in_place_share: 128,
        slow_ns: 0,
        ungated: false,
        key_seed: peer + 1,
    }
}

/// One end's memory, and the cursors that its device would have.
pub struct Side {
    pub window: Arc<SharedMemory>,
    pub work: Arc<SharedMemory>,
    pub control: Arc<SharedMemory>,
    pub link: Arc<SharedMemory>,
    pub g: Geometry,
    pub sent: u64,
    pub taken: u64,
}

impl Side {
    pub fn new(rank: u32) -> Self {
        Self::of(geometry(rank))
    }

    pub fn of(g: Geometry) -> Self {
        let memory = |name: &str, bytes| {
            Arc::new(SharedMemory::builder(name, bytes).huge_pages(HugePages::Never).create().unwrap())
        };
        let segment = |name, kind| {
            let memory = memory(name, g.bytes(kind));
            write_header(&memory, kind, &g).unwrap();
            memory
        };
        Side {
            window: memory("window", g.window_bytes()),
            work: segment("work", Segment::Work),
            control: segment("control", Segment::Control),
            link: segment("link", Segment::Link),
            g,
            sent: 0,
            taken: 0,
        }
    }

    pub fn fds(&self, peer: &Side, bells: Option<(Bell, Ringer)>) -> QpFds {
        let (bell, peer_bell) = bells.unzip();
        let read = |m: &SharedMemory| {
            Arc::new(ReadOnlyMemory::from_fd(m.fd().try_clone_to_owned().unwrap(), m.len()).unwrap())
        };
        QpFds {
            work: self.work.clone(),
            control: self.control.clone(),
            link: self.link.clone(),
            peer_link: read(&peer.link),
            peer_window: read(&peer.window),
            bell,
            peer_bell,
            peer_pid: Some(std::process::id()),
        }
    }

    pub fn post(&mut self, record: Record, payload: &[u8], bell: &dyn Ring) {
        let mut words = record.encode(0);
        if record.has(Record::INLINE) {
            set_inline(&mut words, record.opcode, payload);
        }
        let ring = self.work.words(abi::PUSHGATE_WORK_RING as usize, 8 << self.g.slots_log);
        ring::publish(ring, self.sent, self.g.slots_log, &words);
        self.sent += 1;
        if ring::must_ring(&self.control.words(abi::PUSHGATE_CTL_SLEEPING as usize, 1)[0]) {
            bell.ring();
        }
    }

    /// Whether fewer than `most` slots are taken.
    pub fn has_room(&self, most: u64) -> bool {
        let credit = &self.control.words(abi::PUSHGATE_CTL_CREDIT as usize, 1)[0];
        let mask = abi::PUSHGATE_CURSOR_MASK as u64;
        let retired = ring::observe(credit) >> abi::PUSHGATE_CURSOR_BITS & mask;
        self.sent.wrapping_sub(retired) & mask < most
    }

    /// Waits until slot `n` and all slots before it have been given back.
    pub fn retired(&self) {
        let credit = &self.control.words(abi::PUSHGATE_CTL_CREDIT as usize, 1)[0];
        let mask = abi::PUSHGATE_CURSOR_MASK as u64;
        let slots = self.sent & mask;
        until("credit", || ring::observe(credit) >> abi::PUSHGATE_CURSOR_BITS & mask == slots);
    }

    pub fn receive(&mut self) -> (Record, [u8; 40]) {
        let ring = self.control.words(self.g.control_rx_offset(), 8 << self.g.rx_log);
        let mut found = None;
        until("a message", || match ring::look(ring, self.taken, self.g.rx_log) {
            Look::Ready(words) => {
                found = Some(words);
                true
            }
            Look::Empty => self.status().is_some(),
            Look::Torn => panic!("torn"),
        });
        let words = found.unwrap_or_else(|| panic!("ended: {:?}", self.status()));
        let record = Record::decode(&words).unwrap_or_else(|e| panic!("{e}"));
        (record, inline(&words, record.opcode))
    }

    pub fn release(&mut self, bell: &dyn Ring) {
        self.taken += 1;
        ring::advance(&self.work.words(abi::PUSHGATE_WORK_CONSUMED as usize, 1)[0], self.taken);
        if ring::must_ring(&self.control.words(abi::PUSHGATE_CTL_SLEEPING as usize, 1)[0]) {
            bell.ring();
        }
    }

    pub fn status(&self) -> Option<Status> {
        Status::from_word(ring::observe(&self.control.words(abi::PUSHGATE_CTL_STATUS as usize, 1)[0]))
    }

    pub fn ends_with(&self, code: u32) -> Status {
        until("a status", || self.status().is_some());
        let status = self.status().unwrap();
        assert_eq!(status.code as u32, code, "{status:?}");
        status
    }
}

/// Both ends of a queue pair: rank 0 in `a`'s engine, rank 1 in `b`'s.
pub struct Pair<'a> {
    pub a: Side,
    pub b: Side,
    pub a_qp: QpId,
    pub b_qp: QpId,
    pub a_bell: &'a dyn Ring,
    pub b_bell: &'a dyn Ring,
}

impl<'a> Pair<'a> {
    pub fn new(a: &dyn Proxy, a_bell: &'a dyn Ring, b: &dyn Proxy, b_bell: &'a dyn Ring) -> Self {
        Self::of(geometry(0), a, a_bell, b, b_bell)
    }

    pub fn of(g: Geometry, a: &dyn Proxy, a_bell: &'a dyn Ring, b: &dyn Proxy, b_bell: &'a dyn Ring) -> Self {
        let (x, y) = (Side::of(g), Side::of(Geometry { rank: 1, ..g }));
        let ((x_bell, rings_x), (y_bell, rings_y)) = (bell::pair().unwrap(), bell::pair().unwrap());
        let a_qp = a.add_qp(x.fds(&y, Some((x_bell, rings_y))), options(1), Wake::Doorbell).unwrap();
        let b_qp = b.add_qp(y.fds(&x, Some((y_bell, rings_x))), options(0), Wake::Doorbell).unwrap();
        Pair { a: x, b: y, a_qp, b_qp, a_bell, b_bell }
    }

    pub fn a_to_b(&mut self, n: u32) {
        Self::messages(&mut self.a, self.a_bell, &mut self.b, self.b_bell, n);
    }

    pub fn b_to_a(&mut self, n: u32) {
        Self::messages(&mut self.b, self.b_bell, &mut self.a, self.a_bell, n);
    }

    pub fn messages(from: &mut Side, from_bell: &dyn Ring, to: &mut Side, to_bell: &dyn Ring, n: u32) {
        for tag in 0..n {
            let payload: Vec<u8> = (0..40).map(|i| (tag * 3 + i) as u8).collect();
            let record =
                Record { flags: Record::INLINE, length: 40, tag, id: tag, ..Record::new(Opcode::Send) };
            from.post(record, &payload, from_bell);
            let (got, bytes) = to.receive();
            assert_eq!((got.opcode, got.tag, got.length), (Opcode::Send, tag, 40));
            assert_eq!(bytes[..], payload[..]);
            to.release(to_bell);
        }
        from.retired();
    }
}
