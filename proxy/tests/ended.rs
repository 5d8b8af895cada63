//! What an end that fails or closes owes its device and its peer, and in which order.

mod common;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record, Words};
use pushgate_driver_shim::segment::Geometry;
use pushgate_proxy::endpoint::{Endpoint, QpOptions};
use pushgate_proxy::engine::{Engine, EngineOptions};
use pushgate_proxy::gate::{Limits, Permit};
use pushgate_proxy::idle::Wake;
use pushgate_proxy::mover::{MoveError, Mover};
use pushgate_proxy::qp::local::{LocalQp, Processes};
use pushgate_proxy::qp::{Inbound, PeerCounts, QueuePair, RegionSends};
use pushgate_proxy::region::RegionMemory;
use pushgate_proxy::session::Status;

const MIB: usize = 1 << 20;

// ------------------------------------------------- a region that is given back

/// A message out of a region of side 0, of which side 1 has read the first MiB of three.
struct HalfRead {
    pair: Pair,
    source: Region,
    lkey: u32,
    into: Region,
}

fn half_read() -> HalfRead {
    let receives = QpOptions { posted_receives: true, ..options(0) };
    let mut pair = Pair::local(GEOMETRY, [options(1), receives]);
    let (source, into) = (Region::new(3 * MIB), Region::new(3 * MIB));
    let bytes = source.bytes as u64;
    let lkey = pair.ends[0].add_region(source.memory(), bytes).unwrap();
    let rkey = pair.ends[1].add_region(into.memory(), bytes).unwrap();
    source.write(0, &vec![1; 3 * MIB]);
    // Each end learns that the other can read it.
    pair.settle();
    pair.devices[1].post_recv(rkey, 0, bytes as u32, 7);
    pair.poll(1);
    assert!(pair.devices[0].post_from(region_send(7, lkey, 0), 3 * MIB));
    assert!(pair.poll(0));
    assert!(pair.poll(1));
    assert_eq!(into.read(MIB - 1, 2), [1, 0], "one slice of three was read");
    HalfRead { pair, source, lkey, into }
}

#[test]
fn p3_p5_a_message_whose_region_was_given_back_while_it_was_read_is_not_shown() {
    let HalfRead { mut pair, source, lkey, into } = half_read();
    pair.ends[0].fail(Status::new(abi::PUSHGATE_ABORTED));
    assert!(pair.ends[0].remove_region(lkey), "nothing is waited for behind the end");
    // The program has its memory back, and writes there.
    source.write(0, &vec![2; 3 * MIB]);
    while pair.poll(1) {}
    let shown = pair.devices[1].try_recv();
    assert!(shown.is_none(), "shown with bytes of another message: {:?}", into.read(3 * MIB - 1, 1));
    let status = pair.ends[1].status().expect("the peer's end was seen");
    assert_eq!((status.code as u32, status.rank), (abi::PUSHGATE_ABORTED, Some(0)));
    pair.devices[1].own.check_gaps();
}

#[test]
fn p7_a_region_unmapped_behind_the_senders_end_is_that_end_and_no_violation() {
    let HalfRead { mut pair, source, lkey, into: _into } = half_read();
    pair.ends[0].fail(Status::new(abi::PUSHGATE_ABORTED));
    assert!(pair.ends[0].remove_region(lkey));
    drop(source);
    while pair.poll(1) {}
    assert!(pair.devices[1].try_recv().is_none());
    let status = pair.ends[1].status().expect("the peer's end was seen");
    assert_eq!((status.code as u32, status.rank), (abi::PUSHGATE_ABORTED, Some(0)));
    assert_eq!(pair.ends[1].counters().refused, 0);
}

// ------------------------------------------------------- closing

/// What the device's segment said when the peer was told of the end: its status, and the first CQE.
type Seen = Arc<Mutex<Vec<(u64, u64)>>>;

/// A queue pair that notes, whenever something goes to the peer, what the device can see.
struct Watched {
    qp: LocalQp,
    control: Arc<SharedMemory>,
    cq: usize,
    seen: Seen,
}

impl Watched {
    fn look(&self) {
        let word = |at| self.control.words(at, 1)[0].load(Ordering::Acquire);
        self.seen.lock().unwrap().push((word(abi::PUSHGATE_CTL_STATUS as usize), word(self.cq)));
    }
}

impl QueuePair for Watched {
    fn name(&self) -> &'static str {
        self.qp.name()
    }
    fn limits(&self) -> Limits {
        self.qp.limits()
    }
    fn post_send(&mut self, permit: Permit<'_>, sequence: u64, r: &Record, w: &Words) -> Result<(), Status> {
        self.qp.post_send(permit, sequence, r, w)
    }
    fn poll_send(&mut self, received: u64) -> Result<u32, Status> {
        self.qp.poll_send(received)
    }
    fn peer_counts(&self) -> PeerCounts {
        self.qp.peer_counts()
    }
    fn peer_status(&self) -> u64 {
        self.qp.peer_status()
    }
    fn poll_recv(&mut self, words: &mut Words) -> Inbound {
        self.qp.poll_recv(words)
    }
    fn has_inbound(&self) -> bool {
        self.qp.has_inbound()
    }
    fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        self.qp.payload(unit, units)
    }
    fn in_place(&self) -> bool {
        self.qp.in_place()
    }
    fn takes_region(&self, r: &Record) -> RegionSends {
        self.qp.takes_region(r)
    }
    fn region_sends(&self) -> RegionSends {
        self.qp.region_sends()
    }
    unsafe fn read_peer(&self, address: u64, to: usize, length: usize) -> io::Result<usize> {
        // SAFETY: our caller promises the same.
        unsafe { self.qp.read_peer(address, to, length) }
    }
    fn acknowledge(&mut self, counts: PeerCounts) {
        self.qp.acknowledge(counts);
    }
    fn set_status(&mut self, word: u64) {
        self.look();
        self.qp.set_status(word);
    }
    fn leave(&mut self) {
        self.look();
        self.qp.leave();
    }
    fn notify(&mut self) -> Result<bool, Status> {
        self.look();
        self.qp.notify()
    }
    fn sleeping(&self) -> Option<&AtomicU64> {
        self.qp.sleeping()
    }
}

/// Side 0 of a queue pair, watched, and its device. Side 1 has granted 8 receives.
fn watched() -> (Endpoint, Device, Seen) {
    let [own, peer] = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let m = own.joined(&peer, None);
    let g = own.geometry;
    let processes = Processes { peer: None, in_program: true };
    let qp = LocalQp::new(&m.link, &g, &m.peer_link, &peer.geometry, m.peer_window, (None, None), processes);
    let seen = Seen::default();
    let cq = g.control_cq_offset();
    let qp = Watched { qp, control: own.control.clone(), cq, seen: seen.clone() };
    let end = Endpoint::new(m.work, m.control, g, peer.geometry, Box::new(qp), options(1)).unwrap();
    peer.link.words(abi::PUSHGATE_LINK_GRANTED as usize, 1)[0].store(8, Ordering::Release);
    (end, Device::new(&own, &peer), seen)
}

fn assert_told_in_order(device: &mut Device, seen: &Seen) {
    for (status, cqe) in seen.lock().unwrap().iter() {
        assert!(*status == 0 || *cqe != 0, "the status is there and the CQE is not");
    }
    assert_eq!(device.status().map(|s| s.code as u32), Some(abi::PUSHGATE_ABORTED));
    let cqe = device.poll_cq().expect("the send completes");
    assert_eq!((cqe.wr_id, cqe.status as u32), (5, abi::PUSHGATE_ABORTED));
}

fn signaled(wr_id: u32) -> Record {
    let send = inline_send(wr_id);
    Record { flags: send.flags | Record::SIGNALED, ..send }
}

#[test]
fn p7_an_engine_that_closes_completes_what_is_under_way_before_it_says_so() {
    let (mut end, mut device, seen) = watched();
    assert!(device.post(signaled(5), b"under way"));
    end.poll(&mut None);
    seen.lock().unwrap().clear();
    end.close();
    assert_told_in_order(&mut device, &seen);
}

#[test]
fn p7_an_engine_that_closes_completes_what_is_published_and_was_not_looked_at() {
    let (mut end, mut device, seen) = watched();
    assert!(device.post(signaled(5), b"never sent"));
    end.close();
    assert_told_in_order(&mut device, &seen);
}

// ------------------------------------------------------- a device that copies for ever

/// A copy engine none of whose copies ends.
struct Stuck {
    started: Arc<AtomicU64>,
    _here: Arc<()>,
}

impl Mover for Stuck {
    fn start(&mut self, _: u64, _: usize, _: usize) -> Result<u64, MoveError> {
        Ok(self.started.fetch_add(1, Ordering::SeqCst))
    }
    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        Ok(false)
    }
}

#[test]
fn p8_an_engine_that_ends_keeps_what_a_device_still_copies() {
    let [own, peer] = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let (started, here) = (Arc::new(AtomicU64::new(0)), Arc::new(()));
    let mover = Box::new(Stuck { started: started.clone(), _here: here.clone() });
    let options_of_engine = EngineOptions { mover: Some(mover), ..EngineOptions::default() };
    let engine = Engine::start(EventFd::new().unwrap(), options_of_engine).unwrap();
    let end = Endpoint::local(own.joined(&peer, None), options(1)).unwrap();
    let qp = engine.add_qp(end, Wake::Polled).unwrap();
    let device_memory = RegionMemory::Device { address: 4096, exported: None };
    // SAFETY: what would be written there never is.
    let rkey = unsafe { engine.add_region(qp, device_memory, 4096) }.unwrap();
    let mut sender = Endpoint::local(peer.joined(&own, None), options(0)).unwrap();
    let mut device = Device::new(&peer, &own);
    assert!(device.post(Record { rkey, ..Record::new(Opcode::Put) }, &[1; 100]));
    let begin = Instant::now();
    while started.load(Ordering::SeqCst) == 0 {
        sender.poll(&mut None);
        assert!(begin.elapsed() < Duration::from_secs(120), "no copy is begun");
    }
    let mapped = |m: &Arc<ReadOnlyMemory>| Arc::strong_count(m);
    drop(sender);
    assert_eq!(mapped(&peer.window_read), 2, "the test's and the engine's");
    drop(engine);
    assert_eq!(mapped(&peer.window_read), 2, "the copy's source was unmapped");
    assert_eq!(Arc::strong_count(&here), 2, "to end the copy engine is to wait for its copies");
    let aborted = Device::new(&own, &peer).status().map(|s| s.code as u32);
    assert_eq!(aborted, Some(abi::PUSHGATE_ABORTED), "who waits is told all the same");
}
