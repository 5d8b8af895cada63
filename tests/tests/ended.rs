//! Tests what an end that fails or closes owes its device and its peer, and in which order.

mod common;

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use pushgate_core::gate::{Budget, Permit};
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::eventfd::EventFd;
use pushgate_driver_shim::interrupt::{interrupt_by, left_undone};
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::engine::{Drive, Engine, EngineError, EngineOptions, QpId};
use pushgate_engine::idle::Wake;
use pushgate_engine::mover::{MoveError, Mover};
use pushgate_link::local::{LocalLink, Processes};
use pushgate_link::region::RegionMemory;
use pushgate_link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Telling, Waking,
};

const MIB: usize = 1 << 20;

// ------------------------------------------------- a region that is given back

/// A message of three MiB out of a region of side 0; side 1 has read the first MiB.
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
    // Each end finds out that the other can read its memory.
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
    assert!(pair.ends[0].remove_region(lkey), "nothing is waited for after the end");
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
fn p7_a_region_unmapped_after_the_senders_end_is_that_end_and_no_violation() {
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

/// A queue pair that records what the device can see whenever something goes to the peer.
struct Watched {
    qp: LocalLink,
    control: Arc<SharedMemory>,
    cq: usize,
    seen: Seen,
    /// What was posted may still touch memory.
    works: Arc<AtomicBool>,
}

impl Watched {
    fn look(&self) {
        let word = |at| self.control.words(at, 1)[0].load(Ordering::Acquire);
        self.seen.lock().unwrap().push((word(abi::PUSHGATE_CTL_STATUS as usize), word(self.cq)));
    }
}

impl Link for Watched {
    pushgate_link::forward_to!(qp;
        fn name(&self) -> &'static str;
        fn budget(&self) -> Budget;
        fn post_send(&mut self, permit: Permit<'_>, sequence: u64, r: &Record, w: &RecordWords) -> Result<(), LinkDown>;
        fn poll_send(&mut self, received: u64) -> Result<u32, LinkDown>;
        fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival;
        fn has_inbound(&self) -> bool;
    );

    fn stopped(&mut self, _: u64) -> bool {
        !self.works.load(Ordering::Acquire)
    }

    fn notify(&mut self) -> Result<bool, LinkDown> {
        self.look();
        self.qp.notify()
    }
}

impl Telling for Watched {
    pushgate_link::forward_to!(qp;
        fn peer_counts(&self) -> PeerCounts;
        fn peer_status(&self) -> u64;
        fn acknowledge(&mut self, counts: PeerCounts);
    );

    fn set_status(&mut self, word: u64) {
        self.look();
        self.qp.set_status(word);
    }

    fn leave(&mut self) {
        self.look();
        self.qp.leave();
    }
}

impl Receives for Watched {}

impl OwnRegions for Watched {
    pushgate_link::forward_to!(qp;
        fn takes_region(&self, r: &Record) -> RegionSends;
        fn region_sends(&self) -> RegionSends;
    );
}

impl PeerMemory for Watched {
    pushgate_link::forward_to!(qp;
        fn payload(&self, unit: u32, units: u32) -> Option<usize>;
        fn in_place(&self) -> bool;
    );

    unsafe fn read_peer(&self, address: u64, to: usize, length: usize) -> io::Result<usize> {
        // SAFETY: our caller promises what the inner call requires.
        unsafe { self.qp.read_peer(address, to, length) }
    }
}

impl Waking for Watched {
    pushgate_link::forward_to!(qp; fn sleeping(&self) -> Option<&AtomicU64>;);
}

/// Side 0 of a queue pair, watched, and its device. Side 1 has granted 8 receives.
fn watched() -> (Endpoint, Device, Seen) {
    let (end, device, seen, _) = watched_while(false);
    (end, device, seen)
}

/// An endpoint and its device over a transport that, if `works`, goes on working after an end until
/// the test stops the transport.
fn watched_while(works: bool) -> (Endpoint, Device, Seen, Arc<AtomicBool>) {
    let [own, peer] = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let m = own.joined(&peer, None);
    let g = own.geometry;
    let processes = Processes { peer: None, in_program: true };
    let qp = LocalLink::new(
        &m.link.into(),
        &g,
        &m.peer_link.into(),
        &peer.geometry,
        m.peer_window.into(),
        (None, None),
        processes,
    );
    let seen = Seen::default();
    let cq = g.control_cq_offset();
    let works = Arc::new(AtomicBool::new(works));
    let qp = Watched { qp, control: own.control.clone(), cq, seen: seen.clone(), works: works.clone() };
    let end = Endpoint::new(m.work, m.control, g, peer.geometry, Box::new(qp), options(1)).unwrap();
    peer.link.words(abi::PUSHGATE_LINK_GRANTED as usize, 1)[0].store(8, Ordering::Release);
    (end, Device::new(&own, &peer), seen, works)
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

#[test]
fn p5_p7_an_engine_that_leaves_shows_its_end_when_the_transport_has_stopped() {
    let (mut end, mut device, _, works) = watched_while(true);
    end.close();
    assert!(!end.is_gone() && device.status().is_none(), "shown while the transport works");
    // The device sees no end yet.
    assert!(device.post(signaled(5), b"never sent"));
    end.close();
    assert!(!end.is_gone());
    let told = device.own.link.words(abi::PUSHGATE_LINK_STATUS as usize, 1)[0].load(Ordering::Acquire);
    assert_eq!((told, end.status()), (0, None), "a side that has left has told its peer so, and no more");
    works.store(false, Ordering::Release);
    assert!(end.is_gone());
    assert_eq!(device.status().map(|s| s.code as u32), Some(abi::PUSHGATE_ABORTED));
    let cqe = device.poll_cq().expect("the send completes");
    assert_eq!((cqe.wr_id, cqe.status as u32), (5, abi::PUSHGATE_ABORTED));
}

#[test]
fn p7_an_engine_does_not_sleep_before_an_end_is_shown() {
    let (mut end, device, _, works) = watched_while(true);
    end.fail(Status::new(abi::PUSHGATE_ABORTED));
    assert!(!end.poll(&mut None) && device.status().is_none());
    assert!(end.has_work(), "nothing wakes an engine when the transport has stopped");
    works.store(false, Ordering::Release);
    assert!(end.poll(&mut None) && device.status().is_some());
    assert!(!end.has_work() && !end.poll(&mut None));
}

// ------------------------------------------------------- a device that copies for ever

/// A copy engine whose copies never end.
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

/// An engine whose device copies for ever for a queue pair, the receiving end's memory and the sending end's, and the copy engine.
fn copying_for_ever() -> (Engine, QpId, [Arc<Memory>; 2], Arc<()>) {
    let [own, peer] = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let (started, here) = (Arc::new(AtomicU64::new(0)), Arc::new(()));
    let mover = Box::new(Stuck { started: started.clone(), _here: here.clone() });
    let options_of_engine = EngineOptions { mover: Some(mover), ..EngineOptions::default() };
    let engine = Engine::start(EventFd::new().unwrap(), options_of_engine).unwrap();
    let end = Endpoint::local(own.joined(&peer, None), options(1)).unwrap();
    let qp = engine.add_qp(end, Wake::Polled).unwrap();
    let device_memory = RegionMemory::Device { address: 4096, exported: None };
    // SAFETY: nothing is ever written there.
    let rkey = unsafe { engine.add_region(qp, device_memory, 4096) }.unwrap();
    let mut sender = Endpoint::local(peer.joined(&own, None), options(0)).unwrap();
    let mut device = Device::new(&peer, &own);
    assert!(device.post(Record { rkey, ..Record::new(Opcode::Put) }, &[1; 100]));
    let begin = Instant::now();
    while started.load(Ordering::SeqCst) == 0 {
        sender.poll(&mut None);
        assert!(begin.elapsed() < Duration::from_secs(120), "no copy is begun");
    }
    drop(sender);
    assert_eq!(mapped_by(&peer.window_read), 2, "the test and the engine");
    (engine, qp, [own, peer], here)
}

#[test]
fn p7_p8_a_queue_pair_whose_removal_is_interrupted_keeps_what_a_device_still_copies() {
    let (engine, qp, [_own, peer], _here) = copying_for_ever();
    interrupt_by(Some(Rc::new(|| true)));
    let removed = engine.remove_qp(qp);
    interrupt_by(None);
    // Without the interrupt the same comes of it after 2 s.
    assert!(matches!(removed, Err(EngineError::Unsettled(_))), "{removed:?}");
    let left = left_undone().expect("it was interrupted");
    assert!(left.contains("the queue pair with rank 1 was closed at once: 0 messages"), "{left}");
    assert_eq!(mapped_by(&peer.window_read), 2, "the copy's source was unmapped");
}

#[test]
fn p8_an_engine_that_ends_keeps_what_a_device_still_copies() {
    let (engine, _, [own, peer], here) = copying_for_ever();
    drop(engine);
    assert_eq!(mapped_by(&peer.window_read), 2, "the copy's source was unmapped");
    assert_eq!(Arc::strong_count(&here), 2, "to end the copy engine is to wait for its copies");
    let aborted = Device::new(&own, &peer).status().map(|s| s.code as u32);
    assert_eq!(aborted, Some(abi::PUSHGATE_ABORTED), "who waits is told all the same");
}

/// How many keep the memory mapped.
fn mapped_by(memory: &ReadOnlyMemory) -> usize {
    Arc::strong_count(&memory.mapping()) - 1
}

// ------------------------------------------------------- copies that are under way

/// A PUT of three MiB to side 1, which has copied the first; also side 1's region and its key.
fn half_copied(source: fn(&mut Pair) -> Record) -> (Pair, Region, u32) {
    let geometry = Geometry { window_log: 16, ..GEOMETRY };
    assert!(UNIT << geometry.window_log >= 3 * MIB);
    let mut pair = Pair::local(geometry, [options(1), options(0)]);
    let into = Region::new(3 * MIB);
    let rkey = pair.ends[1].add_region(into.memory(), 3 * MIB as u64).unwrap();
    pair.settle();
    let put = Record { rkey, ..source(&mut pair) };
    match put.has(Record::REGION) {
        true => assert!(pair.devices[0].post_from(put, 3 * MIB)),
        false => assert!(pair.devices[0].post(put, &vec![1; 3 * MIB])),
    }
    assert!(pair.poll(0));
    assert!(pair.poll(1));
    assert_eq!(into.read(MIB - 1, 2), [1, 0], "one slice of three was copied");
    (pair, into, rkey)
}

fn out_of_window(_: &mut Pair) -> Record {
    Record::new(Opcode::Put)
}

fn out_of_region(pair: &mut Pair) -> Record {
    let source = Region::new(3 * MIB);
    source.write(0, &vec![1; 3 * MIB]);
    // The endpoint keeps the memory.
    let place = pair.ends[0].add_region(source.memory(), 3 * MIB as u64).unwrap();
    pair.settle();
    Record { flags: Record::REGION, place, ..Record::new(Opcode::Put) }
}

#[test]
fn p3_p5_an_engine_copies_nothing_more_after_an_end() {
    for source in [out_of_window, out_of_region] {
        let (mut pair, into, rkey) = half_copied(source);
        pair.ends[1].fail(Status::new(abi::PUSHGATE_ABORTED));
        assert!(pair.devices[1].status().is_some(), "the end is shown");
        // The program uses its region for something else.
        into.write(0, &vec![2; 3 * MIB]);
        while pair.poll(1) {}
        assert!(pair.ends[1].settle(&mut None), "nothing is left to copy");
        assert!(pair.ends[1].remove_region(rkey));
        pair.ends[1].close();
        assert!(pair.ends[1].is_gone());
        assert!(into.read(0, 3 * MIB) == vec![2; 3 * MIB], "copied over what the program wrote");
    }
}

/// A copy engine whose copies end when the test says so.
struct Held(Arc<AtomicU64>);

impl Mover for Held {
    fn start(&mut self, _: u64, _: usize, _: usize) -> Result<u64, MoveError> {
        Ok(0)
    }
    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        Ok(self.0.load(Ordering::SeqCst) != 0)
    }
}

/// A pair whose end 1 has failed while a device writes to its region, of that key. The device's copies end when the
/// word is 1.
fn failed_while_a_device_writes() -> (Pair, Arc<AtomicU64>, u32) {
    let mut pair = Pair::local(GEOMETRY, [options(1), options(0)]);
    let done = Arc::new(AtomicU64::new(0));
    pair.mover = Some(Box::new(Held(done.clone())));
    let memory = RegionMemory::Device { address: 4096, exported: None };
    let rkey = pair.ends[1].add_region(memory, 4096).unwrap();
    assert!(pair.devices[0].post(Record { rkey, ..Record::new(Opcode::Put) }, &[1; 100]));
    (0..4).for_each(|i| _ = pair.poll(i % 2));
    assert!(pair.ends[1].device_copies());
    pair.ends[1].fail(Status::new(abi::PUSHGATE_ABORTED));
    pair.poll(1);
    (pair, done, rkey)
}

#[test]
fn p3_p5_an_end_is_shown_when_a_devices_copies_have_ended() {
    let (mut pair, done, rkey) = failed_while_a_device_writes();
    assert!(pair.devices[1].status().is_none(), "shown while a device writes to the region");
    assert!(pair.ends[1].has_work(), "an engine does not sleep before the end is shown");
    done.store(1, Ordering::SeqCst);
    pair.poll(1);
    assert_eq!(pair.devices[1].status().map(|s| s.code as u32), Some(abi::PUSHGATE_ABORTED));
    assert!(!pair.ends[1].has_work() && pair.ends[1].remove_region(rkey));
}

#[test]
fn p7_an_end_is_shown_after_two_seconds_though_a_devices_copies_do_not_end() {
    let (mut pair, _done, rkey) = failed_while_a_device_writes();
    for (time, shown) in [(1_999_999_999, false), (2_000_000_000, true)] {
        pair.tick(time);
        pair.poll(1);
        assert_eq!(pair.devices[1].status().is_some(), shown, "at {time} ns");
    }
    assert!(!pair.ends[1].remove_region(rkey), "the device still writes to it");
}

// ------------------------------------------------------- an engine that panics

/// A copy engine that panics when it is asked, once the test says so.
struct Panics {
    started: Arc<AtomicU64>,
    now: Arc<AtomicBool>,
}

impl Mover for Panics {
    fn start(&mut self, _: u64, _: usize, _: usize) -> Result<u64, MoveError> {
        Ok(self.started.fetch_add(1, Ordering::SeqCst))
    }
    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        assert!(!self.now.load(Ordering::SeqCst), "a panic that the test asked for");
        Ok(false)
    }
}

#[test]
fn p7_p8_an_engine_that_panics_tells_who_waits_and_says_which_memory_stays() {
    [Drive::Thread, Drive::Caller].into_iter().for_each(panics);
}

fn panics(drive: Drive) {
    let [own, peer] = [0, 1].map(|rank| Memory::new(Geometry { rank, ..GEOMETRY }));
    let (started, now) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let mover = Box::new(Panics { started: started.clone(), now: now.clone() });
    let options_of_engine = EngineOptions { mover: Some(mover), drive, ..EngineOptions::default() };
    let engine = Engine::start(EventFd::new().unwrap(), options_of_engine).unwrap();
    let end = Endpoint::local(own.joined(&peer, None), options(1)).unwrap();
    let copied = engine.add_qp(end, Wake::Polled).unwrap();
    let (other, other_device, _) = watched();
    let other = engine.add_qp(other, Wake::Polled).unwrap();
    let device_memory = RegionMemory::Device { address: 4096, exported: None };
    // SAFETY: nothing is ever written there.
    let rkey = unsafe { engine.add_region(copied, device_memory, 4096) }.unwrap();
    let mut sender = Endpoint::local(peer.joined(&own, None), options(0)).unwrap();
    let mut device = Device::new(&peer, &own);
    assert!(device.post(Record { rkey, ..Record::new(Opcode::Put) }, &[1; 100]));
    let begin = Instant::now();
    while started.load(Ordering::SeqCst) == 0 {
        sender.poll(&mut None);
        engine.drive().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(120), "no copy is begun");
    }
    std::thread::scope(|scope| {
        let removed = scope.spawn(|| engine.remove_qp(copied));
        now.store(true, Ordering::SeqCst);
        let removed = removed.join().unwrap();
        assert!(matches!(removed, Err(EngineError::Unsettled(_))), "{removed:?}");
    });
    for device in [&Device::new(&own, &peer), &other_device] {
        let status = device.status().map(|s| s.code as u32);
        assert_eq!(status, Some(abi::PUSHGATE_ABORTED), "who waits is told");
    }
    // The engine is gone, and with it what it knew about each queue pair.
    let removed = engine.remove_qp(other);
    assert!(matches!(removed, Err(EngineError::Unsettled(_))), "{removed:?}");
    drop(sender);
    drop(engine);
    assert_eq!(mapped_by(&peer.window_read), 2, "the copy's source was unmapped");
}
