//! Which queue pairs of a machine are idle, and what is watched of them: a pass over a queue pair that is watched is a look at
//! a few words ([`crate::watch`]), and while others are busy only some of those that are watched are looked at in a pass.

use crate::endpoint::Endpoint;
use crate::watch::Watch;

/// Turns without work after which a queue pair is watched.
const QUIET: u8 = 8;
/// In place of such a number: the queue pair is watched.
const WATCHED: u8 = u8::MAX;
/// While other queue pairs are busy, a queue pair that is watched is looked at in one of so many passes.
const PARTS: usize = 8;
/// Of fewer queue pairs than this all are looked at in each pass.
const FEW: usize = 64;

/// What is known of the idleness of queue pairs, which are named by their places.
#[derive(Default)]
pub(super) struct Idles {
    /// Turns without work, or [`WATCHED`]. A byte for each queue pair, so that one cache line tells of 64.
    turns: Vec<u8>,
    watches: Vec<Watch>,
    /// The part of the queue pairs that the pass looks at.
    part: usize,
    /// The place of the queue pair that got the last turn of [`Idles::rouse_some`].
    roused: usize,
}

impl Idles {
    pub(super) fn push(&mut self) {
        self.turns.push(0);
        self.watches.push(Watch::default());
    }

    pub(super) fn remove(&mut self, at: usize) {
        self.turns.remove(at);
        self.watches.remove(at);
    }

    pub(super) fn clear(&mut self) {
        (self.turns, self.watches) = Default::default();
    }

    /// A pass begins. Returns the part of the queue pairs that it looks at, for [`Idles::passes_over`]; `busy`: the last
    /// pass found work.
    #[inline]
    pub(super) fn begin(&mut self, busy: bool) -> Option<usize> {
        self.part = (self.part + 1) % PARTS;
        (busy && self.turns.len() >= FEW).then_some(self.part)
    }

    /// Whether a pass leaves this queue pair out: its words are as they were, or it is watched and not in the pass's part.
    #[inline(always)]
    pub(super) fn passes_over(&self, at: usize, part: Option<usize>) -> bool {
        self.is_watched(at) && (part.is_some_and(|part| at % PARTS != part) || self.watches[at].is_quiet())
    }

    #[inline(always)]
    pub(super) fn is_watched(&self, at: usize) -> bool {
        self.turns[at] == WATCHED
    }

    /// Before a turn of a queue pair: watches what could give it work, if it has been idle for long.
    #[inline]
    pub(super) fn before(&mut self, at: usize, endpoint: &Endpoint) {
        if self.is_watched(at) {
            self.rouse(at);
        }
        if self.turns[at] >= QUIET {
            let watched = endpoint.watch(&mut self.watches[at]);
            self.turns[at] = if watched { WATCHED } else { 0 };
        }
    }

    /// After a turn.
    #[inline]
    pub(super) fn after(&mut self, at: usize, work: bool) {
        match work {
            true => self.rouse(at),
            false if !self.is_watched(at) => self.turns[at] += 1,
            false => {}
        }
    }

    /// A queue pair is watched no more, until it is idle again.
    #[inline]
    pub(super) fn rouse(&mut self, at: usize) {
        if self.is_watched(at) {
            self.watches[at].clear();
        }
        self.turns[at] = 0;
    }

    /// Gives some of the queue pairs that are watched a turn whatever their words say, the next ones with each call: all of
    /// them in `calls`.
    pub(super) fn rouse_some(&mut self, calls: usize) {
        let n = self.turns.len();
        for _ in 0..n.div_ceil(calls) {
            self.roused = if self.roused + 1 < n { self.roused + 1 } else { 0 };
            if self.is_watched(self.roused) {
                self.rouse(self.roused);
                // One turn without work is enough.
                self.turns[self.roused] = QUIET;
            }
        }
    }
}
