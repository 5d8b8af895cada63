//! The collectives: how many elements of a size go where, and what bandwidth is counted, as in nccl-tests.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::nccl::{Call, Comm};

/// Bytes of an element, a float.
pub const ELEMENT: u64 = 4;
/// The root of a broadcast.
pub const ROOT: u32 = 0;

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    AllReduce,
    #[serde(rename = "sendrecv")]
    SendRecv,
    #[serde(rename = "alltoall")]
    AllToAll,
    AllGather,
    ReduceScatter,
    Broadcast,
}

use Collective::*;

/// How a size is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Elements that a call is told: of all, or of each rank's part.
    pub count: u64,
    /// Bytes of all parts together: the size that is printed, and that bandwidth is counted of.
    pub bytes: u64,
    /// Bytes that a rank reads.
    pub sent: u64,
    /// Bytes that a rank writes.
    pub received: u64,
}

impl Collective {
    pub const ALL: [Collective; 6] = [AllReduce, SendRecv, AllToAll, AllGather, ReduceScatter, Broadcast];

    pub fn name(self) -> &'static str {
        match self {
            AllReduce => "all_reduce",
            SendRecv => "sendrecv",
            AllToAll => "alltoall",
            AllGather => "all_gather",
            ReduceScatter => "reduce_scatter",
            Broadcast => "broadcast",
        }
    }

    /// The reduction and the root, as nccl-tests prints them.
    pub fn redop_and_root(self) -> (&'static str, i32) {
        match self {
            AllReduce | ReduceScatter => ("sum", -1),
            Broadcast => ("none", ROOT as i32),
            _ => ("none", -1),
        }
    }

    /// Whether the size is divided into a part for each rank.
    fn in_parts(self) -> bool {
        matches!(self, AllToAll | AllGather | ReduceScatter)
    }

    /// Divides a size. Where it is divided into parts, every part is whole elements, at least one.
    pub fn shape(self, size: u64, ranks: u32) -> Shape {
        let parts = if self.in_parts() { u64::from(ranks) } else { 1 };
        let count = (size / ELEMENT / parts).max(1);
        let (part, bytes) = (count * ELEMENT, count * ELEMENT * parts);
        let sent = if self == AllGather { part } else { bytes };
        let received = if self == ReduceScatter { part } else { bytes };
        Shape { count, bytes, sent, received }
    }

    /// Bus bandwidth for each byte of bandwidth (nccl-tests, doc/PERFORMANCE.md).
    pub fn bus(self, ranks: u32) -> f64 {
        let n = f64::from(ranks);
        match self {
            AllReduce => 2.0 * (n - 1.0) / n,
            AllToAll | AllGather | ReduceScatter => (n - 1.0) / n,
            SendRecv | Broadcast => 1.0,
        }
    }

    /// Puts one call on a stream.
    ///
    /// # Safety
    /// Input and output are device memory of the sizes of the shape, and they and the stream live until the stream has
    /// passed the call.
    pub unsafe fn launch(self, comm: &Comm, call: Call, shape: Shape, rank: u32, ranks: u32) -> Result<()> {
        let count = shape.count as usize;
        let parts = || (0..ranks).map(|peer| (peer, u64::from(peer) * shape.count * ELEMENT));
        // SAFETY: the caller's promise, which is that of each of these.
        unsafe {
            match self {
                AllReduce => comm.all_reduce(call, count),
                ReduceScatter => comm.reduce_scatter(call, count),
                AllGather => comm.all_gather(call, count),
                Broadcast => comm.broadcast(call, count, ROOT),
                AllToAll => comm.exchange(call, count, parts(), parts()),
                SendRecv => {
                    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                    comm.exchange(call, count, [(next, 0)].into_iter(), [(previous, 0)].into_iter())
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_divided_and_counted_as_in_nccl_tests() {
        let shape = |c: Collective, size, ranks| {
            let Shape { count, bytes, sent, received } = c.shape(size, ranks);
            [count, bytes, sent, received]
        };
        assert_eq!(shape(AllReduce, 1024, 2), [256, 1024, 1024, 1024]);
        assert_eq!(shape(SendRecv, 1024, 2), [256, 1024, 1024, 1024]);
        assert_eq!(shape(Broadcast, 1024, 4), [256, 1024, 1024, 1024]);
        assert_eq!(shape(AllToAll, 1024, 4), [64, 1024, 1024, 1024]);
        assert_eq!(shape(AllGather, 1024, 4), [64, 1024, 256, 1024]);
        assert_eq!(shape(ReduceScatter, 1024, 4), [64, 1024, 1024, 256]);
        // Parts are whole elements, at least one.
        assert_eq!(shape(AllGather, 4, 4), [1, 16, 4, 16]);
        assert_eq!(shape(AllToAll, 1000, 3), [83, 996, 996, 996]);
        let bus = |c: Collective| c.bus(4);
        assert_eq!([AllReduce, AllGather, SendRecv, Broadcast].map(bus), [1.5, 0.75, 1.0, 1.0]);
    }

    #[test]
    fn a_name_is_the_same_in_arguments_and_in_json() {
        for collective in Collective::ALL {
            assert_eq!(serde_json::to_value(collective).unwrap(), collective.name());
        }
    }
}
