//! Tests payload that an RDMA device has written into another device's memory: the signal for it
//! waits for a flush (P3). The transport here only reports that a payload is in its place.

mod common;

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use common::{Device, GEOMETRY, Memory, options, window_send};
use pushgate_core::gate::{Budget, Permit};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_driver_shim::segment::Geometry;
use pushgate_engine::endpoint::{Endpoint, QpOptions};
use pushgate_engine::mover::{MoveError, Mover};
use pushgate_link::region::RegionMemory;
use pushgate_link::{
    Arrival, Link, LinkDown, OwnRegions, PeerCounts, PeerMemory, Receives, RegionSends, Telling, Waking,
};

const DEVICE: u64 = 0x7000_0000_0000;

type Records = Arc<Mutex<VecDeque<Record>>>;

/// A transport that returns records as if their payload had been placed.
struct Placing {
    records: Records,
    /// Whether the peer was told of our regions.
    offers: bool,
    /// What the peer was told of our receives, if anything.
    receives: Option<bool>,
}

impl Link for Placing {
    fn name(&self) -> &'static str {
        "placing"
    }

    fn budget(&self) -> Budget {
        Budget { send_slots: 4, cq_slots: 4, bytes: 1 << 20 }
    }

    fn post_send(&mut self, _: Permit<'_>, _: u64, _: &Record, _: &RecordWords) -> Result<(), LinkDown> {
        unreachable!("nothing is sent here")
    }

    fn poll_send(&mut self, _: u64) -> Result<u32, LinkDown> {
        Ok(0)
    }

    fn poll_recv(&mut self, words: &mut RecordWords) -> Arrival {
        let Some(record) = self.records.lock().unwrap().pop_front() else { return Arrival::Empty };
        *words = record.encode(0);
        Arrival::Placed
    }

    fn has_inbound(&self) -> bool {
        !self.records.lock().unwrap().is_empty()
    }

    fn notify(&mut self) -> Result<bool, LinkDown> {
        Ok(false)
    }
}

impl Telling for Placing {
    fn peer_counts(&self) -> PeerCounts {
        PeerCounts::default()
    }

    fn peer_status(&self) -> u64 {
        0
    }

    fn acknowledge(&mut self, _: PeerCounts) {}

    fn set_status(&mut self, _: u64) {}
}

impl Receives for Placing {
    fn offered_receives(&self) -> Option<bool> {
        self.receives
    }
}

impl OwnRegions for Placing {
    fn takes_region(&self, _: &Record) -> RegionSends {
        self.region_sends()
    }

    fn region_sends(&self) -> RegionSends {
        RegionSends::No("not here")
    }

    fn offers(&self, _: u32) -> bool {
        self.offers
    }
}

impl PeerMemory for Placing {
    fn payload(&self, _: u32, _: u32) -> Option<usize> {
        None
    }

    fn in_place(&self) -> bool {
        true
    }
}

impl Waking for Placing {
    fn sleeping(&self) -> Option<&AtomicU64> {
        None
    }
}

/// A mover that records what the device sees of the signal when it flushes.
struct Flushing {
    device: Device,
    seen: Arc<Mutex<Vec<u64>>>,
    fails: bool,
}

impl Mover for Flushing {
    fn start(&mut self, _: u64, _: usize, _: usize) -> Result<u64, MoveError> {
        unreachable!("it is in its place")
    }

    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        unreachable!("nothing was started")
    }

    fn flush(&mut self) -> Result<(), MoveError> {
        self.seen.lock().unwrap().push(self.device.signal(1));
        match self.fails {
            true => Err(MoveError { length: 0, reason: "the device is gone".into() }),
            false => Ok(()),
        }
    }
}

/// A mover that knows nothing about RDMA devices.
struct Plain;

impl Mover for Plain {
    fn start(&mut self, _: u64, _: usize, _: usize) -> Result<u64, MoveError> {
        unreachable!("it is in its place")
    }

    fn done(&mut self, _: u64) -> Result<bool, MoveError> {
        unreachable!("nothing was started")
    }
}

struct Setting {
    end: Endpoint,
    device: Device,
    records: Records,
    mine: Arc<Memory>,
    peer: Arc<Memory>,
}

impl Setting {
    fn new() -> Self {
        Setting::with(true, false)
    }

    fn with(offers: bool, posted_receives: bool) -> Self {
        Setting::of(offers, QpOptions { posted_receives, ..options(1) })
    }

    fn of(offers: bool, options: QpOptions) -> Self {
        let posted_receives = options.posted_receives;
        let mine = Memory::new(GEOMETRY);
        let peer = Memory::new(Geometry { rank: 1, ..GEOMETRY });
        let records = Records::default();
        let end = Endpoint::new(
            mine.work_read.clone(),
            mine.control.clone(),
            mine.geometry,
            peer.geometry,
            Box::new(Placing { records: records.clone(), offers, receives: Some(posted_receives) }),
            options,
        )
        .unwrap();
        let device = Device::new(&mine, &peer);
        Setting { end, device, records, mine, peer }
    }

    fn comes(&self, id: u32, rkey: u32, value: u64) {
        let record = Record {
            id,
            flags: Record::WITH_SIGNAL,
            length: 300,
            rkey,
            remote_offset: 100,
            signal: 1,
            signal_value: value,
            ..Record::new(Opcode::Put)
        };
        self.records.lock().unwrap().push_back(record);
    }
}

#[test]
fn p3_a_signal_waits_until_what_an_rdma_device_wrote_is_flushed() {
    let mut s = Setting::new();
    let device = s.end.add_region(RegionMemory::Device { address: DEVICE, exported: None }, 4096).unwrap();
    let region = common::Region::new(4096);
    let host = s.end.add_region(region.memory(), 4096).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mover = Flushing { device: Device::new(&s.mine, &s.peer), seen: seen.clone(), fails: false };
    let mut mover: Option<Box<dyn Mover>> = Some(Box::new(mover));
    s.comes(0, device, 1);
    s.comes(1, device, 2);
    // Host memory: the transport's own order suffices.
    s.comes(2, host, 3);
    s.end.poll(&mut mover);
    assert_eq!(*seen.lock().unwrap(), [0, 1], "each before its signal");
    assert_eq!((s.device.signal(1), s.end.counters().placed), (3, 3));
    assert_eq!(s.end.status(), None);
}

#[test]
fn p3_without_a_flush_there_is_no_signal() {
    let failing = |s: &Setting| -> Option<Box<dyn Mover>> {
        let device = Device::new(&s.mine, &s.peer);
        Some(Box::new(Flushing { device, seen: Arc::default(), fails: true }))
    };
    for which in 0..3 {
        let mut s = Setting::new();
        let key = s.end.add_region(RegionMemory::Device { address: DEVICE, exported: None }, 4096).unwrap();
        let mut mover = match which {
            0 => failing(&s),
            1 => Some(Box::new(Plain) as Box<dyn Mover>),
            _ => None,
        };
        s.comes(0, key, 1);
        s.comes(1, key, 1);
        s.end.poll(&mut mover);
        assert_eq!((s.device.signal(1), s.end.counters().placed), (0, 0));
        assert_eq!(s.end.status().map(|s| (s.code as u32, s.rank)), Some((abi::PUSHGATE_REFUSED, Some(0))));
    }
}

#[test]
fn p8_a_peer_that_writes_to_a_region_it_was_not_offered_is_refused_and_named() {
    let mut s = Setting::with(false, false);
    let device = s.end.add_region(RegionMemory::Device { address: DEVICE, exported: None }, 4096).unwrap();
    s.comes(0, device, 1);
    // Without a mover: the fault is still the peer's, not ours.
    s.end.poll(&mut None);
    assert_eq!((s.device.signal(1), s.end.counters().placed), (0, 0));
    assert_eq!(s.end.status().map(|s| (s.code as u32, s.rank)), Some((abi::PUSHGATE_REFUSED, Some(1))));
}

#[test]
fn p7_an_endpoint_that_posts_receives_unknown_to_its_peer_is_refused() {
    let made = |receives: Option<bool>, posted_receives: bool| {
        let mine = Memory::new(GEOMETRY);
        Endpoint::new(
            mine.work_read.clone(),
            mine.control.clone(),
            mine.geometry,
            Geometry { rank: 1, ..GEOMETRY },
            Box::new(Placing { records: Records::default(), offers: true, receives }),
            QpOptions { posted_receives, ..options(1) },
        )
    };
    for posted in [false, true] {
        assert!(made(Some(posted), posted).is_ok() && made(None, posted).is_ok());
        let why = made(Some(!posted), posted).err().expect("they differ").to_string();
        let both = [format!("posted_receives is {posted} in QpOptions"), format!("with {}", !posted)];
        assert!(both.iter().all(|s| why.contains(s)) && why.contains("`placing`"), "{why}");
    }
}

/// A SEND of `length` bytes that was written to posted receive `number`.
fn send(id: u32, tag: u32, number: u32, length: u32) -> Record {
    Record { id, tag, length, place: number, ..window_send(0) }
}

#[test]
fn p3_a_send_in_its_receive_is_shown_after_the_flush_and_says_which() {
    let mut s = Setting::with(true, true);
    let device = s.end.add_region(RegionMemory::Device { address: DEVICE, exported: None }, 4096).unwrap();
    let region = common::Region::new(4096);
    let host = s.end.add_region(region.memory(), 4096).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mover = Flushing { device: Device::new(&s.mine, &s.peer), seen: seen.clone(), fails: false };
    let mut mover: Option<Box<dyn Mover>> = Some(Box::new(mover));
    for (key, tag) in [(device, 1), (host, 2), (device, 2)] {
        s.device.post_recv(key, 0, 300, tag);
    }
    for record in [send(0, 2, 1, 300), send(1, 2, 2, 299), send(2, 1, 0, 0)] {
        s.records.lock().unwrap().push_back(record);
    }
    s.end.poll(&mut mover);
    let shown: Vec<_> =
        std::iter::from_fn(|| s.device.try_recv()).map(|m| (m.tag, m.place, m.length, m.flags)).collect();
    assert_eq!(shown, [(2, 1, 300, Record::BUFFER), (2, 2, 299, Record::BUFFER), (1, 0, 0, Record::BUFFER)]);
    assert_eq!(
        (seen.lock().unwrap().len(), s.end.counters().placed),
        (2, 3),
        "flushes: for the device alone"
    );
    assert_eq!(s.end.status(), None);

    // Without a flush the message is not shown.
    let mut s = Setting::with(true, true);
    let device = s.end.add_region(RegionMemory::Device { address: DEVICE, exported: None }, 4096).unwrap();
    s.device.post_recv(device, 0, 300, 1);
    s.records.lock().unwrap().push_back(send(0, 1, 0, 300));
    s.end.poll(&mut Some(Box::new(Plain)));
    assert!(s.device.try_recv().is_none());
    assert_eq!(s.end.status().map(|s| (s.code as u32, s.rank)), Some((abi::PUSHGATE_REFUSED, Some(0))));
}

#[test]
fn p3_the_flush_is_left_to_a_reader_who_says_so_and_to_nobody_else() {
    for reader_flushes in [true, false] {
        let options = QpOptions { posted_receives: true, reader_flushes, ..options(1) };
        let mut s = Setting::of(true, options);
        let device =
            s.end.add_region(RegionMemory::Device { address: DEVICE, exported: None }, 4096).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mover = Flushing { device: Device::new(&s.mine, &s.peer), seen: seen.clone(), fails: false };
        s.device.post_recv(device, 0, 300, 1);
        s.records.lock().unwrap().push_back(send(0, 1, 0, 300));
        s.end.poll(&mut Some(Box::new(mover)));
        assert!(s.device.try_recv().is_some_and(|m| m.length == 300));
        assert_eq!((seen.lock().unwrap().is_empty(), s.end.counters().placed), (reader_flushes, 1));
    }
}

#[test]
fn p8_a_send_in_a_receive_that_is_not_its_own_is_refused_and_names_the_peer() {
    // Two receives, of tags 1 and 2; whether the peer was told of their region; what arrives.
    let cases = [
        ("another receive", true, send(0, 1, 1, 100)),
        ("one that was never posted", true, send(0, 1, 2, 100)),
        ("a tag that nobody posted", true, send(0, 3, 0, 100)),
        ("more than there is room", true, send(0, 1, 0, 101)),
        ("a region that was not offered", false, send(0, 1, 0, 100)),
        ("a signal", true, Record { id: 0, signal: 1, signal_value: 1, ..Record::new(Opcode::Signal) }),
    ];
    for (what, offers, record) in cases {
        let mut s = Setting::with(offers, true);
        let region = common::Region::new(200);
        let key = s.end.add_region(region.memory(), 200).unwrap();
        s.device.post_recv(key, 0, 100, 1);
        s.device.post_recv(key, 100, 100, 2);
        s.records.lock().unwrap().push_back(record);
        s.end.poll(&mut None);
        let refused = Some((abi::PUSHGATE_REFUSED, Some(1)));
        assert_eq!(s.end.status().map(|s| (s.code as u32, s.rank)), refused, "{what}");
        assert!(s.device.try_recv().is_none() && s.device.signal(1) == 0, "{what}");
    }
    // A receive that was taken already, and a queue pair without posted receives.
    for posted in [true, false] {
        let mut s = Setting::with(true, posted);
        let region = common::Region::new(200);
        let key = s.end.add_region(region.memory(), 200).unwrap();
        s.device.post_recv(key, 0, 100, 1);
        s.device.post_recv(key, 0, 100, 1);
        s.records.lock().unwrap().extend([send(0, 1, 0, 100), send(1, 1, 0, 100)]);
        s.end.poll(&mut None);
        assert_eq!(s.end.status().map(|s| (s.code as u32, s.rank)), Some((abi::PUSHGATE_REFUSED, Some(1))));
        assert_eq!(std::iter::from_fn(|| s.device.try_recv()).count(), posted as usize);
    }
}
