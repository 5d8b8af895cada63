//! Stretches that do not touch each other, in the order of their places: a treap, whose priorities nobody outside of the
//! process can foresee, over a ring of nodes. Each node knows its neighbours, so a search can begin beside one.

use crate::scatter::Scatter;

/// A place in the ring of nodes, from 1 on; 0 is none.
pub(super) type Place = u32;

/// A stretch of a region that a message goes to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Node {
    pub(super) sequence: u64,
    /// The WRITE after whose completion the bytes are there; the greatest number for a copy of the peer's.
    pub(super) wr: u64,
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) rkey: u32,
    /// Greater than those of the nodes beneath.
    priority: u32,
    above: Place,
    left: Place,
    right: Place,
    /// Neighbours in the order.
    pub(super) before: Place,
    after: Place,
    pub(super) is_in_tree: bool,
}

/// The tree, and the ring that its nodes lie in.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Box<[Node]>,
    root: Place,
    first: Place,
    scatter: Scatter,
    /// Nodes that were inserted. Their count, scattered, is the priority of each.
    inserted: u32,
    #[cfg(test)]
    pub(super) steps: std::cell::Cell<u64>,
}

impl Node {
    pub(super) fn new(sequence: u64, wr: u64, rkey: u32, begin: u64, end: u64) -> Self {
        Node { sequence, wr, rkey, begin, end, ..Node::default() }
    }
}

impl Tree {
    pub(super) fn new(nodes: usize) -> Self {
        Tree {
            nodes: vec![Node::default(); nodes].into(),
            root: 0,
            first: 0,
            scatter: Scatter::new(),
            inserted: 0,
            #[cfg(test)]
            steps: Default::default(),
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.nodes.len()
    }

    /// The node in a slot of the ring.
    #[inline]
    pub(super) fn slot(&self, at: usize) -> &Node {
        self.node(at as Place + 1)
    }

    #[inline]
    pub(super) fn node(&self, place: Place) -> &Node {
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

    #[inline]
    pub(super) fn touches(&self, place: Place, rkey: u32, begin: u64, end: u64) -> bool {
        let node = self.node(place);
        node.rkey == rkey && node.begin < end && begin < node.end
    }

    /// Whether a node begins before `end` of a region and is the last one that does.
    #[inline]
    pub(super) fn is_last_before(&self, place: Place, rkey: u32, end: u64) -> bool {
        let node = self.node(place);
        (node.rkey, node.begin) < (rkey, end) && {
            let after = node.after;
            after == 0 || (self.node(after).rkey, self.node(after).begin) >= (rkey, end)
        }
    }

    /// The last node that begins before `end` of a region.
    pub(super) fn last_before(&self, rkey: u32, end: u64) -> Place {
        let (mut at, mut found) = (self.root, 0);
        while at > 0 {
            let node = self.node(at);
            at = match (node.rkey, node.begin) < (rkey, end) {
                true => {
                    found = at;
                    node.right
                }
                false => node.left,
            };
        }
        found
    }

    /// Puts a node into slot `at`, and after the node `before` in the order, or first.
    pub(super) fn insert(&mut self, at: usize, node: Node, before: Place) -> Place {
        let place = at as Place + 1;
        self.inserted = self.inserted.wrapping_add(1);
        let after = if before > 0 { self.node(before).after } else { self.first };
        // One of two neighbours has no node between itself and the other: the new one goes there.
        let right = before > 0 && self.node(before).right == 0;
        let above = if right { before } else { after };
        let priority = self.scatter.priority(self.inserted);
        *self.node_mut(place) =
            Node { priority, above, left: 0, right: 0, before, after, is_in_tree: true, ..node };
        match before {
            0 => self.first = place,
            before => self.node_mut(before).after = place,
        }
        if after > 0 {
            self.node_mut(after).before = place;
        }
        match above {
            0 => self.root = place,
            above if right => self.node_mut(above).right = place,
            above => self.node_mut(above).left = place,
        }
        while let above = self.node(place).above
            && above > 0
            && self.node(above).priority < priority
        {
            self.lift(place, above);
        }
        place
    }

    /// Takes a node out.
    pub(super) fn remove(&mut self, place: Place) {
        loop {
            let Node { left, right, .. } = *self.node(place);
            if left == 0 || right == 0 {
                break;
            }
            let higher = if self.node(left).priority > self.node(right).priority { left } else { right };
            self.lift(higher, place);
        }
        let Node { left, right, above, before, after, .. } = *self.node(place);
        self.replace(above, place, left.max(right));
        match before {
            0 => self.first = after,
            before => self.node_mut(before).after = after,
        }
        if after > 0 {
            self.node_mut(after).before = before;
        }
        self.node_mut(place).is_in_tree = false;
    }

    /// Turns the tree so that a node comes above the one that is above it.
    fn lift(&mut self, place: Place, above: Place) {
        let top = self.node(above).above;
        let is_left = self.node(above).left == place;
        let between = if is_left { self.node(place).right } else { self.node(place).left };
        if is_left {
            self.node_mut(above).left = between;
            self.node_mut(place).right = above;
        } else {
            self.node_mut(above).right = between;
            self.node_mut(place).left = above;
        }
        if between > 0 {
            self.node_mut(between).above = above;
        }
        self.replace(top, above, place);
        self.node_mut(above).above = place;
    }

    /// Beneath `above`, or at the root, `next` takes the place of `place`.
    fn replace(&mut self, above: Place, place: Place, next: Place) {
        match above {
            0 => self.root = next,
            above if self.node(above).left == place => self.node_mut(above).left = next,
            above => self.node_mut(above).right = next,
        }
        if next > 0 {
            self.node_mut(next).above = above;
        }
    }
}
