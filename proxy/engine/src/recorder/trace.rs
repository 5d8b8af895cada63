//! One queue pair's slot of the recorder, as its engine writes it.

use pushgate_link::memory::Words;

use super::about::About;
use super::metrics::Metrics;
use super::view::{Moved, View};
use super::{Recorder, layout, reader};
use crate::cell;
use crate::counters::Counters;

/// When an engine says that a queue pair stalls.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stall {
    /// The nanoseconds without a move, while something should move, after which the engine reports a stall; 0: never.
    pub(crate) after: u64,
    /// A receive that was posted and not filled should be filled.
    pub(crate) receives: bool,
}

impl Stall {
    /// Whether messages of this side should move, and messages of the peer.
    fn expects(&self, view: &View, about: &About) -> [bool; 2] {
        let waits = self.receives && about.posted_receives && view.unfilled() > 0;
        [view.owes_sends(), view.owes_receives() || waits]
    }
}

/// One direction's messages, as the engine sees whether they stall.
#[derive(Clone, Copy, Default)]
struct Still {
    /// Since when nothing has moved while something should, nanoseconds of time in which the engine ran.
    since: u64,
    reported: bool,
}

/// A slot of the recorder, for one queue pair. Dropping it gives the slot back.
pub(crate) struct Trace {
    slot: Words,
    recorder: Recorder,
    about: About,
    begun: bool,
    /// Stores to the slot's first cell.
    begins: u64,
    /// The number of the next entry.
    number: u64,
    last: View,
    moved: Moved,
    metrics: Metrics,
    /// The number of the next store of the metrics.
    stored: u64,
    /// The metrics have changed since they were stored.
    unstored: bool,
    /// When the queue pair was looked at last, nanoseconds.
    looked: u64,
    /// Messages of this side, and of the peer.
    still: [Still; 2],
    /// For how long in all the engine had not run when the queue pair was looked at last.
    away: u64,
}

impl Trace {
    pub(super) fn new(slot: Words, recorder: Recorder) -> Self {
        // The slot's last user may have been another queue pair; numbers go on from there.
        let begins = cell::load::<{ layout::ABOUT }>(layout::about(&slot)).map_or(0, |(n, _)| n + 1);
        let entries = (0..layout::ENTRIES).filter_map(|at| layout::read_entry(&slot, at));
        let number = entries.map(|(number, ..)| number + 1).max().unwrap_or(0);
        let stored = cell::load::<{ layout::TAGGED }>(layout::metrics(&slot)).map_or(0, |(n, _)| n + 1);
        let last = View::default();
        let about = About::default();
        Trace {
            slot,
            recorder,
            about,
            begun: false,
            begins,
            number,
            last,
            moved: Moved::default(),
            metrics: Metrics::default(),
            stored,
            unstored: false,
            looked: 0,
            still: Default::default(),
            away: 0,
        }
    }

    /// The queue pair was added at time `now`.
    #[cold]
    pub(crate) fn begin(&mut self, about: About, now: u64, view: View) {
        (self.about, self.last, self.begun) = (about, view, true);
        self.moved = Moved { sends: now, receives: now };
        self.still = [Still { since: now, reported: false }; 2];
        self.looked = now;
        cell::store(layout::about(&self.slot), self.begins, &about.words(now, self.number));
        self.begins += 1;
        self.write(now);
        self.write_metrics();
    }

    fn write(&mut self, now: u64) {
        layout::write_entry(&self.slot, self.number, now, self.moved, &self.last);
        self.number += 1;
    }

    /// Stores the metrics. They are of the queue pair of the last store to the slot's first cell.
    fn write_metrics(&mut self) {
        let words = layout::tagged(self.begins - 1, &self.metrics);
        cell::store(layout::metrics(&self.slot), self.stored, &words);
        (self.stored, self.unstored) = (self.stored + 1, false);
    }

    /// Counts the nanoseconds between the release of a message and the peer's word that it has the message.
    #[cold]
    pub(crate) fn delivered(&mut self, time: u64) {
        self.metrics.delivery.add(time);
        self.unstored = true;
    }

    /// Counts the nanoseconds between the break of a link and the moment at which another one carried the queue pair.
    #[cold]
    pub(crate) fn recovered(&mut self, time: u64) {
        self.metrics.recovery.add(time);
        self.unstored = true;
    }

    /// Takes in what the engine has counted by time `now`.
    pub(crate) fn count(&mut self, now: u64, counters: Counters) {
        // What the WQE at the head missed at the last look it has missed since: an engine that sleeps looks before.
        let since = now.saturating_sub(std::mem::replace(&mut self.looked, now));
        if let Some(cause) = self.last.missing.cause() {
            self.metrics.waited[cause] += since;
            self.unstored |= since > 0;
        }
        if self.metrics.counters != counters {
            (self.metrics.counters, self.unstored) = (counters, true);
        }
        if self.unstored && self.begun {
            self.write_metrics();
        }
    }

    /// Takes in what the engine knows at time `now`. `away`: for how long in all the engine did not run when it should have,
    /// nanoseconds. True if the queue pair stalls and that was not said yet.
    #[inline]
    pub(crate) fn record(&mut self, now: u64, away: u64, view: View, stall: Stall) -> bool {
        if !self.begun {
            return false;
        }
        if view != self.last {
            let (new, old) = (&view.counts, &self.last.counts);
            let phase = view.phase != self.last.phase;
            let moved = [phase || new.sends() != old.sends(), phase || new.receives() != old.receives()];
            for ((moved, still), at) in
                moved.iter().zip(&mut self.still).zip([&mut self.moved.sends, &mut self.moved.receives])
            {
                if *moved {
                    (*at, *still) = (now, Still { since: now, reported: false });
                }
            }
            self.last = view;
            self.write(now);
        }
        let away = away - std::mem::replace(&mut self.away, away);
        let mut due = false;
        for (still, expected) in self.still.iter_mut().zip(stall.expects(&view, &self.about)) {
            still.since = if expected { (still.since + away).min(now) } else { now };
            let stalls = stall.after > 0 && !still.reported && now - still.since >= stall.after;
            still.reported |= stalls;
            due |= stalls;
        }
        due
    }

    /// What a reader sees of the queue pair.
    #[cold]
    pub(crate) fn snapshot(&self) -> Option<reader::QueuePair> {
        reader::queue_pair(&self.slot)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let clear = || {
            if self.begun {
                cell::store(layout::about(&self.slot), self.begins, &[0; layout::ABOUT]);
            }
        };
        self.recorder.give_back(self.slot.clone(), self.about.transport, &self.metrics, clear);
    }
}
