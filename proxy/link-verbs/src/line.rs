//! What this end tells the peer of itself: counts, whether it leaves, how it ended. All of it stands in one *line*, which
//! is written to the peer's inbox as a whole. Pure state: work requests are known by their numbers, time is passed in.
//!
//! One line is on its way at a time, for a line that is written twice could arrive in either order. The last line of an
//! end has a place of its own in the outbox, so that it need not wait for the line before it where WRITEs keep their
//! order.
//!
//! Where WRITEs keep their order and their arrival is learnt by a READ, which is a packet to and fro and may come back after
//! much of the peer's payload, most lines with counts ask for nothing: they follow a line that is on its way or has arrived, and
//! after [`AHEAD`] of them one asks. A peer that waits for credit has to wait for no READ of this end then.

use pushgate_core::session::count_word;
use pushgate_driver_shim::abi;
use pushgate_link::PeerCounts;

use super::NOTIFIES;
use super::inbox::LINE_WORDS;

/// Lines with counts that follow one whose arrival was asked for, at most, where lines may follow.
pub(super) const AHEAD: u32 = 16;

/// What a link knows of the lines that it has written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    /// Work requests up to this one have completed.
    pub(super) done: u64,
    /// WRITEs keep their order.
    pub(super) in_order: bool,
    /// Lines may follow one that is on its way: WRITEs keep their order, and the device has a copy of a line once it is posted.
    pub(super) follow: bool,
}

/// A line that is to be written now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// The place in the outbox, in lines.
    pub(super) at: usize,
    pub(super) words: [u64; LINE_WORDS],
    /// The peer may wait for what the line says.
    pub(super) wakes: bool,
    /// The line's arrival is to be asked for. Otherwise the line follows another one.
    pub(super) asks: bool,
}

/// The line of one end.
#[derive(Debug, Default)]
pub(super) struct Line {
    counts: PeerCounts,
    /// The peer was not told the counts yet, neither by a message nor by the line.
    counts_due: bool,
    status: u64,
    left: bool,
    /// Stripes of the peer that this end has taken in over the link.
    stripes: u64,
    /// Immediate data that only woke and was taken here: all of it, and what the peer was told.
    notified: u64,
    notified_told: u64,
    dirty: bool,
    /// The last line is to be written.
    last: bool,
    /// The line is due for a beat alone, which need not wake the peer.
    beats: bool,
    /// The work request that wrote the line last whose arrival was asked for.
    written_by: u64,
    /// Lines that have followed that one.
    behind: u32,
    /// Work requests that were written when the time of the next beat began, and that time.
    beaten: (u64, u64),
}

impl Line {
    /// Sets the counts, which the next message or the next line tells.
    #[inline]
    pub(super) fn acknowledge(&mut self, counts: PeerCounts) {
        (self.counts, self.counts_due) = (counts, true);
    }

    /// The counts' words, for a message that carries them.
    #[inline]
    pub(super) fn counts(&self) -> [u64; 3] {
        [self.counts.received, self.counts.released, self.counts.granted]
    }

    /// Sets how many stripes of the peer this end has taken in, which the next line tells.
    pub(super) fn acknowledge_stripes(&mut self, taken: u64) {
        (self.stripes, self.dirty) = (taken, true);
    }

    /// A message has carried the counts.
    #[inline]
    pub(super) fn rode_along(&mut self) {
        self.counts_due = false;
    }

    /// Receives that were granted to the peer.
    pub(super) fn granted(&self) -> u64 {
        self.counts.granted & abi::PUSHGATE_COUNT_MASK
    }

    /// This end has ended with this status word.
    pub(super) fn end(&mut self, status: u64) {
        (self.status, self.last) = (status, true);
    }

    /// The status word of this end; 0 if it has not ended.
    pub(super) fn status(&self) -> u64 {
        self.status
    }

    /// This end leaves in order.
    pub(super) fn leave(&mut self) {
        if !self.left {
            (self.left, self.last) = (true, true);
        }
    }

    /// Whether this end has ended or leaves, so that the peer is to be told.
    pub(super) fn has_ended(&self) -> bool {
        self.left || self.status != 0
    }

    /// Whether the last line was not written yet.
    pub(super) fn has_last_words(&self) -> bool {
        self.last
    }

    /// Has the line written for its completion's sake.
    pub(super) fn touch(&mut self) {
        self.dirty = true;
    }

    /// Has the line written, so that it wakes the peer.
    pub(super) fn touch_to_wake(&mut self) {
        (self.dirty, self.beats) = (true, false);
    }

    /// Immediate data that only woke was taken.
    pub(super) fn was_notified(&mut self) {
        self.notified += 1;
        // The peer gets its receives back soon enough, and not a line for each.
        self.dirty |= self.notified - self.notified_told >= NOTIFIES as u64 / 2;
    }

    /// Immediate data that only woke and was taken.
    pub(super) fn notified(&self) -> u64 {
        self.notified
    }

    /// Looks whether a beat is due: `written` work requests were written so far, and an end that has written nothing for the
    /// time `every`, nanoseconds, writes its line. Whether the WRITE completes shows the state of the path, and of a peer whose queue pair
    /// is gone. The peer's device answers, not its program.
    pub(super) fn beat(&mut self, written: u64, every: u64, now: u64) {
        if written != self.beaten.0 {
            self.beaten = (written, now);
        } else if now - self.beaten.1 >= every {
            self.beaten.1 = now;
            self.beats = !self.dirty;
            self.dirty = true;
        }
    }

    /// Whether there is something to write.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.dirty || self.counts_due || self.last
    }

    /// The line, if it is to be written now. The caller writes it, and calls [`Line::written`] if it asked for its arrival.
    pub(super) fn next(&mut self, before: Written) -> Option<Due> {
        let arrived = self.written_by <= before.done;
        let follows = before.follow && self.behind < AHEAD;
        let (at, asks) = match (self.last, self.dirty || self.counts_due) {
            // A line that is on its way must not be placed over the last one.
            (true, _) if before.in_order || arrived => (1, true),
            // Counts alone need no answer, which is a packet to and fro.
            (false, true) if self.counts_due && !self.dirty && follows => (0, false),
            (false, true) if arrived => (0, true),
            (false, true) if self.counts_due && follows => (0, false),
            _ => return None,
        };
        let wakes = self.counts_due || self.last || !self.beats;
        let [received, released, granted] = self.counts();
        let notified = count_word(0, self.notified);
        let words = [
            received,
            released,
            granted,
            notified,
            self.left as u64,
            self.status,
            !self.status,
            self.stripes,
        ];
        self.notified_told = self.notified;
        self.counts_due = false;
        match (at, asks) {
            (1, _) => (self.last, self.beats) = (false, false),
            (_, true) => (self.dirty, self.beats) = (false, false),
            // The line stays due: the caller that asked for the line may wait for the completion of a line that asks.
            (_, false) => self.behind += 1,
        }
        Some(Due { at, words, wakes, asks })
    }

    /// The line was written by this work request, whose completion says that it has arrived.
    pub(super) fn written(&mut self, request: u64) {
        (self.written_by, self.behind) = (request, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: u64 = 1_000_000_000;
    const COUNTS: PeerCounts = PeerCounts { released: 1, received: 2, granted: 3 };

    fn up_to(done: u64, in_order: bool) -> Written {
        Written { done, in_order, follow: false }
    }

    #[test]
    fn one_line_is_on_its_way_at_a_time() {
        let mut line = Line::default();
        assert_eq!((line.is_due(), line.next(up_to(9, true))), (false, None));
        line.acknowledge(COUNTS);
        let due = line.next(up_to(0, true)).unwrap();
        assert_eq!((due.at, &due.words[..3], due.wakes), (0, &[2, 1, 3][..], true));
        line.written(5);
        assert!(!line.is_due());
        line.acknowledge(PeerCounts { received: 4, ..COUNTS });
        assert_eq!(line.next(up_to(4, true)), None);
        assert_eq!(line.next(up_to(5, true)).unwrap().words[0], 4);
    }

    #[test]
    fn counts_follow_a_line_a_few_times_and_ask_for_nothing_whether_it_has_arrived_or_not() {
        let mut line = Line::default();
        let mut next = |due: &mut dyn FnMut(&mut Line), done| {
            due(&mut line);
            let due = line.next(Written { done, in_order: true, follow: true })?;
            if due.asks {
                line.written(5);
            }
            Some((due.asks, due.words[0]))
        };
        let counts = |received| move |line: &mut Line| line.acknowledge(PeerCounts { received, ..COUNTS });
        // At first with nothing on its way, then after a line whose READ is not back.
        for round in 0..4 {
            if round > 0 {
                assert_eq!(next(&mut counts(50), 5), Some((true, 50)), "this one asks");
            }
            for received in 1..=AHEAD as u64 {
                assert_eq!(next(&mut counts(received), 4), Some((false, received)));
                assert_eq!(next(&mut |_| {}, 4), None, "nothing is due");
            }
            if round > 0 {
                assert_eq!(next(&mut counts(99), 4), None, "no more slots are set aside");
            }
        }
        // A line that was asked for, for its completion's sake, is still due after one that follows.
        assert_eq!(next(&mut Line::touch, 5), Some((true, 99)));
        assert_eq!(next(&mut Line::touch, 4), None);
        assert_eq!(next(&mut counts(100), 4), Some((false, 100)));
        assert_eq!(next(&mut |_| {}, 5), Some((true, 100)));
    }

    #[test]
    fn p7_the_last_line_waits_for_the_one_before_it_only_where_writes_may_overtake_each_other() {
        for in_order in [true, false] {
            let mut line = Line::default();
            line.acknowledge(COUNTS);
            line.next(up_to(0, in_order)).unwrap();
            line.written(5);
            line.end(77);
            assert!(line.has_last_words() && line.is_due());
            if !in_order {
                assert_eq!(line.next(up_to(4, in_order)), None);
            }
            let due = line.next(up_to(if in_order { 4 } else { 5 }, in_order)).unwrap();
            assert_eq!((due.at, due.words[5], due.words[6], due.wakes), (1, 77, !77, true));
            assert!(!line.has_last_words());
        }
    }

    #[test]
    fn p7_a_beat_that_is_due_takes_no_wake_up_from_what_the_line_tells_beside_it_or_later() {
        let beat = || {
            let mut line = Line::default();
            line.beat(0, BEAT, BEAT - 1);
            assert!(!line.is_due());
            line.beat(0, BEAT, BEAT);
            assert!(line.is_due());
            line
        };
        let wakes = |line: &mut Line| line.next(up_to(0, true)).unwrap().wakes;
        assert!(!wakes(&mut beat()), "a beat alone");
        let mut line = beat();
        line.acknowledge(COUNTS);
        assert!(wakes(&mut line), "counts beside it");
        line.touch();
        assert!(wakes(&mut line), "the line after it");
        let mut line = beat();
        line.touch_to_wake();
        assert!(wakes(&mut line), "receives beside it");
        let mut line = Line::default();
        line.touch();
        line.beat(0, BEAT, BEAT);
        assert!(wakes(&mut line), "a line that was due before");
    }

    #[test]
    fn a_link_that_writes_needs_no_beat() {
        let mut line = Line::default();
        for written in 1..10 {
            line.beat(written, BEAT, written * BEAT);
            assert!(!line.is_due());
        }
    }

    #[test]
    fn p4_receives_for_wake_ups_are_given_back_before_they_run_out() {
        let mut line = Line::default();
        let mut taken = 0;
        while !line.is_due() {
            line.was_notified();
            taken += 1;
        }
        assert!(taken < NOTIFIES as u64);
        assert_eq!(line.next(up_to(0, true)).unwrap().words[3], count_word(0, taken));
        line.was_notified();
        assert!(!line.is_due());
    }
}
