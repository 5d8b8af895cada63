//! The pair of endpoints over RDMA: both ends are on one device. Each work request is waited for,
//! so that when one end looks, the other end's pass has arrived.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use pushgate_driver_shim::memory::{HugePages, SharedMemory};
#[cfg(feature = "test-ungated")]
use pushgate_driver_shim::record::RecordWords;
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_link::Link;
use pushgate_link_verbs::choice::{Distance, Wish};
use pushgate_link_verbs::{Config, Device, RdmaCm, VerbsLink, VerbsOpening, WriteOrder};

use super::settled::{self, Settled};
use super::{Carrier, Memory, carrier};

/// Whether the suite runs over RDMA.
pub fn chosen() -> bool {
    matches!(carrier(), Carrier::Rdma { .. })
}

/// Fails unless the suite runs over RDMA; for tests that concern only RDMA.
pub fn must_be_chosen() {
    assert!(chosen(), "set PUSHGATE_TEST_QP to verbs or verbs-no-imm: this test concerns RDMA alone");
}

/// Whether SENDs carry immediate data.
pub fn imm() -> bool {
    carrier() == Carrier::Rdma { imm: true }
}

pub fn device() -> Arc<Device> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    let open = || match std::env::var("PUSHGATE_TEST_IB_DEV") {
        Ok(name) => Device::open(&name, 1).unwrap(),
        Err(_) => Device::choose(1, &Wish::default(), |_| Distance::default()).unwrap(),
    };
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
    connect_with(memory, posted_receives, &config())
}

/// What the variables of the suite say.
pub fn config() -> Config {
    // The setting's own variable: a guest sets it for all that runs there.
    let write_order = match std::env::var("PUSHGATE_WRITE_ORDER").as_deref() {
        Ok("wait") => WriteOrder::Wait,
        Ok(other) => panic!("PUSHGATE_WRITE_ORDER is {other}, expected wait or nothing"),
        Err(_) => WriteOrder::Auto,
    };
    Config { imm: imm(), cm: cm(), write_order, ..Config::default() }
}

/// Whether queue pairs come up through rdma_cm, as the variable PUSHGATE_TEST_RDMA_CM says.
fn cm() -> RdmaCm {
    match std::env::var("PUSHGATE_TEST_RDMA_CM").as_deref() {
        Ok("on") => RdmaCm::On,
        Ok("off") => RdmaCm::Off,
        _ => RdmaCm::Auto,
    }
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

impl settled::Wire for Wire {
    type Carrier = VerbsLink;

    fn qp(&self) -> MutexGuard<'_, VerbsLink> {
        self.qp.lock().unwrap()
    }

    fn settle(&self) {
        wait(&mut self.qp.lock().unwrap(), &self.stopped[1]);
    }

    fn stop(&self, now: u64) {
        let start = Instant::now();
        while !self.qp.lock().unwrap().stopped(now + start.elapsed().as_nanos() as u64) {
            assert!(start.elapsed() < pushgate_tests::hang(), "the RDMA queue pair does not stop");
            std::thread::yield_now();
        }
        self.stopped[0].store(true, Ordering::Relaxed);
    }
}
