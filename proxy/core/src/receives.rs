//! Posted receives, and which of them a SEND takes: the oldest one that no message has taken and whose tag is the SEND's
//! or any. Sender, link and receiver find receives by this rule, and so name the same one.
//!
//! A program or a peer chooses how many receives are posted and for which tags. [`Receives`] finds a receive by its tag or
//! by its number without a look at the others, whatever their tags are.

#[cfg(test)]
mod tests;

use pushgate_abi::abi;
use pushgate_abi::record::lap_of;

use crate::scatter::Scatter;

/// A receive that names a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// How many receives were posted before it.
    pub number: u64,
    /// The buffer's region.
    pub key: u32,
    /// The buffer's offset in its region, bytes.
    pub offset: u64,
    /// Bytes that the buffer takes.
    pub length: u32,
    /// Tag of the messages that the receive takes, or `PUSHGATE_ANY_TAG`.
    pub tag: u32,
}

impl Posted {
    /// Decodes the words of receive `number` in a ring of `1 << log`; `None` if one of them is not written yet.
    pub fn decode(number: u64, log: u32, words: &[u64; abi::PUSHGATE_RECV_WORDS as usize]) -> Option<Self> {
        let lap = lap_of(number, log);
        if words.iter().any(|w| (w >> abi::PUSHGATE_LAP_SHIFT) as u8 != lap) {
            return None;
        }
        Some(Posted::of(number, words))
    }

    /// Decodes the words of a receive, all of which are there.
    pub fn of(number: u64, words: &[u64; abi::PUSHGATE_RECV_WORDS as usize]) -> Self {
        Posted {
            number,
            key: words[0] as u32,
            offset: words[1] & abi::PUSHGATE_DATA_MASK,
            length: words[2] as u32,
            tag: words[3] as u32,
        }
    }

    /// Whether a SEND of this tag may take the receive.
    #[inline]
    pub fn takes(&self, tag: u32) -> bool {
        self.tag == abi::PUSHGATE_ANY_TAG || self.tag == tag
    }
}

/// A place among `places`, from 1 on; 0 is none.
type Place = u32;

/// A receive and its neighbours in the lists that it is in.
#[derive(Clone, Copy, Debug)]
struct Node {
    receive: Posted,
    /// Neighbours by age. Of a place without a receive `younger` is the next such place.
    older: Place,
    younger: Place,
    /// The next younger one of its tag.
    next: Place,
    /// Of the oldest one of its tag: the youngest of that tag, and the oldest one of the next tag in the same bucket.
    last: Place,
    chain: Place,
    /// The next one in the same bucket of numbers.
    numbers: Place,
}

/// Receives that no message has taken, oldest first. No call allocates but [`Receives::new`].
#[derive(Debug)]
pub struct Receives {
    most: usize,
    nodes: Vec<Node>,
    free: Place,
    count: usize,
    oldest: Place,
    youngest: Place,
    /// Logarithm of the number of buckets.
    log: u32,
    scatter: Scatter,
    /// By tag: the oldest receive of each tag but any.
    tags: Vec<Place>,
    /// By the low 32 bits of a receive's number.
    numbers: Vec<Place>,
    /// The oldest receive of any tag.
    any: Place,
    #[cfg(test)]
    steps: std::cell::Cell<u64>,
}

impl Receives {
    /// An empty list for at most `most` receives.
    pub fn new(most: usize) -> Self {
        let buckets = most.next_power_of_two().max(2);
        // Memory that was never written takes no pages: a ring of 2^16 receives costs what is in use of it.
        Receives {
            most,
            nodes: Vec::with_capacity(most),
            free: 0,
            count: 0,
            oldest: 0,
            youngest: 0,
            log: buckets.trailing_zeros(),
            scatter: Scatter::new(),
            tags: vec![0; buckets],
            numbers: vec![0; buckets],
            any: 0,
            #[cfg(test)]
            steps: Default::default(),
        }
    }

    /// How many receives there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is no receive.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether there are as many receives as may be.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.count == self.most
    }

    /// The oldest receive.
    #[inline]
    pub fn oldest(&self) -> Option<&Posted> {
        self.receive(self.oldest)
    }

    /// All receives, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Posted> {
        let node = |place: Place| (place > 0).then(|| self.node(place));
        std::iter::successors(node(self.oldest), move |n| node(n.younger)).map(|n| &n.receive)
    }

    /// Adds a receive that was posted after all of those that are there. Nothing happens where there are as many as may be:
    /// the caller, or a peer, has posted more than the rings hold.
    #[inline]
    pub fn post(&mut self, receive: Posted) {
        debug_assert!(self.oldest().is_none() || self.node(self.youngest).receive.number < receive.number);
        if self.is_full() {
            return;
        }
        let (older, head) = (self.youngest, self.head(receive.tag));
        let place = self.new_node(receive, older, 0);
        match head {
            0 => self.begin_tag(place),
            head => {
                let last = std::mem::replace(&mut self.node_mut(head).last, place);
                self.node_mut(last).next = place;
            }
        }
    }

    /// Puts receives back that messages had taken, among the others of their age. What is more than may be is left out.
    #[cold]
    pub fn put_back(&mut self, mut receives: Vec<Posted>) {
        receives.sort_unstable_by_key(|p| std::cmp::Reverse(p.number));
        // Each has its place before the one that was put back before it.
        let (mut older, mut younger) = (self.youngest, 0);
        for receive in receives {
            if self.is_full() {
                return;
            }
            while older > 0 && self.node(older).receive.number > receive.number {
                (older, younger) = (self.node(older).older, older);
            }
            let head = self.head(receive.tag);
            let place = self.new_node(receive, older, younger);
            younger = place;
            match head {
                0 => self.begin_tag(place),
                // Messages take the oldest one of a tag, so this is the rule.
                head if self.node(head).receive.number > receive.number => {
                    let last = self.node(head).last;
                    self.end_tag(head);
                    self.begin_tag(place);
                    let node = self.node_mut(place);
                    (node.next, node.last) = (head, last);
                }
                head => self.insert_in_tag(head, place),
            }
        }
    }

    /// Puts a receive, which is in no list of a tag yet, after the older ones of its tag; the oldest is `head`.
    #[cold]
    fn insert_in_tag(&mut self, head: Place, place: Place) {
        let number = self.node(place).receive.number;
        let mut before = head;
        while let next = self.node(before).next
            && next > 0
            && self.node(next).receive.number < number
        {
            before = next;
        }
        let next = std::mem::replace(&mut self.node_mut(before).next, place);
        self.node_mut(place).next = next;
        if next == 0 {
            self.node_mut(head).last = place;
        }
    }

    /// The receive that a SEND of this tag takes.
    #[inline]
    pub fn find(&self, tag: u32) -> Option<&Posted> {
        self.receive(self.place(tag))
    }

    /// Takes the receive that a SEND of this tag takes.
    #[inline]
    pub fn take(&mut self, tag: u32) -> Option<Posted> {
        let place = self.place(tag);
        if place == 0 {
            return None;
        }
        let Node { receive, older, younger, next, last, .. } = *self.node(place);
        self.end_tag(place);
        if next > 0 {
            self.begin_tag(next);
            self.node_mut(next).last = last;
        }
        match older {
            0 => self.oldest = younger,
            older => self.node_mut(older).younger = younger,
        }
        match younger {
            0 => self.youngest = older,
            younger => self.node_mut(younger).older = older,
        }
        let after = self.node(place).numbers;
        let bucket = self.scatter.of(receive.number as u32, self.log);
        let mut at = self.numbers[bucket];
        if at == place {
            self.numbers[bucket] = after;
        } else {
            while self.node(at).numbers != place {
                at = self.node(at).numbers;
            }
            self.node_mut(at).numbers = after;
        }
        let free = std::mem::replace(&mut self.free, place);
        self.node_mut(place).younger = free;
        self.count -= 1;
        Some(receive)
    }

    /// The receive whose number has these low 32 bits.
    pub fn numbered(&self, low: u32) -> Option<&Posted> {
        let mut at = self.numbers[self.scatter.of(low, self.log)];
        while at > 0 && self.node(at).receive.number as u32 != low {
            at = self.node(at).numbers;
        }
        self.receive(at)
    }

    /// Where the receive is that a SEND of this tag takes.
    #[inline]
    fn place(&self, tag: u32) -> Place {
        let own = self.head(tag);
        match (own, self.any) {
            (own, 0) => own,
            (0, any) => any,
            (own, any) if self.node(own).receive.number < self.node(any).receive.number => own,
            (_, any) => any,
        }
    }

    /// The oldest receive of exactly this tag.
    #[inline]
    fn head(&self, tag: u32) -> Place {
        if tag == abi::PUSHGATE_ANY_TAG {
            return self.any;
        }
        let mut at = self.tags[self.scatter.of(tag, self.log)];
        while at > 0 && self.node(at).receive.tag != tag {
            at = self.node(at).chain;
        }
        at
    }

    /// A receive that is there is the oldest and the only one of its tag.
    #[inline]
    fn begin_tag(&mut self, place: Place) {
        let tag = self.node(place).receive.tag;
        let chain = match tag {
            abi::PUSHGATE_ANY_TAG => {
                self.any = place;
                0
            }
            tag => std::mem::replace(&mut self.tags[self.scatter.of(tag, self.log)], place),
        };
        let node = self.node_mut(place);
        (node.last, node.chain) = (place, chain);
    }

    /// The oldest receive of a tag is that no longer.
    #[inline]
    fn end_tag(&mut self, place: Place) {
        let Node { receive, chain, .. } = *self.node(place);
        if receive.tag == abi::PUSHGATE_ANY_TAG {
            self.any = 0;
            return;
        }
        let bucket = self.scatter.of(receive.tag, self.log);
        let mut at = self.tags[bucket];
        if at == place {
            self.tags[bucket] = chain;
            return;
        }
        while self.node(at).chain != place {
            at = self.node(at).chain;
        }
        self.node_mut(at).chain = chain;
    }

    /// A receive between two others by age, and in its bucket of numbers. It is in no list of a tag yet.
    #[inline]
    fn new_node(&mut self, receive: Posted, older: Place, younger: Place) -> Place {
        let bucket = self.scatter.of(receive.number as u32, self.log);
        let numbers = self.numbers[bucket];
        let node = Node { receive, older, younger, next: 0, last: 0, chain: 0, numbers };
        let place = match self.free {
            0 => {
                self.nodes.push(node);
                self.nodes.len() as Place
            }
            free => {
                self.free = self.node(free).younger;
                *self.node_mut(free) = node;
                free
            }
        };
        self.numbers[bucket] = place;
        match older {
            0 => self.oldest = place,
            older => self.node_mut(older).younger = place,
        }
        match younger {
            0 => self.youngest = place,
            younger => self.node_mut(younger).older = place,
        }
        self.count += 1;
        place
    }

    #[inline]
    fn receive(&self, place: Place) -> Option<&Posted> {
        (place > 0).then(|| &self.node(place).receive)
    }

    #[inline]
    fn node(&self, place: Place) -> &Node {
        #[cfg(test)]
        self.steps.set(self.steps.get() + 1);
        &self.nodes[place as usize - 1]
    }

    #[inline]
    fn node_mut(&mut self, place: Place) -> &mut Node {
        #[cfg(test)]
        self.steps.set(self.steps.get() + 1);
        &mut self.nodes[place as usize - 1]
    }
}
