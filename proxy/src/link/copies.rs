//! Messages on their way that the peer's engine will copy into a region: short
//! ones, and those that go by the mirror.
//!
//! What the RDMA device writes straight into a region is there before the peer's
//! engine has looked at the messages before it. Were it to the same bytes, the
//! older payload would be copied over the newer one (P6).
//!
//! Where a device may place WRITEs in any order, payload that is written straight into a region counts as
//! well until its WRITE has completed: of two WRITEs to the same bytes under way the older one could be
//! placed last.

use std::collections::VecDeque;

/// Bytes of a region that a message will be copied to, or written.
struct Copy {
    sequence: u64,
    /// The WRITE after whose completion the bytes are there; the greatest number for a copy of the peer's.
    wr: u64,
    rkey: u32,
    begin: u64,
    end: u64,
}

/// Those that the peer does not have yet, in their order.
pub(in crate::link) struct Copies(VecDeque<Copy>);

impl Copies {
    /// For at most so many messages in flight.
    pub(in crate::link) fn new(messages: usize) -> Self {
        Copies(VecDeque::with_capacity(messages))
    }

    /// Message `sequence` was posted so that the peer copies it there.
    #[inline]
    pub(in crate::link) fn posted(&mut self, sequence: u64, to: (u32, u64), length: u32) {
        self.written(sequence, u64::MAX, to, length);
    }

    /// Message `sequence` was posted, and work request `wr` writes its payload there.
    #[inline]
    pub(in crate::link) fn written(
        &mut self,
        sequence: u64,
        wr: u64,
        (rkey, begin): (u32, u64),
        length: u32,
    ) {
        self.0.push_back(Copy { sequence, wr, rkey, begin, end: begin.saturating_add(length as u64) });
    }

    /// The peer has so many messages, and `done` is the last work request that has completed. What is
    /// there lets go, as far as nothing older is not: so [`Copies::touch`] looks at less.
    #[inline]
    pub(in crate::link) fn received(&mut self, received: u64, done: u64) {
        while self.0.front().is_some_and(|c| c.sequence < received || c.wr <= done) {
            self.0.pop_front();
        }
    }

    /// Another link takes the place of the present one. The peer has accepted the first `accepted` messages, and what the
    /// device wrote of these is there; the others are posted again.
    pub(in crate::link) fn rewind(&mut self, accepted: u64) {
        self.0.retain(|c| c.sequence < accepted && c.wr == u64::MAX);
    }

    /// True if one will be copied to any of these bytes, or is being written there. `done` is the last
    /// work request that has completed.
    #[inline]
    pub(in crate::link) fn touch(&self, (rkey, begin): (u32, u64), length: u32, done: u64) -> bool {
        let end = begin.saturating_add(length as u64);
        self.0.iter().any(|c| c.rkey == rkey && c.begin < end && begin < c.end && c.wr > done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p6_what_is_to_be_copied_is_known_until_the_peer_has_it() {
        let mut c = Copies::new(4);
        c.posted(3, (7, 100), 50);
        c.posted(5, (7, 400), 1);
        c.posted(6, (8, 0), 10);
        let touched = |c: &Copies| {
            let at = [
                (7, 149, 9),
                (7, 90, 11),
                (7, 0, 1000),
                (7, 150, 250),
                (7, 50, 50),
                (7, 400, 1),
                (8, 9, 1),
                (9, 0, 9),
            ];
            at.map(|(rkey, offset, length)| c.touch((rkey, offset), length, 9))
        };
        assert_eq!(touched(&c), [true, true, true, false, false, true, true, false]);
        c.received(3, 9);
        assert_eq!(touched(&c), [true, true, true, false, false, true, true, false]);
        c.received(4, 9);
        assert_eq!(touched(&c), [false, false, true, false, false, true, true, false]);
        c.received(7, 9);
        assert_eq!(touched(&c), [false; 8]);
        // Offsets that the peer will refuse.
        c.posted(7, (7, u64::MAX - 1), 50);
        assert!(c.touch((7, u64::MAX - 1), 1, 9) && !c.touch((7, 0), 50, 9));
    }

    #[test]
    fn p6_what_is_being_written_is_known_until_its_write_has_completed() {
        let mut c = Copies::new(4);
        c.written(3, 7, (1, 100), 50);
        assert!(c.touch((1, 149), 1, 6) && !c.touch((1, 150), 1, 6));
        assert!(!c.touch((1, 149), 1, 7));
        c.received(4, 6);
        assert!(!c.touch((1, 149), 1, 6));
    }

    #[test]
    fn what_is_there_is_forgotten_and_a_copy_of_the_peers_is_not() {
        let mut c = Copies::new(4);
        c.written(3, 7, (1, 100), 50);
        c.written(4, 9, (1, 200), 50);
        c.posted(5, (1, 300), 50);
        c.written(6, 13, (1, 400), 50);
        c.received(3, 8);
        assert_eq!(c.0.len(), 3);
        c.received(3, 20);
        assert_eq!(c.0.len(), 2, "those behind a copy wait for it");
        assert!(c.touch((1, 349), 1, 20) && !c.touch((1, 449), 1, 20));
        c.received(6, 20);
        assert_eq!(c.0.len(), 0);
    }
}
