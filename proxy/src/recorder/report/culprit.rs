//! The sentence about a queue pair: who waits for whom.

use super::{End, plural, time};
use crate::recorder::view::{Missing, Phase, View};
use crate::status::status_text;

/// An engine that has not run for this long is late, nanoseconds. One that sleeps wakes ten times as often.
const LATE: u64 = 1_000_000_000;

/// Who waits for whom, by the ends that are at hand. What has moved within the last `least` nanoseconds is not stuck.
pub(super) fn sentence(ends: &[End<'_>], least: u64) -> String {
    if let Some(said) = engine_is_late(ends).or_else(|| has_ended(ends)).or_else(|| is_broken(ends)) {
        return said;
    }
    let about = &ends[0].qp.about;
    let ranks = [about.rank, about.peer];
    // Both ends of a queue pair may have one rank: the ends stand in their order.
    let sides = [Some(&ends[0]), ends.get(1)];
    let flows = [0, 1].map(|from| Flow {
        from: ranks[from],
        to: ranks[1 - from],
        sender: sides[from],
        receiver: sides[1 - from],
    });
    let still = ends.iter().map(|end| end.age(end.last().moved)).min().unwrap_or(0);
    let stuck: Vec<String> = flows.iter().filter_map(Flow::stuck).collect();
    if !stuck.is_empty() && still < least {
        return format!("messages move, the last {} ago", time(still));
    }
    if !stuck.is_empty() {
        return format!("{} (nothing has moved for {})", stuck.join("; "), time(still));
    }
    if let Some(said) = flows.iter().find_map(Flow::waits_for_the_sender) {
        return said;
    }
    match ends.len() {
        1 => format!("rank {} has nothing to send", ranks[0]),
        _ => format!("neither rank {} nor rank {} has anything to send", ranks[0], ranks[1]),
    }
}

/// An engine that does not run holds up everything else.
fn engine_is_late(ends: &[End<'_>]) -> Option<String> {
    let late = |end: &&End| end.engine.ended || end.age(end.engine.ran) > LATE;
    // The one that was late first, for the other one may wait for it.
    let end = ends.iter().filter(late).max_by_key(|end| end.age(end.engine.ran))?;
    let rank = end.rank();
    if end.engine.ended {
        return Some(format!("rank {rank}'s engine has ended: its program is done, or the engine panicked"));
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
    Some(format!("rank {rank}'s engine has not run for {}{why}", time(end.age(end.engine.ran))))
}

fn has_ended(ends: &[End<'_>]) -> Option<String> {
    let ended = ends.iter().filter_map(|end| Some((end, end.last().view.status?)));
    // The cause is where it ended first.
    let since = |end: &End| {
        let first = end.qp.entries.iter().find(|entry| entry.view.status.is_some());
        first.map_or(0, |entry| end.age(entry.time))
    };
    let (end, status) = ended.max_by_key(|(end, _)| since(end))?;
    let at = format!("at rank {}, {} ago", end.rank(), time(since(end)));
    Some(format!("the queue pair has ended {at}: {}", status_text(status)))
}

/// A link that broke: the end that is furthest behind is waited for.
fn is_broken(ends: &[End<'_>]) -> Option<String> {
    let phase = |end: &End| end.last().view.phase;
    let order = |phase| match phase {
        Phase::Fencing => 0,
        Phase::Offered => 1,
        Phase::Joining => 2,
        _ => 3,
    };
    let end = ends.iter().filter(|end| order(phase(end)) < 3).min_by_key(|end| order(phase(end)))?;
    let (rank, peer) = (end.rank(), end.qp.about.peer);
    let for_ = time(end.age(end.last().moved));
    Some(match phase(end) {
        Phase::Fencing => {
            format!("the link broke, and rank {rank} has been bringing it to its end for {for_}")
        }
        Phase::Offered => {
            format!(
                "the link broke, and rank {rank} has waited for {for_} that rank {peer} offers to resume: rank {peer} \
                     has not fenced its link, or cannot be reached"
            )
        }
        _ => format!("the link broke, and rank {rank} has been joining the next one for {for_}"),
    })
}

/// The messages of one direction, as far as their ends are at hand.
struct Flow<'a> {
    from: u32,
    to: u32,
    sender: Option<&'a End<'a>>,
    receiver: Option<&'a End<'a>>,
}

impl Flow<'_> {
    fn view<'e>(end: Option<&'e End<'_>>) -> Option<&'e View> {
        end.map(|end| &end.last().view)
    }

    /// What the messages of this direction wait for, if there are any.
    fn stuck(&self) -> Option<String> {
        match Self::view(self.sender) {
            Some(sender) => self.stuck_by_sender(sender).or_else(|| self.stuck_at_receiver()),
            None => self.stuck_at_receiver(),
        }
    }

    fn stuck_by_sender(&self, sender: &View) -> Option<String> {
        let (from, to, c) = (self.from, self.to, &sender.counts);
        match sender.missing {
            Missing::Receive => return Some(self.no_receive_credit(sender)),
            Missing::PostedReceive => {
                return Some(format!(
                    "no receive credit: rank {to} has posted no receive for message {} of rank {from}",
                    c.released
                ));
            }
            Missing::Region => {
                return Some(format!(
                    "rank {to} has not said whether message {} of rank {from} may go out of its region",
                    c.released
                ));
            }
            _ => {}
        }
        let under_way = c.released.saturating_sub(c.peer_received);
        if under_way > 0 {
            let n = plural(under_way, "message");
            if let Some(said) = self.stuck_at_receiver() {
                return Some(said);
            }
            return Some(match Self::view(self.receiver) {
                None => format!(
                    "rank {to} has not received {n} that rank {from} released: its engine does not run, or the link is \
                     slow"
                ),
                Some(receiver) if receiver.counts.received >= c.released => {
                    format!("rank {from} has not heard that rank {to} has its messages: the link is slow")
                }
                Some(_) => {
                    format!(
                        "{n} of rank {from} have not arrived at rank {to}: the link is slow or has failed"
                    )
                }
            });
        }
        let held = c.peer_received.saturating_sub(c.peer_freed);
        if held > 0 {
            return Some(self.stuck_at_receiver().unwrap_or_else(|| not_taken(to, held)));
        }
        (sender.pending() || c.posted > c.retired)
            .then(|| format!("rank {from}'s next WQE waits for {}", sender.missing.name()))
    }

    fn no_receive_credit(&self, sender: &View) -> String {
        let (to, granted) = (self.to, sender.counts.peer_granted);
        let posts = self.receiver.map(|end| end.qp.about.posted_receives);
        if granted == 0 {
            return format!("no receive credit: rank {to} has posted no receive");
        }
        match (posts, self.stuck_at_receiver()) {
            (Some(false), Some(said)) => said,
            (Some(true), _) => format!(
                "no receive credit: rank {to} has posted {}, and messages have taken all of them",
                plural(granted, "receive")
            ),
            // The sender alone can't tell a ring that is full from receives that are not posted.
            _ => format!(
                "no receive credit: messages have used all of the {} that rank {to} granted, and rank {to} takes no \
                 message: its kernel or program is slow",
                plural(granted, "receive")
            ),
        }
    }

    /// What holds up messages that the receiver has accepted.
    fn stuck_at_receiver(&self) -> Option<String> {
        let (receiver, to) = (Self::view(self.receiver)?, self.to);
        let c = &receiver.counts;
        if receiver.copies > 0 {
            let copies = match receiver.copies {
                1 => "1 copy of a message".into(),
                n => format!("{n} copies of messages"),
            };
            return Some(format!("{copies} into memory of rank {to} did not end: its device is slow"));
        }
        let posts = self.receiver.is_some_and(|end| end.qp.about.posted_receives);
        if receiver.waiting && posts && receiver.unfilled() == 0 {
            return Some(format!("a message has arrived for which rank {to} has posted no receive"));
        }
        let untaken = c.shown.saturating_sub(c.taken);
        (untaken > 0 || receiver.waiting).then(|| not_taken(to, untaken.max(1)))
    }

    /// The receiver has posted receives, and the sender sends nothing.
    fn waits_for_the_sender(&self) -> Option<String> {
        let (from, to, end) = (self.from, self.to, self.receiver?);
        let unfilled = end.last().view.unfilled();
        if !end.qp.about.posted_receives || unfilled == 0 {
            return None;
        }
        let why = match self.sender {
            Some(_) => format!("rank {from} has nothing to send"),
            None => format!("rank {from} has nothing to send, or its messages do not arrive"),
        };
        Some(format!(
            "rank {to} has posted {} that no message has filled: {why}",
            plural(unfilled, "receive")
        ))
    }
}

fn not_taken(rank: u32, messages: u64) -> String {
    format!(
        "rank {rank} has not taken {} that arrived: its kernel or program is slow",
        plural(messages, "message")
    )
}
