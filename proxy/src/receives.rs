//! The peer's posted receives, as a sender knows them.
//!
//! Over RDMA the sender's engine writes a SEND to where its receive says, without a stop at
//! either end. A program may ask before it sends whether a receive of a message's tag is
//! there ([`PostedReceives`]): a SEND that no receive fits would hold up those behind it.
//!
//! Both ends follow one rule: a SEND takes the oldest receive that no message has
//! taken and whose tag is its own or any. The sender knows the receives in the
//! order in which they were posted, up to some number. If one of those fits it is
//! the one that the receiver will find, whatever was posted since; if none does,
//! the message waits here. So both always name the same one, and the receiver
//! checks that (P8): it goes by its own list alone.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::ReadOnlyMemory;
use pushgate_driver_shim::record::lap_of;
use pushgate_driver_shim::segment::{Geometry, Segment, check_header};

use crate::endpoint::EndpointError;
use crate::memory::Words;
use crate::ring;

/// Words of an entry: those of a posted receive, laps included.
pub(crate) const RECEIVE_WORDS: usize = abi::PUSHGATE_RECV_WORDS as usize;

/// A receive of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerReceive {
    /// How many were posted before it.
    pub number: u64,
    /// The region of its buffer.
    pub rkey: u32,
    /// Where the buffer begins in the region, bytes.
    pub offset: u64,
    /// Bytes that it takes.
    pub length: u32,
    /// Tag of the messages that it takes, or `PUSHGATE_ANY_TAG`.
    pub tag: u32,
}

impl PeerReceive {
    fn takes(&self, tag: u32) -> bool {
        self.tag == abi::PUSHGATE_ANY_TAG || self.tag == tag
    }
}

/// Those that no message of ours has taken yet.
pub(crate) struct PeerReceives {
    log: u32,
    /// Taken out of the ring, oldest first.
    known: VecDeque<PeerReceive>,
    /// How many were.
    seen: u64,
}

impl PeerReceives {
    /// For a peer that posts at most `1 << log` at once.
    pub(crate) fn new(log: u32) -> Self {
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
        let room = (1u64 << self.log).saturating_sub(self.known.len() as u64);
        (self.seen..self.seen + room).map_while(|number| self.entry(ring, number))
    }

    /// The receive that a SEND of `tag` will take, if the peer has told of it.
    pub(crate) fn find(&self, ring: &[AtomicU64], tag: u32) -> Option<PeerReceive> {
        let known = self.known.iter().copied().find(|r| r.takes(tag));
        known.or_else(|| self.fresh(ring).find(|r| r.takes(tag)))
    }

    /// Puts a receive back that a message had taken: the message is posted again.
    #[cold]
    pub(crate) fn put_back(&mut self, receive: PeerReceive) {
        // No more than the ring has: a peer that told of more has broken the rule, and its SENDs wait or are refused.
        if self.known.len() < 1 << self.log {
            let at = self.known.partition_point(|known| known.number < receive.number);
            self.known.insert(at, receive);
        }
    }

    /// Takes the receive that a SEND of `tag` will take, if the peer has told of it. The ring is
    /// read only where none of those that are known already fits.
    pub(crate) fn take(&mut self, ring: &[AtomicU64], tag: u32) -> Option<PeerReceive> {
        if let Some(at) = self.known.iter().position(|r| r.takes(tag)) {
            return self.known.remove(at);
        }
        while self.known.len() < 1 << self.log
            && let Some(new) = self.entry(ring, self.seen)
        {
            self.seen += 1;
            if new.takes(tag) {
                return Some(new);
            }
            self.known.push_back(new);
        }
        None
    }
}

/// The peer's posted receives, as a program asks for them before it sends. For one thread at a
/// time.
///
/// It takes receives by the rule of the queue pair, so a program that takes one for each SEND, in
/// the order of its SENDs, knows which receive each of them meets. No call allocates, locks or
/// calls the system.
pub struct PostedReceives {
    ring: Words,
    receives: PeerReceives,
}

impl PostedReceives {
    /// In a ring of `1 << log` that the peer, or its RDMA device, writes.
    pub(crate) fn new(ring: Words, log: u32) -> Self {
        PostedReceives { ring, receives: PeerReceives::new(log) }
    }

    /// In the work segment of a peer on this host, of which it handed over a descriptor.
    /// `geometry` is the peer's, checked. An error if the segment is another one.
    pub fn of_work(work: &Arc<ReadOnlyMemory>, geometry: &Geometry) -> Result<Self, EndpointError> {
        const NAME: &str = "peer's work";
        let header = Words::readable(work, 0, 8.min(work.len() / 8));
        let found = check_header(&header, Segment::Work, work.len())
            .map_err(|source| EndpointError::Header { segment: NAME, source })?;
        if found != *geometry {
            let (found, expected) = (Box::new(found), Box::new(*geometry));
            return Err(EndpointError::Disagree { segment: NAME, found, expected });
        }
        let words = RECEIVE_WORDS << geometry.rx_log;
        Ok(Self::new(Words::readable(work, geometry.work_receives_offset(), words), geometry.rx_log))
    }

    /// The receive that the next SEND of `tag` will take, if the peer has posted it.
    #[inline]
    pub fn find(&self, tag: u32) -> Option<PeerReceive> {
        self.receives.find(&self.ring, tag)
    }

    /// Takes the receive that [`PostedReceives::find`] would name: a SEND of `tag` is the next.
    #[inline]
    pub fn take(&mut self, tag: u32) -> Option<PeerReceive> {
        self.receives.take(&self.ring, tag)
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
