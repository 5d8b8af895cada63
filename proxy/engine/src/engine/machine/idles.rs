//! Which queue pairs of a machine are idle, and what is watched of them: a pass over a queue pair that is watched is a look at
//! a few words ([`pushgate_link::watch`]), and while others are busy only some of those that are watched are looked at in a pass.

use pushgate_link::watch::Watch;

use crate::endpoint::Endpoint;

/// Turns without work after which a queue pair is watched.
const QUIET: u8 = 8;
/// In place of such a number: the queue pair is watched.
const WATCHED: u8 = u8::MAX;
/// While other queue pairs are busy, a pass looks at one of this number of parts of the queue pairs that are watched,
const PARTS: usize = 8;
/// and at no more than this number for each turn of the last pass that found work. A look misses the caches and takes some
/// 0.1 us, a turn with a full batch takes some microseconds: so looks take no more time than work, and all are looked at
/// soon whether passes are long or short.
const LOOKS: usize = 32;
/// Of fewer queue pairs than this all are looked at in each pass.
const FEW: usize = 64;

/// What is known of the idleness of queue pairs, which are named by their places.
#[derive(Default)]
pub(super) struct Idles {
    /// Turns without work, or [`WATCHED`]. A byte for each queue pair, so that one cache line covers 64.
    turns: Vec<u8>,
    watches: Vec<Watch>,
    /// The place at which the part begins that the pass looks at.
    first: usize,
    /// The place behind that part.
    next: usize,
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

    /// A pass begins. Returns at how many of the queue pairs that are watched it looks, for [`Idles::passes_over`];
    /// `worked`: turns of the last pass that found work.
    #[inline]
    pub(super) fn begin(&mut self, worked: usize) -> usize {
        let n = self.turns.len();
        // After the last pass's part, whatever the length of this one: none is left out. A part goes on around the end, and
        // there may be fewer queue pairs than there were.
        self.first = match self.next {
            next if next < n => next,
            next if next - n < n => next - n,
            _ => 0,
        };
        let all = worked == 0 || n < FEW;
        let looks = if all { n } else { n.div_ceil(PARTS).min(LOOKS.saturating_mul(worked)) };
        self.next = self.first + looks;
        looks
    }

    /// Whether a pass leaves this queue pair out: its words are as they were, or it is watched and not in the pass's part.
    #[inline(always)]
    pub(super) fn passes_over(&self, at: usize, looks: usize) -> bool {
        self.is_watched(at) && (!self.is_in_part(at, looks) || self.watches[at].is_quiet())
    }

    /// Whether a place is one of the `looks` places from the first on, around the end.
    #[inline(always)]
    fn is_in_part(&self, at: usize, looks: usize) -> bool {
        let behind = if at >= self.first { at - self.first } else { at + self.turns.len() - self.first };
        behind < looks
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

#[cfg(test)]
mod tests {
    use super::*;

    fn idles(n: usize) -> Idles {
        let mut idles = Idles::default();
        (0..n).for_each(|_| idles.push());
        idles
    }

    /// Passes until each place was looked at once.
    fn passes(idles: &mut Idles, worked: impl Fn(usize) -> usize) -> usize {
        let n = idles.turns.len();
        let mut seen = vec![false; n];
        for pass in 1..=n {
            let looks = idles.begin(worked(pass));
            (0..n).filter(|&at| idles.is_in_part(at, looks)).for_each(|at| seen[at] = true);
            if seen.iter().all(|seen| *seen) {
                return pass;
            }
        }
        panic!("{} of {n} places were never looked at", seen.iter().filter(|seen| !**seen).count())
    }

    #[test]
    fn p7_each_place_is_looked_at_within_the_passes_that_the_work_pays_for() {
        for n in [FEW, 100, 256, 2048, 2049] {
            let mut idles = idles(n);
            for worked in [1, 2, 3, 1000] {
                let looks = n.div_ceil(PARTS).min(LOOKS * worked);
                assert_eq!(passes(&mut idles, |_| worked), n.div_ceil(looks), "{n} places, {worked} turns");
            }
            let (least, vary) = (n.div_ceil(PARTS).min(LOOKS), |pass: usize| 1 + pass % 5);
            assert!(passes(&mut idles, vary) <= n.div_ceil(least), "{n} places, turns that vary");
            assert_eq!(passes(&mut idles, |_| 0), 1, "{n} places, no work");
        }
    }

    #[test]
    fn p7_each_place_is_looked_at_where_most_queue_pairs_have_gone() {
        let mut idles = idles(2048);
        (0..30).for_each(|_| _ = idles.begin(1));
        while idles.turns.len() > FEW {
            idles.remove(0);
        }
        assert_eq!(passes(&mut idles, |_| 1), PARTS);
        idles.remove(0);
        assert_eq!(passes(&mut idles, |_| 1), 1, "of few queue pairs all are looked at in each pass");
    }
}
