//! Tests of two ends that meet, in virtual time. An offer's number travels both in its bytes and beside them, so a test
//! notices if the two come from different offers.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const LIMIT: u64 = 1000;
const MS: u64 = 1_000_000;
const GIVES_UP: Status = Status::new(abi::PUSHGATE_TIMED_OUT);
const ABORTED: Status = Status::new(abi::PUSHGATE_ABORTED);
const DOWN: Status = Status::new(abi::PUSHGATE_LINK_DOWN);

fn inc(n: u64) -> Incarnation {
    Incarnation::new(n).expect("not 0")
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// One call of a program: the machine, and what its events have done.
struct Call {
    machine: Connect<u64>,
    /// The offer that stands, and the peer's offer that this end is ready to receive from.
    offer: u64,
    ready_for: Option<u64>,
    /// While this end is live: its own offer and the peer's.
    live: Option<(u64, u64)>,
    ended: Option<Status>,
    /// A fence that is under way.
    fences: bool,
}

struct World {
    ends: [Call; 2],
    incarnations: [u64; 2],
    /// To each end.
    channels: [VecDeque<Frame<u64>>; 2],
    /// Numbers for offers.
    next: u64,
    now: u64,
    limit: u64,
    /// Frames may have been forged, so that nothing can be said of what an end believes.
    forged: bool,
}

fn offer(number: u64) -> Frame<u64> {
    Frame { bytes: number.to_le_bytes().to_vec(), along: number }
}

impl World {
    fn new(limit: u64) -> World {
        let call = |own, n| Call {
            machine: Connect::new(inc(own), offer(n), limit, GIVES_UP, 0),
            offer: n,
            ready_for: None,
            live: None,
            ended: None,
            fences: false,
        };
        let ends = [call(1, 1), call(1, 2)];
        let mut w = World {
            ends,
            incarnations: [1, 1],
            channels: Default::default(),
            next: 3,
            now: 0,
            limit,
            forged: false,
        };
        (0..2).for_each(|at| w.perform(at));
        w
    }

    fn perform(&mut self, at: usize) {
        while let Some(event) = self.ends[at].machine.poll() {
            let end = &mut self.ends[at];
            assert!(end.ended.is_none() || matches!(event, Event::Send(_)), "{event:?} after the end");
            match event {
                Event::Send(frame) => self.channels[1 - at].push_back(frame),
                Event::Fence => {
                    assert!(!end.fences, "a fence within a fence");
                    (end.fences, end.ready_for, end.live) = (true, None, None);
                }
                Event::Prepare { epoch, offer } => {
                    // A Prepare that was overtaken changes nothing, because its fence is still to come.
                    if !self.forged {
                        assert_eq!(
                            number(&offer.bytes, 0),
                            offer.along,
                            "the bytes of one offer with what travels beside another"
                        );
                    }
                    end.ready_for = Some(offer.along);
                    let places = [end.offer, offer.along].map(u64::to_le_bytes).concat();
                    end.machine.prepared(epoch, places, self.now);
                }
                Event::Go { places, accepted, .. } => {
                    if !self.forged {
                        let (theirs, ours) = (number(&places, 0), number(&places, 8));
                        assert_eq!(ours, end.offer, "the peer is ready for another offer of this end");
                        assert_eq!(
                            Some(theirs),
                            end.ready_for,
                            "this end is ready for another offer of the peer"
                        );
                        assert_eq!(accepted, 0);
                    }
                    assert!(end.live.is_none(), "went twice");
                    end.live = end.ready_for.map(|theirs| (end.offer, theirs));
                }
                Event::End(status) => (end.ended, end.live, end.fences) = (Some(status), None, false),
            }
        }
    }

    /// A call that has ended reads no more: what is there is for the program's next call.
    fn deliver(&mut self, at: usize) {
        if self.ends[at].ended.is_none()
            && let Some(frame) = self.channels[at].pop_front()
        {
            self.hand(at, frame);
        }
    }

    fn hand(&mut self, at: usize, frame: Frame<u64>) {
        let taken = self.ends[at].machine.take(frame, self.now);
        assert!(self.forged || taken.is_ok(), "{taken:?}");
        self.perform(at);
    }

    fn fenced(&mut self, at: usize) {
        if std::mem::take(&mut self.ends[at].fences) {
            let n = self.number();
            self.ends[at].offer = n;
            self.ends[at].machine.fenced(0, offer(n), self.now);
            self.perform(at);
        }
    }

    fn pass(&mut self, by: u64) {
        self.now += by;
        for at in 0..2 {
            self.ends[at].machine.tick(self.now);
            self.perform(at);
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The program's call fails, if it has not ended, and the program calls again.
    fn again(&mut self, at: usize) {
        self.ends[at].machine.abort(ABORTED);
        self.perform(at);
        self.incarnations[at] += 1;
        let n = self.number();
        self.ends[at] = Call {
            machine: Connect::new(inc(self.incarnations[at]), offer(n), self.limit, GIVES_UP, self.now),
            offer: n,
            ready_for: None,
            live: None,
            ended: None,
            fences: false,
        };
        self.perform(at);
    }

    /// Everything that is on its way arrives, fences end, and a little time passes.
    fn settle(&mut self) {
        for _ in 0..60 {
            let heard = |w: &Self, at: usize| w.channels[at].is_empty() || w.ends[at].ended.is_some();
            while !(0..2).all(|at| heard(self, at)) {
                (0..2).for_each(|at| self.deliver(at));
            }
            (0..2).for_each(|at| self.fenced(at));
            self.pass(LONGEST_PAUSE / 8);
        }
    }

    fn phases(&self) -> [Phase; 2] {
        self.ends.each_ref().map(|e| e.machine.phase())
    }

    fn both_live(&self) -> bool {
        let [a, b] = self.ends.each_ref().map(|e| e.live);
        a.is_some() && a.map(|(own, peer)| (peer, own)) == b
    }
}

#[test]
fn two_ends_meet_with_two_frames_each() {
    let mut w = World::new(LIMIT);
    assert_eq!(w.channels.each_ref().map(VecDeque::len), [1, 1]);
    (0..2).for_each(|at| w.deliver(at));
    assert_eq!(w.channels.each_ref().map(VecDeque::len), [1, 1]);
    (0..2).for_each(|at| w.deliver(at));
    assert_eq!(w.channels.each_ref().map(VecDeque::len), [0, 0]);
    assert!(w.both_live());
    assert_eq!(w.ends[0].machine.peer(), Some(inc(1)));
    assert_eq!(w.ends[0].machine.wakes_at(), None);
}

#[test]
fn a_ready_that_comes_before_the_offer_is_kept() {
    let mut w = World::new(LIMIT);
    w.deliver(1);
    let frames = &mut w.channels[0];
    assert_eq!(frames.len(), 2);
    frames.swap(0, 1);
    (0..2).for_each(|_| w.deliver(0));
    w.deliver(1);
    assert!(w.both_live());
}

#[test]
fn an_end_goes_live_only_when_its_own_program_is_ready_too() {
    let mut a: Connect<u64> = Connect::new(inc(7), offer(1), LIMIT, GIVES_UP, 0);
    a.take(resume(9, None, 0, 2), 0).unwrap();
    a.take(frame(Said::Ready, 0, 9, Some(7), b"there"), 0).unwrap();
    assert!(matches!(a.poll(), Some(Event::Send(_))));
    assert_eq!(a.poll(), Some(Event::Prepare { epoch: 0, offer: offer(2) }));
    assert_eq!(a.poll(), None);
    a.prepared(0, b"here".to_vec(), 0);
    assert_eq!(a.poll(), Some(Event::Send(frame(Said::Ready, 0, 7, Some(9), b"here"))));
    assert_eq!(a.poll(), Some(Event::Go { epoch: 0, places: b"there".to_vec(), accepted: 0 }));
}

#[test]
fn p6_a_program_that_gets_ready_slowly_uses_nothing_of_an_epoch_that_was_given_up() {
    let mut a: Connect<u64> = Connect::new(inc(1), offer(1), LIMIT, GIVES_UP, 0);
    a.take(resume(5, None, 0, 2), 0).unwrap();
    a.take(frame(Said::Ready, 0, 5, Some(1), b"old"), 0).unwrap();
    a.take(frame(Said::Break, 0, 5, Some(1), &[]), 0).unwrap();
    a.fenced(0, offer(3), 0);
    a.take(resume(5, Some(1), 1, 4), 0).unwrap();
    assert_eq!(a.phase(), Phase::Joining);
    drain(&mut a);
    a.prepared(0, b"old".to_vec(), 0);
    assert_eq!(drain(&mut a), [], "ready for an epoch that was given up");
    a.prepared(1, b"new".to_vec(), 0);
    assert_eq!(drain(&mut a), [Event::Send(frame(Said::Ready, 1, 1, Some(5), b"new"))]);
    a.take(frame(Said::Ready, 1, 5, Some(1), b"there"), 0).unwrap();
    assert_eq!(drain(&mut a), [Event::Go { epoch: 1, places: b"there".to_vec(), accepted: 0 }]);
}

fn frame(said: Said, epoch: u32, from: u64, to: Option<u64>, body: &[u8]) -> Frame<u64> {
    let mut bytes = Head { said, epoch, from: inc(from), to: to.map(inc) }.bytes();
    bytes.extend(body);
    Frame { bytes, along: 0 }
}

fn resume(from: u64, to: Option<u64>, epoch: u32, n: u64) -> Frame<u64> {
    Frame { along: n, ..frame(Said::Resume { accepted: 0 }, epoch, from, to, &n.to_le_bytes()) }
}

fn drain(c: &mut Connect<u64>) -> Vec<Event<u64>> {
    std::iter::from_fn(|| c.poll()).collect()
}

#[test]
fn p7_an_end_whose_peer_never_comes_ends_at_its_limit_and_says_so() {
    let mut w = World::new(LIMIT);
    w.channels = Default::default();
    assert_eq!(w.ends[0].machine.wakes_at(), Some(LIMIT));
    w.pass(LIMIT - 1);
    assert_eq!(w.phases(), [Phase::Offered; 2]);
    w.pass(1);
    assert_eq!(w.phases(), [Phase::Ended(GIVES_UP); 2]);
    assert_eq!(ended(&w.channels[0][0].bytes), Ok(Some((inc(1), GIVES_UP))));
    assert_eq!(w.ends[0].machine.wakes_at(), None);
}

#[test]
fn p7_a_peer_that_comes_at_the_last_moment_is_given_the_limit_once_more_and_only_once() {
    let mut w = World::new(LIMIT);
    w.pass(LIMIT - 1);
    w.deliver(0);
    assert_eq!(w.ends[0].machine.wakes_at(), Some(2 * LIMIT - 1));
    // The peer's next incarnations prolong nothing.
    w.pass(10);
    w.hand(0, resume(2, None, 0, 9));
    w.fenced(0);
    w.hand(0, resume(2, Some(1), 1, 10));
    assert_eq!(w.ends[0].machine.phase(), Phase::Joining);
    assert_eq!(w.ends[0].machine.wakes_at(), Some(2 * LIMIT - 1));
    w.pass(LIMIT);
    assert_eq!(w.ends[0].ended, Some(GIVES_UP));
}

#[test]
fn p7_a_peer_that_had_given_up_before_this_end_came_is_waited_for_again() {
    let mut a: Connect<u64> = Connect::new(inc(1), offer(1), LIMIT, GIVES_UP, 0);
    drain(&mut a);
    // Its offer is still there, and its end after it; it did not know of this end.
    a.take(resume(5, None, 0, 2), 0).unwrap();
    a.prepared(0, Vec::new(), 0);
    drain(&mut a);
    a.take(frame(Said::End(ABORTED), 0, 5, None, &[]), 0).unwrap();
    assert_eq!(drain(&mut a), [Event::Fence], "no incarnation is there to be told");
    a.fenced(0, offer(3), 0);
    assert_eq!(drain(&mut a), [Event::Send(resume(1, None, 1, 3))]);
    // What else it had said.
    a.take(frame(Said::Ready, 1, 5, Some(1), &[]), 0).unwrap();
    a.take(resume(5, None, 1, 2), 0).unwrap();
    assert_eq!(drain(&mut a), []);
    // The next one starts at the first epoch, and adopts this end's.
    a.take(resume(6, None, 0, 4), 0).unwrap();
    assert_eq!(drain(&mut a), [Event::Send(resume(1, Some(6), 1, 3))]);
    a.take(resume(6, Some(1), 1, 5), 0).unwrap();
    assert_eq!(drain(&mut a), [Event::Prepare { epoch: 1, offer: offer(5) }]);
}

#[test]
fn p7_a_peer_that_knew_of_this_end_and_ends_before_this_end_is_live_ends_it() {
    // What the peer had said before its END may have been dropped with it.
    for (knew, heard) in
        [(Some(1), true), (Some(1), false), (None, true), (Some(77), true), (Some(77), false)]
    {
        let mut a: Connect<u64> = Connect::new(inc(1), offer(1), LIMIT, GIVES_UP, 0);
        if heard {
            a.take(resume(5, None, 0, 2), 0).unwrap();
            a.prepared(0, Vec::new(), 0);
        }
        drain(&mut a);
        a.take(frame(Said::End(DOWN), 0, 5, knew, &[]), 0).unwrap();
        let ends = drain(&mut a).contains(&Event::End(DOWN));
        assert_eq!(ends, knew == Some(1), "{knew:?}, heard {heard}");
    }
}

#[test]
fn a_newer_incarnation_is_sent_the_offer_again_which_the_older_one_had_taken() {
    let mut a: Connect<u64> = Connect::new(inc(1), offer(1), LIMIT, GIVES_UP, 0);
    assert_eq!(drain(&mut a), [Event::Send(resume(1, None, 0, 1))]);
    // Its RESUME and its END were lost with its channel.
    a.take(frame(Said::Ready, 0, 5, Some(1), b"old"), 0).unwrap();
    assert_eq!(drain(&mut a), []);
    a.take(resume(6, None, 0, 4), 0).unwrap();
    let prepare = Event::Prepare { epoch: 0, offer: offer(4) };
    assert_eq!(drain(&mut a), [Event::Send(resume(1, Some(6), 0, 1)), prepare]);
    a.prepared(0, b"here".to_vec(), 0);
    assert_eq!(drain(&mut a), [Event::Send(frame(Said::Ready, 0, 1, Some(6), b"here"))]);
}

#[test]
fn p6_another_incarnation_of_the_peer_ends_an_end_that_is_live() {
    let mut w = World::new(LIMIT);
    w.settle();
    assert!(w.both_live());
    w.hand(0, resume(2, None, 0, 9));
    assert_eq!(w.ends[0].ended, Some(ABORTED));
    // The END is the older one's. The newer one waits for this end's next call.
    let (end, _) = Head::parse(&w.channels[1][0].bytes).unwrap();
    assert_eq!(end.to, Some(inc(1)));
    w.settle();
    assert_eq!(w.ends[1].ended, Some(ABORTED), "the incarnation that it was live with is told");
}

#[test]
fn p7_a_call_that_fails_when_the_peer_is_live_ends_the_peers_end() {
    let mut w = World::new(LIMIT);
    w.settle();
    w.ends[1].machine.abort(DOWN);
    w.perform(1);
    w.deliver(0);
    assert_eq!(w.ends[0].ended, Some(DOWN));
}

#[test]
fn p6_a_link_that_breaks_is_replaced_with_new_offers_at_both_ends() {
    let mut w = World::new(u64::MAX / 4);
    w.settle();
    let before = w.ends.each_ref().map(|e| e.live.unwrap());
    w.ends[0].machine.link_down(DOWN, w.now);
    w.perform(0);
    w.settle();
    assert!(w.both_live());
    for (before, end) in before.iter().zip(&w.ends) {
        assert!(end.live.is_some_and(|now| now.0 != before.0 && now.1 != before.1));
    }
}

#[test]
fn p8_a_frame_that_no_end_would_send_is_refused() {
    let mut w = World::new(LIMIT);
    let good = frame(Said::End(DOWN), 0, 5, None, &[]).bytes;
    let with = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let mut nobody = good.clone();
    nobody[5..13].fill(0);
    let mut ok = good.clone();
    ok[21..].fill(0);
    for (bytes, expected) in [
        (Vec::new(), Malformed::Short { bytes: 0, least: 21 }),
        (good[..20].to_vec(), Malformed::Short { bytes: 20, least: 21 }),
        (good[..28].to_vec(), Malformed::Short { bytes: 28, least: 29 }),
        (with(0, 0), Malformed::Kind(0)),
        (with(0, 5), Malformed::Kind(5)),
        (nobody, Malformed::Unnamed),
        (frame(Said::Ready, 0, 5, None, &[]).bytes, Malformed::Unnamed),
        (ok, Malformed::NoStatus),
        (with(4, 1), Malformed::Epoch { epoch: 1 << 24, ours: 0 }),
        (frame(Said::Break, u32::MAX, 5, None, &[]).bytes, Malformed::Epoch { epoch: u32::MAX, ours: 0 }),
        (frame(Said::Resume { accepted: 7 }, 0, 5, None, &[]).bytes, Malformed::Accepted(7)),
    ] {
        assert_eq!(w.ends[0].machine.take(Frame { bytes, along: 0 }, 0), Err(expected));
    }
    w.settle();
    assert!(w.both_live());
}

#[test]
fn p8_a_peer_that_raises_the_epoch_with_each_frame_makes_no_epoch_overflow() {
    let mut a: Connect<u64> = Connect::new(inc(1), offer(1), u64::MAX, GIVES_UP, 0);
    // One frame away from the last epoch.
    a.recovery.take(Control::Break { epoch: LAST_EPOCH - 1 }, 0, 0, &mut a.orders);
    a.perform();
    a.take(frame(Said::Break, LAST_EPOCH, 5, None, &[]), 0).unwrap();
    let next = LAST_EPOCH + 1;
    let refused = Malformed::Epoch { epoch: next, ours: next };
    assert_eq!(a.take(frame(Said::Break, next, 5, None, &[]), 0), Err(refused));
    a.fenced(0, offer(2), LONGEST_PAUSE);
    assert_eq!(a.phase(), Phase::Offered);
    a.link_down(DOWN, LONGEST_PAUSE);
    assert_eq!((a.phase(), a.recovery.epoch()), (Phase::Fencing, next + 1));
}

#[test]
fn what_was_offered_is_let_go_of_when_both_are_ready() {
    let fds = std::sync::Arc::new(());
    let ours = Frame { bytes: Vec::new(), along: Some(fds.clone()) };
    let mut a = Connect::new(inc(1), ours, LIMIT, GIVES_UP, 0);
    let theirs = |said| Frame { bytes: frame(said, 0, 5, Some(1), &[]).bytes, along: None };
    a.take(theirs(Said::Resume { accepted: 0 }), 0).unwrap();
    a.take(theirs(Said::Ready), 0).unwrap();
    a.prepared(0, Vec::new(), 0);
    while a.poll().is_some() {}
    assert_eq!((a.phase(), std::sync::Arc::strong_count(&fds)), (Phase::Live, 1));
}

/// The layout that docs/protocol.md has.
#[test]
fn frames_are_the_bytes_that_the_protocol_has() {
    let mut head = vec![1, 4, 3, 2, 1];
    head.extend(0x0102_0304_0506_0708u64.to_le_bytes());
    head.extend(9u64.to_le_bytes());
    let said = [
        (Said::Resume { accepted: 5 }, 1, &[5, 0, 0, 0, 0, 0, 0, 0][..]),
        (Said::Ready, 2, &[]),
        (Said::Break, 3, &[]),
        (Said::End(Status { rank: Some(6), ..DOWN }), 4, &[9, 6, 0, 0, 0, 0, 0, 0]),
    ];
    for (said, kind, word) in said {
        head[0] = kind;
        let bytes = frame(said, 0x0102_0304, 0x0102_0304_0506_0708, Some(9), b"rest").bytes;
        assert_eq!(bytes, [&head[..], word, b"rest"].concat(), "{said:?}");
        let (parsed, rest) = Head::parse(&bytes).unwrap();
        assert_eq!((parsed.said, parsed.epoch, rest), (said, 0x0102_0304, &b"rest"[..]));
    }
}

#[test]
fn a_frame_names_its_sender_and_an_end_its_status() {
    let bytes = end(inc(7), Some(inc(9)), DOWN);
    assert_eq!((sender(&bytes), ended(&bytes)), (Some(inc(7)), Ok(Some((inc(7), DOWN)))));
    let bytes = resume(7, None, 0, 3).bytes;
    assert_eq!((sender(&bytes), ended(&bytes)), (Some(inc(7)), Ok(None)));
    assert_eq!(sender(b"garbage"), None);
    assert!(ended(&[4; 21]).is_err());
    // A code that ends no queue pair counts as *aborted*.
    let strange = end(inc(7), None, Status::new(99));
    assert_eq!(ended(&strange), Ok(Some((inc(7), ABORTED))));
}

/// The steps of a test: each a kind, and a number that the kind reads.
type Steps = Vec<(u8, u8)>;

fn steps() -> impl Strategy<Value = Steps> {
    prop::collection::vec((0u8..16, any::<u8>()), 0..400)
}

proptest! {
    /// Over a channel that keeps frames whole and in order, calls fail and are repeated at any time and links break: each
    /// end goes live only over the offers that its peer goes live over, and once no call fails any more both are live.
    #[test]
    fn p6_p7_calls_that_are_repeated_at_any_time_meet(steps in steps()) {
        let mut w = World::new(u64::MAX / 4);
        for (kind, r) in steps {
            let at = (r & 1) as usize;
            match kind {
                0..8 => w.deliver(at),
                8 | 9 => w.pass((r as u64 >> 1) * MS),
                10 | 11 => w.fenced(at),
                12 | 13 => w.again(at),
                14 if w.ends[at].live.is_some() => {
                    w.ends[at].machine.link_down(DOWN, w.now);
                    w.perform(at);
                }
                _ => {}
            }
        }
        // A program whose call has ended calls again, as long as it must.
        for _ in 0..8 {
            w.settle();
            if w.both_live() {
                break;
            }
            let phases = w.phases();
            let at = (0..2).find(|at| matches!(phases[*at], Phase::Ended(_)));
            w.again(at.unwrap_or_else(|| panic!("neither is live nor ended: {phases:?}")));
        }
        prop_assert!(w.both_live(), "{:?}", w.phases());
    }

    /// Over a channel that loses, repeats and reorders frames: no end goes live over anything but one offer of each
    /// end, and within the limits each end is live or has ended.
    #[test]
    fn p6_p7_over_a_channel_that_loses_and_repeats_frames_each_end_goes_live_or_ends(steps in steps()) {
        let mut w = World::new(500 * MS);
        for (kind, r) in steps {
            let (at, n) = ((r & 1) as usize, (r >> 1) as usize);
            let length = w.channels[at].len().max(1);
            match kind {
                0..6 => w.deliver(at),
                6 | 7 => w.pass(n as u64 * MS),
                8 | 9 => w.fenced(at),
                10 => w.again(at),
                11 => drop(w.channels[at].remove(n % length)),
                12 => {
                    if let Some(frame) = w.channels[at].get(n % length).cloned() {
                        w.channels[at].push_back(frame);
                    }
                }
                13 => {
                    if let Some(frame) = w.channels[at].remove(n % length) {
                        w.channels[at].push_back(frame);
                    }
                }
                14 if n == 0 => w.channels[at].clear(),
                15 if w.ends[at].live.is_some() => {
                    w.ends[at].machine.link_down(DOWN, w.now);
                    w.perform(at);
                }
                _ => {}
            }
        }
        w.settle();
        for (end, phase) in w.ends.iter().zip(w.phases()) {
            prop_assert!(end.live.is_some() || end.ended.is_some(), "{:?}", phase);
        }
    }

    /// Frames are cut off, changed and made up: no frame makes an end panic or wait beyond its limits, or keep more than
    /// the caller is about to take.
    #[test]
    fn p8_forged_frames_end_a_session_at_worst(steps in steps(), bytes in prop::collection::vec(any::<u8>(), 64)) {
        let mut w = World::new(500 * MS);
        w.forged = true;
        for (kind, r) in steps {
            let (at, n) = ((r & 1) as usize, (r >> 1) as usize);
            match kind {
                0..3 => w.deliver(at),
                3 => w.pass(n as u64 * MS),
                4 | 5 => w.fenced(at),
                // Cut off, and one byte changed.
                6 => {
                    if let Some(mut frame) = w.channels[at].pop_front() {
                        frame.bytes.truncate(n);
                        w.hand(at, frame);
                    }
                }
                7 => {
                    if let Some(mut frame) = w.channels[at].pop_front() {
                        let i = n % frame.bytes.len();
                        frame.bytes[i] ^= bytes[n % bytes.len()];
                        w.hand(at, frame);
                    }
                }
                8 => w.hand(at, Frame { bytes: bytes[..n % bytes.len()].to_vec(), along: 0 }),
                _ => {
                    let byte = |i: usize| bytes[(n + i) % bytes.len()];
                    let said = match byte(0) % 16 {
                        0..7 => Said::Resume { accepted: 0 },
                        7..11 => Said::Ready,
                        11..15 => Said::Break,
                        _ => Said::End(DOWN),
                    };
                    let to = (said == Said::Ready || byte(1) & 1 == 0).then_some(1);
                    w.hand(at, frame(said, byte(2) as u32 % 8, byte(3) as u64 % 4 + 1, to, &bytes[..16]));
                }
            }
        }
        w.settle();
        for (end, phase) in w.ends.iter().zip(w.phases()) {
            prop_assert!(matches!(phase, Phase::Live | Phase::Ended(_)), "{:?}", phase);
            prop_assert!(end.machine.events.is_empty());
        }
    }
}
