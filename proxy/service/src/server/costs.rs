//! What a program, its queue pairs and its regions take of their user's quota.

use crate::wire::{Amounts, QP_FDS};

/// What one program takes of its user's quota, without its queue pairs.
///
/// Descriptors: the engine's two bells and two of the way of frames, the flight recorder's first memory. Bytes: that memory, the
/// stacks of two threads as far as they are used, the largest frame.
pub(super) const PROGRAM: Amounts = Amounts { programs: 1, queue_pairs: 0, bytes: 256 << 10, descriptors: 5 };

/// What the proxy has in memory for a queue pair besides its rings' entries: the endpoint, the place in the flight recorder.
const QP_BYTES: u64 = 64 << 10;

/// What a queue pair takes of its user's quota. `segments`: bytes of its work, control and both link segments, `links` of these
/// being the links'; `mapped`: bytes of all that is mapped for it.
///
/// Descriptors: five of memory, that of its session, two bells, two segments while its link is replaced, and one of the flight
/// recorder. Bytes: what is mapped, two segments while its link is replaced, and what the proxy has of its own, which is less
/// than 64 bytes for each entry of a ring, as an entry itself.
pub(super) fn queue_pair(mapped: u64, segments: u64, links: u64) -> Amounts {
    let descriptors = QP_FDS as u64 + 6;
    Amounts { programs: 0, queue_pairs: 1, bytes: mapped + segments + links + QP_BYTES, descriptors }
}

/// What a region takes of its user's quota.
pub(super) fn region(bytes: u64) -> Amounts {
    Amounts { programs: 0, queue_pairs: 0, bytes, descriptors: 1 }
}
