//! What a release costs by itself: staging ring and gate without rings, queue
//! pair or device; and the whole way through two endpoints on one core, without
//! a device. For `pushgate bench gate`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushgate_core::gate::{Budget, Gate, Need};
use pushgate_core::staging::Staging;
use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::{HugePages, ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_link::memory;
use pushgate_link::ring::{self, Found};

use crate::endpoint::{Endpoint, QpMemory, QpOptions};

/// Messages between two looks at the peer's counts, as in the engine.
const BATCH: u64 = 64;

/// Time for `batches` times 64 inline SENDs: each is decoded, checked, given a
/// permit, released and, once for each batch, completed and retired.
pub fn releases(batches: u64) -> (u64, Duration) {
    let budget = Budget { send_slots: 1024, cq_slots: 1024, bytes: 1 << 30 };
    let (gate, mut staging) = (Gate::new(1024, budget), Staging::new(10, 14));
    let words: RecordWords =
        Record { flags: Record::INLINE, length: 8, ..Record::new(Opcode::Send) }.encode(1);
    let mut checksum = 0;
    let start = Instant::now();
    for batch in 0..batches {
        gate.grant((batch + 1) * BATCH).expect("no more than the peer has");
        for _ in 0..BATCH {
            // The compiler must not know what it decodes.
            let record = Record::decode(std::hint::black_box(&words)).expect("well formed");
            staging.check(&record).expect("inline payload has no place");
            let permit = gate.reserve(Need { bytes: record.length, receive: true }).expect("all was granted");
            permit.post();
            staging.release(&record);
        }
        gate.complete(BATCH as u32);
        let done = staging.messages();
        staging.deliver(done);
        gate.retire(staging.retire(done, |_| {}).bytes);
        checksum ^= std::hint::black_box(staging.credit_word());
    }
    let time = start.elapsed();
    std::hint::black_box(checksum);
    (batches * BATCH, time)
}

/// Segments of one side: window, work, control, link.
struct Side([Arc<SharedMemory>; 4]);

impl Side {
    fn new(geometry: &Geometry) -> Result<Self, ShimError> {
        let make = |kind: Option<Segment>| -> Result<_, ShimError> {
            let bytes = kind.map_or(geometry.window_bytes(), |k| geometry.bytes(k));
            let memory =
                SharedMemory::builder("pushgate-measure", bytes).huge_pages(HugePages::Never).create()?;
            if let Some(kind) = kind {
                write_header(&memory, kind, geometry)?;
            }
            Ok(Arc::new(memory))
        };
        Ok(Side([
            make(None)?,
            make(Some(Segment::Work))?,
            make(Some(Segment::Control))?,
            make(Some(Segment::Link))?,
        ]))
    }

    fn read_only(&self, which: usize) -> Result<Arc<ReadOnlyMemory>, ShimError> {
        let memory = &self.0[which];
        let fd = memory.fd().try_clone_to_owned().map_err(|source| ShimError::System {
            name: "pushgate-measure".into(),
            bytes: memory.len(),
            call: "dup",
            source,
            remedy: "raise the limit of open files",
        })?;
        Ok(Arc::new(ReadOnlyMemory::from_fd(fd, memory.len())?))
    }
}

/// Time for `batches` times 64 inline SENDs from a WQE ring through two joined
/// endpoints into a receive ring, written and consumed by the same thread: the
/// engine's part of a message, with every line in this core's cache.
pub fn messages(batches: u64) -> Result<(u64, Duration), Box<dyn std::error::Error>> {
    let log = 10;
    let geometry = |rank| Geometry {
        window_log: 6,
        slots_log: log,
        cq_log: log,
        rx_log: log,
        link_log: log,
        landing_log: 6,
        signals: 1,
        rank,
    };
    let sides = [Side::new(&geometry(0))?, Side::new(&geometry(1))?];
    let endpoint = |own: usize| -> Result<Endpoint, Box<dyn std::error::Error>> {
        let (side, other) = (&sides[own], &sides[1 - own]);
        let memory = QpMemory {
            work: side.read_only(1)?,
            control: side.0[2].clone(),
            link: side.0[3].clone(),
            peer_link: other.read_only(3)?,
            peer_window: other.read_only(0)?,
            bell: None,
            peer_bell: None,
            peer_pid: None,
            in_program: true,
        };
        let options = QpOptions {
            peer: 1 - own as u32,
            roles: false,
            posted_receives: false,
            reader_flushes: false,
            stuck_ns: u64::MAX,
            in_place_share: 192,
            slow_ns: u64::MAX,
            ungated: false,
            key_seed: 1,
        };
        Ok(Endpoint::local(memory, options)?)
    };
    let (mut sender, mut receiver) = (endpoint(0)?, endpoint(1)?);
    let wqes = memory::Words::writable(&sides[0].0[1], abi::PUSHGATE_WORK_RING as usize, 8 << log);
    let rx = memory::Words::writable(&sides[1].0[2], geometry(1).control_rx_offset(), 8 << log);
    let consumed = memory::Words::writable(&sides[1].0[1], abi::PUSHGATE_WORK_CONSUMED as usize, 1);
    let template: RecordWords =
        Record { flags: Record::INLINE, length: 8, ..Record::new(Opcode::Send) }.encode(0);
    let mut words = template;
    let (mut posted, mut taken) = (0u64, 0u64);
    let start = Instant::now();
    while taken < batches * BATCH {
        for _ in 0..BATCH.min(batches * BATCH - posted) {
            // Inline payload below 2^56 is word 3 alone.
            let [w0, w1, w2, _, w4, w5, w6, w7] = template;
            ring::publish(&wqes, posted, log, &[w0, w1, w2, posted, w4, w5, w6, w7]);
            posted += 1;
        }
        sender.poll(&mut None);
        receiver.poll(&mut None);
        while ring::look_into(&rx, taken, log, &mut words) == Found::Ready {
            if words[3] & abi::PUSHGATE_DATA_MASK != taken {
                return Err(format!("message {taken} holds {:#x}", words[3]).into());
            }
            taken += 1;
        }
        ring::advance(&consumed[0], taken);
        if sender.status().is_some() || receiver.status().is_some() {
            return Err("a queue pair failed".into());
        }
    }
    Ok((taken, start.elapsed()))
}
