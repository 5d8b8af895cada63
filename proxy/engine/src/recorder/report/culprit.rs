//! The sentence about a queue pair: who waits for whom.

use super::{End, Who, plural, time};
use crate::recorder::view::{Missing, Phase, View};
use crate::status::status_text;

/// An engine that has not run for this long is late, nanoseconds. One that sleeps wakes ten times as often.
const LATE: u64 = 1_000_000_000;

/// A sentence, and whom it blames.
#[derive(Default)]
pub(super) struct Said {
    pub(super) text: String,
    /// The rank that is waited for, if one is.
    pub(super) blames: Option<u32>,
    /// For how long what the sentence is about has not moved, nanoseconds; 0 if nothing waits.
    pub(super) still: u64,
}

impl Said {
    fn nobody(text: String) -> Self {
        Said { text, ..Said::default() }
    }
}

/// Who waits for whom, by the ends that are at hand. What has moved within the last `least` nanoseconds is not stuck.
pub(super) fn sentence(ends: &[End<'_>], least: u64) -> Said {
    let first = engine_is_late(ends).or_else(|| has_ended(ends)).or_else(|| program_is_stopped(ends));
    if let Some(said) = first.or_else(|| copier_is_stopped(ends)).or_else(|| is_broken(ends)) {
        return said;
    }
    let who = [ends[0].own(), ends[0].peer()];
    // Both ends of a queue pair may have one rank: the ends stand in their order.
    let sides = [Some(&ends[0]), ends.get(1)];
    let flows = [0, 1].map(|from| Flow {
        from: who[from],
        to: who[1 - from],
        sender: sides[from],
        receiver: sides[1 - from],
    });
    let under_way: Vec<(Said, u64)> =
        flows.iter().filter_map(|flow| Some((flow.stuck()?, flow.still()))).collect();
    let stuck: Vec<&(Said, u64)> = under_way.iter().filter(|(_, still)| *still >= least).collect();
    if let Some((first, _)) = stuck.first() {
        let texts: Vec<_> = stuck
            .iter()
            .map(|(said, still)| format!("{} (nothing has moved for {})", said.text, time(*still)))
            .collect();
        let still = stuck.iter().map(|(_, still)| *still).max().unwrap_or(0);
        return Said { text: texts.join("; "), blames: first.blames, still };
    }
    if let Some(still) = under_way.iter().map(|(_, still)| *still).min() {
        return Said::nobody(format!("messages move, the last {} ago", time(still)));
    }
    if let Some(said) = flows.iter().find_map(Flow::waits_for_the_sender) {
        return said;
    }
    Said::nobody(match ends.len() {
        1 => format!("{} has nothing to send", who[0]),
        _ => format!("neither {} nor {} has anything to send", who[0], who[1]),
    })
}

/// An engine that does not run holds up everything else.
fn engine_is_late(ends: &[End<'_>]) -> Option<Said> {
    let late = |end: &&End| end.engine.ended || end.age(end.engine.ran) > LATE;
    // The one that was late first, for the other one may wait for it.
    let end = ends.iter().filter(late).max_by_key(|end| end.age(end.engine.ran))?;
    let (rank, still) = (end.own(), end.age(end.engine.ran));
    let said = |text| Some(Said { text, blames: Some(rank.rank), still });
    if end.engine.ended {
        return said(format!("{rank}'s engine has ended: its program is done, or the engine panicked"));
    }
    let why = match end.engine.state {
        Some('T') => " (process stopped: state T)".into(),
        Some('t') => " (process stopped by a debugger: state t)".into(),
        Some('D') => " (it waits in the kernel: state D)".into(),
        Some('Z' | 'X') => " (its process has ended)".into(),
        Some('R') => " (it gets no core, or a call of it does not end: state R)".into(),
        Some(state) => format!(" (it waits in a call: state {state})"),
        None => String::new(),
    };
    said(format!("{rank}'s engine has not run for {}{why}", time(still)))
}

/// How a process is stopped that is in this state, if it is.
fn stopped(state: Option<char>) -> Option<&'static str> {
    match state? {
        'T' => Some("is stopped: state T"),
        't' => Some("is stopped by a debugger: state t"),
        _ => None,
    }
}

/// A program that is stopped while the proxy's engine runs: the program takes nothing and posts nothing.
fn program_is_stopped(ends: &[End<'_>]) -> Option<Said> {
    ends.iter().find_map(|end| {
        let program = end.engine.program.as_ref()?;
        let (why, rank, pid) = (stopped(program.state)?, end.own(), program.pid);
        let text = format!("{rank}'s program (process {pid}) {why}");
        Some(Said { text, blames: Some(rank.rank), still: end.still() })
    })
}

/// A copier that is stopped: nothing is copied between GPU memory and windows for its ranks.
fn copier_is_stopped(ends: &[End<'_>]) -> Option<Said> {
    ends.iter().find_map(|end| {
        let copier = end.engine.copier.as_ref()?;
        let (why, rank, pid) = (stopped(copier.state)?, end.own(), copier.pid);
        let text = format!("the copier of {rank}'s GPU (process {pid}) {why}");
        Some(Said { text, blames: Some(rank.rank), still: end.still() })
    })
}

fn has_ended(ends: &[End<'_>]) -> Option<Said> {
    let ended = ends.iter().filter_map(|end| Some((end, end.last().view.status?)));
    // The cause is where it ended first.
    let since = |end: &End| {
        let first = end.qp.entries.iter().find(|entry| entry.view.status.is_some());
        first.map_or(0, |entry| end.age(entry.time))
    };
    let (end, status) = ended.max_by_key(|(end, _)| since(end))?;
    let at = format!("at {}, {} ago", end.own(), time(since(end)));
    let text = format!("the queue pair has ended {at}: {}", status_text(status));
    Some(Said { text, blames: status.rank, still: 0 })
}

/// A link that broke: the end that is furthest behind is waited for.
fn is_broken(ends: &[End<'_>]) -> Option<Said> {
    let phase = |end: &End| end.last().view.phase;
    let order = |phase| match phase {
        Phase::Fencing => 0,
        Phase::Offered => 1,
        Phase::Joining => 2,
        _ => 3,
    };
    let end = ends.iter().filter(|end| order(phase(end)) < 3).min_by_key(|end| order(phase(end)))?;
    let (rank, peer, still) = (end.own(), end.peer(), end.still());
    let since = time(still);
    let (text, blames) = match phase(end) {
        Phase::Fencing => {
            (format!("the link broke, and {rank} has been bringing it to its end for {since}"), rank)
        }
        Phase::Offered => (
            format!(
                "the link broke, and {rank} has waited for {since} that {peer} offers to resume: {peer} \
                 has not fenced its link, or cannot be reached"
            ),
            peer,
        ),
        _ => (format!("the link broke, and {rank} has been joining the next one for {since}"), rank),
    };
    Some(Said { text, blames: Some(blames.rank), still })
}

/// The messages of one direction, as far as their ends are at hand.
struct Flow<'a> {
    from: Who,
    to: Who,
    sender: Option<&'a End<'a>>,
    receiver: Option<&'a End<'a>>,
}

impl Flow<'_> {
    fn view<'e>(end: Option<&'e End<'_>>) -> Option<&'e View> {
        end.map(|end| &end.last().view)
    }

    /// For how long nothing of this direction has moved at the ends at hand, nanoseconds.
    fn still(&self) -> u64 {
        let sender = self.sender.map(|end| end.age(end.last().moved.sends));
        let receiver = self.receiver.map(|end| end.age(end.last().moved.receives));
        sender.into_iter().chain(receiver).min().unwrap_or(0)
    }

    /// A sentence that blames an end.
    fn blame(&self, who: Who, text: String) -> Option<Said> {
        Some(Said { text, blames: Some(who.rank), still: 0 })
    }

    /// What the messages of this direction wait for, if there are any.
    fn stuck(&self) -> Option<Said> {
        match Self::view(self.sender) {
            Some(sender) => self.stuck_by_sender(sender).or_else(|| self.stuck_at_receiver()),
            None => self.stuck_at_receiver(),
        }
    }

    fn stuck_by_sender(&self, sender: &View) -> Option<Said> {
        let (from, to, c) = (self.from, self.to, &sender.counts);
        match sender.missing {
            Missing::Receive => return self.no_receive_credit(sender),
            Missing::PostedReceive => {
                let n = c.released;
                let text = format!("no receive credit: {to} has posted no receive for message {n} of {from}");
                return self.blame(to, text);
            }
            Missing::Region => {
                let n = c.released;
                let text =
                    format!("{to} has not said whether message {n} of {from} may go out of its region");
                return self.blame(to, text);
            }
            _ => {}
        }
        let under_way = c.released.saturating_sub(c.peer_received);
        if under_way > 0 {
            return self.stuck_at_receiver().or_else(|| self.not_arrived(c.released, under_way));
        }
        let held = c.peer_received.saturating_sub(c.peer_freed);
        if held > 0 {
            return self.stuck_at_receiver().or_else(|| self.not_taken(held));
        }
        let waits = sender.pending() || c.posted > c.retired;
        waits.then(|| Said::nobody(format!("{from}'s next WQE waits for {}", sender.missing.name())))
    }

    /// Messages were released that the receiver has not got, or not said so.
    fn not_arrived(&self, released: u64, under_way: u64) -> Option<Said> {
        let (from, to, n) = (self.from, self.to, plural(under_way, "message"));
        match Self::view(self.receiver) {
            None => self.blame(
                to,
                format!(
                    "{to} has not received {n} that {from} released: its engine does not run, or the link is \
                     slow"
                ),
            ),
            Some(receiver) if receiver.counts.received >= released => Some(Said::nobody(format!(
                "{from} has not heard that {to} has its messages: the link is slow"
            ))),
            Some(_) => Some(Said::nobody(format!(
                "{n} of {from} have not arrived at {to}: the link is slow or has failed"
            ))),
        }
    }

    fn no_receive_credit(&self, sender: &View) -> Option<Said> {
        let (to, granted) = (self.to, sender.counts.peer_granted);
        let posts = self.receiver.map(|end| end.qp.about.posted_receives);
        let receives = plural(granted, "receive");
        let text = match (posts, self.stuck_at_receiver()) {
            _ if granted == 0 => format!("no receive credit: {to} has posted no receive"),
            (Some(false), Some(said)) => return Some(said),
            (Some(true), _) => {
                format!("no receive credit: {to} has posted {receives}, and messages have taken all of them")
            }
            // The sender alone can't tell a ring that is full from receives that are not posted.
            _ => format!(
                "no receive credit: messages have used all of the {receives} that {to} granted, and {to} takes \
                 no message: its kernel or program is slow"
            ),
        };
        self.blame(to, text)
    }

    /// What holds up messages that the receiver has accepted.
    fn stuck_at_receiver(&self) -> Option<Said> {
        let (receiver, to) = (Self::view(self.receiver)?, self.to);
        let c = &receiver.counts;
        if receiver.copies > 0 {
            let copies = match receiver.copies {
                1 => "1 copy of a message".into(),
                n => format!("{n} copies of messages"),
            };
            let copier = self.receiver.and_then(|end| end.engine.copier.as_ref());
            let slow = match copier {
                Some(copier) => format!("its device or its copier (process {}) is slow", copier.pid),
                None => "its device is slow".into(),
            };
            let text = format!("{copies} into memory of {to} did not end: {slow}");
            return self.blame(to, text);
        }
        let posts = self.receiver.is_some_and(|end| end.qp.about.posted_receives);
        if receiver.waiting && posts && receiver.unfilled() == 0 {
            let text = format!("a message has arrived for which {to} has posted no receive");
            return self.blame(to, text);
        }
        let untaken = c.shown.saturating_sub(c.taken);
        (untaken > 0 || receiver.waiting).then(|| self.not_taken(untaken.max(1)))?
    }

    fn not_taken(&self, messages: u64) -> Option<Said> {
        let (to, n) = (self.to, plural(messages, "message"));
        self.blame(to, format!("{to} has not taken {n} that arrived: its kernel or program is slow"))
    }

    /// The receiver has posted receives, and the sender sends nothing.
    fn waits_for_the_sender(&self) -> Option<Said> {
        let (from, to, end) = (self.from, self.to, self.receiver?);
        let unfilled = end.last().view.unfilled();
        if !end.qp.about.posted_receives || unfilled == 0 {
            return None;
        }
        let why = match self.sender {
            Some(_) => format!("{from} has nothing to send"),
            None => format!("{from} has nothing to send, or its messages do not arrive"),
        };
        let n = plural(unfilled, "receive");
        let text = format!("{to} has posted {n} that no message has filled: {why}");
        Some(Said { text, blames: Some(from.rank), still: self.still() })
    }
}
