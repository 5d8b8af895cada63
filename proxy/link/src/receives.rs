//! The peer's posted receives, as a sender knows them.
//!
//! Over RDMA the sender's engine writes a SEND to where its receive says, without a stop at
//! either end. A program may ask before it sends whether a receive of a message's tag is
//! there ([`PostedReceives`]): a SEND that no receive fits would hold up those after it.
//!
//! Both ends follow one rule: a SEND takes the oldest receive that no message has
//! taken and whose tag is its own or any. The sender knows the receives in the
//! order in which they were posted, up to some number. If one of those fits it is
//! the one that the receiver will find, whatever was posted since; if none does,
//! the message waits here. So both always name the same one, and the receiver
//! checks that (P8): it goes by its own list alone.
//!
//! Where both ends agree, a number of short SENDs may *go ahead*: they leave before the
//! sender knows of a receive that fits, and wait at the receiver in their order. Such
//! a SEND takes the first receive that fits it and none before it, as if it had
//! waited here, so both ends still name the same one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pushgate_core::receives::{Posted, Receives};
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::ReadOnlyMemory;
use pushgate_driver_shim::segment::{Geometry, Segment, check_header};

use crate::memory::Words;
use crate::ring;
use crate::segments::SegmentError;

/// Words of an entry: those of a posted receive, laps included.
pub const RECEIVE_WORDS: usize = abi::PUSHGATE_RECV_WORDS as usize;

/// Receives that an end takes out of a ring at once, at most: a peer may post as many as a ring has, for tags that no message has
/// yet, and other queue pairs have their turn before all of them are known.
const AT_ONCE: u64 = 64;

/// The most SENDs that may go ahead on a queue pair.
pub const MOST_AHEAD: u32 = 64;
/// The most bytes of a SEND that goes ahead.
pub const AHEAD_BYTES: u32 = 64 << 10;

/// Logarithm of how many entries a ring of posted receives has. A peer posts at most `1 << log` receives ahead of those that messages have
/// taken. Of the latter the sender may not have read those that SENDs took which went ahead: at most `ahead`, and that is at most
/// `1 << log`. So a ring of twice as many entries is never written over before it was read.
pub fn entries_log(log: u32, ahead: u32) -> u32 {
    debug_assert!(ahead <= 1 << log);
    log + u32::from(ahead > 0)
}

/// A SEND that went ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Its sequence number.
    pub sequence: u64,
    /// Its tag.
    pub tag: u32,
    /// Its bytes.
    pub length: u32,
}

/// What a sender knows of the receive that a SEND will take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meets {
    /// The receive.
    Receive(Posted),
    /// Nothing, but the SEND may go ahead if it is no longer than [`AHEAD_BYTES`].
    Ahead,
    /// Nothing: the SEND has to wait.
    Unknown,
}

impl Meets {
    /// The receive, if it is known.
    #[inline]
    pub fn receive(self) -> Option<Posted> {
        match self {
            Meets::Receive(receive) => Some(receive),
            Meets::Ahead | Meets::Unknown => None,
        }
    }
}

/// Those that no message of ours has taken yet.
pub struct PeerReceives {
    log: u32,
    /// Logarithm of the ring's entries.
    entries_log: u32,
    /// Taken out of the ring, oldest first. None of them fits one that went ahead.
    known: Receives,
    /// How many were.
    seen: u64,
    /// SENDs that went ahead and whose receives are not known yet, oldest first.
    ahead: VecDeque<Ahead>,
    /// The most of them, at most [`MOST_AHEAD`].
    most_ahead: usize,
}

impl PeerReceives {
    /// For a peer that posts at most `1 << log` at once, and takes `ahead` SENDs before their receives, at most [`MOST_AHEAD`]. Its ring
    /// has as many entries as [`entries_log`] says.
    pub fn new(log: u32, ahead: u32) -> Self {
        let (entries_log, most_ahead) = (entries_log(log, ahead), ahead as usize);
        let (known, ahead) = (Receives::new(1 << log), VecDeque::with_capacity(most_ahead));
        PeerReceives { log, entries_log, known, seen: 0, ahead, most_ahead }
    }

    /// The entry of `number`, if all of it is there.
    fn entry(&self, ring: &[AtomicU64], number: u64) -> Option<Posted> {
        let first = (number as usize & ((1 << self.entries_log) - 1)) * RECEIVE_WORDS;
        let words = std::array::from_fn(|at| ring::observe(&ring[first + at]));
        Posted::decode(number, self.log, &words)
    }

    /// What is known of the receive that a SEND of `tag` will take. [`PeerReceives::learn`] comes first.
    pub fn meets(&self, tag: u32) -> Meets {
        match self.known.find(tag) {
            Some(known) => Meets::Receive(*known),
            None if self.ahead.len() < self.most_ahead => Meets::Ahead,
            None => Meets::Unknown,
        }
    }

    /// Takes in receives that the peer has told of, `AT_ONCE` at most, until one is known that a SEND of `tag` takes; without a tag until
    /// each SEND that went ahead has one. `met` is called for each SEND that went ahead and has its receive. True if any was taken in.
    #[inline]
    pub fn learn(
        &mut self,
        ring: &[AtomicU64],
        tag: Option<u32>,
        mut met: impl FnMut(Ahead, Posted),
    ) -> bool {
        let mut needed = match tag {
            Some(tag) => self.known.find(tag).is_none(),
            None => !self.ahead.is_empty(),
        };
        let before = self.seen;
        while needed
            && self.seen - before < AT_ONCE
            && !self.known.is_full()
            && let Some(new) = self.entry(ring, self.seen)
        {
            self.seen += 1;
            match self.ahead.iter().position(|send| new.takes(send.tag)) {
                Some(at) => {
                    met(self.ahead.remove(at).expect("it was found"), new);
                    needed = tag.is_some() || !self.ahead.is_empty();
                }
                None => {
                    self.known.post(new);
                    needed = tag.is_none_or(|tag| !new.takes(tag));
                }
            }
        }
        self.seen != before
    }

    /// Whether [`PeerReceives::learn`] would take in any.
    #[inline]
    pub fn may_learn(&self, ring: &[AtomicU64], tag: u32) -> bool {
        self.known.find(tag).is_none() && !self.known.is_full() && self.entry(ring, self.seen).is_some()
    }

    /// A SEND for which [`PeerReceives::take`] found nothing goes ahead.
    pub fn go_ahead(&mut self, send: Ahead) {
        if self.ahead.len() < self.most_ahead {
            self.ahead.push_back(send);
        }
    }

    /// Whether the receive of each SEND that went ahead is known.
    #[inline]
    pub fn knows_all(&self) -> bool {
        self.ahead.is_empty()
    }

    /// Another link takes the place of the present one. SENDs from `sequence` on are posted again.
    #[cold]
    pub fn rewind(&mut self, sequence: u64) {
        self.ahead.retain(|send| send.sequence < sequence);
    }

    /// Puts receives back that messages had taken: the messages are posted again.
    #[cold]
    pub fn put_back(&mut self, receives: Vec<Posted>) {
        self.known.put_back(receives);
    }

    /// Takes the receive that a SEND of `tag` will take, if the peer has told of it. [`PeerReceives::learn`] comes first, without a tag.
    pub fn take(&mut self, ring: &[AtomicU64], tag: u32) -> Option<Posted> {
        // Where some went ahead, what comes next may be theirs.
        if self.ahead.is_empty() {
            self.learn(ring, Some(tag), |_, _| ());
        }
        self.known.take(tag)
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
    /// Of a peer that posts at most `1 << log` at once, in a ring that the peer, or its RDMA device, writes ([`entries_log`]). At most `ahead`
    /// SENDs may go ahead.
    pub fn new(ring: Words, log: u32, ahead: u32) -> Self {
        PostedReceives { ring, receives: PeerReceives::new(log, ahead) }
    }

    /// The posted receives in the work segment of a peer on this host, which handed over the segment's descriptor.
    /// `geometry` is the peer's, checked. An error if the segment is another one.
    pub fn of_work(work: &Arc<ReadOnlyMemory>, geometry: &Geometry) -> Result<Self, SegmentError> {
        const NAME: &str = "peer's work";
        let header = Words::readable(work, 0, 8.min(work.len() / 8));
        let found = check_header(&header, Segment::Work, work.len())
            .map_err(|source| SegmentError::Header { segment: NAME, source })?;
        if found != *geometry {
            let (found, expected) = (Box::new(found), Box::new(*geometry));
            return Err(SegmentError::Disagree { segment: NAME, found, expected });
        }
        let words = RECEIVE_WORDS << geometry.rx_log;
        Ok(Self::new(Words::readable(work, geometry.work_receives_offset(), words), geometry.rx_log, 0))
    }

    /// Whether SENDs may go ahead.
    pub fn go_ahead(&self) -> bool {
        self.receives.most_ahead > 0
    }

    /// What is known of the receive that the next SEND of `tag` will take.
    #[inline]
    pub fn meets(&mut self, tag: u32) -> Meets {
        self.receives.learn(&self.ring, Some(tag), |_, _| ());
        self.receives.meets(tag)
    }

    /// A SEND of `tag` is the next, for which [`PostedReceives::meets`] did not answer that it has to wait. Returns the receive that
    /// it takes; `None`: it goes ahead.
    #[inline]
    pub fn take(&mut self, tag: u32) -> Option<Posted> {
        self.receives.learn(&self.ring, None, |_, _| ());
        let receive = self.receives.take(&self.ring, tag);
        if receive.is_none() {
            self.receives.go_ahead(Ahead { sequence: 0, tag, length: 0 });
        }
        receive
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use pushgate_driver_shim::record::lap_of;
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

    fn meets(r: &mut PeerReceives, ring: &[AtomicU64], tag: u32) -> Meets {
        r.learn(ring, Some(tag), |_, _| ());
        r.meets(tag)
    }

    #[test]
    fn p2_an_entry_counts_when_all_its_words_are_there() {
        let (ring, mut r) = (ring(1), PeerReceives::new(1, 0));
        for words in 0..4 {
            store(&ring, 1, 0, 5, words);
            assert_eq!((meets(&mut r, &ring, 5), r.take(&ring, 5)), (Meets::Unknown, None));
        }
        store(&ring, 1, 1, 5, 4);
        assert_eq!(meets(&mut r, &ring, 5), Meets::Unknown, "an older one may be of this tag");
        store(&ring, 1, 0, 6, 4);
        let found = meets(&mut r, &ring, 5).receive().unwrap();
        assert_eq!((found.number, found.key, found.offset, found.length), (1, 7, 10, 100));
        assert_eq!(r.take(&ring, 5), Some(found));
        assert_eq!(r.take(&ring, 5), None);
    }

    #[test]
    fn p8_a_peer_that_tells_of_more_than_it_may_fills_no_memory() {
        let (ring, mut r) = (ring(2), PeerReceives::new(2, 0));
        for number in 0..100 {
            store(&ring, 2, number, 1, 4);
            assert_eq!((meets(&mut r, &ring, 2), r.take(&ring, 2)), (Meets::Unknown, None));
            assert!(r.known.len() <= 4);
        }
    }

    #[test]
    fn p8_a_peer_that_tells_of_more_than_it_may_lets_no_more_go_ahead() {
        let (ring, mut r) = (ring(3), PeerReceives::new(2, 3));
        let mut went = 0;
        for number in 0..100 {
            // Four that none of ours fits, and then some for ours.
            let lap = u64::from(lap_of(number, 2)) << abi::PUSHGATE_LAP_SHIFT;
            let first = (number as usize & 7) * RECEIVE_WORDS;
            let words = [7, 0, 100, if number < 4 { 9 } else { 2 }];
            ring[first..][..4]
                .iter()
                .zip(words)
                .for_each(|(to, word)| to.store(word | lap, Ordering::Relaxed));
            let meets = meets(&mut r, &ring, 2);
            r.learn(&ring, None, |_, _| ());
            let receive = r.take(&ring, 2);
            assert_eq!(receive, meets.receive());
            if meets == Meets::Ahead {
                r.go_ahead(Ahead { sequence: number, tag: 2, length: 1 });
                went += 1;
            }
            assert!(r.known.len() <= 4 && r.ahead.len() <= 3 && r.ahead.capacity() < 8);
        }
        assert_eq!(went, 3);
    }

    #[test]
    fn p8_receives_of_other_tags_are_taken_in_a_bounded_number_at_a_time_and_each_once() {
        let log = 10;
        let (ring, mut r) = (ring(log), PeerReceives::new(log, 0));
        (0..1 << log).for_each(|number| store(&ring, log, number, if number == 1000 { 2 } else { 9 }, 4));
        let (mut calls, mut read) = (0, 0);
        while r.meets(2) == Meets::Unknown {
            assert!(r.may_learn(&ring, 2));
            let before = r.seen;
            assert!(r.learn(&ring, Some(2), |_, _| ()));
            assert!(r.seen - before <= AT_ONCE);
            (calls, read) = (calls + 1, read + r.seen - before);
        }
        assert_eq!((calls, read), (1001u64.div_ceil(AT_ONCE), 1001));
        // What was taken in is not looked at again.
        assert!(!r.may_learn(&ring, 2) && !r.learn(&ring, Some(2), |_, _| ()));
        assert_eq!(r.take(&ring, 2).map(|p| p.number), Some(1000));
        assert!(r.may_learn(&ring, 2));
    }

    /// The receive, by number, that each of the messages of these tags takes of those posted: the oldest one that fits and is free. Where
    /// `waits`, a message without one holds up those after it.
    fn matched(messages: &[u32], posted: &[u32], waits: bool) -> Vec<Option<u64>> {
        let mut taken = vec![false; posted.len()];
        let mut found = Vec::new();
        for tag in messages {
            let free = |at: &usize| !taken[*at] && (posted[*at] == ANY || posted[*at] == *tag);
            let at = (0..posted.len()).find(free);
            if waits && at.is_none() {
                break;
            }
            at.into_iter().for_each(|at| taken[at] = true);
            found.push(at.map(|at| at as u64));
        }
        found
    }

    proptest! {
        /// The receives of SENDs that went ahead are those that the receiver finds for them, however late the sender hears of
        /// them, and none is written over before it was read.
        #[test]
        fn p4_p6_a_send_that_goes_ahead_takes_the_receive_that_its_receiver_finds(
            most_ahead in 1u32..=8,
            steps in prop::collection::vec((0u8..22, 0u32..4), 0..400),
        ) {
            let log = 3;
            let entries = entries_log(log, most_ahead);
            let (ring, mut r) = (ring(entries), PeerReceives::new(log, most_ahead));
            let (mut posted, mut messages, mut told) = (Vec::new(), Vec::new(), 0);
            // The receive that each message has by the sender.
            let mut pairs: Vec<Option<u64>> = Vec::new();
            for (step, tag) in steps.into_iter().chain((0..64).map(|_| (8, 0))) {
                match step {
                    0..8 if posted.len() - matched(&messages, &posted, true).len() < 1 << log => {
                        posted.push(if tag == 3 { ANY } else { tag });
                    }
                    8..18 if told < posted.len() => {
                        let first = (told & ((1 << entries) - 1)) * RECEIVE_WORDS;
                        let lap = u64::from(lap_of(told as u64, log)) << abi::PUSHGATE_LAP_SHIFT;
                        let words = [7, 10 * told as u64, 100, posted[told].into()];
                        ring[first..][..4].iter().zip(words).for_each(|(to, word)| to.store(word | lap, Ordering::Relaxed));
                        told += 1;
                    }
                    18.. => {
                        let mut met = |send: Ahead, receive: Posted| pairs[send.sequence as usize] = Some(receive.number);
                        r.learn(&ring, Some(tag), &mut met);
                        r.learn(&ring, None, &mut met);
                        let meets = r.meets(tag);
                        let receive = r.take(&ring, tag);
                        prop_assert_eq!(receive, meets.receive());
                        if receive.is_none() {
                            let went = pairs.iter().filter(|pair| pair.is_none()).count();
                            prop_assert_eq!(meets == Meets::Ahead, went < most_ahead as usize);
                            if meets == Meets::Unknown {
                                continue;
                            }
                            r.go_ahead(Ahead { sequence: messages.len() as u64, tag, length: 1 });
                        }
                        messages.push(tag);
                        pairs.push(receive.map(|receive| receive.number));
                    }
                    _ => {}
                }
            }
            r.learn(&ring, None, |send, receive| pairs[send.sequence as usize] = Some(receive.number));
            prop_assert_eq!(told, posted.len());
            prop_assert_eq!(pairs, matched(&messages, &posted, false));
        }

        /// A sender that knows less than the receiver has in its list takes the same receive,
        /// or waits, and it waits only if none that it was told of fits.
        #[test]
        fn p4_p6_both_ends_name_the_same_receive(
            steps in prop::collection::vec((0u8..5, 0u32..4), 0..300),
        ) {
            let (ring, mut r) = (ring(3), PeerReceives::new(3, 0));
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
                        prop_assert_eq!(meets(&mut r, &ring, tag).receive().map(|r| r.number), expected);
                        prop_assert_eq!(r.take(&ring, tag).map(|r| r.number), expected);
                        taken += expected.is_some() as usize;
                    }
                    _ => {}
                }
            }
        }
    }
}
