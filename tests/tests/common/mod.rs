//! Two endpoints in one process with a program's device on each side: the
//! [`Producer`] of the host, which does what `device.cuh` does.
//!
//! The transport is `local`, or what `PUSHGATE_TEST_QP` says: `tcp`, over loopback, or `verbs` or
//! `verbs-no-imm`, on the RDMA device that `PUSHGATE_TEST_IB_DEV` names.

#![allow(dead_code)] // Each test file uses its own part.

pub mod rdma;
pub mod settled;
pub mod tcp;

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{self, Bell, Ringer};
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_engine::endpoint::{Endpoint, QpMemory, QpOptions};
use pushgate_engine::mover::Mover;
use pushgate_link::producer::{Producer, Received};
use pushgate_link::region::RegionMemory;

pub const UNIT: usize = abi::PUSHGATE_UNIT as usize;
const PAGE: usize = abi::PUSHGATE_PAGE as usize;
/// The byte in memory that must not be overwritten.
const CANARY: u8 = 0xc5;

pub const GEOMETRY: Geometry = Geometry {
    window_log: 5,
    slots_log: 4,
    cq_log: 4,
    rx_log: 3,
    link_log: 4,
    landing_log: 5,
    signals: 4,
    rank: 0,
};

pub fn options(peer: u32) -> QpOptions {
    QpOptions {
        peer,
        roles: false,
        posted_receives: false,
        reader_flushes: false,
        stuck_ns: 1_000_000,
        in_place_share: 128,
        slow_ns: 0,
        ungated: false,
        key_seed: 7 + peer,
    }
}

/// What carries the queue pairs of a suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    Local,
    /// With immediate data or without.
    Rdma {
        imm: bool,
    },
    Tcp,
}

/// What carries the queue pairs of this run: `PUSHGATE_TEST_QP`.
pub fn carrier() -> Carrier {
    static CARRIER: OnceLock<Carrier> = OnceLock::new();
    *CARRIER.get_or_init(|| match std::env::var("PUSHGATE_TEST_QP").as_deref() {
        Err(_) | Ok("local") => Carrier::Local,
        Ok("verbs") => Carrier::Rdma { imm: true },
        Ok("verbs-no-imm") => Carrier::Rdma { imm: false },
        Ok("tcp" | "tcp-uring") => Carrier::Tcp,
        Ok(other) => panic!("PUSHGATE_TEST_QP is {other}, expected local, tcp, verbs or verbs-no-imm"),
    })
}

/// Whether payload goes to another host, or would: over RDMA and TCP.
pub fn remote() -> bool {
    carrier() != Carrier::Local
}

/// Fills bytes with a pattern that tells which message they belong to.
pub fn pattern(seed: u64, bytes: &mut [u8]) {
    for (i, b) in bytes.iter_mut().enumerate() {
        *b = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(i as u32 & 63) >> 7) as u8 ^ i as u8;
    }
}

/// The memory that one side's program allocates, and the handles that it gives to engines.
pub struct Memory {
    pub geometry: Geometry,
    pub work: Arc<SharedMemory>,
    pub control: Arc<SharedMemory>,
    pub link: Arc<SharedMemory>,
    pub window: Arc<SharedMemory>,
    pub work_read: Arc<ReadOnlyMemory>,
    pub link_read: Arc<ReadOnlyMemory>,
    pub window_read: Arc<ReadOnlyMemory>,
}

fn shared(name: &str, bytes: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::builder(name, bytes).huge_pages(HugePages::Never).create().unwrap())
}

fn read_only(memory: &SharedMemory) -> Arc<ReadOnlyMemory> {
    let fd = memory.fd().try_clone_to_owned().unwrap();
    Arc::new(ReadOnlyMemory::from_fd(fd, memory.len()).unwrap())
}

impl Memory {
    pub fn new(geometry: Geometry) -> Arc<Self> {
        let work = shared("work", geometry.work_bytes());
        let control = shared("control", geometry.control_bytes());
        let link = shared("link", geometry.link_bytes());
        let window = shared("window", geometry.window_bytes());
        let memory = Memory {
            geometry,
            work_read: read_only(&work),
            link_read: read_only(&link),
            window_read: read_only(&window),
            work,
            control,
            link,
            window,
        };
        memory.reset();
        Arc::new(memory)
    }

    /// Resets the memory: zeroes, headers, and a canary in every byte of the control and link
    /// segments that has no meaning, and after the window.
    pub fn reset(&self) {
        for m in [&self.work, &self.control, &self.link, &self.window] {
            m.words(0, m.len() / 8).iter().for_each(|w| w.store(0, Ordering::Relaxed));
        }
        write_header(&self.work, Segment::Work, &self.geometry).unwrap();
        write_header(&self.control, Segment::Control, &self.geometry).unwrap();
        write_header(&self.link, Segment::Link, &self.geometry).unwrap();
        for (m, gap) in self.gaps() {
            m.words(gap.start, gap.len() / 8)
                .iter()
                .for_each(|w| w.store(u64::from_ne_bytes([CANARY; 8]), Ordering::Relaxed));
        }
    }

    fn gaps(&self) -> Vec<(&SharedMemory, Range<usize>)> {
        let g = &self.geometry;
        let line = abi::PUSHGATE_CTL_SLEEPING as usize;
        let signals = abi::PUSHGATE_CTL_SIGNALS as usize;
        let (cq, rx, landing) = (g.control_cq_offset(), g.control_rx_offset(), g.control_landing_offset());
        let c = &*self.control;
        let l = &*self.link;
        let w = &*self.window;
        vec![
            (c, 56..64),
            (c, abi::PUSHGATE_CTL_DELIVERED as usize + 8..line),
            (c, line + 8..PAGE),
            (c, signals + g.signals as usize * 8..cq),
            (c, cq + (16 << g.cq_log)..rx),
            (c, rx + (64 << g.rx_log)..landing),
            (c, landing + (UNIT << g.landing_log)..c.len()),
            (l, 56..64),
            (l, abi::PUSHGATE_LINK_READS as usize + 8..abi::PUSHGATE_LINK_SLEEPING as usize),
            (l, abi::PUSHGATE_LINK_SLEEPING as usize + 8..PAGE),
            (l, abi::PUSHGATE_LINK_RING as usize + (64 << g.link_log)..l.len()),
            (w, UNIT << g.window_log..w.len()),
        ]
    }

    /// Checks that only words with a meaning were written.
    pub fn check_gaps(&self) {
        for (m, gap) in self.gaps() {
            for (i, w) in m.words(gap.start, gap.len() / 8).iter().enumerate() {
                let found = w.load(Ordering::Relaxed);
                assert_eq!(found, u64::from_ne_bytes([CANARY; 8]), "byte {} of {gap:?}", i * 8);
            }
        }
        use pushgate_driver_shim::segment::check_header;
        for (m, kind) in [(&self.control, Segment::Control), (&self.link, Segment::Link)] {
            assert_eq!(check_header(m.words(0, 8), kind, m.len()), Ok(self.geometry));
        }
    }

    /// What an engine gets for a queue pair from here to `peer`. If the engines sleep, `bells` has
    /// the bell that this one sleeps on and the ringer of the peer's bell.
    pub fn joined(&self, peer: &Memory, bells: Option<(Bell, Ringer)>) -> QpMemory {
        let (bell, peer_bell) = bells.unzip();
        QpMemory {
            bell,
            work: self.work_read.clone(),
            control: self.control.clone(),
            link: self.link.clone(),
            peer_link: peer.link_read.clone(),
            peer_window: peer.window_read.clone(),
            peer_bell: peer_bell.map(Ringer::into_ring),
            peer_pid: Some(std::process::id()),
            in_program: true,
        }
    }
}

/// For each side of a queue pair, the bell that it sleeps on and the ringer of the other side's
/// bell.
pub fn bells() -> [(Bell, Ringer); 2] {
    let ((a, rings_a), (b, rings_b)) = (bell::pair().unwrap(), bell::pair().unwrap());
    [(a, rings_b), (b, rings_a)]
}

/// Memory to register, with a canary on either side.
pub struct Region {
    memory: Arc<SharedMemory>,
    pub bytes: usize,
}

impl Region {
    /// The offset of the memory, which is unaligned, as a program's own memory may be.
    const OFFSET: usize = PAGE + 27;

    pub fn new(bytes: usize) -> Self {
        let memory = shared("region", (Self::OFFSET + bytes + PAGE).next_multiple_of(PAGE));
        let region = Region { memory, bytes };
        region.reset();
        region
    }

    pub fn reset(&self) {
        let p = self.memory.as_ptr().as_ptr();
        // SAFETY: both ranges lie in the mapping, which this process may write; no reference into
        // it exists.
        unsafe {
            p.write_bytes(CANARY, self.memory.len());
            p.add(Self::OFFSET).write_bytes(0, self.bytes);
        }
    }

    pub fn memory(&self) -> RegionMemory {
        let address = self.memory.as_ptr().as_ptr() as usize + Self::OFFSET;
        RegionMemory::Host { address, keep: Some(self.memory.clone()) }
    }

    fn copy(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.end <= self.memory.len());
        let mut bytes = vec![0; range.len()];
        // SAFETY: the range was checked above; `bytes` is as long as the range and lies in other
        // memory.
        unsafe {
            let p = self.memory.as_ptr().as_ptr().add(range.start);
            std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), bytes.len());
        }
        bytes
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: the range lies in the mapping, which this process may write; no reference into it
        // exists.
        unsafe {
            let p = self.memory.as_ptr().as_ptr().add(Self::OFFSET + offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), p, bytes.len());
        }
    }

    pub fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.bytes);
        self.copy(Self::OFFSET + offset..Self::OFFSET + offset + length)
    }

    pub fn check_guards(&self) {
        let end = Self::OFFSET + self.bytes;
        for range in [0..Self::OFFSET, end..self.memory.len()] {
            assert!(
                self.copy(range).iter().all(|b| *b == CANARY),
                "a byte outside of the region was written"
            );
        }
    }
}

/// A received message; its payload stays in place until it is released.
pub type Message = Received;

/// A program's device on one side of a queue pair.
pub struct Device {
    pub own: Arc<Memory>,
    pub peer: Arc<Memory>,
    producer: Producer,
    /// Where inbound payload lies: in the peer's window, or in the mirror of that window.
    pub inbound: Arc<SharedMemory>,
}

impl std::ops::Deref for Device {
    type Target = Producer;
    fn deref(&self) -> &Producer {
        &self.producer
    }
}

impl std::ops::DerefMut for Device {
    fn deref_mut(&mut self) -> &mut Producer {
        &mut self.producer
    }
}

impl Device {
    pub fn new(own: &Arc<Memory>, peer: &Arc<Memory>) -> Self {
        let producer = Producer::new(own.geometry, &own.work, &own.control, own.window.clone(), None);
        Device { inbound: peer.window.clone(), own: own.clone(), peer: peer.clone(), producer }
    }

    pub fn take(&mut self, units: u64, signaled: bool) -> Option<(u64, u64)> {
        self.reserve(units, signaled).map(|r| (r.slot, r.place))
    }

    pub fn publish(&self, slot: u64, words: &RecordWords) {
        self.producer.publish(slot, words);
        self.wake();
    }

    pub fn store_window(&self, unit: u64, bytes: &[u8]) {
        // SAFETY: a slice can be read.
        unsafe { self.push(unit, bytes.as_ptr(), bytes.len()) };
    }

    /// Posts `length` bytes of the region that the record names. False: no credit.
    pub fn post_from(&mut self, record: Record, length: usize) -> bool {
        assert!(record.has(Record::REGION));
        // SAFETY: a payload in a region is not read here.
        unsafe { self.post_raw(record, std::ptr::null(), length) }.is_some()
    }

    /// Copies a message's payload out, wherever it lies, except from posted buffers.
    pub fn read(&self, m: &Message, out: &mut [u8]) {
        let out = &mut out[..m.length as usize];
        assert_eq!(m.flags & Record::BUFFER, 0);
        if m.flags & Record::INLINE != 0 {
            out.copy_from_slice(&m.inline[..out.len()]);
            return;
        }
        let (memory, base, ring) = if m.flags & Record::LANDING != 0 {
            let g = &self.own.geometry;
            (&self.own.control, g.control_landing_offset(), UNIT << g.landing_log)
        } else {
            (&self.inbound, 0, UNIT << self.peer.geometry.window_log)
        };
        let place = m.place as usize * UNIT;
        assert!(place + out.len() <= ring, "{m:?} leaves its ring");
        // SAFETY: the payload lies in the mapping, and until the release nothing writes there (P1),
        // which the caller's comparison verifies.
        unsafe {
            let p = memory.as_ptr().as_ptr().add(base + place);
            std::ptr::copy_nonoverlapping(p, out.as_mut_ptr(), out.len());
        }
    }

    pub fn release(&mut self, count: u64) {
        self.producer.release(count);
        self.wake();
    }

    pub fn post_recv(&mut self, key: u32, offset: u64, length: u32, tag: u32) {
        self.producer.post_recv_unasked(key, offset, length, tag);
        self.wake();
    }
}

/// Both sides of a queue pair, each with its own engine state and device.
pub struct Pair {
    pub ends: [Endpoint; 2],
    pub devices: [Device; 2],
    pub mover: Option<Box<dyn Mover>>,
    now: u64,
    /// Over RDMA alone.
    #[allow(dead_code, reason = "only forged records need it")]
    wires: Option<[rdma::Wire; 2]>,
}

fn local_ends(m: &[Arc<Memory>; 2], options: [QpOptions; 2]) -> [Endpoint; 2] {
    [0, 1].map(|i| Endpoint::local(m[i].joined(&m[1 - i], None), options[i]).unwrap())
}

impl Pair {
    /// Makes a pair over the queue pair that the suite runs over.
    pub fn new(geometry: Geometry, options: [QpOptions; 2]) -> Self {
        Pair::over(carrier(), geometry, options)
    }

    /// Makes a pair over `local`, whatever the suite runs over: for features that no other queue
    /// pair has.
    pub fn local(geometry: Geometry, options: [QpOptions; 2]) -> Self {
        Pair::over(Carrier::Local, geometry, options)
    }

    fn over(carrier: Carrier, geometry: Geometry, options: [QpOptions; 2]) -> Self {
        let m = [0, 1].map(|rank| Memory::new(Geometry { rank, ..geometry }));
        let mut devices = [Device::new(&m[0], &m[1]), Device::new(&m[1], &m[0])];
        let posts = [0, 1].map(|i| options[i].posted_receives);
        let mut wires = None;
        let ends = match carrier {
            Carrier::Local => local_ends(&m, options),
            Carrier::Rdma { .. } => {
                let both = wires.insert(rdma::connect([&m[0], &m[1]], posts));
                devices
                    .iter_mut()
                    .zip(&*both)
                    .for_each(|(device, wire)| device.inbound = wire.mirror.clone());
                [0, 1].map(|i| both[i].endpoint(&m[i], options[i]))
            }
            Carrier::Tcp => {
                let both = tcp::connect([&m[0], &m[1]], posts);
                devices.iter_mut().zip(&both).for_each(|(device, wire)| device.inbound = wire.mirror.clone());
                [0, 1].map(|i| both[i].endpoint(&m[i], options[i]))
            }
        };
        Pair { ends, devices, mover: None, now: 0, wires }
    }

    /// Writes a record into the slot for `cursor` of the other side's link, as a rogue engine of
    /// side `from` could.
    #[cfg(feature = "test-ungated")]
    pub fn forge(&self, from: usize, cursor: u64, record: &Record) {
        use pushgate_driver_shim::record::lap_of;
        use pushgate_link::ring;

        let log = self.devices[from].own.geometry.link_log;
        match &self.wires {
            Some(wires) => wires[from].forge_record(cursor, log, &record.encode(lap_of(cursor, log))),
            None => {
                let link = &self.devices[from].own.link;
                let slots = link.words(abi::PUSHGATE_LINK_RING as usize, 8 << log);
                ring::publish(slots, cursor, log, &record.encode(0));
            }
        }
    }

    pub fn default() -> Self {
        Pair::new(GEOMETRY, [options(1), options(0)])
    }

    pub fn poll(&mut self, end: usize) -> bool {
        self.ends[end].poll(&mut self.mover)
    }

    /// Polls both ends until neither finds work; no time passes.
    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            if !(self.poll(0) | self.poll(1)) {
                if self.ends.iter().any(|e| e.status().is_some()) {
                    self.tick(self.now);
                }
                // A completion of the kernel may have come since.
                if self.ends.iter().all(|end| !end.has_work()) {
                    return;
                }
            }
        }
        panic!("the endpoints find work for ever, or an engine would never sleep");
    }

    /// Does for both ends what an engine does from time to time, and the pass that ends one which finds that its peer has ended.
    pub fn tick(&mut self, now: u64) {
        self.now = now;
        self.ends.iter_mut().for_each(|e| e.tick(now));
        for end in 0..2 {
            if self.ends[end].is_ending() {
                self.poll(end);
            }
        }
    }

    pub fn codes(&self) -> [Option<u32>; 2] {
        [0, 1].map(|i| {
            let (device, end) = (self.devices[i].status(), self.ends[i].status());
            assert_eq!(device.map(|s| s.code), end.map(|s| s.code), "side {i}");
            device.map(|s| s.code as u32)
        })
    }

    /// Checks P4 at both ends.
    pub fn assert_clean(&self) {
        for (i, end) in self.ends.iter().enumerate() {
            let c = end.counters();
            assert_eq!((c.dropped, c.rnr, c.refused, c.stuck), (0, 0, 0, 0), "side {i}");
            assert_eq!(self.devices[i].status(), None, "side {i}");
            self.devices[i].own.check_gaps();
        }
    }
}

/// A record whose payload of at most five words lies in the WQE.
pub fn inline_send(wr_id: u32) -> Record {
    Record { flags: Record::INLINE, id: wr_id, tag: wr_id, ..Record::new(Opcode::Send) }
}

/// A record whose payload lies in a region.
pub fn region_send(wr_id: u32, lkey: u32, offset: u64) -> Record {
    Record { flags: Record::REGION, place: lkey, place_offset: offset, ..window_send(wr_id) }
}

/// A record whose payload lies in the window.
pub fn window_send(wr_id: u32) -> Record {
    Record { id: wr_id, tag: wr_id, ..Record::new(Opcode::Send) }
}
