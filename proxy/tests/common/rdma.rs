//! The pair of endpoints over RDMA: both ends are on one device. Each work request is waited for,
//! so that when one end looks, the other end's pass has arrived.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_driver_shim::record::{Record, RecordWords};
use pushgate_driver_shim::segment::Geometry;
use pushgate_proxy::endpoint::{Endpoint, QpOptions};
use pushgate_proxy::gate::{Budget, Permit};
use pushgate_proxy::link::verbs::{Config, Device, VerbsLink, VerbsOpening};
use pushgate_proxy::link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Waking,
};
use pushgate_proxy::region::RegionMemory;

use super::Memory;

fn mode() -> &'static str {
    static MODE: OnceLock<String> = OnceLock::new();
    MODE.get_or_init(|| {
        let mode = std::env::var("PUSHGATE_TEST_QP").unwrap_or_else(|_| "local".into());
        assert!(
            ["local", "verbs", "verbs-no-imm"].contains(&mode.as_str()),
            "PUSHGATE_TEST_QP is {mode}, expected local, verbs or verbs-no-imm"
        );
        mode
    })
}

/// Whether the suite runs over RDMA.
pub fn chosen() -> bool {
    mode() != "local"
}

/// Fails unless the suite runs over RDMA; for tests that concern only RDMA.
pub fn must_be_chosen() {
    assert!(chosen(), "set PUSHGATE_TEST_QP to verbs or verbs-no-imm: this test concerns RDMA alone");
}

/// Whether SENDs carry immediate data.
pub fn imm() -> bool {
    mode() == "verbs"
}

pub fn device() -> Arc<Device> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    let open = || Device::open(std::env::var("PUSHGATE_TEST_IB_DEV").ok().as_deref(), 1).unwrap();
    DEVICE.get_or_init(open).clone()
}

fn allocate(name: &str, bytes: usize) -> Result<SharedMemory, pushgate_driver_shim::ShimError> {
    SharedMemory::builder(name, bytes).huge_pages(HugePages::Never).create()
}

/// One end of an RDMA queue pair.
#[derive(Clone)]
pub struct Wire {
    pub qp: Arc<Mutex<VerbsLink>>,
    pub mirror: Arc<SharedMemory>,
    peer_geometry: Geometry,
    /// Whether this end and the other end were stopped; a stopped end answers no more.
    stopped: [Arc<AtomicBool>; 2],
}

/// Joins both ends. `memory` is that of the two sides; `posted_receives` says which of them post
/// receives.
pub fn connect(memory: [&Memory; 2], posted_receives: [bool; 2]) -> [Wire; 2] {
    connect_with(memory, posted_receives, &Config { imm: imm(), ..Config::default() })
}

fn connect_with(memory: [&Memory; 2], posted_receives: [bool; 2], config: &Config) -> [Wire; 2] {
    let [a, b] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let mut stopped = [[a.clone(), b.clone()], [b, a]].into_iter();
    joined(memory, posted_receives, config).map(|(mut qp, mirror, peer_geometry)| {
        qp.signal_all();
        let stopped = stopped.next().expect("there are two ends");
        Wire { qp: Arc::new(Mutex::new(qp)), mirror, peer_geometry, stopped }
    })
}

/// Joins both ends without waiting for each work request.
pub fn joined(
    memory: [&Memory; 2],
    posted_receives: [bool; 2],
    config: &Config,
) -> [(VerbsLink, Arc<SharedMemory>, Geometry); 2] {
    let device = device();
    let open = |i: usize| {
        let (m, config) = (memory[i], Config { posted_receives: posted_receives[i], ..config.clone() });
        VerbsOpening::new(&device, &config, m.geometry, m.window.clone(), &mut allocate).unwrap()
    };
    let (a, b) = (open(0), open(1));
    let (from_a, from_b) = (a.offer(), b.offer());
    let a = a.prepare(memory[1].geometry.rank, &from_b, &mut allocate).unwrap();
    let b = b.prepare(memory[0].geometry.rank, &from_a, &mut allocate).unwrap();
    let (at_a, at_b) = (a.places(), b.places());
    [(a, at_b), (b, at_a)].map(|(end, places)| {
        let (mirror, peer_geometry) = (end.mirror().clone(), end.peer_geometry());
        (end.join(places).unwrap(), mirror, peer_geometry)
    })
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

    /// Writes `words` at byte `at` of the peer's inbox.
    #[cfg(feature = "test-ungated")]
    pub fn forge(&self, at: usize, words: &[u64], imm: Option<u32>) {
        let mut qp = self.qp.lock().unwrap();
        if qp.forge(at, words, imm).is_ok() {
            wait(&mut qp, &self.stopped[1]);
        }
    }

    /// Writes a record into the slot for `cursor`, announced as such a record would be.
    #[cfg(feature = "test-ungated")]
    pub fn forge_record(&self, cursor: u64, log: u32, words: &RecordWords) {
        use pushgate_driver_shim::abi;
        use pushgate_driver_shim::record::Opcode;

        let slot = abi::PUSHGATE_PAGE as usize + (cursor as usize & ((1 << log) - 1)) * 256;
        let send = (words[0] >> abi::PUSHGATE_OPCODE_SHIFT) as u8 == Opcode::Send as u8;
        self.forge(slot, words, (send && imm()).then_some(cursor as u32));
    }
}

fn wait(qp: &mut VerbsLink, peer_stopped: &AtomicBool) {
    let start = Instant::now();
    while !qp.is_quiet() && !peer_stopped.load(Ordering::Relaxed) {
        assert!(start.elapsed() < pushgate_tests::hang(), "the RDMA queue pair does not come to rest");
        std::thread::yield_now();
    }
}

/// A queue pair that has completed everything when a pass is over.
struct Settled(Wire);

impl Settled {
    fn qp(&self) -> MutexGuard<'_, VerbsLink> {
        self.0.qp.lock().unwrap()
    }
}

impl Link for Settled {
    fn name(&self) -> &'static str {
        self.qp().name()
    }

    fn budget(&self) -> Budget {
        self.qp().budget()
    }

    fn post_send(
        &mut self,
        p: Permit<'_>,
        sequence: u64,
        r: &Record,
        words: &RecordWords,
    ) -> Result<(), LinkDown> {
        self.qp().post_send(p, sequence, r, words)
    }

    fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown> {
        self.qp().poll_send(received)
    }

    fn peer_counts(&self) -> PeerCounts {
        self.qp().peer_counts()
    }

    fn peer_status(&self) -> u64 {
        self.qp().peer_status()
    }

    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        self.qp().poll_recv(words)
    }

    fn has_inbound(&self) -> bool {
        self.qp().has_inbound()
    }

    fn acknowledge(&mut self, counts: PeerCounts) {
        self.qp().acknowledge(counts);
    }

    fn set_status(&mut self, word: u64) {
        self.qp().set_status(word);
    }

    fn leave(&mut self) {
        self.qp().leave();
    }

    fn stopped(&mut self, now: u64) -> bool {
        let start = Instant::now();
        while !self.qp().stopped(now + start.elapsed().as_nanos() as u64) {
            assert!(start.elapsed() < pushgate_tests::hang(), "the RDMA queue pair does not stop");
            std::thread::yield_now();
        }
        self.0.stopped[0].store(true, Ordering::Relaxed);
        true
    }

    fn notify(&mut self) -> Result<bool, LinkDown> {
        let mut qp = self.qp();
        let rang = qp.notify()?;
        wait(&mut qp, &self.0.stopped[1]);
        Ok(rang)
    }

    fn check(&mut self, now: u64) -> Result<(), LinkDown> {
        self.qp().check(now)
    }
}

impl Receives for Settled {
    fn offered_receives(&self) -> Option<bool> {
        self.qp().offered_receives()
    }

    fn knows_receives(&self) -> bool {
        self.qp().knows_receives()
    }

    fn receive_for(&self, record: &Record) -> Option<u32> {
        self.qp().receive_for(record)
    }

    fn receive_posted(&mut self, number: u64, words: [u64; 4]) {
        self.qp().receive_posted(number, words);
    }
}

impl OwnRegions for Settled {
    fn takes_region(&self, record: &Record) -> RegionSends {
        self.qp().takes_region(record)
    }

    fn region_sends(&self) -> RegionSends {
        self.qp().region_sends()
    }

    fn add_region(&mut self, key: u32, memory: &RegionMemory, bytes: u64) {
        self.qp().add_region(key, memory, bytes);
    }

    fn region_in_use(&mut self, key: u32, received: u64) -> bool {
        self.qp().region_in_use(key, received)
    }

    fn remove_region(&mut self, key: u32) {
        self.qp().remove_region(key);
    }

    fn offers(&self, key: u32) -> bool {
        self.qp().offers(key)
    }

    fn registers(&self, key: u32) -> bool {
        self.qp().registers(key)
    }

    fn regions_told(&self) -> bool {
        self.qp().regions_told()
    }
}

impl PeerMemory for Settled {
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        self.qp().payload(unit, units)
    }

    fn in_place(&self) -> bool {
        self.qp().in_place()
    }
}

impl Waking for Settled {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }
}
