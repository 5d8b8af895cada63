//! The peer's posted receives, as it told of them: where a SEND may be written
//! without a stop at either end.
//!
//! Both ends follow one rule: a SEND takes the oldest receive that no message has
//! taken and whose tag is its own or any. The sender knows the receives in the
//! order in which they were posted, up to some number. If one of those fits it is
//! the one that the receiver will find, whatever was posted since; if none does,
//! the message waits here. So both always name the same one, and the receiver
//! checks that (P8): it goes by its own list alone.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::lap_of;

use crate::ring;

/// Words of an entry: those of a posted receive, laps included.
pub(super) const RECEIVE_WORDS: usize = abi::PUSHGATE_RECV_WORDS as usize;

/// A receive of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerReceive {
    /// How many were posted before it.
    pub(super) number: u64,
    pub(super) rkey: u32,
    pub(super) offset: u64,
    pub(super) length: u32,
    pub(super) tag: u32,
}

impl PeerReceive {
    fn takes(&self, tag: u32) -> bool {
        self.tag == abi::PUSHGATE_ANY_TAG || self.tag == tag
    }
}

/// Those that no message of ours has taken yet.
pub(super) struct PeerReceives {
    log: u32,
    /// Taken out of the ring, oldest first.
    known: VecDeque<PeerReceive>,
    /// How many were.
    seen: u64,
}

impl PeerReceives {
    /// For a peer that posts at most `1 << log` at once.
    pub(super) fn new(log: u32) -> Self {
        PeerReceives { log, known: VecDeque::with_capacity(1 << log), seen: 0 }
    }

    /// The entry of `number`, if all of it is there.
    fn entry(&self, ring: &[AtomicU64], number: u64) -> Option<PeerReceive> {
        let first = (number as usize & ((1 << self.log) - 1)) * RECEIVE_WORDS;
        let lap = lap_of(number, self.log);
        let mut words = [0; RECEIVE_WORDS];
        for (to, word) in words.iter_mut().zip(&ring[first..first + RECEIVE_WORDS]) {
            *to = ring::observe(word);
            if (*to >> abi::PUSHGATE_LAP_SHIFT) as u8 != lap {
                return None;
            }
        }
        Some(PeerReceive {
            number,
            rkey: words[0] as u32,
            offset: words[1] & abi::PUSHGATE_DATA_MASK,
            length: words[2] as u32,
            tag: words[3] as u32,
        })
    }

    /// Those that are in the ring and not yet taken out: no more than were free to be
    /// posted, whatever a peer writes there.
    fn fresh<'a>(&'a self, ring: &'a [AtomicU64]) -> impl Iterator<Item = PeerReceive> + 'a {
        let room = (1u64 << self.log) - self.known.len() as u64;
        (self.seen..self.seen + room).map_while(|number| self.entry(ring, number))
    }

    /// The receive that a SEND of `tag` will take, if the peer has told of it.
    pub(super) fn find(&self, ring: &[AtomicU64], tag: u32) -> Option<PeerReceive> {
        let known = self.known.iter().copied().find(|r| r.takes(tag));
        known.or_else(|| self.fresh(ring).find(|r| r.takes(tag)))
    }

    /// The same, and takes it.
    pub(super) fn take(&mut self, ring: &[AtomicU64], tag: u32) -> Option<PeerReceive> {
        while self.known.len() < 1 << self.log
            && let Some(new) = self.entry(ring, self.seen)
        {
            self.known.push_back(new);
            self.seen += 1;
        }
        let at = self.known.iter().position(|r| r.takes(tag))?;
        self.known.remove(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::Ordering;

    const ANY: u32 = abi::PUSHGATE_ANY_TAG;

    fn ring(log: u32) -> Vec<AtomicU64> {
        (0..RECEIVE_WORDS << log).map(|_| AtomicU64::new(0)).collect()
    }

    fn store(ring: &[AtomicU64], log: u32, number: u64, tag: u32, words: usize) {
        let first = (number as usize & ((1 << log) - 1)) * RECEIVE_WORDS;
        let lap = (lap_of(number, log) as u64) << abi::PUSHGATE_LAP_SHIFT;
        for (word, value) in ring[first..][..words].iter().zip([7, number * 10, 100, tag as u64]) {
            word.store(value | lap, Ordering::Relaxed);
        }
    }

    #[test]
    fn p2_an_entry_counts_when_all_its_words_are_there() {
        let (ring, mut r) = (ring(1), PeerReceives::new(1));
        for words in 0..4 {
            store(&ring, 1, 0, 5, words);
            assert_eq!((r.find(&ring, 5), r.take(&ring, 5)), (None, None));
        }
        store(&ring, 1, 1, 5, 4);
        assert_eq!(r.find(&ring, 5), None, "an older one may be of this tag");
        store(&ring, 1, 0, 6, 4);
        let found = r.find(&ring, 5).unwrap();
        assert_eq!((found.number, found.rkey, found.offset, found.length), (1, 7, 10, 100));
        assert_eq!(r.take(&ring, 5), Some(found));
        assert_eq!(r.take(&ring, 5), None);
    }

    #[test]
    fn p8_a_peer_that_tells_of_more_than_it_may_fills_no_memory() {
        let (ring, mut r) = (ring(2), PeerReceives::new(2));
        for number in 0..100 {
            store(&ring, 2, number, 1, 4);
            assert_eq!((r.find(&ring, 2), r.take(&ring, 2)), (None, None));
            assert!(r.known.len() <= 4 && r.known.capacity() < 8);
        }
    }

    proptest! {
        /// A sender that knows less than the receiver has in its list takes the same receive,
        /// or waits, and it waits only if none that it was told of fits.
        #[test]
        fn p4_p6_both_ends_name_the_same_receive(
            steps in prop::collection::vec((0u8..5, 0u32..4), 0..300),
        ) {
            let (ring, mut r) = (ring(3), PeerReceives::new(3));
            // The receiver's: number and tag of those that no message has taken.
            let mut list: Vec<(u64, u32)> = Vec::new();
            let mut tags = Vec::new();
            let (mut told, mut early, mut taken) = (0, 0, 0);
            for (step, tag) in steps {
                match step {
                    0 if tags.len() - taken < 8 => {
                        let tag = if tag == 3 { ANY } else { tag };
                        list.push((tags.len() as u64, tag));
                        tags.push(tag);
                    }
                    1 if told < tags.len() => {
                        store(&ring, 3, told as u64, tags[told], 4);
                        told = early.max(told + 1);
                    }
                    // The next but one arrives first, and all of it but a word of the next.
                    2 if told + 1 < tags.len() => {
                        store(&ring, 3, told as u64, tags[told], 3);
                        store(&ring, 3, told as u64 + 1, tags[told + 1], 4);
                        early = told + 2;
                    }
                    3.. => {
                        let fits = |t: u32| t == ANY || t == tag;
                        let at = list.iter().position(|(_, t)| fits(*t));
                        let known = at.filter(|at| list[*at].0 < told as u64);
                        let expected = known.map(|at| list.remove(at).0);
                        prop_assert_eq!(r.find(&ring, tag).map(|r| r.number), expected);
                        prop_assert_eq!(r.take(&ring, tag).map(|r| r.number), expected);
                        taken += expected.is_some() as usize;
                    }
                    _ => {}
                }
            }
        }
    }
}
