//! The pair of endpoints over TCP: both ends are in this process, and their streams go over loopback.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_link::Link;
use pushgate_link_tcp::{Config, Host, HostError, Io, Readiness, TcpLink, TcpOpening, Tuning};

use super::settled::{self, Settled};
use super::{Carrier, Memory, carrier};

/// Whether the suite runs over TCP.
pub fn chosen() -> bool {
    carrier() == Carrier::Tcp
}

/// Where all links of the process meet. What sends and receives their bytes is chosen here.
fn host() -> &'static Arc<Host> {
    static HOST: OnceLock<Arc<Host>> = OnceLock::new();
    let io = match std::env::var("PUSHGATE_TEST_QP").as_deref() {
        Ok("tcp-uring") => Io::Uring,
        _ => Io::Socket,
    };
    let tuning = Tuning { path_timeout: None, io, one_thread: false, tls: false };
    let open = move |tuning| Host::open(&[(Ipv4Addr::LOCALHOST, 0).into()], tuning);
    HOST.get_or_init(|| match open(tuning) {
        Err(HostError::Ring(e)) => {
            eprintln!("not run over io_uring, but over sockets: {e}");
            open(Tuning { io: Io::Socket, ..tuning }).unwrap()
        }
        host => host.unwrap(),
    })
}

fn allocate(name: &str, bytes: usize) -> Result<SharedMemory, pushgate_driver_shim::ShimError> {
    SharedMemory::builder(name, bytes).huge_pages(HugePages::Never).create()
}

/// One end of a queue pair over TCP.
#[derive(Clone)]
pub struct Wire {
    qp: Arc<Mutex<TcpLink>>,
    peer: Arc<Mutex<TcpLink>>,
    pub mirror: Arc<SharedMemory>,
    peer_geometry: Geometry,
}

/// An end of a link, the copy of its peer's window, and the peer's rings.
type Joined = (TcpLink, Arc<SharedMemory>, Geometry);

/// Joins both ends. `memory` is that of the two sides; `posted_receives` says which of them post receives.
fn join(memory: [&Memory; 2], posted_receives: [bool; 2]) -> [Joined; 2] {
    let open = |i: usize| {
        let posted_receives = posted_receives[i];
        let config = Config {
            streams: 2,
            checksum: true,
            posted_receives,
            ahead: 0,
            thrifty: false,
            beat: 1_000_000_000,
        };
        let meeting = host().meeting(i == 0, &Readiness::new().unwrap());
        TcpOpening::new(config, memory[i].geometry, memory[i].window.clone(), meeting).unwrap()
    };
    let (a, b) = (open(0), open(1));
    let (from_a, from_b) = (a.offer(), b.offer());
    let a = a.prepare(memory[1].geometry.rank, &from_b, &mut allocate).unwrap();
    let b = b.prepare(memory[0].geometry.rank, &from_a, &mut allocate).unwrap();
    let mut ends = [a, b].map(|end| {
        let (mirror, geometry) = (end.mirror().clone(), end.peer_geometry());
        (end.join().0, mirror, geometry)
    });
    let start = Instant::now();
    // Both are asked in each turn: asking moves them on.
    while !ends.iter_mut().fold(true, |all, end| end.0.joined().unwrap() & all) {
        assert!(start.elapsed() < pushgate_tests::hang(), "the ends do not meet");
        std::thread::sleep(Duration::from_micros(100));
    }
    ends
}

/// Both ends of a queue pair whose messages arrive when the kernel brings them.
pub fn endpoints(memory: [&Memory; 2], options: QpOptions) -> [Endpoint; 2] {
    let mut own = memory.into_iter();
    join(memory, [options.posted_receives; 2]).map(|(link, _, geometry)| {
        let own = own.next().expect("two ends");
        let (work, control) = (own.work_read.clone(), own.control.clone());
        Endpoint::new(work, control, own.geometry, geometry, Box::new(link), options).unwrap()
    })
}

/// Both ends of a queue pair. What one end has sent is there when the other end looks.
pub fn connect(memory: [&Memory; 2], posted_receives: [bool; 2]) -> [Wire; 2] {
    let [a, b] = join(memory, posted_receives)
        .map(|(link, mirror, geometry)| (Arc::new(Mutex::new(link)), mirror, geometry));
    let wire = |own: &(Arc<Mutex<TcpLink>>, Arc<SharedMemory>, Geometry), peer: &Arc<Mutex<TcpLink>>| Wire {
        qp: own.0.clone(),
        peer: peer.clone(),
        mirror: own.1.clone(),
        peer_geometry: own.2,
    };
    [wire(&a, &b.0), wire(&b, &a.0)]
}

impl Wire {
    pub fn endpoint(&self, memory: &Memory, options: QpOptions) -> Endpoint {
        Endpoint::new(
            memory.work_read.clone(),
            memory.control.clone(),
            memory.geometry,
            self.peer_geometry,
            Box::new(Settled(self.clone())),
            options,
        )
        .unwrap()
    }
}

/// Asks again and again, until hope is lost.
fn wait(what: &str, mut over: impl FnMut() -> bool) {
    let start = Instant::now();
    while !over() {
        assert!(start.elapsed() < pushgate_tests::hang(), "the link over TCP does not {what}");
        std::thread::yield_now();
    }
}

impl settled::Wire for Wire {
    type Carrier = TcpLink;

    fn qp(&self) -> MutexGuard<'_, TcpLink> {
        self.qp.lock().unwrap()
    }

    fn settle(&self) {
        wait("come to rest", || self.qp().passes_all_to(&mut self.peer.lock().unwrap()));
    }

    fn stop(&self, now: u64) {
        let start = Instant::now();
        wait("stop", || self.qp().stopped(now + start.elapsed().as_nanos() as u64));
        // The other end has heard of it when it looks next.
        wait("end at the other end", || self.peer.lock().unwrap().hears_no_more());
    }
}
