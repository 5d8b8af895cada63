//! A pair of endpoints with a region at each end, for messages out of regions.

use pushgate_engine::endpoint::QpOptions;

use crate::bytes;
use crate::common::*;

/// A region of each side; the sender's holds the bytes of `bytes(3, ...)`.
pub struct Sending {
    pub pair: Pair,
    pub from: Region,
    pub lkey: u32,
    pub to: Region,
    pub rkey: u32,
}

/// Sends over the queue pair that the suite runs over. RDMA needs posted receives: without them it
/// refuses a SEND out of a region.
pub fn sending(posted_receives: bool, length: usize) -> Sending {
    let receiver = QpOptions { posted_receives, ..options(0) };
    sending_over(Pair::new(GEOMETRY, [options(1), receiver]), length)
}

/// Sends over `local`, whatever the suite runs over.
pub fn sending_locally(posted_receives: bool, length: usize) -> Sending {
    let receiver = QpOptions { posted_receives, ..options(0) };
    sending_over(Pair::local(GEOMETRY, [options(1), receiver]), length)
}

fn sending_over(mut pair: Pair, length: usize) -> Sending {
    let [from, to] = [0, 1].map(|_| Region::new(length));
    from.write(0, &bytes(3, length));
    let lkey = pair.ends[0].add_region(from.memory(), length as u64).unwrap();
    let rkey = pair.ends[1].add_region(to.memory(), length as u64).unwrap();
    // As the engine, which answers a program then: a large region is registered beside it.
    pushgate_tests::wait_until("the regions are registered", || {
        (0..2).for_each(|end| _ = pair.poll(end));
        pair.ends.iter().all(|end| end.regions_told())
    });
    Sending { pair, from, lkey, to, rkey }
}
