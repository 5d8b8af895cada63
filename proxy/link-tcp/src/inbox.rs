//! What an end has heard of its peer over a link: messages that have landed, counts, posted receives, regions.
//!
//! The streams of a link bring the parts of a message in any order. A message is there when all of its bytes are, and
//! messages are taken in the order of their sequence numbers. All that a frame says is checked here (P8): it may name
//! a place in the mirror or in a region of this end, and nothing else is written.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use pushgate_core::receives::{Posted, Receives};
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::record::{Opcode, Record, RecordWords};
use pushgate_driver_shim::segment::Geometry;
use pushgate_link::memory::{Mapped, Words};
use pushgate_link::receives::{RECEIVE_WORDS, entries_log};
use pushgate_link::region::MAX_REGIONS;
use pushgate_link::{Arrival, PeerCounts};

use super::frame::{Head, Kind};
use super::incoming::Takes;

/// The copy of a peer's window, where the payload arrives that goes to no region.
pub struct Mirror {
    address: usize,
    units: u64,
    _memory: Mapped,
}

impl Mirror {
    /// The copy of the window of a peer with these rings.
    ///
    /// # Panics
    ///
    /// If the memory is shorter than the window.
    pub fn new(memory: impl Into<Mapped>, peer: &Geometry) -> Self {
        let memory = memory.into();
        assert!(memory.bytes() >= peer.window_bytes());
        Mirror { address: memory.address(), units: 1 << peer.window_log, _memory: memory }
    }

    /// Host address of `units` units at `unit`, if they lie within it.
    pub fn payload(&self, unit: u32, units: u32) -> Option<usize> {
        let end = unit as u64 + units as u64;
        (end <= self.units).then(|| self.address + ((unit as usize) << abi::PUSHGATE_UNIT_LOG))
    }
}

/// A region of this end in memory of the host, where the peer's payload may go.
#[derive(Clone, Copy)]
pub struct OwnRegion {
    /// Address of its first byte.
    pub address: usize,
    /// The region's length in bytes.
    pub bytes: u64,
}

impl OwnRegion {
    /// The address of a stretch, if that lies within the region.
    fn stretch(&self, offset: u64, length: u32) -> Option<usize> {
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= self.bytes);
        inside.then(|| self.address + offset as usize)
    }
}

/// A message that has come in part.
#[derive(Clone, Copy, Default)]
struct Arriving {
    words: RecordWords,
    /// Bytes of its payload, and those that have landed.
    length: u32,
    landed: u32,
    /// Bytes that frames have brought or announced.
    announced: u32,
    /// Something has come of it.
    known: bool,
    placed: bool,
    /// The region that it goes to.
    key: u32,
    /// Where its payload belongs.
    address: usize,
}

/// After a message of at most this number of bytes the next one is likely to leave before its receive is known, bytes.
const SHORT: u32 = 8 << 10;

/// What an end has heard of its peer.
pub struct Inbox {
    /// The next message that is taken, and by its number modulo the ring's length those after it.
    next: u64,
    ring: Box<[Arriving]>,
    /// Messages that have come, whole or in part, and were not taken.
    open: usize,
    pub mirror: Mirror,
    /// Regions of this end that the peer was told of, by key.
    pub own: BTreeMap<u32, OwnRegion>,
    /// This end's posted receives that no message has taken. One whose tag no message has may stay while the ring goes round many times.
    posted: Receives,
    /// This end's receives name buffers.
    posts_receives: bool,
    /// The words of the last receives that this end has posted, taken or not: as many as the peer's ring of them has entries.
    words: Box<[[u64; 4]]>,
    /// Receives that this end has posted.
    pub posts: u64,
    /// The tags of SENDs that were taken before receives were posted that fit them, oldest first. The endpoint takes no more of them
    /// than may come before their receives.
    early: VecDeque<u32>,
    /// The last message that was taken had at most [`SHORT`] bytes, and went to the mirror.
    pub short: bool,
    pub counts: PeerCounts,
    pub status: u64,
    pub left: bool,
    /// Regions of the peer, by key.
    pub regions: BTreeMap<u32, u64>,
    /// The peer's last question, and its last answer.
    pub asked: u64,
    pub answered: u64,
    /// The ring of the peer's posted receives, if the peer posts any.
    pub receives: Option<Words>,
    /// Payload of messages that were taken since the peer was told counts, bytes.
    pub taken: u64,
    /// Frames that have come, all kinds together.
    pub frames: u64,
}

impl Inbox {
    /// Nothing heard yet. The peer has rings of `peer`; its posted receives, if it posts any, go to `receives`. `posts`: where this
    /// end's receives name buffers, the logarithm of its ring's length, and how many SENDs of the peer may come before their receives.
    pub fn new(mirror: Mirror, peer: &Geometry, posts: Option<(u32, u32)>, receives: Option<Words>) -> Self {
        let words = posts.map_or(0, |(log, ahead)| 1 << entries_log(log, ahead));
        Inbox {
            next: 0,
            ring: vec![Arriving::default(); 1 << peer.link_log].into(),
            open: 0,
            mirror,
            own: BTreeMap::new(),
            posted: Receives::new(posts.map_or(0, |(log, _)| 1 << log)),
            posts_receives: posts.is_some(),
            words: vec![[0; 4]; words].into(),
            posts: 0,
            early: VecDeque::with_capacity(posts.map_or(0, |(_, ahead)| ahead as usize)),
            short: false,
            counts: PeerCounts::default(),
            status: 0,
            left: false,
            regions: BTreeMap::new(),
            asked: 0,
            answered: 0,
            receives,
            taken: 0,
            frames: 0,
        }
    }

    /// Memory for the ring of a peer's posted receives. At most `ahead` SENDs of this end may go ahead of them.
    pub fn receives_of(peer: &Geometry, ahead: u32) -> Words {
        let words = RECEIVE_WORDS << entries_log(peer.rx_log, ahead);
        Words::writable(Mapped::heap(words * 8), 0, words)
    }

    /// Another link takes the place of the present one. What has landed of messages that were not taken comes again, and
    /// the peer announces its regions anew.
    pub fn begin(&mut self) {
        if !pushgate_core::planted!(P6Landed) {
            self.ring.fill(Arriving::default());
            self.open = 0;
        }
        (self.counts, self.left, self.asked, self.answered) = (PeerCounts::default(), false, 0, 0);
        self.regions.clear();
    }

    /// A receive of this end was posted.
    pub fn post(&mut self, number: u64, words: [u64; 4]) {
        let Some(mask) = self.words.len().checked_sub(1) else { return };
        self.words[number as usize & mask] = words;
        self.posts = number + 1;
        let receive = Posted::of(number, &words);
        match self.early.iter().position(|tag| receive.takes(*tag)) {
            Some(at) => _ = self.early.remove(at),
            None => self.posted.post(receive),
        }
    }

    /// Receives of this end that are told of over the next link: all those that the peer may not know.
    pub fn oldest_told_again(&self) -> u64 {
        self.posts.saturating_sub(self.words.len() as u64)
    }

    /// The words of a posted receive of this end, one of the last that the peer's ring of them has.
    pub fn receive(&self, number: u64) -> [u64; 4] {
        self.words[number as usize & (self.words.len() - 1)]
    }

    /// Whether one of the first `told` receives that this end has posted was taken by no message.
    #[inline]
    pub fn has_receive_before(&self, told: u64) -> bool {
        self.posted.oldest().is_some_and(|receive| receive.number < told)
    }

    /// A message takes the oldest posted receive of its tag or of any. That is also the one that it names, if it names one: the endpoint
    /// sees to that.
    #[cold]
    fn take_receive(&mut self, words: &RecordWords) {
        let Ok(r) = Record::decode(words) else { return };
        if r.opcode == Opcode::Send && self.posted.take(r.tag).is_none() {
            self.early.push_back(r.tag);
        }
    }

    /// Room of all that grows with what the peer says, but for its regions.
    #[cfg(test)]
    pub fn footprint(&self) -> [usize; 2] {
        let receives = self.receives.as_ref().map_or(0, |ring| ring.len());
        [self.ring.len(), receives]
    }

    /// Posted receives that no message has taken.
    #[cfg(test)]
    pub fn open_receives(&self) -> usize {
        self.posted.len()
    }

    /// Whether payload that has come in part goes to a region of this end.
    pub fn lands_in(&self, key: u32) -> bool {
        // Placed messages stay in use until they are taken; after that the endpoint knows.
        self.open > 0 && self.ring.iter().any(|m| m.known && m.placed && m.key == key)
    }

    /// Whether the next message is there.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let m = &self.ring[self.next as usize & (self.ring.len() - 1)];
        m.known && m.landed == m.length
    }

    /// Takes the next message, if it is there.
    #[inline]
    pub fn take(&mut self, words: &mut RecordWords) -> Arrival {
        if !self.is_ready() {
            return Arrival::Empty;
        }
        let mask = self.ring.len() - 1;
        let m = &mut self.ring[self.next as usize & mask];
        m.known = false;
        *words = m.words;
        self.taken += m.length as u64;
        self.next += 1;
        self.open -= 1;
        let placed = m.placed;
        self.short = !placed && m.length <= SHORT;
        if self.posts_receives {
            self.take_receive(words);
        }
        if placed { Arrival::Placed } else { Arrival::Record }
    }

    /// Where the payload of a message belongs.
    fn place(&self, head: &Head, r: &Record, words: &RecordWords) -> Result<(u32, usize), &'static str> {
        if !head.placed {
            if r.has(Record::REGION) {
                return Err("payload out of a region, which has no place here");
            }
            let (unit, units) = (r.place, r.units());
            if r.length as u64 > units as u64 * abi::PUSHGATE_UNIT as u64 {
                return Err("a payload longer than the room that it holds");
            }
            let at = self.mirror.payload(unit, units).ok_or("a payload outside of its window")?;
            return Ok((0, at));
        }
        let (key, offset) = match r.opcode {
            Opcode::Put => (r.rkey, r.remote_offset),
            Opcode::Send => {
                // The low 32 bits of its number stand in the record.
                let posted = self.posted.numbered(words[5] as u32);
                let posted = posted.ok_or("a payload for a receive that was not posted")?;
                if posted.length < r.length {
                    return Err("a payload longer than the receive that it goes to");
                }
                (posted.key, posted.offset)
            }
            _ => return Err("a payload of a message that has none"),
        };
        let region = self.own.get(&key).ok_or("a payload for a region that was not offered")?;
        let at = region.stretch(offset, r.length).ok_or("a payload that leaves its region")?;
        Ok((key, at))
    }

    /// Takes a part of a message in; returns where its payload belongs.
    #[inline]
    fn data(&mut self, head: &Head, words: &RecordWords) -> Result<usize, &'static str> {
        if head.message < self.next || head.message - self.next >= self.ring.len() as u64 {
            return Err("a message that is not due");
        }
        let mask = self.ring.len() - 1;
        let at = head.message as usize & mask;
        if !self.ring[at].known {
            let r = Record::decode(words).map_err(|_| "a malformed record")?;
            let carries = matches!(r.opcode, Opcode::Send | Opcode::Put) && !r.has(Record::INLINE);
            let length = if carries { r.length } else { 0 };
            let placed = head.placed;
            if placed && length == 0 {
                return Err("a payload of a message that has none");
            }
            let (key, address) = if length > 0 { self.place(head, &r, words)? } else { (0, 0) };
            self.ring[at] =
                Arriving { words: *words, length, placed, key, address, known: true, ..Arriving::default() };
            self.open += 1;
        }
        let m = &mut self.ring[at];
        if m.words != *words || m.placed != head.placed {
            return Err("parts of one message that differ");
        }
        let inside = head.offset.checked_add(head.payload).is_some_and(|end| end <= m.length);
        let announced = m.announced.checked_add(head.payload).filter(|n| inside && *n <= m.length);
        m.announced = announced.ok_or("more payload than its message has")?;
        Ok(m.address + head.offset as usize)
    }
}

impl Takes for Inbox {
    #[inline]
    fn frame(&mut self, head: &Head, words: &RecordWords) -> Result<usize, &'static str> {
        self.frames += 1;
        match head.kind {
            Kind::Data => return self.data(head, words),
            Kind::Counts => {
                self.counts = PeerCounts { released: words[0], received: words[1], granted: words[2] };
            }
            Kind::Status if Status::from_word(words[0]).is_none() => {
                return Err("a status that there is not");
            }
            // The first one says why.
            Kind::Status if self.status == 0 => self.status = words[0],
            Kind::Status | Kind::Beat => {}
            Kind::Leave => self.left = true,
            Kind::Ask => self.asked = words[0],
            Kind::Answer => self.answered = words[0],
            Kind::Receive => {
                let Some(ring) = &self.receives else {
                    return Err("a posted receive of an end that posts none");
                };
                // It has a power of two of them.
                let entries = ring.len() / RECEIVE_WORDS;
                let first = (words[0] as usize & (entries - 1)) * RECEIVE_WORDS;
                for (to, word) in ring[first..first + RECEIVE_WORDS].iter().zip(&words[1..5]) {
                    // Release: a program that sees the last word on another thread sees those before it as well.
                    to.store(*word, Ordering::Release);
                }
            }
            Kind::Region => {
                let key = u32::try_from(words[0]).map_err(|_| "a region with a key of more than 32 bits")?;
                if words[1] == 0 {
                    self.regions.remove(&key);
                } else if self.regions.len() < MAX_REGIONS || self.regions.contains_key(&key) {
                    self.regions.insert(key, words[1]);
                } else {
                    return Err("more regions than an end may have");
                }
            }
        }
        Ok(0)
    }

    #[inline]
    fn landed(&mut self, message: u64, bytes: u32) {
        let mask = self.ring.len() - 1;
        self.ring[message as usize & mask].landed += bytes;
    }
}
