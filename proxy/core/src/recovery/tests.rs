//! Two machines over a world whose links break and whose channel repeats and loses what it carries.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use pushgate_abi::abi;

const PATIENCE: Patience =
    Patience { attempt: 200, first_pause: 10, longest_pause: 100, whole: 5000, jitter: 7 };
const DOWN: Status = Status::new(abi::PUSHGATE_LINK_DOWN);

/// One end: the machine, and what the orders have done.
struct End {
    machine: Recovery,
    /// Messages of the peer that this end has accepted, and those that it has posted.
    accepted: u64,
    /// The next message that this end posts, and the epoch over which it may.
    sent: u64,
    posts_in: Option<u32>,
    /// The fence under way ends then.
    fence: Option<u64>,
    /// Nothing of an epoch before this one can touch this end's memory.
    safe_from: u32,
    ready_for: u32,
}

struct World {
    ends: [End; 2],
    /// To each end.
    channels: [VecDeque<Control>; 2],
    /// To each end: epoch and number of messages on their way over a link.
    links: [VecDeque<(u32, u64)>; 2],
    now: u64,
    orders: Vec<Order>,
}

impl World {
    fn new(whole: u64) -> Self {
        let end = || End {
            machine: Recovery::new(Patience { whole, ..PATIENCE }, DOWN),
            accepted: 0,
            sent: 0,
            posts_in: Some(0),
            fence: None,
            safe_from: 0,
            ready_for: 0,
        };
        World {
            ends: [end(), end()],
            channels: Default::default(),
            links: Default::default(),
            now: 0,
            orders: Vec::new(),
        }
    }

    fn perform(&mut self, at: usize) {
        for order in std::mem::take(&mut self.orders) {
            let end = &mut self.ends[at];
            match order {
                Order::Send(control) => {
                    if let Control::Resume { epoch, .. } = control {
                        assert_eq!(end.safe_from, epoch, "RESUME before the fence");
                    }
                    self.channels[1 - at].push_back(control);
                }
                Order::Fence => (end.posts_in, end.fence) = (None, Some(self.now + 7)),
                Order::Prepare(epoch) => end.ready_for = epoch,
                Order::Go { epoch, accepted } => {
                    assert!(accepted <= end.sent, "the peer has more than was sent");
                    (end.sent, end.posts_in) = (accepted, Some(epoch));
                    let peer = &self.ends[1 - at];
                    assert!(
                        peer.safe_from >= epoch && peer.ready_for >= epoch,
                        "posts before the peer is ready"
                    );
                    assert_eq!(accepted, peer.accepted, "the peer accepts while it is fenced");
                }
                Order::End(_) => (end.posts_in, end.fence) = (None, None),
            }
        }
    }

    fn deliver(&mut self, at: usize) {
        if let Some(control) = self.channels[at].pop_front() {
            let end = &mut self.ends[at];
            end.machine.take(control, end.accepted, self.now, &mut self.orders);
            self.perform(at);
        }
    }

    fn pass(&mut self, by: u64) {
        self.now += by;
        for at in 0..2 {
            let end = &mut self.ends[at];
            if end.fence.is_some_and(|until| until <= self.now) {
                end.fence = None;
                end.safe_from = end.machine.epoch();
                end.machine.fenced(end.accepted, self.now, &mut self.orders);
                self.perform(at);
            }
            let end = &mut self.ends[at];
            // A higher epoch was adopted after the fence: that fence is good for it, too.
            if end.fence.is_none() && end.machine.phase() == Phase::Fencing {
                end.safe_from = end.machine.epoch();
            }
            end.machine.tick(end.accepted, self.now, &mut self.orders);
            self.perform(at);
        }
    }

    fn post(&mut self, at: usize) {
        let end = &mut self.ends[at];
        if let Some(epoch) = end.posts_in {
            self.links[1 - at].push_back((epoch, end.sent));
            end.sent += 1;
        }
    }

    /// A message arrives over a link, unless its epoch is fenced.
    fn arrive(&mut self, at: usize) {
        if let Some((epoch, number)) = self.links[at].pop_front() {
            let end = &mut self.ends[at];
            let fenced = end.machine.phase() != Phase::Live && end.fence.is_none();
            if epoch < end.safe_from || fenced && epoch < end.machine.epoch() {
                return;
            }
            assert_eq!(number, end.accepted, "P6");
            end.accepted += 1;
        }
    }

    fn break_link(&mut self, at: usize) {
        // What is on its way over a broken link may be lost from some message on.
        self.links[1 - at].clear();
        let end = &mut self.ends[at];
        end.machine.link_down(self.now, DOWN, &mut self.orders);
        self.perform(at);
    }
}

#[test]
fn p6_a_link_that_breaks_at_one_end_is_replaced_and_posting_goes_on_after_what_was_accepted() {
    let mut w = World::new(PATIENCE.whole);
    for _ in 0..5 {
        w.post(0);
    }
    for _ in 0..3 {
        w.arrive(1);
    }
    w.break_link(0);
    for _ in 0..20 {
        w.pass(10);
        (0..2).for_each(|at| w.deliver(at));
    }
    assert_eq!(w.ends.each_ref().map(|e| (e.machine.phase(), e.machine.epoch())), [(Phase::Live, 1); 2]);
    assert_eq!((w.ends[0].sent, w.ends[0].posts_in), (3, Some(1)));
}

#[test]
fn p6_what_is_said_of_another_epoch_moves_no_end_on() {
    let (mut m, mut orders) = (Recovery::new(PATIENCE, DOWN), Vec::new());
    let mut said = |m: &mut Recovery, control| {
        orders.clear();
        m.take(control, 5, 0, &mut orders);
        orders.clone()
    };
    m.link_down(0, DOWN, &mut Vec::new());
    m.fenced(5, 0, &mut Vec::new());
    assert_eq!((m.phase(), m.epoch()), (Phase::Offered, 1));
    assert_eq!(said(&mut m, Control::Resume { epoch: 0, accepted: 3 }), []);
    assert_eq!(said(&mut m, Control::Ready { epoch: 1 }), [], "not before the peer has fenced");
    assert_eq!(said(&mut m, Control::Break { epoch: 0 }), []);
    let ready = Order::Send(Control::Ready { epoch: 1 });
    assert_eq!(said(&mut m, Control::Resume { epoch: 1, accepted: 3 }), [Order::Prepare(1), ready]);
    assert_eq!(said(&mut m, Control::Resume { epoch: 1, accepted: 3 }), [ready], "said again");
    assert_eq!(said(&mut m, Control::Ready { epoch: 0 }), []);
    assert_eq!(said(&mut m, Control::Ready { epoch: 1 }), [Order::Go { epoch: 1, accepted: 3 }]);
    assert_eq!(said(&mut m, Control::Ready { epoch: 1 }), []);
    assert_eq!(said(&mut m, Control::Break { epoch: 0 }), []);
    // The peer has left epochs that this end never heard about.
    let left = said(&mut m, Control::Resume { epoch: 7, accepted: 3 });
    assert_eq!(left, [Order::Send(Control::Break { epoch: 6 }), Order::Fence]);
    assert_eq!((m.phase(), m.epoch()), (Phase::Fencing, 7));
}

#[test]
fn p7_a_session_whose_peer_does_not_answer_ends_with_the_links_cause() {
    let mut w = World::new(PATIENCE.whole);
    w.break_link(0);
    for _ in 0..2000 {
        w.pass(10);
        w.channels[1].clear();
    }
    assert_eq!(w.ends[0].machine.phase(), Phase::Ended(DOWN));
    assert!(w.ends[0].machine.wakes_at().is_none());
}

#[test]
fn p7_an_attempt_whose_frame_is_lost_leaves_time_for_another_however_short_the_limit() {
    for millis in [1, 50, 1_000, 10_000, 600_000] {
        let whole = Duration::from_millis(millis);
        let (mut m, mut orders) = (Recovery::new(Patience::within(whole, 7), DOWN), Vec::new());
        m.link_down(0, DOWN, &mut orders);
        m.fenced(0, 0, &mut orders);
        assert_eq!(m.phase(), Phase::Offered);
        let again = m.wakes_at().expect("the wait for the peer's answer has an end");
        assert!(again <= 2_000_000_000 && 4 * again <= whole.as_nanos() as u64, "{whole:?}: {again} ns");
        orders.clear();
        m.tick(0, again, &mut orders);
        // The peer may take long to make its end: this end's stays.
        assert_eq!((m.phase(), m.epoch()), (Phase::Offered, 1), "{whole:?}");
        assert_eq!(orders, [Order::Send(Control::Resume { epoch: 1, accepted: 0 })]);
        m.take(Control::Resume { epoch: 1, accepted: 0 }, 0, again, &mut orders);
        let given_up = m.wakes_at().expect("the attempt has an end");
        assert!(given_up <= 2 * again, "{whole:?}: {given_up} ns");
        m.tick(0, given_up, &mut orders);
        assert_eq!((m.phase(), m.epoch()), (Phase::Fencing, 2), "{whole:?}");
    }
}

#[test]
fn p7_links_that_break_without_progress_are_attempts_of_one_recovery() {
    let orders = &mut Vec::new();
    // Until when a session that breaks every 50 lives, and its longest pause.
    let mut breaks = |moves: bool| {
        let (mut m, mut longest) = (Recovery::new(PATIENCE, DOWN), 0);
        for n in 0..400 {
            let now = 50 * n;
            if matches!(m.phase(), Phase::Ended(_)) {
                return (now, longest);
            }
            m.progress(if moves { n } else { 0 }, false);
            m.link_down(now, DOWN, orders);
            m.fenced(0, now, orders);
            let begins = m.wakes_at().filter(|_| m.phase() == Phase::Fencing).unwrap_or(now);
            longest = longest.max(begins - now);
            m.tick(0, begins, orders);
            let epoch = m.epoch();
            m.take(Control::Resume { epoch, accepted: 0 }, 0, begins, orders);
            m.take(Control::Ready { epoch }, 0, begins, orders);
        }
        (50 * 400, longest)
    };
    let (ended, longest) = breaks(false);
    assert!((5000..6000).contains(&ended) && (40..=100).contains(&longest), "{ended}, {longest}");
    assert_eq!(breaks(true), (50 * 400, 0));
}

/// Breaks the link whenever it has lived for `lived`, up to 400 times, while messages wait or none does. Returns how often
/// another link took its place, and the time without a link.
fn breaks_after(lived: u64, waits: bool) -> (u32, u64) {
    let (mut m, orders) = (Recovery::new(PATIENCE, DOWN), &mut Vec::new());
    let (mut now, mut links, mut without) = (0, 0, 0);
    while links < 400 {
        now += lived;
        m.progress(0, waits);
        m.link_down(now, DOWN, orders);
        m.fenced(0, now, orders);
        let begins = m.wakes_at().filter(|_| m.phase() == Phase::Fencing).unwrap_or(now);
        m.tick(0, begins, orders);
        if m.phase() == Phase::Ended(DOWN) {
            break;
        }
        without += begins - now;
        now = begins;
        let epoch = m.epoch();
        m.take(Control::Resume { epoch, accepted: 0 }, 0, now, orders);
        m.take(Control::Ready { epoch }, 0, now, orders);
        links += 1;
    }
    (links, without)
}

#[test]
fn p7_a_link_that_had_nothing_to_carry_and_lived_for_a_while_has_worked() {
    assert_eq!(breaks_after(100, false), (400, 0), "no pause");
}

#[test]
fn p7_links_that_carry_no_message_that_waits_are_attempts_of_one_recovery_however_long_each_lives() {
    for lived in [100, 1_000, PATIENCE.whole - 1] {
        let (links, without) = breaks_after(lived, true);
        assert!(links < 400 && without <= PATIENCE.whole, "{lived}: {links} links, {without} without one");
        // The limit is for the time without a link.
        assert!(
            without + PATIENCE.longest_pause >= PATIENCE.whole,
            "{lived}: {links} links, {without} without one"
        );
    }
    // A message may have been posted just before the break.
    assert_eq!(breaks_after(PATIENCE.whole, true), (400, 0));
}

#[test]
fn p7_the_time_for_which_a_process_was_stopped_does_not_count_for_the_limit() {
    let orders = &mut Vec::new();
    for fences in [false, true] {
        let mut m = Recovery::new(PATIENCE, DOWN);
        m.link_down(0, DOWN, orders);
        if !fences {
            m.fenced(0, 0, orders);
        }
        let woken = 50 * PATIENCE.whole;
        m.tick(0, woken, orders);
        m.fenced(0, woken, orders);
        m.tick(0, woken + PATIENCE.first_pause, orders);
        assert_eq!(m.phase(), Phase::Offered, "fences: {fences}");
        // From then on the limit holds.
        while let Some(at) = m.wakes_at() {
            m.tick(0, at, orders);
            m.fenced(0, at, orders);
            assert!(at <= woken + PATIENCE.whole);
        }
        assert_eq!(m.phase(), Phase::Ended(DOWN));
    }
}

#[test]
fn p7_the_cause_of_a_break_that_was_survived_is_not_that_of_a_later_break_at_the_peer() {
    let (mut m, orders) = (Recovery::new(PATIENCE, DOWN), &mut Vec::new());
    let of_peer = Status { rank: Some(1), detail: 9, ..DOWN };
    m.set_patience(PATIENCE, of_peer);
    let ours = Status { rank: Some(0), detail: 4, ..DOWN };
    m.link_down(0, ours, orders);
    m.fenced(0, 0, orders);
    m.take(Control::Resume { epoch: 1, accepted: 0 }, 0, 1, orders);
    m.take(Control::Ready { epoch: 1 }, 0, 2, orders);
    m.take(Control::Break { epoch: 1 }, 0, 1_000_000, orders);
    m.fenced(0, 1_000_000, orders);
    while let Some(at) = m.wakes_at() {
        m.tick(0, at, orders);
        m.fenced(0, at, orders);
    }
    assert_eq!(m.phase(), Phase::Ended(of_peer));
}

#[test]
fn p7_the_end_of_one_end_is_the_others() {
    let mut w = World::new(PATIENCE.whole);
    let aborted = Status::new(abi::PUSHGATE_ABORTED);
    w.ends[0].machine.abort(aborted, &mut w.orders);
    w.perform(0);
    w.deliver(1);
    assert_eq!(w.ends[1].machine.phase(), Phase::Ended(aborted));
}

proptest! {
    /// Links break at any time and control messages cross, are repeated and are lost: no end posts before its peer is
    /// fenced and ready, no message is accepted twice or out of order, and once faults cease both ends are live over
    /// one epoch.
    #[test]
    fn p6_p7_both_ends_meet_over_one_epoch(
        steps in prop::collection::vec((0u8..16, any::<u8>()), 0..600),
    ) {
        // Long enough for any number of attempts.
        let mut w = World::new(1 << 40);
        for (kind, r) in steps {
            let at = (r & 1) as usize;
            match kind {
                0..3 | 12.. => w.deliver(at),
                3 | 4 => w.pass(r as u64 >> 3),
                5 | 6 => w.post(at),
                7 | 8 => w.arrive(at),
                9 if r & 6 == 0 => w.break_link(at),
                // Repeated, after what was said later; or lost with its channel.
                10 => {
                    if let Some(control) = w.channels[at].front().copied() {
                        w.channels[at].push_back(control);
                    }
                }
                11 if r & 6 == 0 => w.channels[at].clear(),
                _ => {}
            }
        }
        for _ in 0..3000 {
            w.pass(5);
            for at in 0..2 {
                w.deliver(at);
                w.arrive(at);
            }
        }
        let [a, b] = w.ends.each_ref().map(|e| (e.machine.phase(), e.machine.epoch()));
        prop_assert_eq!(a.0, Phase::Live);
        prop_assert_eq!(a, b);
    }
}
