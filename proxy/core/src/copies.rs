//! Messages on their way that the peer's engine will copy into a region: short ones, and those that go by the mirror.
//!
//! What the RDMA device writes straight into a region is there before the peer's engine has looked at the messages before
//! it. Were it to the same bytes, the older payload would be copied over the newer one (P6).
//!
//! Where a device may place WRITEs in any order, payload that is written straight into a region counts as well until its
//! WRITE has completed: of two WRITEs to the same bytes under way the older one could be placed last.
//!
//! Thousands of WRITEs may be under way. Their bytes are kept in a tree by their place, so that a message looks at few of
//! them: at the neighbours of the message before it where messages go to one place after the other, and otherwise at as
//! many as a search in a balanced tree does.

mod tree;

use self::tree::{Node, Place, Tree};

/// Stretches of the peer's regions that messages on their way go to, in the order of the messages.
#[derive(Debug)]
pub struct Copies {
    tree: Tree,
    /// Where the oldest one lies in the tree's ring, and how many there are.
    first: usize,
    count: usize,
    /// The one that was added last, if it is still in the tree.
    latest: Place,
}

impl Copies {
    /// An empty list for at most `messages` in flight; more messages cost an allocation.
    pub fn new(messages: usize) -> Self {
        Copies { tree: Tree::new(messages.max(1)), first: 0, count: 0, latest: 0 }
    }

    /// Adds message `sequence`, which was posted so that the peer copies it to the region and offset `to`.
    #[inline]
    pub fn posted(&mut self, sequence: u64, to: (u32, u64), length: u32) {
        self.written(sequence, u64::MAX, to, length);
    }

    /// Adds message `sequence`, which was posted, and whose payload work request `wr` writes to a region and offset.
    #[inline]
    pub fn written(&mut self, sequence: u64, wr: u64, (rkey, begin): (u32, u64), length: u32) {
        if self.count == self.tree.capacity() {
            self.rebuild(2 * self.count, |_| true);
        }
        self.add(Node::new(sequence, wr, rkey, begin, begin.saturating_add(length as u64)));
    }

    /// Adds a stretch. Those that it touches give way, and it takes their place: while one stands for several it is under way
    /// until the last of them is there. As it was added after them, they are forgotten before it.
    fn add(&mut self, mut node: Node) {
        let at = self.at(self.count);
        let mut before = self.before(node.rkey, node.end);
        while before > 0 && self.tree.touches(before, node.rkey, node.begin, node.end) {
            let old = *self.tree.node(before);
            (node.begin, node.end) = (node.begin.min(old.begin), node.end.max(old.end));
            node.wr = node.wr.max(old.wr);
            self.tree.remove(before);
            before = old.before;
        }
        self.latest = self.tree.insert(at, node, before);
        self.count += 1;
    }

    /// The peer has `received` messages, and `done` is the last work request that has completed. What is there lets go, as far
    /// as nothing older is not.
    #[inline]
    pub fn received(&mut self, received: u64, done: u64) {
        while self.count > 0 {
            let oldest = self.tree.slot(self.first);
            if oldest.sequence >= received && oldest.wr > done {
                break;
            }
            let place = self.first as Place + 1;
            if oldest.is_in_tree {
                self.tree.remove(place);
            }
            if self.latest == place {
                self.latest = 0;
            }
            (self.first, self.count) = (self.at(1), self.count - 1);
        }
    }

    /// Another link takes the place of the present one. The peer has accepted the first `accepted` messages, and what the
    /// device wrote of these is there; the others are posted again.
    #[cold]
    pub fn rewind(&mut self, accepted: u64) {
        self.rebuild(self.tree.capacity(), |n| n.sequence < accepted && n.wr == u64::MAX);
    }

    /// Whether a message on its way will be copied to any of these bytes, or is being written there. `done` is the last work
    /// request that has completed.
    #[inline]
    pub fn touch(&self, (rkey, begin): (u32, u64), length: u32, done: u64) -> bool {
        let end = begin.saturating_add(length as u64);
        let mut before = self.before(rkey, end);
        while before > 0 && self.tree.touches(before, rkey, begin, end) {
            let node = self.tree.node(before);
            if node.wr > done {
                return true;
            }
            before = node.before;
        }
        false
    }

    /// The last stretch that begins before `end`, of this region or one before it.
    #[inline]
    fn before(&self, rkey: u32, end: u64) -> Place {
        match self.latest {
            latest if latest > 0 && self.tree.is_last_before(latest, rkey, end) => latest,
            _ => self.tree.last_before(rkey, end),
        }
    }

    /// Where the one lies that was added `n` after the oldest one.
    #[inline]
    fn at(&self, n: usize) -> usize {
        let at = self.first + n;
        if at < self.tree.capacity() { at } else { at - self.tree.capacity() }
    }

    #[cold]
    fn rebuild(&mut self, capacity: usize, keeps: impl Fn(&Node) -> bool) {
        let kept: Vec<Node> = (0..self.count).map(|n| *self.tree.slot(self.at(n))).filter(keeps).collect();
        *self = Copies::new(capacity);
        kept.into_iter().for_each(|node| self.add(node));
    }
}

#[cfg(test)]
mod tests;
