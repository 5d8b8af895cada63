//! What a release costs by itself: staging ring and gate without rings, queue
//! pair or device. For `pushgate bench gate`.

use std::time::{Duration, Instant};

use pushgate_driver_shim::record::{Opcode, Record, Words};

use crate::gate::{Gate, Limits, Need};
use crate::staging::Staging;

/// Messages between two looks at the peer's counts, as in the engine.
const BATCH: u64 = 64;

/// Time for `batches` times 64 inline SENDs: each is decoded, checked, given a
/// permit, released and, once for each batch, completed and retired.
pub fn releases(batches: u64) -> (u64, Duration) {
    let limits = Limits { send_slots: 1024, cq_slots: 1024, receives: 1024, bytes: 1 << 30 };
    let (gate, mut staging) = (Gate::new(limits), Staging::new(10, 14));
    let words: Words = Record { flags: Record::INLINE, length: 8, ..Record::new(Opcode::Send) }.encode(1);
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
